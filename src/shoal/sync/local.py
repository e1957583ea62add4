"""Local SGD: replicas step on their own and average their weights every H steps.

Each replica trains on its share of every global batch with its own optimizer; after H steps, and
after the last one, weights and buffers become the mean over replicas. Optimizer state stays local.
Use it where the link is slow: an H-th of the traffic, for results that differ from training on the
whole batch. Losses and requests are agreed on when weights are; in between, a replica reports its
own.

A replica is a mesh of ranks that make each step together, by a strategy of their own; each of them
agrees with its peers, which hold the same part of the other replicas, on what it holds.

A replica of one rank that dies is replaced alone: the newcomer takes the weights of the last
agreement, which the others keep, and an optimizer that has seen nothing, and does the window again.
An agreement has two phases (`averaging.py`), so that after a death either all survivors count it or
none does. Replicas that join a run begin in the same way, and others leave it, where a window ends
(`training/resizing.py`). Only in fragments, of which each is agreed on at another time, and where a
replica takes several ranks, does a death take all back to a checkpoint, and no replica joins.

Zinkevich et al. 2010; Stich 2019, arXiv 1805.09767. Cost: 2/H times the weights' bytes per step; in
memory the weights once more. Read next: `outer.py`, where an outer optimizer takes the place of the
average.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from shoal.comm.collectives import Group
from shoal.comm.mesh import NO_REQUESTS, Mesh, RankRequests
from shoal.data.ledger import add_marks
from shoal.data.split import share
from shoal.errors import AgreementLost, GroupLost
from shoal.faults import faultpoint
from shoal.logs import warn_on_screen
from shoal.numerics.fragments import FragmentSchedule
from shoal.parallel.fsdp import held_parameters
from shoal.parallel.layout import WHOLE, LocalLayout, Slice, slices_of
from shoal.plans.plan import Plan
from shoal.sync.allreduce import AllReduce
from shoal.sync.averaging import StagedAverage, average_messages
from shoal.sync.costs import (
    DOUBLE,
    SINGLE,
    Amount,
    Message,
    StepCosts,
    added_up,
    all_reduce_message,
)
from shoal.sync.fsdp import FullySharded
from shoal.sync.named_parts import PartSums, gather_parts
from shoal.sync.outer import OuterConfig, OuterOptimizer, anchor_memory, outer_messages
from shoal.sync.rank_layout import LocalParameter, RankLayout
from shoal.sync.replicas import REPLICAS, MergedReplicas, replica_name
from shoal.sync.rounds import AttachedModel
from shoal.sync.state import ShardedState, StateSource
from shoal.sync.strategy import GlobalStep, LocalStep, ServerLink, Strategy
from shoal.sync.zero import ZeroSharded

NUM_WINDOW_NUMBERS = 7  # numbers that each replica sends as a window ends
_MEET, _BOUND = 2, 4  # in what a rank says of requests: a meeting; that it has heard the others


class _WindowReport(NamedTuple):
    """What a replica tells the others as a window ends."""

    numbers: list[float]
    parts: bytes  # of its loss, by name


class LocalSGD:
    """Without a `rule` weights are averaged, all at once. `make_inner` makes the strategy of a
    replica, given the number of its pieces.

    `in_lockstep` is about steps, of which each replica takes its own.
    """

    in_lockstep = False
    _seat_step = 0  # the last one after which any replica of the group counts an agreement

    @property
    def attached(self) -> AttachedModel:
        return self.inner.attached

    @property
    def servers(self) -> ServerLink | None:
        return None

    def __init__(
        self,
        num_pieces: int,
        timetable: FragmentSchedule,
        make_inner: Callable[[int], Strategy],
        rule: OuterConfig | None = None,
        checks: bool = False,
    ):
        """With `checks` a replica may find that it must make a step again, with a smaller loss
        scale of its own."""
        self.num_pieces, self.timetable, self._make_inner = num_pieces, timetable, make_inner
        self.checks = checks
        self.outer = None if rule is None else OuterOptimizer(rule, timetable)
        self.step = 0
        self.agreed = 0  # the last step after which this replica counts an agreement
        # Weights as of then, if no outer optimizer has them.
        self._agreed_weights: dict[str, Tensor] = {}
        self._last_made = 0  # the step that is made, and perhaps not agreed on
        self._means: StagedAverage | None = None  # that came, and may not count yet
        self._is_alike = True  # whether weights are the same on all replicas
        self._marked, self._knows_marks = 0, True  # samples since weights were last averaged
        self._mark = 0  # of them and of those of the step under way
        self._num_loaded = 0  # samples of the step under way
        self._told = _WindowReport([], b"")  # by this rank to the others, of a window
        self._gathered_in: Group | None = None  # who they were

    def attach(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mesh: Mesh,
        holding: LocalLayout = WHOLE,
    ) -> None:
        self.mesh, self.group, self.holding = mesh, mesh.peers, holding
        pieces = share(self.group.rank, self.group.num_ranks, self.num_pieces)
        if not hasattr(self, "inner") or len(pieces) != len(self.pieces):
            self.inner = self._make_inner(len(pieces))
        self.pieces: range = pieces
        self.inner.attach(model, optimizer, mesh.own, holding)
        self.model, self.buffers = model, self.inner.buffers
        # Those that hold the same of this replica: under ZeRO 3 each has its own shards.
        self._alike = Group() if holding.within else mesh.own.data
        self._join_group(mesh)

    def detach(self) -> None:
        self.inner.detach()
        if self.outer is not None:
            self.outer.detach()

    def microbatch(self, first: bool, last: bool) -> AbstractContextManager[object]:
        if first and self.mesh.world.is_lost():
            # Now, and not when the window ends: a newcomer waits for all to come.
            raise GroupLost("the generation is over")
        if first and self.outer is not None:
            self.outer.send_again()
        return self.inner.microbatch(first, last)

    def exchange(self, local: LocalStep, want_norm: bool) -> GlobalStep:
        own = self._exchange_within(local, want_norm)
        # Others hear of a step that ends a window once it can be made.
        tells = self.timetable.ends_window(self.step + 1)
        if not tells or (self.checks and not is_finite(self.inner, own)):
            # Heard with the others: all stop, or meet, after the same step.
            return own._replace(mark=None, asked=NO_REQUESTS)
        stop, meet = own.asked
        mark = self._mark if self._knows_marks else -1
        asked = stop + _MEET * meet
        parts = b""
        if local.losses and not self.holding.rank:  # one of those who know them
            parts = local.packed_parts(self.pieces.start + self.attached.rounds.pieces.start)
        self._told = _WindowReport(
            [sum(own.sums), sum(own.weights), local.busy_s, asked, mark, local.digest, len(parts)],
            parts,
        )
        rows, named = self._gather_numbers()
        # The first rank of each replica tells for all of it.
        width = self.mesh.own.data.num_ranks * self.mesh.tensor.num_ranks
        firsts = [rows[number * width] for number in range(self.group.num_ranks)]
        heard = _combine_requests([int(row[3]) for row in rows])
        self._told.numbers[3] = heard.stop + _BOUND
        return own._replace(
            sums=[row[0] for row in firsts],
            weights=[row[1] for row in firsts],
            busy_s=[row[2] for row in rows],
            asked=heard,
            mark=None if any(row[4] < 0 for row in rows) else add_marks(r[4] for r in firsts),
            digests=[row[5] for row in rows],
            parts=named,
        )

    def update(self, scale: float, check: bool = True) -> bool:
        """Raises AgreementLost if the step is made and replicas could not agree after it: then
        call it again, in a new group."""
        step = self.step + 1
        ends = self.timetable.ends_window(step)
        if self._last_made != step:
            if not self.inner.update(scale, check):
                return False
            self._last_made = step
        try:
            self._agree(step, ends)
        except GroupLost as lost:
            raise AgreementLost(str(lost)) from lost
        self._commit(step, ends)
        return True

    def gradients(self) -> dict[str, list[Slice]]:
        return self.inner.gradients()

    @staticmethod
    def costs(layout: RankLayout) -> StepCosts:
        """Of a window; without fragments, what replicas send each other leaves in its last step."""
        plan = layout.plan
        times = f"once in {plan.local_steps} steps"
        told = [window_message(layout)]
        if plan.fragments == 1:
            size = plan.num_ranks * DOUBLE
            told.append(all_reduce_message("that all have it", "world", [size], layout))
        if plan.has_anchor:
            sums = [
                *outer_messages(layout, f"outer gradients, {times}"),
                *mean_messages(layout, f"buffers, {times}"),
            ]
            return window_costs(layout, anchor_memory(layout), sums, told)
        weights = [p for p in layout.parameters if p.dtype.is_floating_point]
        kept = Amount(sum(p.num_bytes for p in weights), "the weights of the last agreement")
        sums = mean_messages(layout, f"weights, {times}", weights)
        return window_costs(layout, kept, sums, told)

    def state_dict(self) -> ShardedState:
        """What replicas do not share carries the replica's number."""
        state = self.inner.state_dict()
        own = replica_name("", self.group.rank)
        tensors = {
            name if self._is_alike and name.startswith("model.") else own + name: parts
            for name, parts in state.tensors.items()
        }
        if self.outer is not None:
            tensors |= self.outer.state_dict(own)
        return ShardedState(tensors, state.plain | {REPLICAS: self.group.num_ranks})

    def load_state_dict(self, source: StateSource, step: int) -> None:
        self._continue_after(step)
        same = source.plain.get(REPLICAS) == self.group.num_ranks
        own = MergedReplicas(source, self.group.rank if same else None)
        self.inner.load_state_dict(own, step)
        first = next((f"model.{name}" for name, _ in self.model.named_parameters()), "")
        self._is_alike = not same or first in source
        self.agreed = self._load_agreed(own, MergedReplicas(source), step)

    def newcomer_step(self) -> int:
        return self._seat_step

    def newcomer_state(self) -> ShardedState:
        """What replicas share, as of the last agreement, and of one of them what none trains."""
        if self.outer is not None:
            return ShardedState(self._untrained() | self.outer.shared_state(), {})
        agreed = self._agreed_weights.items()
        shared = {f"model.{n}": slices_of(n, tensor, self.holding) for n, tensor in agreed}
        return ShardedState(self._untrained() | shared, {})

    def join(self, source: StateSource, step: int) -> None:
        self._continue_after(step)
        self._take_shared(source, step)
        self.agreed, self._is_alike = step, True
        warn_on_screen(
            f"Replica {self.group.rank} continues from step {step}, where replicas agreed "
            "last, with an optimizer that has seen nothing yet. "
            "The others keep their progress."
        )

    @property
    def is_ending(self) -> bool:
        """Whether replicas agree after the step under way, and hold the agreement before alike."""
        return self._knows_marks and self.timetable.ends_window(self.step + 1)

    @property
    def is_alike(self) -> bool:
        """Whether all replicas have the same weights now, and know what was agreed on."""
        return self._is_alike and self._knows_marks

    def agreed_tensors(self) -> list[tuple[Tensor, tuple[str, ...]]]:
        """What each replica keeps of the last agreement, with names."""
        if self.outer is not None:
            return self.outer.agreed_tensors()
        return [(tensor, ("agreed", name)) for name, tensor in self._agreed_weights.items()]

    def _join_group(self, mesh: Mesh) -> None:
        """Learn what was agreed on last. Every rank must reach this."""
        if self.outer is not None:
            self.outer.attach(self.model, (self.group, self._alike), self.holding)
        elif not self._agreed_weights:
            self._agreed_weights = _copy_weights(self.model, self.holding)
        self._seat_step = int(
            max(row[0] for row in self.mesh.world.all_gather_numbers([self.agreed]))
        )

    def _agree(self, step: int, ends: bool) -> None:
        """Receive the replicas' average, staged. Every rank must call it."""
        if step <= self._seat_step:
            return  # some count it, so all had it before the group broke
        if ends and self._gathered_in is not self.mesh.world:
            self._gather_numbers()  # some replicas, and a newcomer, do not have them yet
        if self.outer is not None:
            self.outer.exchange(step)
        if ends:
            faultpoint("local.bringing", step)
            weights = {} if self.outer else held_weights(self.model, self.holding)
            tensors = [*weights.values(), *self.model.buffers()]
            self._means = StagedAverage(self.group, tensors, self._alike)
            if self.timetable.num_fragments == 1:
                faultpoint("local.brought", step)
                # A rank that gets all of them knows that all have the average.
                self.mesh.world.all_gather_numbers([step])
                faultpoint("local.agreed", step)

    def _commit(self, step: int, ends: bool) -> None:
        """Commit a step, and the agreement after it. Never communicates."""
        if self.outer is not None:
            self.outer.commit(step)
        if self._means is not None:
            self._means.apply()
            if self.outer is None:
                held = held_weights(self.model, self.holding)
                self._agreed_weights = {
                    n: self._means[p] for n, p in held.items() if n in self._agreed_weights
                }
            self._means = None
            self.buffers.hold()
        self.step = step
        self.agreed = step if ends else self.agreed
        self._marked = 0 if ends else self._mark
        self._knows_marks |= ends
        self._is_alike = self.timetable.are_replicas_equal(step)

    def _gather_numbers(self) -> tuple[list[list[float]], PartSums]:
        """The numbers of all replicas, and the named parts of their losses."""
        self._gathered_in = self.mesh.world
        rows = self.mesh.world.all_gather_numbers(self._told.numbers)
        lengths = [int(row[6]) for row in rows]
        return rows, gather_parts(self.mesh.world, lengths, self._told.parts) if any(
            lengths
        ) else {}

    def _exchange_within(self, local: LocalStep, want_norm: bool) -> GlobalStep:
        """A step of this replica alone."""
        own = self.inner.exchange(local, want_norm)
        assert own.mark is not None, "its ranks are in lockstep"
        self._mark = add_marks((self._marked, own.mark))
        self._num_loaded = own.num_samples or 0
        busy_s = [local.busy_s] * self.mesh.world.num_ranks
        return own._replace(busy_s=busy_s, num_samples=None, digests=())

    def _continue_after(self, step: int) -> None:
        self.step, self._last_made = step, 0
        self._marked, self._knows_marks = 0, self.timetable.ends_window(step)

    def _take_shared(self, source: StateSource, step: int) -> None:
        """As a newcomer, take what the others share."""
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            source.fill(f"model.{name}", slices_of(name, tensor, self.holding))
        self.buffers.hold()
        if self.outer is None:
            self._agreed_weights = _copy_weights(self.model, self.holding)
        else:
            self.outer.load_state_dict(source, source, step)

    def _load_agreed(self, own: StateSource, mean: StateSource, step: int) -> int:
        """Take over what a state after `step` tells of the last agreement; after which step it was.

        Without an anchor the weights of then are the oldest to go back to.
        """
        if self.outer is not None:
            has_anchor = self.outer.load_state_dict(own, mean, step)
            return step - step % self.timetable.local_steps if has_anchor else step
        self._agreed_weights = _copy_weights(self.model, self.holding)
        return step

    def _untrained(self) -> dict[str, list[Slice]]:
        """Buffers, and weights that are not averaged."""
        others = (*self.model.named_parameters(), *self.model.named_buffers())
        return {f"model.{n}": slices_of(n, t, self.holding) for n, t in others}


