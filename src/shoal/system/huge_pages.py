"""File mappings at chosen addresses, and huge pages for shared memory.

A TLB holds some thousand pages. Memory in pages of 4 KiB has far more, so a pass over it, or reads
of scattered rows, wait for page walks, twice over in a virtual machine. So a memory file (memfd)
is mapped at an address where a huge page can begin, and before its first use the kernel is asked
to make its pages huge (MADV_COLLAPSE, Linux 6.1), which needs no setting of the machine. If the
kernel has none to give, pages stay small, and nothing else differs.

Python's own mmap cannot choose an address. Linux only.
"""

import ctypes
import mmap
import os
import weakref

HUGE_PAGE_BYTES = 2 << 20  # here and on most machines
PROT_NONE, MAP_NORESERVE, MAP_FIXED = 0, 0x4000, 0x10
_COLLAPSE = 25  # of madvise
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
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def map_at(start: int, size: int, rights: int, flags: int, descriptor: int) -> int:
    """Map a file, or nothing yet with -1. Returns the address; OSError if there is no room."""
    address: int | None = _libc.mmap(start, size, rights, flags, descriptor, 0)
    if address is None or address == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return address


def buffer_at(start: int, size: int, address: int, mapped: int) -> "ctypes.Array[ctypes.c_uint8]":
    """Memory as a buffer; its last reference unmaps `mapped` bytes from `address` on."""
    content = (ctypes.c_uint8 * size).from_address(start)
    released = weakref.finalize(content, _libc.munmap, address, mapped)
    released.atexit = False  # the system does it
    return content


def reserve(size: int, boundary: int) -> tuple[int, int]:
    """Reserve addresses for so many bytes. Returns the first, and the first on the boundary.

    Reserves a boundary more than requested. Nothing may be read until a file is mapped there.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    address = map_at(0, size + boundary, PROT_NONE, flags, -1)
    return address, -(-address // boundary) * boundary


def map_shared(descriptor: int, size: int, at_once: bool) -> "ctypes.Array[ctypes.c_uint8]":
    """Map a file to read and write; its pages are mapped `at_once`, or each at its first use."""
    address, start = reserve(size, HUGE_PAGE_BYTES)
    flags = mmap.MAP_SHARED | MAP_FIXED | (mmap.MAP_POPULATE if at_once else 0)
    content = buffer_at(start, size, address, size + HUGE_PAGE_BYTES)
    map_at(start, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor)
    return content


def use_huge_pages(descriptor: int, size: int) -> None:
    """Give an empty memory file huge pages, as far as the kernel has any."""
    whole = size // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if whole:
        content = map_shared(descriptor, whole, at_once=False)
        for start in range(0, whole, HUGE_PAGE_BYTES):  # collapse needs at least one page
            os.posix_fallocate(descriptor, start, mmap.PAGESIZE)
        _libc.madvise(ctypes.addressof(content), whole, _COLLAPSE)  # if refused, they stay small
