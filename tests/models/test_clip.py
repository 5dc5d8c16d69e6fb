"A CLIP as a seed: where its FFNs are, what it sees of an image, how it scores class names."

import numpy as np
import open_clip
import pytest
import torch
from open_clip.transform import PreprocessCfg, image_transform_v2
from pictures import noise, pictures
from PIL import Image
from safetensors.torch import load_file
from torch import nn

from harmomoe.base.artefacts import digest_weights
from harmomoe.base.process import seeded
from harmomoe.data.samples import labelled
from harmomoe.models.clip import CONFIG, KEPT, VOCABULARY, WEIGHTS, ImageSeed, SelfAttention
from harmomoe.moe.ffn import CLIP_FFN, TIMM_FFN


@pytest.fixture
def of_tower(tiny_seed, tiny_config):
    "A function (changes of `vision_cfg`, others of CLIP) -> a seed with another image tower."

    def build(vision, **others):
        config = tiny_config | dict(vision_cfg=vision)
        with seeded(0):
            clip = open_clip.CLIP(**config, **others)
        return ImageSeed(clip, tiny_seed.tokenizer, config | others, "other")

    return build


# ---- attention


@pytest.mark.parametrize("heads", [2, 3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gradient", [True, False])
def test_attention_is_pytorchs(heads, bias, gradient):
    theirs = nn.MultiheadAttention(12, heads, bias=bias, batch_first=True).double().eval()
    ours = SelfAttention(12, heads, bias=bias, batch_first=True).double().eval()
    ours.load_state_dict(theirs.state_dict())
    tokens = torch.randn(2, 5, 12, dtype=torch.float64)
    with torch.set_grad_enabled(gradient):
        found, weights = ours(tokens, tokens, tokens, need_weights=False)
        wanted, _ = theirs(tokens, tokens, tokens, need_weights=False)
    assert weights is None and torch.allclose(found, wanted, rtol=1e-12)


def test_gradient_through_frozen_attention_is_pytorchs():
    theirs = nn.MultiheadAttention(12, 3, batch_first=True).double().requires_grad_(False)
    ours = SelfAttention(12, 3, batch_first=True).double().requires_grad_(False)
    ours.load_state_dict(theirs.state_dict())
    tokens = torch.randn(2, 5, 12, dtype=torch.float64, requires_grad=True)
    found, wanted = (
        torch.autograd.grad(module(tokens, tokens, tokens)[0].square().sum(), tokens)[0]
        for module in (ours, theirs)
    )
    assert torch.allclose(found, wanted, rtol=1e-12)


def test_tower_is_that_of_open_clip(tiny_seed, tiny_config):
    with seeded(0):
        clip = open_clip.CLIP(**tiny_config).eval()
    images = torch.randn(3, 3, *clip.visual.image_size)
    wanted = clip.visual(images)
    seed = ImageSeed(clip, tiny_seed.tokenizer, tiny_config, "same")
    kinds = {type(m) for m in seed.backbone.modules() if isinstance(m, nn.MultiheadAttention)}
    assert kinds == {SelfAttention}
    assert torch.allclose(seed.backbone(images), wanted, atol=1e-6)


# ---- where the FFNs are


def timm(name, **changes):
    model = dict(timm_model_name=name, timm_pool="", timm_proj="linear", image_size=160)
    return model | changes


def test_ffns_of_a_clip_backbone_are_found_in_order(tiny_seed):
    assert tiny_seed.ffn is CLIP_FFN
    assert tiny_seed.layers == ["transformer.resblocks.0.mlp", "transformer.resblocks.1.mlp"]


def test_clip_ffn_formula_is_that_of_the_tower(tiny_seed):
    mlp, z = tiny_seed.backbone.get_submodule(tiny_seed.layers[1]), torch.randn(2, 5, 64)
    assert torch.allclose(mlp.c_proj(CLIP_FFN.hidden(mlp, mlp.c_fc(z))), mlp(z), atol=1e-6)


def test_timm_backbone_has_its_ffns_found_and_their_formula_is_theirs(of_tower):
    seed = of_tower(timm("test_vit"))
    assert seed.ffn is TIMM_FFN and seed.layers == [f"trunk.blocks.{i}.mlp" for i in range(6)]
    mlp, z = seed.backbone.get_submodule(seed.layers[0]), torch.randn(2, 5, 64)
    hidden = seed.ffn.hidden(mlp, *(getattr(mlp, name)(z) for name in seed.ffn.inner))
    assert torch.allclose(getattr(mlp, seed.ffn.outer)(hidden), mlp(z), atol=1e-6)
    assert seed.embed(pictures([noise(40, 40)])).shape == (1, 32)


def test_projection_head_is_no_layer(of_tower):
    assert len(of_tower(timm("test_vit", timm_pool="avg", timm_proj="mlp")).layers) == 6


def test_convnext_backbone_is_refused(of_tower):
    with pytest.raises(ValueError, match="Transformer"):
        of_tower(timm("test_convnext"))


def test_backbone_that_returns_its_tokens_too_is_refused(of_tower, tiny_config):
    with pytest.raises(ValueError, match="returns image embeddings only"):
        of_tower(tiny_config["vision_cfg"] | dict(output_tokens=True))


def test_resnet_backbone_is_refused(of_tower):
    said = "ModifiedResNet has no FFN sublayers .*Choose a backbone whose image tower is a Transf"
    with pytest.raises(ValueError, match=said):
        of_tower(dict(image_size=32, layers=[1, 1, 1, 1], width=8, patch_size=None))


# ---- what a seed is


@pytest.mark.parametrize("prompt", ["a picture", "{} or {}"])
def test_prompt_without_one_place_for_the_name_is_refused(prompt, tiny_seed):
    said = "exactly one {} for the class name"
    with pytest.raises(ValueError, match=said):
        ImageSeed(tiny_seed.clip, tiny_seed.tokenizer, tiny_seed.config, "x", prompt)
    with pytest.raises(ValueError, match=said):
        tiny_seed.prompt = prompt
    assert tiny_seed.prompt == "a picture of a {}"


def test_identity_changes_with_the_prompt_and_with_the_preprocessing(tiny_seed, monkeypatch):
    before = tiny_seed.identity
    preprocessing = tiny_seed.preprocess_config | dict(interpolation="bicubic")
    for attribute, value, key in (
        ("prompt", "{}", "prompt"),
        ("preprocess_config", preprocessing, "preprocessing"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(tiny_seed, attribute, value)
            now = tiny_seed.identity
        assert [name for name in now if now[name] != before[name]] == [key]
    assert tiny_seed.identity == before


def test_identity_tells_quick_gelu_from_gelu(of_tower, tiny_config):
    plain, quick = (of_tower(tiny_config["vision_cfg"], quick_gelu=q) for q in (False, True))
    assert plain.identity["weights"] == quick.identity["weights"]
    assert plain.identity["architecture"] != quick.identity["architecture"]


# ---- samples in, embeddings out


def test_embedding_of_an_image_does_not_depend_on_its_batch_or_on_the_order(
    tiny_seed, tiny_benchmark
):
    data = tiny_benchmark.pool.train.select(range(23))
    together = tiny_seed.embed(data)
    assert together.shape == (23, 32) and together.dtype == torch.float32
    assert torch.allclose(tiny_seed.embed(data, batch_size=1), together, atol=1e-5)
    assert torch.allclose(tiny_seed.embed(data, batch_size=5), together, atol=1e-5)
    order = np.random.default_rng(0).permutation(23)
    shuffled = tiny_seed.embed(data.select(order), batch_size=7)
    assert torch.allclose(shuffled, together[order], atol=1e-5)


def test_embedding_ignores_every_column_but_the_image(tiny_seed, tiny_benchmark):
    data = tiny_benchmark.pool.train.select(range(4))
    assert torch.equal(tiny_seed.embed(data.select_columns("image")), tiny_seed.embed(data))


def test_images_are_seen_as_open_clip_preprocesses_them(tiny_seed):
    images = [noise(20, 30, random_state=i) for i in range(4)]
    [batch] = tiny_seed.batches(pictures(images))
    settings = PreprocessCfg(**tiny_seed.clip.visual.preprocess_cfg)
    transform = image_transform_v2(settings, is_train=False)
    assert torch.equal(batch["images"], torch.stack([transform(image) for image in images]))


def test_palette_image_is_seen_as_its_rgb_version(tiny_seed):
    palette = noise(8, 8).resize((200, 150), Image.Resampling.BICUBIC).quantize(64)
    both = tiny_seed.embed(pictures([palette, palette.convert("RGB")]))
    assert torch.allclose(both[0], both[1], atol=1e-5)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "LA", "CMYK", "I;16"])
def test_images_of_every_mode_become_rgb(mode, tiny_seed):
    grey = noise(16, 16, channels=1)
    if mode == "I;16":
        image = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    else:
        image = grey.convert("RGB").convert(mode)
    data = pictures([image, noise(16, 16, random_state=2)])
    rgb = pictures([grey.convert("RGB") if mode == "I;16" else data[0]["image"].convert("RGB")])
    assert torch.allclose(tiny_seed.embed(data)[:1], tiny_seed.embed(rgb), atol=1e-5)
    assert next(iter(tiny_seed.batches(data)))["images"].shape == (2, 3, 16, 16)


def test_images_of_every_size_become_the_seeds_size(tiny_seed):
    data = pictures([noise(*size) for size in ((16, 16), (1, 1), (3, 200), (200, 3), (480, 640))])
    [batch] = tiny_seed.batches(data)
    assert batch["images"].shape == (5, 3, 16, 16) and torch.isfinite(batch["images"]).all()
    assert torch.isfinite(tiny_seed.embed(data)).all()


def test_images_that_other_processes_decode_are_the_same(tiny_seed, tiny_benchmark, monkeypatch):
    data = tiny_benchmark.clients[1].test
    [here] = tiny_seed.batches(data)
    monkeypatch.setattr(tiny_seed, "workers", 1)
    batches = tiny_seed.batches(data)
    assert batches.num_workers == 1
    [there] = batches
    assert torch.equal(there["images"], here["images"])


# ---- classes


def targets_of(seed, data, space):
    batches = seed.batches(data, space, batch_size=5)
    return torch.cat([batch["targets"] for batch in batches]).tolist()


def test_targets_index_the_label_space_whatever_the_data_sets_own_numbers(
    tiny_seed, tiny_benchmark
):
    domain = tiny_benchmark.clients[2]
    space = ["another", *reversed(domain.classes), "one more"]
    names = [domain.classes[label] for label in domain.train["label"]]
    assert [space[i] for i in targets_of(tiny_seed, domain.train, space)] == names


def test_name_that_stands_twice_in_the_label_space_means_the_first(tiny_seed):
    data = pictures([noise(4, 4)] * 3, class_name=["cat", "dog", "cat"])
    assert targets_of(tiny_seed, data, ["dog", "cat", "cat", "dog"]) == [1, 0, 1]


def test_name_is_found_in_another_case_if_not_in_its_own(tiny_seed):
    data = pictures([noise(4, 4)] * 3, class_name=["Cat", "cat", "DOG"])
    assert targets_of(tiny_seed, data, ["dog", "cat", "Cat", "Dog"]) == [2, 1, 0]


def test_class_outside_the_label_space_is_refused_before_an_image_is_read(
    tiny_seed, tiny_benchmark
):
    said = "class 'blue_stripes' is not in the label space of 2 classes"
    with pytest.raises(ValueError, match=said):
        tiny_seed.batches(tiny_benchmark.clients[0].train, ["red_stripes", "green_stripes"])


def test_labelled_gives_names_as_they_are_underscores_included(tiny_benchmark):
    data = labelled(tiny_benchmark.clients[1].train)
    assert data.column_names == ["image", "class_name"]
    assert data["class_name"][:4] == ["yellow_checks", "purple_checks"] * 2
    assert labelled(data).column_names == ["image", "class_name"]


def test_order_of_batches_comes_from_the_random_state_and_changes_with_the_epoch(
    tiny_seed, tiny_benchmark
):
    data, classes = tiny_benchmark.pool.train, tiny_benchmark.pool.classes

    def orders(random_state):
        batches = tiny_seed.batches(data, classes, 16, random_state=random_state)
        return [torch.cat([batch["targets"] for batch in batches]).tolist() for _ in range(2)]

    first, plain = orders(1), list(data["label"])
    assert orders(1) == first and orders(2)[0] != first[0]
    assert first[0] != first[1] and first[0] != plain
    assert sorted(first[0]) == sorted(first[1]) == sorted(plain)


def test_scores_are_scaled_cosines_with_the_class_prompts(tiny_seed, tiny_benchmark):
    data, classes = tiny_benchmark.pool.test, ["a dog", "red_disc", "nothing"]
    prompts = ["a picture of a a dog", "a picture of a red disc", "a picture of a nothing"]
    [batch] = tiny_seed.batches(data)
    with torch.no_grad():
        scores = tiny_seed.task(classes).scores(tiny_seed.backbone, batch)
        texts = tiny_seed.clip.encode_text(tiny_seed.tokenizer(prompts)).double()
    x, t = (F / F.norm(dim=1, keepdim=True) for F in (tiny_seed.embed(data).double(), texts))
    scale = tiny_seed.clip.logit_scale.double().exp()
    assert torch.allclose(scores.double(), scale * x @ t.T, atol=1e-4)


def test_underscores_become_blanks_in_prompts(tiny_seed, monkeypatch):
    prompts, tokenizer = [], tiny_seed.tokenizer
    noted = lambda texts: prompts.extend(texts) or tokenizer(texts)
    monkeypatch.setattr(tiny_seed, "tokenizer", noted)
    tiny_seed.label_features(("blue_cross", "a {brace}"))
    assert prompts == ["a picture of a blue cross", "a picture of a a {brace}"]


def test_features_of_the_last_label_spaces_are_kept(tiny_seed, monkeypatch):
    asked, tokenizer, prompt = [], tiny_seed.tokenizer, tiny_seed.prompt
    noted = lambda texts: asked.append(len(texts)) or tokenizer(texts)
    monkeypatch.setattr(tiny_seed, "tokenizer", noted)
    spaces = [tuple(f"thing {k}" for k in range(n)) for n in range(1, KEPT + 2)]
    first = tiny_seed.label_features(spaces[0])
    for space in spaces[1:KEPT]:
        tiny_seed.label_features(space)
    assert tiny_seed.label_features(spaces[0]) is first
    assert asked == [*range(1, KEPT + 1)]
    tiny_seed.label_features(spaces[KEPT])  # the second is now the one that was asked longest ago
    assert tiny_seed.label_features(spaces[0]) is first
    tiny_seed.label_features(spaces[1])
    assert asked[KEPT:] == [KEPT + 1, 2]
    try:
        tiny_seed.prompt = "no {}"
        other = tiny_seed.label_features(spaces[0])
    finally:
        tiny_seed.prompt = prompt
    assert not torch.equal(other, first)
    assert torch.equal(tiny_seed.label_features(spaces[0]), first)


def test_a_seed_with_other_weights_has_other_features(tiny_seed):
    before = tiny_seed.label_features(("red", "blue"))
    key = "transformer.resblocks.0.mlp.c_fc.bias"
    change = {key: torch.ones_like(tiny_seed.clip.state_dict()[key])}
    other = tiny_seed.changed("other", change).label_features(("red", "blue"))
    assert not torch.allclose(other, before, atol=1e-3)
    assert tiny_seed.label_features(("red", "blue")) is before


# ---- what is saved


def test_saved_seed_is_a_folder_that_open_clip_reads(tiny_seed, tiny_seed_folder):
    clip = open_clip.create_model(f"local-dir:{tiny_seed_folder}", require_pretrained=True)
    assert digest_weights(clip) == digest_weights(tiny_seed.clip)
    names = sorted(path.name for path in tiny_seed_folder.iterdir())
    assert names == sorted([CONFIG, WEIGHTS, VOCABULARY])


def test_half_precision_file_is_half_as_large(tiny_seed, tiny_seed_folder, tmp_path):
    tiny_seed.save(tmp_path, torch.float16)
    size = lambda folder: (folder / WEIGHTS).stat().st_size
    assert size(tmp_path) < 0.51 * size(tiny_seed_folder) + 10_000
    own = tiny_seed.clip.state_dict()
    for key, value in load_file(tmp_path / WEIGHTS).items():
        half = own[key].half() if own[key].is_floating_point() else own[key]
        assert torch.equal(value, half), key


def test_another_backbone_can_be_saved_in_place_of_the_seeds_own(tiny_seed, tmp_path):
    backbone, before = tiny_seed.new_backbone(), digest_weights(tiny_seed.clip)
    with torch.no_grad(), seeded(1):
        for p in backbone.parameters():
            p.add_(0.05 * torch.randn_like(p))
    tiny_seed.save(tmp_path, backbone=backbone)
    again = open_clip.create_model(f"local-dir:{tmp_path}", require_pretrained=True)
    assert digest_weights(again.visual) == digest_weights(backbone)
    text = {key for key in again.state_dict() if not key.startswith("visual.")}
    own = tiny_seed.clip.state_dict()
    assert text and all(torch.equal(again.state_dict()[key], own[key]) for key in text)
    assert digest_weights(tiny_seed.clip) == before != digest_weights(again)
