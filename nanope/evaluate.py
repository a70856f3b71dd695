"""Validation loss on fixed windows of the validation tokens: nothing is drawn, so runs can be compared token by token."""
import math

import numpy as np
import torch

from nanope import parallel
from nanope.device import without_cudnn


def windows(tokens, block_size, max_tokens=None, stride=None):
    """Where to score: (starts, first), two int arrays. Window i has inputs starts[i] .. +block_size-1, counts its targets from first[i] on.

    Without max_tokens every token of the file but the very first is a target exactly once: windows start `stride` tokens apart (none: they
    stand end to end) and count what the one before left; the last one is aligned to the end of the file. With max_tokens, evenly spaced
    windows of about that many counted targets."""
    stride = stride or block_size
    n = (tokens - 1 - block_size) // stride + 1
    rest = (tokens - 1 - block_size) % stride
    starts, first = np.arange(n, dtype=np.int64) * stride, np.full(n, block_size - stride)
    first[0] = 0
    if max_tokens is not None and max_tokens < block_size + (n - 1) * stride:
        picked = np.linspace(0, n - 1, min(max(max_tokens // stride, 1), n)).astype(np.int64)
        return starts[picked], first[picked]
    if rest:
        starts, first = np.append(starts, tokens - 1 - block_size), np.append(first, block_size - rest)
    return starts, first


def mean_and_stderr(sums, counts):
    """Mean of sums/counts over windows and its standard error, windows taken as independent (ratio estimator). Floats."""
    mean, n = sums.sum() / counts.sum(), len(sums)
    spread = ((sums - mean * counts) ** 2).sum()
    return float(mean), float(math.sqrt(n / (n - 1) * spread) / counts.sum()) if n > 1 else float('nan')


def finite(x):
    """x, or None for what JSON cannot hold: the standard error of a single window."""
    return x if math.isfinite(x) else None


@torch.no_grad()
def token_losses(model, rows, *, autocast, batch_size=16, stop=lambda: False):
    """Loss in nats of every next token of rows (N, T+1) int64: float64 array (N, T), whatever batch_size and the model's mode.

    stop() is asked between batches; None when it says so."""
    device, was_training, losses = next(model.parameters()).device, model.training, []
    model.eval()
    try:
        for batch in rows.split(batch_size):
            if stop():
                return None
            with autocast(), without_cudnn():
                loss = model(batch[:, :-1].to(device), batch[:, 1:].to(device), reduction='none')  # (B, T)
            losses.append(loss.cpu().double().numpy())
    finally:
        model.train(was_training)
    return np.concatenate(losses)


def evaluate(model, file, byte_lengths, *, block_size, autocast, batch_size=16, max_tokens=None, stride=None, stop=lambda: False):
    """Score `file` (TokenFile) with model, in windows of block_size; the result depends on neither batch_size nor the model's mode.

    byte_lengths: UTF-8 bytes of each token (V,). Returns None when stopped, else a dict: loss (nats a token), stderr, tokens, windows,
    bits_per_byte, position (mean loss at each position of a window: list of block_size floats, nan where no window counts it), and losses:
    each one, float64 (windows, block_size), nan where it does not count."""
    starts, first = windows(file.tokens, block_size, max_tokens, stride)
    rows = file.rows(starts, block_size + 1)
    losses = token_losses(model, parallel.share(rows), autocast=autocast, batch_size=batch_size, stop=stop)
    if losses is None:
        return None
    losses = parallel.gather(losses)[:len(rows)]
    counted = np.arange(block_size) >= first[:, None]  # (windows, T)
    sums, counts = (losses * counted).sum(axis=1), counted.sum(axis=1)
    loss, stderr = mean_and_stderr(sums, counts)
    n_bytes = int(byte_lengths[rows[:, 1:].numpy()][counted].sum())
    with np.errstate(invalid='ignore'):
        position = (losses * counted).sum(axis=0) / counted.sum(axis=0)
    return {'loss': loss, 'stderr': stderr, 'tokens': int(counts.sum()), 'windows': len(starts), 'position': position.tolist(),
            'bits_per_byte': loss * int(counts.sum()) / math.log(2) / n_bytes if n_bytes else float('nan'),
            'losses': np.where(counted, losses, np.nan)}
