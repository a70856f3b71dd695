"""The whole model under every position scheme: against transformers' GPT-2 and GPT-NeoX; laws, counts, compilation."""
import math
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

from model import GPT, GPTConfig
from runs import ROOT
from small import SCHEMES, build, close, exact_sinusoids, tokens

# ---- transformers as the oracle --------------------------------------------------------------------------------------


def as_gpt2(tensors, config):
    """Our tensors under the names of GPT2LMHeadModel, which are ours too; its Conv1D keeps matrices transposed."""
    turned = ('c_attn.weight', 'c_proj.weight', 'c_fc.weight')
    return {name: t.t() if name.endswith(turned) else t for name, t in tensors.items()}


def as_neox(tensors, config):
    """Our tensors under the names of GPTNeoXForCausalLM, where c_attn is heads x (q, k, v), not (q, k, v) x heads."""
    renamed = {'transformer.wte': 'gpt_neox.embed_in', 'transformer.h': 'gpt_neox.layers',
               'transformer.ln_f': 'gpt_neox.final_layer_norm',
               'ln_1': 'input_layernorm', 'attn.c_attn': 'attention.query_key_value', 'attn.c_proj': 'attention.dense',
               'ln_2': 'post_attention_layernorm', 'mlp.c_fc': 'mlp.dense_h_to_4h', 'mlp.c_proj': 'mlp.dense_4h_to_h'}
    theirs = {}
    for name, t in tensors.items():
        if 'c_attn' in name:
            t = t.unflatten(0, (3, config.n_head, -1)).transpose(0, 1).flatten(0, 2)
        for ours, their in renamed.items():
            name = name.replace(ours, their)
        theirs[name] = t
    return theirs


def oracle(model, length):
    """The same network in transformers, for `length` positions, and the function that names our tensors its way."""
    transformers, c = pytest.importorskip('transformers'), model.config
    if c.wpe == 'rope':
        rope = dict(rope_type='default', rope_theta=c.rope_base, partial_rotary_factor=1.0)
        theirs, as_theirs = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(
            vocab_size=c.vocab_size, hidden_size=c.n_embd, num_hidden_layers=c.n_layer, num_attention_heads=c.n_head,
            intermediate_size=4 * c.n_embd, max_position_embeddings=c.block_size, rope_parameters=rope,
            hidden_act='gelu_new', use_parallel_residual=False, tie_word_embeddings=True,
            attn_implementation='eager')), as_neox
    else:
        theirs, as_theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(
            vocab_size=c.vocab_size, n_embd=c.n_embd, n_layer=c.n_layer, n_head=c.n_head, n_positions=length,
            attn_implementation='eager')), as_gpt2
    state = as_theirs(model.state_dict(), c)
    if c.wpe in ('sinusoidal', 'none'):                           # GPT-2 with another table, or one of zeros
        amplitude = c.wpe_scale if c.wpe == 'sinusoidal' else 0.0
        state['transformer.wpe.weight'] = (amplitude * exact_sinusoids(range(length), c.n_embd)).float()
    if not c.bias:                                                # transformers cannot leave them out
        state.update({name: torch.zeros_like(p) for name, p in theirs.named_parameters() if name.endswith('bias')})
    theirs.load_state_dict(state, strict=True)
    return theirs.eval(), as_theirs


@pytest.mark.parametrize('std', [None, 0.15], ids=['own', 'large'])
@pytest.mark.parametrize('bias', [True, False], ids=['bias', 'bare'])
@pytest.mark.parametrize('wpe', SCHEMES)
def test_logits_equal_transformers(wpe, bias, std):
    model = build(wpe, std, bias=bias)
    length = model.config.block_size if wpe == 'learned' else 80  # the others are defined past block_size
    theirs, _ = oracle(model, length)
    close(model(tokens(3, length)), theirs(tokens(3, length)).logits)


