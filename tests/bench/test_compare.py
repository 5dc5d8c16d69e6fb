"""Rows of a comparison: what they hold, what a second run does, and rows that were measured
elsewhere."""

import gzip
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from datasets import ClassLabel

from harmomoe.base.artefacts import MANIFEST, digest, stages_run
from harmomoe.base.engine import Local, Processes, read_engine
from harmomoe.base.schema import parse
from harmomoe.baselines.methods import METHODS, find_method
from harmomoe.baselines.zero_shot import zero_shot
from harmomoe.bench.compare import (
    Row,
    find_row,
    judge,
    public_of,
    read_rows,
    run_row,
    run_rows,
    write_rows,
)
from harmomoe.client.client import Client
from harmomoe.client.expert import load_expert
from harmomoe.config.settings import Config, changed, preset
from harmomoe.config.source import Source
from harmomoe.data.domains import Benchmark
from harmomoe.models.evaluate import joint_space, measure, read_measured, summary
from harmomoe.models.model import Model
from harmomoe.models.observe import observe_routing
from harmomoe.models.unified import UnifiedModel

SUMMARIES = Path(__file__).resolve().parents[2] / "results" / "summaries"
LABELS = ["zeroshot", "expert:a", "comigs", "harmomoe", "matching experts"]


@pytest.fixture(scope="module")
def source(tiny_seed_folder, tiny_folder):
    return Source(str(tiny_seed_folder), data=str(tiny_folder), clients="a,b,c", pool="pool")


@pytest.fixture(scope="module")
def lines(tiny_settings):
    names = [(label.partition(":")[0], label.partition(":")[2] or None) for label in LABELS]
    return [Row(method, tiny_settings, expert) for method, expert in names]


@pytest.fixture(scope="module")
def compared(lines, source, tmp_path_factory):
    "Folder and results of a comparison; tests work on copies of the folder."
    folder = tmp_path_factory.mktemp("compared")
    return folder, run_rows(lines, source, folder)


@pytest.fixture
def again(compared, tmp_path):
    return shutil.copytree(compared[0], tmp_path / "compared")


@pytest.fixture(scope="module")
def file(compared, lines, source, tmp_path_factory):
    "The published rows of the comparison."
    file = tmp_path_factory.mktemp("published") / "rows.json.gz"
    write_rows(lines, source, compared[0], file)
    return file


def kept(folder):
    return sorted(path.name for path in (folder / "rows").iterdir())


# ---- what a row holds


@pytest.mark.parametrize("label", LABELS)
def test_row_holds_what_its_method_gives(label, compared, lines, source, tmp_path):
    folder, results = compared
    row, result = lines[LABELS.index(label)], results[LABELS.index(label)]
    clients = source.benchmark(0).clients
    public = public_of(row, source, folder)
    model, sent = find_method(row.method).run(public, clients, folder / "clients")
    assert result["bytes"] == sent
    assert result["parameters"] == model.count_parameters()
    assert row.label == label
    for client in clients:
        own = model.for_domain(row.expert or client.name)
        found = measure(own, client.test, client.classes)
        assert result["accuracy"][client.name] == asdict(found)
        joint = measure(own, client.test, joint_space(source.benchmark(0)))
        assert result["joint"][client.name] == asdict(joint)
        assert (client.name in result["routing"]) == isinstance(own, UnifiedModel)
        if isinstance(own, UnifiedModel):
            seen, shown = observe_routing(own, client.test), result["routing"][client.name]
            assert shown["experts"] == own.experts
            assert np.allclose(shown["load"], seen.load, atol=1e-4)
    models = [model.for_domain(row.expert or client.name) for client in clients]
    models = models[:1] if row.expert or models[0] is models[1] else models
    pool = source.benchmark(0).pool
    assert result["public"] == [asdict(measure(m, pool.test, pool.classes)) for m in models]
    assert len(models) == (3 if label in ("comigs", "matching experts") else 1)
    assert list(summary(read_measured(result))) == [*"abc", "average", "public", "joint"]


