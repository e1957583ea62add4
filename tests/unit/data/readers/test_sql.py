"""Databases: rows by key on SQLite and on a real PostgreSQL, which may go away and come back."""

import gc
import shutil
import sqlite3
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.data.identity import content_name
from shoal.data.readers import keyed
from shoal.data.readers.records import BadRecord, SourceLost
from shoal.data.readers.sql import _may_pass, sql
from shoal.errors import UsageError
from shoal.storage.object_client import RetryPolicy
from shoal.testing.sources import Case, SourceConformance
from tests.support.leaks import wait_until
from tests.support.servers import PASSWORD, Server, start_postgres

HASTY = RetryPolicy(num_tries=3, first_pause_s=0.01, most_pause_s=0.05)
ROWS = [(7, "seven", b"\x07", 0.5), (2, "two", None, 1.5), (5, "100% 'x'", b"", None)]
EXPECTED = [
    {"id": key, "name": name, "data": data, "value": value}
    for key, name, data, value in sorted(ROWS, key=lambda row: row[0])
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    database = sqlite3.connect(tmp_path / "data.db")
    database.execute("CREATE TABLE samples (id INTEGER PRIMARY KEY, name, data, value)")
    database.executemany("INSERT INTO samples VALUES (?, ?, ?, ?)", ROWS)
    database.commit()
    database.close()
    return tmp_path / "data.db"


def to(path: Path) -> Callable[[], sqlite3.Connection]:
    return lambda: sqlite3.connect(path)


class TestSqlite(SourceConformance):
    @pytest.fixture
    def case(self, path: Path) -> Case:
        return Case(lambda: sql(to(path), "samples", key="id"), EXPECTED)


@pytest.mark.full
class TestQuery(SourceConformance):
    @pytest.fixture
    def case(self, path: Path) -> Case:
        query = "SELECT name AS word, value FROM samples WHERE name NOT LIKE '%zz%'; "
        expected = [{"value": None}, {"value": 0.5}, {"value": 1.5}]
        return Case(lambda: sql(to(path), query=query, key="word", columns=["value"]), expected)


@pytest.fixture(scope="module")
def postgres() -> Iterator[Server]:
    with start_postgres() as server:
        fill(server)
        yield server


def fill(server: Server) -> None:
    psycopg = pytest.importorskip("psycopg", reason="needs the extra sql")
    with psycopg.connect(server.url) as database:
        database.execute(
            "CREATE TABLE samples (id bigint PRIMARY KEY, name text, data bytea, value float8)"
        )
        with database.cursor() as cursor:
            cursor.executemany("INSERT INTO samples VALUES (%s, %s, %s, %s)", ROWS)


def to_postgres(server: Server) -> Callable[[], Any]:
    import psycopg

    return lambda: psycopg.connect(server.url, connect_timeout=5)


class TestPostgres(SourceConformance):
    @pytest.fixture
    def case(self, postgres: Server) -> Case:
        return Case(lambda: sql(to_postgres(postgres), "public.samples", key="id"), EXPECTED)


@pytest.mark.full
class TestPostgresQuery(SourceConformance):
    @pytest.fixture
    def case(self, postgres: Server) -> Case:
        query = "SELECT id, name FROM samples WHERE name LIKE '%' -- all"
        expected = [{"id": row["id"], "name": row["name"]} for row in EXPECTED]
        return Case(lambda: sql(to_postgres(postgres), query=query, key="id"), expected)


@pytest.mark.full
def test_a_server_may_hang_go_away_and_come_back() -> None:
    """A wait ends in a bounded time with an error that names it, or in the answer."""
    with start_postgres() as server:
        fill(server)
        hasty = sql(to_postgres(server), "samples", key="id", timeout_s=0.2, patience=HASTY)
        source = sql(to_postgres(server), "samples", key="id", patience=RetryPolicy(60, 0.1, 0.5))
        assert source[0] == hasty[0] == EXPECTED[0]
        server.pause()
        with pytest.raises(
            SourceLost,
            match=r"rows of the table samples .* no answer within timeout_s=0.2; .*tried 3",
        ):
            hasty[1]
        server.resume()
        server.stop()
        with pytest.raises(SourceLost, match=r"cannot be read: .*It was tried 3 times"):
            hasty[1]
        with pytest.raises(SourceLost, match=r"cannot be read: no connection: .*refused"):
            sql(to_postgres(server), "samples", key="id", patience=HASTY)
        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(lambda: source[1])
            time.sleep(0.2)
            assert not answer.done()
            server.start()
            assert answer.result() == EXPECTED[1]


def test_credentials_and_names_of_postgres(postgres: Server) -> None:
    import psycopg

    bad = postgres.url.replace(PASSWORD, "wrong")
    with pytest.raises(UsageError, match=r"(?s)password authentication failed") as caught:
        sql(lambda: psycopg.connect(bad), "samples", key="id", patience=HASTY)
    assert "wrong" not in str(caught.value) and "tried" not in str(caught.value)
    with pytest.raises(UsageError, match=r'table sample of 127.*"sample" does not exist.*Check'):
        sql(to_postgres(postgres), "sample", key="id")
    with pytest.raises(UsageError, match=r"no column 'nam'. Did you mean 'name'"):
        sql(to_postgres(postgres), "samples", key="id", columns=["nam"])
    with pytest.raises(UsageError, match=r"has \[\d+\] in the column ids, and a key is one value"):
        sql(to_postgres(postgres), query="SELECT ARRAY[id] AS ids FROM samples", key="ids")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {"table": "sampels", "key": "id"},
            r"the table sampels of .*data\.db cannot be read: no such table.* Check the names",
        ),
        ({"table": "samples", "key": "ids"}, "no column 'ids'. Did you mean 'id'"),
        ({"table": "samples; DROP TABLE x", "key": "id"}, "no plain name"),
        ({"table": "samples", "key": "id", "columns": ["a b"]}, "the column 'a b' is no plain"),
        ({"key": "id"}, "a table or a query"),
        ({"table": "samples"}, r"no key\. A table or a query has no order.*key=\"id\""),
        ({"table": "samples", "key": "id", "version": "a b"}, "the version 'a b' is no plain"),
        ({"table": "samples", "query": "SELECT 1", "key": "id"}, "a table or a query"),
        ({"query": "SELEC * FROM samples", "key": "id"}, r"the query of .* cannot be read: near"),
        ({"query": "SELECT nam FROM samples", "key": "nam"}, r"no such column: nam\. Check"),
        ({"query": "SELECT 1 AS id FROM samples", "key": "id"}, "has 1 more than once"),
        ({"table": "samples", "key": "data"}, "has a null in the column data"),
    ],
)
def test_wrong_questions_are_refused(path: Path, arguments: dict[str, Any], said: str) -> None:
    """At once: to ask again would not help."""
    with pytest.raises(UsageError, match=rf"^(?!.* was tried).*{said}"):
        sql(to(path), patience=HASTY, **arguments)


