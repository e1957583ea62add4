"""Rows of a database through any DB-API driver: keys are read once, rows by their keys.

    sql(lambda: sqlite3.connect("data.db"), "samples", key="id")
    sql(lambda: psycopg.connect(...), query="SELECT id, text FROM a JOIN b USING (id)", key="id")

You say how to connect; each process opens a connection of its own when it first reads. The keys
are read once, sorted by the database, and are the order of the samples; a batch is one question for
some hundred keys; what follows from that, and what it costs, is said in `keyed.py`. One question
gives all keys, so that they are of one moment.

A question is answered
within `timeout_s` or counts as failed, that for all keys too; `patience` says how often it is
repeated. Only what may pass is: a connection that broke, a database that is locked. What is wrong
with the question itself (a table or column that does not exist, say) is reported at once.

DB-API knows no timeouts, and some connections may be used only by the thread that made them. So a
session is a thread that makes one connection and answers one question after the other; who asks
waits for a bounded time. A session that failed or did not answer is closed, and the next question
opens another (`retries.py`). Each process has its own. Cost: a change of threads for each question.
"""

import os
import queue
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias, TypeVar

from shoal.data.readers import keyed
from shoal.data.readers.keyed import FoundRow, KeyedRows, RowIndex, index_rows
from shoal.data.readers.records import refuse_same_columns, require_columns
from shoal.data.readers.retries import RetriedConnection
from shoal.data.validate import require_function, text_of, texts_of
from shoal.errors import UsageError
from shoal.storage.object_client import RETRY_POLICY, RetryPolicy

Connect: TypeAlias = Callable[[], Any]
Answer = TypeVar("Answer")
_Jobs: TypeAlias = "queue.SimpleQueue[tuple[Callable[[Any], Any], Future[Any]] | None]"

_PLAIN = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*", re.ASCII)
# Of SQLite: busy, locked, interrupted, an error of the disk, a lock that another holds too long.
_SQLITE_MAY_PASS = (5, 6, 9, 10, 15)
# Classes of SQLSTATE: connection, rollback, resources, state of an object, operator, system.
_STATES_MAY_PASS = ("08", "40", "53", "55", "57", "58")
# What drivers without such codes call an error of the connection, and is none that would pass.
_LASTING = re.compile(
    r"no such (table|column|function)|unknown (table|column|database)|does(n't| not) exist|"
    r"syntax error|authentication failed|access denied|no password|permission denied",
    re.IGNORECASE,
)
_WAY_OUT = (
    "Check the names of the table and its columns, and the database, the user and the password "
    "that `connect` uses."
)
_ON_THE_SERVER = ("psycopg", "psycopg2")  # drivers whose cursors can stay there, by a name
_MARKS = {"qmark": "?", "format": "%s", "pyformat": "%s", "numeric": ":{number}"}


class _QueryTimeout(Exception):
    """The database did not answer in time."""


class _ConnectFailed(Exception):
    """No connection came about."""


