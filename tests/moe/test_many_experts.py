"""Layers of many experts: every way to compute one gives what the definition gives, gradients too,
and what runs on a GPU depends on shapes alone."""

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from harmomoe.moe import layer as module
from harmomoe.moe.ffn import GATED_FFN
from harmomoe.moe.layer import insert_experts, masked_is_shorter, place_in_tiles
from harmomoe.moe.router import RouterSettings

WAYS = dict(masked=module._masked, apart=module._apart, tiles=module._in_tiles)
RANKS = [0, *([4, 8, 2, 1] * 10)]


def new_layer(ranks=RANKS, dtype=torch.float64, **settings):
    "A layer whose factors and router are random."
    torch.manual_seed(0)
    size = dict(hidden_size=16, intermediate_size=24, num_attention_heads=2)
    model = nn.ModuleDict(dict(mlp=LlamaMLP(LlamaConfig(**size, mlp_bias=True))))
    scales = [1.0 + index % 3 for index in range(len(ranks))]
    insert_experts(model, ["mlp"], GATED_FFN, ranks, scales, RouterSettings(**settings))
    layer = model["mlp"].eval()
    with torch.no_grad():
        for p in (*layer.a.values(), *layer.b.values(), layer.router.vectors):
            p.normal_(std=0.3)
    return layer if dtype is None else layer.to(dtype)


def tokens(number, dtype=torch.float64, device="cpu"):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(1, number, 16, generator=generator).to(device, dtype)


@pytest.fixture
def forced(monkeypatch):
    "A function after which all tokens that are not in groups of sets go one way."

    def force(way):
        monkeypatch.setattr(module, "masked_is_shorter", lambda *shapes: True)
        monkeypatch.setattr(module, "_masked", WAYS[way])
        monkeypatch.setattr(module.math, "comb", lambda n, k: 10**9)  # no groups of sets

    return force


def by_definition(layer, z):
    "Every expert's FFN with its factors merged, weighted as the router says."
    weights, experts = layer.router(z, module.Context())
    found = torch.zeros_like(z)
    for p in range(len(layer.ranks)):
        ffn, mine = copy.deepcopy(layer.ffn), layer.owner == p
        with torch.no_grad():
            for name in layer.layout.linears:
                change = layer.b[name][mine].T @ layer.a[name][mine]
                getattr(ffn, name).weight += layer.scales[p] * change
        found = found + (weights * (experts == p)).sum(-1, keepdim=True) * ffn(z)
    return found


@torch.no_grad()
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("number", [2, 3, 50, 400])
@pytest.mark.parametrize("settings", [dict(), dict(top_k=3), dict(top_k=2, norm_topk_prob=True)])
def test_every_way_is_the_definition(settings, number, way, forced):
    layer, z = new_layer(**settings), tokens(number)
    expected = by_definition(layer, z)
    forced(way)
    assert torch.allclose(layer(z), expected, atol=1e-12)


@pytest.mark.parametrize("way", ["apart", "tiles"])
@pytest.mark.parametrize("top_k", [1, 3])
def test_gradients_are_those_of_the_mask(top_k, way, forced):
    found = []
    for name in ("masked", way):
        forced(name)
        layer, z = new_layer(top_k=top_k).train(), tokens(30).requires_grad_()
        layer(z).square().sum().backward()
        learned = [p.grad for p in layer.parameters() if p.requires_grad]
        found.append([z.grad, *(torch.zeros(1) if g is None else g for g in learned)])
    for one, other in zip(*found):
        assert torch.allclose(one, other, atol=1e-10)
    assert sum(bool(grad.any()) for grad in found[0]) >= 7


@torch.no_grad()
@pytest.mark.parametrize("way", ["apart", "tiles"])
@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("bfloat16", 0.05)])
def test_other_types(dtype, tolerance, way, forced):
    dtype = getattr(torch, dtype)
    layer = new_layer(dtype=dtype, top_k=2)
    expected = by_definition(copy.deepcopy(layer).double(), tokens(60, dtype).double())
    forced(way)
    found = layer(tokens(60, dtype))
    assert found.dtype == dtype
    assert (found - expected).abs().max() < tolerance * expected.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("way", ["apart", "tiles"])
def test_one_expert_that_all_tokens_choose_and_one_that_none_does(way, forced):
    layer, z = new_layer([0, 4, 4], top_k=1), tokens(40)
    layer.router.active = torch.tensor([False, True, False])
    expected = by_definition(layer, z)
    forced(way)
    assert torch.allclose(layer(z), expected, atol=1e-12)


def test_places_by_brute_force():
    generator = torch.Generator().manual_seed(0)
    for number, experts, size in [(1, 5, 8), (7, 3, 2), (100, 30, 8), (64, 1, 8), (33, 256, 16)]:
        chosen = torch.randint(experts, (number,), generator=generator)
        place, of = place_in_tiles(chosen, experts, size)
        assert len(set(place.tolist())) == number  # no two in one place
        assert place.max() < len(of) * size
        assert torch.equal(of[place // size], chosen)


def test_a_gpu_waits_for_nothing():
    "Fake tensors raise where a pass would have to read a number."
    with FakeTensorMode(), torch.device("cuda"):
        for number, settings in ((300, dict()), (300, dict(top_k=2)), (1, dict())):
            layer = new_layer([0, *[16] * 255], None, **settings).train()
            z = torch.zeros(1, number, 16)
            assert layer(z).shape == z.shape
    with torch.device("meta"):
        layer = new_layer([0, *[16] * 255], None, top_k=2).train()
        layer(torch.zeros(1, 300, 16)).sum().backward()
        assert all(a.grad.shape == a.shape for a in (*layer.a.values(), *layer.b.values()))


def test_a_compiler_gets_tiles(monkeypatch):
    layer, z, ways = new_layer([0, *[16] * 63], torch.float32), tokens(200, torch.float32), []
    for name in ("_masked", "_apart", "_in_tiles"):
        own = getattr(module, name)
        noted = lambda *given, name=name, own=own: ways.append(name) or own(*given)
        monkeypatch.setattr(module, name, noted)
    with torch.no_grad():
        expected = layer(z)
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        found = layer(z)
    assert ways == ["_apart", "_in_tiles"] and torch.allclose(found, expected, atol=1e-5)


def test_which_way_is_chosen_by_shapes():
    for number in (1, 10, 1000):
        assert masked_is_shorter(number, [0, 16, 16])  # three experts
        assert masked_is_shorter(number, [0, 500])  # one that is large
    assert not masked_is_shorter(1000, [16] * 32) and not masked_is_shorter(10, [16] * 256)
