"""Positions past the trained length: the scalings of rope against transformers, interpolated sinusoids, ALiBi against Bloom and MPT."""
import itertools
import math
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import model as script
from model import GPTConfig, KVCache, alibi_slopes, rope_frequencies, sinusoidal_table
from small import build, close, exact_sinusoids, tokens
from test_model import as_neox

METHODS = ('linear', 'ntk', 'dynamic', 'yarn', 'llama3')
SCALED = {method: dict(wpe='rope', rope_scaling=method, rope_factor=4.0, rope_trained=8) for method in METHODS}  # block_size 32


def scaled(method, factor=1.0, trained=1024, size=64, base=10000.0, **more):
    """Settings of one head of `size`, extended from `trained` to `factor` times as many tokens."""
    return GPTConfig(wpe='rope', n_head=1, n_embd=size, rope_base=base, rope_scaling=method, rope_factor=factor, rope_trained=trained,
                     block_size=math.floor(trained * factor), **more)


def equal(ours, theirs, rtol):
    torch.testing.assert_close(ours[0], theirs[0].double(), atol=0, rtol=rtol)
    assert ours[1] == pytest.approx(theirs[1], rel=rtol)


# ---- transformers as the oracle --------------------------------------------------------------------------------------

CONFIGS = {}                                                      # building one takes longer than anything else here


def hugging_face(method, factor, trained, size, base, length=None, **more):
    """(frequencies, attention factor) of transformers, computed in float64: in float32, as it does, it is off by up to 2e-6 itself."""
    rope, llama = pytest.importorskip('transformers.modeling_rope_utils'), pytest.importorskip('transformers.models.llama.modeling_llama')
    if (size, trained) not in CONFIGS:
        CONFIGS[size, trained] = llama.LlamaConfig(hidden_size=2 * size, num_attention_heads=2, max_position_embeddings=trained)
    config = CONFIGS[size, trained]
    config.rope_parameters = dict(rope_type=method, rope_theta=base, factor=factor, original_max_position_embeddings=trained, **more)
    with mock.patch.object(torch, 'float', torch.float64):
        if method == 'default':
            return llama.LlamaRotaryEmbedding.compute_default_rope_parameters(config)
        return rope.ROPE_INIT_FUNCTIONS[method](config, 'cpu', seq_len=length)


GRID = list(itertools.product((1.0, 1.5, 2.0, 4.0, 7.3, 32.0), (64, 100, 128, 512, 1024, 4096, 8192), (32, 48, 64, 80, 128),
                              (1e4, 5e5, 1e6)))


@pytest.mark.parametrize('method', METHODS)
def test_frequencies_equal_transformers(method):
    for factor, trained, size, base in GRID:
        config = scaled(method, factor, trained, size, base)
        if method == 'ntk':                                       # has no name there: the default with a larger base
            theirs = hugging_face('default', 1, trained, size, base * factor ** (size / (size - 2)))
            equal(rope_frequencies(config, trained), theirs, rtol=1e-12)
        elif method != 'dynamic':
            more = dict(low_freq_factor=1.0, high_freq_factor=4.0) if method == 'llama3' else {}
            theirs = hugging_face(method, factor, trained, size, base, **more)
            equal(rope_frequencies(config, trained), theirs, rtol=1e-6 if method == 'yarn' else 1e-12)  # its ramp is float32 all the same
        elif factor > 1:                                          # ours is plain at 1, theirs is not past `trained`
            for length in (1, trained, trained + 1, 2 * trained, math.floor(factor * trained)):
                theirs = hugging_face('dynamic', factor, trained, size, base, length)
                equal(rope_frequencies(config, length), theirs, rtol=1e-12)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(factor=st.floats(1.0, 32.0), trained=st.integers(64, 8192), pairs=st.integers(16, 64), base=st.floats(1e4, 1e6), data=st.data())
