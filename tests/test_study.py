"""compare.py with a config: it trains what is missing, extends, survives any stop, and averages no cell that failed."""
import contextlib
import io
import json
import os
import re
import shutil
import signal
import threading
import time
from collections import namedtuple
from unittest import mock

import pytest

import compare as script
import extend
import train
from nanope import cells, checkpoint, plots, report, study
from nanope.configurator import run
from nanope.files import lock_folder
from runs import TINY, start

Done = namedtuple('Done', 'code out err')
STUDY = ['tiny.py', '--to=out/study', '--device=cpu', '--context_tokens=40', '--trials=2']
SCHEMES = 'learned,rope,none'


@pytest.fixture
def place(place):
    """A folder with data/tiny/ and tiny.py, a config for train.py."""
    (place / 'tiny.py').write_text(''.join(f'{name} = {value!r}\n' for name, value in TINY.items() if name != 'out_dir'))
    return place


@pytest.fixture(autouse=True)
def quick(request, monkeypatch):
    """Cells run in this process and no picture is drawn: what is left takes a tenth of the time. Returns the cells as they are run."""
    ran = []

    def run_script(name, args, log):
        out_dir = next(arg for arg in args if arg.startswith('--out_dir='))
        ran.append(os.path.basename(out_dir))
        main = {'train': train.main, 'extend': extend.main}[name]
        handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            with open(log, 'a') as output, contextlib.redirect_stdout(output), mock.patch.object(plots, 'loss_curves'):
                run(lambda: main(args))
        except SystemExit as stop:
            if stop.code == cells.EXIT_STOPPED:
                raise cells.Stopped
            return stop.code
        finally:
            for each, handler in handlers.items():
                signal.signal(each, handler)

    if not request.node.get_closest_marker('slow'):
        monkeypatch.setattr(cells, 'run_script', run_script)
        if 'pictures' not in request.node.name:
            monkeypatch.setattr(plots, 'comparison', lambda *args: None)
            monkeypatch.setattr(report, 'page', lambda found: '')
    return ran


