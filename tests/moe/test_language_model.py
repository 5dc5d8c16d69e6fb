"""The unified model as a model of transformers: one battery of contracts over the families of its seed."""

import copy
import io
import os
import pickle
import subprocess
import sys
import warnings
from functools import cache

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache, Gemma2Config, GemmaConfig,
                          LlamaConfig, MistralConfig, Olmo2Config, PreTrainedTokenizerFast, Qwen2Config, Qwen3Config)

from harmomoe.decoder import DecoderSeed
from harmomoe.exchange import dense_seed, from_transformers, save_transformers, to_transformers
from harmomoe.language_model import HarmoMoEConfig, HarmoMoEForCausalLM
from harmomoe.layer import RouterSettings
from harmomoe.moe import UnifiedModel

SIZE = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=.3, pad_token_id=0,
            bos_token_id=1, eos_token_id=2)
CONFIGS = dict(llama=(LlamaConfig, {}), qwen2=(Qwen2Config, {}), qwen3=(Qwen3Config, {}),
               mistral=(MistralConfig, dict(sliding_window=5)), olmo2=(Olmo2Config, {}), gemma=(GemmaConfig, {}),
               gemma2=(Gemma2Config, dict(sliding_window=5, query_pre_attn_scalar=8)))
EXPERTS = dict(experts=["seed", "law", "medicine"], ranks=[0, 4, 8], scales=[0., 2., 1.])
TOLERANCE = 1e-4  # of the largest number; rounding makes less than 1e-5, a wrong context more than 1e-2
TEXTS = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(1))
LEFT = torch.tensor([[0] * 3 + [1] * 6, [1] * 9])  # the first text has six tokens
WHOLE = dict(max_new_tokens=7, min_new_tokens=7)

families = pytest.mark.parametrize("family", CONFIGS)
compiles = pytest.mark.skipif(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7),
                              reason="this torch cannot trace the decorators of transformers")


@pytest.fixture(scope="module", autouse=True)
def _quiet():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)  # a second thread only slows so small a model down


def randomise(layers):
    """Experts that differ, and a router that prefers some."""
    with torch.no_grad():
        for layer in layers:
            for p in (*layer.a.values(), *layer.b.values(), layer.router.vectors, layer.router.biases):
                if p is not None:
                    p.normal_(std=.3)


def build(family="llama", tied=False, size=None, **router):
    """A unified model of its own for a test that changes it."""
    kind, special = CONFIGS[family]
    router = dict(top_k=2, context="prefix", initial="logistic", blend=.5) | router
    torch.manual_seed(0)
    text_config = kind(**SIZE | special | (size or {}), tie_word_embeddings=tied)
    model = HarmoMoEForCausalLM(HarmoMoEConfig(text_config, **EXPERTS, router=router)).eval()
    randomise(model.moe_layers)
    return model


@cache
def shared(family="llama"):
    """The same, for tests that don't change it."""
    return build(family)


def logits_of(model, texts=TEXTS, mask=LEFT, **others):
    with torch.no_grad():
        return model(texts, attention_mask=mask, **others).logits


def close(found, expected):
    return (found - expected).abs().max() <= TOLERANCE * expected.abs().max()


# Writing with a cache


@families
@pytest.mark.parametrize("pieces", [[1] * 9, [4, 1, 1, 3]], ids=["tokens", "pieces"])
def test_with_a_cache_it_is_the_full_pass(family, pieces):
    model, kept, parts, start = shared(family), None, [], 0
    with torch.no_grad():
        for length in pieces:
            end = start + length
            part = model(TEXTS[:, start:end], attention_mask=LEFT[:, :end], past_key_values=kept, use_cache=True)
            kept, start = part.past_key_values, end
            parts.append(part.logits)
    assert close(torch.cat(parts, 1)[LEFT.bool()], logits_of(model, use_cache=False)[LEFT.bool()])


@families
@pytest.mark.parametrize("how", [
    dict(), dict(do_sample=True, top_k=20), dict(num_beams=3), dict(num_beams=3, do_sample=True)],
    ids=["greedy", "sampled", "beams", "sampled beams"])
