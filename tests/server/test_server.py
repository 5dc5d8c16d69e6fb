"What a server keeps: its members and their model. The same bundles give the same model, always."

import inspect
import shutil
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from helpers import kept, routing_of, stamps
from networks import close, embed, same

from harmomoe.base.artefacts import MANIFEST, read_manifest, stages_run
from harmomoe.base.places import fetch_folder
from harmomoe.bundle.files import ADAPTER_FILES, FILES, StoredFactors, write_bundle
from harmomoe.client.client import Client
from harmomoe.config.settings import changed
from harmomoe.data.domains import fingerprint
from harmomoe.models.observe import observe_routing
from harmomoe.models.training import Checkpoint
from harmomoe.moe.stored import stored_rows
from harmomoe.server import server as module
from harmomoe.server.finetune import finetune, proxy_union
from harmomoe.server.merge import choose_router, merge
from harmomoe.server.normalise import contents_digest
from harmomoe.server.server import Server, unify

pytestmark = pytest.mark.filterwarnings("ignore:The PEFT config's:UserWarning")
MODEL_FILES = "moe.safetensors", "model.json", "seed/open_clip_model.safetensors"


def other_settings(public, **changes):
    "The same with settings changed; `router__top_k` is `router.top_k`."
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    return public.with_config(changed(public.config, changes))


def listing(folder):
    "Every file below a folder, also hidden ones, and what is in it."
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def model_bytes(folder):
    "The files of a server's only model."
    [model] = kept(folder, "model")
    return {name: (model / name).read_bytes() for name in MODEL_FILES}


@pytest.fixture
def serve(tiny, tmp_path):
    """A function (members, name of the folder, changes) that gives a server which received what
    these clients sent."""

    def start(members="", folder="server", **changes):
        server = Server(other_settings(tiny.public, **changes), tmp_path / folder)
        for name in members:
            server.receive(tiny.work / name / "bundle")
        return server

    return start


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory):
    "A server with all three members that has made its model. Tests don't change it."
    server = Server(tiny.public, tmp_path_factory.mktemp("server"))
    for name in "abc":
        server.receive(tiny.work / name / "bundle")
    server.unify()
    return server


@pytest.fixture
def at_once(monkeypatch):
    "Checkpoints are written after every step."
    monkeypatch.setattr(Checkpoint, "due", lambda self: True)


# ---- members come and go


def test_what_is_received_is_a_copy_of_what_was_sent(serve, tiny, tmp_path):
    sent = shutil.copytree(tiny.work / "a" / "bundle", tmp_path / "inbox")
    server = serve()
    bundle = server.receive(sent)
    shutil.rmtree(sent)
    assert bundle is server.received["a"] and bundle.folder == tmp_path / "server/received/1-a"
    assert listing(bundle.folder) == listing(tiny.work / "a" / "bundle")
    assert bundle.ids.tolist() == tiny.bundles[0].ids.tolist()
    assert bundle.manifest == tiny.bundles[0].manifest
    assert torch.equal(routing_of(bundle).vectors, routing_of(tiny.bundles[0]).vectors)


def test_members_are_in_the_order_in_which_they_came(serve):
    assert list(serve("cab").received) == ["c", "a", "b"]


def test_server_on_the_same_folder_later_knows_its_members(serve):
    before = serve("cab").received
    later = serve()
    assert list(later.received) == ["c", "a", "b"]
    for name, bundle in later.received.items():
        assert bundle.manifest == before[name].manifest and bundle.folder == before[name].folder


def test_order_is_that_of_numbers_however_many_members_there_are(tiny, serve, tmp_path):
    client, names = Client(tiny.public, tiny.a, tiny.work / "a"), [f"m{k}" for k in range(11)]
    server, given = serve(), (client.expert, client.routing, client.proxies, tiny.public)
    for name in names[::-1]:
        server.receive(write_bundle(tmp_path / name, name, *given, 30))
    assert list(serve().received) == names[::-1]


