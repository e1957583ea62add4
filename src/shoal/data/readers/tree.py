"""All files below a folder or URL, sorted, read whole by number.

Listed once; each file's size and time are kept, and one that changed since is `SourceLost`. Hidden
files and folders are passed over. Links are followed, and one that leads back above itself is
refused. Cost: some 20 bytes and the name for each file; a read opens, reads and closes.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import xxhash

from shoal.data.readers.files import PathLike, RemoteFiles, Stamp, is_url, local_stamp, read_local
from shoal.data.readers.records import NameTable, hash_parts
from shoal.data.validate import options_of, path_of
from shoal.errors import UsageError
from shoal.storage.object_client import RETRY_POLICY, RetryPolicy, redact_password

Wanted = Callable[[str], bool]


class FileTree:
    """The files below `root` whose path `wanted` accepts; paths are from there, with slashes."""

    def __init__(
        self,
        root: PathLike,
        wanted: Wanted,
        options: Mapping[str, Any] | None = None,
        patience: RetryPolicy = RETRY_POLICY,
    ):
        self._root = path_of(root, "a reader").removeprefix("file://").rstrip("/")
        self._web = RemoteFiles(options_of(options), patience)
        found = dict(self._found())
        if not found and is_url(self._root):  # there, a folder is but the names of its files
            raise UsageError(f"{self} does not exist, or holds no file.")
        paths = sorted(path for path in found if wanted(path))
        self.num_left_out = len(found) - len(paths)
        self.paths = NameTable(paths)
        self._sizes = np.array([found[path].num_bytes for path in paths], dtype=np.int64)
        self._marks = np.array([found[path].mark for path in paths], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.paths)

    def __str__(self) -> str:
        return redact_password(self._root)

    def name(self, number: int) -> str:
        return f"{self}/{self.paths[number]}"

    def identity(self, *settings: object) -> str:
        """A name for what is read: the root, each file's path, size and time."""
        arrays = (
            xxhash.xxh3_128_hexdigest(array.tobytes()) for array in (self._sizes, self._marks)
        )
        return hash_parts(
            str(self), *settings, *arrays, *map(self.paths.__getitem__, range(len(self)))
        )

    def content_name(self) -> str:
        """The same wherever the root lies: of all files path and size, of three the content."""
        hashed = xxhash.xxh3_64(self._sizes.tobytes())
        for number in range(len(self)):
            hashed.update(f"{self.paths[number]}\0".encode(errors="surrogateescape"))
        for number in sorted({0, len(self) // 2, len(self) - 1}) if len(self) else ():
            hashed.update(self.read(number))
        return hashed.hexdigest()

    def read(self, number: int) -> bytes:
        """A whole file, as it was when it was listed."""
        path = f"{self._root}/{self.paths[number]}"
        stamp = Stamp(int(self._sizes[number]), int(self._marks[number]))
        if is_url(path):
            return self._web.read(path, 0, stamp.num_bytes, stamp)
        return read_local(path, 0, stamp.num_bytes, stamp)

    def _found(self) -> Iterator[tuple[str, Stamp]]:
        if not is_url(self._root):
            yield from _walk(self._root, "", ())
            return
        for path, stamp in self._web.find(self._root).items():
            if not any(part.startswith(".") for part in path.split("/")):
                yield path, stamp


def _walk(
    root: str, folder: str, above: tuple[tuple[int, int], ...]
) -> Iterator[tuple[str, Stamp]]:
    here = os.path.join(root, folder)
    try:
        found = os.stat(here)
        names = sorted(name for name in os.listdir(here) if not name.startswith("."))
    except OSError as error:
        raise UsageError(f"{here} cannot be listed: {error.strerror}.") from error
    if (found.st_dev, found.st_ino) in above:
        raise UsageError(f"{here} is a link to a folder that it lies in. Remove the link.")
    above = (*above, (found.st_dev, found.st_ino))
    for name in names:
        path = f"{folder}/{name}" if folder else name
        if os.path.isdir(os.path.join(root, path)):
            yield from _walk(root, path, above)
            continue
        try:
            yield path, local_stamp(os.path.join(root, path))
        except OSError as error:
            raise UsageError(f"{here}/{name} cannot be read: {error.strerror}.") from error
