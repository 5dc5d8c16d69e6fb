"""A thousand broken bundles, made from an honest one by a seeded generator: each is read, or
refused with one sentence that names its folder."""

import json
import os
import random
import shutil
import signal
import stat
import struct

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers import socket_at
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from harmomoe.base.artefacts import MANIFEST, sha256_file
from harmomoe.bundle.files import ADAPTER_FILES, FILES, PROXIES, ROUTING, read_bundle

CONFIG, TENSORS = ADAPTER_FILES
TRIALS, BATCHES = 1000, 10
# what is raised here, by whoever cannot change what is broken already
UNABLE = (
    *(ValueError, OSError, LookupError, TypeError, RecursionError),
    *(SafetensorError, struct.error),
)


def ordinary(file):
    "Whether it can be opened without waiting, and read to its end."
    about = file.lstat() if os.path.lexists(file) else None
    return about is not None and stat.S_ISREG(about.st_mode) and about.st_size < 10**7


def reseal(folder):
    "Give the manifest, if it still is one, the true hashes and sizes of the files."
    if not ordinary(folder / MANIFEST):
        return
    try:
        told = json.loads((folder / MANIFEST).read_text())
        for name in told["files"]:
            if ordinary(file := folder / name):
                told["files"][name] = dict(sha256=sha256_file(file), bytes=file.stat().st_size)
        (folder / MANIFEST).write_text(json.dumps(told))
    except UNABLE:
        pass  # broken in such a way that nobody could


# ---- bytes


def breaks_bytes(folder, rng):
    "Bytes of one file flipped, cut out, put in, or cut off."
    file = folder / rng.choice((MANIFEST, *FILES))
    data = bytearray(file.read_bytes())
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(data) + 1)
        if rng.random() < 0.5:  # the ends are where formats keep what they are
            at = rng.choice((at % 200, max(0, len(data) - at % 200)))
        more = rng.randbytes(rng.choice((1, 1, 4, 100)))
        end = rng.choice((at, at + len(more), at + 1, len(data)))
        data[at:end] = rng.choice((more, more, b"", b"\0" * 8, b"\xff" * 8))
    file.write_bytes(data)


# ---- JSON


def deep(rng):
    value = 1
    for _ in range(rng.choice((31, 40, 900))):
        value = rng.choice(([value], dict(a=value)))
    return value


ODD = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, 10**400, -0.5, 1e30, 1e300),
    *(float("nan"), float("inf"), -float("inf")),
    *("", "a", "seed", "Seed", "../a", "/etc", "a\\b", "a\nb", "\x1b[2J", "\ud800", "x" * 10**5),
    *("NaN", "12", "LORA", "all", [], {}, [1], [[1, 2]], {"a": 1}, {"../a": {}}, {"": None}),
]


def places(value, path=()):
    "The path of every value within JSON values."
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in inner:
        yield (*path, key)
        if isinstance(part, dict | list):
            yield from places(part, (*path, key))


def change_json(value, rng):
    "Another value, no value or another name somewhere."
    *path, last = rng.choice(list(places(value)))
    for key in path:
        value = value[key]
    odd = deep(rng) if rng.random() < 0.1 else rng.choice(ODD)
    kind = rng.randrange(4)
    if kind == 0:
        del value[last]
    elif kind == 1 and isinstance(value, dict):
        value[rng.choice((str(odd), f"{last}s", "layer_replication", "note"))] = odd
    elif kind == 2 and isinstance(value, dict):
        value[rng.choice((str(odd), str(last).upper()))] = value.pop(last)
    else:
        value[last] = odd


def breaks_json(folder, rng):
    "Fields of a manifest or a configuration."
    file = folder / rng.choice((MANIFEST, MANIFEST, CONFIG))
    if rng.random() < 0.1:
        text = file.read_text()
        old = rng.choice([part for part in text.split('"')[1::2] if f'"{part}"' in text])
        new = rng.choice(
            (f'"{old}": 1, "{old}"', f'"{old}', "[" * 10**5, "9" * 5000, "NaN", "\ufeff")
        )
        file.write_text(text.replace(f'"{old}"', new, 1))
        return
    value = json.loads(file.read_text())
    for _ in range(rng.choice((1, 1, 1, 3))):
        change_json(value, rng)
    file.write_text(json.dumps(value))


