"What leaves a client is exactly the bundle, with nothing private in it; the server refuses a bundle that is not right."
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
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from harmomoe.bundle import ADAPTER, ADAPTER_FILES, FILES, PROXIES, ROUTING, read_bundle
from harmomoe.core import MANIFEST, seeded, write_manifest
from harmomoe.domains import fingerprint, load_domain
from harmomoe.experts import load_expert
from harmomoe.layer import RouterSettings
from harmomoe.proxies import ProxySet
from harmomoe.relevance import linear_probe
from harmomoe.context import FORMS
from harmomoe.routing import layer_means
from harmomoe.seed import ImageSeed
from harmomoe.unify import run_client
from helpers import kept

CONFIG_FILE, TENSORS_FILE = ADAPTER_FILES
RUN = 24  # so many bytes of private data in a row, in any of the renderings below, are a leak


# ---- the search

def readable(path):
    "A file's bytes as they are; and as a reader would see them: parquet columns unpacked, JSON without escapes."
    found = [path.name.encode(), path.read_bytes()]
    if path.suffix == ".parquet":
        table = pq.read_table(path)
        found += [item for pair in (table.schema.metadata or {}).items() for item in pair]
        for column in table.columns:
            found += [buffer.to_pybytes() for chunk in column.chunks for buffer in chunk.buffers() if buffer]
    if path.suffix == ".json": found.append(json.dumps(json.loads(path.read_text()), ensure_ascii=False).encode())
    return found


def runs(data):
    return {data[i:i + RUN] for i in range(len(data) - RUN + 1)}


def leaks(folder, data_runs, texts):
    "What of the private data the files of a folder hold: (file, 'data') or (file, text)."
    found = set()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        for content in readable(path):
            if not data_runs.isdisjoint(runs(content)): found.add((path.name, "data"))
            found |= {(path.name, text) for text in texts if any(form in content for form in spellings(text))}
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
    found = {"encoded": encoded[41:-12],             # without the header and last chunk that all PNG share
             "rgb": pixels.tobytes(), "planes": pixels.transpose(2, 0, 1).tobytes(),
             "grey": pixels.mean(2).astype(np.uint8).tobytes()}
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
    for part in (domain.train, domain.validation, domain.test): part.info.description = MARKER
    return domain


@pytest.fixture(scope="module")
def secrets(private, tiny_seed, tiny_embeddings, tiny_settings):
    "All runs of bytes and all texts that must not leave, and one rendering of each kind for the control."
    data, samples = set(), {}
    texts = [*CLASSES, *(name.replace("_", " ") for name in CLASSES), WARD, MARKER]
    for part in (private.train, private.validation, private.test):
        digests = [fingerprint(part), fingerprint(part, content=True), part._fingerprint]
        for row in part:
            path = row["image"].filename
            encoded = open(path, "rb").read()
            digests += [hashlib.new(kind, encoded).hexdigest() for kind in ("md5", "sha1", "sha256")]
            texts += [path, path.rpartition("/")[2]]
            samples = renderings(np.asarray(row["image"]), encoded, tiny_seed)
            data = data.union(*map(runs, samples.values()))
        texts += digests
        embeddings = tiny_seed.embed(part)
        scores = linear_probe(embeddings.numpy(), tiny_embeddings).private if part is private.train else np.zeros(0)
        inputs = [tiny_seed.tower.conv1(batch["images"]).flatten(1) for batch in tiny_seed.batches(part)][0].detach()
        for values in (embeddings, inputs, torch.from_numpy(scores)):
            for dtype in (torch.float16, torch.float32, torch.float64):
                for row in values.to(dtype).reshape(len(values), -1) if values.ndim > 1 else [values.to(dtype)]:
                    data |= runs(row.contiguous().numpy().tobytes())
    samples["embedding"] = embeddings[0].numpy().tobytes()
    return data, texts, samples


@pytest.fixture(scope="module")
def bundle(private, tiny_seed, tiny_benchmark, tiny_embeddings, tiny_settings, tmp_path_factory):
    folder = tmp_path_factory.mktemp("work") / "clinic"
    return run_client(private, tiny_seed, tiny_benchmark.pool, tiny_embeddings, tiny_settings, folder)


