"""Cache keys: the source's content and the code that made a sample.

A key must change when a sample would, or an old sample is given for a new one. So it is made from
the name of the content, by the source (`transforms/fingerprint.py`) or the user (`key=`), and from
all that takes part in making a sample: the class of each source and of those it wraps, and their
public attributes (an image size, a mode, the function of a map, statistics, a table). Paths do not
count, so that hosts which keep the data in different places share its samples.

Code counts with all it refers to where that is known, else by itself; then a version in `key` makes
the cache notice a change. Cost: milliseconds, once; and a pass over data in memory that has no key,
and over tensors and arrays that a source of the user's own holds.
"""

import dataclasses
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
from torch import Tensor

from shoal.data.sources import Source, TensorSource, WindowSource
from shoal.data.transforms.fingerprint import NoIdentity, digest, identity_of
from shoal.errors import ShoalError, UsageError

_FORM = "shoal cache 1"  # changes when samples are packed or sealed in another way
_OF_PATHS = ("/", "./", "../", "~")  # how a text begins that says where, not what
_IN_MEMORY = (TensorSource, WindowSource)  # their attributes are the data, which has its name
# What is wrapped is looked at by itself; the others say how samples are asked for, not what they
# are, and are bound to sources.
_NO_SETTINGS = {"source", "sources", "order", "record", "take", "many", "vary"}


def name_samples(source: Any, key: str | None) -> str:
    """A text that is the same for the same samples, and for no others."""
    if key is None:
        try:
            content = identity_of(source)
        except NoIdentity as error:
            raise UsageError(
                f"cached() cannot tell what it keeps: {error} Or name the data, "
                "cached(source, key='photos-3'), and change the name when the data changes."
            ) from None
    elif isinstance(key, str) and key:
        content = f"key {key}"
    else:
        raise UsageError(
            f"cached(key={key!r}): the key is a text that names the data, such as 'photos-3'."
        )
    return "|".join((_FORM, content, digest(list(_on_the_way(source)))))


def _on_the_way(source: Any) -> Iterator[str]:
    """What the samples of a source are made by, from the outside to the inside."""
    kind = type(source)
    yield f"{kind.__module__}.{kind.__qualname__}"
    yield _code(kind)
    if not isinstance(source, _IN_MEMORY):
        for name, value in sorted(_settings(source)):
            yield f"{name} {digest(_shown(value))}"
    for inner in (getattr(source, "source", None), *(getattr(source, "sources", None) or ())):
        if inner is not None:
            yield from _on_the_way(inner)


def _settings(source: Any) -> Iterator[tuple[str, Any]]:
    """The public attributes that may change a sample, by name."""
    names = set(getattr(source, "__dict__", ()))
    if dataclasses.is_dataclass(source):
        names |= {field.name for field in dataclasses.fields(source)}
    for name in names - _NO_SETTINGS:
        if not name.startswith("_"):
            value = getattr(source, name, None)
            if getattr(value, "__self__", None) is not source:  # a method of its own: its class has
                yield name, value


def _shown(value: Any) -> Any:
    """A setting as values that have a hash: without paths, and what has no hash by its code."""
    if isinstance(value, str):
        return "a path" if value.startswith(_OF_PATHS) or "://" in value else value
    if isinstance(value, msgspec.Struct):
        return [type(value).__qualname__, _shown(msgspec.structs.asdict(value))]
    if isinstance(value, Mapping):
        return [(_shown(name), _shown(part)) for name, part in value.items()]
    if isinstance(value, list | tuple):
        return [type(value).__qualname__, *map(_shown, value)]
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Source) and not isinstance(value, Tensor | np.ndarray | bytes | range):
        return list(_on_the_way(value))  # one that is wrapped under another name
    return _code(value)


def _code(value: Any) -> str:
    """A hash of a value, class or function with all that it refers to, else of its own code."""
    try:
        return digest(value)
    except (ShoalError, AttributeError, NameError, TypeError):  # the last ones from annotations
        return digest(list(_bare(value)))


def _bare(value: Any) -> Iterator[Any]:
    """The code of a function, or of all functions of a class and of its bases."""
    if isinstance(value, functools.partial):
        yield from _bare(value.func)
        yield from (_shown(value.args), _shown(value.keywords))
    elif isinstance(value, type):
        yield value.__qualname__
        for kind in value.__mro__:
            for name, part in sorted(vars(kind).items()):
                if isinstance(part, types.FunctionType):
                    yield name
                    yield from _bare(part.__code__)
    elif isinstance(value, types.CodeType):
        yield from (value.co_code.hex(), list(value.co_names))
        for constant in value.co_consts:
            if isinstance(constant, types.CodeType):
                yield from _bare(constant)
            else:
                yield constant
    else:
        yield from _bare(getattr(value, "__code__", type(value)))