def test_it_writes_the_same_with_and_without_a_cache(family, how):
    model, written = shared(family), []
    for use_cache in (True, False):
        torch.manual_seed(0)
        written.append(model.generate(TEXTS, attention_mask=LEFT, use_cache=use_cache, **WHOLE, **how))
    assert torch.equal(*written)


@families
@pytest.mark.parametrize("initial", ["logistic", "moments"])
@pytest.mark.parametrize("how", [dict(), dict(num_beams=3)], ids=["greedy", "beams"])
def test_with_the_prompt_as_context_the_cache_keeps_what_the_first_pass_found(family, initial, how):
    model = build(family, context="prompt", initial=initial)
    cached = model.generate(TEXTS, attention_mask=LEFT, **WHOLE, **how)
    assert torch.equal(cached, model.generate(TEXTS, attention_mask=LEFT, prompt_mask=LEFT, use_cache=False, **WHOLE, **how))
    mask = torch.cat([LEFT, torch.ones(2, 7, dtype=torch.long)], 1)
    asked = torch.cat([LEFT, torch.zeros(2, 7, dtype=torch.long)], 1)
    full = logits_of(model, cached, mask, prompt_mask=asked, use_cache=False).clone()
    full[..., SIZE["eos_token_id"]] = -100.  # which generation was not allowed
    if not how: assert torch.equal(full[:, 8:-1].argmax(-1), cached[:, 9:])
    assert not close(full[..., 3:], logits_of(model, cached, mask, use_cache=False)[..., 3:])  # there the answer counts


def test_a_prompt_without_padding_is_the_same_with_and_without_a_cache():
    model, mask = build(context="prompt"), torch.ones_like(TEXTS)  # which `generate` drops
    cached, uncached = (model.generate(TEXTS, attention_mask=mask, prompt_mask=mask, use_cache=use_cache, **WHOLE)
                        for use_cache in (True, False))
    assert torch.equal(cached, uncached) and torch.equal(cached, model.generate(TEXTS, **WHOLE))


def test_labels_tell_where_the_prompt_ends():
    model, labels = build(context="prompt"), TEXTS.clone()
    labels[:, :6] = -100
    asked = (labels == -100).long() * LEFT
    assert torch.equal(logits_of(model, labels=labels, use_cache=False), logits_of(model, prompt_mask=asked, use_cache=False))
    whole = logits_of(model, use_cache=False)
    assert torch.equal(logits_of(model, labels=TEXTS, use_cache=False), whole)  # all is predicted: no prompt to go by
    kept = model(TEXTS, attention_mask=LEFT, use_cache=True).past_key_values
    kept.crop(-3)
    again = model(TEXTS[:, 6:], attention_mask=LEFT, past_key_values=kept, use_cache=True).logits
    assert close(again[LEFT[:, 6:].bool()], whole[:, 6:][LEFT[:, 6:].bool()])


@families
def test_company_and_padding_change_nothing(family):
    model = shared(family)
    right_texts, right = TEXTS.clone(), LEFT.flip(1)
    right_texts[0] = TEXTS[0].roll(-3)
    alone = logits_of(model, TEXTS[:1, 3:], None)[0]
    assert close(logits_of(model)[0, 3:], alone)
    assert close(logits_of(model, right_texts, right)[0, :6], alone)
    more = torch.cat([torch.zeros(2, 5, dtype=torch.long), TEXTS], 1)
    assert close(logits_of(model, more, torch.cat([torch.zeros(2, 5, dtype=torch.long), LEFT], 1))[:, 5:][LEFT.bool()],
                 logits_of(model)[LEFT.bool()])
    assert torch.equal(model.generate(TEXTS, attention_mask=LEFT, **WHOLE)[0, 9:],
                       model.generate(TEXTS[:1, 3:], **WHOLE)[0, 6:])


@families
def test_what_was_taken_back_leaves_no_trace(family):
    model, text = shared(family), TEXTS[1:]
    with torch.no_grad():
        kept = model(text, use_cache=True, past_key_values=DynamicCache()).past_key_values
        kept.crop(-4)
        again = model(text[:, 5:], past_key_values=kept).logits
    assert close(again, logits_of(model, text, None)[:, 5:])
    greedy = model.generate(text, **WHOLE)
    assert torch.equal(model.generate(text, prompt_lookup_num_tokens=3, **WHOLE), greedy)
    assert torch.equal(model.generate(text, assistant_model=shared("olmo2"), **WHOLE), greedy)  # often wrong
    assert torch.equal(model.generate(text, assistant_model=build(family), **WHOLE), greedy)  # always right


