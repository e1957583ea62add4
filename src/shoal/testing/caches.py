"""Tests that every layer of a cache must pass.

    class TestMine(LayerConformance):
        @pytest.fixture
        def place(self):
            return Place(open=lambda: MyLayer(...), read=..., write=...)

A new layer gives that one fixture and inherits the tests. They are about what a layer promises:
what it gives back is what was put under that key, or nothing, whatever happened to its bytes and to
the processes that wrote them. It may forget; so the tests put little, and expect it to be kept.
"""

import os
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from shoal.data.cache.layers import CacheLayer, Content

CONTENT = bytes(range(256)) * 5
SIZES = (0, 1, 15, 16, 17, 63, 64, 65, 4096, 10_001)


class Place(NamedTuple):
    """Where the layer under test keeps things."""

    open: Callable[[], CacheLayer]  # again, as another process would
    read: Callable[[bytes], bytes]  # the stored bytes of a key, with all that the layer adds
    write: Callable[[bytes, bytes], None]  # as many bytes in their place


def key_of(number: int) -> bytes:
    """Keys as hashes are: unlike in all their bytes."""
    return ((number + 1) * 0x9E3779B97F4A7C15F39CC0605CEDC835 % 2**128).to_bytes(16, "little")


KEY, OTHER = key_of(7), key_of(8)


def content_of(number: int, size: int = 500) -> bytes:
    return bytes((number * 31 + at * 7) % 256 for at in range(size))


def get(layer: CacheLayer, key: bytes) -> bytes | None:
    """What the layer gives, as bytes to compare."""
    found = layer.get(key)
    return None if found is None else bytes(found)


def in_child(work: Callable[[], bool]) -> bool:
    """Whether it holds in a forked process."""
    pid = os.fork()
    if pid == 0:
        code = 2
        try:
            code = 0 if work() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


class LayerConformance:
    """Inherit, and give `place`."""

    @pytest.fixture
    def place(self) -> Place:
        raise NotImplementedError("say how the layer is opened and damaged")

    @pytest.fixture
    def layer(self, place: Place) -> Iterator[CacheLayer]:
        layer = place.open()
        yield layer
        layer.close()

    @pytest.fixture
    def second(self, place: Place) -> Iterator[CacheLayer]:
        layer = place.open()
        yield layer
        layer.close()

    def test_what_was_not_put_is_not_there(self, layer: CacheLayer) -> None:
        assert get(layer, KEY) is None
        layer.put(OTHER, CONTENT)
        assert get(layer, KEY) is None

    def test_what_was_put_comes_back(self, layer: CacheLayer) -> None:
        for size in SIZES:
            assert layer.put(key_of(size), content_of(1, size))
            assert get(layer, key_of(size)) == content_of(1, size)

    def test_any_buffer_is_taken(self, layer: CacheLayer) -> None:
        for number, kind in enumerate((bytes, bytearray, memoryview)):
            assert layer.put(key_of(number), kind(CONTENT))
            assert get(layer, key_of(number)) == CONTENT

    def test_parts_are_kept_as_one(self, layer: CacheLayer) -> None:
        parts: list[Content] = [b"", CONTENT[:7], bytearray(CONTENT[7:64])]
        parts += [memoryview(CONTENT)[64:], b""]
        assert layer.put(KEY, *parts)
        assert get(layer, KEY) == CONTENT
        single = [CONTENT[at : at + 1] for at in range(len(CONTENT))]
        assert layer.put(OTHER, *single)
        assert get(layer, OTHER) == CONTENT

    def test_what_comes_back_is_the_callers_own(self, layer: CacheLayer) -> None:
        given = bytearray(CONTENT)
        layer.put(KEY, given)
        given[:] = bytes(len(given))
        found = layer.get(KEY)
        assert found is not None and bytes(found) == CONTENT
        found[:] = bytes(len(found))
        assert get(layer, KEY) == CONTENT

    def test_putting_again_changes_nothing(self, layer: CacheLayer, second: CacheLayer) -> None:
        for each in (layer, second, layer):
            assert each.put(KEY, CONTENT)
        assert get(layer, KEY) == get(second, KEY) == CONTENT

    def test_all_who_opened_it_share_it(self, layer: CacheLayer, second: CacheLayer) -> None:
        layer.put(KEY, CONTENT)
        second.put(OTHER, CONTENT[::-1])
        assert get(second, KEY) == CONTENT
        assert get(layer, OTHER) == CONTENT[::-1]

    def test_many_are_kept_apart(self, layer: CacheLayer) -> None:
        for number in range(200):
            layer.put(key_of(number), content_of(number))
        for number in range(200):
            assert get(layer, key_of(number)) in (content_of(number), None)

    def test_a_forked_process_shares_it(self, layer: CacheLayer) -> None:
        layer.put(KEY, CONTENT)
        assert in_child(lambda: get(layer, KEY) == CONTENT and layer.put(OTHER, b"of the child"))
        assert get(layer, OTHER) == b"of the child"
        assert get(layer, KEY) == CONTENT

    def test_threads_share_it(self, layer: CacheLayer) -> None:
        wrong: list[int] = []

        def work(first: int) -> None:
            for number in range(first, first + 40):
                layer.put(key_of(number), content_of(number))
                if get(layer, key_of(number)) not in (content_of(number), None):
                    wrong.append(number)

        threads = [threading.Thread(target=work, args=(10 * n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong

    def test_a_flipped_bit_is_a_miss(self, place: Place, layer: CacheLayer) -> None:
        layer.put(KEY, CONTENT)
        stored = place.read(KEY)
        for at in range(0, len(stored), 7):
            flipped = bytearray(stored)
            flipped[at] ^= 1 << at % 8
            place.write(KEY, bytes(flipped))
            # Bytes that fill up a place do not count; then it is as it was.
            assert get(layer, KEY) in (None, CONTENT)
            assert layer.put(KEY, CONTENT)
            assert get(layer, KEY) == CONTENT
            stored = place.read(KEY)

    def test_every_bit_of_the_content_counts(self, place: Place, layer: CacheLayer) -> None:
        layer.put(KEY, CONTENT)
        start = place.read(KEY).index(CONTENT)
        for at in range(0, len(CONTENT), 11):
            flipped = bytearray(place.read(KEY))
            flipped[start + at] ^= 0x10
            place.write(KEY, bytes(flipped))
            assert get(layer, KEY) is None
            assert layer.put(KEY, CONTENT)
            start = place.read(KEY).index(CONTENT)

    def test_another_keys_value_is_a_miss(self, place: Place, layer: CacheLayer) -> None:
        layer.put(KEY, CONTENT)
        layer.put(OTHER, CONTENT[::-1])
        first, second = place.read(KEY), place.read(OTHER)
        place.write(KEY, second)
        place.write(OTHER, first)
        assert get(layer, KEY) is None
        assert get(layer, OTHER) is None

    def test_nothing_but_zeros_is_a_miss(self, place: Place, layer: CacheLayer) -> None:
        layer.put(KEY, CONTENT)
        place.write(KEY, bytes(len(place.read(KEY))))
        assert get(layer, KEY) is None
        assert layer.put(KEY, CONTENT)
        assert get(layer, KEY) == CONTENT

    def test_it_can_be_closed_again(self, layer: CacheLayer, second: CacheLayer) -> None:
        layer.put(KEY, CONTENT)
        layer.close()
        layer.close()
        assert get(second, KEY) == CONTENT
