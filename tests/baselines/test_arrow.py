"Routing by the adapters' own directions, as the paper says and as peft does it."

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from networks import weights
from peft import ArrowConfig, LoraConfig, create_arrow_model, get_peft_model

from harmomoe.baselines.arrow import TEMPERATURE, TOP_K, route_by_directions, strongest_direction
from harmomoe.bundle.files import Bundle
from harmomoe.client.expert import save_expert
from harmomoe.models.weights import open_seed

pytestmark = pytest.mark.filterwarnings("ignore:The PEFT config's:UserWarning")


@pytest.mark.parametrize("rank, d_in, d_out", [(1, 9, 7), (4, 9, 30), (9, 9, 9), (12, 9, 7)])
def test_direction_is_the_first_right_singular_vector_of_the_product(rank, d_in, d_out):
    generator = torch.Generator().manual_seed(rank)
    a = torch.randn(rank, d_in, generator=generator)
    b = torch.randn(d_out, rank, generator=generator)
    found, change = strongest_direction(a, b), b.double() @ a.double()
    _, values, right = torch.linalg.svd(change)
    assert found.shape == (d_in,) and found.dtype == torch.float32
    assert abs(found.double() @ right[0]).item() == pytest.approx(1, abs=1e-6)
    assert (change @ found.double()).norm().item() == pytest.approx(values[0].item(), rel=1e-6)


def test_what_changes_nothing_has_no_direction():
    assert not strongest_direction(torch.randn(2, 5), torch.zeros(3, 2)).any()


# ---- the same as peft's


def sent(seed, folder, rank, alpha, random_state):
    """An adapter in a folder as peft reads it, and as a server has it. Its singular values fall by
    a factor of four, so that peft's 15 power iterations in float32 find the first vector."""
    linears, generator = list(seed.ffn.linears), torch.Generator().manual_seed(random_state)
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=linears)
    expert, factors = get_peft_model(seed.new_backbone(), config), {}
    with torch.no_grad():
        for path in seed.layers:
            for name in linears:
                place = expert.base_model.model.get_submodule(f"{path}.{name}")
                a, b = place.lora_A["default"].weight, place.lora_B["default"].weight
                sizes = 0.25 ** torch.arange(rank)
                for part, size in ((a.T, 1.0), (b, sizes)):
                    drawn = torch.randn(part.shape, generator=generator)
                    part.copy_(torch.linalg.qr(drawn)[0] * size)
                factors[path, name] = a.detach().clone(), b.detach().clone()
    folder.mkdir()
    save_expert(folder, expert)
    return Bundle(folder.name, factors, alpha / rank, None, None, None, folder)


@pytest.fixture(scope="module")
def decoder(tiny_decoder, tmp_path_factory):
    "A tiny Llama, three adapters of one rank and different scales, and token ids."
    seed, folder = open_seed(str(tiny_decoder)), tmp_path_factory.mktemp("adapters")
    bundles = [sent(seed, folder / name, 3, alpha, alpha) for name, alpha in zip("abc", (3, 6, 9))]
    ids = torch.arange(40).view(2, 20) + 30
    public = SimpleNamespace(seed=seed)
    return SimpleNamespace(public=public, seed=seed, bundles=bundles, ids=ids, folder=folder)


@torch.no_grad()
def pefts(decoder, bundles, top_k, temperature):
    "Logits of peft's model of these adapters."
    config = ArrowConfig(top_k=top_k, router_temperature=temperature, rng_seed=0)
    paths = [str(bundle.folder / "adapter") for bundle in bundles]
    model = create_arrow_model(decoder.seed.new_backbone(), paths, config)
    return model.eval()(input_ids=decoder.ids).logits


@torch.no_grad()
def ours(decoder, bundles, *options):
    return route_by_directions(bundles, decoder.public, *options).backbone(decoder.ids).logits


def test_logits_are_those_of_pefts_arrow(decoder):
    found = {}
    for top_k, temperature in product((1, 2, 3), (0.1, 1.0)):
        given = decoder.bundles, top_k, temperature
        found[top_k, temperature] = own = ours(decoder, *given)
        assert torch.allclose(own, pefts(decoder, *given), atol=1e-5), given[1:]
    seed = decoder.seed.backbone(decoder.ids).logits
    assert all((own - seed).abs().max() > 0.1 for own in found.values())
    different = [own for given, own in found.items() if given != (1, 1.0)]  # for one k, no tau
    for place, own in enumerate(different):
        assert all((own - other).abs().max() > 1e-2 for other in different[:place])


def test_ranks_may_differ_where_peft_wants_one(decoder):
    other = sent(decoder.seed, decoder.folder / "d", 5, 10, 7)
    bundles = [decoder.bundles[0], other]
    with pytest.raises(ValueError, match="rank mismatch"):
        pefts(decoder, bundles, 2, 1.0)
    # rows of zeros make the rank of the first that of the second, and change nothing else
    pad = torch.nn.functional.pad
    wider = {
        place: (pad(a, (0, 0, 0, 2)), pad(b, (0, 2)))
        for place, (a, b) in bundles[0].factors.items()
    }
    padded = [replace(bundles[0], factors=wider), other]
    found = ours(decoder, bundles, 2, 1.0)
    assert torch.allclose(found, ours(decoder, padded, 2, 1.0), atol=1e-5)
    assert (found - ours(decoder, bundles[:1], 2, 1.0)).abs().max() > 1e-2


def test_an_adapter_that_leaves_a_map_alone_takes_no_part_there(decoder):
    one, other, _ = decoder.bundles
    some = decoder.seed.ffn.linears[0]
    factors = {
        (path, name): (a, b * (name != some)) for (path, name), (a, b) in other.factors.items()
    }
    model = route_by_directions([one, replace(other, factors=factors)], decoder.public, 2)
    for (_, name), own in model.maps.items():
        shares = own.shares(torch.randn(50, own.linear.in_features))
        if name == some:
            assert torch.equal(shares, torch.tensor([[1.0, 0.0]]).expand(50, 2))
        else:
            assert shares.min() > 0


# ---- as a method


def test_with_one_client_it_is_that_clients_expert(tiny, batch, logits):
    [bundle] = bundles = tiny.bundles[:1]
    wanted, model = bundle.expert(tiny.seed), route_by_directions(bundles, tiny.public)
    assert model.settings.top_k == 1
    assert torch.allclose(logits(model)["all"], logits(wanted)["all"], atol=1e-4)


def test_it_delivers_the_seed_and_the_adapters_as_they_were_sent(play, tiny):
    played = play("arrow")
    model = played.model
    assert (model.settings.top_k, model.settings.temperature) == (TOP_K, TEMPERATURE)
    own = weights(model.backbone)
    for name, value in weights(tiny.seed.backbone).items():
        for linear in tiny.seed.ffn.linears:
            name = name.replace(f".mlp.{linear}.", f".mlp.{linear}.linear.")
        assert torch.equal(own.pop(name), value), name
    assert {name.rpartition(".")[2] for name in own} == {"a", "b", "directions"}
    for place, routed in model.maps.items():
        a, b = zip(*(bundle.factors[place] for bundle in played.received))
        assert torch.equal(routed.a, torch.cat(a)) and torch.equal(routed.b, torch.cat(b, 1).T)
        assert torch.allclose(routed.directions.norm(dim=1), torch.ones(3), atol=1e-6)
