"""What only a CUDA device can show: python -m pytest -m gpu. About three minutes, most of it compiling."""
import json
import math
import os
from dataclasses import asdict

import pytest
import torch
from torch.nn import functional as F

from model import GPT, GPTConfig, KVCache, rope_frequencies, rope_table
from nanope import checkpoint, compiling, device, loss, optim, parallel
from nanope.loader import Data
from runs import losses, torchrun, train, weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')]
os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')       # for deterministic mode; read once, at the first product
SCHEMES = ('learned', 'sinusoidal', 'rope', 'none', 'alibi')
SMALL = dict(block_size=256, vocab_size=1000, vocab_multiple=128, n_layer=2, n_head=4, n_embd=256)


@pytest.fixture(autouse=True)
def full_float32():
    """No TF32 where float32 is compared."""
    torch.set_float32_matmul_precision('highest')


def build(wpe, **settings):
    return GPT(GPTConfig(wpe=wpe, **{**SMALL, **settings}), seed=1).cuda().eval()


def ids(batch, length, seed=1, vocab_size=1000):
    return torch.randint(vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed)).cuda()


def gradients(model, loss_of, dtype):
    model.zero_grad()
    with device.autocast('cuda', dtype)():
        value = loss_of()
    value.backward()
    return [value.detach().double().cpu()] + [p.grad.double().cpu() for p in model.parameters()]


def distance(found, exact):
    return [((a - b).norm() / b.norm().clamp(min=1e-12)).item() for a, b in zip(found, exact)]


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('wpe', ['learned', 'sinusoidal', 'rope', 'alibi'])
def test_compiled_eager_and_float64(wpe, dtype):
    """Compiled, loss and gradients are as near to float64 on the CPU as eager ones; one graph, and no second one for the next batch."""
    torch._dynamo.reset()
    model, x, y = build(wpe).train(), ids(4, 256), ids(4, 256, 2)
    double = GPT(GPTConfig(wpe=wpe, **SMALL), seed=1).double()
    value = double(x.cpu(), y.cpu())
    value.backward()
    exact = [value.detach()] + [p.grad for p in double.parameters()]
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    eager = distance(gradients(model, lambda: model(x, y), dtype), exact)
    found = distance(gradients(model, lambda: compiled(x, y), dtype), exact)
    assert all(a <= 2 * b + 1e-4 for a, b in zip(found, eager)), list(zip(found, eager))
    with torch._dynamo.config.patch(error_on_recompile=True), device.autocast('cuda', dtype)():  # without it, it is another graph
        compiled(y, x)


def test_angles_stay_exact():
    """Tables in float32 after .bfloat16(), under autocast, and compiled; scores depend on the distance alone, up to position 8192."""
    model = build('rope', block_size=8192).bfloat16()
    exact = rope_table(0, 8192, *rope_frequencies(model.config, 8192))
    assert model.wpe_table.dtype == torch.float32 and torch.equal(model.wpe_table.cpu(), exact)
    q, k = (torch.randn(64, generator=torch.Generator().manual_seed(seed)).cuda() for seed in (1, 2))
    from model import rotate
    for dtype, limit in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
        for turn in (rotate, torch.compile(rotate)):
            with torch.autocast('cuda', dtype=torch.bfloat16):
                rows = [turn(v.to(dtype).expand(8192, 64), *model.wpe_table) for v in (q, k)]
            scores = (rows[0][16:].float() * rows[1][:-16].float()).sum(dim=1)
            assert (scores - scores[0]).abs().max() < limit * q.norm() * k.norm()


