"""The journal of the local queue: what happened to each job, one line each, only ever appended.

A line is on the disk before what it says has an effect that others see. The writer may be killed at
any byte: a last line without its end is ignored, and cut off before the next one is written. What
the journal says is `fold`, a pure function of its records. When it has grown, it is written again
with what still counts, in one act.

Cost: an fsync a record, some five records a job. Read next: `agent.py`, its only writer.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec

from shoal.cluster.engine import JobRequest, State
from shoal.errors import UsageError
from shoal.storage.decoding import decode_json, encode_json
from shoal.storage.files import write_atomic
from shoal.system.identity import ProcessIdentity

MOST_BYTES = 4 << 20  # after which it is written again
KEPT = 200  # jobs that have ended
Number = Annotated[int, msgspec.Meta(ge=1)]


class QueueLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What this user's jobs may take."""

    cores: Number | None = None  # None: all that there are
    running: Number = 1000  # jobs at a time
    waiting: Number = 1000
    grace: Number = 90  # seconds to save, before a job that is to stop is killed


class StopAsked(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """A job is to end: by the user, or at its time limit."""

    job: int
    at: float
    now: bool = False
    is_late: bool = False  # it reached its time limit


class JobSubmitted(msgspec.Struct, frozen=True, kw_only=True, tag="submitted"):
    job: int
    request: JobRequest
    python: str  # the interpreter that runs it
    token: str  # of the command that submitted it
    at: float


class JobStarted(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    job: int
    process: ProcessIdentity
    cores: tuple[int, ...]
    at: float


class ResizeAsked(msgspec.Struct, frozen=True, kw_only=True, tag="resizing"):
    job: int
    cores: tuple[int, ...]  # then


class JobResized(msgspec.Struct, frozen=True, kw_only=True, tag="resized"):
    """A resize is done or was refused: the cores that the job has now."""

    job: int
    cores: tuple[int, ...]


class JobRequeued(msgspec.Struct, frozen=True, kw_only=True, tag="requeued"):
    """It waits again: the machine went down under it, or it had not begun."""

    job: int
    counts: bool  # as a try


class JobEnded(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    job: int
    state: State
    exit_code: int | None
    reason: str
    at: float


class QueuedEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A job, as the journal knows it."""

    job: int
    request: JobRequest
    python: str
    token: str
    state: State = "queued"
    process: ProcessIdentity | None = None
    cores: tuple[int, ...] = ()
    resizing: tuple[int, ...] = ()  # the cores after a resize under way
    started_at: float = 0.0
    stop: StopAsked | None = None
    num_tries: int = 0
    exit_code: int | None = None
    reason: str = ""

    @property
    def is_active(self) -> bool:
        return self.state in ("queued", "running")


class JournalSnapshot(msgspec.Struct, frozen=True, kw_only=True, tag="snapshot"):
    """All that still counts of the records before it."""

    jobs: tuple[QueuedEntry, ...] = ()
    next_job: int = 1
    limits: QueueLimits = QueueLimits()


class LimitsSet(msgspec.Struct, frozen=True, kw_only=True, tag="limits"):
    limits: QueueLimits


JournalRecord = (
    JobSubmitted
    | JobStarted
    | ResizeAsked
    | JobResized
    | JobRequeued
    | StopAsked
    | JobEnded
    | LimitsSet
    | JournalSnapshot
)


class QueueState(msgspec.Struct, frozen=True, kw_only=True):
    """What a journal says."""

    jobs: dict[int, QueuedEntry] = {}
    next_job: int = 1
    limits: QueueLimits = QueueLimits()

    @property
    def active(self) -> list[QueuedEntry]:
        return [entry for entry in self.jobs.values() if entry.is_active]


def fold(records: Iterable[JournalRecord], state: QueueState | None = None) -> QueueState:
    """The state after these records. Pure."""
    found = state or QueueState()
    for record in records:
        found = _after(found, record)
    return found


def _after(state: QueueState, record: JournalRecord) -> QueueState:
    if isinstance(record, JournalSnapshot):
        jobs = {entry.job: entry for entry in record.jobs}
        return QueueState(jobs=jobs, next_job=record.next_job, limits=record.limits)
    if isinstance(record, LimitsSet):
        return msgspec.structs.replace(state, limits=record.limits)
    if isinstance(record, JobSubmitted):
        entry = QueuedEntry(
            job=record.job, request=record.request, python=record.python, token=record.token
        )
        jobs = {**state.jobs, record.job: entry}
        return msgspec.structs.replace(state, jobs=jobs, next_job=record.job + 1)
    before = state.jobs.get(record.job)
    if before is None:
        return state
    after = msgspec.structs.replace(before, **_changes(before, record))
    return msgspec.structs.replace(state, jobs={**state.jobs, record.job: after})


def _changes(
    entry: QueuedEntry,
    record: JobStarted | ResizeAsked | JobResized | JobRequeued | StopAsked | JobEnded,
) -> dict[str, object]:
    match record:
        case JobStarted():
            return {
                "state": "running",
                "process": record.process,
                "cores": record.cores,
                "started_at": record.at,
                "num_tries": entry.num_tries + 1,
            }
        case ResizeAsked():
            return {"resizing": record.cores}
        case JobResized():
            return {"cores": record.cores, "resizing": ()}
        case JobRequeued():
            tries = entry.num_tries - (not record.counts)
            gone = {"process": None, "cores": (), "resizing": (), "num_tries": tries}
            return {"state": "queued", **gone}
        case StopAsked():
            return {"stop": record}
        case JobEnded():
            ended = {"state": record.state, "exit_code": record.exit_code, "reason": record.reason}
            return {**ended, "process": None, "cores": (), "resizing": ()}


def read_journal(path: Path) -> QueueState:
    """What a journal says; nothing if there is none. UsageError if a line before the last one
    cannot be read."""
    return fold(_records(path)[0])


def _records(path: Path) -> tuple[list[JournalRecord], int]:
    """The records, and the length of the lines that they are in."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return [], 0
    whole = content[: content.rfind(b"\n") + 1]
    way_out = "Move it away; jobs that it names are lost to the queue, their runs are not."
    records: list[JournalRecord] = []
    for number, line in enumerate(whole.splitlines(), 1):
        what = f"Line {number} of the queue's journal {path}"
        records.append(decode_json(line, JournalRecord, what, way_out=way_out))  # type: ignore[arg-type]
    return records, len(whole)


class QueueJournal:
    """The journal as its only writer has it, and what it says so far."""

    def __init__(self, path: Path):
        self._path = path
        records, length = _records(path)
        self.state = fold(records)
        self._file = self._open()
        os.ftruncate(self._file, length)  # without a last line that is torn
        if length > MOST_BYTES:
            self._rewrite()

    def append(self, *records: JournalRecord) -> None:
        """Write records to the disk. OSError if that fails; then nothing was written."""
        content = b"".join(encode_json(record) + b"\n" for record in records)
        before = os.fstat(self._file).st_size
        try:
            done = 0
            while done < len(content):
                done += os.write(self._file, content[done:])
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, before)
            raise
        self.state = fold(records, self.state)

    def close(self) -> None:
        os.close(self._file)

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        return os.open(self._path, flags, 0o600)

    def _rewrite(self) -> None:
        """Only what still counts."""
        ended = [entry.job for entry in self.state.jobs.values() if not entry.is_active][:-KEPT]
        jobs = {job: one for job, one in self.state.jobs.items() if job not in set(ended)}
        self.state = msgspec.structs.replace(self.state, jobs=jobs)
        snapshot = JournalSnapshot(
            jobs=tuple(jobs.values()), next_job=self.state.next_job, limits=self.state.limits
        )
        os.close(self._file)
        write_atomic(self._path, encode_json(snapshot) + b"\n")
        self._file = self._open()


def set_limits(before: QueueLimits, words: dict[str, str]) -> QueueLimits:
    """Limits with some changed, as in `cores=2`; UsageError says what is wrong. Pure."""
    known = QueueLimits.__struct_fields__
    for name in words:
        if name not in known:
            raise UsageError(f"The queue has no limit {name!r}. Known: {', '.join(known)}.")
    numbers = {name: None if text == "all" else text for name, text in words.items()}
    try:
        return msgspec.convert(
            {**msgspec.structs.asdict(before), **numbers}, QueueLimits, strict=False
        )
    except msgspec.ValidationError:
        given = " ".join(f"{name}={text}" for name, text in words.items())
        raise UsageError(f"{given}: a limit is a whole number from 1 on, or cores=all.") from None
