"Routing vectors: what a client says of its domain, the optimum that it is, and what the router starts from with it."
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from scipy.optimize import minimize

import harmomoe.unify
from harmomoe.bundle import ADAPTER, ADAPTER_FILES, read_bundle
from harmomoe.experts import Training, load_expert, train_expert
from harmomoe.finetune import finetune
from harmomoe.moe import RouterSettings, load_model, save_model, unite
from harmomoe.router import Router
from harmomoe.routing import (FILE, RoutingVectors, client_routing, layer_means, logistic_routing, mean_routing,
                              public_routing, token_mean)
from harmomoe.unify import unify
from helpers import kept, stamps

SHORT = Training(epochs=1, batch_size=16, learning_rate=3e-3, optimizer="adamw", weight_decay=0.)
LOGISTIC = RouterSettings(initial="logistic")
PENALTY = .005

close = partial(torch.allclose, atol=1e-5)


def normal(*size, seed=0): return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def same(one, two):
    return one.form == two.form and torch.equal(one.vectors, two.vectors) and torch.equal(one.biases, two.biases)


def logits(routing, z):
    "What the routing vectors say of tokens [layers, n, d], in float64."
    return torch.einsum("lnd,ld->ln", z.double(), routing.vectors.double()) + routing.biases.double()[:, None]


# ---- means

def test_token_mean_looks_at_real_tokens_only():
    z, mask = normal(3, 4, 5), torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0]], dtype=torch.bool)
    expected = torch.stack([z[0].mean(0), (z[1, 0] + z[1, 2]) / 2, torch.zeros(5)])
    assert close(token_mean(z, mask), expected)
    assert torch.equal(token_mean(torch.where(mask[..., None], z, 1e3), mask), token_mean(z, mask))
    assert close(token_mean(z), z.sum(1) / 4)
    assert token_mean(z.bfloat16(), mask).dtype == torch.bfloat16


def entering(tiny, tower, data):
    "What enters each FFN, sample by sample: float64 [layers, n, T, d]."
    seen = [[] for _ in tiny.seed.layers]
    handles = [module.register_forward_pre_hook(lambda module, inputs, into=into: into.append(inputs[0].double()))
               for layer, into in zip(tiny.seed.layers, seen)
               for name, module in tower.named_modules() if name.endswith(layer)]
    with torch.no_grad():
        for batch in tiny.seed.batches(data, batch_size=1): tiny.seed.hidden(tower, batch)
    for handle in handles: handle.remove()
    return torch.stack([torch.cat(tokens) for tokens in seen])


def test_layer_means_are_the_means_of_what_enters_each_ffn_whatever_the_batch(tiny):
    data = tiny.a.train
    trained, _ = train_expert(tiny.seed, data, None, tiny.a.classes, SHORT, rank=4)
    for tower in (tiny.seed.tower, trained, load_expert(tiny.seed, tiny.bundles[0].folder / ADAPTER)):
        expected = entering(tiny, tower, data).mean(2)
        for batch_size in (256, 7):
            found = layer_means(tiny.seed, tower, data, batch_size)
            assert found.dtype == torch.float32 and found.shape == (2, 30, 64) and close(found.double(), expected)


def test_layer_means_leave_padding_out(tiny, monkeypatch):
    real = torch.tensor([True, False, True, True, False])
    monkeypatch.setattr(tiny.seed, "token_mask", lambda batch: real.expand(len(batch["images"]), 5))
    expected = entering(tiny, tiny.seed.tower, tiny.a.test)[:, :, real].mean(2)
    assert close(layer_means(tiny.seed, tiny.seed.tower, tiny.a.test, 5).double(), expected)


