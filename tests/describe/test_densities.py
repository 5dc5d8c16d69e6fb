"Densities of domains: along which components, how far from chance, and in what clients send."

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.covariance import ledoit_wolf

from harmomoe.client.client import Client
from harmomoe.config.settings import Config, RoutingSettings, changed
from harmomoe.describe.densities import EACH, density_routing, public_components
from harmomoe.describe.routing import NARROWEST, SHARPEST, RoutingVectors, form_means, log_ratios
from harmomoe.models.model import load_model
from harmomoe.moe.context import COMPONENTS
from harmomoe.moe.density import in_components, unpacked
from harmomoe.moe.router import RouterSettings
from harmomoe.server.merge import merge


@pytest.fixture(scope="module")
def public():
    "float32 [2, 300, 150], no two numbers independent."
    rng = torch.Generator().manual_seed(0)
    return torch.randn(2, 300, 150, generator=rng) @ torch.randn(2, 150, 150, generator=rng) + 3


@pytest.fixture(scope="module")
def private(public):
    return public[:, :200] * 0.5 + 1


def test_public_samples_have_mean_0_and_covariance_1(public):
    center, axes = public_components(public)
    assert center.dtype == axes.dtype == torch.float32 and axes.shape == (2, COMPONENTS, 150)
    for layer in range(2):
        seen = (public[layer].double() - center[layer]) @ axes[layer].double().T
        assert seen.mean(0).abs().max() < 1e-4
        assert torch.allclose(seen.T.cov(), torch.eye(COMPONENTS).double(), atol=1e-4)


def test_where_the_pool_spans_fewer_the_rest_are_zeros(public):
    _, axes = public_components(public[:, :30])
    assert axes[:, :29].any(2).all() and not axes[:, 29:].any()


@pytest.mark.parametrize("number", [200, 95, EACH, EACH - 1, 1])
def test_along_one_component_for_every_eight_samples(public, private, number):
    parts = public_components(public)
    found = density_routing(private[:, :number], *parts)
    assert found.form == "density" and not found.biases.any()
    j = number // EACH
    for layer, (middle, whiten) in enumerate(zip(*unpacked(found.vectors.double()))):
        u = in_components(*(x[layer].double() for x in (private[:, :number], *parts))).numpy()
        mean, covariance = np.zeros(COMPONENTS), np.eye(COMPONENTS)
        if j:
            mean[:j] = u[:, :j].mean(0)
            covariance[:j, :j] = ledoit_wolf(u[:, :j])[0] + NARROWEST * np.eye(j)
        assert np.allclose(middle, mean, atol=1e-5)
        assert np.allclose(np.linalg.inv(whiten.T @ whiten), covariance, atol=1e-4)


def test_samples_that_are_all_alike_have_a_density(public):
    found = density_routing(public[:, :1].expand(-1, 160, -1), *public_components(public))
    assert found.vectors.isfinite().all()


def test_own_samples_are_ahead_of_the_pools(public, private):
    parts = public_components(public)
    own, pool = density_routing(private, *parts), density_routing(public, *parts)
    ahead = log_ratios(own, private, parts) - log_ratios(pool, private, parts)
    assert (ahead.median(1).values > 0).all()


def test_clients_send_what_their_expert_makes_of_private_samples(tiny, tiny_density):
    for domain, bundle in zip(tiny.clients, tiny_density):
        assert [*bundle.routing] == ["evidence", "density"]
        own = bundle.expert(tiny.seed).backbone
        seen = form_means("density", tiny.seed, own, domain.train)
        wanted = density_routing(seen, *tiny.public.components)
        assert torch.allclose(bundle.routing["density"].vectors, wanted.vectors, atol=1e-4)
        same = bundle.routing["evidence"].vectors, tiny.evidence[tiny_density.index(bundle)]
        assert torch.equal(same[0], same[1].routing["evidence"].vectors)


def test_router_asks_clients_for_densities():
    router = RouterSettings(form="evidence", densities=True)
    assert RoutingSettings().sent(router) == ("evidence", "density")
    assert RoutingSettings(forms="density+mean").sent(RouterSettings()) == ("mean", "density")


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"router.densities": True}, "densities is True, but with form='mean'"),
        ({"routing.forms": "density", "routing.method": "lda"}, "form 'density', which has no"),
        ({"routing.forms": "density", "privacy.epsilon": 8.0}, "form 'density', which has no"),
        (
            {"routing.forms": "density", "router.context": "prefix"},
            "'density' needs the whole sequence",
        ),
    ],
)
def test_densities_where_there_can_be_none_are_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        changed(Config(), changes)


