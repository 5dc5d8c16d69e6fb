"Whether the model gets worse on other members' proxies because a member is there."

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import routing_of
from scipy import stats

from harmomoe.bundle.files import read_bundle
from harmomoe.client.client import Client
from harmomoe.config.settings import changed
from harmomoe.data.domains import load_benchmark
from harmomoe.data.samples import labelled
from harmomoe.describe.public import Public
from harmomoe.describe.routing import RoutingVectors
from harmomoe.models.weights import open_seed
from harmomoe.moe.context import FORMS
from harmomoe.server import screen as module
from harmomoe.server.merge import merge
from harmomoe.server.screen import HARM, LARGEST, SUFFERS, effect, effects, screen

pytestmark = pytest.mark.filterwarnings("ignore:The PEFT config's:UserWarning")


def with_form(tiny, form, **settings):
    router = {f"router.{name}": value for name, value in dict(settings, form=form).items()}
    return tiny.public.with_config(changed(tiny.settings, router))


def losses(model, public, rows):
    "Of one sample after the other, written out."
    task, classes = model.seed.task(public.pool.classes), public.pool.classes
    data = labelled(public.pool.train.select(rows))
    with torch.no_grad():
        batches = model.seed.batches(data, classes, 1)
        return np.array([task.loss(model.backbone, batch).item() for batch in batches])


def wrecker(bundle, public, by=30.0, **changes):
    "A member that unlearned what it had learned, ten times, and whose vectors get every sample."
    factors = {place: (a, -10 * b) for place, (a, b) in bundle.factors.items()}
    own = routing_of(bundle)
    biases = own.biases if own.form == "mean" else own.biases + by
    vectors = by * public.routing("mean").vectors if own.form == "mean" else own.vectors
    routing = {own.form: RoutingVectors(vectors, biases, own.form)}
    return replace(bundle, factors=factors, routing=routing, **changes)


@pytest.fixture
def harmful(monkeypatch):
    "A function (member -> nats): with these members the loss of every sample is higher by so much."
    plain = module._Judge.losses

    def harm(by):
        def losses(judge, model):
            active = [True] * len(getattr(model, "experts", []))
            if active and model.layers[0].router.active is not None:
                active = model.layers[0].router.active.tolist()
            there = [name for name, on in zip(getattr(model, "experts", []), active) if on]
            return plain(judge, model) + sum(by.get(name, 0) for name in there)

        monkeypatch.setattr(module._Judge, "losses", losses)

    return harm


# ---- an effect


def test_interval_is_that_of_paired_differences():
    rng = np.random.default_rng(0)
    one = rng.exponential(2, 40)
    other = one - rng.normal(0.3, 1, 40)
    found, test = effect("a", one, other), stats.ttest_rel(one, other)
    interval = test.confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert found.mean == pytest.approx((one - other).mean())
    suffer = int((one - other > SUFFERS).sum())
    assert found.share == suffer / 40 and (found.samples, found.claimed) == (40, 40)
    wilson = stats.binomtest(suffer, 40).proportion_ci(0.95, method="wilson")
    assert found.share_low == pytest.approx(wilson.low)


def test_only_claimed_samples_count_for_the_share_and_all_for_the_mean():
    one, other = np.array([2.0, 2, 2, 0, 0, 0]), np.zeros(6)
    found = effect("a", one, other, np.array([True, True, False, False, False, False]))
    assert (found.share, found.claimed, found.samples, found.mean) == (1, 2, 6, 1)
    nothing = effect("a", one, other, np.zeros(6, bool))
    assert (nothing.share, nothing.share_low, nothing.claimed) == (0, 0, 0)


def test_of_one_sample_nothing_is_known_but_the_mean():
    found = effect("a", np.array([2.0]), np.array([1.0]))
    assert (found.mean, found.low, found.high) == (1, -np.inf, np.inf) and found.share_low < HARM


# ---- against the definition


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed_expert", [True, False], ids=["with the seed", "without"])
def test_effects_are_differences_of_losses_with_and_without(form, seed_expert, tiny):
    public = with_form(tiny, form, seed_expert=seed_expert)
    bundles = tiny.sent[form]
    model, found = merge(bundles, public), effects(bundles, public)
    assert [*found] == ["a", "b", "c"] and all([*row] == ["a", "b", "c"] for row in found.values())
    for p in bundles:
        others = [name for name in model.experts if name != p.client]
        for q in bundles:
            whole = losses(model, public, q.ids)
            with model.only(*others):
                harm = whole - losses(model, public, q.ids)
            seen = found[p.client][q.client]
            assert seen.mean == pytest.approx(harm.mean(), abs=1e-4) and seen.samples == len(q.ids)
            assert seen.claimed == len(q.ids) or form != "mean"