def lockstep_class(plan: Plan) -> type[Strategy]:
    """What the ranks of a replica train with, or those of a run in lockstep."""
    if plan.zero == 3:
        return FullySharded
    return ZeroSharded if plan.zero else AllReduce


def is_finite(inner: Strategy, own: GlobalStep) -> bool:
    """Whether a replica can make a step that it has exchanged. Every rank of it must call it."""
    parts = (part.tensor for parts in inner.gradients().values() for part in parts)
    known = math.isfinite(own.loss) and math.isfinite(own.norm or 0.0)
    finite = known and all(bool(torch.isfinite(tensor).all()) for tensor in parts)
    world = inner.attached.mesh.world
    return not any(row[0] for row in world.all_gather_numbers([not finite]))


def held_weights(model: nn.Module, holding: LocalLayout) -> dict[str, Tensor]:
    """What a rank holds of the weights that replicas average."""
    held = held_parameters(model).items()
    return {n: p for n, p in held if p.is_floating_point() and n not in holding.absent}


def _copy_weights(model: nn.Module, holding: LocalLayout) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in held_weights(model, holding).items()}


def _combine_requests(flags: Sequence[int]) -> RankRequests:
    """What to do. Some may have heard it in a group that broke since: all stop if they will, and
    none meets, since a meeting is that group's. Else one that was asked is enough."""
    flagged = [flag for flag in flags if flag & _BOUND] or flags
    return RankRequests(
        stop=any(flag & 1 for flag in flagged), meet=any(flag & _MEET for flag in flagged)
    )


