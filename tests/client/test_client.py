"""One client: each step is done once, what may change does and nothing else, and what is sent is
what was made."""

import shutil
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from datasets import Dataset
from helpers import kept, routing_of, stamps

from harmomoe.base.artefacts import MANIFEST, read_manifest, stages_run
from harmomoe.bundle.files import ADAPTER_FILES, FILES, PROXIES, read_bundle
from harmomoe.client.client import Client
from harmomoe.config.settings import changed
from harmomoe.describe.relevance import linear_probe
from harmomoe.describe.routing import FILE as ROUTING
from harmomoe.describe.routing import load_routing
from harmomoe.models.training import Checkpoint
from harmomoe.moe.context import FORMS, vector_size

pytestmark = pytest.mark.filterwarnings("ignore:The PEFT config's:UserWarning")
RATIOS = [form for form in FORMS if form != "mean"]
each_form = pytest.mark.parametrize("form", FORMS)
each_ratio = pytest.mark.parametrize("form", RATIOS)
STEPS = ["embeddings", "expert", "proxies", "relevance", "routing"]
SHORT = {"expert.epochs": 1}


def client_of(tiny, work, changes={}, domain=None, **public):
    "A client with changed settings; `public` may be replaced in part too."
    settings = changed(tiny.settings, changes)
    own = replace(tiny.public, **public) if public else tiny.public
    return Client(own.with_config(settings), domain or tiny.a, work)


def same_files(one, two, names):
    for name in names:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name


def same_routing(one, two):
    equal = torch.equal(one.vectors, two.vectors) and torch.equal(one.biases, two.biases)
    return equal and one.form == two.form


def with_images_of(domain, other):
    "A domain whose training images are replaced by those of another."
    train, images = domain.train, other.train["image"][: len(domain.train)]
    columns = dict(image=images, label=train["label"])
    return replace(domain, train=Dataset.from_dict(columns, train.features))


def steps_in(folder):
    return sorted(path.name.partition("-")[0] for path in folder.iterdir())


# ---- from private data to what is sent


def test_nothing_is_done_before_it_is_asked_for_and_then_what_is_needed(tiny, tmp_path):
    client, public = client_of(tiny, tmp_path / "a"), tiny.public
    assert public.embeddings is not None
    asked = dict(
        random_state=[],
        relevance=["embeddings-shard", "embeddings", "relevance"],
        proxies=["proxies"],
        training_data=[],
        expert=["expert"],
        routing=["routing"],
    )
    for step, needed in asked.items():
        with stages_run() as ran:
            getattr(client, step)
        assert ran == needed, step
    with stages_run() as ran:
        client.bundle()
    assert ran == [] and steps_in(tmp_path / "a") == ["bundle", *STEPS]


@pytest.mark.parametrize("name", ["seed", "my/clinic", "..", "St. Mary's", "x" * 101])
def test_a_name_that_no_server_would_take_is_refused_before_any_work(name, tiny, tmp_path):
    with pytest.raises(ValueError, match="the client's name .* must be 1 to 64 letters"):
        Client(tiny.public, replace(tiny.a, name=name), tmp_path / "a")
    assert not any(tmp_path.iterdir())


def test_expert_learns_its_own_classes(tiny):
    for domain in tiny.clients:
        [expert] = kept(tiny.work / domain.name, "expert")
        losses = read_manifest(expert)["facts"]["losses"]
        assert losses[-1] < losses[0]


def test_what_an_expert_learns_from_follows_the_settings(tiny, tmp_path):
    shutil.copytree(tiny.work / "a", tmp_path / "a")
    for private, proxies, sizes in ((True, True, (30, 12)), (True, False, (30, None))):
        changes = {"expert.private": private, "expert.proxies": proxies}
        found = client_of(tiny, tmp_path / "a", changes).training_data
        assert tuple(part if part is None else len(part) for part in found) == sizes
    client = client_of(tiny, tmp_path / "a", {"expert.private": False})
    first, second = client.training_data
    assert second is None and len(first) == 12
    wanted = tiny.pool.train.select(client.proxies.ids)
    assert first["label"] == wanted["label"]


