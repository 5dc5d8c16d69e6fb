"""The papermill notebook for text on a tiny decoder: what it writes, what it resumes, and what it refuses."""
import csv
import json
import shutil
from pathlib import Path

import huggingface_hub
import matplotlib.pyplot as plt
import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoTokenizer

import harmomoe.baselines.compare
import harmomoe.evaluate
import harmomoe.unify
from harmomoe.decoder import DecoderSeed
from harmomoe.evaluate import accuracy
from harmomoe.moe import load_model
from harmomoe.weights import open_seed
from helpers import stamps

RUN_NLP = Path(__file__).resolve().parent.parent / "nbs" / "run_nlp.ipynb"
DOMAINS = ["colours", "animals"]
METHODS = ["zeroshot", "expert:colours", "expert:animals", "btm", "model_soup", "btx", "flexolmo", "unrestricted_moe",
           "harmomoe"]

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]


def forbidden(*args, **kwargs): pytest.fail("this work was not to be done")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    "Notebooks run in an empty folder, and leave no figures open."
    monkeypatch.chdir(tmp_path)
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def parameters(tiny_decoder, tiny_texts):
    return dict(backbone=str(tiny_decoder), data=str(tiny_texts), clients=",".join(DOMAINS), pool="sayings", train=20,
                test=10, candidates=40, proxies=12, public_samples=40, rank=4, epochs=1, learning_rate=3e-3,
                batch_size=16, threads=1)


@pytest.fixture(scope="module")
def ran(parameters, run_cells, tmp_path_factory):
    "Folder of a finished run, and the names that its notebook has defined."
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        space = run_cells(RUN_NLP, parameters | dict(out="out"))
    return folder / "out", space


@pytest.fixture
def again(ran, tmp_path):
    "A copy of the finished run's folder."
    return shutil.copytree(ran[0], tmp_path / "out")


def table(folder):
    rows = list(csv.reader((folder / "table.csv").open()))
    return rows[0], {row[0]: [float(x) for x in row[1:]] for row in rows[1:]}


# ---- one run

def test_table_has_a_row_a_method_a_column_a_domain_and_the_models_numbers(ran, parameters, tiny_decoder):
    folder, space = ran
    header, rows = table(folder)
    assert header == ["method", *DOMAINS, "average"] and list(rows) == METHODS == list(space["table"].index)
    told = json.loads((folder / "table.json").read_text())
    assert all(cell["n"] == 10 for row in told["accuracy"].values() for name, cell in row.items() if name != "average")
    assert parameters.items() <= told["parameters"].items() and told["parameters"]["context"] == "sequence"
    assert told["seed_model"] == open_seed(str(tiny_decoder)).identity
    assert (folder / "table.md").read_text().count("\n") == len(METHODS) + 2
    model = load_model(folder / "model")
    assert model.experts == ["seed", *DOMAINS]
    for client, percent in zip(space["benchmark"].clients, rows["harmomoe"]):
        assert accuracy(model, client.test, client.classes).percent == pytest.approx(percent, abs=.006)


def test_picture_and_speeds_are_written_and_nothing_outside_the_folder(ran):
    folder, _ = ran
    assert {path.name for path in folder.iterdir() if path.is_file()} == {"routing.png", "speed.csv", "stages.csv",
                                                                         "table.csv", "table.json", "table.md"}
    assert min(Image.open(folder / "routing.png").size) > 50
    assert [row[0] for row in csv.reader((folder / "speed.csv").open())] == ["model", "seed", "harmomoe"]
    assert [path.name for path in folder.parent.iterdir()] == ["out"]


