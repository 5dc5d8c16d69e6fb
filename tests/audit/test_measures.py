"What is said of an attack is true: against brute force, closed forms and simulated mechanisms."

import math

import numpy as np
import pytest
from scipy.stats import binom, norm
from sklearn.metrics import roc_auc_score

from harmomoe.audit.measures import (
    attack_row,
    auc,
    ceiling,
    clopper_pearson,
    epsilon_bound,
    one_run_audit,
    one_run_p_value,
    roc_figure,
    tpr_at,
)


def test_auc_counts_pairs_and_halves_ties():
    rng = np.random.default_rng(0)
    scores, members = rng.integers(0, 6, 80).astype(float), rng.random(80) < 0.4
    inside, outside = scores[members], scores[~members]
    wins = (inside[:, None] > outside).mean() + 0.5 * (inside[:, None] == outside).mean()
    found = auc(scores, members)
    assert found.value == pytest.approx(wins, abs=1e-12)
    assert found.value == pytest.approx(roc_auc_score(members, scores), abs=1e-12)
    assert found.low < wins < found.high


def test_interval_of_the_auc_holds_the_truth_as_often_as_it_says():
    rng, truth, hits = np.random.default_rng(0), norm.cdf(0.8 / math.sqrt(2)), 0
    members = np.arange(120) < 50
    for _ in range(400):
        found = auc(rng.normal(size=120) + 0.8 * members, members)
        hits += found.low < truth < found.high
    assert 0.91 < hits / 400 < 0.985


def test_rate_is_that_of_the_best_threshold_that_is_allowed():
    rng = np.random.default_rng(1)
    scores, members = np.round(rng.normal(size=700), 1), rng.random(700) < 0.5
    scores[members] += 0.5
    for rate in (0.01, 0.05, 0.3):
        allowed = [
            (scores[members] > t).mean() for t in scores if (scores[~members] > t).mean() <= rate
        ]
        assert tpr_at(rate, scores, members).value == max(allowed)
    assert tpr_at(0.001, scores, members) is None
    assert "too few" in attack_row(scores, members)["TPR at 0.1 % FPR"]


def test_exact_interval_is_the_inverse_of_the_test():
    found = clopper_pearson(7, 50)
    assert binom.sf(6, 50, found.low) == pytest.approx(0.025, abs=1e-6)
    assert binom.cdf(7, 50, found.high) == pytest.approx(0.025, abs=1e-6)
    assert (clopper_pearson(0, 9).low, clopper_pearson(9, 9).high) == (0, 1)


def test_p_value_is_the_theorem_word_by_word():
    m, r, v, epsilon, delta = 60, 40, 31, 0.7, 1e-3
    coin = [
        math.comb(r, k) * math.exp(epsilon * k) / (1 + math.exp(epsilon)) ** r for k in range(r + 1)
    ]
    alpha = max(sum(coin[v - i : v]) / i for i in range(1, v + 1))
    wanted = sum(coin[v:]) + 2 * m * delta * alpha
    assert one_run_p_value(v, r, m, epsilon, delta) == pytest.approx(wanted, rel=1e-9)
    # the paper's example: 75 of 100 right refutes nothing at epsilon = log 3
    assert one_run_p_value(75, 100, 100, math.log(3), 0.0) == pytest.approx(0.5535, abs=1e-4)


def test_ceilings_are_those_that_are_known():
    found = [ceiling(m, m // 2) for m in (50, 100, 250, 500, 1000)]
    assert found == pytest.approx([2.06, 2.78, 3.71, 4.40, 5.09], abs=0.006)
    assert ceiling(500) == pytest.approx(5.10, abs=0.005)
    assert epsilon_bound(250, 500, 500) == 0.0  # as good as guessing
    assert epsilon_bound(500, 500, 500, 0.0) > epsilon_bound(500, 500, 500, 1e-4)


@pytest.mark.parametrize("epsilon", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("shares", [(1.0,), (1.0, 0.5, 0.1)])
def test_bound_is_no_larger_than_the_truth_of_randomised_response(epsilon, shares):
    """Half of the canaries answer by a fair coin, so that it pays to abstain; the others answer
    with exactly epsilon. Trying several shares must not raise the error."""
    rng, above, bounds = np.random.default_rng(0), 0, []
    for _ in range(150):
        inside, loud = rng.random(300) < 0.5, rng.random(300) < 0.5
        right = rng.random(300) < 1 / (1 + math.exp(-epsilon))
        said = np.where(right, inside, ~inside) * 2.0 - 1
        scores = np.where(loud, said, 0.01 * rng.normal(size=300)) + 1e-3 * rng.normal(size=300)
        bounds.append(one_run_audit(scores, inside, shares, delta=0.0).epsilon)
        above += bounds[-1] > epsilon
    assert above / 150 < 0.05 + 2.6 * math.sqrt(0.05 * 0.95 / 150)
    if epsilon and len(shares) > 1:
        assert np.mean(bounds) > 0.4 * epsilon  # a bound that never says anything is never wrong


def test_what_cannot_be_measured_is_refused():
    members = np.array([True, False, True])
    for scores, truth, words in (
        ([1, 2, 3], members[:2], "must be"),
        ([1, np.nan, 3], members, "no numbers"),
        ([1, 2, 3], np.ones(3, bool), "members and others"),
        ([1, 2, 3], np.ones(3), "booleans"),
    ):
        with pytest.raises(ValueError, match=words):
            auc(scores, truth)
    with pytest.raises(ValueError, match="guessed at most once"):
        one_run_p_value(5, 4, 10, 1.0, 0.0)
    with pytest.raises(ValueError, match="shares"):
        one_run_audit([1.0, 2, 3], members, (0.0,))


def test_figure_has_a_curve_for_each_attack():
    rng, members = np.random.default_rng(0), np.arange(200) < 100
    attacks = {"one": (rng.random(200), members), "two": (members * 1.0, members)}
    figure = roc_figure({"a": attacks, "b": attacks})
    assert [len(axis.lines) for axis in figure.axes] == [3, 3]
    assert figure.axes[0].get_xscale() == figure.axes[0].get_yscale() == "log"
    assert figure.axes[0].lines[2].get_ydata()[1:].min() == 1  # a perfect attack finds all at once
