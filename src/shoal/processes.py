"""Processes that fork: what a child does first, and what it must not share with its parent.

Ranks and loaders are forks, so whatever a recipe has opened is in several processes at once. A
connection serves one of them, and a lock that a thread held while another forked would never be
free. What must be undone in the child at once, before it runs anything, is `data/cache/forks.py`'s.
"""

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

_PR_SET_PDEATHSIG = 1

Made = TypeVar("Made")


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends. Linux only."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


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
