"What a bundle may claim of the public pool: honest ones stay as they are, others are held back."

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import routing_of

from harmomoe.base.artefacts import stages_run
from harmomoe.config.settings import changed
from harmomoe.describe.routing import RoutingVectors, form_means, log_ratios
from harmomoe.moe.context import FORMS
from harmomoe.moe.router import RouterSettings
from harmomoe.server.merge import merge
from harmomoe.server.normalise import (
    MOST,
    TOLERANCE,
    Claim,
    claim,
    contents_digest,
    held_back,
    log_mean_ratio,
    normalise,
    shortened,
)

pytestmark = pytest.mark.filterwarnings("ignore:The PEFT config's:UserWarning")
RATIOS = [form for form in FORMS if form != "mean"]


def routed(bundle, vectors=None, biases=None):
    "The bundle with other vectors or biases."
    own = routing_of(bundle)
    vectors = own.vectors if vectors is None else vectors
    biases = own.biases if biases is None else biases
    return replace(bundle, routing={own.form: RoutingVectors(vectors, biases, own.form)})


def with_form(tiny, form, **settings):
    return tiny.public.with_config(
        changed(tiny.settings, {f"router.{k}": v for k, v in dict(settings, form=form).items()})
    )


def written_out(vectors, biases, means, public, form):
    "Logits of samples in each layer, float64 [layers, n]."
    e, b, z = vectors.double(), biases.double()[:, None], means.double()
    if form != "evidence":
        return torch.einsum("lns,ls->ln", z, e) + b
    center, scale = (unit.double()[:, None] for unit in public.units)
    u = ((z - center) / scale).clamp(-3, 3)
    looks = torch.einsum("lns,ls->ln", torch.cat([u, u * u], -1), e) + b
    return torch.stack([looks[: layer + 1].mean(0) for layer in range(len(looks))])


def ratios_of(bundle, means, public):
    own = routing_of(bundle)
    return written_out(own.vectors, own.biases, means, public, own.form)


def shares(bundles, public):
    "Of the public sample in the seed, by expert, mean over layers; written out."
    form = public.config.router.form
    own, means = public.routing(form), public.means(form)
    logits = [written_out(own.vectors, own.biases, means, public, form)]
    logits = torch.stack(logits + [ratios_of(bundle, means, public) for bundle in bundles], -1)
    return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double().mean((0, 1))


# ---- the law


@pytest.mark.parametrize("factor, raised", [(1, 0), (1, 20), (1, -7), (2, 0), (0.5, 1), (0, 0)])
def test_log_mean_is_that_of_gaussians_in_closed_form(factor, raised):
    rng = np.random.default_rng(1)
    d, n, shape = 4, 200_000, rng.normal(size=(4, 4)) / 2
    shape *= 0.7 / np.linalg.norm(shape, 2)
    cloud = rng.normal(size=(n, d))
    center, e = rng.normal(size=d), rng.normal(size=d)
    b = -e @ center - e @ shape.T @ shape @ e / 2  # so that it is a ratio
    given = torch.tensor(factor * e)[None], torch.tensor([factor * b + raised])
    samples = torch.tensor(center + cloud @ shape)[None]
    found = log_mean_ratio(log_ratios(RoutingVectors(*given, "logistic"), samples))
    wanted = factor * (factor - 1) / 2 * (e @ shape.T @ shape @ e) + raised
    assert found.dtype == torch.float64 and found.item() == pytest.approx(wanted, abs=0.03)


def test_log_mean_survives_what_exp_does_not():
    vectors, samples = torch.full((1, 3), 1e9), torch.full((1, 5, 3), 1e9)
    ratios = log_ratios(RoutingVectors(vectors, torch.zeros(1), "logistic"), samples)
    found = log_mean_ratio(ratios)
    assert found.item() == pytest.approx(3e18)


def test_ratio_of_two_samples_is_exactly_one_on_the_reference():
    "For two points the ratio is a linear function, and the sample is the distribution."
    points, p, p0 = torch.tensor([[[0.0], [1.0]]]), (0.3, 0.7), (0.5, 0.5)
    b = math.log(p[0] / p0[0])
    e = math.log(p[1] / p0[1]) - b
    given = torch.tensor([[e]], dtype=torch.float64), torch.tensor([b], dtype=torch.float64)
    exact = RoutingVectors(*given, "logistic")
    assert log_mean_ratio(log_ratios(exact, points)).item() == pytest.approx(0, abs=1e-12)


def test_both_halves_of_the_reference_count_and_the_seed_by_itself():
    assert Claim([0.0], [0.0]).together == pytest.approx([0])
    assert Claim([math.log(3)], [-math.inf]).together == pytest.approx([math.log(1.5)])
    assert not Claim([TOLERANCE + 0.1], [-100.0]).is_ratio
    assert Claim([TOLERANCE], [-100.0]).is_ratio
    assert not Claim([-100.0], [TOLERANCE + 1]).is_ratio
    assert not Claim([0.0, 0.0, TOLERANCE + 0.1], [0.0] * 3).is_ratio


