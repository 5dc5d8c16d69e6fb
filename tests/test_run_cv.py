"""The main notebook for images on the tiny benchmark: what it writes, what it takes up again, and
what it refuses. What can be wrong with settings and data is tested with the experiment."""

import csv
import json
import os
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import nbformat
import numpy as np
import open_clip
import papermill
import pytest
import torch
from helpers import kept, stamps, table, tables
from PIL import Image

import harmomoe.models.unified  # noqa: F401 (its models can be loaded)
from harmomoe.base.artefacts import MANIFEST, read_manifest, stages_run
from harmomoe.base.process import seeded
from harmomoe.bundle.files import ADAPTER_FILES, FILES
from harmomoe.models.evaluate import measure, measure_all, summary
from harmomoe.models.model import load_model
from harmomoe.models.training import Checkpoint
from harmomoe.server.merge import ROUTERS

ROOT = Path(__file__).resolve().parent.parent
RUN_CV = ROOT / "nbs" / "run_cv.ipynb"
METHODS, DOMAINS = ["zeroshot", "expert:a", "expert:b", "expert:c", "harmomoe"], ["a", "b", "c"]
METHODS.append("harmomoe:paper")  # the router that is delivered is one of evidence
SETTINGS = (
    "proxies.candidates=40, proxies.number=12, routing.public_samples=40, "
    "expert.rank=4, expert.epochs=2, expert.batch_size=16, "
    "gate.epochs=1, gate.batch_size=16, "
    "finetune.epochs=1, finetune.batch_size=16, router.top_k=3"
)

