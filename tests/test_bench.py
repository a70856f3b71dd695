"""bench.py: that what it measures is the work it says, that rounds alternate, and that its numbers hang together."""
import json
import multiprocessing
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

import bench
from nanope import measure, workloads
from nanope.tokenizer import GPT2Tokenizer
from runs import ROOT

PEER = '''
from dataclasses import dataclass
import torch

@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool

class GPT(torch.nn.Module):
    """The interface of nanoGPT around a model without attention."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = torch.nn.Embedding(config.vocab_size, config.n_embd)
        self.head = torch.nn.Linear(config.n_embd, config.vocab_size)

    def forward(self, idx, targets):
        logits = self.head(self.wte(idx))
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), lr=learning_rate, betas=betas, weight_decay=weight_decay)
'''


@pytest.fixture
def peer(tmp_path):
    (tmp_path / 'peer').mkdir()
    (tmp_path / 'peer/model.py').write_text(PEER)
    return tmp_path / 'peer'


def start(folder, *arguments):
    return subprocess.run([sys.executable, str(ROOT / 'bench.py'), *arguments], cwd=folder, capture_output=True, text=True, timeout=250)


def test_the_script(tmp_path, peer):
    """Tables, and a JSON file as the design has it; from any folder. The peer does a small part of our work, and is found faster."""
    done = start(tmp_path, f'--peer={peer}', '--parts=machine,train,evaluate', '--wpe=learned,alibi', '--rounds=2', '--seconds=0.02',
                 '--json=b.json')
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / 'b.json').read_text())
    assert found['matmul_peak_flops'] > 1e8 and found['read_bandwidth'] > 1e8 and found['compile'] is False
    train = {row['wpe']: row for row in found['rows'] if row['mode'] == 'train'}
    assert [*train] == ['learned', 'alibi', 'nanoGPT'] and all(row['shape'] == 'tiny, 12 x 64' for row in train.values())
    flops = workloads.build('tiny', 'none').flops_per_token()
    for row in train.values():
        assert row['mfu'] == pytest.approx(row['tokens_per_s'] * flops / found['matmul_peak_flops'])
    for name in ('learned', 'alibi'):
        row, low, high = train[name], *train[name]['range']
        assert row['peer'] == 'nanoGPT' and 0 < low <= row['ratio'] <= high < 1
        assert row['peer_tokens_per_s'] == train['nanoGPT']['tokens_per_s']
    assert train['nanoGPT']['ratio'] is None
    assert 'tokens/s  of peak' in done.stdout and 'EVALUATION, tiny, 64 tokens a row' in done.stdout


@pytest.mark.parametrize('arguments, message', [
    (['--parts=train,speed'], "'speed' is none of machine, train"), (['--shapes=huge'], "'huge' is none of tiny, baby, gpt2"),
    (['--wpe=learned,spline'], "'spline' is none of learned, sinusoidal, rope, none, alibi"),
    (['--rounds=0'], 'rounds=0 must be at least 1'), (['--seconds=0'], 'seconds=0.0 must be above 0'),
    (['--deadline=0'], 'deadline=0.0 must be above 0'), (['--wpe=rope,rope'], 'names rope twice'),
    (['--parts=train,train'], 'names train twice'), (['--new_tokens=1009'], 'new_tokens=1009 must be at most 1008'),
    (['--json=.'], '--json=. cannot be written'),
    (['--peer='], 'peer is empty: name a folder'), (['--json='], 'json is empty: name a file'),
    (['--peer=nowhere'], '--peer=nowhere: there is no model.py'), (['--json=nowhere/b.json'], 'nowhere/b.json'),
    (['tiny'], 'tiny is no --key=value')])
def test_bad_input(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, OSError)) as error:
        bench.main(arguments)
    assert message in str(error.value) or message in str(getattr(error.value, 'filename', ''))


def test_a_folder_that_is_no_nanogpt(tmp_path):
    for text in ('GPT = 1\n', PEER.replace('    bias: bool\n', ''), PEER.replace('class GPTConfig', 'class Config'),
                 PEER.replace('configure_optimizers', 'configure')):
        (tmp_path / 'model.py').write_text(text)
        with pytest.raises(ValueError, match='is not the model.py of nanoGPT'):
            workloads.load_peer(str(tmp_path))
    for text in ('import nowhere_at_all', 'def (', '1 / 0'):
        (tmp_path / 'model.py').write_text(text)
        with pytest.raises(ValueError, match='its model.py cannot be imported'):
            workloads.load_peer(str(tmp_path))


