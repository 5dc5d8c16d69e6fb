"""Pools with copies, crowded pools, domains of several parts."""

import io
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from harmomoe.bench.pools import (
    PoolSource,
    crowded,
    joined,
    modes_of,
    near_copy,
    originals,
    pool_rows,
    whole,
    with_copies,
    with_given,
)
from harmomoe.data.domains import fingerprint
from harmomoe.data.images import labels_of, rgb_image
from harmomoe.data.samples import class_names


@pytest.fixture(scope="module")
def source(tiny_seed_folder, tiny_folder):
    return PoolSource(str(tiny_seed_folder), data=str(tiny_folder), clients="a,b,c", pool="pool")


def pixels(dataset, row):
    return np.asarray(rgb_image(dataset, row), np.float64)


def test_a_near_copy_is_near_and_no_copy(tiny):
    image = rgb_image(tiny.pool.train, 0)
    draws = np.random.default_rng(0)
    copies = [np.asarray(Image.open(io.BytesIO(near_copy(image, draws)))) for _ in range(8)]
    assert all(copy.shape == (16, 16, 3) and copy.dtype == np.uint8 for copy in copies)
    assert len({copy.tobytes() for copy in copies}) == 8
    apart = [np.abs(copy - np.asarray(image, np.float64)).mean() for copy in copies]
    other = np.abs(pixels(tiny.pool.train, 1) - np.asarray(image)).mean()
    assert 0 < max(apart) < other


def test_copies_show_the_originals_they_are_said_to_show(tiny):
    pool = tiny.pool.train
    copied, shown = with_copies(pool, 4, 0.1, 7), originals(len(pool), 4, 0.1, 7)
    assert len(copied) == len(shown) == len(pool) + 3 * round(0.1 * len(pool))
    assert shown[: len(pool)].tolist() == list(range(len(pool)))
    assert np.unique(np.bincount(shown)).tolist() == [1, 4]
    assert (labels_of(copied) == labels_of(pool)[shown]).all()
    flat = np.stack([pixels(pool, i).mean((0, 1)) for i in range(len(pool))])
    for row in range(len(pool), len(copied)):
        apart = np.abs(flat - pixels(copied, row).mean((0, 1))).sum(1)
        assert apart[shown[row]] < 45 and np.median(apart) > 60


def test_fewer_copies_are_the_beginning_of_more_and_one_is_none(tiny):
    pool = tiny.pool.train
    few, many = with_copies(pool, 2, 0.1, 7), with_copies(pool, 4, 0.1, 7)
    assert fingerprint(many.select(range(len(few)))) == fingerprint(few.select(range(len(few))))
    assert with_copies(pool, 1, 0.5, 7) is pool
    assert (originals(90, 4, 0.1, 7)[:99] == originals(90, 2, 0.1, 7)).all()
    assert (originals(90, 2, 0.1, 7) != originals(90, 2, 0.1, 8)).any()


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_a_few_groups_dominate(share):
    groups = np.repeat(np.arange(40), 25)
    rows = crowded(groups, 200, share, 3)
    assert len(set(rows.tolist())) == 200 and (np.diff(rows) > 0).all()
    largest = np.sort(np.bincount(groups[rows], minlength=40))[::-1]
    even = np.sort(np.bincount(groups[crowded(groups, 200, None, 3)], minlength=40))[::-1]
    assert largest[:9].sum() >= share * 200 - 3 and even[:9].sum() < 100


def test_a_pool_that_is_too_small_to_be_crowded_is_refused():
    with pytest.raises(ValueError, match="ask for fewer"):
        crowded(np.arange(100) % 4, 90, 0.1, 0)


def test_joined_domains_keep_their_classes_and_weigh_alike_in_tests(tiny):
    one = joined("both", [(tiny.a, 12), (tiny.b, 3)])
    assert one.classes == [*tiny.a.classes, *tiny.b.classes]
    assert np.bincount(labels_of(one.train) < 3).tolist() == [3, 12]
    assert np.bincount(labels_of(one.test) < 3).tolist() == [8, 8]
    for row, name in enumerate(class_names(one.train)):
        assert any(
            np.array_equal(pixels(one.train, row), pixels(part.train, i))
            for part in (tiny.a, tiny.b)
            for i, other in enumerate(class_names(part.train))
            if other == name
        )
    with pytest.raises(ValueError, match="in common"):
        joined("twice", [(tiny.a, 3), (tiny.a, 3)])
    with pytest.raises(ValueError, match="500 images are asked for"):
        joined("many", [(tiny.a, 500), (tiny.b, 3)])


def test_what_is_given_to_the_pool_is_no_longer_private(tiny):
    pool, left = with_given(tiny.pool, [tiny.a, tiny.b], 0.4, 1)
    prints = lambda domain: {pixels(domain.train, i).tobytes() for i in range(len(domain.train))}
    public = prints(pool)
    assert pool.classes[: len(tiny.pool.classes)] == tiny.pool.classes
    assert len(pool.test) == len(tiny.pool.test)
    for before, after in zip((tiny.a, tiny.b), left):
        given = prints(before) - prints(after)
        assert given <= public and not prints(after) & public
        assert len(given) == pytest.approx(0.4 * len(before.train), abs=2)
        assert set(before.classes) <= set(pool.classes)


def test_modes_are_those_of_the_nearest_private_sample():
    draws = np.random.default_rng(0)
    private, proxies = draws.standard_normal((30, 4)), draws.standard_normal((9, 4))
    modes = draws.integers(0, 5, 30)
    cosine = lambda a, b: a @ b / np.linalg.norm(a) / np.linalg.norm(b)
    wanted = [modes[max(range(30), key=lambda i: cosine(private[i], p))] for p in proxies]
    assert modes_of(private, modes, proxies).tolist() == wanted


def test_a_source_without_changes_is_the_benchmark(source, tiny):
    found = source.benchmark(0)
    assert fingerprint(found.pool.train) == tiny.public.fingerprint
    assert [fingerprint(c.train) for c in found.clients] == [
        fingerprint(c.train) for c in tiny.clients
    ]


def test_a_source_makes_what_its_fields_say(source):
    how = dict(copies=3, copied=0.1, size=60, held_out=5, join="a 12, b 3", limit=(20, None, 8))
    changed = replace(source, **how)
    found, pool = changed.benchmark(4), whole(changed, 4)[0]
    assert len(found.pool.train) == 72 and len(found.pool.test) == 5
    assert [client.name for client in found.clients] == ["a-b", "c"]
    assert [len(client.train) for client in found.clients] == [15, 20]
    rows = pool_rows(changed, pool, 4)
    assert fingerprint(found.pool.train.select(range(60))) == fingerprint(pool.train.select(rows))
    assert fingerprint(changed.benchmark(5).pool.train) != fingerprint(found.pool.train)
    with pytest.raises(ValueError, match="needs data='embedded'"):
        replace(source, crowd="sources").benchmark(0)
    with pytest.raises(ValueError, match="'x 3', but needs a client"):
        replace(source, join="a 3, x 3").benchmark(0)
    with pytest.raises(ValueError, match="copies"):
        replace(source, copies=0)
