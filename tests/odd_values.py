"""Values that no field of settings may hold, for every field that there is: made from the records
themselves, so that a new field is tried without a word."""

from dataclasses import fields, is_dataclass
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import torch

# neither a number nor a text in Python, whatever it means
ANYWHERE = {
    "list": [1],
    "tuple": (1,),
    "empty dict": {},
    "dict": {"a": 1},
    "set": {1},
    "bytes": b"\xff",
    "complex": 1j,
    "a class": int,
    "array": np.array([1, 2]),
    "tensor": torch.tensor([1, 2]),
    "not a number": float("nan"),
    "infinity": float("inf"),
    "minus infinity": -float("inf"),
    "400 digits": 10**400,
    "minus 400 digits": -(10**400),
}
NUMBERS = {"numpy int": np.int64(1), "numpy float": np.float64(1), "numpy bool": np.bool_(True)}
TEXTS = {"text": "many", "empty text": "", "text with a point": "1.x"}
BOOLS = {"True": True, "False": False}
# odd in Python, though typed they mean something
MEANT = {"digits": "1", "number as text": "0.5"}
WHOLE = {"half": 0.5, "a bit more": 2.0000001}
# what may be typed in a notebook's parameter, for any field
TYPED = ("many", "nan", "Infinity", "-1e999", "[1]", "[[[]]]", "{}", "9" * 400, "1;2", "", "0x10")


def annotations(schema: type, stage: str = "") -> dict[str, tuple[type, str, Any]]:
    "Dotted name of a field -> the record it belongs to, its name there, its annotation."
    found = {}
    for name, hint in get_type_hints(schema, include_extras=True).items():
        found[f"{stage}{name}"] = schema, name, hint
        if is_dataclass(hint):
            found |= annotations(hint, f"{stage}{name}.")
    assert {name for owner, name, _ in found.values() if owner is schema} >= {
        f.name for f in fields(schema)
    }
    return found


def odd_values(hint: Any) -> dict[str, Any]:
    "What a value is -> the value, for values that a field with this annotation may not hold."
    span = None
    if get_origin(hint) is Annotated:
        hint, span = get_args(hint)
    choices = get_origin(hint) is Literal
    kinds = (
        {type(choice) for choice in get_args(hint)} if choices else set(get_args(hint) or [hint])
    )
    found = ANYWHERE | NUMBERS
    if NoneType not in kinds:
        found |= {"None": None}
    if bool not in kinds:
        found |= BOOLS
    if str not in kinds or choices:
        found |= TEXTS
    if not kinds & {int, float}:
        found |= {"7": 7, "2.5": 2.5}
    elif float not in kinds:
        found |= WHOLE
    if span is not None:
        found |= {"too small": span.lowest - 1, "too large": span.highest * 2}
        if span.without is not None:
            found |= {"bound": span.without}
    return found


def is_numeric(hint: Any) -> bool:
    "Whether a field may hold a number."
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    return bool({int, float} & set(get_args(kind) or [kind]))
