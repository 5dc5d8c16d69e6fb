"""What leaves a client is exactly the bundle, and nothing private is in it: a search for planted
data, and controls that the search finds what is there."""

import base64
import hashlib
import json
import shutil
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers import kept
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from harmomoe.base.artefacts import MANIFEST
from harmomoe.bundle.files import ADAPTER_FILES, FILES, PROXIES, ROUTING
from harmomoe.client.client import Client
from harmomoe.client.expert import load_expert
from harmomoe.config.settings import changed
from harmomoe.data.domains import fingerprint, load_domain
from harmomoe.describe.proxies import ProxySet
from harmomoe.describe.relevance import linear_probe
from harmomoe.describe.routing import layer_means
from harmomoe.moe.context import FORMS, with_squares

TENSORS_FILE, ALL = ADAPTER_FILES[1], (*FORMS, "all")
RUN = 24  # so many bytes of private data in a row, in any of the renderings below, are a leak


# ---- the search


def readable(path):
    """A file's bytes as they are; and as a reader would see them: parquet columns unpacked, JSON
    without escapes."""
    found = [path.name.encode(), path.read_bytes()]
    if path.suffix == ".parquet":
        table = pq.read_table(path)
        found += [item for pair in (table.schema.metadata or {}).items() for item in pair]
        for column in table.columns:
            found += [
                buffer.to_pybytes()
                for chunk in column.chunks
                for buffer in chunk.buffers()
                if buffer
            ]
    if path.suffix == ".json":
        found.append(json.dumps(json.loads(path.read_text()), ensure_ascii=False).encode())
    return found


def runs(data):
    return {data[i : i + RUN] for i in range(len(data) - RUN + 1)}


def leaks(folder, data_runs, texts):
    "What of the private data the files of a folder hold: (file, 'data') or (file, text)."
    found = set()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        for content in readable(path):
            if not data_runs.isdisjoint(runs(content)):
                found.add((path.name, "data"))
            found |= {
                (path.name, text)
                for text in texts
                if any(form in content for form in spellings(text))
            }
    return found


def spellings(text):
    "A text in the cases and encodings in which a file might hold it; base64 without its end."
    cases, codes = {text, text.lower(), text.upper()}, ("utf-8", "utf-16-le", "utf-16-be")
    plain = [case.encode(code) for case in cases for code in codes]
    return plain + [base64.b64encode(form)[:-4] for form in plain]


def renderings(pixels, encoded, seed):
    "name -> bytes: one image in the forms in which code holds it."
    normalised = seed.transform(Image.fromarray(pixels))
    unit = torch.from_numpy(pixels.copy()).permute(2, 0, 1) / 255
    found = {
        "encoded": encoded[41:-12],  # without the header and last chunk that all PNG share
        "rgb": pixels.tobytes(),
        "planes": pixels.transpose(2, 0, 1).tobytes(),
        "grey": pixels.mean(2).astype(np.uint8).tobytes(),
    }
    for name, planes in (("unit", unit), ("normalised", normalised)):
        for order, x in (("CHW", planes), ("HWC", planes.permute(1, 2, 0))):
            for dtype in (torch.float16, torch.float32, torch.float64):
                found[f"{name} {order} {dtype}"] = x.contiguous().to(dtype).numpy().tobytes()
    return found


# ---- a client with data that would be recognised anywhere

CLASSES = ("zebrafinch-ZQ81", "märchen_ward-XK77", "patient 4711-Ökonom")
WARD, MARKER = "top-secret-ward-9f3", "marker-5e1c0ffee"


@pytest.fixture(scope="module")
def private(tmp_path_factory):
    "Noise images in a folder per class, with names and a description that occur nowhere else."
    folder, rng = tmp_path_factory.mktemp("client") / WARD, np.random.default_rng(99)
    for i in range(36):
        path = folder / CLASSES[i % 3] / f"scan-{i:02d}-{rng.integers(10**9):09d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(path)
    domain = load_domain(folder, "clinic")
    for part in (domain.train, domain.validation, domain.test):
        part.info.description = MARKER
    return domain


@pytest.fixture(scope="module")
def secrets(private, tiny_public):
    """All runs of bytes and all texts that must not leave, and one rendering of each kind for
    the control."""
    seed, data, samples = tiny_public.seed, set(), {}
    texts = [*CLASSES, *(name.replace("_", " ") for name in CLASSES), WARD, MARKER]
    for part in (private.train, private.validation, private.test):
        texts += [fingerprint(part), fingerprint(part, content=True), part._fingerprint]
        for row in part:
            path = row["image"].filename
            encoded = open(path, "rb").read()
            texts += [path, path.rpartition("/")[2]]
            texts += [hashlib.new(k, encoded).hexdigest() for k in ("md5", "sha1", "sha256")]
            samples = renderings(np.asarray(row["image"]), encoded, seed)
            data = data.union(*map(runs, samples.values()))
        [batch] = seed.batches(part)
        embeddings = seed.embed(part)
        data |= floats(embeddings) | floats(seed.backbone.conv1(batch["images"]).detach())
    own = linear_probe(seed.embed(private.train).numpy(), tiny_public.embeddings).private
    data |= floats(torch.from_numpy(own)[None])
    samples["embedding"] = embeddings[0].numpy().tobytes()
    return data, texts, samples


