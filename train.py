"""Train a GPT-2: python train.py config/shakespeare_rope.py --max_iters=500

Settings come from TrainConfig below, then config files, then --key=value; --help lists them all. The run folder out_dir receives the
resolved config, metrics.jsonl, loss.png and checkpoints. SIGINT (Ctrl-C) or SIGTERM saves and stops; --init_from=resume goes on, bit
for bit.
"""
import gc
import math
import os
import sys
import time
from dataclasses import asdict, dataclass, fields
from typing import Literal

import nanope  # noqa: F401 (before torch)
import torch
from tqdm import tqdm

from model import GPT, GPTConfig
from nanope import checkpoint, compiling, device, lr_range, metrics, monitor, optim, parallel, plots, runfolder
from nanope.configurator import catch_signals, configure, run
from nanope.evaluate import evaluate
from nanope.files import guard, lock_folder, write_json
from nanope.loader import Data
from nanope.monitor import describe
from nanope.runfolder import crash, resume, save

EXIT_DONE, EXIT_STOPPED = 0, 75


@dataclass
class TrainConfig(GPTConfig):
    # the run
    out_dir: str = 'out/run'            # run folder
    init_from: str = 'scratch'          # scratch, resume, auto (resume where there is something to, else start), or what to
                                        # start from with a fresh optimizer: a run folder, gpt2, gpt2-medium, gpt2-large, gpt2-xl, or a
                                        # folder of transformers or nanoGPT (their weights fit any wpe: all but the table are used)
    train_only: Literal['all', 'wpe'] = 'all'  # wpe: leave everything but a learned position table as it is
    overwrite: bool = False             # delete the run that out_dir already holds
    allow_change: bool = False          # resume although settings that change the course of training differ from the saved ones
    seed: int = 1337                    # weights, batches and dropout follow from it
    # data
    dataset: str = 'shakespeare'        # folder under data/, see prepare.py
    batch_size: int = 16                # rows of block_size tokens a micro-batch
    gradient_accumulation_steps: int = 1  # micro-batches an update, of all processes together
    micro_batch: int | Literal['auto'] | None = None  # rows at once on the device, of batch_size * gradient_accumulation_steps; none =
                                        # batch_size, auto = as many as fit a GPU, elsewhere batch_size
    # optimizer
    optimizer: Literal['adamw', 'muon'] = 'adamw'  # muon: for the matrices of the blocks, AdamW for the rest
    muon_lr: float = 0.02               # peak of Muon's own learning rate; the schedule is the same
    muon_momentum: float = 0.95
    muon_weight_decay: float = 0.01
    max_iters: int = 1000               # updates
    learning_rate: float = 6e-4         # peak
    min_lr: float | None = None         # at the end of the decay; none = learning_rate/10
    warmup_iters: int = 100             # linear warm-up, updates
    lr_decay: Literal['cosine', 'linear'] = 'cosine'  # how the learning rate falls
    lr_decay_iters: int | None = None   # where the decay ends; none = max_iters
    weight_decay: float = 0.1           # on matrices and embeddings
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip: float = 1.0              # norm; 0 = off
    lr_range: str | None = None         # 1e-5:1 = instead of training try the learning rates between, and suggest one
    patience: int | None = None         # stop after so many evaluations without an improvement; none = train to max_iters
    min_delta: float = 0.0              # what an improvement must exceed, nats
    # evaluation, logging, checkpoints: none of these changes the course of training
    eval_interval: int = 250            # updates between evaluations; one more at the start and at the end
    eval_tokens: int | None = None      # validation tokens an evaluation on the way; none = all. The last one always uses all
    eval_batch_size: int = 16           # rows; the result does not depend on it
    checkpoint_interval: int | None = None  # updates between checkpoints; none = eval_interval. One more at the end
    keep_checkpoints: int = 2           # the newest ones; the best is kept besides
    log_interval: int = 10              # updates between training records
    sample_interval: int | None = None  # updates between texts drawn from the model; none = never
    sample_tokens: int = 100            # tokens of each
    wandb: Literal['off', 'online', 'offline'] = 'off'  # mirror metrics.jsonl to Weights & Biases
    wandb_project: str = 'nanope'
    # machine
    device: str = 'auto'                # auto, cpu, cuda, cuda:1, mps; under torchrun, cuda is one GPU a process
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'  # of matrix products; weights stay float32
    compile: bool | Literal['auto'] = 'auto'  # torch.compile
    threads: int | None = None          # CPU threads; none = torch's choice
    checkpoint_blocks: bool = False     # keep the input of each block alone and compute the rest again: less memory, slower
    shard: bool = False                 # several processes keep a part of weights and optimizer state each (FSDP2): for large models

    def problems(self):
        found = super().problems()
        for name in ('batch_size', 'gradient_accumulation_steps', 'max_iters', 'eval_interval', 'eval_tokens', 'eval_batch_size',
                     'checkpoint_interval', 'keep_checkpoints', 'log_interval', 'lr_decay_iters', 'threads', 'patience', 'sample_interval',
                     'sample_tokens'):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                found.append(f'{name}={getattr(self, name)} must be at least 1')
        if isinstance(self.micro_batch, int) and self.micro_batch < 1:
            found.append(f'micro_batch={self.micro_batch} must be at least 1')
        for name in ('seed', 'learning_rate', 'min_lr', 'warmup_iters', 'weight_decay', 'grad_clip', 'min_delta', 'muon_lr',
                     'muon_weight_decay'):
            if getattr(self, name) is not None and getattr(self, name) < 0:
                found.append(f'{name}={getattr(self, name)} must not be negative')
        if self.threads and self.threads > 1024:
            found.append(f'threads={self.threads} must be at most 1024')
        found += lr_range.problems(self)
        if self.shard and self.optimizer == 'muon':
            found.append('shard=True splits the matrices, which Muon needs whole: use optimizer=adamw')
        parts, world = self.gradient_accumulation_steps, parallel.world
        if parts % world:
            near = ' or '.join(str(n) for n in (parts - parts % world, parts - parts % world + world) if n > 0)
            found.append(f'gradient_accumulation_steps={parts} cannot be shared equally by {world} processes; {near} can')
        if self.seed >= 2**32:
            found.append(f'seed={self.seed} must be below 2**32')
        for name in ('beta1', 'beta2', 'muon_momentum'):
            if not 0 <= getattr(self, name) < 1:
                found.append(f'{name}={getattr(self, name)} must be at least 0 and below 1')
        return found


