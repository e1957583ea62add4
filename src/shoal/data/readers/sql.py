"""Rows of a database through any DB-API driver: keys are read once, rows by their keys.

    sql(lambda: sqlite3.connect("data.db"), "samples", key="id")
    sql(lambda: psycopg.connect(...), query="SELECT id, text FROM a JOIN b USING (id)", key="id")

You say how to connect; each process opens a connection of its own when it first reads. The keys
are read once, sorted by the database, and are the order of the samples; a batch is one question for
some hundred keys. So rows that are added later are not seen, and one that was removed is a
`BadRecord`. A row that is changed meanwhile is not noticed: read from a table that stays.

Cost: a key a row in memory, 8 bytes if they are numbers. A question is answered within `timeout_s`
or counts as failed; `patience` says how often it is repeated. Next: `sessions.py`.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from shoal.checkpoint.remote import PATIENCE, Patience
from shoal.data.readers.records import (
    BadRecord,
    SourceLost,
    position,
    positions,
    require_columns,
)
from shoal.data.readers.sessions import Connect, Database, module_of
from shoal.data.sources import Ids
from shoal.errors import UsageError

_PLAIN = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*", re.ASCII)
_MOST_KEYS = 500  # in one question; some databases allow 999
_MARKS = {"qmark": "?", "format": "%s", "pyformat": "%s", "numeric": ":{number}"}


class SqlRows:
    """Made by `sql`: each row a dict. `columns` are those that rows have."""

    def __init__(self, database: Database, origin: str, key: str, columns: Sequence[str] | None):
        self._database, self._origin, self._key = database, origin, key
        self._style, known = self._first("1 = 0")
        require_columns([key, *(columns or ())], known, str(self))
        twice = sorted({name for name in known if known.count(name) > 1})
        if twice:
            raise UsageError(f"{self} has two columns {twice[0]!r}. Give each a name of its own.")
        self.columns = tuple(known if columns is None else columns)
        self._wanted = "*" if columns is None else ", ".join(dict.fromkeys([key, *columns]))
        self._keys = _packed(self._read_keys(), self)

    def __len__(self) -> int:
        return len(self._keys)

    def __str__(self) -> str:
        return f"the table {self._origin}" if _PLAIN.fullmatch(self._origin) else "the query"

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.many(np.array([position(index, len(self))], dtype=np.int64))[0]

    def many(self, ids: Ids) -> list[dict[str, Any]]:
        """Many rows, some hundred a question."""
        wanted = [int(at) for at in positions(ids, len(self))]
        rows: dict[Any, dict[str, Any]] = {}
        keys = list(dict.fromkeys(self._key_of(at) for at in wanted))
        for start in range(0, len(keys), _MOST_KEYS):
            rows |= self._fetch(keys[start : start + _MOST_KEYS])
        for at in wanted:
            if self._key_of(at) not in rows:
                raise BadRecord(
                    f"the row of {self} with {self._key} = {self._key_of(at)!r} (sample {at}) is "
                    "gone. It was there when the run began."
                )
        return [dict(rows[self._key_of(at)]) for at in wanted]

    def _key_of(self, at: int) -> Any:
        key = self._keys[at]
        return int(key) if isinstance(key, np.int64) else key

    def _fetch(self, keys: list[Any]) -> dict[Any, dict[str, Any]]:
        marks = [_MARKS[self._style].format(number=number + 1) for number in range(len(keys))]
        origin = self._origin
        if self._style in ("format", "pyformat"):
            origin = origin.replace("%", "%%")  # or it would be taken for a mark
        text = f"SELECT {self._wanted} FROM {origin} WHERE {self._key} IN ({', '.join(marks)})"

        def question(connection: Any) -> tuple[list[str], list[Any]]:
            cursor = connection.cursor()
            cursor.execute(text, keys)
            names, rows = [column[0] for column in cursor.description], cursor.fetchall()
            cursor.close()
            connection.rollback()  # or the transaction stays open until the next question
            return names, rows

        names, rows = self._database.ask(question, f"rows of {self} cannot be read")
        where, places = names.index(self._key), [names.index(name) for name in self.columns]
        return {
            row[where]: {name: row[place] for name, place in zip(self.columns, places, strict=True)}
            for row in rows
        }

    def _first(self, condition: str) -> tuple[str, list[str]]:
        """How the driver marks parameters, and the columns that there are."""

        def question(connection: Any) -> tuple[str | None, list[str]]:
            cursor = connection.cursor()
            cursor.execute(f"SELECT * FROM {self._origin} WHERE {condition}")
            names = [column[0] for column in cursor.description]
            cursor.close()
            connection.rollback()
            return getattr(module_of(connection), "paramstyle", None), names

        try:
            style, names = self._database.ask(question, f"{self} cannot be read")
        except SourceLost as error:
            raise UsageError(str(error)) from error
        if style not in _MARKS:
            raise UsageError(
                f"the driver marks parameters in the style {style!r}. Known are "
                f"{', '.join(_MARKS)}, as DB-API names them."
            )
        return style, names

    def _read_keys(self) -> list[Any]:
        def question(connection: Any) -> list[Any]:
            cursor = connection.cursor()
            cursor.execute(f"SELECT {self._key} FROM {self._origin} ORDER BY {self._key}")
            keys = [row[0] for row in _rows(cursor)]
            cursor.close()
            connection.rollback()
            return keys

        try:
            return self._database.ask(question, f"the keys of {self} cannot be read")
        except SourceLost as error:
            raise UsageError(str(error)) from error


def sql(
    connect: Connect,
    table: str | None = None,
    *,
    key: str,
    query: str | None = None,
    columns: Sequence[str] | None = None,
    timeout_s: float = 30.0,
    patience: Patience = PATIENCE,
) -> SqlRows:
    """A source of the rows of a table, or of a query, as dicts, in the order of `key`.

    `connect` returns a new connection of a DB-API driver. `key` is a column whose values are unique
    and not null. `columns` picks some; `query` is a SELECT for all that a table name cannot say.
    """
    if (table is None) == (query is None):
        raise UsageError("sql() reads a table or a query. Give one of the two.")
    for what, name in [
        ("table", table),
        ("key", key),
        *(("column", name) for name in columns or ()),
    ]:
        if name is not None and not _PLAIN.fullmatch(name):
            raise UsageError(
                f"the {what} {name!r} is no plain name of letters, digits and _. Use a query that "
                "gives it one: SELECT ... AS name."
            )
    origin = table if query is None else f"({query.strip().rstrip(';')}\n) shoal_rows"
    assert origin is not None
    return SqlRows(Database(connect, timeout_s, patience), origin, key, columns)


def _rows(cursor: Any) -> Iterator[Any]:
    while rows := cursor.fetchmany(10_000):
        yield from rows


def _packed(keys: list[Any], origin: SqlRows) -> Any:
    """Keys as an array if they are whole numbers; refuses what is no key."""
    for before, after in zip([None, *keys], keys, strict=False):
        if after is None or after == before:
            what = "a null" if after is None else f"{after!r} more than once"
            raise UsageError(
                f"{origin} has {what} in the column {origin._key}. Each row needs a key of its own."
            )
    if all(type(key) is int and -(2**63) <= key < 2**63 for key in keys):
        return np.array(keys, dtype=np.int64)
    return keys
