"The unified model as a model of transformers: contracts over the families of its seed."

import copy
import io
import os
import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
import transformers
from moe.small_unified import (
    EXPERTS,
    LEFT,
    SIZE,
    TEXTS,
    build,
    close,
    families,
    logits_of,
    shared,
)
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, LlamaConfig

from harmomoe.moe.context import cache_in
from harmomoe.moe.language_model import HarmoMoEConfig, HarmoMoEForCausalLM
from harmomoe.moe.merged import CACHE

WHOLE = dict(max_new_tokens=7, min_new_tokens=7)

compiles = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7),
    reason="this torch cannot trace the decorators of transformers",
)


@pytest.fixture(scope="module", autouse=True)
def _quiet():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)  # a second thread only slows so small a model down


# Writing with a cache


@families
@pytest.mark.parametrize("pieces", [[1] * 9, [4, 1, 1, 3]], ids=["tokens", "pieces"])
def test_with_a_cache_it_is_the_full_pass(family, pieces):
    model, kept, parts, start = shared(family), None, [], 0
    with torch.no_grad():
        for length in pieces:
            end = start + length
            texts, mask = TEXTS[:, start:end], LEFT[:, :end]
            part = model(texts, attention_mask=mask, cache=kept, use_cache=True)
            kept, start = cache_in(part), end
            parts.append(part.logits)
    real, at_once = LEFT.bool(), logits_of(model, use_cache=False)
    assert close(torch.cat(parts, 1)[real], at_once[real])


def test_a_cache_may_have_the_name_of_before():
    model, logits = shared(), []
    with torch.no_grad():
        for name in ("cache", "past_key_values"):
            kept = cache_in(model(TEXTS[:, :6], use_cache=True))
            logits.append(model(TEXTS[:, 6:], **{name: kept}).logits)
    assert torch.equal(*logits) and kept.get_seq_length() == 9


@families
@pytest.mark.parametrize(
    "how",
    [dict(), dict(do_sample=True, top_k=20), dict(num_beams=3), dict(num_beams=3, do_sample=True)],
    ids=["greedy", "sampled", "beams", "sampled beams"],
)
def test_it_writes_the_same_with_and_without_a_cache(family, how):
    model, written = shared(family), []
    for use_cache in (True, False):
        torch.manual_seed(0)
        settings = dict(attention_mask=LEFT, use_cache=use_cache) | WHOLE | how
        written.append(model.generate(TEXTS, **settings))
    assert torch.equal(*written)


@families
@pytest.mark.parametrize("form", ["logistic", "moments", "activation", "evidence"])
@pytest.mark.parametrize("how", [dict(), dict(num_beams=3)], ids=["greedy", "beams"])
def test_with_the_prompt_as_context_the_cache_keeps_what_the_first_pass_found(family, form, how):
    model, settings = build(family, context="prompt", form=form), WHOLE | how
    cached = model.generate(TEXTS, attention_mask=LEFT, **settings)
    settings |= dict(attention_mask=LEFT, prompt_mask=LEFT, use_cache=False)
    assert torch.equal(cached, model.generate(TEXTS, **settings))
    mask = torch.cat([LEFT, torch.ones(2, 7, dtype=torch.long)], 1)
    asked = torch.cat([LEFT, torch.zeros(2, 7, dtype=torch.long)], 1)
    full = logits_of(model, cached, mask, prompt_mask=asked, use_cache=False).clone()
    full[..., SIZE["eos_token_id"]] = -100.0  # which generation was not allowed
    if not how:
        assert torch.equal(full[:, 8:-1].argmax(-1), cached[:, 9:])
    answered = logits_of(model, cached, mask, use_cache=False)  # there the answer counts
    assert not close(full[..., 3:], answered[..., 3:])


def test_a_prompt_without_padding_is_the_same_with_and_without_a_cache():
    model, mask = build(context="prompt"), torch.ones_like(TEXTS)  # which `generate` drops
    settings = dict(attention_mask=mask, prompt_mask=mask) | WHOLE
    cached = model.generate(TEXTS, use_cache=True, **settings)
    assert torch.equal(cached, model.generate(TEXTS, use_cache=False, **settings))
    assert torch.equal(cached, model.generate(TEXTS, **WHOLE))


@pytest.mark.parametrize(
    "how",
    [dict(form="logistic"), dict(form="activation", cumulative=True)],
    ids=["each layer alone", "cumulative"],
)
def test_a_prefix_that_fades_does_so_in_a_cache_too(how, tmp_path):
    router = dict(context="prefix", **how)
    model, lasting = build(**router, horizon=2.0), build(**router)
    settings = dict(attention_mask=LEFT) | WHOLE
    cached = model.generate(TEXTS, use_cache=True, **settings)
    assert torch.equal(cached, model.generate(TEXTS, use_cache=False, **settings))
    assert not close(logits_of(model), logits_of(lasting))
    model.save_pretrained(tmp_path / "model")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(logits_of(again), logits_of(model))


def test_labels_tell_where_the_prompt_ends():
    model, labels = build(context="prompt"), TEXTS.clone()
    labels[:, :6] = -100
    asked = (labels == -100).long() * LEFT
    by_mask = logits_of(model, prompt_mask=asked, use_cache=False)
    assert torch.equal(logits_of(model, labels=labels, use_cache=False), by_mask)
    whole = logits_of(model, use_cache=False)
    assert not close(whole, by_mask)
    kept = cache_in(model(TEXTS, attention_mask=LEFT, prompt_mask=LEFT, use_cache=True))
    kept.crop(-3)
    again = model(TEXTS[:, 6:], attention_mask=LEFT, cache=kept, use_cache=True).logits
    assert close(again[LEFT[:, 6:].bool()], whole[:, 6:][LEFT[:, 6:].bool()])


