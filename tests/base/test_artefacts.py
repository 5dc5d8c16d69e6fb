"Artefacts are whole or absent, and are rebuilt when they must be and only then."

import hashlib
import json
import os
import random
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

from harmomoe.base.artefacts import (
    MANIFEST,
    atomic_directory,
    digest,
    find_kept,
    keep,
    read_manifest,
    sha256_file,
    shared_stage,
    stage,
    stages_run,
    unfinished,
    write_manifest,
)


def tree(folder):
    "Every file below a folder, hidden ones too, with its content."
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


# ---- digests


def test_sha256_is_that_of_the_bytes_across_block_borders(tmp_path):
    for size in (0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1):
        data = random.Random(size).randbytes(size)
        (tmp_path / "file").write_bytes(data)
        assert sha256_file(tmp_path / "file") == hashlib.sha256(data).hexdigest()


def test_digest_depends_on_values_and_not_on_the_order_of_keys():
    assert digest({"a": 1, "b": [2, None]}) == digest({"b": [2, None], "a": 1})
    others = [{"a": 1}, {"a": 1.5}, {"a": "1"}, {"a": True}, {"a": None}, {"b": 1}, [1], "a"]
    assert len(set(map(digest, others))) == len(others)
    with pytest.raises(TypeError):
        digest({"a": object()})


# ---- atomic folders


def test_folder_appears_when_the_block_ends_with_all_files(tmp_path):
    with atomic_directory(tmp_path / "deep" / "made") as partial:
        (partial / "sub").mkdir()
        (partial / "sub" / "file").write_text("x")
        assert not (tmp_path / "deep" / "made").exists()
    assert tree(tmp_path) == {"deep/made/sub/file": b"x"}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_block_that_raises_leaves_nothing_new_and_the_old_folder_as_it_was(tmp_path, error):
    for before in ({}, {"made/old": b"old"}):
        if before:
            (tmp_path / "made").mkdir()
            (tmp_path / "made" / "old").write_bytes(b"old")
        with pytest.raises(error), atomic_directory(tmp_path / "made") as partial:
            (partial / "half").write_text("half")
            raise error
        assert tree(tmp_path) == before
        assert [path.name for path in tmp_path.iterdir()] == (["made"] if before else [])


def test_folder_is_replaced_as_a_whole(tmp_path):
    for name in ("first", "second"):
        with atomic_directory(tmp_path / "made") as partial:
            (partial / name).write_text(name)
    assert tree(tmp_path) == {"made/second": b"second"}
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_old_folder_survives_when_the_new_one_cannot_be_moved_into_place(tmp_path, monkeypatch):
    with atomic_directory(tmp_path / "made") as partial:
        (partial / "old").write_bytes(b"old")
    rename = Path.rename

    def refuse_partial(path, target):
        if ".partial-" in path.name:
            raise PermissionError(path)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse_partial)
    with pytest.raises(PermissionError), atomic_directory(tmp_path / "made") as partial:
        (partial / "new").touch()
    assert tree(tmp_path) == {"made/old": b"old"}


# ---- manifests


@pytest.fixture
def artefact(tmp_path):
    folder = tmp_path / "artefact"
    (folder / "sub").mkdir(parents=True)
    (folder / "one").write_bytes(b"one")
    (folder / "sub" / "two").write_bytes(b"two")
    write_manifest(folder, "thing", dict(a=1), count=7)
    return folder


def test_manifest_says_kind_inputs_facts_versions_and_every_file(artefact):
    manifest = read_manifest(artefact, "thing")
    assert manifest == json.loads((artefact / MANIFEST).read_text())
    assert manifest["kind"] == "thing"
    assert (manifest["inputs"], manifest["facts"]) == (dict(a=1), dict(count=7))
    files = {
        name: dict(sha256=sha256_file(artefact / name), bytes=3) for name in ("one", "sub/two")
    }
    assert manifest["files"] == files
    for package in ("torch", "datasets"):
        assert manifest["versions"][package] == version(package)
    assert read_manifest(artefact) == manifest


def edit(name, content=None):
    def apply(folder):
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(content)

    return apply


