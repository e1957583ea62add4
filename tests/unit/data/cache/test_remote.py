"""Layers on servers: a server that goes away costs a warning and a bounded wait, and may return."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from shoal import logs
from shoal.data.cache import remote
from shoal.data.cache.layers import sealed
from shoal.data.cache.memcached import memcached_layer
from shoal.data.cache.redis import redis_layer
from shoal.data.cache.remote import Connection, ServerLayer, ServerUnavailable, ValueRejected
from shoal.errors import UsageError
from shoal.testing.caches import CONTENT, KEY, OTHER
from tests.support.leaks import wait_until
from tests.support.servers import Server, start_memcached, start_redis

PASSWORD = "hidden-word"


class Time:
    """A clock that goes on when told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Fake:
    """A server that can be told to be away, to be forgetful of connections, or to refuse."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.is_away = False
        self.num_breaks = 0  # of connections, still to come
        self.num_connected = 0
        self.num_asked = 0

    def connect(self) -> Connection:
        self.num_connected += 1
        return self

    def read(self, name: str) -> bytes | None:
        self._ask()
        return self.values.get(name)

    def write(self, name: str, value: bytes) -> None:
        self._ask()
        if len(value) > 5000:
            raise ValueRejected("too large")
        self.values[name] = value

    def close(self) -> None:
        pass

    def _ask(self) -> None:
        self.num_asked += 1
        if self.num_breaks:
            self.num_breaks -= 1
            raise ServerUnavailable("connection reset")
        if self.is_away:
            raise ServerUnavailable("connection refused")


@pytest.fixture
def server() -> Fake:
    return Fake()


@pytest.fixture
def clock() -> Time:
    return Time()


@pytest.fixture
def layer(server: Fake, clock: Time) -> ServerLayer:
    return ServerLayer("on a fake", server.connect, clock)


def test_a_broken_connection_is_made_anew_without_a_word(
    layer: ServerLayer, server: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    layer.put(KEY, CONTENT)
    server.num_breaks = 1
    assert layer.get(KEY) == CONTENT
    assert server.num_connected == 2
    assert not caplog.records


def test_a_server_that_is_away_is_left_alone_for_longer_and_longer(
    layer: ServerLayer, server: Fake, clock: Time, caplog: pytest.LogCaptureFixture
) -> None:
    layer.put(KEY, CONTENT)
    server.is_away = True
    asked: list[float] = []
    for _ in range(300):
        before = server.num_asked
        assert layer.get(KEY) is None
        assert not layer.put(OTHER, CONTENT)
        if server.num_asked > before:
            asked.append(clock.now)
        clock.now += 1
    assert asked == [0, 1, 3, 7, 15, 31, 63, 123, 183, 243]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert logs.for_the_screen.count(caplog.records[0].getMessage()) == 1
    server.is_away = False
    clock.now += 60
    assert layer.get(KEY) == CONTENT
    server.is_away = True
    layer.get(KEY)
    assert layer._pause_s == 1.0  # it begins anew
    assert len(caplog.records) == 1


def test_what_is_refused_is_told_once_and_others_are_kept(
    layer: ServerLayer, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        assert not layer.put(KEY, bytes(10_000))
    assert layer.put(OTHER, CONTENT)
    assert layer.get(OTHER) == CONTENT
    assert len(caplog.records) == 1 and "too large" in caplog.text


def test_a_value_that_is_not_what_was_put_is_told_once(
    layer: ServerLayer, server: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    for value in (b"", b"short", sealed(OTHER, CONTENT), sealed(KEY, CONTENT)[:-1]):
        server.values[f"shoal:{KEY.hex()}"] = value
        assert layer.get(KEY) is None
    assert len(caplog.records) == 1


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.data.cache.redis.TIMEOUT_S", 0.1)
    monkeypatch.setattr("shoal.data.cache.memcached.TIMEOUT_S", 0.1)
    monkeypatch.setattr(remote, "_LEAST_PAUSE_S", 0.0)
    monkeypatch.setattr(remote, "_MOST_PAUSE_S", 0.0)


@pytest.fixture(params=["redis", "memcached"])
def real(request: pytest.FixtureRequest, quick: None) -> Iterator[tuple[Server, ServerLayer]]:
    start, make = {
        "redis": (start_redis, redis_layer),
        "memcached": (start_memcached, memcached_layer),
    }[request.param]
    with start() as server:
        layer = make(server.url)
        yield server, layer
        layer.close()


def test_a_real_server_goes_away_and_comes_back(
    real: tuple[Server, ServerLayer], caplog: pytest.LogCaptureFixture
) -> None:
    server, layer = real
    assert layer.put(KEY, CONTENT) and layer.get(KEY) == CONTENT
    server.stop()
    for _ in range(3):
        assert layer.get(KEY) is None
        assert not layer.put(KEY, CONTENT)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    server.start()
    assert layer.get(KEY) is None  # it has lost everything
    assert layer.put(KEY, CONTENT)
    assert layer.get(KEY) == CONTENT


def is_stopped(server: Server) -> bool:
    """All its threads: the signal takes a moment to reach them."""
    assert server._process is not None
    threads = Path(f"/proc/{server._process.pid}/task").glob("*/stat")
    return all(path.read_text().rpartition(")")[2].split()[0] == "T" for path in threads)


def test_a_real_server_that_hangs_is_not_waited_for(
    real: tuple[Server, ServerLayer], caplog: pytest.LogCaptureFixture
) -> None:
    server, layer = real
    assert layer.put(KEY, CONTENT)
    server.pause()
    assert wait_until(lambda: is_stopped(server), 5.0)
    assert layer.get(KEY) is None
    assert not layer.put(OTHER, CONTENT)
    server.resume()
    assert layer.get(KEY) == CONTENT  # and not the answer to an older question
    assert layer.get(OTHER) is None or layer.get(OTHER) == CONTENT
    assert len(caplog.records) == 1


def test_memcached_says_what_is_too_large(quick: None, caplog: pytest.LogCaptureFixture) -> None:
    with start_memcached() as server:
        layer = memcached_layer(server.url)
        assert not layer.put(KEY, bytes(2_000_000))
        assert layer.put(OTHER, CONTENT) and layer.get(OTHER) == CONTENT
        assert "did not keep a sample" in caplog.text
        layer.close()


def test_a_full_redis_is_still_read(quick: None, caplog: pytest.LogCaptureFixture) -> None:
    with start_redis() as server:
        layer = redis_layer(server.url)
        assert layer.put(KEY, CONTENT)
        client = redis.Redis.from_url(server.url)
        client.config_set("maxmemory", "1mb")
        assert not layer.put(OTHER, bytes(2_000_000)) or not layer.put(OTHER, CONTENT)
        assert layer.get(KEY) == CONTENT
        assert "did not keep a sample" in caplog.text
        client.close()
        layer.close()


def test_a_redis_value_of_another_kind_is_a_miss(
    quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    with start_redis() as server, redis.Redis.from_url(server.url) as client:
        client.lpush(f"shoal:{KEY.hex()}", "one")
        layer = redis_layer(server.url)
        assert layer.get(KEY) is None
        assert "did not give a sample" in caplog.text
        layer.close()


def test_wrong_credentials_are_refused_before_the_run(caplog: pytest.LogCaptureFixture) -> None:
    with start_redis(PASSWORD) as server:
        layer = redis_layer(server.url)
        assert layer.put(KEY, CONTENT) and layer.get(KEY) == CONTENT
        layer.close()
        for url in (
            server.url.replace(f":{PASSWORD}@", ""),
            server.url.replace(PASSWORD, PASSWORD + "x"),
        ):
            with pytest.raises(UsageError, match="refuses") as refused:
                redis_layer(url)
            assert PASSWORD not in str(refused.value)
        server.stop()
        redis_layer(server.url).close()
    assert "does not answer yet" in caplog.text
    assert PASSWORD not in caplog.text


def test_a_url_that_is_none_is_refused() -> None:
    wrong = ["", "localhost", "http://localhost:1", "redis://[", "redis"]
    for url in (*wrong, f"redis://host:{PASSWORD}"):
        with pytest.raises(UsageError, match="not a URL") as refused:
            redis_layer(url)
        assert PASSWORD not in str(refused.value)


def test_an_address_that_is_none_is_refused() -> None:
    for address in ("", "localhost", ":11211", "host:0", "host:99999", "host:x"):
        with pytest.raises(UsageError, match="not an address"):
            memcached_layer(address)
