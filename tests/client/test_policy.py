"Nothing is packed unless the organisation's own policy, and the invitation, let it."

from dataclasses import replace
from datetime import datetime, timezone

import pytest

from harmomoe.bundle.files import read_bundle
from harmomoe.bundle.invitation import invite
from harmomoe.bundle.manifest import Limits
from harmomoe.bundle.signatures import new_keys
from harmomoe.client.client import Client
from harmomoe.client.policy import PARTS, Guarantee, Policy, pack, read_policy

POLICY = Policy(list(PARTS), "none", 10)


@pytest.fixture
def invitation(tiny):
    return invite("colours", tiny.public, "tiny", "pool", limits=Limits(rank=4, proxies=12))


@pytest.fixture
def fresh(tiny, tmp_path):
    "A client that has done nothing yet."
    return Client(tiny.public, tiny.a, tmp_path / "work")


def test_what_is_packed_names_the_invitation_and_is_what_the_client_makes(
    tiny, invitation, tmp_path
):
    client = Client(tiny.public, tiny.a, tiny.work / "a")
    bundle = read_bundle(pack(client, POLICY, invitation, tmp_path / "sent"), tiny.public)
    assert bundle.manifest.inputs.invitation == invitation.digest
    assert bundle.digest == tiny.bundles[0].digest


@pytest.mark.parametrize(
    "policy, words",
    [
        (replace(POLICY, leave=["adapter", "proxies"]), "does not let routing leave"),
        (replace(POLICY, leave=[]), "adapter, routing, proxies"),
        (replace(POLICY, guarantee=Guarantee(1.0, 1e-5)), "guarantee"),
        (replace(POLICY, private_samples=31), "30 private samples"),
    ],
)
def test_policy_forbids_before_any_work(policy, words, fresh, invitation, tmp_path):
    with pytest.raises(ValueError, match=words):
        pack(fresh, policy, invitation)
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(limits=Limits(rank=3)), "rank: 4"),
        (dict(limits=Limits(proxies=11)), "proxies: 12"),
        (dict(limits=Limits(private_samples=31)), "private samples: 30"),
        (dict(deadline=datetime(2020, 1, 1, tzinfo=timezone.utc)), "ended at"),
    ],
)
def test_what_the_server_would_refuse_is_not_begun(changes, words, fresh, invitation, tmp_path):
    with pytest.raises(ValueError, match=words):
        pack(fresh, POLICY, replace(invitation, **changes))
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("owner, words", [("b", "no key for 'a'"), ("a", "signed")])
def test_where_keys_are_listed_a_key_is_needed(owner, words, fresh, invitation, tmp_path):
    pytest.importorskip("model_signing")
    _, public = new_keys(tmp_path / "keys")
    signed = replace(invitation, keys={owner: public.read_text()})
    with pytest.raises(ValueError, match=words):
        pack(fresh, POLICY, signed)
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "policy.yaml"),
        ("leave: [adapter]\nguarantee: none\n", "private_samples"),
        ("leave: [adapter, samples]\nguarantee: none\nprivate_samples: 1\n", "leave"),
        ("leave: all\nguarantee: none\nprivate_samples: 1\n", "leave"),
        ("leave: []\nguarantee: maybe\nprivate_samples: 1\n", "guarantee"),
        ("leave: []\nguarantee: {epsilon: 0, delta: 0.1}\nprivate_samples: 1\n", "epsilon"),
        ("leave: []\nguarantee: {epsilon: 1, delta: 1}\nprivate_samples: 1\n", "delta"),
        ("leave: []\nguarantee: none\nprivate_samples: 0\n", "private_samples"),
        ("leave: []\nguarantee: none\nprivate_samples: 1\nsend: yes\n", "send"),
    ],
)
def test_policy_is_read_through_a_schema(text, words, tmp_path):
    file = tmp_path / "policy.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=words):
        read_policy(file)


def test_without_a_policy_there_is_one_clear_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="policy.yaml"):
        read_policy(tmp_path / "policy.yaml")
