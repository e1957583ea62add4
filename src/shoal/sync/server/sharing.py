"""Tables on one host: rows that workers read where the server has them, and gradients it reads.

In lockstep a server's rows do not change while workers compute: it steps when all have pushed, and
nobody begins the next batch before. So a lookup needs no message. Only after a death may a server
have made the step that is computed again; then it alone knows how rows were before, and is asked.
What a worker pushes of tables it lays into memory that servers map, and tells them where.

Cost: the mapping; of a lookup the read, of a push one copy. Not between hosts, nor where rows may
change at any time: there they are sent.
"""

import mmap
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate

import torch
from torch import Tensor, nn

from shoal.comm.shared_memory import NotShared, Place, Segment
from shoal.comm.wire import bytes_of
from shoal.errors import GroupLost
from shoal.parallel.striping import Looked, Striping
from shoal.sync.server.messages import Lent, Welcome

ALIGNMENT = 64  # bytes


@torch.no_grad()
def share(slabs: Sequence[nn.Parameter]) -> list[Segment | None]:
    """Move a server's rows to where workers of the host can read them, if there is room."""
    made: list[Segment | None] = []
    for slab in slabs:
        segment = None
        if type(slab) is not nn.Parameter:  # it may be larger than memory
            made.append(segment)
            continue
        with suppress(NotShared):
            segment = Segment.create(max(1, slab.nbytes))
            place = segment.bytes[: slab.nbytes].view(slab.dtype).view(slab.shape)
            slab.data = place.copy_(slab)
        made.append(segment)
    return made


class Shown:
    """A worker's view of the tables, as the servers showed them that greeted it."""

    def __init__(self, modules: Sequence[Looked], welcomes: Sequence[Welcome]):
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


class Lender:
    """Where a worker lays what servers of the host are to read, from one `begin` to the next."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []  # of this step; the last has room
        self._used = 0

    def begin(self) -> None:
        """Nobody reads what was lent before."""
        del self._segments[:-1]
        self._used = 0

    def lend(self, parts: Sequence[Tensor]) -> Lent | None:
        """Copy some tensors there; None if the system has no memory to share."""
        spans = [-(-part.nbytes // ALIGNMENT) * ALIGNMENT for part in parts]
        starts = [*accumulate(spans, initial=self._used)]
        if not self._segments or starts[-1] > self._segments[-1].num_bytes:
            try:  # twice as much as this step takes: the next one may touch some rows more
                self._segments.append(Segment.create(max(mmap.PAGESIZE, 2 * starts[-1])))
            except NotShared:
                return None
            starts = [*accumulate(spans, initial=0)]
        for part, start in zip(parts, starts, strict=False):
            place = self._segments[-1].bytes[start : start + part.nbytes]
            place.view(part.dtype).copy_(part.view(-1))
        self._used = starts[-1]
        ends = [start + part.nbytes for start, part in zip(starts, parts, strict=False)]
        return Lent(self._segments[-1].place, list(zip(starts, ends, strict=False)))


class Borrowed:
    """What a server reads of a worker's memory."""

    def __init__(self) -> None:
        self._segment: Segment | None = None
        self._bytes = memoryview(b"")  # all of it
        self._name = ""

    def frames(self, lent: Lent, most_bytes: int) -> list[memoryview]:
        """ValueError if they are not there, or are more than that together.

        The memory may be larger: it holds what is lent to all servers, and room for more.
        """
        if self._segment is None or lent.place.name != self._name:
            try:
                self._segment = Segment.open(lent.place, lent.place.num_bytes, at_once=False)
            except NotShared as error:
                raise ValueError(f"rows cannot be read: {error}") from error
            self._name, self._bytes = lent.place.name, memoryview(bytes_of(self._segment.bytes))
        end = self._segment.num_bytes
        if not all(0 <= start <= stop <= end for start, stop in lent.spans):
            raise ValueError(f"rows do not stand at {lent.spans} in {end} bytes")
        if (num_bytes := sum(stop - start for start, stop in lent.spans)) > most_bytes:
            raise ValueError(f"{num_bytes} bytes of rows are lent, and {most_bytes} can be meant")
        return [self._bytes[start:stop] for start, stop in lent.spans]


def _open(module: Looked, server: int, num_servers: int, place: Place) -> Tensor:
    stripes = Striping(module.num_embeddings, num_servers).stripes_of(server)
    shape = sum(map(len, stripes)), module.embedding_dim
    num_bytes = shape[0] * shape[1] * module.weight.itemsize
    try:
        segment = Segment.open(place, num_bytes + mmap.PAGESIZE, at_once=False)
    except NotShared as error:  # it died in between
        raise GroupLost(f"a server is gone: {error}") from error
    return segment.bytes[:num_bytes].view(module.weight.dtype).view(shape)