@families
def test_a_cache_can_be_reordered_copied_and_thinned_out(family):
    model = shared(family)
    with torch.no_grad():
        kept = model(TEXTS[:, :6], attention_mask=LEFT[:, :6], use_cache=True).past_key_values
        kept.batch_repeat_interleave(2)
        kept.reorder_cache(torch.tensor([3, 2, 1, 0]))
        kept.batch_select_indices(torch.tensor([0, 3]))
        rest = model(TEXTS[[1, 0], 6:], attention_mask=LEFT[[1, 0]], past_key_values=kept).logits
    assert close(rest, logits_of(model)[[1, 0], 6:])


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_conversation_goes_on_from_its_cache(family):
    model, ones = shared(family), torch.ones(2, 9, dtype=torch.long)
    first = model.generate(TEXTS, attention_mask=LEFT, return_dict_in_generate=True, **WHOLE)
    texts = torch.cat([first.sequences, TEXTS[:, :2]], 1)
    mask = torch.cat([LEFT, ones], 1)
    assert torch.equal(model.generate(texts, attention_mask=mask, past_key_values=first.past_key_values, **WHOLE),
                       model.generate(texts, attention_mask=mask, **WHOLE))


def test_it_writes_from_embeddings_and_after_a_prompt_in_chunks():
    model = shared()
    greedy = model.generate(TEXTS, attention_mask=LEFT, **WHOLE)
    embedded = model.get_input_embeddings()(TEXTS)
    assert torch.equal(model.generate(inputs_embeds=embedded, attention_mask=LEFT, **WHOLE), greedy[:, 9:])
    assert torch.equal(model.generate(TEXTS, attention_mask=LEFT, prefill_chunk_size=4, **WHOLE), greedy)


@families
def test_the_whole_sequence_as_context_needs_no_cache(family):
    model = build(family, context="sequence", initial="moments")
    assert close(logits_of(model)[0, 3:], logits_of(model, TEXTS[:1, 3:], None)[0])
    with pytest.raises(ValueError, match="context='prefix' or 'prompt', or generate with use_cache=False"):
        model.generate(TEXTS, attention_mask=LEFT, **WHOLE)
    written = model.generate(TEXTS, attention_mask=LEFT, use_cache=False, **WHOLE)
    last = logits_of(model, written[:, :-1], torch.cat([LEFT, torch.ones(2, 6, dtype=torch.long)], 1))[:, -1]
    last[:, 2] = -torch.inf  # the end of the text, which was forbidden
    assert torch.equal(written[:, -1], last.argmax(1))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_what_has_no_context_is_refused(family):
    model = shared(family)
    with pytest.raises(ValueError, match="leave cache_implementation out"):
        model.generate(TEXTS, attention_mask=LEFT, cache_implementation="static", **WHOLE)
    with pytest.raises(ValueError, match="several are packed into one"):
        model(TEXTS, cu_seq_lens_q=torch.tensor([0, 4, 9]))
    with pytest.raises(ValueError, match="DataParallel"):
        model._replicate_for_data_parallel()(TEXTS)


# Saving and loading


@families
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_saved_and_loaded_it_is_the_same(family, tied, tmp_path):
    model = build(family, tied)
    model.generation_config.repetition_penalty = 1.2
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is HarmoMoEForCausalLM and not again.training
    assert torch.equal(logits_of(again), logits_of(model))
    assert (again.get_input_embeddings().weight is again.get_output_embeddings().weight) == tied
    assert again.generation_config.repetition_penalty == 1.2
    assert torch.equal(again.generate(TEXTS, attention_mask=LEFT, **WHOLE),
                       model.generate(TEXTS, attention_mask=LEFT, **WHOLE))
    assert all(layer.router.active is None for layer in again.moe_layers)
    assert ([name for name, p in again.named_parameters() if p.requires_grad]
            == [name for name, p in model.named_parameters() if p.requires_grad])
    assert {file.suffix for file in tmp_path.iterdir()} == {".json", ".py", ".safetensors"}


