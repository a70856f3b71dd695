"""The training loop: what it computes, that stop and resume changes no bit, and how it ends when something goes wrong."""
import contextlib
import functools
import itertools
import json
import math
import os
import platform
import shutil
import signal
import sys
import threading
import time
import types
from dataclasses import fields

import numpy as np
import pytest
import torch
from filelock import FileLock
from hypothesis import given, strategies as st
from torch.optim.optimizer import register_optimizer_step_pre_hook

import train as script
from model import GPT, GPTConfig
from nanope import checkpoint, compiling, device, loader, metrics, optim, plots
from runs import flags, fork_train, losses, start, train, wait, weights

SCHEMES = ('learned', 'sinusoidal', 'rope', 'none', 'alibi')
HARD = dict(dropout=0.1, gradient_accumulation_steps=2, batch_size=2)  # what resuming has to restore: dropout's generator, micro-batches
needs_fork = pytest.mark.skipif(not hasattr(os, 'fork'), reason='forks')


@pytest.fixture(scope='module')
def straight(prepared, tmp_path_factory):
    """folder(**settings): where that run of 6 updates was made, once for all tests of this file."""
    made = {}

    def folder(**settings):
        key = tuple(sorted(settings.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp('straight')
            shutil.copytree(prepared / 'data', made[key] / 'data')
            assert train(made[key], **settings).code == 0
        return made[key]
    return folder


def copy_of(folder, place):
    """Continue in `place` what was run in `folder`."""
    shutil.copytree(folder / 'out', place / 'out')
    return place


def at_update(monkeypatch, number, do):
    """Call do(model) right before the update of that number. Returns the list of updates made."""
    made, original = [], script.update

    def update(model, optimizer, scaler, config, data, step, *rest):
        made.append(step)
        if step == number:
            do(model)
        return original(model, optimizer, scaler, config, data, step, *rest)
    monkeypatch.setattr(script, 'update', update)
    return made


def records(place, *events):
    return [r for r in metrics.read(place / 'out/a') if r['event'] in events]


# ---- learning rate ------------------------------------------------------------------------------------------------------------------

def rate(step, learning_rate=1.0, min_lr=0.1, warmup_iters=4, lr_decay_iters=12, lr_decay='cosine'):
    return script.learning_rate_at(step, types.SimpleNamespace(learning_rate=learning_rate, min_lr=min_lr, warmup_iters=warmup_iters,
                                                               lr_decay_iters=lr_decay_iters, lr_decay=lr_decay))


@pytest.mark.parametrize('step, expected', [
    (0, 1 / 5), (3, 4 / 5), (4, 1.0),                                     # linear, and whole when the warm-up is over
    (6, 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2), (8, 0.55), (10, 0.1 + 0.9 * (1 - math.sqrt(0.5)) / 2),  # cosine of 45, 90 and 135 degrees
    (12, 0.1), (1000, 0.1)])
def test_learning_rate_closed_form(step, expected):
    """The values that the schedule's drawing shows, at its corners and halfway."""
    assert rate(step) == pytest.approx(expected)


@pytest.mark.parametrize('step, expected', [(3, 4 / 5), (4, 1.0), (6, 0.775), (8, 0.55), (10, 0.325), (12, 0.1), (1000, 0.1)])
def test_learning_rate_on_a_line(step, expected):
    assert rate(step, lr_decay='linear') == pytest.approx(expected)


@given(kind=st.sampled_from(['cosine', 'linear']), step=st.integers(0, 60), warmup=st.integers(0, 50), decay=st.integers(1, 50),
       peak=st.floats(0, 10), low=st.floats(0, 10))
def test_learning_rate_is_defined_everywhere(kind, step, warmup, decay, peak, low):
    """Warm-up of none or beyond the end, decay shorter than the run, min_lr above the peak: a rate between 0 and the larger one."""
    value = rate(step, peak, low, warmup, decay, kind)
    assert 0 <= value <= max(peak, low) * (1 + 1e-12)
    if step >= max(warmup, decay):
        assert value == low
    if warmup <= step < decay and low <= peak:
        assert rate(step + 1, peak, low, warmup, decay, kind) <= value * (1 + 1e-12)


# ---- a run and its traces -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('max_iters, evals, saves', [(7, [0, 3, 6, 7], {6, 7}), (6, [0, 3, 6], {3, 6}), (1, [0, 1], {1})])
def test_updates_evaluations_checkpoints(place, monkeypatch, max_iters, evals, saves):
    """Exactly max_iters updates; evaluation at 0, every interval and the end, never twice; saved at the end; every record there."""
    made = at_update(monkeypatch, -1, None)
    done = train(place, plot=True, max_iters=max_iters, eval_interval=3)
    assert done.code == 0 and made == list(range(max_iters))
    assert [r['step'] for r in records(place, 'eval')] == evals
    assert [r['step'] for r in records(place, 'train')] == made
    assert [r['step'] for r in records(place, 'final')] == [max_iters]
    best = min(records(place, 'eval')[1:], key=lambda r: r['loss'])['step']
    assert set(checkpoint.steps(place / 'out/a')) == saves | {best} and checkpoint.best_step(place / 'out/a') == best
    found = checkpoint.load(place / 'out/a')
    assert found.step == max_iters and all(t == max_iters for name, t in found.tensors('optim').items() if name.startswith('step.'))
    lines = (place / 'out/a/metrics.jsonl').read_text().splitlines()
    assert len(lines) == len(evals) + max_iters + 1
    assert all(json.loads(line, parse_constant=pytest.fail) for line in lines)  # strict JSON: no NaN
    assert all({'loss', 'lr', 'grad_norm', 'tokens_per_s'} <= set(r) for r in records(place, 'train'))
    assert (place / 'out/a/loss.png').read_bytes().startswith(b'\x89PNG')
    assert json.loads((place / 'out/a/config.json').read_text())['max_iters'] == max_iters


def test_intervals_of_their_own(place):
    """Checkpoints and evaluations on the way need not coincide; the last evaluation and the final score use all tokens."""
    assert train(place, max_iters=5, eval_interval=2, checkpoint_interval=3, keep_checkpoints=9, eval_tokens=40).code == 0
    assert checkpoint.steps(place / 'out/a') == [3, 5]
    assert [(r['step'], r['tokens']) for r in records(place, 'eval', 'final')] == [(0, 40), (2, 40), (4, 40), (5, 40), (5, 603)]


@pytest.mark.parametrize('settings', [
    dict(eval_interval=1), dict(eval_interval=50), dict(log_interval=3), dict(eval_batch_size=1), dict(eval_tokens=16),
    dict(checkpoint_interval=1), dict(keep_checkpoints=1), dict(wandb='offline', wandb_project='x')], ids=str)
def test_free_settings_do_not_touch_the_losses(place, straight, monkeypatch, settings):
    """Nothing about evaluation, logging or saving may shift a batch or a dropout mask: the same bits."""
    monkeypatch.setitem(sys.modules, 'wandb', types.SimpleNamespace(init=lambda **_: fake_wandb([]), Settings=dict))
    reference = straight(dropout=0.1)
    assert train(place, dropout=0.1, **settings).code == 0
    assert losses(place).items() <= losses(reference).items() and 5 in losses(place)
    assert weights(place, 6) == weights(reference, 6)


def test_accumulation_is_one_large_batch(place, straight):
    """2 micro-batches of 4 = 1 batch of 8, to rounding: the loss is the mean over all rows, not their sum."""
    assert train(place, batch_size=4, gradient_accumulation_steps=2).code == 0
    whole = straight(batch_size=8)
    for here, there in zip(records(place, 'train'), records(whole, 'train')):
        assert here['loss'] == pytest.approx(there['loss'], abs=1e-5) and here['grad_norm'] == pytest.approx(there['grad_norm'], abs=1e-4)
    ours, theirs = (checkpoint.load(each / 'out/a').tensors('model') for each in (place, whole))
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=1e-4)


@pytest.mark.parametrize('micro_batch', [1, 2, 3, 8])
def test_micro_batches_of_any_size(place, straight, micro_batch):
    """8 rows in pieces of 3, 3 and 2 are still the mean over 8."""
    assert train(place, batch_size=4, gradient_accumulation_steps=2, micro_batch=micro_batch).code == 0
    for here, there in zip(records(place, 'train'), records(straight(batch_size=8), 'train')):
        assert here['loss'] == pytest.approx(there['loss'], abs=1e-5) and here['grad_norm'] == pytest.approx(there['grad_norm'], abs=1e-4)


def test_micro_batches_split_the_batch(place, monkeypatch):
    """However the rows are split, the model sees the same ones in the same order, and no other ones."""
    seen = {}
    for parts in (1, 2, 4):
        rows = []
        with pytest.MonkeyPatch.context() as patch:
            at_update(patch, 0, lambda model: model.register_forward_pre_hook(
                lambda module, args: rows.append(args[0].clone()) if module.training else None))
            assert train(place, out_dir=f'out/{parts}', batch_size=8 // parts, gradient_accumulation_steps=parts, max_iters=2).code == 0
        assert len(rows) == 2 * parts
        seen[parts] = torch.cat(rows)
    assert torch.equal(seen[1], seen[2]) and torch.equal(seen[1], seen[4]) and not torch.equal(seen[1][:8], seen[1][8:])


def test_dropout_differs_from_update_to_update(place, monkeypatch):
    """Seeded by the step: four micro-batches of two updates have four masks; the same seed repeats them, another one does not."""
    masks = {}
    for name, seed in (('a', 1), ('b', 1), ('c', 2)):
        with pytest.MonkeyPatch.context() as patch:
            at_update(patch, 0, lambda model: model.transformer.drop.register_forward_hook(
                lambda module, args, out: masks.setdefault(name, []).append((out == 0).numpy().tobytes()) if module.training else None))
            assert train(place, out_dir=f'out/{name}', seed=seed, **HARD, max_iters=2).code == 0
    assert len(set(masks['a'])) == 4 and masks['a'] == masks['b'] and set(masks['a']).isdisjoint(masks['c'])


@pytest.mark.parametrize('clip', [0.25, 0])
def test_gradients_are_clipped(place, clip):
    """What reaches the optimizer has at most norm grad_clip, 0 leaves it alone; what is recorded is the norm before."""
    norms = []
    handle = register_optimizer_step_pre_hook(lambda optimizer, *_: norms.append(
        torch.cat([p.grad.flatten() for group in optimizer.param_groups for p in group['params']]).norm().item()))
    assert train(place, grad_clip=clip).code == 0
    handle.remove()
    before = [r['grad_norm'] for r in records(place, 'train')]
    assert min(before) > 0.25 and norms == pytest.approx([clip or norm for norm in before], rel=1e-4)


def test_schemes_share_batches_and_weights(place):
    """Same seed, every scheme: at step 0 every shared parameter and every batch is the same, bit for bit; another seed shares nothing."""
    seen = {}
    for wpe, seed in [(wpe, 1337) for wpe in SCHEMES] + [('none', 1)]:
        with pytest.MonkeyPatch.context() as patch:
            def look(model, key=(wpe, seed)):
                seen[key] = [{name: p.detach().clone() for name, p in model.named_parameters()}]
                model.register_forward_pre_hook(lambda module, args: seen[key].append(args[0]) if module.training else None)
            at_update(patch, 0, look)
            assert train(place, out_dir=f'out/{wpe}{seed}', wpe=wpe, seed=seed, max_iters=1).code == 0
    shared, batch = seen['none', 1337]
    for wpe in SCHEMES:
        others, other_batch = seen[wpe, 1337]
        assert set(others) - set(shared) == ({'transformer.wpe.weight'} if wpe == 'learned' else set())
        assert all(torch.equal(others[name], p) for name, p in shared.items()) and torch.equal(other_batch, batch)
    assert not torch.equal(seen['none', 1][1], batch)
    assert not torch.equal(seen['none', 1][0]['transformer.wte.weight'], shared['transformer.wte.weight'])


@pytest.mark.parametrize('wpe', SCHEMES)
def test_it_learns(place, wpe):
    """60 updates of any scheme bring the loss well below that of a uniform guess, which it starts near."""
    assert train(place, wpe=wpe, max_iters=60, lr_decay_iters=60, eval_interval=60, batch_size=16, log_interval=60).code == 0
    first, last = records(place, 'eval')
    vocab_size = json.loads((place / 'data/tiny/meta.json').read_text('utf-8'))['vocab_size']
    assert first['loss'] == pytest.approx(math.log(vocab_size), abs=0.1) and last['loss'] < first['loss'] - 0.7


# ---- stop and resume ----------------------------------------------------------------------------------------------------------------

def scramble():
    """Leave the global generators in a state that a new process would not have."""
    torch.manual_seed(time.time_ns() % 2**31), np.random.seed(time.time_ns() % 2**31)


def assert_same_run(place, reference, step=6):
    """Every loss of every update and every weight, to the bit; and the records are those of one run."""
    assert losses(place) == losses(reference)
    assert weights(place, step) == weights(reference, step)
    told = [[(r['event'], r['step'], r['loss'].hex()) for r in records(each, 'train', 'eval', 'final')] for each in (place, reference)]
    assert told[0] == told[1]


@pytest.mark.parametrize('wpe', SCHEMES)
def test_resume_is_never_having_stopped(place, straight, wpe):
    """N + N updates = 2N updates, with dropout, accumulation and evaluations in between."""
    assert train(place, wpe=wpe, **HARD, max_iters=3).code == 0
    scramble()
    assert train(place, wpe=wpe, **HARD, init_from='resume').code == 0
    reference = straight(wpe=wpe, **HARD)
    assert losses(place) == losses(reference) and weights(place, 6) == weights(reference, 6)


@pytest.mark.parametrize('settings', [{}, dict(train_only='wpe')], ids=str)
def test_resume_with_muon(place, straight, settings):
    """Two optimizers, each with a state of its own; a stop before the first update leaves neither with any."""
    settings = dict(HARD, optimizer='muon', **settings)
    if 'train_only' in settings:                                  # nothing is left for Muon
        assert train(place, out_dir='out/b').code == 0
        settings['init_from'] = 'out/b'
    reference = {}
    for stops in ([], [3], [1, 4]):
        for number, stop in enumerate(stops + [6]):
            more = dict(init_from='resume') if number else {}
            done = train(place, **{**settings, 'out_dir': 'out/a', 'max_iters': stop, 'overwrite': not number, **more})
            assert done.code == 0, done.text
            scramble()
        reference = reference or weights(place, 6)
        assert weights(place, 6) == reference


def test_muon_updates_the_matrices_of_the_blocks_and_adamw_the_rest(place):
    """One update at a time: what each optimizer alone makes of the same gradients, by torch's own classes."""
    assert train(place, max_iters=1, eval_interval=1, optimizer='muon', muon_lr=0.05, warmup_iters=0).code == 0
    config = types.SimpleNamespace(**json.loads((place / 'out/a/config.json').read_text()))
    model = GPT(GPTConfig(**{field.name: getattr(config, field.name) for field in fields(GPTConfig)}), config.seed)
    x, y = loader.Data(place / 'data/tiny').train.batch(config.seed, 0, config.batch_size, config.block_size)
    model(x, y).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
    matrices = {name: p for name, p in model.named_parameters() if '.h.' in name and p.dim() == 2}
    assert len(matrices) == 4 * config.n_layer and not any('wpe' in name or 'wte' in name for name in matrices)
    kind = torch.optim.Muon if device.cpu_has_bf16() else optim.Float32Muon
    kind(list(matrices.values()), lr=0.05, weight_decay=0.01, momentum=0.95).step()
    groups = model.optimizer_groups(config.weight_decay)
    for group in groups:
        group['params'] = [p for p in group['params'] if all(p is not matrix for matrix in matrices.values())]
    torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=True).step()
    trained = checkpoint.load(place / 'out/a', 1).tensors('model')
    assert all(torch.equal(trained[name], p) for name, p in model.named_parameters())


@pytest.mark.parametrize('wpe', SCHEMES)
@pytest.mark.parametrize('before, after', [(1, 5), (5, 1), (3, 2)])
def test_resume_with_other_intervals(place, straight, wpe, before, after):
    """Evaluated, saved and logged at other steps before and after the stop: the same bits."""
    settings = dict(wpe=wpe, **HARD, log_interval=1)
    assert train(place, **settings, max_iters=4, eval_interval=before, checkpoint_interval=after).code == 0
    scramble()
    assert train(place, **settings, init_from='resume', eval_interval=after, checkpoint_interval=before).code == 0
    reference = straight(wpe=wpe, **HARD)
    assert losses(place) == losses(reference) and weights(place, 6) == weights(reference, 6)


def send(*signals):
    return lambda *_: [os.kill(os.getpid(), each) for each in signals]


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize('step', [0, 2, 5])
def test_signal_in_an_update(place, straight, monkeypatch, number, step):
    """The update is finished and saved, exit 75, and going on gives the bits of a run that was left alone."""
    with monkeypatch.context() as patch:
        at_update(patch, step, send(number))
        done = train(place, **HARD)
    assert done.code == 75 and f'{number.name}: saved at step {step + 1}' in done.text
    assert checkpoint.load(place / 'out/a').step == step + 1 and records(place, 'final') == []
    scramble()
    assert train(place, **HARD, init_from='resume').code == 0
    assert_same_run(place, straight(**HARD))


MOMENTS = {
    'before the first step': (script, 'describe', 1, 0),
    'while compiling': (compiling, 'compile_model', 1, 0),
    'in the first evaluation': (script, 'evaluate', 1, 0),
    'in a later evaluation': (script, 'evaluate', 2, 2),
    'in the last evaluation': (script, 'evaluate', 4, 6),
    'in a save': (checkpoint, 'save', 1, 2),
    'in the last save': (checkpoint, 'save', 3, 6),
}


@pytest.mark.parametrize('moment', MOMENTS)
def test_signal_at_other_moments(place, straight, monkeypatch, moment):
    """Wherever the signal comes: what was done is saved, exit 75, and resumed to the same bits and the same records."""
    module, name, call, step = MOMENTS[moment]
    calls, original = [], getattr(module, name)

    def interrupted(*args, **kwargs):
        calls.append(name)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **kwargs)
    with monkeypatch.context() as patch:
        patch.setattr(module, name, interrupted)
        done = train(place, **HARD)
    assert done.code == 75 and f'SIGTERM: saved at step {step};' in done.text and checkpoint.load(place / 'out/a').step == step
    assert name != 'evaluate' or all(r['step'] < step for r in records(place, 'eval'))  # it was not waited for
    scramble()
    assert train(place, **HARD, init_from='resume').code == 0
    assert_same_run(place, straight(**HARD))


