"""What a cached sample is a sample of: the source's content and the code that made it.

A key must change when a sample would, or an old sample is given for a new one. So it is made from
the name of the content, which the source tells (`transforms/fingerprint.py`) or the user (`key=`),
and from what is on the way to a sample: the class of each source and of those it wraps, functions
they hold, and the numbers and words among their public attributes (an image size, a mode). Paths
do not count, so that hosts which keep the data in different places share its samples.

Code counts with all it refers to if that can be told, else by itself; then a version in `key` is
the way to tell the cache of a change. Cost: milliseconds, once; and a pass over data in memory
that has no key.
"""

import dataclasses
import types
from collections.abc import Iterator
from typing import Any

from shoal.data.transforms.fingerprint import NoIdentity, digest, identity_of
from shoal.errors import UsageError

_FORM = "shoal cache 1"  # changes when samples are packed or sealed in another way


def name_content(source: Any, key: str | None) -> str:
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
    for name, value in sorted(_public(source)):
        if isinstance(value, types.FunctionType | types.MethodType):
            yield f"{name} {_code(value)}"
        elif _is_plain(value):
            yield f"{name} {value!r}"
    for inner in (getattr(source, "source", None), *(getattr(source, "sources", None) or ())):
        if inner is not None:
            yield from _on_the_way(inner)


def _code(value: Any) -> str:
    """A hash of a class or function with all that it refers to, else of its own code."""
    try:
        return digest(value)
    except (NoIdentity, AttributeError, NameError, TypeError):  # the last ones from annotations
        return digest(list(_bare(value)))


def _bare(value: Any) -> Iterator[Any]:
    """The code of a function, or of all functions of a class and of its bases."""
    if isinstance(value, type):
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
        yield from _bare(value.__code__)


def _public(source: Any) -> Iterator[tuple[str, Any]]:
    names = set(getattr(source, "__dict__", ()))
    if dataclasses.is_dataclass(source):
        names |= {field.name for field in dataclasses.fields(source)}
    for name in names:
        if not name.startswith("_"):
            yield name, getattr(source, name, None)


def _is_plain(value: Any) -> bool:
    """A number or word, or a few of them; no path."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    if isinstance(value, str):
        return "/" not in value
    return isinstance(value, bool | int | float | None)
