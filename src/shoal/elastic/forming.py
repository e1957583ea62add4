"""Reports the members that keep a group from forming. Pure.

`membership.py` gives up on a member that does not arrive in time. One that has arrived, and loads a
checkpoint or receives another rank's state, may take long: it is reported once, and not ended.
"""

from collections.abc import Collection

from shoal.elastic.resize_barrier import Seats
from shoal.plans.resize import RunSize


class FormingMonitor:
    """Poll `late`; it reports once in a generation."""

    def __init__(self, after_s: float):
        self._after_s = after_s
        self._generation, self._since, self._is_reported = -1, 0.0, True

    def late(self, generation: int, seats: Seats, formed: Collection[int], now: float) -> list[int]:
        """The seats that have not formed, if a report is due."""
        if generation != self._generation:
            self._generation, self._since, self._is_reported = generation, now, False
        late = [seat for seat, member in enumerate(seats) if member not in formed]
        is_time = not self._is_reported and now - self._since > self._after_s
        self._is_reported |= is_time or not late  # a loss after that is of the next generation
        return late if is_time else []


def describe_late(size: RunSize, late: list[int], after_s: float) -> str:
    """A warning for the user."""
    names = ", ".join(size.name_of(seat) for seat in late)
    return (
        f"After {after_s:g} s the group does not work yet. It waits for {names} to be done with "
        "a checkpoint or another's state; the log of each tells more."
    )
