"""Measure speed and memory, against a nanoGPT checkout too: python bench.py --peer=../nanoGPT --shapes=tiny,baby,gpt2

The machine's own limits come first. What is compared runs in turn, in one process, so that a slow minute slows all alike: medians of the
rounds, and of the ratios round by round with their range. tiny and baby are the small and the large character model of nanoGPT's README
(4 layers, 128 wide, 64 tokens; 6 layers, 384 wide, 256 tokens), gpt2 is GPT-2 124M.
"""
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Literal

import nanope  # noqa: F401 (before torch)
import numpy as np
import torch

from nanope import device, measure
from nanope.configurator import configure, run
from nanope.corpus import find_files, open_batches
from nanope.evaluate import token_losses
from nanope.report import text_table
from nanope.tokenizer import GPT2Tokenizer

PARTS = 'machine', 'train', 'context', 'sample', 'evaluate', 'tokenise', 'memory', 'start'


@dataclass
class BenchConfig:
    parts: str = ','.join(PARTS)        # what to measure
    shapes: str = 'tiny'                # for train: tiny, baby, gpt2
    wpe: str = 'learned,sinusoidal,rope'  # schemes
    peer: str | None = None             # folder of a nanoGPT checkout to measure beside
    rows: int | None = None             # a micro-batch; none = 12 tiny, 16 baby, 1 gpt2, and for gpt2 on CUDA 16
    rounds: int = 6
    seconds: float = 1.0                # that each work takes a round
    new_tokens: int = 256               # for sample: after a prompt of 16
    deadline: float | None = None       # seconds after which no new round or part begins
    json: str | None = None             # file to write the numbers to
    device: str = 'auto'
    dtype: Literal['auto', 'float32', 'bfloat16'] = 'auto'
    compile: bool | Literal['auto'] = 'auto'  # training steps; auto = yes on CUDA
    optimizer: Literal['adamw', 'muon'] = 'adamw'

    def problems(self):
        found = []
        for name, known in (('parts', PARTS), ('shapes', measure.SHAPES), ('wpe', ('learned', 'sinusoidal', 'rope', 'none', 'alibi'))):
            odd = [word for word in getattr(self, name).split(',') if word not in known]
            found += [f'{name}={getattr(self, name)}: {word!r} is none of {", ".join(known)}' for word in odd]
        found += [f'{name}={getattr(self, name)} must be at least 1' for name in ('rounds', 'new_tokens', 'rows')
                  if getattr(self, name) is not None and getattr(self, name) < 1]
        return found


def show(heading, rows, words=(0,)):
    """Print a table, its first row the head."""
    print(f'\n{heading}\n{text_table([[str(cell) for cell in row] for row in rows], words)}', flush=True)


def spread(ratio):
    return '-' if ratio is None else '{:.2f} [{:.2f} .. {:.2f}]'.format(*ratio)