@families
def test_nothing_of_the_configuration_is_lost(family, tmp_path):
    special = dict(rms_norm_eps=1e-4, attention_dropout=.1, rope_parameters=dict(rope_type="default", rope_theta=5e4))
    router = dict(seed_expert=False, blend=.25, learn_blend=False, shared_blend=True, renormalise=True, initial="mean",
                  top_k=3, context="prefix")
    config = build(family, size=special, **router).config
    config.seed_settings = dict(name="somebody's")
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert (again.experts, again.ranks, again.scales) == tuple(EXPERTS.values())
    assert again.router == config.router and router.items() <= again.router.items()
    assert again.seed_settings == dict(name="somebody's") and again.vocab_size == SIZE["vocab_size"]
    told, kept = config.text_config.to_dict(), again.text_config.to_dict()
    assert {key: kept.get(key) for key in told if key != "dtype"} == {k: v for k, v in told.items() if k != "dtype"}
    with pytest.raises(AttributeError, match="no attribute 'colour'"):
        again.colour


@families
def test_half_precision(family, tmp_path):
    build(family).save_pretrained(tmp_path / "full")
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "full", dtype=torch.bfloat16)
    assert half.dtype == half.config.text_config.dtype == logits_of(half).dtype == torch.bfloat16
    for name, p in half.named_parameters():  # near ties of the router are not decided by rounding
        assert p.dtype == (torch.float32 if ".router." in name else torch.bfloat16), name
    half.save_pretrained(tmp_path / "half")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert again.dtype == torch.bfloat16 and torch.equal(logits_of(again), logits_of(half))
    stored = load_file(tmp_path / "half/model.safetensors").items()
    assert {t.dtype for name, t in stored if t.is_floating_point() and ".router." not in name} == {torch.bfloat16}
    for model in (half, build(family).to(torch.bfloat16)):
        assert logits_of(model).isfinite().all() and logits_of(model).dtype == torch.bfloat16
        assert model.generate(TEXTS, attention_mask=LEFT, **WHOLE).shape == (2, 16)


@pytest.mark.parametrize("where", ["cpu", "auto", {"": "cpu"}])
def test_device_map(where, tmp_path):
    shared().save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=where).to("cpu")
    assert torch.equal(logits_of(again), logits_of(shared()))


@families
def test_layers_may_lie_on_disk(family, tmp_path):
    shared(family).save_pretrained(tmp_path)
    parts = ["embed_tokens", "norm", "rotary_emb", "layers.0", "layers.1", "layers.2"]
    places = {f"seed.model.{part}": "disk" if part.endswith("1") else "cpu" for part in parts} | {"seed.lm_head": "cpu"}
    again = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=places, offload_folder=tmp_path / "offloaded")
    assert any(p.is_meta for p in again.moe_layers[1].parameters())
    assert torch.equal(logits_of(again), logits_of(shared(family)))
    assert torch.equal(again.generate(TEXTS, attention_mask=LEFT, **WHOLE),
                       shared(family).generate(TEXTS, attention_mask=LEFT, **WHOLE))


def test_a_shared_lambda_is_one_parameter_before_and_after(tmp_path):
    model = build(shared_blend=True, blend=.5)
    with torch.no_grad():
        model.moe_layers[2].router.blend.fill_(.75)
    model.save_pretrained(tmp_path)
    assert [name for name in load_file(tmp_path / "model.safetensors") if "blend" in name] == [
        "seed.model.layers.0.mlp.router.blend"]
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert len({id(layer.router.blend) for layer in again.moe_layers}) == 1
    assert torch.equal(logits_of(again), logits_of(model))
    assert sum("blend" in name for name, _ in again.named_parameters()) == 1
    again.tie_weights()
    again.save_pretrained(tmp_path / "again")
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "again")), logits_of(model))


@pytest.mark.parametrize("learn", [True, False])
def test_a_fixed_lambda_stays_fixed(learn, tmp_path):
    build(learn_blend=learn).save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {layer.router.blend.requires_grad for layer in again.moe_layers} == {learn}


@pytest.mark.parametrize("lost", ["seed.model.layers.1.mlp.a.gate_proj", "seed.model.layers.0.mlp.router.vectors",
                                  "seed.model.layers.2.mlp.ffn.down_proj.weight", "seed.model.norm.weight"])
