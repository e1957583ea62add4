"""Connections to a database, each in a thread of its own, so that any driver has a time limit.

DB-API knows no timeouts, and some connections may be used only by the thread that made them. So a
session is a thread that makes one connection and answers one question after the other; who asks
waits for a bounded time. A session that failed or did not answer is given up, and the next question
opens another. Each process has its own. Cost: a change of threads for each question.
"""

import queue
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

from shoal.checkpoint.remote import Patience
from shoal.data.readers.asking import ask
from shoal.data.readers.files import PerProcess

Connect: TypeAlias = Callable[[], Any]
Answer = TypeVar("Answer")
_Jobs: TypeAlias = "queue.SimpleQueue[tuple[Callable[[Any], Any], Future[Any]] | None]"


class NoAnswer(Exception):
    """The database did not answer in time."""


class _Refused(Exception):
    """No connection came about."""


class Database:
    """Asks questions; a question is a function of a connection."""

    def __init__(self, connect: Connect, timeout_s: float, patience: Patience):
        self._timeout_s, self._patience = timeout_s, patience
        self._line = PerProcess(lambda: _Line(connect))

    def ask(self, question: Callable[[Any], Answer], what: str) -> Answer:
        return ask(
            lambda: self._line.get().call(question, self._timeout_s),
            _may_pass,
            self._patience,
            what,
        )


class _Line:
    """The session of one process, if one is open."""

    def __init__(self, connect: Connect):
        self._connect = connect
        self._lock = threading.Lock()
        self._jobs: _Jobs | None = None

    def call(self, question: Callable[[Any], Answer], timeout_s: float) -> Answer:
        answer: Future[Answer] = Future()
        with self._lock:  # a session that is given up takes no question behind its end
            jobs = self._jobs = self._jobs or self._open()
            jobs.put((question, answer))
        try:
            return answer.result(timeout_s)
        except Exception as error:
            self._give_up(jobs)
            if isinstance(error, TimeoutError) and not answer.done():
                raise NoAnswer(f"no answer within {timeout_s:g} s") from None
            raise
        finally:
            del answer  # it holds the error, which holds this frame: a session would outlive it

    def _open(self) -> _Jobs:
        jobs: _Jobs = queue.SimpleQueue()
        weakref.finalize(self, jobs.put, None)
        threading.Thread(
            target=_serve, args=(self._connect, jobs), name="shoal-database", daemon=True
        ).start()
        return jobs

    def _give_up(self, jobs: _Jobs) -> None:
        with self._lock:
            if self._jobs is jobs:
                self._jobs = None
                jobs.put(None)


def _serve(connect: Connect, jobs: _Jobs) -> None:
    connection: Any = None
    while (job := jobs.get()) is not None:
        question, answer = job
        try:
            if connection is None:
                connection = _opened(connect)
            answer.set_result(question(connection))
        except Exception as error:  # noqa: BLE001 (raised where it was asked)
            answer.set_exception(error)
        del job, question, answer
    if connection is not None:
        with suppress(Exception):
            connection.close()


def _opened(connect: Connect) -> Any:
    try:
        return connect()
    except Exception as error:
        raise _Refused(f"no connection: {error or type(error).__name__}") from error


def module_of(connection: Any) -> Any:
    """The DB-API module that a connection comes from."""
    for kind in type(connection).__mro__:
        for name in (kind.__module__, kind.__module__.partition(".")[0]):
            if hasattr(sys.modules.get(name), "paramstyle"):
                return sys.modules[name]
    return None


def _may_pass(error: Exception) -> bool:
    """Whether the connection is to blame and not the question: by the names that DB-API gives."""
    if isinstance(error, NoAnswer | _Refused | OSError):
        return True
    return any(
        kind.__name__ in ("OperationalError", "InterfaceError") for kind in type(error).__mro__
    )
