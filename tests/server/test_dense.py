"One way to merge weights: its two choices, against PEFT's, and every tensor accounted for."

import json
import weakref
from dataclasses import replace
from itertools import product

import pytest
import torch
from networks import same, weights
from peft.utils import merge_utils
from safetensors.torch import load_file, save_file
from torch import nn

from harmomoe.bundle.files import Bundle
from harmomoe.server.dense import (
    AVERAGE,
    RECIPES,
    Account,
    Differences,
    LowRankChanges,
    Recipe,
    StoredWeights,
    adapter_changes,
    elected,
    merge_adapters,
    merge_changes,
    merge_folders,
    merge_into,
    merge_networks,
    merged_change,
    merged_weights,
    sparsify,
)

pytestmark = pytest.mark.filterwarnings("ignore:The PEFT config's:UserWarning")
LARGEST, RANDOM = ("magnitude", "elected"), ("random", "elected")


def drawn(count=3, shape=(13, 7), random_state=0):
    "Changes of one weight, float64, as PEFT's functions take them, too."
    generator = torch.Generator().manual_seed(random_state)
    return [torch.randn(shape, generator=generator).double() for _ in range(count)]


# ---- the two choices


@pytest.mark.parametrize("density", [0.1, 0.5, 0.8, 1.0])
def test_the_largest_entries_stay_as_they_are(density):
    [change] = drawn(1)
    kept = sparsify(change, Recipe("magnitude", density=density))
    there = kept != 0
    assert there.sum() == int(density * change.numel())
    assert torch.equal(kept[there], change[there])
    assert there.all() or change[~there].abs().max() <= change[there].abs().min()


def test_of_a_tensor_of_one_entry_it_is_kept():
    assert sparsify(torch.tensor([0.5]), RECIPES["ties"]).item() == 0.5


def test_random_entries_are_a_share_and_keep_the_expectation():
    change = torch.ones(200_000, dtype=torch.float64)
    kept = sparsify(change, RECIPES["dare"], torch.Generator().manual_seed(0))
    assert set(kept.unique().tolist()) == {0.0, 1.25}
    assert (kept != 0).double().mean().item() == pytest.approx(0.8, abs=0.005)
    assert kept.mean().item() == pytest.approx(1, abs=0.006)


def brute_force(changes, recipe):
    "Entry by entry."
    merged = torch.zeros_like(changes[0])
    for place in product(*map(range, merged.shape)):
        entries = [change[place].item() for change in changes]
        if recipe.consensus == "elected":
            sign = 1 if sum(entries) >= 0 else -1
            entries = [x for x in entries if x * sign > 0]
        count = max(len(entries), 1) if recipe.mean else 1
        merged[place] = recipe.scale * sum(entries) / count
    return merged


@pytest.mark.parametrize("consensus", ["sum", "elected"])
@pytest.mark.parametrize("mean", [False, True], ids=["sum", "mean"])
def test_consensus_is_what_it_is_entry_by_entry(consensus, mean):
    recipe, changes = Recipe("none", consensus, scale=0.7, mean=mean), drawn(4)
    assert torch.allclose(merge_changes(changes, recipe), brute_force(changes, recipe))


def test_a_sum_of_zero_counts_as_positive():
    changes = torch.tensor([[0.5, 0.0], [-0.5, 0.0]])
    assert elected(changes).tolist() == [[True, False], [False, False]]


def test_averaging_is_the_mean_and_arithmetic_the_scaled_sum():
    changes = drawn(3)
    assert torch.allclose(merge_changes(changes, AVERAGE), sum(changes) / 3)
    assert torch.allclose(merge_changes(changes, RECIPES["arithmetic"]), sum(changes) / 3)
    assert torch.allclose(merge_changes(changes[:2], RECIPES["arithmetic"]), sum(changes[:2]) / 3)


@pytest.mark.parametrize(
    "wrong", [dict(density=0), dict(density=1.5), dict(scale=-1), dict(sparsify="all")]
)
def test_recipes_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Recipe(**wrong)


# ---- PEFT