def test_a_folder_without_a_weight_is_refused(lost, tmp_path):
    shared().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights[lost]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"lacks 1 weights of the model, for example {lost}"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_loading_reports_what_it_did_if_asked(tmp_path):
    shared().save_pretrained(tmp_path)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()) and torch.equal(logits_of(model), logits_of(shared()))


@pytest.mark.parametrize("change", [dict(ranks=[0, 4]), dict(scales=[1.]), dict(router=dict(top_k=0)),
                                    dict(router=dict(context="future"))])
def test_a_wrong_configuration_is_one_clear_error(change):
    with pytest.raises(ValueError, match="need a rank and a scale|top_k is 0|none of sequence, prefix, prompt"):
        HarmoMoEConfig(LlamaConfig(**SIZE), **EXPERTS | change)


NOWHERE = """
import sys
class Nowhere:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "harmomoe": raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Nowhere())
"""


def run_elsewhere(code, folder, *arguments):
    """In an isolated process whose caches lie in `folder`."""
    outer = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    env = outer | dict(HF_MODULES_CACHE=str(folder / "modules"), HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    run = subprocess.run([sys.executable, "-I", "-c", code, *map(str, arguments)], capture_output=True, text=True,
                         cwd=folder, env=env)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


def test_a_folder_is_enough(tmp_path):
    """Without harmomoe, by the code in the folder: the same logits; saved from there, another such folder."""
    first, second = build("qwen3", tied=True, shared_blend=True), build("gemma2", context="sequence")
    for name, model in dict(first=first, second=second).items():
        model.save_pretrained(tmp_path / name)
    (tmp_path / "second/router.py").write_text((tmp_path / "second/router.py").read_text() + "\nOF_SECOND = True\n")
    save_file(dict(texts=TEXTS, mask=LEFT), tmp_path / "inputs")
    code = NOWHERE + """
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
given = load_file("inputs")
def logits(model): return model(given["texts"], attention_mask=given["mask"]).logits.detach()
found = {}
for name in ("first", "second"):
    model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True)
    model.save_pretrained(f"{name} again")
    again = AutoModelForCausalLM.from_pretrained(f"{name} again", trust_remote_code=True)
    assert torch.equal(logits(model), logits(again)) and AutoConfig.from_pretrained(name, trust_remote_code=True)
    found |= {name: logits(model), f"{name}.written": model.generate(given["texts"], attention_mask=given["mask"],
                                                                     max_new_tokens=4, use_cache=name == "first")}
    assert hasattr(sys.modules[type(model.moe_layers[0].router).__module__], "OF_SECOND") == (name == "second")
    model.save_pretrained(f"{name} again")
save_file(found, "outputs")
assert not any(name.split(".")[0] == "harmomoe" for name in sys.modules)
"""
    run_elsewhere(code, tmp_path)
    found = load_file(tmp_path / "outputs")
    for name, model in dict(first=first, second=second).items():
        assert torch.equal(found[name], logits_of(model))
        assert torch.equal(found[f"{name}.written"], model.generate(TEXTS, attention_mask=LEFT, max_new_tokens=4,
                                                                    use_cache=name == "first"))
        again = AutoModelForCausalLM.from_pretrained(tmp_path / f"{name} again")
        assert torch.equal(logits_of(again), logits_of(model))


# Training


def frozen_and_learning(model):
    return [{name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad == learns}
            for learns in (False, True)]


@families
def test_experts_and_routers_learn_and_the_seed_does_not(family):
    model = build(family).train()
    frozen, learning = frozen_and_learning(model)
    assert all(".mlp.a." in name or ".mlp.b." in name or ".router." in name for name in learning)
    assert not any(".mlp.a." in name or ".mlp.b." in name or ".router." in name for name in frozen)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=.01)
    for _ in range(2):
        optimizer.zero_grad()
        model(TEXTS, attention_mask=LEFT, labels=TEXTS.masked_fill(LEFT == 0, -100)).loss.backward()
        optimizer.step()
    after = dict(model.named_parameters())
    assert all(torch.equal(after[name], p) for name, p in frozen.items())
    assert not any(torch.equal(after[name], p) for name, p in learning.items())


