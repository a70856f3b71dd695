"""What people ask of a trainer: early stopping, samples on the way, a learning-rate range test, less memory."""
import json
import math
import shutil
import socket
import threading
import types

import pytest
import torch
from hypothesis import given, strategies as st

import compare
from nanope import cells, checkpoint, lr_range, metrics, monitor, plots
from nanope.configurator import configure
from runs import ROOT, flags, losses, start, train, weights
from small import SCHEMES, build, tokens
from train import TrainConfig

HARD = dict(dropout=0.1, gradient_accumulation_steps=2, batch_size=2)
FLAT = dict(learning_rate=1e-12, min_lr=0, max_iters=50, lr_decay_iters=50)  # a loss that stays where it is


def records(place, *events, run='out/a'):
    return [r for r in metrics.read(place / run) if r['event'] in events]


# ---- early stopping -----------------------------------------------------------------------------------------------------------------

def spent(tmp_path, evals, patience, min_delta=0.0):
    (tmp_path / 'metrics.jsonl').write_text(''.join(json.dumps({'event': 'eval', 'step': i, 'loss': loss}) + '\n'
                                                    for i, loss in enumerate(evals)))
    return monitor.out_of_patience(types.SimpleNamespace(out_dir=tmp_path, patience=patience, min_delta=min_delta, eval_interval=1))


@pytest.mark.parametrize('evals, patience, min_delta, over', [
    ([], 1, 0, False), ([3], 1, 0, False), ([3, 3], 1, 0, True), ([3, 2.9], 1, 0, False), ([3, 2.9], 1, 0.1, True),  # not more than
    ([3, 4, 5], 2, 0, True), ([3, 4, 5], 3, 0, False), ([3, 4, 2, 5], 2, 0, False), ([3, 4, 2, 5, 2], 2, 0, True),
    ([3, 2.95, 2.9, 2.85], 2, 0.1, False), ([3, 3, 3], None, 0, False)])  # small steps add up: compared with the best that counted
def test_patience(tmp_path, evals, patience, min_delta, over):
    assert spent(tmp_path, evals, patience, min_delta) is over


@given(evals=st.lists(st.integers(0, 9), max_size=12), patience=st.integers(1, 4))
def test_patience_by_its_definition(tmp_path_factory, evals, patience):
    """With no min_delta: the best of all but the last `patience` is as good as any of those."""
    over = len(evals) > patience and min(evals[:-patience]) <= min(evals[-patience:])
    assert spent(tmp_path_factory.mktemp('run'), evals, patience) is over


def test_stops_early_and_says_so(place):
    """Two evaluations without an improvement: saved, scored on all tokens, exit 0, and the best checkpoint named."""
    done = train(place, **FLAT, patience=2, min_delta=0.01)
    assert done.code == 0 and 'stopped early: 2 evaluations without an improvement of more than 0.01 nats' in done.text
    assert [r['step'] for r in records(place, 'eval')] == [0, 2, 4] and [r['step'] for r in records(place, 'final')] == [4]
    best = checkpoint.best_step(place / 'out/a')
    assert f'the best checkpoint is step {best}, validation loss ' in done.text and '--step=best' in done.text
    assert checkpoint.load(place / 'out/a').step == 4 and list(losses(place)) == [0, 1, 2, 3]
    assert cells.finished(str(place / 'out/a'))                   # compare.py does not train it again
    done = train(place, **FLAT, patience=2, min_delta=0.01, init_from='resume')
    assert done.code == 0 and list(losses(place)) == [0, 1, 2, 3]  # resumed, it is still over
    assert train(place, **{**FLAT, 'max_iters': 7}, init_from='resume').code == 0  # without patience it goes on
    assert list(losses(place)) == [0, 1, 2, 3, 4, 5, 6] and [r['step'] for r in records(place, 'final')] == [7]


@pytest.mark.parametrize('stop', [1, 2, 3, 4, 5])
def test_patience_survives_a_resume(place, stop):
    """Wherever the run was stopped before, it ends at the same update, with the same bits."""
    settings = {**HARD, **FLAT, 'patience': 3, 'min_delta': 0.01}
    assert train(place, **settings, out_dir='out/b').code == 0
    assert train(place, **{**settings, 'max_iters': stop}).code == 0
    assert train(place, **settings, init_from='resume').code == 0
    assert losses(place) == losses(place, 'out/b') and weights(place, 6) == weights(place, 6, 'out/b')
    assert {r['step'] for r in records(place, 'eval')} == {0, 2, 4, 6, stop}


