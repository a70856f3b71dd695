"""export.py: transformers computes the same, from the files alone; everything comes back bit for bit; no folder is lost."""
import json
import os
import subprocess
import sys
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import export as script
from exported import CHARS, call, greedy, refused, save, theirs
from model import GPTConfig
from nanope import checkpoint
from nanope.files import read_json, sha256
from nanope.tokenizer import SEPARATOR, GPT2Tokenizer, hugging_face_json
from runs import ROOT, start, train
from small import close, tokens

transformers = pytest.importorskip('transformers')

SCHEMES = ('learned', 'sinusoidal', 'none', 'rope', 'alibi')
SCALED = {method: dict(wpe='rope', rope_scaling=method, rope_factor=4.0, rope_trained=8)  # to 32 tokens
          for method in ('linear', 'ntk', 'dynamic', 'yarn', 'llama3')}
CASES = {**{wpe: dict(wpe=wpe) for wpe in SCHEMES}, **{f'{wpe}, no bias': dict(wpe=wpe, bias=False) for wpe in SCHEMES}, **SCALED,
         'alibi, 6 heads': dict(wpe='alibi', n_head=6), 'padded': dict(wpe='learned', vocab_multiple=64),
         'interpolated': dict(wpe='sinusoidal', sinusoidal_factor=2.0), 'base': dict(wpe='rope', rope_base=500.0),
         'yarn, all settings': dict(SCALED['yarn'], yarn_beta_fast=16.0, yarn_beta_slow=2.0, yarn_attention=1.25),
         'llama3, all settings': dict(SCALED['llama3'], llama3_low=0.5, llama3_high=3.0)}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def exported(wpe, **more):
    """(our model, transformers' of its export), through the files of out/a and out/a_hf."""
    model = save('out/a', wpe, **more)
    done = call(script, 'out/a')
    assert done.code == 0 and f'wrote out/a_hf: out/a, step 7, wpe={wpe}' in done.out, done
    return model, theirs('out/a_hf')


# ---- transformers computes the same ----------------------------------------------------------------------------------

@pytest.mark.parametrize('case', CASES)
def test_logits_equal_and_all_comes_back_bit_for_bit(here, case):
    model, other = exported(**CASES[case])
    size = model.config.vocab_size
    x = torch.randint(size, (3, 32), generator=torch.Generator().manual_seed(0))
    close(model(x), other(x).logits)
    assert other.config.vocab_size == size and other.get_output_embeddings().weight is other.get_input_embeddings().weight
    back, tokenizer, found = checkpoint.load_model('out/a_hf')
    own = dict(model.named_parameters())
    own['transformer.wte.weight'] = own['transformer.wte.weight'][:size]  # without the rows that pad it
    assert own.keys() == dict(back.named_parameters()).keys()
    assert all(torch.equal(own[name], parameter) for name, parameter in back.named_parameters())
    assert back.config == GPTConfig(**{**vars(model.config), 'vocab_multiple': 1})
    assert (tokenizer.to_json(), found.step, found.state['data_digest']) == (CHARS.to_json(), 7, 'abc')
    assert call(script, 'out/a_hf', '--to=out/b').code == 0
    assert sha256('out/b/model.safetensors') == sha256('out/a_hf/model.safetensors')
    assert read_json('out/b/config.json') == read_json('out/a_hf/config.json')


