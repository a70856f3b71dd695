"""compare.py on given runs: its numbers against a computation of their own, what it refuses, and that its pictures can be read.

See test_protocols.py for what it asks, test_statistics.py for intervals, test_study.py for the runs it trains itself."""
import contextlib
import hashlib
import io
import json
import math
import re
import shutil
import sys
from collections import namedtuple
from pathlib import Path
from unittest import mock

import matplotlib.image
import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from safetensors.torch import load_file

import compare as script
from model import GPT, GPTConfig
from nanope import metrics, plots, report as report_module
from nanope.configurator import run
from nanope.files import write_json
from runs import train

Done = namedtuple('Done', 'code out err')
BLOCK = 8


@pytest.fixture(scope='module')
def trained(prepared, tmp_path_factory):
    """A folder with data/tiny and the runs out/learned and out/rope."""
    folder = tmp_path_factory.mktemp('compare')
    shutil.copytree(prepared / 'data', folder / 'data')
    for wpe in ('learned', 'rope'):
        assert train(folder, wpe=wpe, out_dir=f'out/{wpe}', block_size=BLOCK, eval_tokens=200).code == 0
    return folder


@pytest.fixture
def copy(trained, tmp_path):
    """The same, to be damaged."""
    shutil.copytree(trained, tmp_path / 'copy', ignore=shutil.ignore_patterns('compare'))
    return tmp_path / 'copy'


@pytest.fixture(autouse=True)
def picture(request, monkeypatch):
    """Pictures take longer than all else: none is drawn for a test that does not look at it."""
    def write(found, folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / 'report.json', found)
    if 'figures' not in request.fixturenames:
        monkeypatch.setattr(report_module, 'write', lambda found, folder: write(found, Path(folder)))


