"Safetensors files by rows and in pieces: the library reads what we write, and we what it writes."

import os
import shutil
import tempfile
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import harmomoe.base.tensors as tensors_module
from harmomoe.base.tensors import NAMES, roomy, stored_tensors, write_tensors


class Pieces:
    "A tensor that comes row by row, perhaps in another type."

    def __init__(self, whole, dtype=None):
        self.whole, self.dtype, self.shape = whole, dtype or whole.dtype, whole.shape

    def pieces(self):
        return iter(self.whole.split(1))


def some():
    torch.manual_seed(0)
    found = {str(t).rpartition(".")[2]: (100 * torch.randn(7, 3)).to(t) for t in NAMES}
    found |= dict(scalar=torch.tensor(0.5), none=torch.zeros(0, 4), vector=torch.arange(5))
    return found | dict(strided=torch.randn(4, 6).T, **{"a.b-ü": torch.randn(2, 2, 2)})


@pytest.mark.parametrize("in_pieces", [False, True])
def test_what_is_written_is_what_the_library_writes(in_pieces, tmp_path):
    tensors = some()
    save_file({name: t.contiguous() for name, t in tensors.items()}, tmp_path / "library")
    ours = {name: Pieces(t) if in_pieces and t.ndim else t for name, t in tensors.items()}
    write_tensors(tmp_path / "ours", ours)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "library").read_bytes()


def test_rows_are_those_of_the_tensor(tmp_path):
    tensors = {name: t.contiguous() for name, t in some().items()}
    save_file(tensors, tmp_path / "file", metadata=dict(note="x"))
    found = stored_tensors(tmp_path / "file")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        for first in range(len(tensor) + 1 if tensor.ndim else 0):
            for last in range(first, len(tensor) + 1):
                rows = found[name].rows(first, last)
                assert torch.equal(rows, tensor[first:last]) and rows.dtype == tensor.dtype


def test_pieces_take_the_type_that_was_announced(tmp_path):
    write_tensors(tmp_path / "file", dict(x=Pieces(torch.ones(3, 2).double(), torch.bfloat16)))
    assert load_file(tmp_path / "file")["x"].dtype == torch.bfloat16


def test_a_piece_can_be_refused(tmp_path):
    def refuse(name, piece):
        if not piece.isfinite().all():
            raise FloatingPointError(name)

    tensors = dict(good=torch.ones(2), bad=Pieces(torch.tensor([[1.0], [torch.nan]])))
    with pytest.raises(FloatingPointError, match="bad"):
        write_tensors(tmp_path / "file", tensors, refuse)


@pytest.mark.parametrize("how", ["again", "renamed", "gone", "cut"])
def test_rows_of_another_file_are_refused(how, tmp_path):
    file, other = tmp_path / "file", tmp_path / "other"
    for path, number in ((file, 1.0), (other, 2.0)):
        save_file(dict(x=torch.full((3, 2), number)), path)
    tensor = stored_tensors(file)["x"]
    if how == "again":
        os.utime(shutil.copyfile(other, file), (1, 1))
    elif how == "renamed":
        other.replace(file)
    elif how == "cut":
        os.truncate(file, file.stat().st_size - 4)
    else:
        file.unlink()
    wrong = FileNotFoundError if how == "gone" else ValueError
    with pytest.raises(wrong, match="file"):
        tensor.rows(0, 1)


def test_what_is_no_such_file_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"\0" * 100)
    with pytest.raises(ValueError, match="no safetensors file"):
        stored_tensors(tmp_path / "file")
    with pytest.raises(ValueError, match="complex64"):
        write_tensors(tmp_path / "other", dict(x=torch.ones(2, dtype=torch.complex64)))


def test_a_large_tensor_is_a_file_without_a_name_that_goes_with_it(monkeypatch, tmp_path):
    monkeypatch.setattr(tensors_module, "IN_MEMORY", 4 * 24)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    small, large = roomy((2, 3, 4), "they"), roomy((2, 3, 5), "they")
    assert not isinstance(small.numpy().base, np.memmap)
    assert large.dtype == torch.float32 and large.shape == (2, 3, 5)
    kept = f"/proc/{os.getpid()}/maps"
    if os.path.exists(kept):
        assert f"{tmp_path}/" in open(kept).read()
    large[:] = torch.arange(30).reshape(2, 3, 5)
    part = large[1]
    del large
    assert part.flatten().tolist() == list(range(15, 30)) and not os.listdir(tmp_path)
    del part
    if os.path.exists(kept):
        assert f"{tmp_path}/" not in open(kept).read()


def test_a_large_tensor_needs_room_on_the_disk(monkeypatch, tmp_path):
    monkeypatch.setattr(tensors_module, "IN_MEMORY", 0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1_234_567_890))
    said = (
        rf"the means take 4 GB, but {tmp_path} has 1.23 GB free: set TMPDIR to a folder on a larger"
    )
    with pytest.raises(OSError, match=said):
        roomy((10**9,), "the means")
    roomy((10**3,), "the means")
    assert not os.listdir(tmp_path)
