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
# rooms whose notebooks train
LONG = ["server", "client", "bench", "describe", "baselines", "audit"]
FOUND = sorted(NOTEBOOKS.glob("*/**/[0-9][0-9]_*.ipynb"))
COMPONENTS = sorted(FOUND, key=lambda path: (*LONG, path.parent.name).index(path.parent.name))
GUIDES = [NOTEBOOKS / "guides" / f"{name}.ipynb" for name in ("own_adapters", "serving")]
WITH_SLOW_CELLS = [path for path in COMPONENTS if "#| slow" in path.read_text(encoding="utf-8")]
IMPORTED = ["accelerate", "datasets", "matplotlib.pyplot", "nbdev.test", "open_clip", "pandas"]
IMPORTED += ["peft", "sklearn.linear_model", "torch", "transformers"]


def share_example(folder):
    "The pages of `baselines` work in one folder: what one page's clients did, the next finds."
    from harmomoe.baselines import method

    made = method.example
    method.example = lambda own: made(folder)


def run_notebook(notebook, printed, flags, shared):
    "Run it in this process, which ends with 1 if a cell fails; what it says goes to a file."
    from nbdev.test import nbdev_test

    if notebook.parent.name == "baselines":
        share_example(shared)
    sys.path.insert(0, "")  # as in a kernel: what a page writes it can import
    with open(printed, "w", buffering=1) as file:
        for stream in (1, 2):  # what a library or a child writes, too
            os.dup2(file.fileno(), stream)
        with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            nbdev_test(str(notebook), flags=flags, do_print=True)


@pytest.fixture(scope="module")
def forks():
    "Where forks come from."
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    "A folder of all test workers."
    own = tmp_path_factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "baselines"


def check(notebook, flags, forks, folder, shared):
    "Fails with what the notebook printed, unless it runs."
    printed = folder / "printed.txt"
    child = forks.Process(target=run_notebook, args=(notebook, printed, flags, shared))
    child.start()
    child.join()
    said = printed.read_text(errors="replace") if printed.exists() else ""
    assert child.exitcode == 0, said[-6000:]


def identifier(path):
    return "/".join(path.with_suffix("").parts[-2:])


@pytest.mark.parametrize("notebook", COMPONENTS, ids=identifier)
@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot fork")
def test_notebook_runs(notebook, forks, tmp_path, shared):
    check(notebook, "", forks, tmp_path, shared)


@pytest.mark.slow
@pytest.mark.parametrize("notebook", WITH_SLOW_CELLS, ids=identifier)
@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot fork")
def test_notebook_runs_with_its_slow_cells(notebook, forks, tmp_path, shared):
    check(notebook, "slow", forks, tmp_path, shared)


@pytest.mark.slow
@pytest.mark.parametrize("guide", GUIDES, ids=identifier)
@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot fork")
def test_guide_runs_and_its_assertions_hold(guide, forks, tmp_path, shared):
    "About two minutes each: one trains adapters, the other starts a server."
    check(guide, "", forks, tmp_path, shared)
