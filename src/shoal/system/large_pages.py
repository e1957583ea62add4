"""Maps of files at addresses of one's own choice, and large pages for memory that is shared.

A processor knows the places of some thousand pages. Memory in pages of 4 KiB has far more, and
whoever passes over it, or reads rows here and there, waits for places to be looked up: in a virtual
machine twice over. So a file of memory (memfd) is mapped where a large page could begin, and before
it is first used the kernel is asked to make its pages large (MADV_COLLAPSE, Linux 6.1), which needs
no setting of the machine. Where the kernel has none to give, pages stay small, and nothing else
differs.

Python's own mmap chooses no address. Linux and its like only.
"""

import ctypes
import mmap
import os
import weakref

LARGE_BYTES = 2 << 20  # of a large page, here and on most machines
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
    """The address where a file, or nothing yet, is mapped; OSError if there is no room."""
    address: int | None = _libc.mmap(start, size, rights, flags, descriptor, 0)
    if address is None or address == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return address


def bytes_at(start: int, size: int, address: int, mapped: int) -> "ctypes.Array[ctypes.c_uint8]":
    """Memory as a buffer; with the last who holds it, what is `mapped` from `address` on goes."""
    content = (ctypes.c_uint8 * size).from_address(start)
    released = weakref.finalize(content, _libc.munmap, address, mapped)
    released.atexit = False  # the system does it, when nobody can look any more
    return content


def reserve(size: int, boundary: int) -> tuple[int, int]:
    """Addresses for so many bytes: where they begin, and where the first on the boundary is.

    A boundary more is reserved than asked for. Nothing may be read there until a file is mapped.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    address = map_at(0, size + boundary, PROT_NONE, flags, -1)
    return address, -(-address // boundary) * boundary


def map_shared(descriptor: int, size: int, at_once: bool) -> "ctypes.Array[ctypes.c_uint8]":
    """A file to read and write; its pages are mapped `at_once`, or each with its first use."""
    address, start = reserve(size, LARGE_BYTES)
    flags = mmap.MAP_SHARED | MAP_FIXED | (mmap.MAP_POPULATE if at_once else 0)
    content = bytes_at(start, size, address, size + LARGE_BYTES)
    map_at(start, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor)
    return content


def enlarge_pages(descriptor: int, size: int) -> None:
    """Let a file of memory that is still empty have large pages, as far as there are any."""
    whole = size // LARGE_BYTES * LARGE_BYTES
    if whole:
        content = map_shared(descriptor, whole, at_once=False)
        for start in range(0, whole, LARGE_BYTES):  # nothing is made of no page at all
            os.posix_fallocate(descriptor, start, mmap.PAGESIZE)
        _libc.madvise(ctypes.addressof(content), whole, _COLLAPSE)  # refused: they stay small