def test_members_without_another_are_compared_with_the_seed(tiny):
    public = with_form(tiny, "mean", seed_expert=False)
    [bundle] = tiny.bundles[:1]
    model = merge([bundle], public)
    seen = effects([bundle], public)["a"]["a"]
    own = losses(model, public, bundle.ids)
    model.backbone = tiny.seed.backbone
    assert seen.mean == pytest.approx((own - losses(model, public, bundle.ids)).mean(), abs=1e-4)


def test_what_a_member_claims_is_a_positive_log_ratio_in_its_own_expert(tiny):
    public = with_form(tiny, "logistic")
    one = tiny.logistic[0]

    def claimed(by):
        own = routing_of(one)
        routing = RoutingVectors(own.vectors, own.biases + by, "logistic")
        given = [replace(one, routing=dict(logistic=routing)), *tiny.logistic[1:]]
        return effects(given, public, normalised=False)["b"]["a"].claimed

    assert claimed(-50) == 0 and claimed(50) == len(one.ids)


def test_of_two_forms_the_one_that_is_delivered_says_what_is_claimed(tiny):
    for form in ("mean", "moments"):
        public = with_form(tiny, form)
        assert effects(tiny.both, public) == effects(tiny.sent[form], public)
        assert [v.accepted for v in screen(tiny.both, public)[1]] == [True] * 3


def test_only_so_many_proxies_are_looked_at_the_same_each_time(tiny):
    public = with_form(tiny, "mean")
    found = [effects(tiny.bundles, public, most=5) for _ in range(2)]
    assert found[0] == found[1] != effects(tiny.bundles, public)
    assert all(seen.samples == 5 for row in found[0].values() for seen in row.values())


# ---- verdicts


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("members", ["abc", "cb", "a"])
def test_honest_members_are_accepted(form, members, tiny):
    public = with_form(tiny, form)
    bundles = [tiny.sent[form]["abc".index(name)] for name in members]
    accepted, verdicts = screen(bundles, public)
    assert accepted == bundles and [verdict.client for verdict in verdicts] == [*members]
    for verdict in verdicts:
        assert verdict.accepted and verdict.own.on == verdict.client
        assert {seen.on for seen in verdict.others} == {*members} - {verdict.client}
        assert verdict.adds == (verdict.own.high < 0)
        assert verdict.adds != verdict.reason.startswith("it adds nothing")


@pytest.mark.parametrize("form", FORMS)
def test_unlearned_expert_that_gets_every_sample_does_harm(form, tiny):
    public = with_form(tiny, form)
    hostile = [tiny.sent[form][0], tiny.sent[form][1], wrecker(tiny.sent[form][2], public)]
    found = effects(hostile, public, normalised=False)["c"]
    assert all(seen.mean > 0.5 for seen in found.values())


@pytest.mark.parametrize("who", "abc")
@pytest.mark.parametrize("seed_expert", [True, False], ids=["with the seed", "without"])
def test_who_harms_others_is_refused_and_they_stay(who, seed_expert, tiny, harmful):
    public = with_form(tiny, "mean", seed_expert=seed_expert)
    harmful({who: 3})
    accepted, verdicts = screen(tiny.bundles, public)
    assert [bundle.client for bundle in accepted] == [name for name in "abc" if name != who]
    for verdict in verdicts:
        others = {seen.on for seen in verdict.others}
        if verdict.client != who:  # tried again, without the refused one
            assert verdict.accepted and others == set("abc") - {who, verdict.client}
            continue
        assert not verdict.accepted and others == set("abc") - {who}
        assert verdict.others[0].share_low == max(seen.share_low for seen in verdict.others) > HARM
        assert f"of what {verdict.others[0].on} claims of its proxies suffers" in verdict.reason


def test_harm_to_fewer_than_most_is_none(tiny, harmful):
    harmful({"b": SUFFERS - 0.2})
    assert len(screen(tiny.bundles, with_form(tiny, "mean"))[0]) == 3


def test_proxies_of_the_victim_do_not_hide_anything(tiny, harmful):
    harmful({"a": 3})
    hostile = replace(tiny.bundles[0], ids=tiny.bundles[1].ids)
    accepted, _ = screen([hostile, *tiny.bundles[1:]], with_form(tiny, "mean"))
    assert [bundle.client for bundle in accepted] == ["b", "c"]


