"""Work that does not end: told of at its times, with the line, and not of those who wait."""

import sys
import threading
from collections.abc import Callable
from types import FrameType

import pytest

from shoal import logs
from shoal.comm import board
from shoal.elastic import asides, seat, worker
from shoal.elastic.asides import (
    PAUSE_S,
    STOPPING_PAUSE_S,
    TIMES_LONGEST,
    Asides,
    Pulse,
    where,
)
from shoal.elastic.messages import TakeSeat
from shoal.parallel.pipeline import messages
from shoal.plans.size import Size
from shoal.training import compute


def times_told(pulse: Pulse, until: float, stops: bool = False) -> list[float]:
    looks = (now / 10 for now in range(round(10 * until) + 1))
    return [now for now in looks if pulse.late_s(now, stops) is not None]


def test_a_pause_is_told_of_at_doubling_times() -> None:
    assert times_told(Pulse(0.0), 500) == [PAUSE_S, 2 * PAUSE_S, 4 * PAUSE_S, 8 * PAUSE_S]


def test_a_pause_as_there_were_before_is_not_told_of() -> None:
    pulse = Pulse(0.0)
    pulse.beat(30.0)  # a first step may take long
    assert pulse.late_s(30.0, False) is None
    assert times_told(pulse, 30 + TIMES_LONGEST * 30) == [30 + TIMES_LONGEST * 30]


def test_who_beats_is_never_told_of() -> None:
    pulse = Pulse(0.0)
    for now in range(1000):
        pulse.beat(float(now))
        assert pulse.late_s(now + 0.5, stops=True) is None


def test_while_a_run_stops_it_is_told_of_sooner() -> None:
    assert times_told(Pulse(0.0), 30, stops=True) == [STOPPING_PAUSE_S, 2 * STOPPING_PAUSE_S]
    pulse = Pulse(0.0)
    pulse.beat(20.0)  # steps take that long
    pulse.late_s(20.0, False)
    assert times_told(pulse, 80, stops=True) == [60.0]


def test_a_rest_does_not_count() -> None:
    pulse = Pulse(0.0)
    for now in range(3600):  # as a spare
        pulse.rest(float(now))
        assert pulse.late_s(float(now), stops=True) is None
    pulse.beat(3600.0)
    assert times_told(pulse, 3600 + PAUSE_S) == [3600 + PAUSE_S]


PLACE = TakeSeat(0, 1, (Size(2, 0),), "")


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    logs.for_the_screen.clear()  # of other tests
    monkeypatch.setattr(asides, "PAUSE_S", 0.0)


def told(own: Asides) -> list[str]:
    return [note.event for note in own.look(3, PLACE, stops=False)]  # type: ignore[union-attr]


def test_who_waits_for_the_supervisor_is_not_told_of(hurry: None) -> None:
    own, waits, goes_on = Asides(), threading.Event(), threading.Event()

    def work() -> None:
        with own.resting():
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
    told = where(called_in(file, lambda: None))
    assert told is not None and told.startswith("inner (") and "test_asides.py" in told


def test_where_is_shoals_line_if_the_user_has_none() -> None:
    frame = called_in(compute.__file__, lambda: None).f_back
    told = where(frame)
    assert told is not None and told.startswith("call (") and "computing.py" in told


@pytest.mark.parametrize(
    "file",
    [
        *(board.__file__, seat.__file__, messages.__file__),
        "/x/site-packages/torch/distributed/c10d.py",
    ],
)
def test_who_waits_for_another_process_is_not_told_of(file: str) -> None:
    assert where(called_in(file, lambda: None).f_back) is None
    assert where(called_in(file, lambda: None)) is None


def test_who_is_not_there_is_not_told_of() -> None:
    assert where(None) is None


def test_a_full_disk_under_the_log_is_none_of_the_heartbeats(
    hurry: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Asides()
    monkeypatch.setattr(asides, "where", lambda frame: "forward (model.py:1)")
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        monkeypatch.setattr(asides.faulthandler, "dump_traceback", lambda file: None)
        assert told(own) == ["busy"]
