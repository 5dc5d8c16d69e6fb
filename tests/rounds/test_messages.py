"""Messages of a round: hostile until checked, and nobody speaks in another one's name."""

import json
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from helpers import tree
from safetensors.torch import save_file

from harmomoe.base.artefacts import MANIFEST, SIGNATURE, write_manifest
from harmomoe.bundle.signatures import PRIVATE, PUBLIC, new_keys, sign_bundle
from harmomoe.rounds.messages import (
    KINDS,
    STATE,
    Board,
    Commitment,
    HeldOut,
    Lot,
    Outcome,
    OuterSettings,
    Reveal,
    Score,
    Scores,
    Snapshot,
    Task,
    TensorType,
    Windows,
    commitment_hash,
    digest_state,
    fetch_task,
    lot_hash,
    open_name,
    post_task,
    read_message,
    read_state,
    types_of,
    write_message,
    write_state,
)

pytest.importorskip("model_signing", reason='needs pip install "harmomoe[signing]"')

START = {"0.1.up_proj.lora_A": torch.arange(6.0).reshape(2, 3), "0.1.bias": torch.zeros(4)}
NAMES = "anna", "ben", "vera"
A, B = "a" * 64, "b" * 64


@pytest.fixture(scope="module")
def homes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("homes")
    for name in (*NAMES, "stranger"):
        new_keys(folder / name)
    return folder


def key(homes, name):
    return homes / name / PRIVATE


@pytest.fixture(scope="module")
def task(homes):
    public = {name: (homes / name / PUBLIC).read_text() for name in NAMES}
    return Task(
        name="task",
        model=A,
        tensors=types_of(START),
        start=digest_state(START),
        held_out=HeldOut(B, 100, 10),
        validators={"vera": public.pop("vera")},
        workers=public,
        points=[2.0, 1.0],
    )


@pytest.fixture
def reveal(tmp_path, task, homes):
    "Anna's, with a state."
    folder = tmp_path / "sent" / "reveal"
    return write_message(
        folder, task, "reveal", 3, "anna", key(homes, "anna"), Reveal(A), {STATE: START}
    )


SAID = {
    "commitment": ("anna", Commitment(A), {}),
    "snapshot": ("vera", Snapshot({"anna": A}, B), {}),
    "reveal": ("anna", Reveal(A), {STATE: START}),
    "lot": ("vera", Lot(A, {"vera": B}, {"anna": A}), {}),
    "scores": ("vera", Scores(1.5, {"anna": Score(0.25), "ben": Score(0, "late")}, {}), {}),
}
OUTCOME = Outcome(False, {"vera": A}, {"anna": 0.25}, {"anna": 2.0}, {"anna": 5.0}, {}, A, B)


@pytest.mark.parametrize("kind", SAID)
def test_what_is_written_is_read(kind, task, homes, tmp_path):
    author, said, states = SAID[kind]
    folder = write_message(tmp_path / "x", task, kind, 3, author, key(homes, author), said, states)
    found = read_message(folder, task, kind, 3, author)
    assert (found.said, found.author, found.round) == (said, author, 3)
    if states:
        assert digest_state(found.state(task)) == digest_state(START)
    with pytest.raises(FileExistsError, match="nothing that was said is changed"):
        write_message(folder, task, kind, 3, author, key(homes, author), said, states)


def test_every_kind_is_tried():
    assert SAID.keys() | {"outcome"} == KINDS.keys()


def test_outcome_has_two_states(task, homes, tmp_path):
    files = {STATE: START, "momentum.safetensors": START}
    folder = write_message(
        tmp_path / "x", task, "outcome", 0, "vera", key(homes, "vera"), OUTCOME, files
    )
    assert read_message(folder, task, "outcome", 0, "vera").said == OUTCOME


# ---- states


