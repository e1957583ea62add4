"""What all readers share: records by index, many at once, and the two ways in which reading fails.

A reader gives records: text, bytes, dicts or arrays, as they lie in a file or on a server;
`shoal.data.mapped(source, function)` makes pairs for training of them. A reader that asks a server
or decodes blocks also has `many(ids)`, which costs one question instead of one for each record.

One record that cannot be read is a `BadRecord`: the run stops, or leaves that sample out, as its
policy says. A source that is no longer what it was (a file changed, a server gone) is `SourceLost`:
no sample is to blame, and leaving one out would not help.
"""

from collections.abc import Sequence
from operator import index as as_int
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import xxhash
from numpy.typing import NDArray

from shoal.data.sources import Ids, Source, is_sample_error, normalize_index
from shoal.errors import RecipeError, ShoalError, UsageError, nearest

Indices: TypeAlias = Ids | Sequence[int]


class BadRecord(RecipeError):
    """One record cannot be read; the message names its source and place."""


class SourceLost(ShoalError):
    """A source cannot be read any more, or is not the one that was opened."""

    shows_cause = False


@runtime_checkable
class BulkSource(Source, Protocol):
    """A source that gives many records in one call, in the order of `ids`, not collated."""

    def many(self, ids: Ids, /) -> list[Any]: ...


def load_many(source: Source, ids: Indices) -> list[Any] | None:
    """Records in one call; None if the source has none for that, or one of them fails.

    Asked for one by one, the one that fails is known. A source that is lost is not asked again.
    """
    if not isinstance(source, BulkSource):
        return None
    try:
        return source.many(np.asarray(ids, dtype=np.int64))
    except RecipeError:
        return None
    except BaseException as error:
        if not is_sample_error(error):
            raise
        return None


def normalize_indices(ids: Indices, length: int) -> Ids:
    """What `normalize_index` gives, for many."""
    if not isinstance(ids, np.ndarray):
        ids = np.array([as_int(index) for index in ids], dtype=np.int64)
    outside = (ids < -length) | (ids >= length)
    if outside.any():
        raise IndexError(f"sample {ids[outside][0]} of {length}")
    return np.where(ids < 0, ids + length, ids)


def require_columns(wanted: Sequence[str], known: Sequence[str], origin: str) -> None:
    """Refuse a column that is not there, with the nearest that is."""
    for name in wanted:
        if name not in known:
            raise UsageError(f"{origin} has no column {name!r}. {nearest(name, known)}")


def refuse_same_columns(names: Sequence[str], origin: str) -> None:
    """Columns are known by name."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"{origin} has two columns {twice[0]!r}. Give each a name of its own.")


def hash_parts(*parts: object) -> str:
    """A short name for data that these parts tell from any other."""
    content = xxhash.xxh3_128()
    for part in parts:
        content.update(repr(part).encode("utf-8", "surrogateescape") + b"\0")
    return content.hexdigest()


class NameTable:
    """Many short texts in one piece of memory, which forks share; by index."""

    def __init__(self, names: Sequence[str]):
        encoded = [name.encode("utf-8", "surrogateescape") for name in names]
        self._content = b"".join(encoded)
        self._ends: NDArray[np.int64] = np.cumsum([0, *map(len, encoded)], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> str:
        at = normalize_index(index, len(self), "name")
        content = self._content[self._ends[at] : self._ends[at + 1]]
        return content.decode("utf-8", "surrogateescape")