def test_saved_folder_is_the_unified_model_for_transformers(ran):
    folder, space = ran
    served, tokens = (kind.from_pretrained(folder / "transformers", trust_remote_code=True)
                      for kind in (AutoModelForCausalLM, AutoTokenizer))
    question = space["benchmark"].clients[-1].test[0]["prompt"]
    asked = tokens([question, "Say red."], return_tensors="pt", padding=True, padding_side="left")
    asked = {name: asked[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad(): found, wanted = (one(**asked).logits for one in (served, space["unified"].tower))
    assert torch.allclose(found[asked["attention_mask"] == 1], wanted[asked["attention_mask"] == 1], atol=1e-4)
    one = tokens(question, return_tensors="pt")["input_ids"]
    said = served.generate(one, attention_mask=torch.ones_like(one), max_new_tokens=12, do_sample=False,
                           use_cache=False)
    assert torch.equal(said[0, one.shape[1]:], space["said"])


# ---- the second run

def test_second_run_trains_and_measures_nothing_and_gives_the_same_table(again, parameters, run_cells, monkeypatch):
    for name in ("train_expert", "client_routing", "public_routing", "linear_probe", "select_proxies", "finetune",
                 "unite", "unify"):
        monkeypatch.setattr(harmomoe.unify, name, forbidden)
    monkeypatch.setattr(harmomoe.evaluate, "accuracy", forbidden)
    for name in ("accuracy", "run_method"): monkeypatch.setattr(harmomoe.baselines.compare, name, forbidden)
    monkeypatch.setattr(DecoderSeed, "embed", forbidden)
    before, first = stamps(again), {suffix: (again / f"table.{suffix}").read_bytes() for suffix in ("csv", "md")}
    for file in again.glob("table.*"): file.unlink()
    run_cells(RUN_NLP, parameters | dict(out=str(again)))
    assert stamps(again) == before
    assert {suffix: (again / f"table.{suffix}").read_bytes() for suffix in ("csv", "md")} == first


def test_run_with_another_context_reuses_the_experts_and_writes_with_a_cache(again, parameters, run_cells, monkeypatch):
    monkeypatch.setattr(harmomoe.unify, "train_expert", forbidden)
    monkeypatch.setattr(DecoderSeed, "embed", forbidden)
    changes = dict(context="prefix", router_initial="logistic", compare="", blend=.7)
    space = run_cells(RUN_NLP, parameters | dict(out=str(again)) | changes)
    assert list(table(again)[1]) == ["harmomoe"]
    assert load_model(again / "model").settings.context == "prefix"
    served = AutoModelForCausalLM.from_pretrained(again / "transformers", trust_remote_code=True)
    asked = space["asked"]
    said = [served.generate(asked, attention_mask=torch.ones_like(asked), max_new_tokens=12, do_sample=False,
                            use_cache=cached)[0, asked.shape[1]:] for cached in (True, False)]
    assert torch.equal(*said) and torch.equal(said[0], space["said"])


def test_seed_of_half_precision_stays_so_to_the_end(parameters, run_cells):
    space = run_cells(RUN_NLP, parameters | dict(out="out", dtype="bfloat16", compare="btm"))
    assert list(table(Path("out"))[1]) == ["btm", "harmomoe"]
    assert space["unified"].seed.identity == space["model0"].identity
    served = AutoModelForCausalLM.from_pretrained("out/transformers", trust_remote_code=True)
    for model in (space["unified"].tower, space["served"], served):
        assert model.dtype == torch.bfloat16


def test_result_folder_is_named_after_model_data_and_seed(parameters, run_cells, tmp_path, tiny_texts, monkeypatch):
    "Stopped where the seed model is first used: nothing but the empty folder is there."
    monkeypatch.setattr(DecoderSeed, "identity", property(lambda self: 1 / 0))
    with pytest.raises(ZeroDivisionError): run_cells(RUN_NLP, parameters | dict(seed=3))
    assert list((tmp_path / "results" / f"run_nlp-tiny-{tiny_texts.name}-3").iterdir()) == []


def test_no_clients_means_all_domains_but_the_pool(parameters, run_cells, monkeypatch):
    seen = []
    monkeypatch.setattr(harmomoe.unify, "check_settings", lambda config, benchmark: seen.append(benchmark) or 1 / 0)
    with pytest.raises(ZeroDivisionError): run_cells(RUN_NLP, parameters | dict(clients="", out="out"))
    assert [client.name for client in seen[0].clients] == sorted(DOMAINS) and len(seen[0].clients[0].train) == 20


# ---- what is refused, before anything is written

WRONG = {
    "unknown parameter": (dict(epoch=3), ValueError, "unknown parameter 'epoch'. Did you mean 'epochs'"),
    "text for a number": (dict(epochs="3"), ValueError, "'epochs' is '3', but must be of type int"),
    "unknown method": (dict(compare="btm, btn"), ValueError, "no method 'btn'; there are zeroshot"),
    "expert of nobody": (dict(compare="btm,expert:birds"), ValueError, "no client 'birds'; there are colours, animals"),
    "dtype": (dict(dtype="float16"), ValueError, "dtype is 'float16', but must be float32 or bfloat16"),
    "scoring": (dict(scoring="guess"), ValueError, "scoring 'guess' is neither 'letter' nor 'text'"),
    "loss": (dict(loss_on="prompt"), ValueError, "loss_on 'prompt' is neither 'answer' nor 'all'"),
    "length": (dict(max_length=0), ValueError, "max_length is 0, but must be at least 2"),
    "processes": (dict(processes=0), ValueError, "processes is 0, but must be at least 1"),
    "missing data": (dict(data="no/such/folder"), FileNotFoundError, "data folder 'no/such/folder' does not exist"),
    "missing client": (dict(clients="colours,birds"), FileNotFoundError, "'birds' is not a domain.*animals, colours"),
    "missing pool": (dict(pool="proverbs"), FileNotFoundError, "'proverbs' is not a domain there"),
    "no pool": (dict(pool=""), ValueError, "name a pool and at least one client"),
    "pool as a client": (dict(clients="colours,words=sayings"), ValueError, "client words has no questions with"),
    "images": (dict(data="embedded", clients="", pool="", candidates=None), ValueError, "holds no texts; run_cv"),
    "too many candidates": (dict(candidates=91), ValueError, "candidates is 91, but the pool has 90 samples"),
    "too many proxies": (dict(proxies=41), ValueError, r"proxies \(m = 41\) cannot exceed candidates \(n = 40\)"),
    "no training data": (dict(train=0), ValueError, "cannot keep 0 rows"),
    "selection": (dict(selection="best"), ValueError, "selection is 'best', but must be one of"),
    "rank": (dict(rank=0), ValueError, "rank is 0, but must be positive"),
    "experts": (dict(top_k=9), ValueError, "top_k is 9, but must be 1 to 3"),
    "context": (dict(context="suffix"), ValueError, "context 'suffix' is none of sequence, prefix, prompt"),
    "spread of the past": (dict(context="prefix", router_initial="moments"), ValueError, "needs the whole sequence"),
    "backbone": (dict(backbone="smolm2"), ValueError, "'smolm2' is neither .* a language model on the Hugging"),
    "image model": (dict(backbone="embedded"), ValueError, "only for language models, but embedded is none"),
    "folder without a model": (dict(backbone="."), ValueError, "nor a folder with .* config.json"),
    "file": (dict(backbone="no.gguf"), FileNotFoundError, "there is no file no.gguf"),
    "absent model": (dict(backbone="nobody/nothing"), ConnectionError, "language model nobody/nothing.*HF_HUB_OFFLINE"),
    "absent data": (dict(data="paper-texts", clients="", pool=""), (ConnectionError, FileNotFoundError), "alpaca"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_parameter_is_one_error_before_anything_is_written(what, parameters, run_cells, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *args, **kwargs: None)
    monkeypatch.setattr(DecoderSeed, "embed", forbidden)
    changes, error, said = WRONG[what]
    with pytest.raises(error, match=said) as caught: run_cells(RUN_NLP, parameters | dict(out="out") | changes)
    assert list(tmp_path.iterdir()) == [] and len(str(caught.value)) < 1200
