"""What a server did, on disk, so that its successor does it again and holds the same bits.

Each update is written down before it is answered: which pieces it was of, how they were scaled, and
their summed gradients. A successor begins with the newest snapshot (or the first weights) and steps
on what follows it. A record that a death cut short was never answered, and is dropped. When records
outgrow the state a snapshot takes their place.

Files are overwritten, not made again: a page that the system holds already costs a third of a new
one. So what follows the last record may be an old one, which is known by the number of the snapshot
that its digest was taken with.

It survives the server, not the machine: nothing waits for the disk. Cost: the gradients' bytes
into the page cache, per update. Not for runs whose servers have copies, which need none of it.
"""

import hashlib
import os
import shutil
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from shoal.comm.wire import bytes_of, digest_of
from shoal.logs import warn_on_screen
from shoal.storage.files import write_all

MOST_GROWTH = 4  # times the snapshot's bytes, then another is made
LEAST_BYTES = 64 << 20
_HEAD = struct.Struct("<QQI")  # digest of the rest, length of the header, number of frames
_LENGTH = struct.Struct("<Q")


class Journal:
    def __init__(self, directory: Path, life: str):
        """`life` is the run's secret: what another left in the directory is removed.

        Of the secret a hash is written, and only this user may read the directory.
        """
        self._directory = directory
        self._file: BinaryIO | None = None
        self._num_bytes, self._most_bytes = 0, LEAST_BYTES
        self._number, self._is_lost = 0, False
        try:
            marked, mark = directory / "life", hashlib.sha256(life.encode()).hexdigest()
            if not marked.exists() or marked.read_text() != mark:
                shutil.rmtree(directory, ignore_errors=True)
                directory.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                directory.mkdir(parents=True)
                marked.write_text(mark)
        except OSError as error:
            self._give_up(error)

    def read(self) -> Iterator[tuple[bytes, list[bytes]]]:
        """The newest snapshot, if there is one, and all that followed; then `begin` or `append`."""
        names = sorted(self._directory.glob("snapshot-*[0-9]"))
        self._number = int(names[-1].name.partition("-")[2]) if names else 0
        snapshot, log = self._path("snapshot"), self._path("log")
        try:
            whole = list(records_of(snapshot, self._number)) if names else []
            if len(whole) != len(names[-1:]):  # what followed is of no use without it
                raise ValueError(f"{snapshot} is damaged")
            yield from whole
            yield from records_of(log, self._number)
            self._num_bytes = log.stat().st_size if log.exists() else 0
        except (OSError, ValueError) as error:
            self._give_up(error)

    def append(self, header: bytes, tensors: Sequence[bytes | Tensor]) -> None:
        """Write an update down."""
        if self._is_lost:
            return
        try:
            if self._file is None:
                self._file = self._path("log").open("ab", buffering=0)
            self._num_bytes += write_record(self._file, header, tensors, self._number)
        except (OSError, ValueError) as error:
            self._give_up(error)

    @property
    def is_long(self) -> bool:
        """Whether it is time for a snapshot."""
        return self._file is not None and self._num_bytes > self._most_bytes

    def begin(self, header: bytes, tensors: Sequence[bytes | Tensor]) -> None:
        """Put a snapshot of the state in the place of everything before it."""
        if self._is_lost:
            return
        old, log, spare = self._path("snapshot"), self._path("log"), self._directory / "spare"
        self._number += 1
        try:
            with _over(spare) as file:
                num_bytes = write_record(file, header, tensors, self._number)
            spare.rename(self._path("snapshot"))  # from here on it counts
            if self._file is not None:
                self._file.close()
            for path, new in ((log, self._path("log")), (old, spare)):
                if path.exists():
                    path.rename(new)
            self._file = _over(self._path("log"))
        except OSError as error:
            self._give_up(error)
            return
        self._num_bytes, self._most_bytes = 0, max(LEAST_BYTES, MOST_GROWTH * num_bytes)

    def remove(self) -> None:
        """The run is over."""
        if self._file is not None:
            self._file.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _path(self, kind: str) -> Path:
        return self._directory / f"{kind}-{self._number:06d}"

    def _give_up(self, error: Exception) -> None:
        """A disk that is full must not end the run; but a log with holes is worse than none."""
        self.remove()
        self._file, self._is_lost = None, True
        warn_on_screen(
            f"The journal of this server in {self._directory} was given up: {error}. The run goes "
            "on. If the server dies, so does the run: resume from its newest checkpoint then, with "
            "the same command and --resume, when there is room on the disk."
        )


def _over(path: Path) -> BinaryIO:
    """A file to be written from its start on, over what is there."""
    path.touch()
    return path.open("r+b", buffering=0)


def write_record(
    file: BinaryIO, header: bytes, tensors: Sequence[bytes | Tensor], number: int = 0
) -> int:
    """Returns its bytes."""
    frames = [header, *(bytes_of(tensor) for tensor in tensors)]
    lengths = b"".join(_LENGTH.pack(len(frame)) for frame in frames[1:])
    digest = digest_of([_LENGTH.pack(number), lengths, *frames])
    head = _HEAD.pack(digest, len(header), len(tensors))
    parts = [memoryview(part).cast("B") for part in (head, lengths, *frames)]
    total = sum(len(part) for part in parts)
    for part in parts:
        write_all(file.fileno(), part)
    return total


def records_of(path: Path, number: int = 0) -> Iterator[tuple[bytes, list[bytes]]]:
    """What was written under a number and is whole in a file; the rest is cut off."""
    if not path.exists():
        return
    good = 0
    with path.open("rb") as file:
        while record := _read(file, number):
            yield record
            good = file.tell()
    os.truncate(path, good)


def _read(file: BinaryIO, number: int) -> tuple[bytes, list[bytes]] | None:
    """The next record, if it is whole; no more is asked of the system than the file holds."""
    left = os.fstat(file.fileno()).st_size - file.tell() - _HEAD.size
    if left < 0:
        return None
    digest, length, num_frames = _HEAD.unpack(file.read(_HEAD.size))
    left -= length + num_frames * _LENGTH.size
    if left < 0:
        return None
    table = file.read(num_frames * _LENGTH.size)
    lengths = [number for (number,) in _LENGTH.iter_unpack(table)]
    if sum(lengths) > left:
        return None
    frames = [file.read(size) for size in (length, *lengths)]
    found = digest_of([_LENGTH.pack(number), table, *frames])
    return (frames[0], frames[1:]) if found == digest else None
