"""Rows that a server knows by a key: keys are read once and are the order, rows by their keys.

What `sql`, `mongodb` and `cassandra` share. The keys come a page at a time, in the order that the
server gives, and are checked: none is null and none repeats. Rows that are added later are not
seen. One that is gone, or whose key two rows have by now, is a `BadRecord` with its key. A reader
that was given a `version` (a column that changes with its row: a time, a counter, a hash) keeps a
hash of each and compares it with every read, so a row that changed under a run is a `BadRecord`
too. Without one such a change is not noticed: read from a table that stays.

Cost: 8 bytes a key while they are whole numbers, an object each as soon as one is not; 8 bytes a
version. `pairs` makes tensors of numbers and lists of numbers, and names what is none.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from shoal.data.readers.columns import ColumnSource
from shoal.data.readers.records import BadRecord, Indices, hash_parts, normalize_indices
from shoal.data.sample_digest import NUM_SAMPLES, digest_sample, spread_indices
from shoal.data.sources import Ids
from shoal.errors import UsageError

Keys: TypeAlias = list[Any] | NDArray[np.int64]

PAGE = 10_000
MOST_KEYS = 500  # in one question; some databases allow 999


class FoundRow(NamedTuple):
    """A row as the server gives it; `version` is None where none is compared."""

    key: Any
    values: dict[str, Any]
    version: Any = None


class RowIndex(NamedTuple):
    """The keys of all rows in their order, and hashes of their versions, if these are compared."""

    keys: Keys
    versions: NDArray[np.uint64] | None = None


class KeyedRows(ColumnSource):
    """Rows by index. A reader gives its index, `_fetch`, and a text that names it."""

    _key: str
    _rows: RowIndex

    def __len__(self) -> int:
        return len(self._rows.keys)

    def _fetch(self, keys: list[Any]) -> Iterable[FoundRow]:
        """The rows with these keys, at most `MOST_KEYS`, in any order."""
        raise NotImplementedError

    def many(self, ids: Indices) -> list[dict[str, Any]]:
        """Many rows, some hundred a question."""
        wanted = normalize_indices(ids, len(self)).tolist()
        keys = list(dict.fromkeys(map(self._key_of, wanted)))
        found: dict[Any, list[FoundRow]] = {key: [] for key in keys}
        for start in range(0, len(keys), MOST_KEYS):
            for row in self._fetch(keys[start : start + MOST_KEYS]):
                found.setdefault(row.key, []).append(row)
        return [dict(self._checked(at, found[self._key_of(at)]).values) for at in wanted]

    def arrays(self, ids: Ids, names: Sequence[str]) -> dict[str, NDArray[Any]]:
        rows = self.many(ids)
        return {name: self._column(ids, [row.get(name) for row in rows], name) for name in names}

    def content_name(self) -> str:
        """The same wherever the rows lie: of the question, all keys, and some rows."""
        keys, versions = self._rows
        content = keys.tobytes() if isinstance(keys, np.ndarray) else repr(keys).encode()
        content += b"" if versions is None else versions.tobytes()
        rows = self.many(spread_indices(len(self), NUM_SAMPLES))
        hashed = xxhash.xxh3_64_hexdigest(content)
        return hash_parts(self._question(), hashed, *map(digest_sample, rows))

    def _question(self) -> str:
        """What is asked, where that is more than a table's name."""
        return ""

    def _key_of(self, at: int) -> Any:
        key = self._rows.keys[at]
        return int(key) if isinstance(key, np.int64) else key

    def bad(self, at: int, what: str) -> BadRecord:
        """The error of a row, with its key and its place."""
        return BadRecord(
            f"the row of {self} with {self._key} = {self._key_of(at)!r} (sample {at}) {what}"
        )

    def _checked(self, at: int, found: list[FoundRow]) -> FoundRow:
        if not found:
            raise self.bad(at, "is gone. It was there when the run began.")
        if len(found) > 1:
            raise self.bad(
                at, f"is there {len(found)} times by now. Each row needs a key of its own."
            )
        versions = self._rows.versions
        if versions is not None and hash_version(found[0].version) != versions[at]:
            raise self.bad(
                at,
                f"was changed after the run began: its version is {found[0].version!r} now. Train "
                "on a table that stays, or leave such rows out by shoal.data.quarantine.",
            )
        return found[0]

    def _column(self, ids: Ids, values: list[Any], name: str) -> NDArray[Any]:
        arrays: list[NDArray[Any]] = []
        for at, value in zip(ids.tolist(), values, strict=True):
            made = _numbers(value)
            if made is None:
                raise self.bad(
                    at,
                    f"has {_described(value)} in {name!r}, which no tensor can hold. Make numbers "
                    "of it by a function of your own: shoal.data.mapped(rows, function).",
                )
            first = arrays[0] if arrays else made
            if (made.dtype, made.shape) != (first.dtype, first.shape):
                raise self.bad(
                    at,
                    f"holds {made.dtype} {list(made.shape)} in {name!r}, and sample {ids[0]} "
                    f"{first.dtype} {list(first.shape)}. Rows must be alike; map them by a "
                    "function that makes them so.",
                )
            arrays.append(made)
        return np.stack(arrays)


def index_rows(
    pages: Iterable[list[tuple[Any, Any]]], column: str, origin: str, versioned: bool = False
) -> RowIndex:
    """Keys and versions in the order that they come; refuses what is no key."""
    numbers: array[int] = array("q")
    others: list[Any] = []
    versions: array[int] = array("Q")
    last = None
    for page in pages:
        for key, version in page:
            if key is None or key == last:
                what = "a null" if key is None else f"{key!r} more than once"
                raise UsageError(
                    f"{origin} has {what} in the column {column}. Each row needs a key of its own."
                )
            last = key
            if versioned:
                versions.append(hash_version(version))
        keys = [key for key, _ in page]
        if not others and all(type(key) is int and -(2**63) <= key < 2**63 for key in keys):
            numbers.extend(keys)
        else:
            others = others or numbers.tolist()
            others.extend(_hashable(key, column, origin) for key in keys)
    return RowIndex(
        others or np.frombuffer(numbers, dtype=np.int64),
        np.frombuffer(versions, dtype=np.uint64) if versioned else None,
    )


def _hashable(key: Any, column: str, origin: str) -> Any:
    try:
        hash(key)
    except TypeError:
        raise UsageError(
            f"{origin} has {key!r} in the column {column}, and a key is one value. Choose another, "
            "or make one by a query or a pipeline."
        ) from None
    return key


def hash_version(version: Any) -> int:
    return xxhash.xxh3_64_intdigest(repr(version).encode())


def _numbers(value: Any) -> NDArray[Any] | None:
    """A number, or lists of numbers of one length, as an array; None for anything else."""
    try:
        made = np.asarray(value)
    except (ValueError, TypeError, OverflowError):  # lists of several lengths
        return None
    return made if made.dtype.kind in "biuf" else None


def _described(value: Any) -> str:
    if value is None:
        return "a null, or nothing,"
    said = repr(value)
    return f"a {type(value).__name__} ({said[:40]}{'...' if len(said) > 40 else ''})"