pytestmark = [
    pytest.mark.usefixtures("elsewhere"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def papermill_run(output, parameters, folder, patch):
    "Run the notebook in a kernel of its own, as the command `papermill` does, and return it."
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    patch.setenv("PYTHONPATH", os.pathsep.join(paths))
    patch.setenv("OMP_NUM_THREADS", "1")
    how = dict(kernel_name="python3", cwd=str(folder), progress_bar=False)
    return papermill.execute_notebook(str(RUN_CV), str(output), parameters, **how)


def output_of(notebook):
    "All that a notebook printed, as one text."
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "\n".join(output.get("text", "") for output in outputs)


@pytest.fixture(scope="module")
def parameters(tiny_folder, tiny_seed_folder):
    return dict(
        backbone=str(tiny_seed_folder),
        data=str(tiny_folder),
        clients="a,b,c",
        pool="pool",
        settings=SETTINGS,
        threads=1,
    )


@pytest.fixture(scope="module")
def finished(parameters, tmp_path_factory):
    "Folder of one run in a kernel, and the executed notebook."
    folder = tmp_path_factory.mktemp("run")
    given = parameters | dict(out=str(folder / "out"))
    with pytest.MonkeyPatch.context() as patch:
        notebook = papermill_run(folder / "run_cv.ipynb", given, folder, patch)
    return folder / "out", notebook


@pytest.fixture
def again(finished, tmp_path):
    "A copy of the finished run's folder."
    return shutil.copytree(finished[0], tmp_path / "out")


@pytest.fixture
def run(parameters, run_cells):
    """A function (folder, settings, ...) that runs the notebook in this process, with these
    settings beside `SETTINGS` or, plainly, alone, and returns the kinds of artefacts that it
    built."""

    def run(out, settings="", plainly=False, **more):
        settings = settings if plainly else f"{SETTINGS}, {settings}"
        given = parameters | dict(out=str(out), settings=settings) | more
        with stages_run() as built:
            run_cells(RUN_CV, given)
        return built

    return run


def plain(name):
    "An artefact's name without the digest of the version."
    return re.sub(r"-[0-9a-f]{12}$", "", name)


def model_of(folder, form="evidence"):
    "The only unified model there whose router has this form."
    models = map(load_model, kept(folder / "server", "model"))
    [found] = [model for model in models if model.settings.form == form]
    return found


# ---- one run


def test_table_has_a_row_a_method_a_column_a_domain_and_percent_in_three_formats(finished):
    folder, _ = finished
    header, rows = table(folder)
    assert header == ["method", *DOMAINS, "average", "public", "joint"]
    assert list(rows) == METHODS
    told = json.loads((folder / "table.json").read_text())
    lines = (folder / "table.md").read_text().splitlines()
    markdown = [[field.strip() for field in line.strip("|").split("|")] for line in lines]
    assert markdown[0] == header
    assert [row[0] for row in markdown[2:]] == METHODS
    sizes = dict(a=12, b=8, c=12)
    for method, text in zip(METHODS, markdown[2:]):
        assert rows[method][3] == pytest.approx(np.mean(rows[method][:3]), abs=0.01)
        assert [float(x) for x in text[1:]] == pytest.approx(rows[method], abs=0.006)
        for domain, percent in zip(DOMAINS, rows[method]):
            cell = told["accuracy"][method][domain]
            assert cell["n"] == sizes[domain]
            assert percent == pytest.approx(100 * cell["correct"] / cell["n"], abs=0.006)
            assert cell["interval"][0] <= cell["percent"] <= cell["interval"][1]
        for name, percent in zip(("average", "public", "joint"), rows[method][3:]):
            cell = told["accuracy"][method][name]
            assert cell["percent"] == pytest.approx(percent, abs=0.006)
            assert cell["interval"][0] <= cell["percent"] <= cell["interval"][1]
        assert told["accuracy"][method]["public"]["n"] == 12
        joint = told["accuracy"][method]["joint"]["domains"]
        assert {name: cell["n"] for name, cell in joint.items()} == sizes


def test_table_says_with_which_parameters_and_seed_it_was_made(finished, parameters, tiny_seed):
    told = json.loads((finished[0] / "table.json").read_text())
    assert parameters.items() <= told["parameters"].items()
    assert told["parameters"]["random_state"] == 0
    assert told["seed_model"] == tiny_seed.identity


def test_figures_and_numbers_are_written(finished):
    folder, _ = finished
    ways = "similarity", "dpp"
    pictures = {f"proxies-{name}-{way}" for name in DOMAINS for way in ways}
    pictures |= {"accuracy", "routing", "tsne", "relevance"}
    assert {path.stem for path in folder.glob("*.png")} == pictures
    for picture in folder.glob("*.png"):
        assert min(Image.open(picture).size) > 50
    diversity = list(csv.reader((folder / "diversity.csv").open()))
    sets = {(name, way) for name in DOMAINS for way in ("random", *ways)}
    assert {(row[0], row[1]) for row in diversity[1:]} == sets
    speed = list(csv.reader((folder / "speed.csv").open()))
    assert [row[0] for row in speed] == ["model", "seed", "harmomoe"]
    stages = list(csv.DictReader((folder / "stages.csv").open()))
    assert [int(row["samples"]) for row in stages if row["stage"] == "embedding the pool"] == [90]
    assert abs(sum(float(row["share, %"]) for row in stages) - 100) < 1e-6


def test_model_opens_and_scores_what_the_table_says(finished, tiny_benchmark):
    model, (_, rows) = model_of(finished[0]), table(finished[0])
    assert model.experts == ["seed", *DOMAINS]
    for client, percent in zip(tiny_benchmark.clients, rows["harmomoe"]):
        found = measure(model, client.test, client.classes)
        assert found.percent == pytest.approx(percent, abs=0.006)
    found = summary(measure_all(model, tiny_benchmark))
    assert list(found.values()) == pytest.approx(rows["harmomoe"], abs=0.006)


def test_the_other_router_has_the_same_experts_from_the_same_bundles(finished, tiny_benchmark):
    (folder, notebook), (_, rows) = finished, table(finished[0])
    one, other = model_of(folder), model_of(folder, "mean")
    assert other.settings == ROUTERS["paper"] and other.experts == ["seed", *DOMAINS]
    assert [part.bundle for part in one.lineage] == [part.bundle for part in other.lineage]
    found = summary(measure_all(other, tiny_benchmark))
    assert list(found.values()) == pytest.approx(rows["harmomoe:paper"], abs=0.006)
    more = 3 * 4 * 2 * (64 + 1) / 1000
    said = f"the other router's vectors are {more:.1f} kB of the bundles"
    assert said in output_of(notebook)


def test_settings_are_those_that_were_asked_for(finished):
    model = model_of(finished[0])
    assert model.settings == replace(ROUTERS["evidence"], top_k=3)
    for name in DOMAINS:
        manifest = read_manifest(finished[0] / "clients" / name / "bundle")
        assert manifest["facts"]["proxies"] == 12
        for kind, epochs in (("expert", 2), ("gate", 1)):
            [stage] = kept(finished[0] / "clients" / name, kind)
            assert len(read_manifest(stage)["facts"]["losses"]) == epochs


def test_every_stage_leaves_a_verified_artefact(finished):
    folder, _ = finished
    artefacts = [path.parent for path in folder.rglob(MANIFEST)]
    names = [plain(path.relative_to(folder).as_posix()) for path in artefacts]
    kinds = {name: read_manifest(path)["kind"] for name, path in zip(names, artefacts)}
    rows = "zeroshot", "harmomoe", *(f"matching experts-{name}" for name in DOMAINS)
    twice = "rows/harmomoe", "server/model", "public/means"
    stages = "embeddings", "relevance", "proxies", "expert", "routing", "gate", "bundle"
    expected = {f"rows/{name}": name for name in rows}
    expected |= {f"clients/{name}/{kind}": kind for name in DOMAINS for kind in stages}
    expected |= {f"server/received/{i}-{name}": "bundle" for i, name in enumerate(DOMAINS, 1)}
    expected |= {"public/pool": "embeddings", "public/means": "means", "server/model": "model"}
    expected |= {"public/claim": "claim", "public/units": "units"}
    assert kinds == expected
    # one version of each, or one for each router; the claims of three bundles
    wanted = {name: 2 if name in twice else 1 for name in expected} | {"public/claim": 3}
    # evidence of the expert, from which its gate starts; means of it before its gate and after
    wanted |= {f"clients/{name}/routing": 3 for name in DOMAINS}
    assert Counter(names) == wanted
    for name in DOMAINS:
        assert set(read_manifest(folder / "clients" / name / "bundle")["files"]) == set(FILES)


def test_nothing_is_written_outside_the_result_folder(finished):
    assert {path.name for path in finished[0].parent.iterdir()} == {"out", "run_cv.ipynb"}


def test_notebook_shows_table_proxies_and_routing(finished):
    _, notebook = finished
    nbformat.validate(notebook)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    pictures = sum("image/png" in output.get("data", {}) for output in outputs)
    # relevance, t-SNE, accuracies; six contact sheets; routing of proxies and tests
    assert pictures >= 11
    assert re.search(r"HarmoMoE \d+\.\d\d on average", output_of(notebook))
    assert re.search(r"public: .* the seed's .*; joint: \d+\.\d\d, [+-]", output_of(notebook))


# ---- the next run


def test_second_run_computes_nothing_and_gives_the_same_table(again, run):
    before, first = stamps(again / "clients"), tables(again)
    for file in again.glob("table.*"):
        file.unlink()
    assert run(again) == []
    assert stamps(again / "clients") == before
    assert tables(again) == first


@pytest.mark.parametrize(
    "settings, stages",
    [
        (
            "finetune.epochs=0, router.top_k=2, router.seed_expert=false, router.seed_logit=1",
            [],
        ),
        (
            "router.form=logistic, router.shared_lam=true",
            ["means", *3 * ["routing", "routing", "claim"]],  # of experts with their gates, without
        ),
    ],
    ids=["server", "routing"],
)
def test_run_with_another_router_reuses_the_experts(settings, stages, again, run):
    before, first = stamps(again), kept(again / "server", "model")
    built = run(again, settings)
    # a row is kept under all settings, so that every row is measured again
    rows = ["zeroshot", *(f"matching experts-{name}" for name in DOMAINS)]
    # with either router, unless the settings of the one to compare with are what they were
    both = "finetune" in settings
    rows += (1 + both) * ["harmomoe", "model"]
    assert sorted(built) == sorted([*stages, *rows])
    after = stamps(again)
    # other versions stand beside those that were there
    before = {path: stamp for path, stamp in before.items() if "received" not in path}
    assert before.items() <= after.items()
    models = [load_model(path) for path in set(kept(again / "server", "model")) - {*first}]
    changes = dict(part.split("=") for part in settings.split(", "))
    form = changes.get("router.form", "evidence")
    [model] = [model for model in models if model.settings.form == form]
    others = [model.settings for model in models if model.settings.form != form]
    assert others == both * [ROUTERS["paper"]]
    for name in ("form", "top_k", "seed_expert", "shared_lam"):
        if f"router.{name}" in changes:
            assert str(getattr(model.settings, name)).lower() == changes[f"router.{name}"]
    assert model.experts == (DOMAINS if "seed_expert" in settings else ["seed", *DOMAINS])


def test_the_router_that_is_delivered_is_a_parameter_and_its_model_is_there(again, run):
    "The preset's router starts from ratios. The paper's was compared with, and is delivered then."
    given = dict(settings=SETTINGS.partition(", gate.")[0], plainly=True, preset="ratios")
    _, first = run(again, **given), table(again)[1]
    before = stamps(again)
    assert run(again, **given, router="paper") != []
    rows = table(again)[1]
    assert list(rows)[-2:] == ["harmomoe", "harmomoe:ratios"]
    assert list(first)[-2:] == ["harmomoe", "harmomoe:paper"]
    assert rows["harmomoe"] == first["harmomoe:paper"]
    assert rows["harmomoe:ratios"] == first["harmomoe"]
    new = {name.split("/")[0] for name in stamps(again).keys() - before.keys()}
    assert new == {"rows"}  # these are kept under all settings


def test_interrupted_run_goes_on_in_the_training_that_was_not_finished(again, run, monkeypatch):
    "Client b's expert is damaged; then the run stops in the second epoch of client c's."
    [b], [c] = (kept(again / "clients" / name, "expert") for name in "bc")
    [gate] = kept(again / "clients" / "c", "gate")
    for gone in (c, gate, again / "clients" / "c" / "bundle", again / "server"):
        shutil.rmtree(gone)
    (b / ADAPTER_FILES[1]).write_bytes(b"cut off")
    before, first = stamps(again / "clients"), tables(again)
    steps, step = [], torch.optim.AdamW.step

    def stopped(*given, **more):
        steps.append(1)
        if len(steps) == 10:  # b has 36 samples and c has 44, in batches of 16, in two epochs
            raise KeyboardInterrupt
        return step(*given, **more)

    monkeypatch.setattr(torch.optim.AdamW, "step", stopped)
    monkeypatch.setattr(Checkpoint, "due", lambda checkpoint: True)  # a minute would be too long
    with pytest.raises(KeyboardInterrupt):
        run(again)
    assert b.exists() and not c.exists() and not gate.exists()
    steps[:] = [1] * 100
    # the row with the other router is there
    assert run(again) == ["expert", "gate", "model"]
    assert len(steps) == 100 + 3 + 2 + 2  # c's second epoch, its gate; the server's 29 proxies
    after = stamps(again / "clients")
    new = {plain(path) for path, stamp in after.items() if before.get(path) != stamp}
    assert new == {"b/expert", "c/expert", "c/gate"}
    assert [kept(again / "clients" / name, "expert") for name in "bc"] == [[b], [c]]
    assert tables(again) == first


def test_experts_may_be_left_untrained_and_clients_unnamed(parameters, run_cells, tmp_path):
    "No clients means all domains but the pool; the folder has the names of model and data."
    given = parameters | dict(clients="", settings=f"{SETTINGS}, expert.epochs=0")
    run_cells(RUN_CV, given)
    [folder] = (tmp_path / "results").iterdir()
    assert folder.name == f"run_cv-tiny-{Path(parameters['data']).name}-0"
    assert list(table(folder)[1]) == METHODS


# ---- what is refused


def test_unknown_parameter_stops_papermill_with_a_suggestion(tmp_path, monkeypatch):
    with pytest.raises(papermill.PapermillExecutionError) as caught:
        papermill_run(tmp_path / "out.ipynb", dict(blackbone="ViT-B/16"), tmp_path, monkeypatch)
    for part in (
        "unknown parameter 'blackbone'",
        "Did you mean 'backbone'?",
        "Known parameters: backbone, weights",
    ):
        assert part in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["out.ipynb"]


@pytest.mark.parametrize(
    "wrong, said",
    [
        (dict(seed=3), "'seed' is now called 'random_state' .the name seed means the model"),
        (
            dict(router="best"),
            "router is 'best', but must be one of preset, paper, ratios, evidence",
        ),
        (dict(settings="expert.epoch=3"), "unknown field 'expert.epoch'. Did you mean 'epochs'"),
    ],
    ids=str,
)
def test_wrong_parameter_is_refused_before_anything_is_written(
    wrong, said, parameters, run_cells, tmp_path
):
    with pytest.raises(ValueError, match=said):
        run_cells(RUN_CV, parameters | dict(out="out") | wrong)
    assert list(tmp_path.iterdir()) == []


# ---- the paper's size


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["open_clip", "OpenAI"])
def test_vit_b_16_goes_through_all_stages_from_a_file(
    layout, tiny_folder, run_cells, tmp_path, monkeypatch
):
    "Random weights, so the numbers mean nothing; that every stage runs at the paper's size does."
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with seeded(0):
        weights = open_clip.create_model("ViT-B-16").state_dict()
    if layout == "OpenAI":
        integers = dict(input_resolution=224, context_length=77, vocab_size=49408)
        weights = {name: value.half() for name, value in weights.items()} | integers
    torch.save(weights, tmp_path / "weights.pt")
    space = run_cells(
        RUN_CV,
        dict(
            backbone="ViT-B/16",
            weights=str(tmp_path / "weights.pt"),
            data=str(tiny_folder),
            clients="a,b",
            pool="pool",
            out="out",
            quick=10,
            settings="proxies.candidates=8, proxies.number=3, expert.rank=2, expert.epochs=1, "
            "finetune.epochs=1",
        ),
    )
    rows = ["zeroshot", "expert:a", "expert:b", "harmomoe", "harmomoe:ratios"]
    assert list(table(tmp_path / "out")[1]) == rows
    model = model_of(tmp_path / "out", "mean")
    assert model.seed.identity == space["model0"].identity
    assert model.experts == ["seed", "a", "b"]
