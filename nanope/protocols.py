"""What the models are asked, each question by name: loss with windows end to end, the same targets after shorter and longer contexts, loss
by position, a sliding window, key-value retrieval, and induction.

How far a model sees is asked in lengths from half to four times the length it was trained at, `base`. A learned table has no answer beyond
its last row: None. All draws follow from a seed and the length, so every model is asked the same.
"""
import math
import time

import numpy as np
import torch

from nanope.evaluate import evaluate, mean_and_stderr, token_losses, windows

LENGTHS = 0.5, 1, 1.25, 1.5, 2, 4            # times base
EDGES = 1, 1.125, 1.25, 1.5, 2, 3, 4         # times base: past it, positions are averaged between these
PAIRS, KEY = 4, 8                            # retrieval: pairs to choose from, tokens of a key; a value is one token


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


def finite(x):
    """x, or None for what JSON cannot hold: the standard error of a single window."""
    return x if math.isfinite(x) else None


# ---- on validation text -----------------------------------------------------------------------------------------------------------------

def same_targets(losses_of, file, base, furthest, max_tokens):
    """Loss on the same targets at every context length: [{'length', 'loss', 'stderr', 'change', 'change_stderr'}].

    About max_tokens targets, in evenly spaced spans of base//4. A span is scored in the window of exactly `length` inputs that ends with it,
    so the context of its last target is `length` tokens, the present one included. change: against the loss at base; as the targets are
    the same, how hard the text is cancels, and its error over spans is small. losses_of: rows (N, T+1) -> losses (N, T)."""
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


# ---- on synthetic rows ------------------------------------------------------------------------------------------------------------------

def key_value_rows(file, n, trials, seed):
    """Questions of n tokens: rows (trials, n), candidates (trials, PAIRS), and which one is right (trials,). None where n is too short.

    A row is PAIRS pairs of a key and its value, then text, then one of the keys again; what comes next? Keys and text are pieces of the
    file, values distinct tokens of it by frequency. Which key has which value, and which is asked for, are independent draws: whoever
    does not look a key up is right in 1 of PAIRS cases, whatever else it knows."""
    filler = n - PAIRS * (KEY + 1) - KEY
    tokens, counts = np.unique(file.rows([0], min(file.tokens, 10**6)).numpy(), return_counts=True)
    if filler < 0 or len(tokens) < PAIRS:
        return None
    random = np.random.default_rng([seed, n])
    keys = file.rows(random.integers(0, file.tokens - KEY + 1, trials * PAIRS), KEY).view(trials, PAIRS, KEY)
    values = np.stack([random.choice(tokens, PAIRS, replace=False, p=counts / counts.sum()) for _ in range(trials)])
    values, right = torch.from_numpy(values), torch.from_numpy(random.integers(0, PAIRS, trials))
    text = file.rows(random.integers(0, file.tokens - filler + 1, trials), filler)
    pairs = torch.cat((keys, values[:, :, None]), dim=2).view(trials, PAIRS * (KEY + 1))
    return torch.cat((pairs, text, keys[torch.arange(trials), right]), dim=1), values, right


@torch.no_grad()
def retrieval(model, file, base, furthest, trials, seed, autocast, batch_size):
    """Share of key_value_rows answered rightly, by length: [{'length', 'accuracy', 'stderr', 'chance'}]. stderr is binomial."""
    device, results = next(model.parameters()).device, []
    for n in context_lengths(base):
        rows = key_value_rows(file, n, trials, seed) if n <= furthest else None
        accuracy = stderr = None
        if rows:
            questions, values, right = rows
            with autocast():
                logits = torch.cat([model(part.to(device), last_only=True)[:, -1].cpu() for part in questions.split(batch_size)])
            scores = logits.float().gather(1, values)             # (trials, PAIRS)
            best = scores == scores.max(dim=1, keepdim=True).values
            hits = best.gather(1, right[:, None])[:, 0] / best.sum(dim=1)  # among equals, the right one is taken that often
            accuracy = hits.double().mean().item()
            stderr = math.sqrt(accuracy * (1 - accuracy) / trials)
        results.append({'length': n, 'accuracy': accuracy, 'stderr': stderr, 'chance': 1 / PAIRS})
    return results