def told(**changes):
    "What the manifest says, changed."

    def apply(folder):
        found = json.loads((folder / MANIFEST).read_text()) | changes
        (folder / MANIFEST).write_text(json.dumps(found))

    return apply


def listed(name, **changes):
    "What the manifest says of one file, changed; files that it does not list are as `one`."

    def apply(folder):
        files = json.loads((folder / MANIFEST).read_text())["files"]
        told(files=files | {name: files["one"] | changes})(folder)

    return apply


@pytest.mark.parametrize(
    "damage, error, said",
    [
        (edit(MANIFEST), FileNotFoundError, "manifest.json is missing"),
        (edit(MANIFEST, b"{"), ValueError, "manifest.json is no JSON"),
        (edit(MANIFEST, b"\xff\xfe"), ValueError, "manifest.json is no JSON"),
        (edit(MANIFEST, b"[]"), ValueError, r"manifest.json: it is \[\]"),
        (edit(MANIFEST, b'{"kind": "thing"}'), ValueError, "the field 'inputs' is missing"),
        (told(more=1), ValueError, "unknown field 'more'"),
        (told(kind=["thing"]), ValueError, "kind is \\['thing'\\]"),
        (told(inputs=None), ValueError, "inputs is None"),
        (told(files=["one"]), ValueError, "files is \\['one'\\]"),
        (listed("one", sha256="x" * 64), ValueError, "must be 64 hexadecimal digits"),
        (listed("one", sha256=7), ValueError, "files.one.sha256 is 7"),
        (listed("one", bytes=4), ValueError, "one has 3 bytes, but .* says 4"),
        (listed("one", bytes="three"), ValueError, "files.one.bytes is 'three'"),
        (listed("../artefact/one"), ValueError, "../artefact/one missing"),
        (listed(MANIFEST), ValueError, "manifest.json missing"),
        (edit("sub/two"), ValueError, "sub/two missing"),
        (edit("sub/two", b"tow"), ValueError, "two was changed"),
        (edit("sub/three", b""), ValueError, "sub/three not in the manifest"),
        (edit("sub/manifest.json", b"{}"), ValueError, "sub/manifest.json not in the manifest"),
    ],
)
def test_damage_is_found_and_named(artefact, damage, error, said):
    damage(artefact)
    with pytest.raises(error, match=said) as caught:
        read_manifest(artefact, "thing")
    assert str(artefact) in str(caught.value)


def test_another_kind_is_refused(artefact):
    with pytest.raises(ValueError, match="'thing', but a 'bundle' was asked for"):
        read_manifest(artefact, "bundle")


# ---- stages


class Builder:
    "Counts how often it builds; writes what it is told to."

    def __init__(self, text="content", error=None):
        self.text, self.error, self.calls = text, error, 0

    def __call__(self, folder):
        self.calls += 1
        (folder / "file").write_text(self.text)
        if self.error:
            raise self.error
        return dict(length=len(self.text))


def test_stage_builds_once_and_returns_the_folder(tmp_path):
    build, inputs = Builder(), dict(a=[1, 2.5, None, "x"])
    for _ in range(3):
        assert stage(tmp_path / "made", "thing", inputs, build) == tmp_path / "made"
    assert build.calls == 1
    assert read_manifest(tmp_path / "made", "thing")["facts"] == dict(length=7)


def test_stage_takes_tuples_for_lists_as_json_does(tmp_path):
    build = Builder()
    stage(tmp_path / "made", "thing", dict(a=(1, 2)), build)
    stage(tmp_path / "made", "thing", dict(a=[1, 2]), build)
    assert build.calls == 1


CHANGES = ["inputs", "kind", "force", "file changed", "file gone", "file added", "manifest gone"]


