"""Proof of loss: the draw, what is refused, utilities, ranks and points."""

import hashlib
import json
import math

import numpy as np
import pytest
import torch
from scipy import stats

from harmomoe.rounds.messages import HeldOut, Score, Scores
from harmomoe.rounds.scoring import (
    COPIED,
    INFINITE,
    USELESS,
    Digits,
    disagree,
    draw,
    ranking,
    refuse_copies,
    score,
    utilities,
)


class Asked:
    "What of a task the draw looks at."

    def __init__(self, samples, drawn):
        self.held_out = HeldOut("a" * 64, samples, drawn)


LOTS = {"vera": "1" * 64, "victor": "2" * 64}


def reference(samples, number, round, lots):
    "As the text says it, from the standard library alone."
    text = json.dumps(["draw", round, lots], sort_keys=True, separators=(",", ":"))
    s = hashlib.sha256(text.encode()).hexdigest()
    order = sorted(range(samples), key=lambda k: hashlib.sha256(f"{s} {k}".encode()).hexdigest())
    return sorted(order[:number])


@pytest.mark.parametrize("samples, number, round", [(1, 1, 0), (50, 50, 1), (300, 20, 7)])
def test_draw_is_the_one_described(samples, number, round):
    found = draw(Asked(samples, number), round, LOTS)
    assert found.tolist() == reference(samples, number, round, LOTS) and found.dtype == np.int64


def test_draw_does_not_depend_on_order_but_on_everything_else():
    asked = Asked(1000, 100)
    base = set(draw(asked, 0, LOTS))
    assert base == set(draw(asked, 0, dict(reversed(LOTS.items()))))
    for other in (
        LOTS | {"vera": "3" * 64},
        {"vera": "1" * 64},
        {"vera": "2" * 64, "victor": "1" * 64},
    ):
        # two draws have a tenth in common by chance
        assert len(base & set(draw(asked, 0, other))) < 30
    assert len(base & set(draw(asked, 1, LOTS))) < 30


def test_draw_is_known_for_good():
    "The same on every machine and in every version."
    assert draw(Asked(1000, 5), 3, LOTS).tolist() == KNOWN


KNOWN = [83, 870, 926, 973, 997]


def test_every_sample_and_every_pair_is_equally_likely():
    asked, n = Asked(12, 4), 3000
    drawn = np.zeros((n, 12))
    for k in range(n):
        drawn[k, draw(asked, k, LOTS)] = 1
    assert stats.chisquare(drawn.sum(0)).pvalue > 1e-3
    pairs = (drawn.T @ drawn)[np.triu_indices(12, 1)]
    assert stats.chisquare(pairs).pvalue > 1e-3


# ---- utilities


def flat(value):
    return {"x": torch.tensor([float(value)])}


def worth(found, loss=lambda state: state["x"].item(), start=1.0):
    return score(None, flat(start), found, loss, {})


def test_utility_is_the_fall_of_the_loss_and_never_negative():
    scores = worth(dict(a=flat(0.25), b=flat(1.0), c=flat(2.0), d="late")).scores
    assert scores["a"] == Score(0.75)
    assert scores["b"] == Score(0.0, USELESS) == scores["c"]
    assert scores["d"] == Score(0.0, "late") and [*scores] == [*"abcd"]


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_losses_that_are_no_numbers_are_worth_nothing(loss):
    given = lambda state: loss if state["x"].item() < 1 else 1.0
    assert worth(dict(a=flat(0.5)), given).scores["a"] == Score(0.0, INFINITE)
    with pytest.raises(ValueError, match="no submission can be measured"):
        worth(dict(a=flat(0.5)), lambda state: loss)


def test_the_same_state_twice_is_worth_nothing():
    found = dict(a=flat(0.5), b=flat(0.5), c=flat(0.4), d="late", e="late")
    refused = refuse_copies(found)
    assert (refused["a"], refused["b"], refused["d"]) == (COPIED, COPIED, "late")
    assert torch.equal(refused["c"]["x"], flat(0.4)["x"])


def test_median_withstands_a_minority():
    honest = worth(dict(a=flat(0.25), b=flat(0.5)))
    lie = Scores(1.0, dict(a=Score(0.0), b=Score(99.0)), {})
    assert utilities(dict(u=honest, v=honest, w=lie)) == dict(a=0.75, b=0.5)
    assert utilities(dict(u=honest, v=lie, w=lie)) == dict(a=0.0, b=99.0)
    missing = Scores(1.0, dict(b=Score(0.5)), {})
    assert utilities(dict(u=honest, v=missing, w=missing)) == dict(a=0.0, b=0.5)


def test_validators_disagree_beyond_rounding():
    mine = Scores(2.0, dict(a=Score(0.5), b=Score(0.1)), {})
    near = Scores(2.0, dict(a=Score(0.50015), b=Score(0.1)), {})
    far = Scores(2.0, dict(a=Score(0.5), b=Score(0.1003)), {})
    assert disagree(mine, near) == [] and disagree(mine, far) == ["b"]
    assert disagree(mine, Scores(2.0, dict(a=Score(0.5)), {})) == ["b"]


# ---- ranks


def test_ranks_and_points():
    found = ranking(dict(a=0.1, b=0.3, c=0.0, d=0.2), [5.0, 3.0])
    assert [(r.worker, r.rank, r.points) for r in found] == [
        ("b", 1, 5.0),
        ("d", 2, 3.0),
        ("a", 3, 0),
    ]


def test_exact_ties_are_worth_nothing_and_near_ones_are_ranked():
    found = ranking(dict(a=0.3, b=0.3, c=0.2, d=math.nextafter(0.2, 1)), [5.0, 3.0])
    assert [(r.worker, r.points) for r in found] == [("d", 5.0), ("c", 3.0)]
    assert ranking(dict(a=0.0, b=0.0), [1.0]) == []


def test_digits_reach_their_closed_form():
    digits, rows = Digits(), np.arange(300)
    best = digits.best(rows)
    loss = lambda state: digits.losses(state, rows).mean().item()
    near = digits.train(digits.start, rows, 1000)
    assert loss(best) < loss(near) < loss(digits.train(digits.start, rows, 10))
    for name in best:
        moved = {n: v + 0.01 * (n == name) for n, v in best.items()}
        assert loss(moved) > loss(best)