@pytest.mark.slow
@pytest.mark.parametrize('optimizer', ['adamw', 'muon'])
@pytest.mark.parametrize('wpe', SCHEMES)
def test_signals_with_every_scheme_and_optimizer(place, straight, wpe, optimizer):
    """One run, stopped in an update, in an evaluation, in a save and cleanly, has the bits and records of one that was left alone."""
    settings, how = dict(HARD, wpe=wpe, optimizer=optimizer), {}
    for module, name, call in ((script, 'update', 2), (script, 'evaluate', 1), (checkpoint, 'save', 1)):
        calls, original = [], getattr(module, name)

        def interrupted(*args, calls=calls, call=call, original=original, **kwargs):
            calls.append(1)
            if len(calls) == call:
                os.kill(os.getpid(), signal.SIGTERM)
            return original(*args, **kwargs)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, name, interrupted)
            assert train(place, **settings, **how).code == 75
        how = dict(init_from='resume')
        scramble()
    assert train(place, **settings, **how, max_iters=5).code == 0 and train(place, **settings, **how).code == 0
    reference = straight(**settings)
    assert losses(place) == losses(reference) and weights(place, 6) == weights(reference, 6)


@needs_fork
@pytest.mark.parametrize('second', [signal.SIGTERM, signal.SIGINT])
def test_second_signal_ends_at_once(place, straight, monkeypatch, second):
    """For one who cannot wait: no save, and the checkpoint before is whole."""
    at_update(monkeypatch, 3, send(signal.SIGTERM, second))
    assert wait(fork_train(place, **HARD)) == -second
    assert checkpoint.load(place / 'out/a').step == 2
    monkeypatch.undo()
    assert train(place, **HARD, init_from='resume').code == 0
    assert_same_run(place, straight(**HARD))


