"""Tables on one host: workers read rows in a server's memory, and it reads gradients in theirs.

In lockstep a server's rows do not change while workers compute: it steps when all have pushed, and
no worker begins the next batch before. So a lookup needs no message. Only after a death may a
server have made the step that is computed again; then it alone has the rows as they were before,
and is asked. A worker copies its gradients of tables into memory that servers map, and sends the
offsets.

Cost: the mapping; of a lookup the read, of a push one copy. Not between hosts, nor out of lockstep:
there rows are sent.
"""

import mmap
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate

import torch
from torch import Tensor, nn

from shoal.comm.shared_memory import NotShared, SegmentHandle, SharedSegment
from shoal.comm.wire import bytes_of
from shoal.errors import GroupLost
from shoal.parallel.striping import EmbeddingModule, Striping
from shoal.sync.server.messages import ServerWelcome, SharedFrames

ALIGNMENT = 64  # bytes


@torch.no_grad()
def share_tables(slabs: Sequence[nn.Parameter]) -> list[SharedSegment | None]:
    """Move a server's rows to where workers of the host can read them, if there is room."""
    made: list[SharedSegment | None] = []
    for slab in slabs:
        segment = None
        if type(slab) is not nn.Parameter:  # it may be larger than memory
            made.append(segment)
            continue
        with suppress(NotShared):
            segment = SharedSegment.create(max(1, slab.nbytes))
            place = segment.bytes[: slab.nbytes].view(slab.dtype).view(slab.shape)
            slab.data = place.copy_(slab)
        made.append(segment)
    return made


class SharedTables:
    """A worker's view of the tables, as the servers showed them that greeted it."""

    def __init__(self, modules: Sequence[EmbeddingModule], welcomes: Sequence[ServerWelcome]):
        self._committed = [welcome.committed for welcome in welcomes]
        self._slabs = [
            [
                None if place is None else _open(module, server, len(welcomes), place)
                for module, place in zip(modules, welcome.tables, strict=False)
            ]
            for server, welcome in enumerate(welcomes)
        ]

    def rows(self, table: int, server: int, batch: int) -> Tensor | None:
        """What a server holds of a table, if it is seen here and as of this batch."""
        slabs = self._slabs[server]
        return slabs[table] if slabs and self._committed[server] <= batch else None


class FrameWriter:
    """Where a worker lays what servers of the host are to read, from one `begin` to the next."""

    def __init__(self) -> None:
        self._segments: list[SharedSegment] = []  # of this step; the last has room
        self._used = 0

    def begin(self) -> None:
        """Reuse the memory: servers no longer read what was written before."""
        del self._segments[:-1]
        self._used = 0

    def write(self, parts: Sequence[Tensor]) -> SharedFrames | None:
        """Copy some tensors there; None if the system has no memory to share."""
        spans = [-(-part.nbytes // ALIGNMENT) * ALIGNMENT for part in parts]
        starts = [*accumulate(spans, initial=self._used)]
        if not self._segments or starts[-1] > self._segments[-1].num_bytes:
            try:  # twice as much as this step takes: the next one may touch some rows more
                self._segments.append(SharedSegment.create(max(mmap.PAGESIZE, 2 * starts[-1])))
            except NotShared:
                return None
            starts = [*accumulate(spans, initial=0)]
        for part, start in zip(parts, starts, strict=False):
            place = self._segments[-1].bytes[start : start + part.nbytes]
            place.view(part.dtype).copy_(part.view(-1))
        self._used = starts[-1]
        ends = [start + part.nbytes for start, part in zip(starts, parts, strict=False)]
        return SharedFrames(self._segments[-1].place, list(zip(starts, ends, strict=False)))


class FrameReader:
    """What a server reads of a worker's memory."""

    def __init__(self) -> None:
        self._segment: SharedSegment | None = None
        self._bytes = memoryview(b"")  # all of it
        self._name = ""

    def frames(self, shared: SharedFrames, most_bytes: int) -> list[memoryview]:
        """ValueError if they are not there, or are more than that together.

        The memory may be larger: it holds what is lent to all servers, and room for more.
        """
        if self._segment is None or shared.place.name != self._name:
            try:
                self._segment = SharedSegment.open(
                    shared.place, shared.place.num_bytes, at_once=False
                )
            except NotShared as error:
                raise ValueError(f"rows cannot be read: {error}") from error
            self._name, self._bytes = shared.place.name, memoryview(bytes_of(self._segment.bytes))
        end = self._segment.num_bytes
        if not all(0 <= start <= stop <= end for start, stop in shared.spans):
            raise ValueError(f"rows do not stand at {shared.spans} in {end} bytes")
        if (num_bytes := sum(stop - start for start, stop in shared.spans)) > most_bytes:
            raise ValueError(f"{num_bytes} bytes of rows are lent, and {most_bytes} can be meant")
        return [self._bytes[start:stop] for start, stop in shared.spans]


def _open(module: EmbeddingModule, server: int, num_servers: int, place: SegmentHandle) -> Tensor:
    stripes = Striping(module.num_embeddings, num_servers).stripes_of(server)
    shape = sum(map(len, stripes)), module.embedding_dim
    num_bytes = shape[0] * shape[1] * module.weight.itemsize
    try:
        segment = SharedSegment.open(place, num_bytes + mmap.PAGESIZE, at_once=False)
    except NotShared as error:  # it died in between
        raise GroupLost(f"a server is gone: {error}") from error
    return segment.bytes[:num_bytes].view(module.weight.dtype).view(shape)
