"""Work that does not end: told of at its times, with the line, and not of those who wait."""

import sys
from collections.abc import Callable

from shoal.comm import board
from shoal.computing import Compute
from shoal.elastic import asides
from shoal.elastic.asides import FIRST_S, MANY_TIMES, STOPPING_S, Pulse, where


def times_told(pulse: Pulse, until: float, stops: bool = False) -> list[float]:
    looks = (now / 10 for now in range(round(10 * until) + 1))
    return [now for now in looks if pulse.late_s(now, stops) is not None]


def test_a_pause_is_told_of_at_doubling_times() -> None:
    assert times_told(Pulse(0.0), 500) == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S, 8 * FIRST_S]


def test_a_pause_as_there_were_before_is_not_told_of() -> None:
    pulse = Pulse(0.0)
    pulse.beat(30.0)  # a first step may take long
    assert pulse.late_s(30.0, False) is None
    assert times_told(pulse, 30 + MANY_TIMES * 30) == [30 + MANY_TIMES * 30]


def test_who_beats_is_never_told_of() -> None:
    pulse = Pulse(0.0)
    for now in range(1000):
        pulse.beat(float(now))
        assert pulse.late_s(now + 0.5, stops=True) is None


def test_while_a_run_stops_it_is_told_of_sooner() -> None:
    assert times_told(Pulse(0.0), 30, stops=True) == [STOPPING_S, 2 * STOPPING_S]
    pulse = Pulse(0.0)
    pulse.beat(20.0)  # steps take that long
    pulse.late_s(20.0, False)
    assert times_told(pulse, 80, stops=True) == [60.0]


CALLS = "def call(inner):\n    inner()\n"


def test_where_is_the_users_own_line() -> None:
    def model(inner: Callable[[], None]) -> None:
        inner()

    space: dict[str, Callable[..., None]] = {}
    exec(compile("def call(model, inner):\n    model(inner)\n", _file_of(Compute), "exec"), space)
    frames = []

    def stuck() -> None:
        frames.append(sys._getframe())

    space["call"](model, stuck)
    told = where(frames[0])
    assert told is not None and told.startswith("stuck (") and "test_asides.py" in told


def test_who_waits_for_another_process_is_not_told_of() -> None:
    for inside in (board.__file__, "/x/site-packages/torch/distributed/c10d.py", asides.__file__):
        space: dict[str, Callable[..., None]] = {}
        exec(compile(CALLS, inside, "exec"), space)
        frames = []
        space["call"](lambda: frames.append(sys._getframe()))  # noqa: B023 (called at once)
        assert where(frames[0]) is None


def test_who_is_not_there_is_not_told_of() -> None:
    assert where(None) is None


def _file_of(thing: type) -> str:
    return sys.modules[thing.__module__].__file__ or ""
