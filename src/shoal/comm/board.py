"""Small numbers that all ranks of a host must know, written where all can read them.

Each rank has a row in memory that they share, writes its numbers there and reads those of the
others. That takes a few microseconds where a message through Gloo and its threads takes half a
millisecond: as much as all else of a step that looks up a few thousand rows of a table. Whoever is
early looks again and again for a moment, and gives way to others of its core; after that it sleeps
between looks, so that a slow rank costs nobody a core.

Not for ranks of several hosts (`open_board` then gives none), nor for gradients, which have
buckets. Cost: two rows of memory for each rank, since one may write its next numbers while another
still reads the last ones. A row carries its turn and a digest, so that nobody takes half a row for
a whole one, in whatever order memory shows it.
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
from shoal.comm.shared_memory import NotShared, Place, Segment
from shoal.errors import GroupLost

SPIN_S = 0.002  # that a rank looks for others without a pause
LONGEST_PAUSE_S = 0.002
LOOK_S = 0.05  # between two looks whether the group is lost
_HEAD = struct.Struct("=qQ")  # the turn, and a digest of turn and numbers
_ALIGNMENT = 128  # bytes: no two rows in one line of a cache, nor in a pair of them
_PLACE_BYTES = 256


class Board:
    """The same on every rank: `gather` must be called by all, and as often."""

    def __init__(self, segment: Segment, group: Group, num_numbers: int):
        self._segment, self._group = segment, group
        self._numbers = struct.Struct(f"={num_numbers}d")
        self._row_bytes = _row_bytes(num_numbers)
        self._memory = segment.bytes.numpy().data.cast("B")
        self._turn = 0

    def gather(self, numbers: Sequence[float]) -> list[tuple[float, ...]]:
        """Everybody's numbers, by rank; GroupLost if the group breaks before all are here."""
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


def open_board(group: Group, num_numbers: int) -> Board | None:
    """A board for a group, or None if not all of its ranks see one memory. Every rank calls it."""
    num_bytes = 2 * group.num_ranks * _row_bytes(num_numbers)
    segment, told = None, torch.zeros(_PLACE_BYTES, dtype=torch.uint8)
    with suppress(NotShared):
        if group.rank == 0:
            segment = Segment.create(num_bytes)
            place = msgspec.json.encode(segment.place)
            told[: len(place)] = torch.frombuffer(bytearray(place), dtype=torch.uint8)
    group.broadcast(told, 0)
    with suppress(NotShared, msgspec.MsgspecError):  # there is none, or it is not seen from here
        if group.rank:
            found = msgspec.json.decode(told.numpy().tobytes().rstrip(b"\0"), type=Place)
            segment = Segment.open(found, num_bytes + mmap.PAGESIZE)
    have = group.gather_numbers([segment is not None])
    if segment is None or not all(row[0] for row in have):
        return None
    return Board(segment, group, num_numbers)


def _digest(turn: int, content: bytes) -> int:
    return xxh3_64_intdigest(content, turn)


def _row_bytes(num_numbers: int) -> int:
    return -(-(_HEAD.size + 8 * num_numbers) // _ALIGNMENT) * _ALIGNMENT
