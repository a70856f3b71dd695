"""metrics.jsonl: one JSON record a line, appended as things happen. The truth about a run; plots and tables are read from it."""
import json
import os
import queue
import statistics
import sys
import threading

from nanope.files import brief, naming, read_json

LIMITS = {'init': 90, 'log': 30, 'finish': 90}  # seconds that a call of wandb may take, beyond the limits that it has itself


def append(run, record):
    """Add one record: a flat dict with 'event', 'step' and 'loss', or 'text' where the event is a sample."""
    path = os.path.join(run, 'metrics.jsonl')
    with naming(path), open(path, 'a', encoding='utf-8') as file:
        file.write(json.dumps(record) + '\n')


def read(run):
    """All records of a run; a torn last line (the process was killed while writing) is passed over."""
    path = os.path.join(run, 'metrics.jsonl')
    if not os.path.isfile(path):  # also not a pipe, which might never end
        return []
    records = []
    with open(path, encoding='utf-8', errors='replace') as file:
        for line in file:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            record = record if isinstance(record, dict) else {}
            kinds = ('event', str), ('step', int), (('text', str) if record.get('event') == 'sample' else ('loss', (int, float)))
            if all(isinstance(record.get(name), kind) for name, kind in kinds):
                records.append(record)
    return records


def run_names(runs):
    """What to call run folders: as many last parts of their paths as tell them apart, [str, ...]."""
    paths = [os.path.abspath(run).split(os.sep) for run in runs]
    for n in range(1, max(map(len, paths), default=0) + 1):
        names = ['/'.join(path[-n:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return list(runs)


def scheme_of(run):
    """The wpe in a run folder's config.json, or None."""
    try:
        return str(read_json(os.path.join(run, 'config.json'))['wpe'])
    except (OSError, ValueError, KeyError):
        return None


def rewind(run, step):
    """Drop what a run resumed at `step` will do again: updates from `step` on, evaluations after it, and torn lines."""
    kept = [record for record in read(run) if record['step'] < step or record['step'] == step and record['event'] == 'eval']
    path = os.path.join(run, 'metrics.jsonl')
    with naming(path), open(path + '.tmp', 'w', encoding='utf-8') as file:
        file.writelines(json.dumps(record) + '\n' for record in kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + '.tmp', path)


def spikes(losses):
    """Where a loss stands out from the ten records before it: above their median by six times their median deviation, and by 0.5 at
    least. losses: [(step, loss)]. Returns the steps at which one begins."""
    found, inside = [], False
    for i in range(10, len(losses)):
        before = [loss for _, loss in losses[i - 10:i]]
        middle = statistics.median(before)
        out = losses[i][1] > middle + max(6 * statistics.median(abs(loss - middle) for loss in before), 0.5)
        if out and not inside:
            found.append(losses[i][0])
        inside = out
    return found


def within(seconds, function, *args):
    """What function returns or raises; TimeoutError where that takes longer, and then its thread is left to itself."""
    answer = queue.SimpleQueue()

    def work():
        try:
            answer.put((function(*args), None))
        except BaseException as error:
            answer.put((None, error))
    threading.Thread(target=work, daemon=True).start()
    try:
        result, error = answer.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f'no answer within {seconds} seconds') from None
    if error:
        raise error
    return result


def start_wandb(mode, project, run, config):
    """Mirror metrics to Weights & Biases: returns a function (method, *values) that calls the wandb run where there is one.

    Training never depends on it: the first failure, or a call that hangs, is a warning and the end of the mirror."""
    runs = []

    def init():
        import wandb
        limits = wandb.Settings(init_timeout=30, finish_timeout=60, finish_timeout_raises=True)  # a run does not wait for a network
        return wandb.init(project=project, name=os.path.basename(os.path.normpath(run)), mode=mode, dir=run, config=config, settings=limits)

    def call(method, *values):
        try:
            for each in runs:
                within(LIMITS[method], getattr(each, method), *values)
        except (Exception, SystemExit) as error:
            runs.clear()
            print(f'warning: wandb: {brief(error)}; training goes on without it, metrics.jsonl has everything', file=sys.stderr)

    if mode != 'off':
        if mode == 'offline':
            os.environ.setdefault('WANDB_ERROR_REPORTING', 'false')  # else it calls its makers all the same
        try:
            runs.append(within(LIMITS['init'], init))
        except (Exception, SystemExit) as error:
            print(f'warning: no wandb: {brief(error)}; training goes on without it, metrics.jsonl has everything', file=sys.stderr)
    return call
