"""Two processes train one model: the same batches and losses as one, one writer, one agreed step to stop at."""
import json
import os
import shutil
import signal
import socket
import sys
import time

import pytest
import torch

import train as script
from nanope import checkpoint, metrics, parallel, plots
from runs import fork_train, losses, torchrun, train, wait, weights

pytestmark = pytest.mark.skipif(not hasattr(os, 'fork'), reason='forks')
PARTS = dict(gradient_accumulation_steps=2, batch_size=2)
HARD = dict(PARTS, dropout=0.1)


def free_port():
    with socket.socket() as each:
        each.bind(('127.0.0.1', 0))
        return each.getsockname()[1]


def start_ranks(place, before=lambda rank: None, world=2, **settings):
    """Fork the ranks of one run, as torchrun would start them: their process ids. Rank r prints into place/printed_r."""
    port, children = str(free_port()), []
    for rank in range(world):
        def prepare(rank=rank):
            plots.loss_curves = lambda *_: None  # takes longest
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
                              MASTER_ADDR='127.0.0.1', MASTER_PORT=port)
            before(rank)
        children.append(fork_train(place, prepare, f'printed_{rank}', **settings))
    return children


def train_ranks(place, before=lambda rank: None, **settings):
    """(exit codes, what rank 0 printed, what rank 1 printed) of a run by two ranks."""
    codes = [wait(child) for child in start_ranks(place, before, **settings)]
    return codes, *((place / f'printed_{rank}').read_text() for rank in (0, 1))


@pytest.fixture(scope='module')
def straight(prepared, tmp_path_factory):
    """A run of HARD by two ranks that nothing has disturbed."""
    place = tmp_path_factory.mktemp('straight')
    shutil.copytree(prepared / 'data', place / 'data')
    assert train_ranks(place, **HARD)[0] == [0, 0]
    return place


def assert_near(ours, theirs):
    """The losses of two runs, equal to rounding."""
    assert list(ours) == list(theirs)
    for step, loss in ours.items():
        assert float.fromhex(loss) == pytest.approx(float.fromhex(theirs[step]), abs=1e-5)


def at_call(module, name, number, do):
    """From now on call do() before that call (from 1) of module.name."""
    calls, original = [], getattr(module, name)

    def call(*args, **kwargs):
        calls.append(name)
        if len(calls) == number:
            do()
        return original(*args, **kwargs)
    setattr(module, name, call)


def kill(number):
    return lambda: os.kill(os.getpid(), number)


@pytest.mark.parametrize('message, words', [
    ('[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:7', 'has lost another'),
    ('[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 6000ms for recv operation', 'has waited'),
    ('Application timeout caused pair closure', 'has waited'), ('Read error: Connection reset by peer', 'has lost another'),
    ('mat1 and mat2 shapes cannot be multiplied', None), ('[enforce fail at alloc_cpu.cpp] not enough memory', None)])
def test_what_a_lost_process_is_known_by(message, words):
    """All that gloo says when a process is gone or silent; other errors stay what they are."""
    with pytest.raises(ConnectionError if words else RuntimeError, match=words or message[:20].replace('[', r'\[')) as error:
        with parallel.all_there():
            raise RuntimeError(message)
    assert words is None or '--init_from=resume' in str(error.value)


# ---- two forks of this process ------------------------------------------------------------------------------------------------------

def test_two_ranks_are_one_process(place):
    """Half of the micro-batches each: the same batches and losses, the same evaluation on half of the windows each; rank 1 is silent and
    opens no file of the run to write."""
    def look_at_files(event, args):
        if event == 'open' and str(args[0]).startswith('out/') and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            os._exit(99)

    codes, first, second = train_ranks(place, lambda rank: rank and sys.addaudithook(look_at_files), **PARTS, eval_batch_size=5)
    assert codes == [0, 0] and '2 processes share the work' in first and second == ''
    assert train(place, out_dir='out/b', **PARTS).code == 0
    assert_near(losses(place), losses(place, 'out/b'))
    for ours, theirs in zip(metrics.read(place / 'out/a'), metrics.read(place / 'out/b'), strict=True):
        assert (ours['event'], ours['step'], ours.get('tokens')) == (theirs['event'], theirs['step'], theirs.get('tokens'))
        if ours['event'] != 'train':
            assert (ours['loss'], ours['stderr']) == pytest.approx((theirs['loss'], theirs['stderr']), rel=1e-6)
    ours, theirs = (checkpoint.load(place / each).tensors('model') for each in ('out/a', 'out/b'))
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=1e-4)


