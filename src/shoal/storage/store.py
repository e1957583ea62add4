"""A store of checkpoints: a small protocol, and its implementation on a local or shared disk.

A store holds checkpoints by name. A checkpoint appears whole or not at all: it is written as a
draft, which only its writers see, and committed in one atomic act. On a disk this is a rename,
after fsync of every file; in an object store (`object_store.py`) it is the write of the seal. A
draft that a killed writer left is swept away by the next one.

`shoal.testing.stores` has the tests that every store must pass.
"""

import ctypes
import mmap
import os
import shutil
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from shoal.errors import BadCheckpoint, UnusableCheckpoint
from shoal.faults import faultpoint
from shoal.storage.files import write_all

# Linux's, which Python does not name.
MAP_NORESERVE = 0x4000
AT_FDCWD, RENAME_EXCHANGE = -100, 2
_DRAFT = ".saving-"
SEAL = "manifest.sha256"  # the file that makes a draft a checkpoint, written last
MOST_CHUNK_BYTES = 16 << 20  # a reader always verifies whole chunks


class FileReader(Protocol):
    """An open file."""

    num_bytes: int
    is_stable: bool  # bytes that were read once cannot change in a later read

    def read(self, start: int, length: int) -> memoryview:
        """Bytes of the file; raises BadCheckpoint if the file is too short."""
        ...


class Draft(Protocol):
    """A checkpoint being written, by one or several processes."""

    def write(self, file: str, parts: Iterable[memoryview | bytes]) -> None:
        """Write a file; it exists, whole and durable, when this returns, and not before.

        A part may change once the next one is requested, so a store that may have to send it again
        copies it. Raises OSError if the draft was discarded. The seal may be held back until the
        commit.
        """
        ...

    def read(self, file: str) -> bytes | None:
        """A file of any writer; None if it is not written yet. Raises OSError if the draft was
        discarded."""
        ...

    def commit(self, drop: Iterable[str]) -> None:
        """Publish the checkpoint under its name, without the files in `drop`. Called once, by the
        writer of the seal, after all other writers have finished."""
        ...

    def discard(self) -> None:
        """Remove what was written. Never raises."""
        ...


class Store(Protocol):
    """Checkpoints by name."""

    def names(self) -> list[str]:
        """The committed checkpoints, sorted."""
        ...

    def files(self, name: str) -> set[str]: ...

    def open(self, name: str, file: str) -> FileReader: ...

    def fall_over(self, name: str) -> bool:
        """Read this checkpoint from another copy from now on, for this one is bad or away; False
        if there is none."""
        ...

    def create_draft(self, name: str, token: str) -> Draft:
        """Start a checkpoint. It replaces one of the same name, which is removed whole, now or at
        the commit. So do this only where there is none, or a bad one."""
        ...

    def join_draft(self, name: str, token: str) -> Draft:
        """Write to a draft that another writer created."""
        ...

    def sweep(self) -> None:
        """Remove abandoned drafts. Called before a draft is created."""
        ...

    def remove(self, name: str) -> None: ...


class DirectoryStore:
    """A store in a directory; other processes may write to it too."""

    def __init__(self, path: Path):
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def names(self) -> list[str]:
        with suppress(FileNotFoundError):
            entries = [entry for entry in os.scandir(self.path) if self._is_listed(entry)]
            return sorted(entry.name for entry in entries)
        return []

    def files(self, name: str) -> set[str]:
        return set(os.listdir(self._folder(name)))

    def open(self, name: str, file: str) -> "MappedFile":
        return MappedFile(self._folder(name) / file)

    def fall_over(self, name: str) -> bool:
        return False

    def create_draft(self, name: str, token: str) -> "DirectoryDraft":
        draft = self.join_draft(name, token)
        os.makedirs(draft.path)
        return draft

    def join_draft(self, name: str, token: str) -> "DirectoryDraft":
        return DirectoryDraft(self.path, name, token)

    def sweep(self) -> None:
        with suppress(FileNotFoundError):
            for entry in os.listdir(self.path):
                if entry.startswith(_DRAFT):
                    _clear_away(self.path / entry)

    def remove(self, name: str) -> None:
        """Rename it away first, so that no reader finds half of a checkpoint."""
        gone = self.path / f"{_DRAFT}removing-{name}"
        _clear_away(gone)  # left by a removal that was killed
        os.rename(self.path / name, gone)
        faultpoint("checkpoint.removing")
        shutil.rmtree(gone)

    def _is_listed(self, entry: os.DirEntry[str]) -> bool:
        """Directories, and links that lead out of the store, so that opening one raises an error.

        A link to a neighbour, such as `latest`, is only a second name.
        """
        if entry.name.startswith("."):
            return False
        if not entry.is_symlink():
            return entry.is_dir()
        target = os.path.realpath(entry.path)
        return not entry.is_file() and os.path.dirname(target) != os.path.realpath(self.path)

    def _folder(self, name: str) -> Path:
        path = self.path / name
        if path.is_symlink():
            raise UnusableCheckpoint(
                f"{name} is a link, to {os.readlink(path)}, and a link in a directory of "
                "checkpoints is not followed. Name the place that it leads to."
            )
        return path


