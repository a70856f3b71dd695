"""A trained model for transformers and what reads its format: python export.py out/shakespeare_rope --to=out/shakespeare_rope_hf

Writes config.json, model.safetensors, tokenizer files and a model card. learned, sinusoidal and none become a GPT-2, rope a GPT-NeoX,
alibi a Bloom: transformers' own code computes the same logits up to rounding. The folder can be read back: train.py --init_from, sample.py.
"""
import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import nanope  # noqa: F401 (before torch)
import torch
from safetensors.torch import save_file

from model import GPT
from nanope import checkpoint, metrics
from nanope.configurator import configure, run
from nanope.files import make_folder, read_json, sync, write_json
from nanope.layouts import KIND, to_config, to_theirs
from nanope.tokenizer import SEPARATOR, from_json, hugging_face_json

WRITTEN = {'README.md', 'config.json', 'generation_config.json', 'model.safetensors', 'tokenizer.json', 'tokenizer_config.json'}
KEPT = 'config', 'tokenizer', 'data_digest', 'extended'  # what of a checkpoint's state goes along, so that it can be read back


@dataclass
class ExportConfig:
    to: str | None = None               # folder to write; none = the run's name with _hf
    step: int | Literal['latest', 'best'] = 'latest'  # which checkpoint
    overwrite: bool = False             # replace a folder that is not empty; an earlier export with nothing added is replaced anyhow
    check: bool = False                 # load the folder with transformers, which must be installed, and compare logits


# ---- model card ------------------------------------------------------------------------------------------------------

def facts(path, found, config):
    """[(name, value)] of what is known of how a model was trained."""
    state, settings = found.state, found.state['config']
    known = [('position scheme', config.wpe), ('context', f'{config.block_size:,} tokens'),
             ('size', f'{config.n_layer} layers, {config.n_head} heads, width {config.n_embd}, {"with" if config.bias else "no"} biases')]
    with torch.device('meta'):
        known.append(('parameters', GPT(config, seed=None).parameter_report()))
    if config.wpe == 'rope' and config.rope_factor > 1:
        trained = config.rope_trained or config.block_size
        known.append(('RoPE scaling', f'{config.rope_scaling}, {config.rope_factor:g} times {trained} tokens'))
    if 'extended' in state:
        known.append(('context extended', 'from {trained:g} tokens by `{method}`, not trained since'.format(**state['extended'])))
    known.append(('vocabulary', f'{config.vocab_size:,}, {"characters" if state["tokenizer"]["kind"] == "char" else "GPT-2 byte pairs"}'))
    if 'max_iters' in settings:
        n = settings['batch_size'] * settings['gradient_accumulation_steps'] * settings['block_size']
        optimizer = 'Muon and AdamW' if settings.get('optimizer') == 'muon' else 'AdamW'
        known += [('data', f'{settings["dataset"]} (digest {state["data_digest"][:16]})'),
                  ('updates', f'{found.step:,} of {n:,} tokens, {optimizer}, learning rate {settings["learning_rate"]:g}'),
                  ('seed', settings['seed'])]
    scores = [r for r in metrics.read(path) if r['event'] in ('eval', 'final') and r['step'] == found.step]
    if scores:
        known.append(('validation loss', f'{scores[-1]["loss"]:.4f} nats a token'))
    if 'torch' in found.environment:
        known.append(('trained with', 'torch {torch}, {device_name}, {dtype}'.format(**found.environment)))
    if state.get('origin'):
        known.append(('started from', state['origin']['run']))
    return known


def notes(config):
    """What a user of the exported model must know, one sentence each."""
    if config.wpe == 'alibi':
        yield ('This is a Bloom whose LayerNorm after the embeddings is made to do nothing: they are stored many times smaller, which '
               'float32 and bfloat16 can hold and float16 cannot.')
    if KIND[config.wpe] == 'gpt2':
        yield f'There are {config.block_size} positions; a longer input is an error.'
    if config.wpe == 'sinusoidal':
        yield 'Its position table is computed, not trained; freeze `transformer.wpe` when you fine-tune.'
    if config.wpe == 'none':
        yield 'Its position table is zero, as it has no positions; freeze `transformer.wpe` when you fine-tune.'
    if config.rope_scaling == 'dynamic' and config.rope_factor > 1:
        yield (f'Past {config.rope_trained or config.block_size} tokens dynamic scaling changes all angles with every token. transformers '
               'leaves cached keys as they were: generate with `use_cache=False` there.')


def model_card(name, path, found, config):
    try:
        rows = '\n'.join(f'| {key} | {value} |' for key, value in facts(path, found, config))
    except (KeyError, TypeError, ValueError) as error:            # in a folder that was edited
        raise ValueError(f'{found.path}: what it tells of its training is damaged ({type(error).__name__}: {error})') from None
    hints = '\n'.join(f'- {note}' for note in notes(config))
    return f'''---
library_name: transformers
pipeline_tag: text-generation
tags: [nanope, {KIND[config.wpe]}]
---
# {name}

A GPT-2 trained with nanoPE, which compares position schemes. transformers runs it with its own code ({KIND[config.wpe]}).

| | |
|---|---|
{rows}

```python
from transformers import pipeline

print(pipeline('text-generation', 'PATH_OF_THIS_FOLDER')('A beginning', max_new_tokens=50)[0]['generated_text'])
```

{hints}
'''.rstrip() + '\n'


