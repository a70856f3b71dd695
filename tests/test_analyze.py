"""Measures of position tables: known values, laws, independent computations; analyze.py on runs and folders."""
import contextlib
import json
import math
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

import analyze
from model import GPT, GPTConfig, sinusoidal_table
from nanope import checkpoint, tables
from nanope.loader import Data
from runs import train


@pytest.fixture
def undrawn(monkeypatch):
    """Pictures take longest; where they are not the point, they are left out."""
    monkeypatch.setattr(analyze, 'draw', lambda *_: None)


def sinusoids(rows, width):
    return sinusoidal_table(0, rows, width).double().numpy()


def iid(rows, width, seed=0):
    return np.random.default_rng(seed).normal(0, 0.02, (rows, width))


def walk(rows=256, width=128):
    """Drawn apart from tables.random_walk: the control from which the known values were taken."""
    random = np.random.default_rng(0)
    random.normal(size=(rows, width))
    return random.normal(size=(rows, width)).cumsum(axis=0)


def r2(table):
    return [tables.sinusoid_fit(curve)[0] for curve in tables.components(table)[1].T]


def toeplitz(table):
    return tables.toeplitz_index(tables.cosine_gram(table))


# ---- known values ----------------------------------------------------------------------------------------------------

def test_known_values_at_the_size_of_gpt2():
    """Sinusoids and independent rows, 1024 x 768: each figure to the digits in which it is known."""
    for table, top, k90, cosine, power, step in (
            (sinusoids(1024, 768), (0.130, 0.296, 0.460), 137, 0.9734, 0.535, 0.203),
            (iid(1024, 768), (0.005, 0.018, 0.051), 446, 0.0, 0.019, 1.0)):
        shares = tables.components(table)[0].cumsum()
        assert shares[[0, 3, 11]] == pytest.approx(top, abs=6e-4)
        assert abs(np.searchsorted(shares, 0.9) + 1 - k90) <= 1
        assert tables.lag_cosines(tables.cosine_gram(table))[1] == pytest.approx(cosine, abs=5e-5 if cosine else 4e-3)
        assert tables.power_shares(table)[:10].sum() == pytest.approx(power, abs=1e-3)
        assert tables.step_ratio(table, 0) == pytest.approx(step, abs=3e-3)


def test_known_read_out_errors_at_the_size_of_gpt2():
    assert tables.read_out_error(sinusoids(1024, 768), 0) == 0
    assert tables.read_out_error(iid(1024, 768), 0) == pytest.approx(973, abs=120)  # that much varies by draw


@pytest.mark.parametrize('table, shares, fits, index', [
    (sinusoids(256, 128), (0.17, 0.10, 0.07, 0.05), (1, 0.99, 0.96, 0.98), 1.000),
    (iid(256, 128), (0.02, 0.02, 0.02, 0.02), (0.03, 0.03, 0.03, 0.03), 0.01),
    (walk(), (0.62, 0.16, 0.06, 0.04), (1, 0.98, 0.97, 0.98), 0.62)], ids=['sinusoidal', 'iid', 'walk'])
def test_known_values_of_the_controls(table, shares, fits, index):
    """256 x 128, to two digits (of the fits of noise to 0.01)."""
    assert tables.components(table)[0][:4] == pytest.approx(shares, abs=0.006)
    assert r2(table) == pytest.approx(fits, abs=0.011 if max(fits) < 0.1 else 0.006)
    assert toeplitz(table) == pytest.approx(index, abs=0.006 if index < 1 else 1e-9)


def test_a_smooth_stationary_table_differs_from_a_walk_in_the_toeplitz_index():
    noise = np.random.default_rng(0).normal(size=(256 + 144, 128))
    bell = np.exp(-0.5 * (np.arange(-72, 73) / 18) ** 2)
    smooth = np.stack([np.convolve(column, bell, 'valid') for column in noise.T], axis=1)
    assert min(r2(walk())) > 0.9 and r2(smooth)[0] > 0.9          # components do not tell them apart
    assert toeplitz(smooth) > 0.93 and toeplitz(walk()) < 0.7


