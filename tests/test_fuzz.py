"""Thousands of damaged, odd and hostile inputs: each ends in a result or one clear error; no traceback, hang, or half-written file."""
import contextlib
import hashlib
import importlib
import json
import os
import shutil
from dataclasses import is_dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from nanope import checkpoint, files, metrics
from nanope.configurator import configure
from nanope.loader import Data
from runs import ROOT, flags, train

pytestmark = pytest.mark.slow
SCRIPTS = sorted(path.stem for path in ROOT.glob('*.py') if path.stem != 'model')
EVIL = b"cos\nsystem\n(S'touch sentinel'\ntR."  # unpickled, it makes a file

NUMBERS = st.one_of(st.integers(-3, 3), st.integers(-2**70, 2**70), st.floats(), st.sampled_from([1e308, -0.0, 2**31, 2**63]))
JSON = st.recursive(st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=5)),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=5)


def fuzz(n):
    """Try a test with n inputs, the same ones each time."""
    examples = settings(max_examples=n, deadline=5000, derandomize=True, database=None,
                    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])

    def decorate(test):
        test = examples(test)
        test.tries = n
        return test
    return decorate


def clean(call):
    """call(), or None where it raises ValueError or OSError, which say something; any other exception fails the test."""
    try:
        return call()
    except (ValueError, OSError) as error:
        assert str(error).strip() and type(error) in (ValueError, checkpoint.NewerFormat) or isinstance(error, OSError), repr(error)
        return None


@st.composite
def damaged(draw, data):
    """Bytes that once were `data`."""
    at, length = draw(st.integers(0, len(data))), draw(st.sampled_from([0, 1, 2, 8, 100, len(data)]))
    return draw(st.sampled_from([
        data[:at], data[at:], data[:at] + data[at + length:], data[:at] + bytes(length) + data[at + length:], data + data[:length],
        data[:at] + draw(st.binary(max_size=20)) + data[at + length:], EVIL, EVIL.ljust(len(data), b'.'), b'[' * 100_000]))


@st.composite
def altered(draw, content):
    """A JSON object with something in it, at any depth, replaced, removed or added."""
    content = json.loads(json.dumps(content))
    node, key = content, draw(st.sampled_from(sorted(content)))
    while isinstance(node[key], dict) and node[key] and draw(st.booleans()):
        node = node[key]
        key = draw(st.sampled_from(sorted(node)))
    how = draw(st.integers(0, 9))
    if how == 0:
        del node[key]
    elif how == 1:
        node[draw(st.text(max_size=5))] = draw(JSON)
    else:
        node[key] = draw(NUMBERS if type(node[key]) in (int, float) and how < 6 else JSON)
    if isinstance(content.get('config'), dict):
        content['config']['block_size'] = 8  # which says how large a table is, and no file contradicts
    return content


def dump(content):
    return json.dumps(content).encode()  # which may hold NaN and Infinity, as Python reads them


@pytest.fixture(scope='module')
def trained(prepared, tmp_path_factory):
    """A folder with data and a run that has checkpoints of steps 2 and 4; {path: bytes} of its files."""
    place = tmp_path_factory.mktemp('trained')
    shutil.copytree(prepared / 'data', place / 'data')
    assert train(place, max_iters=4).code == 0
    return place, {path: path.read_bytes() for path in place.rglob('*') if path.is_file()}


@pytest.fixture
def here(trained, monkeypatch):
    """restore(): put everything back as it was. The test stands in that folder."""
    place, whole = trained
    monkeypatch.chdir(place)

    def restore():
        shutil.rmtree('out', ignore_errors=True)
        for path in place.iterdir():
            if path.is_file():
                path.unlink()
        for path, content in whole.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists() or path.read_bytes() != content:
                path.write_bytes(content)
    restore()
    yield restore
    assert not os.path.exists('sentinel')
    restore()


NEWEST = Path('out/a/ckpt/step_00000004')


def reseal():
    """Make manifest.json say what the other files hold: as someone would who can write them all."""
    manifest = json.loads((NEWEST / 'manifest.json').read_bytes())
    manifest['files'] = {name: {'bytes': (NEWEST / name).stat().st_size, 'sha256': files.sha256(NEWEST / name)}
                         for name in checkpoint.FILES}
    (NEWEST / 'manifest.json').write_bytes(dump({**manifest, 'digest': checkpoint.seal(manifest)}))


@given(data=st.data())
@fuzz(500)
def test_damaged_checkpoint_files(here, data):
    """Any bytes in place of any file: the step is refused and the one before is used, unless nothing has changed."""
    here()
    name = data.draw(st.sampled_from([*checkpoint.FILES, 'manifest.json']))
    whole = (NEWEST / name).read_bytes()
    content = data.draw(damaged(whole))
    (NEWEST / name).write_bytes(content)
    assert checkpoint.load('out/a').step == (4 if content == whole or name == 'manifest.json' and says_the_same(content, whole) else 2)


def says_the_same(content, whole):
    """Whether bytes are the same JSON, as with a space more."""
    try:
        return json.loads(content) == json.loads(whole)
    except (ValueError, RecursionError):
        return False


@given(data=st.data())
@fuzz(400)
def test_hostile_checkpoint_files(here, data):
    """The same with digests that match: what the files say is checked before it is used, and no code of theirs is run."""
    here()
    name = data.draw(st.sampled_from(['state.json', 'state.json', 'model.safetensors', 'optim.safetensors', 'manifest.json']))
    if name == 'manifest.json':
        manifest = data.draw(altered(json.loads((NEWEST / name).read_bytes())))
        (NEWEST / name).write_bytes(dump({**manifest, 'digest': checkpoint.seal(manifest)}))
    else:
        whole = (NEWEST / name).read_bytes()
        (NEWEST / name).write_bytes(dump(data.draw(altered(json.loads(whole)))) if name == 'state.json' else data.draw(damaged(whole)))
        reseal()
    clean(lambda: checkpoint.load_model('out/a', 4))
    done = train('.', init_from='resume', max_iters=5)
    assert done.code in (0, 2, 65) and 'Traceback' not in done.text, done.text


