"""Images that others wrote: what is no image, no file, or somewhere else is refused by row and
file, and every number of bits keeps its range."""

import io
import os
import struct
import warnings
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features
from datasets import Image as ImageFeature
from PIL import Image

from harmomoe.data.benchmarks import open_benchmark
from harmomoe.data.domains import fingerprint, load_benchmark, load_domain
from harmomoe.data.images import (
    LONGEST_NAME,
    broken_images,
    check_bytes,
    check_images,
    check_names,
    class_folders,
    folder_parts,
    hub_dataset,
    hub_parts,
    image_dataset,
    labels_of,
    parquet_files,
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


# ---- what is an image, and how it is seen


def png(width, height, data=None):
    "A PNG that says it is of this size."

    def chunk(kind, body):
        body = kind + body
        return struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(100) if data is None else data)
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
    return start + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def written(image, form, **how):
    image.save(buffer := io.BytesIO(), form, **how)
    return buffer.getvalue()


def one(data):
    "A data set of one image, held as bytes."
    features = Features(image=ImageFeature(), label=ClassLabel(names=["one"]))
    return Dataset.from_dict(dict(image=[dict(bytes=data, path=None)], label=[0]), features)


NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8))
POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"


@pytest.mark.parametrize(
    "data, said",
    [
        (written(NOISE, "JPEG")[:-300], "truncated"),
        (written(NOISE, "PNG")[:300], "truncated|broken|Truncated"),
        (b"", "none of .*JPEG"),
        (b"<html>404", "none of .*JPEG"),
        (png(30_000, 30_000), "exceeds limit .* pixels"),
        (png(0, 5), "pixels|none of|broken"),
        (b"P6 0 0 255\n", "pixels|none of"),
        (png(100_000, 1, bytes(300_001)), "100000 x 1 pixels; sides from 1 x 1 to 1 x 1000 are"),
        (POSTSCRIPT, "none of .*JPEG"),  # Pillow would start Ghostscript
    ],
    ids=["cut JPEG", "cut PNG", "empty", "HTML", "bomb", "0 x 5", "0 x 0", "strip", "PostScript"],
)
def test_what_is_no_image_is_one_error_of_one_line(data, said):
    with pytest.raises(ValueError, match=rf"^row 0: no image \(.*({said})") as caught:
        rgb_image(one(data), 0)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    assert list(broken_images(one(data))) == [0]


def test_small_and_long_images_are_read():
    assert rgb_image(one(written(NOISE.resize((1, 1)), "PNG")), 0).size == (1, 1)
    assert rgb_image(one(written(NOISE.resize((1000, 1)), "PNG")), 0).size == (1000, 1)


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_first_frame_of_an_animation_counts(form):
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    data = written(frames[0], form, save_all=True, append_images=frames[1:])
    assert Image.open(io.BytesIO(data)).n_frames == 2
    red, _, blue = rgb_image(one(data), 0).getpixel((2, 2))
    assert red > 200 and blue < 50


def test_transparency_and_cmyk_are_as_clips_preprocessing_takes_them():
    "Which is Pillow's conversion: colours of what is transparent, and plain CMYK."
    palette = NOISE.quantize(16)
    for data in (
        written(palette, "PNG", transparency=bytes(range(16))),
        written(NOISE.convert("RGBA"), "PNG"),
        written(NOISE.convert("CMYK"), "JPEG"),
    ):
        image = Image.open(io.BytesIO(data)).convert("RGB")
        assert np.array_equal(rgb_image(one(data), 0), image)


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
@pytest.mark.parametrize("form", ["JPEG", "PNG", "TIFF"])
def test_picture_that_lies_on_its_side_is_turned_upright(form, orientation):
    "As `datasets` does, bit for bit."
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = one(written(NOISE, form, exif=exif))
    found = rgb_image(data, 0)
    assert found.size == ((40, 50) if orientation in (6, 8) else (50, 40))
    assert np.array_equal(found, data[0]["image"].convert("RGB"))


# ---- rows that are left out


def folder_of(root, each=6, names=("ant", "bee")):
    for number, name in enumerate(names):
        (root / name).mkdir(parents=True)
        for row in range(each):
            NOISE.rotate(90 * number + row).save(root / name / f"{row}.png")
    return root


