"""Several processes train one model, each on its part of every batch: torchrun starts them, here they meet and agree.
Without torchrun there is one process, and all of this does nothing. Rank 0 alone prints, locks and writes.

There is no DDP wrapper: train.py adds the gradients up after the last micro-batch. DDP around a compiled module would start no earlier,
since the compiled backward hands over all gradients at its end; it would rename the parameters, and broadcast the tables of sinusoidal
and RoPE before every update, a cost that learned does not have.
"""
import contextlib
import hashlib
import os
import re
import signal
import sys
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from nanope.files import brief

rank, world = 0, 1  # of this process, and how many there are


@contextlib.contextmanager
def ranks():
    """Around main(): ranks but 0 are mute, and wait for rank 0 to join(), so that what is wrong for all is said once."""
    global rank, world
    rank, world = launched()
    patience()  # said before anything is made
    with all_there(), contextlib.ExitStack() as mute:  # an error leaves it, and is told by any rank
        if rank and not {'-h', '--help'} & {*sys.argv}:
            nowhere = mute.enter_context(open(os.devnull, 'w'))
            mute.enter_context(contextlib.redirect_stdout(nowhere)), mute.enter_context(contextlib.redirect_stderr(nowhere))
            connect()
        yield
        if world > 1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it to all when the first has ended
            any_rank(False)  # nobody ends while another still works
            dist.destroy_process_group()


@contextlib.contextmanager
def all_there():
    """Around what waits for other processes: the end of one of them, or that it hangs, is an error of one clear line."""
    try:
        yield
    except RuntimeError as error:
        reason = brief(error)
        if not (isinstance(error, dist.DistError) or re.search('gloo|pair closure|time[d ]*out|connection', reason, re.I)):
            raise
        what = (f'has waited {patience()} s for another of the {world} processes: it hangs, or NANOPE_PATIENCE is to be larger'
                if re.search('time[d ]*out', reason, re.I) else f'has lost another of the {world} processes: it was killed or failed')
        raise ConnectionError(f'rank {rank} {what} ({reason}). The last checkpoint is whole: go on with the same command and '
                              '--init_from=resume') from None


def launched():
    """(rank, world) as torchrun has set them in the environment: (0, 1) without it."""
    told = {name: os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT') if name in os.environ}
    texts = told.get('RANK', '0'), told.get('WORLD_SIZE', '1')
    if all(re.fullmatch('[0-9]{1,6}', text) for text in texts) and int(texts[0]) < int(texts[1]) and (texts[1] == '1' or len(told) == 4):
        return int(texts[0]), int(texts[1])
    raise ValueError(f'the environment has {", ".join(f"{name}={text:.60}" for name, text in told.items())}, not as torchrun sets it: '
                     'start several processes with torchrun, or unset RANK and WORLD_SIZE to train with one')


def patience():
    """Seconds to wait for a process that is saving, compiling or drawing; one that has died is noticed at once."""
    text = os.environ.get('NANOPE_PATIENCE', '600')
    if not re.fullmatch('[1-9][0-9]{0,6}', text):
        raise ValueError(f'NANOPE_PATIENCE={text:.60} in the environment must be a whole number of seconds')
    return int(text)


def connect():
    """gloo for what lies on the CPU, NCCL for what lies on GPUs."""
    dist.init_process_group('cpu:gloo,cuda:nccl' if torch.cuda.is_available() else 'gloo', timeout=timedelta(seconds=patience()))


def join(facts):
    """Rank 0 lets the others go on; then ValueError unless facts (str) are the same for each."""
    if rank == 0 and world > 1:
        connect()
    digests = gather(np.array([[*hashlib.sha256(facts.encode()).digest()]]))
    odd = [str(i) for i, digest in enumerate(digests) if (digest != digests[0]).any()]
    if odd:
        raise ValueError(f'rank {", ".join(odd)} has other settings, data or checkpoints than rank 0: all machines must see the same')


def add_up(tensors):
    """Replace each tensor by its sum over all processes, all of them under way at once. Returns them.

    Sharded gradients are sums already."""
    for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors if world > 1 and not is_sharded(tensor)]:
        work.wait()
    return tensors


def any_rank(flag):
    """Whether flag is true in any process: all must ask, and all get the same answer."""
    return add_up([torch.tensor(float(bool(flag)))])[0].item() > 0


def share(rows):
    """This process's part of rows (N, ...): every world-th one, as many for each process, so that the first rows may be there twice."""
    return rows[torch.arange(rank, len(rows) + -len(rows) % world, world) % len(rows)] if world > 1 else rows


def gather(part):
    """What was computed from share(), array (n, ...) -> that of all processes (n * world, ...), in the order that the rows had."""
    parts = [torch.from_numpy(part.copy()) for _ in range(world)]
    if world > 1:
        dist.all_gather(parts, torch.from_numpy(part))
    return torch.stack(parts, dim=1).flatten(0, 1).numpy()


# ---- sharding: each process keeps a part of every weight, of its gradient and of its optimizer state --------------------------------

def shard(model, device):
    """Split a model that lies on the CPU over the processes with FSDP2; a block is put together when it is needed. Returns it, on device.

    Parameters become DTensors of the same names and shapes. Sharded gradients come out of backward() added up over all processes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh(torch.device(device).type, (world,))
    for module in (*model.transformer.h, model):  # the rest belongs to the model itself: the tied embedding is there once
        fully_shard(module, mesh=mesh, reshard_after_forward=True)  # nothing stays whole, so that parameters always are the parts
        module.set_gradient_divide_factor(1.0)  # a sum, as add_up() makes: train.py divides by the micro-batches of all processes
        module.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sums
    return model


def compile_blocks(model, undo=False):
    """Compile each block of a sharded model by itself, since between blocks weights are put together, which no compiler sees. Returns it.

    In training alone: with a cache the shapes change with every token."""
    for block in model.transformer.h:
        vars(block).pop('forward', None)
        if not undo:
            plain, fast = block.forward, torch.compile(block.forward, fullgraph=True, dynamic=False)
            block.forward = lambda *args, block=block, plain=plain, fast=fast: (fast if block.training else plain)(*args)
    return model


def may_shard(wanted, dtype):
    """Whether to shard: where it was asked for and there is somebody to share with. ValueError where it cannot be."""
    if wanted and dtype == 'float16':
        raise ValueError('--shard=true does not scale the gradients that float16 needs: use --dtype=bfloat16 or --dtype=float32')
    if wanted and world == 1:
        print('warning: shard=True has no effect on a single process: start several with torchrun', file=sys.stderr)
    return wanted and world > 1


def is_sharded(tensor):
    return hasattr(tensor, 'full_tensor')


def own(tensor):
    """What lies here of a tensor that may be sharded."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def whole(tensor):
    """A tensor that may be sharded, put together: all processes must ask."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def whole_dict(tensors):
    """{name: tensor}, each put together. Of sharded ones rank 0 gets copies on the CPU, one after the other, and the other ranks none."""
    if not any(map(is_sharded, tensors.values())):
        return tensors
    return {name: full.cpu() for name, full in ((name, whole(tensor.detach())) for name, tensor in tensors.items()) if rank == 0}


def like(tensor, parameter):
    """A whole tensor, which every process has, as `parameter` has it: on its device and, where that is sharded, this process's part."""
    if not is_sharded(parameter):
        return tensor.to(parameter.device)
    from torch.distributed.tensor import distribute_tensor
    return distribute_tensor(tensor.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None)
