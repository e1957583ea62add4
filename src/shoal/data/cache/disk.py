"""The disk layer: a directory of samples with a bound, for longer than a run.

    used          how much the directory holds, never too little, and until when nothing can be
                  evicted; locks are taken on it
    ab/cdef...    a sample: its seal and its bytes; the name is the key
    ab/.part-...  one that is being written

A sample is written apart and renamed, so that it appears whole; what the power takes before it is
on the disk is found out by its seal. A writer adds to `used` first, so that a death can
only leave it too high; when it says that the directory is full, the files are counted again and
those used least recently go, down to nine tenths. When a sample was used is kept in its
modification time, which only the cache changes, because many systems do not keep access times.
If all that is there was used too lately to go, that is noted in `used` for all processes, which
count again after a minute, then after two, and so on up to an hour.

A disk that is full, or cannot be written any more, costs one warning: from then on the layer only
reads. Two runs, or two hosts on a shared disk, may use one directory. Cost: a file a sample, in
whole blocks of 4 KiB; a count looks at every file, and comes once for each tenth that is written.
"""

import os
import secrets
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from shoal.data.cache.layers import SEAL_BYTES, Clock, Content, protected_since, seal_of
from shoal.data.cache.range_locks import RangeLocks
from shoal.errors import UsageError
from shoal.faults import faultpoint
from shoal.formatting import in_units
from shoal.logs import warn_on_screen, warn_once
from shoal.storage.files import write_all

LEAST_BYTES = 10**6
_BLOCK = 4096
_COUNT = struct.Struct("<Q")
_FULL = struct.Struct("<ddd")  # behind the count
_PART = ".part-"
_PART_S = 3600.0  # an older one was left by a process that died
_KEEP_S = 24 * 3600.0
_TOUCH_S = 60.0
_FULL_S = 60.0  # before it is counted again, at first
_MOST_FULL_S = 3600.0
_ROOM = 0  # the lock under which room is reserved
_PATIENCE_S = 0.05
_LEAVE = 0.9  # of the bound, after an eviction


class CacheFile(NamedTuple):
    """A sample in the directory."""

    path: str
    num_bytes: int
    last_used: float


def choose_evicted(kept: list[CacheFile], num_bytes: float, since: float) -> list[CacheFile]:
    """The least recently used, none of them used since `since`, that hold at least `num_bytes`."""
    chosen: list[CacheFile] = []
    for one in sorted(kept, key=lambda one: one.last_used):
        if num_bytes <= 0 or one.last_used >= since:
            break
        chosen.append(one)
        num_bytes -= one.num_bytes
    return chosen


class EvictionBackoff(NamedTuple):
    """Nothing used after `opened` could be evicted; until when no process tries again."""

    opened: float = 0.0
    until: float = 0.0
    pause_s: float = 0.0

    def holds(self, opened: float, now: float) -> bool:
        """Whether a layer that was opened then need not count: it could evict no more."""
        return opened <= self.opened and self.until - _MOST_FULL_S <= now < self.until

    def still(self, opened: float, now: float) -> "EvictionBackoff":
        """What to note when a count has freed too little once more."""
        pause_s = self.pause_s
        if not _FULL_S <= pause_s <= _MOST_FULL_S or opened > self.until:  # of a run before
            pause_s = _FULL_S
        elif now >= self.until:
            pause_s = min(2 * pause_s, _MOST_FULL_S)
        return EvictionBackoff(max(opened, self.opened), now + pause_s, pause_s)


