"Samples and what they are called: labels, label spaces and targets, whatever a class is called."

import pytest
from datasets import (
    ClassLabel,
    Dataset,
    Features,
    Image,
    Value,
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)
from PIL import Image as PILImage

from harmomoe.data.samples import (
    SEEN,
    class_names,
    expert_data,
    in_a_stream,
    labelled,
    relabelled,
    targets_in,
    union_label_space,
    with_column,
)


def pictures(names, labels, **columns):
    "Samples of one colour each, with integer labels."
    images = [PILImage.new("RGB", (2, 2), (10 * number, 0, 0)) for number in range(len(labels))]
    features = dict(image=Image(), label=ClassLabel(names=names))
    features |= {name: Value("string") for name in columns}
    return Dataset.from_dict(dict(image=images, label=labels) | columns, Features(features))


def questions(names, **columns):
    "Samples for text, called by name."
    prompts = [f"question {number}" for number in range(len(names))]
    return Dataset.from_dict(dict(prompt=prompts, class_name=names) | columns)


# ---- names


def test_integer_labels_become_names_and_names_stay():
    data = pictures(["cat", "dog"], [1, 0, 1])
    assert class_names(data) == class_names(labelled(data)) == ["dog", "cat", "dog"]
    assert class_names(questions(["B", "A"])) == ["B", "A"]


def test_names_win_over_numbers_where_a_data_set_has_both():
    assert class_names(pictures(["cat", "dog"], [0, 1], class_name=["x", "y"])) == ["x", "y"]


def test_of_a_sample_only_what_is_seen_and_its_name_are_left():
    data = pictures(["cat"], [0], source=["a diary"], class_name=["cat"])
    assert labelled(data).column_names == ["image", "class_name"]
    texts = questions(["A"], answer=["tea"], choices=[["tea", "milk"]], author=["me"])
    assert labelled(texts).column_names == ["prompt", "answer", "choices", "class_name"]
    assert set(labelled(texts).column_names) == {*SEEN, "class_name"} - {"image"}


def test_another_name_is_given_to_every_sample_in_order():
    data = relabelled(pictures(["cat", "dog"], [0, 1, 1]), ["x", "y", "z"])
    assert class_names(data) == ["x", "y", "z"]
    assert [image.getpixel((0, 0))[0] for image in data["image"]] == [0, 10, 20]
    with pytest.raises(Exception):
        relabelled(data, ["x"])


# ---- what an expert trains on


def test_proxies_follow_private_data_whatever_their_own_numbers_are():
    private, proxies = pictures(["cat", "dog"], [1, 0]), pictures(["dog", "owl"], [0, 1, 1])
    both = expert_data(private, proxies)
    assert class_names(both) == ["dog", "cat", "dog", "owl", "owl"]
    assert len(both["image"]) == 5
    assert class_names(expert_data(private, None)) == ["dog", "cat"]


def test_texts_go_the_same_way():
    both = expert_data(questions(["A"], answer=["tea"]), questions(["text"], answer=["hello"]))
    assert both["answer"] == ["tea", "hello"] and class_names(both) == ["A", "text"]


# ---- label spaces


@pytest.mark.parametrize(
    "lists, space",
    [
        ((["Pug", "pug"], ["PUG", "cat"], ["Cat", "dog"]), ["Pug", "pug", "cat", "dog"]),
        ((["a", "a", "b"],), ["a", "b"]),
        (([], ["a"]), ["a"]),
        ((), []),
        ((["straße"], ["STRASSE"]), ["straße"]),
    ],
    ids=str,
)
def test_label_space_holds_names_that_differ_in_case_only_once(lists, space):
    "But for those of one list, which its own data tell apart."
    assert union_label_space(*lists) == space


# ---- targets


def test_targets_are_places_in_the_label_space():
    data = pictures(["cat", "dog"], [1, 0, 1])
    assert targets_in(["dog", "owl", "cat"], data) == [0, 2, 0]


