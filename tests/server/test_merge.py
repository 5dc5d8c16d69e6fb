"The clients' experts side by side in one model, before anything is trained."

from dataclasses import replace

import pytest
import torch
from helpers import routing_of
from networks import close, embed, same, weights

from harmomoe.bundle.files import read_bundle
from harmomoe.client.client import Client
from harmomoe.config.settings import changed
from harmomoe.moe.context import FORMS
from harmomoe.moe.router import RouterSettings
from harmomoe.server.merge import (
    ROUTERS,
    choose_router,
    merge,
    other_router,
    server_settings,
)

pytestmark = pytest.mark.filterwarnings("ignore:The PEFT config's:UserWarning")
INSIDE = "router.vectors", "router.lam", "a.c_fc", "a.c_proj", "b.c_fc", "b.c_proj"


# ---- what is in it


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed_expert", [True, False], ids=["with the seed", "without"])
def test_model_holds_what_was_sent_and_nothing_else_of_the_clients(
    form, seed_expert, merge_with, tiny
):
    model, bundles = merge_with(form=form, seed_expert=seed_expert), tiny.sent[form]
    assert model.experts == [*["seed"] * seed_expert, "a", "b", "c"]
    assert model.ranks == [*[0] * seed_expert, 4, 4, 4]
    assert model.scales == [*[0.0] * seed_expert, 2.0, 2.0, 2.0]
    for index, (path, layer) in enumerate(zip(tiny.seed.layers, model.layers)):
        for linear in tiny.seed.ffn.linears:
            a, b = zip(*(bundle.factors[path, linear] for bundle in bundles))
            assert torch.equal(layer.a[linear], torch.cat(a))
            assert torch.equal(layer.b[linear], torch.cat(b, 1).T)
        sent = torch.stack([routing_of(bundle).vectors[index] for bundle in bundles])
        assert torch.equal(layer.router.vectors[seed_expert:], sent)
        if form == "mean":
            assert layer.router.biases is None
        else:
            sent = torch.stack([routing_of(bundle).biases[index] for bundle in bundles])
            assert torch.equal(layer.router.biases[seed_expert:], sent)


@pytest.mark.parametrize("form", FORMS)
def test_first_column_is_the_seeds_own(form, merge_with, tiny_public):
    own = tiny_public.routing(form)
    for index, layer in enumerate(merge_with(form=form).layers):
        assert torch.equal(layer.router.vectors[0], own.vectors[index])
        assert layer.router.biases is None or layer.router.biases[0] == own.biases[index]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed_expert", [True, False], ids=["with the seed", "without"])
def test_the_seeds_own_expert_has_its_logit_where_vectors_are_ratios(form, seed_expert, merge_with):
    plain = merge_with(form=form, seed_expert=seed_expert)
    other = merge_with(form=form, seed_expert=seed_expert, seed_logit=-2.5)
    if form == "mean" or not seed_expert:
        assert same(plain.backbone, other.backbone)
        return
    for one, two in zip(plain.layers, other.layers):
        assert two.router.biases[0] == -2.5 and not two.router.vectors[0].any()
        assert torch.equal(one.router.biases[1:], two.router.biases[1:])
        assert torch.equal(one.router.vectors, two.router.vectors)


def test_evidence_counts_in_the_units_of_the_public_sample(merge_with, tiny):
    center, scale = tiny.public.units
    for index, layer in enumerate(merge_with(form="evidence").layers):
        assert torch.equal(layer.router.center, center[index])
        assert torch.equal(layer.router.scale, scale[index])
        assert layer.router.looks == index + 1 and not layer.router.lam.requires_grad


def test_seeds_weights_are_in_the_model_unchanged(merge_with, tiny):
    before = tiny.seed.identity
    model = merge_with()
    ours = weights(model.backbone)
    for name, value in weights(tiny.seed.backbone).items():
        assert torch.equal(ours[name.replace(".mlp.", ".mlp.ffn.")], value), name
    learn = {name for name, p in model.backbone.named_parameters() if p.requires_grad}
    assert learn == {f"{layer}.{name}" for layer in tiny.seed.layers for name in INSIDE}
    assert tiny.seed.identity == before


