"""Folders at paths and URLs are copied as a whole within limits, or refused with nothing left."""

import io
import os
import socket
import ssl
import threading
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from helpers import tree
from huggingface_hub import HfFileSystem

from harmomoe.base import places
from harmomoe.base.artefacts import MANIFEST, write_manifest
from harmomoe.base.places import (
    connection_problem,
    fetch_file,
    fetch_folder,
    is_url,
    list_folders,
    send_folder,
)

CONTENT = {"one": b"1" * 1000, "sub/two": b"2" * 2_500_000, "sub/deeper/three": b""}


@pytest.fixture
def memory():
    "An empty store in memory, for whose addresses nothing else is running."
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield fsspec.filesystem("memory")
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture
def mine(tmp_path):
    "A folder of three files and a manifest."
    folder = tmp_path / "St. Mary's" / "bundle"
    for name, data in CONTENT.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    write_manifest(folder, "thing", {})
    return folder


@pytest.fixture(params=["path", "file", "memory"])
def place(request, tmp_path, memory):
    "Where bundles lie: each kind of place that needs no network."
    shared = tmp_path / "shared folder"
    return dict(path=str(shared), file=shared.as_uri(), memory="memory://shared/deep")[
        request.param
    ]


# ---- what a place is


def test_url_is_told_from_a_path():
    for url in ("s3://bucket/a", "file:///a", "HF://datasets/a/b", "memory://a", "https://a/b"):
        assert is_url(url)
    for path in ("a", "/a/b", "C:\\a", "C:/a", "a://b"[1:], Path("s3://bucket"), "", "::s3://a"):
        assert not is_url(path)


@pytest.mark.parametrize(
    "wrong, said",
    [
        ("", "empty"),
        ("http://host/a", "use https://"),
        ("ftp://host/a", "kind that is not read"),
        ("reference://a", "kind that is not read"),
        ("zip://a::https://host/b.zip", "kind that is not read"),
        ("memory://a::https://host/b.zip", "does not name one"),
        ("memory://", "does not name one"),
        ("s3:///", "does not name one"),
        ("file://host/a", "names the host"),
        ("https://host/a", "no folders"),
    ],
)
def test_what_is_no_place_is_refused_by_all(wrong, said, tmp_path, mine):
    for attempt in (
        lambda: fetch_folder(wrong, tmp_path / "new"),
        lambda: send_folder(mine, wrong),
        lambda: list_folders(wrong),
    ):
        with pytest.raises(ValueError, match=said):
            attempt()
    assert not (tmp_path / "new").exists()


def test_password_in_a_url_is_refused_and_not_repeated():
    with pytest.raises(ValueError, match="holds a password") as error:
        list_folders("s3://key:hush@bucket/a")
    assert "hush" not in str(error.value)


# ---- there and back


def test_folder_goes_there_and_comes_back(place, mine, tmp_path):
    assert send_folder(mine, f"{place}/a") == f"{place}/a"
    send_folder(mine, f"{place}/b c/")
    found = list_folders(place)
    assert [name.rpartition("/")[2] for name in found] in (["a", "b c"], ["a", "b%20c"])
    assert all(is_url(name) == is_url(place) for name in found)
    for number, name in enumerate(found):
        into = tmp_path / "received" / str(number)
        assert fetch_folder(name, into) == into
        assert tree(into) == tree(mine)
    assert sorted(os.listdir(tmp_path / "received")) == ["0", "1"]


def test_paths_may_be_path_objects(mine, tmp_path):
    send_folder(mine, tmp_path / "there" / "a")
    assert list_folders(tmp_path / "there") == [str(tmp_path / "there" / "a")]
    assert tree(fetch_folder(tmp_path / "there" / "a", tmp_path / "new")) == tree(mine)


def test_hidden_folders_and_links_are_not_listed(place, mine, tmp_path):
    send_folder(mine, f"{place}/a")
    send_folder(mine, f"{place}/.a.partial-1")
    if "memory" not in place:
        (tmp_path / "shared folder" / "b").symlink_to(mine)
    assert [name[-1] for name in list_folders(place)] == ["a"]


