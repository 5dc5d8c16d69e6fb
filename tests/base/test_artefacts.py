"Artefacts are whole or absent, and are rebuilt when they must be and only then."

import errno
import hashlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import tree
from safetensors.torch import save_file

from harmomoe.base import artefacts
from harmomoe.base.artefacts import (
    MANIFEST,
    atomic_directory,
    digest,
    find_kept,
    keep,
    read_manifest,
    recover,
    reserve,
    sha256_file,
    stage,
    stages_run,
    unfinished,
    write_manifest,
)

FORK = multiprocessing.get_context("fork")


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


def test_weights_may_be_read_by_whom_other_files_may(tmp_path):
    "safetensors makes files that only their owner may read; who serves a model may be another."
    with artefacts.atomic_directory(tmp_path / "model") as folder:
        (folder / "parts").mkdir()
        (folder / "config.json").touch()
        for place in (folder, folder / "parts"):
            save_file({"a": torch.ones(2)}, place / "model.safetensors")
    (tmp_path / "elsewhere").write_bytes(b"")
    with artefacts.atomic_directory(tmp_path / "linked") as folder:
        (folder / "model.safetensors").symlink_to(tmp_path / "elsewhere")
        (tmp_path / "elsewhere").chmod(0o600)
    mode = lambda path: path.stat().st_mode & 0o777
    files = [path for path in (tmp_path / "model").rglob("*") if path.is_file()]
    assert len(files) == 3 and {mode(path) for path in files} == {mode(files[0])}
    assert mode(tmp_path / "model" / "model.safetensors") == mode(tmp_path / "model/config.json")
    assert mode(tmp_path / "elsewhere") == 0o600  # what a link points at is not ours


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
        (listed("../artefact/one"), ValueError, "'../artefact/one', which is no path inside"),
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
        return stage(tmp_path / "made", "thing", dict(a=1), build)

    with ThreadPoolExecutor(3) as three:
        assert list(three.map(ask, range(3))) == [tmp_path / "made"] * 3
    assert build.calls == 1 and os.listdir(tmp_path) == ["made"]


# ---- what was built


def test_what_is_built_is_listed_and_what_is_found_is_not(tmp_path):
    with stages_run() as first:
        stage(tmp_path / "one", "one", dict(a=1), Builder())
        keep(tmp_path, "two", dict(a=1), Builder())
        stage(tmp_path / "three", "three", dict(a=1), Builder())
    assert first == ["one", "two", "three"]
    with stages_run() as second:
        stage(tmp_path / "one", "one", dict(a=1), Builder())
        keep(tmp_path, "two", dict(a=2), Builder())
        stage(tmp_path / "three", "three", dict(a=1), Builder())
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
    for ask in (keep, lambda folder, *rest: stage(folder / "made", *rest)):
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


# ---- what is no plain file


def pipe(path):
    os.mkfifo(path)


def listening(path):
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(str(path))


def links_to(target):
    return lambda path: path.symlink_to(target)


ODD = {
    "pipe": (pipe, "is a pipe"),
    "socket": (listening, "is a pipe, a socket or a device"),
    "link to a file beside": (links_to("one"), "is a link"),
    "link to a file elsewhere": (links_to("/etc/hostname"), "is a link"),
    "link to a folder": (links_to("/etc"), "is a link"),
    "link to nothing": (links_to("nothing"), "is a link"),
    "link to itself": (links_to("two"), "is a link"),
}


@pytest.mark.parametrize("place", ["two", "sub/two", "sub/more/two", MANIFEST])
@pytest.mark.parametrize("odd", ODD)
def test_what_is_no_plain_file_is_refused_and_neither_opened_nor_followed(
    artefact, odd, place, monkeypatch
):
    make, said = ODD[odd]
    (artefact / "sub" / "more").mkdir()
    (artefact / place).unlink(missing_ok=True)
    monkeypatch.chdir((artefact / place).parent)  # the name of a socket may not be long
    make(Path(place).name if odd == "socket" else artefact / place)
    with pytest.raises(ValueError, match=f"{place} {said}"):
        read_manifest(artefact, "thing")
    if place != MANIFEST:
        with pytest.raises(ValueError, match=f"{place} {said}"):
            write_manifest(artefact, "thing", dict(a=1))