def test_routing_vectors_start_from_means_or_at_random_by_the_random_state(merge_with, tiny):
    def start(**settings):
        layers = merge_with(**settings).layers
        return torch.stack([layer.router.vectors.detach() for layer in layers])

    routings = tiny.public.routing("mean"), *(routing_of(bundle) for bundle in tiny.bundles)
    means = torch.stack([routing.vectors for routing in routings], 1)
    assert torch.equal(start(), means)
    # the seed's own are those of a random public sample
    assert torch.equal(start(random_state=1)[:, 1:], means[:, 1:])
    random = start(form="random", random_state=1)
    assert torch.equal(random, start(form="random", random_state=1))
    assert not torch.equal(random, start(form="random", random_state=2))
    assert not torch.equal(random, means) and random.std().item() == pytest.approx(0.02, rel=0.3)


def test_random_vectors_leave_the_outer_generator_alone_and_need_no_form(merge_with, tiny):
    torch.manual_seed(1)
    wanted = torch.rand(1)
    torch.manual_seed(1)
    one, other = (merge_with(sent, form="random") for sent in (tiny.bundles, tiny.moments))
    assert torch.equal(torch.rand(1), wanted) and same(one.backbone, other.backbone)


def test_experts_of_different_ranks_and_scales_keep_their_own(tiny, merge_with, tmp_path):
    changes = {"expert.rank": 2, "expert.alpha": 6.0, "expert.epochs": 1}
    public = tiny.public.with_config(changed(tiny.settings, changes))
    small = read_bundle(Client(public, tiny.a, tmp_path).bundle(), public)
    model, data = merge_with([tiny.bundles[1], small]), tiny.pool.test
    assert model.experts == ["seed", "b", "a"]
    assert (model.ranks, model.scales) == ([0, 4, 2], [0.0, 2.0, 3.0])
    for bundle in (small, tiny.bundles[1]):
        with model.only(bundle.client):
            assert close(embed(model, data), embed(bundle.expert(tiny.seed), data))


# ---- two forms of one expert


@pytest.mark.parametrize("form", ["mean", "moments"])
@pytest.mark.parametrize("seed_expert", [True, False], ids=["with the seed", "without"])
def test_of_two_forms_each_makes_the_model_that_it_would_make_alone(
    form, seed_expert, merge_with, tiny
):
    assert all(list(bundle.routing) == ["mean", "moments"] for bundle in tiny.both)
    how = dict(form=form, seed_expert=seed_expert, top_k=2)
    one, both = merge_with(tiny.sent[form], **how), merge_with(tiny.both, **how)
    assert one.experts == both.experts and one.settings == both.settings
    assert same(one.backbone, both.backbone)
    mixed = merge_with([tiny.sent[form][0], *tiny.both[1:]], **how)
    assert same(one.backbone, mixed.backbone)


def test_a_router_has_a_name_or_stays(tiny):
    config = changed(tiny.settings, {"router.top_k": 3, "router.context": "prompt"})
    assert choose_router(config, "preset") is config
    for name, settings in ROUTERS.items():
        found = choose_router(config, name)
        assert found.router == replace(settings, context="prompt")
        assert replace(found, router=config.router) == config
    assert ROUTERS["paper"] == RouterSettings() and ROUTERS["ratios"].form != "mean"
    for name in ("best", "", "Paper"):
        with pytest.raises(ValueError, match=f"router is {name!r}, but must be one of preset, pap"):
            choose_router(config, name)
    for form, other in (
        ("mean", "ratios"),
        ("random", "ratios"),
        ("moments", "paper"),
        ("evidence", "paper"),
    ):
        assert other_router(RouterSettings(form=form)) == other


def test_a_server_changes_its_own_settings_and_no_others(tiny):
    asked = changed(tiny.settings, {"routing.forms": "moments", "random_state": 3})
    found = server_settings(asked, "paper", "router.lam=0.5, finetune.epochs=7")
    assert (found.router, found.finetune.epochs) == (RouterSettings(lam=0.5), 7)
    assert replace(found, router=asked.router, finetune=asked.finetune) == asked
    assert server_settings(asked) == asked
    assert server_settings(asked, settings="router.form=moments").router.form == "moments"
    assert server_settings(asked, settings="router.form=random").router.form == "random"


