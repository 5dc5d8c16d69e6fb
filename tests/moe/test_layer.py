"The Mixture-of-Experts layer where each sample has members of its own."

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from harmomoe.moe.context import Context
from harmomoe.moe.ffn import GATED_FFN
from harmomoe.moe.layer import insert_experts
from harmomoe.moe.router import RouterSettings

RANKS, SCALES = [0, 4, 8, 2], [0.0, 2.0, 1.0, 0.5]
EACH = torch.tensor(
    [[1, 1, 1, 1], [0, 1, 0, 1], [0, 0, 1, 0], [1, 0, 0, 0], [1, 1, 1, 0]], dtype=torch.bool
)
# many tokens go in groups, a few are masked
tokens = pytest.mark.parametrize("tokens", [120, 3, 1])
routers = pytest.mark.parametrize(
    "router",
    [
        dict(),
        dict(top_k=2),
        dict(top_k=4),
        dict(top_k=2, norm_topk_prob=True),
        dict(top_k=3, norm_topk_prob=True, form="moments"),
        dict(top_k=2, form="logistic", lam=1.0),
        dict(top_k=2, form="evidence"),
    ],
    ids=str,
)


def new_layer(dtype=torch.float32, **settings):
    torch.manual_seed(0)
    size = dict(hidden_size=16, intermediate_size=24, num_attention_heads=2)
    ffn = LlamaMLP(LlamaConfig(**size, mlp_bias=True))
    model = nn.ModuleDict(dict(mlp=ffn))
    insert_experts(model, ["mlp"], GATED_FFN, RANKS, SCALES, RouterSettings(**settings))
    layer = model["mlp"].eval()
    with torch.no_grad():
        for p in (*layer.a.values(), *layer.b.values(), layer.router.vectors):
            p.normal_(std=0.3)
        if layer.router.biases is not None:
            layer.router.biases.normal_()
        if settings.get("form") == "evidence":
            layer.router.center.normal_(std=0.3)
            layer.router.scale.uniform_(0.5, 2)
    return layer.to(dtype)


def samples(tokens, dtype=torch.float32, number=len(EACH)):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(number, tokens, 16, generator=generator).to(dtype)


def alone(layer, z, each=EACH):
    "Each sample by itself, as `only` sets the layer for its members."
    router, found = layer.router, []
    kept = router.active, router.top_k
    for row, members in zip(z, each):
        router.active, router.top_k = members, min(kept[1], int(members.sum()))
        found.append(layer(row[None])[0])
    router.active, router.top_k = kept
    return torch.stack(found)


def close(found, expected, tolerance):
    return (found - expected).abs().max() <= tolerance * expected.abs().max()


@torch.no_grad()
@tokens
@routers
def test_each_sample_is_what_it_is_alone_with_its_members(router, tokens):
    layer, z = new_layer(torch.float64, **router), samples(tokens, torch.float64)
    layer.tile = 50
    free = layer(z)
    layer.router.active = EACH
    together = layer(z)
    assert close(together, alone(layer, z), 1e-12)
    assert close(together[:1], free[:1], 1e-12) and not close(together[1:], free[1:], 1e-3)


@torch.no_grad()
@tokens
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_a_router_that_looks_at_hidden_activations_changes_no_expert(top_k, tokens):
    "They are computed once, for the router and for the experts, which use them up."
    layer, z = (
        new_layer(torch.float64, top_k=top_k, form="evidence"),
        samples(tokens, torch.float64),
    )
    layer.tile = 50
    found, hidden = layer(z), F.silu(layer.ffn.gate_proj(z)) * layer.ffn.up_proj(z)
    pi, expected = layer.router.probabilities(z, Context(), hidden), 0.0
    pi = torch.where(pi >= pi.topk(top_k, dim=-1).values[..., -1:], pi, 0.0)
    for p in range(len(RANKS)):
        ffn, mine = copy.deepcopy(layer.ffn), layer.owner == p
        for name in layer.layout.linears:
            change = layer.b[name][mine].T @ layer.a[name][mine]
            getattr(ffn, name).weight += SCALES[p] * change
        expected = expected + pi[..., p, None] * ffn(z)
    assert close(found, expected, 1e-10) and torch.equal(layer(z), found)


