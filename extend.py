"""Give a trained run a longer (or shorter) context: python extend.py out/shakespeare_learned --block_size=256

Writes a new run folder with one checkpoint that samples, evaluates and fine-tunes like any other. It has no
metrics.jsonl: the losses so far are those of the run it came from. What can be done depends on the position scheme:
a learned table needs rows that were never trained; rope needs other angles, or none; a sinusoidal table can be computed
further or stretched; 'none' and 'alibi' have nothing that ends. A shorter context crops.
"""
import os
import shutil
import sys
from dataclasses import dataclass, replace
from typing import Literal

import nanope  # noqa: F401 (before torch)
import numpy as np
import torch

from model import GPTConfig
from nanope import checkpoint
from nanope.configurator import configure, idle, run
from nanope.files import check_room, make_folder, sync, write_json
from nanope.rows import FITS, choose_low_rank, hold_last, low_rank, repeat_all, stretch

METHODS = {  # by scheme; the first is what auto takes
    'learned': {'interpolate': 'stretch the table; every row but the first changes, so train it on',
                'lowrank': 'continue its principal components, in the way that predicts held-back rows best',
                'hold': 'repeat the last row',
                'tile': 'repeat the table from its start (Longformer, Beltagy et al. 2020)',
                'random': 'draw rows as at the start of training, N(0, wpe_std)'},
    'rope': {'yarn': 'slow down pairs that hardly turn within the trained length, sharpen attention (Peng et al. 2024)',
             'linear': 'slow down all pairs alike (position interpolation, Chen et al. 2023)',
             'ntk': 'a larger base: the slower a pair, the more it is slowed down (bloc97 2023)',
             'dynamic': 'as ntk, by the length of the sequence at hand; nothing changes up to the trained one',
             'llama3': 'as yarn, with another ramp, and attention as it was (Dubey et al. 2024)',
             'none': 'plain rope, at positions that were never trained'},
    'sinusoidal': {'interpolate': 'divide positions by the factor',
                   'recompute': 'the same formula, at positions that were never trained'},
    'none': {'none': 'nothing to do, there are no positions'},
    'alibi': {'none': 'nothing to do, there is no table that ends'},
}
OPTIONS = {  # which methods look at them
    'rank': ('lowrank',), 'fit': ('lowrank',), 'seed': ('random',),
    'factor': ('yarn', 'linear', 'ntk', 'dynamic', 'llama3', 'interpolate'),
    'yarn_beta_fast': ('yarn',), 'yarn_beta_slow': ('yarn',), 'yarn_attention': ('yarn',),
    'llama3_low': ('llama3',), 'llama3_high': ('llama3',),
}
NAMES = tuple(dict.fromkeys(name for methods in METHODS.values() for name in methods))


@dataclass
class ExtendConfig:
    block_size: int = 0                 # the new context length, tokens
    method: Literal['auto', *NAMES] = 'auto'  # auto: the scaling that a rope has; else interpolate, yarn, none: the least
                                        # loss at twice the length, see docs/results.md
    out_dir: str | None = None          # new run folder; none = the old one's name with _<block_size>_<method>
    step: int | Literal['latest', 'best'] = 'latest'  # which checkpoint to extend
    rank: int | None = None             # lowrank: components; none = chosen on held-back rows
    fit: Literal[*FITS] | None = None   # lowrank: how components go on; none = chosen on held-back rows
    seed: int = 1337                    # random: the rows follow from it
    factor: float | None = None         # rope, interpolated sinusoids: how many times longer; none = than was trained
    yarn_beta_fast: float = GPTConfig.yarn_beta_fast  # these as in model.py
    yarn_beta_slow: float = GPTConfig.yarn_beta_slow
    yarn_attention: float | None = GPTConfig.yarn_attention
    llama3_low: float = GPTConfig.llama3_low
    llama3_high: float = GPTConfig.llama3_high

    def problems(self):
        found = [f'{name}={getattr(self, name)} must be at least {least}'
                 for name, least in (('rank', 1), ('factor', 1), ('seed', 0))
                 if getattr(self, name) is not None and getattr(self, name) < least]
        return found + [f'block_size={self.block_size}: give the new length, --block_size=N'] * (self.block_size < 1)


def choose_method(config, old, path):
    """The method that extends a run; 'crop' if it gets shorter. Raises ValueError where the settings do not fit it."""
    methods = METHODS[old.wpe]
    if config.method not in ('auto', *methods):
        fitting = '; '.join(f'{name}: {what}' for name, what in methods.items())
        raise ValueError(f'--method={config.method} does not fit {path}, whose wpe={old.wpe}. What does: {fitting}')
    if config.block_size == old.block_size:
        raise ValueError(f'block_size={config.block_size} is what {path} has already')
    method = config.method
    if method == 'auto':
        method = old.rope_scaling if old.wpe == 'rope' and old.rope_scaling != 'none' else next(iter(methods))
    method = 'crop' if config.block_size < old.block_size else method
    for name, users in OPTIONS.items():
        used = method in users and not (name == 'factor' and old.wpe == 'learned')
        if not used and (nothing := idle(config, [name], f'here ({old.wpe}, {method})')):
            raise ValueError(f'--{nothing[0]}')
    return method


def trained_length(old, extended):
    """Tokens of context that a run was trained on, at unscaled positions.

    extended: what extend.py wrote into its checkpoint, None if it has been trained since."""
    if old.wpe == 'rope' and old.rope_scaling != 'none':
        return old.rope_trained or old.block_size
    if extended:
        return extended['trained']
    return old.block_size / old.sinusoidal_factor if old.wpe == 'sinusoidal' else old.block_size


