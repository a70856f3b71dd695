"""prepare.py: formats, splits, parallel = serial, kill and resume, bad input, and what is left behind by a failure."""
import contextlib
import hashlib
import http.server
import itertools
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

import prepare
from nanope import corpus, writer
from nanope.configurator import run
from nanope.loader import Data
from nanope.tokenizer import SEPARATOR, GPT2Tokenizer, from_json

ROOT = Path(prepare.__file__).parent
PLAYS_SHA256 = '587573c7b468a034f07ca48ddd16ea3ce49d685d88d6e1cc58c89317022b3d51'
WORDS = 'the quick brown fox, jumps! over\n\n the lazy dog; 42 times. Déjà vu \t'.split(' ')


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(capsys, *args):
    """prepare.py in this process: (exit code, stdout, stderr)."""
    sys.argv = ['prepare.py', *args]
    with pytest.raises(SystemExit) as end:
        run(prepare.main)
    return end.value.code, *capsys.readouterr()


def spawn(*args, cwd=None, **environment):
    """prepare.py as a process that notes its progress after each of many small batches."""
    code = ('import sys, time\nfrom nanope import configurator, corpus, writer\nimport prepare\n'
            'corpus.BATCH, writer.SAVE_SECONDS, write_json = 20_000, 0, writer.write_json\n'
            'def slow_write_json(*args):\n    write_json(*args)\n    time.sleep(0.05)\n'
            'writer.write_json = slow_write_json\n'
            'configurator.run(prepare.main)')
    return subprocess.Popen([sys.executable, '-c', code, *args], text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, cwd=cwd, env={**os.environ, 'PYTHONPATH': str(ROOT), **environment})


def load(folder):
    """(meta, train ids, val ids), checked against each other."""
    meta = json.loads(Path(folder, 'meta.json').read_text('utf-8'))
    ids = []
    for split in ('train', 'val'):
        ids.append(np.fromfile(Path(folder, f'{split}.bin'), dtype=np.dtype(meta['dtype']).newbyteorder('<')))
        assert meta[split]['tokens'] == len(ids[-1]) and meta[split]['max_id'] == ids[-1].max() < meta['vocab_size']
        assert meta[split]['sha256'] == hashlib.sha256(Path(folder, f'{split}.bin').read_bytes()).hexdigest()
    return meta, *ids


def texts(folder):
    """(train, val) documents as they were before."""
    meta, *splits = load(folder)
    decode = from_json(meta['tokenizer']).decode
    return [[decode(part) for part in np.split(ids, np.flatnonzero(ids == meta['separator']) + 1)] for ids in splits]


def files(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.name != '.lock'}


def stories(n, size=60, seed=0):
    random = np.random.default_rng(seed)
    return [' '.join(random.choice(WORDS, size=random.integers(1, size))) + str(i) for i in range(n)]


