"""The same work for nanoPE and its peers, as functions to be timed: an update, a continued prompt, the memory that updates take."""
import contextlib
import importlib.util
import os
import sys
from types import SimpleNamespace

import numpy as np
import torch

from model import GPT, GPTConfig
from nanope import compiling, device, optim
from nanope.files import brief

# name: (n_layer, n_head, n_embd, block_size, vocab_size, rows)
SHAPES = {'tiny': (4, 4, 128, 64, 65, 12), 'baby': (6, 6, 384, 256, 65, 16), 'gpt2': (12, 12, 768, 1024, 50257, 1)}


def text_like(vocab_size, shape, seed=0):
    """Random ids as frequent as words are: the k-th has probability proportional to 1/k. int64 tensor."""
    p = 1 / np.arange(1, vocab_size + 1)
    return torch.from_numpy(np.random.default_rng(seed).choice(vocab_size, shape, p=p / p.sum()))


def cycle(vocab_size, rows, block_size, device_name, work, n=8):
    """A function that calls work(x, y) with another batch each time: x, y int64 (rows, block_size)."""
    ids, at = text_like(vocab_size, (n, rows, block_size + 1)).to(device_name), 0
    batches = [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in ids]

    def call():
        nonlocal at
        at = (at + 1) % n
        work(*batches[at])
    return call


# ---- nanoPE -----------------------------------------------------------------------------------------------------------------------------

def build(shape, wpe, block_size=None):
    n_layer, n_head, n_embd, T, vocab_size, _ = SHAPES[shape]
    return GPT(GPTConfig(block_size=block_size or T, vocab_size=vocab_size, n_layer=n_layer, n_head=n_head, n_embd=n_embd, bias=False,
                         wpe=wpe, vocab_multiple=128 if vocab_size == 50257 else 1))  # as config/gpt2_*.py and config/shakespeare_*.py


def our_step(shape, wpe, rows, device_name, dtype, compile, block_size=None, optimizer='adamw'):
    """A function that does one update as train.py does it, but for reading the batch."""
    model = build(shape, wpe, block_size).to(device_name).train()
    autocast = device.autocast(device_name, dtype)
    loss_of, *_ = compiling.compile_model(model, compile, rows, device_name, autocast, 0)
    optimizers = optim.build(SimpleNamespace(optimizer=optimizer, weight_decay=0.1, beta1=0.9, beta2=0.95, learning_rate=1e-4, muon_lr=1e-3,
                                             muon_momentum=0.95, muon_weight_decay=0.01), model, device_name)

    def step(x, y):
        with autocast():
            loss = loss_of(x, y)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.set_learning_rate(optimizers, 1e-4)
        optim.step(optimizers, (loss.detach() + norm).isfinite())
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
    return cycle(model.config.vocab_size, rows, model.config.block_size, device_name, step)


def our_sampling(shape, wpe, prompt, new_tokens, dtype, compiled):
    """(function that continues prompt (B, T) as sample.py does, bytes that a token's step reads of weights and cache on average)."""
    model = build(shape, wpe).to(prompt.device, getattr(torch, dtype)).eval()
    step = compiling.compile_step(model, prompt.device) if compiled else None
    config, width = model.config, model.lm_head.weight.element_size()
    cached = prompt.size(0) * 2 * config.n_layer * config.n_embd * (prompt.size(1) + new_tokens / 2)

    def sample():
        with device.without_cudnn():
            torch.cat(list(model.generate(prompt, new_tokens, 0.8, 200, step=step)), dim=1).cpu()
    weights = sum(p.numel() for p in model.parameters()) - model.parameter_counts()['wpe']  # of a table one row
    return sample, width * (weights + cached)


# ---- nanoGPT and transformers -----------------------------------------------------------------------------------------------------------

def load_peer(folder):
    """A nanoGPT checkout's model.py as a module. Raises ValueError where it is none."""
    path = os.path.join(folder, 'model.py')
    if not os.path.exists(path):
        raise ValueError(f'--peer={folder}: there is no model.py; give a checkout of nanoGPT')
    spec = importlib.util.spec_from_file_location('peer_model', path)
    module = importlib.util.module_from_spec(spec)
    sys.modules['peer_model'] = module                            # its dataclass looks itself up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever a file of others may raise
        raise ValueError(f'--peer={folder}: its model.py cannot be imported ({brief(error)})') from None
    try:
        with contextlib.redirect_stdout(None):
            config = module.GPTConfig(block_size=8, vocab_size=8, n_layer=1, n_head=1, n_embd=8, dropout=0.0, bias=False)
            module.GPT(config).configure_optimizers(0.1, 1e-4, (0.9, 0.95), 'cpu')
    except Exception as error:
        raise ValueError(f'{path} is not the model.py of nanoGPT ({brief(error)})') from None
    return module


