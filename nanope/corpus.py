"""Where text comes from: .txt, .jsonl and .parquet files, here or on the Hugging Face hub, as batches of documents."""
import hashlib
import json
import os
import shutil
import sys
from collections import namedtuple
from pathlib import Path

from nanope.files import brief

BATCH = 2**20  # characters that a batch has, at least (the last one excepted): work for a fraction of a second

# The parquet files of sets on the hub, never code of theirs; the sizes are about those of their cards.
HubSet = namedtuple('HubSet', 'repo files documents characters tokens')
HUB = {
    'openwebtext': HubSet('Skylion007/openwebtext', '@refs/convert/parquet/plain_text/*train/*.parquet',
                          documents=8_013_769, characters=39.8e9, tokens=9.0e9),
    'fineweb_edu': HubSet('HuggingFaceFW/fineweb-edu', '/sample/10BT/*.parquet',
                          documents=9_672_101, characters=47e9, tokens=10e9),
}

HUB_RATIO = 1 / 4.43  # GPT-2's tokens a character of English from the web

# texts: [str, ...], none empty; empty: how many documents were left out because they are; place: where to go on after
# this batch, for open_batches(), or None where the source cannot tell.
Batch = namedtuple('Batch', 'texts empty place')


def find_files(path):
    """The files of text that a path names: itself, or all in a folder, sorted; [str, ...] of one kind."""
    path = Path(path)
    if not path.exists():
        raise ValueError(f'{path}: there is no such file or folder')
    inside = [file for file in path.rglob('[!.]*') if file.is_file() and file.suffix.lower() in READERS]
    files = sorted(inside) if path.is_dir() else [path]
    kinds = sorted({file.suffix.lower() for file in files})
    if len(kinds) != 1 or kinds[0] not in READERS:
        found = f'holds {" and ".join(kinds) or "no such"} files' if path.is_dir() else f'ends in {path.suffix!r}'
        raise ValueError(f'{path} {found}: --input takes .txt, .jsonl or .parquet, a file or a folder of one kind')
    return [str(file) for file in files]


def hub_files(name):
    """The files of a set on the hub, for open_batches(). OSError, within seconds, where the hub does not answer."""
    from huggingface_hub import HfApi
    repo, files, *_ = HUB[name]
    try:
        HfApi().dataset_info(repo, timeout=10)
    except Exception as error:  # whatever the HTTP library of the day raises
        raise OSError(f'could not reach {repo} on the Hugging Face hub ({brief(error)}); with its parquet files from '
                      f'elsewhere, run: python prepare.py {name} --input=FOLDER_OF_PARQUET') from None
    return [f'hf://datasets/{repo}{files}']


def open_batches(files, column='text', max_documents=None, place=None):
    """Yields Batches of the documents in files, in their order, from a Batch's place on."""
    texts, characters, empty, documents = [], 0, 0, 0
    for text, where in READERS[Path(files[0]).suffix.lower()](files, column, place):
        if documents == max_documents:
            break
        if not text or text.isspace():
            empty += 1
            continue
        texts.append(text)
        characters += len(text)
        documents += 1
        if characters >= BATCH:
            yield Batch(texts, empty, where())
            texts, characters, empty = [], 0, 0
    if texts or empty:
        yield Batch(texts, empty, None)


def divide(batches, split, seed, index):
    """Batches -> (pieces, documents, empty, place) for write_parts() of writer.py; `index` documents went before.

    split: (every, None) holds out one document in `every`, (None, cut) what follows the first `cut` characters; the
    document that is cut in two has no separator at the cut, where it does not end."""
    (every, cut), seen = split, 0
    for texts, empty, place in batches:
        pieces = []
        for text in texts:
            if cut is None:
                held_out = index % every == draw(seed, index // every) % every
                pieces.append(('val' if held_out else 'train', text, True))
            else:
                head, tail = text[:max(cut - seen, 0)], text[max(cut - seen, 0):]
                pieces += [piece for piece in (('train', head, not tail), ('val', tail, True)) if piece[1]]
            seen += len(text)
            index += 1
        yield pieces, len(texts), empty, place


def draw(seed, block):
    """A large number for a block of documents, the same on every machine."""
    return int.from_bytes(hashlib.sha256(f'{seed} {block}'.encode()).digest()[:8], 'little')


def read_text(files, column, place):
    """A document a file. Windows' line ends become \\n: the same text gives the same tokens everywhere."""
    for file in files:
        data = Path(file).read_bytes()
        try:
            text = data.decode('utf-8-sig')
        except UnicodeDecodeError as error:
            raise ValueError(f'{file}: byte {error.start} ({data[error.start]:#04x}) is not UTF-8 text') from None
        if '\0' in text:
            raise ValueError(f'{file}: byte {data.index(0)} (0x00) is not text')
        yield text.replace('\r\n', '\n'), lambda: None


def read_jsonl(files, column, place):
    """A document a line. Read by hand because `datasets` does not tell which line is wrong."""
    for file in files:
        with open(file, 'rb') as lines:
            for number, line in enumerate(lines, 1):
                if line.isspace():
                    continue
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError) as error:  # also where it is not UTF-8
                    raise ValueError(f'{file}:{number}: not JSON ({brief(error)})') from None
                fields = list(record) if isinstance(record, dict) else []
                if column not in fields or not isinstance(record[column], str):
                    raise ValueError(f'{file}:{number}: no text in {column!r}; fields: {fields} (see --text_column)')
                yield record[column].encode('utf-8', 'replace').decode(), lambda: None  # half a surrogate pair is no text


