"A seed is opened from every source or refused with one clear error; embeddings depend on the image alone."
import json

import datasets
import numpy as np
import open_clip
import pytest
import torch
from datasets import Dataset, Features
from open_clip import factory
from PIL import Image
from safetensors.torch import save_file

import harmomoe.weights
from harmomoe.core import seeded
from harmomoe.ffn import CLIP_FFN, TIMM_FFN
from harmomoe.seed import CONFIG, PAPER_PROMPT, VOCABULARY, WEIGHTS, ImageSeed, Model, labelled
from harmomoe.weights import open_seed

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")  # OpenAI's archives are TorchScript

NANO = dict(embed_dim=32, vision_cfg=dict(image_size=16, layers=2, width=64, patch_size=8),
            text_cfg=dict(context_length=77, vocab_size=49408, width=64, heads=1, layers=1))
THREE = ("input_resolution", "context_length", "vocab_size")


@pytest.fixture(scope="module")
def registry(tmp_path_factory):
    "Models of a few thousand weights that open_clip knows by name while this file is tested."
    folder = tmp_path_factory.mktemp("configs")
    towers = {"nano-RN": dict(image_size=32, layers=[1, 1, 1, 1], width=8, patch_size=None),
              "nano-timm": dict(timm_model_name="test_vit", timm_pool="", timm_proj="linear", image_size=160),
              "nano-head": dict(timm_model_name="test_vit", timm_pool="avg", timm_proj="mlp", image_size=160),
              "nano-convnext": dict(timm_model_name="test_convnext", timm_pool="", timm_proj="linear", image_size=160),
              "nano-tokens": NANO["vision_cfg"] | dict(output_tokens=True)}
    configs = {"nano-ViT": NANO, "nano-wide": NANO | dict(embed_dim=64),
               **{name: NANO | dict(vision_cfg=tower) for name, tower in towers.items()}}
    for name, config in configs.items(): (folder / f"{name}.json").write_text(json.dumps(config))
    open_clip.add_model_config(folder)
    yield configs
    factory._MODEL_CONFIG_PATHS.remove(folder)
    factory._rescan_model_configs()


@pytest.fixture(scope="module")
def weights(registry):
    "Random weights of nano-ViT that float16 holds exactly, as OpenAI's are."
    with seeded(3): clip = open_clip.create_model("nano-ViT")
    return {key: value.half().float().contiguous() for key, value in clip.state_dict().items()}


def integers(config):
    "What OpenAI's archives hold beside the weights."
    values = config["vision_cfg"]["image_size"], config["text_cfg"]["context_length"], config["text_cfg"]["vocab_size"]
    return {name: torch.tensor(value) for name, value in zip(THREE, values)}


def archive(tensors, path):
    "Save tensors as a TorchScript archive, as OpenAI publishes them."
    root = torch.nn.Module()
    for name, value in tensors.items():
        *parents, leaf = name.split(".")
        module = root
        for parent in parents:
            if parent not in module._modules: module.add_module(parent, torch.nn.Module())
            module = module._modules[parent]
        module.register_buffer(leaf, value)
    torch.jit.script(root).save(str(path))


def noise(*size, seed=0, channels=3):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, channels), dtype=np.uint8).squeeze())


def pictures(images, **columns):
    features = Features(image=datasets.Image(), **{name: datasets.Value("string") for name in columns})
    return Dataset.from_dict(dict(image=images, **columns), features=features)


def activations(seed): return {type(seed.tower.get_submodule(f"{path}.gelu")).__name__ for path in seed.layers}


# ---- saved seeds

def test_saved_seed_opens_as_the_same_model(tiny_seed, tiny_seed_folder, tiny_benchmark):
    again = open_seed(str(tiny_seed_folder))
    assert again.identity == tiny_seed.identity
    assert (again.name, again.prompt, again.config) == ("tiny", "a picture of a {}", tiny_seed.config)
    data = tiny_benchmark.pool.test
    assert torch.equal(again.embed(data), tiny_seed.embed(data))
    assert torch.equal(again.label_features(("a dog", "grün")), tiny_seed.label_features(("a dog", "grün")))
    assert sorted(path.name for path in tiny_seed_folder.iterdir()) == sorted([CONFIG, WEIGHTS, VOCABULARY])


def test_saved_seed_is_a_folder_that_open_clip_reads(tiny_seed, tiny_seed_folder):
    clip = open_clip.create_model(f"local-dir:{tiny_seed_folder}", require_pretrained=True)
    assert all(torch.equal(value, tiny_seed.clip.state_dict()[key]) for key, value in clip.state_dict().items())


