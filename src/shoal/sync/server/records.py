"""What a server writes into its journal, and how a successor does it again.

A record is a small header with tensors beside it: an update with the sums that were stepped on, or
a snapshot of everything. Doing updates again gives the bits that the dead server had, since the
optimizer sees what it saw then.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from torch import Tensor

from shoal.comm.wire import tensor_of
from shoal.sync.server.clock import Clock, ClockRecord
from shoal.sync.server.messages import Apply
from shoal.sync.server.shard import Shard
from shoal.sync.server.tables import Tables
from shoal.sync.state import Given, pack_state, unpack_state

Record = tuple[bytes, list[Tensor]]


class Told(msgspec.Struct, frozen=True):
    """What is said of the sums of some pieces, also to who asks when they are applied."""

    batch: int
    first: int
    finite: bool
    norms: bytes
    attempt: int = -1  # of the present generation


class _Update(msgspec.Struct, frozen=True, tag="update"):
    """One step, with the sums in frames, key by key; of tables' keys the rows and their places."""

    batch: int
    first: int
    last: int
    scale: float
    factor: float
    settings: list[dict[str, Any]]
    touched: list[list[bool]]
    told: list[Told]


class _Snapshot(msgspec.Struct, frozen=True, tag="snapshot"):
    """The whole state, with its tensors in frames."""

    clock: ClockRecord
    packed: bytes
    told: list[Told]


_RECORDS: msgspec.msgpack.Decoder[_Update | _Snapshot] = msgspec.msgpack.Decoder(
    _Update | _Snapshot
)


def update_record(
    apply: Apply,
    sums: Mapping[int, Tensor],
    touched: Mapping[int, list[bool]],
    told: list[Told],
    tables: Tables,
) -> Record:
    update = _Update(
        apply.batch,
        apply.first,
        apply.last,
        apply.scale,
        apply.factor,
        apply.settings,
        list(touched.values()),
        told,
    )
    dense = [sum_ for sum_ in sums.values() if not sum_.is_sparse]
    return msgspec.msgpack.encode(update), [*dense, *tables.frames_of(sums)]


def snapshot_record(shard: Shard, clock: Clock, told: Iterable[Told]) -> Record:
    packed, tensors = pack_state(shard.state_dict())
    return msgspec.msgpack.encode(_Snapshot(clock.to_plain(), packed, list(told))), tensors


def redo(
    header: bytes, frames: list[bytes], shard: Shard, clock: Clock
) -> tuple[Clock, list[Told]]:
    """Do once more what a record tells of; the clock after it, and what was told."""
    record = _RECORDS.decode(header)
    if isinstance(record, _Snapshot):
        state = unpack_state(record.packed, [memoryview(frame) for frame in frames])
        shard.load_state_dict(Given(state))
        return Clock.from_plain(record.clock), record.told
    sums = {
        key: tensor_of(memoryview(frame), value.dtype, value.numel())
        for (key, value), frame in zip(shard.values.items(), frames, strict=False)
    }
    sums |= shard.tables.sums_of([memoryview(frame) for frame in frames[len(sums) :]])
    touched = dict(zip(sums, record.touched, strict=True))
    shard.apply(sums, touched, record.scale, record.factor, record.settings)
    clock.apply(record.batch, range(record.first, record.last))
    return clock, record.told