@pytest.mark.parametrize('number', [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_signal_to_a_real_process(place, number):
    """The script itself, started as users do, stopped at a moment nobody chose; resumed here, equal to a run that was left alone."""
    settings = dict(HARD, max_iters=100_000, lr_decay_iters=100_000, eval_interval=10_000)
    process = start(place, 'train.py', *flags(**settings))
    while not records(place, 'train') and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(number)
    text = process.communicate(timeout=60)[1]
    assert process.returncode == 75, text
    stopped = checkpoint.load(place / 'out/a').step
    assert f'{number.name}: saved at step {stopped};' in text and stopped == len(losses(place))
    settings['max_iters'] = stopped + 2
    assert train(place, **settings, init_from='resume').code == 0
    assert train(place, **settings, out_dir='out/b').code == 0
    assert losses(place) == losses(place, 'out/b') and weights(place, stopped + 2) == weights(place, stopped + 2, 'out/b')


@pytest.mark.slow
def test_signal_while_compiling_for_real(place, straight):
    """torch.compile takes seconds; the signal is heeded right after it, before the first update, and nothing is lost."""
    process = start(place, 'train.py', *flags(**HARD, compile='true'))
    deadline = time.time() + 60
    while not (place / 'out/a/.lock').exists() and time.time() < deadline:
        time.sleep(0.02)
    time.sleep(1.5)  # the model is built in a moment; then it compiles
    process.send_signal(signal.SIGTERM)
    text = process.communicate(timeout=120)[1]
    assert process.returncode == 75 and 'SIGTERM: saved at step 0;' in text, text
    assert train(place, **HARD, init_from='resume', compile='false').code == 0  # compiling need not be waited for twice
    assert_same_run(place, straight(**HARD))


@needs_fork
@pytest.mark.slow
@pytest.mark.parametrize('optimizer', ['adamw', 'muon'])
@pytest.mark.parametrize('wpe', SCHEMES)
def test_sigkill_at_random_moments(place, straight, record_property, wpe, optimizer):
    """SIGKILL, one time in two inside a save: every time the run goes on from a whole checkpoint, and ends in the same bits."""
    settings = dict(HARD, wpe=wpe, optimizer=optimizer, max_iters=120, lr_decay_iters=120, checkpoint_interval=1, eval_interval=5)
    random, kills, original = np.random.default_rng(5), 0, os.fsync
    while kills < 20:
        fatal, calls = int(random.integers(1, 60)), []

        def fsync(handle):
            calls.append(handle)
            if len(calls) == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            original(handle)

        inside = kills % 2 == 0
        child = fork_train(place, lambda: setattr(os, 'fsync', fsync) if inside else None, **settings, init_from='auto')
        if not inside:
            time.sleep(random.uniform(0.02, 0.2))
            os.kill(child, signal.SIGKILL)
        assert wait(child) == -signal.SIGKILL, (place / 'printed').read_text()  # and not over before
        kills += 1
    record_property('tries', kills)
    assert train(place, **settings, init_from='auto').code == 0
    reference = straight(**settings)
    assert_same_run(place, reference, 120)
    assert not list((place / 'out/a/ckpt').glob('.tmp*'))


# ---- what a resumed run may and may not change --------------------------------------------------------------------------------------

@pytest.mark.parametrize('saved, settings', [
    ({}, dict(wpe='sinusoidal')), (dict(wpe='rope'), dict(wpe='sinusoidal')), (dict(wpe='sinusoidal'), dict(wpe='rope')),
    (dict(wpe='rope'), dict(wpe='rope', rope_base=500)), (dict(wpe='sinusoidal'), dict(wpe='sinusoidal', wpe_scale=1)),
    ({}, dict(n_layer=2)), ({}, dict(n_head=1)), ({}, dict(n_embd=32)), ({}, dict(block_size=4)), ({}, dict(bias='false')),
    ({}, dict(vocab_multiple=128))], ids=str)
def test_another_model_is_refused(place, straight, saved, settings):
    """Identity: under no flag is a checkpoint loaded as another model; strict loading alone would pass a change of scheme or base."""
    copy_of(straight(**saved), place)
    before = {path: path.read_bytes() for path in (place / 'out').rglob('*') if path.is_file()}
    done = train(place, **settings, init_from='resume', allow_change='true', max_iters=7)
    name = list(settings)[-1]
    assert done.code == 2 and 'error: out/a holds another model:' in done.text and f'{name} was ' in done.text
    assert before == {path: path.read_bytes() for path in (place / 'out').rglob('*') if path.is_file()}


@pytest.mark.parametrize('settings', [
    dict(learning_rate=0.02), dict(batch_size=2), dict(gradient_accumulation_steps=2), dict(seed=1), dict(dropout=0.2), dict(beta1=0.5),
    dict(weight_decay=0), dict(grad_clip=0.5), dict(warmup_iters=1), dict(lr_decay_iters=7), dict(dtype='float32')], ids=str)
def test_change_of_course_needs_leave(place, straight, settings):
    """Refused with the setting and both values; with --allow_change it is done, said, and recorded."""
    copy_of(straight(), place)
    done = train(place, **settings, init_from='resume', max_iters=7)
    (name, value), = settings.items()
    assert done.code == 2 and f'{name} was ' in done.text and f', now {value}' in done.text and '--allow_change=true' in done.text
    done = train(place, **settings, init_from='resume', max_iters=7, allow_change='true')
    assert done.code == 0 and f'warning: resuming with a change: {name} was ' in done.text
    assert json.loads((place / 'out/a/config.json').read_text())[name] == value


def test_longer_run_changes_the_cosine(place):
    """max_iters is free, but where lr_decay_iters follows from it, the learning rate would change: said by that name."""
    assert train(place, lr_decay_iters=None).code == 0
    done = train(place, lr_decay_iters=None, max_iters=8, init_from='resume')
    assert done.code == 2 and 'lr_decay_iters was 6, now 8' in done.text
    assert train(place, lr_decay_iters=6, max_iters=8, init_from='resume').code == 0
    assert [r['lr'] for r in records(place, 'train')][6:] == [0.001, 0.001]


def test_shorter_than_the_checkpoint(place, straight):
    """A checkpoint past max_iters is refused, one at max_iters is done at once, with one final record."""
    copy_of(straight(), place)
    done = train(place, init_from='resume', max_iters=5)
    assert done.code == 2 and 'out/a is at step 6, past max_iters=5' in done.text
    assert train(place, init_from='resume').code == 0
    assert_same_run(place, straight())


@pytest.mark.parametrize('settings, told', [(dict(threads=2), 'threads was 1, now 2'),
                                            (dict(dtype='bfloat16', allow_change='true'), 'dtype was float32, now bfloat16')], ids=str)
def test_other_environment_is_told(place, straight, settings, told):
    """Another number of threads or number format gives other bits: a warning, not a refusal."""
    copy_of(straight(), place)
    done = train(place, **settings, init_from='resume', max_iters=7)
    assert done.code == 0 and f'warning: {told}: same batches, but not the same bits' in done.text
    name = next(iter(settings))
    assert checkpoint.load(place / 'out/a').environment[name] == settings[name]  # recorded


@pytest.mark.parametrize('name, module, attribute, value', [
    ('device_name', device, 'cpu_name', lambda: 'another CPU'), ('python', platform, 'python_version', lambda: '9.9'),
    ('torch', torch, '__version__', torch.torch_version.TorchVersion('9.9.9')), ('numpy', np, '__version__', '9.9')])
def test_other_machine_is_told(place, straight, monkeypatch, name, module, attribute, value):
    """Another processor or version may round otherwise: a warning, and the checkpoint says where it was made."""
    copy_of(straight(), place)
    monkeypatch.setattr(module, attribute, value)
    done = train(place, init_from='resume', max_iters=7)
    assert done.code == 0 and done.text.count('warning: ') == 1 and f'warning: {name} was ' in done.text
    assert checkpoint.load(place / 'out/a').environment[name] == (value() if callable(value) else value)


@pytest.mark.parametrize('init_scale', [2.0**16, 2.0**40])
def test_loss_scale_is_resumed(place, prepared, monkeypatch, init_scale):
    """float16 scales the loss by what trial has found: resumed to the same bits, even where all updates so far were skipped."""
    shutil.copytree(prepared / 'data', place / 'whole/data')
    monkeypatch.setattr(device, 'resolve_dtype', lambda *_: ('float16', 'to see on the CPU what CUDA does'))
    monkeypatch.setattr(torch.amp, 'GradScaler', functools.partial(torch.amp.GradScaler, init_scale=init_scale))
    assert train(place, **HARD, max_iters=3).code == 0
    skipped = checkpoint.load(place / 'out/a').state['scaler']['scale'] < init_scale
    assert skipped == (init_scale > 2**30)
    assert all(json.loads(line, parse_constant=pytest.fail) for line in (place / 'out/a/metrics.jsonl').open())  # null, not NaN
    assert train(place, **HARD, init_from='resume').code == 0 and train(place / 'whole', **HARD).code == 0
    assert losses(place) == losses(place / 'whole') and weights(place, 6) == weights(place / 'whole', 6)
    assert checkpoint.load(place / 'out/a').state['scaler'] == checkpoint.load(place / 'whole/out/a').state['scaler']


def test_new_loss_scale(place, straight, monkeypatch):
    """Where the saved run did not scale, since it ran elsewhere, the scaler starts anew."""
    copy_of(straight(), place)
    monkeypatch.setattr(device, 'resolve_dtype', lambda *_: ('float16', 'to see on the CPU what CUDA does'))
    done = train(place, init_from='resume', max_iters=7)
    assert done.code == 0 and checkpoint.load(place / 'out/a').state['scaler']['scale'] > 1


def test_data_replaced_between_save_and_resume(place, straight):
    """Well-formed data, but not those of the run: refused by digest, before anything is written."""
    copy_of(straight(), place)
    (place / 'more.txt').write_text(bytes(range(32, 127)).decode() * 50)
    for text in (place / 'more.txt', place / 'same.txt'):
        if text.name == 'same.txt':  # the same characters, so that only the digest can tell
            chars = json.loads((straight() / 'data/tiny/meta.json').read_text('utf-8'))['tokenizer']['chars']
            text.write_text(chars * 50, encoding='utf-8')
        process = start(place, 'prepare.py', 'tiny', f'--input={text}', '--tokenizer=char')
        assert process.wait() == 0, process.stderr.read()
        done = train(place, init_from='resume', max_iters=7)
        told = 'its digest differs' if text.name == 'same.txt' else 'vocab_size was'
        assert done.code == 2 and told in done.text and losses(place) == losses(straight())


def test_damaged_newest_checkpoint(place, straight):
    """Falls back with a warning, repeats the lost updates to the same bits, and replaces what was damaged."""
    reference = straight()
    copy_of(reference, place)
    newest = place / 'out/a/ckpt/step_00000006/optim.safetensors'
    newest.write_bytes(newest.read_bytes()[:-1])
    done = train(place, init_from='resume', keep_checkpoints=1)
    assert done.code == 0 and 'optim.safetensors has ' in done.text and 'falling back to step 4' in done.text
    assert_same_run(place, reference)


# ---- the run folder -----------------------------------------------------------------------------------------------------------------

def test_folder_in_use_is_refused(place, straight):
    """A second run neither mixes with nor deletes the first; --overwrite deletes it, but nothing that is not a run's."""
    copy_of(straight(), place)
    (place / 'out/a/notes.txt').write_text('mine')
    done = train(place, max_iters=2)
    assert done.code == 2 and 'out/a already holds a run: go on with --init_from=resume' in done.text
    assert losses(place) == losses(straight())
    done = train(place, max_iters=2, overwrite='true')
    assert done.code == 0 and list(losses(place)) == [0, 1] and checkpoint.steps(place / 'out/a') == [2]
    assert (place / 'out/a/notes.txt').read_text() == 'mine'


def test_auto(place, straight):
    """auto: starts where there is nothing, starts anew where nothing was saved yet, resumes where something was."""
    done = train(place, init_from='auto', max_iters=3)
    assert done.code == 0 and 'resuming' not in done.text
    done = train(place, init_from='auto')
    assert done.code == 0 and 'resuming out/a at step 3' in done.text and losses(place) == losses(straight())
    shutil.rmtree(place / 'out/a/ckpt')
    done = train(place, init_from='auto')
    assert done.code == 0 and 'resuming' not in done.text
    assert_same_run(place, straight())


def test_resume_of_nothing(place):
    """One line, not a new run by accident."""
    done = train(place, init_from='resume')
    assert done.code == 2 and 'error: out/a holds no checkpoint' in done.text and losses(place) == {}


@needs_fork
def test_second_process_in_one_folder(place):
    """Refused within a second while the first runs; after a SIGKILL of the first the folder is free again."""
    first = fork_train(place, max_iters=10**6, eval_interval=10**6)
    try:
        while not losses(place) and os.waitpid(first, os.WNOHANG) == (0, 0):
            time.sleep(0.01)
        started = time.time()
        done = train(place, init_from='auto')
        assert done.code == 2 and 'out/a is being trained by another process' in done.text and time.time() - started < 1
        assert not os.path.exists('/proc/locks') or f'(its id is {first})' in done.text
    finally:
        os.kill(first, signal.SIGKILL)
    assert wait(first) == -signal.SIGKILL
    assert train(place, init_from='auto').code == 0
    with contextlib.chdir(place):
        FileLock('out/a/.lock').acquire(timeout=0)  # and a run that has ended lets go


def test_folder_trained_meanwhile(place, straight, monkeypatch):
    """A run that begins and ends between another one's look at the folder and its lock is not deleted or gone back behind."""
    reference, original = straight(), script.lock_folder
    monkeypatch.setattr(script, 'lock_folder', lambda *args: (copy_of(reference, place), original(*args))[1])
    done = train(place)
    assert done.code == 2 and 'another process has just trained in out/a' in done.text and weights(place, 6) == weights(reference, 6)


@pytest.mark.parametrize('name', ['ckpt/mine.pt', 'metrics.jsonl'])
def test_what_others_put_into_the_folder_stays(place, name):
    """A folder with files of such names is no empty one; even --overwrite deletes from ckpt/ nothing but checkpoints."""
    (place / 'out/a/ckpt').mkdir(parents=True)
    (place / 'out/a' / name).write_text('mine')
    done = train(place)
    assert done.code == 2 and 'out/a already holds a run' in done.text and (place / 'out/a' / name).read_text() == 'mine'
    assert train(place, overwrite='true').code == 0 and train(place, overwrite='true', max_iters=3).code == 0
    assert checkpoint.steps(place / 'out/a') == [2, 3]
    assert name != 'ckpt/mine.pt' or (place / 'out/a' / name).read_text() == 'mine'


OTHERS = {
    'metrics of something else': lambda run: [(run / 'config.json').unlink(), (run / 'metrics.jsonl').write_text('mine')],
    'config of something else': lambda run: (run / 'config.json').write_text('{"n_layer": 12}'),
    'config that is none': lambda run: (run / 'config.json').write_text('mine'),
    'picture': lambda run: [path.unlink() for path in run.glob('*.json*')],
    'another run': lambda run: rewrite_config(run, wpe='rope'),
    'another seed': lambda run: rewrite_config(run, seed=1),
}


def rewrite_config(run, **settings):
    path = run / 'config.json'
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


@pytest.mark.parametrize('case', OTHERS)
def test_auto_deletes_nothing_that_is_not_of_this_run(place, straight, case):
    """Without a checkpoint auto starts anew only where that repeats what lies there: the records of the very same run."""
    copy_of(straight(), place)
    shutil.rmtree(place / 'out/a/ckpt')
    (place / 'out/a/loss.png').write_text('mine')
    OTHERS[case](place / 'out/a')
    before = {path: path.read_bytes() for path in (place / 'out').rglob('*') if path.is_file()}
    done = train(place, init_from='auto')
    assert done.code == 2 and 'error: out/a already holds a run: start anew with --overwrite=true, or give' in done.text
    assert done.text.count('\n') == 1 and before == {path: path.read_bytes() for path in (place / 'out').rglob('*') if path.is_file()}
    assert train(place, init_from='auto', overwrite='true').code == 0
    assert_same_run(place, straight())


@pytest.mark.parametrize('left', [[], ['metrics.jsonl'], ['metrics.jsonl', 'config.json', 'crash.json']], ids=str)
def test_auto_starts_anew_what_saved_nothing(place, straight, left):
    """Wherever the same run had ended before its first checkpoint, also with settings that change nothing of it."""
    assert train(place, max_iters=1, checkpoint_interval=5).code == 0
    shutil.rmtree(place / 'out/a/ckpt')
    (place / 'out/a/loss.png').unlink(missing_ok=True), (place / 'out/a/crash.json').write_text('{"step": 1}')
    for name in {path.name for path in (place / 'out/a').iterdir()} - set(left):
        (place / 'out/a' / name).unlink()
    if left == ['metrics.jsonl']:
        os.truncate(place / 'out/a/metrics.jsonl', 0)  # killed before config.json was written
    assert train(place, init_from='auto', eval_interval=2).code == 0
    assert_same_run(place, straight())
    assert not (place / 'out/a/crash.json').exists()


@needs_fork
def test_disk_full_names_the_file(place):
    """Also where it is no checkpoint that has no room: the error of the system does not say which file it is about."""
    resource = pytest.importorskip('resource')
    child = fork_train(place, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000)),  # config.json fits
                       max_iters=60, checkpoint_interval=100, eval_interval=100)
    assert wait(child) == 2 and "error: File too large: 'out/a/metrics.jsonl'" in (place / 'printed').read_text()


