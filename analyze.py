"""What positions look like inside a model: python analyze.py out/shakespeare_learned, or gpt2, or a folder with one

A learned table is measured beside three controls: the table as it was drawn before training, a random walk of the
same step size, and sinusoids. Of a run, whatever its scheme, the mean effect of the position on the hidden states
(Song & Zhong 2023) is measured likewise. Prints tables; writes analysis.json, table.png and hidden.png into --to.
Of a Hugging Face folder the learned table alone is read, with safetensors.
"""
import json
import math
import os
import re
import sys
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import nanope  # noqa: F401 (before torch)
import torch
from tqdm import tqdm

from model import GPT, rope_frequencies, sinusoidal_table
from nanope import checkpoint, device, huggingface, tables
from nanope.configurator import configure, idle, run
from nanope.evaluate import windows
from nanope.files import make_folder, read_json, write_json
from nanope.loader import Data
from nanope.table_report import draw, text_shares, text_table


@dataclass
class AnalyzeConfig:
    to: str | None = None               # folder for the results; none = <run>/analysis, or out/analysis
    json: bool = False                  # print analysis.json instead of the tables
    step: int | Literal['latest', 'best'] = 'latest'  # which checkpoint of a run
    seed: int = 1337                    # of the random walk, folds and pairs; a run's initial table comes from its own
    skip_rows: int = 0                  # first rows to leave out; 1 is right for GPT-2, whose row 0 is an outlier
    eval_tokens: int = 65536            # validation tokens over which hidden states are averaged
    batch_size: int = 32                # rows; changes the result by rounding alone
    device: str = 'auto'                # auto, cpu, cuda, mps

    def problems(self):
        least = {'seed': 0, 'skip_rows': 0, 'eval_tokens': 1, 'batch_size': 1}
        return [f'{name}={getattr(self, name)} must be at least {n}' for name, n in least.items()
                if getattr(self, name) < n]


# ---- where the numbers come from -------------------------------------------------------------------------------------

def read_hugging_face(folder):
    """(wpe table (T, C) float64, the std it was drawn with) of a folder with GPT-2 as Hugging Face stores it, whatever its vocabulary."""
    settings = read_json(os.path.join(folder, 'config.json'))
    found = [f'{key}={value}' for key, value in settings.items() if re.search('pos|rope|rotary|alibi', key)]
    for name, read in huggingface.each_tensor(folder):
        if re.fullmatch(r'(transformer\.)?wpe\.weight', name):
            return read().double().numpy(), settings.get('initializer_range', 0.02)
        found += [name] if re.search('pos|rotary|alibi', name) else []
    raise ValueError(f'{folder} has no learned table wpe.weight; this {settings.get("model_type", "unnamed")} model '
                     f'has {", ".join(found) or "nothing that is named after positions"}')


@torch.no_grad()
def position_effects(model, file, config):
    """Means over windows of validation tokens, float64: the hidden state at each position after each block, (L, T, C),
    its square norm, (L, T), and the number of windows. Averaging over content leaves the position."""
    T, blocks, where = model.config.block_size, model.transformer.h, next(model.parameters()).device
    starts, _ = windows(file.tokens, T, config.eval_tokens)
    sums, squares = np.zeros((len(blocks), T, model.config.n_embd)), np.zeros((len(blocks), T))

    def add(layer, block, inputs, x):                             # x: (B, T, C)
        sums[layer] += x.sum(0).cpu().numpy()
        squares[layer] += x.square().sum((0, 2)).cpu().numpy()

    hooks = [block.register_forward_hook(partial(add, layer)) for layer, block in enumerate(blocks)]
    for i in tqdm(range(0, len(starts), config.batch_size), desc='hidden states', disable=None, leave=False):
        model(file.rows(starts[i:i + config.batch_size], T).to(where), last_only=True)
    for hook in hooks:
        hook.remove()
    return sums / len(starts), squares / len(starts), len(starts)


def unfinished_turns(config):
    """Which frequencies of RoPE never complete a turn within the trained length: past it, their angles are new."""
    trained = getattr(config, 'rope_trained', None) or config.block_size
    wavelengths = 2 * np.pi / rope_frequencies(config, trained)[0].numpy()  # tokens, ascending
    slow = wavelengths[wavelengths > trained].tolist()
    return {'trained_length': trained, 'frequencies': len(wavelengths), 'unfinished': len(slow),
            'unfinished_share': len(slow) / len(wavelengths), 'unfinished_wavelengths': slow}


# ---- sections of the report: each returns what goes into analysis.json, and text -------------------------------------

def beside_controls(name, table, initial, config, title, path, centred=False):
    """Measure a table (T, C) and its controls, and draw them into `path`: ({column: measures}, text).

    The sinusoids have the table's RMS. centred: all of them less their mean row, as mean effects are by definition."""
    used = tables.usable(table, config.skip_rows)
    if not used.any():
        raise ValueError(f'{title}: every row is zero, there is nothing to analyse')
    title += f', from row {config.skip_rows} on' if config.skip_rows else ''
    sinusoids = sinusoidal_table(0, *table.shape).double().numpy()
    columns = {name: table, 'initial': initial,
               'random walk': tables.random_walk(*table.shape, tables.step_size(used), config.seed),
               'sinusoidal': sinusoids * np.sqrt((used ** 2).mean() / (sinusoids ** 2).mean())}
    columns = {key: x - centred * x[config.skip_rows:].mean(axis=0) for key, x in columns.items()}
    rows = {key: tables.measure(x, config.seed, config.skip_rows) for key, x in columns.items()}
    rows = {key: {k: v if math.isfinite(v) else None for k, v in row.items()} for key, row in rows.items()}
    draw(columns, config.skip_rows, title, path)
    return rows, f'{title}\n{text_table(rows, len(table), config.skip_rows)}\n'


