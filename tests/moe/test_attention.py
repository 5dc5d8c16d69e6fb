"Experts of attention: they do as the MoE layer before has decided, in every family of seeds."

import copy
import warnings

import pytest
import torch
from moe.small_unified import EXPERTS, LEFT, TEXTS, build, close, families, logits_of
from torch import nn

from harmomoe.moe.attention import LowRankLinear, find_attention, route_attention
from harmomoe.moe.context import cache_in
from harmomoe.moe.language_model import HarmoMoEForCausalLM

ALL = ["q_proj", "k_proj", "v_proj", "o_proj"]
parts = pytest.mark.parametrize("names", [["q_proj", "v_proj"], ALL], ids=["qv", "qkvo"])


@pytest.fixture(autouse=True)
def _quiet():
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


@torch.no_grad()
def merged(model, expert):
    "A copy in which one expert's changes of attention are part of the weights."
    dense, mine = copy.deepcopy(model), model.moe_layers[0].owner == expert
    for part in dense.attention_maps:
        part.linear.weight += model.config.scales[expert] * part.b[mine].T @ part.a[mine]
        part.b.zero_()
    return dense


@families
@parts
def test_who_is_alone_is_itself_in_all_layers(family, names):
    model = build(family, attention=names)
    without = logits_of(build(family), members=model.members([["law"]] * 2))
    for expert, name in enumerate(EXPERTS["experts"]):
        members = model.members([[name], [name]])
        found = logits_of(model, members=members)
        assert close(
            found[LEFT.bool()], logits_of(merged(model, expert), members=members)[LEFT.bool()]
        )
        assert name == "seed" or not close(found, without)


@pytest.mark.parametrize("router", [dict(top_k=1), dict(top_k=2), dict(top_k=3, lam=0.0)])
def test_each_token_meets_the_experts_of_the_layer_before(router):
    model, seen = build(attention=["q_proj", "o_proj"], **router), []
    layers = model.moe_layers
    for layer in layers:
        layer.router.register_forward_hook(lambda part, given, made: seen.append(made))
    for part in model.attention_maps:
        part.register_forward_hook(lambda part, given, y: seen.append((part, given[0], y)))
    logits_of(model)
    per_layer = [seen[i : i + 3] for i in range(0, len(seen), 3)]  # q, o, router
    for number, (*maps, _) in enumerate(per_layer):
        for part, x, y in maps:
            expected = part.linear(x)
            shares = torch.full((*x.shape[:2], 3), 1 / 3)
            if number:
                weights, chosen = per_layer[number - 1][2]
                shares = torch.zeros(*x.shape[:2], 3).scatter(-1, chosen, weights)
            for p, scale in enumerate(EXPERTS["scales"]):
                mine = layers[number].owner == p
                change = scale * x @ part.a[mine].T @ part.b[mine]
                expected = expected + shares[..., p : p + 1] * change
            assert close(y, expected)


@families
@parts
@pytest.mark.parametrize("pieces", [[1] * 9, [4, 1, 1, 3]], ids=["tokens", "pieces"])
def test_with_a_cache_it_is_the_full_pass(family, names, pieces):
    model, kept, found, start = build(family, attention=names), None, [], 0
    with torch.no_grad():
        for length in pieces:
            end = start + length
            texts, mask = TEXTS[:, start:end], LEFT[:, :end]
            part = model(texts, attention_mask=mask, cache=kept, use_cache=True)
            kept, start = cache_in(part), end
            found.append(part.logits)
    real, at_once = LEFT.bool(), logits_of(model, use_cache=False)
    assert close(torch.cat(found, 1)[real], at_once[real])


@pytest.mark.parametrize("context", ["prefix", "prompt"])
@pytest.mark.parametrize("how", [dict(), dict(num_beams=3)], ids=["greedy", "beams"])
def test_it_writes_the_same_with_and_without_a_cache(context, how):
    form = "moments" if context == "prompt" else "logistic"
    model, written = build(attention=ALL, context=context, form=form, top_k=1), []
    settings = dict(max_new_tokens=7, min_new_tokens=7, attention_mask=LEFT) | how
    asked = dict(prompt_mask=LEFT) if context == "prompt" else {}
    for use_cache in (True, False):
        written.append(model.generate(TEXTS, use_cache=use_cache, **asked, **settings))
    assert torch.equal(*written)