def test_layer_means_leave_no_hook_behind_even_after_an_error(tiny, monkeypatch):
    hooks = [tiny.seed.tower.get_submodule(path)._forward_pre_hooks for path in tiny.seed.layers]
    layer_means(tiny.seed, tiny.seed.tower, tiny.a.test)
    assert not any(hooks)
    monkeypatch.setattr(tiny.seed, "hidden", lambda tower, batch: 1 / 0)
    with pytest.raises(ZeroDivisionError): layer_means(tiny.seed, tiny.seed.tower, tiny.a.test)
    assert not any(hooks)


def test_mean_routing_is_exact_where_float32_sums_are_not():
    means = 1000 + normal(3, 5000, 4)
    found, exact = mean_routing(means), means.numpy().astype(np.float64).mean(1).astype(np.float32)
    assert np.array_equal(found.vectors.numpy(), exact) and not np.array_equal(means.numpy().mean(1), exact)
    assert found.form == "mean" and torch.equal(found.biases, torch.zeros(3))


# ---- density ratios

@pytest.fixture
def samples():
    "Means of 25 private and 60 public samples in 2 layers of width 6: [2, 25, 6] and [2, 60, 6]."
    move = torch.tensor([1., -.5, 0, 0, .3, 0])
    return normal(2, 25, 6, seed=1) * 1.5 + move, normal(2, 60, 6, seed=2) @ (torch.eye(6) + .3) - 2


def objective(private, public, penalty=PENALTY):
    "A function (weights and intercept, float64 [d + 1]) -> loss and gradient of one layer, on standardised features."
    x = torch.cat([private, public]).double()
    x, n = (x - x.mean(0)) / x.std(0, correction=0), len(private)

    def loss(values):
        w = torch.tensor(values, dtype=torch.float64, requires_grad=True)
        z = x @ w[:-1] + w[-1]
        value = (F.softplus(-z[:n]).mean() + F.softplus(z[n:]).mean()) / 2 + penalty / 2 * w[:-1].square().sum()
        return value.item(), torch.autograd.grad(value, w)[0].numpy()
    return loss


def standardised(routing, layer, private, public):
    "A layer's vector and bias as coefficients of standardised features: float64 [d + 1]."
    x, vector = torch.cat([private, public]).double(), routing.vectors[layer].double()
    bias = routing.biases[layer].double() + vector @ x.mean(0)
    return torch.cat([vector * x.std(0, correction=0), bias[None]]).numpy()


@pytest.mark.parametrize("penalty", [PENALTY, .5])
def test_logistic_routing_is_the_optimum_in_each_layer(penalty, samples):
    found = logistic_routing(*samples, penalty)
    assert found.form == "logistic" and found.vectors.shape == (2, 6) and found.biases.shape == (2,)
    for layer, (private, public) in enumerate(zip(*samples)):
        loss, w = objective(private, public, penalty), standardised(found, layer, private, public)
        best = minimize(loss, np.zeros(7), jac=True, method="BFGS", options=dict(gtol=1e-10))
        assert abs(loss(w)[1]).max() < 1e-4 and w == pytest.approx(best.x, abs=1e-3)       # where the solver stops
        alone = logistic_routing(private[None], public[None], penalty)
        assert torch.equal(alone.vectors[0], found.vectors[layer]) and alone.biases[0] == found.biases[layer]


def test_penalty_is_a_two_hundredth_unless_told(samples):
    assert same(logistic_routing(*samples), logistic_routing(*samples, PENALTY))
    assert not same(logistic_routing(*samples), logistic_routing(*samples, 2 * PENALTY))


def test_logistic_routing_repeats_bit_by_bit(samples):
    first = logistic_routing(*samples)
    torch.manual_seed(5); np.random.seed(5)
    assert same(logistic_routing(*samples), first)


def test_order_of_samples_does_not_matter(samples):
    private, public = samples
    shuffled = private[:, torch.randperm(25, generator=torch.Generator().manual_seed(0))]
    turned = logistic_routing(shuffled, public.flip(1))
    assert torch.allclose(logits(turned, public), logits(logistic_routing(*samples), public), atol=1e-4)


