"""The loss in pieces is the loss; attention in bfloat16 is attention; compiled and fixed shapes change nothing but rounding."""
import contextlib
import functools
import math
from copy import deepcopy

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import train
from model import GPT, GPTConfig, KVCache, short_attention
from nanope import compiling, device, loss, optim
from nanope.loader import Data
from small import SCHEMES, build, close, tokens


def gradients(model, value):
    model.zero_grad()
    value.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize('wpe', (*SCHEMES, 'alibi'))
@pytest.mark.parametrize('left_out', [0, 20, 63])
def test_the_loss_in_pieces_and_its_gradients(wpe, left_out, monkeypatch):
    """Pieces that do not divide the batch, targets left out, rows that pad the vocabulary, a tied table: all as the model itself."""
    monkeypatch.setattr(loss, 'CHUNK', 7)
    model, x, y = build(wpe, vocab_multiple=64), tokens(2, 32), tokens(2, 32, seed=3)
    y.view(-1)[:left_out] = -1
    whole, pieces = model(x, y), loss.head_loss(model, model.hidden, x, y)
    close(pieces, whole)
    expected, found = gradients(model, whole), gradients(model, pieces * 3)
    assert expected.keys() == found.keys() and found['transformer.wte.weight'][101:].abs().max() == 0
    for name, gradient in expected.items():
        close(found[name], 3 * gradient)


def test_pieces_refuse_a_second_backward():
    """Their gradients are scaled where they lie; twice would be wrong, so autograd says so."""
    model = build('rope')
    value = loss.head_loss(model, model.hidden, tokens(2, 32), tokens(2, 32))
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        value.backward()


def test_in_bfloat16_it_stays_near_float64(monkeypatch):
    """Under autocast both ways err alike against float64; that of float32 gradients of a bfloat16 product is the dtype's own, 2**-8."""
    monkeypatch.setattr(loss, 'CHUNK', 16)
    model, x, y = build('rope'), tokens(4, 32), tokens(4, 32, seed=3)
    exact = gradients(double := build('rope').double(), double(x, y))
    with torch.autocast('cpu', dtype=torch.bfloat16):
        found = gradients(model, loss.head_loss(model, model.hidden, x, y))
        plain = gradients(model, model(x, y))
    for name, gradient in exact.items():
        errors = [(each[name].double() - gradient).norm() / gradient.norm() for each in (found, plain)]
        assert errors[0] < 1.5 * errors[1] + 2 ** -8, (name, errors)


def test_large_vocabularies_on_a_cpu_go_in_pieces():
    config = GPTConfig(block_size=1024, n_layer=1, n_head=1, n_embd=8)
    model = GPT(config)
    assert loss.in_pieces(model, 1, 'cpu') and not loss.in_pieces(model, 1, 'cuda')
    assert not loss.in_pieces(GPT(GPTConfig(vocab_size=65, block_size=256, n_layer=1, n_head=1, n_embd=8)), 64, 'cpu')
    x = torch.randint(50257, (1, 1024))
    close(loss.loss_function(model, False, 1, 'cpu')(x, x), model(x, x))
    assert loss.loss_function(model, False, 1, 'cuda') is model


def test_pieces_multiply_whole_tables(monkeypatch):
    """Rows that pad the vocabulary stay in the products: with 50,257 columns instead of 50,304 these take a tenth longer on a CPU."""
    model, sizes = build('learned', vocab_multiple=64), []
    original = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, '__matmul__', lambda a, b: sizes.append(tuple(b.shape)) or original(a, b))
    loss.head_loss(model, model.hidden, tokens(2, 32), tokens(2, 32))
    assert sizes and all(128 in shape for shape in sizes[:2])


def test_rows_at_once_without_a_gpu():
    """auto is batch_size there: all rows of an update at once, 512 of GPT-2's, would fill any memory."""
    assert device.micro_batch('auto', None, 512, 'cpu', None, 32)[0] == 32 and device.micro_batch(7, None, 512, 'cpu', None, 32)[0] == 7
    assert device.micro_batch(1000, None, 512, 'cpu', None, 32) == (512, 'an update has no more, so not 1000')


