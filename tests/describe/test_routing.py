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
from harmomoe.layer import RouterSettings
from harmomoe.moe import load_model, save_model, unite
from harmomoe.router import Router
from harmomoe.context import Context, FORMS, token_mean, token_spread
from harmomoe.routing import (FILE, RoutingVectors, client_routing, layer_means, logistic_routing, mean_routing,
                              public_routing)
from harmomoe.unify import unify
from helpers import kept, stamps

SHORT = Training(epochs=1, batch_size=16, learning_rate=3e-3, optimizer="adamw", weight_decay=0.)
RATIOS = [form for form in FORMS if form != "mean"]             # the forms that come from a regression
each_ratio = pytest.mark.parametrize("form", RATIOS)
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


def spread(z, axis):
    "The standard deviation as it is defined, in float64, at least 0.001."
    return np.sqrt(np.asarray(z, np.float64).var(axis) + 1e-6)


def test_token_spread_is_the_standard_deviation_of_real_tokens_only():
    z, mask = normal(3, 4, 5), torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 1, 1]], dtype=torch.bool)
    assert np.allclose(token_spread(z), spread(z, 1), atol=1e-6)
    assert torch.equal(token_spread(z, torch.ones(3, 4, dtype=torch.bool)), token_spread(z))
    expected = np.stack([spread(sample[real], 0) for sample, real in zip(z, mask)])
    for padding in (0., 1e3, -1e6):
        assert np.allclose(token_spread(torch.where(mask[..., None], z, padding), mask), expected, atol=1e-6)
    assert np.allclose(token_spread(z + 1000), spread(z + 1000, 1), atol=1e-4)     # a large mean costs no digits
    assert token_spread(z.bfloat16(), mask).dtype == torch.bfloat16


