"""Redis: lists and streams of a real server, which may go away, hang and come back."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from shoal.data.readers.records import BadRecord, SourceLost
from shoal.data.readers.redis import redis_list, redis_stream
from shoal.errors import UsageError
from shoal.storage.object_client import RetryPolicy
from shoal.testing.sources import Case, SourceConformance
from tests.support.servers import Server, start_redis

redis = pytest.importorskip("redis", reason="needs the extra redis")
HASTY = RetryPolicy(num_tries=3, first_pause_s=0.01, most_pause_s=0.05)
ENTRIES = [b"one", b"", b"\x00\xff", b"four", b"five"]
FIELDS = [{"x": entry, "y": bytes([at])} for at, entry in enumerate(ENTRIES)]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with start_redis() as started:
        yield started


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with redis.Redis.from_url(server.url) as made:
        made.flushall()
        made.rpush("list", *ENTRIES)
        for fields in FIELDS:
            made.xadd("stream", fields)
        yield made


class TestList(SourceConformance):
    @pytest.fixture
    def case(self, client: Any, server: Server) -> Case:
        return Case(lambda: redis_list(server.url, "list"), ENTRIES)


class TestStream(SourceConformance):
    @pytest.fixture
    def case(self, client: Any, server: Server) -> Case:
        return Case(lambda: redis_stream(server.url, "stream"), FIELDS)


def test_a_list_that_changed_its_length_is_lost(client: Any, server: Server) -> None:
    source = redis_list(server.url, "list")
    client.lpush("list", b"zero")
    with pytest.raises(SourceLost, match=r"'list' had 5 entries and now has 6"):
        source[0]
    client.delete("list")
    with pytest.raises(SourceLost, match=r"now has 0"):
        source.many(np.array([0, 1]))


def test_a_stream_keeps_its_entries(client: Any, server: Server) -> None:
    source = redis_stream(server.url, "stream")
    client.xadd("stream", {"x": b"late"})
    assert len(source) == 5 and source[-1] == FIELDS[-1]
    ((name, _),) = client.xrange("stream", count=1)
    client.xdel("stream", name)
    with pytest.raises(BadRecord, match=rf"entry {name.decode()} of .*\(sample 0\) is gone"):
        source[0]
    assert source[1] == FIELDS[1]


def test_a_long_stream_is_read_in_parts(client: Any, server: Server) -> None:
    with client.pipeline() as pipeline:
        for number in range(2345):
            pipeline.xadd("long", {"n": number}, id=f"7-{number + 1}")
        pipeline.execute()
    source = redis_stream(server.url, "long")
    assert len(source) == 2345
    assert [int(entry["n"]) for entry in source.many(np.array([2344, 1000, 999]))] == [
        2344,
        1000,
        999,
    ]


def test_wrong_keys_are_refused(client: Any, server: Server) -> None:
    with pytest.raises(UsageError, match="has no key 'lits'"):
        redis_list(server.url, "lits")
    with pytest.raises(UsageError, match="'stream' in Redis is a stream, not a list"):
        redis_list(server.url, "stream")
    client.xadd("empty", {"a": 1})
    client.xtrim("empty", maxlen=0)
    assert len(redis_stream(server.url, "empty")) == 0


def test_credentials_are_refused_at_once_and_not_shown() -> None:
    with start_redis("secret") as server:
        open_url = server.url.replace(":secret@", "")
        with pytest.raises(UsageError, match=r"(?i)authentication required"):
            redis_list(open_url, "list")
        with pytest.raises(UsageError, match=r"(?i)invalid|wrongpass") as caught:
            redis_list(server.url.replace("secret", "hunter2"), "list")
        assert "hunter2" not in str(caught.value)
        with redis.Redis.from_url(server.url) as client:
            client.rpush("list", b"x")
        assert list(redis_list(server.url, "list")) == [b"x"]


@pytest.mark.parametrize("password", ["hunter/2", "123456/hunter", "hunter?2", "hunter#2"])
def test_a_password_that_is_no_part_of_a_url_is_not_shown(password: str) -> None:
    with pytest.raises(UsageError, match=r"not a URL that Redis knows.*%2F") as refused:
        redis_list(f"redis://user:{password}@127.0.0.1:1/0", "list", patience=HASTY)
    assert not any(part in str(refused.value) for part in ("hunter", "123456"))


def test_a_server_that_comes_back_is_asked_again() -> None:
    """It kept its data on disk; one that lost them has a list of another length."""
    with start_redis(None, "--appendonly", "yes", "--appendfsync", "always") as server:
        with redis.Redis.from_url(server.url) as client:
            client.rpush("list", *ENTRIES)
        source = redis_list(server.url, "list", patience=RetryPolicy(30, 0.05, 0.2))
        assert source[0] == b"one"
        server.stop()
        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(lambda: source[3])
            time.sleep(0.2)
            assert not answer.done()
            server.start()
            assert answer.result() == b"four"


def test_a_server_that_hangs_or_is_gone_ends_the_wait() -> None:
    with start_redis() as server:
        with redis.Redis.from_url(server.url) as client:
            client.rpush("list", *ENTRIES)
        source = redis_list(server.url, "list", timeout_s=0.1, patience=HASTY)
        server.pause()
        with pytest.raises(SourceLost, match=r"(?i)cannot be asked for 'list': .*It was tried 3"):
            source[0]
        server.resume()
        assert source[0] == b"one"
        server.stop()
        with pytest.raises(SourceLost, match=r"It was tried 3 times"):
            source[0]
        with pytest.raises(SourceLost, match=r"It was tried 3 times"):
            redis_list(server.url, "list", patience=HASTY)
