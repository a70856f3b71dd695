"""What the tests of the model share: small models, fixed tokens, an absolute comparison, an independent table."""
import numpy as np
import torch

from model import GPT, GPTConfig

SCHEMES = ('learned', 'sinusoidal', 'rope', 'none')


def build(wpe, std=0.15, **settings):
    """A small model in eval mode. std: redraw all parameters, so wide that a mistake shows. None: as built."""
    config = dict(block_size=32, vocab_size=101, n_layer=3, n_head=4, n_embd=48, wpe_scale=0.3, wpe=wpe)
    model, generator = GPT(GPTConfig(**{**config, **settings})).eval(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if std is not None:
                parameter.normal_(1.0 if '.ln_' in name and name.endswith('weight') else 0.0, std, generator=generator)
    return model


def tokens(batch, length, seed=2):
    return torch.randint(101, (batch, length), generator=torch.Generator().manual_seed(seed))


def close(a, b, atol=1e-5):
    torch.testing.assert_close(a, b, atol=atol, rtol=0)


def exact_sinusoids(position, width):
    """Rows `position` of the table of "Attention is all you need", column by column, in float64."""
    column = np.arange(width)
    angle = np.asarray(position)[:, None] / 10000 ** (2 * (column // 2) / width)
    return torch.tensor(np.where(column % 2 == 0, np.sin(angle), np.cos(angle)))
