"""Compare runs on the same validation tokens: python compare.py out/shakespeare_learned out/shakespeare_rope

Prints a table and writes report.json and compare.png into --to. Every validation token but the first is scored once, in windows of the
trained length that stand end to end; the standard error is over windows. tokens/s is the median over each run's training.
"""
import math
import os
import statistics
import sys
from dataclasses import dataclass
from typing import Literal

from tqdm import tqdm

from nanope import checkpoint, device, metrics, plots
from nanope.configurator import configure, run
from nanope.evaluate import evaluate
from nanope.files import write_json
from nanope.loader import Data

# Settings that a fair comparison may differ in: the scheme, the seed, and what does not change the course of training.
MAY_DIFFER = {'wpe', 'seed', 'dataset', 'out_dir', 'init_from', 'overwrite', 'allow_change', 'eval_interval', 'eval_tokens',
              'eval_batch_size', 'checkpoint_interval', 'keep_checkpoints', 'log_interval', 'wandb', 'wandb_project', 'device', 'compile',
              'threads'}


@dataclass
class CompareConfig:
    to: str = 'out/compare'             # folder for report.json and compare.png
    step: int | Literal['latest', 'best'] = 'latest'  # which checkpoint of each run
    eval_tokens: int | None = None      # validation tokens to score; none = all
    batch_size: int = 32                # rows; the result does not depend on it
    device: str = 'auto'                # auto, cpu, cuda, mps
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'  # auto: as each run was trained, where the device can

    def problems(self):
        return [f'{name}={getattr(self, name)} must be at least 1' for name in ('eval_tokens', 'batch_size')
                if getattr(self, name) is not None and getattr(self, name) < 1]


def find_runs(paths, config):
    """{run folder: its Checkpoint}, in the order given. Raises ValueError where one cannot be read or two cannot be compared."""
    paths = [path for path in paths if os.path.realpath(path) != os.path.realpath(config.to)]  # as in: python compare.py out/*
    if not paths:
        raise ValueError('no run to compare: python compare.py out/a out/b ...')
    seen = {}
    for path in paths:
        if seen.setdefault(os.path.realpath(path), path) is not path:
            raise ValueError(f'{path} is given twice')
    runs = {path: checkpoint.load(path, config.step) for path in paths}
    digests = {}
    for path, found in runs.items():
        digests.setdefault(found.state['data_digest'], path)
    if len(digests) > 1:
        raise ValueError(f'runs trained on different data cannot be compared: {" and ".join(digests.values())}')
    return runs


def differences(checkpoints):
    """What besides the scheme and the seed differs between runs: {name: [value of each run]}."""
    facts = [{**found.state['config'], 'step': found.step, 'dtype': found.environment['dtype']} for found in checkpoints]
    names = [name for name in facts[0] if name not in MAY_DIFFER and all(name in fact for fact in facts)]  # versions may add names
    values = {name: [fact[name] for fact in facts] for name in names}
    return {name: each for name, each in values.items() if any(value != each[0] for value in each)}


def open_data(runs):
    """The data that the runs were trained on. Raises ValueError where the folder holds other data by now."""
    path, found = next(iter(runs.items()))
    folder = os.path.join('data', found.state['config']['dataset'])
    data = Data(folder)
    if data.digest != found.state['data_digest']:
        raise ValueError(f'{folder} is not the data that {path} was trained on (its digest differs): prepare it again')
    return data


def evaluate_run(path, step, data, config, device_name):
    """Score one run folder at a step: its row of report.json."""
    model, tokenizer, found = checkpoint.load_model(path, step, device_name)
    dtype = found.environment['dtype'] if config.dtype == 'auto' else config.dtype
    if config.dtype == 'auto' and dtype == 'float16' and not device_name.startswith('cuda'):
        dtype = 'float32'
    dtype, _ = device.resolve_dtype(dtype, device_name, model.config.n_embd)
    result = evaluate(model, data.val, tokenizer.byte_lengths(), block_size=model.config.block_size, max_tokens=config.eval_tokens,
                      autocast=device.autocast(device_name, dtype), batch_size=config.batch_size)
    count = model.parameter_counts()
    speeds = [r['tokens_per_s'] for r in metrics.read(path) if r['event'] == 'train']
    return {'run': path, 'wpe': model.config.wpe, 'seed': found.state['config']['seed'], 'block_size': model.config.block_size,
            'step': step, 'params': count['total'], 'wpe_params': count['wpe'], 'val_loss': result['loss'],
            'val_stderr': None if math.isnan(result['stderr']) else result['stderr'],  # one window has none, and JSON no NaN
            'val_tokens': result['tokens'], 'bits_per_byte': result['bits_per_byte'], 'dtype': dtype,
            'tokens_per_s': statistics.median(speeds) if speeds else None,
            'position': [{'from': p, 'to': p + 1, 'loss': loss} for p, loss in enumerate(result['position'])]}


def table(rows):
    """The comparison as lines of text."""
    lines = [('run', 'scheme', 'seed', 'step', 'parameters', 'position table', 'val loss', '± stderr', 'bits/byte', 'tokens/s')]
    for name, row in zip(plots.run_names([row['run'] for row in rows]), rows):
        columns = (('seed', 'd'), ('step', ',d'), ('params', ',d'), ('wpe_params', ',d'), ('val_loss', '.4f'), ('val_stderr', '.4f'),
                   ('bits_per_byte', '.4f'), ('tokens_per_s', ',.0f'))
        lines.append((name, row['wpe'], *('-' if row[key] is None else format(row[key], form) for key, form in columns)))
    widths = [max(map(len, column)) for column in zip(*lines)]
    left = 2  # the first columns are words
    return '\n'.join('  '.join(cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths)))
                     for line in lines)


def main(argv=None):
    config, paths = configure(CompareConfig, sys.argv[1:] if argv is None else argv)
    device_name, _ = device.resolve_device(config.device)
    runs = find_runs(paths, config)
    for name, values in differences(runs.values()).items():
        print(f'warning: the runs differ in {name} too, not in their scheme alone: {", ".join(map(str, values))}', file=sys.stderr)
    data = open_data(runs)
    rows = [evaluate_run(path, found.step, data, config, device_name) for path, found in tqdm(runs.items(), 'evaluating', disable=None)]
    print(table(rows))
    os.makedirs(config.to, exist_ok=True)
    write_json(os.path.join(config.to, 'report.json'), {'runs': rows})
    schemes = [row['wpe'] for row in rows]
    names = schemes if len(set(schemes)) == len(schemes) else plots.run_names(list(runs))
    curves = [[part['loss'] for part in row['position']] for row in rows]
    plots.comparison(list(runs), names, curves, os.path.join(config.to, 'compare.png'))
    print(f'wrote {config.to}/report.json and {config.to}/compare.png')


if __name__ == '__main__':
    run(main)