class Bench:
    """What all parts need: config, device, dtype, the peer's module, and the rows that were measured."""

    def __init__(self, config):
        self.config, self.rows, self.facts = config, [], {}
        self.device, _ = device.resolve_device(config.device)
        self.cuda = torch.device(self.device).type == 'cuda'
        self.peer = measure.load_peer(config.peer) if config.peer else None
        self.deadline = time.monotonic() + (config.deadline or float('inf'))
        self.compile = self.cuda if config.compile == 'auto' else config.compile
        self.schemes = config.wpe.split(',')

    def dtype(self, shape):
        return device.resolve_dtype(self.config.dtype, self.device, measure.SHAPES[shape][2])[0]

    def record(self, **values):
        """Add a row to what --json writes; what is not given is null there."""
        names = 'wpe', 'mode', 'shape', 'tokens_per_s', 'mfu', 'peak_mem_bytes', 'peer', 'peer_tokens_per_s', 'ratio', 'range'
        self.rows.append({**dict.fromkeys(names), **values})

    def alternate(self, works, rounds=None):
        return measure.alternate(works, rounds or self.config.rounds, self.config.seconds, self.device, self.deadline)

    def add(self, mode, shape, times, tokens, peer=None, flops=None):
        """Record and return table rows of works that were alternated; those named after a scheme are ours. tokens: of one call."""
        table, first = [], next(name for name in times if name in self.schemes or name not in ('nanoGPT', 'transformers'))
        for name, seconds in times.items():
            rate = tokens / statistics.median(seconds)
            against = measure.ratios(seconds, times[peer]) if peer in times and name != peer else None
            mfu = rate * flops / self.facts['matmul_peak_flops'] if flops and 'matmul_peak_flops' in self.facts else None
            self.record(wpe=name, mode=mode, shape=shape, tokens_per_s=rate, mfu=mfu, **({} if against is None else {
                'peer': peer, 'peer_tokens_per_s': tokens / statistics.median(times[peer]), 'ratio': against[0], 'range': against[1:]}))
            beside = measure.ratios(seconds, times[first])
            table.append([name, f'{rate:,.0f}', '-' if mfu is None else f'{mfu:.0%}', spread(against), spread(beside)])
        return [['', 'tokens/s', 'of peak', f'times {peer or "a peer"}', f'times {first}'], *table]

    # ---- the parts ---------------------------------------------------------------------------------------------------

    def machine(self):
        C = 768
        own = [(4096, C, 3 * C), (4096, C, C), (4096, 4 * C, C), (1024, C, 50257), (768, 64, 384), (4096, 384, 1152)]
        square = [(8192, 8192, 8192)] if self.cuda else [(1024, 1024, 1024), (2048, 2048, 2048)]
        formats = [torch.float32] + ([torch.bfloat16] if self.cuda or device.cpu_has_bf16() else [])
        rates = {dtype: measure.matmul_rates(dtype, self.device, square + own) for dtype in formats}
        best = {dtype: max(found.values()) for dtype, found in rates.items()}
        bandwidth = measure.read_bandwidth(self.device, 2**32 if self.cuda else 2**30)
        used = formats[-1] if self.dtype('gpt2') == 'bfloat16' else torch.float32
        self.facts.update(matmul_peak_flops=best[used], read_bandwidth=bandwidth)
        rows = [['matrix product', *(str(dtype).removeprefix('torch.') for dtype in formats)]]
        rows += [[' x '.join(map(str, shape)), *(f'{found[shape] / 1e9:,.0f}' for found in rates.values())] for shape in square + own]
        show('MACHINE, GFLOP/s', rows)
        print(f'reads {bandwidth / 1e9:.1f} GB/s; "of peak" below is of the best product, {best[used] / 1e9:,.0f} GFLOP/s; '
              + ('this CPU has no bfloat16 products' if len(formats) == 1 else ''))

    def train(self):
        for shape in self.config.shapes.split(','):
            T, sizes = measure.SHAPES[shape][3], [self.config.rows or measure.SHAPES[shape][5]]
            if self.cuda and shape == 'gpt2' and not self.config.rows:  # as many as fit; and nanoGPT's own number
                model = measure.build(shape, 'none').to(self.device)
                sizes = [device.micro_batch('auto', model, 64, self.device, device.autocast(self.device, 'bfloat16'))[0], 12]
            for rows in sizes:
                self.train_shape(shape, rows, T)

    def train_shape(self, shape, rows, T):
        if self.compile:
            torch._dynamo.reset()  # what it learnt of other sizes would make the peer's next graph dynamic, and slower
        how = dict(optimizer=self.config.optimizer)
        works = {wpe: measure.our_step(shape, wpe, rows, self.device, self.dtype(shape), self.compile, **how) for wpe in self.schemes}
        if self.peer:
            works['nanoGPT'] = measure.peer_step(self.peer, shape, rows, self.device)
        flops = measure.build(shape, 'none').flops_per_token()
        table = self.add('train', f'{shape}, {rows} x {T}', self.alternate(works), rows * T, 'nanoGPT' if self.peer else None, flops)
        show(f'TRAINING STEP, {shape}, {rows} x {T} tokens, {self.dtype(shape)}, {"compiled" if self.compile else "eager"}', table)

    def context(self):
        """The same tokens in ever longer rows: attention's share grows, all else stays."""
        lengths, tokens = (128, 256, 512, 1024, 2048, 4096), 4096
        flops = {T: measure.build('tiny', 'none', T).flops_per_token() for T in lengths}
        rows = [['tokens in a row', *self.schemes, 'nanoGPT' if self.peer else '', 'arithmetic says']]
        first = {}
        for T in lengths:
            works = {wpe: measure.our_step('tiny', wpe, tokens // T, self.device, self.dtype('tiny'), False, T) for wpe in self.schemes}
            if self.peer:
                works['nanoGPT'] = measure.peer_step(self.peer, 'tiny', tokens // T, self.device, T)
            times = self.alternate(works, 3)
            self.add('context', f'tiny, {tokens // T} x {T}', times, tokens, 'nanoGPT' if self.peer else None)
            for name, seconds in times.items():
                first.setdefault(name, statistics.median(seconds))
            rows.append([T, *(f'{statistics.median(times[name]) / first[name]:.2f}' for name in works),
                         *([] if self.peer else ['']), f'{flops[T] / flops[lengths[0]]:.2f}'])
        show(f'LONGER ROWS, {tokens} tokens a step, seconds relative to {lengths[0]}', rows)

    def sample(self):
        n, prompt = self.config.new_tokens, torch.randint(50257, (1, 16), device=self.device)
        compiled = self.cuda if self.config.compile == 'auto' else self.config.compile
        dtype = self.dtype('gpt2')

        def ours(wpe, batch):
            model = measure.build('gpt2', wpe).to(self.device).eval()
            model = model.bfloat16() if dtype == 'bfloat16' else model
            step = device.compile_step(model, self.device) if compiled else None

            def work():
                with device.for_sampling():
                    return torch.cat(list(model.generate(prompt.repeat(batch, 1), n, 0.8, 200, step=step)), dim=1).cpu()
            return work
        works = {self.schemes[0]: ours(self.schemes[0], 1)}
        if 'rope' in self.schemes[1:]:
            works['rope'] = ours('rope', 1)
        if self.peer:
            model = measure.peer_model(self.peer, 'gpt2').to(self.device).eval()
            autocast = device.autocast(self.device, dtype if self.cuda else 'float32')  # as its sample.py does

            def peer():
                with autocast():
                    return model.generate(prompt, n, 0.8, 200).cpu()
            works['nanoGPT'] = peer
        try:
            from transformers import GPT2Config, GPT2LMHeadModel
            hf = GPT2LMHeadModel(GPT2Config()).to(self.device).eval()
            hf = hf.bfloat16() if self.cuda and dtype == 'bfloat16' else hf
            works['transformers'] = lambda: hf.generate(prompt, max_new_tokens=n, min_new_tokens=n, do_sample=True, top_k=200,
                                                        temperature=0.8, pad_token_id=50256, attention_mask=torch.ones_like(prompt)).cpu()
        except ImportError:
            print('transformers is not installed: no second peer')
        title = f'SAMPLING, gpt2, prompt of 16, {n} new tokens, {dtype}, {"compiled" if compiled else "eager"}'
        times = self.alternate(works)
        table = self.add('sample', 'gpt2, batch 1', times, n, 'nanoGPT' if self.peer else None)
        if 'transformers' in times:
            table[0].append('times transformers')
            table[1:] = [[*row, spread(measure.ratios(times[row[0]], times['transformers']))] for row in table[1:]]
        show(title, table)
        first, sizes = self.schemes[0], (8, 128) if self.cuda else (8,)
        works = {'batch 1': works[first]} | {f'batch {size}': ours(first, size) for size in sizes}
        times = self.alternate(works, 3)
        for size in sizes:
            gain = measure.ratios([t / size for t in times[f'batch {size}']], times['batch 1'])
            self.record(wpe=first, mode='sample', shape=f'gpt2, batch {size}', ratio=gain[0], range=gain[1:], peer='batch 1',
                        tokens_per_s=size * n / statistics.median(times[f'batch {size}']),
                        peer_tokens_per_s=n / statistics.median(times['batch 1']))
            print(f'batch {size}: {self.rows[-1]["tokens_per_s"]:,.0f} tokens/s, {spread(gain)} times batch 1')

    def evaluate(self):
        shape = self.config.shapes.split(',')[0]
        T = measure.SHAPES[shape][3]
        rows = torch.from_numpy(np.resize(measure.text_like(measure.SHAPES[shape][4], 4096).numpy(), (32, T + 1)))
        models = {wpe: measure.build(shape, wpe).to(self.device) for wpe in self.schemes}
        autocast = device.autocast(self.device, self.dtype(shape))
        works = {wpe: lambda model=model: token_losses(model, rows, autocast=autocast) for wpe, model in models.items()}
        table = self.add('evaluate', f'{shape}, 32 x {T}', self.alternate(works), rows[:, 1:].numel())
        show(f'EVALUATION, {shape}, {T} tokens a row', table)

    def tokenise(self):
        """prepare.py's own encoding against bare tiktoken on the same texts and as many processes; starting these is left out."""
        texts = [text for batch in open_batches(find_files('data/shakespeare/plays')) for text in batch.texts] * 4
        size, workers = sum(len(text.encode()) for text in texts), os.cpu_count()
        pieces = [([('train', text, True)], 1, 0, None) for text in texts]
        tokenizer = GPT2Tokenizer()
        rate = measure.encoding_rates(pieces, texts, tokenizer, workers, self.config.rounds)
        ratio = measure.ratios(rate['prepare.py'], rate['tiktoken'])
        ours, theirs = (statistics.median(rate[name]) for name in ('prepare.py', 'tiktoken'))
        self.record(mode='tokenise', shape=f'{workers} processes', ratio=ratio[0], range=ratio[1:], tokens_per_s=rate['tokens'] / ours,
                    peer='tiktoken', peer_tokens_per_s=rate['tokens'] / theirs)
        print(f'\nTOKENISATION, {size / 1e6:.0f} MB, {workers} processes\nprepare.py {size / 1e6 / ours:.1f} MB/s, tiktoken alone '
              f'{size / 1e6 / theirs:.1f}; {spread(ratio)} times tiktoken', flush=True)

    def memory(self):
        """The most that two updates of GPT-2 124M take, 4 rows of 1,024 tokens, each in a process of its own."""
        table = [['', 'GB', 'of nanoGPT']]
        works = ([('nanoGPT', self.config.peer, None)] if self.peer else []) + [(wpe, None, wpe) for wpe in self.schemes]
        peaks = {}
        for name, folder, wpe in works:
            if time.monotonic() > self.deadline and peaks:
                break
            context = multiprocessing.get_context('spawn')
            results = context.SimpleQueue()
            child = context.Process(target=measure.peak_memory, args=(folder, 'gpt2', 4, wpe, self.dtype('gpt2'), self.device, results))
            child.start()
            child.join()
            peaks[name] = results.get() if child.exitcode == 0 else None
            against = peaks[name] / peaks['nanoGPT'] if peaks.get('nanoGPT') and peaks[name] and name != 'nanoGPT' else None
            self.record(wpe=name, mode='memory', shape='gpt2, 4 x 1024', peak_mem_bytes=peaks[name], ratio=against,
                        peer='nanoGPT' if against else None)
            took = f'{peaks[name] / 1e9:.2f}' if peaks[name] else f'failed, exit code {child.exitcode}'
            table.append([name, took, '-' if against is None else f'{against:.2f}'])
        show(f'PEAK MEMORY, gpt2, 4 x 1024 tokens, {self.dtype("gpt2")}', table)

    def start(self):
        """Seconds from starting a process to its first update, and to its first sampled character."""
        root, times = os.path.dirname(os.path.abspath(__file__)), {'train.py': [], 'sample.py': []}
        if not os.path.exists(os.path.join('data', 'shakespeare', 'meta.json')):
            return print('\nSTART-UP: not measured, there is no data/shakespeare: python prepare.py shakespeare')
        peer = self.peer and os.path.join(self.config.peer, 'out-shakespeare-char', 'ckpt.pt')
        if peer and os.path.exists(peer):
            times["nanoGPT's sample.py"] = []
        awaited = {'train.py': 'step 1:', 'sample.py': '', "nanoGPT's sample.py": '---'}  # how the line begins that ends the wait
        with tempfile.TemporaryDirectory() as folder:
            out = os.path.join(folder, 'run')
            small = ['--n_layer=4', '--n_head=4', '--n_embd=128', '--block_size=64', '--batch_size=12', '--max_iters=1', '--eval_tokens=64']
            train = ['--dataset=shakespeare', f'--out_dir={out}', '--overwrite=true', *small]
            commands = {'train.py': [os.path.join(root, 'train.py'), *train],
                        'sample.py': [os.path.join(root, 'sample.py'), f'--out_dir={out}', '--max_new_tokens=1'],
                        "nanoGPT's sample.py": ['sample.py', '--out_dir=out-shakespeare-char', f'--device={self.device}', '--num_samples=1',
                                                '--max_new_tokens=1']}
            for n in range(self.config.rounds + 1):
                for name in times:
                    started = time.perf_counter()
                    command = [arg.replace(out, f'{out}_{n}') if n and name == 'train.py' else arg for arg in commands[name]]
                    with subprocess.Popen([sys.executable, '-u', *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                                          cwd=self.config.peer if name.startswith('nanoGPT') else None) as process:
                        line = next((line for line in process.stdout if line.startswith(awaited[name])), None)
                        took = time.perf_counter() - started
                        process.kill() if name == 'train.py' and n else process.stdout.read()  # the first one leaves a run to sample from
                    if line is None:
                        return print(f'\nSTART-UP: not measured, {name} failed')
                    if n:                                         # the first one fills the disk cache
                        times[name].append(took)
        table = [['', 'seconds']] + [[name, f'{statistics.median(each):.2f}'] for name, each in times.items()]
        show('START-UP, from the start of a process to the end of its first update with an evaluation, and to the first text', table)
        for name, each in times.items():
            self.record(mode='start', shape=name, seconds=statistics.median(each))
        if len(times) > 2:
            print(f"sample.py: {spread(measure.ratios(times['sample.py'], times[name]))} times as fast as nanoGPT's")


def main(argv=None):
    config, rest = configure(BenchConfig, sys.argv[1:] if argv is None else argv)
    if rest:
        raise ValueError(f'{rest[0]} is no --key=value')
    torch.set_float32_matmul_precision('high')
    if config.json:
        open(config.json, 'a', encoding='utf-8').close()          # if that fails, before anything is measured
    bench = Bench(config)
    name = torch.cuda.get_device_name(bench.device) if bench.cuda else f'{device.cpu_name()}, {torch.get_num_threads()} threads'
    print(f'{name}; torch {torch.__version__}, Python {platform.python_version()}')
    try:
        for part in config.parts.split(','):
            if time.monotonic() > bench.deadline:
                print(f'\n{part}: not measured, {config.deadline:.0f} s are over')
                continue
            getattr(bench, part)()
    finally:  # Ctrl-C or a fault in a later part loses no number
        if config.json:
            with open(config.json, 'w', encoding='utf-8') as file:
                json.dump({'device': name, 'dtype': bench.dtype('gpt2'), 'compile': bench.compile, 'rows': bench.rows,
                           'matmul_peak_flops': bench.facts.get('matmul_peak_flops'),
                           'read_bandwidth': bench.facts.get('read_bandwidth')}, file, indent=1)
            print(f'\nwrote {config.json}')


if __name__ == '__main__':
    run(main)
