"""Reading questions and instructions: every layout, every bad input, letters, splits, files and
the hub."""

import json
import os
import shutil
import warnings
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset

from harmomoe.data.domains import load_domain
from harmomoe.data.images import hub_dataset
from harmomoe.data.texts import (
    LAYOUTS,
    LETTERS,
    NAMED_TEXTS,
    choice_prompt,
    cloze_prompt,
    context_of,
    instruction_prompt,
    load_texts,
    read_rows,
    text_dataset,
    text_files,
    text_parts,
)

WORDS = ["ant", "bee", "cat", "dog", "eel"]


def rows_of(kind, count=7):
    """Made-up rows of a layout, and the label that each should get."""

    def row(i):
        n = {"CosmosQA": 4, "SocialIQA": 3}.get(kind, 2 + i % 4)
        question, context = f"Which is it, {i}?", f"Case {i}."
        right, choices = i % n, [f"{word} {i}" for word in WORDS[:n]]
        if kind == "samples":
            prompt, answer = choice_prompt(question, choices), f" {LETTERS[right]}"
            return dict(prompt=prompt, answer=answer, choices=choices, label=right), right
        if kind == "CommonsenseQA":
            more = dict(choices_label=list(LETTERS[:n]), choices_text=choices)
            known = dict(id=str(i), question_concept="x", answerKey=LETTERS[right])
            return dict(question=question, **more, **known), right
        if kind == "CommonsenseQA on the hub":
            nested = dict(label=list("12345"[:n]), text=choices)
            key = "12345"[right]
            return dict(id=str(i), question=question, choices=nested, answerKey=key), right
        if kind == "CosmosQA":
            answers = {f"answer{k}": text for k, text in enumerate(choices)}
            return dict(context=context, question=question, label=right, **answers), right
        if kind == "SocialIQA":
            answers = {f"answer{k}": text for k, text in zip("ABC", choices)}
            return dict(context=context, question=question, label=str(right + 1), **answers), right
        if kind == "multiple choice":
            context = context if i % 2 else None
            return dict(context=context, question=question, choices=choices, answer=right), right
        if kind == "conversations":
            said = [dict(role="system", content="Be short.")] * (i % 2)
            said += [dict(role="user", content=question), dict(role="assistant", content=context)]
            return dict(messages=said), 0
        if kind == "plain text":
            return dict(text=f" In case {i} there was no choice, and that was that. \n"), 0
        output = " ".join(map(str, range(i)))
        return dict(instruction=f"Count to {i}.", input=["", "aloud"][i % 2], output=output), 0

    made = [row(i) for i in range(count)]
    return [cells for cells, _ in made], [label for _, label in made]


def hidden_rows(kind):
    """Rows of a layout whose answers are withheld, as public test sets have it."""
    without = {
        "samples": dict(answer="", label=-1),
        "CommonsenseQA": dict(answerKey=""),
        "CommonsenseQA on the hub": dict(answerKey=""),
        "CosmosQA": dict(label=-1),
        "SocialIQA": dict(label="-1"),
        "multiple choice": dict(answer=-1),
        "instructions": dict(output=None),
        "conversations": dict(messages=[dict(role="user", content="Which is it?")]),
    }
    return [row | without[kind] for row in rows_of(kind)[0]]


def check_samples(samples):
    """What holds for every set: whole prompts, answers with their separator, letters that agree
    with labels."""
    assert samples.column_names == ["prompt", "answer", "choices", "label"]
    names = samples.features["label"].names
    most = max(map(len, samples["choices"]))
    assert names == (list(LETTERS[:most]) if most else ["text"])
    for row in samples:
        assert row["prompt"] and row["prompt"] == row["prompt"].rstrip()
        assert row["answer"][0].isspace()
        if not most:
            assert (row["choices"], row["label"]) == ([], 0)
            continue
        assert row["answer"] == f" {names[row['label']]}" and row["prompt"].endswith("\nAnswer:")
        options = [line for line in row["prompt"].split("\n") if line.startswith("(")]
        wanted = [f"({letter}) {text}" for letter, text in zip(LETTERS, row["choices"])]
        assert options[-len(wanted) :] == wanted


# Prompts