@pytest.mark.parametrize("method", ["expert", "matching experts"])
def test_row_that_names_an_expert_is_that_expert_on_every_domain(method, source, tiny, again):
    "Trained on private data alone, or the one that HarmoMoE is made of."
    row = Row(method, tiny.settings, "b")
    result = run_row(row, source, again)
    public = public_of(row, source, again)
    config = find_method(method).adjust(tiny.settings)
    client = Client(public.with_config(config), tiny.b, again / "clients" / "b")
    assert config.expert.proxies == (method == "matching experts")
    model = Model(tiny.seed, load_expert(tiny.seed, client.expert))
    wanted = judge(model, source.benchmark(0))
    for key in ("accuracy", "joint", "public"):
        assert result[key] == wanted[key]
    assert (row.label, row.kind) == ("expert:b", f"{method}-b")


def test_name_of_a_row_on_disk_is_plain_whatever_a_client_is_called(tiny_settings):
    row = Row("expert", tiny_settings, "../up:é")
    assert row.kind == "expert----up-é"
    assert row.label == "expert:../up:é"


# ---- the second run


def test_second_run_computes_nothing_and_gives_the_same(compared, again, lines, source):
    with stages_run() as built:
        assert run_rows(lines, source, again) == compared[1]
    assert built == []


def test_damaged_row_is_made_again_and_only_that_one(compared, again, lines, source):
    damaged = next((again / "rows").glob("expert-a-*")) / MANIFEST
    damaged.write_bytes(damaged.read_bytes()[:-20])
    with stages_run() as built:
        assert run_rows(lines, source, again) == compared[1]
    assert built == ["expert-a"]


def test_other_settings_or_another_split_make_another_row_beside_it(again, source, tiny):
    before, row = kept(again), Row("zeroshot", tiny.settings)
    validation = run_row(row, source, again, "validation")
    for key in ("accuracy", "joint"):
        assert [result["n"] for result in validation[key].values()] == [6, 4, 8]
    assert [one["n"] for one in validation["public"]] == [12]
    run_row(replace(row, config=changed(tiny.settings, {"expert.rank": 2})), source, again)
    assert len(kept(again)) == len(before) + 2
    assert set(before) < set(kept(again))
    with stages_run() as built:
        run_row(row, source, again)
    assert built == []


def test_a_method_of_ones_own_is_a_row_like_any(again, source, tiny):
    before, mine = kept(again), replace(zero_shot, name="mine")
    found = run_row(Row("mine", tiny.settings), source, again, method=mine)
    assert found == run_row(Row("zeroshot", tiny.settings), source, again)
    assert [name for name in kept(again) if name not in before][0].startswith("mine-")
    with pytest.raises(ValueError, match="no method 'mine'"):
        run_row(Row("mine", changed(tiny.settings, {"random_state": 1})), source, again)


def test_rows_of_several_random_states_share_what_is_public(source, tiny, tmp_path):
    rows = [
        Row(name, replace(tiny.settings, random_state=state))
        for name in ("zeroshot", "btm")
        for state in (0, 1)
    ]
    with stages_run() as built:
        found = run_rows([*rows, rows[2]], source, tmp_path)
    assert found[2] == found[4]
    assert found[0]["accuracy"] == found[1]["accuracy"]  # the seed's, on the same test images
    assert [name.rpartition("-")[0] for name in kept(tmp_path)] == ["btm"] * 2 + ["zeroshot"] * 2
    assert {path.name[:4] for path in (tmp_path / "public").iterdir()} == {"pool"}
    assert built.count("expert") == built.count("proxies") == 2 * 3
    assert built.count("embeddings") == 1 + 3  # pool and clients


def test_nothing_is_embedded_where_proxies_are_drawn_at_random(source, tiny, tmp_path):
    config = changed(tiny.settings, {"proxies.selection": "random", "finetune.epochs": 1})
    with stages_run() as built:
        run_rows([Row(name, config) for name in ("btm", "harmomoe")], source, tmp_path)
    assert built.count("expert") == 3 + 3 * config.expert.proxies
    assert not [name for name in built if "embeddings" in name or name == "relevance"]


def test_row_is_made_again_when_data_change_that_the_method_uses(tiny, tmp_path):
    "The routers of CoMiGS are trained on validation splits."
    config = changed(tiny.settings, {"expert.epochs": 1, "finetune.epochs": 1})
    fewer = [replace(c, validation=c.validation.select([0, 1])) for c in tiny.clients]
    for clients in (tiny.clients, fewer):
        benchmark = Benchmark("tiny", tiny.pool, clients)
        opened = SimpleNamespace(seed=lambda: tiny.seed, benchmark=lambda random_state: benchmark)
        run_row(Row("comigs", config), opened, tmp_path)
    assert len(kept(tmp_path)) == 2


