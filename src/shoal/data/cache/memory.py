"""The memory layer: one area of shared memory for all ranks and runs of a host.

    head       4 KiB: what the area is, and the segment that is being filled
    segments   64 bytes each: bytes used, when it was last read
    index      buckets of 8 slots of 32 bytes: key, place, length
    arena      the segments: entries one after the other, each with key, length and seal before it

Reading takes no lock: it finds the key in its bucket, copies the entry out and compares the seal of
the copy, so that an entry which another process is overwriting, or died over, is a miss. Writing
locks for the reservation of room alone, a few microseconds; the bytes are written outside of it and
the slot comes last. When all segments are full, the one that was not read for longest is taken over
as a whole, unless it is still in use (`layers.protected_since`): then nothing is kept.

Copying out costs a memcpy; views into the area would save it, and be overwritten in use. Cost: 3 %
of the memory for the index, 64 bytes an entry. Next: `host_memory.py`, how processes find the area.
"""

import mmap
import os
import struct
import time
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shoal.data.cache.layers import Clock, Content, protected_since, seal_of
from shoal.data.cache.range_locks import RangeLocks
from shoal.errors import UsageError
from shoal.faults import faultpoint
from shoal.formatting import in_units
from shoal.logs import warn_once

LAYOUT = 2
NUM_SEGMENTS = 64
LEAST_BYTES = 10**6
_MAGIC = b"SHOALMEM"
_HEAD = struct.Struct("<8sIIQQ")  # magic, layout, segments, bytes of a segment, buckets
_CURRENT = 64  # where the head names the segment that is being filled
_HEAD_BYTES = 4096
_SEGMENT = struct.Struct("<Qd")  # bytes used, last read
_SEGMENT_BYTES = 64
_SLOT = struct.Struct("<16sQQ")  # key, place in the arena, length
_BUCKET_SLOTS = 8
_BUCKET_BYTES = _BUCKET_SLOTS * _SLOT.size
_ENTRY = struct.Struct("<16sQ16s")  # key, length, seal
_ENTRY_BYTES = 64
_BYTES_PER_SLOT = 1024
_ROOM = 0  # the lock under which room is reserved
_PATIENCE_S = 0.25  # for that lock, which is held for microseconds
_PAUSE_S = 5.0  # without a try, after a holder did not release it
_KEEP_S = 600.0
_MOST_PARTS = 64  # written in one call, of which the system takes so many
_EMPTY = bytes(16)


class Geometry(NamedTuple):
    """Where things lie in an area."""

    segment_bytes: int
    num_buckets: int

    @property
    def buckets(self) -> int:
        return _HEAD_BYTES + NUM_SEGMENTS * _SEGMENT_BYTES

    @property
    def arena(self) -> int:
        return _aligned(self.buckets + self.num_buckets * _BUCKET_BYTES)

    @property
    def num_bytes(self) -> int:
        return self.arena + NUM_SEGMENTS * self.segment_bytes


