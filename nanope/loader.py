"""Prepared token files -> batches. See prepare.py for how data/<name>/ comes about; its meta.json says what the files hold.

Which rows a batch has depends on (seed, step) alone: not on the position scheme, the evaluation interval, or how often the run was stopped.
"""
import hashlib
import json
import os

import numpy as np
import torch

from nanope import nanogpt
from nanope.corpus import HUB
from nanope.files import read_json, sampled_sha256, sha256
from nanope.tokenizer import from_json

FORMAT = 1
CHECK_BYTES = 256 * 2**20  # files up to this size are hashed when opened; of larger ones 64 blocks are, and every batch is checked by range


class TokenFile:
    """One .bin file of token ids. Reads go through read(), not a memory map, so that memory stays flat however long the run."""

    def __init__(self, path, dtype, tokens, vocab_size):
        self.path, self.dtype, self.tokens, self.vocab_size = path, np.dtype(dtype).newbyteorder('<'), tokens, vocab_size
        self.file = open(path, 'rb', buffering=0)

    def rows(self, starts, length):
        """Token ids at starts[i] .. starts[i]+length-1: int64 tensor (len(starts), length)."""
        out = np.empty((len(starts), length), dtype=np.int64)
        for row, start in zip(out, starts):
            self.file.seek(int(start) * self.dtype.itemsize)
            data = self.file.read(length * self.dtype.itemsize)
            if len(data) < length * self.dtype.itemsize:
                raise ValueError(f'{self.path} has become shorter since it was opened; prepare the data again')
            row[:] = np.frombuffer(data, dtype=self.dtype)
        if out.max(initial=0) >= self.vocab_size:  # on CUDA this would be a device assert, far from its cause
            raise ValueError(f'{self.path}: token id {out.max()} is outside the vocabulary of {self.vocab_size}; prepare the data again')
        return torch.from_numpy(out)

    def batch(self, seed, step, n_rows, block_size):
        """Inputs and targets of training step `step`: two int64 tensors (n_rows, block_size) at random places of the file.

        The generator is counter-based (Philox, Salmon et al. 2011) with the step as counter: any step's batch can be drawn at once."""
        random = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 0, step]))
        starts = random.integers(0, self.tokens - block_size, size=n_rows)
        rows = self.rows(starts, block_size + 1)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()  # as compile_model() tries them


class Data:
    """An opened data folder: meta (dict), tokenizer, vocab_size, digest (hex, of tokenizer and files), train and val (TokenFile)."""

    def __init__(self, folder):
        path = os.path.join(folder, 'meta.json')
        try:
            if not os.path.exists(path):
                raise ValueError(f'{folder} holds no prepared data (no meta.json)')
            self.meta = read_json(path)
            if self.meta['format'] != FORMAT:
                raise ValueError(f'{path}: format {self.meta["format"]}, this version reads format {FORMAT}')
            if self.meta['dtype'] not in ('uint16', 'uint32'):
                raise ValueError(f'{path}: dtype {self.meta["dtype"]!r} is neither uint16 nor uint32')
            self.tokenizer = from_json(self.meta['tokenizer'])
            self.vocab_size = self.tokenizer.vocab_size
            if self.meta['vocab_size'] != self.vocab_size:
                raise ValueError(f'{path}: vocab_size {self.meta["vocab_size"]}, but its tokenizer has {self.vocab_size}')
            self.train, self.val = (self.open_split(folder, split) for split in ('train', 'val'))
            identity = [self.meta['tokenizer'], self.meta['train']['sha256'], self.meta['val']['sha256']]
            self.digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            what = error if isinstance(error, ValueError) else f'{path} is not a meta.json of nanoPE ({type(error).__name__}: {error})'
            raise ValueError(f'{what}; {self.hint(folder)}') from None

    def hint(self, folder):
        """What to do about a folder that cannot be opened."""
        parent, name = os.path.split(os.path.normpath(folder))
        if os.path.basename(parent) != 'data' or name == 'gpt2':  # as of dataset='' or 'a/b'; gpt2 holds a tokenizer
            return 'dataset must be the name of a folder under data/ that prepare.py made'
        command = f'run: python prepare.py {name}' + ('' if name in ('shakespeare', *HUB) else ' --input=PATH')
        if os.path.exists(os.path.join(folder, 'train.bin')) and not os.path.exists(os.path.join(folder, 'meta.json')):
            return f'{nanogpt.how_to_adopt(name, folder)}; all else is prepared anew; {command}'
        return command

    def open_split(self, folder, split):
        path = os.path.join(folder, f'{split}.bin')
        tokens, max_id, digest = (self.meta[split][key] for key in ('tokens', 'max_id', 'sha256'))
        if type(tokens) is not int or type(max_id) is not int:
            raise TypeError(f'tokens and max_id of {split} must be whole numbers')
        if not os.path.exists(path):
            raise ValueError(f'{path} is missing')
        size, itemsize = os.path.getsize(path), np.dtype(self.meta['dtype']).itemsize
        if size != tokens * itemsize:
            raise ValueError(f'{path} has {size:,} bytes, meta.json says {tokens:,} tokens of {itemsize} bytes')
        if max_id >= self.vocab_size:
            raise ValueError(f'{path} holds token id {max_id}, the vocabulary has {self.vocab_size}')
        if size <= CHECK_BYTES:
            same = sha256(path) == digest
        else:
            same = 'sampled_sha256' not in self.meta[split] or sampled_sha256(path) == self.meta[split]['sampled_sha256']
        if not same:
            raise ValueError(f'{path} was changed since it was prepared (its sha256 is not the one in meta.json)')
        return TokenFile(path, self.meta['dtype'], tokens, self.vocab_size)

    def check_length(self, block_size):
        """Raises ValueError where a split is too short for one row of block_size inputs and their targets."""
        short = min(self.train, self.val, key=lambda split: split.tokens)
        if short.tokens <= block_size:
            raise ValueError(f'{short.path} has {short.tokens} tokens, block_size={block_size} needs at least {block_size + 1}: '
                             'use more text' + (f' or --block_size={short.tokens - 1}' if short.tokens > 1 else ''))
