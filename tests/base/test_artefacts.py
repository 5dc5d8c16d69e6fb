"Artefacts are whole or absent, are rebuilt when they must be and only then; parameters and seeds are checked."
import json
import random
import shutil
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch

from harmomoe.core import (MANIFEST, atomic_directory, check_parameters, digest, read_manifest, seeded, sha256_file,
                           stage, write_manifest)


def tree(folder):
    "Every file below a folder, hidden ones too, with its content."
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---- digests

def test_sha256_is_that_of_the_bytes_across_block_borders(tmp_path):
    import hashlib
    for size in (0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1):
        (tmp_path / "file").write_bytes(data := random.Random(size).randbytes(size))
        assert sha256_file(tmp_path / "file") == hashlib.sha256(data).hexdigest()


def test_digest_depends_on_values_and_not_on_the_order_of_keys():
    assert digest({"a": 1, "b": [2, None]}) == digest({"b": [2, None], "a": 1})
    others = [{"a": 1}, {"a": 1.5}, {"a": "1"}, {"a": True}, {"a": None}, {"b": 1}, [1], "a"]
    assert len(set(map(digest, others))) == len(others)
    with pytest.raises(TypeError): digest({"a": object()})


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
        with atomic_directory(tmp_path / "made") as partial: (partial / name).write_text(name)
    assert tree(tmp_path) == {"made/second": b"second"}
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_old_folder_survives_when_the_new_one_cannot_be_moved_into_place(tmp_path, monkeypatch):
    with atomic_directory(tmp_path / "made") as partial: (partial / "old").write_bytes(b"old")
    rename = Path.rename

    def refuse_partial(path, target):
        if ".partial-" in path.name: raise PermissionError(path)
        return rename(path, target)
    monkeypatch.setattr(Path, "rename", refuse_partial)
    with pytest.raises(PermissionError), atomic_directory(tmp_path / "made") as partial: (partial / "new").touch()
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
    assert (manifest["kind"], manifest["inputs"], manifest["facts"]) == ("thing", dict(a=1), dict(count=7))
    files = {name: dict(sha256=sha256_file(artefact / name), bytes=3) for name in ("one", "sub/two")}
    assert manifest["files"] == files
    assert manifest["versions"]["torch"] == version("torch") and manifest["versions"]["datasets"] == version("datasets")
    assert read_manifest(artefact) == manifest


def edit(name, content=None):
    def apply(folder):
        if content is None: (folder / name).unlink()
        else: (folder / name).write_bytes(content)
    return apply


@pytest.mark.parametrize("damage, error, said", [
    (edit(MANIFEST), FileNotFoundError, "manifest.json is missing"),
    (edit(MANIFEST, b"{"), ValueError, "is damaged"),
    (edit(MANIFEST, b"\xff\xfe"), ValueError, "is damaged"),
    (edit(MANIFEST, b"[]"), ValueError, "is not a manifest"),
    (edit(MANIFEST, b'{"kind": "thing"}'), ValueError, "is not a manifest"),
    (edit("sub/two"), ValueError, "sub/two missing"),
    (edit("sub/two", b"tow"), ValueError, "two was changed"),
    (edit("sub/three", b""), ValueError, "sub/three not in the manifest"),
    (edit("sub/manifest.json", b"{}"), ValueError, "sub/manifest.json not in the manifest"),
])
def test_damage_is_found_and_named(artefact, damage, error, said):
    damage(artefact)
    with pytest.raises(error, match=said) as caught: read_manifest(artefact, "thing")
    assert str(artefact) in str(caught.value)


def test_another_kind_is_refused(artefact):
    with pytest.raises(ValueError, match="'thing', but a 'bundle' was asked for"): read_manifest(artefact, "bundle")


# ---- stages

class Builder:
    "Counts how often it builds; writes what it is told to."
    def __init__(self, text="content", error=None): self.text, self.error, self.calls = text, error, 0

    def __call__(self, folder):
        self.calls += 1
        (folder / "file").write_text(self.text)
        if self.error: raise self.error
        return dict(length=len(self.text))