def test_bundle_that_comes_again_changes_nothing_and_a_new_one_replaces_it_if_asked(
    serve, tiny, client, tmp_path
):
    server, changed_bundle = serve("abc"), client({"expert.rank": 2})
    before = listing(tmp_path / "server")
    server.receive(tiny.work / "a" / "bundle")
    with pytest.raises(ValueError, match="a is a member already, with another bundle"):
        server.receive(changed_bundle)
    assert listing(tmp_path / "server") == before
    new = server.replace(changed_bundle)
    assert list(server.received) == list(serve().received) == ["a", "b", "c"]
    assert (new.rank, serve().received["a"].rank) == (2, 2)
    after = listing(tmp_path / "server")
    assert after.keys() == before.keys()
    differ = {name for name in before if before[name] != after[name]}
    assert {f"received/1-a/{name}" for name in (ADAPTER_FILES[1], MANIFEST)} <= differ
    assert all(name.startswith("received/1-a/") for name in differ)


@pytest.mark.parametrize("name", ["St.Anna-Co_3", "x" * 64])
def test_any_name_that_a_client_can_have_is_a_folder_too(name, tiny, serve, tmp_path):
    client = Client(tiny.public, tiny.a, tiny.work / "a")
    given = client.expert, client.routing, client.proxies, tiny.public
    serve().receive(write_bundle(tmp_path / "sent", name, *given, 30))
    assert list(serve().received) == [name]
    assert serve().received[name].folder == tmp_path / "server" / "received" / f"1-{name}"


def test_who_is_dropped_leaves_nothing_and_may_come_back_as_the_last(serve, tmp_path):
    server = serve("abc")
    server.drop("a")
    assert list(server.received) == list(serve().received) == ["b", "c"]
    assert not [name for name in listing(tmp_path / "server") if "-a/" in name]
    serve("a")
    assert list(serve().received) == ["b", "c", "a"]


def test_who_is_no_member_cannot_be_dropped(serve, tmp_path):
    with pytest.raises(ValueError, match="no client 'a'; there is nobody"):
        serve().drop("a")
    server = serve("ab")
    before = listing(tmp_path)
    with pytest.raises(ValueError, match="no client 'c'; there is a, b"):
        server.drop("c")
    assert listing(tmp_path) == before and list(server.received) == ["a", "b"]


# ---- what is refused


def damaged(folder):
    file = folder / ADAPTER_FILES[1]
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def incomplete(folder):
    (folder / FILES[2]).unlink()


def padded(folder):
    (folder / "notes.txt").write_text("by the way")


def without_manifest(folder):
    (folder / MANIFEST).unlink()


SPOILT = {
    damaged: (ValueError, "was changed after it was written"),
    incomplete: (ValueError, "is missing"),
    padded: (ValueError, "notes.txt does not belong"),
    without_manifest: (FileNotFoundError, "manifest.json is missing"),
}


@pytest.mark.parametrize("spoil", SPOILT, ids=lambda spoil: spoil.__name__)
@pytest.mark.parametrize("members", ["", "bc", "abc"], ids=["first", "new", "known"])
def test_bad_bundle_leaves_no_trace(members, spoil, serve, tiny, tmp_path):
    server, sent = serve(members), shutil.copytree(tiny.work / "a" / "bundle", tmp_path / "sent")
    spoil(sent)
    before, (error, said) = listing(tmp_path), SPOILT[spoil]
    with pytest.raises(error, match=said):
        server.receive(sent)
    assert listing(tmp_path) == before
    assert list(server.received) == list(serve().received) == list(members)


def test_what_was_checked_is_what_is_kept(serve, tiny, tmp_path, monkeypatch):
    "Also if the folder that was sent holds something else by then."
    server, sent = serve("bc"), shutil.copytree(tiny.work / "a" / "bundle", tmp_path / "sent")

    def fetch(place, into, limit):
        copy = fetch_folder(place, into, limit)
        shutil.rmtree(place)
        shutil.copytree(tiny.work / "b" / "bundle", place)
        return copy

    monkeypatch.setattr(module, "fetch_folder", fetch)
    assert listing(server.receive(sent).folder) == listing(tiny.work / "a" / "bundle")


