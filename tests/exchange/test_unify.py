"One file names adapters, examples, pool and output; one call makes a model, or says why not."

import json
import shutil
import warnings
from dataclasses import replace

import pandas as pd
import pytest
import torch
import yaml
from exchange.small_decoders import GATED, moved
from helpers import tree
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

import harmomoe.exchange.unify as module
from harmomoe.base.artefacts import stages_run
from harmomoe.exchange.adopt import chat_template, example_domain
from harmomoe.exchange.transformers import to_transformers
from harmomoe.exchange.unify import open_adapters, read_recipe, unify_adapters
from harmomoe.models.observe import observe_routing

PROMPTS = {
    "sums": [f"what is {i} plus {i * i % 7}" for i in range(12)],
    "towns": [f"WHICH TOWN HAS {'A' * i} BRIDGES" for i in range(12)],
}
UNSEEN = {
    "sums": [f"what is {i} plus {i % 9}" for i in range(50, 62)],
    "towns": [f"WHICH TOWN HAS {'B' * i} BRIDGES" for i in range(12)],
}
# as real templates do: a line break at the very end of a template would be dropped
MARKS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{{ '<assistant>\\n' }}"
TRAINED = {"finetune": {"epochs": 1, "learning_rate": 1e-3}}

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="session")
def home(seed, tmp_path_factory):
    "A folder with base, the same with a chat template, two adapters and public texts."
    from peft import LoraConfig, get_peft_model

    folder = tmp_path_factory.mktemp("home")
    for name, template in (("base", None), ("chatty", MARKS)):
        seed.new_backbone().save_pretrained(folder / name)
        seed.tokenizer.chat_template = template
        seed.tokenizer.save_pretrained(folder / name)
    seed.tokenizer.chat_template = None
    for rank, (name, more) in enumerate(dict(sums=[], towns=["q_proj"]).items(), 2):
        torch.manual_seed(rank)
        how = dict(r=rank, target_modules=GATED + more, layers_to_transform=[1])
        how |= dict(init_lora_weights=False)
        adapted = get_peft_model(seed.new_backbone(), LoraConfig(**how))
        adapted.save_pretrained(folder / name, save_embedding_layers=False)
    write_rows(
        folder / "public.jsonl",
        [dict(instruction=f"Tell me about {i}.", output=f"It is {i}.") for i in range(70)],
    )
    return folder


@pytest.fixture
def world(home, tmp_path):
    "A copy of it, and what stands in its file."
    shutil.copytree(home, tmp_path, dirs_exist_ok=True)
    adapters = {name: dict(source=name, prompts=PROMPTS[name]) for name in PROMPTS}
    return tmp_path, dict(
        base="base",
        adapters=adapters,
        pool="public.jsonl",
        others="ignore",
        output="one",
    )


def put(folder, recipe):
    "Write the file."
    (folder / "my.yaml").write_text(yaml.safe_dump(recipe))
    return folder / "my.yaml"


def own_shares(unified, template=None):
    "Each adapter's share of the weight, on prompts that no router was made from."
    names = unified.model.experts
    found = {}
    for name, texts in UNSEEN.items():
        load = observe_routing(unified.model, example_domain(name, texts, template).train).load
        found[name] = dict(zip(names, load.mean(0)))
    return found


# One call


def test_a_file_becomes_a_model_that_transformers_opens(world):
    folder, recipe = world
    unified = unify_adapters(put(folder, recipe | dict(settings=TRAINED)))
    assert {path.name for path in (folder / "one").iterdir()} == {"model", "report", "work"}
    assert unified.folder == (folder / "one" / "model").resolve()
    opened = AutoModelForCausalLM.from_pretrained(unified.folder)
    assert opened.config.experts == unified.model.experts == ["seed", "sums", "towns"]
    assert unified.model.ranks == [0, 2, 3]
    for name, shares in own_shares(unified).items():
        assert shares[name] > max(share for other, share in shares.items() if other != name)
    told = json.loads((folder / "one" / "report" / "report.json").read_text())
    assert told["recipe"]["others"] == "ignore" and told["settings"]["finetune"]["epochs"] == 1
    assert told["taken"]["towns"]["other maps dropped"] == 1
    assert told["taken"]["sums"]["dropped, % of its change"] == 0
    assert 0 < told["taken"]["towns"]["dropped, % of its change"] < 100
    assert set(told["report"]) == {"sums", "towns"}


