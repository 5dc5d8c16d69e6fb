"""A signed bundle is taken from its sender as it was signed, and refused otherwise."""

import base64
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import tree

from harmomoe.base.artefacts import MANIFEST, write_manifest
from harmomoe.bundle import signatures
from harmomoe.bundle.signatures import (
    PRIVATE,
    PUBLIC,
    SIGNATURE,
    fingerprint,
    new_keys,
    read_public_key,
    sign_bundle,
    verify_bundle,
)

pytest.importorskip("model_signing", reason='needs pip install "harmomoe[signing]"')
pytest.importorskip("OpenSSL", reason='needs pip install "harmomoe[signing]"')

from cryptography.hazmat.primitives import hashes, serialization  # noqa: E402
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa  # noqa: E402

PEM, PKCS8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
SPKI, OPEN = serialization.PublicFormat.SubjectPublicKeyInfo, serialization.NoEncryption()
NAMES = "hospital", "agency"


def public_text(key):
    "The PEM text of a public key."
    return key.public_key().public_bytes(PEM, SPKI).decode()


@pytest.fixture(scope="module")
def homes(tmp_path_factory):
    "Folders with keys: two organisations and a stranger."
    folder = tmp_path_factory.mktemp("homes")
    for name in (*NAMES, "stranger"):
        new_keys(folder / name)
    return folder


@pytest.fixture
def keys(homes):
    "What an invitation lists."
    return {name: (homes / name / PUBLIC).read_text() for name in NAMES}


def write(folder, client):
    "Something like a bundle."
    (folder / "adapter").mkdir(parents=True)
    (folder / "adapter" / "weights").write_bytes(random.Random(client).randbytes(3000))
    (folder / "routing").write_bytes(b"vectors of " + client.encode())
    write_manifest(folder, "bundle", {}, client=client)
    return folder


@pytest.fixture
def bundle(tmp_path, homes):
    "The hospital's, signed."
    folder = write(tmp_path / "sent" / "hospital", "hospital")
    assert sign_bundle(folder, homes / "hospital" / PRIVATE) == folder / SIGNATURE
    return folder


# ---- keys


def test_private_key_is_its_owners_alone_and_never_replaced(tmp_path):
    private, public = new_keys(tmp_path / "deep" / "keys")
    assert (private.name, public.name) == (PRIVATE, PUBLIC)
    assert private.stat().st_mode & 0o777 == 0o600
    before = tree(tmp_path)
    with pytest.raises(FileExistsError, match=f"{PRIVATE} is there already"):
        new_keys(tmp_path / "deep" / "keys")
    private.unlink()
    with pytest.raises(FileExistsError, match=f"{PUBLIC} is there already"):
        new_keys(tmp_path / "deep" / "keys")
    assert tree(tmp_path) == {"deep/keys/" + PUBLIC: before["deep/keys/" + PUBLIC]}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / PRIVATE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        new_keys(tmp_path / "other")
    assert not (tmp_path / "elsewhere").exists()


def test_private_key_is_written_for_its_owner_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        private, _ = new_keys(tmp_path)
    finally:
        os.umask(before)
    assert private.stat().st_mode & 0o777 == 0o600


def test_keys_differ_and_have_one_form(tmp_path):
    (_, one), (_, two) = (new_keys(tmp_path / name) for name in "ab")
    assert fingerprint(one) != fingerprint(two)
    text = one.read_text()
    for spelling in (one, text, f"# the hospital's\n{text}\n\n", text.replace("\n", "\r\n")):
        assert read_public_key(spelling, "a") == text
        assert fingerprint(spelling) == fingerprint(one)


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()])
def test_three_curves_serve(curve, bundle, tmp_path):
    key = ec.generate_private_key(curve)
    (tmp_path / "key").write_bytes(key.private_bytes(PEM, PKCS8, OPEN))
    sign_bundle(bundle, tmp_path / "key")
    assert verify_bundle(bundle, {"hospital": public_text(key)}) == "hospital"


