"Mixtures of Experts of transformers as models: read, saved and loaded, whole or not at all."

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from harmomoe.data.corpora import load_corpora
from harmomoe.models.decoder import DecoderSeed
from harmomoe.models.evaluate import measure
from harmomoe.models.mixture import (
    FAMILIES,
    MixtureModel,
    MixtureSeed,
    find_fused,
    open_mixture,
    untrained_mixture,
)
from harmomoe.models.model import load_model
from harmomoe.models.weights import open_seed
from harmomoe.rounds.training import compress

every_family = pytest.mark.parametrize("family", FAMILIES)


def small(family="olmoe", **fields):
    "A model with five experts in each of two layers."
    tokenizer = open_seed("embedded-text").tokenizer
    seed = untrained_mixture(tokenizer, family, 5, 2, 16, initializer_range=0.3, **fields)
    return MixtureModel(seed, seed.backbone)


@every_family
def test_a_model_that_learnt_comes_back_the_same(family, tmp_path):
    model = small(family)
    backbone = model.seed.new_backbone()
    with torch.no_grad():
        for layer in find_fused(backbone).values():
            layer.experts.down_proj[3] += 0.1
    learnt = MixtureModel(model.seed, backbone)
    again = load_model(learnt.save(tmp_path / "model"))
    assert type(again) is MixtureModel and type(again.seed) is MixtureSeed
    found, wanted = again.backbone.state_dict(), backbone.state_dict()
    assert found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)
    some = load_corpora(("rust", "spanish")).clients[0].test.select(range(6))
    bits = [measure(one, some, ["text"]).bits for one in (model, learnt, again)]
    assert bits[0] != bits[1] == bits[2]


@every_family
def test_active_parameters_are_those_that_one_token_moves(family):
    "Counted through gradients: what has none was not met."
    model = small(family)
    backbone = model.seed.new_backbone().requires_grad_(True)
    backbone(torch.tensor([[7]])).logits.sum().backward()
    asleep = 0
    for layer in find_fused(backbone).values():
        for tensor in layer.experts.parameters():
            asleep += sum(part.numel() for part in tensor.grad if not part.any())
    counted = model.count_parameters()
    assert counted["total"] == sum(p.numel() for p in backbone.parameters())
    assert counted["active"] == counted["total"] - asleep < counted["total"]


@every_family
def test_a_compressed_model_is_not_saved(family, tmp_path):
    smaller = compress(small(family), [[0, 3], [1, 2, 4]])
    with pytest.raises(ValueError, match="a model that lacks a part is not saved"):
        smaller.save(tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_what_is_no_mixture_is_refused(tmp_path):
    seed = open_seed("embedded-text")
    seed.save(tmp_path)
    with pytest.raises(ValueError, match="no routed experts of a known kind"):
        open_mixture(tmp_path)
    with pytest.raises(ValueError, match="neither a folder, nor"):
        open_mixture(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="family"):
        untrained_mixture(seed.tokenizer, "gpt")


def test_other_routers_than_plain_ones_are_refused():
    backbone = small().backbone
    backbone.model.layers[0].mlp.gate.register_buffer("correction", torch.zeros(5))
    assert list(find_fused(backbone)) == ["model.layers.1.mlp"]


def test_a_seed_of_dense_ffns_cannot_be_made_of_it(tmp_path):
    small().seed.save(tmp_path)
    with pytest.raises(ValueError, match="FFN"):
        open_seed(str(tmp_path))
    assert isinstance(open_mixture(tmp_path), DecoderSeed)


@every_family
def test_folders_that_lack_weights_or_bring_code_are_refused(family, tmp_path):
    small(family).seed.save(tmp_path)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    weights, told = load_file(file), json.loads(config.read_text())
    lost = next(name for name in weights if "layers.1" in name and "experts" in name)
    save_file({n: x for n, x in weights.items() if n != lost}, file, metadata=dict(format="pt"))
    with pytest.raises(ValueError, match="lacks 1 weights|cannot be|holds no language model"):
        open_mixture(tmp_path)
    save_file(weights, file, metadata=dict(format="pt"))
    (tmp_path / "evil.py").write_text("raise SystemExit")
    told |= dict(
        model_type="evil", auto_map=dict(AutoConfig="evil.C", AutoModelForCausalLM="evil.M")
    )
    config.write_text(json.dumps(told))
    with pytest.raises(ValueError, match="brings Python code of its own"):
        open_mixture(tmp_path)


@pytest.mark.parametrize(
    "wrong", [dict(scoring="best"), dict(loss_on="some"), dict(max_length=1)], ids=str
)
def test_mixture_is_read_only_in_ways_that_there_are(wrong):
    seed = small().seed
    with pytest.raises(ValueError, match=next(iter(wrong)).partition("_")[0]):
        MixtureSeed(seed.model, seed.tokenizer, "mixture", **wrong)
