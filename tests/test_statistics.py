"""Intervals over seeds against tables and simulation, pairing by seed, and which runs are one scheme."""
import math

import numpy as np
import pytest

from nanope.statistics import across, by_scheme, difference, summarise, summary, t_probability, t_quantile


@pytest.mark.parametrize('df, quantile', [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (5, 2.5706), (6, 2.4469), (9, 2.2622),
                                          (10, 2.2281), (29, 2.0452), (30, 2.0423), (100, 1.9840), (1000, 1.9623), (10**5, 1.9600)])
def test_quantiles_of_student_t_are_those_of_the_tables(df, quantile):
    assert t_quantile(df) == pytest.approx(quantile, abs=6e-5)
    assert t_probability(t_quantile(df), df) == pytest.approx(0.95, abs=1e-12)


def test_other_confidences():
    assert t_quantile(5, 0.99) == pytest.approx(4.0321, abs=6e-5) and t_quantile(4, 0.5) == pytest.approx(0.7407, abs=6e-5)
    assert t_probability(0, 7) == 0 and t_probability(1, 1) == pytest.approx(0.5)  # Cauchy: half of it within 1


@pytest.mark.parametrize('n', [2, 3, 5])
def test_ninety_five_of_a_hundred_intervals_hold_the_mean(n):
    draws = np.random.default_rng(n).normal(2.0, 0.3, (4000, n))
    held = [low <= 2.0 <= high for _, (low, high) in map(summary, draws.tolist())]
    assert np.mean(held) == pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / 4000))


def test_summary_by_hand():
    mean, (low, high) = summary([1.0, 2.0, 3.0])
    assert mean == 2 and [mean - low, high - mean] == pytest.approx([4.30265 / math.sqrt(3)] * 2, abs=1e-5)
    assert summary([1.5]) == (1.5, None) and summary([2.0, 2.0]) == (2.0, [2.0, 2.0])
    assert summary([]) == summary([1.0, None]) == (None, None)    # a missing value is not left out of a mean


# ---- schemes ---------------------------------------------------------------------------------------------------------

def run(wpe, seed, loss, extension=None, settings={}, context=()):
    return {'run': f'{wpe}_{extension}_{seed}_{loss}', 'name': f'{wpe}_{seed}_{loss}', 'wpe': wpe, 'extension': extension, 'seed': seed,
            'settings': settings, 'val_loss': loss, 'bits_per_byte': None, 'params': 10, 'wpe_params': 2, 'sliding': None, 'retrieval': [],
            'induction': [], 'position': [],
            'context': [{'length': n, 'loss': x, 'stderr': 0.5, 'change': None, 'change_stderr': None} for n, x in context]}


def windows(rows, offsets=(0.0,)):
    """Losses of two targets in each window that lie `offsets` above the run's loss."""
    return {row['run']: (2 * (row['val_loss'] + np.asarray(offsets)), np.full(len(offsets), 2)) for row in rows}


def test_a_scheme_is_what_differs_in_its_seed_alone():
    rows = [run('rope', 1, 2.0), run('learned', 1, 2.1), run('rope', 2, 2.2), run('rope', 1, 2.3, 'yarn ×2'),
            run('rope', 1, 2.4, settings={'lr': 1})]
    sizes = {label: len(members) for label, members in by_scheme(rows).items()}
    assert sizes == {'rope': 2, 'learned': 1, 'rope + yarn ×2': 1, 'rope (lr=1)': 1}
    twice = [run('rope', 1, 2.0), run('rope', 1, 2.5)]
    assert [len(members) for members in by_scheme(twice).values()] == [1, 1]  # the same seed twice is no second seed
    assert list(by_scheme(twice)) == ['rope, rope_1_2.0', 'rope, rope_1_2.5']


