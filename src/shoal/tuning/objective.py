"""How a trial's record tells the value of a study's metric (`training/goal.py`).

A recipe that evaluates is judged by its evaluations: each is a report, and the last one, after the
last step, is the trial's value, since it is of the weights that the trial leaves. One that does not
is judged by its loss: each twentieth of its steps gives the mean of their losses as a report, and
the last twentieth the value. Pure, but for `RecordReader`, which reads a trial's run directory.
"""

import math
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from shoal.storage.decoding import try_decode_json
from shoal.storage.line_tail import LineTail
from shoal.storage.run_dir import RUN
from shoal.training.goal import Goal

NUM_WINDOWS = 20  # reports of a trial that does not evaluate


class TrialReport(NamedTuple):
    """A value of the metric after a step; NaN if the trial has none to show."""

    step: int
    value: float


class TrialStep(msgspec.Struct, frozen=True):
    """What is read of a line of metrics.jsonl."""

    step: int = 0
    loss: float | None = None


class TrialEvaluation(msgspec.Struct, frozen=True):
    """What is read of a line of events.jsonl."""

    event: str = ""
    step: int = 0
    evaluation: dict[str, float | None] = {}


def reports_of_losses(steps: Iterable[TrialStep], num_steps: int) -> list[TrialReport]:
    """The mean loss of every whole window of steps; a window without a loss has none."""
    size = max(1, num_steps // NUM_WINDOWS)
    windows: dict[int, list[float]] = {}
    last = 0
    for one in steps:
        windows.setdefault((one.step - 1) // size, []).append(
            math.nan if one.loss is None else one.loss
        )
        last = max(last, one.step)
    ends = {number: min((number + 1) * size, num_steps) for number in windows}
    return [
        TrialReport(ends[number], math.fsum(losses) / len(losses))
        for number, losses in sorted(windows.items())
        if ends[number] <= last
    ]


class RecordReader:
    """Reads what a trial's run has recorded so far, again and again.

    Its files may be cut when a run is resumed from an earlier step; then they are read again.
    """

    def __init__(self, run_dir: Path, goal: Goal, *, evaluates: bool):
        self._goal, self._evaluates, self._run_json = goal, evaluates, run_dir / RUN
        self._num_steps = 0  # until the run has begun
        self._steps = LineTail(run_dir / "metrics.jsonl")
        self._events = LineTail(run_dir / "events.jsonl")
        self._losses: dict[int, TrialStep] = {}
        self._evaluations: dict[int, float] = {}
        self.last = TrialStep()

    def reports(self) -> list[TrialReport]:
        """All reports so far, in the order of their steps."""
        lines, is_anew = _lines(self._steps)
        if is_anew:
            self._losses, self.last = {}, TrialStep()
        for line in lines:
            if (step := try_decode_json(line, TrialStep)) and step.step:
                self.last = step
                if not self._evaluates:
                    self._losses[step.step] = step
        if not self._evaluates:
            num_steps = self.num_steps() if self._losses else 0
            return reports_of_losses(self._losses.values(), num_steps) if num_steps else []
        for line in _lines(self._events)[0]:
            found = try_decode_json(line, TrialEvaluation)
            if found and found.event == "evaluated" and self._goal.metric in found.evaluation:
                value = found.evaluation[self._goal.metric]
                self._evaluations[found.step] = math.nan if value is None else value
        return [TrialReport(step, value) for step, value in sorted(self._evaluations.items())]

    def num_steps(self) -> int:
        """That the run was asked for, as it says itself; 0 as long as it has not begun."""
        if not self._num_steps:
            with suppress(OSError):
                found = try_decode_json(self._run_json.read_bytes(), _StepsOf)
                self._num_steps = 0 if found is None else found.num_steps
        return self._num_steps


class _StepsOf(msgspec.Struct, frozen=True):
    """What is read of run.json."""

    num_steps: int = 0


def _lines(tail: LineTail) -> tuple[list[bytes], bool]:
    """New lines, and whether the file is another one now, which is read from its begin."""
    lines: list[bytes] = []
    is_anew = False
    while True:
        block, replaced = tail.more()
        if replaced:
            lines, is_anew = [], True
        if not block:
            return lines, is_anew
        lines += block.splitlines()
