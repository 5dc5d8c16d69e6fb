"The page of rounds: stored rows are drawn, whatever is there; a small run stores what it draws."

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from harmomoe.base.artefacts import stages_run

PAGE = Path(__file__).resolve().parent.parent / "nbs" / "experiments" / "rounds.ipynb"


@pytest.fixture
def known(tmp_path):
    "A folder of made-up rows."
    rows = []
    for what, workers, h in (
        ("one worker alone", 0, 0),
        ("central, large batches", 0, 0),
        ("1 workers, H = 10", 1, 10),
        ("4 workers, H = 10", 4, 10),
    ):
        for step in (0, 10, 20):
            one = dict(what=what, workers=workers, h=h, state=0, step=step, loss=3.0 - step / 10)
            rows.append(one | dict(right=step) | (dict(sent=2000.0) if workers else {}))
    pd.DataFrame(rows).to_csv(tmp_path / "rounds_curves.csv", index=False)
    cheat = dict(who="idle", why="does not help", points=0.0, best=9.0, loss=2.0, rust=1.0)
    pd.DataFrame([cheat]).to_csv(tmp_path / "rounds_cheats.csv", index=False)
    return tmp_path


def test_stored_rows_are_drawn(known, run_cells, elsewhere, capsys):
    with stages_run() as built:
        space = run_cells(PAGE, dict(known=str(known)))
    assert built == [] and len(space["curves"]) == 12 and len(space["bridge"]) == 0
    ends = space["ends"]
    assert ends.loc["4 workers, H = 10", ["before", "after", "rounds"]].tolist() == [3.0, 1.0, 2]
    assert ends.loc["4 workers, H = 10", "right"] == 20
    above, below = plt.gcf().axes
    assert above.get_title() == "H = 10" and len(above.lines) == len(below.lines) == 4


@pytest.mark.slow
def test_a_small_run_stores_what_it_draws(run_cells, elsewhere, tmp_path):
    small = dict(quick=6, workers="1,2", hidden=16, width=16, out=str(tmp_path / "out"))
    space = run_cells(PAGE, small)
    curves, cheats, bridge = (space[name] for name in ("curves", "cheats", "bridge"))
    assert set(curves.workers) == {0, 1, 2} and curves[["loss", "right"]].notna().all(None)
    assert (cheats.points[[2, 3, 4, 5, 6, 7]] == 0).all() and len(cheats) == 12
    assert set(bridge.what.str[:6]) == {"unifie", "rounds", "expert"}
    with stages_run() as built:
        drawn = run_cells(PAGE, dict(known=small["out"]))
    assert built == [] and len(drawn["curves"]) == len(curves)
