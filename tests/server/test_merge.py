"The clients' experts side by side in one model, before anything is trained."

from dataclasses import replace

import pytest
import torch
from networks import close, embed, same, weights

from harmomoe.bundle.files import read_bundle
from harmomoe.client.client import Client
from harmomoe.config.settings import changed
from harmomoe.moe.context import FORMS
from harmomoe.moe.router import RouterSettings
from harmomoe.server.merge import merge

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
        sent = torch.stack([bundle.routing.vectors[index] for bundle in bundles])
        assert torch.equal(layer.router.vectors[seed_expert:], sent)
        if form == "mean":
            assert layer.router.biases is None
        else:
            sent = torch.stack([bundle.routing.biases[index] for bundle in bundles])
            assert torch.equal(layer.router.biases[seed_expert:], sent)


@pytest.mark.parametrize("form", FORMS)
def test_first_column_is_the_seeds_own(form, merge_with, tiny_public):
    own = tiny_public.routing(form)
    for index, layer in enumerate(merge_with(form=form).layers):
        assert torch.equal(layer.router.vectors[0], own.vectors[index])
        assert layer.router.biases is None or layer.router.biases[0] == own.biases[index]


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

    routings = tiny.public.routing("mean"), *(bundle.routing for bundle in tiny.bundles)
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
    said = f"of c have the form {sent!r}, but the router's form is {form!r}"
    with pytest.raises(ValueError, match=said):
        merge_with(bundles, form=form)


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
