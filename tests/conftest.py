"""A prepared data folder, small enough to be copied for every test."""
import shutil
import threading

import pytest
import torch
from tqdm import tqdm

from runs import ROOT, start

tqdm.set_lock(threading.RLock())  # its own is shared with forks: one that is killed while it prints would hold it for ever
torch.set_num_threads(1)  # these models are too small for two, and other processes may want the other core


@pytest.fixture(scope='session')
def prepared(tmp_path_factory):
    """A folder with data/tiny/, made by prepare.py: 6,000 characters of Hamlet and some that take two to four bytes."""
    folder = tmp_path_factory.mktemp('prepared')
    text = (ROOT / 'data/shakespeare/plays/hamlet.txt').read_text('utf-8')[:6000].replace('Hamlet', 'Hämlet').replace('!', '日🎉')
    (folder / 'tiny.txt').write_text(text + 'Hämlet 日🎉\n', encoding='utf-8')
    process = start(folder, 'prepare.py', 'tiny', '--input=tiny.txt', '--tokenizer=char')
    assert process.wait() == 0, process.stderr.read()
    return folder


@pytest.fixture
def place(prepared, tmp_path):
    """A folder of the test's own with a copy of data/tiny/."""
    shutil.copytree(prepared / 'data', tmp_path / 'data')
    return tmp_path
