"""Checkpoints that survive a kill at any moment and run nothing when read: safetensors and JSON, no pickle.

    out/<run>/ckpt/step_00001000/{model.safetensors, optim.safetensors, state.json, manifest.json}
    out/<run>/ckpt/best.json                                                  which step had the lowest validation loss

A checkpoint is written to a temporary folder, flushed to the disk and renamed; manifest.json holds the size and sha256 of the others and
of itself. The newest that verifies is the latest.
"""
import hashlib
import json
import os
import re
import shutil
import sys
from dataclasses import dataclass, field

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from model import GPT, GPTConfig
from nanope import huggingface, layouts, nanogpt, parallel
from nanope.configurator import restore
from nanope.files import read_json, remove, sha256, sync, write_json
from nanope.tokenizer import from_json

FORMAT = 1
STEP = 'step_([0-9]{8}|[1-9][0-9]{8,})'  # a name for each step: 8 digits at least, more where it takes more
FILES = ('model.safetensors', 'optim.safetensors', 'state.json')
MANIFEST = {'format': int, 'step': int, 'files': dict, 'environment': dict}  # what there must be in manifest.json
STATE = {'config': dict, 'tokenizer': dict}  # and in state.json


@dataclass
class Checkpoint:
    path: str
    step: int
    state: dict         # config, tokenizer, and what the training loop needs to go on
    environment: dict   # versions, device, dtype, threads: see nanope.device.environment
    # of what others trained, which is no run folder (nanope.huggingface, nanope.nanogpt)
    weights: dict | None = field(default=None, repr=False)  # the tensors of 'model'
    free: frozenset = field(default=frozenset(), repr=False)  # settings of the model that the weights leave open

    def tensors(self, name):
        """The tensors of 'model' or 'optim' by name, on the CPU."""
        if self.weights is not None:
            return self.weights if name == 'model' else {}
        try:
            return load_file(os.path.join(self.path, f'{name}.safetensors'))
        except SafetensorError as error:
            raise ValueError(f'{self.path}/{name}.safetensors is not a safetensors file ({error})') from None


# ---- writing ------------------------------------------------------------------------------------------------------------------------

def seal(manifest):
    """The digest of a manifest's other fields."""
    content = {key: value for key, value in manifest.items() if key != 'digest'}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def step_folder(run, step):
    return os.path.join(run, 'ckpt', f'step_{step:08d}')


