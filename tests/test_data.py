"""Token files: what is refused, which batches come, and that evaluation counts every token once."""
import contextlib
import hashlib
import json
import math
import os

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch.nn import functional as F

import train as script
from nanope import loader
from nanope.evaluate import evaluate, mean_and_stderr, windows
from nanope.files import sampled_sha256
from nanope.loader import Data, TokenFile
from runs import train
from small import build


GONE = object()  # instead of a value: the field is removed


def rewrite(folder, **changes):
    """Change fields of meta.json; 'train.tokens' stands for meta['train']['tokens']."""
    meta = json.loads((folder / 'meta.json').read_text('utf-8'))
    for name, value in changes.items():
        owner, _, key = name.rpartition('.')
        fields = meta[owner] if owner else meta
        if value is GONE:
            del fields[key]
        else:
            fields[key] = value
    (folder / 'meta.json').write_text(json.dumps(meta), 'utf-8')


def put_id(folder, split, index, value, max_id):
    """Put a token id at index into a split, with the sha256 of the new file and max_id in meta.json."""
    ids = np.fromfile(folder / f'{split}.bin', '<u2')
    ids[index] = value
    ids.tofile(folder / f'{split}.bin')
    rewrite(folder, **{f'{split}.sha256': hashlib.sha256(ids.tobytes()).hexdigest(), f'{split}.max_id': max_id})


def meta(**changes):
    return lambda folder: rewrite(folder, **{name.replace('__', '.'): value for name, value in changes.items()})


def bytes_of(name, change):
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


REFUSED = {
    'empty train': (bytes_of('train.bin', lambda b: b''), 'train.bin has 0 bytes'),
    'empty val': (bytes_of('val.bin', lambda b: b''), 'val.bin has 0 bytes'),
    'odd bytes': (bytes_of('train.bin', lambda b: b + b'x'), 'train.bin has .* bytes, meta.json says'),
    'a token more': (bytes_of('val.bin', lambda b: b + b'\0\0'), 'val.bin has .* bytes, meta.json says'),
    'a token less': (bytes_of('val.bin', lambda b: b[:-2]), 'val.bin has .* bytes, meta.json says'),
    'one bit': (bytes_of('val.bin', lambda b: b[:9] + bytes([b[9] ^ 4]) + b[10:]), 'val.bin was changed since it was prepared'),
    'first id': (lambda folder: put_id(folder, 'train', 0, 999, 999), 'train.bin holds token id 999, the vocabulary has'),
    'last id': (lambda folder: put_id(folder, 'train', -1, 999, 999), 'train.bin holds token id 999, the vocabulary has'),
    'id in val only': (lambda folder: put_id(folder, 'val', 5, 999, 999), 'val.bin holds token id 999, the vocabulary has'),
    'no train.bin': (lambda folder: (folder / 'train.bin').unlink(), 'train.bin is missing'),
    'no meta.json': (lambda folder: (folder / 'meta.json').unlink(), 'no prepared data'),
    'no folder': (lambda folder: folder.rename(folder.parent / 'elsewhere'), 'no prepared data'),
    'not JSON': (bytes_of('meta.json', lambda b: b[:-9]), 'meta.json is not JSON'),
    'not UTF-8': (bytes_of('meta.json', lambda b: b'\xff' + b), 'meta.json is not JSON'),
    'endless JSON': (bytes_of('meta.json', lambda b: b'[' * 100_000), 'meta.json is not JSON'),
    'a pickle': (bytes_of('meta.json', lambda b: b"cos\nsystem\n(S'touch sentinel'\ntR."), 'meta.json is not JSON'),
    'a list': (bytes_of('meta.json', lambda b: b'[1]'), 'meta.json is not a JSON object'),
    'newer format': (meta(format=2), 'format 2, this version reads format 1'),
    'other dtype': (meta(dtype='float32'), "dtype 'float32' is neither"),
    'wider dtype': (meta(dtype='uint32'), 'train.bin has .* bytes, meta.json says'),
    'other vocab_size': (meta(vocab_size=7), 'vocab_size 7, but its tokenizer has'),
    'vocab_size in words': (meta(vocab_size='7'), 'vocab_size 7, but its tokenizer has'),
    'unknown tokenizer': (meta(tokenizer={'kind': 'word'}), 'unknown tokenizer'),
    'no tokenizer': (meta(tokenizer=[1]), 'not a meta.json of nanoPE'),
    'split is a list': (meta(train=[1]), 'not a meta.json of nanoPE'),
    **{f'tokens={value}': (meta(train__tokens=value), 'not a meta.json of nanoPE') for value in ('5', 5.0, None, True, [5])},
    **{f'max_id={value}': (meta(val__max_id=value), 'not a meta.json of nanoPE') for value in ('5', math.nan, None)},
    'sha256 is none': (meta(val__sha256=None), 'val.bin was changed'),
    **{f'without {name}': (meta(**{name: GONE}), 'not a meta.json of nanoPE')
       for name in ('format', 'dtype', 'vocab_size', 'tokenizer', 'train', 'val', 'train__tokens', 'val__max_id', 'val__sha256')},
}


