"""Requests to a server that may be away for a moment: repeated, with a bound.

A request that fails for a reason that may pass is repeated after a growing pause, a bounded number
of times, each with a timeout of its own. So a run whose server is gone ends with `SourceLost`,
which names it, after a time that is known beforehand, and never hangs.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from shoal.data.readers.records import SourceLost
from shoal.errors import ShoalError, UsageError
from shoal.storage.object_client import RetryPolicy
from shoal.system.processes import PerProcess

Answer = TypeVar("Answer")
Opened = TypeVar("Opened")


class PermanentFailure(SourceLost):
    """What failed will not pass by itself; before a run it is the user's to correct."""


class RetriedConnection(Generic[Opened]):
    """What each process opens when it first asks, and opens again after a question that failed.

    It is closed when it is no longer used; in a fork it is not, for there it is the parent's.
    `way_out` is the advice for what will not pass by itself.
    """

    def __init__(
        self,
        connect: Callable[[], Opened],
        close: Callable[[Opened], object],
        may_pass: Callable[[Exception], bool],
        patience: RetryPolicy,
        way_out: str,
    ):
        self._may_pass, self._patience, self._way_out = may_pass, patience, way_out
        self._held = PerProcess(lambda: _HeldConnection(connect, close))

    def ask(self, question: Callable[[Opened], Answer], what: str) -> Answer:
        """The answer, at last; `what` names the server and the question in an error."""
        for failures in range(1, self._patience.num_tries + 1):
            try:
                return self._held.get().call(question)
            except ShoalError:
                raise
            except Exception as error:
                said = " ".join(str(error).split()).rstrip(".") or type(error).__name__
                if not self._may_pass(error):
                    raise PermanentFailure(f"{what}: {said}. {self._way_out}") from error
                if failures == self._patience.num_tries:
                    raise SourceLost(
                        f"{what}: {said}. It was tried {failures} times. Check that the server "
                        "runs and can be reached, and that no other process holds a lock on what "
                        "is asked for; then start again."
                    ) from error
            time.sleep(self._patience.pause_s(failures))
        raise AssertionError("at least one try")

    def ask_first(self, question: Callable[[Opened], Answer], what: str) -> Answer:
        """Ask before the run: what will not pass by itself is for the user to correct."""
        try:
            return self.ask(question, what)
        except PermanentFailure as error:
            raise UsageError(str(error)) from error


class _HeldConnection(Generic[Opened]):
    """The connection of one process. The error of a question holds frames that hold it, so it is
    closed then, and not when it is collected."""

    def __init__(self, connect: Callable[[], Opened], close: Callable[[Opened], object]):
        self._connect, self._close = connect, close
        self._lock = threading.Lock()
        self._open: list[Opened] = []
        weakref.finalize(self, _close_all, self._open, close, os.getpid())

    def call(self, question: Callable[[Opened], Answer]) -> Answer:
        with self._lock:
            if not self._open:
                self._open.append(self._connect())
            opened = self._open[0]
        try:
            return question(opened)
        except BaseException:
            with self._lock:
                if self._open and self._open[0] is opened:  # else another thread was quicker
                    _close_all(self._open, self._close, os.getpid())
            raise


def _close_all(held: list[Opened], close: Callable[[Opened], object], pid: int) -> None:
    while held and os.getpid() == pid:
        with suppress(Exception):  # it is of no use any more
            close(held.pop())
