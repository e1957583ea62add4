"""Maps of files: on a boundary, seen by all, gone with the last holder; with large pages or not."""

import ctypes
import errno
import gc
import os
from collections.abc import Iterator

import pytest

from shoal.system import huge_pages
from shoal.system.huge_pages import HUGE_PAGE_BYTES, map_shared, use_huge_pages

SIZE = 3 * HUGE_PAGE_BYTES + 4096


@pytest.fixture
def file() -> Iterator[int]:
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, SIZE)
    yield descriptor
    os.close(descriptor)


def address_of(content: "ctypes.Array[ctypes.c_uint8]") -> int:
    return ctypes.addressof(content)


def has_map_at(address: int) -> bool:
    with open("/proc/self/maps", encoding="ascii") as maps:
        return any(line.startswith(f"{address:x}-") for line in maps)


def large_bytes_at(address: int) -> int:
    """How much of the map that begins there is in large pages."""
    with open("/proc/self/smaps", encoding="ascii") as maps:
        lines = iter(maps)
        for line in lines:
            if line.startswith(f"{address:x}-"):
                break
        for line in lines:
            if line.startswith("ShmemPmdMapped:"):
                return int(line.split()[1]) * 1024
    return 0


def test_two_maps_of_a_file_see_each_other(file: int) -> None:
    one, other = map_shared(file, SIZE, at_once=True), map_shared(file, SIZE, at_once=False)
    one[SIZE - 1] = 7
    assert other[SIZE - 1] == 7 and len(other) == SIZE
    assert address_of(one) % HUGE_PAGE_BYTES == address_of(other) % HUGE_PAGE_BYTES == 0


def test_a_map_goes_with_its_last_holder(file: int) -> None:
    content = map_shared(file, SIZE, at_once=False)
    address, view = address_of(content), memoryview(content)
    del content
    gc.collect()
    assert has_map_at(address)
    del view
    gc.collect()
    assert not has_map_at(address)


def test_what_cannot_be_mapped_is_an_error_and_leaves_nothing() -> None:
    with open("/proc/self/maps", encoding="ascii") as maps:
        before = len(maps.readlines())
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        map_shared(-1, SIZE, at_once=False)
    gc.collect()
    with open("/proc/self/maps", encoding="ascii") as maps:
        assert len(maps.readlines()) <= before


def test_pages_are_made_large(file: int) -> None:
    use_huge_pages(file, SIZE)
    content = map_shared(file, SIZE, at_once=True)
    found = large_bytes_at(address_of(content))
    if not found and huge_pages._libc.madvise(address_of(content), HUGE_PAGE_BYTES, 25):
        pytest.skip(f"the kernel gives none: {os.strerror(ctypes.get_errno())}")
    assert found == 3 * HUGE_PAGE_BYTES  # and the rest of it in small ones
    assert not any(bytes(content))


def test_a_small_file_is_left_alone(file: int) -> None:
    os.ftruncate(file, HUGE_PAGE_BYTES - 1)
    use_huge_pages(file, HUGE_PAGE_BYTES - 1)
    assert os.fstat(file).st_blocks == 0
