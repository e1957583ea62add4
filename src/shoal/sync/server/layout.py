"""Where each element of the parameters is, and which server holds it. Pure.

Parameters lie one after another in flat buffers, those of ZeRO (`parallel/zero_layout.py`), which
fill up during backward; each is cut into keys of about 4 MB, and the keys are assigned to servers
(`placement.py`). Workers and servers compute this alike from the parameter list, and compare
digests of it when they connect.
"""

import hashlib
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from shoal.comm.buckets import BUCKET_BYTES
from shoal.parallel import zero_layout
from shoal.sync.server.placement import place_keys

LEAST_BYTES = 64  # of a key, so that small models are dealt out too
ALIGNMENT = 64  # bytes, of what stands in shared memory


class ParameterKey(NamedTuple):
    """A span of a flat buffer."""

    flat_buffer: int
    number: int  # among the flat buffer's
    start: int
    stop: int
    itemsize: int

    @property
    def num_bytes(self) -> int:
        return (self.stop - self.start) * self.itemsize


class ServerLayout(NamedTuple):
    flat_buffers: list[zero_layout.FlatBuffer]  # `cuts` are where keys begin, and the end
    keys: list[ParameterKey]
    holders: list[int]  # the server of each key
    itemsizes: list[int]  # of each flat buffer's elements

    def held_by(self, server: int) -> list[int]:
        """The keys that a server holds."""
        return [number for number, holder in enumerate(self.holders) if holder == server]

    def forward_order(self, keys: Iterable[int]) -> list[int]:
        """As a forward uses them: in the order of the parameter list."""
        return sorted(keys, key=lambda key: min(s.parameter for s in self.segments(key)))

    def keys_of_buffer(self, flat_buffer: int) -> list[int]:
        return [number for number, key in enumerate(self.keys) if key.flat_buffer == flat_buffer]

    def segments(self, key: int) -> list[zero_layout.FlatSegment]:
        """Runs of parameters in a key; `place` counts from the key's start."""
        own = self.keys[key]
        return [
            segment._replace(place=segment.place - own.start)
            for segment in self.flat_buffers[own.flat_buffer].segments(own.number)
        ]

    def padding(self, key: int) -> list[range]:
        """What of a key belongs to no parameter."""
        segments = sorted((s.place, s.place + s.length) for s in self.segments(key))
        length = self.keys[key].stop - self.keys[key].start
        ends, starts = [0, *(end for _, end in segments)], [*(a for a, _ in segments), length]
        return [range(a, b) for a, b in zip(ends, starts, strict=True) if a < b]

    def row_places(self, num_rows: int) -> list[int]:
        """Where each flat buffer's rows begin in a worker's memory, in bytes; and the end."""
        return _aligned_offsets(
            num_rows * flat_buffer.starts[-1] * size
            for flat_buffer, size in zip(self.flat_buffers, self.itemsizes, strict=True)
        )

    def value_places(self, server: int) -> list[int]:
        """Where each of a server's keys begins in its shared memory, in bytes; and the end."""
        return _aligned_offsets(self.keys[number].num_bytes for number in self.held_by(server))

    def most_bytes(self, keys: Iterable[int]) -> int:
        """That a state may have: parameters, what optimizers keep of them, and their names."""
        return sum(self.keys[k].num_bytes * 16 + len(self.segments(k)) * 16_384 for k in keys)

    def on_one_server(self) -> "ServerLayout":
        """The same keys, all with one server."""
        return self._replace(holders=[0] * len(self.keys))

    @property
    def digest(self) -> str:
        """By which two processes know that they mean the same."""
        told = repr((self.flat_buffers, self.keys, self.holders)).encode()
        return hashlib.sha256(told).hexdigest()[:16]


def make_layout(
    sizes: Sequence[tuple[int, int, object]], may_cut: bool, num_servers: int
) -> ServerLayout:
    """Of parameters given as (elements, bytes of one, kind); whole ones if they may not be cut."""
    total = sum(length * itemsize for length, itemsize, _ in sizes)
    most = min(BUCKET_BYTES, max(LEAST_BYTES, total // (4 * num_servers)))
    flat_buffers, keys = [], []
    for number, flat_buffer in enumerate(zero_layout.lay_out_buffers(sizes, 1, may_cut)):
        itemsize = sizes[flat_buffer.indices[0]][1]
        num_keys = -(-flat_buffer.starts[-1] * itemsize // most) if may_cut else 1
        cuts = sorted(
            {*zero_layout.shard_evenly(flat_buffer.starts, flat_buffer.lengths, num_keys)}
        )
        flat_buffers.append(flat_buffer._replace(cuts=cuts))
        for k, (start, stop) in enumerate(pairwise(cuts)):
            keys.append(ParameterKey(number, k, start, stop, itemsize))
    holders = place_keys([key.num_bytes for key in keys], range(num_servers))
    itemsizes = [sizes[flat_buffer.indices[0]][1] for flat_buffer in flat_buffers]
    return ServerLayout(flat_buffers, keys, holders, itemsizes)


def _aligned_offsets(sizes: Iterable[int]) -> list[int]:
    return [0, *accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]