def test_a_single_real_token_or_none_has_a_spread_of_a_thousandth_and_a_gradient():
    z, mask = normal(3, 4, 5).requires_grad_(), torch.tensor([[0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]).bool()
    found = token_spread(z, mask)
    assert close(found[:2], torch.tensor(.001), atol=1e-8) and found[2].min() > .01
    assert close(token_spread(z[:, :1]), torch.tensor(.001), atol=1e-8)
    found.sum().backward()
    assert torch.isfinite(z.grad).all() and not z.grad[:2].any() and z.grad[2].all()


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


def test_layer_means_with_spread_are_means_and_deviations_of_each_image(tiny):
    data = tiny.a.train
    for tower in (tiny.seed.tower, load_expert(tiny.seed, tiny.bundles[0].folder / ADAPTER)):
        z = entering(tiny, tower, data)
        for batch_size in (256, 7):
            found = layer_means(tiny.seed, tower, data, batch_size, spread=True)
            assert found.dtype == torch.float32 and found.shape == (2, 30, 128)
            assert torch.equal(found[..., :64], layer_means(tiny.seed, tower, data, batch_size))
            for layer in range(2):
                for image in range(30):
                    assert np.allclose(found[layer, image, 64:], spread(z[layer, image], 0), atol=1e-5)


def test_layer_means_leave_padding_out(tiny, monkeypatch):
    real = torch.tensor([True, False, True, True, False])
    monkeypatch.setattr(tiny.seed, "token_mask", lambda batch, reach: real.expand(len(batch["images"]), 5))
    z = entering(tiny, tiny.seed.tower, tiny.a.test)[:, :, real]
    assert close(layer_means(tiny.seed, tiny.seed.tower, tiny.a.test, 5).double(), z.mean(2))
    both = layer_means(tiny.seed, tiny.seed.tower, tiny.a.test, 5, spread=True)
    assert close(both[..., :64].double(), z.mean(2)) and np.allclose(both[..., 64:], spread(z, 2), atol=1e-5)


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


def of_form(form, samples):
    "The samples, for the form 'moments' with as many positive numbers beside them."
    if form == "logistic": return samples
    return [torch.cat([part, (.2 * normal(*part.shape, seed=3 + i) - 1).exp()], -1) for i, part in enumerate(samples)]


@each_ratio
@pytest.mark.parametrize("penalty", [PENALTY, .5])
def test_logistic_routing_is_the_optimum_in_each_layer(penalty, form, samples):
    samples, width = of_form(form, samples), 6 * FORMS[form]
    found = logistic_routing(*samples, penalty, form)
    assert found.form == form and found.vectors.shape == (2, width) and found.biases.shape == (2,)
    for layer, (private, public) in enumerate(zip(*samples)):
        loss, w = objective(private, public, penalty), standardised(found, layer, private, public)
        best = minimize(loss, np.zeros(width + 1), jac=True, method="BFGS", options=dict(gtol=1e-10))
        assert abs(loss(w)[1]).max() < 1e-4 and w == pytest.approx(best.x, abs=1e-3)       # where the solver stops
        alone = logistic_routing(private[None], public[None], penalty, form)
        assert torch.equal(alone.vectors[0], found.vectors[layer]) and alone.biases[0] == found.biases[layer]


def test_penalty_is_a_two_hundredth_and_the_form_logistic_unless_told(samples):
    assert logistic_routing(*samples).form == "logistic"
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


def test_means_of_an_odd_width_are_none_with_spreads(samples):
    with pytest.raises(ValueError): logistic_routing(*(part[..., :5] for part in samples), form="moments")


@pytest.mark.parametrize("n, public", [(0, 60), (25, 0)])
def test_density_ratio_needs_samples_of_both_kinds(n, public):
    with pytest.raises(ValueError): logistic_routing(torch.ones(2, n, 6), torch.ones(2, public, 6))


# ---- the file

@pytest.mark.parametrize("form", FORMS)
def test_routing_vectors_come_back_as_they_were_saved(form, tmp_path):
    biases = torch.zeros(2) if form == "mean" else normal(2, seed=1)
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
BOTH, FORM = "must hold 'vectors' and 'biases'", "must be one of mean, logistic, moments"
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
    "an odd width with spreads": (dict(vectors=torch.zeros(2, 5)), "moments", r"but are \(2, 5\) and \(2,\)"),
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


def test_vectors_with_spreads_have_an_even_width_and_other_vectors_any():
    for form, width in (("moments", 6), ("logistic", 5), ("mean", 5)):
        RoutingVectors(torch.zeros(2, width), torch.zeros(2), form)
    with pytest.raises(ValueError, match=r"\(2, 5\)"): RoutingVectors(torch.zeros(2, 5), torch.zeros(2), "moments")


# ---- what a client and the server compute

@pytest.mark.parametrize("proxies", [True, False])
def test_client_sends_the_mean_of_all_that_it_trained_on_or_its_private_data_against_the_pool(proxies, tiny):
    "The pool's samples as they look in both towers; proxies are public, so they are no positives."
    expert = load_expert(tiny.seed, tiny.bundles[0].folder / ADAPTER)
    private, public = tiny.a.train, tiny.pool.train.select(range(50))
    chosen = tiny.pool.train.select(range(60, 70)) if proxies else None
    for form, wide in (("logistic", False), ("moments", True)):
        others = [layer_means(tiny.seed, tower, public, spread=wide) for tower in (expert, tiny.seed.tower)]
        mine = layer_means(tiny.seed, expert, private, spread=wide)
        expected = logistic_routing(mine, torch.cat(others, 1), form=form)
        assert expected.vectors.shape == (2, 128 if wide else 64)
        assert same(client_routing(form, tiny.seed, expert, private, chosen, public), expected)
    own = [layer_means(tiny.seed, expert, data) for data in (private, chosen) if data is not None]
    mean = client_routing("mean", tiny.seed, expert, private, chosen, public)
    assert mean.form == "mean" and close(mean.vectors, torch.cat(own, 1).mean(1)) and not mean.biases.any()


def test_seeds_own_vectors_are_the_pools_mean_or_zero(tiny):
    public = tiny.pool.train
    mean = public_routing("mean", tiny.seed, public)
    assert mean.form == "mean" and close(mean.vectors, layer_means(tiny.seed, tiny.seed.tower, public).mean(1))
    assert not mean.biases.any()
    for form, width in (("logistic", 64), ("moments", 128)):
        found = public_routing(form, tiny.seed, public)
        assert same(found, RoutingVectors(torch.zeros(2, width), torch.zeros(2), form))


@pytest.mark.parametrize("compute, given", [(public_routing, 2), (client_routing, 5)])
def test_unknown_form_is_refused_before_any_work(compute, given):
    with pytest.raises(ValueError, match=f"is 'random', but {FORM}"): compute("random", *[None] * given)


def test_clients_send_means_unless_the_router_starts_from_density_ratios():
    forms = {initial: RouterSettings(initial=initial).form for initial in (*FORMS, "random")}
    assert forms == dict(mean="mean", logistic="logistic", moments="moments", random="mean")


@pytest.mark.parametrize("form, width", [("logistic", 64), ("moments", 128)])
def test_bundles_hold_the_form_that_was_asked_for(form, width, tiny):
    for plain, other in zip(tiny.bundles, tiny.sent[form]):
        assert (plain.routing.form, other.routing.form) == ("mean", form)
        assert plain.routing.vectors.shape == (2, 64) and other.routing.vectors.shape == (2, width)
        assert not plain.routing.biases.any() and other.routing.biases.all()
        for part in other.routing.vectors.split(64, 1): assert part.any() and not close(plain.routing.vectors, part)
        pairs = zip(plain.factors.values(), other.factors.values())
        assert all(torch.equal(one, two) for pair in pairs for one, two in zip(*pair))          # of one expert


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


@pytest.mark.parametrize("width", [5, 10], ids=["token", "token and spread"])
def test_padding_changes_no_real_token_of_a_router_with_biases(width):
    z, mask = normal(2, 4, 5), torch.tensor([[True, True, False, False], [True] * 4])
    router = Router(normal(3, width, seed=1), blend=.6, biases=normal(3, seed=2))
    for padding in (z, 0., 1e3):
        found = router.probabilities(torch.where(mask[..., None], z, padding), Context(mask))
        assert close(found[0, :2], router.probabilities(z[:1, :2])[0])
        assert close(found[1], router.probabilities(z[1:])[0])


def blended(routing, layer, z, blend):
    "The logits of an expert as they are defined, in float64: tokens [B, T, d] -> [B, T]."
    z, vector = z.double().numpy(), routing.vectors[layer].double().numpy()
    e, f = vector[:64], vector[64:]
    context = z.mean(1) @ e + (spread(z, 1) @ f if len(f) else 0)
    return (1 - blend) * z @ e + blend * context[:, None] + routing.biases[layer].item()


@each_ratio
@pytest.mark.parametrize("blend", [0., .3, 1.])
def test_logits_are_density_ratios_and_those_of_the_seed_are_zero(blend, form, unite_with, tiny):
    model, z = unite_with(initial=form, blend=blend), normal(2, 7, 64)
    without = unite_with(initial=form, blend=blend, seed_expert=False)
    for layer, (moe, other) in enumerate(zip(model.layers, without.layers)):
        experts = [blended(bundle.routing, layer, z, blend) for bundle in tiny.sent[form]]
        for router, scores in ((moe.router, [np.zeros((2, 7)), *experts]), (other.router, experts)):
            wanted = torch.tensor(np.stack(scores, -1)).softmax(-1)
            assert torch.allclose(router.probabilities(z).double(), wanted, atol=1e-4)
        assert not moe.router.vectors[0].any() and moe.router.biases[0] == 0
        for part in ("vectors", "biases"):
            assert torch.equal(getattr(moe.router, part)[1:], getattr(other.router, part))


def test_spread_counts_by_lambda_and_the_rest_of_the_router_is_as_without_it():
    z, vectors, biases = normal(2, 3, 4), normal(3, 8, seed=1), normal(3, seed=2)
    for blend in (0., .4, 1.):
        both = Router(vectors, blend=blend, biases=biases).probabilities(z)
        token = Router(vectors[:, :4], blend=blend, biases=biases).probabilities(z)
        shift = blend * torch.tensor(spread(z, 1)).float() @ vectors[:, 4:].T
        assert close(both, (token.log() + shift[:, None]).softmax(-1)) and close(both, token) == (blend == 0)
        nothing = torch.cat([vectors[:, :4], torch.zeros(3, 4)], 1)
        assert close(Router(nothing, blend=blend, biases=biases).probabilities(z), token)


@each_ratio
def test_logits_of_a_model_do_not_depend_on_the_batch(form, unite_with, tiny):
    "Nor on the samples' order; with lambda 1, where the whole image decides."
    data = tiny.a.test
    for blend in (.3, 1.):
        model = unite_with(initial=form, blend=blend, top_k=2)
        score = model.scorer(tiny.a.classes)

        @torch.no_grad()
        def logits_of(data, size): return torch.cat([score(b) for b in tiny.seed.batches(data, batch_size=size)])
        together = logits_of(data, 12)
        for size in (1, 5): assert torch.allclose(logits_of(data, size), together, atol=1e-4)
        assert torch.allclose(logits_of(data.select(range(11, -1, -1)), 12), together.flip(0), atol=1e-4)


def gradient_of_lambda(router, z):
    "Of a loss that depends on the probabilities of every token in its own way; and these."
    router.zero_grad()
    pi = router.probabilities(z)
    (pi * normal(*pi.shape, seed=9)).sum().backward()
    return router.blend.grad.clone(), pi.detach()


@pytest.mark.parametrize("width", [4, 8], ids=["token", "token and spread"])
@pytest.mark.parametrize("value, bound", [(-.2, 0.), (-7., 0.), (1.001, 1.), (3., 1.)])
def test_lambda_out_of_bounds_counts_as_the_bound_and_keeps_its_gradient(value, bound, width):
    z, router = normal(2, 3, 4), Router(normal(3, width, seed=1), blend=bound)
    wanted, at_bound = gradient_of_lambda(router, z)
    with torch.no_grad(): router.blend.fill_(value)
    found, pi = gradient_of_lambda(router, z)
    assert close(pi, at_bound) and wanted.abs() > .01 and found.item() == pytest.approx(wanted.item(), rel=1e-4)
    assert router.blend.item() == pytest.approx(value)                                  # it is not written over


@pytest.mark.parametrize("width", [4, 8], ids=["token", "token and spread"])
@pytest.mark.parametrize("start, way", [(1.3, -1), (-.3, 1)])
def test_lambda_that_stepped_over_a_bound_can_come_back(start, way, width):
    z, vectors = normal(2, 3, 4), normal(3, width, seed=1)
    with torch.no_grad(): goal = Router(vectors, blend=.5).probabilities(z)
    router = Router(vectors)
    router.vectors.requires_grad_(False)
    with torch.no_grad(): router.blend.fill_(start)
    optimizer, seen = torch.optim.SGD([router.blend], lr=.03), [start]
    for _ in range(300):
        optimizer.zero_grad()
        (router.probabilities(z) - goal).square().sum().backward()
        optimizer.step()
        seen.append(router.blend.item())
    assert (seen[1] - seen[0]) * way > 0 and seen[-1] == pytest.approx(.5, abs=.2)


def biases_of(model): return {name: p for name, p in model.tower.named_parameters() if name.endswith("router.biases")}


def test_biases_are_there_to_be_trained_in_the_logistic_form_only(unite_with, tiny, tmp_path):
    for initial in ("mean", "random"):
        model = unite_with(initial=initial)
        assert not biases_of(model) and all(layer.router.biases is None for layer in model.layers)
        assert not any("bias" in name for name in load_file(save_model(model, tmp_path / initial) / "moe.safetensors"))
    plain = model
    for form, more in (("logistic", 2 * 4), ("moments", 2 * (4 + 4 * 64))):
        model = unite_with(initial=form)
        assert model.parameter_groups()["routers"] - plain.parameter_groups()["routers"] == more
        before = {name: p.detach().clone() for name, p in biases_of(model).items()}
        assert before.keys() == {f"{layer}.router.biases" for layer in tiny.seed.layers}
        finetune(model, tiny.pool.test, tiny.pool.classes, SHORT)
        assert all(p.requires_grad and not torch.equal(p, before[name]) for name, p in biases_of(model).items())
        assert not any(module.training for module in model.tower.modules())


@pytest.mark.parametrize("blend, learn_blend, moved", [(.3, True, True), (1., True, True), (0., False, False)])
def test_training_moves_both_halves_of_the_vectors_unless_lambda_stays_zero(blend, learn_blend, moved, unite_with,
                                                                            tiny):
    model = unite_with(initial="moments", blend=blend, learn_blend=learn_blend)
    before = [layer.router.vectors.detach().clone() for layer in model.layers]
    finetune(model, tiny.pool.test, tiny.pool.classes, SHORT)
    for layer, old in zip(model.layers, before):
        of_token, of_spread = (layer.router.vectors != old).split(64, 1)
        assert of_token.any() and of_spread.any() == moved
        if moved: assert of_token.any(1).all() and of_spread.any(1).all()               # those of every expert


@each_ratio
def test_saved_model_keeps_its_vectors_and_biases_and_its_logits(form, unite_with, tiny, tmp_path):
    model, [batch] = unite_with(initial=form), tiny.seed.batches(tiny.pool.test)
    finetune(model, tiny.pool.test, tiny.pool.classes, SHORT)
    with torch.no_grad(): model.layers[0].router.blend.fill_(1.2)                       # as an optimiser may leave it
    again = load_model(save_model(model, tmp_path / "model"))
    for one, other in zip(model.layers, again.layers):
        for part in ("vectors", "biases", "blend"):
            assert torch.equal(getattr(one.router, part), getattr(other.router, part))
            assert getattr(other.router, part).requires_grad
    assert again.settings == model.settings and again.settings.form == form
    with torch.no_grad(): found, wanted = (own.scorer(tiny.pool.classes)(batch) for own in (again, model))
    assert torch.equal(found, wanted)
    plain = load_model(save_model(unite_with(), tmp_path / "plain"))
    assert all(layer.router.biases is None for layer in plain.layers)


def test_vectors_of_another_form_than_the_router_starts_from_are_refused(tiny, unite_with):
    mixed = [tiny.bundles[0], tiny.logistic[1]]
    for initial, bundles, whose in (("logistic", tiny.bundles, "a"), ("mean", tiny.logistic, "a"),
                                    ("logistic", mixed, "a"), ("mean", mixed, "b"),
                                    ("moments", tiny.bundles, "a"), ("moments", tiny.logistic, "a"),
                                    ("mean", tiny.moments, "a"), ("logistic", tiny.moments, "a"),
                                    ("moments", [*tiny.moments[:2], tiny.logistic[2]], "c")):
        with pytest.raises(ValueError, match=f"vectors of {whose} have the form .* initial is '{initial}'"):
            unite_with(bundles, initial=initial, seed_expert=False)
        with pytest.raises(ValueError, match=f"initial is '{initial}'"):
            unify(bundles, tiny.seed, tiny.pool, replace(tiny.settings, router=RouterSettings(initial=initial)))
    for bundles in (*tiny.sent.values(), mixed): unite_with(bundles, initial="random")


def test_seeds_vectors_of_another_form_are_refused_where_the_seed_takes_part(tiny, tiny_public):
    for form in FORMS:
        settings = RouterSettings(initial=form)
        for other in set(FORMS) - {form}:
            with pytest.raises(ValueError, match=f"the seed's routing vectors have the form '{other}', not '{form}'"):
                unite(tiny.seed, tiny.sent[form], tiny_public[other], settings)
            unite(tiny.seed, tiny.sent[form], tiny_public[other], replace(settings, seed_expert=False))


@each_ratio
def test_unify_starts_from_density_ratios_too(form, tiny):
    settings = replace(tiny.settings, router=RouterSettings(initial=form))
    (model, report), (again, _) = (unify(tiny.sent[form], tiny.seed, tiny.pool, settings) for _ in range(2))
    assert np.isfinite(report["losses"]).all() and model.experts == ["seed", "a", "b", "c"]
    for part in ("vectors", "biases"):
        assert all(torch.equal(getattr(a.router, part), getattr(b.router, part))
                   for a, b in zip(model.layers, again.layers))


# ---- work done is kept

@each_ratio
def test_other_form_of_routing_keeps_the_expert_and_changes_what_is_sent(form, client, tiny, tmp_path, monkeypatch):
    settings = RouterSettings(initial=form)
    monkeypatch.setattr(harmomoe.unify, "train_expert", lambda *rest: pytest.fail("the expert was trained already"))
    folder = tmp_path / "a"
    before, adapter = stamps(folder), (folder / "bundle" / ADAPTER_FILES[1]).read_bytes()
    sent = read_bundle(client(router=settings), tiny.seed)
    assert same(sent.routing, tiny.sent[form][0].routing)
    assert sent.manifest["inputs"]["settings"]["router"]["initial"] == form
    after = stamps(folder)
    assert before.items() <= after.items() and (sent.folder / ADAPTER_FILES[1]).read_bytes() == adapter
    [new] = after.keys() - before.keys()                                                    # beside the means
    assert new.startswith("routing-") and same(RoutingVectors.load(folder / new), sent.routing)
    monkeypatch.setattr(harmomoe.unify, "client_routing", lambda *rest: pytest.fail("these vectors were there"))
    client(router=settings)
    assert same(read_bundle(client(), tiny.seed).routing, tiny.bundles[0].routing)          # and back
    assert same(read_bundle(client(router=RouterSettings(initial="random")), tiny.seed).routing,
                tiny.bundles[0].routing)
    assert stamps(folder) == after


@each_ratio
def test_density_ratios_follow_the_public_samples_and_a_damaged_file_is_made_again(form, client, tiny, tmp_path):
    folder, settings = tmp_path / "a", RouterSettings(initial=form)
    [mean] = kept(folder, "routing")
    first = read_bundle(client(router=settings), tiny.seed).routing
    [ratio] = set(kept(folder, "routing")) - {mean}
    (ratio / FILE).write_bytes(b"cut off")
    assert same(read_bundle(client(router=settings), tiny.seed).routing, first)
    assert set(kept(folder, "routing")) == {mean, ratio} and same(RoutingVectors.load(ratio), first)
    assert not same(read_bundle(client(router=settings, public_samples=30), tiny.seed).routing, first)
    assert len(kept(folder, "routing")) == 3
