"The pool is embedded once: resumed after interruptions, by one process at a time, in the memory of one shard."
import io
import multiprocessing
import os
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image
from PIL import Image as PILImage

import harmomoe.core
import harmomoe.domains
import harmomoe.routing
from harmomoe.domains import fingerprint
from harmomoe.embeddings import cached_embeddings, embedding_identity
from harmomoe.proxies import select_proxies
from harmomoe.relevance import linear_probe


@pytest.fixture
def watch(tiny_seed, monkeypatch):
    "The tiny seed's calls of `embed`, by number of rows; the one numbered `watch.cut` raises."
    class Calls(list): cut = None
    calls, embed = Calls(), tiny_seed.embed

    def watched(dataset, **options):
        if calls.cut == len(calls): calls.cut = None; raise KeyboardInterrupt
        calls.append(len(dataset))
        return embed(dataset, **options | dict(progress=""))
    monkeypatch.setattr(tiny_seed, "embed", watched)
    return calls


def interrupted(seed, pool, folder, watch, after):
    watch.cut = after
    with pytest.raises(KeyboardInterrupt): cached_embeddings(seed, pool, folder, shard=40)
    assert not folder.exists()
    return sorted((folder.parent / f".{folder.name}.shards").iterdir())


# ---- in shards, resumed

@pytest.mark.parametrize("shard", [1, 40, 89, 90, 1000])
def test_shards_of_any_size_give_the_embeddings_in_order_and_leave_one_folder(shard, tiny_seed, tiny_benchmark, tmp_path):
    pool = tiny_benchmark.pool.train
    found = cached_embeddings(tiny_seed, pool, tmp_path / "pool", shard=shard)
    assert isinstance(found, np.memmap) and found.dtype == np.float32 and not found.flags.writeable
    assert np.allclose(found, tiny_seed.embed(pool).numpy(), atol=1e-5)
    assert os.listdir(tmp_path) == ["pool"]


def test_an_interrupted_run_goes_on_after_its_last_whole_shard(tiny_seed, tiny_benchmark, tmp_path, watch):
    pool = tiny_benchmark.pool.train
    assert len(interrupted(tiny_seed, pool, tmp_path / "pool", watch, after=2)) == 2 and watch == [40, 40]
    whole = cached_embeddings(tiny_seed, pool, tmp_path / "other", shard=40)
    watch.clear()
    assert np.array_equal(cached_embeddings(tiny_seed, pool, tmp_path / "pool", shard=40), whole) and watch == [10]
    assert np.array_equal(cached_embeddings(tiny_seed, pool, tmp_path / "pool", shard=7), whole) and watch == [10]


@pytest.mark.parametrize("damage", ["changed", "cut", "gone", "no manifest"])
def test_a_damaged_shard_is_made_again_and_no_other(damage, tiny_seed, tiny_benchmark, tmp_path, watch):
    pool = tiny_benchmark.pool.train
    first, second = interrupted(tiny_seed, pool, tmp_path / "pool", watch, after=2)
    file = first / ("manifest.json" if damage == "no manifest" else "embeddings.npy")
    if damage == "changed": file.write_bytes(file.read_bytes()[:-1] + b"\0")
    elif damage == "cut": file.write_bytes(file.read_bytes()[:100])
    else: file.unlink()
    watch.clear()
    found = cached_embeddings(tiny_seed, pool, tmp_path / "pool", shard=40)
    assert watch == [40, 10] and np.allclose(found, tiny_seed.embed(pool).numpy(), atol=1e-5)


@pytest.mark.parametrize("foreign", ["pool", "prompt", "type", "shards"])
def test_shards_of_anything_else_are_not_taken(foreign, tiny_seed, tiny_benchmark, tmp_path, watch, monkeypatch):
    pool = tiny_benchmark.pool.train
    interrupted(tiny_seed, pool, tmp_path / "pool", watch, after=2)
    if foreign == "pool": pool = pool.select(range(89, -1, -1))
    if foreign == "prompt": monkeypatch.setattr(tiny_seed, "prompt", "another {}")
    if foreign == "type": monkeypatch.setattr(tiny_seed, "embeds_in", torch.bfloat16)
    watch.clear()
    found = cached_embeddings(tiny_seed, pool, tmp_path / "pool", shard=45 if foreign == "shards" else 40)
    assert watch == ([45, 45] if foreign == "shards" else [40, 40, 10])
    assert np.allclose(found, tiny_seed.embed(pool).numpy(), atol=1e-5) and os.listdir(tmp_path) == ["pool"]


