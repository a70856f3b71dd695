"""GPT-2 in one file, with a selectable position scheme.

The model is GPT-2 (Radford et al. 2019): pre-norm blocks, tied input and output embeddings, tanh GELU. What can be chosen is how it
learns where a token stands: `wpe = 'learned' | 'sinusoidal' | 'rope' | 'none' | 'alibi'`. The scheme touches the model in three
places, marked "position scheme 1/3" to "3/3" below; everything else is the same code and, at the same seed, the same weights.

This file needs torch alone and can be copied out on its own.
Shapes in comments: B batch, T tokens, C n_embd, H n_head, D = C/H head size, V vocabulary, L n_layer.
"""
import hashlib
import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, '_linear_pointwise')  # the op that torch.compile uses
LARGE_MATRIX = 2**20  # numbers; smaller ones stay in a CPU's caches


@dataclass
class GPTConfig:
    block_size: int = 1024      # trained context length, tokens
    vocab_size: int = 50257     # tokens the tokenizer knows (train.py takes it from the data)
    vocab_multiple: int = 1     # pad the embedding's rows to a multiple of this (128 is fast on CUDA); padding is never predicted
    n_layer: int = 12           # transformer blocks
    n_head: int = 12            # attention heads a block
    n_embd: int = 768           # width
    dropout: float = 0.0        # 0 for pretraining, 0.1 to 0.2 when the data is seen many times
    bias: bool = True           # biases in Linear and LayerNorm, as GPT-2 has them; False is a little faster
    wpe: Literal['learned', 'sinusoidal', 'rope', 'none', 'alibi'] = 'learned'  # position scheme
    wpe_std: float = 0.02       # learned: initial std of the table (0.02 in Hugging Face and nanoGPT; OpenAI's code used 0.01)
    # A unit sinusoid has RMS 0.71 and would bury token embeddings of std 0.02: 99.9 % of the sum would be position. 0.02*sqrt(2)
    # gives it RMS 0.02, the amplitude at which a learned table starts.
    wpe_scale: float = 0.02 * math.sqrt(2)  # sinusoidal: amplitude of the table (1.0 = as in "Attention is all you need")
    sinusoidal_factor: float = 1.0  # sinusoidal: positions are divided by this (position interpolation)
    rope_base: float = 10000.0  # rope: wavelengths run from 2*pi to 2*pi*base tokens
    # how rope goes past the length it was trained at; extend.py sets these
    rope_scaling: Literal['none', 'linear', 'ntk', 'dynamic', 'yarn', 'llama3'] = 'none'
    rope_factor: float = 1.0    # how many times longer; 1 is plain rope whatever the method
    rope_trained: int | None = None  # tokens of context that scaling starts from; none = block_size
    yarn_beta_fast: float = 32.0  # yarn: pairs that turn more often than this within rope_trained are left alone
    yarn_beta_slow: float = 1.0   # yarn: pairs that turn less often than this are interpolated
    yarn_attention: float | None = None  # yarn: cos and sin are multiplied by this; none = 0.1 ln(rope_factor) + 1
    llama3_low: float = 1.0     # llama3: as yarn_beta_slow
    llama3_high: float = 4.0    # llama3: as yarn_beta_fast

    def problems(self):
        """What is wrong with these settings: one sentence each, naming the field, its value and what would be right."""
        found, inf = [], math.inf
        for name in ('wpe', 'rope_scaling'):
            choices = get_args(GPTConfig.__annotations__[name])
            if getattr(self, name) not in choices:
                found.append(f'{name}={getattr(self, name)} must be one of {", ".join(choices)}')
        for names, fits, right in (  # in a form that nan does not pass
                ('block_size vocab_size vocab_multiple n_layer n_head n_embd', lambda x: x >= 1, 'at least 1'),
                ('dropout', lambda x: 0 <= x < 1, 'at least 0 and below 1'),
                ('wpe_std wpe_scale', lambda x: 0 <= x < inf, 'at least 0'),
                ('sinusoidal_factor rope_factor', lambda x: 1 <= x < inf, 'at least 1'),
                ('rope_base', lambda x: 1 < x < inf, 'above 1 (10000 is usual)'),
                ('rope_trained', lambda x: x is None or x >= 1, 'at least 1'),
                ('yarn_attention', lambda x: x is None or 0 < x < inf, 'above 0')):
            found += [f'{name}={getattr(self, name)} must be {right}' for name in names.split() if not fits(getattr(self, name))]
        for low, high in (('yarn_beta_slow', 'yarn_beta_fast'), ('llama3_low', 'llama3_high')):
            if not 0 < getattr(self, low) < getattr(self, high) < inf:
                found.append(f'{low}={getattr(self, low)} must be above 0 and below {high}={getattr(self, high)}')
        if self.wpe == 'rope' and self.rope_factor > 1:
            if self.rope_scaling == 'none':
                found.append(f'rope_factor={self.rope_factor} does nothing without a rope_scaling')
            reach = self.rope_factor * (self.rope_trained or self.block_size)  # dynamic and llama3 go further
            if self.rope_scaling in ('linear', 'ntk', 'yarn') and reach < self.block_size * (1 - 1e-9):  # more than rounding
                found.append(f'rope_factor={self.rope_factor} times rope_trained={self.rope_trained} ends at {reach:g}, before '
                             f'block_size={self.block_size}: use rope_factor={self.block_size / self.rope_trained:g}')
        if self.n_head >= 1 and self.n_embd >= 1:
            step = self.n_head * (2 if self.wpe == 'rope' else 1)
            if self.n_embd % step:
                below, above = self.n_embd // step * step, -(-self.n_embd // step) * step
                near = ' or '.join(f'n_embd={n}' for n in (below, above) if n)
                need = 'n_embd/n_head must be even for rope' if self.wpe == 'rope' else 'n_embd must be a multiple of n_head'
                found.append(f'n_embd={self.n_embd} does not fit n_head={self.n_head}: {need}; nearest: {near}')
        return found

    def __post_init__(self):
        found = self.problems()
        if found:
            raise ValueError('\n'.join(found))

    @property
    def padded_vocab_size(self):
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def stable_length(self):
        """Tokens up to which a sequence has the angles of every shorter one; past it dynamic scaling changes all with each token."""
        dynamic = self.wpe == 'rope' and self.rope_scaling == 'dynamic' and self.rope_factor > 1
        return (self.rope_trained or self.block_size) if dynamic else math.inf