def other_keys():
    "Public keys that are refused."
    good = public_text(ec.generate_private_key(ec.SECP256R1()))
    return {
        "empty": "",
        "words": "the key is under the mat",
        "path": "/etc/passwd",
        "another curve": public_text(ec.generate_private_key(ec.SECP256K1())),
        "RSA": public_text(rsa.generate_private_key(65537, 2048)),
        "Ed25519": public_text(ed25519.Ed25519PrivateKey.generate()),
        "cut": good[:-60],
        "changed": good.replace("MFkw", "MFkx"),
        "another kind": good.replace("PUBLIC KEY", "CERTIFICATE"),
        "long": good + "x" * 20_000,
        "not ASCII": good.replace("M", "\ud800ü"),
        "no point": good[:60] + "A" * 40 + good[100:],
    }


@pytest.mark.parametrize("name", other_keys())
def test_what_is_no_public_key_is_refused_by_name(name, bundle, tmp_path):
    text = other_keys()[name]
    (tmp_path / "key").write_text(text, errors="replace")
    for key in (text, tmp_path / "key"):
        for attempt in (
            lambda: read_public_key(key, "agency"),
            lambda: verify_bundle(bundle, {"agency": key}),
        ):
            with pytest.raises(ValueError, match="^the key of agency is no public key on the cur"):
                attempt()


def test_private_key_in_an_invitation_is_told(homes, bundle):
    text = (homes / "agency" / PRIVATE).read_text()
    with pytest.raises(ValueError, match="key of agency is a private one") as error:
        verify_bundle(bundle, {"agency": text})
    assert text.splitlines()[1] not in str(error.value)


def test_pipe_in_the_place_of_a_key_is_not_waited_for(bundle, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="no ordinary file"):
        read_public_key(tmp_path / "pipe", "agency")
    with pytest.raises(ValueError, match="is no private key"):
        sign_bundle(bundle, tmp_path / "pipe")


# ---- signing


@pytest.mark.parametrize("kind", ["public", "password", "curve", "RSA", "words"])
def test_other_private_keys_are_refused_and_leave_the_bundle_as_it_was(kind, bundle, tmp_path):
    key = ec.generate_private_key(ec.SECP256R1())
    password = serialization.BestAvailableEncryption(b"word")
    content = dict(
        public=lambda: public_text(key).encode(),
        password=lambda: key.private_bytes(PEM, PKCS8, password),
        curve=lambda: ec.generate_private_key(ec.SECP256K1()).private_bytes(PEM, PKCS8, OPEN),
        RSA=lambda: rsa.generate_private_key(65537, 2048).private_bytes(PEM, PKCS8, OPEN),
        words=lambda: b"x" * 100_000,
    )
    (tmp_path / "key").write_bytes(content[kind]())
    before = tree(bundle)
    with pytest.raises(ValueError, match="key is no private key on the curve .* without a pass"):
        sign_bundle(bundle, tmp_path / "key")
    assert tree(bundle) == before


def test_what_is_absent_is_named(bundle, homes, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        sign_bundle(bundle, tmp_path / "nowhere")
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match=f"holds no bundle to sign: {MANIFEST}"):
            sign_bundle(folder, homes / "hospital" / PRIVATE)
        with pytest.raises(FileNotFoundError, match=f"holds no bundle: {MANIFEST}"):
            verify_bundle(folder, {})


def test_signing_adds_one_file_and_may_be_repeated(tmp_path, homes, keys):
    folder = write(tmp_path / "a", "hospital")
    before = tree(folder)
    for owner in ("stranger", "agency", "hospital"):
        sign_bundle(folder, homes / owner / PRIVATE)
        assert tree(folder).keys() - before.keys() == {SIGNATURE}
        assert before.items() <= tree(folder).items()
    assert verify_bundle(folder, keys) == "hospital"


def test_interrupted_signing_leaves_the_old_signature(bundle, homes, keys, monkeypatch):
    before = tree(bundle)
    (bundle / f".{SIGNATURE}.partial").write_text("left by a killed run")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        sign_bundle(bundle, homes / "hospital" / PRIVATE)
    assert tree(bundle) == before
    assert verify_bundle(bundle, keys) == "hospital"


def test_link_in_a_bundle_is_not_signed(tmp_path, homes):
    folder = write(tmp_path / "a", "hospital")
    (folder / "link").symlink_to(homes / "hospital" / PRIVATE)
    with pytest.raises(ValueError, match="symlink"):
        sign_bundle(folder, homes / "hospital" / PRIVATE)
    assert SIGNATURE not in tree(folder)


# ---- verifying


