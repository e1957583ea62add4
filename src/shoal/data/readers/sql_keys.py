"""The keys of a database's rows, read a page at a time in the order that the database gives.

One question gives all of them, so that they are of one moment; what is held besides the keys is a
page. Most drivers hand out an answer as it is fetched. psycopg would take all of it into memory
first, and is asked through a cursor on the server.

Cost: 8 bytes a key while they are whole numbers; an object each as soon as one is not.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.errors import UsageError

Keys: TypeAlias = list[Any] | NDArray[np.int64]

PAGE = 10_000
_ON_THE_SERVER = ("psycopg", "psycopg2")  # drivers whose cursors can stay there, by a name


def cursor_for_pages(connection: Any, driver: str) -> Any:
    """A cursor whose answer is fetched in pages, not as a whole."""
    if driver not in _ON_THE_SERVER:
        return connection.cursor()
    # Without a transaction a cursor outlives its query only with `withhold`.
    return connection.cursor("shoal_keys", withhold=bool(connection.autocommit))


def iterate_pages(cursor: Any) -> Iterator[list[Any]]:
    """The first column of an answer."""
    while rows := cursor.fetchmany(PAGE):
        names = [column[0] for column in cursor.description]
        yield [row_values(row, names)[0] for row in rows]


def row_values(row: Any, names: Sequence[str]) -> Sequence[Any]:
    """A row by place. Some connections are set to give dicts."""
    return [row[name] for name in names] if isinstance(row, Mapping) else row


def pack_keys(found: Iterable[list[Any]], column: str, origin: str) -> Keys:
    """Sorted keys as an array if all are whole numbers; refuses what is no key."""
    numbers: array[int] = array("q")
    others: list[Any] = []
    last = None
    for page in found:
        for key in page:
            if key is None or key == last:
                what = "a null" if key is None else f"{key!r} more than once"
                raise UsageError(
                    f"{origin} has {what} in the column {column}. Each row needs a key of its own."
                )
            last = key
        if not others and all(type(key) is int and -(2**63) <= key < 2**63 for key in page):
            numbers.extend(page)
        else:
            others = others or numbers.tolist()
            others.extend(page)
    return others or np.frombuffer(numbers, dtype=np.int64)