@pytest.fixture(scope="module")
def bundles(bundle, private, tiny_seed, tiny_benchmark, tiny_embeddings, tiny_settings, tmp_path_factory):
    "form of the routing vectors -> the bundle with them, of the same expert."
    found = dict(mean=bundle)
    for form in FORMS.keys() - found.keys():
        folder = shutil.copytree(bundle.parent, tmp_path_factory.mktemp(form) / "clinic")
        settings = replace(tiny_settings, router=RouterSettings(initial=form))
        found[form] = run_client(private, tiny_seed, tiny_benchmark.pool, tiny_embeddings, settings, folder)
    return found


def test_bundle_is_exactly_four_files_and_their_manifest(bundle):
    found = [path.relative_to(bundle).as_posix() for path in bundle.rglob("*") if not path.is_dir()]
    assert sorted(found) == sorted([*FILES, MANIFEST])
    assert not any(path.is_symlink() for path in bundle.rglob("*"))


def test_nothing_private_is_in_the_bundle(bundle, secrets):
    data, texts, _ = secrets
    assert len(data) > 100_000 and len(texts) > 100
    assert leaks(bundle, data, texts) == set()


@pytest.mark.parametrize("form", ["logistic", "moments"])
def test_nothing_private_is_in_a_bundle_with_another_form_of_vectors_either(form, bundles, secrets):
    data, texts, _ = secrets
    assert sorted(path.relative_to(bundles[form]).as_posix() for path in bundles[form].rglob("*") if path.is_file()) \
        == sorted([*FILES, MANIFEST])
    assert leaks(bundles[form], data, texts) == set()


def test_routing_vectors_sum_up_all_samples_and_repeat_none(bundles, private, tiny_seed, tmp_path):
    tower, data = load_expert(tiny_seed, bundles["mean"] / ADAPTER), set()
    for values in (layer_means(tiny_seed, one, private.train, spread=True) for one in (tower, tiny_seed.tower)):
        for row in values.flatten(0, 1): data |= runs(row.numpy().tobytes())
    assert {form: leaks(bundle, data, []) for form, bundle in bundles.items()} == dict.fromkeys(FORMS, set())
    for name, part in (("mean", values[:, 0, :64]), ("spread", values[:, 0, 64:])):     # those of a single sample
        one = shutil.copytree(bundles["moments"], tmp_path / name)                      # would be found
        save_file(dict(vectors=part.contiguous()), one / ROUTING)
        assert leaks(one, data, []) == {(ROUTING, "data")}


@pytest.mark.parametrize("form, width", [("mean", 64), ("logistic", 64), ("moments", 128)])
def test_routing_file_holds_a_vector_and_a_number_a_layer_and_the_form(form, width, bundles):
    with safe_open(bundles[form] / ROUTING, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        assert file.metadata() == dict(form=form)
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()} \
        == dict(vectors=((2, width), torch.float32), biases=((2,), torch.float32))
    assert tensors["biases"].any() == (form != "mean")


def test_names_of_the_files_tensors_columns_and_fields_are_the_known_ones(bundle, private, tiny_seed):
    "A positive list beside the search: what is in a bundle is there on purpose."
    manifest = json.loads((bundle / MANIFEST).read_text())
    assert manifest.keys() == {"kind", "format", "inputs", "facts", "versions", "files"}
    assert manifest["inputs"].keys() == {"seed", "pool", "settings"}
    assert manifest["inputs"]["seed"] == tiny_seed.identity
    assert manifest["facts"] == dict(client="clinic", private_samples=len(private.train), proxies=12)
    assert load_file(bundle / TENSORS_FILE).keys() == {
        f"base_model.model.{layer}.{linear}.lora_{x}.weight"
        for layer in tiny_seed.layers for linear in ("c_fc", "c_proj") for x in "AB"}
    assert load_file(bundle / ROUTING).keys() == {"vectors", "biases"}
    assert pq.read_schema(bundle / PROXIES).names == ["ids", "relevance", "gains"]
    assert set(pq.read_schema(bundle / PROXIES).metadata) == {b"format", b"method", b"pool_fingerprint", b"settings"}


def test_search_finds_the_fingerprint_and_the_scores_that_the_client_keeps_for_itself(bundle, secrets):
    data, texts, _ = secrets
    [expert], [relevance] = (kept(bundle.parent, kind) for kind in ("expert", "relevance"))
    assert {name for name, _ in leaks(expert, data, texts)} == {MANIFEST}
    assert ("relevance.npz", "data") in leaks(relevance, data, texts)


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
    with (folder / TENSORS_FILE).open("ab") as open_file: open_file.write(piece)
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
        place = hide(folder, sample[11:11 + RUN])
        assert leaks(folder, data, []) == {(place, "data")}, name