# ---- tensors

DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int64, torch.bool),
    *(torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16),
]
NUMBERS = [torch.nan, torch.inf, -torch.inf, 0.0, 1e-300, 1e9, 1e20, 3e38, 1e39, 1e300]


def odd_tensor(tensor, rng):
    "A tensor of another type or shape, or with other numbers."
    kind = rng.randrange(4)
    if kind == 0:
        return tensor.to(rng.choice(DTYPES))
    if kind == 1:
        sizes = [rng.choice((0, 1, 2, size, size + 1)) for size in tensor.shape]
        return torch.zeros(rng.choice((sizes, sizes[:1], [*sizes, 1], [], sizes[::-1])))
    number = rng.choice(NUMBERS)
    if kind == 2:
        return torch.full_like(tensor, number, dtype=torch.float64)
    changed = tensor.double().flatten()
    changed[rng.randrange(len(changed))] = number
    return changed.view(tensor.shape).to(rng.choice((torch.float32, torch.float64)))


def breaks_tensors(folder, rng):
    "Tensors of the adapter or of the routing vectors."
    file = folder / rng.choice((TENSORS, ROUTING))
    found = load_file(file)
    for name in rng.sample(sorted(found), rng.choice((1, 1, 2))):
        other = rng.choice((f"{name}x", name[:-1], "a\nb", "\x1b", "x" * 1000, name.upper()))
        kind = rng.randrange(8)
        if kind == 0:
            del found[name]
        elif kind == 1:
            found[other] = found.pop(name)
        elif kind == 2:
            found[other] = found[name].clone()
        else:
            found[name] = odd_tensor(found[name], rng)
        if rng.random() < 0.3:  # under another form, which may be there already
            known = "mean", "logistic", "moments", "activation", "evidence"
            form = rng.choice((*known, "random", "", "a\nb", "x" * 10**4))
            if name in found:
                found[f"{form}.{name.rpartition('.')[2]}"] = found.pop(name)
    save_file(found, file)


def breaks_header(folder, rng):
    "What a safetensors file says of its tensors."
    file = folder / rng.choice((TENSORS, ROUTING))
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    if rng.random() < 0.3:
        kinds = "F4", "F8_E8M0", "F6_E2M3", "U64", "C64", "F64", "BOOL", "I128", "", "x" * 10**4
        rng.choice([v for k, v in header.items() if k[0] != "_"])["dtype"] = rng.choice(kinds)
    else:
        change_json(header, rng)
    text = json.dumps(header).encode()
    size = rng.choice((len(text), len(text), len(text), rng.choice((0, 2**31, 2**63, size))))
    file.write_bytes(struct.pack("<Q", size) + text + data[8 + struct.unpack("<Q", data[:8])[0] :])


# ---- proxies


def breaks_proxies(folder, rng):
    "Another table of proxies."
    label = dict(pq.read_schema(folder / PROXIES).metadata)
    values = pq.read_table(folder / PROXIES)["id"].to_pylist()
    for _ in range(rng.randrange(3)):
        odd = rng.choice((-1, 0, 89, 90, values[0], 2**31, 2**62, -(2**63), None))
        values[rng.randrange(len(values))] = odd
    values *= rng.choice((1, 1, 1, 0, 2, 100))
    kinds = [pa.int64()] * 4 + [pa.int32(), pa.uint64(), pa.float64(), pa.string(), pa.date64()]
    try:
        column = pa.array(values, pa.int64()).cast(rng.choice(kinds))
    except pa.ArrowInvalid:
        column = pa.array(values, pa.int64())
    form = rng.randrange(6)
    if form == 0:
        column = pa.ListArray.from_arrays(np.arange(len(column) + 1, dtype=np.int32), column)
    elif form == 1:
        column = column.dictionary_encode()
    table = {rng.choice(("id", "id", "id", "ids", "a\nb")): column}
    if rng.random() < 0.2:
        table["relevance"] = pa.array([rng.choice((0.5, float("nan"), -1.0))] * len(column))
    if rng.random() < 0.3:
        odd = rng.choice((b"", b"\xff", b"a\nb", b"x" * 10**4, b"\x1b"))
        label[rng.choice((*label, b"note", b"\xff", b"a\nb"))] = odd
    table = pa.table(table).replace_schema_metadata(label)
    how = rng.choice(("none", "snappy", "zstd", "gzip"))
    size = rng.choice((1, 5, 10**6))
    pq.write_table(table, folder / PROXIES, compression=how, row_group_size=size)


