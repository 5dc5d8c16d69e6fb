"""The three notebooks of organisations that trust nobody, each in a folder of its own: invite,
client, server. What a process of its own adds is in the guide."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from helpers import stamps

from harmomoe.bundle.files import FILES
from harmomoe.bundle.invitation import read_invitation
from harmomoe.models.evaluate import measure
from harmomoe.models.model import load_model
from harmomoe.server.merge import ROUTERS

NOTEBOOKS = Path(__file__).resolve().parent.parent / "nbs"
FEW = (
    "proxies.candidates=40, proxies.number=12, routing.public_samples=40, expert.rank=4, "
    "expert.epochs=2, expert.batch_size=16, finetune.epochs=1, finetune.batch_size=16"
)
SETTINGS = f"{FEW}, gate.epochs=1, gate.batch_size=16, routing.forms=mean"
POLICY = "leave: [adapter, routing, proxies]\nguarantee: none\nprivate_samples: 10\n"

pytestmark = [
    pytest.mark.usefixtures("elsewhere"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@pytest.fixture(scope="module")
def play(run_cells):
    "A function (notebook, parameters) that runs one of the three."
    return lambda part, /, **given: run_cells(NOTEBOOKS / f"{part}.ipynb", given)


@pytest.fixture(scope="module")
def world(play, tiny_folder, tiny_seed_folder, tmp_path_factory):
    "Folders of a server and of three organisations whose bundles are in its inbox."
    home = tmp_path_factory.mktemp("world")
    play(
        "invite",
        name="colours",
        out=str(home / "invitation.yaml"),
        backbone=str(tiny_seed_folder),
        pool=str(tiny_folder / "pool"),
        preset="embedded",
        settings=SETTINGS,
        private_samples=10,
        rank=4,
    )
    (home / "policy.yaml").write_text(POLICY)
    for name in "abc":
        play("client", **of(home, tiny_folder, name), send=str(home / "inbox"))
    return home


def of(home, data, name):
    "What client `name` gives its notebook."
    files = dict(invitation=str(home / "invitation.yaml"), policy=str(home / "policy.yaml"))
    return files | dict(data=str(data / name), name=name, out=str(home / name), threads=1)


def server_of(home, folder, **given):
    where = dict(invitation=str(home / "invitation.yaml"), bundles=str(home / "inbox"))
    return where | dict(out=str(folder), threads=1) | given


def test_from_an_invitation_to_one_model(world, play, tiny, tmp_path):
    space = play("server", **server_of(world, tmp_path / "out"))
    assert [arrival.client for arrival in space["arrivals"]] == ["a", "b", "c"]
    model = load_model(tmp_path / "out" / "model")
    assert model.experts == ["seed", "a", "b", "c"] and model.settings == ROUTERS["evidence"]
    assert [part.client for part in model.lineage] == ["a", "b", "c"]
    assert measure(model, tiny.a.test, tiny.a.classes).n == 12
    assert list(space["members"].index) == ["a", "b", "c"]
    own = 100 * space["shares"]["seed"]  # which is no member
    assert space["members"]["routing share, %"].sum() == pytest.approx(100 - own)


def test_the_server_delivers_either_router_from_the_same_bundles(world, play, tmp_path):
    "The invitation asked for two forms; which is used is a parameter of the server."
    asked = read_invitation(world / "invitation.yaml")
    assert asked.forms == ("mean", "evidence") and asked.settings.router.form == "evidence"
    before = stamps(world)
    given = dict(router="paper", settings="router.lam=0.5, finetune.epochs=0", screen=False)
    play("server", **server_of(world, tmp_path / "out", **given))
    model = load_model(tmp_path / "out" / "model")
    assert model.settings == replace(ROUTERS["paper"], lam=0.5) and model.losses == []
    assert model.experts == ["seed", "a", "b", "c"] and stamps(world) == before


@pytest.mark.parametrize(
    "wrong, said",
    [
        (
            dict(router="best"),
            "router is 'best', but must be one of preset, paper, ratios, evidence",
        ),
        (dict(router="ratios"), "form is 'moments', but clients were asked for mean, evidence"),
        (dict(settings="router.form=logistic"), "asked for mean, evidence: choose one of these"),
        (dict(settings="expert.rank=2"), "expert went into the bundles and cannot be changed"),
        (dict(settings="router.topk=2"), "unknown field 'router.topk'"),
    ],
)
def test_a_servers_slip_is_said_before_anything_is_opened(wrong, said, world, play, tmp_path):
    with pytest.raises(ValueError, match=said):
        play("server", **server_of(world, tmp_path / "out", **wrong))
    assert not (tmp_path / "out").exists()


def test_what_a_client_may_send_is_in_one_folder_and_holds_no_sample(world, tiny_folder):
    sent = world / "inbox" / "a"
    found = {path.relative_to(sent).as_posix() for path in sent.rglob("*") if path.is_file()}
    assert found == {*FILES, "manifest.json"}
    assert {path.name for path in (world / "a").iterdir()} == {"public", "private", "bundle"}


def test_nothing_is_sent_unless_asked(world, play, tiny_folder, tmp_path):
    inside = shutil.copytree(world / "a", tmp_path / "a")
    before = stamps(inside / "private")
    play("client", **of(world, tiny_folder, "a") | dict(out=str(inside)))
    assert stamps(inside / "private") == before  # and nothing is computed again
    assert {path.name for path in tmp_path.iterdir()} == {"a"}


def test_a_client_audits_itself_before_it_sends(world, play, tiny_folder, tmp_path):
    given = of(world, tiny_folder, "a") | dict(out=str(tmp_path / "a"), audit=14)
    own, report = (play("client", **given)[key] for key in ("own", "report"))
    left_out = (~own.inside).sum()
    assert 0 < left_out < 14
    assert report.bundle.manifest.facts.private_samples == len(own.domain.train)
    table = own.table(report.bundle, report.public)
    assert [*table.index[:2]] == ["adapter", "routing, mean"]
    assert (table["ε, at least"] <= table["could be shown"]).all()


def test_too_large_an_audit_is_said_before_anything_is_trained(world, play, tiny_folder, tmp_path):
    given = of(world, tiny_folder, "a") | dict(out=str(tmp_path / "a"), audit=1000)
    with pytest.raises(ValueError, match="audit is 1000, but with .* it must be 10 to"):
        play("client", **given)
    assert not (tmp_path / "a" / "private").exists()


def test_somebody_leaves_and_the_model_is_one_that_it_never_joined(world, play, tmp_path):
    inbox = shutil.copytree(world / "inbox", tmp_path / "inbox")
    given = server_of(world, tmp_path / "left", bundles=str(inbox))
    play("server", **given)
    shutil.rmtree(inbox / "b")
    play("server", **given, drop="b")
    play("server", **server_of(world, tmp_path / "never", bundles=str(inbox)))
    one, other = (load_model(tmp_path / name / "model") for name in ("left", "never"))
    assert one.experts == other.experts == ["seed", "a", "c"]
    for ours, theirs in zip(one.backbone.parameters(), other.backbone.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_broken_bundle_is_refused_by_name_and_the_rest_is_unified(world, play, tmp_path):
    inbox = shutil.copytree(world / "inbox", tmp_path / "inbox")
    (inbox / "b" / "proxies.parquet").write_bytes(b"PAR1")
    space = play("server", **server_of(world, tmp_path / "out", bundles=str(inbox)))
    assert "proxies.parquet" in space["received"].loc["b", "refused because"]
    assert load_model(tmp_path / "out" / "model").experts == ["seed", "a", "c"]


@pytest.mark.parametrize(
    "wrong, said",
    [
        (dict(policy=""), "parameter 'policy' is missing"),
        (dict(policy="nowhere.yaml"), "nowhere.yaml"),
        (dict(invitation="nowhere.yaml"), "nowhere.yaml"),
        (dict(name="../x"), "../x"),
        (dict(name="seed"), "seed"),
        (dict(data="nowhere"), "nowhere"),
        (dict(threads="two"), "threads"),
        (dict(key="nowhere.pem", name="d"), "nowhere.pem"),
        (dict(device="cuba"), "device|cuba"),
        (dict(recipient="x"), "unknown parameter 'recipient'"),
    ],
)
def test_a_clients_slip_is_said_before_anything_is_trained(
    wrong, said, world, play, tiny_folder, tmp_path
):
    given = of(world, tiny_folder, "a") | dict(out=str(tmp_path / "out")) | wrong
    with pytest.raises((ValueError, FileNotFoundError, RuntimeError), match=said):
        play("client", **given)
    assert not list(tmp_path.glob("out/private*"))


def test_a_policy_that_forbids_is_obeyed(world, play, tiny_folder, tmp_path):
    (tmp_path / "policy.yaml").write_text(POLICY.replace("10", "31"))
    given = dict(out=str(tmp_path / "out"), policy=str(tmp_path / "policy.yaml"))
    with pytest.raises(ValueError, match="30 private samples, but its policy wants 31"):
        play("client", **of(world, tiny_folder, "a") | given)
    assert not list(tmp_path.glob("out/private*"))


def test_an_invitation_can_be_read_by_people(world):
    told = yaml.safe_load((world / "invitation.yaml").read_text())
    assert told["name"] == "colours" and told["settings"]["expert"]["rank"] == 4
    assert told["limits"]["rank"] == 4 and told["pool"]["samples"] == 90
    assert read_invitation(world / "invitation.yaml").digest


def test_an_invitation_asks_every_client_for_a_guarantee(
    play, tiny_seed_folder, tiny_folder, tmp_path
):
    play(
        "invite",
        name="guarded",
        out=str(tmp_path / "invitation.yaml"),
        backbone=str(tiny_seed_folder),
        pool=str(tiny_folder / "pool"),
        preset="embedded",
        settings=FEW,
        epsilon=8.0,
        private_samples=10,
        rank=4,
    )
    asked = read_invitation(tmp_path / "invitation.yaml").settings
    assert (asked.privacy.epsilon, asked.gate.epochs, asked.router.form) == (8.0, 0, "moments")
    (tmp_path / "policy.yaml").write_text(POLICY.replace("none", "{epsilon: 8, delta: 0.05}"))
    play("client", **of(tmp_path, tiny_folder, "a"))
    [manifest] = (tmp_path / "a").glob("bundle*/manifest.json")
    promised = json.loads(manifest.read_text())["facts"]["guarantee"]
    assert 0 < promised["epsilon"] <= 8 and promised["unit"] == "sample"
    table = pq.read_table(tiny_folder / "a_train.parquet")
    owners = pa.array([f"p{row // 2}" for row in range(len(table))])
    pq.write_table(table.append_column("owner", owners), tmp_path / "owned.parquet")
    groups = "guarantee: {epsilon: 8, delta: 0.1, unit: group}"
    (tmp_path / "policy.yaml").write_text(POLICY.replace("guarantee: none", groups))
    given = of(tmp_path, tmp_path, "owned")
    with pytest.raises(ValueError, match="not for each group: name the column"):
        play("client", **given)
    play("client", **given, group="owner")
    [manifest] = (tmp_path / "owned").glob("bundle*/manifest.json")
    assert json.loads(manifest.read_text())["facts"]["guarantee"]["unit"] == "group"


@pytest.mark.parametrize(
    "wrong, said",
    [
        (dict(name=""), "name"),
        (dict(name="a b"), "a b"),
        (dict(deadline="soon"), "soon|isoformat"),
        (dict(deadline="2027-01-31"), "time zone"),
        (dict(settings="router.topk=2"), "topk"),
        (dict(rank=0), "rank"),
        (dict(epsilon=-1.0), "epsilon"),
        (dict(preset="best"), "preset"),
    ],
)
def test_a_wrong_invitation_is_not_written(
    wrong, said, play, tiny_seed_folder, tiny_folder, tmp_path
):
    given = dict(name="colours", out=str(tmp_path / "i.yaml"), backbone=str(tiny_seed_folder))
    given |= dict(pool=str(tiny_folder / "pool"), settings=SETTINGS)
    with pytest.raises(ValueError, match=said):
        play("invite", **given | wrong)
    assert not (tmp_path / "i.yaml").exists()
