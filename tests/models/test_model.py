"A backbone and its seed as one: what it answers, and what a folder of it may hold."

import json
import pickle
from dataclasses import dataclass

import pytest
import torch
from families import ABC, QUESTIONS, only, seed_of
from networks import same

from harmomoe.base.artefacts import MANIFEST, read_manifest
from harmomoe.models.model import FILE, Model, load_model, read_model, write_model

# ---- what it answers


def test_model_counts_the_parameters_of_its_backbone(tiny_seed):
    backbone = tiny_seed.new_backbone()
    count = sum(value.numel() for value in backbone.state_dict().values())
    assert Model(tiny_seed, backbone).count_parameters() == dict(total=count, active=count)
    backbone.proj, less = None, count - 64 * 32
    assert Model(tiny_seed, backbone).count_parameters() == dict(total=less, active=less)


def test_scores_are_those_of_the_seeds_task(tiny_seed, tiny_benchmark):
    domain = tiny_benchmark.clients[0]
    [batch] = tiny_seed.batches(domain.test, domain.classes)
    model = Model(tiny_seed, tiny_seed.backbone)
    with torch.no_grad():
        wanted = tiny_seed.task(domain.classes).scores(model.backbone, batch)
        assert torch.equal(model.scorer(domain.classes)(batch), wanted)
    assert model.for_domain("anybody") is model and model.losses == []


# ---- its folder


@pytest.fixture
def saved(tiny_seed, tmp_path):
    "A dense model whose weights are not the seed's, and its folder."
    backbone = tiny_seed.new_backbone()
    with torch.no_grad():
        backbone.get_submodule(tiny_seed.layers[0]).c_fc.weight += 0.1
    model = Model(tiny_seed, backbone)
    return model, model.save(tmp_path / "model", dict(from_="a test"))


def test_a_dense_model_comes_back_the_same(saved, tiny_seed, tiny_benchmark):
    model, folder = saved
    again, data = load_model(str(folder)), tiny_benchmark.pool.test
    assert type(again) is Model and same(again.backbone, model.backbone)
    assert not any(p.requires_grad for p in again.backbone.parameters())
    [batch] = tiny_seed.batches(data, tiny_benchmark.pool.classes)
    scores = [one.scorer(tiny_benchmark.pool.classes)(batch) for one in (model, again)]
    assert torch.equal(*scores) and again.seed.prompt == tiny_seed.prompt
    assert not same(model.backbone, tiny_seed.backbone)
    assert read_manifest(folder, "model")["inputs"] == dict(from_="a test")


def test_a_model_for_text_too(tmp_path):
    seed = seed_of()
    backbone = seed.new_backbone()
    with torch.no_grad():
        backbone.get_submodule(seed.layers[0]).up_proj.weight += 0.1
    model = Model(seed, backbone)
    again = load_model(model.save(tmp_path / "model"))
    assert same(again.backbone, backbone)
    batch = only(seed, QUESTIONS)
    with torch.no_grad():
        assert torch.equal(*(one.scorer(ABC)(batch) for one in (model, again)))


def test_a_model_replaces_the_one_before_as_a_whole(saved, tiny_seed):
    _, folder = saved
    (folder / "notes.txt").write_text("left from before")
    Model(tiny_seed, tiny_seed.backbone).save(folder)
    assert same(load_model(folder).backbone, tiny_seed.backbone)


def test_a_number_that_is_not_finite_is_not_saved_and_the_model_before_stays(saved, tiny_seed):
    model, folder = saved
    backbone = tiny_seed.new_backbone()
    with torch.no_grad():
        backbone.proj[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="proj of the model is not finite"):
        Model(tiny_seed, backbone).save(folder)
    assert same(load_model(folder).backbone, model.backbone)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


# ---- kinds


def test_every_kind_that_was_imported_is_known():
    import harmomoe.models.adapters
    import harmomoe.models.ensemble
    import harmomoe.models.unified

    known = dict(
        dense=Model,
        moe=harmomoe.models.unified.UnifiedModel,
        ensemble=harmomoe.models.ensemble.Ensemble,
        personal=harmomoe.models.ensemble.Personal,
        adapters=harmomoe.models.adapters.RoutedAdapters,
    )
    assert known.items() <= Model.kinds.items()


