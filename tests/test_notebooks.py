"""Every component notebook runs from top to bottom, each in a process of its own.

Importing torch, transformers and their like takes longer than most notebooks. So one process of
each test worker imports them once and does nothing else; each notebook runs in a fork of it.
"""

import contextlib
import multiprocessing
import os
import sys
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).resolve().parent.parent / "nbs"
LONG = ["server", "client", "bench", "describe", "baselines"]  # rooms whose notebooks train
FOUND = sorted(NOTEBOOKS.glob("*/**/[0-9][0-9]_*.ipynb"))
COMPONENTS = sorted(FOUND, key=lambda path: (*LONG, path.parent.name).index(path.parent.name))
IMPORTED = ["accelerate", "datasets", "matplotlib.pyplot", "nbdev.test", "open_clip", "pandas"]
IMPORTED += ["peft", "sklearn.linear_model", "torch", "transformers"]


def run_notebook(notebook, printed):
    "Run it in this process, which ends with 1 if a cell fails; what it says goes to a file."
    from nbdev.test import nbdev_test

    with open(printed, "w", buffering=1) as file:
        for stream in (1, 2):  # what a library or a child writes, too
            os.dup2(file.fileno(), stream)
        with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            nbdev_test(str(notebook), do_print=True)


@pytest.fixture(scope="module")
def forks():
    "Where forks come from."
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


@pytest.mark.parametrize(
    "notebook", COMPONENTS, ids=lambda path: "/".join(path.with_suffix("").parts[-2:])
)
@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot fork")
def test_notebook_runs(notebook, forks, tmp_path):
    printed = tmp_path / "printed.txt"
    child = forks.Process(target=run_notebook, args=(notebook, printed))
    child.start()
    child.join()
    said = printed.read_text(errors="replace") if printed.exists() else ""
    assert child.exitcode == 0, said[-6000:]
