"Selection behind one call, what a client keeps and what it sends, measures and pictures."

import json
import random
import warnings

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from harmomoe.describe.dpp import greedy_map
from harmomoe.describe.proxies import (
    ID_FORMAT,
    SELECTION_METHODS,
    ProxySet,
    check_pool,
    contact_sheet,
    coverage,
    diversity,
    most_relevant,
    read_proxy_ids,
    select_proxies,
    tsne_figure,
)

METHODS = ["random", "similarity", "dpp"]


def pool_of(size=200, d=32):
    rng = np.random.default_rng(0)
    return rng.standard_normal((size, d)).astype(np.float32), rng.uniform(0, 1, size)


def same(a, b):
    "Whether two sets agree in everything."
    columns = [(getattr(a, name), getattr(b, name)) for name in ("ids", "relevance", "gains")]
    labels = [(x.method, x.pool_fingerprint, x.settings) for x in (a, b)]
    equal = (np.array_equal(x, y, equal_nan=x.dtype.kind == "f") for x, y in columns)
    return all(equal) and labels[0] == labels[1]


# ---- selection


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_m_distinct_ids_with_their_relevance(method):
    embeddings, relevance = pool_of()
    chosen = select_proxies(embeddings, relevance, 20, n=60, method=method, pool_fingerprint="abc")
    assert len(chosen) == len(set(chosen.ids)) == 20 and chosen.ids.dtype == np.int64
    assert np.array_equal(chosen.relevance, relevance[chosen.ids])
    assert np.isfinite(chosen.gains).all() if method == "dpp" else np.isnan(chosen.gains).all()
    assert (chosen.method, chosen.pool_fingerprint) == (method, "abc")
    assert chosen.settings == {
        "m": 20,
        "n": 60,
        "random_state": 0,
        "fill": None,
        "filled": 0,
        "pool_size": 200,
    }
    if method != "random":
        assert set(chosen.ids) <= set(most_relevant(relevance, 60))


@pytest.mark.parametrize("method", METHODS)
def test_same_random_state_same_proxies(method):
    embeddings, relevance = pool_of()
    first = select_proxies(embeddings, relevance, 20, method=method, random_state=7)
    np.random.seed(123)  # global generators play no part
    assert same(first, select_proxies(embeddings, relevance, 20, method=method, random_state=7))
    other = select_proxies(embeddings, relevance, 20, method=method, random_state=8)
    assert np.array_equal(first.ids, other.ids) == (method != "random")


def test_similarity_takes_the_top_and_ties_go_to_the_lowest_id():
    relevance = np.array([0.5, 0.9, 0.5, 0.9, 0.1])
    assert select_proxies(np.eye(5), relevance, 3, method="similarity").ids.tolist() == [1, 3, 0]
    assert select_proxies(np.eye(5), relevance, 5, method="dpp").ids.tolist() == [1, 3, 0, 2, 4]


def test_dpp_is_greedy_map_on_the_candidates():
    embeddings, relevance = pool_of()
    chosen = select_proxies(embeddings, relevance, 15, n=50)
    candidates = np.sort(np.argsort(-relevance)[:50])
    items, gains = greedy_map(embeddings[candidates], relevance[candidates], 15, "naive")
    assert np.array_equal(chosen.ids, candidates[items])
    np.testing.assert_allclose(chosen.gains, gains, rtol=0, atol=1e-9)


def test_n_beyond_the_pool_means_all_of_it():
    embeddings, relevance = pool_of()
    chosen = select_proxies(embeddings, relevance, 15)
    assert chosen.settings["n"] == 200
    assert same(chosen, select_proxies(embeddings, relevance, 15, n=200))


@pytest.mark.parametrize("kind", ["torch", "bfloat16", "memory map"])
def test_other_kinds_of_embeddings(kind, tmp_path):
    embeddings, relevance = pool_of()
    expected = select_proxies(embeddings, relevance, 15, n=50)
    if kind == "memory map":
        np.save(tmp_path / "e.npy", embeddings)
        mapped = np.load(tmp_path / "e.npy", mmap_mode="r")
        assert same(expected, select_proxies(mapped, relevance, 15, n=50))
    elif kind == "torch":
        tensors = torch.from_numpy(embeddings), torch.from_numpy(relevance)
        assert same(expected, select_proxies(*tensors, 15, n=50))
    else:
        chosen = select_proxies(torch.from_numpy(embeddings).bfloat16(), relevance, 15, n=50)
        assert len(set(chosen.ids)) == 15