def broken_folder(root):
    "A folder with two broken images in the middle."
    folder_of(root)
    (root / "ant" / "3.png").write_bytes(b"404")
    (root / "bee" / "2.png").write_bytes(b"")
    return root


def parquet_of(root, path, nothing=None):
    "The same rows as parquet; in row `nothing` there is no image."
    part = image_dataset(
        *[
            [str(root / n / f"{r}.png") for n in ("ant", "bee") for r in range(6)],
            [0] * 6 + [1] * 6,
        ],
        ["ant", "bee"],
    )
    cells = [row["image"]["path"] for row in part.cast_column("image", ImageFeature(decode=False))]
    image = [dict(bytes=open(cell, "rb").read(), path=None) for cell in cells]
    if nothing is not None:
        image[nothing] = dict(bytes=None, path=str(root / "ant" / "0.png"))
    labels = list(labels_of(part))
    names = [("ant", "bee")[label] for label in labels]
    pq.write_table(pa.table(dict(image=image, label=labels, class_name=names)), path)
    return path


def test_broken_files_are_left_out_counted_and_listed(tmp_path):
    root = broken_folder(tmp_path / "pets")
    with pytest.warns(UserWarning, match="2 of 12 rows are left out") as caught:
        part = folder_parts(root, on_error="skip")["train"]
    said = [str(warning.message) for warning in caught]
    assert len(said) == 1 and "row 3 (" in said[0] and "ant/3.png" in said[0]
    assert "row 8 (" in said[0] and "bee/2.png" in said[0]
    assert labels_of(part).tolist() == [0] * 5 + [1] * 5 and not broken_images(part)


def test_fingerprint_is_that_of_what_is_kept(tmp_path):
    "So that ids of proxies mean the same row for whoever keeps the same rows."
    root = broken_folder(tmp_path / "pets")
    with pytest.warns(UserWarning):
        kept = load_domain(root, whole_train=True, on_error="skip")
    (root / "ant" / "3.png").unlink()
    (root / "bee" / "2.png").unlink()
    clean = load_domain(root, whole_train=True)
    for split in ("train", "validation", "test"):
        assert fingerprint(getattr(kept, split)) == fingerprint(getattr(clean, split))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is said where nothing is wrong
        again = load_domain(root, whole_train=True, on_error="skip")
    assert fingerprint(again.train) == fingerprint(clean.train)


def test_broken_image_is_an_error_by_default_which_names_its_file_and_row(tmp_path):
    root = broken_folder(tmp_path / "pets")
    part = folder_parts(root)["train"]  # the ends are whole
    with pytest.raises(ValueError, match=r"row 3 \(.*ant/3.png\): no image"):
        rgb_image(part, 3)
    part = parquet_parts({"train": parquet_of(root, tmp_path / "pets.parquet")})["train"]
    chosen = part.shuffle(seed=1).select(range(12))
    row = next(iter(broken_images(chosen)))
    with pytest.raises(ValueError, match=rf"row {row} \(pets.parquet, row (3|8)\): no image"):
        rgb_image(chosen, row)