def test_patience_leaves_a_run_that_improves_alone(place):
    assert train(place, out_dir='out/b').code == 0
    done = train(place, patience=1)
    assert done.code == 0 and 'stopped early' not in done.text
    assert losses(place) == losses(place, 'out/b') and weights(place, 6) == weights(place, 6, 'out/b')


# ---- samples ------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('wpe', (*SCHEMES, 'alibi'))
def test_samples_change_nothing(place, wpe):
    """With dropout on, past block_size, and after a resume: the bits of a run without them; each is printed and on record once."""
    settings = dict(HARD, wpe=wpe)
    assert train(place, **settings, out_dir='out/b').code == 0
    done = train(place, **settings, sample_interval=2, sample_tokens=20, max_iters=4)
    assert done.code == 0
    first = {r['step']: r['text'] for r in records(place, 'sample')}
    assert list(first) == [2, 4] and all(len(text) >= 20 for text in first.values()) and first[2] != first[4]
    assert all(text in done.text for text in first.values())
    assert train(place, **settings, sample_interval=2, sample_tokens=20, init_from='resume').code == 0
    assert [r['step'] for r in records(place, 'sample')] == [2, 4, 6]
    assert {r['step']: r['text'] for r in records(place, 'sample')}.items() >= first.items()
    assert losses(place) == losses(place, 'out/b') and weights(place, 6) == weights(place, 6, 'out/b')


@pytest.mark.slow
def test_samples_of_a_compiled_run(place):
    """They are drawn from the model itself: nothing is compiled again for their lengths."""
    torch._dynamo.utils.counters.clear()                          # other tests of this process have theirs there
    done = train(place, compile='true', sample_interval=2, sample_tokens=20)
    assert done.code == 0 and 'recompile' not in done.text and len(records(place, 'sample')) == 3
    assert torch._dynamo.utils.counters['frames'].get('total', 0) <= 3  # training, and evaluation with other shapes


# ---- learning-rate range test -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('text', ['1', '1:0.1', 'a:b', '0:1', '-1:1', '1e-5:inf', 'nan:1', '1:2:3', ':', '1e-3:1e-3'])
def test_bad_range(place, text):
    done = train(place, lr_range=text)
    assert done.code == 2 and done.text.count('\n') == 1 and f'lr_range={text} must be two learning rates' in done.text
    assert not (place / 'out').exists()


def points(losses, low=1e-4, high=1.0):
    return [(low * (high / low) ** (i / (len(losses) - 1)), loss, loss) for i, loss in enumerate(losses)]


@pytest.mark.parametrize('losses, index', [
    ([5, 4, 3, 2, 3, 4], 3), ([5, 4, 3, 2], None), ([2, 3, 4, 5], None), ([5, 4, 3, 3.01], None), ([], None)])
def test_suggestion(losses, index):
    """A tenth of the rate of the lowest loss, where the range shows one; else a reason why there is none."""
    found = points(losses)
    best = lr_range.suggestion(found)
    assert best is None if index is None else best == pytest.approx(found[index][0] / 10)
    assert ('--learning_rate=' in lr_range.verdict(found, 99)) == (index is not None)


def test_range_test(place, monkeypatch):
    """The rate rises from one bound to the other by equal factors; nothing is saved; a run proper may follow and compare.py refuses it."""
    done = train(place, plot=True, lr_range='1e-4:10', max_iters=40)
    assert done.code == 0 and ('--learning_rate=' in done.text or 'no suggestion' in done.text)
    told = records(place, 'lr_range', run='out/a_lr_range')
    assert [r['lr'] for r in told] == pytest.approx([1e-4 * 1e5 ** (r['step'] / 39) for r in told]) and len(told) > 10
    assert sorted(path.name for path in (place / 'out/a_lr_range').iterdir() if path.name != '.lock') == [
        'config.json', 'lr_range.png', 'metrics.jsonl']
    assert (place / 'out/a_lr_range/lr_range.png').read_bytes().startswith(b'\x89PNG')
    monkeypatch.chdir(place)
    with pytest.raises(ValueError, match='out/a_lr_range holds no checkpoint'):
        compare.main(['out/a_lr_range'])
    assert train(place, max_iters=1).code == 0                    # its folder is not in the way
    assert train(place, lr_range='1e-4:10').code == 0             # as often as one likes: the last one stays
    assert records(place, 'lr_range', run='out/a_lr_range')[0]['lr'] == pytest.approx(1e-4)
    done = train(place, lr_range='1e-4:10', init_from='resume')
    assert done.code == 2 and 'there is none to resume' in done.text