def learning_rate_at(step, config):
    """Linear warm-up to learning_rate, cosine or line to min_lr at lr_decay_iters, min_lr after it. Defined for every step and setting."""
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / (config.warmup_iters + 1)
    if step >= config.lr_decay_iters:
        return config.min_lr
    done = (step - config.warmup_iters) / (config.lr_decay_iters - config.warmup_iters)
    left = 1 - done if config.lr_decay == 'linear' else 0.5 * (1 + math.cos(math.pi * done))
    return config.min_lr + left * (config.learning_rate - config.min_lr)


def update(loss_of, optimizers, scaler, config, data, step, lr, device_name, autocast, caught):
    """One update from the batch of `step`. Returns loss, gradient norm and whether any process has caught a signal, the same in all
    processes: a tensor (3,) on the device. Changes no weight when loss or norm is not finite, but see optim.step().

    Dropout is seeded with (seed, step, rank), so that there is no generator state to save."""
    seed = config.seed * 1_000_003 + step + parallel.rank * 0x9E3779B1  # the golden ratio: keeps the steps of all ranks apart
    torch.manual_seed(seed % 2**32)  # the CPU's generator reads no more than 32 bits
    rows = config.batch_size * config.gradient_accumulation_steps
    share = slice(parallel.rank * rows // parallel.world, (parallel.rank + 1) * rows // parallel.world)
    batch = [part[share].split(config.micro_batch) for part in data.train.batch(config.seed, step, rows, config.block_size)]
    told = torch.zeros(3, device=device_name)
    for x, y in zip(*batch):
        x, y = (device.send(part, device_name) for part in (x, y))
        with autocast():
            loss = loss_of(x, y) * (len(x) / rows)
        scaler.scale(loss).backward()
        told[0] += loss.detach()
    told[2] += bool(caught)
    params = optim.parameters(optimizers)
    parallel.add_up([told, *(p.grad for p in params)])
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    told[1] = parallel.whole(torch.nn.utils.clip_grad_norm_(params, config.grad_clip or math.inf))
    optim.set_learning_rate(optimizers, lr)
    if scaler.is_enabled():
        if told[0].isfinite():
            for optimizer in optimizers if told[1].isfinite() else ():  # one that overflowed is left out by all: the norm is of all
                scaler.step(optimizer)
            scaler.update()  # halves the scale where a float16 gradient overflowed
    else:
        optim.step(optimizers, told[:2].isfinite().all())
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    return told


@parallel.ranks()
def main(argv=None):
    config, rest = configure(TrainConfig, sys.argv[1:] if argv is None else argv)
    if rest:
        raise ValueError(f'{rest[0]} is no config file (they end in .py) and no --key=value')
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.set_float32_matmul_precision('high')  # TF32 on CUDA
    data = Data(os.path.join('data', config.dataset))
    if config.vocab_size not in (GPTConfig.vocab_size, data.vocab_size):
        raise ValueError(f'vocab_size={config.vocab_size} does not fit data/{config.dataset}, which has {data.vocab_size}: leave it out')
    config.vocab_size = data.vocab_size
    config.lr_decay_iters = config.lr_decay_iters or config.max_iters
    config.min_lr = config.learning_rate / 10 if config.min_lr is None else config.min_lr
    config.out_dir = lr_range.folder(config)
    held = checkpoint.steps(config.out_dir)
    resumed, started = runfolder.find_start(config, data.tokenizer)
    data.check_length(config.block_size)
    if config.train_only == 'wpe' and config.wpe != 'learned':
        raise ValueError(f'--train_only=wpe: a model with wpe={config.wpe} has no position table to train')

    device_name, why_device = device.place(*device.resolve_device(config.device))
    dtype, why_dtype = device.resolve_dtype(config.dtype, device_name, config.n_embd)
    autocast = device.autocast(device_name, dtype)
    sharded = parallel.may_shard(config.shard, dtype)
    first = parallel.rank == 0
    lock = lock_folder(config.out_dir, 'trained') if first else None  # noqa: F841 (held until the process ends)
    check_folder = guard(config.out_dir) if first else lambda: None  # before what is written later
    if first and checkpoint.steps(config.out_dir) != held:
        raise ValueError(f'another process has just trained in {config.out_dir}: look what it holds and start again')
    parallel.join(f'{config} {data.digest} {resumed} {started}')
    caught = catch_signals()

    model = GPT(GPTConfig(**{field.name: getattr(config, field.name) for field in fields(GPTConfig)}), config.seed)
    if started:
        checkpoint.load_weights(model, started.tensors('model'), started.path)
    if config.train_only == 'wpe':
        model.requires_grad_(False).transformer.wpe.requires_grad_(True)
    model = parallel.shard(model, device_name) if sharded else model.to(device_name)
    model.checkpoint_blocks = config.checkpoint_blocks
    names = {p: name for name, p in model.named_parameters() if p.requires_grad}
    update_rows = config.batch_size * config.gradient_accumulation_steps
    wanted_rows = runfolder.as_before(config, resumed, 'micro_batch') or config.batch_size
    config.micro_batch, why_rows = device.micro_batch(wanted_rows, model, update_rows // parallel.world, device_name, autocast,
                                                      config.batch_size)
    may_save = compiling.expected_saving(model, config.max_iters * update_rows * config.block_size // parallel.world, dtype)
    compile = runfolder.as_before(config, resumed, 'compile')
    loss_of, is_compiled, why_compile = compiling.compile_model(model, compile, config.micro_batch, device_name, autocast, may_save)
    optimizers = optim.build(config, model, device_name)
    scaler = torch.amp.GradScaler(torch.device(device_name).type, enabled=dtype == 'float16')
    environment = device.environment(device_name, dtype, is_compiled) | {'shard': sharded or None, 'micro_batch': config.micro_batch}
    describe(config, model, data, {'device': (device_name, why_device), 'dtype': (dtype, why_dtype), 'compile': (is_compiled, why_compile),
                                   'micro_batch': (config.micro_batch, why_rows)})

    step, origin = 0, {'run': config.init_from, 'step': started.step} if started else None
    if resumed:
        step, origin = resume(resumed, config, data, model, optimizers, scaler, names, environment), resumed.state.get('origin')
    if first:
        if not resumed:
            runfolder.clear(config.out_dir)  # not before: what was refused so far has lost nothing
        metrics.rewind(config.out_dir, step)
        write_json(os.path.join(config.out_dir, 'config.json'), asdict(config))
    if config.lr_range:
        trial = lambda step, lr: update(loss_of, optimizers, scaler, config, data, step, lr, device_name, autocast, caught).tolist()  # noqa
        return EXIT_STOPPED if lr_range.run_test(config, trial) else EXIT_DONE
    wandb = metrics.start_wandb(config.wandb if first else 'off', config.wandb_project, config.out_dir, asdict(config))

    def record(event, at, **values):
        if first:
            check_folder()
            metrics.append(config.out_dir, {'event': event, 'step': at, **values})
        wandb('log', {f'{event}/{name}': value for name, value in values.items()}, at)

    def score(max_tokens=None):
        return evaluate(model, data.val, data.tokenizer.byte_lengths(), block_size=config.block_size, autocast=autocast,
                        batch_size=config.eval_batch_size, max_tokens=max_tokens, stop=lambda: parallel.any_rank(caught))

    evaluated = parallel.any_rank(first and any(r['event'] == 'eval' and r['step'] == step for r in metrics.read(config.out_dir)))
    peak = device.peak_flops(device_name, dtype)
    update_tokens = update_rows * config.block_size
    stalled = monitor.out_of_patience(config)
    seconds, result, stop = None, None, parallel.any_rank(caught)  # of an update, smoothed; of the last evaluation; in all processes
    waits = scaler.is_enabled() or not device.runs_ahead(device_name)  # after every update, for what it tells
    told, started = [], None  # by the updates since we asked last, and when the first of them began
    ahead = min(max(2**19 // update_tokens, 1), 10)  # updates that may go untold: a signal does not wait for long
    gc.collect()
    gc.freeze()  # what is there by now stays: collections need not look at it
    model.train()
    with tqdm(total=config.max_iters, initial=step, desc=os.path.basename(os.path.normpath(config.out_dir)), dynamic_ncols=True,
              bar_format='{desc} {n_fmt}/{total_fmt} |{bar:16}|{postfix}', mininterval=0.2 if sys.stderr.isatty() else 10) as bar:
        while True:
            # once in a while: evaluate, save, stop
            last = step >= config.max_iters or stalled
            evaluating = (last or step % config.eval_interval == 0) and not evaluated
            saving = last or step and step % (config.checkpoint_interval or config.eval_interval) == 0
            logging = (step - 1) % config.log_interval == 0 or last
            drawing = config.sample_interval and step and step % config.sample_interval == 0
            if told and (waits or logging or evaluating or saving or drawing or len(told) >= ahead):
                for n, (loss, norm, stop) in enumerate(torch.stack(told).tolist(), step - len(told)):
                    if not (math.isfinite(loss) and (math.isfinite(norm) or scaler.is_enabled() and scaler.get_scale() >= 1)):
                        bar.close()
                        return crash(config, n, learning_rate=learning_rate_at(n, config), loss=loss, grad_norm=norm)
                took = (time.perf_counter() - started) / len(told)
                seconds, told = took if seconds is None else 0.9 * seconds + 0.1 * took, []
                if logging:
                    record('train', step - 1, loss=loss, lr=lr, grad_norm=norm if math.isfinite(norm) else None,
                           tokens_per_s=update_tokens / took)
                mfu = f', MFU {model.flops_per_token() * update_tokens / seconds / peak / parallel.world:.1%}' if peak else ''
                left = bar.format_interval((config.max_iters - step) * seconds)
                bar.set_postfix_str(f'loss {loss:.3f}, {update_tokens / seconds:,.0f} tokens/s{mfu}, {left} left', refresh=False)
            if (evaluating or saving or stop) and parallel.any_rank(not all(parallel.own(p).isfinite().all() for p in names)):
                bar.close()
                return crash(config, step, learning_rate=learning_rate_at(step, config), weights='nan or inf')
            if evaluating:
                result = score(config.eval_tokens)
                if result:
                    record('eval', step, loss=result['loss'], stderr=result['stderr'], tokens=result['tokens'])
                    bar.write(f'step {step}: validation loss {result["loss"]:.4f} ± {result["stderr"]:.4f} ({result["tokens"]:,} tokens)')
                    evaluated = True
                stop, stalled = parallel.any_rank(caught), monitor.out_of_patience(config)
                last = last or stalled
            if drawing:
                text = monitor.sample(model, data.tokenizer, config.sample_tokens, config.seed + step, autocast)
                record('sample', step, text=text)
                bar.write(f'step {step}, a sample:\n{text}\n')
            if saving or last or stop:
                check_folder()
                save(config, step, model, optimizers, scaler, names, data, environment, origin)
                stop = parallel.any_rank(caught)
                if last or stop:  # only here: who stops has saved
                    break

            # one update
            lr, started = learning_rate_at(step, config), started if told else time.perf_counter()
            told.append(update(loss_of, optimizers, scaler, config, data, step, lr, device_name, autocast, caught))
            step, evaluated = step + 1, False
            bar.update()
    if not stop:
        print('evaluating on all validation tokens', flush=True)
        final = result if config.eval_tokens is None and result else score()
        stop = not final
        if final:
            record('final', step, **{key: final[key] for key in ('loss', 'stderr', 'tokens', 'bits_per_byte')})
            print(f'{config.out_dir}: validation loss {final["loss"]:.4f} ± {final["stderr"]:.4f} on all {final["tokens"]:,} tokens, '
                  f'{final["bits_per_byte"]:.4f} bits a byte')
            monitor.say_end(config, step)
    try:
        if first:
            plots.loss_curves([config.out_dir], os.path.join(config.out_dir, 'loss.png'))
    except Exception as error:  # matplotlib is missing or broken: the run is none the worse
        print(f'warning: no loss.png: {error}', file=sys.stderr)
    wandb('finish')
    if stop:
        print(f'{"".join(caught[:1]) or "signal to another process"}: saved at step {step}; '
              'go on with the same command, --init_from=resume in it', file=sys.stderr)
        return EXIT_STOPPED
    return EXIT_DONE


if __name__ == '__main__':
    run(main)