@pytest.mark.parametrize('n', [1, 2, 5, 6])
@pytest.mark.parametrize('world', [1, 2, 3, 4])
def test_shares_make_the_whole(monkeypatch, n, world):
    """Each rank has as many rows as any other; put together and cut to n they are all rows in their order, to the bit."""
    rows, parts = torch.arange(2.0 * n).reshape(n, 2), []
    monkeypatch.setattr(parallel, 'world', world)
    for rank in range(world):
        monkeypatch.setattr(parallel, 'rank', rank)
        parts.append(parallel.share(rows))
    assert len({len(part) for part in parts}) == 1
    monkeypatch.setattr(parallel.dist, 'all_gather', lambda out, mine: [each.copy_(part) for each, part in zip(out, parts)])
    assert (parallel.gather(parts[-1].numpy())[:n] == rows.numpy()).all()


@pytest.mark.parametrize('parts, near', [(1, '2'), (3, '2 or 4'), (7, '6 or 8')])
def test_micro_batches_that_cannot_be_shared(monkeypatch, parts, near):
    """Refused with the nearest numbers that can."""
    monkeypatch.setattr(parallel, 'world', 2)
    with pytest.raises(ValueError, match=f'gradient_accumulation_steps={parts} cannot be shared equally by 2 processes; {near} can'):
        script.TrainConfig(gradient_accumulation_steps=parts)


@pytest.mark.parametrize('device, gpus, place_or_error', [
    ('cpu', 0, 'cpu'), ('cuda', 2, 'cuda:1'), ('cuda', 1, '2 processes, but 1 GPUs'), ('cuda:0', 2, 'cannot share device=cuda:0'),
    ('mps', 0, 'cannot share device=mps')])
def test_one_gpu_a_process(monkeypatch, device, gpus, place_or_error):
    """The second process on a machine gets the second GPU, and there must be one."""
    from nanope.device import place
    chosen = []
    monkeypatch.setattr(parallel, 'world', 2)
    monkeypatch.setenv('LOCAL_RANK', '1'), monkeypatch.setenv('LOCAL_WORLD_SIZE', '2')
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: gpus), monkeypatch.setattr(torch.cuda, 'set_device', chosen.append)
    if ' ' in place_or_error:
        with pytest.raises(ValueError, match=place_or_error):
            place(device, '')
    else:
        assert place(device, '')[0] == place_or_error and chosen == ([place_or_error] if device == 'cuda' else [])


MOMENTS = {  # in which rank, before which call of what, and at which step both then stop
    'rank 1, before the first update': (1, script, 'describe', 1, 0),
    'rank 1, in an update': (1, script, 'update', 4, 4),
    'rank 0, in an update': (0, script, 'update', 4, 4),
    'rank 1, in an evaluation': (1, script, 'evaluate', 2, 2),
    'rank 0, in a save': (0, checkpoint, 'save', 1, 2),
    'rank 1, in the last evaluation': (1, script, 'evaluate', 4, 6),
}


@pytest.mark.slow
@pytest.mark.parametrize('moment', MOMENTS)
def test_sigterm_to_one_rank(place, straight, moment):
    """Both stop at the same step, which is saved, with exit 75, soon; resumed, the run has the bits of one that was left alone."""
    rank, module, name, call, step = MOMENTS[moment]
    started = time.time()
    codes, text, _ = train_ranks(place, lambda own: own == rank and at_call(module, name, call, kill(signal.SIGTERM)), **HARD)
    assert codes == [75, 75] and time.time() - started < 30
    who = 'SIGTERM' if rank == 0 else 'signal to another process'
    assert f'{who}: saved at step {step};' in text and checkpoint.load(place / 'out/a').step == step
    assert train_ranks(place, init_from='resume', **HARD)[0] == [0, 0]
    assert losses(place) == losses(straight) and weights(place, 6) == weights(straight, 6)


@pytest.mark.slow
@pytest.mark.parametrize('settings', [{}, dict(shard='true')], ids=str)
@pytest.mark.parametrize('module, name, call, rank', [(script, 'update', 4, 1), (script, 'update', 4, 0), (script, 'evaluate', 3, 1),
                                                      (os, 'rename', 2, 0), (script, 'describe', 1, 1)])
def test_killed_rank_ends_the_run(place, straight, settings, module, name, call, rank):
    """SIGKILL: the other rank ends at once with one line that says how to go on, and going on gives the same bits."""
    started = time.time()
    codes, *texts = train_ranks(place, lambda own: own == rank and at_call(module, name, call, kill(signal.SIGKILL)), **HARD, **settings)
    assert codes[rank] == -signal.SIGKILL and codes[1 - rank] == 2 and time.time() - started < 30
    errors = [line for line in texts[1 - rank].splitlines() if 'error: ' in line]
    assert len(errors) == 1 and 'has lost another of the 2 processes' in errors[0] and '--init_from=resume' in errors[0]
    assert 'Traceback' not in texts[1 - rank]
    assert train_ranks(place, init_from='auto', **HARD, **settings)[0] == [0, 0]
    if settings:
        assert_near(losses(place), losses(straight))
    else:
        assert losses(place) == losses(straight) and weights(place, 6) == weights(straight, 6)