def test_a_name_as_it_stands_wins_over_one_in_another_case():
    data = questions(["pug", "Pug", "PUG"])
    assert targets_in(["Pug", "pug"], data) == [1, 0, 0]
    assert targets_in(["pug", "Pug"], data) == [0, 1, 0]  # of those alike the first


def test_of_a_name_that_stands_twice_the_first_place_counts():
    assert targets_in(["a", "b", "a"], questions(["a", "b"])) == [0, 1]


def test_targets_of_an_experts_data_are_those_of_its_own_classes_first():
    private, proxies = pictures(["Pug", "cat"], [0, 1]), pictures(["pug", "owl"], [0, 1])
    space = union_label_space(["Pug", "cat"], ["pug", "owl"])
    assert space == ["Pug", "cat", "owl"]
    assert targets_in(space, expert_data(private, proxies)) == [0, 1, 0, 2]


def test_a_class_that_nobody_listed_is_an_error_that_names_it():
    with pytest.raises(ValueError, match="'cat' is not in the label space of 2 classes"):
        targets_in(["dog", "owl"], questions(["dog", "cat", "emu"]))
    with pytest.raises(ValueError, match="'' is not in the label space"):
        targets_in(["dog"], questions([""]))


def test_without_a_label_space_all_targets_are_zero():
    assert targets_in(None, questions(["x", "y", "z"])) == [0, 0, 0]
    assert targets_in(["x"], questions(["x"]).select([])) == []


# ---- a stream of texts


def texts(name, number):
    "Texts of a domain, each with a prompt and an answer."
    columns = dict(prompt=[f"{name}{i}?" for i in range(number)], class_name=["text"] * number)
    return Dataset.from_dict(columns | dict(answer=[f" {name}{i}." for i in range(number)]))


def test_in_a_stream_every_text_stands_behind_another_one_and_all_are_there():
    parts = dict(a=texts("a", 5), b=texts("b", 3))
    stream = in_a_stream(parts)
    before = {}
    for name, part in stream.items():
        assert part["answer"] == parts[name]["answer"]
        assert part.column_names != [] and set(part.column_names) == set(parts[name].column_names)
        for row, prompt in zip(parts[name], part["prompt"]):
            earlier, _, own = prompt.rpartition("\n\n")
            assert own == row["prompt"]
            before[row["prompt"]] = earlier
    whole = [row["prompt"] + row["answer"] for part in parts.values() for row in part]
    assert sorted(filter(None, before.values())) == sorted(set(whole) & {*before.values()})
    assert list(before.values()).count("") == 1
    place, order = next(key for key, value in before.items() if not value), []
    after = {value.partition(" ")[0]: key for key, value in before.items() if value}
    while place:
        order.append(place)
        place = after.get(place)
    assert len(order) == 8 and order != sorted(order)
    again = in_a_stream(parts)
    assert all(stream[name].to_list() == again[name].to_list() for name in parts)
    other = in_a_stream(parts, random_state=1)
    assert any(stream[name].to_list() != other[name].to_list() for name in parts)


@pytest.fixture(params=[True, False], ids=["shown", "hidden"])
def bars(request):
    "Whether `datasets` shows bars, which other tests may have changed."
    before = are_progress_bars_disabled()
    (enable_progress_bars if request.param else disable_progress_bars)()
    yield request.param
    (disable_progress_bars if before else enable_progress_bars)()


def test_a_column_is_added_without_a_bar(bars, capfd):
    "And bars that were shown are shown afterwards."
    chosen = Dataset.from_dict({"a": [1, 2, 3], "b": ["x", "y", "z"]}).select([2, 0])
    found = with_column(chosen, "a", [1, 0], ClassLabel(names=["u", "v"]))
    assert found.to_dict() == {"b": ["z", "x"], "a": [1, 0]}
    assert found.features["a"].names == ["u", "v"] and chosen["a"][:] == [3, 1]
    assert capfd.readouterr().err == ""
    with pytest.raises(ValueError):
        with_column(chosen, "c", [1])
    assert are_progress_bars_disabled() is not bars