@pytest.mark.parametrize("form", ["parquet", "large parquet", "copy of a repository"])
def test_broken_rows_of_files_are_left_out(form, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    if form == "large parquet":
        monkeypatch.setattr("harmomoe.data.images.IN_MEMORY_BYTES", 0)
    path = parquet_of(broken_folder(tmp_path / "pets"), tmp_path / "x.parquet", nothing=5)
    if form == "copy of a repository":
        kind = Features(image=ImageFeature(), label=ClassLabel(names=["ant", "bee"]))
        table = pq.read_table(path, columns=["image", "label"])
        (tmp_path / "copy" / "data").mkdir(parents=True)
        path = tmp_path / "copy" / "data" / "train-00000-of-00001.parquet"
        metadata = kind.arrow_schema.metadata
        pq.write_table(table.replace_schema_metadata(metadata), path)
        read = lambda how: hub_parts(hub_dataset(str(tmp_path / "copy")), "copy", how)["train"]
    else:
        read = lambda how: parquet_parts({"train": path}, how)["train"]
    with pytest.warns(UserWarning, match="3 of 12 rows .*row 3: .*row 5: .*paths are not followed"):
        assert labels_of(read("skip")).tolist() == [0] * 4 + [1] * 5
    with pytest.raises(ValueError, match="row 5: no image"):
        read("raise")


def test_long_reports_are_cut_and_nothing_left_is_an_error(tmp_path):
    root = folder_of(tmp_path / "pets", each=40)
    for row in range(30):
        (root / "ant" / f"{row}.png").write_bytes(b"404")
    with pytest.warns(UserWarning, match="30 of 80 rows are left out.*; and 10 more"):
        folder_parts(root, on_error="skip")
    for path in root.rglob("*.png"):
        path.write_bytes(b"404")
    with pytest.raises(ValueError, match="80 of 80 rows are left out.*Nothing is left"):
        folder_parts(root, on_error="skip")


def test_whoever_reads_a_benchmark_may_leave_rows_out(tmp_path):
    broken_folder(tmp_path / "data" / "pets")
    folder_of(tmp_path / "data" / "pool")
    for read in (
        lambda how: load_benchmark(tmp_path / "data", "pets", "pool", 0, how),
        lambda how: open_benchmark(str(tmp_path / "data"), "pets", "pool", on_error=how),
    ):
        with pytest.warns(UserWarning, match="2 of 12"):
            domain = read("skip").clients[0]
        assert sum(map(len, (domain.train, domain.validation, domain.test))) == 10
        with pytest.raises(ValueError, match="on_error is 'ignore', but must be 'raise' or 'skip'"):
            read("ignore")


# ---- what lies in a folder


def test_hidden_and_system_files_are_skipped_without_a_word(tmp_path):
    root = folder_of(tmp_path / "pets")
    for name in (".DS_Store", "._1.png", "Thumbs.db", "desktop.ini"):
        (root / "ant" / name).write_bytes(b"x")
    folders(root, "__MACOSX", "@eaDir", ".git")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        part = folder_parts(root)["train"]
    assert len(part) == 12 and part.features["label"].names == ["ant", "bee"]


def test_other_files_are_counted_in_one_warning_that_names_the_first(tmp_path):
    root = folder_of(tmp_path / "pets")
    for name in ("ant/a.heic", "ant/b.HEIC", "bee/notes.txt", "labels.csv"):
        (root / name).write_bytes(b"x")
    (root / "bee" / "empty").mkdir()
    said = "5 files or folders .*\\(.csv 1, .heic 2, .txt 1, no ending 1\\); the first is .*a.heic"
    for read in (folder_parts, class_folders):
        with pytest.warns(UserWarning, match=said) as caught:
            read(root)
        assert len(caught) == 1


def test_nested_images_are_refused_with_their_number_and_the_first(tmp_path):
    root = folder_of(tmp_path / "pets")
    folders(root / "ant", "young", "old/very")
    for read in (folder_parts, class_folders):
        with pytest.raises(ValueError, match="2 images lie in folders inside .*old/very/a.png"):
            read(root)


def test_folder_of_images_beside_the_splits_is_refused(tmp_path):
    root = tmp_path / "pets"
    for split in ("train", "test", "validate"):
        folder_of(root / split)
    with pytest.raises(ValueError, match="validate holds 12 images, but is none of the splits"):
        folder_parts(root)


def test_splits_without_class_folders_are_no_classes(tmp_path):
    folders(tmp_path, "train", "test")
    with pytest.raises(ValueError, match="test, train are names of splits, but train holds no"):
        folder_parts(tmp_path)


def test_names_that_are_no_utf8_are_refused(tmp_path):
    root = folder_of(tmp_path / "pets")
    (root / "ant" / "\udcff.png").write_bytes(b"x")
    with pytest.raises(ValueError, match="is no name in UTF-8; rename it"):
        folder_parts(root)


# ---- two for one split


@pytest.mark.parametrize("one", ["x_val", "x_dev", "x/val", "x_VALID"])
@pytest.mark.parametrize("other", ["x_validation.parquet", "x/Validation.PARQUET"])
def test_two_files_of_one_split_are_both_named(one, other, tmp_path):
    (tmp_path / "x").mkdir()
    for name in (f"{one}.parquet", other):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ValueError, match="are both its validation split; keep one") as caught:
        parquet_files(tmp_path / "x")
    assert f"{one}.parquet" in str(caught.value) and other in str(caught.value)