@pytest.mark.parametrize('bias', [True, False], ids=['bias', 'bare'])
@pytest.mark.parametrize('wpe', SCHEMES)
def test_gradients_of_one_step_equal_transformers(wpe, bias):
    model = build(wpe, bias=bias)
    theirs, as_theirs = oracle(model, 32)
    x, y = tokens(3, 32), tokens(3, 32, seed=3)
    loss, their_loss = model(x, y), F.cross_entropy(theirs(x).logits.flatten(0, 1), y.flatten())
    close(loss, their_loss)
    loss.backward()
    their_loss.backward()
    gradients = as_theirs({name: p.grad for name, p in model.named_parameters()}, model.config)
    for name, parameter in theirs.named_parameters():             # one gradient for tied wte and lm_head: of both uses
        if name in gradients:
            close(gradients.pop(name), parameter.grad, atol=1e-5 * parameter.grad.abs().max().item() + 1e-8)
    assert not gradients, 'a parameter was not compared'


# ---- laws of every scheme --------------------------------------------------------------------------------------------

@pytest.mark.parametrize('wpe', SCHEMES)
def test_no_token_sees_the_future(wpe):
    model, idx = build(wpe), tokens(2, 32)
    changed = idx.clone()
    changed[:, 20] = (idx[:, 20] + 1) % 101
    difference = (model(idx) - model(changed)).abs().amax(dim=(0, 2))
    assert difference[:20].max() == 0 and difference[20:].min() > 1e-3


@pytest.mark.parametrize('wpe', SCHEMES)
def test_loss_of_a_prefix_is_the_prefix_of_the_loss(wpe):
    model, x, y = build(wpe), tokens(2, 32), tokens(2, 32, seed=3)
    losses = model(x, y, reduction='none')
    close(model(x[:, :11], y[:, :11], reduction='none'), losses[:, :11])
    close(model(x, last_only=True), model(x)[:, -1:])
    y[:, 11:] = -1                                                # left out of the mean
    close(model(x, y), losses[:, :11].mean())


# ---- initialisation, counts, optimizer -------------------------------------------------------------------------------

def test_schemes_share_every_other_weight_bit_for_bit():
    states = {wpe: GPT(build(wpe).config, seed=7).state_dict() for wpe in SCHEMES}
    assert states['learned'].pop('transformer.wpe.weight').shape == (32, 48)
    for state in states.values():                                 # and no other holds a trace of a table
        assert state.keys() == states['none'].keys()
        assert all(torch.equal(state[name], states['none'][name]) for name in state)
    other = GPT(build('none').config, seed=8).state_dict()
    drawn = [name for name in other if name.endswith('weight') and '.ln_' not in name]
    assert not any(torch.equal(other[name], states['none'][name]) for name in drawn)


def test_initial_weights():
    model = GPT(GPTConfig(block_size=512, vocab_size=500, n_layer=8, n_head=2, n_embd=128, wpe_std=0.01))
    assert model.lm_head.weight is model.transformer.wte.weight
    firsts = set()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert (parameter == (0 if name.endswith('bias') else 1)).all(), name
        else:
            std = 0.01 if 'wpe' in name else 0.02 / math.sqrt(2 * 8) if 'c_proj' in name else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.03), name
            assert parameter.mean().item() == pytest.approx(0, abs=0.03 * std), name
            firsts.add(round(parameter[0, 0].item() / std, 4))
    assert len(firsts) == 2 + 4 * 8, 'two parameters were drawn alike'


