"""A set of runs to compare: which they are, whether they can be compared, and what tells them apart."""
import os

from nanope import checkpoint
from nanope.loader import Data
from nanope.metrics import run_names

# Settings that a fair comparison may differ in: the scheme, the seed, and what does not change the course of training.
MAY_DIFFER = {'wpe', 'seed', 'dataset', 'vocab_size', 'out_dir', 'init_from', 'overwrite', 'allow_change', 'eval_interval', 'eval_tokens',
              'eval_batch_size', 'checkpoint_interval', 'keep_checkpoints', 'log_interval', 'wandb', 'wandb_project', 'device', 'compile',
              'threads', 'micro_batch', 'sample_interval', 'sample_tokens', 'checkpoint_blocks', 'shard'}
EXTENDED = {'block_size', 'sinusoidal_factor', 'rope_scaling', 'rope_factor', 'rope_trained'}  # what extend.py changes


def find_runs(paths, to, step):
    """{run folder: its Checkpoint}, in the order given. Raises ValueError where one cannot be read or two cannot be compared."""
    paths = [path for path in paths if os.path.realpath(path) != os.path.realpath(to)]  # as in: python compare.py out/*
    if not paths:
        raise ValueError('no run to compare: python compare.py out/a out/b ...')
    seen = {}
    for path in paths:
        if seen.setdefault(os.path.realpath(path), path) is not path:
            raise ValueError(f'{path} is given twice')
    runs = {path: checkpoint.load(path, step) for path in paths}
    digests = {}
    for path, found in runs.items():
        if found.state.get('data_digest'):                        # what others trained has none
            digests.setdefault(found.state['data_digest'], path)
    if len(digests) > 1:
        raise ValueError(f'runs trained on different data cannot be compared: {" and ".join(digests.values())}')
    return runs


def open_data(runs, name=None):
    """(name, Data) of what to score on: data/name, or what the runs were trained on. Raises ValueError where that folder holds other data
    by now, or where a model of others has another vocabulary."""
    trained = {path: found for path, found in runs.items() if found.state.get('data_digest')}
    if not trained and not name:
        raise ValueError(f'{next(iter(runs))} does not say what it was trained on: give the data to score on, --dataset=NAME')
    name = name or next(iter(trained.values())).state['config']['dataset']
    folder = os.path.join('data', name)
    data = Data(folder)
    for path, found in runs.items():
        if path in trained and data.digest != found.state['data_digest']:
            raise ValueError(f'{folder} is not the data that {path} was trained on (its digest differs): prepare it again')
        if found.state['tokenizer'] != data.tokenizer.to_json() or data.meta['val']['max_id'] >= found.state['config']['vocab_size']:
            raise ValueError(f'{path} has another vocabulary than {folder}: they cannot be scored on the same tokens')
    return name, data


# ---- what they are --------------------------------------------------------------------------------------------------------------------

def tuned(found):
    """Whether a run started from another one and was trained since."""
    return bool(found.state.get('origin')) and 'extended' not in found.state


def extension(found):
    """How a run's context was extended, as in 'yarn ×2', whether it was fine-tuned since, or None."""
    extended, origin = found.state.get('extended'), found.state.get('origin')
    if extended:
        return f'{extended["method"]} ×{found.state["config"]["block_size"] / extended["trained"]:g}'
    if origin:
        try:
            before = extension(checkpoint.load(origin['run'], origin['step'])) if checkpoint.steps(origin['run']) else None
        except ValueError:                                        # it is not there any more
            before = None
        return ', '.join(filter(None, (before, 'tuned')))
    return None


def trained_length(found):
    """Tokens of context that a run was trained at, before any extension."""
    return int(found.state['extended']['trained']) if 'extended' in found.state else found.state['config']['block_size']


def differences(checkpoints):
    """What besides the scheme, the seed and an extension differs between runs: {name: [value of each run]}."""
    may_differ = MAY_DIFFER | (EXTENDED if any('extended' in found.state for found in checkpoints) else set())
    facts = [{**found.state['config'], 'step': found.step, 'dtype': found.environment['dtype']} for found in checkpoints]
    names = [name for name in facts[0] if name not in may_differ and all(name in fact for fact in facts)]  # versions may add names
    values = {name: [fact[name] for fact in facts] for name in names}
    return {name: each for name, each in values.items() if any(value != each[0] for value in each)}


def name_and_tell_apart(rows, failed, runs):
    """Give rows of report.json their 'name', and as 'settings' what tells them from others of the same scheme and extension."""
    everything = rows + failed
    for row, name in zip(everything, run_names([row['run'] for row in everything])):
        row['name'] = name
    for row in rows:
        like = [other['run'] for other in rows if (other['wpe'], other['extension']) == (row['wpe'], row['extension'])]
        values = differences([runs[path] for path in like])
        row['settings'] = {name: each[like.index(row['run'])] for name, each in values.items()}
