"""Cassandra: rows of a real server (2.1), by token ranges, with the faults of one."""

import gc
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from shoal.data.identity import content_name
from shoal.data.readers.cassandra import _may_pass, cassandra
from shoal.data.readers.records import BadRecord, SourceLost
from shoal.errors import UsageError
from shoal.storage.object_client import RetryPolicy
from shoal.testing.sources import Case, SourceConformance
from tests.support.servers import Server
from tests.support.store_servers import start_cassandra

driver = pytest.importorskip("cassandra", reason="needs the extra cassandra")
cluster = pytest.importorskip("cassandra.cluster", reason="the driver found no event loop")

query = pytest.importorskip("cassandra.query")

HASTY = RetryPolicy(num_tries=2, first_pause_s=0.01, most_pause_s=0.05)
pytestmark = [pytest.mark.full, pytest.mark.timeout(180)]


def to(server: Server, **options: Any) -> Callable[[], Any]:
    def connect() -> Any:
        profile = cluster.ExecutionProfile(row_factory=query.dict_factory, request_timeout=60)
        return cluster.Cluster(
            ["127.0.0.1"],
            port=server.port,
            protocol_version=3,
            connect_timeout=2,
            execution_profiles={cluster.EXEC_PROFILE_DEFAULT: profile},
            **options,
        ).connect()

    return connect


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with start_cassandra() as started:
        held = to(started)()  # the driver's own thread runs while any session is open
        for _ in range(8):  # and all threads of its pool, of which one might start in a test
            held.cluster.executor.submit(time.sleep, 0.05)
        yield started
        held.cluster.shutdown()


