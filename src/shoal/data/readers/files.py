"""Files read by range, on a disk or behind a URL, by any process and thread.

A file is looked at once, when it is opened, and each read compares: one that changed, shrank or
vanished is `SourceLost` with its name, never bytes of another file. Handles are made by the process
that uses them, at most 64 at a time, and reads name their offset (`pread`), so forks and threads do
not disturb each other.

A local read costs two system calls. One behind a URL costs two requests, the bytes and then a look
at the object; requests are repeated a few times while they fail (`storage/object_client.py`).
"""

import errno
import io
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import xxhash

from shoal.data.readers.records import SourceLost, hash_parts
from shoal.data.validate import options_of, path_of
from shoal.errors import UsageError
from shoal.storage.object_client import (
    RETRY_POLICY,
    ObjectClient,
    RetryPolicy,
    StoreError,
    redact_password,
    redact_url,
)
from shoal.system.processes import PerProcess

PathLike: TypeAlias = str | os.PathLike[str]
MOST_HANDLES = 64
BLOCK_BYTES = 8 << 20
_GLANCE_BYTES = 4 << 10
_PACKED = {  # by how a file begins; no text does
    "gzip": rb"\x1f\x8b",
    "bzip2": rb"BZh[1-9]1AY",
    "xz": rb"\xfd7zXZ",
    "zstd": rb"\x28\xb5\x2f\xfd",
    "zip": rb"PK\x03\x04",
}
_MARKS = (
    *("ETag", "etag", "md5", "checksum", "LastModified", "last_modified", "mtime"),
    *("modificationTime", "modification_time", "updated", "created"),
)


class Stamp(NamedTuple):
    """What tells one version of a file from another."""

    num_bytes: int
    mark: int  # a hash of the time or the tag