def induction(losses_of, n_tokens, separator, base, furthest, trials, seed):
    """How much a model gains from having seen a sequence before: [{'length', 'distance', 'score', 'stderr', 'first_minus_second'}].

    `distance` random tokens stand twice; each of n_tokens ids but the separator is as likely. score: the mean loss on the second copy where
    other random tokens stand in place of the first, less that on the second copy, in nats: same targets, same positions.
    first_minus_second is the usual score, which a drift of the loss with the position moves too. The first token takes no part."""
    results = []
    for n in context_lengths(base):
        distance = n // 2
        result = dict.fromkeys(('score', 'stderr', 'first_minus_second'))
        if distance > 1 and n <= furthest:
            draws = np.random.default_rng([seed, n]).integers(0, n_tokens - 1, (trials + 1, distance))
            random = torch.from_numpy(draws + (draws >= separator))
            once, other = random[:-1], random[1:]
            twice = losses_of(torch.cat((once, once), dim=1))     # (trials, 2 distance - 1)
            unseen = losses_of(torch.cat((other, once), dim=1))
            score, stderr = mean_and_stderr((unseen - twice)[:, distance:].mean(axis=1), np.ones(trials))
            usual = float(twice[:, :distance - 1].mean() - twice[:, distance:].mean())
            result = {'score': score, 'stderr': finite(stderr), 'first_minus_second': usual}
        results.append({'length': n, 'distance': distance, **result})
    return results


# ---- all of it --------------------------------------------------------------------------------------------------------------------------

def describe(base, config):
    """{protocol: how it was done}, a sentence or two each, for the report."""
    at_most = f'about {config.context_tokens:,}'
    return {
        'non-overlapping': f'Windows of {base} tokens end to end over ' + ('all' if config.eval_tokens is None else f'{config.eval_tokens:,}')
                           + " validation tokens, as in train.py's own evaluation. The standard error is over windows.",
        'same targets': f'{at_most} validation tokens, in spans of {max(base // 4, 1)}, each scored in the window of exactly as many tokens '
                        f'that ends with its span. Change: against {base} tokens, same targets.',
        'by position': f'Within {base} tokens, of the non-overlapping windows; past it, of windows of up to {4 * base} tokens.',
        'sliding window': f'Windows of {base} tokens every {config.stride or max(base // 2, 1)}, which count what the one before left: '
                          f'every target but the first few has more context than end to end. {at_most} tokens.',
        'retrieval': f'{PAIRS} pairs of a key ({KEY} tokens of the validation text) and a value (1 token), then text, then one of the keys: '
                     f'is its value the likeliest of the {PAIRS}? The length is from the first pair to the question. {config.trials} questions.',
        'induction': f'Random tokens, twice: loss on the second copy after other random tokens, less that after the first copy, nats a token. '
                     f'{config.trials} sequences.'}


def ask(model, data, byte_lengths, base, config, autocast):
    """All protocols for one model: (answers, {protocol: seconds}).

    answers: what evaluate() gives for windows of base tokens end to end, and 'context', 'position', 'sliding', 'retrieval', 'induction' as
    above, empty or None where config.context_tokens or config.trials is 0. data: Data. config: CompareConfig."""
    seconds, furthest = {}, reach(model.config)
    how = dict(autocast=autocast, batch_size=config.batch_size)

    def timed(name, function, *args, **settings):
        started = time.perf_counter()
        result = function(*args, **settings)
        seconds[name] = time.perf_counter() - started
        return result

    def losses_of(rows):                                          # as many tokens at once whatever their length
        fit = max(config.batch_size * base // rows.size(1), 1)
        return token_losses(model, rows, autocast=autocast, batch_size=fit)

    answers = timed('non-overlapping', evaluate, model, data.val, byte_lengths, block_size=base, max_tokens=config.eval_tokens, **how)
    answers |= {'context': [], 'sliding': None, 'retrieval': [], 'induction': []}
    beyond, longest = None, min(4 * base, furthest, data.val.tokens - 1)
    if config.context_tokens:
        answers['context'] = timed('same targets', same_targets, losses_of, data.val, base, furthest, config.context_tokens)
        if longest > base:
            starts, _ = windows(data.val.tokens, longest, 4 * config.context_tokens)
            beyond = timed('by position', losses_of, data.val.rows(starts, longest + 1))
        stride = config.stride or max(base // 2, 1)
        found = timed('sliding window', evaluate, model, data.val, byte_lengths, block_size=base, stride=stride,
                      max_tokens=config.context_tokens, **how)
        answers['sliding'] = {'stride': stride, 'loss': found['loss'], 'stderr': finite(found['stderr']), 'tokens': found['tokens']}
    answers['position'] = by_position(answers['losses'], beyond, base)
    if config.trials:
        answers['retrieval'] = timed('retrieval', retrieval, model, data.val, base, furthest, config.trials, config.seed, **how)
        answers['induction'] = timed('induction', induction, losses_of, data.vocab_size, data.tokenizer.separator, base, furthest,
                                     config.trials, config.seed)
    return answers, seconds
