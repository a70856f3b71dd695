"""How a learned position table goes on past the rows that were trained: pure functions of (rows, columns) arrays.

A trained table is smooth and of low rank: a few series, one a principal component, make up most of it. Each way to
continue a series is a guess about what it is. Which guess, and how many components, is decided on rows held back from
the end of the table.
"""
import numpy as np

RANKS = (1, 2, 4, 8, 16, 32)


# ---- continuing series (n, r) by m rows ------------------------------------------------------------------------------

def go_on_cubic(series, m):
    """A cubic through the last quarter of each column, at least 8 rows."""
    n = len(series)
    last = min(n, max(8, n // 4))
    x = np.arange(n - last, n + m) / n
    weights = np.polyfit(x[:last], series[-last:], min(3, last - 1))
    return np.stack([np.polyval(column, x[last:]) for column in weights.T], axis=1)


def go_on_var(series, m):
    """A vector autoregression: z[t+1] = (z[t], 1) A by ridge regression, iterated. In the end it rests or swings."""
    past = np.append(series[:-1], np.ones((len(series) - 1, 1)), axis=1)
    gram = past.T @ past
    A = np.linalg.solve(gram + 1e-6 * np.trace(gram) / len(gram) * np.eye(len(gram)), past.T @ series[1:])
    rows = [series[-1]]
    for _ in range(m):
        rows.append(np.append(rows[-1], 1.0) @ A)
    return np.stack(rows[1:])


def go_on_sinusoid(series, m):
    """A constant and up to 8 sinusoids, but no more than columns, of the same frequencies in all of them.

    They are found one after the other, while each explains a tenth of what the others leave, and refined together by
    Gauss-Newton steps on the error that amplitudes cannot remove."""
    n, t = len(series), np.arange(len(series) + m) / len(series)

    def basis(turns):                                             # (n+m, 1+2k); turns: within the n rows, (k,)
        angle = 2 * np.pi * t[:, None] * turns
        return np.concatenate([np.ones((n + m, 1)), np.cos(angle), np.sin(angle)], axis=1)

    def fit(turns):
        B = basis(turns)
        weights = np.linalg.lstsq(B[:n], series, rcond=None)[0]
        rest = series - B[:n] @ weights
        return (rest ** 2).sum(), rest, turns, weights, B

    def refine(turns):
        found, k = fit(turns), len(turns)
        for _ in range(20):
            _, rest, turns, weights, B = found
            cos, sin, Q = B[:n, 1:1 + k].T[..., None], B[:n, 1 + k:].T[..., None], np.linalg.qr(B[:n])[0]
            slopes = 2 * np.pi * t[:n, None] * (weights[1 + k:, None] * cos - weights[1:1 + k, None] * sin)
            slopes = (slopes - Q @ (Q.T @ slopes)).reshape(k, -1)  # (k, n*r): how the fit moves with each frequency
            step = np.linalg.lstsq(slopes @ slopes.T, slopes @ rest.ravel(), rcond=1e-9)[0]
            trial = fit(np.clip(turns + np.clip(step, -0.2, 0.2), grid[0], n / 2))
            if not trial[0] < found[0]:
                break
            found = trial
        return found

    def add_one(turns):
        explained = ((spans.transpose(0, 2, 1) @ fit(turns)[1]) ** 2).sum(axis=(1, 2))
        return refine(np.append(turns, grid[explained.argmax()]))

    grid = np.arange(0.25, max(n / 4, 0.5), 0.25)                 # slower ones look like a line
    spans = np.stack([np.linalg.qr(basis(each[None])[:n])[0] for each in grid])  # (grid, n, 3)
    best = fit(np.empty(0))
    total = best[0]
    while best[0] > 1e-20 * total and len(best[2]) < min(series.shape[1], 8):
        found = add_one(best[2])
        for i in range(len(best[2])):                             # an early one may stand for two: look for each again
            found = min(found, add_one(np.delete(found[2], i)), key=lambda each: each[0])
        if found[0] > 0.9 * best[0]:
            break
        best = found
    _, _, _, weights, B = best
    return B[n:] @ weights


FITS = {'sinusoid': go_on_sinusoid, 'var': go_on_var, 'cubic': go_on_cubic}


# ---- continuing a table (n, C) by its principal components -----------------------------------------------------------

def components(table):
    """(mean, series, directions), largest first: series @ directions + mean = table[1:].

    Row 0 is left out: it is an outlier in trained tables, GPT-2's among them."""
    mean = table[1:].mean(axis=0)
    U, S, V = np.linalg.svd(table[1:] - mean, full_matrices=False)
    return mean, U * S, V


def low_rank(table, m, rank, fit, parts=None):
    """m more rows: the first `rank` components, continued by `fit`. parts: components(table), where they are at hand.

    A guess that explodes is cut back: no new row is longer than the longest old one but row 0."""
    mean, series, directions = parts or components(table)
    new = FITS[fit](series[:, :rank], m) @ directions[:rank] + mean
    norm, limit = np.linalg.norm(new, axis=1, keepdims=True), np.linalg.norm(table[1:], axis=1).max()
    return new * np.minimum(1, limit / np.maximum(norm, 1e-30))


def row_error(guess, true):
    """Median over rows of |guess - true| / |true|."""
    size = np.maximum(np.linalg.norm(true, axis=1), 1e-30)
    return float(np.median(np.linalg.norm(guess - true, axis=1) / size))


def choose_low_rank(table, m, rank=None, fit=None):
    """The rank and fit, where they are left open, that predict the last min(m, n/3) rows from those before best: of
    those within 5 % of the least error, the lowest rank.

    Returns (rank, fit, {(rank, fit) or 'hold' or 'tile': row_error}, number of rows held back). Raises ValueError where
    the table is too small for that."""
    n, width = table.shape
    held = min(m, n // 3)
    known, true = table[:n - held], table[n - held:]
    most = min(len(known) - 3, width)
    ranks = [each for each in ([rank] if rank else RANKS) if each <= most]
    if not ranks:
        raise ValueError(f'a table of {n} rows and {width} columns, {held} rows held back for the test, is too small '
                         f'for rank={rank or RANKS[0]}: use ' + (f'at most {most}' if most > 0 else '--method=hold'))
    parts = components(known)
    errors = {(each, name): row_error(low_rank(known, held, each, name, parts), true)
              for name in ([fit] if fit else FITS) for each in ranks}
    enough = 1.05 * min(errors.values()) + 0.001
    best = min((pair for pair in errors if errors[pair] <= enough), key=lambda pair: (pair[0], errors[pair]))
    errors |= {name: row_error(go_on(known, held), true) for name, go_on in (('hold', hold_last), ('tile', repeat_all))}
    return *best, errors, held


# ---- other ways ------------------------------------------------------------------------------------------------------

def hold_last(table, m):
    return np.repeat(table[-1:], m, axis=0)


def repeat_all(table, m):
    return table[np.arange(len(table), len(table) + m) % len(table)]


def stretch(table, n_rows):
    """The whole table at n_rows positions, evenly spaced between its rows: first on first, last on last."""
    at = np.linspace(0, len(table) - 1, n_rows)
    return np.stack([np.interp(at, np.arange(len(table)), column) for column in table.T], axis=1)
