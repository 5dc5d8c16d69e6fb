"""One expert: only FFNs change, the same numbers give the same bytes, and what is stored is what
was trained."""

import copy
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from harmomoe.bundle.files import ADAPTER, ADAPTER_FILES
from harmomoe.client.client import Client
from harmomoe.client.expert import (
    expert_factors,
    load_expert,
    new_expert,
    save_expert,
    train_expert,
)
from harmomoe.config.settings import ExpertSettings, changed
from harmomoe.data.samples import expert_data, union_label_space
from harmomoe.models.training import Checkpoint
from harmomoe.server.server import Server

pytestmark = pytest.mark.filterwarnings("ignore:The PEFT config's:UserWarning")
SHORT = ExpertSettings(
    epochs=1,
    batch_size=16,
    learning_rate=3e-3,
    optimizer="adamw",
    weight_decay=0.0,
    rank=4,
    alpha=8,
)
UNTRAINED = replace(SHORT, epochs=0)


def weights(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(a, b):
    a, b = weights(a), weights(b)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@torch.no_grad()
def embed(seed, backbone, data):
    return torch.cat([seed.hidden(backbone, batch) for batch in seed.batches(data)])


@pytest.fixture(scope="module")
def work(tiny_seed, tiny_benchmark):
    "What client a's expert is trained on: 30 samples and 12 proxies, and its label space."
    a, pool = tiny_benchmark.clients[0], tiny_benchmark.pool
    data = expert_data(a.train, pool.train.select(range(12)))
    return tiny_seed, data, union_label_space(a.classes, pool.classes)


# ---- what changes


def test_an_expert_that_has_learnt_nothing_is_the_seed(work):
    seed, data, _ = work
    expert = new_expert(seed, SHORT)
    assert torch.equal(embed(seed, expert, data), embed(seed, seed.backbone, data))
    factors = {name: p for name, p in expert.named_parameters() if p.requires_grad}
    assert all("lora_" in name for name in factors) and len(factors) == 2 * 2 * len(seed.layers)
    assert all(p.any() == ("lora_A" in name) for name, p in factors.items())
    assert {min(p.shape) for p in factors.values()} == {4}


def test_only_ffn_weights_change_and_every_adapter_moves(work, tmp_path):
    seed, data, space = work
    before = seed.identity
    start, _ = train_expert(seed, data, space, UNTRAINED)
    expert, losses = train_expert(seed, data, space, SHORT)
    assert seed.identity == before and len(losses) == 1 and np.isfinite(losses).all()
    first, last = weights(start), weights(expert)
    moved = {name for name, value in last.items() if not torch.equal(value, first[name])}
    adapters = {name for name in last if "lora_" in name}
    assert moved == adapters and len(adapters) == 2 * 2 * len(seed.layers)
    save_expert(tmp_path, expert)
    merged, own = weights(load_expert(seed, tmp_path)), weights(seed.backbone)
    assert merged.keys() == own.keys()
    changed = {name for name in own if not torch.equal(merged[name], own[name])}
    linears = [f"{layer}.{linear}" for layer in seed.layers for linear in ("c_fc", "c_proj")]
    assert changed == {f"{name}.weight" for name in linears}


def test_scale_and_rank_are_those_of_the_settings(work):
    seed, data, space = work
    config = new_expert(seed, replace(SHORT, rank=3, alpha=7, dropout=0.25)).peft_config["default"]
    assert (config.r, config.lora_alpha, config.lora_dropout) == (3, 7, 0.25)
    assert config.base_model_name_or_path == "tiny"


def test_private_data_alone_make_another_expert(work, tiny_benchmark):
    seed, data, space = work
    private = expert_data(tiny_benchmark.clients[0].train, None)
    assert len(private) == 30 and len(data) == 42
    alone, both = (train_expert(seed, part, space, SHORT)[0] for part in (private, data))
    assert not same(alone, both)


def test_training_that_moved_nothing_is_an_error(work):
    seed, data, space = work
    still = replace(SHORT, optimizer="sgd", learning_rate=1e-45, momentum=0.0)
    with pytest.raises(RuntimeError, match="training did not move 4 adapters, for example"):
        train_expert(seed, data, space, still)


def test_divergence_is_an_error_that_names_the_learning_rate(work):
    seed, data, space = work
    far = ExpertSettings(epochs=3, batch_size=16, learning_rate=1e9, rank=4)
    said = "in epoch [123].*lower the learning rate.*1000000000.0"
    with pytest.raises(FloatingPointError, match=said):
        train_expert(seed, data, space, far)


# ---- the same again


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_same_numbers_give_the_same_bytes_and_another_random_state_others(dropout, work, tmp_path):
    seed, data, space = work
    settings = replace(SHORT, dropout=dropout)
    for folder, random_state in (("one", 5), ("second", 5), ("other", 6)):
        np.random.seed(random_state * 7)
        torch.manual_seed(len(folder))  # global generators play no part
        (tmp_path / folder).mkdir()
        expert, _ = train_expert(seed, data, space, settings, random_state)
        save_expert(tmp_path / folder, expert)
    for name in ADAPTER_FILES:
        one, second, other = (
            (tmp_path / folder / name).read_bytes() for folder in ("one", "second", "other")
        )
        assert one == second and (one == other) == name.endswith(".json")


def test_names_of_linear_maps_stand_in_alphabetical_order(work, tmp_path):
    "PEFT keeps them in a set, whose order differs from process to process."
    expert = new_expert(work[0], SHORT)
    names = ["c_proj", "c_fc"]
    expert.peft_config["default"].target_modules = names
    save_expert(tmp_path, expert)
    assert json.loads((tmp_path / ADAPTER_FILES[0]).read_text())["target_modules"] == names[::-1]


def test_dropout_works_in_training_and_only_there(work):
    seed, data, space = work
    plain, dropped = (
        train_expert(seed, data, space, replace(SHORT, dropout=p))[0] for p in (0.0, 0.5)
    )
    assert weights(plain).keys() == weights(dropped).keys() and not same(plain, dropped)
    for expert in (plain, dropped):
        assert not any(module.training for module in expert.modules())
    assert torch.equal(embed(seed, dropped, data), embed(seed, dropped, data))
    assert not any(module.training for module in seed.backbone.modules())


def test_an_expert_is_taken_up_where_a_checkpoint_left_it(work, tmp_path):
    seed, data, space = work
    settings = replace(SHORT, epochs=2, dropout=0.2)
    whole, losses = train_expert(seed, data, space, settings, 4)
    where = Checkpoint(tmp_path, seconds=0)
    train_expert(seed, data, space, replace(settings, epochs=1), 4, checkpoint=where)
    assert where.read()[1]["step"] == 3  # all batches of the first epoch
    again, found = train_expert(seed, data, space, settings, 4, checkpoint=where)
    assert found == losses and same(again, whole)


# ---- on the client's disk


def test_expert_as_it_trained_and_as_it_is_loaded_are_one_model(work, tmp_path):
    seed, data, space = work
    for dropout in (0.0, 0.3):
        expert, _ = train_expert(seed, data, space, replace(SHORT, dropout=dropout))
        save_expert(tmp_path, expert)
        loaded = load_expert(seed, tmp_path)
        assert torch.allclose(embed(seed, expert, data), embed(seed, loaded, data), atol=1e-5)
        assert not any(p.requires_grad for p in loaded.parameters())


def test_what_is_stored_is_an_adapter_and_nothing_else(work, tmp_path):
    seed, data, space = work
    expert = new_expert(seed, SHORT)
    save_expert(tmp_path, expert)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.relative_to(tmp_path).as_posix() for path in files} == set(ADAPTER_FILES)
    before = [path.read_bytes() for path in files]
    with torch.no_grad():
        next(p for name, p in expert.named_parameters() if "lora_A" in name)[0, 0] = torch.inf
    with pytest.raises(FloatingPointError, match="of the expert is not finite"):
        save_expert(tmp_path, expert)
    assert [path.read_bytes() for path in files] == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [ADAPTER]


