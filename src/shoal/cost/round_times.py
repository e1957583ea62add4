"""How long a round of a pipeline takes: the schedule that ranks run, on a clock. Pure.

Each rank does its own actions in the order of the schedule, each as soon as what it works on has
arrived. Without a pipeline a round is one piece through the whole model.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from shoal.cost.prediction import StageTimes
from shoal.parallel.pipeline.schedules import Action, ActionKind, Order, in_turn, order_work
from shoal.parallel.pipeline.stages import rank_of_stage
from shoal.plans.plan import Plan


def order_of(plan: Plan) -> Order:
    """The work of each rank of a pipeline in a round."""
    return _order(plan.schedule, plan.pipeline, plan.num_stages, plan.num_microbatches)


@lru_cache(256)
def _order(schedule: str, pipeline: int, num_own: int, num_microbatches: int) -> Order:
    stages: list[list[int]] = [[] for _ in range(pipeline)]
    for stage in range(pipeline * num_own):
        stages[rank_of_stage(stage, pipeline, schedule)].append(stage)
    return order_work(schedule, stages, num_microbatches)


def busy_by_rank(plan: Plan, stages: Sequence[StageTimes]) -> list[float]:
    busy = [0.0] * plan.pipeline
    for stage in stages:
        busy[stage.rank] += plan.num_microbatches * (stage.forward_s + stage.backward_s)
    return busy


def round_seconds(plan: Plan, stages: Sequence[StageTimes]) -> tuple[float, float, float]:
    """Of one round: its length, the longest that a rank computes, and its messages inside."""
    if plan.pipeline == 1:
        whole = stages[0].forward_s + stages[0].backward_s
        return whole, whole, stages[0].tensor_s
    shape = plan.schedule, plan.pipeline, plan.num_stages, plan.num_microbatches
    talk = max(
        sum(plan.num_microbatches * s.tensor_s for s in stages if s.rank == rank)
        for rank in range(plan.pipeline)
    )
    return _length(*shape, tuple(stages)), max(busy_by_rank(plan, stages)), talk


@lru_cache(256)
def _in_turn(*shape: Any) -> tuple[tuple[int, Action], ...]:
    return tuple(in_turn(_order(*shape)))


@lru_cache(1024)
def _length(
    schedule: str,
    pipeline: int,
    num_own: int,
    num_microbatches: int,
    stages: tuple[StageTimes, ...],
) -> float:
    """When the last rank is done, if each does its own in order as soon as it can."""
    last, free = len(stages) - 1, [0.0] * pipeline
    takes = {
        kind: [action_seconds(Action(kind, n, 0), stages) for n in range(last + 1)]
        for kind in _WORK
    }
    made: dict[tuple[bool, int, int], float] = {}  # whether forward, stage, microbatch
    for rank, (kind, stage, microbatch) in _in_turn(schedule, pipeline, num_own, num_microbatches):
        ready = 0.0  # what its own rank has made is there: that did it before
        if kind == ActionKind.FORWARD:
            if stage:
                ready = made[True, stage - 1, microbatch] + stages[stage - 1].send_s
        elif kind != ActionKind.WEIGHT and stage < last:
            ready = made[False, stage + 1, microbatch] + stages[stage + 1].send_back_s
        free[rank] = max(free[rank], ready) + takes[kind][stage]
        if kind != ActionKind.WEIGHT:
            made[kind == ActionKind.FORWARD, stage, microbatch] = free[rank]
    return max(free)


_WORK = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT, ActionKind.WEIGHT)


def action_seconds(action: Action, stages: Sequence[StageTimes]) -> float:
    stage = stages[action.stage]
    if action.kind == ActionKind.FORWARD:
        return stage.forward_s
    if action.kind == ActionKind.WEIGHT:
        return stage.weight_s
    if action.kind == ActionKind.INPUT:
        return stage.backward_s - stage.weight_s
    return stage.backward_s
