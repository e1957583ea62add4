"""What a parameter server's process does, under a seat that comes after those of the ranks."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from torch import nn

from shoal import faults
from shoal.elastic.seat import SupervisedSeat
from shoal.errors import GroupLost
from shoal.faults import faultpoint
from shoal.numerics import schedules
from shoal.numerics.crew import Crew, spare_threads
from shoal.parallel.striping import tables_of
from shoal.plans.plan import Plan
from shoal.plans.size import Size, of_size, served_size
from shoal.sync.server.anchor import outer_of
from shoal.sync.server.deadline import DeadlineServer
from shoal.sync.server.host import HostServer, way_of_host
from shoal.sync.server.journal import Journal
from shoal.sync.server.moving import (
    Shelf,
    changes,
    clear,
    layout_after,
    take_parts,
    write_parts,
)
from shoal.sync.server.peers import copied
from shoal.sync.server.referee import Referee
from shoal.sync.server.serve import Desk
from shoal.sync.server.server import Server
from shoal.sync.server.shard import Shard
from shoal.sync.server.tables import Tables
from shoal.training.run import Run


class Serving:
    """A server, in one generation after another and under one layout after another."""

    def __init__(
        self,
        number: int,
        seat: SupervisedSeat,
        run: Run,
        plan: Plan,
        model: nn.Module,
        directory: Path,
    ):
        self.number, self.seat, self.run, self.plan, self.model = number, seat, run, plan, model
        self.directory = directory
        tables = tables_of(model).values() if plan.copies > 1 else ()
        self._first = {module: module.weight for module in tables}  # rows of all servers
        self._sizes: list[Size] = []  # that the run had, as far as servers are laid out for them
        num_sharing = -(-plan.num_servers // plan.hosts)
        self._crew = Crew(spare_threads(num_sharing) if plan.waits_for_all else 1)
        self._desk: Desk | None = None
        self._server: Server | None = None

    def serve(self) -> None:
        """Until the supervisor says leave."""
        self._crew.host(self._serve)

    def _serve(self) -> None:
        try:
            while True:
                place = self.seat.enter()
                desk, server = self._open()  # which may do again all that a dead one did
                peers = desk.peers
                doors = self.seat.receive(place, desk.address, peers.address if peers else "")
                if doors is None:
                    continue
                server.begin(place.generation, self._num_guests(place.num_ranks))
                if peers is not None:
                    peers.turn_to(place.generation, doors)
                while not self.seat.is_over():
                    desk.turn()
                    if (count := self.seat.asked_to_part()) is not None:
                        self._part(server, count)
        finally:
            if self._desk is not None:
                self._desk.close()

    @property
    def _counts(self) -> list[int]:
        """Of servers, in each of the layouts that there were."""
        return [size.num_servers - self.plan.num_host_servers for size in self._sizes]

    def _num_guests(self, num_ranks: int) -> int:
        """Who pushes here: the ranks, or hosts' own servers."""
        return num_ranks if self.plan.hosts == 1 else self.plan.hosts

    def _open(self) -> tuple[Desk, Server]:
        """The desk of the present layout; that of the one before is closed."""
        sizes = changes([served_size(self.plan, size) for size in self.seat.sizes])
        if self._desk is not None and self._server is not None and sizes == self._sizes:
            return self._desk, self._server
        if self._desk is not None:
            self._desk.close()
            self._desk = None  # and with it the state, which is on disk
        self._sizes = sizes
        if len(sizes) > 1:
            self.plan = of_size(self.plan, self.seat.sizes[-1])
        plan, counts = self.plan, self._counts
        shelf = Shelf(self.directory, len(counts) - 1)
        in_journal = plan.copies == 1  # else what it does is written to other servers
        server = self._server = self._kind()(
            self._shard_of(self.number),
            num_seats=self._num_guests(self.seat.sizes[-1].num_ranks),
            # Of a window of local steps each replica has one piece.
            num_pieces=plan.num_pieces if plan.local_steps == 1 else plan.num_replicas,
            bound=plan.bound,
            secret=self.seat.secret,
            rule=plan.combine,
            journal=Journal(shelf.journal(self.number), self.seat.secret) if in_journal else None,
        )
        if shelf.number and not server.clock.committed:
            faultpoint("server.moving", self.number)
            take_parts(server, self.number, counts[-2], shelf)
            clear(shelf, self.number, counts[-2], counts[-1])
            faultpoint("server.moved", self.number)
        reach = self.seat.reach
        peers = copied(server, self.number, counts[-1], plan.copies, self._shard_of, reach)
        self._desk = Desk(server, reach, peers)
        return self._desk, server

    def _kind(self) -> Callable[..., Server]:
        deadline_s = self.plan.deadline_s
        if deadline_s is None:
            return Server
        # One server decides who is in a round.
        referee = None if self.number else Referee(self.plan.num_replicas, deadline_s)
        return partial(DeadlineServer, referee=referee)

    def _shard_of(self, owner: int) -> Shard:
        for module, weight in self._first.items():
            module.weight = weight
        model, tables = self.model, Tables(self.model, owner, self._counts[-1])
        optimizer = self.run.make_optimizer(model)
        schedules.remember_rates(optimizer)
        if self.plan.local_steps > 1:
            model, optimizer = outer_of(model, self.plan)
        layout = layout_after(model, optimizer, self._counts)
        is_own, every = owner == self.number, self.run.check_every
        shard = Shard(model, optimizer, layout, owner, tables, shared=is_own, check_every=every)
        shard.step_with(self._crew)
        faults.expose(f"server {owner}", shard.place_of)
        return shard

    def _part(self, server: Server, num_servers: int) -> None:
        """Write down what each of so many servers will hold, and say so."""
        shelf = Shelf(self.directory, len(self._counts))
        num_bytes, problem = 0, ""
        try:
            num_bytes = write_parts(server, self.number, num_servers, shelf)
        except (OSError, ValueError) as error:
            problem = f"server {self.number} cannot write down what it holds: {error}"
        self.seat.parted(num_bytes, problem)


def serve_host(number: int, seat: SupervisedSeat, run: Run, plan: Plan, model: nn.Module) -> None:
    """Be the server of a host, which adds up for those of the plan."""
    layout = layout_after(model, run.make_optimizer(model), [plan.num_servers])
    num_seats, num_pieces = plan.num_ranks // plan.hosts, plan.num_pieces // plan.hosts
    server = HostServer(model, layout, num_seats, num_pieces, seat.secret)
    desk = Desk(server, seat.reach)
    try:
        while True:
            place = seat.enter()
            if seat.receive(place, desk.address) is None:
                continue
            with suppress(GroupLost):  # a server died; all meet in another generation
                servers = seat.find_servers(place)
                server.enter(
                    place.generation, way_of_host(servers, number, plan.hosts, plan.num_pieces)
                )
                while not seat.is_over():
                    desk.turn()
    finally:
        server.leave()
        desk.close()
