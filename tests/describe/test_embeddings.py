"""The pool is embedded once: resumed after interruptions, by one process at a time, in the memory
of one shard."""

import ctypes
import errno
import io
import multiprocessing
import os
import resource
import shutil
import subprocess
import tracemalloc
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image
from PIL import Image as PILImage

import harmomoe.base.artefacts
import harmomoe.data.domains
import harmomoe.describe.embeddings
from harmomoe.base.engine import read_engine
from harmomoe.data.domains import fingerprint
from harmomoe.describe.embeddings import cached_embeddings
from harmomoe.describe.proxies import select_proxies
from harmomoe.describe.relevance import linear_probe


@pytest.fixture
def watch(tiny_seed, monkeypatch):
    "The tiny seed's calls of `embed`, by number of rows; the one numbered `watch.cut` raises."

    class Calls(list):
        cut = None

    calls, embed = Calls(), tiny_seed.embed

    def watched(dataset, **options):
        if calls.cut == len(calls):
            calls.cut = None
            raise KeyboardInterrupt
        calls.append(len(dataset))
        return embed(dataset, **options | dict(progress=""))

    monkeypatch.setattr(tiny_seed, "embed", watched)
    return calls


def interrupted(seed, pool, folder, watch, after):
    "The shards that a run leaves that is cut off after some of them."
    watch.cut = after
    with pytest.raises(KeyboardInterrupt):
        cached_embeddings(seed, pool, folder, shard=40)
    assert not folder.exists()
    return sorted((folder.parent / f".{folder.name}.unfinished").glob("0*"))


# ---- in shards, resumed


@pytest.mark.parametrize("shard", [1, 12, 29, 30, 1000])
def test_shards_of_any_size_give_the_embeddings_in_order_and_leave_one_folder(
    shard, tiny_seed, tiny_benchmark, tmp_path
):
    pool = tiny_benchmark.pool.train.select(range(30))
    found = cached_embeddings(tiny_seed, pool, tmp_path / "pool", shard=shard)
    assert isinstance(found, np.memmap) and found.dtype == np.float32 and not found.flags.writeable
    assert np.allclose(found, tiny_seed.embed(pool).numpy(), atol=1e-5)
    assert os.listdir(tmp_path) == ["pool"]


def test_an_interrupted_run_goes_on_after_its_last_whole_shard(
    tiny_seed, tiny_benchmark, tmp_path, watch
):
    pool, folder = tiny_benchmark.pool.train, tmp_path / "pool"
    assert len(interrupted(tiny_seed, pool, folder, watch, after=2)) == 2 and watch == [40, 40]
    whole = cached_embeddings(tiny_seed, pool, tmp_path / "other", shard=40)
    watch.clear()
    assert np.array_equal(cached_embeddings(tiny_seed, pool, folder, shard=40), whole)
    assert np.array_equal(cached_embeddings(tiny_seed, pool, folder, shard=7), whole)
    assert watch == [10]  # neither more for the first, nor anything for the second


@pytest.mark.parametrize("damage", ["changed", "cut", "gone", "no manifest"])
def test_a_damaged_shard_is_made_again_and_no_other(
    damage, tiny_seed, tiny_benchmark, tmp_path, watch
):
    pool = tiny_benchmark.pool.train
    first, second = interrupted(tiny_seed, pool, tmp_path / "pool", watch, after=2)
    file = first / ("manifest.json" if damage == "no manifest" else "embeddings.npy")
    if damage == "changed":
        file.write_bytes(file.read_bytes()[:-1] + b"\0")
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:100])
    else:
        file.unlink()
    watch.clear()
    found = cached_embeddings(tiny_seed, pool, tmp_path / "pool", shard=40)
    assert watch == [40, 10] and np.allclose(found, tiny_seed.embed(pool).numpy(), atol=1e-5)


@pytest.mark.parametrize("foreign", ["pool", "prompt", "type", "shards"])
def test_shards_of_anything_else_are_not_taken(
    foreign, tiny_seed, tiny_benchmark, tmp_path, watch, monkeypatch
):
    pool = tiny_benchmark.pool.train
    interrupted(tiny_seed, pool, tmp_path / "pool", watch, after=2)
    if foreign == "pool":
        pool = pool.select(range(89, -1, -1))
    if foreign == "prompt":
        monkeypatch.setattr(tiny_seed, "prompt", "another {}")
    if foreign == "type":
        monkeypatch.setattr(tiny_seed, "embeds_in", torch.bfloat16)
    watch.clear()
    shard = 45 if foreign == "shards" else 40
    found = cached_embeddings(tiny_seed, pool, tmp_path / "pool", shard=shard)
    assert watch == ([45, 45] if foreign == "shards" else [40, 40, 10])
    assert np.allclose(found, tiny_seed.embed(pool).numpy(), atol=1e-5)
    assert os.listdir(tmp_path) == ["pool"]


