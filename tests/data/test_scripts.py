"The benchmark of many members: whole, licensed, balanced, and no typeface on two sides."

import hashlib
import io
import json
import re
import socket
import time
import unicodedata
from collections import Counter, defaultdict
from itertools import combinations
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from datasets import Image as ImageFeature
from PIL import Image

from harmomoe.data.benchmarks import open_benchmark, open_pool
from harmomoe.data.domains import SPLITS, fingerprint
from harmomoe.data.drawing import ink_of
from harmomoe.data.glyphs import load_glyphs, shipped_manifest
from harmomoe.data.images import labels_of
from harmomoe.data.scripts import (
    RELATIONS,
    SCRIPTS,
    load_scripts,
    related,
    script_sources,
)
from harmomoe.models.weights import open_seed

ROOT = Path(__file__).resolve().parents[2]
FOUR = ("arabic", "ethiopic", "katakana", "latin")  # whose pixels are looked at


@pytest.fixture(scope="module")
def scripts():
    return load_scripts()


@pytest.fixture(scope="module")
def few():
    return load_scripts(["greek", "hebrew"])


def tables():
    "Client, split and rows of each file."
    for client in SCRIPTS:
        for split in SPLITS:
            yield (
                client,
                split,
                pq.read_table(shipped_manifest("scripts")[0] / f"{client}_{split}.parquet"),
            )


# ---- what is in it


def test_at_least_24_clients_of_24_classes(scripts):
    assert [client.name for client in scripts.clients] == list(SCRIPTS) and len(SCRIPTS) >= 24
    assert scripts.name == "scripts"
    for client in scripts.clients:
        assert len(client.classes) == 24, client.name
        sizes = [len(getattr(client, split)) for split in SPLITS]
        assert sizes == [864, 96, 192], client.name


def test_classes_are_balanced_in_each_split(scripts):
    for client in scripts.clients:
        for split, count in zip(SPLITS, (36, 4, 8)):
            counts = np.bincount(labels_of(getattr(client, split)), minlength=len(client.classes))
            assert (counts == count).all(), (client.name, split)


def test_names_are_readable_and_stand_for_one_class(scripts):
    names = [name for client in scripts.clients for name in client.classes]
    assert len({name.casefold() for name in names}) == len(names)
    for client in scripts.clients:
        assert all(re.fullmatch(f"([a-z-]+ )+{client.name}", name) for name in client.classes)
    others = load_glyphs()
    known = {name for one in (others.pool, *others.clients) for name in one.classes}
    assert not known & set(names)


def test_the_pool_is_that_of_the_glyphs(few):
    assert fingerprint(few.pool.train) == fingerprint(load_glyphs().pool.train)
    assert fingerprint(open_pool("scripts").train) == fingerprint(few.pool.train)


def test_it_is_small():
    files = list(shipped_manifest("scripts")[0].iterdir())
    assert len(files) == 3 * len(SCRIPTS) + 1
    assert sum(path.stat().st_size for path in files) <= 10_000_000


def test_paths_say_typeface_and_character():
    for client, _, table in tables():
        names = json.loads(table.schema.metadata[b"huggingface"])
        names = names["info"]["features"]["label"]["names"]
        paths = [picture["path"] for picture in table["image"].to_pylist()]
        assert [path.split("/")[0] for path in paths] == table["source"].to_pylist()
        codes = [int(path.split("-")[-2], 16) for path in paths]
        for code, label in zip(codes, table["label"].to_pylist()):
            *said, last = names[label].split()
            assert last == client
            if client != "han":  # whose characters Unicode only numbers
                assert set(said) <= set(unicodedata.name(chr(code)).lower().split())


def test_the_seed_can_tell_the_names_apart(scripts):
    "No two of a client's names are nearly one to its text tower, and none is cut off."
    seed = open_seed()
    for client in scripts.clients:
        features = seed.label_features(tuple(client.classes))
        cosines = (features @ features.T).fill_diagonal_(0)
        assert cosines.max() < 0.96, client.name
        assert len({tuple(ids) for ids in seed.tokenizer(client.classes).tolist()}) == 24