def compare(folder, *args):
    """python compare.py in a folder, but in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as stop:
        run(lambda: script.main([*STUDY, *args]))
    return Done(stop.value.code, out.getvalue(), err.getvalue())


def read(folder, name='report'):
    return json.loads((folder / f'out/study/{name}.json').read_text(), parse_constant=pytest.fail)  # NaN is no JSON


def without_speed(found):
    return {**found, 'runs': [{**row, 'tokens_per_s': None} for row in found['runs']]}


def refused(done, *words):
    error = done.err.splitlines()[-1]
    assert done.code == 2 and error.startswith('error: ') and all(word in error for word in words), done


def failing(cell, code=65):
    """Patches one cell so that it ends with an exit code, before it has done anything."""
    work = cells.run_script

    def run_script(name, args, log):
        return code if any(arg.endswith(f'/{cell}') for arg in args) else work(name, args, log)
    return mock.patch.object(cells, 'run_script', run_script)


# ---- a whole study ---------------------------------------------------------------------------------------------------

def test_schemes_seeds_and_extensions(place, quick):
    done = compare(place, f'--wpe={SCHEMES}', '--seeds=2', '--extend=yarn,hold:4')
    assert done.code == 0 and quick == ['learned_1', 'rope_1', 'none_1', 'learned_2', 'rope_2', 'none_2',
                                        'learned_1_hold_32', 'rope_1_yarn_16', 'learned_2_hold_32', 'rope_2_yarn_16']
    found, ledger = read(place), read(place, 'ledger')
    assert [row['run'] for row in found['runs']] == [f'out/study/runs/{cell}' for cell in quick] and found['failed'] == []
    assert {(cell, entry['state'], entry['exit']) for cell, entry in ledger['cells'].items()} == {(cell, 'done', 0) for cell in quick}
    names = ['learned', 'rope', 'none', 'learned + hold ×4', 'rope + yarn ×2']
    assert [scheme['scheme'] for scheme in found['schemes']] == names and found['length'] == 8 and found['reference'] == 'learned'
    rows = {row['name']: row for row in found['runs']}
    expected = (('learned', ''), ('rope', ''), ('none', ''), ('learned', '_hold_32'), ('rope', '_yarn_16'))
    for scheme, (wpe, rest) in zip(found['schemes'], expected, strict=True):
        a, b = (rows[f'{wpe}_{seed}{rest}']['val_loss'] for seed in (1, 2))
        mean, half = (a + b) / 2, 12.7062 * abs(a - b) / 2       # half: of a 95 % interval of two values
        assert scheme['n_seeds'] == 2 and scheme['val_loss_mean'] == pytest.approx(mean)
        assert scheme['val_loss_ci95'] == pytest.approx([mean - half, mean + half], abs=1e-4)
        pairs = [] if scheme['scheme'] == 'learned' else [a - rows['learned_1']['val_loss'], b - rows['learned_2']['val_loss']]
        assert [pair['difference'] for pair in (scheme['difference'] or {'pairs': []})['pairs']] == pytest.approx(pairs)
    contexts = {name: [part['loss'] is not None for part in row['context']] for name, row in rows.items()}
    assert contexts['learned_1'] == [True] * 2 + [False] * 4 and all(contexts['rope_1']) and all(contexts['learned_1_hold_32'])
    assert rows['learned_1_hold_32']['val_loss'] == pytest.approx(rows['learned_1']['val_loss'], abs=1e-6)  # old rows stay
    for name, row in rows.items():                               # what train.py said itself, of the same tokens
        if row['extension'] is None:
            final = [json.loads(line) for line in (place / row['run'] / 'metrics.jsonl').read_text().splitlines()][-1]
            assert final['event'] == 'final' and row['val_loss'] == pytest.approx(final['loss'], abs=1e-6)
    assert set(found['protocols']) == {'non-overlapping', 'same targets', 'by position', 'sliding window', 'retrieval', 'induction'}
    again = compare(place, f'--wpe={SCHEMES}', '--seeds=2', '--extend=yarn,hold:4')
    assert again.code == 0 and len(quick) == 10 and read(place) == found and read(place, 'ledger') == ledger  # nothing is done twice


def test_extended_runs_are_tuned(place, quick):
    """Each extension is trained on, from its own weights, for a share of the updates, with as many tokens an update."""
    done = compare(place, '--wpe=learned,rope', '--extend=hold:2,yarn:2', '--tune=0.5')
    names = ['learned_1', 'rope_1', 'learned_1_hold_16', 'rope_1_yarn_16', 'learned_1_hold_16_tuned', 'rope_1_yarn_16_tuned']
    assert done.code == 0 and quick == names and 'warning' not in done.err
    rows = {row['name']: row for row in read(place)['runs']}
    for cell in names[-2:]:
        config = json.loads((place / f'out/study/runs/{cell}/config.json').read_text())
        before = checkpoint.load(place / f'out/study/runs/{cell.removesuffix("_tuned")}')
        assert rows[cell]['step'] == config['max_iters'] == before.step // 2 and config['block_size'] == 16
        assert config['batch_size'] * 2 == TINY['batch_size']
        for name, share in (('learning_rate', 0.3), ('min_lr', 0.3), ('muon_lr', 1)):  # a whole rate would unsettle what is trained
            assert config[name] == pytest.approx(share * before.state['config'][name]), name
        assert rows[cell]['extension'].endswith('×2, tuned') and rows[cell]['val_loss'] != rows[cell.removesuffix('_tuned')]['val_loss']
        assert checkpoint.load(place / f'out/study/runs/{cell}').state['origin']['step'] == before.step
    assert [scheme['scheme'] for scheme in read(place)['schemes']] == [
        'learned', 'rope', 'learned + hold ×2', 'rope + yarn ×2', 'learned + hold ×2, tuned', 'rope + yarn ×2, tuned']
    assert compare(place, '--wpe=learned,rope', '--extend=hold:2,yarn:2', '--tune=0.5').code == 0 and quick == names  # once only
    compare(place, '--wpe=learned,rope', '--extend=hold:2,yarn:2', '--tune=1')
    compare(place, '--wpe=learned,rope', '--extend=hold:2,yarn:2', '--tune=1', '--tune_lr=1')
    assert quick == names + 2 * names[-2:]                       # another share is another run
    config = json.loads((place / f'out/study/runs/{names[-1]}/config.json').read_text())
    assert config['learning_rate'] == TINY['learning_rate']
    refused(compare(place, '--wpe=rope', '--tune=0.5'), 'tune=0.5', '--extend')
    refused(compare(place, '--wpe=rope', '--extend=yarn', '--tune=2'), 'tune=2', '0 to 1')


def test_a_tuning_that_was_killed(place, quick):
    """What was tuned for another share does not count; a child left behind is waited for, and what it has done is not done again."""
    cell, args = 'rope_1_yarn_16_tuned', ('--wpe=rope', '--extend=yarn')
    assert compare(place, *args, '--tune=0.5').code == 0 and quick.count(cell) == 1
    with mock.patch.object(cells, 'run_script', mock.Mock(side_effect=cells.Stopped)):
        assert compare(place, *args, '--tune=1').code == cells.EXIT_STOPPED
    assert read(place, 'ledger')['cells'][cell]['state'] == 'stopped'
    assert compare(place, *args, '--tune=1').code == 0 and quick.count(cell) == 2
    assert json.loads((place / f'out/study/runs/{cell}/config.json').read_text())['max_iters'] == TINY['max_iters']
    ledger = read(place, 'ledger')
    ledger['cells'][cell] |= {'state': 'stopped', 'exit': None}  # as SIGKILL leaves it
    (place / 'out/study/ledger.json').write_text(json.dumps(ledger))
    locked = threading.Event()

    def left_behind():
        lock = lock_folder(place / f'out/study/runs/{cell}', 'trained')
        locked.set()
        time.sleep(0.4)
        lock.release()

    thread = threading.Thread(target=left_behind)
    thread.start()
    locked.wait()
    done = compare(place, *args, '--tune=1')
    thread.join()
    assert done.code == 0 and 'waiting for it' in done.out and quick.count(cell) == 2
    assert read(place, 'ledger')['cells'][cell]['state'] == 'done'


def test_a_sweep_gives_each_scheme_its_own_best_value(place, quick):
    """Every scheme tries every value with seed 0; the seeds compared are others, trained with what was best."""
    done = compare(place, '--wpe=learned,rope', '--seeds=2', '--sweep=learning_rate=1e-6,0.02,1e-5')
    assert done.code == 0 and quick[:6] == [f'{wpe}_{value}_0' for wpe in ('learned', 'rope') for value in ('1e-6', '0.02', '1e-5')]
    assert quick[6:] == ['learned_0.02_1', 'rope_0.02_1', 'learned_0.02_2', 'rope_0.02_2'] and 'warning' not in done.err
    found = read(place)
    assert found['sweep']['best'] == {'learned': '0.02', 'rope': '0.02'} and [row['seed'] for row in found['runs']] == [1, 1, 2, 2]
    for wpe, losses in found['sweep']['losses'].items():
        for value, loss in losses.items():
            records = [json.loads(line) for line in (place / f'out/study/runs/{wpe}_{value}_0/metrics.jsonl').read_text().splitlines()]
            assert loss == records[-1]['loss'] and records[-1]['event'] == 'final'
    assert 'SWEEP OF LEARNING_RATE' in done.out and f'{found["sweep"]["losses"]["rope"]["0.02"]:.4f}*' in done.out
    done = compare(place, '--wpe=learned,rope', '--seeds=2', '--sweep=learning_rate=1e-6,0.02')
    assert done.code == 0 and len(quick) == 10                    # all there
    assert 'warning: rope: learning_rate=0.02 is the best of the sweep and at its end' in done.err
    with failing('rope_0.02_0'):
        shutil.rmtree(place / 'out/study/runs/rope_0.02_0')
        assert compare(place, '--wpe=rope', '--sweep=learning_rate=1e-6,0.02,1e-5').code == 0
    assert read(place)['sweep']['losses']['rope']['0.02'] is None and quick[-1] == f'rope_{read(place)["sweep"]["best"]["rope"]}_1'
    for text in ('learning_rate', 'learning_rate=', 'learning_rate=1', 'learning_rate=1,1', 'seed=1,2', 'wpe=rope,none'):
        refused(compare(place, '--wpe=rope', f'--sweep={text}'), '--sweep', 'two or more values')


def test_muons_rate_is_tuned_with_the_other(place, quick):
    done = compare(place, '--wpe=rope', '--extend=yarn:2', '--tune=0.5', '--train=--optimizer=muon --muon_lr=0.03')
    config = json.loads((place / 'out/study/runs/rope_1_yarn_16_tuned/config.json').read_text())
    assert done.code == 0 and config['optimizer'] == 'muon' and config['muon_lr'] == pytest.approx(0.009)


def test_a_sweep_says_what_it_leaves_as_it_is(place, quick):
    """Muon and AdamW have a learning rate each: of one alone the other is not tuned; Muon's does nothing where AdamW trains alone."""
    for name, kept in (('learning_rate', 'leaves the matrices of the blocks at one muon_lr'), ('muon_lr', 'at one learning_rate')):
        done = compare(place, '--wpe=rope', f'--sweep={name}=0.001,0.02', '--train=--optimizer=muon')
        assert done.code == 0 and done.err.startswith(f'warning: the sweep of {name} leaves') and kept in done.err
        assert any(kept in line for line in read(place)['warnings'])
        shutil.rmtree(place / 'out/study')
    quick.clear()
    refused(compare(place, '--wpe=rope', '--sweep=muon_lr=0.001,0.02'), '--sweep=muon_lr', 'add --train=--optimizer=muon')
    assert quick == []


