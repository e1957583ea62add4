"""Each layer keeps what a layer promises: what was put under a key, or nothing."""

import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pymemcache
import pytest
import redis

from shoal.data.cache.disk import DiskLayer
from shoal.data.cache.layers import SEAL_BYTES, TieredCache, sealed, unsealed
from shoal.data.cache.memcached import memcached_layer
from shoal.data.cache.memory import MemoryLayer, lay_out, read_geometry
from shoal.data.cache.redis import redis_layer
from shoal.testing.caches import CONTENT, KEY, OTHER, LayerConformance, Place
from tests.support.servers import Server, start_memcached, start_redis

ENTRY_BYTES = 64


@pytest.fixture(scope="module")
def redis_server() -> Iterator[Server]:
    with start_redis() as server:
        yield server


@pytest.fixture(scope="module")
def memcached_server() -> Iterator[Server]:
    with start_memcached() as server:
        yield server


@pytest.fixture(scope="module")
def kept_processes(
    request: pytest.FixtureRequest, kept_processes: Callable[[], frozenset[int]]
) -> Callable[[], frozenset[int]]:
    """The two servers outlive a test."""
    servers = [request.getfixturevalue(name) for name in ("redis_server", "memcached_server")]
    pids = frozenset(server._process.pid for server in servers)
    return lambda: kept_processes() | pids


class TestArea(LayerConformance):
    @pytest.fixture
    def place(self) -> Iterator[Place]:
        descriptor = os.memfd_create("test")
        lay_out(descriptor, 2 << 20)

        def read(key: bytes) -> bytes:
            # The last one: a bad one before it is not used again.
            places[key] = at = memory.rfind(key, arena)
            return memory[at : at + ENTRY_BYTES + len(CONTENT)]

        def write(key: bytes, content: bytes) -> None:
            memory[places[key] : places[key] + len(content)] = content

        places: dict[bytes, int] = {}
        shape = read_geometry(descriptor)
        assert shape is not None
        arena, memory = shape.arena, mmap.mmap(descriptor, shape.num_bytes)
        yield Place(lambda: MemoryLayer(os.dup(descriptor)), read, write)
        memory.close()
        os.close(descriptor)


class TestDisk(LayerConformance):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Place:
        def path(key: bytes) -> Path:
            return tmp_path / "kept" / key.hex()[:2] / key.hex()[2:]

        def write(key: bytes, content: bytes) -> None:
            path(key).write_bytes(content)

        return Place(
            lambda: DiskLayer(tmp_path / "kept", 10_000_000),
            lambda key: path(key).read_bytes(),
            write,
        )

    def test_a_file_that_was_cut_off_is_a_miss(self, place: Place, layer: DiskLayer) -> None:
        layer.put(KEY, CONTENT)
        stored = place.read(KEY)
        for size in (0, 1, SEAL_BYTES - 1, SEAL_BYTES, len(stored) - 1):
            place.write(KEY, stored[:size])
            assert layer.get(KEY) is None
            layer.put(KEY, CONTENT)
        place.write(KEY, stored + b"\0")
        assert layer.get(KEY) is None


class TestRedis(LayerConformance):
    @pytest.fixture
    def place(self, redis_server: Server) -> Iterator[Place]:
        client = redis.Redis.from_url(redis_server.url)
        client.flushall()

        def write(key: bytes, content: bytes) -> None:
            client.set(f"shoal:{key.hex()}", content)

        yield Place(
            lambda: redis_layer(redis_server.url),
            lambda key: client.get(f"shoal:{key.hex()}"),
            write,
        )
        client.close()


class TestMemcached(LayerConformance):
    @pytest.fixture
    def place(self, memcached_server: Server) -> Iterator[Place]:
        client = pymemcache.Client(memcached_server.address)
        client.flush_all(noreply=False)

        def write(key: bytes, content: bytes) -> None:
            client.set(f"shoal:{key.hex()}", content, noreply=False)

        yield Place(
            lambda: memcached_layer(memcached_server.url),
            lambda key: client.get(f"shoal:{key.hex()}"),
            write,
        )
        client.close()


def test_a_value_without_a_whole_seal_is_nothing() -> None:
    for size in (0, 1, SEAL_BYTES - 1):
        assert unsealed(KEY, sealed(KEY, b"")[:size]) is None


def test_the_seal_belongs_to_its_key() -> None:
    assert unsealed(KEY, sealed(KEY, CONTENT)) == CONTENT
    assert unsealed(OTHER, sealed(KEY, CONTENT)) is None


def test_what_is_found_far_away_moves_nearer(tmp_path: Path) -> None:
    near, far = (DiskLayer(tmp_path / name, 1 << 20) for name in ("near", "far"))
    far.put(KEY, CONTENT)
    row = TieredCache([near, far])
    assert near.get(KEY) is None
    assert row.get(KEY) == CONTENT
    assert near.get(KEY) == CONTENT
    assert row.get(OTHER) is None
    assert row.put(OTHER, b"to all")
    assert near.get(OTHER) == far.get(OTHER) == b"to all"
    row.close()
