"""Give a trained run a longer (or shorter) context: python extend.py out/shakespeare_learned --block_size=256 --method=lowrank

Writes a new run folder whose checkpoint samples, evaluates and fine-tunes (train.py --init_from=FOLDER) like any other. What can be done
depends on the position scheme: a learned table needs rows that were never trained; rope needs other angles, or none; a sinusoidal table can
be computed further or stretched; 'none' and 'alibi' have nothing that ends. A shorter context crops.
"""
import os
import sys
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
import nanope  # noqa: F401 (before torch)
import torch

from model import GPTConfig
from nanope import checkpoint
from nanope.configurator import configure, run
from nanope.files import write_json

METHODS = {  # by scheme; the first is the default
    'learned': {'lowrank': 'fit a low-rank model to the trained rows and extrapolate its component series',
                'hold': 'repeat the last row',
                'tile': 'repeat the table from its start (Longformer, Beltagy et al. 2020)',
                'interpolate': 'stretch the table; every row changes',
                'random': 'rows as at the start of training, N(0, wpe_std)'},
    'rope': {'yarn': 'interpolate slow pairs, keep fast ones, sharpen attention', 'linear': 'interpolate all pairs',
             'ntk': 'a larger base', 'dynamic': 'a base that grows with the sequence', 'llama3': 'as yarn, by wavelength, same attention',
             'none': 'plain rope at positions that were never trained'},
    'sinusoidal': {'recompute': 'the same formula at positions that were never trained', 'interpolate': 'positions divided by the factor'},
    'none': {'none': 'nothing to do'},
    'alibi': {'none': 'nothing to do'},
}
RANKS = (1, 2, 4, 8, 16, 32)


@dataclass
class ExtendConfig:
    block_size: int = 0                 # the new context length, tokens
    method: Literal['lowrank', 'hold', 'tile', 'interpolate', 'random', 'yarn', 'linear', 'ntk', 'dynamic', 'llama3', 'recompute', 'none',
                    'auto'] = 'auto'    # see above; auto = the first that fits the scheme
    out_dir: str | None = None          # new run folder; none = the old one's name with _<block_size>_<method>
    step: int | Literal['latest', 'best'] = 'latest'  # which checkpoint to extend
    rank: int | None = None             # lowrank: components; none = chosen on held-back rows
    fit: Literal['sinusoid', 'var', 'cubic'] | None = None  # lowrank: how a component goes on; none = chosen on held-back rows
    seed: int = 1337                    # random: draws the rows
    yarn_beta_fast: float = 32.0        # yarn: see model.py
    yarn_beta_slow: float = 1.0
    yarn_attention: float | None = None

    def problems(self):
        found = []
        if self.block_size < 1:
            found.append('block_size is the new context length: give --block_size=N, at least 1')
        if self.rank is not None and self.rank < 1:
            found.append(f'rank={self.rank} must be at least 1')
        return found


# ---- extrapolating a component series (n, r) by m steps, float64 -----------------------------------------------------------------------

