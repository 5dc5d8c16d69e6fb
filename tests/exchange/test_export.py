"Unified models as Mixtral and its like, as one dense expert, as adapters; logits stay."

import shutil

import pytest
import torch
from exchange.small_decoders import TOKENS, logits, randomise
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from harmomoe.data.texts import text_dataset
from harmomoe.describe.routing import layer_means
from harmomoe.exchange.convert import read_adapter
from harmomoe.exchange.export import dense_expert, save_adapters, to_mixtral
from harmomoe.models.unified import UnifiedModel
from harmomoe.models.weights import open_seed


def test_adapters_again(unified, tmp_path):
    model = unified(top_k=2)
    folders = save_adapters(model, tmp_path)
    assert list(folders) == ["law", "medicine"]
    assert {p.name for p in tmp_path.iterdir()} == {"law", "medicine"}
    for name, folder in folders.items():
        files = {p.name for p in folder.iterdir()}
        assert files == {"adapter_config.json", "adapter_model.safetensors"}
        alone = PeftModel.from_pretrained(model.seed.new_backbone(), folder)
        with model.only(name):
            assert torch.allclose(logits(alone), logits(model.backbone), atol=1e-5)
        expert = read_adapter(folder, model.seed)  # and in again
        index = model.experts.index(name)
        assert expert.rank == model.ranks[index]
        assert expert.scale == pytest.approx(model.scales[index])
        theirs, layer = expert.factors[model.seed.layers[1], "up_proj"][0], model.layers[1]
        assert torch.equal(theirs, layer.a["up_proj"][layer.owner == index])
    assert list(save_adapters(model, tmp_path, "law")) == ["law"]
    with pytest.raises(ValueError, match="seed's own FFN"):
        save_adapters(model, tmp_path / "no", "seed")
    with pytest.raises(ValueError, match="no expert 'cooking'; this model has seed, law, medicine"):
        save_adapters(model, tmp_path / "no", "law", "cooking")
    assert not (tmp_path / "no").exists()


def test_no_name_of_an_expert_leads_out_of_the_folder(unified, tmp_path):
    model, victim = unified(), tmp_path / "victim"
    victim.mkdir()
    (victim / "kept.txt").touch()
    for name in ("../victim", str(victim), "", ".", "medicine/../../victim"):
        model.experts[1] = name  # as nobody can make one, and no file can say
        for names in ((), (name,), ("medicine", name)):
            with pytest.raises(ValueError, match="the client's name"):
                save_adapters(model, tmp_path / "out", *names)
    model.experts[1] = "Medicine"
    with pytest.raises(ValueError, match="must differ in more than case"):
        save_adapters(model, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["victim"] and any(victim.iterdir())


def test_images_go_out_too(tiny_seed, tiny_benchmark, tmp_path):
    model = UnifiedModel(tiny_seed, ["seed", "law", "medicine"], [0, 4, 2], [0.0, 2.0, 0.75])
    randomise(model)
    folders = save_adapters(model, tmp_path)
    batch = next(iter(tiny_seed.batches(tiny_benchmark.pool.test, batch_size=8)))
    for name in model.experts:
        (tmp_path / "dense").mkdir()
        tiny_seed.save(tmp_path / "dense", backbone=dense_expert(model, name))
        backbones = [open_seed(str(tmp_path / "dense")).backbone]
        if name != "seed":
            backbones.append(PeftModel.from_pretrained(tiny_seed.new_backbone(), folders[name]))
        with torch.no_grad(), model.only(name):
            expected = tiny_seed.hidden(model.backbone, batch)
            for backbone in backbones:
                assert torch.allclose(tiny_seed.hidden(backbone, batch), expected, atol=1e-5)
        shutil.rmtree(tmp_path / "dense")
    with pytest.raises(ValueError, match="VisionTransformer"):
        to_mixtral(model)


def test_one_dense_language_model(unified, tmp_path):
    model = unified()
    for name in model.experts:
        model.seed.save(tmp_path, backbone=dense_expert(model, name))
        again = open_seed(str(tmp_path))
        with model.only(name):
            assert torch.allclose(logits(again.backbone), logits(model.backbone), atol=1e-5)
    assert type(again.backbone) is type(model.seed.backbone)
    assert not again.backbone.base_model._forward_pre_hooks
    with pytest.raises(ValueError, match="no expert"):
        dense_expert(model, "cooking")


WEIGHTS = [
    dict(top_k=1),
    dict(top_k=1, norm_topk_prob=True),
    dict(top_k=2),
    dict(top_k=2, norm_topk_prob=True),
    dict(top_k=3),
]


@pytest.mark.parametrize(
    "weights", WEIGHTS, ids=lambda w: "-".join(f"{k}{int(v)}" for k, v in w.items())
)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "olmo2"])
def test_the_export_is_exact(unified, family, weights, tmp_path):
    model = unified(family, **weights)
    exported, changed = to_mixtral(model)
    to_one = weights["top_k"] == 3 or "norm_topk_prob" in weights
    kinds = dict(qwen2="Qwen2Moe", qwen3="Qwen3Moe", olmo2="FlexOlmo")
    kind = kinds.get(family, "Mixtral" if to_one else "Qwen2Moe")
    assert type(exported).__name__ == f"{kind}ForCausalLM"
    assert changed == {} and (logits(exported) - logits(model.backbone)).abs().max() < 2e-5
    exported.save_pretrained(tmp_path)
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()) and type(again) is type(exported)
    assert torch.equal(logits(again), logits(exported))
    twice, exact = again.double(), model.backbone.double()
    twice.set_experts_implementation("eager")  # the faster ones know no float64
    # their router's softmax is in float32
    assert (logits(twice) - logits(exact)).abs().max() < 2e-6


