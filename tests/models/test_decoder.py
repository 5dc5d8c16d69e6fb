"""A language model as a seed: which tokens it reads and predicts, and how it answers.

Every number is compared with what `transformers` gives for one text alone, without padding."""

import json
import math
from functools import reduce
from operator import add
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from datasets import Dataset
from families import (
    ABC,
    LETTER_A,
    OTHERS,
    QUESTIONS,
    REPLIES,
    SENTENCES,
    close,
    every_family,
    every_tokenizer,
    model,
    only,
    read,
    scores,
    seed_of,
    tokenizer,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from harmomoe.base.artefacts import digest_weights
from harmomoe.base.process import seeded
from harmomoe.data.texts import LETTERS, cloze_prompt, text_dataset
from harmomoe.models import decoder
from harmomoe.models.decoder import FACTS, Choices, DecoderSeed, PlainText, Scoring, log_likelihoods
from harmomoe.models.seed import Accuracy


def forbidden(*args, **kwargs):
    pytest.fail("this was not to be called")


# ---- what is read, and what is predicted


@every_tokenizer
def test_answer_and_end_of_text_are_predicted_and_the_rest_is_not(kind):
    seed, tokens = seed_of(kind=kind), tokenizer(kind)
    for data in (QUESTIONS, REPLIES):
        for number, row in enumerate(data):
            batch = only(seed, data.select([number]))
            ids, labels = batch["input_ids"][0], batch["labels"][0]
            whole = tokens(row["prompt"] + row["answer"])["input_ids"]
            assert ids.tolist() == whole + [tokens.eos_token_id] * (kind != "both")
            answer = labels != -100
            assert torch.equal(ids[answer], labels[answer])
            assert answer.tolist() == sorted(answer.tolist())
            assert ids[answer][-1] == tokens.eos_token_id
            assert (ids == tokens.eos_token_id).sum() == 1
            decode = lambda part: tokens.decode(part, skip_special_tokens=True)
            prompt, said = decode(ids[~answer]), decode(ids[answer])
            if kind == "glued" and not row["choices"]:
                assert said == ":" + row["answer"]  # one token is of both
            elif kind not in SENTENCES:
                assert (prompt, said) == (row["prompt"], row["answer"])
            else:
                assert prompt.replace(" ", "") == row["prompt"].replace(" ", "")


@every_tokenizer
def test_of_a_question_the_letter_and_the_end_of_text_are_predicted(kind):
    seed, (*begin, a) = seed_of(kind=kind), LETTER_A[kind]
    for row, labels in zip(QUESTIONS, only(seed, QUESTIONS)["labels"]):
        letter = a.replace("A", row["answer"].strip())
        predicted = tokenizer(kind).convert_ids_to_tokens(labels[labels != -100])
        assert predicted == [*begin, letter, "</s>"]


@every_tokenizer
def test_on_request_all_tokens_are_predicted_but_the_first_which_follows_nothing(kind):
    for data in (QUESTIONS, REPLIES):
        batch = only(seed_of(kind=kind, loss_on="all"), data)
        masks = batch["attention_mask"].bool()
        for ids, labels, mask in zip(batch["input_ids"], batch["labels"], masks):
            assert torch.equal(labels[mask][1:], ids[mask][1:])
            assert labels[mask][0] == -100 and (labels[~mask] == -100).all()


@every_tokenizer
def test_prompts_are_those_of_the_whole_text_without_an_end(kind):
    seed = seed_of(kind=kind)
    for number, row in enumerate(QUESTIONS):
        whole = only(seed, QUESTIONS.select([number]))
        question, _ = seed.encode(row["prompt"], row["answer"])
        assert whole["prompts"][0].tolist() == question and whole["prompt_mask"].all()
        assert tokenizer(kind).eos_token_id not in question
        assert seed.encode(row["prompt"], "") == (question, [])


def test_where_choices_are_scored_by_their_text_the_text_of_the_right_one_is_predicted():
    batch, tokens = only(seed_of(scoring="text"), QUESTIONS), tokenizer("byte")
    for row, ids, labels in zip(QUESTIONS, batch["input_ids"], batch["labels"]):
        said = f" {row['choices'][row['label']]}</s>"
        assert tokens.decode(labels[labels != -100]) == said
        assert tokens.decode(ids).endswith(said)


@every_tokenizer
def test_a_cloze_is_asked_and_scored_without_a_list(kind):
    "As the text of a choice after a prompt that was written without them."
    plain = QUESTIONS.map(lambda row: dict(prompt=cloze_prompt(row["prompt"], row["choices"])))
    for row, bare in zip(QUESTIONS, plain):
        assert "(A)" in row["prompt"] and "(A)" not in bare["prompt"]
        assert cloze_prompt(bare["prompt"], bare["choices"]) == bare["prompt"]
    seed, other = seed_of(kind=kind, scoring="cloze"), seed_of(kind=kind, scoring="text")
    ours, theirs = only(seed, QUESTIONS), only(other, plain)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours if key != "choices")
    assert torch.equal(scores(seed), scores(other, plain))
    assert torch.equal(only(seed, REPLIES)["input_ids"], only(other, REPLIES)["input_ids"])


