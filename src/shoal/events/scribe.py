"""The record of a run's steps on disk, complete although its writer may die.

Every rank keeps the latest steps in memory; one of them, the scribe, writes them to
`metrics.jsonl` and to the other sinks, in the background. When the scribe dies another rank takes
over, sees how far the file got, and writes on from what it remembers.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from shoal.errors import UsageError
from shoal.events.sinks import Background, JsonLines, Sink
from shoal.events.step import StepInfo
from shoal.logs import warn_once
from shoal.storage.decoding import json_or_none
from shoal.storage.files import write_whole

REMEMBERED = 4096
FLUSH_S = 1.0  # that a step waits for the record at most, when it is saved


class Scribe:
    """A trainer's hook. `writes` says whether this rank is the one that writes, at this time."""

    def __init__(
        self,
        path: Path,
        writes: Callable[[], bool],
        more_sinks: Sequence[Callable[[], Sink]] = (),
        save_every: int | None = None,
    ):
        self._path = path
        self._writes = writes
        self._more_sinks = more_sinks
        self._save_every = save_every
        self._recent: deque[StepInfo] = deque(maxlen=REMEMBERED)
        self._sinks: list[Background] = []
        self._written = 0  # the last step that an earlier scribe put on record

    def __call__(self, info: StepInfo) -> None:
        self._recent.append(info)
        if self._sinks:
            self._write(info)
        elif self._writes():
            self._take_over()
        if self._save_every and info.step % self._save_every == 0 and self._sinks:
            self._sinks[0].flush(FLUSH_S)  # the record must not end before a checkpoint

    def flush(self) -> None:
        """Put on record what this rank knows: another may write from now on."""
        for sink in self._sinks:
            sink.flush(FLUSH_S)

    def close(self) -> None:
        if self._recent and not self._sinks and self._writes():
            self._take_over()  # the scribe before it died after the last step
        for sink in self._sinks:
            sink.close()

    def rewind(self, step: int) -> None:
        """Strike out the steps after this one: the run goes on from it, and will do them again."""
        if not self._path.exists():
            return
        content = self._path.read_bytes()
        lines = content.splitlines(keepends=True)
        kept = b"".join(line for line in lines if 0 < _step_of(line) <= step)
        if kept != content:  # a torn last line goes too, or the next one would be written into it
            write_whole(self._path, kept)

    def _take_over(self) -> None:
        self._written = last_step(self._path)
        try:
            record = JsonLines(self._path)
        except UsageError as error:  # by now the disk may be full, or gone
            warn_once(f"{error} Training goes on without that record.", on_screen=True)
            return
        sinks: list[Sink] = [record, *(make() for make in self._more_sinks)]
        self._sinks = [Background(s, type(s).__name__, encode=as_record) for s in sinks]
        for info in self._recent:
            self._write(info)

    def _write(self, info: StepInfo) -> None:
        if info.step > self._written:  # a step that was done again is on record already
            for sink in self._sinks:
                sink.put(info)


def as_record(info: StepInfo) -> Mapping[str, Any]:
    """A step as it is written down."""
    times = info.times
    record: dict[str, Any] = {
        "step": info.step,
        "loss": info.loss,
        "samples": info.samples,
        "rate": info.rate,
        "bytes_sent": info.bytes_sent,
        "times": {
            "data": times.data,
            "compute": times.compute,
            "exchange": times.exchange,
            "waiting": times.waiting,
        },
    }
    if info.mark is not None:
        record["mark"] = info.mark
    if info.norm is not None:
        record["norm"] = info.norm
    if info.evaluation is not None:
        record["evaluation"] = info.evaluation
    if info.left_out:
        record["left_out"] = info.left_out
    return record


class _Numbered(msgspec.Struct, frozen=True):
    step: int = 0


class _Judged(_Numbered, frozen=True):
    loss: float | None = None


class OnRecord(msgspec.Struct, frozen=True):
    """What a line says of the samples of its step."""

    samples: int = 0
    left_out: int = 0


def samples_on_record(path: Path) -> tuple[int, int]:
    """Of all steps that a metrics file holds: samples trained on, and samples left out."""
    trained = left_out = 0
    for line in path.read_bytes().splitlines() if path.exists() else ():
        found = json_or_none(line, OnRecord)
        if found is None:  # torn
            continue
        trained += found.samples - found.left_out
        left_out += found.left_out
    return trained, left_out


def loss_on_record(path: Path, step: int) -> float | None:
    """Of this step, if it is the last that a metrics file holds; None else, or if it has none."""
    lines = reversed(path.read_bytes().splitlines() if path.exists() else [])
    last = next((found for line in lines if (found := json_or_none(line, _Judged))), _Judged())
    return last.loss if last.step == step else None


def last_step(path: Path) -> int:
    """The last step that a metrics file holds, 0 if none. A torn last line does not count."""
    if not path.exists():
        return 0
    lines = reversed(path.read_bytes().splitlines())
    return next((step for step in map(_step_of, lines) if step), 0)


def _step_of(line: bytes) -> int:
    """The step of a record, 0 of a torn one."""
    found = json_or_none(line, _Numbered)
    return 0 if found is None else found.step