def test_adapters_are_taken_as_they_are_unless_the_file_asks_for_training(world, seed):
    from peft import PeftModel

    folder, recipe = world
    asked = seed.tokenizer(UNSEEN["sums"][0], return_tensors="pt")["input_ids"]
    theirs = PeftModel.from_pretrained(seed.new_backbone(), folder / "sums").eval()

    def distance(unified):
        "Of the logits by the expert alone from those of PEFT."
        with torch.no_grad(), unified.model.only("sums"):
            found = to_transformers(unified.model)(asked, prompt_mask=asked >= 0).logits
            return (found - theirs(asked).logits).abs().max()

    assert distance(unify_adapters(put(folder, recipe))) < 1e-5
    trained = unify_adapters(put(folder, recipe | dict(settings=TRAINED, output="two")))
    assert distance(trained) > 1e-3


def test_the_model_card_says_what_the_file_says_and_what_is_on_the_hub(world, monkeypatch):
    folder, recipe = world
    here = {"org/base": "base", "somebody/sums@v1": "sums"}
    for name in ("open_seed", "find_adapter"):
        found = getattr(module, name)
        lies = lambda place, found=found, **how: found(str(folder / here.get(place, place)), **how)
        monkeypatch.setattr(module, name, lies)
    recipe["adapters"]["sums"]["source"] = "somebody/sums@v1"
    known = dict(licenses=dict(seed="apache-2.0", sums="mit"), license="other", about="For tests.")
    unify_adapters(put(folder, recipe | dict(base="org/base", card=known)))
    card = ModelCard.load(folder / "one" / "model" / "README.md")
    assert card.data.base_model == ["org/base", "somebody/sums"]
    assert card.data.license == "other" and "lora" in card.data.tags
    rows = [line for line in card.text.splitlines() if line.startswith("| ")][1:]
    assert rows == [
        "| seed | none | apache-2.0 | the base model |",
        "| sums | 2 | mit | somebody/sums@v1 |",
        "| towns | 3 | unknown | unknown |",
    ]
    assert "For tests." in card.text and str(folder) not in card.text


def test_what_was_done_is_not_done_again(world):
    file = put(*world)
    unify_adapters(file)
    before = tree(world[0] / "one" / "model")
    with stages_run() as ran:
        unify_adapters(file)
    assert ran == [] and tree(world[0] / "one" / "model") == before


def test_a_failure_leaves_no_model_and_the_next_call_goes_on(world, monkeypatch):
    file = put(*world)

    def fail(*given):
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(module, "save_transformers", fail)
        with pytest.raises(OSError, match="disk is full"):
            unify_adapters(file)
    assert {path.name for path in (world[0] / "one").iterdir()} == {"work"}
    with stages_run() as ran:
        unify_adapters(file)
    assert ran == [] and (world[0] / "one" / "report" / "report.json").is_file()


def test_a_dict_says_what_a_file_says(world, monkeypatch):
    folder, recipe = world
    monkeypatch.chdir(folder)
    read = read_recipe(recipe)
    assert read == read_recipe(put(folder, recipe))
    assert read.base == str((folder / "base").resolve())
    assert open_adapters(read).experts.keys() == PROMPTS.keys()


def test_attention_is_routed_unless_the_file_says_otherwise(world):
    folder, recipe = world
    del recipe["others"]
    unified = unify_adapters(put(folder, recipe))
    taken = unified.adapters.taken()
    assert taken["maps of attention"].tolist() == [0, 1]
    assert not taken[["other maps averaged", "other maps dropped"]].any(axis=None)
    assert unified.model.attention == ["q_proj"]
    opened = AutoModelForCausalLM.from_pretrained(unified.folder)
    assert opened.config.attention == ["q_proj"] and len(opened.attention_maps) == 2