# ---- what it asks of a bundle


@pytest.mark.parametrize("form", RATIOS)
def test_claim_is_made_of_the_clients_own_reference(form, tiny):
    public, bundle = with_form(tiny, form), tiny.sent[form][1]
    backbone = bundle.expert(tiny.seed).backbone
    found = claim(bundle, public)
    for name, network in (("in_seed", tiny.seed.backbone), ("in_expert", backbone)):
        means = form_means(form, tiny.seed, network, public.sample)
        wanted = ratios_of(bundle, means, public).exp().mean(1).log()
        assert torch.allclose(torch.tensor(getattr(found, name)).double(), wanted, atol=1e-6)


def test_claim_is_kept_and_made_anew_for_other_numbers(tiny, tmp_path):
    public = replace(with_form(tiny, "logistic"), folder=tmp_path)
    bundle = tiny.logistic[0]
    with stages_run() as ran:
        first = claim(bundle, public)
        assert claim(replace(bundle, client="z"), public) == first
        claim(routed(bundle, biases=routing_of(bundle).biases + 1), public)
        claim(replace(bundle, scale=bundle.scale / 2), public)
        factors = {place: (a, -b) for place, (a, b) in bundle.factors.items()}
        claim(replace(bundle, factors=factors), public)
    assert ran.count("claim") == 4


def test_expert_that_gives_no_numbers_is_refused_by_name(tiny, tmp_path):
    bundle = tiny.logistic[0]
    factors = {place: (a * 1e30, b * 1e30) for place, (a, b) in bundle.factors.items()}
    public = replace(with_form(tiny, "logistic"), folder=tmp_path)
    with pytest.raises(ValueError, match="expert of a gives numbers that are not finite"):
        normalise([replace(bundle, factors=factors), *tiny.logistic[1:]], public)
    assert not list(tmp_path.glob("claim*"))


def test_another_form_makes_other_contents_and_each_form_a_claim_of_its_own(tiny, tmp_path):
    one, both = tiny.moments[0], tiny.both[0]
    assert contents_digest(one) != contents_digest(both)
    assert contents_digest(replace(both, routing=one.routing)) == contents_digest(one)
    mean = both.routing["mean"]
    other = replace(mean, vectors=mean.vectors + 1)
    moved = replace(both, routing=both.routing | dict(mean=other))
    assert contents_digest(moved) != contents_digest(both)
    public = replace(with_form(tiny, "moments"), folder=tmp_path)
    assert claim(both, public) == claim(one, public) == claim(both, tiny.public, "moments")


# ---- honest members


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed_expert", [True, False], ids=["with the seed", "without"])
@pytest.mark.parametrize("members", ["abc", "ca", "b"])
def test_honest_bundles_are_the_same_objects_and_the_model_the_same_to_the_last_bit(
    form, seed_expert, members, tiny
):
    public = with_form(tiny, form, seed_expert=seed_expert)
    bundles = [tiny.sent[form]["abc".index(name)] for name in members]
    done, report = normalise(bundles, public)
    assert all(one is other for one, other in zip(done, bundles)) and len(done) == len(bundles)
    assert [one.client for one in report] == [*members]
    assert all(one.is_none for one in report)
    one, other = merge(bundles, public), merge(bundles, public, normalised=False)
    states = one.backbone.state_dict(), other.backbone.state_dict()
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())


def test_random_vectors_are_none_of_its_business(tiny):
    hostile = routed(tiny.bundles[0], vectors=1e6 * routing_of(tiny.bundles[0]).vectors)
    given = [hostile, *tiny.bundles[1:]]
    done, report = normalise(given, tiny.public, RouterSettings(form="random"))
    assert done is given and report == []


# ---- hostile ones


@pytest.mark.parametrize("form", RATIOS)
@pytest.mark.parametrize("who", [0, 1, 2])
def test_raised_biases_are_taken_back(form, who, tiny):
    public = with_form(tiny, form)
    honest = tiny.sent[form]
    hostile = [*honest]
    hostile[who] = routed(honest[who], biases=routing_of(honest[who]).biases + 20)
    assert shares(hostile, public)[who + 1] > 0.8
    done, report = normalise(hostile, public)
    lowered = np.array(report[who].lowered)
    assert (lowered > 10).all() and not report[who].is_none
    for k in {0, 1, 2} - {who}:
        assert done[k] is honest[k] and report[k].is_none
    before, after = routing_of(honest[who]).biases, routing_of(done[who]).biases
    change = after.double() - before.double() - 20
    if form == "evidence":  # a layer decides by the mean of all looks so far
        change = change.cumsum(0) / torch.tensor([1, 2])
    assert torch.allclose(change, -torch.tensor(lowered), atol=1e-5)
    assert torch.equal(routing_of(done[who]).vectors, routing_of(honest[who]).vectors)
    claims = [claim(bundle, public) for bundle in done]
    others = np.median([one.in_seed for k, one in enumerate(claims) if k != who], 0)
    assert (np.array(claims[who].in_seed) <= others + 1e-4).all() and claims[who].is_ratio


