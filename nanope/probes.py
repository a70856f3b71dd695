"""What a model can take from its context, asked with rows made for it: key-value retrieval and induction.

All draws follow from seeds (ints) and the length alone, so models are asked the same questions, whatever their scheme.
"""
import math

import numpy as np
import torch

from nanope.evaluate import finite, mean_and_stderr

PAIRS, KEY = 4, 8  # retrieval: pairs to choose from, tokens of a key; a value is one token


def key_value_rows(file, n, trials, seeds):
    """Questions of n tokens: rows (trials, n), candidates (trials, PAIRS), and which one is right (trials,). None where n is too short.

    A row is PAIRS pairs of a key and its value, then text, then one of the keys again; what comes next? Keys and text are pieces of the
    file, values distinct tokens of it by frequency. Which key has which value, and which is asked for, are independent draws: whoever
    does not look a key up is right in 1 of PAIRS cases, whatever else it knows."""
    filler = n - PAIRS * (KEY + 1) - KEY
    tokens, counts = np.unique(file.rows([0], min(file.tokens, 10**6)).numpy(), return_counts=True)
    if filler < 0 or len(tokens) < PAIRS or file.tokens < n:
        return None
    random = np.random.default_rng([*seeds, n])
    starts = [random.choice(file.tokens - KEY + 1, PAIRS, replace=False) for _ in range(trials)]
    keys = file.rows(np.concatenate(starts), KEY).view(trials, PAIRS, KEY)
    values = np.stack([random.choice(tokens, PAIRS, replace=False, p=counts / counts.sum()) for _ in range(trials)])
    values, right = torch.from_numpy(values), torch.from_numpy(random.integers(0, PAIRS, trials))
    text = file.rows(random.integers(0, file.tokens - filler + 1, trials), filler)
    pairs = torch.cat((keys, values[:, :, None]), dim=2).view(trials, PAIRS * (KEY + 1))
    return torch.cat((pairs, text, keys[torch.arange(trials), right]), dim=1), values, right


@torch.no_grad()
def retrieval(model, file, lengths, furthest, trials, seeds, autocast, batch_size):
    """Share of key_value_rows answered rightly, by length: [{'length', 'accuracy', 'stderr', 'chance'}]; stderr is binomial.

    No answer (None) past `furthest`, where a learned table ends, or where a question does not fit."""
    device, results = next(model.parameters()).device, []
    for n in lengths:
        rows = key_value_rows(file, n, trials, seeds) if n <= furthest else None
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


def induction(losses_of, n_tokens, separator, lengths, furthest, trials, seeds):
    """How much a model gains from having seen a sequence before: [{'length', 'distance', 'score', 'stderr', 'first_minus_second'}].

    `distance` random tokens stand twice; each of n_tokens ids but the separator is as likely. score: the mean loss on the second copy
    after other random tokens, less that after the first copy, in nats: same targets, same positions. first_minus_second is the usual
    score, which a drift of the loss with the position moves too. The first token takes no part."""
    results = []
    for n in lengths:
        distance = n // 2
        result = dict.fromkeys(('score', 'stderr', 'first_minus_second'))
        if distance > 1 and n <= furthest:
            draws = np.random.default_rng([*seeds, n]).integers(0, n_tokens - 1, (trials + 1, distance))
            random = torch.from_numpy(draws + (draws >= separator))
            once, other = random[:-1], random[1:]
            twice = losses_of(torch.cat((once, once), dim=1))     # (trials, 2 distance - 1)
            unseen = losses_of(torch.cat((other, once), dim=1))
            score, stderr = mean_and_stderr((unseen - twice)[:, distance:].mean(axis=1), np.ones(trials))
            usual = float(twice[:, :distance - 1].mean() - twice[:, distance:].mean())
            result = {'score': score, 'stderr': finite(stderr), 'first_minus_second': usual}
        results.append({'length': n, 'distance': distance, **result})
    return results