@pytest.mark.parametrize('measured', [False, True])
def test_ctrl_c_keeps_the_numbers(tmp_path, monkeypatch, measured):
    """What was measured is written; where there is nothing yet, the file of an earlier run stays. Bad input touches no file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'b.json').write_text('{"rows": "earlier"}')

    def part(self):
        if measured:
            self.record(mode='evaluate')
        raise KeyboardInterrupt
    monkeypatch.setattr(bench.Bench, 'evaluate', part)
    with pytest.raises(KeyboardInterrupt):
        bench.main(['--parts=evaluate', '--json=b.json'])
    rows = json.loads((tmp_path / 'b.json').read_text())['rows']
    assert [row['mode'] for row in rows] == ['evaluate'] if measured else rows == 'earlier'
    with pytest.raises(ValueError):
        bench.main(['--peer=nowhere', '--json=new.json'])
    assert [path.name for path in tmp_path.iterdir()] == ['b.json']


def test_ctrl_c_is_not_for_processes_that_encode():
    """One that died of it would leave the pool waiting, and bench.py with it."""
    with ProcessPoolExecutor(1, multiprocessing.get_context('spawn'), measure.start_bare, [GPT2Tokenizer().to_json()]) as pool:
        assert pool.submit(signal.getsignal, signal.SIGINT).result() == signal.SIG_IGN
        assert pool.submit(measure.encode_bare, 'a word or two').result() == 4


# ---- how it measures ----------------------------------------------------------------------------------------------------------------

def test_rounds_rotate_and_slow_work_is_called_less(monkeypatch):
    """A work takes its turn in each round, first, second, last; one that needs longer is called less often; nothing of it is lost."""
    clock, calls = [0.0], []
    monkeypatch.setattr(measure.time, 'perf_counter', lambda: clock[0])

    def work(name, seconds):
        def call():
            calls.append(name)
            clock[0] += seconds
        return call
    times = measure.alternate({'a': work('a', 0.1), 'b': work('b', 0.2), 'c': work('c', 3.0)}, 3, 1.0, 'cpu')
    assert times == {'a': pytest.approx([0.1] * 3), 'b': pytest.approx([0.2] * 3), 'c': pytest.approx([3.0] * 3)}
    one = [['a'] * 10, ['b'] * 5, ['c']]
    expected = [*'aabbcc', *(name for n in range(3) for part in one[n:] + one[:n] for name in part)]
    assert calls == expected
    assert measure.ratios(times['a'], times['b']) == pytest.approx((2, 2, 2)) and measure.ratios([1, 2, 4], [2, 2, 2]) == (1, 0.5, 2)


def test_no_round_begins_past_the_deadline():
    times = measure.alternate({'a': lambda: None, 'b': lambda: None}, 5, 0, 'cpu', deadline=time.monotonic() - 1)
    assert len(times['a']) == len(times['b']) == 1


def test_limits_of_the_machine(monkeypatch):
    """FLOPs and bytes by the sizes, over the fastest time."""
    monkeypatch.setattr(measure, 'fastest', lambda work, device_name, seconds: (work(), 0.5)[1])
    assert measure.matmul_rates(torch.float32, 'cpu', [(2, 3, 5)]) == {(2, 3, 5): 2 * 2 * 3 * 5 / 0.5}
    assert measure.read_bandwidth('cpu', 2**20) == 2**21


def test_seconds_to_line(tmp_path):
    script = tmp_path / 'script.py'
    script.write_text('import time\nprint("a")\ntime.sleep(0.3)\nprint("here it is")\ntime.sleep(30 * len(__import__("sys").argv[1:]))\n')
    assert 0.3 < measure.seconds_to_line([script], 'here') < 5
    assert measure.seconds_to_line([script], 'never') is None
    started = time.perf_counter()
    assert measure.seconds_to_line([script, 'wait'], 'here', stop=True) and time.perf_counter() - started < 10


def test_peak_memory_is_of_the_child_alone():
    """300 MB held here do not count, 300 MB held and dropped there do."""
    held = torch.ones(300 * 2**18)
    code = 'import sys\nsys.path.insert(0, {!r})\nimport torch\nfrom nanope import workloads\n{}\nprint(workloads.peak_rss())'
    small, large = (int(subprocess.run([sys.executable, '-c', code.format(str(ROOT), line)], capture_output=True, text=True,
                                       check=True).stdout) for line in ('', 'x = torch.ones(300 * 2**18); del x'))
    assert small < 600 * 2**20 and 290 * 2**20 < large - small < 400 * 2**20 and held.sum() > 0


def test_starts_are_timed_alike(tmp_path, monkeypatch):
    """The same device, and the same prompt in our sample.py and nanoGPT's: our line is printed when the first new token is there."""
    (tmp_path / 'peer/out-shakespeare-char').mkdir(parents=True), (tmp_path / 'peer/out-shakespeare-char/ckpt.pt').touch()
    (tmp_path / 'peer/model.py').write_text(PEER)
    monkeypatch.chdir(tmp_path)
    seen = []
    monkeypatch.setattr(measure, 'seconds_to_line', lambda command, begins, *args, **kwargs: seen.append((command, begins)) or 1.0)
    bench.main(['--parts=start', '--peer=peer', '--rounds=2', '--device=cpu'])
    assert len(seen) == 10 and all('--device=cpu' in command for command, _ in seen[1:])  # the first one prepares the data
    assert [(begins, '--start=O' in command) for command, begins in seen[1:4]] == [('step 1:', False), ('O', True), ('---', True)]


