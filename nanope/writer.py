"""Batches of documents -> train.bin, val.bin and meta.json of a folder: in parallel, resumable, whole or not at all.

The ids go to <split>.bin.part. Every few seconds progress.json notes how far these are, so that a run that was killed
goes on there; the finished files get their names at the end, meta.json last.
"""
import hashlib
import json
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import numpy as np

from nanope.files import sampled_sha256, sync, write_json
from nanope.tokenizer import SEPARATOR, from_json

SPLITS = ('train', 'val')
FORMAT = 1
SAVE_SECONDS = 2


def read_progress(folder, job):
    """How far an earlier run of the same job came, or the start of a new one."""
    try:
        with open(f'{folder}/progress.json', encoding='utf-8') as file:
            progress = json.load(file)
        sizes = {split: os.path.getsize(f'{folder}/{split}.bin.part') for split in SPLITS}
        if progress['job'] == job and all(sizes[split] >= progress[split]['size'] for split in SPLITS):
            return progress
    except (OSError, ValueError, KeyError, TypeError):
        pass
    discard(folder)
    counts = {split: {'size': 0, 'tokens': 0, 'documents': 0, 'bytes': 0} for split in SPLITS}
    return {'job': job, 'place': None, 'documents': 0, 'empty': 0, 'special': 0, **counts}


def write_parts(folder, batches, tokenizer, progress, workers, on_batch):
    """Encode batches of (pieces, n_documents, n_empty, place) behind what progress says is there, and count in it.

    pieces: [(split, text, ends), ...]; a separator follows a piece where its document ends.
    workers: processes that encode, 0 = this one. on_batch(n_characters) is called after each batch."""
    files = {split: open(f'{folder}/{split}.bin.part', 'ab') for split in SPLITS}
    try:
        for split, file in files.items():
            file.truncate(progress[split]['size'])
        saved = time.monotonic()
        for (pieces, n_documents, n_empty, place), (encoded, special) in encode_all(batches, tokenizer, workers):
            for split, (ids, counts) in encoded.items():
                files[split].write(ids)
                progress[split] = {key: progress[split][key] + counts[key] for key in counts}
            progress.update(place=place, documents=progress['documents'] + n_documents,
                            empty=progress['empty'] + n_empty, special=progress['special'] + special)
            on_batch(sum(len(text) for _, text, _ in pieces))
            if place is not None and time.monotonic() - saved > SAVE_SECONDS:
                for file in files.values():
                    file.flush()
                    os.fsync(file.fileno())
                write_json(f'{folder}/progress.json', progress)
                saved = time.monotonic()
    finally:
        for file in files.values():
            file.close()


def encode_all(batches, tokenizer, workers):
    """Yields (batch, encode()d) in order, a few batches ahead of what is taken."""
    if not workers:
        yield from ((batch, encode(batch[0], tokenizer)) for batch in batches)
        return
    # spawn: forking a process that has threads (pyarrow's) may hang, and Windows knows nothing else
    context = multiprocessing.get_context('spawn')
    with ProcessPoolExecutor(workers, context, start_worker, [tokenizer.to_json()]) as pool:
        try:
            ahead = deque()
            for batch in batches:
                ahead.append((batch, pool.submit(encode, batch[0])))
                if len(ahead) > 2 * workers:
                    batch, future = ahead.popleft()
                    yield batch, future.result()
            for batch, future in ahead:
                yield batch, future.result()
        except BrokenProcessPool:
            raise OSError('a worker process died, perhaps for lack of memory: use fewer --workers') from None
        finally:
            pool.shutdown(cancel_futures=True)


def start_worker(tokenizer):
    global worker_tokenizer
    worker_tokenizer = from_json(tokenizer)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which stops the workers
    threading.Thread(target=die_with_parent, daemon=True).start()


def die_with_parent():
    multiprocessing.parent_process().join()
    os._exit(1)


def encode(pieces, tokenizer=None):
    """({split: (ids as bytes, counts)}, how often the text spells the separator)."""
    tokenizer = tokenizer or worker_tokenizer
    separator = np.array([tokenizer.separator], dtype=tokenizer.dtype)
    encoded = {}
    for split in SPLITS:
        mine = [(text, ends) for part, text, ends in pieces if part == split]
        arrays = [ids for text, ends in mine for ids in (tokenizer.encode(text), separator[:ends])]
        ids = np.concatenate([separator[:0], *arrays]).astype(tokenizer.dtype.newbyteorder('<')).tobytes()
        encoded[split] = ids, {'size': len(ids), 'tokens': sum(map(len, arrays)), 'documents': len(mine),
                               'bytes': sum(len(text.encode('utf-8')) for text, _ in mine)}
    return encoded, sum(text.count(SEPARATOR) for _, text, _ in pieces)


def finish(folder, tokenizer, progress, **notes):
    """Give the parts their names and write meta.json, which it returns."""
    meta = {'format': FORMAT, 'dtype': tokenizer.dtype.name, 'vocab_size': tokenizer.vocab_size,
            'separator': tokenizer.separator, 'tokenizer': tokenizer.to_json(), **notes}
    for split in SPLITS:
        meta[split] = {**progress[split], **summarise(f'{folder}/{split}.bin.part', tokenizer.dtype)}
        meta[split].pop('size')
        sync(f'{folder}/{split}.bin.part')
    if os.path.exists(f'{folder}/meta.json'):
        os.remove(f'{folder}/meta.json')  # no moment with the old meta.json and new files
    for split in SPLITS:
        os.replace(f'{folder}/{split}.bin.part', f'{folder}/{split}.bin')
    write_json(f'{folder}/meta.json', meta)
    discard(folder)
    return meta


def summarise(path, dtype):
    """{'max_id', 'sha256', 'sampled_sha256'} of a file of ids, read as it lies on the disk."""
    digest, max_id = hashlib.sha256(), 0
    with open(path, 'rb') as file:
        while block := file.read(2**20):
            digest.update(block)
            max_id = max(max_id, int(np.frombuffer(block, dtype=dtype.newbyteorder('<')).max()))
    return {'max_id': max_id, 'sha256': digest.hexdigest(), 'sampled_sha256': sampled_sha256(path)}


def discard(folder):
    """Remove what an unfinished run left."""
    for name in ('progress.json', *(f'{split}.bin.part' for split in SPLITS)):
        if os.path.exists(f'{folder}/{name}'):
            os.remove(f'{folder}/{name}')