def test_a_failed_tuning_is_shown_and_not_averaged(place, quick):
    with failing('rope_1_yarn_16_tuned'):
        done = compare(place, '--wpe=rope', '--extend=yarn', '--tune=0.5')
    assert done.code == 0 and [row['name'] for row in read(place)['failed']] == ['rope_1_yarn_16_tuned']
    assert [scheme['scheme'] for scheme in read(place)['schemes']] == ['rope', 'rope + yarn ×2']


def test_stopped_and_run_again_gives_the_same_report(place, tmp_path_factory, quick):
    """Stopped in the middle of the first cell, in that of the third, and before the only extension."""
    straight = tmp_path_factory.mktemp('straight')
    shutil.copytree(place, straight, dirs_exist_ok=True)
    assert compare(straight, f'--wpe={SCHEMES}', '--extend=yarn').code == 0
    work, stops, script_of, done = train.update, ['learned_1', 'none_1'], cells.run_script, []

    def stopping(*args):
        config, step = args[3], args[5]
        if step == 3 and stops and config.out_dir.endswith(stops[0]):
            del stops[0]
            os.kill(os.getpid(), signal.SIGTERM)                 # train.py saves and ends with 75
        return work(*args)

    def stopping_once(name, args, log):
        if name == 'extend' and not done:
            done.append(name)
            raise cells.Stopped
        return script_of(name, args, log)

    before = len(quick)
    with mock.patch.object(train, 'update', stopping), mock.patch.object(cells, 'run_script', stopping_once):
        for cell in ('learned_1', 'none_1', 'rope_1_yarn_16'):
            stopped = compare(place, f'--wpe={SCHEMES}', '--extend=yarn')
            assert stopped.code == 75 and 'the same command goes on' in stopped.err and not (place / 'out/study/report.json').exists()
            assert read(place, 'ledger')['cells'][cell]['state'] == 'stopped'
        assert compare(place, f'--wpe={SCHEMES}', '--extend=yarn').code == 0
    assert quick[before:] == ['learned_1', 'learned_1', 'rope_1', 'none_1', 'none_1', 'rope_1_yarn_16']
    assert without_speed(read(place)) == without_speed(read(straight))


