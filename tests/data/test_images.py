"""Images that others wrote: what is no image, no file, or somewhere else is refused by row and
file, and every number of bits keeps its range."""

import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import DatasetDict
from PIL import Image

from harmomoe.data.domains import load_domain
from harmomoe.data.images import (
    check_bytes,
    check_images,
    folder_parts,
    hub_parts,
    image_dataset,
    parquet_parts,
    rgb_image,
)

RAMP = np.linspace(0, 65535, 256).astype(np.uint16).reshape(1, 256)


def saved(array, path, mode=None):
    image = Image.fromarray(array)
    (image.convert(mode) if mode else image).save(path)
    return image_dataset([str(path)], [0], ["one"])


def folders(root, *names):
    "A picture in each folder."
    for name in names:
        (root / name).mkdir(parents=True)
        Image.new("RGB", (4, 4), "red").save(root / name / "a.png")
    return root


# ---- bits and colours


@pytest.mark.parametrize("suffix", ["png", "tiff", "pgm"])
def test_sixteen_bits_keep_their_range(suffix, tmp_path):
    found = rgb_image(saved(RAMP, tmp_path / f"ramp.{suffix}"), 0)
    assert found.mode == "RGB"
    assert np.array_equal(np.asarray(found)[0, :, 1], np.arange(256))


@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_numbers_without_a_range_are_refused(kind, tmp_path):
    data = saved(RAMP.astype(kind), tmp_path / "ramp.tiff")
    with pytest.raises(ValueError, match=r"row 0 \(.*ramp.tiff\).*write it with 8 or 16 bits"):
        rgb_image(data, 0)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK"])
def test_eight_bits_are_as_pillow_converts_them(mode, tmp_path):
    array = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    path = tmp_path / ("image.tiff" if mode == "CMYK" else "image.png")
    data = saved(array, path, mode)
    assert np.array_equal(rgb_image(data, 0), Image.open(path).convert("RGB"))


# ---- what is no image


def test_corrupt_image_in_the_middle_is_named(tmp_path):
    files = [str(folders(tmp_path, f"f{i}") / f"f{i}" / "a.png") for i in range(9)]
    with open(files[4], "r+b") as file:
        file.truncate(40)
    data = check_images(image_dataset(files, [0] * 9, ["one"]), "here")  # both ends are whole
    with pytest.raises(ValueError, match=r"row 4 \(.*f4.a.png\): no image .*replace or remove"):
        rgb_image(data, 4)


def test_pipe_called_image_is_refused(tmp_path):
    folders(tmp_path, "cat", "dog")
    os.mkfifo(tmp_path / "dog" / "b.png")
    with pytest.raises(ValueError, match="b.png is called an image, but is no file"):
        folder_parts(tmp_path)


def test_two_folders_of_one_split_are_refused(tmp_path):
    folders(tmp_path, *(f"{split}/{name}" for split in ("train", "val", "valid") for name in "ab"))
    with pytest.raises(ValueError, match="val and valid are both its validation split; keep one"):
        load_domain(tmp_path)


def test_two_splits_of_one_kind_in_a_repository_are_refused(tmp_path):
    data = saved(np.zeros((2, 2, 3), np.uint8), tmp_path / "a.png")
    with pytest.raises(ValueError, match="two of them are the test split"):
        hub_parts(DatasetDict(test=data, testing=data.select([0])), "owner/name")


# ---- what is somewhere else


def by_path(rows, path):
    "Rows of parquet, one of which says where its image is, and brings none."
    image = [{"bytes": b"x", "path": None} for _ in range(rows)]
    image[3] = {"bytes": None, "path": path}
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    labels = [i % 2 for i in range(rows)]
    names = ["ab"[label] for label in labels]
    return pa.table(dict(image=pa.array(image, kind), label=labels, class_name=names))


@pytest.mark.parametrize("limit", [2**30, 0])
@pytest.mark.parametrize("path", ["/etc/hostname", "http://127.0.0.1:9/x.png"])
def test_paths_in_parquet_are_not_followed(path, limit, tmp_path, monkeypatch):
    monkeypatch.setattr("harmomoe.data.images.IN_MEMORY_BYTES", limit)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    pq.write_table(by_path(8, path), tmp_path / "train.parquet")
    with pytest.raises(ValueError, match="train.parquet, row 3: no image .*paths are not followed"):
        parquet_parts({"train": tmp_path / "train.parquet"})


def test_files_of_ones_own_folders_are_read(tmp_path):
    data = saved(np.zeros((2, 2, 3), np.uint8), tmp_path / "a.png")
    with pytest.raises(ValueError, match="row 0: no image"):
        check_bytes(data, "here")
    assert rgb_image(data, 0).size == (2, 2)