@pytest.mark.parametrize('block_size, head_size, unfinished, of',
                         [(128, 32, 10, 16), (256, 32, 9, 16), (1024, 64, 14, 32)])
def test_known_counts_of_unfinished_turns(block_size, head_size, unfinished, of):
    config = GPTConfig(block_size=block_size, n_head=2, n_embd=2 * head_size, wpe='rope')
    turns = analyze.unfinished_turns(config)
    assert (turns['unfinished'], turns['frequencies'], turns['unfinished_share']) == (unfinished, of, unfinished / of)
    assert all(length > block_size for length in turns['unfinished_wavelengths'])
    assert turns['unfinished_wavelengths'][-1] == pytest.approx(2 * math.pi * 10000 ** ((head_size - 2) / head_size))


# ---- laws ------------------------------------------------------------------------------------------------------------

def test_the_random_walk():
    table = tables.random_walk(400, 400, 0.3, 1)
    assert tables.step_size(table) == pytest.approx(0.3, rel=0.02)
    share = tables.components(table)[0][0]
    assert share == pytest.approx(6 / math.pi ** 2, abs=0.06)     # Antognini & Sohl-Dickstein 2018
    assert (tables.random_walk(20, 4, 1.0, 1) == tables.random_walk(20, 4, 1.0, 1)).all()
    assert (tables.random_walk(20, 4, 1.0, 1) != tables.random_walk(20, 4, 1.0, 2)).all()


def test_measures_do_not_depend_on_scale_or_on_the_order_of_columns():
    table = walk(64, 32)
    reference = tables.measure(table, 1)
    for other in (table * 1e-3, table[:, ::-1]):
        for name, value in tables.measure(other, 1).items():
            assert value == pytest.approx(reference[name], abs=1e-6) or name.startswith('norm'), name


def test_a_shuffled_table_has_the_same_components_and_no_order():
    table = sinusoids(128, 64)
    before, after = tables.measure(table), tables.measure(np.random.default_rng(0).permutation(table))
    for name in ('pca_share4', 'pca_k90', 'norm_median'):
        assert after[name] == pytest.approx(before[name])
    assert after['step_ratio'] > 0.9 and after['toeplitz'] < 0.1 and after['read_out_error'] > 20
    assert after['order_error'] == pytest.approx(0.5, abs=0.15)


def test_sinusoid_fit_finds_a_sinusoid():
    for cycles in (0.5, 2.25, 10):
        curve = 3 * np.sin(2 * np.pi * cycles * np.arange(100) / 100 + 1) + 5
        assert tables.sinusoid_fit(curve) == (pytest.approx(1), cycles)


def test_power_is_found_at_its_frequency():
    table = np.sin(2 * np.pi * 7 * np.arange(64) / 64)[:, None] * np.ones(3) + 9
    assert tables.power_shares(table)[6] == pytest.approx(1) and len(tables.power_shares(table)) == 32


def test_a_position_that_is_a_column_is_read_out():
    table = np.concatenate((np.arange(60)[:, None] / 60, iid(60, 5)), axis=1)
    assert tables.read_out_error(table, 0) == 0 and tables.order_error(table, 0) == 0
    wide = iid(64, 200)                                           # wide enough to memorise every row it is fitted on
    assert tables.order_error(wide, 0) == pytest.approx(0.5, abs=0.1) and tables.read_out_error(wide, 0) > 12


