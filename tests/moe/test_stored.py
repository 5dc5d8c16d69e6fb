"Experts that stay where they are stored: the same bits, few of them in memory, and no training."

import copy

import pytest
import torch
from moe.small_unified import LEFT, TEXTS, build, logits_of
from moe.test_many_experts import RANKS, new_layer, tokens

from harmomoe.moe import layer as module
from harmomoe.moe.stored import (
    StoredFactors,
    StoredRows,
    store_attention,
    store_factors,
    stored_rows,
)

WAYS = dict(masked=module._masked, apart=module._apart, tiles=module._in_tiles)


def leave(layer, keep):
    "A copy of a layer that fetches its experts from it, and the experts that it fetched."
    stored, fetched = copy.deepcopy(layer), []

    def fetch(name, side, expert):
        fetched.append((name, side, expert))
        return getattr(layer, side)[name][layer.starts[expert] : layer.starts[expert + 1]].detach()

    store_factors(stored, fetch, keep)
    return stored, fetched


def table(keep, sizes=(2, 0, 3, 1)):
    "A table, the same stored, and who was fetched."
    starts = [sum(sizes[:p]) for p in range(len(sizes) + 1)]
    whole, fetched = torch.randn(sum(sizes), 4), []

    def fetch(expert):
        fetched.append(expert)
        return whole[starts[expert] : starts[expert + 1]]

    return whole, StoredRows(fetch, starts, whole.to("meta"), keep, whole.device), fetched


# ---- a table


@pytest.mark.parametrize("keep", [1, 2, 4])
def test_rows_of_experts_are_those_of_the_table(keep):
    whole, stored, _ = table(keep)
    for rows in (slice(0, 2), slice(2, 5), slice(5, 6), slice(0, 5), slice(None), slice(2, 2)):
        assert torch.equal(stored[rows], whole[rows])
        assert len(stored.kept) <= keep
    for rows in ([0, 1, 5], [2, 3, 4], [], [0, 1, 2, 3, 4, 5]):
        index = torch.tensor(rows, dtype=torch.int64)
        assert torch.equal(stored[index], whole[index])
    filled = stored.filled(torch.tensor([[3, 0], [0, 1]]))
    assert torch.equal(filled[[0, 1, 5]], whole[[0, 1, 5]]) and not filled[2:5].any()
    assert torch.equal(torch.cat(list(stored.pieces())), whole)
    assert stored.to(torch.float64)[:].dtype == torch.float64 and stored[:].dtype == torch.float32


def test_who_was_asked_for_longest_ago_makes_room():
    _, stored, fetched = table(keep=2, sizes=(1, 1, 1, 1))
    for expert in (0, 1, 0, 2, 0, 3, 2, 3):
        stored[expert : expert + 1]
    assert fetched == [0, 1, 2, 3, 2] and list(stored.kept) == [2, 3]


def test_saving_does_not_touch_what_is_kept():
    _, stored, _ = table(keep=1)
    stored[0:2]
    list(stored.pieces())
    assert list(stored.kept) == [0]


# ---- a layer


@torch.no_grad()
@pytest.mark.parametrize("way", [None, *WAYS])
@pytest.mark.parametrize("number", [1, 2, 50, 400])
@pytest.mark.parametrize("settings", [dict(), dict(top_k=3, norm_topk_prob=True)])
def test_every_way_gives_the_same_bits(settings, number, way, monkeypatch):
    layer, z = new_layer(dtype=torch.float32, **settings), tokens(number, torch.float32)
    if way:
        monkeypatch.setattr(module, "masked_is_shorter", lambda *shapes: True)
        monkeypatch.setattr(module, "_masked", WAYS[way])
        monkeypatch.setattr(module.math, "comb", lambda n, k: 10**9)
    expected = layer(z)
    for keep in (1, 3, len(RANKS)):
        stored, _ = leave(layer, keep)
        assert torch.equal(stored(z), expected)
        assert torch.equal(stored(z.flip(1)), layer(z.flip(1)))
        assert all(0 < len(rows.kept) <= keep for rows in stored_rows(stored).values())


@torch.no_grad()
@pytest.mark.parametrize("number", [1, 30, 2000])
def test_only_experts_that_tokens_chose_are_fetched(number):
    layer, z = new_layer(dtype=torch.float32), tokens(number, torch.float32)
    stored, fetched = leave(layer, keep=len(RANKS))
    stored(z)
    chosen = {p for p in layer.router(z, module.Context())[1].unique().tolist() if RANKS[p]}
    assert {expert for *_, expert in fetched} == chosen
    assert len(fetched) == 6 * len(chosen)  # each side of three maps, once
    stored(z)
    assert len(fetched) == 6 * len(chosen)  # they were kept


@torch.no_grad()
def test_types_are_those_of_the_layer():
    layer = new_layer(dtype=torch.bfloat16)
    z = tokens(400, torch.bfloat16)
    stored, _ = leave(layer, keep=2)
    assert torch.equal(stored(z), layer(z))
    with torch.autocast("cpu", torch.bfloat16):
        layer = new_layer(dtype=torch.float32)
        stored, _ = leave(layer, keep=2)
        assert torch.equal(stored(z.float()), layer(z.float()))


def test_gradients_of_inputs_are_those_of_the_layer_in_memory():
    "Whoever asks how an input moves the output gets an answer; the factors learn nothing."
    layer = new_layer()
    stored, _ = leave(layer, keep=2)
    found = []
    for one in (stored, layer):
        z = tokens(400).requires_grad_()
        one(z).square().sum().backward()
        found.append(z.grad)
    assert torch.allclose(*found, rtol=1e-10)


def test_training_and_saving_are_refused():
    stored, _ = leave(new_layer(), keep=2)
    with pytest.raises(ValueError, match="cannot learn"):
        stored.train()
    with pytest.raises(ValueError, match="cannot be saved"):
        stored.state_dict()
    assert not [name for name, _ in stored.named_parameters() if name.startswith(("a.", "b."))]
    assert isinstance(stored.eval().a, StoredFactors)


def test_a_whole_map_can_be_read():
    layer = new_layer()
    stored, _ = leave(layer, keep=1)
    for name in layer.layout.linears:
        assert torch.equal(stored.a[name], layer.a[name])
        assert torch.equal(stored.b[name], layer.b[name])


# ---- a language model


@torch.no_grad()
@pytest.mark.parametrize("attention", [[], ["q_proj", "o_proj"]])
@pytest.mark.parametrize("keep", [1, 3])
def test_a_language_model_gives_and_writes_the_same(attention, keep):
    model = build(attention=attention)
    stored = copy.deepcopy(model)
    starts = model.moe_layers[0].starts
    for here, there in zip(stored.moe_layers, model.moe_layers):
        at = lambda name, side, p, own=there: getattr(own, side)[name][starts[p] : starts[p + 1]]
        store_factors(here, at, keep)
    for here, there in zip(stored.attention_maps, model.attention_maps):
        at = lambda side, p, part=there: getattr(part, side)[starts[p] : starts[p + 1]]
        store_attention(here, starts, at, keep)
        assert sorted(stored_rows(here)) == ["a", "b"]
    assert torch.equal(logits_of(stored), logits_of(model))
    one = torch.tensor([[True, False, True], [False, True, False]])
    assert torch.equal(logits_of(stored, members=one), logits_of(model, members=one))
    asked = dict(attention_mask=LEFT, max_new_tokens=5, do_sample=False)
    assert torch.equal(stored.generate(TEXTS, **asked), model.generate(TEXTS, **asked))
