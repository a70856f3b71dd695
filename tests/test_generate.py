"""The KV cache, generation past block_size, dropout, padding, sampling."""
import math

import pytest
import torch
from torch.nn import functional as F

import model as model_py
from model import KVCache, sample_token
from small import SCHEMES, build, close, tokens


def cached_logits(model, idx, pieces, capacity):
    """Logits of idx fed to a fresh cache in pieces of these lengths."""
    cache = KVCache(model.config.n_layer, capacity)
    logits = torch.cat([model(piece, cache=cache) for piece in idx.split(pieces, dim=1)], dim=1)
    assert cache.position == idx.size(1)
    return logits


def greedy(model, idx, steps, **settings):
    return torch.cat(list(model.generate(idx, steps, temperature=0, **settings)), dim=1)


def greedy_by_cropping(model, idx, steps):
    """What generation means, without a cache: the next token of the last block_size tokens, again and again."""
    for _ in range(steps):
        logits = model(idx[:, -model.config.block_size:])
        idx = torch.cat((idx, logits[:, -1:].argmax(dim=-1)), dim=1)
    return idx[:, -steps:]


# ---- the cache -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('pieces', [[1] * 32, [7] + [1] * 25, [5, 9, 1, 1, 16], [32]],
                         ids=['steps', 'prefill', 'chunks', 'whole'])
@pytest.mark.parametrize('batch', [1, 4])
@pytest.mark.parametrize('wpe', SCHEMES)
@torch.no_grad()
def test_cached_logits_equal_uncached_at_every_step(wpe, batch, pieces):
    model = build(wpe)
    for seed in (1, 2):                                           # the second call finds nothing of the first
        idx = tokens(batch, 32, seed)
        close(cached_logits(model, idx, pieces, capacity=32), model(idx))


@pytest.mark.parametrize('wpe', ['sinusoidal', 'rope', 'none'])
@torch.no_grad()
def test_a_full_cache_is_attention_to_a_sliding_window(wpe, monkeypatch):
    model, idx = build(wpe, block_size=8), tokens(2, 30)
    cached = cached_logits(model, idx, [5] + [1] * 25, capacity=8)
    i, attention = torch.arange(30), F.scaled_dot_product_attention
    window = (i[:, None] >= i) & (i[:, None] - i < 8)             # in every layer, itself and the 7 before
    monkeypatch.setattr(F, 'scaled_dot_product_attention', lambda q, k, v, **_: attention(q, k, v, attn_mask=window))
    close(cached, model(idx))


@pytest.mark.parametrize('wpe', ['rope', 'none'])
@torch.no_grad()
def test_a_full_cache_equals_cropping_for_one_layer_alone(wpe):
    for layers in (1, 3):
        model, idx = build(wpe, block_size=8, n_layer=layers), tokens(2, 30)
        cached = cached_logits(model, idx, [8] + [1] * 22, capacity=8)[:, 8:]
        cropped = torch.cat([model(idx[:, t - 7:t + 1], last_only=True) for t in range(8, 30)], dim=1)
        if layers == 1:
            close(cached, cropped)
        else:                                                     # deeper, what is kept has seen what was dropped
            assert (cached - cropped).abs().max() > 1e-2


def test_cache_refuses_what_it_cannot_hold():
    for pieces in ([9], [6, 3], [8, 2]):
        with pytest.raises(ValueError, match=rf'\b{pieces[-1]} tokens .*\b8\b'):
            cached_logits(build('rope'), tokens(2, sum(pieces)), pieces, capacity=8)
    with pytest.raises(ValueError, match='position 32 .*block_size=32'):  # not the token's place in the cache
        cached_logits(build('learned'), tokens(2, 33), [30, 1, 1, 1], capacity=32)


# ---- generation ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('wpe', SCHEMES)
def test_greedy_tokens_are_the_same_with_and_without_cache(wpe):
    model = build(wpe, block_size=256, n_layer=2)
    for seed in (1, 2):                                           # two calls in a row
        with_cache = greedy(model, tokens(2, 10, seed), 200)
        assert torch.equal(with_cache, greedy(model, tokens(2, 10, seed), 200, use_cache=False))
        assert torch.equal(with_cache, greedy(model, tokens(2, 10, seed), 200))