def test_who_does_not_say_what_the_prompt_is_would_be_routed_by_what_follows():
    model, said = build(context="prompt"), "needs prompt_mask .* routed by what follows"
    with pytest.raises(ValueError, match=said):
        model(TEXTS, attention_mask=LEFT)
    with pytest.raises(ValueError, match=said):
        model.generate(TEXTS, attention_mask=LEFT, use_cache=False, max_new_tokens=2)
    model.generate(TEXTS, attention_mask=LEFT, max_new_tokens=2)  # which knows
    for labels in (TEXTS, TEXTS.masked_fill(LEFT == 0, -100)):  # only padding is left out
        with pytest.raises(ValueError, match="labels must be -100 for the prompt of each text"):
            model(TEXTS, attention_mask=LEFT, labels=labels)
    labels = TEXTS.clone()
    labels[0, :5] = -100  # of the second text all is predicted
    with pytest.raises(ValueError, match="all of one is predicted"):
        model(TEXTS, attention_mask=LEFT, labels=labels)


@families
def test_company_and_padding_change_nothing(family):
    model, real = shared(family), LEFT.bool()
    together, alone = logits_of(model), logits_of(model, TEXTS[:1, 3:], None)[0]
    assert close(together[0, 3:], alone)
    right_texts, right = TEXTS.clone(), LEFT.flip(1)
    right_texts[0] = TEXTS[0].roll(-3)
    assert close(logits_of(model, right_texts, right)[0, :6], alone)
    padding = torch.zeros(2, 5, dtype=torch.long)
    padded = logits_of(model, torch.cat([padding, TEXTS], 1), torch.cat([padding, LEFT], 1))
    assert close(padded[:, 5:][real], together[real])
    written = model.generate(TEXTS, attention_mask=LEFT, **WHOLE)
    assert torch.equal(written[0, 9:], model.generate(TEXTS[:1, 3:], **WHOLE)[0, 6:])


@families
def test_what_was_taken_back_leaves_no_trace(family):
    model, text = shared(family), TEXTS[1:]
    with torch.no_grad():
        kept = cache_in(model(text, use_cache=True, cache=DynamicCache()))
        kept.crop(-4)
        again = model(text[:, 5:], cache=kept).logits
    assert close(again, logits_of(model, text, None)[:, 5:])
    greedy = model.generate(text, **WHOLE)
    assert torch.equal(model.generate(text, prompt_lookup_num_tokens=3, **WHOLE), greedy)
    for assistant in (shared("olmo2"), build(family)):  # often wrong, always right
        assert torch.equal(model.generate(text, assistant_model=assistant, **WHOLE), greedy)


@families
def test_a_cache_can_be_reordered_copied_and_thinned_out(family):
    model = shared(family)
    with torch.no_grad():
        kept = cache_in(model(TEXTS[:, :6], attention_mask=LEFT[:, :6], use_cache=True))
        kept.batch_repeat_interleave(2)
        kept.reorder_cache(torch.tensor([3, 2, 1, 0]))
        kept.batch_select_indices(torch.tensor([0, 3]))
        rest = model(TEXTS[[1, 0], 6:], attention_mask=LEFT[[1, 0]], cache=kept).logits
    assert close(rest, logits_of(model)[[1, 0], 6:])


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_conversation_goes_on_from_its_cache(family):
    model, ones = shared(family), torch.ones(2, 9, dtype=torch.long)
    first = model.generate(TEXTS, attention_mask=LEFT, return_dict_in_generate=True, **WHOLE)
    texts = torch.cat([first.sequences, TEXTS[:, :2]], 1)
    settings = dict(attention_mask=torch.cat([LEFT, ones], 1)) | WHOLE
    again = model.generate(texts, **{CACHE: cache_in(first)}, **settings)
    assert torch.equal(again, model.generate(texts, **settings))


def test_it_writes_from_embeddings_and_after_a_prompt_in_chunks():
    model = shared()
    greedy = model.generate(TEXTS, attention_mask=LEFT, **WHOLE)
    embedded = model.get_input_embeddings()(TEXTS)
    written = model.generate(inputs_embeds=embedded, attention_mask=LEFT, **WHOLE)
    assert torch.equal(written, greedy[:, 9:])
    in_chunks = model.generate(TEXTS, attention_mask=LEFT, prefill_chunk_size=4, **WHOLE)
    assert torch.equal(in_chunks, greedy)


@families
@pytest.mark.parametrize("form", ["moments", "evidence"])
def test_the_whole_sequence_as_context_needs_no_cache(family, form):
    model = build(family, context="sequence", form=form)
    assert close(logits_of(model)[0, 3:], logits_of(model, TEXTS[:1, 3:], None)[0])
    told = "context='prefix' or 'prompt', or generate with use_cache=False"
    with pytest.raises(ValueError, match=told):
        model.generate(TEXTS, attention_mask=LEFT, **WHOLE)
    written = model.generate(TEXTS, attention_mask=LEFT, use_cache=False, **WHOLE)
    mask = torch.cat([LEFT, torch.ones(2, 6, dtype=torch.long)], 1)
    last = logits_of(model, written[:, :-1], mask)[:, -1]
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


# Members of each text


ROWS = [["law"], ["seed", "medicine"]]


