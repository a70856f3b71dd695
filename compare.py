"""Compare runs on the same validation tokens: python compare.py out/shakespeare_learned out/shakespeare_rope

Prints a table and writes report.json and compare.png into --to. Every validation token but the first is scored once, in windows of the
trained length that stand end to end; the standard error is over windows.
"""
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


@dataclass
class CompareConfig:
    to: str = 'out/compare'             # folder for report.json and compare.png
    step: int | Literal['latest', 'best'] = 'latest'  # which checkpoint of each run
    eval_tokens: int | None = None      # validation tokens to score; none = all
    batch_size: int = 32                # rows; the result does not depend on it
    device: str = 'auto'                # auto, cpu, cuda, mps
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'  # auto: as each run was trained

    def problems(self):
        return [f'{name}={getattr(self, name)} must be at least 1' for name in ('eval_tokens', 'batch_size')
                if getattr(self, name) is not None and getattr(self, name) < 1]


def evaluate_run(path, config, device_name):
    """Score one run folder. Returns its row of report.json and the digest of its data."""
    model, tokenizer, found = checkpoint.load_model(path, config.step, device_name)
    settings = found.state['config']
    data = Data(os.path.join('data', settings['dataset']))
    if data.digest != found.state['data_digest']:
        raise ValueError(f'data/{settings["dataset"]} is not the data that {path} was trained on (its digest differs): prepare it again')
    dtype = found.environment['dtype'] if config.dtype == 'auto' else config.dtype
    dtype, _ = device.resolve_dtype(dtype, device_name, model.config.n_embd)
    result = evaluate(model, data.val, tokenizer.byte_lengths(), block_size=model.config.block_size, max_tokens=config.eval_tokens,
                      autocast=device.autocast(device_name, dtype), batch_size=config.batch_size)
    count = model.parameter_counts()
    speeds = [r['tokens_per_s'] for r in metrics.read(path) if r['event'] == 'train']
    row = {'run': path, 'wpe': model.config.wpe, 'seed': settings['seed'], 'block_size': model.config.block_size, 'step': found.step,
           'params': count['total'], 'wpe_params': count['wpe'], 'val_loss': result['loss'], 'val_stderr': result['stderr'],
           'val_tokens': result['tokens'], 'bits_per_byte': result['bits_per_byte'], 'dtype': dtype,
           'tokens_per_s': statistics.median(speeds) if speeds else None,
           'position': [{'from': p, 'to': p + 1, 'loss': loss} for p, loss in enumerate(result['position'])]}
    return row, data.digest


def table(rows):
    """The comparison as lines of text."""
    head = ('run', 'scheme', 'seed', 'step', 'parameters', 'of these wpe', 'val loss', '± stderr', 'bits/byte', 'tokens/s')
    lines = [head] + [(os.path.basename(os.path.normpath(r['run'])), r['wpe'], str(r['seed']), str(r['step']), f'{r["params"]:,}',
                       f'{r["wpe_params"]:,}', f'{r["val_loss"]:.4f}', f'{r["val_stderr"]:.4f}', f'{r["bits_per_byte"]:.4f}',
                       f'{r["tokens_per_s"]:,.0f}' if r['tokens_per_s'] else '-') for r in rows]
    widths = [max(map(len, column)) for column in zip(*lines)]
    left = 2  # the first columns are words
    return '\n'.join('  '.join(cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths)))
                     for line in lines)


def main(argv=None):
    config, runs = configure(CompareConfig, sys.argv[1:] if argv is None else argv)
    if not runs:
        raise ValueError('no run to compare: python compare.py out/a out/b ...')
    device_name, _ = device.resolve_device(config.device)
    rows, digests = [], {}
    for path in tqdm(runs, desc='evaluating', disable=None):
        row, digest = evaluate_run(path, config, device_name)
        rows.append(row)
        digests.setdefault(digest, path)
    if len(digests) > 1:
        raise ValueError(f'runs trained on different data cannot be compared: {" and ".join(digests.values())}')
    lengths = {row['block_size'] for row in rows}
    if len(lengths) > 1:
        print(f'warning: the runs were trained at different lengths ({sorted(lengths)}): a longer context alone lowers the loss',
              file=sys.stderr)
    print(table(rows))
    os.makedirs(config.to, exist_ok=True)
    write_json(os.path.join(config.to, 'report.json'), {'runs': rows})
    curves = {os.path.basename(os.path.normpath(row['run'])): [part['loss'] for part in row['position']] for row in rows}
    plots.comparison(runs, curves, os.path.join(config.to, 'compare.png'))
    print(f'wrote {config.to}/report.json and {config.to}/compare.png')


if __name__ == '__main__':
    run(main)
