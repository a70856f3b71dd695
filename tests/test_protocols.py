"""What the models are asked, against models whose answers are known by construction, and real ones asked token by token."""
import contextlib
import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn import functional as F

from nanope import probes, protocols
from nanope.evaluate import evaluate, token_losses, windows
from nanope.loader import TokenFile
from small import build

BASE = 16
LENGTHS = [8, 16, 20, 24, 32, 64]
PLAIN = dict(autocast=contextlib.nullcontext)


class Fake(torch.nn.Module):
    """A model given by function(idx (B, T)) -> logits (B, T, V), or by losses(idx, targets) -> (B, T)."""

    def __init__(self, function=None, losses=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.function, self.losses = function, losses
        self.seen = []                                            # (B, T) of every call

    def forward(self, idx, targets=None, reduction='none', last_only=False):
        self.seen.append(tuple(idx.shape))
        if self.losses:
            return self.losses(idx, targets)
        logits = self.function(idx)
        if targets is None:
            return logits[:, -1:] if last_only else logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction='none').view(targets.shape)


def asking(model, batch_size=7):
    return lambda rows: token_losses(model, rows, batch_size=batch_size, **PLAIN)


@pytest.fixture
def file(tmp_path):
    return token_file(tmp_path, np.random.default_rng(0).integers(0, 20, 1000))


@pytest.fixture
def counting(tmp_path):
    """The tokens 0, 1, 2, ...: a target tells where it stands."""
    return token_file(tmp_path, np.arange(1000))


def token_file(folder, ids):
    ids.astype('<u2').tofile(folder / 'ids.bin')
    return TokenFile(folder / 'ids.bin', 'uint16', len(ids), int(ids.max()) + 1)


def position_loss(idx, targets):
    return torch.arange(idx.size(1), dtype=torch.float64).expand(idx.shape)


# ---- the same targets ------------------------------------------------------------------------------------------------

def test_lengths():
    assert protocols.context_lengths(BASE) == LENGTHS and protocols.context_lengths(128) == [64, 128, 160, 192, 256, 512]
    assert protocols.context_lengths(1) == [1, 2, 4] and protocols.context_lengths(2) == [1, 2, 3, 4, 8]


