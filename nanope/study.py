"""A study folder: one run a scheme and seed, and their extensions. What is there already is not done again.

    TO/ledger.json             each cell's state (done, failed, stopped), exit code and seconds, and the settings that all cells share
    TO/runs/<wpe>_<seed>       as train.py writes it                          TO/runs/<wpe>_<seed>.log    what it printed
    TO/runs/<run>_<method>_<n> as extend.py writes it, n tokens long     TO/runs/<run>_<method>_<n>_tuned   trained on since

A cell is one process of train.py or extend.py. Whether a run is finished is read off its folder, not off the ledger, so it does not
matter when a study was killed; a run that is not, goes on where its last checkpoint stands. A failed cell is tried again.
"""
import itertools
import math
import os
import shutil
import signal
import subprocess
import sys
import time

from nanope import checkpoint, metrics
from nanope.configurator import read_file
from nanope.files import lock_folder, read_json, write_json
from nanope.metrics import run_names
from nanope.runfolder import IDENTITY

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
EXIT_STOPPED = 75
OURS = 'wpe', 'seed', 'out_dir', 'init_from'  # set for each cell
EXTENSIONS = {'learned': ('lowrank', 'hold', 'tile', 'interpolate', 'random'), 'sinusoidal': ('recompute', 'interpolate'),
              'rope': ('yarn', 'linear', 'ntk', 'dynamic', 'llama3', 'none'), 'none': ('none',), 'alibi': ('none',)}  # as in extend.py


class Stopped(Exception):
    """SIGINT or SIGTERM came, or a child was told to stop: nothing is lost, the same command goes on."""


def run_script(name, args, log):
    """python NAME.py ARGS as a child, its output appended to a file, its errors and progress shown. Returns its exit code.

    SIGINT and SIGTERM go on to the child, which saves and stops; then Stopped is raised. The child has a session of its own, since Ctrl-C
    reaches every process in the foreground of a terminal, and train.py takes a second signal for impatience."""
    caught = []

    def pass_on(number, frame):
        caught.append(number)
        child.send_signal(number)

    with open(log, 'a', encoding='utf-8') as output:
        child = subprocess.Popen([sys.executable, os.path.join(ROOT, f'{name}.py'), *args], stdout=output, start_new_session=True)
    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if caught or code == EXIT_STOPPED:
        raise Stopped
    return code


def settings_of(files, flags):
    """{name: value} of config files and then of flags, as the ledger keeps them. train.py is who checks them."""
    problems = []
    settings = {name: value for path in files for _, name, (value,) in read_file(path, {}, problems)}
    if problems:
        raise ValueError('\n'.join(problems))
    for flag in flags:
        name, equals, value = flag.removeprefix('--').partition('=')
        if name in OURS:
            raise ValueError(f'--train: {flag}: compare.py sets {name} itself')
        if not flag.startswith('--') or not equals:
            raise ValueError(f'--train: {flag}: settings are written --name=value')
        settings[name] = value
    return {name: str(value) for name, value in settings.items() if name not in OURS}


def open_ledger(to, settings):
    """The ledger of a study folder, begun where there is none. Raises ValueError where its cells were trained with other settings."""
    path = os.path.join(to, 'ledger.json')
    ledger = read_json(path) if os.path.exists(path) else {'settings': settings, 'cells': {}}
    old = ledger['settings']
    changed = [f'{name} was {old.get(name, "not set")}, now {settings.get(name, "not set")}'
               for name in sorted(old.keys() | settings.keys()) if old.get(name) != settings.get(name)]
    if settings and old and changed:
        raise ValueError(f'{to} holds a study with other settings: {"; ".join(changed)}. Use the same ones, or another --to')
    return {**ledger, 'settings': old or settings}


def run_cell(to, ledger, cell, script, args, **facts):
    """Run a cell and keep its entry in the ledger, on the disk, up to date."""
    entry = ledger['cells'][cell] = {'state': 'stopped', 'exit': None, 'seconds': None, **facts}
    started = time.perf_counter()
    write_json(os.path.join(to, 'ledger.json'), ledger)           # as it stays if we are killed
    try:
        entry['exit'] = run_script(script, args, os.path.join(to, 'runs', f'{cell}.log'))
        entry['state'] = 'failed' if entry['exit'] else 'done'
    finally:
        entry['seconds'] = round(time.perf_counter() - started, 1)
        write_json(os.path.join(to, 'ledger.json'), ledger)
    outcome = f'failed, {exit_text(entry["exit"])},' if entry['exit'] else 'done'
    print(f'{cell}: {outcome} after {entry["seconds"]:,.0f} s', flush=True)