def test_digest_of_a_state_sees_names_types_shapes_and_bits():
    base = digest_state({"a": torch.zeros(2, 3), "b": torch.ones(1)})
    assert base == digest_state({"b": torch.ones(1), "a": torch.zeros(3, 2).T})
    for other in (
        {"a": torch.zeros(3, 2), "b": torch.ones(1)},
        {"a": torch.zeros(2, 3).double(), "b": torch.ones(1)},
        {"a": torch.zeros(2, 3), "c": torch.ones(1)},
        {"a": -torch.zeros(2, 3), "b": torch.ones(1)},
    ):
        assert digest_state(other) != base


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda s: s.pop("0.1.bias"), "0.1.bias is missing"),
        (lambda s: s.update(more=torch.zeros(1)), "more is none of the task's tensors"),
        (lambda s: s.update({"0.1.bias": torch.zeros(5)}), r"\[5\], but must be float32 \[4\]"),
        (lambda s: s.update({"0.1.bias": torch.zeros(4).half()}), "is float16"),
        (lambda s: s.update({"0.1.bias": torch.tensor([0, 1, torch.inf, 0])}), "not finite"),
        (lambda s: s.update({"0.1.bias": torch.zeros(10**5)}), "bytes, but its tensors need"),
    ],
)
def test_states_that_do_not_fit_are_refused(change, message, tmp_path):
    state = dict(START)
    change(state)
    write_state(tmp_path / STATE, state)
    with pytest.raises(ValueError, match=message):
        read_state(tmp_path / STATE, types_of(START))


def test_size_is_compared_before_the_file_is_opened(tmp_path):
    with open(tmp_path / STATE, "wb") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(ValueError, match="1,099,511,627,776 bytes"):
        read_state(tmp_path / STATE, types_of(START))


def test_state_that_is_no_safetensors_is_refused(tmp_path):
    (tmp_path / STATE).write_bytes(b"\xff" * 200)
    with pytest.raises(ValueError, match="is no safetensors file"):
        read_state(tmp_path / STATE, types_of(START))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="no ordinary file"):
        read_state(tmp_path / "pipe", types_of(START))


# ---- tasks


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(validators={}), "validators are none"),
        (dict(points=[1.0, 1.0]), "each less than the one before"),
        (dict(points=[]), "points must be positive"),
        (dict(points=[1.0, -1.0]), "points must be positive"),
        (dict(start="x"), "start is 'x'"),
        (dict(tensors={"../up": TensorType([1], "float32")}), "plain names"),
        (dict(tensors={}), "1 to 100,000"),
        (dict(name="a/b"), "a/b"),
        (dict(workers={"vera": "k"}), "two clients are called|same"),
    ],
)
def test_tasks_that_cannot_be_are_refused(change, message, task):
    with pytest.raises(ValueError, match=message):
        replace(task, **change)


def test_members_may_be_called_like_a_field():
    assert Lot(A, {"lot": A, "self": A}, {"lot": B}).lot == A
    assert Snapshot({"hash": A, "name": B}, B).hash == B


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: TensorType([], "float32"), "shape"),
        (lambda: TensorType([0], "float32"), "shape"),
        (lambda: HeldOut(A, 10, 11), "drawn is 11"),
        (lambda: HeldOut(A, 0, 0), "samples"),
        (lambda: OuterSettings(learning_rate=float("nan")), "learning_rate"),
        (lambda: OuterSettings(momentum=1.0), "momentum"),
        (lambda: OuterSettings(weights="mine"), "weights"),
        (lambda: Windows(commit=-1.0), "commit"),
        (lambda: Score(-0.1), "utility"),
        (lambda: Score(float("nan")), "utility"),
        (lambda: Score(0.0, "a\nb"), "reason"),
        (lambda: Commitment("A" * 64), "hash"),
        (lambda: Lot(A, {"vera": "b"}, {}), "vera"),
        (lambda: Lot(A, {"../../x": A}, {}), "name"),
        (lambda: Snapshot({"a/b": A}, B), "name"),
        (lambda: Scores(1.0, {"..": Score(0.0)}, {}), "name"),
        (lambda: Outcome(False, {"": A}, {}, {}, {}, {}, A, B), "name"),
    ],
)
def test_fields_that_cannot_be_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_task_is_posted_once_and_read_with_its_authors_key(task, homes, tmp_path):
    place = tmp_path / "board"
    post_task(task, place, "vera", key(homes, "vera"))
    assert fetch_task(place, "vera", homes / "vera" / PUBLIC) == task
    with pytest.raises(ValueError, match="foreign key"):
        fetch_task(place, "vera", homes / "ben" / PUBLIC)
    with pytest.raises(FileExistsError):
        post_task(task, place, "vera", key(homes, "vera"))


def test_fingerprint_sees_every_field(task):
    changes = dict(name="other", model=B, start=A, points=[3.0], held_out=HeldOut(B, 100, 11))
    changes |= dict(outer=OuterSettings(0.5), windows=Windows(1.0))
    prints = {replace(task, **{k: v}).fingerprint for k, v in changes.items()}
    assert len(prints | {task.fingerprint}) == 1 + len(changes)