@pytest.mark.parametrize("density", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("weighted", [False, True])
def test_where_all_agree_it_is_pefts(density, weighted):
    changes, ones = drawn(3), torch.ones(3, dtype=torch.float64)
    some = torch.tensor([0.5, 2.0, 0.25]).double() if weighted else ones
    given = dict(weights=some.tolist())
    cut = Recipe("magnitude", density=density)
    wanted = merge_utils.magnitude_prune(changes, some, density)
    assert torch.allclose(merge_changes(changes, cut, **given), wanted)
    wanted = merge_utils.task_arithmetic(changes, some)
    assert torch.allclose(merge_changes(changes, Recipe(), **given), wanted)
    wanted = merge_utils.ties(changes, ones, density)
    ties = Recipe(*LARGEST, density=density, mean=True)
    assert torch.allclose(merge_changes(changes, ties), wanted)


def test_sum_of_ties_is_pefts_mean_times_how_many_agree():
    changes, recipe = drawn(3), Recipe(*LARGEST, density=0.6)
    pruned = torch.stack([merge_utils.prune(x, 0.6, "magnitude") for x in changes])
    count = merge_utils.calculate_majority_sign_mask(pruned).sum(0).clamp(min=1)
    wanted = merge_utils.ties(changes, torch.ones(3), 0.6) * count
    assert torch.allclose(merge_changes(changes, recipe), wanted)


@pytest.mark.parametrize("name", ["dare_linear", "dare_ties"])
def test_dare_is_pefts_with_the_same_random_numbers(name):
    "Which PEFT draws from torch's own generator, in the changes' type."
    changes, ones = drawn(3), torch.ones(3, dtype=torch.float64)
    recipe = Recipe("random", "elected" if name == "dare_ties" else "sum", density=0.7)
    recipe = replace(recipe, mean=name == "dare_ties")
    torch.manual_seed(5)
    wanted = getattr(merge_utils, name)(changes, ones, 0.7)
    torch.manual_seed(5)
    assert torch.allclose(merge_changes(changes, recipe), wanted)
    assert not torch.allclose(merge_changes(changes, recipe), wanted)  # other numbers


def test_weights_count_in_our_election_and_not_in_pefts():
    changes, some = [torch.tensor([1.0]).double(), torch.tensor([-0.6]).double()], [0.2, 1.0]
    recipe = Recipe("none", "elected", mean=True)
    assert merge_changes(changes, recipe, weights=some).item() == pytest.approx(-0.6)
    majority = merge_utils.calculate_majority_sign_mask(torch.stack(changes))
    assert majority.squeeze().tolist() == [True, False]
    theirs = merge_utils.disjoint_merge(
        torch.stack(changes) * torch.tensor(some)[:, None], majority
    )
    assert theirs.item() == pytest.approx(0.2)


def test_merging_factors_apart_as_peft_does_is_another_merge():
    generator, recipe = torch.Generator().manual_seed(0), Recipe(*LARGEST, mean=True)
    pairs = [
        (torch.randn(2, 6, generator=generator), torch.randn(5, 2, generator=generator))
        for _ in range(3)
    ]
    ours = merge_changes([b @ a for a, b in pairs], recipe)
    a, b = (merge_utils.ties([p[i] for p in pairs], torch.ones(3), 0.8) for i in (0, 1))
    assert (ours - b @ a).norm() > 0.5 * ours.norm()


# ---- adapters, networks, tensors


def adapter(seed, rank, scale, random_state, attention=()):
    "A bundle with random factors, as merging sees it."
    generator, factors = torch.Generator().manual_seed(random_state), {}
    for path, linear in product(seed.layers, seed.ffn.linears):
        weight = getattr(seed.backbone.get_submodule(path), linear).weight
        a = 0.1 * torch.randn(rank, weight.shape[1], generator=generator)
        factors[path, linear] = a, 0.1 * torch.randn(weight.shape[0], rank, generator=generator)
    return Bundle(f"client-{random_state}", factors, scale, None, None, None, None)


@pytest.mark.parametrize("name", RECIPES)
def test_adapters_of_different_ranks_are_merged_as_the_networks_they_make(name, tiny):
    seed, recipe = tiny.seed, RECIPES[name]
    bundles = [adapter(seed, rank, scale, rank) for rank, scale in ((1, 2.0), (3, 0.5), (7, 1.0))]
    merged = dict(merge_adapters(seed, bundles, recipe, 4).named_parameters())
    base, changing = dict(seed.backbone.named_parameters()), adapter_changes(bundles[0])
    for weight_name, weight in base.items():
        if weight_name not in changing:
            assert torch.equal(merged[weight_name], weight)
            continue
        path, _, linear = weight_name.removesuffix(".weight").rpartition(".")
        dense = [
            b.scale * (f := b.factors[path, linear])[1].double() @ f[0].double() for b in bundles
        ]
        assert (merged[weight_name] != weight).any()
        if recipe.sparsify != "random":
            kept = [sparsify(x, recipe) for x in dense]
            wanted = weight.double() + brute_force(kept, recipe)
            assert torch.allclose(merged[weight_name].double(), wanted, atol=1e-6)


def test_mean_of_networks_is_the_mean_of_every_parameter(tiny):
    generator, parts = torch.Generator().manual_seed(0), []
    for _ in range(3):
        backbone = tiny.seed.new_backbone()
        with torch.no_grad():
            for parameter in backbone.parameters():
                parameter += torch.randn(parameter.shape, generator=generator)
        parts.append(backbone)
    mean, tables = merge_networks(tiny.seed, parts), [dict(x.named_parameters()) for x in parts]
    for name, parameter in mean.named_parameters():
        wanted = torch.stack([table[name].double() for table in tables]).mean(0)
        assert torch.allclose(parameter.double(), wanted, atol=1e-6, rtol=1e-6), name


def test_every_tensor_of_the_base_is_merged_or_said_to_be_kept(tiny):
    seed, bundles = tiny.seed, [adapter(tiny.seed, 2, 1.0, 0)]
    del bundles[0].factors[next(iter(bundles[0].factors))]
    backbone = seed.new_backbone()
    account, names = (
        merge_into(backbone, [adapter_changes(bundles[0])]),
        [*seed.backbone.state_dict()],
    )
    assert sorted([*account.merged, *account.kept]) == sorted(names)
    assert set(account.merged) == {f"{path}.{linear}.weight" for path, linear in bundles[0].factors}
    assert set(account.kept.values()) == {"no expert changes it"}
    account.check(names)
    for wrong in (
        Account(account.merged[1:], account.kept),
        Account([*account.merged, "x"], account.kept),
        Account(account.merged, account.kept | {account.merged[0]: "twice"}),
    ):
        with pytest.raises(ValueError, match="account of a merge is wrong about the tensor"):
            wrong.check(names)


def test_a_change_without_a_place_is_an_error_before_anything_changes():
    base = {"a": torch.zeros(2, 2)}
    with pytest.raises(ValueError, match="an expert changes b, which the base does not have"):
        dict(merged_weights(base, [{"a": torch.ones(2, 2)}, {"b": torch.ones(1)}], AVERAGE))
    with pytest.raises(ValueError, match=r"change of a is \[2, 3\], but \[2, 2\] in the base"):
        dict(merged_weights(base, [{"a": torch.ones(2, 3)}], AVERAGE))
    with pytest.raises(ValueError, match="changes of a have different shapes"):
        merged_change("a", [{"a": torch.ones(2, 3)}, {"a": torch.ones(2, 2)}])
    with pytest.raises(ValueError, match="no expert to merge"):
        dict(merged_weights(base, [], AVERAGE))


def test_numbers_that_count_are_kept():
    base, account = {"steps": torch.tensor(3), "w": torch.ones(2)}, Account()
    expert = Differences(base, {"steps": torch.tensor(5), "w": torch.zeros(2)})
    found = dict(merged_weights(base, [expert], AVERAGE, account=account))
    assert found["steps"] == 3 and not found["w"].any()
    assert account.kept == {"steps": "it counts"}


def test_random_entries_depend_on_the_tensors_name_and_not_on_its_place():
    names, expert = ["one", "two", "three"], {}
    expert = {name: torch.ones(50) for name in names}
    zero = {name: torch.zeros(50) for name in names}
    some = lambda order, state: dict(
        merged_weights({n: zero[n] for n in order}, [expert], RECIPES["dare"], state)
    )
    first, again, other = some(names, 0), some(names[::-1], 0), some(names, 1)
    assert all(torch.equal(first[name], again[name]) for name in names)
    assert not torch.equal(first["one"], other["one"])
    assert not torch.equal(first["one"], first["two"])


def test_one_weight_of_all_experts_is_held_at_a_time():
    alive, most = [], []

    class Watched(LowRankChanges):
        def __getitem__(self, name):
            found = LowRankChanges.__getitem__(self, name)
            alive[:] = [x for x in alive if x() is not None]
            alive.append(weakref.ref(found))
            most.append(len(alive))
            return found

    pair = torch.ones(1, 4), torch.ones(3, 1)
    experts = [Watched(dict.fromkeys("abcdef", pair), 1.0) for _ in range(2)]
    base = dict.fromkeys("abcdef", torch.zeros(3, 4))
    for _ in merged_weights(base, experts, AVERAGE):
        pass
    assert len(most) == 12 and max(most) <= 4


# ---- folders


@pytest.fixture
def folders(tmp_path):
    "A base in two files, and two experts in one."
    torch.manual_seed(0)
    networks = [nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)) for _ in range(3)]
    for number, network in enumerate(networks):
        folder = tmp_path / str(number)
        folder.mkdir()
        own = weights(network)
        parts = [own]
        if not number:
            parts = [{n: own[n] for n in own if n[0] == part} for part in "01"]
            (folder / "config.json").write_text("{}")
        for index, part in enumerate(parts):
            save_file(part, folder / f"model-{index}.safetensors")
    return [tmp_path / str(number) for number in range(3)], networks