def exit_text(code):
    """What an exit code of a child means."""
    if code < 0:
        return f'ended by {signal.Signals(-code).name}'
    return f'exit code {code}' + {2: ', bad input', 65: ', the loss was not finite'}.get(code, '')


# ---- training --------------------------------------------------------------------------------------------------------

def finished(run):
    """Whether train.py came to the end of a run: its last evaluation is on record and its last checkpoint in order."""
    ends = [record['step'] for record in metrics.read(run) if record['event'] == 'final']
    try:
        config = read_json(os.path.join(run, 'config.json'))
        checkpoint.verify(checkpoint.step_folder(run, ends[-1]))
        return ends[-1] == config['max_iters'] or config.get('patience') is not None  # it may have stopped early
    except (OSError, ValueError, KeyError, IndexError):
        return False


def wait_for(run):
    """A study that was killed with SIGKILL leaves its child behind, which goes on: let it finish."""
    try:
        lock_folder(run, 'trained').release()
    except ValueError as error:
        print(f'{error}; waiting for it', flush=True)
        lock_folder(run, 'trained', wait=True).release()


def train_missing(to, files, wpes, seeds, flags, tuned=None):
    """Train every scheme with every seed that is not there yet. Returns (run folders, failed cells as rows of report.json).

    files: config files for train.py. flags: more of its settings. tuned: what sweep() returned. Raises Stopped."""
    ledger, runs, failed = open_ledger(to, settings_of(files, flags)), [], []
    os.makedirs(os.path.join(to, 'runs'), exist_ok=True)
    for seed, wpe in itertools.product(seeds, wpes):
        more = {tuned['setting']: tuned['best'][wpe]} if tuned else {}
        run, code = train_one(to, ledger, '_'.join([wpe, *more.values(), str(seed)]), files, flags, wpe=wpe, seed=seed, **more)
        if code:
            failed.append({'run': run, 'wpe': wpe, 'extension': None, 'seed': seed, 'exit': code})
        else:
            runs.append(run)
    write_json(os.path.join(to, 'ledger.json'), ledger)
    return runs, failed


def train_one(to, ledger, cell, files, flags, **settings):
    """Train a cell unless that is done: (its run folder, its exit code)."""
    run = os.path.join(to, 'runs', cell)
    wait_for(run)
    if finished(run):
        ledger['cells'].setdefault(cell, {'seconds': None}).update(state='done', exit=0)
    else:
        args = [f'--{name}={value}' for name, value in settings.items()]
        run_cell(to, ledger, cell, 'train', [*files, *flags, *args, f'--out_dir={run}', '--init_from=auto'])
    return run, ledger['cells'][cell]['exit']


def read_sweep(text):
    """'learning_rate=1e-3,3e-3' -> ('learning_rate', ['1e-3', '3e-3']). Raises ValueError."""
    name, equals, values = text.partition('=')
    values = values.split(',')
    if not equals or len(values) < 2 or not all(values) or len(set(values)) < len(values) or name in OURS:
        raise ValueError(f'--sweep={text}: write a setting of train.py and two or more values, as in --sweep=learning_rate=1e-3,3e-3')
    return name, values


def sweep(to, files, wpes, flags, name, values):
    """Try each value of a setting for every scheme alike, with seed 0: {'setting', 'losses': {wpe: {value: loss, None if it failed}},
    'best': {wpe: value}}. The loss is the final one on all validation tokens, so what is compared later uses other seeds."""
    ledger, losses = open_ledger(to, settings_of(files, flags)), {}
    os.makedirs(os.path.join(to, 'runs'), exist_ok=True)
    for wpe, value in itertools.product(wpes, values):
        run, code = train_one(to, ledger, f'{wpe}_{value}_0', files, flags, wpe=wpe, seed=0, **{name: value})
        final = [record['loss'] for record in metrics.read(run) if record['event'] == 'final']
        losses.setdefault(wpe, {})[value] = None if code else final[-1]
    hopeless = [wpe for wpe, found in losses.items() if all(loss is None for loss in found.values())]
    if hopeless:
        raise ValueError(f'--sweep: no value of {name} trained {", ".join(hopeless)}; see {to}/runs/*.log')
    best = {wpe: min((value for value in values if found[value] is not None), key=found.get) for wpe, found in losses.items()}
    return {'setting': name, 'losses': losses, 'best': best}


# ---- extending -------------------------------------------------------------------------------------------------------