# ---- files


MADE = [
    os.mkfifo,
    os.mkdir,
    socket_at,
    lambda path: path.symlink_to("/etc/hosts"),
    lambda path: path.symlink_to("/dev/zero"),
    lambda path: path.symlink_to(path.name),
    lambda path: path.symlink_to(".."),
    lambda path: path.touch(),
    lambda path: path.write_bytes(b"\0" * 1000),
    lambda path: (path.touch(), os.truncate(path, 2**40)),
]


def breaks_files(folder, rng):
    "Something added, taken away, or put in the place of a file."
    names = (MANIFEST, *FILES, "adapter")
    new = rng.choice(("x.png", "adapter/x", ".x", "a\nb", "\x1b[2J", "\udcff", "x" * 200))
    path = folder / rng.choice((*names, *names, new))
    make = rng.choice(MADE)
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if path.parent.is_dir() and rng.random() < 0.9:
        make(path)


KINDS = {
    breaks_bytes: 3,
    breaks_json: 4,
    breaks_tensors: 2,
    breaks_header: 2,
    breaks_proxies: 2,
    breaks_files: 1,
}


def break_bundle(folder, number):
    "Break a bundle in one or two ways, those of this number."
    rng = random.Random(number)
    for change in rng.choices(list(KINDS), list(KINDS.values()), k=rng.choice((1, 1, 1, 2))):
        if not all(ordinary(folder / name) for name in (MANIFEST, *FILES)):
            return
        try:
            change(folder, rng)
        except UNABLE:
            pass  # the first change left nothing for the second
        if rng.random() < 0.9:
            reseal(folder)


def outcome(folder, public):
    "'read', or what was said; raises what nobody should have to catch."
    try:
        bundle = read_bundle(folder, public)
    except (ValueError, FileNotFoundError) as error:
        assert type(error) in (ValueError, FileNotFoundError)
        said = str(error)
        assert str(folder) in said and said.isprintable() and len(said) < 1000, said
        return said
    numbers = [x for pair in bundle.factors.values() for x in pair]
    numbers += [x for one in bundle.routing.values() for x in (one.vectors, one.biases)]
    assert all(torch.isfinite(x).all() for x in numbers)
    return "read"


@pytest.fixture
def alarm():
    "Whoever waits for a pipe is woken, and fails."

    def ring(*given):
        raise TimeoutError("reading a bundle hangs")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("batch", range(BATCHES))
def test_every_broken_bundle_is_read_or_refused(
    batch, tiny_bundles, tiny_both, tiny_public, tmp_path, alarm
):
    heard = []
    for number in range(batch, TRIALS, BATCHES):
        whole = (tiny_bundles, tiny_both)[number // BATCHES % 2][0]  # of one form, or of two
        folder = shutil.copytree(whole.folder, tmp_path / str(number))
        break_bundle(folder, number)
        try:
            heard.append(outcome(folder, tiny_public).replace(str(folder), ""))
        except BaseException as error:
            error.add_note(f"the bundle is that of number {number}")
            raise
        shutil.rmtree(folder)
    # most are refused, for many reasons, and some changes leave a bundle that is right
    assert 0 < heard.count("read") < len(heard) / 3 and len(set(heard)) > len(heard) / 3


def test_the_same_number_breaks_a_bundle_in_the_same_way(tiny_clients, tmp_path):
    found = []
    for name in ("one", "two"):
        folder = shutil.copytree(tiny_clients / "a" / "bundle", tmp_path / name)
        break_bundle(folder, 3)
        found.append([path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()])
    assert found[0] == found[1]
