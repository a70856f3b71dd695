"""What the models are asked, each question by name: loss in windows end to end, loss on the same targets after shorter and longer
contexts, loss by position, a sliding window, key-value retrieval and induction (see probes.py).

Contexts are half to four times as long as the models were trained at, `base`. A learned table has no answer beyond its last row: None.
"""
import math
import time

import numpy as np

from nanope.evaluate import evaluate, finite, mean_and_stderr, token_losses, windows
from nanope.probes import KEY, PAIRS, induction, retrieval

LENGTHS = 0.5, 1, 1.25, 1.5, 2, 4            # times base
EDGES = 1, 1.125, 1.25, 1.5, 2, 3, 4         # times base: past it, positions are averaged between these


def context_lengths(base):
    """The context lengths to ask at, in tokens, each once, ascending."""
    return sorted({max(round(times * base), 1) for times in LENGTHS})


def reach(config):
    """The longest sequence that a model of this GPTConfig is defined for."""
    return config.block_size if config.wpe == 'learned' else math.inf


def buckets(n):
    """Ranges (first, last) of the positions 1..n, each about 1.4 times as far from the start as the one before."""
    edges = sorted({round(2 ** (i / 2)) for i in range(2 * n.bit_length())})
    edges = [edge for edge in edges if edge == 1 or edge < n / 1.2] + [n + 1]
    return [(low, high - 1) for low, high in zip(edges, edges[1:])]