def test_differences_are_paired_by_seed():
    """Seeds move both schemes by whole nats, the scheme by 0.1: the pairs see it, the means alone do not."""
    rows = [run('learned', seed, seed + 0.1) for seed in (1, 2, 3)]
    rows += [run('rope', seed, seed + noise) for seed, noise in ((3, .001), (1, 0), (2, -.001))]
    learned, rope = summarise(rows, windows(rows))
    assert learned['difference'] is None and rope['difference']['reference'] == 'learned'
    assert rope['difference']['mean'] == pytest.approx(-0.1)
    low, high = rope['difference']['ci95']
    assert -0.11 < low < high < -0.09 and [pair['seed'] for pair in rope['difference']['pairs']] == [3, 1, 2]
    low, high = rope['val_loss_ci95']
    assert low < 0 and high > 4 and rope['val_loss_mean'] == pytest.approx(2.0) and rope['n_seeds'] == 3


def test_seeds_without_a_partner_take_no_part():
    rows = [run('learned', 1, 2.0), run('rope', 1, 1.9), run('rope', 2, 9.0), run('none', 5, 3.0)]
    _, rope, none = summarise(rows, windows(rows))
    assert rope['difference']['mean'] == pytest.approx(-0.1) and rope['difference']['ci95'] is None and rope['n_seeds'] == 2
    assert none['difference']['mean'] is None and none['difference']['pairs'] == []


def test_windows_tell_two_models_apart_where_seeds_cannot():
    """One pair: no interval over seeds, but the standard error of paired windows, in which the text's own spread cancels."""
    a, b = run('rope', 1, 2.0), run('learned', 1, 2.1)
    spread = np.array([-1.0, 0.0, 1.0, 5.0, -5.0])
    counts, noise = np.full(5, 2), [.1, -.1, 0, 0, 0]
    found = difference([(a, b)], 'learned', {a['run']: (2 * (2.0 + spread), counts), b['run']: (2 * (2.1 + spread) + noise, counts)})
    pair, = found['pairs']
    assert found['ci95'] is None and pair['difference'] == pytest.approx(-0.1)
    assert pair['window_stderr'] == pytest.approx(np.std([.05, -.05, 0, 0, 0], ddof=1) / math.sqrt(5))
    alone, = difference([(a, b)], 'learned', windows([a, b]))['pairs']
    assert alone['window_stderr'] is None                         # a single window has no spread


def test_the_reference_is_learned_or_the_first():
    rows = [run('rope', 1, 2.0), run('learned', 1, 2.1, 'hold ×2'), run('learned', 1, 2.2)]
    found = [scheme['difference'] for scheme in summarise(rows, windows(rows))]
    assert [each and each['reference'] for each in found] == ['learned', 'learned', None]
    assert [scheme['difference'] is None for scheme in summarise(rows[:1], windows(rows))] == [True]
    louder = [run('sinusoidal', 1, 2.0), run('sinusoidal', 1, 2.1, settings={'wpe_scale': 1.0})]
    assert summarise(louder, windows(louder))[1]['difference']['reference'] == 'sinusoidal'


def test_contexts_over_seeds():
    """Where one seed has no answer the scheme has none; a single run brings its own standard error."""
    members = [run('learned', 1, 2.0, context=[(4, 1.0), (8, None)]), run('learned', 2, 2.0, context=[(4, 3.0), (8, 2.0)])]
    near, far = across(members, 'context', loss='stderr')
    assert near['length'] == 4 and near['loss_mean'] == 2 and near['loss_stderr'] is None and near['loss_ci95'][0] < 0
    assert far == {'length': 8, 'loss_mean': None, 'loss_ci95': None, 'loss_stderr': None}
    alone, _ = across(members[:1], 'context', loss='stderr')
    assert alone == {'length': 4, 'loss_mean': 1.0, 'loss_ci95': None, 'loss_stderr': 0.5}
    rows = members + [run('rope', 1, 2.0, context=[(4, 1.5), (8, 1.5)])]
    _, rope = summarise(rows, windows(rows))
    assert [part['difference_mean'] for part in rope['context']] == [0.5, None]
