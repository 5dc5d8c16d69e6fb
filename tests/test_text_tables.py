"""The notebook of all tables for text, on two clients of the package and a tiny decoder: every
table and figure, rates that are chosen, taken up again, and wrong parameters."""

from pathlib import Path

import pandas as pd
import pytest

from harmomoe.base.artefacts import stages_run
from harmomoe.baselines.methods import METHODS
from harmomoe.bench.intervals import over_samples

TABLES = Path(__file__).resolve().parent.parent / "nbs" / "experiments" / "text_tables.ipynb"
ABLATIONS = {"selection", "context", "proxies-in-training", "final-fine-tuning", "router"}
FIGURES = {"methods", "ablations", "kept", "routing"}
# an ablation, the single experts, ours, and those that have a page of their own or are expensive
MORE = {"flexolmo_random", "expert", "harmomoe"}
MORE |= {"ties_dense", "dare_dense", "btx_ties", "btx_dare", "perplexity", "task_vector"}
PAPERS = "harmomoe, paper's router"
SETTINGS = "proxies.number=6, expert.rank=4, expert.warmup_steps=0, expert.learning_rate=3e-3"

pytestmark = [
    pytest.mark.usefixtures("no_figures"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def parameters(tiny_decoder, tmp_path_factory):
    return dict(
        backbone=str(tiny_decoder),
        data="corpora",
        clients="rust,spanish",
        preset="embedded-text",
        settings=SETTINGS,
        engine="local",
        quick=12,
        out=str(tmp_path_factory.mktemp("tables")),
    )


@pytest.fixture(scope="module")
def ran(parameters, run_cells):
    return run_cells(TABLES, parameters | dict(choose=True))


def test_every_table_and_figure_is_there(ran, parameters):
    out = Path(parameters["out"])
    tables = ABLATIONS | {"methods", "next-tokens", "what-is-kept"}
    assert {file.stem for file in out.glob("*.csv")} == tables | {"rates"}
    assert {file.stem for file in out.glob("*.png")} == FIGURES
    methods = pd.read_csv(out / "methods.csv", index_col="method")
    overall = ["average", "public", "joint"]
    assert list(methods) == ["rust", "spanish", *overall, "against harmomoe", "paper"]
    assert methods[["rust", "spanish", *overall]].map(lambda text: "±" in text).all(axis=None)
    assert {*methods.index} == METHODS.keys() - MORE | {"harmomoe", PAPERS}
    shown = over_samples(ran["results"]["methods"])  # of two random states
    assert shown.loc["harmomoe", overall].tolist() == methods.loc["harmomoe", overall].tolist()
    tokens = pd.read_csv(out / "next-tokens.csv", index_col="method")
    assert [*tokens.index] == ran["order"] and list(tokens) == list(methods)[:-1]
    assert methods.loc["harmomoe", "paper"] == 74.42 and pd.isna(methods.loc["arrow", "paper"])
    for table in ABLATIONS:
        lines = pd.read_csv(out / f"{table}.csv", index_col="method")
        [ours] = lines.index[lines.filter(like="against ").iloc[:, 0].isna()]
        for column in overall:  # one and the same row, whatever a table calls it
            assert lines.loc[ours, column] == methods.loc["harmomoe", column]


def test_systems_stand_in_the_order_of_their_bits(ran):
    found = [ran["average"][name] for name in ran["order"]]
    assert found == sorted(found) and len(found) == len(ran["systems"])
    better = lambda one, other: ran["average"][one] < ran["average"][other]
    paper = {name: ran["published"][name] for name in ("zeroshot", "btm", "moa", "comigs", "btx")}
    wanted = [(a, b) for a in paper for b in paper if better(a, b)]
    agreed = sum(paper[a] > paper[b] for a, b in wanted)
    known = [pair for pair in ran["pairs"] if {*pair} <= paper.keys()]
    assert sum(paper[a] > paper[b] for a, b in known) == agreed


def test_settings_are_those_that_were_asked_for(ran):
    base, rows = ran["base"], ran["unique"]
    assert (base.expert.epochs, base.proxies.number, base.finetune.epochs) == (1, 6, 0)
    assert {row.config.random_state for row in rows} == {0, 1}
    for system in ("btx", "moa", "flexolmo", "flexolmo_dpp"):
        assert ran["systems"][system].config.finetune.epochs == 1
    assert ran["systems"]["btm"].config == base
    paper = ran["systems"][PAPERS].config
    assert (paper.router.form, paper.router.top_k, paper.router.context) == ("mean", 1, "prefix")


def test_rows_that_say_the_same_are_one_row(ran):
    entries, unique = ran["entries"], ran["unique"]
    assert len(unique) == len(set(entries.values())) < len(entries)
    assert 30 <= len(unique) / 2 <= 38  # about thirty-five in each random state
    ours = entries["methods", "harmomoe", 1]
    for place in (("selection", "dpp"), ("final fine-tuning", "none"), ("what is kept", "-0.5")):
        assert entries[(*place, 1)] == ours != entries[(*place, 0)]
    fine_tuned = entries["router", "the same, fine-tuned", 1]
    assert fine_tuned == entries["methods", PAPERS, 1] != ours


def test_rates_are_those_with_the_lowest_bits_on_validation_splits(ran, parameters):
    table = pd.read_csv(Path(parameters["out"]) / "rates.csv", index_col="rate")
    assert table.notna().sum().sum() == 26
    for system, rate in table.idxmin().items():
        assert ran["rates"][system] == rate
        if system in ran["systems"] and system != "harmomoe":
            assert ran["systems"][system].config.finetune.learning_rate == rate
    tuned = ran["parts"]["final fine-tuning"]["one epoch"].config.finetune
    assert (tuned.epochs, tuned.learning_rate) == (1, ran["rates"]["harmomoe"])


def test_rows_of_an_earlier_run_are_not_run_again(ran, parameters, run_cells, tmp_path):
    "Neither those of the tables nor those that rates were chosen by."
    files = [Path(parameters["out"]) / f"{name}.json.gz" for name in ("rows", "validation")]
    given = dict(known=", ".join(map(str, files)), out=str(tmp_path), choose=True)
    with stages_run() as built:
        again = run_cells(TABLES, parameters | given)
    assert again["results"] == ran["results"] and again["rates"] == ran["rates"]
    assert {*built} <= {"embeddings-shard", "embeddings"}
    for file in files:
        assert (tmp_path / file.name).read_bytes() == file.read_bytes()


def test_systems_alone_at_the_rates_of_the_preset(ran, parameters, run_cells):
    few = dict(methods="zeroshot, btx, experts", ablations="what is kept, context")
    again = run_cells(TABLES, parameters | few)
    assert [*again["results"]] == ["methods", "context", "what is kept"]
    assert again["results"]["methods"]["zeroshot"] == ran["results"]["methods"]["zeroshot"]
    experts = [f"expert:{name}" for name in ("rust", "spanish")]
    assert [*again["systems"]] == ["zeroshot", "btx", *experts, "harmomoe", PAPERS]
    assert {*again["rates"].values()} == {again["base"].finetune.learning_rate}


@pytest.mark.parametrize(
    "wrong, said",
    [
        (
            dict(ablations="context, lambda"),
            "no table 'lambda'; there are selection, con",
        ),
        (dict(random_states=0), "random_states is 0, but must be at least 1"),
        (dict(methods="btm, btn"), "no method 'btn'; there are"),
        (dict(settings="proxies.candidates=1000"), "candidates is 1000, but the pool has 12 sa"),
        (dict(random_state=3), "unknown parameter 'random_state'. Did you mean 'random_states'"),
        (dict(data="embedded", clients=""), "holds no texts; run_cv"),
    ],
    ids=str,
)
def test_wrong_parameters_are_named_before_anything_is_written(
    wrong, said, parameters, run_cells, tmp_path
):
    with pytest.raises(ValueError, match=said):
        run_cells(TABLES, parameters | dict(out=str(tmp_path / "out")) | wrong)
    assert not (tmp_path / "out").exists()
