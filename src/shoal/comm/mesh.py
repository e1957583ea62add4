"""The mesh: this rank's index along each axis, and its process group there.

Ranks are numbered with the tensor axis running fastest, then data, then pipeline, so that the ranks
which communicate most are neighbours. If there are several replicas that step apart, each has
neighbouring places on the data axis.

A `Seat` gives a trainer its mesh. The default one reads the launcher's environment, forms the
group once and halts when it breaks; the supervisor's (`elastic/seat.py`) forms a new one under
the next generation. Forming has a deadline of its own, because torch would wait half an hour for a
rank that never comes.
"""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import msgspec

from shoal.comm.collectives import Group
from shoal.comm.flight_recorder import RECORDER, Standing
from shoal.comm.hangs import explain_hang
from shoal.comm.launcher_store import launcher_store, meeting_place
from shoal.comm.rendezvous import form_group, leave_group, wait_for_ranks
from shoal.comm.wire import Keys
from shoal.errors import GroupLost, PlanError
from shoal.events.events import Event
from shoal.events.step import StepInfo
from shoal.logs import log
from shoal.plans.plan import Plan
from shoal.plans.resize import RunSize
from shoal.world import World

if TYPE_CHECKING:
    import torch.distributed as dist

FORM_TIMEOUT_S = 30.0
ANSWER_S = 3.0  # for other ranks to say where they stand


class Axes(NamedTuple):
    """The lengths of the axes within a replica; the data axis takes the rest of the ranks."""

    tensor: int = 1
    pipeline: int = 1
    within: int | None = None  # that of data, if replicas step apart; None: its whole length

    @classmethod
    def of(cls, plan: Plan) -> Self:
        return cls(plan.tensor, plan.pipeline, plan.num_within if plan.is_loose else None)


class Servers(NamedTuple):
    """The parameter servers of a generation, as a worker finds them."""

    addresses: tuple[str, ...]
    generation: int
    secret: str  # of the run
    is_lost: Callable[[], bool]  # whether their generation is over
    keys: Keys | None = None  # if they are on several hosts


class RankRequests(NamedTuple):
    """Requests to one rank, which all ranks must agree on: to stop after a step, or to wait there
    for the next generation."""

    stop: bool = False
    meet: bool = False


NO_REQUESTS = RankRequests()


class Mesh(NamedTuple):
    """Ranks of a run, or of one replica of it. A new one is built for every generation."""

    world: Group  # all of them
    data: Group
    tensor: Group
    pipeline: Group
    device: str
    counts: tuple[int, ...] | None = None  # of rounds that each replica takes, if they are uneven
    servers: Servers | None = None
    sizes: tuple[RunSize, ...] = ()  # that the run had, the last one now; unless it keeps its size
    peers: Group = Group()  # this rank's counterparts in the replicas that step apart from its own
    replica: "Mesh | None" = None  # its own; None if there is one, which is all of them

    @classmethod
    def form(cls, world: Group, axes: Axes, device: str) -> Self:
        """Cut the world into lines along each axis. Every rank must call it."""
        num_data = world.num_ranks // (axes.tensor * axes.pipeline)
        if num_data * axes.tensor * axes.pipeline != world.num_ranks:
            raise PlanError(
                f"{world.num_ranks} ranks cannot be shared out to tensor={axes.tensor} x "
                f"pipeline={axes.pipeline}. Ranks are data x tensor x pipeline."
            )
        shape = (axes.pipeline, num_data, axes.tensor)
        if world.num_ranks > 1:
            # Through memory, if they are of one host. And the group that ranks met in was formed
            # under a short deadline, which Gloo keeps for messages between two ranks; a stage may
            # take its time.
            world = world.subgroup(range(world.num_ranks))
        pipeline, data, tensor = (_group_along(world, shape, axis) for axis in range(3))
        mesh = cls(world, data, tensor, pipeline, device)
        count = num_data // (axes.within or num_data)
        assert count * (axes.within or num_data) == num_data, "the plan's rules say so"
        return mesh if count == 1 else mesh.with_replicas(count)

    def with_replicas(self, count: int) -> Self:
        """The same, with replicas that step apart. Every rank must call it."""
        shape = (
            self.pipeline.num_ranks,
            count,
            self.data.num_ranks // count,
            self.tensor.num_ranks,
        )
        ranks = ranks_by_replica(shape)
        number = next(n for n, own in enumerate(ranks) if self.rank in own)
        peers, within = self.data, Group(is_lost=self.world.is_lost)
        if shape[2] > 1:
            peers, within = (_group_along(self.world, shape, axis) for axis in (1, 2))
        lines = (self.pipeline, within, self.tensor)
        long = [line for line in lines if line.num_ranks > 1]
        world = self.world.subgroup(ranks[number]) if len(long) > 1 else (*long, within)[0]
        own = self._replace(world=world, data=within)
        return self._replace(peers=peers, replica=own)

    @property
    def own(self) -> "Mesh":
        """The ranks that run each step together with this one."""
        return self.replica or self

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def num_ranks(self) -> int:
        return self.world.num_ranks

    @property
    def is_cut(self) -> bool:
        """Whether a rank holds a part of the model."""
        return self.data is not self.world

    @property
    def bytes_sent(self) -> int:
        return self.world.bytes_sent


def ranks_by_replica(shape: tuple[int, int, int, int]) -> list[list[int]]:
    """The ranks of each replica; `shape` is pipeline, replicas, data within one, tensor. Pure."""
    pipeline, replicas, within, tensor = shape
    width = within * tensor
    firsts = [stage * replicas * width for stage in range(pipeline)]
    return [
        [first + number * width + i for first in firsts for i in range(width)]
        for number in range(replicas)
    ]