def test_scale_and_offset_of_features_do_not_matter(samples):
    scale, offset = torch.tensor([10., .1, 3, 1, 50, .5]), torch.tensor([0., 5, -1, 100, 2, .3])
    moved = [part * scale + offset for part in samples]
    expected = logits(logistic_routing(*samples), samples[1])
    assert torch.allclose(logits(logistic_routing(*moved), moved[1]), expected, atol=1e-3)


def test_private_and_public_exchanged_turn_the_sign(samples):
    there, back = logistic_routing(*samples), logistic_routing(*reversed(samples))
    assert torch.allclose(back.vectors, -there.vectors, atol=1e-4)
    assert torch.allclose(back.biases, -there.biases, atol=1e-4) and there.biases.abs().min() > .1


def test_both_classes_count_the_same_however_many_samples_they_have(samples):
    private, public = samples
    z = torch.cat(samples, 1)
    assert torch.allclose(logits(logistic_routing(z, z.repeat(1, 3, 1)), z), torch.zeros(()).double(), atol=1e-4)
    assert logits(logistic_routing(*samples), private).mean() > 0 > logits(logistic_routing(*samples), public).mean()


def test_a_feature_that_never_changes_plays_no_part(samples):
    widened = [torch.cat([part, torch.full_like(part[..., :1], 7.3)], -1) for part in samples]
    found = logistic_routing(*widened)
    assert torch.isfinite(found.vectors).all()
    assert torch.allclose(logits(found, widened[1]), logits(logistic_routing(*samples), samples[1]), atol=1e-3)


@pytest.mark.parametrize("positives, negatives", [
    ((25, 6), (60, 6)), ((2, 25, 6), (60, 6)), ((25, 6), (2, 60, 6)), ((2, 25, 6), (3, 60, 6)),
    ((2, 25, 6), (2, 60, 5)), ((0, 25, 6), (0, 60, 6))], ids=str)
def test_means_that_do_not_fit_are_refused(positives, negatives):
    with pytest.raises(ValueError, match="same layers and d, but are") as caught:
        logistic_routing(torch.ones(positives), torch.ones(negatives))
    assert f"{positives} and {negatives}" in str(caught.value)


@pytest.mark.parametrize("n, public", [(0, 60), (25, 0)])
def test_density_ratio_needs_samples_of_both_kinds(n, public):
    with pytest.raises(ValueError): logistic_routing(torch.ones(2, n, 6), torch.ones(2, public, 6))


# ---- the file

@pytest.mark.parametrize("form", ["mean", "logistic"])
def test_routing_vectors_come_back_as_they_were_saved(form, tmp_path):
    biases = normal(2, seed=1) if form == "logistic" else torch.zeros(2)
    routing = RoutingVectors(normal(64, 2).T, biases, form)                     # a view, not contiguous
    routing.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert load_file(tmp_path / FILE).keys() == {"vectors", "biases"}
    assert same(RoutingVectors.load(tmp_path), routing)


@pytest.mark.parametrize("wrong", [dict(vectors=torch.full((2, 4), torch.nan)),
                                   dict(biases=torch.tensor([0, torch.inf]))], ids=["vectors", "biases"])
def test_routing_vectors_that_are_not_finite_are_not_saved(wrong, tmp_path):
    parts = dict(vectors=torch.zeros(2, 4), biases=torch.zeros(2)) | wrong
    with pytest.raises(FloatingPointError, match=f"{min(wrong)} of the routing vectors is not finite"):
        RoutingVectors(**parts, form="logistic").save(tmp_path)
    assert list(tmp_path.iterdir()) == []