def test_the_files_have_one_tensor_for_each_experts_map(unified, tmp_path):
    to_mixtral(unified(norm_topk_prob=True))[0].save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    own = [f"experts.{e}.w{w}.weight" for e in range(3) for w in (1, 2, 3)]
    assert {f"model.layers.1.block_sparse_moe.{name}" for name in own} <= names


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_qwen2_moe_has_biases_in_its_attention_whatever_the_seed_has(family, unified, tmp_path):
    "Programs with a Qwen2-MoE of their own, vLLM for one, know it with biases alone."
    model = unified(family, top_k=2)
    to_mixtral(model)[0].save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(2):
        for linear in "qkv":
            name = f"model.layers.{layer}.self_attn.{linear}_proj"
            bias = tensors[f"{name}.bias"]
            assert len(bias) == len(tensors[f"{name}.weight"])
            assert bias.any() == (family == "qwen2")


def test_generation_is_the_same(unified):
    model = unified(top_k=2, context="prefix")
    exported, _ = to_mixtral(model)
    mask = torch.ones_like(TOKENS)
    mask[0, :4] = 0
    for how in (dict(), dict(num_beams=2)):
        settings = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False) | how
        written = exported.generate(TOKENS, attention_mask=mask, **settings)
        expected = model.backbone.generate(TOKENS, attention_mask=mask, **settings)
        assert torch.equal(written, expected)


LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)


