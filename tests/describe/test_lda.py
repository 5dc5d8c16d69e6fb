"""Closed forms from one mean: the Gaussian log density ratio, and no more of any one sample than
the bound."""

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal

from harmomoe.describe.lda import (
    bounded,
    bounded_mean,
    lda_relevance,
    lda_routing,
    public_coordinates,
    usual_norm,
)
from harmomoe.describe.routing import client_routing, form_means, log_ratios
from harmomoe.moe.context import vector_size

RNG = np.random.default_rng(0)


def samples(number, mean=0.0, layers=2, d=5):
    mixing = torch.tensor(np.random.default_rng(1).normal(size=(layers, d, d)))
    drawn = torch.tensor(np.random.default_rng(int(1e3 * mean) + number).normal(size=(number, d)))
    return (drawn @ mixing + mean).float()


def test_public_samples_have_mean_0_and_covariance_1():
    public = samples(400)
    u = public_coordinates(public, 5).of(public).reshape(400, 2, 5)
    for layer in (0, 1):
        assert torch.allclose(u[:, layer].mean(0), torch.zeros(5).double(), atol=1e-9)
        assert torch.allclose(u[:, layer].T.cov(), torch.eye(5).double(), atol=1e-9)


def test_the_ratio_is_that_of_two_gaussians():
    "With all components, against densities that scipy computes."
    public, private = samples(400), samples(300, mean=0.7)
    look = public_coordinates(public, 99)
    vectors, biases = look.ratio(bounded_mean(look.of(private), 1e9))
    for layer in (0, 1):
        x, y = public[layer].double(), private[layer].double()
        covariance = x.T.cov().numpy()
        densities = [multivariate_normal(z.mean(0).numpy(), covariance) for z in (y, x)]
        wanted = densities[0].logpdf(y.numpy()) - densities[1].logpdf(y.numpy())
        found = y @ vectors[layer] + biases[layer]
        assert np.allclose(found.numpy(), wanted, atol=1e-6)


def test_few_components_are_the_first_ones_and_what_has_none_is_refused():
    public = samples(400)
    few, all_of_them = (public_coordinates(public, k) for k in (2, 99))
    assert few.size == 4 and all_of_them.size == 10
    assert torch.equal(few.scale, all_of_them.scale[:, :2])
    assert (all_of_them.scale.diff() <= 0).all()
    flat = torch.cat([public, public[..., :1]], -1)  # rank 5 of 6
    assert public_coordinates(flat, 99).size == 10
    with pytest.raises(ValueError, match="all public samples are alike"):
        public_coordinates(torch.ones(2, 10, 5), 3)


def test_a_place_has_its_coordinates():
    look = public_coordinates(samples(400), 3)
    m = torch.tensor(RNG.normal(size=6))
    assert torch.allclose(look.of(look.place(m)[:, None])[0], m)


def test_no_sample_moves_the_mean_by_more_than_the_bound():
    "Each emptied in turn; and a sample far out, whose part is exactly the bound."
    u = torch.tensor(RNG.normal(size=(40, 6)))
    u[7] *= 1000
    whole = bounded_mean(u, 2.0)
    moved = []
    for row in range(40):
        without = u.clone()
        without[row] = 0
        moved.append(40 * (bounded_mean(without, 2.0) - whole).norm())
    assert max(moved) == pytest.approx(2.0) and moved[7] == pytest.approx(2.0)
    assert (40 * (u.mean(0) - u[[i for i in range(40) if i != 7]].sum(0) / 40)).norm() > 1000
    cut, small = bounded(u, 2.0), u.norm(dim=1) <= 2
    assert torch.equal(cut[small], u[small]) and small.any() and not small.all()
    assert torch.allclose(torch.cosine_similarity(cut, u), torch.ones(40).double())


def test_the_bound_is_a_quantile_of_public_norms():
    u = torch.diag(torch.arange(1.0, 102.0).double())
    assert usual_norm(u, 0.5) == 51 and usual_norm(u, 1.0) == 101


def test_relevance_depends_on_private_samples_by_their_mean_alone(tiny):
    rng = np.random.default_rng(3)
    private = rng.normal(size=(30, 32)).astype(np.float32) + tiny.embeddings.mean(0)
    given = []

    def average(u, bound):
        given.append((u, bound))
        return bounded_mean(u, bound)

    found = lda_relevance(private, tiny.embeddings, 90, 8, 0.9, average)
    u, bound = given[0]
    assert u.shape == (30, 8) and found.scores.shape == (90,) and found.private.shape == (30,)
    again = lda_relevance(private[::-1], tiny.embeddings, 90, 8, average=lambda *_: u.mean(0))
    other = lda_relevance(private, tiny.embeddings, 90, 8, average=lambda *_: u.mean(0))
    assert np.allclose(again.scores, other.scores)
    # public samples on the private side are the relevant ones
    m = u.mean(0)
    x = public_coordinates(torch.from_numpy(np.array(tiny.embeddings))[None], 8)
    side = (x.of(torch.from_numpy(np.array(tiny.embeddings))[None]) @ m).numpy()
    assert np.array_equal(np.argsort(side), np.argsort(other.scores))


def of_tiny(tiny, forms, **how):
    given = tiny.seed, tiny.seed.backbone, tiny.a.train, tiny.b.train, tiny.public.sample
    return lda_routing(forms, *given, tiny.public.means, **how)


def test_evidence_has_no_closed_form(tiny):
    with pytest.raises(ValueError, match="'evidence' have no closed form"):
        of_tiny(tiny, ("mean", "evidence"))


@pytest.mark.parametrize("form", ["mean", "logistic", "moments"])
def test_each_form_is_made_and_tells_private_from_public(form, tiny):
    [(name, found)] = of_tiny(tiny, (form,), components=8).items()
    assert name == found.form == form
    assert found.vectors.shape == (2, vector_size(form, 64, 256))
    if form == "mean":
        return
    own = log_ratios(found, form_means(form, tiny.seed, tiny.seed.backbone, tiny.a.train))
    public = log_ratios(found, tiny.public.means(form))
    assert (own.mean(1) > 0).all() and (public.mean(1) < 0).all()


def test_the_form_mean_is_close_to_the_mean_with_enough_components(tiny):
    exact = client_routing("mean", tiny.seed, tiny.seed.backbone, tiny.a.train, tiny.b.train)
    given = dict(average=lambda u, bound: u.mean(0))
    errors = [
        (of_tiny(tiny, ("mean",), components=k, **given)["mean"].vectors - exact.vectors).norm()
        for k in (1, 8, 64)
    ]
    assert errors[2] < errors[1] < errors[0]


def test_all_forms_are_cut_as_one(tiny):
    "Emptying a sample moves all layers and all forms together by the bound at most."
    seen = {}

    def average(u, bound):
        seen.update(u=u, bound=bound)
        return bounded_mean(u, bound)

    found = of_tiny(tiny, ("mean", "moments"), components=4, share=0.5, average=average)
    assert [*found] == ["mean", "moments"] and seen["u"].shape == (30, 2 * 2 * 4)
    assert bounded(seen["u"], seen["bound"]).norm(dim=1).max() <= seen["bound"] * (1 + 1e-12)