def test_row_is_made_again_when_the_pools_held_out_samples_or_the_classes_change(tiny, tmp_path):
    "A test split of fewer samples; and a client with a class that nobody is of."
    pool = replace(tiny.pool, test=tiny.pool.test.select([0, 1, 2]))
    more = ClassLabel(names=[*tiny.a.classes, "plaid"])
    splits = ("train", "validation", "test")
    wider = replace(tiny.a, **{s: getattr(tiny.a, s).cast_column("label", more) for s in splits})
    row, sizes = Row("zeroshot", tiny.settings), []
    for number, benchmark in enumerate(
        [
            Benchmark("tiny", tiny.pool, tiny.clients),
            Benchmark("tiny", pool, tiny.clients),
            Benchmark("tiny", tiny.pool, [wider, *tiny.clients[1:]]),
        ]
    ):
        opened = SimpleNamespace(
            seed=lambda: tiny.seed, benchmark=lambda random_state, of=benchmark: of
        )
        sizes.append(run_row(row, opened, tmp_path)["public"][0]["n"])
        assert len(kept(tmp_path)) == number + 1
    assert sizes == [12, 3, 12]


# ---- errors, and several processes


def diverging(config):
    "The same settings, but the server's training fails, after the clients have done their work."
    return changed(config, {"finetune.learning_rate": 1e38, "finetune.optimizer": "sgd"})


def test_error_of_a_row_surfaces_and_finished_rows_stay(again, source, tiny):
    rows = [Row("matching experts", tiny.settings, "a"), Row("btx", diverging(tiny.settings))]
    with pytest.raises(FloatingPointError, match="ower the learning rate"):
        run_rows(rows, source, again)
    names = {name.rpartition("-")[0] for name in kept(again)}
    assert "matching experts-a" in names
    assert "btx" not in names


@pytest.mark.parametrize(
    "method, expert, changes, engine, said",
    [
        ("nonsense", None, {}, Local(), "no method 'nonsense'; there are zeroshot, expert"),
        ("expert", "d", {}, Local(), "no client 'd'; there are a, b, c"),
        ("btx", None, {"router.top_k": 9}, Processes(2), "top_k is 9"),
        (
            *("harmomoe", None, {"proxies.candidates": 91}, Local()),
            "candidates is 91, but the pool has 90 samples",
        ),
    ],
    ids=str,
)
def test_wrong_rows_are_refused_before_any_work(
    method, expert, changes, engine, said, source, tiny, tmp_path
):
    rows = [
        Row("zeroshot", tiny.settings),
        Row(method, changed(tiny.settings, changes), expert),
    ]
    with pytest.raises(ValueError, match=said):
        run_rows(rows, source, tmp_path, engine)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("engine", ["processes:2", "ray:local"])
def test_other_engines_give_the_same_and_an_error_of_one_surfaces(
    engine, compared, lines, source, tiny, tmp_path
):
    if engine.startswith("ray"):
        pytest.importorskip("ray")
    good, wrong = [0, 1, 3, 4], Row("btx", diverging(tiny.settings))
    some = [lines[i] for i in good]
    with pytest.raises(FloatingPointError, match="ower the learning rate"):
        run_rows([*some, wrong], source, tmp_path, read_engine(engine))
    run_rows(some, source, tmp_path, read_engine(engine))  # Ray cancels what runs; go on
    with stages_run() as built:  # all others were finished
        assert run_rows(some, source, tmp_path) == [compared[1][i] for i in good]
    assert built == []


# ---- rows that were measured elsewhere


def test_published_rows_need_no_work_where_they_are_unpacked(
    compared, file, lines, source, tmp_path
):
    write_rows(lines, source, compared[0], tmp_path / "twice.json.gz")
    assert (tmp_path / "twice.json.gz").read_bytes() == file.read_bytes()
    folder = tmp_path / "elsewhere"
    assert read_rows(file, folder) == len(lines)
    assert read_rows(file, folder) == 0
    with stages_run() as built:
        assert run_rows(lines, source, folder) == compared[1]
    assert not built and [path.name for path in folder.iterdir()] == ["rows"]