def test_clients_draw_independently_of_each_other_and_alike_every_time(tiny, tmp_path):
    first = [Client(tiny.public, domain, tmp_path).random_state for domain in tiny.clients]
    assert len(set(first)) == 3 and all(0 <= number < 2**32 for number in first)
    elsewhere = [Client(tiny.public, d, tmp_path / "x").random_state for d in tiny.clients]
    assert elsewhere == first
    assert client_of(tiny, tmp_path, {"random_state": 1}).random_state not in first
    ids = [
        client_of(tiny, tmp_path / d.name, {"proxies.selection": "random"}, d).proxies.ids.tolist()
        for d in tiny.clients
    ]
    assert ids[0] != ids[1] != ids[2]


@each_form
def test_bundles_hold_the_form_that_was_asked_for(form, tiny):
    width = vector_size(form, 64, 256)
    for plain, other in zip(tiny.bundles, tiny.sent[form]):
        assert routing_of(other).form == form and routing_of(other).vectors.shape == (2, width)
        assert routing_of(plain).form == "mean" and not routing_of(plain).biases.any()
        if form != "mean":
            assert routing_of(other).biases.all()
            for part in routing_of(other).vectors.split(64, 1):
                assert part.any() and not torch.allclose(routing_of(plain).vectors, part, atol=1e-5)
        pairs = zip(plain.factors.values(), other.factors.values())  # of one expert
        assert all(torch.equal(one, two) for pair in pairs for one, two in zip(*pair))


def test_of_private_images_nothing_but_the_choice_of_proxies_is_in_experts_trained_on_proxies(
    tiny, tmp_path
):
    """Random proxies don't depend on private images either: then nothing that is sent does, but
    their number."""

    def sent(domain, form, **changes):
        plain = {"proxies.selection": "random", "router.form": form} | SHORT
        folder = tmp_path / domain.train._fingerprint
        where = tmp_path / f"sent-{len(list(tmp_path.iterdir()))}"
        return client_of(tiny, folder, plain | changes, domain).bundle(where)

    one, other, proxies_alone = tiny.a, with_images_of(tiny.a, tiny.c), {"expert.private": False}
    for form in FORMS:
        pair = sent(one, form, **proxies_alone), sent(other, form, **proxies_alone)
        same_files(*pair, (*ADAPTER_FILES, ROUTING, PROXIES))
        pair = sent(one, form), sent(other, form)
        for name in (ADAPTER_FILES[1], ROUTING):
            assert (pair[0] / name).read_bytes() != (pair[1] / name).read_bytes()


@pytest.mark.parametrize("where", [None, "elsewhere"])
def test_bundle_is_written_where_it_is_asked_for(where, tiny, tmp_path):
    shutil.copytree(tiny.work / "a", tmp_path / "a")
    shutil.rmtree(tmp_path / "a" / "bundle")
    found = client_of(tiny, tmp_path / "a").bundle(where and tmp_path / where)
    assert found == (tmp_path / where if where else tmp_path / "a" / "bundle")
    same_files(found, tiny.work / "a" / "bundle", (*FILES, MANIFEST))
    assert read_bundle(found, tiny.public).client == "a"


# ---- relevance and selection


def test_relevance_is_kept_as_it_was_found(tiny):
    stored = client_of(tiny, tiny.work / "a").relevance
    own, settings = tiny.seed.embed(tiny.a.train).numpy(), tiny.settings
    given = tiny.embeddings, settings.relevance.negatives
    found = linear_probe(own, *given, random_state=settings.random_state)
    assert np.array_equal(stored.scores, found.scores)
    assert np.array_equal(stored.private, found.private)
    assert stored.facts == found.facts and stored.describe() == found.describe()


def test_relevance_by_fine_tuning_is_another_version_of_it(tiny, tmp_path):
    shutil.copytree(tiny.work / "a", tmp_path / "a")
    probe = client_of(tiny, tmp_path / "a").relevance
    with stages_run() as ran:
        tuned = client_of(tiny, tmp_path / "a", {"relevance.method": "finetune"}).relevance
    assert ran == ["relevance"] and len(kept(tmp_path / "a", "relevance")) == 2
    assert (probe.facts["method"], tuned.facts["method"]) == ("probe", "finetune")
    assert tuned.scores.shape == probe.scores.shape
    assert not np.array_equal(tuned.scores, probe.scores)


