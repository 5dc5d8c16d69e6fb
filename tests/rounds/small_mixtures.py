"Small Mixtures of Experts of every kind, two sets of passages, and what is asked of all of them."

import copy
from functools import cache

import pytest
import torch

from harmomoe.data.corpora import load_corpora
from harmomoe.models.mixture import FAMILIES, MixtureModel, untrained_mixture
from harmomoe.models.unified import UnifiedModel
from harmomoe.models.weights import open_seed
from harmomoe.moe.router import RouterSettings
from harmomoe.rounds.experts import RoutedExperts

KINDS = (*FAMILIES, "unified", "evidence")
every_kind = pytest.mark.parametrize("kind", KINDS)


@cache
def tokenizer():
    return open_seed("embedded-text").tokenizer


@cache
def corpora():
    return {client.name: client for client in load_corpora(("rust", "spanish")).clients}


def passages(name="rust", number=12, split="train"):
    "Some passages of a domain."
    return getattr(corpora()[name], split).select(range(number))


@cache
def small_seed():
    "A Llama of the embedded seed's tokenizer that has learnt nothing."
    from transformers import LlamaConfig, LlamaForCausalLM

    from harmomoe.models.decoder import DecoderSeed

    torch.manual_seed(0)
    small = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    small |= dict(initializer_range=0.3, max_position_embeddings=256, tie_word_embeddings=True)
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer()), **small))
    return DecoderSeed(llama, tokenizer(), "small", "text", "all", 64)


@cache
def _original(kind, experts, top_k):
    if kind in FAMILIES:
        special = dict(initializer_range=0.3, norm_topk_prob=kind == "qwen3")
        if kind == "mixtral":
            special.pop("norm_topk_prob")
        seed = untrained_mixture(tokenizer(), kind, experts, top_k, 16, **special)
        seed.max_length = 64
        return MixtureModel(seed, seed.backbone)
    names = ["seed", *(f"expert{number}" for number in range(1, experts))]
    ranks = [0, *(2 + number % 2 for number in range(1, experts))]
    form, context = ("evidence", "sequence") if kind == "evidence" else ("logistic", "prefix")
    settings = RouterSettings(top_k=top_k, form=form, context=context, norm_topk_prob=True)
    model = UnifiedModel(small_seed(), names, ranks, [1.0] * experts, settings)
    torch.manual_seed(1)
    with torch.no_grad():
        for layer in model.layers:
            for p in (*layer.a.values(), *layer.b.values(), layer.router.vectors):
                p.normal_(std=0.3)
    return model


def build(kind, experts=5, top_k=2):
    "A model of its own for a test that changes it."
    return copy.deepcopy(_original(kind, experts, top_k))


def built(kind, **size):
    "The same with the view of its experts."
    model = build(kind, **size)
    return model, RoutedExperts(model.backbone)