@needs_fork
def test_read_only_folder(place):
    """Refused at start, with the path."""
    (place / 'out').mkdir()
    (place / 'out').chmod(0o555), place.chmod(0o755)
    (place / 'printed').touch(), (place / 'printed').chmod(0o666)
    child = fork_train(place, lambda: os.setuid(65534) if os.geteuid() == 0 else None)  # root may write anywhere
    code = wait(child)
    (place / 'out').chmod(0o755)
    assert code == 2 and "error: Permission denied: 'out/a'" in (place / 'printed').read_text()


@pytest.mark.parametrize('out_dir', ['file', 'file/run'])
def test_folder_is_a_file(place, out_dir):
    """The same for a path that cannot be a folder."""
    (place / 'file').write_text('mine')
    done = train(place, out_dir=out_dir)
    assert done.code == 2 and done.text == f'error: {out_dir} cannot be a folder, as file is a file: give another name\n'
    assert (place / 'file').read_text() == 'mine'


def test_folder_removed_while_training(place, monkeypatch):
    """An error that names the path, and no half of a run put back in its place."""
    at_update(monkeypatch, 3, lambda model: shutil.rmtree('out/a'))
    done = train(place)
    assert done.code == 2 and 'error: out/a is not the folder any more that was locked' in done.text and not (place / 'out/a').exists()


