"""The cells of a study folder: each one process of train.py or extend.py, made once.

    TO/ledger.json             each cell's state (done, failed, stopped), exit code and seconds, and the settings that all cells share
    TO/runs/<cell>             as the script writes it                    TO/runs/<cell>.log    what it printed

Whether a cell is done is read off its folder, not off the ledger, so it does not matter when a study was killed; a run that is not, goes
on where its last checkpoint stands. A failed cell is tried again.
"""
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple

from nanope import checkpoint, metrics
from nanope.files import lock_folder, make_folder, read_json, write_json

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
EXIT_STOPPED = 75

# script: train or extend. args: its own, but for --out_dir. source: what it is made of, None for nothing; where that has changed it is
# made anew. wpe, extension, seed: for report.json
Cell = namedtuple('Cell', 'name script args source wpe extension seed')


class Stopped(Exception):
    """SIGINT or SIGTERM came, or a child was told to stop: nothing is lost, the same command goes on."""


def make_missing(to, settings, cells):
    """Make the cells that are not there yet. Returns (run folders, failed cells as rows of report.json). Raises Stopped.

    settings: those of the study, see open_ledger()."""
    ledger, made, failed = open_ledger(to, settings), [], []
    make_folder(os.path.join(to, 'runs'))
    for cell in cells:
        run = os.path.join(to, 'runs', cell.name)
        wait_for(run)
        if is_done(run, cell, ledger['cells'].get(cell.name, {})):
            ledger['cells'].setdefault(cell.name, {'seconds': None}).update(state='done', exit=0)
        else:
            run_cell(to, ledger, run, cell)
        code = ledger['cells'][cell.name]['exit']
        if code:
            failed.append({'run': run, 'wpe': cell.wpe, 'extension': cell.extension, 'seed': cell.seed, 'exit': code})
        else:
            made.append(run)
    write_json(os.path.join(to, 'ledger.json'), ledger)
    return made, failed


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


def wait_for(run):
    """A study that was killed with SIGKILL leaves its child behind, which goes on: let it finish."""
    try:
        lock_folder(run, 'trained').release()
    except ValueError as error:
        print(f'{error}; waiting for it', flush=True)
        lock_folder(run, 'trained', wait=True).release()


def finished(run):
    """Whether train.py came to the end of a run: its last evaluation is on record and its last checkpoint in order."""
    ends = [record['step'] for record in metrics.read(run) if record['event'] == 'final']
    try:
        config = read_json(os.path.join(run, 'config.json'))
        checkpoint.verify(checkpoint.step_folder(run, ends[-1]))
        return ends[-1] == config['max_iters'] or config.get('patience') is not None  # it may have stopped early
    except (OSError, ValueError, KeyError, IndexError):
        return False


def is_done(run, cell, entry):
    """Whether a cell was made already, of the same source."""
    return (finished(run) if cell.script == 'train' else checkpoint.steps(run)) and entry.get('source') == cell.source


def run_cell(to, ledger, run, cell):
    """Run a cell and keep its entry in the ledger, on the disk, up to date."""
    if cell.source:
        shutil.rmtree(run, ignore_errors=True)                    # what lies there is of something else; else it goes on
    entry = ledger['cells'][cell.name] = {'state': 'stopped', 'exit': None, 'seconds': None}
    entry |= {'source': cell.source} if cell.source else {}
    started = time.perf_counter()
    write_json(os.path.join(to, 'ledger.json'), ledger)           # as it stays if we are killed
    try:
        entry['exit'] = run_script(cell.script, [*cell.args, f'--out_dir={run}'], f'{run}.log')
        entry['state'] = 'failed' if entry['exit'] else 'done'
    finally:
        entry['seconds'] = round(time.perf_counter() - started, 1)
        write_json(os.path.join(to, 'ledger.json'), ledger)
    outcome = f'failed, {exit_text(entry["exit"])},' if entry['exit'] else 'done'
    print(f'{cell.name}: {outcome} after {entry["seconds"]:,.0f} s', flush=True)


def run_script(name, args, log):
    """python NAME.py ARGS as a child, its output appended to a file, its errors and progress shown. Returns its exit code.

    SIGINT and SIGTERM go on to the child, which saves and stops; then Stopped is raised. The child has a session of its own, since Ctrl-C
    reaches every process in the foreground of a terminal, and train.py takes a second signal for impatience."""
    caught, passed_on = [], 0
    before = {number: signal.signal(number, lambda number, frame: caught.append(number)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:                                                          # handled from here on: no child is left behind, however soon one comes
        with open(log, 'a', encoding='utf-8') as output:
            child = subprocess.Popen([sys.executable, os.path.join(ROOT, f'{name}.py'), *args], stdout=output, start_new_session=True)
        while (code := child.poll()) is None:
            for number in caught[passed_on:]:
                child.send_signal(number)
                passed_on += 1
            time.sleep(0.05)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if caught or code == EXIT_STOPPED:
        raise Stopped
    return code


def exit_text(code):
    """What an exit code of a child means."""
    if code < 0:
        return f'ended by {signal.Signals(-code).name}'
    return f'exit code {code}' + {2: ', bad input', 65: ', the loss was not finite'}.get(code, '')