def test_only_what_is_new_or_empty_is_filled(mine, tmp_path):
    (tmp_path / "empty").mkdir()
    assert tree(fetch_folder(mine, tmp_path / "empty")) == tree(mine)
    for taken in (tmp_path / "empty", mine / "one"):
        with pytest.raises(FileExistsError, match="is not an empty folder"):
            fetch_folder(mine, taken)
    assert tree(tmp_path / "empty") == tree(mine)


def test_absent_and_empty_places_are_named(place, tmp_path, memory):
    for attempt in (fetch_folder, lambda place, _: list_folders(place)):
        with pytest.raises(FileNotFoundError, match="there is nothing at .*/nowhere"):
            attempt(f"{place}/nowhere", tmp_path / "new")
    (tmp_path / "shared folder" / "empty").mkdir(parents=True)
    memory.makedirs("/shared/deep/empty")
    with pytest.raises(FileNotFoundError, match="/empty holds no files"):
        fetch_folder(f"{place}/empty", tmp_path / "new")
    assert not (tmp_path / "new").exists()


# ---- hostile folders


@pytest.mark.parametrize(
    "name",
    [
        "../b",
        "a/../../b",
        "./b",
        "..\\b",
        "a\\b",
        "C:b",
        "c:/b",
        "two\nlines",
        "nul\0",
        "right\u202eleft",
        "x" * 256,
        "ü" * 128,
    ],
)
def test_names_that_lead_elsewhere_or_mislead_are_refused(name, memory, tmp_path):
    memory.pipe("/evil/good", b"1")
    memory.store[f"/evil/{name}"] = memory.store["/evil/good"]
    with pytest.raises(ValueError, match="^memory://evil lists "):
        fetch_folder("memory://evil", tmp_path / "new")
    assert os.listdir(tmp_path) == []


def test_file_that_would_be_lost_between_two_slashes_is_refused(memory, tmp_path):
    memory.pipe("/evil/a/good", b"1")
    memory.store["/evil/a//b"] = memory.store["/evil/a/good"]
    with pytest.raises(
        NotADirectoryError, match="memory://evil/a is a file, or holds .* two slash"
    ):
        fetch_folder("memory://evil", tmp_path / "new")
    assert os.listdir(tmp_path) == []


def test_file_is_no_folder(place, mine, tmp_path):
    send_folder(mine, f"{place}/a")
    for attempt in (
        lambda: fetch_folder(f"{place}/a/one", tmp_path / "new"),
        lambda: list_folders(f"{place}/a/one"),
    ):
        with pytest.raises(OSError, match="a/one/? (is a file|cannot be read: .*Not a dir)"):
            attempt()


@pytest.mark.parametrize("name", ["/b", "/elsewhere/b", "/evils/b", "/evi"])
def test_listing_of_another_folder_is_refused(name, memory, tmp_path, monkeypatch):
    monkeypatch.setattr(
        MemoryFileSystem, "ls", lambda *_, **__: [dict(name=name, type="file", size=1)]
    )
    with pytest.raises(ValueError, match="not in that folder"):
        fetch_folder("memory://evil", tmp_path / "new")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "pair", [("Weights", "weights"), ("a", "a/b"), ("é", "e\u0301"), ("A/x", "a")]
)
def test_two_names_for_one_file_are_refused(pair, memory, tmp_path):
    for name in pair:
        memory.store[f"/evil/{name}"] = memory.store.get("/one") or _one(memory)
    with pytest.raises(ValueError, match="one and the same on some disks"):
        fetch_folder("memory://evil", tmp_path / "new")


def _one(memory):
    memory.pipe("/one", b"1")
    return memory.store["/one"]


def test_neither_too_many_files_nor_folders_within_folders_are_taken(memory, tmp_path):
    for number in range(11):
        memory.pipe(f"/many/{number}", b"")
    memory.pipe("/deep" + "/a" * 11, b"")
    for name in ("many", "deep"):
        with pytest.raises(ValueError, match="more than 10 files and folders"):
            fetch_folder(f"memory://{name}", tmp_path / "new", most=10)
        fetch_folder(f"memory://{name}", tmp_path / name, most=11)


def test_folder_that_lists_itself_below_itself_comes_to_an_end(memory, tmp_path, monkeypatch):
    endless = lambda _, path, **__: [dict(name=f"{path}/a", type="directory", size=0)]
    monkeypatch.setattr(MemoryFileSystem, "ls", endless)
    with pytest.raises(ValueError, match="more than 50 files"):
        fetch_folder("memory://endless", tmp_path / "new", most=50)


