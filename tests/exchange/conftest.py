"Small language models, adapters that PEFT wrote for them, and unified models made of them."

import pytest
import torch
from exchange.small_decoders import GATED, randomise
from models.families import FAMILIES
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
)

from harmomoe.models.decoder import DecoderSeed
from harmomoe.models.unified import UnifiedModel
from harmomoe.moe.router import RouterSettings


@pytest.fixture(scope="session")
def tokenizer():
    "One token for each byte."
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<pad>", "<s>", "</s>", *letters]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(names)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


@pytest.fixture(scope="session")
def decoder(tokenizer):
    """A function (family, settings of its configuration) -> a seed of two layers with random
    weights."""

    def build(family="llama", **settings):
        size = dict(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            initializer_range=0.2,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
        if family in ("qwen3", "gemma2"):
            size["head_dim"] = 8
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(FAMILIES[family](**(size | settings)))
        for name, p in model.named_parameters():  # what starts as ones and zeros
            if p.ndim == 1:
                p.data += 0.1 * torch.randn(p.shape)
        return DecoderSeed(model, tokenizer, f"small-{family}")

    return build


@pytest.fixture(scope="session")
def seed(decoder):
    "A small Llama. Tests don't change it."
    return decoder()


@pytest.fixture
def foreign(seed, tmp_path):
    "A function (settings of PEFT) -> a folder that PEFT wrote, and the adapted model."

    def build(name="adapter", base=None, random_state=1, target_modules=GATED, **settings):
        torch.manual_seed(random_state)
        settings = dict(r=4, lora_alpha=8, init_lora_weights=False) | settings
        config = LoraConfig(target_modules=target_modules, **settings)
        model = get_peft_model(base or seed.new_backbone(), config).eval()
        model.save_pretrained(tmp_path / name, save_embedding_layers=False)
        return tmp_path / name, model

    return build


@pytest.fixture(scope="session")
def unified(decoder):
    """A function (family, configuration, settings of the router) -> a unified model of three
    random experts."""

    def build(family="llama", configuration={}, **router):
        seed = decoder(family, **configuration)
        settings = RouterSettings(**(dict(lam=0.0, learn_lam=False) | router))
        names, scales = ["seed", "law", "medicine"], [0.0, 2.0, 0.75]
        model = UnifiedModel(seed, names, [0, 4, 2], scales, settings)
        randomise(model)
        return model

    return build
