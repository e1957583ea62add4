"""The records in a server's journal, and how a successor replays them.

A record is a small header with tensors beside it: an update with the sums that were stepped on, or
a snapshot of everything. A replay of the updates gives the bits that the dead server had, since the
optimizer sees the same sums in the same order. Read next: `journal.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
from torch import Tensor

from shoal.comm.wire import tensor_of
from shoal.sync.guard import CorruptState, list_names
from shoal.sync.server.clock import Clock, ClockRecord
from shoal.sync.server.messages import Apply
from shoal.sync.server.shard import ServerShard, ShardDigests
from shoal.sync.server.tables import ServerTables
from shoal.sync.state import MemorySource, pack_state, unpack_state

JournalRecord = tuple[bytes, Sequence[bytes | Tensor]]


class SumSummary(msgspec.Struct, frozen=True):
    """What is said of the sums of some pieces, also to who asks when they are applied."""

    batch: int
    first: int
    finite: bool
    norms: bytes
    attempt: int = -1  # of the present generation


class UpdateLog(Protocol):
    """Where a server writes down what it did, before it answers."""

    @property
    def is_long(self) -> bool:
        """Whether it is time for a snapshot."""
        ...

    def append(self, header: bytes, tensors: Sequence[bytes | Tensor]) -> None:
        """Write an update down."""
        ...

    def begin(self, header: bytes, tensors: Sequence[bytes | Tensor]) -> None:
        """Put a snapshot of the state in the place of everything before it."""
        ...


class ServerProgress(NamedTuple):
    """What a server has done, beside the state that it made."""

    clock: Clock
    version: int  # updates made, and states taken over from workers
    told: Mapping[int, SumSummary]  # the last, by first piece


class _UpdateRecord(msgspec.Struct, frozen=True, tag="update"):
    """One step, with the sums in frames, key by key; of tables' keys the rows and their places."""

    batch: int
    first: int
    last: int
    scale: float
    factor: float
    settings: list[dict[str, Any]]
    touched: list[list[bool]]
    told: list[SumSummary]
    checked: ShardDigests | None = None  # of the state after it


class _SnapshotRecord(msgspec.Struct, frozen=True, tag="snapshot"):
    """The whole state, in frames."""

    clock: ClockRecord
    version: int
    told: list[SumSummary]


_RECORDS: msgspec.msgpack.Decoder[_UpdateRecord | _SnapshotRecord] = msgspec.msgpack.Decoder(
    _UpdateRecord | _SnapshotRecord
)


def update_record(
    apply: Apply,
    sums: Mapping[int, Tensor],
    touched: Mapping[int, list[bool]],
    told: list[SumSummary],
    tables: ServerTables,
    checked: ShardDigests | None = None,
) -> JournalRecord:
    update = _UpdateRecord(
        apply.batch,
        apply.first,
        apply.last,
        apply.scale,
        apply.factor,
        apply.settings,
        list(touched.values()),
        told,
        checked,
    )
    dense = [sum_ for sum_ in sums.values() if not sum_.is_sparse]
    return msgspec.msgpack.encode(update), [*dense, *tables.frames_of(sums)]


def snapshot_record(shard: ServerShard, progress: ServerProgress) -> JournalRecord:
    snapshot = _SnapshotRecord(
        progress.clock.to_plain(), progress.version, list(progress.told.values())
    )
    state = shard.state_dict()
    state.tensors.update(shard.tables.before_state())
    return msgspec.msgpack.encode(snapshot), pack_state(state)


def replay(
    header: bytes | memoryview,
    frames: Sequence[bytes | memoryview],
    shard: ServerShard,
    progress: ServerProgress,
) -> ServerProgress:
    """Do once more what a record tells of."""
    record = _RECORDS.decode(header)
    told = {one.first: one for one in record.told}
    if isinstance(record, _SnapshotRecord):
        state = unpack_state([memoryview(frame) for frame in frames])
        shard.load_state_dict(MemorySource(state))
        shard.tables.recall(state.tensors)
        return ServerProgress(Clock.from_plain(record.clock), record.version, told)
    sums = {
        key: tensor_of(memoryview(frame), value.dtype, value.numel())
        for (key, value), frame in zip(shard.values.items(), frames, strict=False)
    }
    sums |= shard.tables.sums_of([memoryview(frame) for frame in frames[len(sums) :]])
    touched = dict(zip(sums, record.touched, strict=True))
    before = record.checked
    settings = record.scale, record.factor, record.settings
    after = shard.apply(sums, touched, *settings, turn=before and before.turn)
    if before is not None and before.digests and after.digests:
        _refuse_difference(shard, before, after, record.batch)
    progress.clock.apply(record.batch, range(record.first, record.last))
    return ServerProgress(progress.clock, progress.version + 1, {**progress.told, **told})


def _refuse_difference(
    shard: ServerShard, before: ShardDigests, after: ShardDigests, batch: int
) -> None:
    """The same step, made again or on a copy, has the same bits, unless one was corrupted."""
    pairs = zip(shard.noted(), before.digests, after.digests, strict=False)
    if names := [name for name, old, new in pairs if old != new]:
        raise CorruptState(
            f"The shard of server {shard.number} and what another process made of the same steps "
            f"differ after batch {batch + 1}, in {list_names(names)}. They hold the same bits, so "
            "one of them was corrupted, and which cannot be told. It was not saved; resume from "
            "the newest checkpoint with --resume."
        )


class ShardReplica:
    """The shard of another server, stepped as that one does."""

    def __init__(self, shard: ServerShard, clock: Clock):
        self.shard, self.progress = shard, ServerProgress(clock, 0, {})

    def redo(self, frames: Sequence[memoryview]) -> None:
        header, *tensors = frames
        self.progress = replay(header, tensors, self.shard, self.progress)

    def snapshot(self) -> list[bytes | Tensor]:
        header, frames = snapshot_record(self.shard, self.progress)
        return [header, *frames]
