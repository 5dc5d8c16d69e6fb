"""The notebook of all tables, on the tiny benchmark: every table and figure, taken up again, and
wrong parameters."""

import shutil
from pathlib import Path

import pandas as pd
import pytest

from harmomoe.base.artefacts import stages_run
from harmomoe.baselines.methods import METHODS

TABLES = Path(__file__).resolve().parent.parent / "nbs" / "experiments" / "tables.ipynb"
HEADLINE = {"methods", "selection", "context", "proxy-aligned-experts", "final-fine-tuning"}
FURTHER = {"lambda", "router", "from-domain-means", "candidates-n", "proxies-m", "what-is-kept"}
SETTINGS = (
    "expert.epochs=1, gate.epochs=1, finetune.epochs=1, proxies.candidates=40, proxies.number=12, "
    "routing.public_samples=40"
)
FIGURES = {"methods", "sweeps", "routing", "tsne", "bytes", "kept"}

pytestmark = [
    pytest.mark.usefixtures("no_figures"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(scope="module")
def parameters(tiny_seed_folder, tiny_folder, tmp_path_factory):
    return dict(
        backbone=str(tiny_seed_folder),
        data=str(tiny_folder),
        clients="a,b",
        pool="pool",
        settings=SETTINGS,
        random_states=2,
        engine="local",
        out=str(tmp_path_factory.mktemp("tables")),
        costs=False,
    )


@pytest.fixture(scope="module")
def ran(parameters, run_cells):
    return run_cells(TABLES, parameters)


@pytest.fixture(scope="module")
def published(ran, parameters, tmp_path_factory):
    """The file of rows, put aside: a run that shows fewer tables writes one with fewer rows in
    its place."""
    file = tmp_path_factory.mktemp("published") / "rows.json.gz"
    return Path(shutil.copy(Path(parameters["out"]) / "rows.json.gz", file))


def test_every_table_and_figure_is_there(ran, parameters):
    out = Path(parameters["out"])
    assert {file.stem for file in out.glob("*.csv")} == HEADLINE | FURTHER | {"coverage"}
    assert {file.stem for file in out.glob("*.png")} == FIGURES
    methods = pd.read_csv(out / "methods.csv", index_col="method")
    columns = ["a", "b", "average", "public", "joint", "against harmomoe", "paper, ViT-B/32"]
    assert list(methods) == columns
    router = pd.read_csv(out / "router.csv", index_col="method")
    for table in (methods, router):
        assert table[["public", "joint"]].apply(lambda c: c.str.contains("±")).all(axis=None)
    ablations = {"flexolmo_random", "expert"}  # which are not systems of the comparison
    dense = {f"{way}_dense" for way in ("ties", "dare")}
    ablations |= dense | {"btx_ties", "btx_dare", "perplexity", "task_vector"}  # have a page
    wanted = set(METHODS) - ablations | {f"expert:{name}" for name in "ab"}
    routers = "paper's router", "released code", "density ratios"
    assert set(methods.index) == wanted | {f"harmomoe, {router}" for router in routers}
    assert "±" in methods.loc["harmomoe", "average"]
    assert pd.isna(methods.loc["harmomoe", "against harmomoe"])


def test_settings_are_those_that_were_asked_for(ran):
    base = ran["base"]
    assert (base.expert.epochs, base.proxies.candidates, base.proxies.number) == (1, 40, 12)
    chosen = {row.config.random_state for row in ran["unique"]}
    assert chosen == {0, 1}
    rate = ran["systems"]["moa"].config.finetune.learning_rate
    assert rate == 3e-2 != base.finetune.learning_rate


def test_rows_that_say_the_same_are_one_row(ran):
    rows, unique = ran["rows"], ran["unique"]
    assert len(unique) == len(set(rows.values())) < len(rows)
    gated, ours = rows["methods", "harmomoe", 1], rows["methods", "harmomoe, density ratios", 1]
    assert rows["what is kept", "gates, -4", 1] == gated != ours
    assert rows["router", "density ratios", 1] == ours == rows["selection", "dpp", 1]
    means = rows["router", "routing vectors: domain means", 1]
    assert means == rows["from domain means", "dpp proxies", 1] != ours


def test_second_run_computes_nothing_and_says_the_same(ran, published, parameters, run_cells):
    with stages_run() as built:
        again = run_cells(TABLES, parameters | dict(ablations="headline"))
    assert built == []
    assert again["results"]["methods"] == ran["results"]["methods"]
    assert {name.replace(" ", "-") for name in again["results"]} == HEADLINE


def test_rows_of_an_earlier_run_are_not_run_again(ran, published, parameters, run_cells, tmp_path):
    with stages_run() as built:
        again = run_cells(TABLES, parameters | dict(known=str(published), out=str(tmp_path)))
    assert again["results"] == ran["results"]
    # for the map and the numbers of what proxies cover
    assert set(built) == {"embeddings-shard", "embeddings", "relevance", "proxies"}
    assert (tmp_path / "rows.json.gz").read_bytes() == published.read_bytes()


def test_some_systems_and_some_tables(ran, published, parameters, run_cells, tmp_path):
    asked = dict(methods="btm", ablations="context, what is kept", known=str(published))
    some = run_cells(TABLES, parameters | asked | dict(out=str(tmp_path)))
    for name, lines in some["results"].items():
        assert lines == {label: ran["results"][name][label] for label in lines}
    routers = "paper's router", "released code", "density ratios"
    routers = [f"harmomoe, {router}" for router in routers]
    assert list(some["results"]) == ["methods", "context", "what is kept"]
    assert list(some["results"]["methods"]) == ["zeroshot", "btm", "harmomoe", *routers]
    with pytest.raises(ValueError, match="needs gates"):
        run_cells(TABLES, parameters | asked | dict(preset="ratios"))


@pytest.mark.slow
def test_costs(ran, parameters, run_cells):
    run_cells(TABLES, parameters | dict(ablations="none", costs=True))
    costs = pd.read_csv(Path(parameters["out"]) / "costs.csv", index_col="method")
    assert costs.loc["zeroshot", "ratio"] == 1
    assert costs.loc["btm", "sent by a client, MB"] > 0
    assert (costs["unify, peak MB"] > 0).all()
    assert (costs["active parameters, M"] <= costs["total parameters, M"]).all()


@pytest.mark.parametrize(
    "wrong, said",
    [
        (dict(ablations="context, some"), "ablations: no table 'some'; there are selection, con"),
        (dict(methods="btm, vote"), "methods: no method 'vote'; there are experts, "),
        (dict(random_states=0), "random_states is 0, but must be at least 1"),
        (dict(settings="proxies.candidates=1000"), "candidates is 1000, but the pool has 90 sa"),
        (dict(random_state=3), "unknown parameter 'random_state'. Did you mean 'random_states'"),
        (dict(seeds=3), "parameter 'seeds' is now called 'random_states'"),
    ],
    ids=str,
)
def test_wrong_parameters_are_named_before_anything_is_written(
    wrong, said, parameters, run_cells, tmp_path
):
    with pytest.raises(ValueError, match=said):
        run_cells(TABLES, parameters | dict(out=str(tmp_path / "out")) | wrong)
    assert not (tmp_path / "out").exists()


def test_a_quick_try_may_have_its_settings_in_a_file(parameters, run_cells, tmp_path):
    "Refused for what the file says."
    file = tmp_path / "mine.yaml"
    file.write_text("proxies: {candidates: 70, number: 12}\n")
    given = parameters | dict(settings=str(file), quick=60, out=str(tmp_path / "out"))
    with pytest.raises(ValueError, match="candidates is 70, but the pool has 60 samples"):
        run_cells(TABLES, given)