def test_frequencies_equal_transformers_with_other_settings_too(factor, trained, pairs, base, data):
    slow, fast = data.draw(st.floats(0.5, 8.0)), data.draw(st.floats(8.5, 64.0))  # slow <= 64/(2 pi): else no pair turns so often at all
    attention = data.draw(st.none() | st.floats(0.5, 2.0)) if factor > 1 else None
    yarn = scaled('yarn', factor, trained, 2 * pairs, base, yarn_beta_slow=slow, yarn_beta_fast=fast, yarn_attention=attention)
    theirs = hugging_face('yarn', factor, trained, 2 * pairs, base, beta_slow=slow, beta_fast=fast, attention_factor=attention)
    equal(rope_frequencies(yarn, trained), theirs, rtol=2e-6)     # 32 times the error of a float32
    llama3 = scaled('llama3', factor, trained, 2 * pairs, base, llama3_low=slow, llama3_high=fast)
    theirs = hugging_face('llama3', factor, trained, 2 * pairs, base, low_freq_factor=slow, high_freq_factor=fast)
    equal(rope_frequencies(llama3, trained), theirs, rtol=1e-11)


@pytest.mark.parametrize('method, factor, golden, attention', [
    ('none', 1, [1, .749894202, .1, .01, .001, 1.3335215e-4], 1),
    ('linear', 4, [.25, .18747355, .025, .0025, .00025, 3.3338e-5], 1),
    ('ntk', 4, [1, .717098296, .0699245483, .00488944259, 3.41892e-4, 3.3338e-5], 1),
    ('yarn', 4, [1, .749894202, .0826923102, .00365384622, .00025, 3.3338e-5], 1.1386294),
    ('llama3', 8, [1, .749894202, .1, .00308676064, .000125, 1.6669e-5], 1)])
def test_golden_values(method, factor, golden, attention):
    frequency, times = rope_frequencies(scaled(method, float(factor)), 1024)
    assert frequency[[0, 1, 8, 16, 24, 31]].tolist() == pytest.approx(golden, rel=2e-6)
    assert times == pytest.approx(attention, rel=1e-7)