@pytest.mark.parametrize("change", CHANGES)
def test_stage_builds_again_after_any_change(tmp_path, change):
    folder, build = tmp_path / "made", Builder()
    stage(folder, "thing", dict(a=1), Builder("old"))
    if change == "file changed":
        (folder / "file").write_text("odl")
    if change == "file gone":
        (folder / "file").unlink()
    if change == "file added":
        (folder / "more").write_text("")
    if change == "manifest gone":
        (folder / MANIFEST).unlink()
    kind, inputs = "other" if change == "kind" else "thing", dict(a=2 if change == "inputs" else 1)
    stage(folder, kind, inputs, build, force=change == "force")
    assert build.calls == 1
    assert (folder / "file").read_text() == "content" and set(tree(folder)) == {"file", MANIFEST}


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt()])
def test_failing_build_leaves_the_old_artefact_and_is_tried_again(tmp_path, error):
    folder = tmp_path / "made"
    stage(folder, "thing", dict(a=1), Builder("old"))
    before = tree(tmp_path)
    with pytest.raises(type(error)):
        stage(folder, "thing", dict(a=2), Builder("half", error))
    assert tree(tmp_path) == before
    build = Builder("old")
    stage(folder, "thing", dict(a=1), build)
    assert build.calls == 0  # the old one is still good
    build = Builder()
    stage(folder, "thing", dict(a=2), build)
    assert build.calls == 1


def test_failing_first_build_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError):
        stage(tmp_path / "made", "thing", {}, Builder("half", RuntimeError()))
    assert list(tmp_path.iterdir()) == []


def test_inputs_that_json_cannot_hold_are_refused_before_the_build(tmp_path):
    build = Builder()
    with pytest.raises(TypeError):
        stage(tmp_path / "made", "thing", dict(a=np.int64(1)), build)
    assert build.calls == 0


def test_a_copy_of_an_artefact_is_as_good(tmp_path):
    stage(tmp_path / "made", "thing", dict(a=1), Builder())
    shutil.copytree(tmp_path / "made", tmp_path / "copy")
    build = Builder()
    stage(tmp_path / "copy", "thing", dict(a=1), build)
    assert build.calls == 0


def test_versions_lie_side_by_side_and_are_found_again(tmp_path):
    build = Builder()
    first, second = (keep(tmp_path, "thing", dict(a=a), build) for a in (1, 2))
    assert first.parent == tmp_path and first.name.startswith("thing-") and first != second
    assert keep(tmp_path, "thing", dict(a=1), build) == first and build.calls == 2
    assert find_kept(tmp_path, "thing", dict(a=2)) == second
    assert find_kept(tmp_path, "thing", dict(a=3)) is None
    (first / "file").unlink()
    assert find_kept(tmp_path, "thing", dict(a=1)) is None


def test_one_of_several_builds_and_the_others_wait(tmp_path):
    build, begun = Builder(), threading.Barrier(3)

    def ask(_):
        begun.wait()
        return shared_stage(tmp_path / "made", "thing", dict(a=1), build)

    with ThreadPoolExecutor(3) as three:
        assert list(three.map(ask, range(3))) == [tmp_path / "made"] * 3
    assert build.calls == 1 and os.listdir(tmp_path) == ["made"]


# ---- what was built


def test_what_is_built_is_listed_and_what_is_found_is_not(tmp_path):
    with stages_run() as first:
        stage(tmp_path / "one", "one", dict(a=1), Builder())
        keep(tmp_path, "two", dict(a=1), Builder())
        shared_stage(tmp_path / "three", "three", dict(a=1), Builder())
    assert first == ["one", "two", "three"]
    with stages_run() as second:
        stage(tmp_path / "one", "one", dict(a=1), Builder())
        keep(tmp_path, "two", dict(a=2), Builder())
        shared_stage(tmp_path / "three", "three", dict(a=1), Builder())
        stage(tmp_path / "one", "one", dict(a=1), Builder(), force=True)
    assert second == ["two", "one"]


def test_a_stage_inside_another_is_listed_before_it(tmp_path):
    def outer(folder):
        stage(tmp_path / "inner", "inner", {}, Builder())
        (folder / "file").touch()

    with stages_run() as built:
        stage(tmp_path / "outer", "outer", {}, outer)
    assert built == ["inner", "outer"]


