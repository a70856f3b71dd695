"""extend.py: every method of every scheme, what it leaves alone, what can be done with the result, and how a learned table goes on."""
import contextlib
import io
import json
import math
import os
import shutil
import types
import warnings
from dataclasses import asdict, fields

import numpy as np
import pytest
import torch

import extend as script
from model import GPT, GPTConfig, rope_frequencies
from nanope import checkpoint, metrics, rows
from nanope.configurator import run
from runs import Done, start, train, wait

TABLE = 'transformer.wpe.weight'
SCHEMES = ('learned', 'sinusoidal', 'rope', 'none', 'alibi')
SCALINGS = ('yarn', 'linear', 'ntk', 'dynamic', 'llama3')


@pytest.fixture(scope='module')
def place(prepared, tmp_path_factory):
    """A folder with a run of every scheme: out/<scheme>, 8 tokens of context, after 6 updates."""
    place = tmp_path_factory.mktemp('extend')
    shutil.copytree(prepared / 'data', place / 'data')
    for wpe in SCHEMES:
        assert train(place, wpe=wpe, out_dir=f'out/{wpe}').code == 0
    return place


def extend(place, *args):
    """python extend.py ARGS in folder `place`, but in this process."""
    text = io.StringIO()
    try:
        with contextlib.chdir(place), contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            run(lambda: script.main(list(args)))
    except SystemExit as stop:
        return Done(stop.code, text.getvalue())


@pytest.fixture
def extended(place, tmp_path):
    """extended(run, block_size, method, ...): (what was printed, the checkpoint before, and after)."""
    def do(name, block_size, method='auto', **more):
        out_dir = tmp_path / f'{len(list(tmp_path.iterdir()))}'
        done = extend(place, str(place / 'out' / name), f'--block_size={block_size}', f'--method={method}', f'--out_dir={out_dir}',
                      *(f'--{key}={value}' for key, value in more.items()))
        assert done.code == 0, done.text
        return done.text, checkpoint.load(place / 'out' / name), checkpoint.load(out_dir)
    return do


def model_of(found, **changes):
    """The model of a checkpoint, or one with its weights and other settings."""
    model = GPT(GPTConfig(**{**asdict(checkpoint.model_config(found)), **changes}), seed=None).eval()
    checkpoint.load_weights(model, found.tensors('model'), found.path)
    return model


def tokens(length):
    return torch.randint(40, (2, length), generator=torch.Generator().manual_seed(1))


def settings(found):
    """The settings of a checkpoint's model that are not the defaults."""
    config = checkpoint.model_config(found)
    return {f.name: getattr(config, f.name) for f in fields(GPTConfig) if getattr(config, f.name) != f.default}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---- learned ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('method', ['lowrank', 'hold', 'tile', 'random', 'interpolate'])
def test_a_learned_table(extended, method):
    text, old, new = extended('learned', 20, method)
    before, after = old.tensors('model'), new.tensors('model')
    table, grown = before.pop(TABLE), after.pop(TABLE)
    assert same(before, after) and grown.shape == (20, 16) and grown.dtype == torch.float32 and grown.isfinite().all()
    if method == 'interpolate':
        at = torch.arange(20, dtype=torch.float64) * 7 / 19       # last on last
        low = at.floor().long().clamp(max=6)
        exact = torch.lerp(table.double()[low], table.double()[low + 1], (at - low)[:, None])
        torch.testing.assert_close(grown.double(), exact, atol=1e-7, rtol=0)
    else:
        assert torch.equal(grown[:8], table)
    if method == 'hold':
        assert torch.equal(grown[8:], table[7:].expand(12, 16))
    if method == 'tile':
        assert torch.equal(grown, torch.cat((table, table, table[:4])))
    if method == 'random':
        assert 0.01 < grown[8:].std() < 0.03 and abs(grown[8:].mean()) < 0.005  # wpe_std is 0.02
    assert settings(new) == {**settings(old), 'block_size': 20}

    before, after = old.tensors('optim'), new.tensors('optim')
    for moment in ('exp_avg', 'exp_avg_sq'):
        kept = before[f'{moment}.{TABLE}'] * (method != 'interpolate')
        assert torch.equal(after.pop(f'{moment}.{TABLE}'), torch.cat((kept, torch.zeros(12, 16))))
        assert before.pop(f'{moment}.{TABLE}').abs().min() > 0
    assert same(before, after) and f'step.{TABLE}' in after
    assert ('reset to zero' if method == 'interpolate' else 'zero for the 12 new rows') in text
    assert f'wpe=learned, {method}: ' in text and 'block_size 8 -> 20' in text