def test_a_stage_is_built_again_where_something_is_no_plain_file(tmp_path):
    build, made = Builder(), tmp_path / "made"
    stage(made, "thing", {}, build)
    os.mkfifo(made / "more")
    (tmp_path / "kept").write_text("kept")
    (made / "link").symlink_to(tmp_path / "kept")
    stage(made, "thing", {}, build)
    assert build.calls == 2 and set(tree(tmp_path)) == {"kept", "made/file", f"made/{MANIFEST}"}


def test_an_artefact_may_be_reached_by_a_link_and_its_files_have_many_names(artefact, tmp_path):
    (tmp_path / "link").symlink_to(artefact)
    os.link(artefact / "one", tmp_path / "other")
    assert read_manifest(tmp_path / "link", "thing") == read_manifest(artefact, "thing")


@pytest.mark.parametrize(
    "name", ["../one", "sub/../one", "/etc/hostname", "..", ".", "", "sub//two", "./one", "sub/"]
)
def test_a_path_that_leaves_the_folder_or_has_two_spellings_is_refused(artefact, name):
    listed(name)(artefact)
    with pytest.raises(ValueError, match="which is no path inside its folder"):
        read_manifest(artefact)


def test_a_folder_called_like_a_manifest_is_none(tmp_path):
    (tmp_path / MANIFEST).mkdir()
    with pytest.raises(FileNotFoundError, match="no finished artefact"):
        read_manifest(tmp_path)


# ---- writes that fail