def test_prompt_of_a_question():
    assert choice_prompt("Who?", ["she", "he"]) == "Question: Who?\n(A) she\n(B) he\nAnswer:"
    odd = choice_prompt(" Who \n is it? ", ["she\r\ntoo", " he "], " One.\nTwo. ")
    assert odd == "One.\nTwo.\nQuestion: Who is it?\n(A) she too\n(B) he\nAnswer:"
    assert context_of(odd) == "One.\nTwo." and context_of(choice_prompt("Who?", ["a", "b"])) == ""
    assert cloze_prompt(odd, [" she\r\ntoo", "he"]) == "One.\nTwo.\nQuestion: Who is it?\nAnswer:"
    assert cloze_prompt(odd, ["she", "he"]) == odd and cloze_prompt("Go on.", []) == "Go on."
    for other in ("None of the above choices.", "both of these answers", "Any of the other two"):
        listed = choice_prompt("Who?", ["she", other])
        assert cloze_prompt(listed, ["she", other]) == listed
    for other in ("none of the milk", "all of them", "above"):
        assert (
            cloze_prompt(choice_prompt("Who?", ["she", other]), ["she", other])
            == "Question: Who?\nAnswer:"
        )
    assert choice_prompt("Who?", ["a  b", "c"], "  ") == "Question: Who?\n(A) a  b\n(B) c\nAnswer:"


def test_prompt_of_an_instruction():
    bare, given = instruction_prompt("Add {x}. "), instruction_prompt("Add {x}.", "\n1 2\n3\n")
    assert bare.endswith("request.\n\n### Instruction:\nAdd {x}.\n\n### Response:")
    assert "Input" not in bare
    assert given.endswith("### Instruction:\nAdd {x}.\n\n### Input:\n1 2\n3\n\n### Response:")
    assert "further context" in given and "context" not in bare


# Layouts


@pytest.mark.parametrize("form", ["list", "dataset"])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_every_layout(kind, form):
    rows, labels = rows_of(kind)
    samples = text_dataset(rows if form == "list" else Dataset.from_list(rows), kind)
    assert samples["label"][:] == labels
    check_samples(samples)
    again = text_dataset(samples, "again")
    assert again[:] == samples[:] and again.features == samples.features


@pytest.mark.parametrize("kind", [kind for kind in LAYOUTS if kind != "plain text"])
def test_withheld_answers(kind):
    rows = hidden_rows(kind)
    hidden = text_dataset(rows, kind)
    assert set(hidden["label"]) == {-1} and set(hidden["answer"]) == {""}
    if kind != "conversations":
        assert hidden["prompt"][:] == text_dataset(rows_of(kind)[0], kind)["prompt"][:]
    with pytest.raises(
        ValueError, match="some, row 7: the answer is missing, unlike in other rows"
    ):
        text_dataset(rows_of(kind)[0] + rows, "some")


def test_letters_and_numbers_as_answers():
    row = dict(question="q", choices=["x", "y", "z"])
    for answer in ("B", " b", "1", 1):
        assert text_dataset([row | dict(answer=answer)], "q")["answer"][:] == [" B"]
    with_names = Dataset.from_list([row | dict(answer=2)]).cast_column(
        "answer", ClassLabel(names=list("ABCD"))
    )
    assert text_dataset(with_names, "q")["label"][:] == [2]


def test_formatted_dataset_and_further_columns():
    rows, labels = rows_of("multiple choice")
    plain = Dataset.from_list(rows)
    assert text_dataset(plain.with_format("numpy"), "q")[:] == text_dataset(plain, "q")[:]
    assert text_dataset(plain.add_column("weight", np.ones(len(rows))), "q")["label"][:] == labels


def test_context_and_input_may_be_missing():
    question = text_dataset([dict(question="q", choices=["x", "y"], answer=0)], "q")[0]
    assert question["prompt"].startswith("Question: q")
    bare = text_dataset([dict(instruction="Sing.", output="La")], "i")[0]
    assert bare["prompt"] == instruction_prompt("Sing.") and bare["answer"] == "\nLa"


def test_empty_response_is_an_answer():
    assert text_dataset([dict(instruction="Say nothing.", output="")], "i")["answer"][:] == ["\n"]