def new_settings(config, old, method, trained):
    """The fields of GPTConfig to change, {name: value}. A scaling replaces the one that a run has, if any."""
    changes = {'block_size': config.block_size}
    factor = config.factor or max(config.block_size / trained, 1.0)
    if method == 'crop':
        if old.rope_scaling != 'none':
            changes['rope_trained'] = old.rope_trained or old.block_size  # the angles stay as they were
    elif method == 'interpolate' and old.wpe == 'sinusoidal':
        changes['sinusoidal_factor'] = factor
    elif method == 'none' and old.wpe == 'rope':
        changes |= {'rope_scaling': 'none', 'rope_factor': 1.0, 'rope_trained': None}
    elif old.wpe == 'rope':
        changes |= {'rope_scaling': method, 'rope_factor': factor, 'rope_trained': trained}
        changes |= {name: getattr(config, name) for name in OPTIONS if name.startswith(('yarn', 'llama3'))}
    return changes


def extend_table(table, config, method, wpe_std):
    """A learned table, float32 array, with block_size rows. Old rows stay bit for bit, but for 'interpolate'."""
    m, rows = config.block_size - len(table), table.astype(np.float64)
    if method == 'crop':
        return table[:config.block_size]
    if method == 'interpolate':
        return stretch(rows, config.block_size).astype(np.float32)
    if method == 'random':
        new = np.random.default_rng(config.seed).normal(0, wpe_std, (m, table.shape[1]))
    elif method in ('hold', 'tile'):
        new = hold_last(rows, m) if method == 'hold' else repeat_all(rows, m)
    else:
        rank, fit, errors, held = choose_low_rank(rows, m, config.rank, config.fit)
        print(f'relative error on the last {held} rows, predicted from those before: rank {rank} {fit} '
              f'{errors[rank, fit]:.2f}, hold {errors["hold"]:.2f}, tile {errors["tile"]:.2f}')
        new = low_rank(rows, m, rank, fit)
    return np.concatenate((table, new.astype(np.float32)))


def extend_moments(optim, block_size, method):
    """Give AdamW's moments of a learned table block_size rows, in place. Returns what was done, in words."""
    for name in ('exp_avg.transformer.wpe.weight', 'exp_avg_sq.transformer.wpe.weight'):
        old = optim[name] * (method != 'interpolate')
        optim[name] = torch.nn.functional.pad(old, (0, 0, 0, block_size - len(old)))  # a negative width crops
    return {'interpolate': 'reset to zero, as all rows have changed', 'crop': f'cropped to {block_size} rows'}.get(
        method, f'zero for the {block_size - len(old)} new rows')


def write_run(out_dir, step, model, optim, state, environment):
    """A run folder with one checkpoint: it is there whole, or not at all. Returns the checkpoint's folder."""
    parent, name = os.path.split(os.path.abspath(out_dir))
    temporary = os.path.join(parent, f'.tmp-{name}')
    shutil.rmtree(temporary, ignore_errors=True)                  # left by one that was killed
    make_folder(os.path.dirname(out_dir) or '.')
    os.makedirs(temporary)
    try:
        checkpoint.save(temporary, step, model, optim, state, environment)
        write_json(os.path.join(temporary, 'config.json'), state['config'])
        os.rename(temporary, out_dir)
        sync(parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return checkpoint.step_folder(out_dir, step)


def main(argv=None):
    config, runs = configure(ExtendConfig, sys.argv[1:] if argv is None else argv)
    if len(runs) != 1:
        raise ValueError('give one run folder: python extend.py out/RUN --block_size=N')
    found = checkpoint.load(runs[0], config.step)
    old, extended = checkpoint.model_config(found), found.state.get('extended')
    method = choose_method(config, old, runs[0])
    out_dir = config.out_dir or f'{os.path.normpath(runs[0])}_{config.block_size}_{method}'
    if os.path.exists(out_dir):
        raise ValueError(f'{out_dir} exists: give another --out_dir')
    numbers, learned = config.block_size * old.n_embd, old.wpe == 'learned'  # of the table, or of one layer's states of one sequence
    check_room(f'block_size={config.block_size:,}', numbers * (16 if learned else 4), numbers * 12 * learned, out_dir)  # 12: with moments
    trained = trained_length(old, extended)
    changes = new_settings(config, old, method, trained)
    replace(old, **changes)                                       # raises ValueError where they do not fit together

    what = METHODS[old.wpe].get(method, 'a shorter context needs no method, what is left stays as it was')
    print(f'{runs[0]}, step {found.step}, wpe={old.wpe}, {method}: {what}')
    print(', '.join(f'{name} {getattr(old, name)} -> {value}' for name, value in changes.items()
                    if value != getattr(old, name)))
    model, optim = found.tensors('model'), found.tensors('optim')
    if old.wpe == 'learned':
        if extended and extended['block_size'] < old.block_size and method != 'crop':
            print(f'warning: rows {extended["block_size"]} to {old.block_size - 1} were made by '
                  f'--method={extended["method"]} and not trained since', file=sys.stderr)
        name = 'transformer.wpe.weight'
        model[name] = torch.from_numpy(extend_table(model[name].numpy(), config, method, old.wpe_std))
        if optim:                                                 # AdamW has none before its first update
            print(f"AdamW's moments of the table: {extend_moments(optim, config.block_size, method)}")
    state = {**found.state, 'config': {**found.state['config'], **changes, 'out_dir': out_dir},
             'origin': {'run': runs[0], 'step': found.step},     # this makes train.py take over the settings
             'extended': {'block_size': old.block_size, 'method': method, 'trained': trained}}  # until it is trained
    print('wrote ' + write_run(out_dir, found.step, model, optim, state, found.environment))
    print(f'next: python sample.py --out_dir={out_dir}, or python train.py --init_from={out_dir} --out_dir=OTHER')


if __name__ == '__main__':
    run(main)