def compare(folder, *args):
    """python compare.py in a folder, but in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as stop:
        run(lambda: script.main(['--device=cpu', *args]))
    return Done(stop.value.code, out.getvalue(), err.getvalue())


def report(folder, *args):
    """What a comparison into out/compare writes: the runs of report.json."""
    done = compare(folder, *args)
    assert done.code == 0, done
    return json.loads((folder / 'out/compare/report.json').read_text(), parse_constant=pytest.fail)['runs']  # NaN is no JSON


def refused(done, *words):
    assert done.code == 2 and done.out == '' and done.err.startswith('error: ') and done.err.count('\n') == 1, done
    assert all(str(word) in done.err for word in words), done.err


def records(folder, out_dir, event):
    lines = (folder / out_dir / 'metrics.jsonl').read_text().splitlines()
    return [record for record in map(json.loads, lines) if record['event'] == event]


@torch.no_grad()
def score(folder, out_dir):
    """Every validation token but the first, one window at a time, in float64: (loss, stderr, bits a byte, losses at each position)."""
    state = json.loads((folder / out_dir / 'ckpt/step_00000006/state.json').read_text())
    model = GPT(GPTConfig(**{key: value for key, value in state['config'].items() if key in GPTConfig.__dataclass_fields__}))
    model.load_state_dict(load_file(folder / out_dir / 'ckpt/step_00000006/model.safetensors'), strict=False)
    model.double().eval()
    ids, chars = np.fromfile(folder / 'data/tiny/val.bin', '<u2').astype(np.int64), state['tokenizer']['chars']
    losses, targets = [], []                                     # of each window: those at its positions, None where not counted
    for start in range(0, len(ids) - 1, BLOCK):
        skip = max(start + BLOCK + 1 - len(ids), 0)              # the last window begins earlier and counts what is left
        row = torch.from_numpy(ids[start - skip:start - skip + BLOCK + 1])
        logp = model(row[None, :-1])[0].log_softmax(-1)
        losses.append([None if t < skip else -float(logp[t, row[t + 1]]) for t in range(BLOCK)])
        targets += row[1 + skip:].tolist()
    assert targets == ids[1:].tolist()
    windows = [[loss for loss in row if loss is not None] for row in losses]
    total, n = sum(map(sum, windows)), len(targets)
    deviations = [sum(row) - total / n * len(row) for row in windows]
    stderr = math.sqrt(len(windows) / (len(windows) - 1) * sum(d ** 2 for d in deviations)) / n
    n_bytes = sum(len(chars[id].encode()) for id in targets if id < len(chars))
    return total / n, stderr, total / math.log(2) / n_bytes, [[x for x in at if x is not None] for at in zip(*losses)]


# ---- the numbers -----------------------------------------------------------------------------------------------------

def test_the_report_equals_a_computation_of_its_own(trained):
    rows = report(trained, 'out/learned', 'out/rope')
    assert [row['run'] for row in rows] == ['out/learned', 'out/rope']
    for row in rows:
        loss, stderr, bits, position = score(trained, row['run'])
        assert [row[key] for key in ('val_loss', 'val_stderr', 'bits_per_byte')] == pytest.approx([loss, stderr, bits], abs=2e-6)
        within = [(part['from'], part['to'], part['loss']) for part in row['position'][:5]]
        assert [(low, high) for low, high, _ in within] == [(0, 1), (1, 2), (2, 3), (3, 5), (5, 8)]
        assert [loss for *_, loss in within] == pytest.approx([np.mean(sum(position[low:high], [])) for low, high, _ in within], abs=1e-5)
        assert [part['to'] for part in row['position'][5:]] == ([9, 10, 12, 16, 24, 32] if row['wpe'] == 'rope' else [])
        weights = load_file(trained / row['run'] / 'ckpt/step_00000006/model.safetensors')
        assert row['params'] == sum(tensor.numel() for tensor in weights.values())
        assert row['wpe_params'] == sum(tensor.numel() for name, tensor in weights.items() if '.wpe.' in name)
        speeds = sorted(record['tokens_per_s'] for record in records(trained, row['run'], 'train'))
        assert row['tokens_per_s'] == (speeds[2] + speeds[3]) / 2  # six updates
        expected = {'wpe': row['run'][4:], 'seed': 1337, 'block_size': BLOCK, 'step': 6, 'dtype': 'float32',
                    'val_tokens': (trained / 'data/tiny/val.bin').stat().st_size // 2 - 1}
        assert {key: row[key] for key in expected} == expected
        final, = records(trained, row['run'], 'final')           # what train.py said itself at the end
        for key, own in (('val_loss', 'loss'), ('val_stderr', 'stderr'), ('bits_per_byte', 'bits_per_byte')):
            assert row[key] == pytest.approx(final[own], abs=1e-6)
    assert rows[0]['wpe_params'] == 8 * 16 and rows[1]['wpe_params'] == 0


def test_the_numbers_depend_on_neither_batch_size_nor_company(trained):
    def numbers(row):
        return [row['val_loss'], row['val_stderr'], row['bits_per_byte'], *(part['loss'] for part in row['position'])]
    alone, = report(trained, 'out/rope', '--batch_size=1')
    for args in (['--batch_size=7'], ['--batch_size=1000'], ['out/learned']):
        assert numbers(report(trained, 'out/rope', *args)[0]) == pytest.approx(numbers(alone), abs=1e-6)


def test_fewer_tokens_another_step_and_a_single_window(trained):
    few, = report(trained, 'out/rope', '--eval_tokens=80')
    assert few['val_tokens'] == 80
    one, = report(trained, 'out/rope', '--eval_tokens=1')
    assert one['val_tokens'] == BLOCK and one['val_stderr'] is None
    earlier, = report(trained, 'out/rope', '--step=4', '--eval_tokens=200')
    assert earlier['step'] == 4
    assert earlier['val_loss'] == pytest.approx(next(r['loss'] for r in records(trained, 'out/rope', 'eval') if r['step'] == 4), abs=1e-6)
    refused(compare(trained, 'out/rope', '--step=3'), 'out/rope', 'step 3', 'it has')


def test_the_table_lines_up(trained):
    done = compare(trained, 'out/learned', 'out/rope')
    title, head, *rows = done.out.splitlines()[:4]
    assert title == 'RUNS' and head.split('  ')[0] == 'run' and {len(line) for line in (head, *rows)} == {len(head)}
    assert done.out.splitlines()[-1] == 'wrote out/compare/report.json, out/compare/report.html and out/compare/compare.png'
    assert 'scored 2 runs in' in done.out and 'retrieval' in done.out
    for name in ('parameters', 'position table', 'val loss', '± stderr', 'bits/byte', 'tokens/s'):
        end = head.index(name) + len(name)
        assert all(row[end - 1] != ' ' and row[end:end + 2].strip() == '' for row in rows), name  # numbers end where their head ends
    loss, stderr, bits, _ = score(trained, 'out/rope')
    assert rows[1].split()[:2] == ['rope', 'rope'] and rows[1].split()[6:9] == [f'{x:.4f}' for x in (loss, stderr, bits)]
    assert done.err == ''                                        # they differ in their scheme alone


# ---- what cannot, and what should not be compared --------------------------------------------------------------------

def test_runs_that_are_no_runs(copy):
    refused(compare(copy), 'no run to compare', 'python compare.py')
    refused(compare(copy, 'out/rope', 'out/absent'), 'out/absent holds no checkpoint')
    refused(compare(copy, 'out/rope', 'out/../out/rope/'), 'out/../out/rope/ is given twice')
    with mock.patch.object(script, 'evaluate_run', lambda *args: pytest.fail('it was said after the scoring')):
        refused(compare(copy, 'out/rope', '--to=data/tiny/meta.json'), 'data/tiny/meta.json is a file: give another name')
    for weights in copy.glob('out/learned/ckpt/step_*/model.safetensors'):
        weights.write_bytes(b'')
    refused(compare(copy, 'out/rope', 'out/learned'), 'out/learned/ckpt/step_00000006/model.safetensors has 0 bytes')
    for name in ('batch_size', 'eval_tokens'):
        refused(compare(copy, 'out/rope', f'--{name}=0'), f'{name}=0 must be at least 1')
    refused(compare(copy, 'out/rope', '--length=4', '--stride=5'), '--stride=5', 'at most 4')
    assert not (copy / 'out/compare').exists()


def test_a_damaged_step_is_passed_over_with_a_warning(copy):
    (copy / 'out/rope/ckpt/step_00000006/state.json').write_text('{}')
    done = compare(copy, 'out/rope')
    assert done.code == 0 and done.err.count('out/rope/ckpt/step_00000006/state.json') == 1 and 'step 4' in done.err
    assert compare(copy, 'out/learned', 'out/rope').err.splitlines()[-1] == \
        'warning: the runs differ in step too, not in their scheme alone: 6, 4'


def test_all_of_out_again(copy):
    """python compare.py out/* after a comparison: the shell hands over out/compare too."""
    assert compare(copy, 'out/learned', 'out/rope').code == 0
    assert len(report(copy, 'out/compare', 'out/learned', 'out/rope')) == 2


def test_runs_on_different_data(copy):
    shutil.copytree(copy / 'data/tiny', copy / 'data/other')
    ids = np.fromfile(copy / 'data/other/val.bin', '<u2')[::-1]
    ids.tofile(copy / 'data/other/val.bin')
    meta = json.loads((copy / 'data/other/meta.json').read_text('utf-8'))
    meta['val']['sha256'] = hashlib.sha256(ids.tobytes()).hexdigest()
    (copy / 'data/other/meta.json').write_text(json.dumps(meta), 'utf-8')
    assert train(copy, dataset='other', out_dir='out/other', max_iters=1).code == 0
    refused(compare(copy, 'out/rope', 'out/learned', 'out/other'), 'different data', 'out/rope and out/other')
    shutil.rmtree(copy / 'data/tiny')
    refused(compare(copy, 'out/rope'), 'data/tiny holds no prepared data')
    shutil.copytree(copy / 'data/other', copy / 'data/tiny')
    refused(compare(copy, 'out/rope'), 'data/tiny is not the data that out/rope was trained on')


def test_unequal_runs_are_compared_with_a_warning(copy):
    assert train(copy, wpe='none', seed=1, out_dir='out/none', learning_rate=0.02, n_embd=24, log_interval=2).code == 0
    done = compare(copy, 'out/rope', 'out/none')
    lines = sorted(line.partition('differ in ')[2] for line in done.err.splitlines())
    assert done.code == 0 and lines == [
        'learning_rate too, not in their scheme alone: 0.01, 0.02', 'min_lr too, not in their scheme alone: 0.001, 0.002',
        'n_embd too, not in their scheme alone: 16, 24']


# ---- the picture -----------------------------------------------------------------------------------------------------

@pytest.fixture
def figures(monkeypatch):
    """The figures that are saved."""
    kept, save = [], Figure.savefig

    def savefig(figure, *args, **settings):
        save(figure, *args, **settings)
        kept.append(figure)
    monkeypatch.setattr(Figure, 'savefig', savefig)
    return kept


def end_labels(axes):
    return [text for text in axes.texts if isinstance(text, Annotation)]


def test_the_picture(copy, figures):
    rows = report(copy, 'out/learned', 'out/rope')
    image = matplotlib.image.imread(copy / 'out/compare/compare.png')
    page = (copy / 'out/compare/report.html').read_text('utf-8')
    assert page.count('<svg') == page.count('</svg>') == 6 and not re.search(r'(src|href)="(?!#)|url\((?!#)|@import|<script', page)
    assert all(f'{row["val_loss"]:.4f}' in page for row in rows) and page.count('<table') == page.count('<tbody') == 6
    assert (copy / 'out/compare/compare.png').read_bytes().startswith(b'\x89PNG\r\n') and image.shape[1] >= 1600
    assert (image[0, 0, :3] == 1).all()                          # white
    left, middle, right = figures[0].axes
    assert all(sorted(text.get_text() for text in end_labels(axes)) == ['learned', 'rope'] for axes in (left, middle, right))
    for axes, protocol in ((middle, 'position'), (right, 'context')):
        for line, row in zip(axes.lines, rows):
            assert line.get_ydata().tolist() == [part['loss'] for part in row[protocol] if part['loss'] is not None]
        assert axes.lines[-1].get_xdata() == [BLOCK, BLOCK]      # the trained length
    first = next(line for line in left.lines if line.get_marker() == 'o')
    assert first.get_xydata().tolist() == [[r['step'], r['loss']] for r in records(copy, 'out/learned', 'eval')]


def test_runs_of_the_same_name_stay_apart(copy, figures):
    for name in 'ab':
        shutil.copytree(copy / 'out/rope', copy / f'out/{name}/run')
    done = compare(copy, 'out/a/run', 'out/b/run')
    assert [line.split()[0] for line in done.out.splitlines()[2:4]] == ['a/run', 'b/run']
    for axes in figures[0].axes:                                 # the same seed twice: two schemes, not two seeds of one
        assert sorted(text.get_text() for text in end_labels(axes)) == ['rope, a/run', 'rope, b/run']


def test_names():
    assert metrics.run_names(['out/x', 'out/y/']) == ['x', 'y']
    assert metrics.run_names(['out/a/run', 'out/b/run', 'out/c']) == ['a/run', 'b/run', 'out/c']
    assert metrics.run_names(['/p/run', '/q/p/run']) == ['/p/run', 'q/p/run']
    assert metrics.run_names(['out/x']) == ['x'] and metrics.run_names([]) == []


@pytest.mark.parametrize('runs', [1, 3, 9, 24])
def test_labels_do_not_overlap(tmp_path, figures, runs):
    paths, schemes = [], []
    for i in range(runs):                                        # ends that nearly coincide, names that would be formulas
        paths.append(tmp_path / f'a_run_with_a_long_name_of_$x_{i}$')
        paths[-1].mkdir()
        events = [{'event': 'eval', 'step': step, 'loss': 4 - step / 50 + i / 1e3, 'stderr': 0.01} for step in (0, 50, 100)]
        (paths[-1] / 'metrics.jsonl').write_text('\n'.join(map(json.dumps, events)))
        position = [{'from': p, 'to': p + 1, 'loss_mean': 3 - p / 100 + i / 1e3, 'loss_ci95': None, 'loss_stderr': 0} for p in range(100)]
        schemes.append({'scheme': paths[-1].name, 'wpe': 'rope', 'extension': None, 'runs': [paths[-1]], 'n_seeds': 1,
                        'position': position, 'context': [], 'retrieval': [], 'difference': None})
    plots.comparison({'schemes': schemes, 'length': 100, 'reference': schemes[0]['scheme']}, tmp_path / 'compare.png')
    FigureCanvasAgg(figures[0]).draw()                           # lays it out
    frame = figures[0].bbox
    for axes in figures[0].axes:
        boxes = [Text.get_window_extent(text) for text in end_labels(axes)]
        assert len(boxes) == runs and not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
        around = axes.get_window_extent()
        assert all(box.x1 <= frame.x1 and box.y0 >= around.y0 - 2 and box.y1 <= around.y1 + 2 for box in boxes)  # above is the title
        assert axes.get_window_extent().width > 0.15 * frame.width  # long names leave room for the curves


def test_runs_without_metrics_or_evaluations(tmp_path, figures):
    (tmp_path / 'empty').mkdir()
    (tmp_path / 'begun').mkdir()
    (tmp_path / 'begun/metrics.jsonl').write_text('{"event": "train", "step": 0, "loss": 4.2}\n')
    plots.loss_curves([tmp_path / 'empty', tmp_path / 'begun'], tmp_path / 'loss.png')
    plots.loss_curves([tmp_path / 'empty'], tmp_path / 'loss.png')
    assert len(figures) == 2


def test_a_scheme_has_its_colour_in_loss_curves(tmp_path, figures):
    rope, alibi = '{"wpe": "rope"}', '{"wpe": "alibi"}'
    for name, config in zip('abcde', (rope, alibi, None, '{"wp', rope)):
        (tmp_path / name).mkdir()
        (tmp_path / name / 'metrics.jsonl').write_text('{"event": "train", "step": 0, "loss": 4.2}\n')
        if config:
            (tmp_path / name / 'config.json').write_text(config)
    plots.loss_curves([tmp_path / name for name in 'abcde'], tmp_path / 'loss.png')
    lines = figures[0].axes[0].get_lines()
    rope, alibi, *others, second = [(line.get_color(), line.get_linestyle()) for line in lines]
    assert (rope, alibi) == ((plots.COLOURS['rope'], '-'), (plots.COLOURS['alibi'], '-'))
    assert second == (plots.COLOURS['rope'], '--') and len(set(others)) == 2


def test_long_names_leave_room_for_differences():
    schemes = [{'scheme': f'{i} {"long" * 30}', 'difference': None} for i in range(20)]
    fig, (axes,) = plots.figure()
    plots.draw_differences(axes, schemes, plots.styles([('rope', scheme['scheme']) for scheme in schemes]))
    FigureCanvasAgg(fig).draw()
    assert axes.get_window_extent().width > 0.4 * fig.bbox.width and len({each.get_text() for each in axes.get_yticklabels()}) == 20


def test_each_extension_has_a_look_of_its_own_in_its_schemes_colour():
    methods = ['', 'interpolate', 'lowrank', 'hold', 'tile', 'random', 'a', 'b']
    schemes = [(wpe, f'{wpe} {method}') for wpe in ('learned', 'rope', None) for method in methods]
    look = [(style['color'], str(style['linestyle'])) for style in plots.styles(schemes)]
    assert len(set(look)) == len(look)
    used = {wpe: {colour for (other, _), (colour, _) in zip(schemes, look) if other == wpe} for wpe in ('learned', 'rope', None)}
    assert [colour for colour, _ in look[:6]] == [plots.COLOURS['learned']] * 6 and not used['learned'] & used['rope']
    for wpe in used:                                             # none is another scheme's
        assert not used[wpe] & {colour for name, colour in plots.COLOURS.items() if name != wpe}
    at_once, tuned = plots.styles([('rope', 'rope + yarn ×2'), ('rope', 'rope + yarn ×2, tuned')])
    assert at_once == tuned                                      # they are never in one panel


def test_plots_as_a_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def call(*args):
        monkeypatch.setattr(sys, 'argv', ['plots.py', *args])
        with pytest.raises(SystemExit) as end:
            run(plots.main)
        return end.value.code, *capsys.readouterr()

    for flag in ('-h', '--help'):
        assert call('nowhere', flag) == (0, 'usage: python -m nanope.plots out/a out/b ... [--to=loss.png]\n', '')
    for args, what in (((), 'give run folders'), (('nowhere',), 'nowhere holds no metrics.jsonl'), (('.',), '. holds no metrics.jsonl')):
        assert call(*args) == (2, '', f'error: {what}: python -m nanope.plots out/a out/b ...\n')
    (tmp_path / 'metrics.jsonl').write_text('{"event": "train", "step": 0, "loss": 4.2}\n')
    assert call('.')[1].startswith('wrote loss.png: ') and (tmp_path / 'loss.png').exists()
    assert call('.', '--to=new/x.png')[0] == 0 and (tmp_path / 'new/x.png').exists()
    assert call('.', '--to=new') == (2, '', 'error: --to=new is a folder: give a file, --to=new/loss.png\n')
    assert call('.', '--to=loss.png/x.png') == (2, '', 'error: loss.png cannot be a folder, as loss.png is a file: give another name\n')


# ---- spikes ----------------------------------------------------------------------------------------------------------

def test_spikes_are_found_and_noise_is_not():
    rng = np.random.default_rng(1)
    calm = [(step, 4 * 0.99 ** step + 1 + 0.05 * rng.normal()) for step in range(0, 600, 3)]
    assert metrics.spikes(calm) == [] and metrics.spikes(calm[:5]) == [] and metrics.spikes([]) == []
    bumped = [(step, loss + 1.5 * (300 <= step < 330) + 2 * (step == 450)) for step, loss in calm]
    assert metrics.spikes(bumped) == [300, 450]                   # where each begins


def test_a_spike_is_counted_flagged_and_kept(copy):
    """The run takes part like any other; table and report say so."""
    path = copy / 'out/rope/metrics.jsonl'
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    last = [line for line in lines if line['event'] == 'train'][-1]
    more = [{**last, 'step': last['step'] + i, 'loss': 9.0 if i == 15 else 3.0} for i in range(1, 20)]
    path.write_text(''.join(json.dumps(line) + '\n' for line in lines + more))
    done = compare(copy, 'out/learned', 'out/rope')
    found = json.loads((copy / 'out/compare/report.json').read_text())
    rows = {row['name']: row for row in found['runs']}
    assert done.code == 0 and rows['rope']['spikes'] == [last['step'] + 15] and rows['learned']['spikes'] == []
    assert f'rope jumped at step {last["step"] + 15}' in done.err and found['warnings'][-1] in done.err
    assert [scheme['n_seeds'] for scheme in found['schemes']] == [1, 1]
    head, *rows = done.out.splitlines()[1:4]
    assert [row[:head.index('spikes') + 6].split()[-1] for row in rows] == ['0', '1']