def test_what_breaks_on_its_way_leaves_no_trace(serve, tiny, tmp_path, monkeypatch):
    server = serve("bc")
    before = listing(tmp_path / "server")

    def fetch(place, into, limit):
        copy = fetch_folder(place, into, limit)
        damaged(copy)
        return copy

    monkeypatch.setattr(module, "fetch_folder", fetch)
    with pytest.raises(ValueError, match="bundle/.* was changed after") as error:
        server.receive(tiny.work / "a" / "bundle")
    assert str(tiny.work / "a") in str(error.value) and ".arrived" not in str(error.value)
    assert listing(tmp_path / "server") == before and list(server.received) == ["b", "c"]


def test_routing_vectors_of_another_form_are_refused_at_the_door(serve, tiny, tmp_path):
    server = serve(router__form="logistic")
    with pytest.raises(
        ValueError, match="a sent routing vectors of the form mean, but .* 'logistic'"
    ):
        server.receive(tiny.work / "a" / "bundle")
    assert listing(tmp_path) == {}
    assert list(server.receive(tiny.logistic[0].folder).routing) == ["logistic"]


def test_the_same_bundles_make_a_model_with_either_router(tiny, tmp_path):
    "Each is kept, and neither disturbs the other."
    server = Server(tiny.public.with_config(choose_router(tiny.settings, "paper")), tmp_path)
    for bundle in tiny.both:
        server.receive(bundle.folder)
    made, paper = models_made(server)
    other = replace(server, public=tiny.public.with_config(choose_router(tiny.settings, "ratios")))
    assert (made, list(other.received)) == (1, ["a", "b", "c"])
    made, ratios = models_made(other)
    assert made == 1 and len(kept(tmp_path, "model")) == 2
    assert (paper.settings.form, paper.experts) == ("mean", ["seed", "a", "b", "c"])
    assert (ratios.settings.form, ratios.experts) == ("moments", ["a", "b", "c"])
    assert models_made(server)[0] == models_made(other)[0] == 0
    assert [part.bundle for part in paper.lineage] == [part.bundle for part in ratios.lineage]


def test_bundle_of_another_pool_is_refused_at_the_door(tiny, tmp_path):
    other = replace(tiny.pool, train=tiny.pool.train.select(range(60)))
    server = Server(replace(tiny.public, pool=other), tmp_path)
    with pytest.raises(ValueError, match="but the pool at hand is"):
        server.receive(tiny.work / "a" / "bundle")
    assert listing(tmp_path) == {}


def test_member_that_was_damaged_on_the_servers_disk_is_named(serve, tmp_path):
    serve("ab")
    damaged(tmp_path / "server" / "received" / "2-b")
    with pytest.raises(ValueError, match="2-b.*was changed after it was written"):
        serve().unify()


def test_without_members_there_is_neither_a_model_nor_a_report(serve, tmp_path):
    for ask in (Server.unify, Server.report):
        with pytest.raises(ValueError, match=r"different names.* are from \[\]"):
            ask(serve())
    assert listing(tmp_path) == {}


def test_a_server_is_given_no_private_data():
    assert [field.name for field in fields(Server)] == ["public", "folder", "invitation"]
    assert list(inspect.signature(unify).parameters) == ["bundles", "public"]
    assert list(inspect.signature(Server.receive).parameters) == ["self", "place"]


# ---- the model


def test_server_gives_what_merging_and_fine_tuning_give(finished, tiny):
    model, bundles = finished.unify(), tiny.bundles
    assert model.experts == ["seed", "a", "b", "c"] and model.ranks == [0, 4, 4, 4]
    by_hand = merge(bundles, tiny.public)
    finetune(by_hand, proxy_union(bundles, tiny.public), tiny.public)
    in_memory = unify(bundles, tiny.public)
    assert same(by_hand.backbone, in_memory.backbone) and same(by_hand.backbone, model.backbone)
    assert by_hand.losses == in_memory.losses == finished.report().losses