def test_a_set_cut_short_by_the_rank_says_so_once_or_is_filled():
    embeddings, relevance = pool_of(d=8)
    with pytest.warns(UserWarning, match="found 8 of m=20.*8 dimensions.*fill=") as caught:
        short = select_proxies(embeddings, relevance, 20, n=60)
    assert len(caught) == 1 and len(short) == 8
    assert caught[0].filename == __file__  # it names the line that asked for too many
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # asked for, so nothing to warn of
        by_relevance = select_proxies(embeddings, relevance, 20, n=60, fill="relevance")
        by_rounds = select_proxies(embeddings, relevance, 20, n=60, fill="dpp")
    for filled in (by_relevance, by_rounds):
        assert np.array_equal(filled.ids[:8], short.ids) and len(set(filled.ids)) == 20
        assert np.array_equal(filled.gains[:8], short.gains) and np.isnan(filled.gains[8:]).all()
        assert filled.settings["filled"] == 12
        assert set(filled.ids) <= set(most_relevant(relevance, 60))
    rest = [i for i in most_relevant(relevance, 60) if i not in short.ids]
    assert by_relevance.ids[8:].tolist() == rest[:12]
    again = np.setdiff1d(most_relevant(relevance, 60), short.ids)
    items, _ = greedy_map(embeddings[again], relevance[again], 8)
    assert np.array_equal(by_rounds.ids[8:16], again[items])


@pytest.mark.parametrize("fill", ["relevance", "dpp"])
def test_filling_reaches_samples_of_zero_relevance_last(fill):
    embeddings, relevance = pool_of(20, d=4)
    relevance[5:] = 0
    chosen = select_proxies(embeddings, relevance, 20, fill=fill)
    assert set(chosen.ids[:5]) == set(range(5)) and set(chosen.ids) == set(range(20))


def test_dpp_is_more_diverse_than_similarity():
    rng = np.random.default_rng(1)
    for random_state in range(5):
        centres = rng.standard_normal((30, 32))
        embeddings = np.repeat(centres, 10, axis=0) + 0.1 * rng.standard_normal((300, 32))
        relevance = np.repeat(rng.uniform(0.5, 1, 30), 10)
        by = {}
        for method in METHODS:
            request = dict(n=300, method=method, random_state=random_state)
            chosen = select_proxies(embeddings, relevance, 20, **request)
            by[method] = diversity(embeddings, chosen.ids)
        assert by["dpp"]["mean_cosine"] < by["similarity"]["mean_cosine"]
        assert by["dpp"]["log_det"] > max(by["similarity"]["log_det"], by["random"]["log_det"])


def test_a_method_of_ones_own(monkeypatch):
    def last(embeddings, relevance, m, n, rng):
        return np.arange(len(relevance))[-m:], np.full(m, np.nan)

    monkeypatch.setitem(SELECTION_METHODS, "last", last)
    embeddings, relevance = pool_of()
    assert select_proxies(embeddings, relevance, 3, method="last").ids.tolist() == [197, 198, 199]


EMBEDDINGS, RELEVANCE = pool_of(50)
TOP = RELEVANCE.argmax()
IS_TOP = (np.arange(50) == TOP)[:, None]
GOOD = dict(embeddings=EMBEDDINGS, relevance=RELEVANCE, m=5, n=20)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(m=21), ValueError, "m=21, n=20"),
        (dict(m=51, n=60), ValueError, "m=51, n=50"),
        (dict(m=0), ValueError, "m=0"),
        (dict(m=2.5), ValueError, "whole numbers, got 2.5"),
        (dict(random_state=None), ValueError, "whole numbers"),
        (dict(method="best"), ValueError, "'dpp', 'random', 'similarity'"),
        (dict(fill="zeros"), ValueError, "fill must be"),
        (dict(relevance=RELEVANCE[1:]), ValueError, r"50 numbers.*got \(49,\)"),
        (dict(relevance=RELEVANCE * 8 - 4), ValueError, "need a sigmoid"),
        (dict(relevance=np.r_[np.nan, RELEVANCE[1:]]), ValueError, "probabilities"),
        (dict(relevance=np.zeros(50)), ValueError, "nothing to choose"),
        (dict(embeddings=EMBEDDINGS[0]), ValueError, r"\[N, d\]"),
        (dict(embeddings=EMBEDDINGS * ~IS_TOP), ValueError, rf"samples \[{TOP}\] are zero"),
        (dict(embeddings=np.where(IS_TOP, np.inf, EMBEDDINGS)), ValueError, "not finite"),
    ],
)
def test_bad_input_to_select(change, error, message):
    with pytest.raises(error, match=message):
        select_proxies(**{**GOOD, **change})


