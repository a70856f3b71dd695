"""What nanoGPT leaves behind: ckpt.pt, read as weights and plain values alone, and data folders, which prepare.py --adopt takes over.

Pickles are never run: ckpt.pt goes through torch's weights_only reader, which refuses all else, and meta.pkl is not opened at all.
nanoGPT has the exact GELU, this model GPT-2's tanh form of it: logits differ a little (by 6e-5 in a small model that was tried).
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
from nanope.files import brief, lock_folder, read_json
from nanope.layouts import FREE
from nanope.tokenizer import CharTokenizer, GPT2Tokenizer


def read(folder):
    """The model in folder/ckpt.pt, as keywords for Checkpoint; None where there is none. Raises ValueError where it cannot be read."""
    path = os.path.join(folder, 'ckpt.pt')
    if not os.path.isfile(path):
        return None
    try:  # mmap: the optimizer's moments, two thirds of the file, are not read
        saved = torch.load(path, map_location='cpu', weights_only=True, mmap=True)
    except Exception as error:  # torch raises what its unpickler does
        raise ValueError(f'{path} holds more than weights and plain values, or is damaged; nothing in it was run '
                         f'({brief(error)})') from None
    args, weights = (saved.get(name) if isinstance(saved, dict) else None for name in ('model_args', 'model'))
    if not isinstance(args, dict) or not isinstance(weights, dict) or not all(
            isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in weights.items()):
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


def how_to_adopt(name, source='FOLDER'):
    return (f'python prepare.py {name} --adopt={source} takes over data of nanoGPT, with --input=TEXT if it is by character (the text that '
            'it was made from; its meta.pkl is a pickle and not read)')


def adopt(folder, source, text, kind):
    """Take over train.bin and val.bin of the folder source as those of folder, in place or as copies, and write meta.json.

    text: what they were made from, which tells the vocabulary where kind is 'char'. Returns (meta, progress) as writer.finish() has them.
    Raises ValueError where the ids are not those of the text, or of GPT-2."""
    if kind == 'char' and not text:
        raise ValueError('by character, the vocabulary is that of the text: give it, --input=TEXT')
    if text and not os.path.isfile(text):
        raise ValueError(f'--input={text} is no file: give the one text that {source} was made from')
    ids = {}
    for split in writer.SPLITS:
        path = os.path.join(source, f'{split}.bin')
        if not os.path.isfile(path) or os.path.getsize(path) % 2 or not os.path.getsize(path):
            raise ValueError(f'{path} is missing, empty, or no file of two bytes a token: there is nothing to take over')
        ids[split] = np.memmap(path, dtype='<u2', mode='r')
    if kind == 'char':
        content, _ = next(corpus.read_text([text], None, None))
        tokenizer = CharTokenizer(''.join(sorted(set(content))))
        if not np.array_equal(tokenizer.encode(content), np.concatenate(list(ids.values()))):
            raise ValueError(f'{source} was not made from {text}, or not by character: its ids are not those of the text')
    else:
        tokenizer, largest = GPT2Tokenizer(), max(int(part.max()) for part in ids.values())
        if not 256 <= largest < tokenizer.vocab_size:
            raise ValueError(f"{source} has ids up to {largest}, which are not GPT-2's; if they are characters, give the text that they "
                             'were made from, --input=TEXT')
    progress = {split: {'size': 0, **count(part, tokenizer)} for split, part in ids.items()}
    documents = sum(each['documents'] for each in progress.values())
    lock = lock_folder(folder, 'prepared')
    try:
        writer.discard(folder)                                    # left by one that was killed
        for split in writer.SPLITS:
            have, part = os.path.join(source, f'{split}.bin'), os.path.join(folder, f'{split}.bin.part')
            if os.path.realpath(source) == os.path.realpath(folder):
                os.link(have, part)                               # a second name, which finish() takes away: nothing is copied
            else:
                shutil.copyfile(have, part)
        meta = writer.finish(folder, tokenizer, progress, split='held out as nanoGPT did', source=source)
    finally:
        writer.discard(folder)
        lock.release()
    return meta, {'documents': documents, 'empty': 0, 'special': 0}


def count(ids, tokenizer):
    """{'tokens', 'documents', 'bytes'} of an array of ids, a piece of it at a time. Without a separator it is one document."""
    lengths, documents, n_bytes = tokenizer.byte_lengths(), 0, 0
    for piece in (ids[i:i + 2**24] for i in range(0, len(ids), 2**24)):
        documents += int((piece == tokenizer.separator).sum())
        n_bytes += int(lengths[piece].sum())
    return {'tokens': len(ids), 'documents': max(documents, 1), 'bytes': n_bytes}