@families
@pytest.mark.parametrize("context", ["prefix", "prompt", "sequence"])
def test_each_text_is_what_it_is_alone_with_its_members(family, context):
    model = build(family, context=context)
    free, together = logits_of(model), logits_of(model, members=model.members(ROWS))
    alone = logits_of(model, TEXTS[:1, 3:], None, members=model.members(ROWS[:1]))
    assert close(together[0, 3:], alone[0]) and not close(free[0, 3:], alone[0])
    alone = logits_of(model, TEXTS[1:], None, members=model.members(ROWS[1:]))
    assert close(together[1:], alone) and not close(free[1:], alone)
    everybody = model.members([EXPERTS["experts"]] * 2)
    assert torch.equal(logits_of(model, members=everybody), free)
    assert torch.equal(logits_of(model), free)  # nothing is kept


def test_switched_off_experts_have_no_part_in_a_text():
    model, members = build(top_k=3), build().members(ROWS)
    before = logits_of(model, members=members)
    with torch.no_grad():
        for layer in model.moe_layers:
            for b in layer.b.values():
                b[layer.owner == 1] += 1.0  # law
    after = logits_of(model, members=members)
    assert torch.equal(after[1], before[1]) and not close(after[0], before[0])


@pytest.mark.parametrize(
    "context, pieces", [("prefix", [1] * 9), ("prefix", [4, 1, 1, 3]), ("prompt", [4, 1, 1, 3])]
)
def test_members_with_a_cache_are_those_of_the_full_pass(context, pieces):
    model, kept, parts, start = build(context=context), None, [], 0
    members = model.members(ROWS)
    asked = torch.zeros_like(LEFT)
    asked[:, : pieces[0]] = LEFT[:, : pieces[0]]
    with torch.no_grad():
        for length in pieces:
            end = start + length
            texts, how = TEXTS[:, start:end], dict(attention_mask=LEFT[:, :end], use_cache=True)
            if context == "prompt" and not start:
                how["prompt_mask"] = LEFT[:, :end]
            part = model(texts, cache=kept, members=members, **how)
            kept, start = cache_in(part), end
            parts.append(part.logits)
    full = logits_of(model, members=members, prompt_mask=asked, use_cache=False)
    assert close(torch.cat(parts, 1)[LEFT.bool()], full[LEFT.bool()])


WAYS = dict(
    greedy={},
    beams=dict(num_beams=3),
    returned=dict(num_beams=3, num_return_sequences=2),
    chunks=dict(prefill_chunk_size=4),
)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("way", WAYS)
def test_each_text_is_written_as_it_is_alone_with_its_members(family, way):
    model, how = shared(family), WHOLE | WAYS[way]
    number = how.get("num_return_sequences", 1)
    settings = dict(attention_mask=LEFT, members=model.members(ROWS)) | how
    written = model.generate(TEXTS, **settings)
    if way != "chunks":
        assert torch.equal(written, model.generate(TEXTS, use_cache=False, **settings))
    assert not torch.equal(written, model.generate(TEXTS, attention_mask=LEFT, **how))
    for row, cut in enumerate((3, 0)):
        members = model.members(ROWS[row : row + 1])
        alone = model.generate(TEXTS[row : row + 1, cut:], members=members, **how)
        together = written[row * number : (row + 1) * number, cut:]
        assert torch.equal(together, alone)


def test_sampled_texts_have_members_too():
    model, how = shared(), dict(do_sample=True, num_return_sequences=3) | WHOLE
    written = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        settings = dict(attention_mask=LEFT, members=model.members(ROWS), use_cache=use_cache)
        written.append(model.generate(TEXTS, **settings, **how))
    assert torch.equal(*written) and written[0].shape == (6, 16)


def test_members_go_with_drafts_or_are_refused():
    model, text, members = shared(), TEXTS[1:], shared().members(ROWS[:1])
    greedy = model.generate(text, members=members, **WHOLE)
    for how in (dict(prompt_lookup_num_tokens=3), dict(assistant_model=shared("olmo2"))):
        assert torch.equal(model.generate(text, members=members, **how, **WHOLE), greedy)
    with pytest.raises(ValueError, match="members"):
        model.generate(text, members=members, assistant_model=model.backbone, **WHOLE)


def test_members_that_do_not_fit_are_one_clear_error():
    model = shared()
    members = model.members(ROWS)
    assert members.dtype == torch.bool
    assert members.tolist() == [[False, True, False], [True, False, True]]
    for wrong, told in (
        ([["law"], ["poetry", "law"]], "row 1: no expert 'poetry'; this model has seed, law"),
        ([[]], "row 0: give a list of names"),
        (["law"], "row 0: give a list of names"),
    ):
        with pytest.raises(ValueError, match=told):
            model.members(wrong)
    fits = r"given as \[2, 3\], but this pass has 1 samples and 3 experts"
    with pytest.raises(ValueError, match=fits):
        model(TEXTS[:1], members=members)
    with pytest.raises(ValueError, match=r"given as \[2, 2\]"):
        model.generate(TEXTS, members=members[:, 1:], **WHOLE)
    for wrong in (members[0], members & ~members, model.members([])):
        with pytest.raises(ValueError, match="at least one expert for each text"):
            model.generate(TEXTS, members=wrong, **WHOLE)
    assert torch.equal(logits_of(model), logits_of(build()))


@pytest.mark.parametrize("reentrant", [False, True], ids=["anew", "reentrant"])
def test_texts_with_members_teach_their_members_only(reentrant):
    model = build().train()
    members = model.members([["law"], ["law", "seed"]])
    how = dict(attention_mask=LEFT, labels=TEXTS.masked_fill(LEFT == 0, -100), members=members)

    def learnt():
        model.zero_grad()
        model(TEXTS, **how).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = learnt()
    for layer in model.moe_layers:
        law = layer.owner == 1
        for b in layer.b.values():
            assert b.grad[law].any() and not b.grad[~law].any()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
    found = learnt()
    assert all(close(found[name], expected[name]) for name in expected)


