"""How the tests run train.py: in this process (fast), in a fork of it (can be killed), or as a real process."""
import contextlib
import hashlib
import io
import os
import signal
import subprocess
import sys
import traceback
from collections import namedtuple
from pathlib import Path
from unittest import mock

import torch

import train as script
from nanope import metrics, plots
from nanope.configurator import run

ROOT = Path(__file__).resolve().parents[1]
TINY = dict(dataset='tiny', out_dir='out/a', block_size=8, n_layer=1, n_head=2, n_embd=16, batch_size=4, max_iters=6, lr_decay_iters=12,
            warmup_iters=2, learning_rate=0.01, eval_interval=2, log_interval=1, device='cpu', threads=1)
Done = namedtuple('Done', 'code text')  # exit code, what was printed


def flags(**settings):
    """Flags of a tiny run; a setting of None is left out."""
    return [f'--{name}={value}' for name, value in {**TINY, **settings}.items() if value is not None]


def train(place, plot=False, **settings):
    """python train.py in folder `place`, but in this process and, unless plot, without loss.png, which takes longest.

    Signal handlers and the number of threads are put back."""
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    threads, text = torch.get_num_threads(), io.StringIO()
    try:
        with contextlib.chdir(place), contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            with contextlib.nullcontext() if plot else mock.patch.object(plots, 'loss_curves'):
                run(lambda: script.main(flags(**settings)))
    except SystemExit as stop:
        return Done(stop.code, text.getvalue())
    finally:
        torch.set_num_threads(threads)
        for each, handler in handlers.items():
            signal.signal(each, handler)


def fork_train(place, before=lambda: None, printed='printed', **settings):
    """The same in a child process without the seconds that importing torch takes: returns its id. It prints into that file of place."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.chdir(place)
        sys.stdout = sys.stderr = open(printed, 'w', buffering=1)
        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
        before()
        run(lambda: script.main(flags(**settings)))
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def wait(child):
    """The exit code of a child, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def start(place, name, *args):
    """python NAME ARGS in folder `place`: a real process, with its output in pipes."""
    return subprocess.Popen([sys.executable, ROOT / name, *args], cwd=place, env={**os.environ, 'OMP_NUM_THREADS': '1'},
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def torchrun(place, *options, **settings):
    """torchrun OPTIONS train.py ... as users start it; its output goes to place/told."""
    env = {**os.environ, 'OMP_NUM_THREADS': '1', 'GLOO_SOCKET_IFNAME': 'lo', 'MPLBACKEND': 'agg'}
    with open(place / 'told', 'a') as told:
        return subprocess.Popen([sys.executable, '-m', 'torch.distributed.run', *options, ROOT / 'train.py', *flags(**settings)],
                                cwd=place, env=env, stdout=told, stderr=told)


def losses(place, out_dir='out/a'):
    """{update: its loss, every bit of it} from metrics.jsonl."""
    return {r['step']: r['loss'].hex() for r in metrics.read(place / out_dir) if r['event'] == 'train'}


def weights(place, step, out_dir='out/a'):
    """sha256 of the weights saved after `step` updates."""
    return hashlib.sha256((place / out_dir / f'ckpt/step_{step:08d}/model.safetensors').read_bytes()).hexdigest()
