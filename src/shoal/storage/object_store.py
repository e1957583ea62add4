"""Checkpoints in an object store (S3 and what speaks like it), through fsspec.

Such a store has no rename, so objects are written where they stay, and the seal is written last:
a checkpoint without a seal is none. While it is written, an object `.draft-TOKEN` lies beside the
files and says whose it is; it goes just before the seal comes. What a writer that died leaves has
no seal, and is swept away once it is too old to be somebody's.

Every request is repeated when it fails for a reason that may pass. Large files go up in parts and
come down in windows; a reader never has a whole file in memory. Not for disks that can rename: a
`Directory` maps files instead of fetching them. Cost: a request per file and some ten more.
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
from shoal.storage.remote import PATIENCE, Patience, Remote
from shoal.storage.store import MOST_CHUNK_BYTES, SEAL, Directory, Store

BLOCK_BYTES = 32 << 20  # S3 takes up to 10,000 parts of a file, and none below 5 MB but the last
ABANDONED_S = 24 * 3600.0  # far more than a save may last, and than clocks differ
MOST_WINDOW_BYTES = 8 * MOST_CHUNK_BYTES  # of all windows of a store together
_DRAFT = ".draft-"


def local_path(where: str | Path) -> Path | None:
    """The path that a place is, if it lies on a disk: a path, or the URL of one."""
    text = str(where)
    scheme, separator, _ = text.partition("://")
    if isinstance(where, Path) or not separator:
        return Path(where)
    return Path(unquote(urlsplit(text).path)) if scheme in ("file", "local") else None


def open_store(where: str | Path) -> Store:
    """A store in a directory, or at a URL that fsspec knows."""
    path = local_path(where)
    return ObjectStore(str(where)) if path is None else Directory(path)


class ObjectStore:
    """A store at a URL; other processes may write into it too. `options` are the back end's."""

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any] | None = None,
        *,
        block_bytes: int = BLOCK_BYTES,
        abandoned_s: float = ABANDONED_S,
        patience: Patience = PATIENCE,
    ):
        self._remote = Remote(url, options or {}, patience)
        self._block_bytes, self._abandoned_s = block_bytes, abandoned_s
        self._windows = Windows(self._remote)
        self._sealed: set[str] = set()  # seen so far; a sweep need not ask again

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
        return ObjectFile(self._remote, self._windows, f"{name}/{file}")

    def begin(self, name: str, token: str) -> "ObjectDraft":
        """Begin to write. What had that name is gone from now on, and its writer notices."""
        self._clear(name)
        draft = self.join(name, token)
        self._remote.put(draft.mark, b"")
        return draft

    def join(self, name: str, token: str) -> "ObjectDraft":
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
        """The seal first: nobody ever finds half of a checkpoint."""
        self._sealed.discard(name)
        found = self._remote.find(name)
        if SEAL in found:
            self._remote.delete([f"{name}/{SEAL}"])
        faultpoint("checkpoint.removing")
        self._remote.delete([f"{name}/{file}" for file in found if file != SEAL])
        self._windows.forget(name)


class ObjectDraft:
    """A checkpoint without its seal. The seal is kept back until the commit."""

    def __init__(self, remote: Remote, name: str, token: str, block_bytes: int):
        self._remote, self._name, self._block_bytes = remote, name, block_bytes
        self.mark = f"{name}/{_DRAFT}{token}"
        self._seal: bytes | None = None

    def write(self, file: str, parts: Iterable[memoryview | bytes]) -> None:
        """All parts are kept until the file is there, since it may have to be sent again."""
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
        self._refuse_if_gone()  # while it was sent, perhaps
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
        """The mark first, so that the others notice. What cannot be removed now is swept later."""
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
    """A file of which windows are fetched, each large enough for the largest chunk."""

    keeps = False  # a window goes when others come

    def __init__(self, remote: Remote, windows: "Windows", path: str):
        self._windows, self._path = windows, path
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
        # The first look is at the header, and nobody knows yet whether more is wanted.
        ahead, self._is_fresh = not self._is_fresh, False
        return self._windows.read(self._path, (start, start + length), self.num_bytes, ahead=ahead)


class Windows:
    """Parts of files that were fetched last; those of all readers of a store share a limit."""

    def __init__(self, remote: Remote, most_bytes: int = MOST_WINDOW_BYTES):
        self._remote, self._most_bytes = remote, most_bytes
        self._held: OrderedDict[tuple[str, int], memoryview] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, path: str, span: tuple[int, int], num_bytes: int, *, ahead: bool) -> memoryview:
        """Bytes of a file of `num_bytes`; with `ahead`, what follows is fetched as well."""
        start, stop = span
        with self._lock:
            for (name, first), content in reversed(self._held.items()):
                if name == path and first <= start and stop <= first + len(content):
                    self._held.move_to_end((name, first))
                    return content[start - first : stop - first]
        end = min(num_bytes, max(stop, start + MOST_CHUNK_BYTES)) if ahead else stop
        try:
            fetched = self._remote.part(path, start, end) if end > start else b""
        except FileNotFoundError:
            raise BadCheckpoint(f"{path} is missing; it was there a moment ago.") from None
        if len(fetched) != end - start:
            raise BadCheckpoint(
                f"{path.rpartition('/')[2]}: of the bytes {start} to {end}, {len(fetched)} came. "
                "It was changed since it was opened."
            )
        content = memoryview(bytearray(fetched))  # torch wants memory that it could write to
        with self._lock:
            self._held[path, start] = content
            while sum(len(view) for view in self._held.values()) > self._most_bytes:
                self._held.popitem(last=False)
        return content[: stop - start]

    def forget(self, folder: str) -> None:
        with self._lock:
            for key in [key for key in self._held if key[0].startswith(f"{folder}/")]:
                del self._held[key]
