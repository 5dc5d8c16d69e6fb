"The embedded benchmark: whole, openly licensed, small, and no image in two places."

import hashlib
import io
import json
import re
import shutil
from collections import Counter, defaultdict
from itertools import combinations
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset
from datasets import Image as ImageFeature
from PIL import Image

from harmomoe.data.corpora import load_corpora
from harmomoe.data.domains import SPLITS, fingerprint
from harmomoe.data.glyphs import CLIENTS, glyph_sources, load_glyphs, shipped_manifest
from harmomoe.data.images import labels_of
from harmomoe.data.scripts import load_scripts

DOMAINS = ("pool", *CLIENTS)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def glyphs():
    return load_glyphs()


@pytest.fixture(scope="module")
def rows():
    "Every row as (domain, split, path, source, encoded bytes, pixels uint8 [48, 48, 3])."
    folder, found = shipped_manifest("glyphs")[0], []
    for domain in DOMAINS:
        for split in SPLITS:
            table = pq.read_table(folder / f"{domain}_{split}.parquet")
            for picture, source in zip(table["image"].to_pylist(), table["source"].to_pylist()):
                image = Image.open(io.BytesIO(picture["bytes"]))
                assert image.size == (48, 48), picture["path"]
                pixels = np.asarray(image.convert("RGB"))
                found.append((domain, split, picture["path"], source, picture["bytes"], pixels))
    return found


def test_domains_have_their_images(glyphs):
    assert glyphs.name == "glyphs" and [client.name for client in glyphs.clients] == list(CLIENTS)
    sizes = {
        domain.name: (len(domain.classes), *(len(getattr(domain, split)) for split in SPLITS))
        for domain in (glyphs.pool, *glyphs.clients)
    }
    assert sizes == {
        "pool": (1272, 10001, 1286, 1903),
        "flags": (120, 1440, 360, 480),
        "digits": (10, 1000, 300, 457),
        "letters": (26, 1378, 312, 546),
    }
    for client in glyphs.clients:
        for split in SPLITS:
            assert set(labels_of(getattr(client, split))) == set(range(len(client.classes)))
    assert np.bincount(labels_of(glyphs.pool.train)).min() >= 4
    assert np.bincount(labels_of(glyphs.pool.train)).max() <= 10
    for names in (domain.classes for domain in (glyphs.pool, *glyphs.clients)):
        assert len(set(names)) == len(names)


def test_loading_repeats_and_leaves_no_cache(glyphs):
    again = load_glyphs()
    assert again.pool.train.cache_files == []
    assert fingerprint(again.pool.train) == fingerprint(glyphs.pool.train)


def test_datasets_alone_reads_the_files(tmp_path):
    path = shipped_manifest("glyphs")[0] / "digits_validation.parquet"
    dataset = Dataset.from_parquet(str(path), cache_dir=str(tmp_path))
    assert isinstance(dataset.features["image"], ImageFeature)
    assert dataset.features["label"] == ClassLabel(names=[f"digit {i}" for i in range(10)])
    assert dataset[0]["image"].size == (48, 48)


def test_the_benchmark_is_small():
    assert (
        sum(path.stat().st_size for path in shipped_manifest("glyphs")[0].iterdir()) <= 14_000_000
    )


def test_no_image_stands_in_two_places(rows):
    "Neither by encoded bytes nor by pixels, over all domains and splits."
    for number, what in ((4, "bytes"), (5, "pixels")):
        places = defaultdict(list)
        for row in rows:
            places[hashlib.sha256(bytes(row[number])).digest()].append(row[:3])
        assert not [where for where in places.values() if len(where) > 1], what


def test_no_near_copies_across_splits(rows):
    """Images of two splits of one domain with the same perceptual hash (dHash, 64 bits) differ
    clearly in colour. Flags of one country are alike by nature; what this excludes is the same
    rendering with other noise."""
    by_hash = defaultdict(list)
    for row in rows:
        small = Image.fromarray(row[5]).convert("L").resize((9, 8), Image.Resampling.BILINEAR)
        grey = np.asarray(small).astype(int)
        by_hash[row[0], np.packbits(grey[:, 1:] > grey[:, :-1]).tobytes()].append(row)
    pairs = [(a, b) for same in by_hash.values() for a, b in combinations(same, 2) if a[1] != b[1]]
    differences = [np.abs(a[5].astype(float) - b[5]).mean() for a, b in pairs]  # of 255
    alike = [(a[:3], b[:3]) for (a, b), gap in zip(pairs, differences) if gap <= 20]
    assert differences and not alike


@pytest.mark.parametrize("domain", ["pool", "flags", "letters"])
def test_splits_are_disjoint_by_source(domain):
    sources = [set(glyph_sources(domain, split)) for split in SPLITS]
    assert all(sources) and not any(a & b for a, b in combinations(sources, 2))