@pytest.mark.parametrize('card, fit', [(30, 1), (40, 1), (50, 2), (95, 6), (200, 16)])
def test_rows_that_fit_a_card(monkeypatch, card, fit):
    """A card of `card` units, on which the model takes 20, its moments none to speak of, and each row 10: nine tenths of what is free may
    be used, and where two rows do not fit, one is the answer."""
    rows = []

    def forward(x, y):
        rows.append(len(x))
        if 20 + 10 * len(x) > card:
            raise torch.OutOfMemoryError('CUDA out of memory')
        return model(x, y)
    model, cuda, unit = build('none'), torch.cuda, 2**30
    fake = type('Fake', (), dict(config=model.config, parameters=model.parameters, zero_grad=model.zero_grad,
                                 __call__=staticmethod(forward)))
    for name, value in (('reset_peak_memory_stats', None), ('empty_cache', None), ('memory_allocated', 20 * unit),
                        ('mem_get_info', ((card - 20) * unit, card * unit))):
        monkeypatch.setattr(cuda, name, lambda *args, value=value: value)
    monkeypatch.setattr(cuda, 'max_memory_allocated', lambda device: (20 + 10 * rows[-1]) * unit)
    assert device.rows_that_fit(fake(), 'cpu', contextlib.nullcontext) == fit and rows == [1, 2]
    assert all(p.grad is None for p in model.parameters())


def test_a_card_without_room_for_a_row(monkeypatch):
    for name in ('reset_peak_memory_stats', 'empty_cache'):
        monkeypatch.setattr(torch.cuda, name, lambda *args: None)
    model = build('none')
    monkeypatch.setattr(model, 'forward', lambda *args: (_ for _ in ()).throw(torch.OutOfMemoryError('CUDA out of memory')))
    with pytest.raises(torch.OutOfMemoryError):
        device.rows_that_fit(model, 'cpu', contextlib.nullcontext)


@pytest.mark.parametrize('wpe', ['learned', 'rope', 'alibi'])
def test_masks_keep_cudnn_away(wpe):
    """In training too, for ALiBi, whose mask it gives nan gradients; all others leave it on, since it is fastest."""
    model, seen = build(wpe), []
    loss_of, *_ = compiling.compile_model(model, False, 2, 'cuda', contextlib.nullcontext, 0)
    model.transformer.h[0].register_forward_pre_hook(lambda *args: seen.append(torch.backends.cuda.cudnn_sdp_enabled()))
    loss_of(tokens(2, 8), tokens(2, 8)).backward()
    assert seen == [wpe != 'alibi'] and torch.backends.cuda.cudnn_sdp_enabled()


def test_losses_by_token_do_not_depend_on_the_pieces():
    model, x, y = build('learned', block_size=256, n_layer=1), tokens(9, 256), tokens(9, 256, seed=3)
    logits = model(x)
    close(model(x, y, reduction='none'), F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction='none').view(9, 256))


