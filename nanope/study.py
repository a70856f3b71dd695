"""Which cells a study has, and what they are given: one run a scheme and seed, their extensions, and those trained on.

    TO/runs/<wpe>_<seed>       one run a scheme and seed                  TO/runs/<wpe>_<value>_<seed>     of a sweep
    TO/runs/<run>_<method>_<n> extended to n tokens                       TO/runs/<run>_<method>_<n>_tuned trained on since

What is there already is not made again, see cells.py.
"""
import itertools
import math
import os

from nanope import metrics
from nanope.cells import Cell, make_missing
from nanope.configurator import read_file
from nanope.files import read_json
from nanope.metrics import run_names
from nanope.runfolder import IDENTITY

OURS = 'wpe', 'seed', 'out_dir', 'init_from'  # set for each cell
EXTENSIONS = {'learned': ('interpolate', 'lowrank', 'hold', 'tile', 'random'), 'sinusoidal': ('interpolate', 'recompute'),
              'rope': ('yarn', 'linear', 'ntk', 'dynamic', 'llama3', 'none'), 'none': ('none',), 'alibi': ('none',)}  # as in extend.py


def settings_of(files, flags):
    """{name: value} of config files and then of flags, as the ledger keeps them. train.py is who checks them."""
    problems = []
    settings = {name: value for path in files for _, name, (value,) in read_file(path, {}, problems)}
    if problems:
        raise ValueError('\n'.join(problems))
    for flag in flags:
        name, equals, value = flag.removeprefix('--').partition('=')
        if name in OURS:
            raise ValueError(f'--train: {flag}: compare.py sets {name} itself')
        if not flag.startswith('--') or not equals:
            raise ValueError(f'--train: {flag}: settings are written --name=value')
        settings[name] = value
    return {name: str(value) for name, value in settings.items() if name not in OURS}


# ---- training --------------------------------------------------------------------------------------------------------

def train_missing(to, files, wpes, seeds, flags, tuned=None):
    """Train every scheme with every seed that is not there yet: as make_missing().

    files: config files for train.py. flags: more of its settings. tuned: what sweep() returned."""
    cells = []
    for seed, wpe in itertools.product(seeds, wpes):
        more = {tuned['setting']: tuned['best'][wpe]} if tuned else {}
        cells.append(training('_'.join([wpe, *more.values(), str(seed)]), files, flags, wpe=wpe, seed=seed, **more))
    return make_missing(to, settings_of(files, flags), cells)


def training(name, files, flags, **settings):
    """The cell of a run, which goes on where it was stopped."""
    args = [f'--{setting}={value}' for setting, value in settings.items()]
    return Cell(name, 'train', [*files, *flags, *args, '--init_from=auto'], None, settings['wpe'], None, settings['seed'])


def read_sweep(text):
    """'learning_rate=1e-3,3e-3' -> ('learning_rate', ['1e-3', '3e-3']). Raises ValueError."""
    name, equals, values = text.partition('=')
    values = values.split(',')
    if not equals or len(values) < 2 or not all(values) or len(set(values)) < len(values) or name in OURS:
        raise ValueError(f'--sweep={text}: write a setting of train.py and two or more values, as in --sweep=learning_rate=1e-3,3e-3')
    return name, values


def left_out_of_sweep(name, files, flags):
    """What a sweep of a learning rate leaves as it is, since Muon and AdamW have one each: a sentence, or None. ValueError where the
    setting is of Muon, and another optimizer trains."""
    muon = settings_of(files, flags).get('optimizer') == 'muon'
    if name.startswith('muon_') and not muon:
        raise ValueError(f'--sweep={name}=…: only Muon has it, and the runs train by AdamW alone: add --train=--optimizer=muon')
    if muon and name == 'learning_rate':
        return ('the sweep of learning_rate leaves the matrices of the blocks at one muon_lr: it tunes tables, biases and norms; '
                'sweep muon_lr for the matrices')
    if muon and name == 'muon_lr':
        return 'the sweep of muon_lr leaves tables, biases and norms at one learning_rate: it tunes the matrices of the blocks'