def test_two_processes_embed_once(tiny_seed, tiny_benchmark, tmp_path, monkeypatch):
    pool, embed = tiny_benchmark.pool.train, tiny_seed.embed

    def noted(dataset, **options):
        with open(tmp_path / "calls", "a") as calls:
            calls.write(f"{len(dataset)} ")
        return embed(dataset, **options | dict(progress=""))

    monkeypatch.setattr(tiny_seed, "embed", noted)
    fork = multiprocessing.get_context("fork")
    work = dict(target=cached_embeddings, args=(tiny_seed, pool, tmp_path / "pool", 30))
    both = [fork.Process(**work) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    assert (tmp_path / "calls").read_text() == "30 30 30 "
    assert sorted(os.listdir(tmp_path)) == ["calls", "pool"]


def test_a_finished_cache_is_only_read(tiny_seed, tiny_benchmark, tmp_path, monkeypatch):
    pool = tiny_benchmark.pool.train
    first = cached_embeddings(tiny_seed, pool, tmp_path / "pool")
    # as on a disk that cannot be written to
    monkeypatch.setattr(harmomoe.base.artefacts, "_locked", None)
    monkeypatch.setattr(harmomoe.describe.embeddings, "reserve", None)
    assert np.array_equal(cached_embeddings(tiny_seed, pool, tmp_path / "pool"), first)


def test_a_finished_cache_of_anything_else_is_replaced(
    tiny_seed, tiny_benchmark, tmp_path, watch, monkeypatch
):
    pool, folder = tiny_benchmark.pool, tmp_path / "pool"
    cached_embeddings(tiny_seed, pool.train, folder)
    assert len(cached_embeddings(tiny_seed, pool.test, folder)) == 12 and watch == [90, 12]
    monkeypatch.setattr(tiny_seed, "prompt", "another {}")  # which is part of its identity
    cached_embeddings(tiny_seed, pool.test, folder)
    cached_embeddings(tiny_seed, pool.test, folder)
    assert watch == [90, 12, 12] and os.listdir(tmp_path) == ["pool"]


@pytest.mark.parametrize("engine", ["processes:2", "ray:local"])
def test_other_engines_embed_the_same(engine, tiny_seed, tiny_benchmark, tmp_path):
    if engine.startswith("ray"):
        pytest.importorskip("ray")
    pool, how = tiny_benchmark.pool.train, dict(shard=40)
    found = cached_embeddings(tiny_seed, pool, tmp_path / "a", engine=read_engine(engine), **how)
    assert np.array_equal(found, cached_embeddings(tiny_seed, pool, tmp_path / "b", **how))
    assert not (tmp_path / ".a.unfinished").exists()


@pytest.mark.parametrize("rows, shard", [(0, 10), (5, 0)])
def test_nothing_to_embed_is_an_error_before_anything_is_written(
    rows, shard, tiny_seed, tiny_benchmark, tmp_path
):
    few = tiny_benchmark.pool.train.select(range(rows))
    with pytest.raises(ValueError, match="needs samples and shards of one row or more"):
        cached_embeddings(tiny_seed, few, tmp_path / "pool", shard=shard)
    assert not any(tmp_path.iterdir())


def test_files_are_those_that_numpy_writes(tiny_seed, tiny_benchmark, tmp_path):
    pool = tiny_benchmark.pool.train.select(range(30))
    found = cached_embeddings(tiny_seed, pool, tmp_path / "pool", shard=12)
    np.save(tmp_path / "again.npy", np.array(found))
    file = tmp_path / "pool" / "embeddings.npy"
    assert file.read_bytes() == (tmp_path / "again.npy").read_bytes()


def test_a_seed_that_embeds_in_another_size_than_it_says_is_refused(
    tiny_seed, tiny_benchmark, tmp_path, monkeypatch
):
    monkeypatch.setattr(tiny_seed, "embedding_size", tiny_seed.embedding_size + 1)
    with pytest.raises(ValueError, match="embeds 40 samples as .*, but says that an embedding has"):
        cached_embeddings(tiny_seed, tiny_benchmark.pool.train, tmp_path / "pool", shard=40)


# ---- a full disk


@contextmanager
def disk(folder, size):
    "A disk of a few MB."
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("may not mount a small disk here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def wide(tiny_seed, monkeypatch):
    "The tiny seed with 2000 numbers for each sample: 720 kB for 90; and how many rows it embeds."
    calls = []

    def embed(dataset, **options):
        calls.append(len(dataset))
        return torch.arange(2000.0).repeat(len(dataset), 1) + sum(calls)

    monkeypatch.setattr(tiny_seed, "embed", embed)
    monkeypatch.setattr(tiny_seed, "embedding_size", 2000)
    return calls


def test_a_disk_without_room_for_shards_and_the_whole_is_an_error_before_the_first_sample(
    tiny_seed, tiny_benchmark, tmp_path, wide
):
    with disk(tmp_path / "disk", 1) as small:  # one of the two would fit
        with pytest.raises(OSError) as caught:
            cached_embeddings(tiny_seed, tiny_benchmark.pool.train, small / "pool", shard=40)
        assert caught.value.errno == errno.ENOSPC and wide == []
        needed = 2 * 90 * 2000 * 4 + 4 * (1 << 14)
        assert caught.value.strerror.startswith(
            f"the embeddings of 90 samples have no room in {small / 'pool'}: {needed:,} bytes are "
            "needed, but 1,04"
        )
        assert "Free some space, or choose a folder on another disk." in caught.value.strerror
        assert os.listdir(small) == [".pool.unfinished"]
        assert os.listdir(small / ".pool.unfinished") == ["made_from.json"]


def fill(folder):
    "Take all the room that is left on a disk."
    with pytest.raises(OSError), open(folder / "junk", "ab", buffering=0) as junk:
        for size in (1 << 16, 1 << 12, 1):
            while True:
                try:
                    junk.write(bytes(size))
                except OSError:
                    break
        raise OSError


def test_a_disk_that_others_fill_meanwhile_costs_nothing(
    tiny_seed, tiny_benchmark, tmp_path, wide, monkeypatch
):
    embed, pool = tiny_seed.embed, tiny_benchmark.pool.train
    with disk(tmp_path / "disk", 2) as small:

        def filling(dataset, **options):
            fill(small)
            return embed(dataset, **options)

        monkeypatch.setattr(tiny_seed, "embed", filling)
        found = np.array(cached_embeddings(tiny_seed, pool, small / "pool", shard=40))
        assert (small / "junk").stat().st_size > 100_000 and wide == [40, 40, 10]
        assert sorted(os.listdir(small)) == ["junk", "pool"]
    rows = np.repeat([40.0, 80.0, 90.0], [40, 40, 10])
    assert np.array_equal(found, np.arange(2000.0) + rows[:, None])


def test_shards_that_are_there_need_no_room_again(
    tiny_seed, tiny_benchmark, tmp_path, wide, monkeypatch
):
    pool, embed = tiny_benchmark.pool.train, tiny_seed.embed
    with disk(tmp_path / "disk", 2) as small:

        def cut(dataset, **options):
            if len(wide) == 2:
                raise KeyboardInterrupt
            return embed(dataset, **options)

        with monkeypatch.context() as patched:
            patched.setattr(tiny_seed, "embed", cut)
            with pytest.raises(KeyboardInterrupt):
                cached_embeddings(tiny_seed, pool, small / "pool", shard=40)
        assert os.listdir(small) == [".pool.unfinished"]  # what was reserved is given back
        (small / "junk").write_bytes(bytes(500_000))
        assert shutil.disk_usage(small).free < 1_000_000
        assert len(cached_embeddings(tiny_seed, pool, small / "pool", shard=40)) == 90
        assert wide == [40, 40, 10]


def told(seed, pool, folder, connection):
    "Embed where no file may be larger than 500 kB; send what is said."
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, resource.RLIM_INFINITY))
    try:
        cached_embeddings(seed, pool, folder, shard=40)
    except OSError as error:
        connection.send((error.errno, error.strerror))