def test_random_rows_follow_from_the_seed(extended):
    one, again, other = (extended('learned', 20, 'random', seed=seed)[2].tensors('model')[TABLE] for seed in (1, 1, 2))
    assert torch.equal(one, again) and not torch.equal(one[8:], other[8:]) and not torch.equal(one[8:16], one[:8])


def test_rank_and_fit_can_be_given(extended):
    text, old, new = extended('learned', 12, 'lowrank', rank=2, fit='cubic')
    assert 'rank 2 cubic' in text and 'hold' in text and 'tile' in text
    expected = rows.low_rank(old.tensors('model')[TABLE].double().numpy(), 4, 2, 'cubic')
    np.testing.assert_allclose(new.tensors('model')[TABLE][8:].numpy(), expected, atol=1e-7)


def test_the_default_of_each_scheme(extended):
    """What loses least at twice the length in docs/results.md, at once and tuned."""
    for wpe, method in dict(learned='interpolate', sinusoidal='interpolate', rope='yarn', none='none', alibi='none').items():
        assert f'wpe={wpe}, {method}: ' in extended(wpe, 12)[0]


def test_a_table_without_moments(place, extended):                # AdamW has none before its first update
    old = checkpoint.load(place / 'out/learned')
    checkpoint.save(place / 'out/fresh', 0, old.tensors('model'), {}, old.state, old.environment)
    text, _, new = extended('fresh', 16, 'hold')
    assert new.step == 0 and new.tensors('optim') == {} and 'AdamW' not in text


# ---- rope, sinusoidal, and those that need nothing -------------------------------------------------------------------

@pytest.mark.parametrize('method', SCALINGS)
@torch.no_grad()
def test_rope(extended, method):
    text, old, new = extended('rope', 20, method)
    scaling = {'rope_scaling': method, 'rope_factor': 2.5, 'rope_trained': 8}
    assert settings(new) == {**settings(old), 'block_size': 20, **scaling}
    assert same(old.tensors('model'), new.tensors('model')) and same(old.tensors('optim'), new.tensors('optim'))
    for length in (8, 20):
        assert torch.equal(model_of(new)(tokens(length)), model_of(old, block_size=20, **scaling)(tokens(length)))
        plain = model_of(old)(tokens(length))
        assert torch.equal(model_of(new)(tokens(length)), plain) == (method == 'dynamic' and length == 8)
    assert f'rope_scaling none -> {method}, rope_factor 1.0 -> 2.5, rope_trained None -> 8' in text


@torch.no_grad()
def test_schemes_that_are_defined_everywhere(extended):
    for wpe, method in (('rope', 'none'), ('sinusoidal', 'recompute'), ('none', 'none'), ('alibi', 'none')):
        text, old, new = extended(wpe, 20, method)
        assert settings(new) == {**settings(old), 'block_size': 20} and same(old.tensors('model'), new.tensors('model'))
        assert torch.equal(model_of(new)(tokens(20)), model_of(old)(tokens(20)))
        assert ('nothing to do' in text) == (wpe in ('none', 'alibi'))


