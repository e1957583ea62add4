"""Parameter servers: gradients are pushed to them, they step, and parameters are pulled.

Each server holds a part of the parameters and the optimizer's state of it; a worker holds neither
that state nor the sums. A bucket leaves as soon as it is full. With bound 0 servers add up the
pieces of all workers in the tree's order and step once, so that the result is that of data
parallel, bit for bit. With a bound, or none, each worker's pieces are a step of their own, with a
learning rate that is their share of the batch; a worker continues while it is at most so many
batches ahead, and all meet only where the whole state is wanted: at a save, an evaluation, the end.

When to use it: workers of unlike speed, or optimizer state that does not fit beside the model. When
not: like workers on a fast link, where an all-reduce moves no more and needs no servers.
Cost: the gradients' bytes out and the parameters' in, per worker and step.

Li et al. 2014, "Scaling distributed machine learning with the parameter server"; Ho et al. 2013.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.comm.buckets import GradientBucket, GradientBuckets
from shoal.comm.collectives import Group
from shoal.comm.mesh import Mesh, RankRequests
from shoal.comm.shared_memory import NotShared
from shoal.comm.tree import Block, PieceSum
from shoal.comm.wire import tensor_of
from shoal.data.split import share
from shoal.errors import GroupLost
from shoal.numerics.norms import norm_of_blocks
from shoal.parallel.layout import WHOLE, LocalLayout, Slice, slices_of
from shoal.plans.keys import HALF_CODECS
from shoal.sync.costs import (
    SINGLE,
    Amount,
    MemoryUse,
    Message,
    StepCosts,
    added_up,
    buffers_held,
    changed_buffers,
    metadata_message,
    most_sums,
)
from shoal.sync.rank_layout import RankLayout
from shoal.sync.replicas import MergedReplicas
from shoal.sync.rounds import AttachedModel, RoundContext
from shoal.sync.server.aggregator import AggregatorClient, worker_route
from shoal.sync.server.client import RequestSender, SentRequest, ServerClient
from shoal.sync.server.clock import Staleness
from shoal.sync.server.costs import layout_on_servers, pushed_blocks
from shoal.sync.server.halt_schedule import HaltSchedule
from shoal.sync.server.lazy_pull import LazyPull
from shoal.sync.server.lookup_costs import sent_by_worker
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
from shoal.sync.server.packing import GradientPacker, is_packed, packed_bytes
from shoal.sync.server.parameter_views import parameter_addresses
from shoal.sync.server.served_state import ServedState
from shoal.sync.server.shard import ChangedSettings, served_parameters
from shoal.sync.server.worker_memory import PushedBucket, WorkerMemory
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


_DEFAULTS = WorkerOptions()


class ServerStrategy:
    streams = True  # whether a step may be over while parameters are on their way
    hold_parameters = True
    late_mark: int | None = None

    def __init__(self, num_pieces: int, bound: int | None, options: WorkerOptions = _DEFAULTS):
        self.num_pieces, self.bound, self.options = num_pieces, bound, options
        self.in_lockstep, self.halts = bound == 0, HaltSchedule(options.meets_after)
        self._packing = options.packing
        self.batch, self._attempt, self._finite = 0, 0, True
        self._welcomes: list[ServerWelcome] = []  # of the servers of this group
        self.staleness = Staleness()  # of the batches that were begun
        self._memory: WorkerMemory | None = None
        self._counts: list[float] = []  # of pieces that do not all count alike
        self._versions: list[int] = []  # of the parameters at hand, by server
        self._settings: ChangedSettings | None = None
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
        assert mesh.servers is not None
        self.halts.join_group()
        self._attempt, self.mesh, self.group, self.holding = 0, mesh, mesh.data, holding
        self.own = share(self.group.rank, self.group.num_ranks, self.num_pieces)
        num_pieces = self.num_pieces if self.in_lockstep else len(self.own)
        self.attached = _attach_model(model, optimizer, mesh, holding, num_pieces, self.in_lockstep)
        self._settings = self._settings or ChangedSettings(optimizer)
        self.rounds, self.buffers = self.attached.rounds, self.attached.rounds.buffers
        self._cleanup.callback(self.buffers.restore)
        self.named = served_parameters(model)
        self.parameters = [p for _, p in self.named]
        self.gradient_sum = PieceSum(self.rounds.own)
        self._route = worker_route(mesh.servers, self.group, self.num_pieces, self.options.hosts)
        # Of pieces that are counted from zero, and in a host from its first one.
        first = self.own.start - self.rounds.own.start - self._route.pieces.start
        self.blocks = [Block(b.first + first, b.num_pieces) for b in self.gradient_sum.blocks]
        layout = layout_after(model, optimizer, self._route.counts(mesh.sizes))
        self.layout = layout if self.options.hosts == 1 else layout.on_one_server()
        self._segments = [self.layout.segments(key) for key in range(len(self.layout.keys))]
        self.client = state_client = ServerClient(self._route.local_servers, self.group.rank)
        self._cleanup.callback(self.client.close)
        self._requests = RequestSender(self.client, self._push)
        if self.options.hosts > 1:  # a host's own server holds no state
            state_client = AggregatorClient(layout, self._route).client
            self._cleanup.callback(state_client.close)
        self._served = ServedState(model, layout, state_client, self.group)
        if len(self._versions) != len(self.client):  # all have made the same updates when all met
            self._versions = [max(self._versions, default=0)] * len(self.client)
        if self._packing is not None:
            place = self.group.rank, self.group.num_ranks
            self._packing.attach(self.layout, self.named, len(self.blocks), place)
        self._greet()
        assert self._memory is not None
        buckets = self._memory.buckets(self.parameters)
        self.buckets = GradientBuckets(
            self.parameters, buckets, len(self.blocks), self._push_bucket
        )
        self._cleanup.callback(self.buckets.close)
        self.lookups = WorkerLookups(
            model, self.client, len(self.layout.keys), self.rounds.own, self._welcomes
        )
        self.lookups.batch = self.batch
        self._cleanup.callback(self.lookups.close)
        self._around = RoundContext(self.rounds, self._end_round)
        self._lazy_pull = LazyPull(model, self.layout, self.client, self._memory)
        if self._is_mixed:  # the step is committed, and servers have it
            self._pull(self.batch, meets=False)

    def detach(self) -> None:
        self._is_mixed |= hasattr(self, "_lazy_pull") and not self._lazy_pull.is_complete
        self._cleanup.close()
        if self._memory is not None:
            self._memory.take_back()  # the server may be gone, or step from here again

    def microbatch(self, first: bool, last: bool) -> AbstractContextManager[object]:
        if first:
            self.wait_for_turn()
            self._attempt += 1
            self.client.drop_queued()
            for p in self.parameters:
                p.grad = None
            self.gradient_sum.begin()
            self.buffers.begin()
            self.buckets.begin()
            self.lookups.begin()
            if self._packing is not None:
                self._packing.begin()
        if last:
            self.buckets.arm(self.gradient_sum)
        self._around.last = last
        return self._around if self._lazy_pull.is_complete else self._lazy_pull.watch(self._around)

    def wait_for_parameters(self) -> None:
        """Wait until all parameters of the last step are here."""
        self.wait_for_turn()
        self._lazy_pull.wait()

    def wait_for_turn(self) -> None:
        """As a newcomer, wait until the batch of its seat may be begun, or all are there."""
        if self._is_early:
            self._pull(self.batch, self.halts.meets_after(self.batch))

    def exchange(self, local: LocalStep, want_norm: bool) -> GlobalStep:
        self.wait_for_parameters()  # without a piece no forward has waited for them
        if self.blocks:
            self.buckets.send_rest()
            for key in self.lookups.keys:
                self._push(key)
            self.client.flush(SMALL_BYTES)  # what is small goes with the question
        pieces = self._all_pieces if self.in_lockstep else self.own
        # Else there is nothing to ask: servers wait for all rows before they step.
        asked = self._ask_sums(pieces, want_norm) if want_norm or self.options.checks else []
        if self.in_lockstep:
            agreed, _ = self.rounds.agree(local, self.buckets.touched)
        else:
            agreed = self._agree_alone(local)
        self._is_asked = any(agreed.asked)
        norms = [tensor_of(f, torch.float32, len(f) // 4) for f in self._read_sums(asked)]
        if not want_norm:
            return agreed
        return agreed._replace(norm=norm_of_blocks(torch.cat(norms)))

    def update(self, scale: float, check: bool = True) -> bool:
        keeps = self._packing is not None and self._packing.codec.keeps_residual
        if (check or keeps) and not self._finite:
            self.buffers.restore()
            return False
        assert self._settings is not None
        pieces = self._all_pieces if self.in_lockstep else self.own
        part = 1.0 if self.in_lockstep else len(pieces) / self.num_pieces
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
        values = self._take(asked, at_once=not self.streams or self._is_asked or meets)
        self.staleness.add(self.batch + 1 - values[0].committed)
        self.trace = pulled, [own.made for own in values], self._versions
        self._advance_to(self.batch + 1)
        if self._packing is not None:
            self._packing.commit()
        self.buffers.commit()
        self.mesh.world.bytes_sent += self.client.take_bytes()
        return True

    def gradients(self) -> dict[str, list[Slice]]:
        return self._served.fetch(gradients=True).tensors

    @staticmethod
    def costs(layout: RankLayout) -> StepCosts:
        """Gradients out, each subtree of the worker's pieces apart; optimizer state is elsewhere.

        Gradients and parameters count as sent also where they are read in memory that a host
        shares; the few bytes of the requests around them do not count.
        """
        blocks, plan = pushed_blocks(layout), layout.plan
        keys = layout_on_servers(layout).keys
        num_bytes = len(blocks) * sum(
            min(key.num_bytes, packed_bytes(plan.codec, key)) for key in keys
        )
        sums = [Message("gradients", "servers", "push", len(keys), num_bytes)]
        sums += sent_by_worker(layout, blocks)
        told = []
        if plan.staleness_bound == 0:  # else workers send each other nothing
            told = [metadata_message(layout), changed_buffers(layout)]
        return StepCosts(0, _held(layout, len(blocks)), sums, told)

    def state_dict(self) -> ShardedState:
        """What servers hold is fetched by the ranks in turn; what they do not, all ranks hold."""
        self.wait_for_parameters()
        state = self._served.fetch()
        if self._packing is not None:
            own = self._packing.state()
            state.tensors.update(own.tensors)
            state.plain.update(own.plain)
        if not self.in_lockstep and self.group.rank:
            return state  # workers differ in their buffers: those of rank 0 are kept
        for name, tensor in self._served.others():
            state.tensors[f"model.{name}"] = slices_of(name, tensor, self.holding)
        return state

    @torch.no_grad()
    def load_state_dict(self, source: StateSource, step: int) -> None:
        """The ranks in turn send the servers what is theirs; then all pull it."""
        source = self._begin_load(source)
        # Of a checkpoint one rank may read what is damaged, and another what is not.
        with self.group.raise_on_all():
            _load_held(self.attached, source, self._served.others())
            self._served.send(source, step)
        if self._packing is not None:
            self._packing.load(source, step)
        self._advance_to(step)
        self._route.announce_state(self.client, self.group, step)
        self._pull(step, meets=True)
        self.buffers.hold()

    def newcomer_step(self) -> int:
        """The first batch of which not all servers have this seat's pieces."""
        if self.in_lockstep:
            return max(welcome.committed for welcome in self._welcomes)
        return min(welcome.next_batch for welcome in self._welcomes)

    def newcomer_state(self) -> ShardedState:
        """Parameters and buffers; and the settings that hooks have changed, since a worker sends
        them with its steps."""
        self._lazy_pull.wait()
        state = TrainState({}, self.attached.optimizer, {}).state_dict()
        for name, tensor in _all_held(self.attached.model):
            state.tensors[f"model.{name}"] = slices_of(name, tensor, self.holding)
        if self._packing is not None:
            state.plain.update(self._packing.plain)
        return state

    @torch.no_grad()
    def join(self, source: StateSource, step: int) -> None:
        """Servers have what is theirs already."""
        if self._packing is not None:
            self._packing.join(source, step)
        _load_held(self.attached, self._begin_load(source), _all_held(self.attached.model))
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
        names = self.lookups.names
        return self._served.fetch(tables=True, dense=dense).tensors if names else {}

    def types(self) -> ShardedState:
        """The names and types of what servers hold for this rank, without a value."""
        return self._served.types()

    def _begin_load(self, source: StateSource) -> StateSource:
        """Hold the parameters here again, to write to them; the source as that of one replica."""
        assert self._memory is not None
        self._lazy_pull.wait()
        self._memory.take_back()
        return MergedReplicas(source)

    def _advance_to(self, batch: int) -> None:
        self.batch, self._attempt = batch, 0
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
        self.halts.ask(self.client, self.batch, local.asked)
        return self.rounds.agree_locally(local)._replace(
            busy_s=[local.busy_s] * self.group.num_ranks,
            asked=self.halts.requests_after(self.batch + 1),
            mark=None,
            num_samples=None,
        )

    def _end_round(self, last: bool) -> None:
        self.lookups.end_piece()
        if not last:
            self.gradient_sum.push([p.grad for p in self.parameters])
            for p in self.parameters:
                p.grad = None

    def _push_bucket(self, bucket: GradientBucket) -> PushedBucket:
        keys = self.layout.keys_of_buffer(len(self.buckets.sent))
        for key in keys:
            if self._packing is not None:
                own = self.layout.keys[key]
                self._packing.pack(key, [row[own.start : own.stop] for row in bucket.rows])
            self._push(key)
        if sum(row.nbytes for row in bucket.rows) > SMALL_BYTES:
            self.client.flush()  # so that servers add up while backward runs
        return PushedBucket()

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
        for summed, frames in self._requests.answers(asked):
            self._finite &= summed.finite
            yield from frames

    def _pull(self, batch: int, meets: bool, waits: bool = True) -> None:
        """Take the parameters for a batch, as soon as it may be begun. A newcomer takes those of
        now: its seat may be ahead of the others, who wait for it."""
        asked = self._requests.ask_all(Pull, batch=batch, meets=meets, waits=waits)
        values = self._take(asked, at_once=True)
        self._is_early = not waits
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


