"""Weights, gradients and optimizer state in parts (FSDP2): the losses of one process, and checkpoints that do not show it."""
import json
import os
import signal

import pytest
import torch

import train as script
from nanope import checkpoint, metrics, parallel
from runs import losses, torchrun, train, weights
from test_parallel import HARD, PARTS, assert_near, at_call, kill, train_ranks, TWO

pytestmark = pytest.mark.skipif(not hasattr(os, 'fork'), reason='forks')
SCHEMES = ('learned', 'sinusoidal', 'rope', 'none', 'alibi')
SHARD = dict(PARTS, n_layer=2, shard='true')
ONE = dict(PARTS, n_layer=2)


def assert_same_checkpoint(place, step, ours='out/a', theirs='out/b'):
    """The same files, names, shapes and types; weights and moments equal to rounding."""
    first, second = (checkpoint.verify(checkpoint.step_folder(place / run, step)) for run in (ours, theirs))
    assert sorted(os.listdir(first.path)) == sorted(os.listdir(second.path))
    for name in ('model', 'optim'):
        mine, other = first.tensors(name), second.tensors(name)
        assert mine.keys() == other.keys()
        for key, tensor in mine.items():
            assert (tensor.shape, tensor.dtype) == (other[key].shape, other[key].dtype), key
            torch.testing.assert_close(tensor, other[key], rtol=0, atol=1e-4)


def test_one_process_has_nothing_to_share(place):
    """A warning, and the run without it."""
    done = train(place, max_iters=2, shard='true')
    assert done.code == 0 and 'warning: shard=True has no effect on a single process' in done.text
    assert train(place, max_iters=2, out_dir='out/b').code == 0 and losses(place) == losses(place, 'out/b')


def test_float16_is_refused(monkeypatch):
    with pytest.raises(ValueError, match='--dtype=bfloat16'):
        parallel.may_shard(True, 'float16')


def test_sharded_run_is_one_process(place):
    """Losses, gradient norms (clipped to a global norm), evaluations and checkpoints; both ranks hold about half of everything."""
    def note(rank):
        original = script.save

        def save(config, step, model, optimizers, *rest):
            state = [tensor for each in optimizers[0].state.values() for tensor in each.values() if tensor.dim()]
            with open(f'held_{rank}', 'w') as file:
                json.dump([sum(parallel.own(t).numel() for t in tensors) for tensors in (model.parameters(), state)], file)
            return original(config, step, model, optimizers, *rest)
        script.save = save
    codes, first, second = train_ranks(place, note, **SHARD, sample_interval=3, sample_tokens=12, grad_clip=0.25)
    assert codes == [0, 0] and second == '', first
    assert train(place, out_dir='out/b', **ONE, sample_interval=3, sample_tokens=12, grad_clip=0.25).code == 0
    assert_near(losses(place), losses(place, 'out/b'))
    for ours, theirs in zip(metrics.read(place / 'out/a'), metrics.read(place / 'out/b'), strict=True):
        assert (ours['event'], ours['step']) == (theirs['event'], theirs['step'])
        if ours['event'] == 'train':
            assert ours['grad_norm'] == pytest.approx(theirs['grad_norm'], rel=1e-4)
    assert_same_checkpoint(place, 6)
    whole = sum(tensor.numel() for tensor in checkpoint.load(place / 'out/a').tensors('model').values())
    held = [json.loads((place / f'held_{rank}').read_text()) for rank in (0, 1)]
    assert [sum(both) for both in zip(*held)] == [whole, 2 * whole]
    assert max(parameters for parameters, _ in held) < 0.55 * whole


@pytest.mark.slow
@pytest.mark.parametrize('wpe', SCHEMES)
def test_each_scheme(place, wpe):
    """Tied embedding, position tables that are no parameters, dropout off: the losses of one process and its checkpoint."""
    assert train_ranks(place, **SHARD, wpe=wpe)[0] == [0, 0]
    assert train(place, out_dir='out/b', **ONE, wpe=wpe).code == 0
    assert_near(losses(place), losses(place, 'out/b'))
    assert_same_checkpoint(place, 6)


@pytest.mark.slow
def test_resumed_sharded_has_the_same_bits(place):
    """Stopped and resumed = never stopped, dropout on, as for any run."""
    settings = dict(HARD, n_layer=2, shard='true')
    assert train_ranks(place, out_dir='out/b', **settings)[0] == [0, 0]
    assert train_ranks(place, max_iters=3, **settings)[0] == [0, 0]
    codes, text, _ = train_ranks(place, init_from='resume', **settings)
    assert codes == [0, 0] and 'warning' not in text
    assert losses(place) == losses(place, 'out/b') and weights(place, 6) == weights(place, 6, 'out/b')


