"""Parameter servers: gradients are pushed to them, they step, and parameters are pulled.

Each server holds a part of the parameters and the optimizer's state of it; a worker holds neither
that state nor the sums. A bucket leaves as soon as it is full. With bound 0 servers add up the
pieces of all workers in the tree's order and step once, so that the result is that of data
parallel, bit for bit. With a bound, or none, each worker's pieces are a step of their own, with a
learning rate that is their share of the batch; a worker goes on while it is at most so many batches
ahead, and all meet only where the whole state is wanted: at a save, an evaluation, the end.

When to use it: workers of unlike speed, or optimizer state that does not fit beside the model. When
not: like workers on a fast link, where an all-reduce moves no more and needs no servers.
Cost: the gradients' bytes out and the parameters' in, per worker and step.

Li et al. 2014, "Scaling distributed machine learning with the parameter server"; Ho et al. 2013.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from torch import Tensor, nn

from shoal.comm.buckets import Bucket, Buckets
from shoal.comm.mesh import Mesh
from shoal.comm.shared_memory import NotShared
from shoal.comm.tree import Block, PieceSum
from shoal.comm.wire import tensor_of
from shoal.data.split import share
from shoal.errors import GroupLost
from shoal.numerics.norms import norm_of_blocks
from shoal.parallel.layout import WHOLE, Holding, Slice, slices_of
from shoal.sync.replicas import Merged
from shoal.sync.rounds import Around
from shoal.sync.server.arriving import Pulling
from shoal.sync.server.clock import Staleness
from shoal.sync.server.halting import Halting
from shoal.sync.server.host import Upward, way_of
from shoal.sync.server.line import Line, Question, Questions
from shoal.sync.server.lookups import Lookups
from shoal.sync.server.meeting import hold
from shoal.sync.server.memory import Memory, Pushed
from shoal.sync.server.messages import Apply, Hello, Pull, Sum, Values, Welcome
from shoal.sync.server.moving import layout_after
from shoal.sync.server.packing import BYTES, Packing, is_packed
from shoal.sync.server.shard import Changed, trained
from shoal.sync.server.state import ServedState
from shoal.sync.state import HeldState, Source, State
from shoal.sync.strategy import Agreed, Tally

SMALL_BYTES = 1 << 16  # of rows that may leave later, with others


class ThroughServers:
    """`meets_after` says after which steps all workers wait for one another."""

    streams = True  # whether a step may be over while parameters are on their way

    def __init__(
        self,
        num_pieces: int,
        bound: int | None,
        *,
        checks: bool = False,
        codec: str = "none",
        damps: bool = False,
        hosts: int = 1,
        rates: Sequence[float] = (),
        meets_after: Callable[[int], bool] = lambda step: True,
    ):
        self.num_pieces, self.bound, self.checks = num_pieces, bound, checks
        self.in_lockstep, self.halting = bound == 0, Halting(meets_after)
        self._damps, self._hosts, self._rates = damps, hosts, rates
        self._packing = None if codec == "none" else Packing(codec, checks)
        self.batch, self._attempt, self._finite, self.begins_at = 0, 0, True, 0
        self.late_mark: int | None = None
        self.staleness = Staleness()  # of the batches that were begun
        self._memory: Memory | None = None
        self._counts: list[float] = []  # of pieces that do not all count alike
        self._versions: list[int] = []  # of the parameters at hand, by server
        self._changed: Changed | None = None
        # Parameters; to meet after the step under way; a newcomer, for the batch of its seat.
        self._is_torn = self._is_asked = self._is_early = False
        self._attached = ExitStack()  # what is to be closed
        self.trace: tuple[list[int], ...] = ()  # versions: pulled, made by the step, pulled next

    def attach(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mesh: Mesh,
        holding: Holding = WHOLE,
    ) -> None:
        assert mesh.servers is not None
        self.halting.join_group()
        self._attempt, self.mesh, self.group, self.holding = 0, mesh, mesh.data, holding
        self.own = share(self.group.rank, self.group.num_ranks, self.num_pieces)
        num_pieces = self.num_pieces if self.in_lockstep else len(self.own)
        self.held = hold(model, optimizer, mesh, holding, num_pieces, self.in_lockstep)
        self._changed = self._changed or Changed(optimizer)
        self.rounds, self.buffers = self.held.rounds, self.held.rounds.buffers
        self._attached.callback(self.buffers.restore)
        self.named = trained(model)
        self.parameters = [p for _, p in self.named]
        self.gradient_sum = PieceSum(self.rounds.own)
        self._way = way_of(mesh.servers, self.group, self.num_pieces, self._hosts)
        # Of pieces that are counted from zero, and in a host from its first one.
        first = self.own.start - self.rounds.own.start - self._way.pieces.start
        self.blocks = [Block(b.first + first, b.num_pieces) for b in self.gradient_sum.blocks]
        layout = layout_after(model, optimizer, self._way.counts(mesh.sizes))
        self.layout = layout if self._hosts == 1 else layout.on_one()
        self._segments = [self.layout.segments(key) for key in range(len(self.layout.keys))]
        self.line = state_line = Line(self._way.near, self.group.rank)
        self._attached.callback(self.line.close)
        self._questions = Questions(self.line, self._push)
        if self._hosts > 1:  # a host's own server holds no state
            state_line = Upward(layout, self._way).line
            self._attached.callback(state_line.close)
        self._served = ServedState(model, layout, state_line, self.group)
        if len(self._versions) != len(self.line):  # all have made the same updates when all met
            self._versions = [max(self._versions, default=0)] * len(self.line)
        welcomes = self._greet()
        assert self._memory is not None
        buckets = self._memory.buckets(self.parameters)
        self.buckets = Buckets(self.parameters, buckets, len(self.blocks), self._push_bucket)
        self._attached.callback(self.buckets.close)
        self.lookups = Lookups(model, self.line, len(self.layout.keys), self.rounds.own, welcomes)
        self.lookups.batch = self.batch
        self._attached.callback(self.lookups.close)
        self._around = Around(self.rounds, self._end_round)
        self._pulling = Pulling(model, self.layout, self.line, self._memory)
        if self._is_torn:  # the step is committed, and servers have it
            self._pull(self.batch, meets=False)

    def detach(self) -> None:
        self._is_torn |= hasattr(self, "_pulling") and not self._pulling.is_over
        self._attached.close()
        if self._memory is not None:
            self._memory.take_back()  # the server may be gone, or step from here again

    def microbatch(self, first: bool, last: bool) -> AbstractContextManager[object]:
        if first:
            self.await_turn()
            self._attempt += 1
            self.line.forget()
            for p in self.parameters:
                p.grad = None
            self.gradient_sum.begin()
            self.buffers.begin()
            self.buckets.begin()
            self.lookups.begin()
        if last:
            self.buckets.arm(self.gradient_sum)
        self._around.last = last
        return self._around if self._pulling.is_over else self._pulling.around(self._around)

    def settle(self) -> None:
        """Wait until all parameters of the last step are here: before anybody looks at them."""
        self.await_turn()
        self._pulling.settle()

    def await_turn(self) -> None:
        """As a newcomer, wait until the batch of its seat may be begun, or all are there."""
        if self._is_early:
            self._pull(self.batch, self.halting.meets_after(self.batch))

    def exchange(self, tally: Tally, want_norm: bool) -> Agreed:
        self.settle()  # without a piece nobody has waited for them
        if self.blocks:
            self.buckets.send_rest()
            for key in self.lookups.keys:
                self._push(key)
            self.line.flush(SMALL_BYTES)  # what is small goes with the question
        pieces = self._all_pieces if self.in_lockstep else self.own
        # What nobody looks at need not be told: servers wait for all rows before they step.
        asked = self._ask_sums(pieces, want_norm) if want_norm or self.checks else []
        if self.in_lockstep:
            agreed, _ = self.rounds.agree(tally, self.buckets.touched)
        else:
            agreed = self._agree_alone(tally)
        self._is_asked = any(agreed.asked)
        norms = [tensor_of(f, torch.float32, len(f) // 4) for f in self._read_sums(asked)]
        if not want_norm:
            return agreed
        return agreed._replace(norm=norm_of_blocks(torch.cat(norms)))

    def update(self, scale: float, check: bool = True) -> bool:
        if check and not self._finite:
            self.buffers.restore()
            return False
        assert self._changed is not None
        pieces = self._all_pieces if self.in_lockstep else self.own
        part = 1.0 if self.in_lockstep else len(pieces) / self.num_pieces
        meets = self.halting.meets_after(self.batch + 1)
        rate = self._rates[self.group.rank] if self._rates else 1.0
        what = {
            **self._which(pieces),
            "scale": scale,
            "factor": rate * part,
            "settings": self._changed.of(self.held.optimizer),
            "counts": self._counts,
            "meets": meets,
        }
        asked = [
            self._questions.ask(server, Apply, **what, pulled=version if self._damps else None)
            for server, version in enumerate(self._versions)
        ]
        pulled = self._versions
        values = self._take(asked, at_once=not self.streams or self._is_asked or meets)
        self.staleness.add(self.batch + 1 - values[0].committed)
        self.trace = pulled, [own.made for own in values], self._versions
        self._come_to(self.batch + 1)
        self.buffers.commit()
        self.mesh.world.bytes_sent += self.line.take_bytes()
        return True

    def gradients(self) -> dict[str, list[Slice]]:
        return self._served.fetch(gradients=True).tensors

    def state_dict(self, served: bool = True) -> State:
        """What servers hold is fetched by the ranks in turn; what they do not, all ranks hold."""
        (self.settle if served else self._pulling.settle)()
        # A newcomer needs the settings that hooks have changed: it sends them with its steps.
        settings = HeldState({}, self.held.optimizer, {})
        state = self._served.fetch() if served else settings.state_dict()
        if served and not self.in_lockstep and self.group.rank:
            return state  # workers differ in their buffers: those of rank 0 are kept
        for name, tensor in self._served.others() if served else self._all_held():
            state.tensors[f"model.{name}"] = slices_of(name, tensor, self.holding)
        return state

    @torch.no_grad()
    def load_state_dict(self, source: Source, step: int, served: bool = True) -> None:
        """The ranks in turn send the servers what is theirs; then all pull it."""
        assert self._memory is not None
        self._pulling.settle()
        self._memory.take_back()
        source = Merged(source)
        # Of a checkpoint one rank may read what is damaged, and another what is not.
        with self.group.all_or_none() if served else nullcontext():
            if source.plain:  # else its own weights come from elsewhere, and no server's through it
                HeldState({}, self.held.optimizer, {}).load_groups(source)
            for name, tensor in self._served.others() if served else self._all_held():
                source.fill(f"model.{name}", slices_of(name, tensor, self.holding))
            if served:
                self._served.send(source, step)
        self._come_to(step)
        if served:
            self._way.tell(self.line, self.group, step)
        if served or not self.in_lockstep:  # in lockstep a peer's parameters are those of now
            self._pull(step, meets=served, waits=served)
        self.buffers.hold()

    def tables(self, dense: bool) -> dict[str, list[Slice]]:
        """This rank's share of the tables. Every rank must call it."""
        names = self.lookups.names
        return self._served.fetch(tables=True, dense=dense).tensors if names else {}

    def kinds(self) -> State:
        """The names and types of what servers hold for this rank, without a value."""
        return self._served.kinds()

    def _come_to(self, batch: int) -> None:
        self.batch, self._attempt = batch, 0
        self.lookups.batch = batch

    def _greet(self) -> list[Welcome]:
        num_rows, memory = len(self.blocks), self._memory
        if memory is None or (memory.num_rows, memory.layout) != (num_rows, self.layout):
            memory = self._memory = Memory(self.layout, num_rows, self.held.model)
        hello = {
            "seat": self._way.seat,
            "batch": self.batch,
            "halt": self.halting.told,
            "secret": self.line.servers.secret,
            "layout": self.layout.digest,
            "num_rows": num_rows,
            "rows": memory.place,
        }
        asked = [
            self._questions.ask(server, Hello, **hello, version=version)
            for server, version in enumerate(self._versions)
        ]
        welcomes = [welcome for welcome, _ in self._questions.answers(asked)]
        try:
            memory.open(welcomes)
        except NotShared as error:  # it died in between
            raise GroupLost(f"a server is gone: {error}") from error
        self.line.come_near([welcome.door for welcome in welcomes])
        self.begins_at = self._where_to_begin(welcomes)
        return welcomes

    @property
    def _all_pieces(self) -> range:
        """Those that are stepped on together in lockstep, as whoever takes them counts them."""
        return range(len(self._way.pieces))

    def _where_to_begin(self, welcomes: list[Welcome]) -> int:
        """The first batch of which not all servers have this seat's pieces."""
        if self.in_lockstep:
            return max(welcome.committed for welcome in welcomes)
        return min(welcome.next_batch for welcome in welcomes)

    def _agree_alone(self, tally: Tally) -> Agreed:
        self.halting.ask(self.line, self.batch, tally.asked)
        return self.rounds.agree_alone(tally)._replace(
            busy_s=[tally.busy_s] * self.group.num_ranks,
            asked=self.halting.asked_after(self.batch + 1),
            mark=None,
            num_samples=None,
        )

    def _end_round(self, last: bool) -> None:
        self.lookups.end_piece()
        if not last:
            self.gradient_sum.push([p.grad for p in self.parameters])
            for p in self.parameters:
                p.grad = None

    def _push_bucket(self, bucket: Bucket) -> Pushed:
        if self._packing is not None:
            self._packing.round(bucket.rows)
        for key in self.layout.of_shelf(len(self.buckets.sent)):
            self._push(key)
        if sum(row.nbytes for row in bucket.rows) > SMALL_BYTES:
            self.line.flush()  # so that servers add up while backward goes on
        return Pushed()

    def _push(self, key: int) -> None:
        if key in self.lookups.keys:
            self.lookups.push(key, self.batch, self._attempt, self.blocks)
            return
        assert self._memory is not None
        server, own = self.layout.holders[key], self.layout.keys[key]
        rows = [row[own.start : own.stop] for row in self.buckets.buckets[own.shelf].rows]
        is_shared = self._memory.shares_with(server)
        packing = self._packing if is_packed(own.itemsize) else None
        if packing is not None and not is_shared:
            rows = [packing.pack(row) for row in rows]
        self.line.leave(
            server,
            () if is_shared else rows,
            batch=self.batch,
            attempt=self._attempt,
            key=key,
            blocks=self.blocks,
            touched=[self.buckets.touched[s.parameter] for s in self._segments[key]],
            is_shared=is_shared,
            codec="none" if packing is None or is_shared else packing.name,
        )
        if not is_shared and own.num_bytes > SMALL_BYTES:
            self.line.flush()  # the next one is made ready while this one travels
        if is_shared:  # as if it had been sent
            num_bytes = own.num_bytes if packing is None else (own.stop - own.start) * BYTES
            self.line.num_bytes += num_bytes * len(rows)

    def _which(self, pieces: range) -> dict[str, int]:
        return {
            "batch": self.batch,
            "attempt": self._attempt,
            "first": pieces.start,
            "last": pieces.stop,
        }

    def _ask_sums(self, pieces: range, want_norm: bool) -> list[Question]:
        return self._questions.ask_all(
            Sum, **self._which(pieces), want_norms=want_norm, want_finite=self.checks
        )

    def _read_sums(self, asked: list[Question]) -> Iterator[memoryview]:
        """Wait until every server has all rows, which is the vote; the norms that they found."""
        self._finite = True
        for summed, frames in self._questions.answers(asked):
            self._finite &= summed.finite
            yield from frames

    def _pull(self, batch: int, meets: bool, waits: bool = True) -> None:
        """Take the parameters for a batch, as soon as it may be begun. A newcomer takes those of
        now: its seat may be ahead of the others, who wait for it."""
        asked = self._questions.ask_all(Pull, batch=batch, meets=meets, waits=waits)
        values = self._take(asked, at_once=True)
        self._is_early = not waits
        if waits:
            self.staleness.add(batch - values[0].committed)

    def _take(self, asked: list[Question], at_once: bool) -> list[Values]:
        """What servers answer who were asked for parameters, which are the model's from then on."""
        answers = self._questions.answers(asked)
        self._pulling.take(answers, at_once)
        self._is_torn = False
        self._versions = [values.version for values, _ in answers]
        self.halting.told = answers[0][0].halt
        return [values for values, _ in answers]

    def _all_held(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.held.model.named_parameters()
        yield from self.held.model.named_buffers()