@pytest.mark.parametrize('case', REFUSED)
def test_bad_data_is_refused(place, case):
    """One line that says which file, what is wrong with it, and what to run; nothing in the files is executed."""
    damage, message = REFUSED[case]
    damage(place / 'data/tiny')
    with contextlib.chdir(place), pytest.raises(ValueError, match=message) as error:
        Data('data/tiny')
    assert str(error.value).endswith('; run: python prepare.py tiny --input=PATH') and '\n' not in str(error.value)
    assert not (place / 'sentinel').exists()


@pytest.mark.parametrize('dataset', ['', '.', '..', 'a/b', 'gpt2'])
def test_no_name_of_a_dataset(place, dataset):
    """prepare.py makes no such folder, so it is not what to run."""
    with contextlib.chdir(place), pytest.raises(ValueError, match='dataset must be the name of a folder') as error:
        Data(os.path.join('data', dataset))
    assert 'run: python' not in str(error.value)


def test_nanogpt_pickle_is_not_read(place):
    """A folder as nanoGPT leaves it, with meta.pkl: it is no prepared data, and the pickle is not opened."""
    (place / 'data/tiny/meta.json').unlink()
    (place / 'data/tiny/meta.pkl').write_bytes(b"cos\nsystem\n(S'touch sentinel'\ntR.")
    done = train(place)
    assert done.code == 2 and 'no prepared data' in done.text and not (place / 'sentinel').exists()


def test_lying_max_id_is_caught_in_the_batch(place):
    """Of files above CHECK_BYTES not everything is hashed: an id outside the vocabulary must still never reach the model."""
    put_id(place / 'data/tiny', 'val', 5, 999, max_id=3)
    data = Data(place / 'data/tiny')
    data.val.rows([6], 8)
    with pytest.raises(ValueError, match='val.bin: token id 999 is outside the vocabulary'):
        data.val.rows([0], 8)