def test_range_test_deletes_no_run(place):
    """Its folder may hold an earlier range test, which it replaces, and nothing else."""
    assert train(place, max_iters=1, out_dir='out/a_lr_range').code == 0
    shutil.rmtree(place / 'out/a_lr_range/ckpt')
    before = (place / 'out/a_lr_range/metrics.jsonl').read_bytes()
    done = train(place, lr_range='1e-4:10')
    assert done.code == 2 and 'out/a_lr_range already holds a run' in done.text
    assert (place / 'out/a_lr_range/metrics.jsonl').read_bytes() == before


def test_range_test_starts_like_the_run(place):
    """The same weights and batches: its first loss is that of the run."""
    assert train(place, max_iters=1).code == 0 and train(place, lr_range='1e-4:1', max_iters=3).code == 0
    assert records(place, 'lr_range', run='out/a_lr_range')[0]['loss'].hex() == losses(place)[0]


def test_range_test_that_blows_up(place, monkeypatch):
    """Not finite is an end that was to be expected: exit 0, with what there was before it."""
    import train as script
    original = script.update
    monkeypatch.setattr(script, 'update', lambda *args: torch.tensor([math.nan, math.nan, 0.0]) if args[5] == 9 else original(*args))
    done = train(place, lr_range='1e-4:1', max_iters=20)
    assert done.code == 0 and 'diverged' in done.text and len(records(place, 'lr_range', run='out/a_lr_range')) == 9
    assert not (place / 'out/a_lr_range/crash.json').exists()


# ---- less memory --------------------------------------------------------------------------------------------------------------------

def saved_bytes(model):
    """Bytes that a forward pass keeps for the backward pass, parameters left out, each storage counted once."""
    kept, own = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes(), tensor  # held, so that its place is not given to another one
        return tensor
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model.train()(tokens(4, 32), tokens(4, 32, seed=3))
    loss.backward()
    return sum(n_bytes for n_bytes, _ in kept.values())


@pytest.mark.parametrize('wpe', (*SCHEMES, 'alibi'))
def test_checkpointed_blocks_keep_less(wpe):
    """Eight blocks: their inputs alone are kept, less than a third of what was; gradients have the same bits, dropout on."""
    found = []
    for checkpointed in (False, True):
        model = build(wpe, n_layer=8, dropout=0.1)
        model.checkpoint_blocks = checkpointed
        torch.manual_seed(5)
        found.append((saved_bytes(model), [p.grad for p in model.parameters()]))
    (plain, gradients), (less, same) = found
    assert less < plain / 3 and all(map(torch.equal, gradients, same))


def test_checkpointed_run_has_the_same_bits(place):
    assert train(place, **HARD, n_layer=2, out_dir='out/b').code == 0
    assert train(place, **HARD, n_layer=2, checkpoint_blocks='true', max_iters=3).code == 0
    assert train(place, **HARD, n_layer=2, init_from='resume').code == 0  # and is resumed without
    assert losses(place) == losses(place, 'out/b') and weights(place, 6) == weights(place, 6, 'out/b')


@pytest.mark.slow
def test_checkpointed_and_compiled(place):
    assert train(place, n_layer=2, out_dir='out/b').code == 0
    done = train(place, n_layer=2, checkpoint_blocks='true', compile='true')
    assert done.code == 0 and 'compile: True' in done.text, done.text
    for ours, theirs in zip(losses(place).values(), losses(place, 'out/b').values(), strict=True):
        assert float.fromhex(ours) == pytest.approx(float.fromhex(theirs), abs=1e-4)


