"""A bundle is read as it was written, or refused: what a stranger may send, one defect at a
time."""

import json
import os
import shutil
from dataclasses import asdict, replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers import kept, routing_of, socket_at
from safetensors.torch import load_file, save_file

from harmomoe.base.artefacts import MANIFEST, write_manifest
from harmomoe.base.process import seeded
from harmomoe.bundle.files import (
    ADAPTER,
    ADAPTER_FILES,
    FILES,
    PROXIES,
    ROUTING,
    read_bundle,
    write_bundle,
)
from harmomoe.bundle.manifest import Limits
from harmomoe.client.expert import load_expert
from harmomoe.config.settings import changed
from harmomoe.describe.proxies import ProxySet
from harmomoe.describe.routing import load_routing
from harmomoe.models.clip import ImageSeed

CONFIG_FILE, TENSORS_FILE = ADAPTER_FILES


@pytest.fixture
def sent(tiny_clients, tmp_path):
    "A copy of client a's bundle, to be spoilt."
    return shutil.copytree(tiny_clients / "a" / "bundle", tmp_path / "bundle")


# ---- what spoils a bundle: functions that are given its folder


def told(folder):
    "What its manifest says."
    return json.loads((folder / MANIFEST).read_text())


def reseal(folder):
    "Write the manifest of a spoilt bundle anew, so that its hashes are right."
    said = told(folder)
    write_manifest(folder, said["kind"], said["inputs"], **said["facts"])


def manifest(**changes):
    "The manifest's fields, changed."
    return lambda folder: (folder / MANIFEST).write_text(json.dumps(told(folder) | changes))


def facts(**changes):
    "What it says of the client, changed."
    return lambda folder: manifest(facts=told(folder)["facts"] | changes)(folder)


def inputs(**changes):
    "What it says that the bundle was made from, changed."
    return lambda folder: manifest(inputs=told(folder)["inputs"] | changes)(folder)


def seed(**changes):
    "What it says of the seed, changed."
    return lambda folder: inputs(seed=told(folder)["inputs"]["seed"] | changes)(folder)


def listed(name, **changes):
    "What it says of one file, changed; of another than the four, what it says of `ROUTING`."

    def apply(folder):
        files = told(folder)["files"]
        manifest(files=files | {name: files.get(name, files[ROUTING]) | changes})(folder)

    return apply


def text(old, new):
    "What the manifest says, changed as text."

    def apply(folder):
        content = (folder / MANIFEST).read_text()
        assert old in content
        (folder / MANIFEST).write_text(content.replace(old, new, 1))

    return apply


def deep(folder):
    "Settings nested so deeply that a copy of them would exhaust the stack."
    inputs(settings="SETTINGS")(folder)
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text.replace('"SETTINGS"', '{"a":' * 900 + "1" + "}" * 900))


def file(name, content=None, sealed=True):
    "A file replaced or taken away, with or without the manifest knowing."

    def apply(folder):
        (folder / name).unlink(missing_ok=True)
        if content is not None:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
        if sealed:
            reseal(folder)

    return apply


def link(name, target=None):
    "A file or folder that is a link: to where it was moved, or to `target`."

    def apply(folder):
        place, elsewhere = folder / name, folder.parent / "elsewhere"
        place.rename(elsewhere)
        place.symlink_to(target or elsewhere)

    return apply


def instead(name, make):
    "Something else where a file should be, or beside the files."

    def apply(folder):
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return apply


def crowd(folder):
    "More files than anybody should count."
    for number in range(2000):
        (folder / f"{number}").touch()


def sparse(name, size):
    "A file that says that it is huge, and takes no space."
    return lambda folder: os.truncate(folder / name, size)


def tensors(changes):
    "The adapter's tensors, changed; None takes one away."

    def apply(folder):
        found = load_file(folder / TENSORS_FILE) | changes
        found = {name: tensor for name, tensor in found.items() if tensor is not None}
        save_file(found, folder / TENSORS_FILE)
        reseal(folder)

    return apply


def config(**changes):
    "The adapter's configuration, changed."

    def apply(folder):
        found = json.loads((folder / CONFIG_FILE).read_text()) | changes
        (folder / CONFIG_FILE).write_text(json.dumps(found))
        reseal(folder)

    return apply


def routing(
    layers=2,
    width=64,
    value=0.0,
    form="mean",
    dtype=torch.float32,
    vectors="vectors",
    beside=False,
):
    "Other routing vectors, in place of those that were sent or beside them."

    def apply(folder):
        found = load_file(folder / ROUTING) if beside else {}
        found[f"{form}.{vectors}"] = torch.full((layers, width), value, dtype=dtype)
        found[f"{form}.biases"] = torch.zeros(layers)
        save_file(found, folder / ROUTING)
        reseal(folder)

    return apply


def added(**more):
    "Tensors beside the routing vectors; a double underscore stands for a point."

    def apply(folder):
        more_ = {name.replace("__", "."): tensor for name, tensor in more.items()}
        save_file(load_file(folder / ROUTING) | more_, folder / ROUTING)
        reseal(folder)

    return apply


