"Small unified models of every family of seeds, two texts for them, and what tests ask of both."

from functools import cache

import pytest
import torch
from transformers import (
    Gemma2Config,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Qwen2Config,
    Qwen3Config,
)

from harmomoe.moe.language_model import HarmoMoEConfig, HarmoMoEForCausalLM

SIZE = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    initializer_range=0.3,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
CONFIGS = dict(
    llama=(LlamaConfig, {}),
    qwen2=(Qwen2Config, {}),
    qwen3=(Qwen3Config, {}),
    mistral=(MistralConfig, dict(sliding_window=5)),
    olmo2=(Olmo2Config, {}),
    gemma=(GemmaConfig, {}),
    gemma2=(Gemma2Config, dict(sliding_window=5, query_pre_attn_scalar=8)),
)
EXPERTS = dict(experts=["seed", "law", "medicine"], ranks=[0, 4, 8], scales=[0.0, 2.0, 1.0])
# of the largest number; rounding makes less than 1e-5, a wrong context more than 1e-2
TOLERANCE = 1e-4
TEXTS = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(1))
LEFT = torch.tensor([[0] * 3 + [1] * 6, [1] * 9])  # the first text has six tokens

families = pytest.mark.parametrize("family", CONFIGS)


def randomise(layers):
    "Experts that differ, and a router that prefers some."
    with torch.no_grad():
        for layer in layers:
            router = layer.router
            for p in (*layer.a.values(), *layer.b.values(), router.vectors, router.biases):
                if p is not None:
                    p.normal_(std=0.3)
            if hasattr(router, "center"):
                router.center.normal_(std=0.3)
                router.scale.uniform_(0.5, 2)
            if hasattr(router, "axes"):  # all experts but the seed's have densities
                router.axes.normal_(std=0.3)
                router.middle[1:].normal_(std=0.3)
                router.whiten[1:] = torch.eye(len(router.axes)) / 3


def build(family="llama", tied=False, size=None, attention=(), **router):
    "A unified model of its own for a test that changes it."
    kind, special = CONFIGS[family]
    router = dict(top_k=2, context="prefix", form="logistic", lam=0.5) | router
    torch.manual_seed(0)
    text_config = kind(**SIZE | special | (size or {}), tie_word_embeddings=tied)
    config = HarmoMoEConfig(text_config, **EXPERTS, router=router, attention=attention)
    model = HarmoMoEForCausalLM(config).eval()
    randomise(model.moe_layers)
    with torch.no_grad():
        for part in model.attention_maps:
            part.a.normal_(std=0.3)
            part.b.normal_(std=0.3)
    return model


@cache
def shared(family="llama"):
    "The same, for tests that don't change it."
    return build(family)


def logits_of(model, texts=TEXTS, mask=LEFT, **others):
    "Where nothing says what the prompt is, all of a text is."
    said = others.keys() & {"labels", "prompt_mask"}
    inner = getattr(model, "backbone", model).base_model
    if not said and getattr(inner, "context_reach", "") == "prompt":
        others["prompt_mask"] = torch.ones_like(texts) if mask is None else mask
    with torch.no_grad():
        return model(texts, attention_mask=mask, **others).logits


def close(found, expected):
    return (found - expected).abs().max() <= TOLERANCE * expected.abs().max()