def floats(values):
    "All runs of the rows of a tensor, in three types."
    types = torch.float16, torch.float32, torch.float64
    rows = [row for dtype in types for row in values.to(dtype).flatten(1)]
    return set().union(*(runs(row.contiguous().numpy().tobytes()) for row in rows))


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    "Where the client works."
    return tmp_path_factory.mktemp("work") / "clinic"


@pytest.fixture(scope="module")
def bundles(private, work, tiny_public, tmp_path_factory):
    "Form of the routing vectors, or `all` -> the bundle with them, all of one expert."
    found = {}
    for form in ALL:
        changes = {"routing.forms": "+".join(FORMS)} if form == "all" else {"router.form": form}
        public = tiny_public.with_config(changed(tiny_public.config, changes))
        found[form] = Client(public, private, work).bundle(tmp_path_factory.mktemp("sent") / form)
    return found


@pytest.fixture(scope="module")
def bundle(bundles):
    return bundles["mean"]


@pytest.fixture(scope="module")
def proxies(bundle, work):
    "The proxies as the client keeps them."
    return ProxySet.load(kept(work, "proxies")[0])


# ---- what is in it


def test_a_bundle_is_exactly_four_files_and_their_manifest(bundles):
    for bundle in bundles.values():
        found = [path for path in bundle.rglob("*") if not path.is_dir()]
        names = [path.relative_to(bundle).as_posix() for path in found]
        assert sorted(names) == sorted([*FILES, MANIFEST])
        assert not any(path.is_symlink() for path in bundle.rglob("*"))


@pytest.mark.parametrize("form", ALL)
def test_nothing_private_is_in_the_bundle(form, bundles, secrets):
    data, texts, _ = secrets
    assert len(data) > 100_000 and len(texts) > 100
    assert leaks(bundles[form], data, texts) == set()


def test_routing_vectors_sum_up_all_samples_and_repeat_none(
    bundles, private, tiny_public, tiny_seed, tmp_path
):
    expert, data = load_expert(tiny_seed, bundles["mean"]), set()
    for backbone in (expert, tiny_seed.backbone):
        values = layer_means(tiny_seed, backbone, private.train, spread=True, hidden=True)
        units = zip(values, *tiny_public.units)
        for row in (*values.flatten(0, 1), *torch.cat([with_squares(*z) for z in units])):
            data |= runs(row.numpy().tobytes())
    found = {form: leaks(bundle, data, []) for form, bundle in bundles.items()}
    assert found == dict.fromkeys(ALL, set())
    # those of a single sample would be found
    parts = dict(zip(("mean", "spread", "hidden"), values[:, 0, :384].tensor_split([64, 128], 1)))
    for name, part in parts.items():
        one = shutil.copytree(bundles["moments"], tmp_path / name)
        save_file({"moments.vectors": part.contiguous()}, one / ROUTING)
        assert leaks(one, data, []) == {(ROUTING, "data")}


