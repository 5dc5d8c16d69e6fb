"The page of Connito: stored rows are drawn, whatever is there; a small run stores what it draws."

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from harmomoe.base.artefacts import stages_run

PAGE = Path(__file__).resolve().parent.parent / "nbs" / "experiments" / "connito.ipynb"
WAYS = "not trained", "targets by gate", "all weights"


@pytest.fixture
def known(tmp_path):
    "A folder of made-up rows of two domains."
    maps, rows = [], []
    for name, best in (("rust", 0), ("spanish", 1)):
        for by in ("gate", "difference"):
            for layer, expert in np.ndindex(2, 3):
                score = 0.6 if expert == best else 0.2
                maps.append(("mixture", name, by, layer, expert, score, int(expert == best)))
        for number, way in enumerate(WAYS):
            sizes = dict(
                share=0.1, payload=1e6, weights=5e6, gradients=1e6, moments=2e6, memory=8e6
            )
            one = dict(model="mixture", domain_name=name, way=way, state=0, pool=2.0, targets=2)
            rows.append(one | dict(domain=2.5 - number / 2) | (sizes if number else {}))
    columns = ["model", "domain", "by", "layer", "expert", "score", "target"]
    pd.DataFrame(maps, columns=columns).to_csv(tmp_path / "targets.csv", index=False)
    pd.DataFrame(rows).to_csv(tmp_path / "training.csv", index=False)
    return tmp_path


def test_stored_rows_are_drawn(known, run_cells, elsewhere):
    with stages_run() as built:
        space = run_cells(PAGE, dict(known=str(known)))
    assert built == [] and len(space["rows"]) == 6
    assert space["alike"]("mixture", "gate")["in common, %"] == 0
    figure = space["drawn"]("mixture", "gate")
    assert [axis.get_title() for axis in figure.axes] == ["rust", "spanish"]
    assert [len(axis.patches) for axis in figure.axes] == [2, 2]
    assert space["gained"]["all weights"] == pytest.approx(1.0)


@pytest.mark.slow
def test_a_small_run_stores_what_it_draws(run_cells, elsewhere, tmp_path):
    small = dict(
        quick=12, steps=2, clients="rust,spanish", members="rust,spanish", trained="", rates="0.001"
    )
    small |= dict(phases="0.001", hidden=32, width=16, layers=2, out=str(tmp_path / "out"))
    space = run_cells(PAGE, small)
    rows = space["rows"]
    assert set(rows.model) == {"mixture", "unified"} and len(rows) == 2 * 2 * 9
    shares = rows[rows.model == "mixture"].groupby("way").share.mean()
    assert shares["targets by gate"] < shares["all experts"] < shares["all weights"] == 1
    with stages_run() as built:
        again = run_cells(PAGE, small)
        drawn = run_cells(PAGE, dict(known=small["out"]))
    assert built == [] and again["rows"].equals(rows)
    assert drawn["rows"].domain.tolist() == rows.domain.tolist()
    assert drawn["maps"].target.tolist() == space["maps"].target.tolist()