@torch.no_grad()
def test_interpolated_sinusoids(extended):
    text, old, new = extended('sinusoidal', 16, 'interpolate')
    assert settings(new) == {**settings(old), 'block_size': 16, 'sinusoidal_factor': 2.0} and 'sinusoidal_factor 1.0 -> 2.0' in text
    assert torch.equal(model_of(new).position_table(0, 16)[::2], model_of(old).position_table(0, 8))
    assert settings(extended('sinusoidal', 16, 'interpolate', factor=3)[2])['sinusoidal_factor'] == 3.0


def test_settings_of_a_scaling(extended):
    more = dict(factor=4, yarn_beta_fast=16, yarn_beta_slow=2, yarn_attention=1.1)
    _, old, new = extended('rope', 20, 'yarn', **more)
    assert settings(new) == {**settings(old), 'block_size': 20, 'rope_scaling': 'yarn', 'rope_factor': 4.0, 'rope_trained': 8,
                             'yarn_beta_fast': 16.0, 'yarn_beta_slow': 2.0, 'yarn_attention': 1.1}
    new = settings(extended('rope', 20, 'llama3', llama3_low=2, llama3_high=8)[2])
    assert (new['llama3_low'], new['llama3_high'], new['rope_factor']) == (2.0, 8.0, 2.5)


# ---- shorter, and again ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize('wpe', SCHEMES)
@torch.no_grad()
def test_cropping(extended, wpe):
    text, old, new = extended(wpe, 5)
    assert f'wpe={wpe}, crop: ' in text and settings(new) == {**settings(old), 'block_size': 5}
    assert torch.equal(model_of(new)(tokens(5)), model_of(old)(tokens(5)))
    before, after = old.tensors('optim'), new.tensors('optim')
    if wpe == 'learned':
        assert 'cropped to 5 rows' in text and torch.equal(new.tensors('model')[TABLE], old.tensors('model')[TABLE][:5])
        for name in (f'exp_avg.{TABLE}', f'exp_avg_sq.{TABLE}'):
            assert torch.equal(after.pop(name), before.pop(name)[:5])
    assert same(before, after)
    if wpe != 'none':                                             # a method has no part in it, but it must be one that fits
        method = list(script.METHODS[wpe])[-1]
        assert same(extended(wpe, 5, method)[2].tensors('model'), new.tensors('model'))


@pytest.mark.parametrize('method', SCALINGS)
@torch.no_grad()
def test_cropping_keeps_the_angles_of_a_scaled_rope(place, extended, method):
    _, _, long = extended('rope', 32, method)
    for block_size in (20, 8, 5):                                 # above, at and below the length that scaling starts from
        _, _, short = extended(os.path.relpath(long.path + '/../..', place / 'out'), block_size)
        assert torch.equal(model_of(short)(tokens(5)), model_of(long)(tokens(5)))
    old = checkpoint.load(place / 'out/rope')                     # the same where it was scaled from the beginning
    state = {**old.state, 'config': {**old.state['config'], 'rope_scaling': method, 'rope_factor': 4.0}}
    checkpoint.save(place / f'out/rope_{method}', 6, old.tensors('model'), old.tensors('optim'), state, old.environment)
    _, old, short = extended(f'rope_{method}', 5)
    assert torch.equal(model_of(short)(tokens(5)), model_of(old)(tokens(5)))


def chain(place, extended, name, *steps):
    """Extend a run again and again: [what was printed, ..., the last checkpoint]."""
    printed = []
    for block_size, method in steps:
        text, _, new = extended(name, block_size, method)
        printed.append(text)
        name = os.path.relpath(os.path.join(new.path, '../..'), place / 'out')
    return [*printed, new]


@pytest.mark.parametrize('first, then', [('yarn', 'yarn'), ('yarn', 'auto'), ('linear', 'auto'), ('dynamic', 'dynamic'),
                                         ('none', 'yarn'), ('linear', 'llama3'), ('dynamic', 'ntk')])
