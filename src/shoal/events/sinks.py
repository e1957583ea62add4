"""Sinks of records: JSON lines, TensorBoard, and a background thread that keeps them off the step.

A sink takes records (mappings) in order and may be as slow as a disk or a network.
`BackgroundSink` puts a bounded queue and one thread before it: the training loop only appends, and
a sink that blocks or fails costs one warning and some records, never a step. `metrics.jsonl` and
`events.jsonl` are the source of truth; all other views can be rebuilt from them.

Do not use `BackgroundSink` for records that must not be lost (a checkpoint's manifest, say): it
drops the oldest when the sink cannot keep up. Cost: `put` takes about 0.3 us, and the thread wakes
five times a second. Read next: `trackers.py`, `metrics_writer.py`, `meters.py`.
"""

import math
import os
import re
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from os import getpid
from pathlib import Path
from typing import Any, Protocol

import msgspec

from shoal.errors import UsageError, require
from shoal.events.events import Event, SpentEvent
from shoal.logs import warn_once

Record = Mapping[str, Any]

EVENTS, SPENT = "events.jsonl", "spent.jsonl"

# Numbers of a record that are not drawn: its position, and the ledger's mark.
NO_SCALARS = ("step", "time", "mark")
_PERIOD_S = 0.2
_AT_ONCE = 64  # records in one write
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL")  # in names of variables


class Sink(Protocol):
    """Takes records, in order, from one thread at a time; `close` is the last call.

    `write` may raise, and is called again with the next records. `shoal.testing.sinks` has the
    tests that one passes.
    """

    def write(self, *records: Record) -> None: ...

    def close(self) -> None: ...


