"On a GPU the whole method does what it does on a CPU. Each test needs one (`pytest -m cuda`)."

import json

import pytest
import torch

from harmomoe.bench.experiment import open_experiment
from harmomoe.exchange.transformers import to_transformers
from harmomoe.models.evaluate import measure, summary
from harmomoe.models.model import load_model

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("ignore")]

OTHERS = "zeroshot, matching experts, btm_posterior, arrow, btx"
# float32 on both; what is left are sums in another order
CLOSE = dict(atol=2e-3, rtol=1e-3)


def run_of(texts, folder, device):
    "A small run of one of the main notebooks."
    given = dict(backbone="embedded-text" if texts else "embedded", data=None, quick=24)
    given |= dict(out=folder, device=device, methods=OTHERS, threads=2)
    given |= dict(clients="rust, novels, licences") if texts else {}
    return open_experiment("run_nlp" if texts else "run_cv", texts=texts, **given)


@pytest.fixture(scope="module", params=[False, True], ids=["images", "texts"])
def run(request, tmp_path_factory):
    "It, on the GPU."
    return run_of(request.param, tmp_path_factory.mktemp("gpu"), "cuda")


def scores_of(model, samples, classes):
    "Scores of the first batch, on the CPU."
    [batch] = model.seed.batches(samples.select(range(8)), batch_size=8)
    with torch.no_grad():
        return model.seed.task(classes).scores(model.backbone.eval(), batch).float().cpu()


def test_a_model_made_there_is_the_same_here(run, tmp_path):
    unified = run.server.unify()
    client = run.benchmark.clients[0]
    folder = unified.save(tmp_path / "model")
    there, here = load_model(folder, device="cuda"), load_model(folder)
    of = client.test, client.classes
    wanted = scores_of(here, *of)
    for model in (unified, there):
        assert next(model.backbone.parameters()).is_cuda
        assert torch.allclose(scores_of(model, *of), wanted, **CLOSE)
    assert measure(there, *of).value == pytest.approx(measure(here, *of).value, abs=4.2)


def test_experts_may_wait_in_the_file(run, tmp_path):
    unified, client = run.server.unify(), run.benchmark.clients[0]
    stored = load_model(unified.save(tmp_path / "model"), device="cuda", working_set=1)
    of = client.test, client.classes
    assert torch.allclose(scores_of(stored, *of), scores_of(unified, *of), **CLOSE)


def test_systems_do_there_as_they_do_here(run, tmp_path):
    texts = run.source.seed().is_causal
    there, here = run.measure_others(), run_of(texts, tmp_path, "cpu").measure_others()
    assert there.keys() == here.keys()
    for name in there:
        wanted, close = summary(here[name]), 0.02 if texts else 8.4  # two of 24 images
        assert summary(there[name]) == pytest.approx(wanted, abs=close), name


def test_a_language_model_writes_the_same(run):
    if not run.source.seed().is_causal:
        pytest.skip("for language models")
    model = to_transformers(run.server.unify()).eval()
    prompt = run.benchmark.clients[0].test[0]["prompt"]
    ids = torch.tensor([run.public.seed.encode(prompt, "")[0]])
    how = dict(max_new_tokens=24, do_sample=False)
    cached = model.generate(ids.cuda(), **how).cpu()
    assert torch.equal(cached, model.generate(ids.cuda(), use_cache=False, **how).cpu())
    logits = model(cached.cuda()).logits.cpu()
    assert torch.allclose(logits, model.cpu()(cached).logits, **CLOSE)


def test_adapters_become_one_model_there(tmp_path):
    from peft import LoraConfig, get_peft_model

    from harmomoe.exchange.unify import unify_adapters
    from harmomoe.models.weights import open_seed

    seed, adapters = open_seed("embedded-text"), {}
    for number, name in enumerate(("one", "two")):
        torch.manual_seed(number)
        how = dict(r=4, target_modules="all-linear", init_lora_weights=False)
        get_peft_model(seed.new_backbone(), LoraConfig(**how)).save_pretrained(tmp_path / name)
        prompts = [f"{'What is' if number else 'fn main'} {i}" for i in range(12)]
        adapters[name] = dict(source=str(tmp_path / name), prompts=prompts)
    rows = [json.dumps(dict(text=f"It is said of {i} that it is it.")) for i in range(70)]
    (tmp_path / "pool.jsonl").write_text("\n".join(rows))
    recipe = dict(base="embedded-text", adapters=adapters, pool=str(tmp_path / "pool.jsonl"))
    recipe |= dict(output=str(tmp_path / "made"), device="cuda")
    model = unify_adapters(recipe).model
    text = "It is said of 7 that"
    ids = torch.tensor([seed.encode(text, "")[0]])
    found = []
    for device in ("cuda", "cpu"):
        one, given = to_transformers(model).to(device), ids.to(device)
        found.append(one(given, prompt_mask=torch.ones_like(given).bool()).logits.cpu())
    assert torch.allclose(*found, **CLOSE)