def test_order_weights_are_those_of_logistic_regression_on_both_orders():
    """Against torch, on the pairs side by side, in both orders, with a constant; more pairs than columns, and fewer."""
    for pairs, width in ((40, 6), (10, 24)):
        random = np.random.default_rng(0)
        first, second = random.normal(size=(pairs, width)), random.normal(size=(pairs, width)) + 0.3
        x = torch.from_numpy(np.concatenate((np.hstack((first, second)), np.hstack((second, first)))))
        y = torch.cat((torch.ones(pairs), torch.zeros(pairs))).double()
        w, b = (torch.zeros(n, dtype=torch.float64, requires_grad=True) for n in (2 * width, 1))
        solver = torch.optim.LBFGS([w, b], max_iter=200, tolerance_grad=1e-9, line_search_fn='strong_wolfe')

        def loss():  # of each pair twice, so the penalty counts twice: |w|^2 / 2 of the half is |(-w; w)|^2 / 2 of both
            solver.zero_grad()
            value = F.binary_cross_entropy_with_logits(x @ w + b, y, reduction='sum') + w.square().sum() / 2
            value.backward()
            return value

        solver.step(loss)
        w, own = w.detach().numpy(), tables.order_weights(second - first)
        assert abs(b.item()) < 1e-6 and w[width:] == pytest.approx(-w[:width], abs=1e-6)
        assert own == pytest.approx(w[width:], abs=1e-4)


def test_position_share_of_a_known_effect():
    random = np.random.default_rng(0)
    effect, n = random.normal(size=(50, 8)), 400
    for size in (1.0, 0.0):
        x = size * effect + random.normal(size=(n, 50, 8)) + 7     # windows, positions, width
        share, noise = tables.position_share(x.mean(axis=0), (x ** 2).sum(axis=2).mean(axis=0), n)
        assert noise == pytest.approx((1 - size / 2) / n, rel=0.1)
        assert share == pytest.approx(size / 2, abs=0.02) if size else share == pytest.approx(noise, rel=0.2)


def test_what_a_table_does_not_have_is_nan_without_a_warning(tmp_path):
    zeros, constant, sparse = np.zeros((40, 8)), np.ones((40, 8)), np.eye(40)[:, :8]
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        for table in (zeros, constant, sparse):
            found = tables.measure(table)
            assert math.isfinite(found['pca_share1']) == math.isfinite(found['pca_k90']) == (table is sparse)
        path = tmp_path / 'table.png'
        content, text = analyze.beside_controls('learned', constant, zeros, analyze.AnalyzeConfig(), 'a table', path)
    assert json.loads(json.dumps(content, allow_nan=False)) == content and content['initial']['toeplitz'] is None
    assert text.startswith('a table\n') and path.stat().st_size > 10000
    with pytest.raises(ValueError, match='a table: every row is zero'):
        analyze.beside_controls('learned', zeros, zeros, analyze.AnalyzeConfig(), 'a table', path)


def test_rows_that_are_skipped_take_no_part():
    table = walk(64, 16)
    odd = np.concatenate((np.full((1, 16), 100.0), table))
    found, reference = tables.measure(odd, 0, skip_rows=1), tables.measure(table)
    assert found.pop('norm_row0') == 400 and reference.pop('norm_row0') and found == reference


def test_bad_tables():
    with pytest.raises(ValueError, match='20 positions less skip_rows=8 are too few: it takes 16'):
        tables.measure(iid(20, 4), skip_rows=8)
    with pytest.raises(ValueError, match='1 of 20 rows hold values that are not finite'):
        tables.measure(np.where(np.arange(20)[:, None] == 3, np.inf, iid(20, 4)))


# ---- hidden states ---------------------------------------------------------------------------------------------------