@pytest.mark.parametrize("weights", [dict(top_k=2), dict(top_k=3)], ids=["probabilities", "sum 1"])
@pytest.mark.parametrize(
    "family, configuration",
    [
        ("llama", dict(tie_word_embeddings=True, rms_norm_eps=1e-2)),
        ("llama", dict(rope_parameters=LLAMA3, head_dim=16)),
        ("mistral", dict(head_dim=16, sliding_window=4)),
        ("mistral", dict(sliding_window=None)),
        ("qwen2", dict(use_sliding_window=True, sliding_window=4, max_window_layers=1)),
        ("qwen3", dict(attention_bias=True)),
        ("qwen3", dict(use_sliding_window=True, sliding_window=4, max_window_layers=0)),
        ("olmo2", dict(num_key_value_heads=4)),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
def test_settings_of_the_seed_are_kept(unified, family, configuration, weights):
    model = unified(family, configuration, **weights)
    exported, _ = to_mixtral(model)
    assert (logits(exported) - logits(model.backbone)).abs().max() < 5e-5


@pytest.mark.parametrize(
    "family, configuration, message",
    [
        ("gemma2", {}, "the attention and norms of gemma2"),
        ("llama", dict(mlp_bias=True), "FFNs of small-llama have biases"),
        ("llama", dict(attention_bias=True), "self_attn.q_proj.bias has no counterpart"),
        (
            "qwen3",
            dict(use_sliding_window=True, sliding_window=4, max_window_layers=1),
            "no attention windows",
        ),
    ],
)
def test_what_no_class_can_hold_is_refused(unified, family, configuration, message):
    with pytest.raises(ValueError, match=message):
        to_mixtral(unified(family, configuration, norm_topk_prob=True))


def test_an_unknown_setting_is_found_by_its_effect(unified):
    model = unified(norm_topk_prob=True)
    for layer in model.backbone.model.layers:
        layer.self_attn.scaling *= 3
    with pytest.raises(ValueError, match="some setting of small-llama is not known"):
        to_mixtral(model)


def test_in_bfloat16(unified, tmp_path):
    model = unified(norm_topk_prob=True, top_k=2)
    wide = logits(model.backbone)
    inner = model.backbone.model
    parts = [model.seed.model, inner.embed_tokens, model.backbone.lm_head, inner.norm]
    parts += [layer.ffn for layer in model.layers]  # not factors and routers
    for layer in inner.layers:
        parts += [layer.self_attn, layer.input_layernorm, layer.post_attention_layernorm]
    for part in parts:
        part.to(torch.bfloat16)
    exported, _ = to_mixtral(model)
    assert {p.dtype for p in exported.parameters()} == {torch.bfloat16}
    assert (logits(exported).float() - wide).norm() < 0.1 * wide.norm()


# Without context


def plain_texts(text):
    prompts = [text.replace("{}", str(n)) for n in range(30)]
    rows = [dict(prompt=prompt, answer="", choices=[], label=0) for prompt in prompts]
    return text_dataset(rows, "samples")


ROUTERS = [
    (dict(lam=0.5), "by context .lambda 0.5."),
    (dict(form="logistic"), "with biases"),
    (dict(form="logistic", lam=0.3), "by context"),
    (dict(cumulative=True), "earlier layers said"),
]


@pytest.mark.parametrize(
    "router, message", ROUTERS, ids=["context", "biases", "both", "cumulative"]
)
def test_context_and_biases_are_refused_or_dropped(unified, router, message):
    quiz = [
        dict(question=f"Is {n} even?", choices=["yes", "no"], answer="AB"[n % 2]) for n in range(12)
    ]
    samples, test = plain_texts("What is {} less seven?"), text_dataset(quiz, "quiz")
    model, biased = unified(top_k=2, **router), "form" in router
    with pytest.raises(ValueError, match=message):
        to_mixtral(model)
    before, routers = logits(model.backbone), [layer.router for layer in model.layers]
    if biased:
        with pytest.raises(ValueError, match="give samples"):
            to_mixtral(model, drop_context=True)
    exported, changed = to_mixtral(model, True, samples, test)
    assert changed["lam"] == pytest.approx([router.get("lam", 0)] * 2)
    assert ("constant" in changed) == biased
    assert changed["accuracy"]["before"].n == changed["accuracy"]["after"].n == 12
    assert torch.equal(logits(model.backbone), before)
    assert routers == [layer.router for layer in model.layers]
    # the model that was exported, without its context and with whole vectors
    for layer, block in zip(model.layers, exported.model.layers):
        layer.router.lam.data.zero_()
        layer.router.cumulative = False
        if biased:
            layer.router.biases.data.zero_()
            assert not torch.allclose(block.mlp.gate.weight, layer.router.vectors)
        layer.router.vectors.data.copy_(block.mlp.gate.weight)
    assert torch.allclose(logits(model.backbone), logits(exported), atol=1e-4)


def test_biases_become_part_of_the_vectors(unified):
    model = unified(form="logistic")
    samples = plain_texts("{} times {}?")
    exported, changed = to_mixtral(model, True, samples)
    assert max(changed["constant"]) < 0.1
    means = layer_means(model.seed, model.backbone, samples)
    for layer, block, z in zip(model.layers, exported.model.layers, means):
        wanted = z @ layer.router.vectors.T + layer.router.biases
        assert torch.allclose(z @ block.mlp.gate.weight.T, wanted, atol=0.3)


def test_moments_keep_the_half_that_meets_the_token(unified):
    model = unified(form="moments", top_k=3)
    for layer in model.layers:
        layer.router.biases.data.zero_()
    exported, changed = to_mixtral(model)  # with lambda 0 the spread counts for nothing
    assert changed == {} and torch.allclose(logits(exported), logits(model.backbone), atol=2e-5)


@pytest.mark.parametrize("lam", [0.0, 1.0])
def test_evidence_has_no_class_but_its_experts_go_out(lam, unified, tmp_path):
    model, samples = unified(form="evidence", lam=lam), plain_texts("{} times {}?")
    for given in ((), (True,), (True, samples, samples)):
        with pytest.raises(ValueError, match="looks into the FFN.*'evidence'.*no router of"):
            to_mixtral(model, *given)
    with model.only("law"):
        expected = logits(model.backbone)
    assert torch.allclose(logits(dense_expert(model, "law")), expected, atol=1e-4)
    adapted = PeftModel.from_pretrained(
        model.seed.new_backbone(), save_adapters(model, tmp_path)["law"]
    )
    assert torch.allclose(logits(adapted), expected, atol=1e-4)


def test_zero_biases_are_none(unified):
    model = unified(form="logistic", norm_topk_prob=True)
    for layer in model.layers:
        layer.router.biases.data.zero_()
    assert to_mixtral(model)[1] == {}