def test_a_limit_on_files_is_an_error_before_the_first_sample(
    tiny_seed, tiny_benchmark, tmp_path, wide, monkeypatch
):
    monkeypatch.setattr(tiny_seed, "embed", None)
    receive, send = multiprocessing.Pipe(duplex=False)
    given = tiny_seed, tiny_benchmark.pool.train, tmp_path / "pool", send
    alone = multiprocessing.get_context("fork").Process(target=told, args=given)
    alone.start()
    alone.join()
    assert alone.exitcode == 0
    number, said = receive.recv()
    file = tmp_path / "pool" / "embeddings.npy"
    assert number == errno.EFBIG and said.startswith(f"{file} cannot be written: File too large.")


# ---- memory


def noise(rows, cache):
    "A memory-mapped data set of pictures of 110 kB each."

    def pictures():
        rng = np.random.default_rng(rows)
        for row in range(rows):
            picture = PILImage.fromarray(rng.integers(0, 256, (192, 192, 3), dtype=np.uint8))
            picture.save(buffer := io.BytesIO(), "BMP")
            yield dict(image=dict(bytes=buffer.getvalue(), path=None), label=row % 2)

    features = Features(image=Image(), label=ClassLabel(names=["one", "two"]))
    Dataset.from_generator(pictures, features=features, cache_dir=str(cache), writer_batch_size=50)
    return Dataset.from_file(str(next(cache.rglob("*.arrow"))))