@pytest.fixture(autouse=True)
def no_cycles(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Errors of the driver hold frames that hold sessions, until they are collected, and so does
    its log, which pytest keeps."""
    caplog.set_level(logging.CRITICAL + 1, logger="cassandra")
    yield
    gc.collect()


@pytest.fixture
def session(server: Server) -> Iterator[Any]:
    made = filled(server)
    yield made
    made.cluster.shutdown()


def filled(server: Server) -> Any:
    made = to(server)()
    made.execute(
        "CREATE KEYSPACE IF NOT EXISTS k WITH replication = "
        "{'class': 'SimpleStrategy', 'replication_factor': 1}"
    )
    made.execute("DROP TABLE IF EXISTS k.samples")
    made.execute(
        "CREATE TABLE k.samples (id int, part text, x list<double>, n bigint, d decimal, "
        "PRIMARY KEY (id, part))"
    )
    for number in range(20):
        made.execute(
            "INSERT INTO k.samples (id, part, x, n) VALUES (%s, %s, %s, %s)",
            (number // 2, "ab"[number % 2], [number / 2, 1.0], number),
        )
    return made


def expected(session: Any) -> list[dict[str, Any]]:
    """In the order of tokens, as one question for all gives them."""
    return [dict(row) for row in session.execute("SELECT id, part, x, n FROM k.samples")]


class TestRows(SourceConformance):
    @pytest.fixture
    def case(self, server: Server, session: Any) -> Case:
        names = ["id", "part", "x", "n"]
        return Case(lambda: cassandra(to(server), "k.samples", columns=names), expected(session))


def test_a_table_that_changes_is_named(server: Server, session: Any) -> None:
    source = cassandra(to(server), "k.samples", version="writetime(n)")
    before, rows = content_name(source), expected(session)
    place = {(row["id"], row["part"]): at for at, row in enumerate(rows)}
    session.execute("INSERT INTO k.samples (id, part, n) VALUES (99, 'a', 1)")
    assert len(source) == 20 and len(cassandra(to(server), "k.samples")) == 21
    session.execute("UPDATE k.samples SET n = 77 WHERE id = 3 AND part = 'a'")
    session.execute("DELETE FROM k.samples WHERE id = 4 AND part = 'b'")
    with pytest.raises(BadRecord, match=r"id, part = \(3, 'a'\) .* was changed after"):
        source[place[3, "a"]]
    with pytest.raises(BadRecord, match=r"id, part = \(4, 'b'\) .* is gone"):
        source[place[4, "b"]]
    assert source[place[5, "a"]]["n"] == 10
    assert content_name(cassandra(to(server), "k.samples", version="writetime(n)")) != before


def test_pairs_name_what_no_tensor_can_hold(server: Server, session: Any) -> None:
    source = cassandra(to(server), "k.samples")
    inputs, target = source.pairs("x", "n").take(np.arange(4))
    rows = expected(session)
    assert inputs.tolist() == [row["x"] for row in rows[:4]]
    assert target.tolist() == [row["n"] for row in rows[:4]]
    session.execute("UPDATE k.samples SET d = 1.5 WHERE id = 1 AND part = 'a'")
    at = next(at for at, row in enumerate(rows) if (row["id"], row["part"]) == (1, "a"))
    with pytest.raises(BadRecord, match=r"has a Decimal \(Decimal\('1.5'\)\) in 'd', which no"):
        source.pairs("x", "d").take(np.array([at]))


def test_wrong_names_are_refused(server: Server, session: Any) -> None:
    for table, said in [
        ("samples", "of no keyspace"),
        ("j.samples", "no keyspace 'j'"),
        ("k.sample", "no table 'sample'. Did you mean 'samples'"),
    ]:
        with pytest.raises(UsageError, match=said):
            cassandra(to(server), table)
    with pytest.raises(UsageError, match="no column 'm'"):
        cassandra(to(server), "k.samples", columns=["m"])
    with pytest.raises(UsageError, match="takes a session"):
        cassandra(lambda: 3, "k.samples")


def test_a_server_goes_away_hangs_and_comes_back() -> None:
    names = ("id", "part", "x", "n")
    with start_cassandra() as server:
        session = filled(server)
        rows = expected(session)
        session.cluster.shutdown()
        patient = RetryPolicy(60, 0.2, 1)
        source = cassandra(to(server), "k.samples", timeout_s=2.0, patience=patient)
        assert {name: source[0][name] for name in names} == rows[0]
        server.pause()
        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(lambda: source[3])
            time.sleep(0.5)
            assert not answer.done()
            server.resume()
            assert {name: answer.result()[name] for name in names} == rows[3]
        server.stop()
        with pytest.raises(SourceLost, match=r"k\.samples of Cassandra cannot be read.*tried 2"):
            cassandra(to(server), "k.samples", patience=HASTY)
        server.start()
        assert {name: source[5][name] for name in names} == rows[5]


def test_wrong_credentials_are_refused_at_once() -> None:
    auth = pytest.importorskip("cassandra.auth")
    with start_cassandra("cassandra") as server:
        time.sleep(1.0)  # until it made its first user

        def as_user(password: str) -> Callable[[], Any]:
            return to(server, auth_provider=auth.PlainTextAuthProvider("cassandra", password))

        with pytest.raises(UsageError, match=r"(?is)no keyspace"):
            cassandra(as_user("cassandra"), "k.samples", patience=RetryPolicy(20, 0.2, 1))
        with pytest.raises(UsageError, match=r"(?is)username and/or password") as caught:
            cassandra(as_user("hunter2"), "k.samples", patience=HASTY)
        assert "hunter2" not in str(caught.value)


def test_tables_that_cannot_be_read_whole_are_refused(server: Server, session: Any) -> None:
    """The driver's metadata lacks a column whose type it does not understand."""
    session.execute("DROP TABLE IF EXISTS k.made")
    session.execute("CREATE TYPE IF NOT EXISTS k.kind (a int, b text)")
    session.execute("CREATE TABLE k.made (id int PRIMARY KEY, v frozen<kind>)")
    session.execute("INSERT INTO k.made (id, v) VALUES (1, {a: 2, b: 'y'})")
    try:
        assert cassandra(to(server), "k.made")[0]["v"].a == 2
    except UsageError as error:
        assert "columns would be missing" in str(error)
    session.execute("DROP TABLE IF EXISTS k.static")
    session.execute(
        "CREATE TABLE k.static (id int, part int, s int static, PRIMARY KEY (id, part))"
    )
    session.execute("INSERT INTO k.static (id, s) VALUES (1, 2)")
    with pytest.raises(UsageError, match="has a null in the column id, part"):
        cassandra(to(server), "k.static")


def test_which_errors_may_pass() -> None:
    assert _may_pass(driver.OperationTimedOut(errors={"127.0.0.1": "Client request timeout"}))
    refused = driver.AuthenticationFailed("no")
    assert not _may_pass(refused)
    assert not _may_pass(cluster.NoHostAvailable("x", {"a": refused}))
    assert _may_pass(cluster.NoHostAvailable("x", {"a": refused, "b": OSError()}))
    assert _may_pass(driver.OperationTimedOut()) and not _may_pass(driver.InvalidRequest("x"))
