"""Local copies of remote shards: fetched whole, checked, and kept in a directory of limited size.

A copy is named by the hash of its shard's table, which stands for all of its bytes; so two sets or
two runs share what is the same, and a copy of an older set is never taken for a newer one. It is
written beside and renamed when every block of it was checked. What a process that died leaves is
removed later, and nothing has to be cleaned by hand. The copies used longest ago go first.

Waiting is bounded everywhere: a request is tried a few times, a part that does not come in time is
given up. Not for sharing decoded samples; that is what `data/cache` is for. Cost: a shard is read
once over the network, then mapped like a local one; a reader that needs it meanwhile waits. Next:
`shard_source.py`.
"""

import fcntl
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from shoal.data.shard_files.blocks import open_shard
from shoal.data.shard_files.format import BadShards, Index, shard_name
from shoal.errors import UsageError
from shoal.storage.files import try_lock
from shoal.storage.object_client import ObjectClient, answer_within
from shoal.system.processes import PerProcess

CACHE_BYTES = 16 << 30
PART_BYTES = 8 << 20
PATIENCE_S = 120.0  # for one part, with all its tries
NUM_TRIES = 3  # to fetch a shard whose bytes are wrong when they arrive
ABANDONED_S = 3600.0
_LOOK_S = 0.05
_UNFINISHED = ".fetching-"
_LOCK = ".lock-"
_COPY = re.compile(r"([0-9a-f]{32})\.bin")
_PASSING = re.compile(r"\.(fetching|lock)-[0-9a-f]{32}(-[0-9a-f]{16})?")

Answer = TypeVar("Answer")


class FetchTimeout(UsageError):
    """What lies behind a URL did not come in time."""


class FetchCancelled(Exception):
    """The fetch was cancelled: the shard is not needed any more."""


class ShardCopies:
    """The directory of copies; other processes may use it at the same time."""

    def __init__(self, directory: Path, most_bytes: int = CACHE_BYTES):
        self.directory, self.most_bytes = directory, most_bytes
        self._coming = PerProcess[dict[str, int]](dict).get  # bytes of what its threads fetch now
        self._room = PerProcess(threading.Lock).get

    def has(self, index: Index, number: int) -> bool:
        """Whether there is a copy of a shard."""
        shard = index.shards[number]
        return _is_there(self.directory / f"{shard.hash}.bin", index.num_bytes(shard))

    def copy(
        self,
        remote: ObjectClient,
        index: Index,
        number: int,
        kept: Collection[str],
        cancelled: threading.Event | None = None,
    ) -> tuple[Path, list[str]]:
        """The path of a shard's copy, and the names of copies that had to go for it.

        `FetchCancelled` when that event comes first.
        """
        wanted = index.shards[number].hash
        path = self.directory / f"{wanted}.bin"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            gone: list[str] = []
            with _alone(self.directory / f"{_LOCK}{wanted}", cancelled):
                num_bytes = index.num_bytes(index.shards[number])
                if not _is_there(path, num_bytes):
                    with self._room():
                        self._coming()[wanted] = num_bytes
                        gone = self._make_room(sum(self._coming().values()), {wanted, *kept})
                    try:
                        self._fetch(remote, index, number, path, cancelled)
                    finally:
                        self._coming().pop(wanted, None)  # a thread of this process may have
                with suppress(FileNotFoundError):  # the reader notices that it is gone again
                    os.utime(path)
            return path, gone
        except OSError as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(
                f"{shard_name(number)} of {remote} cannot be kept in {self.directory}: "
                f"{error.strerror}. Name another directory with cache_dir."
            ) from error

    def _fetch(
        self,
        remote: ObjectClient,
        index: Index,
        number: int,
        path: Path,
        cancelled: threading.Event | None,
    ) -> None:
        for tries in range(1, NUM_TRIES + 1):
            # Drawn: containers that share a directory have the same numbers for their processes.
            unfinished = path.with_name(f"{_UNFINISHED}{path.stem}-{os.urandom(8).hex()}")
            try:
                fetch_to(remote, index, number, unfinished, cancelled)
                for fault in open_shard(index, number, unfinished).faults():
                    raise BadShards(fault)
                os.rename(unfinished, path)
                return
            except BadShards as bad:
                if tries == NUM_TRIES:
                    raise BadShards(f"{bad} It was fetched {tries} times.") from None
            finally:
                unfinished.unlink(missing_ok=True)

    def keep(self, index: Index, number: int, is_used: bool) -> bool:
        """Note that a copy is used, if it is; whether it is still there."""
        path = self.directory / f"{index.shards[number].hash}.bin"
        try:
            if is_used:
                os.utime(path)
            return is_used or path.exists()
        except FileNotFoundError:
            return False
        except OSError:  # a read-only disk: no process removes anything there
            return True

    def drop(self, index: Index, number: int) -> None:
        """Remove a copy whose bytes are no longer what they were."""
        (self.directory / f"{index.shards[number].hash}.bin").unlink(missing_ok=True)

    def _make_room(self, num_bytes: int, kept: Collection[str]) -> list[str]:
        """Remove what was used longest ago until `num_bytes` fit; the names of what went."""
        copies, now = [], time.time()
        for entry in os.scandir(self.directory):
            copy, passes = _COPY.fullmatch(entry.name), _PASSING.fullmatch(entry.name)
            if not (copy or passes) or not entry.is_file(follow_symlinks=False):
                continue  # not ours
            with suppress(FileNotFoundError):  # others remove, too
                found = entry.stat(follow_symlinks=False)
                if copy:
                    copies.append((found.st_mtime, found.st_size, copy[1]))
                elif now - found.st_mtime > ABANDONED_S:
                    os.unlink(entry.path)
        excess = num_bytes + sum(size for _, size, _ in copies) - self.most_bytes
        gone = []
        for _, size, name in sorted(copies):
            if excess <= 0:
                break
            if name not in kept:
                (self.directory / f"{name}.bin").unlink(missing_ok=True)
                gone.append(name)
                excess -= size
        return gone


