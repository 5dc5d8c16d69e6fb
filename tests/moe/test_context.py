"What a token knows of its company: statistics of the real tokens, whatever stands in the padding."

import numpy as np
import pytest
import torch
from networks import close, normal, spread
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from harmomoe.moe.context import Context, running_mean, running_sums, token_mean, token_spread


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


# What a prefix tells, and how it fades


def by_loop(values, mask, horizon):
    "The definition, token by token, in float64."
    keep = np.exp(-1 / horizon) if horizon else 1.0
    found, total, count = [], 0.0, 0.0
    for value, real in zip(values.double().numpy().swapaxes(0, 1), mask.numpy().T):
        real = real[:, None].astype(float)
        total, count = keep * total + real * value, keep * count + real
        found.append(total / np.maximum(count, 1))
    return np.stack(found, 1)


@pytest.mark.parametrize("horizon", [0.0, 0.01, 0.5, 3.0, 100.0, 1e6])
def test_running_means_fade_as_they_are_defined_whatever_the_length(horizon):
    values, mask = 5 * normal(2, 300, 3), torch.ones(2, 300, dtype=torch.bool)
    mask[0, :17] = False
    found = running_mean(values, mask, horizon=horizon)
    assert np.allclose(found, by_loop(values, mask, horizon), atol=2e-5)
    assert torch.isfinite(found).all()
    alone = running_mean(values[:1, 17:], horizon=horizon)  # padding changes nothing
    assert close(found[:1, 17:], alone, atol=1e-4)
    if not horizon:
        assert torch.equal(running_sums(values), values.cumsum(1))


@pytest.mark.parametrize("horizon", [0.0, 2.0, 50.0])
@pytest.mark.parametrize("pieces", [[1] * 12, [5, 1, 6]], ids=["tokens", "pieces"])
def test_with_a_cache_prefixes_fade_as_without(horizon, pieces):
    values, mask, cache = normal(2, 12, 3), torch.ones(2, 12, dtype=torch.bool), DynamicCache()
    mask[1, :3] = False
    at_once, found, start = running_mean(values, mask, horizon=horizon), [], 0
    for length in pieces:
        part = slice(start, start + length)
        context = Context(mask[:, part], "prefix", cache=cache)
        found.append(context.mean(values[:, part], horizon=horizon))
        start += length
    assert close(torch.cat(found, 1), at_once)
    cache.layers[0].crop(-5)  # as when drafts are taken back
    again = Context(mask[:, 7:], "prefix", cache=cache).mean(values[:, 7:], horizon=horizon)
    assert close(again, at_once[:, 7:]) and isinstance(cache.layers[0], DynamicLayer)


def test_after_some_horizons_the_first_text_is_forgotten():
    first, second = torch.full((1, 100, 1), -1.0), torch.full((1, 100, 1), 1.0)
    values = torch.cat([first, second], 1)
    assert running_mean(values)[0, -1] == 0
    fading = running_mean(values, horizon=20.0)[0, :, 0]
    assert fading[99] == pytest.approx(-1) and fading[-1] > 0.98
    assert fading[114] > 0  # after h log 2 tokens both weigh alike


@pytest.mark.parametrize("context", ["sequence", "prompt"])
def test_only_a_prefix_fades(context):
    values = normal(1, 9, 3)
    fading, lasting = (Context(reach=context).mean(values, horizon=h) for h in (2.0, 0.0))
    assert torch.equal(fading, lasting)
