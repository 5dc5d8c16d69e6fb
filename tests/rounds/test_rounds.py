"""Workers and validators through files alone: honest, killed, silent, lying, and odd boards."""

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import tree

from harmomoe.base.artefacts import MANIFEST
from harmomoe.rounds.messages import (
    MOMENTUM,
    STATE,
    Lot,
    Outcome,
    OuterSettings,
    Score,
    commitment_hash,
    digest_state,
    lot_hash,
    read_message,
    write_message,
)
from harmomoe.rounds.outer import no_momentum, outer_step
from harmomoe.rounds.rounds import (
    EARLY,
    REVEALED,
    TOO_LATE,
    Ledger,
    Player,
    Validator,
    Worker,
    rehearse,
    run_round,
    run_rounds,
    standing,
)
from harmomoe.rounds.scoring import HIDDEN, Digits, draw

pytest.importorskip("model_signing", reason='needs pip install "harmomoe[signing]"')

NAMES = ["anna", "ben", "carl"]
SHARES = np.array_split(np.random.default_rng(0).permutation(Digits.TRAIN), 3)
OUTER = OuterSettings(selected=2)


@pytest.fixture(scope="module")
def digits():
    return Digits()


def begin(folder, digits, **changes):
    given = dict(samples=600, drawn=60, workers=NAMES, points=[2.0, 1.0], outer=OUTER)
    return rehearse(folder, digits, digits.start, **(given | changes))


def cast(game, digits):
    return [
        Player(game.workers[n], lambda state, _, rows=rows: digits.train(state, rows, 5))
        for n, rows in zip(NAMES, SHARES)
    ]


@pytest.fixture(scope="module")
def played(tmp_path_factory, digits):
    "Three rounds, played without interruption."
    folder = tmp_path_factory.mktemp("played")
    game = begin(folder, digits)
    return game, run_rounds(game, cast(game, digits), 3)


def test_rounds_are_what_the_equations_say(played, digits):
    game, outcomes = played
    state, momentum, total = digits.start, no_momentum(digits.start), dict.fromkeys(NAMES, 0.0)
    for k, outcome in enumerate(outcomes):
        lots = {v.name: v.said("lot", k).said.lot for v in game.validators}
        drawn = draw(game.task, k, lots)
        sent = {n: digits.train(state, rows, 5) for n, rows in zip(NAMES, SHARES)}
        gain = {n: digits.loss(state, drawn) - digits.loss(one, drawn) for n, one in sent.items()}
        assert outcome.utilities == {n: max(0.0, gain[n]) for n in NAMES}
        first, second, _ = sorted(NAMES, key=lambda n: -gain[n])
        assert outcome.points == {first: 2.0, second: 1.0}
        assert outcome.weights == {first: 0.5, second: 0.5}
        total = {n: total[n] + outcome.points.get(n, 0.0) for n in NAMES}
        assert outcome.total == {n: points for n, points in total.items() if points}
        state, momentum = outer_step(state, momentum, sent, outcome.weights, OUTER)
        assert (outcome.state, outcome.momentum) == (digest_state(state), digest_state(momentum))
    assert digits.loss(state, range(600)) < 0.8 * digits.loss(digits.start, range(600))


def test_all_members_hold_the_same(played):
    game, outcomes = played
    for member in (*game.validators, *game.workers.values()):
        assert member.ledger.round == 3 and not member.ledger.refused
        assert digest_state(member.ledger.state(3)) == outcomes[-1].state
        assert digest_state(member.ledger.momentum(3)) == outcomes[-1].momentum
    one, two = game.validators
    for k in range(3):
        scores = [v.said("scores", k).said for v in (one, two)]
        assert scores[0].scores == scores[1].scores and scores[0].loss == scores[1].loss
        assert one.doubts(k) == {}


def test_who_joins_later_reads_it_all_from_the_board(played, digits, tmp_path):
    game, outcomes = played
    ledger = Ledger(game.board, tmp_path, digits.start)
    assert ledger.round == 3 and digest_state(ledger.state(3)) == outcomes[-1].state


