"""How transformers lays out the models that nanoPE's schemes are equal to: settings, names and shapes of tensors.

    gpt2       learned, sinusoidal and none: the table stands in wpe, zeros for none. Matrices are transposed (Conv1D)
    gpt_neox   rope. The rows of c_attn are heads x (q, k, v) there, ours (q, k, v) x heads
    bloom      alibi, rows as in gpt_neox. Its LayerNorm of the token embeddings is made to do nothing: see bloom_power()

MPT has an exact GELU and Falcon divides ALiBi's slopes by sqrt(head size): neither can hold our alibi.
"""
import math
import re
from dataclasses import fields

import torch
from torch.nn import functional as F

from model import GPT, GPTConfig, sinusoidal_table

KIND = {'learned': 'gpt2', 'sinusoidal': 'gpt2', 'none': 'gpt2', 'rope': 'gpt_neox', 'alibi': 'bloom'}
BLOCKS = {'ln_1': 'input_layernorm', 'attn.c_attn': 'attention.query_key_value', 'attn.c_proj': 'attention.dense',
          'ln_2': 'post_attention_layernorm', 'mlp.c_fc': 'mlp.dense_h_to_4h', 'mlp.c_proj': 'mlp.dense_4h_to_h'}
NAMES = {'gpt2': {},
         'gpt_neox': {'transformer.wte': 'gpt_neox.embed_in', 'transformer.h': 'gpt_neox.layers',
                      'transformer.ln_f': 'gpt_neox.final_layer_norm', **BLOCKS},
         'bloom': {'transformer.wte': 'transformer.word_embeddings',
                   **{ours: theirs.replace('attention.', 'self_attention.') for ours, theirs in BLOCKS.items()}}}
# Settings that the weights of a GPT-2 leave open. The position scheme is one of them: all weights but the table fit any.
FREE = frozenset(field.name for field in fields(GPTConfig)) - {'n_layer', 'n_head', 'n_embd', 'bias', 'dropout'}
HEADS = {'gpt2': 'lm_head.weight', 'gpt_neox': 'embed_out.weight', 'bloom': 'lm_head.weight'}  # tied to the tokens: left out


def their_name(name, kind):
    for ours, theirs in NAMES[kind].items():
        name = re.sub(rf'(^|\.){re.escape(ours)}\.', rf'\g<1>{theirs}.', name, count=1)
    return name


def turn(name, tensor, kind, outer, inner):
    """A tensor between the two layouts. outer, inner: (3, n_head) from ours to theirs, (n_head, 3) back."""
    if kind == 'gpt2':
        return tensor.t() if re.search(r'\.(c_attn|c_proj|c_fc)\.weight$', name) else tensor
    return tensor.unflatten(0, (outer, inner, -1)).transpose(0, 1).flatten(0, 2) if '.c_attn.' in name else tensor


def shapes(config):
    """{name: shape} of the parameters of a GPT with these settings; allocates nothing."""
    with torch.device('meta'):
        return {name: parameter.shape for name, parameter in GPT(config, seed=None).named_parameters()}


def table_of(config):
    """The rows that stand in a gpt2's wpe for a scheme without parameters: float32 (block_size, n_embd)."""
    if config.wpe == 'sinusoidal':
        return sinusoidal_table(0, config.block_size, config.n_embd, config.sinusoidal_factor) * config.wpe_scale
    return torch.zeros(config.block_size, config.n_embd)


def rope_parameters(config):
    """RoPE's settings under transformers' names. 'ntk' has none there: it is plain RoPE with a larger base."""
    method, factor, size = config.rope_scaling, config.rope_factor, config.n_embd // config.n_head
    found = {'rope_type': 'default', 'rope_theta': config.rope_base, 'partial_rotary_factor': 1.0}
    if method == 'none' or factor == 1:
        return found
    if method == 'ntk':
        return {**found, 'rope_theta': config.rope_base * factor ** (size / max(size - 2, 1))}
    found |= {'rope_type': method, 'factor': factor}
    if method in ('yarn', 'llama3'):
        found['original_max_position_embeddings'] = config.rope_trained or config.block_size
    if method == 'yarn':
        found |= {'beta_fast': config.yarn_beta_fast, 'beta_slow': config.yarn_beta_slow}
        found |= {'attention_factor': config.yarn_attention} if config.yarn_attention else {}
    if method == 'llama3':
        found |= {'low_freq_factor': config.llama3_low, 'high_freq_factor': config.llama3_high}
    return found