def test_it_repeats_bit_by_bit_elsewhere_with_nothing_left_of_the_clients_but_bundles(
    finished, tiny, tmp_path
):
    """A second run from private data to model, in another folder; the clients' work is gone
    before the server starts."""
    public = replace(tiny.public, folder=tmp_path / "public")
    for domain in tiny.clients:
        bundle = Client(public, domain, tmp_path / "work" / domain.name).bundle()
        shutil.copytree(bundle, tmp_path / "inbox" / domain.name)
    shutil.rmtree(tmp_path / "work")
    server = Server(public, tmp_path / "server")
    for name in "abc":
        server.receive(tmp_path / "inbox" / name)
    server.unify()
    assert model_bytes(tmp_path / "server") == model_bytes(finished.folder)
    assert np.array_equal(server.report().after.load, finished.report().after.load)


def test_another_random_state_gives_another_model(finished, tiny):
    other = unify(tiny.bundles, other_settings(tiny.public, random_state=1))
    assert not same(other.backbone, finished.unify().backbone)


@pytest.mark.parametrize("form", ["logistic", "moments", "activation", "evidence"])
def test_it_starts_from_density_ratios_too_and_repeats(form, tiny):
    public = other_settings(tiny.public, router__form=form)
    one, two = (unify(tiny.sent[form], public) for _ in range(2))
    assert same(one.backbone, two.backbone) and np.isfinite(one.losses).all()
    assert one.settings.form == form and one.layers[0].router.biases.all()


def test_one_client_alone_is_unified_too(serve):
    assert serve("a").unify().experts == ["seed", "a"]


def test_model_without_a_dropped_member_is_that_which_it_never_joined(serve, tmp_path):
    server = serve("abc", "left")
    server.unify()
    server.drop("b")
    server.unify()
    serve("ac", "never").unify()
    [never] = kept(tmp_path / "never", "model")
    left = tmp_path / "left" / never.name  # which is named by what it is made from
    for name in MODEL_FILES:
        assert (left / name).read_bytes() == (never / name).read_bytes()
    assert serve("", "left").report().losses == serve("", "never").report().losses


def test_in_another_order_of_bundles_it_is_the_same_model_but_for_the_columns(tiny):
    """Sums are taken in another order, and AdamW would turn a gradient that is rounding alone
    into a whole step."""
    how = dict(finetune__optimizer="sgd", finetune__learning_rate=0.01, router__top_k=2)
    public = other_settings(tiny.public, **how)
    one, other = (unify(bundles, public) for bundles in (tiny.bundles, tiny.bundles[::-1]))
    assert one.experts == ["seed", "a", "b", "c"] and other.experts == ["seed", "c", "b", "a"]
    assert one.losses == pytest.approx(other.losses, abs=1e-5)
    columns = [one.experts.index(name) for name in other.experts]
    for here, there in zip(one.layers, other.layers):
        assert close(there.router.vectors, here.router.vectors[columns])
        assert close(there.router.lam, here.router.lam)
        rows = torch.cat([torch.nonzero(here.owner == column)[:, 0] for column in columns])
        for name in tiny.seed.ffn.linears:
            assert close(there.a[name], here.a[name][rows])
            assert close(there.b[name], here.b[name][rows])
    assert close(embed(one, tiny.pool.test), embed(other, tiny.pool.test))


# ---- it is kept


def models_made(server):
    "How many models `unify` makes now, and the last of them."
    with stages_run() as ran:
        model = server.unify()
    return ran.count("model"), model


def test_model_is_made_once_also_for_a_server_that_comes_later(serve, tmp_path):
    made, first = models_made(serve("abc"))
    before = stamps(tmp_path / "server")
    again, second = models_made(serve())
    with stages_run() as ran:
        serve().report()
    assert (made, again, ran) == (1, 0, []) and same(first.backbone, second.backbone)
    assert stamps(tmp_path / "server") == before


def test_models_without_a_member_stay_when_it_leaves_and_those_with_it_go(
    serve, tiny, client, tmp_path
):
    server = serve("ab")
    counts = [models_made(server)[0]]
    server.receive(tiny.work / "c" / "bundle")
    counts.append(models_made(server)[0])
    assert len(kept(tmp_path / "server", "model")) == 2
    server.drop("c")
    assert len(kept(tmp_path / "server", "model")) == 1
    counts.append(models_made(server)[0])
    server.replace(client({"expert.epochs": 1}))
    counts.append(models_made(server)[0])
    server.replace(tiny.work / "a" / "bundle")
    counts.append(models_made(server)[0])
    assert counts == [1, 1, 0, 1, 0] and len(kept(tmp_path / "server", "model")) == 2


