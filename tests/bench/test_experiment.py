"""One experiment from a notebook's parameters: what they mean, what is wrong with them, and what is
measured."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from odd_values import annotations

from harmomoe.base.artefacts import stages_run
from harmomoe.base.engine import Local, Processes
from harmomoe.base.process import check_parameters
from harmomoe.bench import experiment as module
from harmomoe.bench.compare import run_rows
from harmomoe.bench.experiment import Experiment, open_experiment, read_config
from harmomoe.config import accounting
from harmomoe.config.settings import changed, preset
from harmomoe.config.source import Reading, Source
from harmomoe.data.named import PAPER_ACCURACY
from harmomoe.models.clip import ImageSeed
from harmomoe.models.decoder import DecoderSeed
from harmomoe.models.evaluate import measure, measure_all
from harmomoe.server.merge import choose_router

SETTINGS = (
    "proxies.candidates=40, proxies.number=12, routing.public_samples=40, expert.rank=4, "
    "expert.epochs=1, expert.batch_size=16, finetune.epochs=1, finetune.batch_size=16"
)
TEXTS = "reading.train=20, reading.validation=5, reading.test=10"


@pytest.fixture(autouse=True)
def process(tmp_path, monkeypatch):
    "The process stays as it is, in an empty folder; the list says whether it was to be faster."
    called, threads = [], torch.get_num_threads()
    monkeypatch.setattr(module, "faster_cpu", lambda: called.append("faster"))
    monkeypatch.chdir(tmp_path)
    yield called
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def images(tiny_seed_folder, tiny_folder):
    "Parameters of an experiment on images."
    given = dict(backbone=str(tiny_seed_folder), data=str(tiny_folder), clients="a,b,c")
    return given | dict(pool="pool", settings=SETTINGS)


@pytest.fixture(scope="module")
def texts(tiny_decoder, tiny_texts):
    "Parameters of an experiment on texts."
    given = dict(backbone=str(tiny_decoder), data=str(tiny_texts), clients="colours,animals")
    return given | dict(pool="sayings", preset="text", settings=f"{TEXTS}, {SETTINGS}")


# ---- settings


def test_without_settings_a_preset_is_taken_as_it_is():
    assert read_config("text", "", 0) == (preset("text"), Reading())
    assert read_config("paper-released", "", 0)[0] == preset("paper-released")
    assert read_config("paper", "", 3)[0] == changed(preset("paper"), {"random_state": 3})


def test_every_stage_can_be_set_and_reading_is_one_of_them():
    given = "relevance.negatives=7, expert.rank=2, router.top_k=3, finetune.clip=1"
    config, reading = read_config("paper", f"reading.train=9, {given}, reading.dtype=bfloat16", 0)
    assert reading == Reading(train=9, dtype="bfloat16")
    wanted = {"relevance.negatives": 7, "expert.rank": 2, "router.top_k": 3, "finetune.clip": 1}
    assert config == changed(preset("paper"), wanted)


@pytest.mark.parametrize(
    "name, router",
    [
        (name, router)
        for name in ("paper", "gated", "embedded", "text", "ratios")
        for router in ("preset", "paper", "ratios", "evidence")
        if (name, router) != ("text", "evidence")
    ],
)
def test_a_router_by_name_comes_before_its_fields_and_both_forms_are_sent(name, router):
    plain, config = (
        read_config(name, "router.lam=0.25", 0, router=given)[0] for given in (None, router)
    )
    wanted = choose_router(preset(name), router).router
    assert config.router == replace(wanted, lam=0.25)
    ratio = "evidence" if wanted.form == "evidence" else "moments"
    if name == "text":  # of a prefix only means are known
        ratio = "activation"
    assert config.routing.sent(config.router) == ("mean", ratio)
    assert plain == changed(preset(name), {"router.lam": 0.25})
    # nothing else is touched
    same = replace(config, router=plain.router, routing=plain.routing)
    assert same == plain and config.routing.public_samples == plain.routing.public_samples
    assert plain.routing.sent(plain.router) == (preset(name).router.sent_form,)


def test_forms_that_are_asked_for_are_sent_beside_those_of_both_routers():
    config, _ = read_config("paper", "routing.forms=logistic", 0, router="preset")
    assert config.routing.sent(config.router) == ("mean", "logistic", "moments")
    config, _ = read_config("embedded", "router.form=logistic", 0, router="preset")
    assert config.routing.sent(config.router) == ("mean", "logistic")
    config, _ = read_config("embedded", "", 0)
    assert config.routing.sent(config.router) == ("evidence",)


@pytest.mark.parametrize("name", ["mine.yaml", "mine.yml"])
def test_settings_and_reading_come_from_a_file_too(name, tmp_path):
    file = tmp_path / name
    file.write_text("expert: {rank: 2}\nreading:\n  test: 5\nreading.train: 3\nrandom_state: 7\n")
    config, reading = read_config("text", str(file), 0)
    assert reading == Reading(test=5, train=3)
    assert (config.expert.rank, config.random_state) == (2, 7)


def test_a_quick_try_is_small_and_settings_go_before():
    config, reading = read_config("embedded", "", 0, quick=60)
    assert (config.expert.epochs, config.finetune.epochs) == (2, 2)
    assert (config.proxies.candidates, config.proxies.number) == (60, 12)
    assert (config.routing.public_samples, reading) == (60, Reading())
    given = "expert.epochs=5, proxies.number=20"
    config, _ = read_config("embedded", given, 0, quick=60)
    assert (config.expert.epochs, config.finetune.epochs, config.proxies.number) == (5, 2, 20)
    few, _ = read_config("text", "expert.epochs=0", 0, quick=100_000)
    assert few.proxies == preset("text").proxies
    assert (few.expert.epochs, few.finetune.epochs) == (0, 1)


@pytest.mark.parametrize(
    "text, said",
    [
        ("router.topk=2", "unknown field 'router.topk'. Did you mean 'top_k'"),
        ("reading.scorin=text", "unknown field 'reading.scorin'. Did you mean 'scoring'"),
        ("reading.dtype=float16", "reading.dtype is 'float16'.*'float32', 'bfloat16' or None"),
        ("reading.train=0", "reading.train is 0, but must be a whole number from 1"),
        ("reading.train=many", "reading.train is 'many', but must be a whole number from 1"),
        ("reading.train.x=1", "unknown field 'reading.train.x'"),
        ("reading=3", "settings: unknown field 'reading.'"),
        ("read.train=3", "unknown field 'read'"),
        ("candidates=40", "unknown field 'candidates'"),
        ("proxies.candidates=3, proxies.number=4", r"m = 4.*cannot exceed candidates.*n = 3"),
        ("no.yaml", "there is no file no.yaml"),
        ("what", "is no 'stage.field=value'"),
    ],
    ids=str,
)
def test_wrong_settings_are_one_error(text, said):
    with pytest.raises(ValueError, match=f"^settings: .*{said}|^settings: {said}|{said}"):
        read_config("embedded", text, 0)


@pytest.mark.parametrize("field", annotations(Reading))
@pytest.mark.parametrize("text", ["[1, 2]", "{a: 1}", ".nan", "2.5", "-3", "no such", ""])
def test_an_odd_value_of_reading_in_a_file_is_named(field, text, tmp_path):
    (tmp_path / "odd.yaml").write_text(f"reading:\n  {field}: {text}\n")
    if not text or (field, text) == ("prompt", "no such"):
        return  # null is fine everywhere; a prompt is text
    with pytest.raises(ValueError, match=rf"^settings: .*'?reading.{field}"):
        read_config("paper", str(tmp_path / "odd.yaml"), 0)


@pytest.mark.parametrize("content", ["3: 1\n", "reading: 3\n", "reading: {3: 1}\n", "- 1\n"])
def test_a_wrong_file_is_one_error(content, tmp_path):
    (tmp_path / "mine.yaml").write_text(content)
    with pytest.raises(ValueError):
        read_config("embedded", "mine.yaml", 0)


# ---- opened


def test_opening_computes_nothing_and_makes_a_folder(images, tmp_path, process):
    with stages_run() as built:
        made = open_experiment("run_cv", False, **images, threads=1)
    assert built == []
    assert process == ["faster"]
    assert torch.get_num_threads() == 1
    [folder] = (tmp_path / "results").iterdir()
    assert folder.name == f"run_cv-tiny-{Path(images['data']).name}-0"
    assert list(folder.iterdir()) == []
    assert made.folder.resolve() == folder
    assert (made.methods, made.engine, list(made.clients)) == ((), Local(), ["a", "b", "c"])


@pytest.mark.parametrize(
    "more, name",
    [
        (dict(random_state=3), "3"),
        (dict(random_state=3, quick=60), "3-quick60"),
        (dict(settings=f"{SETTINGS}, random_state=4"), "4"),
    ],
    ids=str,
)
def test_folder_is_named_after_model_data_and_random_state(more, name, images, tmp_path):
    made = open_experiment("tables", False, **images | more)
    assert made.folder == Path("results", f"tables-tiny-{Path(images['data']).name}-{name}")
    assert list(made.folder.iterdir()) == []
    open_experiment("tables", False, **images | more, out="mine")
    assert {path.name for path in tmp_path.iterdir()} == {"results", "mine"}


def test_no_clients_means_all_domains_but_the_pool(images, texts):
    found = open_experiment("run_cv", False, **images | dict(clients=""), out="out")
    assert list(found.clients) == ["a", "b", "c"]
    found = open_experiment("run_nlp", True, **texts | dict(clients=""), out="out")
    assert list(found.clients) == ["animals", "colours"]


def test_a_seed_of_ones_own_has_the_embedded_preset_and_a_named_one_the_papers(images, monkeypatch):
    assert open_experiment("x", False, **images, out="out").config.router.form == "evidence"
    opened = []
    monkeypatch.setattr(Source, "seed", lambda source: opened.append(source) or 1 / 0)
    for backbone, data in (("ViT-B/16", "paper"), ("embedded", "embedded")):
        with pytest.raises(ZeroDivisionError):
            open_experiment("x", False, backbone=backbone, data=None)
        assert opened[-1] == Source(backbone, data=data)


def test_samples_are_limited_in_a_quick_try_and_by_reading(texts, images):
    found = open_experiment("run_nlp", True, **texts, out="out").sizes()
    assert found.loc["colours", ["train", "validation", "test"]].tolist() == [20, 5, 10]
    assert found.loc["sayings", ["role", "train", "test"]].tolist() == ["public pool", 88, 1]
    quick = open_experiment("run_cv", False, **images | dict(quick=40), out="out").sizes()
    assert quick.index.tolist() == ["pool", "a", "b", "c"]
    assert quick["train"].tolist() == [40, 30, 24, 32]
    assert quick["classes"].tolist() == [6, 3, 2, 4]


# ---- what is wrong, before anything is written or computed

IMAGES = {
    "unknown backbone": (
        dict(backbone="ViT-B/17"),
        ValueError,
        "backbone 'ViT-B/17' is none of embedded",
    ),
    "weights that are not there": (
        dict(backbone="ViT-B/16", weights="no.pt"),
        FileNotFoundError,
        "'no.pt' is neither",
    ),
    "weights for a saved seed": (dict(weights="openai"), ValueError, "has its own weights"),
    "no such client": (
        dict(clients="a,nope"),
        FileNotFoundError,
        "'nope' is not a domain there.*a, b, c, pool",
    ),
    "no such pool": (
        dict(pool="imagenet"),
        FileNotFoundError,
        "'imagenet' is not a domain there.*a, b, c, pool",
    ),
    "one client twice": (dict(clients="a,b,a"), ValueError, "used twice"),
    "pool as client": (dict(clients="a,pool"), ValueError, "used twice"),
    "client called seed": (
        dict(clients="seed=a,b"),
        ValueError,
        "the client's name 'seed' must be",
    ),
    "client with a blank": (
        dict(clients="my b=b"),
        ValueError,
        "the client's name 'my b' must be .*clients='alias=NAME'",
    ),
    "client called like a column": (
        dict(clients="joint=a,b"),
        ValueError,
        "a client is called 'joint', as a column of tables is. .*clients='alias=NAME'",
    ),
    "clients that differ in case": (dict(clients="a,A=b"), ValueError, "'a' and 'A': names must"),
    "no such folder": (
        dict(data="no/such/folder"),
        FileNotFoundError,
        "'no/such/folder' does not exist",
    ),
    "candidates larger than a quick try": (
        dict(quick=39),
        ValueError,
        "candidates is 40, but the pool has 39 samples",
    ),
    "negative quick": (
        dict(quick=-1),
        ValueError,
        "quick is -1, but must be a whole number from 0",
    ),
    "unknown preset": (dict(preset="embeded"), ValueError, "preset is 'embeded', but must be one"),
    "unknown method": (dict(methods="fedavg"), ValueError, "no method 'fedavg'; there are"),
    "unknown engine": (dict(engine="cluster"), ValueError, "engine is 'cluster', but must be"),
}
FIELDS = {
    "proxies.candidates=91": "candidates is 91, but the pool has 90",
    "proxies.number=41": r"m = 41.*cannot exceed candidates.*n = 40",
    "proxies.number=1": "number is 1, but diversity needs at least 2",
    "proxies.selection=best": "proxies.selection is 'best'.*'dpp', 'similarity' or 'random'",
    "relevance.method=svm": "relevance.method is 'svm'.*'probe', 'finetune' or 'lda'",
    "expert.optimizer=adam": "expert.optimizer is 'adam'.*'sgd' or 'adamw'",
    "expert.rank=0": "expert.rank is 0, but must be a whole number from 1 to 4,096",
    "expert.epochs=-1": "epochs is -1",
    "expert.batch_size=0": "batch_size is 0",
    "expert.epochs=many": "expert.epochs is 'many'",
    "expert.proxies=maybe": "expert.proxies is 'maybe'",
    "router.form=zero": "router.form is 'zero'.*'moments', 'activation', 'evidence' or 'random'",
    "router.top_k=9": "top_k is 9, but must be 1 to [34]",
    "router.top_k=0": "top_k is 0",
    "router.top_k=1.5": "top_k is 1.5",
    "router.lam=1.5": "router.lam is 1.5",
    "router.lam=-0.5": "router.lam is -0.5",
    "reading.scoring=letter": "only for language models",
}
WORDS = {
    "expert of nobody": (dict(methods="btm,expert:birds"), ValueError, "no method 'expert:birds'"),
    "missing client": (
        dict(clients="colours,birds"),
        FileNotFoundError,
        "'birds' is not a domain.*animals, colours",
    ),
    "missing pool": (dict(pool="proverbs"), FileNotFoundError, "'proverbs' is not a domain there"),
    "no pool": (dict(pool=""), ValueError, "name a pool and at least one client"),
    "pool as a client": (
        dict(clients="colours,words=sayings"),
        ValueError,
        "client words has plain text, but others have questions with choices",
    ),
    "image model": (
        dict(backbone="embedded", settings="reading.dtype=bfloat16"),
        ValueError,
        "only for language models, but embedded is none",
    ),
    "backbone": (
        dict(backbone="smolm2"),
        ValueError,
        "'smolm2' is none of .* a language model on the Hugging",
    ),
    "folder without a model": (dict(backbone="."), ValueError, "nor a folder with .* config.json"),
    "file": (dict(backbone="no.gguf"), FileNotFoundError, "there is no file no.gguf"),
    "absent model": (
        dict(backbone="nobody/nothing"),
        ConnectionError,
        "language model nobody/nothing.*HF_HUB_OFFLINE",
    ),
    "absent data": (
        dict(data="paper-texts", clients="", pool=""),
        (ConnectionError, FileNotFoundError),
        "alpaca",
    ),
}
WORD_FIELDS = {
    "reading.dtype=float16": "reading.dtype is 'float16'.*'float32', 'bfloat16' or None",
    "reading.scoring=guess": "reading.scoring is 'guess'.*'letter', 'text', 'cloze' or None",
    "reading.loss_on=prompt": "reading.loss_on is 'prompt'.*'answer', 'all' or None",
    "reading.max_length=0": "reading.max_length is 0, but must be a whole number from 2",
    "reading.train=0": "reading.train is 0, but must be a whole number from 1",
    "router.context=suffix": "router.context is 'suffix'.*'sequence', 'prefix' or 'prompt'",
    "router.context=prefix, router.form=moments": "needs the whole sequence",
    "router.top_k=9": "top_k is 9, but must be 1 to [34]",
}


@pytest.fixture
def refuse(tmp_path, monkeypatch):
    "A function that opens an experiment which is to be refused, without network."
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *args, **kwargs: None)
    for kind in (ImageSeed, DecoderSeed):
        monkeypatch.setattr(kind, "embed", lambda *args: pytest.fail("this was not to be done"))

    def refuse(notebook, given, error, said):
        before = list(tmp_path.iterdir())
        with stages_run() as built, pytest.raises(error, match=said) as caught:
            open_experiment(notebook, notebook == "run_nlp", **dict(out="out") | given)
        assert built == []
        assert list(tmp_path.iterdir()) == before
        assert len(str(caught.value)) < 1200
        return caught.value

    return refuse


@pytest.mark.parametrize("what", IMAGES)
def test_wrong_parameter_is_one_error_before_anything_is_done(what, images, refuse):
    changes, error, said = IMAGES[what]
    refuse("run_cv", images | changes, error, said)


@pytest.mark.parametrize("text", FIELDS)
def test_wrong_setting_is_one_error_before_anything_is_done(text, images, refuse):
    given = images | dict(settings=f"{SETTINGS}, {text}")
    refuse("run_cv", given, ValueError, FIELDS[text])


@pytest.mark.parametrize("what", WORDS)
def test_wrong_parameter_for_texts_is_one_error_before_anything_is_done(what, texts, refuse):
    changes, error, said = WORDS[what]
    refuse("run_nlp", texts | changes, error, said)


@pytest.mark.parametrize("text", WORD_FIELDS)
def test_wrong_setting_for_texts_is_one_error_before_anything_is_done(text, texts, refuse):
    given = texts | dict(settings=f"{TEXTS}, {SETTINGS}, {text}")
    refuse("run_nlp", given, ValueError, WORD_FIELDS[text])


def test_wrong_setting_of_a_method_to_compare_with_is_said_too(images, refuse):
    "Experts of proxies alone are fine, but one that stands for itself has no proxies."
    given = images | dict(settings=f"{SETTINGS}, expert.private=false")
    open_experiment("run_cv", False, **given, out="fine")
    given |= dict(methods="zeroshot, experts")
    refuse("run_cv", given, ValueError, "experts have nothing to train on")


def test_texts_are_for_one_notebook_and_images_for_the_other(images, texts, refuse):
    said = "'.*' does not read texts; run_cv.ipynb is for it, run_nlp.ipynb is not"
    refuse("run_nlp", images, ValueError, said)
    said = "'.*' does not read images; run_nlp.ipynb is for it, run_cv.ipynb is not"
    refuse("run_cv", texts, ValueError, said)
    names = "data", "clients", "pool"
    said = "holds no texts; run_cv.ipynb is for what it holds, run_nlp.ipynb is not"
    refuse("run_nlp", texts | {name: images.get(name, "") for name in names}, ValueError, said)
    said = "holds no images; run_nlp.ipynb is for what it holds, run_cv.ipynb is not"
    refuse("run_cv", images | {name: texts[name] for name in names}, ValueError, said)


def test_questions_and_plain_text_are_not_put_in_one_table(texts, tmp_path, refuse):
    folder = shutil.copytree(texts["data"], tmp_path / "both")
    for split in ("train", "val", "test"):
        lines = (json.dumps(dict(text=f"Number {n} of {split} is read.")) for n in range(12))
        (folder / f"plain_{split}.jsonl").write_text("\n".join(lines))
    said = "client plain has plain text, but others have questions with choices"
    refuse("run_nlp", texts | dict(data=str(folder), clients="colours,plain"), ValueError, said)


@pytest.mark.parametrize("backbone", ["ViT-B/16", "ViT-B/32"])
def test_papers_backbone_offline_is_one_error_that_names_three_ways_on(
    backbone, refuse, monkeypatch
):
    "And it comes before the data are asked for, which are a long download."
    monkeypatch.setenv("HF_HOME", "nowhere")  # no cache either
    given = dict(backbone=backbone, data=None)
    told = refuse("run_cv", given, ConnectionError, "HF_HUB_OFFLINE")
    name = backbone.replace("/", "-")
    ways = "(1)", "network", "(2)", "-p weights FILE", "(3)", "embedded"
    for part in (f"weights of {name}: not in the local cache", *ways):
        assert part in str(told)
    assert told.__cause__ is None


# ---- what is measured


@pytest.fixture(scope="module")
def measured(images, tmp_path_factory):
    "A finished experiment, what it built, and its results."
    folder = tmp_path_factory.mktemp("experiment")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "faster_cpu", lambda: None)
        given = images | dict(methods="btm, experts", out=str(folder))
        made = open_experiment("run_cv", False, **given)
    with stages_run() as built:
        ours = made.measure_own()
        own = {name: made.measure_own(name) for name in made.clients}
        others = made.measure_others()
    return SimpleNamespace(made=made, built=built, ours=ours, own=own, others=others)


def test_unified_model_is_measured_as_the_server_keeps_it(measured):
    made, model = measured.made, measured.made.server.unify()
    for client in made.benchmark.clients:
        found = measure(model, client.test, client.classes)
        assert measured.ours.domains[client.name] == found
    assert measured.ours == measure_all(model, made.benchmark)
    assert measured.built.count("model") == 1
    row = run_rows([module.Row("harmomoe", made.config)], made.source, made.folder)
    assert {k: v["correct"] for k, v in row[0]["accuracy"].items()} == {
        name: found.correct for name, found in measured.ours.domains.items()
    }
    assert row[0]["bytes"] == sum(
        entry.bytes
        for bundle in made.server.received.values()
        for entry in bundle.manifest.files.values()
    )


def test_experts_are_those_of_the_model_and_others_have_their_own(measured):
    labels = ["btm", "expert:a", "expert:b", "expert:c"]
    assert list(measured.others) == labels
    assert [row.label for row in measured.made.rows] == labels
    assert [row.method for row in measured.made.rows] == ["btm", *["expert"] * 3]
    # with proxies for the model, and without for the others, which share them
    assert measured.built.count("expert") == 2 * 3
    assert {name for name in measured.built if "matching" in name} == {
        f"matching experts-{name}" for name in "abc"
    }


def test_opened_again_it_computes_nothing(measured, images, tmp_path):
    out = shutil.copytree(measured.made.folder, tmp_path / "out")
    made = open_experiment("run_cv", False, **images | dict(methods="btm,experts", out=str(out)))
    with stages_run() as built:
        assert made.measure_own() == measured.ours
        assert made.measure_others() == measured.others
        assert made.server.unify().experts == ["seed", "a", "b", "c"]
    assert built == []


def test_server_has_the_bundles_of_these_clients_and_of_nobody_else(measured, images, tmp_path):
    "Not of a client of an earlier run in the same folder."
    out = shutil.copytree(measured.made.folder, tmp_path / "out")
    made = open_experiment("run_cv", False, **images | dict(clients="c,a", out=str(out)))
    with stages_run() as built:
        assert list(made.server.received) == ["c", "a"]
        assert made.server.unify().experts == ["seed", "c", "a"]
    assert built == ["model"]


def test_other_systems_run_in_as_many_processes_as_the_engine_says(images, monkeypatch):
    asked = []
    monkeypatch.setattr(module, "run_rows", lambda *given: asked.append(given) or [])
    given = images | dict(methods="zeroshot", engine="processes:3", out="out")
    made = open_experiment("run_cv", False, **given)
    assert made.measure_others() == {}
    assert asked == [(made.rows, made.source, made.folder, Processes(3))]


def test_clients_work_side_by_side_where_the_engine_does(measured, images, tmp_path):
    "What they send is what they send one after the other, and nothing is left to do here."
    given = images | dict(engine="processes:2", out=str(tmp_path / "out"))
    made = open_experiment("run_cv", False, **given)
    with stages_run() as built:
        found = made.server.received
    assert built == ["embeddings-shard", "embeddings"]  # of the pool
    for name, bundle in measured.made.server.received.items():
        assert found[name].ids.tolist() == bundle.ids.tolist()
        for form, one in bundle.routing.items():
            assert torch.allclose(found[name].routing[form].vectors, one.vectors, atol=1e-4)


def test_papers_numbers_are_shown_for_its_seed_on_its_data_only():
    def published(name, data):
        made = Experiment(Source(data=data), preset("paper"), "")
        vars(made)["public"] = SimpleNamespace(seed=SimpleNamespace(name=name))
        return made.published

    for data in ("paper", "paper:folder"):
        shown = published("ViT-B-32-quickgelu", data)
        assert shown.T.to_dict() == PAPER_ACCURACY["ViT-B-32"]
        assert shown.index.name == "method"
    assert published("ViT-B-32", "folder") is None
    assert published("tiny", "paper") is None


# ---- every parameter of the notebooks, as papermill gives what was typed

NOTEBOOKS = Path(__file__).parents[2] / "nbs"
# what is wrong in itself; whether a seed, data or clients are there is seen when they are opened
ODD = dict(
    backbone=[5, 2.5, True, None],
    weights=[5, 2.5, True],
    data=[5, 2.5, True],
    clients=[3, 2.5, True, None],
    pool=[5, 2.5, True, None],
    group=[5, 2.5, True, None],
    out=[5, 2.5, True, "file", "file/inside"],
    random_state=["zero", 1.5, True, None, -1, 2**32, 10**400],
    preset=[5, True, "papers", "-released"],
    settings=[
        5,
        2.5,
        True,
        None,
        "rank",
        "rank=2",
        "expert.rank=two",
        "no.yaml",
        "reading.dtype=1",
    ],
    part=[5, 2.5, True],
    router=[5, True, None, "best", "Paper", ""],
    methods=[5, True, None, "fedavg", "btm,fedavg", "btm;btx"],
    device=[5, True, None, "tpu", "cuda:99", "", "CPU", "cpu:x", "meta"],
    engine=[5, True, None, "", "remote", "processes", "processes:0", "processes:9999", "local:2"],
    epsilon=["eight", True, 0, -1, 2000, 10**400],
    quick=["some", 2.5, True, None, -1, 1, 10**400],
    threads=["all", 2.5, True, 0, -1, 10**6],
)
UNKNOWN = dict(seeds=0, limit="abc", Device="cpu", expert="rank", epochs=3, seed=1)


def given_to(notebook, **given):
    "Run a notebook's first two cells as papermill does, then open what its parameters say."
    cells = json.loads((NOTEBOOKS / f"{notebook}.ipynb").read_text(encoding="utf-8"))["cells"]
    [defaults] = [
        "".join(c["source"]) for c in cells if "parameters" in c["metadata"].get("tags", [])
    ]
    injected = "# Parameters\n" + "".join(f"{name} = {value!r}\n" for name, value in given.items())
    call = "parameters = check_parameters(In)"
    found = check_parameters([defaults, injected, call], renamed=dict(seed="random_state"))
    found.pop("part", None)  # which `run_nlp` puts before the settings
    open_experiment(notebook, notebook == "run_nlp", **found)


@pytest.fixture
def nothing_opened(tmp_path, monkeypatch):
    "Neither seed nor data are opened, and nothing is written, beside a file that was there."
    (tmp_path / "file").touch()
    for part in ("seed", "benchmark"):
        monkeypatch.setattr(Source, part, lambda *args: pytest.fail("too late"))
    yield
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "name, value, notebook",
    [
        (name, value, notebook)
        for name in ODD
        for value in ODD[name]
        for notebook in ("run_cv", "run_nlp")
    ],
    ids=str,
)
def test_an_odd_parameter_is_one_error_that_names_it(notebook, name, value, nothing_opened):
    if name in dict(run_cv=["part"], run_nlp=["weights", "router"])[notebook]:
        said = f"unknown parameter '{name}'"
    else:
        said = rf"^(parameter '{name}' is|{name} is|{name}:) "
    with pytest.raises(ValueError, match=said) as caught:
        given_to(notebook, **{name: value})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


@pytest.mark.parametrize("notebook", ["run_cv", "run_nlp"])
@pytest.mark.parametrize("name", UNKNOWN)
def test_a_parameter_that_there_is_not_is_one_error(notebook, name, nothing_opened):
    with pytest.raises(ValueError, match=f"parameter '{name}'"):
        given_to(notebook, **{name: UNKNOWN[name]})


@pytest.mark.parametrize("notebook", ["run_cv", "run_nlp"])
def test_every_parameter_of_the_notebooks_is_tried(notebook):
    cells = json.loads((NOTEBOOKS / f"{notebook}.ipynb").read_text(encoding="utf-8"))["cells"]
    [defaults] = [
        "".join(c["source"]) for c in cells if "parameters" in c["metadata"].get("tags", [])
    ]
    assert check_parameters([defaults, "check_parameters(In)"]).keys() <= ODD.keys()


def test_parameters_are_checked_in_python_too(images, nothing_opened):
    for wrong in (dict(quick=True), dict(threads=2.0), dict(clients=["a"]), dict(backbone=None)):
        [name] = wrong
        with pytest.raises(ValueError, match=f"^{name} is "):
            open_experiment("run_cv", False, **images | wrong)


def test_a_guarantee_is_a_number_and_what_cannot_have_it_is_left_out_or_named():
    pytest.importorskip("dp_accounting")
    config, _ = read_config("embedded", "expert.epochs=3", 0, epsilon=8)
    assert (config.privacy.epsilon, config.gate.epochs, config.expert.epochs) == (8.0, 0, 3)
    texts, _ = read_config("embedded-text", "", 0, epsilon=8)
    assert (config.privacy.factors, texts.privacy.factors) == ("auto", "B")
    alone = "expert.private=false"  # takes no private steps
    with_guarantee = read_config("ratios", alone, 0, epsilon=8)[0]
    assert with_guarantee.expert == read_config("ratios", alone, 0)[0].expert
    assert config.router.form == "moments"
    with pytest.raises(ValueError, match="gate.epochs is 3, and what experts learn together"):
        read_config("embedded", "gate.epochs=3", 0, epsilon=8)


def test_a_guarantee_without_its_packages_is_one_error_at_once(monkeypatch, nothing_opened):
    monkeypatch.setattr(accounting, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'harmomoe\[privacy\]'"):
        given_to("run_cv", epsilon=8)
