"""A worker's memory: rows of gradients that servers read, and parameters read from theirs.

Servers of the same host map the rows; then a push is the copy into the bucket. In lockstep they
share their parameters, and the model's parameters are views of these (`parameter_views.py`).
Otherwise they copy parameters into the rows, and a pull is a copy out of these. Other servers use
frames. Either way the rest of a worker sees buckets and parameters only.
"""

import mmap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shoal.comm.buckets import GradientBucket
from shoal.comm.buffer_pool import BufferPool
from shoal.comm.shared_memory import NotShared, SegmentHandle, SharedSegment
from shoal.comm.uncached_copy import copy_uncached
from shoal.comm.wire import tensor_of
from shoal.parallel import zero_layout
from shoal.sync.server.layout import ServerLayout
from shoal.sync.server.messages import ServerWelcome
from shoal.sync.server.parameter_views import ParameterViews
from shoal.sync.server.shard import served_parameters


class WorkerMemory:
    def __init__(self, layout: ServerLayout, num_rows: int, model: nn.Module):
        self.layout, self.num_rows = layout, num_rows
        self._parameters = [p for _, p in served_parameters(model)]
        self._views = ParameterViews(layout, model, self._parameters)
        self._rows_of: dict[int, Tensor] = {}  # of parameters whose elements stand otherwise
        self._rows: SharedSegment | None = None
        with suppress(NotShared):  # the system has none to share: rows are sent
            # By it a server knows who is of its host, also where all of a model are tables.
            self._rows = SharedSegment.create(max(1, layout.row_places(num_rows)[-1]))

    @property
    def place(self) -> SegmentHandle | None:
        return None if self._rows is None else self._rows.place

    def buckets(self, parameters: Sequence[nn.Parameter]) -> list[GradientBucket]:
        """One for each flat buffer, its rows where servers can read them; after `open`."""
        made, places = [], self.layout.row_places(self.num_rows)
        for flat_buffer, place in zip(self.layout.flat_buffers, places, strict=False):
            lender = BufferPool() if self._rows is None else _SegmentRows(self._rows, place)
            kind = _UncachedBucket if any(self._is_shared) else GradientBucket
            made.append(
                kind(flat_buffer.indices, parameters, self.num_rows, lender, flat_buffer.starts)
            )
        return made

    def open(self, welcomes: Sequence[ServerWelcome]) -> None:
        """Look at the memory of the servers that show theirs."""
        self._is_shared = [welcome.is_shared for welcome in welcomes]
        self._shown: list[list[_MappedSet]] = []  # by server and set
        for server, welcome in enumerate(welcomes):
            most = self.layout.value_places(server)[-1] + mmap.PAGESIZE
            segments = [SharedSegment.open(place, most) for place in welcome.values]
            self._shown.append([self._show(server, segment) for segment in segments])
            if welcome.is_shared and not segments:
                self._shown[-1].append(self._show(server, None))

    def shares_with(self, server: int) -> bool:
        return self._is_shared[server]

    @torch.no_grad()
    def show(self, server: int, number: int) -> None:
        """Take over the parameters of a server that shares memory, from one of its sets."""
        shown = self._shown[server][number]
        if shown.places:
            torch._foreach_copy_(shown.places, shown.values)
        self._put_in_order(self.layout.held_by(server))
        self._views.show(shown.views)

    @torch.no_grad()
    def put(self, key: int, frame: memoryview) -> None:
        """Take over a key that came in a frame."""
        own = self.layout.keys[key]
        flat = tensor_of(frame, self._dtype_of(key), own.stop - own.start)
        for place, s in self._places_of(key):
            place.copy_(flat[s.place : s.place + s.length])
        self._put_in_order([key])

    def take_back(self) -> None:
        """Let no parameter stand in a server's memory any more."""
        self._views.take_back()

    def _show(self, server: int, segment: SharedSegment | None) -> "_MappedSet":
        """What is shown in a server's memory, or put into the rows here."""
        shown = _MappedSet([], [], [] if segment is None else self._views.of(server, segment))
        viewed = {number for number, _ in shown.views}
        for key in self.layout.held_by(server):
            flat = self._flat(server, key, segment)
            for place, s in self._places_of(key):
                if s.parameter not in viewed:
                    shown.places.append(place)
                    shown.values.append(flat[s.place : s.place + s.length])
        return shown

    def _flat(self, server: int, number: int, segment: SharedSegment | None) -> Tensor:
        """A key in the server's memory, or in the first row of its flat buffer here."""
        key = self.layout.keys[number]
        if segment is not None:
            place = self.layout.value_places(server)[self.layout.held_by(server).index(number)]
            return segment.bytes[place : place + key.num_bytes].view(self._dtype_of(number))
        assert self._rows is not None
        start = self.layout.row_places(self.num_rows)[key.flat_buffer] + key.start * key.itemsize
        return self._rows.bytes[start : start + key.num_bytes].view(self._dtype_of(number))

    def _dtype_of(self, key: int) -> torch.dtype:
        return self._parameters[self.layout.segments(key)[0].parameter].dtype

    def _places_of(self, key: int) -> Iterator[tuple[Tensor, zero_layout.FlatSegment]]:
        """Where a key's elements are in the parameters, and where in the key."""
        for s in self.layout.segments(key):
            # As `data`: a forward under way must not take it for a write of its own.
            whole = self._parameters[s.parameter].data
            if not whole.is_contiguous():  # channels last, transposed: its elements in a row first
                if s.parameter not in self._rows_of:
                    self._rows_of[s.parameter] = whole.contiguous()
                whole = self._rows_of[s.parameter]
            yield whole.view(-1)[s.start : s.stop], s

    def _put_in_order(self, keys: Sequence[int]) -> None:
        """Bring what came of some keys to where its elements stand."""
        if self._rows_of:
            for number in {s.parameter for key in keys for s in self.layout.segments(key)}:
                if number in self._rows_of:
                    self._parameters[number].data.copy_(self._rows_of[number])


class PushedBucket:
    """What became of a bucket that was pushed: servers add it up."""

    def fold(self) -> None:
        """It is not ours to add up."""

    def drain(self, deadline: float) -> None:
        """Only the worker itself writes to the bucket."""


class _MappedSet(NamedTuple):
    """What to copy where, and which parameters are to be which tensors."""

    places: list[Tensor]
    values: list[Tensor]
    views: list[tuple[int, Tensor]]


class _UncachedBucket(GradientBucket):
    """One whose rows servers read, so they are copied past the cache."""

    def _copy(self, views: list[Tensor], values: list[Tensor]) -> None:
        copy_uncached(views, values)


class _SegmentRows(BufferPool):
    """Allocates the rows of one flat buffer, one after another."""

    def __init__(self, segment: SharedSegment, place: int):
        super().__init__()
        self._segment, self._place = segment, place

    def take(self, length: int, like: Tensor) -> Tensor:
        start, self._place = self._place, self._place + length * like.element_size()
        return self._segment.bytes[start : self._place].view(like.dtype)
