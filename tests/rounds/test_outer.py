"""The outer step against PyTorch's SGD, in float64, and what is the same everywhere."""

import math
from dataclasses import replace

import pytest
import torch

from harmomoe.rounds.messages import OuterSettings, digest_state
from harmomoe.rounds.outer import (
    bounded,
    no_momentum,
    norm,
    outer_step,
    pseudo_gradient,
    weigh,
)
from harmomoe.rounds.scoring import Rank

RANKS = [Rank("c", 0.5, 1, 3.0), Rank("a", 0.25, 2, 2.0), Rank("b", 0.25 / 3, 3, 0.0)]


def states(number, dtype=torch.float64):
    rng = torch.Generator().manual_seed(number)
    make = lambda *shape: torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype)
    return {"0.1.up": make(5, 3), "2.0.down": make(7)}


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_steps_are_those_of_torch(nesterov, momentum):
    if nesterov and not momentum:
        pytest.skip("torch has no Nesterov without momentum")
    settings = OuterSettings(0.7, momentum, nesterov)
    state = states(0)
    moving, leaves = no_momentum(state), [v.clone().requires_grad_() for v in state.values()]
    sgd = torch.optim.SGD(leaves, 0.7, momentum, nesterov=nesterov)
    weights = dict(a=0.25, b=0.75)
    for number in range(12):
        sent = {who: states(10 * number + k) for k, who in enumerate(weights, 1)}
        for leaf, name in zip(leaves, state):
            leaf.grad = sum(w * (leaf.detach() - sent[who][name]) for who, w in weights.items())
        state, moving = outer_step(state, moving, sent, weights, settings)
        sgd.step()
    for leaf, name in zip(leaves, state):
        torch.testing.assert_close(state[name], leaf.detach(), rtol=1e-12, atol=1e-12)


def test_nesterov_without_momentum_is_sgd():
    plain = OuterSettings(0.7, 0.0, False)
    given = states(0), no_momentum(states(0)), dict(a=states(1)), dict(a=1.0)
    after = [digest_state(outer_step(*given, replace(plain, nesterov=n))[0]) for n in (True, False)]
    assert after[0] == after[1]


def test_one_submission_in_full_is_the_next_state():
    state, sent = states(0, torch.float32), states(1, torch.float32)
    found, moving = outer_step(
        state, no_momentum(state), dict(a=sent), dict(a=1.0), OuterSettings(1.0, 0.0, False)
    )
    assert digest_state(found) == digest_state(sent)  # exact: float64 holds the difference
    for name in state:
        torch.testing.assert_close(moving[name], state[name] - sent[name])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_types_stay_and_momentum_is_wide(dtype):
    state = states(0, dtype)
    moving = no_momentum(state)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    for _ in range(2):
        state, moving = outer_step(
            state, moving, dict(a=states(1, dtype)), dict(a=1.0), OuterSettings()
        )
        assert {v.dtype for v in state.values()} == {dtype}
        assert {v.dtype for v in moving.values()} == {wide}


def test_order_of_workers_and_names_makes_no_difference():
    sent = {who: states(k, torch.float32) for k, who in enumerate("abcde", 1)}
    weights = {who: 1 / 5 for who in sent}
    turned = lambda d: dict(reversed(d.items()))
    state = states(0, torch.float32)
    one = outer_step(state, no_momentum(state), sent, weights, OuterSettings(bound=0.5))
    two = outer_step(
        turned(state), no_momentum(state), turned(sent), turned(weights), OuterSettings(bound=0.5)
    )
    assert [*map(digest_state, one)] == [*map(digest_state, two)]


def test_nobody_selected_changes_nothing():
    state, moving = states(0), states(1)
    found = outer_step(state, moving, {}, {}, OuterSettings())
    assert [*map(digest_state, found)] == [digest_state(state), digest_state(moving)]


@pytest.mark.parametrize(
    "how, expected",
    [
        (dict(selected=2), dict(c=1 / 2, a=1 / 2)),
        (dict(selected=9), dict(c=1 / 3, a=1 / 3, b=1 / 3)),
        (dict(selected=2, weights="utility"), dict(c=2 / 3, a=1 / 3)),
        (dict(selected=3, weights="best"), dict(c=1.0)),
    ],
)
def test_weights(how, expected):
    found = weigh(RANKS, OuterSettings(**how))
    assert found == pytest.approx(expected) and math.isclose(sum(found.values()), 1)
    assert weigh([], OuterSettings(**how)) == {}


def test_bound():
    gradient = pseudo_gradient(states(0), dict(a=states(1)), dict(a=1.0))
    length = torch.cat([v.flatten() for v in gradient.values()]).norm().item()
    assert math.isclose(norm(gradient), length, rel_tol=1e-14)
    assert bounded(gradient, None) is gradient and bounded(gradient, 2 * length) is gradient
    short = bounded(gradient, length / 4)
    assert math.isclose(norm(short), length / 4, rel_tol=1e-14)
    for name, value in gradient.items():
        torch.testing.assert_close(short[name], value / 4)


def test_the_bound_is_part_of_the_step():
    state, sent = states(0), dict(a=states(1))
    plain = OuterSettings(1.0, 0.0, False, bound=0.01)
    found, _ = outer_step(state, no_momentum(state), sent, dict(a=1.0), plain)
    moved = {name: found[name] - state[name] for name in state}
    assert math.isclose(norm(moved), 0.01, rel_tol=1e-9)
