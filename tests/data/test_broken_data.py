"""A thousand random files and folders of data: each is read, or refused with one clear error that
names it. Nothing else is raised, and nothing waits."""

import io
import json
import os
import random
import warnings
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import disable_progress_bars
from PIL import Image

from harmomoe.data.domains import Domain, fingerprint, load_domain
from harmomoe.data.images import broken_images

COUNT = 1000  # in all
NAMES = ["ant", "bee", "cat"]
# what stands where a cell, a name or a number belongs
ODD = [
    None, "", " ", b"ant", b"\xff\xfe", 7, -1, 2**63, 10**400, 1.5, float("nan"), float("inf"),
    True, [], [1], {}, {"a": 1}, [[["x"]]], {"text": 5}, {"text": ["x", "y"], "label": 3},
    "\x00", "\ud800", "ä" * 300, "a b", "a_b", "A", "../x", "/etc/passwd", "http://127.0.0.1:9/x",
    {"bytes": None, "path": "/etc/hostname"}, {"bytes": b"x", "path": None}, "x" * 1_000_001,
]  # fmt: skip
SUFFIXES = [".parquet", ".json", ".jsonl"]


def encoded(rng, kind=None):
    "A small image in any format."
    size = rng.choice([(3, 4), (1, 1), (2, 9)])
    mode, form = rng.choice(
        [("RGB", "PNG"), ("L", "PNG"), ("P", "GIF"), ("RGB", "JPEG"), ("CMYK", "JPEG"),
         ("RGBA", "PNG"), ("1", "PNG"), ("I;16", "PNG"), ("RGB", "BMP"), ("RGB", "WEBP"),
         ("RGB", "PPM"), ("LA", "PNG"), ("F" if rng.random() < 0.1 else "L", "TIFF")]
    )  # fmt: skip
    Image.new(mode, size, rng.randrange(200) if mode in ("L", "1", "P", "I;16") else 0).save(
        buffer := io.BytesIO(), kind or form
    )
    return buffer.getvalue()


