"""Whoever cheats by the order or the form gets nothing, and the model is as without it."""

import numpy as np
import pytest
import torch

from harmomoe.rounds.cheats import Breaker, Changer, Copycat, Latecomer, harm, huge, idle
from harmomoe.rounds.messages import OuterSettings, digest_state
from harmomoe.rounds.rounds import Player, rehearse, run_rounds
from harmomoe.rounds.scoring import BROKEN, CHANGED, USELESS, Digits

pytest.importorskip("model_signing", reason='needs pip install "harmomoe[signing]"')

NAMES = ["anna", "ben", "mallory"]
SHARES = np.array_split(np.arange(200), 4)


@pytest.fixture(scope="module")
def digits():
    return Digits()


def on(digits, rows):
    return lambda state, round: digits.train(state, rows, 5)


def play(folder, digits, kind=None, train=None, first=False):
    game = rehearse(folder, digits, digits.start, 600, 60, NAMES, outer=OuterSettings(selected=3))
    players = [Player(game.workers[n], on(digits, rows)) for n, rows in zip(NAMES[:2], SHARES)]
    if kind is not None:
        cheat = kind(game.workers["mallory"], train)
        cheat.victim = "anna"
        players.insert(0 if first else 2, cheat)
    return game, run_rounds(game, players, 2)


@pytest.fixture(scope="module")
def honest(tmp_path_factory, digits):
    return play(tmp_path_factory.mktemp("honest"), digits)[1]


@pytest.mark.parametrize(
    "kind, train, reason",
    [
        (Copycat, None, CHANGED),
        (Latecomer, None, None),
        (Changer, lambda state, round: {n: v + 0.01 for n, v in state.items()}, CHANGED),
        (Breaker, None, BROKEN),
        (Player, idle, USELESS),
        (Player, huge, USELESS),
    ],
)
def test_cheats_get_nothing_and_change_nothing(kind, train, reason, digits, honest, tmp_path):
    game, outcomes = play(tmp_path, digits, kind, train)
    for number, (with_it, without) in enumerate(zip(outcomes, honest)):
        assert "mallory" not in with_it.points | with_it.weights
        assert (with_it.state, with_it.points) == (without.state, without.points)
        scores = game.validators[0].said("scores", number).said.scores
        found = scores["mallory"].reason if "mallory" in scores else None
        assert found == reason
    assert "mallory" not in outcomes[-1].total


def test_a_fourth_honest_worker_would_get_something(digits, honest, tmp_path):
    "Or the test above could not fail."
    _, outcomes = play(tmp_path, digits, Player, on(digits, SHARES[2]))
    assert outcomes[-1].total["mallory"] > 0 and outcomes[-1].state != honest[-1].state


def test_what_is_revealed_before_the_window_closes_can_be_copied(digits, tmp_path):
    "Why a worker waits for all snapshots: here it does not, and both get nothing."
    game = rehearse(tmp_path, digits, digits.start, 600, 60, NAMES)
    stolen = {}

    class Careless(Player):
        def before(self):
            worker = self.worker
            worker.commit(lambda state: stolen.setdefault("x", self.train(state, 0)))

    players = [Careless(game.workers["anna"], on(digits, SHARES[0]))]
    players.append(Player(game.workers["ben"], on(digits, SHARES[1])))
    players.append(Player(game.workers["mallory"], lambda state, round: stolen["x"]))
    outcome = run_rounds(game, players, 1)[0]
    assert outcome.points.keys() == {"ben"}


def test_harm_learns_and_unlearns(digits):
    state = digits.start
    good, part = (
        (lambda s, _: digits.train(s, SHARES[0])),
        (lambda s, _: digits.train(s, SHARES[1])),
    )
    assert digest_state(harm(good, part, 0.0)(state, 0)) == digest_state(good(state, 0))
    found, learnt, taken = harm(good, part, 2.0)(state, 0), good(state, 0), part(state, 0)
    for name in state:
        expected = learnt[name].double() - 2 * (taken[name].double() - state[name].double())
        torch.testing.assert_close(found[name].double(), expected, rtol=1e-5, atol=1e-5)