@torch.no_grad()
def test_a_rope_extended_again_is_scaled_from_where_it_was_trained(place, extended, first, then):
    *_, twice = chain(place, extended, 'rope', (16, first), (32, then))
    _, _, once = extended('rope', 32, first if then == 'auto' else then)
    assert settings(twice) == settings(once) and settings(once)['rope_factor'] == 4.0 and settings(once)['rope_trained'] == 8
    assert torch.equal(model_of(twice)(tokens(32)), model_of(once)(tokens(32)))


def test_back_to_plain_rope(place, extended):
    *_, found = chain(place, extended, 'rope', (16, 'yarn'), (32, 'none'))
    assert settings(found) == {**settings(checkpoint.load(place / 'out/rope')), 'block_size': 32}


def test_sinusoids_extended_again(place, extended):
    for first in ('interpolate', 'recompute'):
        *_, found = chain(place, extended, 'sinusoidal', (16, first), (32, 'interpolate'))
        assert settings(found)['sinusoidal_factor'] == 4.0        # both times from the 8 that were trained
    *_, found = chain(place, extended, 'sinusoidal', (16, 'interpolate'), (32, 'recompute'))
    assert settings(found)['sinusoidal_factor'] == 2.0


def test_a_learned_table_extended_again_says_what_was_never_trained(place, extended):
    first, second, found = chain(place, extended, 'learned', (16, 'hold'), (24, 'tile'))
    assert 'warning' not in first and 'warning: rows 8 to 15 were made by --method=hold and not trained since' in second
    assert found.tensors('model')[TABLE].shape == (24, 16)
    cropped, again, _ = chain(place, extended, 'learned', (5, 'auto'), (8, 'hold'))
    assert 'warning' not in cropped + again


def test_what_was_trained_since_counts_as_trained(place):
    def tuned(wpe, first, then):
        name = f'out/tuned_{wpe}_{first}'
        assert extend(place, f'out/{wpe}', '--block_size=16', f'--method={first}', f'--out_dir={name}').code == 0
        assert train(place, wpe=wpe, out_dir=f'{name}_tuned', init_from=name, max_iters=2).code == 0
        done = extend(place, f'{name}_tuned', '--block_size=32', f'--method={then}', f'--out_dir={name}_32')
        assert done.code == 0 and 'warning' not in done.text
        return settings(checkpoint.load(place / f'{name}_32'))
    found = tuned('rope', 'none', 'yarn')
    assert (found['rope_trained'], found['rope_factor']) == (16, 2.0)
    found = tuned('rope', 'linear', 'linear')                     # at angles that the first 8 positions had
    assert (found['rope_trained'], found['rope_factor']) == (8, 4.0)
    assert tuned('sinusoidal', 'recompute', 'interpolate')['sinusoidal_factor'] == 2.0
    assert tuned('sinusoidal', 'interpolate', 'interpolate')['sinusoidal_factor'] == 4.0
    tuned('learned', 'hold', 'tile')