@pytest.mark.parametrize('layers, heads, width, block_size, vocab_size, total, wpe, share', [
    (12, 12, 768, 1024, 50257, 124_439_808, 786_432, '0.632%'),
    (24, 16, 1024, 1024, 50257, 354_823_168, 1_048_576, '0.296%'),
    (36, 20, 1280, 1024, 50257, 774_030_080, 1_310_720, '0.169%'),
    (48, 25, 1600, 1024, 50257, 1_557_611_200, 1_638_400, '0.105%'),
    (12, 12, 768, 512, 40478, 116_536_320, 393_216, '0.337%'),    # GPT-1 itself has no final LayerNorm: 1,536 fewer
    (96, 96, 12288, 2048, 50257, 174_604_259_328, 25_165_824, '0.014%'),
], ids=['gpt2', 'medium', 'large', 'xl', 'gpt1', 'gpt3'])
def test_parameter_counts(layers, heads, width, block_size, vocab_size, total, wpe, share):
    sizes = dict(n_layer=layers, n_head=heads, n_embd=width, block_size=block_size, vocab_size=vocab_size)
    with torch.device('meta'):                                    # nothing is allocated
        plain, rope = GPT(GPTConfig(**sizes)), GPT(GPTConfig(**sizes, wpe='rope'))
        padded = GPT(GPTConfig(**sizes, vocab_multiple=128))
    rows = -vocab_size % 128
    assert plain.parameter_counts() == {'total': total, 'wpe': wpe, 'padding': 0}
    assert padded.parameter_counts() == {'total': total, 'wpe': wpe, 'padding': rows * width}
    assert rope.parameter_counts() == {'total': total - wpe, 'wpe': 0, 'padding': 0}
    assert sum(p.numel() for p in padded.parameters()) == total + rows * width
    for model in (plain, padded):
        assert all(figure in model.parameter_report() for figure in (f'{total:,} ', f'{wpe:,} ', f' {share}'))
    assert f' {rows * width:,} in {rows} rows' in padded.parameter_report() and 'rows' not in plain.parameter_report()


@pytest.mark.parametrize('wpe', SCHEMES)
def test_a_model_built_without_memory_becomes_whole(wpe):
    source = build(wpe)
    with torch.device('meta'):
        model = GPT(source.config, seed=None)
    model.to_empty(device='cpu')
    assert len(list(model.parameters())) == len(list(source.parameters()))               # still tied
    model.load_state_dict(source.state_dict())
    assert torch.equal(model.eval()(tokens(2, 32)), source(tokens(2, 32)))


def test_every_parameter_is_in_one_optimizer_group():
    model = build('learned')
    decay, rest = model.optimizer_groups(0.1)
    assert (decay['weight_decay'], rest['weight_decay']) == (0.1, 0.0)
    assert sorted(map(id, decay['params'] + rest['params'])) == sorted(map(id, model.parameters()))
    assert any(p is model.transformer.wpe.weight for p in decay['params']) and all(p.dim() == 1 for p in rest['params'])


# ---- torch.compile ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('backend', ['aot_eager', pytest.param('inductor', marks=pytest.mark.slow)])  # slow: runs g++
@pytest.mark.parametrize('wpe', SCHEMES)
def test_compiles_once_to_one_graph_equal_to_eager(wpe, backend):
    torch.compiler.reset()
    model = build(wpe, n_layer=2)
    compiled = torch.compile(model, fullgraph=True, backend=backend)  # a graph break is an error
    for seed, stance in ((3, 'default'), (4, 'fail_on_recompile')):
        x, y, results = tokens(2, 32, seed), tokens(2, 32, seed + 9), []
        for module in (model, compiled):
            with torch.compiler.set_stance(stance):
                loss = module(x, y)
            results.append([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))])
        torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)


def test_a_model_to_be_filled_draws_nothing():
    """Nor does it import torch's compiler on the way, which would take sample.py a second."""
    code = (f'import sys\nsys.path.insert(0, {str(ROOT)!r})\nimport torch\nfrom model import GPT, GPTConfig\n'
            'before = torch.get_rng_state()\nwith torch.device("meta"):\n    GPT(GPTConfig(n_layer=1), seed=None)\n'
            'GPT(GPTConfig(n_layer=1, vocab_size=9), seed=None)\nassert torch.equal(torch.get_rng_state(), before)\n'
            'print("torch._dynamo" in sys.modules)')
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout == 'False\n'