def into_json(folder, text): (folder / MANIFEST).write_text(json.dumps(dict(note=[text])))


def into_metadata(folder, text):
    table = pq.read_table(folder / PROXIES)
    pq.write_table(table.replace_schema_metadata({b"note": text.encode()}), folder / PROXIES)


def into_upper_case(folder, text): (folder / "notes.txt").write_text(text.upper(), encoding="utf-8")


def into_utf16(folder, text): (folder / "notes.txt").write_text(text, encoding="utf-16")


def into_base64(folder, text): (folder / "notes.txt").write_bytes(base64.b64encode(text.encode()))


def into_file_name(folder, text): (folder / f"{text}.bin").touch()


@pytest.mark.parametrize("hide", [into_json, into_metadata, into_upper_case, into_utf16, into_base64, into_file_name])
def test_search_finds_every_text(hide, bundle, secrets, tmp_path):
    for number, text in enumerate((*CLASSES, WARD, MARKER)):
        folder = shutil.copytree(bundle, tmp_path / str(number))
        hide(folder, text)
        assert text in {found for _, found in leaks(folder, set(), secrets[1])}


# ---- what the server refuses

@pytest.fixture
def sent(tiny_clients, tmp_path):
    "A copy of client a's bundle, to be spoilt."
    return shutil.copytree(tiny_clients / "a" / "bundle", tmp_path / "bundle")


def reseal(folder, **changes):
    "Write the manifest of a spoilt bundle anew, so that its hashes are right."
    told = json.loads((folder / MANIFEST).read_text()) | changes
    write_manifest(folder, told["kind"], told["inputs"], **told["facts"])


def tensors(change):
    "The adapter's tensors, changed; None takes one away."
    def apply(folder):
        found = load_file(folder / TENSORS_FILE) | change
        save_file({name: tensor for name, tensor in found.items() if tensor is not None}, folder / TENSORS_FILE)
        reseal(folder)
    return apply


def settings(**changes):
    "The adapter's configuration, changed."
    def apply(folder):
        config = json.loads((folder / CONFIG_FILE).read_text()) | changes
        (folder / CONFIG_FILE).write_text(json.dumps(config))
        reseal(folder)
    return apply


def routing(layers=2, width=64, value=0., form="mean", vectors="vectors"):
    "Other routing vectors."
    def apply(folder):
        tensors = {vectors: torch.full((layers, width), value), "biases": torch.zeros(layers)}
        save_file(tensors, folder / ROUTING, metadata=dict(form=form))
        reseal(folder)
    return apply


def file(name, content=None, sealed=True):
    "A file replaced or taken away, with or without the manifest knowing."
    def apply(folder):
        (folder / name).unlink(missing_ok=True)
        if content is not None: (folder / name).write_bytes(content)
        if sealed: reseal(folder)
    return apply


def manifest(**changes):
    "The manifest's fields, changed."
    return lambda folder: reseal(folder, **changes)


def another_seed_name(folder):
    inputs = json.loads((folder / MANIFEST).read_text())["inputs"]
    reseal(folder, inputs=inputs | dict(seed=inputs["seed"] | dict(name="huge")))


