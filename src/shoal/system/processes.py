"""Forked processes: what a child does first, and what it must not share with its parent.

Members and loaders are forks, so whatever a recipe has opened is in several processes at once. A
connection serves only one of them, and a lock that a thread held during the fork would never be
released. `data/cache/forks.py` undoes in the child what must not survive at all.
"""

import ctypes
import math
import mmap
import os
import select
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Generic, NamedTuple, NoReturn, TypeVar

_PR_SET_PDEATHSIG = 1

T = TypeVar("T")


def die_with_parent(parent: int, signal_number: int = signal.SIGKILL) -> None:
    """Ask the kernel to kill this process, or to send it another signal, when its parent ends.
    Linux only."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


_owned: set[int] = set()  # descriptors
_inherits = False  # whether the fork under way is of the run


def own_descriptor(descriptor: int) -> None:
    """Keep a descriptor (of a lock) in this process and in forked processes of the run only. Other
    forks close it: a process that a recipe forks may outlive the run."""
    _owned.add(descriptor)


def disown_descriptor(descriptor: int) -> None:
    _owned.discard(descriptor)


@contextmanager
def inherit_descriptors() -> Iterator[None]:
    """Around the fork of a process of the run, which inherits the owned descriptors."""
    global _inherits
    _inherits = True
    try:
        yield
    finally:
        _inherits = False


def _close_owned() -> None:
    if not _inherits:
        for descriptor in _owned:
            with suppress(OSError):
                os.close(descriptor)
        _owned.clear()


os.register_at_fork(after_in_child=_close_owned)


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that ask a command to stop; SIGHUP is not among them under nohup."""
    hangs_up = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, *((signal.SIGHUP,) if hangs_up else ()))


@contextmanager
def batch_scheduling() -> Iterator[None]:
    """Under SCHED_BATCH, so that this thread preempts no other when it wakes up.

    For a wait for a process of this host: else the first answer may preempt the process that has
    more answers to send. The thread runs when a core is free, or at the end of a time slice. A
    policy that the user chose is kept. Cost: some 2 us.
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
    """Descriptors that can be read, or are at their end. (`select` takes none above 1,023.)"""
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    ready = poller.poll(None if timeout_s is None else math.ceil(1000 * timeout_s))
    return [descriptor for descriptor, _ in ready]


class WorkCounter:
    """Counts the work that this process completes; a process that waits completes none.

    Any thread counts, without a lock: a missed count does not matter.
    """

    done = 0


WORK = WorkCounter()


class _LazyValue(Generic[T]):
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.value: T | None = None


class PerProcess(Generic[T]):
    """A value that each process makes at its first use: a connection, a lock.

    The parent's value stays referenced in the child, which never closes it. The locks are per
    process too, so that a fork waits for no thread that it does not have.
    """

    def __init__(self, make: Callable[[], T]):
        self._make = make
        self._values: dict[int, _LazyValue[T]] = {}

    def get(self) -> T:
        lazy = self._values.get(os.getpid()) or self._values.setdefault(os.getpid(), _LazyValue())
        if lazy.value is None:
            with lazy.lock:
                if lazy.value is None:  # another thread may have been quicker
                    lazy.value = self._make()
        return lazy.value


class SampleWait(NamedTuple):
    """The samples that a process waits for, since when, and the limit."""

    first: int
    num_samples: int
    since_s: float  # by the monotonic clock, which processes of a host share
    limit_s: float


class WaitPage:
    """A shared page with the samples that a child waits for; its parent can read it if it hangs."""

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
        """In the child: its waits are written from now on, but not those of its own forks."""
        self._writer = os.getpid()

    def end(self) -> None:
        self._writer = 0

    def write(self, wait: SampleWait | None) -> None:
        if self._writer and self._page is not None and self._writer == os.getpid():
            self._FORM.pack_into(self._page, 0, *(wait or (0, 0, 0.0, 0.0)))

    def read(self) -> SampleWait | None:
        if self._page is None:
            return None
        found = SampleWait(*self._FORM.unpack_from(self._page))
        return found if found.num_samples else None


WAIT_PAGE = WaitPage()


def describe_exit(status: int) -> str:
    """An exit status in words."""
    if status < 0:
        try:
            return f"was killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"was killed by signal {-status}"
    return f"exited with code {status}"


# They leave others their cores: at once, but for 0.1 ms in which more work mostly comes.
_IDLE_THREADS = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "10000"}


def let_idle_threads_sleep() -> None:
    """Set what OpenMP reads when torch is loaded, unless the user has chosen himself. Call it
    before, in each process that loads torch."""
    policy = os.environ.get("OMP_WAIT_POLICY", "passive").lower()
    if os.environ.get("OMP_NUM_THREADS", "1") == "1" and policy == "passive":
        for name, value in _IDLE_THREADS.items():
            os.environ.setdefault(name, value)


def result_of_fork(make: Callable[[], bytes], timeout_s: float | None = None) -> bytes:
    """What a fork of this process makes, which ends with it; empty if it fails or takes longer. It
    prints nothing. Call it where no other thread runs: a lock that one holds stays held."""
    ours, theirs = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if not pid:
        _make_and_exit(make, theirs, parent)
    os.close(theirs)
    content = b""
    until = None if timeout_s is None else time.monotonic() + timeout_s
    try:
        while readable([ours], None if until is None else max(0.0, until - time.monotonic())):
            chunk = os.read(ours, 1 << 16)
            if not chunk:
                return content
            content += chunk
        os.kill(pid, signal.SIGKILL)
        return b""
    finally:
        os.close(ours)
        os.waitpid(pid, 0)


def _make_and_exit(make: Callable[[], bytes], pipe: int, parent: int) -> NoReturn:
    try:
        die_with_parent(parent)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (whatever stood there)
        with suppress(Exception):  # a recipe may fail in any way; it is told when it is built
            content = memoryview(make())
            while content:
                content = content[os.write(pipe, content) :]
    finally:
        os._exit(0)