class DirectoryDraft:
    def __init__(self, store: Path, name: str, token: str):
        self._store, self._name = store, name
        self.path = store / f"{_DRAFT}{name}-{token}"

    def write(self, file: str, parts: Iterable[memoryview | bytes]) -> None:
        unfinished = self.path / f"{file}.part"
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            for part in parts:
                write_all(descriptor, part)
                faultpoint("checkpoint.after_chunk")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(unfinished, self.path / file)
        faultpoint("checkpoint.after_file")

    def read(self, file: str) -> bytes | None:
        try:
            return (self.path / file).read_bytes()
        except FileNotFoundError:
            os.stat(self.path)  # raises if the draft was discarded
            return None

    def commit(self, drop: Iterable[str]) -> None:
        for file in drop:
            os.unlink(self.path / file)
        _sync_directory(self.path)
        target = self._store / self._name
        faultpoint("checkpoint.sealed")
        if os.path.lexists(target):  # of an earlier attempt of the run
            _exchange(self.path, target)
            _clear_away(self.path)
        else:
            os.rename(self.path, target)
        _sync_directory(self._store)
        faultpoint("checkpoint.committed")

    def discard(self) -> None:
        """Rename it away first, so that a writer that still runs cannot add to it."""
        gone = self.path.with_name(f"{self.path.name}-{os.urandom(4).hex()}")
        with suppress(OSError):  # another writer has discarded it
            os.rename(self.path, gone)
        shutil.rmtree(gone, ignore_errors=True)


class MappedFile:
    """A memory-mapped file: a page is read when it is used."""

    is_stable = True

    def __init__(self, path: Path):
        self._path = path
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            raise BadCheckpoint(f"{path.name} is missing.") from None
        except OSError as error:
            raise UnusableCheckpoint(f"{path.name} cannot be opened: {error.strerror}.") from None
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise BadCheckpoint(f"{path.name} is not a file.")
            self.num_bytes = found.st_size
            # Private, since torch needs writable memory; not reserved, or a file larger than the
            # memory could not be opened.
            flags, rights = mmap.MAP_PRIVATE | MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
            self._map = (
                memoryview(mmap.mmap(descriptor, self.num_bytes, flags, rights))
                if self.num_bytes
                else memoryview(b"")
            )
        finally:
            os.close(descriptor)

    def read(self, start: int, length: int) -> memoryview:
        if start < 0 or length < 0 or start + length > self.num_bytes:
            raise BadCheckpoint(
                f"{self._path.name} has {self.num_bytes} bytes; {start + length} were to be there."
            )
        return self._map[start : start + length]


def _exchange(one: Path, other: Path) -> None:
    """Swap two directories in one act, or in three where the file system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    here = (AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other))
    if libc.renameat2(*here, RENAME_EXCHANGE) == 0:
        return
    aside = other.with_name(f"{_DRAFT}replaced-{other.name}")
    _clear_away(aside)
    os.rename(other, aside)
    os.rename(one, other)
    os.rename(aside, one)


def _clear_away(path: Path) -> None:
    """Remove a directory and its content, or a link."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