def trained(folder, steps, resume=False, **router):
    from transformers import Trainer, TrainingArguments
    rows = [dict(input_ids=text, attention_mask=mask, labels=text.masked_fill(mask == 0, -100))
            for text, mask in zip(TEXTS.repeat(4, 1), LEFT.repeat(4, 1))]
    arguments = TrainingArguments(folder, max_steps=steps, per_device_train_batch_size=2, save_steps=2, report_to=[],
                                  learning_rate=.01, lr_scheduler_type="constant", use_cpu=True, disable_tqdm=True,
                                  logging_strategy="no", gradient_checkpointing=True)
    model = build(**router)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of dataloaders and of arguments to be renamed
        Trainer(model, arguments, train_dataset=rows).train(resume_from_checkpoint=resume)
    return model.eval()


@pytest.mark.parametrize("router", [dict(), dict(shared_blend=True)], ids=["lambdas", "one lambda"])
def test_trainer_trains_saves_and_resumes(router, tmp_path):
    (frozen, learning), model = frozen_and_learning(build(**router)), trained(tmp_path / "a", 2, **router)
    after = dict(model.named_parameters())
    assert all(torch.equal(after[name], p) for name, p in frozen.items())
    assert not any(torch.equal(after[name], p) for name, p in learning.items())
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "a/checkpoint-2")
    assert torch.equal(logits_of(saved), logits_of(model))
    resumed, straight = trained(tmp_path / "a", 4, resume=True, **router), trained(tmp_path / "b", 4, **router)
    assert torch.equal(logits_of(resumed), logits_of(straight))
    assert not torch.equal(logits_of(resumed), logits_of(model))


def gradients(model, *batches):
    """Of the summed losses of several passes, all of which come before the backward pass."""
    model.zero_grad()
    sum(model(texts, attention_mask=mask, labels=texts.masked_fill(mask == 0, -100)).loss
        for texts, mask in batches).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@families
@pytest.mark.parametrize("reentrant", [False, True], ids=["anew", "reentrant"])
@pytest.mark.parametrize("context", ["prefix", "sequence"])
def test_gradient_checkpointing_changes_no_gradient(family, reentrant, context):
    model = build(family, context=context).train()
    passes = [(TEXTS, LEFT), (TEXTS[:1, 3:], LEFT[:1, 3:]), (TEXTS.flip(0), LEFT.flip(1))]
    expected = gradients(model, *passes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
    found = gradients(model, *passes)
    assert found.keys() == expected.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    assert all(close(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["gate_proj", "up_proj", "down_proj"], "all-linear"],
                         ids=["attention", "FFN", "all"])
def test_peft_on_top(targets, tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=targets, r=2)
    model = get_peft_model(build(), config)
    assert torch.equal(logits_of(model), logits_of(shared()))  # adapters start as nothing
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=.05)
    before = {name: p.clone() for name, p in model.named_parameters()}
    for _ in range(2):
        optimizer.zero_grad()
        model(TEXTS, attention_mask=LEFT, labels=TEXTS).loss.backward()
        optimizer.step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if "lora_" in name}
    model.eval().save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(build(), tmp_path)
    assert torch.equal(logits_of(again), logits_of(model))
    assert torch.equal(again.generate(input_ids=TEXTS, attention_mask=LEFT, **WHOLE),
                       model.generate(input_ids=TEXTS, attention_mask=LEFT, **WHOLE))
    assert close(logits_of(again.merge_and_unload()), logits_of(model))


# As a module


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_resized_vocabulary(family, tied, tmp_path):
    model = build(family, tied)
    before = logits_of(model)
    model.resize_token_embeddings(101, mean_resizing=False)
    assert model.config.vocab_size == model.seed.config.vocab_size == model.seed.lm_head.out_features == 101
    assert close(logits_of(model)[..., :97], before)
    texts = TEXTS.clone()
    texts[:, 4] = 100
    assert model(texts, attention_mask=LEFT, labels=texts).loss.isfinite()
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    model.save_pretrained(tmp_path)
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path), texts), logits_of(model, texts))


