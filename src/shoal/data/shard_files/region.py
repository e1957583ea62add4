"""Files side by side in memory: one stretch of addresses, into which shards are mapped.

Python maps each file somewhere. Here a stretch is reserved for all of them, and each is mapped at
its own slot when it is first needed, so that the rows of all shards are rows of one tensor and a
batch is one gather, however many shards it comes from. A reserved address costs nothing until a
file is mapped there, and reading one before that kills the process: a reader of the region
makes sure first. Linux and its like only (mmap with MAP_FIXED).
"""

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shoal.errors import UsageError
from shoal.system.huge_pages import MAP_FIXED, MAP_NORESERVE, PROT_NONE, buffer_at, map_at, reserve

GRANULE = 64 << 10  # the largest page of any machine this runs on


class MappedRegion:
    """Slots of `slot_bytes`, a multiple of GRANULE; `content` are the bytes of all of them."""

    def __init__(self, num_slots: int, slot_bytes: int):
        assert slot_bytes % GRANULE == 0, slot_bytes
        self.slot_bytes = slot_bytes
        size = num_slots * slot_bytes
        with _room_for(size):
            address, self._start = reserve(size, GRANULE)
        content = buffer_at(self._start, size, address, size + GRANULE)
        self.content: NDArray[np.uint8] = np.frombuffer(memoryview(content), np.uint8)

    def map(self, slot: int, path: Path, num_bytes: int) -> memoryview:
        """Map the first bytes of a file into a slot, to be read only."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            start = self._start + slot * self.slot_bytes
            with _room_for(num_bytes):
                map_at(start, num_bytes, mmap.PROT_READ, mmap.MAP_PRIVATE | MAP_FIXED, descriptor)
        finally:
            os.close(descriptor)
        first = slot * self.slot_bytes
        return self.content.data[first : first + num_bytes]

    def unmap(self, slot: int) -> None:
        """Unmap the file; the slot must not be read from now on."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED
        with _room_for(self.slot_bytes):
            map_at(self._start + slot * self.slot_bytes, self.slot_bytes, PROT_NONE, flags, -1)


def map_file(path: Path) -> memoryview:
    """A whole file, to be read only, wherever there is room for it.

    Without a descriptor, of which a process has some thousand: Python's own map keeps one.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        with _room_for(size):
            address = map_at(0, size, mmap.PROT_READ, mmap.MAP_PRIVATE, descriptor)
    finally:
        os.close(descriptor)
    content = buffer_at(address, size, address, size)
    return np.frombuffer(memoryview(content), np.uint8).data.toreadonly()


@contextmanager
def _room_for(size: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{size} bytes of address space cannot be had: {error.strerror}. A set of shards is "
            "mapped as a whole; raise the limit (ulimit -v, vm.max_map_count), or build fewer, "
            "larger shards."
        ) from error