@pytest.mark.parametrize("scoring", get_args(Scoring))
def test_withheld_answer_is_none(scoring):
    hidden = text_dataset([dict(question="Who?", choices=["I", "you"], answer="")], "hidden")
    seed = seed_of(scoring=scoring)
    said = tokenizer("byte").decode(only(seed, hidden)["input_ids"][0])
    assert said == f"{seed.prompt_of(hidden[0]['prompt'], hidden[0]['choices'])}</s>"


def test_texts_are_padded_on_the_left_and_padding_is_masked():
    batch, seed = only(seed_of(), QUESTIONS), seed_of()
    alone = [only(seed, QUESTIONS.select([i])) for i in range(len(QUESTIONS))]
    assert len({one["input_ids"].shape[1] for one in alone}) == len(alone)
    masks = dict(input_ids="attention_mask", prompts="prompt_mask", labels="attention_mask")
    for ids, mask in masks.items():
        for row, one in enumerate(alone):
            length = one[ids].shape[1]
            assert torch.equal(batch[ids][row, -length:], one[ids][0])
            assert batch[mask][row].sum() == length
            assert (batch[ids][row, :-length] == (-100 if ids == "labels" else 0)).all()
    assert torch.equal(seed.token_mask(batch), batch["attention_mask"] == 1)


def test_context_of_a_prompt_is_all_that_was_asked():
    seed, batch = seed_of(), only(seed_of(), QUESTIONS)
    real, asked = seed.token_mask(batch), seed.token_mask(batch, "prompt")
    assert torch.equal(asked, real & (batch["labels"] == -100))


@pytest.mark.parametrize("kind", ["byte", "bos", "both", "split"])
@pytest.mark.parametrize("answer", [" B", "\n" + "A long reply. " * 30], ids=["short", "long"])
def test_long_text_loses_the_beginning_of_its_prompt_then_the_end_of_its_answer(kind, answer):
    tokens = tokenizer(kind)
    prompt = "Once upon a time there was a very long story. " * 9 + "Answer:"
    row = QUESTIONS[0] | dict(answer=answer)
    [full] = seed_of(kind=kind).batches(Dataset.from_list([row | dict(prompt=prompt[-300:])]))
    long = Dataset.from_list([row | dict(prompt=prompt)])
    [batch] = seed_of(kind=kind, max_length=24).batches(long)
    ids, predicted = batch["input_ids"][0].tolist(), (batch["labels"][0] != -100).sum()
    first = int(kind in ("bos", "both"))
    assert len(ids) == 24 and (tokens.bos_token_id == ids[0]) == first
    assert tokens.bos_token_id not in ids[1:]
    reply = full["labels"][0][full["labels"][0] != -100].tolist()
    kept = min(len(reply), 12)
    assert predicted == kept and ids[-kept:] == reply[:kept]  # half is the answer's, if it needs it
    assert (ids[-1] == tokens.eos_token_id) == (answer == " B")
    whole = tokens(prompt, add_special_tokens=False)["input_ids"]
    assert ids[first:-kept] == whole[-(24 - kept - first) :]
    assert batch["prompts"].shape[1] == 24 and batch["prompts"][0, -1] == whole[-1]


