"""A host's own server: it adds up what the workers of its host push, and speaks for all of them.

To its workers it is a server that holds everything; to the servers of the plan it is one worker
whose pieces are those of its host. So between hosts each gradient and each parameter travels once a
host instead of once a worker. Sums keep the tree's order, since a host's pieces are one of its
subtrees (`plans/rules.py` sees to that), and the result keeps its bits.

It holds nothing that exists once: if it dies, workers push again to its successor, which pulls the
parameters of now. While it waits for other hosts its workers wait with it, so it may block.

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
from shoal.plans.size import Size
from shoal.sync.server.arriving import Arriving, Frame
from shoal.sync.server.clock import Clock
from shoal.sync.server.guests import Guest
from shoal.sync.server.layout import Layout
from shoal.sync.server.line import Line, Question, Questions
from shoal.sync.server.messages import (
    Answer,
    Apply,
    Dump,
    Hello,
    Load,
    Pull,
    Push,
    Sum,
)
from shoal.sync.server.reception import Reception
from shoal.sync.server.records import Told
from shoal.sync.server.sets import ValueSets
from shoal.sync.server.shard import trained
from shoal.sync.server.tables import Tables
from shoal.sync.state import State


class Values(NamedTuple):
    """All parameters of the servers of the plan, by key, and their version."""

    version: int
    frames: list[Frame]


class Way(NamedTuple):
    """From a worker, or from a host's server, to those that take gradients and hold state."""

    near: Servers  # that a worker pushes to: all of the plan's, or its host's own
    far: Servers  # that hold state
    host: int
    num_hosts: int
    seat: int  # of a worker, among those that push to the same
    pieces: range  # of each batch, that are added up together
    num_pieces: int  # in all

    def counts(self, sizes: Sequence[Size]) -> list[int]:
        """How many servers that hold state the run had, one size after another."""
        num_others = self.num_hosts if self.num_hosts > 1 else 0
        found = [size.num_servers - num_others for size in sizes]
        return found or [len(self.far.addresses)]

    def tell(self, line: Line, group: Group, step: int) -> None:
        """Let hosts' servers know of another state. Every rank must call it."""
        if self.num_hosts > 1:
            if self.seat == 0:
                line.answer(line.ask(0, Load, step=step))
            group.gather_numbers([step])  # all know


