"Unified models go out as models of transformers and come back, whatever the family of their seed."

import base64
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from moe.small_unified import (
    CONFIGS,
    EXPERTS,
    LEFT,
    SIZE,
    TEXTS,
    build,
    families,
    logits_of,
    randomise,
    shared,
)
from peft import LoraConfig, inject_adapter_in_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from harmomoe.exchange.export import save_adapters
from harmomoe.exchange.transformers import (
    Card,
    dense_seed,
    from_transformers,
    hub_name,
    model_card,
    push_to_hub,
    save_transformers,
    to_transformers,
)
from harmomoe.models.decoder import DecoderSeed
from harmomoe.models.model import load_model
from harmomoe.models.unified import UnifiedModel
from harmomoe.models.weights import open_seed
from harmomoe.moe.router import RouterSettings


@pytest.fixture(scope="module", autouse=True)
def _quiet():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)  # a second thread only slows so small a model down


@pytest.fixture(scope="module")
def tokenizer():
    "One token for each of the words w0, w1 and so on."
    names = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(94))]
    vocabulary = {word: i for i, word in enumerate(names)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


@pytest.fixture
def unified(tokenizer):
    "A function (family, ...) -> a UnifiedModel of this library."

    def made(family="llama", tied=False, dtype=torch.float32, **router):
        kind, special = CONFIGS[family]
        torch.manual_seed(0)
        config = kind(**SIZE | special, tie_word_embeddings=tied)
        dense = AutoModelForCausalLM.from_config(config, dtype=dtype)
        dense.generation_config.repetition_penalty = 1.2
        seed = DecoderSeed(dense, tokenizer, "tiny", scoring="text", loss_on="all", max_length=33)
        router = dict(context="prefix", form="logistic", top_k=2) | router
        model = UnifiedModel(seed, *EXPERTS.values(), RouterSettings(**router))
        randomise(model.layers)
        return model

    return made


@families
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_there_and_back(family, tied, unified, tokenizer, tmp_path):
    model = unified(family, tied)
    theirs = to_transformers(model)
    tensors = [m.state_dict(keep_vars=True).values() for m in (theirs, model.backbone)]
    assert {*map(id, tensors[0])} == {*map(id, tensors[1])}
    assert torch.equal(logits_of(theirs), logits_of(model.backbone)) and not theirs.training
    assert theirs.generation_config.repetition_penalty == 1.2
    save_transformers(model, tmp_path / "delivered")
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "delivered")
    assert torch.equal(logits_of(opened), logits_of(model.backbone))
    written = AutoTokenizer.from_pretrained(tmp_path / "delivered")
    assert written("w3 w5").input_ids == tokenizer("w3 w5").input_ids
    again = from_transformers(opened, tokenizer)
    assert again.seed.identity == model.seed.identity and again.seed.max_length == 33
    for name in ("experts", "ranks", "scales", "settings"):
        assert getattr(again, name) == getattr(model, name)
    dense = again.seed.model
    assert (dense.get_input_embeddings().weight is dense.get_output_embeddings().weight) == tied
    assert torch.equal(logits_of(dense), logits_of(model.seed.model))  # no hook is left
    assert torch.equal(logits_of(again.backbone), logits_of(model.backbone))
    with again.only("law"), model.only("law"):
        assert torch.equal(logits_of(again.backbone), logits_of(model.backbone))
    assert again.parameter_groups() == model.parameter_groups()
    assert from_transformers(opened, tokenizer, name="other", max_length=20).seed.name == "other"
    with torch.no_grad():
        again.layers[0].a["gate_proj"].zero_()
    assert torch.equal(logits_of(opened), logits_of(model.backbone))  # experts were copied


def test_a_delivered_folder_does_not_say_where_it_was_made(unified, tmp_path):
    place = tmp_path / "a place of mine"
    place.mkdir()
    unified().seed.save(place)
    model = UnifiedModel(open_seed(str(place)), *EXPERTS.values())
    folder = save_transformers(model, place / "delivered")
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    loaded.save_pretrained(tmp_path / "again")
    for file in (*folder.iterdir(), *(tmp_path / "again").iterdir()):
        assert b"place of mine" not in file.read_bytes(), file.name


