"""Processes that fork: what a child does first, and what it must not share with its parent.

Ranks and loaders are forks, so whatever a recipe has opened is in several processes at once. A
connection serves one of them, and a lock that a thread held while another forked would never be
free. What must be undone in the child at once, before it runs anything, is `data/cache/forks.py`'s.
"""

import ctypes
import math
import mmap
import os
import select
import signal
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Generic, NamedTuple, TypeVar

_PR_SET_PDEATHSIG = 1

Made = TypeVar("Made")


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends. Linux only."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


_held: set[int] = set()  # descriptors
_hands_on = False  # whether the fork under way is one of ours


def hold(descriptor: int) -> None:
    """Keep a descriptor (of a lock, say) in this process and in those of the run that it forks:
    what a recipe forks may outlive them, and must not hold it."""
    _held.add(descriptor)


def let_go(descriptor: int) -> None:
    _held.discard(descriptor)


@contextmanager
def handing_on() -> Iterator[None]:
    """Around the fork of a process of the run."""
    global _hands_on
    _hands_on = True
    try:
        yield
    finally:
        _hands_on = False


def _close_held() -> None:
    if not _hands_on:
        for descriptor in _held:
            with suppress(OSError):
                os.close(descriptor)
        _held.clear()


os.register_at_fork(after_in_child=_close_held)


def stop_signals() -> tuple[signal.Signals, ...]:
    """Those that ask a command to stop. Who started it under nohup wants it to outlive the
    terminal."""
    hangs_up = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, *((signal.SIGHUP,) if hangs_up else ()))


@contextmanager
def giving_way() -> Iterator[None]:
    """Let this thread, if it sleeps here, interrupt nobody when it is woken.

    For who waits for a process of this host: else the first answer may stop that process, which
    has more of them to give, and the woken one runs in its place. So it runs when a core is free,
    or at the end of somebody's slice. What the user chose stays. Cost: some 2 us.
    """
    before = os.sched_getscheduler(0)
    if before == os.SCHED_OTHER:
        _set_scheduler(os.SCHED_BATCH)
    try:
        yield
    finally:
        if before == os.SCHED_OTHER:
            _set_scheduler(before)


def _set_scheduler(policy: int) -> None:
    with suppress(OSError):  # where a sandbox forbids it
        os.sched_setscheduler(0, policy, os.sched_param(0))


def readable(descriptors: Iterable[int], timeout_s: float | None = None) -> list[int]:
    """Those that can be read, or have come to their end. (`select` takes none above 1,023.)"""
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    ready = poller.poll(None if timeout_s is None else math.ceil(1000 * timeout_s))
    return [descriptor for descriptor, _ in ready]


class Work:
    """What this process has got done, as a number that grows: who waits does nothing.

    Counted in whatever thread does it; that one of two at once may be missed does not matter.
    """

    done = 0


WORK = Work()


class _Slot(Generic[Made]):
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.made: Made | None = None


class PerProcess(Generic[Made]):
    """Something that each process makes for itself, when it first asks: a connection, a lock.

    What a parent made stays referenced in the child and is never closed by it. The locks are of
    the process too, so that a fork waits for no thread that it does not have.
    """

    def __init__(self, make: Callable[[], Made]):
        self._make = make
        self._slots: dict[int, _Slot[Made]] = {}

    def get(self) -> Made:
        slot = self._slots.get(os.getpid()) or self._slots.setdefault(os.getpid(), _Slot())
        if slot.made is None:
            with slot.lock:
                if slot.made is None:  # another thread may have been quicker
                    slot.made = self._make()
        return slot.made


class Wait(NamedTuple):
    """Samples that a process waits for: the first, how many, since when, and for how long."""

    first: int
    num_samples: int
    since_s: float  # by the monotonic clock, which processes of a host share
    limit_s: float


class Notice:
    """What one process waits for, on a page that its parent reads though the child hangs."""

    _FORM = struct.Struct("qqdd")

    def __init__(self) -> None:
        self._page: mmap.mmap | None = None
        self._writer = 0

    def open(self) -> None:
        """In the parent, before it forks."""
        self._page = mmap.mmap(-1, mmap.PAGESIZE)

    def close(self) -> None:
        self._page = None

    def begin(self) -> None:
        """In the child: from now on what it waits for is noted, and nothing of its own forks."""
        self._writer = os.getpid()

    def end(self) -> None:
        self._writer = 0

    def write(self, wait: Wait | None) -> None:
        if self._writer and self._page is not None and self._writer == os.getpid():
            self._FORM.pack_into(self._page, 0, *(wait or (0, 0, 0.0, 0.0)))

    def read(self) -> Wait | None:
        if self._page is None:
            return None
        found = Wait(*self._FORM.unpack_from(self._page))
        return found if found.num_samples else None


NOTICE = Notice()


def how_it_ended(status: int) -> str:
    """An exit status in words."""
    if status < 0:
        try:
            return f"was killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"was killed by signal {-status}"
    return f"exited with code {status}"
