"What everybody starts from: read by strangers, and opened only if it is what is meant."

from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
import yaml

from harmomoe.bundle.files import read_bundle, write_bundle
from harmomoe.bundle.invitation import Invitation, invite, read_invitation
from harmomoe.bundle.manifest import Limits
from harmomoe.bundle.signatures import new_keys, sign_bundle
from harmomoe.client.client import Client
from harmomoe.config.settings import changed
from harmomoe.data.domains import load_domain

UNTIL = datetime(2027, 1, 31, 18, tzinfo=timezone.utc)


@pytest.fixture(scope="module")
def invitation(tiny, tiny_seed_folder, tiny_folder):
    limits = Limits(rank=8, bytes=10_000_000, proxies=20, private_samples=10)
    places = str(tiny_seed_folder), str(tiny_folder / "pool")
    return invite("colours", tiny.public, *places, limits=limits, deadline=UNTIL)


@pytest.fixture
def file(invitation, tmp_path):
    return invitation.write(tmp_path / "invitation.yaml")


def altered(file, change):
    "The file with its values changed by a function."
    value = yaml.safe_load(file.read_text())
    change(value)
    file.write_text(yaml.safe_dump(value))
    return file


def test_what_is_written_is_what_is_read(invitation, file):
    read = read_invitation(file)
    assert read == invitation and read.digest == invitation.digest
    assert list(yaml.safe_load(file.read_text()))[:3] == ["name", "seed", "pool"]


def test_a_deadline_in_another_time_zone_is_the_same_invitation(invitation):
    east = UNTIL.astimezone(timezone(timedelta(hours=9)))
    assert replace(invitation, deadline=east).digest == invitation.digest


def test_every_field_is_in_the_digest(invitation, tiny):
    others = [
        replace(invitation, name="shapes"),
        replace(invitation, settings=changed(tiny.settings, {"expert.epochs": 3})),
        replace(invitation, limits=Limits(rank=9)),
        replace(invitation, limits=Limits(rank=9, attention=False)),
        replace(invitation, deadline=None),
        replace(invitation, pool=replace(invitation.pool, samples=91)),
    ]
    assert len({one.digest for one in (invitation, *others)}) == 7


def test_a_limit_on_attention_is_said_if_there_is_one(invitation, tmp_path):
    "So digests of invitations that do not know this limit stay what they are."
    assert "attention" not in invitation.as_json()["limits"]
    strict = replace(invitation, limits=Limits(attention=False))
    assert read_invitation(strict.write(tmp_path / "strict.yaml")) == strict


def test_nothing_is_overwritten(invitation, file):
    before = file.read_text()
    with pytest.raises(FileExistsError):
        invitation.write(file)
    assert file.read_text() == before


def test_opened_it_is_what_the_server_has(file, tiny, tmp_path):
    public = read_invitation(file).open(tmp_path / "own", progress=False)
    assert public.fingerprint == tiny.public.fingerprint
    assert public.seed.identity == tiny.seed.identity and public.config == tiny.settings


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda v: v["settings"]["router"].update(topk=2), "topk"),
        (lambda v: v["settings"]["proxies"].update(number=-1), "proxies.number|number"),
        (lambda v: v.update(deadline="2027-01-31"), "deadline"),
        (lambda v: v.update(deadline=datetime(2027, 1, 1)), "time zone"),
        (lambda v: v.update(keys={"../hospital": "x"}), "hospital"),
        (lambda v: v.update(keys=dict(a="x")), "key of a"),
        (lambda v: v.update(name="a b"), "a b"),
        (lambda v: v.update(format=2), "format"),
        (lambda v: v["limits"].update(rank="many"), "rank"),
        (lambda v: v["seed"].pop("identity"), "identity"),
        (lambda v: v.update(extra=1), "extra"),
        (lambda v: v.update(pool=[1]), "pool"),
    ],
)
def test_what_is_wrong_in_the_file_is_said_with_its_place(change, words, file):
    with pytest.raises(ValueError, match=words) as error:
        read_invitation(altered(file, change))
    assert "invitation.yaml" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text",
    ["", "- a", "a: [", "name: 'x", "a: &x [1]\nb: *x", "a: 1\na: 2", "x: " + "[" * 5000, "\xff"],
)
def test_what_is_no_invitation_is_one_error(text, tmp_path):
    file = tmp_path / "invitation.yaml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match="invitation.yaml"):
        read_invitation(file)


def test_python_in_the_file_is_not_run(file, tmp_path):
    file.write_text(f"name: !!python/object/apply:os.mkdir ['{tmp_path}/made']")
    with pytest.raises(ValueError, match="invitation.yaml"):
        read_invitation(file)
    assert not (tmp_path / "made").exists()


