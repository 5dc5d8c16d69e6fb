"Linear maps that choose among low-rank updates, and the model that is made of them."

import json

import pytest
import torch
from networks import same
from safetensors.torch import load_file, save_file

from harmomoe.base.artefacts import write_manifest
from harmomoe.models.adapters import AdapterFacts, RoutedAdapters, RoutedLinear
from harmomoe.models.model import FILE, Model, load_model, read_model

RANKS, SCALES = [1, 3, 2], [2.0, 0.5, 1.5]


def filled(module, random_state=0):
    "Something in all places that are zero."
    generator = torch.Generator().manual_seed(random_state)
    for name, part in module.named_parameters():
        if name.rpartition(".")[2] in ("a", "b", "directions"):
            part.copy_(torch.randn(part.shape, generator=generator))
    return module


def by_hand(layer, x):
    "The map's output for one input, float64."
    start, found = 0, []
    for rank, scale, direction in zip(RANKS, SCALES, layer.directions.double()):
        rows, start = slice(start, start + rank), start + rank
        update = scale * layer.b[rows].double().T @ layer.a[rows].double()
        found.append((abs(direction @ x).item(), update @ x))
    best = sorted(found, key=lambda pair: -pair[0])[: layer.top_k]
    shares = torch.tensor([score for score, _ in best]).double() / layer.temperature
    base = layer.linear.weight.double() @ x + layer.linear.bias.double()
    return base + sum(w * y for w, (_, y) in zip(shares.softmax(0), best))


@pytest.mark.parametrize("top_k, temperature", [(1, 1.0), (2, 0.3), (2, 3.0), (3, 1.0)])
def test_a_routed_map_is_its_formula(top_k, temperature):
    torch.manual_seed(1)
    layer = filled(RoutedLinear(torch.nn.Linear(6, 4), RANKS, SCALES, top_k, temperature))
    x = torch.randn(5, 2, 6)
    found = layer(x).double()
    wanted = torch.stack([by_hand(layer, one.double()) for one in x.flatten(0, 1)])
    assert torch.allclose(found.flatten(0, 1), wanted, atol=1e-5)


def test_shares_have_no_sign_and_sum_to_one_over_the_best():
    layer = filled(RoutedLinear(torch.nn.Linear(6, 4), RANKS, SCALES, 2, 0.5))
    x = torch.randn(100, 6)
    shares = layer.shares(x)
    assert torch.equal(shares, layer.shares(-x))
    assert torch.allclose(shares.sum(-1), torch.ones(100))
    scores = (x @ layer.directions.T).abs()
    assert ((shares > 0).sum(-1) == 2).all() and (shares[scores == scores.amax(-1, True)] > 0).all()
    layer.directions[1] = 0  # who has no direction takes no part
    shares = layer.shares(x)
    assert not shares[:, 1].any() and torch.allclose(shares.sum(-1), torch.ones(100))
    layer.directions.zero_()
    assert not layer.shares(x).any() and torch.equal(layer(x), layer.linear(x))


# ---- the model


@pytest.fixture(scope="module")
def model(tiny_seed):
    made = RoutedAdapters(tiny_seed, AdapterFacts(["a", "b", "c"], RANKS, SCALES, 2, 0.5))
    filled(made.backbone)
    return made


@torch.no_grad()
def scores(model, tiny):
    [batch] = tiny.seed.batches(tiny.pool.test, tiny.pool.classes)
    return model.scorer(tiny.pool.classes)(batch)


def test_an_empty_one_is_the_seed_and_the_seed_is_not_touched(model, tiny):
    before, seed = tiny.seed.new_backbone(), Model(tiny.seed, tiny.seed.backbone)
    empty = RoutedAdapters(tiny.seed, model.settings)
    assert torch.equal(scores(empty, tiny), scores(seed, tiny))
    assert (scores(model, tiny) - scores(seed, tiny)).abs().max() > 0.1
    assert same(tiny.seed.backbone, before)
    assert not any(p.requires_grad for p in model.backbone.parameters())


def test_parameters_are_those_of_the_seed_all_directions_and_the_largest_adapters(model):
    seed = sum(p.numel() for p in model.seed.backbone.parameters())
    sizes = [(own.linear.in_features, own.linear.out_features) for own in model.maps.values()]
    both, entering = sum(map(sum, sizes)), sum(size for size, _ in sizes)
    wanted = dict(total=seed + 6 * both + 3 * entering, active=seed + 5 * both + 3 * entering)
    assert model.count_parameters() == wanted


def test_it_is_saved_and_read(model, tiny, tmp_path):
    loaded = load_model(model.save(tmp_path / "model"))
    assert type(loaded) is RoutedAdapters and loaded.settings == model.settings
    assert same(loaded.backbone, model.backbone)
    assert torch.equal(scores(loaded, tiny), scores(model, tiny))


def test_numbers_that_are_not_finite_are_not_saved(tiny_seed, model, tmp_path):
    broken = RoutedAdapters(tiny_seed, model.settings)
    place, own = next(iter(broken.maps.items()))
    own.directions[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match=f"{place[0]}.{place[1]}.directions of the routed"):
        broken.save(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda t: t.pop(min(t)), "lacks the tensor .*c_fc.a"),
        (lambda t: t.update(more=torch.ones(1)), "a tensor that no map uses: more"),
        (
            lambda t: t.update({min(t): torch.ones(2, 2)}),
            r"c_fc.a is \[2, 2\], but must be \[6, 64",
        ),
    ],
)
def test_tensors_that_do_not_belong_are_refused(change, said, model, tmp_path):
    folder = model.save(tmp_path / "model")
    file = folder / "adapters.safetensors"
    change(tensors := load_file(file))
    save_file(tensors, file)
    with pytest.raises(ValueError, match="was changed after it was written"):
        load_model(folder)
    with pytest.raises(ValueError, match=said):
        read_model(folder)


@pytest.mark.parametrize(
    "changes, said",
    [
        (dict(experts=["a", "b"]), "must be as many"),
        (dict(experts=["a", "b", "../c"]), "c"),
        (dict(experts=["a", "b", "b"]), "b"),
        (dict(ranks=[1, 3, 0]), "ranks must be positive"),
        (dict(scales=[1.0, 1.0, -1.0]), "must be finite, and not be negative"),
        (dict(top_k=4), "top_k is 4, but must be 1 to 3"),
        (dict(top_k=0), "top_k is 0"),
        (dict(temperature=0.0), "temperature is 0.0, but must be positive"),
        (dict(temperature="warm"), "temperature"),
        (dict(more=1), "more"),
    ],
    ids=str,
)
def test_facts_that_cannot_be_are_refused(changes, said, model, tmp_path):
    folder = model.save(tmp_path / "model")
    told = json.loads((folder / FILE).read_text()) | changes
    (folder / FILE).write_text(json.dumps(told))
    write_manifest(folder, "model", {})
    with pytest.raises(ValueError, match=said):
        load_model(folder)