def test_the_same_expert_under_another_name_makes_another_model(serve, tiny, tmp_path):
    "Though its files are the same, that of the model which was there has the old name."
    client = Client(tiny.public, tiny.a, tiny.work / "a")
    parts = client.expert, client.routing, client.proxies, tiny.public
    renamed = write_bundle(tmp_path / "renamed", "anna", *parts, 30)
    server = serve("ab")
    assert models_made(server)[1].experts == ["seed", "a", "b"]
    server.drop("a")
    server.drop("b")
    server.receive(renamed)
    server.receive(tiny.work / "b" / "bundle")
    made, model = models_made(server)
    assert made == 1 and model.experts == ["seed", "anna", "b"]


@pytest.mark.parametrize(
    "change",
    [
        dict(router__top_k=2),
        dict(router__lam=0.5),
        dict(finetune__epochs=1),
        dict(finetune__learning_rate=1e-3),
        dict(routing__public_samples=30),
        dict(random_state=1),
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_model_is_made_when_a_setting_of_the_server_changes(change, serve):
    serve("ab").unify()
    other = serve(**change)
    assert models_made(other)[0] == 1 and list(other.received) == ["a", "b"]
    assert models_made(serve())[0] == models_made(serve(**change))[0] == 0


@pytest.mark.parametrize(
    "change",
    [dict(expert__rank=2), dict(proxies__selection="random"), dict(relevance__negatives=50)],
    ids=lambda change: next(iter(change)),
)
def test_settings_that_the_bundles_have_answered_already_make_no_other_model(change, serve):
    serve("ab").unify()
    assert models_made(serve(**change))[0] == 0


def test_damaged_model_is_made_again_in_place(serve, tmp_path):
    serve("ab").unify()
    before, [model] = model_bytes(tmp_path / "server"), kept(tmp_path / "server", "model")
    file = model / "moe.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert models_made(serve())[0] == 1 and model_bytes(tmp_path / "server") == before


def test_interrupted_fine_tuning_goes_on_and_ends_as_if_nothing_had_happened(
    serve, at_once, tiny, tmp_path, monkeypatch
):
    serve("abc", "whole").unify()
    write, written = Checkpoint.write, []

    def interrupted(self, *state):
        write(self, *state)
        written.append(self.file)
        if len(written) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoint, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        serve("abc", "cut").unify()
    assert kept(tmp_path / "cut", "model") == [] and written[0].is_file()
    made, _ = models_made(serve("", "cut"))
    steps = tiny.settings.finetune.epochs * -(-len(proxy_union(tiny.bundles, tiny.public)) // 16)
    assert made == 1 and len(written) == steps > 3  # no step was made twice
    assert model_bytes(tmp_path / "cut") == model_bytes(tmp_path / "whole")
    assert serve("", "cut").report().losses == serve("", "whole").report().losses
    assert not written[0].parent.exists()


def test_checkpoint_of_other_members_is_not_taken_up(serve, at_once, tmp_path, monkeypatch):
    def interrupted(self, *state):
        write(self, *state)
        raise KeyboardInterrupt

    write, server = Checkpoint.write, serve("abc", "cut")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Checkpoint, "write", interrupted)
        server.unify()
    server.drop("c")
    server.unify()
    serve("ab", "whole").unify()
    assert model_bytes(tmp_path / "cut") == model_bytes(tmp_path / "whole")


def test_model_that_diverged_is_not_kept(serve, tmp_path):
    server = serve("ab", finetune__learning_rate=1e30, finetune__optimizer="sgd")
    with pytest.raises(FloatingPointError, match="ower the learning rate"):
        server.unify()
    assert kept(tmp_path / "server", "model") == []


# ---- how it went


def test_report_has_losses_and_routing_before_and_after(finished, tiny):
    model, report = finished.unify(), finished.report()
    assert len(report.losses) == tiny.settings.finetune.epochs
    assert np.isfinite(report.losses).all()
    for routing in (report.before, report.after):
        assert routing.experts == model.experts and routing.load.shape == (2, 4)
        assert np.allclose(routing.load.sum(1), 1)
        assert ((routing.load >= 0) & (routing.load <= 1)).all()
        assert ((routing.entropy > 0) & (routing.entropy <= 1)).all()
        assert ((routing.weight > 0.25) & (routing.weight <= 1)).all()


def test_routing_in_the_report_is_that_of_the_proxies(finished, tiny):
    report, data = finished.report(), proxy_union(tiny.bundles, tiny.public)
    models = dict(before=merge(tiny.bundles, tiny.public), after=finished.unify())
    for when, model in models.items():
        wanted, found = observe_routing(model, data), getattr(report, when)
        for name in ("load", "entropy", "weight"):
            assert np.allclose(getattr(found, name), getattr(wanted, name), atol=1e-6)


def test_of_many_proxies_routing_is_watched_on_some_and_once_if_nothing_is_learned(
    serve, tiny, monkeypatch
):
    watched = []

    def watch(model, data, **how):
        watched.append(data)
        return observe_routing(model, data, **how)

    monkeypatch.setattr(module, "WATCHED", 3)
    monkeypatch.setattr(module, "observe_routing", watch)
    server = serve("abc", finetune__epochs=0)
    report = server.report()
    union = proxy_union(tiny.bundles, tiny.public)
    spread = [0, (len(union) - 1) // 2, len(union) - 1]
    assert len(union) > 3 and fingerprint(watched[0]) == fingerprint(union.select(spread))
    assert len(watched) == 1
    assert np.array_equal(report.before.load, report.after.load)


def test_report_makes_the_model_if_it_is_not_there(serve, tmp_path):
    with stages_run() as ran:
        report = serve("ab").report()
    assert ran.count("model") == 1 and len(report.losses) == 2
    assert models_made(serve())[0] == 0


def test_folder_of_the_model_says_what_it_was_made_from(finished, tiny):
    [model] = kept(finished.folder, "model")
    inputs = read_manifest(model, "model")["inputs"]
    assert [name for name, _ in inputs["bundles"]] == ["a", "b", "c"]
    assert inputs["seed"] == tiny.seed.identity and inputs["pool"] == tiny.public.fingerprint


def test_a_server_keeps_factors_on_its_disk_and_merges_the_same_model(tiny, tmp_path):
    server = Server(tiny.public, tmp_path)
    for name in "abc":
        server.receive(tiny.work / name / "bundle")
    fresh = Server(tiny.public, tmp_path).received
    for bundles in (server.received, fresh):
        for bundle, sent in zip(bundles.values(), tiny.bundles):
            assert isinstance(bundle.factors, StoredFactors) and bundle.rank == sent.rank
            assert list(bundle.factors) == list(sent.factors)
            assert contents_digest(bundle) == contents_digest(sent)
        model = merge(list(bundles.values()), tiny.public)
        assert same(model.backbone, merge(tiny.bundles, tiny.public).backbone)
    with pytest.raises(KeyError):
        bundle.factors["no layer", "c_fc"]
    assert ("no layer", "c_fc") not in bundle.factors


# ---- experts that are never in memory all at once


@pytest.mark.parametrize("settings", [{}, {"router.top_k": 2}, {"router.seed_expert": False}])
def test_a_model_straight_from_the_bundles_is_that_from_memory(settings, tiny, tmp_path):
    public = other_settings(tiny.public, **{"finetune.epochs": 0} | settings)
    files = []
    for working_set in (None, 1):
        server = Server(public, tmp_path / str(working_set))
        for name in "abc":
            server.receive(tiny.work / name / "bundle")
        model = server.unify(working_set)
        files.append(model_bytes(server.folder))
        assert server.report().losses == []
    assert files[0] == files[1]
    assert all(
        len(rows.kept) <= 1 for layer in model.layers for rows in stored_rows(layer).values()
    )


def test_what_learns_is_in_memory_until_it_is_saved(tiny, finished, tmp_path):
    server = Server(tiny.public, tmp_path)
    for name in "abc":
        server.receive(tiny.work / name / "bundle")
    stored = server.unify(working_set=2)
    assert stored_rows(stored.layers[0])
    assert model_bytes(server.folder) == model_bytes(finished.folder)
