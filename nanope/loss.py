"""The training loss, and how it is had: compiled or not; over a large vocabulary on a CPU without ever holding its logits.

Logits are by far the largest tensors of GPT-2: 4 rows of 1,024 tokens have 0.8 GB of them in float32, and cross-entropy keeps copies.
On CUDA they stay whole: a compiled graph fuses the loss into what reads them; pieces would slow it down.
"""
import torch

from nanope import parallel
from nanope.device import without_cudnn

CHUNK = 512           # tokens whose logits are held at once
LARGE = 2**24         # logits of a micro-batch from which on pieces pay: 64 MB in float32


class HeadLoss(torch.autograd.Function):
    """Mean cross-entropy of the logits x @ weight.T against targets, and its gradients, piece by piece.

    The gradients are computed in forward(), while a piece's logits are at hand: backward() only hands them over."""

    @staticmethod
    def forward(ctx, x, weight, targets, vocab_size, dtype):
        """x (N, C), weight (>= V, C), targets int64 (N,), those of -1 left out; dtype of the products. Returns a float32 scalar."""
        w = weight.to(dtype)
        dx, dw = torch.empty_like(x), torch.zeros_like(weight) if ctx.needs_input_grad[1] else None  # it may be frozen
        count, total = (targets >= 0).sum(), torch.zeros((), device=x.device)
        for h, target, d in zip(x.split(CHUNK), targets.split(CHUNK), dx.split(CHUNK)):
            h, counts, at = h.to(dtype), target >= 0, target.clamp(min=0)[:, None]
            p = (h @ w.T).float()                                 # logits (n, >= V), to become their gradient
            p[:, vocab_size:] = -torch.inf                        # rows that pad the vocabulary take no part, but make products faster
            norm = p.logsumexp(dim=1, keepdim=True)
            total += ((norm - p.gather(1, at))[:, 0] * counts).sum()
            p.sub_(norm).exp_().scatter_add_(1, at, torch.full_like(norm, -1.0)).mul_((counts / count)[:, None])
            p = p.to(dtype)
            d.copy_(p @ w)
            if dw is not None and dtype == dw.dtype:
                dw.addmm_(p.T, h)
            elif dw is not None:
                dw += p.T @ h
        ctx.save_for_backward(dx, dw)
        return total / count

    @staticmethod
    def backward(ctx, gradient):
        dx, dw = ctx.saved_tensors
        for d in filter(torch.is_tensor, (dx, dw)):
            d.mul_(gradient)                                      # in place: autograd refuses a second backward()
        return dx, dw, None, None, None


def in_pieces(model, rows, device):
    """Whether the loss of a micro-batch of `rows` rows is had piece by piece. A sharded table is whole inside of forward() alone."""
    logits = rows * model.config.block_size * model.config.padded_vocab_size
    return torch.device(device).type == 'cpu' and logits >= LARGE and not parallel.is_sharded(model.lm_head.weight)


def head_loss(model, hidden, idx, targets):
    """model(idx, targets), piece by piece. hidden: model.hidden or what torch.compile made of it."""
    dtype = torch.get_autocast_dtype('cpu') if torch.is_autocast_enabled('cpu') else torch.float32
    x = hidden(idx, *model.positions(0, idx.size(1)))             # (B, T, C)
    with torch.autocast('cpu', enabled=False):
        return HeadLoss.apply(x.flatten(0, 1), model.lm_head.weight, targets.flatten(), model.config.vocab_size, dtype)


def loss_function(model, compiled, rows, device):
    """A function of (idx, targets), micro-batches of at most `rows` rows, that gives their mean loss as model itself would."""
    def compile(function):
        return torch.compile(function, fullgraph=True, dynamic=False) if compiled else function
    if in_pieces(model, rows, device):
        hidden = compile(model.hidden)
        return lambda idx, targets: head_loss(model, hidden, idx, targets)
    loss_of = compile(model)

    def without_cudnns_attention(idx, targets):
        with without_cudnn():
            return loss_of(idx, targets)
    masked = model.config.wpe == 'alibi' and torch.device(device).type == 'cuda'
    return without_cudnns_attention if masked else loss_of
