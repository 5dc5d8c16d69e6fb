"""What others wrote: what is read is what a schema allows, and every defect is a ValueError that
says where."""

import json
import struct
from dataclasses import dataclass, field

import pytest
import torch
from safetensors.torch import save_file

from harmomoe.base.schema import DEEPEST, STRICT, all_finite, parse, read_json, read_tensors


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
        ({"name": "a", "inner": {"rank": 0}}, "it: rank is 0, but must be positive."),
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
        ({"name": "a", "parts": [{}, {"rank": -1}]}, "it: rank is -1, but must be positive."),
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
