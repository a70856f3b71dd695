"""Compare runs on the same validation tokens: python compare.py out/shakespeare_learned out/shakespeare_rope

With a config file it trains first what is missing, a run a scheme and seed, and with --extend it gives each run a longer context:
python compare.py config/shakespeare_learned.py --wpe=learned,rope --seeds=3 --extend=yarn,interpolate --to=out/study. Stopped or killed,
the same command goes on. Prints tables and writes report.json, report.html and compare.png into --to.
"""
import shlex
import statistics
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Literal, get_args

import nanope  # noqa: F401 (before torch)
from tqdm import tqdm

from model import GPTConfig
from nanope import cells, checkpoint, device, metrics, protocols, report, runset, study
from nanope.configurator import configure, idle, run
from nanope.files import lock_folder, make_folder
from nanope.statistics import summarise


@dataclass
class CompareConfig:
    to: str = 'out/compare'             # folder for report.json, report.html, compare.png, and the runs that are trained here
    # training, where a config file for train.py is given
    wpe: str = ','.join(get_args(GPTConfig.__annotations__['wpe']))  # schemes
    seeds: int = 1                      # runs a scheme, with seeds 1, 2, ...
    train: str = ''                     # more settings for train.py, as in --train="--max_iters=300 --dropout=0.1"
    sweep: str = ''                     # learning_rate=1e-3,3e-3: try these for each scheme with seed 0, train the seeds with its best;
                                        # with --optimizer=muon the matrices follow muon_lr instead
    # extending by extend.py
    extend: str = ''                    # methods, each for the schemes that it fits; yarn:4 = to 4 times the trained length
    extend_to: float = 2.0              # times the trained length, where a method says nothing else
    tune: float = 0.0                   # train the extended runs on for this share of the updates they had, and compare those too
    tune_lr: float = 0.3                # peak learning rate of that, as a share of the one they had, see docs/results.md
    # evaluating
    step: int | Literal['latest', 'best'] = 'latest'  # which checkpoint of each run
    dataset: str | None = None          # data to score on; none = what the runs were trained on
    length: int | None = None           # tokens of context at which all are scored; none = the shortest that one was trained at
    eval_tokens: int | None = None      # validation tokens to score; none = all
    context_tokens: int = 8192          # targets scored at other lengths, and by a sliding window; 0 = leave that out
    stride: int | None = None           # of the sliding window; none = half its length
    trials: int = 64                    # questions and sequences of retrieval and induction, a length; 0 = leave that out
    seed: int = 0                       # they follow from it
    batch_size: int = 32                # rows of the trained length; the result does not depend on it
    device: str = 'auto'                # auto, cpu, cuda, mps
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'  # auto: as each run was trained, where the device can

    def problems(self):
        schemes, known = self.wpe.split(','), get_args(GPTConfig.__annotations__['wpe'])
        found = [f'wpe={self.wpe}: {wpe!r} is no scheme; there are {", ".join(known)}' for wpe in schemes if wpe not in known]
        found += [f'wpe={self.wpe} names {wpe} twice' for wpe, n in Counter(schemes).items() if n > 1]
        found += [f'{name}={getattr(self, name)} must be at least {least}' for names, least in
                  (('seeds length eval_tokens stride batch_size', 1), ('context_tokens trials seed', 0))
                  for name in names.split() if getattr(self, name) is not None and getattr(self, name) < least]
        found += [f'{name}={getattr(self, name)} must be at most 10,000' for name in ('seeds', 'trials') if getattr(self, name) > 10_000]
        if not 0 <= self.tune <= 1:
            found.append(f'tune={self.tune} must be a share of the updates, from 0 to 1')
        if self.tune_lr <= 0:
            found.append(f'tune_lr={self.tune_lr} must be above 0')
        if all(':' in method for method in self.extend.split(',') if method):
            found += idle(self, ['extend_to'], 'without a method in --extend that names no factor itself')
        for name, needed, where in (('tune', 'extend', 'without --extend'), ('tune_lr', 'tune', 'without --tune'),
                                    ('stride', 'context_tokens', 'with --context_tokens=0'), ('seed', 'trials', 'with --trials=0')):
            found += [] if getattr(self, needed) else idle(self, [name], where)
        return found


def train_and_extend(config, files, paths):
    """What a study folder holds besides the runs given: ({run folder: Checkpoint}, failed cells, what a sweep found or None)."""
    failed, tuned, methods = [], None, study.read_methods(config.extend, config.extend_to)
    if files:
        seeds, flags, wpes = range(1, config.seeds + 1), shlex.split(config.train), config.wpe.split(',')
        if not paths:                                             # now, not after hours of training
            study.check_methods(methods, wpes)
        if config.sweep:
            tuned = study.sweep(config.to, files, wpes, flags, *study.read_sweep(config.sweep))
        trained, failed = study.train_missing(config.to, files, wpes, seeds, flags, tuned)
        if failed and not trained and not paths:
            raise ValueError(f'every run failed; what they said stands above and in {config.to}/runs/*.log')
        paths = trained + paths
    runs = runset.find_runs(paths, config.to, config.step)
    if methods:
        extended, lost = study.extend_missing(config.to, runs, methods)
        failed += lost
        runs = runset.find_runs([*runs, *extended], config.to, config.step)
        if config.tune:
            more, lost = study.tune_missing(config.to, {path: checkpoint.load(path) for path in extended}, config.tune, config.tune_lr)
            failed += lost
            runs |= runset.find_runs(more, config.to, 'latest') if more else {}
    return runs, failed, tuned


