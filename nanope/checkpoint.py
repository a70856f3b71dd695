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
from dataclasses import dataclass, fields

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from model import GPT, GPTConfig
from nanope.files import sha256, sync, write_json
from nanope.tokenizer import from_json

FORMAT = 1
FILES = ('model.safetensors', 'optim.safetensors', 'state.json')


@dataclass
class Checkpoint:
    path: str
    step: int
    state: dict         # config, tokenizer, and what the training loop needs to go on
    environment: dict   # versions, device, dtype, threads: see nanope.device.environment

    def tensors(self, name):
        """The tensors of 'model' or 'optim' by name, on the CPU."""
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

    Raises OSError naming the file and its size where it cannot be written; the checkpoints before are untouched then."""
    target, temporary = step_folder(run, step), os.path.join(run, 'ckpt', f'.tmp-{step}-{os.getpid()}')
    os.makedirs(temporary, exist_ok=True)
    try:
        for name, tensors in (('model', model), ('optim', optim)):
            path = os.path.join(temporary, f'{name}.safetensors')
            try:
                save_file({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, path)
            except SafetensorError as error:
                n_bytes = sum(t.numel() * t.element_size() for t in tensors.values())
                raise OSError(f'could not write {target}/{name}.safetensors ({n_bytes:,} bytes): {error}; '
                              'free some space and resume: the checkpoints before this one are intact') from None
            sync(path)
        write_json(os.path.join(temporary, 'state.json'), {'format': FORMAT, 'step': step, **state})
        listing = {name: {'bytes': os.path.getsize(os.path.join(temporary, name)), 'sha256': sha256(os.path.join(temporary, name))}
                   for name in FILES}
        manifest = {'format': FORMAT, 'step': step, 'files': listing, 'environment': environment}
        write_json(os.path.join(temporary, 'manifest.json'), {**manifest, 'digest': seal(manifest)})
        sync(temporary)
        if os.path.exists(target):  # a damaged one, or the same step saved again
            shutil.rmtree(target)
        os.rename(temporary, target)
        sync(os.path.dirname(target))
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return target


def prune(run, keep):
    """Remove all checkpoints but the newest `keep` and the best, and what a killed save left over. Call it after a save."""
    kept = set(steps(run)[-keep:]) | {best_step(run)}
    for step in steps(run):
        if step not in kept:
            shutil.rmtree(step_folder(run, step))
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
    return sorted(int(name[5:]) for name in names if re.fullmatch(r'step_\d{8,}', name))


def best_step(run):
    """The step that best.json names, or None."""
    try:
        with open(os.path.join(run, 'ckpt', 'best.json'), encoding='utf-8') as file:
            step = json.load(file)['step']
            return step if isinstance(step, int) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_json(path):
    try:
        with open(path, encoding='utf-8') as file:
            content = json.load(file)
    except (ValueError, RecursionError) as error:
        raise ValueError(f'{path} is not JSON ({error})') from None
    if not isinstance(content, dict):
        raise ValueError(f'{path} is not a JSON object')
    return content


def verify(path):
    """Read one checkpoint folder. Raises ValueError naming the file that is missing, cut or changed."""
    manifest_path = os.path.join(path, 'manifest.json')
    if not os.path.exists(manifest_path):
        raise ValueError(f'{manifest_path} is missing')
    manifest = read_json(manifest_path)
    if isinstance(manifest.get('format'), int) and manifest['format'] > FORMAT:
        raise ValueError(f'{path} was written by a newer nanoPE (format {manifest["format"]}, this one reads {FORMAT}): update nanoPE')
    if manifest.get('digest') != seal(manifest):
        raise ValueError(f'{manifest_path} is damaged (its digest does not match)')
    for name in FILES:
        file, expected = os.path.join(path, name), manifest['files'][name]
        if not os.path.exists(file):
            raise ValueError(f'{file} is missing')
        if os.path.getsize(file) != expected['bytes']:
            raise ValueError(f'{file} has {os.path.getsize(file):,} bytes instead of {expected["bytes"]:,}')
        if sha256(file) != expected['sha256']:
            raise ValueError(f'{file} is damaged (its sha256 does not match manifest.json)')
    return Checkpoint(path, manifest['step'], read_json(os.path.join(path, 'state.json')), manifest['environment'])


def load(run, step='latest'):
    """The checkpoint of `run` at step 'latest' (the newest that verifies), 'best', or a number. Raises ValueError where there is none."""
    there = steps(run)
    if not there:
        raise ValueError(f'{run} holds no checkpoint (nothing like {run}/ckpt/step_00001000); train it first, or give another --out_dir')
    if step != 'latest':
        number = best_step(run) if step == 'best' else step
        if number not in there:
            raise ValueError(f'{run} has no checkpoint of step {step}; it has {", ".join(map(str, there))}')
        return verify(step_folder(run, number))
    problems = []
    for number in reversed(there):
        try:
            checkpoint = verify(step_folder(run, number))
        except ValueError as error:
            problems.append(str(error))
            continue
        for problem in problems:
            print(f'warning: {problem}; falling back to step {number}', file=sys.stderr)
        return checkpoint
    raise ValueError(f'no checkpoint of {run} can be read: ' + '; '.join(problems))


def model_config(checkpoint):
    """The GPTConfig that a checkpoint was trained with."""
    names = {field.name for field in fields(GPTConfig)}
    return GPTConfig(**{key: value for key, value in checkpoint.state['config'].items() if key in names})


def load_weights(model, tensors, where):
    """Copy tensors (dict by parameter name) into model: all of them or, where names or shapes differ, none and one ValueError."""
    own = dict(model.named_parameters())
    found = [f'{name} is missing' for name in own if name not in tensors]
    found += [f'{name} is not in the model' for name in tensors if name not in own]
    found += [f'{name} has shape {tuple(tensors[name].shape)} instead of {tuple(own[name].shape)}'
              for name in own if name in tensors and tensors[name].shape != own[name].shape]
    if found:
        raise ValueError(f'{where} does not fit the model: ' + '; '.join(found[:10]) + (f' and {len(found) - 10} more' if found[10:] else ''))
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(tensors[name])


def optimizer_tensors(optimizer, names):
    """The optimizer's state as a flat dict: 'exp_avg.<parameter>' and so on. names: parameter -> its name."""
    return {f'{key}.{names[p]}': tensor for p, state in optimizer.state.items() for key, tensor in state.items()}


def load_optimizer(optimizer, tensors, names):
    """Put back what optimizer_tensors gave; `step` stays on the CPU unless the optimizer is fused."""
    for group in optimizer.param_groups:
        for p in group['params']:
            moments = {key: tensors[f'{key}.{names[p]}'].to(p.device) for key in ('exp_avg', 'exp_avg_sq')}
            step = tensors[f'step.{names[p]}']
            optimizer.state[p] = {'step': step.to(p.device) if group['fused'] else step, **moments}


def load_model(run, step='latest', device='cpu'):
    """(model, tokenizer, checkpoint) of a run folder, ready for inference. Everything comes from the checkpoint."""
    checkpoint = load(run, step)
    with torch.device('meta'):  # no memory and no time for weights that are about to be replaced
        model = GPT(model_config(checkpoint), seed=None)
    model.to_empty(device=device)
    load_weights(model, checkpoint.tensors('model'), checkpoint.path)
    return model.eval(), from_json(checkpoint.state['tokenizer']), checkpoint