@pytest.mark.parametrize(
    "kind, changes, message",
    [
        ("CommonsenseQA", dict(question=" "), "the question is empty"),
        ("CommonsenseQA", dict(choices_text=["x", "y"]), "2 choices are called"),
        ("CommonsenseQA", dict(choices_label=[]), r"3 choices are called \[\]"),
        ("CommonsenseQA", dict(answerKey="F"), "the answer is 'F', none of A, B"),
        (
            "CommonsenseQA on the hub",
            dict(choices=dict(label=["A", "A"], text=["x", "y"])),
            "2 choices are called",
        ),
        ("CommonsenseQA on the hub", dict(choices=None), "the choices are no list, but None"),
        ("CosmosQA", dict(label=4), "the answer is '4', none of 0, 1, 2, 3"),
        ("CosmosQA", dict(answer2=" "), "choice C is empty"),
        ("SocialIQA", dict(label="0"), "the answer is '0', none of 1, 2, 3"),
        ("SocialIQA", dict(answerB=None), "choice B is empty"),
        ("multiple choice", dict(choices=["x"]), "the number of choices is 1"),
        (
            "multiple choice",
            dict(choices=[str(i) for i in range(27)]),
            "the number of choices is 27",
        ),
        ("multiple choice", dict(choices="xyz"), "the choices are no list, but 'xyz'"),
        ("multiple choice", dict(answer=-2), "the answer is '-2'"),
        ("multiple choice", dict(choices=["x", "y"], answer=2), "the answer is '2', none of 0, 1"),
        (
            "multiple choice",
            dict(choices=["x", "y"], answer="x"),
            "the answer is 'X', none of A, B",
        ),
        ("instructions", dict(instruction=None), "the instruction is empty"),
        ("instructions", dict(output=None), "the answer is missing, unlike in other rows"),
        ("samples", dict(prompt="Answer: "), "the prompt is empty or ends in a blank: 'Answer: '"),
        ("samples", dict(prompt=None), "the prompt is empty"),
        ("samples", dict(choices=["x"]), "the number of choices is 1"),
        ("samples", dict(choices="xy"), "is no text"),
        ("samples", dict(choices=["x", "y"], label=2), "the label is 2"),
        ("samples", dict(label=None), "the label is None"),
        (
            "samples",
            dict(choices=["x", "y"], label=0, answer=" B"),
            "the answer is ' B', but the label is that of A",
        ),
        ("samples", dict(choices=[], label=0), "there are no choices, unlike in other rows"),
    ],
)
def test_a_bad_row_is_named(kind, changes, message):
    rows, _ = rows_of(kind)
    rows[5] = rows[5] | changes
    with pytest.raises(ValueError, match=rf"^here, row 5: .*{message}") as caught:
        text_dataset(rows, "here")
    assert f" Expected ({kind}): {LAYOUTS[kind].expects}" in str(caught.value)


def test_unknown_columns_and_no_rows():
    with pytest.raises(
        ValueError, match=r"here: no known layout has the columns \['q', 'a'\].*instruction output"
    ):
        text_dataset([dict(q="x", a="y")], "here")
    with pytest.raises(ValueError, match="here: no rows"):
        text_dataset([], "here")


# Conversations and plain text


def turns(*said, first="user"):
    "Messages of a user and an assistant in turn."
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return [dict(role=roles[i % 2], content=text) for i, text in enumerate(said)]


def test_the_last_answer_of_a_conversation_is_what_follows():
    system = dict(role="system", content=" Be\nshort. ")
    rows = [dict(messages=[system, *turns("Two?", "2", " Three? ", "\n3\n")], id=7)]
    [sample] = text_dataset(rows, "talk")
    lines = "System: Be\nshort.\nUser: Two?\nAssistant: 2\nUser: Three?\nAssistant:"
    assert (sample["prompt"], sample["answer"]) == (lines, " 3")
    silent = text_dataset([dict(messages=turns("Say nothing.", ""))], "talk")
    assert silent["answer"][:] == [" "] and silent["label"][:] == [0]