@pytest.mark.slow
@pytest.mark.parametrize('settings', [{}, dict(shard='true')], ids=str)
@pytest.mark.parametrize('module, name, call, rank', [(script, 'update', 4, 1), (script, 'update', 4, 0), (script, 'evaluate', 2, 1),
                                                      (script, 'describe', 1, 1)])
def test_hung_rank_ends_the_run(place, monkeypatch, settings, module, name, call, rank):
    """SIGSTOP, which stands for a machine or disk that hangs: the other rank waits as long as it was told, says so and ends."""
    monkeypatch.setenv('NANOPE_PATIENCE', '6')
    started = time.time()
    children = start_ranks(place, lambda own: own == rank and at_call(module, name, call, kill(signal.SIGSTOP)), **HARD, **settings)
    try:
        code, seconds = wait(children[1 - rank]), time.time() - started
    finally:
        os.kill(children[rank], signal.SIGKILL), wait(children[rank])
    text = (place / f'printed_{1 - rank}').read_text()
    assert code == 2 and 6 < seconds < 30, text
    assert f'error: rank {1 - rank} has waited 6 s for another of the 2 processes' in text and 'NANOPE_PATIENCE' in text
    assert text.count('error: ') == 1 and 'Traceback' not in text
    assert train_ranks(place, init_from='auto', **HARD, **settings)[0] == [0, 0]


@pytest.mark.parametrize('text', ['', '0', '-5', '1.5', 'soon', '1e3'])
def test_patience_in_seconds(place, monkeypatch, text):
    """What is no number of seconds is bad input, before anything is made."""
    monkeypatch.setenv('NANOPE_PATIENCE', text)
    done = train(place)
    assert done.code == 2 and f'error: NANOPE_PATIENCE={text} in the environment must be' in done.text and not (place / 'out').exists()