def damaged(rng, data):
    "The same with a part cut off, changed, put in twice or replaced."
    data, place = bytearray(data), rng.randrange(len(data) + 1)
    how = rng.randrange(5)
    if how == 0:
        return bytes(data[:place])
    if how == 1:
        data[place : place + rng.randrange(1, 9)] = rng.randbytes(rng.randrange(9))
    if how == 2:
        data[place:place] = data[:place]
    if how == 3:
        return rng.choice([b"", b"<html>", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"])
    return bytes(data)


def pick(rng, good, odds=0.06):
    "What belongs there, or now and then something else."
    return rng.choice(ODD) if rng.random() < odds else good


# ---- folders of images


def make_folder(rng, root):
    splits = [""] if rng.random() < 0.5 else ["train"] + rng.choice([[], ["val"], ["Test"]])
    if rng.random() < 0.1:
        splits = splits + [rng.choice(["validation", "test", "validate", "TRAIN"])]
    for split in splits:
        odd = rng.choice([NAMES[:1], [*NAMES, "Ant"], ["a b", "a_b"]])
        for name in odd if rng.random() < 0.1 else NAMES:
            folder = root / split / name
            folder.mkdir(parents=True, exist_ok=True)
            for row in range(rng.choice([3, 4, 5, 6, 0] if rng.random() < 0.1 else [4, 5])):
                data = encoded(rng)
                data = damaged(rng, data) if rng.random() < 0.05 else data
                (folder / f"{row}{rng.choice(['.png', '.JPG', '.tif'])}").write_bytes(data)
    for _ in range(rng.choice([0, 0, 0, 1, 2])):
        add_oddity(rng, root)


def add_oddity(rng, root):
    "Something in the folder that is no image of a class."
    where = root / rng.choice([".", "ant", "ant/deeper", "train/ant", "train"])
    where.mkdir(parents=True, exist_ok=True)
    name = rng.choice(
        ["a.heic", "Thumbs.db", ".DS_Store", "._1.png", "b.png", "train.csv", "train.json", "x.txt",
         "pipe.png", "link.png", "train.parquet", "deeper.png/", "\udcff.png", "data-1.parquet"]
    )  # fmt: skip
    path = where / name
    if os.path.lexists(path):
        return
    if name == "pipe.png" or rng.random() < 0.02:
        os.mkfifo(path)
    elif name == "link.png":
        path.symlink_to(rng.choice(["/etc/hostname", "nowhere.png"]))
    elif name.endswith("/"):
        path.mkdir()
    else:
        path.write_bytes(encoded(rng))


# ---- files of images


def make_parquet(rng, root):
    rows = rng.choice([12, 15, 0] if rng.random() < 0.1 else [12, 15])
    labels = [row % 3 for row in range(rows)]
    table = dict(
        image=[rng.choice([encoded(rng), dict(bytes=encoded(rng), path=None)][:1]) for _ in labels],
        label=labels,
        class_name=[NAMES[label] for label in labels],
    )
    for column in table:
        how = rng.random()
        if how < 0.07 and rows:
            table[column][rng.randrange(rows)] = rng.choice(ODD)
        elif how < 0.1:
            table[column] = [rng.choice(ODD)] * rows
        elif how < 0.12:
            table[column] = [value.encode() if column == "class_name" else value
                             for value in table[column]]  # fmt: skip
    if rng.random() < 0.1:
        del table[rng.choice(list(table))]
    if rows and rng.random() < 0.15 and "image" in table:
        table["image"] = [damaged(rng, x) if isinstance(x, bytes) and rng.random() < 0.2 else x
                          for x in table["image"]]  # fmt: skip
    write_table(rng, table, root / rng.choice(["x.parquet", "x_train.parquet", "x/train.parquet"]))
    if rng.random() < 0.1:
        write_table(rng, table, root / rng.choice(["x_Train.parquet", "x_val.parquet"]))


def write_table(rng, table, path):
    path.parent.mkdir(exist_ok=True)
    try:
        made = pa.table(table)
        pq.write_table(made, io.BytesIO())  # not every type can be written
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        made = pa.table({key: [ascii(x)[:99] for x in cells] for key, cells in table.items()})
    if rng.random() < 0.2:
        told = rng.choice([b"{}", b"[" * 9000, b"\xff", b'{"info": {"features": {"label": 1}}}',
            b'{"info": {"features": {"label": {"names": ["a", "b", "c"], "_type": "ClassLabel"}}}}',
        ])  # fmt: skip
        made = made.replace_schema_metadata({b"huggingface": told})
    pq.write_table(made, path)
    if rng.random() < 0.1:
        path.write_bytes(damaged(rng, path.read_bytes()))


# ---- files of texts


def text_row(rng, kind, odds):
    row = dict(
        questions=dict(question="Which?", choices=["x", "y", "z"], answer=rng.randrange(3)),
        answers=dict(question="Which?", context="", answerA="x", answerB="y", answerC="z",
                     label=str(rng.randrange(1, 4))),
        named=dict(question="Which?", choices=dict(text=["x", "y"], label=["A", "B"]),
                   answerKey=rng.choice("AB")),
        instructions=dict(instruction="Say it.", input="", output="It."),
        samples=dict(prompt="Which?", answer=" A", choices=["x", "y"], label=0),
    )[kind]  # fmt: skip
    row = {key: pick(rng, value, odds) for key, value in row.items()}
    return {key: value for key, value in row.items() if rng.random() > odds / 9}


def as_json(value):
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def text_lines(rng, rows):
    lines = [json.dumps(row, default=as_json) for row in rows]
    if rng.random() < 0.1:
        line = rng.choice(["[" * 99_999, "{", "null", "[1]", '{"a": ' + "9" * 5000 + "}", "NaN"])
        lines[rng.randrange(len(lines))] = line
    return "\n".join(lines)


def make_texts(rng, root):
    kind = rng.choice(["questions", "answers", "named", "instructions", "samples"])
    odds = rng.choice([0, 0, 0.01, 0.1])
    rows = [text_row(rng, kind, odds) for _ in range(9)]
    name, suffix = rng.choice(["x", "x_train", "x/train"]), rng.choice(SUFFIXES)
    (root / "x").mkdir()
    path = root / f"{name}{suffix}"
    if suffix == ".parquet":
        write_table(rng, {key: [row.get(key) for row in rows] for key in rows[0]}, path)
    else:
        text = text_lines(rng, rows) if suffix == ".jsonl" else json.dumps(rows, default=as_json)
        data = rng.choice(["", "", "\ufeff"]).encode() + text.encode("utf-8", "surrogatepass")
        path.write_bytes(damaged(rng, data) if rng.random() < 0.1 else data)
    if rng.random() < 0.15:
        other = rng.choice(["x_train.csv", "x_training.jsonl", "x_Val.JSON", "x.json", "x_dev.tsv"])
        (root / other).write_text("[]")


def make_csv(rng, root):
    rows = [
        ["question", "choices", "answer"],
        ["Which?", "x", "1"],
        ["ragged"],
        ["a", "b", "c", "d"],
    ]
    text = "\n".join(rng.choice([",", ";", "\t"]).join(row) for row in rows)
    (root / rng.choice(["x.csv", "x_train.csv", "x.tsv"])).write_bytes(damaged(rng, text.encode()))


MAKERS = dict(folder=make_folder, parquet=make_parquet, texts=make_texts, csv=make_csv)
SHARES = dict(folder=0.3, parquet=0.32, texts=0.34, csv=0.04)


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    "No hub, a cache of its own, and no way to open what rows point to."
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    disable_progress_bars()


def read(kind, number, folder):
    "What comes of the data that a generator makes with this number."
    rng, root = random.Random(f"{kind} {number}"), folder / f"{kind}{number}"
    root.mkdir()
    MAKERS[kind](rng, root)
    source = root if kind == "folder" else root / "x"
    try:
        domain = load_domain(source, on_error=rng.choice(["raise", "skip"]))
    except (ValueError, FileNotFoundError) as error:
        said = str(error)
        assert type(error) in (ValueError, FileNotFoundError), f"{kind} {number}: {error!r}"
        assert root.name in said or "domain 'x'" in said, f"{kind} {number}: {said}"
        assert len(said) < 3000 and "\n" not in said.strip(), f"{kind} {number}: {said}"
        return None
    except Exception as error:
        raise AssertionError(f"{kind} {number}: {error!r}") from error
    return domain


@pytest.mark.parametrize("kind", MAKERS)
def test_random_data_is_read_or_refused_by_name(kind, tmp_path):
    outcomes = Counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(round(COUNT * SHARES[kind])):
            found = read(kind, number, tmp_path)
            outcomes["read" if isinstance(found, Domain) else "refused"] += 1
            if found and "image" in found.train.features:
                broken_images(found.train)  # whatever is inside, this does not fail
            if found:
                fingerprint(found.train)
    least = 0 if kind == "csv" else 0.2 * outcomes.total()
    assert outcomes["read"] >= least and outcomes["refused"] >= least, outcomes
