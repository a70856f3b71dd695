"""What bench.py measures with: alternating rounds, the machine's own limits, and the same work for nanoPE and its peers."""
import importlib.util
import math
import multiprocessing
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace

import numpy as np
import torch

from model import GPT, GPTConfig
from nanope import device, optim, writer
from nanope.tokenizer import from_json

# name: (n_layer, n_head, n_embd, block_size, vocab_size, rows)
SHAPES = {'tiny': (4, 4, 128, 64, 65, 12), 'baby': (6, 6, 384, 256, 65, 16), 'gpt2': (12, 12, 768, 1024, 50257, 1)}


def wait(device_name):
    if torch.device(device_name).type == 'cuda':
        torch.cuda.synchronize(device_name)


def alternate(works, rounds, seconds, device_name, deadline=math.inf):
    """Seconds a call of each function, by round: {name: [float]}. works: {name: function}.

    In each round every function runs for about `seconds`, in an order that rotates, so that what slows the machine for a while slows all
    alike. A first round is not counted, and says how often to call each. Past `deadline` (time.monotonic()) no round begins."""
    def timed(work, calls):
        started = time.perf_counter()
        for _ in range(calls):
            work()
        wait(device_name)
        return (time.perf_counter() - started) / calls
    calls = {}
    for name, work in works.items():
        work()                                                    # whatever is built or allocated the first time
        calls[name] = max(round(seconds / timed(work, 1)), 1)
    times, names = {name: [] for name in works}, list(works)
    for n in range(rounds):
        if time.monotonic() > deadline and times[names[0]]:
            break
        for name in names[n % len(names):] + names[:n % len(names)]:
            times[name].append(timed(works[name], calls[name]))
    return times


def ratios(ours, theirs):
    """(median, least, most) of how many times faster ours is, round by round."""
    each = [b / a for a, b in zip(ours, theirs)]
    return statistics.median(each), min(each), max(each)


# ---- the machine -----------------------------------------------------------------------------------------------------

def matmul_rates(dtype, device_name, shapes, seconds=0.3):
    """{(m, k, n): FLOP/s} of products of float32 or bfloat16 matrices, the best of what fits into `seconds`; None where hopeless."""
    rates = {}
    for m, k, n in shapes:
        a, b = (torch.randn(shape, device=device_name).to(dtype) for shape in ((m, k), (k, n)))
        best, end = math.inf, time.perf_counter() + seconds
        while best == math.inf or time.perf_counter() < end:
            started = time.perf_counter()
            a @ b
            wait(device_name)
            best = min(best, time.perf_counter() - started)
        rates[m, k, n] = 2 * m * k * n / best
    return rates


def read_bandwidth(device_name, size=2**30):
    """Bytes a second of reading a buffer of `size` bytes, larger than any cache, front to back: the best of five."""
    buffer, times = torch.ones(size // 4, device=device_name), []
    for _ in range(5):
        started = time.perf_counter()
        buffer.sum()
        wait(device_name)
        times.append(time.perf_counter() - started)
    return size / min(times)


# ---- the work --------------------------------------------------------------------------------------------------------

def text_like(vocab_size, shape, seed=0):
    """Random ids as frequent as words are: the k-th has probability proportional to 1/k. int64 tensor."""
    p = 1 / np.arange(1, vocab_size + 1)
    return torch.from_numpy(np.random.default_rng(seed).choice(vocab_size, shape, p=p / p.sum()))


def build(shape, wpe, block_size=None):
    n_layer, n_head, n_embd, T, vocab_size, _ = SHAPES[shape]
    T = block_size or T
    return GPT(GPTConfig(block_size=T, vocab_size=vocab_size, n_layer=n_layer, n_head=n_head, n_embd=n_embd, bias=False, wpe=wpe,
                         vocab_multiple=128 if torch.cuda.is_available() else 1))


def batches(vocab_size, rows, block_size, device_name, n=8):
    ids = text_like(vocab_size, (n, rows, block_size + 1)).to(device_name)
    return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in ids]


def our_step(shape, wpe, rows, device_name, dtype, compile, block_size=None, optimizer='adamw'):
    """A function that does one update as train.py does it, but for reading the batch."""
    model = build(shape, wpe, block_size).to(device_name).train()
    autocast, config = device.autocast(device_name, dtype), model.config
    loss_of, *_ = device.compile_model(model, compile, rows, device_name, autocast, 0)
    optimizers = optim.build(SimpleNamespace(optimizer=optimizer, weight_decay=0.1, beta1=0.9, beta2=0.95, learning_rate=1e-4, muon_lr=1e-3,
                                             muon_momentum=0.95, muon_weight_decay=0.01), model, device_name)
    return cycle(batches(config.vocab_size, rows, config.block_size, device_name),
                 lambda x, y: run_step(lambda: loss_of(x, y), model, optimizers, autocast))