def test_a_table_that_goes_away_is_told_at_once(path: Path) -> None:
    source = sql(to(path), "samples", key="id", patience=HASTY)
    with sqlite3.connect(path) as database:
        database.execute("DROP TABLE samples")
    database.close()
    with pytest.raises(
        SourceLost, match=r"rows of the table samples of .*no such table: samples\. Check"
    ):
        source[0]


def test_a_database_that_is_locked_is_asked_again(path: Path) -> None:
    source = sql(
        lambda: sqlite3.connect(path, timeout=0),
        "samples",
        key="id",
        patience=RetryPolicy(60, 0.05),
    )
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(lambda: source[0])
        time.sleep(0.2)
        assert not answer.done()
        other.execute("COMMIT")
        assert answer.result() == EXPECTED[0]
    other.close()


def test_a_database_that_is_locked_at_the_start_is_lost_and_not_misused(path: Path) -> None:
    """Started again it may be there, so it is no error of the recipe's."""
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(SourceLost, match=r"is locked\. It was tried 3 times.* holds a lock"):
        sql(lambda: sqlite3.connect(path, timeout=0), "samples", key="id", patience=HASTY)
    other.close()


def test_rows_are_known_by_their_content(path: Path, tmp_path: Path) -> None:
    known = content_name(sql(to(path), "samples", key="id"))
    other = tmp_path / "other.db"
    shutil.copy(path, other)
    assert content_name(sql(to(other), "samples", key="id")) == known
    query = "SELECT id, name FROM samples"
    of_query = content_name(sql(to(path), query=query, key="id"))
    assert of_query != known
    assert content_name(sql(to(path), query=query.replace(" ", "\n "), key="id")) == of_query
    for change in ("SET name = 'eight' WHERE id = 7", "SET id = 6 WHERE id = 5"):
        with sqlite3.connect(other) as database:
            database.execute(f"UPDATE samples {change}")
        database.close()
        now = content_name(sql(to(other), "samples", key="id"))
        assert now != known
        known = now


@pytest.mark.parametrize("name", [":memory:", "", "file:x?mode=memory&cache=shared"])
def test_a_database_in_memory_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"a database in memory.*Write it to a file"):
        sql(lambda: sqlite3.connect(name, uri=True), "samples", key="id")


def test_a_database_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^the database .*missing\.db is empty.*Check the path"):
        sql(to(tmp_path / "missing.db"), "samples", key="id")
    with pytest.raises(UsageError, match=r"no connection: unable to open database file\. Check"):
        sql(to(tmp_path / "no" / "a.db"), "samples", key="id", patience=HASTY)