def test_blocks_inside_one_another_each_list_what_is_built_in_them(tmp_path):
    with stages_run() as outer:
        with stages_run() as inner:
            stage(tmp_path / "one", "one", {}, Builder())
        stage(tmp_path / "two", "two", {}, Builder())
    stage(tmp_path / "three", "three", {}, Builder())
    assert (inner, outer) == (["one"], ["one", "two"])


def test_a_build_that_fails_is_not_listed_and_the_list_ends_with_its_block(tmp_path):
    with pytest.raises(RuntimeError), stages_run() as built:
        stage(tmp_path / "made", "thing", {}, Builder("half", RuntimeError()))
    stage(tmp_path / "made", "thing", {}, Builder())
    assert built == []


def test_threads_are_listed_too(tmp_path):
    def build(number):
        stage(tmp_path / str(number), str(number), {}, Builder())

    with stages_run() as built, ThreadPoolExecutor(2) as both:
        list(both.map(build, range(6)))
    assert sorted(built) == list("012345")


# ---- what is interrupted


def interrupted(folder, error=None):
    "A build that leaves a checkpoint, and takes one up; it may be interrupted before its end."
    checkpoint = unfinished(folder) / "checkpoint"
    before = checkpoint.read_text() if checkpoint.exists() else ""
    checkpoint.write_text(before + "x")
    if error:
        raise error
    (folder / "file").write_text(before)
    return dict(length=len(before))


@pytest.mark.parametrize("error", [RuntimeError(), KeyboardInterrupt()])
def test_checkpoints_survive_an_interruption_and_are_gone_when_all_is_done(tmp_path, error):
    made = tmp_path / "made"
    for _ in range(2):
        with pytest.raises(type(error)):
            stage(made, "thing", dict(a=1), lambda folder: interrupted(folder, error))
        assert [path.name for path in tmp_path.iterdir()] == [".made.unfinished"]
    stage(made, "thing", dict(a=1), interrupted)
    assert tree(tmp_path).keys() == {"made/file", f"made/{MANIFEST}"}
    assert os.listdir(tmp_path) == ["made"]
    assert read_manifest(made, "thing")["facts"] == dict(length=2)


def test_checkpoints_lie_beside_every_kind_of_stage(tmp_path):
    for ask in (keep, lambda folder, *rest: shared_stage(folder / "made", *rest)):
        with pytest.raises(RuntimeError):
            ask(tmp_path, "thing", {}, lambda folder: interrupted(folder, RuntimeError()))
        assert read_manifest(ask(tmp_path, "thing", {}, interrupted))["facts"] == dict(length=1)
    assert not list(tmp_path.glob(".*.unfinished"))


@pytest.mark.parametrize("change", ["inputs", "kind", "force", "half a note"])
def test_checkpoints_of_something_else_are_thrown_away(tmp_path, change):
    made = tmp_path / "made"
    with pytest.raises(RuntimeError):
        stage(made, "thing", dict(a=1), lambda folder: interrupted(folder, RuntimeError()))
    if change == "half a note":
        (tmp_path / ".made.unfinished" / "made_from.json").write_text('{"inp')
    kind, inputs = "other" if change == "kind" else "thing", dict(a=2 if change == "inputs" else 1)
    stage(made, kind, inputs, interrupted, force=change == "force")
    assert read_manifest(made)["facts"] == dict(length=0) and os.listdir(tmp_path) == ["made"]


def test_an_interruption_leaves_the_old_artefact_as_it_was(tmp_path):
    stage(tmp_path / "made", "thing", dict(a=1), Builder("old"))
    before = tree(tmp_path / "made")
    with pytest.raises(RuntimeError):
        stage(
            tmp_path / "made",
            "thing",
            dict(a=2),
            lambda folder: interrupted(folder, RuntimeError()),
        )
    assert tree(tmp_path / "made") == before


def test_folder_for_checkpoints_is_only_for_what_is_being_built(tmp_path):
    seen = []
    stage(tmp_path / "made", "thing", {}, lambda folder: seen.append(folder))
    for folder in (tmp_path / "made", seen[0]):
        with pytest.raises(ValueError, match="is not a folder that a stage is filling now"):
            unfinished(folder)
