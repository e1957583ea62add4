"""Checkpoints in an object store (S3 and compatible ones), through fsspec.

Such a store has no rename, so objects are written at their final names and the seal is written
last: a checkpoint without a seal does not count. While it is written, an object `.draft-TOKEN`
beside the files names its writer; it is removed just before the seal is written. What a killed
writer leaves has no seal, and is swept away once it is older than any save.

Failed requests are repeated (`object_client.py`). Large files are uploaded in parts and read in
ranges; a reader never has a whole file in memory. For disks use `DirectoryStore`, which renames and
maps files. Cost: a request per file, and about ten more.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from shoal.errors import BadCheckpoint
from shoal.faults import faultpoint
from shoal.storage.mirrors import MirroredStore, parse_mirror
from shoal.storage.object_client import RETRY_POLICY, ObjectClient, RetryPolicy
from shoal.storage.store import MOST_CHUNK_BYTES, SEAL, DirectoryStore, Store

BLOCK_BYTES = 32 << 20  # S3 allows 10,000 parts of a file, of 5 MB or more except the last
ABANDONED_S = 24 * 3600.0  # far longer than a save, or than clocks differ
MAX_CACHE_BYTES = 8 * MOST_CHUNK_BYTES  # of all readers of a store
_DRAFT = ".draft-"


def local_path(where: str | Path) -> Path | None:
    """The path on a disk, from a path or a file:// URL; None for other URLs."""
    text = str(where)
    scheme, separator, _ = text.partition("://")
    if isinstance(where, Path) or not separator:
        return Path(where)
    return Path(unquote(urlsplit(text).path)) if scheme in ("file", "local") else None


def open_store(where: str | Path) -> Store:
    """A store in a directory, at a URL that fsspec knows, or a mirror of several of them."""
    if (mirror := parse_mirror(str(where))) is not None:
        return MirroredStore([open_store(place) for place in mirror.places], mirror.quorum)
    path = local_path(where)
    return ObjectStore(str(where)) if path is None else DirectoryStore(path)


class ObjectStore:
    """A store at a URL; other processes may write to it too. `options` are for the back end."""

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any] | None = None,
        *,
        block_bytes: int = BLOCK_BYTES,
        abandoned_s: float = ABANDONED_S,
        patience: RetryPolicy = RETRY_POLICY,
    ):
        self._remote = ObjectClient(url, options or {}, patience)
        self._block_bytes, self._abandoned_s = block_bytes, abandoned_s
        self._cache = RangeCache(self._remote)
        self._sealed: set[str] = set()  # known to be sealed; a sweep need not ask again

    def __str__(self) -> str:
        return str(self._remote)

    def names(self) -> list[str]:
        return sorted(name for name in self._remote.folders() if self._is_sealed(name))

    def files(self, name: str) -> set[str]:
        found = {file for file in self._remote.find(name) if not file.startswith(_DRAFT)}
        if not found:
            raise FileNotFoundError(2, f"{self} has no {name}")
        return found

    def open(self, name: str, file: str) -> "ObjectFile":
        return ObjectFile(self._remote, self._cache, f"{name}/{file}")

    def fall_over(self, name: str) -> bool:
        return False

    def create_draft(self, name: str, token: str) -> "ObjectDraft":
        """Start to write. Removes what had that name; its writer notices."""
        self._clear(name)
        draft = self.join_draft(name, token)
        self._remote.put(draft.mark, b"")
        return draft

    def join_draft(self, name: str, token: str) -> "ObjectDraft":
        return ObjectDraft(self._remote, name, token, self._block_bytes)

    def sweep(self) -> None:
        for name in self._remote.folders():
            if name in self._sealed or self._is_sealed(name):
                self._sealed.add(name)
            elif self._is_abandoned(name):
                self._clear(name)

    def remove(self, name: str) -> None:
        self.files(name)  # fails if there is nothing
        self._clear(name)

    def _is_sealed(self, name: str) -> bool:
        return self._remote.size(f"{name}/{SEAL}") is not None

    def _is_abandoned(self, name: str) -> bool:
        newest = [self._remote.modified(f"{name}/{file}") for file in self._remote.find(name)]
        limit = datetime.now(UTC).timestamp() - self._abandoned_s
        return all(when is not None and when <= limit for when in newest)

    def _clear(self, name: str) -> None:
        """Remove the seal first, so that no reader finds half of a checkpoint."""
        self._sealed.discard(name)
        found = self._remote.find(name)
        if SEAL in found:
            self._remote.delete([f"{name}/{SEAL}"])
        faultpoint("checkpoint.removing")
        self._remote.delete([f"{name}/{file}" for file in found if file != SEAL])
        self._cache.forget(name)


