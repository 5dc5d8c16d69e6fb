"""What a bundle tells of one sample, against closed forms and numerical integrals."""

import math

import pytest
from scipy.integrate import quad
from scipy.stats import norm

pytest.importorskip("dp_accounting")

from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant

from harmomoe.config import accounting
from harmomoe.config.accounting import (
    STEP,
    Mechanism,
    budget,
    calibrated,
    check_installed,
    steps_of,
    total_epsilon,
)
from harmomoe.config.settings import Config, Privacy, changed, preset

DELTA = 1e-5
CONFIG = changed(preset("ratios"), {"privacy.epsilon": 3})


def delta_of_one_sum(sigma, epsilon):
    "Balle and Wang 2018."
    a, b = 1 / (2 * sigma), epsilon * sigma
    return norm.cdf(a - b) - math.exp(epsilon) * norm.cdf(-a - b)


@pytest.mark.parametrize("sigma", [0.3, 0.8, 2.0, 20.0])
def test_one_sum_is_the_analytic_gaussian_mechanism(sigma):
    epsilon = total_epsilon((Mechanism(sigma),), DELTA)
    assert DELTA * 0.97 <= delta_of_one_sum(sigma, epsilon) <= DELTA


def test_sums_over_all_samples_are_what_their_convolution_is():
    parts = Mechanism(4.0, sums=3), Mechanism(2.0), Mechanism(5.0, rate=1.0)
    accountant = PLDAccountant(value_discretization_interval=STEP)
    for one in parts:
        accountant.compose(GaussianDpEvent(one.noise), one.sums)
    together = total_epsilon(parts, DELTA)
    assert together == pytest.approx(accountant.get_epsilon(DELTA), rel=2e-3)
    assert delta_of_one_sum((3 / 16 + 1 / 4 + 1 / 25) ** -0.5, together) <= DELTA


def test_sums_over_all_samples_and_over_batches_add_up():
    whole, batches = Mechanism(4.0, sums=3), Mechanism(1.5, 0.1, 40)
    accountant = PLDAccountant(value_discretization_interval=STEP)
    accountant.compose(PoissonSampledDpEvent(0.1, GaussianDpEvent(1.5)), 40)
    accountant.compose(GaussianDpEvent(4.0), 3)
    found = total_epsilon((whole, batches), DELTA)
    assert found == pytest.approx(accountant.get_epsilon(DELTA), rel=2e-3)
    assert found == total_epsilon((batches, whole), DELTA) > total_epsilon((batches,), DELTA)


@pytest.mark.parametrize("rate", [0.05, 0.5])
def test_one_poisson_batch_is_a_mixture(rate):
    "With a sample its sum is a mixture of two Gaussians, without it is one of them."
    sigma = 1.0
    epsilon = total_epsilon((Mechanism(sigma, rate),), DELTA)
    without = lambda x: norm.pdf(x, 0, sigma)
    with_it = lambda x: (1 - rate) * without(x) + rate * norm.pdf(x, 1, sigma)
    found = []
    for p, q in ((with_it, without), (without, with_it)):
        excess = lambda x: max(p(x) - math.exp(epsilon) * q(x), 0)
        found.append(quad(excess, -12, 14, limit=500, points=range(-12, 15), epsabs=1e-13)[0])
    assert DELTA * 0.9 <= max(found) <= DELTA * 1.0001
    assert epsilon < total_epsilon((Mechanism(sigma),), DELTA)


def test_the_smallest_noise_is_found():
    parts = Mechanism(1.0, 0.1, 50), Mechanism(4.0)
    sigma = calibrated(parts, 2.0, DELTA)
    scaled = lambda s: tuple(Mechanism(s * one.noise, one.rate, one.sums) for one in parts)
    assert total_epsilon(scaled(sigma), DELTA) <= 2.0 < total_epsilon(scaled(sigma / 1.003), DELTA)


def test_a_budget_covers_all_parts_at_once():
    whole = budget(CONFIG, 1000)
    assert whole.delta == pytest.approx(1000**-1.1) and 2.95 < whole.epsilon <= 3
    parts = whole.relevance, whole.routing, whole.adapter
    assert total_epsilon(parts, whole.delta) == whole.epsilon
    assert whole.relevance.noise == whole.routing.noise == 4 * whole.adapter.noise
    # 1,000 private samples and 150 proxies, 32 of them a batch, ten passes
    assert whole.adapter.rate == pytest.approx(32 / 1150)
    assert whole.adapter.sums == math.ceil(10 * 1150 / 32)


def test_an_expert_that_sees_nothing_private_needs_no_noise():
    alone = budget(changed(CONFIG, {"expert.private": False}), 1000)
    assert alone.adapter is None and alone.relevance.noise < budget(CONFIG, 1000).relevance.noise
    assert budget(changed(CONFIG, {"expert.epochs": 0}), 1000).adapter is None


def test_a_batch_is_never_more_than_all_samples():
    large = changed(CONFIG, {"expert.batch_size": 5000, "expert.epochs": 3})
    assert steps_of(large, 1000, 150) == Mechanism(1.0, 1.0, 3)


def test_what_hides_nothing_is_infinite_at_once():
    for one in (Mechanism(1e-3), Mechanism(1.0, sums=10**7), Mechanism(0.01, 1e-9)):
        assert total_epsilon((one,), DELTA) == math.inf


def test_what_no_noise_keeps_is_said():
    with pytest.raises(ValueError, match="no noise gives .1e-09, 1e-12.-privacy"):
        calibrated((Mechanism(1.0),), 1e-9, 1e-12)


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setattr(accounting, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs opacus: pip install 'harmomoe\[privacy\]'"):
        check_installed("opacus")
    total_epsilon.cache_clear()
    with pytest.raises(ImportError, match="dp_accounting"):
        budget(Config(privacy=Privacy(epsilon=8)), 1000)


@pytest.mark.parametrize(
    "wrong", [dict(noise=0.0), dict(noise=1.0, rate=0.0), dict(noise=1, sums=0)]
)
def test_no_mechanism_without_noise(wrong):
    with pytest.raises(ValueError, match="must be"):
        Mechanism(**wrong)