def test_other_changes_are_averaged_into_the_base(world, seed):
    folder, recipe = world
    adapters = open_adapters(put(folder, recipe | dict(others="average")))
    name = "model.layers.1.self_attn.q_proj.weight"
    moved_by = adapters.public.seed.backbone.state_dict()[name] - seed.backbone.state_dict()[name]
    assert moved_by.abs().max() > 0
    taken = adapters.taken()
    assert taken["other maps averaged"].tolist() == [0, 1]
    assert not taken["other maps dropped"].any()


def test_texts_with_answers_are_measured_and_some_held_out(world):
    folder, recipe = world
    rows = [
        dict(text=f"what is {i} plus {i}, and why, and how much more is it?") for i in range(60)
    ]
    write_rows(folder / "sums.jsonl", rows)
    recipe["adapters"]["sums"] = dict(source="sums", data="sums.jsonl")
    unified = unify_adapters(put(folder, recipe))
    domain, report = unified.adapters.domains["sums"], unified.report()
    assert len(domain.train) + len(domain.validation) + len(domain.test) == 60 > len(domain.train)
    assert report.loc["sums", "watched"] == "held-out"
    assert report.loc["towns", "watched"] == "its examples"
    bits = report.filter(like="bits per byte")
    assert (bits.loc["sums"] > 0).all() and bits.loc["towns"].isna().all()
    with unified.model.only("sums"):
        alone = module.measure(unified.model, domain.test, domain.classes).bits
    assert bits.loc["sums", "bits per byte, adapter"] == pytest.approx(alone, abs=1e-3)


def test_adapters_that_change_every_layer_are_told_apart(world, seed):
    from peft import LoraConfig, get_peft_model

    folder, recipe = world
    for rank, name in enumerate(PROMPTS, 2):
        torch.manual_seed(rank)
        how = dict(r=rank, lora_alpha=16 * rank, target_modules=GATED, init_lora_weights=False)
        strong = get_peft_model(seed.new_backbone(), LoraConfig(**how))
        strong.save_pretrained(folder / name, save_embedding_layers=False)
    unified = unify_adapters(put(folder, recipe))
    assert unified.model.settings.form == "evidence"
    for name, shares in own_shares(unified).items():
        assert shares[name] > 0.85, shares


# The threshold of the base

KINDS = {
    "sums": "what is {0} plus {0}, and why, and how much more is it than {1}?",
    "towns": "WHICH TOWN HAS {0} BRIDGES, AND WHICH HAS {1} OF THEM, AND WHY?",
}


@pytest.fixture
def answered(world):
    "The file with texts in place of prompts."
    folder, recipe = world
    for name, text in KINDS.items():
        rows = [dict(text=text.format(i, i * i)) for i in range(60)]
        write_rows(folder / f"{name}.jsonl", rows)
        recipe["adapters"][name] = dict(source=name, data=f"{name}.jsonl")
    return folder, recipe


def test_of_some_thresholds_the_best_is_taken(answered):
    folder, recipe = answered
    unified = unify_adapters(put(folder, recipe))
    tried, texts = unified.thresholds, unified.adapters.judged_on
    assert [*tried.index] == [*module.LOGITS]
    assert [*tried.columns] == ["sums", "towns", module.PUBLIC, "mean"]
    settings = unified.adapters.public.config.router
    assert settings.seed_logit == tried["mean"].idxmin()
    assert unified.model.settings == settings
    assert (tried["mean"] - tried[[*texts]].mean(axis=1)).abs().max() < 1e-12
    told = json.loads((folder / "one" / "report" / "report.json").read_text())
    assert told["settings"]["router"]["seed_logit"] == settings.seed_logit
    assert len(told["thresholds"]) == len(tried)
    # each row is what the unified model would be, had the file named the threshold
    named = dict(router=dict(seed_logit=-4.0))
    same = unify_adapters(put(folder, recipe | dict(settings=named, output="two"))).model
    for name, part in texts.items():
        assert tried.loc[-4.0, name] == module.measure(same, part, ["text"]).bits