@pytest.mark.parametrize('prompt', [1, 8, 20], ids='prompt={}'.format)  # below, at and above block_size
@pytest.mark.parametrize('wpe, layers, use_cache', [(wpe, 3, False) for wpe in SCHEMES] + [
    ('learned', 3, True), ('sinusoidal', 3, True), ('rope', 1, True), ('none', 1, True)])
@torch.no_grad()
def test_generation_past_block_size_equals_cropping(wpe, layers, use_cache, prompt):
    model = build(wpe, block_size=8, n_layer=layers)
    generated = greedy(model, tokens(2, prompt), 30, use_cache=use_cache)
    assert torch.equal(generated, greedy_by_cropping(model, tokens(2, prompt), 30))


@pytest.mark.skipif(not model_py.ONEDNN, reason='this build of torch has no oneDNN')
@pytest.mark.parametrize('bias', [False, True])
@pytest.mark.parametrize('rows', [1, 8, 32, 33])
def test_few_rows_times_a_large_matrix(monkeypatch, rows, bias):
    """By oneDNN, without a gradient alone: what float64 gives, x lying in pieces too; other products stay as they are."""
    op, calls = torch.ops.mkldnn._linear_pointwise, []
    monkeypatch.setattr(torch.ops.mkldnn, '_linear_pointwise', lambda *args: calls.append(args) or op(*args))
    large, small = model_py.Linear(512, 2048, bias=bias), model_py.Linear(512, 512, bias=bias)
    generator = torch.Generator().manual_seed(rows)
    for p in (*large.parameters(), *small.parameters()):
        torch.nn.init.normal_(p, std=0.05, generator=generator)
    x = torch.randn(rows, 3, 512, generator=generator)[:, -1:]    # as last_only leaves it
    for linear, used in ((large, rows <= 32), (small, False)):
        bias_part = linear.bias.double() if bias else 0
        exact = x.double() @ linear.weight.double().T + bias_part
        with torch.no_grad():
            close(linear(x).double(), exact)
        assert bool(calls) is used
        calls.clear()
        with torch.no_grad(), torch.autocast('cpu', dtype=torch.bfloat16):
            assert linear(x).dtype == torch.bfloat16
        assert linear(x).requires_grad and not calls


@pytest.mark.parametrize('wpe', SCHEMES)
@torch.no_grad()
def test_cached_logits_of_a_wide_model(wpe):
    """Steps of one token take oneDNN's product there, all tokens at once torch's own."""
    model = build(wpe, n_layer=2, n_head=4, n_embd=640, block_size=48, std=0.05)
    idx = tokens(1, 48)
    assert model.transformer.h[0].attn.c_attn.weight.numel() >= 2**20
    close(cached_logits(model, idx, [10] + [1] * 38, 48), model(idx), atol=1e-5)


def test_generate_turns_dropout_off_and_restores_the_mode():
    model, prompt = build('rope', dropout=0.5).train(), tokens(2, 5)
    assert not torch.equal(model(prompt), model(prompt))          # dropout is on
    expected = greedy(build('rope'), prompt, 20)
    assert torch.equal(greedy(model, prompt, 20), expected) and all(module.training for module in model.modules())
    steps = model.generate(prompt, 20, temperature=0)
    assert torch.equal(next(steps), expected[:, :1])
    steps.close()                                                 # a reader that stops early
    assert all(module.training for module in model.modules())
    model.eval()
    assert torch.equal(model(prompt), model(prompt))
    assert not greedy(model, prompt, 2).requires_grad and not any(module.training for module in model.modules())


def test_dropout_acts_where_gpt2_has_it(monkeypatch):
    model, attention, places = build('none', dropout=0.5), F.scaled_dot_product_attention, []
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda module, args, output: places.append(module.p * module.training))
    monkeypatch.setattr(F, 'scaled_dot_product_attention', lambda *args, dropout_p, **more: (
        places.append(dropout_p), attention(*args, **more))[1])
    model(tokens(2, 5))
    model.train()(tokens(2, 5))
    assert places == [0] * 10 + [0.5] * 10                        # embeddings; in 3 layers attention and both residuals


