"""The notebook of speed, at small sizes: every table is written, picks are exact, wrong parameters
are refused."""

from pathlib import Path

import pandas as pd
import pytest

SPEED = Path(__file__).resolve().parent.parent / "nbs" / "experiments" / "speed.ipynb"
TABLES = set(
    "machine selection memory pool layer training decoding growth profile steps ways towers".split()
)


def test_tables_are_written_and_picks_are_those_of_float64(run_cells, tmp_path):
    space = run_cells(SPEED, dict(quick=True, out=str(tmp_path)))
    selection = pd.read_csv(tmp_path / "selection.csv")
    assert len(selection) == len(space["sizes"]) * 4
    assert space["exactness"]["greedy_map"] == 1
    assert (selection[[f"{name}, ms" for name in space["contestants"]]] > 0).all(axis=None)
    assert {file.stem for file in tmp_path.glob("*.csv")} == TABLES
    profile = pd.read_csv(tmp_path / "profile.csv", index_col=0)
    assert profile["share of models"].between(0, 1).all()
    assert (tmp_path / "selection.png").stat().st_size > 5000

    # with no part, rates are measured, and compared with the tables that are there
    written = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    again = run_cells(SPEED, dict(quick=True, parts="", out=str(tmp_path)))
    changed = [file.name for file, when in written.items() if file.stat().st_mtime_ns != when]
    assert changed == ["machine.csv"]
    assert (again["selected"]["times the least"] > 0).all()


@pytest.mark.parametrize(
    "wrong, said",
    [
        (dict(rounds=1), "rounds is 1, but the first is not counted"),
        (dict(sizes="100,200"), "picks is 500, more than the 100 candidates"),
        (dict(round=3), "unknown parameter 'round'. Did you mean 'rounds'"),
    ],
)
def test_wrong_parameters_are_refused_before_anything_is_measured(wrong, said, run_cells, tmp_path):
    with pytest.raises(ValueError, match=said):
        run_cells(SPEED, dict(out=str(tmp_path / "out")) | wrong)
    assert not (tmp_path / "out").exists()