# ---- commitments


def test_hashes_bind_everything(task):
    base = commitment_hash(task, 1, "anna", A, B)
    others = [
        commitment_hash(replace(task, name="other"), 1, "anna", A, B),
        commitment_hash(task, 2, "anna", A, B),
        commitment_hash(task, 1, "ben", A, B),
        commitment_hash(task, 1, "anna", B, B),
        commitment_hash(task, 1, "anna", A, A),
        lot_hash(task, 1, "anna", A),
        lot_hash(task, 1, "anna", B),
        lot_hash(task, 2, "anna", A),
    ]
    assert len({base, *others}) == 9 and base == commitment_hash(task, 1, "anna", A, B)


# ---- what arrives


def copy_of(folder, tmp_path):
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def resigned(folder, homes, change, name="anna"):
    "A message that its author's own key has signed, but not the library written."
    (folder / SIGNATURE).unlink()
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))
    sign_bundle(folder, key(homes, name))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda m: m.update(kind="commitment"), "holds a 'commitment'"),
        (lambda m: m["inputs"].update(round=4), "belongs to round 4"),
        (lambda m: m["inputs"].update(task=B), "of the task bbbb"),
        (lambda m: m["inputs"].update(more=1), "unknown field"),
        (lambda m: m["facts"].update(client="ben"), "says that it comes from ben"),
        (lambda m: m["facts"].update(said={}), "'nonce' is missing"),
        (lambda m: m["facts"].update(said=dict(nonce=A, extra=1)), "unknown field 'extra'"),
        (lambda m: m["facts"].update(said=dict(nonce=7)), "nonce"),
        (lambda m: m["facts"].update(said=[1]), "said"),
        (lambda m: m["files"].update({"../../x": m["files"][STATE]}), "no path inside"),
        (lambda m: m["files"].clear(), "not in the manifest"),
    ],
)
def test_a_members_own_odd_messages_are_refused(change, message, reveal, task, homes):
    resigned(reveal, homes, change)
    with pytest.raises(ValueError, match=message):
        read_message(reveal, task, "reveal", 3, "anna")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda f: (f / "more").touch(), "more does not belong"),
        (lambda f: (f / STATE).unlink(), "state.safetensors is missing"),
        (lambda f: (f / SIGNATURE).unlink(), "signature.json is missing"),
        (lambda f: os.truncate(f / SIGNATURE, 50), "is no JSON"),
        (lambda f: os.truncate(f / SIGNATURE, 2**21), "may have 1,048,576"),
        (lambda f: os.truncate(f / MANIFEST, 2**21), "may have 1,048,576"),
        (lambda f: os.truncate(f / STATE, 2**30), "may have"),
        (lambda f: save_file({"a": torch.ones(1)}, f / STATE), "state.safetensors was changed"),
    ],
)
def test_what_was_changed_on_the_way_is_refused(change, message, reveal, task):
    change(reveal)
    with pytest.raises(ValueError, match=message):
        read_message(reveal, task, "reveal", 3, "anna")


def test_nobody_speaks_for_somebody_else(reveal, task, homes, tmp_path):
    for name in ("ben", "stranger"):
        folder = copy_of(reveal, tmp_path / name)
        (folder / SIGNATURE).unlink()
        sign_bundle(folder, key(homes, name))
        with pytest.raises(ValueError, match="foreign key"):
            read_message(folder, task, "reveal", 3, "anna")
    with pytest.raises(ValueError, match="may not say a reveal: anna, ben may"):
        read_message(reveal, task, "reveal", 3, "vera")
    with pytest.raises(ValueError, match="may not say a lot: vera may"):
        task.key_of("lot", "anna")
    with pytest.raises(FileNotFoundError):
        read_message(tmp_path / "nothing", task, "reveal", 3, "anna")


def test_in_an_open_set_a_name_is_its_keys_fingerprint(task, homes, tmp_path):
    task = replace(task, workers={})
    private = key(homes, "stranger")
    name = open_name(private)
    folder = write_message(tmp_path / "x", task, "commitment", 0, name, private, Commitment(A))
    assert read_message(folder, task, "commitment", 0, name).author == name
    for other in ("stranger", "0" * 64, open_name(key(homes, "ben"))):
        folder = write_message(
            tmp_path / other, task, "commitment", 0, other, private, Commitment(A)
        )
        with pytest.raises(ValueError, match="is not the fingerprint of the key"):
            read_message(folder, task, "commitment", 0, other)
    with pytest.raises(ValueError, match="vera may"):
        task.key_of("snapshot", name, (homes / "stranger" / PUBLIC).read_text())
    with pytest.raises(ValueError, match="no public key"):
        task.key_of("commitment", name, "nonsense")