def ids(values, kind=pa.int64(), name="id", metadata={}, **more):
    "Another list of proxies; the manifest says how many."

    def apply(folder):
        label = pq.read_schema(folder / PROXIES).metadata | metadata
        table = pa.table({name: pa.array(values, kind)} | more)
        pq.write_table(table.replace_schema_metadata(label), folder / PROXIES)
        facts(proxies=len(table))(folder)
        reseal(folder)

    return apply


FFN = "base_model.model.transformer.resblocks.0.mlp.c_fc."
A, B = f"{FFN}lora_A.weight", f"{FFN}lora_B.weight"
PLAIN, LINK = "must be a plain LoRA adapter", "is no bundle: {} is a link"
NOT_FINITE = "resblocks.0.mlp.c_fc is not finite"
HUGE = "factors of transformer.resblocks.0.mlp.c_fc are so large .* times its norm"


# ---- the folder

FOLDER = {
    "no manifest": (file(MANIFEST, sealed=False), "manifest.json is missing"),
    "folder of nothing": (instead("more", os.mkdir), "more does not belong"),
    "folder in the adapter": (instead("adapter/more", os.mkdir), "adapter/more does not belong"),
    "pipe beside the files": (instead("more", os.mkfifo), "more does not belong"),
    "socket beside the files": (instead("adapter/x", socket_at), "adapter/x does not belong"),
    "link beside the files": (instead("x", lambda p: p.symlink_to("/etc")), "x does not belong"),
    "thousands of files": (crowd, "does not belong"),
    "name in two lines": (file("a\nb", b"x", sealed=False), "no bundle: a b does not belong"),
    "name that steers": (file("a\x1b[2J", b"x", sealed=False), r"a.x1b.2J does not belong"),
    "name of no text": (file("a\udcff", b"x", sealed=False), r"a.udcff does not belong"),
    "file gone": (file(PROXIES, sealed=False), "proxies.parquet is missing"),
    "file never there": (file(PROXIES), "proxies.parquet is missing"),
    "file smuggled in": (file("image.png", b"x", sealed=False), "image.png does not belong"),
    "file that the manifest lists": (file("image.png", b"x"), "image.png does not belong"),
    "hidden file": (file(".image", b"x"), ".image does not belong"),
    "file beside the adapter": (file("adapter/notes.txt", b"x"), "adapter/notes.txt does not"),
    "file in a folder": (file("more/notes.txt", b"x"), "more does not belong"),
    "second manifest": (file("adapter/manifest.json", b"{}"), "adapter/manifest.json does not"),
    "pickle": (file("adapter/adapter_model.bin", b"x"), "adapter_model.bin does not belong"),
    "link to what it was": (link(ROUTING), LINK.format(ROUTING)),
    "link to nothing": (link(ROUTING, "nowhere"), LINK.format(ROUTING)),
    "link to the machine's own": (link(PROXIES, "/etc/hosts"), LINK.format(PROXIES)),
    "manifest that is a link": (link(MANIFEST), LINK.format(MANIFEST)),
    "adapter that is a link": (link(ADAPTER), LINK.format(ADAPTER)),
    "folder in place of a file": (instead(ROUTING, os.mkdir), f"{ROUTING} is a folder"),
    "folder in place of the manifest": (instead(MANIFEST, os.mkdir), "manifest.json is a folder"),
    "pipe": (instead(PROXIES, os.mkfifo), "proxies.parquet is a pipe"),
    "pipe in place of the manifest": (instead(MANIFEST, os.mkfifo), "manifest.json is a pipe"),
    "socket": (instead(CONFIG_FILE, socket_at), "config.json is no ordinary file"),
    "device": (instead(TENSORS_FILE, lambda p: p.symlink_to("/dev/zero")), "safetensors is a link"),
    "manifest of a gigabyte": (
        sparse(MANIFEST, 2**30),
        "manifest.json has 1,073,741,824 bytes, but may have 1,048,576",
    ),
    "configuration of a gigabyte": (sparse(CONFIG_FILE, 2**30), "config.json has 1,073,741,824"),
    "adapter of a terabyte": (sparse(TENSORS_FILE, 2**40), "takes bundles of at most 2,147,483"),
    "file changed": (file(ROUTING, b"x", sealed=False), "was changed after it was written"),
}

# ---- what the manifest says