def test_selection_is_kept_and_another_stands_beside_it_when_something_that_it_depends_on_changes(
    tiny, tmp_path
):
    folder = shutil.copytree(tiny.work / "a", tmp_path / "a")

    def chosen(domain=tiny.a, **changes):
        with stages_run() as ran:
            found = client_of(tiny, folder, changes, domain).proxies.ids.tolist()
        return found, [kind for kind in ran if "embeddings" not in kind]

    before = stamps(folder)
    first, done = chosen()
    assert done == []
    others = {"finetune.epochs": 1, "expert.epochs": 1, "router.top_k": 2, "expert.rank": 9}
    assert chosen(**others) == (first, []) and stamps(folder) == before
    assert chosen(**{"proxies.number": 11}) == (first[:11], ["proxies"])
    for change in ({"proxies.selection": "similarity"}, {"proxies.candidates": 30}):
        assert chosen(**change)[1] == ["proxies"]
    for change in ({"random_state": 1}, {"relevance.negatives": 50}):
        assert chosen(**change)[1] == ["relevance", "proxies"]
    fewer = replace(tiny.a, train=tiny.a.train.select(range(29)))
    assert chosen(fewer)[1] == ["relevance", "proxies"]
    assert chosen() == (first, []) and chosen(random_state=1)[1] == []  # both are there
    assert (len(kept(folder, "relevance")), len(kept(folder, "proxies"))) == (1 + 3, 1 + 6)
    del before["embeddings"]  # of other private data by now
    assert before.items() <= stamps(folder).items()


def test_a_selection_by_chance_needs_no_more_than_the_pool_and_says_who_drew(tiny, tmp_path):
    found = client_of(tiny, tmp_path, {"proxies.selection": "random"})
    with stages_run() as ran:
        assert found.proxies.method == "random"
    assert not ran and not any(tmp_path.iterdir())
    assert found.proxies.settings["random_state"] == found.random_state
    assert found.proxies.pool_fingerprint == tiny.public.fingerprint


@pytest.mark.parametrize("selection", ["dpp", "similarity", "random"])
def test_more_proxies_than_dimensions_are_completed(selection, tiny, tmp_path):
    "The tiny seed embeds in 32 dimensions."
    changes = {"proxies.selection": selection, "proxies.candidates": 60, "proxies.number": 50}
    shutil.copytree(tiny.work / "a", tmp_path / "a")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = client_of(tiny, tmp_path / "a", changes).proxies
    assert len(set(found.ids.tolist())) == 50


def test_relevance_of_rounded_embeddings_is_kept_apart(tiny, tmp_path, monkeypatch):
    found = []
    for kind in (None, torch.bfloat16):
        monkeypatch.setattr(tiny.seed, "embeds_in", kind)
        folder = tmp_path / f"public-{kind}"
        found.append(client_of(tiny, tmp_path / "a", folder=folder).relevance)
    assert not np.array_equal(found[0].scores, found[1].scores)
    assert len(kept(tmp_path / "a", "relevance")) == 2


# ---- finished work is kept, other work is done beside it


def test_second_run_does_nothing_and_sends_the_same(client, tiny, tmp_path):
    before = stamps(tmp_path / "a")
    assert sorted(name.partition("-")[0] for name in before) == STEPS
    with stages_run() as ran:
        assert client() == tmp_path / "a" / "bundle"
    assert ran == [] and stamps(tmp_path / "a") == before
    same_files(tmp_path / "a" / "bundle", tiny.work / "a" / "bundle", (*FILES, MANIFEST))