def test_sender_is_found_wherever_the_bundle_lies(bundle, homes, keys, tmp_path):
    moved = shutil.copytree(bundle, tmp_path / "received" / "0")
    assert verify_bundle(moved, keys) == verify_bundle(str(bundle), keys) == "hospital"
    paths = {name: homes / name / PUBLIC for name in NAMES}
    assert verify_bundle(moved, paths) == "hospital"


def test_one_key_may_stand_for_two_clients(bundle, keys):
    assert verify_bundle(bundle, {"clinic": keys["hospital"]} | keys) == "hospital"
    with pytest.raises(ValueError, match="comes from hospital, but was signed by clinic"):
        verify_bundle(bundle, {"clinic": keys["hospital"]})


def test_every_changed_bit_of_every_file_is_found(bundle, keys):
    rng = random.Random(0)
    for name in ("adapter/weights", "routing", MANIFEST):
        data = (bundle / name).read_bytes()
        for place in rng.sample(range(len(data)), 12):
            changed = bytearray(data)
            changed[place] ^= 1 << rng.randrange(8)
            (bundle / name).write_bytes(changed)
            with pytest.raises(ValueError, match=f"{name} was changed"):
                verify_bundle(bundle, keys)
        (bundle / name).write_bytes(data)
    assert verify_bundle(bundle, keys) == "hospital"


@pytest.mark.parametrize("part", ["payload", "sig"])
def test_every_changed_bit_of_the_signature_is_found(part, bundle, keys):
    rng, outer = random.Random(0), told(bundle)[0]
    envelope = outer["dsseEnvelope"]
    held = envelope if part == "payload" else envelope["signatures"][0]
    data = base64.b64decode(held[part])
    for place in rng.sample(range(len(data)), 24):
        changed = bytearray(data)
        changed[place] ^= 1 << rng.randrange(8)
        held[part] = base64.b64encode(changed).decode()
        (bundle / SIGNATURE).write_text(json.dumps(outer))
        with pytest.raises(ValueError):
            verify_bundle(bundle, keys)
    held[part] = base64.b64encode(data).decode()
    (bundle / SIGNATURE).write_text(json.dumps(outer))
    assert verify_bundle(bundle, keys) == "hospital"


def add(name):
    "A file more."

    def apply(folder):
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text("...")

    return apply


def resealed(folder):
    "Other weights, and a manifest that fits them."
    (folder / "routing").write_text("takes the whole model")
    write_manifest(folder, "bundle", {}, client="hospital")


def linked(folder):
    "A file moved away, and a link to it in its place."
    (folder / "routing").rename(folder.parent / "away")
    (folder / "routing").symlink_to(folder.parent / "away")


def signature_linked(folder):
    "The same with the signature."
    (folder / SIGNATURE).rename(folder.parent / "away")
    (folder / SIGNATURE).symlink_to(folder.parent / "away")