def read_methods(text, factor):
    """'yarn,lowrank:4' -> [('yarn', factor), ('lowrank', 4.0)]. Raises ValueError."""
    known, methods = dict.fromkeys(name for names in EXTENSIONS.values() for name in names), []
    for part in filter(None, text.split(',')):
        name, _, times = part.strip().partition(':')
        try:
            methods.append((name, float(times or factor)))
        except ValueError:
            raise ValueError(f'--extend={text}: {times!r} is no number; write method or method:factor, as in lowrank:4') from None
        if name not in known:
            raise ValueError(f'--extend={text}: {name!r} is no method of extend.py; it has {", ".join(known)}')
        if not 1 < methods[-1][1] < math.inf:
            raise ValueError(f'--extend={text}: {methods[-1][1]:g} times the trained length is no extension')
    return methods


def check_methods(methods, schemes):
    """Raises ValueError where a method of read_methods() fits none of the schemes: it would be left out without a word."""
    for name, _ in methods:
        fitting = [wpe for wpe, names in EXTENSIONS.items() if name in names]
        if not set(fitting) & set(schemes):
            raise ValueError(f'--extend: {name} is for {", ".join(fitting)}; what is compared is {", ".join(dict.fromkeys(schemes))}')


def extend_missing(to, runs, methods):
    """Extend every run by every method that fits its scheme, unless that is there. Returns (run folders, failed cells).

    runs: {run folder: its Checkpoint}. methods: [(name, times its context length)]."""
    check_methods(methods, [found.state['config']['wpe'] for found in runs.values()])
    ledger, made, failed = open_ledger(to, {}), [], []
    os.makedirs(os.path.join(to, 'runs'), exist_ok=True)
    for name, (run, found) in zip(run_names(list(runs)), runs.items()):
        settings = found.state['config']
        if found.weights is not None:
            raise ValueError(f'{run} is no run folder: extend it first, python extend.py {run}, and compare what that writes')
        for method, factor in methods:
            if method not in EXTENSIONS[settings['wpe']]:
                continue
            n = round(settings['block_size'] * factor)
            cell = f'{name.replace(os.sep, "_")}_{method}_{n}'
            target = os.path.join(to, 'runs', cell)
            source = read_json(os.path.join(found.path, 'manifest.json'))['digest']  # the run may have been trained on
            entry = ledger['cells'].get(cell, {})
            if not (checkpoint.steps(target) and entry.get('source') == source and entry['state'] == 'done'):
                shutil.rmtree(target, ignore_errors=True)
                args = [run, f'--block_size={n}', f'--method={method}', f'--out_dir={target}', f'--step={found.step}']
                run_cell(to, ledger, cell, 'extend', args, source=source)
            code, extension = ledger['cells'][cell]['exit'], f'{method} ×{n / settings["block_size"]:g}'
            if code:
                failed.append({'run': target, 'wpe': settings['wpe'], 'extension': extension, 'seed': settings['seed'], 'exit': code})
            else:
                made.append(target)
    return made, failed


def tune_missing(to, runs, share):
    """Train extended runs on for a share of the updates they have had, unless that is done. Returns (run folders, failed cells).

    Each goes on under its own settings, as many tokens an update as before, by a schedule of its own: warm-up for a tenth, then the
    cosine. runs: {run folder: its Checkpoint}."""
    ledger, tuned, failed = open_ledger(to, {}), [], []
    for run, found in runs.items():
        settings, cell = found.state['config'], f'{os.path.basename(run)}_tuned'
        updates, longer = max(round(found.step * share), 1), settings['block_size'] / found.state['extended']['trained']
        ours = {'out_dir': os.path.join(to, 'runs', cell), 'init_from': run, 'max_iters': updates, 'warmup_iters': updates // 10,
                'lr_decay_iters': updates, 'eval_interval': updates, 'checkpoint_interval': updates, 'allow_change': False,
                'batch_size': max(round(settings['batch_size'] / longer), 1)}
        source = f'{read_json(os.path.join(found.path, "manifest.json"))["digest"]} {updates}'
        wait_for(ours['out_dir'])
        entry = ledger['cells'].get(cell, {})
        if finished(ours['out_dir']) and entry.get('source') == source:
            entry.update(state='done', exit=0)
        else:
            shutil.rmtree(ours['out_dir'], ignore_errors=True)    # what lies there is of other weights or for other updates
            args = [f'--{name}={value}' for name, value in {**settings, **ours, 'overwrite': True}.items() if name not in IDENTITY]
            run_cell(to, ledger, cell, 'train', args, source=source)
        code = ledger['cells'][cell]['exit']
        if code:
            extension = f'{found.state["extended"]["method"]} ×{longer:g}, tuned'
            failed.append({'run': ours['out_dir'], 'wpe': settings['wpe'], 'extension': extension, 'seed': settings['seed'], 'exit': code})
        else:
            tuned.append(ours['out_dir'])
    write_json(os.path.join(to, 'ledger.json'), ledger)
    return tuned, failed
