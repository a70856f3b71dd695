"""Which device and number format to use, and why; how many rows fit."""
import contextlib
import os
import platform
import re

import numpy as np
import torch

from nanope import parallel
from nanope.files import brief

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


def without_cudnn():
    """A context without cuDNN's attention. That plans anew for every length of sequence, so it is not for sampling and evaluation, and its
    gradients with a mask, which ALiBi has, may be nan (pytorch issue 196678); for all other training it is the fastest."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


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