def test_texts_are_no_longer_than_the_model_allows():
    assert seed_of(max_length=10_000).max_length == 256 and seed_of().max_length == 256
    assert seed_of(max_length=100).max_length == 100


def test_targets_are_positions_in_the_label_space():
    seed = seed_of()
    targets = lambda data, space: only(seed, data, label_space=space)["targets"].tolist()
    assert targets(QUESTIONS, None) == [0] * 4
    assert targets(QUESTIONS, ABC) == [0, 1, 2, 1]
    assert targets(QUESTIONS, ["text", "C", "b", "A"]) == [3, 2, 1, 2]
    assert targets(REPLIES, [*ABC, "text"]) == [3] * 3
    with pytest.raises(ValueError, match="class 'C' is not in the label space of 2 classes"):
        seed.batches(QUESTIONS, ["A", "B"])


def test_shuffled_epochs_depend_on_their_random_state_alone():
    def orders(random_state):
        batches = seed_of().batches(QUESTIONS, ABC, 2, random_state=random_state)
        return [[batch["prompts"].sum().item() for batch in batches] for _ in range(5)]

    assert orders(1) == orders(1) != orders(2) and len(set(map(tuple, orders(1)))) > 1


# ---- answers, by hand


def test_where_there_is_nothing_to_choose_the_task_is_to_continue_text():
    seed, a = seed_of(), ["A"]
    for classes, kind in ((ABC, Choices), (a, PlainText), ([], PlainText)):
        task = seed.task(classes)
        assert type(task) is kind and (task.seed, task.classes) == (seed, classes)


@every_tokenizer
def test_score_of_a_letter_is_its_logit_after_the_prompt(kind):
    seed, tokens = seed_of(kind=kind), tokenizer(kind)
    found = scores(seed)
    assert found.shape == (len(QUESTIONS), 3) and found.dtype == torch.float32
    *begin, a = LETTER_A[kind]
    letters = tokens.convert_tokens_to_ids([a.replace("A", letter) for letter in ABC])
    for row, own in zip(QUESTIONS, found):
        ids = tokens(row["prompt"])["input_ids"]
        ids = (ids[:-1] if kind == "both" else ids) + tokens.convert_tokens_to_ids(begin)
        count = len(row["choices"])
        assert close(own[:count], read(ids)[0][-1, letters][:count])
        assert (own[count:] == -torch.inf).all()


@every_tokenizer
def test_score_of_a_text_is_its_log_likelihood_by_character(kind):
    tokens = tokenizer(kind)
    for row, own in zip(QUESTIONS, scores(seed_of(kind=kind, scoring="text"))):
        for choice, score in zip(row["choices"], own):
            texts = row["prompt"], f"{row['prompt']} {choice}"
            start, ids = (tokens(text)["input_ids"] for text in texts)
            if kind == "both":
                start, ids = start[:-1], ids[:-1]  # the end of text is no part of it
            assert ids[: len(start)] == start
            each = read(ids)[0].log_softmax(-1)[:-1].gather(1, torch.tensor(ids)[1:, None])
            assert close(score, each[len(start) - 1 :].sum() / len(choice))
        assert (own[len(row["choices"]) :] == -torch.inf).all()


