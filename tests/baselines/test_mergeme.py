"MergeME: experts of all linear maps, what they share merged, and routing without training."

from dataclasses import replace
from functools import partial

import pytest
import torch
from networks import moved, weights
from watching import untrained

from harmomoe.baselines.btx import mix, mixture, share_attention
from harmomoe.baselines.mergeme import AllLinear, btx_ties, dense, mix_on_all_data
from harmomoe.baselines.method import AllData, harmomoe
from harmomoe.baselines.no_training import choose_by_prompt
from harmomoe.baselines.zero_shot import private_only
from harmomoe.client.client import Client
from harmomoe.config.settings import changed, preset
from harmomoe.data.domains import load_benchmark
from harmomoe.data.samples import labelled
from harmomoe.describe.public import Public
from harmomoe.models.model import load_model
from harmomoe.models.weights import open_seed
from harmomoe.server.dense import AVERAGE, RECIPES, merge_adapters

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PEFT config's:UserWarning"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
]
HOW = dict(epochs=1, batch_size=16, learning_rate=3e-3, optimizer="adamw", weight_decay=0.0)


@pytest.fixture(scope="module")
def public(tiny_decoder, tiny_texts, tmp_path_factory):
    benchmark = load_benchmark(tiny_texts, "colours,animals", "sayings")
    small = {
        "proxies": dict(candidates=40, number=12),
        "routing.public_samples": 40,
        "expert": dict(HOW, warmup_steps=0, rank=4, alpha=8),
        "finetune": HOW,
    }
    config = private_only(changed(preset("text"), small))
    pool, folder = replace(benchmark.pool, name="pool"), tmp_path_factory.mktemp("public")
    return Public(open_seed(str(tiny_decoder)), pool, config, folder)


@pytest.fixture(scope="module")
def domains(tiny_texts):
    return load_benchmark(tiny_texts, "colours,animals", "sayings").clients


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def bundles(public, domains, work):
    return btx_ties.receive(public, domains, work)


def attention(seed):
    return {f"{path}.{name}.weight" for path in seed.attention for name in seed.attention_maps}


def test_experts_change_attention_too_and_are_kept_apart_from_others(
    public, domains, bundles, work
):
    seed = public.seed
    both = {(path, name) for path in seed.layers for name in seed.ffn.linears}
    both |= {(path, name) for path in seed.attention for name in seed.attention_maps}
    for bundle in bundles:
        assert bundle.factors.keys() == both
        assert all(b.any() for _, b in bundle.factors.values())
    [own] = harmomoe.receive(public, domains[:1], work)
    assert {path for path, _ in own.factors} == set(seed.layers)
    given = public, domains[0], work / domains[0].name
    assert AllLinear(*given).expert != Client(*given).expert


@pytest.mark.parametrize("name", RECIPES)
def test_what_all_share_is_the_merged_one_and_ffns_stay_their_own(name, public, bundles):
    seed, recipe = public.seed, RECIPES[name]
    alone, other = share_attention(bundles, public, recipe)
    before = weights(seed.backbone)
    assert moved(other.seed.backbone, before) == attention(seed)
    state = public.config.random_state
    whole = weights(merge_adapters(seed, bundles, recipe, state))
    now = weights(other.seed.backbone)
    assert all(torch.allclose(now[part], whole[part], atol=1e-6) for part in attention(seed))
    for bundle, given in zip(alone, bundles):
        assert bundle.factors == {p: f for p, f in given.factors.items() if p[0] in seed.layers}
    assert moved(public.seed.backbone, before) == set()
    assert other.seed.weights_digest != seed.weights_digest


def test_experts_of_ffns_have_nothing_to_share(public, bundles):
    alone, _ = share_attention(bundles, public)
    same, as_it_was = share_attention(alone, public)
    assert same is alone and as_it_was is public


def test_mixture_of_one_expert_is_that_expert(public, bundles, domains):
    one = public.with_config(changed(public.config, {"router.top_k": 1}))
    model = mixture(bundles[:1], one)
    expert = bundles[0].expert(public.seed)
    [batch] = public.seed.batches(labelled(domains[0].test), batch_size=100)
    with torch.no_grad():
        found, wanted = (m.scorer(domains[0].classes)(batch) for m in (model, expert))
    assert torch.allclose(found, wanted, atol=1e-4)


@pytest.mark.parametrize("name", ["average", "ties", "dare"])
def test_fine_tuning_moves_routers_and_experts_and_the_seed_comes_along(
    name, public, bundles, tmp_path
):
    recipe = RECIPES[name]
    start = mix(bundles, public.with_config(untrained(public.config)), recipe)
    model = mix(bundles, public, recipe)
    parts = moved(model.backbone, weights(start.backbone))
    assert parts and all("mlp" in part and ".ffn." not in part for part in parts)
    again = load_model(model.save(tmp_path / "saved"))
    assert not moved(again.backbone, weights(model.backbone))


def test_on_all_data_the_server_sees_everybodys(public, domains, bundles, work):
    method = AllData("mine", partial(mix_on_all_data, recipe=RECIPES["ties"]), private_only)
    model, sent = method.run(public, domains, work)
    assert sent == 0 and len(model.losses) == 1
    start = mixture(bundles, public, RECIPES["ties"])
    parts = moved(model.backbone, weights(start.backbone))
    assert parts and all("mlp" in part and ".ffn." not in part for part in parts)
    other = mix(bundles, public, RECIPES["ties"])  # on public data
    assert moved(model.backbone, weights(other.backbone)) == parts


def test_the_dense_one_is_what_merging_says(public, bundles):
    model = dense(bundles, public, RECIPES["dare"])
    wanted = merge_adapters(public.seed, bundles, RECIPES["dare"], public.config.random_state)
    assert not moved(model.backbone, weights(wanted))
    other = replace(public, config=replace(public.config, random_state=1))
    assert moved(dense(bundles, other, RECIPES["dare"]).backbone, weights(wanted))


# ---- without training


@pytest.mark.parametrize("by", ["perplexity", "task_vector"])
def test_chosen_experts_are_the_bundles(by, public, bundles, domains):
    model = choose_by_prompt(bundles, public, by)
    assert model.settings.experts == ["seed", "colours", "animals"]
    assert model.settings.by == by and set(model.settings.attention) == set(
        public.seed.attention_maps
    )
    [batch] = public.seed.batches(labelled(domains[0].test), batch_size=100)
    task = public.seed.task(domains[0].classes)
    for number, bundle in enumerate(bundles, 1):
        with model.mixed(alone=number) as backbone, torch.no_grad():
            found = task.scores(backbone, batch)
            wanted = task.scores(bundle.expert(public.seed).backbone, batch)
        assert torch.allclose(found, wanted, atol=1e-4)


def test_merged_attention_is_the_mean_with_the_seed_among_them(public, bundles):
    model = choose_by_prompt(bundles, public, separate=False)
    dense_mean = weights(merge_adapters(public.seed, bundles, AVERAGE))
    base = weights(public.seed.backbone)
    for (path, name), part in model.maps.items():
        if part.merged is not None:
            place = f"{path}.{name}.weight"
            wanted = (dense_mean[place] - base[place]) * 2 / 3  # of three, not of two
            assert torch.allclose(part.merged, wanted, atol=1e-6)
    assert sum(part.merged is not None for part in model.maps.values()) == len(
        attention(public.seed)
    )


def test_one_client_and_the_seed_are_enough(public, bundles):
    assert choose_by_prompt(bundles[:1], public, top_k=5).settings.top_k == 2
