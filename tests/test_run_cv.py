"The two papermill notebooks on the tiny benchmark: what they write, what they resume, and what they refuse."
import csv
import json
import os
import re
import shutil
from pathlib import Path

import huggingface_hub
import matplotlib.pyplot as plt
import nbformat
import numpy as np
import open_clip
import papermill
import pytest
import safetensors.torch
import torch
from PIL import Image

import harmomoe.evaluate
import harmomoe.seed
import harmomoe.unify
from harmomoe.bundle import ADAPTER_FILES, FILES
from harmomoe.core import MANIFEST, read_manifest, seeded
from harmomoe.evaluate import accuracy
from harmomoe.moe import load_model
from harmomoe.weights import open_seed
from helpers import kept, stamps

ROOT = Path(__file__).resolve().parent.parent
RUN_CV, PRETRAIN = ROOT / "nbs" / "run_cv.ipynb", ROOT / "nbs" / "pretrain_seed.ipynb"
METHODS, DOMAINS = ["zeroshot", "expert:a", "expert:b", "expert:c", "harmomoe"], ["a", "b", "c"]

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def forbidden(*args, **kwargs): pytest.fail("this work was not to be done")


def papermill_run(notebook, output, parameters, folder, patch):
    "Run a notebook in a kernel of its own, as the command `papermill` does, and return it."
    patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
    patch.setenv("OMP_NUM_THREADS", "1")
    return papermill.execute_notebook(str(notebook), str(output), parameters, kernel_name="python3", cwd=str(folder),
                                      progress_bar=False)


def output_of(notebook):
    "All that a notebook printed, as one text."
    return "\n".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))


@pytest.fixture(scope="module")
def parameters(tiny_folder, tiny_seed_folder):
    return dict(backbone=str(tiny_seed_folder), data=str(tiny_folder), clients="a,b,c", pool="pool", candidates=40,
                proxies=12, rank=4, epochs=2, finetune_epochs=1, batch_size=16, seed_expert=True,
                top_k=1, router_initial="mean", threads=1)


@pytest.fixture(scope="module")
def finished(parameters, tmp_path_factory):
    "Folder of one run in a kernel, and the executed notebook."
    folder = tmp_path_factory.mktemp("run")
    settings = parameters | dict(out=str(folder / "out"))
    with pytest.MonkeyPatch.context() as patch:
        notebook = papermill_run(RUN_CV, folder / "run_cv.ipynb", settings, folder, patch)
    return folder / "out", notebook


@pytest.fixture
def again(finished, tmp_path):
    "A copy of the finished run's folder."
    return shutil.copytree(finished[0], tmp_path / "out")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    "Notebooks run in an empty folder, and leave no figures open."
    monkeypatch.chdir(tmp_path)
    yield
    plt.close("all")


def plain(name):
    "An artefact's name without the digest of the version."
    return re.sub(r"-[0-9a-f]{12}$", "", name)


def table(folder):
    rows = list(csv.reader((folder / "table.csv").open()))
    return rows[0], {row[0]: [float(x) for x in row[1:]] for row in rows[1:]}


# ---- one run

def test_table_has_a_row_a_method_a_column_a_domain_and_percent_in_three_formats(finished):
    folder, _ = finished
    header, rows = table(folder)
    assert header == ["method", *DOMAINS, "average"] and list(rows) == METHODS
    told = json.loads((folder / "table.json").read_text())
    lines = (folder / "table.md").read_text().splitlines()
    markdown = [[field.strip() for field in line.strip("|").split("|")] for line in lines]
    assert markdown[0] == header and [row[0] for row in markdown[2:]] == METHODS
    sizes = dict(a=12, b=8, c=12)
    for method, text in zip(METHODS, markdown[2:]):
        assert rows[method][-1] == pytest.approx(np.mean(rows[method][:-1]), abs=.01)
        assert [float(x) for x in text[1:]] == pytest.approx(rows[method], abs=.006)
        for domain, percent in zip(DOMAINS, rows[method]):
            cell = told["accuracy"][method][domain]
            assert cell["n"] == sizes[domain] and percent == pytest.approx(100 * cell["correct"] / cell["n"], abs=.006)
            assert cell["interval"][0] <= cell["percent"] <= cell["interval"][1]


def test_table_says_with_which_parameters_and_seed_it_was_made(finished, parameters, tiny_seed):
    told = json.loads((finished[0] / "table.json").read_text())
    assert parameters.items() <= told["parameters"].items() and told["parameters"]["selection"] == "dpp"
    assert told["seed_model"] == tiny_seed.identity