@pytest.mark.parametrize('T', [5, 17, 512])
def test_short_attention_is_causal_attention(T):
    q, k, v = (torch.randn(2, 3, T, 16, generator=torch.Generator().manual_seed(seed)).requires_grad_() for seed in range(3))
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    close(short_attention(q, k, v, 0.0), exact.float(), atol=1e-5)
    found = short_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), 0.0)
    assert found.dtype == torch.bfloat16 and (found.double() - exact).norm() / exact.norm() < 0.02
    later = k.detach().clone()
    later[:, :, T // 2 + 1:] += 5
    assert torch.equal(short_attention(q, later, v, 0.0)[:, :, :T // 2], short_attention(q, k, v, 0.0)[:, :, :T // 2])
    kept = short_attention(q, k, torch.ones_like(v), 0.5)
    assert (kept == 0).any() and not (short_attention(q, k, torch.ones_like(v), 0.0) == 0).any()  # dropout acts


def curve(wpe, dtype, seed):
    """200 updates on walks through a random graph: the losses."""
    model = GPT(GPTConfig(block_size=16, vocab_size=11, n_layer=1, n_head=2, n_embd=16, wpe=wpe), seed)
    optimizer = torch.optim.AdamW(model.optimizer_groups(0.1), lr=0.01, fused=True)
    rng, losses = np.random.default_rng(1), []
    graph = rng.integers(0, 11, (11, 3))                          # three ways on from each place
    for step in range(200):
        rows = [rng.integers(0, 11, 8)]
        for way in rng.integers(0, 3, (16, 8)):
            rows.append(graph[rows[-1], way])
        rows = torch.from_numpy(np.stack(rows, axis=1))           # (8, 17)
        with device.autocast('cpu', dtype)():
            value = model(rows[:, :-1], rows[:, 1:])
        value.backward()
        optimizer.step(), optimizer.zero_grad()
        losses.append(value.item())
    return np.array(losses)


@pytest.mark.parametrize('wpe', ['rope', *(pytest.param(wpe, marks=pytest.mark.slow) for wpe in SCHEMES if wpe != 'rope')])
def test_200_updates_in_bfloat16_follow_float32(wpe):
    """The same batches and first weights in both formats: closer than two seeds in one format."""
    one, low, other = curve(wpe, 'float32', 1), curve(wpe, 'bfloat16', 1), curve(wpe, 'float32', 2)
    assert one[0] - one[-10:].mean() > 1
    assert abs(low - one).mean() < abs(other - one).mean() and abs(low[-50:].mean() - one[-50:].mean()) < 0.01


# ---- one-token steps of fixed shapes -----------------------------------------------------------------------------------------------

def greedy(model, idx, n, **settings):
    return torch.cat(list(model.generate(idx, n, temperature=0, **settings)), dim=1)


@pytest.mark.parametrize('wpe', (*SCHEMES, 'alibi'))
def test_steps_of_fixed_shapes(wpe):
    """Whether slots are empty, filled or overwritten: the same logits as without, and few shapes."""
    model, shapes = build(wpe, block_size=160, n_layer=2), set()

    def step(idx, wpe, rope, mask, cache):
        shapes.add((tuple(idx.shape), tuple(mask.shape), cache.look))
        return model.logits(model.hidden(idx, wpe, rope, mask, cache))
    for n, looks in ((40, {128}), (90, {128}), (200, {128, 160})):
        assert torch.equal(greedy(model, tokens(3, 20), n, step=step), greedy(model, tokens(3, 20), n))
        assert {look for *_, look in shapes} == looks and len(shapes) == len(looks)


@torch.no_grad()
def test_slots_are_looked_at_in_steps():
    """As on CUDA: a multiple of 8, of which the empty ones are masked."""
    model, idx, looks = build('rope'), tokens(2, 32), []

    def step(*args):
        looks.append(args[-1].look)
        return model.logits(model.hidden(*args))
    cache = KVCache(3, 32, fixed=8)
    logits = [model(idx[:, :5], cache=cache)] + [model(idx[:, t:t + 1], cache=cache, step=step) for t in range(5, 32)]
    close(torch.cat(logits, dim=1), model(idx))
    assert looks == [8] * 3 + [16] * 8 + [24] * 8 + [32] * 8


@pytest.mark.slow
@pytest.mark.parametrize('wpe', ['learned', 'rope', 'alibi'])
def test_compiled_steps(wpe):
    """torch.compile for real: the greedy text is that of eager mode, with one graph for each number of slots looked at."""
    torch._dynamo.reset()
    model = build(wpe, block_size=160, n_layer=2)
    compiled = compiling.compile_step(model, 'cpu')
    assert torch.equal(greedy(model, tokens(1, 20), 150, step=compiled), greedy(model, tokens(1, 20), 150))
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(greedy(model, tokens(1, 5, 9), 140, step=compiled), greedy(model, tokens(1, 5, 9), 140))


@pytest.mark.slow
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_frozen_steps(monkeypatch, dtype):
    """On a CPU weights in bfloat16, and no others, are frozen, to be laid out anew. Logits as near to float64 as eager ones."""
    import torch._inductor.freezing as freezing
    torch._dynamo.reset()
    frozen, freeze = [], freezing.freeze
    monkeypatch.setattr(freezing, 'freeze', lambda *args, **kwargs: frozen.append(1) or freeze(*args, **kwargs))
    model, idx = build('rope', n_layer=2).to(dtype), tokens(1, 8)
    exact = deepcopy(model).double()(idx)[:, 5:]
    compiled, errors = compiling.compile_step(model, 'cpu'), []
    for step in (None, compiled):
        cache = KVCache(2, 32, fixed=32)
        model(idx[:, :5], cache=cache)
        logits = torch.cat([model(idx[:, t:t + 1], cache=cache, step=step) for t in range(5, 8)], dim=1)
        errors.append((logits - exact).norm() / exact.norm())
    assert errors[1] < 2 * errors[0] < (0.1 if dtype == torch.bfloat16 else 1e-5) and len(frozen) == (dtype == torch.bfloat16)


# ---- optimizers, when to compile ---------------------------------------------------------------------------------------------------

def optimizers_of(model, name):
    return optim.build(train.TrainConfig(optimizer=name, learning_rate=0.1, muon_lr=0.1, muon_momentum=0.9, muon_weight_decay=0.1),
                       model, 'cpu')


def test_an_update_that_is_not_finite_is_left_out():
    for name in ('adamw', 'muon'):
        model = build('learned')
        optimizers = optimizers_of(model, name)
        before = [p.clone() for p in model.parameters()]
        for finite in (False, True):
            model(tokens(2, 8), tokens(2, 8)).backward()
            optim.set_learning_rate(optimizers, 0.1)
            optim.step(optimizers, torch.tensor(finite))
            assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before)) is not finite
            assert all((p != old).any() for p, old in zip(model.parameters(), before)) is finite


def test_muon_does_not_wait_for_the_device(monkeypatch):
    """Where work is queued, whether an update is finite is asked on the device or later: neither optimizer turns it into a Python bool."""
    model = build('learned')
    optimizers = optimizers_of(model, 'muon')
    model(tokens(2, 8), tokens(2, 8)).backward()
    monkeypatch.setattr(optim, 'runs_ahead', lambda name: True)
    finite = torch.tensor(True)
    finite.item = lambda: pytest.fail('it waits')
    optim.step(optimizers, finite)


def test_a_gradient_that_overflows_stops_both_optimizers(place):
    """As in float16: it halves the scale, and neither Muon nor AdamW moves a weight, though only one of them has it."""
    config = train.TrainConfig(optimizer='muon', batch_size=2, block_size=8, micro_batch=2)
    data = Data(str(place / 'data/tiny'))
    for name in ('transformer.wte.weight', 'transformer.h.0.mlp.c_fc.weight'):
        model = build('learned', vocab_size=data.vocab_size)
        optimizers, scaler = optim.build(config, model, 'cpu'), torch.amp.GradScaler('cpu', init_scale=256.0)
        before = [p.clone() for p in model.parameters()]
        for overflow in (True, False):
            hook = model.get_parameter(name).register_hook(lambda gradient: gradient * math.inf) if overflow else None
            told = train.update(model, optimizers, scaler, config, data, 0, 0.1, 'cpu', device.autocast('cpu', 'float32'), [])
            assert told[0].isfinite() and told[1].isfinite() == (not overflow) and scaler.get_scale() == 128.0
            assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before)) is overflow
            if hook:
                hook.remove()