def test_a_delivered_model_of_mixed_precision_keeps_its_logits(unified, tmp_path):
    model = unified(dtype=torch.bfloat16)
    assert {p.dtype for p in model.backbone.parameters()} == {torch.bfloat16, torch.float32}
    opened = AutoModelForCausalLM.from_pretrained(save_transformers(model, tmp_path / "delivered"))
    assert torch.equal(logits_of(opened), logits_of(model.backbone))


def test_delivered_settings_of_the_router_are_kept(unified, tmp_path):
    model = unified(context="sequence", form="moments", shared_lam=True, learn_lam=False, top_k=3)
    opened = AutoModelForCausalLM.from_pretrained(save_transformers(model, tmp_path / "delivered"))
    assert torch.equal(logits_of(opened), logits_of(model.backbone))
    assert len({id(layer.router.lam) for layer in opened.moe_layers}) == 1


@pytest.mark.parametrize("context", ["prompt", "sequence"])
def test_evidence_goes_there_and_back(context, unified, tokenizer, tmp_path):
    model = unified(context=context, form="evidence", top_k=3)
    expected = logits_of(model.backbone)
    assert torch.equal(logits_of(to_transformers(model)), expected)
    opened = AutoModelForCausalLM.from_pretrained(save_transformers(model, tmp_path / "delivered"))
    again = from_transformers(opened, tokenizer)
    for one in (opened, again.backbone):
        assert torch.equal(logits_of(one), expected)
        assert torch.equal(
            logits_of(one, TEXTS[1:], None), logits_of(model.backbone, TEXTS[1:], None)
        )
        assert torch.equal(logits_of(one), expected)
    for here, there in zip(again.layers, model.layers):
        assert torch.equal(here.router.center, there.router.center)
        assert torch.equal(here.router.scale, there.router.scale)
    assert [layer.router.looks for layer in again.layers] == [1, 2, 3]
    with again.only("law"), model.only("law"):
        assert torch.equal(logits_of(again.backbone), logits_of(model.backbone))
    with torch.no_grad():
        model.layers[0].router.scale.mul_(2)
    assert torch.equal(logits_of(again.backbone), expected)
    assert not torch.equal(logits_of(model.backbone), expected)


def test_delivering_keeps_the_attention_and_the_model(unified):
    model = unified()
    model.backbone.set_attn_implementation("eager")
    before = logits_of(model.backbone)
    theirs = to_transformers(model)
    assert theirs.backbone.model.layers[0].self_attn.config._attn_implementation == "eager"
    assert torch.equal(logits_of(model.backbone), before)
    theirs.resize_token_embeddings(101, mean_resizing=False)
    assert theirs.backbone.config.vocab_size == theirs.config.vocab_size == 101


