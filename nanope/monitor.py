"""What train.py says about a run besides its losses: what is about to be trained, whether patience is spent, samples, the best step."""
import sys

import torch

from nanope import checkpoint, metrics, parallel
from nanope.configurator import idle
from nanope.device import without_cudnn
from nanope.tokenizer import default_prompt


def describe(config, model, data, reasons):
    """Print what is about to be trained, on what, and why so."""
    print(model.parameter_report())
    rms = {'tokens': parallel.whole(model.transformer.wte.weight)[:config.vocab_size]}
    if config.wpe == 'learned':
        rms['positions'] = parallel.whole(model.transformer.wpe.weight)
    elif config.wpe == 'sinusoidal':
        rms['positions'] = model.wpe_table
    print('embeddings, RMS at start: ' + ', '.join(f'{name} {t.detach().square().mean().sqrt():.4f}' for name, t in rms.items()))
    for name, (value, reason) in reasons.items():
        print(f'{name}: {value} ({reason})')
    update = config.batch_size * config.gradient_accumulation_steps * config.block_size
    print(f'data: {config.dataset}, {data.train.tokens:,} training tokens, {data.val.tokens:,} for validation; '
          f'{update:,} tokens an update, {config.max_iters * update / data.train.tokens:.3g} passes over the data in all')
    if update > data.train.tokens:
        print(f'warning: one update covers {update:,} tokens, more than the {data.train.tokens:,} there are: '
              'lower gradient_accumulation_steps or batch_size', file=sys.stderr)
    muons = ('muon_lr', 'muon_momentum', 'muon_weight_decay') if config.optimizer == 'adamw' else ()
    for line in idle(config, muons, 'with --optimizer=adamw'):
        print(f'warning: {line}', file=sys.stderr)
    if config.warmup_iters >= config.max_iters:
        print(f'warning: warmup_iters={config.warmup_iters} never ends within max_iters={config.max_iters}', file=sys.stderr)


def out_of_patience(config):
    """Whether the last `patience` evaluations of a run all failed to go more than min_delta below the best one before them.

    All of it is in metrics.jsonl, which a resumed run rewinds: no state of its own. Rank 0 reads it; all get the same answer."""
    if config.patience is None:
        return False
    best, waited = float('inf'), 0
    for record in metrics.read(config.out_dir) if parallel.rank == 0 else []:
        if record['event'] == 'eval' and record['step'] % config.eval_interval == 0:  # not the end of a run that was then made longer
            better = record['loss'] < best - config.min_delta
            best, waited = (record['loss'], 0) if better else (best, waited + 1)
    return parallel.any_rank(waited >= config.patience)


def sample(model, tokenizer, n_tokens, seed, autocast):
    """A text of n_tokens new tokens from a model in training, by a generator of its own: no loss changes by it. The prompt is a new line
    or the separator, temperature 0.8, top_k 200, as sample.py has them. Of several processes all must ask, and all get the same."""
    device = next(model.parameters()).device
    prompt = tokenizer.encode_prompt(default_prompt(tokenizer))
    generator = torch.Generator(device).manual_seed(seed)
    with autocast(), without_cudnn():
        tokens = model.generate(torch.tensor([prompt], device=device), n_tokens, 0.8, 200, generator=generator)
        return tokenizer.decode([int(token) for token in tokens])


def say_end(config, step):
    """Print whether a run ended early, and which of its checkpoints is the best."""
    if step < config.max_iters:
        print(f'stopped early: {config.patience} evaluations without an improvement of more than {config.min_delta:g} nats')
    best = checkpoint.best_step(config.out_dir)
    loss = {r['step']: r['loss'] for r in metrics.read(config.out_dir) if r['event'] == 'eval'}.get(best)
    if loss is not None and (best != step or config.patience):
        print(f'the best checkpoint is step {best}, validation loss {loss:.4f}: '
              f'python sample.py --out_dir={config.out_dir} --step=best')