# ---- splits


def test_no_family_of_typefaces_is_on_two_sides():
    "In no client, and not in two clients either."
    families = shipped_manifest("scripts")[1]["facts"]["families"]
    sides, faces = defaultdict(set), set()
    for client, split, table in tables():
        found = set(table["source"].to_pylist())
        assert found, (client, split)
        faces |= found
        for face in found:
            sides[families[face]].add(split)
    assert not {family: on for family, on in sides.items() if len(on) > 1}
    assert families.keys() == faces


def test_sources_are_those_of_the_rows(few):
    table = pq.read_table(shipped_manifest("scripts")[0] / "greek_test.parquet")
    assert script_sources("greek", "test") == table["source"].to_pylist()
    assert table["label"].to_pylist() == labels_of(few.clients[0].test).tolist()


@pytest.mark.parametrize(
    "name",
    """noto baloo anek hind tiro mukta akaya ibm-plex google-sans fira roboto nanum sawarabi biz-ud
    zen""".split(),
)
def test_typefaces_of_one_name_are_one_family(name):
    families = shipped_manifest("scripts")[1]["facts"]["families"]
    assert {family for face, family in families.items() if face.startswith(name)} == {name}


def test_no_image_stands_in_two_places():
    places = defaultdict(list)
    for client, split, table in tables():
        for picture in table["image"].to_pylist():
            place = client, split, picture["path"]
            places[hashlib.sha256(picture["bytes"]).digest()].append(place)
    assert len(places) > 25_000
    assert not [where for where in places.values() if len(where) > 1]


@pytest.mark.parametrize("client", FOUR)
def test_no_near_copies_across_splits(client):
    "Ink of two splits differs by a hundredth of the area at least, in whatever colours it is."
    ink, pixels = {split: defaultdict(list) for split in SPLITS}, Counter()
    for name, split, table in tables():
        if name == client:
            for picture, label in zip(table["image"].to_pylist(), table["label"].to_pylist()):
                image = Image.open(io.BytesIO(picture["bytes"])).convert("RGB")
                assert image.size == (48, 48) and len(image.getcolors()) <= 8
                pixels[image.tobytes()] += 1
                ink[split][label].append(ink_of(image).ravel())
    assert max(pixels.values()) == 1
    for one, other in combinations(SPLITS, 2):
        for label in ink[one]:
            a, b = np.stack(ink[one][label]), np.stack(ink[other][label])
            assert np.abs(a[:, None] - b).mean(-1).min() >= 0.01, (one, other, label)


@pytest.mark.parametrize("client", FOUR)
def test_every_image_shows_something(client, scripts):
    split = scripts.clients[SCRIPTS.index(client)].test
    shares = [(ink_of(image) > 0.5).mean() for image in split["image"]]
    assert min(shares) > 0.01 and max(shares) < 0.75


# ---- loading


