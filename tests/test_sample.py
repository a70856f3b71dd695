"""sample.py: what is printed is the prompt and what the model drew, to the character; whatever else was asked gets one clear line."""
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from copy import deepcopy
from dataclasses import asdict

import pytest
import torch
from hypothesis import given, strategies as st

import sample as script
from model import KVCache
from nanope import checkpoint
from nanope.configurator import run
from nanope.files import sha256, write_json
from nanope.loader import Data
from nanope.tokenizer import CharTokenizer, GPT2Tokenizer
from runs import ROOT, start, train
from small import SCHEMES, build

CHARS = CharTokenizer('\n abcdefghijklmnopqrstuvwxyzäé日🎉')
BLOCK = 16
Done = namedtuple('Done', 'code out err')


def save(folder, wpe, step=7, tokenizer=CHARS, **settings):
    """A run folder with one checkpoint of a random model. Dropout is on in its config: sampling must turn it off."""
    model = build(wpe, block_size=BLOCK, vocab_size=tokenizer.vocab_size, n_layer=2, dropout=0.5, **settings)
    state = {'config': asdict(model.config), 'tokenizer': tokenizer.to_json(), 'data_digest': ''}
    checkpoint.save(str(folder), step, dict(model.named_parameters()), {}, state, {'dtype': 'float32'})
    return model


@pytest.fixture(scope='module')
def models(tmp_path_factory):
    """{scheme: (run folder, its model)}"""
    folder = tmp_path_factory.mktemp('runs')
    return {wpe: (folder / wpe, save(folder / wpe, wpe)) for wpe in SCHEMES}


@pytest.fixture
def copy(models, tmp_path):
    """A run folder that a test may damage, with checkpoints of steps 7 and 8."""
    shutil.copytree(models['rope'][0], tmp_path / 'copy')
    save(tmp_path / 'copy', 'rope', step=8)
    return tmp_path / 'copy'


def sample(out_dir, stdout=None, **settings):
    """python sample.py, but in this process."""
    out, err = stdout or io.StringIO(), io.StringIO()
    settings = {'out_dir': out_dir, 'device': 'cpu', 'start': 'romeo', 'max_new_tokens': 11, **settings}
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as stop:
        run(lambda: script.main([f'--{name}={value}' for name, value in settings.items()]))
    return Done(stop.value.code, '' if stdout else out.getvalue(), err.getvalue())


def drawn(model, prompt, steps, seed=1337, temperature=0.8, **settings):
    """The text that model.generate() draws, as ids and decoded in one piece."""
    idx, generator = torch.tensor([CHARS.encode_prompt(prompt)]), torch.Generator().manual_seed(seed)
    return CHARS.decode([int(token) for token in model.generate(idx, steps, temperature, generator=generator, **settings)])


@torch.no_grad()
def greedy_by_cropping(model, prompt, steps):
    """Greedy decoding in its plainest form: the argmax after the last block_size tokens, without a cache."""
    ids = CHARS.encode_prompt(prompt)
    for _ in range(steps):
        ids.append(int(model(torch.tensor([ids[-BLOCK:]]))[0, -1].argmax()))
    return CHARS.decode(ids[-steps:])


def refused(done, *words):
    """Exit code 2, nothing on stdout, and one line that says all the words."""
    assert done.code == 2 and done.out == '' and done.err.startswith('error: ') and done.err.count('\n') == 1, done
    assert all(str(word) in done.err for word in words), done.err


# ---- what is drawn ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('wpe', SCHEMES)
def test_greedy_is_the_argmax_loop_without_cache_whatever_the_seed(models, wpe):
    out_dir, model = models[wpe]
    expected = 'romeo' + greedy_by_cropping(model, 'romeo', 11) + '\n'
    for seed in (1, 2):
        assert sample(out_dir, temperature=0, seed=seed)[:2] == (0, expected)