def test_sizes_are_checked_as_listed(place, mine, tmp_path):
    send_folder(mine, f"{place}/a")
    whole = sum(map(len, tree(mine).values()))
    with pytest.raises(ValueError, match=f"holds {whole} bytes, but at most {whole - 1}"):
        fetch_folder(f"{place}/a", tmp_path / "new", limit=whole - 1)
    assert not (tmp_path / "new").exists()
    fetch_folder(f"{place}/a", tmp_path / "new", limit=whole)


@pytest.mark.parametrize("size", [0, None, -(10**12), 1])
def test_listing_that_lies_about_sizes_is_found_out_while_copying(
    size, memory, tmp_path, monkeypatch
):
    class Endless(io.RawIOBase):
        "A file without an end."

        read = lambda self, number: b"x" * number

    listed = [dict(name="/evil/a", type="file", size=size)]
    monkeypatch.setattr(MemoryFileSystem, "ls", lambda *_, **__: listed)
    monkeypatch.setattr(MemoryFileSystem, "open", lambda *_, **__: Endless())
    with pytest.raises(ValueError, match="goes on beyond the 3000000 bytes"):
        fetch_folder("memory://evil", tmp_path / "new", limit=3_000_000)
    assert os.listdir(tmp_path) == []


def test_limit_is_that_of_all_files_together(memory, tmp_path, monkeypatch):
    for number in range(3):
        memory.pipe(f"/evil/{number}", b"x" * 1000)
    real = MemoryFileSystem.ls
    unsized = lambda *args, **named: [e | dict(size=0) for e in real(*args, **named)]
    monkeypatch.setattr(MemoryFileSystem, "ls", unsized)
    with pytest.raises(ValueError, match="evil/2 goes on beyond the 999 bytes"):
        fetch_folder("memory://evil", tmp_path / "new", limit=2999)
    assert fetch_folder("memory://evil", tmp_path / "new", limit=3000)


