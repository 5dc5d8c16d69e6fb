"""Every component notebook runs from top to bottom, each in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).resolve().parent.parent / "nbs"
COMPONENTS = sorted(NOTEBOOKS.glob("*/**/[0-9][0-9]_*.ipynb"))


@pytest.mark.parametrize(
    "notebook", COMPONENTS, ids=lambda path: "/".join(path.with_suffix("").parts[-2:])
)
def test_notebook_runs(notebook):
    code = "import sys; from nbdev.test import nbdev_test; nbdev_test(sys.argv[1], do_print=True)"
    run = subprocess.run(
        [sys.executable, "-c", code, str(notebook)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout[-1000:] + run.stderr[-5000:]