def test_more_seeds_and_schemes_train_only_what_is_missing(place, quick):
    assert compare(place, '--wpe=rope').code == 0
    assert compare(place, '--wpe=rope,none', '--seeds=2').code == 0
    assert quick == ['rope_1', 'none_1', 'rope_2', 'none_2'] and read(place)['reference'] == 'rope'


def test_one_seed_has_no_interval_and_says_so(place):
    done = compare(place, '--wpe=learned,rope')
    learned, rope = read(place)['schemes']
    assert learned['val_loss_ci95'] is rope['val_loss_ci95'] is rope['difference']['ci95'] is None
    assert rope['difference']['pairs'][0]['window_stderr'] > 0
    assert 'one seed: no interval' in done.out and '± stderr over windows' in done.out


# ---- failed cells ----------------------------------------------------------------------------------------------------

def test_a_failed_cell_is_shown_and_never_averaged(place, quick):
    with failing('rope_2'):
        done = compare(place, '--wpe=learned,rope', '--seeds=2', '--extend=yarn')
    assert done.code == 0 and 'warning: out/study/runs/rope_2 failed (exit code 65, the loss was not finite) and takes no part' in done.err
    assert any(re.match(r'rope_2 +rope +2 +failed( +-)+$', line) for line in done.out.splitlines())
    found = read(place)
    assert found['failed'] == [{'run': 'out/study/runs/rope_2', 'wpe': 'rope', 'extension': None, 'seed': 2, 'exit': 65, 'name': 'rope_2'}]
    learned, rope, yarn = found['schemes']
    assert (learned['n_seeds'], rope['n_seeds'], yarn['n_seeds']) == (2, 1, 1) and rope['val_loss_mean'] == found['runs'][1]['val_loss']
    assert [pair['seed'] for pair in rope['difference']['pairs']] == [1] and rope['difference']['ci95'] is None
    assert read(place, 'ledger')['cells']['rope_2']['state'] == 'failed'
    before = len(quick)
    assert compare(place, '--wpe=learned,rope', '--seeds=2', '--extend=yarn').code == 0
    assert quick[before:] == ['rope_2', 'rope_2_yarn_16']        # it is tried again, the rest is not
    assert read(place)['failed'] == [] and [scheme['n_seeds'] for scheme in read(place)['schemes']] == [2, 2, 2]