@pytest.mark.parametrize(
    "form, width", [("mean", 64), ("logistic", 64), ("moments", 128), ("evidence", 1280)]
)
def test_routing_file_holds_a_vector_and_a_number_a_layer_under_the_form(form, width, bundles):
    with safe_open(bundles[form] / ROUTING, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        assert not file.metadata()
    found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    vectors, biases = f"{form}.vectors", f"{form}.biases"
    assert found == {vectors: ((2, width), torch.float32), biases: ((2,), torch.float32)}
    assert tensors[biases].any() == (form != "mean")
    every = load_file(bundles["all"] / ROUTING)
    assert all(torch.equal(every[name], tensor) for name, tensor in tensors.items())
    assert {name.partition(".")[0] for name in every} == {*FORMS}


def test_proxies_are_ids_alone_in_ascending_order(bundle, proxies, tiny_public):
    "Neither how relevant they are nor the order in which they were chosen."
    table = pq.read_table(bundle / PROXIES)
    assert table.column_names == ["id"] and table["id"].to_pylist() == sorted(proxies.ids.tolist())
    assert proxies.ids.tolist() != sorted(proxies.ids.tolist())
    metadata = {b"format": b"harmomoe.proxy-ids/1"}
    metadata[b"pool_fingerprint"] = tiny_public.fingerprint.encode()
    assert pq.read_schema(bundle / PROXIES).metadata == metadata
    assert not any(field.metadata for field in table.schema)


def test_scores_gains_and_order_of_the_proxies_stay_where_they_are(bundles, proxies, tmp_path):
    data = set()
    for values in (proxies.relevance, proxies.gains):
        data |= runs(values.tobytes()) | runs(values.astype(np.float32).tobytes())
    for ids in (proxies.ids, proxies.ids[::-1]):
        data |= runs(np.ascontiguousarray(ids).tobytes())
    for bundle in bundles.values():
        assert leaks(bundle, data, []) == set()
    one = shutil.copytree(bundles["mean"], tmp_path / "one")
    proxies.save(one)  # the set as the client keeps it would be found
    assert leaks(one, data, []) == {(PROXIES, "data")}


def test_another_order_of_selection_gives_the_same_bytes(proxies, tmp_path):
    for name, order in (("one", slice(None)), ("two", slice(None, None, -1))):
        columns = {k: getattr(proxies, k)[order] for k in ("ids", "relevance", "gains")}
        replace(proxies, **columns).send(tmp_path / name)
    assert (tmp_path / "one" / PROXIES).read_bytes() == (tmp_path / "two" / PROXIES).read_bytes()


def test_names_of_tensors_and_fields_are_the_known_ones(bundle, private, tiny_seed):
    "A positive list beside the search: what is in a bundle is there on purpose."
    manifest = json.loads((bundle / MANIFEST).read_text())
    assert manifest.keys() == {"kind", "format", "inputs", "facts", "versions", "files"}
    assert manifest["inputs"].keys() == {"seed", "pool", "settings"}
    assert manifest["inputs"]["seed"] == tiny_seed.identity
    facts = dict(client="clinic", private_samples=len(private.train), proxies=12)
    assert manifest["facts"] == facts
    linears = [f"{layer}.{linear}" for layer in tiny_seed.layers for linear in ("c_fc", "c_proj")]
    names = {f"base_model.model.{name}.lora_{x}.weight" for name in linears for x in "AB"}
    assert load_file(bundle / TENSORS_FILE).keys() == names
    assert load_file(bundle / ROUTING).keys() == {"mean.vectors", "mean.biases"}


def test_settings_in_the_manifest_are_those_of_everybody(bundle, tiny_public):
    manifest = json.loads((bundle / MANIFEST).read_text())
    assert manifest["inputs"]["settings"] == tiny_public.config.told
    assert manifest["inputs"]["pool"] == tiny_public.fingerprint


def test_search_finds_what_the_client_keeps_for_itself(work, secrets):
    "Its fingerprint, in the manifests, and the scores of its samples."
    data, texts, _ = secrets
    [expert], [relevance] = (kept(work, kind) for kind in ("expert", "relevance"))
    assert {name for name, _ in leaks(expert, data, texts)} == {MANIFEST}
    assert ("relevance.npz", "data") in leaks(relevance, data, texts)


def test_bundle_names_no_file_of_the_machine_that_made_it(
    tiny_clients, tiny_folder, tiny_seed_folder
):
    for path in (tiny_clients / "b" / "bundle").rglob("*"):
        for secret in (str(tiny_clients), str(tiny_folder), str(tiny_seed_folder.parent)):
            assert path.is_dir() or secret.encode() not in path.read_bytes(), path


# ---- the search finds what is hidden


def into_tensors(folder, piece):
    extra = torch.frombuffer(bytearray(piece), dtype=torch.uint8)
    save_file(load_file(folder / ROUTING) | dict(extra=extra), folder / ROUTING)
    return ROUTING


def into_column(folder, piece):
    table = pq.read_table(folder / PROXIES)
    extra = pa.array([piece] * len(table), pa.binary())
    pq.write_table(table.append_column("extra", extra), folder / PROXIES, compression="zstd")
    return PROXIES


def behind_the_end(folder, piece):
    with (folder / TENSORS_FILE).open("ab") as open_file:
        open_file.write(piece)
    return TENSORS_FILE.rpartition("/")[2]


def into_new_file(folder, piece):
    (folder / "notes.bin").write_bytes(b"abc" + piece)
    return "notes.bin"


@pytest.mark.parametrize("hide", [into_tensors, into_column, behind_the_end, into_new_file])
def test_search_finds_a_part_of_every_rendering_of_an_image(hide, bundle, secrets, tmp_path):
    data, _, samples = secrets
    for name, sample in samples.items():
        folder = shutil.copytree(bundle, tmp_path / name.replace(" ", "-"))
        assert leaks(folder, data, []) == set()
        place = hide(folder, sample[11 : 11 + RUN])
        assert leaks(folder, data, []) == {(place, "data")}, name


def into_json(folder, text):
    (folder / MANIFEST).write_text(json.dumps(dict(note=[text])))


def into_metadata(folder, text):
    table = pq.read_table(folder / PROXIES)
    pq.write_table(table.replace_schema_metadata({b"note": text.encode()}), folder / PROXIES)


def into_upper_case(folder, text):
    (folder / "notes.txt").write_text(text.upper(), encoding="utf-8")


def into_utf16(folder, text):
    (folder / "notes.txt").write_text(text, encoding="utf-16")


def into_base64(folder, text):
    (folder / "notes.txt").write_bytes(base64.b64encode(text.encode()))


def into_file_name(folder, text):
    (folder / f"{text}.bin").touch()


@pytest.mark.parametrize(
    "hide", [into_json, into_metadata, into_upper_case, into_utf16, into_base64, into_file_name]
)
def test_search_finds_every_text(hide, bundle, secrets, tmp_path):
    for number, text in enumerate((*CLASSES, WARD, MARKER)):
        folder = shutil.copytree(bundle, tmp_path / str(number))
        hide(folder, text)
        assert text in {found for _, found in leaks(folder, set(), secrets[1])}