def test_longer_rows_are_compiled_where_asked_and_keep_the_deadline(monkeypatch):
    """nanoGPT's are compiled on CUDA, so ours have to be; past the deadline no further length begins."""
    calls = []
    monkeypatch.setattr(workloads, 'our_step', lambda shape, wpe, rows, name, dtype, compile, T: calls.append((compile, rows, T)) or int)
    monkeypatch.setattr(measure, 'peak_memory', lambda *args: 10**9)
    one = bench.Bench(bench.BenchConfig(wpe='rope', compile=True, seconds=0.001, deadline=1e-9))
    one.context()
    assert calls == [(True, 32, 128)] and one.rows[0]['mode'] == 'context'


def test_the_machine_comes_first_and_a_full_memory_is_no_end(monkeypatch, capsys):
    """Whatever the order asked for; and what does not fit leaves the parts after it."""
    called = []

    def part(name):
        def measure_it(self):
            called.append(name)
            if name == 'train':
                raise torch.OutOfMemoryError('CUDA out of memory')
        return measure_it
    for name in bench.PARTS:
        monkeypatch.setattr(bench.Bench, name, part(name))
    bench.main(['--parts=memory,train,machine'])
    assert called == ['machine', 'train', 'memory'] and 'train: not measured to its end' in capsys.readouterr().out


def test_the_best_of_the_series():
    """Of calls too short to time they are many, and the time is of one."""
    calls = []
    took = measure.fastest(lambda: calls.append(time.sleep(0.001)), 'cpu', 0.05)
    assert 0.001 <= took < 0.003 and len(calls) > 5


@pytest.mark.parametrize('compile', [False, pytest.param(True, marks=pytest.mark.slow)])
def test_peak_memory_of_two_updates(monkeypatch, compile):
    """More for a wider model; the compiler's own memory, gone by then, does not count."""
    peaks = [measure.peak_memory(None, shape, 'rope', 2, 64, 'float32', compile, 'cpu') for shape in ('tiny', 'baby')]
    assert 150e6 < peaks[0] < 900e6 and peaks[1] - peaks[0] > 8 * 10e6


def test_as_shipped(monkeypatch, capsys):
    """On CUDA ours with as many rows as fit is set beside nanoGPT's 12, and said to be so."""
    one = bench.Bench(bench.BenchConfig(shapes='gpt2', wpe='rope', dtype='float32'))
    one.cuda, one.peer, formats = True, object(), []
    monkeypatch.setattr(workloads, 'build', lambda *args: torch.nn.Identity())
    monkeypatch.setattr(bench.device, 'autocast', lambda name, dtype: formats.append(dtype))
    monkeypatch.setattr(bench.device, 'micro_batch', lambda *args: (64, ''))
    rates = {64: {'rope': 300, 'nanoGPT': 250}, 12: {'rope': 210, 'nanoGPT': 200}}
    monkeypatch.setattr(one, 'train_shape', lambda shape, rows: rates[rows])
    one.train()
    assert 'as shipped, each by its own number of rows: rope 1.50 times nanoGPT' in capsys.readouterr().out and formats == ['float32']


def test_an_update_of_the_bench_learns(monkeypatch):
    """The same batches again and again: the weights move and the loss falls, as in training."""
    monkeypatch.setitem(workloads.SHAPES, 'small', (1, 2, 16, 8, 20, 4))
    built = []
    original = workloads.build
    monkeypatch.setattr(workloads, 'build', lambda *args: built.append(original(*args)) or built[-1])
    monkeypatch.setattr(workloads.optim, 'set_learning_rate', lambda optimizers, lr: [
        group.update(lr=1e-2) for optimizer in optimizers for group in optimizer.param_groups])
    step = workloads.our_step('small', 'rope', 4, 'cpu', 'float32', False)
    ids = workloads.text_like(20, (8, 4, 9))
    loss = lambda: built[0](ids[..., :-1].flatten(0, 1), ids[..., 1:].flatten(0, 1)).item()  # noqa: E731
    before = loss()
    for _ in range(80):
        step()
    assert loss() < before - 0.3


def test_bytes_that_decoding_reads(monkeypatch):
    """All weights once, and of the cache on average the prompt and half of what is drawn."""
    monkeypatch.setitem(workloads.SHAPES, 'small', (2, 2, 16, 32, 20, 1))
    prompt = torch.zeros(3, 4, dtype=torch.int64)
    _, read = workloads.our_sampling('small', 'rope', prompt, 8, 'float32', False)
    weights = sum(p.numel() for p in workloads.build('small', 'rope').parameters())
    assert read == 4 * (weights + 3 * 2 * 2 * 16 * (4 + 8 / 2))
    assert workloads.our_sampling('small', 'learned', prompt, 8, 'float32', False)[1] == read  # of the table one row


def test_text_like_words():
    ids = workloads.text_like(100, 200_000)
    counts = torch.bincount(ids, minlength=100).double()
    assert counts[0] / counts[9] == pytest.approx(10, rel=0.1) and ids.max() < 100