@pytest.mark.parametrize('settings', [{}, dict(log_interval=100, eval_interval=100, checkpoint_interval=4)], ids=str)
def test_folder_made_anew_while_training(place, monkeypatch, settings):
    """Removed by someone who forgot the run in it, then another run's: the first one writes no record and no checkpoint there."""
    assert train(place, out_dir='out/b', seed=2).code == 0

    def begin_anew(model):
        shutil.rmtree('out/a')
        shutil.copytree('out/b', 'out/a')
    at_update(monkeypatch, 3, begin_anew)
    done = train(place, **settings)
    assert done.code == 2 and 'error: out/a is not the folder any more that was locked' in done.text
    ours, theirs = ({path.relative_to(run): path.read_bytes() for path in run.rglob('*') if path.is_file()}
                    for run in (place / 'out/a', place / 'out/b'))
    assert ours == theirs


def test_lock_removed_while_training(place, monkeypatch):
    """Nothing keeps a second run away any more, so the first one ends."""
    at_update(monkeypatch, 3, lambda model: os.remove('out/a/.lock'))
    done = train(place)
    assert done.code == 2 and 'error: out/a is not the folder any more that was locked' in done.text
    monkeypatch.undo()
    assert checkpoint.load(place / 'out/a').step == 2 and train(place, init_from='resume').code == 0