def save(run, step, model, optim, state, environment):
    """Write the checkpoint of `step`: model and optim are dicts of tensors, state and environment plain values. Returns its folder.

    Raises OSError naming the folder and its size where it cannot be written; the checkpoints before are untouched then."""
    target, temporary = step_folder(run, step), os.path.join(run, 'ckpt', f'.tmp-step_{step:08d}')
    try:
        if os.path.lexists(temporary):  # left by a killed save of the same step
            remove(temporary)
        os.makedirs(temporary)
        for folder in (run, os.path.dirname(os.path.abspath(run))):  # where run and ckpt may be new names
            if os.access(folder, os.R_OK):
                sync(folder)
        for name, tensors in (('model', model), ('optim', optim)):
            path = os.path.join(temporary, f'{name}.safetensors')
            save_file({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, path)
            sync(path)
        write_json(os.path.join(temporary, 'state.json'), {'format': FORMAT, 'step': step, **state})
        for name in ('model', 'optim'):  # safetensors lets nobody else read its files, whatever the umask
            shutil.copymode(os.path.join(temporary, 'state.json'), os.path.join(temporary, f'{name}.safetensors'))
        listing = {name: {'bytes': os.path.getsize(os.path.join(temporary, name)), 'sha256': sha256(os.path.join(temporary, name))}
                   for name in FILES}
        manifest = {'format': FORMAT, 'step': step, 'files': listing, 'environment': environment}
        write_json(os.path.join(temporary, 'manifest.json'), {**manifest, 'digest': seal(manifest)})
        sync(temporary)
        if os.path.lexists(target):  # a damaged one, or the same step saved again
            remove(target)
        os.rename(temporary, target)
        sync(os.path.dirname(target))
    except (SafetensorError, OSError) as error:
        n_bytes = sum(tensor.numel() * tensor.element_size() for tensor in (*model.values(), *optim.values()))
        raise OSError(f'could not write {target} ({n_bytes:,} bytes): {error}; '
                      'free some space; checkpoints from before are intact, and --init_from=resume goes on from them') from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def prune(run, step, keep):
    """After the save of `step`: remove all checkpoints but the newest `keep` and the best, and what a killed save left over.

    Checkpoints beyond `step` go too: the run would have gone on from them if they were whole."""
    mine = [number for number in steps(run) if number <= step]
    kept = {*mine[-keep:], *(number for number in mine if number == best_step(run))}
    for number in set(steps(run)) - kept:
        remove(step_folder(run, number))
    for name in os.listdir(os.path.join(run, 'ckpt')):
        if name.startswith('.tmp-'):
            shutil.rmtree(os.path.join(run, 'ckpt', name), ignore_errors=True)


def mark_best(run, step, val_loss):
    write_json(os.path.join(run, 'ckpt', 'best.json'), {'step': step, 'val_loss': val_loss})


# ---- reading ------------------------------------------------------------------------------------------------------------------------

def steps(run):
    """The steps of which `run` has a checkpoint, verified or not, ascending."""
    folder = os.path.join(run, 'ckpt')
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted(int(name[5:]) for name in names if re.fullmatch(STEP, name))


def names(run):
    """What save(), mark_best() and killed ones of them have put into the folder of the checkpoints."""
    folder = os.path.join(run, 'ckpt')
    there = os.listdir(folder) if os.path.isdir(folder) else []
    return [name for name in there if re.fullmatch(rf'(\.tmp-)?{STEP}|best\.json(\.tmp)?', name)]


def best_step(run):
    """The step that best.json names, or None."""
    try:
        step = read_json(os.path.join(run, 'ckpt', 'best.json')).get('step')
    except (OSError, ValueError):
        return None
    return step if isinstance(step, int) else None


class NewerFormat(ValueError):
    """Nothing is damaged, so to fall back to an older checkpoint would lose work."""


def verify(path):
    """Read one checkpoint folder. Raises ValueError naming the file that is missing, cut or changed."""
    manifest_path = os.path.join(path, 'manifest.json')
    if not os.path.exists(manifest_path):
        raise ValueError(f'{manifest_path} is missing')
    manifest = read_json(manifest_path)
    if manifest.get('digest') != seal(manifest):
        raise ValueError(f'{manifest_path} is damaged (its digest does not match)')
    if isinstance(manifest.get('format'), int) and manifest['format'] > FORMAT:
        raise NewerFormat(f'{path} was written by a newer nanoPE (format {manifest["format"]}, this one reads {FORMAT}): update nanoPE')
    check_kinds(manifest, MANIFEST, manifest_path)
    if os.path.basename(path) != os.path.basename(step_folder('', manifest['step'])):
        raise ValueError(f'{manifest_path} is of step {manifest["step"]}, which belongs in another folder')
    for name in FILES:
        file, expected = os.path.join(path, name), manifest['files'].get(name)
        check_kinds({name: expected}, {name: dict}, manifest_path)
        check_kinds(expected, {'bytes': int, 'sha256': str}, manifest_path)
        if not os.path.exists(file):
            raise ValueError(f'{file} is missing')
        if os.path.getsize(file) != expected['bytes']:
            raise ValueError(f'{file} has {os.path.getsize(file):,} bytes instead of {expected["bytes"]:,}')
        if sha256(file) != expected['sha256']:
            raise ValueError(f'{file} is damaged (its sha256 does not match manifest.json)')
    state = read_json(os.path.join(path, 'state.json'))
    check_kinds(state, STATE, os.path.join(path, 'state.json'))
    return Checkpoint(path, manifest['step'], state, manifest['environment'])


def check_kinds(content, kinds, path):
    """Raises ValueError where a dict that was read from path lacks one of the keys of kinds, or has a value of another kind there."""
    odd = [name for name, kind in kinds.items() if not isinstance(content.get(name), kind)]
    if odd:
        raise ValueError(f'{path} is not what nanoPE writes: {", ".join(odd)} is missing or of the wrong kind')


def no_checkpoint(run):
    """A sentence on a folder without checkpoints, which names the run folders that may have been meant."""
    path = os.path.normpath(run)
    around = path.partition(os.sep + 'ckpt')[0]
    if around != path and steps(around):
        return f'{run} holds no checkpoint itself: give its run folder, {around}'
    for folder in (path, os.path.dirname(path) or '.'):  # below it, else beside it
        inside = [os.path.join(folder, name) for name in sorted(os.listdir(folder))] if os.path.isdir(folder) else []
        runs = [each for each in inside if steps(each)]
        if runs:
            return f'{run} holds no checkpoint; these do: {", ".join(runs[:10])}' + (f' and {len(runs) - 10} more' if runs[10:] else '')
    if not os.path.exists(run):
        return f'{run} holds no checkpoint: it is neither a folder nor one of {", ".join(huggingface.HUB)}'
    return f'{run} holds no checkpoint (nothing like {run}/ckpt/step_00001000): train it first'


def load(run, step='latest'):
    """The checkpoint of `run` at step 'latest' (the newest that verifies), 'best', or a number. Raises ValueError where there is none.

    Instead of a run folder, run may be what nanope.huggingface or nanope.nanogpt reads."""
    there = steps(run)
    if not there:
        found = huggingface.read(run) or nanogpt.read(run)
        if not found:
            raise ValueError(no_checkpoint(run))
        if step not in ('latest', 'best', found['step']):
            raise ValueError(f'{run} is no run folder and holds step {found["step"]} only: leave step={step} out')
        return Checkpoint(environment={'dtype': 'float32'}, **found)
    if step != 'latest':
        number = best_step(run) if step == 'best' else step
        if number not in there:
            raise ValueError(f'{run} has no checkpoint of step {step}; it has {", ".join(map(str, there))}')
        return verify(step_folder(run, number))
    problems = []
    for number in reversed(there):
        try:
            checkpoint = verify(step_folder(run, number))
        except (NewerFormat, PermissionError):
            raise
        except (ValueError, OSError) as error:  # OSError: the disk fails there
            problems.append(str(error))
        else:
            for problem in problems:
                print(f'warning: {problem}; falling back to step {number}', file=sys.stderr)
            return checkpoint
    raise ValueError(f'no checkpoint of {run} can be read: ' + '; '.join(problems))


def model_config(checkpoint):
    """The GPTConfig that a checkpoint was trained with. Raises ValueError where its settings are none."""
    return restore(GPTConfig, checkpoint.state['config'], f'{checkpoint.path}/state.json')


def check_fit(shapes, tensors, where):
    """Raises one ValueError listing where tensors (dict) differ from shapes (dict) in names or shapes."""
    found = [f'{name} is missing' for name in shapes if name not in tensors]
    found += [f'{name} is not in the model' for name in tensors if name not in shapes]
    found += [f'{name} has shape {tuple(tensors[name].shape)} instead of {tuple(shape)}'
              for name, shape in shapes.items() if name in tensors and tensors[name].shape != shape]
    if found:
        more = f' and {len(found) - 10} more' if found[10:] else ''
        raise ValueError(f'{where} does not fit the model: {"; ".join(found[:10])}{more}')


@torch.no_grad()
def load_weights(model, tensors, where):
    """Copy tensors (dict by parameter name) into model: all of them or, where names or shapes differ, none and one ValueError."""
    own = dict(model.named_parameters())
    check_fit({name: parameter.shape for name, parameter in own.items()}, tensors, where)
    for name, parameter in own.items():
        parameter.copy_(parallel.like(tensors[name], parameter))


def load_model(run, step='latest', device='cpu'):
    """(model, tokenizer, checkpoint) of a run folder, ready for inference. Everything comes from the checkpoint."""
    checkpoint = load(run, step)
    config, tensors = model_config(checkpoint), checkpoint.tensors('model')
    if config.n_layer > len(tensors):  # before a model of any size is built
        raise ValueError(f'{checkpoint.path} has {len(tensors)} tensors, too few for n_layer={config.n_layer}')
    check_fit(layouts.shapes(config), tensors, checkpoint.path)
    model = GPT(config, seed=None).to(device)
    load_weights(model, tensors, checkpoint.path)
    return model.eval(), from_json(checkpoint.state['tokenizer']), checkpoint
