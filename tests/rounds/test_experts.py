"The view of routed experts: exact, of every kind, and never of what is not an expert's."

import numpy as np
import pytest
import torch
from datasets import Dataset
from networks import moved, weights
from safetensors.torch import load_file, save_file
from small_mixtures import build, built, every_kind, passages, small_seed

from harmomoe.models.clip import ImageSeed
from harmomoe.models.mixture import FAMILIES
from harmomoe.models.unified import UnifiedModel
from harmomoe.rounds.experts import RoutedExperts

TARGETS = [[1, 3], [2]]


@every_kind
def test_a_state_of_random_numbers_goes_in_and_comes_out_and_nothing_else_moves(kind):
    model, view = built(kind)
    before, generator = weights(model.backbone), torch.Generator().manual_seed(0)
    state = {
        name: torch.randn(x.shape, generator=generator) for name, x in view.state(TARGETS).items()
    }
    view.load_state(state, TARGETS)
    again = view.state(TARGETS)
    assert again.keys() == state.keys() and all(torch.equal(again[n], state[n]) for n in state)
    others = [[e for e in all_ if e not in t] for all_, t in zip(view.all_targets, TARGETS)]
    found = RoutedExperts(build(kind).backbone).state(others)
    assert all(torch.equal(found[name], x) for name, x in view.state(others).items())
    changed = moved(model.backbone, before)
    count = sum(int((model.backbone.state_dict()[name] != before[name]).sum()) for name in changed)
    assert count == view.size(TARGETS).parameters == sum(x.numel() for x in state.values())


@every_kind
def test_names_shapes_and_memory_of_a_state(kind, tmp_path):
    _, view = built(kind)
    state = view.state(TARGETS)
    layers, experts, names = zip(*(name.split(".", 2) for name in state))
    assert {(int(a), int(b)) for a, b in zip(layers, experts)} == {(0, 1), (0, 3), (1, 2)}
    if kind in FAMILIES:
        assert set(names) == {"gate_up_proj", "down_proj"}
    else:
        maps = ("gate_proj", "up_proj", "down_proj")
        assert set(names) == {f"{name}.lora_{side}" for name in maps for side in "AB"}
        ranks = {state[f"0.1.{name}.lora_A"].shape[0] for name in maps}
        assert ranks == {3} == {state[f"0.1.{name}.lora_B"].shape[1] for name in maps}
    save_file(state, tmp_path / "state.safetensors")
    read = load_file(tmp_path / "state.safetensors")
    view.load_state(read, TARGETS)
    assert view.size(TARGETS).bytes == sum(x.nbytes for x in read.values())
    state[min(state)].zero_()  # a copy
    assert view.state(TARGETS)[min(state)].any()


def test_lora_factors_are_those_of_the_expert():
    model, view = built("unified")
    layer, state = model.layers[1], view.state([[], [2]])
    with model.only("expert2"), torch.no_grad():
        z = torch.randn(1, 4, 32)
        up, base = layer.ffn.up_proj(z), layer.ffn.gate_proj(z)
        change = lambda x, name: (
            x @ state[f"1.2.{name}.lora_A"].T @ state[f"1.2.{name}.lora_B"].T * layer.scales[2]
        )
        hidden = layer.ffn.act_fn(base + change(z, "gate_proj")) * (up + change(z, "up_proj"))
        expected = layer.ffn.down_proj(hidden) + change(hidden, "down_proj")
        assert torch.allclose(layer(z), expected, atol=1e-4)


@every_kind
def test_a_state_that_does_not_fit_changes_nothing(kind):
    model, view = built(kind)
    before, state = weights(model.backbone), view.state(TARGETS)
    name = max(state)
    for wrong in (
        {n: x for n, x in state.items() if n != name},
        state | {"1.4.other": torch.zeros(1)},
        state | {name: state[name].double()},
        state | {name: state[name][:1]},
        state | {name: torch.full_like(state[name], torch.inf)},
    ):
        other = {n: x + 1 for n, x in wrong.items()}
        with pytest.raises(ValueError, match=r"1\.[24]\."):
            view.load_state(other, TARGETS)
    assert not moved(model.backbone, before)