@pytest.mark.parametrize('wpe', SCHEMES)
def test_greedy_text_is_ours_with_the_cache_on(here, wpe):
    model, other = exported(wpe)
    prompt = tokens(1, 5) % CHARS.vocab_size
    found = other.generate(prompt, max_new_tokens=27, do_sample=False, use_cache=True, eos_token_id=None, pad_token_id=0)
    assert torch.equal(found, greedy(model, prompt, 27))
    rows = torch.cat((prompt, torch.flip(prompt, (1,))))
    both = other.generate(rows, max_new_tokens=9, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(both, greedy(model, rows, 9))


@pytest.mark.parametrize('method', SCALED)
def test_greedy_text_past_the_trained_length(here, method):
    """With dynamic scaling transformers' cache keeps keys of other angles, so it must be off: the model card says so."""
    model, other = exported(**SCALED[method])
    prompt = tokens(1, 5) % CHARS.vocab_size
    how = dict(max_new_tokens=27, do_sample=False, eos_token_id=None, pad_token_id=0, use_cache=method != 'dynamic')
    assert torch.equal(other.generate(prompt, **how), greedy(model, prompt, 27))
    card = (here / 'out/a_hf/README.md').read_text('utf-8')
    assert f'| RoPE scaling | {method}, 4 times 8 tokens |' in card and ('use_cache=False' in card) == (method == 'dynamic')


def test_alibi_in_bfloat16_is_as_near_as_bfloat16_gets(here):
    """Its embeddings are stored up to 2^20 times smaller: bfloat16 has the range for that."""
    model, _ = exported('alibi')
    other, x = theirs('out/a_hf', dtype=torch.bfloat16), tokens(2, 32) % CHARS.vocab_size
    with torch.no_grad():
        assert (other(x).logits.float() - model(x)).abs().max() < 0.05 * model(x).abs().max()


# ---- tokenizers ------------------------------------------------------------------------------------------------------

BOTH = {}


def both(kind):
    """(our tokenizer, that of `tokenizers`, from the JSON that we write)"""
    if kind not in BOTH:
        from tokenizers import Tokenizer
        ours = CHARS if kind == 'char' else GPT2Tokenizer()
        BOTH[kind] = ours, Tokenizer.from_str(json.dumps(hugging_face_json(ours)))
    return BOTH[kind]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text() | st.lists(st.sampled_from(["I'll", "don't", '  ', '\n\n', ' 12', '日本', '🎉', SEPARATOR, '\u00a0', '!?', 'x\r\n']))
       .map(''.join))
def test_gpt2_tokens_are_ours(text):
    ours, other = both('gpt2')
    ids = ours.encode_prompt(text)
    assert other.encode(text).ids == ids and other.decode(ids, skip_special_tokens=False) == ours.decode(ids)
    assert other.get_vocab_size() == ours.vocab_size == 50257


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([*CHARS.chars, SEPARATOR])).map(''.join))
def test_char_tokens_are_ours(text):
    ours, other = both('char')
    ids = ours.encode_prompt(text)
    assert other.encode(text).ids == ids and other.decode(ids, skip_special_tokens=False) == text
    assert other.decode(ids) == text.replace(SEPARATOR, '') and other.get_vocab_size() == ours.vocab_size


def test_a_character_that_the_vocabulary_lacks_is_an_error_there_too():
    with pytest.raises(Exception, match='UNK'):
        both('char')[1].encode('a5')


@pytest.mark.parametrize('kind', ['char', 'gpt2'])
def test_pipeline(here, kind):
    ours = both(kind)[0]
    model, _ = exported('rope', tokenizer=ours, n_layer=1)
    pipe = transformers.pipeline('text-generation', 'out/a_hf')
    assert (pipe.tokenizer.eos_token, pipe.tokenizer.eos_token_id) == (SEPARATOR, ours.separator)
    assert pipe.model.generation_config.eos_token_id == ours.separator and pipe.tokenizer.model_max_length == 32
    prompt = torch.tensor([ours.encode_prompt('O Romeo\n')])
    ids = greedy(model, prompt, 20)[0].tolist()
    ids = ids[:ids.index(ours.separator)] if ours.separator in ids else ids  # it stops there
    assert pipe('O Romeo\n', max_new_tokens=20, do_sample=False)[0]['generated_text'] == ours.decode(ids)


# ---- folders ---------------------------------------------------------------------------------------------------------