# ---- wandb --------------------------------------------------------------------------------------------------------------------------

@pytest.fixture
def black_hole(tmp_path, monkeypatch):
    """A proxy that accepts connections and never answers, as a firewall may: the list of connections made to it."""
    server, made = socket.create_server(('127.0.0.1', 0)), []

    def accept():
        while True:
            try:
                made.append(server.accept())
            except OSError:
                return
    threading.Thread(target=accept, daemon=True).start()
    for name in ('http_proxy', 'https_proxy', 'all_proxy'):
        for each in (name, name.upper()):
            monkeypatch.setenv(each, f'http://127.0.0.1:{server.getsockname()[1]}')
    monkeypatch.delenv('no_proxy', raising=False), monkeypatch.delenv('NO_PROXY', raising=False)
    monkeypatch.setenv('HOME', str(tmp_path))                     # no login of whoever runs the tests
    for name in ('WANDB_MODE', 'WANDB_API_KEY', 'WANDB_ERROR_REPORTING'):
        monkeypatch.delenv(name, raising=False)
    yield made
    server.close()


def finish(place, seconds, **settings):
    """train.py as users start it: what it printed, in less than that many seconds."""
    process = start(place, 'train.py', *flags(**settings))
    told = ''.join(process.communicate(timeout=seconds))
    assert process.returncode == 0, told
    return told


@pytest.mark.slow
def test_wandb_offline_for_real(place, black_hole):
    """The real package where no packet comes back: its files lie in the run folder, no bit changes, nothing asks the network."""
    told = finish(place, 120, **HARD, wandb='offline', sample_interval=2)
    assert 'warning' not in told and black_hole == []
    (file,) = (place / 'out/a/wandb').glob('offline-run-*/*.wandb')
    content = file.read_bytes()
    assert all(name in content for name in (b'train/loss', b'eval/stderr', b'final/bits_per_byte', b'sample/text', b'learning_rate'))
    assert train(place, **HARD, out_dir='out/b').code == 0
    assert losses(place) == losses(place, 'out/b') and weights(place, 6) == weights(place, 6, 'out/b')


@pytest.mark.slow
@pytest.mark.parametrize('key', ['', 'a' * 40])
def test_wandb_online_without_a_network(place, black_hole, monkeypatch, key):
    """With a login it waits half a minute, without one not at all; one warning of one line, and the run is done with the same bits."""
    monkeypatch.setenv('WANDB_API_KEY', key)
    told = finish(place, 150, **HARD, wandb='online')
    assert len([line for line in told.splitlines() if 'warning: no wandb: ' in line and 'training goes on without it' in line]) == 1
    assert told.count('warning') == 1
    assert train(place, **HARD, out_dir='out/b').code == 0
    assert losses(place) == losses(place, 'out/b') and weights(place, 6) == weights(place, 6, 'out/b')


# ---- configs, plots -----------------------------------------------------------------------------------------------------------------

def test_finetuning_config():
    """Starts from GPT-2's weights, on the data that its comment prepares."""
    path = ROOT / 'config/finetune_shakespeare.py'
    config, _ = configure(TrainConfig, [str(path)])
    assert config.init_from == 'gpt2' and config.out_dir == 'out/finetune_shakespeare'
    assert f'prepare.py {config.dataset} ' in path.read_text('utf-8')
    assert config.max_iters * config.batch_size * config.gradient_accumulation_steps * 1024 > 5 * 1.1e6  # passes over its tokens


def test_overlay(place, monkeypatch, capsys):
    """Loss curves without wandb: into loss.png, or where --to says; what was drawn is said."""
    for run in ('a', 'b'):
        assert train(place, out_dir=f'out/{run}', max_iters=2).code == 0
    monkeypatch.chdir(place)
    for args, path in ((['out/a', 'out/b'], 'loss.png'), (['--to=both.png', 'out/a', 'out/b'], 'both.png')):
        monkeypatch.setattr('sys.argv', ['plots.py', *args])
        plots.main()
        assert capsys.readouterr().out == f'wrote {path}: loss while training of a, b\n'
        assert (place / path).read_bytes().startswith(b'\x89PNG')