def test_generation_depends_on_its_generator_alone():
    def draw(seed):
        generator = torch.Generator().manual_seed(seed)
        return torch.cat(list(model.generate(tokens(2, 5), 50, top_k=20, top_p=0.9, generator=generator)), dim=1)
    model = build('none')
    state = torch.get_rng_state()
    first = draw(1)
    assert torch.equal(draw(1), first) and not torch.equal(draw(2), first)
    assert torch.equal(torch.get_rng_state(), state)


def test_empty_prompts_and_no_tokens():
    with pytest.raises(ValueError, match='prompt is empty'):
        list(build('none').generate(tokens(1, 0), 5))
    assert list(build('none').generate(tokens(1, 3), 0)) == []


def test_vocabulary_padding_takes_no_part():
    plain, padded = build('learned'), build('learned', vocab_multiple=64)
    state = plain.state_dict()
    rows = torch.full((27, 48), 9.0)                              # they would dominate the softmax
    state['transformer.wte.weight'] = state['lm_head.weight'] = torch.cat((state['lm_head.weight'], rows))
    padded.load_state_dict(state)
    x, y = tokens(2, 32), tokens(2, 32, seed=3)
    close(padded(x), plain(x))                                    # (2, 32, 101) each
    close(padded(x, y), plain(x, y))
    padded(x, y).backward()
    assert padded.lm_head.weight.grad[101:].abs().max() == 0


def test_padding_ids_are_never_sampled():
    model = build('learned', vocab_multiple=64)                   # 101 tokens, 128 rows
    model.lm_head.weight.data[101:] *= 100
    for temperature in (0, 1.0, 50.0):
        drawn = torch.cat(list(model.generate(tokens(64, 4), 28, temperature=temperature)))
        assert drawn.min() >= 0 and drawn.max() < 101


def test_draws_are_those_of_multinomial():
    for seed in range(20):
        logits = torch.randn(8, 65, generator=torch.Generator().manual_seed(seed))
        one, other = (torch.Generator().manual_seed(seed) for _ in range(2))
        assert torch.equal(sample_token(logits, generator=one), torch.multinomial(logits.softmax(dim=-1), 1, generator=other))


# ---- sampling from p = (0.15, 0.5, 0.05, 0.3) ------------------------------------------------------------------------

LOGITS = torch.tensor([0.15, 0.5, 0.05, 0.3]).log()


def frequencies(draws=20000, **settings):
    drawn = sample_token(LOGITS.expand(draws, 4), generator=torch.Generator().manual_seed(1), **settings)
    return drawn.flatten().bincount(minlength=4) / draws


@pytest.mark.parametrize('settings, kept', [
    (dict(), [0, 1, 2, 3]), (dict(top_k=1), [1]), (dict(top_k=2), [1, 3]), (dict(top_k=4), [0, 1, 2, 3]),
    (dict(top_k=99), [0, 1, 2, 3]),                               # more than there are
    (dict(top_p=1.0), [0, 1, 2, 3]), (dict(top_p=0.9), [0, 1, 3]), (dict(top_p=0.51), [1, 3]), (dict(top_p=0.49), [1]),
    (dict(top_p=1e-9), [1]), (dict(top_p=0.0), [1]),              # never fewer than one
    (dict(top_k=3, top_p=0.8), [1, 3]),                           # top_p of what top_k left: 0.53, 0.32, 0.16
    (dict(temperature=0), [1]), (dict(temperature=1e-45), [1]), (dict(temperature=2.0), [0, 1, 2, 3])])
def test_sampling_keeps_what_it_says_in_proportion(settings, kept):
    p = torch.zeros(4, dtype=torch.float64)
    p[kept] = (LOGITS.double() / (settings.get('temperature') or 1.0))[kept].softmax(dim=0)
    close(frequencies(**settings).double(), p, atol=4 * math.sqrt(0.25 / 20000))