# ---- position tables: pure functions of the positions, computed in float64 on the CPU and rounded once to float32 -------------------

def sinusoidal_table(start, end, n_embd, factor=1.0):
    """Rows start..end-1 of the interleaved table of Vaswani et al. 2017, section 3.5: sin in even columns, cos in odd ones.

    Returns float32 (end-start, n_embd), amplitude 1, positions divided by factor. An odd width has one cosine column less."""
    position = torch.arange(start, end, dtype=torch.float64, device='cpu') / factor
    frequency = 10000.0 ** (-torch.arange(0, n_embd, 2, dtype=torch.float64, device='cpu') / n_embd)
    angle = position[:, None] * frequency                        # (T, ceil(C/2))
    table = torch.empty(end - start, n_embd, dtype=torch.float32, device='cpu')
    table[:, 0::2] = angle.sin()
    table[:, 1::2] = angle.cos()[:, :n_embd // 2]
    return table


def rope_frequencies(config, length):
    """Radians a token by which each of the D/2 pairs of a head turns, float64, and the factor on cos and sin (1 but for yarn).

    Scaling slows the pairs down so that rope_factor times as many tokens stay within the angles seen in training:
    linear (Chen et al. 2023) all alike; ntk (bloc97 2023) by a larger base: the fastest not at all, the slowest by the whole factor;
    dynamic likewise, by factor * length / rope_trained - (factor - 1), with `length` that of the sequence at hand, as in transformers;
    yarn (Peng et al. 2024) and llama3 (Dubey et al. 2024) by how often a pair turns within rope_trained: often, not at all; hardly once,
    by the whole factor; a ramp between."""
    method, factor, trained = config.rope_scaling, config.rope_factor, config.rope_trained or config.block_size
    base, size = config.rope_base, config.n_embd // config.n_head
    pair = torch.arange(size // 2, dtype=torch.float64, device='cpu')
    frequency = base ** (-2 * pair / size)
    if method == 'none' or factor == 1:
        return frequency, 1.0
    if method == 'linear':
        return frequency / factor, 1.0
    if method in ('ntk', 'dynamic'):
        if method == 'dynamic':
            factor = max(1.0, factor * length / trained - (factor - 1))
        return (base * factor ** (size / max(size - 2, 1))) ** (-2 * pair / size), 1.0
    if method == 'llama3':
        turns = trained * frequency / (2 * math.pi)              # within the trained length
        keep = ((turns - config.llama3_low) / (config.llama3_high - config.llama3_low)).clamp(0, 1)
        return keep * frequency + (1 - keep) * frequency / factor, 1.0
    # yarn: the ramp is linear in the index of the pair, between those that turn beta_fast and beta_slow times, as in the authors' code
    low, high = (size * math.log(trained / (beta * 2 * math.pi)) / (2 * math.log(base))
                 for beta in (config.yarn_beta_fast, config.yarn_beta_slow))
    low, high = max(math.floor(low), 0), min(math.ceil(high), size - 1)
    keep = 1 - ((pair - low) / max(high - low, 0.001)).clamp(0, 1)
    attention = 0.1 * math.log(factor) + 1 if config.yarn_attention is None else config.yarn_attention
    return keep * frequency + (1 - keep) * frequency / factor, attention


def rope_table(start, end, frequency, attention=1.0):
    """cos and sin of the angles by which RoPE (Su et al. 2021) turns the pairs of a head at positions start..end-1.

    Returns float32 (2, end-start, D/2): cos, then sin, both times `attention`."""
    position = torch.arange(start, end, dtype=torch.float64, device='cpu')
    angle = position[:, None] * frequency                        # (T, D/2)
    return (torch.stack((angle.cos(), angle.sin())) * attention).float()


def alibi_slopes(n_head):
    """Slopes of ALiBi (Press et al. 2022), float32 (H,): 2^(-8k/n) for n a power of two; else those of the power below, and every
    second one of the power above for the heads that are left."""
    power = 2 ** math.floor(math.log2(n_head))
    slopes = [2.0 ** (-8 * k / power) for k in range(1, power + 1)]
    slopes += [2.0 ** (-4 * k / power) for k in range(1, 2 * power + 1, 2)][:n_head - power]
    return torch.tensor(slopes, dtype=torch.float32, device='cpu')


def rotate(x, cos, sin):
    """Turn the pairs (x[i], x[i + D/2]) of x (..., D) by the angles in cos and sin (broadcastable to (..., D/2)).

    The pairing is half-split (GPT-NeoX, Llama). cos and sin are float32, so the products are float32 whatever x is; the result
    has x's dtype."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)


# ---- the model ----------------------------------------------------------------------------------------------------------------------

class KVCache:
    """Keys and values of the last `capacity` tokens, for one-token steps after a prefill.

    `position` counts every token ever seen and is the position of the next one; it does not depend on what is retained. A full cache
    overwrites its oldest slot: order does not matter to attention, since a key was rotated at its absolute position.
    fixed: one-token steps look at a multiple of so many slots, whether filled or not, so that a compiled step seldom meets a new shape."""

    def __init__(self, n_layer, capacity, fixed=None):
        self.capacity, self.fixed, self.position = capacity, fixed, 0
        self.keys, self.values = [None] * n_layer, [None] * n_layer  # allocated by the first call: (B, H, capacity, D) each

    def place(self, T, device):
        """Set `slots`, where T tokens from `position` on go, and `look`, how many slots they look at. Returns the positions that these then
        hold, int64 (look,), negative for those still empty."""
        end = self.position + T
        if T > 1 and end > self.capacity:
            raise ValueError(f'{T} tokens at position {self.position} do not fit a cache of {self.capacity}: pass them one by one')
        self.slots = torch.arange(self.position, end, device=device) % self.capacity
        self.look = min(-(-end // self.fixed) * self.fixed if self.fixed and T == 1 else end, self.capacity)
        slot = torch.arange(self.look, device=device)
        return end - 1 - (end - 1 - slot) % self.capacity

    def append(self, layer, k, v):
        """Store k, v (B, H, T, D) in the slots of place(). Returns what the first `look` slots hold, (B, H, look, D) each."""
        if self.keys[layer] is None:
            shape = (k.size(0), k.size(1), self.capacity, k.size(3))
            self.keys[layer], self.values[layer] = k.new_zeros(shape), v.new_zeros(shape)
            if self.fixed and k.is_cuda:                          # a CUDA graph may write into them where they are
                torch._dynamo.mark_static_address(self.keys[layer], guard=False)
                torch._dynamo.mark_static_address(self.values[layer], guard=False)
        self.keys[layer][:, :, self.slots] = k
        self.values[layer][:, :, self.slots] = v
        return self.keys[layer][:, :, :self.look], self.values[layer][:, :, :self.look]


class Linear(nn.Linear):
    """Empty when built: init_weights() draws, or a checkpoint is loaded."""

    def reset_parameters(self):
        pass

    def forward(self, x):
        """x (..., in) -> (..., out). For a few rows, as in a sampling step, torch's own float32 product reads a large matrix from a CPU's
        memory at half the speed of oneDNN's; for small matrices it is the faster one."""
        few = x.numel() <= 32 * x.size(-1) and self.weight.numel() >= LARGE_MATRIX
        plain = x.device.type == 'cpu' and x.dtype == self.weight.dtype == torch.float32 and not torch.is_autocast_enabled('cpu')
        if few and plain and ONEDNN and not (torch.is_grad_enabled() or torch.compiler.is_compiling()):
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, 'none', [], '')
        return super().forward(x)


class Embedding(nn.Embedding):
    """Empty when built, as Linear is."""

    def reset_parameters(self):
        pass


class CausalSelfAttention(nn.Module):

    def __init__(self, config, layer):
        super().__init__()
        self.n_head, self.dropout, self.layer = config.n_head, config.dropout, layer
        self.c_attn = Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x, rope=None, mask=None, cache=None):
        B, T, C = x.size()
        qkv = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head)
        q, k, v = qkv.unbind(2)                                   # (B, T, H, D) each
        if rope is not None:                                      # position scheme 3/3, rope: queries and keys turn, values never
            q, k = rotate(qkv[:, :, :2], *rope).unbind(2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, T, D) each
        if cache is not None:
            k, v = cache.append(self.layer, k, v)                 # (B, H, S, D), S >= T
        if mask is not None and mask.is_floating_point():
            mask = mask.to(q.dtype)
        dropout = self.dropout if self.training else 0.0
        if q.dtype == torch.bfloat16 and q.device.type == 'cpu' and mask is None and 1 < T <= 512:
            y = short_attention(q, k, v, dropout)
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=T > 1 and mask is None, dropout_p=dropout)
        y = y.transpose(1, 2).reshape(B, T, C)                    # heads side by side again
        return self.resid_dropout(self.c_proj(y))