def same_targets(losses_of, file, base, furthest, max_tokens):
    """Loss on the same targets at every context length: [{'length', 'loss', 'stderr', 'change', 'change_stderr'}].

    About max_tokens targets, in evenly spaced spans of base//4. A span is scored in the window of exactly `length` inputs that ends with
    it: its last target has `length` tokens of context, the present one included. change: against the loss at base; as the targets are the
    same, how hard the text is cancels, and its error over spans is small. losses_of: rows (N, T+1) -> losses (N, T)."""
    span, lengths = max(base // 4, 1), context_lengths(base)
    longest = max(n for n in lengths if n < file.tokens)
    count = min(max(max_tokens // span, 1), (file.tokens - 1 - longest) // span + 1)
    last = np.linspace(longest, file.tokens - 1, count).astype(np.int64)  # of each span's targets
    scored = {n: losses_of(file.rows(last - n, n + 1))[:, -span:].sum(axis=1) for n in lengths if n <= min(longest, furthest)}
    results = []
    for n in lengths:
        result = dict.fromkeys(('loss', 'stderr', 'change', 'change_stderr'))
        if n in scored:
            counts = np.full(count, span)
            (loss, stderr), (change, error) = (mean_and_stderr(sums, counts) for sums in (scored[n], scored[n] - scored[base]))
            result = {'loss': loss, 'stderr': finite(stderr), 'change': change, 'change_stderr': finite(error)}
        results.append({'length': n, **result})
    return results


def by_position(losses, beyond, base):
    """Mean loss in ranges of positions: [{'from', 'to', 'loss', 'stderr'}], positions from..to-1, counted from 0.

    losses (windows, base) and beyond (windows, longest), nan where a target does not count: the first answers for positions within base,
    having more windows; the second, None where a model ends there, for those past it."""
    ranges = [(losses, low - 1, high) for low, high in buckets(base)]
    if beyond is not None:
        edges = sorted({min(round(times * base), beyond.shape[1]) for times in EDGES})
        ranges += [(beyond, low, high) for low, high in zip(edges, edges[1:])]
    results = []
    for values, low, high in ranges:
        part = values[:, low:high]
        counts = np.isfinite(part).sum(axis=1)
        loss, stderr = mean_and_stderr(np.nansum(part, axis=1)[counts > 0], counts[counts > 0])
        results.append({'from': low, 'to': high, 'loss': loss, 'stderr': finite(stderr)})
    return results


def sliding(losses_of, file, base, stride, max_tokens, end_to_end):
    """Loss in windows of base tokens every `stride`, which count what the one before left: {'stride', 'loss', 'stderr', 'tokens',
    'change', 'change_stderr'}. change: against end_to_end (loss by target), on the same targets; None unless all of them were scored."""
    starts, first = windows(file.tokens, base, max_tokens, stride)
    losses, counted = losses_of(file.rows(starts, base + 1)), np.arange(base) >= first[:, None]
    differences = losses - end_to_end[starts[:, None] + 1 + np.arange(base)]
    (loss, stderr), (change, error) = (mean_and_stderr(np.where(counted, values, 0).sum(axis=1), counted.sum(axis=1))
                                       for values in (losses, differences))
    return {'stride': stride, 'loss': loss, 'stderr': finite(stderr), 'tokens': int(counted.sum()), 'change': finite(change),
            'change_stderr': finite(error)}


# ---- all of it -------------------------------------------------------------------------------------------------------

def describe(base, config):
    """{protocol: how it was done}, a sentence or two each, for the report."""
    some, all_or_some = f'About {config.context_tokens:,}', 'all' if config.eval_tokens is None else f'{config.eval_tokens:,}'
    return {
        'non-overlapping': f"Windows of {base} tokens end to end over {all_or_some} validation tokens, as in train.py's own evaluation. "
                           'The standard error is over windows.',
        'same targets': f'{some} validation tokens, in spans of {max(base // 4, 1)}. Each span is scored in windows of exactly so many '
                        f'tokens that end with it. Change: against {base} tokens, same targets.',
        'by position': f'Within {base} tokens, of the non-overlapping windows; past it, of windows of up to {4 * base} tokens.',
        'sliding window': f'Windows of {base} tokens every {config.stride or max(base // 2, 1)}, which count what the one before left, so '
                          f'that all targets have much context. {some} tokens.',
        'retrieval': f'{PAIRS} pairs of a key ({KEY} tokens of the validation text) and a value (1 token), then text, then one of the '
                     f'keys: is its value the likeliest of the {PAIRS}? The length is from the first pair to the question. '
                     f'{config.trials} questions a length.',
        'induction': 'Random tokens, twice: loss on the second copy after other random tokens, less that after the first copy, in nats '
                     f'a token. {config.trials} sequences a length.'}


def ask(model, data, byte_lengths, base, config, seeds, autocast):
    """All protocols for one model: (answers, (loss, targets) of each window end to end, {protocol: seconds}).

    answers: fields of a run in report.json, empty where config.context_tokens or config.trials is 0. config: CompareConfig."""
    seconds, furthest, file = {}, reach(model.config), data.val
    how = dict(autocast=autocast, batch_size=config.batch_size)

    def timed(name, function, *args, **settings):
        started = time.perf_counter()
        result = function(*args, **settings)
        seconds[name] = time.perf_counter() - started
        return result

    def losses_of(rows):                                          # as many tokens at once whatever their length
        return token_losses(model, rows, autocast=autocast, batch_size=max(config.batch_size * base // rows.size(1), 1))

    full = timed('non-overlapping', evaluate, model, file, byte_lengths, block_size=base, max_tokens=config.eval_tokens, **how)
    losses, beyond = full['losses'], None
    answers = {'val_loss': full['loss'], 'val_stderr': finite(full['stderr']), 'val_tokens': full['tokens'],
               'bits_per_byte': finite(full['bits_per_byte']), 'context': [], 'sliding': None, 'retrieval': [], 'induction': []}
    if config.context_tokens:
        answers['context'] = timed('same targets', same_targets, losses_of, file, base, furthest, config.context_tokens)
        longest = min(4 * base, furthest, file.tokens - 1)
        if longest > base:
            starts, _ = windows(file.tokens, longest, 4 * config.context_tokens)
            beyond = timed('by position', losses_of, file.rows(starts, longest + 1))
        by_target = np.full(file.tokens, np.nan)
        for start, row in zip(windows(file.tokens, base, config.eval_tokens)[0], losses):
            by_target[start + 1:start + 1 + base][np.isfinite(row)] = row[np.isfinite(row)]
        stride = config.stride or max(base // 2, 1)
        answers['sliding'] = timed('sliding window', sliding, losses_of, file, base, stride, config.context_tokens, by_target)
    answers['position'] = by_position(losses, beyond, base)
    if config.trials:
        lengths = context_lengths(base)
        answers['retrieval'] = timed('retrieval', retrieval, model, file, lengths, furthest, config.trials, seeds, **how)
        answers['induction'] = timed('induction', induction, losses_of, data.vocab_size, data.tokenizer.separator, lengths, furthest,
                                     config.trials, seeds)
    return answers, (np.nansum(losses, axis=1), np.isfinite(losses).sum(axis=1)), seconds