def table_section(where, table, initial, config, to):
    title = f'{where}: position table, {table.shape[0]} × {table.shape[1]}'
    return beside_controls('learned', table, initial, config, title, os.path.join(to, 'table.png'))


def rope_section(where, config):
    turns = unfinished_turns(config)
    lengths = ', '.join(f'{length:,.0f}' for length in turns['unfinished_wavelengths']) or 'none'
    share = f'{turns["unfinished"]} of {turns["frequencies"]} frequencies ({turns["unfinished_share"]:.0%})'
    return turns, (f'{where}: {share} never complete a turn within the {turns["trained_length"]} tokens trained on.\n'
                   f'Their wavelengths in tokens: {lengths}\n')


def hidden_section(where, model, untrained, file, config, to):
    """untrained: the same model as it was drawn, the control 'initial'."""
    (means, squares, n), (initial, initial_squares, _) = (position_effects(m, file, config) for m in (model, untrained))
    title = f'{where}: mean effect of the position on hidden states, last block, {n} windows'
    path = os.path.join(to, 'hidden.png')
    columns, text = beside_controls('hidden', means[-1], initial[-1], config, title, path, centred=True)
    blocks = []
    for i, parts in enumerate(zip(means, squares, initial, initial_squares), 1):
        share, noise = tables.position_share(*parts[:2], n, config.skip_rows)
        before, _ = tables.position_share(*parts[2:], n, config.skip_rows)
        blocks.append({'block': i, 'share': share, 'noise': noise, 'initial_share': before})
    return {'windows': n, 'columns': columns, 'blocks': blocks}, f'{text}{text_shares(blocks)}\n'


def analyse_run(path, config, to):
    """{section: (content, text)} of a run folder."""
    device_name, _ = device.resolve_device(config.device)
    model, _, found = checkpoint.load_model(path, config.step, device_name)
    settings, scheme, sections = found.state['config'], model.config.wpe, {}
    untrained = GPT(model.config, settings.get('seed', config.seed)).to(device_name).eval()
    where = f'{path} ({scheme}, step {found.step})'
    if scheme == 'learned':
        table, initial = (m.transformer.wpe.weight.detach().cpu().double().numpy() for m in (model, untrained))
        sections['table'] = table_section(where, table, initial, config, to)
    if scheme == 'rope':
        sections['rope'] = rope_section(where, model.config)
    try:
        data = Data(os.path.join('data', settings.get('dataset', 'none')))
        data.check_length(model.config.block_size)
        if data.digest != found.state.get('data_digest'):
            raise ValueError(f'data/{settings["dataset"]} is not what {path} was trained on (its digest differs)')
    except ValueError as error:
        if not sections:
            raise
        print(f'warning: hidden states are left out: {error}', file=sys.stderr)
    else:
        sections['hidden'] = hidden_section(where, model, untrained, data.val, config, to)
    return {'wpe': scheme, 'checkpoint': found.step}, sections


def main(argv=None):
    config, rest = configure(AnalyzeConfig, sys.argv[1:] if argv is None else argv)
    if len(rest) != 1:
        raise ValueError(f'give one folder, not {len(rest)}: python analyze.py out/shakespeare_learned')
    path = huggingface.locate(rest[0])
    is_run = os.path.isdir(os.path.join(path, 'ckpt')) or os.path.exists(os.path.join(path, 'ckpt.pt'))  # the latter is nanoGPT's
    if not is_run and not os.path.exists(os.path.join(path, 'config.json')):
        raise ValueError(f'{path} is neither a run folder (no ckpt/) nor a Hugging Face folder (no config.json), nor one of '
                         f'{", ".join(huggingface.HUB)}')
    to = config.to or (os.path.join(path, 'analysis') if is_run else 'out/analysis')
    if not is_run and (nothing := idle(config, ('step', 'eval_tokens', 'batch_size', 'device'), 'where the learned table alone is read')):
        raise ValueError('\n'.join(f'--{line}' for line in nothing))
    table, std = (None, None) if is_run else read_hugging_face(path)
    make_folder(to)
    if is_run:
        about, sections = analyse_run(path, config, to)
    else:
        initial = np.random.default_rng(config.seed).normal(0, std, table.shape)  # which draw it was is not known
        about, sections = {'wpe': 'learned'}, {'table': table_section(path, table, initial, config, to)}
    report = {'source': path, **about, 'seed': config.seed, 'skip_rows': config.skip_rows,
              **{name: content for name, (content, _) in sections.items()}}
    write_json(os.path.join(to, 'analysis.json'), report)
    text = '\n'.join(text for _, text in sections.values()) + f'\nwrote {to}/analysis.json and its pictures'
    print(json.dumps(report, indent=1) if config.json else text)


if __name__ == '__main__':
    run(main)
