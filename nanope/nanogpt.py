"""What nanoGPT leaves behind: ckpt.pt, read as weights and plain values alone, and data folders, which prepare.py --adopt takes over.

Pickles are never run: ckpt.pt goes through torch's weights_only reader, which refuses all else, and meta.pkl is not opened at all.
"""
import os
import re
import shutil
from dataclasses import asdict

import numpy as np
import torch

from model import GPTConfig
from nanope import corpus, writer
from nanope.configurator import restore
from nanope.files import read_json
from nanope.layouts import FREE
from nanope.tokenizer import CharTokenizer, GPT2Tokenizer


def read(folder):
    """The model in folder/ckpt.pt, as keywords for Checkpoint; None where there is none. Raises ValueError where it cannot be read."""
    path = os.path.join(folder, 'ckpt.pt')
    if not os.path.isfile(path):
        return None
    try:  # mmap: the optimizer's moments, two thirds of the file, are not read
        saved = torch.load(path, map_location='cpu', weights_only=True, mmap=True)
    except OSError:
        raise
    except Exception as error:  # torch raises what its unpickler does
        raise ValueError(f'{path} holds more than weights and plain values, or is damaged; nothing in it was run '
                         f'({corpus.brief(error)})') from None
    args, weights = (saved.get(name) if isinstance(saved, dict) else None for name in ('model_args', 'model'))
    if not isinstance(args, dict) or not isinstance(weights, dict) or not all(isinstance(t, torch.Tensor) for t in weights.values()):
        raise ValueError(f'{path} is no checkpoint of nanoGPT: it lacks model_args or model')
    weights = {re.sub(r'^(_orig_mod\.|module\.)+', '', name): tensor for name, tensor in weights.items()}
    weights = {name: tensor.float() for name, tensor in weights.items() if not name.endswith('.attn.bias')}  # its causal mask
    head, tokens = weights.pop('lm_head.weight', None), weights.get('transformer.wte.weight')
    if tokens is None or tokens.dim() != 2 or head is not None and not torch.equal(head, tokens):
        raise ValueError(f'{path} does not fit: transformer.wte.weight is missing, or lm_head.weight is not tied to it')
    told = saved.get('config') if isinstance(saved.get('config'), dict) else {}
    tokenizer = find_tokenizer(path, len(tokens), str(told.get('dataset', '')))
    size = min(len(tokens), tokenizer.vocab_size)                 # 50,304 rows are GPT-2's 50,257 tokens and padding
    weights['transformer.wte.weight'] = tokens[:size]
    sizes = {name: args.get(name) for name in ('n_layer', 'n_head', 'n_embd', 'block_size')}
    config = restore(GPTConfig, {**sizes, 'bias': args.get('bias', True), 'vocab_size': size, 'dropout': args.get('dropout') or 0.0}, path)
    step = saved.get('iter_num')
    return {'path': path, 'step': step if type(step) is int else 0, 'weights': weights, 'free': FREE,
            'state': {'config': asdict(config), 'tokenizer': tokenizer.to_json()}}


def find_tokenizer(path, rows, dataset):
    """The tokenizer of a model with so many token rows: GPT-2's, or the characters of the data set, which ckpt.pt does not name."""
    if rows >= 50257:
        return GPT2Tokenizer()
    meta = os.path.join('data', dataset, 'meta.json')
    if re.fullmatch(r'\w[\w.-]*', dataset) and os.path.isfile(meta):
        found = read_json(meta).get('tokenizer')
        if isinstance(found, dict) and len(found.get('chars') or '') == rows:
            return CharTokenizer(found['chars'])
    raise ValueError(f'{path} does not say which its {rows} tokens are; {how_to_adopt(dataset or "NAME")}')


def how_to_adopt(name, source='NANOGPT/data/...'):
    return (f'adopt the data first: python prepare.py {name} --adopt={source}, with --input=TEXT if it is by character '
            '(the text that it was made from; meta.pkl is a pickle and not read)')


def adopt(name, source, text, kind):
    """Take over nanoGPT's train.bin and val.bin as data/name/, in place or as copies. text: the file that they were made from, which by
    character tells the vocabulary. Leaves what writer.finish() completes and returns (tokenizer, progress). Raises ValueError where the ids do not fit."""
    ids = {}
    for split in writer.SPLITS:
        path = os.path.join(source, f'{split}.bin')
        if not os.path.isfile(path) or os.path.getsize(path) % 2 or not os.path.getsize(path):
            raise ValueError(f'{path} is missing, empty, or no file of two bytes a token: nothing to adopt')
        ids[split] = np.memmap(path, dtype='<u2', mode='r')
    largest = max(int(part.max()) for part in ids.values())
    if kind == 'char':
        content, _ = next(corpus.read_text([text], None, None))
        tokenizer = CharTokenizer(''.join(sorted(set(content))))
        if not np.array_equal(tokenizer.encode(content), np.concatenate(list(ids.values()))):
            raise ValueError(f'{source} was not made from {text}, or not by character: its ids are not those of the text')
    else:
        tokenizer = GPT2Tokenizer()
        if largest >= tokenizer.vocab_size or largest < 256:
            raise ValueError(f'{source} has ids up to {largest}, which are not GPT-2\'s tokens: if these are characters, give the text '
                             'that they were made from, --input=TEXT')
    folder, lengths = os.path.join('data', name), tokenizer.byte_lengths()
    progress = {}
    for split, part in ids.items():
        documents = n_bytes = 0
        for i in range(0, len(part), 2**24):                      # a large file, a piece at a time
            documents += int((part[i:i + 2**24] == tokenizer.separator).sum())
            n_bytes += int(lengths[part[i:i + 2**24]].sum())
        progress[split] = {'size': 0, 'tokens': len(part), 'documents': max(documents, 1), 'bytes': n_bytes}
        target = os.path.join(folder, f'{split}.bin.part')
        if os.path.realpath(source) == os.path.realpath(folder):  # two names of one file: writer.finish() takes one away
            os.link(os.path.join(source, f'{split}.bin'), target)
        else:
            shutil.copyfile(os.path.join(source, f'{split}.bin'), target)
    return tokenizer, progress