@torch.no_grad()
@tokens
@pytest.mark.parametrize("dtype, tolerance", [("float16", 2e-3), ("bfloat16", 2e-2)])
def test_in_half_precision_too(dtype, tolerance, tokens):
    dtype = getattr(torch, dtype)
    layer, z = new_layer(dtype, top_k=3), samples(tokens, dtype)
    layer.router.active = EACH
    found = layer(z)
    assert found.dtype == dtype and found.isfinite().all()
    assert close(found, alone(layer, z), tolerance)


@tokens
def test_gradients_are_those_of_the_samples_alone(tokens):
    layer, z = new_layer(torch.float64, top_k=3), samples(tokens, torch.float64).requires_grad_()
    use = torch.randn(z.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    learning = [z, *(p for p in layer.parameters() if p.requires_grad)]
    layer.router.active = EACH
    found = torch.autograd.grad((use * layer(z)).sum(), learning)
    expected = torch.autograd.grad((use * alone(layer, z)).sum(), learning)
    assert all(one.isfinite().all() for one in found)
    assert all(close(one, two, 1e-11) for one, two in zip(found, expected) if two.any())


@torch.no_grad()
@pytest.mark.parametrize("names", [[1, 3], [2], [0, 1, 2, 3]], ids=str)
@tokens
def test_the_same_members_for_every_sample_are_members_for_all_to_the_last_bit(names, tokens):
    layer, z = new_layer(top_k=2), samples(tokens)
    members = torch.zeros(4, dtype=torch.bool)
    members[names] = True
    layer.router.top_k = min(2, len(names))
    layer.router.active = members
    expected = layer(z)
    layer.router.active = members.repeat(len(z), 1)
    assert torch.equal(layer(z), expected)
    context = Context(active=layer.router.active)
    layer.router.active, layer.context = None, context
    assert torch.equal(layer(z), expected)


@torch.no_grad()
@pytest.mark.parametrize("tokens", [120, 3])
def test_what_is_switched_off_is_not_chosen_whatever_k_is(tokens):
    layer, z = new_layer(top_k=4), samples(tokens)
    layer.router.active = EACH
    weights, experts = layer.router(z)
    on = EACH[:, None].expand(-1, tokens, -1).gather(-1, experts)
    assert on.all() and weights.isfinite().all()
    assert torch.allclose(weights.sum(-1), torch.ones(()))
    counts = (weights > 0).sum(-1)
    assert (counts == EACH.sum(1, keepdim=True)).all()


@torch.no_grad()
def test_a_single_token_has_members_too():
    layer, z = new_layer(torch.float64, top_k=3), samples(1, torch.float64, 1)
    for members in EACH:
        layer.router.active = members[None]
        assert close(layer(z), alone(layer, z, members[None]), 1e-12)


@torch.no_grad()
def test_another_number_of_samples_is_one_clear_error():
    layer, z = new_layer(top_k=2), samples(3)
    told = r"given as \[5, 4\], but this pass has 4 samples and 4 experts"
    layer.router.active = EACH
    with pytest.raises(ValueError, match=told):
        layer(z[:4])
    layer.router.active = EACH[:, :3]
    with pytest.raises(ValueError, match=r"given as \[5, 3\]"):
        layer(z)
    layer.router.active = None
    layer.context = Context(active=EACH)
    with pytest.raises(ValueError, match=told):
        layer(z[:4])
    assert layer(z).isfinite().all()  # nothing of it is left


@torch.no_grad()
def test_compiled_in_one_piece():
    torch._dynamo.reset()
    layer, z = new_layer(top_k=2), samples(3)
    layer.router.active = EACH
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert torch.equal(compiled(z), layer(z))