# ---- what a client keeps


@pytest.fixture
def saved(tmp_path):
    embeddings, relevance = pool_of()
    chosen = select_proxies(embeddings, relevance, 10, n=50, pool_fingerprint="f" * 64)
    # a folder name that looks like a partition
    return chosen, chosen.save(tmp_path / "kind=dpp" / "client")


@pytest.mark.parametrize("method", METHODS)
def test_round_trip(method, tmp_path):
    embeddings, relevance = pool_of()
    request = dict(n=50, method=method, random_state=3, pool_fingerprint="f" * 64)
    chosen = select_proxies(embeddings, relevance, 10, **request)
    file = chosen.save(tmp_path)
    assert [*tmp_path.iterdir()] == [file] == [tmp_path / "proxies.parquet"]
    assert same(chosen, ProxySet.load(tmp_path)) and same(chosen, ProxySet.load(file))
    elsewhere = chosen.save(str(tmp_path / "other.parquet"))
    assert elsewhere.read_bytes() == file.read_bytes()  # no clock and no path in it


def test_other_tools_can_read_it(saved):
    chosen, file = saved
    table = pq.ParquetFile(file).read()
    assert table.column_names == ["ids", "relevance", "gains"]
    assert table["ids"].to_pylist() == chosen.ids.tolist()
    metadata = table.schema.metadata
    assert metadata[b"method"] == b"dpp" and json.loads(metadata[b"settings"])["pool_size"] == 200
    assert same(chosen, ProxySet.load(file))


def test_sets_cannot_be_changed(saved):
    chosen, _ = saved
    with pytest.raises(AttributeError):
        chosen.ids = np.arange(3)
    with pytest.raises(ValueError):
        chosen.ids[0] = 1


def test_a_failed_save_leaves_the_old_file(saved, monkeypatch):
    chosen, file = saved
    before = file.read_bytes()

    def broken(table, path):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(pq, "write_table", broken)
    with pytest.raises(OSError, match="disk full"):
        chosen.save(file)
    assert file.read_bytes() == before and len(list(file.parent.iterdir())) == 1


def test_check_pool(saved):
    chosen, _ = saved
    chosen.check_pool("f" * 64)
    check_pool("f" * 64, "f" * 64)
    other = "pool ffffffffffff, but the pool at hand is 000000000000"
    with pytest.raises(ValueError, match=other):
        chosen.check_pool("0" * 64)
    with pytest.raises(ValueError, match=other):
        check_pool("f" * 64, "0" * 64)
    with pytest.raises(ValueError, match="do not name"):
        select_proxies(*pool_of(), 3).check_pool("0" * 64)
    with pytest.raises(ValueError, match="do not name"):
        check_pool("", "0" * 64)


def rewrite(file, metadata=None, **columns):
    "Replace columns (None drops one) or metadata entries (None drops one) of a saved file."
    table = pq.ParquetFile(file).read()
    values = {**{name: table[name] for name in table.column_names}, **columns}
    label = {**table.schema.metadata, **(metadata or {})}
    new = pa.table({c: v for c, v in values.items() if v is not None})
    label = {k: v for k, v in label.items() if v is not None}
    pq.write_table(new.replace_schema_metadata(label), file)


