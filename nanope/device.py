"""Which device, number format and compiler to use, and why."""
import contextlib
import os
import platform
import re
import sys

import numpy as np
import torch

from model import LARGE_MATRIX
from nanope import parallel
from nanope.files import brief
from nanope.loss import loss_function

COMPILE_TAKES = 30            # seconds on a CPU
GAIN, GAIN_WIDE = 0.08, 0.01  # what it saves there of an update, and where nearly all of that is large float32 products; docs/performance.md
STEPS_PAY = 20_000            # sampled tokens, one after the other, from which on a compiled step saves more than it takes

# Dense bf16/fp16 peak of one card, FLOP/s, from the makers' data sheets. A name that is not here gets no MFU rather than a wrong one.
PEAK_FLOPS = {'H200': 989e12, 'H100 PCIe': 756e12, 'H100': 989e12, 'A100': 312e12, 'L40S': 362e12, 'L4': 121e12, 'A10G': 70e12,
              'RTX 4090': 165e12, 'RTX 3090': 71e12, 'V100': 125e12, 'T4': 65e12}


def cpu_has_bf16():
    """Whether this CPU multiplies bf16 matrices in hardware (AMX or AVX512-BF16)."""
    flags = ('_is_amx_tile_supported', '_is_avx512_bf16_supported')
    return any(getattr(torch.cpu, flag, lambda: False)() for flag in flags)


def resolve_device(device):
    """'auto' -> ('cuda' | 'mps' | 'cpu', reason). Raises ValueError where the device asked for is not there."""
    if device == 'auto':
        if torch.cuda.is_available():
            return 'cuda', torch.cuda.get_device_name()
        if torch.backends.mps.is_available():
            return 'mps', 'Apple GPU (best effort)'
        return 'cpu', 'no CUDA device was found'
    try:
        if torch.device(device).type not in ('cpu', 'cuda', 'mps'):
            raise RuntimeError('only cpu, cuda and mps are known')
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f'device={device} cannot be used ({brief(error)}); try --device=cpu') from None
    return device, 'as asked'


def place(device, reason):
    """(device, reason) for this one of several processes: the second one on a machine gets 'cuda:1'. ValueError where it is not there."""
    if parallel.world == 1:
        return device, reason
    if device == 'cpu':
        return device, f'{reason}; {parallel.world} processes share the work'
    here, there, mine = int(os.environ['LOCAL_WORLD_SIZE']), torch.cuda.device_count(), f'cuda:{os.environ["LOCAL_RANK"]}'
    if device != 'cuda' or here > there:
        what = f'{here} processes, but {there} GPUs' if device == 'cuda' else f'{parallel.world} processes cannot share device={device}'
        raise ValueError(f'{what}: start one process a GPU with --device=cuda, or use --device=cpu')
    torch.cuda.set_device(mine)
    return mine, f'a GPU for each of {parallel.world} processes'


def resolve_dtype(dtype, device, n_embd):
    """'auto' -> ('bfloat16' | 'float16' | 'float32', reason): the format of matrix products; weights and sums stay float32."""
    kind = torch.device(device).type
    if dtype != 'auto':
        if dtype == 'float16' and kind != 'cuda':
            raise ValueError(f'dtype=float16 needs CUDA, the device is {device}: use --dtype=bfloat16 or --dtype=float32')
        return dtype, 'as asked'
    if kind == 'cuda':
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return 'bfloat16', 'this GPU has it'
        return 'float16', 'this GPU has no bfloat16; gradients are scaled'
    if kind == 'cpu' and cpu_has_bf16():
        if n_embd >= 128:  # measured: casting costs more than it saves below
            return 'bfloat16', 'this CPU multiplies it in hardware'
        return 'float32', f'casts would cost more than bfloat16 saves at n_embd={n_embd}'
    return 'float32', f'no fast bfloat16 on this {kind}'


def resolve_compile(compile, device, seconds):
    """'auto' -> (bool, reason). seconds: what it may save on a CPU."""
    if compile != 'auto':
        return compile, 'as asked'
    if torch.device(device).type == 'cuda':
        return True, 'pays off on CUDA'
    if torch.device(device).type == 'cpu' and seconds > COMPILE_TAKES:
        return True, f'it may save {seconds:,.0f} s of the run and takes about {COMPILE_TAKES}'
    return False, 'compiling takes longer than it saves in this run on this device; --compile=true forces it'


