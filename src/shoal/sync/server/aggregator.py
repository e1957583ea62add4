"""An aggregator: a host's own server, which sums what the workers of its host push.

To its workers it is a server that holds everything; to the servers of the plan it is one worker
whose pieces are those of its host. So between hosts each gradient and each parameter travels once a
host instead of once a worker. Sums keep the tree's order, since a host's pieces are one of its
subtrees (`plans/rules.py` ensures that), and the result keeps its bits.

It holds no state of its own: if it dies, workers push again to its successor, which pulls the
current parameters. While it waits for other hosts its workers wait with it, so it may block.

When to use it: several workers a host, and links between hosts that are slower than memory. Cost:
one more process a host, and one more hop for each gradient.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from shoal.comm.collectives import Group
from shoal.comm.mesh import Servers
from shoal.comm.tree import Block
from shoal.comm.wire import tensor_of
from shoal.data.split import share
from shoal.faults import faultpoint
from shoal.plans.resize import RunSize
from shoal.sync.server.client import RequestSender, SentRequest, ServerClient
from shoal.sync.server.clock import Clock
from shoal.sync.server.core import ServerCore
from shoal.sync.server.layout import ServerLayout
from shoal.sync.server.lazy_pull import Frame, KeyFetcher
from shoal.sync.server.messages import (
    Apply,
    DumpState,
    LoadState,
    Pull,
    Push,
    Reply,
    Sum,
    WorkerHello,
)
from shoal.sync.server.parameter_buffers import ParameterBuffers
from shoal.sync.server.records import SumSummary
from shoal.sync.server.session import WorkerSession
from shoal.sync.server.shard import served_parameters
from shoal.sync.server.tables import ServerTables
from shoal.sync.state import ShardedState


class GatheredValues(NamedTuple):
    """All parameters of the servers of the plan, by key, and their version."""

    version: int
    frames: list[Frame]


class Route(NamedTuple):
    """From a worker, or from a host's server, to those that take gradients and hold state."""

    local_servers: Servers  # that a worker pushes to: all of the plan's, or its host's own
    global_servers: Servers  # that hold state
    host: int
    num_hosts: int
    seat: int  # of a worker, among those that push to the same
    pieces: range  # of each batch, that are added up together
    num_pieces: int  # in all

    def counts(self, sizes: Sequence[RunSize]) -> list[int]:
        """How many servers that hold state the run had, one size after another."""
        num_others = self.num_hosts if self.num_hosts > 1 else 0
        found = [size.num_servers - num_others for size in sizes]
        return found or [len(self.global_servers.addresses)]

    def announce_state(self, client: ServerClient, group: Group, step: int) -> None:
        """Let aggregators pull another state. Every rank must call it."""
        if self.num_hosts > 1:
            if self.seat == 0:
                client.answer(client.ask(0, LoadState, step=step))
            group.all_gather_numbers([step])  # all know


