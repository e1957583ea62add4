"""A run that was told to stop ends within a bound, whatever its ranks do. Pure.

To stop cleanly, ranks finish a step and save it, which may take long. As long as one of them gets
something done (a piece computed, a chunk written: `processes.WORK`) they are left alone. Once
nothing was done for a minute, and for twice the longest pause that the run has had, somebody hangs:
the run is ended, and who had not come is named.
"""

from collections.abc import Collection, Mapping

from shoal.elastic.meeting import Seats
from shoal.plan_size import Size

PAUSE_S, TIMES_LONGEST = 60.0, 2.0


class Stopping:
    """`patience_s` is how long nothing may be done; None leaves it to the run's own pauses."""

    def __init__(self, patience_s: float | None = None):
        self._given_s = patience_s
        self._done: dict[int, tuple[int, int]] = {}  # by member: its step, and its work
        self._last: float | None = None  # when something was done
        self._longest_s = 0.0  # between two things
        self._asked: float | None = None

    @property
    def patience_s(self) -> float:
        if self._given_s is not None:
            return self._given_s
        return max(PAUSE_S, TIMES_LONGEST * self._longest_s)

    def heard(self, member: int, step: int, work: int, now: float) -> None:
        """What a member says of what it has done."""
        if self._done.get(member) != (step, work):
            self._done[member] = step, work
            self.done(now)

    def done(self, now: float) -> None:
        if self._last is not None and self._asked is None:
            self._longest_s = max(self._longest_s, now - self._last)
        self._last = now

    def asked(self, now: float) -> None:
        """To stop; the first time counts."""
        if self._asked is None:
            self._asked = now

    def late_s(self, now: float) -> float | None:
        """For how long nothing was done, if that is too long."""
        if self._asked is None:
            return None
        pause_s = now - max(self._asked, self._last or self._asked)
        return pause_s if pause_s > self.patience_s else None


def did_not_stop(
    size: Size, seats: Seats, done: Collection[int], at: Mapping[int, str], late_s: float
) -> str:
    """Whom a run that was told to stop waited for in vain; `at` is where each member works."""
    missing = {seat: at.get(n, "") for seat, n in enumerate(seats) if n is not None}
    missing = {seat: line for seat, line in missing.items() if seats[seat] not in done}
    busy = [f"{size.name_of(seat)} at {line}" for seat, line in missing.items() if line]
    names = ", ".join(busy or [size.name_of(seat) for seat in missing])
    how = "came to no end of its step" if busy else "waited for each other"
    return (
        f"it was told to stop, and nothing was done for {late_s:.0f} s: {names} {how}, so all were "
        "ended. The stacks of each are at the end of its log"
    )
