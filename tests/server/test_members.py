"Members come and go, and an inbox holds what strangers put there."

import os
import random
import shutil
from dataclasses import replace

import pytest
import torch
from networks import same

from harmomoe.bundle.files import ADAPTER_FILES, write_bundle
from harmomoe.bundle.invitation import invite
from harmomoe.bundle.manifest import Limits
from harmomoe.bundle.signatures import new_keys, sign_bundle
from harmomoe.client.client import Client
from harmomoe.models.model import load_model
from harmomoe.server.merge import merge
from harmomoe.server.server import Server


@pytest.fixture(scope="module")
def variants(tiny, tmp_path_factory):
    "Two bundles of each client: what it sent, and another, of another rank."
    from harmomoe.config.settings import changed

    folder, found = tmp_path_factory.mktemp("variants"), {}
    other = tiny.public.with_config(changed(tiny.settings, {"expert.rank": 2}))
    for domain in tiny.clients:
        work = shutil.copytree(tiny.work / domain.name, folder / domain.name)
        sent = shutil.copytree(work / "bundle", folder / f"{domain.name}-first")
        found[domain.name] = sent, Client(other, domain, work).bundle()
    return found


def merged(server):
    "All numbers of the merged model, by name."
    return merge(list(server.received.values()), server.public).backbone.state_dict()


@pytest.mark.parametrize("random_state", range(6))
def test_after_any_sequence_the_merge_is_the_one_from_scratch(
    random_state, tiny, variants, tmp_path
):
    rng, server = random.Random(random_state), Server(tiny.public, tmp_path / "server")
    now = {}  # member -> its bundle, in the order in which they came
    for _ in range(8):
        name, which = rng.choice("abc"), rng.randrange(2)
        place = variants[name][which]
        if name not in now:
            server.receive(place)
            now[name] = place
        elif rng.random() < 0.5:
            server.replace(place)
            now[name] = place
        else:
            server.drop(name)
            del now[name]
    if not now:
        server.receive(place)
        now[name] = place
    scratch = Server(tiny.public, tmp_path / "scratch")
    for place in now.values():
        scratch.receive(place)
    found, wanted = merged(server), merged(scratch)
    assert list(server.received) == list(now) and found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    again = Server(tiny.public, tmp_path / "server")  # a later process
    assert all(torch.equal(tensor, wanted[key]) for key, tensor in merged(again).items())


def test_the_model_after_a_drop_is_one_that_the_member_never_joined(tiny, tmp_path):
    "Fine-tuning included, to the last bit; and nothing of the member is left in the folder."
    left, never = (Server(tiny.public, tmp_path / name) for name in ("left", "never"))
    for name in "abc":
        left.receive(tiny.work / name / "bundle")
    left.unify()
    left.drop("b")
    for name in "ac":
        never.receive(tiny.work / name / "bundle")
    one, other = left.unify(), never.unify()
    assert same(one.backbone, other.backbone) and one.experts == other.experts
    assert one.lineage == other.lineage and [part.client for part in one.lineage] == ["a", "c"]
    files = [path for path in (tmp_path / "left").rglob("*") if path.is_file()]
    adapter = (tiny.work / "b" / "bundle" / ADAPTER_FILES[1]).read_bytes()
    assert files and not any(path.read_bytes() == adapter for path in files)
    assert len(list((tmp_path / "left").glob("model-*"))) == 1


def test_a_saved_model_says_whose_bundles_are_in_it(tiny, tmp_path):
    server = Server(tiny.public, tmp_path / "server")
    for name in "ca":
        server.receive(tiny.work / name / "bundle")
    server.unify().save(tmp_path / "model")
    model = load_model(tmp_path / "model")
    bundles = server.received
    assert [(part.client, part.bundle) for part in model.lineage] == [
        (name, bundles[name].digest) for name in "ca"
    ]
    assert [part.private_samples for part in model.lineage] == [32, 30]
    assert model.random_state == tiny.settings.random_state


# ---- an inbox


@pytest.fixture
def inbox(tiny, tmp_path):
    "A folder with the bundles of a, b and c."
    for name in "abc":
        shutil.copytree(tiny.work / name / "bundle", tmp_path / "inbox" / name)
    return tmp_path / "inbox"


@pytest.fixture
def server(tiny, tmp_path):
    return Server(tiny.public, tmp_path / "server")


def reasons(arrivals):
    "Why each was refused, by the name of its folder."
    return {os.path.basename(arrival.place): arrival.reason for arrival in arrivals}


