"What selecting and unifying cost, measured so that it can be compared."

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from harmomoe.bench import costs
from harmomoe.bench.compare import Row, run_rows
from harmomoe.client.client import Client
from harmomoe.config.source import Source
from harmomoe.models.model import load_model


@pytest.fixture(scope="module")
def source(tiny_seed_folder, tiny_folder):
    return Source(str(tiny_seed_folder), data=str(tiny_folder), clients="a,b,c", pool="pool")


@pytest.fixture
def client_a(tiny):
    "The first client, with its work done."
    return Client(tiny.public, tiny.a, tiny.work / "a")


# ---- selection


def test_selection_is_timed_in_rounds_of_which_the_first_does_not_count(client_a, monkeypatch):
    calls, clock, config = [], [0.0], client_a.public.config
    takes = dict(random=[50, 3, 1, 2], similarity=[60, 7, 8, 5], dpp=[70, 20, 40, 30])

    def select(embeddings, scores, m, n, method, random_state):
        assert embeddings is client_a.public.embeddings
        assert np.array_equal(scores, client_a.relevance.scores)
        assert (m, n) == (config.proxies.number, config.proxies.candidates)
        assert random_state == config.random_state
        clock[0] += takes[method][calls.count(method)]
        calls.append(method)

    monkeypatch.setattr(costs, "select_proxies", select)
    monkeypatch.setattr(costs, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    table = costs.selection_seconds(client_a, rounds=3)
    assert calls == ["random", "similarity", "dpp"] * 4
    assert table.index.name == "selection"
    assert table.T.to_dict() == dict(
        random=dict(seconds=2, lowest=1, highest=3),
        similarity=dict(seconds=7, lowest=5, highest=8),
        dpp=dict(seconds=30, lowest=20, highest=40),
    )


def test_selection_takes_time(client_a):
    table = costs.selection_seconds(client_a, rounds=2)
    assert table.columns.tolist() == ["seconds", "lowest", "highest"]
    assert (table > 0).all(axis=None)
    assert (table.lowest <= table.seconds).all()
    assert (table.seconds <= table.highest).all()


# ---- memory


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="memory is measured on Linux only"
)
def test_peak_memory_is_that_of_the_process_alone_and_grows_by_what_is_touched():
    "A fresh process starts from its own mark, not from that of the process that started it."
    held = np.ones(50 * 2**20)  # 400 MB
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        before = pool.submit(costs._peak, "cpu").result()
        pool.submit(exec, "import numpy; numpy.ones(25 * 2 ** 20)").result()  # 200 MB, given back
        after = pool.submit(costs._peak, "cpu").result()
    assert 50 < before < costs._peak("cpu") - held.nbytes / 2**20 / 2
    assert after - before == pytest.approx(200, abs=60)


def test_peak_memory_is_not_a_number_where_it_cannot_be_measured(monkeypatch):
    monkeypatch.setattr(costs, "Path", lambda name: Path("/nowhere") / name.lstrip("/"))
    assert np.isnan(costs._peak("cpu"))


# ---- the server's part


def test_what_a_server_costs_is_said_of_the_model_that_it_leaves(source, tiny, tmp_path):
    "Measured in this process; tables measure each part in a fresh one."
    row, place = Row("harmomoe", tiny.settings), tmp_path / "model"
    [result] = run_rows([row], source, tmp_path / "work")
    served = costs._serve(row, source, tmp_path / "work", place)
    model = load_model(place)
    assert served["unify, s"] > 0
    assert served["sent by a client, MB"] == pytest.approx(result["bytes"] / 3 / 1e6)
    answered = costs._answer(row, source, place, 8)
    counted = model.count_parameters()
    for kind in ("active", "total"):
        assert answered[f"{kind} parameters, M"] == counted[kind] / 1e6
    assert {"unify, s", "unify, peak MB", "sent by a client, MB"} == set(served)
    assert {name for name in answered if "parameters" not in name} == {"inference, peak MB"}


@pytest.mark.parametrize("method", ["comigs", "unrestricted_moe"])
def test_method_without_a_servers_part_of_its_own_has_no_server_costs(
    method, source, tiny, tmp_path
):
    said = f"{method} has no server's part of its own; choose a method that needs bundles"
    row = Row(method, tiny.settings)
    with pytest.raises(ValueError, match=said):
        costs.server_costs(row, source, tmp_path / "work", tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