FFN = "base_model.model.transformer.resblocks.0.mlp.c_fc."
A, B = f"{FFN}lora_A.weight", f"{FFN}lora_B.weight"
PLAIN = "must be a plain LoRA adapter"
SPOILT = {
    "no manifest": (file(MANIFEST, sealed=False), FileNotFoundError, "manifest.json is missing"),
    "damaged manifest": (file(MANIFEST, b"{", sealed=False), ValueError, "manifest.json is damaged"),
    "another kind": (manifest(kind="model"), ValueError, "holds a 'model', but a 'bundle' was asked for"),
    "another seed's name": (another_seed_name, ValueError, "another seed: name is 'huge' there and 'tiny' here"),
    "file changed": (file(ROUTING, b"x", sealed=False), ValueError, "was changed after it was written"),
    "file gone": (file(PROXIES, sealed=False), ValueError, "proxies.parquet missing"),
    "file never there": (file(PROXIES), ValueError, "proxies.parquet is missing"),
    "file smuggled in": (file("image.png", b"x", sealed=False), ValueError, "image.png not in the manifest"),
    "file that does not belong": (file("image.png", b"x"), ValueError, "image.png does not belong"),
    "tensor missing": (tensors({B: None}), ValueError, f"lacks the tensor {B}"),
    "tensor outside the FFNs": (tensors({"base_model.model.conv1.lora_A.weight": torch.zeros(4, 4)}), ValueError,
                                "changes base_model.model.conv1.lora_A.weight, which is not in an FFN"),
    "bias of an FFN": (tensors({f"{FFN}bias": torch.zeros(256)}), ValueError, "which is not in an FFN sublayer"),
    "other width": (tensors({A: torch.zeros(4, 63)}), ValueError, r"\(4, 63\).*\(4, 64\)"),
    "other rank": (tensors({A: torch.zeros(5, 64), B: torch.zeros(256, 5)}), ValueError, "rank 4 need"),
    "other rank in the config": (settings(r=8), ValueError, "rank 8 need"),
    "rank 0": (settings(r=0), ValueError, "rank 0 need"),
    "NaN": (tensors({A: torch.full((4, 64), torch.nan)}), ValueError, "resblocks.0.mlp.c_fc is not finite"),
    "infinity": (tensors({B: torch.full((256, 4), torch.inf)}), ValueError, "resblocks.0.mlp.c_fc is not finite"),
    "DoRA": (settings(use_dora=True), ValueError, f"{PLAIN}.*use_dora"),
    "LoRA with bias": (settings(lora_bias=True), ValueError, f"{PLAIN}.*lora_bias"),
    "trained biases": (settings(bias="all"), ValueError, f"{PLAIN}.*bias='all'"),
    "rank pattern": (settings(rank_pattern={"c_fc": 2}), ValueError, f"{PLAIN}.*rank_pattern"),
    "alpha pattern": (settings(alpha_pattern={"c_fc": 2}), ValueError, f"{PLAIN}.*alpha_pattern"),
    "whole modules": (settings(modules_to_save=["proj"]), ValueError, f"{PLAIN}.*modules_to_save"),
    "start that changes the seed": (settings(init_lora_weights="pissa"), ValueError, f"{PLAIN}.*init_lora_weights"),
    "another PEFT method": (settings(peft_type="IA3"), ValueError, f"{PLAIN}, but is IA3"),
    "vectors of a deeper model": (routing(layers=3), ValueError, r"vectors \[2, 64\], but is \(3, 64\)"),
    "vectors of a wider model": (routing(width=65), ValueError, r"vectors \[2, 64\], but is \(2, 65\)"),
    "vectors not finite": (routing(value=torch.nan), ValueError, "must hold finite numbers"),
    "vectors with spreads where there are none": (routing(width=128, form="logistic"), ValueError,
                                                  r"vectors \[2, 64\], but is \(2, 128\)"),
    "means with spreads": (routing(width=128), ValueError, r"vectors \[2, 64\], but is \(2, 128\)"),
    "vectors that lack the spreads": (routing(form="moments"), ValueError,
                                      r"vectors \[2, 128\], but is \(2, 64\)"),
    "vectors with half of the spreads": (routing(width=127, form="moments"), ValueError, r"but are \(2, 127\)"),
    "vectors of another form": (routing(form="random"), ValueError, "is 'random', but must be .*mean.* logistic"),
    "proxies no parquet": (file(PROXIES, b"nothing"), ValueError, "proxies.parquet can't be read as parquet"),
}


@pytest.mark.parametrize("what", SPOILT)
def test_spoilt_bundle_is_refused_saying_what_and_where(what, sent, tiny_seed):
    spoil, error, said = SPOILT[what]
    read_bundle(sent, tiny_seed)                              # until here it is good
    spoil(sent)
    with pytest.raises(error, match=said) as caught: read_bundle(sent, tiny_seed)
    assert str(sent) in str(caught.value)


MALFORMED = {"seed is null": manifest(inputs=dict(seed=None)), "no seed": manifest(inputs={}),
             "no client": manifest(facts={}), "no vectors": routing(vectors="other"),
             "vectors no safetensors": file(ROUTING, b"nothing"),
             "tensors no safetensors": file(TENSORS_FILE, b"nothing"),
             "config no JSON": file(CONFIG_FILE, b"nothing"), "config no object": file(CONFIG_FILE, b"[]"),
             "config without rank": file(CONFIG_FILE, b'{"peft_type": "LORA"}')}


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_bundle_is_refused_with_the_documented_errors(what, sent, tiny_seed):
    MALFORMED[what](sent)
    with pytest.raises((ValueError, FileNotFoundError)) as caught: read_bundle(sent, tiny_seed)
    assert str(sent) in str(caught.value)


