"""Checkpoints: bit for bit, whole or not there, whenever a save is killed and whatever happens to the files."""
import json
import os
import shutil
import signal
import stat

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from nanope import checkpoint, files, metrics, optim
from runs import fork_train, train, wait, weights
from small import build

ALL = (*checkpoint.FILES, 'manifest.json')
STATE = {'config': {'lr': 0.1}, 'tokenizer': {'chars': 'ä'}, 'data_digest': '0', 'scaler': {}}
EVIL = b"cos\nsystem\n(S'touch sentinel'\ntR."  # unpickled, it makes a file


def tensors(step):
    """What a step holds: values that a detour through text or another dtype would change."""
    odd = torch.tensor([0.1 * step, -0.0, 1e-45, float('inf'), float('nan')])
    drawn = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
    return {'w': odd, 'half': odd.bfloat16(), 'transposed': drawn.T, 'n': torch.tensor(step)}


def bits(tensor):
    return tensor.dtype, tensor.shape, bytes(tensor.contiguous().flatten().view(torch.uint8))


def save(run, step):
    return checkpoint.save(run, step, tensors(step), {'exp_avg.w': tensors(step)['w']}, STATE, {'torch': 'x'})


def is_step(found, step):
    """Whether a loaded checkpoint holds that step, every bit of it."""
    model, optim, expected = found.tensors('model'), found.tensors('optim'), tensors(step)
    same = [bits(model[name]) == bits(tensor) for name, tensor in expected.items()] + [bits(optim['exp_avg.w']) == bits(expected['w'])]
    return found.step == step and (len(model), len(optim)) == (4, 1) and all(same)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run folder with checkpoints of steps 1 and 2; the test stands in the folder above it."""
    monkeypatch.chdir(tmp_path)
    save('run', 1), save('run', 2)
    return 'run'


def test_round_trip(run):
    """Tensors, state and environment come back as they went in; a new save of a step replaces it."""
    found = checkpoint.load(run)
    assert is_step(found, 2) and is_step(checkpoint.load(run, 1), 1)
    assert found.state == {'format': 1, 'step': 2, **STATE} and found.environment == {'torch': 'x'}
    digests = {name: files.sha256(f'{found.path}/{name}') for name in ALL}
    assert save(run, 2) == found.path and digests == {name: files.sha256(f'{found.path}/{name}') for name in ALL}


def test_the_latest_is_so_by_its_step(run):
    """Not by the time of its files, which a copy changes."""
    for name in ('', *ALL):
        os.utime(f'run/ckpt/step_00000002/{name}', (1, 1))
    assert is_step(checkpoint.load(run), 2)


@pytest.mark.parametrize('step', [3, 'best'])
def test_what_is_not_there(run, step):
    """The steps that do exist are listed."""
    with pytest.raises(ValueError, match=f'no checkpoint of step {step}; it has 1, 2'):
        checkpoint.load(run, step)
    with pytest.raises(ValueError, match='elsewhere holds no checkpoint'):
        checkpoint.load('elsewhere')


# ---- a save that fails or is killed -------------------------------------------------------------------------------------------------

CALLS = ('fsync', 'rename', 'replace')  # each step of a save ends in one of them


def interrupt(monkeypatch, number, how):
    """From now on the call of that number (from 0) of os.fsync, os.rename and os.replace is how() instead. Returns the calls made."""
    made = []
    for name in CALLS:
        def call(*args, original=getattr(os, name)):
            made.append(args)
            return how() if len(made) == number + 1 else original(*args)
        monkeypatch.setattr(os, name, call)
    return made


def n_calls(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        made = interrupt(patch, -1, None)
        save(tmp_path / 'count', 1)
    return len(made)


@pytest.mark.skipif(not os.path.exists('/proc/self/fd'), reason='reads /proc')
def test_every_name_is_on_the_disk_before_a_save_is_done(tmp_path, monkeypatch):
    """A power cut takes what was not flushed: each file before it is renamed, and each folder in which a name is new."""
    done, rename = [], os.rename
    monkeypatch.setattr(os, 'fsync', lambda handle: done.append(os.path.relpath(os.readlink(f'/proc/self/fd/{handle}'), tmp_path)))
    monkeypatch.setattr(os, 'rename', lambda old, new: (done.append('rename'), rename(old, new)))
    save(tmp_path / 'out/run', 1)
    before, after = done[:done.index('rename')], done[done.index('rename') + 1:]
    temporary = 'out/run/ckpt/.tmp-step_00000001'
    written = [name if name in ('model.safetensors', 'optim.safetensors') else f'{name}.tmp' for name in ALL]
    assert {'out', 'out/run', *(f'{temporary}/{name}' for name in written)} <= set(before) and before[-1] == temporary
    assert after == ['out/run/ckpt']


def full():
    raise OSError(28, 'No space left on device')


def test_failed_save(run, tmp_path, record_property):
    """Disk full at every write to the disk: told with folder and size, nothing of the attempt stays, the next save succeeds."""
    record_property('tries', n_calls(tmp_path))
    assert n_calls(tmp_path) >= 8  # two files of tensors, two of JSON, two folders, and three renames
    for number in range(n_calls(tmp_path)):
        told = r'run/ckpt/step_00000003 \([1-9]\d+ bytes\).*No space left'
        with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match=told):
            interrupt(patch, number, full)
            save(run, 3)
        found = checkpoint.load(run)
        assert is_step(found, found.step) and os.listdir('run/ckpt').count('.tmp-step_00000003') == 0
        if number < n_calls(tmp_path) - 1:
            assert found.step == 2
        save(run, 3)
        assert is_step(checkpoint.load(run), 3)
        shutil.rmtree(checkpoint.step_folder(run, 3))


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='kills a fork')
@pytest.mark.parametrize('step', [2, 3])
def test_killed_save(run, tmp_path, capfd, step, record_property):
    """SIGKILL at every write of a save of a new step or of one that is there: a whole checkpoint is found; the next save clears up."""
    record_property('tries', n_calls(tmp_path))
    for number in range(n_calls(tmp_path)):
        child = os.fork()
        if not child:
            interrupt(pytest.MonkeyPatch(), number, lambda: os.kill(os.getpid(), signal.SIGKILL))
            save(run, step)
            os._exit(0)
        assert wait(child) == -signal.SIGKILL
        found = checkpoint.load(run)
        assert found.step in (1, 2, step) and is_step(found, found.step) and 'warning' not in capfd.readouterr().err
        save(run, step)
        checkpoint.prune(run, step, keep=5)
        assert sorted(os.listdir('run/ckpt')) == [f'step_{n:08d}' for n in sorted({1, 2, step})]
        assert is_step(checkpoint.load(run), step)
        if step == 3:
            shutil.rmtree(checkpoint.step_folder(run, 3))


def test_file_size_limit(place):
    """RLIMIT_FSIZE stands for a full disk: exit 2, one line with path and bytes, and the checkpoint before can be gone on from."""
    assert train(place, max_iters=2).code == 0
    before = weights(place, 2)
    resource = pytest.importorskip('resource')
    limit = 20_000, 20_000  # config.json fits, the optimizer's state does not
    child = fork_train(place, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit), init_from='resume', max_iters=4)
    assert wait(child) == 2
    printed = (place / 'printed').read_text()
    assert 'error: could not write out/a/ckpt/step_00000004 (' in printed and ' bytes)' in printed and 'Traceback' not in printed
    assert weights(place, 2) == before and set(os.listdir(place / 'out/a/ckpt')) == {'step_00000002', 'best.json'}
    assert train(place, init_from='resume', max_iters=4).code == 0


# ---- damaged files ------------------------------------------------------------------------------------------------------------------

DAMAGE = {
    'missing': lambda path, data: path.unlink(),
    'empty': lambda path, data: path.write_bytes(b''),
    'half': lambda path, data: path.write_bytes(data[:len(data) // 2]),
    'a byte less': lambda path, data: path.write_bytes(data[:-1]),
    'a byte more': lambda path, data: path.write_bytes(data + b'\0'),
    'zeros': lambda path, data: path.write_bytes(bytes(len(data))),
    'a pickle': lambda path, data: path.write_bytes(EVIL),
    'a pickle of that size': lambda path, data: path.write_bytes(EVIL.ljust(len(data), b'.')),
    'not UTF-8': lambda path, data: path.write_bytes(b'\xff' + data[1:]),
    'endless JSON': lambda path, data: path.write_bytes(b'[' * 100_000),
}


@pytest.mark.parametrize('name', ALL)
def test_disk_that_cannot_be_read(run, monkeypatch, capsys, name):
    """An I/O error of the newest checkpoint is damage like any other: named, and the step before is used."""
    def broken(path, *args, **kwargs):
        if str(path).endswith(f'step_00000002/{name}'):
            raise OSError(5, 'Input/output error')
        return open(path, *args, **kwargs)
    monkeypatch.setattr(files, 'open', broken, raising=False)
    assert is_step(checkpoint.load(run), 1)
    assert f"Input/output error: 'run/ckpt/step_00000002/{name}'; falling back to step 1" in capsys.readouterr().err
    with pytest.raises(OSError, match=name):
        checkpoint.load(run, 2)


@pytest.mark.parametrize('name', ALL)
@pytest.mark.parametrize('how', DAMAGE)
def test_damaged_file(run, tmp_path, capsys, name, how):
    """The file is named, the newest whole step is used with a warning, the damaged one is refused when asked for, and nothing is run."""
    path = tmp_path / 'run/ckpt/step_00000002' / name
    DAMAGE[how](path, path.read_bytes())
    assert is_step(checkpoint.load(run), 1)
    assert capsys.readouterr().err.startswith(f'warning: run/ckpt/step_00000002/{name}')
    with pytest.raises(ValueError, match=f'step_00000002/{name}'):
        checkpoint.load(run, 2)
    other = tmp_path / 'run/ckpt/step_00000001' / name
    DAMAGE[how](other, other.read_bytes())
    with pytest.raises(ValueError, match=f'no checkpoint of run can be read: .*step_00000002/{name}.*step_00000001/{name}'):
        checkpoint.load(run)
    assert not os.path.exists('sentinel')


@given(data=st.data())
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_flipped_bit(run, tmp_path, data):
    """One bit anywhere in any of the files."""
    path = tmp_path / 'run/ckpt/step_00000002' / data.draw(st.sampled_from(ALL))
    whole = path.read_bytes()
    at, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1:])
    with pytest.raises(ValueError, match=path.name):
        checkpoint.load(run, 2)
    path.write_bytes(whole)
    checkpoint.load(run, 2)


test_any_flipped_bit.tries = 200


def reseal(folder, **changes):
    """Rewrite a manifest so that it fits whatever the other files now hold."""
    manifest = json.loads((folder / 'manifest.json').read_text())
    manifest['files'] = {name: {'bytes': (folder / name).stat().st_size, 'sha256': files.sha256(folder / name)}
                         for name in checkpoint.FILES}
    manifest |= changes
    (folder / 'manifest.json').write_text(json.dumps({**manifest, 'digest': checkpoint.seal(manifest)}))


@pytest.mark.parametrize('name', checkpoint.FILES)
def test_pickle_with_matching_digests(run, tmp_path, name):
    """Whoever can write the digests can write what they like; it is still never unpickled."""
    folder = tmp_path / 'run/ckpt/step_00000002'
    (folder / name).write_bytes(EVIL)
    reseal(folder)
    with pytest.raises(ValueError, match=f'{name} is not'):
        found = checkpoint.load(run, 2)
        found.tensors('model'), found.tensors('optim')
    assert not os.path.exists('sentinel')


def test_newer_format(run, tmp_path):
    """A checkpoint of a newer nanoPE is refused, not fallen back from: going on from the step before would throw it away."""
    reseal(tmp_path / 'run/ckpt/step_00000002', format=2)
    for step in ('latest', 2):
        with pytest.raises(ValueError, match='written by a newer nanoPE .format 2, this one reads 1'):
            checkpoint.load(run, step)
    assert is_step(checkpoint.load(run, 1), 1)


# ---- weights and optimizer ----------------------------------------------------------------------------------------------------------

MISFITS = {
    'missing': (lambda t: t.pop(next(iter(t))), ['is missing']),
    'unknown': (lambda t: t.update(other=torch.zeros(2)), ['other is not in the model']),
    'other shape': (lambda t: t.update({(name := next(iter(t))): t[name][:1]}), ['has shape']),
    'all three': (lambda t: (t.pop(list(t)[1]), t.update(other=torch.zeros(2)), t.update({(name := next(iter(t))): t[name][None]})),
                  ['is missing', 'other is not in the model', 'has shape']),
    'everything': (lambda t: t.clear(), ['and ']),  # a list of ten, and how many more
}


@pytest.fixture
def trained():
    """A model, its optimizer after one update, and the names of its parameters."""
    model = build('learned')
    names = {p: name for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.optimizer_groups(0.1), fused=True)
    model(torch.zeros(1, 4, dtype=torch.int64)).square().mean().backward()
    optimizer.step()
    return model, optimizer, names


@pytest.mark.parametrize('case', MISFITS)
def test_weights_that_do_not_fit(trained, case):
    """All differences in one message, and no weight has changed."""
    change, messages = MISFITS[case]
    model, before = trained[0], {name: p.clone() for name, p in trained[0].named_parameters()}
    other = {name: torch.full_like(p, 7.0) for name, p in before.items()}
    change(other)
    with pytest.raises(ValueError) as error:
        checkpoint.load_weights(model, other, 'run/ckpt/x')
    assert str(error.value).startswith('run/ckpt/x does not fit the model: ') and all(each in str(error.value) for each in messages)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize('case', MISFITS)
def test_optimizer_state_that_does_not_fit(trained, case):
    """The same for the optimizer: a misfit would show only in the first update, half applied."""
    change, messages = MISFITS[case]
    model, optimizer, names = trained
    state = {name: tensor.clone() for name, tensor in optim.tensors([optimizer], names).items()}
    state = {name: state[name] for name in sorted(state)}  # a moment comes first, not a step, which has no shape to change
    change(state)
    fresh = torch.optim.AdamW(model.optimizer_groups(0.1), fused=True)
    with pytest.raises(ValueError) as error:
        optim.load_tensors([fresh], state, names, 'run/ckpt/x')
    assert str(error.value).startswith('run/ckpt/x does not fit the model: ') and all(each in str(error.value) for each in messages)
    assert not fresh.state


@pytest.mark.parametrize('fused', [True, False])
def test_optimizer_round_trip(trained, tmp_path, fused):
    """After save and load, the next update changes every weight to the same bits as without."""
    model, optimizer, names = trained
    path = checkpoint.save(tmp_path, 1, {name: p for p, name in names.items()}, optim.tensors([optimizer], names), STATE, {})
    other = build('learned', std=None)
    checkpoint.load_weights(other, checkpoint.verify(path).tensors('model'), path)
    other_names = {p: name for name, p in other.named_parameters()}
    fresh = torch.optim.AdamW(other.optimizer_groups(0.1), fused=fused)
    optim.load_tensors([fresh], checkpoint.verify(path).tensors('optim'), other_names, path)
    optimizer.zero_grad()
    for each, steps in ((model, optimizer), (other, fresh)):
        each(torch.ones(1, 4, dtype=torch.int64)).square().mean().backward()
        steps.step()
    for p, q in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(p, q, rtol=0, atol=0 if fused else 1e-6)
    assert all(state['step'] == 2 for state in fresh.state.values())


# ---- which steps stay ---------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('keep, best, at, left', [
    (2, None, 6, [5, 6]), (2, 2, 6, [2, 5, 6]), (1, 6, 6, [6]), (1, 4, 6, [4, 6]), (9, 1, 6, [1, 2, 3, 4, 5, 6]),
    (1, None, 3, [3]),   # the run fell back to before 4: what lies beyond is damaged, and must not count as newest
    (2, 5, 3, [2, 3]),   # nor as best
])
def test_prune(tmp_path, keep, best, at, left):
    """The newest ones and the best stay, and nothing else; leftovers of killed saves go."""
    for step in range(1, 7):
        save(tmp_path, step)
    (tmp_path / 'ckpt/.tmp-step_00000009').mkdir()
    if best:
        checkpoint.mark_best(tmp_path, best, 1.5)
    checkpoint.prune(tmp_path, at, keep)
    assert checkpoint.steps(tmp_path) == left and not list((tmp_path / 'ckpt').glob('.tmp*'))


@pytest.mark.parametrize('odd', ['a link', 'a link to nothing', 'a file'])
@pytest.mark.parametrize('step', [1, 3, 4])
def test_step_that_is_no_folder(run, tmp_path, odd, step):
    """A checkpoint that somebody moved to another disk, or a file of its name: replaced and dropped like any other, alone, not what it
    links to. Nor do names that are almost those of a step stop anything."""
    path = tmp_path / f'run/ckpt/step_{step:08d}'
    moved = tmp_path / 'moved'
    shutil.move(path, moved) if step == 1 else moved.mkdir()
    (moved / 'mine').touch()
    path.touch() if odd == 'a file' else path.symlink_to(moved if odd == 'a link' else 'nowhere')
    others = ['step_0000000001', 'step_\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0661']  # digits, but not ours
    for name in others:
        (tmp_path / 'run/ckpt' / name).mkdir()
    save('run', 3)
    checkpoint.prune('run', 3, keep=1)
    assert sorted(os.listdir('run/ckpt')) == sorted(['step_00000003', *others]) and is_step(checkpoint.load('run'), 3)
    assert (moved / 'mine').exists()


def test_who_may_read_is_the_umasks_affair(run):
    """All files alike: who may read a run may read its weights too."""
    before = os.umask(0o027)
    try:
        save('run', 3)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(os.stat(f'run/ckpt/step_00000003/{name}').st_mode) for name in ALL} == {0o640}


@pytest.mark.skipif(not hasattr(os, 'mkfifo'), reason='makes pipes')
@pytest.mark.timeout(20)
@pytest.mark.parametrize('what', ['a pipe', '/dev/zero'])
@pytest.mark.parametrize('name', [*ALL, 'best.json', '../metrics.jsonl'])
def test_pipes_and_devices_are_not_read(run, what, name):
    """They may never end, and a folder that somebody sent may hold one: told, and the step before is used."""
    path = os.path.join('run/ckpt', name if name not in ALL else f'step_00000002/{name}')
    if os.path.exists(path):
        os.remove(path)
    os.mkfifo(path) if what == 'a pipe' else os.symlink(what, path)
    assert is_step(checkpoint.load('run'), 1 if name in ALL else 2)
    assert checkpoint.best_step('run') is None and metrics.read('run') == []


def test_leftover_that_is_no_folder(run, tmp_path):
    """A file where a save puts its temporary folder is in nobody's way."""
    (tmp_path / 'run/ckpt/.tmp-step_00000003').touch()
    save('run', 3)
    assert is_step(checkpoint.load('run'), 3)


@pytest.mark.parametrize('content', [b'', b'[]', b'{}', b'{"step": "2"}', EVIL, b'\xff'])
def test_damaged_best(run, tmp_path, content):
    """A damaged best.json names nothing; the latest is not affected."""
    (tmp_path / 'run/ckpt/best.json').write_bytes(content)
    assert checkpoint.best_step(run) is None and is_step(checkpoint.load(run), 2) and not os.path.exists('sentinel')
    checkpoint.mark_best(run, 1, 1.5)
    assert is_step(checkpoint.load(run, 'best'), 1)