def test_whole_beside_a_split_is_refused_and_capital_letters_are_read(tmp_path):
    for name in ("x.parquet", "x_test.parquet"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ValueError, match="x.parquet is the whole, but .*x_test.parquet is a split"):
        parquet_files(tmp_path / "x")
    assert parquet_files(tmp_path / "x.parquet") == {"train": tmp_path / "x.parquet"}
    (tmp_path / "y_Train.PARQUET").write_bytes(b"x")
    assert parquet_files(tmp_path / "y") == {"train": tmp_path / "y_Train.PARQUET"}


def test_files_and_a_folder_of_images_by_one_name_are_refused(tmp_path):
    parquet_of(folder_of(tmp_path / "pets"), tmp_path / "pets_train.parquet")
    with pytest.raises(ValueError, match="pets_train.parquet and .*pets/ant/0.png go by one name"):
        load_domain(tmp_path / "pets")


def test_pipe_in_a_copy_of_a_repository_is_refused(tmp_path):
    (tmp_path / "data").mkdir()
    parquet_of(folder_of(tmp_path / "pets"), tmp_path / "data" / "train-00000-of-00001.parquet")
    os.mkfifo(tmp_path / "README.md")
    with pytest.raises(ValueError, match="README.md is neither a file nor a folder"):
        load_domain(tmp_path)


@pytest.mark.parametrize(
    "place", ["/etc/hosts.csv", "../x.json", "http://127.0.0.1:9/x.csv", "zip://a::http://b/c"]
)
def test_copy_whose_page_points_elsewhere_is_refused(place, tmp_path, monkeypatch):
    monkeypatch.setattr("socket.socket.connect", lambda *args: pytest.fail("called out"))
    (tmp_path / "data").mkdir()
    parquet_of(folder_of(tmp_path / "pets"), tmp_path / "data" / "train-00000-of-00001.parquet")
    files = f"[{{split: train, path: '{place}'}}]"
    page = f"---\nconfigs:\n- config_name: a\n  data_files: {files}\n---\n"
    (tmp_path / "README.md").write_text(page)
    with pytest.raises(ValueError, match="README.md: its configs name .*, outside of the copy"):
        load_domain(tmp_path)
    (tmp_path / "README.md").write_text("---\nconfigs: " + "[" * 9_000 + "\n---\n")
    with pytest.raises(ValueError, match="README.md: its header is no YAML"):
        load_domain(tmp_path)


# ---- class names


def named(path, names, kind=None):
    "Parquet of twelve images whose class names are these, by label."
    cells = [written(NOISE, "PNG")] * 12
    labels = [row % len(names) for row in range(12)]
    column = pa.array([names[label] for label in labels], kind)
    pq.write_table(pa.table(dict(image=cells, label=labels, class_name=column)), path)
    return {"train": path}


@pytest.mark.parametrize("kind", ["binary", "large_binary", pa.binary(4)])
def test_names_that_are_bytes_are_read_as_utf8(kind, tmp_path):
    files = named(tmp_path / "x.parquet", ["ants".encode(), "bär".encode()], kind)
    assert parquet_parts(files)["train"].features["label"].names == ["ants", "bär"]


def test_whole_numbers_are_names(tmp_path):
    files = named(tmp_path / "x.parquet", [7, 12])
    assert parquet_parts(files)["train"].features["label"].names == ["7", "12"]
    column = pa.array(["ant", "bee"] * 6).dictionary_encode()
    table = pq.read_table(tmp_path / "x.parquet").set_column(2, "class_name", column)
    pq.write_table(table, tmp_path / "y.parquet")
    files = {"train": tmp_path / "y.parquet"}
    assert parquet_parts(files)["train"].features["label"].names == ["ant", "bee"]