# ---- numbers that are not finite ----------------------------------------------------------------------------------------------------

def poison_parameter(model, value):
    model.transformer.ln_f.weight.data[3] = value


def poison_gradient(model, value):
    model.transformer.ln_f.weight.register_hook(lambda gradient: gradient * value)


def poison_micro_batch(model, value):
    calls = []
    model.register_forward_hook(lambda module, args, loss: loss * value if module.training and calls.append(1) or len(calls) == 3 else loss)


@pytest.mark.parametrize('value', [math.nan, math.inf])
@pytest.mark.parametrize('poison', [poison_parameter, poison_gradient, poison_micro_batch])
@pytest.mark.parametrize('step', [0, 3])
def test_not_finite_stops_before_the_update(place, monkeypatch, poison, value, step):
    """Exit 65 with the facts, no weight changed by it, the last checkpoint untouched; step 3 is the one before a save."""
    seen = {}

    def do(model):
        poison(model, value)
        seen.update(model=model, before={name: p.detach().clone() for name, p in model.named_parameters()})
    made = at_update(monkeypatch, step, do)
    done = train(place, gradient_accumulation_steps=4, batch_size=1)
    assert done.code == 65 and made[-1] == step and 'Traceback' not in done.text
    assert all(torch.equal(p.nan_to_num(7, 7, 7), seen['before'][name].nan_to_num(7, 7, 7)) for name, p in seen['model'].named_parameters())
    facts = json.loads((place / 'out/a/crash.json').read_text())
    assert facts['step'] == step and facts['learning_rate'] > 0 and {'loss', 'grad_norm'} <= set(facts)
    assert f'error: not finite: step {step}, ' in done.text
    assert ('The last checkpoint is step 2' if step else 'There is no checkpoint') in done.text
    assert step not in losses(place) and checkpoint.steps(place / 'out/a') == ([2] if step else [])
    if step:
        monkeypatch.undo()
        assert train(place, gradient_accumulation_steps=4, batch_size=1, init_from='resume', beta1=0.5).code == 2
        assert (place / 'out/a/crash.json').exists()  # refused, so that the crash is still the last that happened
        assert train(place, gradient_accumulation_steps=4, batch_size=1, init_from='resume').code == 0
        assert not (place / 'out/a/crash.json').exists()


