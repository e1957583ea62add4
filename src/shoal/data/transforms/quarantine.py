"""Quarantine: training skips the samples that fail, and a file lists them.

Without it, a sample that cannot be loaded stops the run. With it, the loader leaves the sample out
of its piece and calls `record`, which appends a line of JSON: source, index, error, reason. Each
process writes a sample once; several may write the same one.

Not for data that fails often: find out why, or `clean` it first. Cost: samples are loaded one by
one, even where the source could give many at once, so that the bad one is known.
"""

import errno
import fcntl
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from shoal.data.packing import BadSample
from shoal.data.sources import Pass, is_outage, outage_error
from shoal.data.transforms.fingerprint import identity_of
from shoal.data.transforms.wrapped import WrappedSource, inner_sources
from shoal.data.validate import path_of
from shoal.errors import RecipeError, ShoalError, UsageError, sendable
from shoal.logs import log, warn_once
from shoal.storage.decoding import try_decode_json

_MOST_REASON = 2000  # characters


class BadQuarantine(UsageError):
    """A quarantine file is damaged, or is none."""


class QuarantineEntry(msgspec.Struct, frozen=True):
    """A line of a quarantine file."""

    source: str
    index: int
    error: str
    reason: str

    def line(self) -> bytes:
        return msgspec.json.encode(self) + b"\n"


class Quarantined(WrappedSource):
    """A source whose bad samples are left out and written down; made by `quarantine`."""

    def __init__(self, source: Any, path: str | Path):
        super().__init__(source)
        self.path = check_quarantine_path(path)
        self.record = self._record
        self._seen: set[int] = set()
        self._lock = threading.Lock()

    def _sample(self, index: int, of: Pass | None) -> Any:
        with classify_errors(index):
            return super()._sample(index, of)

    def _record(self, index: int, error: Exception) -> None:
        """Write down that a sample failed; the first time in this process, and whole or not."""
        with self._lock:
            if index in self._seen:
                return
            self._seen.add(index)
        cause = error.__cause__ or error
        note = QuarantineEntry(
            source_kinds(self.source), index, type(cause).__name__, shorten(str(error))
        )
        log.warning("sample %d is left out: %s", index, note.reason)
        try:
            _append(self.path, note.line())
        except OSError as failed:
            # Its lines go into the log, so that nothing is left out without a trace.
            warn_once(
                f"The quarantine file {self.path} cannot be written: {failed.strerror}. Samples "
                "that it should name are named in the logs of the ranks alone.",
                kind=f"the quarantine file {self.path}",
                on_screen=True,
            )
            log.warning("its line would have been %s", note.line().decode().strip())

    def left_out(self) -> set[int]:
        """The samples of this source that its file names, whichever process wrote them there."""
        own = source_kinds(self.source)
        return {note.index for note in read_entries(self.path) if note.source == own}

    def identity(self) -> str:
        return identity_of(self.source)


def quarantine(source: Any, path: str | Path) -> Quarantined:
    """`source`, of which samples that fail are left out and written to the file `path`."""
    return Quarantined(source, path)


def quarantine_files(data: Any) -> Iterator[Path]:
    """Those that the parts of a source write to."""
    if isinstance(data, Quarantined):
        yield data.path
    for source in inner_sources(data):
        yield from quarantine_files(source)


def check_quarantine_path(path: str | Path) -> Path:
    """The path of a quarantine file, refused if it holds something else or cannot be written."""
    path = Path(path_of(path, "quarantine")).absolute()
    folder = next(parent for parent in path.parents if parent.exists())
    is_possible = folder.is_dir() and not path.is_dir()
    if is_possible and folder != path.parent:  # for root every directory looks writable
        with suppress(OSError):
            path.parent.mkdir(parents=True)
        is_possible = path.parent.is_dir()
    if not is_possible or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(
            f"the quarantine file {path} cannot be written. Name a file in a directory where this "
            "user may write."
        )
    if path.exists():
        with path.open("rb") as file:
            first = file.readline(8 * _MOST_REASON)
        if first and not _is_note(first):
            raise BadQuarantine(
                f"{path} holds something other than a quarantine's lines. Name a file of its own."
            )
    return path


def append_missing(path: Path, notes: Iterable[QuarantineEntry]) -> None:
    """Append the notes that are not in the file yet; several processes may do so at once."""
    lines = {note.line(): None for note in notes}
    if not lines:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # the kernel takes it back from one that is killed
            file.seek(0)
            present = set(file)
            file.write(b"".join(line for line in lines if line not in present))
    except OSError as error:
        raise UsageError(
            f"the quarantine file {path} cannot be written: {error.strerror}. Name one elsewhere."
        ) from error


def read_entries(path: Path) -> list[QuarantineEntry]:
    """The notes in a file. A last line without an end was cut off, and does not count."""
    try:
        *lines, _ = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    for number, line in enumerate(lines, 1):
        if not _is_note(line):
            raise BadQuarantine(
                f"line {number} of the quarantine file {path} is damaged, so it is not known which "
                "samples were left out. Mend it, with the help of the run's logs, or remove it."
            )
    return [msgspec.json.decode(line, type=QuarantineEntry) for line in lines]


def source_kinds(source: Any) -> str:
    """A source by its types, from the outermost to the innermost; its content is not looked at."""
    return " of ".join(
        [
            getattr(type(source), "recorded_as", type(source).__qualname__),
            *map(source_kinds, inner_sources(source)[:1]),
        ]
    )


def shorten(reason: str) -> str:
    """A reason as it can be written: not too long, and in UTF-8."""
    reason = sendable(reason)
    return reason if len(reason) <= _MOST_REASON else reason[: _MOST_REASON - 4] + " ..."


@contextmanager
def classify_errors(index: int) -> Iterator[None]:
    """Tell what is a sample's fault, and may be left out, from what is not, and ends the run."""
    try:
        yield
    except BadSample as error:
        raise RecipeError(f"sample {index}: {error}") from error
    except Exception as error:
        if is_outage(error) and not isinstance(error, ShoalError):
            raise outage_error(index, error) from error
        raise


def _append(path: Path, line: bytes) -> None:
    """One write to the end: lines of several processes do not mix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        if os.write(file, line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(file)


def _is_note(line: bytes) -> bool:
    return try_decode_json(line, QuarantineEntry) is not None
