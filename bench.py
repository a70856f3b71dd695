"""Measure speed and memory, against a nanoGPT checkout too: python bench.py --peer=../nanoGPT --shapes=tiny,baby,gpt2

The machine's own limits come first. What is compared runs in turn, in one process, so that a slow minute slows all alike: medians of the
rounds, and of the ratios round by round with their range. tiny and baby are the small and the large character model of nanoGPT's README
(4 layers, 128 wide, 64 tokens; 6 layers, 384 wide, 256 tokens), gpt2 is GPT-2 124M.
"""
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import nanope  # noqa: F401 (before torch)
import torch

from model import GPTConfig
from nanope import device, measure, workloads
from nanope.configurator import configure, run
from nanope.corpus import find_files, open_batches
from nanope.evaluate import token_losses
from nanope.files import brief, write_json
from nanope.report import text_table
from nanope.tokenizer import GPT2Tokenizer

ROOT = Path(__file__).resolve().parent
PARTS = 'machine', 'train', 'context', 'sample', 'evaluate', 'tokenise', 'memory', 'start'


@dataclass
class BenchConfig:
    parts: str = ','.join(PARTS)        # what to measure
    shapes: str = 'tiny'                # for train: tiny, baby, gpt2
    wpe: str = 'learned,sinusoidal,rope'  # schemes
    peer: str | None = None             # folder of a nanoGPT checkout to measure beside
    rows: int | None = None             # a micro-batch; none = 12 tiny, 16 baby, 1 gpt2; for gpt2 on CUDA as many as fit up to 64, then 12
    rounds: int = 6
    seconds: float = 1.0                # that each work takes a round
    new_tokens: int = 256               # for sample: after a prompt of 16, up to 1,008
    deadline: float | None = None       # seconds after which no new round or part begins
    json: str | None = None             # file to write the numbers to
    device: str = 'auto'
    dtype: Literal['auto', 'float32', 'bfloat16'] = 'auto'
    compile: bool | Literal['auto'] = 'auto'  # training and sampling steps; auto = yes on CUDA
    optimizer: Literal['adamw', 'muon'] = 'adamw'

    def problems(self):
        found = []
        for name, known in (('parts', PARTS), ('shapes', workloads.SHAPES), ('wpe', get_args(GPTConfig.__annotations__['wpe']))):
            words = Counter(getattr(self, name).split(','))
            found += [f'{name}={getattr(self, name)}: {word!r} is none of {", ".join(known)}' for word in words if word not in known]
            found += [f'{name}={getattr(self, name)} names {word} twice' for word, n in words.items() if n > 1]
        found += [f'{name}={getattr(self, name)} must be at least 1' for name in ('rounds', 'new_tokens', 'rows')
                  if getattr(self, name) is not None and getattr(self, name) < 1]
        found += [f'{name}={getattr(self, name)} must be above 0' for name in ('seconds', 'deadline')
                  if getattr(self, name) is not None and getattr(self, name) <= 0]
        found += [f'{name} is empty: name a {what}, or leave it out' for name, what in (('peer', 'folder'), ('json', 'file'))
                  if getattr(self, name) == '']
        if self.new_tokens > 1008:
            found.append(f'new_tokens={self.new_tokens} must be at most 1008: with the prompt of 16 they fill the context of GPT-2')
        return found


def show(heading, rows):
    """Print a table, its first row the head."""
    print(f'\n{heading}\n{text_table([[str(cell) for cell in row] for row in rows], (0,))}', flush=True)


def spread(ratio):
    return '-' if ratio is None else '{:.2f} [{:.2f} .. {:.2f}]'.format(*ratio)


