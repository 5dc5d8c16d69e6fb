"The notebook for adapters: it runs on a file as papermill would run it, and says what is wrong."

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from harmomoe.base.artefacts import stages_run

UNIFY = Path(__file__).resolve().parent.parent / "nbs" / "unify.ipynb"

pytestmark = [
    pytest.mark.usefixtures("elsewhere"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture
def file(tiny_decoder, tmp_path):
    "A file with two adapters of a tiny decoder."
    import torch
    from peft import LoraConfig, get_peft_model

    from harmomoe.models.weights import open_seed

    seed, adapters = open_seed(str(tiny_decoder)), {}
    for number, name in enumerate(("low", "high")):
        torch.manual_seed(number)
        targets = [*seed.ffn.linears]
        lora = LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
        adapted = get_peft_model(seed.new_backbone(), lora)
        adapted.save_pretrained(tmp_path / name, save_embedding_layers=False)
        said = [str.lower, str.upper][number]
        adapters[name] = dict(source=name, prompts=[said(f"question {i} is") for i in range(12)])
    rows = [dict(text=f"Public text number {i} is about nothing much.") for i in range(60)]
    (tmp_path / "public.json").write_text(json.dumps(rows))
    recipe = dict(base=str(tiny_decoder), adapters=adapters, pool="public.json", output="one")
    (tmp_path / "my.yaml").write_text(json.dumps(recipe))
    return tmp_path / "my.yaml"


def test_the_notebook_makes_a_model_and_a_second_run_finds_it(file, run_cells):
    space = run_cells(UNIFY, dict(file=str(file), threads=1))
    assert space["unified"].model.experts == ["seed", "low", "high"]
    assert list(space["report"].index) == ["low", "high"]
    opened = AutoModelForCausalLM.from_pretrained(file.parent / "one" / "model")
    assert opened.config.experts == ["seed", "low", "high"]
    with stages_run() as ran:
        run_cells(UNIFY, dict(file=str(file), threads=1))
    assert ran == []


@pytest.mark.parametrize(
    "given, message",
    [
        (dict(), "parameter 'file' is missing"),
        (dict(fiel="x"), "unknown parameter 'fiel'. Did you mean 'file'"),
        (dict(file="gone.yaml"), "there is no file gone.yaml"),
    ],
)
def test_a_wrong_parameter_is_said_at_once(given, message, run_cells):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run_cells(UNIFY, given)
