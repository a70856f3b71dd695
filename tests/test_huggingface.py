"""Weights of others: transformers' GPT-2, nanoGPT's ckpt.pt and data folders. What fits gives the same logits; what does not is said."""
import contextlib
import json
import math
import os
import re
import shutil
import zipfile
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import analyze
import compare
import export
import extend
import prepare
import sample
from exported import call, greedy, refused, save, theirs
from model import GPT, GPTConfig
from nanope import checkpoint, huggingface, nanogpt
from nanope.files import read_json, write_json
from nanope.loader import Data
from nanope.tokenizer import VOCAB_BPE, GPT2Tokenizer
from runs import ROOT, train
from small import build, close

transformers = pytest.importorskip('transformers')
EVIL = b"cos\nsystem\n(S'touch sentinel'\ntR."  # unpickled, it makes a file
TEXT = (ROOT / 'data/shakespeare/plays/macbeth.txt').read_text('utf-8')[:12000]


@pytest.fixture(scope='module')
def gpt2(tmp_path_factory):
    """(folder, model) of a small GPT-2 of transformers' own, with large weights."""
    folder = tmp_path_factory.mktemp('hf') / 'small'
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_positions=32, n_embd=16, n_layer=2, n_head=4)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(parameter.numel()))
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    """A folder with data/bpe/, and nanoGPT's two kinds of data of the same text in ng/bpe and ng/char."""
    folder = tmp_path_factory.mktemp('bpe')
    (folder / 'text.txt').write_text(TEXT, encoding='utf-8')
    with contextlib.chdir(folder):
        assert call(prepare, 'bpe', '--input=text.txt', '--tokenizer=gpt2').code == 0
    chars = {char: i for i, char in enumerate(sorted(set(TEXT)))}
    for kind, ids in (('bpe', GPT2Tokenizer().encode(TEXT)), ('char', np.array([chars[char] for char in TEXT]))):
        (folder / 'ng' / kind).mkdir(parents=True)
        n = int(0.9 * len(ids))
        for split, part in (('train', ids[:n]), ('val', ids[n:])):
            part.astype(np.uint16).tofile(folder / 'ng' / kind / f'{split}.bin')
    (folder / 'ng/char/meta.pkl').write_bytes(EVIL)
    return folder


