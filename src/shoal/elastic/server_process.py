"""The process of a parameter server, in a seat after those of the ranks.

It serves one generation after another. After a resize it loads its new partition from the files
that the servers wrote (`sync/server/migration.py`). Read next: `seat.py`, `sync/server/server.py`.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from torch import nn

from shoal import faults
from shoal.elastic.seat import SupervisedSeat
from shoal.errors import GroupLost
from shoal.events.meters import SpentReports
from shoal.faults import faultpoint
from shoal.numerics import schedules
from shoal.numerics.threads import ComputeThreads, num_spare_threads
from shoal.parallel.striping import tables_of
from shoal.plans.plan import Plan
from shoal.plans.resize import RunSize, served_size, size_of, with_size
from shoal.sync.server.aggregator import AggregatorServer, aggregator_route
from shoal.sync.server.anchor import make_outer
from shoal.sync.server.deadline import DeadlineServer
from shoal.sync.server.journal import Journal
from shoal.sync.server.loop import ServerLoop
from shoal.sync.server.migration import (
    LayoutFiles,
    layout_after,
    load_parts,
    remove_parts,
    without_repeats,
    write_parts,
)
from shoal.sync.server.parts import part_on_servers
from shoal.sync.server.peers import make_peers
from shoal.sync.server.round_coordinator import RoundCoordinator
from shoal.sync.server.server import Server
from shoal.sync.server.shard import ServerShard
from shoal.sync.server.tables import ServerTables
from shoal.training.build import BuiltModel
from shoal.training.run import Run


class ServerProcess:
    """A server, in one generation after another and under one layout after another."""

    def __init__(
        self,
        number: int,
        seat: SupervisedSeat,
        run: Run,
        plan: Plan,
        built: BuiltModel,
        directory: Path,
    ):
        # Among those of a part of the model, which take turns.
        self.number, self.part = divmod(number, plan.num_parts)
        self.seat, self.run, self.plan, self.built = seat, run, plan, built
        self.model, self.directory = built.model, directory
        model = built.model
        tables = tables_of(model).values() if plan.copies > 1 else ()
        self._first = {module: module.weight for module in tables}  # rows of all servers
        self._sizes: list[RunSize] = []  # of the run, as far as the servers' layout changed
        num_sharing = -(-plan.num_servers // plan.hosts)
        self._crew = ComputeThreads(num_spare_threads(num_sharing) if plan.waits_for_all else 1)
        self._loop: ServerLoop | None = None
        self._server: Server | None = None

    def serve(self) -> None:
        """Serve until the supervisor releases this member."""
        self._crew.host(self._serve)

    def _serve(self) -> None:
        spent = SpentReports(self.seat.emit)
        try:
            while True:
                assignment = self.seat.await_seat()
                loop, server = self._open_layout()  # may repeat all the work of a dead server
                peers = loop.peers
                peer_addresses = self.seat.publish_address(
                    assignment, loop.address, peers.address if peers else ""
                )
                if peer_addresses is None:
                    continue
                server.begin(assignment.generation, self._num_clients(assignment.num_ranks))
                if peers is not None:
                    peers.start_generation(assignment.generation, peer_addresses)
                while not self.seat.is_over():
                    loop.run_once()
                    spent.serve()
                    if (count := self.seat.take_repartition_request()) is not None:
                        self._repartition(server, count)
        finally:
            if self._loop is not None:
                self._loop.close()

    @property
    def _seat_number(self) -> int:
        """Among all servers."""
        return self.number * self.plan.num_parts + self.part

    @property
    def _counts(self) -> list[int]:
        """The number of servers in each layout so far."""
        counts = [size.num_servers - self.plan.num_host_servers for size in self._sizes]
        return [count // self.plan.num_parts for count in counts]

    def _num_clients(self, num_ranks: int) -> int:
        """The number of clients that push here: one of each replica, or one aggregator a host."""
        return num_ranks // self.plan.num_ranks_apart if self.plan.hosts == 1 else self.plan.hosts

    def _open_layout(self) -> tuple[ServerLoop, Server]:
        """The server loop of the present layout; that of the one before is closed."""
        sizes = without_repeats([served_size(self.plan, size) for size in self.seat.sizes])
        if self._loop is not None and self._server is not None and sizes == self._sizes:
            return self._loop, self._server
        if self._loop is not None:
            self._loop.close()
            self._loop = None  # frees the state, which is on disk
        self._sizes = sizes
        if self.seat.sizes[-1] != size_of(self.plan):
            self.plan = with_size(self.plan, self.seat.sizes[-1])
        plan, counts = self.plan, self._counts
        files = LayoutFiles(self.directory, len(counts) - 1)
        in_journal = plan.copies == 1  # else what it does is written to other servers
        place = files.journal(self._seat_number)
        server = self._server = self._server_class()(
            self._shard_of(self.number),
            num_seats=self._num_clients(self.seat.sizes[-1].num_ranks),
            # Of a window of local steps each replica has one piece.
            num_pieces=plan.num_rounds if plan.local_steps == 1 else plan.num_apart,
            bound=plan.staleness_bound,
            secret=self.seat.secret,
            rule=plan.combine,
            journal=Journal(place, self.seat.secret) if in_journal else None,
        )
        if files.number and not server.clock.committed:
            faultpoint("server.moving", self.number)
            load_parts(server, self.number, counts[-2], files)
            remove_parts(files, self.number, counts[-2], counts[-1])
            faultpoint("server.moved", self.number)
        reach = self.seat.reach
        peers = make_peers(server, self.number, counts[-1], plan.copies, self._shard_of, reach)
        self._loop = ServerLoop(server, reach, peers)
        return self._loop, server

    def _server_class(self) -> Callable[..., Server]:
        deadline_s = self.plan.deadline_s
        if deadline_s is None:
            return Server
        # One server decides who is in a round.
        coordinator = None
        if self.number == self.part == 0:
            coordinator = RoundCoordinator(self.plan.num_apart, deadline_s)
        return partial(DeadlineServer, coordinator=coordinator)

    def _shard_of(self, owner: int) -> ServerShard:
        for module, weight in self._first.items():
            module.weight = weight
        model, tables = self.model, ServerTables(self.model, owner, self._counts[-1])
        optimizer = self.run.make_optimizer(model)
        schedules.remember_rates(optimizer)
        survey = self.built.survey
        model, holding = part_on_servers(model, optimizer, self.plan, survey, self.part)
        if self.plan.local_steps > 1:
            model, optimizer = make_outer(model, self.plan)
        layout = layout_after(model, optimizer, self._counts)
        is_own, every = owner == self.number, self.run.check_every
        shard = ServerShard(
            model,
            optimizer,
            layout,
            owner,
            tables,
            shared=is_own,
            check_every=every,
            holding=holding,
        )
        shard.step_with(self._crew)
        faults.expose(f"server {owner}", shard.place_of)
        return shard

    def _repartition(self, server: Server, num_servers: int) -> None:
        """Write the state, partitioned for so many servers, and report it."""
        files = LayoutFiles(self.directory, len(self._counts))
        num_bytes, problem = 0, ""
        try:
            num_bytes = write_parts(server, self.number, num_servers, files)
        except (OSError, ValueError) as error:
            problem = f"server {self.number} cannot write down what it holds: {error}"
        self.seat.report_repartition(num_bytes, problem)


def serve_aggregator(
    number: int, seat: SupervisedSeat, run: Run, plan: Plan, model: nn.Module
) -> None:
    """Be the server of a host, which adds up for those of the plan."""
    layout = layout_after(model, run.make_optimizer(model), [plan.num_servers])
    num_seats, num_pieces = plan.num_ranks // plan.hosts, plan.num_pieces // plan.hosts
    server = AggregatorServer(model, layout, num_seats, num_pieces, seat.secret)
    loop, spent = ServerLoop(server, seat.reach), SpentReports(seat.emit)
    try:
        while True:
            assignment = seat.await_seat()
            if seat.publish_address(assignment, loop.address) is None:
                continue
            with suppress(GroupLost):  # a server died; another generation follows
                servers = seat.find_servers(assignment)
                server.enter(
                    assignment.generation,
                    aggregator_route(servers, number, plan.hosts, plan.num_pieces),
                )
                while not seat.is_over():
                    loop.run_once()
                    spent.serve()
    finally:
        server.leave()
        loop.close()
