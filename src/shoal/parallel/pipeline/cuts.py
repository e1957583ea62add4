"""Where to cut a tape into stages. Pure: the same tape gives the same cuts on every rank.

A stage is a run of events of the model's own forward. Values made before a cut and used after it
are sent; a value that a stage does not use passes through it. Cuts balance the estimated cost of
the stages (flops, bytes moved, bytes received), and fall only where a stage can start: nothing
was drawn since the random generator was last set, no checkpointed call is open, and no two views
of one memory would be sent apart.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from shoal.errors import PlanError
from shoal.parallel.pipeline.tape import Event, Tape, ValueLeaf

FLOPS_PER_BYTE_SENT = 4  # for the stage that sends, and for the one that receives
SLACK = 1.05  # a stage may be this much slower than the best if that saves bytes


@dataclass(frozen=True)
class StageSpec:
    """A run of events, and what it needs and gives."""

    index: int
    start: int
    stop: int
    parameters: tuple[str, ...]  # used here, by their first names
    buffers: tuple[str, ...]
    received: tuple[int, ...]  # numbers of values
    sent: tuple[int, ...]
    share: float  # of the whole cost
    block: int  # that the random generator is set for where the stage starts
    splits_backward: bool  # whether weights' gradients may be left for later
    first: str
    last: str

    def __str__(self) -> str:
        return f"stage {self.index}: {self.first} to {self.last} ({self.share:.0%} of the cost)"


@dataclass(frozen=True)
class StagePlan:
    tape: Tape
    stages: tuple[StageSpec, ...]

    @cached_property
    def holders(self) -> dict[str, list[int]]:
        """Parameter -> the stages that use it. One that no stage uses is kept by the first."""
        found: dict[str, list[int]] = {name: [] for name in self.tape.parameters}
        for stage in self.stages:
            for name in stage.parameters:
                found[name].append(stage.index)
        return {name: stages or [0] for name, stages in found.items()}

    def held_by(self, stages: Sequence[int]) -> set[str]:
        """The names of the parameters that a rank with these stages keeps."""
        return {name for name, users in self.holders.items() if not set(users).isdisjoint(stages)}


def split_stages(
    tape: Tape, num_stages: int, rank_of: Callable[[int], int] = lambda stage: stage
) -> StagePlan:
    """Cut a tape into stages of about the same cost, each with a parameter of its own.

    `rank_of` says which rank runs a stage: none may hold the whole model, so a module that is used
    again and again stays on one stage if need be.
    """
    places = cut_places(tape)
    plan = _split_at(tape, num_stages, places)
    if not _holds_all(plan, rank_of):
        return plan
    again = _used_again(tape)
    for spans in (list(again.values()), *([span] for span in again.values())):
        outside = [p for p in places if not any(first < p <= last for first, last in spans)]
        if most_stages(tape, outside) >= num_stages:
            around = _split_at(tape, num_stages, outside)
            if not _holds_all(around, rank_of):
                return around
    raise PlanError(_whole_on_one(tape, num_stages, list(again)))


def _split_at(tape: Tape, num_stages: int, places: Sequence[int]) -> StagePlan:
    most = most_stages(tape, places)
    if num_stages > most:
        advice = f"Use at most {most} stages (pipeline ranks x stages per rank)."
        raise PlanError(
            f"{tape.model} cannot be cut into {num_stages} stages: {most} is the most. Every stage "
            "must use a parameter, and what depends on data or draws at random stays whole. "
            f"{advice if most > 1 else 'Leave out pipeline.'}"
        )
    costs = np.array(list(accumulate((e.cost for e in tape.events), initial=0.0)))
    owns = np.array(list(accumulate((len(e.parameters) for e in tape.events), initial=0)))
    sent = np.array([float(FLOPS_PER_BYTE_SENT * size) for size in bytes_crossing(tape)])
    sent[-1] = 0.0  # what the model returns stays where it is
    cuts = balance(costs, owns, sent, [0, *places, len(tape.events)], num_stages)
    return _plan(tape, cuts)


def _holds_all(plan: StagePlan, rank_of: Callable[[int], int]) -> bool:
    """Whether some rank would hold every parameter."""
    ranks: dict[int, list[int]] = {}
    for stage in plan.stages:
        ranks.setdefault(rank_of(stage.index), []).append(stage.index)
    return any(plan.held_by(stages) == set(plan.tape.parameters) for stages in ranks.values())


def _used_again(tape: Tape) -> dict[str, tuple[int, int]]:
    """What uses parameters several times, with the first and the last event of it."""
    found: dict[str, list[int]] = {}
    for index, event in enumerate(tape.events):
        for name in [event.name] if event.is_unit else event.parameters:
            if event.parameters:
                found.setdefault(name, []).append(index)
    return {name: (at[0], at[-1]) for name, at in found.items() if len(at) > 1}


def _whole_on_one(tape: Tape, num_stages: int, again: Sequence[str]) -> str:
    what = f"It uses {', '.join(again[:3])} several times" if again else "Its parameters are shared"
    return (
        f"{tape.model} cannot be cut into {num_stages} stages so that no rank holds all of its "
        f"parameters. {what}, and every stage that does holds them. Use data or zero, or fewer "
        "stages."
    )


def recut(tape: Tape, owners: Sequence[set[str]]) -> StagePlan:
    """Cut another tape of the same model so that each stage uses only parameters it holds."""
    allowed = {0, *cut_places(tape), len(tape.events)}
    sizes = bytes_crossing(tape)
    cuts, stage, last_owned = [0], 0, 0
    for index, event in enumerate(tape.events):
        if not event.parameters:
            continue
        while not set(event.parameters) <= owners[stage]:
            places = [c for c in range(max(last_owned, cuts[-1]), index + 1) if c in allowed]
            if not places:
                raise PlanError(_no_recut(event))
            cuts.append(min(places, key=lambda c: (sizes[c], -c)))
            stage += 1
            if stage == len(owners):
                raise PlanError(_no_recut(event))
        last_owned = index + 1
    while len(cuts) < len(owners):
        cuts.append(len(tape.events))
    return _plan(tape, [*cuts, len(tape.events)])


def cut_places(tape: Tape) -> list[int]:
    """The events that a stage may start with, the first left out."""
    return [
        index
        for index, event in enumerate(tape.events)
        if index and event.is_fresh and not event.is_inside and index not in tape.uncut
    ]


def most_stages(tape: Tape, places: Sequence[int]) -> int:
    """How many stages there can be with a parameter in each: cut as early as can be."""
    num_stages, owned = 0, False
    allowed = set(places)
    for index, event in enumerate(tape.events):
        if owned and index in allowed:
            num_stages, owned = num_stages + 1, False
        owned = owned or bool(event.parameters)
    return num_stages + owned


def live_at(tape: Tape, cut: int) -> tuple[int, ...]:
    """The values that were made before a cut and are used after it."""
    used = set(tape.final).union(*(event.uses for event in tape.events[cut:]))
    return tuple(sorted(number for number in used if tape.made_at[number] < cut))


def bytes_crossing(tape: Tape) -> list[int]:
    """The bytes that a cut before each event would send; nothing before the first."""
    last_use = dict.fromkeys(tape.final, len(tape.events))
    for index, event in enumerate(tape.events):
        for number in event.uses - tape.final:
            last_use[number] = index
    change = [0] * (len(tape.events) + 2)
    for number, last in last_use.items():  # live at the cuts made + 1 to last
        change[tape.made_at[number] + 1] += tape.values[number].num_bytes
        change[last + 1] -= tape.values[number].num_bytes
    return list(accumulate(change[: len(tape.events) + 1]))


def balance(costs: Any, owns: Any, sent: Any, places: Sequence[int], num_stages: int) -> list[int]:
    """The cuts with the least cost of the slowest stage; among about as good ones, the least sent.

    `costs` and `owns` are sums up to each event, `sent` is the price of a cut there.
    """
    at = np.array(sorted(set(places)))
    took = costs[at][None, :] - costs[at][:, None]  # of a stage from i to j
    took = took + sent[at][:, None] + sent[at][None, :]
    took = np.where(owns[at][None, :] - owns[at][:, None] > 0, took, np.inf)
    took[np.tril_indices(len(at))] = np.inf
    slowest, _ = _best(took, num_stages, np.maximum)
    price = np.where(took <= slowest * SLACK, sent[at][:, None], np.inf)
    _, path = _best(price, num_stages, np.add)
    return [int(at[i]) for i in path]


def _best(price: Any, num_stages: int, join: Any) -> tuple[float, list[int]]:
    """The cheapest way from the first place to the last in so many steps."""
    best, came_from = price[0], []
    price = np.ascontiguousarray(price.T)  # the minimum is sought along rows, several times faster
    for _ in range(num_stages - 1):
        ways = join(best, price)
        came_from.append(ways.argmin(axis=1))
        best = ways.min(axis=1)
    path = [len(best) - 1]
    for step in reversed(came_from):
        path.append(int(step[path[-1]]))
    return float(best[-1]), [0, *reversed(path)]


def _plan(tape: Tape, cuts: Sequence[int]) -> StagePlan:
    total = sum(event.cost for event in tape.events) or 1.0
    stages = tuple(
        _spec(tape, index, start, stop, total, index == len(cuts) - 2)
        for index, (start, stop) in enumerate(pairwise(cuts))
    )
    _refuse_shared_statistics(tape, stages)
    return StagePlan(tape, stages)


def _refuse_shared_statistics(tape: Tape, stages: Sequence[StageSpec]) -> None:
    """Each stage starts from the step's buffers, so it would not see what another changed."""
    for name in dict.fromkeys(name for event in tape.events for name in event.changes):
        users = [stage.index for stage in stages if name in stage.buffers]
        if len(users) > 1:
            raise PlanError(
                f"{tape.model} changes its buffer {name} in its forward, and stages "
                f"{', '.join(map(str, users))} of {len(stages)} use it. A buffer that changes, "
                "such as a running mean, must be used within one stage. Give each of its uses a "
                "module of its own, use fewer stages, or leave out pipeline."
            )