def test_a_failed_extension_is_shown(place):
    with failing('learned_1_hold_16', 2):
        done = compare(place, '--wpe=learned,rope', '--extend=hold,linear')
    assert done.code == 0 and 'learned_1_hold_16 failed (exit code 2, bad input)' in done.err
    cell, = read(place)['failed']
    assert (cell['wpe'], cell['extension'], cell['exit']) == ('learned', 'hold ×2', 2)
    assert [scheme['scheme'] for scheme in read(place)['schemes']] == ['learned', 'rope', 'rope + linear ×2']


def test_a_loss_that_is_not_finite(place):
    """A real one: every cell ends with 65, and there is nothing to compare."""
    done = compare(place, '--wpe=rope,none', '--train=--learning_rate=1e30 --grad_clip=0 --warmup_iters=0')
    assert done.code == 2 and 'every run failed' in done.err and 'out/study/runs/*.log' in done.err
    assert [entry['exit'] for entry in read(place, 'ledger')['cells'].values()] == [65, 65]
    assert not (place / 'out/study/report.json').exists()


def test_exit_codes_in_words():
    assert cells.exit_text(-9) == 'ended by SIGKILL' and cells.exit_text(65) == 'exit code 65, the loss was not finite'
    assert cells.exit_text(1) == 'exit code 1'


# ---- what a study folder says ----------------------------------------------------------------------------------------

def test_another_study_in_the_same_folder_is_refused(place, quick):
    assert compare(place, '--wpe=rope', '--train=--weight_decay=0.2').code == 0
    refused(compare(place, '--wpe=rope', '--train=--weight_decay=0.3'), 'out/study', 'weight_decay was 0.2, now 0.3', '--to')
    refused(compare(place, '--wpe=rope'), 'weight_decay was 0.2, now not set')
    (place / 'tiny.py').write_text((place / 'tiny.py').read_text().replace('max_iters = 6', 'max_iters = 7'))
    refused(compare(place, '--wpe=rope', '--train=--weight_decay=0.2'), 'max_iters was 6, now 7')
    assert quick == ['rope_1']


def test_a_run_is_finished_when_its_folder_says_so(place, quick):
    assert compare(place, '--wpe=rope').code == 0
    folder = place / 'out/study/runs/rope_1'
    assert cells.finished(folder) and not cells.finished(place / 'out/nothing')
    os.remove(place / 'out/study/ledger.json')                   # the ledger may be lost
    assert compare(place, '--wpe=rope').code == 0 and quick == ['rope_1']
    assert read(place, 'ledger')['cells']['rope_1']['state'] == 'done'
    records = (folder / 'metrics.jsonl').read_text()
    (folder / 'metrics.jsonl').write_text(records[:records.rindex('{"event": "final"')])
    assert not cells.finished(folder) and compare(place, '--wpe=rope').code == 0 and len(quick) == 2 and cells.finished(folder)
    os.truncate(folder / 'ckpt/step_00000006/model.safetensors', 100)
    assert not cells.finished(folder) and compare(place, '--wpe=rope').code == 0 and len(quick) == 3 and cells.finished(folder)


