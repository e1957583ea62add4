"""What a simulated run has done by when: steps that last, and where the rest of the time went.

A run makes equal steps from `begin` to `stop`, with a save where one is due (`next_due`, the
trainer's rule). What a loss undoes is taken back by `roll_back`. Arithmetic: a stretch of a million
steps costs as much as one of ten. Read next: `simulate.py`.
"""

import math
from typing import NamedTuple

import msgspec

from shoal.cost.step_timeline import Pace
from shoal.training.run import next_due

_ROUNDING = 1e-9  # of a step
_POINTS = 96  # of goodput over time


class SaveTimes(msgspec.Struct, frozen=True):
    """Of a checkpoint: how long training stands still, and after how long it can be loaded."""

    stall_s: float = 0.0
    write_s: float = 0.0


class TimeLost(msgspec.Struct, frozen=True):
    """Shares of the time in which nothing was trained that lasts; with goodput they make 1."""

    slow: float  # steps longer than undisturbed ones
    saving: float
    redone: float  # steps that were made and undone, and those under way at a loss
    down: float  # from a loss to the next step


class _Stretch(NamedTuple):
    """Steps made at one pace, from and to."""

    start_s: float
    stop_s: float
    first: int
    last: int
    work_s: float  # without saves
    pace: Pace


class WorkLog:
    """`step` is the last committed step, `saved` that of the newest checkpoint."""

    def __init__(self, undisturbed_s: float, save_every: int | None, takes: SaveTimes):
        self.step, self.saved = 0, 0
        self.last_pace: Pace | None = None
        self._undisturbed_s, self._every, self._takes = undisturbed_s, save_every, takes
        self._since: float | None = None  # when the steps under way began
        self._stretches: list[_Stretch] = []
        self._saving_s = self._redone_s = 0.0

    @property
    def is_working(self) -> bool:
        return self._since is not None

    @property
    def lasting_steps(self) -> int:
        return sum(done.last - done.first for done in self._stretches)

    def begin(self, now: float, pace: Pace) -> None:
        """The group works, from the present step on."""
        self.stop(now)
        self._since, self.last_pace = now, pace

    def stop(self, now: float) -> None:
        """The steps under way end here; one that is not whole is lost."""
        if self._since is None or self.last_pace is None:
            return
        start, pace, first = self._since, self.last_pace, self.step
        self._since, left_s = None, now - start
        for settling_s in pace.settling_s:
            if settling_s > left_s:
                break
            left_s -= settling_s
            self.step += 1
        else:
            left_s = self._advance(now, left_s, pace.step_s)
        num_saves = 0 if self._every is None else self._num_saves(first, pace.step_s)
        stalled_s = num_saves * self._takes.stall_s
        work_s = now - start - left_s - stalled_s
        self._saving_s += stalled_s
        self._redone_s += left_s
        self._stretches.append(_Stretch(start, now - left_s, first, self.step, work_s, pace))

    def roll_back(self, step: int) -> None:
        """Undo what was done after `step`."""
        while self._stretches and self._stretches[-1].last > step:
            done = self._stretches.pop()
            kept = max(0, step - done.first)
            share = kept / (done.last - done.first)
            self._redone_s += (1 - share) * done.work_s
            if kept:
                stop = done.start_s + share * (done.stop_s - done.start_s)
                last, work_s = done.first + kept, share * done.work_s
                self._stretches.append(done._replace(stop_s=stop, last=last, work_s=work_s))
        self.step = min(self.step, step)

    def next_saved_s(self, now: float) -> float:
        """How long from now, at this pace, until another checkpoint can be loaded."""
        if self._every is None or self.last_pace is None or self._since is None:
            return math.inf
        pace_s, every = self.last_pace.step_s, self._cadence(self.last_pace.step_s)
        at = self.step + int((now - self._since) / pace_s)
        return (next_due(at, every) - at) * pace_s + self._takes.stall_s + self._takes.write_s

    def mean(self, field: str) -> float:
        """Of the pace of all steps that were made, by the time that they took."""
        weights = [done.work_s for done in self._stretches]
        if not sum(weights):
            return self._undisturbed_s if field == "step_s" else 0.0
        values = [getattr(done.pace, field) for done in self._stretches]
        return float(sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights))

    def lost(self, total_s: float) -> TimeLost:
        useful_s = self.lasting_steps * self._undisturbed_s
        worked_s = sum(done.work_s for done in self._stretches)
        down_s = total_s - worked_s - self._saving_s - self._redone_s
        parts = (worked_s - useful_s, self._saving_s, self._redone_s, down_s)
        return TimeLost(*(part / total_s for part in parts))

    def goodput_over_time(self, total_s: float) -> list[tuple[float, float]]:
        """(hour, goodput since the point before): steps that last, over those of an undisturbed
        run."""
        width = total_s / _POINTS
        steps = [0.0] * _POINTS
        for done in self._stretches:
            length = done.stop_s - done.start_s
            for point in range(
                int(done.start_s / width), min(_POINTS, int(done.stop_s / width) + 1)
            ):
                inside = min(done.stop_s, (point + 1) * width) - max(done.start_s, point * width)
                if length > 0 and inside > 0:
                    steps[point] += (done.last - done.first) * inside / length
        hours = [(point + 1) * width / 3600 for point in range(_POINTS)]
        return [(h, n * self._undisturbed_s / width) for h, n in zip(hours, steps, strict=True)]

    def _cadence(self, step_s: float) -> int:
        """After how many steps a save begins: while one is written, the next is left out."""
        assert self._every is not None
        return self._every * max(1, math.ceil(self._takes.write_s / (self._every * step_s)))

    def _num_saves(self, first: int, step_s: float) -> int:
        every = self._cadence(step_s)
        return self.step // every - first // every

    def _advance(self, now: float, left_s: float, step_s: float) -> float:
        """Make equal steps and saves for so long; the time that is left of it."""
        if self._every is None:
            count = int(left_s / step_s + _ROUNDING)
            self.step += count
            return left_s - count * step_s
        every, stall_s = self._cadence(step_s), self._takes.stall_s
        to_save = next_due(self.step, every) - self.step
        if left_s < to_save * step_s:
            count = int(left_s / step_s)
            self.step += count
            return left_s - count * step_s
        period_s = every * step_s + stall_s
        num_periods, rest_s = divmod(left_s - to_save * step_s, period_s)
        at_save = self.step + to_save + int(num_periods) * every
        if rest_s >= stall_s + self._takes.write_s:
            self.saved = at_save
        elif num_periods:
            self.saved = at_save - every
        count = max(0, int((rest_s - stall_s) / step_s))
        self.step = at_save + count
        return max(0.0, rest_s - stall_s - count * step_s)