def test_two_processes_embed_once(tiny_seed, tiny_benchmark, tmp_path, monkeypatch):
    pool, embed = tiny_benchmark.pool.train, tiny_seed.embed

    def noted(dataset, **options):
        with open(tmp_path / "calls", "a") as calls: calls.write(f"{len(dataset)} ")
        return embed(dataset, **options | dict(progress=""))
    monkeypatch.setattr(tiny_seed, "embed", noted)
    fork = multiprocessing.get_context("fork")
    both = [fork.Process(target=cached_embeddings, args=(tiny_seed, pool, tmp_path / "pool", 0, 30)) for _ in range(2)]
    for process in both: process.start()
    for process in both: process.join()
    assert [process.exitcode for process in both] == [0, 0]
    assert (tmp_path / "calls").read_text() == "30 30 30 " and sorted(os.listdir(tmp_path)) == ["calls", "pool"]


def test_a_finished_cache_is_only_read(tiny_seed, tiny_benchmark, tmp_path, monkeypatch):
    pool = tiny_benchmark.pool.train
    first = cached_embeddings(tiny_seed, pool, tmp_path / "pool")
    monkeypatch.setattr(harmomoe.core, "FileLock", None)               # as on a disk that cannot be written to
    assert np.array_equal(cached_embeddings(tiny_seed, pool, tmp_path / "pool"), first)


@pytest.mark.parametrize("rows, shard", [(0, 10), (5, 0)])
def test_nothing_to_embed_is_an_error_before_anything_is_written(rows, shard, tiny_seed, tiny_benchmark, tmp_path):
    with pytest.raises(ValueError, match="needs samples and shards of one row or more"):
        cached_embeddings(tiny_seed, tiny_benchmark.pool.train.select(range(rows)), tmp_path / "pool", shard=shard)
    assert not any(tmp_path.iterdir())


# ---- memory

def noise(rows, cache):
    "The file of a memory-mapped data set of pictures that cannot be compressed, 27 kB each."
    def pictures():
        rng = np.random.default_rng(rows)
        for row in range(rows):
            picture = PILImage.fromarray(rng.integers(0, 256, (96, 96, 3), dtype=np.uint8))
            picture.save(buffer := io.BytesIO(), "PNG", compress_level=0)
            yield dict(image=dict(bytes=buffer.getvalue(), path=None), label=row % 2)
    features = Features(image=Image(), label=ClassLabel(names=["one", "two"]))
    Dataset.from_generator(pictures, features=features, cache_dir=str(cache), writer_batch_size=50)
    return next(cache.rglob("*.arrow"))


PEAKS = """
import sys
from datasets import Dataset
from harmomoe.embeddings import cached_embeddings
from harmomoe.weights import open_seed

def rss(): # memory that is not a view of a file, in bytes
    return 1024 * int(open("/proc/self/status").read().partition("RssAnon:")[2].split()[0])

folder, small, large = sys.argv[1:]
seed, seen = open_seed(folder), []
hidden = seed.hidden
seed.hidden = lambda *batch: seen.append(rss()) or hidden(*batch)
for name, file in (("warm", small), ("few", small), ("many", large)):
    seen.clear()
    cached_embeddings(seed, Dataset.from_file(file), f"{folder}/{name}", shard=50)
    print(max(seen))
"""


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="no /proc to read the memory of a process from")
def test_memory_does_not_grow_with_the_pool(tiny_seed, tmp_path):
    small, large = noise(100, tmp_path / "small"), noise(2000, tmp_path / "large")
    (tmp_path / "seed").mkdir()
    tiny_seed.save(tmp_path / "seed")
    run = subprocess.run([sys.executable, "-c", PEAKS, *map(str, (tmp_path / "seed", small, large))], # nothing else in it
                         capture_output=True, text=True, check=True)
    _, few, many = map(int, run.stdout.split())
    assert large.stat().st_size > 50e6 and many - few < large.stat().st_size / 4