def sweep(to, files, wpes, flags, name, values):
    """Try each value of a setting for every scheme alike, with seed 0: {'setting', 'losses': {wpe: {value: loss, None if it failed}},
    'best': {wpe: value}}. The loss is the final one on all validation tokens, so what is compared later uses other seeds."""
    tried = {(wpe, value): training(f'{wpe}_{value}_0', files, flags, wpe=wpe, seed=0, **{name: value})
             for wpe, value in itertools.product(wpes, values)}
    made, _ = make_missing(to, settings_of(files, flags), tried.values())
    losses = {wpe: dict.fromkeys(values) for wpe in wpes}
    for (wpe, value), cell in tried.items():
        run = os.path.join(to, 'runs', cell.name)
        if run in made:
            losses[wpe][value] = [record['loss'] for record in metrics.read(run) if record['event'] == 'final'][-1]
    hopeless = [wpe for wpe, found in losses.items() if all(loss is None for loss in found.values())]
    if hopeless:
        raise ValueError(f'--sweep: no value of {name} trained {", ".join(hopeless)}; see {to}/runs/*.log')
    best = {wpe: min((value for value in values if found[value] is not None), key=found.get) for wpe, found in losses.items()}
    return {'setting': name, 'losses': losses, 'best': best}


# ---- extending -------------------------------------------------------------------------------------------------------

def read_methods(text, factor):
    """'yarn,lowrank:4' -> [('yarn', factor), ('lowrank', 4.0)]. Raises ValueError."""
    known, methods = dict.fromkeys(name for names in EXTENSIONS.values() for name in names), []
    for part in filter(None, text.split(',')):
        name, _, times = part.strip().partition(':')
        try:
            methods.append((name, float(times or factor)))
        except ValueError:
            raise ValueError(f'--extend={text}: {times!r} is no number; write method or method:factor, as in lowrank:4') from None
        if name not in known:
            raise ValueError(f'--extend={text}: {name!r} is no method of extend.py; it has {", ".join(known)}')
        if not 1 < methods[-1][1] < math.inf:
            raise ValueError(f'--extend={text}: {methods[-1][1]:g} times the trained length is no extension')
    return methods


def check_methods(methods, schemes):
    """Raises ValueError where a method of read_methods() fits none of the schemes: it would be left out without a word."""
    for name, _ in methods:
        fitting = [wpe for wpe, names in EXTENSIONS.items() if name in names]
        if not set(fitting) & set(schemes):
            raise ValueError(f'--extend: {name} is for {", ".join(fitting)}; what is compared is {", ".join(dict.fromkeys(schemes))}')


def extend_missing(to, runs, methods):
    """Extend every run by every method that fits its scheme, unless that is there: as make_missing().

    runs: {run folder: its Checkpoint}. methods: [(name, times its context length)]."""
    check_methods(methods, [found.state['config']['wpe'] for found in runs.values()])
    cells = []
    for name, (run, found) in zip(run_names(list(runs)), runs.items()):
        wpe, length, seed = (found.state['config'].get(key) for key in ('wpe', 'block_size', 'seed'))
        if found.weights is not None:
            raise ValueError(f'{run} is no run folder: extend it first, python extend.py {run}, and compare what that writes')
        for method, factor in [each for each in methods if each[0] in EXTENSIONS[wpe]]:
            n = round(length * factor)
            args = [run, f'--block_size={n}', f'--method={method}', f'--step={found.step}']
            cells.append(Cell(f'{name.replace(os.sep, "_")}_{method}_{n}', 'extend', args, digest(found), wpe,
                              f'{method} ×{n / length:g}', seed))
    return make_missing(to, {}, cells)


def tune_missing(to, runs, share, lr_share):
    """Train extended runs on for a share of the updates they have had, unless that is done: as make_missing().

    Each goes on under its own settings, as many tokens an update as before, by a schedule of its own: warm-up for a tenth, then the
    cosine, from lr_share of the learning rates that it had. runs: {run folder: its Checkpoint}."""
    cells = []
    for run, found in runs.items():
        settings, extended = found.state['config'], found.state['extended']
        updates, longer = max(round(found.step * share), 1), settings['block_size'] / extended['trained']
        ours = {'init_from': run, 'max_iters': updates, 'warmup_iters': updates // 10, 'lr_decay_iters': updates, 'eval_interval': updates,
                'checkpoint_interval': updates, 'allow_change': False, 'overwrite': True,
                'batch_size': max(round(settings['batch_size'] / longer), 1)}
        rates = ['learning_rate', 'min_lr', *(['muon_lr'] if settings.get('optimizer') == 'muon' else [])]
        ours |= {name: float(f'{settings[name] * lr_share:.9g}') for name in rates if settings[name] is not None}
        args = [f'--{name}={value}' for name, value in {**settings, **ours}.items() if name not in IDENTITY | {'out_dir'}]
        cells.append(Cell(f'{os.path.basename(run)}_tuned', 'train', args, f'{digest(found)} {updates} {lr_share}', settings['wpe'],
                          f'{extended["method"]} ×{longer:g}, tuned', settings['seed']))
    return make_missing(to, {}, cells)


def digest(found):
    """Of a checkpoint: another one where its run was trained on."""
    return read_json(os.path.join(found.path, 'manifest.json'))['digest']