IDS, HALF = np.arange(10), np.full(10, 0.5)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(ids=np.r_[0, 0, 2:10]), "0 occurs 2 times"),
        (dict(ids=IDS - 1), "pool of 200 samples, got -1"),
        (dict(ids=IDS + 191), "got 191 to 200"),
        (dict(ids=HALF), "ids double"),
        (dict(ids=[None, *range(9)]), "without nulls"),
        (dict(ids=IDS.astype(np.int32)), "ids int32"),
        (dict(relevance=HALF * np.nan), "probabilities"),
        (dict(relevance=HALF * 3), "probabilities"),
        (dict(relevance=-HALF), "probabilities"),
        (dict(relevance=None), "must have the columns"),
        (dict(gains=HALF * np.inf), "gains must be finite"),
        (dict(gains=[None] * 10), "must have the columns"),
        (dict(extra=IDS), "must have the columns"),
        (dict(metadata={b"format": None}), "no ProxySet"),
        (dict(metadata={b"format": b"harmomoe.proxies/9"}), "no ProxySet"),
        (dict(metadata={b"method": None}), "lacks 'method'"),
        (dict(metadata={b"method": b""}), "must be text"),
        (dict(metadata={b"settings": None}), "lacks 'settings'"),
        (dict(metadata={b"settings": b"{"}), "proxies.parquet: "),
        (dict(metadata={b"settings": b"[1]"}), "settings must be a dict"),
        (dict(metadata={b"settings": b'{"pool_size": "many"}'}), "must be a number"),
        (dict(metadata={b"settings": b"\xff\xfe"}), "proxies.parquet: "),
    ],
)
def test_tampered_files_are_refused_by_name(saved, change, message):
    _, file = saved
    rewrite(file, **change)
    with pytest.raises(ValueError, match=message) as caught:
        ProxySet.load(file)
    assert str(file) in str(caught.value)


def test_missing_cut_and_foreign_files(saved, tmp_path):
    _, file = saved
    with pytest.raises(FileNotFoundError, match="nowhere"):
        ProxySet.load(tmp_path / "nowhere")
    whole = file.read_bytes()
    overwritten = whole[:8] + b"\xff" * 60 + whole[68:]
    for damaged in (whole[:100], whole[:-20], b"", b"not parquet at all", overwritten):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="proxies.parquet"):
            ProxySet.load(file)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(ids=np.array([[1, 2]])), "ids must be one row"),
        (dict(ids=np.array([])), "ids must be one row"),
        (dict(ids=np.array([1.0, 2.0])), "ids must be one row"),
        (dict(relevance=np.array([0.5])), "as long as ids"),
        (dict(gains=np.array([0.5])), "as long as ids"),
        (dict(settings=[("m", 2)]), "settings must be a dict"),
        (dict(settings={"x": float("nan")}), "JSON"),
        (dict(method=""), "must be text"),
        (dict(method=None), "must be text"),
        (dict(pool_fingerprint=None), "must be text"),
    ],
)
def test_bad_sets_cannot_be_made(change, message):
    good = dict(
        ids=np.array([1, 2]),
        relevance=np.array([0.5, 0.5]),
        gains=np.array([np.nan, -1]),
        method="mine",
        pool_fingerprint="",
        settings={},
    )
    assert len(ProxySet(**good)) == 2
    with pytest.raises(ValueError, match=message):
        ProxySet(**{**good, **change})


# ---- what a client sends


@pytest.fixture
def sent(saved, tmp_path):
    chosen, _ = saved
    return chosen, chosen.send(tmp_path / "sent")


def test_ids_arrive_in_an_order_that_tells_nothing(sent):
    chosen, file = sent
    assert [*file.parent.iterdir()] == [file] and file.name == "proxies.parquet"
    ids, fingerprint = read_proxy_ids(file.parent)
    assert ids.dtype == np.int64 and ids.tolist() == sorted(chosen.ids) != chosen.ids.tolist()
    check_pool(fingerprint, "f" * 64)
    assert np.array_equal(read_proxy_ids(file.parent, pool_size=200)[0], ids)


def test_nothing_but_ids_is_sent(sent, tmp_path):
    """Whatever else a set holds, the bytes sent are the same."""
    chosen, file = sent
    table = pq.ParquetFile(file).read()
    assert table.column_names == ["id"] and table.schema.field("id").metadata is None
    label = {b"format": ID_FORMAT.encode(), b"pool_fingerprint": b"f" * 64}
    assert table.schema.metadata == label
    ids, scores = chosen.ids[::-1], np.linspace(0, 1, 10)
    other = ProxySet(ids, scores, -scores, "mine", "f" * 64, {"note": "private"})
    assert other.send(tmp_path / "other").read_bytes() == file.read_bytes()