def test_figures_and_numbers_are_written(finished):
    folder, _ = finished
    pictures = {"accuracy", "routing", "tsne", "relevance", *(f"proxies-{name}-{method}" for name in DOMAINS
                                                              for method in ("similarity", "dpp"))}
    assert {path.stem for path in folder.glob("*.png")} == pictures
    for picture in folder.glob("*.png"): assert min(Image.open(picture).size) > 50
    diversity = list(csv.reader((folder / "diversity.csv").open()))
    sets = {(name, method) for name in DOMAINS for method in ("random", "similarity", "dpp")}
    assert {(row[0], row[1]) for row in diversity[1:]} == sets
    assert [row[0] for row in csv.reader((folder / "speed.csv").open())] == ["model", "seed", "harmomoe"]
    stages = list(csv.DictReader((folder / "stages.csv").open()))
    assert [int(row["samples"]) for row in stages if row["stage"] == "embedding the pool"] == [90]
    assert abs(sum(float(row["share, %"]) for row in stages) - 100) < 1e-6


def test_model_opens_and_scores_what_the_table_says(finished, tiny_benchmark):
    model, (_, rows) = load_model(finished[0] / "model"), table(finished[0])
    assert model.experts == ["seed", *DOMAINS]
    for client, percent in zip(tiny_benchmark.clients, rows["harmomoe"]):
        found = accuracy(model, client.test, client.classes)
        assert found.percent == pytest.approx(percent, abs=.006)


def test_every_stage_leaves_a_verified_artefact(finished):
    folder, _ = finished
    artefacts = [path.parent for path in folder.rglob(MANIFEST)]
    kinds = {plain(path.relative_to(folder).as_posix()): read_manifest(path)["kind"] for path in artefacts}
    expected = {"pool": "embeddings", "model": "model"}
    stages = "embeddings", "relevance", "proxies", "expert", "routing", "bundle"
    expected |= {f"clients/{name}/{kind}": kind for name in DOMAINS for kind in stages}
    expected |= {f"accuracy/{method.replace(':', '-')}-{name}": "accuracy" for method in METHODS for name in DOMAINS}
    assert kinds == expected and len(artefacts) == len(expected)                            # one version of each
    assert all(set(read_manifest(folder / "clients" / name / "bundle")["files"]) == set(FILES) for name in DOMAINS)


def test_nothing_is_written_outside_the_result_folder(finished):
    assert {path.name for path in finished[0].parent.iterdir()} == {"out", "run_cv.ipynb"}


def test_notebook_shows_table_proxies_and_routing(finished):
    _, notebook = finished
    nbformat.validate(notebook)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    pictures = sum("image/png" in output.get("data", {}) for output in outputs)
    assert pictures >= 11       # relevance, t-SNE, accuracies; six contact sheets; routing of proxies and tests
    assert re.search(r"HarmoMoE \d+\.\d\d on average", output_of(notebook))


# ---- the second run

def test_second_run_trains_and_measures_nothing_and_gives_the_same_table(again, parameters, run_cells, monkeypatch):
    for name in ("train_expert", "client_routing", "public_routing", "linear_probe", "select_proxies", "finetune",
                 "unite"):
        monkeypatch.setattr(harmomoe.unify, name, forbidden)
    monkeypatch.setattr(harmomoe.unify, "unify", forbidden)
    monkeypatch.setattr(harmomoe.evaluate, "accuracy", forbidden)
    before, first = stamps(again), {suffix: (again / f"table.{suffix}").read_bytes() for suffix in ("csv", "md")}
    for file in again.glob("table.*"): file.unlink()
    run_cells(RUN_CV, parameters | dict(out=str(again)))
    assert stamps(again) == before and len(before) == 2 + 3 * 5 + 5 * 3
    assert {suffix: (again / f"table.{suffix}").read_bytes() for suffix in ("csv", "md")} == first


@pytest.mark.parametrize("changes, again_too", [
    (dict(finetune_epochs=0, top_k=2, seed_expert=False, shared_blend=True), ()),
    (dict(router_initial="logistic"), ["clients/means", *(f"clients/{name}/routing" for name in DOMAINS)])], ids=["server", "routing"])