def test_another_seed_or_pool_is_found_out_before_any_work(file, invitation, tiny_folder, tmp_path):
    other = dict(invitation.seed.identity)
    key = sorted(other)[-1]
    other[key] = "something else"
    with pytest.raises(ValueError, match=f"{key} 'something else'"):
        replace(invitation, seed=replace(invitation.seed, identity=other)).open(tmp_path / "own")
    with pytest.raises(ValueError, match="30 samples|90"):
        invitation.open(tmp_path / "own", pool=str(tiny_folder / "a"))
    wrong = replace(invitation, pool=replace(invitation.pool, fingerprint="0" * 64))
    with pytest.raises(ValueError, match="pool"):
        wrong.open(tmp_path / "own")
    assert not (tmp_path / "own").exists()


def answer(tiny, invitation, folder, name="a"):
    "A client's bundle that answers the invitation."
    client = Client(tiny.public, tiny.a, tiny.work / "a")
    given = name, client.expert, client.routing, client.proxies, tiny.public, 30
    return write_bundle(folder, *given, invitation=invitation.digest)


def test_a_bundle_for_another_invitation_is_not_admitted(tiny, invitation, tmp_path):
    invitation = replace(invitation, deadline=None)
    bundle = read_bundle(answer(tiny, invitation, tmp_path / "sent"), tiny.public)
    invitation.admit(bundle)
    with pytest.raises(ValueError, match="another invitation"):
        replace(invitation, name="shapes").admit(bundle)
    with pytest.raises(ValueError, match="no invitation"):
        invitation.admit(tiny.bundles[0])


def test_only_the_forms_that_were_asked_for_are_admitted_and_all_of_them(
    tiny, invitation, tmp_path
):
    def asked(forms):
        config = changed(tiny.public.config, {"routing.forms": forms})
        return replace(invitation, deadline=None, settings=config)

    one, both = asked(""), asked("moments")
    assert (one.forms, both.forms) == (("mean",), ("mean", "moments"))
    client = Client(tiny.public, tiny.a, tiny.work / "a")
    routing = tiny.both[0].routing
    for invited, sent, said in (
        (one, routing, "form mean, moments, but this invitation, .*, asks for mean: send"),
        (both, dict(mean=routing["mean"]), "form mean, but this .* asks for mean, moments: send"),
        (both, dict(moments=routing["moments"]), "form moments, but this .* asks for mean, mom"),
    ):
        given = "a", client.expert, sent, client.proxies, tiny.public, 30
        bundle = read_bundle(write_bundle(tmp_path / "sent", *given, invited.digest), tiny.public)
        with pytest.raises(ValueError, match=said) as error:
            invited.admit(bundle)
        assert str(bundle.folder) in str(error.value)
    given = "a", client.expert, routing, client.proxies, tiny.public, 30
    both.admit(read_bundle(write_bundle(tmp_path / "sent", *given, both.digest), tiny.public))


def test_nothing_is_admitted_after_the_deadline(tiny, invitation, tmp_path):
    past = replace(invitation, deadline=datetime(2020, 1, 1, tzinfo=timezone.utc))
    with pytest.raises(ValueError, match="ended at 2020-01-01"):
        past.admit(read_bundle(answer(tiny, past, tmp_path / "sent"), tiny.public))
    past.check_open(datetime(2019, 12, 31, tzinfo=timezone.utc))


def test_where_keys_are_listed_only_their_owners_are_admitted(tiny, invitation, tmp_path):
    pytest.importorskip("model_signing")
    keys = {}
    for name in "ab":
        new_keys(tmp_path / name)
        keys[name] = (tmp_path / name / "public.pem").read_text()
    signed = replace(invitation, deadline=None, keys=keys)
    sent = answer(tiny, signed, tmp_path / "sent")
    with pytest.raises(ValueError, match="not signed|signature"):
        signed.admit(read_bundle(sent, tiny.public))
    sign_bundle(sent, tmp_path / "b" / "private.pem")  # somebody else's
    with pytest.raises(ValueError, match="a"):
        signed.admit(read_bundle(sent, tiny.public))
    again = answer(tiny, signed, tmp_path / "again")
    sign_bundle(again, tmp_path / "a" / "private.pem")
    signed.admit(read_bundle(again, tiny.public))
    stranger = answer(tiny, signed, tmp_path / "stranger", "c")
    sign_bundle(stranger, tmp_path / "a" / "private.pem")
    with pytest.raises(ValueError, match="'c'"):
        signed.admit(read_bundle(stranger, tiny.public))


def test_an_invitation_of_one_line_says_what_is_missing():
    with pytest.raises(TypeError):
        Invitation("colours")


def test_gates_are_refused_for_texts_before_anybody_is_invited(tiny, tiny_texts):
    gated = tiny.public.with_config(changed(tiny.settings, {"gate.epochs": 1}))
    assert invite("colours", gated, "seed", "pool").settings.gate.epochs == 1
    with pytest.raises(ValueError, match="gate.epochs is 1, but experts of language models"):
        invite(
            "sayings",
            replace(gated, pool=load_domain(tiny_texts / "sayings", whole_train=True)),
            "seed",
            "pool",
        )