# ---- the new folder --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('wpe, method', [*((wpe, None) for wpe in SCHEMES), ('rope', 'dynamic'), ('learned', 'interpolate')])
def test_the_result_is_a_run_like_any_other(place, wpe, method):
    new, was = f'out/{wpe}_16_{method}', checkpoint.load(place / 'out' / wpe)
    done = extend(place, f'out/{wpe}', '--block_size=16', f'--out_dir={new}', *([f'--method={method}'] if method else []))
    assert done.code == 0 and f'wrote {new}/ckpt/step_00000006' in done.text and f'--out_dir={new}' in done.text, done.text
    assert sorted(os.listdir(place / new)) == ['ckpt', 'config.json'] and os.listdir(place / new / 'ckpt') == ['step_00000006']
    found = checkpoint.load(place / new)
    assert json.loads((place / new / 'config.json').read_text()) == found.state['config'] and found.state['config']['out_dir'] == new
    for key in ('tokenizer', 'data_digest', 'scaler'):
        assert found.state[key] == was.state[key]
    assert found.environment == was.environment and found.state['origin'] == {'run': f'out/{wpe}', 'step': 6}

    model, tokenizer, _ = checkpoint.load_model(place / new)      # it samples, past its block_size too
    prompt = torch.tensor([tokenizer.encode_prompt('Ham')])
    assert len(list(model.generate(prompt, 30, temperature=0))) == 30
    done = train(place, wpe=wpe, out_dir=new, init_from='resume', max_iters=8)  # it goes on: settings come from the checkpoint
    assert done.code == 0 and 'block_size=16, from' in done.text and 'resuming' in done.text, done.text
    assert [r['step'] for r in metrics.read(place / new) if r['event'] == 'eval'] == [6, 8]  # losses of the new model, none of the old
    last = checkpoint.load(place / new)
    assert last.step == 8 and settings(last) == settings(found) and 'extended' not in last.state
    assert not same(last.tensors('model'), found.tensors('model'))
    done = train(place, wpe=wpe, out_dir=f'{new}_tuned', init_from=new, max_iters=2)  # and it is a start for another run
    assert done.code == 0 and settings(checkpoint.load(place / f'{new}_tuned')) == settings(found), done.text


def test_the_table_alone_can_be_fine_tuned(place):
    assert extend(place, 'out/learned', '--block_size=12', '--method=tile', '--out_dir=out/tiled').code == 0
    done = train(place, wpe='learned', out_dir='out/tiled_tuned', init_from='out/tiled', train_only='wpe', max_iters=2)
    assert done.code == 0, done.text
    before, after = (checkpoint.load(place / name).tensors('model') for name in ('out/tiled', 'out/tiled_tuned'))
    assert (before.pop(TABLE) - after.pop(TABLE)).abs().amax(dim=1).min() > 0 and same(before, after)
    done = extend(place, 'out/tiled_tuned', '--block_size=16', '--out_dir=out/tiled_16')  # whose optimizer knows the table alone
    assert done.code == 0 and checkpoint.load(place / 'out/tiled_16').tensors('optim')[f'exp_avg.{TABLE}'].shape == (16, 16)


def test_a_named_step_and_the_name_of_the_new_folder(place):
    done = extend(place, 'out/none/', '--block_size=12', '--step=4')
    assert done.code == 0 and 'step 4' in done.text, done.text
    assert checkpoint.load(place / 'out/none_12_none').step == 4