TAMPERED = {
    "changed": (lambda f: (f / "routing").write_text("other"), "routing was changed"),
    "resealed": (resealed, "manifest.json was changed"),
    "gone": (lambda f: (f / "routing").unlink(), "routing is missing"),
    "renamed": (lambda f: (f / "routing").rename(f / "routed"), "routed was added"),
    "added": (add("more"), "more was added"),
    "added below": (add("adapter/more"), "adapter/more was added"),
    "hidden": (add(".more"), ".more was added"),
    "git": (add(".git/hooks/more"), ".git/hooks/more was added"),
    "gitignore": (add(".gitignore"), ".gitignore was added"),
    "other signature's place": (add(f"adapter/{SIGNATURE}"), f"adapter/{SIGNATURE} was added"),
    "link": (linked, "routing is a link"),
    "pipe": (lambda f: os.mkfifo(f / "pipe"), "pipe is a link, a pipe"),
    "signature a link": (signature_linked, "signature.json is a link"),
    "unsigned": (lambda f: (f / SIGNATURE).unlink(), "is not signed"),
    "signature a folder": (
        lambda f: ((f / SIGNATURE).unlink(), (f / SIGNATURE).mkdir()),
        "no ordinary file",
    ),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_tampered_bundle_is_refused_in_one_sentence(name, bundle, keys):
    spoil, said = TAMPERED[name]
    spoil(bundle)
    with pytest.raises(ValueError, match=said) as error:
        verify_bundle(bundle, keys)
    assert str(bundle) in str(error.value) and "\n" not in str(error.value)


def test_foreign_key_is_refused(bundle, homes, keys):
    sign_bundle(bundle, homes / "stranger" / PRIVATE)
    with pytest.raises(ValueError, match="foreign key: those of hospital, agency are taken"):
        verify_bundle(bundle, keys)
    with pytest.raises(ValueError, match="foreign key: those of nobody are taken"):
        verify_bundle(bundle, {})


def test_signature_of_another_bundle_is_refused(bundle, homes, keys, tmp_path):
    for client, owner in (("agency", "agency"), ("hospital", "hospital")):
        other = write(tmp_path / f"other {client}", client)
        (other / "routing").write_bytes(b"older")
        write_manifest(other, "bundle", {}, client=client)
        sign_bundle(other, homes / owner / PRIVATE)
        shutil.copy(other / SIGNATURE, bundle / SIGNATURE)
        with pytest.raises(ValueError, match=f"is not what {owner} has signed"):
            verify_bundle(bundle, keys)


@pytest.mark.parametrize("client", ["hospital", "Agency", None, ["agency"], {"agency": 1}, 0])
def test_member_cannot_send_in_another_ones_name(client, homes, keys, tmp_path):
    folder = write(tmp_path / "a", "agency")
    write_manifest(folder, "bundle", {}, client=client)
    sign_bundle(folder, homes / "agency" / PRIVATE)
    with pytest.raises(ValueError, match="but was signed by agency"):
        verify_bundle(folder, keys)


# ---- signatures that were made up


def told(folder):
    "What the signature says, and the statement in it."
    outer = json.loads((folder / SIGNATURE).read_text())
    return outer, json.loads(base64.b64decode(outer["dsseEnvelope"]["payload"]))


def forge(folder, statement, private, outer=None):
    "Write a signature that is right, of any statement; or of bytes that are none."
    key = serialization.load_pem_private_key(private.read_bytes(), None)
    raw = statement if isinstance(statement, bytes) else json.dumps(statement).encode()
    kind = "application/vnd.in-toto+json"
    signed = b"DSSEv1 %d %s %d %s" % (len(kind), kind.encode(), len(raw), raw)
    sig = base64.b64encode(key.sign(signed, ec.ECDSA(hashes.SHA256()))).decode()
    outer = outer or told(folder)[0]
    outer["dsseEnvelope"]["payload"] = base64.b64encode(raw).decode()
    outer["dsseEnvelope"]["signatures"] = [dict(sig=sig, keyid="")]
    (folder / SIGNATURE).write_text(json.dumps(outer))


def put(statement, *path, value):
    "Change one value of nested JSON."
    for step in path[:-1]:
        statement = statement[step]
    statement[path[-1]] = value


LISTING, FIRST = ("predicate", "serialization"), ("predicate", "resources", 0)
STATEMENTS = {
    "leaves out a file": ((*LISTING, "ignore_paths"), ["routing"], "leaves routing unsigned"),
    "leaves out all": ((*LISTING, "ignore_paths"), ["."], "unsigned"),
    "follows links": ((*LISTING, "allow_symlinks"), True, "allow_symlinks"),
    "in pieces": ((*LISTING, "method"), "shards", "method"),
    "other digests": ((*LISTING, "hash_type"), "blake3", "hash_type"),
    "older format": (("predicateType",), "https://model_signing/Digests/v0.1", "predicateType"),
    "other statement": (("_type",), "https://in-toto.io/Statement/v2", "."),
    "no type": (("_type",), None, "no statement"),
    "no subject": (("subject",), [], "."),
    "two subjects": (("subject",), [{"name": "a", "digest": {"sha256": "0"}}] * 2, "."),
    "no digest": (("subject", 0, "digest"), {}, "sha256.* missing"),
    "no list": (("predicate", "resources"), None, "resources"),
    "empty list": (("predicate", "resources"), [], "."),
    "number for a name": ((*FIRST, "name"), 7, "name"),
    "no hexadecimal": ((*FIRST, "digest"), "xyz", "."),
    "another digest": ((*FIRST, "digest"), "00" * 32, "."),
    "unknown field": (("predicate", "more"), 1, "unknown field"),
}


@pytest.mark.parametrize("name", STATEMENTS)
def test_odd_statement_under_a_right_signature_is_refused(name, bundle, homes, keys):
    path, value, said = STATEMENTS[name]
    statement = told(bundle)[1]
    put(statement, *path, value=value)
    forge(bundle, statement, homes / "hospital" / PRIVATE)
    with pytest.raises(ValueError, match=said):
        verify_bundle(bundle, keys)


def test_forged_statement_is_taken_if_it_is_right(bundle, homes, keys):
    "The tests above fail for their changes, and not for how they sign."
    forge(bundle, told(bundle)[1], homes / "hospital" / PRIVATE)
    assert verify_bundle(bundle, keys) == "hospital"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x80\x04",
        b"7",
        b"[]",
        b"{}",
        b'{"_type": "a"}',
        b"[" * 100_000,
        b'{"_type": "a", "subject": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"_type": "a", "subject": ' + b"9" * 5000 + b"}",
    ],
    ids=range(9),
)
def test_payload_that_is_no_statement_is_refused(raw, bundle, homes, keys):
    forge(bundle, raw, homes / "hospital" / PRIVATE)
    with pytest.raises(ValueError, match="signature.json(, payload| holds no statement)"):
        verify_bundle(bundle, keys)