@pytest.mark.parametrize("context", ["prefix", "prompt", "sequence"])
def test_each_text_is_what_it_is_alone_with_its_members(context):
    model = build(attention=ALL, context=context)
    rows = [["law"], ["seed", "medicine"]]
    together = logits_of(model, members=model.members(rows))
    for text, row in enumerate(rows):
        one = slice(text, text + 1)
        alone = logits_of(model, TEXTS[one], LEFT[one], members=model.members([row]))
        real = LEFT[one].bool()
        assert close(together[one][real], alone[real])


@families
def test_saved_and_loaded_it_is_the_same(family, tmp_path):
    model = build(family, attention=["q_proj", "v_proj"])
    model.save_pretrained(tmp_path)
    opened = HarmoMoEForCausalLM.from_pretrained(tmp_path)
    assert opened.config.attention == ["q_proj", "v_proj"]
    assert torch.equal(logits_of(opened), logits_of(model))
    learning = {name for name, p in opened.named_parameters() if p.requires_grad}
    ends = ("q_proj.a", "q_proj.b", "v_proj.a", "v_proj.b")
    assert {name for name in learning if "self_attn" in name} == {
        name for name, _ in opened.named_parameters() if name.endswith(ends)
    }
    assert (tmp_path / "attention.py").is_file()


def test_all_factors_learn_and_nothing_of_a_pass_is_left():
    model = build(attention=ALL).train()
    labels = TEXTS.masked_fill(LEFT == 0, -100)
    model(TEXTS, attention_mask=LEFT, labels=labels).loss.backward()
    for part in model.attention_maps:
        assert part.a.grad.any() and part.b.grad.any() and part.linear.weight.grad is None
        assert part.gates is None
    again = copy.deepcopy(model)  # which the graph of a pass would not allow
    assert torch.equal(logits_of(again.eval()), logits_of(model.eval()))
    assert all(layer.decided is None for layer in model.moe_layers)


@pytest.mark.parametrize("reentrant", [False, True], ids=["anew", "reentrant"])
def test_layers_that_are_computed_apart_are_refused(reentrant):
    model = build(attention=["v_proj"]).train()
    model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
    with pytest.raises(ValueError, match="does as the layer before .* gradient checkpointing"):
        model(TEXTS, attention_mask=LEFT)
    assert logits_of(model.eval()).isfinite().all()


def test_half_precision():
    model = build(attention=ALL, context="prompt", top_k=3)  # no choice can differ
    half = copy.deepcopy(model).to(torch.bfloat16)
    found, expected = logits_of(half).float(), logits_of(model)
    assert (found - expected).abs().max() < 0.1 * expected.abs().max()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = logits_of(model).float()
    assert (mixed - expected).abs().max() < 0.1 * expected.abs().max()


def test_without_maps_nothing_is_followed():
    model = build()
    assert not model.attention_maps and model.config.attention == []
    logits_of(model)
    assert all(layer.decided is None for layer in model.moe_layers)


def test_what_cannot_be_routed_is_named():
    model = build()
    paths = [f"model.layers.{number}.mlp" for number in range(3)]
    assert find_attention(model.backbone, paths)[1] == ALL
    with pytest.raises(ValueError, match="'w_proj' is no map of attention .* maps q_proj, k_proj"):
        route_attention(model.backbone, paths, ["w_proj"])
    with pytest.raises(ValueError, match="no linear maps in all layers"):
        route_attention(nn.ModuleDict(dict(mlp=nn.Linear(2, 2))), ["mlp"], ["q_proj"])
    alone = LowRankLinear(nn.Linear(4, 3), 2)
    with pytest.raises(ValueError, match="run the whole model"):
        alone(torch.zeros(1, 2, 4))
    broken = build(attention=["q_proj"])
    broken.moe_layers[0].followed = False
    with pytest.raises(ValueError, match="run the layers in their order"):
        logits_of(broken)