@given(data=st.data())
@fuzz(400)
def test_odd_meta(here, data):
    """meta.json with anything in it, as text or as values."""
    here()
    path = Path('data/tiny/meta.json')
    whole = path.read_bytes()
    path.write_bytes(data.draw(st.one_of(damaged(whole), altered(json.loads(whole)).map(dump))))

    def use():
        opened = Data('data/tiny')
        opened.check_length(8)
        return opened.train.batch(1, 0, 4, 8), opened.val.rows([0], 8), opened.tokenizer.byte_lengths()
    clean(use)


@given(data=st.data())
@fuzz(300)
def test_odd_tokens(here, data):
    """.bin files of any bytes, with and without the digest and the counts to match."""
    here()
    split = data.draw(st.sampled_from(['train', 'val']))
    path = Path(f'data/tiny/{split}.bin')
    content = data.draw(damaged(path.read_bytes()))
    path.write_bytes(content)
    if data.draw(st.booleans()):
        meta = json.loads(Path('data/tiny/meta.json').read_bytes())
        meta[split] |= {'tokens': len(content) // 2, 'sha256': hashlib.sha256(content).hexdigest()}
        Path('data/tiny/meta.json').write_bytes(dump(meta))
    before = set(os.listdir('.'))
    done = train('.', out_dir='out/b', max_iters=1, eval_interval=9, overwrite='true')
    assert done.code in (0, 2) and 'Traceback' not in done.text, done.text
    assert done.code == 0 or done.text.splitlines()[-1].startswith('error: ') and set(os.listdir('.')) == before


RECORD = st.fixed_dictionaries({}, optional={'event': st.sampled_from(['eval', 'train', 'final', 'x']) | JSON,
                                             'step': st.integers(0, 6) | JSON, 'loss': NUMBERS | JSON})


@given(data=st.data())
@fuzz(300)
def test_odd_metrics(here, data):
    """metrics.jsonl with torn lines, odd records and bytes that are no text: a resumed run passes them over and leaves none behind."""
    here()
    path = Path('out/a/metrics.jsonl')
    lines = data.draw(st.lists(st.one_of(RECORD.map(dump), JSON.map(dump), st.binary(max_size=30), damaged(path.read_bytes())), max_size=4))
    path.write_bytes(path.read_bytes() + b'\n'.join(lines))
    done = train('.', init_from='resume', max_iters=5)
    assert done.code == 0 and 'Traceback' not in done.text, done.text
    assert [r['step'] for r in metrics.read('out/a') if r['event'] == 'train'][-1] == 4
    for line in path.read_bytes().splitlines():
        assert isinstance(json.loads(line)['step'], int)


def config_of(script):
    """The settings class of a script."""
    module = importlib.import_module(script)
    return next(each for name, each in vars(module).items() if name.endswith('Config') and is_dataclass(each) and each.__module__ == script)


WORD = st.one_of(NUMBERS.map(str), st.text(max_size=8), st.sampled_from(['', 'none', 'true', '1e999', '-', '--', '=', '0x1', '1_0', '٣']))


@given(data=st.data())
@fuzz(900)
def test_odd_command_lines(here, data):
    """Any words, right names with odd values, config files of any text: settings that hold what they may, or one message."""
    here()
    config = config_of(data.draw(st.sampled_from(SCRIPTS)))
    names = st.sampled_from([*config.__dataclass_fields__, 'n_heads', 'ler', '', '__class__', 'problems'])
    argv = data.draw(st.lists(st.one_of(st.tuples(names, WORD).map('--{0[0]}={0[1]}'.format), WORD, names.map('--{}'.format)), max_size=4))
    if data.draw(st.integers(0, 4)) == 0:
        text = data.draw(st.one_of(st.tuples(names, st.text(max_size=8)).map('{0[0]} = {0[1]}'.format), st.binary(max_size=20)))
        Path('odd.py').write_bytes(text if isinstance(text, bytes) else text.encode('utf-8', 'surrogatepass'))
        argv.append('odd.py')
    argv = [word for word in argv if word not in ('-h', '--help')]
    done = clean(lambda: configure(config, argv))
    assert done is None or type(done[0]) is config


@given(name=st.sampled_from(['n_layer', 'n_head', 'n_embd', 'block_size', 'batch_size', 'vocab_multiple', 'dropout', 'learning_rate',
                             'warmup_iters', 'lr_decay_iters', 'grad_clip', 'beta1', 'weight_decay', 'eval_tokens', 'log_interval', 'seed',
                             'wpe_scale', 'rope_base', 'keep_checkpoints', 'checkpoint_interval', 'eval_batch_size', 'dataset', 'wpe',
                             'init_from', 'device', 'dtype', 'train_only']),
       value=st.one_of(st.integers(-2, 20), st.floats(), st.text(st.characters(exclude_categories=['Cs']), max_size=6)))
@fuzz(300)
def test_odd_runs(here, name, value):
    """One setting of a run of two updates is odd: it trains, or ends with a message before there is a run folder."""
    here()
    shutil.rmtree('out/b', ignore_errors=True)
    done = train('.', **{'out_dir': 'out/b', 'max_iters': 2, name: value})
    assert done.code in (0, 2, 65) and 'Traceback' not in done.text, done.text
    assert done.code != 2 or 'error: ' in done.text and not os.path.exists('out/b'), done.text
