"""Parameter servers: gradients are pushed to them, they step, and parameters are pulled.

Each server holds a part of the parameters and the optimizer's state of it; a worker holds neither
that state nor the sums. A bucket leaves as soon as it is full. With bound 0 servers add up the
pieces of all workers in the tree's order and step once, so that the result is that of data
parallel, bit for bit. With a bound, or none, each worker's pieces are a step of their own, with a
learning rate that is their share of the batch; a worker continues while it is at most so many
batches ahead, and all meet only where the whole state is wanted: at a save, an evaluation, the end.

A worker is a replica, which may be a mesh of ranks: each stage and each part of a matrix has
servers of its own. Ranks that hold the same add up their gradients; the first pushes the sum, and
hands what it pulls to the others (`parts.py`). All ranks of a replica meet after the same steps.

When to use it: workers of unlike speed, or optimizer state that does not fit beside the model. When
not: like workers on a fast link, where an all-reduce moves no more and needs no servers.
Cost: the gradients' bytes out and the parameters' in, per worker and step.

Li et al. 2014, "Scaling distributed machine learning with the parameter server"; Ho et al. 2013.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple

import torch
from torch import nn

from shoal.comm.buckets import GradientBucket, GradientBuckets
from shoal.comm.collectives import Group
from shoal.comm.mesh import Mesh, RankRequests
from shoal.comm.reduce import Reduction, TreeReduce
from shoal.comm.shared_memory import NotShared
from shoal.comm.tree import Block, PieceSum
from shoal.comm.wire import tensor_of
from shoal.data.split import share
from shoal.errors import GroupLost
from shoal.numerics.norms import norm_of_blocks
from shoal.parallel.layout import WHOLE, LocalLayout, Slice, slices_of
from shoal.sync.costs import StepCosts
from shoal.sync.rank_layout import RankLayout
from shoal.sync.replicas import MergedReplicas
from shoal.sync.rounds import AttachedModel, RoundContext, blocks_by_rank
from shoal.sync.server.aggregator import AggregatorClient, worker_route
from shoal.sync.server.client import RequestSender, SentRequest, ServerClient
from shoal.sync.server.clock import Staleness
from shoal.sync.server.halt_schedule import HaltSchedule
from shoal.sync.server.layout import ServerLayout
from shoal.sync.server.lazy_pull import LazyPull
from shoal.sync.server.lookups import WorkerLookups
from shoal.sync.server.messages import (
    Apply,
    Pull,
    PulledParameters,
    ServerWelcome,
    Sum,
    WorkerHello,
)
from shoal.sync.server.migration import layout_after
from shoal.sync.server.packing import GradientPacker
from shoal.sync.server.parts import line_of, spread
from shoal.sync.server.served_state import ServedState, all_held, load_held, unserved_tensors
from shoal.sync.server.shard import ChangedSettings, served_parameters
from shoal.sync.server.worker_costs import worker_costs
from shoal.sync.server.worker_memory import PushedBucket, WorkerMemory
from shoal.sync.server.worker_mesh import (
    ServedNorm,
    SharedByParts,
    buckets_of_layout,
    finish_sums,
    first_of,
)
from shoal.sync.state import ShardedState, StateSource, TrainState
from shoal.sync.strategy import GlobalStep, LocalStep, ServerLink

SMALL_BYTES = 1 << 16  # of rows that may leave later, with others


class WorkerOptions(NamedTuple):
    """How a worker trains through servers, beside how far it may be ahead."""

    checks: bool = False  # whether servers look for gradients that are not finite
    packing: GradientPacker | None = None
    damps: bool = False  # whether stale gradients count less
    hosts: int = 1  # above 1, each has a server of its own that adds up its workers' gradients
    rates: Sequence[float] = ()  # factors of the learning rate, by worker; none if all are 1
    # After which steps all workers wait for one another.
    meets_after: Callable[[int], bool] = lambda step: True
    round_size: int = 1  # pieces that are in a pipeline together


_DEFAULTS = WorkerOptions()


class ServerStrategy:
    streams = True  # whether a step may be over while parameters are on their way
    hold_parameters = True
    late_mark: int | None = None

    def __init__(self, num_pieces: int, bound: int | None, options: WorkerOptions = _DEFAULTS):
        self.num_pieces, self.bound, self.options = num_pieces, bound, options
        self.num_rounds = num_pieces // options.round_size  # the pieces that servers count
        self.in_lockstep, self.halts = bound == 0, HaltSchedule(options.meets_after)
        self._packing = options.packing
        self.batch, self._attempt, self._finite = 0, 0, True
        self._welcomes: list[ServerWelcome] = []  # of the servers of this group
        self.staleness = Staleness()  # of the batches that were begun
        self._memory: WorkerMemory | None = None
        self._seat_batch = 0  # that servers want of this seat
        self._counts: list[float] = []  # of pieces that do not all count alike
        self._versions: list[int] = []  # of the parameters at hand, by server
        self._settings: ChangedSettings | None = None
        self._shared: SharedByParts | None = None
        # Parameters; to meet after the step under way; a newcomer, for the batch of its seat.
        self._is_mixed = self._is_asked = self._is_early = False
        self._cleanup = ExitStack()  # what `detach` closes
        self.trace: tuple[list[int], ...] = ()  # versions: pulled, made by the step, pulled next

    def attach(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mesh: Mesh,
        holding: LocalLayout = WHOLE,
    ) -> None:
        self.halts.join_group()
        self._attempt, self.mesh, self.holding = 0, mesh, holding
        self._line = line_of(mesh)
        self.group, self._alike = mesh.peers, mesh.own.data
        self._is_mesh = mesh.own.num_ranks > 1  # whose parts have servers of their own
        self.own = share(self.group.rank, self.group.num_ranks, self.num_rounds)
        rounds = self.num_rounds if self.in_lockstep else len(self.own)
        self.attached = AttachedModel(
            model,
            optimizer,
            mesh if self.in_lockstep else mesh.own,
            holding,
            rounds * self.options.round_size,
            self.options.round_size,
        )
        self._settings = self._settings or ChangedSettings(optimizer)
        self.rounds, self.buffers = self.attached.rounds, self.attached.rounds.buffers
        self._cleanup.callback(self.buffers.restore)
        self.named = served_parameters(model)
        self.parameters = [p for _, p in self.named]
        self.gradient_sum = PieceSum(self.rounds.own)
        assert self._line.servers is not None
        self._route = worker_route(
            self._line.servers, self.group, self.num_rounds, self.options.hosts
        )
        self.blocks = self._own_blocks()
        layout = layout_after(model, optimizer, self._route.counts(self._line.sizes))
        self.layout = layout if self.options.hosts == 1 else layout.on_one_server()
        self._segments = [self.layout.segments(key) for key in range(len(self.layout.keys))]
        if self._speaks:
            self._join_servers(model, layout)
        self._seat_batch = first_of(self._alike, self._seat_batch)
        self._attach_buckets()
        self._around = RoundContext(self.rounds, self._end_round)
        if self._is_mesh:
            self._norm = ServedNorm(mesh.own.world, self.named, holding, self._speaks)
        if self._is_mesh and not self.in_lockstep:
            self._shared = SharedByParts(mesh.own, holding, self.named)
        if self._is_mixed:  # the step is committed, and servers have it
            self._pull(self.batch, meets=False)

    @property
    def _speaks(self) -> bool:
        """Whether this rank speaks with servers: the first of those that hold the same."""
        return self._alike.rank == 0

    def _own_blocks(self) -> list[Block]:
        """Of pieces that are counted from zero, and in a host from its first one."""
        if self._alike.num_ranks > 1:  # a subtree, as the plan's rules say
            return [Block(self.own.start, len(self.own))]
        first = self.own.start - self.rounds.own.start - self._route.pieces.start
        return [Block(b.first + first, b.num_pieces) for b in self.gradient_sum.blocks]

    def _join_servers(self, model: nn.Module, layout: ServerLayout) -> None:
        self.client = state_client = ServerClient(self._route.local_servers, self.group.rank)
        self._cleanup.callback(self.client.close)
        self._requests = RequestSender(self.client, self._push)
        if self.options.hosts > 1:  # a host's own server holds no state
            state_client = AggregatorClient(layout, self._route).client
            self._cleanup.callback(state_client.close)
        self._served = ServedState(model, layout, state_client, self.group, self.holding)
        if len(self._versions) != len(self.client):  # all have made the same updates when all met
            self._versions = [max(self._versions, default=0)] * len(self.client)
        if self._packing is not None:
            place = self.group.rank, self.group.num_ranks
            self._packing.attach(self.layout, self.named, len(self.blocks), place)
        self._greet()
        assert self._memory is not None
        self.lookups = WorkerLookups(
            model, self.client, len(self.layout.keys), self.rounds.own, self._welcomes
        )
        self.lookups.batch = self.batch
        self._cleanup.callback(self.lookups.close)
        self._lazy_pull = LazyPull(model, self.layout, self.client, self._memory)
        if self.in_lockstep:
            self._seat_batch = max(welcome.committed for welcome in self._welcomes)
        else:
            self._seat_batch = min(welcome.next_batch for welcome in self._welcomes)

    def _attach_buckets(self) -> None:
        if self._memory is not None:
            buckets = self._memory.buckets(self.parameters)
        else:
            buckets = buckets_of_layout(self.layout, self.parameters)
        start: Callable[[GradientBucket], PushedBucket | Reduction] = self._push_bucket
        if self._alike.num_ranks > 1:
            count = self._alike.num_ranks
            self._tree = TreeReduce(self._alike, blocks_by_rank(len(self.own), count))
            start = self._start_sum
        self.buckets = GradientBuckets(self.parameters, buckets, len(self.blocks), start)
        self._cleanup.callback(self.buckets.close)

    def detach(self) -> None:
        self._is_mixed |= hasattr(self, "_lazy_pull") and not self._lazy_pull.is_complete
        self._cleanup.close()
        if self._memory is not None:
            self._memory.take_back()  # the server may be gone, or step from here again

    def microbatch(self, first: bool, last: bool) -> AbstractContextManager[object]:
        if first:
            self.wait_for_turn()
            self._attempt += 1
            for p in self.parameters:
                p.grad = None
            self.gradient_sum.begin()
            self.buffers.begin()
            self.buckets.begin()
            if self._speaks:
                self.client.drop_queued()
                self.lookups.begin()
            if self._packing is not None:
                self._packing.begin()
        if last:
            self.buckets.arm(
                self.gradient_sum, early=self.rounds.size == 1
            )  # else whole at its end
        self._around.last = last
        if self._speaks and not self._lazy_pull.is_complete:
            return self._lazy_pull.watch(self._around)
        return self._around

    def wait_for_parameters(self) -> None:
        """Wait until all parameters of the last step are here."""
        self.wait_for_turn()
        if self._speaks:
            self._lazy_pull.wait()

    def wait_for_turn(self) -> None:
        """As a newcomer, wait until the batch of its seat may be begun, or all are there."""
        if self._is_early:
            self._pull(self.batch, self.halts.meets_after(self.batch))

    def exchange(self, local: LocalStep, want_norm: bool) -> GlobalStep:
        self.wait_for_parameters()  # without a piece no forward has waited for them
        if self._alike.num_ranks > 1:  # what any of them touched, the first one pushes
            self.buckets.send_rest()
            agreed = self._agree(local)
            finish_sums(self.buckets)
            asked = self._push_rest(want_norm) if self._speaks else []
        else:
            asked = self._push_rest(want_norm)
            agreed = self._agree(local)
        self._is_asked = any(agreed.asked)
        norms = [tensor_of(f, torch.float32, len(f) // 4) for f in self._read_sums(asked)]
        if self._is_mesh and self.options.checks:  # servers of each part know of theirs alone
            self._finite = all(r[0] for r in self.mesh.own.world.all_gather_numbers([self._finite]))
        if not want_norm:
            return agreed
        if self._is_mesh:
            return agreed._replace(norm=self._norm.of(self.layout, norms))
        return agreed._replace(norm=norm_of_blocks(torch.cat(norms)))

    def _push_rest(self, want_norm: bool) -> list[SentRequest]:
        """Push what has not been, and ask of the sums."""
        if self.blocks:
            if self._alike.num_ranks == 1:
                self.buckets.send_rest()
            else:
                for number in range(len(self.buckets.buckets)):
                    self._push_keys(number)
            for key in self.lookups.keys:
                self._push(key)
            self.client.flush(SMALL_BYTES)  # what is small goes with the question
        pieces = self._all_pieces if self.in_lockstep else self.own
        # Else there is nothing to ask: servers wait for all rows before they step.
        return self._ask_sums(pieces, want_norm) if want_norm or self.options.checks else []

    def _agree(self, local: LocalStep) -> GlobalStep:
        if not self.in_lockstep:
            return self._agree_alone(local)
        agreed, self.buckets.touched = self.rounds.agree(local, self.buckets.touched)
        return agreed

    def update(self, scale: float, check: bool = True) -> bool:
        keeps = self._packing is not None and self._packing.codec.keeps_residual
        if (check or keeps) and not self._finite:
            self.buffers.restore()
            return False
        if self._speaks:
            self._apply(scale)
        self._spread()
        self._advance_to(self.batch + 1)
        if self._packing is not None:
            self._packing.commit()
        self.buffers.commit()
        if self._speaks:
            self.mesh.world.bytes_sent += self.client.take_bytes()
        return True

    def _apply(self, scale: float) -> None:
        """Let servers step, and take the parameters that they make of it."""
        assert self._settings is not None
        pieces = self._all_pieces if self.in_lockstep else self.own
        part = 1.0 if self.in_lockstep else len(pieces) / self.num_rounds
        meets = self.halts.meets_after(self.batch + 1)
        rates, damps = self.options.rates, self.options.damps
        rate = rates[self.group.rank] if rates else 1.0
        what = {
            **self._which(pieces),
            "scale": scale,
            "factor": rate * part,
            "settings": self._settings.of(self.attached.optimizer),
            "counts": self._counts,
            "meets": meets,
        }
        asked = [
            self._requests.ask(server, Apply, **what, pulled=version if damps else None)
            for server, version in enumerate(self._versions)
        ]
        pulled = self._versions
        streams = self.streams and not self._is_mesh
        values = self._take(asked, at_once=not streams or self._is_asked or meets)
        self.staleness.add(self.batch + 1 - values[0].committed)
        self.trace = pulled, [own.made for own in values], self._versions

    def gradients(self) -> dict[str, list[Slice]]:
        if not self._speaks:
            return {}
        return self._served.fetch(gradients=True).tensors

    @staticmethod
    def costs(layout: RankLayout) -> StepCosts:
        return worker_costs(layout)

    def state_dict(self) -> ShardedState:
        """What servers hold is fetched by the ranks in turn; what they do not, all ranks hold."""
        self.wait_for_parameters()
        state = self._served.fetch() if self._speaks else ShardedState({}, {})
        if self._speaks and self._packing is not None:
            own = self._packing.state()
            state.tensors.update(own.tensors)
            state.plain.update(own.plain)
        if not self.in_lockstep and self.group.rank:
            return state  # workers differ in their buffers: those of rank 0 are kept
        for name, tensor in unserved_tensors(self.attached.model):
            if parts := slices_of(name, tensor, self.holding):
                state.tensors[f"model.{name}"] = parts
        return state

    @torch.no_grad()
    def load_state_dict(self, source: StateSource, step: int) -> None:
        """The ranks in turn send the servers what is theirs; then all pull it."""
        source = self._begin_load(source)
        # Of a checkpoint one rank may read what is damaged, and another what is not.
        with self.group.raise_on_all():
            load_held(self.attached, source, unserved_tensors(self.attached.model))
            if self._speaks:
                self._served.send(source, step)
        if self._packing is not None:
            self._packing.load(source, step)
        self._advance_to(step)
        if self._speaks:
            self._route.announce_state(self.client, self.group, step)
        self._pull(step, meets=True)
        self.buffers.hold()

    def newcomer_step(self) -> int:
        """The first batch of which not all servers have this seat's pieces."""
        return self._seat_batch

    def newcomer_state(self) -> ShardedState:
        """Parameters and buffers; and the settings that hooks have changed, since a worker sends
        them with its steps."""
        if self._speaks:
            self._lazy_pull.wait()  # not for its turn: as a newcomer others wait for it
        state = TrainState({}, self.attached.optimizer, {}).state_dict()
        for name, tensor in all_held(self.attached.model):
            state.tensors[f"model.{name}"] = slices_of(name, tensor, self.holding)
        if self._packing is not None:
            state.plain.update(self._packing.plain)
        return state

    @torch.no_grad()
    def join(self, source: StateSource, step: int) -> None:
        """Servers have what is theirs already."""
        if self._packing is not None:
            self._packing.join(source, step)
        load_held(self.attached, self._begin_load(source), all_held(self.attached.model))
        self._advance_to(step)
        if not self.in_lockstep:  # in lockstep a peer's parameters are those of now
            self._pull(step, meets=False, waits=False)
        self.buffers.hold()

    @property
    def servers(self) -> ServerLink:
        return self

    @property
    def is_apart(self) -> bool:
        return not self.in_lockstep

    def requests(self) -> RankRequests:
        return self.halts.requests_after(self.batch)

    def summary(self) -> dict[str, Any]:
        return {"staleness": self.staleness.summary() if self.is_apart else None, "rounds": None}

    def tables(self, dense: bool) -> dict[str, list[Slice]]:
        """This rank's share of the tables. Every rank must call it."""
        if not self._speaks or not self.lookups.names:
            return {}
        return self._served.fetch(tables=True, dense=dense).tensors

    def types(self) -> ShardedState:
        """The names and types of what servers hold for this rank, without a value."""
        return self._served.types() if self._speaks else ShardedState({}, {})

    def _begin_load(self, source: StateSource) -> StateSource:
        """Hold the parameters here again, to write to them; the source as that of one replica."""
        if self._memory is not None:
            self._lazy_pull.wait()
            self._memory.take_back()
        return MergedReplicas(source)

    def _advance_to(self, batch: int) -> None:
        self.batch, self._attempt = batch, 0
        if self._speaks:
            self.lookups.batch = batch

    def _greet(self) -> None:
        num_rows, memory = len(self.blocks), self._memory
        if memory is None or (memory.num_rows, memory.layout) != (num_rows, self.layout):
            memory = self._memory = WorkerMemory(self.layout, num_rows, self.attached.model)
        hello = {
            "seat": self._route.seat,
            "batch": self.batch,
            "halt": self.halts.halt,
            "secret": self.client.servers.secret,
            "layout": self.layout.digest,
            "num_rows": num_rows,
            "rows": memory.place,
        }
        asked = [
            self._requests.ask(server, WorkerHello, **hello, version=version)
            for server, version in enumerate(self._versions)
        ]
        welcomes = [welcome for welcome, _ in self._requests.answers(asked)]
        try:
            memory.open(welcomes)
        except NotShared as error:  # it died in between
            raise GroupLost(f"a server is gone: {error}") from error
        self.client.connect_locally([welcome.listener for welcome in welcomes])
        self._welcomes = welcomes

    @property
    def _all_pieces(self) -> range:
        """Those that are stepped on together in lockstep, as the receiving server counts them."""
        return range(len(self._route.pieces))

    def _agree_alone(self, local: LocalStep) -> GlobalStep:
        """Without the other replicas."""
        if self._is_mesh:
            agreed, self.buckets.touched = self.rounds.agree(local, self.buckets.touched)
        else:
            agreed = self.rounds.agree_locally(local)
        return agreed._replace(
            busy_s=[local.busy_s] * self.mesh.num_ranks,
            asked=self.requests_of_all(self.mesh.own.world, self.batch, agreed.asked),
            mark=None,
            num_samples=None,
            digests=(),
        )

    def requests_of_all(self, world: Group, batch: int, asked: RankRequests) -> RankRequests:
        """Whether all stop or meet after this batch. Who is asked to lets a server name the one
        after which they do: of a replica its first rank, and the others hear of it. Every rank of a
        replica, which is this `world`, must call it."""
        if world.rank == 0:
            self.halts.ask(self.client, batch, asked)
        self.halts.hear(world)
        return self.halts.requests_after(batch + 1)

    def _end_round(self, last: bool) -> None:
        if self._speaks:
            self.lookups.end_piece()
        if not last:
            self.gradient_sum.push([p.grad for p in self.parameters])
            for p in self.parameters:
                p.grad = None

    def _start_sum(self, bucket: GradientBucket) -> Reduction:
        return self._tree.start(bucket.rows)

    def _push_bucket(self, _: GradientBucket) -> PushedBucket:
        self._push_keys(len(self.buckets.sent))
        return PushedBucket()

    def _push_keys(self, number: int) -> None:
        bucket = self.buckets.buckets[number]
        for key in self.layout.keys_of_buffer(number):
            if self._packing is not None:
                own = self.layout.keys[key]
                self._packing.pack(key, [row[own.start : own.stop] for row in bucket.rows])
            self._push(key)
        if sum(row.nbytes for row in bucket.rows) > SMALL_BYTES:
            self.client.flush()  # so that servers add up while backward runs

    def _push(self, key: int) -> None:
        if key in self.lookups.keys:
            self.lookups.push(key, self.batch, self._attempt, self.blocks)
            return
        assert self._memory is not None
        server, own = self.layout.holders[key], self.layout.keys[key]
        rows = [row[own.start : own.stop] for row in self.buckets.buckets[own.flat_buffer].rows]
        is_shared = self._memory.shares_with(server)
        packed = None if self._packing is None else self._packing.pushed.get(key)
        if packed is not None and not is_shared:
            rows = packed.rows
        late = [False] * len(self._segments[key]) if packed is None else packed.late
        self.client.queue_push(
            server,
            () if is_shared else rows,
            batch=self.batch,
            attempt=self._attempt,
            key=key,
            blocks=self.blocks,
            touched=[
                self.buckets.touched[s.parameter] or is_late
                for s, is_late in zip(self._segments[key], late, strict=True)
            ],
            is_shared=is_shared,
            codec="none" if packed is None or is_shared else packed.codec,
        )
        if not is_shared and own.num_bytes > SMALL_BYTES:
            self.client.flush()  # the next one is made ready while this one travels
        if is_shared:  # as if it had been sent
            sent = rows if packed is None else packed.rows
            self.client.num_bytes += sum(row.nbytes for row in sent)

    def _which(self, pieces: range) -> dict[str, int]:
        return {
            "batch": self.batch,
            "attempt": self._attempt,
            "first": pieces.start,
            "last": pieces.stop,
        }

    def _ask_sums(self, pieces: range, want_norm: bool) -> list[SentRequest]:
        return self._requests.ask_all(
            Sum, **self._which(pieces), want_norms=want_norm, want_finite=self.options.checks
        )

    def _read_sums(self, asked: list[SentRequest]) -> Iterator[memoryview]:
        """Wait until every server has all rows, which is the vote; the norms that they found."""
        self._finite = True
        for summed, frames in self._requests.answers(asked) if asked else ():
            self._finite &= summed.finite
            yield from frames

    def _pull(self, batch: int, meets: bool, waits: bool = True) -> None:
        """Take the parameters for a batch, as soon as it may be begun. A newcomer takes those of
        now: its seat may be ahead of the others, who wait for it."""
        if self._speaks:
            self._pull_own(batch, meets, waits)
        self._is_mixed, self._is_early = False, not waits
        self._spread()

    def _spread(self) -> None:
        spread(self._alike, self.parameters)
        if self._shared is not None:
            self._shared.spread()

    def _pull_own(self, batch: int, meets: bool, waits: bool) -> None:
        asked = self._requests.ask_all(Pull, batch=batch, meets=meets, waits=waits)
        values = self._take(asked, at_once=True)
        if waits:
            self.staleness.add(batch - values[0].committed)

    def _take(self, asked: list[SentRequest], at_once: bool) -> list[PulledParameters]:
        """What servers answer who were asked for parameters, which are the model's from then on."""
        answers = self._requests.answers(asked)
        self._lazy_pull.take(answers, at_once)
        self._is_mixed = False
        self._versions = [values.version for values, _ in answers]
        self.halts.halt = answers[0][0].halt
        return [values for values, _ in answers]
