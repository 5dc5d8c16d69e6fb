"""The main notebook for text on a tiny decoder: what it writes, what it takes up again, and what it
refuses. What can be wrong with settings and data is tested with the experiment."""

import csv
import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers import kept, stamps, table, tables
from PIL import Image
from transformers import AutoModelForCausalLM, AutoTokenizer

import harmomoe.models.unified  # noqa: F401 (its models can be loaded)
from harmomoe.base.artefacts import stages_run
from harmomoe.bench.experiment import read_config
from harmomoe.config.settings import preset
from harmomoe.models.evaluate import BITS, measure
from harmomoe.models.model import load_model
from harmomoe.models.weights import open_seed

RUN_NLP = Path(__file__).resolve().parent.parent / "nbs" / "run_nlp.ipynb"
DOMAINS = ["colours", "animals"]
EXPERTS = [f"expert:{name}" for name in DOMAINS]
OTHERS = ["btm", "model_soup", "btx", "flexolmo", "unrestricted_moe"]
METHODS = ["zeroshot", *EXPERTS, *OTHERS, "harmomoe"]
TRAINING = "epochs=1, {0}.learning_rate=3e-3, {0}.batch_size=16"
SETTINGS = (
    "reading.train=20, reading.test=10, proxies.candidates=40, proxies.number=12, "
    "routing.public_samples=40, expert.rank=4, expert.warmup_steps=0, "
    f"expert.{TRAINING.format('expert')}, finetune.{TRAINING.format('finetune')}"
)

