"""The house: metadata said once, modules and notebooks in order, README as made, a wheel that works."""

import ast
import email
import json
import re
import shutil
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml

import check_links
import make_readme

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted(path for path in (ROOT / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts)
# in the order in which one may import another: the method first, then the baselines
COMPONENTS = [path for folder in (ROOT / "nbs", ROOT / "nbs/baselines")
              for path in sorted(folder.glob("[0-9][0-9]_*.ipynb"))]
JOBS = sorted(path for path in (ROOT / "nbs").glob("[a-z]*.ipynb") if path.stem != "index")
MODULES = sorted(path for path in (ROOT / "harmomoe").rglob("*.py") if path.name[0] != "_")
DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn", "open_clip": "open_clip_torch"}  # where names differ


def settings() -> dict:
    config = ConfigParser(delimiters=("=",), interpolation=None)
    config.read(ROOT / "settings.ini", encoding="utf-8")
    return dict(config["DEFAULT"])


def module_name(notebook: Path) -> str:
    """Where a component's code goes: `moe`, or `baselines.btm`."""
    return ".".join([*notebook.parent.relative_to(ROOT / "nbs").parts, notebook.stem[3:]])


def cells(path: Path) -> list[dict]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def test_metadata_agrees_with_settings():
    wanted = settings()
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert pyproject["name"] == wanted["lib_name"]
    assert pyproject["description"] == wanted["description"]
    assert pyproject["requires-python"] == f">={wanted['min_python']}"
    assert pyproject["urls"] == {"Repository": wanted["git_url"], "Documentation": wanted["doc_url"]}
    import harmomoe
    assert harmomoe.__version__ == wanted["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["version"], citation["license"]) == (wanted["version"], wanted["license"])
    assert (citation["repository-code"], citation["url"]) == (wanted["git_url"], wanted["doc_url"])
    assert citation["authors"] == [{"name": wanted["author"]}]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## \[(\d.*?)\]", changes, flags=re.MULTILINE)[0] == wanted["version"]
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text(encoding="utf-8"))
    pythons = workflow["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert (pythons[0], pythons[-1]) == (wanted["min_python"], wanted["max_tested_python"])


def test_importing_the_package_imports_nothing_else():
    code = "import sys; before = set(sys.modules); import harmomoe; print(*sorted(set(sys.modules) - before))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    others = {name for name in run.stdout.split() if name.partition(".")[0] not in sys.stdlib_module_names}
    assert others == {"harmomoe", "harmomoe.register"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel made by way of the source distribution, from a copy of what belongs into one."""
    source = tmp_path_factory.mktemp("source")
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True,
                            check=True).stdout.splitlines()
    for name in listed:
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(source / "dist"), str(source)]
    run = subprocess.run(build, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    return next((source / "dist").glob("*.whl"))


def test_wheel_says_what_settings_say(wheel):
    wanted = settings()
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        said = email.message_from_string(archive.read(name).decode())
    assert (said["Name"], said["Version"], said["Summary"]) == tuple(
        wanted[key] for key in ("lib_name", "version", "description"))
    assert said["License-Expression"] == wanted["license"]
    required = [line for line in said.get_all("Requires-Dist") if "extra ==" not in line]
    assert sorted(required) == sorted(wanted["requirements"].split())
    assert said.get_all("Provides-Extra") == ["notebooks", "harness", "gguf", "dev"]


def test_wheel_has_all_modules_and_data_and_works_alone(wheel, tmp_path):
    package = ROOT / "harmomoe"
    wanted = {path.relative_to(ROOT).as_posix() for path in package.rglob("*")
              if path.is_file() and "__pycache__" not in path.parts}
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if name.startswith("harmomoe/")} == wanted
        archive.extractall(tmp_path)
    code = ("import sys; sys.path.insert(0, sys.argv[1])\n"
            "from harmomoe import glyphs, weights\n"
            "assert glyphs.__file__.startswith(sys.argv[1]), glyphs.__file__\n"
            "print(*(client.name for client in glyphs.load_glyphs().clients), weights.open_seed().name)")
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.split() == ["flags", "digits", "letters", "embedded"]


def test_readme_is_made_from_the_index_notebook():
    assert (ROOT / "README.md").read_text(encoding="utf-8") == make_readme.readme(), \
        "run `python tools/make_readme.py`"


def test_readme_has_two_setup_commands():
    commands = [line for line in make_readme.readme().splitlines() if line.startswith("pip install ")]
    assert len(commands) == 2
    main_job, tests = commands
    assert 'pip install -e ".[notebooks]"' in main_job and "papermill nbs/run_cv.ipynb results/" in main_job
    assert 'pip install -e ".[dev]"' in tests and "python -m pytest" in tests


def test_sidebar_and_readme_lead_to_what_is_there():
    assert check_links.sidebar_problems() + check_links.readme_problems() == []


@pytest.mark.parametrize("markdown, wrong", [
    ("[a](other.ipynb) [b](other.html#part-two-x_1) ![c](picture.svg) [d](#here) [`f`](https://site/other.html)", 0),
    ("see @fig-one, [@fig-one] and a@fig-mail.org, `[x](gone.ipynb)`, $f[x](y)$ and [w](https://elsewhere.org/x)", 0),
    ("```\n[x](gone.ipynb)\n```\n[y](https://code/blob/main/settings.ini)", 0),
    ("[a](gone.ipynb) ![b](gone.png) <img src='gone.svg'> [c](#gone) [d](other.html#gone) [e](../../outside.md)", 6),
    ("[a](https://site/gone.html) [b](https://code/blob/main/gone.py#L3) @tbl-gone", 3),
])
def test_link_check_finds_what_is_broken_and_nothing_else(markdown, wrong, tmp_path, monkeypatch):
    def page(name, *sources):
        made = [{"cell_type": "markdown", "metadata": {}, "source": source} for source in sources]
        (tmp_path / name).write_text(json.dumps({"cells": made}), encoding="utf-8")
    page("page.ipynb", "## Here\n\n![One](picture.svg){#fig-one}", markdown)
    page("01_other.ipynb", "## Part *two*: `x_1`")
    made = json.loads((tmp_path / "01_other.ipynb").read_text(encoding="utf-8"))
    made["cells"].insert(0, {"cell_type": "raw", "metadata": {}, "source": "---\noutput-file: other.html\n---"})
    (tmp_path / "other.ipynb").write_text(json.dumps(made), encoding="utf-8")
    (tmp_path / "picture.svg").write_text("<svg/>", encoding="utf-8")
    (tmp_path / "nbdev.yml").write_text("website: {site-url: 'https://site'}", encoding="utf-8")
    monkeypatch.setattr(check_links, "PROCESSED", tmp_path)
    monkeypatch.setattr(check_links, "repository_url", lambda: "https://code/blob/main/")
    assert len(check_links.link_problems()) == wrong, check_links.link_problems()


def third_party_imports(source: str) -> set[str]:
    """Distributions that a piece of Python imports: neither the standard library nor harmomoe."""
    nodes = list(ast.walk(ast.parse(source)))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    tops = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) - {"harmomoe"}
    return {DISTRIBUTIONS.get(top, top).lower() for top in tops}


def required(*keys: str) -> set[str]:
    """Names of the distributions that settings.ini requires under these keys."""
    return {re.split(r"[<>=!~\[;]", line)[0].lower() for key in keys for line in settings()[key].split()}


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_module_needs_only_what_is_required(module):
    assert third_party_imports(module.read_text(encoding="utf-8")) <= required("requirements")


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_module_is_short_and_plain(module):
    source = module.read_text(encoding="utf-8")
    exported = source[source.index("\n# %% .."):]  # less the head that nbdev writes
    assert len(exported.splitlines()) <= 250
    assert [line for line in exported.splitlines() if len(line) > 120] == []
    assert not re.search(r"^\s*from \S+ import \*|\bpickle\b", exported, flags=re.MULTILINE)


@pytest.mark.parametrize("notebook", JOBS, ids=lambda path: path.stem)
def test_job_needs_only_what_the_notebooks_extra_brings(notebook):
    code = "\n".join("".join(cell["source"]) for cell in cells(notebook) if cell["cell_type"] == "code")
    code = re.sub(r"^[%!].*$", "", code, flags=re.MULTILINE)
    assert third_party_imports(code) <= required("requirements", "notebooks_requirements")


@pytest.mark.parametrize("notebook", COMPONENTS, ids=lambda path: path.stem)
def test_notebook_imports_only_lower_numbers(notebook):
    allowed = {module_name(path) for path in COMPONENTS[:COMPONENTS.index(notebook) + 1]}
    code = "\n".join("".join(cell["source"]) for cell in cells(notebook) if cell["cell_type"] == "code")
    imported = re.findall(r"^\s*(?:from|import) harmomoe\.(baselines(?:\.| import )\w+|\w+)", code, flags=re.MULTILINE)
    assert {name.replace(" import ", ".") for name in imported} <= allowed


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_kept_clean(notebook):
    title, *others = cells(notebook)
    if title["cell_type"] == "code":  # `#| default_exp` may come first
        title = others[0]
    lines = [line for line in "".join(title["source"]).splitlines() if line.strip()]
    assert len(lines) == 2 and lines[0].startswith("# ") and lines[1].startswith("> "), \
        "the title cell holds `# title` and `> summary`, and nothing else: nbdev drops the rest from the site"
    for cell in [title, *others]:
        assert set(cell["metadata"]) <= {"tags"}
        for output in cell.get("outputs", []):
            assert output["output_type"] != "error", "".join(output.get("traceback", []))
            picture = output.get("data", {}).get("image/png", "")
            assert len(picture) * 3 / 4 <= 60_000, "a picture of more than 60 kB"
    if notebook in COMPONENTS:
        assert f"#| default_exp {module_name(notebook)}" in notebook.read_text(encoding="utf-8")


def test_no_path_of_a_machine_and_no_unfinished_work():
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True,
                            check=True).stdout.splitlines()
    machine = "|".join(["work", "root", "home", "opt", "tmp", "Users"])
    unfinished = "|".join(["TO" + "DO", "FIX" + "ME", "place" + "holder", "not " + "implemented"])
    pattern = re.compile(rf"(?<![\w.~}}-])/(?:{machine})/\w|\b(?:{unfinished})\b")
    found = []
    for name in listed:
        path = ROOT / name
        if path.suffix in {".py", ".ipynb", ".md", ".yml", ".ini", ".toml"} and path.is_file():
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if len(line) < 5000 and pattern.search(line):
                    found.append(f"{name}:{number}: {line.strip()[:120]}")
    assert found == []