def to_config(config, separator, rows):
    """The config.json of a model with these settings, whose separator has this id, for `rows` tokens."""
    kind = KIND[config.wpe]
    common = {'model_type': kind, 'vocab_size': rows, 'bos_token_id': separator, 'eos_token_id': separator, 'dtype': 'float32',
              'tie_word_embeddings': True}
    if kind == 'gpt2':
        return {'architectures': ['GPT2LMHeadModel'], **common, 'n_positions': config.block_size, 'n_embd': config.n_embd,
                'n_layer': config.n_layer, 'n_head': config.n_head, 'activation_function': 'gelu_new', 'layer_norm_epsilon': 1e-5,
                **{f'{part}_pdrop': config.dropout for part in ('resid', 'embd', 'attn')}}
    dropouts = {'hidden_dropout': config.dropout, 'attention_dropout': config.dropout}
    if kind == 'bloom':
        return {'architectures': ['BloomForCausalLM'], **common, 'hidden_size': config.n_embd, 'n_layer': config.n_layer,
                'n_head': config.n_head, 'layer_norm_epsilon': 1e-5, 'seq_length': config.block_size, **dropouts}
    dynamic = config.rope_scaling == 'dynamic' and config.rope_factor > 1  # there, scaling starts at max_position_embeddings
    return {'architectures': ['GPTNeoXForCausalLM'], **common, 'hidden_size': config.n_embd, 'num_hidden_layers': config.n_layer,
            'num_attention_heads': config.n_head, 'intermediate_size': 4 * config.n_embd, 'hidden_act': 'gelu_new',
            'max_position_embeddings': config.rope_trained if dynamic and config.rope_trained else config.block_size,
            'layer_norm_eps': 1e-5, 'use_parallel_residual': False, 'attention_bias': True, 'rope_parameters': rope_parameters(config),
            **dropouts}


def bloom_power(tokens):
    """By which power of two to shrink token embeddings (V, C) so that a LayerNorm leaves them alone up to rounding.

    Bloom normalises them: (x - mean) / sqrt(variance + 1e-5). Where the variance is below 1e-5 * 2^-24 that is a multiplication by
    1/sqrt(1e-5), which the LayerNorm's own weight takes back; the mean is lost, but every reader of the residual stream is a
    LayerNorm and subtracts it anyhow. The final LayerNorm makes up for the smaller output matrix. All that is exact in float32 and in
    bfloat16's range, not in float16's."""
    variance = tokens.var(dim=1, correction=0).max().item()
    return max(math.ceil(math.log2(max(variance, 1e-30) / 1e-5) / 2 + 12), 0)


def to_theirs(config, tensors, rows):
    """The tensors of transformers' model from ours (dict by name); `rows` tokens, those beyond vocab_size zero."""
    kind, found = KIND[config.wpe], {}
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    tokens = tensors['transformer.wte.weight'][:config.vocab_size]
    tensors['transformer.wte.weight'] = F.pad(tokens, (0, 0, 0, rows - config.vocab_size))
    if kind == 'gpt2' and config.wpe != 'learned':
        tensors['transformer.wpe.weight'] = table_of(config)
    for name in [name for name in tensors if name.endswith('.weight') and not re.search(r'\.(wte|wpe)\.', name)]:
        tensors.setdefault(name.replace('.weight', '.bias'), torch.zeros(len(tensors[name])))  # transformers cannot leave biases out
    if kind == 'bloom':
        power = bloom_power(tokens)
        tensors['transformer.wte.weight'] = tensors['transformer.wte.weight'] * 2.0 ** -power
        for name in ('transformer.ln_f.weight', 'transformer.ln_f.bias'):
            tensors[name] = tensors[name] * 2.0 ** power
        found['transformer.word_embeddings_layernorm.weight'] = torch.full((config.n_embd,), math.sqrt(1e-5) * 2.0 ** power)
        found['transformer.word_embeddings_layernorm.bias'] = torch.zeros(config.n_embd)
    for name, tensor in tensors.items():
        found[their_name(name, kind)] = turn(name, tensor, kind, 3, config.n_head).contiguous()
    return found


def undo_bloom(found, weight, bias):
    """Take bloom_power() back, in place. Returns what is wrong, a list of at most one sentence."""
    usable = weight is not None and weight.numel() and weight.isfinite().all()
    power = round(math.log2(max(weight.flatten()[0].item() / math.sqrt(1e-5), 1.0))) if usable else 0
    if not usable or bias is None or bias.any() or not (weight == weight.new_tensor(math.sqrt(1e-5) * 2.0 ** power)).all():
        return ['word_embeddings_layernorm does more than nothing: this was trained on elsewhere, or is a Bloom of its own']
    found['transformer.wte.weight'] *= 2.0 ** power
    for name in ('transformer.ln_f.weight', 'transformer.ln_f.bias'):
        found[name] *= 2.0 ** -power
    return []