@pytest.mark.parametrize(
    "messages, message",
    [
        (None, "column messages holds None; expected a list of objects with role and content"),
        (float("nan"), "column messages holds nan; expected a list"),
        ("user: hello", "column messages holds 'user: hello'; expected a list"),
        (["hello"], "expected a list of objects"),
        ([], "there are no messages"),
        ([dict(role="user")], "message 0 has no text"),
        ([dict(content="Hello")], "message 0 has the role None, none of system, user, assistant"),
        ([dict(role=["user"], content="Hi")], r"column messages.role holds \['user'\]"),
        ([*turns("Hi"), dict(role="tool", content="{}")], "message 1 has the role 'tool'"),
        (turns("Hi", " ", "Hello?", "Yes."), "message 1 has no text"),
        (turns(" ", "Yes."), "message 0 has no text"),
        (turns("Hi", None), "message 1 has no text"),
        (turns("Hi", 3), "message 1 has no text"),
        (turns("Hi", [dict(type="text", text="x")]), "column messages.content holds"),
        (turns("Hello.", first="assistant"), "no user says anything before the answer"),
        (turns("Hi", b"\xff"), "column messages.content holds bytes that are no UTF-8"),
        (turns("Hi", "\ud800"), "column messages.content holds half of a character"),
        (turns("Hi", "x" * 1_000_001), "messages.content holds 1,000,001 characters"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_bad_conversation_is_named(messages, message):
    rows = [dict(messages=turns("Hi", "Hello.")), dict(messages=messages)]
    with pytest.raises(ValueError, match=f"^talk, row 1: .*{message}"):
        text_dataset(rows, "talk")


def test_a_conversation_without_an_answer_among_others():
    rows = [dict(messages=turns("Hi", "Hello.")), dict(messages=turns("Hi"))]
    with pytest.raises(ValueError, match="row 1: the answer is missing, unlike in other rows"):
        text_dataset(rows, "talk")


@pytest.mark.parametrize(
    "text", ["a", "ab", "a b", "x" * 300, "ö" * 99, "one two " * 40, "\u2003é 😀" * 30, "a\n\nb"]
)
def test_a_text_is_cut_after_its_opening_and_nothing_is_lost(text):
    [sample] = text_dataset([dict(text=f"\n {text} ")], "texts")
    prompt, answer = sample["prompt"], sample["answer"]
    assert prompt + answer == text.strip() and prompt == prompt.rstrip() != ""
    assert len(prompt.encode()) <= max(64, len(text.strip()[0].encode()))
    assert not answer or answer[0].isspace() or not any(map(str.isspace, text[:64]))
    assert text_dataset([sample], "again")[:] == text_dataset([dict(text=text)], "texts")[:]


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "the text is empty"),
        (float("nan"), "the text is empty"),
        (" \n", "the text is empty"),
        (3, "the text is no text, but 3"),
        (["a"], r"column text holds \['a'\]; expected text"),
        (dict(a="b"), "column text holds"),
        (b"\xff", "column text holds bytes that are no UTF-8"),
        ("\ud800", "column text holds half of a character"),
    ],
    ids=repr,
)
def test_a_bad_text_is_named_or_left_out(text, message):
    rows = [dict(text="Once upon a time."), dict(text=text), dict(text="And then.")]
    with pytest.raises(ValueError, match=f"^here, row 1: {message}"):
        text_dataset(rows, "here")
    with pytest.warns(UserWarning, match=message):
        assert len(text_dataset(rows, "here", on_error="skip")) == 2


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_empty_cells_in_files_of_texts_and_conversations(tmp_path, suffix):
    for name, good in (("texts", dict(text="Once.")), ("talk", dict(messages=turns("Hi", "Yo.")))):
        path = write(tmp_path / f"{name}{suffix}", [good, dict.fromkeys(good)])
        with pytest.raises(ValueError, match=f"{name}{suffix}, row 1: "):
            load_texts(path)


def test_columns_that_are_known_go_before_a_text_column():
    rows = [dict(instruction="Sing.", output="La", text="Below is an instruction ...")]
    assert text_dataset(rows, "alpaca")["answer"][:] == ["\nLa"]


def test_a_prompt_may_end_in_a_line_break_and_in_no_other_blank():
    row = dict(answer="A.", choices=[], label=0)
    for end in ("\n", ">\n\n", " \n"):
        assert text_dataset([row | dict(prompt=f"x{end}")], "q")["prompt"][:] == [f"x{end}"]
    for prompt in ("x ", "x\n ", "x\t", "x\u00a0", "\n", " \n"):
        with pytest.raises(ValueError, match="the prompt is empty or ends in a blank"):
            text_dataset([row | dict(prompt=prompt)], "q")


# In a chat template


def marked(messages):
    return "".join(f"<{m['role']}>{m['content']}</>\n" for m in messages) + "<assistant>\n"