def test_many_models_compile_in_one_process(monkeypatch):
    """More than torch's own limit of eight: bench.py does so."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, 'compile', functools.partial(torch.compile, backend='eager'))
    for T in range(16, 26):
        model = build('learned', block_size=T, n_layer=1)
        assert compiling.compile_model(model, True, 2, 'cpu', device.autocast('cpu', 'float32'), 0)[1]


@pytest.mark.parametrize('rows, columns', [(16, 16), (48, 16), (16, 64)])
def test_muon_in_float32_is_torchs(rows, columns):
    """Three updates: torch's own, up to its bfloat16; and Newton-Schulz, as written in float64, brings singular values near 1."""
    weights = [torch.nn.Parameter(torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))) for _ in range(2)]
    settings = dict(lr=0.1, weight_decay=0.1, momentum=0.9)
    optimizers = [kind([weight], **settings) for kind, weight in zip((torch.optim.Muon, optim.Float32Muon), weights)]
    for step in range(3):
        before = weights[0].detach().clone()
        for optimizer, weight in zip(optimizers, weights):
            weight.grad = torch.randn(rows, columns, generator=torch.Generator().manual_seed(step + 2))
            optimizer.step()
        assert (weights[0] - weights[1]).norm() < 0.03 * (step + 1) * (weights[0] - before).norm()
        assert torch.equal(*(optimizer.state[weight]['momentum_buffer'] for optimizer, weight in zip(optimizers, weights)))
    a, b, c = coefficients = 3.4445, -4.775, 2.0315
    x, found = weights[0].detach().double(), optim.newton_schulz(weights[0].detach(), coefficients, 5, 1e-7)
    x = x / x.norm()
    for _ in range(5):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    close(found.double(), x)
    values = torch.linalg.svdvals(found)
    assert 0.6 < values.min() and values.max() < 1.3