SAID = {
    "no JSON": (file(MANIFEST, b"{", sealed=False), "manifest.json is no JSON"),
    "no object": (file(MANIFEST, b"[]", sealed=False), r"manifest.json: it is \[\]"),
    "nested without end": (file(MANIFEST, b"[" * 10**5, sealed=False), "nested deeper than"),
    "settings nested deeply": (deep, "nested deeper than"),
    "another kind": (manifest(kind="model"), "kind is 'model'"),
    "another format": (manifest(format=2), "format is 2"),
    "a field more": (manifest(data="..."), "unknown field 'data'"),
    "no seed": (manifest(inputs={}), "'inputs.seed' is missing"),
    "seed is null": (inputs(seed=None), "inputs.seed is None"),
    "empty seed": (inputs(seed={}), "another seed: name is None there and 'tiny' here"),
    "another seed's name": (seed(name="huge"), "another seed: name is 'huge' there and 'tiny'"),
    "another seed's weights": (seed(weights="0" * 64), "another seed: weights is '000"),
    "weights that are no text": (seed(weights=[1]), r"another seed: weights is \[1\]"),
    "another pool": (inputs(pool="0" * 64), "number the samples of pool 000000000000"),
    "no pool": (inputs(pool=""), "a pool that they do not name"),
    "no facts": (manifest(facts={}), "'facts.client' is missing"),
    "name that is a path": (facts(client="../../a"), "client's name '../../a' must be"),
    "name of the root": (facts(client="/a"), "client's name '/a' must be"),
    "name of the seed": (facts(client="seed"), "not be 'seed'"),
    "name that is hidden": (facts(client=".a"), "client's name '.a' must be"),
    "name with a blank": (facts(client="St. Mary"), "client's name 'St. Mary' must be"),
    "name that no folder can have": (facts(client="\U0001d49c" * 100), "must be 1 to 64"),
    "name of half a character": (facts(client="\ud800"), "must be 1 to 64"),
    "name that is a list": (facts(client=["a"]), r"facts.client is \['a'\]"),
    "name of a million letters": (facts(client="x" * 10**6), "client's name 'xxx"),
    "negative count": (facts(private_samples=-1), "private_samples is -1"),
    "count that is not a number": (facts(proxies=float("nan")), "NaN is no finite number"),
    "infinite count": (facts(proxies=1e400), "Infinity is no finite number"),
    "count beyond float64": (text('"proxies": 12', '"proxies": 1e400'), "1e400 is no finite"),
    "count of 400 digits": (facts(proxies=10**400), "10000000000000000000 is no finite number"),
    "count of 300 digits": (facts(private_samples=10**300), "private_samples is 1000000"),
    "count that is true": (facts(private_samples=True), "private_samples is True"),
    "count with a point": (facts(private_samples=30.0), "private_samples is 30.0"),
    "count as text": (facts(private_samples="30"), "private_samples is '30'"),
    "other count of proxies": (facts(proxies=13), "says 13 proxies, but proxies.parquet has 12"),
    "number in the settings": (inputs(settings=dict(a=float("nan"))), "NaN is no finite number"),
    "key twice": (text('"kind"', '"kind": "model", "kind"'), "the key 'kind' occurs twice"),
    "key twice further in": (text('"client"', '"client": "b", "client"'), "'client' occurs twice"),
    "no UTF-8": (file(MANIFEST, b'{"kind": "\xff"}', sealed=False), "is no JSON .*utf-8"),
    "pool in two lines": (inputs(pool="a\nb"), "pool must be one line of text"),
    "pool that steers": (inputs(pool="\x1b[2J"), "pool must be one line of text"),
    "list for facts": (manifest(facts=[]), r"facts is \[\]"),
    "list for files": (manifest(files=[]), r"files is \[\]"),
    "list for versions": (manifest(versions=[1]), r"versions is \[1\]"),
    "secret fact": (facts(diagnosis="..."), "unknown field 'facts.diagnosis'"),
    "file elsewhere": (listed("../elsewhere"), "manifest.json: ../elsewhere is listed, but"),
    "file at the root": (listed("/etc/passwd"), "/etc/passwd is listed, but does not belong"),
    "file of Windows": (listed("..\\x"), r"..x is listed, but does not belong"),
    "file in two lines": (listed("a\nb"), "a b is listed, but"),
    "file that steers": (listed("\x1b[2J"), r".x1b.2J is listed, but"),
    "the manifest itself": (listed(MANIFEST), "manifest.json is listed, but"),
    "no files": (manifest(files={}), "config.json is not listed"),
    "digest that is none": (listed(ROUTING, sha256="abc"), "must be 64 hexadecimal digits"),
    "size that is not true": (listed(ROUTING, bytes=1), "bytes, but .* says 1"),
    "negative size": (listed(ROUTING, bytes=-1), "bytes, but .* says -1"),
}

# ---- the adapter