def test_digits_are_blocks_with_gaps(rows):
    numbers = {
        split: sorted(int(Path(row[2]).stem) for row in rows if row[:2] == ("digits", split))
        for split in SPLITS
    }
    for part in numbers.values():
        assert part == list(range(part[0], part[-1] + 1))
    for a, b in (("train", "validation"), ("validation", "test")):
        assert numbers[b][0] - numbers[a][-1] > 20


def test_families_and_copies_are_on_one_side(rows):
    side = {split: {row[3] for row in rows if row[1] == split} for split in SPLITS}
    for family in (
        ["roboto", "roboto-slab"],
        ["noto", "noto-v1"],
        ["cif", "svg-country-flags"],
        ["bx", "bxs"],
        ["circle-flags", "round-flag-icons"],
        ["fluent-emoji", "fluent-emoji-flat", "fluent-emoji-high-contrast"],
    ):
        assert set(family) <= side["train"], family
    test = {row[3] for row in rows if row[:2] == ("pool", "test")}
    assert {"emojione", "emojione-monotone"} <= test


def test_pool_holds_no_countries_and_no_logos(glyphs, rows):
    countries = {name.lower() for name in glyphs.clients[0].classes}
    assert {name for name in glyphs.pool.classes if name in countries} == {"turkey"}, "the bird"
    allowed = re.compile(r"flag(-\w+)?(-flag)?|.*-flag|flag-.*|.*flag.*")
    keys = [row[2].split("/", 1)[1] for row in rows if row[0] == "pool"]
    flags = [key for key in keys if "flag" in key and allowed.fullmatch(key)]
    codes = {name.lower().replace(" ", "-") for name in glyphs.clients[0].classes}
    assert flags and not [key for key in flags if "flag-for" in key]
    assert not [key for key in flags if any(code in key for code in codes)]
    companies = re.compile(r"(^|-)(logo|brand|github|google|facebook|microsoft)(-|\.)")
    assert not [key for key in keys if companies.search(key)]


def test_notice_names_every_source():
    licences = shipped_manifest("glyphs")[1]["facts"]["licences"]
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    free = {"MIT", "ISC", "Apache-2.0", "CC0-1.0", "CC-BY-4.0", "OFL-1.1", "public domain"}
    assert {row["licence"] for row in licences} <= free
    for row in licences:
        assert f"{row['package']} {row['version']}: {row['authors']}\n" in notice, row["package"]
    packages = {row["package"].split("/")[-1] for row in licences}
    known = packages | {"twemoji", "noto", "scikit-learn digits"}
    for domain in DOMAINS:
        for split in SPLITS:
            assert set(glyph_sources(domain, split)) <= known


# benchmark -> one of its files, and how it is read
SHIPPED = dict(
    glyphs=("letters_test", load_glyphs),
    scripts=("thai_test", lambda folder: load_scripts(["greek"], folder)),
    corpora=("rust_test", lambda folder: load_corpora(["speeches"], folder)),
)


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize(
    "harm, kind, says",
    [
        ("cut", ValueError, "{}.parquet was changed"),
        ("delete", ValueError, "{}.parquet missing"),
        ("add", ValueError, "extra.parquet not in the manifest"),
        ("no manifest", FileNotFoundError, "manifest.json is missing"),
        ("other", ValueError, "holds a 'seed'"),
    ],
)
def test_harm_to_a_shipped_benchmark_is_named(tmp_path, name, harm, kind, says):
    one, load = SHIPPED[name]
    folder = shutil.copytree(shipped_manifest(name)[0], tmp_path / name)
    file, manifest = folder / f"{one}.parquet", folder / "manifest.json"
    if harm == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    if harm == "delete":
        file.unlink()
    if harm == "add":
        (folder / "extra.parquet").write_bytes(b"")
    if harm == "no manifest":
        manifest.unlink()
    if harm == "other":
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"kind": "seed"}))
    with pytest.raises(kind, match=re.escape(says.format(one))):
        load(folder)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="pool, flags, digits, letters"):
        glyph_sources("cats", "train")
    with pytest.raises(ValueError, match="train, validation, test"):
        glyph_sources("pool", "valid")


def test_labels_follow_the_sources(glyphs, rows):
    "A letter's path ends in its label; counts of sources are those of the rows."
    for split in SPLITS:
        dataset = getattr(glyphs.clients[2], split)
        paths = [row[2] for row in rows if row[:2] == ("letters", split)]
        names = [dataset.features["label"].int2str(int(i)) for i in labels_of(dataset)]
        assert [path[-6] for path in paths] == [name[-1] for name in names]
        sources = Counter(path.split("/")[0] for path in paths)
        assert Counter(glyph_sources("letters", split)) == sources