OUTER = {
    "media type": (("mediaType",), "text/plain"),
    "no material": (("verificationMaterial",), {}),
    "no hint": (("verificationMaterial", "publicKey", "hint"), None),
    "unknown hint": (("verificationMaterial", "publicKey", "hint"), "0" * 64),
    "endless hint": (("verificationMaterial", "publicKey", "hint"), "x" * 500_000),
    "a log": (("verificationMaterial", "tlogEntries"), [{}]),
    "no payload": (("dsseEnvelope", "payload"), None),
    "no base64": (("dsseEnvelope", "payload"), "*" * 40),
    "payload type": (("dsseEnvelope", "payloadType"), "text/plain"),
    "no signatures": (("dsseEnvelope", "signatures"), []),
    "two signatures": (("dsseEnvelope", "signatures"), [{"sig": ""}] * 2),
    "empty signature": (("dsseEnvelope", "signatures", 0, "sig"), ""),
    "signature no base64": (("dsseEnvelope", "signatures", 0, "sig"), "*"),
    "signature of nothing": (("dsseEnvelope", "signatures", 0, "sig"), "AAAA"),
    "unknown field": (("more",), 1),
}


@pytest.mark.parametrize("name", OUTER)
def test_odd_signature_file_is_refused(name, bundle, keys):
    path, value = OUTER[name]
    outer = told(bundle)[0]
    put(outer, *path, value=value)
    (bundle / SIGNATURE).write_text(json.dumps(outer))
    with pytest.raises(ValueError) as error:
        verify_bundle(bundle, keys)
    assert str(bundle) in str(error.value) and len(str(error.value)) < 1000


@pytest.mark.parametrize(
    "raw", [b"", b"\xff", b"[]", b"null", b"[" * 200_000, b" " * 2_000_000, b'{"a": NaN}']
)
def test_file_that_is_no_signature_is_refused(raw, bundle, keys):
    (bundle / SIGNATURE).write_bytes(raw)
    with pytest.raises(ValueError, match=SIGNATURE):
        verify_bundle(bundle, keys)


def test_signature_in_anothers_name_is_refused(bundle, homes, keys):
    """The stranger signs, and writes that it was the hospital."""
    forge(bundle, told(bundle)[1], homes / "stranger" / PRIVATE)
    with pytest.raises(ValueError, match="names the key of hospital, but was not made with it"):
        verify_bundle(bundle, keys)


# ---- without the extra


@pytest.mark.parametrize("package", ["cryptography", "model_signing"])
def test_without_the_extra_the_command_is_said(package, bundle, homes, keys, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    attempts = [
        lambda: sign_bundle(bundle, homes / "hospital" / PRIVATE),
        lambda: verify_bundle(bundle, keys),
    ]
    if package == "cryptography":
        attempts.append(lambda: new_keys(bundle.parent / "keys"))
    for attempt in attempts:
        with pytest.raises(ImportError, match=rf'need {package}.*pip install "harmomoe\[signing\]'):
            attempt()


def test_importing_the_module_imports_no_extra():
    code = f"import sys, {signatures.__name__}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = {name.partition(".")[0] for name in run.stdout.split()}
    assert "pydantic" in found
    assert not {"cryptography", "model_signing", "sigstore", "OpenSSL"} & found
