"""The trace of a run: spans of all ranks in one file that Perfetto and chrome://tracing open.

It is in the array form of Chrome's trace events, and written as spans come, so that a run which is
killed leaves a file that can still be opened. A process of it is a rank, a thread of it a thread;
collectives, which overlap, are asynchronous events. Cost: some 150 bytes a span, in the process of
the supervisor. Read next: `tracing.py`, where spans are made.
"""

from pathlib import Path
from typing import Any

import msgspec

from shoal.events.events import TraceEvent, TraceSpan
from shoal.logs import warn_once

TRACE = "trace/trace.json"  # in the run directory
COLLECTIVE = "collective"


class TraceFile:
    """Call it with each TraceEvent; the file begins with the first, and `close` completes it."""

    def __init__(self, path: Path):
        self.path = path
        self.has_begun = False
        self._ids = 0
        self._threads: dict[tuple[int, str], int] = {}

    def __call__(self, event: TraceEvent) -> None:
        entries = [entry for span in event.spans for entry in self._entries(event.rank, span)]
        content = b"".join(b",\n" + msgspec.json.encode(entry) for entry in entries)
        if not self.has_begun:
            content = b"[\n" + content.removeprefix(b",\n")
        self._write(content, "ab" if self.has_begun else "wb")
        self.has_begun = True

    def close(self) -> None:
        if self.has_begun:
            self._write(b"\n]\n", "ab")

    def _write(self, content: bytes, mode: str) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open(mode) as file:
                file.write(content)
        except OSError as error:
            warn_once(f"{self.path} cannot be written: {error.strerror}. The run continues.")

    def _entries(self, rank: int, span: TraceSpan) -> list[dict[str, Any]]:
        names = []
        if (rank, span.thread) not in self._threads:
            if not any(known == rank for known, _ in self._threads):
                names.append(_name("process_name", rank, 0, f"rank {rank}"))
            number = self._threads[rank, span.thread] = len(self._threads) + 1
            names.append(_name("thread_name", rank, number, span.thread))
        thread = self._threads[rank, span.thread]
        common = {"name": span.name, "cat": span.kind, "pid": rank, "tid": thread}
        if span.kind != COLLECTIVE:
            timed = {"ph": "X", "ts": span.start_us, "dur": span.duration_us, "args": span.about}
            return [*names, {**common, **timed}]
        self._ids += 1
        ends = {"ph": "e", "ts": round(span.start_us + span.duration_us, 1), "id": self._ids}
        begins = {"ph": "b", "ts": span.start_us, "id": self._ids, "args": span.about}
        return [*names, {**common, **begins}, {**common, **ends}]


def _name(kind: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": thread, "ts": 0, "args": {"name": name}}
