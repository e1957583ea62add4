"""Memory that the processes of one host share, without a name on any disk.

A segment is an anonymous file of the kernel (memfd). Another process opens it through the file
descriptor of one that holds it, `/proc/<pid>/fd/<fd>`, so nothing has to be cleared away: it is
gone with the last process that holds it, however that ends. Its size is sealed, because a peer
that shrank it would end every other with a bus error. Not for processes of two hosts or two
containers: a random name distinguishes them, and `open` raises NotShared.

Linux only. The pages are there before the first use, large ones where the kernel has them
(`system/huge_pages.py`): creating costs as much as writing zeros.
"""

import fcntl
import mmap
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import msgspec
import psutil
import torch

from shoal.errors import ShoalError
from shoal.events.meters import memory_left_bytes
from shoal.faults import faultpoint
from shoal.system.huge_pages import map_shared, use_huge_pages

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
MOST_PID = 1 << 22  # the kernel's own limit
MOST_FD = (1 << 31) - 1


class NotShared(ShoalError):
    """This memory cannot be had or reached; the peers must send the bytes instead."""


class SegmentHandle(msgspec.Struct, frozen=True):
    """How another process of this host finds a segment. It holds while process `pid` has it open.

    `name` is random: on another host, or in another container, the same process number may hold
    another segment of the same size.
    """

    pid: int
    fd: int
    num_bytes: int
    name: str = ""


class SharedSegment:
    """Memory that processes of one host share; gone with the last of them, however they end.

    `bytes` is all of it, on the boundary of a page; `segment.bytes[a:b].view(torch.float32)` is a
    tensor in it. A forked child holds it too, and may close it without harm to its parent.
    """

    def __init__(self, fd: int, num_bytes: int, name: str, at_once: bool = True):
        """Take over the descriptor of a segment; `create` and `open` make one."""
        self._name = name
        self.num_bytes = num_bytes
        # Tensors alone hold the mapping, so it ends with the last of them and never under one.
        self.bytes = torch.frombuffer(map_shared(fd, num_bytes, at_once), dtype=torch.uint8)
        self._fd = fd  # last: until here the caller closes it

    @classmethod
    def create(cls, num_bytes: int) -> Self:
        """Zeros, at least as many as asked for: whole pages."""
        assert num_bytes > 0
        num_bytes += -num_bytes % mmap.PAGESIZE
        _check_free(num_bytes)
        name = f"shoal-{secrets.token_hex(8)}"
        fd = -1
        try:
            faultpoint("memory.share")
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, num_bytes)
            use_huge_pages(fd, num_bytes)
            os.posix_fallocate(fd, 0, num_bytes)  # what is small still
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            return cls(fd, num_bytes, name)
        except OSError as error:
            _close(fd)
            raise NotShared(
                f"The system does not give {num_bytes / 1e6:,.1f} MB of memory to share: {error}. "
                "Free memory, or raise the limit of this container."
            ) from error

    @classmethod
    def open(cls, place: SegmentHandle, most_bytes: int, at_once: bool = True) -> Self:
        """The segment that another process holds; NotShared if it is not the one that was meant.

        Pages are mapped `at_once`, or each with its first use.
        """
        _check_numbers(place, most_bytes)
        path = f"/proc/{place.pid}/fd/{place.fd}"
        fd = -1
        try:
            # Looked at before it is opened: opening a device or a pipe may have effects.
            _check_link(path, place)
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
            # And after, since the other process may have closed it and opened something else.
            _check_link(f"/proc/self/fd/{fd}", place)
            _check_seals(fd, place)
            return cls(fd, place.num_bytes, place.name, at_once)
        except NotShared:
            _close(fd)
            raise
        except (OSError, ValueError) as error:
            _close(fd)
            raise NotShared(
                f"Process {place.pid} has no memory to share with this one as its descriptor "
                f"{place.fd}: {error}. It may be gone, or run on another host, in another "
                "container or as another user; bytes must be sent to it instead."
            ) from error

    @property
    def place(self) -> SegmentHandle:
        """Where others find it: at this process, which in a forked child is the child."""
        return SegmentHandle(os.getpid(), self._fd, self.num_bytes, self._name)

    @contextmanager
    def lock(self, number: int) -> Iterator[None]:
        """Keep out processes that lock the same number. One that dies gives its locks up."""
        fcntl.lockf(self._fd, fcntl.LOCK_EX, 1, number)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, number)

    def close(self) -> None:
        """Release it. Tensors that still view it keep the memory, until the last one is gone."""
        fd, self._fd = self._fd, -1
        _close(fd)
        self.bytes = torch.empty(0, dtype=torch.uint8)

    def __del__(self) -> None:
        _close(getattr(self, "_fd", -1))


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


def _check_free(num_bytes: int) -> None:
    """Beforehand, since the kernel does not refuse: it ends processes, of anyone, to make room."""
    left = memory_left_bytes()  # to this container
    free = min(psutil.virtual_memory().available, sys.maxsize if left is None else left)
    if num_bytes > free:
        raise NotShared(
            f"{num_bytes / 1e6:,.1f} MB of memory are to be shared, and {free / 1e6:,.1f} MB are "
            "free. Free memory, or spread the run over more machines."
        )


def _check_numbers(place: SegmentHandle, most_bytes: int) -> None:
    if not (0 < place.pid <= MOST_PID and 0 <= place.fd <= MOST_FD):
        raise NotShared(
            f"There is no process {place.pid} with a descriptor {place.fd}: the message that names "
            "shared memory is wrong. Run the same version of Shoal in all processes."
        )
    if not 0 < place.num_bytes <= most_bytes:
        raise NotShared(
            f"Process {place.pid} offers {place.num_bytes:,} bytes of shared memory; between 1 and "
            f"{most_bytes:,} are allowed. Run the same recipe and plan in all processes."
        )


def _check_link(path: str, place: SegmentHandle) -> None:
    """What the kernel shows of an anonymous file is its name, so a file on a disk is seen here."""
    if os.readlink(path) != f"/memfd:{place.name} (deleted)":
        raise NotShared(
            f"Descriptor {place.fd} of process {place.pid} is not the shared memory that was "
            "meant. It was closed, or that process runs on another host or in another container; "
            "bytes must be sent to it instead."
        )


def _check_seals(fd: int, place: SegmentHandle) -> None:
    """With its seals, the size that is seen here is its size for good."""
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
        raise NotShared(
            f"The memory that process {place.pid} offers could still change its size, which would "
            "end this process. Run the same version of Shoal in all processes."
        )
    num_bytes = os.fstat(fd).st_size
    if num_bytes != place.num_bytes:
        raise NotShared(
            f"Process {place.pid} offers {place.num_bytes:,} bytes of shared memory, and there are "
            f"{num_bytes:,}. Run the same version of Shoal in all processes."
        )