def test_the_seed_decides_the_text_and_every_sample_has_its_own(models):
    out_dir, model = models['rope']
    texts = ['romeo' + drawn(model, 'romeo', 11, seed) + '\n' for seed in (5, 6, 7)]
    assert len(set(texts)) == 3
    for seed, text in zip((5, 6, 5), (*texts[:2], texts[0])):
        assert sample(out_dir, seed=seed).out == text
    done = sample(out_dir, seed=5, num_samples=3)
    assert done.out == ''.join(f'--- sample {n + 1}\n{text}' for n, text in enumerate(texts))


def test_settings_reach_the_sampler_and_their_limits_mean_no_limit(models):
    out_dir, model = models['learned']
    assert sample(out_dir, temperature=1.5).out == 'romeo' + drawn(model, 'romeo', 11, temperature=1.5) + '\n'
    assert sample(out_dir, top_k=3).out == 'romeo' + drawn(model, 'romeo', 11, top_k=3) + '\n'
    assert sample(out_dir, top_p=0.5).out == 'romeo' + drawn(model, 'romeo', 11, top_p=0.5) + '\n'
    free = sample(out_dir, top_k='none').out
    assert free == sample(out_dir, top_k=10**9).out == sample(out_dir, top_k='none', top_p=1).out
    assert sample(out_dir, top_k=1).out == sample(out_dir, temperature=0).out != free


def test_the_checkpoint_asked_for(models, copy):
    save(copy, 'rope', step=9, n_embd=24)
    checkpoint.mark_best(str(copy), 7, 1.0)
    for step, parameters in (('latest', '9'), (9, '9'), ('best', '7'), (8, '8')):
        assert f'step {parameters}, ' in sample(copy, step=step).err
    assert sample(copy, step=7).out == sample(models['rope'][0]).out != sample(copy).out


# ---- prompts ---------------------------------------------------------------------------------------------------------

def test_prompts_from_files(models, tmp_path):
    out_dir, model = models['none']
    for data, text in (('é日🎉\n'.encode(), 'é日🎉\n'), (b'\xef\xbb\xbfa\r\nb', 'a\nb')):  # the second as Windows' editors write
        (tmp_path / 'prompt').write_bytes(data)
        assert sample(out_dir, start=f'FILE:{tmp_path}/prompt').out == text + drawn(model, text, 11) + '\n'
    (tmp_path / 'latin').write_bytes('abc é'.encode('latin-1'))
    refused(sample(out_dir, start=f'FILE:{tmp_path}/latin'), tmp_path / 'latin', 'UTF-8', 'byte 4')
    refused(sample(out_dir, start=f'FILE:{tmp_path}/absent'), tmp_path / 'absent', 'No such file')
    refused(sample(out_dir, start=f'FILE:{tmp_path}'), tmp_path, 'directory')
    (tmp_path / 'empty').touch()
    refused(sample(out_dir, start=f'FILE:{tmp_path}/empty'), 'prompt is empty')


def test_empty_prompts_and_unknown_characters(models):
    out_dir = models['rope'][0]
    refused(sample(out_dir, start=''), 'prompt is empty', '--start')
    refused(sample(out_dir, start='what? 1 What?'), "'?' (2x)", "'1' (1x)", "'W' (1x)")
    refused(sample(out_dir, stop='\\n'), "'\\\\' (1x)")                # a backslash and an n never come


def test_the_separator_as_a_prompt(models):
    out_dir, model = models['rope']
    done = sample(out_dir, start='<|endoftext|>')
    assert done.out == '<|endoftext|>' + drawn(model, '<|endoftext|>', 11) + '\n'


# ---- past block_size -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('wpe', SCHEMES)
def test_past_block_size_the_window_slides_and_that_is_said_once(models, wpe):
    out_dir, model = models[wpe]
    done = sample(out_dir, max_new_tokens=40, num_samples=2, temperature=0)
    expected = drawn(model, 'romeo', 40, temperature=0)
    assert done.code == 0 and done.out == ''.join(f'--- sample {n}\nromeo{expected}\n' for n in (1, 2))
    if wpe in ('learned', 'sinusoidal'):
        assert expected == greedy_by_cropping(model, 'romeo', 40)
    assert done.err.count('slides') == 1 and '5 prompt tokens + 40 new ones' in done.err and f'block_size={BLOCK}' in done.err
    assert 'slides' not in sample(out_dir, max_new_tokens=11).err   # 5 + 11 = 16