def geometry(num_bytes: int) -> Geometry:
    """The largest area that takes no more than `num_bytes`."""
    if num_bytes < LEAST_BYTES:
        raise UsageError(
            f"memory is {in_units(num_bytes)}. A shared area takes at least "
            f"{in_units(LEAST_BYTES)}; use memory=None for none at all."
        )
    per_bucket = _BUCKET_SLOTS * _BYTES_PER_SLOT
    room = num_bytes - _HEAD_BYTES - NUM_SEGMENTS * _SEGMENT_BYTES
    num_buckets = room // (per_bucket + _BUCKET_BYTES)
    arena = room - num_buckets * _BUCKET_BYTES - _ENTRY_BYTES  # what aligning it may take
    return Geometry(arena // NUM_SEGMENTS // _ENTRY_BYTES * _ENTRY_BYTES, num_buckets)


def lay_out(descriptor: int, num_bytes: int) -> None:
    """Make an empty area of a file that no other process has yet."""
    shape = geometry(num_bytes)
    os.ftruncate(descriptor, shape.num_bytes)
    head = _HEAD.pack(_MAGIC, LAYOUT, NUM_SEGMENTS, shape.segment_bytes, shape.num_buckets)
    os.pwrite(descriptor, head, 0)


def read_geometry(descriptor: int) -> Geometry | None:
    """How an area is laid out; None if the file is not one that this code can use."""
    head = os.pread(descriptor, _HEAD.size, 0)
    if len(head) < _HEAD.size:
        return None
    magic, layout, num_segments, segment_bytes, num_buckets = _HEAD.unpack(head)
    shape = Geometry(segment_bytes, num_buckets)
    known = (magic, layout, num_segments) == (_MAGIC, LAYOUT, NUM_SEGMENTS)
    return shape if known and os.fstat(descriptor).st_size == shape.num_bytes else None


class MemoryLayer:
    """An area that this process has mapped; a layer."""

    def __init__(self, descriptor: int, clock: Clock = time.monotonic):
        """Takes over the descriptor, and keeps it open: others find the area through it."""
        self._finalizer = weakref.finalize(self, os.close, descriptor)  # also if this fails
        shape = read_geometry(descriptor)
        assert shape is not None, "lay it out first"
        self.shape = shape
        self.descriptor = descriptor
        self._arena, self._end = shape.arena, shape.num_bytes
        self.ranges = RangeLocks(descriptor)
        self._map = mmap.mmap(descriptor, self._end)
        self._clock = clock
        self._opened = clock()
        self._paused_until = 0.0

    def get(self, key: bytes) -> bytearray | None:
        taken: list[bytearray] = []

        def copy(view: memoryview) -> Sequence[Content]:
            taken.append(bytearray(view))
            return taken

        return taken[0] if self.take(key, copy) else None

    def take(self, key: bytes, copy: Callable[[memoryview], Sequence[Content] | None]) -> bool:
        """Let `copy` take the content out to where it is wanted; whether it took the right one.

        What it took is what it returns: the whole content in parts, which are compared with the
        seal. With None it leaves the content be.
        """
        slot = self._slot_of(key)
        if slot is None:
            return False
        _, place, length = _SLOT.unpack_from(self._map, slot)
        seal = self._seal_at(key, place, length)
        if seal is not None:
            start = self._arena + place + _ENTRY_BYTES
            with memoryview(self._map) as view, view[start : start + length] as content:
                parts = copy(content)
            if parts is None:
                return False
            if seal_of(key, *parts) == seal:
                self._touch(place // self.shape.segment_bytes)
                return True
        # Drop it, so that it is put again. Another key may have the slot by now, and is lost.
        self._map[slot : slot + len(_EMPTY)] = _EMPTY
        return False

    def put(self, key: bytes, *parts: Content) -> bool:
        length = sum(map(len, parts))
        if _ENTRY_BYTES + length > self.shape.segment_bytes:
            self._warn_of_size(length)
            return False
        if self._has(key, length):
            return True
        place = self._reserve(_aligned(_ENTRY_BYTES + length))
        if place is None:
            return False
        faultpoint("cache.reserved")
        if not self._write(place, _ENTRY.pack(key, length, seal_of(key, *parts)), parts):
            return False
        faultpoint("cache.entry")
        _SLOT.pack_into(self._map, self._free_slot(key), key, place, length)
        return True

    def close(self) -> None:
        self.ranges.close()
        if self._finalizer.alive:
            self._map.close()
        self._finalizer()

    def _has(self, key: bytes, length: int) -> bool:
        """Whether the key is there, by its slot and the head of its entry."""
        slot = self._slot_of(key)
        if slot is None:
            return False
        place = _SLOT.unpack_from(self._map, slot)[1]
        if place + _ENTRY_BYTES > NUM_SEGMENTS * self.shape.segment_bytes:
            return False
        entry = _ENTRY.unpack_from(self._map, self._arena + place)
        return bool(entry[:2] == (key, length))

    def _slot_of(self, key: bytes) -> int | None:
        """Where the key's slot is."""
        start = self._bucket(key)
        bucket = self._map[start : start + _BUCKET_BYTES]
        at = bucket.find(key)
        while at % _SLOT.size and at >= 0:  # found across other bytes by chance
            at = bucket.find(key, at + 1)
        return start + at if at >= 0 else None

    def _free_slot(self, key: bytes) -> int:
        """A slot for the key: its own, an empty one, else that of what was read least recently."""
        start = self._bucket(key)
        slots = list(_SLOT.iter_unpack(self._map[start : start + _BUCKET_BYTES]))
        for wanted in (key, _EMPTY):
            for number, (found, _, _) in enumerate(slots):
                if found == wanted:
                    return start + number * _SLOT.size
        places = [place // self.shape.segment_bytes for _, place, _ in slots]
        reads = [self._segment(n).last_read if n < NUM_SEGMENTS else 0.0 for n in places]
        return start + reads.index(min(reads)) * _SLOT.size

    def _seal_at(self, key: bytes, place: int, length: int) -> bytes | None:
        """The seal of the entry there, if it says that it is the key's and as long."""
        start = self._arena + place
        if start + _ENTRY_BYTES + length > self._end:
            return None
        found, stated, seal = _ENTRY.unpack_from(self._map, start)
        return seal if found == key and stated == length else None

    def _reserve(self, num_bytes: int) -> int | None:
        """Room for an entry, as a place in the arena; None if there is none, or no lock."""
        if self._clock() < self._paused_until:
            return None
        if not self.ranges.lock_within(_ROOM, _PATIENCE_S):
            self._paused_until = self._clock() + _PAUSE_S
            return None
        try:
            number = self._segment_with(num_bytes)
            if number is None:
                return None
            used = self._segment(number).used
            struct.pack_into("<Q", self._map, _segment_at(number), used + num_bytes)
            self._touch(number)
            return number * self.shape.segment_bytes + used
        finally:
            self.ranges.unlock(_ROOM)

    def _write(self, place: int, head: bytes, content: Sequence[Content]) -> bool:
        """An entry into its place; whether all of it was written.

        Through the file, not the map: new pages cost half as much, and want of memory is an error
        here and a fatal signal there.
        """
        try:
            if len(content) > _MOST_PARTS:
                content = [b"".join(content)]
            parts = [head.ljust(_ENTRY_BYTES, b"\0"), *content]
            return os.pwritev(self.descriptor, parts, self._arena + place) == sum(map(len, parts))
        except OSError as error:
            warn_once(f"A sample could not be kept in shared memory: {error.strerror}.")
            return False

    def _segment_with(self, num_bytes: int) -> int | None:
        """The current segment if the bytes fit, else one that is empty or taken over."""
        current = struct.unpack_from("<Q", self._map, _CURRENT)[0] % NUM_SEGMENTS
        if self._segment(current).used + num_bytes <= self.shape.segment_bytes:
            return int(current)
        segments = [self._segment(number) for number in range(NUM_SEGMENTS)]
        since = protected_since(self._opened, self._clock(), _KEEP_S)
        number = choose_segment(segments, since)
        if number is None:
            return None
        if segments[number].used:
            struct.pack_into("<Q", self._map, _segment_at(number), 0)
            faultpoint("cache.takeover")  # a death here leaves an empty segment
        struct.pack_into("<Q", self._map, _CURRENT, number)
        return number

    def _segment(self, number: int) -> "ArenaSegment":
        return ArenaSegment(*_SEGMENT.unpack_from(self._map, _segment_at(number)))

    def _touch(self, number: int) -> None:
        struct.pack_into("<d", self._map, _segment_at(number) + 8, self._clock())

    def _bucket(self, key: bytes) -> int:
        number = int.from_bytes(key[8:16], "little") % self.shape.num_buckets
        return self.shape.buckets + number * _BUCKET_BYTES

    def _warn_of_size(self, length: int) -> None:
        most = in_units(self.shape.segment_bytes - _ENTRY_BYTES)
        warn_once(
            f"A packed sample of {in_units(length)} is too large for the shared memory of "
            f"{in_units(self.shape.num_bytes)}, which takes up to {most} a sample. Such "
            "samples are not kept there; give cached() more memory.",
            kind="a sample too large for the shared memory",
            on_screen=True,
        )


class ArenaSegment(NamedTuple):
    used: int
    last_read: float


def choose_segment(segments: list[ArenaSegment], since: float) -> int | None:
    """An empty segment, else the one not read for longest, if it was not since `since`."""
    for number, segment in enumerate(segments):
        if not segment.used:
            return number
    oldest = min(range(len(segments)), key=lambda number: segments[number].last_read)
    return oldest if segments[oldest].last_read < since else None


def _segment_at(number: int) -> int:
    return _HEAD_BYTES + number * _SEGMENT_BYTES


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ENTRY_BYTES) * _ENTRY_BYTES