def test_a_bad_bundle_is_set_aside_by_name_and_stops_nobody(server, inbox):
    (inbox / "b" / ADAPTER_FILES[1]).write_bytes(b"\0" * 64)
    os.mkfifo(inbox / "c" / "more")
    (inbox / "empty").mkdir()
    (inbox / "link").symlink_to(inbox / "a")
    (inbox / "notes.txt").write_text("nothing")
    found = reasons(server.collect(inbox))
    assert list(server.received) == ["a"] and found["a"] == ""
    assert set(found) == {"a", "b", "c", "empty"}
    for name in ("b", "c", "empty"):
        assert str(inbox / name) in found[name] and "\n" not in found[name]


def test_two_different_bundles_under_one_name_are_both_refused(server, inbox, tiny):
    client = Client(tiny.public, tiny.b, tiny.work / "b")
    given = client.expert, client.routing, client.proxies, tiny.public, 24
    write_bundle(inbox / "x", "a", *given)
    found = reasons(server.collect(inbox))
    assert list(server.received) == ["b", "c"]
    assert "2 bundles come from a" in found["a"] and "2 bundles come from a" in found["x"]


def test_names_that_differ_in_case_are_one_name(server, inbox, tiny):
    client = Client(tiny.public, tiny.b, tiny.work / "b")
    given = client.expert, client.routing, client.proxies, tiny.public, 24
    write_bundle(inbox / "x", "A", *given)
    found = reasons(server.collect(inbox))
    assert list(server.received) == ["a", "b", "c"] and "A is a member already" in found["x"]


def test_a_copy_under_another_folders_name_shuts_nobody_out(server, inbox):
    shutil.copytree(inbox / "a", inbox / "0")
    assert set(reasons(server.collect(inbox)).values()) == {""}
    assert sorted(server.received) == ["a", "b", "c"]


def test_collecting_again_changes_nothing(server, inbox, tmp_path):
    kept = tmp_path / "server" / "received"
    times = lambda: {path: path.stat().st_mtime_ns for path in kept.rglob("*")}
    server.collect(inbox)
    before = times()
    assert all(arrival.accepted for arrival in server.collect(inbox)) and times() == before


def test_without_signatures_nobody_takes_a_members_place_by_its_name(server, inbox, variants):
    server.collect(inbox)
    before = server.received["a"].digest
    shutil.rmtree(inbox / "a")
    shutil.copytree(variants["a"][1], inbox / "a")
    assert "a is a member already" in reasons(server.collect(inbox))["a"]
    assert server.received["a"].digest == before
    server.drop("a")
    assert reasons(server.collect(inbox))["a"] == "" and server.received["a"].rank == 2


def test_a_signed_bundle_replaces_its_own_and_nobody_elses(tiny, tmp_path, variants):
    pytest.importorskip("model_signing")
    keys = {name: new_keys(tmp_path / "keys" / name) for name in "ab"}
    texts = {name: public.read_text() for name, (_, public) in keys.items()}
    invited = invite("colours", tiny.public, "tiny", "pool", keys=texts)
    server = Server(tiny.public, tmp_path / "server", invited)
    client = Client(tiny.public, tiny.a, tiny.work / "a")
    given = "a", client.expert, client.routing, client.proxies, tiny.public

    def send(folder, samples, key):
        sent = write_bundle(tmp_path / folder / "a", *given, samples, invited.digest)
        sign_bundle(sent, keys[key][0])
        return tmp_path / folder

    assert reasons(server.collect(send("first", 30, "a"))) == {"a": ""}
    refused = reasons(server.collect(send("stolen", 31, "b")))["a"]
    assert refused and server.received["a"].manifest.facts.private_samples == 30
    assert reasons(server.collect(send("second", 32, "a"))) == {"a": ""}
    assert server.received["a"].manifest.facts.private_samples == 32


def test_limits_of_the_invitation_hold(tiny, inbox, tmp_path):
    invited = invite("colours", tiny.public, "tiny", "pool", limits=Limits(rank=3))
    client = Client(tiny.public, tiny.a, tiny.work / "a")
    given = "a", client.expert, client.routing, client.proxies, tiny.public, 30
    write_bundle(inbox / "a", *given, invited.digest)
    found = reasons(Server(tiny.public, tmp_path / "server", invited).collect(inbox))
    assert "rank" in found["a"] and "no invitation" not in found["a"]
    larger = replace(invited, limits=Limits(rank=4))
    write_bundle(inbox / "a", *given, larger.digest)
    server = Server(tiny.public, tmp_path / "other", larger)
    found = reasons(server.collect(inbox))
    assert found["a"] == "" and "no invitation" in found["b"] and list(server.received) == ["a"]


def test_bundles_come_from_a_url_too(server, inbox):
    import fsspec

    store = fsspec.filesystem("memory")
    store.put(f"{inbox}/", "/inbox-of-members/", recursive=True)
    try:
        found = server.collect("memory://inbox-of-members")
        assert [arrival.client for arrival in found if arrival.accepted] == ["a", "b", "c"]
        assert server.received["a"].digest
    finally:
        store.rm("/inbox-of-members", recursive=True)