@compiles
def test_compiled_with_members_without_a_break():
    torch._dynamo.reset()
    model = shared()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    settings = dict(members=model.members(ROWS), use_cache=False)
    assert torch.equal(logits_of(compiled, **settings), logits_of(model, **settings))


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
    written, expected = (m.generate(TEXTS, attention_mask=LEFT, **WHOLE) for m in (again, model))
    assert torch.equal(written, expected)
    assert all(layer.router.active is None for layer in again.moe_layers)
    learning = [
        [name for name, p in m.named_parameters() if p.requires_grad] for m in (again, model)
    ]
    assert learning[0] == learning[1]
    assert {file.suffix for file in tmp_path.iterdir()} == {".json", ".py", ".safetensors"}


@families
def test_nothing_of_the_configuration_is_lost(family, tmp_path):
    special = dict(
        rms_norm_eps=1e-4,
        attention_dropout=0.1,
        rope_parameters=dict(rope_type="default", rope_theta=5e4),
    )
    router = dict(
        seed_expert=False,
        lam=0.25,
        learn_lam=False,
        shared_lam=True,
        norm_topk_prob=True,
        form="mean",
        top_k=3,
        context="prefix",
    )
    config = build(family, size=special, **router).config
    config.seed_settings = dict(name="somebody's")
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert (again.experts, again.ranks, again.scales) == tuple(EXPERTS.values())
    assert again.router == config.router and router.items() <= again.router.items()
    assert again.seed_settings == dict(name="somebody's") and again.vocab_size == SIZE["vocab_size"]
    told, kept = config.text_config.to_dict(), again.text_config.to_dict()
    del told["dtype"]
    assert {key: kept.get(key) for key in told} == told
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
    halved = [t for name, t in stored if t.is_floating_point() and ".router." not in name]
    assert {t.dtype for t in halved} == {torch.bfloat16}
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
    places = {f"backbone.model.{part}": "cpu" for part in parts} | {"backbone.lm_head": "cpu"}
    places["backbone.model.layers.1"] = "disk"
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path, device_map=places, offload_folder=tmp_path / "offloaded"
    )
    assert any(p.is_meta for p in again.moe_layers[1].parameters())
    assert torch.equal(logits_of(again), logits_of(shared(family)))
    settings = dict(attention_mask=LEFT) | WHOLE
    written = again.generate(TEXTS, **settings)
    assert torch.equal(written, shared(family).generate(TEXTS, **settings))


@pytest.mark.parametrize("context", ["prompt", "sequence"])
def test_saved_and_loaded_evidence_adds_up_as_before(context, tmp_path):
    model = build(context=context, form="evidence", top_k=3)
    expected = logits_of(model, prompt_mask=LEFT)
    model.save_pretrained(tmp_path / "model")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    before = None
    for layer, other in zip(again.moe_layers, model.moe_layers):
        assert layer.router.earlier == ([] if before is None else [before])
        assert torch.equal(layer.router.center, other.router.center)
        assert torch.equal(layer.router.scale, other.router.scale)
        before = layer.router
    assert torch.equal(logits_of(again, prompt_mask=LEFT), expected)
    alone = logits_of(again, TEXTS[:1, 3:], None)
    assert close(expected[0, 3:], alone[0])
    assert torch.equal(logits_of(again, prompt_mask=LEFT), expected)
    with torch.no_grad():
        again.moe_layers[0].router.scale.fill_(1.0)
    assert not close(logits_of(again, prompt_mask=LEFT)[0, 3:], expected[0, 3:])
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    router = half.moe_layers[1].router
    assert {x.dtype for x in router.state_dict().values()} == {torch.float32}
    assert torch.equal(router.center, model.moe_layers[1].router.center)
    places = {f"backbone.model.{part}": "cpu" for part in ("embed_tokens", "norm", "rotary_emb")}
    places |= {f"backbone.model.layers.{k}": ("cpu", "disk")[k == 1] for k in range(3)}
    there = dict(device_map=places | {"backbone.lm_head": "cpu"}, offload_folder=tmp_path / "disk")
    apart = AutoModelForCausalLM.from_pretrained(tmp_path / "model", **there)
    assert any(p.is_meta for p in apart.moe_layers[1].parameters())
    assert torch.equal(logits_of(apart, prompt_mask=LEFT), expected)


@pytest.mark.parametrize("context", ["prompt", "sequence"])
def test_densities_tell_members_of_a_language_model_apart(context, tmp_path):
    "Saved and loaded, with a cache and without."
    model = build(context=context, form="evidence", densities=True, top_k=3)
    expected = logits_of(model, prompt_mask=LEFT)
    assert not close(expected, logits_of(build(context=context, form="evidence", top_k=3)))
    model.save_pretrained(tmp_path / "model")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(logits_of(again, prompt_mask=LEFT), expected)
    members = model.members([["law"], ["seed", "medicine"]])
    told = [logits_of(one, prompt_mask=LEFT, members=members) for one in (model, again)]
    assert torch.equal(*told) and not close(told[0], expected)
    if context == "prompt":
        written = model.generate(TEXTS, attention_mask=LEFT, max_new_tokens=4, use_cache=True)
        asked = F.pad(LEFT, (0, 4))
        whole = model(written, attention_mask=F.pad(LEFT, (0, 4), value=1), prompt_mask=asked)
        assert torch.equal(whole.logits[:, 8:-1].argmax(-1), written[:, 9:])