def worker_route(servers: Servers, group: Group, num_pieces: int, num_hosts: int) -> Route:
    """A worker's. The hosts' own servers are the last ones."""
    if num_hosts == 1:
        return Route(servers, servers, 0, 1, group.rank, range(num_pieces), num_pieces)
    host, seat = divmod(group.rank, group.num_ranks // num_hosts)
    return _host_route(servers, host, num_hosts, seat, num_pieces)


def aggregator_route(servers: Servers, host: int, num_hosts: int, num_pieces: int) -> Route:
    return _host_route(servers, host, num_hosts, 0, num_pieces)


def _host_route(servers: Servers, host: int, num_hosts: int, seat: int, num_pieces: int) -> Route:
    global_servers, local_servers = servers.addresses[:-num_hosts], servers.addresses[-num_hosts:]
    return Route(
        servers._replace(addresses=(local_servers[host],)),
        servers._replace(addresses=global_servers),
        host,
        num_hosts,
        seat,
        share(host, num_hosts, num_pieces),
        num_pieces,
    )


class AggregatorClient:
    """A host's conversation with the servers of the plan, as one worker of theirs."""

    def __init__(self, layout: ServerLayout, route: Route):
        self.layout, self.num_pieces = layout, route.num_pieces
        self._block = Block(route.pieces.start, len(route.pieces))
        self.client = ServerClient(route.global_servers, route.host)
        self._requests = RequestSender(self.client, self._push)
        self._fetcher = KeyFetcher(self.client, layout)
        self._rows: dict[int, tuple[Tensor, dict[str, Any]]] = {}  # by key, the last that were sent
        welcomes = self._requests.answers(
            self._requests.ask_all(
                WorkerHello,
                seat=route.host,
                secret=route.global_servers.secret,
                layout=layout.digest,
                num_rows=1,
                rows=None,
            )
        )
        # Of servers of which some are a step ahead, the others wait for the step to be done again.
        self.committed = min(welcome.committed for welcome, _ in welcomes)

    def push(self, push: Push, total: Tensor, touched: list[bool]) -> None:
        what = {"batch": push.batch, "attempt": push.attempt, "touched": touched}
        self._rows[push.key] = total, what
        self._push(push.key)

    def sum(self, sum_: Sum) -> tuple[bool, bytes]:
        """Wait until all hosts have pushed: whether sums are finite, and the norms of blocks."""
        asked = self._requests.ask_all(
            Sum, **self._which(sum_), want_norms=sum_.want_norms, want_finite=sum_.want_finite
        )
        found = self._requests.answers(asked)
        norms = b"".join(bytes(frame) for _, frames in found for frame in frames)
        return all(summed.finite for summed, _ in found), norms

    def apply(self, apply: Apply) -> GatheredValues:
        """Step; the parameters for the next batch."""
        asked = self._requests.ask_all(
            Apply,
            **self._which(apply),
            scale=apply.scale,
            factor=apply.factor,
            pulled=apply.pulled,
            settings=apply.settings,
        )
        return self._gather(asked)

    def pull(self, batch: int, meets: bool) -> GatheredValues:
        return self._gather(self._requests.ask_all(Pull, batch=batch, meets=meets))

    def _gather(self, asked: list[SentRequest]) -> GatheredValues:
        """All parameters, before any is put where workers read it."""
        answers, found = self._requests.answers(asked), []
        for server, (values, frames) in enumerate(answers):
            found += self._fetcher.expect(server, values.version, frames)
        self._fetcher.begin()
        found += self._fetcher.gather()
        return GatheredValues(max(values.version for values, _ in answers), found)

    def _which(self, message: Sum | Apply) -> dict[str, int]:
        """All pieces of a batch, where a worker means those of its host."""
        return {
            "batch": message.batch,
            "attempt": message.attempt,
            "first": 0,
            "last": self.num_pieces,
        }

    def _push(self, key: int) -> None:
        total, what = self._rows[key]
        server = self.layout.holders[key]
        self.client.send(
            server, Push, [total], key=key, blocks=[self._block], is_shared=False, **what
        )


class AggregatorValues:
    """All parameters, as a host's workers see them."""

    def __init__(self, model: nn.Module, layout: ServerLayout):
        self.layout, self.keys = layout, layout.held_by(0)
        self.tables = ServerTables(nn.Module(), 0, 1)
        named = served_parameters(model)
        firsts = {key: layout.segments(key)[0].parameter for key in self.keys}
        dtypes = {key: named[first][1].dtype for key, first in firsts.items()}
        self.sets = ParameterBuffers(layout, 0, dtypes)

    @property
    def values(self) -> dict[int, Tensor]:
        return self.sets.values


class AggregatorServer(ServerCore):
    """A server to the workers of a host. `enter` each generation, and `leave` it."""

    def __init__(
        self, model: nn.Module, layout: ServerLayout, num_seats: int, num_pieces: int, secret: str
    ):
        held = AggregatorValues(model, layout.on_one_server())
        super().__init__(held, num_seats=num_seats, num_pieces=num_pieces, bound=0, secret=secret)
        self._global_layout = layout
        self._client: AggregatorClient | None = None
        self.begin(-1)

    def enter(self, generation: int, route: Route) -> None:
        """Greet the servers of the plan, then be there for the workers."""
        self.leave()
        self._client = AggregatorClient(self._global_layout, route)
        self.begin(generation)
        self._go_to(self._upstream.committed, meets=False)

    def leave(self) -> None:
        if self._client is not None:
            self._client.client.close()
            self._client = None

    @property
    def _upstream(self) -> AggregatorClient:
        assert self._client is not None
        return self._client

    def _keep(self, session: WorkerSession, push: Push, payload: Sequence[memoryview]) -> None:
        """What is whole is passed on at once, while workers compute the rest."""
        super()._keep(session, push, payload)
        total = self._rows.total(push.batch, push.key)
        if total is not None and self.clock.is_new(push.batch, session.pieces):
            touched = self._rows.touched_in(push.batch, push.key, range(self.num_pieces))
            self._upstream.push(push, total, touched)

    def _summarize(self, sum_: Sum, pieces: range) -> SumSummary:
        finite, norms = self._upstream.sum(sum_)
        return SumSummary(sum_.batch, sum_.first, finite, norms, sum_.attempt)

    def _summed_earlier(self, sender: bytes, sum_: Sum) -> Reply:
        """The servers of the plan know, if a host's server that died was told."""
        if sum_.first not in self._summaries:
            self._summaries[sum_.first] = self._summarize(sum_, range(self.num_pieces))
        return super()._summed_earlier(sender, sum_)

    def _check_apply(self, apply: Apply) -> None:
        """The servers of the plan look at it."""

    def _apply(self, session: WorkerSession, apply: Apply, pieces: range) -> None:
        faultpoint("host.apply", apply.batch)
        new = self._upstream.apply(apply)
        faultpoint("host.applied", apply.batch)
        self._take(new)
        self.clock.apply(apply.batch, pieces)
        self._rows.forget(apply.batch, pieces, self.clock.committed)

    def _dump(self, dump: DumpState) -> ShardedState:
        raise ValueError("a host's server holds no state: ask the servers of the plan")

    def _load(self, load: LoadState, payload: Sequence[memoryview]) -> None:
        """The servers of the plan have a state after this step; take it from there."""
        self._rows.clear()
        self._go_to(load.step, meets=True)

    def _go_to(self, step: int, meets: bool) -> None:
        self._take(self._upstream.pull(step, meets))
        self.clock = Clock(self.num_pieces, 0, step)
        self._begun, self._summaries = step, {}

    def _take(self, new: GatheredValues) -> None:
        """Into the other set, since workers read the one of now."""
        self.parameters.sets.swap()
        values, self.version = self.parameters.values, new.version
        for key, frame in new.frames:
            values[key].copy_(tensor_of(frame, values[key].dtype, values[key].numel()))