def cycle(items, work):
    """work(*item), with the next item at each call."""
    at = [0]

    def call():
        at[0] += 1
        return work(*items[at[0] % len(items)])
    return call


def run_step(loss_of, model, optimizers, autocast):
    with autocast():
        loss = loss_of()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optim.set_learning_rate(optimizers, 1e-4)
    optim.step(optimizers, (loss.detach() + norm).isfinite())
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    return loss


def load_peer(folder):
    """A nanoGPT checkout's model.py as a module. Raises ValueError where it is none."""
    path = os.path.join(folder, 'model.py')
    if not os.path.exists(path):
        raise ValueError(f'--peer={folder}: there is no model.py; give a checkout of nanoGPT')
    spec = importlib.util.spec_from_file_location('peer_model', path)
    module = importlib.util.module_from_spec(spec)
    sys.modules['peer_model'] = module                            # its dataclass looks itself up there
    spec.loader.exec_module(module)
    if not hasattr(module, 'GPT') or not hasattr(module.GPT, 'configure_optimizers'):
        raise ValueError(f'{path} is not the model.py of nanoGPT')
    return module


def peer_model(peer, shape, block_size=None):
    n_layer, n_head, n_embd, T, vocab_size, _ = SHAPES[shape]
    vocab_size = 50304 if vocab_size == 50257 and torch.cuda.is_available() else vocab_size
    return peer.GPT(peer.GPTConfig(block_size=block_size or T, vocab_size=vocab_size, n_layer=n_layer, n_head=n_head, n_embd=n_embd,
                                   dropout=0.0, bias=False))


def peer_step(peer, shape, rows, device_name, block_size=None):
    """One update as nanoGPT's train.py does it: on a CPU in float32 without compiling, on CUDA in bfloat16, compiled."""
    cuda = torch.device(device_name).type == 'cuda'
    model = peer_model(peer, shape, block_size).to(device_name).train()
    config, autocast = model.config, device.autocast(device_name, 'bfloat16' if cuda else 'float32')
    optimizer = model.configure_optimizers(0.1, 1e-4, (0.9, 0.95), torch.device(device_name).type)
    loss_of = torch.compile(model) if cuda else model

    def step(x, y):
        with autocast():
            _, loss = loss_of(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return cycle(batches(SHAPES[shape][4], rows, config.block_size, device_name), step)


def peak_memory(folder, shape, rows, wpe, dtype, device_name, results):
    """In a process of its own: the most memory that two updates take, bytes; nanoGPT's where a folder is given."""
    if folder:
        work = peer_step(load_peer(folder), shape, rows, device_name)
    else:
        work = our_step(shape, wpe, rows, device_name, dtype, torch.device(device_name).type == 'cuda')  # as the peer's is
    work()
    if torch.device(device_name).type == 'cuda':
        torch.cuda.reset_peak_memory_stats()                      # of what compiling took
    work()  # it has the optimizer's state from the start
    if torch.device(device_name).type == 'cuda':
        return results.put(torch.cuda.max_memory_allocated())
    import resource
    results.put(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == 'darwin' else 1024))


# ---- tokenisation ----------------------------------------------------------------------------------------------------

def start_bare(tokenizer):
    global bare
    bare = from_json(tokenizer).bpe


def encode_bare(text):
    return len(bare.encode_ordinary(text))


def encoding_rates(pieces, texts, tokenizer, workers, rounds):
    """Seconds by round that prepare.py's encoding and bare tiktoken take: {'prepare.py': [...], 'tiktoken': [...], 'tokens': int}."""
    times = {'prepare.py': [], 'tiktoken': []}
    context = multiprocessing.get_context('spawn')
    with (ProcessPoolExecutor(workers, context, writer.start_worker, [tokenizer.to_json()]) as ours,
          ProcessPoolExecutor(workers, context, start_bare, [tokenizer.to_json()]) as theirs):
        for n in range(rounds + 1):
            for name, pool, work, items in (('prepare.py', ours, writer.encode, [piece for piece, *_ in pieces]),
                                            ('tiktoken', theirs, encode_bare, texts)):
                started = time.perf_counter()
                results = list(pool.map(work, items))
                if n:                                             # the first one starts the processes
                    times[name].append(time.perf_counter() - started)
    return times | {'tokens': sum(results)}
