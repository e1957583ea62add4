"""A worker's memory: rows of gradients that servers read, and parameters read from theirs.

Servers of the same host are shown where the rows stand, and show where parameters do; then a push
is the copy into the bucket, and a pull one copy out of the server's memory. Others get and send
frames. Either way the rest of a worker sees buckets and parameters only.
"""

import mmap
from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn

from shoal.comm.buckets import Bucket
from shoal.comm.shared_memory import NotShared, Place, Segment
from shoal.comm.spares import Spares
from shoal.comm.wire import tensor_of
from shoal.parallel import zero
from shoal.sync.server.layout import Layout
from shoal.sync.server.messages import Welcome


class Memory:
    def __init__(self, layout: Layout, num_rows: int, parameters: Sequence[nn.Parameter]):
        self.layout, self.num_rows = layout, num_rows
        self._parameters = [p.detach() for p in parameters]
        self._rows: Segment | None = None
        num_bytes = layout.row_places(num_rows)[-1]
        if num_bytes:
            with suppress(NotShared):  # the system has none to share: rows are sent
                self._rows = Segment.create(num_bytes)

    @property
    def place(self) -> Place | None:
        return None if self._rows is None else self._rows.place

    def buckets(self, parameters: Sequence[nn.Parameter]) -> list[Bucket]:
        """One for each shelf, its rows where servers can read them."""
        made, places = [], self.layout.row_places(self.num_rows)
        for shelf, place in zip(self.layout.shelves, places, strict=False):
            lender = Spares() if self._rows is None else _Rows(self._rows, place)
            made.append(Bucket(shelf.indices, parameters, self.num_rows, lender, shelf.starts))
        return made

    def open(self, welcomes: Sequence[Welcome]) -> None:
        """Look at the memory of the servers that show theirs."""
        self._is_shared = [welcome.is_shared for welcome in welcomes]
        self._theirs: list[Segment | None] = []
        for server, welcome in enumerate(welcomes):
            most = self.layout.value_places(server)[-1] + mmap.PAGESIZE
            place = welcome.values
            self._theirs.append(None if place is None else Segment.open(place, most))
        self._copies = [self._views(server) for server in range(len(welcomes))]

    def shares_with(self, server: int) -> bool:
        return self._is_shared[server]

    @torch.no_grad()
    def take_values(self, server: int, frames: Sequence[memoryview]) -> None:
        """Take over a server's parameters, from memory or from frames."""
        places, values = self._copies[server]
        if places:
            torch._foreach_copy_(places, values)
        if self._is_shared[server]:
            return
        for key, frame in zip(self.layout.held_by(server), frames, strict=True):
            own = self.layout.keys[key]
            flat = tensor_of(frame, self._dtype_of(key), own.stop - own.start)
            for place, s in self._places_of(key):
                place.copy_(flat[s.place : s.place + s.length])

    def _views(self, server: int) -> tuple[list[Tensor], list[Tensor]]:
        """Where parameters are, and where a server shows or puts them."""
        own: list[Tensor] = []
        others: list[Tensor] = []
        for key in self.layout.held_by(server) if self._is_shared[server] else ():
            flat = self._shown(server, key)
            for place, s in self._places_of(key):
                own.append(place)
                others.append(flat[s.place : s.place + s.length])
        return own, others

    def _shown(self, server: int, number: int) -> Tensor:
        """A key in the server's memory, or in the first row of its shelf here."""
        key, theirs = self.layout.keys[number], self._theirs[server]
        if theirs is not None:
            place = self.layout.value_places(server)[self.layout.held_by(server).index(number)]
            return theirs.bytes[place : place + key.num_bytes].view(self._dtype_of(number))
        assert self._rows is not None
        start = self.layout.row_places(self.num_rows)[key.shelf] + key.start * key.itemsize
        return self._rows.bytes[start : start + key.num_bytes].view(self._dtype_of(number))

    def _dtype_of(self, key: int) -> torch.dtype:
        return self._parameters[self.layout.segments(key)[0].parameter].dtype

    def _places_of(self, key: int) -> Iterator[tuple[Tensor, zero.Segment]]:
        """Where a key's elements are in the parameters, and where in the key."""
        for s in self.layout.segments(key):
            yield self._parameters[s.parameter].view(-1)[s.start : s.stop], s


class _Rows(Spares):
    """Lends the rows of one shelf, one after another."""

    def __init__(self, segment: Segment, place: int):
        super().__init__()
        self._segment, self._place = segment, place

    def take(self, length: int, like: Tensor) -> Tensor:
        start, self._place = self._place, self._place + length * like.element_size()
        return self._segment.bytes[start : self._place].view(like.dtype)