def test_what_is_said_is_said_once(played, digits):
    game, _ = played
    before = tree(Path(game.board.place))
    for one in game.validators:
        again = Validator(one.ledger, one.name, one.private_key, digits, one.clock)
        for k in range(3):
            assert again.said("outcome", k).said == one.said("outcome", k).said
    assert tree(Path(game.board.place)) == before
    one = game.validators[0]
    with pytest.raises(FileExistsError):
        write_message(one.home(0) / "lot", game.task, "lot", 0, one.name, one.private_key, None)


def test_rehearsals_can_be_repeated_to_the_last_bit(played, digits, tmp_path):
    _, outcomes = played
    game = begin(tmp_path, digits)
    again = run_rounds(game, cast(game, digits), 3)
    assert [one.state for one in again] == [one.state for one in outcomes]
    other = begin(tmp_path / "other", digits, random_state=1)
    assert run_round(other, cast(other, digits)).utilities != outcomes[0].utilities


# ---- killed at every step

WATCHED = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


def die_at(number, folder):
    "From now on, this process ends without a word at its n-th change of a file in the folder."
    left = [number]

    def hook(event, arguments):
        if event not in WATCHED or not str(arguments[0]).startswith(str(folder)):
            return
        if event == "open" and not (arguments[1] and set(arguments[1]) & set("wax+")):
            if not (isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
                return
        left[0] -= 1
        if left[0] < 0:
            os._exit(9)

    sys.addaudithook(hook)


def in_a_fork(task):
    "Run something in a process of its own; whether it came to an end."
    child = os.fork()
    if not child:
        code = 1
        try:
            task()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def again(game, member, digits):
    "A member as it is after a new start: nothing but its folder."
    ledger = Ledger(game.board, member.ledger.folder, digits.start)
    if isinstance(member, Worker):
        return Worker(ledger, member.name, member.private_key)
    return Validator(ledger, member.name, member.private_key, digits, member.clock)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot fork")
def test_validator_killed_at_every_step(digits, tmp_path):
    """One validator is killed at its n-th change of a file, for every n, and started again each
    time, until the round is settled; nothing that it has said changes."""
    game = begin(tmp_path, digits)
    other, victim = game.validators
    players, deaths = cast(game, digits), 0
    board = Path(game.board.place)
    for player in players:
        player.before()
    other.work()
    for moment in ("snapshot", "lot and the rest"):
        step = 0
        while True:  # it gets one change further each time
            before = tree(board)
            code = in_a_fork(lambda: (die_at(step, tmp_path), again(game, victim, digits).work()))
            whole = {n: data for n, data in before.items() if "/." not in n}
            assert whole.items() <= tree(board).items()
            if code == 0:
                break
            assert code == 9
            deaths, step = deaths + 1, step + 1 if step < 8 else step + 7
        if moment == "snapshot":
            assert all(player.worker.reveal() == REVEALED for player in players)
            other.work()
    for _ in range(4):
        for one in (other, again(game, victim, digits)):
            one.work()
    assert deaths > 20
    settled, victim = other.ledger.settled(0).said, again(game, victim, digits)
    assert not settled.void and len(settled.points) == 2 and settled.weights
    assert victim.said("outcome", 0).said == settled and victim.doubts(0) == {}


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot fork")
def test_worker_killed_at_every_step_commits_to_one_state(digits, tmp_path):
    game = begin(tmp_path, digits)
    anna = game.workers["anna"]

    def train(state):  # never twice the same
        return {n: v + torch.rand(v.shape, generator=rng) for n, v in state.items()}

    rng, step = torch.Generator(), 0
    rng.seed()
    run = lambda: (rng.seed(), die_at(step, tmp_path), again(game, anna, digits).commit(train))
    while in_a_fork(run):
        step += 1
    anna = again(game, anna, digits)
    said = anna.commit(train)
    assert step > 5 and anna.commit(train).said.hash == said.said.hash
    for player in cast(game, digits)[1:]:
        player.before()
    for one in game.validators:
        one.work()
    assert again(game, anna, digits).reveal() == REVEALED
    reveal = anna.said("reveal", 0)
    shown = reveal.said.nonce, digest_state(reveal.state(game.task))
    assert commitment_hash(game.task, 0, "anna", *shown) == said.said.hash


# ---- windows


def test_a_worker_reveals_neither_early_nor_late(digits, tmp_path):
    game = begin(tmp_path, digits)
    anna, ben, carl = players = cast(game, digits)
    one, two = game.validators
    assert anna.worker.reveal() == EARLY  # nothing is committed
    anna.before(), ben.before()
    assert one.work() == "round 0: waits for commitments"
    game.clock.now += game.task.windows.commit
    assert "snapshot of validator-2" in one.work()
    assert anna.worker.reveal() == EARLY  # one snapshot of two
    assert game.board.authors("reveal", 0) == []
    carl.before()  # in time for the second validator alone, which is no majority
    two.work()
    assert [player.worker.reveal() for player in players] == [REVEALED, REVEALED, TOO_LATE]
    outcome = run_round(game, [])
    assert outcome.utilities.keys() == {"anna", "ben"}


def test_who_does_not_reveal_gets_nothing_and_stops_nobody(digits, tmp_path):
    game = begin(tmp_path, digits)
    players = cast(game, digits)
    players[0].after = lambda: None
    outcome = run_round(game, players)
    assert outcome.utilities["anna"] == 0 and len(outcome.points) == 2
    assert game.validators[0].said("scores", 0).said.scores["anna"] == Score(0.0, HIDDEN)


def test_nobody_helps(digits, tmp_path):
    game = begin(tmp_path, digits)
    players = [
        Player(game.workers[n], lambda state, _, k=k: {a: v + k for a, v in state.items()})
        for k, n in enumerate(NAMES)
    ]
    outcome = run_round(game, players)
    assert (outcome.points, outcome.weights, outcome.total) == ({}, {}, {})
    assert outcome.state == game.task.start and game.ledger.round == 1


def test_majorities():
    lists = [dict(a="1", b="1"), dict(a="1", b="2"), dict(b="1", c="3")]
    assert standing(lists, 3) == dict(a="1", b="1") and standing(lists, 4) == {}
    assert standing(lists[:2], 2) == dict(a="1")


# ---- validators that do not keep to it


def hold_round(game, players):
    "Up to the reveals."
    for player in players:
        player.before()
    for one in game.validators:
        one.work()
    for player in players:
        player.after()


def test_a_silent_validator_makes_the_round_void(digits, tmp_path):
    game = begin(tmp_path, digits, validators=3)
    players = cast(game, digits)
    hold_round(game, players)
    one, two, three = game.validators
    for _ in range(3):
        waits = [one.work(), two.work()]
    assert all("waits for the lot of validator-3" in text for text in waits)
    game.clock.now += game.task.windows.patience
    for _ in range(2):
        one.work(), two.work()
    outcome = one.ledger.settled(0).said
    assert outcome.void and outcome.state == game.task.start and outcome.points == {}
    assert three.work().startswith("round 1")
    assert not run_round(game, players).void


def test_a_lot_that_was_not_committed_to_is_none(digits, tmp_path):
    game = begin(tmp_path, digits)
    one, two = game.validators
    hold_round(game, cast(game, digits))
    two._secret = lambda round: "f" * 64  # it has seen the other's, and wants another draw
    for _ in range(3):
        one.work(), two.work()
    assert lot_hash(game.task, 0, two.name, "f" * 64) != two.said("snapshot", 0).said.hash
    assert one.work() == "round 0: waits for the lot of validator-2"
    assert one.said("scores", 0) is None


def test_lots_bind_the_snapshots_that_were_seen(digits, tmp_path):
    game = begin(tmp_path, digits)
    one, two = game.validators
    hold_round(game, cast(game, digits))
    # the second validator was shown another snapshot of the first
    seen = {name: m.digest for name, m in two.ledger.validators("snapshot", 0).items()}
    two.say("lot", 0, Lot(two._secret(0), seen | {one.name: "0" * 64}, {}))
    for _ in range(3):
        waits = one.work()
    assert waits == "round 0: waits for the lot of validator-2"


class Liar(Digits):
    "A validator's model that finds what it likes."

    def loss(self, state, samples):
        is_start = digest_state(state) == digest_state(self.start)
        return 1.0 if is_start else 1e-3 * state["0.0.bias"][0].item()


def test_one_liar_of_three_changes_nothing_and_is_seen(played, digits, tmp_path):
    _, honest = played
    game = begin(tmp_path, digits, validators=3)
    fair = run_round(game, cast(game, digits))
    game = begin(tmp_path / "lied", digits, validators=3)
    game.validators[2].evaluator = Liar()
    lied = run_round(game, cast(game, digits))
    assert lied.utilities == fair.utilities and lied.state == fair.state
    assert game.validators[0].doubts(0) == {"validator-3": NAMES}


def test_a_validator_that_finds_another_outcome_stops(digits, tmp_path):
    game = begin(tmp_path, digits, validators=3)
    hold_round(game, cast(game, digits))
    *others, odd = game.validators
    for _ in range(2):
        for one in others:
            one.work()
        odd._lot(0), odd._scores(0)
    scores = {who: message.digest for who, message in odd._valid_scores(0).items()}
    state, momentum = digits.start, no_momentum(digits.start)
    digests = digest_state(state), digest_state(momentum)
    wrong = Outcome(False, scores, {}, {}, {}, {}, *digests)
    odd.say("outcome", 0, wrong, {STATE: state, MOMENTUM: momentum})
    assert len(scores) == 3
    for one in others:
        one.work()
    assert odd.ledger.settled(0).said == others[0].said("outcome", 0).said
    with pytest.raises(ValueError, match="a majority has settled another outcome"):
        odd.work()


def test_without_a_majority_the_validators_stop(digits, tmp_path):
    game = begin(tmp_path, digits)
    one, two = game.validators
    state, momentum = digits.start, no_momentum(digits.start)
    for judge, points in ((one, {"anna": 1.0}), (two, {"ben": 1.0})):
        said = Outcome(False, {}, {}, points, {}, {}, digest_state(state), digest_state(momentum))
        judge.say("outcome", 0, said, {STATE: state, MOMENTUM: momentum})
    with pytest.raises(ValueError, match="none has a majority"):
        one.work()


# ---- boards


def test_what_is_changed_on_the_board_later_changes_nothing(played, digits, tmp_path):
    game, outcomes = played
    place = shutil.copytree(game.board.place, tmp_path / "board")
    ledger = Ledger(replace(game.board, place=place), tmp_path / "mine", digits.start)
    assert ledger.round == 3
    shutil.rmtree(place)
    again = Ledger(replace(game.board, place=place), tmp_path / "mine", digits.start)
    assert again.round == 3 and digest_state(again.state(3)) == outcomes[-1].state


def test_garbage_on_the_board_is_left_aside_and_named(digits, tmp_path):
    game = begin(tmp_path, digits)
    there = Path(game.board.place, "round-000000")
    for name in ("commitment-carl", "snapshot-validator-2", "commitment-mallory"):
        (there / name).mkdir(parents=True)
        (there / name / MANIFEST).write_text("{}")
    anna, ben, _ = cast(game, digits)
    anna.before(), ben.before()
    one = game.validators[0]
    game.clock.now += 1
    one.work()
    game.clock.now += game.task.windows.commit
    assert one.work() == "round 0: waits for the snapshot of validator-2"
    assert one.said("snapshot", 0).said.commitments.keys() == {"anna", "ben"}
    assert {key[::2] for key in one.ledger.refused} == {
        ("commitment", "carl"),
        ("commitment", "mallory"),
        ("snapshot", "validator-2"),
    }


def test_outcome_whose_state_is_not_what_it_says_is_not_followed(played, digits, tmp_path):
    game, _ = played
    place = Path(shutil.copytree(game.board.place, tmp_path / "board"))
    one = game.validators[0]
    for judge in game.validators:  # both sign the right outcome, but the first sends another state
        folder = place / f"round-000000/outcome-{judge.name}"
        said = judge.said("outcome", 0).said
        shutil.rmtree(folder)
        state = digits.start if judge is one else judge.ledger.state(1)
        files = {STATE: state, MOMENTUM: judge.ledger.momentum(1)}
        given = "outcome", 0, judge.name, judge.private_key, said, files
        write_message(folder, game.task, *given)
        assert read_message(folder, game.task, "outcome", 0, judge.name).said == said
    ledger = Ledger(replace(game.board, place=place), tmp_path / "mine", digits.start)
    assert digest_state(ledger.settled(0).state(game.task)) == said.state
    assert ledger.settled(0).author == game.validators[1].name


def test_validators_need_the_model_that_is_meant(played, digits):
    game, _ = played
    one = game.validators[0]
    other = Digits()
    other.fingerprint = "0" * 64
    with pytest.raises(ValueError, match="the model of validator-1 is 000000000000"):
        Validator(one.ledger, one.name, one.private_key, other)
