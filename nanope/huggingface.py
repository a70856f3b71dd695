"""Reads GPT-2 as transformers stores it: config.json and model.safetensors, of the hub or of a folder, without transformers.

A folder that export.py wrote says under "nanope" in its config.json what the model was here, and comes back bit for bit.
"""
import os
import re
import sys
from dataclasses import asdict
from functools import partial

import torch
from safetensors import SafetensorError, safe_open

from model import GPTConfig
from nanope.configurator import restore
from nanope.files import read_json
from nanope.layouts import FREE, HEADS, KIND, shapes, table_of, their_name, to_config, turn, undo_bloom
from nanope.tokenizer import VOCAB_BPE, from_json

HUB = {name: f'openai-community/{name}' for name in ('gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl')}
MASKS = r'.*\.(attn|attention)\.(bias|masked_bias|rotary_emb\.inv_freq)'  # buffers that old versions stored
FITS = {'activation_function': ('gelu_new', 'gelu_pytorch_tanh'), 'layer_norm_epsilon': (1e-5,), 'scale_attn_weights': (True,),
        'scale_attn_by_inverse_layer_idx': (False,), 'add_cross_attention': (False,), 'tie_word_embeddings': (True,),
        'vocab_size': (50257,)}  # of a gpt2: the first is what its absence means


def locate(path):
    """The folder of a model: path itself or, for a name in HUB, where the hub's cache keeps it, downloaded where it is not there yet."""
    if path not in HUB or os.path.isdir(path):
        return path
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError
    repo, files = HUB[path], ('config.json', 'model.safetensors')
    try:
        return os.path.dirname([hf_hub_download(repo, name, local_files_only=True) for name in files][0])
    except LocalEntryNotFoundError:
        pass
    try:
        HfApi().model_info(repo, timeout=10)                      # says within seconds that there is no network; a download tries on
        return os.path.dirname([hf_hub_download(repo, name) for name in files][0])
    except Exception as error:  # whatever the HTTP library of the day raises
        raise OSError(f'could not download {path} ({type(error).__name__}): from a machine that can, bring config.json and '
                      f'model.safetensors of https://huggingface.co/{repo} into a folder, and give that instead of {path}') from None


def is_model(folder):
    """Whether a folder holds a model as transformers stores it. (A run folder has a config.json, too.)"""
    path = os.path.join(folder, 'config.json')
    return os.path.isfile(path) and 'model_type' in read_json(path)


def each_tensor(folder):
    """Yields (name, function that reads it) of all tensors of a folder. Raises ValueError where they are not there or not safetensors."""
    index, files = os.path.join(folder, 'model.safetensors.index.json'), ['model.safetensors']
    try:
        if os.path.exists(index):
            files = sorted(set(read_json(index)['weight_map'].values()))
        for path in (os.path.join(folder, file) for file in files):
            with safe_open(path, framework='pt') as file:
                yield from ((name, partial(file.get_tensor, name)) for name in file.keys())
    except FileNotFoundError as error:
        raise ValueError(f'{folder} lacks a file: only safetensors are read ({error}); transformers writes them: '
                         'AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)') from None
    except (SafetensorError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f'{folder} is not a readable Hugging Face folder: {type(error).__name__}: {error}') from None


def read(path):
    """A model in transformers' format as keywords for Checkpoint: a folder, a name in HUB, or what export.py wrote; None where it is none.

    Raises ValueError listing all that does not fit."""
    folder = locate(path)
    if not is_model(folder):
        return None
    where = os.path.join(folder, 'config.json')
    settings = read_json(where)
    state = settings.get('nanope', {'tokenizer': {'kind': 'gpt2'}})
    if 'nanope' in settings:
        config, free = exported_config(settings, where), {'vocab_size', 'vocab_multiple'}
    else:
        config, free = plain_config(settings, folder), FREE
    weights = to_ours(config, {name: read() for name, read in each_tensor(folder)}, folder)
    state = {**state, 'config': {**state.get('config', {}), **asdict(config)}}
    return {'path': folder, 'step': state.pop('step', 0), 'state': state, 'weights': weights, 'free': frozenset(free)}


def exported_config(settings, where):
    """The GPTConfig of a folder that export.py wrote. Raises ValueError where the rest of config.json tells of another model by now."""
    kinds = {'config': dict, 'tokenizer': dict, 'step': int}
    record = settings['nanope'] if isinstance(settings['nanope'], dict) else {}
    odd = [f'nanope.{name}' for name, kind in kinds.items() if not isinstance(record.get(name), kind)]
    if not odd:
        config = restore(GPTConfig, record['config'], where)
        expected = to_config(config, from_json(record['tokenizer']).separator, settings.get('vocab_size'))
        odd = [name for name in ('model_type', 'rope_parameters', 'max_position_embeddings') if name in expected
               and not agree(settings.get(name), expected[name])]
    if odd:
        raise ValueError(f'{where} was changed since nanoPE wrote it: {", ".join(odd)} is not what it was')
    return config


def agree(found, expected):
    """Whether a value read is the one written; transformers may add to a dict."""
    return found == expected or (isinstance(found, dict) and isinstance(expected, dict)
                                 and all(found.get(key) == value for key, value in expected.items()))