def way_of(servers: Servers, group: Group, num_pieces: int, num_hosts: int) -> Way:
    """A worker's. The hosts' own servers are the last ones."""
    if num_hosts == 1:
        return Way(servers, servers, 0, 1, group.rank, range(num_pieces), num_pieces)
    host, seat = divmod(group.rank, group.num_ranks // num_hosts)
    return _way(servers, host, num_hosts, seat, num_pieces)


def way_of_host(servers: Servers, host: int, num_hosts: int, num_pieces: int) -> Way:
    return _way(servers, host, num_hosts, 0, num_pieces)


def _way(servers: Servers, host: int, num_hosts: int, seat: int, num_pieces: int) -> Way:
    far, near = servers.addresses[:-num_hosts], servers.addresses[-num_hosts:]
    return Way(
        servers._replace(addresses=(near[host],)),
        servers._replace(addresses=far),
        host,
        num_hosts,
        seat,
        share(host, num_hosts, num_pieces),
        num_pieces,
    )


class Upward:
    """A host's conversation with the servers of the plan, as one worker of theirs."""

    def __init__(self, layout: Layout, way: Way):
        self.layout, self.num_pieces = layout, way.num_pieces
        self._block = Block(way.pieces.start, len(way.pieces))
        self.line = Line(way.far, way.host)
        self._questions = Questions(self.line, self._push)
        self._arriving = Arriving(self.line, layout)
        self._rows: dict[int, tuple[Tensor, dict[str, Any]]] = {}  # by key, the last that were sent
        welcomes = self._questions.answers(
            self._questions.ask_all(
                Hello,
                seat=way.host,
                secret=way.far.secret,
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
        asked = self._questions.ask_all(
            Sum,
            **self._which(sum_),
            want_norms=sum_.want_norms,
            want_finite=sum_.want_finite,
        )
        found = self._questions.answers(asked)
        norms = b"".join(bytes(frame) for _, frames in found for frame in frames)
        return all(summed.finite for summed, _ in found), norms

    def apply(self, apply: Apply) -> Values:
        """Step; the parameters for the next batch."""
        asked = self._questions.ask_all(
            Apply,
            **self._which(apply),
            scale=apply.scale,
            factor=apply.factor,
            pulled=apply.pulled,
            settings=apply.settings,
        )
        return self._gather(asked)

    def pull(self, batch: int, meets: bool) -> Values:
        return self._gather(self._questions.ask_all(Pull, batch=batch, meets=meets))

    def _gather(self, asked: list[Question]) -> Values:
        """All parameters, before any is put where workers read it."""
        answers, found = self._questions.answers(asked), []
        for server, (told, frames) in enumerate(answers):
            found += self._arriving.expect(server, told.version, frames)
        self._arriving.begin()
        found += self._arriving.gather()
        return Values(max(told.version for told, _ in answers), found)

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
        self.line.tell(
            server, Push, [total], key=key, blocks=[self._block], is_shared=False, **what
        )


class HostValues:
    """All parameters, as a host's workers see them."""

    def __init__(self, model: nn.Module, layout: Layout):
        self.layout, self.keys = layout, layout.held_by(0)
        self.tables = Tables(nn.Module(), 0, 1)
        named = trained(model)
        firsts = {key: layout.segments(key)[0].parameter for key in self.keys}
        dtypes = {key: named[first][1].dtype for key, first in firsts.items()}
        self.sets = ValueSets(layout, 0, dtypes)

    @property
    def values(self) -> dict[int, Tensor]:
        return self.sets.values


class HostServer(Reception):
    """A server to the workers of a host. `enter` each generation, and `leave` it."""

    def __init__(self, model: nn.Module, far: Layout, num_seats: int, num_pieces: int, secret: str):
        held = HostValues(model, far.on_one())
        super().__init__(held, num_seats=num_seats, num_pieces=num_pieces, bound=0, secret=secret)
        self._far = far
        self._upward: Upward | None = None
        self.begin(-1)

    def enter(self, generation: int, way: Way) -> None:
        """Greet the servers of the plan, then be there for the workers."""
        self.leave()
        self._upward = Upward(self._far, way)
        self.begin(generation)
        self._go_to(self._up.committed, meets=False)

    def leave(self) -> None:
        if self._upward is not None:
            self._upward.line.close()
            self._upward = None

    @property
    def _up(self) -> Upward:
        assert self._upward is not None
        return self._upward

    def _keep(self, guest: Guest, push: Push, payload: Sequence[memoryview]) -> None:
        """What is whole is passed on at once, while workers compute the rest."""
        super()._keep(guest, push, payload)
        total = self._rows.total(push.batch, push.key)
        if total is not None and self.clock.is_new(push.batch, guest.pieces):
            touched = self._rows.touched_in(push.batch, push.key, range(self.num_pieces))
            self._up.push(push, total, touched)

    def _look_at_sums(self, sum_: Sum, pieces: range) -> Told:
        finite, norms = self._up.sum(sum_)
        return Told(sum_.batch, sum_.first, finite, norms, sum_.attempt)

    def _summed_before(self, sender: bytes, sum_: Sum) -> Answer:
        """The servers of the plan know, if a host's server that died was told."""
        if sum_.first not in self._told:
            self._told[sum_.first] = self._look_at_sums(sum_, range(self.num_pieces))
        return super()._summed_before(sender, sum_)

    def _refuse_apply(self, apply: Apply) -> None:
        """The servers of the plan look at it."""

    def _apply(self, guest: Guest, apply: Apply, pieces: range) -> None:
        faultpoint("host.apply", apply.batch)
        new = self._up.apply(apply)
        faultpoint("host.applied", apply.batch)
        self._take(new)
        self.clock.apply(apply.batch, pieces)
        self._rows.forget(apply.batch, pieces, self.clock.committed)

    def _dump(self, dump: Dump) -> State:
        raise ValueError("a host's server holds no state: ask the servers of the plan")

    def _load(self, load: Load, payload: Sequence[memoryview]) -> None:
        """The servers of the plan have a state after this step; take it from there."""
        self._rows.clear()
        self._go_to(load.step, meets=True)

    def _go_to(self, step: int, meets: bool) -> None:
        self._take(self._up.pull(step, meets))
        self.clock = Clock(self.num_pieces, 0, step)
        self._begun, self._told = step, {}

    def _take(self, new: Values) -> None:
        """Into the other set, since workers read the one of now."""
        self.held.sets.turn()
        values, self.version = self.held.values, new.version
        for key, frame in new.frames:
            values[key].copy_(tensor_of(frame, values[key].dtype, values[key].numel()))