def test_an_extension_is_made_again_when_its_run_was_trained_on(place, quick):
    given = ['--to=out/study', '--device=cpu', '--context_tokens=0', '--trials=0', '--extend=linear', 'out/rope']

    def trained_for(steps):
        args = ['tiny.py', '--wpe=rope', '--out_dir=out/rope', '--init_from=auto', f'--max_iters={steps}']
        assert cells.run_script('train', args, 'log') == 0
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            assert not script.main(given)
        return {row['name']: row['step'] for row in read(place)['runs']}

    with contextlib.chdir(place):
        assert trained_for(4) == {'rope': 4, 'rope_linear_16': 4}
        assert trained_for(4) == {'rope': 4, 'rope_linear_16': 4} and quick.count('rope_linear_16') == 1
        assert trained_for(6) == {'rope': 6, 'rope_linear_16': 6} and quick.count('rope_linear_16') == 2


def test_a_tuned_extension_is_a_scheme_of_its_own(place):
    assert compare(place, '--wpe=rope', '--extend=linear').code == 0
    with contextlib.chdir(place):
        tuned = ['tiny.py', '--init_from=out/study/runs/rope_1_linear_16', '--out_dir=out/tuned', '--max_iters=2', '--seed=1']
        assert cells.run_script('train', tuned, 'log') == 0, (place / 'log').read_text()
    assert compare(place, '--wpe=rope', 'out/tuned').code == 0
    assert compare(place, '--wpe=rope', 'out/tuned', 'out/study/runs/rope_1_linear_16').code == 0
    found = read(place)
    assert [scheme['scheme'] for scheme in found['schemes']] == ['rope', 'rope + linear ×2, tuned', 'rope + linear ×2']
    assert found['length'] == 8 and all(part['loss'] is not None for row in found['runs'] for part in row['context'])


def test_extensions_are_those_of_the_script():
    assert {wpe: tuple(methods) for wpe, methods in extend.METHODS.items()} == study.EXTENSIONS


def test_methods():
    assert study.read_methods('yarn, lowrank:4,', 2.0) == [('yarn', 2.0), ('lowrank', 4.0)] and study.read_methods('', 2.0) == []
    for text, words in (('yarm', "'yarm' is no method"), ('yarn:x', "'x' is no number"), ('yarn:1', '1 times'), ('yarn:nan', 'nan times')):
        with pytest.raises(ValueError, match=words):
            study.read_methods(text, 2.0)


def test_a_method_that_fits_no_scheme(place, quick):
    """It would be left out without a word; with a config that is said before anything is trained."""
    refused(compare(place, '--wpe=rope,none', '--extend=linear,hold'), '--extend', 'hold is for learned', 'rope, none')
    assert quick == [] and compare(place, '--wpe=rope', '--extend=linear').code == 0
    with contextlib.chdir(place), pytest.raises(ValueError, match='tile is for learned; what is compared is rope'):
        script.main(['out/study/runs/rope_1', '--extend=tile', '--to=out/other'])


def test_settings_that_do_nothing(place, quick):
    for args, words in ((['--tune_lr=0.5'], ['tune_lr=0.5 does nothing without --tune', 'leave it out']),
                        (['--extend_to=3'], ['extend_to=3']), (['--extend=yarn:4', '--extend_to=3'], ['extend_to=3.0', 'names no factor']),
                        (['--context_tokens=0', '--stride=2'], ['stride=2']), (['--trials=0', '--seed=3'], ['seed=3 does nothing'])):
        given = [arg for arg in STUDY if arg.partition('=')[0] not in str(args)]
        with mock.patch(f'{__name__}.STUDY', given):
            refused(compare(place, '--wpe=rope', *args), *words)
    assert quick == []