@every_family
def test_a_prompt_is_read_once_for_all_choices_unless_its_tokens_depend_on_them(
    family, monkeypatch
):
    def by_text(max_length=512, **changes):
        seed = seed_of(family, scoring="text", max_length=max_length)
        batch, task = only(seed, QUESTIONS) | changes, seed.task([*"ABCDE"])
        with torch.no_grad():
            return task.by_text(seed.backbone, batch)

    with monkeypatch.context() as patch:  # as for a router that looks at the whole sequence
        patch.setattr(decoder, "_reach", lambda backbone: "sequence")
        patch.setattr(decoder, "_continued", forbidden)
        whole = by_text()
    with monkeypatch.context() as patch:
        patch.setattr(decoder, "_from_the_beginning", forbidden)
        assert close(by_text(), whole) and whole.abs().max() > 1
        letters = [[(row["prompt"], "A") for _ in row["choices"]] for row in QUESTIONS]
        assert torch.isfinite(by_text(choices=letters)).all()  # a choice of one token
    monkeypatch.setattr(decoder, "_continued", forbidden)
    assert torch.isfinite(by_text(max_length=12)).all()  # prompts are cut for longer choices


def test_letters_may_share_what_they_begin_with():
    tokens = tokenizer("split")
    begin, letters = seed_of(kind="split").letter_tokens(ABC)
    assert tokens.convert_ids_to_tokens(begin) == ["▁"]
    assert tokens.convert_ids_to_tokens(letters) == ABC
    assert seed_of().letter_tokens(list(LETTERS[:4]))[0] == []


def test_letters_that_no_single_token_tells_apart_are_refused():
    said = "'A bee' and 'A' differ in more than their last token in llama: choose scor"
    of_two = QUESTIONS.select([0, 3])
    with pytest.raises(ValueError, match=said):
        scores(seed_of(), of_two, ["A", "A bee"])
    assert scores(seed_of(scoring="text"), of_two, ["A", "A bee"]).isfinite().all()


@pytest.mark.parametrize("scoring", get_args(Scoring))
def test_more_choices_than_classes_are_refused(scoring):
    said = "a question has 3 choices, but the label space has 2 classes"
    with pytest.raises(ValueError, match=said):
        scores(seed_of(scoring=scoring), QUESTIONS, ["A", "B"])


@pytest.mark.parametrize("scoring", get_args(Scoring))
def test_only_questions_can_be_scored(scoring):
    with pytest.raises(ValueError, match="only questions with two or more choices can be scored"):
        scores(seed_of(scoring=scoring), REPLIES, ["A", "B"])


def test_choices_are_judged_by_the_share_that_is_right():
    seed = seed_of()
    found, batch = scores(seed), only(seed, QUESTIONS, label_space=ABC)
    right = sum(row.argmax().item() == target for row, target in zip(found, QUESTIONS["label"]))
    assert reduce(add, seed.task(ABC).judge(found, batch)) == Accuracy(right, 4)


# ---- plain text, by hand


def likelihoods(seed, data):
    "Log likelihood of what each text has to predict, as `transformers` computes it alone."
    for number in range(len(data)):
        batch = only(seed, data.select([number]))
        ids, labels = batch["input_ids"][0], batch["labels"][0]
        each = read(ids.tolist(), seed.name)[0].double().log_softmax(-1)
        at = labels != -100
        yield sum(each[i - 1, ids[i]].item() for i in at.nonzero()[:, 0].tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_likelihoods_and_their_gradients_are_those_of_a_softmax_in_double(dtype):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 40, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(40, (3, 5), generator=generator)
    labels[0, :2] = labels[2] = -100
    exact = logits.detach().double().requires_grad_()
    each = exact.log_softmax(-1).gather(2, labels.clamp(min=0)[..., None])[..., 0]
    expected = (each * (labels != -100)).sum(1)
    found = log_likelihoods(logits, labels)
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), expected, atol=1e-5)
    weights = torch.tensor([1.0, 2.0, 3.0])
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    atol = 1e-6 if dtype == torch.float32 else 1e-2  # a gradient has the logits' type
    assert torch.allclose(logits.grad.double(), exact.grad, atol=atol)
    with torch.no_grad():
        assert torch.equal(log_likelihoods(logits, labels), found)


def test_training_keeps_nothing_of_the_softmax():
    logits, labels = torch.randn(4, 50, 300, requires_grad=True), torch.arange(200).view(4, 50)
    kept = []
    pack = lambda x: kept.append(x) or x
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        log_likelihoods(logits, labels)
    own = [x for x in kept if x.untyped_storage().data_ptr() != logits.untyped_storage().data_ptr()]
    assert sum(x.nbytes for x in own) < logits.nbytes / 100