def write_parquet(path, documents):
    import pyarrow.parquet
    table = pyarrow.table({'text': documents, 'url': ['u'] * len(documents)})
    pyarrow.parquet.write_table(table, path, row_group_size=max(1, len(documents) // 3))


def write_jsonl(path, documents):
    path.write_text(''.join(json.dumps({'id': 1, 'text': document}) + '\n' for document in documents), 'utf-8')


# ---- what comes with nanoPE ----------------------------------------------------------------------------------------

def test_plays_are_what_rebuild_makes():
    plays = sorted((ROOT / 'data' / 'shakespeare' / 'plays').glob('*.txt'), key=lambda path: path.name)
    assert len(plays) == 37
    assert hashlib.sha256(b''.join(play.read_bytes() for play in plays)).hexdigest() == PLAYS_SHA256
    for script in ('rebuild.py', 'README.md'):
        assert PLAYS_SHA256 in (ROOT / 'data' / 'shakespeare' / script).read_text('utf-8')


def test_plays_are_clean():
    for play in (ROOT / 'data' / 'shakespeare' / 'plays').glob('*.txt'):
        speeches = play.read_text('ascii').rstrip('\n').split('\n\n')
        assert len(speeches) > 400
        for speech in speeches:
            name, *lines = speech.split('\n')
            assert re.fullmatch(r"[A-Z][A-Za-z' &-]+:", name), (play.name, name)
            assert lines and all(line == line.strip() != '' for line in lines), (play.name, speech)
            assert not re.search(r'[^\w\s!&\',.:;?-]|_', speech), (play.name, speech)


def test_shakespeare(here):
    """As a user runs it: no network, no option."""
    start = time.monotonic()
    done = subprocess.run([sys.executable, ROOT / 'prepare.py', 'shakespeare'], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, '') and time.monotonic() - start < 20
    meta, train, val = load('data/shakespeare')
    assert (meta['vocab_size'], meta['separator'], meta['dtype']) == (69, 68, 'uint16')
    assert (meta['train']['documents'], meta['val']['documents']) == (33, 4)
    assert 0.08 < len(val) / (len(train) + len(val)) < 0.12
    assert train[-1] == val[-1] == 68 and (train == 68).sum() == 33 and (val == 68).sum() == 4
    assert 'python train.py config/shakespeare_rope.py\n' in done.stdout
    from nanope.loader import Data
    assert Data('data/shakespeare').tokenizer.decode(val[:8]) == 'ORLANDO:'


# ---- formats -------------------------------------------------------------------------------------------------------

def test_formats_agree(here, capsys):
    documents = stories(30)
    Path('txt').mkdir()
    for i, document in enumerate(documents):
        Path('txt', f'{i:03}.txt').write_bytes(document.replace('\n', '\r\n').encode('utf-8-sig'))  # as on Windows
    write_jsonl(Path('all.jsonl'), documents)
    Path('pq').mkdir()
    write_parquet('pq/0.parquet', documents[:20])
    write_parquet('pq/1.parquet', documents[20:])
    results = []
    for path in ('txt', 'all.jsonl', 'pq'):
        code, out, err = call(capsys, 'mine', f'--input={path}')
        assert code == 0 and err == '' and '--dataset=mine' in out
        results.append(files('data/mine'))
    assert set(results[0]) == {'train.bin', 'val.bin', 'meta.json'}
    assert results[0]['train.bin'] == results[1]['train.bin'] == results[2]['train.bin']
    assert results[0]['val.bin'] == results[1]['val.bin'] == results[2]['val.bin']
    train, val = texts('data/mine')
    assert sorted(train + val) == sorted([document + SEPARATOR for document in documents] + ['', ''])


def test_one_text_is_cut_as_nanogpt_cuts_it(here, capsys):
    text = '\n'.join(stories(20))
    Path('input.txt').write_text(text, 'utf-8')
    assert call(capsys, 'tiny', '--input=input.txt')[0] == 0
    assert texts('data/tiny') == [[text[:int(len(text) * 0.9)]], [text[int(len(text) * 0.9):] + SEPARATOR, '']]
    assert call(capsys, 'tiny', '--input=input.txt', '--tokenizer=gpt2', '--val_fraction=0.25')[0] == 0
    assert texts('data/tiny') == [[text[:int(len(text) * 0.75)]], [text[int(len(text) * 0.75):] + SEPARATOR, '']]


def test_separator_in_a_text_is_text(here, capsys):
    write_jsonl(Path('a.jsonl'), [f'one{SEPARATOR}two', 'three', ' \n', ''])
    for kind in ('char', 'gpt2'):
        code, out, _ = call(capsys, 'a', '--input=a.jsonl', f'--tokenizer={kind}')
        assert code == 0 and f'spells {SEPARATOR} 1 times' in out and '2 empty documents' in out
        meta, train, val = load('data/a')
        assert (np.concatenate([train, val]) == meta['separator']).sum() == 2


def test_many_characters_need_four_bytes(here, capsys):
    text = ''.join(map(chr, range(0x10000, 0x10000 + 70_000)))
    Path('a.txt').write_text(text, 'utf-8')
    assert call(capsys, 'a', '--input=a.txt')[0] == 0
    meta, train, val = load('data/a')
    assert meta['dtype'] == 'uint32' and val.max() == 70_000
    assert meta['train']['bytes'] + meta['val']['bytes'] == 4 * 70_000


def test_gpt2_for_much_text(here, capsys, monkeypatch):
    monkeypatch.setattr(prepare, 'SMALL', 1000)
    write_jsonl(Path('a.jsonl'), stories(40))
    code, out, _ = call(capsys, 'a', '--input=a.jsonl', '--max_documents=30')
    meta, *_ = load('data/a')
    assert code == 0 and 'tokenizer: gpt2' in out and meta['vocab_size'] == 50257
    assert meta['train']['documents'] + meta['val']['documents'] == 30


# ---- splits --------------------------------------------------------------------------------------------------------

batches = st.lists(st.lists(st.text(min_size=1, max_size=9), max_size=6), min_size=1, max_size=6)


@settings(deadline=None)
@given(batches=batches, every=st.integers(2, 12), seed=st.integers(), start=st.integers(0, 30))
def test_whole_documents_are_held_out(batches, every, seed, start):
    divided = list(corpus.divide([corpus.Batch(texts, 0, None) for texts in batches], (every, None), seed, start))
    pieces = [piece for batch in divided for piece in batch[0]]
    assert [text for _, text, _ in pieces] == [text for texts in batches for text in texts]
    assert all(ends for _, _, ends in pieces)
    assert [n for _, n, _, _ in divided] == [len(texts) for texts in batches]
    if start == 0:  # each block of `every` documents has one
        splits = [split for split, _, _ in pieces]
        assert all(splits[i:i + every].count('val') == 1 for i in range(0, len(splits) - every + 1, every))


@settings(deadline=None)
@given(batches=batches, data=st.data())
def test_tail_is_held_out(batches, data):
    whole = ''.join(text for texts in batches for text in texts)
    cut = data.draw(st.integers(0, len(whole)))
    divided = corpus.divide([corpus.Batch(texts, 0, None) for texts in batches], (None, cut), 0, 0)
    pieces = [piece for batch in divided for piece in batch[0]]
    assert ''.join(text for split, text, _ in pieces if split == 'train') == whole[:cut]
    assert ''.join(text for split, text, _ in pieces if split == 'val') == whole[cut:]
    assert sum(ends for _, _, ends in pieces) == sum(map(len, batches))


def test_two_documents_make_two_splits(here, capsys):
    for n, seed in itertools.product((2, 3, 9), (0, 1)):
        write_jsonl(Path('a.jsonl'), stories(n))
        assert call(capsys, 'a', '--input=a.jsonl', f'--seed={seed}')[0] == 0
        assert load('data/a')[0]['val']['documents'] == 1


# ---- parallel, stopped, resumed, twice at once ---------------------------------------------------------------------

def many_pieces(n=40):
    for i in range(n):
        yield [('val' if i % 7 == 3 else 'train', text, True) for text in stories(3, seed=i)], 3, 0, None


def test_parallel_is_serial(here):
    results = []
    for workers in (0, 2):
        progress = writer.read_progress('.', 'job')
        writer.write_parts('.', many_pieces(), GPT2Tokenizer(), progress, workers, lambda n: None)
        results.append((files('.'), progress))
    assert results[0] == results[1] and results[0][1]['documents'] == 120


def test_dead_worker_ends_the_run(here):
    def killing():
        for i, pieces in enumerate(many_pieces()):
            if i == 10:
                for child in multiprocessing.active_children():
                    child.kill()
            yield pieces
    progress = writer.read_progress('.', 'job')
    with pytest.raises(OSError, match='a worker process died'):
        writer.write_parts('.', killing(), GPT2Tokenizer(), progress, 2, lambda n: None)


def run_killed(expected, kills, *args):
    """Run prepare.py until it has noted progress, kill it, `kills` times; then to its end. True if that was resumed."""
    Path('killed').mkdir()
    progress, seen = Path('killed/data/openwebtext/progress.json'), b''
    for _ in range(kills):
        process = spawn('openwebtext', *args, cwd='killed')
        while process.poll() is None and (not progress.exists() or progress.read_bytes() == seen):
            time.sleep(0.005)
        process.kill()
        process.communicate()
        seen = progress.read_bytes() if progress.exists() else b''
    assert not Path('killed/data/openwebtext/train.bin').exists()
    out, err = (process := spawn('openwebtext', *args, cwd='killed')).communicate()
    assert (process.returncode, err) == (0, '')
    assert files('killed/data/openwebtext') == expected
    return 'going on after' in out


def openwebtext(capsys, n):
    """Parquet files with the columns of the set on the hub, and what an uninterrupted run makes of them."""
    Path('owt').mkdir()
    for i in range(2):
        write_parquet(f'owt/{i}.parquet', [*stories(n, 300, seed=i), None, ''])
    args = f'--input={Path("owt").absolute()}', '--val_fraction=0.01', '--workers=0'
    Path('whole').mkdir()
    with contextlib.chdir('whole'):
        assert call(capsys, 'openwebtext', *args)[0] == 0
    meta = load('whole/data/openwebtext')[0]
    assert meta['train']['documents'] + meta['val']['documents'] == 2 * n and meta['val']['documents'] == n // 50
    return files('whole/data/openwebtext'), args


def test_killed_and_resumed_is_the_same(here, capsys):
    expected, args = openwebtext(capsys, 200)
    assert run_killed(expected, 1, *args)


@pytest.mark.slow
@pytest.mark.parametrize('workers', [0, 2])
def test_killed_many_times_is_the_same(here, capsys, workers):
    expected, args = openwebtext(capsys, 2000)
    assert run_killed(expected, 8, *args[:-1], f'--workers={workers}')
    assert multiprocessing.active_children() == []


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, 'fork'), reason='kills a fork')
def test_killed_at_random_leaves_nothing_that_train_accepts(here, record_property):
    """SIGKILL anywhere: train.py finds no data, or all of it; the next prepare.py makes the same files as one that was left alone."""
    text = Path('text.txt').absolute()
    text.write_text(''.join(story + '\n' for story in stories(3000)), 'utf-8')
    random, seen = np.random.default_rng(3), []

    def prepare_fork(folder, seconds):
        Path(folder).mkdir(exist_ok=True)
        child = os.fork()
        if not child:
            sys.stdout = sys.stderr = open(os.devnull, 'w')
            os.chdir(folder)
            sys.argv = ['prepare.py', 'set', f'--input={text}', '--tokenizer=char']
            try:
                run(prepare.main)
            finally:
                os._exit(0)
        if seconds is not None:
            time.sleep(seconds)
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

    started = time.time()
    prepare_fork('whole', None)
    took = time.time() - started
    for i in range(20):
        prepare_fork(f'killed{i}', random.uniform(0, 1.2 * took))
        try:
            seen.append(Data(f'killed{i}/data/set').digest == Data('whole/data/set').digest)
        except ValueError as error:
            assert 'run: python prepare.py set' in str(error)
            prepare_fork(f'killed{i}', None)
        assert Data(f'killed{i}/data/set').digest == Data('whole/data/set').digest
    record_property('tries', 20)
    assert all(seen) and len(seen) < 20


