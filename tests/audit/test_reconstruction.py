"What can be read off a mean, against closed forms and scikit-learn."

import math

import numpy as np
import pytest
from scipy.stats import norm
from sklearn.linear_model import Ridge

from harmomoe.audit.measures import auc
from harmomoe.audit.reconstruction import (
    cosines,
    fit_decoder,
    least_samples,
    likeness,
    tracing_auc,
    tracing_tpr,
)
from harmomoe.audit.signals import traced


def test_a_mean_over_one_sample_is_the_sample():
    gallery = np.random.default_rng(0).normal(size=(500, 40))
    near = cosines(gallery[7], gallery)
    assert near.argmax() == 7 and near[7] == pytest.approx(1)
    for n in (4, 16):
        rounds = [cosines(gallery[i : i + n].mean(0), gallery)[i : i + n].mean() for i in range(30)]
        assert np.mean(rounds) == pytest.approx(1 / math.sqrt(n), abs=0.08)


def test_decoder_is_a_ridge_regression():
    rng = np.random.default_rng(0)
    x, pictures = rng.normal(size=(60, 8)) * 3 + 1, rng.normal(size=(60, 12))
    model = Ridge(alpha=0.1 * 60).fit((x - x.mean(0)) / (x.std(0) + 1e-6), pictures)
    wanted = model.predict((x - x.mean(0)) / (x.std(0) + 1e-6))
    found = fit_decoder(x, pictures, 0.1)(x)
    np.testing.assert_allclose(found, wanted, atol=1e-9)
    assert likeness(3 * pictures + 2, pictures) == pytest.approx(np.ones(60))
    with pytest.raises(ValueError, match="60 representations"):
        fit_decoder(x, pictures[1:])


def test_formula_of_tracing_is_what_tracing_does():
    rng, d, n = np.random.default_rng(0), 30, 150
    said, listed, truth = [], [], np.tile(np.arange(2 * n) < n, 20)
    for _ in range(20):
        x = rng.normal(size=(2 * n, d)) @ rng.normal(size=(d, d))
        listed.append(traced(x, x[:n].mean(0)))
        y = rng.normal(size=(2 * n, d))
        said.append(y @ y[:n].mean(0))
    said, listed = np.concatenate(said), np.concatenate(listed)
    assert auc(said, truth).value == pytest.approx(tracing_auc(d, n), abs=0.015)
    assert auc(listed, truth).value == pytest.approx(tracing_auc(d, n, n), abs=0.015)
    threshold = np.quantile(said[~truth], 0.99)
    assert (said[truth] > threshold).mean() == pytest.approx(tracing_tpr(d, n), abs=0.01)


def test_least_number_is_the_least():
    n = least_samples(1152, 0.55)
    assert tracing_auc(1152, n, n) <= 0.55 < tracing_auc(1152, n - 1, n - 1)
    assert n == math.ceil(1152 / norm.ppf(0.55) ** 2) > 70_000
    for bad in (0.5, 1.0):
        with pytest.raises(ValueError, match="above 0.5"):
            least_samples(10, bad)