def test_what_is_kept_and_what_is_sent_are_not_taken_for_each_other(saved, sent):
    (_, kept), (_, file) = saved, sent
    with pytest.raises(ValueError, match="no ProxySet.*proxy-ids/1"):
        ProxySet.load(file)
    with pytest.raises(ValueError, match="no proxy ids.*proxies/1"):
        read_proxy_ids(kept.parent)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(id=np.r_[0, 0, 2:10]), "0 occurs 2 times"),
        (dict(id=IDS - 1), "pool of 200 samples, got -1"),
        (dict(id=IDS + 191), "got 191 to 200"),
        (dict(id=np.arange(201)), "more rows than the pool has samples, 200"),
        (dict(id=np.zeros(300_000, np.int64)), "more rows than the pool has samples, 200"),
        (dict(id=IDS[:0]), "holds no ids"),
        (dict(id=[None, *range(9)]), "without nulls, but has id int64 with 1 nulls"),
        (dict(id=IDS.astype(np.int32)), "id int32"),
        (dict(id=IDS.astype(np.uint64)), "id uint64"),
        (dict(id=IDS.astype(float)), "id double"),
        (dict(id=[str(k) for k in IDS]), "id string"),
        (dict(id=[[k] for k in IDS]), "id list"),
        (dict(id=None, ids=IDS), "has ids int64"),
        (dict(relevance=IDS / 10), "has id int64, relevance double"),
        ({"id": IDS, "a\n\x1b": IDS}, r"has id int64, a .x1b int64"),
        (dict(metadata={b"format": None}), "holds no proxy ids"),
        (dict(metadata={b"format": b"harmomoe.proxy-ids/9"}), "holds no proxy ids"),
        (dict(metadata={b"format": b"\xff"}), "holds no proxy ids"),
        (dict(metadata={b"pool_fingerprint": None}), r"but holds \['format'\]"),
        (dict(metadata={b"pool_fingerprint": b"line\nline"}), "one line of text"),
        (dict(metadata={b"settings": b"{}"}), "nothing else, but holds .*'settings'"),
        (dict(metadata={b"\xff": b""}), "nothing else, but holds"),
    ],
)
def test_hostile_ids_are_refused_by_name(sent, change, message):
    _, file = sent
    rewrite(file, **change)
    with pytest.raises(ValueError, match=message) as caught:
        read_proxy_ids(file.parent, pool_size=200)
    assert str(file) in str(caught.value) and len(str(caught.value)) < 600


def test_ids_of_a_pool_of_unknown_size(sent):
    _, file = sent
    rewrite(file, id=IDS + 10**12)
    assert read_proxy_ids(file.parent)[0].tolist() == [10**12 + k for k in range(10)]
    rewrite(file, id=IDS - 3)
    with pytest.raises(ValueError, match="lie in the pool, got -3 to 6"):
        read_proxy_ids(file.parent)


def test_scores_cannot_hide_in_the_metadata_of_the_column(sent):
    _, file = sent
    table = pq.ParquetFile(file).read()
    field = pa.field("id", pa.int64(), metadata={"relevance": "0.5, 0.7"})
    schema = pa.schema([field], metadata=table.schema.metadata)
    pq.write_table(pa.table(table.columns, schema=schema), file)
    with pytest.raises(ValueError, match="nothing else, but holds .*'relevance'"):
        read_proxy_ids(file.parent)


def test_damaged_ids_are_read_or_refused_and_nothing_else(sent, tmp_path):
    _, file = sent
    with pytest.raises(FileNotFoundError, match="nowhere.*ProxySet.send"):
        read_proxy_ids(tmp_path / "nowhere")
    whole, rng = file.read_bytes(), random.Random(0)
    for damaged in (whole[:100], whole[:-20], b"", b"not parquet at all"):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="proxies.parquet can't be read as parquet"):
            read_proxy_ids(file.parent)
    refused = 0
    for _ in range(200):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(whole))] = rng.randrange(256)
        file.write_bytes(damaged)
        try:
            ids, _ = read_proxy_ids(file.parent, pool_size=200)
        except ValueError as error:
            assert str(file) in str(error)
            refused += 1
        else:
            assert len(set(ids)) == len(ids) and 0 <= ids.min() and ids.max() < 200
    assert refused > 100