@pytest.mark.parametrize("layer", [0, 1])
def test_evidence_is_lowered_in_each_layer_by_what_is_said_and_not_more(layer, tiny):
    """A bias is part of the mean in its own layer and in all later ones, so what an earlier layer
    gave back does not have to be given back again."""
    public, honest = with_form(tiny, "evidence"), tiny.evidence
    biases = routing_of(honest[1]).biases.clone()
    biases[layer] += 40
    hostile = [honest[0], routed(honest[1], biases=biases), honest[2]]
    done, report = normalise(hostile, public)
    lowered = torch.tensor(report[1].lowered, dtype=torch.float64)
    assert lowered[layer] > 10 and (layer == 0 or lowered[0] < 1)
    assert 15 < lowered[1] < 25  # half of what was raised, as it is one look of two
    assert done[0] is honest[0] and done[2] is honest[2]
    assert report[0].is_none and report[2].is_none and not report[1].is_none
    assert torch.equal(routing_of(done[1]).vectors, routing_of(honest[1]).vectors)
    own = form_means("evidence", tiny.seed, honest[1].expert(tiny.seed).backbone, public.sample)
    for means in (public.means("evidence"), own):
        before, after = (ratios_of(bundles[1], means, public) for bundles in (hostile, done))
        assert torch.allclose(before - after, lowered[:, None].expand_as(before), atol=1e-5)
    after = routing_of(done[1]).biases
    if layer == 0:  # the second look was honest, and about stays what it was
        assert (after[1] - biases[1]).abs() < 8 < 10 < (after[0] - biases[0]).abs()
    claims = [claim(bundle, public) for bundle in done]
    sound = np.median([[one.in_seed, one.in_expert] for one in (claims[0], claims[2])], 0)
    found = np.array([claims[1].in_seed, claims[1].in_expert])
    assert (found <= sound + 1e-4).all() and claims[1].is_ratio
    assert np.isclose(found, sound, atol=1e-4).any(0)[layer]  # and it is the least that does


def test_biases_are_never_raised():
    modest, usual, loud = ([x] * 3 for x in (-9.0, -1.0, 8.0))
    lowered = held_back([Claim(modest, modest), Claim(usual, usual), Claim(loud, modest)])
    assert not lowered[0].any() and not lowered[1].any() and (lowered[2] > 0).all()
    quiet_here = Claim([8.0, -20.0, -20.0], [-20.0] * 3)
    assert (held_back([Claim(usual, usual), quiet_here])[1] == [9, 0, 0]).all()


def test_without_sound_members_the_log_mean_becomes_zero(tiny):
    public = with_form(tiny, "logistic")
    loud = [routed(b, biases=routing_of(b).biases + 20) for b in tiny.logistic]
    for members in (loud, loud[:1]):
        for bundle in normalise(members, public)[0]:
            assert claim(bundle, public).together == pytest.approx([0, 0], abs=1e-4)


def test_mark_that_only_the_own_expert_leaves_is_seen(tiny):
    """A vector may do well on the seed's samples and still claim everything that has passed its
    own expert."""
    public, bundle = with_form(tiny, "logistic"), tiny.logistic[0]
    own = form_means("logistic", tiny.seed, bundle.expert(tiny.seed).backbone, public.sample)
    moved = (own - public.means("logistic")).mean(1)  # none in the first layer
    vectors = routing_of(bundle).vectors.clone()
    vectors[1] += 60 * moved[1] / moved[1].norm() ** 2
    marked = routed(bundle, vectors=vectors)
    excess = torch.tensor(claim(marked, public).in_seed).clamp(min=0)
    marked = routed(marked, biases=routing_of(marked).biases - excess)
    found = claim(marked, public)
    assert (np.array(found.in_seed) <= TOLERANCE).all() and found.in_expert[1] > 20
    assert not found.is_ratio and normalise([marked, *tiny.logistic[1:]], public)[1][0].lowered[1]


def test_giant_vectors_have_nothing_of_the_pool_left(tiny):
    public, honest = with_form(tiny, "moments"), tiny.moments
    noise = torch.randn(routing_of(honest[0]).vectors.shape, generator=torch.manual_seed(0))
    hostile = [routed(honest[0], vectors=1e3 * noise), *honest[1:]]
    assert shares(hostile, public)[1] > 0.1
    assert shares(normalise(hostile, public)[0], public)[1] < 0.05