@given(base=st.integers(1, 40), tokens=st.integers(2, 400), max_tokens=st.integers(1, 500))
@settings(max_examples=60, deadline=None)
def test_the_same_targets_at_every_length_with_exactly_that_context(tmp_path_factory, base, tokens, max_tokens):
    """Every target is scored once at each length, none twice, in a window of exactly `length` inputs that ends with its span."""
    base = min(base, tokens - 1)
    file, asked = token_file(tmp_path_factory.mktemp('tokens'), np.arange(tokens)), {}

    def losses_of(rows):
        asked[rows.size(1) - 1] = rows
        return np.zeros((len(rows), rows.size(1) - 1))

    results = protocols.same_targets(losses_of, file, base, math.inf, max_tokens)
    span = max(base // 4, 1)
    fitting = [n for n in protocols.context_lengths(base) if n < tokens]
    assert list(asked) == fitting and base in fitting
    assert [result['length'] for result in results if result['loss'] is not None] == fitting
    targets = {n: rows[:, -span:] for n, rows in asked.items()}
    assert all(torch.equal(each, targets[base]) for each in targets.values())
    assert all(torch.equal(rows, rows[:, :1] + torch.arange(n + 1)) for n, rows in asked.items())  # one run of the file each
    flat = targets[base].flatten().tolist()
    assert len(set(flat)) == len(flat) and flat == sorted(flat) and (flat[-1] == tokens - 1 or len(flat) == span)
    room = (tokens - 1 - max(fitting)) // span + 1
    assert len(flat) == min(max(max_tokens // span, 1), room) * span


def test_a_bigram_model_needs_no_context(file):
    """Its loss on a target depends on the token before alone: equal at every length, and equal to the table it was made from."""
    table = torch.randn(20, 20, generator=torch.Generator().manual_seed(3)).log_softmax(-1)
    results = protocols.same_targets(asking(Fake(lambda idx: table[idx])), file, BASE, math.inf, 200)
    ids = file.rows([0], 1000)[0]
    last = np.linspace(64, 999, 50).astype(int)
    expected = [[-table[ids[t - 1], ids[t]].item() for t in range(end - 3, end + 1)] for end in last]
    for result in results:
        assert result['loss'] == pytest.approx(np.mean(expected), abs=1e-6) and result['change'] == pytest.approx(0, abs=1e-7)
        assert result['stderr'] == pytest.approx(np.std(np.mean(expected, axis=1), ddof=1) / math.sqrt(50), abs=1e-6)
        assert result['change_stderr'] == pytest.approx(0, abs=1e-7)


def test_a_loss_that_grows_with_the_position(counting):
    """The span's targets stand at the last four positions of the window: n - 2.5 on average."""
    for result in protocols.same_targets(asking(Fake(losses=position_loss)), counting, BASE, math.inf, 200):
        assert result['loss'] == pytest.approx(result['length'] - 2.5) and result['change'] == pytest.approx(result['length'] - BASE)


def test_change_is_judged_on_paired_spans(counting):
    """Spans differ by hundreds of nats, the change is a tenth each: its error is none."""
    model = Fake(losses=lambda idx, targets: targets.double() + idx.size(1) / 10)
    for result in protocols.same_targets(asking(model), counting, BASE, math.inf, 400):
        assert result['change'] == pytest.approx((result['length'] - BASE) / 10)
        assert result['change_stderr'] < 1e-9 and result['stderr'] > 20


@pytest.mark.parametrize('rows, answered', [(16, 2), (20, 3), (32, 5), (40, 5), (64, 6)])
def test_a_learned_table_has_no_answer_beyond_its_last_row(counting, rows, answered):
    model = Fake(losses=position_loss)
    results = protocols.same_targets(asking(model), counting, BASE, rows, 100)
    assert [result['loss'] is not None for result in results] == [True] * answered + [False] * (6 - answered)
    assert max(length for _, length in model.seen) <= rows
    assert all(result[key] is None for result in results[answered:] for key in ('loss', 'stderr', 'change', 'change_stderr'))


@pytest.mark.parametrize('wpe', ['learned', 'sinusoidal', 'rope', 'none', 'alibi'])
def test_a_real_model_asked_one_target_at_a_time(file, wpe):
    model = build(wpe, block_size=BASE)
    furthest = protocols.reach(model.config)
    results = protocols.same_targets(asking(model), file, BASE, furthest, 12)
    ids = file.rows([0], 1000)[0]
    for result in results:
        n = result['length']
        if n > furthest:
            assert wpe == 'learned' and result['loss'] is None
            continue
        losses = []
        for end in np.linspace(64, 999, 3).astype(int):           # inputs end - n .. end - 1
            for t in range(end - 3, end + 1):
                with torch.no_grad():
                    losses.append(F.cross_entropy(model(ids[None, end - n:t])[0, -1:], ids[t:t + 1]).item())
        assert result['loss'] == pytest.approx(np.mean(losses), abs=1e-5)


# ---- by position, sliding --------------------------------------------------------------------------------------------

@pytest.mark.parametrize('n', [1, 2, 3, 4, 7, 8, 128, 1000, 1024])
def test_buckets_cover_every_position_once(n):
    ranges = protocols.buckets(n)
    assert [p for low, high in ranges for p in range(low, high + 1)] == list(range(1, n + 1))
    assert all(high <= 2 * low for low, high in ranges)


@pytest.mark.parametrize('base, longest', [(16, 64), (16, 20), (16, 17), (16, None), (1, 4), (3, 12)])
def test_loss_by_position(base, longest):
    """A loss of p at position p: each range shows the mean of its positions; ranges meet, at the trained length too."""
    def at(n):
        return np.tile(np.arange(n, dtype=float), (5, 1))
    results = protocols.by_position(at(base), at(longest) if longest else None, base)
    assert results[0]['from'] == 0 and results[-1]['to'] == (longest or base) and base in [part['to'] for part in results]
    assert all(a['to'] == b['from'] for a, b in zip(results, results[1:]))
    for part in results:
        assert part['loss'] == pytest.approx((part['from'] + part['to'] - 1) / 2) and part['stderr'] == pytest.approx(0, abs=1e-9)


def test_targets_that_do_not_count_move_no_mean():
    losses = np.tile(np.arange(4.0), (3, 1))
    losses[2, :3] = np.nan                                        # the last window counts one target
    losses[0, 3] += 3
    assert [part['loss'] for part in protocols.by_position(losses, None, 4)] == [0, 1, pytest.approx((2 + 6 + 2 + 3 + 3) / 5)]


@given(tokens=st.integers(2, 300), base=st.integers(1, 40), stride=st.integers(1, 40))
@settings(deadline=None)
def test_a_sliding_window_counts_every_target_once(tokens, base, stride):
    """Each with at least base - stride tokens of context, but for the first window and the start of the last."""
    base = min(base, tokens - 1)
    stride = min(stride, base)
    starts, first = windows(tokens, base, None, stride)
    counted = [start + 1 + t for start, skip in zip(starts, first) for t in range(skip, base)]
    assert counted == list(range(1, tokens)) and starts[0] == 0 and first[0] == 0
    assert all(skip >= base - stride for skip in first[1:])


@pytest.mark.parametrize('max_tokens', [1, 5, 33, 100, 10**6])
def test_few_sliding_windows_are_evenly_spaced(max_tokens):
    starts, first = windows(100, 16, max_tokens, 4)
    assert len(set(starts)) == len(starts) and starts[0] == 0 and starts.max() + 17 <= 100
    assert (16 - first[1:] <= 4).all() and (max_tokens < 10**6 or (16 - first).sum() == 99)


def test_sliding_against_end_to_end(counting):
    """A loss of -p at position p, stride 4: counted targets stand at the last four positions, -13.5; end to end they stood anywhere."""
    model = Fake(losses=lambda idx, targets: -position_loss(idx, targets))
    end_to_end = -((np.arange(1000) - 1) % 16).astype(float)
    found = protocols.sliding(asking(model), counting, BASE, 4, None, end_to_end)
    counted = np.r_[-np.arange(16.0), np.tile(-np.arange(12.0, 16), 245), -13, -14, -15]
    assert found['tokens'] == 999 == len(counted) and found['loss'] == pytest.approx(counted.mean())
    assert found['change'] == pytest.approx(counted.mean() - end_to_end[1:].mean()) and found['change_stderr'] > 0
    end_to_end[500] = np.nan                                      # a target that was not scored end to end
    partly = protocols.sliding(asking(model), counting, BASE, 4, None, end_to_end)
    assert partly['change'] is None and partly['change_stderr'] is None and partly['loss'] == found['loss']


# ---- retrieval -------------------------------------------------------------------------------------------------------

def copying(idx):
    """What followed when the last KEY tokens stood there before: the first such place, else nothing in particular."""
    logits = torch.zeros(len(idx), 1, 20)
    for row, tokens in enumerate(idx.tolist()):
        key = tokens[-probes.KEY:]
        for t in range(len(tokens) - probes.KEY):
            if tokens[t:t + probes.KEY] == key:
                logits[row, 0, tokens[t + probes.KEY]] = 9.0
                break
    return logits


def frequent(idx):
    """How often a token occurs in the row."""
    return torch.stack([torch.bincount(row, minlength=20) for row in idx])[:, None].float()


def after_first_key(idx):
    """Whatever is asked, the value of the first pair."""
    return F.one_hot(idx[:, probes.KEY], 20)[:, None].float()


def ask_retrieval(function, file, trials=400, **settings):
    given = {'lengths': [16, 44, 64], 'furthest': math.inf, 'seeds': (0, 1), 'batch_size': 64, **settings}
    return probes.retrieval(Fake(function), file, trials=trials, **given, **PLAIN)


def test_who_looks_a_key_up_is_always_right(file):
    short, *others = ask_retrieval(copying, file, trials=60)
    assert short == {'length': 16, 'accuracy': None, 'stderr': None, 'chance': 0.25}  # no room for four pairs
    assert [part['accuracy'] for part in others] == [1, 1] and [part['stderr'] for part in others] == [0, 0]


def test_equal_scores_are_chance_exactly(file):
    for part in ask_retrieval(lambda idx: torch.zeros(len(idx), 1, 20), file)[1:]:
        assert part['accuracy'] == part['chance'] == 0.25 and part['stderr'] == pytest.approx(math.sqrt(0.25 * 0.75 / 400))


@pytest.mark.parametrize('function', [frequent, after_first_key])
def test_whoever_does_not_look_it_up_is_right_by_chance(file, function):
    for part in ask_retrieval(function, file, trials=2000)[1:]:
        assert abs(part['accuracy'] - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 2000)


def test_questions(file):
    """Four pairs, text, and the key of the right value, of exactly n tokens; the same for the same seeds."""
    rows, values, right = probes.key_value_rows(file, 60, 50, (3, 4))
    again, other = probes.key_value_rows(file, 60, 50, (3, 4)), probes.key_value_rows(file, 60, 50, (3, 5))
    assert rows.shape == (50, 60) and torch.equal(rows, again[0]) and torch.equal(right, again[2]) and not torch.equal(rows, other[0])
    text = ' '.join(map(str, file.rows([0], 1000)[0].tolist()))
    for row, candidates, i in zip(rows.tolist(), values.tolist(), right.tolist()):
        pairs = [row[9 * k:9 * k + 9] for k in range(4)]
        assert [pair[-1] for pair in pairs] == candidates and len(set(candidates)) == 4
        assert row[-8:] == pairs[i][:8] and all(' '.join(map(str, part)) in text for part in (row[36:-8], *(pair[:8] for pair in pairs)))
    assert set(right.tolist()) == {0, 1, 2, 3}


def test_questions_that_cannot_be_asked(file, tmp_path):
    assert probes.key_value_rows(file, 43, 5, (0,)) is None and probes.key_value_rows(file, 44, 5, (0,))[0].shape == (5, 44)
    assert probes.key_value_rows(file, 1001, 5, (0,)) is None    # more than there is
    assert [part['accuracy'] is None for part in ask_retrieval(copying, file, trials=4, furthest=50)] == [True, False, True]
    few = token_file(tmp_path, np.arange(300) % 3)
    assert probes.key_value_rows(few, 60, 5, (0,)) is None       # three tokens, four values


# ---- induction -------------------------------------------------------------------------------------------------------

def induction(model, lengths=(8, 32), furthest=math.inf, trials=20, n_tokens=1000):
    return probes.induction(asking(model), n_tokens, n_tokens - 1, lengths, furthest, trials, (0,))


def continues(idx, n_tokens):
    """20 for the token that followed the one at hand when it stood there before."""
    logits = torch.zeros(*idx.shape, n_tokens)
    for row, tokens in enumerate(idx.tolist()):
        after = {}
        for t, token in enumerate(tokens):
            if token in after:
                logits[row, t, after[token]] = 20.0
            if t + 1 < len(tokens):
                after[token] = tokens[t + 1]
    return logits


def test_who_has_seen_the_sequence_gains_all_of_it():
    """Nearly ln 10,000, the loss of a uniform guess, less that of a logit of 20 against zeros; rarely a token stands twice by chance."""
    for part in induction(Fake(partial(continues, n_tokens=10**4)), n_tokens=10**4):
        assert part['distance'] == part['length'] // 2
        assert part['score'] == pytest.approx(math.log(10**4), abs=0.2)
        assert part['first_minus_second'] == pytest.approx(part['score'], abs=0.2) and part['stderr'] < 0.1


def test_who_remembers_nothing_gains_nothing():
    for part in induction(Fake(lambda idx: torch.zeros(*idx.shape, 1000))):
        assert part['score'] == pytest.approx(0, abs=1e-6) and part['stderr'] == pytest.approx(0, abs=1e-6)


def test_a_drift_with_the_position_is_no_induction():
    """The usual score takes it for one: it compares other positions."""
    for part in induction(Fake(losses=lambda idx, targets: -position_loss(idx, targets) / 10)):
        assert part['score'] == 0 and part['first_minus_second'] == pytest.approx(part['distance'] / 10)


def test_sequences(counting):
    """Twice the same tokens, never the separator; not asked beyond a learned table, nor of one token."""
    rows = []

    def losses_of(batch):
        rows.append(batch)
        return np.zeros((len(batch), batch.size(1) - 1))

    parts = probes.induction(losses_of, 5, 4, [2, 8, 16], 8, 200, (1, 2))
    assert [part['score'] is None for part in parts] == [True, False, True] and len(rows) == 2
    twice, unseen = rows
    assert twice.shape == (200, 8) and torch.equal(twice[:, :4], twice[:, 4:]) and torch.equal(unseen[:, 4:], twice[:, 4:])
    assert set(twice.flatten().tolist()) == {0, 1, 2, 3} and (unseen[:, :4] != unseen[:, 4:]).any(dim=1).float().mean() > 0.9
    separator_inside = probes.induction(losses_of, 5, 2, [8], 8, 200, (1, 2))
    assert separator_inside[0]['score'] == 0 and set(rows[-1].flatten().tolist()) == {0, 1, 3, 4}


# ---- all of it -------------------------------------------------------------------------------------------------------

def ask(model, file, **changes):
    config = SimpleNamespace(**{'eval_tokens': None, 'context_tokens': 100, 'stride': None, 'trials': 5, 'batch_size': 8, **changes})
    data = SimpleNamespace(val=file, vocab_size=20, tokenizer=SimpleNamespace(separator=19))
    return protocols.ask(model, data, np.ones(101, dtype=np.int64), BASE, config, (0, 1), contextlib.nullcontext)


@pytest.mark.parametrize('wpe', ['learned', 'rope'])
def test_all_protocols_of_one_model(file, wpe):
    model = build(wpe, block_size=BASE)
    answers, (sums, counts), seconds = ask(model, file)
    plain = evaluate(model, file, np.ones(101, dtype=np.int64), block_size=BASE, batch_size=3, **PLAIN)
    assert answers['val_loss'] == pytest.approx(plain['loss'], abs=1e-6) and answers['val_tokens'] == counts.sum() == 999
    assert sums.sum() / counts.sum() == pytest.approx(plain['loss'], abs=1e-6)
    assert answers['position'][-1]['to'] == (BASE if wpe == 'learned' else 4 * BASE)
    assert [part['length'] for part in answers['context']] == [part['length'] for part in answers['retrieval']] == LENGTHS
    assert [part['score'] is None for part in answers['induction']] == [wpe == 'learned' and n > BASE for n in LENGTHS]
    assert set(seconds) == set(protocols.describe(BASE, SimpleNamespace(eval_tokens=None, context_tokens=1, stride=None, trials=1))) - \
        ({'by position'} if wpe == 'learned' else set())


def test_what_is_turned_off_is_not_asked(file):
    answers, _, seconds = ask(build('rope', block_size=BASE), file, context_tokens=0, trials=0)
    assert list(seconds) == ['non-overlapping'] and answers['sliding'] is None
    assert answers['context'] == answers['retrieval'] == answers['induction'] == []
    assert answers['position'][-1]['to'] == BASE


def test_batches_do_not_matter(file):
    """Nor does a question asked before: no state."""
    model = build('rope', block_size=BASE, rope_scaling='dynamic', rope_factor=4.0)
    (one, _, _), (other, _, _) = (ask(model, file, batch_size=batch_size) for batch_size in (1, 64))

    def numbers(x):
        parts = x.values() if isinstance(x, dict) else x
        return [n for part in parts for n in numbers(part)] if isinstance(x, (dict, list)) else [x]
    assert numbers(one) == pytest.approx(numbers(other), abs=2e-5, nan_ok=True)
