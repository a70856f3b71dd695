"""Validation loss on fixed windows of the validation tokens: nothing is drawn, so runs can be compared token by token."""
import math

import numpy as np
import torch


def windows(tokens, block_size, max_tokens=None):
    """Where to score: (starts, first), two int arrays. Window i has inputs starts[i] .. +block_size-1 and counts its targets from first[i] on.

    Without max_tokens every token of the file but the very first is a target exactly once: windows stand end to end, and the last one,
    aligned to the end of the file, counts only what the one before left. With max_tokens, evenly spaced whole windows of about that many."""
    n = (tokens - 1) // block_size
    rest = (tokens - 1) % block_size
    if max_tokens is not None and max_tokens < n * block_size:
        starts = np.linspace(0, n - 1, max(max_tokens // block_size, 1)).astype(np.int64) * block_size
        return starts, np.zeros_like(starts)
    starts, first = np.arange(n, dtype=np.int64) * block_size, np.zeros(n, dtype=np.int64)
    if rest:
        starts, first = np.append(starts, tokens - 1 - block_size), np.append(first, block_size - rest)
    return starts, first


def mean_and_stderr(sums, counts):
    """Mean of sums/counts over windows and its standard error, windows taken as independent (ratio estimator). Floats."""
    mean, n = sums.sum() / counts.sum(), len(sums)
    spread = ((sums - mean * counts) ** 2).sum()
    return float(mean), float(math.sqrt(n / (n - 1) * spread) / counts.sum()) if n > 1 else float('nan')


@torch.no_grad()
def evaluate(model, file, byte_lengths, *, block_size, autocast, batch_size=16, max_tokens=None, stop=lambda: False):
    """Score `file` (TokenFile) with model, in windows of block_size; the result depends on neither batch_size nor the model's mode.

    byte_lengths: UTF-8 bytes of each token (V,). stop() is asked between batches. Returns None when stopped, else a dict: loss (nats a
    token), stderr, tokens, windows, bits_per_byte, position (mean loss at each position of a window: list of block_size floats)."""
    starts, first = windows(file.tokens, block_size, max_tokens)
    device, was_training = next(model.parameters()).device, model.training
    losses, n_bytes = [], 0
    model.eval()
    try:
        for i in range(0, len(starts), batch_size):
            if stop():
                return None
            rows = file.rows(starts[i:i + batch_size], block_size + 1)
            with autocast():
                loss = model(rows[:, :-1].to(device), rows[:, 1:].to(device), reduction='none')  # (B, T)
            losses.append(loss.cpu().double().numpy())
            counted = np.arange(block_size) >= first[i:i + batch_size, None]
            n_bytes += int(byte_lengths[rows[:, 1:].numpy()][counted].sum())
    finally:
        model.train(was_training)
    losses, counted = np.concatenate(losses), np.arange(block_size) >= first[:, None]  # (windows, T)
    loss, stderr = mean_and_stderr((losses * counted).sum(axis=1), counted.sum(axis=1))
    return {'loss': loss, 'stderr': stderr, 'tokens': int(counted.sum()), 'windows': len(starts),
            'bits_per_byte': loss * int(counted.sum()) / math.log(2) / n_bytes if n_bytes else float('nan'),
            'position': ((losses * counted).sum(axis=0) / counted.sum(axis=0)).tolist()}