def test_log_likelihoods_leave_out_what_does_not_count():
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    labels, each = torch.tensor([[4, -100, 0], [-100] * 3]), logits.log_softmax(-1)
    assert close(log_likelihoods(logits, labels), torch.tensor([each[0, 0, 4] + each[0, 2, 0], 0]))


@every_family
@pytest.mark.parametrize("loss_on", ["answer", "all"])
def test_score_of_plain_text_is_the_log_likelihood_of_what_is_predicted(loss_on, family):
    seed = seed_of(family, loss_on=loss_on)
    for data in (REPLIES, QUESTIONS):  # a question is text, too
        found = scores(seed, data, [])
        assert found.shape == (len(data), 2)
        assert close(found[:, 0], torch.tensor([*likelihoods(seed, data)]), atol=1e-3)


@every_family
@pytest.mark.parametrize("loss_on", ["answer", "all"])
@torch.no_grad()
def test_next_tokens_that_are_right_are_counted_as_one_text_after_the_other_says(loss_on, family):
    "At every second place the most probable token is made the one that follows."
    seed = seed_of(family, loss_on=loss_on)
    batch, wanted = only(seed, REPLIES), []
    for row, label in enumerate(batch["labels"]):
        real = batch["attention_mask"][row] == 1
        ids = batch["input_ids"][row][real]
        likeliest, right = read(ids.tolist(), family)[0].argmax(-1), 0
        gap = len(label) - len(ids)
        for number, place in enumerate((label != -100).nonzero()[:, 0].tolist()):
            if number % 2:
                label[place] = likeliest[place - gap - 1]
            right += bool(label[place] == likeliest[place - gap - 1])
        wanted.append(right)
    task = seed.task([])
    found = task.scores(seed.backbone, batch)
    assert found[:, 1].tolist() == wanted and sum(wanted) > 5
    judged = reduce(add, task.judge(found, batch))
    tokens = (batch["labels"] != -100).sum().item()
    assert judged.next_token == Accuracy(sum(wanted), tokens)


@every_family
@pytest.mark.parametrize("loss_on", ["answer", "all"])
def test_loss_is_the_mean_over_samples_of_the_mean_over_their_tokens(loss_on, family):
    seed = seed_of(family, loss_on=loss_on)
    for data, classes in ((QUESTIONS, ABC), (REPLIES, [])):
        loss, wanted = seed.task(classes).loss, []
        with torch.no_grad():
            for number in range(len(data)):
                one = only(seed, data.select([number]))
                theirs = model(family)(input_ids=one["input_ids"], labels=one["labels"])
                wanted.append(theirs.loss)
                assert close(loss(seed.backbone, one), wanted[-1])
            found = loss(seed.backbone, only(seed, data))
        assert close(found, torch.stack(wanted).mean())


SAYINGS = ["Blue.", "Grün, gelb und weiß.", "Ein Schaf: 🐑!", ""]


@pytest.mark.parametrize("loss_on", ["answer", "all"])
def test_bits_per_byte_are_those_of_all_predicted_tokens_over_their_utf8_bytes(loss_on):
    rows = [dict(instruction="Sage etwas Schönes.", input="", output=said) for said in SAYINGS]
    data = text_dataset(rows, "sayings")
    seed = seed_of(kind="bos", loss_on=loss_on)
    task, parts = seed.task([]), []
    with torch.no_grad():
        for batch in seed.batches(data, batch_size=3):
            parts += task.judge(task.scores(seed.backbone, batch), batch)
    whole = reduce(add, parts)
    assert (len(parts), whole.texts) == (4, 4)
    size = sum(len(answer.encode()) for answer in data["answer"])
    if loss_on == "all":  # a beginning of text, which is no byte, precedes them
        size += sum(len(prompt.encode()) for prompt in data["prompt"])
    assert whole.bytes == size
    assert whole.nats == pytest.approx(-sum(likelihoods(seed, data)), rel=1e-5)
    assert whole.bits == pytest.approx(whole.nats / math.log(2) / size)