@pytest.mark.slow
@pytest.mark.parametrize('rank, name, call, step', [(1, 'update', 4, 4), (0, 'evaluate', 2, 2)])
def test_sigterm_to_one_that_shares(place, rank, name, call, step):
    """Both stop at the same step, which is saved whole, with exit 75; resumed to the same bits."""
    settings = dict(HARD, n_layer=2, shard='true')
    codes, text, _ = train_ranks(place, lambda own: own == rank and at_call(script, name, call, kill(signal.SIGTERM)), **settings)
    assert codes == [75, 75] and f'saved at step {step};' in text and checkpoint.load(place / 'out/a').step == step
    assert train_ranks(place, init_from='resume', **settings)[0] == [0, 0]
    assert train_ranks(place, out_dir='out/b', **settings)[0] == [0, 0]
    assert losses(place) == losses(place, 'out/b') and weights(place, 6) == weights(place, 6, 'out/b')


@pytest.mark.slow
def test_there_and_back(place):
    """One process, then two that share, then two that do not, then one: one run, warned about at each change."""
    assert train(place, out_dir='out/b', **ONE, max_iters=8).code == 0
    assert train(place, **ONE, max_iters=2).code == 0
    codes, text, _ = train_ranks(place, init_from='resume', **SHARD, max_iters=4)
    assert codes == [0, 0] and 'warning: shard was None, now True: same batches, but not the same bits' in text
    codes, text, _ = train_ranks(place, init_from='resume', **ONE, max_iters=6)
    assert codes == [0, 0] and 'warning: shard was True, now None' in text
    assert train(place, init_from='resume', **ONE, max_iters=8).code == 0
    assert_near(losses(place), losses(place, 'out/b'))
    assert_same_checkpoint(place, 8)


@pytest.mark.slow
@pytest.mark.parametrize('settings', [dict(checkpoint_blocks='true'), dict(train_only='wpe'), dict(dtype='bfloat16')], ids=str)
def test_with_other_settings(place, settings):
    assert train_ranks(place, **SHARD, **settings)[0] == [0, 0]
    assert train(place, out_dir='out/b', **ONE, **settings).code == 0
    ours, theirs = (list(map(float.fromhex, losses(place, run).values())) for run in ('out/a', 'out/b'))
    assert ours == pytest.approx(theirs, abs=1e-2 if 'dtype' in settings else 1e-5)


@pytest.mark.slow
def test_started_from_another_run(place):
    assert train(place, out_dir='out/base', **ONE, max_iters=2).code == 0
    assert train_ranks(place, init_from='out/base', **SHARD)[0] == [0, 0]
    assert train(place, out_dir='out/b', init_from='out/base', **ONE).code == 0
    assert_near(losses(place), losses(place, 'out/b'))


@pytest.mark.slow
@pytest.mark.parametrize('rank', [0, 1])
def test_not_finite_in_one_part(place, rank):
    """A weight that only one process holds: both stop, with exit 65, and save nothing of it."""
    def poison(own):
        original = script.update

        def update(model, *args):
            result = original(model, *args)
            if args[4] == 3 and own == rank:
                with torch.no_grad():
                    parallel.own(model.transformer.ln_f.weight).fill_(float('nan'))
            return result
        script.update = update
    codes, text, _ = train_ranks(place, poison, **SHARD)
    assert codes == [65, 65] and 'error: not finite: ' in text and checkpoint.steps(place / 'out/a') == [2]


@pytest.mark.slow
def test_torchrun_compiled(place):
    """The command of the README, with each block compiled: no warning, and the losses of one process."""
    process = torchrun(place, *TWO, **SHARD, compile='true', sample_interval=3, sample_tokens=12)
    assert process.wait(timeout=250) == 0, (place / 'told').read_text()
    text = (place / 'told').read_text()
    assert 'compile: True' in text and 'warning: ' not in text.lower().replace('deprecationwarning: ', ''), text
    assert train(place, out_dir='out/b', **ONE).code == 0
    ours, theirs = (list(map(float.fromhex, losses(place, run).values())) for run in ('out/a', 'out/b'))
    assert ours == pytest.approx(theirs, abs=1e-4)