def test_what_nobody_claims_is_no_evidence(tiny, harmful):
    """Log ratios that are negative on all proxies: these are public samples that look like no
    member's."""
    harmful({"a": 3})
    public, bundles = with_form(tiny, "logistic"), []
    for one in tiny.logistic:
        own = routing_of(one)
        routing = RoutingVectors(own.vectors, own.biases - 50, "logistic")
        bundles.append(replace(one, routing=dict(logistic=routing)))
    accepted, verdicts = screen(bundles, public)
    assert len(accepted) == 3 and {seen.claimed for seen in verdicts[0].others} == {0}


def test_several_are_refused_one_after_the_other(tiny, harmful):
    harmful({"a": 3, "b": 5})
    accepted, verdicts = screen(tiny.bundles, with_form(tiny, "mean"))
    assert [bundle.client for bundle in accepted] == ["c"]
    assert [verdict.accepted for verdict in verdicts] == [False, False, True]


def test_normalising_takes_the_power_away_from_raised_biases(tiny):
    public = with_form(tiny, "logistic")
    hostile = [wrecker(tiny.logistic[0], public), *tiny.logistic[1:]]
    biases = [effects(hostile, public, normalised=n)["a"] for n in (False, True)]
    for name in "bc":
        assert biases[0][name].mean > 3 * max(biases[1][name].mean, 0.1)


def test_expert_that_gives_no_numbers_is_refused_and_the_others_go_on(tiny):
    for form in FORMS:
        public = with_form(tiny, form)
        first, *others = tiny.sent[form]
        factors = {place: (a * 1e30, b * 1e30) for place, (a, b) in first.factors.items()}
        accepted, verdicts = screen([replace(first, factors=factors), *others], public)
        assert [bundle.client for bundle in accepted] == ["b", "c"]
        assert verdicts[0].reason == "its expert gives numbers that are not finite."
        assert verdicts[0].own is None and not verdicts[0].adds and not verdicts[0].accepted


def test_a_loss_that_is_no_number_counts_as_a_large_one(tiny, monkeypatch):
    public = with_form(tiny, "mean")
    task = type(tiny.seed.task(public.pool.classes))
    scores = task.scores

    def broken(self, backbone, batch):
        found = scores(self, backbone, batch)
        asked = backbone.get_submodule(tiny.seed.layers[0]).router.active
        return found if asked is not None and not asked[1] else found * torch.nan

    monkeypatch.setattr(task, "scores", broken)
    found = effects(tiny.bundles, public)
    assert found["a"]["b"].share == 1 and found["a"]["b"].mean > LARGEST / 2
    assert found["b"]["c"].mean == 0  # both are no numbers


def test_member_without_any_effect_is_accepted_and_said_to_add_nothing(tiny):
    public = with_form(tiny, "mean")
    idle = {place: (a, 0 * b) for place, (a, b) in tiny.bundles[0].factors.items()}
    routing = RoutingVectors(-routing_of(tiny.bundles[0]).vectors, torch.zeros(2), "mean")
    quiet = replace(tiny.bundles[0], factors=idle, routing=dict(mean=routing))
    accepted, verdicts = screen([quiet, *tiny.bundles[1:]], public)
    assert accepted[0] is quiet and not verdicts[0].adds
    assert verdicts[0].reason.startswith("it adds nothing on its own proxies")


def test_bundles_that_do_not_go_together_are_refused_as_in_merging(tiny):
    with pytest.raises(ValueError, match="different names"):
        screen([tiny.bundles[0]] * 2, tiny.public)
    with pytest.raises(
        ValueError,
        match="a sent routing vectors of the form mean, but the router's form is 'logistic'",
    ):
        screen(tiny.bundles, with_form(tiny, "logistic"))


# ---- texts


def test_texts_without_choices_are_screened_sample_by_sample(
    tiny_texts, tiny_decoder, tiny_settings, tmp_path
):
    benchmark = load_benchmark(tiny_texts, "colours,animals", "sayings")
    seed = open_seed(str(tiny_decoder))
    config = changed(tiny_settings, {"router.form": "logistic", "expert.epochs": 1})
    public = Public(seed, benchmark.pool, config, tmp_path / "public")
    clients = [Client(public, one, tmp_path / one.name) for one in benchmark.clients]
    bundles = [read_bundle(client.bundle(), public) for client in clients]
    model, found = merge(bundles, public), effects(bundles, public)
    whole = losses(model, public, bundles[1].ids)
    with model.only("seed", "animals"):
        harm = whole - losses(model, public, bundles[1].ids)
    assert found["colours"]["animals"].mean == pytest.approx(harm.mean(), abs=1e-4)
    assert [bundle.client for bundle in screen(bundles, public)[0]] == ["colours", "animals"]
    accepted, _ = screen([wrecker(bundles[0], public), bundles[1]], public, normalised=False)
    assert [bundle.client for bundle in accepted] in (["animals"], ["colours", "animals"])
