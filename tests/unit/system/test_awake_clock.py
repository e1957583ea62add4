"""A clock that does not count what its process has slept through."""

from shoal.system.awake_clock import MOST_S, AwakeClock


def test_time_that_nobody_looked_at_does_not_count() -> None:
    at = 100.0
    clock = AwakeClock(lambda: at)
    at = 100.5
    assert clock() == 100.5
    at = 4000.0
    assert clock() == 100.5 + MOST_S
    at = 4000.25
    assert clock() == 100.75 + MOST_S
