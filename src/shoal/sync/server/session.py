"""A worker's session with a server: where its rows are, and which parameters it was given.

A worker is given parameters of one version. In lockstep they stay unchanged until it has them and
pushes again. Otherwise other workers may change them at any time, so they are copied: into the
worker's shared memory or, without that, into a copy here, from which it fetches key by key.
"""

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.comm.shared_memory import NotShared, SharedSegment
from shoal.comm.tree import Block, blocks_of
from shoal.comm.wire import BadFrame
from shoal.data.split import shares
from shoal.faults import faultpoint
from shoal.sync.server.layout import ServerLayout
from shoal.sync.server.messages import Fetch, Push, WorkerHello
from shoal.sync.server.packing import unpack_row
from shoal.sync.server.table_memory import FrameReader

FEW_BYTES = 1 << 16  # of parameters that go with the answer that a step is made


@dataclass
class WorkerSession:
    """A worker that greeted in this generation."""

    pieces: range  # of each batch, that are its own
    blocks: list[Block]  # which it pushes as one row each
    layout: ServerLayout
    rows: SharedSegment | None  # memory that both see
    pulled: int = 0  # the number of the last question for parameters that was answered
    version: int = 0  # that it was given
    values: Mapping[int, Tensor] = field(default_factory=dict)  # of that version, to be fetched
    lent: FrameReader = field(default_factory=FrameReader)  # what it lays out of tables
    _places: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # by key and row
    made: int = -1  # how many updates came before the last one that it asked for
    loaded: int = 0  # the number of the last message with a state that was taken in

    def give(self, request: int, values: Mapping[int, Tensor], version: int, stay: bool) -> None:
        """Let these be what it reads or fetches: as they stand, if they `stay`, or copies.

        A question that came twice may find the next gradients where copies were.
        """
        if request <= self.pulled:
            return
        self.pulled, self.version = request, version
        if stay:
            self.values = values
        elif self.rows is not None:
            for key, value in values.items():
                self.place(key, 0, value).copy_(value)
        else:
            # Into the last ones: a worker that asks again has all of them.
            last = self.values or {key: torch.empty_like(v) for key, v in values.items()}
            for key, value in values.items():
                last[key].copy_(value)
            self.values = last

    def first_few(self, order: Sequence[int]) -> list[Tensor]:
        """Those that go with an answer, of keys in order: none if it reads them in shared memory,
        or was given nothing because its question had an impossible number."""
        found: list[Tensor] = []
        for key in order if self.values and self.rows is None else ():
            if sum(value.nbytes for value in found) + self.values[key].nbytes > FEW_BYTES:
                break
            found.append(self.values[key])
        return found

    def fetched(self, fetch: Fetch) -> list[Tensor]:
        faultpoint("server.fetch", fetch.version)
        if fetch.version != self.version or not self.values.keys() >= {*fetch.keys}:
            raise ValueError(
                f"keys {fetch.keys} of version {fetch.version} are to be fetched, and version "
                f"{self.version} was given"
            )
        return [self.values[key] for key in fetch.keys]

    def rows_of(self, push: Push, values: Tensor, payload: Sequence[memoryview]) -> list[Tensor]:
        """What a push brings of a key that holds `values`, a row for each block."""
        if not push.is_shared:
            if len(payload) != len(push.blocks):
                raise BadFrame(f"{len(push.blocks)} blocks came with {len(payload)} frames")
            return [unpack_row(push.codec, frame, values) for frame in payload]
        if self.rows is None or payload:
            raise ValueError("rows are in shared memory or in frames, and here in neither or both")
        return [self.place(push.key, row, values) for row in range(len(push.blocks))]

    def place(self, number: int, row: int, values: Tensor) -> Tensor:
        """Where a key that holds `values` stands in a row of the memory that both see."""
        if (number, row) not in self._places:
            assert self.rows is not None
            key = self.layout.keys[number]
            place = self.layout.row_places(len(self.blocks))[key.flat_buffer]
            length = self.layout.flat_buffers[key.flat_buffer].starts[-1] * key.itemsize
            start = place + row * length + key.start * key.itemsize
            bytes_ = self.rows.bytes[start : start + key.num_bytes]
            self._places[number, row] = bytes_.view(values.dtype)
        return self._places[number, row]


def open_session(
    hello: WorkerHello, layout: ServerLayout, num_seats: int, num_pieces: int, whole: bool
) -> WorkerSession:
    """Who greets; ValueError if its seat or its memory is not what it would be in this plan.

    `whole`: pieces are added up as parts of their batch, not as a worker's own.
    """
    if not 0 <= hello.seat < num_seats:
        raise ValueError(f"there is no seat {hello.seat} among {num_seats}")
    pieces = shares(num_pieces, num_seats)[hello.seat]
    blocks = _blocks(pieces, whole)
    if hello.num_rows != len(blocks):
        raise ValueError(f"seat {hello.seat} has {len(blocks)} rows, not {hello.num_rows}")
    return WorkerSession(pieces, blocks, layout, _open(hello, layout))


def _blocks(pieces: range, whole: bool) -> list[Block]:
    """What a worker adds up itself: subtrees of the whole, or of its pieces."""
    if whole:
        return blocks_of(pieces)
    own = blocks_of(range(len(pieces)))
    return [Block(b.first + pieces.start, b.num_pieces) for b in own]


def _open(hello: WorkerHello, layout: ServerLayout) -> SharedSegment | None:
    if hello.rows is None:
        return None
    num_bytes = layout.row_places(hello.num_rows)[-1]
    if hello.rows.num_bytes < num_bytes:
        raise ValueError(f"{hello.num_rows} rows do not fit in the memory that is shared")
    try:
        return SharedSegment.open(hello.rows, num_bytes + mmap.PAGESIZE)
    except NotShared:
        return None  # of another host or container: rows will come in frames