@pytest.mark.parametrize('length', [1, 2**16, 2**16 + 1, 2**22 - 7])
def test_blocks_reach_from_the_first_byte_to_the_last(tmp_path, length):
    """By hand; the digest sees both ends, and a file that is missing a tenth of itself wherever that is."""
    path, content = tmp_path / 'x', np.random.default_rng(1).bytes(length)
    path.write_bytes(content)
    starts = [max(length - 2**16, 0) * n // 63 for n in range(64)]
    digest = sampled_sha256(path)
    assert digest == hashlib.sha256(b''.join(content[start:start + 2**16] for start in starts)).hexdigest()
    for at, n in [(0, 1), (length - 1, 1), *((length * tenth // 10, length // 10) for tenth in range(10))]:
        path.write_bytes(content[:at] + bytes(255 ^ byte for byte in content[at:at + n]) + content[at + n:])
        assert n == 0 or sampled_sha256(path) != digest


@pytest.mark.parametrize('split', ['train', 'val'])
def test_large_files_are_told_apart_by_blocks(place, monkeypatch, split):
    """A file of the right size and with sound ids, but of which the end never arrived; data prepared without that digest still opens."""
    monkeypatch.setattr(loader, 'CHECK_BYTES', 100), monkeypatch.setattr(loader, 'sha256', None)
    folder = place / 'data/tiny'
    Data(folder)
    ids = np.fromfile(folder / f'{split}.bin', '<u2')
    ids[-len(ids) // 10:] = 0
    ids.tofile(folder / f'{split}.bin')
    with pytest.raises(ValueError, match=f'{split}.bin was changed since it was prepared'):
        Data(folder)
    rewrite(folder, **{f'{split}.sampled_sha256': GONE})
    Data(folder)


def test_file_cut_while_open(place):
    """A short read must not be spread over the row."""
    data = Data(place / 'data/tiny')
    os.truncate(place / 'data/tiny/val.bin', 2)
    with pytest.raises(ValueError, match='val.bin has become shorter'):
        data.val.rows([0], 8)


def test_too_short_for_a_row(place):
    """block_size + 1 tokens are enough, block_size are not, whichever split is short."""
    data = Data(place / 'data/tiny')
    data.check_length(data.val.tokens - 1)
    with pytest.raises(ValueError, match=rf'val.bin has {data.val.tokens} tokens, block_size={data.val.tokens} needs at least '
                                         rf'{data.val.tokens + 1}: use more text or --block_size={data.val.tokens - 1}$'):
        data.check_length(data.val.tokens)


def shorten(place, tokens):
    for split in ('train', 'val'):
        ids = (place / f'data/tiny/{split}.bin').read_bytes()[:2 * tokens]
        (place / f'data/tiny/{split}.bin').write_bytes(ids)
        rewrite(place / 'data/tiny', **{f'{split}.sha256': hashlib.sha256(ids).hexdigest(), f'{split}.tokens': tokens})


@pytest.mark.parametrize('tokens, code', [(9, 0), (8, 2), (1, 2), (0, 2)])
def test_shortest_data_trains(place, monkeypatch, tokens, code):
    """Exactly block_size + 1 = 9 tokens train; fewer are refused before a model is built."""
    shorten(place, tokens)
    if code:
        monkeypatch.setattr(script, 'GPT', None)
    done = train(place)
    assert done.code == code and ('needs at least 9' in done.text) == bool(code), done.text


def test_digest_tells_data_apart(place):
    """The digest that a checkpoint keeps depends on each file and on the vocabulary."""
    digests = {Data(place / 'data/tiny').digest}
    for split in ('train', 'val'):
        put_id(place / 'data/tiny', split, 3, 1, max_id=5)
        digests.add(Data(place / 'data/tiny').digest)
    chars = json.loads((place / 'data/tiny/meta.json').read_text('utf-8'))['tokenizer']['chars']
    rewrite(place / 'data/tiny', tokenizer={'kind': 'char', 'chars': chars[:-1] + '\U0010ffff'})
    digests.add(Data(place / 'data/tiny').digest)
    assert len(digests) == 4


# ---- batches ------------------------------------------------------------------------------------------------------------------------

@pytest.fixture
def counting(tmp_path):
    """A file of the tokens 0, 1, 2, ..., 49, which tell where a row was taken."""
    np.arange(50, dtype='<u2').tofile(tmp_path / 'counting.bin')
    return TokenFile(tmp_path / 'counting.bin', 'uint16', 50, 50)


def test_batches_are_windows(counting):
    """Rows are runs of the file, targets are the inputs one on; int64, as the embedding wants them."""
    x, y = counting.batch(seed=1, step=2, n_rows=6, block_size=8)
    assert x.shape == y.shape == (6, 8) and x.dtype == torch.int64
    assert torch.equal(x, x[:, :1] + torch.arange(8)) and torch.equal(y, x + 1)


def test_batches_depend_on_seed_and_step_alone(counting):
    """Whatever was drawn before, and whatever the global generators hold; no two steps or seeds share a batch."""
    drawn = {(seed, step): counting.batch(seed, step, 6, 8)[0] for seed in (1, 2) for step in (0, 1, 2, 2**31)}
    for (seed, step), x in reversed(drawn.items()):
        torch.manual_seed(step), np.random.seed(seed)
        assert torch.equal(counting.batch(seed, step, 6, 8)[0], x)
        assert torch.equal(counting.batch(seed, step, 4, 8)[0], x[:4])  # rows do not depend on how many there are
    assert len({tuple(x[:, 0].tolist()) for x in drawn.values()}) == len(drawn)


def test_batches_cover_the_file_evenly(counting):
    """Chi-squared over the 42 places where a row of 9 tokens fits: the first and the last are drawn as often as the others."""
    starts = torch.cat([counting.batch(7, step, 64, 8)[0][:, 0] for step in range(200)])
    counts = np.bincount(starts, minlength=42)
    assert len(counts) == 42
    assert ((counts - 12800 / 42) ** 2 / (12800 / 42)).sum() < 41 + 4 * math.sqrt(2 * 41)


@pytest.mark.skipif(not os.path.exists('/proc/self/statm'), reason='reads /proc')
def test_memory_stays_flat(tmp_path):
    """A memory map grows by every page that was touched, up to the size of the file; reads do not."""
    with open(tmp_path / 'big.bin', 'wb') as file:
        file.truncate(2**28)
    big = TokenFile(tmp_path / 'big.bin', 'uint16', 2**27, 50)

    def resident():
        with open('/proc/self/statm') as file:
            return int(file.read().split()[1]) * os.sysconf('SC_PAGE_SIZE')

    big.batch(1, 0, 64, 1024)
    before = resident()
    for step in range(50):
        big.batch(1, step, 64, 1024)
    assert resident() - before < 2**23


# ---- evaluation ---------------------------------------------------------------------------------------------------------------------

@given(tokens=st.integers(2, 400), block_size=st.integers(1, 60), max_tokens=st.none() | st.integers(1, 500))
def test_windows_count_every_token_once(tokens, block_size, max_tokens):
    """All targets of the file exactly once or, with max_tokens, whole windows of that many, none twice, from the first to the last."""
    block_size = min(block_size, tokens - 1)
    starts, first = windows(tokens, block_size, max_tokens)
    assert starts.min() >= 0 and starts.max() + block_size + 1 <= tokens
    counted = sorted(start + 1 + t for start, skip in zip(starts, first) for t in range(skip, block_size))
    whole = (tokens - 1) // block_size
    if max_tokens is None or max_tokens >= whole * block_size:
        assert counted == list(range(1, tokens))
    else:
        assert len(set(counted)) == len(counted) == max(max_tokens // block_size, 1) * block_size
        assert starts[0] == 0 and (len(starts) == 1 or starts[-1] == (whole - 1) * block_size)


class Known(torch.nn.Module):
    """A model whose loss is known: a tenth of the target's id."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, idx, targets, reduction):
        assert not self.training and reduction == 'none' and torch.equal(idx[:, 1:], targets[:, :-1])
        return targets / 10


def score(file, byte_lengths=np.ones(1000, dtype=np.int64), block_size=8, model=None, **settings):
    return evaluate(model or Known(), file, byte_lengths, block_size=block_size, autocast=contextlib.nullcontext, **settings)


@pytest.mark.parametrize('block_size', [1, 7, 8, 49])
@pytest.mark.parametrize('batch_size', [1, 3, 100])
def test_loss_is_the_mean_over_all_targets(counting, block_size, batch_size):
    """Of tokens 0..49 the targets are 1..49: mean 25, times 0.1; whether or not windows of block_size divide them evenly."""
    result = score(counting, block_size=block_size, batch_size=batch_size)
    assert result['loss'] == pytest.approx(2.5) and result['tokens'] == 49
    assert result['bits_per_byte'] == pytest.approx(2.5 / math.log(2))


def test_position_means_and_stderr_closed_form(counting):
    """Seven whole windows: position t has targets t+1, t+8, ...; the standard error is that of the mean of seven window means."""
    result = score(counting, block_size=7)
    assert result['windows'] == 7
    assert result['position'] == pytest.approx([(np.arange(7) * 7 + t + 1).mean() / 10 for t in range(7)])
    assert result['stderr'] == pytest.approx((np.arange(7) * 0.7).std(ddof=1) / math.sqrt(7))


def test_stderr_of_uneven_windows_agrees_with_bootstrap():
    """Windows of unequal count: the ratio estimator's error against the spread of 4,000 resampled means."""
    random = np.random.default_rng(3)
    counts = random.integers(1, 9, 200)
    sums = counts * random.normal(2, 0.5, 200)
    draws = random.integers(0, 200, (4000, 200))
    mean, stderr = mean_and_stderr(sums, counts)
    assert mean == pytest.approx(sums.sum() / counts.sum())
    assert stderr == pytest.approx((sums[draws].sum(axis=1) / counts[draws].sum(axis=1)).std(), rel=0.05)


def test_max_tokens_takes_whole_windows(counting):
    """20 tokens are two windows of 8: the first, targets 1..8, and the last whole one, targets 41..48."""
    result = score(counting, max_tokens=20)
    assert (result['tokens'], result['windows']) == (16, 2)
    assert result['loss'] == pytest.approx((np.arange(1, 9).sum() + np.arange(41, 49).sum()) / 160)
    assert score(counting, max_tokens=49)['loss'] == score(counting)['loss']


def test_bits_per_byte_by_hand(place):
    """Total loss over the bytes of the text: characters of two to four bytes, a separator that is no text."""
    data = Data(place / 'data/tiny')
    ids = data.val.rows([0], data.val.tokens)[0, 1:]
    text = data.tokenizer.decode(ids).removesuffix('<|endoftext|>')
    assert len(text.encode()) > len(text) == len(ids) - 1
    result = score(data.val, data.tokenizer.byte_lengths())
    assert result['bits_per_byte'] == pytest.approx(ids.sum().item() / 10 / math.log(2) / len(text.encode()))
    for split in ('train', 'val'):  # and byte_lengths() agrees with what prepare.py counted
        file, counted = getattr(data, split), data.meta[split]
        assert data.tokenizer.byte_lengths()[file.rows([0], file.tokens)].sum() == counted['bytes']


@pytest.mark.parametrize('wpe', ['learned', 'rope'])
def test_real_model_scored_naively(counting, wpe):
    """The same loss as token by token with nothing shared: batches, modes and dropout do not enter. Training mode comes back."""
    model = build(wpe, block_size=8, dropout=0.3).train()
    expected, (starts, first) = [], windows(50, 8)
    model.eval()
    for start, skip in zip(starts, first):
        row = counting.rows([start], 9)[0]
        for t in range(skip, 8):
            expected.append(F.cross_entropy(model(row[None, :t + 1])[0, -1:], row[t + 1:t + 2]).item())
    model.train()
    for batch_size in (1, 4, 7):
        assert score(counting, model=model, batch_size=batch_size)['loss'] == pytest.approx(np.mean(expected), abs=1e-5)
    assert model.training and len(expected) == 49


def test_stop_is_heard_between_batches(counting):
    """None, after the batch that was running, with the model's mode put back."""
    asked, model = [], Known()
    assert score(counting, model=model, batch_size=1, stop=lambda: len(asked) > 1 or asked.append(1)) is None
    assert len(asked) == 2 and model.training
