"""The notebook that pre-trains a seed, on the tiny pool: the seed that it leaves, an interrupted
run, and wrong parameters."""

from pathlib import Path

import pytest
import safetensors.torch
import torch

import harmomoe.models.clip
from harmomoe.base.artefacts import MANIFEST, read_manifest
from harmomoe.models.weights import open_seed

PRETRAIN = Path(__file__).resolve().parent.parent / "nbs" / "pretrain_seed.ipynb"

pytestmark = [
    pytest.mark.usefixtures("elsewhere"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(scope="module")
def pretraining(tiny_folder):
    return dict(
        pool=str(tiny_folder / "pool"),
        image_size=16,
        width=64,
        layers=1,
        masked_epochs=1,
        visible=2,
        text_steps=2,
        epochs=2,
        full_epochs=1,
        batch_size=32,
        merges=100,
        prompt="a {} here",
        threads=1,
    )


@pytest.fixture(scope="module")
def pretrained(pretraining, run_apart):
    "Folder of a finished seed, and the names that its notebook has defined."
    return run_apart(PRETRAIN, pretraining, "seeds/mine")


def test_pretrained_seed_opens_under_the_name_of_its_folder(pretrained, tiny_benchmark):
    folder, _ = pretrained
    assert [path.name for path in folder.parent.iterdir()] == ["mine"]
    seed = open_seed(str(folder))
    assert (seed.name, seed.prompt, len(seed.layers)) == ("mine", "a {} here", 1)
    assert torch.isfinite(seed.embed(tiny_benchmark.pool.test)).all()
    manifest = read_manifest(folder, "seed")
    assert manifest["inputs"]["parameters"]["epochs"] == 2
    assert "pool" in manifest["facts"]["zero_shot"]


def test_names_are_trained_as_they_will_be_used(pretrained):
    _, space = pretrained
    used = space["tokenizer"]([f"a {name.replace('_', ' ')} here" for name in space["names"]])
    assert torch.equal(space["tokens"], used)


@pytest.mark.parametrize("stop", [1, 2, 4])
def test_interrupted_pretraining_ends_in_the_same_seed(
    stop, pretrained, pretraining, run_cells, tmp_path, monkeypatch
):
    """Interrupted after the masked epoch, the first naming epoch, or when only the seed is yet
    to be saved."""
    saves, save = [], harmomoe.models.clip.save_file

    def save_until(tensors, path, **more):
        saves.append(path)
        if len(saves) > stop:
            raise KeyboardInterrupt
        save(tensors, path, **more)

    with monkeypatch.context() as patch:
        for module in (safetensors.torch, harmomoe.models.clip):
            patch.setattr(module, "save_file", save_until)
        with pytest.raises(KeyboardInterrupt):
            run_cells(PRETRAIN, pretraining | dict(out="mine"))
    assert not (tmp_path / "mine").exists()
    batches, sample = [], torch.nn.functional.grid_sample

    def count(*args, **kwargs):
        batches.append(1)
        return sample(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "grid_sample", count)
    run_cells(PRETRAIN, pretraining | dict(out="mine"))
    assert len(batches) == 1 + 3 * (4 - stop)  # one to be looked at, and three for each epoch left
    for file in pretrained[0].iterdir():
        if file.name != MANIFEST:
            assert (tmp_path / "mine" / file.name).read_bytes() == file.read_bytes(), file.name
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    "changes, error, said",
    [
        (dict(epoch=1), ValueError, "unknown parameter 'epoch'. Did you mean 'epochs'"),
        (dict(seed=1), ValueError, "'seed' is now called 'random_state'"),
        (dict(width="64"), ValueError, "'width' is '64', but must be of type int"),
        (dict(visible=4), ValueError, "visible is 4, but must be 1 to 3: an image has 4 patches"),
        (dict(pool="no/such/pool/anywhere"), FileNotFoundError, "no/such/pool/anywhere"),
    ],
    ids=str,
)
def test_wrong_parameters_are_refused(changes, error, said, pretraining, run_cells, tmp_path):
    with pytest.raises(error, match=said):
        run_cells(PRETRAIN, pretraining | dict(out="mine") | changes)
    assert list(tmp_path.iterdir()) == []