# ---- measures and pictures


def test_diversity_in_closed_form():
    assert diversity(np.eye(4), [0, 2]) == pytest.approx(
        {"mean_cosine": 0.0, "log_det": 2 * np.log(1 + 1e-6)}
    )
    pair = np.array([[1.0, 0.0], [0.6, 0.8]])
    found = diversity(pair, [0, 1], jitter=0.0)
    assert found == pytest.approx({"mean_cosine": 0.6, "log_det": np.log(1 - 0.36)})
    twice = diversity(np.ones((2, 3)), [0, 1])
    assert twice["mean_cosine"] == pytest.approx(1)
    assert twice["log_det"] == pytest.approx(np.log(2e-6), abs=1e-3)
    with pytest.raises(ValueError, match="at least two"):
        diversity(pair, [0])


def test_coverage_in_closed_form():
    private = np.array([[2.0, 0], [0, 3], [-1, 0]])
    np.testing.assert_allclose(coverage(private, np.array([[5.0, 0]])), [0, 1, 2], atol=1e-12)
    rng = np.random.default_rng(0)
    private, proxies = rng.standard_normal((23, 6)), rng.standard_normal((7, 6))
    np.testing.assert_allclose(
        coverage(private, proxies, block=5), coverage(private, proxies), rtol=0, atol=1e-12
    )
    with pytest.raises(ValueError, match="same seed model"):
        coverage(private, proxies[:, :5])


@pytest.fixture(scope="module")
def colours():
    pictures = [Image.new("RGB", (20 + 10 * k, 30), (25 * k, 0, 0)) for k in range(10)]
    return datasets.Dataset.from_dict(
        {"image": pictures}, features=datasets.Features(image=datasets.Image())
    )


def test_contact_sheet_shows_the_rows_in_order(colours):
    figure = contact_sheet(colours, [9, 0, 4], columns=2, titles=["a", "b", "c"], cell=40)
    sheet = np.asarray(figure.axes[0].images[0].get_array())
    assert sheet.shape == (2 * (40 + 3 + 14) + 3, 2 * 43 + 3, 3)
    first, second, below = sheet[37, 23], sheet[37, 43 + 23], sheet[57 + 37, 23]  # the centres
    assert [int(c[0]) for c in (first, second, below)] == [225, 0, 100]
    assert [t.get_text() for t in figure.axes[0].texts] == ["a", "b", "c"]
    assert len(contact_sheet(colours, np.array([3])).axes) == 1


@pytest.mark.parametrize(
    "ids, titles, message",
    [
        ([], None, "row numbers"),
        ([10], None, "between 0 and 9"),
        ([-1], None, "row numbers"),
        ([1, 2], ["a"], "one title per image"),
    ],
)
def test_contact_sheet_bad_input(colours, ids, titles, message):
    with pytest.raises(ValueError, match=message):
        contact_sheet(colours, ids, titles=titles)
    with pytest.raises(ValueError, match="column 'image'"):
        contact_sheet(colours.rename_column("image", "photo"), [1])


def test_tsne_figure_has_a_panel_per_method_on_one_map():
    embeddings, relevance = pool_of(60, d=8)
    private, sets = torch.from_numpy(embeddings[:20] + 3), {}
    for method in METHODS:
        chosen = select_proxies(embeddings, relevance, 6, n=30, method=method)
        sets[method] = embeddings[chosen.ids]

    def places():
        figure = tsne_figure(private, sets, embeddings, random_state=0, limit=40)
        assert [axis.get_title() for axis in figure.axes] == METHODS
        return [
            [np.asarray(dots.get_offsets()) for dots in axis.collections] for axis in figure.axes
        ]

    panels = places()
    assert [len(dots) for dots in panels[0]] == [40, 20, 6]
    for panel in panels[1:]:
        assert np.array_equal(panel[0], panels[0][0]) and np.array_equal(panel[1], panels[0][1])
    np.testing.assert_allclose(places()[2][2], panels[2][2])