# ---- refusals --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('args, says', [
    ([], ['block_size=0', '--block_size=N']), (['--block_size=9'], ['one run folder', 'out/RUN']),
    (['out/rope', 'out/none', '--block_size=9'], ['one run folder']),
    (['out/rope'], ['block_size=0', 'new length']), (['out/rope', '--block_size=-3'], ['block_size=-3']),
    (['out/rope', '--block_size=8'], ['block_size=8', 'out/rope', 'already']), (['out/nowhere', '--block_size=9'], ['out/nowhere']),
    (['out/learned', '--block_size=9', '--method=yarn'], ['yarn', 'wpe=learned', 'lowrank', 'hold', 'tile', 'interpolate', 'random']),
    (['out/rope', '--block_size=9', '--method=lowrank'], ['lowrank', 'wpe=rope', *SCALINGS, 'none']),
    (['out/sinusoidal', '--block_size=9', '--method=hold'], ['hold', 'wpe=sinusoidal', 'recompute', 'interpolate']),
    (['out/alibi', '--block_size=9', '--method=yarn'], ['yarn', 'wpe=alibi', 'none: nothing to do']),
    (['out/none', '--block_size=4', '--method=tile'], ['tile', 'wpe=none']),                  # shrinking, too
    (['out/rope', '--block_size=9', '--method=yran'], ['yran', 'did you mean yarn']),
    (['out/rope', '--block_size=9', '--out_dir=out/none'], ['out/none', 'exists', '--out_dir']),
    (['out/rope', '--block_size=9', '--step=5'], ['step 5', '4, 6']),
    (['out/learned', '--block_size=9', '--rank=0', '--seed=-1'], ['rank=0', 'seed=-1']),
    (['out/learned', '--block_size=9', '--method=lowrank', '--rank=7'], ['rank=7', '8 rows', 'at most 4']),
    (['out/learned', '--block_size=9', '--method=hold', '--rank=2'], ['--rank=2', 'learned, hold', 'leave it out']),
    (['out/learned', '--block_size=9', '--method=interpolate', '--factor=2'], ['--factor=2', 'leave it out']),
    (['out/rope', '--block_size=9', '--method=linear', '--yarn_attention=1'], ['--yarn_attention=1', 'leave it out']),
    (['out/rope', '--block_size=4', '--factor=2'], ['--factor=2', 'rope, crop']),
    (['out/rope', '--block_size=32', '--factor=2'], ['rope_factor=2', '16', 'block_size=32', 'rope_factor=4']),  # contradiction
    (['out/none', '--block_size=9', '--out_dir=data/tiny/meta.json/x'], ['data/tiny/meta.json is a file', 'another name']),
    (['out/rope', '--block_size=32', '--factor=0.5'], ['factor=0.5', 'at least 1']),
    (['out/rope', '--block_size=32', '--yarn_beta_slow=40'], ['yarn_beta_slow=40', 'yarn_beta_fast=32'])])
def test_refusals(place, args, says):
    before = sorted(os.listdir(place / 'out'))
    done = extend(place, *args)
    assert done.code == 2 and done.text.count('error: ') == 1 and 'wrote' not in done.text, done.text
    assert all(word in done.text.partition('error: ')[2] for word in says), done.text
    assert sorted(os.listdir(place / 'out')) == before


@pytest.mark.parametrize('wpe', SCHEMES)
def test_more_than_the_machine_holds(place, wpe, monkeypatch):
    for method in script.METHODS[wpe]:
        done = extend(place, f'out/{wpe}', '--block_size=1000000000000', f'--method={method}', '--out_dir=out/huge')
        assert done.code == 2 and done.text.startswith('error: block_size=1,000,000,000,000 takes '), done.text
        assert done.text.count('\n') == 1 and 'GB of memory' in done.text and not (place / 'out/huge').exists()
    bytes_of = {'memory': 100 * 16 * (16 if wpe == 'learned' else 4), 'disk': 100 * 16 * 12 * (wpe == 'learned')}
    for kind, need in bytes_of.items():                          # one byte too few, and just enough
        for short in (True, False):
            has = {'memory': 10**9, 'disk': 10**9, kind: need - short}
            monkeypatch.setattr(os, 'sysconf', lambda name: has['memory'] if 'PAGES' in name else 1)
            monkeypatch.setattr(shutil, 'disk_usage', lambda path: types.SimpleNamespace(free=has['disk']))
            if need:
                done = extend(place, f'out/{wpe}', '--block_size=100', f'--out_dir=out/{wpe}_{kind}_{short}')
                assert (done.code, f'GB of {kind} at least' in done.text) == ((2, True) if short else (0, False)), done.text


def test_a_refusal_of_the_real_command(place):
    process = start(place, 'extend.py', 'out/none', '--block_size=9', '--method=yarn')
    out, err = process.communicate()
    assert process.returncode == 2 and out == '' and err.startswith('error: --method=yarn does not fit out/none') and 'Traceback' not in err


# ---- killed ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('module, function, call', [
    ('os', 'makedirs', 1), ('os', 'makedirs', 2), ('os', 'makedirs', 3), ('os', 'fsync', 1), ('os', 'fsync', 3), ('os', 'fsync', 5),
    ('os', 'rename', 1), ('os', 'rename', 2)])