@pytest.mark.parametrize('T', [192, 256, 320, 1000])
def test_attention_backends_agree(T):
    """Forward and backward, also where T % 128 == 64."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    q, k, v = (torch.randn(2, 4, T, 64, device='cuda', dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    results = {}
    for name in ('default', 'FLASH_ATTENTION', 'EFFICIENT_ATTENTION', 'MATH', 'CUDNN_ATTENTION'):
        try:
            with sdpa_kernel(getattr(SDPBackend, name)) if name != 'default' else torch.enable_grad():
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                results[name] = [y, *torch.autograd.grad(y.float().square().sum(), (q, k, v))]
        except RuntimeError as error:
            assert name == 'CUDNN_ATTENTION' and 'No available kernel' in str(error), error
    for name, found in results.items():
        assert all(each.isfinite().all() for each in found), name
        assert max(distance([a.double() for a in found], [b.double() for b in results['MATH']])) < 2e-2, name


def test_a_single_process_of_torchrun(prepared, tmp_path):
    """What torchrun starts alone gives the plain run (it joins nobody, so NCCL stays idle); names carry no prefix of a wrapper."""
    os.symlink(prepared / 'data', tmp_path / 'data')
    settings = dict(device='cuda', dtype='float32', compile='false', gradient_accumulation_steps=4, max_iters=5)
    assert train(tmp_path, **settings).code == 0
    assert torchrun(tmp_path, '--standalone', '--nproc_per_node=1', **settings, out_dir='out/b').wait(120) == 0
    plain, other = (checkpoint.load(tmp_path / out).tensors('model') for out in ('out/a', 'out/b'))
    assert plain.keys() == other.keys() and not any('module' in name or '_orig' in name for name in plain)
    assert max((plain[name] - other[name]).abs().max() for name in plain) < 1e-6


@pytest.mark.parametrize('compiled', [False, True])
def test_deterministic_mode_repeats_its_bits(compiled):
    torch.use_deterministic_algorithms(True)
    try:
        results = []
        for _ in range(2):
            model = build('rope').train()
            loss_of, *_ = compiling.compile_model(model, compiled, 4, 'cuda', device.autocast('cuda', 'bfloat16'), 0)
            optimizer = torch.optim.AdamW(model.optimizer_groups(0.1), fused=True)
            for step in range(20):
                with device.autocast('cuda', 'bfloat16')():
                    loss_of(ids(4, 256, step), ids(4, 256, step + 1)).backward()
                optimizer.step(), optimizer.zero_grad()
            results.append([p.detach().clone() for p in model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*results))
    finally:
        torch.use_deterministic_algorithms(False)


def test_float16_scales_and_skips(prepared, tmp_path):
    """float16 learns as bfloat16 does; a gradient that overflows halves the scale and changes no weight."""
    os.symlink(prepared / 'data', tmp_path / 'data')
    losses = {}
    for dtype in ('float16', 'bfloat16'):
        done = train(tmp_path, out_dir=f'out/{dtype}', device='cuda', dtype=dtype, compile='false', max_iters=30, lr_decay_iters=30)
        assert done.code == 0, done.text
        lines = (tmp_path / 'out' / dtype / 'metrics.jsonl').read_text().splitlines()
        losses[dtype] = [record['loss'] for record in map(json.loads, lines) if record['event'] == 'final'][0]
    assert abs(losses['float16'] - losses['bfloat16']) < 0.1
    model, scaler = build('learned').train(), torch.amp.GradScaler('cuda', init_scale=256.0)
    optimizer = torch.optim.AdamW(model.optimizer_groups(0.1), fused=True)
    before = [p.detach().clone() for p in model.parameters()]
    scaler.scale(model(ids(2, 64), ids(2, 64)) * math.inf).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 128.0 and all(torch.equal(p, old) for p, old in zip(model.parameters(), before))


@pytest.mark.parametrize('batch', [1, 3])
@pytest.mark.parametrize('wpe', ['learned', 'rope', 'alibi'])
@torch.no_grad()
def test_cache_equals_no_cache(wpe, batch):
    """Prefill and steps, eager and recorded as a CUDA graph, to the last slot; and again after a longer text."""
    torch._dynamo.reset()
    model = build(wpe, block_size=512)                            # past 256 slots another graph looks at more of them
    step = compiling.compile_step(model, 'cuda')
    for prompt, new in ((20, 492), (5, 60)):
        idx = ids(batch, prompt)
        with device.without_cudnn():
            plain = torch.cat(list(model.generate(idx, new, temperature=0, use_cache=False)), dim=1)
            for each in (None, step):
                found = torch.cat([t.clone() for t in model.generate(idx, new, temperature=0, step=each)], dim=1)
                assert (found == plain).float().mean() > 0.99, (prompt, each)


@pytest.mark.parametrize('dtype, limit', [('float32', 1e-4), ('bfloat16', 2e-2)])
@pytest.mark.parametrize('wpe', SCHEMES)
@torch.no_grad()
def test_logits_with_a_cache(wpe, dtype, limit):
    """A prompt, then token by token on the same text, against all at once: near in value, and the same likeliest token nearly always."""
    model, idx = build(wpe).to(getattr(torch, dtype)), ids(3, 256)
    cache = KVCache(2, 256)
    with device.without_cudnn():
        whole = model(idx).float()
        parts = torch.cat([model(part, cache=cache) for part in idx.split([20] + [1] * 236, dim=1)], dim=1).float()
    assert (parts - whole).abs().max() < limit * whole.abs().max().clamp(min=1)
    assert (parts.argmax(-1) == whole.argmax(-1)).float().mean() >= 0.99


def test_out_of_range_is_refused_before_a_launch():
    model = build('learned')
    with pytest.raises(ValueError, match='outside the learned table'):
        model(ids(1, 257))
    with pytest.raises(ValueError, match='outside the learned table'):
        model(ids(1, 1), start=256)
    assert torch.ones(3, device='cuda').sum().item() == 3         # the context has survived


@pytest.mark.parametrize('T', [192, 320])
def test_alibi_has_gradients(T):
    """Where T % 128 == 64 and a row of the mask is far below 0, those of cuDNN's attention are nan."""
    model = build('alibi', block_size=T).train()
    loss_of, *_ = compiling.compile_model(model, False, 4, 'cuda', device.autocast('cuda', 'bfloat16'), 0)
    for block in model.transformer.h:
        block.attn.c_attn.weight.data *= 30
    with device.autocast('cuda', 'bfloat16')():
        loss_of(ids(4, T), ids(4, T, 1)).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize('optimizer', ['adamw', 'muon'])
