"""AdamW for everything, or Muon for the matrices of the blocks and AdamW for the rest."""
import math

import torch

from nanope import checkpoint, parallel
from nanope.device import cpu_has_bf16, runs_ahead

MATRICES = 'c_attn.weight', 'c_fc.weight', 'c_proj.weight'  # of a block; wte and wpe are matrices too, but tables to look things up in


def build(config, model, device):
    """[optimizer, ...] for the parameters of model that are to be trained.

    A group's 'ratio' is its learning rate as a share of config.learning_rate: both follow one schedule. Muon (Jordan et al. 2024) makes
    each update nearly orthogonal by Newton-Schulz steps, and scales it by sqrt(max(1, rows/columns)) (torch's 'original')."""
    groups, optimizers = model.optimizer_groups(config.weight_decay), []
    if config.optimizer == 'muon':
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        matrices = [p for name, p in named if name.startswith('transformer.h.') and name.endswith(MATRICES)]
        taken = set(matrices)
        groups = [{**group, 'params': [p for p in group['params'] if p not in taken]} for group in groups]
        assert len(matrices) + sum(len(group['params']) for group in groups) == len(named), 'a parameter is in no group or in two'
        if matrices:
            ratio = config.muon_lr / config.learning_rate if config.learning_rate else 0.0
            muon = Float32Muon if torch.device(device).type == 'cpu' and not cpu_has_bf16() else torch.optim.Muon
            optimizers.append(muon([{'params': matrices, 'ratio': ratio}], weight_decay=config.muon_weight_decay,
                                   momentum=config.muon_momentum))
    fused = torch.device(device).type in ('cuda', 'cpu')
    groups = [{**group, 'ratio': 1.0} for group in groups if group['params']]
    optimizers.append(torch.optim.AdamW(groups, betas=(config.beta1, config.beta2), fused=fused))
    return optimizers


class Float32Muon(torch.optim.Muon):
    """torch's Muon with its Newton-Schulz steps in float32: a CPU that has no bfloat16 products takes fifty times as long for those."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group['params']:
                state = self.state[p]
                if not state:
                    state['momentum_buffer'] = torch.zeros_like(p)
                momentum = state['momentum_buffer'].lerp_(p.grad, 1 - group['momentum'])
                x = p.grad.lerp(momentum, group['momentum']) if group['nesterov'] else momentum
                x = newton_schulz(x, group['ns_coefficients'], group['ns_steps'], group['eps'])
                p.mul_(1 - group['lr'] * group['weight_decay'])
                p.add_(x, alpha=-group['lr'] * math.sqrt(max(1, p.size(0) / p.size(1))))


def newton_schulz(x, coefficients, steps, eps):
    """A matrix with the singular vectors of x (rows, columns) and all singular values near 1, by a polynomial of odd powers.

    Each step multiplies x by a polynomial p of its square x x^T. All steps are had of the squares, which are smaller, and x is multiplied
    once, by the product of them."""
    a, b, c = coefficients
    wide = x if x.size(0) <= x.size(1) else x.T
    wide = wide / wide.norm().clamp(min=eps)
    square = wide @ wide.T
    for step in range(steps):
        square = p @ square @ p if step else square
        p = b * square + c * square @ square
        p.diagonal().add_(a)
        product = p @ product if step else p
    wide = product @ wide
    return wide if x.size(0) <= x.size(1) else wide.T


def parameters(optimizers):
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group['params']]


def set_learning_rate(optimizers, lr):
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group['lr'] = lr * group['ratio']


def step(optimizers, finite):
    """Update the parameters if `finite` (bool tensor, on their device) says so, else leave them as they are.

    Fused AdamW looks at it on the device, so that the CPU need not wait for the GPU. Others would have to, and do not: there train.py
    hears of it later, before it saves, evaluates or draws, and stops."""
    sharded = parallel.is_sharded(parameters(optimizers)[0])  # all are, or none
    for optimizer in optimizers:
        if optimizer.defaults.get('fused') and not sharded:
            optimizer.found_inf = (~finite).float()               # what a GradScaler would tell it
            optimizer.step()
        elif runs_ahead(finite.device) or finite.item():
            optimizer.step()


def tensors(optimizers, names):
    """The optimizers' state as a flat dict: 'exp_avg.<parameter>' and so on. names: parameter -> its name."""
    return {f'{key}.{names[p]}': tensor for optimizer in optimizers
            for p, state in optimizer.state.items() for key, tensor in state.items()}


def load_tensors(optimizers, saved, names, where):
    """Put back what tensors() gave: all or, where names or shapes differ, nothing and one ValueError."""
    owners = [(p, optimizer) for optimizer in optimizers for group in optimizer.param_groups for p in group['params']]
    moments = {p: ('momentum_buffer',) if isinstance(optimizer, torch.optim.Muon) else ('exp_avg', 'exp_avg_sq') for p, optimizer in owners}
    shapes = {f'{key}.{names[p]}': p.shape for p in moments for key in moments[p]}
    counts = {f'step.{names[p]}': torch.Size() for p, keys in moments.items() if 'exp_avg' in keys}
    checkpoint.check_fit(shapes | counts, saved, where)
    for p, optimizer in owners:
        optimizer.state[p] = {key: parallel.like(saved[f'{key}.{names[p]}'], p) for key in moments[p]}
        if 'exp_avg' in moments[p]:
            step = saved[f'step.{names[p]}']  # AdamW counts on the CPU unless it is fused
            optimizer.state[p]['step'] = step.to(p.device) if optimizer.defaults['fused'] else step
