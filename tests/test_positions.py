"""What each position scheme promises: its table, its precision, what it does beyond block_size, how it sees order."""
import math

import numpy as np
import pytest
import torch

from model import GPT, GPTConfig, rotate
from small import SCHEMES, build, close, exact_sinusoids, tokens

# ---- the tables ------------------------------------------------------------------------------------------------------


def exact_rope(position, head_size, base):
    """cos and sin of RoPE's angles at `position` in float64, (2, T, head_size/2)."""
    angle = np.asarray(position)[:, None] * float(base) ** (-2 * np.arange(head_size // 2) / head_size)
    return torch.tensor(np.stack((np.cos(angle), np.sin(angle))))


@pytest.mark.parametrize('width', [1, 2, 3, 127, 128])            # an odd width has one cosine column less
def test_sinusoids_of_any_width(width):
    model = build('sinusoidal', n_head=1, n_embd=width, wpe_scale=1.0)
    close(model.position_table(0, 32).double(), exact_sinusoids(range(32), width), atol=1e-7)
    loss = model(tokens(2, 32), tokens(2, 32, seed=3))
    loss.backward()
    assert loss.isfinite() and all(p.grad.isfinite().all() for p in model.parameters())


def test_sinusoid_invariants():
    table = build('sinusoidal', block_size=1024, n_embd=768, n_layer=1, wpe_scale=1.0).position_table(0, 1024).double()
    gram = table @ table.T
    close(table.norm(dim=1), torch.full((1024,), 19.595918).double())                    # every row: sqrt(768/2)
    close(table[0], torch.tensor([0.0, 1.0]).repeat(384).double())
    close(gram[:-1, :-1], gram[1:, 1:], atol=1e-4)                # p.q depends on p - q alone
    assert gram[0, 1].item() / 384 == pytest.approx(0.97336, abs=1e-5)                   # cosine of neighbours
    assert table.mean().item() == pytest.approx(0.2286, abs=1e-4)
    # Moving by k = 9 positions is one rotation, the same at every position: (sin, cos) of p+k from those of p.
    sin, cos = table[:, 0::2], table[:, 1::2]
    sin_k, cos_k = sin[9], cos[9]
    close(sin[9:], sin[:-9] * cos_k + cos[:-9] * sin_k)
    close(cos[9:], cos[:-9] * cos_k - sin[:-9] * sin_k)


def test_sinusoids_start_at_the_amplitude_of_a_learned_table():
    learned, sinusoidal = (GPT(GPTConfig(n_layer=1, vocab_size=9, wpe=wpe)) for wpe in ('learned', 'sinusoidal'))
    for table in (learned.transformer.wpe.weight, sinusoidal.position_table(0, 1024)):
        assert table.square().mean().sqrt().item() == pytest.approx(0.02, rel=0.01)


def test_rope_frequencies_are_the_published_ones():
    cos, sin = build('rope', n_embd=256).position_table(1, 2)[:, 0].double()           # at position 1: the frequencies
    golden = torch.tensor([1, 0.749894202, 0.1, 0.01, 0.001, 1.3335215e-4]).double()
    torch.testing.assert_close(torch.atan2(sin, cos)[[0, 1, 8, 16, 24, 31]], golden, atol=0, rtol=1e-6)
    model = build('rope', rope_base=500000.0)                     # the base reaches the model
    close(model.position_table(0, 32).double(), exact_rope(range(32), 12, 500000), atol=1e-6)


# ---- RoPE's rotation -------------------------------------------------------------------------------------------------

def test_half_split_is_interleaved_with_its_columns_permuted():
    x, (cos, sin) = torch.randn(4, 50, 64), exact_rope(range(50), 64, 10000).float()
    even, odd = x[..., 0::2], x[..., 1::2]                        # interleaved, as in the paper: pairs (2i, 2i+1)
    interleaved = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    order = torch.cat((torch.arange(0, 64, 2), torch.arange(1, 64, 2)))
    assert torch.equal(rotate(x[..., order], cos, sin), interleaved[..., order])


def test_rotation_keeps_lengths_and_scores_see_distance_alone():
    q, k = torch.randn(2, 64, dtype=torch.float64)
    turned = [rotate(x.expand(4000, 64), *exact_rope(range(4000), 64, 10000)) for x in (q, k)]
    close(turned[0].norm(dim=1), q.norm().expand(4000))
    assert torch.equal(turned[0][0], q)
    for distance in (0, 1, 16, 1000):
        scores = (turned[0][distance:] * turned[1][:4000 - distance]).sum(dim=1)
        close(scores, scores[:1].expand_as(scores))
    assert (turned[0] @ turned[1][0]).std() > 0.1                 # and it does depend on distance


def test_rotation_of_half_precision_is_computed_in_float32():
    x, (cos, sin) = torch.randn(4096, 64).bfloat16(), exact_rope(range(4096), 64, 10000).float()
    assert torch.equal(rotate(x, cos, sin), rotate(x.float(), cos, sin).bfloat16())


# ---- precision: bfloat16 cannot hold 257, so a table that is ever cast falls apart there -----------------------------

CASTS = {'bfloat16': lambda model: model.bfloat16(), 'half': lambda model: model.half(),
         'back': lambda model: model.bfloat16().float(), 'autocast': lambda model: model,
         'to_empty': lambda model: model.to_empty(device='cpu')}


@pytest.mark.parametrize('block_size', [4096, 256])               # the stored table, and rows computed beyond it
@pytest.mark.parametrize('cast', CASTS)
@pytest.mark.parametrize('wpe', ['sinusoidal', 'rope'])
def test_tables_are_float32_whatever_the_weights_are(wpe, cast, block_size):
    with torch.device('meta' if cast == 'to_empty' else 'cpu'):
        model = build(wpe, std=None, block_size=block_size, n_layer=1, n_head=2, n_embd=128, wpe_scale=1.0)
    model = CASTS[cast](model)
    for position in (0, 257, 1857, 4095):
        with torch.autocast('cpu', torch.bfloat16, enabled=cast == 'autocast'):
            table = model.position_table(position, position + 1)
        exact = exact_sinusoids([position], 128) if wpe == 'sinusoidal' else exact_rope([position], 64, 10000)
        assert table.dtype == torch.float32
        close(table.double(), exact, atol=1e-6)


@pytest.mark.parametrize('cast', ['float32', 'bfloat16', 'autocast'])
@pytest.mark.parametrize('wpe', ['sinusoidal', 'rope'])
def test_what_reaches_the_blocks_is_exact(wpe, cast):
    model = build(wpe, n_embd=64, wpe_scale=1.0)
    if cast == 'bfloat16':
        model.bfloat16()
    idx, start, seen = tokens(2, 32), 1840, []
    model.transformer.h[0].register_forward_pre_hook(lambda module, args: seen.extend(args[:2]))
    with torch.autocast('cpu', torch.bfloat16, enabled=cast == 'autocast'):
        model(idx, start=start)
    x, rope = seen
    embedded = model.transformer.wte.weight[idx].double()
    if wpe == 'sinusoidal':
        assert rope is None
        embedded = embedded + exact_sinusoids(range(start, start + 32), 64)
    else:
        table = torch.stack(rope).view(2, 32, 8)
        assert table.dtype == torch.float32
        close(table.double(), exact_rope(range(start, start + 32), 16, 10000), atol=1e-6)
    rounding = 2 ** -8 if cast == 'bfloat16' else 1e-6            # one rounding of the sum, nothing more
    torch.testing.assert_close(x.double(), embedded, atol=1e-6, rtol=rounding)


# ---- positions in the model ------------------------------------------------------------------------------------------

@pytest.mark.parametrize('wpe', SCHEMES)
def test_shift_of_all_positions(wpe):
    model = build(wpe, block_size=1100)
    with torch.no_grad():
        here, there = model(tokens(2, 64)), model(tokens(2, 64), start=1000)
    if wpe in ('rope', 'none'):                                   # relative, or blind
        close(here, there, atol=1e-4)
    else:
        assert (here - there).abs().max() > 0.1


@pytest.mark.parametrize('start, length, last', [(0, 33, 32), (32, 1, 32), (20, 13, 32), (1000, 5, 1004)])
def test_learned_refuses_positions_it_has_no_row_for(start, length, last):
    with pytest.raises(ValueError, match=rf'\b{last}\b.*\b32\b'):
        build('learned')(tokens(2, length), start=start)
    build('learned')(tokens(2, 12), start=20)                     # the last row that there is


@pytest.mark.parametrize('wpe', ['sinusoidal', 'rope', 'none'])
def test_others_are_defined_everywhere_and_a_long_call_leaves_no_trace(wpe):
    model = build(wpe)
    before = model(tokens(2, 20))
    long = model(tokens(2, 200))
    assert long.isfinite().all() and long.shape == (2, 200, 101)
    assert torch.equal(model(tokens(2, 20)), before)
    close(long[:, :32], model(tokens(2, 200)[:, :32]))            # and longer input does not move earlier positions


def test_every_learned_row_gets_a_gradient():
    model = build('learned')
    model(tokens(2, 32), tokens(2, 32, seed=3)).backward()
    assert model.transformer.wpe.weight.grad.abs().amax(dim=1).min() > 1e-5


@pytest.mark.parametrize('wpe, layers, knows', [
    ('none', 1, False), ('none', 2, True), ('learned', 1, True), ('sinusoidal', 1, True), ('rope', 1, True)])
def test_who_notices_that_earlier_tokens_were_permuted(wpe, layers, knows):
    # Without positions one layer sees a bag of words. The second sees what the first made of each token and its prefix.
    model, idx = build(wpe, n_layer=layers), tokens(2, 32)
    permuted = torch.cat((idx[:, :31].flip(1), idx[:, 31:]), dim=1)
    difference = (model(idx)[:, -1] - model(permuted)[:, -1]).abs().max()
    assert difference > 1e-2 if knows else difference < 1e-5


@pytest.mark.parametrize('wpe', SCHEMES)
def test_checkpoint_loads_at_another_block_size_unless_the_table_is_in_it(wpe):
    short, long = build(wpe), build(wpe, std=None, block_size=64)
    if wpe == 'learned':
        with pytest.raises(RuntimeError, match='wpe.weight'):
            long.load_state_dict(short.state_dict())
    else:
        long.load_state_dict(short.state_dict(), strict=True)
        assert torch.equal(long(tokens(2, 32)), short(tokens(2, 32)))


@pytest.mark.parametrize('settings, says', [
    (dict(wpe='rope', n_embd=520, n_head=8), ('n_embd=520', 'n_head=8', 'even', 'n_embd=512', 'n_embd=528')),
    (dict(wpe='rope', n_embd=3, n_head=3), ('n_embd=3', 'even', 'n_embd=6')),
    (dict(wpe='none', n_embd=50, n_head=4), ('n_embd=50', 'n_head=4', 'n_embd=48', 'n_embd=52')),
    (dict(wpe='Rope'), ('Rope', 'learned', 'sinusoidal', 'rope', 'none')),               # else it would train as 'none'
    (dict(wpe='rope', rope_base=1.0), ('rope_base=1.0',)),
    (dict(wpe='rope', rope_base=math.nan), ('rope_base=nan',)),
    (dict(wpe='learned', wpe_std=-0.1, block_size=0), ('wpe_std=-0.1', 'block_size=0')),
])
def test_bad_settings_are_refused_before_anything_is_built(settings, says):
    with pytest.raises(ValueError) as error:
        GPTConfig(**settings)
    assert all(word in str(error.value) for word in says), error.value