def test_run_with_another_router_reuses_the_experts(changes, again_too, again, parameters, run_cells, monkeypatch):
    monkeypatch.setattr(harmomoe.unify, "train_expert", forbidden)
    before = stamps(again)
    run_cells(RUN_CV, parameters | dict(out=str(again)) | changes)
    after = stamps(again)
    new = {plain(path) for path, stamp in after.items() if before.get(path) != stamp}
    old = {path: stamp for path, stamp in before.items() if path.startswith("clients/")}
    assert old.items() <= after.items()                       # other versions stand beside those that were there
    measured = {path for path in new if path.startswith("accuracy/expert-")}
    assert new - measured == {"model", *(f"accuracy/harmomoe-{name}" for name in DOMAINS), *again_too}
    assert again_too or not measured                          # where bundles change, experts may be measured again
    settings = {key: value for key, value in changes.items() if key in ("top_k", "seed_expert", "shared_blend")}
    settings |= dict(initial=changes.get("router_initial", "mean"))
    model = load_model(again / "model")
    assert settings.items() <= vars(model.settings).items()
    assert model.experts == (DOMAINS if "seed_expert" in changes else ["seed", *DOMAINS])


def test_interrupted_run_goes_on_with_the_client_that_was_not_finished(again, parameters, run_cells, monkeypatch):
    [expert_b], [expert_c] = (kept(again / "clients" / name, "expert") for name in "bc")
    for gone in (expert_c, again / "clients" / "c" / "bundle", again / "model"): shutil.rmtree(gone)
    (expert_b / ADAPTER_FILES[1]).write_bytes(b"cut off")
    trained, train = [], harmomoe.unify.train_expert

    def count(seed, data, *rest):
        trained.append(len(data))
        return train(seed, data, *rest)
    monkeypatch.setattr(harmomoe.unify, "train_expert", count)
    first = (again / "table.csv").read_bytes()
    run_cells(RUN_CV, parameters | dict(out=str(again)))
    assert trained == [24, 32]                                # b, whose expert is damaged, and c
    assert [kept(again / "clients" / name, "expert") for name in "bc"] == [[expert_b], [expert_c]]
    assert (again / "table.csv").read_bytes() == first


def test_result_folder_is_named_after_model_data_and_seed(parameters, run_cells, tmp_path, tiny_folder, monkeypatch):
    "Stopped where the seed model is first used: nothing but the empty folder is there."
    monkeypatch.setattr(harmomoe.seed.ImageSeed, "identity", property(lambda self: 1 / 0))
    for extra, name in ((dict(), "3"), (dict(limit=60), "3-limit60")):
        with pytest.raises(ZeroDivisionError): run_cells(RUN_CV, parameters | dict(seed=3) | extra)
        assert list((tmp_path / "results" / f"run_cv-tiny-{tiny_folder.name}-{name}").iterdir()) == []


# ---- what is refused, and when

def test_unknown_parameter_stops_papermill_with_a_suggestion(tmp_path, monkeypatch):
    with pytest.raises(papermill.PapermillExecutionError) as caught:
        papermill_run(RUN_CV, tmp_path / "out.ipynb", dict(blackbone="ViT-B/16"), tmp_path, monkeypatch)
    for part in ("unknown parameter 'blackbone'", "Did you mean 'backbone'?", "Known parameters: backbone, weights"):
        assert part in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["out.ipynb"]