def test_saving_again_gives_the_same_bytes(tiny_seed_folder, tmp_path):
    open_seed(str(tiny_seed_folder)).save(tmp_path)
    for file in tiny_seed_folder.iterdir(): assert (tmp_path / file.name).read_bytes() == file.read_bytes()


def test_another_tower_can_be_saved_in_place_of_the_seeds_own(tiny_seed, tiny_benchmark, tmp_path):
    tower, before, client = tiny_seed.new_tower(), tiny_seed.identity, tiny_benchmark.clients[0]
    with torch.no_grad(), seeded(1):
        for p in tower.parameters(): p.add_(.05 * torch.randn_like(p))
    tiny_seed.save(tmp_path, tower=tower)
    again, batch = open_seed(str(tmp_path)), next(iter(tiny_seed.batches(client.test)))
    with torch.no_grad():
        found, expected, own = (Model(seed, part).scorer(client.classes)(batch) for seed, part in (
            (again, again.tower), (tiny_seed, tower), (tiny_seed, tiny_seed.tower)))
    assert torch.equal(found, expected) and not torch.allclose(found, own, atol=.1)
    assert tiny_seed.identity == before and again.identity["weights"] != before["weights"]


def test_model_counts_the_parameters_of_its_tower(tiny_seed):
    tower = tiny_seed.new_tower()
    count = sum(value.numel() for value in tower.state_dict().values())
    assert Model(tiny_seed, tower).parameters() == dict(total=count, active=count)
    tower.proj = None
    assert Model(tiny_seed, tower).parameters() == dict(total=count - 64 * 32, active=count - 64 * 32)


def test_half_precision_file_is_half_as_large_and_opens_in_float32(tiny_seed, tiny_seed_folder, tmp_path):
    tiny_seed.save(tmp_path, torch.float16)
    assert (tmp_path / WEIGHTS).stat().st_size < .51 * (tiny_seed_folder / WEIGHTS).stat().st_size + 10_000
    half = open_seed(str(tmp_path))
    assert {value.dtype for value in half.clip.state_dict().values() if value.is_floating_point()} == {torch.float32}
    assert all(torch.equal(value, tiny_seed.clip.state_dict()[key].half().float())
               for key, value in half.clip.state_dict().items() if value.is_floating_point())


def test_identity_changes_with_one_weight_with_the_prompt_and_with_the_preprocessing(tiny_seed, tiny_seed_folder):
    for change in ("weight", "prompt", "preprocessing"):
        other = open_seed(str(tiny_seed_folder), prompt="{}" if change == "prompt" else None)
        if change == "weight":
            with torch.no_grad(): other.clip.text_projection[0, 0] += 1e-3
        if change == "preprocessing": other.preprocess_config = other.preprocess_config | dict(interpolation="bicubic")
        keys = [key for key in other.identity if other.identity[key] != tiny_seed.identity[key]]
        assert keys == [dict(weight="weights").get(change, change)]


def test_saved_seed_takes_no_other_weights(tiny_seed_folder):
    with pytest.raises(ValueError, match="has its own weights; leave out weights='openai'"):
        open_seed(str(tiny_seed_folder), weights="openai")


def test_folder_without_weights_is_refused(tiny_seed_folder, tmp_path):
    (tmp_path / CONFIG).write_bytes((tiny_seed_folder / CONFIG).read_bytes())
    with pytest.raises(ValueError, match="does not hold a whole seed: .*weights") as caught: open_seed(str(tmp_path))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_folder_with_a_damaged_file_is_refused(name, tiny_seed_folder, tmp_path):
    for file in tiny_seed_folder.iterdir(): (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:100])
    with pytest.raises(ValueError, match="does not hold a whole seed: .*Error: "): open_seed(str(tmp_path))


def test_embedded_seed_opens_without_network(monkeypatch):
    monkeypatch.setattr("harmomoe.images.hub_problem", lambda: pytest.fail("asked for the hub"))
    seed = open_seed()
    assert len(seed.layers) == seed.config["vision_cfg"]["layers"]


# ---- named models

def test_unknown_backbone_is_refused():
    with pytest.raises(ValueError) as caught: open_seed("ViT-B/17")
    for part in ("'ViT-B/17'", "'embedded'", CONFIG, "open_clip", "ViT-B/16"): assert part in str(caught.value)