def test_bundle_of_another_seed_is_refused(sent, tiny_seed, tiny_config):
    import open_clip
    with seeded(1): clip = open_clip.CLIP(**tiny_config)
    clip.visual.preprocess_cfg = dict(tiny_seed.preprocess_config)
    other = ImageSeed(clip, tiny_seed.tokenizer, tiny_config, tiny_seed.name, tiny_seed.prompt)
    with pytest.raises(ValueError, match="another seed: weights is .* All clients must start from the same seed"):
        read_bundle(sent, other)


def test_bundle_of_another_prompt_or_preprocessing_is_refused(sent, tiny_seed):
    for key, value in (("prompt", "a {}"), ("preprocess_config", tiny_seed.preprocess_config | dict(mean=(0, 0, 0)))):
        other = ImageSeed(tiny_seed.clip, tiny_seed.tokenizer, tiny_seed.config, tiny_seed.name, tiny_seed.prompt)
        setattr(other, key, value)
        with pytest.raises(ValueError, match="made with another seed: pr"): read_bundle(sent, other)


def test_bundle_of_another_pool_is_refused(sent, tiny_seed, tiny_benchmark):
    read_bundle(sent, tiny_seed, fingerprint(tiny_benchmark.pool.train))
    with pytest.raises(ValueError, match="the pool at hand is"):
        read_bundle(sent, tiny_seed, fingerprint(tiny_benchmark.pool.train.select(range(89))))


# ---- what the server gets

def test_bundle_read_is_what_was_sent(tiny_clients, tiny_seed, tiny_bundles, tiny_settings, tiny_benchmark):
    for name, client, got in zip("abc", tiny_benchmark.clients, tiny_bundles):
        folder = tiny_clients / name
        [expert], [routing], [proxies] = (kept(folder, kind) for kind in ("expert", "routing", "proxies"))
        stored = load_file(expert / TENSORS_FILE)
        assert got.client == name and got.scale == 2.
        assert list(got.factors) == [(layer, linear) for layer in tiny_seed.layers for linear in ("c_fc", "c_proj")]
        for (layer, linear), pair in got.factors.items():
            for x, factor in zip("AB", pair):
                assert torch.equal(factor, stored[f"base_model.model.{layer}.{linear}.lora_{x}.weight"])
        stored = load_file(routing / ROUTING)
        assert got.routing.form == "mean" and stored.keys() == {"vectors", "biases"}
        for part in stored: assert torch.equal(getattr(got.routing, part), stored[part])
        assert np.array_equal(got.proxies.ids, ProxySet.load(proxies / PROXIES).ids)
        assert got.bytes == sum(path.stat().st_size for path in (folder / "bundle").rglob("*") if path.is_file())
        assert got.manifest["facts"] == dict(client=name, private_samples=len(client.train), proxies=12)
        assert got.manifest["inputs"]["settings"]["rank"] == tiny_settings.rank


def test_bundle_is_where_it_is_read_not_where_it_was_written(sent, tiny_seed, tiny_bundles):
    assert torch.equal(read_bundle(sent, tiny_seed).routing.vectors, tiny_bundles[0].routing.vectors)


def test_bundle_names_no_file_of_the_machine_that_made_it(tiny_clients, tiny_folder, tiny_seed_folder):
    for path in (tiny_clients / "b" / "bundle").rglob("*"):
        for secret in (str(tiny_clients), str(tiny_folder), str(tiny_seed_folder.parent)):
            assert path.is_dir() or secret.encode() not in path.read_bytes(), path


def test_rank_stabilised_adapter_has_its_own_scale(sent, tiny_seed):
    settings(use_rslora=True)(sent)
    assert read_bundle(sent, tiny_seed).scale == pytest.approx(8 / 4 ** .5)


def test_bundle_holds_an_adapter_that_peft_opens(tiny_clients, tiny_seed, tiny_bundles):
    from peft import PeftModel
    model = PeftModel.from_pretrained(tiny_seed.new_tower(), str(tiny_clients / "a" / "bundle" / "adapter"))
    assert model.peft_config["default"].base_model_name_or_path == "tiny"
    own = {name: p for name, p in model.named_parameters() if "lora" in name}
    for (layer, linear), (a, b) in tiny_bundles[0].factors.items():
        assert torch.equal(own[f"base_model.model.{layer}.{linear}.lora_A.default.weight"], a)
        assert torch.equal(own[f"base_model.model.{layer}.{linear}.lora_B.default.weight"], b)
