"""What others wrote: what is read is what a schema allows, and every defect is a ValueError that
says where."""

import json
import os
import struct
from dataclasses import dataclass, field

import pytest
import torch
from safetensors.torch import save_file

from harmomoe.base.schema import (
    DEEPEST,
    JSON_BYTES,
    STRICT,
    all_finite,
    check_name,
    check_names,
    one_line,
    parse,
    read_json,
    read_tensors,
)


@dataclass(frozen=True)
class Inner:
    __pydantic_config__ = STRICT
    rank: int = 16
    scale: float = 1.0

    def __post_init__(self):
        if self.rank < 1:
            raise ValueError(f"rank is {self.rank}, but must be positive")


@dataclass(frozen=True)
class Outer:
    __pydantic_config__ = STRICT
    name: str
    inner: Inner = field(default_factory=Inner)
    files: dict[str, Inner] = field(default_factory=dict)
    parts: list[Inner] = field(default_factory=list)


# ---- parsing


def test_values_become_an_instance_with_defaults_for_what_is_not_said():
    found = parse(Outer, dict(name="a", inner=dict(rank=4), parts=[dict(), dict(rank=2)]), "it")
    assert found == Outer("a", Inner(4), {}, [Inner(), Inner(2)])
    assert parse(dict, {"a": [1]}, "it") == {"a": [1]}
    assert parse(list[int], [1, 2], "it") == [1, 2]


@pytest.mark.parametrize(
    "value, said",
    [
        ({}, "it: the field 'name' is missing."),
        ({"name": 7}, "it: name is 7. Input should be a valid string."),
        ({"name": None}, "it: name is None. Input should be a valid string."),
        (
            {"name": "a", "nme": 1},
            "it: unknown field 'nme'. Did you mean 'name'? Known fields: name",
        ),
        (
            {"name": "a", "zzz": 1},
            "it: unknown field 'zzz'. Known fields: name, inner, files, parts.",
        ),
        ({"name": "a", "": 1}, "it: unknown field ''."),
        ({"name": "a", "inner": 5}, "it: inner is 5. Input should be"),
        ({"name": "a", "inner": {"rank": 0}}, "rank is 0, but must be positive."),
        (
            {"name": "a", "inner": {"rank": 1.5}},
            "it: inner.rank is 1.5. Input should be a valid int",
        ),
        ({"name": "a", "inner": {"rank": "x"}}, "it: inner.rank is 'x'. Input should be"),
        ({"name": "a", "inner": {"rank": float("nan")}}, "it: inner.rank is nan."),
        (
            {"name": "a", "inner": {"rnk": 1}},
            "'inner.rnk'. Did you mean 'rank'? Known fields: rank, s",
        ),
        ({"name": "a", "files": {"x": {"rnk": 1}}}, "it: files.x.rnk is 1."),
        ({"name": "a", "files": {"../x": 3}}, "it: files.../x is 3."),
        (
            {"name": "a", "parts": {"0": {}}},
            "it: parts is {'0': {}}. Input should be a valid list.",
        ),
        ({"name": "a", "parts": [{}, {"rank": -1}]}, "rank is -1, but must be positive."),
        ([1, 2], "it: it is [1, 2]."),
        ("Outer", "it: it is 'Outer'."),
        (None, "it: it is None."),
    ],
    ids=repr,
)
def test_the_first_defect_is_named_with_its_place(value, said):
    with pytest.raises(ValueError) as caught:
        parse(Outer, value, "it")
    assert said in str(caught.value) and type(caught.value) is ValueError
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    "value",
    [
        {"name": ["x" * 10**6]},
        {"name": "a", "x" * 10**6: 1},
        {"name": "a", "files": {"x" * 10**6: 1}},
    ],
    ids=["value", "field", "key"],
)
def test_a_message_is_short_whatever_was_written(value):
    with pytest.raises(ValueError) as caught:
        parse(Outer, value, "it")
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("mark", ["\n", "\x1b[31m", "\u202e", "\ud800", "\0"], ids=ascii)
def test_a_message_is_one_line_that_a_terminal_shows_as_it_is(mark):
    for value in (
        {"name": "a", f"x{mark}y": 1},
        {"name": "a", "files": {f"x{mark}y": 3}},
        {"name": "a", "files": {f"x{mark}y": {f"r{mark}": 3}}},
        {"name": [mark]},
    ):
        with pytest.raises(ValueError) as caught:
            parse(Outer, value, "it")
        assert str(caught.value).isprintable()


