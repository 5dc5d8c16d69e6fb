"Attacks find members of experts that know them by heart, and nobody where nothing was learnt."

from dataclasses import replace

import numpy as np
import pytest
import torch

from harmomoe.audit.canaries import coins, leave_out, mislabelled, with_canaries
from harmomoe.audit.measures import auc
from harmomoe.audit.signals import (
    ADAPTER,
    Attacker,
    confidence,
    look,
    loss_of,
    private_mean,
    traced,
)
from harmomoe.bundle.files import read_bundle
from harmomoe.client.client import Client
from harmomoe.config.settings import changed
from harmomoe.models.model import Model


@pytest.fixture(scope="module")
def attack(tiny_public, tiny_benchmark, tmp_path_factory):
    "Half of 60 images with labels that cannot be guessed, an expert that learnt them by heart."
    training = {"expert.epochs": 60, "expert.learning_rate": 2e-2, "expert.rank": 8}
    config = changed(
        tiny_public.config, training | {"router.form": "moments", "routing.forms": "mean"}
    )
    public = tiny_public.with_config(config)
    domain = tiny_benchmark.clients[2]
    data = mislabelled(domain.train)
    members = np.random.default_rng(1).permutation(len(data)) < len(data) // 2
    private = replace(domain, train=data.select(np.flatnonzero(members)))
    client = Client(public, private, tmp_path_factory.mktemp("attacked"))
    bundle = read_bundle(client.bundle(), public)
    return Attacker(public, data, domain.classes), bundle, members, private.train


def test_expert_that_knows_its_members_gives_them_away(attack):
    attacker, bundle, members, _ = attack
    said = attacker.scores(attacker.signals(bundle))
    assert auc(said[ADAPTER], members).low > 0.6
    assert auc(said["routing, mean"], members).value == 1
    assert set(said) == {
        ADAPTER,
        "routing, mean",
        "routing, moments",
        "proxies, relevance",
        "proxies, nearest",
    }


def test_expert_that_learnt_nothing_gives_nobody_away(attack):
    attacker, bundle, members, _ = attack
    factors = {place: (a, torch.zeros_like(b)) for place, (a, b) in bundle.factors.items()}
    expert = replace(bundle, factors=factors).expert(attacker.public.seed)
    gained = attacker.gain(confidence(expert, attacker.candidates, attacker.space))
    assert np.abs(gained).max() < 1e-5
    # those of a stranger, whose members these are not
    order = np.random.default_rng(0).permutation(len(members))
    said = attacker.scores(attacker.signals(bundle))[ADAPTER]
    found = auc(said, members[order])
    assert found.low < 0.5 < found.high


def test_private_mean_is_read_off_to_the_last_bits(attack):
    attacker, bundle, members, private = attack
    backbone = bundle.expert(attacker.public.seed).backbone
    truth = look(private, attacker.public, backbone).mean(0)
    found = private_mean(bundle, attacker.public, backbone)
    assert np.abs(found - truth).max() < 1e-4 * np.abs(truth).max()
    assert np.abs(bundle.routing["mean"].vectors.flatten().numpy() - truth).max() > 1e-2


def test_forms_that_share_a_pass_are_as_if_each_had_its_own(attack):
    attacker, bundle, _, _ = attack
    backbone = bundle.expert(attacker.public.seed).backbone
    both = attacker.in_routing(bundle, backbone)
    for form in bundle.routing:
        alone = replace(bundle, routing={form: bundle.routing[form]})
        np.testing.assert_allclose(
            both[form], attacker.in_routing(alone, backbone)[form], atol=1e-3
        )


def test_log_odds_are_those_of_the_right_class(attack):
    attacker, _, _, _ = attack
    seed, data, space = attacker.public.seed, attacker.candidates, attacker.space
    found, start = confidence(Model(seed, seed.backbone), data, space), 0
    for batch in seed.batches(data, space):
        p = seed.task(space).scores(seed.backbone, batch).double().softmax(1).numpy()
        own = p[np.arange(len(p)), batch["targets"].numpy()]
        part = found[start : start + len(p)]
        np.testing.assert_allclose(part, np.log(own / (1 - own)), atol=1e-4)
        np.testing.assert_allclose(loss_of(part, space), -np.log(own), atol=1e-4)
        start += len(p)
    assert start == len(data)


def test_tracing_solves_the_system_of_equations():
    rng = np.random.default_rng(0)
    x, members = rng.normal(size=(40, 60)) @ rng.normal(size=(60, 60)), np.arange(40) < 15
    assert auc(traced(x, x[members].mean(0)), members).value == 1
    few = traced(x[:, :3], x[members, :3].mean(0))
    assert 0.3 < auc(few, members).value < 0.95  # three equations do not tell


def test_canaries_have_wrong_labels_and_fair_coins(tiny_benchmark):
    data = tiny_benchmark.clients[2].train
    planted = mislabelled(data, 1)
    assert not (np.array(planted["label"]) == np.array(data["label"])).any()
    assert planted.features == data.features
    inside = coins(len(data), 3)
    both = with_canaries(data, planted, inside)
    assert len(both) == len(data) + inside.sum()
    assert both["label"][len(data) :] == [x for x, i in zip(planted["label"], inside) if i]
    assert 0.47 < coins(4000).mean() < 0.53
    with pytest.raises(ValueError, match="booleans"):
        with_canaries(data, planted, inside[1:])
    with pytest.raises(ValueError, match="two classes"):
        mislabelled(data.remove_columns("label").add_column("label", ["a"] * len(data)))


def test_leaving_out_loses_nothing_but_what_is_out(tiny_benchmark):
    domain = tiny_benchmark.clients[2]
    own, again = leave_out(domain, 16, 3), leave_out(domain, 16, 3)
    assert len(own.canaries) == len(own.inside) == 16
    assert len(own.domain.train) == len(domain.train) - (~own.inside).sum()
    known = lambda data: sorted(np.asarray(image).tobytes() for image in data["image"])
    out = own.canaries.select(np.flatnonzero(~own.inside))
    assert known(own.domain.train) != known(domain.train)
    assert sorted(known(own.domain.train) + known(out)) == known(domain.train)
    assert len(own.candidates) == len(domain.train)
    assert np.array_equal(own.inside, again.inside)
    assert known(own.canaries) == known(again.canaries)
    assert own.domain.test is domain.test


def test_own_audit_sees_who_was_in(tiny_public, tiny_benchmark, tmp_path):
    own = leave_out(tiny_benchmark.clients[2], 16)
    bundle = read_bundle(Client(tiny_public, own.domain, tmp_path).bundle(), tiny_public)
    table = own.table(bundle, tiny_public)
    assert table.loc["routing, mean", "AUC"].startswith("1.000")
    assert table.loc["routing, mean", "ε, at least"] > 0.5
    assert (table["ε, at least"] <= table["could be shown"]).all()