@pytest.mark.parametrize("number", [17, 40, 60])
def test_texts_that_thresholds_are_judged_on_made_no_routing_vectors(number, answered):
    folder, recipe = answered
    for name, text in KINDS.items():
        rows = [dict(text=text.format(i, i * i)) for i in range(number)]
        write_rows(folder / f"{name}.jsonl", rows)
    adapters = open_adapters(put(folder, recipe))
    seen = {name: domain.train for name, domain in adapters.domains.items()}
    seen[module.PUBLIC] = adapters.public.sample
    for name, part in adapters.judged_on.items():
        whole = lambda one: {p + a for p, a in zip(one["prompt"], one["answer"])}
        assert len(part) >= module.FEWEST and not whole(part) & whole(seen[name])


@pytest.mark.parametrize(
    "settings",
    [
        {"router.seed_logit": -1.0},
        {"router": {"seed_logit": -1.0}},
        {"router.seed_expert": False},
        {"router.form": "mean"},
    ],
)
def test_no_threshold_is_tried_where_it_is_named_or_there_is_none(answered, settings):
    folder, recipe = answered
    unified = unify_adapters(put(folder, recipe | dict(settings=settings)))
    assert unified.thresholds is None
    assert not (folder / "one" / "report" / "thresholds.csv").exists()
    logit = unified.model.settings.seed_logit
    assert logit == (-1.0 if "seed_logit" in str(settings) else -0.5)


def few(answered):
    "The file with as many texts of each kind as are all seen."
    folder, recipe = answered
    for name, text in KINDS.items():
        rows = [dict(text=text.format(i, i * i)) for i in range(module.SMALL)]
        write_rows(folder / f"{name}.jsonl", rows)
    return folder, recipe


@pytest.mark.parametrize("examples", ["prompts", "a few texts"])
def test_where_no_text_is_held_out_public_text_alone_tells(examples, request):
    prompts = examples == "prompts"
    world = request.getfixturevalue("world" if prompts else "answered")
    unified = unify_adapters(put(*(world if prompts else few(world))))
    if not prompts:
        seen = [len(domain.train) for domain in unified.adapters.domains.values()]
        assert seen == [module.SMALL] * 2
    tried = unified.thresholds
    assert [*tried.columns] == [module.PUBLIC, "mean"] and [*tried.index] == [*module.LOGITS]
    bits, taken = tried[module.PUBLIC], unified.model.settings.seed_logit
    assert bits[taken] <= 1.01 * bits[-0.5]
    assert all(bits[logit] > 1.01 * bits[-0.5] for logit in bits.index if logit < taken)


def test_the_lowest_threshold_is_taken_that_costs_public_text_no_more_than_a_hundredth():
    bits = pd.Series([1.0, 1.02, 1.01, 1.2, 1.3], [*module.LOGITS])
    assert module._best(pd.DataFrame({module.PUBLIC: bits, "mean": bits})) == -4.0
    judged = pd.DataFrame({"sums": bits[::-1].values, module.PUBLIC: bits}, bits.index)
    assert module._best(judged.assign(mean=judged.mean(axis=1))) == -4.0
    assert module._best(judged.assign(mean=[2, 1, 3, 4, 5])) == -2.0


# Under a chat template


def test_routing_under_a_chat_template(world):
    folder, recipe = world
    unified = unify_adapters(put(folder, recipe | dict(base="chatty", chat=True)))
    template = chat_template(unified.model.seed)
    asked = unified.adapters.domains["sums"].train["prompt"][0]
    assert asked == f"<user>{PROMPTS['sums'][0]}\n<assistant>\n"
    public = unified.adapters.public.pool.train[0]
    assert public["prompt"].startswith("<user>Tell me") and public["prompt"].endswith(
        "<assistant>\n"
    )
    for name, shares in own_shares(unified, template).items():
        assert shares[name] > max(share for other, share in shares.items() if other != name)


def test_prompts_that_are_in_a_template_already_are_taken_as_they_are(world):
    folder, recipe = world
    for name, texts in PROMPTS.items():
        recipe["adapters"][name]["prompts"] = [f"<user>{text}\n<assistant>\n" for text in texts]
    adapters = open_adapters(put(folder, recipe))
    given = recipe["adapters"]["sums"]["prompts"]
    assert adapters.domains["sums"].train["prompt"][:] == given