@every_kind
def test_the_anchor_sees_all_but_the_targets(kind):
    model, view = built(kind)
    anchor = view.anchor(TARGETS)
    state = view.state(TARGETS)
    view.load_state({name: x + 1 for name, x in state.items()}, TARGETS)
    assert view.anchor(TARGETS) == anchor
    for parameter in model.backbone.parameters():
        if not parameter.numel():
            continue
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter.view(-1)[0] += 1  # of the first expert, which is no target, where it has one
        changed = view.anchor(TARGETS) != anchor
        views = view.views(TARGETS).values()
        own = any(parameter.data_ptr() == x.data_ptr() for x in views)
        assert changed != own
        with torch.no_grad():
            parameter.copy_(kept)
    assert view.anchor(TARGETS) == anchor


@every_kind
def test_observed_sums_are_those_of_every_token_alone(kind):
    model, view = built(kind)
    found, heard = view.observe(model.seed, passages(), 5), [[], []]
    handles = [
        layer.router.register_forward_hook(
            lambda router, given, said, one=layer, notes=notes: notes.append(one.chosen(said))
        )
        for layer, notes in zip(view.layers, heard)
    ]
    with torch.no_grad():
        for row in passages():
            batch = next(iter(model.seed.batches(Dataset.from_list([row]))))
            model.seed.hidden(view.network, batch)
    for handle in handles:
        handle.remove()
    gate, chosen = np.zeros((2, 2, 5))
    for number, texts in enumerate(heard):
        for weight, expert in texts:
            assert len(weight) <= 64
            for one, which in zip(weight.flatten().tolist(), expert.flatten().tolist()):
                gate[number, which] += one / len(weight) / 12
                chosen[number, which] += 0.5 / len(weight) / 12
    assert np.abs(found.gate - gate).max() < 1e-5 and np.abs(found.chosen - chosen).max() < 1e-5
    assert np.allclose(found.chosen.sum(1), 1) and found.samples == 12
    assert found.chosen.std(1).min() > 0  # the router does choose
    assert not view.layers[0].router._forward_hooks


def test_nothing_to_observe():
    model, view = built("olmoe")
    with pytest.raises(ValueError, match="no samples"):
        view.observe(model.seed, passages().select([]))


def test_targets_that_cannot_be():
    _, view = built("unified")
    assert view.all_targets == [[1, 2, 3, 4]] * 2  # not the seed's own
    for wrong, what in (
        ([[1]], "1 layers"),
        ([[0], []], "layer 0: no target can be 0"),
        ([[], [5]], "layer 1: no target can be 5"),
        ([[], [True]], "no target can be True"),
        ([[], [2, 2]], "named twice"),
        ([[], []], "name at least one"),
    ):
        with pytest.raises(ValueError, match=what):
            view.state(wrong)
    assert view.check_targets([(), (3, 1)]) == [[], [1, 3]]


def test_tables_and_sizes():
    _, view = built("qwen2")
    table = view.table()
    assert table["experts"].tolist() == [5, 5] and table["top-k"].tolist() == [2, 2]
    assert table["parameters"].tolist() == [3 * 32 * 16] * 2
    assert table["bytes"].tolist() == [4 * 3 * 32 * 16] * 2
    size = view.size(view.all_targets)
    total = sum(p.numel() for p in view.network.parameters())
    assert size.parameters == 10 * 3 * 32 * 16 and size.share == size.parameters / total
    shared = {n for n, _ in view.network.named_parameters() if "shared_expert" in n}
    assert shared and not shared & set(view.views(view.all_targets))
    _, view = built("unified")
    assert view.table()["may be targets"].tolist() == [4, 4]


def test_layers_of_an_image_model_are_seen_too(tiny, merge_with):
    model = merge_with(form="logistic", seed_expert=True)
    assert isinstance(model, UnifiedModel) and isinstance(model.seed, ImageSeed)
    view = RoutedExperts(model.backbone)
    found = view.observe(model.seed, tiny.a.test)
    assert view.all_targets == [[1, 2, 3]] * len(view.layers)
    assert np.allclose(found.chosen.sum(1), 1)


def test_networks_without_routed_experts_are_refused():
    with pytest.raises(ValueError, match="no routed experts"):
        RoutedExperts(small_seed().backbone)
    model = build("olmoe").backbone
    model.model.layers[0].mlp.gate.register_buffer("correction", torch.zeros(5))
    assert len(RoutedExperts(model).layers) == 1