def memory():
    "Bytes that this process holds and that are not a view of a file, without what it gave back."
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


def peaks(seed, pools, folder, connection):
    "Send the most memory that was in use while each pool was embedded."
    hidden, seen = seed.hidden, []
    seed.hidden = lambda *given: seen.append(memory()) or hidden(*given)
    for number, pool in enumerate(pools):
        seen.clear()
        cached_embeddings(seed, pool, folder / str(number), shard=50)
        connection.send(max(seen))


@pytest.mark.skipif(
    not Path("/proc/self/status").is_file() or not hasattr(ctypes.CDLL(None), "malloc_trim"),
    reason="needs /proc and glibc to know the memory of a process",
)
def test_memory_does_not_grow_with_the_pool(tiny_seed, tmp_path):
    small, large = noise(100, tmp_path / "small"), noise(500, tmp_path / "large")
    size = Path(large.cache_files[0]["filename"]).stat().st_size
    receive, send = multiprocessing.Pipe(duplex=False)
    # in a process of its own; the first pool is there to load whatever is loaded once
    given = tiny_seed, (small, small, large), tmp_path, send
    alone = multiprocessing.get_context("fork").Process(target=peaks, args=given)
    alone.start()
    alone.join()
    assert alone.exitcode == 0
    _, few, many = (receive.recv() for _ in range(3))
    assert size > 50e6 and many - few < size / 4


def test_probe_and_selection_copy_no_pool(tmp_path):
    rng = np.random.default_rng(0)
    pool = np.lib.format.open_memmap(tmp_path / "pool.npy", "w+", np.float32, (60_000, 64))
    for start in range(0, len(pool), 1000):
        pool[start : start + 1000] = rng.standard_normal((1000, 64))
    private = rng.standard_normal((50, 64)).astype(np.float32) + 0.5
    tracemalloc.start()
    r = linear_probe(private, pool, negatives=500)
    chosen = select_proxies(pool, r.scores, 20, n=200)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(chosen) == 20 and peak < pool.nbytes / 4


# ---- the seed's settings


def test_bfloat16_is_another_cache_of_nearly_the_same_embeddings(
    tiny_seed, tiny_benchmark, tmp_path, monkeypatch
):
    pool = tiny_benchmark.pool.train
    full = cached_embeddings(tiny_seed, pool, tmp_path / "pool")
    first = np.array(full)
    monkeypatch.setattr(tiny_seed, "embeds_in", torch.bfloat16)
    half = cached_embeddings(tiny_seed, pool, tmp_path / "pool")
    assert half.dtype == np.float32 and not np.array_equal(half, first)
    assert torch.cosine_similarity(*map(torch.tensor, (half, first))).min() > 0.999


# ---- what else all clients would compute alike


def test_a_data_set_is_fingerprinted_once(tiny_benchmark, monkeypatch):
    pool, calls = tiny_benchmark.pool.train.select(range(20)), []
    read = harmomoe.data.domains._read_fingerprint
    noted = lambda *args: calls.append(args) or read(*args)
    monkeypatch.setattr(harmomoe.data.domains, "_read_fingerprint", noted)
    assert fingerprint(pool) == fingerprint(pool) == fingerprint(pool, content=True)
    assert len(calls) == 2
    assert fingerprint(pool.select(range(19))) != fingerprint(pool) and len(calls) == 3