# ---- in the unified model


@pytest.fixture(scope="module")
def model(tiny, tiny_density):
    settings = RouterSettings(top_k=2, form="evidence", densities=True, norm_topk_prob=True)
    return merge(tiny_density, tiny.public, settings)


def first_router_says(model, seed, data):
    "Logits [n, E] of the first layer, and what enters its FFN."
    said, router = [], model.layers[0].router
    note = router.register_forward_pre_hook(
        lambda module, given, more: said.append(router.logits(*given, **more)[:, 0]),
        with_kwargs=True,
    )
    with torch.no_grad():
        for batch in seed.batches(data):
            seed.hidden(model.backbone, batch)
    note.remove()
    return torch.cat(said)


def test_members_are_told_apart_by_densities_and_from_the_pool_by_evidence(tiny, model):
    data, public = tiny.a.test, tiny.public
    seen = form_means("evidence", tiny.seed, tiny.seed.backbone, data)
    names = [name for name in model.experts if name != "seed"]
    bundles = {bundle.client: bundle for bundle in tiny.evidence}
    ratios = [public.log_ratios(bundles[name].routing["evidence"], seen)[0] for name in names]
    densities = []
    for name in names:
        own = density_routing(
            form_means(
                "density",
                tiny.seed,
                bundles[name].expert(tiny.seed).backbone,
                next(c for c in tiny.clients if c.name == name).train,
            ),
            *public.components,
        )
        densities.append(log_ratios(own, seen, public.components)[0])
    ratios, densities = torch.stack(ratios, 1), torch.stack(densities, 1)
    wanted = ratios.amax(1, keepdim=True) + densities.log_softmax(1)
    found = first_router_says(model, tiny.seed, data).double()
    places = [model.experts.index(name) for name in names]
    assert torch.allclose(found[:, places], wanted, atol=0.05, rtol=1e-3)
    assert not found[:, model.experts.index("seed")].any()


def test_a_saved_model_says_the_same(tiny, model, tmp_path):
    again = load_model(model.save(tmp_path / "model"))
    pair = [first_router_says(one, tiny.seed, tiny.b.test) for one in (model, again)]
    assert torch.equal(*pair)


def test_nobody_gains_by_components_that_the_pool_has_not_got(tiny, tiny_density):
    "Forty public samples have 39 components: along the others every sample is at 0."
    settings = RouterSettings(top_k=2, form="evidence", densities=True)
    sharp, bundle = tiny_density[0].routing["density"].vectors.clone(), tiny_density[0]
    rows, columns = torch.tril_indices(COMPONENTS, COMPONENTS)
    sharp[:, COMPONENTS:][:, (rows == columns) & (rows >= 39)] = SHARPEST
    changed_routing = bundle.routing | {
        "density": RoutingVectors(sharp, torch.zeros(2), "density"),
    }
    greedy = [replace(bundle, routing=changed_routing), *tiny_density[1:]]
    pair = [merge(bundles, tiny.public, settings) for bundles in (tiny_density, greedy)]
    honest, other = (first_router_says(model, tiny.seed, tiny.b.test) for model in pair)
    assert torch.equal(honest, other)


def test_densities_stay_as_they_were_sent(model):
    learns = {name for name, p in model.backbone.named_parameters() if p.requires_grad}
    kept = {name for name, _ in model.backbone.named_buffers()}
    for part in ("axes", "middle", "whiten"):
        assert any(name.endswith(part) for name in kept)
        assert not any(name.endswith(part) for name in learns)


def test_whoever_sent_none_is_named(tiny):
    settings = RouterSettings(form="evidence", densities=True)
    with pytest.raises(ValueError, match="a sent no density .* leave router.densities out"):
        merge(tiny.evidence, tiny.public, settings)


def test_names_without_data_are_like_the_pool(tiny):
    from harmomoe.exchange.adopt import NamedClient

    client = NamedClient(tiny.public, tiny.pool, tiny.work / "named", None)
    middle, whiten = unpacked(client.routing_of("density").vectors)
    assert not middle.any() and torch.equal(whiten, torch.eye(COMPONENTS).expand(2, -1, -1))


def test_a_client_without_a_gate_sends_its_density_once(tiny, tmp_path):
    public = tiny.public.with_config(changed(tiny.settings, {"routing.forms": "density"}))
    client = Client(public, tiny.a, tmp_path)
    first = client.routing_of("density")
    assert isinstance(first, RoutingVectors) and first.vectors.shape == (2, 8384)
    before = sorted(path.name for path in tmp_path.iterdir())
    assert torch.equal(first.vectors, client.routing_of("density").vectors)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