@pytest.mark.parametrize('optimizer', ['adamw', 'muon'])
@pytest.mark.parametrize('value', [math.nan, math.inf])
def test_running_ahead_of_the_device(place, straight, monkeypatch, optimizer, value):
    """Where updates are queued and asked about later, as on CUDA: the same records and bits; and one that is not finite is found, left
    out, and not saved, though others came after it."""
    settings = dict(optimizer=optimizer, max_iters=9, log_interval=4, eval_interval=6, lr_decay_iters=12, checkpoint_interval=3)
    reference = straight(**settings)
    for module in (device, optim):
        monkeypatch.setattr(module, 'runs_ahead', lambda name: True)
    assert train(place, **settings).code == 0
    told = [[(r['event'], r['step'], r['loss']) for r in records(each, 'train', 'eval', 'final')] for each in (place, reference)]
    assert told[0] == told[1] and weights(place, 9) == weights(reference, 9)
    shutil.rmtree(place / 'out')
    made = at_update(monkeypatch, 3, lambda model: poison_once(model, value))
    done = train(place, **settings)
    assert done.code == 65 and json.loads((place / 'out/a/crash.json').read_text())['step'] == 3 and made[-1] > 3
    assert checkpoint.steps(place / 'out/a') == [3] and 'The last checkpoint is step 3' in done.text


def test_running_ahead_draws_from_no_broken_model(place, monkeypatch):
    """A text is asked for after an update that was not finite and before anything else would tell: exit 65, no traceback of the drawing."""
    for module in (device, optim):
        monkeypatch.setattr(module, 'runs_ahead', lambda name: True)
    at_update(monkeypatch, 3, lambda model: poison_once(model, math.nan))
    done = train(place, optimizer='muon', max_iters=9, log_interval=100, eval_interval=100, sample_interval=5, sample_tokens=3)
    assert done.code == 65 and 'Traceback' not in done.text and not [r for r in records(place, 'sample')]


def test_running_ahead_hears_signals(place, monkeypatch):
    """However seldom there is something to log, a signal is noticed within ten updates: who sends it may kill half a minute later."""
    monkeypatch.setattr(device, 'runs_ahead', lambda name: True)
    made = at_update(monkeypatch, 3, lambda model: os.kill(os.getpid(), signal.SIGTERM))
    done = train(place, max_iters=100, log_interval=1000, eval_interval=1000)
    assert done.code == 75 and made[-1] < 13 and checkpoint.steps(place / 'out/a') == [made[-1] + 1]


def poison_once(model, value):
    hook = model.register_forward_hook(lambda module, args, loss: (hook.remove(), loss * value)[1])


@pytest.mark.parametrize('settings', [{}, dict(eval_interval=100, checkpoint_interval=4), dict(checkpoint_interval=100)], ids=str)
@pytest.mark.parametrize('stop', [False, True])
def test_weights_that_are_not_finite_are_not_saved(place, monkeypatch, settings, stop):
    """An update that itself ruins the weights, right before a save, an evaluation or a stop: exit 65, and no checkpoint of it."""
    original = script.update

    def update(model, *args):
        result = original(model, *args)
        if args[4] == 3:
            poison_parameter(model, math.inf)
            stop and os.kill(os.getpid(), signal.SIGTERM)
        return result
    monkeypatch.setattr(script, 'update', update)
    done = train(place, **settings)
    assert done.code == 65 and json.loads((place / 'out/a/crash.json').read_text())['weights'] == 'nan or inf'
    assert max(checkpoint.steps(place / 'out/a'), default=0) < 4 and all(math.isfinite(r['loss']) for r in records(place, 'eval'))


def test_spike_is_no_crash(place, monkeypatch):
    """A learning rate 1,000 times too large for one step raises the loss; that is training's affair, recorded and not skipped."""
    original = script.learning_rate_at
    monkeypatch.setattr(script, 'learning_rate_at', lambda step, config: original(step, config) * (1000 if step == 2 else 1))
    assert train(place).code == 0
    lost = [r['loss'] for r in records(place, 'train')]
    assert len(lost) == 6 and lost[3] > lost[2] + 1


# ---- settings and machine -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('settings, message', [
    (dict(max_iters=0), 'max_iters=0 must be at least 1'), (dict(micro_batch=0), 'micro_batch=0 must be at least 1'),
    (dict(micro_batch='some'), 'micro_batch'), (dict(optimizer='sgd'), 'optimizer'),
    (dict(eval_interval=0), 'eval_interval=0 must be at least 1'),
    (dict(beta2=1), 'beta2=1.0 must be at least 0 and below 1'), (dict(learning_rate=-1), 'learning_rate=-1.0 must not be negative'),
    (dict(seed=-1), 'seed=-1 must not be negative'), (dict(seed=2**32), 'seed=4294967296 must be below 2**32'),
    (dict(wpe='rotary'), 'wpe must be'), (dict(n_heads=2), 'did you mean n_head'),
    (dict(vocab_size=300), 'vocab_size=300 does not fit data/tiny'), (dict(dataset='other'), 'data/other holds no prepared data'),
    (dict(block_size=5000), 'has 604 tokens, block_size=5000 needs at least 5001'),
    (dict(device='cuda:99'), 'device=cuda:99 cannot be used'), (dict(device='gpu'), 'device=gpu cannot be used'),
    (dict(device='meta'), 'device=meta cannot be used'), (dict(dtype='float16'), 'dtype=float16 needs CUDA, the device is cpu')], ids=str)
def test_bad_settings(place, settings, message):
    """Exit 2 with one line that says what is wrong, before a run folder is made."""
    done = train(place, **settings)
    assert done.code == 2 and message in done.text and done.text.startswith('error: ') and done.text.count('\n') == 1
    assert not (place / 'out').exists()


def test_largest_seed(place):
    """Seeds and steps share 64 bits: the largest seed allowed is one that works."""
    assert train(place, seed=2**32 - 1, max_iters=2).code == 0


def test_word_that_is_no_setting(place):
    """A forgotten --key= is not passed over."""
    with pytest.raises(ValueError, match='shakespeare_rope is no config file'):
        script.main(['shakespeare_rope'])


@pytest.mark.parametrize('settings, message', [
    (dict(batch_size=700), 'warning: one update covers 5,600 tokens, more than the 5,421 there are'),
    (dict(warmup_iters=6), 'warning: warmup_iters=6 never ends within max_iters=6'),
    (dict(muon_lr=0.5), 'warning: muon_lr=0.5 does nothing with --optimizer=adamw')])
def test_settings_that_make_little_sense(place, settings, message):
    """Trained as asked, with a warning."""
    done = train(place, max_iters=6 if 'warmup_iters' in settings else 1, **settings)
    assert done.code == 0 and message in done.text


@pytest.mark.parametrize('error', [RuntimeError('no compiler\nand more'), AssertionError()], ids=repr)
@pytest.mark.parametrize('when', ['at once', 'when called'])
def test_compiler_that_fails(place, straight, monkeypatch, error, when):
    """auto: one warning, then the same losses as without; true: exit 2, since it was asked for."""
    def fail(*args, **kwargs):
        raise error
    monkeypatch.setattr(torch, 'compile', lambda model, **_: fail if when == 'when called' else fail())
    monkeypatch.setattr(compiling, 'resolve_compile', lambda *args: (True, 'so that auto tries'))
    done = train(place)
    assert done.code == 0 and done.text.count('warning: torch.compile failed') == 1 and 'compile: False' in done.text
    assert losses(place) == losses(straight())
    done = train(place, out_dir='out/b', compile='true')
    assert done.code == 2 and f'error: torch.compile failed ({type(error).__name__}: ' in done.text and 'Traceback' not in done.text


