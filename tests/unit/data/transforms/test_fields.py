"""Fields are found by name in records, pairs, tuples and what they hold."""

from collections import namedtuple
from typing import Any

import pytest

from shoal.data.transforms.fields import field
from shoal.errors import RecipeError, UsageError

Row = namedtuple("Row", "a b c")


@pytest.mark.parametrize(
    ("name", "sample", "value", "changed"),
    [
        ("age", {"age": 3, "b": 1}, 3, {"age": 0, "b": 1}),
        ("a.b", {"a.b": 3, "a": {"b": 4}}, 3, {"a.b": 0, "a": {"b": 4}}),
        ("a.b", {"a": {"b": 4}}, 4, {"a": {"b": 0}}),
        ("inputs", (1, 2), 1, (0, 2)),
        ("target", [1, 2], 2, [1, 0]),
        ("target.1", (1, (2, 3, 4)), 3, (1, (2, 0, 4))),
        ("2", Row(1, 2, 3), 3, Row(1, 2, 0)),
        ("inputs", {"inputs": 5}, 5, {"inputs": 0}),
    ],
)
def test_a_field_is_got_and_put(name: str, sample: Any, value: Any, changed: Any) -> None:
    found = field(name)
    assert found.get(sample) == value
    new = found.put(sample, 0)
    assert new == changed and type(new) is type(sample)


@pytest.mark.parametrize(
    ("name", "sample"),
    [
        ("agee", {"age": 3}),
        ("inputs", (1, 2, 3)),
        ("3", (1, 2, 3)),
        ("-1", (1, 2)),
        ("inputs.x", (1, 2)),
        ("x", 5),
    ],
)
def test_a_field_that_is_not_there_is_named(name: str, sample: Any) -> None:
    with pytest.raises(RecipeError, match=f"no field '{name}'"):
        field(name).get(sample)
    with pytest.raises(RecipeError, match=f"no field '{name}'"):
        field(name).put(sample, 0)


@pytest.mark.parametrize("name", ["", ".", "a.", ".a", "a..b"])
def test_names_without_a_field_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="names no field"):
        field(name)