pytestmark = [
    pytest.mark.usefixtures("elsewhere"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def parameters(tiny_decoder, tiny_texts):
    return dict(
        backbone=str(tiny_decoder),
        data=str(tiny_texts),
        clients=",".join(DOMAINS),
        pool="sayings",
        settings=SETTINGS,
        methods="zeroshot,experts,btm,model_soup,btx,flexolmo,unrestricted_moe",
        threads=1,
    )


@pytest.fixture(scope="module")
def ran(parameters, run_apart):
    "Folder of a finished run, and the names that its notebook has defined."
    return run_apart(RUN_NLP, parameters, "out")


@pytest.fixture
def again(ran, tmp_path):
    "A copy of the finished run's folder."
    return shutil.copytree(ran[0], tmp_path / "out")


@pytest.fixture
def run(parameters, run_cells):
    """A function (folder, settings, ...) that runs the notebook and returns the names that it
    has defined, and the kinds of artefacts that it built."""

    def run(out, settings="", **more):
        given = parameters | dict(out=str(out), settings=f"{SETTINGS}, {settings}") | more
        with stages_run() as built:
            space = run_cells(RUN_NLP, given)
        return space, built

    return run


def saved(folder):
    "The folder that transformers opens."
    return AutoModelForCausalLM.from_pretrained(folder / "transformers", trust_remote_code=True)


def generated(model, asked, **more):
    "What a model says to a prompt, without the prompt."
    how = dict(attention_mask=torch.ones_like(asked), max_new_tokens=12, do_sample=False)
    return model.generate(asked, **how, **more)[0, asked.shape[1] :]


# ---- one run


def test_table_has_a_row_a_method_a_column_a_domain_and_the_models_numbers(
    ran, parameters, tiny_decoder
):
    folder, space = ran
    header, rows = table(folder)
    assert header == ["method", *DOMAINS, "average", BITS, "joint"]
    assert list(rows) == METHODS == list(space["table"].index)
    told = json.loads((folder / "table.json").read_text())
    for row in told["accuracy"].values():
        assert all(row[name]["n"] == row["joint"]["domains"][name]["n"] == 10 for name in DOMAINS)
        assert row["public"]["texts"] == 1 and row["public"]["bits"] > 0
    assert told["parameters"].items() >= parameters.items()
    assert told["parameters"]["preset"] is None  # that of the seed
    assert told["seed_model"] == open_seed(str(tiny_decoder)).identity
    assert (folder / "table.md").read_text().count("\n") == len(METHODS) + 2
    [path] = kept(folder / "server", "model")
    model = load_model(path)
    assert model.experts == ["seed", *DOMAINS]
    assert model.settings == preset("text").router
    for client, percent in zip(space["benchmark"].clients, rows["harmomoe"]):
        found = measure(model, client.test, client.classes)
        assert found.percent == pytest.approx(percent, abs=0.006)
        assert len(client.train) == 20


def test_picture_and_speeds_are_written_and_nothing_outside_the_folder(ran):
    folder, _ = ran
    written = {path.name for path in folder.iterdir() if path.is_file()}
    tables = {f"table.{suffix}" for suffix in ("csv", "json", "md")}
    assert written == tables | {"report.html", "routing.png", "speed.csv", "stages.csv"}
    assert min(Image.open(folder / "routing.png").size) > 50
    speed = list(csv.reader((folder / "speed.csv").open()))
    assert [row[0] for row in speed] == ["model", "seed", "harmomoe"]
    assert [path.name for path in folder.parent.iterdir()] == ["out"]


def test_saved_folder_is_the_unified_model_for_transformers(ran):
    folder, space = ran
    served, tokens = saved(folder), AutoTokenizer.from_pretrained(folder / "transformers")
    question = space["benchmark"].clients[-1].test[0]["prompt"]
    asked = tokens([question, "Say red."], return_tensors="pt", padding=True, padding_side="left")
    asked = {name: asked[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        found, wanted = (one(**asked).logits for one in (served, space["unified"].backbone))
    real = asked["attention_mask"] == 1
    assert torch.allclose(found[real], wanted[real], atol=1e-4)
    one = tokens(question, return_tensors="pt")["input_ids"]
    assert torch.equal(generated(served, one, use_cache=False), space["said"])


# ---- the next run


def test_second_run_computes_nothing_and_gives_the_same_table(again, run):
    before, first = stamps(again / "clients"), tables(again)
    for file in again.glob("table.*"):
        file.unlink()
    _, built = run(again)
    assert built == []
    assert stamps(again / "clients") == before
    assert tables(again) == first


def test_run_with_another_context_reuses_the_experts_and_writes_with_a_cache(again, run):
    settings = "router.context=prompt, router.form=moments, router.lam=0.7"
    space, built = run(again, settings, methods="")
    both = 2 * ["routing", "claim"]
    assert sorted(built) == sorted(["means", *both, "model", "harmomoe"])
    assert list(table(again)[1]) == ["harmomoe"]
    assert space["unified"].settings.context == "prompt"
    served, ids = saved(again), space["ids"]
    alone = generated(served, ids, use_cache=False, prompt_mask=torch.ones_like(ids))
    assert torch.equal(generated(served, ids, use_cache=True), alone)
    assert torch.equal(alone, space["said"])


def test_seed_of_half_precision_stays_so_to_the_end_and_clients_may_be_unnamed(run, tmp_path):
    "No clients means all domains but the pool."
    space, _ = run("out", "reading.dtype=bfloat16", methods="btm", clients="")
    assert [client.name for client in space["benchmark"].clients] == sorted(DOMAINS)
    assert list(table(tmp_path / "out")[1]) == ["btm", "harmomoe"]
    assert space["unified"].seed.identity == space["model0"].identity
    for model in (space["unified"].backbone, space["served"], saved(tmp_path / "out")):
        assert model.dtype == torch.bfloat16


def test_passages_of_the_package_are_continued_and_measured_in_bits(parameters, run, tmp_path):
    few = "reading.pool=60, reading.train=12, reading.test=4, proxies.number=8"
    given = dict(data="corpora", clients="rust,spanish", pool="")
    space, _ = run("out", few, methods="zeroshot,matching experts", **given)
    header, rows = table(tmp_path / "out")
    assert header == ["method", "rust", "spanish", "average", "public", "joint"]
    assert list(rows) == ["zeroshot", "matching experts", "harmomoe"]
    assert len(space["benchmark"].pool.train) == 60
    told = json.loads((tmp_path / "out" / "table.json").read_text())["accuracy"]["harmomoe"]
    assert told["rust"]["texts"] == 4 and told["joint"]["domains"]["rust"]["bits"] > 0
    assert space["best"]["highest"] == [] and len(space["said"]) == 60
    assert told["rust"]["tokens"] >= told["rust"]["right"]
    share = 100 * told["rust"]["right"] / told["rust"]["tokens"]
    assert space["by_token"].loc["harmomoe", "rust"] == pytest.approx(share)
    assert list(space["by_token"]) == header[1:]
    # nobody asks a passage which class it is of
    assert '"answer":"text"' not in (tmp_path / "out" / "report.html").read_text()


# ---- a part of the data

PART = dict(train=200, test=40, pool=2000)


@pytest.mark.parametrize(
    "given, sizes, top_k, number",
    [
        (dict(), PART, 2, 50),
        (dict(settings="router.top_k=1"), PART, 1, 50),
        (dict(settings="reading.train=30, proxies.number=20"), PART | dict(train=30), 2, 20),
        (dict(settings="mine.yaml"), PART | dict(test=10), 1, 50),
        (dict(part=""), dict.fromkeys(PART), 2, 150),
        (dict(part="", settings="router.top_k=1"), dict.fromkeys(PART), 1, 150),
        (dict(quick=60, settings="router.top_k=1"), dict.fromkeys(PART), 1, 12),
        (dict(data="mine"), dict.fromkeys(PART), 2, 150),
        (dict(backbone="mine"), dict.fromkeys(PART), 2, 150),
        (dict(data="mine", part="reading.test=7"), dict.fromkeys(PART) | dict(test=7), 2, 150),
    ],
    ids=str,
)
def test_a_part_is_taken_whatever_other_settings_are_changed(
    given, sizes, top_k, number, run_cells, monkeypatch, tmp_path
):
    (tmp_path / "mine.yaml").write_text("reading: {test: 10}\nrouter: {top_k: 1}\n")

    def opened(*names, settings, quick, **others):
        raise InterruptedError(read_config("embedded-text", settings, 0, quick))

    monkeypatch.setattr("harmomoe.bench.experiment.open_experiment", opened)
    with pytest.raises(InterruptedError) as caught:
        run_cells(RUN_NLP, given)
    [(config, reading)] = caught.value.args
    assert {name: getattr(reading, name) for name in PART} == sizes
    assert (config.router.top_k, config.proxies.number) == (top_k, number)


# ---- what is refused


@pytest.mark.parametrize(
    "wrong, said",
    [
        (dict(epochs=3), "unknown parameter 'epochs'.*Known parameters: backbone, data, clients"),
        (dict(seed=3), "'seed' is now called 'random_state' .the name seed means the model"),
        (dict(settings="expert.epoch=3"), "unknown field 'expert.epoch'. Did you mean 'epochs'"),
        (dict(methods="btm, btn"), "no method 'btn'; there are"),
        (dict(data="embedded", clients="", pool=""), "holds no texts; run_cv"),
    ],
    ids=str,
)
def test_wrong_parameter_is_refused_before_anything_is_written(
    wrong, said, parameters, run_cells, tmp_path
):
    with pytest.raises(ValueError, match=said) as caught:
        run_cells(RUN_NLP, parameters | dict(out="out") | wrong)
    assert list(tmp_path.iterdir()) == []
    assert len(str(caught.value)) < 1200
