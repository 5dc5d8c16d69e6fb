"""The page on privacy: stored scores of any clients are drawn, a run of small size attacks one
client and audits another, and goes on where it was."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

PAGE = Path(__file__).resolve().parent.parent / "nbs" / "experiments" / "privacy.ipynb"


@pytest.fixture
def stored(tmp_path):
    "Scores of two clients, of which one was attacked with shadows; no canaries, no texts."
    rng, members = np.random.default_rng(0), np.arange(400) < 200
    scores = {"a|": members, "b|": ~members}
    for attack in ("adapter, by itself", "routing, mean, by itself", "adapter, LiRA"):
        scores[f"a|{attack}"] = (rng.random(400) + members).astype(np.float32)
    scores["b|adapter, by itself"] = rng.random(400).astype(np.float32)
    np.savez(tmp_path / "scores.npz", **scores)
    rows = dict(canaries={}, large=None, texts=None)
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    return tmp_path


def test_stored_scores_are_drawn(stored, run_cells, elsewhere):
    space = run_cells(PAGE, dict(known=str(stored), out=str(stored / "again")))
    assert space["each"].loc["adapter, LiRA", "a"].startswith("100.0")
    assert space["each"].loc["adapter, LiRA", "b"] == ""
    assert space["table"].loc["adapter, by itself", "clients"] == 2
    assert space["table"].loc["adapter, LiRA", "clients"] == 1
    again = run_cells(PAGE, dict(known=str(stored / "again"), out=str(stored / "third")))
    pd.testing.assert_frame_equal(space["each"], again["each"])


def test_clients_that_there_are_not_are_refused(run_cells, elsewhere, tmp_path):
    with pytest.raises(ValueError, match="name 'lettres', but clients are flags"):
        run_cells(PAGE, dict(audits="lettres", out=str(tmp_path)))