@pytest.mark.parametrize("lost", ["router.center", "router.scale", "router.whiten"])
def test_a_folder_without_the_pools_units_is_refused(lost, tmp_path):
    how = dict(context="sequence", form="evidence", densities=True)
    build(**how).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights[f"backbone.model.layers.1.mlp.{lost}"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"lacks 1 weights of the model, for .*1.mlp.{lost}"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_shared_lambda_is_one_parameter_before_and_after(tmp_path):
    model = build(shared_lam=True, lam=0.5)
    with torch.no_grad():
        model.moe_layers[2].router.lam.fill_(0.75)
    model.save_pretrained(tmp_path)
    assert [name for name in load_file(tmp_path / "model.safetensors") if "lam" in name] == [
        "backbone.model.layers.0.mlp.router.lam"
    ]
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert len({id(layer.router.lam) for layer in again.moe_layers}) == 1
    assert torch.equal(logits_of(again), logits_of(model))
    assert sum("lam" in name for name, _ in again.named_parameters()) == 1
    again.tie_weights()
    again.save_pretrained(tmp_path / "again")
    twice = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(logits_of(twice), logits_of(model))


@pytest.mark.parametrize("learn", [True, False])
@pytest.mark.parametrize("form", ["logistic", "evidence"])
def test_a_fixed_lambda_stays_fixed(form, learn, tmp_path):
    "In the form 'evidence' there is nothing for it to learn."
    build(context="sequence", form=form, learn_lam=learn).save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    learning = {layer.router.lam.requires_grad for layer in again.moe_layers}
    assert learning == {learn and form == "logistic"}


@pytest.mark.parametrize(
    "lost",
    [
        "backbone.model.layers.1.mlp.a.gate_proj",
        "backbone.model.layers.0.mlp.router.vectors",
        "backbone.model.layers.2.mlp.ffn.down_proj.weight",
        "backbone.model.norm.weight",
    ],
)
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


@pytest.mark.parametrize(
    "change",
    [
        dict(ranks=[0, 4]),
        dict(scales=[1.0]),
        dict(router=dict(top_k=0)),
        dict(router=dict(context="future")),
    ],
)
def test_a_wrong_configuration_is_one_clear_error(change):
    told = "need a rank and a scale|top_k is 0|one of sequence, prefix, prompt"
    with pytest.raises(ValueError, match=told):
        HarmoMoEConfig(LlamaConfig(**SIZE), **EXPERTS | change)


NOWHERE = """
import sys

class Nowhere:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "harmomoe":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Nowhere())
"""
TWO_FOLDERS = """
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

given = load_file("inputs")
texts, mask = given["texts"], given["mask"]
opened = lambda folder: AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
logits = lambda model, **how: model(texts, attention_mask=mask, **how).logits.detach()
found = {}
for name in ("first", "second"):
    model = opened(name)
    found[f"{name}.served"] = logits(model, members=model.members([["law"], ["seed"]]))
    model.save_pretrained(f"{name} again")
    assert torch.equal(logits(model), logits(opened(f"{name} again")))
    assert AutoConfig.from_pretrained(name, trust_remote_code=True)
    settings = dict(attention_mask=mask, max_new_tokens=4, use_cache=name == "first")
    found |= {name: logits(model), f"{name}.written": model.generate(texts, **settings)}
    router = sys.modules[type(model.moe_layers[0].router).__module__]
    assert hasattr(router, "OF_SECOND") == (name == "second")
    model.save_pretrained(f"{name} again")
save_file(found, "outputs")
assert not any(name.split(".")[0] == "harmomoe" for name in sys.modules)
"""


def run_elsewhere(code, folder, *arguments):
    "In an isolated process whose caches lie in `folder`."
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    env |= dict(HF_MODULES_CACHE=str(folder / "modules"), HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    command = [sys.executable, "-I", "-c", code, *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


def test_a_folder_is_enough(tmp_path):
    """Without harmomoe, by the code in the folder: the same logits; saved from there, another
    such folder."""
    first = build("qwen3", tied=True, shared_lam=True)
    second = build("gemma2", context="sequence", form="evidence")
    for name, model in dict(first=first, second=second).items():
        model.save_pretrained(tmp_path / name)
    router = tmp_path / "second/router.py"
    router.write_text(router.read_text() + "\nOF_SECOND = True\n")
    save_file(dict(texts=TEXTS, mask=LEFT), tmp_path / "inputs")
    run_elsewhere(NOWHERE + TWO_FOLDERS, tmp_path)
    found = load_file(tmp_path / "outputs")
    for name, model in dict(first=first, second=second).items():
        assert torch.equal(found[name], logits_of(model))
        members = model.members([["law"], ["seed"]])
        assert torch.equal(found[f"{name}.served"], logits_of(model, members=members))
        settings = dict(attention_mask=LEFT, max_new_tokens=4, use_cache=name == "first")
        assert torch.equal(found[f"{name}.written"], model.generate(TEXTS, **settings))
        again = AutoModelForCausalLM.from_pretrained(tmp_path / f"{name} again")
        assert torch.equal(logits_of(again), logits_of(model))


# Training


def frozen_and_learning(model):
    "Copies of the parameters of either kind, by name."
    frozen, learning = {}, {}
    for name, p in model.named_parameters():
        (learning if p.requires_grad else frozen)[name] = p.detach().clone()
    return frozen, learning


@families
@pytest.mark.parametrize(
    "router", [dict(), dict(context="sequence", form="evidence")], ids=["lambdas", "evidence"]
)
def test_experts_and_routers_learn_and_the_seed_does_not(family, router):
    model = build(family, **router).train()
    frozen, learning = frozen_and_learning(model)
    if router:  # which has no lambda to learn
        frozen = {name: p for name, p in frozen.items() if not name.endswith(".router.lam")}
    assert all(".mlp.a." in name or ".mlp.b." in name or ".router." in name for name in learning)
    assert not any(".mlp.a." in name or ".mlp.b." in name or ".router." in name for name in frozen)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        model(TEXTS, attention_mask=LEFT, labels=TEXTS.masked_fill(LEFT == 0, -100)).loss.backward()
        optimizer.step()
    after = dict(model.named_parameters())
    assert all(torch.equal(after[name], p) for name, p in frozen.items())
    assert not any(torch.equal(after[name], p) for name, p in learning.items())


def trained(folder, steps, resume=False, **router):
    from transformers import Trainer, TrainingArguments

    rows = [
        dict(input_ids=text, attention_mask=mask, labels=text.masked_fill(mask == 0, -100))
        for text, mask in zip(TEXTS.repeat(4, 1), LEFT.repeat(4, 1))
    ]
    arguments = TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=2,
        save_steps=2,
        report_to=[],
        learning_rate=0.01,
        lr_scheduler_type="constant",
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
        gradient_checkpointing=True,
    )
    model = build(**router)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of dataloaders and of arguments to be renamed
        Trainer(model, arguments, train_dataset=rows).train(resume_from_checkpoint=resume)
    return model.eval()


@pytest.mark.parametrize("router", [dict(), dict(shared_lam=True)], ids=["lambdas", "one lambda"])
def test_trainer_trains_saves_and_resumes(router, tmp_path):
    frozen, learning = frozen_and_learning(build(**router))
    model = trained(tmp_path / "a", 2, **router)
    after = dict(model.named_parameters())
    assert all(torch.equal(after[name], p) for name, p in frozen.items())
    assert not any(torch.equal(after[name], p) for name, p in learning.items())
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "a/checkpoint-2")
    assert torch.equal(logits_of(saved), logits_of(model))
    resumed = trained(tmp_path / "a", 4, resume=True, **router)
    straight = trained(tmp_path / "b", 4, **router)
    assert torch.equal(logits_of(resumed), logits_of(straight))
    assert not torch.equal(logits_of(resumed), logits_of(model))


def gradients(model, *batches):
    "Of the summed losses of several passes, all of which come before the backward pass."
    model.zero_grad()
    losses = [
        model(texts, attention_mask=mask, labels=texts.masked_fill(mask == 0, -100)).loss
        for texts, mask in batches
    ]
    sum(losses).backward()
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
    learning = {name for name, p in model.named_parameters() if p.requires_grad}
    assert found.keys() == expected.keys() == learning
    assert all(close(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("reentrant", [False, True], ids=["anew", "reentrant"])
@pytest.mark.parametrize(
    "router",
    [
        dict(context="sequence", form="evidence"),
        dict(context="prefix", form="activation", cumulative=True),
    ],
    ids=["evidence", "cumulative"],
)
def test_evidence_of_layers_that_are_computed_apart_is_refused(router, reentrant):
    "Gradient checkpointing would lose, or mix up, what earlier layers said."
    model = build(**router).train()
    expected = gradients(model, (TEXTS, LEFT))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
        with pytest.raises(ValueError, match="adds up over the layers, and gradient checkpointing"):
            gradients(model, (TEXTS, LEFT))
        assert logits_of(model.eval()).isfinite().all()  # it is a matter of training alone
        model.gradient_checkpointing_disable()
    found = gradients(model.train(), (TEXTS, LEFT))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "targets",
    [["q_proj", "v_proj"], ["gate_proj", "up_proj", "down_proj"], "all-linear"],
    ids=["attention", "FFN", "all"],
)
def test_peft_on_top(targets, tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    config = LoraConfig(task_type="CAUSAL_LM", target_modules=targets, r=2)
    model = get_peft_model(build(), config)
    assert torch.equal(logits_of(model), logits_of(shared()))  # adapters start as nothing
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
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
    settings = dict(input_ids=TEXTS, attention_mask=LEFT) | WHOLE
    assert torch.equal(again.generate(**settings), model.generate(**settings))
    assert close(logits_of(again.merge_and_unload()), logits_of(model))


# As a module


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_resized_vocabulary(family, tied, tmp_path):
    model = build(family, tied)
    before = logits_of(model)
    model.resize_token_embeddings(101, mean_resizing=False)
    sizes = model.config.vocab_size, model.backbone.config.vocab_size
    assert (*sizes, model.backbone.lm_head.out_features) == (101, 101, 101)
    assert close(logits_of(model)[..., :97], before)
    texts = TEXTS.clone()
    texts[:, 4] = 100
    assert model(texts, attention_mask=LEFT, labels=texts).loss.isfinite()
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits_of(again, texts), logits_of(model, texts))


def pickled(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("form", ["logistic", "evidence"])
def test_a_copy_has_its_own_context(copied, form):
    router = dict(form=form, context="prefix" if form == "logistic" else "prompt")
    model = build(**router)
    asked = dict(prompt_mask=LEFT) if form == "evidence" else {}
    model(TEXTS, attention_mask=LEFT, **asked)  # with gradients, as in training
    again = copied(model)
    expected = logits_of(model)
    assert torch.equal(logits_of(again), expected)
    with torch.no_grad():
        for layer in model.moe_layers:
            layer.router.vectors.zero_()
    assert torch.equal(logits_of(again), expected) and not torch.equal(logits_of(model), expected)
    assert not any(layer.context for layer in (*model.moe_layers, *again.moe_layers))
    settings = dict(attention_mask=LEFT) | WHOLE
    fresh = build(**router)
    assert torch.equal(again.generate(TEXTS, **settings), fresh.generate(TEXTS, **settings))


@compiles
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_compiled_without_a_break(family):
    "The tracing is what can fail; what compilers make of it, the slow test below checks."
    torch._dynamo.reset()
    model = shared(family)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.equal(logits_of(compiled, use_cache=False), logits_of(model, use_cache=False))


@compiles
@pytest.mark.slow
def test_compiled_with_a_cache_and_for_training():
    torch._dynamo.reset()
    model = build()
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
    kept, parts = None, []
    with torch.no_grad():
        for start, end in ((0, 4), (4, 5), (5, 6), (6, 9)):
            texts, mask = TEXTS[:, start:end], LEFT[:, :end]
            part = compiled(texts, attention_mask=mask, cache=kept, use_cache=True)
            kept = cache_in(part)
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
    assert model.backbone.model.layers[0].self_attn.config._attn_implementation == attention
    assert close(logits_of(model)[LEFT.bool()], logits_of(shared())[LEFT.bool()])
    model.set_attn_implementation("eager")
    assert model.backbone.model.layers[0].self_attn.config._attn_implementation == "eager"


def test_outputs_are_those_of_transformers():
    found = shared()(TEXTS, attention_mask=LEFT, output_hidden_states=True, logits_to_keep=2)
    assert len(found.hidden_states) == 4 and found.logits.shape == (2, 2, 97)
    assert isinstance(shared()(TEXTS, return_dict=False), tuple)
    assert shared().get_decoder() is shared().backbone.model and shared().num_parameters() > 0


# What the routers said


def heard(model, run):
    "What `run` returns; and pi, weights and experts of each router call, in order."
    said, handles = [], []
    for layer in model.moe_layers:
        probabilities = layer.router.probabilities

        def kept(*inputs, call=probabilities):
            said.append([pi := call(*inputs)])
            return pi

        layer.router.probabilities = kept
        hook = lambda router, inputs, output: said[-1].extend(output)
        handles.append(layer.router.register_forward_hook(hook))
    try:
        return run(), said
    finally:
        for layer, handle in zip(model.moe_layers, handles):
            del layer.router.probabilities
            handle.remove()


@pytest.mark.parametrize("told", [False, True], ids=["all", "members"])
@pytest.mark.parametrize(
    "router",
    [
        {},
        dict(context="sequence", form="moments"),
        dict(form="activation"),
        dict(form="activation", cumulative=True),
        dict(context="prompt", form="evidence"),
    ],
    ids=["logistic", "moments", "activation", "cumulative", "evidence"],
)
def test_router_logits_are_what_the_routers_said(router, told):
    model = build(**router)
    before = logits_of(model)
    rows = [["law"], ["seed", "law", "medicine"]]
    how = dict(members=model.members(rows)) if told else {}
    how |= dict(prompt_mask=LEFT) if router.get("context") == "prompt" else {}
    plain = logits_of(model, **how)
    with torch.no_grad():
        ask = lambda: model(TEXTS, attention_mask=LEFT, output_router_logits=True, **how)
        found, said = heard(model, ask)
    assert torch.equal(found.logits, plain)
    assert [tuple(x.shape) for x in found.router_logits] == [(18, 3)] * 3
    for logits, (pi, *_) in zip(found.router_logits, said):
        assert torch.allclose(logits.softmax(-1), pi.flatten(0, 1), atol=1e-6)
    if told:
        off = found.router_logits[0].view(2, 9, 3).isinf()
        assert off[0].tolist() == [[True, False, True]] * 9 and not off[1].any()
    assert logits_of(model).equal(before) and "logits" not in vars(model.moe_layers[0].router)
    assert not hasattr(shared()(TEXTS), "router_logits")


def test_router_logits_come_in_a_tuple_with_a_cache_and_in_training():
    model = build()
    as_tuple = model(TEXTS, output_router_logits=True, return_dict=False)
    assert len(as_tuple[-1]) == 3 and as_tuple[-1][0].shape == (18, 3)
    kept, parts = None, []
    for t in range(9):
        one = model(TEXTS[:, t : t + 1], cache=kept, output_router_logits=True)
        kept = cache_in(one)
        parts.append(torch.stack(one.router_logits))
    at_once = torch.stack(as_tuple[-1]).view(3, 2, 9, 3)
    assert torch.allclose(torch.stack(parts, 2), at_once, atol=1e-4)
    loss = model.train()(TEXTS, labels=TEXTS, output_router_logits=True)
    torch.stack(loss.router_logits).square().mean().backward()
    assert all(layer.router.vectors.grad.abs().sum() > 0 for layer in model.moe_layers)


def test_a_router_that_fails_while_it_is_heard_is_itself_again(monkeypatch):
    model = build()
    with pytest.raises(ValueError, match="this pass has 2 samples"):
        model(TEXTS, members=model.members([["law"]]), output_router_logits=True)
    assert "logits" not in vars(model.moe_layers[0].router)
    assert torch.equal(logits_of(model), logits_of(shared()))


@pytest.mark.parametrize("told", [False, True], ids=["all", "members"])
@pytest.mark.parametrize(
    "router",
    [{}, dict(context="prompt"), dict(top_k=1), dict(norm_topk_prob=True), dict(top_k=3)],
    ids=str,
)
def test_shares_are_those_of_the_passes_that_wrote(router, told):
    model = build(**router)
    rows = [["law"], ["seed", "medicine"]]
    how = dict(members=model.members(rows)) if told else {}
    how |= dict(attention_mask=LEFT, max_new_tokens=8, return_dict_in_generate=True)
    write = lambda: model.generate(TEXTS, **how)
    first, second = write().sequences[:, 9:].tolist()
    end = next(token for token in first[1:7] if token not in (*first[:1], *second))
    model.generation_config.eos_token_id = [end, 1]  # so that the first text ends early
    output, said = heard(model, write)
    ends, steps = first.index(end) + 1, output.sequences.shape[1] - 9
    assert 1 < ends < steps == len(said) // 3
    wanted = torch.zeros(2, 3, dtype=torch.float64)
    for step, row in [(s, 0) for s in range(ends)] + [(s, 1) for s in range(steps)]:
        for _, weights, experts in said[3 * step : 3 * step + 3]:
            last = weights[row, -1].double()
            wanted[row].index_add_(0, experts[row, -1], last / last.sum())
    wanted /= 3 * torch.tensor([[ends], [steps]])
    found = model.expert_shares(output.sequences, LEFT, 9, how.get("members"))
    assert torch.allclose(found.double(), wanted, atol=1e-5)
    if told:
        assert found[0].tolist() == [0, 1, 0] and found[1, 1] == 0


def test_shares_of_many_texts_for_one_prompt_and_of_texts_that_were_read():
    model = build()
    members = model.members([["law"], ["medicine"]])
    how = dict(attention_mask=LEFT, members=members, do_sample=True, num_return_sequences=2)
    torch.manual_seed(0)
    written = model.generate(TEXTS, **WHOLE, **how)
    shares = model.expert_shares(written, LEFT, 9, members)
    assert shares.tolist() == [[0, 1, 0]] * 2 + [[0, 0, 1]] * 2
    read = model.expert_shares(TEXTS, LEFT)
    alone = model.expert_shares(TEXTS[:1, 3:])  # padding does not count
    assert torch.allclose(read[:1], alone, atol=1e-5)
    assert torch.allclose(read.sum(1), torch.ones(2))
    for length in (9, -1):
        with pytest.raises(ValueError, match="none is left"):
            model.expert_shares(TEXTS, LEFT, length)


def test_other_programs_find_the_class_by_its_name(tmp_path):
    shared().save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    kind = HarmoMoEForCausalLM
    assert config.architectures == [kind.__name__]
    code = (
        f"import transformers; from {kind.__module__} import {kind.__name__} as ours; "
        f"assert transformers.{kind.__name__} is ours"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
    assert torch.equal(logits_of(kind.from_pretrained(tmp_path)), logits_of(shared()))
    assert not kind.is_backend_compatible()  # they would mix the texts of a batch


# Seeds of fewer bits


def by_torch(model, folder, bits):
    "Linear maps in 8 bit, by what torch itself has."
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantise = torch.ao.quantization.quantize_dynamic
        return quantise(copy.deepcopy(model), {torch.nn.Linear}, dtype=torch.qint8)


def by_torchao(model, folder, bits):
    pytest.importorskip("torchao", reason="torchao is not installed")
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup

    groups = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))
    config = transformers.TorchAoConfig(Int8WeightOnlyConfig() if bits == 8 else groups)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)


def by_bitsandbytes(model, folder, bits):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    config = transformers.BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
    where = "cuda" if torch.cuda.is_available() else "cpu"
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, device_map=where
    )


