"""What a table of positions looks like: pure functions of a (T, C) array, one row a position. See analyze.py.

Two conventions matter, and each function says which one it follows. Cosines are those of the rows as they are, as the
model adds them. Components and frequencies are those of the table less its mean row, by which no two positions differ.
"""
import numpy as np

LAGS = (1, 2, 4, 8, 16, 32)
CYCLES = np.arange(0.5, 10.01, 0.25)  # over the table; half ones too: a random walk's components are half cosines
FOLDS, PAIRS = 5, 512
MIN_ROWS = 16                         # below that, folds and components say nothing


def random_walk(rows, width, step, seed):
    """(rows, width): every row is the one before plus Gaussian noise of RMS norm `step`. Smooth, and nothing more."""
    steps = np.random.default_rng([seed, 1]).normal(size=(rows, width))
    return steps.cumsum(axis=0) * step / np.sqrt(width)


def usable(table, skip_rows):
    """The rows of a table that take part, float64. ValueError where fewer than 16 are left or one is not finite."""
    if len(table) - skip_rows < MIN_ROWS:
        raise ValueError(f'{len(table)} positions less skip_rows={skip_rows} are too few: it takes {MIN_ROWS}')
    bad = (~np.isfinite(table)).any(axis=1).sum()
    if bad:
        raise ValueError(f'{bad} of {len(table)} rows hold values that are not finite: the training has diverged')
    return np.asarray(table[skip_rows:], dtype=np.float64)


def step_size(table):
    """RMS distance of neighbouring rows."""
    return float(np.sqrt((np.diff(table, axis=0) ** 2).sum(axis=1).mean()))


def step_ratio(table, seed):
    """Mean distance of neighbouring rows over the same after shuffling them: 1 without order, near 0 where smooth."""
    def mean_step(rows):
        return np.linalg.norm(np.diff(rows, axis=0), axis=1).mean()
    return float(divide(mean_step(table), mean_step(np.random.default_rng([seed, 2]).permutation(table))))


def divide(a, b):
    """a/b, not a number where b is 0 (a table of zeros has no direction, no components)."""
    with np.errstate(divide='ignore', invalid='ignore'):
        return np.where(np.asarray(b) > 0, np.divide(a, b), np.nan)


# ---- cosines ---------------------------------------------------------------------------------------------------------

def cosine_gram(table):
    """(T, T) cosines between the rows, not centred."""
    unit = divide(table, np.linalg.norm(table, axis=1, keepdims=True))
    return unit @ unit.T


def lag_cosines(gram):
    """{lag: mean cosine of rows that far apart} for LAGS; nan where the table is too short."""
    return {lag: float(gram.diagonal(lag).mean()) if lag < len(gram) else np.nan for lag in LAGS}


def toeplitz_index(gram):
    """How far the cosine of rows i < j depends on the distance j - i alone: R^2 of the mean of each diagonal, 0 to 1.

    Exactly 1 for sinusoids. Independent rows give 2/T, the diagonals among the pairs. The main one takes no part."""
    i, j = np.triu_indices(len(gram), 1)
    cosine, lag = gram[i, j], j - i
    mean = np.bincount(lag, cosine)[1:] / np.bincount(lag)[1:]
    return float(1 - divide(((cosine - mean[lag - 1]) ** 2).sum(), ((cosine - cosine.mean()) ** 2).sum()))


# ---- components and frequencies --------------------------------------------------------------------------------------

def components(table, n=4):
    """(shares, curves): the share of variance of each principal component of the centred table, falling, (min(T, C),);
    and the first n of them against position, (T, n), each of RMS 1 and with its largest value positive."""
    u, s, _ = np.linalg.svd(table - table.mean(axis=0), full_matrices=False)
    largest = np.take_along_axis(u, np.abs(u).argmax(axis=0)[None], axis=0)
    return divide(s ** 2, (s ** 2).sum()), (u * np.sign(largest))[:, :n] * np.sqrt(len(u))


def sinusoid_fit(curve):
    """(R^2, cycles) of the best sinusoid a cos + b sin + c, by least squares, of 0.5 to 10 cycles in steps of 1/4."""
    best = 0.0, float(CYCLES[0])
    for cycles in CYCLES:
        angle = 2 * np.pi * cycles * np.arange(len(curve)) / len(curve)
        basis = np.stack((np.cos(angle), np.sin(angle), np.ones_like(angle)), axis=1)
        left = curve - basis @ np.linalg.lstsq(basis, curve, rcond=None)[0]
        best = max(best, (float(1 - divide((left ** 2).sum(), ((curve - curve.mean()) ** 2).sum())), float(cycles)))
    return best


def power_shares(table):
    """(T//2,) share of power at 1, 2, ... T//2 cycles over the table: |DFT|^2 down the columns, summed, no mean."""
    power = (np.abs(np.fft.rfft(table, axis=0)) ** 2).sum(axis=1)[1:]
    return divide(power, power.sum())


# ---- what a reader could tell from a row -----------------------------------------------------------------------------

def folds(rows, seed):
    """[(fitted, held out)] row numbers, ascending, of shuffled cross-validation."""
    order = np.random.default_rng([seed, 3]).permutation(rows)
    return [(np.sort(np.delete(order, np.s_[fold::FOLDS])), np.sort(order[fold::FOLDS])) for fold in range(FOLDS)]


