"""The flight recorder: the last collectives of this process, for the report of a hang.

A ring holds what each collective was (operation, bucket, bytes, step), the line that started it,
and when it began and ended. A collective has a number within its group, the same on every rank, so
that a supervisor which hears of two ranks knows which of them did not come
(`comm/hangs.py`). While steps are traced, each one is a span as well. Works on any transport,
since it records what Shoal calls and not what the transport does.

Cost: under 1 us a collective (bench `ui-recording`). Read next: `collectives.py`, which calls it.
"""

import sys
from collections import deque
from pathlib import Path
from time import perf_counter
from types import CodeType

import msgspec

from shoal.events.tracing import TRACER

MOST_RECORDS = 256
MOST_TOLD = 4  # of the collectives that a rank waits for
_PACKAGE = f"{Path(__file__).parents[1]}/"
_TRANSPORTS = (f"{_PACKAGE}comm/", f"{_PACKAGE}parallel/pipeline/messages.py")
_is_transport: dict[str, bool] = {}  # by file, whether it is of these


class OpenCollective(msgspec.Struct, frozen=True):
    """One that this rank has begun and not ended."""

    op: str
    what: str  # a bucket, say, and how many bytes
    step: int
    at: str  # the line that began it
    group: str  # the same on all its ranks
    number: int  # in its group
    ranks: tuple[int, ...]  # that take part
    seconds: float


class Standing(msgspec.Struct, frozen=True):
    """Where a rank is that has begun and ended no collective for a while."""

    open: tuple[OpenCollective, ...]  # the oldest first
    reached: dict[str, int]  # by group, the last number that it began
    line: str = ""  # that it computes at; empty if it waits


class CollectiveRecord(msgspec.Struct, gc=False):
    """One entry of the ring; call `end` once it is over."""

    op: str
    what: str
    num_bytes: int
    group: str
    number: int
    ranks: tuple[int, ...]
    step: int
    code: CodeType  # of the function that began it
    instruction: int  # of it; to tell the line takes longer
    began: float
    ended: float = 0.0

    def end(self) -> None:
        if self.ended:
            return
        self.ended = perf_counter()
        if TRACER.is_on:
            about = {"step": self.step, "bytes": self.num_bytes, "at": self.at}
            about |= {"group": self.group, "number": self.number}
            name = f"{self.op} {self.what}".rstrip()
            TRACER.add(name, "collective", self.began, self.ended, about)

    @property
    def at(self) -> str:
        """The line that began it."""
        name = self.code.co_filename.removeprefix(_PACKAGE)
        lines = (line for start, end, line in self.code.co_lines() if self.instruction < end)
        return f"{self.code.co_name} ({name}:{next(lines, 0)})"

    @property
    def named(self) -> str:
        """What it is, for an error."""
        what = f"{self.what}, " if self.what else ""
        return f"{self.op} ({what}{self.num_bytes} bytes) of step {self.step}, begun at {self.at}"

    def told(self, now: float) -> OpenCollective:
        what = f"{self.what}, {self.num_bytes} bytes" if self.what else f"{self.num_bytes} bytes"
        place = self.group, self.number, self.ranks
        return OpenCollective(self.op, what, self.step, self.at, *place, now - self.began)

    def __str__(self) -> str:
        took = f"{1000 * (self.ended - self.began):.1f} ms" if self.ended else "NOT ENDED"
        return (
            f"step {self.step}  {self.op} {self.what}  {self.num_bytes} bytes  number "
            f"{self.number} of {self.group}, ranks {', '.join(map(str, self.ranks))}  "
            f"{self.at}  {took}"
        )


class BlockedTime:
    """`with` it, the training thread waits for others; `seconds` of all so far. May be nested."""

    def __init__(self) -> None:
        self.seconds, self._depth, self._began = 0.0, 0, 0.0

    def __enter__(self) -> None:
        if not self._depth:
            self._began = perf_counter()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if not self._depth:
            self.seconds += perf_counter() - self._began


class FlightRecorder:
    """Of one process. The thread that communicates calls `begin`; another reads `standing`."""

    def __init__(self) -> None:
        self.step = 0  # under way, counted from 1
        self.what = ""  # that the collectives begun now are for: a bucket
        self.blocked = BlockedTime()
        self.waited = BlockedTime()  # of it, for another stage of the pipeline
        self._ring: deque[CollectiveRecord] = deque(maxlen=MOST_RECORDS)
        self._reached: dict[str, int] = {}  # by group

    def begin(
        self, op: str, group: str, ranks: tuple[int, ...], num_bytes: int, what: str = ""
    ) -> CollectiveRecord:
        number = self._reached[group] = self._reached.get(group, 0) + 1
        frame = sys._getframe(1)
        while (is_inside := _is_transport.get(frame.f_code.co_filename)) is not False:
            if is_inside is None:
                file = frame.f_code.co_filename
                _is_transport[file] = file.startswith(_TRANSPORTS)
            elif frame.f_back is None:
                break
            else:
                frame = frame.f_back
        record = CollectiveRecord(
            op,
            what or self.what,
            num_bytes,
            group,
            number,
            ranks,
            self.step,
            frame.f_code,
            frame.f_lasti,
            perf_counter(),
        )
        self._ring.append(record)
        return record

    def forget(self) -> None:
        """The groups are over: what had not ended in them never will."""
        self._ring.clear()
        self._reached.clear()

    def records(self) -> list[CollectiveRecord]:
        """The oldest first; other threads may begin more meanwhile."""
        while True:
            try:
                return list(self._ring)
            except RuntimeError:  # it changed while it was copied
                continue

    def standing(self, idle_s: float) -> Standing | None:
        """Where this rank stands; None if it began or ended a collective within `idle_s`."""
        now, records = perf_counter(), self.records()
        last = max((max(r.began, r.ended) for r in records), default=0.0)
        if not records or now - last < idle_s:
            return None
        waits = [record.told(now) for record in records if not record.ended][:MOST_TOLD]
        return Standing(tuple(waits), dict(self._reached))

    def table(self, count: int = 32) -> str:
        """The last of them as lines, for a log."""
        return "\n".join(map(str, self.records()[-count:])) or "none"


RECORDER = FlightRecorder()