def test_stage_builds_once_and_returns_the_folder(tmp_path):
    build = Builder()
    for _ in range(3): assert stage(tmp_path / "made", "thing", dict(a=[1, 2.5, None, "x"]), build) == tmp_path / "made"
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
    if change == "file changed": (folder / "file").write_text("odl")
    if change == "file gone": (folder / "file").unlink()
    if change == "file added": (folder / "more").write_text("")
    if change == "manifest gone": (folder / MANIFEST).unlink()
    kind, inputs = "other" if change == "kind" else "thing", dict(a=2 if change == "inputs" else 1)
    stage(folder, kind, inputs, build, force=change == "force")
    assert build.calls == 1
    assert (folder / "file").read_text() == "content" and set(tree(folder)) == {"file", MANIFEST}


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt()])
def test_failing_build_leaves_the_old_artefact_and_is_tried_again(tmp_path, error):
    folder = tmp_path / "made"
    stage(folder, "thing", dict(a=1), Builder("old"))
    before = tree(tmp_path)
    with pytest.raises(type(error)): stage(folder, "thing", dict(a=2), Builder("half", error))
    assert tree(tmp_path) == before
    build = Builder("old")
    stage(folder, "thing", dict(a=1), build)
    assert build.calls == 0                                   # the old one is still good
    stage(folder, "thing", dict(a=2), build := Builder())
    assert build.calls == 1


def test_failing_first_build_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError): stage(tmp_path / "made", "thing", {}, Builder("half", RuntimeError()))
    assert list(tmp_path.iterdir()) == []


def test_inputs_that_json_cannot_hold_are_refused_before_the_build(tmp_path):
    build = Builder()
    with pytest.raises(TypeError): stage(tmp_path / "made", "thing", dict(a=np.int64(1)), build)
    assert build.calls == 0


def test_a_copy_of_an_artefact_is_as_good(tmp_path):
    stage(tmp_path / "made", "thing", dict(a=1), Builder())
    shutil.copytree(tmp_path / "made", tmp_path / "copy")
    build = Builder()
    stage(tmp_path / "copy", "thing", dict(a=1), build)
    assert build.calls == 0


# ---- seeds

def draws(): return random.random(), np.random.rand(), torch.rand(1).item()


def test_seeded_blocks_repeat_and_leave_the_outer_generators_alone():
    random.seed(1); np.random.seed(1); torch.manual_seed(1)
    expected = [draws(), draws()]
    random.seed(1); np.random.seed(1); torch.manual_seed(1)
    outer = [draws()]
    with seeded(5): first = draws()
    with pytest.raises(KeyError), seeded(5):
        second = draws()
        raise KeyError
    outer.append(draws())
    with seeded(6): third = draws()
    assert first == second and outer == expected
    assert all(a != b for a, b in zip(first, third))


# ---- parameters

PARAMETERS = """name = "x"   # a comment
count = 3
rate: float = None
size: int = None
label: str = None
flag = True
blend = .3
"""


def cells(given=None):
    injected = [] if given is None else ["# Parameters\n" + given]
    return ["", PARAMETERS, *injected, "the cell that calls"]


def test_defaults_alone_are_returned():
    assert check_parameters(cells()) == dict(name="x", count=3, rate=None, size=None, label=None, flag=True, blend=.3)


def test_given_values_replace_defaults():
    given = 'name = "y"\ncount = 5\nrate = 1\nsize = 2\nlabel = "z"\nflag = False\nblend = 1\n'
    assert check_parameters(cells(given)) == dict(name="y", count=5, rate=1, size=2, label="z", flag=False, blend=1)
    assert check_parameters(cells("rate = None\nlabel = None\n"))["rate"] is None


def test_the_cell_may_be_run_twice_in_jupyter():
    again = "from harmomoe.core import check_parameters\nparameters = check_parameters(In)"
    assert check_parameters(["", PARAMETERS, again, again])["count"] == 3


@pytest.mark.parametrize("given, said", [
    ("cuont = 3", "unknown parameter 'cuont'. Did you mean 'count'"),
    ("zzz = 3", "unknown parameter 'zzz'. Known parameters: name, count, rate, size, label, flag, blend"),
    ('count = "3"', "'count' is '3', but must be of type int"),
    ("count = 3.5", "must be of type int"),
    ("count = True", "must be of type int"),
    ("count = None", "must be of type int"),
    ("flag = 1", "must be of type bool"),
    ('flag = "no"', "must be of type bool"),
    ("name = 3", "must be of type str"),
    ("label = 3", "must be of type str"),
    ('rate = "fast"', "must be of type float"),
    ("rate = True", "must be of type float"),
    ("size = 1.5", "must be of type int"),
    ("blend = [1]", "must be of type float"),
])
def test_unknown_and_mistyped_parameters_are_refused(given, said):
    with pytest.raises(ValueError) as caught: check_parameters(cells(given))
    assert said in str(caught.value)