def test_text_of_others_becomes_one_short_line():
    assert one_line("märchen: 東京") == "märchen: 東京"
    assert one_line(ValueError("one\n\ttwo ")) == "one two"
    assert one_line("a\x1b[31m\ud800") == r"a\x1b[31m\ud800"
    assert len(one_line("\x1b" * 10**6)) == 200 and len(one_line("x" * 10**6, 40)) == 40


# ---- names


@pytest.mark.parametrize(
    "name", ["a", "7", "flags", "St.Mary_3-b", "x" * 64, "seeds", "a..", "-a", "_", "CON"]
)
def test_ordinary_names_pass(name):
    check_name(name)


WRONG = {
    "empty": "",
    "blank": " ",
    "a blank": "St. Mary",
    "the seed's": "seed",
    "the seed's in capitals": "SEED",
    "parent": "..",
    "this folder": ".",
    "hidden": ".a",
    "a path": "a/b",
    "a path upwards": "../a",
    "an absolute path": "/etc/passwd",
    "a path of Windows": "a\\b",
    "a drive": "C:",
    "home": "~",
    "a variable": "$HOME",
    "a pattern": "*",
    "a line break": "a\nb",
    "a line break at the end": "a\n",
    "no character": "a\0b",
    "an escape sequence": "\x1b[31ma",
    "a mark that turns the text around": "a\u202eb",
    "half a character": "\ud800",
    "a tab": "a\tb",
    "quotes": "a'b",
    "letters of other alphabets": "東京",
    "letters that look like others": "\u0430",
    "digits of other alphabets": "\u0661",
    "a ligature": "\ufb01",
    "65 letters": "x" * 65,
    "a number": 7,
    "nothing": None,
    "a list": ["a"],
    "bytes": b"a",
}


@pytest.mark.parametrize("what", WRONG)
def test_names_that_lead_elsewhere_or_cannot_be_shown_are_refused(what):
    with pytest.raises(ValueError, match="must be 1 to 64 letters") as caught:
        check_name(WRONG[what])
    assert str(caught.value).isprintable()


def test_the_message_about_a_long_name_is_short():
    with pytest.raises(ValueError) as caught:
        check_name("x" * 10**6)
    assert len(str(caught.value)) < 300


def test_names_that_differ_in_case_alone_are_one():
    check_names(["a", "b", "A.b"])
    check_names([])
    for first, second in (("a", "a"), ("a", "A"), ("Ward_B", "wARD_b")):
        with pytest.raises(ValueError, match=f"two clients are called '{first}' and '{second}'"):
            check_names(name for name in ("x", first, "y", second))
    with pytest.raises(ValueError, match="the client's name '../a'"):
        check_names(["a", "../a"])


# ---- JSON files


@pytest.fixture
def file(tmp_path):
    return tmp_path / "some.json"


def test_a_file_is_read_through_its_schema(file):
    file.write_text('{"name": "märchen", "inner": {"rank": 4}}', encoding="utf-8")
    assert read_json(Outer, file) == read_json(Outer, str(file)) == Outer("märchen", Inner(4))


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe{}", b"nothing", b"{} {}", b"\x80\x04K\x01.", b"1" * 5000],
    ids=["empty", "cut", "UTF-16", "text", "two", "pickle", "a number of 5000 digits"],
)
def test_what_is_no_json_is_a_value_error(content, file):
    file.write_bytes(content)
    with pytest.raises(ValueError, match="is no JSON .*Get it again") as caught:
        read_json(Outer, file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("depth", [DEEPEST + 1, 500, 100_000])
@pytest.mark.parametrize("left, right", ["[]", ('{"a":', "}")], ids=["lists", "objects"])
def test_what_is_nested_too_deeply_is_a_value_error(left, right, depth, file):
    "It would exhaust the stack of whoever copies or prints it."
    file.write_text(left * depth + "1" + right * depth)
    with pytest.raises(ValueError, match=f"nested deeper than {DEEPEST} brackets") as caught:
        read_json(dict, file)
    assert str(file) in str(caught.value)


def test_what_is_nested_less_is_not(file):
    value = 1
    for _ in range(DEEPEST):
        value = {"a": value}
    file.write_text(json.dumps(value))
    assert read_json(dict, file) == value
    file.write_text(json.dumps(dict(name="a", inner={"rank": 2})))
    assert read_json(Outer, file).inner.rank == 2


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '[{"b": {"a": 1, "c": 2, "a": 1}}]'])
def test_a_key_that_occurs_twice_has_no_value(text, trusted, file):
    file.write_text(text)
    with pytest.raises(ValueError, match="some.json is no JSON .the key 'a' occurs twice"):
        read_json(dict, file, trusted)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400", "9" * 400])
