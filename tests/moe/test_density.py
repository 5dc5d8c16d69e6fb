"Densities against scipy, and what of a sample is looked at."

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal

from harmomoe.moe.context import COMPONENTS
from harmomoe.moe.density import in_components, log_density, unpacked

k = COMPONENTS


@pytest.fixture
def densities():
    "Three of them, packed in float64."
    rng = np.random.default_rng(0)
    whiten = np.tril(rng.normal(size=(3, k, k)), -1) / k
    whiten += np.stack([np.diag(row) for row in np.exp(rng.normal(size=(3, k)))])
    rows, columns = np.tril_indices(k)
    return torch.tensor(np.concatenate([rng.normal(size=(3, k)), whiten[:, rows, columns]], 1))


@pytest.mark.parametrize("dtype, close", [(torch.float64, 1e-9), (torch.float32, 1e-3)])
def test_densities_are_those_of_scipy_but_for_the_constant(densities, dtype, close):
    u = torch.randn(7, k, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = log_density(u, *unpacked(densities.to(dtype)))
    assert found.shape == (7, 3) and found.dtype == dtype
    for p, (middle, whiten) in enumerate(zip(*(x.numpy() for x in unpacked(densities)))):
        covariance = np.linalg.inv(whiten.T @ whiten)
        exact = multivariate_normal(middle, covariance).logpdf(u.double().numpy())
        exact += k / 2 * np.log(2 * np.pi)
        assert np.allclose(found[:, p], exact, rtol=close)


def test_packed_is_the_mean_and_then_the_rows(densities):
    middle, whiten = unpacked(densities)
    assert torch.equal(middle, densities[:, :k]) and not whiten.triu(1).any()
    rows = [torch.cat([row[: i + 1] for i, row in enumerate(one)]) for one in whiten]
    assert torch.equal(torch.stack(rows), densities[:, k:])


def test_who_has_no_density_has_minus_infinity():
    nobody = torch.zeros(2, k), torch.stack([torch.zeros(k, k), torch.eye(k)])
    found = log_density(torch.ones(1, k), *nobody)
    assert found.tolist() == [[-torch.inf, -k / 2]]


def test_whatever_is_far_away_counts_as_ten_deviations():
    axes = torch.eye(k, 5)
    seen = in_components(torch.tensor([[1e9, -1e9, 3.0, 0.0, 1.0]]), torch.ones(5), axes)
    assert seen[0, :5].tolist() == [10, -10, 2, -1, 0] and not seen[0, 5:].any()


def test_more_room_is_less_everywhere():
    "A density that claims a thousand times the room in all directions is ahead of nobody nearby."
    whiten = torch.stack([torch.eye(k), torch.eye(k) / 1000])
    u = torch.randn(50, k, generator=torch.Generator().manual_seed(2))
    honest, broad = log_density(u, torch.zeros(2, k), whiten).T
    assert (honest > broad + 500).all()
