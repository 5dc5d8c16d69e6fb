"One word for the data: what it opens, and what it says of a word that opens nothing."

import json

import pytest

import harmomoe.data.benchmarks
from harmomoe.data.benchmarks import open_benchmark


def names(benchmark):
    return [client.name for client in benchmark.clients]


# ---- a folder of one's own


def test_folder_of_domains_opens_and_clients_may_have_aliases(tiny_folder, tiny_benchmark):
    found = open_benchmark(str(tiny_folder), "b, third=c", "pool")
    assert names(found) == ["b", "third"] and found.pool.name == "pool"
    assert found.clients[1].classes == tiny_benchmark.clients[2].classes


def test_all_domains_but_the_pool_are_clients_if_none_is_named(tiny_folder):
    assert names(open_benchmark(str(tiny_folder), pool="pool")) == ["a", "b", "c"]
    found = open_benchmark(str(tiny_folder), pool="public=pool")
    assert names(found) == ["a", "b", "c"] and found.pool.name == "public"


@pytest.mark.parametrize(
    "clients, pool, said",
    [
        ("a,nope", "pool", "'nope' is not a domain there. Domains in .*: a, b, c, pool"),
        ("a", "", "name a pool"),
        ("", "", "name a pool"),
        ("a", "nope", "'nope' is not a domain there"),
        ("a,a", "pool", "used twice"),
        ("a,pool", "pool", "used twice"),
    ],
)
def test_wrong_names_in_a_folder_are_refused(clients, pool, said, tiny_folder):
    with pytest.raises((ValueError, FileNotFoundError), match=said):
        open_benchmark(str(tiny_folder), clients, pool)


@pytest.mark.parametrize("data", ["embeded", "nowhere/at/all", ""])
def test_a_word_that_opens_nothing_is_an_error(data):
    with pytest.raises((ValueError, FileNotFoundError)):
        open_benchmark(data, "a", "pool")


def test_a_column_says_whose_a_clients_rows_are(tmp_path):
    for name, rows in (("diary", 40), ("pool", 30)):
        lines = [dict(text=f"{name} {row} said so.", page=row // 4) for row in range(rows)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = open_benchmark(str(tmp_path), "diary", "pool", group="page")
    [diary], parts = found.clients, ("train", "validation", "test")
    pages = [set(getattr(diary, part)["group"]) for part in parts]
    assert set.union(*pages) == set(map(str, range(10))) and sum(map(len, pages)) == 10
    assert "group" not in found.pool.train.column_names
    assert "group" not in open_benchmark(str(tmp_path), "diary", "pool").clients[0].test.features
    with pytest.raises(ValueError, match="no column 'leaf' of groups, has .*page"):
        open_benchmark(str(tmp_path), "diary", "pool", group="leaf")
    with pytest.raises(ValueError, match="data='scripts' has no columns .* leave out group='page'"):
        open_benchmark("scripts", group="page")


# ---- the embedded benchmark


def test_embedded_benchmark_gives_a_choice_of_its_clients_in_the_order_asked_for():
    assert names(open_benchmark(clients="letters, flags,")) == ["letters", "flags"]


def test_clients_and_pools_that_it_does_not_have_are_refused():
    said = "no client 'pets' in data='embedded'; it has flags, digits, letters"
    with pytest.raises(ValueError, match=said):
        open_benchmark(clients="flags,pets")
    with pytest.raises(ValueError, match="has its own pool; leave out pool='icons'"):
        open_benchmark(pool="icons")


# ---- the paper's


@pytest.mark.parametrize("kind", ["paper", "paper-texts"])
def test_papers_benchmarks_come_from_the_hub_or_a_folder(kind, monkeypatch, tiny_benchmark):
    asked = []
    for name in ("paper_benchmark", "paper_texts"):
        opened = lambda folder, name=name: asked.append((name, folder)) or tiny_benchmark
        monkeypatch.setattr(harmomoe.data.benchmarks, name, opened)
    assert open_benchmark(kind) is tiny_benchmark
    assert names(open_benchmark(f"{kind}:some/folder", " c ,a,,")) == ["c", "a"]
    function = "paper_texts" if kind == "paper-texts" else "paper_benchmark"
    assert asked == [(function, None), (function, "some/folder")]
    with pytest.raises(ValueError, match="has its own pool"):
        open_benchmark(kind, pool="pool")
    with pytest.raises(ValueError, match="must be whole; on_error='skip' is for one's own folders"):
        open_benchmark(kind, on_error="skip")