def test_a_mistake_in_connect_is_told_at_once() -> None:
    def connect() -> Any:
        raise KeyError("PGHOST")

    with pytest.raises(UsageError, match=r"no connection: 'PGHOST'\. Check"):
        sql(connect, "samples", key="id", patience=HASTY)


@pytest.mark.parametrize(
    ("words", "state", "passes"),
    [
        ("(1054, \"Unknown column 'nam' in 'field list'\")", None, False),
        ("(1045, \"Access denied for user 'a'\")", None, False),
        ("(2013, 'Lost connection to MySQL server during query')", None, True),
        ("the connection is closed", None, True),
        ('connection to server on socket "/run/a" failed: No such file', None, True),
        ("terminating connection due to administrator command", "57P01", True),
        ("password authentication failed", "28P01", False),
        ("too many connections", "53300", True),
    ],
)
def test_what_may_pass_by_any_driver(words: str, state: str | None, passes: bool) -> None:
    class OperationalError(Exception):
        sqlstate = state

    assert _may_pass(OperationalError(words)) is passes


def test_a_removed_row_is_named_and_an_added_one_is_not_seen(path: Path) -> None:
    source = sql(to(path), "samples", key="id")
    with sqlite3.connect(path) as database:
        database.execute("DELETE FROM samples WHERE id = 5")
        database.execute("INSERT INTO samples VALUES (3, 'three', NULL, NULL)")
    database.close()
    with pytest.raises(
        BadRecord, match=r"the table samples of .*data\.db with id = 5 \(sample 1\) is gone"
    ):
        source[1]
    assert len(source) == 3 and source[2] == EXPECTED[2]


