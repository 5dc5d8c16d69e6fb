"What a token knows of its company: statistics of the real tokens, whatever stands in the padding."

from functools import partial

import numpy as np
import torch

from harmomoe.moe.context import token_mean, token_spread

close = partial(torch.allclose, atol=1e-5)


def normal(*size, random_state=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(random_state))


def spread(z, axis):
    "The standard deviation as it is defined, in float64, at least 0.001."
    return np.sqrt(np.asarray(z, np.float64).var(axis) + 1e-6)


def test_token_mean_looks_at_real_tokens_only():
    z, mask = normal(3, 4, 5), torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0]]).bool()
    expected = torch.stack([z[0].mean(0), (z[1, 0] + z[1, 2]) / 2, torch.zeros(5)])
    assert close(token_mean(z, mask), expected)
    assert torch.equal(token_mean(torch.where(mask[..., None], z, 1e3), mask), token_mean(z, mask))
    assert close(token_mean(z), z.sum(1) / 4)
    assert token_mean(z.bfloat16(), mask).dtype == torch.bfloat16


def test_token_spread_is_the_standard_deviation_of_real_tokens_only():
    z, mask = normal(3, 4, 5), torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 1, 1]]).bool()
    assert np.allclose(token_spread(z), spread(z, 1), atol=1e-6)
    assert torch.equal(token_spread(z, torch.ones(3, 4, dtype=torch.bool)), token_spread(z))
    expected = np.stack([spread(sample[real], 0) for sample, real in zip(z, mask)])
    for padding in (0.0, 1e3, -1e6):
        padded = torch.where(mask[..., None], z, padding)
        assert np.allclose(token_spread(padded, mask), expected, atol=1e-6)
    # a large mean costs no digits
    assert np.allclose(token_spread(z + 1000), spread(z + 1000, 1), atol=1e-4)
    assert token_spread(z.bfloat16(), mask).dtype == torch.bfloat16


def test_a_single_real_token_or_none_has_a_spread_of_a_thousandth_and_a_gradient():
    mask = torch.tensor([[0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]).bool()
    z = normal(3, 4, 5).requires_grad_()
    found = token_spread(z, mask)
    assert close(found[:2], torch.tensor(0.001), atol=1e-8) and found[2].min() > 0.01
    assert close(token_spread(z[:, :1]), torch.tensor(0.001), atol=1e-8)
    found.sum().backward()
    assert torch.isfinite(z.grad).all() and not z.grad[:2].any() and z.grad[2].all()