def test_a_trained_run_and_its_model_card(place, monkeypatch):
    monkeypatch.chdir(place)
    assert train(place, wpe='rope', max_iters=3).code == 0
    assert call(script, 'out/a', '--to=hf').code == 0
    card = (place / 'hf/README.md').read_text('utf-8')
    final = [json.loads(line) for line in (place / 'out/a/metrics.jsonl').read_text().splitlines()][-1]
    for fact in ('# hf', 'library_name: transformers', '| position scheme | rope |', '| context | 8 tokens |', '| data | tiny (digest ',
                 '| updates | 3 of 32 tokens, AdamW, learning rate 0.01 |', '| seed | 1337 |', f'| validation loss | {final["loss"]:.4f}',
                 'torch 2.', 'float32 |'):
        assert fact in card, fact
    assert {path.name for path in (place / 'hf').iterdir()} == {
        'README.md', 'config.json', 'generation_config.json', 'model.safetensors', 'tokenizer.json', 'tokenizer_config.json'}


def test_what_is_replaced_and_what_is_not(here):
    save('out/a', 'rope')
    assert call(script, 'out/a').code == 0
    save('out/a', 'rope', step=8)
    assert call(script, 'out/a').code == 0                        # an earlier export
    assert read_json('out/a_hf/config.json')['nanope']['step'] == 8
    (here / 'out/a_hf/model.gguf').touch()                        # somebody's own file
    refused(call(script, 'out/a'), 'out/a_hf is not empty and holds more than an earlier export', '--overwrite=true')
    os.remove('out/a_hf/model.gguf')
    theirs('out/a_hf').save_pretrained('out/a_hf')                # fine-tuned in place
    refused(call(script, 'out/a'), 'holds more than an earlier export')
    for target in ('.', '..', 'out'):                             # never: what holds the run or us
        refused(call(script, 'out/a', f'--to={target}', '--overwrite=true'), f'{target} is or holds')
    (here / 'mine').mkdir()
    assert call(script, 'out/a', '--to=mine').code == 0           # an empty folder
    (here / 'other').mkdir()
    (here / 'other/config.json').write_text('{}')
    refused(call(script, 'out/a', '--to=other'), 'other is not empty', '--overwrite=true')
    assert call(script, 'out/a', '--to=other', '--overwrite=true').code == 0 and (here / 'other/tokenizer.json').exists()
    for target in ('out/a', 'file'):                              # never: a run, a file
        (here / 'file').touch()
        refused(call(script, 'out/a', f'--to={target}', '--overwrite=true'), f'{target} is a file, a run folder')
    refused(call(script, 'out/a', '--to=file/x'), 'file cannot be a folder, as file is a file: give another name')
    refused(call(script), 'give one run folder')
    (here / 'mine/config.json').write_text(json.dumps({**read_json('mine/config.json'), 'nanope': {
        **read_json('mine/config.json')['nanope'], 'extended': 7}}))
    refused(call(script, 'mine'), 'mine: what it tells of its training is damaged')
    refused(call(script, 'out/none'), 'out/none holds no checkpoint')
    assert not [path.name for path in (here / 'out').iterdir() if path.name.startswith('.')]


def test_a_failure_leaves_the_earlier_export_as_it_was(here):
    save('out/a', 'none')
    assert call(script, 'out/a').code == 0
    before = {path.name: path.read_bytes() for path in (here / 'out/a_hf').iterdir()}
    save('out/a', 'none', step=9)
    with mock.patch.object(script, 'model_card', side_effect=OSError('no space left on the device')):
        refused(call(script, 'out/a'), 'no space left')
    assert {path.name: path.read_bytes() for path in (here / 'out/a_hf').iterdir()} == before
    assert {path.name for path in (here / 'out').iterdir()} == {'a', 'a_hf'}