class JsonLinesSink:
    """Append each record to a file as one line of JSON; NaN and infinities are written as null.

    Each write is one system call on a descriptor opened for appending, so several processes may
    write to one file, a fork duplicates nothing, and a killed process leaves whole lines.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._file = os.open(self.path, flags, 0o666)
        except OSError as error:
            raise UsageError(
                f"{self.path} cannot be opened for writing: {error.strerror}. "
                "Records are appended to this file; choose a directory that is writable."
            ) from error
        self._torn = self._ends_torn()
        self._encoder = msgspec.json.Encoder(enc_hook=_plain)

    def write(self, *records: Record | msgspec.Struct) -> None:
        lines = self._encoder.encode_lines(records)
        if self._torn:
            lines = b"\n" + lines
        self._torn = True  # until the last line is in the file
        written = os.write(self._file, lines)
        if written < len(lines):
            raise OSError(f"{self.path}: only {written} of {len(lines)} bytes were written.")
        self._torn = False

    def close(self) -> None:
        os.close(self._file)

    def _ends_torn(self) -> bool:
        """Whether an earlier writer was killed within its last line."""
        size = os.fstat(self._file).st_size
        return size > 0 and os.pread(self._file, 1, size - 1) != b"\n"


class EventsSink:
    """A run's `events.jsonl`; and `spent.jsonl`, for the many of one kind, which only strips are
    drawn from: who looks for what happened at the end of a record finds it there."""

    def __init__(self, run_dir: Path) -> None:
        self._events, self._run_dir = JsonLinesSink(run_dir / EVENTS), run_dir
        self._spent: JsonLinesSink | None = None

    def write(self, event: Event) -> None:
        if not isinstance(event, SpentEvent):
            self._events.write(event)
            return
        if self._spent is None:
            self._spent = JsonLinesSink(self._run_dir / SPENT)
        self._spent.write(event)

    def close(self) -> None:
        for sink in (self._events, self._spent):
            if sink is not None:
                sink.close()


class TensorBoardSink:
    """Write a record's numbers as TensorBoard scalars at the record's `step`.

    Nested mappings become names with slashes (`times/compute`); texts and images that callbacks
    logged go there too; other text and missing values stay in the JSON lines. The files are opened
    by the first record, so that the writer's own thread starts in the process that writes.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self._module = require("tensorboardX", extra="tensorboard")
        self._writer: Any = None

    def write(self, *records: Record) -> None:
        for record in records:
            self._write(record)

    def _write(self, record: Record) -> None:
        if "step" not in record:
            raise UsageError(
                f"A record of {', '.join(record) or 'nothing'} has no step. TensorBoard draws "
                "scalars over steps; send it records of metrics, not events."
            )
        if self._writer is None:
            self._writer = self._module.SummaryWriter(str(self.directory))
        step, time = int(record["step"]), record.get("time")
        for name, value in scalars(record):
            if name not in NO_SCALARS:
                self._writer.add_scalar(name, value, step, walltime=time)
        for name, text in record.get("texts", {}).items():
            self._writer.add_text(name, text, step, walltime=time)
        for name, place in record.get("images", {}).items():
            self._add_image(name, self.directory.parent / place, step, time)

    def _add_image(self, name: str, path: Path, step: int, time: float | None) -> None:
        """As the PNG file that it is; one that was removed since is left out."""
        if not path.is_file():
            return
        content = path.read_bytes()
        width, height = struct.unpack(">II", content[16:24])
        kinds = require("tensorboardX.proto.summary_pb2", extra="tensorboard").Summary
        image = kinds.Image(height=height, width=width, encoded_image_string=content)
        summary = kinds(value=[kinds.Value(tag=name, image=image)])
        self._writer.file_writer.add_summary(summary, step, time)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class BackgroundSink:
    """A sink behind a bounded queue and one daemon thread.

    `put` may be called from any thread and never waits. What is put may be of any form that
    `encode` turns into a record; `encode` runs in the thread, so that a step pays for the append
    alone. A sink may be given as the function that opens it, which the thread calls with the first
    records, and again with the next ones if it raises. The thread starts with the first `put` of a
    process; after a fork, what the parent had queued stays the parent's. Call `close` at the end:
    the thread does not outlive the interpreter.
    """

    def __init__(
        self,
        sink: Sink | Callable[[], Sink],
        name: str,
        capacity: int = 4096,
        encode: Callable[[Any], Record] | None = None,
    ) -> None:
        if capacity < 1:
            raise UsageError(
                f"capacity={capacity} of the sink {name!r}: a queue must hold at least 1 record."
            )
        self.name = name
        self._open = sink if callable(sink) else lambda: sink
        self._sink = None if callable(sink) else sink
        self._capacity = capacity
        self._encode = encode
        self._warned = False
        self._closed = False
        self._pid = 0
        self._reset()

    def put(self, item: Any) -> None:
        """Queue one item; beyond the capacity the oldest one is dropped."""
        if self._pid != getpid():
            self._start()
        items = self._items
        if len(items) >= self._capacity and not self._warned:
            self._warn(f"does not keep up; the oldest of more than {self._capacity} records go")
        items.append(item)
        self._num_put += 1

    @property
    def num_dropped(self) -> int:
        """Records that never reached the sink. Exact while the thread is idle and after `close`."""
        return self._num_put - self._num_taken - len(self._items) + self._num_failed

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until all queued items are written; False after the timeout."""
        if self._pid != getpid():
            return True
        done = threading.Event()
        self._asked.append(done)
        self._wake.set()
        return done.wait(timeout_s)

    @property
    def is_alive(self) -> bool:
        """Whether its thread has more to write, or to wait for."""
        return self._thread is not None and self._thread.is_alive()

    def begin_close(self) -> None:
        """Let the thread write what is queued and close the sink, without waiting for it."""
        if not self._closed and self._pid != getpid():
            self._start()
        self._closed = True
        self._wake.set()

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is queued and close the sink; one that hangs is abandoned after the timeout.

        The sink's own `close` runs in the thread too, since it may block like a write.
        """
        self.begin_close()
        thread = self._thread
        assert thread is not None
        thread.join(timeout_s)
        if thread.is_alive():
            lost = len(self._items)
            self._items.clear()
            self._warn(f"did not finish in time at the end; {lost} queued records are lost")

    def _reset(self) -> None:
        self._items: deque[Any] = deque(maxlen=self._capacity)
        self._asked: deque[threading.Event] = deque()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._num_put = self._num_taken = self._num_failed = 0

    def _start(self) -> None:
        if self._closed:
            raise RuntimeError(f"The sink {self.name!r} is closed; nothing can be put into it.")
        self._reset()  # after a fork, locks and queue belong to the parent
        self._pid = getpid()
        self._thread = threading.Thread(target=self._work, name=f"sink-{self.name}", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while True:
            self._wake.wait(_PERIOD_S)
            self._wake.clear()
            closing = self._closed  # read before draining: what was put before close() is queued
            asked = [self._asked.popleft() for _ in range(len(self._asked))]
            self._drain()
            for done in asked:
                done.set()
            if closing:
                break
        try:
            if self._sink is not None:
                self._sink.close()
        except Exception as error:  # noqa: BLE001 (a sink may fail in any way)
            self._warn(f"could not be closed: {type(error).__name__}: {error}")

    def _drain(self) -> None:
        while self._items:
            try:
                items = [self._items.popleft() for _ in range(min(len(self._items), _AT_ONCE))]
            except IndexError:  # close() timed out and emptied the queue
                return
            self._num_taken += len(items)
            try:
                if self._sink is None:
                    self._sink = self._open()
                self._sink.write(*(items if self._encode is None else map(self._encode, items)))
            except Exception as error:  # noqa: BLE001 (a sink may fail in any way)
                self._num_failed += len(items)
                self._warn(f"failed: {type(error).__name__}: {error}")

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            warn_once(
                f"The sink {self.name!r} {redact_secrets(what).rstrip('.')}. Training continues "
                "without the lost records; this warning is shown once.",
                on_screen=True,
            )


def redact_secrets(text: str) -> str:
    """A message of a library without users and passwords of URLs, and without what environment
    variables hold whose names say that they are secret."""
    for name, value in os.environ.items():
        if _SECRET.search(name.upper()) and len(value) >= 6:
            text = text.replace(value, "***")
    return re.sub(r"//[^/\s@'\"]+@", "//***@", text)


def scalars(record: Record, prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a record, nested names joined by slashes."""
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield prefix + key, float(value)
        elif hasattr(value, "item") and math.prod(getattr(value, "shape", ())) == 1:
            yield prefix + key, float(value.item())


def _plain(value: Any) -> Any:
    """Convert what msgspec cannot encode: numbers of numpy and torch, and paths."""
    if hasattr(value, "item"):
        return value.item()  # raises for more than one element, which has no place in a record
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")