def test_a_start_that_is_refused_deletes_nothing(place, monkeypatch):
    """--overwrite deletes the earlier run when the new one can begin, not before."""
    assert train(place).code == 0
    monkeypatch.setattr(torch, 'compile', lambda *args, **kwargs: (_ for _ in ()).throw(RuntimeError('no compiler')))
    assert train(place, overwrite='true', compile='true', max_iters=2).code == 2
    assert checkpoint.steps(place / 'out/a') and (place / 'out/a/metrics.jsonl').exists()


def test_large_updates_are_not_queued(place, monkeypatch):
    """Ten of half a million tokens may take minutes; after each one a signal is heard."""
    monkeypatch.setattr(device, 'runs_ahead', lambda name: True)
    made = at_update(monkeypatch, 3, lambda model: os.kill(os.getpid(), signal.SIGTERM))
    done = train(place, max_iters=100, log_interval=1000, eval_interval=1000, batch_size=64, block_size=64, micro_batch=8,
                 gradient_accumulation_steps=32)
    assert done.code == 75 and made[-1] < 8 and checkpoint.steps(place / 'out/a') == [made[-1] + 1]


def test_micro_batch_of_a_resumed_run(place, monkeypatch):
    """What auto found once stays: another card or less free memory would change the bits."""
    wanted, original = [], device.micro_batch

    def found(number):
        return lambda asked, *rest: wanted.append(asked) or ((number, 'fits') if asked == 'auto' else original(asked, *rest))
    monkeypatch.setattr(device, 'micro_batch', found(2))
    assert train(place, micro_batch='auto', batch_size=4, max_iters=2, lr_decay_iters=4).code == 0
    monkeypatch.setattr(device, 'micro_batch', found(1))
    assert train(place, micro_batch='auto', batch_size=4, max_iters=4, lr_decay_iters=4, init_from='resume').code == 0
    assert wanted == ['auto', 2]


@pytest.mark.slow
def test_compiled_trains_alike(place):
    """torch.compile for real: the eager losses to rounding, dropout off; its checkpoint resumes without it, with a warning."""
    done = train(place, compile='true')
    assert done.code == 0 and 'compile: True' in done.text, done.text
    assert train(place, out_dir='out/b').code == 0
    for ours, theirs in zip(losses(place).values(), losses(place, 'out/b').values(), strict=True):
        assert float.fromhex(ours) == pytest.approx(float.fromhex(theirs), abs=1e-4)
    done = train(place, init_from='resume', max_iters=7)
    assert done.code == 0 and 'compile: True' in done.text and 'warning' not in done.text  # auto goes on as it was
    done = train(place, init_from='resume', max_iters=8, compile='false')
    assert done.code == 0 and 'warning: compile was True, now False' in done.text


# ---- wandb, matplotlib --------------------------------------------------------------------------------------------------------------

def fail_or_hang(name, how):
    """As a broken wandb may: an error, the end of Python, or no answer until the tests are over."""
    if how == 'hangs':
        threading.Event().wait()
    raise {'fails': ConnectionError, 'exits': SystemExit}[how](f'{name} failed')


def fake_wandb(seen, fails=None, how='fails'):
    def method(name):
        def call(*args):
            if name == fails:
                fail_or_hang(name, how)
            seen.append((name, *args))
        return call
    return types.SimpleNamespace(log=method('log'), finish=method('finish'))


@pytest.mark.parametrize('fails, how', [('import', ''), *itertools.product(['init', 'log', 'finish'], ['fails', 'hangs', 'exits'])])
def test_wandb_that_fails(place, straight, monkeypatch, fails, how):
    """Warned once, waited for once; the losses and metrics.jsonl are those of a run without it."""
    def init(**_):
        if fails == 'init':
            fail_or_hang('init', how)
        return fake_wandb([], fails, how)
    monkeypatch.setattr(metrics, 'LIMITS', dict.fromkeys(metrics.LIMITS, 0.5))
    monkeypatch.setitem(sys.modules, 'wandb', None if fails == 'import' else types.SimpleNamespace(init=init, Settings=dict))
    done = train(place, wandb='online')
    assert done.code == 0 and done.text.count('warning: ') == 1 and 'wandb' in done.text
    assert ('no answer within 0.5 seconds' in done.text) == (how == 'hangs')
    assert_same_run(place, straight())


def test_wandb_mirrors_the_metrics(place, monkeypatch):
    """Every record of metrics.jsonl, at its step, and the resolved config."""
    seen, given = [], {}
    init = lambda **settings: given.update(settings) or fake_wandb(seen)  # noqa: E731
    monkeypatch.setitem(sys.modules, 'wandb', types.SimpleNamespace(init=init, Settings=dict))
    assert train(place, wandb='online', wandb_project='p').code == 0
    mirrored = [('log', {f'{r["event"]}/{key}': value for key, value in r.items() if key not in ('event', 'step')}, r['step'])
                for r in metrics.read(place / 'out/a')]
    assert seen == [*mirrored, ('finish',)]
    assert (given['project'], given['name'], given['mode'], given['config']['min_lr']) == ('p', 'a', 'online', 0.001)


def test_no_matplotlib(place, monkeypatch):
    """A picture that cannot be drawn does not fail a run that is done."""
    monkeypatch.setattr(plots, 'loss_curves', lambda *_: (_ for _ in ()).throw(ImportError('No module named matplotlib')))
    done = train(place, plot=True)
    assert done.code == 0 and 'warning: no loss.png: No module named matplotlib' in done.text


def test_overwrite_does_not_follow_links(place):
    """A checkpoint that lies elsewhere, with a link in its place: the link goes, what it leads to stays."""
    assert train(place, max_iters=2).code == 0
    path = place / 'out/a/ckpt/step_00000002'
    shutil.move(path, place / 'moved'), path.symlink_to(place / 'moved')
    assert train(place, init_from='resume', max_iters=3).code == 0
    assert train(place, max_iters=1, overwrite='true').code == 0
    assert checkpoint.steps(place / 'out/a') == [1] and len(os.listdir(place / 'moved')) == 4


def test_evaluation_that_is_not_finite_is_not_the_best(place, monkeypatch):
    """As of activations that overflow: it compares with nothing, and neither itself nor what came before would ever be replaced."""
    original, calls = script.evaluate, []

    def evaluate(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs) | ({'loss': math.nan} if len(calls) == 2 else {})
    monkeypatch.setattr(script, 'evaluate', evaluate)
    assert train(place, keep_checkpoints=1).code == 0
    evals = {r['step']: r['loss'] for r in records(place, 'eval') if not math.isnan(r['loss'])}
    assert [*evals] == [0, 4, 6] and checkpoint.best_step(place / 'out/a') == min((4, 6), key=evals.get)
    assert 2 not in checkpoint.steps(place / 'out/a')


# ---- metrics.jsonl ------------------------------------------------------------------------------------------------------------------

def test_torn_metrics(place, straight):
    """A line cut by a kill, bytes that are no text, JSON that is no record: passed over, and gone after a resume."""
    copy_of(straight(max_iters=3), place)
    with open(place / 'out/a/metrics.jsonl', 'ab') as file:
        file.write(b'7\n{"event": "train"}\n{"step": 9}\n\xff\xfe\n{"event": "train", "step": 3, "lo')
    assert train(place, init_from='resume').code == 0
    assert losses(place) == losses(straight())
    assert all(json.loads(line)['event'] for line in (place / 'out/a/metrics.jsonl').read_text().splitlines())