def test_folders_are_merged_file_by_file(folders, tmp_path):
    (base, *experts), networks = folders
    account = merge_folders(base, experts, tmp_path / "merged")
    files = sorted(path.name for path in (tmp_path / "merged").iterdir())
    assert files == ["config.json", "merge.json", "model-0.safetensors", "model-1.safetensors"]
    assert set(load_file(tmp_path / "merged" / "model-0.safetensors")) == {"0.weight", "0.bias"}
    told = json.loads((tmp_path / "merged" / "merge.json").read_text())
    assert told["merged"] == account.merged and told["recipe"]["mean"] is True
    tables = [weights(network) for network in networks[1:]]
    for name, weight in StoredWeights(tmp_path / "merged").items():
        assert torch.allclose(weight, (tables[0][name] + tables[1][name]) / 2)


def test_folders_that_do_not_fit_leave_nothing_behind(folders, tmp_path):
    (base, one, two), _ = folders
    whole = load_file(two / "model-0.safetensors")
    save_file({n: t for n, t in whole.items() if n != "1.bias"}, two / "model-0.safetensors")
    with pytest.raises(ValueError, match="2 lacks the tensor 1.bias, which the other has"):
        merge_folders(base, [one, two], tmp_path / "merged")
    save_file(whole | {"1.bias": torch.ones(3)}, two / "model-0.safetensors")
    with pytest.raises(ValueError, match=r"1.bias of .*2 is \[3\], but \[2\] in the base"):
        merge_folders(base, [one, two], tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    with pytest.raises(ValueError, match="no .safetensors file"):
        StoredWeights(tmp_path)
    (two / "model-1.safetensors").write_bytes(b"no")
    with pytest.raises(ValueError, match="model-1.safetensors is no safetensors file"):
        StoredWeights(two)
    save_file(whole, two / "model-1.safetensors")
    with pytest.raises(ValueError, match="in two files"):
        StoredWeights(two)


def test_merging_a_network_with_itself_changes_nothing(tiny):
    backbone = tiny.seed.new_backbone()
    assert same(merge_networks(tiny.seed, [backbone, backbone]), backbone)