def test_numbers_that_are_none_are_refused_from_strangers(number, file):
    "This machine's own measurements may be NaN."
    file.write_text('{"a": [1, %s]}' % number)
    assert len(read_json(dict, file)["a"]) == 2
    with pytest.raises(
        ValueError, match=f"is no JSON .{number[:20]} is no finite number"
    ) as caught:
        read_json(dict, file, trusted=False)
    assert len(str(caught.value)) < 300


def test_numbers_are_read_alike_whoever_wrote_them(file):
    file.write_text("[0, -3, 12345678901234567890, 1.5, -0.0, 1e5, 2E-3, true]")
    one, two = (read_json(list, file, trusted) for trusted in (True, False))
    assert one == two and [type(x) for x in one] == [type(x) for x in two]


def test_a_file_of_strangers_has_a_size(file):
    file.write_text(f'{{"a": "{"x" * JSON_BYTES}"}}')
    assert len(read_json(dict, file)["a"]) == JSON_BYTES
    with pytest.raises(ValueError, match="some.json is larger than 1,048,576 bytes"):
        read_json(dict, file, trusted=False)


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_what_is_no_ordinary_file_is_not_opened(kind, file):
    "A pipe would hang for ever, and a device never end."
    if kind == "device":
        file.symlink_to("/dev/zero")
    else:
        (os.mkfifo if kind == "pipe" else os.mkdir)(file)
    for read in (lambda: read_json(dict, file), lambda: read_tensors(file)):
        with pytest.raises(ValueError, match="some.json is no ordinary file"):
            read()


def test_a_file_that_is_not_there_is_another_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_json(dict, tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError):
        read_tensors(tmp_path / "nowhere")


# ---- tensors


def safetensors(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype, shape, size):
    return {"a": dict(dtype=dtype, shape=shape, data_offsets=[0, size])}


def test_tensors_and_metadata_come_back(file):
    save_file(dict(a=torch.arange(3.0)), file, metadata=dict(form="mean"))
    tensors, metadata = read_tensors(file)
    assert metadata == dict(form="mean") and torch.equal(tensors["a"], torch.arange(3.0))
    save_file(dict(a=torch.zeros(1)), file)
    assert read_tensors(file)[1] == {}


NO_TENSORS = {
    "empty": b"",
    "text": b"nothing at all, really",
    "pickle": b"\x80\x04K\x01.",
    "cut": safetensors(entry("F32", [4], 16), b"x" * 12),
    "more than it says": safetensors(entry("F32", [4], 16), b"x" * 20),
    "header of 2^63 bytes": struct.pack("<Q", 2**63) + b"{}",
    "header that is no JSON": safetensors(b"nothing"),
    "more elements than there are numbers": safetensors(entry("F32", [2**62, 2**62], 4), b"xxxx"),
    "negative": safetensors(entry("F32", [-1], 4), b"xxxx"),
    "type that there is not": safetensors(entry("F31", [1], 4), b"xxxx"),
    "metadata that is no text": safetensors({"__metadata__": {"a": 1}}),
}


@pytest.mark.parametrize("what", NO_TENSORS)
def test_what_is_no_safetensors_file_is_a_value_error(what, file):
    file.write_bytes(NO_TENSORS[what])
    with pytest.raises(ValueError, match="is no safetensors file") as caught:
        read_tensors(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_numbers_are_finite_or_not(dtype):
    dtype = getattr(torch, dtype)
    assert all_finite(torch.ones(3, dtype=dtype)) and all_finite(torch.ones(0, dtype=dtype))
    for wrong in (torch.nan, torch.inf, -torch.inf):
        assert not all_finite(torch.tensor([1, wrong], dtype=dtype))


def test_numbers_that_float32_cannot_hold_count_as_infinite():
    assert all_finite(torch.tensor([3e38], dtype=torch.float64))
    assert not all_finite(torch.tensor([-1e39], dtype=torch.float64))


@pytest.mark.parametrize(
    "dtype", ["int64", "bool", "complex64", "float8_e4m3fn", "float4_e2m1fn_x2"]
)
def test_other_types_hold_no_such_numbers(dtype):
    "Not all of them can even be looked at."
    kind = getattr(torch, dtype)
    four_bits = dtype.startswith("float4")
    tensor = torch.ones(2, dtype=torch.uint8).view(kind) if four_bits else torch.ones(2).to(kind)
    assert not all_finite(tensor)
