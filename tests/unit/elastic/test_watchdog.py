"""The watchdog: it reports stalled work when due, with the line, and not a thread that waits."""

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

import pytest

from shoal import logs
from shoal.comm import shared_group
from shoal.elastic import seat, watchdog, worker
from shoal.elastic.messages import SeatAssignment
from shoal.elastic.watchdog import (
    PAUSE_S,
    STOPPING_PAUSE_S,
    TIMES_LONGEST,
    StallTimer,
    Watchdog,
    working_line,
)
from shoal.events.events import kind_of
from shoal.parallel.pipeline import messages
from shoal.plans.resize import RunSize
from shoal.training import compute


def times_told(timer: StallTimer, until: float, stops: bool = False) -> list[float]:
    looks = (now / 10 for now in range(round(10 * until) + 1))
    return [now for now in looks if timer.late_s(now, stops) is not None]


def test_a_pause_is_told_of_at_doubling_times() -> None:
    assert times_told(StallTimer(0.0), 500) == [PAUSE_S, 2 * PAUSE_S, 4 * PAUSE_S, 8 * PAUSE_S]


def test_a_pause_as_there_were_before_is_not_told_of() -> None:
    timer = StallTimer(0.0)
    timer.beat(30.0)  # a first step may take long
    assert timer.late_s(30.0, False) is None
    assert times_told(timer, 30 + TIMES_LONGEST * 30) == [30 + TIMES_LONGEST * 30]


def test_who_beats_is_never_told_of() -> None:
    timer = StallTimer(0.0)
    for now in range(1000):
        timer.beat(float(now))
        assert timer.late_s(now + 0.5, stops=True) is None


def test_while_a_run_stops_it_is_told_of_sooner() -> None:
    assert times_told(StallTimer(0.0), 30, stops=True) == [STOPPING_PAUSE_S, 2 * STOPPING_PAUSE_S]
    timer = StallTimer(0.0)
    timer.beat(20.0)  # steps take that long
    timer.late_s(20.0, False)
    assert times_told(timer, 80, stops=True) == [60.0]


def test_a_rest_does_not_count() -> None:
    timer = StallTimer(0.0)
    for now in range(3600):  # as a spare
        timer.restart(float(now))
        assert timer.late_s(float(now), stops=True) is None
    timer.beat(3600.0)
    assert times_told(timer, 3600 + PAUSE_S) == [3600 + PAUSE_S]


PLACE = SeatAssignment(0, 1, (RunSize(2, 0),), "")


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    logs.for_the_screen.clear()  # of other tests
    monkeypatch.setattr(watchdog, "PAUSE_S", 0.0)


def told(own: Watchdog) -> list[str]:
    return [kind_of(note.event) for note in own.check(3, PLACE, stops=False)]  # type: ignore[union-attr]


def test_who_waits_for_the_supervisor_is_not_told_of(hurry: None) -> None:
    own, waits, goes_on = Watchdog(), threading.Event(), threading.Event()

    def work() -> None:
        with own.suspended():
            waits.set()
            goes_on.wait()

    thread = threading.Thread(target=work)
    thread.start()
    waits.wait()
    try:
        assert told(own) == []
    finally:
        goes_on.set()
        thread.join()


def called_in(file: str, work: Callable[[], None]) -> FrameType:
    """The frame of a function of one's own that a file calls."""
    frames: list[FrameType] = []

    def inner() -> None:
        frames.append(sys._getframe())
        work()

    space: dict[str, Callable[..., None]] = {}
    exec(compile("def call(inner):\n    inner()\n", file, "exec"), space)
    space["call"](inner)
    return frames[0]


@pytest.mark.parametrize("file", [compute.__file__, worker.__file__])
def test_where_is_the_users_own_line(file: str) -> None:
    told = working_line(called_in(file, lambda: None))
    assert told is not None and told.startswith("inner (") and "test_watchdog.py" in told


def test_where_is_shoals_line_if_the_user_has_none() -> None:
    frame = called_in(compute.__file__, lambda: None).f_back
    told = working_line(frame)
    assert told is not None and told.startswith("call (") and "compute.py" in told


@pytest.mark.parametrize(
    "file",
    [
        *(shared_group.__file__, seat.__file__, messages.__file__),
        "/x/site-packages/torch/distributed/c10d.py",
    ],
)
def test_who_waits_for_another_process_is_not_told_of(file: str) -> None:
    assert working_line(called_in(file, lambda: None).f_back) is None
    assert working_line(called_in(file, lambda: None)) is None


def test_who_is_not_there_is_not_told_of() -> None:
    assert working_line(None) is None


def test_a_full_disk_under_the_log_is_none_of_the_heartbeats(
    hurry: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Watchdog()
    monkeypatch.setattr(watchdog, "working_line", lambda frame: "forward (model.py:1)")
    with suppress(OSError), open("/dev/full", "w") as full:  # which fails as it ends
        monkeypatch.setattr(sys, "stderr", full)
        monkeypatch.setattr(watchdog.faulthandler, "dump_traceback", lambda file: None)
        found = told(own)
    assert found == ["busy"]