def evaluate_run(path, found, data, length, config, device_name):
    """Score one run folder: (its row of report.json, its loss and number of targets in each window, seconds by protocol)."""
    model, tokenizer, _ = checkpoint.load_model(path, found.step, device_name)
    dtype = found.environment['dtype'] if config.dtype == 'auto' else config.dtype
    if config.dtype == 'auto' and dtype == 'float16' and not device_name.startswith('cuda'):
        dtype = 'float32'
    dtype, _ = device.resolve_dtype(dtype, device_name, model.config.n_embd)
    autocast = device.autocast(device_name, dtype)
    seed = found.state['config'].get('seed')                     # none: what others trained
    seeds = config.seed, seed or 0                               # other questions for other seeds, the same for all schemes
    answers, windows, seconds = protocols.ask(model, data, tokenizer.byte_lengths(), length, config, seeds, autocast)
    count = model.parameter_counts()
    trained = [record for record in metrics.read(path) if record['event'] == 'train']
    speeds = [record['tokens_per_s'] for record in trained]
    return {'run': path, 'wpe': model.config.wpe, 'extension': runset.extension(found), 'seed': seed,
            'block_size': model.config.block_size, 'step': found.step, 'params': count['total'], 'wpe_params': count['wpe'], **answers,
            'dtype': dtype, 'tokens_per_s': statistics.median(speeds) if speeds else None,
            'spikes': metrics.spikes([(record['step'], record['loss']) for record in trained])}, windows, seconds


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    files = [arg for arg in argv if arg.endswith('.py') and not arg.startswith('-')]  # settings of train.py, not of this script
    config, paths = configure(CompareConfig, [arg for arg in argv if arg not in files])
    if not files and (config.train or config.sweep or config.seeds > 1 or config.wpe != CompareConfig.wpe):
        raise ValueError('--wpe, --seeds, --train and --sweep are for training: give a config file too, as config/shakespeare_learned.py')
    device_name, _ = device.resolve_device(config.device)
    warnings = []

    def warn(line):
        warnings.append(line)
        print(f'warning: {line}', file=sys.stderr)

    if config.sweep and (left := study.left_out_of_sweep(study.read_sweep(config.sweep)[0], files, shlex.split(config.train))):
        warn(left)                                                # now, not after hours of training
    lock = lock_folder(config.to, 'written') if files or config.extend else None  # noqa: F841 (held until the process ends)
    try:
        runs, failed, tuned = train_and_extend(config, files, paths)
    except cells.Stopped:
        print('stopped; the same command goes on where this one was', file=sys.stderr)
        return cells.EXIT_STOPPED
    for cell in failed:
        warn(f'{cell["run"]} failed ({cells.exit_text(cell["exit"])}) and takes no part')
    untuned = [found for found in runs.values() if not runset.tuned(found)]
    for name, values in runset.differences(untuned or list(runs.values())).items():
        if not tuned or name != tuned['setting']:
            warn(f'the runs differ in {name} too, not in their scheme alone: {", ".join(map(str, values))}')
    for wpe, value in tuned['best'].items() if tuned else ():
        if value in (list(tuned['losses'][wpe])[0], list(tuned['losses'][wpe])[-1]):
            warn(f'{wpe}: {tuned["setting"]}={value} is the best of the sweep and at its end; a wider one may find a better')
    dataset, data = runset.open_data(runs, config.dataset)
    length = config.length or min(map(runset.trained_length, runs.values()))
    data.check_length(length)
    for path, found in runs.items():
        rows = found.state['config']['block_size']
        if found.state['config']['wpe'] == 'learned' and length > rows:
            raise ValueError(f'--length={length} is beyond the learned table of {path}, which has {rows} rows')
    if config.stride is not None and config.stride > length:
        raise ValueError(f'--stride={config.stride} would leave targets out between windows of {length} tokens: at most {length}')
    make_folder(config.to)                                        # or say that it cannot be, before hours of scoring
    rows, windows, seconds = [], {}, Counter()
    for path, found in tqdm(runs.items(), 'evaluating', disable=None):
        row, windows[path], took = evaluate_run(path, found, data, length, config, device_name)
        rows.append(row)
        seconds.update(took)
    runset.name_and_tell_apart(rows, failed, runs)
    for row in rows:
        if row['spikes']:
            warn(f'the training loss of {row["name"]} jumped at step {", ".join(map(str, row["spikes"]))}: its result counts all the same')
    schemes = summarise(rows, windows)
    machine = {name: value for name, value in device.environment(device_name, None, None).items() if value is not None}
    found = {'command': ['python', 'compare.py', *argv], 'machine': machine, 'dataset': dataset, 'length': length,
             'reference': next(scheme['scheme'] for scheme in schemes if scheme['difference'] is None), 'runs': rows,
             'schemes': schemes, 'failed': failed, 'sweep': tuned, 'warnings': warnings, 'protocols': protocols.describe(length, config)}
    print(report.text(found))
    print(f'\nscored {len(rows)} runs in {seconds.total():.0f} s: ' + ', '.join(f'{name} {took:.0f}' for name, took in seconds.items()))
    report.write(found, config.to)
    print(f'wrote {config.to}/report.json, {config.to}/report.html and {config.to}/compare.png')


if __name__ == '__main__':
    run(main)
