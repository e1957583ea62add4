"""Whether a run gets further: if not, it is told; one that was told to stop is ended. Pure.

Who works without end says so itself (`asides.py`). Who waits for another does not, and ranks that
wait for each other would wait for ever without a word. So members say with each beat how much they
have done (a piece computed, a chunk written: `processes.WORK`), and the supervisor looks at all.

A standstill is told after 75 s, somewhat later than who works would tell, and ten times the longest
pause so far, then at doubling times; nothing is ended, since a step may take that long. A run that
was told to stop finishes a step and saves it, which may take long too: it is left alone as long as
somebody gets something done. Once nothing was done for a minute, and for twice the longest pause,
somebody hangs: the run is ended, and who had not come is named.
"""

from collections.abc import Collection, Mapping

from shoal.elastic.meeting import Seats
from shoal.plans.size import Size

STANDSTILL_S, PAUSE_S = 75.0, 60.0
TIMES_LONGEST, STOP_TIMES_LONGEST = 10.0, 2.0


class Progress:
    """`stop_timeout_s` is how long nothing may be done on the way to a stop; None leaves it to the
    run's own pauses."""

    def __init__(self, stop_timeout_s: float | None = None):
        self._stop_timeout_s = stop_timeout_s
        self._done: dict[int, tuple[int, int]] = {}  # by member: its step, and its work
        self._last: float | None = None  # when something was done
        self._longest_s = 0.0  # between two things
        self._told_s = 0.0  # the pause that was told last
        self._asked: float | None = None  # when it was first told to stop

    @property
    def patience_s(self) -> float:
        if self._stop_timeout_s is not None:
            return self._stop_timeout_s
        return max(PAUSE_S, STOP_TIMES_LONGEST * self._longest_s)

    def heard(self, member: int, step: int, work: int, now: float) -> None:
        """What a member says of what it has done."""
        if self._done.get(member) != (step, work):
            self._done[member] = step, work
            self.done(now)

    def done(self, now: float) -> None:
        if self._last is not None and self._asked is None:
            self._longest_s = max(self._longest_s, now - self._last)
        self._last, self._told_s = now, 0.0

    def explained(self, now: float) -> None:
        """Somebody said what takes so long: what follows counts from here."""
        self._told_s = max(self._told_s, self._pause_s(now))

    def standstill_s(self, now: float) -> float | None:
        """For how long nothing was done, if that is to be told now."""
        pause_s = self._pause_s(now)
        if pause_s < max(STANDSTILL_S, TIMES_LONGEST * self._longest_s, 2 * self._told_s):
            return None
        self._told_s = pause_s
        return pause_s

    def asked(self, now: float) -> None:
        """To stop; the first time counts."""
        if self._asked is None:
            self._asked = now

    def late_s(self, now: float) -> float | None:
        """For how long nothing was done on the way to a stop, if that is too long."""
        if self._asked is None:
            return None
        pause_s = now - max(self._asked, self._last or self._asked)
        return pause_s if pause_s > self.patience_s else None

    def _pause_s(self, now: float) -> float:
        return 0.0 if self._last is None else now - self._last


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