def test_a_broken_delivery_leaves_what_was_there(unified, tmp_path, monkeypatch):
    model = unified()
    folder = save_transformers(model, tmp_path / "delivered")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with torch.no_grad():
        model.layers[0].a["gate_proj"].zero_()

    def full_disk(*arguments, **others):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(type(model.seed.tokenizer), "save_pretrained", full_disk)
        with pytest.raises(OSError, match="no space left"):
            save_transformers(model, folder)
    with torch.no_grad():
        model.layers[0].a["gate_proj"][0, 0] = torch.inf
    with pytest.raises(FloatingPointError, match="a.gate_proj of the unified model"):
        save_transformers(model, folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert [file.name for file in tmp_path.iterdir()] == ["delivered"]


ROWS = [["law"], ["seed", "medicine"]]
WRITE = dict(attention_mask=LEFT, max_new_tokens=5, min_new_tokens=5)


@pytest.mark.parametrize("context", ["prefix", "prompt", "sequence"])
def test_members_of_each_text_are_those_of_only_before_and_after(context, unified, tmp_path):
    model = unified(context=context, top_k=2)
    opened = AutoModelForCausalLM.from_pretrained(save_transformers(model, tmp_path / "delivered"))
    how = dict(use_cache=False) if context == "sequence" else {}
    with model.only(rows=ROWS):
        logits = logits_of(model.backbone)
        written = model.backbone.generate(TEXTS, **WRITE, **how)
        assert torch.equal(logits_of(to_transformers(model)), logits)
    for one in (to_transformers(model), opened):
        members = one.members(ROWS)
        assert torch.equal(logits_of(one, members=members), logits)
        assert torch.equal(one.generate(TEXTS, members=members, **WRITE, **how), written)
    assert not torch.equal(logits_of(model.backbone), logits)


def test_only_of_each_text_refuses_beams_which_are_more_texts(unified):
    model = unified()
    told = "this pass has 6 samples and 3 experts"
    with model.only(rows=ROWS), pytest.raises(ValueError, match=told):
        model.backbone.generate(TEXTS, num_beams=3, **WRITE)
    theirs = to_transformers(model)
    written = theirs.generate(TEXTS, members=theirs.members(ROWS), num_beams=3, **WRITE)
    for row, names in enumerate(ROWS):
        with model.only(*names):
            alone = model.backbone.generate(TEXTS, num_beams=3, **WRITE)
        assert torch.equal(written[row], alone[row])


def test_images_have_no_class_in_transformers(tiny_seed):
    with pytest.raises(ValueError, match="tiny is no language model"):
        to_transformers(UnifiedModel(tiny_seed, ["seed"], [0], [0.0]))


def test_a_model_that_was_added_to_does_not_come_back(tmp_path, tokenizer):
    model = build()
    inject_adapter_in_model(LoraConfig(target_modules=["gate_proj"]), model)
    with pytest.raises(ValueError, match="Merge adapters first"):
        from_transformers(model, tokenizer)
    shared().save_pretrained(tmp_path)
    parts = ["embed_tokens", "norm", "rotary_emb", "layers.0", "layers.1"]
    places = {f"backbone.model.{part}": "cpu" for part in parts} | {"backbone.lm_head": "cpu"}
    places["backbone.model.layers.2"] = "disk"
    away = AutoModelForCausalLM.from_pretrained(
        tmp_path, device_map=places, offload_folder=tmp_path / "offloaded"
    )
    with pytest.raises(ValueError, match="without quantisation and offloading"):
        dense_seed(away)


def test_a_pipeline_writes_text(unified, tmp_path):
    folder = save_transformers(unified(), tmp_path / "delivered")
    write = transformers.pipeline("text-generation", str(folder), device="cpu")
    write.tokenizer.padding_side = "left"
    texts = ["w3 w4 w5", "w6", "w7 w8"]
    options = dict(max_new_tokens=5, do_sample=False, return_full_text=False)
    alone = [write(text, **options)[0]["generated_text"] for text in texts]
    assert [found[0]["generated_text"] for found in write(texts, batch_size=3, **options)] == alone


# What others see of a folder


OPENED = """
import sys
from transformers import AutoTokenizer, PreTrainedTokenizerFast

folder = sys.argv[1]
ways = [
    PreTrainedTokenizerFast.from_pretrained(folder),
    AutoTokenizer.from_pretrained(folder, trust_remote_code=False),
    AutoTokenizer.from_pretrained(folder, trust_remote_code=True),
]
assert "harmomoe" not in sys.modules
import harmomoe
ways.append(AutoTokenizer.from_pretrained(folder))
print([way("w3 w5").input_ids for way in ways])
"""


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "silent"])
def test_nobody_is_asked_whether_a_tokenizer_may_be_opened(closed, unified, tmp_path):
    "Where nobody would answer."
    folder = save_transformers(unified(), tmp_path / "delivered")
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", OPENED, str(folder)],
        stdin=subprocess.DEVNULL if closed else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | dict(HF_HUB_OFFLINE="1", HF_MODULES_CACHE=str(tmp_path / "modules")),
    )
    try:
        process.wait(120)
        said = process.stdout.read()
    finally:
        process.kill()
        for pipe in filter(None, (process.stdin, process.stdout)):
            pipe.close()
    assert process.returncode == 0 and "[y/N]" not in said, said
    assert said.splitlines()[-1] == f"{[[6, 8]] * 4}", said