def short_attention(q, k, v, dropout):
    """Causal attention in bf16 throughout, for a CPU: its own kernel works in float32 there, at less than half the speed up to T=512."""
    T = q.size(2)
    with torch.autocast('cpu', enabled=False):                    # it would take the softmax in float32
        scores = (q * q.size(3) ** -0.5) @ k.transpose(2, 3)      # (B, H, T, T)
        scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1), -torch.inf)
        return F.dropout(scores.softmax(dim=-1), dropout) @ v


class MLP(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.c_fc = Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.gelu = nn.GELU(approximate='tanh')
        self.c_proj = Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):

    def __init__(self, config, layer):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config, layer)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x, rope=None, mask=None, cache=None):
        x = x + self.attn(self.ln_1(x), rope, mask, cache)
        x = x + self.mlp(self.ln_2(x))
        return x


class GPT(nn.Module):
    """GPT-2. Each parameter is drawn from (seed, its name) alone, so models that differ in `wpe` share every other weight bit for bit:

        wte.weight (= lm_head.weight), c_attn.weight, c_fc.weight    N(0, 0.02)
        c_proj.weight (attn and mlp)                                 N(0, 0.02/sqrt(2 n_layer)): they add up on the residual stream
        wpe.weight (learned only)                                    N(0, wpe_std)
        biases 0, LayerNorm weights 1

    seed None leaves that out, for a caller who loads weights.
    """

    def __init__(self, config, seed=1337):
        super().__init__()
        self.config, self.checkpoint_blocks = config, False       # True: less memory in training, see forward()
        self.transformer = nn.ModuleDict(dict(
            wte=Embedding(config.padded_vocab_size, config.n_embd),
            drop=nn.Dropout(config.dropout),
            h=nn.ModuleList(Block(config, layer) for layer in range(config.n_layer)),
            ln_f=nn.LayerNorm(config.n_embd, bias=config.bias),
        ))
        self.lm_head = Linear(config.n_embd, config.padded_vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight         # weight tying
        if config.wpe == 'learned':                               # position scheme 1/3: only 'learned' owns a parameter
            self.transformer.wpe = Embedding(config.block_size, config.n_embd)
        self.build_tables()
        if seed is not None:
            self.init_weights(seed)

    def build_tables(self):
        """The table of 'sinusoidal', 'rope' or 'alibi': a float32 buffer on the weights' device, never stored in a checkpoint."""
        if self.config.wpe in ('sinusoidal', 'rope', 'alibi'):
            table = self.compute_table(0, min(self.config.block_size, self.config.stable_length))
            self.register_buffer('wpe_table', table.to(self.lm_head.weight.device), persistent=False)

    def compute_table(self, start, end):
        config = self.config
        if config.wpe == 'alibi':
            return alibi_slopes(config.n_head)                    # (H,), whatever the positions
        if config.wpe == 'sinusoidal':
            return sinusoidal_table(start, end, config.n_embd, config.sinusoidal_factor) * config.wpe_scale  # (T, C)
        return rope_table(start, end, *rope_frequencies(config, length=end))  # (2, T, D/2)

    def _apply(self, fn, recurse=True):
        """.to(bfloat16) and .half() cast every buffer, to_empty() empties it and unties weights: tie, and build the tables in float32."""
        super()._apply(fn, recurse)
        self.lm_head.weight = self.transformer.wte.weight
        self.build_tables()
        return self

    @torch.no_grad()
    def init_weights(self, seed):
        for name, parameter in self.named_parameters():
            if name.endswith('bias'):
                parameter.zero_()
            elif parameter.dim() == 1:                            # LayerNorm
                parameter.fill_(1.0)
            else:
                std = 0.02
                if name.endswith('c_proj.weight'):
                    std = 0.02 / math.sqrt(2 * self.config.n_layer)
                if name == 'transformer.wpe.weight':
                    std = self.config.wpe_std
                digest = hashlib.sha256(f'{seed} {name}'.encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], 'little'))
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))

    def position_table(self, start, end):
        """Rows start..end-1 of the table for a sequence that ends there. Beyond the stored ones they are computed for the call and not
        kept: no state, no surprise."""
        if end <= self.wpe_table.size(-2):
            return self.wpe_table[..., start:end, :]
        return self.compute_table(start, end).to(self.wpe_table.device)

    def positions(self, start, T, cache=None):
        """What tells T tokens from `start` on where they stand: (wpe, rope, mask), as hidden() takes them; mask None is causal.

        Raises ValueError where a learned table has no row for a position; other schemes are defined at every one."""
        config, end, wpe, rope, mask, device = self.config, start + T, None, None, None, self.lm_head.weight.device
        if config.wpe == 'learned' and end > config.block_size:   # here, since on CUDA it would be a device assert
            raise ValueError(f'position {end - 1} is outside the learned table: block_size={config.block_size} has positions 0 to '
                             f'{config.block_size - 1}')
        if cache is not None and start > 0 and end > config.stable_length:
            raise ValueError(f'{end} tokens turn by other angles than the {start} in the cache: past {config.stable_length} dynamic '
                             'scaling changes every key with every token, so pass the whole sequence to a new cache')
        if config.wpe == 'learned':                               # position scheme 2/3: added to the tokens, or handed to attention
            wpe = self.transformer.wpe.weight[start:end]          # (T, C)
        elif config.wpe == 'sinusoidal':
            wpe = self.position_table(start, end)
        elif config.wpe == 'rope':
            cos, sin = self.position_table(start, end)            # (T, D/2) each
            rope = cos[:, None, None], sin[:, None, None]         # over (B, T, q|k, H, D/2)
        if cache is not None or config.wpe == 'alibi':
            query = torch.arange(start, end, device=device)
            key = query if cache is None else cache.place(T, device)
            distance = query[:, None] - key                       # (T, S)
            mask = (distance >= 0) & (key >= 0)
            if config.wpe == 'alibi':                             # position scheme 3/3, alibi: scores fall with distance
                mask = (-self.wpe_table[:, None, None] * distance).masked_fill(~mask, -torch.inf)[None]  # (1, H, T, S)
            elif start == 0 and T > 1 or not cache.fixed and T == 1:
                mask = None                                       # causal, or all of it
        return wpe, rope, mask

    def hidden(self, idx, wpe, rope, mask, cache=None):
        """What lm_head reads of token ids idx (B, T) at the places that positions() gave: (B, T, C)."""
        x = self.transformer.wte(idx)                             # (B, T, C)
        if wpe is not None:
            x = (x + wpe).to(x.dtype)
        if x.is_cuda and torch.is_autocast_enabled('cuda') and torch.get_autocast_dtype('cuda') == torch.bfloat16:
            x = x.bfloat16()                                      # the residual stream too: half the memory traffic between matrices
        x = self.transformer.drop(x)
        for block in self.transformer.h:
            recompute = self.checkpoint_blocks and self.training  # in the backward pass, instead of keeping what is inside a block
            x = checkpoint(block, x, rope, mask, use_reentrant=False) if recompute else block(x, rope, mask, cache)
        return self.transformer.ln_f(x)

    def logits(self, x):
        return self.lm_head(x)[..., :self.config.vocab_size]      # rows that pad the vocabulary take no part

    def forward(self, idx, targets=None, *, start=0, cache=None, last_only=False, reduction='mean', step=None):
        """Logits of token ids idx (B, T), or their loss against targets (B, T).

        start: position of the first token (with a cache: where the cache stands). last_only: logits of the last token alone.
        step: logits(hidden(...)) as one function, compiled, for a token after those in the cache. Returns logits (B, T or 1, V); with
        targets the cross-entropy in nats, reduction 'mean' (scalar, targets of -1 left out) or 'none' (B, T). Raises ValueError as
        positions() does."""
        B, T = idx.size()
        wpe, rope, mask = self.positions(start if cache is None else cache.position, T, cache)
        x = (step or self.hidden)(idx, wpe, rope, mask, cache)
        if cache is not None:
            cache.position += T
        if step or targets is None:
            return x if step else self.logits(x[:, -1:] if last_only else x)
        x, targets = x.flatten(0, 1), targets.flatten()           # (B*T, C), (B*T,)
        pieces = zip(x.split(1024), targets.split(1024)) if reduction == 'none' else [(x, targets)]  # evaluation holds few logits at once
        loss = [F.cross_entropy(self.logits(x).float(), targets, ignore_index=-1, reduction=reduction) for x, targets in pieces]
        return torch.cat(loss).view(B, T) if reduction == 'none' else loss[0]

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, generator=None, use_cache=True, step=None):
        """Continue idx (B, T), T >= 1: yields max_new_tokens tensors (B, 1). Dropout is off meanwhile.

        Past block_size the window slides. 'learned' and 'sinusoidal' re-encode the last block_size tokens at every step, as positions
        shift under them; so does rope under dynamic scaling past rope_trained, as all angles change. The others go on with the cache:
        positions keep growing, the oldest key is dropped, and what the kept keys of layers above the first once saw of dropped tokens
        stays in them. Without use_cache every scheme re-encodes. step: as forward() takes it, for the tokens after the first."""
        if idx.size(1) == 0:
            raise ValueError('nothing to continue: the prompt is empty')
        block_size, was_training = self.config.block_size, self.training
        capacity = min(-(-(idx.size(1) + max_new_tokens) // 128) * 128, block_size)  # few shapes for few compilations
        looked_at = max(256, -(-capacity // 4)) if idx.is_cuda else capacity  # by a compiled step: at most 4 graphs; on a CPU one
        self.eval()
        try:
            window = idx[:, -block_size:]
            cache, fresh = None, window
            cacheable = min(self.config.stable_length, block_size if self.config.wpe in ('learned', 'sinusoidal') else math.inf)
            for _ in range(max_new_tokens):
                if cache is None or cache.position >= cacheable:
                    cache, fresh = KVCache(self.config.n_layer, capacity, step and looked_at) if use_cache else None, window
                logits = self(fresh, cache=cache, last_only=True, step=step if cache and cache.position else None)[:, -1]  # (B, V)
                fresh = sample_token(logits, temperature, top_k, top_p, generator)
                window = torch.cat((window, fresh), dim=1)[:, -block_size:]
                yield fresh
        finally:
            self.train(was_training)

    # ---- counts and optimizer -------------------------------------------------------------------------------------------------------

    def parameter_counts(self):
        """Parameters by kind: total (padding left out), wpe (the position table), padding (rows that pad the vocabulary)."""
        everything = sum(p.numel() for p in self.parameters())
        wpe = self.transformer.wpe.weight.numel() if self.config.wpe == 'learned' else 0
        padding = (self.config.padded_vocab_size - self.config.vocab_size) * self.config.n_embd
        tokens = self.config.vocab_size * self.config.n_embd
        rest = sum(p.numel() for name, p in self.named_parameters() if '.h.' in name or '.ln_f.' in name)
        assert tokens + padding + wpe + rest == everything, 'a parameter is counted nowhere or twice'
        return {'total': everything - padding, 'wpe': wpe, 'padding': padding}

    def parameter_report(self):
        """One line: how large the model is and what share of it is the position table."""
        count = self.parameter_counts()
        line = f'{count["total"]:,} parameters, position table ({self.config.wpe}) {count["wpe"]:,} = {count["wpe"] / count["total"]:.3%}'
        if count['padding']:
            line += f'; and {count["padding"]:,} in {self.config.padded_vocab_size - self.config.vocab_size} rows that pad the vocabulary'
        return line

    def flops_per_token(self):
        """Floating-point operations a token of one training step: 6 N + 12 L C T (PaLM, appendix B), N without wpe."""
        count, config = self.parameter_counts(), self.config
        return 6 * (count['total'] - count['wpe']) + 12 * config.n_layer * config.n_embd * config.block_size

    def optimizer_groups(self, weight_decay):
        """Matrices (wte and wpe among them, as in nanoGPT) decay; biases and LayerNorm weights do not."""
        trained = [p for p in self.parameters() if p.requires_grad]
        decay, no_decay = [p for p in trained if p.dim() >= 2], [p for p in trained if p.dim() < 2]
        assert len(decay) + len(no_decay) == len(trained), 'a parameter is in no group or in two'
        return [{'params': decay, 'weight_decay': weight_decay}, {'params': no_decay, 'weight_decay': 0.0}]


def sample_token(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """Draw one token id a row from logits (B, V): returns (B, 1). temperature 0 takes the likeliest; top_k above V keeps all.

    top_p keeps the smallest set of likeliest tokens whose probabilities sum to at least top_p (Holtzman et al. 2020)."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits.float()
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / max(temperature, 1e-30)  # the likeliest at 0, so that none overflows
    order = None                                                  # token ids of the columns, where these are not the ids themselves
    if top_k is not None and top_k < logits.size(-1):
        logits, order = logits.topk(top_k, dim=-1)                # (B, top_k), falling; the rest need not be looked at any more
    if top_p is not None and top_p < 1.0:
        logits, order = logits.sort(dim=-1, descending=True) if order is None else (logits, order)
        p = logits.softmax(dim=-1)
        logits = logits.masked_fill(p.cumsum(dim=-1) - p >= max(top_p, 1e-9), -torch.inf)  # what likelier ones already cover; never all
    p = logits.softmax(dim=-1)                                    # what torch.multinomial does, but for its checks: on CUDA they would wait
    drawn = (p / torch.empty_like(p).exponential_(generator=generator)).argmax(dim=-1, keepdim=True)
    return drawn if order is None else order.gather(-1, drawn)