@pytest.fixture
def small_disk(tmp_path):
    "A disk of 1 MB."
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("may not mount a small disk here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


LARGE = np.zeros(500_000)
WRITERS = {
    "bytes": lambda folder: (folder / "file").write_bytes(LARGE.tobytes()),
    "numpy": lambda folder: np.save(folder / "file.npy", LARGE),
    "numpy, zipped": lambda folder: np.savez(folder / "file.npz", a=LARGE),
    "safetensors": lambda folder: save_file(dict(a=torch.tensor(LARGE)), folder / "file"),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_is_named_and_the_old_artefact_stays(small_disk, writer):
    made = small_disk / "made"
    stage(made, "thing", dict(a=1), Builder("old"))
    before = tree(small_disk)
    for ask in (
        lambda: stage(made, "thing", dict(a=2), WRITERS[writer]),
        lambda: writing_into(made, WRITERS[writer]),
    ):
        with pytest.raises(OSError) as caught:
            ask()
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.strerror.startswith(f"{made} cannot be written: No space left on dev")
        assert "bytes are free there). Free some space" in caught.value.strerror
        assert tree(small_disk) == before and os.listdir(small_disk) == ["made"]


def writing_into(path, write):
    with atomic_directory(path) as partial:
        write(partial)


def limited(work, connection):
    "Do it where no file may be larger than 100 kB; send the error, and what is left."
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    try:
        work()
    except OSError as error:
        connection.send((type(error), error.errno, error.strerror))


def outcome(work, run=limited):
    "What work in a process of its own says."
    receive, send = FORK.Pipe(duplex=False)
    alone = FORK.Process(target=run, args=(work, send))
    alone.start()
    send.close()
    alone.join()
    return receive.recv()


@pytest.mark.parametrize("writer", WRITERS)
def test_a_limit_on_files_is_named(tmp_path, writer):
    made = tmp_path / "made"
    kind, number, said = outcome(lambda: stage(made, "thing", {}, WRITERS[writer]))
    assert (kind, number) == (OSError, errno.EFBIG) and os.listdir(tmp_path) == []
    assert said.startswith(f"{made} cannot be written: File too large. Raise the limit")


def unprivileged(work, connection):
    "Do it as one who may not write there."
    if os.getuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    try:
        work()
    except OSError as error:
        connection.send((type(error), error.errno, error.strerror))


def test_a_forbidden_folder_is_named(tmp_path):
    made = tmp_path / "made"
    stage(made, "thing", dict(a=1), Builder())
    tmp_path.chmod(0o555)
    try:
        kind, number, said = outcome(
            lambda: stage(made, "thing", dict(a=2), Builder()), unprivileged
        )
    finally:
        tmp_path.chmod(0o755)
    assert (kind, number) == (PermissionError, errno.EACCES)
    assert said == (
        f"{made} cannot be written: Permission denied. Choose a folder that you may write to."
    )
    assert os.listdir(tmp_path) == ["made"]


@pytest.mark.parametrize("place", ["folder", "file"])
def test_a_name_that_is_too_long_is_named(tmp_path, place):
    name = "long" * 100
    made = tmp_path / (name if place == "folder" else "made")
    with pytest.raises(OSError) as caught:
        writing_into(made, lambda folder: (folder / name).touch())
    long = made if place == "folder" else made / name  # as it would have been called in the end
    assert caught.value.errno == errno.ENAMETOOLONG and os.listdir(tmp_path) == []
    assert caught.value.strerror == (
        f"{long} cannot be written: File name too long. Choose a shorter name."
    )


ELSEWHERE = [
    FileNotFoundError(errno.ENOENT, "No such file", "data/missing.png"),
    PermissionError(errno.EACCES, "Permission denied", "data/secret.png"),
    OSError(errno.ENOSPC, "No space left on device", "/elsewhere/file"),
    OSError(errno.EIO, "Input/output error"),  # as from reading
    FileNotFoundError("a sentence of a reader's own"),
    ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
]


@pytest.mark.parametrize("error", ELSEWHERE, ids=repr)
def test_errors_that_are_not_about_the_folder_stay_as_they_are(tmp_path, error):
    def fails(folder):
        raise error

    with pytest.raises(type(error)) as caught:
        stage(tmp_path / "made", "thing", {}, fails)
    assert caught.value is error and error.__cause__ is None


def test_the_innermost_of_several_artefacts_is_named(tmp_path):
    def inner(folder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError) as caught:
        stage(
            tmp_path / "outer",
            "outer",
            {},
            lambda folder: stage(unfinished(folder) / "inner", "inner", {}, inner),
        )
    inner_path = tmp_path / ".outer.unfinished" / "inner"
    assert caught.value.strerror.startswith(f"{inner_path} cannot be written: No space left")


def test_half_a_manifest_is_not_left_and_the_one_before_stays(artefact, monkeypatch):
    before = tree(artefact)
    write_text = Path.write_text

    def full(path, text, **options):
        write_text(path, text[:10], **options)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match=f"{artefact / MANIFEST} cannot be written: No space left"):
        write_manifest(artefact, "thing", dict(a=2))
    assert tree(artefact) == before


# ---- room that is taken beforehand


@pytest.mark.parametrize("system", ["allocates", "has no such call", "cannot here"])
def test_reserved_files_have_their_size_and_their_blocks(tmp_path, system, monkeypatch):
    if system == "has no such call":
        monkeypatch.delattr(os, "posix_fallocate")
    if system == "cannot here":

        def refuse(*given):
            raise OSError(errno.EOPNOTSUPP, "")

        monkeypatch.setattr(os, "posix_fallocate", refuse)
    sizes = {tmp_path / str(size): size for size in (1, 5000, (1 << 20) - 1, 1 << 20, 3_000_000)}
    reserve(sizes, "a test")
    for file, size in sizes.items():
        assert file.stat().st_size == size <= 512 * file.stat().st_blocks + 4096
        assert not any(file.read_bytes())


@pytest.mark.parametrize("system", ["allocates", "has no such call"])
def test_too_little_room_is_an_error_that_leaves_nothing(small_disk, system, monkeypatch):
    if system == "has no such call":
        monkeypatch.delattr(os, "posix_fallocate")
    with pytest.raises(OSError) as caught:
        reserve({small_disk / "one": 700_000, small_disk / "two": 700_000}, "the pool")
    assert caught.value.errno == errno.ENOSPC and os.listdir(small_disk) == []
    assert caught.value.strerror == (
        "the pool: 1,400,000 bytes are needed, but 1,048,576 are free. Free some space, or choose "
        "a folder on another disk."
    )
    reserve({small_disk / "one": 700_000}, "the pool")  # all room was given back


def test_another_reason_why_room_cannot_be_taken_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere/one cannot be written: No such file"):
        reserve({tmp_path / "nowhere" / "one": 10}, "a test")


# ---- what killed runs leave


def killed(work):
    "Do it in a process that kills itself."
    process = FORK.Process(target=work)
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL


def kill_me(*given):
    os.kill(os.getpid(), signal.SIGKILL)


def kinds(folder):
    "Names in a folder, without random digits."
    return sorted(name.partition("-")[0] for name in os.listdir(folder))


def rename_and_die(number):
    "A process's `Path.rename` that kills it at its renaming of this number."
    rename, calls = Path.rename, []

    def counted(path, target):
        calls.append(target)
        if len(calls) == number:
            kill_me()
        return rename(path, target)

    Path.rename = counted


def replaced_until(number, made):
    "A process that replaces an artefact, and is killed at its renaming of this number."

    def work():
        rename_and_die(number)
        stage(made, "thing", dict(a=2), Builder("new"))

    return work


NEXT = {
    "stage": lambda made: stage(made, "thing", dict(a=1), Builder("rebuilt")),
    "keep": lambda made: recover(made.parent),
    "atomic_directory": lambda made: writing_into(made, Builder("rebuilt")),
}


@pytest.mark.parametrize("after", NEXT)
def test_a_kill_in_the_middle_of_a_build_is_cleared_at_the_next_use(tmp_path, after):
    made = tmp_path / "made"
    killed(lambda: stage(made, "thing", dict(a=1), kill_me))
    assert kinds(tmp_path) == [".made.lock", ".made.partial"]
    NEXT[after](made)
    assert os.listdir(tmp_path) == ([] if after == "keep" else ["made"])


# renaming 1 puts the old one aside, 2 puts the new one in place, 3 comes before the old is deleted
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("after", [*NEXT, "read"])
def test_a_kill_around_the_renames_loses_nothing(tmp_path, number, after):
    made = tmp_path / "made"
    stage(made, "thing", dict(a=1), Builder("old"))
    killed(replaced_until(number, made))
    assert made.exists() == (number != 2) and ".made.lock" in kinds(tmp_path)
    text = "new" if number == 3 else "old"
    if after == "read":
        assert read_manifest(made)["inputs"] == dict(a=2 if number == 3 else 1)
    else:
        NEXT[after](made)
        text = "rebuilt" if after == "atomic_directory" or (after, number) == ("stage", 3) else text
    assert (made / "file").read_text() == text
    recover(tmp_path)
    assert os.listdir(tmp_path) == ["made"]


def test_a_kill_after_all_is_in_place_is_cleared_when_the_artefact_is_found(tmp_path):
    made = tmp_path / "made"

    def work():
        delete = artefacts._delete

        def die_at_checkpoints(path):
            if path.name.endswith(".unfinished") and path.exists():
                kill_me()
            delete(path)

        artefacts._delete = die_at_checkpoints
        stage(made, "thing", dict(a=1), interrupted)

    killed(work)
    assert sorted(os.listdir(tmp_path)) == [".made.lock", ".made.unfinished", "made"]
    build = Builder()
    stage(made, "thing", dict(a=1), build)
    assert build.calls == 0 and os.listdir(tmp_path) == ["made"]


def test_checkpoints_of_other_inputs_wait_while_a_finished_artefact_is_found(tmp_path):
    made = tmp_path / "made"
    stage(made, "thing", dict(a=1), Builder())
    with pytest.raises(RuntimeError):
        stage(made, "thing", dict(a=2), lambda folder: interrupted(folder, RuntimeError()))
    stage(made, "thing", dict(a=1), Builder())
    assert sorted(os.listdir(tmp_path)) == [".made.unfinished", "made"]
    assert read_manifest(stage(made, "thing", dict(a=2), interrupted))["facts"] == dict(length=1)


def test_checkpoints_survive_a_kill(tmp_path):
    made = tmp_path / "made"

    def work():
        stage(made, "thing", {}, lambda folder: kill_me(interrupted(folder)))

    killed(work)
    assert kinds(tmp_path) == [".made.lock", ".made.partial", ".made.unfinished"]
    assert read_manifest(stage(made, "thing", {}, interrupted))["facts"] == dict(length=1)
    assert os.listdir(tmp_path) == ["made"]


def test_leftovers_of_earlier_versions_of_this_library_are_cleared(tmp_path):
    made = tmp_path / "made"
    stage(made, "thing", {}, Builder())
    made.rename(tmp_path / ".made.old-4711")
    (tmp_path / ".made.partial-4711").mkdir()
    (tmp_path / ".made.lock").touch()
    assert read_manifest(made)["facts"] == dict(length=7) and os.listdir(tmp_path) == ["made"]


def test_leftovers_of_any_version_are_cleared_when_one_is_asked_for(tmp_path):
    killed(lambda: keep(tmp_path, "thing", dict(a=1), kill_me))
    keep(tmp_path, "thing", dict(a=2), Builder())
    [name] = os.listdir(tmp_path)
    assert name.startswith("thing-")


def test_names_that_only_look_alike_are_left_alone(tmp_path):
    names = [".other.lock", ".made.partial", ".made.partial-xyz", ".made.old-1.lock", "made.old-1"]
    names += [".made.lock.bak", ".made2.lock", "made.partial-0123abcd", ".lock", ".partial-12"]
    for name in names:
        (tmp_path / name).mkdir()
    made = stage(tmp_path / "made", "thing", {}, Builder())
    stage(made, "thing", {}, Builder())
    recover(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted([*names, "made"])


def test_a_folder_that_may_not_be_written_to_is_only_read(tmp_path):
    made = tmp_path / "made"
    stage(made, "thing", {}, Builder())
    (tmp_path / ".made.partial-0123abcd").mkdir()
    (tmp_path / ".made.lock").touch()
    tmp_path.chmod(0o555)

    def work():
        stage(made, "thing", {}, Builder())
        recover(tmp_path)
        raise OSError(0, "found")

    def same_user(work, connection):  # root may write everywhere
        os.access = lambda path, mode: False
        unprivileged(work, connection) if os.getuid() else limited(work, connection)

    try:
        assert outcome(work, same_user)[2] == "found"
    finally:
        tmp_path.chmod(0o755)
    assert len(os.listdir(tmp_path)) == 3


def test_recover_takes_a_folder_that_is_not_there(tmp_path):
    recover(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    recover(tmp_path / "file")
    assert os.listdir(tmp_path) == ["file"]


# ---- several processes


def log(file, line):
    with open(file, "a") as opened:
        opened.write(line + "\n")


def lines(file):
    return file.read_text().split("\n")[:-1] if file.exists() else []


def started(work, *args):
    process = FORK.Process(target=work, args=args)
    process.start()
    return process


def joined(processes):
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * len(processes)


def write_alone(folder, rounds):
    """Write an artefact over and over. Who writes while another does so notes it; the operating
    system takes the sign of it, a lock of its own, from whoever is killed."""
    for _ in range(rounds):
        with atomic_directory(folder / "made") as partial, open(folder / "inside") as inside:
            try:
                artefacts.fcntl.flock(inside, artefacts.fcntl.LOCK_EX | artefacts.fcntl.LOCK_NB)
            except BlockingIOError:
                log(folder / "overlaps", f"{os.getpid()}")
            for name in ("one", "two"):
                (partial / name).write_text(partial.name)


def whole(made):
    return (made / "one").read_text() == (made / "two").read_text()


def test_processes_that_write_one_artefact_take_turns(tmp_path):
    (tmp_path / "inside").touch()
    joined([started(write_alone, tmp_path, 150) for _ in range(6)])
    assert lines(tmp_path / "overlaps") == [] and whole(tmp_path / "made")
    assert sorted(os.listdir(tmp_path)) == ["inside", "made"]


def test_processes_that_are_killed_anywhere_leave_a_whole_artefact_and_no_lock(tmp_path):
    (tmp_path / "inside").touch()
    writing_into(tmp_path / "made", lambda folder: [(folder / n).touch() for n in ("one", "two")])
    rng = random.Random(0)
    running = [started(write_alone, tmp_path, 10**6) for _ in range(3)]
    try:
        for _ in range(20):
            time.sleep(rng.uniform(0, 0.02))
            place = rng.randrange(3)
            running[place].kill()
            running[place].join(30)
            running[place] = started(write_alone, tmp_path, 10**6)
    finally:
        for process in running:
            process.kill()
            process.join(30)
    recover(tmp_path)
    assert lines(tmp_path / "overlaps") == [] and whole(tmp_path / "made")
    joined([started(write_alone, tmp_path, 5) for _ in range(2)])
    assert sorted(os.listdir(tmp_path)) == ["inside", "made"]


def ask_for_all(folder, rounds, begun):
    for number in range(rounds):

        def build(partial):
            log(folder / "builds", str(number))
            (partial / "file").write_text(str(number))

        begun.wait(30)
        stage(folder / f"made-{number % 3}", "thing", dict(number=number), build)


def test_of_many_processes_that_want_one_artefact_one_builds(tmp_path):
    begun = FORK.Barrier(5)
    joined([started(ask_for_all, tmp_path, 40, begun) for _ in range(5)])
    assert lines(tmp_path / "builds") == [str(number) for number in range(40)]
    assert sorted(os.listdir(tmp_path)) == ["builds", "made-0", "made-1", "made-2"]


def first_dies(folder, name, begun):
    "Ask for an artefact; who builds it first is killed in the middle."

    def build(partial):
        (partial / "half").touch()
        try:
            (folder / f"{name} begun").touch(exist_ok=False)
        except FileExistsError:
            log(folder / "builds", name)
            (partial / "half").rename(partial / "whole")
        else:
            time.sleep(0.05)  # until all others wait for it
            kill_me()

    begun.wait(30)
    stage(folder / name, "thing", dict(name=name), build)


def test_when_the_one_that_builds_is_killed_exactly_one_of_the_others_does(tmp_path):
    for name in ("a", "b", "c", "d"):
        begun = FORK.Barrier(4)
        four = [started(first_dies, tmp_path, name, begun) for _ in range(4)]
        for process in four:
            process.join(30)
        assert sorted(process.exitcode for process in four) == [-signal.SIGKILL, 0, 0, 0]
        assert lines(tmp_path / "builds").count(name) == 1
        assert set(tree(tmp_path / name)) == {"whole", MANIFEST}
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


@pytest.mark.parametrize("force", [False, True])
def test_what_a_live_process_is_filling_is_left_alone_even_by_one_of_its_number(
    tmp_path, force, monkeypatch
):
    monkeypatch.setattr(os, "getpid", lambda: 1)  # as in two containers
    made, half_done, go_on = tmp_path / "made", FORK.Event(), FORK.Event()
    if force:
        stage(made, "thing", {}, Builder())

    def slowly(partial):
        (partial / "half").touch()
        half_done.set()
        assert go_on.wait(30)
        (partial / "half").rename(partial / "whole")

    def second(ready):
        ready.set()
        stage(made, "thing", {}, Builder("second"))

    first = started(lambda: stage(made, "thing", {}, slowly, force))
    assert half_done.wait(30)
    [half] = tmp_path.glob(".made.partial-*/half")
    ready = FORK.Event()
    other = started(second, ready)
    assert ready.wait(30)
    other.join(0.3)
    assert other.is_alive() != force  # it waits, or finds the old one
    recover(tmp_path)
    if force:
        read_manifest(stage(made, "thing", {}, Builder("third")))
    assert half.exists()
    go_on.set()
    joined([first, other])
    assert set(tree(made)) == {"whole", MANIFEST} and os.listdir(tmp_path) == ["made"]


def test_a_reader_between_two_renames_of_a_live_process_waits_for_it(tmp_path):
    made, apart, go_on = tmp_path / "made", FORK.Event(), FORK.Event()
    stage(made, "thing", dict(a=1), Builder("old"))

    def replace():
        rename = Path.rename

        def slowly(path, target):
            found = rename(path, target)
            if ".old-" in Path(target).name:
                apart.set()
                assert go_on.wait(30)
            return found

        Path.rename = slowly
        stage(made, "thing", dict(a=2), Builder("new"))

    process = started(replace)
    assert apart.wait(30) and not made.exists()
    with ThreadPoolExecutor(1) as one:
        found = one.submit(read_manifest, made)
        time.sleep(0.2)
        assert not found.done()
        go_on.set()
        assert found.result(30)["inputs"] == dict(a=2)
    joined([process])
    assert os.listdir(tmp_path) == ["made"]


def test_who_waits_with_a_lock_that_was_deleted_takes_the_next(tmp_path):
    file = tmp_path / ".made.lock"
    holder = artefacts._acquire(file, wait=True)
    with ThreadPoolExecutor(1) as one:
        waits = one.submit(artefacts._acquire, file, wait=True)
        time.sleep(0.1)  # it has opened the file that is about to go
        file.unlink()
        third = artefacts._acquire(file, wait=True)
        os.close(holder)
        time.sleep(0.1)
        assert not waits.done()
        artefacts._release(third, file)
        artefacts._release(waits.result(30), file)
    assert os.listdir(tmp_path) == []


def test_a_lock_of_another_that_has_taken_the_name_is_not_deleted(tmp_path):
    file = tmp_path / ".made.lock"
    holder = artefacts._acquire(file, wait=True)
    file.unlink()  # by somebody who clears up by hand
    other = artefacts._acquire(file, wait=True)
    artefacts._release(holder, file)
    assert file.exists()
    artefacts._release(other, file)
    assert os.listdir(tmp_path) == []


def test_asking_for_what_one_is_writing_is_an_error_and_no_endless_wait(tmp_path):
    made = tmp_path / "made"

    def build(folder):
        stage(made, "thing", {}, Builder())

    with pytest.raises(RuntimeError, match="is being written, and what writes it asks for it"):
        stage(made, "thing", {}, build)
    stage(made, "thing", {}, Builder())
    assert os.listdir(tmp_path) == ["made"]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_without_locks_nothing_of_others_is_touched(tmp_path, number, monkeypatch):
    def refuse(*given):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(artefacts.fcntl, "flock", refuse)
    other = tmp_path / ".made.partial-0123abcd"  # perhaps somebody is filling it
    other.mkdir()
    build = Builder()
    for _ in range(2):
        stage(tmp_path / "made", "thing", {}, build)
    recover(tmp_path)
    assert build.calls == 1 and sorted(os.listdir(tmp_path)) == [other.name, "made"]


def test_without_locks_two_of_one_number_do_not_mix_their_files(tmp_path, monkeypatch):
    def refuse(*given):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(artefacts.fcntl, "flock", refuse)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    made = tmp_path / "made"
    with atomic_directory(made) as partial, ThreadPoolExecutor(1) as one:
        (partial / "mine").touch()
        one.submit(writing_into, made, lambda folder: (folder / "theirs").touch()).result(30)
        assert os.listdir(made) == ["theirs"] and os.listdir(partial) == ["mine"]
    assert os.listdir(made) == ["mine"] and os.listdir(tmp_path) == ["made"]


def test_a_lock_whose_file_another_machine_deleted_is_taken_again(tmp_path, monkeypatch):
    fstat, calls = os.fstat, []

    def stale(descriptor):
        calls.append(descriptor)
        if len(calls) == 1:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return fstat(descriptor)

    monkeypatch.setattr(artefacts.os, "fstat", stale)
    with artefacts._locked(tmp_path / "made") as held:
        assert held and len(calls) == 2
    monkeypatch.undo()
    assert os.listdir(tmp_path) == []
