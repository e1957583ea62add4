"""What a study makes best: a metric, its direction, and how a trial's record tells its value.

A recipe that evaluates is judged by its evaluations: each is a report, and the last one, after the
last step, is the trial's value, since it is of the weights that the trial leaves. One that does not
is judged by its loss: each twentieth of its steps gives the mean of their losses as a report, and
the last twentieth the value. Pure, but for `RecordReader`, which reads a trial's run directory.
"""

import math
import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

import msgspec

from shoal.errors import UsageError, nearest
from shoal.storage.decoding import try_decode_json
from shoal.storage.run_dir import RUN

NUM_WINDOWS = 20  # reports of a trial that does not evaluate
_DIRECTIONS = ("min", "max")
# Endings of names of which more is better; others are minimized unless the user says otherwise.
_LARGE_IS_BEST = (
    *("accuracy", "acc", "auc", "f1", "precision", "recall", "bleu", "r2", "score", "iou"),
)


class Goal(NamedTuple):
    """The metric of a study, and whether its largest value is the best."""

    metric: str = "loss"
    is_max: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `loss`, `accuracy:max` or `error:min`."""
        metric, colon, direction = text.strip().partition(":")
        if not metric:
            raise UsageError(f"--metric {text!r} names no metric. Write loss, or accuracy:max.")
        if colon and direction not in _DIRECTIONS:
            raise UsageError(f"--metric {text}: {nearest(direction, _DIRECTIONS)}")
        is_max = direction == "max" if colon else metric.lower().endswith(_LARGE_IS_BEST)
        return cls(metric, is_max)

    def refuse_unknown(self, known: Collection[str]) -> None:
        """Refuse a metric that the recipe does not measure."""
        if self.metric not in known:
            raise UsageError(
                f"--metric {self.metric}: the recipe does not measure it. "
                f"{nearest(self.metric, known)} A recipe measures its loss, and with evaluate= "
                "the metrics= of its Run."
            )

    def is_better(self, value: float, than: float | None) -> bool:
        return than is None or (value > than if self.is_max else value < than)

    def best_so_far(self, values: Iterable[float]) -> Iterator[float]:
        best: float | None = None
        for value in values:
            best = value if best is None or self.is_better(value, best) else best
            yield best

    def __str__(self) -> str:
        return f"{self.metric}:{'max' if self.is_max else 'min'}"


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

    Its files may be cut when a run is resumed from an earlier step; then they are read anew.
    """

    def __init__(self, run_dir: Path, goal: Goal, *, evaluates: bool):
        self._goal, self._evaluates, self._run_json = goal, evaluates, run_dir / RUN
        self._num_steps = 0  # until the run has begun
        self._steps = _LinesOf(run_dir / "metrics.jsonl")
        self._events = _LinesOf(run_dir / "events.jsonl")
        self._losses: dict[int, TrialStep] = {}
        self._evaluations: dict[int, float] = {}
        self.last = TrialStep()

    def reports(self) -> list[TrialReport]:
        """All reports so far, in the order of their steps."""
        lines, is_anew = self._steps.more()
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
        for line in self._events.more()[0]:
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


class _LinesOf:
    """The whole lines that were added to a file since the last time."""

    def __init__(self, path: Path):
        self._path, self._read, self._inode = path, 0, 0

    def more(self) -> tuple[list[bytes], bool]:
        """New lines, and whether the file is another one now, which is read from its begin."""
        try:
            with open(self._path, "rb") as file:
                now = os.fstat(file.fileno())
                is_anew = now.st_ino != self._inode or now.st_size < self._read
                if is_anew:
                    self._inode, self._read = now.st_ino, 0
                file.seek(self._read)
                content = file.read()
        except FileNotFoundError:
            return [], False
        whole = content[: content.rfind(b"\n") + 1]
        self._read += len(whole)
        return whole.splitlines(), is_anew
