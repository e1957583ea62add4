"""Locks on numbers, between processes and threads, that the kernel takes back when a holder dies.

A lock is a byte of a file, far behind its end if need be: Linux's locks of open file descriptions.
The numbers are free for any use; the cache locks 0 to reserve room and a number made from a key
while a sample is being decoded. No process waits inside the kernel: a try succeeds or does not,
so that a process that was stopped with a lock in hand delays the others for as long as they choose.

Cost: a few microseconds to lock and as much to unlock. Not for thousands held at once: the kernel
walks a list of them.
"""

import errno
import fcntl
import os
import struct
import threading
import time
import weakref

from shoal.data.cache import forks

_FORM = struct.Struct("@hhqqi4x")  # of Linux's struct flock on 64 bits
_PAUSE_S = 0.0002
NUM_LOCKS = 1 << 62  # numbers lie below it


class RangeLocks:
    """The locks of one file, as one process holds them."""

    def __init__(self, descriptor: int):
        self._descriptor = _opened_anew(descriptor)
        self._guard = threading.Lock()
        self._held: set[int] = set()  # the kernel does not tell threads apart
        self._finalizer = weakref.finalize(self, os.close, self._descriptor)
        forks.watch(self)

    def try_lock(self, number: int) -> bool:
        with self._guard:
            if number in self._held:
                return False
            if not self._set(fcntl.F_WRLCK, number):
                return False
            self._held.add(number)
            return True

    def lock_within(self, number: int, patience_s: float) -> bool:
        """Try for a while; whether it is locked now."""
        deadline = time.monotonic() + patience_s
        while not self.try_lock(number):
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE_S)
        return True

    def unlock(self, number: int) -> None:
        with self._guard:
            self._held.discard(number)
            self._set(fcntl.F_UNLCK, number)

    def close(self) -> None:
        self._finalizer()

    def after_fork(self) -> None:
        """In the child: what the parent holds must not be the child's too."""
        if self._finalizer.detach() is None:
            return  # closed before
        inherited, self._descriptor = self._descriptor, _opened_anew(self._descriptor)
        os.close(inherited)
        self._guard, self._held = threading.Lock(), set()
        self._finalizer = weakref.finalize(self, os.close, self._descriptor)

    def _set(self, kind: int, number: int) -> bool:
        request = _FORM.pack(kind, os.SEEK_SET, number, 1, 0)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, request)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True


def _opened_anew(descriptor: int) -> int:
    """A description of our own: locks belong to these, and a fork shares those it inherits."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
