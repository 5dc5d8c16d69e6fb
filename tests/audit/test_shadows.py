"Likelihood ratios are what they are called, and beat the bare signal where difficulty hides it."

import numpy as np
import pytest
from scipy.stats import norm

from harmomoe.audit.measures import auc
from harmomoe.audit.shadows import fitted, lira, ratios, shadow_sets, summed


def test_every_candidate_is_in_half_of_the_shadows():
    sets = shadow_sets(31, 8, 5)
    assert (sets.sum(0) == 4).all() and set(sets.sum(1)) == {15, 16}
    assert (sets != shadow_sets(31, 8, 6)).any()
    for bad in (3, 7, 2):
        with pytest.raises(ValueError, match="even number"):
            shadow_sets(31, bad)


def test_lira_is_the_ratio_of_two_normals():
    rng, inside = np.random.default_rng(0), shadow_sets(10, 6)
    shadows, signal = rng.normal(size=(6, 10)) + inside, rng.normal(size=10)
    standard = lambda x: (x - x.mean()) / x.std()
    rows, t = np.array([standard(row) for row in shadows]), standard(signal)
    wanted, spreads = np.zeros((2, 10)), []
    for k, marked in enumerate((inside, ~inside)):
        parts = [rows[marked[:, i], i] for i in range(10)]
        spread = np.sqrt(sum(((p - p.mean()) ** 2).sum() for p in parts) / (30 - 10))
        spreads.append(spread)
        wanted[k] = [norm.logpdf(x, p.mean(), spread) for x, p in zip(t, parts)]
    np.testing.assert_allclose(lira(signal, shadows, inside), wanted[0] - wanted[1], atol=1e-6)
    out = np.array([rows[~inside[:, i], i].mean() for i in range(10)])
    offline = lira(signal, shadows, inside, online=False)
    np.testing.assert_allclose(offline, (t - out) / spreads[1], atol=1e-6)


@pytest.fixture
def world():
    "Signals that are mostly a candidate's difficulty. `strong` and `weak` know of membership."
    rng, inside = np.random.default_rng(2), shadow_sets(400, 16)
    gains = dict(strong=0.6, weak=0.2, none=0.0)
    hard = {name: 5 * rng.normal(size=400) for name in gains}
    run = lambda who: {n: hard[n] + g * who + 0.4 * rng.normal(size=400) for n, g in gains.items()}
    members, runs = rng.random(400) < 0.5, [run(who) for who in inside]
    return run(members), {n: np.stack([one[n] for one in runs]) for n in gains}, inside, members


def test_shadows_find_what_difficulty_hides(world):
    signals, shadows, inside, members = world
    found = ratios(signals, shadows, inside)
    assert auc(signals["strong"], members).high < 0.65
    assert auc(found["strong"], members).low > 0.75
    assert auc(found["none"], members).low < 0.5 < auc(found["none"], members).high
    whole = auc(fitted(signals, shadows, inside), members).value
    assert whole >= auc(found["strong"], members).value - 0.005
    assert whole >= auc(summed(found), members).value - 0.01


def test_a_target_that_is_less_sure_than_its_shadows_is_found_as_well(world):
    signals, shadows, inside, members = world
    faint = lira(0.1 * signals["strong"] + 7, shadows["strong"], inside)
    np.testing.assert_allclose(faint, lira(signals["strong"], shadows["strong"], inside), atol=1e-6)


def test_shapes_that_do_not_fit_are_refused(world):
    signals, shadows, inside, _ = world
    with pytest.raises(ValueError, match="must be"):
        lira(signals["weak"], shadows["weak"][:, 1:], inside)
    with pytest.raises(ValueError, match="in none"):
        lira(signals["weak"], shadows["weak"], np.zeros_like(inside))