def test_missing_weights_file_is_named_with_the_tags_that_exist():
    with pytest.raises(FileNotFoundError) as caught: open_seed("ViT-B/16", "no/such/file.pt")
    for part in ("no/such/file.pt", "ViT-B-16", "openai", "laion2b_s34b_b88k"): assert part in str(caught.value)


@pytest.mark.parametrize("name, tag", [("ViT-B/16", None), ("ViT-B/32", "openai"), ("ViT-B-16", "laion2b_s34b_b88k")])
def test_unreachable_hub_is_one_error_that_names_three_ways_on(name, tag, monkeypatch, tmp_path):
    monkeypatch.setattr("harmomoe.images.hub_problem", lambda: "huggingface.co:443 cannot be reached: no route")
    monkeypatch.setattr(harmomoe.weights.huggingface_hub, "try_to_load_from_cache", lambda *names: None)
    monkeypatch.setattr(open_clip, "create_model", lambda *args, **kwargs: pytest.fail("built a model first"))
    with pytest.raises(ConnectionError) as caught: open_seed(name, tag)
    for part in (tag or "openai", name.replace("/", "-"), "huggingface.co:443 cannot be reached: no route",
                 "(1) connect to the network", "(2)", "-p weights FILE", "(3)", "embedded seed"):
        assert part in str(caught.value)


def test_cached_weights_need_no_hub(monkeypatch, registry, weights):
    "Found in the cache, they are loaded offline, whatever the network says; OpenAI's tag means QuickGELU."
    import huggingface_hub
    offline = []

    def create(name, pretrained=None, **kwargs):
        offline.append(huggingface_hub.constants.HF_HUB_OFFLINE)
        assert (name, pretrained, kwargs) == ("ViT-B-16", "openai", dict(force_quick_gelu=True))
        return real("nano-ViT", **kwargs)
    real, before = open_clip.create_model, huggingface_hub.constants.HF_HUB_OFFLINE
    monkeypatch.setattr("harmomoe.images.hub_problem", lambda: pytest.fail("asked for the hub"))
    monkeypatch.setattr(harmomoe.weights.huggingface_hub, "try_to_load_from_cache", lambda *names: "/cache/file")
    monkeypatch.setattr(open_clip, "create_model", create)
    seed = open_seed("ViT-B/16")
    assert offline == [True] and huggingface_hub.constants.HF_HUB_OFFLINE == before
    assert activations(seed) == {"QuickGELU"} and seed.config["quick_gelu"] is True


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_file_in_open_clips_layout_opens_with_the_models_own_activation(suffix, weights, tmp_path):
    path = tmp_path / f"file{suffix}"
    if suffix == ".pt": torch.save(weights, path)
    else: save_file(weights, path)
    seed = open_seed("nano/ViT", str(path))
    assert all(torch.equal(value, weights[key]) for key, value in seed.clip.state_dict().items())
    assert activations(seed) == {"GELU"} and (seed.name, seed.prompt) == ("nano-ViT", PAPER_PROMPT)