def fetch_to(
    remote: ObjectClient,
    index: Index,
    number: int,
    path: Path,
    cancelled: threading.Event | None = None,
) -> None:
    """Fetch a shard into a new file; the reader checks it."""
    wanted = index.num_bytes(index.shards[number])
    with open(path, "wb") as file:
        for start in range(0, wanted, PART_BYTES):
            stop = min(wanted, start + PART_BYTES)
            file.write(read_range(remote, shard_name(number), start, stop, cancelled))


def read_range(
    remote: ObjectClient, name: str, start: int, stop: int, cancelled: threading.Event | None = None
) -> bytes:
    """Bytes of a remote file, all of them."""
    try:
        content = run_within(
            f"read {remote}/{name}",
            lambda: remote.get_range(name, start, stop),
            cancelled=cancelled,
        )
    except FileNotFoundError:
        raise BadShards(f"{name} is missing from {remote}.") from None
    if len(content) != stop - start:
        raise BadShards(
            f"{name}: of the bytes {start} to {stop - 1} only {len(content)} came; it is shorter "
            "than what was written."
        )
    return content


def run_within(
    what: str,
    act: Callable[[], Answer],
    seconds: float | None = None,
    cancelled: threading.Event | None = None,
) -> Answer:
    """What `act` returns, if it does so in time."""
    patience_s = PATIENCE_S if seconds is None else seconds
    late = FetchTimeout(
        f"cannot {what}: no answer within {patience_s:g} s. The store or the network is too "
        "slow; try again, or copy the shards to a disk."
    )
    look = None if cancelled is None else partial(_refuse_cancelled, cancelled)
    return answer_within(patience_s, act, late, look)


@contextmanager
def _alone(path: Path, cancelled: threading.Event | None) -> Iterator[None]:
    """One process of a host fetches a shard, the others wait for it, for a bounded time."""
    deadline = time.monotonic() + PATIENCE_S
    with open(path, "a", encoding="utf-8") as lock:
        with suppress(OSError):  # a disk without locks: both fetch, and both copies are good
            while not try_lock(lock) and time.monotonic() < deadline:
                _refuse_cancelled(cancelled)
                time.sleep(_LOOK_S)
        try:
            yield
        finally:
            with suppress(OSError):  # closing is not enough: a fork may have it open too
                fcntl.flock(lock, fcntl.LOCK_UN)


def _refuse_cancelled(cancelled: threading.Event | None) -> None:
    if cancelled is not None and cancelled.is_set():
        raise FetchCancelled


def _is_there(path: Path, num_bytes: int) -> bool:
    with suppress(FileNotFoundError):
        return path.stat().st_size == num_bytes
    return False