def mean_messages(
    layout: RankLayout, what: str, parameters: Iterable[LocalParameter] = ()
) -> list[Message]:
    """Buffers that are averaged where a window ends, and some parameters with them."""
    kinds = {SINGLE: layout.facts.averaged_buffers}
    for p in parameters:
        kinds[p.dtype.itemsize] = kinds.get(p.dtype.itemsize, 0) + p.num_elements
    rows = [(count, size) for size, count in kinds.items() if count]
    return average_messages(layout, what, rows)


def window_message(layout: RankLayout) -> Message:
    """What replicas tell each other of a window."""
    size = NUM_WINDOW_NUMBERS * layout.plan.num_ranks * DOUBLE
    return all_reduce_message("losses and flags", "world", [size], layout)


def window_costs(
    layout: RankLayout, kept: Amount, sums: Sequence[Message], told: Sequence[Message]
) -> StepCosts:
    """Of the steps of a replica, and of what it sends the others and keeps for them."""
    own, times = lockstep_class(layout.plan).costs(layout), layout.plan.local_steps
    memory = msgspec.structs.replace(own.memory, extra=added_up(own.memory.extra, kept))
    sums, told = [*_repeated(own.sums, times), *sums], [*_repeated(own.agreement, times), *told]
    return StepCosts(own.num_stepped, memory, sums, told)


def _repeated(messages: Iterable[Message], times: int) -> list[Message]:
    return [
        msgspec.structs.replace(m, count=m.count * times, num_bytes=m.num_bytes * times)
        for m in messages
    ]
