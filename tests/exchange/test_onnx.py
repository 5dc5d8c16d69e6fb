"The image model as one ONNX file gives the scores that PyTorch gives, or is not written at all."

import json
import sys

import pytest
import torch

from harmomoe.exchange.onnx import save_onnx
from harmomoe.models.model import Model
from harmomoe.models.unified import UnifiedModel
from harmomoe.models.weights import open_seed
from harmomoe.moe.router import RouterSettings

CLASSES = ["a_cat", "a dog", "neither"]


def session(file):
    "ONNX Runtime, which knows nothing of harmomoe."
    runtime = pytest.importorskip("onnxruntime")
    return runtime.InferenceSession(file, providers=["CPUExecutionProvider"])


def images(seed, number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(number, 3, *seed.backbone.image_size, generator=generator)


def agree(model, opened, number=3):
    "Scores of random images, to 1e-4 of the largest."
    given = images(model.seed, number)
    [found] = opened.run(["scores"], {"images": given.numpy()})
    with torch.no_grad():
        expected = model.scorer(CLASSES)(dict(images=given))
    return (torch.from_numpy(found) - expected).abs().max() < 1e-4 * expected.abs().max()


def unified(seed, **settings):
    torch.manual_seed(0)
    settings = RouterSettings(**dict(top_k=2, form="logistic") | settings)
    model = UnifiedModel(seed, ["seed", "law", "medicine"], [0, 4, 2], [0.0, 2.0, 1.0], settings)
    with torch.no_grad():
        for layer in model.layers:
            for factor in (*layer.a.values(), *layer.b.values(), layer.router.vectors):
                factor.normal_(std=0.3)
    return model


@pytest.mark.parametrize("number", [1, 7])
def test_batches_of_any_size(tiny_seed, tmp_path, number):
    model = unified(tiny_seed)
    assert agree(model, session(save_onnx(model, tmp_path / "model.onnx", CLASSES)), number)


@pytest.mark.parametrize(
    "settings",
    [
        dict(top_k=1, norm_topk_prob=True, form="evidence"),
        dict(top_k=3, form="mean", lam=0.3),
        dict(cumulative=True, form="moments"),
    ],
)
def test_every_kind_of_choice(tiny_seed, tmp_path, settings):
    model = unified(tiny_seed, **settings)
    assert agree(model, session(save_onnx(model, tmp_path / "model.onnx", CLASSES)))


def test_members_that_are_off_stay_off(tiny_seed, tmp_path):
    model = unified(tiny_seed)
    with model.only("law"):
        opened = session(save_onnx(model, tmp_path / "model.onnx", CLASSES))
        assert agree(model, opened)
    assert not agree(model, opened)


def test_a_dense_model_and_what_the_file_says(tiny_seed, tmp_path):
    model = Model(tiny_seed, tiny_seed.backbone)
    opened = session(save_onnx(model, tmp_path / "new" / "model.onnx", CLASSES))
    assert agree(model, opened)
    about = opened.get_modelmeta().custom_metadata_map
    assert json.loads(about["classes"]) == CLASSES
    assert json.loads(about["preprocessing"])["size"] == list(tiny_seed.backbone.image_size)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model.onnx"]


@pytest.mark.parametrize("classes", [[], ["one", "one"]])
def test_classes_are_different_names(tiny_seed, tmp_path, classes):
    with pytest.raises(ValueError, match="classes must be names, one at least"):
        save_onnx(Model(tiny_seed, tiny_seed.backbone), tmp_path / "model.onnx", classes)


def test_language_models_are_refused(tiny_decoder, tmp_path):
    seed = open_seed(str(tiny_decoder))
    with pytest.raises(ValueError, match="tiny is a language model.*save_transformers"):
        save_onnx(Model(seed, seed.backbone), tmp_path / "model.onnx", CLASSES)


def test_missing_packages_are_named(tiny_seed, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r"harmomoe\[onnx\]"):
        save_onnx(Model(tiny_seed, tiny_seed.backbone), tmp_path / "model.onnx", CLASSES)
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_leaves_nothing(tiny_seed, tmp_path, monkeypatch):
    def fail(*paths):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("harmomoe.exchange.onnx.os.replace", fail)
    with pytest.raises(OSError, match="model.onnx cannot be written"):
        save_onnx(unified(tiny_seed), tmp_path / "model.onnx", CLASSES)
    assert not list(tmp_path.iterdir())