def predicted_bytes(seed, data):
    "How many bytes the predicted tokens stand for, as the task says."
    nothing = torch.zeros(len(data), 2)
    return reduce(add, PlainText(seed, []).judge(nothing, only(seed, data))).bytes


def spelled(kind, ids):
    "Tokens of a text in ASCII as its characters, blanks at the beginning too."
    ids = [token for token in ids if token not in tokenizer(kind).all_special_ids]
    text = "".join(tokenizer(kind).convert_ids_to_tokens(ids))
    return text.replace("Ġ", " ").replace("▁", " ").replace("Ċ", "\n")


@every_tokenizer
def test_bytes_are_those_of_the_text_however_its_tokens_are_written(kind):
    size, data = lambda texts: sum(len(text.encode()) for text in texts), QUESTIONS
    assert predicted_bytes(seed_of(kind=kind), data) == size(data["answer"]) == 8
    texts = [f" {row['choices'][row['label']]}" for row in data]
    assert predicted_bytes(seed_of(kind=kind, scoring="text"), data) == size(texts)
    colons = len(REPLIES) if kind == "glued" else 0  # one token is of prompt and answer
    assert predicted_bytes(seed_of(kind=kind), REPLIES) == size(REPLIES["answer"]) + colons


@every_tokenizer
@pytest.mark.parametrize("loss_on", ["answer", "all"])
@pytest.mark.parametrize("max_length", [256, 24, 3])
def test_bytes_are_those_of_what_is_predicted_and_no_others(max_length, loss_on, kind):
    seed = seed_of(kind=kind, loss_on=loss_on, max_length=max_length)
    for row in (*QUESTIONS, *REPLIES):
        batch = only(seed, data := Dataset.from_list([row]))
        labels = batch["labels"][0]
        text, said = row["prompt"] + row["answer"], spelled(kind, labels[labels != -100])
        if said == f" {text}":
            said = text  # the tokenizer itself put a blank before it
        assert said in text and predicted_bytes(seed, data) == len(said)


def test_bytes_of_a_character_that_several_tokens_share_count_once():
    data = text_dataset([dict(instruction="Ein Schaf?", input="", output="🐑 ü 🐑")], "sheep")
    seed, answer = seed_of(), data[0]["answer"]
    tokens = seed.tokenize(data[0]["prompt"], answer)
    reply = range(tokens.cut, len(tokens.ids))
    assert len(reply) > len(answer)
    counts = [tokens.count_bytes([place]) for place in reply]
    assert sum(counts) == tokens.count_bytes(reply) == len(answer.encode())
    assert predicted_bytes(seed, data) == len(answer.encode())
    assert sorted({*counts}) == [0, 1, 2, 4] and tokens.count_bytes([]) == 0


# ---- embeddings, and what must not matter


@every_family
def test_embedding_is_the_mean_of_the_last_representations_over_real_tokens(family):
    seed, wanted = seed_of(family), []
    for number in range(len(QUESTIONS)):
        ids = only(seed, QUESTIONS.select([number]))["input_ids"][0].tolist()
        wanted.append(read(ids, family)[1].mean(0))
    found = seed.embed(QUESTIONS, batch_size=3)
    assert close(found, torch.stack(wanted))
    assert found.shape == (4, seed.embedding_size) and found.dtype == torch.float32


@every_family
@pytest.mark.parametrize("answer", ["letter", "text", "hidden"])
def test_neither_company_nor_order_nor_batch_size_changes_an_answer(answer, family):
    seed = seed_of(family, scoring="letter" if answer == "hidden" else answer)
    ask = seed.hidden if answer == "hidden" else seed.task(ABC).scores
    with torch.no_grad():
        together = ask(seed.backbone, only(seed, QUESTIONS))
        for size, rows in ((1, range(4)), (2, range(4)), (3, [2, 0, 3, 1]), (4, [2, 0, 3, 1])):
            batches = seed.batches(QUESTIONS.select(rows), batch_size=size)
            found = torch.cat([ask(seed.backbone, batch) for batch in batches])
            assert close(found, together[[*rows]])
    assert together[:, :2].std(0).max() > 0.1  # there is something to change