class ObjectDraft:
    """A checkpoint that is being written. The seal is held back until the commit."""

    def __init__(self, remote: ObjectClient, name: str, token: str, block_bytes: int):
        self._remote, self._name, self._block_bytes = remote, name, block_bytes
        self.mark = f"{name}/{_DRAFT}{token}"
        self._seal: bytes | None = None

    def write(self, file: str, parts: Iterable[memoryview | bytes]) -> None:
        """Holds all parts until the file is stored, since a request may be repeated."""
        views = [memoryview(bytes(part)) for part in parts if len(part)]
        self._refuse_if_gone()
        if file == SEAL:
            self._seal = b"".join(views)
            return
        path, size = f"{self._name}/{file}", sum(len(view) for view in views)
        if size <= self._block_bytes:
            self._remote.put(path, b"".join(views))
        else:
            self._remote.upload(path, views, self._block_bytes)
        self._refuse_if_gone()  # while it was sent
        faultpoint("checkpoint.after_file")

    def read(self, file: str) -> bytes | None:
        if file == SEAL and self._seal is not None:
            return self._seal
        content = self._remote.get(f"{self._name}/{file}")
        if content is None:
            self._refuse_if_gone()
        return content

    def commit(self, drop: Iterable[str]) -> None:
        if self._seal is None:
            raise ValueError(f"{self._name}: {SEAL} was not written, so there is nothing to commit")
        self._refuse_if_gone()
        self._remote.delete([*(f"{self._name}/{file}" for file in drop), self.mark])
        faultpoint("checkpoint.sealed")
        self._remote.put(f"{self._name}/{SEAL}", self._seal)
        faultpoint("checkpoint.committed")

    def discard(self) -> None:
        """Remove the mark first, so that other writers notice. What remains is swept later."""
        with suppress(OSError):
            if self._remote.size(self.mark) is None:
                return  # committed, discarded, or another's by now
            self._remote.delete([self.mark])
            found = self._remote.find(self._name)
            if not any(file == SEAL or file.startswith(_DRAFT) for file in found):
                self._remote.delete([f"{self._name}/{file}" for file in found])

    def _refuse_if_gone(self) -> None:
        if self._remote.size(self.mark) is None:
            raise FileNotFoundError(2, f"the draft of {self._name} was discarded or taken over")


class ObjectFile:
    """A file that is read in ranges, each large enough for the largest chunk."""

    is_stable = False  # a range may be evicted and fetched again

    def __init__(self, remote: ObjectClient, cache: "RangeCache", path: str):
        self._cache, self._path = cache, path
        size = remote.size(path)
        if size is None:
            raise BadCheckpoint(f"{path.rpartition('/')[2]} is missing.")
        self.num_bytes = size
        self._is_fresh = True

    def read(self, start: int, length: int) -> memoryview:
        if start < 0 or length < 0 or start + length > self.num_bytes:
            raise BadCheckpoint(
                f"{self._path.rpartition('/')[2]} has {self.num_bytes} bytes; "
                f"{start + length} were to be there."
            )
        # The first read is of the header; it is not known yet whether more will be read.
        ahead, self._is_fresh = not self._is_fresh, False
        return self._cache.read(self._path, (start, start + length), self.num_bytes, ahead=ahead)


class RangeCache:
    """An LRU cache of byte ranges of files; all readers of a store share its limit."""

    def __init__(self, remote: ObjectClient, most_bytes: int = MAX_CACHE_BYTES):
        self._remote, self._most_bytes = remote, most_bytes
        self._ranges: OrderedDict[tuple[str, int], memoryview] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, path: str, span: tuple[int, int], num_bytes: int, *, ahead: bool) -> memoryview:
        """Bytes of a file of `num_bytes`; with `ahead`, the following bytes are fetched too."""
        start, stop = span
        with self._lock:
            for (name, first), content in reversed(self._ranges.items()):
                if name == path and first <= start and stop <= first + len(content):
                    self._ranges.move_to_end((name, first))
                    return content[start - first : stop - first]
        end = min(num_bytes, max(stop, start + MOST_CHUNK_BYTES)) if ahead else stop
        try:
            fetched = self._remote.get_range(path, start, end) if end > start else b""
        except FileNotFoundError:
            raise BadCheckpoint(f"{path} is missing; it was there a moment ago.") from None
        if len(fetched) != end - start:
            raise BadCheckpoint(
                f"{path.rpartition('/')[2]}: of the bytes {start} to {end}, {len(fetched)} came. "
                "It was changed since it was opened."
            )
        content = memoryview(bytearray(fetched))  # torch needs writable memory
        with self._lock:
            self._ranges[path, start] = content
            while sum(len(view) for view in self._ranges.values()) > self._most_bytes:
                self._ranges.popitem(last=False)
        return content[: stop - start]

    def forget(self, folder: str) -> None:
        with self._lock:
            for key in [key for key in self._ranges if key[0].startswith(f"{folder}/")]:
                del self._ranges[key]