class Files:
    """Some files by number. `options` go to the back end of those behind a URL."""

    def __init__(
        self,
        paths: PathLike | Sequence[PathLike],
        options: Mapping[str, Any] | None = None,
        patience: RetryPolicy = RETRY_POLICY,
    ):
        given = list(paths) if isinstance(paths, Iterable) and not _is_one(paths) else [paths]
        if not given:
            raise UsageError("no file was named. A source reads one or more.")
        self._paths = [path_of(path, "a reader").removeprefix("file://") for path in given]
        self.names = [redact_url(path) for path in self._paths]
        self._disk = PerProcess(lambda: lru_cache(MOST_HANDLES)(_Handle))
        self._web = RemoteFiles(options_of(options), patience)
        self.stamps = [self._look(number) for number in range(len(self._paths))]

    def __len__(self) -> int:
        return len(self._paths)

    def identity(self, kind: str, *settings: object) -> str:
        """A name for what is read: files by their names, sizes and times, and how they are read."""
        paths = map(redact_password, self._paths)
        return hash_parts(kind, *settings, *zip(paths, self.stamps, strict=True))

    def content_name(self) -> str:
        """The same wherever the files lie: of all their sizes, of a few some blocks as well."""
        hashed = xxhash.xxh3_64(repr([stamp.num_bytes for stamp in self.stamps]).encode())
        for number in sorted({0, len(self) // 2, len(self) - 1}):
            last = max(0, self.num_bytes(number) - _GLANCE_BYTES)
            for start in (0, last // 2, last):
                stop = min(start + _GLANCE_BYTES, self.num_bytes(number))
                hashed.update(self.read(number, start, stop))
        return hashed.hexdigest()

    def num_bytes(self, number: int) -> int:
        return self.stamps[number].num_bytes

    def read(self, number: int, start: int, stop: int) -> bytes:
        """Bytes of a file, as it was when it was opened."""
        path, stamp = self._paths[number], self.stamps[number]
        if is_url(path):
            return self._web.read(path, start, stop, stamp)
        return self._disk.get()(path).read(start, stop, stamp)

    def blocks(self, number: int) -> Iterator[bytes]:
        """A whole file, block by block."""
        for start in range(0, self.num_bytes(number), BLOCK_BYTES):
            yield self.read(number, start, min(start + BLOCK_BYTES, self.num_bytes(number)))

    def file(self, number: int) -> io.RawIOBase:
        """A file as an object with `read` and `seek`, for libraries."""
        return _FileObject(self, number)

    def _look(self, number: int) -> Stamp:
        path, name = self._paths[number], self.names[number]
        try:
            return self._web.look(path) if is_url(path) else _stamp(os.stat(path))
        except FileNotFoundError:
            raise UsageError(f"{name} does not exist.") from None
        except IsADirectoryError:
            raise UsageError(f"{name} is a directory. Name the files in it.") from None
        except UsageError:
            raise
        except OSError as error:
            raise UsageError(f"{name} cannot be read: {error.strerror}.") from error


class RemoteFiles:
    """Objects behind URLs, through one connection for each bucket or host."""

    def __init__(self, options: Mapping[str, Any], patience: RetryPolicy):
        self._options, self._patience = options, patience
        self._remotes: PerProcess[dict[str, _VersionedObjects]] = PerProcess(dict)

    def look(self, url: str) -> Stamp:
        remote, path = self._remote(url)
        return remote.stamp(path)

    def read(self, url: str, start: int, stop: int, stamp: Stamp) -> bytes:
        remote, path = self._remote(url)
        try:
            content = remote.get_range(path, start, stop) if stop > start else b""
            if remote.stamp(path) != stamp or len(content) != stop - start:
                raise file_changed(redact_url(url))
        except FileNotFoundError:
            raise file_gone(redact_url(url)) from None
        except StoreError as error:
            raise SourceLost(str(error)) from error
        return content

    def find(self, url: str) -> dict[str, Stamp]:
        """All objects below a URL, by their path from there."""
        remote, path = self._remote(url.rstrip("/"))
        try:
            return remote.stamps(path)
        except FileNotFoundError:
            return {}

    def _remote(self, url: str) -> tuple["_VersionedObjects", str]:
        scheme, _, rest = url.partition("://")
        host, _, path = rest.partition("/")
        base = f"{scheme}://{host}"
        remotes = self._remotes.get()
        if base not in remotes:
            remotes.setdefault(base, _VersionedObjects(base, self._options, self._patience))
        return remotes[base], path


class _VersionedObjects(ObjectClient):
    """Adds to the requests what tells versions of an object apart."""

    def stamp(self, path: str) -> Stamp:
        return _stamp_of(self._request("look at", path, lambda system, at: system.info(at)), path)

    def stamps(self, folder: str) -> dict[str, Stamp]:
        found = self._request("list", folder, lambda system, at: system.find(at, detail=True))
        start = len(self._path(folder).rstrip("/")) + 1
        return {path[start:]: _stamp_of(entry, path) for path, entry in found.items()}


class _Handle:
    """An open file, which closes itself when no read uses it any more."""

    def __init__(self, path: str):
        self.number = -1
        self._path = path
        try:
            self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise file_gone(path, error.strerror) from error

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self.number >= 0:  # `os` may be gone when the interpreter ends
            close(self.number)

    def read(self, start: int, stop: int, stamp: Stamp) -> bytes:
        content = b"".join(self._parts(start, stop))
        if _stamp(os.fstat(self.number)) != stamp:  # behind: it may change while it is read
            raise file_changed(self._path)
        return content

    def _parts(self, start: int, stop: int) -> Iterator[bytes]:
        while start < stop:
            try:
                part = os.pread(self.number, stop - start, start)
            except OSError as error:
                raise SourceLost(f"{self._path} cannot be read: {error.strerror}.") from error
            if not part:
                raise file_changed(self._path)
            yield part
            start += len(part)


class _FileObject(io.RawIOBase):
    def __init__(self, files: Files, number: int):
        self._files, self._number, self._at = files, number, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        size = self._files.num_bytes(self._number)
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: size}[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        end = self._files.num_bytes(self._number)
        stop = end if size is None or size < 0 else min(end, self._at + size)
        content = self._files.read(self._number, self._at, stop) if stop > self._at else b""
        self._at += len(content)
        return content

    def readall(self) -> bytes:
        return self.read()


def refuse_compressed(files: Files, number: int, record: str) -> None:
    """Refuse a file that was packed as a whole; `record` is what would be looked for in it."""
    start = files.read(number, 0, min(8, files.num_bytes(number)))
    for kind, magic in _PACKED.items():
        if re.match(magic, start, re.DOTALL):
            raise UsageError(
                f"{files.names[number]} is compressed by {kind}. A {record} in the middle could "
                "only be read by unpacking all before it. Unpack the file once and name what comes "
                "out; if that is too large, make shards of it (shoal data build --compress zstd), "
                "which are compressed block by block."
            )


def _is_one(paths: Any) -> bool:
    return isinstance(paths, str | bytes | os.PathLike)


def is_url(path: str) -> bool:
    return "://" in path


def read_local(path: str, start: int, stop: int, stamp: Stamp) -> bytes:
    """Bytes of a file that is opened for this read alone."""
    return _Handle(path).read(start, stop, stamp)


def local_stamp(path: PathLike) -> Stamp:
    return _stamp(os.stat(path))


def file_changed(name: str) -> SourceLost:
    return SourceLost(
        f"{name} changed after it was opened. Its records are no longer where they were; leave "
        "files alone that a run reads, and start the run again."
    )


def file_gone(name: str, reason: str | None = None) -> SourceLost:
    reason = reason or "it is missing"
    return SourceLost(f"{name} cannot be opened any more: {reason}. It was there at the start.")


def _stamp(found: os.stat_result) -> Stamp:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError
    if not stat.S_ISREG(found.st_mode):  # a pipe would be waited for
        raise OSError(errno.EINVAL, "it is no regular file")
    return Stamp(found.st_size, found.st_mtime_ns)


def _stamp_of(entry: Mapping[str, Any], path: str) -> Stamp:
    if entry["type"] == "directory":
        raise IsADirectoryError(path)
    if entry.get("size") is None:
        raise UsageError(
            f"the server does not say how long {redact_url(path)} is. Copy it to a disk first."
        )
    mark = next((entry[key] for key in _MARKS if entry.get(key)), "")
    if isinstance(mark, datetime):  # a listing may give it as a number
        mark = mark.timestamp()
    return Stamp(int(entry["size"]), xxhash.xxh3_64_intdigest(str(mark).encode()) >> 1)