KNOWN = Card(
    base_model="org/base-1B",
    license="apache-2.0",
    licenses={"seed": "apache-2.0", "law": "mit"},
    sources={"law": "somebody/law-lora", "medicine": "a disk | of\nours"},
    about="For letters.",
)


def test_a_card_says_what_is_known_and_guesses_nothing(unified, tmp_path):
    folder = save_transformers(unified(), tmp_path / "delivered", KNOWN)
    card = ModelCard.load(folder / "README.md")
    assert card.data.base_model == ["org/base-1B", "somebody/law-lora"]
    assert card.data.to_dict()["base_model_relation"] == "merge"
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text-generation")
    assert {"moe", "lora", "merge", "harmomoe"} <= {*card.data.tags}
    assert card.data.license == "apache-2.0"
    rows = [line for line in card.text.splitlines() if line.startswith("| ")][1:]
    assert rows == [
        "| seed | none | apache-2.0 | the base model |",
        "| law | 4 | mit | somebody/law-lora |",
        "| medicine | 8 | unknown | a disk / of ours |",
    ]
    assert "For letters." in card.text


def test_a_card_without_knowledge_names_no_base_and_no_licence(unified):
    card = ModelCard(model_card(unified()))
    known = card.data.to_dict()
    assert known.keys() == {"library_name", "pipeline_tag", "tags"}
    assert card.text.count("unknown") == 5
    model = unified()
    model.seed.name = "org/base-1B"
    assert ModelCard(model_card(model)).data.base_model == ["org/base-1B"]
    model.seed.name = "somewhere/on/a/disk"
    assert ModelCard(model_card(model)).data.base_model is None


@pytest.mark.parametrize(
    "given, said",
    [
        (dict(license="Apache 2.0"), "license is 'Apache 2.0', but must be as the hub writes it"),
        (dict(licenses={"law": "MIT"}), "licenses say 'MIT' for law, but must be as the hub"),
        (dict(licenses={"law": ""}), "licenses say '' for law"),
    ],
)
def test_a_licence_that_the_hub_does_not_write_so_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        Card(**given)


def test_a_card_names_hub_repositories_once_and_without_revisions(unified):
    sources = {"law": "some/body@v1", "medicine": "some/body@v2"}
    card = ModelCard(model_card(unified(), Card("org/base@main", sources=sources)))
    assert card.data.base_model == ["org/base", "some/body"]
    assert "| law | 4 | unknown | some/body@v1 |" in card.text


def test_a_place_that_is_here_is_no_name_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hub_name("org/base-1B@v2") == "org/base-1B"
    (tmp_path / "org" / "base-1B").mkdir(parents=True)
    for place in ("org/base-1B", "embedded-text", "smollm2", "/org/base", "a/b/c"):
        assert hub_name(place) is None


@pytest.mark.parametrize("field", ["licenses", "sources"])
def test_a_card_for_who_is_not_there_is_refused_before_anything_is_written(
    field, unified, tmp_path
):
    with pytest.raises(ValueError, match="'cooking'; this model has seed, law, medicine"):
        save_transformers(unified(), tmp_path / "delivered", Card(**{field: {"cooking": "mit"}}))
    assert not (tmp_path / "delivered").exists()