# ---- the folder ------------------------------------------------------------------------------------------------------

def check_target(to, overwrite, run):
    """Raises ValueError where a folder holds what must not be replaced."""
    if any(Path(path).resolve().is_relative_to(Path(to).resolve()) for path in ('.', os.path.join(os.path.abspath(run), os.pardir))):
        raise ValueError(f'{to} is or holds the working directory or the folder of {run}: give another --to')
    if not os.path.lexists(to) or os.path.isdir(to) and not os.listdir(to):
        return
    if not os.path.isdir(to) or os.path.exists(os.path.join(to, 'ckpt')) or os.path.exists(os.path.join(to, '.git')):
        raise ValueError(f'{to} is a file, a run folder or a repository: give another --to')
    try:
        settings = read_json(os.path.join(to, 'config.json'))     # what transformers saved, after more training, has its version in it
        earlier = 'nanope' in settings and 'transformers_version' not in settings and WRITTEN.issuperset(os.listdir(to))
    except (OSError, ValueError):
        earlier = False
    if not earlier and not overwrite:
        raise ValueError(f'{to} is not empty and holds more than an earlier export: give another --to, or delete all that is in it by '
                         '--overwrite=true')


def write_folder(to, found, path):
    """Write all files into a temporary folder beside `to` and give it that name, in place of what had it."""
    config, tokenizer = checkpoint.model_config(found), from_json(found.state['tokenizer'])
    rows = max(config.vocab_size, tokenizer.vocab_size)           # nanoGPT's models by character have no row for a separator
    parent, name = os.path.split(os.path.abspath(to))
    temporary, old = os.path.join(parent, f'.tmp-{name}'), os.path.join(parent, f'.old-{name}')
    shutil.rmtree(temporary, ignore_errors=True)                  # left by one that was killed
    make_folder(os.path.dirname(to) or '.')
    os.makedirs(temporary)
    try:
        record = {'step': found.step, **{key: found.state[key] for key in KEPT if key in found.state}}
        record['config'] = {**record['config'], 'vocab_multiple': 1}  # rows that pad the vocabulary are left out
        ids = {'bos_token_id': tokenizer.separator, 'eos_token_id': tokenizer.separator}
        tokens = {'tokenizer_class': 'PreTrainedTokenizerFast', 'bos_token': SEPARATOR, 'eos_token': SEPARATOR,
                  'model_max_length': config.block_size, 'clean_up_tokenization_spaces': False}
        save_file(to_theirs(config, found.tensors('model'), rows), os.path.join(temporary, 'model.safetensors'), {'format': 'pt'})
        for file, content in (('config.json', {**to_config(config, tokenizer.separator, rows), 'nanope': record}),
                              ('generation_config.json', ids), ('tokenizer.json', hugging_face_json(tokenizer)),
                              ('tokenizer_config.json', tokens)):
            write_json(os.path.join(temporary, file), content)
        with open(os.path.join(temporary, 'README.md'), 'w', encoding='utf-8') as file:
            file.write(model_card(name, path, found, config))
        for file in os.listdir(temporary):
            sync(os.path.join(temporary, file))
        if os.path.exists(to):
            shutil.rmtree(old, ignore_errors=True)
            os.rename(to, old)
        os.rename(temporary, to)
        sync(parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return config


@torch.no_grad()
def largest_difference(to, path, step):
    """Between the logits of transformers and ours, on one sequence of random tokens as long as the context."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise ValueError(f'{to} is written, but --check=true needs transformers: pip install transformers') from None
    model, _, _ = checkpoint.load_model(path, step)
    idx = torch.randint(model.config.vocab_size, (1, model.config.block_size), generator=torch.Generator().manual_seed(0))
    theirs = AutoModelForCausalLM.from_pretrained(to).eval()(idx).logits[..., :model.config.vocab_size]
    return (theirs - model(idx)).abs().max().item()


def main(argv=None):
    config, runs = configure(ExportConfig, sys.argv[1:] if argv is None else argv)
    if len(runs) != 1:
        raise ValueError('give one run folder: python export.py out/RUN --to=DIR')
    to = os.path.normpath(config.to or f'{os.path.normpath(runs[0])}_hf')
    check_target(to, config.overwrite, runs[0])
    found = checkpoint.load(runs[0], config.step)
    exported = write_folder(to, found, runs[0])
    print(f'wrote {to}: {runs[0]}, step {found.step}, wpe={exported.wpe}, as {KIND[exported.wpe]}')
    for note in notes(exported):
        print(f'note: {note}')
    if config.check:
        print(f'largest difference of a logit to transformers: {largest_difference(to, runs[0], config.step):.1e}')


if __name__ == '__main__':
    run(main)
