"""Fields: the parts of a sample, by name.

`"age"` is a column of a record; `"inputs"` and `"target"` are the two parts of a pair; a number is
a place in a tuple or list; dots go deeper, as in `"inputs.pixels"` or `"inputs.0"`. A key with dots
in it is found first as it stands. `put` makes a new sample and leaves the old one alone.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from shoal.errors import RecipeError, UsageError, nearest

_PAIR = {"inputs": 0, "target": 1}


class Field(NamedTuple):
    """A field; made by `field`."""

    name: str

    def get(self, sample: Any) -> Any:
        """The field's value; a RecipeError if the sample has no such field."""
        return _get(sample, self.name, self.name)

    def put(self, sample: Any, value: Any) -> Any:
        """The sample with another value in this field."""
        return _put(sample, self.name, self.name, value)


def field(name: str) -> Field:
    """The field of this name."""
    if not isinstance(name, str) or not all(name.split(".")):
        raise UsageError(
            f"{name!r} names no field. A field is a column, inputs, target or a number, and dots "
            'go deeper: "inputs.pixels".'
        )
    return Field(name)


def _get(value: Any, name: str, whole: str) -> Any:
    if isinstance(value, Mapping) and name in value:
        return value[name]
    first, _, rest = name.partition(".")
    part = value[_key(value, first, whole)]
    return _get(part, rest, whole) if rest else part


def _put(value: Any, name: str, whole: str, new: Any) -> Any:
    if isinstance(value, Mapping) and name in value:
        return {**value, name: new}
    first, _, rest = name.partition(".")
    key = _key(value, first, whole)
    if rest:
        new = _put(value[key], rest, whole, new)
    if isinstance(value, Mapping):
        return {**value, key: new}
    parts = [*value[:key], new, *value[key + 1 :]]
    if isinstance(value, list):
        return parts
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)


def _key(value: Any, name: str, whole: str) -> Any:
    """What `value` is indexed with to get its part `name`."""
    if isinstance(value, Mapping):
        if name in value:
            return name
        raise RecipeError(f"there is no field {whole!r}. {nearest(name, map(str, value))}")
    if isinstance(value, tuple | list):
        place = _PAIR.get(name, -1) if len(value) == 2 else -1
        if name.isdecimal():
            place = int(name)
        if 0 <= place < len(value):
            return place
        raise RecipeError(
            f"there is no field {whole!r}: {name!r} is no place in a {type(value).__name__} of "
            f"{len(value)}"
        )
    raise RecipeError(
        f"there is no field {whole!r}: a {type(value).__name__} stands where it would begin"
    )
