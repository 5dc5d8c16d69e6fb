"""The notebook of all tables, on the tiny benchmark: every table and figure, taken up again, and wrong parameters."""
import shutil
from pathlib import Path

import pandas as pd
import pytest

TABLES = Path(__file__).resolve().parent.parent / "nbs" / "experiments" / "tables.ipynb"
FILES = {"methods", "selection", "context", "proxy-aligned-experts", "final-fine-tuning", "lambda", "router",
         "from-domain-means", "candidates-n", "proxies-m"}


@pytest.fixture(scope="module")
def parameters(tiny_seed_folder, tiny_folder, tmp_path_factory):
    return dict(backbone=str(tiny_seed_folder), data=str(tiny_folder), clients="a,b,c", pool="pool", epochs=1, seeds=2,
                candidates=40, proxies=12, processes=1, out=str(tmp_path_factory.mktemp("tables")))


@pytest.fixture(scope="module")
def ran(parameters, run_cells):
    return run_cells(TABLES, parameters | dict(costs=False))


@pytest.fixture(scope="module")
def published(ran, parameters, tmp_path_factory):
    "The file of rows, put aside: a run that shows fewer tables writes one with fewer rows in its place."
    file = tmp_path_factory.mktemp("published") / "rows.json.gz"
    return Path(shutil.copy(Path(parameters["out"]) / "rows.json.gz", file))


def test_every_table_and_figure_is_there(ran, parameters):
    out = Path(parameters["out"])
    assert {file.stem for file in out.glob("*.csv")} == FILES | {"coverage"}
    assert {file.stem for file in out.glob("*.png")} == {"methods", "sweeps", "routing", "tsne", "bytes"}
    methods = pd.read_csv(out / "methods.csv", index_col="method")
    assert list(methods) == ["a", "b", "c", "average", "against harmomoe", "paper, ViT-B/32"]
    assert {"zeroshot", "expert:a", "btm", "model_soup", "btx", "flexolmo", "flexolmo_dpp", "moa", "comigs",
            "proxies_only", "harmomoe", "unrestricted_moe", "harmomoe, paper's router",
            "harmomoe, released code"} <= set(methods.index)
    assert "±" in methods.loc["harmomoe", "average"] and pd.isna(methods.loc["harmomoe", "against harmomoe"])


def test_rows_that_say_the_same_are_one_row(ran):
    rows, unique = ran["rows"], ran["unique"]
    assert len(unique) == len(set(rows.values())) < len(rows)
    assert rows["router", "preset", 1] == rows["methods", "harmomoe", 1] == rows["selection", "dpp", 1]
    assert rows["router", "routing vectors: domain means", 1] == rows["from domain means", "dpp proxies", 1]


def test_second_run_computes_nothing_and_says_the_same(ran, published, parameters, run_cells, monkeypatch):
    import harmomoe.baselines.compare as compare
    monkeypatch.setattr(compare, "run_method", lambda *args: pytest.fail("this row was there already"))
    again = run_cells(TABLES, parameters | dict(costs=False, ablations="headline"))
    assert again["results"]["methods"] == ran["results"]["methods"] and "router" not in again["results"]


def test_rows_of_an_earlier_run_are_not_run_again(ran, published, parameters, run_cells, tmp_path, monkeypatch):
    import harmomoe.baselines.compare as compare
    monkeypatch.setattr(compare, "run_method", lambda *args: pytest.fail("this row is known"))
    again = run_cells(TABLES, parameters | dict(costs=False, known=str(published), out=str(tmp_path)))
    assert again["results"] == ran["results"]
    assert (tmp_path / "rows.json.gz").read_bytes() == published.read_bytes()


@pytest.mark.slow
def test_costs(ran, parameters, run_cells):
    run_cells(TABLES, parameters | dict(ablations="none"))
    costs = pd.read_csv(Path(parameters["out"]) / "costs.csv", index_col="method")
    assert costs.loc["zeroshot", "ratio"] == 1 and costs.loc["btm", "sent by a client, MB"] > 0
    assert (costs["unify, peak MB"] > 0).all() and (costs["active parameters, M"] <= costs["total parameters, M"]).all()


@pytest.mark.parametrize("wrong, said", [
    (dict(ablations="some"), "ablations is 'some', but must be all, headline or none"),
    (dict(seeds=0), "seeds is 0, but must be at least 1"),
    (dict(candidates=1000), "candidates is 1000, but the pool has 90 samples"),
    (dict(seed=3), "unknown parameter 'seed'. Did you mean 'seeds'")])
def test_wrong_parameters_are_named_before_anything_is_written(wrong, said, parameters, run_cells, tmp_path):
    with pytest.raises(ValueError, match=said):
        run_cells(TABLES, parameters | dict(out=str(tmp_path / "out")) | wrong)
    assert not (tmp_path / "out").exists()