def test_killed_while_writing(place, module, function, call):
    new = place / 'out/killed'
    child = os.fork()
    if not child:
        real, count = getattr(os, function), 0

        def killed(*args, **more):
            nonlocal count
            count += 1
            if count == call:
                os._exit(9)
            return real(*args, **more)
        setattr(os, function, killed)
        extend(place, 'out/learned', '--block_size=16', '--method=hold', '--out_dir=out/killed')
        os._exit(1)
    assert wait(child) == 9
    assert not new.exists() and 'killed' not in [name for name in os.listdir(place / 'out') if not name.startswith('.')]
    assert extend(place, 'out/learned', '--block_size=16', '--method=hold', '--out_dir=out/killed').code == 0
    assert checkpoint.load(new).step == 6 and not any(name.startswith('.tmp') for name in os.listdir(place / 'out'))
    new.rename(place / f'out/killed_{function}_{call}')


def test_a_write_that_fails_leaves_nothing(place, monkeypatch):
    def full(*args):
        raise OSError(28, 'No space left on device')
    monkeypatch.setattr(checkpoint, 'save_file', full)
    done = extend(place, 'out/learned', '--block_size=16', '--method=hold', '--out_dir=out/full')
    assert done.code == 2 and 'No space left' in done.text
    assert not [name for name in os.listdir(place / 'out') if 'full' in name]


# ---- how a table goes on ---------------------------------------------------------------------------------------------

def made_of_sinusoids(n, turns, phases, noise=0.0, width=48):
    """n rows: sinusoids of so many turns in the first half, each with 1 or 2 phases, in a random basis, an offset, and noise."""
    random, t = np.random.default_rng(5), np.arange(n) / (n / 2)
    series = [np.sin(2 * np.pi * each * t + phase + k) for k, each in enumerate(turns) for phase in (0, 1.5)[:phases]]
    table = np.stack(series, axis=1) @ random.normal(size=(len(series), width)) + random.normal(size=width)
    table[0] *= 5                                                 # an outlier, as row 0 is in trained tables
    return table + noise * table.std() * random.normal(size=table.shape)


def error(guess, true):
    return np.linalg.norm(guess - true) / np.linalg.norm(true)


@pytest.mark.parametrize('n', [64, 128])
@pytest.mark.parametrize('noise', [0.0, 0.01])
@pytest.mark.parametrize('turns', [(1.3,), (1.0, 3.1), (0.8, 2.3, 5.1)], ids=str)
@pytest.mark.parametrize('phases', [1, 2])
def test_a_table_of_few_sinusoids_is_extrapolated(n, turns, phases, noise):
    table, series = made_of_sinusoids(2 * n, turns, phases, noise), len(turns) * phases
    rank, fit, errors, held = rows.choose_low_rank(table[:n], n)
    assert errors[rank, fit] < 0.05 and held == n // 3
    assert series <= rank < (4 if noise else 2) * series          # as many components as it takes, and hardly more
    guess = error(rows.low_rank(table[:n], n, rank, fit), table[n:])
    assert guess < 0.05
    assert guess < 0.1 * min(error(go_on(table[:n], n), table[n:]) for go_on in (rows.hold_last, rows.repeat_all))


def test_a_table_that_fades_is_not_taken_for_sinusoids():
    random, t = np.random.default_rng(1), np.arange(160)
    series = 0.97 ** t[:, None] * np.stack([np.sin(0.1 * t), np.cos(0.1 * t), np.sin(0.23 * t), np.cos(0.23 * t)], axis=1)
    table = series @ random.normal(size=(4, 48)) + 1 + 0.001 * random.normal(size=(160, 48))
    rank, fit, errors, _ = rows.choose_low_rank(table[:128], 32)
    assert rank == 4 and fit == 'var' and errors[rank, fit] < 0.01
    assert error(rows.low_rank(table[:128], 32, rank, fit), table[128:]) < 0.01


