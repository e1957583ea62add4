"""All-gather of a few numbers over the ranks of one host, through shared memory.

Each rank writes its numbers into its own row and reads the rows of the others. That takes a few
microseconds; a message through Gloo and its threads takes half a millisecond, as much as the rest
of a step that looks up a few thousand rows of a table. A rank that is early polls for a moment and
yields its core, then sleeps between polls, so that a slow rank does not cost others a core.

Not for ranks of several hosts (`open_shared_all_gather` then returns None), nor for gradients,
which have buckets (`buckets.py`). Cost: two rows of memory for each rank, since one rank may write
its next numbers while another still reads the last ones. A row carries its turn and a digest, so a
row that is half written is never read as a whole one, whatever the memory order.
"""

import mmap
import os
import struct
import time
from collections.abc import Sequence
from contextlib import suppress

import msgspec
import torch
from xxhash import xxh3_64_intdigest

from shoal.comm.collectives import Group
from shoal.comm.shared_memory import NotShared, SegmentHandle, SharedSegment
from shoal.errors import GroupLost

SPIN_S = 0.002  # for which a rank polls without a pause
LONGEST_PAUSE_S = 0.002
LOOK_S = 0.05  # between two checks whether the group is lost
_HEAD = struct.Struct("=qQ")  # the turn, and a digest of turn and numbers
_ALIGNMENT = 128  # bytes: no two rows in one line of a cache, nor in a pair of them
_PLACE_BYTES = 256


class SharedAllGather:
    """The same on every rank: `gather` must be called by all, and as often."""

    def __init__(self, segment: SharedSegment, group: Group, num_numbers: int):
        self._segment, self._group = segment, group
        self._numbers = struct.Struct(f"={num_numbers}d")
        self._row_bytes = _row_bytes(num_numbers)
        self._memory = segment.bytes.numpy().data.cast("B")
        self._turn = 0

    def gather(self, numbers: Sequence[float]) -> list[tuple[float, ...]]:
        """The numbers of all ranks, by rank; GroupLost if the group breaks before all are there."""
        self._turn += 1
        content, start = self._numbers.pack(*numbers), self._start(self._group.rank)
        head = _HEAD.pack(self._turn, _digest(self._turn, content))
        self._memory[start + _HEAD.size : start + _HEAD.size + len(content)] = content
        self._memory[start : start + _HEAD.size] = head
        self._group.bytes_sent += len(content) * (self._group.num_ranks - 1)  # as if it were sent
        return [self._wait_for(rank) for rank in range(self._group.num_ranks)]

    def _start(self, rank: int) -> int:
        """Where a rank's row of this turn begins: the other one is of the turn before."""
        return (2 * rank + self._turn % 2) * self._row_bytes

    def _wait_for(self, rank: int) -> tuple[float, ...]:
        start, began = self._start(rank), time.monotonic()
        asked = began
        while True:
            turn, digest = _HEAD.unpack_from(self._memory, start)
            if turn == self._turn:
                end = start + _HEAD.size + self._numbers.size
                content = bytes(self._memory[start + _HEAD.size : end])
                if digest == _digest(turn, content):
                    return self._numbers.unpack(content)
            now = time.monotonic()
            if now - began < SPIN_S:
                os.sched_yield()
                continue
            time.sleep(min(LONGEST_PAUSE_S, (now - began) / 32))
            if now - asked > LOOK_S:
                asked = now
                if self._group.is_lost():
                    raise GroupLost("the generation is over")


def open_shared_all_gather(group: Group, num_numbers: int) -> SharedAllGather | None:
    """For a group; None if not all of its ranks can share memory. Every rank calls it."""
    num_bytes = 2 * group.num_ranks * _row_bytes(num_numbers)
    segment, content = None, torch.zeros(_PLACE_BYTES, dtype=torch.uint8)
    with suppress(NotShared):
        if group.rank == 0:
            segment = SharedSegment.create(num_bytes)
            place = msgspec.json.encode(segment.place)
            content[: len(place)] = torch.frombuffer(bytearray(place), dtype=torch.uint8)
    group.broadcast(content, 0)
    with suppress(NotShared, msgspec.MsgspecError):  # there is none, or it is not seen from here
        if group.rank:
            found = msgspec.json.decode(content.numpy().tobytes().rstrip(b"\0"), type=SegmentHandle)
            segment = SharedSegment.open(found, num_bytes + mmap.PAGESIZE)
    is_open = group.all_gather_numbers([segment is not None])
    if segment is None or not all(row[0] for row in is_open):
        return None
    return SharedAllGather(segment, group, num_numbers)


def _digest(turn: int, content: bytes) -> int:
    return xxh3_64_intdigest(content, turn)


def _row_bytes(num_numbers: int) -> int:
    return -(-(_HEAD.size + 8 * num_numbers) // _ALIGNMENT) * _ALIGNMENT
