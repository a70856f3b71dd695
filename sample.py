"""Sample from a trained run: python sample.py --out_dir=out/shakespeare_rope --start="O Romeo" --max_new_tokens=300

Everything about the model and its vocabulary comes from the checkpoint. Text goes to stdout as it is drawn, notes to stderr.
"""
import codecs
import sys
import time
from dataclasses import dataclass
from typing import Literal

import nanope  # noqa: F401 (before torch)
import torch

from nanope import checkpoint, compiling, device
from nanope.configurator import configure, idle, run
from nanope.tokenizer import default_prompt


@dataclass
class SampleConfig:
    out_dir: str = 'out/run'            # run folder to sample from; or gpt2, or a folder of transformers or nanoGPT
    step: int | Literal['latest', 'best'] = 'latest'  # which checkpoint
    start: str | None = None            # prompt, or FILE:path to read it from a file; <|endoftext|> is the separator; none = a new
                                        # line, where the vocabulary has one, else the separator
    num_samples: int = 1                # one after the other, each with its own seed
    batch_size: int = 1                 # samples drawn at once, from one seed: faster, but printed only when all of them are done
    max_new_tokens: int = 500           # in a sample
    temperature: float = 0.8            # 0 = always the likeliest token; below 1 safer, above 1 wilder
    top_k: int | None = 200             # draw among the k likeliest; none = all
    top_p: float | None = None          # draw among the likeliest that hold this share of probability; none = all
    stop: str | None = None             # end a sample before this text, which may be <|endoftext|>
    overflow: Literal['slide', 'error'] = 'slide'  # past block_size tokens: slide the window, or refuse beforehand
    seed: int = 1337                    # of the first sample; the next ones count up from it
    device: str = 'auto'                # auto, cpu, cuda, mps
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'  # of weights and cache; auto = bfloat16 where the device has it
    compile: bool | Literal['auto'] = 'auto'  # compile the one-token step; auto = from 20,000 of them on

    def problems(self):
        found = []
        for name, least in (('num_samples', 1), ('batch_size', 1), ('max_new_tokens', 1), ('top_k', 1), ('seed', 0), ('temperature', 0)):
            if getattr(self, name) is not None and getattr(self, name) < least:
                found.append(f'{name}={getattr(self, name)} must be at least {least}')
        if self.seed >= 2**62:
            found.append(f'seed={self.seed} must be below 2**62')
        if self.top_p is not None and not 0 < self.top_p <= 1:
            found.append(f'top_p={self.top_p} must be above 0 and at most 1')
        if self.stop == '':
            found.append('stop is empty: give a text, or none')
        return found


def read_prompt(start):
    if not start.startswith('FILE:'):
        return start
    with open(start[len('FILE:'):], encoding='utf-8-sig') as file:  # without the mark that Windows' editors put first
        try:
            return file.read()
        except UnicodeDecodeError as error:
            raise ValueError(f'{file.name} is not UTF-8 text (byte {error.start})') from None


def check_length(prompt, config, model):
    """Say once what happens past block_size, or refuse it: ValueError."""
    block_size, wpe = model.config.block_size, model.config.wpe
    if len(prompt) + config.max_new_tokens <= block_size:
        return
    what = f'{len(prompt)} prompt tokens + {config.max_new_tokens} new ones exceed block_size={block_size}'
    if config.overflow == 'error':
        raise ValueError(f'{what}: shorten them, or let the window slide with --overflow=slide')
    if len(prompt) > block_size:
        what += f', only the last {block_size} of the prompt are seen'
    anew = wpe in ('learned', 'sinusoidal') or model.config.stable_length < block_size
    how = 'encoded anew at every step, which is slow' if anew else 'the cache drops its oldest token'
    print(f'{what}: the window slides ({how})', file=sys.stderr)


def stream(tokens, tokenizer, stop):
    """Text of token ids as they come, in whole characters. Ends before `stop`; holds back what may be its beginning."""
    decoder = codecs.getincrementaldecoder('utf-8')(errors='replace')
    held = ''
    for token in tokens:
        held += decoder.decode(tokenizer.decode_bytes([token]))
        if stop and stop in held:
            yield held[:held.index(stop)]
            return
        keep = next((n for n in range(min(len(stop), len(held)), 0, -1) if held.endswith(stop[:n])), 0) if stop else 0
        yield held[:len(held) - keep]
        held = held[len(held) - keep:]
    yield held + decoder.decode(b'', final=True)


def main(argv=None):
    config, rest = configure(SampleConfig, sys.argv[1:] if argv is None else argv)
    if rest:
        raise ValueError(f'{rest[0]} is no config file (they end in .py) and no --key=value; a run folder is given as --out_dir={rest[0]}')
    nothing = idle(config, ('top_k', 'top_p', 'seed'), 'at --temperature=0') if config.temperature == 0 else []
    nothing += idle(config, ('batch_size',), 'for --num_samples=1') if config.num_samples == 1 else []
    for line in nothing:
        print(f'warning: --{line}', file=sys.stderr)
    device_name, why_device = device.resolve_device(config.device)
    model, tokenizer, found = checkpoint.load_model(config.out_dir, config.step, device_name)
    dtype, why_dtype = device.resolve_dtype(config.dtype, device_name, model.config.n_embd)
    model.to(getattr(torch, dtype))  # reading the weights is what takes the time: half the bytes, half the time
    if config.start is None:
        config.start = default_prompt(tokenizer)
    prompt = tokenizer.encode_prompt(read_prompt(config.start))
    if not prompt:
        raise ValueError('the prompt is empty: give --start=TEXT, at least one character')
    if max(prompt) >= model.config.vocab_size:
        raise ValueError('this model was trained without the separator <|endoftext|>: leave it out')
    tokenizer.encode_prompt(config.stop or '')  # refuses a text that the vocabulary cannot spell: it would never come
    check_length(prompt, config, model)
    print(f'{config.out_dir}, step {found.step}, {model.parameter_report()}', file=sys.stderr)

    steps = -(-config.num_samples // config.batch_size) * config.max_new_tokens
    compiled, why_compile = compiling.resolve_step(config.compile, model, device_name, steps)
    print(f'device: {device_name} ({why_device}); dtype: {dtype} ({why_dtype}); compile: {compiled} ({why_compile})', file=sys.stderr)
    step = compiling.compile_step(model, device_name, config.compile) if compiled else None
    idx, drawn, started = torch.tensor([prompt], device=device_name), 0, time.perf_counter()

    def draw(seed, rows=1):
        """Tokens of so many samples, (rows, 1) each."""
        nonlocal drawn
        generator = torch.Generator(device=device_name).manual_seed(seed)
        for tokens in model.generate(idx.repeat(rows, 1), config.max_new_tokens, config.temperature, config.top_k, config.top_p, generator,
                                     step=step):
            drawn += rows
            yield tokens

    with device.without_cudnn():
        for n in range(0, config.num_samples, config.batch_size):
            rows = min(config.batch_size, config.num_samples - n)
            together = torch.cat(list(draw(config.seed + n, rows)), dim=1).tolist() if rows > 1 else [map(int, draw(config.seed + n))]
            for i, tokens in enumerate(together, n + 1):
                if config.num_samples > 1:
                    print(f'--- sample {i}')
                print(tokenizer.decode(prompt), end='', flush=True)
                for text in stream(tokens, tokenizer, config.stop):
                    print(text, end='', flush=True)
                print(flush=True)
    seconds = time.perf_counter() - started
    print(f'{drawn:,} tokens in {seconds:.1f} s: {drawn / seconds:,.0f} tokens/s', file=sys.stderr)


if __name__ == '__main__':
    run(main)