def expected_saving(model, tokens, dtype):
    """About how many seconds compiling saves this CPU in training on so many tokens, from the operations alone: the same for every run of
    the same settings."""
    fast = dtype == 'bfloat16' and cpu_has_bf16()
    rate, gain = 1.5e11 if fast else 3e10, GAIN if fast or model.config.n_embd < 256 else GAIN_WIDE  # FLOP/s a core
    return gain * tokens * model.flops_per_token() / (rate * torch.get_num_threads())


def compile_model(model, compile, rows, device, autocast, seconds):
    """torch.compile, tried on one micro-batch of `rows` rows: (function of (idx, targets) -> mean loss, whether compiled, reason).

    Where it fails, 'auto' falls back with a warning and True raises ValueError. seconds: see resolve_compile()."""
    def suited(loss_of):
        masked = model.config.wpe == 'alibi' and torch.device(device).type == 'cuda'
        return in_context(without_cudnn, loss_of) if masked else loss_of
    wanted, reason = resolve_compile(compile, device, seconds)
    if not wanted:
        return suited(loss_function(model, False, rows, device)), False, reason
    allow_many_graphs()
    try:
        sharded = any(map(parallel.is_sharded, model.parameters()))
        loss_of = suited(parallel.compile_blocks(model) if sharded else loss_function(model, True, rows, device))
        ids = torch.zeros(rows, model.config.block_size, dtype=torch.int64, device=device)
        with autocast():
            loss = loss_of(ids, ids.clone())  # two tensors, as in training: for one that is both there would be a graph of its own
        loss.backward()
        return loss_of, True, reason
    except torch.OutOfMemoryError:  # not the compiler's fault, and worse without it
        raise
    except Exception as error:  # whatever the compiler's many parts may raise
        tell_failure(error, compile)
        parallel.compile_blocks(model, undo=True)
        return suited(loss_function(model, False, rows, device)), False, 'it failed, see the warning'
    finally:
        model.zero_grad(set_to_none=True)


def tell_failure(error, compile):
    """Of the compiler: a warning, or ValueError where it was asked for."""
    what = f'torch.compile failed ({brief(error)})'
    if compile is True:
        raise ValueError(f'{what}; --compile=false goes without it') from error
    print(f'warning: {what}; we go on without it, more slowly', file=sys.stderr)


def allow_many_graphs():
    """All models and shapes of a process share the code of forward(): past 8 graphs of it torch would silently go on in eager mode."""
    torch._dynamo.config.recompile_limit = 64


def resolve_step(compile, model, device, steps):
    """'auto' -> (bool, reason): whether to compile a sampling step that is to be made so many times."""
    if compile != 'auto':
        return compile, 'as asked'
    if steps < STEPS_PAY:
        return False, f'pays from {STEPS_PAY:,} tokens on, one after the other'
    first = model.transformer.h[0].mlp.c_fc.weight
    if torch.device(device).type == 'cpu' and first.dtype == torch.float32 and first.numel() >= LARGE_MATRIX:
        return False, 'slower than oneDNN for large float32 matrices'  # 29 against 38 tokens/s, GPT-2 124M on two cores
    return True, f'{steps:,} tokens, one after the other, pay for it'


def compile_step(model, device, compile=True):
    """What a cached step computes, compiled, as generate() takes it: when it is called first. If that fails, `compile` 'auto' goes on
    without, with a warning, and True raises ValueError.

    On CUDA the step is recorded as a graph and replayed. On a CPU weights in bfloat16 are frozen: laid out once as its products like them
    best, so that a later change of them has no effect. In float32 that was measured to gain nothing."""
    allow_many_graphs()
    kind, plain, fast = torch.device(device).type, lambda *args: model.logits(model.hidden(*args)), None
    options = {'triton.cudagraphs': True, 'coordinate_descent_tuning': True} if kind == 'cuda' else {}
    freezing = kind == 'cpu' and model.lm_head.weight.dtype == torch.bfloat16

    def step(*args):
        nonlocal fast
        try:
            fast = fast or torch.compile(plain, dynamic=False, options=options)
            with frozen() if freezing else contextlib.nullcontext():
                return fast(*args)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            tell_failure(error, compile)
            fast = plain
            return fast(*args)  # the cache is written anew where it was
    return step


