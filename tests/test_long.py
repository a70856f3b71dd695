"""Long runs and large files: what grows with neither time nor size."""
import json
import os
import time

import numpy as np
import pytest
import torch

from nanope import metrics
from nanope.evaluate import windows
from nanope.files import sampled_sha256
from nanope.loader import CHECK_BYTES, Data
from runs import flags, start

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not os.path.exists('/proc/self/statm'), reason='reads /proc')]


def usage(process):
    """(resident bytes, open files, threads) of a process."""
    with open(f'/proc/{process.pid}/statm') as file:
        resident = int(file.read().split()[1]) * os.sysconf('SC_PAGE_SIZE')
    return resident, len(os.listdir(f'/proc/{process.pid}/fd')), len(os.listdir(f'/proc/{process.pid}/task'))


def watch(place, after, **settings):
    """Train in a process of its own, to the end. Returns what it used at many moments from update `after` on."""
    process, seen = start(place, 'train.py', *flags(**settings)), []
    while process.poll() is None:
        time.sleep(0.2)
        records = metrics.read(place / 'out/a')
        if records and after <= records[-1]['step'] and not any(r['event'] == 'final' for r in records):  # then a picture is drawn
            try:
                seen.append(usage(process))
            except OSError:  # it has just ended
                break
    assert process.wait() == 0, process.stderr.read()
    assert len(seen) >= 10
    return np.array(seen).T


def test_memory_files_and_threads_stay_flat(place, record_property):
    """20,000 updates with evaluations and checkpoints between them."""
    resident, files, threads = watch(place, 1000, max_iters=20_000, eval_interval=2000, log_interval=100, batch_size=1, dropout=0.1)
    record_property('result', f'memory {resident.max() / resident.min() - 1:.1%} apart from update 1,000 on')
    assert resident.max() < 1.05 * resident.min()
    assert threads.max() == threads.min() and files.max() - files.min() <= 2  # a checkpoint or a record being written


def sparse(place, tokens, at):
    """Make train.bin one of so many tokens that takes no room on the disk: zeros, but 1, 2, 3 from `at` on. Returns the folder."""
    folder = place / 'data/tiny'
    meta = json.loads((folder / 'meta.json').read_text('utf-8'))
    with open(folder / 'train.bin', 'wb') as file:
        file.truncate(2 * tokens)
        file.seek(2 * at)
        file.write(np.array([1, 2, 3], '<u2').tobytes())
    meta['train'] |= {'tokens': tokens, 'sampled_sha256': sampled_sha256(folder / 'train.bin')}
    (folder / 'meta.json').write_text(json.dumps(meta), 'utf-8')
    return folder


def test_more_than_2_to_the_31_tokens(place, record_property):
    """Counts and places beyond 32 bits: read where they are, drawn as often as any, trained on in memory that stays flat."""
    tokens = 3 * 2**30
    folder = sparse(place, tokens, 2**31 + 7)
    assert folder.joinpath('train.bin').stat().st_blocks * 512 < 2**20 < CHECK_BYTES
    data = Data(folder)
    assert data.train.rows([2**31 + 5, tokens - 4, 2**31 + 8], 4).tolist() == [[0, 0, 1, 2], [0, 0, 0, 0], [2, 3, 0, 0]]
    starts = []
    data.train.rows = lambda places, length: starts.extend(places) or torch.zeros(len(places), length)
    for step in range(300):
        data.train.batch(1337, step, 8, 1024)
    assert 0 <= min(starts) and max(starts) <= tokens - 1025
    assert np.mean(np.array(starts) >= 2**31) == pytest.approx(1 / 3, abs=0.05)
    places, first = windows(tokens, 1024)
    assert places[-1] == tokens - 1025 and (1024 - first).sum() == tokens - 1
    resident, _, _ = watch(place, 500, max_iters=4000, eval_interval=4000, log_interval=100, batch_size=4)
    record_property('result', f'memory {resident.max() / resident.min() - 1:.1%} apart')
    assert resident.max() < 1.05 * resident.min()