ADAPTERS = {
    "tensor missing": (tensors({B: None}), f"lacks the tensor {B}"),
    "tensor outside the FFNs": (
        tensors({"base_model.model.conv1.lora_A.weight": torch.zeros(4, 4)}),
        "changes base_model.model.conv1.lora_A.weight, which is not in an FFN",
    ),
    "bias of an FFN": (
        tensors({f"{FFN}bias": torch.zeros(256)}),
        "which is not in an FFN sublayer",
    ),
    "other width": (tensors({A: torch.zeros(4, 63)}), r"\(4, 63\).*\(4, 64\)"),
    "other rank": (tensors({A: torch.zeros(5, 64), B: torch.zeros(256, 5)}), "rank 4 need"),
    "no dimensions": (tensors({A: torch.tensor(1.0)}), r"has factors \(\) and"),
    "nothing in it": (tensors({A: torch.zeros(0, 64), B: torch.zeros(256, 0)}), "rank 4 need"),
    "NaN": (tensors({A: torch.full((4, 64), torch.nan)}), NOT_FINITE),
    "infinity": (tensors({B: torch.full((256, 4), torch.inf)}), NOT_FINITE),
    "one infinity": (tensors({B: torch.eye(256)[:, :4] / torch.eye(256)[:, :4]}), NOT_FINITE),
    "beyond float32": (tensors({A: torch.full((4, 64), 1e300, dtype=torch.float64)}), NOT_FINITE),
    "product beyond float32": (
        tensors({A: torch.full((4, 64), 1e30), B: torch.full((256, 4), 1e30)}),
        HUGE,
    ),
    "factors that balance": (
        tensors({A: torch.full((4, 64), 1e-20), B: torch.full((256, 4), 1e25)}),
        HUGE,
    ),
    "change that drowns the weights": (tensors({B: torch.full((256, 4), 1e4)}), HUGE),
    "whole numbers": (tensors({A: torch.ones(4, 64).long()}), NOT_FINITE),
    "complex numbers": (tensors({A: torch.ones(4, 64).to(torch.complex64)}), NOT_FINITE),
    "eight bits": (tensors({A: torch.ones(4, 64).to(torch.float8_e4m3fn)}), NOT_FINITE),
    "four bits": (
        tensors({A: torch.ones(4, 64, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}),
        NOT_FINITE,
    ),
    "no safetensors": (file(TENSORS_FILE, b"nothing"), "is no safetensors file"),
    "empty": (file(TENSORS_FILE, b""), "is no safetensors file"),
    "pickle": (file(TENSORS_FILE, b"\x80\x04K\x01."), "is no safetensors file"),
    "config no JSON": (file(CONFIG_FILE, b"nothing"), "adapter_config.json is no JSON"),
    "config no object": (file(CONFIG_FILE, b"[]"), r"it is \[\]"),
    "config nested": (file(CONFIG_FILE, b"[" * 10**5), "nested deeper than"),
    "config without rank": (file(CONFIG_FILE, b'{"peft_type": "LORA"}'), "'r' is missing"),
    "other rank in the config": (config(r=8), "rank 8 need"),
    "rank beyond all numbers": (config(r=10**400), "10000000000000000000 is no finite number"),
    "rank of 300 digits": (config(r=10**300), "r is 1000000.* takes ranks of at most 256"),
    "rank above the limit": (config(r=257), "r is 257, but the server takes ranks of at most 256"),
    "rank that is true": (config(r=True), "r is True"),
    "rank with a point": (config(r=4.0), "r is 4.0"),
    "rank 0": (config(r=0), "r is 0 and lora_alpha 8.0, but both must be positive"),
    "negative rank": (config(r=-4), "r is -4"),
    "rank in words": (config(r="four"), "r is 'four'"),
    "alpha is not a number": (config(lora_alpha=float("nan")), "NaN is no finite number"),
    "alpha is infinite": (config(lora_alpha=1e400), "Infinity is no finite number"),
    "alpha is negative": (config(lora_alpha=-8), "lora_alpha -8.0"),
    "alpha is 0": (config(lora_alpha=0), "lora_alpha 0.0, but both must be positive"),
    "alpha is 1e30": (config(lora_alpha=1e30), r"lora_alpha 1e\+30, but .* at most 1000000"),
    "alpha as text": (config(lora_alpha="8"), "lora_alpha is '8'"),
    "alpha that drowns the weights": (config(lora_alpha=1e6), "are so large"),
    "DoRA": (config(use_dora=True), f"{PLAIN}.*use_dora"),
    "trained biases": (config(bias="all"), f"{PLAIN}.*bias is 'all'"),
    "rank pattern": (config(rank_pattern={"c_fc": 2}), f"{PLAIN}.*rank_pattern"),
    "whole modules": (config(modules_to_save=["proj"]), f"{PLAIN}.*modules_to_save"),
    "start that changes the seed": (config(init_lora_weights="pissa"), "init_lora_weights is 'pi"),
    "another PEFT method": (config(peft_type="IA3"), f"{PLAIN}, but is 'IA3'"),
    "layers twice": (config(layer_replication=[[0, 2], [0, 2]]), f"{PLAIN}.*layer_replication"),
    "transposed": (config(fan_in_fan_out=True), f"{PLAIN}.*fan_in_fan_out"),
    "other parameters": (config(target_parameters=["a"]), f"{PLAIN}.*target_parameters"),
    "some layers only": (config(layers_to_transform=[0]), f"{PLAIN}.*layers_to_transform"),
    "field of a later PEFT": (config(use_rings=True), f"{PLAIN}.*use_rings.*not known here"),
    "name of a tensor in two lines": (tensors({"a\nb": torch.zeros(1)}), "changes a b, which"),
    "name of a tensor without end": (tensors({"a" * 10**5: torch.zeros(1)}), "changes aaa"),
}

# ---- routing vectors and proxies

HALF, NAMES = torch.float64, "must hold 'FORM.vectors' and 'FORM.biases' .* but"
DESCRIPTIONS = {
    "no vectors": (routing(vectors="other"), f"{NAMES} holds mean.biases, mean.other"),
    "no safetensors": (file(ROUTING, b"nothing"), "is no safetensors file"),
    "vectors of a deeper model": (
        routing(layers=3),
        r"(mean|logistic).vectors \[2, 64\], but they are \(3, 64\)",
    ),
    "vectors of a wider model": (
        routing(width=65),
        r"(mean|logistic).vectors \[2, 64\], but they are \(2, 65\)",
    ),
    "vectors of no layer": (
        routing(layers=0),
        r"(mean|logistic).vectors \[2, 64\], but they are \(0, 64\)",
    ),
    "vectors not finite": (routing(value=torch.nan), "must hold finite numbers"),
    "vectors beyond float32": (routing(value=1e300, dtype=HALF), "must hold finite numbers"),
    "vectors with spreads where there are none": (
        routing(width=128, form="logistic"),
        r"(mean|logistic).vectors \[2, 64\], but they are \(2, 128\)",
    ),
    "means with spreads": (
        routing(width=128),
        r"(mean|logistic).vectors \[2, 64\], but they are \(2, 128\)",
    ),
    "no spreads": (routing(form="moments"), r"moments.vectors \[2, 128\], but they are \(2, 64\)"),
    "half of the spreads": (
        routing(width=127, form="moments"),
        r"form 'moments': .*but are \(2, 127\)",
    ),
    "no hidden activations": (
        routing(width=256, form="evidence"),
        r"evidence.vectors \[2, 1280\], but they are \(2, 256\)",
    ),
    "no squares": (
        routing(width=1278, form="evidence", beside=True),
        r"form 'evidence': .*4 \(d \+ m\)\] and \[layers\], but are \(2, 1278\)",
    ),
    "fewer components": (
        routing(width=128, form="density", beside=True),
        r"density.vectors \[2, 8384\], but they are \(2, 128\)",
    ),
    "no density": (
        routing(width=8384, form="density", beside=True, value=-1),
        "form .density.: the diagonal of a density.s W must be above 0 and .* but is -1 to -1",
    ),
    "density of a single point": (
        routing(width=8384, form="density", beside=True, value=33),
        "form .density.: the diagonal of a density.s W must be .* at most 31.9, but is 33 to 33",
    ),
    "whole numbers": (routing(dtype=torch.int64), "must hold finite numbers"),
    "vectors that drown all others": (
        routing(value=1e30),
        "number of size 1e.30 in the form 'mean', but at most 1e",
    ),
    "form in two lines": (routing(form="a\nb"), f"{NAMES} holds a b.biases, a b.vectors"),
    "form without end": (routing(form="a" * 10**5), f"{NAMES} holds aaa"),
    "unknown form": (routing(form="random"), f"{NAMES} holds random.biases, random.vectors"),
    "no form": (routing(form=""), f"{NAMES} holds .biases, .vectors"),
    "unknown form beside": (routing(form="random", beside=True), f"{NAMES} holds mean.biases"),
    "something beside": (added(note=torch.zeros(9)), f"{NAMES} holds mean.biases, mean.vec.*note"),
    "something of a form beside": (added(mean__more=torch.zeros(9)), f"{NAMES} holds .*mean.more"),
    "second form without biases": (added(logistic__vectors=torch.zeros(2, 64)), NAMES),
    "second form without vectors": (added(logistic__biases=torch.zeros(2)), NAMES),
    "second form of a wider model": (
        routing(width=130, form="moments", beside=True),
        r"moments.vectors \[2, 128\], but they are \(2, 130\)",
    ),
    "second form of a deeper model": (
        routing(layers=3, form="logistic", beside=True),
        r"logistic.vectors \[2, 64\], but they are \(3, 64\)",
    ),
    "second form not finite": (
        routing(value=torch.inf, form="logistic", beside=True),
        "must hold finite numbers, but its logistic.vectors are not",
    ),
    "second form that drowns all others": (
        routing(value=1e30, form="logistic", beside=True),
        "number of size 1e.30 in the form 'logistic'",
    ),
    "second form with few biases": (
        added(logistic__vectors=torch.zeros(2, 64), logistic__biases=torch.zeros(3)),
        r"form 'logistic': .* but are \(2, 64\) and \(3,\)",
    ),
    "means with biases": (added(mean__biases=torch.ones(2)), "form 'mean': .* have no biases"),
    "proxies no parquet": (file(PROXIES, b"nothing"), "can't be read as parquet"),
    "proxies cut off": (file(PROXIES, b"PAR1"), "can't be read as parquet"),
    "no proxies": (ids([]), "holds no ids"),
    "id out of the pool": (ids([1, 90]), r"ids must lie in a pool of 90 samples, got 1 to 90"),
    "huge id": (ids([1, 2**62]), "ids must lie in a pool of 90 samples"),
    "negative id": (ids([-1, 3]), "ids must lie in a pool of 90 samples, got -1 to 3"),
    "id twice": (ids([3, 3]), "ids must be unique; 3 occurs 2 times"),
    "no id": (ids([3, None]), "with 1 nulls"),
    "ids that are no whole numbers": (ids([1.0], pa.float64()), "must have the columns id int64"),
    "ids as text": (ids(["1"], pa.string()), "must have the columns id int64"),
    "ids by another name": (ids([1], name="ids"), "must have the columns id int64"),
    "a column more": (ids([1], image=pa.array([b"..."])), "must have the columns id int64"),
    "relevance beside the ids": (ids([1], relevance=[0.5]), "must have the columns id int64"),
    "relevance that is none": (ids([1], relevance=[float("nan")]), "must have the columns id int"),
    "lists of ids": (ids([[1]], pa.list_(pa.int64())), "must have the columns id int64"),
    "ids of half the size": (ids([1], pa.int32()), "must have the columns id int64"),
    "ten million ids": (ids(np.zeros(10**7, np.int64)), "more rows than the pool has samples, 90"),
    "more ids than the pool has": (ids(range(91)), "more rows than the pool has samples, 90"),
    "ids of another pool": (ids([1], metadata={b"pool_fingerprint": b"0" * 64}), "000000000000"),
    "a note on the ids": (ids([1], metadata={b"note": b"..."}), "and nothing else"),
    "another format of ids": (ids([1], metadata={b"format": b"x"}), "says format 'x'"),
}
SPOILT = {
    f"{group}: {what}": attack
    for group, attacks in dict(
        folder=FOLDER, manifest=SAID, adapter=ADAPTERS, description=DESCRIPTIONS
    ).items()
    for what, attack in attacks.items()
}


@pytest.mark.parametrize("what", SPOILT)
def test_spoilt_bundle_is_refused_saying_what_and_where(what, sent, tiny_public):
    spoil, said = SPOILT[what]
    spoil(sent)
    before = sorted(sent.rglob("*"))
    with pytest.raises((ValueError, FileNotFoundError), match=said) as caught:
        read_bundle(sent, tiny_public)
    message = str(caught.value)
    assert sorted(sent.rglob("*")) == before and str(sent) in message
    assert len(message) < 1000 and message.isprintable()


def test_good_bundle_passes_and_so_does_one_written_anew(sent, tiny_public):
    "So that what is refused above is refused for what was spoilt."
    first = read_bundle(sent, tiny_public)
    nothing = text("{", "{")
    for apply in (reseal, tensors({}), config(), facts(), inputs(), listed(ROUTING), nothing):
        apply(sent)
        assert read_bundle(sent, tiny_public).client == first.client
    again = routing(), routing(dtype=torch.float64), routing(value=1e6), added(), config(r=4)
    for apply in (*again, routing(form="logistic", beside=True)):
        apply(sent)
        assert read_bundle(sent, tiny_public).client == first.client
    ids([5, 3, 89])(sent)
    assert set(read_bundle(sent, tiny_public).ids) == {3, 5, 89}


def test_a_folder_that_is_not_there_is_no_bundle(tiny_public, tmp_path):
    for folder in (tmp_path / "nowhere", tmp_path, str(tmp_path)):
        with pytest.raises(FileNotFoundError, match="holds no bundle: manifest.json is missing"):
            read_bundle(folder, tiny_public)


# ---- limits


def test_limits_of_the_server_are_met_or_not(sent, tiny_public):
    size = sum(path.stat().st_size for path in sent.rglob("*") if path.is_file())
    exact = Limits(rank=4, bytes=size, proxies=12, private_samples=30)
    assert read_bundle(sent, tiny_public, exact).bytes == size
    for change, said in (
        (dict(rank=3), "adapter_config.json: r is 4, but the server takes ranks of at most 3"),
        (dict(bytes=size - 1), "bytes, but the server takes bundles of at most"),
        (dict(proxies=11), "has 12 proxies, but the server takes at most 11"),
        (dict(private_samples=31), "says 30 private samples, but the server takes clients with 31"),
    ):
        with pytest.raises(ValueError, match=said) as caught:
            read_bundle(sent, tiny_public, replace(exact, **change))
        assert str(sent) in str(caught.value)


@pytest.mark.parametrize("name", [MANIFEST, CONFIG_FILE, TENSORS_FILE])
def test_sizes_are_looked_at_before_anything_is_opened(name, sent, tiny_public, monkeypatch):
    "A terabyte of zeros would take an hour to hash."
    os.truncate(sent / name, 2**40)
    opened = []
    monkeypatch.setattr("builtins.open", lambda *given, **how: opened.append(given))
    monkeypatch.setattr("io.open", lambda *given, **how: opened.append(given))
    with pytest.raises(ValueError, match="1,099,5"):
        read_bundle(sent, tiny_public)
    assert not opened


def test_ten_million_ids_are_refused_by_the_footer(sent, tiny_public, monkeypatch):
    ids(np.zeros(10**7, np.int64))(sent)
    monkeypatch.setattr("pyarrow.parquet.ParquetFile.iter_batches", None)  # calling it would raise
    with pytest.raises(ValueError, match="more rows than the pool has samples, 90"):
        read_bundle(sent, tiny_public)


# ---- another seed, another pool


def with_seed(public, seed):
    return replace(public, seed=seed)


def test_bundle_of_another_seed_is_refused(sent, tiny_public, tiny_config):
    import open_clip

    seed = tiny_public.seed
    with seeded(1):
        clip = open_clip.CLIP(**tiny_config)
    clip.visual.preprocess_cfg = dict(seed.preprocess_config)
    other = ImageSeed(clip, seed.tokenizer, tiny_config, seed.name, seed.prompt)
    said = "another seed: weights is .* All clients must start from the same seed"
    with pytest.raises(ValueError, match=said):
        read_bundle(sent, with_seed(tiny_public, other))


def test_bundle_of_another_prompt_or_preprocessing_is_refused(sent, tiny_public):
    seed = tiny_public.seed
    zero = seed.preprocess_config | dict(mean=(0, 0, 0))
    for key, value in (("prompt", "a {}"), ("preprocess_config", zero)):
        other = ImageSeed(seed.clip, seed.tokenizer, seed.config, seed.name, seed.prompt)
        setattr(other, key, value)
        with pytest.raises(ValueError, match="made with another seed: pr"):
            read_bundle(sent, with_seed(tiny_public, other))


def test_bundle_of_another_pool_is_refused(sent, tiny_public):
    fewer = replace(tiny_public.pool, train=tiny_public.pool.train.select(range(89)))
    with pytest.raises(ValueError, match="the pool at hand is"):
        read_bundle(sent, replace(tiny_public, pool=fewer))


def test_other_settings_of_the_server_are_no_hindrance(sent, tiny_public):
    other = changed(tiny_public.config, {"expert.rank": 9, "router.form": "moments"})
    assert read_bundle(sent, tiny_public.with_config(other)).rank == 4


# ---- writing


@pytest.fixture
def parts(tiny_clients):
    "What client a would send: expert, routing vectors and proxies."
    expert, routing, proxies = (
        kept(tiny_clients / "a", kind)[0] for kind in ("expert", "routing", "proxies")
    )
    return expert, load_routing(routing), ProxySet.load(proxies)


def test_writing_repeats_byte_for_byte_and_says_more_if_asked(parts, tiny_public, tmp_path):
    for name, more in (("one", {}), ("two", {}), ("more", dict(source="elsewhere"))):
        write_bundle(tmp_path / name, "a", *parts, tiny_public, 30, **more)
    for name in (*FILES, MANIFEST):
        one, two, more = (
            (tmp_path / which / name).read_bytes() for which in ("one", "two", "more")
        )
        assert one == two and (one == more) == (name != MANIFEST)
    settings = read_bundle(tmp_path / "more", tiny_public).manifest.inputs.settings
    assert settings == tiny_public.config.told | dict(source="elsewhere")


def test_a_bundle_replaces_the_one_before_as_a_whole(parts, sent, tiny_public):
    (sent / "notes.txt").write_text("left from before")
    write_bundle(sent, "z", *parts, tiny_public, 7)
    found = read_bundle(sent, tiny_public)
    assert (found.client, found.manifest.facts.private_samples) == ("z", 7)


@pytest.mark.parametrize("name", ["seed", "../a", ""])
def test_a_name_that_no_server_would_take_is_not_written(name, parts, tiny_public, tmp_path):
    with pytest.raises(ValueError, match="the client's name"):
        write_bundle(tmp_path / "bundle", name, *parts, tiny_public, 30)
    assert not any(tmp_path.iterdir())


def test_what_cannot_be_sent_leaves_the_bundle_before(parts, sent, tiny_public, tmp_path):
    expert, routing, proxies = parts
    before = {path: path.read_bytes() for path in sent.rglob("*") if path.is_file()}
    own = routing["mean"]
    nan = dict(mean=replace(own, vectors=own.vectors * torch.nan))
    for given, error in (
        ((expert, nan, proxies), FloatingPointError),
        ((expert, dict(logistic=own), proxies), ValueError),
        ((expert, {}, proxies), ValueError),
        ((tmp_path / "nowhere", routing, proxies), FileNotFoundError),
    ):
        with pytest.raises(error):
            write_bundle(sent, "a", *given, tiny_public, 30)
    assert before == {path: path.read_bytes() for path in sent.rglob("*") if path.is_file()}
    assert sorted(os.listdir(tmp_path)) == ["bundle"]


# ---- what the server gets


def test_bundle_read_is_what_was_sent(tiny_clients, tiny_public, tiny_bundles, tiny_benchmark):
    seed = tiny_public.seed
    order = [(layer, linear) for layer in seed.layers for linear in ("c_fc", "c_proj")]
    for name, domain, got in zip("abc", tiny_benchmark.clients, tiny_bundles):
        kinds = ("expert", "routing", "proxies")
        expert, routing, proxies = (kept(tiny_clients / name, kind)[0] for kind in kinds)
        assert (got.client, got.scale, got.rank) == (name, 2.0, 4)
        assert got.folder == tiny_clients / name / "bundle"
        stored = load_file(expert / TENSORS_FILE)
        assert list(got.factors) == order and len(stored) == 2 * len(order)
        for (layer, linear), pair in got.factors.items():
            for x, factor in zip("AB", pair):
                key = f"base_model.model.{layer}.{linear}.lora_{x}.weight"
                assert torch.equal(factor, stored[key])
        stored = load_file(routing / ROUTING)
        assert list(got.routing) == ["mean"] and stored.keys() == {"mean.vectors", "mean.biases"}
        for part in ("vectors", "biases"):
            assert torch.equal(getattr(routing_of(got), part), stored[f"mean.{part}"])
        assert got.ids.dtype == np.int64
        assert got.ids.tolist() == sorted(ProxySet.load(proxies).ids.tolist())
        facts = dict(client=name, private_samples=len(domain.train), proxies=12)
        assert asdict(got.manifest.facts) == facts | dict(guarantee=None)
        assert got.manifest.inputs.settings == tiny_public.config.told
        assert got.manifest.inputs.pool == tiny_public.fingerprint


def test_size_is_that_of_all_that_left_the_client(tiny_bundles):
    for bundle in tiny_bundles:
        sizes = {name: (bundle.folder / name).stat().st_size for name in FILES}
        assert bundle.bytes == sum(sizes.values()) + (bundle.folder / MANIFEST).stat().st_size
        assert {name: entry.bytes for name, entry in bundle.manifest.files.items()} == sizes


def test_another_form_adds_its_own_tensors_and_nothing_else(tiny):
    "The upper bound on what it costs: its numbers, and the names of two tensors."
    for one, both in zip(tiny.moments, tiny.both):
        assert list(both.routing) == ["mean", "moments"]
        more = both.routing["mean"].bytes
        assert more == 4 * 2 * (64 + 1)
        sizes = [(bundle.folder / ROUTING).stat().st_size for bundle in (one, both)]
        assert more <= sizes[1] - sizes[0] <= more + 200
        for name in {*FILES} - {ROUTING}:
            assert (one.folder / name).read_bytes() == (both.folder / name).read_bytes()
        stored = [load_file(bundle.folder / ROUTING) for bundle in (one, both)]
        assert stored[1].keys() - stored[0].keys() == {"mean.vectors", "mean.biases"}
        assert all(torch.equal(stored[1][name], tensor) for name, tensor in stored[0].items())


def test_bundle_is_where_it_is_read_not_where_it_was_written(sent, tiny_public, tiny_bundles):
    found = read_bundle(str(sent), tiny_public)
    assert found.folder == sent and torch.equal(
        routing_of(found).vectors, routing_of(tiny_bundles[0]).vectors
    )


def test_expert_of_a_bundle_is_the_one_that_the_client_trained(
    tiny_clients, tiny_public, tiny_bundles
):
    seed = tiny_public.seed
    before = seed.identity["weights"]
    for bundle in tiny_bundles:
        model = bundle.expert(seed)
        wanted = load_expert(seed, kept(tiny_clients / bundle.client, "expert")[0]).state_dict()
        found = model.backbone.state_dict()
        assert model.seed is seed and found.keys() == wanted.keys()
        assert all(torch.allclose(found[name], wanted[name], atol=1e-6) for name in wanted)
        first = "transformer.resblocks.0.mlp.c_fc.weight"
        assert not torch.equal(found[first], seed.backbone.state_dict()[first])
        assert not any(p.requires_grad for p in model.backbone.parameters())
    vars(seed).pop("weights_digest", None)
    assert seed.identity["weights"] == before


def test_rank_stabilised_adapter_has_its_own_scale(sent, tiny_public):
    config(use_rslora=True)(sent)
    assert read_bundle(sent, tiny_public).scale == pytest.approx(8 / 4**0.5)


def test_factors_of_other_precision_become_float32(sent, tiny_public):
    half = {name: t.half() for name, t in load_file(sent / TENSORS_FILE).items()}
    tensors(half)(sent)
    found = read_bundle(sent, tiny_public)
    for (layer, linear), (a, _) in found.factors.items():
        assert a.dtype == torch.float32
        assert torch.equal(a.half(), half[f"base_model.model.{layer}.{linear}.lora_A.weight"])


def test_bundle_holds_an_adapter_that_peft_opens(tiny_clients, tiny_public, tiny_bundles):
    from peft import PeftModel

    folder = tiny_clients / "a" / "bundle" / ADAPTER
    model = PeftModel.from_pretrained(tiny_public.seed.new_backbone(), str(folder))
    assert model.peft_config["default"].base_model_name_or_path == "tiny"
    own = {name: p for name, p in model.named_parameters() if "lora" in name}
    for (layer, linear), (a, b) in tiny_bundles[0].factors.items():
        assert torch.equal(own[f"base_model.model.{layer}.{linear}.lora_A.default.weight"], a)
        assert torch.equal(own[f"base_model.model.{layer}.{linear}.lora_B.default.weight"], b)