def test_settings_that_cannot_be(place):
    for args, words in ((['--train=max_iters=3'], ['max_iters=3', '--name=value']),
                        (['--train=--seed=3'], ['compare.py sets seed itself']),
                        (['--wpe=rope,rop'], ["'rop' is no scheme", 'learned']), (['--wpe=rope,rope'], ['names rope twice']),
                        (['--seeds=0'], ['seeds=0 must be at least 1']), (['--seeds=1000000000000'], ['must be at most 10,000']),
                        (['--extend=yarn', '--tune=0.5', '--tune_lr=0'], ['must be above 0']), (['--extend=yarm'], ["'yarm' is no method"]),
                        (['absent.py'], ['absent.py'])):
        refused(compare(place, *args), *words)
    with contextlib.chdir(place), pytest.raises(ValueError, match='give a config file'):
        script.main(['out/rope', '--seeds=3'])
    with contextlib.chdir(place), pytest.raises(ValueError, match='tiny.py is a file'):
        script.main(['tiny.py', '--to=tiny.py/x'])
    assert not (place / 'out/study/runs').exists()


def test_a_length_beyond_a_learned_table(place):
    refused(compare(place, '--wpe=learned', '--length=9'), '--length=9', 'learned_1', '8 rows')
    assert compare(place, '--wpe=learned', '--length=4').code == 0 and read(place)['length'] == 4


def test_pictures_of_everything(place):
    """A failed cell, extensions, several seeds: report.html is complete, says the command, and needs nothing else."""
    with failing('none_2'):
        assert compare(place, f'--wpe={SCHEMES}', '--seeds=2', '--extend=yarn,hold').code == 0
    page, found = (place / 'out/study/report.html').read_text('utf-8'), read(place)
    assert page.count('<svg') == 7 and not re.search(r'(src|href)="(?!#)|url\((?!#)|@import|<script', page)
    assert all(f'<td class="word">{scheme["scheme"]}</td>' in page for scheme in found['schemes'])
    assert 'none_2 failed' in page and 'python compare.py tiny.py --to=out/study' in page
    assert all(f'<dt>{name}</dt>' in page for name in found['protocols'])
    assert (place / 'out/study/compare.png').read_bytes().startswith(b'\x89PNG\r\n')
    smallest = min(float(size) for size in re.findall(r'font: (?:bold )?([\d.]+)px', page) + re.findall(r'font-size: ([\d.]+)px', page))
    width, = {float(width) for width in re.findall(r'<svg[^>]* viewBox="0 0 ([\d.]+)', page)}
    assert smallest * int(re.search(r'figure svg {[^}]* min-width: (\d+)px', page)[1]) / width >= 12  # pixels, however narrow the screen
    draw = plots.panels(found)['context']
    assert report.svg(draw) == report.svg(draw) in page          # no date, no random id


# ---- signals, locks: real processes that import nothing --------------------------------------------------------------

CHILD = """
import signal, sys, time
seen = []
def note(number, frame):
    seen.append(number)
for each in (signal.SIGINT, signal.SIGTERM):
    signal.signal(each, note)
print('ready', flush=True)
end = time.monotonic() + 20
while not seen and time.monotonic() < end:
    time.sleep(0.01)
time.sleep(0.1)
print('seen', *seen, flush=True)
sys.exit(75 if seen else 1)
"""


@pytest.fixture
def child(tmp_path, monkeypatch):
    """run_script as it is, on a train.py that waits for a signal."""
    (tmp_path / 'train.py').write_text(CHILD)
    monkeypatch.undo()
    monkeypatch.setattr(cells, 'ROOT', str(tmp_path))
    return tmp_path


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_goes_to_the_child_once(child, number):
    def send():
        while 'ready' not in (child / 'log').read_text():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    (child / 'log').touch()
    before = signal.getsignal(number)
    thread = threading.Thread(target=send)
    thread.start()
    with pytest.raises(cells.Stopped):
        cells.run_script('train', [], child / 'log')
    thread.join()
    assert (child / 'log').read_text().splitlines() == ['ready', f'seen {int(number)}'] and signal.getsignal(number) is before


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_while_the_child_starts(child, monkeypatch, number):
    """It reaches us before we know the child, which must not be left running."""
    popen = cells.subprocess.Popen

    def start_and_signal(*args, **how):
        process = popen(*args, **how)
        while 'ready' not in (child / 'log').read_text():
            time.sleep(0.01)
        os.kill(os.getpid(), number)
        return process

    before = signal.signal(number, lambda *_: None)              # else a failure would end the tests
    try:
        with monkeypatch.context() as patch, pytest.raises(cells.Stopped):
            patch.setattr(cells.subprocess, 'Popen', start_and_signal)
            cells.run_script('train', [], child / 'log')
    finally:
        signal.signal(number, before)
    assert (child / 'log').read_text().splitlines() == ['ready', f'seen {int(number)}']