WRONG = {
    "unknown parameter": (dict(expochs=3), ValueError, "unknown parameter 'expochs'. Did you mean 'epochs'"),
    "text for a number": (dict(epochs="3"), ValueError, "'epochs' is '3', but must be of type int"),
    "number for text": (dict(clients=3), ValueError, "'clients' is 3, but must be of type str"),
    "fraction for a count": (dict(top_k=1.5), ValueError, "'top_k' is 1.5, but must be of type int"),
    "number for a switch": (dict(proxy_aligned=1), ValueError, "'proxy_aligned' is 1, but must be of type bool"),
    "unknown backbone": (dict(backbone="ViT-B/17"), ValueError, "backbone 'ViT-B/17' is neither 'embedded'"),
    "weights that are not there": (dict(backbone="ViT-B/16", weights="no.pt"), FileNotFoundError, "'no.pt' is neither"),
    "weights for a saved seed": (dict(weights="openai"), ValueError, "has its own weights"),
    "no such client": (dict(clients="a,nope"), FileNotFoundError, "'nope' is not a domain there.*a, b, c, pool"),
    "no such pool": (dict(pool="imagenet"), FileNotFoundError, "'imagenet' is not a domain there.*a, b, c, pool"),
    "one client twice": (dict(clients="a,b,a"), ValueError, "used twice"),
    "pool as client": (dict(clients="a,pool"), ValueError, "used twice"),
    "no such folder": (dict(data="no/such/folder"), FileNotFoundError, "'no/such/folder' does not exist"),
    "candidates larger than the pool": (dict(candidates=91), ValueError, "candidates is 91, but the pool has 90"),
    "candidates larger than the limit": (dict(limit=39), ValueError, "candidates is 40, but the pool has 39 samples"),
    "more proxies than candidates": (dict(proxies=41), ValueError, "m = 41.*cannot exceed candidates.*n = 40"),
    "unknown selection": (dict(selection="best"), ValueError, "selection is 'best', but must be one of"),
    "unknown relevance": (dict(relevance="svm"), ValueError, "relevance is 'svm', but must be one of"),
    "unknown optimizer": (dict(optimizer="adam"), ValueError, "'adam' is neither 'sgd' nor 'adamw'"),
    "unknown start of the router": (dict(router_initial="zero"), ValueError, "'zero' is none of mean, logistic, .*ran"),
    "rank 0": (dict(rank=0), ValueError, "rank is 0, but must be positive"),
    "negative epochs": (dict(epochs=-1), ValueError, "epochs is -1"),
    "batches of none": (dict(batch_size=0), ValueError, "batch_size is 0"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_parameter_is_refused_before_anything_is_done(what, parameters, run_cells, tmp_path, monkeypatch):
    monkeypatch.setattr(harmomoe.seed.ImageSeed, "embed", forbidden)
    changes, error, said = WRONG[what]
    with pytest.raises(error, match=said): run_cells(RUN_CV, parameters | dict(out="out") | changes)
    assert list(tmp_path.iterdir()) == []


LATE = [dict(top_k=9), dict(top_k=0), dict(blend=1.5), dict(blend=-.5), dict(clients="seed=a,b"), dict(limit=0),
        dict(proxies=1)]


@pytest.mark.parametrize("changes", LATE, ids=str)
def test_these_too_are_refused_before_anything_is_computed(changes, parameters, run_cells, tmp_path, monkeypatch):
    class Worked(Exception): pass

    def worked(*args, **kwargs): raise Worked
    monkeypatch.setattr(harmomoe.seed.ImageSeed, "embed", worked)
    monkeypatch.setattr(harmomoe.seed.ImageSeed, "identity", property(worked))
    with pytest.raises(ValueError): run_cells(RUN_CV, parameters | dict(out="out") | changes)


def test_experts_may_be_left_untrained(again, parameters, run_cells):
    run_cells(RUN_CV, parameters | dict(out=str(again), epochs=0))


def test_no_clients_means_all_domains_but_the_pool(parameters, run_cells, monkeypatch):
    monkeypatch.setattr(harmomoe.seed.ImageSeed, "identity", property(lambda self: 1 / 0))
    with pytest.raises(ZeroDivisionError): run_cells(RUN_CV, parameters | dict(out="out", clients=""))


@pytest.mark.parametrize("backbone", ["ViT-B/16", "ViT-B/32"])
def test_papers_backbone_offline_is_one_error_that_names_three_ways_on(backbone, run_cells, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))              # no cache either
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *args, **kwargs: None)
    with pytest.raises(ConnectionError) as caught: run_cells(RUN_CV, dict(backbone=backbone))
    for part in (f"weights of {backbone.replace('/', '-')}: not in the local cache", "HF_HUB_OFFLINE", "(1)", "network",
                 "(2)", "-p weights FILE", "(3)", "embedded"): assert part in str(caught.value)
    assert caught.value.__cause__ is None and list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["open_clip", "OpenAI"])
def test_vit_b_16_goes_through_all_stages_from_a_file(layout, tiny_folder, run_cells, tmp_path, monkeypatch):
    "Random weights, so the numbers mean nothing; that every stage runs at the paper's size does."
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with seeded(0): weights = open_clip.create_model("ViT-B-16").state_dict()
    if layout == "OpenAI":
        integers = dict(input_resolution=224, context_length=77, vocab_size=49408)
        weights = {name: value.half() for name, value in weights.items()} | integers
    torch.save(weights, tmp_path / "weights.pt")
    space = run_cells(RUN_CV, dict(backbone="ViT-B/16", weights=str(tmp_path / "weights.pt"), data=str(tiny_folder),
                                   clients="a,b", pool="pool", out="out", limit=10, candidates=8, proxies=3, rank=2,
                                   epochs=1, finetune_epochs=1))
    assert list(table(tmp_path / "out")[1]) == ["zeroshot", "expert:a", "expert:b", "harmomoe"]
    model = load_model(tmp_path / "out" / "model")
    assert model.seed.identity == space["model0"].identity and model.experts == ["seed", "a", "b"]