@pytest.mark.parametrize("as_url", [False, True])
def test_links_and_pipes_are_neither_fetched_nor_sent(as_url, mine, tmp_path, memory):
    secret = tmp_path / "secret"
    secret.write_text("private")
    place = mine.as_uri() if as_url else mine
    for spoil in (
        lambda: (mine / "odd").symlink_to(secret),
        lambda: (mine / "odd").symlink_to(tmp_path),
        lambda: (mine / "odd").symlink_to(tmp_path / "nowhere"),
        lambda: (mine / "sub" / "odd").symlink_to(mine),
        lambda: os.mkfifo(mine / "odd"),
    ):
        spoil()
        with pytest.raises(ValueError, match="odd' is (a link|neither)"):
            fetch_folder(place, tmp_path / "new")
        with pytest.raises(ValueError, match="odd' is (a link|neither)"):
            send_folder(mine, "memory://new")
        (mine / "odd").unlink(missing_ok=True)
        (mine / "sub" / "odd").unlink(missing_ok=True)
    assert not (tmp_path / "new").exists() and not memory.store


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_file_that_is_exchanged_after_the_listing_is_not_read(kind, mine, tmp_path, monkeypatch):
    real = places._list_files

    def then_exchange(source, most):
        files = real(source, most)
        (mine / "one").unlink()
        os.mkfifo(mine / "one") if kind == "pipe" else (mine / "one").symlink_to("/dev/zero")
        return files

    monkeypatch.setattr(places, "_list_files", then_exchange)
    with pytest.raises(OSError, match="cannot be read"):
        fetch_folder(mine, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_store_that_fails_midway_leaves_nothing(memory, tmp_path, monkeypatch):
    class Odd(Exception):
        "What a store's program may raise."

    def fail(self, path, mode):
        if path.endswith("b"):
            raise Odd("the line\nis dead")
        return io.BytesIO(b"a")

    memory.pipe("/s/a", b"a")
    memory.pipe("/s/b", b"b")
    monkeypatch.setattr(MemoryFileSystem, "open", fail)
    with pytest.raises(OSError, match="^memory://s/b cannot be read: the line is dead$"):
        fetch_folder("memory://s", tmp_path / "new")
    assert os.listdir(tmp_path) == []


# ---- sending


def test_manifest_is_sent_last_and_taken_away_first(mine, memory, monkeypatch):
    log, put, rm = [], MemoryFileSystem.put_file, MemoryFileSystem.rm
    monkeypatch.setattr(
        MemoryFileSystem, "put_file", lambda s, a, b: (log.append(("put", b)), put(s, a, b))
    )
    monkeypatch.setattr(MemoryFileSystem, "rm", lambda s, a: (log.append(("rm", a)), rm(s, a)))
    send_folder(mine, "memory://there")
    names = ["one", "sub/deeper/three", "sub/two", MANIFEST]
    assert log == [("put", f"/there/{name}") for name in names]
    log.clear()
    send_folder(mine, "memory://there", overwrite=True)
    assert log == [("rm", f"/there/{MANIFEST}")] + [("put", f"/there/{name}") for name in names]


def test_nothing_is_replaced_unasked_and_nothing_foreign_at_all(place, mine, tmp_path):
    send_folder(mine, f"{place}/a")
    first = tree(fetch_folder(f"{place}/a", tmp_path / "first"))
    (mine / "one").write_bytes(b"changed")
    write_manifest(mine, "thing", {})
    with pytest.raises(FileExistsError, match="/a is not empty"):
        send_folder(mine, f"{place}/a")
    assert tree(fetch_folder(f"{place}/a", tmp_path / "second")) == first
    send_folder(mine, f"{place}/a", overwrite=True)
    assert tree(fetch_folder(f"{place}/a", tmp_path / "third")) == tree(mine) != first
    (mine / "sub" / "two").unlink()
    with pytest.raises(FileExistsError, match="not replaced: sub/two is there"):
        send_folder(mine, f"{place}/a", overwrite=True)
    with pytest.raises(FileExistsError, match="not replaced: a/manifest.json is there"):
        send_folder(mine, place, overwrite=True)


@pytest.mark.parametrize("error", [OSError, RuntimeError, KeyboardInterrupt])
def test_upload_that_fails_leaves_no_half(error, mine, memory, monkeypatch):
    put = MemoryFileSystem.put_file

    def fail(self, local, remote):
        put(self, local, remote)
        if remote.endswith("two"):
            raise error("no more room")

    monkeypatch.setattr(MemoryFileSystem, "put_file", fail)
    expected = KeyboardInterrupt if error is KeyboardInterrupt else OSError
    with pytest.raises(expected, match="no more room"):
        send_folder(mine, "memory://there")
    assert not memory.store


# ---- what is missing


@pytest.mark.parametrize("scheme, package", [("s3", "s3fs"), ("gs", "gcsfs"), ("abfs", "adlfs")])
def test_missing_package_is_named_with_its_command(scheme, package, tmp_path, monkeypatch):
    monkeypatch.setattr(places, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=f"^{scheme}://b/a .*pip install {package}$"):
        fetch_folder(f"{scheme}://b/a", tmp_path / "new")


def test_hub_without_a_network_is_given_up_at_once(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        with pytest.raises(ConnectionError, match="hf://datasets/a/b/c needs .*127.0.0.1.*refused"):
            fetch_folder("hf://datasets/a/b/c", tmp_path / "new")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConnectionError, match="HF_HUB_OFFLINE forbids it"):
        fetch_folder("hf://datasets/a/b/c", tmp_path / "new")


def test_hub_may_list_a_revision_under_another_spelling(tmp_path, monkeypatch):
    """Some versions of its client escape the slashes of a revision."""

    def listed(self, path, **_):
        return [dict(name=f"{self.resolve_path(path).unresolve()}/one", type="file", size=3)]

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(places, "_check_reachable", lambda *_: None)
    monkeypatch.setattr(HfFileSystem, "_repo_and_revision_exist", lambda *_: (True, None))
    monkeypatch.setattr(HfFileSystem, "ls", listed)
    monkeypatch.setattr(HfFileSystem, "open", lambda *_: io.BytesIO(b"one"))
    for revision in ("refs%2Fpr%2F1", "refs/pr/1"):
        into = tmp_path / str(len(revision))
        fetch_folder(f"hf://datasets/owner/name@{revision}/bundles/a", into)
        assert tree(into) == {"one": b"one"}


def test_name_lookup_that_hangs_is_given_up(monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(socket, "create_connection", lambda *_: released.wait() and socket.socket())
    monkeypatch.setattr(places, "getproxies", dict)
    assert "no answer in 0.1 s" in connection_problem("https://somewhere.example", timeout=0.1)
    released.set()


# ---- single files


def test_one_file_comes_from_every_place(place, mine, tmp_path):
    send_folder(mine, f"{place}/a")
    assert fetch_file(f"{place}/a/one", tmp_path / "one") == tmp_path / "one"
    assert (tmp_path / "one").read_bytes() == CONTENT["one"]
    with pytest.raises(FileExistsError, match="is there already"):
        fetch_file(f"{place}/a/one", tmp_path / "one")
    with pytest.raises(ValueError, match="beyond the 999 bytes"):
        fetch_file(f"{place}/a/one", tmp_path / "two", limit=999)
    with pytest.raises(FileNotFoundError, match="there is nothing at .*/a/nothing"):
        fetch_file(f"{place}/a/nothing", tmp_path / "two")
    assert not list(tmp_path.glob("*two*"))


def test_file_outside_of_a_folder_is_refused(tmp_path):
    for wrong in ("memory://one", "s3://bucket", "memory://a/"):
        with pytest.raises(ValueError, match="does not name a file in a folder"):
            fetch_file(wrong, tmp_path / "new")


class _Host(BaseHTTPRequestHandler):
    "A host that answers, lies about a length, or leads elsewhere."

    def do_GET(self):
        if self.path == "/short":
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"few")
        elif self.path in self.server.leads_to:
            self.send_response(302)
            self.send_header("Location", self.server.leads_to[self.path])
            self.end_headers()
        else:
            self.send_response(200 if self.path == "/file" else 404)
            self.end_headers()
            self.wfile.write(b"x" * 3000)

    def log_message(self, *_):
        "Nothing is printed."


@pytest.fixture
def host(tmp_path_factory, monkeypatch):
    "The address of a host that speaks https, on this machine; its certificate is trusted."
    pytest.importorskip("cryptography")
    folder = tmp_path_factory.mktemp("host")
    _write_certificate(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "certificate", folder / "key")
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Host)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    address = f"https://localhost:{server.server_port}"
    server.leads_to = {
        "/on": f"{address}/file",
        "/down": f"http://localhost:{server.server_port}/file",
        "/disk": "file:///etc/hostname",
    }
    monkeypatch.setenv("SSL_CERT_FILE", str(folder / "certificate"))
    monkeypatch.setenv("no_proxy", "localhost")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield address
    server.shutdown()
    server.server_close()