def test_position_effects_are_means_over_windows(place):
    data = Data(place / 'data/tiny')
    model = GPT(GPTConfig(block_size=16, vocab_size=data.vocab_size, n_layer=2, n_head=2, n_embd=8, wpe='none')).eval()
    config = analyze.AnalyzeConfig(eval_tokens=10 ** 9, batch_size=7)
    means, squares, n = analyze.position_effects(model, data.val, config)
    assert means.shape == (2, 16, 8) and squares.shape == (2, 16) and n == -(-(data.val.tokens - 1) // 16)
    starts = [*range(0, data.val.tokens - 16, 16)] + [data.val.tokens - 17] * bool((data.val.tokens - 1) % 16)
    with torch.no_grad():
        x = model.transformer.wte(data.val.rows(starts, 16))
        for mean, square, block in zip(means, squares, model.transformer.h):
            x = block(x)
            assert mean == pytest.approx(x.double().mean(0).numpy(), abs=1e-6)
            assert square == pytest.approx(x.double().square().sum(2).mean(0).numpy(), abs=1e-6)
    assert not any(block._forward_hooks for block in model.transformer.h)


# ---- the script ------------------------------------------------------------------------------------------------------

def analyse(place, *argv):
    with contextlib.chdir(place):
        assert not analyze.main(list(argv))


def strict(text):
    return json.loads(text, parse_constant=lambda word: pytest.fail(f'{word} is not JSON'))


def test_a_learned_run(place, capsys, monkeypatch):
    assert train(place, wpe='learned', block_size=32, max_iters=2, seed=5).code == 0
    analyse(place, 'out/a')
    out = capsys.readouterr().out
    for words in ('position table, 32 × 16', 'Toeplitz index', 'random walk', 'hidden states, last block', 'block 1: '):
        assert words in out
    folder = place / 'out/a/analysis'
    assert sorted(path.name for path in folder.iterdir()) == ['analysis.json', 'hidden.png', 'table.png']
    report = strict((folder / 'analysis.json').read_text())
    assert report['wpe'] == 'learned' and report['checkpoint'] == 2 and [*report['table']] == [
        'learned', 'initial', 'random walk', 'sinusoidal']
    found = checkpoint.load(place / 'out/a')
    own = found.tensors('model')['transformer.wpe.weight'].double().numpy()
    initial = GPT(checkpoint.model_config(found), seed=5).transformer.wpe.weight.detach().double().numpy()
    for name, table in (('learned', own), ('initial', initial)):
        for key, value in tables.measure(table, 1337).items():
            assert report['table'][name][key] == pytest.approx(value, nan_ok=True) or math.isnan(value), (name, key)
    monkeypatch.setattr(analyze, 'draw', lambda *_: None)
    analyse(place, 'out/a', '--json=true', '--to=else', '--skip_rows=2', '--seed=3', '--step=best')
    printed = capsys.readouterr().out
    assert strict(printed) == strict((place / 'else/analysis.json').read_text()) and strict(printed)['skip_rows'] == 2


@pytest.mark.parametrize('wpe', ['rope', 'none', 'sinusoidal', 'alibi'])
def test_a_run_without_a_table(place, capsys, undrawn, wpe):
    assert train(place, wpe=wpe, block_size=32, max_iters=1).code == 0
    analyse(place, 'out/a')
    report, out = strict((place / 'out/a/analysis/analysis.json').read_text()), capsys.readouterr().out
    assert 'table' not in report and ('rope' in report) == (wpe == 'rope') == ('never complete a turn' in out)
    assert list(report['hidden']['columns']) == ['hidden', 'initial', 'random walk', 'sinusoidal']


def test_a_run_whose_data_is_gone_or_other(place, capsys, undrawn):
    assert train(place, wpe='learned', block_size=32, max_iters=1).code == 0
    assert train(place, wpe='none', block_size=32, max_iters=1, out_dir='out/b').code == 0
    meta = json.loads((place / 'data/tiny/meta.json').read_text())
    for digest, words in (('other', 'is not what'), (None, 'no prepared data')):
        if digest:
            found = checkpoint.load(place / 'out/a')
            assert found.state['data_digest'] != digest
            (place / 'data/tiny/val.bin').write_bytes((place / 'data/tiny/train.bin').read_bytes())
            meta['val'] = meta['train']
            (place / 'data/tiny/meta.json').write_text(json.dumps(meta))
        else:
            (place / 'data/tiny/meta.json').unlink()
        analyse(place, 'out/a')                                   # the table needs no data
        assert words in capsys.readouterr().err
        with pytest.raises(ValueError, match=words):
            analyse(place, 'out/b')


def hugging_face(folder, tensors, name='model.safetensors', **settings):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / name)
    (folder / 'config.json').write_text(json.dumps({'model_type': 'gpt2', **settings}))
    return str(folder)