@dataclass
class Note:
    "What a kind of one's own says of itself."

    text: str = "hello"


def test_a_kind_of_ones_own_is_saved_and_read_like_the_others(tiny_seed, tmp_path, monkeypatch):
    monkeypatch.setattr(Model, "kinds", dict(Model.kinds))

    class Named(Model):
        kind, facts = "named", Note

        def write(self, folder):
            (folder / "file").write_text("content")
            return Note()

        @classmethod
        def read(cls, folder, facts, device):
            assert (folder / "file").read_text() == "content" and facts == Note("hello")
            return cls(tiny_seed, tiny_seed.backbone)

    folder = Named(tiny_seed, tiny_seed.backbone).save(tmp_path / "model")
    assert type(load_model(folder)) is Named and Model.kinds["named"] is Named
    monkeypatch.delitem(Model.kinds, "named")
    with pytest.raises(
        ValueError, match="kind is 'named', but known are .*dense.*; import the mod"
    ):
        load_model(folder)


# ---- folders that are wrong


def rewrite(folder, **changes):
    "What `model.json` says, changed; nothing else is touched."
    told = json.loads((folder / FILE).read_text()) | changes
    told = {key: value for key, value in told.items() if value is not ...}
    (folder / FILE).write_text(json.dumps(told))


@pytest.mark.parametrize(
    "changes, said",
    [
        (dict(kind=...), "kind is None, but known are"),
        (dict(kind=None), "kind is None"),
        (dict(kind=7), "kind is 7"),
        (dict(kind=["dense"]), r"kind is \['dense'\]"),
        (dict(kind={"dense": 1}), "kind is {'dense': 1}"),
        (dict(kind="../dense"), "kind is '../dense'"),
        (dict(kind="x" * 10**6), "kind is 'xxx"),
        (dict(rank=4), "rank"),
        (dict(kind="moe"), "'experts' is missing"),
        (dict(kind="ensemble", members=1), "'weighted' is missing"),
        (dict(kind="personal", members="ab"), "members is 'ab'"),
    ],
    ids=lambda given: str(given)[:40],
)
def test_facts_that_cannot_be_are_refused_naming_the_file(changes, said, saved):
    _, folder = saved
    rewrite(folder, **changes)
    with pytest.raises(ValueError, match=said) as caught:
        read_model(folder)
    assert str(folder / FILE) in str(caught.value) and len(str(caught.value)) < 1000


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 10**5, pickle.dumps({})])
def test_facts_that_are_none_are_refused(content, saved):
    _, folder = saved
    (folder / FILE).write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read_model(folder)
    assert str(folder / FILE) in str(caught.value)


@pytest.mark.parametrize("name", [FILE, "open_clip_model.safetensors", "open_clip_config.json"])
@pytest.mark.parametrize("damage", ["changed", "cut", "gone"])
def test_damaged_files_are_found_before_anything_is_read(name, damage, saved):
    _, folder = saved
    content = (folder / name).read_bytes()
    if damage == "gone":
        (folder / name).unlink()
    else:
        cut = dict(changed=content[:-1] + b"?", cut=content[:10])[damage]
        (folder / name).write_bytes(cut)
    said = f"{name} missing" if damage == "gone" else f"{name} was changed"
    with pytest.raises(ValueError, match=said):
        load_model(folder)


def test_a_file_that_does_not_belong_is_refused(saved):
    _, folder = saved
    (folder / "code.py").write_text("print('hello')")
    with pytest.raises(ValueError, match="code.py not in the manifest"):
        load_model(folder)


def test_what_is_no_model_is_refused(tiny_clients, tiny_seed, tmp_path):
    with pytest.raises(FileNotFoundError, match=MANIFEST):
        load_model(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds a 'bundle', but a 'model' was asked for"):
        load_model(tiny_clients / "a" / "bundle")
    write_model(Model(tiny_seed, tiny_seed.backbone), tmp_path / "parts")
    with pytest.raises(FileNotFoundError, match="is no finished artefact"):
        load_model(tmp_path / "parts")


def test_weights_of_another_architecture_are_refused(saved):
    _, folder = saved
    config = json.loads((folder / "open_clip_config.json").read_text())
    config["model_cfg"]["vision_cfg"]["layers"] = 3
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="does not hold a whole seed"):
        read_model(folder)
