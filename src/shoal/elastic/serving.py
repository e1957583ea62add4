"""What a parameter server's process does, under a seat that comes after those of the ranks."""

from pathlib import Path

from torch import nn

from shoal.elastic.seat import SupervisedSeat
from shoal.faults import faultpoint
from shoal.numerics import schedules
from shoal.plan import Plan
from shoal.run import Run
from shoal.sync.server.anchor import outer_of
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
from shoal.sync.server.serve import Desk
from shoal.sync.server.server import Server
from shoal.sync.server.shard import Shard
from shoal.sync.server.tables import Tables


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
        self._counts: list[int] = []  # of servers that the run had
        self._desk: Desk | None = None

    def serve(self) -> None:
        """Until the supervisor says leave."""
        try:
            while True:
                desk = self._open()
                peers = desk.peers
                place, doors = self.seat.serve(desk.address, peers.address if peers else "")
                desk.server.begin(place.generation, place.num_ranks)
                if peers is not None:
                    peers.turn_to(place.generation, doors)
                while not self.seat.has_new_place:
                    desk.turn()
                    if (count := self.seat.asked_to_part()) is not None:
                        self._part(desk.server, count)
        finally:
            if self._desk is not None:
                self._desk.close()

    def _open(self) -> Desk:
        """The desk of the present layout; that of the one before is closed."""
        counts = changes([size.num_servers for size in self.seat.sizes])
        if self._desk is not None and counts == self._counts:
            return self._desk
        if self._desk is not None:
            self._desk.close()
            self._desk = None  # and with it the state, which is on disk
        self._counts, plan = counts, self.plan
        shelf = Shelf(self.directory, len(counts) - 1)
        in_journal = plan.copies == 1  # else what it does is written to other servers
        server = Server(
            self._shard_of(self.number),
            num_seats=self.seat.sizes[-1].num_ranks,
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
        peers = copied(server, self.number, counts[-1], plan.copies, self._shard_of)
        self._desk = Desk(server, peers)
        return self._desk

    def _shard_of(self, owner: int) -> Shard:
        model, tables = self.model, Tables(self.model, owner, self._counts[-1])
        optimizer = self.run.make_optimizer(model)
        schedules.remember_rates(optimizer)
        if self.plan.local_steps > 1:
            model, optimizer = outer_of(model, self.plan)
        layout = layout_after(model, optimizer, self._counts)
        return Shard(model, optimizer, layout, owner, tables, shared=owner == self.number)

    def _part(self, server: Server, num_servers: int) -> None:
        """Write down what each of so many servers will hold, and say so."""
        shelf = Shelf(self.directory, len(self._counts))
        num_bytes, problem = 0, ""
        try:
            num_bytes = write_parts(server, self.number, num_servers, shelf)
        except (OSError, ValueError) as error:
            problem = f"server {self.number} cannot write down what it holds: {error}"
        self.seat.parted(num_bytes, problem)
