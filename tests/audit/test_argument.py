"The bounds bound, whatever sample is replaced; and they are not so wide that anything would pass."

import numpy as np
import pytest
import torch
from torch import nn

from harmomoe.audit.argument import fit_logistic, lda, logistic_bound, longest, mean_bound


def test_no_normalised_vector_is_longer_than_the_bound():
    torch.manual_seed(0)
    layer = nn.LayerNorm(12)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    found = layer(100 * torch.randn(20_000, 12) ** 3).norm(dim=1).max().item()
    assert 0.5 * longest(layer) < found <= longest(layer) + 1e-5
    rms = nn.RMSNorm(12)
    assert longest(rms) == pytest.approx(12**0.5)


@pytest.mark.parametrize("n", [20, 80, 320])
def test_replacing_one_sample_moves_each_part_less_than_its_bound(n):
    rng, tight = np.random.default_rng(n), 0.0
    public = rng.uniform(-1, 1, size=(100, 6))
    radius = 3.0
    inside = lambda rows: rows * np.minimum(1, radius / np.linalg.norm(rows, axis=1))[:, None]
    own = inside(rng.normal(size=(n, 6)) + 1)
    w, b = fit_logistic(own, public, 0.1)
    for _ in range(10):
        other = own.copy()
        other[0] = inside(-20 * w[None] + rng.normal(size=(1, 6)))[0]
        other_w, other_b = fit_logistic(other, public, 0.1)
        bound = logistic_bound(radius, n, 0.1, abs(b - other_b))
        assert np.linalg.norm(w - other_w) <= bound
        tight = max(tight, np.linalg.norm(w - other_w) / bound)
        assert np.linalg.norm(own.mean(0) - other.mean(0)) <= mean_bound(radius, n)
        moved = lda(own, np.zeros(6), np.eye(6), 2.0) - lda(other, np.zeros(6), np.eye(6), 2.0)
        assert np.linalg.norm(moved) <= mean_bound(2.0, n) + 1e-12
    assert tight > 0.01


def test_clipping_is_what_bounds_lda():
    rng = np.random.default_rng(0)
    own = rng.normal(size=(10, 4))
    far = own.copy()
    far[0] = 1e6
    given = np.zeros(4), np.eye(4)
    moved = [np.linalg.norm(lda(own, *given, c) - lda(far, *given, c)) for c in (2.0, 1e9)]
    assert moved[0] <= mean_bound(2.0, 10) < moved[1]