@pytest.mark.parametrize(
    "router, settings, said",
    [
        ("preset", "expert.rank=2", "expert went into the bundles and cannot be changed"),
        ("preset", "routing.public_samples=9", "routing went into the bundles"),
        ("paper", "routing.forms=moments", "routing went into the bundles"),
        ("paper", "random_state=9", "random_state went into the bundles"),
        ("preset", "router.context=prompt", "router.context went into the bundles"),
        (
            "preset",
            "router.form=logistic",
            "is 'logistic', but clients were asked for mean: choose",
        ),
        ("ratios", "", "but clients were asked for mean: choose one of these"),
        ("best", "", "router is 'best', but must be"),
        ("paper", "router.topk=1", "unknown field 'router.topk'"),
    ],
)
def test_what_went_into_the_bundles_cannot_be_changed_by_the_server(router, settings, said, tiny):
    with pytest.raises(ValueError, match=said):
        server_settings(tiny.settings, router, settings)


# ---- in what order


ORDER = [2, 0, 1]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed_expert", [True, False], ids=["with the seed", "without"])
def test_bundles_in_another_order_are_the_same_columns_in_another_order(
    form, seed_expert, merge_with, tiny
):
    how = dict(form=form, seed_expert=seed_expert, top_k=2)
    one = merge_with(**how)
    other = merge_with([tiny.sent[form][k] for k in ORDER], **how)
    columns = [one.experts.index(name) for name in other.experts]
    assert columns != sorted(columns)
    for here, there in zip(one.layers, other.layers):
        assert torch.equal(there.router.vectors, here.router.vectors[columns])
        if form != "mean":
            assert torch.equal(there.router.biases, here.router.biases[columns])
        rows = torch.cat([torch.nonzero(here.owner == column)[:, 0] for column in columns])
        for name in tiny.seed.ffn.linears:
            assert torch.equal(there.a[name], here.a[name][rows])
            assert torch.equal(there.b[name], here.b[name][rows])
    assert close(embed(one, tiny.pool.test), embed(other, tiny.pool.test))


# ---- what is refused


@pytest.mark.parametrize("names", [(), ("a", "a"), ("seed", "b")], ids=str)
def test_clients_need_different_names_other_than_seed(names, tiny, merge_with):
    with pytest.raises(ValueError, match="different names.*'seed'"):
        merge_with([replace(tiny.bundles[0], client=name) for name in names])


@pytest.mark.parametrize("sent", FORMS)
@pytest.mark.parametrize("form", FORMS)
def test_routing_vectors_of_another_form_are_refused_and_named(form, sent, tiny, merge_with):
    bundles = [*tiny.sent[form][:2], tiny.sent[sent][2]]
    if form == sent:
        assert merge_with(bundles, form=form).settings.form == form
        return
    said = f"c sent routing vectors of the form {sent}, but the router's form is {form!r}"
    with pytest.raises(ValueError, match=said):
        merge_with(bundles, form=form)


def test_who_did_not_send_the_form_is_named_with_all_that_it_sent(tiny, merge_with):
    with pytest.raises(ValueError, match="a sent .* form mean, moments, but .*form is 'logistic'"):
        merge_with(tiny.both, form="logistic")
    with pytest.raises(ValueError, match="b sent .* form mean, but the router's form is 'moments'"):
        merge_with([tiny.both[0], tiny.bundles[1]], form="moments")


@pytest.mark.parametrize("top_k", [0, 5])
def test_top_k_outside_the_number_of_experts_is_refused(top_k, merge_with):
    with pytest.raises(
        ValueError, match=f"top_k is {top_k}, but must be (1 to 4|a whole number from 1)"
    ):
        merge_with(top_k=top_k)
    with pytest.raises(ValueError, match="top_k is 4, but must be 1 to 3"):
        merge_with(top_k=4, seed_expert=False)


def test_settings_are_those_of_public_unless_others_are_given(tiny):
    public = tiny.public.with_config(changed(tiny.settings, {"router.top_k": 3}))
    assert merge(tiny.bundles, public).settings == RouterSettings(top_k=3)
    given = RouterSettings(top_k=2, lam=0.5)
    assert merge(tiny.bundles, public, given).settings == given
