"""What train.py does with a run folder: start a run in it, go on with the one it holds, or refuse; save; say why a run crashed."""
import contextlib
import math
import os
import sys
from dataclasses import asdict, fields

from torch.nn import functional as F

from model import GPTConfig
from nanope import checkpoint, metrics, optim, parallel
from nanope.files import read_json, remove, sync, write_json

EXIT_NONFINITE = 65
IDENTITY = {field.name for field in fields(GPTConfig)} - {'dropout'}  # what the model is: never changes in a run
FREE = {'out_dir', 'init_from', 'overwrite', 'allow_change', 'max_iters', 'eval_interval', 'eval_tokens', 'eval_batch_size',
        'checkpoint_interval', 'keep_checkpoints', 'log_interval', 'wandb', 'wandb_project', 'device', 'threads', 'compile', 'micro_batch',
        'sample_interval', 'sample_tokens', 'patience', 'min_delta', 'lr_range', 'checkpoint_blocks', 'shard'}
WRITTEN = 'ckpt', 'metrics.jsonl', 'config.json', 'loss.png', 'lr_range.png', 'crash.json'  # what train.py writes, and nothing else


def find_start(config, tokenizer):
    """Where the run of `config` starts: (its own last checkpoint to resume, or None; another run's checkpoint to start from, or None).

    The model is then what the checkpoint says: a run that started from another one takes the settings in IDENTITY from there.
    Raises ValueError where the folder holds a run that is not to be resumed, or one that does not fit the settings."""
    held = checkpoint.steps(config.out_dir)
    if config.init_from == 'resume' or config.init_from == 'auto' and held:
        if not held:
            raise ValueError(checkpoint.no_checkpoint(config.out_dir))
        found = checkpoint.load(config.out_dir)
        if found.state.get('origin'):
            adopt(config, found)
        check_resume(config, found.state['config'])
        return found, None
    used = held or any(os.path.exists(os.path.join(config.out_dir, name)) for name in WRITTEN)
    again = not held and (config.init_from == 'auto' or config.lr_range) and is_repetition(config)
    if used and not (config.overwrite or again):
        go_on = 'go on with --init_from=resume, ' if held else ''  # it may have ended before its first checkpoint
        raise ValueError(f'{config.out_dir} already holds a run: {go_on}start anew with --overwrite=true, or give another --out_dir')
    if config.init_from in ('scratch', 'auto'):
        return None, None
    if os.path.realpath(config.init_from) == os.path.realpath(config.out_dir):
        raise ValueError(f'--init_from={config.init_from} is the run folder itself: --init_from=resume goes on with it')
    found = checkpoint.load(config.init_from)
    if found.state['tokenizer'] != tokenizer.to_json():
        raise ValueError(f'{config.init_from} was trained with another vocabulary than data/{config.dataset} has: '
                         'prepare the text with the same tokenizer, or use the same data')
    adopt(config, found)
    if found.weights is not None:
        fit(config, found)
    return None, found


def is_repetition(config):
    """Whether what the folder holds comes again when `config` is started in it: the same run, which saved nothing yet, or a range test."""
    there = [name for name in WRITTEN if os.path.isfile(path := os.path.join(config.out_dir, name)) and os.path.getsize(path)]
    if not there + checkpoint.names(config.out_dir):
        return True
    try:
        saved = read_json(os.path.join(config.out_dir, 'config.json'))
    except (OSError, ValueError):
        return False
    if config.lr_range:
        return bool(saved.get('lr_range'))
    return all(name in saved and saved[name] == value for name, value in asdict(config).items() if name not in FREE)


def adopt(config, found):
    """Set what the model is to what a checkpoint says, but for what weights of others leave open."""
    saved = checkpoint.model_config(found)
    for name in sorted(IDENTITY & found.state['config'].keys() - found.free):
        if getattr(config, name) != getattr(saved, name):
            print(f'{name}={getattr(saved, name)}, from {found.path}')
            setattr(config, name, getattr(saved, name))


def fit(config, found):
    """Cut weights of others to the model of config, in place: rows that pad the vocabulary, rows of the position table or none of it."""
    name, saved = 'transformer.wpe.weight', checkpoint.model_config(found)
    tokens = found.weights['transformer.wte.weight']
    found.weights = {**found.weights, 'transformer.wte.weight': F.pad(tokens, (0, 0, 0, config.padded_vocab_size - len(tokens)))}
    if saved.wpe == 'learned' != config.wpe:
        print(f'wpe={config.wpe}: all weights of {found.path} but its position table')
        del found.weights[name]
    elif saved.wpe == 'learned':
        if config.block_size != saved.block_size:
            config.block_size = min(config.block_size, saved.block_size)
            print(f'block_size={config.block_size}: the first of the {saved.block_size} rows of the position table in {found.path}')
        found.weights[name] = found.weights[name][:config.block_size]


