"""A run that gets no further: it is told, and one that was told to stop is ended. Pure.

Who works without end says so itself (`asides.py`). Who waits for another does not, and ranks that
wait for each other would wait for ever without a word. So the supervisor looks at what all of them
get done: steps, groups, saves and ends.

It is told somewhat later than who works would tell: after 75 s and ten times the longest pause so
far, then at doubling times. Nothing
is ended then, since a step may take that long. A run that was told to stop has one more step to
make and a state to save: it is given `stop_timeout_s` without getting further and three times the
longest pause, ten times as much while it saves, and ten times as much in all.
"""

PAUSE_S, TIMES_LONGEST = 75.0, 10.0
STOP_TIMEOUT_S = 60.0
STOP_TIMES_LONGEST = 3.0
WHILE_SAVING = 10.0
IN_ALL = 10.0


class Standstill:
    """Call `look` again and again with a mark of what is done; any other mark is a move."""

    def __init__(self, stop_timeout_s: float = STOP_TIMEOUT_S):
        self._stop_timeout_s = stop_timeout_s
        self._mark: object = None
        self._since: float | None = None  # the last move; None before the first look
        self._longest_s = 0.0
        self._told_s = 0.0
        self._stops_since: float | None = None

    def look(self, mark: object, now: float) -> None:
        if self._since is None or mark != self._mark:
            # The first pause is the preparation's, and no measure of a step.
            if self._since is not None and self._mark is not None:
                self._longest_s = max(self._longest_s, now - self._since)
            self._mark, self._since, self._told_s = mark, now, 0.0

    def explained(self, now: float) -> None:
        """Somebody said what takes so long: what follows counts from here."""
        self._told_s = max(self._told_s, self._pause_s(now))

    def late_s(self, now: float) -> float | None:
        """For how long there was no move, if that is to be told now."""
        pause_s = self._pause_s(now)
        if pause_s < max(PAUSE_S, TIMES_LONGEST * self._longest_s, 2 * self._told_s):
            return None
        self._told_s = pause_s
        return pause_s

    def stop_is_late_s(self, now: float, saves: bool) -> float | None:
        """For how long a run that was told to stop has not, if it is to be ended now."""
        if self._stops_since is None:
            self._stops_since = now
        limit_s = max(self._stop_timeout_s, STOP_TIMES_LONGEST * self._longest_s)
        asked_s = now - self._stops_since
        still_s = min(asked_s, self._pause_s(now))
        if still_s > limit_s * (WHILE_SAVING if saves else 1.0) or asked_s > limit_s * IN_ALL:
            return asked_s
        return None

    def _pause_s(self, now: float) -> float:
        return 0.0 if self._since is None else now - self._since
