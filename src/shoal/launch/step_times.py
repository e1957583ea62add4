"""The seconds of a run's steps, read from its metrics.jsonl."""

import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec

from shoal.storage.decoding import try_decode_json

PARTS = ("compute", "exchange", "waiting", "data")


class TimedStep(msgspec.Struct, frozen=True):
    """What is read of a line of metrics.jsonl. `times` are rank 0's, `ranks` how long each of them
    was busy."""

    step: int
    samples: int
    times: dict[str, float]
    bytes_sent: int
    ranks: list[float] = []

    @property
    def total_s(self) -> float:
        return sum(self.times.values())


def read_steps(record: Path, after: int = 0) -> list[TimedStep]:
    """The steps on record after this one; a torn last line is left out."""
    content = record.read_bytes() if record.exists() else b""
    lines = (try_decode_json(text, TimedStep) for text in content.splitlines())
    return [line for line in lines if line is not None and line.step > after]


def settled_steps(steps: Sequence[TimedStep]) -> Sequence[TimedStep]:
    """Without the first fifth, in which caches fill: at least the first, if there are more."""
    return steps[max(1, len(steps) // 5) :] or steps


def median_step_s(steps: Sequence[TimedStep]) -> float:
    return statistics.median(step.total_s for step in steps)


def mean_times(steps: Sequence[TimedStep]) -> dict[str, float]:
    """Where the seconds of a step went, on the mean over ranks and the middle half of the steps.

    All ranks tell how long they were busy, rank 0 how much of that was for samples. Who is busy
    for less than the slowest waits for it; what is left of a step is the exchange.
    """
    found: dict[str, list[float]] = {part: [] for part in PARTS}
    by_time, rest = sorted(steps, key=lambda step: step.total_s), len(steps) // 4
    for step in by_time[rest : len(steps) - rest]:
        own = step.times["data"] + step.times["compute"]
        busy = step.ranks or [own]
        after = own - busy[0]  # the exchange: the update, which is alike on all
        mean, most = statistics.fmean(busy) + after, max(busy) + after
        data = min(step.times["data"], mean)
        waiting = min(most - mean, step.total_s - mean)
        parts = (mean - data, step.total_s - mean - waiting, waiting, data)
        for part, seconds in zip(PARTS, parts, strict=True):
            found[part].append(max(0.0, seconds))
    return {part: statistics.fmean(seconds) for part, seconds in found.items()}