FINITE, SHAPES = "must hold finite numbers", r"must be \[layers, d\] and \[layers\], but are "
BOTH, FORM = "must hold 'vectors' and 'biases'", "must be .*mean.* logistic"
REFUSED = {
    "no vectors": (dict(vectors=None), "mean", f"{BOTH}, but holds biases."),
    "no biases": (dict(biases=None), "mean", f"{BOTH}, but holds vectors."),
    "nothing": (dict(biases=None, vectors=None), "mean", f"{BOTH}, but holds nothing."),
    "something else too": (dict(extra=torch.zeros(2)), "mean", f"{BOTH}, but holds biases, extra, vectors."),
    "NaN": (dict(vectors=torch.full((2, 4), torch.nan)), "mean", f"{FINITE}, but its vectors"),
    "infinite bias": (dict(biases=torch.tensor([0., torch.inf])), "logistic", f"{FINITE}, but its biases"),
    "vectors of one dimension": (dict(vectors=torch.zeros(2)), "mean", SHAPES + r"\(2,\) and \(2,\)"),
    "vectors of three dimensions": (dict(vectors=torch.zeros(2, 4, 1)), "mean", SHAPES + r"\(2, 4, 1\) and \(2,\)"),
    "too few biases": (dict(biases=torch.zeros(1)), "logistic", SHAPES + r"\(2, 4\) and \(1,\)"),
    "a bias for each number": (dict(biases=torch.zeros(2, 4)), "logistic", SHAPES + r"\(2, 4\) and \(2, 4\)"),
    "unknown form": (dict(), "random", f"is 'random', but {FORM}"),
    "biases of a mean": (dict(biases=torch.ones(2)), "mean", "have no biases"),
    "no form": (dict(), None, f"is None, but {FORM}"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_file_of_other_routing_vectors_is_refused_saying_where_and_why(what, tmp_path):
    changes, form, said = REFUSED[what]
    tensors = dict(vectors=torch.zeros(2, 4), biases=torch.zeros(2)) | changes
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(tensors, tmp_path / FILE, metadata=None if form is None else dict(form=form))
    with pytest.raises(ValueError, match=said) as caught: RoutingVectors.load(tmp_path)
    assert str(tmp_path / FILE) in str(caught.value)


# ---- what a client and the server compute

@pytest.mark.parametrize("proxies", [True, False])
def test_client_sends_the_mean_of_all_that_it_trained_on_or_its_private_data_against_the_pool(proxies, tiny):
    "The pool's samples as they look in both towers; proxies are public, so they are no positives."
    expert = load_expert(tiny.seed, tiny.bundles[0].folder / ADAPTER)
    private, public = tiny.a.train, tiny.pool.train.select(range(50))
    chosen = tiny.pool.train.select(range(60, 70)) if proxies else None
    own = [layer_means(tiny.seed, expert, data) for data in (private, chosen) if data is not None]
    others = [layer_means(tiny.seed, tower, public) for tower in (expert, tiny.seed.tower)]
    expected = logistic_routing(own[0], torch.cat(others, 1))
    assert same(client_routing("logistic", tiny.seed, expert, private, chosen, public), expected)
    mean = client_routing("mean", tiny.seed, expert, private, chosen, public)
    assert mean.form == "mean" and close(mean.vectors, torch.cat(own, 1).mean(1)) and not mean.biases.any()


def test_seeds_own_vectors_are_the_pools_mean_or_zero(tiny):
    public = tiny.pool.train
    mean, logistic = (public_routing(form, tiny.seed, public) for form in ("mean", "logistic"))
    assert mean.form == "mean" and close(mean.vectors, layer_means(tiny.seed, tiny.seed.tower, public).mean(1))
    assert not mean.biases.any() and logistic.form == "logistic"
    assert torch.equal(logistic.vectors, torch.zeros(2, 64)) and torch.equal(logistic.biases, torch.zeros(2))


def test_clients_send_means_unless_the_router_starts_from_density_ratios():
    forms = {initial: RouterSettings(initial=initial).form for initial in ("mean", "logistic", "random")}
    assert forms == dict(mean="mean", logistic="logistic", random="mean")


def test_bundles_hold_the_form_that_was_asked_for(tiny):
    for plain, logistic in zip(tiny.bundles, tiny.logistic):
        assert (plain.routing.form, logistic.routing.form) == ("mean", "logistic")
        assert not plain.routing.biases.any() and logistic.routing.biases.all()
        assert not close(plain.routing.vectors, logistic.routing.vectors)
        pairs = zip(plain.factors.values(), logistic.factors.values())
        assert all(torch.equal(one, other) for pair in pairs for one, other in zip(*pair))      # of one expert


# ---- the router

def test_routers_bias_is_added_to_each_logit_and_there_is_none_unless_given():
    z, vectors, biases = normal(2, 3, 4), normal(3, 4, seed=1), torch.tensor([.5, -1, 2])
    assert Router(vectors).biases is None and "biases" not in Router(vectors).state_dict()
    for blend in (0., .4):
        router = Router(vectors, blend=blend, biases=biases)
        mixed = (1 - blend) * z + blend * z.mean(1, keepdim=True)
        assert close(router.probabilities(z), (mixed @ vectors.T + biases).softmax(-1))
        assert close(Router(vectors, blend=blend).probabilities(z), (mixed @ vectors.T).softmax(-1))
    assert router.biases.requires_grad and router.biases is not biases


def test_padding_changes_no_real_token_of_a_router_with_biases():
    z, mask = normal(2, 4, 5), torch.tensor([[True, True, False, False], [True] * 4])
    router = Router(normal(3, 5, seed=1), blend=.6, biases=normal(3, seed=2))
    found = router.probabilities(z, mask)
    assert close(found[0, :2], router.probabilities(z[:1, :2])[0]) and close(found[1], router.probabilities(z[1:])[0])


def test_logits_are_density_ratios_and_those_of_the_seed_are_zero(unite_with, tiny):
    model, z = unite_with(initial="logistic", blend=0.), normal(2, 7, 64)
    for layer, moe in enumerate(model.layers):
        expected = torch.stack([torch.zeros(2, 7), *(
            z @ bundle.routing.vectors[layer] + bundle.routing.biases[layer] for bundle in tiny.logistic)], -1)
        assert close(moe.router.probabilities(z).log(), expected.log_softmax(-1), atol=1e-4)
        assert not moe.router.vectors[0].any() and moe.router.biases[0] == 0
    without = unite_with(initial="logistic", seed_expert=False)
    for one, other in zip(model.layers, without.layers): assert torch.equal(one.router.biases[1:], other.router.biases)


def biases_of(model): return {name: p for name, p in model.tower.named_parameters() if name.endswith("router.biases")}


def test_biases_are_there_to_be_trained_in_the_logistic_form_only(unite_with, tiny, tmp_path):
    for initial in ("mean", "random"):
        model = unite_with(initial=initial)
        assert not biases_of(model) and all(layer.router.biases is None for layer in model.layers)
        assert not any("bias" in name for name in load_file(save_model(model, tmp_path / initial) / "moe.safetensors"))
    plain, model = model, unite_with(initial="logistic")
    assert model.parameter_groups()["routers"] - plain.parameter_groups()["routers"] == 2 * 4
    before = {name: p.detach().clone() for name, p in biases_of(model).items()}
    assert before.keys() == {f"{layer}.router.biases" for layer in tiny.seed.layers}
    finetune(model, tiny.pool.test, tiny.pool.classes, SHORT)
    assert all(p.requires_grad and not torch.equal(p, before[name]) for name, p in biases_of(model).items())
    assert not any(module.training for module in model.tower.modules())


def test_saved_model_keeps_its_biases(unite_with, tiny, tmp_path):
    model = unite_with(initial="logistic")
    finetune(model, tiny.pool.test, tiny.pool.classes, SHORT)
    again = load_model(save_model(model, tmp_path / "model"))
    for one, other in zip(model.layers, again.layers):
        assert torch.equal(one.router.biases, other.router.biases) and other.router.biases.requires_grad
    plain = load_model(save_model(unite_with(), tmp_path / "plain"))
    assert all(layer.router.biases is None for layer in plain.layers)


def test_vectors_of_another_form_than_the_router_starts_from_are_refused(tiny, unite_with):
    mixed = [tiny.bundles[0], tiny.logistic[1]]
    for initial, bundles, whose in (("logistic", tiny.bundles, "a"), ("mean", tiny.logistic, "a"),
                                    ("logistic", mixed, "a"), ("mean", mixed, "b")):
        with pytest.raises(ValueError, match=f"vectors of {whose} have the form .* initial is '{initial}'"):
            unite_with(bundles, initial=initial, seed_expert=False)
        with pytest.raises(ValueError, match=f"initial is '{initial}'"):
            unify(bundles, tiny.seed, tiny.pool, replace(tiny.settings, router=RouterSettings(initial=initial)))
    for bundles in (tiny.bundles, tiny.logistic, mixed): unite_with(bundles, initial="random")


def test_seeds_vectors_of_another_form_are_refused_where_the_seed_takes_part(tiny, tiny_public):
    with pytest.raises(ValueError, match="the seed's routing vectors have the form 'mean'"):
        unite(tiny.seed, tiny.logistic, tiny_public["mean"], LOGISTIC)
    unite(tiny.seed, tiny.logistic, tiny_public["mean"], replace(LOGISTIC, seed_expert=False))


def test_unify_starts_from_logistic_vectors_too(tiny):
    settings = replace(tiny.settings, router=LOGISTIC)
    (model, report), (again, _) = (unify(tiny.logistic, tiny.seed, tiny.pool, settings) for _ in range(2))
    assert np.isfinite(report["losses"]).all() and model.experts == ["seed", "a", "b", "c"]
    assert all(torch.equal(a.router.biases, b.router.biases) for a, b in zip(model.layers, again.layers))


# ---- work done is kept

def test_other_form_of_routing_keeps_the_expert_and_changes_what_is_sent(client, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(harmomoe.unify, "train_expert", lambda *rest: pytest.fail("the expert was trained already"))
    folder = tmp_path / "a"
    before, adapter = stamps(folder), (folder / "bundle" / ADAPTER_FILES[1]).read_bytes()
    sent = read_bundle(client(router=LOGISTIC), tiny.seed)
    assert same(sent.routing, tiny.logistic[0].routing)
    assert sent.manifest["inputs"]["settings"]["router"]["initial"] == "logistic"
    after = stamps(folder)
    assert before.items() <= after.items() and (sent.folder / ADAPTER_FILES[1]).read_bytes() == adapter
    [new] = after.keys() - before.keys()                                                    # beside the means
    assert new.startswith("routing-") and same(RoutingVectors.load(folder / new), sent.routing)
    monkeypatch.setattr(harmomoe.unify, "client_routing", lambda *rest: pytest.fail("these vectors were there"))
    client(router=LOGISTIC)
    assert same(read_bundle(client(), tiny.seed).routing, tiny.bundles[0].routing)          # and back
    assert same(read_bundle(client(router=RouterSettings(initial="random")), tiny.seed).routing,
                tiny.bundles[0].routing)
    assert stamps(folder) == after


def test_logistic_vectors_follow_the_public_samples_and_a_damaged_file_is_made_again(client, tiny, tmp_path):
    folder = tmp_path / "a"
    [mean] = kept(folder, "routing")
    first = read_bundle(client(router=LOGISTIC), tiny.seed).routing
    [logistic] = set(kept(folder, "routing")) - {mean}
    (logistic / FILE).write_bytes(b"cut off")
    assert same(read_bundle(client(router=LOGISTIC), tiny.seed).routing, first)
    assert set(kept(folder, "routing")) == {mean, logistic} and same(RoutingVectors.load(logistic), first)
    assert not same(read_bundle(client(router=LOGISTIC, public_samples=30), tiny.seed).routing, first)
    assert len(kept(folder, "routing")) == 3
