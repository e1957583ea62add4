"""What a server writes into its journal, and how a successor does it again.

A record is a small header with tensors beside it: an update with the sums that were stepped on, or
a snapshot of everything. Doing updates again gives the bits that the dead server had, since the
optimizer sees what it saw then.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
from torch import Tensor

from shoal.comm.wire import tensor_of
from shoal.sync.guard import CorruptState, some_of
from shoal.sync.server.clock import Clock, ClockRecord
from shoal.sync.server.messages import Apply
from shoal.sync.server.shard import Checked, Shard
from shoal.sync.server.tables import Tables
from shoal.sync.state import Given, pack_state, unpack_state

Record = tuple[bytes, Sequence[bytes | Tensor]]


class Told(msgspec.Struct, frozen=True):
    """What is said of the sums of some pieces, also to who asks when they are applied."""

    batch: int
    first: int
    finite: bool
    norms: bytes
    attempt: int = -1  # of the present generation


class Diary(Protocol):
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


class Past(NamedTuple):
    """What a server has done, beside the state that it made."""

    clock: Clock
    version: int  # updates made, and states taken over from workers
    told: Mapping[int, Told]  # the last, by first piece


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
    checked: Checked | None = None  # of the state after it


class _Snapshot(msgspec.Struct, frozen=True, tag="snapshot"):
    """The whole state, in frames."""

    clock: ClockRecord
    version: int
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
    checked: Checked | None = None,
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
        checked,
    )
    dense = [sum_ for sum_ in sums.values() if not sum_.is_sparse]
    return msgspec.msgpack.encode(update), [*dense, *tables.frames_of(sums)]


def snapshot_record(shard: Shard, past: Past) -> Record:
    snapshot = _Snapshot(past.clock.to_plain(), past.version, list(past.told.values()))
    state = shard.state_dict()
    state.tensors.update(shard.tables.before_state())
    return msgspec.msgpack.encode(snapshot), pack_state(state)


def redo(
    header: bytes | memoryview, frames: Sequence[bytes | memoryview], shard: Shard, past: Past
) -> Past:
    """Do once more what a record tells of."""
    record = _RECORDS.decode(header)
    told = {one.first: one for one in record.told}
    if isinstance(record, _Snapshot):
        state = unpack_state([memoryview(frame) for frame in frames])
        shard.load_state_dict(Given(state))
        shard.tables.recall(state.tensors)
        return Past(Clock.from_plain(record.clock), record.version, told)
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
        _refuse_other(shard, before, after, record.batch)
    past.clock.apply(record.batch, range(record.first, record.last))
    return Past(past.clock, past.version + 1, {**past.told, **told})


def _refuse_other(shard: Shard, before: Checked, after: Checked, batch: int) -> None:
    """The same step, made again or on a copy, has the same bits, unless one was corrupted."""
    pairs = zip(shard.noted(), before.digests, after.digests, strict=False)
    if names := [name for name, old, new in pairs if old != new]:
        raise CorruptState(
            f"The shard of server {shard.number} and what another process made of the same steps "
            f"differ after batch {batch + 1}, in {some_of(names)}. They hold the same bits, so one "
            "of them was corrupted, and which cannot be told. It was not saved; go on from the "
            "newest checkpoint with --resume."
        )


class Copied:
    """The shard of another server, stepped as that one does."""

    def __init__(self, shard: Shard, clock: Clock):
        self.shard, self.past = shard, Past(clock, 0, {})

    def redo(self, frames: Sequence[memoryview]) -> None:
        header, *tensors = frames
        self.past = redo(header, tensors, self.shard, self.past)

    def snapshot(self) -> list[bytes | Tensor]:
        header, frames = snapshot_record(self.shard, self.past)
        return [header, *frames]