QUANTISED = [
    (by_torch, 8),
    (by_torchao, 8),
    (by_torchao, 4),
    (by_bitsandbytes, 8),
    (by_bitsandbytes, 4),
]


@pytest.mark.parametrize("quantised, bits", QUANTISED)
def test_a_seed_of_fewer_bits_leaves_experts_and_routers_as_they_are(quantised, bits, tmp_path):
    wide = dict(hidden_size=64, intermediate_size=128, head_dim=32)  # bitsandbytes has blocks of 64
    model = build(size=wide | dict(initializer_range=0.1))
    model.save_pretrained(tmp_path)
    small = quantised(model, tmp_path, bits).eval()
    plain = small.moe_layers[0].ffn.gate_proj
    kept = getattr(plain, "weight", None)
    assert type(plain) is not torch.nn.Linear or type(kept) is not torch.nn.Parameter
    for ours, theirs in zip(model.moe_layers, small.moe_layers):
        for name, p in ours.named_parameters():
            if not name.startswith("ffn."):
                assert torch.equal(theirs.get_parameter(name).cpu(), p), name
    texts, mask = TEXTS.to(small.device), LEFT.to(small.device)
    found, expected = logits_of(small, texts, mask)[:, -1].cpu(), logits_of(model)[:, -1]
    allowed = {8: 0.3, 4: 0.7}[bits]  # random weights are the worst to round
    assert 0 < (found - expected).norm() < allowed * expected.norm()
    how = dict(attention_mask=mask, members=small.members([["law"], ["seed", "medicine"]]))
    written = small.generate(texts, **how, **WHOLE)
    assert written.shape == (2, 16)
    shares = small.expert_shares(written, mask, 9, how["members"]).cpu()
    assert shares[0].tolist() == [0, 1, 0] and shares[1, 1] == 0
    with pytest.raises(ValueError, match="load the model without quantisation"):
        small.generate(texts[1:], merged=True, **WHOLE)
