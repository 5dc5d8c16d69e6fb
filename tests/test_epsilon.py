"""The page of what a guarantee costs: a small run keeps its rows, and needs nothing twice; others'
rows are checked."""

from pathlib import Path

import pandas as pd
import pytest

from harmomoe.base.artefacts import stages_run

PAGE = Path(__file__).resolve().parent.parent / "nbs" / "experiments" / "epsilon.ipynb"


@pytest.mark.slow
def test_rows_are_kept_and_taken_over(run_cells, elsewhere, tmp_path):
    small = dict(quick=60, epsilons="8", numbers="60", choose=True, threads=1)
    first = run_cells(PAGE, small | dict(out=str(tmp_path / "out")))
    assert list(first["found"]) == [
        "no guarantee",
        "no guarantee, routing by LDA",
        "form alone",
        "ε = 8",
        "ε = 8, adapter alone",
        "ε = 8, routing alone",
        "ε = 8, proxies alone",
        "ε = 8, class means alone",
        "ε = 8, public alone",
        "ε = 8, seed's expert kept",
        "ε = 8, steps from class means",
        "ε = 8, steps from nothing",
    ]
    forms = "means and covariance", "means *", "steps from means", "steps from nothing"
    ways = [f"60, ε = 8, {form}" for form in forms]
    assert list(first["growing"].index) == ["60, none", *ways]
    assert len(first["tried"]) == 4
    known = dict(known=str(tmp_path / "out" / "rows.json"))
    with stages_run() as built:
        again = run_cells(PAGE, small | known | dict(out=str(tmp_path / "again")))
    assert set(built) <= {"embeddings-shard", "embeddings"}
    pd.testing.assert_frame_equal(first["growing"], again["growing"])
    assert first["rows"] == again["rows"]


@pytest.mark.parametrize(
    "given, message",
    [
        (dict(epsilons="8; 3"), "epsilons is '8; 3', but must be positive numbers"),
        (dict(epsilons=""), "epsilons is empty"),
        (dict(numbers="1000, -4"), "numbers is '1000, -4', but must be positive numbers"),
        (dict(known="odd.json"), "odd.json"),
    ],
)
def test_what_cannot_be_is_refused_at_once(given, message, run_cells, elsewhere):
    Path("odd.json").write_text('{"row": 3}')
    with pytest.raises(ValueError, match=message), stages_run() as built:
        run_cells(PAGE, given | dict(out="out"))
    assert built == []
