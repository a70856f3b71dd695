"""What bench.py measures with: alternating rounds, the machine's own limits, tokenisation, memory and the start of a process."""
import math
import multiprocessing
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor

import torch

from nanope import device, workloads, writer


def wait(device_name):
    if device.runs_ahead(device_name):
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


# ---- the machine ------------------------------------------------------------------------------------------------------------------------

def fastest(work, device_name, seconds):
    """Seconds of a call of work(), from the fastest of the series that fit into `seconds`; one at least. A series takes 5 ms or more, so
    that waiting for the device at its end does not count."""
    work()
    wait(device_name)
    calls, best, end = 1, math.inf, time.perf_counter() + seconds
    while best == math.inf or time.perf_counter() < end:
        started = time.perf_counter()
        for _ in range(calls):
            work()
        wait(device_name)
        took = time.perf_counter() - started
        if took < 0.005:
            calls *= 2
        else:
            best = min(best, took / calls)
    return best


def matmul_rates(dtype, device_name, shapes, seconds=0.3):
    """{(m, k, n): FLOP/s} of products of (m, k) and (k, n) matrices."""
    rates = {}
    for m, k, n in shapes:
        a, b = (torch.randn(shape, device=device_name).to(dtype) for shape in ((m, k), (k, n)))
        rates[m, k, n] = 2 * m * k * n / fastest(lambda: a @ b, device_name, seconds)
    return rates


def read_bandwidth(device_name, size, seconds=2.0):
    """Bytes a second of reading a matrix of `size` bytes, larger than any cache, in a product with a vector, which is what decoding does.

    On a CPU oneDNN's product is tried too, which reads faster than torch's own."""
    matrix = torch.ones(size // 2**14, 2**12, device=device_name)
    vector = torch.ones(2**12, device=device_name)
    works = [lambda: matrix @ vector]
    if not matrix.is_cuda and torch.backends.mkldnn.is_available():
        works.append(lambda: torch.nn.functional.linear(vector[None].to_mkldnn(), matrix))
    return size / min(fastest(work, device_name, seconds) for work in works)


# ---- tokenisation -----------------------------------------------------------------------------------------------------------------------

def start_bare(tokenizer):
    global bare
    writer.start_worker(tokenizer)                                # Ctrl-C is for the parent here too
    bare = writer.worker_tokenizer.bpe


def encode_bare(text):
    return len(bare.encode_ordinary(text))


def encoding_times(texts, tokenizer, workers, rounds, deadline=math.inf):
    """Seconds by round that prepare.py's encoding and bare tiktoken take, and tokens: ({'prepare.py': [...], 'tiktoken': [...]}, int).

    deadline: as for alternate()."""
    context, content = multiprocessing.get_context('spawn'), [tokenizer.to_json()]
    pieces = [[('train', text, True)] for text in texts]
    times, tokens = {'prepare.py': [], 'tiktoken': []}, 0
    with (ProcessPoolExecutor(workers, context, writer.start_worker, content) as ours,
          ProcessPoolExecutor(workers, context, start_bare, content) as theirs):
        for n in range(rounds + 1):
            if n > 1 and time.monotonic() > deadline:
                break
            for name, pool, work, items in (('prepare.py', ours, writer.encode, pieces), ('tiktoken', theirs, encode_bare, texts)):
                started = time.perf_counter()
                results = list(pool.map(work, items))
                if n:                                             # the first one starts the processes
                    times[name].append(time.perf_counter() - started)
            tokens = sum(results)
    return times, tokens


# ---- processes --------------------------------------------------------------------------------------------------------------------------

def peak_memory(*args):
    """Bytes that two updates take at most, in a process of their own (workloads.peak_memory), or None where it fails."""
    context = multiprocessing.get_context('spawn')
    results = context.SimpleQueue()
    child = context.Process(target=workloads.peak_memory, args=(*args, results))
    child.start()
    child.join()
    return results.get() if child.exitcode == 0 else None


def seconds_to_line(command, begins, folder=None, stop=False):
    """Seconds from starting a Python script until it prints a line that begins so; None where it never does. stop: kill it then."""
    started = time.perf_counter()
    with subprocess.Popen([sys.executable, '-u', *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                          cwd=folder) as process:
        line = next((line for line in process.stdout if line.startswith(begins)), None)
        took = time.perf_counter() - started
        process.kill() if stop else process.stdout.read()
    return None if line is None else took
