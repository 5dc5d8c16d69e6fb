"""The house: rooms and arrows, metadata said once, README as made, a wheel that works."""

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

import check_links
import make_readme
import pytest
import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted(
    path for path in (ROOT / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts
)
COMPONENTS = [path for path in NOTEBOOKS if re.match(r"\d\d_", path.stem)]
# room -> the rooms that it may import from; data flows one way, and client and server never meet
BELOW = {"base": set(), "moe": set(), "data": {"base"}}
BELOW["models"] = {"base", "moe", "data"}
BELOW["config"] = BELOW["models"] | {"models"}
BELOW["describe"] = BELOW["config"] | {"config"}
BELOW["describe.greedy"] = {"base"}
BELOW["bundle"] = BELOW["describe"] | {"describe"}
BELOW["client"] = BELOW["server"] = BELOW["bundle"] | {"bundle"}
# an outsider, who sees bundles and models
BELOW["audit"] = BELOW["server"] | {"server"}
BELOW["exchange"] = BELOW["baselines"] = BELOW["rounds"] = BELOW["client"] | {"client", "server"}
BELOW["bench"] = BELOW["baselines"] | {"baselines"}
BELOW["describe"].add("describe.greedy")  # one floor below it, and nobody else's business
LONGEST = 100  # characters of a line
MOST = 40  # lines of a cell
JOBS = sorted(path for path in (ROOT / "nbs").glob("[a-z]*.ipynb") if path.stem != "index")
MODULES = sorted(path for path in (ROOT / "harmomoe").rglob("*.py") if path.name[0] != "_")
DISTRIBUTIONS = {
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "open_clip": "open_clip_torch",
    "yaml": "pyyaml",
    "model_signing": "model-signing",
    "dp_accounting": "dp-accounting",
}  # where names differ


def settings() -> dict:
    config = ConfigParser(delimiters=("=",), interpolation=None)
    config.read(ROOT / "settings.ini", encoding="utf-8")
    return dict(config["DEFAULT"])


def module_name(notebook: Path) -> str:
    """Where a component's code goes: `moe`, or `baselines.btm`."""
    return ".".join([*notebook.parent.relative_to(ROOT / "nbs").parts, notebook.stem[3:]])


def cells(path: Path) -> list[dict]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def source(cell: dict) -> str:
    return "".join(cell["source"])


def listed_files() -> list[str]:
    """What git tracks, and what it would: without virtual environments that lie in the tree."""
    run = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    homes = {path.parent for path in ROOT.glob("*/pyvenv.cfg")}
    return [
        name
        for name in run.stdout.splitlines()
        if (ROOT / name).is_file() and not homes & set((ROOT / name).parents)
    ]


def identifier(path: Path) -> str:
    """What a parametrised test calls a file: its room and topic."""
    return "/".join(path.with_suffix("").parts[-2:])


def test_metadata_agrees_with_settings():
    wanted = settings()
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert pyproject["name"] == wanted["lib_name"]
    assert pyproject["description"] == wanted["description"]
    assert pyproject["requires-python"] == f">={wanted['min_python']}"
    assert pyproject["urls"] == {
        "Repository": wanted["git_url"],
        "Documentation": wanted["doc_url"],
    }
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
    code = (
        "import sys; before = set(sys.modules); import harmomoe\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    names = run.stdout.split()
    others = {name for name in names if name.partition(".")[0] not in sys.stdlib_module_names}
    assert others == {"harmomoe", "harmomoe.moe", "harmomoe.moe.register"}


def test_common_names_come_from_the_package_itself():
    import harmomoe

    for name in harmomoe.__all__:
        assert getattr(harmomoe, name).__module__.startswith("harmomoe.")
    assert set(harmomoe.__all__) <= set(dir(harmomoe))
    with pytest.raises(AttributeError, match="no attribute 'Servers'"):
        harmomoe.Servers


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel made by way of the source distribution, from a copy of what belongs into one."""
    source = tmp_path_factory.mktemp("source")
    for name in listed_files():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    build = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        str(source / "dist"),
        str(source),
    ]
    run = subprocess.run(build, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    return next((source / "dist").glob("*.whl"))


def test_wheel_says_what_settings_say(wheel):
    wanted = settings()
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        said = email.message_from_string(archive.read(name).decode())
    assert (said["Name"], said["Version"], said["Summary"]) == tuple(
        wanted[key] for key in ("lib_name", "version", "description")
    )
    assert said["License-Expression"] == wanted["license"]
    required = [line for line in said.get_all("Requires-Dist") if "extra ==" not in line]
    assert sorted(required) == sorted(wanted["requirements"].split())
    extras = ["notebooks", "harness", "gguf", "onnx", "privacy", "ray", "signing", "dev"]
    assert said.get_all("Provides-Extra") == extras


def test_wheel_has_all_modules_and_data_and_works_alone(wheel, tmp_path):
    package = ROOT / "harmomoe"
    wanted = {
        path.relative_to(ROOT).as_posix()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if name.startswith("harmomoe/")} == wanted
        archive.extractall(tmp_path)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from harmomoe.data import glyphs\nfrom harmomoe.models import weights\n"
        "assert glyphs.__file__.startswith(sys.argv[1]), glyphs.__file__\n"
        "print(*(client.name for client in glyphs.load_glyphs().clients), weights.open_seed().name)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=tmp_path
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.split() == ["flags", "digits", "letters", "embedded"]


def test_readme_is_made_from_the_index_notebook():
    assert (ROOT / "README.md").read_text(encoding="utf-8") == make_readme.readme(), (
        "run `python tools/make_readme.py`"
    )


def test_readme_has_two_setup_commands():
    commands = [
        line for line in make_readme.readme().splitlines() if line.startswith("pip install ")
    ]
    assert len(commands) == 2
    main_job, tests = commands
    assert (
        'pip install -e ".[notebooks]"' in main_job
        and "papermill nbs/run_cv.ipynb results/" in main_job
    )
    assert 'pip install -e ".[dev]"' in tests and "python -m pytest" in tests


def test_sidebar_and_readme_lead_to_what_is_there():
    assert check_links.sidebar_problems() + check_links.readme_problems() == []


@pytest.mark.parametrize(
    "markdown, wrong",
    [
        (
            "[a](other.ipynb) [b](other.html#part-two-x_1) ![c](picture.svg) "
            "[d](#here) [`f`](https://site/other.html)",
            0,
        ),
        (
            "see @fig-one, [@fig-one] and a@fig-mail.org, `[x](gone.ipynb)`, $f[x](y)$ "
            "and [w](https://elsewhere.org/x)",
            0,
        ),
        ("```\n[x](gone.ipynb)\n```\n[y](https://code/blob/main/settings.ini)", 0),
        (
            "[a](gone.ipynb) ![b](gone.png) <img src='gone.svg'> [c](#gone) "
            "[d](other.html#gone) [e](../../outside.md)",
            6,
        ),
        ("[a](https://site/gone.html) [b](https://code/blob/main/gone.py#L3) @tbl-gone", 3),
    ],
)
def test_link_check_finds_what_is_broken_and_nothing_else(markdown, wrong, tmp_path, monkeypatch):
    def page(name, *sources):
        made = [{"cell_type": "markdown", "metadata": {}, "source": source} for source in sources]
        (tmp_path / name).write_text(json.dumps({"cells": made}), encoding="utf-8")

    page("page.ipynb", "## Here\n\n![One](picture.svg){#fig-one}", markdown)
    page("01_other.ipynb", "## Part *two*: `x_1`")
    made = json.loads((tmp_path / "01_other.ipynb").read_text(encoding="utf-8"))
    made["cells"].insert(
        0, {"cell_type": "raw", "metadata": {}, "source": "---\noutput-file: other.html\n---"}
    )
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
    return {
        re.split(r"[<>=!~\[;]", line)[0].lower() for key in keys for line in settings()[key].split()
    }


@pytest.mark.parametrize("module", MODULES, ids=identifier)
def test_module_needs_only_what_is_required(module):
    """The report is for those who run notebooks, and so is the plotting library that it imports
    inside its functions. Signatures are an extra, which they import likewise."""
    keys = ["requirements"]
    if identifier(module) == "bundle/signatures":
        keys.append("signing_requirements")
    if identifier(module) in ("client/privacy", "config/accounting"):
        keys.append("privacy_requirements")
    if identifier(module) == "exchange/onnx":
        keys.append("onnx_requirements")
    if identifier(module) == "base/engine":
        keys.append("ray_requirements")
    if identifier(module) == "bench/report":
        keys.append("notebooks_requirements")
    assert third_party_imports(module.read_text(encoding="utf-8")) <= required(*keys)


@pytest.mark.parametrize("module", MODULES, ids=identifier)
def test_module_is_plain(module):
    source = module.read_text(encoding="utf-8")
    exported = source[source.index("\n# %% ..") :]  # less the head that nbdev writes
    long = [line for line in exported.splitlines() if len(line) > LONGEST]
    assert [line for line in long if not line.startswith("# %% ..")] == []
    assert not re.search(r"^\s*from \S+ import \*|\bpickle\b", exported, flags=re.MULTILINE)


def imported_topics(module: Path) -> dict[str, str]:
    """What a module imports from the package: `room.topic` -> the statement."""
    package = module.relative_to(ROOT).with_suffix("").parts[:-1]
    found = {}
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else ()
            names = [".".join([*start, *filter(None, [node.module])])]
        else:
            continue
        ours = [name for name in names if name.startswith("harmomoe.")]
        found |= {name.removeprefix("harmomoe."): ast.unparse(node) for name in ours}
    return found


@pytest.mark.parametrize("module", MODULES, ids=identifier)
def test_arrows_between_rooms_run_one_way(module):
    room = ".".join(module.relative_to(ROOT / "harmomoe").parts[:-1])
    for topic, statement in imported_topics(module).items():
        other = topic.rpartition(".")[0]
        assert other == room or other in BELOW[room], (
            f"{module.relative_to(ROOT)}: `{statement}` breaks the house: {room} may import from "
            f"{', '.join(sorted(BELOW[room])) or 'no other room'}, not from {other}"
        )


def test_every_room_has_its_arrows():
    rooms = {".".join(path.relative_to(ROOT / "harmomoe").parts[:-1]) for path in MODULES}
    assert rooms == BELOW.keys()
    assert "client" not in BELOW["server"] and "server" not in BELOW["client"]


def test_ruff_finds_nothing():
    for command in (["check"], ["format", "--check"]):
        run = subprocess.run(
            [
                sys.executable,
                "-m",
                "ruff",
                *command,
                "--no-cache",
                "nbs",
                "tests",
                "tools",
                "setup.py",
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stdout[-3000:]


@pytest.mark.parametrize("notebook", JOBS, ids=identifier)
def test_job_needs_only_what_the_notebooks_extra_brings(notebook):
    code = "\n".join(source(cell) for cell in cells(notebook) if cell["cell_type"] == "code")
    code = re.sub(r"^[%!].*$", "", code, flags=re.MULTILINE)
    assert third_party_imports(code) <= required("requirements", "notebooks_requirements")


@pytest.mark.parametrize("notebook", COMPONENTS, ids=identifier)
def test_notebook_imports_only_lower_numbers_of_its_room(notebook):
    """Exported or not; a server's notebook may play clients to have something to show."""
    room = [path for path in COMPONENTS if path.parent == notebook.parent]
    allowed = {module_name(path) for path in room[: room.index(notebook) + 1]}
    code = "\n".join(source(cell) for cell in cells(notebook) if cell["cell_type"] == "code")
    inside = re.escape(module_name(notebook).rpartition(".")[0])
    imported = re.findall(rf"^\s*(?:from|import) harmomoe\.({inside}\.\w+) ", code, re.MULTILINE)
    assert set(imported) <= allowed


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=identifier)
def test_notebook_reads_well(notebook):
    for number, cell in enumerate(cells(notebook)):
        lines = source(cell).splitlines()
        if cell["cell_type"] == "code":
            assert len(lines) <= MOST, f"cell {number} has {len(lines)} lines"
        else:  # tables and formulas cannot be broken, nor can a link or a picture's description
            whole = r"\s*[|$]|.*\]\(\S*$|!\[.*\)\{.*\}$"
            lines = [line for line in lines if not re.match(whole, line)]
        long = [line for line in lines if len(line) > LONGEST and len(line.split()) > 2]
        assert long == [], f"cell {number}"


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=identifier)
def test_notebook_is_kept_clean(notebook):
    title, *others = cells(notebook)
    if title["cell_type"] == "code":  # `#| default_exp` may come first
        title = others[0]
    lines = [line for line in "".join(title["source"]).splitlines() if line.strip()]
    front = [line for line in lines[2:] if not line.startswith("- ")]
    assert len(lines) > 1 and lines[0][:2] == "# " and lines[1][:2] == "> " and not front, (
        "the title cell holds `# title`, `> summary` and maybe `- option: value`: nbdev drops the "
        "rest"
    )
    for cell in [title, *others]:
        assert set(cell["metadata"]) <= {"tags"}
        for output in cell.get("outputs", []):
            assert output["output_type"] != "error", "".join(output.get("traceback", []))
            picture = output.get("data", {}).get("image/png", "")
            assert len(picture) * 3 / 4 <= 60_000, "a picture of more than 60 kB"
    if notebook in COMPONENTS:
        assert f"#| default_exp {module_name(notebook)}" in notebook.read_text(encoding="utf-8")


def test_no_path_of_a_machine_and_no_unfinished_work():
    machine = "|".join(["work", "root", "home", "opt", "tmp", "Users"])
    unfinished = "|".join(["TO" + "DO", "FIX" + "ME", "place" + "holder", "not " + "implemented"])
    pattern = re.compile(rf"(?<![\w.~}}-])/(?:{machine})/\w|\b(?:{unfinished})\b")
    found = []
    for name in listed_files():
        path = ROOT / name
        if path.suffix in {".py", ".ipynb", ".md", ".yml", ".ini", ".toml"}:
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if len(line) < 5000 and pattern.search(line):
                    found.append(f"{name}:{number}: {line.strip()[:120]}")
    assert found == []