def _write_certificate(folder):
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(timezone.utc)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    built = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    built = built.not_valid_before(now - timedelta(1)).not_valid_after(now + timedelta(1))
    hosts = x509.SubjectAlternativeName([x509.DNSName("localhost")])
    certificate = built.add_extension(hosts, critical=False).sign(key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    (folder / "certificate").write_bytes(certificate.public_bytes(pem))
    unprotected = serialization.NoEncryption()
    form = serialization.PrivateFormat.PKCS8
    (folder / "key").write_bytes(key.private_bytes(pem, form, unprotected))


def test_file_comes_by_https_and_redirections_stay_there(host, tmp_path):
    for name in ("file", "on"):
        assert fetch_file(f"{host}/{name}", tmp_path / name).read_bytes() == b"x" * 3000
    for name, said in (
        ("down", "leads to http://localhost"),
        ("disk", "file:///"),
        ("short", "97 bytes too early"),
        ("nothing", "404"),
    ):
        with pytest.raises(OSError, match=f"{host}/{name} cannot be read: .*{said}"):
            fetch_file(f"{host}/{name}", tmp_path / "new")
    with pytest.raises(ValueError, match="beyond the 2999 bytes"):
        fetch_file(f"{host}/file", tmp_path / "new", limit=2999)
    assert sorted(os.listdir(tmp_path)) == ["file", "on"]


def test_host_with_a_foreign_certificate_is_refused(host, tmp_path, monkeypatch):
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(OSError, match="cannot be read: .*certificate"):
        fetch_file(f"{host}/file", tmp_path / "new")
    assert os.listdir(tmp_path) == []


def test_unprotected_http_is_refused(tmp_path):
    with pytest.raises(ValueError, match="could be read and changed on its way: use https://"):
        fetch_file("http://localhost/file", tmp_path / "new")