def test_expert_is_kept_when_only_the_servers_settings_change(client, tmp_path):
    before = stamps(tmp_path / "a")
    with stages_run() as ran:
        client({"finetune.epochs": 1, "router.top_k": 2, "router.lam": 1.0})
    assert ran == [] and stamps(tmp_path / "a") == before
    with stages_run() as ran:
        client({"routing.public_samples": 30})
    assert ran == ["routing"] and before.items() <= stamps(tmp_path / "a").items()


CHANGES = [
    {"expert.epochs": 1},
    {"expert.rank": 2},
    {"expert.alpha": 4},
    {"expert.dropout": 0.2},
    {"expert.precision": "bf16"},
    {"proxies.number": 11},
    {"proxies.selection": "similarity"},
    {"expert.proxies": False},
    {"expert.private": False},
    {"random_state": 1},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_another_expert_is_trained_when_what_it_depends_on_changes_and_going_back_costs_nothing(
    change, client, tiny, tmp_path
):
    folder, parts = tmp_path / "a", dict(expert=ADAPTER_FILES[1], routing=ROUTING)
    before, old = stamps(folder), {kind: kept(folder, kind) for kind in parts}
    with stages_run() as ran:
        client(change)
    assert ran[-2:] == ["expert", "routing"]
    after = stamps(folder)
    assert before.items() <= after.items()  # nothing is written over
    for kind, file in parts.items():
        [new] = set(kept(folder, kind)) - set(old[kind])
        content = (new / file).read_bytes()
        assert content != (old[kind][0] / file).read_bytes()
        assert content == (folder / "bundle" / file).read_bytes()
    with stages_run() as ran:
        client()
    assert ran == [] and stamps(folder) == after
    same_files(folder / "bundle", tiny.work / "a" / "bundle", (*FILES, MANIFEST))


def test_another_expert_is_trained_when_the_private_data_change(client, tiny, tmp_path):
    same_proxies = {"proxies.selection": "random"} | SHORT  # they do not depend on the data
    adapter = (client(same_proxies) / ADAPTER_FILES[1]).read_bytes()
    old = kept(tmp_path / "a", "expert")
    client(same_proxies, tiny.a.train.select(range(29)))
    [new] = set(kept(tmp_path / "a", "expert")) - set(old)
    sent = (tmp_path / "a" / "bundle" / ADAPTER_FILES[1]).read_bytes()
    assert sent == (new / ADAPTER_FILES[1]).read_bytes() != adapter


def test_routing_is_computed_again_when_private_data_change_that_left_no_trace_in_the_expert(
    client, tiny, tmp_path
):
    """Without epochs the expert is the one that training would start from, whatever it would
    train on."""
    fewer = replace(tiny.a, train=tiny.a.train.select(range(29)))
    domains = [tiny.a, with_images_of(tiny.a, tiny.c), fewer]
    for form in FORMS:
        changes, sent = {"expert.epochs": 0, "router.form": form}, []
        for index, domain in enumerate(domains):
            folder = tmp_path / f"{form}-{index}"
            sent.append(shutil.copytree(client(changes, domain.train), folder))
            same_files(sent[0], folder, ADAPTER_FILES)
            fresh = client_of(tiny, tmp_path / f"fresh-{index}", changes, domain).bundle()
            same_files(folder, fresh, (ROUTING,))
        vectors = [load_routing(folder)[form].vectors for folder in sent]
        for one, other in ((0, 1), (0, 2), (1, 2)):
            assert not torch.equal(vectors[one], vectors[other])


def test_routing_is_computed_again_when_the_pool_changes_that_the_expert_did_not_see(
    tiny, tmp_path
):
    smaller = replace(tiny.pool, train=tiny.pool.train.select(range(60)))
    for form in RATIOS:
        changes = {"expert.proxies": False, "router.form": form} | SHORT

        def sent(pool, name):
            where = tmp_path / f"{form}-{name}-{len(pool.train)}"
            return client_of(tiny, tmp_path / name, changes, pool=pool).bundle(where)

        full, less, fresh = sent(tiny.pool, "kept"), sent(smaller, "kept"), sent(smaller, "fresh")
        same_files(full, less, ADAPTER_FILES)
        same_files(less, fresh, FILES)
        vectors = [load_routing(folder)[form].vectors for folder in (full, less)]
        assert not torch.equal(*vectors)
    assert len(kept(tmp_path / "kept", "routing")) == 2 * len(RATIOS)


# ---- routing vectors of several forms


@each_ratio
def test_another_form_of_routing_keeps_the_expert_and_changes_what_is_sent(
    form, client, tiny, tmp_path
):
    folder, changes = tmp_path / "a", {"router.form": form}
    before, adapter = stamps(folder), (folder / "bundle" / ADAPTER_FILES[1]).read_bytes()
    with stages_run() as ran:
        sent = read_bundle(client(changes), tiny.public)
    assert ran == ["routing"]
    assert same_routing(routing_of(sent), routing_of(tiny.sent[form][0]))
    assert sent.manifest.inputs.settings["router"]["form"] == form
    after = stamps(folder)
    assert before.items() <= after.items()
    assert (sent.folder / ADAPTER_FILES[1]).read_bytes() == adapter
    [new] = after.keys() - before.keys()
    assert new.startswith("routing-")
    assert same_routing(load_routing(folder / new)[form], routing_of(sent))
    with stages_run() as ran:
        client(changes)
        for back in ({}, {"router.form": "random"}):
            found = routing_of(read_bundle(client(back), tiny.public))
            assert same_routing(found, routing_of(tiny.bundles[0]))
    assert ran == [] and stamps(folder) == after


def test_a_second_form_is_one_stage_more_and_trains_no_expert_again(client, tiny, tmp_path):
    folder, both = tmp_path / "a", {"routing.forms": "moments"}
    before, adapter = stamps(folder), (folder / "bundle" / ADAPTER_FILES[1]).read_bytes()
    with stages_run() as ran:
        sent = read_bundle(client(both), tiny.public)
    assert ran == ["routing"] and before.items() <= stamps(folder).items()
    assert (sent.folder / ADAPTER_FILES[1]).read_bytes() == adapter
    assert list(sent.routing) == ["mean", "moments"]
    for form, one in sent.routing.items():
        assert same_routing(one, routing_of(tiny.sent[form][0]))
    with stages_run() as ran:
        others = {"router.form": "moments"}, {"router.form": "moments", "routing.forms": "mean"}
        assert list(read_bundle(client(others[0]), tiny.public).routing) == ["moments"]
        again = read_bundle(client(others[1]), tiny.public)
        assert list(read_bundle(client(), tiny.public).routing) == ["mean"]
    assert ran == [] and again.routing.keys() == sent.routing.keys()
    assert len(kept(folder, "routing")) == 2


@each_ratio
def test_density_ratios_follow_the_public_samples_and_a_damaged_file_is_made_again(
    form, client, tiny, tmp_path
):
    folder, changes = tmp_path / "a", {"router.form": form}
    [mean] = kept(folder, "routing")
    first = routing_of(read_bundle(client(changes), tiny.public))
    [ratio] = set(kept(folder, "routing")) - {mean}
    (ratio / ROUTING).write_bytes(b"cut off")
    assert same_routing(routing_of(read_bundle(client(changes), tiny.public)), first)
    assert set(kept(folder, "routing")) == {mean, ratio}
    assert same_routing(load_routing(ratio)[form], first)
    fewer = client(changes | {"routing.public_samples": 30})
    assert not same_routing(routing_of(read_bundle(fewer, tiny.public)), first)
    assert len(kept(folder, "routing")) == 3


def test_clients_of_one_machine_share_what_is_public_and_send_the_same(tiny, tmp_path):
    "Whoever needs it first computes it: embeddings of the pool, and its means in the seed."
    for name in "ab":
        ignored = shutil.ignore_patterns("routing-*", "proxies-*")
        shutil.copytree(tiny.work / name, tmp_path / name, ignore=ignored)
    with stages_run() as ran:
        for domain, alone in zip((tiny.a, tiny.b), tiny.moments):
            given = tmp_path / domain.name, {"router.form": "moments"}, domain
            client = client_of(tiny, *given, folder=tmp_path / "public")
            found = read_bundle(client.bundle(), client.public)
            assert same_routing(routing_of(found), routing_of(alone))
    assert ran == ["embeddings-shard", "embeddings", "proxies", "means", "routing"] + [
        "proxies",
        "routing",
    ]


# ---- damage and interruption

PARTS = dict(relevance="relevance.npz", proxies=PROXIES, expert=ADAPTER_FILES[1], routing=ROUTING)


@pytest.mark.parametrize("kind", PARTS)
def test_a_damaged_step_is_made_again_in_place_and_no_other(kind, client, tiny, tmp_path):
    [path] = kept(tmp_path / "a", kind)
    content, before = (path / PARTS[kind]).read_bytes(), stamps(tmp_path / "a")
    (path / PARTS[kind]).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with stages_run() as ran:
        client()
    assert ran == ([kind] if kind != "relevance" else [])  # proxies need no relevance again
    if kind == "relevance":
        with stages_run() as ran:
            assert client_of(tiny, tmp_path / "a").relevance.scores.shape == (90,)
        assert ran == [kind]
    after = stamps(tmp_path / "a")
    assert (path / PARTS[kind]).read_bytes() == content
    assert after.keys() == before.keys()
    assert {name for name in before if before[name] != after[name]} == {path.name}
    same_files(tmp_path / "a" / "bundle", tiny.work / "a" / "bundle", (*FILES, MANIFEST))


def switched_off(*given, **named):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "where, left",
    [
        ("task", ["embeddings", "proxies", "relevance"]),
        ("token_mask", ["embeddings", "expert", "proxies", "relevance"]),
    ],
    ids=["while the expert learns", "while it is described"],
)
def test_an_interrupted_step_leaves_nothing_of_its_own_and_is_taken_up(
    where, left, tiny, tmp_path, monkeypatch
):
    folder = tmp_path / "a"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tiny.seed, where, switched_off)
        client_of(tiny, folder).bundle()
    whole = [path for path in folder.iterdir() if path.name[0] != "."]
    assert sorted(path.name.partition("-")[0] for path in whole) == left
    with stages_run() as ran:
        client_of(tiny, folder).bundle()
    assert sorted(ran + left) == STEPS
    same_files(folder / "bundle", tiny.work / "a" / "bundle", FILES)
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize("batches", [1, 3, 5])
def test_an_expert_that_is_interrupted_goes_on_where_it_was(batches, tiny, tmp_path, monkeypatch):
    "Three batches an epoch."
    monkeypatch.setattr(Checkpoint, "due", lambda self: True)
    changes = {"expert.dropout": 0.3}
    whole = client_of(tiny, tmp_path / "whole", changes).bundle()
    folder, task, learnt = tmp_path / "a", tiny.seed.task, []

    def task_that_ends(classes):
        found = task(classes)
        loss = found.loss

        def counted(backbone, batch):
            if len(learnt) == batches:
                raise KeyboardInterrupt
            learnt.append(batch)
            return loss(backbone, batch)

        found.loss = counted
        return found

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tiny.seed, "task", task_that_ends)
        client_of(tiny, folder, changes).bundle()
    [unfinished] = folder.glob(".expert-*.unfinished")
    learnt, batches = [], 6 - batches  # and no more
    with monkeypatch.context() as patch:
        patch.setattr(tiny.seed, "task", task_that_ends)
        same_files(client_of(tiny, folder, changes).bundle(), whole, FILES)
    assert len(learnt) == batches and not unfinished.exists()


@each_form
def test_an_expert_that_diverged_in_its_very_last_step_is_not_sent(form, tiny, tmp_path):
    folder = shutil.copytree(tiny.work / "a", tmp_path / "a")
    shutil.rmtree(folder / "bundle")
    routing = kept(folder, "routing")
    one_step = {"expert.epochs": 1, "expert.batch_size": 1000, "expert.learning_rate": 1e38}
    changes = one_step | {"expert.optimizer": "sgd", "router.form": form}
    with pytest.raises(FloatingPointError, match="Lower the learning rate"):
        client_of(tiny, folder, changes).bundle()
    assert kept(folder, "routing") == routing and not (folder / "bundle").exists()
