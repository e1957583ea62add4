"""Detects a run that makes no progress: it reports a standstill, and ends a stop that hangs. Pure.

The watchdog of a member reports work that does not end (`watchdog.py`). It cannot see ranks that
wait for each other. So members send a count of completed work with each heartbeat (a piece
computed, a chunk written: `processes.WORK`), and the supervisor looks at all of them.

A standstill is reported after 75 s, later than the watchdogs would report, and after ten times the
longest pause so far, then at doubling times; it ends nothing, since a step may take that long. A
run that was asked to stop finishes a step and saves it, which may take long too: it continues as
long as any member completes work. Once there was none for a minute, and for twice the longest
pause, the run is ended, and the members that had not finished are named.
"""

from collections.abc import Collection, Mapping

from shoal.elastic.resize_barrier import Seats
from shoal.plans.resize import RunSize

STANDSTILL_S, PAUSE_S = 75.0, 60.0
TIMES_LONGEST, STOP_TIMES_LONGEST = 10.0, 2.0


class ProgressMonitor:
    """`stop_timeout_s` limits a pause on the way to a stop; None derives the limit from the run's
    own pauses."""

    def __init__(self, stop_timeout_s: float | None = None):
        self._stop_timeout_s = stop_timeout_s
        self._work_of: dict[int, tuple[int, int]] = {}  # member -> its step, its count of work
        self._last_work_at: float | None = None
        self._longest_pause_s = 0.0
        self._reported_s = 0.0  # length of this pause when it was last reported
        self._stop_requested_at: float | None = None

    @property
    def patience_s(self) -> float:
        if self._stop_timeout_s is not None:
            return self._stop_timeout_s
        return max(PAUSE_S, STOP_TIMES_LONGEST * self._longest_pause_s)

    def heard(self, member: int, step: int, work: int, now: float) -> None:
        """A heartbeat with a member's step and count of work."""
        if self._work_of.get(member) != (step, work):
            self._work_of[member] = step, work
            self.done(now)

    def done(self, now: float) -> None:
        if self._last_work_at is not None and self._stop_requested_at is None:
            self._longest_pause_s = max(self._longest_pause_s, now - self._last_work_at)
        self._last_work_at, self._reported_s = now, 0.0

    def explained(self, now: float) -> None:
        """A member reported the reason of this pause: a report is due when it has doubled."""
        self._reported_s = max(self._reported_s, self._pause_s(now))

    def standstill_s(self, now: float) -> float | None:
        """Seconds without work, if a report is due."""
        pause_s = self._pause_s(now)
        if pause_s < max(STANDSTILL_S, TIMES_LONGEST * self._longest_pause_s, 2 * self._reported_s):
            return None
        self._reported_s = pause_s
        return pause_s

    def stop_requested(self, now: float) -> None:
        """The run was asked to stop; only the first call counts."""
        if self._stop_requested_at is None:
            self._stop_requested_at = now

    def late_s(self, now: float) -> float | None:
        """Seconds without work on the way to a stop, if that is too long."""
        if self._stop_requested_at is None:
            return None
        pause_s = now - max(self._stop_requested_at, self._last_work_at or self._stop_requested_at)
        return pause_s if pause_s > self.patience_s else None

    def _pause_s(self, now: float) -> float:
        return 0.0 if self._last_work_at is None else now - self._last_work_at


def describe_hang(
    size: RunSize, seats: Seats, done: Collection[int], at: Mapping[int, str], late_s: float
) -> str:
    """Why a stop was not completed; `at` is the line that each member is at."""
    missing = {seat: at.get(n, "") for seat, n in enumerate(seats) if n is not None}
    missing = {seat: line for seat, line in missing.items() if seats[seat] not in done}
    busy = [f"{size.name_of(seat)} at {line}" for seat, line in missing.items() if line]
    names = ", ".join(busy or [size.name_of(seat) for seat in missing])
    how = "did not finish its step" if busy else "waited for each other"
    return (
        f"it was asked to stop, and no work was done for {late_s:.0f} s: {names} {how}, so all "
        "were ended. The stacks of each are at the end of its log"
    )