def pickled(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_has_its_own_context(copied):
    model = build()
    again = copied(model)
    expected = logits_of(model)
    assert torch.equal(logits_of(again), expected)
    with torch.no_grad():
        for layer in model.moe_layers:
            layer.router.vectors.zero_()
    assert torch.equal(logits_of(again), expected) and not torch.equal(logits_of(model), expected)
    assert not any(layer.context for layer in (*model.moe_layers, *again.moe_layers))
    assert torch.equal(again.generate(TEXTS, attention_mask=LEFT, **WHOLE),
                       shared().generate(TEXTS, attention_mask=LEFT, **WHOLE))


@compiles
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_compiled_without_a_break(family):
    """The tracing is what can fail; what compilers make of it, the slow test below checks."""
    torch._dynamo.reset()
    model = shared(family)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.equal(logits_of(compiled, use_cache=False), logits_of(model, use_cache=False))


@compiles
@pytest.mark.slow
def test_compiled_with_a_cache_and_for_training():
    torch._dynamo.reset()
    model = build()
    compiled, kept, parts = torch.compile(model, fullgraph=True, backend="eager", dynamic=True), None, []
    with torch.no_grad():
        for start, end in ((0, 4), (4, 5), (5, 6), (6, 9)):
            part = compiled(TEXTS[:, start:end], attention_mask=LEFT[:, :end], past_key_values=kept, use_cache=True)
            kept = part.past_key_values
            parts.append(part.logits)
    assert close(torch.cat(parts, 1)[LEFT.bool()], logits_of(model)[LEFT.bool()])
    model.train()
    expected, found = gradients(model, (TEXTS, LEFT)), gradients(compiled, (TEXTS, LEFT))
    assert all(close(found[f"_orig_mod.{name}"], expected[name]) for name in expected)


@compiles
@pytest.mark.slow
@families
def test_compiled_by_inductor(family):
    torch._dynamo.reset()
    compiled = torch.compile(shared(family), fullgraph=True)
    assert close(logits_of(compiled, use_cache=False), logits_of(shared(family), use_cache=False))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_is_the_one_asked_for(attention, tmp_path):
    shared().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=attention)
    assert model.seed.model.layers[0].self_attn.config._attn_implementation == attention
    assert close(logits_of(model)[LEFT.bool()], logits_of(shared())[LEFT.bool()])
    model.set_attn_implementation("eager")
    assert model.seed.model.layers[0].self_attn.config._attn_implementation == "eager"


def test_outputs_are_those_of_transformers():
    found = shared()(TEXTS, attention_mask=LEFT, output_hidden_states=True, logits_to_keep=2)
    assert len(found.hidden_states) == 4 and found.logits.shape == (2, 2, 97)
    assert isinstance(shared()(TEXTS, return_dict=False), tuple)
    assert shared().get_decoder() is shared().seed.model and shared().num_parameters() > 0


# Out of this library, and back


TOKENIZER_WORDS = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(94))]


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(TOKENIZER_WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


@pytest.fixture
def unite(tokenizer):
    """A function (family, ...) -> a UnifiedModel of this library."""
    def made(family="llama", tied=False, dtype=torch.float32, **router):
        kind, special = CONFIGS[family]
        torch.manual_seed(0)
        dense = AutoModelForCausalLM.from_config(kind(**SIZE | special, tie_word_embeddings=tied), dtype=dtype)
        dense.generation_config.repetition_penalty = 1.2
        seed = DecoderSeed(dense, tokenizer, "tiny", scoring="text", loss_on="all", max_length=33)
        router = dict(context="prefix", initial="logistic", top_k=2) | router
        model = UnifiedModel(seed, *EXPERTS.values(), RouterSettings(**router))
        randomise(model.layers)
        return model
    return made


@families
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_there_and_back(family, tied, unite, tokenizer, tmp_path):
    model = unite(family, tied)
    theirs = to_transformers(model)
    assert {id(t) for t in theirs.state_dict(keep_vars=True).values()} == {
        id(t) for t in model.tower.state_dict(keep_vars=True).values()}
    assert torch.equal(logits_of(theirs), logits_of(model.tower)) and not theirs.training
    assert theirs.generation_config.repetition_penalty == 1.2
    save_transformers(model, tmp_path / "delivered")
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "delivered")
    assert torch.equal(logits_of(opened), logits_of(model.tower))
    assert AutoTokenizer.from_pretrained(tmp_path / "delivered")("w3 w5").input_ids == tokenizer("w3 w5").input_ids
    again = from_transformers(opened, tokenizer)
    assert again.seed.identity == model.seed.identity and again.seed.max_length == 33
    assert (again.experts, again.ranks, again.scales, again.settings) == (model.experts, model.ranks, model.scales,
                                                                        model.settings)
    assert (again.seed.model.get_input_embeddings().weight is again.seed.model.get_output_embeddings().weight) == tied
    assert torch.equal(logits_of(again.seed.model), logits_of(model.seed.model))  # no hook is left
    assert torch.equal(logits_of(again.tower), logits_of(model.tower))
    with again.only("law"), model.only("law"):
        assert torch.equal(logits_of(again.tower), logits_of(model.tower))
    assert again.parameter_groups() == model.parameter_groups()
    assert from_transformers(opened, tokenizer, name="other", max_length=20).seed.name == "other"
    with torch.no_grad():
        again.layers[0].a["gate_proj"].zero_()
    assert torch.equal(logits_of(opened), logits_of(model.tower))  # experts were copied