@pytest.mark.parametrize('compiled', [False, True])
def test_updates_do_not_wait(place, compiled, optimizer):
    """Three updates of train.py, reading the batch included, none of which synchronises with the device."""
    import train as script
    data, autocast = Data(str(place / 'data/tiny')), device.autocast('cuda', 'bfloat16')
    config = script.TrainConfig(batch_size=4, micro_batch=2, block_size=64, device='cuda', optimizer=optimizer)
    model = build('rope', block_size=64, vocab_size=data.vocab_size).train()
    loss_of, *_ = compiling.compile_model(model, compiled, 2, 'cuda', autocast, 0)
    optimizers, scaler = optim.build(config, model, 'cuda'), torch.amp.GradScaler('cuda', enabled=False)

    def update(step):
        return script.update(loss_of, optimizers, scaler, config, data, step, 1e-3, 'cuda', autocast, [])
    update(0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode('error')
    try:
        told = [update(step) for step in (1, 2, 3)]
    finally:
        torch.cuda.set_sync_debug_mode('default')
    assert torch.stack(told).isfinite().all()


def test_gradients_travel_by_nccl(tmp_path, monkeypatch):
    """A group of one, but a real one: what add_up() hands to NCCL comes back as it was, and what any_rank() asks goes over gloo."""
    import torch.distributed as dist
    dist.init_process_group('cpu:gloo,cuda:nccl', init_method=f'file://{tmp_path}/meeting', rank=0, world_size=1)
    try:
        monkeypatch.setattr(parallel, 'world', 2)                 # else it would not ask
        tensors = [torch.randn(1000, 7, device='cuda') for _ in range(20)]
        before = [tensor.clone() for tensor in tensors]
        assert all(map(torch.equal, parallel.add_up(tensors), before))
        assert parallel.any_rank(True) and not parallel.any_rank(False)
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason='needs two CUDA devices')
def test_two_gpus(prepared, tmp_path):
    """torchrun with a GPU for each of two processes: the losses of one process that does the work of both."""
    os.symlink(prepared / 'data', tmp_path / 'data')
    settings = dict(device='cuda', dtype='float32', compile='false', gradient_accumulation_steps=2, max_iters=5)
    assert train(tmp_path, **settings).code == 0
    assert torchrun(tmp_path, '--standalone', '--nproc_per_node=2', **settings, out_dir='out/b').wait(120) == 0
    one, two = ([float.fromhex(loss) for loss in losses(tmp_path, out).values()] for out in ('out/a', 'out/b'))
    assert two == pytest.approx(one, abs=1e-5)