@pytest.mark.parametrize("layout", ["state dict", "safetensors", "TorchScript"])
def test_file_in_openais_layout_opens_with_quick_gelu(layout, weights, registry, tmp_path):
    tensors, path = weights | integers(NANO), tmp_path / ("file.safetensors" if layout == "safetensors" else "file.pt")
    dict(zip(("state dict", "safetensors", "TorchScript"), (torch.save, save_file, archive)))[layout](tensors, path)
    seed = open_seed("nano-ViT", str(path))
    assert all(torch.equal(value, weights[key]) for key, value in seed.clip.state_dict().items())
    assert activations(seed) == {"QuickGELU"}
    clip = open_clip.create_model("nano-ViT", force_quick_gelu=True)
    clip.load_state_dict(weights)
    x = torch.randn(5, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(seed.tower(x), clip.eval().visual(x), atol=1e-6)
    data = pictures([noise(20, 30, seed=i) for i in range(4)])
    reference = torch.stack([open_clip.transform.image_transform_v2(open_clip.transform.PreprocessCfg(
        **clip.visual.preprocess_cfg), is_train=False)(row["image"]) for row in data])
    assert torch.equal(next(iter(seed.batches(data)))["images"], reference)
    (tmp_path / "saved").mkdir()
    seed.save(tmp_path / "saved")
    again = open_seed(str(tmp_path / "saved"))
    assert activations(again) == {"QuickGELU"} and torch.allclose(again.embed(data), seed.embed(data), atol=1e-6)


def test_float32_weights_in_openais_layout_are_not_rounded(weights, tmp_path):
    exact = {key: value * (1 + 1e-5) for key, value in weights.items()}
    torch.save(exact | integers(NANO), tmp_path / "file.pt")
    seed = open_seed("nano-ViT", str(tmp_path / "file.pt"))
    assert all(torch.equal(value, exact[key]) for key, value in seed.clip.state_dict().items())


def test_identity_tells_quick_gelu_from_gelu(weights, registry):
    found = []
    for quick in (False, True):
        clip = open_clip.create_model("nano-ViT", force_quick_gelu=quick)
        clip.load_state_dict(weights)
        config = NANO | dict(quick_gelu=quick)
        found.append(ImageSeed(clip, open_clip.get_tokenizer("nano-ViT"), config, "nano-ViT").identity)
    assert found[0] != found[1]


@pytest.mark.parametrize("content", ["other width", "other width, OpenAI's", "other embedding, OpenAI's", "not weights",
                                     "not CLIP", "not CLIP, TorchScript", "empty", "one missing"])
def test_weights_that_do_not_fit_are_refused_naming_file_and_model(content, weights, registry, tmp_path):
    name, path = "nano-wide" if "other" in content else "nano-ViT", tmp_path / "file.pt"
    if content == "other width": torch.save(weights, path)
    elif content == "other width, OpenAI's": torch.save(weights | integers(NANO), path)
    elif content == "other embedding, OpenAI's": archive(weights | integers(NANO), path)
    elif content == "not weights": path.write_text("a web page that says that the file is not there")
    elif content == "not CLIP": torch.save({"head.weight": torch.zeros(3)}, path)
    elif content == "not CLIP, TorchScript": archive({"head.weight": torch.zeros(3)}, path)
    elif content == "one missing": torch.save({key: weights[key] for key in weights if key != "visual.proj"}, path)
    else: path.touch()
    with pytest.raises(ValueError) as caught: open_seed(name, str(path))
    assert f"{path} does not hold weights of {name}: " in str(caught.value)


@pytest.mark.parametrize("prompt", ["a picture", "{} or {}"])
def test_prompt_without_one_place_for_the_name_is_refused(prompt, tiny_seed):
    with pytest.raises(ValueError, match="exactly one {} for the class name"):
        ImageSeed(tiny_seed.clip, tiny_seed.tokenizer, tiny_seed.config, "x", prompt)


def test_prompt_for_a_saved_seed_is_checked_too(tiny_seed_folder):
    with pytest.raises(ValueError, match="exactly one {}"): open_seed(str(tiny_seed_folder), prompt="a picture")


# ---- where the FFNs are

def test_ffns_of_a_clip_tower_are_found_in_order(tiny_seed):
    assert tiny_seed.ffn is CLIP_FFN
    assert tiny_seed.layers == ["transformer.resblocks.0.mlp", "transformer.resblocks.1.mlp"]


def test_timm_tower_has_its_ffns_found_and_their_formula_is_theirs(registry, tmp_path):
    with seeded(0): clip = open_clip.create_model("nano-timm")
    save_file({key: value.contiguous() for key, value in clip.state_dict().items()}, tmp_path / "file.safetensors")
    seed = open_seed("nano-timm", str(tmp_path / "file.safetensors"))
    assert seed.ffn is TIMM_FFN and seed.layers == [f"trunk.blocks.{i}.mlp" for i in range(6)]
    mlp, z = seed.tower.get_submodule(seed.layers[0]), torch.randn(2, 5, 64)
    hidden = seed.ffn.hidden(mlp, *(getattr(mlp, name)(z) for name in seed.ffn.inner))
    assert torch.allclose(getattr(mlp, seed.ffn.outer)(hidden), mlp(z), atol=1e-6)
    assert seed.embed(pictures([noise(40, 40)])).shape == (1, 32)


def test_clip_ffn_formula_is_that_of_the_tower(tiny_seed):
    mlp, z = tiny_seed.tower.get_submodule(tiny_seed.layers[1]), torch.randn(2, 5, 64)
    assert torch.allclose(mlp.c_proj(CLIP_FFN.hidden(mlp, mlp.c_fc(z))), mlp(z), atol=1e-6)


def test_convnext_tower_is_refused_when_it_is_opened(registry, tmp_path):
    torch.save(open_clip.create_model("nano-convnext").state_dict(), tmp_path / "file.pt")
    with pytest.raises(ValueError, match="Transformer"): open_seed("nano-convnext", str(tmp_path / "file.pt"))


def test_projection_head_is_no_layer(registry, tmp_path):
    torch.save(open_clip.create_model("nano-head").state_dict(), tmp_path / "file.pt")
    assert len(open_seed("nano-head", str(tmp_path / "file.pt")).layers) == 6


def test_tower_that_returns_its_tokens_too_works_or_is_refused_when_it_is_opened(registry, tmp_path):
    torch.save(open_clip.create_model("nano-tokens").state_dict(), tmp_path / "file.pt")
    try: seed = open_seed("nano-tokens", str(tmp_path / "file.pt"))
    except ValueError: return
    assert seed.embed(pictures([noise(16, 16)])).shape == (1, 32)


def test_resnet_tower_is_refused(registry, tmp_path):
    torch.save(open_clip.create_model("nano-RN").state_dict(), tmp_path / "file.pt")
    with pytest.raises(ValueError, match="ModifiedResNet has no FFN sublayers .*Choose a backbone whose image tower is a Transformer"):
        open_seed("nano-RN", str(tmp_path / "file.pt"))


# ---- samples in, embeddings out

def test_embedding_of_an_image_does_not_depend_on_its_batch_or_on_the_order(tiny_seed, tiny_benchmark):
    data = tiny_benchmark.pool.train.select(range(23))
    together = tiny_seed.embed(data)
    assert together.shape == (23, 32) and together.dtype == torch.float32
    assert torch.allclose(tiny_seed.embed(data, batch_size=1), together, atol=1e-5)
    assert torch.allclose(tiny_seed.embed(data, batch_size=5), together, atol=1e-5)
    order = np.random.default_rng(0).permutation(23)
    assert torch.allclose(tiny_seed.embed(data.select(order), batch_size=7), together[order], atol=1e-5)


def test_embedding_ignores_every_column_but_the_image(tiny_seed, tiny_benchmark):
    data = tiny_benchmark.pool.train.select(range(4))
    assert torch.equal(tiny_seed.embed(data.select_columns("image")), tiny_seed.embed(data))


def test_palette_image_is_seen_as_its_rgb_version(tiny_seed):
    palette = noise(8, 8).resize((200, 150), Image.Resampling.BICUBIC).quantize(64)
    both = tiny_seed.embed(pictures([palette, palette.convert("RGB")]))
    assert torch.allclose(both[0], both[1], atol=1e-5)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "LA", "CMYK", "I;16"])