def test_probe_and_selection_copy_no_pool(tmp_path):
    rng = np.random.default_rng(0)
    pool = np.lib.format.open_memmap(tmp_path / "pool.npy", "w+", np.float32, (60_000, 64))
    for start in range(0, len(pool), 1000): pool[start:start + 1000] = rng.standard_normal((1000, 64))
    private = rng.standard_normal((50, 64)).astype(np.float32) + .5
    tracemalloc.start()
    r = linear_probe(private, pool, negatives=500)
    chosen = select_proxies(pool, r.scores, 20, n=200)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(chosen) == 20 and peak < pool.nbytes / 4


# ---- the seed's settings

def test_bfloat16_is_another_cache_of_nearly_the_same_embeddings(tiny_seed, tiny_benchmark, tmp_path, monkeypatch):
    pool, before = tiny_benchmark.pool.train, tiny_seed.identity
    full = cached_embeddings(tiny_seed, pool, tmp_path / "full")
    assert embedding_identity(tiny_seed) == before
    monkeypatch.setattr(tiny_seed, "embeds_in", torch.bfloat16)
    half = cached_embeddings(tiny_seed, pool, tmp_path / "half")
    assert half.dtype == np.float32 and not np.array_equal(half, full)
    assert torch.cosine_similarity(*map(torch.tensor, (half, full))).min() > .999
    assert tiny_seed.identity == before and tiny_seed.tower.proj.dtype == torch.float32
    assert embedding_identity(tiny_seed) == before | dict(embeds_in="torch.bfloat16")


def test_relevance_of_rounded_embeddings_is_kept_apart(tiny, tmp_path, monkeypatch):
    from harmomoe.unify import select_stage
    found = []
    for kind in (None, torch.bfloat16):
        monkeypatch.setattr(tiny.seed, "embeds_in", kind)
        embeddings = cached_embeddings(tiny.seed, tiny.pool.train, tmp_path / f"pool-{kind}")
        found.append(select_stage(tiny.a, tiny.seed, tiny.pool.train, embeddings, tiny.settings, tmp_path / "a")[1])
    assert not np.array_equal(found[0].scores, found[1].scores)
    assert len(list((tmp_path / "a").glob("relevance-*"))) == 2


# ---- what else all clients would compute alike

def test_a_data_set_is_fingerprinted_once(tiny_benchmark, monkeypatch):
    pool, calls, read = tiny_benchmark.pool.train.select(range(20)), [], harmomoe.domains._read_fingerprint
    monkeypatch.setattr(harmomoe.domains, "_read_fingerprint", lambda *args: calls.append(args) or read(*args))
    assert fingerprint(pool) == fingerprint(pool) == fingerprint(pool, content=True) and len(calls) == 2
    assert fingerprint(pool.select(range(19))) != fingerprint(pool) and len(calls) == 3


def test_clients_of_one_machine_share_the_means_of_public_samples_and_send_the_same(tiny, tmp_path, monkeypatch):
    from dataclasses import replace

    from harmomoe.bundle import read_bundle
    from harmomoe.layer import RouterSettings
    from harmomoe.unify import run_client
    settings, calls, means = replace(tiny.settings, router=RouterSettings(initial="moments")), [], harmomoe.routing.layer_means
    monkeypatch.setattr(harmomoe.routing, "layer_means",
                        lambda seed, tower, *args, **options: calls.append(tower is seed.tower) or means(seed, tower, *args, **options))
    for name in "ab": shutil.copytree(tiny.work / name, tmp_path / name, ignore=shutil.ignore_patterns("routing-*"))
    for client, alone in zip((tiny.a, tiny.b), tiny.moments):
        folder = run_client(client, tiny.seed, tiny.pool, tiny.embeddings, settings, tmp_path / client.name, shared=tmp_path)
        assert torch.equal(read_bundle(folder, tiny.seed).routing.vectors, alone.routing.vectors)
    assert calls.count(True) == 1 and len(list(tmp_path.glob("means-*"))) == 1
