"""Schemas: what a sample must be like.

A schema is a msgspec Struct type, or a dict from field to what its value must be:

    {"age": int, "height": (0.5, 2.5), "kind": {"cat", "dog"}, "pixels": [np.uint8, (0, 200)]}

a type or annotation (`int | None`), a range of two numbers (None leaves a side open, and NaN lies
in no range), a set of allowed values, a numpy or torch dtype of an array, or a list of these, all
of which must hold. A range holds for an array if it does for each element. Fields that the schema
does not name are not looked at; those that it names must be there.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import msgspec
import numpy as np
import torch
from torch import Tensor

from shoal.data.transforms.fields import Field, field
from shoal.errors import RecipeError, UsageError

Schema: TypeAlias = type[msgspec.Struct] | Mapping[str, Any]
Validator: TypeAlias = Callable[[Any], str | None]
"""What is wrong with a value, in a few words; None if nothing is."""


def compile_schema(schema: Schema) -> Validator:
    """A function that says what is wrong with a sample."""
    if isinstance(schema, type) and issubclass(schema, msgspec.Struct):
        return _as_type(schema)
    if not isinstance(schema, Mapping) or not schema:
        raise UsageError(
            f"{schema!r} is no schema. Give a msgspec Struct type, or a dict from fields to types, "
            "ranges or sets of values."
        )
    rules = [(field(name), _rule(name, rule)) for name, rule in schema.items()]

    def complain(sample: Any) -> str | None:
        for place, rule in rules:
            wrong = _wrong_with(sample, place, rule)
            if wrong is not None:
                return wrong
        return None

    return complain


def _wrong_with(sample: Any, place: Field, rule: Validator) -> str | None:
    try:
        value = place.get(sample)
    except RecipeError as error:
        return str(error)
    wrong = rule(value)
    return None if wrong is None else f"{place.name} {wrong}"


def _rule(name: str, rule: Any) -> Validator:
    if isinstance(rule, list) and rule:
        return _all([_rule(name, part) for part in rule])
    if isinstance(rule, set | frozenset) and rule:
        return _one_of(frozenset(rule))
    if isinstance(rule, np.dtype | torch.dtype):
        return _of_dtype(rule)
    if isinstance(rule, type) and issubclass(rule, np.generic):
        return _of_dtype(np.dtype(rule))
    if isinstance(rule, tuple):
        if len(rule) == 2 and all(part is None or _is_number(part) for part in rule):
            return _within(*rule)
    elif rule is np.ndarray or rule is Tensor:
        return _instance(rule)
    elif not isinstance(rule, list | set | frozenset | Mapping | str | int | float):
        try:
            return _as_type(rule)
        except TypeError:
            pass
    raise UsageError(
        f"the schema's rule {rule!r} for {name!r} is not known. It must be a type, a range (low, "
        "high), a set of values, a dtype, or a list of these."
    )


def _as_type(kind: Any) -> Validator:
    if kind is not Any:
        msgspec.json.schema(kind)  # raises TypeError for what is no type

    def complain(value: Any) -> str | None:
        try:
            msgspec.convert(_plain(value), kind)
        except msgspec.ValidationError as error:
            return f"does not fit: {error}"
        return None

    return complain


def _instance(kind: type) -> Validator:
    return lambda value: (
        None if isinstance(value, kind) else f"is a {type(value).__name__}, not a {kind.__name__}"
    )


def _of_dtype(kind: np.dtype[Any] | torch.dtype) -> Validator:
    def complain(value: Any) -> str | None:
        found = getattr(value, "dtype", type(value).__name__)
        return None if found == kind else f"is of {found}, not {kind}"

    return complain


def _one_of(allowed: frozenset[Any]) -> Validator:
    def complain(value: Any) -> str | None:
        value = _plain(value)
        try:
            is_known = value in allowed
        except TypeError:
            return f"is a {type(value).__name__}, not one of {len(allowed)} values"
        return (
            None
            if is_known
            else f"is {_short(value)}, not one of {_short(sorted(map(repr, allowed)))}"
        )

    return complain


def _within(low: float | None, high: float | None) -> Validator:
    if low is not None and high is not None and not low <= high:
        raise UsageError(f"the range ({low}, {high}) holds no number: it ends before it begins.")
    shown = f"from {'-inf' if low is None else low} to {'inf' if high is None else high}"

    def complain(value: Any) -> str | None:
        try:
            numbers = np.asarray(_array(value))
            above = numbers >= (-np.inf if low is None else low)
            good = above & (numbers <= (np.inf if high is None else high))
        except (TypeError, ValueError):
            return f"is a {type(value).__name__}, which is not {shown}"
        if good.all():
            return None
        return f"is {_short(numbers[~good].flat[0].item())}, which is not {shown}"

    return complain


def _all(rules: list[Validator]) -> Validator:
    def complain(value: Any) -> str | None:
        found = (rule(value) for rule in rules)
        return next((wrong for wrong in found if wrong is not None), None)

    return complain


def _plain(value: Any) -> Any:
    """Numbers of numpy and torch as Python's own, in records too: types are about what they are."""
    if isinstance(value, np.generic) or (isinstance(value, Tensor) and value.dim() == 0):
        return value.item()
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    return value


def _array(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.detach()
        return value.float().numpy() if value.dtype == torch.bfloat16 else value.numpy()
    if value is None or isinstance(value, str | bytes | bool):
        raise TypeError(value)
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:76] + " ..."
