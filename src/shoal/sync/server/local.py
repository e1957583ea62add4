"""Local steps through servers: replicas step on their own, and servers hold the anchor.

In lockstep it is `sync/local.py` with servers in the place of the all-reduce, and the same bits;
out of lockstep a replica waits for no other, and reports its own losses. Either way the last
agreement is on the servers, so a replica that dies is replaced alone: the newcomer does its seat's
window again, from the anchor and with a new optimizer, and the others keep their progress.

That needs an order. In lockstep all ranks first agree on losses and buffers, and then push: so
while a server lacks a push of a window, every rank repeats all of that window's agreement in a new
group, and once no server lacks one, no rank does. Cost and codecs: `outer_client.py`.

With a deadline no replica waits for a late one, so each reports its own losses and keeps its own
buffers, as out of lockstep; the server that closes rounds counts samples.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import msgspec
from torch import Tensor

from shoal.comm.mesh import NO_REQUESTS, Mesh, RankRequests
from shoal.logs import warn_once
from shoal.parallel.layout import Slice
from shoal.sync.averaging import StagedAverage
from shoal.sync.costs import DOUBLE, Amount, Message, StepCosts, all_reduce_message
from shoal.sync.local import LocalSGD, is_finite, mean_messages, window_costs, window_message
from shoal.sync.rank_layout import RankLayout
from shoal.sync.replicas import REPLICAS, replica_name
from shoal.sync.server.anchor import served_weights
from shoal.sync.server.messages import RoundClosed
from shoal.sync.server.outer_client import OuterClient, push_message, pushed_memory
from shoal.sync.server.parts import spread
from shoal.sync.server.worker_costs import shared_messages, spread_message
from shoal.sync.server.worker_mesh import SharedByParts
from shoal.sync.state import ShardedState, StateSource
from shoal.sync.strategy import GlobalStep, LocalStep, ServerLink, Strategy


class LocalServerStrategy(LocalSGD):
    """A newcomer continues where servers say that its seat is."""

    late_mark: int | None = None

    def __init__(
        self,
        num_pieces: int,
        outer_client: OuterClient,
        make_inner: Callable[[int], Strategy],
        checks: bool = False,
    ):
        super().__init__(num_pieces, outer_client.timetable, make_inner, checks=checks)
        self.outer_client = outer_client
        self._meets = outer_client.bound == 0 and not outer_client.closes_early
        self._num_samples = self._pending_samples = (
            0  # since a round was joined; with the step under way
        )
        self._joined_round = True  # the last round
        self._shared: SharedByParts | None = None

    def _join_group(self, mesh: Mesh) -> None:
        self._weights = served_weights(self.model)
        if self._speaks:
            self.outer_client.open(self._weights, mesh, self.holding)
        window = self.outer_client.newcomer_step() if self._speaks else 0
        if self._alike.num_ranks > 1:
            window = int(self._alike.all_gather_numbers([window])[0][0])
        self._seat_step = self.outer_client.last_step_before(window)
        if not self._meets and mesh.own.num_ranks > 1:
            self._shared = SharedByParts(mesh.own, self.holding, self._weights.items())

    @property
    def _speaks(self) -> bool:
        """Whether this rank speaks with servers: one of those that hold the same of a replica."""
        return self._alike.rank == 0

    def detach(self) -> None:
        super().detach()
        self.outer_client.detach()

    def microbatch(self, first: bool, last: bool) -> AbstractContextManager[object]:
        self.wait_for_parameters()
        return super().microbatch(first, last)

    @property
    def servers(self) -> ServerLink:
        return self

    hold_parameters = False

    @property
    def is_apart(self) -> bool:
        return self.outer_client.is_apart

    @property
    def trace(self) -> tuple[list[int], ...]:
        return self.outer_client.trace

    def requests(self) -> RankRequests:
        return self.outer_client.requests()

    def tables(self, dense: bool) -> dict[str, list[Slice]]:
        """Replicas hold all of the model."""
        return {}

    def types(self) -> ShardedState | None:
        """Replicas hold all of the model."""
        return None

    def summary(self) -> dict[str, Any]:
        found, last = self.outer_client.summary(), self.outer_client.last_round
        if last is None:
            return found
        counts = {"closed": last.num_rounds, "early": last.num_early, "late": last.num_late}
        return found | {"rounds": counts}

    def wait_for_parameters(self) -> None:
        """Wait for the anchor of the window that is due."""
        if self._speaks:
            self.outer_client.wait_for_turn()

    @property
    def is_ending(self) -> bool:
        return self._meets and super().is_ending

    @property
    def is_alike(self) -> bool:
        return self._meets and super().is_alike

    def agreed_tensors(self) -> list[tuple[Tensor, tuple[str, ...]]]:
        if not self._speaks:
            return []
        anchor = self.outer_client.anchor
        return [(p, ("outer", "anchor", name)) for name, p in anchor.named_parameters()]

    def exchange(self, local: LocalStep, want_norm: bool) -> GlobalStep:
        step = self.step + 1
        if self._meets:
            return super().exchange(local, want_norm)
        own = self._exchange_within(local, want_norm)._replace(mark=None)
        self._pending_samples = self._num_samples + self._num_loaded
        asked = NO_REQUESTS
        if self.timetable.ends_window(step) and not (
            self.checks and not is_finite(self.inner, own)
        ):
            asked = self.outer_client.requests_after(step, own.asked, self.mesh.own.world)
        return own._replace(asked=asked)

    @staticmethod
    def costs(layout: RankLayout) -> StepCosts:
        """Of a window. Where replicas do not wait for each other, they tell each other nothing."""
        times = f"once in {layout.plan.local_steps} steps"
        kept = Amount(0, "nothing") if layout.place.data else pushed_memory(layout)
        pushed = push_message(layout, f"outer gradients, {times}")
        if layout.place.data:
            pushed = msgspec.structs.replace(pushed, count=0, num_bytes=0)
        if not layout.plan.waits_for_all:
            sums = [pushed, spread_message(layout), *shared_messages(layout)]
            return window_costs(layout, kept, sums, _told_apart(layout))
        means = mean_messages(layout, f"buffers, {times}")
        sums = [pushed, spread_message(layout), *means]
        return window_costs(layout, kept, sums, [window_message(layout)])

    def state_dict(self) -> ShardedState:
        state = self.inner.state_dict()
        own = replica_name("", self.group.rank)
        tensors = {
            name if name.startswith("model.") else own + name: parts
            for name, parts in state.tensors.items()
        }
        if not self._meets and self.group.rank:  # buffers differ: those of rank 0 are kept
            for name in self._untrained():
                tensors.pop(name, None)
        if self._speaks:
            tensors |= self.outer_client.outer_state(own)
        return ShardedState(tensors, state.plain | {REPLICAS: self.group.num_ranks})

    def _agree(self, step: int, ends: bool) -> None:
        if not ends:
            return
        if self._meets and self._seat_step < step:  # a server misses some of this window's pushes
            if self._gathered_in is not self.mesh.world:
                self._gather_numbers()  # some replicas, and a newcomer, do not have them yet
            self._means = StagedAverage(self.group, [*self.model.buffers()], self._alike)
        if self.outer_client.closes_early:
            self._agree_in_round(step)
        elif self._speaks:
            self.outer_client.agree(step)
        spread(self._alike, self._weights.values())
        if self._shared is not None:
            self._shared.spread()

    def _agree_in_round(self, step: int) -> None:
        """The first rank of the replica joins a round with it, once servers of all parts have what
        it brings; the others hear what was decided."""
        client, world = self.outer_client, self.mesh.own.world
        if self._speaks:
            client.push_window(step)
            client.check_rows(first=int(world.rank == 0))
        if world.num_ranks > 1:
            world.all_gather_numbers([step])
        joined = None
        if world.rank == 0:
            joined = client.join_round(self._pending_samples, self._mark)
        if world.num_ranks > 1:
            told = _round_in_numbers(joined, self.group.num_ranks)
            joined = _round_of(world.all_gather_numbers(told)[0])
        assert joined is not None
        client.last_round, self._joined_round = joined, joined.is_in
        if self._speaks:
            client.follow(joined)
        self.late_mark = joined.mark if joined.is_in and self._knows_marks else None
        if not joined.is_in and world.rank == 0:
            warn_once(
                f"Replica {self.group.rank} came after the deadline of a round. Its progress "
                "goes into a later one, with its samples. Is it often so? Give a longer deadline."
            )

    def _commit(self, step: int, ends: bool) -> None:
        super()._commit(step, ends)
        counts = ends and self._joined_round
        self._num_samples = 0 if counts else self._pending_samples
        self._marked = 0 if counts else self._mark
        self.late_mark = self.late_mark if ends else None

    def newcomer_state(self) -> ShardedState:
        """What servers do not have."""
        return ShardedState(self._untrained(), {})

    def _take_shared(self, source: StateSource, step: int) -> None:
        for name, places in self._untrained().items():
            source.fill(name, places)
        self.buffers.hold()
        self._num_samples = 0
        self.outer_client.begin_after(step)

    def _load_agreed(self, own: StateSource, mean: StateSource, step: int) -> int:
        if self._speaks:
            self.outer_client.load_outer(own, mean, step)
        self._num_samples = 0
        return step

    def _untrained(self) -> dict[str, list[Slice]]:
        served = {f"model.{name}" for name in self._weights}
        return {name: p for name, p in super()._untrained().items() if name not in served}


def _round_in_numbers(joined: RoundClosed | None, num_replicas: int) -> list[float]:
    """To be sent; zeros from who does not know."""
    if joined is None:
        return [0.0] * (5 + 2 * num_replicas)
    counts = joined.counts or [0.0] * num_replicas
    mark = -1 if joined.mark is None else joined.mark
    first = [joined.is_in, bool(joined.counts), mark, joined.num_rounds, joined.num_early]
    return [*map(float, first), *counts, *map(float, joined.num_late)]


def _round_of(numbers: list[float]) -> RoundClosed:
    is_in, has_counts, mark, num_rounds, num_early, *rest = numbers
    count = len(rest) // 2
    return RoundClosed(
        request=0,
        is_in=bool(is_in),
        counts=rest[:count] if has_counts else [],
        mark=None if mark < 0 else int(mark),
        num_rounds=int(num_rounds),
        num_early=int(num_early),
        num_late=[*map(int, rest[count:])],
    )


def _told_apart(layout: RankLayout) -> list[Message]:
    """What the ranks of a replica tell each other of a window that is not waited for."""
    plan = layout.plan
    size = plan.num_ranks_apart * DOUBLE
    told = [all_reduce_message("when to stop", "replica", [2 * size], layout)]
    if plan.deadline_s is not None:
        sizes = [size, (5 + 2 * plan.num_apart) * size]
        told.append(all_reduce_message("who is in a round", "replica", sizes, layout))
    return told
