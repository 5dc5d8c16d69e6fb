"""The page of many members, on made-up rows: everything is drawn, whatever is there, and a label's
own rows are measured and stored."""

from pathlib import Path

import numpy as np
import pytest
import torch

from harmomoe.bench.scale import nested, read_flat, write_flat
from harmomoe.data.scripts import SCRIPTS
from harmomoe.models.evaluate import mean_interval
from harmomoe.models.seed import Accuracy

PAGE = Path(__file__).resolve().parent.parent / "nbs" / "experiments" / "many_members.ipynb"
ROUTED = "harmomoe", "harmomoe:paper", "btm_posterior"
SYSTEMS = (*ROUTED, "matching experts", "model_soup")


def row(label, system, clients, members="nested", right=60):
    "A row in which every client has so many of 100 right."
    counts = lambda correct: {name: dict(correct=correct, n=100) for name in clients}
    share = [[0.5] + [0.5 / (len(clients) - 1)] * (len(clients) - 1)]
    seen = lambda k: dict(experts=clients[k:] + clients[:k], share=share)  # its own comes first
    routed = {name: seen(k) for k, name in enumerate(clients)} if system in ROUTED else {}
    load = [[0.6, 0.3, *[0.1 / (len(clients) - 2)] * (len(clients) - 2)]]
    turned = lambda k: dict(experts=clients[k:] + clients[:k], load=load)
    routing = {name: turned(k) for k, name in enumerate(clients)} if routed else {}
    stages = dict(description=1.0, expert=3.0, packing=None)
    facts = dict(accuracy=counts(right), joint=counts(right - 5), public=[dict(correct=9, n=100)])
    facts |= dict(routed=routed, routing=routing)
    facts |= dict(client=dict.fromkeys(clients, stages), server=dict(serving=2.0))
    facts |= dict(bytes=10**6, memory=10**7, speed=50.0, seed_speed=100.0)
    facts |= dict(parameters=dict(total=3 * 10**6, active=2 * 10**6))
    row = dict(label=label, members=members, clients=clients, system=system, random_state=0)
    return row | facts


@pytest.fixture
def stored(tmp_path):
    "A folder of stored rows of two labels."
    sets, first = nested(SCRIPTS, [3, 6]), nested(SCRIPTS, [1])[1][0]
    rows = [row("one", system, list(of)) for of in sets.values() for system in SYSTEMS]
    pair = [first, f"{first}-copy", *sets[6][1:]]
    rows += [row("one", system, pair, f"{first}:copy") for system in ROUTED[:2]]
    limit = dict(label="one", clients=list(sets[6]), random_state=0)
    told = dict.fromkeys(("nowhere", "in the first two layers", "in the last four"), 60.0)
    told |= {"in the last two": 61.0, "everywhere": 66.0}
    rows += [limit | dict(members="oracle", system="harmomoe", percent=told)]
    percent = {"Gaussian": [20.0, 40.0], "Gaussian, summed": [20.0, 45.0]}
    rows += [limit | dict(members="posteriors", system=None, percent=percent)]
    write_flat(rows, tmp_path / "one.json.gz")
    write_flat([row("two", "harmomoe", list(sets[6]), right=70)], tmp_path / "two.json.gz")
    return tmp_path


def test_stored_rows_of_all_labels_are_drawn(stored, run_cells, elsewhere):
    space = run_cells(PAGE, dict(known=str(stored)))
    three, six = (space["tables"][size]["average"] for size in "36")
    assert [of["HarmoMoE, one"][:6] for of in (three, six)] == ["60.0 ±", "60.0 ±"]
    assert "HarmoMoE, two" not in three and six["HarmoMoE, two"].startswith("70.0 ± ")
    narrow = mean_interval([Accuracy(60, 100)] * 6)
    assert six["HarmoMoE, one"] == f"60.0 ± {np.ptp(narrow) / 2:.1f}"
    assert "Matching experts †" in six
    assert space["shares"].loc["BTM by posterior"].tolist() == [50, 50]
    assert set(space["oracles"]) == {"HarmoMoE, one"}
    pair = space["pairs"]["HarmoMoE, one", "copy"]
    assert (pair["own expert"], pair["the other's"], pair["all others'"]) == (60, 30, 10)
    assert space["pairs"]["HarmoMoE, one", "one client"]["own expert"] == 60
    stages = space["stages"]("btm_posterior", "one").dropna()
    assert stages.to_dict() == dict(description=1, expert=3)
    assert space["most"] == 6  # of the sets that every system served


def test_classifiers_tell_members_that_are_apart(stored, run_cells, elsewhere):
    space, rng = run_cells(PAGE, dict(known=str(stored))), np.random.default_rng(0)
    centres, y = 3 * rng.normal(size=(3, 8)), np.repeat(range(3), 40)
    draw = lambda: torch.tensor(centres[y] + rng.normal(size=(120, 8))).float()
    x, z, public = draw(), draw(), torch.tensor(rng.normal(size=(200, 8))).float()
    for name, more in (("gaussian", ()), ("logistic", ()), ("ratios", (public,))):
        logs = space[name](x, y, z, *more)
        assert logs.shape == (120, 3) and (logs.argmax(1) == y).mean() > 0.9, name


def test_without_rows_and_without_a_label_it_says_so(tmp_path, run_cells, elsewhere):
    with pytest.raises(ValueError, match="holds no rows: give a label"):
        run_cells(PAGE, dict(known=str(tmp_path)))


def test_a_wrong_size_is_refused_before_anything_is_measured(tmp_path, run_cells, elsewhere):
    with pytest.raises(ValueError, match="size is 26, but must be 1 to 25"):
        run_cells(PAGE, dict(label="new", sizes="3,26", out=str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_rows_of_a_label_are_measured_and_stored(tmp_path, run_cells, elsewhere):
    asked = dict(label="new", out=str(tmp_path / "out"), sizes="2,3", related_size=2, quick=100)
    asked |= dict(systems="harmomoe,harmomoe:paper,zeroshot,btm_posterior", relations="copy")
    asked |= dict(settings="expert.epochs=1, finetune.epochs=1, proxies.number=10")
    run_cells(PAGE, asked)
    rows = read_flat(tmp_path / "out")
    assert len(rows) == 1 + 8 + 2 + 2 and {row["label"] for row in rows} == {"new"}
    run_cells(PAGE, asked)
    assert read_flat(tmp_path / "out") == rows