@pytest.mark.parametrize(
    "rows, prompt, answer",
    [
        ([dict(messages=turns("Two?", "2", "3?", " 3"))], "<user>3?</>\n<assistant>\n", "3"),
        ([dict(instruction="Add.", input="1 2", output="3")], "<user>Add.\n\n1 2</>\n", "3"),
        ([dict(instruction="Sing.", output="La")], "<user>Sing.</>\n<assistant>\n", "La"),
        ([dict(text="one two")], "<user>one</>\n<assistant>\n", "two"),
        ([dict(prompt="a:", answer=" b", choices=[], label=0)], "<user>a:</>\n", "b"),
    ],
    ids=["conversation", "instruction", "no input", "text", "sample"],
)
def test_a_template_gives_prompts_their_form(rows, prompt, answer):
    [sample] = text_dataset(rows, "chat", template=marked)
    assert sample["prompt"].endswith(prompt if "assistant" in prompt else f"{prompt}<assistant>\n")
    assert (sample["answer"], sample["label"]) == (answer, 0)
    assert text_dataset([sample], "again")[:] == text_dataset(rows, "chat", template=marked)[:]


def test_questions_with_choices_have_no_template(tmp_path):
    rows, _ = rows_of("multiple choice")
    assert text_dataset(rows, "q", template=marked)[:] == text_dataset(rows, "q")[:]


def test_a_templates_refusal_names_the_row_and_files_are_read_in_it(tmp_path):
    def strict(messages):
        if messages[0]["role"] == "system":
            raise ValueError("no system role")
        return marked(messages)

    rows = rows_of("conversations")[0]
    with pytest.raises(ValueError, match="^talk, row 1: no system role"):
        text_dataset(rows, "talk", template=strict)
    write(tmp_path / "talk.jsonl", rows)
    assert load_texts(tmp_path / "talk", template=marked)["train"][0]["prompt"][:6] == "<user>"


# Splits


def test_splits_share_their_letters():
    rows, _ = rows_of("multiple choice")
    parts = text_parts(dict(train=rows[:2], test=rows), dict(train="a", test="b"))
    assert parts["train"].features == parts["test"].features
    assert parts["train"].features["label"].names == list("ABCDE")


def test_hidden_split_is_left_out_with_a_warning():
    rows, _ = rows_of("CosmosQA")
    where = dict(train="cosmos, train", test="cosmos, test")
    with pytest.warns(UserWarning, match="cosmos, test: all 7 answers are withheld"):
        assert list(text_parts(dict(train=rows, test=hidden_rows("CosmosQA")), where)) == ["train"]
    with (
        pytest.warns(UserWarning),
        pytest.raises(ValueError, match="cosmos, test: no split with answers"),
    ):
        text_parts(dict(test=hidden_rows("CosmosQA")), dict(test="cosmos, test"))


def test_splits_of_two_kinds():
    splits = dict(train=rows_of("CosmosQA")[0], test=rows_of("instructions")[0])
    with pytest.raises(ValueError, match="a, b: some splits have choices, others have none"):
        text_parts(splits, dict(train="a", test="b"))


# Files