def _spec(tape: Tape, index: int, start: int, stop: int, total: float, is_last: bool) -> StageSpec:
    events = tape.events[start:stop]
    received = live_at(tape, start) if index else ()
    named = [e.name if e.is_unit else f"{e.where}.{e.name}".strip(".") for e in events] or ["-"]
    return StageSpec(
        index=index,
        start=start,
        stop=stop,
        parameters=tuple(dict.fromkeys(name for e in events for name in e.parameters)),
        buffers=tuple(dict.fromkeys(name for e in events for name in e.buffers)),
        received=received,
        sent=() if is_last else live_at(tape, stop),
        share=sum(e.cost for e in events) / total,
        block=tape.events[start].block if index and start < len(tape.events) else 0,
        splits_backward=index == 0 or _hangs_on_one(tape, events, received),
        first=named[0],
        last=named[-1],
    )


def _hangs_on_one(tape: Tape, events: Sequence[Event], received: Sequence[int]) -> bool:
    """Whether all that has parameters hangs on the one received value that needs a gradient.

    Elsewhere PyTorch's split of a backward pass into two leaves out gradients without a word.
    """
    reached = {number for number in received if number in tape.need_gradient}
    if len(reached) != 1:
        return False
    for event in events:
        if not event.uses.isdisjoint(reached):
            reached.update(leaf.number for leaf in event.result if isinstance(leaf, ValueLeaf))
            reached.update(number for _, number in event.adopts)
        elif event.parameters:
            return False
    return True


def _no_recut(event: Event) -> str:
    return (
        f"For inputs of this form {event.name} comes where no stage that holds its parameters "
        f"({', '.join(event.parameters)}) can start. Stages are fixed by the first batch and keep "
        "their order. Use inputs of one form, or fewer stages."
    )
