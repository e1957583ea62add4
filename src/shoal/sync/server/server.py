"""A parameter server: takes in rows of gradients, steps on their sums, hands parameters out.

With bound 0 a sum is over all pieces of a batch, in the order of the tree (`comm/tree.py`), so that
training through servers has the bits of training without; otherwise each worker's pieces are a step
of their own. How it is with workers: `core.py`.
"""

import math
from collections.abc import Sequence

import msgspec
from torch import Tensor

from shoal.faults import faultpoint
from shoal.numerics.norms import values_of
from shoal.sync.server.clock import Clock
from shoal.sync.server.core import ServerCore
from shoal.sync.server.journal import Journal
from shoal.sync.server.messages import Apply, DumpState, LoadState, Sum
from shoal.sync.server.records import (
    JournalRecord,
    ServerProgress,
    SumSummary,
    UpdateLog,
    replay,
    snapshot_record,
    update_record,
)
from shoal.sync.server.session import WorkerSession
from shoal.sync.server.shard import ServerShard
from shoal.sync.state import ShardedState, StateSource, unpack_state
from shoal.sync.state_chunks import SpillFile


class Server(ServerCore):
    def __init__(
        self,
        shard: ServerShard,
        *,
        num_seats: int,
        num_pieces: int,
        bound: int | None,
        secret: str,
        rule: str = "mean",
        journal: Journal | None = None,
    ):
        """With a journal, continue where a predecessor died."""
        super().__init__(
            shard, num_seats=num_seats, num_pieces=num_pieces, bound=bound, secret=secret, rule=rule
        )
        self.shard = shard
        self.journal: UpdateLog | None = journal
        self._incoming = SpillFile()  # a state that is loaded
        for header, frames in journal.read() if journal is not None else ():
            self.redo(header, frames)
        self.begin(-1)

    def redo(self, header: bytes | memoryview, frames: Sequence[bytes | memoryview]) -> None:
        """Do what a predecessor wrote down."""
        progress = ServerProgress(self.clock, self.version, self._summaries)
        self.clock, self.version, told = replay(header, frames, self.shard, progress)
        self._summaries, self._begun = dict(told), self.clock.committed

    def snapshot(self) -> JournalRecord:
        """All that a successor needs to know."""
        return snapshot_record(
            self.shard, ServerProgress(self.clock, self.version, self._summaries)
        )

    def _damped(self, apply: Apply) -> Apply:
        """An update made of old parameters counts less: by one more for each batch since then.

        Zhang et al. 2016, arXiv 1511.05950.
        """
        if apply.pulled is None:
            return apply
        num_batches = (self.version - apply.pulled) / self.num_seats
        return msgspec.structs.replace(apply, factor=apply.factor / (1 + max(0.0, num_batches)))

    def _check_apply(self, apply: Apply) -> None:
        if not math.isfinite(apply.scale) or not 0 < apply.factor < math.inf:
            raise ValueError(
                f"scale {apply.scale} and factor {apply.factor} cannot be stepped with"
            )
        self.shard.check_settings(apply.settings)

    def _apply(self, session: WorkerSession, apply: Apply, pieces: range) -> None:
        apply = self._damped(apply)
        faultpoint("server.apply", apply.batch)
        sums, touched = self._sums(apply, pieces)
        if self.journal is not None and self.journal.is_long:
            # Of before the step, so that the last record is always a step: rows of tables as they
            # were before it can be asked for.
            self.journal.begin(*self.snapshot())
        try:
            checked = self.shard.apply(sums, touched, apply.scale, apply.factor, apply.settings)
        except ValueError as error:  # half a step cannot be continued
            raise RuntimeError(f"The optimizer's step failed: {error}") from error
        self.clock.apply(apply.batch, pieces)
        session.made = self.version
        self.version += 1
        faultpoint("server.unwritten", apply.batch)
        if self.journal is not None:
            # Before it is answered: an update that a worker knows of outlives this process.
            told = [one for one in self._summaries.values() if one.batch == apply.batch]
            record = update_record(apply, sums, touched, told, self.shard.tables, checked)
            self.journal.append(*record)
        faultpoint("server.applied", apply.batch)
        self._rows.forget(apply.batch, pieces, self.clock.committed)

    def _sums(self, apply: Apply, pieces: range) -> tuple[dict[int, Tensor], dict[int, list[bool]]]:
        """What is stepped on of some pieces, by key, and the parameters that it is of."""
        batch = apply.batch
        return self._rows.sums(batch, pieces), self._rows.touched(batch, pieces)

    def _summarize(self, sum_: Sum, pieces: range) -> SumSummary:
        norms, finite = b"", True
        if sum_.want_norms or sum_.want_finite:
            sums = self._rows.sums(sum_.batch, pieces)
            norms = self.shard.norms(sums).numpy().tobytes()
            finite = all(bool(values_of(total).isfinite().all()) for total in sums.values())
        return SumSummary(sum_.batch, sum_.first, finite, norms, sum_.attempt)

    def _dump(self, dump: DumpState) -> ShardedState:
        return self.shard.dump(dump)

    def _load(self, load: LoadState, payload: Sequence[memoryview]) -> None:
        clock = Clock(self.num_pieces, self.bound, load.step)
        if load.begins:
            self._incoming = SpillFile()
        try:
            self._incoming.add(unpack_state(payload))
        except Exception as error:  # it may be wrong in any way, or the disk full
            raise ValueError(f"a state came that cannot be taken in: {error}") from error
        if load.ends:
            state, self._incoming = self._incoming.state(), SpillFile()
            self.shard.take_over(state)
            self._resume(clock, self.version + 1)

    def resume_from(self, source: StateSource, step: int, version: int) -> None:
        """Hold the state after a step, which is of so many updates."""
        self.shard.load_state_dict(source)
        self._resume(Clock(self.num_pieces, self.bound, step), version)

    def _resume(self, clock: Clock, version: int) -> None:
        self.clock, self.version = clock, version
        self._rows.clear()
        self._begun, self._summaries = clock.committed, {}
        if self.journal is not None:
            self.journal.begin(*self.snapshot())