class SqlRows(KeyedRows):
    """Made by `sql`: each row a dict. `columns` are those that rows have."""

    def __init__(
        self,
        database: "RetriedConnection[_Session]",
        origin: str,
        key: str,
        columns: Sequence[str] | None,
        version: str | None,
    ):
        self._database, self._origin, self._key, self._version = database, origin, key, version
        self._place = ""
        self._place = self._ask_first(_place_of, f"{self} cannot be read")
        self._style, known = self._look()
        require_columns([key, *(columns or ())], known, str(self))
        refuse_same_columns(known, str(self))
        self.columns = tuple(known if columns is None else columns)
        needed = [key] if version is None else [key, version]
        # The version may be a column that is not listed with the others: PostgreSQL's xmin.
        hidden = [name for name in needed if name not in known]
        wanted = ["*", *hidden] if columns is None else [*needed, *columns]
        self._wanted = ", ".join(dict.fromkeys(wanted))
        self._rows = self._read_keys(", ".join(needed))

    def __str__(self) -> str:
        origin = f"the table {self._origin}" if _PLAIN.fullmatch(self._origin) else "the query"
        return f"{origin} of {self._place}" if self._place else origin

    def _question(self) -> str:
        return "" if _PLAIN.fullmatch(self._origin) else " ".join(self._origin.split())

    def _fetch(self, keys: list[Any]) -> Iterator[FoundRow]:
        marks = [_MARKS[self._style].format(number=number + 1) for number in range(len(keys))]
        origin = self._origin
        if self._style in ("format", "pyformat"):
            origin = origin.replace("%", "%%")  # or it would be taken for a mark
        text = f"SELECT {self._wanted} FROM {origin} WHERE {self._key} IN ({', '.join(marks)})"

        def question(connection: Any) -> tuple[list[str], list[Any]]:
            with _answered(connection, text, keys) as cursor:
                return [column[0] for column in cursor.description], cursor.fetchall()

        what = f"rows of {self} cannot be read"
        names, rows = self._database.ask(lambda session: session.call(question), what)
        for row in rows:
            values = dict(zip(names, _by_place(row, names), strict=True))
            version = None if self._version is None else values[self._version]
            yield FoundRow(values[self._key], {n: values[n] for n in self.columns}, version)

    def _look(self) -> tuple[str, list[str]]:
        """How the driver marks parameters, and the columns that there are."""

        def question(connection: Any) -> tuple[str | None, list[str]]:
            with _answered(connection, f"SELECT * FROM {self._origin} WHERE 1 = 0") as cursor:
                names = [column[0] for column in cursor.description]
            return getattr(_module_of(connection), "paramstyle", None), names

        style, names = self._ask_first(question, f"{self} cannot be read")
        if style not in _MARKS:
            raise UsageError(
                f"the driver marks parameters in the style {style!r}. Known are "
                f"{', '.join(_MARKS)}, as DB-API names them."
            )
        return style, names

    def _read_keys(self, needed: str) -> RowIndex:
        def question(connection: Any) -> RowIndex:
            text = f"SELECT {needed} FROM {self._origin} ORDER BY {self._key}"
            driver = getattr(_module_of(connection), "__name__", "")
            paging = _cursor_for_pages(connection, driver)
            with _answered(connection, text, cursor=paging) as cursor:
                versioned = self._version is not None
                return index_rows(_iterate_pages(cursor), self._key, str(self), versioned)

        return self._ask_first(question, f"the keys of {self} cannot be read")

    def _ask_first(self, question: Callable[[Any], Answer], what: str) -> Answer:
        return self._database.ask_first(lambda session: session.call(question), what)


def sql(
    connect: Connect,
    table: str | None = None,
    *,
    key: str | None = None,
    query: str | None = None,
    columns: Sequence[str] | None = None,
    version: str | None = None,
    timeout_s: float = 30.0,
    patience: RetryPolicy = RETRY_POLICY,
) -> SqlRows:
    """A source of the rows of a table, or of a query, as dicts, in the order of `key`.

    `connect` returns a new connection of a DB-API driver. `key` is a column whose values are unique
    and not null. `columns` picks some; `query` is a SELECT for all that a table name cannot say.
    `version` is a column that changes with its row, and is compared with every read.
    """
    require_function(connect, "sql()")
    if key is None:
        raise UsageError(
            "sql() was given no key. A table or a query has no order of its own, so sample i would "
            "be another row each time. Name a column whose values are unique and not null: "
            'key="id".'
        )
    columns = None if columns is None else texts_of(columns, "sql(columns=...)")
    if (table is None) == (query is None):
        raise UsageError("sql() reads a table or a query. Give one of the two.")
    for what, name in [
        ("table", table),
        ("key", key),
        ("version", version),
        *(("column", name) for name in columns or ()),
    ]:
        if name is not None and not _PLAIN.fullmatch(text_of(name, "sql()")):
            raise UsageError(
                f"the {what} {name!r} is no plain name of letters, digits and _. Use a query that "
                "gives it one: SELECT ... AS name."
            )
    origin = table or f"({text_of(query, 'sql()').strip().rstrip(';')}\n) shoal_rows"
    database = RetriedConnection(
        lambda: _Session(connect, timeout_s), _Session.close, _may_pass, patience, _WAY_OUT
    )
    return SqlRows(database, origin, key, columns, version)


@contextmanager
def _answered(
    connection: Any, text: str, keys: Sequence[Any] = (), cursor: Any = None
) -> Iterator[Any]:
    """A cursor with the answer to a question."""
    cursor = connection.cursor() if cursor is None else cursor
    # Without keys as the only argument: with any, some drivers look for marks in the text.
    cursor.execute(*((text, keys) if keys else (text,)))
    yield cursor
    cursor.close()
    connection.rollback()  # or the transaction stays open until the next question


def _cursor_for_pages(connection: Any, driver: str) -> Any:
    """A cursor whose answer is fetched in pages. psycopg would take all of it into memory first,
    and is asked through a cursor on the server."""
    if driver not in _ON_THE_SERVER:
        return connection.cursor()
    # Without a transaction a cursor outlives its query only with `withhold`.
    return connection.cursor("shoal_keys", withhold=bool(connection.autocommit))