def test_a_delivered_model_of_mixed_precision_keeps_its_logits(unite, tmp_path):
    model = unite(dtype=torch.bfloat16)
    assert {p.dtype for p in model.tower.parameters()} == {torch.bfloat16, torch.float32}
    opened = AutoModelForCausalLM.from_pretrained(save_transformers(model, tmp_path / "delivered"))
    assert torch.equal(logits_of(opened), logits_of(model.tower))


def test_delivered_settings_of_the_router_are_kept(unite, tmp_path):
    model = unite(context="sequence", initial="moments", shared_blend=True, learn_blend=False, top_k=3)
    opened = AutoModelForCausalLM.from_pretrained(save_transformers(model, tmp_path / "delivered"))
    assert torch.equal(logits_of(opened), logits_of(model.tower))
    assert len({id(layer.router.blend) for layer in opened.moe_layers}) == 1


def test_delivering_keeps_the_attention_and_the_model(unite):
    model = unite()
    model.tower.set_attn_implementation("eager")
    before = logits_of(model.tower)
    theirs = to_transformers(model)
    assert theirs.seed.model.layers[0].self_attn.config._attn_implementation == "eager"
    assert torch.equal(logits_of(model.tower), before)
    theirs.resize_token_embeddings(101, mean_resizing=False)
    assert theirs.seed.config.vocab_size == theirs.config.vocab_size == 101


def test_a_broken_delivery_leaves_what_was_there(unite, tmp_path, monkeypatch):
    model = unite()
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


def test_images_have_no_class_in_transformers(tiny_seed):
    with pytest.raises(ValueError, match="tiny is no language model"):
        to_transformers(UnifiedModel(tiny_seed, ["seed"], [0], [0.]))


def test_a_model_that_was_added_to_does_not_come_back(tmp_path, tokenizer):
    from peft import LoraConfig
    model = build()
    model.add_adapter(LoraConfig(target_modules=["gate_proj"]))
    with pytest.raises(ValueError, match="Merge adapters first"):
        from_transformers(model, tokenizer)
    shared().save_pretrained(tmp_path)
    places = {f"seed.model.{part}": "cpu" for part in ("embed_tokens", "norm", "rotary_emb", "layers.0", "layers.1")}
    away = AutoModelForCausalLM.from_pretrained(tmp_path, offload_folder=tmp_path / "offloaded", device_map=places | {
        "seed.lm_head": "cpu", "seed.model.layers.2": "disk"})
    with pytest.raises(ValueError, match="without quantisation and offloading"):
        dense_seed(away)


def test_a_pipeline_writes_text(unite, tmp_path):
    folder = save_transformers(unite(), tmp_path / "delivered")
    write = transformers.pipeline("text-generation", str(folder), device="cpu")
    write.tokenizer.padding_side = "left"
    texts = ["w3 w4 w5", "w6", "w7 w8"]
    options = dict(max_new_tokens=5, do_sample=False, return_full_text=False)
    alone = [write(text, **options)[0]["generated_text"] for text in texts]
    assert [found[0]["generated_text"] for found in write(texts, batch_size=3, **options)] == alone