@pytest.mark.parametrize('wpe', SCHEMES)
def test_a_prompt_longer_than_block_size_keeps_its_tail(models, wpe):
    out_dir, model = models[wpe]
    prompt = 'wherefore art thou romeo deny thy father'
    done = sample(out_dir, start=prompt, seed=3)
    assert done.out == prompt + drawn(model, prompt[-BLOCK:], 11, seed=3) + '\n'
    assert f'only the last {BLOCK} of the prompt' in done.err


def test_overflow_can_be_refused_beforehand(models):
    for wpe in SCHEMES:
        out_dir = models[wpe][0]
        refused(sample(out_dir, max_new_tokens=12, overflow='error'), '5 prompt tokens + 12 new', 'block_size=16', '--overflow=slide')
        assert sample(out_dir, max_new_tokens=11, overflow='error').code == 0


# ---- stopping --------------------------------------------------------------------------------------------------------

def test_stop_text(models):
    out_dir, model = models['rope']
    seed, text = next((seed, text) for seed in range(99) if '<' not in (text := drawn(model, 'romeo', 40, seed)))
    for stop in (text[0], text[9], text[10:14], text[-2:], text):
        done = sample(out_dir, max_new_tokens=40, stop=stop, seed=seed)
        assert done.out == 'romeo' + text[:text.index(stop)] + '\n'
        assert f'{text.index(stop) + len(stop)} tokens in ' in done.err  # and nothing more is drawn
    for stop in (text[-3:] + 'a', 'romeo'):                          # begun but not finished; in the prompt alone
        assert stop not in text
        assert sample(out_dir, max_new_tokens=40, stop=stop, seed=seed).out == f'romeo{text}\n'


@given(ids=st.lists(st.integers(0, 2), max_size=30), stop=st.text('ab', min_size=1, max_size=4) | st.none())
def test_stream_prints_what_comes_before_stop_as_early_as_it_can(ids, stop):
    tokenizer, shown = CharTokenizer('ab'), ''
    arrived = []
    for text in script.stream((arrived.append(id) or id for id in ids), tokenizer, stop):
        shown += text
        sofar = tokenizer.decode(arrived)
        expected = sofar.partition(stop)[0] if stop else sofar
        assert expected.startswith(shown) and len(shown) > len(expected) - len(stop or 'x')
    assert shown == (tokenizer.decode(ids).partition(stop)[0] if stop else tokenizer.decode(ids))


def test_stream_stops_at_the_separator():
    tokenizer = CharTokenizer('ab')
    assert list(script.stream([0, 1, 2, 0], tokenizer, '<|endoftext|>')) == ['a', 'b', '']
    assert ''.join(script.stream([0, 1, 2, 0], tokenizer, None)) == 'ab<|endoftext|>a'


def test_stream_prints_whole_characters_of_byte_pairs():
    tokenizer, text = GPT2Tokenizer(), 'Hämlet 🎉🧑‍🚀 日本語 ẞ end'
    ids = tokenizer.encode(text)
    pieces = list(script.stream(ids, tokenizer, None))
    assert len(ids) > len(text) and ''.join(pieces) == text and not any('\ufffd' in piece for piece in pieces)
    for stop in ('🧑', '本', 'e', '🚀 日'):
        assert ''.join(script.stream(ids, tokenizer, stop)) == text[:text.index(stop)]
    assert ''.join(script.stream(ids[:4], tokenizer, None)) == tokenizer.decode(ids[:4])  # cut inside a character
    torn = [*tokenizer.encode('🎉')[1:], *tokenizer.encode('a🎉')[:-1], *tokenizer.encode('b')]
    assert ''.join(script.stream(torn, tokenizer, None)) == tokenizer.decode(torn)


