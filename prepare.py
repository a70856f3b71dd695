"""Text -> token files: python prepare.py NAME --input=PATH, or, for the plays: python prepare.py shakespeare

    python prepare.py shakespeare                     the plays that come with nanoPE, by character; no network
    python prepare.py mydata --input=notes.txt        your text: .txt, .jsonl, .parquet, or a folder of one of them
    python prepare.py openwebtext                     streamed from the Hugging Face hub; stop and run again to resume
    python prepare.py fineweb_edu --input=FOLDER      the same from parquet files that you have
    python prepare.py NAME --adopt=FOLDER             nanoGPT's train.bin and val.bin; with --input=TEXT if by character

Writes data/NAME/{train,val}.bin and meta.json, for: python train.py --dataset=NAME
"""
import hashlib
import os
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout
from tqdm import tqdm

from nanope import corpus, nanogpt, writer
from nanope.configurator import configure, idle, run
from nanope.files import make_folder
from nanope.tokenizer import SEPARATOR, CharTokenizer, GPT2Tokenizer

PLAYS = Path(__file__).parent / 'data' / 'shakespeare' / 'plays'
SMALL = 20_000_000  # characters: with more text, a model has more from GPT-2's tokens, of about 4 characters each


@dataclass
class PrepareConfig:
    input: str | None = None            # file, or folder of files, of .txt, .jsonl or .parquet
    tokenizer: Literal['char', 'gpt2'] | None = None  # none = char below 20 million characters, gpt2 above
    adopt: str | None = None            # folder with nanoGPT's train.bin and val.bin to take over
    text_column: str = 'text'           # field of .jsonl, column of .parquet
    split: Literal['documents', 'tail'] | None = None  # what to hold out; none = tail if there is one document
    val_fraction: float | None = None   # how much to hold out: of documents, one in round(1 / val_fraction);
                                        # none = 0.1, for sets on the hub 0.0005
    max_documents: int | None = None    # use the first so many documents
    seed: int = 1337                    # draws which documents are held out
    workers: int | None = None          # processes that tokenise, 0 = none but this; none = one a CPU, at most 8

    def problems(self):
        checks = [
            (self.val_fraction is None or 0 < self.val_fraction <= 0.5,
             f'val_fraction={self.val_fraction} must be above 0 and at most 0.5'),
            (self.max_documents is None or self.max_documents > 0,
             f'max_documents={self.max_documents} must be positive or none'),
            (self.workers is None or 0 <= self.workers <= 64, f'workers={self.workers} must be 0 to 64'),
        ]
        found = [problem for fine, problem in checks if not fine]
        if self.adopt:
            found += idle(self, ('text_column', 'split', 'val_fraction', 'max_documents', 'seed', 'workers'), 'with --adopt')
            found += idle(self, ('input',), 'with --adopt and --tokenizer=gpt2') if self.tokenizer == 'gpt2' else []
        return found


def main():
    config, rest = configure(PrepareConfig, sys.argv[1:])
    paths = [word for word in rest if os.path.basename(word) != word or Path(word).suffix.lower() in corpus.READERS]
    paths = paths or rest[1:]
    if paths:  # as of: python prepare.py mydata notes.txt
        name = rest[0] if rest[0] not in paths else 'NAME'
        raise ValueError(f'{paths[0]} is no plain name; did you mean --input={paths[0]}, as in: '
                         f'python prepare.py {name} --input={paths[0]}')
    if len(rest) != 1 or not re.fullmatch(r'\w[\w.-]*', rest[0]) or rest[0] == 'gpt2':
        raise ValueError(f'one plain name is needed, not {rest or "none"}: python prepare.py NAME [--input=PATH]')
    name, hub = rest[0], corpus.HUB.get(rest[0])
    if (config.input or config.adopt) and name == 'shakespeare':  # it would replace what runs were trained on
        raise ValueError('shakespeare stands for the plays that come with nanoPE; for other text use another name: '
                         'python prepare.py mydata ' + (f'--adopt={config.adopt}' if config.adopt else f'--input={config.input}'))
    if config.adopt:
        kind, folder = config.tokenizer or ('char' if config.input else 'gpt2'), os.path.join('data', name)
        return print_summary(name, folder, *nanogpt.adopt(folder, config.adopt, config.input, kind))
    if not config.input and not hub and name != 'shakespeare':
        raise ValueError(f'{name} needs --input=PATH; without it there are shakespeare, {", ".join(corpus.HUB)}')
    if hub and (config.split == 'tail' or config.tokenizer == 'char'):
        raise ValueError(f'{name} is read once, for split=documents and tokenizer=gpt2 only: use another name')
    files = corpus.hub_files(name) if hub and not config.input else corpus.find_files(config.input or PLAYS)
    if files[0].lower().endswith('.txt') and (nothing := idle(config, ('text_column',), 'where the text is .txt')):
        raise ValueError(f'--{nothing[0]}')
    source = config.input or (f'{hub.repo} on the Hugging Face hub' if hub else 'the plays in data/shakespeare/plays')
    fraction = config.val_fraction or (0.0005 if hub else 0.1)

    # a first look at the text: how much, and which characters; a set on the hub is too large to be read twice
    documents, characters, alphabet = (config.max_documents, None, set()) if hub else survey(config, files, enough=round(1 / fraction))
    if not hub and not documents:
        raise ValueError(f'{source} has no text')
    tokenizer = choose_tokenizer(config, characters, alphabet)
    expected = corpus.print_need(config, files, hub, documents, characters, tokenizer)
    split, sentence = choose_split(config, fraction, documents, characters)

    folder = os.path.join('data', name)
    make_folder(folder)
    try:
        with FileLock(os.path.join(folder, '.lock'), timeout=0):
            progress = write(config, folder, files, tokenizer, split, expected)
            meta = writer.finish(folder, tokenizer, progress, split=sentence, source=source)
    except Timeout:
        raise ValueError(f'{folder} is being prepared by another process: wait for it, or use another name') from None
    print_summary(name, folder, meta, progress)