# ---- pre-training a seed

@pytest.fixture(scope="module")
def pretraining(tiny_folder):
    return dict(pool=str(tiny_folder / "pool"), image_size=16, width=64, layers=1, masked_epochs=1, visible=2,
                text_steps=2, epochs=2, full_epochs=1, batch_size=32, merges=100, prompt="a {} here", threads=1)


@pytest.fixture(scope="module")
def pretrained(pretraining, run_cells, tmp_path_factory):
    "Folder of a finished seed, and the names that its notebook has defined."
    folder = tmp_path_factory.mktemp("pretrained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        space = run_cells(PRETRAIN, pretraining | dict(out="seeds/mine"))
    return folder / "seeds" / "mine", space


def test_pretrained_seed_opens_under_the_name_of_its_folder(pretrained, tiny_benchmark):
    folder, _ = pretrained
    assert [path.name for path in folder.parent.iterdir()] == ["mine"]
    seed = open_seed(str(folder))
    assert (seed.name, seed.prompt, len(seed.layers)) == ("mine", "a {} here", 1)
    assert torch.isfinite(seed.embed(tiny_benchmark.pool.test)).all()
    manifest = read_manifest(folder, "seed")
    assert manifest["inputs"]["parameters"]["epochs"] == 2 and "pool" in manifest["facts"]["zero_shot"]


def test_names_are_trained_as_they_will_be_used(pretrained):
    _, space = pretrained
    used = space["tokenizer"]([f"a {name.replace('_', ' ')} here" for name in space["names"]])
    assert torch.equal(space["tokens"], used)


@pytest.mark.parametrize("stop", [1, 2, 4])
def test_interrupted_pretraining_ends_in_the_same_seed(stop, pretrained, pretraining, run_cells, tmp_path, monkeypatch):
    "Interrupted after the masked epoch, the first naming epoch, or when only the seed is yet to be saved."
    saves, save = [], harmomoe.seed.save_file

    def save_until(tensors, path, **more):
        saves.append(path)
        if len(saves) > stop: raise KeyboardInterrupt
        save(tensors, path, **more)
    with monkeypatch.context() as patch:
        for module in (safetensors.torch, harmomoe.seed): patch.setattr(module, "save_file", save_until)
        with pytest.raises(KeyboardInterrupt): run_cells(PRETRAIN, pretraining | dict(out="mine"))
    assert not (tmp_path / "mine").exists()
    batches, sample = [], torch.nn.functional.grid_sample

    def count(*args, **kwargs):
        batches.append(1)
        return sample(*args, **kwargs)
    monkeypatch.setattr(torch.nn.functional, "grid_sample", count)
    run_cells(PRETRAIN, pretraining | dict(out="mine"))
    assert len(batches) == 1 + 3 * (4 - stop)                 # one to be looked at, and three for each epoch left
    for file in pretrained[0].iterdir():
        if file.name != MANIFEST: assert (tmp_path / "mine" / file.name).read_bytes() == file.read_bytes(), file.name
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_pretraining_refuses_to_see_all_patches_in_the_masked_epochs(pretraining, run_cells):
    with pytest.raises((ValueError, FloatingPointError)): run_cells(PRETRAIN, pretraining | dict(out="mine", visible=4))


@pytest.mark.parametrize("changes, error, said", [
    (dict(epoch=1), ValueError, "unknown parameter 'epoch'. Did you mean 'epochs'"),
    (dict(width="64"), ValueError, "'width' is '64', but must be of type int"),
    (dict(pool="no/such/pool/anywhere"), FileNotFoundError, "no/such/pool/anywhere")])
def test_pretraining_refuses_wrong_parameters(changes, error, said, pretraining, run_cells, tmp_path):
    with pytest.raises(error, match=said): run_cells(PRETRAIN, pretraining | dict(out="mine") | changes)
    assert list(tmp_path.iterdir()) == []