def test_progress_of_another_job_is_dropped(here):
    progress = writer.read_progress('.', 'this')
    writer.write_parts('.', many_pieces(4), GPT2Tokenizer(), progress, 0, lambda n: None)
    writer.write_json('progress.json', progress)
    assert writer.read_progress('.', 'this') == progress
    for split in writer.SPLITS:
        os.truncate(f'{split}.bin.part', progress[split]['size'] + 1)  # more than was noted is cut off later
    assert writer.read_progress('.', 'this') == progress
    os.truncate('train.bin.part', progress['train']['size'] - 1)
    assert writer.read_progress('.', 'this')['documents'] == 0 and os.listdir('.') == []
    writer.write_json('progress.json', progress)
    assert writer.read_progress('.', 'other')['documents'] == 0 and os.listdir('.') == []


def test_two_at_once(here, capsys):
    write_jsonl(Path('a.jsonl'), stories(20))
    assert call(capsys, 'a', '--input=a.jsonl')[0] == 0
    before = files('data/a')
    with FileLock('data/a/.lock'):
        code, _, err = call(capsys, 'a', '--input=a.jsonl')
    assert code == 2 and 'being prepared by another process' in err and files('data/a') == before
    assert call(capsys, 'a', '--input=a.jsonl')[0] == 0 and files('data/a') == before