def test_images_of_every_mode_become_rgb(mode, tiny_seed):
    grey = noise(16, 16, channels=1)
    image = Image.fromarray(np.asarray(grey).astype(np.uint16)) if mode == "I;16" else grey.convert("RGB").convert(mode)
    data = pictures([image, noise(16, 16, seed=2)])
    rgb = pictures([data[0]["image"].convert("RGB")])
    assert torch.allclose(tiny_seed.embed(data)[:1], tiny_seed.embed(rgb), atol=1e-5)
    assert next(iter(tiny_seed.batches(data)))["images"].shape == (2, 3, 16, 16)


def test_images_of_every_size_become_the_seeds_size(tiny_seed):
    data = pictures([noise(*size) for size in ((16, 16), (1, 1), (3, 200), (200, 3), (480, 640))])
    assert next(iter(tiny_seed.batches(data)))["images"].shape == (5, 3, 16, 16)
    assert torch.isfinite(tiny_seed.embed(data)).all()


def test_new_tower_can_change_without_the_seed(tiny_seed):
    before = tiny_seed.identity
    tower = tiny_seed.new_tower()
    with torch.no_grad():
        for p in tower.parameters(): p.zero_()
    assert tiny_seed.identity == before


# ---- classes

def test_targets_index_the_label_space_whatever_the_data_sets_own_numbers(tiny_seed, tiny_benchmark):
    data = tiny_benchmark.clients[2].train
    space = ["another", *reversed(tiny_benchmark.clients[2].classes), "one more"]
    targets = torch.cat([batch["targets"] for batch in tiny_seed.batches(data, space, batch_size=5)])
    assert [space[i] for i in targets] == [data.features["label"].names[i] for i in data["label"]]


def test_name_that_stands_twice_in_the_label_space_means_the_first(tiny_seed):
    data = pictures([noise(4, 4)] * 3, class_name=["cat", "dog", "cat"])
    assert next(iter(tiny_seed.batches(data, ["dog", "cat", "cat", "dog"])))["targets"].tolist() == [1, 0, 1]