@every_family
def test_the_first_tokens_of_texts_are_what_is_left_of_a_shortened_batch(family):
    seed = seed_of(family)
    batch, wanted = only(seed, QUESTIONS), torch.tensor([3, 100, 0, 5])
    texts = [ids[mask.bool()] for ids, mask in zip(batch["input_ids"], batch["attention_mask"])]
    found = seed.shortened(batch, wanted)
    kept = [text[:number] for text, number in zip(texts, wanted.tolist())]
    assert found["input_ids"].shape[1] == max(map(len, kept)) == len(texts[1])
    for row, text in enumerate(kept):
        real = found["attention_mask"][row].bool()
        assert torch.equal(found["input_ids"][row][real], text)
        assert not real[: len(real) - len(text)].any()  # padding is on the left
        for name, fill in dict(input_ids=seed.padding, asked=0, labels=-100).items():
            assert (found[name][row][~real] == fill).all()
    assert seed.shortened(batch, torch.zeros(4).long())["input_ids"].shape == (4, 1)
    whole = seed.shortened(batch, torch.full((4,), 1000))
    assert all(torch.equal(whole[name], batch[name]) for name in ("input_ids", "asked", "labels"))


@every_family
def test_positions_count_from_the_first_real_token(family):
    "Rotary embeddings forgive a shift; a limit on positions would not."
    seed, seen = seed_of(family), []
    backbone, task = seed.new_backbone(), seed.task(ABC)
    note = lambda module, args, named: seen.append(named)
    backbone.base_model.register_forward_pre_hook(note, with_kwargs=True)
    batch = only(seed, QUESTIONS)
    with torch.no_grad():
        for ask in (seed.hidden, task.scores, task.loss):
            ask(backbone, batch)
    assert len(seen) == 3
    for named in seen:
        for positions, mask in zip(named["position_ids"], named["attention_mask"].bool()):
            assert positions[mask].tolist() == list(range(int(mask.sum())))


@every_family
def test_model_that_is_fed_right_padded_gives_the_same(family):
    "Padding is on the left here; whoever pads on the right gets the same answers."
    seed = seed_of(family)
    rows = [only(seed, QUESTIONS.select([i]))["prompts"][0] for i in range(4)]
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=7)
    mask = torch.arange(lengths.max()) < lengths[:, None]
    _, letters = seed.letter_tokens(ABC)
    with torch.no_grad():
        logits = model(family)(ids, attention_mask=mask.long()).logits
    found, theirs = scores(seed), logits[torch.arange(4), lengths - 1][:, letters]
    assert close(found[found.isfinite()], theirs[found.isfinite()])


# ---- what a seed is


@every_family
def test_seed_has_gated_ffns_and_is_frozen(family):
    seed = seed_of(family)
    assert seed.layers == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert seed.width == 16 == seed.embedding_size
    assert seed.ffn.linears == ("gate_proj", "up_proj", "down_proj")
    assert not any(p.requires_grad for p in seed.backbone.parameters())
    assert not seed.backbone.training
    copy, before = seed.new_backbone(), digest_weights(seed.model)
    with torch.no_grad():
        for p in copy.parameters():
            p.add_(1)
    assert digest_weights(seed.model) == before


