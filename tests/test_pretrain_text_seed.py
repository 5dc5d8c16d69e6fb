"""The notebook that pre-trains a language model, on a tiny pool: the seed that it leaves, an
interrupted run, and wrong parameters."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import harmomoe.models.training
from harmomoe.base.artefacts import read_manifest
from harmomoe.data.domains import load_domain
from harmomoe.models.weights import open_seed

PRETRAIN = Path(__file__).resolve().parent.parent / "nbs" / "pretrain_text_seed.ipynb"

pytestmark = [
    pytest.mark.usefixtures("elsewhere"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(scope="module")
def pretraining(tmp_path_factory):
    "Parameters of a run of eight steps."
    path = tmp_path_factory.mktemp("pool") / "public.jsonl"
    words = ["ferry", "quay", "harbour", "tide", "gull"]
    rows = [
        dict(instruction=f"Say {n} of {word}.", output=f"{word} is said {n} times.")
        for n in range(12)
        for word in words
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    size = dict(vocabulary=300, hidden=32, ffn=48, layers=2, heads=2, context=32)
    how = dict(epochs=2, batch_size=16, warmup=2, bfloat16=False, threads=1)
    return dict(pool=str(path), **size, **how)


@pytest.fixture(scope="module")
def pretrained(pretraining, run_apart):
    "Folder of a finished seed, and the names that its notebook has defined."
    return run_apart(PRETRAIN, pretraining, "seeds/mine")


def test_seed_opens_under_the_name_of_its_folder(pretrained, pretraining):
    folder, space = pretrained
    assert [path.name for path in folder.parent.iterdir()] == ["mine"]
    seed = open_seed(str(folder))
    assert (seed.name, len(seed.layers), seed.max_length) == ("mine", 2, 32)
    assert torch.isfinite(seed.embed(load_domain(pretraining["pool"], whole_train=True).test)).all()
    facts = read_manifest(folder, "seed")["facts"]["bits_per_byte"]
    assert facts == space["bits"] and 0 < facts["public"] < 10


def test_it_learns(pretrained):
    losses = pretrained[1]["losses"]
    assert len(losses) == 2 * pretrained[1]["steps"] and losses[-1] < losses[0]


def test_every_window_of_an_epoch_is_seen_once(pretrained, monkeypatch):
    space = pretrained[1]
    monkeypatch.setitem(space, "stream", torch.arange(len(space["stream"])))
    orders = []
    for epoch in range(3):
        windows = space["batches"](epoch).flatten(0, 1)
        assert (windows.diff(dim=1) == 1).all() and len(windows) == 16 * space["steps"]
        assert (windows[:, 0].sort().values.diff() % 32 == 0).all()
        assert len(windows[:, 0].unique()) == len(windows)
        assert torch.equal(windows, space["batches"](epoch).flatten(0, 1))
        orders.append(tuple(windows[:, 0].tolist()))
    assert len(set(orders)) == 3


def test_samples_end_where_they_end(pretrained):
    "No token for the end of a text is predicted after a passage."
    seed = open_seed(str(pretrained[0]))
    assert seed.tokenizer.eos_token_id is None
    assert seed.tokenize("One, two", " three.", ended=True).text == "One, two three."
    assert seed.tokenizer.decode(seed.tokenizer("Größe 日本")["input_ids"]) == "Größe 日本"


@pytest.mark.parametrize("stop", [1, 3])
def test_interrupted_pretraining_ends_in_the_same_seed(
    stop, pretrained, pretraining, run_cells, tmp_path, monkeypatch
):
    writes, write = [], harmomoe.models.training.Checkpoint.write

    def write_until(self, tensors, place):
        writes.append(place["step"])
        if len(writes) > stop:
            raise KeyboardInterrupt
        write(self, tensors, place)

    given = pretraining | dict(out=str(tmp_path / "mine"), minutes=0.0)
    with monkeypatch.context() as patch:
        patch.setattr(harmomoe.models.training.Checkpoint, "write", write_until)
        with pytest.raises(KeyboardInterrupt):
            run_cells(PRETRAIN, given)
    assert not (tmp_path / "mine").exists()
    space = run_cells(PRETRAIN, given)
    assert space["begun"] == stop and space["losses"] == pretrained[1]["losses"]
    weights = [load_file(f / "model.safetensors") for f in (pretrained[0], tmp_path / "mine")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def test_too_little_text_is_said_at_once(pretraining, run_cells):
    with pytest.raises(ValueError, match="too few for one step of 500 windows of 32"):
        run_cells(PRETRAIN, pretraining | dict(batch_size=500))


@pytest.mark.parametrize(
    "changes, error, said",
    [
        (dict(epoch=1), ValueError, "unknown parameter 'epoch'. Did you mean 'epochs'"),
        (dict(hidden="64"), ValueError, "'hidden' is '64', but must be of type int"),
        (dict(pool="no/such/pool/anywhere"), FileNotFoundError, "no/such/pool/anywhere"),
    ],
    ids=str,
)
def test_wrong_parameters_are_refused(changes, error, said, pretraining, run_cells, tmp_path):
    with pytest.raises(error, match=said):
        run_cells(PRETRAIN, pretraining | dict(out=str(tmp_path / "mine")) | changes)
    assert list(tmp_path.iterdir()) == []