def frozen():
    """A context in which torch.compile takes weights for constants: an option of its own comes too late for that."""
    import torch._inductor.config as inductor
    return inductor.patch(freezing=True)


def without_cudnn():
    """A context without cuDNN's attention. That plans anew for every length of sequence, so it is not for sampling and evaluation, and its
    gradients with a mask, which ALiBi has, may be nan (pytorch issue 196678); for all other training it is the fastest."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def in_context(context, function):
    """function, each call of it within context()."""
    def call(*args):
        with context():
            return function(*args)
    return call


def micro_batch(wanted, model, rows, device, autocast, otherwise=None):
    """'auto' -> (rows to pass through the model at once, a divisor of rows; reason). otherwise: rows on a device that is no GPU."""
    if wanted != 'auto':
        return (wanted, 'as asked') if wanted <= rows else (rows, f'an update has no more, so not {wanted}')
    if torch.device(device).type != 'cuda':
        return otherwise or rows, 'batch_size: only a GPU tells how many fit'
    most = parallel.gather(np.array([rows_that_fit(model, device, autocast)])).min()  # the same for all processes
    return max(n for n in range(1, rows + 1) if rows % n == 0 and n <= most), f'{most} would fit'


def rows_that_fit(model, device, autocast):
    """How many rows of block_size tokens fit a GPU. Memory grows evenly with rows, so two trials tell. Compiled, they need less than here.

    Raises torch.OutOfMemoryError where not even one does."""
    used = []
    for n in (1, 2):
        torch.cuda.reset_peak_memory_stats(device)
        ids = torch.zeros(n, model.config.block_size, dtype=torch.int64, device=device)
        try:
            with autocast():
                loss = model(ids, ids)
            loss.backward()
        except torch.OutOfMemoryError:
            if n == 1:
                raise
            return 1
        finally:
            loss = None
            model.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
        used.append(torch.cuda.max_memory_allocated(device))
    moments = 8 * sum(p.numel() for p in model.parameters())      # the optimizer's, which are not there yet
    room = 0.9 * torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_allocated(device) - used[0] - moments
    return max(int(room // (used[1] - used[0])) + 1, 1)


def autocast(device, dtype):
    """A function that opens the autocast context: with autocast(): ..."""
    if dtype == 'float32':
        return contextlib.nullcontext
    return lambda: torch.autocast(device_type=torch.device(device).type, dtype=getattr(torch, dtype))


def runs_ahead(device):
    """Whether work is queued on the device while Python goes on: then one does best not to ask for results after every update."""
    return torch.device(device).type == 'cuda'


def send(tensor, device):
    """A tensor on the device; for CUDA without waiting, so that the next batch is read while this one is worked on."""
    if torch.device(device).type == 'cuda':
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def peak_flops(device, dtype):
    """Peak FLOP/s of the card for dtype, or None where it is not known."""
    if torch.device(device).type != 'cuda' or dtype == 'float32':
        return None
    name = torch.cuda.get_device_name(device)
    if re.search('Laptop|MIG|NVL', name):  # slower than the card they are named after
        return None
    return next((peak for card, peak in PEAK_FLOPS.items() if re.search(rf'\b{card}\b', name)), None)


def environment(device, dtype, compiled):
    """What must be equal for a resumed run to repeat the same bits: a dict of plain values, kept in every checkpoint's manifest."""
    kind = torch.device(device).type
    return {'torch': torch.__version__, 'numpy': np.__version__, 'python': platform.python_version(), 'device': kind, 'dtype': dtype,
            'compile': compiled, 'threads': torch.get_num_threads(), 'processes': parallel.world,
            'device_name': torch.cuda.get_device_name(device) if kind == 'cuda' else cpu_name()}


def cpu_name():
    if os.path.exists('/proc/cpuinfo'):
        with open('/proc/cpuinfo', encoding='utf-8') as file:
            for line in file:
                if line.startswith('model name'):
                    return line.split(':', 1)[1].strip()
    return platform.processor() or platform.machine()