def test_hugging_face_folders(tmp_path, capsys, undrawn):
    table = torch.from_numpy(walk(32, 8)).float()
    plain = hugging_face(tmp_path / 'a', {'transformer.wpe.weight': table, 'transformer.wte.weight': table.clone()},
                         initializer_range=0.01)
    bare = hugging_face(tmp_path / 'b', {'wpe.weight': table.bfloat16()})
    split = hugging_face(tmp_path / 'c', {'transformer.h.0.attn.bias': table.clone()}, '1.safetensors')
    hugging_face(tmp_path / 'c', {'transformer.wpe.weight': table}, '2.safetensors')
    index = {'transformer.h.0.attn.bias': '1.safetensors', 'transformer.wpe.weight': '2.safetensors'}
    (tmp_path / 'c/model.safetensors.index.json').write_text(json.dumps({'weight_map': index}))
    for folder, std in ((plain, 0.01), (bare, 0.02), (split, 0.02)):
        found, drawn = analyze.read_hugging_face(folder)
        assert found.dtype == np.float64 and drawn == std
        assert np.allclose(found, table, rtol=1e-2 if folder == bare else 0)
    analyse(tmp_path, plain)
    assert 'position table, 32 × 8' in capsys.readouterr().out
    report = strict((tmp_path / 'out/analysis/analysis.json').read_text())
    assert 'hidden' not in report
    assert report['table']['initial']['norm_median'] == pytest.approx(0.01 * 8 ** 0.5, rel=0.3)


def test_transformers_own_folder(tmp_path):
    transformers = pytest.importorskip('transformers')
    config = transformers.GPT2Config(vocab_size=11, n_positions=20, n_embd=8, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path)
    table = model.transformer.wpe.weight.detach().double().numpy()
    assert np.array_equal(analyze.read_hugging_face(tmp_path)[0], table)


def test_folders_that_cannot_be_analysed(tmp_path):
    one = torch.ones(3, 3)
    llama = hugging_face(tmp_path / 'llama', {'model.norm.weight': one}, model_type='llama', rope_theta=10000.0)
    opt = hugging_face(tmp_path / 'opt', {'model.embed_positions.weight': one}, model_type='opt')
    broken = hugging_face(tmp_path / 'broken', {'wpe.weight': one})
    (tmp_path / 'broken/model.safetensors').write_bytes(b'no tensors')
    empty = hugging_face(tmp_path / 'empty', {'wpe.weight': one}, 'other.safetensors')
    listed = hugging_face(tmp_path / 'listed', {'wpe.weight': one})
    (tmp_path / 'listed/config.json').write_text('[1]')
    plain = hugging_face(tmp_path / 'plain', {'wpe.weight': torch.ones(20, 3)})
    (tmp_path / 'bare').mkdir()
    (tmp_path / 'run/ckpt').mkdir(parents=True)
    for argv, words in (
            ([llama], 'no learned table wpe.weight; this llama model has rope_theta=10000.0'),
            ([opt], 'this opt model has model.embed_positions.weight'),
            ([broken], 'not a readable Hugging Face folder'), ([listed], 'config.json is not a JSON object'),
            ([empty], 'only safetensors are read'), (['run'], 'holds no checkpoint'),
            (['bare'], r'neither a run folder \(no ckpt/\) nor a Hugging Face folder'), (['gone'], 'neither a run'),
            ([], 'give one folder, not 0'), (['a', 'b'], 'give one folder, not 2'),
            (['a', '--skip_rows=-1', '--batch_size=0'], '(?s)skip_rows=-1 must be at least 0.*batch_size=0'),
            ([plain, '--step=best', '--eval_tokens=9'], '(?s)--step=best does nothing where the.*--eval_tokens=9 does'),
            ([plain, '--to=plain/config.json'], 'plain/config.json is a file: give another name'),
            ([plain, '--skip_rows=30'], '20 positions less skip_rows=30 are too few')):
        with pytest.raises(ValueError, match=words):
            analyse(tmp_path, *argv)