def test_identity_tells_weights_tokenizer_and_settings():
    same = seed_of()
    others = dict(
        weights=DecoderSeed(model(random_state=1), tokenizer("byte"), "llama"),
        architecture=DecoderSeed(model(rope_theta=500.0), tokenizer("byte"), "llama"),
        tokenizer=seed_of(kind="bos"),
        scoring=seed_of(scoring="text"),
        loss=seed_of(loss_on="all"),
        length=seed_of(max_length=99),
        name=DecoderSeed(model(), tokenizer("byte"), "other"),
    )
    identities = {name: seed.identity for name, seed in others.items()}
    assert len({json.dumps(identity, sort_keys=True) for identity in identities.values()}) == 7
    changed = lambda identity: [key for key in identity if identity[key] != same.identity[key]]
    assert {name: changed(identity) for name, identity in identities.items()} == dict(
        weights=["weights"],
        architecture=["architecture"],
        tokenizer=["preprocessing"],
        scoring=["prompt"],
        loss=["prompt"],
        length=["preprocessing"],
        name=["name"],
    )
    assert seed_of().identity == same.identity


def test_identity_does_not_tell_the_device_nor_what_was_done_before(tmp_path):
    seed = seed_of()
    before = seed.identity
    assert json.loads(json.dumps(before)) == before == seed_of(device="cpu:0").identity
    seed.embed(QUESTIONS)
    seed.tokenizer(["a", "b c d"], padding=True, truncation=True, max_length=2)
    assert seed.identity == before
    seed.save(tmp_path)
    assert seed.identity == before == seed_of().identity


@pytest.mark.cuda
def test_identity_and_answers_are_those_of_the_cpu_on_a_gpu():
    here = seed_of()
    there = DecoderSeed(here.new_backbone(), here.tokenizer, here.name, device="cuda")
    assert there.identity == here.identity
    assert torch.allclose(there.embed(QUESTIONS), here.embed(QUESTIONS), atol=1e-3)


@pytest.mark.parametrize(
    "settings, said",
    [
        (dict(scoring="guess"), "scoring 'guess' is none of letter, text, cloze"),
        (dict(loss_on="prompt"), "loss_on 'prompt' is neither 'answer' nor 'all'"),
        (dict(max_length=0), "max_length is 0, but must be at least 2"),
        (dict(max_length=-5), "max_length is -5"),
    ],
)
def test_wrong_settings_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        seed_of(**settings)


def test_tokenizer_without_offsets_is_refused():
    with pytest.raises(ValueError, match="llama needs a fast tokenizer"):
        DecoderSeed(model(), SimpleNamespace(is_fast=False), "llama")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", OTHERS)
def test_model_without_gated_ffns_is_refused(kind):
    said = "has no FFN sublayers with linear maps gate_proj/up_proj/down_proj"
    with pytest.raises(ValueError, match=said):
        DecoderSeed(OTHERS[kind](), tokenizer("byte"), kind)


# ---- what is saved


def test_saved_folder_is_one_of_transformers(tmp_path):
    seed = seed_of("qwen3")
    seed.save(tmp_path)
    ids = only(seed, QUESTIONS)["input_ids"]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert digest_weights(theirs) == digest_weights(seed.model)
    with torch.no_grad():
        assert close(theirs(ids).logits, model("qwen3")(ids).logits)


@pytest.mark.parametrize("family", ["llama", "gemma2"])  # the second ties its embeddings
def test_half_precision_is_half_as_large(family, tmp_path):
    seed, size = seed_of(family), {}
    for name, dtype in dict(whole=None, half=torch.float16).items():
        (tmp_path / name).mkdir()
        seed.save(tmp_path / name, dtype)
        size[name] = (tmp_path / name / "model.safetensors").stat().st_size
    assert size["half"] < 0.6 * size["whole"]
    own = seed.model.state_dict()
    for key, value in load_file(tmp_path / "half" / "model.safetensors").items():
        assert torch.equal(value, own[key].half()), key
    # that of computing, not of the file
    assert json.loads((tmp_path / "half" / FACTS).read_text())["dtype"] == "float32"


def test_another_backbone_can_be_saved_in_place_of_the_seeds_own(tmp_path):
    seed = seed_of()
    backbone, before = seed.new_backbone(), digest_weights(seed.model)
    with torch.no_grad(), seeded(1):
        for p in backbone.parameters():
            p.add_(0.05 * torch.randn_like(p))
    seed.save(tmp_path, backbone=backbone)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert digest_weights(again) == digest_weights(backbone) != before
    assert digest_weights(seed.model) == before