def check_resume(config, saved):
    """Compare a run's saved config with the present one: ValueError names every setting that must not, or not silently, differ."""
    changed = [name for name, value in asdict(config).items() if name in saved and saved[name] != value and name not in FREE]
    tell = [f'{name} was {saved[name]}, now {getattr(config, name)}' for name in changed]
    if 'lr_decay_iters' in changed and config.lr_decay_iters == config.max_iters:
        tell.append(f'it follows max_iters; --lr_decay_iters={saved["lr_decay_iters"]} keeps the schedule')
    if any(name in IDENTITY for name in changed):
        raise ValueError(f'{config.out_dir} holds another model: {"; ".join(tell)}. Use the saved settings or another --out_dir')
    if changed and not config.allow_change:
        raise ValueError(f'resuming {config.out_dir} would change the course of training: {"; ".join(tell)}. '
                         'Use the saved settings, or --allow_change=true')
    for line in tell:
        print(f'warning: resuming with a change: {line}', file=sys.stderr)


def as_before(config, resumed, name):
    """A setting of the machine; for 'auto', what it was when the checkpoint was written that is resumed, so that the bits repeat."""
    value = getattr(config, name)
    return resumed.environment.get(name, 'auto') if resumed and value == 'auto' else value


def clear(run):
    """Delete what an earlier run wrote into the folder, and nothing else that lies there."""
    for name in checkpoint.names(run):
        remove(os.path.join(run, 'ckpt', name))
    for path in (os.path.join(run, name) for name in WRITTEN):
        if os.path.isfile(path):
            os.remove(path)


# ---- during a run -----------------------------------------------------------------------------------------------------

def resume(found, config, data, model, optimizers, scaler, names, environment):
    """Put a checkpoint's weights and optimizers' state in place. Returns its step."""
    if found.state.get('data_digest') != data.digest:
        raise ValueError(f'data/{config.dataset} is not the data that {config.out_dir} was trained on (its digest differs): '
                         'prepare the same data, or start a run in another --out_dir')
    for name, value in environment.items():
        if found.environment.get(name) != value:
            print(f'warning: {name} was {found.environment.get(name)}, now {value}: same batches, but not the same bits', file=sys.stderr)
    if found.step > config.max_iters:
        raise ValueError(f'{config.out_dir} is at step {found.step}, past max_iters={config.max_iters}')
    checkpoint.load_weights(model, found.tensors('model'), found.path)
    moments = found.tensors('optim')
    if moments:  # there are none before the first update
        optim.load_tensors(optimizers, moments, names, found.path)
    if found.state.get('scaler'):  # empty where the run did not scale: then a new scaler finds its scale
        scaler.load_state_dict(found.state['scaler'])
    if parallel.rank == 0:
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(config.out_dir, 'crash.json'))  # it tells how the last attempt ended, and this is another one
    print(f'resuming {config.out_dir} at step {found.step}')
    return found.step


def crash(config, step, **facts):
    """Say what is not finite at which step and leave the last good checkpoint as it is. Returns the exit code."""
    facts = {'step': step, 'learning_rate': facts.pop('learning_rate'), **{name: str(value) for name, value in facts.items()}}
    if parallel.rank == 0:
        write_json(os.path.join(config.out_dir, 'crash.json'), facts)
    held = checkpoint.steps(config.out_dir)
    print(f'error: not finite: {", ".join(f"{name} {value}" for name, value in facts.items())}; stopped, with nothing of it saved. '
          f'{f"The last checkpoint is step {held[-1]}" if held else "There is no checkpoint"}; '
          'a lower learning_rate or longer warmup_iters may help', file=sys.stderr)
    return EXIT_NONFINITE


def save(config, step, model, optimizers, scaler, names, data, environment, origin):
    """Save the state after `step` updates unless it is saved already, name the best, and drop old checkpoints. All ranks take part."""
    weights = parallel.whole_dict(dict(model.named_parameters()))
    moments = parallel.whole_dict(optim.tensors(optimizers, names))
    if parallel.rank:
        return
    try:
        checkpoint.verify(checkpoint.step_folder(config.out_dir, step))
    except (ValueError, OSError):
        if os.path.exists(os.path.join(config.out_dir, 'metrics.jsonl')):
            sync(os.path.join(config.out_dir, 'metrics.jsonl'))  # no checkpoint on the disk without the records that led to it
        state = {'config': asdict(config), 'tokenizer': data.tokenizer.to_json(), 'data_digest': data.digest,
                 'scaler': scaler.state_dict(), 'origin': origin}
        checkpoint.save(config.out_dir, step, weights, moments, state, environment)
        checkpoint.verify(checkpoint.step_folder(config.out_dir, step))  # before an older one is dropped for it
    evals = {r['step']: r['loss'] for r in metrics.read(config.out_dir) if r['event'] == 'eval' and abs(r['loss']) < math.inf}
    held = [s for s in checkpoint.steps(config.out_dir) if s in evals]
    if held:
        best = min(held, key=evals.get)
        checkpoint.mark_best(config.out_dir, best, evals[best])
    checkpoint.prune(config.out_dir, step, config.keep_checkpoints)