@pytest.mark.parametrize('fit', rows.FITS)
def test_no_table_makes_it_stumble(fit):
    random = np.random.default_rng(2)
    tables = {'zeros': np.zeros((64, 16)), 'constant': np.ones((64, 16)), 'line': np.linspace(-1, 1, 64)[:, None] * np.ones(16),
              'steep': np.exp(np.linspace(0, 9, 64))[:, None] * random.normal(size=16), 'noise': random.normal(size=(64, 16)),
              'narrow': random.normal(size=(64, 1)), 'short': random.normal(size=(5, 16)),
              'alike': random.normal(size=(2, 16))[[0] + [1] * 63]}
    for name, table in tables.items():
        for m in (1, 5, 200):
            with warnings.catch_warnings():
                warnings.simplefilter('error')                    # no division by zero, no badly conditioned fit
                rank, chosen, errors, held = rows.choose_low_rank(table, m, fit=fit)
                new = rows.low_rank(table, m, rank, chosen)
            assert new.shape == (m, table.shape[1]) and np.isfinite(new).all() and chosen == fit, name
            assert held == min(m, len(table) // 3) and all(math.isfinite(each) for each in errors.values()), name
            longest = np.linalg.norm(table[1:], axis=1).max()
            assert np.linalg.norm(new, axis=1).max() <= longest * (1 + 1e-9), name
            if name in ('zeros', 'constant', 'alike'):
                np.testing.assert_allclose(new, table[1:2].repeat(m, axis=0), atol=1e-6)


@pytest.mark.parametrize('shape', [(1, 16), (2, 16), (4, 16)], ids=str)
def test_a_tiny_table_is_refused(shape):
    with pytest.raises(ValueError, match=f'{shape[0]} rows .*--method=hold'):
        rows.choose_low_rank(np.ones(shape), 4)


def test_the_ways_to_continue_a_series():
    t = np.arange(120)
    wave = np.stack((np.sin(0.2 * t) + 0.3 * np.cos(0.53 * t), np.cos(0.2 * t + 1)), axis=1)
    np.testing.assert_allclose(rows.go_on_sinusoid(wave[:80], 40), wave[80:], atol=1e-6)
    noise = np.random.default_rng(3).normal(size=(80, 8))         # in which no sinusoid is seen
    np.testing.assert_allclose(rows.go_on_sinusoid(noise, 40), noise.mean(axis=0).repeat(40).reshape(8, 40).T)
    turning = np.stack((np.sin(0.2 * t), np.cos(0.2 * t)), axis=1)
    np.testing.assert_allclose(rows.go_on_var(turning[:80], 40), turning[80:], atol=1e-3)
    curve = np.stack((1 + t / 80 - (t / 80) ** 3, (t / 80) ** 2), axis=1)
    np.testing.assert_allclose(rows.go_on_cubic(curve[:80], 40), curve[80:], atol=1e-6)


def test_lowrank_by_command(place, extended):
    table, old = made_of_sinusoids(128, (1.0, 3.1), 1, width=16), checkpoint.load(place / 'out/learned')
    state = {**old.state, 'config': {**old.state['config'], 'block_size': 64}}
    weights = {**old.tensors('model'), TABLE: torch.tensor(table[:64], dtype=torch.float32)}
    checkpoint.save(place / 'out/waves', 6, weights, {}, state, old.environment)
    text, _, new = extended('waves', 128, 'lowrank')
    grown = new.tensors('model')[TABLE].double().numpy()
    assert error(grown[64:], table[64:]) < 0.05 and 'last 21 rows' in text and 'sinusoid 0.0' in text, text


@torch.no_grad()
def test_angles_of_the_extended_rope_are_those_of_the_formula(extended):
    _, _, new = extended('rope', 32, 'linear')
    found = checkpoint.model_config(new)
    torch.testing.assert_close(rope_frequencies(found, 32)[0], 10000.0 ** (-torch.arange(0, 8, 2).double() / 8) / 4)