def test_the_exit_code_of_a_child(child):
    for code in (0, 2, 65):
        (child / 'train.py').write_text(f'import sys; print(sys.argv[1:]); sys.exit({code})')
        assert cells.run_script('train', ['--a=b c'], child / 'log') == code
    assert (child / 'log').read_text() == "['--a=b c']\n" * 3
    (child / 'train.py').write_text('import os; os.kill(os.getpid(), 9)')
    assert cells.run_script('train', [], child / 'log') == -9
    (child / 'train.py').write_text('raise SystemExit(75)')      # it was told to stop, and not by us
    with pytest.raises(cells.Stopped):
        cells.run_script('train', [], child / 'log')


def test_a_child_left_behind_is_waited_for(tmp_path, capsys):
    ready, tell = os.pipe()
    child = os.fork()
    if not child:
        lock = lock_folder(tmp_path / 'run', 'trained')
        os.write(tell, b'.')
        time.sleep(0.4)
        lock.release()
        os._exit(0)
    os.read(ready, 1)
    started = time.monotonic()
    cells.wait_for(tmp_path / 'run')
    assert time.monotonic() - started > 0.3 and 'waiting for it' in capsys.readouterr().out and os.waitpid(child, 0)[1] == 0
    cells.wait_for(tmp_path / 'run')
    assert capsys.readouterr().out == ''


# ---- the real thing --------------------------------------------------------------------------------------------------

def real(place, *args):
    return start(place, 'compare.py', *STUDY, f'--wpe={SCHEMES}', '--extend=yarn', '--train=--max_iters=40 --eval_interval=5', *args)


@pytest.mark.slow
@pytest.mark.parametrize('how', [signal.SIGKILL, signal.SIGTERM])
def test_interrupted_half_way_and_run_again(place, tmp_path_factory, how):
    """Three schemes from one command: SIGKILL to compare.py, or SIGTERM, which it passes on; the report is as if it had not been."""
    straight = tmp_path_factory.mktemp('straight')
    shutil.copytree(place, straight, dirs_exist_ok=True)
    process = real(straight)
    assert process.wait() == 0, process.communicate()
    process, metrics = real(place), place / 'out/study/runs/rope_1/metrics.jsonl'
    while process.poll() is None and not (metrics.exists() and metrics.read_text().count('"train"') > 5):
        time.sleep(0.01)
    process.send_signal(how)
    out, err = process.communicate()
    assert process.returncode == (75 if how == signal.SIGTERM else -how), err
    assert not (place / 'out/study/report.json').exists() and read(place, 'ledger')['cells']['rope_1']['state'] == 'stopped'
    learned = checkpoint.step_folder(place / 'out/study/runs/learned_1', 40)
    before = os.stat(learned).st_mtime_ns
    again = real(place)
    out, err = again.communicate()
    assert again.returncode == 0, err
    assert os.stat(learned).st_mtime_ns == before and 'learned_1: done' not in out and 'rope_1' in out
    assert without_speed(read(place)) == without_speed(read(straight))
    assert [row['step'] for row in read(place)['runs']] == [40] * 4 and len(read(place)['schemes']) == 4


@pytest.mark.slow
def test_two_comparisons_in_one_folder(place):
    first = real(place)
    while first.poll() is None and not (place / 'out/study/ledger.json').exists():
        time.sleep(0.01)
    second = real(place)
    out, err = second.communicate()
    assert second.returncode == 2 and 'out/study is being written by another process' in err
    first.send_signal(signal.SIGTERM)
    assert first.wait() == 75