def test_a_byte_pair_model(tmp_path):
    tokenizer = GPT2Tokenizer()
    model = save(tmp_path, 'rope', tokenizer=tokenizer, n_embd=8)
    idx = torch.tensor([tokenizer.encode_prompt('日 romeo')])
    ids = [int(token) for token in model.generate(idx, 8, 1.0, generator=torch.Generator().manual_seed(1337))]
    done = sample(tmp_path, start='日 romeo', max_new_tokens=8, temperature=1.0, top_k='none')
    assert done.out == '日 romeo' + tokenizer.decode(ids) + '\n'


# ---- what is wrong with a run folder ---------------------------------------------------------------------------------

def test_no_run_and_no_checkpoint(models, tmp_path):
    refused(sample(tmp_path / 'absent'), tmp_path / 'absent', 'no checkpoint')
    (tmp_path / 'started/ckpt').mkdir(parents=True)
    refused(sample(tmp_path / 'started'), tmp_path / 'started', 'no checkpoint')
    for path in ('ckpt', 'ckpt/step_00000007', 'ckpt/step_00000007/model.safetensors'):
        refused(sample(models['rope'][0] / path), 'no checkpoint', f'give its run folder, {models["rope"][0]}\n')
    for path in (models['rope'][0].parent, models['rope'][0].parent / 'absent'):
        refused(sample(path), f'{path} holds no checkpoint; these do: ', *(out_dir for out_dir, _ in models.values()))
    for step in (6, -7, 10**15, 'best'):
        refused(sample(models['rope'][0], step=step), f'step {step}', 'it has 7')


def test_a_damaged_checkpoint(copy):
    (copy / 'ckpt/step_00000008/model.safetensors').write_bytes(b'')
    done = sample(copy)
    assert done.code == 0 and 'step 7, ' in done.err
    assert done.err.startswith('warning: ') and done.err.count('step_00000008/model.safetensors has 0 bytes') == 1
    refused(sample(copy, step=8), 'step_00000008/model.safetensors', '0 bytes')
    content = bytearray((copy / 'ckpt/step_00000007/model.safetensors').read_bytes())
    content[-1] ^= 1
    (copy / 'ckpt/step_00000007/model.safetensors').write_bytes(content)
    refused(sample(copy), 'step_00000007/model.safetensors', 'damaged', 'step_00000008')


def test_a_pickle_in_place_of_the_weights_is_never_run(copy, tmp_path):
    folder = copy / 'ckpt/step_00000008'
    (folder / 'model.safetensors').write_bytes(f"cos\nsystem\n(S'touch {tmp_path}/sentinel'\ntR.".encode())
    manifest = json.loads((folder / 'manifest.json').read_text())   # as if it had been saved so
    manifest['files']['model.safetensors'] = {'bytes': os.path.getsize(folder / 'model.safetensors'),
                                              'sha256': sha256(folder / 'model.safetensors')}
    write_json(folder / 'manifest.json', {**manifest, 'digest': checkpoint.seal(manifest)})
    refused(sample(copy), 'step_00000008/model.safetensors', 'not a safetensors file')
    assert not (tmp_path / 'sentinel').exists()


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('wpe', SCHEMES)
def test_format_of_weights_and_cache(models, monkeypatch, wpe, dtype):
    """What a step reads is in the format asked for; the tables of positions stay in float32."""
    (folder, model), seen, append = models[wpe], set(), KVCache.append
    monkeypatch.setattr(KVCache, 'append', lambda cache, layer, k, v: seen.add(k.dtype) or append(cache, layer, k, v))
    rounded = deepcopy(model).to(getattr(torch, dtype))
    done = sample(folder, dtype=dtype, max_new_tokens=60)
    assert done.code == 0 and seen == {getattr(torch, dtype)} and done.out == f'romeo{drawn(rounded, "romeo", 60, top_k=200)}\n'
    assert wpe not in ('sinusoidal', 'rope') or rounded.wpe_table.dtype == torch.float32