def test_loading_needs_no_network_and_is_quick(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a connection was asked for")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    start = time.process_time()
    found = load_scripts(["thai"])
    assert time.process_time() - start < 5
    assert found.clients[0].train.cache_files == []


def test_open_benchmark_knows_it_and_takes_clients_in_the_order_asked_for():
    found = open_benchmark("scripts", clients="thai, greek,")
    assert [client.name for client in found.clients] == ["thai", "greek"]


def test_unknown_names_are_refused():
    said = "no client 'klingon' in data='scripts'; it has arabic, armenian"
    with pytest.raises(ValueError, match=said):
        open_benchmark("scripts", clients="thai,klingon")
    with pytest.raises(ValueError, match="has its own pool; leave out pool='icons'"):
        open_benchmark("scripts", pool="icons")
    with pytest.raises(ValueError, match="unknown client 'klingon'; there are arabic, armenian"):
        load_scripts(["thai", "klingon"])
    with pytest.raises(ValueError, match="unknown client 'cats'; there are arabic"):
        script_sources("cats", "train")
    with pytest.raises(ValueError, match="train, validation, test"):
        script_sources("thai", "valid")


# ---- licences


def test_notice_names_every_typeface_and_the_licences_are_open():
    facts = shipped_manifest("scripts")[1]["facts"]
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    assert {row["licence"] for row in facts["licences"]} <= {"OFL-1.1", "Apache-2.0"}
    for row in facts["licences"]:
        assert f"{row['package']} {row['version']}: {row['authors']}\n" in notice, row["package"]
        assert row["authors"] and row["url"].startswith("https://")
    packages = {row["package"].removeprefix("@fontsource/") for row in facts["licences"]}
    assert packages == facts["families"].keys() and facts["clients"] == list(SCRIPTS)


# ---- related members


def test_members_take_the_clients_place_and_nothing_else_changes(few):
    for kind in RELATIONS:
        found = related(few, "greek", kind)
        assert len(found.clients) == 3 and found.pool is few.pool
        assert found.clients[2] is few.clients[1]
        assert len({client.name for client in found.clients}) == 3
    assert [client.name for client in few.clients] == ["greek", "hebrew"], "was changed"


def test_members_share_half_of_their_classes(few):
    one, other = related(few, "greek", "classes").clients[:2]
    shared = set(one.classes) & set(other.classes)
    assert (one.name, other.name) == ("greek-1", "greek-2")
    assert set(one.classes) | set(other.classes) == set(few.clients[0].classes)
    for member in (one, other):
        assert abs(len(shared) / len(member.classes) - 0.5) < 0.05
        for split, count in zip(SPLITS, (36, 4, 8)):
            assert (np.bincount(labels_of(getattr(member, split))) == count).all()


def test_labels_follow_the_classes(few):
    "An image keeps the name of its class when classes are renumbered."
    names = {}
    for row in few.clients[0].train.cast_column("image", ImageFeature(decode=False)):
        names[row["image"]["bytes"]] = few.clients[0].classes[row["label"]]
    for member in related(few, "greek", "classes").clients[:2]:
        for row in member.train.cast_column("image", ImageFeature(decode=False)):
            assert names[row["image"]["bytes"]] == member.classes[row["label"]]


def _rows(domain):
    "The encoded images of a training split."
    rows = domain.train.cast_column("image", ImageFeature(decode=False))
    return {image["bytes"] for image in rows["image"]}


def test_members_share_half_of_their_rows_one_has_a_part_and_one_comes_twice(few):
    whole = few.clients[0]
    one, other = related(few, "greek", "samples").clients[:2]
    assert len(_rows(one) & _rows(other)) == len(_rows(one)) / 2 == len(_rows(other)) / 2
    assert _rows(one) | _rows(other) == _rows(whole)
    assert one.classes == other.classes == whole.classes and one.test is whole.test
    same, part = related(few, "greek", "part").clients[:2]
    assert same is whole and _rows(part) < _rows(whole)
    assert (np.bincount(labels_of(part.train)) == 18).all()
    same, copy = related(few, "greek", "copy").clients[:2]
    assert copy.name == "greek-copy" and fingerprint(copy.train) == fingerprint(same.train)


def test_relations_repeat_and_follow_the_random_state(few):
    for kind in ("classes", "samples", "part"):
        made = [related(few, "greek", kind, state).clients[1] for state in (0, 0, 1)]
        prints = [fingerprint(member.train) for member in made]
        assert prints[0] == prints[1] != prints[2], kind


def test_relations_that_cannot_be_are_refused(few, tiny_benchmark):
    with pytest.raises(ValueError, match="unknown client 'thai'; there are greek, hebrew"):
        related(few, "thai", "copy")
    with pytest.raises(ValueError, match="there are classes, samples, part, copy"):
        related(few, "greek", "cousins")
