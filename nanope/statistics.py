"""What a handful of seeds can say: means, their 95 % intervals, and differences between runs of the same seed.

Intervals are Student's t over seeds, which takes the seeds' values as normal and independent: with three seeds the interval reaches 2.5
standard deviations to either side, and with one there is none. A bootstrap of so few values would be far too narrow. The quantile is exact
for every whole number of degrees of freedom, found by bisection of the closed form of Abramowitz and Stegun 1964, 26.7.3 and 26.7.4.
"""
import math
from functools import cache

import numpy as np

from nanope.evaluate import finite, mean_and_stderr


def t_probability(t, df):
    """P(|T| < t) of Student's t with df (int, at least 1) degrees of freedom."""
    angle = math.atan(t / math.sqrt(df))
    odd = df % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for k in range(odd, df - 1, 2):                               # cos + 2/3 cos^3 + 2*4/(3*5) cos^5 ...; or 1 + 1/2 cos^2 + ...
        total += term
        term *= (k + 1) / (k + 2) * math.cos(angle) ** 2
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


@cache
def t_quantile(df, confidence=0.95):
    """The t with P(|T| < t) = confidence: 12.706 for df=1, 4.303 for 2, 1.960 without end."""
    low, high = 0.0, 1.0
    while t_probability(high, df) < confidence:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_probability(middle, df) < confidence else (low, middle)
    return high


def summary(values):
    """(mean, [low, high] of the 95 % interval) of values over seeds; no interval for a single one, nothing where a value is None."""
    if not values or any(value is None for value in values):
        return None, None
    mean, n = float(np.mean(values)), len(values)
    if n == 1:
        return mean, None
    half = t_quantile(n - 1) * float(np.std(values, ddof=1)) / math.sqrt(n)
    return mean, [mean - half, mean + half]


def over_seeds(name, values):
    mean, interval = summary(values)
    return {f'{name}_mean': mean, f'{name}_ci95': interval}


# ---- from runs to schemes --------------------------------------------------------------------------------------------

def by_scheme(rows):
    """{label: rows of report.json that differ in their seed alone}. Runs that not even a seed tells apart are not averaged."""
    groups, labelled = {}, {}
    for row in rows:
        settings = ', '.join(f'{name}={value}' for name, value in row['settings'].items())
        label = ' + '.join(filter(None, (row['wpe'], row['extension']))) + (f' ({settings})' if settings else '')
        groups.setdefault(label, []).append(row)
    for label, members in groups.items():
        if len({row['seed'] for row in members}) == len(members):
            labelled[label] = members
        else:
            labelled |= {f'{label}, {row["name"]}': [row] for row in members}
    return labelled


def paired(members, reference):
    """[(row, row of reference)] that share their seed: the same first weights, but for the table, and the same batches."""
    of_seed = {row['seed']: row for row in reference}
    return [(row, of_seed[row['seed']]) for row in members if row['seed'] in of_seed]


def minus(a, b):
    return None if a is None or b is None else a - b


def difference(pairs, label, windows):
    """Validation loss less that of the reference, seed by seed. window_stderr, of each pair, is another thing: how well these two models
    are told apart by the windows that both were scored on, and says nothing about other seeds."""
    values, each = [], []
    for row, other in pairs:
        (sums, counts), (other_sums, _) = windows[row['run']], windows[other['run']]
        stderr = mean_and_stderr(sums - other_sums, counts)[1]
        values.append(row['val_loss'] - other['val_loss'])
        each.append({'seed': row['seed'], 'difference': values[-1], 'window_stderr': finite(stderr)})
    mean, interval = summary(values)
    return {'reference': label, 'mean': mean, 'ci95': interval, 'pairs': each}


def across(members, protocol, **errors):
    """A protocol's list of results over the seeds of a scheme: of each name in errors the mean and its interval or, where a single run
    has none, the run's own standard error. errors: {name: name of its standard error}."""
    results = []
    for parts in zip(*(row[protocol] for row in members)):
        result = {key: parts[0][key] for key in ('length', 'distance', 'chance', 'from', 'to') if key in parts[0]}
        for name, error in errors.items():
            result |= over_seeds(name, [part[name] for part in parts])
            result |= {f'{name}_stderr': parts[0][error] if len(parts) == 1 else None}
        results.append(result)
    return results


def summarise(rows, windows):
    """The schemes of report.json from its runs. windows: {run: (sums, counts) of its losses in each window, the same for all}.

    Differences are to the learned table or, where none was trained, to the first scheme."""
    groups, schemes = by_scheme(rows), []
    learned = [label for label, (row, *_) in groups.items() if row['wpe'] == 'learned' and not row['extension']]
    reference = (learned or list(groups))[0]
    for label, members in groups.items():
        first, pairs = members[0], paired(members, groups[reference])
        context = across(members, 'context', loss='stderr', change='change_stderr')
        for i, part in enumerate(context):
            part |= over_seeds('difference', [minus(a['context'][i]['loss'], b['context'][i]['loss']) for a, b in pairs])
        schemes.append({
            'scheme': label, **{key: first[key] for key in ('wpe', 'extension', 'settings', 'params', 'wpe_params')},
            'runs': [row['run'] for row in members], 'n_seeds': len(members),
            **over_seeds('val_loss', [row['val_loss'] for row in members]),
            **over_seeds('bits_per_byte', [row['bits_per_byte'] for row in members]),
            **over_seeds('sliding', [row['sliding']['loss'] for row in members if row['sliding']]),
            **over_seeds('sliding_change', [row['sliding']['change'] for row in members if row['sliding']]),
            'difference': None if label == reference else difference(pairs, reference, windows),
            'context': context, 'position': across(members, 'position', loss='stderr'),
            'retrieval': across(members, 'retrieval', accuracy='stderr'), 'induction': across(members, 'induction', score='stderr')})
    return schemes