def test_merge_holds_back_unless_told_otherwise(tiny):
    public = with_form(tiny, "logistic")
    hostile = [routed(tiny.logistic[0], biases=routing_of(tiny.logistic[0]).biases + 20)]
    hostile += tiny.logistic[1:]
    biases = [
        torch.stack([layer.router.biases.detach() for layer in model.layers], 1)
        for model in (merge(hostile, public), merge(hostile, public, normalised=False))
    ]
    assert torch.equal(biases[1][1], routing_of(hostile[0]).biases)
    assert (biases[0][1] < biases[1][1] - 10).all()
    assert torch.equal(biases[0][2:], biases[1][2:])


def test_of_two_forms_the_one_that_is_delivered_is_looked_at_and_held_back(tiny):
    first, *others = tiny.both
    mean, moments = first.routing.values()
    loud = dict(mean=replace(mean, vectors=50 * mean.vectors))
    loud["moments"] = replace(moments, biases=moments.biases + 20)
    for form, other in (("mean", "moments"), ("moments", "mean")):
        public = with_form(tiny, form)
        for wrong in (form, other):
            hostile = replace(first, routing=first.routing | {wrong: loud[wrong]})
            done, report = normalise([hostile, *others], public)
            assert report[0].is_none == (wrong == other) == (done[0] is hostile)
            assert done[0].routing[other] is hostile.routing[other]
            assert all(one is two for one, two in zip(done[1:], others))


# ---- vectors that are no ratio


@pytest.mark.parametrize("seed_expert", [True, False], ids=["with the seed", "without"])
def test_long_means_are_cut_and_no_expert_takes_more_than_its_share(seed_expert, tiny):
    public = with_form(tiny, "mean", seed_expert=seed_expert)
    loud = routed(tiny.bundles[1], vectors=50 * public.routing("mean").vectors)
    done, report = normalise([tiny.bundles[0], loud, tiny.bundles[2]], public)
    others = [
        routing_of(bundle).vectors.norm(dim=1) for bundle in (tiny.bundles[0], tiny.bundles[2])
    ]
    usual = torch.stack(others).mean(0)  # the median of two
    assert (routing_of(done[1]).vectors.norm(dim=1) <= usual * 1.0001).all()
    assert all(factor < 0.5 for factor in report[1].shortened) and not report[1].is_none
    assert max(report[1].share) <= MOST and report[0].is_none and report[2].is_none
    assert done[0] is tiny.bundles[0] and report[1].claimed == []


def test_factor_is_the_largest_that_keeps_the_share():
    z = torch.linspace(0, 1, 1001)[None, :, None] + 1
    vectors = torch.tensor([[[1.0], [1.5]]])
    assert shortened(z, vectors)[0].tolist() == pytest.approx([1, 1 / 1.5], abs=2e-3)
    apart = torch.cat([z, 2 - z], 2)  # the second vector wins where 2 - z < z, below 1/2: never
    factors = shortened(apart, torch.tensor([[[0.5, 0.5], [0.6, 0.0]]]), first=1)
    assert factors[0, 0] == 1 and 0.9 < factors[0, 1] <= 1


def test_a_single_expert_takes_everything_and_may(tiny):
    public = with_form(tiny, "mean", seed_expert=False)
    [bundle], [report] = normalise(tiny.bundles[:1], public)
    assert bundle is tiny.bundles[0] and report.share == [1, 1]


# ---- the report


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed_expert", [True, False], ids=["with the seed", "without"])
@pytest.mark.parametrize("cumulative", [True, False], ids=["cumulative", "each layer alone"])
def test_shares_are_those_of_the_router(form, seed_expert, cumulative, tiny):
    public = with_form(tiny, form, seed_expert=seed_expert, cumulative=cumulative)
    report, means = normalise(tiny.sent[form], public)[1], public.means(form)
    for layer in range(2):
        model = merge(tiny.sent[form], public)
        routers = [layer.router for layer in model.layers]
        vectors = torch.stack([router.vectors.detach() for router in routers], 1)
        biases = torch.zeros(vectors.shape[:2])
        if form != "mean":
            biases = torch.stack([router.biases.detach() for router in routers], 1)
        said = [written_out(*pair, means, public, form) for pair in zip(vectors, biases)]
        logits = torch.stack([one[layer] for one in said], 1)
        if cumulative and form != "evidence":
            logits = torch.stack([one[: layer + 1].mean(0) for one in said], 1)
        wanted = torch.bincount(logits.argmax(1), minlength=len(model.experts)) / len(logits)
        found = [one.share[layer] for one in report]
        assert found == pytest.approx(wanted[seed_expert:].tolist(), abs=1e-6)
    assert all(len(one.lowered) == len(one.shortened) == 2 for one in report)
    assert all(len(one.claimed) == (0 if form == "mean" else 2) for one in report)