@pytest.mark.skipif(os.name == 'nt', reason='POSIX limits')
def test_full_disk_leaves_the_old_data(here):
    Path('data/shakespeare').mkdir(parents=True)
    Path('data/shakespeare/train.bin').write_bytes(b'old')
    done = subprocess.run(['bash', '-c', f'ulimit -f 1000; {sys.executable} {ROOT}/prepare.py shakespeare'],
                          capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith('error: ') and 'Traceback' not in done.stderr
    assert files('data/shakespeare') == {'train.bin': b'old'}


# ---- bad input -----------------------------------------------------------------------------------------------------

BAD = {  # what stands in the file: the error
    'latin.txt': (b'caf\xe9', r'latin.txt: byte 3 \(0xe9\) is not UTF-8'),
    'nul.txt': (b'ab\0c', r'nul.txt: byte 2 \(0x00\) is not text'),
    'blank.txt': (b' \n\n', 'has no text'),
    'zero.txt': (b'', 'has no text'),
    'short.txt': (b'a', 'too few'),
    'notes.md': (b'a', r"ends in '.md'.*\.txt, \.jsonl or \.parquet"),
    'field.jsonl': (b'{"text": "a"}\n\n{"body": "b"}\n', r"field.jsonl:3: no text in 'text'; fields: \['body'\]"),
    'number.jsonl': (b'{"text": 1}\n', 'number.jsonl:1: no text'),
    'list.jsonl': (b'["text"]\n', 'list.jsonl:1: no text'),
    'syntax.jsonl': (b'{"text": "a"}\n{"text": \n', 'syntax.jsonl:2: not JSON'),
    'bytes.jsonl': (b'{"text": "\xff"}\n', 'bytes.jsonl:1: not JSON.*0xff'),
    'page.parquet': (b'<html>404 Not Found</html>', 'page.parquet: not a parquet file'),
}


@pytest.mark.parametrize('name', BAD)
def test_bad_file_is_one_line(here, capsys, name):
    content, message = BAD[name]
    write_jsonl(Path('good.jsonl'), stories(9))
    assert call(capsys, 'a', '--input=good.jsonl')[0] == 0
    before = files('data/a')
    Path(name).write_bytes(content)
    code, _, err = call(capsys, 'a', f'--input={name}')
    assert code == 2 and re.fullmatch(f'error: .*{message}.*\n', err), err
    assert files('data/a') == before


def test_bad_parquet(here, capsys):
    write_parquet('good.parquet', stories(50))
    whole = Path('good.parquet').read_bytes()
    Path('cut.parquet').write_bytes(whole[:-100])
    Path('torn.parquet').write_bytes(whole[:100] + bytes(len(whole) // 2) + whole[100 + len(whole) // 2:])
    for args, message in [
        (['--input=cut.parquet'], 'cut.parquet: not a parquet file'),
        (['--input=torn.parquet'], 'could not read on in torn.parquet'),
        (['--input=good.parquet', '--text_column=body'], "no column 'body' of strings; columns: {'text'"),
    ]:
        for name in ('a', 'fineweb_edu'):
            code, _, err = call(capsys, name, *args)
            assert code == 2 and message in err and err.count('\n') == 1, err
            assert list(Path().glob('data/*/*.bin*')) == []


@pytest.mark.parametrize('args, message', [
    ([], 'one plain name'), (['-a'], 'written --name=value'), (['a', 'b'], 'prepare.py a --input=b$'),
    (['../a'], 'prepare.py NAME --input=../a$'), (['a.txt'], 'did you mean --input=a.txt'),
    (['a', 'b/c.txt'], 'a --input=b/c.txt$'),
    (['shakespeare', '--input=mixed/a.txt'], 'use another name: python prepare.py mydata --input=mixed/a.txt$'),
    (['gpt2'], 'one plain name'),
    (['a'], 'needs --input=PATH; without it there are shakespeare, openwebtext, fineweb_edu'),
    (['a', '--input=nowhere'], 'no such file or folder'), (['a', '--input=empty'], 'holds no such files'),
    (['a', '--input=mixed'], r'holds \.jsonl and \.txt files'), (['a', '--inptu=b'], 'did you mean input'),
    (['shakespeare', '--val_fraction=0.9'], 'at most 0.5'), (['shakespeare', '--max_documents=0'], 'positive'),
    (['shakespeare', '--workers=-1'], '0 to 64'), (['shakespeare', '--tokenizer=word'], 'char|gpt2'),
    (['a', '--input=mixed/a.txt', '--split=documents'], 'use --split=tail'),
    (['a', '--adopt=b', '--val_fraction=0.2'], 'val_fraction=0.2 does nothing with --adopt'),
    (['a', '--adopt=b', '--max_documents=5'], 'max_documents=5 does nothing with --adopt'),
    (['a', '--adopt=b', '--input=mixed/a.txt', '--tokenizer=gpt2'], 'input=mixed/a.txt does nothing with --adopt and --tokenizer=gpt2'),
    (['a', '--input=mixed/a.txt', '--text_column=body'], '--text_column=body does nothing where the text is .txt'),
    (['a', '--input=mixed/a.txt', '--seed=3'], '--seed=3 does nothing where the tail is held out'),
    (['openwebtext', '--input=mixed', '--tokenizer=char'], 'tokenizer=gpt2 only'),
])
def test_bad_request(here, capsys, args, message):
    Path('empty').mkdir()
    Path('mixed').mkdir()
    Path('mixed/a.txt').write_text('some text')
    Path('mixed/b.jsonl').write_text('{}')
    code, _, err = call(capsys, *args)
    assert code == 2 and re.search(message, err.rstrip('\n')) and err.count('\n') == 1, err
    assert not list(Path().glob('data/*/*.bin'))


@pytest.mark.parametrize('characters, said', [
    (1290, 'next: python train.py config/shakespeare_rope.py --dataset=a\n'),  # val: 129 of them, and the separator
    (1270, 'val is short, 128 tokens: use more text, or a smaller --block_size than 128\n'
           'next: python train.py config/shakespeare_rope.py --dataset=a --block_size=127\n'),
    (20, '--dataset=a --block_size=2\n')])
def test_next_command_fits_the_data(here, capsys, characters, said):
    Path('a.txt').write_text('ab' * (characters // 2))
    code, out, _ = call(capsys, 'a', '--input=a.txt')
    assert code == 0 and out.replace('  val', 'val').endswith(said), out


def test_too_few_documents_for_a_hub_set(here, capsys):
    write_parquet('few.parquet', stories(5))
    code, _, err = call(capsys, 'openwebtext', '--input=few.parquet')
    assert code == 2 and 'val would have no text' in err and files('data/openwebtext') == {}
    assert call(capsys, 'openwebtext', '--input=few.parquet', '--max_documents=5')[0] == 0


# ---- the hub -------------------------------------------------------------------------------------------------------

def test_no_network_is_said_at_once(here):
    with socket.socket() as unused:
        unused.bind(('127.0.0.1', 0))  # bound, not listening: every connection is refused
        proxy = f'http://127.0.0.1:{unused.getsockname()[1]}'
        start = time.monotonic()
        out, err = (process := spawn('openwebtext', HTTPS_PROXY=proxy, https_proxy=proxy)).communicate()
    assert process.returncode == 2 and time.monotonic() - start < 20
    assert re.fullmatch('error: could not reach Skylion007/openwebtext .*prepare.py openwebtext --input=.*\n', err), err
    assert not Path('data').exists()


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as reading openwebtext's parquet files takes; they lie in self.server.folder."""
    protocol_version = 'HTTP/1.1'

    def do_GET(self):
        files, path = sorted(self.server.folder.iterdir()), self.path.partition('?')[0]
        listing = [{'type': 'file', 'oid': '0' * 40, 'size': file.stat().st_size,
                    'path': f'plain_text/train/{file.name}'} for file in files]
        if '/resolve/' in path:
            data = (self.server.folder / path.rpartition('/')[2]).read_bytes()
            first, last = re.fullmatch(r'bytes=(\d+)-(\d+)', self.headers['Range']).groups()
            self.answer(data[int(first):int(last) + 1], 206, {'Content-Range': f'bytes {first}-{last}/{len(data)}'})
        elif path.startswith('/api/datasets/Skylion007/openwebtext'):
            top = [{'type': 'directory', 'oid': '0' * 40, 'size': 0, 'path': 'plain_text'}]
            info = {'id': 'Skylion007/openwebtext', 'sha': '0' * 40, 'private': False, 'siblings': []}
            found = info if '/tree/' not in path else listing if 'plain_text' in path else top
            self.answer(json.dumps(found).encode(), 200, {'Content-Type': 'application/json'})
        else:
            self.answer(b'{}', 404, {})

    def answer(self, body, status, headers):
        self.send_response(status)
        for name, value in {**headers, 'Content-Length': len(body), 'ETag': '"0"', 'X-Repo-Commit': '0' * 40}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body if self.command == 'GET' else b'')

    do_HEAD = do_GET

    def log_message(self, *args):
        pass


@pytest.mark.slow
def test_hub_is_read_like_a_folder(here, capsys):
    expected, args = openwebtext(capsys, 500)
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Hub)
    server.folder = here / 'owt'
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub = f'http://127.0.0.1:{server.server_port}'
    process = spawn('openwebtext', *args[1:], HF_ENDPOINT=hub, HF_HOME=str(here / 'hf'))
    out, err = process.communicate()
    server.shutdown()
    assert (process.returncode, err) == (0, '') and 'need 18.0 GB of disk' in out
    assert files('data/openwebtext')['train.bin'] == expected['train.bin']


# ---- at size -------------------------------------------------------------------------------------------------------

def fineweb_edu(folder, n_files, n, size=300):
    """Parquet files with the columns of HuggingFaceFW/fineweb-edu: the documents that have text."""
    import pyarrow.parquet
    Path(folder).mkdir()
    documents = []
    for i in range(n_files):
        texts = [*stories(n, size, seed=i), '', None]
        count = len(texts)
        table = pyarrow.table({
            'text': texts, 'id': [f'<urn:uuid:{j}>' for j in range(count)], 'dump': ['CC-MAIN-2024-10'] * count,
            'url': ['https://example.org'] * count, 'file_path': ['s3://x'] * count, 'language': ['en'] * count,
            'language_score': [0.97] * count, 'token_count': [9] * count, 'score': [3.2] * count, 'int_score': [3] * count})
        pyarrow.parquet.write_table(table, f'{folder}/{i:03}_00000.parquet', row_group_size=50)
        documents += texts[:n]
    return documents


def test_fineweb_edu_from_a_folder(here, capsys):
    """Every document once, in order, exactly counted, whatever columns stand beside the text; empty ones are counted apart."""
    documents = fineweb_edu('fw', 3, 120)
    code, out, err = call(capsys, 'fineweb_edu', '--input=fw', '--val_fraction=0.02', '--workers=0')
    assert (code, err) == (0, '') and 'data/fineweb_edu: 360 documents' in out and '6 empty documents' in out
    train, val = texts('data/fineweb_edu')
    assert train.pop() == val.pop() == '' and len(val) in (360 // 50, 360 // 50 + 1)
    held_out = set(val)
    assert train == [each + SEPARATOR for each in documents if each + SEPARATOR not in held_out]
    meta = load('data/fineweb_edu')[0]
    assert meta['train']['documents'] + meta['val']['documents'] == 360
    assert meta['train']['bytes'] + meta['val']['bytes'] == sum(len(each.encode()) for each in documents)


def test_disk_need_is_said_beforehand(here, capsys, monkeypatch):
    """Of parquet from the files' own numbers: exact rows, the size of the text; and where it will not fit, a warning."""
    documents = fineweb_edu('fw', 2, 100)
    rows, size = corpus.measure(sorted(map(str, Path('fw').glob('*'))), 'text')
    n_bytes = sum(len(each.encode()) for each in documents)
    assert rows == 204 and n_bytes < size < 1.1 * n_bytes + 10_000
    small = corpus.shutil.disk_usage('.')._replace(free=1000)
    monkeypatch.setattr(corpus.shutil, 'disk_usage', lambda path: small)
    monkeypatch.setattr(corpus, 'HUB_RATIO', 1e4)                # as if it were a large set
    code, out, err = call(capsys, 'fineweb_edu', '--input=fw', '--val_fraction=0.02', '--workers=0')
    assert code == 0 and re.search(r'about 204 documents, [\d,]+ tokens: they need \d+\.\d GB of disk \(0\.0 GB free\)', out), out
    assert err.startswith('warning: 0.0 GB of disk are free, which may not do')


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != 'linux', reason='reads /proc')
def test_memory_stays_flat(here):
    """Ten times the text in one file, read no faster than it is tokenised: the same peak of memory."""
    peaks = []
    for n in (900, 9000):
        fineweb_edu(f'fw{n}', 1, n, size=2000)
        code = 'from nanope import configurator\nimport prepare\n' \
               'try:\n    configurator.run(prepare.main)\n' \
               'finally:\n    print(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])'
        done = subprocess.run([sys.executable, '-c', code, 'fineweb_edu', f'--input=fw{n}', '--workers=0'], text=True, capture_output=True,
                              env={**os.environ, 'PYTHONPATH': str(ROOT)})
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout.split()[-1]) / 1024)
    written = Path('data/fineweb_edu/train.bin').stat().st_size / 2**20
    assert peaks[1] - peaks[0] < 25 and written > 15, (peaks, written)  # MiB