def read_parquet(files, column, place):
    """A document a row. The same code reads files and the hub, a row group at a time."""
    import datasets
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs what it raises
    datasets.disable_progress_bars()
    datasets.config.TORCH_AVAILABLE = False  # else it imports torch, which takes seconds, for loaders of torch's
    here = [file for file in files if not file.startswith('hf://')]
    for file in here:
        check_parquet(file, column)
    try:
        rows = datasets.load_dataset('parquet', data_files=files, columns=[column], split='train', streaming=True)
        if here:  # a row group at a time: pyarrow reads ahead, up to 1 GiB of a file, while its rows are tokenised
            rows = rows.reshard()
        if place is not None:
            rows.load_state_dict(place)
        for row in rows:
            yield row[column], rows.state_dict
    except Exception as error:  # whatever the HTTP library of the day raises, or pyarrow where a file is damaged
        raise OSError(f'could not read on in {files[0]} ({brief(error)}); running the command again goes on') from None


def measure(files, column):
    """(documents, bytes) of text files before they are read: of parquet the rows and the size of the column; else None and the size."""
    if not files[0].lower().endswith('.parquet'):
        return None, sum(Path(file).stat().st_size for file in files)
    import pyarrow.parquet
    rows = size = 0
    for file in files:
        check_parquet(file, column)
        meta = pyarrow.parquet.read_metadata(file)
        rows += meta.num_rows
        for group in (meta.row_group(i) for i in range(meta.num_row_groups)):
            chunks = (group.column(i) for i in range(group.num_columns))
            size += sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema == column)
    return rows, size


def print_need(config, files, hub, documents, characters, tokenizer):
    """Says how much disk a large set needs, before it is read; returns about how many characters it has, for the progress bar."""
    rows, size = documents, characters
    if characters is None:
        rows, size = (hub.documents, hub.characters) if hub and not config.input else measure(files, config.text_column)
        share = min(1, (config.max_documents or rows) / rows) if rows else 1
        rows, size = (rows or 0) * share, size * share
    tokens = size if tokenizer.kind == 'char' else size * HUB_RATIO
    need, free = tokens * tokenizer.dtype.itemsize, shutil.disk_usage('data' if os.path.isdir('data') else '.').free
    if need > 5e7:
        print(f'about {f"{rows:,.0f} documents, " if rows else ""}{tokens:,.0f} tokens: they need {need / 1e9:.1f} GB of disk '
              f'({free / 1e9:.1f} GB free)' + ('; stopped, it goes on if run again' if files[0].endswith('.parquet') else ''))
    if need > free:
        print(f'warning: {free / 1e9:.1f} GB of disk are free, which may not do: use --max_documents, or make room', file=sys.stderr)
    return size


def check_parquet(file, column):
    """ValueError that names the file and what is wrong; `datasets` does not name it."""
    import pyarrow.parquet
    try:
        schema = pyarrow.parquet.read_schema(file)
    except Exception as error:
        raise ValueError(f'{file}: not a parquet file ({brief(error)})') from None
    if column not in schema.names or str(schema.field(column).type) not in ('string', 'large_string', 'string_view'):
        fields = {name: str(schema.field(name).type) for name in schema.names}
        raise ValueError(f'{file}: no column {column!r} of strings; columns: {fields} (see --text_column)')


READERS = {'.txt': read_text, '.jsonl': read_jsonl, '.parquet': read_parquet}