def _iterate_pages(cursor: Any) -> Iterator[list[tuple[Any, Any]]]:
    """Keys and versions: the first column of an answer and the last, which may be one."""
    while rows := cursor.fetchmany(keyed.PAGE):
        names = [column[0] for column in cursor.description]
        found = [_by_place(row, names) for row in rows]
        yield [(row[0], row[-1]) for row in found]


def _by_place(row: Any, names: Sequence[str]) -> Sequence[Any]:
    """A row by place. Some connections are set to give dicts."""
    return [row[name] for name in names] if isinstance(row, Mapping) else row


class _Session:
    """A thread that answers questions; once one of them failed it is closed, and not used again."""

    def __init__(self, connect: Connect, timeout_s: float):
        self._timeout_s = timeout_s
        self._jobs: _Jobs = queue.SimpleQueue()
        self._lock, self._is_closed = threading.Lock(), False
        threading.Thread(
            target=_serve, args=(connect, self._jobs), name="shoal-database", daemon=True
        ).start()

    def call(self, question: Callable[[Any], Answer]) -> Answer:
        answer: Future[Answer] = Future()
        with self._lock:
            if self._is_closed:  # by another thread, whose question failed
                raise ConnectionError("the session was closed")
            self._jobs.put((question, answer))
        try:
            return answer.result(self._timeout_s)
        except TimeoutError:
            if answer.done():
                raise
            raise _QueryTimeout(
                f"no answer within timeout_s={self._timeout_s:g}; a question that takes longer, "
                "such as that for all keys of a large table, needs sql(timeout_s=...) to be larger"
            ) from None
        finally:
            del answer  # it holds the error, which holds this frame: a session would outlive it

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._jobs.put(None)


def _serve(connect: Connect, jobs: _Jobs) -> None:
    connection: Any = None
    while (job := jobs.get()) is not None:
        question, answer = job
        try:
            if connection is None:
                connection = _opened(connect)
            answer.set_result(question(connection))
        except Exception as error:  # noqa: BLE001 (raised where it was asked)
            answer.set_exception(error)
        del job, question, answer
    if connection is not None:
        with suppress(Exception):
            connection.close()


def _opened(connect: Connect) -> Any:
    try:
        return connect()
    except Exception as error:
        raise _ConnectFailed(f"no connection: {error or type(error).__name__}") from error


def _module_of(connection: Any) -> Any:
    """The DB-API module that a connection comes from."""
    for kind in type(connection).__mro__:
        for name in (kind.__module__, kind.__module__.partition(".")[0]):
            if hasattr(sys.modules.get(name), "paramstyle"):
                return sys.modules[name]
    return None


def _place_of(connection: Any) -> str:
    """The file or server behind a connection, as far as its driver tells.

    Refuses a database of SQLite that no other process would see, or that was not there.
    """
    if getattr(_module_of(connection), "__name__", "") == "sqlite3":
        return _file_of(connection)
    info = getattr(connection, "info", None)  # of psycopg
    names = [getattr(info, name, None) for name in ("host", "port", "dbname")]
    return "{}:{}/{}".format(*names) if all(names) else ""


def _file_of(connection: Any) -> str:
    cursor = connection.cursor()
    cursor.row_factory = None  # the user's own may give rows of any kind
    files = [row[2] for row in cursor.execute("PRAGMA database_list") if row[2]]
    cursor.close()
    if not files:
        raise UsageError(
            "`connect` opens a database in memory, which each connection has for itself: ranks "
            "would find it empty. Write it to a file, and let `connect` open that."
        )
    if not os.path.exists(files[0]) or not os.path.getsize(files[0]):
        raise UsageError(
            f"the database {files[0]} is empty: SQLite makes a new one where there is none. Check "
            "the path that `connect` opens, and remove the empty file if it is not yours."
        )
    return str(files[0])


def _may_pass(error: BaseException | None) -> bool:
    """Whether the connection is to blame and not the question: by the driver's code for the error,
    or else by the names that DB-API gives."""
    if isinstance(error, _ConnectFailed):
        return _may_pass(error.__cause__)
    if isinstance(error, _QueryTimeout | OSError):
        return True
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if not kinds & {"OperationalError", "InterfaceError"}:
        return False
    code = getattr(error, "sqlite_errorcode", None)
    if code is not None:
        return code & 0xFF in _SQLITE_MAY_PASS
    state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    if state:
        return str(state).startswith(_STATES_MAY_PASS)
    return _LASTING.search(str(error)) is None
