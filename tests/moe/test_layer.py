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
from harmomoe.moe.layer import _is_plain, insert_experts, merging_is_shorter
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


def each_expert(layer, z):
    "What every expert makes of all tokens, [E, B, T, d], by a matrix of its own."
    found = []
    for p in range(len(RANKS)):
        ffn, mine = copy.deepcopy(layer.ffn), layer.owner == p
        for name in layer.layout.linears:
            change = layer.b[name][mine].T @ layer.a[name][mine]
            getattr(ffn, name).weight += SCALES[p] * change
        found.append(ffn(z))
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
    pi = layer.router.probabilities(z, Context(), hidden)
    pi = torch.where(pi >= pi.topk(top_k, dim=-1).values[..., -1:], pi, 0.0)
    expected = torch.einsum("...e,e...d->...d", pi, each_expert(layer, z))
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


@torch.no_grad()
@tokens
@pytest.mark.parametrize("router", [dict(top_k=2), dict(top_k=3, norm_topk_prob=True)], ids=str)
@pytest.mark.parametrize("form", ["mean", "evidence"])
def test_experts_with_too_small_a_share_are_left_out(form, router, tokens):
    layer, z = new_layer(torch.float64, **router, form=form), samples(tokens, torch.float64)
    layer.router.vectors *= 0.05  # so that no expert is sure of everything
    hidden = F.silu(layer.ffn.gate_proj(z)) * layer.ffn.up_proj(z)
    pi = layer.router.probabilities(z, Context(), hidden)
    pi = torch.where(pi >= pi.topk(router["top_k"], dim=-1).values[..., -1:], pi, 0.0)
    share = pi / pi.sum(-1, keepdim=True)
    limit = share.masked_fill(share == 0, 1).amin(-1).median().item()
    kept = torch.where(share >= limit, pi, 0.0)
    if router.get("norm_topk_prob"):
        kept = kept / kept.sum(-1, keepdim=True)
    expected = torch.einsum("...e,e...d->...d", kept, each_expert(layer, z))
    whole, layer.router.least_share = layer(z), limit
    assert close(layer(z), expected, 1e-10)
    with torch.enable_grad():  # while it learns, all are asked
        assert close(layer(z), whole, 1e-10) and not close(whole, expected, 1e-4)


@torch.no_grad()
def test_layers_that_do_not_look_decide_as_the_last_that_did():
    torch.manual_seed(0)
    size = dict(hidden_size=16, intermediate_size=24, num_attention_heads=2)
    paths = [f"layer{number}" for number in range(3)]
    model = nn.ModuleDict({path: LlamaMLP(LlamaConfig(**size)) for path in paths})
    settings = RouterSettings(top_k=2, form="evidence", looking=0.5)
    insert_experts(model, paths, GATED_FFN, RANKS, SCALES, settings)
    layers, z, asked = [model[path] for path in paths], samples(30), []
    for layer in layers:
        for p in (*layer.a.values(), *layer.b.values(), layer.router.vectors):
            p.normal_(std=0.3)
        layer.router.register_forward_hook(lambda router, x, y: asked.append((x, y)))
    for layer in layers:
        layer(z)
    assert [router.follows for router in (layer.router for layer in layers)] == [False, False, True]
    (first, one), (second, two), (third, three) = asked
    assert first[2] is not None and second[2] is not None and third[2] is None
    assert all(torch.equal(a, b) for a, b in zip(two, three))
    assert not torch.equal(one[0], two[0])
    with pytest.raises(ValueError, match="has not seen this batch"):
        layers[2](z[:4])


@torch.no_grad()
@pytest.mark.parametrize("bias", [True, False])
def test_a_matrix_of_their_own_gives_large_groups_the_same(bias):
    layer, z = new_layer(torch.float64), samples(120, torch.float64)
    if not bias:
        for name in layer.layout.linears:
            getattr(layer.ffn, name).bias = None
    weights, experts = layer.router(z)
    chosen = each_expert(layer, z).permute(1, 2, 0, 3)
    chosen = chosen.gather(2, experts[..., None].expand(-1, -1, 1, z.shape[-1]))[:, :, 0]
    assert close(layer(z), weights * chosen, 1e-12)
    linear = layer.ffn.gate_proj
    assert merging_is_shorter(len(z) * 120 // len(RANKS), *linear.weight.shape)
    heard = linear.register_forward_hook(lambda *_: None)  # a map that somebody listens to
    assert _is_plain(layer.ffn.up_proj, z) and not _is_plain(linear, z)
    assert close(layer(z), weights * chosen, 1e-12)
    heard.remove()
    with torch.autocast("cpu", torch.bfloat16):
        assert not _is_plain(linear, z.float())
        assert close(layer.float()(z.float()), (weights * chosen).float(), 3e-2)