def test_name_is_found_in_another_case_if_not_in_its_own(tiny_seed):
    data = pictures([noise(4, 4)] * 3, class_name=["Cat", "cat", "DOG"])
    targets = next(iter(tiny_seed.batches(data, ["dog", "cat", "Cat", "Dog"])))["targets"].tolist()
    assert targets == [2, 1, 0]


def test_class_outside_the_label_space_is_refused_before_an_image_is_read(tiny_seed, tiny_benchmark):
    with pytest.raises(ValueError, match="class 'blue_stripes' is not in the label space of 2 classes"):
        tiny_seed.batches(tiny_benchmark.clients[0].train, ["red_stripes", "green_stripes"])


def test_labelled_gives_names_as_they_are_underscores_included(tiny_benchmark):
    data = labelled(tiny_benchmark.clients[1].train)
    assert data.column_names == ["image", "class_name"]
    assert data["class_name"][:4] == ["yellow_checks", "purple_checks"] * 2
    assert labelled(data).column_names == ["image", "class_name"]


def test_order_of_batches_comes_from_the_seed_and_changes_with_the_epoch(tiny_seed, tiny_benchmark):
    data = tiny_benchmark.pool.train

    def orders(seed):
        batches = tiny_seed.batches(data, tiny_benchmark.pool.classes, 16, shuffle_seed=seed)
        return [torch.cat([batch["targets"] for batch in batches]).tolist() for _ in range(2)]
    first, plain = orders(1), [data["label"][i] for i in range(len(data))]
    assert orders(1) == first and first[0] != first[1] and orders(2)[0] != first[0] and first[0] != plain
    assert sorted(first[0]) == sorted(first[1]) == sorted(plain)


def test_scores_are_scaled_cosines_with_the_class_prompts(tiny_seed, tiny_benchmark):
    data, classes = tiny_benchmark.pool.test, ["a dog", "red_disc", "nothing"]
    with torch.no_grad(): scores = tiny_seed.scorer(classes)(tiny_seed.tower, next(iter(tiny_seed.batches(data))))
    x = torch.nn.functional.normalize(tiny_seed.embed(data).double(), dim=1)
    tokens = tiny_seed.tokenizer([f"a picture of a {name}" for name in ("a dog", "red disc", "nothing")])
    with torch.no_grad(): t = torch.nn.functional.normalize(tiny_seed.clip.encode_text(tokens).double(), dim=1)
    assert torch.allclose(scores.double(), tiny_seed.clip.logit_scale.double().exp() * x @ t.T, atol=1e-4)


def test_underscores_become_blanks_in_prompts(tiny_seed, monkeypatch):
    prompts, tokenizer = [], tiny_seed.tokenizer
    monkeypatch.setattr(tiny_seed, "tokenizer", lambda texts: prompts.extend(texts) or tokenizer(texts))
    tiny_seed.label_features(("blue_cross", "a {brace}"))
    assert prompts == ["a picture of a blue cross", "a picture of a a {brace}"]


# ---- the paper's size

@pytest.mark.slow
@pytest.mark.parametrize("layout", ["open_clip", "OpenAI"])
def test_vit_b_16_opens_from_a_file(layout, tmp_path, tiny_benchmark, monkeypatch):
    monkeypatch.setattr("harmomoe.images.hub_problem", lambda: pytest.fail("asked for the hub"))
    with seeded(0): clip = open_clip.create_model("ViT-B-16")
    weights = {key: value.half().float().contiguous() for key, value in clip.state_dict().items()}
    path = tmp_path / ("file.pt" if layout == "OpenAI" else "file.safetensors")
    if layout == "OpenAI": torch.save(weights | integers(open_clip.get_model_config("ViT-B-16")), path)
    else: save_file(weights, path)
    seed = open_seed("ViT-B/16", str(path))
    assert all(torch.equal(value, weights[key]) for key, value in seed.clip.state_dict().items())
    assert activations(seed) == {"QuickGELU" if layout == "OpenAI" else "GELU"}
    assert (seed.name, len(seed.layers), seed.embedding_size, seed.prompt) == ("ViT-B-16", 12, 512, PAPER_PROMPT)
    embeddings = seed.embed(tiny_benchmark.pool.test)
    assert embeddings.shape == (12, 512) and torch.isfinite(embeddings).all()