class DiskLayer:
    """A directory that holds at most `most_bytes`; a layer."""

    def __init__(self, directory: Path, most_bytes: int, clock: Clock = time.time):
        if most_bytes < LEAST_BYTES:
            raise UsageError(
                f"disk_bytes is {in_units(most_bytes)}. A directory of samples takes at least "
                f"{in_units(LEAST_BYTES)}; use disk=None for none at all."
            )
        self._directory = directory.absolute()
        self._most_bytes = most_bytes
        self._clock = clock
        self._opened = clock()
        self._is_writable = True
        self._full_until = 0.0
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with (self._directory / "used").open("ab") as file:
                self.ranges = RangeLocks(file.fileno())
        except OSError as error:
            raise UsageError(
                f"cached(disk='{directory}') cannot be written: {error.strerror}. Name a directory "
                "that can, or use disk=None."
            ) from error

    def get(self, key: bytes) -> bytearray | None:
        path = self._path(key)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            found = os.fstat(descriptor)
            seal, content = bytearray(SEAL_BYTES), bytearray(max(0, found.st_size - SEAL_BYTES))
            is_whole = _fill(descriptor, seal, content)
        except OSError as error:
            self._tell_of_damage(path, str(error))
            return None
        finally:
            os.close(descriptor)
        if not is_whole or seal_of(key, content) != seal:
            self._tell_of_damage(path, "its bytes are not those that were written")
            with suppress(OSError):
                os.unlink(path)
            return None
        now = self._clock()
        if found.st_mtime < max(self._opened, now - _TOUCH_S):
            with suppress(OSError):  # evicted meanwhile, or a disk that is only read
                os.utime(path, (now, now))
        return content

    def put(self, key: bytes, *parts: Content) -> bool:
        path = self._path(key)
        if os.path.exists(path):
            return True
        if not self._is_writable:
            return False
        part = os.path.join(os.path.dirname(path), f"{_PART}{secrets.token_hex(8)}")
        try:
            if not self._reserve(part, SEAL_BYTES + sum(map(len, parts))):
                return False
            with open(part, "r+b", buffering=0) as file:
                write_all(file.fileno(), seal_of(key, *parts))
                faultpoint("cache.disk")
                for each in parts:
                    write_all(file.fileno(), each)
                now = self._clock()
                os.utime(file.fileno(), (now, now))
            faultpoint("cache.rename")
            os.rename(part, path)
        except OSError as error:
            with suppress(OSError):
                os.unlink(part)
            self._is_writable = False
            warn_on_screen(
                f"Samples can no longer be kept in {self._directory}: {error.strerror}. Those that "
                "are there are still read; make room, or give cached() another disk."
            )
            return False
        return True

    def close(self) -> None:
        self.ranges.close()

    def _reserve(self, part: str, size: int) -> bool:
        """Count the file in, after an eviction if need be, and make it; whether there is room."""
        now, num_bytes = self._clock(), _blocks(size)
        if now < self._full_until or not self.ranges.lock_within(_ROOM, _PATIENCE_S):
            return False
        try:
            with open(self._directory / "used", "r+b", buffering=0) as file:
                used, full = _noted(file.read(_COUNT.size + _FULL.size))
                if used is None or (
                    used + num_bytes > self._most_bytes and not full.holds(self._opened, now)
                ):
                    used = self._make_room(num_bytes, now)
                    makes_room = used + num_bytes <= self._most_bytes
                    full = EvictionBackoff() if makes_room else full.still(self._opened, now)
                fits = used + num_bytes <= self._most_bytes
                file.seek(0)
                file.write(_COUNT.pack(used + num_bytes if fits else used) + _FULL.pack(*full))
            if fits:
                # At its full size, and under the lock: the next count must not be too low.
                os.makedirs(os.path.dirname(part), exist_ok=True)
                with open(part, "xb") as made:
                    made.truncate(size)
        finally:
            self.ranges.unlock(_ROOM)
        if not fits:
            self._full_until = now + _FULL_S
        return fits

    def _make_room(self, num_bytes: int, now: float) -> int:
        """Count the files, evict what may go if they are too many; the bytes that are left."""
        kept = self._counted(now)
        used = sum(one.num_bytes for one in kept)
        if used + num_bytes > self._most_bytes:
            excess = used + num_bytes - _LEAVE * self._most_bytes
            for one in choose_evicted(kept, excess, protected_since(self._opened, now, _KEEP_S)):
                with suppress(FileNotFoundError):
                    os.unlink(one.path)
                used -= one.num_bytes
        return used

    def _counted(self, now: float) -> list[CacheFile]:
        """All samples and unfinished parts; abandoned parts are removed."""
        kept: list[CacheFile] = []
        for folder in os.scandir(self._directory):
            if len(folder.name) != 2 or not folder.is_dir(follow_symlinks=False):
                continue
            for entry in os.scandir(folder):
                is_part = entry.name.startswith(_PART)
                if not is_part and not _is_sample(entry.name):
                    continue  # not ours
                with suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    if is_part and found.st_mtime < now - _PART_S:
                        os.unlink(entry.path)
                        continue
                    when = float("inf") if is_part else found.st_mtime
                    kept.append(CacheFile(entry.path, _blocks(found.st_size), when))
        return kept

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._directory}/{name[:2]}/{name[2:]}"

    def _tell_of_damage(self, path: str, what: str) -> None:
        warn_once(
            f"{path} is not used: {what}. The sample is made again, like all such.",
            kind=f"damage in {self._directory}",
        )


def _noted(content: bytes) -> tuple[int | None, EvictionBackoff]:
    """What `used` says; it may be new, or cut off by a death."""
    if len(content) < _COUNT.size:
        return None, EvictionBackoff()
    is_whole = len(content) == _COUNT.size + _FULL.size
    full = (
        EvictionBackoff(*_FULL.unpack_from(content, _COUNT.size)) if is_whole else EvictionBackoff()
    )
    return _COUNT.unpack_from(content)[0], full


def _is_sample(name: str) -> bool:
    return len(name) == 30 and set(name) <= set("0123456789abcdef")


def _blocks(num_bytes: int) -> int:
    return -(-num_bytes // _BLOCK) * _BLOCK


def _fill(descriptor: int, *buffers: bytearray) -> bool:
    """Whether the file had as many bytes; the system may give a part at a time."""
    left = [memoryview(buffer) for buffer in buffers]
    while left:
        num_read = os.readv(descriptor, left)
        if not num_read:
            return False
        while left and num_read >= len(left[0]):
            num_read -= len(left.pop(0))
        if left:
            left[0] = left[0][num_read:]
    return True
