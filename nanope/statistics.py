"""What a handful of seeds can say: means, their 95 % intervals, and differences between runs of the same seed.

Intervals are Student's t over seeds, which takes the seeds' values as normal and independent: with three seeds the interval is 2.5 standard
deviations wide on either side, and with one there is none. A bootstrap of so few values would be far too narrow. The quantile is exact for
every whole number of degrees of freedom, found by bisection of the closed form of Abramowitz and Stegun 1964, 26.7.3 and 26.7.4.
"""
import math
from functools import cache

import numpy as np


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
    """{'mean', 'ci95': [low, high], 'n'} of values over seeds; ci95 is None for a single one, mean too for none or where one is None."""
    n = len(values)
    if n == 0 or any(value is None for value in values):
        return {'mean': None, 'ci95': None, 'n': n}
    mean = float(np.mean(values))
    if n == 1:
        return {'mean': mean, 'ci95': None, 'n': 1}
    half = t_quantile(n - 1) * float(np.std(values, ddof=1)) / math.sqrt(n)
    return {'mean': mean, 'ci95': [mean - half, mean + half], 'n': n}