@pytest.mark.parametrize('settings, warned', [
    ({'temperature': 0, 'top_k': 3, 'top_p': 0.5, 'seed': 1}, ['top_k=3', 'top_p=0.5', 'seed=1']), ({'top_k': 3, 'seed': 1}, []),
    ({'batch_size': 8}, ['batch_size=8']), ({'batch_size': 8, 'num_samples': 2}, [])])
def test_settings_that_do_nothing(models, settings, warned):
    done = sample(models['rope'][0], **settings)
    found = [line for line in done.err.splitlines() if line.startswith('warning: --')]
    assert done.code == 0 and [line.split()[1] for line in found] == [f'--{each}' for each in warned], done.err


@pytest.mark.parametrize('setting, words', [
    ({'num_samples': 0}, 'num_samples=0'), ({'max_new_tokens': 0}, 'max_new_tokens=0'), ({'top_k': 0}, 'top_k=0'),
    ({'top_p': 0}, 'top_p=0'), ({'top_p': 1.1}, 'top_p=1.1'), ({'temperature': -1}, 'temperature=-1'), ({'temperature': 'nan'}, 'finite'),
    ({'seed': -1}, 'seed=-1'), ({'seed': 10**20}, 'seed=1'), ({'stop': ''}, 'stop is empty'), ({'device': 'abacus'}, 'abacus'),
    ({'dtype': 'float16'}, 'needs CUDA'), ({'top_kk': 3}, 'did you mean top_k')])
def test_settings_out_of_range(models, setting, words):
    refused(sample(models['rope'][0], **setting), words)


def test_a_run_folder_without_its_flag():
    with pytest.raises(ValueError, match='--out_dir=out/run'):
        script.main(['out/run'])


# ---- as a process ----------------------------------------------------------------------------------------------------

def test_a_trained_run_as_a_process_that_imports_no_more_than_it_needs(place):
    assert train(place, eval_interval=6).code == 0
    code = ('import runpy, sys\nsys.argv = ["sample.py", "--out_dir=out/a", "--start=Hämlet", "--max_new_tokens=50", "--device=cpu"]\n'
            'try: runpy.run_path(sys.path[0] + "/sample.py", run_name="__main__")\n'
            'except SystemExit as stop: assert stop.code == 0, stop.code\n'
            'print(sorted({"tiktoken", "datasets", "wandb", "matplotlib", "transformers", "sympy",\n'
            '              "torch._dynamo"} & set(sys.modules)), file=sys.stderr)')
    done = subprocess.run([sys.executable, '-c', f'import sys; sys.path[0] = {str(ROOT)!r}\n{code}'], cwd=place, capture_output=True,
                          text=True, encoding='utf-8', env={**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONIOENCODING': 'utf-8'})
    assert done.returncode == 0 and done.stderr.splitlines()[-1] == '[]', done.stderr
    ids = Data(place / 'data/tiny').tokenizer.encode_prompt(done.stdout[:-1])
    assert done.stdout.startswith('Hämlet') and len(ids) == 6 + 50 and done.stdout.endswith('\n')
    with contextlib.chdir(place):
        assert sample('out/a', start='Hämlet', max_new_tokens=50).out == done.stdout


def test_a_reader_that_has_read_enough(models):
    process = start(models['none'][0], 'sample.py', '--out_dir=.', '--device=cpu', '--start=romeo', '--max_new_tokens=1000000')
    assert process.stdout.read(10).startswith('romeo')
    process.stdout.close()                                          # as head -c 10 does
    err = process.stderr.read()
    assert process.wait() == 141 and 'Traceback' not in err and 'rror' not in err, err


def test_a_terminal_that_lacks_a_character(models):
    out_dir, terminal = models['rope'][0], io.TextIOWrapper(io.BytesIO(), encoding='ascii')
    assert sample(out_dir, stdout=terminal, start='日🎉', max_new_tokens=1).code == 0
    assert terminal.buffer.getvalue().startswith(b'\\u65e5\\U0001f389')