# ---- the board


@pytest.mark.parametrize("where", ["folder", "memory"])
def test_board_passes_messages_on(where, reveal, task, tmp_path):
    place = tmp_path / "board" if where == "folder" else f"memory://{tmp_path.name}/board"
    board = Board(task, place)
    assert board.authors("reveal", 3) == []
    with pytest.raises(FileNotFoundError):
        board.fetch("reveal", 3, "anna", tmp_path / "none")
    message = read_message(reveal, task, "reveal", 3, "anna")
    board.post(message)
    board.post(message)
    assert board.authors("reveal", 3) == ["anna"] and board.authors("reveal", 4) == []
    found = board.fetch("reveal", 3, "anna", tmp_path / "mine")
    assert asdict(found.said) == asdict(message.said)
    assert tree(found.folder) == tree(reveal)


def test_board_does_not_replace_what_lies_there(reveal, task, homes, tmp_path):
    board = Board(task, tmp_path / "board")
    board.post(read_message(reveal, task, "reveal", 3, "anna"))
    other = write_message(
        tmp_path / "y", task, "reveal", 3, "anna", key(homes, "anna"), Reveal(B), {STATE: START}
    )
    before = tree(tmp_path / "board")
    with pytest.raises(FileExistsError, match="another message in the name of anna"):
        board.post(read_message(other, task, "reveal", 3, "anna"))
    assert tree(tmp_path / "board") == before


def test_half_a_message_on_the_board_is_completed(reveal, task, tmp_path):
    board = Board(task, tmp_path / "board")
    half = tmp_path / "board/round-000003/reveal-anna"
    half.mkdir(parents=True)
    shutil.copy(reveal / STATE, half)
    with pytest.raises(FileNotFoundError):
        board.fetch("reveal", 3, "anna", tmp_path / "mine")
    assert not (tmp_path / "mine").exists()
    board.post(read_message(reveal, task, "reveal", 3, "anna"))
    assert board.fetch("reveal", 3, "anna", tmp_path / "mine").said == Reveal(A)


def test_names_on_the_board_lead_nowhere(reveal, task, tmp_path):
    round = tmp_path / "board/round-000003"
    for name in (
        "reveal-",
        "reveal-..",
        "reveal-.x",
        "reveal-a b",
        "lot-vera",
        "reveal-" + 65 * "a",
    ):
        (round / name).mkdir(parents=True)
    (round / "reveal-ben").symlink_to(tmp_path)
    (round / "reveal-carl").write_text("no folder")
    board = Board(task, tmp_path / "board")
    assert board.authors("reveal", 3) == []
    for name in ("../../x", "/etc", "", "a/b", ".."):
        with pytest.raises(ValueError, match="name"):
            board.fetch("reveal", 3, name, tmp_path / "mine")


def test_too_much_is_not_copied(reveal, task, tmp_path):
    board = Board(task, tmp_path / "board")
    board.post(read_message(reveal, task, "reveal", 3, "anna"))
    there = tmp_path / "board/round-000003/reveal-anna"
    os.truncate(there / STATE, 1 << 40)
    with pytest.raises(ValueError, match="at most"):
        board.fetch("reveal", 3, "anna", tmp_path / "mine")
    os.truncate(there / STATE, 100)
    (there / "one").touch()
    with pytest.raises(ValueError, match="more than"):
        board.fetch("reveal", 3, "anna", tmp_path / "mine")
    (there / "one").unlink()
    (there / STATE).unlink()
    (there / STATE).symlink_to("/etc/passwd")
    with pytest.raises(ValueError, match="link"):
        board.fetch("reveal", 3, "anna", tmp_path / "mine")
    assert not (tmp_path / "mine").exists()


def test_a_manifest_without_a_signature_is_no_message(task, tmp_path):
    folder = tmp_path / "x"
    folder.mkdir()
    write_manifest(folder, "commitment", dict(task=task.fingerprint, round=0), client="anna")
    with pytest.raises(ValueError, match="signature.json is missing"):
        read_message(folder, task, "commitment", 0, "anna")