def survey(config, files, enough):
    """(documents, characters, set of all characters); characters is None, for many, where the rest cannot matter."""
    documents, characters, alphabet = 0, 0, set()
    with tqdm(desc='reading', unit=' characters', unit_scale=True, disable=None, leave=False) as bar:
        for batch in corpus.open_batches(files, config.text_column, config.max_documents):
            documents += len(batch.texts)
            size = sum(map(len, batch.texts))
            characters += size
            alphabet.update(*batch.texts)
            bar.update(size)
            if documents >= enough and characters > SMALL and config.tokenizer != 'char' and config.split != 'tail':
                return documents, None, set()
    return documents, characters, alphabet


def choose_tokenizer(config, characters, alphabet):
    small = characters is not None and characters < SMALL
    kind = config.tokenizer or ('char' if small else 'gpt2')
    reason = 'as asked' if config.tokenizer else f'{characters:,} characters are few' if small else 'for this much text'
    print(f'tokenizer: {kind}, {reason} (--tokenizer=char or gpt2)')
    return CharTokenizer(''.join(sorted(alphabet))) if kind == 'char' else GPT2Tokenizer()


def choose_split(config, fraction, documents, characters):
    """((every, cut), a sentence): hold out one document in `every`, or what follows the first `cut` characters."""
    if config.split == 'tail' or documents == 1 and config.split is None and characters:
        if nothing := idle(config, ('seed',), 'where the tail is held out'):
            raise ValueError(f'--{nothing[0]}')
        cut = int(characters * (1 - fraction))  # nanoGPT's cut
        if not 0 < cut < characters:
            raise ValueError(f'{characters} characters are too few to hold out some')
        return (None, cut), f'the last {fraction * 100:.4g} % of the characters, from {cut:,} on, are held out'
    if documents == 1:
        raise ValueError('there is one document, which cannot be held out whole: use --split=tail')
    every = min(round(1 / fraction), documents or sys.maxsize)
    return (every, None), f'one whole document in {every:,} is held out, drawn with seed {config.seed}'


def write(config, folder, files, tokenizer, split, expected):
    """Write the parts, or the rest of them where an earlier run of the same job was stopped; returns the progress."""
    stats = [(file, os.stat(file).st_size, os.stat(file).st_mtime_ns) for file in files if os.path.exists(file)]
    job = (files, stats, tokenizer.to_json(), split, replace(config, workers=None))
    progress = writer.read_progress(folder, hashlib.sha256(repr(job).encode()).hexdigest())
    done = progress['documents']
    if done:
        print(f'going on after {done:,} documents that an earlier run has done')
    limit = config.max_documents and config.max_documents - done
    batches = corpus.open_batches(files, config.text_column, limit, progress['place'])
    pieces = corpus.divide(batches, split, config.seed, done)
    few = tokenizer.kind == 'char' or (expected and expected < 4e6)  # starting processes takes a second
    workers = config.workers if config.workers is not None else 0 if few else min(os.cpu_count() or 1, 8)
    bar = tqdm(desc='tokenising', unit=' characters', unit_scale=True, total=expected, disable=None, leave=False,
               initial=sum(progress[part]['bytes'] for part in writer.SPLITS))
    try:
        with bar:
            writer.write_parts(folder, pieces, tokenizer, progress, workers, bar.update)
        for part in writer.SPLITS:
            if not progress[part]['tokens']:
                raise ValueError(f'{part} would have no text: {progress["documents"]} documents are too few '
                                 f'to hold out one in {split[0]}, use another --val_fraction')
    except BaseException:
        if not os.path.exists(os.path.join(folder, 'progress.json')):
            writer.discard(folder)
        raise
    return progress


def print_summary(name, folder, meta, progress):
    print(f'{folder}: {progress["documents"]:,} documents, vocabulary {meta["vocab_size"]:,}; {meta["split"]}')
    for part in writer.SPLITS:
        counts = meta[part]
        print(f'  {part:5}  {counts["documents"]:>9,} documents  {counts["tokens"]:>14,} tokens of '
              f'{counts["bytes"] / counts["tokens"]:.2f} bytes')
    if progress['empty']:
        print(f'  {progress["empty"]:,} empty documents were left out')
    if progress['special']:
        print(f'  warning: the text spells {SEPARATOR} {progress["special"]:,} times, kept as ordinary text')
    large = meta['train']['tokens'] > 1e8
    config, usual, length = ('gpt2', 'openwebtext', 1024) if large else ('shakespeare', 'shakespeare', 128)
    command = f'python train.py config/{config}_rope.py' + f' --dataset={name}' * (name != usual)
    part = min(writer.SPLITS, key=lambda part: meta[part]['tokens'])
    tokens = meta[part]['tokens']
    if tokens <= length:  # a row and its targets must fit
        print(f'  {part} is short, {tokens} tokens: use more text, or a smaller --block_size than {length}')
        command += f' --block_size={tokens - 1}'
    if tokens > 1:
        print(f'next: {command}')


if __name__ == '__main__':
    run(main)