def _group_along(world: Group, shape: Sequence[int], axis: int) -> Group:
    """The ranks that differ from this one along one axis alone."""
    if shape[axis] == world.num_ranks:
        return world
    if shape[axis] == 1:
        return Group(is_lost=world.is_lost)
    stride = math.prod(shape[axis + 1 :])
    first = world.rank - world.rank // stride % shape[axis] * stride
    return world.subgroup([first + i * stride for i in range(shape[axis])])


Check = Callable[[Group], None]


def accept(group: Group) -> None:
    """Any group will do."""


class Seat(Protocol):
    """A rank's place in the mesh. Called by the trainer, from its thread only.

    `form` first; `reform` after each `GroupLost`; `finish` when the last step is committed. `step`
    is the step that a report of a failure names. `saves`: this rank was asked to meet the others
    after a step, for all to save it.
    """

    step: int
    saves: bool

    def form(self, axes: Axes, check: Check = accept) -> Mesh:
        """The first mesh. `check` is called in each new group, before it is cut along axes."""
        ...

    def reform(self, lost: GroupLost) -> Mesh:
        """The mesh of the next generation; raises `lost` if none comes."""
        ...

    def formed(self, step: int, recovers: bool | None = None) -> None:
        """Say that the new group agrees on the state after `step`; `recovers`: whether it can
        replace a rank that dies, if that is known only now."""
        ...

    def stepped(self, info: StepInfo) -> None: ...
    def emit(self, event: Event) -> None:
        """Put an event on the run's record."""
        ...

    def asked(self) -> RankRequests: ...
    def finish(self, meets: bool = False) -> bool:
        """Wait until this rank may end: True; False if another generation comes first.

        If all only meet, that generation is what they wait for.
        """
        ...

    def close(self) -> None: ...


def _explain_wait(store: "dist.Store", world: World) -> str:
    """Who keeps the others waiting. Ranks that wait come to their deadlines together, and tell each
    other where they stand; who says nothing is somewhere else."""
    own, heard = RECORDER.standing(0.0), dict[int, Standing]()
    if own is None:
        return ""
    with suppress(RuntimeError):  # the store is gone with its rank
        store.set(str(world.rank), msgspec.json.encode(own).decode())
        until = time.monotonic() + ANSWER_S
        while len(heard) < world.num_ranks and time.monotonic() < until:
            for rank in {*range(world.num_ranks)} - {*heard}:
                if store.check([str(rank)]):
                    heard[rank] = msgspec.json.decode(store.get(str(rank)), type=Standing)
            time.sleep(0.02)
    found = explain_hang(heard, world.num_ranks, RECORDER.step)
    return found.text if found is not None else ""


class LauncherSeat:
    """The seat a launcher gave (torchrun, srun, mpirun), or a world of one. Not to be refilled."""

    def __init__(
        self, world: World, store: "dist.Store | None" = None, form_timeout_s: float | None = None
    ):
        """`store` is where ranks meet, if it is open already."""
        self.world, self.step, self.saves = world, 0, False
        named = os.environ.get("SHOAL_FORM_TIMEOUT_S", FORM_TIMEOUT_S)
        self._form_timeout_s = float(named) if form_timeout_s is None else form_timeout_s
        self._store = store
        self._held = ExitStack()  # what to close with the seat
        self._groups: list[Group] = []  # that this seat formed
        self._stop = 0  # the signal that asks for it
        self._handlers: dict[int, Any] = {}  # of signals, before ours

    def stop_on_term(self, *more: signal.Signals) -> None:
        """Let SIGTERM, and more signals, stop the training after a step that all ranks agree on."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, *more):
                self._handlers[number] = signal.signal(number, self._request_stop)

    def _request_stop(self, number: int, frame: object) -> None:
        self._stop = number

    def form(self, axes: Axes, check: Check = accept) -> Mesh:
        world = self.world
        if world.num_ranks == 1:
            return Mesh.form(Group(), axes, world.device)
        import torch.distributed as dist

        if not dist.is_initialized():
            timeout_s = self._form_timeout_s
            store = self._store or self._held.enter_context(
                launcher_store(world, meeting_place(world), timeout_s)
            )
            restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            wait_for_ranks(store, f"shoal/{restart}", world, timeout_s)
            form_group(store, f"shoal/{restart}", world, timedelta(seconds=timeout_s))
            explain = partial(_explain_wait, dist.PrefixStore(f"standing/{restart}", store), world)
            self._groups.append(Group(dist.group.WORLD, explain=explain))
        group = self._groups[0] if self._groups else Group(dist.group.WORLD)
        check(group)
        mesh = Mesh.form(group, axes, world.device)
        if self._groups:
            self._groups += [mesh.world, mesh.data, mesh.tensor, mesh.pipeline]
            self._groups += [mesh.peers, mesh.own.world, mesh.own.data]
        return mesh

    def reform(self, lost: GroupLost) -> Mesh:
        raise lost

    def formed(self, step: int, recovers: bool | None = None) -> None:
        """There is no supervisor to inform."""

    def stepped(self, info: StepInfo) -> None:
        """There is no supervisor to inform."""

    def emit(self, event: Event) -> None:
        log.info("%s", event)

    def asked(self) -> RankRequests:
        return RankRequests(stop=bool(self._stop))

    def finish(self, meets: bool = False) -> bool:
        return True

    def close(self) -> None:
        while self._handlers:
            signal.signal(*self._handlers.popitem())
        if self._groups:
            leave_group()
            # What still has the trainer has the mesh: Gloo's threads must not outlive it, since
            # a process that exits while they run may abort.
            while self._groups:
                self._groups.pop().handle = None
        self._held.close()
