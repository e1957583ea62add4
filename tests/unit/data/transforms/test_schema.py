"""Schemas say what is wrong with a sample, and refuse rules that they do not know."""

import re
from typing import Annotated, Any

import msgspec
import numpy as np
import pytest
import torch

from shoal.data.transforms.schema import compile_schema
from shoal.errors import UsageError


class Person(msgspec.Struct):
    name: str
    age: Annotated[int, msgspec.Meta(ge=0, le=130)]
    height: float | None = None


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ({"name": "a", "age": 3}, None),
        ({"name": "a", "age": np.int64(3), "height": torch.tensor(1.5), "more": 1}, None),
        ({"name": "a", "age": 131}, r"<= 130.*\$.age"),
        ({"name": "a"}, "missing required field `age`"),
        ({"name": 3, "age": 3}, r"Expected `str`, got `int`"),
        ([1, 2], "Expected `object`"),
    ],
)
def test_a_struct(sample: Any, words: str | None) -> None:
    check(compile_schema(Person)(sample), words)


@pytest.mark.parametrize(
    ("rule", "value", "words"),
    [
        (int, 3, None),
        (int, np.int32(3), None),
        (int, True, "x does not fit: Expected `int`, got `bool`"),
        (int, 3.5, "Expected `int`"),
        (float, 3, None),
        (int | None, None, None),
        (list[int], [1, 2], None),
        (list[int], [1, "2"], "Expected `int`"),
        ((0, 10), 10, None),
        ((0, 10), 10.5, "x is 10.5, which is not from 0 to 10"),
        ((0, 10), float("nan"), "nan, which is not"),
        ((None, 10), -1e9, None),
        ((0, None), float("inf"), None),
        ((0, None), -1, "from 0 to inf"),
        ((0, 10), None, "a NoneType, which is not from 0"),
        ((0, 10), "5", "a str, which is not"),
        ((0, 10), np.array([1, 11, 12]), "x is 11, which"),
        ((0, 10), torch.tensor([1.0, 2.0], dtype=torch.bfloat16), None),
        ((0, 10), np.zeros(0), None),
        ({"cat", "dog"}, "cat", None),
        ({"cat", "dog"}, "cow", "x is 'cow', not one of"),
        ({1, 2}, torch.tensor(2), None),
        ({1, 2}, [1], "a list, not one of 2 values"),
        (np.uint8, np.zeros(3, np.uint8), None),
        (np.dtype("f4"), np.zeros(3), "is of float64, not float32"),
        (torch.float32, torch.zeros(2), None),
        (torch.float32, 1.0, "is of float, not"),
        (np.ndarray, [1], "is a list, not a ndarray"),
        ([int, (0, 5)], 3, None),
        ([int, (0, 5)], 7, "x is 7"),
        ([int, (0, 5)], "7", "Expected `int`"),
    ],
)
def test_a_rule(rule: Any, value: Any, words: str | None) -> None:
    check(compile_schema({"x": rule})({"x": value}), words)


def test_fields_of_pairs_and_missing_ones() -> None:
    complain = compile_schema({"inputs.age": (0, 9), "target": {0, 1}})
    assert complain(({"age": 3}, 1)) is None
    check(complain(({"age": 3}, 2)), "target is 2")
    check(complain(({"agee": 3}, 1)), "no field 'inputs.age'.*'agee'")


@pytest.mark.parametrize(
    "schema", [{}, 5, "int", int, {"x": (1, 2, 3)}, {"x": []}, {"x": set()}, {"x": "int"}, {"x": 3}]
)
def test_what_is_no_schema_is_refused(schema: Any) -> None:
    with pytest.raises(UsageError, match=r"is no schema|is not known"):
        compile_schema(schema)
    with pytest.raises(UsageError, match="ends before it begins"):
        compile_schema({"x": (2, 1)})


def check(found: str | None, words: str | None) -> None:
    if words is None:
        assert found is None
    else:
        assert found is not None
        assert re.search(words, found), found
