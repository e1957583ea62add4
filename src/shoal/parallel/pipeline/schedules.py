"""Pipeline schedules: the order of forwards, backwards and receives on each rank. Pure.

The order of the work is PyTorch's for interleaved, zero-bubble and zbv, and a few lines for gpipe
and 1f1b. A simulation in which the ranks take turns inserts the receives: a message is listed for
both of its ranks at once. So any two ranks have their messages in the same order, which is how
transports match them, and no rank waits for a message that comes later, even if every send blocked
until it was received. A result is sent as soon as it is computed, so sends are not listed.

Papers: GPipe (1811.06965), PipeDream-Flush (2006.09503), Megatron interleaved (2104.04473), zero
bubble (2401.10241). Read next: `scheduled_stage.py`, which does what is listed here.
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch.distributed.pipelining import (
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)


def _order_only(schedule: type) -> Any:
    """The class, without the messages that it works out besides: no part of the order, and most of
    the time, which grows with the square of the microbatches."""
    without = {"_prepare_schedule_with_comms": lambda *_, **__: None}
    return type(schedule.__name__, (schedule,), without)


_PYTORCHS: dict[str, Any] = {
    "interleaved": _order_only(ScheduleInterleaved1F1B),
    "zero-bubble": _order_only(ScheduleInterleavedZeroBubble),
    "zbv": _order_only(ScheduleZBVZeroBubble),
}


class ActionKind(StrEnum):
    """Of an action. The letters of work are PyTorch's."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"  # the part of a backward that gives the gradients of what was received
    WEIGHT = "W"  # the part that gives the gradients of the weights
    RECEIVE = "RECV_F"
    RECEIVE_BACK = "RECV_B"

    @property
    def is_receive(self) -> bool:
        return self in (ActionKind.RECEIVE, ActionKind.RECEIVE_BACK)


class Action(NamedTuple):
    kind: ActionKind
    stage: int
    microbatch: int


Order = list[list[Action]]  # by rank


def order_work(
    schedule: str, stages_of_rank: Sequence[Sequence[int]], num_microbatches: int
) -> Order:
    """The forwards and backwards of each rank.

    gpipe takes any places of the stages and any number of microbatches; the others have places of
    their own (`stages.rank_of_stage`) and take what `plan_rules.fits_schedule` says.
    """
    if schedule == "gpipe":
        return [_gpipe(stages, num_microbatches) for stages in stages_of_rank]
    num_ranks = len(stages_of_rank)
    if schedule == "1f1b":
        return [_one_f_one_b(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
    num_own = len(stages_of_rank[0])
    # All that the classes ask of a stage before they run it.
    stage = SimpleNamespace(
        num_stages=num_ranks * num_own, group_size=num_ranks, group_rank=0, submod=None
    )
    made = _PYTORCHS[schedule]([stage] * num_own, num_microbatches)
    kinds = {kind.value: kind for kind in ActionKind}  # to ask the class costs as much as the rest
    return [
        [
            Action(kinds[item.computation_type.value], item.stage_index, item.microbatch_index)
            for item in made.pipeline_order[rank]
            if item is not None
        ]
        for rank in range(num_ranks)
    ]


def in_turn(work: Order) -> Iterator[tuple[int, Action]]:
    """All work with its ranks, each after what it works on: the ranks take turns."""
    rank_of = {action.stage: rank for rank, items in enumerate(work) for action in items}
    done: set[Action] = set()
    places = [0] * len(work)
    while any(place < len(items) for place, items in zip(places, work)):
        before = len(done)
        for rank, items in enumerate(work):
            if places[rank] == len(items) or not _is_ready(items[places[rank]], done, rank_of):
                continue
            action = items[places[rank]]
            done.add(action)
            places[rank] += 1
            yield rank, action
        if len(done) == before:
            raise AssertionError(f"The order {work} waits for itself.")


def with_receives(work: Order) -> Order:
    """Put in what each rank receives, as early as the order of all messages allows."""
    rank_of = {action.stage: rank for rank, items in enumerate(work) for action in items}
    order: Order = [[] for _ in work]
    for rank, action in in_turn(work):
        order[rank].append(action)
        receive = matching_receive(action)
        if receive is not None and rank_of.get(receive.stage, rank) != rank:
            order[rank_of[receive.stage]].append(receive)
    return order


def post_receives_early(actions: Sequence[Action]) -> list[Action]:
    """The same actions, with each receive posted one forward or backward earlier.

    For transports that do other things while a receive waits. One that is there before its message
    is sent saves the two ranks asking each other.
    """
    moved: list[Action] = []
    work: Action | None = None
    for action in actions:
        if not action.kind.is_receive:
            if work is not None:
                moved.append(work)
            work = action
        else:
            moved.append(action)
    return moved if work is None else [*moved, work]


def matching_receive(action: Action) -> Action | None:
    """The receive, on the next stage or the one before, of what this action sends."""
    if action.kind == ActionKind.FORWARD:
        return Action(ActionKind.RECEIVE, action.stage + 1, action.microbatch)
    if action.kind in (ActionKind.BACKWARD, ActionKind.INPUT):
        return Action(ActionKind.RECEIVE_BACK, action.stage - 1, action.microbatch)
    return None


def _is_ready(action: Action, done: set[Action], stages: dict[int, int]) -> bool:
    """Whether the results that an action works on are there."""
    kind, stage, microbatch = action
    if kind == ActionKind.FORWARD:
        return stage - 1 not in stages or (kind, stage - 1, microbatch) in done
    if kind == ActionKind.WEIGHT:
        return (ActionKind.INPUT, stage, microbatch) in done
    return (ActionKind.FORWARD, stage, microbatch) in done and (
        stage + 1 not in stages
        or (ActionKind.BACKWARD, stage + 1, microbatch) in done
        or (ActionKind.INPUT, stage + 1, microbatch) in done
    )


def _gpipe(stages: Sequence[int], num_microbatches: int) -> list[Action]:
    forward = [Action(ActionKind.FORWARD, s, m) for s in stages for m in range(num_microbatches)]
    back = [
        Action(ActionKind.BACKWARD, s, m) for s in stages[::-1] for m in range(num_microbatches)
    ]
    return forward + back


def _one_f_one_b(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """PyTorch's 1F1B as it runs; what it lists for its last rank is one forward ahead of that."""
    ahead = min(num_ranks - 1 - rank, num_microbatches)
    actions = [Action(ActionKind.FORWARD, rank, m) for m in range(ahead)]
    for m in range(num_microbatches):
        if m + ahead < num_microbatches:
            actions.append(Action(ActionKind.FORWARD, rank, m + ahead))
        actions.append(Action(ActionKind.BACKWARD, rank, m))
    return actions