# ---- layers that stay as the seed has them


HALF = replace(SHORT, untouched=0.5)


@pytest.mark.parametrize("share, first", [(0, 0), (0.2, 1), (1 / 3, 2), (0.34, 2), (0.99, 5)])
def test_the_last_layer_always_learns(share, first):
    assert ExpertSettings(untouched=share).first_of(6) == first


def test_untouched_layers_are_the_seeds_and_their_factors_zeros(work):
    seed, data, space = work
    expert, losses = train_expert(seed, data, space, HALF)
    own = expert_factors(seed, expert)
    for number, path in enumerate(seed.layers):
        moved = [any(p.any() for p in own[path, linear]) for linear in seed.ffn.linears]
        assert set(moved) == {number > 0}
    merged = weights(copy.deepcopy(expert).merge_and_unload())
    before = weights(seed.backbone)
    ffn = f"{seed.layers[0]}."
    assert all(torch.equal(merged[k], before[k]) for k in before if k.startswith(ffn))


def test_nothing_that_learns_later_moves_untouched_layers(tiny, tmp_path):
    changes = {"router.form": "evidence", "router.seed_expert": True, "gate.epochs": 1}
    changes |= {"gate.batch_size": 8, "router.top_k": 2, "router.norm_topk_prob": True}
    changes |= {"expert.untouched": 0.5, "finetune.learning_rate": 0.1, "finetune.epochs": 1}
    public = tiny.public.with_config(changed(tiny.settings, changes))
    client = Client(public, tiny.a, tmp_path / "a")
    server = Server(public, tmp_path / "server")
    server.receive(client.bundle())
    model = server.unify()
    first, last = (
        [p for side in (layer.a, layer.b) for p in side.values()]
        for layer in (model.layers[0], model.layers[-1])
    )
    assert not any(p.any() for p in first) and all(p.any() for p in last)