@pytest.mark.parametrize('environment', [
    dict(WORLD_SIZE='0'), dict(RANK='one'), dict(RANK='1'), dict(RANK='-1', WORLD_SIZE='2'), dict(RANK='0', WORLD_SIZE='2'),
    dict(RANK='2', WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', MASTER_PORT='1')], ids=str)
def test_environment_that_is_not_of_torchrun(place, monkeypatch, environment):
    """Left over from something else: said in one line, before anything is made."""
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    done = train(place, **PARTS)
    assert done.code == 2 and done.text.startswith('error: the environment has ') and done.text.count('\n') == 1
    assert 'unset RANK and WORLD_SIZE' in done.text and not (place / 'out').exists()


def test_environment_of_one_process(place, monkeypatch):
    """As of torchrun --nproc_per_node=1, or of another launcher that starts one."""
    monkeypatch.setenv('RANK', '0'), monkeypatch.setenv('WORLD_SIZE', '1')
    assert train(place).code == 0


@pytest.mark.slow
def test_not_finite_in_one_rank_stops_all(place):
    """What one rank computes goes into the weights of all: exit 65 everywhere, at the same update, with nothing of it saved."""
    def poison(rank):
        original = script.update

        def update(model, *args):
            if args[4] == 3 and rank == 1:
                model.register_forward_hook(lambda module, args, loss: loss * float('nan'))
            return original(model, *args)
        script.update = update
    codes, text, _ = train_ranks(place, poison, **HARD)
    assert codes == [65, 65] and 'error: not finite: step 3, ' in text and checkpoint.steps(place / 'out/a') == [2]
    assert json.loads((place / 'out/a/crash.json').read_text())['loss'] == 'nan'


@pytest.mark.slow
def test_from_one_process_to_two_and_back(place):
    """The same batches, to rounding the same losses; another number of processes is warned about and recorded."""
    assert train(place, out_dir='out/b', **PARTS, max_iters=9).code == 0
    assert train(place, **PARTS, max_iters=3).code == 0
    codes, text, _ = train_ranks(place, init_from='resume', **PARTS, max_iters=6)
    assert codes == [0, 0] and text.count('warning: processes was 1, now 2: same batches, but not the same bits') == 1
    assert checkpoint.load(place / 'out/a').environment['processes'] == 2
    done = train(place, init_from='resume', **PARTS, max_iters=9)
    assert done.code == 0 and 'warning: processes was 2, now 1' in done.text
    assert_near(losses(place), losses(place, 'out/b'))


@pytest.mark.slow
def test_ranks_drop_out_differently(place):
    """Rank 0 seeds as a process alone does; no seed of rank 1 is one of its seeds."""
    def note(rank):
        original = script.update

        def update(*args):
            result = original(*args)
            with open(f'seeds_{rank}', 'a') as file:
                print(torch.initial_seed(), file=file)
            return result
        script.update = update
    assert train_ranks(place, note, **HARD)[0] == [0, 0]
    first, second = ((place / f'seeds_{rank}').read_text().split() for rank in (0, 1))
    assert first == [str((1337 * 1_000_003 + step) % 2**32) for step in range(6)]
    assert len(set(first + second)) == 12


@pytest.mark.slow
def test_machines_with_different_files(place):
    """A machine that sees an older checkpoint is found out before the first update."""
    assert train(place, max_iters=2, **PARTS).code == 0
    shutil.copytree(place, place / 'other')
    assert train(place, init_from='resume', max_iters=4, **PARTS).code == 0
    codes, *texts = train_ranks(place, lambda rank: rank and os.chdir('other'), init_from='resume', **PARTS)
    assert codes == [2, 2] and all('error: rank 1 has other settings, data or checkpoints than rank 0' in text for text in texts)


# ---- torchrun -----------------------------------------------------------------------------------------------------------------------

TWO = '--standalone', '--nproc_per_node=2'
ENDLESS = dict(HARD, max_iters=100_000, lr_decay_iters=100_000, eval_interval=10_000, checkpoint_interval=20)


def ranks_of(process):
    """{rank: process id} of what torchrun has started."""
    found = {}
    for child in open(f'/proc/{process.pid}/task/{process.pid}/children').read().split():
        environment = dict(each.partition('=')[::2] for each in open(f'/proc/{child}/environ').read().split('\0'))
        found[int(environment['RANK'])] = int(child)
    return found


@pytest.mark.slow
def test_torchrun(place):
    """The command of the README: the losses of one process, every line once."""
    process = torchrun(place, *TWO, **PARTS)
    assert process.wait(timeout=120) == 0, (place / 'told').read_text()
    text = (place / 'told').read_text()
    assert text.count('2 processes share the work') == 1 and text.count('bits a byte') == 1
    assert train(place, out_dir='out/b', **PARTS).code == 0
    assert_near(losses(place), losses(place, 'out/b'))


@pytest.mark.slow
def test_torchrun_bad_setting_is_said_once(place):
    """By rank 0, while the others wait; and no run folder is made."""
    process = torchrun(place, *TWO, **dict(PARTS, gradient_accumulation_steps=3))
    assert process.wait(timeout=120) == 1  # torchrun's own code for any failure
    assert (place / 'told').read_text().count('error: ') == 1 and 'gradient_accumulation_steps=3' in (place / 'told').read_text()
    assert not (place / 'out').exists()


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists('/proc/self/task'), reason='reads /proc')
@pytest.mark.parametrize('whom, number', [('torchrun', signal.SIGTERM), ('torchrun', signal.SIGINT), (1, signal.SIGTERM),
                                          (0, signal.SIGKILL)])
def test_torchrun_stopped(place, whom, number):
    """At a moment nobody chose: over within 30 s; what is resumed is a run of two ranks that was never stopped."""
    process = torchrun(place, *TWO, **ENDLESS)
    deadline = time.time() + 120
    while len(losses(place)) < 30 and time.time() < deadline:
        time.sleep(0.05)
    os.kill(process.pid if whom == 'torchrun' else ranks_of(process)[whom], number)
    process.wait(timeout=30)
    text, stopped = (place / 'told').read_text(), checkpoint.load(place / 'out/a').step
    if number == signal.SIGKILL:
        assert f'error: rank {1 - whom} has lost another of the 2 processes' in text and stopped % 20 == 0
    else:
        assert f'saved at step {stopped};' in text and stopped == len(losses(place)) and 'error: ' not in text
    settings = dict(ENDLESS, max_iters=stopped + 2)
    assert train_ranks(place, init_from='resume', **settings)[0] == [0, 0]
    assert train_ranks(place, out_dir='out/b', **settings)[0] == [0, 0]
    assert losses(place) == losses(place, 'out/b') and weights(place, stopped + 2) == weights(place, stopped + 2, 'out/b')


@pytest.mark.slow
def test_two_machines(place):
    """Two torchrun agents that meet at an address, as on two machines: the losses of one process."""
    meet = f'--rdzv_endpoint=127.0.0.1:{free_port()}'
    agents = [torchrun(place, '--nnodes=2', '--nproc_per_node=1', '--rdzv_backend=c10d', '--rdzv_id=run', meet, '--local_addr=127.0.0.1',
                       **PARTS) for _ in range(2)]
    assert [agent.wait(timeout=200) for agent in agents] == [0, 0], (place / 'told').read_text()
    assert train(place, out_dir='out/b', **PARTS).code == 0
    assert_near(losses(place), losses(place, 'out/b'))