def test_when_compiling_pays(monkeypatch):
    monkeypatch.setattr(torch, 'get_num_threads', lambda: 2)
    model = build('learned')
    seconds = compiling.expected_saving(model, 10 ** 6, 'float32')
    assert seconds == pytest.approx(0.08 * 10 ** 6 * model.flops_per_token() / 6e10) and math.isclose(
        compiling.expected_saving(model, 2 * 10 ** 6, 'float32'), 2 * seconds)
    wide = build('learned', n_embd=256)                           # nearly all of its time is large products
    assert compiling.expected_saving(wide, 10 ** 6, 'float32') == pytest.approx(0.01 * 10 ** 6 * wide.flops_per_token() / 6e10)
    assert compiling.resolve_compile('auto', 'cpu', 29)[0] is False and compiling.resolve_compile('auto', 'cuda', 1)[0] is True
    assert compiling.resolve_compile('auto', 'cpu', 3000) == (True, 'it may save 3,000 s of the run and takes about 30')
    assert compiling.resolve_compile(False, 'cuda', 3000) == (False, 'as asked')


def test_when_compiling_a_step_pays():
    small, large = build('rope'), build('rope', n_layer=1, n_embd=512)
    resolve = compiling.resolve_step
    assert resolve('auto', small, 'cpu', 19_999)[0] is False and resolve('auto', small, 'cpu', 20_000)[0] is True
    assert resolve('auto', large, 'cpu', 10**6) == (False, 'slower than oneDNN for large float32 matrices')
    assert resolve('auto', large, 'cuda', 10**6)[0] is resolve('auto', large.bfloat16(), 'cpu', 10**6)[0] is True
    assert resolve(True, large, 'cpu', 1) == (True, 'as asked')


@pytest.mark.parametrize('when', ['at once', 'when called'])
def test_a_step_that_cannot_be_compiled(monkeypatch, capsys, when):
    """auto: one warning, then the text of eager mode; asked for, ValueError."""
    def fail(*args, **kwargs):
        raise RuntimeError('no compiler\nand more')
    monkeypatch.setattr(torch, 'compile', lambda function, **_: fail if when == 'when called' else fail())
    model, idx = build('rope'), tokens(2, 5)
    assert torch.equal(greedy(model, idx, 12, step=compiling.compile_step(model, 'cpu', 'auto')), greedy(model, idx, 12))
    assert capsys.readouterr().err.count('warning: torch.compile failed (RuntimeError: no compiler') == 1
    with pytest.raises(ValueError, match='torch.compile failed .*--compile=false goes without it'):
        greedy(model, idx, 12, step=compiling.compile_step(model, 'cpu', True))


def test_the_graph_that_was_tried_is_the_one_that_trains(monkeypatch):
    """The trial's batch has no property that a real one lacks: no second compilation at the first update."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, 'compile', functools.partial(torch.compile, backend='eager'))
    for wpe in ('learned', 'alibi'):
        loss_of, *_ = compiling.compile_model(build(wpe).train(), True, 2, 'cpu', contextlib.nullcontext, 0)
        with torch._dynamo.config.patch(error_on_recompile=True):
            loss_of(tokens(2, 32), tokens(2, 32, 3)).backward()


def test_pieces_leave_a_frozen_table_alone():
    model = build('learned').requires_grad_(False)
    model.transformer.wpe.requires_grad_(True)
    whole = gradients_of_wpe(model, model(tokens(2, 32), tokens(2, 32)))
    close(gradients_of_wpe(model, loss.head_loss(model, model.hidden, tokens(2, 32), tokens(2, 32))), whole)
    assert model.lm_head.weight.grad is None


def gradients_of_wpe(model, value):
    return torch.autograd.grad(value, model.transformer.wpe.weight)[0]
