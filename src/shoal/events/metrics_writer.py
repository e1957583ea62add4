"""Write the record of a run's steps, complete even if the writing rank dies.

Every rank keeps the latest steps in memory; one rank writes them to `metrics.jsonl` and the other
sinks, in the background (`sinks.py`). When that rank dies another one takes over, reads how far the
file got, and continues from the steps it remembers.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from shoal.errors import UsageError
from shoal.events.hosts import LATEST, hosts_record
from shoal.events.sinks import BackgroundSink, JsonLinesSink, Sink
from shoal.events.step import StepInfo
from shoal.logs import warn_once
from shoal.storage.decoding import try_decode_json
from shoal.storage.files import write_atomic
from shoal.system.processes import WORK

REMEMBERED = 4096
CLOSE_S = 10.0  # for all trackers together, at the end
FLUSH_S = 1.0  # the longest wait of a step with a checkpoint for the record


class MetricsWriter:
    """A hook of the trainer, and one before its saves. `writes` says whether this rank is the one
    that writes now."""

    def __init__(
        self,
        path: Path,
        writes: Callable[[], bool],
        trackers: Mapping[str, Callable[[], Sink]] = {},
    ):
        self._path = path
        self._writes = writes
        self._trackers = trackers
        self._recent: deque[StepInfo] = deque(maxlen=REMEMBERED)
        self._sinks: list[BackgroundSink] = []
        self._written = 0  # the last step that an earlier writer recorded

    def __call__(self, info: StepInfo) -> None:
        if self._recent and self._recent[-1].step == info.step:
            return  # it was saved, and so recorded before
        self._recent.append(info)
        if self._sinks:
            self._write(info)
        elif self._writes():
            self._take_over()

    def before_save(self, info: StepInfo) -> None:
        """Record a step before its checkpoint is begun: who dies after that may be gone on from
        there, and the record must not end earlier."""
        self(info)
        if self._sinks:
            self._sinks[0].flush(FLUSH_S)

    def flush(self) -> None:
        """Write everything that is queued: another rank may write from now on."""
        for sink in self._sinks:
            sink.flush(FLUSH_S)

    def close(self) -> None:
        if self._recent and not self._sinks and self._writes():
            self._take_over()  # the writer died after the last step
        self.end_trackers()
        for sink in self._sinks:
            sink.close()

    def end_trackers(self) -> None:
        """Close all sinks but the record itself, together, within a bound: the run is at its end,
        and its processes will be given no more time."""
        trackers, self._sinks = self._sinks[1:], self._sinks[:1]
        deadline = time.monotonic() + CLOSE_S
        for sink in trackers:
            sink.begin_close()
        while any(sink.is_alive for sink in trackers) and time.monotonic() < deadline:
            WORK.done += 1  # it is bounded, and no hang
            time.sleep(0.02)
        for sink in trackers:
            sink.close(0.0)

    def rewind(self, step: int) -> None:
        """Remove the steps after this one: the run resumes from it and repeats them."""
        if not self._path.exists():
            return
        content = self._path.read_bytes()
        lines = content.splitlines(keepends=True)
        kept = b"".join(line for line in lines if 0 < _step_of(line) <= step)
        if kept != content:  # removes a torn last line too
            write_atomic(self._path, kept)

    def _take_over(self) -> None:
        self._written = last_recorded_step(self._path)
        try:
            record = JsonLinesSink(self._path)
        except UsageError as error:  # the disk may be full or missing
            warn_once(f"{error} Training continues without that record.", on_screen=True)
            return
        self._sinks = [BackgroundSink(record, self._path.name, encode=step_record)]
        for name, open_sink in self._trackers.items():
            self._sinks.append(BackgroundSink(open_sink, name, encode=_TrackedRecord().of))
        for info in self._recent:
            self._write(info)

    def _write(self, info: StepInfo) -> None:
        if info.step > self._written:  # a repeated step is recorded already
            for sink in self._sinks:
                sink.put(info)


def step_record(info: StepInfo) -> Mapping[str, Any]:
    """A step as a record of `metrics.jsonl`."""
    data, compute, exchange, waiting = info.times
    record: dict[str, Any] = {
        "step": info.step,
        "loss": info.loss,
        "samples": info.samples,
        "rate": info.rate,
        "bytes_sent": info.bytes_sent,
        "times": {"data": data, "compute": compute, "exchange": exchange, "waiting": waiting},
    }
    if info.time:
        record["time"] = round(info.time, 6)
    if info.ranks:
        record["ranks"] = [round(seconds, 6) for seconds in info.ranks]
    if info.mark is not None:
        record["mark"] = info.mark
    if info.parts or info.logged or info.texts or info.images:
        for name in ("parts", "logged", "texts", "images"):
            if value := getattr(info, name):
                record[name] = value
    if info.norm is not None:
        record["norm"] = info.norm
    if info.evaluation is not None:
        record["evaluation"] = info.evaluation
    if info.left_out:
        record["left_out"] = info.left_out
    return record


class _TrackedRecord:
    """Records of one tracker: those of steps, and with the first step after a sample of the hosts
    what they use."""

    def __init__(self) -> None:
        self._seen: list[float] = []  # when each host was sampled

    def of(self, info: StepInfo) -> Mapping[str, Any]:
        record, seen = {**step_record(info)}, [use.time for use in [*LATEST.values()]]
        if seen != self._seen:
            self._seen, record["hosts"] = seen, hosts_record()
        return record


class _StepNumber(msgspec.Struct, frozen=True):
    step: int = 0


def last_recorded_step(path: Path) -> int:
    """The last step in a metrics file, 0 if none. A torn last line does not count."""
    if not path.exists():
        return 0
    lines = reversed(path.read_bytes().splitlines())
    return next((step for step in map(_step_of, lines) if step), 0)


def _step_of(line: bytes) -> int:
    """The step of a line, 0 of a torn one."""
    found = try_decode_json(line, _StepNumber)
    return 0 if found is None else found.step