def test_memory_is_flat_and_the_run_goes_on_elsewhere(prepared, tmp_path):
    """Allocated memory after 25 updates is that after 5; what a compiled run on a GPU saved, a CPU reads to the bit."""
    os.symlink(prepared / 'data', tmp_path / 'data')
    seen = []
    import train as script
    original = script.update

    def update(*args):
        result = original(*args)
        torch.cuda.synchronize()
        seen.append(torch.cuda.memory_allocated())
        return result
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, 'update', update)
        done = train(tmp_path, device='cuda', compile='true', max_iters=30, eval_interval=30, log_interval=30)
    assert done.code == 0, done.text
    assert seen[25] <= seen[5] + 100_000                          # a few scalars, asked for later
    model, _, found = checkpoint.load_model(tmp_path / 'out/a', device='cpu')
    assert all(torch.equal(p, found.tensors('model')[name]) for name, p in model.named_parameters()) and weights(tmp_path, 30)


@pytest.mark.parametrize('wpe', SCHEMES)
def test_gpt2_at_its_size(wpe):
    """124M, 8 rows of 1,024 tokens, five updates: the loss starts near ln 50257 and falls."""
    model = GPT(GPTConfig(wpe=wpe, bias=False, vocab_multiple=128), seed=1).cuda().train()
    optimizer, losses = torch.optim.AdamW(model.optimizer_groups(0.1), lr=6e-4, fused=True), []
    x = ids(8, 1025, vocab_size=50257)
    for _ in range(5):
        with device.autocast('cuda', 'bfloat16')():
            value = model(x[:, :-1], x[:, 1:])
        value.backward()
        optimizer.step(), optimizer.zero_grad()
        losses.append(value.item())
    assert 10.7 < losses[0] < 11.1 and losses == sorted(losses, reverse=True)


def test_micro_batches_that_fit():
    """An estimate that holds: so many rows run, and with AdamW's moments they take most of the card and no more than it has."""
    model = GPT(GPTConfig(**asdict(GPTConfig(bias=False, vocab_multiple=128))), seed=1).cuda().train()
    autocast = device.autocast('cuda', 'bfloat16')
    rows, reason = device.micro_batch('auto', model, 2**20, 'cuda', autocast)
    most = device.rows_that_fit(model, 'cuda', autocast)
    assert 2**20 % rows == 0 and most / 2 < rows <= most and 'would fit' in reason
    x = ids(most, 1024, vocab_size=50257)
    torch.cuda.reset_peak_memory_stats()
    with autocast():
        loss.loss_function(model, False, most, 'cuda')(x, x).backward()
    taken = torch.cuda.max_memory_allocated() + 8 * sum(p.numel() for p in model.parameters())
    assert 0.6 * torch.cuda.mem_get_info()[1] < taken < torch.cuda.mem_get_info()[1]
