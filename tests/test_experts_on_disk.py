"""The page of experts on the disk, at small sizes: answers are compared there, every table is
written."""

from pathlib import Path

import pandas as pd
import papermill
import pytest

PAGE = Path(__file__).resolve().parent.parent / "nbs" / "experiments" / "experts_on_disk.ipynb"
SMALL = dict(experts="4,40", images=2, batches=4, working_set=2, rounds=1)
SMALL |= dict(bundles="2,4", width=128, hidden=256, layers=2)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux says it")
def test_tables_are_written(tmp_path):
    "In a kernel: tasks in processes of their own are found by name."
    tables = tmp_path / "tables"
    given = SMALL | dict(out=str(tables))
    papermill.execute_notebook(PAGE, tmp_path / "page.ipynb", given, progress_bar=False)
    model = pd.read_csv(tables / "model.csv", index_col=[0, 1])
    # four experts come once, all of them in every batch
    assert model["read for a batch, MB"][40, "few"] < model["read for a batch, MB"][40, "all"]
    assert model["file, MB"][40, "few"] > 9 * model["file, MB"][4, "few"]
    server = pd.read_csv(tables / "server.csv", index_col=0)
    assert (server[["2 bundles", "4 bundles"]] >= 0).all(axis=None)
    assert {file.stem for file in tables.iterdir()} == {"model", "times", "server", "llama"}
