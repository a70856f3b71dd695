"""torch.compile: whether it pays, training updates and sampling steps, and what happens where it fails. docs/performance.md has figures."""
import contextlib
import sys

import torch

from model import LARGE_MATRIX
from nanope import parallel
from nanope.device import cpu_has_bf16
from nanope.files import brief
from nanope.loss import loss_function

COMPILE_TAKES = 30            # seconds on a CPU
GAIN, GAIN_WIDE = 0.08, 0.01  # what it saves there of an update, and where nearly all of that is large float32 products
STEPS_PAY = 20_000            # sampled tokens, one after the other, from which on a compiled step saves more than it takes


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
    wanted, reason = resolve_compile(compile, device, seconds)
    if not wanted:
        return loss_function(model, False, rows, device), False, reason
    allow_many_graphs()
    try:
        sharded = any(map(parallel.is_sharded, model.parameters()))
        if sharded:
            parallel.compile_blocks(model)
        loss_of = loss_function(model, not sharded, rows, device)
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
        return loss_function(model, False, rows, device), False, 'it failed, see the warning'
    finally:
        model.zero_grad(set_to_none=True)


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


def tell_failure(error, compile):
    """Of the compiler: a warning, or ValueError where it was asked for."""
    what = f'torch.compile failed ({brief(error)})'
    if compile is True:
        raise ValueError(f'{what}; --compile=false goes without it') from error
    print(f'warning: {what}; we go on without it, more slowly', file=sys.stderr)


def allow_many_graphs():
    """All models and shapes of a process share the code of forward(): past 8 graphs of it torch would silently go on in eager mode."""
    torch._dynamo.config.recompile_limit = 64