def _attach_model(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    mesh: Mesh,
    holding: LocalLayout,
    num_pieces: int,
    in_lockstep: bool,
) -> AttachedModel:
    """A worker's own `num_pieces`; in lockstep those of all, and every worker must call it."""
    if not in_lockstep:
        mesh = mesh._replace(world=Group(), data=Group())
    return AttachedModel(model, optimizer, mesh, holding, num_pieces, 1)


def _all_held(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _load_held(
    attached: AttachedModel, source: StateSource, held: Iterable[tuple[str, Tensor]]
) -> None:
    """Take the optimizer's settings, and what this worker holds itself."""
    if source.plain:  # else its own weights come from elsewhere, and no server's through it
        TrainState({}, attached.optimizer, {}).load_groups(source)
    for name, tensor in held:
        source.fill(f"model.{name}", slices_of(name, tensor, attached.holding))


def _held(layout: RankLayout, num_rows: int) -> MemoryUse:
    """A worker's gradients are in memory that servers read.

    In lockstep a parameter that one server holds is read in shared memory, without a copy.
    """
    places = layout_on_servers(layout)
    sums = most_sums(len(layout.rounds)) if len(layout.rounds) > 1 else 0
    sizes = zip(places.flat_buffers, places.itemsizes, strict=True)
    largest = max((flat.starts[-1] * size for flat, size in sizes), default=0)
    rows = "for the servers" + (f", {num_rows} subtrees" if num_rows > 1 else "")
    held = sum(p.num_bytes for p in layout.parameters)
    read = 0
    if layout.plan.staleness_bound == 0:
        read = sum(layout.trained[number].num_bytes for number in parameter_addresses(places))
    words = f"{sums} partial sums of gradients" if sums else "the largest bucket's gradients"
    extra = Amount(sums * layout.gradient_bytes or largest, words)
    if layout.plan.codec not in ("none", *HALF_CODECS):
        packed = [key for key in places.keys if is_packed(layout.plan.codec, key)]
        count = 2 * num_rows * sum(key.stop - key.start for key in packed)
        extra = added_up(extra, Amount(SINGLE * count, "what packing did not send, and a copy"))
    return MemoryUse(
        Amount(held - read, "but what it reads at the servers" if read else "what this rank holds"),
        Amount(places.row_places(num_rows)[-1], rows),
        Amount(0, "on the servers"),
        buffers_held(layout),
        extra,
    )