def test_a_row_that_changed_is_named_by_its_version(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("ALTER TABLE samples ADD COLUMN edited INTEGER DEFAULT 1")
    database.close()
    source = sql(to(path), "samples", key="id", columns=["name"], version="edited")
    before = content_name(source)
    assert source[1] == {"name": EXPECTED[1]["name"]}
    with sqlite3.connect(path) as database:
        database.execute("UPDATE samples SET name = 'other', edited = 2 WHERE id = 5")
    database.close()
    with pytest.raises(BadRecord, match=r"id = 5 \(sample 1\) was changed .* version is 2 now"):
        source[1]
    assert source[2] == {"name": EXPECTED[2]["name"]}
    assert content_name(sql(to(path), "samples", key="id", version="edited")) != before


def test_a_key_that_repeats_later_is_named(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "a.db") as database:
        database.execute("CREATE TABLE t (k INTEGER, v REAL)")
        database.executemany("INSERT INTO t VALUES (?, ?)", [(1, 0.5), (2, 1.5)])
    source = sql(to(tmp_path / "a.db"), "t", key="k")
    with database:
        database.execute("INSERT INTO t VALUES (2, 9.0)")
    database.close()
    with pytest.raises(BadRecord, match=r"k = 2 \(sample 1\) is there 2 times by now"):
        source[1]


def test_rows_of_numbers_become_pairs(tmp_path: Path) -> None:
    """What no tensor can hold is named by its key, and so is a row unlike the others."""
    with sqlite3.connect(tmp_path / "a.db") as database:
        database.execute("CREATE TABLE t (k INTEGER PRIMARY KEY, x, y)")
        rows = [(1, 0.5, 1), (2, 1.5, 0), (3, "high", 1), (4, None, 1), (5, 2, 1)]
        database.executemany("INSERT INTO t VALUES (?, ?, ?)", rows)
    database.close()
    pairs = sql(to(tmp_path / "a.db"), "t", key="k").pairs("x", "y")
    inputs, target = pairs.take(np.array([1, 0]))
    assert inputs.tolist() == [1.5, 0.5] and target.tolist() == [0, 1]
    for ids, said in [
        ([0, 2], r"k = 3 \(sample 2\) has a str \('high'\) in 'x', which no tensor"),
        ([3], r"k = 4 \(sample 3\) has a null, or nothing, in 'x'"),
        ([0, 4], r"k = 5 \(sample 4\) holds int64 \[\] in 'x', and sample 0 float64 \[\]"),
    ]:
        with pytest.raises(BadRecord, match=said):
            pairs.take(np.array(ids))


def test_many_keys_of_any_kind(tmp_path: Path) -> None:
    names = [f"key {number:05}" for number in range(1234)]
    with sqlite3.connect(tmp_path / "a.db") as database:
        database.execute("CREATE TABLE t (k TEXT, v)")
        database.executemany("INSERT INTO t VALUES (?, ?)", [(key, len(key)) for key in names])
    database.close()
    source = sql(to(tmp_path / "a.db"), "t", key="k", columns=["k"])
    ids = np.arange(1234)[::-1]
    assert [row["k"] for row in source.many(ids)] == names[::-1]


def test_keys_are_read_in_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in memory is the keys, 8 bytes each, and a page."""
    monkeypatch.setattr(keyed, "PAGE", 1000)
    with sqlite3.connect(tmp_path / "a.db") as database:
        database.execute("CREATE TABLE t (k INTEGER PRIMARY KEY)")
        database.executemany("INSERT INTO t VALUES (?)", ((7 * k,) for k in range(50_000)))
    database.close()
    tracemalloc.start()
    source = sql(to(tmp_path / "a.db"), "t", key="k")
    assert tracemalloc.get_traced_memory()[1] < 16 * 50_000
    tracemalloc.stop()
    assert np.array_equal(source._rows.keys, 7 * np.arange(50_000))


@pytest.mark.parametrize(
    "given", [[1, 2, 3], [1, 2, 2**63], [1, 2.5, 3], ["a", "b", "c"], [1, 2, "b"], []]
)
def test_pages_of_keys_are_one_list(given: list[Any]) -> None:
    pages = [[(key, key) for key in page] for page in (given[:2], given[2:])]
    found, versions = keyed.index_rows(pages, "k", "t", versioned=True)
    assert versions is not None and len(versions) == len(given)
    assert list(found) == given
    assert isinstance(found, np.ndarray) == all(type(k) is int and k < 2**63 for k in given)
    with pytest.raises(UsageError, match=r"3 more than once in the column k\."):
        keyed.index_rows([[(1, 0), (3, 0)], [(3, 0), (4, 0)]], "k", "t")


def test_rows_may_come_as_dicts(path: Path, postgres: Server) -> None:
    """As a connection's row_factory, or a DictCursor, gives them."""
    import psycopg
    from psycopg.rows import dict_row

    def named() -> sqlite3.Connection:
        connection = sqlite3.connect(path)
        connection.row_factory = lambda cursor, row: dict(
            zip((column[0] for column in cursor.description), row, strict=True)
        )
        return connection

    def of_postgres() -> Any:
        return psycopg.connect(postgres.url, connect_timeout=5, row_factory=dict_row)

    for connect in (named, of_postgres):
        source = sql(connect, "samples", key="id", columns=["name", "id"])
        wanted = [{"name": row["name"], "id": row["id"]} for row in EXPECTED]
        assert source.many(range(3)) == wanted


@pytest.mark.parametrize("autocommit", [False, True])
def test_keys_of_postgres_stay_on_the_server(postgres: Server, autocommit: bool) -> None:
    import psycopg

    named = []

    class Seen(psycopg.Connection[Any]):
        def cursor(self, name: str = "", **rest: Any) -> Any:
            named.append(name)
            return super().cursor(name, **rest)

    def connect() -> Any:
        return Seen.connect(postgres.url, connect_timeout=5, autocommit=autocommit)

    query = "SELECT id, name FROM samples WHERE name LIKE '%'"
    source = sql(connect, query=query, key="id")
    assert source._rows.keys.tolist() == [2, 5, 7] and "shoal_keys" in named
    assert source[0]["name"] == "two"


def test_an_empty_table_has_no_samples(path: Path) -> None:
    assert len(sql(to(path), query="SELECT * FROM samples WHERE id > 9", key="id")) == 0


def test_a_slow_answer_is_not_waited_for(path: Path) -> None:
    """By any driver, also one that knows no limits; and its late answer goes to nobody."""
    gate = threading.Event()

    class Slow(sqlite3.Connection):
        def cursor(self, *rest: Any) -> Any:
            if gate.is_set():
                time.sleep(0.3)
            return super().cursor(*rest)

    def connect() -> Any:
        return sqlite3.connect(path, factory=Slow)

    source = sql(connect, "samples", key="id", timeout_s=0.05, patience=HASTY)
    gate.set()
    with pytest.raises(
        SourceLost, match=r"no answer within timeout_s=0.05; .* needs sql\(timeout_s"
    ):
        source[0]
    gate.clear()
    assert source[0] == EXPECTED[0]


def test_a_driver_of_an_unknown_kind_is_refused(path: Path) -> None:
    class Odd:
        def __init__(self) -> None:
            self.real = sqlite3.connect(path)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

    with pytest.raises(UsageError, match="marks parameters in the style None"):
        sql(Odd, "samples", key="id")


def test_threads_and_connections_end_with_the_source(path: Path) -> None:
    source = sql(to(path), "samples", key="id")
    assert source[0] == EXPECTED[0]
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("shoal-database") == 1
    del source
    gc.collect()
    assert wait_until(
        lambda: all(thread.name != "shoal-database" for thread in threading.enumerate()), 5
    )