def plain_config(settings, folder):
    """The GPTConfig of a GPT-2 that was not exported by nanoPE."""
    kind = settings['model_type']
    if kind != 'gpt2':
        raise ValueError(f'{folder} holds a {kind} model; what can be read is gpt2, and what export.py wrote')
    values = {name: settings.get(name) for name in ('n_layer', 'n_head', 'n_embd', 'n_positions')}
    values['n_positions'] = values['n_positions'] or settings.get('n_ctx')
    found = [f'{name}={value!r} instead of a number' for name, value in values.items() if type(value) is not int]
    found += [f'{name}={settings[name]!r} instead of {" or ".join(map(repr, fits))}' for name, fits in FITS.items()
              if settings.get(name, fits[0]) not in fits]
    if settings.get('n_inner') not in (None, 4 * (values['n_embd'] or 0)):
        found.append(f'n_inner={settings["n_inner"]!r} instead of 4 times n_embd')
    if not has_gpt2_merges(folder):
        found.append('a tokenizer with other merges than GPT-2\'s')
    if found:
        raise ValueError(f'{folder} does not fit nanoPE\'s GPT-2: {"; ".join(found)}')
    dropout = settings.get('resid_pdrop', 0.1)
    return restore(GPTConfig, {'block_size': values.pop('n_positions'), **values, 'dropout': dropout}, folder)


def has_gpt2_merges(folder):
    """Whether the tokenizer that lies beside a model, if any, is GPT-2's."""
    ours, path = VOCAB_BPE.read_text('utf-8').splitlines()[1:], os.path.join(folder, 'tokenizer.json')
    if os.path.isfile(path):
        model = read_json(path).get('model')
        merges = model.get('merges') if isinstance(model, dict) else None
        return isinstance(merges, list) and [' '.join(merge) if isinstance(merge, list) and all(isinstance(part, str) for part in merge)
                                             else merge for merge in merges] == ours
    path = os.path.join(folder, 'merges.txt')
    if os.path.isfile(path):
        with open(path, encoding='utf-8') as file:
            return [line for line in file.read().splitlines() if line and not line.startswith('#version')] == ours
    return True


def to_ours(config, tensors, where):
    """Our tensors (float32, by name) from transformers' (likewise). Where the settings promise more than is there (no biases, a table that
    is computed), config changes: someone went on training. Raises ValueError listing tensors that are missing, odd or misshaped."""
    kind = KIND[config.wpe]
    own = 'gpt_neox' if kind == 'gpt_neox' else 'transformer'     # what the bare model, without its head, leaves out
    tensors = {name if name.startswith(f'{own}.') or name == HEADS[kind] else f'{own}.{name}': tensor for name, tensor in tensors.items()
               if not re.fullmatch(MASKS, name)}
    if config.n_layer > len(tensors):                             # before a model of any size is built
        raise ValueError(f'{where} has {len(tensors)} tensors, too few for n_layer={config.n_layer}')
    full = GPTConfig(**{**asdict(config), 'bias': True, 'vocab_multiple': 1, **({'wpe': 'learned'} if kind == 'gpt2' else {})})
    found, problems = {}, []
    for name, shape in shapes(full).items():
        theirs = their_name(name, kind)
        tensor = tensors.pop(theirs, None)
        if tensor is None:
            problems.append(f'{theirs} is missing')
            continue
        if name.endswith('wte.weight') and tensor.dim() == 2 and len(tensor) > shape[0]:  # a row more, see export.py
            tensor = tensor[:shape[0]]
        turnable = tensor.dim() == len(shape) and (kind == 'gpt2' or tensor.shape == shape)
        fits = turn(name, tensor.float(), kind, config.n_head, 3) if turnable else tensor
        if fits.shape != shape:
            problems.append(f'{theirs} has shape {tuple(tensor.shape)}')
        found[name] = fits.contiguous()
    head = tensors.pop(HEADS[kind], None)
    if head is not None and not problems and not torch.equal(head.float()[:full.vocab_size], found['transformer.wte.weight']):
        problems.append(f'{HEADS[kind]} is not the token embeddings: weights are tied here')
    if kind == 'bloom' and not problems:
        problems += undo_bloom(found, *(tensors.pop(f'transformer.word_embeddings_layernorm.{part}', None) for part in ('weight', 'bias')))
    problems += [f'{name} has no place' for name in tensors]
    if problems:
        more = f' and {len(problems) - 10} more' if problems[10:] else ''
        raise ValueError(f'{where} does not fit the model that its config.json describes: {"; ".join(problems[:10])}{more}')
    biases = [name for name in found if name.endswith('.bias')]
    if not config.bias and any(found[name].any() for name in biases):
        config.bias = True
    if kind == 'gpt2' and config.wpe != 'learned' and not torch.equal(found['transformer.wpe.weight'], table_of(config)):
        print(f'{where}: its position table was trained on, so it is a learned one now (wpe=learned, not {config.wpe})', file=sys.stderr)
        config.wpe = 'learned'
    drop = set(biases if not config.bias else []) | ({'transformer.wpe.weight'} if config.wpe != 'learned' else set())
    return {name: tensor for name, tensor in found.items() if name not in drop}
