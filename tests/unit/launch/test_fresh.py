"""A run in a fresh process: what goes there, when it is needed, and what a dead caller means."""

import io
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.events.events import StoppingEvent, TickEvent
from shoal.launch import fresh
from shoal.launch.train import Options


@pytest.fixture
def answers() -> tuple[fresh._Answers, int]:
    """Answers, and the end at which they are read."""
    reading, writing = os.pipe()
    return fresh._Answers(writing), reading


def test_a_run_whose_caller_died_is_asked_to_stop_once(answers: tuple[fresh._Answers, int]) -> None:
    sending, reading = answers
    sending.send(fresh._Event(TickEvent()))
    assert not sending.wants_stop()
    os.close(reading)
    sending.send(fresh._Event(TickEvent()))
    assert sending.wants_stop() and not sending.wants_stop()


def test_a_run_that_stops_already_is_not_asked_again(answers: tuple[fresh._Answers, int]) -> None:
    """A second signal would end it at once, without a checkpoint."""
    sending, reading = answers
    os.close(reading)
    sending.send(fresh._Event(TickEvent()))
    sending.send(fresh._Event(StoppingEvent(signal="SIGINT")))
    assert not sending.wants_stop()


@pytest.fixture
def no_signals() -> Iterator[None]:
    """As a fresh interpreter has them; the limit of a test takes an alarm."""
    timer = signal.setitimer(signal.ITIMER_REAL, 0.0)
    handlers = {
        signal.SIGALRM: signal.signal(signal.SIGALRM, signal.SIG_DFL),
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.SIGTERM: signal.signal(signal.SIGTERM, signal.SIG_DFL),
        signal.SIGHUP: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    }
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    signal.setitimer(signal.ITIMER_REAL, *timer)


@pytest.mark.usefixtures("no_signals")
def test_a_process_whose_signals_are_in_use_does_not_supervise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "listdir", lambda path: ["1"])  # of threads
    assert fresh.can_fork()
    for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        before = signal.signal(number, lambda *_: None)
        assert not fresh.can_fork()
        signal.signal(number, before)
    assert fresh.can_fork()
    signal.setitimer(signal.ITIMER_REAL, 100.0)
    assert not fresh.can_fork()
    signal.setitimer(signal.ITIMER_REAL, 0.0)


JOB = fresh._Job(["/somewhere"], "mine.py:small", {"steps": "3"}, True, Options(), None, "runs/1")


def test_a_job_and_what_is_trained_arrive() -> None:
    pipe = io.BytesIO()
    fresh._give(pipe, JOB, b"pickled")
    pipe.seek(0)
    assert fresh._take(pipe) == (JOB, b"pickled")


def test_what_is_trained_may_be_larger_than_a_message(tmp_path: Path) -> None:
    """Pages of zeros, which take no memory; msgpack would refuse them."""
    large = mmap.mmap(-1, 5 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with open(os.devnull, "wb") as pipe:
        fresh._give(pipe, JOB, large)  # type: ignore[arg-type]
        assert pipe.tell() >= 0


_SENDS = """
import functools, sys
from shoal.launch.fresh import _pickle

@functools.lru_cache(maxsize=7)
def count(n):
    return 0 if n == 0 else 1 + count(n - 1)

def recipe():
    return count(5), count.cache_parameters()["maxsize"]

sys.stdout.buffer.write(_pickle("recipe", recipe))
"""


def test_a_cached_function_of_a_script_arrives() -> None:
    """Its name is in the main module, which the new process does not have."""
    pickled = subprocess.run(
        [sys.executable, "-c", _SENDS], stdout=subprocess.PIPE, check=True
    ).stdout
    assert fresh.cloudpickle.loads(pickled)() == (5, 7)
    assert fresh.cloudpickle.loads(fresh._dumps(os.path.join)) is os.path.join