def test_check(here):
    save('out/a', 'sinusoidal')
    done = call(script, 'out/a', '--check=true')
    assert done.code == 0 and float(done.out.split()[-1]) < 1e-5
    with mock.patch.dict(sys.modules, {'transformers': None}):
        done = call(script, 'out/a', '--check=true')
    assert done.code == 2 and 'out/a_hf is written, but --check=true needs transformers' in done.err


# ---- real processes --------------------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def demo(tmp_path_factory):
    """out/rope and its export, as a user makes them: a model of the demo's kind, trained for a few seconds on Macbeth."""
    folder = tmp_path_factory.mktemp('demo')
    (folder / 'macbeth.txt').write_text((ROOT / 'data/shakespeare/plays/macbeth.txt').read_text('utf-8'), encoding='utf-8')
    for command in (['prepare.py', 'macbeth', '--input=macbeth.txt'],
                    ['train.py', str(ROOT / 'config/shakespeare_rope.py'), '--dataset=macbeth', '--out_dir=out/rope', '--max_iters=60',
                     '--n_layer=2', '--n_embd=64', '--device=cpu', '--threads=1', '--warmup_iters=10'],
                    ['export.py', 'out/rope', '--check=true']):
        process = start(folder, *command)
        out, err = process.communicate()
        assert process.returncode == 0, err
    assert float(out.split()[-1]) < 1e-5
    return folder


@pytest.mark.slow
def test_the_exported_run_writes_the_same_text_in_another_process(demo):
    code = ("from transformers import pipeline; pipe = pipeline('text-generation', 'out/rope_hf'); "
            "print(pipe('O Romeo', max_new_tokens=100, do_sample=False)[0]['generated_text'])")
    done = subprocess.run([sys.executable, '-c', code], cwd=demo, capture_output=True, text=True)
    for folder in ('out/rope', 'out/rope_hf'):
        sample = start(demo, 'sample.py', f'--out_dir={folder}', '--start=O Romeo', '--temperature=0', '--max_new_tokens=100')
        text, err = sample.communicate()
        assert sample.returncode == 0 and text == done.stdout and len(text) == 7 + 100 + 1, (err, done.stderr)


@pytest.mark.slow
def test_lm_eval_scores_it_as_our_model_does(demo):
    pytest.importorskip('lm_eval')
    tasks = ROOT / 'tests/lm_eval'
    command = ['-m', 'lm_eval', '--model', 'hf', '--model_args', f'pretrained={demo}/out/rope_hf', '--tasks', 'nanope_plays',
               '--include_path', str(tasks), '--device', 'cpu', '--batch_size', '4', '--output_path', str(demo / 'scores'), '--log_samples']
    offline = {'HF_HUB_OFFLINE': '1', 'HF_DATASETS_OFFLINE': '1', 'HF_HOME': str(demo / 'cache'), 'OMP_NUM_THREADS': '1'}
    done = subprocess.run([sys.executable, *command], cwd=tasks, env={**os.environ, **offline}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result, = (json.loads(path.read_text()) for path in (demo / 'scores').rglob('results*.json'))
    samples, = ([json.loads(line) for line in path.read_text().splitlines()] for path in (demo / 'scores').rglob('samples*.jsonl'))
    model, tokenizer, _ = checkpoint.load_model(str(demo / 'out/rope'))
    right = 0
    for sample in samples:
        scores = []
        for choice, (reported, _) in zip(sample['doc']['choices'], sample['filtered_resps']):
            ids = torch.tensor([tokenizer.encode_prompt(sample['doc']['context'] + choice)])
            with torch.no_grad():
                loss = model(ids[:, :-1], ids[:, 1:], reduction='none')[0, -len(choice):].sum().item()
            assert float(reported) == pytest.approx(-loss, abs=1e-3)
            scores.append(-loss)
        right += scores.index(max(scores)) == sample['doc']['label']
    assert len(samples) == 40 and result['results']['nanope_plays']['acc,none'] == pytest.approx(right / 40)