@pytest.mark.parametrize('trained, size, kept, turning', [(1024, 64, 5, 18), (128, 32, 0, 6), (256, 32, 0, 7)])
def test_which_pairs_yarn_stretches(trained, size, kept, turning):
    # Up to pair `kept` none is slower than before, from pair `turning` on all are, by the whole factor. Those never turn within `trained`.
    ratio = rope_frequencies(scaled('none', 1.0, trained, size), 1)[0] / rope_frequencies(scaled('yarn', 4.0, trained, size), 1)[0]
    assert ratio[:kept + 1].tolist() == [1] * (kept + 1) and 1 < ratio[kept + 1] and ratio[turning - 1] < 4
    assert ratio[turning:].tolist() == pytest.approx([4] * (size // 2 - turning), rel=1e-12)


def test_the_base_of_dynamic_scaling_by_hand():
    # base * (factor * length/trained - (factor - 1)) ^ (size/(size - 2)): the slowest pair is slowed by what stands in the brackets
    plain = rope_frequencies(scaled('none'), 1)[0]
    for factor, length, slower in ((2, 512, 1), (2, 1024, 1), (2, 2048, 3), (2, 8192, 15), (8, 2048, 9), (8, 16384, 121)):
        frequency, attention = rope_frequencies(scaled('dynamic', float(factor)), length)
        assert attention == 1 and frequency[0] == 1 and (plain / frequency)[-1].item() == pytest.approx(slower, rel=1e-12)


# ---- factor 1, attention, settings -----------------------------------------------------------------------------------

@pytest.mark.parametrize('method', METHODS)
@torch.no_grad()
def test_factor_1_is_plain_rope_bit_for_bit(method):
    plain, one = build('rope'), build('rope', rope_scaling=method, rope_factor=1.0, rope_trained=8, yarn_attention=1.5)
    for length in (5, 32, 50):
        assert torch.equal(one(tokens(2, length)), plain(tokens(2, length)))
    assert torch.equal(one(tokens(2, 5), start=1000), plain(tokens(2, 5), start=1000))


@pytest.mark.parametrize('scaling, multiplier', [
    (dict(rope_factor=4.0), (0.1 * math.log(4) + 1) ** 2), (dict(rope_factor=16.0), 1.2772589 ** 2),
    (dict(rope_factor=4.0, yarn_attention=1.0), 1), (dict(rope_factor=4.0, yarn_attention=0.8), 0.64),
    (dict(rope_factor=1.0), 1), (dict(rope_factor=1.0, yarn_attention=0.8), 1)])
@pytest.mark.parametrize('length', [20, 50])                      # the stored table, and rows computed beyond it
def test_yarn_sharpens_attention_once(scaling, multiplier, length, monkeypatch):
    scores = []

    def attention(q, k, v, **_):
        scores.append(q @ k.transpose(-1, -2))
        return v
    monkeypatch.setattr(F, 'scaled_dot_product_attention', attention)
    for more in (scaling, dict(scaling, yarn_attention=1.0)):
        build('rope', n_layer=1, rope_scaling='yarn', rope_trained=8, **more)(tokens(2, length))
    torch.testing.assert_close(scores[0], scores[1] * multiplier, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize('wrong, says', [
    (dict(rope_scaling='Yarn'), ('rope_scaling=Yarn', 'none, linear, ntk, dynamic, yarn, llama3')),
    (dict(rope_factor=0.5), ('rope_factor=0.5', 'at least 1')), (dict(rope_factor=math.nan), ('rope_factor=nan', 'at least 1')),
    (dict(rope_factor=math.inf, rope_scaling='yarn'), ('rope_factor=inf',)),
    (dict(sinusoidal_factor=0.5), ('sinusoidal_factor=0.5', 'at least 1')),
    (dict(rope_trained=0), ('rope_trained=0', 'at least 1')), (dict(rope_trained=-5), ('rope_trained=-5', 'at least 1')),
    (dict(yarn_attention=0.0), ('yarn_attention=0.0', 'above 0')), (dict(yarn_beta_slow=0.0), ('yarn_beta_slow=0.0', 'above 0')),
    (dict(yarn_beta_slow=32.0), ('yarn_beta_slow=32.0', 'below yarn_beta_fast=32.0')),
    (dict(llama3_low=5.0), ('llama3_low=5.0', 'below llama3_high=4.0')), (dict(llama3_high=math.nan), ('llama3_high=nan',)),
    (dict(rope_factor=4.0), ('rope_factor=4.0', 'rope_scaling')),  # of no effect
    # three lengths that contradict each other
    *((dict(rope_scaling=m, rope_factor=4.0, rope_trained=1024, block_size=8192), ('4096', 'block_size=8192', 'rope_factor=8'))
      for m in ('linear', 'ntk', 'yarn'))])
def test_bad_settings_are_refused(wrong, says):
    with pytest.raises(ValueError) as error:
        GPTConfig(wpe='rope', **wrong)
    assert all(word in str(error.value) for word in says), error.value
    assert len(str(error.value).splitlines()) == 1                # one mistake, one complaint


def test_settings_that_agree_are_taken():
    rounded = [(trained, longer) for trained in range(40, 130) for longer in range(trained, 300) if longer / trained * trained < longer]
    for trained, longer in rounded:
        GPTConfig(wpe='rope', rope_scaling='yarn', rope_factor=longer / trained, rope_trained=trained, block_size=longer)
    assert len(rounded) > 100
    GPTConfig(wpe='rope', rope_scaling='llama3', rope_factor=8.0, rope_trained=8192, block_size=131072)  # Llama 3.1
    GPTConfig(wpe='rope', rope_scaling='dynamic', rope_factor=2.0, rope_trained=8, block_size=1024)
    GPTConfig(wpe='rope', rope_scaling='yarn', rope_factor=4.0, rope_trained=1024, block_size=512)  # as a cropped model has it


@pytest.mark.parametrize('method', METHODS)
@torch.no_grad()
def test_other_schemes_do_not_look_at_the_settings_of_rope(method):
    for wpe in ('learned', 'sinusoidal', 'none', 'alibi'):
        model, plain = build(**{**SCALED[method], 'wpe': wpe}, sinusoidal_factor=1.0), build(wpe)
        assert torch.equal(model(tokens(2, 32)), plain(tokens(2, 32)))
        assert torch.equal(generated(model, 40), generated(plain, 40))


# ---- the model: no state, cache, the switch of dynamic scaling -------------------------------------------------------

def generated(model, steps, prompt=3, **more):
    return torch.cat(list(model.generate(tokens(2, prompt), steps, temperature=0, **more)), dim=1)


@pytest.mark.parametrize('method', METHODS)
@torch.no_grad()
def test_a_long_call_leaves_no_trace(method):
    model = build(**SCALED[method])
    before = [model(tokens(2, length)) for length in (5, 20)]     # within the trained 8, and past them
    cache = KVCache(3, 64)
    model(tokens(2, 60), cache=cache)
    model(tokens(2, 200), start=7)
    generated(model, 40)
    assert all(torch.equal(model(tokens(2, length)), logits) for length, logits in zip((5, 20), before))


@torch.no_grad()
def test_dynamic_scaling_is_plain_up_to_the_trained_length_and_not_beyond():
    model, plain = build(**SCALED['dynamic']), build('rope')
    assert torch.equal(model(tokens(2, 8)), plain(tokens(2, 8))) and torch.equal(model.wpe_table, plain.wpe_table[:, :8])
    for length in (9, 32, 50):
        assert (model(tokens(2, length)) - plain(tokens(2, length))).abs().max() > 1e-3
    nine, longer = model(tokens(1, 9)), model(tokens(1, 32))[:, :9]
    assert (nine - longer).abs().max() > 1e-3                     # the same tokens, in a longer sequence


@pytest.mark.parametrize('method', METHODS)
@torch.no_grad()
def test_cached_logits_equal_uncached_across_the_trained_length(method, monkeypatch):
    model, sample, seen = build(**SCALED[method]), script.sample_token, []
    monkeypatch.setattr(script, 'sample_token', lambda logits, *args: (seen.append(logits), sample(logits, *args))[1])
    for prompt in (1, 7, 8, 9, 32):
        for use_cache in (True, False):
            seen.append(generated(model, 33 - prompt, prompt, use_cache=use_cache))
        cached, uncached = seen[:len(seen) // 2], seen[len(seen) // 2:]
        assert len(cached) == 34 - prompt
        for ours, theirs in zip(cached, uncached):                # of every step, and last the tokens
            close(ours, theirs)
        seen.clear()


@torch.no_grad()
def test_dynamic_scaling_past_block_size_equals_cropping():
    model = build(**SCALED['dynamic'])
    assert torch.equal(generated(model, 60), generated(model, 60, use_cache=False))
    inside = build('rope', rope_scaling='dynamic', rope_factor=4.0, block_size=8)  # trained = block_size: cropping never leaves it
    assert torch.equal(generated(inside, 30), generated(inside, 30, use_cache=False))


@pytest.mark.parametrize('first, then', [(8, 1), (7, 2), (1, 31), (20, 1)])
@torch.no_grad()
def test_a_cache_is_not_carried_across_the_switch(first, then):
    model, cache = build(**SCALED['dynamic']), KVCache(3, 64)
    model(tokens(2, first), cache=cache)
    with pytest.raises(ValueError, match=rf'\b{first + then} tokens .*\b{first} in the cache: past 8 .*whole sequence'):
        model(tokens(2, then), cache=cache)
    assert cache.position == first
    whole = KVCache(3, 64)                                        # what the message advises
    close(model(tokens(2, first + then), cache=whole), model(tokens(2, first + then)))


# ---- the whole model against transformers ----------------------------------------------------------------------------

@pytest.mark.parametrize('method, more', [('linear', {}), ('dynamic', {}), ('yarn', {}), ('yarn', dict(attention_factor=0.9)),
                                          ('llama3', dict(low_freq_factor=1.0, high_freq_factor=4.0))])
@torch.no_grad()
def test_logits_equal_transformers(method, more):
    transformers = pytest.importorskip('transformers')
    model = build('rope', block_size=256, n_embd=128, std=0.1, rope_scaling=method, rope_factor=4.0, rope_trained=64,
                  yarn_attention=more.get('attention_factor'))
    c = model.config
    theirs = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(
        vocab_size=c.vocab_size, hidden_size=c.n_embd, num_hidden_layers=c.n_layer, num_attention_heads=c.n_head,
        intermediate_size=4 * c.n_embd, max_position_embeddings=64, hidden_act='gelu_new', use_parallel_residual=False,
        tie_word_embeddings=True, attn_implementation='eager',
        rope_parameters=dict(rope_type=method, rope_theta=1e4, partial_rotary_factor=1.0, factor=4.0,
                             original_max_position_embeddings=64, **more))).eval()
    theirs.load_state_dict(as_neox(model.state_dict(), c), strict=True)
    for length in (64, 65, 200):                                  # ascending: theirs keeps the angles of the longest
        close(model(tokens(2, length)), theirs(tokens(2, length)).logits)


# ---- sinusoids -------------------------------------------------------------------------------------------------------

@torch.no_grad()
def test_interpolated_sinusoids():
    for factor in (1.0, 2.0, 3.7):
        table = sinusoidal_table(5, 300, 48, factor)
        close(table.double(), exact_sinusoids(np.arange(5, 300) / factor, 48), atol=1e-7)
    assert torch.equal(sinusoidal_table(0, 300, 48, 2.0)[::2], sinusoidal_table(0, 150, 48))  # position 2p is the old p
    model, plain = build('sinusoidal', sinusoidal_factor=2.0), build('sinusoidal')
    assert torch.equal(model.position_table(0, 100), 0.3 * sinusoidal_table(0, 100, 48, 2.0))  # stored, and beyond
    assert (model(tokens(2, 32)) - plain(tokens(2, 32))).abs().max() > 1e-2
    assert torch.equal(build('sinusoidal', sinusoidal_factor=1.0)(tokens(2, 50)), plain(tokens(2, 50)))


# ---- ALiBi -----------------------------------------------------------------------------------------------------------

def test_slopes_of_bloom_and_mpt():
    bloom = pytest.importorskip('transformers.models.bloom.modeling_bloom').build_alibi_tensor
    mpt = pytest.importorskip('transformers.models.mpt.modeling_mpt').build_mpt_alibi_tensor
    for n in range(1, 33):
        close(alibi_slopes(n), bloom(torch.ones(1, 2), n, torch.float32)[:, 0, 1], atol=1e-7)  # of the key at position 1
        close(alibi_slopes(n), -mpt(n, 2)[:, 0, 0], atol=1e-7)    # of the key one back
    assert alibi_slopes(8).tolist() == [2.0 ** -k for k in range(1, 9)]
    assert alibi_slopes(6).tolist() == [.25, .0625, .015625, .00390625, .5, .125]
    assert alibi_slopes(12).tolist() == pytest.approx([2.0 ** -k for k in range(1, 9)] + [2 ** -.5, 2 ** -1.5, 2 ** -2.5, 2 ** -3.5])


def in_float64(model, idx):
    """Logits of an ALiBi model written out anew: scores less slope times distance, a softmax over what is not in the future."""
    w, c = {name: p.double() for name, p in model.named_parameters()}, model.config
    slopes = {4: [1 / 4, 1 / 16, 1 / 64, 1 / 256], 6: [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]}[c.n_head]
    B, T = idx.shape

    def norm(x, name):
        return F.layer_norm(x, (c.n_embd,), w[name + '.weight'], w[name + '.bias'])

    def linear(x, name):
        return x @ w[name + '.weight'].T + w[name + '.bias']
    x = w['transformer.wte.weight'][idx]
    for h in (f'transformer.h.{layer}.' for layer in range(c.n_layer)):
        q, k, v = (part.view(B, T, c.n_head, -1) for part in linear(norm(x, h + 'ln_1'), h + 'attn.c_attn').split(c.n_embd, dim=2))
        y = torch.zeros_like(q)
        for head, i in itertools.product(range(c.n_head), range(T)):
            scores = torch.stack([(q[:, i, head] * k[:, j, head]).sum(-1) / math.sqrt(c.n_embd / c.n_head) - slopes[head] * (i - j)
                                  for j in range(i + 1)], dim=1)
            y[:, i, head] = (scores.softmax(dim=1)[..., None] * v[:, :i + 1, head]).sum(dim=1)
        x = x + linear(y.flatten(2), h + 'attn.c_proj')
        x = x + linear(F.gelu(linear(norm(x, h + 'ln_2'), h + 'mlp.c_fc'), approximate='tanh'), h + 'mlp.c_proj')
    return norm(x, 'transformer.ln_f') @ w['transformer.wte.weight'].T


@pytest.mark.parametrize('heads', [4, 6])
@torch.no_grad()
def test_alibi_equals_attention_written_out(heads):
    model = build('alibi', n_head=heads, n_layer=2, block_size=16)
    for length in (1, 16, 24):                                    # and past block_size
        close(model(tokens(2, length)).double(), in_float64(model, tokens(2, length)))
    assert (model(tokens(2, 16)) - build('none', n_head=heads, n_layer=2)(tokens(2, 16))).abs().max() > 0.1


@torch.no_grad()
def test_alibi_is_causal_and_sees_distance_alone():
    model, idx = build('alibi'), tokens(2, 32)
    changed = idx.clone()
    changed[:, 20] = (idx[:, 20] + 1) % 101
    difference = (model(idx) - model(changed)).abs().amax(dim=(0, 2))
    assert difference[:20].max() == 0 and difference[20:].min() > 1e-3
    assert torch.equal(model(idx, start=1000), model(idx))
    permuted = torch.cat((idx[:, :31].flip(1), idx[:, 31:]), dim=1)
    one = build('alibi', n_layer=1)
    assert (one(idx)[:, -1] - one(permuted)[:, -1]).abs().max() > 1e-2


def test_gradients_under_alibi_are_those_of_the_same_loss():
    model = build('alibi', n_layer=2, block_size=16)
    x, y, parameters = tokens(2, 16), tokens(2, 16, seed=3), list(model.parameters())
    ours = torch.autograd.grad(model(x, y), parameters)
    exact = torch.autograd.grad(F.cross_entropy(in_float64(model, x).flatten(0, 1), y.flatten()), parameters)
    for gradient, true in zip(ours, exact):
        close(gradient, true, atol=1e-5 * true.abs().max().item() + 1e-8)


@pytest.mark.parametrize('pieces', [[1] * 32, [7] + [1] * 25, [5, 9, 1, 1, 16], [32]], ids=['steps', 'prefill', 'chunks', 'whole'])
@pytest.mark.parametrize('batch', [1, 4])
@torch.no_grad()
def test_alibi_cached_equals_uncached(batch, pieces):
    model, idx, cache = build('alibi'), tokens(batch, 32), KVCache(3, 32)
    close(torch.cat([model(piece, cache=cache) for piece in idx.split(pieces, dim=1)], dim=1), model(idx))
    assert torch.equal(generated(model, 29), generated(model, 29, use_cache=False))


@torch.no_grad()
def test_alibi_in_a_full_cache_equals_cropping_for_one_layer():
    model, idx, cache = build('alibi', block_size=8, n_layer=1), tokens(2, 30), KVCache(1, 8)
    cached = torch.cat([model(piece, cache=cache) for piece in idx.split([5] + [1] * 25, dim=1)], dim=1)
    cropped = torch.cat([model(idx[:, max(t - 7, 0):t + 1], last_only=True) for t in range(30)], dim=1)
    close(cached, cropped)
    for prompt in (1, 8, 20):
        assert torch.equal(generated(model, 30, prompt), generated(model, 30, prompt, use_cache=False))


@torch.no_grad()
def test_alibi_in_bfloat16_is_as_close_as_no_positions_at_all():
    error = {}
    for wpe in ('none', 'alibi'):
        model, idx = build(wpe, block_size=512, n_head=8, n_embd=64), tokens(2, 512)
        exact = model(idx)
        with torch.autocast('cpu', torch.bfloat16):
            error[wpe] = (model(idx).float() - exact).square().mean().sqrt() / exact.std()
        assert torch.equal(model.bfloat16().wpe_table, alibi_slopes(8)) if wpe == 'alibi' else True
    assert error['alibi'] < 1.5 * error['none'] and error['none'] < 0.05
