"""A monotonic clock that stands still while its process does.

A machine that slept, or a process that was stopped, finds that it has heard of no one for a long
time. That is its own silence and not theirs, so the time that no turn of its loop has seen does not
count towards anybody's limit. Cost: the loss of others is noticed later by as long.
"""

import time
from collections.abc import Callable

MOST_S = 1.0  # that counts between two looks; a loop looks many times a second


class AwakeClock:
    """Call it in each turn of a loop; it returns seconds, to compare with its own alone."""

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now, self._seen, self._asleep_s = now, now(), 0.0

    @property
    def unseen_s(self) -> float:
        """Seconds since it was looked at."""
        return self._now() - self._seen

    def __call__(self) -> float:
        now = self._now()
        self._asleep_s += max(0.0, now - self._seen - MOST_S)
        self._seen = now
        return now - self._asleep_s
