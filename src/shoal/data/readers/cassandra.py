"""Rows of a Cassandra table through the CQL driver, in the order of their tokens.

    cassandra(lambda: Cluster(["10.0.0.1"]).connect(), "science.samples", columns=["x", "y"])

You say how to connect; each process opens a session of its own. A table has no order but that of
its tokens, the hashes of the partition keys, and of the clustering columns within a partition. So
the primary keys are read once by token ranges, those of the ring, one after the other; a range that
fails is read again by itself. The order is a function of the keys alone: it stays when nodes come
and go. Rows are then asked for by their primary keys, many at a time (`keyed.py`).

A new row's token may be anywhere, so a table that grew has another order, and `--new-data` refuses
it: keep what is new in a table of its own, and `join` the two. `version="writetime(x)"` finds rows
that are written while a run reads. Cost: one request a row, 32 at a time. Needs the extra
`cassandra`.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from shoal.data.readers import keyed
from shoal.data.readers.keyed import FoundRow, KeyedRows, RowIndex, index_rows
from shoal.data.readers.records import require_columns
from shoal.data.readers.retries import RetriedConnection
from shoal.data.validate import require_function, text_of, texts_of
from shoal.errors import UsageError, nearest, require
from shoal.storage.object_client import RETRY_POLICY, RetryPolicy

# How each session is asked: for dicts, within `timeout_s`.
_PROFILES: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_AT_ONCE = 32  # requests for rows under way
_WAY_OUT = (
    "Check the user and the password that `connect` uses, the names of the table and its columns, "
    "and the rights to read them."
)


class _Table(NamedTuple):
    """What the cluster says of a table, and of its ring."""

    keyspace: str
    name: str
    partition: tuple[str, ...]  # columns of the primary key
    clustering: tuple[str, ...]
    columns: tuple[str, ...]
    tokens: tuple[Any, ...]  # where the ranges of the ring end, sorted


# Errors whose classes lie in several modules of the driver.
_PASSING_NAMES = {
    *("NoHostAvailable", "ConnectionException", "ConnectionShutdown", "ConnectionBusy"),
    *("OverloadedErrorMessage", "IsBootstrappingErrorMessage", "ServerError", "ReadFailure"),
}


class CassandraRows(KeyedRows):
    """Made by `cassandra`: each row a dict. `columns` are those that rows have."""

    def __init__(
        self,
        cluster: RetriedConnection[Any],
        name: str,
        columns: Sequence[str] | None,
        version: str | None,
    ):
        self._cluster, self._name, self._version = cluster, name, version
        self._table = cluster.ask_first(
            lambda session: _described(session, name), f"{self} cannot be read"
        )
        self._names = (*self._table.partition, *self._table.clustering)
        self._key = ", ".join(self._names)
        require_columns(columns or (), self._table.columns, str(self))
        self.columns = tuple(self._table.columns if columns is None else columns)
        self._rows = self._read_keys()

    def __str__(self) -> str:
        return f"the table {self._name} of Cassandra"

    def _fetch(self, keys: list[Any]) -> Iterator[FoundRow]:
        versions = [] if self._version is None else [f"{self._version} AS shoal_version"]
        text = (
            f"SELECT {', '.join([*map(_quoted, self.columns), *versions])} FROM {self._origin} "
            f"WHERE {' AND '.join(f'{_quoted(name)} = ?' for name in self._names)}"
        )
        arguments = [key if len(self._names) > 1 else (key,) for key in keys]

        def question(session: Any) -> list[list[dict[str, Any]]]:
            many = require("cassandra.concurrent", "cassandra").execute_concurrent_with_args
            statement = session.prepare(text)
            how = {"concurrency": _AT_ONCE, "execution_profile": _PROFILES[session]}
            return [list(rows) for _, rows in many(session, statement, arguments, **how)]

        answers = self._cluster.ask(question, f"rows of {self} cannot be read")
        for key, rows in zip(keys, answers, strict=True):
            for row in rows:
                yield FoundRow(key, {n: row[n] for n in self.columns}, row.get("shoal_version"))

    @property
    def _origin(self) -> str:
        return f"{_quoted(self._table.keyspace)}.{_quoted(self._table.name)}"

    def _read_keys(self) -> RowIndex:
        ends = [None, *self._table.tokens, None]
        pages = (page for start, stop in pairwise(ends) for page in self._pages(start, stop))
        return index_rows(pages, self._key, str(self), self._version is not None)

    def _pages(self, start: Any, stop: Any) -> Iterator[list[tuple[Any, Any]]]:
        """The keys of a token range; it is read again as a whole, so none comes twice."""
        token = f"token({', '.join(map(_quoted, self._table.partition))})"
        bounds = [f"{token} > ?"] * (start is not None) + [f"{token} <= ?"] * (stop is not None)
        where = f" WHERE {' AND '.join(bounds)}" if bounds else ""
        versions = [] if self._version is None else [f"{self._version} AS shoal_version"]
        names = ", ".join([*map(_quoted, self._names), *versions])
        text = f"SELECT {names} FROM {self._origin}{where}"
        arguments = [bound for bound in (start, stop) if bound is not None]

        def question(session: Any) -> list[tuple[Any, Any]]:
            statement = session.prepare(text)
            statement.fetch_size = keyed.PAGE
            found = session.execute(statement, arguments, execution_profile=_PROFILES[session])
            return [(self._key_in(row), row.get("shoal_version")) for row in found]

        keys = self._cluster.ask_first(question, f"the keys of {self} cannot be read")
        for at in range(0, len(keys), keyed.PAGE):
            yield keys[at : at + keyed.PAGE]

    def _key_in(self, row: dict[str, Any]) -> Any:
        key = tuple(row[name] for name in self._names)
        if None in key:  # of a partition that has static columns and no row
            return None
        return key if len(key) > 1 else key[0]


def cassandra(
    connect: Callable[[], Any],
    table: str,
    *,
    columns: Sequence[str] | None = None,
    version: str | None = None,
    timeout_s: float = 30.0,
    patience: RetryPolicy = RETRY_POLICY,
) -> CassandraRows:
    """A source of the rows of a table, as dicts, in the order of their tokens.

    `connect` returns a new session of the driver: `lambda: Cluster([...]).connect()`. `table` is
    "keyspace.table". `columns` picks some. `version` is a column or `writetime(column)`, and is
    compared with every read.
    """
    require_function(connect, "cassandra()")
    columns = None if columns is None else texts_of(columns, "cassandra(columns=...)")
    if text_of(table, "cassandra()").count(".") != 1:
        raise UsageError(f"the table {table!r} is of no keyspace. Write keyspace.table.")
    require("cassandra.cluster", "cassandra")
    cluster = RetriedConnection(
        lambda: _opened(connect, timeout_s),
        lambda session: session.cluster.shutdown(),
        _may_pass,
        patience,
        _WAY_OUT,
    )
    return CassandraRows(cluster, table, columns, version)


def _opened(connect: Callable[[], Any], timeout_s: float) -> Any:
    session = connect()
    if not hasattr(session, "prepare"):
        raise UsageError(
            f"`connect` returned a {type(session).__name__}. cassandra() takes a session: "
            "lambda: Cluster([...]).connect()."
        )
    dicts = require("cassandra.query", "cassandra").dict_factory
    default = require("cassandra.cluster", "cassandra").EXEC_PROFILE_DEFAULT
    try:
        session.row_factory, session.default_timeout = dicts, timeout_s
        _PROFILES[session] = default
    except ValueError:  # of a cluster that was made with profiles
        _PROFILES[session] = session.execution_profile_clone_update(
            default, row_factory=dicts, request_timeout=timeout_s
        )
    return session


def _may_pass(error: Exception) -> bool:
    driver = require("cassandra", "cassandra")
    inner = getattr(error, "errors", None)  # of each host that was tried: errors, or words
    said = list(inner.values()) if isinstance(inner, dict) else []
    if any(isinstance(each, Exception) for each in said):
        return any(map(_may_pass, said))
    if isinstance(error, driver.AuthenticationFailed | driver.Unauthorized):
        return False
    passing = (OSError, driver.Timeout, driver.Unavailable, driver.OperationTimedOut)
    return isinstance(error, passing) or type(error).__name__ in _PASSING_NAMES


def _described(session: Any, name: str) -> _Table:
    keyspace, _, table = name.partition(".")
    known = session.cluster.metadata.keyspaces
    if keyspace not in known:
        raise UsageError(f"Cassandra has no keyspace {keyspace!r}. {nearest(keyspace, known)}")
    tables = known[keyspace].tables
    if table not in tables:
        raise UsageError(
            f"the keyspace {keyspace} has no table {table!r}. {nearest(table, tables)}"
        )
    found = tables[table]
    if found._exc_info is not None:  # the driver goes on, with those columns that it understood
        raise UsageError(
            f"the driver cannot read how the table {name} of Cassandra is made "
            f"({found._exc_info[1]}), so columns would be missing. Write what is needed of it to a "
            "table of plain types."
        )
    ring = session.cluster.metadata.token_map
    return _Table(
        keyspace,
        table,
        tuple(column.name for column in found.partition_key),
        tuple(column.name for column in found.clustering_key),
        tuple(found.columns),
        tuple(token.value for token in sorted(ring.ring)) if ring else (),
    )


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