def test_conversations_go_through_the_template(world):
    folder, recipe = world
    said = lambda i: [dict(role="user", content=f"{i}?"), dict(role="assistant", content=f"{i}!")]
    write_rows(folder / "talk.jsonl", [dict(messages=said(i)) for i in range(12)])
    recipe["adapters"]["sums"] = dict(source="sums", data="talk.jsonl")
    adapters = open_adapters(put(folder, recipe | dict(base="chatty", chat=True)))
    sample = adapters.domains["sums"].train[3]
    assert (sample["prompt"], sample["answer"]) == ("<user>3?\n<assistant>\n", "3!")


# What is refused


def change(recipe, **fields):
    recipe.update(fields)


def change_sums(recipe, **fields):
    recipe["adapters"]["sums"] = dict(recipe["adapters"]["sums"]) | fields


def with_data(recipe, data):
    recipe["adapters"]["sums"] = dict(source="sums", data=data)


@pytest.mark.parametrize(
    "slip, message",
    [
        (lambda r: change(r, otehrs="ignore"), "unknown field 'otehrs'. Did you mean 'others'"),
        (lambda r: r.pop("output"), "the field 'output' is missing"),
        (lambda r: r.pop("base"), "the field 'base' is missing"),
        (lambda r: change(r, adapters={}), "adapters are none"),
        (lambda r: change(r, adapters=["sums"]), "adapters is"),
        (lambda r: change(r, others="drop"), "others is 'drop'"),
        (lambda r: change(r, card=dict(licence="mit")), "field 'card.licence'. Did you mean 'lice"),
        (
            lambda r: change(r, card=dict(license="MIT")),
            "card.license is 'MIT', but must be as the",
        ),
        (
            lambda r: change(r, card=dict(licenses=dict(sum="mit"))),
            "card names 'sum', but there are seed, sums, towns",
        ),
        (lambda r: change(r, adapters={"seed": dict(source="sums", data="x")}), "'seed'"),
        (lambda r: change(r, adapters={"a/b": dict(source="sums", data="x")}), "'a/b'"),
        (lambda r: change_sums(r, promts=[]), "adapters.sums: unknown field 'promts'. Did you"),
        (lambda r: change_sums(r, prompts=[]), "adapters.sums: there are neither prompts nor data"),
        (lambda r: change_sums(r, data="x"), "adapters.sums: there are both prompts and data"),
        (lambda r: change_sums(r, prompts=["a"]), "adapters.sums: prompts are 1, but must be 10"),
        (lambda r: change_sums(r, prompts=["x "] * 12), "adapters.sums.prompts: .*ends in a blank"),
        (lambda r: change_sums(r, source="../sums"), "adapters.sums.source is '../sums', which le"),
        (
            lambda r: change_sums(r, source="./gone"),
            "adapters.sums.source: there is no folder .*gone",
        ),
        (lambda r: change_sums(r, source="gone"), "adapters.sums.source: there is no folder gone"),
        (lambda r: change_sums(r, source="some/body"), "adapters.sums.source: .*HF_HUB_OFFLINE"),
        (lambda r: change_sums(r, source="base"), "adapters.sums.source: .*holds no adapter"),
        (lambda r: change(r, others="refuse"), "adapters.towns.source: .*Choose others='average'"),
        (lambda r: change(r, base="narrow"), "adapters.sums.source: .* does not fit"),
        (lambda r: change(r, base="./gone"), "base: .*gone"),
        (lambda r: change(r, base="some/body"), "base: .*HF_HUB_OFFLINE"),
        (lambda r: change(r, base="embedded"), "base: embedded is no language model"),
        (lambda r: change(r, chat=True), "base: base has no chat template"),
        (lambda r: with_data(r, "gone.jsonl"), "adapters.sums.data: 'gone.jsonl': no file"),
        (
            lambda r: with_data(r, "few.jsonl"),
            "adapters.sums.data: .*has 9 texts, but 10 are needed",
        ),
        (lambda r: with_data(r, "empty.jsonl"), "adapters.sums.data: .*no rows"),
        (lambda r: with_data(r, "odd.jsonl"), "adapters.sums.data: .*row 1: the text is empty"),
        (lambda r: change(r, pool="empty.jsonl"), "pool: .*no rows"),
        (lambda r: change(r, pool="few.jsonl"), "pool: .*has 9 texts, but 20 are needed"),
        (lambda r: change(r, pool="../public.jsonl"), "pool is '../public.jsonl', which leads out"),
        (lambda r: change(r, output="../one"), "output is '../one', which leads out"),
        (lambda r: change(r, output="base"), "output: .*no part of a model: name a new folder"),
        (lambda r: change(r, output="public.jsonl"), "output: .*is a file"),
        (lambda r: change(r, device="cuda:99"), "device is 'cuda:99', but must be one on which"),
        (lambda r: change(r, preset="best"), "preset is 'best'"),
        (lambda r: change(r, settings={"router.topk": 1}), "unknown field 'router.topk'"),
        (
            lambda r: change(r, settings={"router.top_k": 9}),
            "router.top_k is 9, but must be 1 to 3",
        ),
        (lambda r: change(r, settings={"proxies.candidates": 999}), "999, but the pool has"),
    ],
)
def test_a_slip_is_one_error_before_any_work(world, decoder, monkeypatch, slip, message):
    folder, recipe = world
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    narrow = decoder(intermediate_size=40)
    narrow.new_backbone().save_pretrained(folder / "narrow")
    narrow.tokenizer.save_pretrained(folder / "narrow")
    write_rows(folder / "few.jsonl", [dict(text=f"It is {i}.") for i in range(9)])
    write_rows(folder / "empty.jsonl", [])
    write_rows(
        folder / "odd.jsonl", [dict(text="It is."), dict(text=" ")] + 12 * [dict(text="a b")]
    )
    slip(recipe)
    file = put(folder, recipe)
    before = tree(folder)
    errors = ValueError, FileNotFoundError, ConnectionError
    with stages_run() as ran, pytest.raises(errors, match=message) as caught:
        unify_adapters(file)
    assert ran == [] and tree(folder) == before
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "Input should be a valid dictionary"),
        ("base: [", "is no YAML"),
        ("base: a\nbase: b", "occurs twice"),
        ("base: &x a\noutput: *x", "aliases"),
    ],
)
def test_what_is_no_such_file(tmp_path, text, message):
    (tmp_path / "my.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        unify_adapters(tmp_path / "my.yaml")
    with pytest.raises(FileNotFoundError, match="there is no file .*other.yaml"):
        unify_adapters(tmp_path / "other.yaml")


def test_an_adapter_of_a_model_with_other_weights_is_refused(world, seed):
    folder, recipe = world
    moved(seed).save_pretrained(folder / "cousin")
    config = folder / "sums" / "adapter_config.json"
    says = lambda base: json.dumps(json.loads(config.read_text()) | base)
    config.write_text(says(dict(base_model_name_or_path=str(folder / "cousin"))))
    with pytest.warns(UserWarning, match="their weights differ"):
        with pytest.raises(ValueError, match="cousin, whose weights are not those of the base"):
            open_adapters(put(folder, recipe))
    shutil.copytree(folder / "base", folder / "twin")
    config.write_text(says(dict(base_model_name_or_path=str(folder / "twin"))))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert open_adapters(put(folder, recipe)).taken().loc["sums", "the base"] == "yes"


def test_what_is_left_open_follows_the_pool(world):
    config = open_adapters(put(*world)).public.config
    assert config.proxies.number < config.proxies.candidates <= 70
    assert config.routing.public_samples <= 60  # so that some are left to judge by
    given = dict(proxies=dict(candidates=30, number=5))
    config = open_adapters(put(world[0], world[1] | dict(settings=given))).public.config
    assert (config.proxies.candidates, config.proxies.number) == (30, 5)


def test_an_earlier_runs_folder_is_taken_and_a_foreign_one_is_not(world):
    folder, recipe = world
    read = read_recipe(put(folder, recipe))
    (folder / "one" / "work").mkdir(parents=True)
    open_adapters(read)
    (folder / "one" / "letters.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds letters.txt"):
        open_adapters(read)
    open_adapters(replace(read, output=str(folder / "other")))