def read_out_error(table, seed):
    """Mean |round(guess) - position|, in rows, of a linear read-out of the position from rows it was not fitted on.

    Ordinary least squares, 5 shuffled folds (Wang & Chen 2020); the ridge, 1e-8 of the mean variance, only picks the
    smallest solution where C exceeds the rows fitted on. Always guessing the middle gives T/4; a fit to noise, more."""
    position, errors = np.arange(len(table), dtype=float), []
    for fitted, held in folds(len(table), seed):
        mean = table[fitted].mean(axis=0)
        x, y = table[fitted] - mean, position[fitted] - position[fitted].mean()
        ridge = 1e-8 * (x ** 2).sum() / x.shape[1] or 1.0
        weights = np.linalg.solve(x.T @ x + ridge * np.eye(x.shape[1]), x.T @ y)
        guess = (table[held] - mean) @ weights + position[fitted].mean()
        errors.append(np.abs(guess.round() - position[held]))
    return float(np.concatenate(errors).mean())


def order_weights(difference):
    """Weights w (C,) of the logistic regression 'which row is later?' from p_j - p_i (N, C), j > i; penalty |w|^2 / 2.

    On [p_i; p_j], with every pair also swapped, symmetry makes it (-w; w) without a constant. Newton's method."""
    basis = None
    if difference.shape[1] > len(difference):  # w lies in the span of the pairs
        basis = np.linalg.qr(difference.T)[0]
        difference = difference @ basis
    w = np.zeros(difference.shape[1])
    for _ in range(50):
        wrong = 1 / (1 + np.exp(np.clip(difference @ w, -50, 50)))  # probability given to the wrong order
        hessian = (difference * (wrong * (1 - wrong))[:, None]).T @ difference + np.eye(len(w))
        step = np.linalg.solve(hessian, difference.T @ wrong - w)
        w += step
        if np.abs(step).max() <= 1e-4 * np.abs(w).max():
            break
    return w if basis is None else basis @ w


def order_error(table, seed):
    """Share of pairs put into the wrong order by a logistic regression on [p_i; p_j] (Wang & Chen 2020), at RMS 1.

    512 random pairs of four fifths of the rows are fitted, all pairs of the other fifth are judged, five times. As rows
    are held out, not pairs alone, a table without order gives 1/2, however wide it is."""
    table = np.nan_to_num(divide(table, np.sqrt((table ** 2).mean())))
    random, wrong, judged = np.random.default_rng([seed, 4]), 0, 0
    for fitted, held in folds(len(table), seed):
        i, j = np.triu_indices(len(fitted), 1)
        pairs = random.choice(len(i), min(PAIRS, len(i)), replace=False)
        w = order_weights(table[fitted[j[pairs]]] - table[fitted[i[pairs]]])
        i, j = np.triu_indices(len(held), 1)
        margin = (table[held[j]] - table[held[i]]) @ w
        wrong, judged = wrong + (margin < 0).sum() + (margin == 0).sum() / 2, judged + len(margin)
    return float(wrong / judged)


# ---- hidden states ---------------------------------------------------------------------------------------------------

def position_share(means, squares, n, skip_rows=0):
    """How much of the hidden states' variance is the mean effect of the position: (share, what noise alone would give).

    means (T, C), squares (T,): mean hidden state and mean square norm at each position over n windows. The second value
    is what n windows would show if positions did not differ."""
    means, squares = means[skip_rows:], squares[skip_rows:]
    overall = (means.mean(axis=0) ** 2).sum()
    total, between = squares.mean() - overall, (means ** 2).sum(axis=1).mean() - overall
    return float(divide(between, total)), float(divide(total - between, total * max(n - 1, 1)))


# ---- all of it -------------------------------------------------------------------------------------------------------

def measure(table, seed=0, skip_rows=0):
    """Every measure of a table (T, C) as plain values; nan where it has none. The norm of row 0 is told apart, and the
    first skip_rows rows take no part in the rest. ValueError: see usable()."""
    row0, table = np.linalg.norm(table[0]), usable(table, skip_rows)
    norms = np.linalg.norm(table, axis=1)
    gram, (shares, curves) = cosine_gram(table), components(table)
    fits = [sinusoid_fit(curve) if share > 1e-12 else (np.nan, np.nan) for share, curve in zip(shares, curves.T)]
    return {'norm_row0': float(row0), 'norm_median': float(np.median(norms)), 'norm_last': float(norms[-1]),
            **{f'cosine_lag{lag}': cosine for lag, cosine in lag_cosines(gram).items()},
            'step_ratio': step_ratio(table, seed), 'toeplitz': toeplitz_index(gram),
            **{f'pca_share{n}': float(shares[:n].sum()) for n in (1, 4, 12)},
            'pca_k90': int(np.searchsorted(shares.cumsum(), 0.9) + 1) if np.isfinite(shares).all() else np.nan,
            **{f'sinusoid_r2_pc{i}': r2 for i, (r2, _) in enumerate(fits, 1)},
            **{f'sinusoid_cycles_pc{i}': cycles for i, (_, cycles) in enumerate(fits, 1)},
            'power_10': float(power_shares(table)[:10].sum()),
            'read_out_error': read_out_error(table, seed), 'order_error': order_error(table, seed)}