@pytest.mark.parametrize(
    "names, kind, said",
    [
        ([b"ant", b"\xff"], "binary", r"x.parquet, row 1: class_name is b'\\xff'; expected text"),
        (["ant", ""], None, "x.parquet, row 1: class_name is ''"),
        (["ant", " "], None, "x.parquet, row 1: class_name is ' '"),
        (["ant", None], None, "x.parquet, row 1: a row without label or class_name"),
        ([1.0, float("nan")], None, "x.parquet: column class_name is double; expected text"),
        ([True, False], None, "x.parquet: column class_name is bool"),
        ([["ant"], ["bee"]], None, "x.parquet: column class_name is list"),
        (["hot dog", "hot_dog"], None, "x.parquet: the class names .* differ in blanks only"),
        (["ant", "ant "], None, "x.parquet: the class names 'ant' and 'ant ' differ in blanks"),
        (["ant", "x" * (LONGEST_NAME + 1)], None, "is no class name; expected text of at most"),
    ],
    ids=str,
)
def test_what_is_no_name_is_refused_with_its_place(names, kind, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        parquet_parts(named(tmp_path / "x.parquet", names, kind))


def test_names_that_are_no_utf8_in_a_column_of_text_are_refused(tmp_path):
    files = named(tmp_path / "x.parquet", ["ant", "bee"])
    table = pq.read_table(files["train"])
    wrong = pa.array([b"ant", b"\xff"] * 6).view(pa.string())
    pq.write_table(table.set_column(2, "class_name", wrong), files["train"])
    with pytest.raises(ValueError, match="x.parquet .*(UTF8|UTF-8|utf-8)"):
        parquet_parts(files)


def test_names_that_differ_in_case_are_two_classes_and_a_warning():
    with pytest.warns(UserWarning, match="here: .*'Cat' and 'cat' differ in case only"):
        assert check_names(["Cat", "cat", "dog"], "here") == ["Cat", "cat", "dog"]


# ---- what schemas say


@pytest.mark.parametrize(
    "told", [b"[" * 9_000, b"\xff", b"[]", b'{"info": {"features": {"label": 7}}}'], ids=len
)
def test_hostile_notes_in_a_schema_are_no_names(told, tmp_path):
    files = named(tmp_path / "x.parquet", ["ant", "bee"])
    table = pq.read_table(files["train"]).replace_schema_metadata({b"huggingface": told})
    pq.write_table(table, files["train"])
    assert len(parquet_parts(files)["train"]) == 12  # the column has the names
    pq.write_table(table.drop(["class_name"]), files["train"])
    with pytest.raises(ValueError, match="no column class_name, and the schema has no names"):
        parquet_parts(files)


# ---- classes and splits


def split_of(path, labels, names=("ant", "bee", "cat")):
    cells = [written(NOISE, "PNG")] * len(labels)
    named = [names[label] for label in labels]
    table = dict(image=pa.array(cells, "binary"), label=pa.array(labels, "int64"),
                 class_name=pa.array(named, "string"))  # fmt: skip
    pq.write_table(pa.table(table), path)


def test_class_that_train_lacks_is_refused(tmp_path):
    split_of(tmp_path / "x_train.parquet", [0, 1] * 9)
    split_of(tmp_path / "x_test.parquet", [0, 1, 2])
    with pytest.raises(ValueError, match=r"x: test has samples of 1 classes .* such as \['cat'\]"):
        load_domain(tmp_path / "x")


def test_class_without_any_sample_is_a_warning(tmp_path):
    features = Features(image=ImageFeature(), label=ClassLabel(names=["ant", "bee", "cat"]))
    cells = [dict(bytes=written(NOISE, "PNG"), path=None)] * 18
    part = Dataset.from_dict(dict(image=cells, label=[0, 2] * 9), features)
    pq.write_table(part.with_format("arrow")[:], tmp_path / "x.parquet")
    with pytest.warns(UserWarning, match=r"x: 1 of 3 classes have no sample, such as \['bee'\]"):
        assert load_domain(tmp_path / "x").classes == ["ant", "bee", "cat"]


@pytest.mark.parametrize(
    "train, test, said",
    [([], [0, 1], "that train lacks"), ([0, 1] * 9, [], "split test: no samples"),
     ([0] * 9, [0], "is its only class")],
)  # fmt: skip
def test_empty_splits_and_single_classes_are_refused(train, test, said, tmp_path):
    split_of(tmp_path / "x_train.parquet", train)
    split_of(tmp_path / "x_test.parquet", test)
    with pytest.raises(ValueError, match=said):
        load_domain(tmp_path / "x")