@pytest.fixture
def here(data, gpt2, tmp_path, monkeypatch):
    """A folder of the test's own with data/bpe, ng/ and small/, the GPT-2."""
    for name in ('data', 'ng'):
        shutil.copytree(data / name, tmp_path / name)
    shutil.copytree(gpt2[0], tmp_path / 'small')
    shutil.copy(data / 'text.txt', tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def some(size, length=32):
    return torch.randint(size, (2, length), generator=torch.Generator().manual_seed(0))


def edit(folder, tensors=lambda t: t, **settings):
    """Change a folder of transformers."""
    path = os.path.join(folder, 'model.safetensors')
    save_file({name: t.contiguous() for name, t in tensors(load_file(path)).items()}, path)
    write_json(os.path.join(folder, 'config.json'), {**read_json(os.path.join(folder, 'config.json')), **settings})


# ---- GPT-2 of transformers -------------------------------------------------------------------------------------------

@pytest.mark.parametrize('how', ['whole', 'bare', 'shards', 'old'])
def test_logits_equal_those_of_transformers(gpt2, tmp_path, how):
    folder, other = gpt2
    if how == 'bare':
        other.transformer.save_pretrained(tmp_path / 'm')         # GPT2Model: names without 'transformer.'
        assert 'wte.weight' in load_file(tmp_path / 'm/model.safetensors')
    elif how == 'shards':
        other.save_pretrained(tmp_path / 'm', max_shard_size='20KB')
        assert len(list((tmp_path / 'm').glob('*.safetensors'))) > 1
    else:
        shutil.copytree(folder, tmp_path / 'm')
    if how == 'old':                                              # what old versions stored besides
        masks = {'transformer.h.0.attn.bias': torch.ones(1, 1, 32, 32), 'transformer.h.1.attn.masked_bias': torch.tensor(-1e4)}
        edit(tmp_path / 'm', lambda t: {**t, **masks, 'lm_head.weight': t['transformer.wte.weight'].clone()})
    model, tokenizer, found = checkpoint.load_model(str(tmp_path / 'm'))
    idx = some(50257)
    close(model(idx), other(idx).logits)
    assert tokenizer.kind == 'gpt2' and found.step == 0 and model.config.dropout == 0.1
    assert torch.equal(other.generate(idx[:, :5], max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0),
                       greedy(model, idx[:, :5], 20))


def test_half_precision_is_read_exactly(here, gpt2):
    edit(here / 'small', lambda t: {name: tensor.bfloat16() for name, tensor in t.items()})
    weights = checkpoint.load('small').weights
    assert all(torch.equal(weights[name], parameter.bfloat16().float()) for name, parameter in (
        ('transformer.wte.weight', gpt2[1].transformer.wte.weight), ('transformer.wpe.weight', gpt2[1].transformer.wpe.weight)))


@pytest.mark.parametrize('wpe', ['learned', 'rope', 'sinusoidal', 'none', 'alibi'])
def test_a_run_starts_from_the_weights_under_any_scheme(here, gpt2, wpe):
    how = dict(dataset='bpe', init_from='small', learning_rate=0.0, min_lr=0.0, max_iters=1, wpe=wpe, block_size=32, batch_size=1,
               vocab_multiple=128, eval_tokens=64)
    done = train(here, **how)
    assert done.code == 0, done.text
    assert ('wpe=' + wpe + ': all weights of small but its position table' in done.text) == (wpe != 'learned')
    found = checkpoint.load('out/a')
    mine, own = found.tensors('model'), dict(gpt2[1].named_parameters())
    assert mine['transformer.wte.weight'].shape == (50304, 16) and not mine['transformer.wte.weight'][50257:].any()
    assert torch.equal(mine['transformer.wte.weight'][:50257], own['transformer.wte.weight'])
    assert torch.equal(mine['transformer.h.1.mlp.c_fc.weight'], own['transformer.h.1.mlp.c_fc.weight'].t())
    assert ('transformer.wpe.weight' in mine) == (wpe == 'learned') and found.state['origin'] == {'run': 'small', 'step': 0}
    shutil.rmtree('small')                                        # to go on, it is not needed any more
    assert train(here, **{**how, 'init_from': 'resume', 'max_iters': 2, 'allow_change': 'true'}).code == 0


def test_a_shorter_context_takes_the_first_rows_and_a_longer_one_is_not_made_up(here, gpt2):
    how = dict(dataset='bpe', init_from='small', learning_rate=0.0, min_lr=0.0, max_iters=1, batch_size=1, eval_tokens=64)
    for asked, given in ((16, 16), (64, 32)):
        done = train(here, **how, block_size=asked, out_dir=f'out/{asked}')
        assert done.code == 0 and f'block_size={given}: the first of the 32 rows of the position table in small' in done.text
        table = checkpoint.load(f'out/{asked}').tensors('model')['transformer.wpe.weight']
        assert torch.equal(table, gpt2[1].transformer.wpe.weight[:given])
    assert train(here, **how, block_size=64, wpe='none', out_dir='out/none').code == 0  # without a table any length will do
    assert checkpoint.load('out/none').state['config']['block_size'] == 64


def test_every_script_takes_it(here):
    done = call(sample, '--out_dir=small', '--start=O', '--max_new_tokens=5', '--device=cpu')
    assert done.code == 0 and 'small, step 0, 81' in done.err and 'position table (learned) 512 ' in done.err
    with mock.patch.object(analyze, 'draw', lambda *_: None):
        assert 'small: position table, 32 × 16' in call(analyze, 'small', '--to=out/an').out
    assert train(here, dataset='bpe', init_from='small', block_size=16, max_iters=1, batch_size=1, eval_tokens=64).code == 0
    few = ('--to=out/cmp', '--trials=0', '--context_tokens=0', '--eval_tokens=64', '--device=cpu')
    done = call(compare, 'small', 'out/a', *few)
    assert done.code == 0 and 'small' in done.out, done.err
    refused(call(compare, 'small', *few), 'small does not say what it was trained on', '--dataset=NAME')
    assert call(compare, 'small', '--dataset=bpe', *few).code == 0
    refused(call(compare, 'small', 'out/a', '--extend=hold', *few), 'small is no run folder', 'python extend.py small')
    done = call(extend, 'small', '--block_size=40', '--method=hold', '--out_dir=out/longer')
    assert done.code == 0 and checkpoint.load_model('out/longer')[0].config.block_size == 40, done.err
    done = call(export, 'small', '--to=again')
    assert done.code == 0 and load_file('again/model.safetensors').keys() == load_file('small/model.safetensors').keys()
    for name, tensor in load_file('again/model.safetensors').items():
        assert torch.equal(tensor, load_file('small/model.safetensors')[name])


@pytest.mark.parametrize('settings, words', [
    (dict(activation_function='relu', layer_norm_epsilon=1e-6, n_inner=100),
     ["activation_function='relu' instead of 'gelu_new'", 'layer_norm_epsilon=1e-06', 'n_inner=100 instead of 4 times n_embd']),
    (dict(scale_attn_by_inverse_layer_idx=True, tie_word_embeddings=False), ['scale_attn_by_inverse_layer_idx', 'tie_word_embeddings']),
    (dict(vocab_size=50300, n_head=None), ['vocab_size=50300', 'n_head=None instead of a number']),
    (dict(n_head=5), ['n_embd must be a multiple of n_head']), (dict(n_layer=10**9), ['too few for n_layer']),
    (dict(n_layer=1), ['transformer.h.1.attn.c_attn.bias has no place']), (dict(n_layer=3), ['transformer.h.2.ln_1.weight is missing']),
    (dict(n_positions=16), ['transformer.wpe.weight has shape (32, 16)']),
    (dict(model_type='llama'), ['small holds a llama model', 'what can be read is gpt2'])])
def test_what_does_not_fit_is_listed(here, settings, words):
    edit('small', **settings)
    refused(call(sample, '--out_dir=small'), 'small', *words)
    done = train(here, dataset='bpe', init_from='small')
    assert done.code == 2 and all(word in done.text for word in words) and not os.path.exists('out/a')


@pytest.mark.parametrize('tensors, words', [
    (lambda t: {**t, 'transformer.h.0.extra': torch.ones(2)}, ['transformer.h.0.extra has no place']),
    (lambda t: {n: x for n, x in t.items() if 'ln_f' not in n}, ['ln_f.weight is missing', 'ln_f.bias is missing']),
    (lambda t: {n: x[:3] if 'wte' in n else x for n, x in t.items()}, ['transformer.wte.weight has shape (3, 16)']),
    (lambda t: {n: x[0, 0] if 'wte' in n else x for n, x in t.items()}, ['transformer.wte.weight has shape ()']),
    (lambda t: {**t, 'lm_head.weight': t['transformer.wte.weight'] + 1}, ['lm_head.weight is not the token embeddings']),
    (lambda t: {n: x.t() if n.endswith('c_attn.weight') else x for n, x in t.items()}, ['h.0.attn.c_attn.weight has shape (48, 16)'])])
def test_tensors_that_do_not_fit_are_listed(here, tensors, words):
    edit('small', tensors)
    refused(call(sample, '--out_dir=small'), 'small does not fit', *words)


def test_files_that_are_missing_or_broken(here):
    (here / 'small/merges.txt').write_text('#version: 0.2\na b\n')
    refused(call(sample, '--out_dir=small'), "a tokenizer with other merges than GPT-2's")
    for odd in ({'model': [1]}, {'model': {'merges': 7}}, {'model': {'merges': [1, [2]]}}):
        (here / 'small/tokenizer.json').write_text(json.dumps(odd))
        refused(call(sample, '--out_dir=small'), "a tokenizer with other merges than GPT-2's")
    os.remove('small/tokenizer.json')
    shutil.copy(VOCAB_BPE, here / 'small/merges.txt')
    assert call(sample, '--out_dir=small', '--max_new_tokens=1', '--device=cpu').code == 0
    (here / 'small/model.safetensors').write_bytes(b'no tensors')
    refused(call(sample, '--out_dir=small'), 'not a readable Hugging Face folder')
    os.rename('small/model.safetensors', 'small/pytorch_model.bin')
    refused(call(sample, '--out_dir=small'), 'small lacks a file: only safetensors are read', 'save_pretrained')
    (here / 'small/config.json').write_text('[1]')
    refused(call(sample, '--out_dir=small'), 'config.json is not a JSON object')


# ---- the hub ---------------------------------------------------------------------------------------------------------

def test_without_a_network_one_line_says_what_to_download_and_where_to_put_it(here, monkeypatch):
    import huggingface_hub
    monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_CACHE', str(here / 'cache'))
    monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_OFFLINE', True)
    for name in ('gpt2', 'gpt2-xl'):
        refused(call(sample, f'--out_dir={name}'), f'could not download {name} (', 'config.json and model.safetensors',
                f'https://huggingface.co/openai-community/{name} ', f'give that instead of {name}')
    done = train(here, dataset='bpe', init_from='gpt2')
    assert done.code == 2 and 'could not download gpt2' in done.text and not os.path.exists('out/a')
    # once in the hub's cache, no network is needed
    snapshot = here / 'cache/models--openai-community--gpt2/snapshots/0123'
    shutil.copytree('small', snapshot)
    (snapshot.parents[1] / 'refs').mkdir()
    (snapshot.parents[1] / 'refs/main').write_text('0123')
    assert huggingface.locate('gpt2') == str(snapshot)
    assert call(sample, '--out_dir=gpt2', '--start=O', '--max_new_tokens=2', '--device=cpu').code == 0
    os.rename('small', 'gpt2')                                    # a folder of that name goes first
    assert huggingface.locate('gpt2') == 'gpt2'


# ---- what export.py wrote, changed since -----------------------------------------------------------------------------

def test_a_run_takes_everything_from_an_export_as_from_the_run_itself(here, data):
    save('out/a', 'rope', tokenizer=GPT2Tokenizer(), rope_base=500.0, bias=False)
    assert call(export, 'out/a', '--to=hf').code == 0
    done = train(here, dataset='bpe', init_from='hf', out_dir='out/b', max_iters=1, wpe='learned', batch_size=1, eval_tokens=64)
    for setting in ('wpe=rope', 'rope_base=500.0', 'bias=False', 'block_size=32'):
        assert done.code == 0 and f'{setting}, from hf' in done.text


def test_an_export_that_was_trained_on_says_what_it_is_by_now(here):
    save('out/a', 'sinusoidal', bias=False)
    assert call(export, 'out/a', '--to=hf').code == 0
    other = theirs('hf')
    with torch.no_grad():
        other.transformer.wpe.weight[3] += 1
        other.transformer.h[0].ln_1.bias += 1
    other.save_pretrained('tuned')
    done = call(sample, '--out_dir=tuned', '--start=O', '--max_new_tokens=1', '--device=cpu')
    assert done.code == 0 and 'wpe=learned, not sinusoidal' in done.err
    model = checkpoint.load_model('tuned')[0]
    assert (model.config.wpe, model.config.bias) == ('learned', True)
    close(model(some(50)), other(some(50)).logits)


@pytest.mark.parametrize('wpe, change, words', [
    ('rope', dict(max_position_embeddings=64), 'max_position_embeddings'), ('rope', dict(nanope=[1]), 'nanope.config'),
    ('rope', dict(rope_parameters={'rope_type': 'linear', 'factor': 2.0, 'rope_theta': 1e4}), 'rope_parameters'),
    ('learned', dict(model_type='gpt_neo'), 'model_type')])
def test_an_export_whose_config_was_edited_is_refused(here, wpe, change, words):
    save('out/a', wpe)
    assert call(export, 'out/a', '--to=hf').code == 0
    edit('hf', **change)
    refused(call(sample, '--out_dir=hf'), 'hf/config.json was changed since nanoPE wrote it', words)


def test_a_turned_matrix_is_refused(here):
    save('out/a', 'rope')
    assert call(export, 'out/a', '--to=hf').code == 0
    edit('hf', lambda t: {name: x.t() if name.endswith('query_key_value.weight') else x for name, x in t.items()})
    refused(call(sample, '--out_dir=hf'), 'layers.0.attention.query_key_value.weight has shape (48, 144)')


def test_what_is_read_prints_the_same_in_every_process(here):
    """train.py's processes compare what they are about to train by its text; the order of a set differs between processes."""
    assert "'vocab_multiple'})" not in repr(checkpoint.load('small')) and 'tensor' not in repr(checkpoint.load('small'))


def test_a_bloom_that_was_trained_on_is_refused(here):
    save('out/a', 'alibi')
    assert call(export, 'out/a', '--to=hf').code == 0
    edit('hf', lambda t: {name: x + (name.endswith('embeddings_layernorm.bias')) for name, x in t.items()})
    refused(call(sample, '--out_dir=hf'), 'word_embeddings_layernorm does more than nothing')
    for odd in math.inf, math.nan:
        edit('hf', lambda t: {name: x.fill_(odd) if name.endswith('embeddings_layernorm.weight') else x for name, x in t.items()})
        refused(call(sample, '--out_dir=hf'), 'word_embeddings_layernorm does more than nothing')


# ---- nanoGPT: ckpt.pt ------------------------------------------------------------------------------------------------

def nanogpt_run(folder, rows=50304, bias=True, prefix='_orig_mod.', dataset='bpe', **more):
    """A folder with a ckpt.pt as nanoGPT's train.py writes it, and the model that it holds."""
    args = dict(n_layer=2, n_head=4, n_embd=16, block_size=32, bias=bias, vocab_size=rows, dropout=0.0)
    model = build('learned', **args)
    state = {**dict(model.named_parameters()), 'lm_head.weight': model.lm_head.weight,
             'transformer.h.0.attn.bias': torch.ones(1, 1, 32, 32)}
    os.makedirs(folder, exist_ok=True)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.save({'model': {prefix + name: tensor.detach() for name, tensor in state.items()}, 'optimizer': optimizer.state_dict(),
                'model_args': args, 'iter_num': 40, 'best_val_loss': torch.tensor(1.5), 'config': {'dataset': dataset, 'dropout': 0.0},
                **more}, os.path.join(folder, 'ckpt.pt'))
    return model


@pytest.mark.parametrize('prefix, bias', [('_orig_mod.', True), ('', False), ('module._orig_mod.', False)])
def test_a_checkpoint_of_nanogpt(here, prefix, bias):
    own = nanogpt_run('ng/out', bias=bias, prefix=prefix)
    model, tokenizer, found = checkpoint.load_model('ng/out')
    assert torch.equal(model(some(50257)), own(some(50257))[..., :50257])  # the rest of its rows pads the vocabulary
    assert (tokenizer.kind, found.step, model.config.bias, model.config.vocab_size) == ('gpt2', 40, bias, 50257)
    done = train(here, dataset='bpe', init_from='ng/out', wpe='rope', max_iters=1, batch_size=1, eval_tokens=64)
    assert done.code == 0 and 'wpe=rope: all weights of ng/out/ckpt.pt but its position table' in done.text
    assert call(export, 'ng/out', '--to=hf').code == 0
    close(theirs('hf')(some(50257)).logits, model(some(50257)))


def test_a_checkpoint_by_character_takes_the_vocabulary_of_its_data(here):
    size = len(set(TEXT))
    own = nanogpt_run('ng/out', rows=size, dataset='plays')
    refused(call(sample, '--out_dir=ng/out'), f'ng/out/ckpt.pt does not say which its {size} tokens are',
            'python prepare.py plays --adopt=FOLDER', '--input=TEXT', 'meta.pkl is a pickle and not read')
    assert call(prepare, 'plays', '--adopt=ng/char', '--input=text.txt').code == 0
    model, tokenizer, found = checkpoint.load_model('ng/out')
    assert torch.equal(model(some(size)), own(some(size))) and tokenizer.chars == ''.join(sorted(set(TEXT)))
    done = call(sample, '--out_dir=ng/out', '--start=O', '--temperature=0', '--max_new_tokens=9', '--device=cpu')
    assert done.out == tokenizer.decode(greedy(own, torch.tensor([[tokenizer.chars.index('O')]]), 9)[0]) + '\n'
    refused(call(sample, '--out_dir=ng/out', '--start=<|endoftext|>'), 'trained without the separator')
    done = train(here, dataset='plays', init_from='ng/out', max_iters=1, learning_rate=0.0, min_lr=0.0, batch_size=1, eval_tokens=64)
    tokens = checkpoint.load('out/a').tensors('model')['transformer.wte.weight']
    assert done.code == 0 and tokens.shape == (size + 1, 16) and not tokens[-1].any()  # a row for the separator
    assert call(export, 'ng/out', '--to=hf').code == 0
    close(theirs('hf')(some(size)).logits[..., :size], model(some(size)))
    assert torch.equal(checkpoint.load('hf').weights['transformer.wte.weight'], found.weights['transformer.wte.weight'])


@pytest.mark.parametrize('how', ['raw', 'in a zip', 'a class', 'cut', 'text'])
def test_a_malicious_or_damaged_checkpoint_is_refused_and_not_run(here, how):
    nanogpt_run('ng/out', **({'config': GPTConfig()} if how == 'a class' else {}))
    path = here / 'ng/out/ckpt.pt'
    if how == 'raw':
        path.write_bytes(EVIL)
    elif how == 'text':
        path.write_text('not a checkpoint')
    elif how == 'cut':
        path.write_bytes(path.read_bytes()[:5000])
    elif how == 'in a zip':
        with zipfile.ZipFile(path) as old:
            members = {info: old.read(info) for info in old.infolist()}
        with zipfile.ZipFile(path, 'w') as new:
            for info, content in members.items():
                new.writestr(info, EVIL if info.filename.endswith('data.pkl') else content)
    for done in (call(sample, '--out_dir=ng/out'), train(here, dataset='bpe', init_from='ng/out')):
        text = done[-1]
        assert done.code == 2 and 'ng/out/ckpt.pt holds more than weights and plain values' in text and 'Traceback' not in text
        assert text.strip().count('\n') == 0
    assert not (here / 'sentinel').exists() and not os.path.exists('out/a')


def test_checkpoints_that_are_nanogpts_only_by_name(here):
    for more, words in ((dict(model_args=None), 'no checkpoint of nanoGPT'), (dict(model={}), 'transformer.wte.weight is missing'),
                        (dict(model_args=dict(n_layer=2, n_head=4, n_embd=16)), 'block_size must be int'),
                        (dict(model={'transformer.wte.weight': torch.ones(50304, 16)}), 'too few for n_layer')):
        nanogpt_run('ng/out', **{'model_args': dict(n_layer=2, n_head=4, n_embd=16, block_size=32), **more})
        refused(call(sample, '--out_dir=ng/out'), 'ng/out/ckpt.pt', words)
    nanogpt_run('out/a')
    done = train(here, dataset='bpe', init_from='resume')
    assert done.code == 2 and 'out/a holds no checkpoint' in done.text  # to go on with nanoGPT's run is another thing


# ---- nanoGPT: data ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('where', ['copied', 'in place'])
@pytest.mark.parametrize('kind', ['bpe', 'char'])
def test_a_data_folder_of_nanogpt_is_taken_over(here, kind, where):
    source = f'ng/{kind}'
    if where == 'in place':
        source = shutil.copytree(source, 'data/plays')
    before = {split: (here / source / f'{split}.bin').read_bytes() for split in ('train', 'val')}
    if where == 'in place':
        done = train(here, dataset='plays')
        assert done.code == 2 and 'python prepare.py plays --adopt=data/plays' in done.text and 'meta.pkl is a pickle' in done.text
        (here / 'data/plays/train.bin.part').touch()              # left by a prepare.py that was killed
    done = call(prepare, 'plays', f'--adopt={source}', *(['--input=text.txt'] if kind == 'char' else []))
    assert done.code == 0 and 'next: python train.py' in done.out, done
    found = Data('data/plays')
    assert {split: (here / 'data/plays' / f'{split}.bin').read_bytes() for split in before} == before
    assert {path.name for path in (here / 'data/plays').iterdir()} - {'meta.pkl', '.lock'} == {'train.bin', 'val.bin', 'meta.json'}
    ids = np.concatenate([np.frombuffer(part, dtype='<u2') for part in before.values()])
    assert found.tokenizer.decode(ids) == TEXT and found.tokenizer.kind == ('char' if kind == 'char' else 'gpt2')
    assert sum(found.meta[split]['bytes'] for split in before) == len(TEXT.encode())
    assert train(here, dataset='plays', max_iters=1, eval_tokens=64).code == 0 and not (here / 'sentinel').exists()


def test_data_that_cannot_be_taken_over(here):
    (here / 'other.txt').write_text(TEXT.upper(), encoding='utf-8')
    for args, words in ((['--adopt=ng/char'], 'which are not GPT-2'), (['--adopt=ng/char', '--tokenizer=char'], 'give it, --input=TEXT'),
                        (['--adopt=ng/char', '--input=other.txt'], 'ng/char was not made from other.txt'),
                        (['--adopt=ng/bpe', '--input=text.txt'], 'not by character'), (['--adopt=gone'], 'gone/train.bin is missing'),
                        (['--adopt=ng/char', '--input=absent.txt'], '--input=absent.txt is no file'),
                        (['--adopt=ng/char', '--input=ng'], '--input=ng is no file: give the one text')):
        refused(call(prepare, 'plays', *args), words)
        assert not os.path.exists('data/plays/train.bin')
    (here / 'ng/bpe/val.bin').write_bytes(b'abc')
    refused(call(prepare, 'plays', '--adopt=ng/bpe'), 'ng/bpe/val.bin', 'two bytes a token')
    for args in (['--adopt=ng/char', '--input=text.txt'], ['--adopt=ng/bpe']):
        refused(call(prepare, 'shakespeare', *args), 'shakespeare stands for the plays', f'python prepare.py mydata {args[0]}')
    assert nanogpt.read('ng/bpe') is None and re.search('--adopt=', json.dumps(nanogpt.how_to_adopt('x')))


def test_shapes_cost_no_memory():
    config = GPTConfig(n_layer=48, n_head=25, n_embd=1600)
    found = huggingface.shapes(config)
    assert sum(shape.numel() for shape in found.values()) == 1_557_611_200 and isinstance(GPT, type)