def test_only_finished_rows_are_published(compared, lines, source, tiny, tmp_path):
    rows = [*lines, Row("btm", tiny.settings)]
    with pytest.raises(ValueError, match="btm is not finished in"):
        write_rows(rows, source, compared[0], tmp_path / "rows.json.gz")
    assert not list(tmp_path.iterdir())


def packed(value):
    return gzip.compress(json.dumps(value).encode())


PLAIN = dict(kind="zeroshot", inputs={}, files={})
HOSTILE = {
    "no gzip": b"no gzip",
    "nothing": b"",
    "no JSON": gzip.compress(b"no json"),
    "no text": gzip.compress(b"\xff\xfe\x00"),
    "cut off": packed({"a": PLAIN})[:-9],
    "damaged": packed({"a": PLAIN})[:12] + b"\xff" * 9 + packed({"a": PLAIN})[21:],
    "nested deeply": gzip.compress(b"[" * 200_000),
}
PARSED = {
    "a list": [PLAIN],
    "no manifest": {"a": {}},
    "no object": {"a": 3},
    "another field": {"a": PLAIN | dict(extra=1)},
    "another type": {"a": PLAIN | dict(files=[])},
    "no digest": {"a": PLAIN | dict(files={"x": dict(sha256="../../up", bytes=1)})},
    **{f"name {name!r}": {name: PLAIN} for name in ("../up", "/up", "a/b", ".", "..", "", "a\n")},
    "one of two": {"a": PLAIN, "../up": PLAIN},
}


@pytest.mark.parametrize("what", [*HOSTILE, *PARSED])
def test_only_rows_are_read(what, tmp_path):
    content = HOSTILE[what] if what in HOSTILE else packed(PARSED[what])
    (tmp_path / "odd").write_bytes(content)
    with pytest.raises(ValueError, match="odd") as caught:
        read_rows(tmp_path / "odd", tmp_path / "new")
    assert len(str(caught.value)) < 500
    assert [path.name for path in tmp_path.iterdir()] == ["odd"]


def test_a_row_under_a_name_that_is_not_its_own_is_not_believed(
    compared, file, lines, source, tmp_path
):
    "Other settings are in it; or files that are not there."
    rows = json.loads(gzip.decompress(file.read_bytes()))
    [name] = [name for name in rows if name.startswith("zeroshot")]
    other = dict(inputs=rows[name]["inputs"] | dict(split="train"))
    listed = dict(files={"x": dict(sha256="0" * 64, bytes=1)})
    for number, change in enumerate((other, listed)):
        folder, made = tmp_path / f"new{number}", tmp_path / f"{number}.json.gz"
        made.write_bytes(packed({name: rows[name] | change}))
        assert read_rows(made, folder) == 1
        assert find_row(lines[0], source, folder) is None
        assert run_row(lines[0], source, folder) == compared[1][0]


def test_rows_that_are_there_are_not_replaced(compared, file, again, lines, source, tmp_path):
    rows = json.loads(gzip.decompress(file.read_bytes()))
    for row in rows.values():
        row["facts"]["accuracy"]["a"]["correct"] = 0
    (tmp_path / "worse.json.gz").write_bytes(packed(rows))
    assert read_rows(tmp_path / "worse.json.gz", again) == 0
    assert run_rows(lines, source, again) == compared[1]


def test_rows_of_the_published_tables_are_found_by_todays_names(tmp_path):
    "Nothing is computed: neither seed nor data nor settings are others than those of the tables."
    file, source = SUMMARIES / "embedded" / "rows.json.gz", Source()
    rows = json.loads(gzip.decompress(file.read_bytes()))
    assert read_rows(file, tmp_path) == len(rows) == 335
    found = {}
    for name, stored in rows.items():
        inputs = stored["inputs"]
        config = parse(Config, inputs["config"], name)
        row = Row(inputs["method"], config, inputs["expert"])
        assert find_row(row, source, tmp_path).name == name == f"{row.kind}-{name[-12:]}"
        assert name.endswith(digest(inputs)[:12])
        found.setdefault(row.method, []).append(config)
    assert {config.random_state for config in found["harmomoe"]} == {0, 1, 2, 3, 4}
    assert set(found) <= set(METHODS)
    ours = preset("embedded")
    assert ours in found["harmomoe"]
    assert ours in found["zeroshot"]
    with stages_run() as built:
        result = run_row(Row("expert", ours, "flags"), source, tmp_path)
    assert built == []
    assert list(result["accuracy"]) == ["flags", "digits", "letters"]
