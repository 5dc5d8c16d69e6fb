"""Small language models of every family, tokenizers of every kind, and texts for them.

Models and tokenizers are made once; tests don't change them."""

import string
from functools import cache

import pytest
import torch
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    Gemma2Config,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    T5Config,
    T5ForConditionalGeneration,
)

from harmomoe.base.process import seeded
from harmomoe.data.texts import text_dataset
from harmomoe.models.decoder import DecoderSeed

FAMILIES = dict(
    llama=LlamaConfig,
    qwen2=Qwen2Config,
    qwen3=Qwen3Config,
    mistral=MistralConfig,
    olmo2=Olmo2Config,
    gemma2=Gemma2Config,
)
# windows that are shorter than the texts
EXTRA = dict(mistral=dict(sliding_window=8), gemma2=dict(sliding_window=8))
QUESTIONS = text_dataset(
    [
        dict(question="Where does a boat swim?", choices=["on a lake", "in a drawer"], answer="A"),
        dict(
            question="What do bees make?",
            choices=["tea", "honey, and a lot of it", "silk"],
            answer="B",
        ),
        dict(
            question="Who reads the letter? " * 4,
            choices=["the door", "the neighbour", "the ink"],
            answer="C",
        ),
        dict(
            question="Which is a number?",
            choices=["blue", "seven"],
            answer="B",
            context="Seven is.\nBlue is not.",
        ),
    ],
    "questions",
)
REPLIES = text_dataset(
    [
        dict(instruction="Name a colour.", input="", output="Blue."),
        dict(
            instruction="Count to five.", input="In words.", output="One, two, three, four, five."
        ),
        dict(instruction="Say nothing.", input="", output=""),
    ],
    "replies",
)
ABC = ["A", "B", "C"]

# ---- tokenizers of every kind that language models come with

# as that of Llama 3: a punctuation mark takes the line break after it into its piece
LLAMA3 = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# kind -> the tokens of " A"
LETTER_A = dict(
    byte=["ĠA"],
    bos=["ĠA"],
    both=["ĠA"],
    trimmed=["ĠA"],
    glued=["ĠA"],
    metaspace=["▁A"],
    split=["▁", "A"],
    prepended=["▁A"],
)
SENTENCES = ("metaspace", "split", "prepended")  # those that treat blanks as sentencepiece does
every_tokenizer = pytest.mark.parametrize("kind", LETTER_A)
every_family = pytest.mark.parametrize("family", FAMILIES)


def _train(pre_tokenizer, decoder, texts, alphabet):
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizer, decoder
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        special_tokens=["<pad>", "<s>", "</s>"],
        show_progress=False,
        initial_alphabet=alphabet,
    )
    bpe.train_from_iterator(texts, trainer)
    return bpe


def _of_sentences(kind, texts):
    lines = [line for text in texts for line in text.split("\n")]  # line breaks are kept apart
    metaspace = pre_tokenizers.Metaspace(), decoders.Metaspace()
    bpe = _train(*metaspace, lines, [*string.printable])
    if kind == "prepended":  # as in Llama 2, which has no pre-tokenizer
        bpe.pre_tokenizer = None
        blanks = normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")
        bpe.normalizer = normalizers.Sequence([*blanks])
    return bpe


def _of_bytes(kind, texts):
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind != "glued")
    if kind == "glued":
        split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
        pieces = pre_tokenizers.Sequence([split, pieces])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return _train(pieces, decoders.ByteLevel(), texts, alphabet)


@cache
def tokenizer(kind):
    "A tokenizer that was trained on the texts above."
    texts = [row["prompt"] + row["answer"] for data in (QUESTIONS, REPLIES) for row in data] * 9
    if kind == "split":  # here no letter stands after a blank
        texts = [text.lower() for text in texts]
    else:
        texts = [" A B C D"] * 99 + texts
    bpe = (_of_sentences if kind in SENTENCES else _of_bytes)(kind, texts)
    if added := dict(bos="<s> $A", both="<s> $A </s>", prepended="<s> $A").get(kind):
        special = [("<s>", 1), ("</s>", 2)]
        bpe.post_processor = processors.TemplateProcessing(added, special_tokens=special)
    if kind == "trimmed":
        bpe.post_processor = processors.ByteLevel(trim_offsets=True)
    special = dict(pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **special)


# ---- models


@cache
def model(family="llama", random_state=0, **changes):
    "A random model of two layers."
    size = dict(
        vocab_size=512,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.3,
    )
    config = FAMILIES[family](**(size | EXTRA.get(family, {}) | changes))
    with seeded(random_state):
        return AutoModelForCausalLM.from_config(config)


# functions that make models without gated FFNs
SMALL = dict(vocab_size=64, num_layers=1, num_heads=2)
BERT = dict(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
OTHERS = dict(
    t5=lambda: T5ForConditionalGeneration(T5Config(**SMALL, d_model=16, d_ff=16, d_kv=8)),
    bert=lambda: BertLMHeadModel(BertConfig(**BERT, intermediate_size=16, is_decoder=True)),
    gpt2=lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    ),
)


def seed_of(family="llama", kind="byte", **settings):
    "A seed for text."
    return DecoderSeed(model(family), tokenizer(kind), family, **settings)


def only(seed, data, **others):
    "All of a data set in one batch."
    return next(iter(seed.batches(data, batch_size=len(data), **others)))


@torch.no_grad()
def scores(seed, data=QUESTIONS, classes=ABC):
    "Scores of a data set in one batch."
    return seed.task(classes).scores(seed.backbone, only(seed, data))


@torch.no_grad()
def read(ids, family="llama"):
    "What `transformers` gives for one text: logits [T, V] and last hidden representations [T, d]."
    out = model(family)(torch.tensor([ids]), output_hidden_states=True)
    return out.logits[0], out.hidden_states[-1][0]


def close(one, two, atol=2e-5):
    "The same but for the rounding of float32, where numbers are of the order of 1."
    return torch.allclose(one, two, atol=atol, rtol=1e-5)


def cut(seed, classes, after):
    "The loss of the seed's task, so many times; then the machine is switched off."
    task, seen = seed.task(classes), []

    def loss(backbone, batch):
        if len(seen) == after:
            raise KeyboardInterrupt
        seen.append(batch)
        return task.loss(backbone, batch)

    return loss