def peer_model(peer, shape, device_name, block_size=None):
    n_layer, n_head, n_embd, T, vocab_size, _ = SHAPES[shape]
    vocab_size = 50304 if vocab_size == 50257 else vocab_size     # its train.py rounds it up, which is faster on a CPU too
    with contextlib.redirect_stdout(None):                        # it tells how large it is, amid the tables
        return peer.GPT(peer.GPTConfig(block_size=block_size or T, vocab_size=vocab_size, n_layer=n_layer, n_head=n_head, n_embd=n_embd,
                                       dropout=0.0, bias=False)).to(device_name)


def peer_dtype(device_name):
    """What nanoGPT's train.py and sample.py take by themselves."""
    return 'bfloat16' if torch.device(device_name).type == 'cuda' else 'float32'


def peer_step(peer, shape, rows, device_name, block_size=None):
    """One update as nanoGPT's train.py does it: on a CPU in float32 without compiling, on CUDA in bfloat16, compiled."""
    cuda = torch.device(device_name).type == 'cuda'
    model = peer_model(peer, shape, device_name, block_size).train()
    autocast = device.autocast(device_name, peer_dtype(device_name))
    with contextlib.redirect_stdout(None):
        optimizer = model.configure_optimizers(0.1, 1e-4, (0.9, 0.95), torch.device(device_name).type)
    loss_of = torch.compile(model) if cuda else model

    def step(x, y):
        with autocast():
            _, loss = loss_of(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return cycle(SHAPES[shape][4], rows, model.config.block_size, device_name, step)


def peer_sampling(peer, shape, prompt, new_tokens):
    """Continue prompt (B, T) as nanoGPT's sample.py does: on a CPU in float32, on CUDA in bfloat16."""
    model = peer_model(peer, shape, prompt.device).eval()
    autocast = device.autocast(prompt.device, peer_dtype(prompt.device))

    def sample():
        with autocast():
            model.generate(prompt, new_tokens, 0.8, 200).cpu()
    return sample


def transformers_sampling(prompt, new_tokens, dtype):
    """Continue prompt (B, T) by transformers' generate() of a GPT-2 124M with random weights. ImportError where it is not installed."""
    from transformers import GPT2Config, GPT2LMHeadModel
    model = GPT2LMHeadModel(GPT2Config()).to(prompt.device, getattr(torch, dtype)).eval()
    return lambda: model.generate(prompt, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=True, top_k=200, temperature=0.8,
                                  pad_token_id=50256, attention_mask=torch.ones_like(prompt)).cpu()


# ---- memory -----------------------------------------------------------------------------------------------------------------------------

def peak_memory(peer, shape, wpe, rows, block_size, dtype, compile, device_name, results):
    """In a process of its own: put the most memory that two updates take, bytes, into results; nanoGPT's where a checkout is given."""
    cuda = torch.device(device_name).type == 'cuda'
    if peer:
        work = peer_step(load_peer(peer), shape, rows, device_name, block_size)
    else:
        work = our_step(shape, wpe, rows, device_name, dtype, compile, block_size)
    work()
    if cuda:
        torch.cuda.reset_peak_memory_stats()                      # of what compiling took
    else:
        with contextlib.suppress(OSError), open('/proc/self/clear_refs', 'w', encoding='utf-8') as file:
            file.write('5')                                       # the same on Linux
    work()  # it has the optimizer's state from the start
    if cuda:
        return results.put(torch.cuda.max_memory_allocated())
    results.put(peak_rss())


def peak_rss():
    """The most memory that this process has had so far, bytes."""
    if os.path.exists('/proc/self/status'):  # what getrusage() says on Linux includes the process that started this one
        with open('/proc/self/status', encoding='utf-8') as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith('VmHWM'))
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss     # macOS has it in bytes