def go_on_cubic(series, m):
    """A cubic through each column's last quarter, at least 8 points, going on."""
    n = len(series)
    last = min(n, max(8, n // 4))
    x = np.arange(n - last, n + m) / n
    return np.stack([np.polyval(np.polyfit(x[:last], column[-last:], min(3, last - 1)), x[last:]) for column in series.T], axis=1)


def go_on_var(series, m):
    """z[t+1] = z[t] A + b by ridge regression, iterated from the last row. With eigenvalues below 1 it drifts to the mean."""
    past = np.concatenate([series[:-1], np.ones((len(series) - 1, 1))], axis=1)
    A = np.linalg.solve(past.T @ past + 1e-6 * np.trace(past.T @ past) / past.shape[1] * np.eye(past.shape[1]), past.T @ series[1:])
    rows = [series[-1]]
    for _ in range(m):
        rows.append(np.append(rows[-1], 1.0) @ A)
    return np.stack(rows[1:])


def go_on_sinusoid(series, m):
    """The best a + b cos(wt) + c sin(wt) of each column, of 0.1 to n/4 turns within the n rows, going on."""
    n, t = len(series), np.arange(len(series) + m)
    best = np.full(series.shape[1], np.inf)
    out = np.empty((m, series.shape[1]))
    for turns in np.geomspace(0.1, max(n / 4, 0.2), 200):
        basis = np.stack([np.ones(n + m), np.cos(2 * np.pi * turns * t / n), np.sin(2 * np.pi * turns * t / n)], axis=1)
        weights = np.linalg.lstsq(basis[:n], series, rcond=None)[0]
        error = ((basis[:n] @ weights - series) ** 2).sum(axis=0)
        better = error < best
        out[:, better], best[better] = (basis[n:] @ weights)[:, better], error[better]
    return out


FITS = {'sinusoid': go_on_sinusoid, 'var': go_on_var, 'cubic': go_on_cubic}


def low_rank(table, m, rank, fit):
    """m more rows of table (n, C): its mean and first `rank` principal components, each component's series continued by `fit`.

    Row 0 is left out of the fit, an outlier in trained tables. New rows get no larger norm than the largest trained one."""
    rows = table[1:]
    mean = rows.mean(axis=0)
    U, S, V = np.linalg.svd(rows - mean, full_matrices=False)
    new = FITS[fit]((U * S)[:, :rank], m) @ V[:rank] + mean
    norm, limit = np.linalg.norm(new, axis=1, keepdims=True), np.linalg.norm(rows, axis=1).max()
    return new * np.minimum(1, limit / np.maximum(norm, 1e-30))


def row_error(predicted, true):
    """Median over rows of |predicted - true| / |true|."""
    return float(np.median(np.linalg.norm(predicted - true, axis=1) / np.linalg.norm(true, axis=1)))


def choose_low_rank(table, m, rank, fit):
    """(rank, fit) with the least error on held-back rows: the last min(m, n/2) are predicted from those before. Prints the trials."""
    n = len(table)
    held = min(m, n // 2)
    known, true = table[:n - held], table[n - held:]
    trials = {(r, f): row_error(low_rank(known, held, r, f), true) for f in ([fit] if fit else FITS)
              for r in ([rank] if rank else RANKS) if r < len(known) - 1}
    if not trials:
        raise ValueError(f'a table of {n} rows is too short to fit {rank or RANKS[0]} components: use --method=hold')
    best = min(trials, key=trials.get)
    print(f'error on the last {held} rows, predicted from those before: ' +
          ', '.join(f'rank {r} {f} {error:.2f}' for (r, f), error in trials.items()))
    print(f'for comparison: hold {row_error(np.repeat(known[-1:], held, axis=0), true):.2f}, '
          f'tile {row_error(known[np.arange(held) % len(known)], true):.2f}; chosen: rank {best[0]}, {best[1]}')
    return best


def extend_table(table, block_size, config, wpe_std):
    """A learned table (n, C) float32 tensor with block_size rows. Trained rows stay as they are, but for 'interpolate'."""
    n = len(table)
    m = block_size - n
    if m <= 0:
        return table[:block_size].clone()
    rows = table.double().numpy()
    if config.method == 'random':
        return torch.cat((table, torch.randn(m, table.size(1), generator=torch.Generator().manual_seed(config.seed)) * wpe_std))
    if config.method == 'hold':
        new = np.repeat(rows[-1:], m, axis=0)
    elif config.method == 'tile':
        new = rows[np.arange(n, block_size) % n]
    elif config.method == 'lowrank':
        new = low_rank(rows, m, *choose_low_rank(rows, m, config.rank, config.fit))
    else:  # interpolate: row p of the new table stands at p (n-1)/(block_size-1) of the old one
        at = np.arange(block_size) * (n - 1) / (block_size - 1)
        return torch.from_numpy(np.stack([np.interp(at, np.arange(n), column) for column in rows.T], axis=1)).float()
    return torch.cat((table, torch.from_numpy(new).float()))


def extend_moments(optim, n, block_size, method):
    """The optimizer's moments of the table: cropped, or zero for new rows; all zero where every row changed."""
    for name in ('exp_avg.transformer.wpe.weight', 'exp_avg_sq.transformer.wpe.weight'):
        old = optim[name]
        optim[name] = old.new_zeros(block_size, old.size(1))
        if method != 'interpolate' or block_size <= n:
            optim[name][:n] = old[:block_size]
    return optim


def main(argv=None):
    config, runs = configure(ExtendConfig, sys.argv[1:] if argv is None else argv)
    if len(runs) != 1:
        raise ValueError('give one run folder: python extend.py out/RUN --block_size=N')
    found = checkpoint.load(runs[0], config.step)
    old = checkpoint.model_config(found)
    methods = METHODS[old.wpe]
    if config.method == 'auto':
        config.method = next(iter(methods))
    if config.method not in methods:
        raise ValueError(f'--method={config.method} does not fit wpe={old.wpe}: ' + '; '.join(f'{m}: {what}' for m, what in methods.items()))
    if config.block_size == old.block_size:
        raise ValueError(f'{runs[0]} has block_size={old.block_size} already')
    config.out_dir = config.out_dir or f'{os.path.normpath(runs[0])}_{config.block_size}_{config.method}'
    if os.path.exists(config.out_dir):
        raise ValueError(f'{config.out_dir} exists: give another --out_dir')

    trained, grows = old.rope_trained or old.block_size, config.block_size > old.block_size
    changes = {'block_size': config.block_size}
    model, optim = found.tensors('model'), found.tensors('optim')
    if old.wpe == 'learned':
        name = 'transformer.wpe.weight'
        model[name] = extend_table(model[name], config.block_size, config, old.wpe_std)
        optim = extend_moments(optim, old.block_size, config.block_size, config.method) if optim else optim
    elif grows and old.wpe == 'sinusoidal' and config.method == 'interpolate':
        changes['sinusoidal_factor'] = old.sinusoidal_factor * config.block_size / old.block_size
    elif old.wpe == 'rope' and grows and config.method != 'none':
        changes |= {'rope_scaling': config.method, 'rope_trained': trained,
                    'rope_factor': config.block_size / trained,
                    **{key: getattr(config, key) for key in ('yarn_beta_fast', 'yarn_beta_slow', 'yarn_attention')}}
    elif old.wpe == 'rope':
        changes['rope_trained'] = min(trained, config.block_size)
    state = {**found.state, 'config': {**found.state['config'], **changes, 'out_dir': config.out_dir},
             'extended': {'from': runs[0], 'step': found.step, 'block_size': old.block_size, 'method': config.method}}
    GPTConfig(**{field.name: state['config'][field.name] for field in fields(GPTConfig) if field.name in state['config']})  # checks
    os.makedirs(os.path.join(config.out_dir, 'ckpt'))
    path = checkpoint.save(config.out_dir, found.step, model, optim, state, found.environment)
    write_json(os.path.join(config.out_dir, 'config.json'), state['config'])
    what = methods[config.method] if grows else 'cropped'
    print(f'{path}: block_size {old.block_size} -> {config.block_size}, {old.wpe}, {config.method}: {what}')
    print(f'next: python train.py --init_from={config.out_dir} --out_dir={config.out_dir}_tuned ..., or compare.py on both folders')


if __name__ == '__main__':
    run(main)
