"""Files side by side in memory: one stretch of addresses, into which shards are mapped.

Python maps each file somewhere. Here a stretch is reserved for all of them, and each is mapped at
its own slot when it is first needed, so that the rows of all shards are rows of one tensor and a
batch is one gather, however many shards it comes from. A reserved address costs nothing until a
file is mapped there, and reading one before that kills the process: whoever looks into the region
makes sure first. Linux and its like only (mmap with MAP_FIXED).
"""

import ctypes
import mmap
import os
import weakref
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shoal.errors import UsageError

GRANULE = 64 << 10  # the largest page of any machine this runs on
_MAP_NORESERVE, _MAP_FIXED, _PROT_NONE = 0x4000, 0x10, 0
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    *(ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_int64,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Region:
    """Slots of `slot_bytes`, a multiple of GRANULE; `content` are the bytes of all of them."""

    def __init__(self, num_slots: int, slot_bytes: int):
        assert slot_bytes % GRANULE == 0, slot_bytes
        self.slot_bytes = slot_bytes
        size = num_slots * slot_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        # A granule more, so that the region can begin where one does.
        address = _map(0, size + GRANULE, _PROT_NONE, flags, -1)
        self._start = -(-address // GRANULE) * GRANULE
        released = weakref.finalize(self, _libc.munmap, address, size + GRANULE)
        released.atexit = False  # the system does it, when nobody can look any more
        content = (ctypes.c_uint8 * size).from_address(self._start)
        self.content: NDArray[np.uint8] = np.frombuffer(memoryview(content), np.uint8)

    def map(self, slot: int, path: Path, num_bytes: int) -> memoryview:
        """Map the first bytes of a file into a slot, to be read only."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            start = self._start + slot * self.slot_bytes
            _map(start, num_bytes, mmap.PROT_READ, mmap.MAP_PRIVATE | _MAP_FIXED, descriptor)
        finally:
            os.close(descriptor)
        first = slot * self.slot_bytes
        return self.content.data[first : first + num_bytes]

    def unmap(self, slot: int) -> None:
        """Give the file back; nobody may look into the slot from now on."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        _map(self._start + slot * self.slot_bytes, self.slot_bytes, _PROT_NONE, flags, -1)


def mapped(path: Path) -> memoryview:
    """A whole file, to be read only, wherever there is room for it.

    Without a descriptor, of which a process has some thousand: Python's own map keeps one.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        address = _map(0, size, mmap.PROT_READ, mmap.MAP_PRIVATE, descriptor)
    finally:
        os.close(descriptor)
    content = (ctypes.c_uint8 * size).from_address(address)
    released = weakref.finalize(content, _libc.munmap, address, size)
    released.atexit = False
    return np.frombuffer(memoryview(content), np.uint8).data.toreadonly()


def _map(start: int, size: int, rights: int, flags: int, descriptor: int) -> int:
    address: int | None = _libc.mmap(start, size, rights, flags, descriptor, 0)
    if address is None or address == _FAILED:
        why = os.strerror(ctypes.get_errno())
        raise UsageError(
            f"{size} bytes of address space cannot be had: {why}. A set of shards is mapped as a "
            "whole; raise the limit (ulimit -v, vm.max_map_count), or build fewer, larger shards."
        )
    return address