def test_a_whole_sequence_writes_without_a_cache_by_itself(unified, tmp_path):
    model = unified(context="sequence", form="moments")
    opened = AutoModelForCausalLM.from_pretrained(save_transformers(model, tmp_path / "delivered"))
    written = opened.generate(TEXTS, **WRITE)
    assert torch.equal(written, opened.generate(TEXTS, use_cache=False, **WRITE))


class StandIn(BaseHTTPRequestHandler):
    "As much of the hub as an upload asks for; it keeps what comes."

    def log_message(self, *arguments):
        pass

    def answer(self, status=200, **value):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.server.asked.append(self.path)
        if self.path.startswith("/api/models/org/"):
            return self.answer(id="org/model", sha="0" * 40, siblings=[])
        self.send_response(404)
        self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def do_POST(self):
        data = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append(self.path)
        if self.path == "/api/repos/create":
            self.server.made.append(json.loads(data))
            return self.answer(url=f"{self.server.address}/org/model")
        if self.path == "/api/validate-yaml":
            self.server.cards.append(json.loads(data)["content"])
            return self.answer(errors=[], warnings=[])
        if "/preupload/" in self.path:
            files = json.loads(data)["files"]
            kept = [dict(path=x["path"], uploadMode="regular", shouldIgnore=False) for x in files]
            return self.answer(files=kept)
        assert "/commit/" in self.path, self.path
        for line in map(json.loads, data.splitlines()):
            if line["key"] == "file":
                value = line["value"]
                self.server.files[value["path"]] = base64.b64decode(value["content"])
        where = f"{self.server.address}/org/model/commit/{'1' * 40}"
        self.answer(success=True, commitUrl=where, commitOid="1" * 40)


@pytest.fixture
def hub(monkeypatch):
    "A local server in place of the hub."
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    server.address = f"http://127.0.0.1:{server.server_address[1]}"
    server.asked, server.made, server.cards, server.files = [], [], [], {}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.address)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    yield server
    server.shutdown()
    server.server_close()


def test_a_folder_goes_to_the_hub_as_it_is(unified, hub, tmp_path):
    folder = save_transformers(unified(), tmp_path / "delivered", KNOWN)
    where = push_to_hub(folder, "org/model", token="hf_none")
    assert where == f"{hub.address}/org/model/commit/{'1' * 40}"
    assert hub.files == {file.name: file.read_bytes() for file in folder.iterdir()}
    made = hub.made[0]
    assert (made["organization"], made["name"]) == ("org", "model")
    assert made.get("visibility") == "private" or made.get("private")
    assert hub.cards and hub.cards[0] == (folder / "README.md").read_text()
    (folder / "README.md").unlink()
    with pytest.raises(ValueError, match="has no README.md: write it with `save_transformers`"):
        push_to_hub(folder, "org/model", token="hf_none")


def test_the_models_own_way_to_the_hub_tags_it(hub):
    model = shared()
    model.push_to_hub("org/model", token="hf_none")
    code = {"context.py", "ffn.py", "language_model.py", "layer.py", "router.py"}
    assert code | {"config.json", "model.safetensors", "README.md"} <= hub.files.keys()
    tags = ModelCard(hub.files["README.md"].decode()).data.tags
    assert {"moe", "lora", "merge", "harmomoe"} <= {*tags}


def test_a_model_from_its_file_generates_and_is_not_saved_without_its_factors(unified, tmp_path):
    model = unified(top_k=2, context="prefix")
    stored = load_model(model.save(tmp_path / "model"), working_set=1)
    asked = dict(max_new_tokens=6, do_sample=False)
    found, expected = (to_transformers(m).generate(TEXTS, **asked) for m in (stored, model))
    assert torch.equal(found, expected)
    with pytest.raises(ValueError, match="cannot be saved with other weights"):
        save_transformers(stored, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()
    for name in ("law", "medicine"):  # one expert's map after the other can be taken out
        [here], [there] = (
            save_adapters(m, tmp_path / str(m is stored), name).values() for m in (stored, model)
        )
        file = "adapter_model.safetensors"
        assert (here / file).read_bytes() == (there / file).read_bytes()
