"""Where each element of the parameters stands, and which server holds it. Pure.

Parameters stand one after another in flat rows, the shelves of ZeRO (`parallel/zero.py`), which
fill up during backward; each is cut into keys of about 4 MB, and the keys are dealt to servers.
Workers and servers compute this alike from the parameter list, and greet each other with a digest
of it.
"""

import hashlib
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from shoal.comm.buckets import BUCKET_BYTES
from shoal.parallel import zero
from shoal.sync.server.placement import place

LEAST_BYTES = 64  # of a key, so that small models are dealt out too
ALIGNMENT = 64  # bytes, of what stands in shared memory


class Key(NamedTuple):
    """A stretch of a shelf's row."""

    shelf: int
    number: int  # among the shelf's
    start: int
    stop: int
    itemsize: int

    @property
    def num_bytes(self) -> int:
        return (self.stop - self.start) * self.itemsize


class Layout(NamedTuple):
    shelves: list[zero.Shelf]  # `cuts` are where keys begin, and the end
    keys: list[Key]
    holders: list[int]  # the server of each key
    itemsizes: list[int]  # of each shelf's elements

    def held_by(self, server: int) -> list[int]:
        """The keys that a server holds."""
        return [number for number, holder in enumerate(self.holders) if holder == server]

    def in_order(self, keys: Iterable[int]) -> list[int]:
        """As a forward uses them: in the order of the parameter list."""
        return sorted(keys, key=lambda key: min(s.parameter for s in self.segments(key)))

    def of_shelf(self, shelf: int) -> list[int]:
        return [number for number, key in enumerate(self.keys) if key.shelf == shelf]

    def segments(self, key: int) -> list[zero.Segment]:
        """Runs of parameters in a key; `place` counts from the key's start."""
        own = self.keys[key]
        return [
            segment._replace(place=segment.place - own.start)
            for segment in self.shelves[own.shelf].segments(own.number)
        ]

    def row_places(self, num_rows: int) -> list[int]:
        """Where each shelf's rows begin in a worker's shared memory, in bytes; and the end."""
        return _places(
            num_rows * shelf.starts[-1] * size
            for shelf, size in zip(self.shelves, self.itemsizes, strict=True)
        )

    def value_places(self, server: int) -> list[int]:
        """Where each of a server's keys begins in its shared memory, in bytes; and the end."""
        return _places(self.keys[number].num_bytes for number in self.held_by(server))

    def most_bytes(self, keys: Iterable[int]) -> int:
        """That a state may have: parameters, what optimizers keep of them, and their names."""
        return sum(self.keys[k].num_bytes * 16 + len(self.segments(k)) * 16_384 for k in keys)

    def on_one(self) -> "Layout":
        """The same keys, all with one server."""
        return self._replace(holders=[0] * len(self.keys))

    @property
    def digest(self) -> str:
        """By which two processes know that they mean the same."""
        told = repr((self.shelves, self.keys, self.holders)).encode()
        return hashlib.sha256(told).hexdigest()[:16]


def lay_out(sizes: Sequence[tuple[int, int, object]], may_cut: bool, num_servers: int) -> Layout:
    """Of parameters given as (elements, bytes of one, kind); whole ones if they may not be cut."""
    total = sum(length * itemsize for length, itemsize, _ in sizes)
    most = min(BUCKET_BYTES, max(LEAST_BYTES, total // (4 * num_servers)))
    shelves, keys = [], []
    for number, shelf in enumerate(zero.shelve(sizes, 1, may_cut)):
        itemsize = sizes[shelf.indices[0]][1]
        num_keys = -(-shelf.starts[-1] * itemsize // most) if may_cut else 1
        cuts = sorted({*zero.shard_evenly(shelf.starts, shelf.lengths, num_keys)})
        shelves.append(shelf._replace(cuts=cuts))
        for k, (start, stop) in enumerate(pairwise(cuts)):
            keys.append(Key(number, k, start, stop, itemsize))
    holders = place([key.num_bytes for key in keys], range(num_servers))
    itemsizes = [sizes[shelf.indices[0]][1] for shelf in shelves]
    return Layout(shelves, keys, holders, itemsizes)


def _places(sizes: Iterable[int]) -> list[int]:
    return [0, *accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]