def write(path, rows):
    """Write rows in the form that the suffix says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        path.write_text(json.dumps(rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("suffix", [".parquet", ".json", ".jsonl"])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_files(tmp_path, kind, suffix):
    rows, labels = rows_of(kind)
    for path in ("one", "several_train", "several_dev", "folder/training", "folder/test"):
        write(tmp_path / f"{path}{suffix}", rows)
    whole = text_dataset(rows, kind)
    for source, splits in (
        ("one", ["train"]),
        (f"one{suffix}", ["train"]),
        ("several", ["train", "validation"]),
        ("folder", ["train", "test"]),
    ):
        parts = load_texts(tmp_path / source)
        assert list(parts) == splits
        assert all(
            part[:] == whole[:] and part.features == whole.features for part in parts.values()
        )


def test_two_files_for_one_split(tmp_path):
    rows, _ = rows_of("instructions")
    write(tmp_path / "a_dev.json", rows)
    write(tmp_path / "a_val.parquet", rows)
    with pytest.raises(
        ValueError, match="a_val.parquet and .*a_dev.json are both its validation split"
    ):
        text_files(tmp_path / "a")
    write(tmp_path / "b.json", rows)
    write(tmp_path / "b.jsonl", rows)
    with pytest.raises(ValueError, match="both its train split"):
        text_files(tmp_path / "b")
    assert text_files(tmp_path / "b.json") == {"train": tmp_path / "b.json"}


def test_json_as_people_write_it(tmp_path):
    rows, _ = rows_of("multiple choice")
    rows[0]["question"] = "A line\u2028separator?"
    text = "\ufeff" + "\r\n\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    Path(tmp_path / "lines.json").write_text(text, encoding="utf-8")
    assert read_rows(tmp_path / "lines.json") == rows


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", b'{"question": 1}\n{"quest', "a.jsonl, line 2: no JSON"),
        ("a.json", b'[\n{"question": 1},\n', "a.json, line 3: no JSON"),
        ("a.json", b"[1]", "a.json, row 0: 1 is no object"),
        ("a.jsonl", b"\xff\xfe\x00", "a.jsonl is no text in UTF-8"),
        ("a.jsonl", b"\n", "a.jsonl: no rows"),
        ("a.parquet", b"PAR1 not quite", "a.parquet is no readable parquet file"),
    ],
)
def test_bad_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_texts(tmp_path / name)


def test_error_names_the_file_and_row(tmp_path):
    rows, _ = rows_of("SocialIQA")
    write(tmp_path / "s_train.jsonl", rows)
    write(tmp_path / "s_dev.jsonl", rows[:3] + [rows[3] | dict(label="4")])
    with pytest.raises(ValueError, match=r"s_dev.jsonl, row 3: the answer is '4', none of 1, 2, 3"):
        load_texts(tmp_path / "s")


# The hub


def copy_of_repository(root, **splits):
    """What `hf download` leaves: parquet in data/, in the nested layout of tau/commonsense_qa."""
    for split, rows in splits.items():
        write(root / "data" / f"{split}-00000-of-00001.parquet", rows)
    return root


def test_copy_of_a_repository(tmp_path):
    rows, labels = rows_of("CommonsenseQA on the hub")
    copy = copy_of_repository(
        tmp_path / "copy",
        train=rows,
        validation=rows[:3],
        test=hidden_rows("CommonsenseQA on the hub"),
    )
    with pytest.warns(UserWarning, match="copy, test: all 7 answers are withheld"):
        parts = load_texts(copy)
    assert {split: len(part) for split, part in parts.items()} == {"train": 7, "validation": 3}
    assert parts["train"]["label"][:] == labels
    check_samples(parts["train"])


def test_name_goes_to_its_repository_in_the_cache(tmp_path, monkeypatch):
    rows, labels = rows_of("SocialIQA")
    copy = copy_of_repository(tmp_path / "copy", train=rows)
    made = os.path.dirname(hub_dataset(str(copy))["train"].cache_files[0]["filename"])
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    home = tmp_path / "cache" / "lighteval___siqa" / "default" / "0.0.0" / "0123abcd"
    shutil.copytree(made, home)
    (home / "copy-train.arrow").rename(home / "siqa-train.arrow")
    monkeypatch.chdir(tmp_path)
    assert load_texts("socialiqa")["train"]["label"][:] == labels


def test_a_few_instructions_of_a_pool_are_held_out_the_same_for_everybody(tmp_path):
    write(tmp_path / "pool.jsonl", rows_of("instructions", 300)[0])
    first, other = (load_domain(tmp_path / "pool", None, state, True) for state in (0, 5))
    sizes = [len(first.train), len(first.validation), len(first.test)]
    assert sizes == [294, 3, 3]
    for split in ("train", "validation", "test"):
        assert getattr(first, split)["prompt"][:] == getattr(other, split)["prompt"][:]
    prompts = [*first.train["prompt"], *first.validation["prompt"], *first.test["prompt"]]
    assert len(set(prompts)) == 300


def test_files_go_before_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "alpaca.json", rows_of("instructions", 3)[0])
    assert len(load_texts("alpaca")["train"]) == 3


def test_nothing_there(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    with pytest.raises(
        FileNotFoundError, match="'riddles': no file .*none of commonsenseqa.* no id on the hub"
    ):
        load_texts("riddles")
    with pytest.raises(FileNotFoundError, match="no copy of a hub repository"):
        load_texts(tmp_path)
    with pytest.raises(
        ConnectionError, match=f"'{NAMED_TEXTS['cosmosqa']}': not in the local cache.*hf download"
    ):
        load_texts("cosmosqa")


def test_splits_by_unknown_names(tmp_path):
    rows, _ = rows_of("CommonsenseQA on the hub")
    copy = copy_of_repository(tmp_path / "copy", easy=rows, hard=rows)
    (copy / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n"
        + "".join(f"  - split: {split}\n    path: data/{split}-*\n" for split in ("easy", "hard"))
        + "---\n",
        encoding="utf-8",
    )
    with pytest.raises(
        ValueError, match=r"copy: splits \['easy', 'hard'\]. Expected some of train, "
    ):
        load_texts(copy)


@pytest.mark.hub
@pytest.mark.parametrize(
    "name, sizes, letters",
    [
        ("commonsenseqa", dict(train=9_741, validation=1_221), 5),
        ("cosmosqa", dict(train=25_262, validation=2_985), 4),
        ("socialiqa", dict(train=33_410, validation=1_954), 3),
        ("alpaca", dict(train=52_002), 1),
    ],
)
def test_named_sets_on_the_hub(name, sizes, letters):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of hidden test splits
        parts = load_texts(name)
    assert {split: len(part) for split, part in parts.items()} == sizes
    assert parts["train"].features["label"].num_classes == letters


# Real files


@pytest.mark.skipif(
    "HARMOMOE_DATA" not in os.environ, reason="HARMOMOE_DATA names no folder of real texts (text/)"
)
@pytest.mark.parametrize(
    "name, sizes, letters",
    [
        ("commonsenseqa", dict(train=9_741, validation=1_221), "ABCDE"),
        ("socialiqa", dict(train=33_410, validation=1_954), "ABC"),
        ("cosmosqa", dict(train=2_985), "ABCD"),  # alone, so that it is the one set
        ("alpaca_5000", dict(train=5_000), ""),
    ],
)
def test_real_texts(name, sizes, letters):
    parts = load_texts(Path(os.environ["HARMOMOE_DATA"], "text", name))
    assert {split: len(part) for split, part in parts.items()} == sizes
    for part in parts.values():
        check_samples(part)
        if letters:  # the letters of these sets are balanced: a shifted label would show
            shares = np.bincount(part["label"], minlength=len(letters)) / len(part)
            assert part.features["label"].names == list(letters)
            assert abs(shares - 1 / len(letters)).max() < 0.02


# ---- what others write


QUESTION = dict(question="Which?", choices=["x", "y"], answer=0)


def parquet_rows(path, rows, **columns):
    "Rows of parquet; `columns` replaces whole columns by Arrow arrays."
    table = pa.Table.from_pylist(rows)
    for name, column in columns.items():
        table = table.set_column(table.schema.get_field_index(name), name, column)
    pq.write_table(table, path)
    return path


def test_bytes_are_read_as_utf8(tmp_path):
    rows = [QUESTION | dict(question="Wër?".encode(), choices=[b"x", b"y"])] * 4
    part = load_texts(parquet_rows(tmp_path / "x.parquet", rows))["train"]
    assert part["prompt"][0] == "Question: Wër?\n(A) x\n(B) y\nAnswer:"


@pytest.mark.parametrize(
    "changes, said",
    [
        (dict(question=b"\xff"), r"column question holds bytes that are no UTF-8: b'\\xff'"),
        (dict(choices=[b"x", b"\xff"]), "column choices holds bytes that are no UTF-8"),
        (dict(question="\ud800"), "column question holds half of a character"),
        (dict(question="x" * 1_000_001), "column question holds 1,000,001 characters; at most"),
        (dict(question=float("nan")), "the question is empty"),
        (dict(question=dict(en="Which?")), "column question holds .*en.*; expected text"),
        (dict(question=["Which?"]), "column question holds .*; expected text"),
        (dict(choices=[dict(text="x"), dict(text="y")]), "column choices holds {'text': 'x'}"),
        (dict(choices=[["x"], ["y"]]), r"column choices holds \['x'\]; expected text"),
        (dict(choices=dict(text=["x", "y"], label=5)), "names of the choices are no list, but 5"),
        (dict(choices=dict(text=5, label=["A"])), "the choices are no list, but 5"),
        (dict(answer=10**400), "the answer is '1000"),
        (dict(answer=1.0), "the answer is '1.0', none of"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_odd_cells_are_refused_with_row_and_column(changes, said):
    rows = [QUESTION, QUESTION, QUESTION | changes]
    with pytest.raises(ValueError, match=f"^here, row 2: .*({said})") as caught:
        text_dataset(rows, "here")
    assert len(str(caught.value)) < 900


def test_nan_is_an_empty_cell_and_numbers_are_text():
    rows = [QUESTION | dict(context=float("nan"), choices=[21, 2.5]), QUESTION]
    part = text_dataset(rows, "here")
    assert part["prompt"][0] == "Question: Which?\n(A) 21\n(B) 2.5\nAnswer:"


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("a.jsonl", b'{"a": 1}\n' + b"[" * 99_999, "a.jsonl, line 2: no JSON .too many brackets"),
        ("a.json", b"[" * 99_999, "a.json, line 1: no JSON .too many brackets"),
        ("a.jsonl", b'{"a": ' + b"9" * 5_000 + b"}", "a.jsonl, line 1: no JSON .Exceeds the limit"),
        ("a.jsonl", b'{"a": 1}\n\n{"a": "\xff"}', "a.jsonl is no text in UTF-8 .line 3"),
        ("a.json", "[{}]".encode("utf-16"), "a.json is no text in UTF-8"),
        ("a.jsonl", b'{"a": 1}\nNaN', "a.jsonl, row 1: nan is no object"),
        ("a.jsonl", b"question,choices\nWhich?,x", "a.jsonl, line 1: no JSON"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_odd_files_are_refused_with_file_and_line(name, content, said, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=said) as caught:
        load_texts(tmp_path / name)
    assert len(str(caught.value)) < 500


def test_ragged_rows_are_those_that_lack_a_cell(tmp_path):
    rows = [QUESTION, QUESTION | dict(more=1), dict(question="Which?", answer=0)]
    write(tmp_path / "x.jsonl", rows)
    with pytest.raises(ValueError, match="x.jsonl, row 2: the choices are no list, but None"):
        load_texts(tmp_path / "x")


def test_column_of_text_that_is_no_utf8_is_named(tmp_path):
    wrong = pa.array([b"Which?", b"\xff"] * 2).view(pa.string())
    path = parquet_rows(tmp_path / "x.parquet", [QUESTION] * 4, question=wrong)
    with pytest.raises(ValueError, match="x.parquet is no readable parquet file .question: "):
        load_texts(path)


@pytest.mark.parametrize("told", [b"[" * 9_000, b"\xff", b'{"info": {"features": 7}}'], ids=len)
def test_hostile_notes_in_a_schema_are_left_out(told, tmp_path):
    table = pa.Table.from_pylist([QUESTION] * 4).replace_schema_metadata({b"huggingface": told})
    pq.write_table(table, tmp_path / "x.parquet")
    assert len(load_texts(tmp_path / "x")["train"]) == 4


def test_rows_that_are_no_samples_are_left_out_counted_and_listed(tmp_path):
    rows = [QUESTION, QUESTION | dict(answer=9), QUESTION, QUESTION | dict(question="")]
    write(tmp_path / "x_train.jsonl", rows)
    write(tmp_path / "x_dev.jsonl", rows[:1])
    with pytest.warns(UserWarning, match="x_train.jsonl: 2 of 4 rows .*row 1: the answer.*row 3"):
        parts = load_texts(tmp_path / "x", "skip")
    assert len(parts["train"]) == 2 and len(parts["validation"]) == 1
    with pytest.raises(ValueError, match="x_train.jsonl, row 1: the answer is '9'"):
        load_texts(tmp_path / "x")
    write(tmp_path / "x_dev.jsonl", rows[1:2])
    with (
        pytest.warns(UserWarning),
        pytest.raises(ValueError, match="x_dev.jsonl: 1 of 1 rows .*Nothing is left"),
    ):
        load_texts(tmp_path / "x", "skip")


@pytest.mark.parametrize(
    "names, said",
    [
        (["x_train.csv", "x_train.jsonl"], "x_train.csv is not read, and it is the same split as "),
        (["x_test.csv", "x_train.jsonl"], "x_test.csv is not read. Files of rows are .parquet"),
        (["x_train.csv"], "x_train.csv is not read. .*to convert a table: pandas.read_csv"),
        (["x.tsv"], "x.tsv is not read"),
        (["x_train.json", "x_Training.jsonl"], "x_train.json and .*x_Training.jsonl are both its"),
        (["x.json", "x_test.jsonl"], "x.json is the whole, but .*x_test.jsonl is a split of it"),
    ],
    ids=" ".join,
)
def test_no_file_of_rows_is_lost_without_a_word(names, said, tmp_path):
    for name in names:
        write(tmp_path / name, [QUESTION] * 4)
    for read in (load_texts, load_domain):
        with pytest.raises(ValueError, match=said):
            read(tmp_path / "x")