class Bench:
    """What all parts need: config, device, the peer's module, what the machine can do, and the rows that were measured."""

    def __init__(self, config):
        self.config, self.rows, self.matmul_peak, self.bandwidth = config, [], None, None
        self.device, _ = device.resolve_device(config.device)
        self.cuda = torch.device(self.device).type == 'cuda'
        self.peer = workloads.load_peer(config.peer) if config.peer else None
        self.deadline = time.monotonic() + (config.deadline or float('inf'))
        self.compile = self.cuda if config.compile == 'auto' else config.compile
        self.how = 'compiled' if self.compile else 'eager'
        self.schemes = config.wpe.split(',')

    def dtype(self, shape):
        return device.resolve_dtype(self.config.dtype, self.device, workloads.SHAPES[shape][2])[0]

    def as_shipped(self, compiled):
        """What a heading says of the peer: its own train.py and sample.py decide how it runs."""
        return f'; nanoGPT as it ships: {workloads.peer_dtype(self.device)}, {"compiled" if compiled else "eager"}' if self.peer else ''

    def record(self, **values):
        """Add a row to what --json writes; what is not given is null there."""
        names = 'wpe', 'mode', 'shape', 'tokens_per_s', 'mfu', 'peak_mem_bytes', 'peer', 'peer_tokens_per_s', 'ratio', 'range'
        self.rows.append({**dict.fromkeys(names), **values})

    def add(self, mode, shape, works, tokens, flops=None, read={}):
        """Alternate works {name: function}, record and return a table of them, and seconds a token: {name: [float]}.

        tokens: of one call, for all works or {name: int}. flops: operations a token. read: {name: bytes a token}. All are compared with
        the peers and with the first work."""
        times = measure.alternate(works, self.config.rounds, self.config.seconds, self.device, self.deadline)
        times = {name: [t / (tokens[name] if isinstance(tokens, dict) else tokens) for t in each] for name, each in times.items()}
        took, card = {name: statistics.median(each) for name, each in times.items()}, device.peak_flops(self.device, self.dtype('gpt2'))
        alike = {name: t for name, t in took.items() if name != 'nanoGPT' or workloads.peer_dtype(self.device) == self.dtype('gpt2')}
        shares = {'of peak': {name: flops / t / self.matmul_peak for name, t in alike.items() if flops and self.matmul_peak},
                  'of the card': {name: flops / t / card for name, t in alike.items() if flops and card},
                  'of bandwidth': {name: amount / took[name] / self.bandwidth for name, amount in read.items() if self.bandwidth}}
        shown = [share for share in shares if shares[share]]
        bases = [*(name for name in ('nanoGPT', 'transformers') if name in times), next(iter(times))]
        table = [['', 'tokens/s', *shown, *(f'times {base}' for base in bases)]]
        for name, each in times.items():
            ratios = [None if base == name else measure.ratios(each, times[base]) for base in bases]
            against = {} if ratios[0] is None else dict(peer=bases[0], peer_tokens_per_s=1 / took[bases[0]], ratio=ratios[0][0],
                                                        range=ratios[0][1:])
            self.record(wpe=name, mode=mode, shape=shape, tokens_per_s=1 / took[name], mfu=shares['of peak'].get(name),
                        mfu_card=shares['of the card'].get(name), of_bandwidth=shares['of bandwidth'].get(name), **against)
            cells = (f'{shares[share][name]:.0%}' if name in shares[share] else '-' for share in shown)
            table.append([name, f'{1 / took[name]:,.0f}', *cells, *map(spread, ratios)])
        return table, times

    # ---- the parts ----------------------------------------------------------------------------------------------------------------------

    def machine(self):
        C = 768
        rows = 65536 if self.cuda else 4096                       # of a micro-batch
        own = [(rows, C, 3 * C), (rows, C, C), (rows, 4 * C, C), (1024, C, 50257), (768, 64, 384), (4096, 384, 1152)]
        square = [(8192, 8192, 8192)] if self.cuda else [(1024, 1024, 1024), (2048, 2048, 2048)]
        formats = [torch.float32] + ([torch.bfloat16] if self.cuda or device.cpu_has_bf16() else [])
        rates = {dtype: measure.matmul_rates(dtype, self.device, square + own) for dtype in formats}
        used = formats[-1] if self.dtype('gpt2') == 'bfloat16' else torch.float32
        self.matmul_peak = max(rates[used].values())
        self.bandwidth = measure.read_bandwidth(self.device, 2**32 if self.cuda else 2**30)
        rows = [['matrix product', *(str(dtype).removeprefix('torch.') for dtype in formats)]]
        rows += [[' x '.join(map(str, shape)), *(f'{found[shape] / 1e9:,.0f}' for found in rates.values())] for shape in square + own]
        show('MACHINE, GFLOP/s', rows)
        print(f'reads {self.bandwidth / 1e9:.1f} GB/s; "of peak" below is of the best product, {self.matmul_peak / 1e9:,.0f} GFLOP/s'
              + ('; this CPU has no bfloat16 products' if len(formats) == 1 else ''))

    def train(self):
        for shape in self.config.shapes.split(','):
            sizes = [self.config.rows or workloads.SHAPES[shape][5]]
            if self.cuda and shape == 'gpt2' and not self.config.rows:  # as many as fit; and nanoGPT's own number
                sizes = [device.micro_batch('auto', workloads.build(shape, 'none').to(self.device), 64, self.device,
                                            device.autocast(self.device, self.dtype(shape)))[0], 12]
            rates = [self.train_shape(shape, rows) for rows in sizes if time.monotonic() < self.deadline]
            if self.peer and len(rates) == 2:
                print('as shipped, each by its own number of rows: ' + ', '.join(
                    f'{wpe} {rates[0][wpe] / rates[1]["nanoGPT"]:.2f}' for wpe in self.schemes) + ' times nanoGPT')

    def train_shape(self, shape, rows):
        """Measure and show one size; tokens a second by name."""
        if self.compile:
            torch._dynamo.reset()  # what it learnt of other sizes would make the peer's next graph dynamic, and slower
        works = {wpe: workloads.our_step(shape, wpe, rows, self.device, self.dtype(shape), self.compile, optimizer=self.config.optimizer)
                 for wpe in self.schemes}
        if self.peer:
            works['nanoGPT'] = workloads.peer_step(self.peer, shape, rows, self.device)
        tokens, flops = rows * workloads.SHAPES[shape][3], workloads.build(shape, 'none').flops_per_token()
        size = f'{shape}, {rows} x {workloads.SHAPES[shape][3]}'
        table, times = self.add('train', size, works, tokens, flops=flops)
        show(f'TRAINING STEP, {size} tokens, {self.dtype(shape)}, {self.how}{self.as_shipped(self.cuda)}', table)
        return {name: 1 / statistics.median(each) for name, each in times.items()}

    def context(self):
        """The same tokens in ever longer rows: attention's share grows, all else stays."""
        lengths, tokens, dtype = (128, 256, 512, 1024, 2048, 4096), 4096, self.dtype('tiny')
        flops = {T: workloads.build('tiny', 'none', T).flops_per_token() for T in lengths}
        rows = [['tokens in a row', *self.schemes, *(['nanoGPT'] if self.peer else []), 'arithmetic says', 'GB at most']]
        first = {}
        for T in lengths:
            if first and time.monotonic() > self.deadline:
                break
            if self.compile:
                torch._dynamo.reset()
            works = {wpe: workloads.our_step('tiny', wpe, tokens // T, self.device, dtype, self.compile, T) for wpe in self.schemes}
            if self.peer:
                works['nanoGPT'] = workloads.peer_step(self.peer, 'tiny', tokens // T, self.device, T)
            _, times = self.add('context', f'tiny, {tokens // T} x {T}', works, tokens, flops=flops[T])
            first = first or {name: statistics.median(seconds) for name, seconds in times.items()}
            peak = measure.peak_memory(None, 'tiny', self.schemes[0], tokens // T, T, dtype, self.compile, self.device)
            self.record(wpe=self.schemes[0], mode='memory', shape=f'tiny, {tokens // T} x {T}', peak_mem_bytes=peak)
            rows.append([T, *(f'{statistics.median(times[name]) / first[name]:.2f}' for name in works),
                         f'{flops[T] / flops[lengths[0]]:.2f}', f'{peak / 1e9:.2f}' if peak else 'failed'])
        show(f'LONGER ROWS, {tokens} tokens a step, {self.how}, seconds relative to {lengths[0]}; '
             f'memory of {self.schemes[0]}{self.as_shipped(self.cuda)}', rows)

    def sample(self):
        n, prompt, dtype = self.config.new_tokens, torch.randint(50257, (1, 16), device=self.device), self.dtype('gpt2')
        how = f'{n} new tokens, {dtype}, {self.how}'
        ours = {wpe: workloads.our_sampling('gpt2', wpe, prompt, n, dtype, self.compile) for wpe in self.schemes}
        works, read = ({name: part[i] for name, part in ours.items()} for i in (0, 1))
        tokens = dict.fromkeys(works, n)
        if self.peer:
            tokens['nanoGPT'] = min(n, 32) if self.cuda else n    # it encodes each length anew, for which cuDNN may plan anew
            works['nanoGPT'] = workloads.peer_sampling(self.peer, 'gpt2', prompt, tokens['nanoGPT'])
        try:
            works['transformers'], tokens['transformers'] = workloads.transformers_sampling(prompt, n, dtype), n
        except ImportError:
            print('transformers is not installed: no second peer')
        table, _ = self.add('sample', 'gpt2, batch 1', works, tokens, read=read)
        show(f'SAMPLING, gpt2, prompt of 16, {how}{self.as_shipped(False)}', table)
        first = self.schemes[0]
        works, tokens, read = {'batch 1': works[first]}, {'batch 1': n}, {'batch 1': read[first]}
        for size in (8, 128) if self.cuda else (8,):
            name = f'batch {size}'
            works[name], moved = workloads.our_sampling('gpt2', first, prompt.repeat(size, 1), n, dtype, self.compile)
            tokens[name], read[name] = n * size, moved / size
        table, _ = self.add('sample', f'gpt2, {first}', works, tokens, read=read)
        show(f'SAMPLING, gpt2, {first}, several prompts at once, {how}', table)

    def evaluate(self):
        shape = self.config.shapes.split(',')[0]
        T, vocab_size = workloads.SHAPES[shape][3:5]
        rows, autocast = workloads.text_like(vocab_size, (32, T + 1)), device.autocast(self.device, self.dtype(shape))
        models = {wpe: workloads.build(shape, wpe).to(self.device) for wpe in self.schemes}
        works = {wpe: lambda model=model: token_losses(model, rows, autocast=autocast) for wpe, model in models.items()}
        table, _ = self.add('evaluate', f'{shape}, 32 x {T}', works, 32 * T)
        show(f'EVALUATION, {shape}, {T} tokens a row', table)

    def tokenise(self):
        """prepare.py's own encoding against bare tiktoken on the same texts and as many processes; starting these is left out."""
        texts = [text for batch in open_batches(find_files(ROOT / 'data/shakespeare/plays')) for text in batch.texts] * 4
        megabytes, workers = sum(len(text.encode()) for text in texts) / 1e6, os.cpu_count()
        times, tokens = measure.encoding_times(texts, GPT2Tokenizer(), workers, self.config.rounds, self.deadline)
        ratio, ours, theirs = measure.ratios(*times.values()), *map(statistics.median, times.values())
        self.record(mode='tokenise', shape=f'{workers} processes', ratio=ratio[0], range=ratio[1:], tokens_per_s=tokens / ours,
                    peer='tiktoken', peer_tokens_per_s=tokens / theirs)
        show(f'TOKENISATION, {megabytes:.0f} MB, {workers} processes', [['', 'MB/s', 'times tiktoken'], [
            'prepare.py', f'{megabytes / ours:.1f}', spread(ratio)], ['tiktoken alone', f'{megabytes / theirs:.1f}', '-']])

    def memory(self):
        """The most that two updates of GPT-2 124M take, 4 rows of 1,024 tokens, each in a process of its own. nanoGPT is as it ships."""
        dtype, table, peaks = self.dtype('gpt2'), [['', 'GB', 'of nanoGPT']], {}
        for name in [*(['nanoGPT'] if self.peer else []), *self.schemes]:
            if time.monotonic() > self.deadline and peaks:
                break
            folder, wpe = (self.config.peer, None) if name == 'nanoGPT' else (None, name)
            peak = peaks[name] = measure.peak_memory(folder, 'gpt2', wpe, 4, 1024, dtype, self.compile, self.device)
            against = peak / peaks['nanoGPT'] if wpe and peak and peaks.get('nanoGPT') else None
            self.record(wpe=name, mode='memory', shape='gpt2, 4 x 1024', peak_mem_bytes=peak, share_of_peer=against,
                        peer='nanoGPT' if against else None)
            table.append([name, f'{peak / 1e9:.2f}' if peak else 'failed', f'{against:.2f}' if against else '-'])
        show(f'PEAK MEMORY, gpt2, 4 x 1024 tokens, {dtype}, {self.how}', table)

    def start(self):
        """Seconds from starting a process to the end of its first update, and to its first sampled character."""
        times, peer = {'train.py': [], 'sample.py': []}, self.peer and Path(self.config.peer)
        if peer and (peer / 'out-shakespeare-char/ckpt.pt').exists():
            times["nanoGPT's sample.py"] = []
        elif peer:
            print(f"\nnanoGPT's sample.py is not measured: there is no {peer / 'out-shakespeare-char/ckpt.pt'}")
        small = '--n_layer=4 --n_head=4 --n_embd=128 --block_size=64 --batch_size=12 --max_iters=1 --eval_tokens=64'.split()
        ours, theirs = [f'--device={self.device}', '--start=O', '--max_new_tokens=1'], ['--out_dir=out-shakespeare-char', '--num_samples=1']
        with tempfile.TemporaryDirectory() as folder:
            measure.seconds_to_line([ROOT / 'prepare.py', 'shakespeare'], '', folder)
            for n in range(self.config.rounds + 1):               # the first one fills the disk cache, and leaves a run to sample from
                if n > 1 and time.monotonic() > self.deadline:
                    break
                train = [ROOT / 'train.py', '--dataset=shakespeare', f'--out_dir=out/{n}', ours[0], *small]
                took = {'train.py': measure.seconds_to_line(train, 'step 1:', folder, stop=n > 0),
                        'sample.py': measure.seconds_to_line([ROOT / 'sample.py', '--out_dir=out/0', *ours], 'O', folder)}
                if len(times) > 2:
                    took["nanoGPT's sample.py"] = measure.seconds_to_line(['sample.py', *theirs, *ours], '---', peer)
                for name, seconds in took.items():
                    if seconds is None:
                        return print(f'\nSTART-UP: not measured, {name} failed')
                    times[name] += [seconds] if n else []
        table = [['', 'seconds', 'times nanoGPT']]
        for name, each in times.items():
            against = measure.ratios(each, times["nanoGPT's sample.py"]) if name == 'sample.py' and len(times) > 2 else None
            self.record(mode='start', shape=name, seconds=statistics.median(each), **({} if against is None else dict(
                peer='nanoGPT', ratio=against[0], range=against[1:])))
            table.append([name, f'{statistics.median(each):.2f}', spread(against)])
        show('START-UP, from the start of a process to the end of its first update with an evaluation, and to the first text', table)


def check_writable(path):
    """Raises ValueError where no file can be written at path; leaves none there."""
    try:
        if os.path.isdir(path):
            raise IsADirectoryError(None, 'it is a folder')
        tempfile.TemporaryFile(dir=os.path.dirname(path) or '.').close()
    except OSError as error:
        raise ValueError(f'--json={path} cannot be written: {error.strerror}') from None


def main(argv=None):
    config, rest = configure(BenchConfig, sys.argv[1:] if argv is None else argv)
    if rest:
        raise ValueError(f'{rest[0]} is no --key=value')
    torch.set_float32_matmul_precision('high')
    if config.json:
        check_writable(config.json)                               # before anything is measured
    bench = Bench(config)
    name = torch.cuda.get_device_name(bench.device) if bench.cuda else f'{device.cpu_name()}, {torch.get_num_threads()} threads'
    print(f'{name}; torch {torch.__version__}, Python {platform.python_version()}')
    try:
        for part in sorted(config.parts.split(','), key=PARTS.index):  # the machine first: what others take is a share of its best
            if time.monotonic() > bench.deadline:
                print(f'\n{part}: not measured, {config.deadline:.0f} s are over')
                continue
            try:
                getattr(bench, part)()
            except torch.OutOfMemoryError as error:
                print(f'\n{part}: not measured to its end, {brief(error)}')
    finally:  # Ctrl-C or a fault in a later part loses no number
        if config.json and (bench.rows or bench.matmul_peak):     # else what an earlier run wrote there stays
            write_json(config.json, {'device': name, 'dtype': bench.dtype('gpt2'), 'compile': bench.compile, 'rows': bench.rows,
                                     'matmul_peak_flops': bench.matmul_peak, 'read_bandwidth': bench.bandwidth})
            print(f'\nwrote {config.json}')


if __name__ == '__main__':
    run(main)
