"The page of MergeME: stored rows are drawn, whatever is there; a small run stores what it draws."

import gzip
import json
from pathlib import Path

import pytest

from harmomoe.base.artefacts import stages_run
from harmomoe.models.evaluate import Measured
from harmomoe.models.seed import Accuracy, BitsPerByte

PAGE = Path(__file__).resolve().parent.parent / "nbs" / "experiments" / "mergeme.ipynb"
NAMES = "rust", "spanish"
TUNED = "average, all data", "ties, all data", "dare, all data", "average, public data"


def measured(bits):
    "Counts of a system with so many bits per byte on every domain."
    one = BitsPerByte(bits * 0.6931471805599453 * 100, 100)
    return Measured(dict.fromkeys(NAMES, one), public=(one,)).counts


def row(part, label, state, bits=2.0, **more):
    shares = {name: {"seed": 0.25, **{n: 0.375 for n in NAMES}} for name in NAMES}
    routed = shares if part in ("without", "tuned") else {}
    facts = dict(measured=measured(bits), shares=routed, seconds=1)
    return dict(part=part, label=label, state=state) | facts | more


@pytest.fixture
def known(tmp_path):
    "A folder of made-up rows of two random states."
    rows = []
    for state in (0, 1):
        rows.append(row("single", "seed", state, 2.5 + state))
        rows.append(row("without", "separate attention, perplexity", state))
        for label in TUNED:
            steps = {"0": measured(3.0), "9": measured(2.0 + state)}
            rows.append(row("tuned", label, state, steps=steps))
        size = dict(tuning=3.0, measuring=1.0, total=2 * 10**6, active=10**6)
        rows.append(row("architectures", "different, random projectors", state, **size))
        image = Measured(dict.fromkeys(NAMES, Accuracy(30, 40)), public=(Accuracy(1, 4),)).counts
        rows.append(row("images", "seed", state, measured=image))
        alike = dict(similarity=dict(FFN=[0.1, 0.2], attention=[0.3, 0.4]))
        rows.append(dict(part="similarity", label="task vectors", state=state, seconds=1) | alike)
    text = json.dumps(rows).encode()
    (tmp_path / "rows.json.gz").write_bytes(gzip.compress(text))
    return tmp_path


def test_stored_rows_are_drawn(known, run_cells, elsewhere):
    with stages_run() as built:
        space = run_cells(PAGE, dict(known=str(known)))
    assert built == [] and len(space["rows"]) == 18
    table = space["shown"]([("single", "seed")])
    assert table.loc["seed", "average"].startswith("3.000 ± ")
    assert space["curve"]("ties, all data") == ([0, 9], [3.0, 2.5])
    assert space["right"]("without", "separate attention, perplexity") == pytest.approx(37.5)
    assert space["means"].loc["different, random projectors", "total, M"] == 2
    images = space["shown"](space["labels"]("images"), 1)
    assert images.loc["seed", "average"].startswith("75.0")


@pytest.mark.slow
def test_a_small_run_stores_what_it_draws(run_cells, elsewhere, tmp_path):
    small = dict(quick=16, clients="rust,spanish,scripture", out=str(tmp_path / "out"))
    space = run_cells(PAGE, small)
    parts = {one["part"] for one in space["rows"]}
    assert parts == {"single", "without", "tuned", "similarity", "architectures", "images"}
    with stages_run() as built:
        again = run_cells(PAGE, dict(known=small["out"]))
    assert built == [] and again["rows"] == space["rows"]
