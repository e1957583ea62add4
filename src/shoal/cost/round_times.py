"""How long a round of a pipeline takes: the schedule that ranks run, on a clock. Pure.

Each rank does its own actions in the order of the schedule, each as soon as what it works on has
arrived. Without a pipeline a round is one piece through the whole model.
"""

from collections.abc import Sequence
from functools import lru_cache

from shoal.cost.prediction import StageTimes
from shoal.parallel.pipeline.schedules import Action, ActionKind, Order, order_work
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
    order = order_of(plan)
    ends = finish_times(order, stages)
    busy = busy_by_rank(plan, stages)
    talk = max(
        sum(plan.num_microbatches * s.tensor_s for s in stages if s.rank == rank)
        for rank in range(plan.pipeline)
    )
    return max(ends.values()), max(busy), talk


def finish_times(order: Order, stages: Sequence[StageTimes]) -> dict[Action, float]:
    """When each action of a round ends, if each rank does its own in order as soon as it can."""
    ends: dict[Action, float] = {}
    free, places = [0.0] * len(order), [0] * len(order)
    left = sum(map(len, order))
    while left:
        before = left
        for rank, actions in enumerate(order):
            while places[rank] < len(actions):
                action = actions[places[rank]]
                ready = _ready(action, stages, ends)
                if ready is None:
                    break
                free[rank] = max(free[rank], ready) + action_seconds(action, stages)
                ends[action] = free[rank]
                places[rank] += 1
                left -= 1
        assert left < before, "the order waits for itself"
    return ends


def action_seconds(action: Action, stages: Sequence[StageTimes]) -> float:
    stage = stages[action.stage]
    if action.kind == ActionKind.FORWARD:
        return stage.forward_s
    if action.kind == ActionKind.WEIGHT:
        return stage.weight_s
    if action.kind == ActionKind.INPUT:
        return stage.backward_s - stage.weight_s
    return stage.backward_s


def _ready(action: Action, stages: Sequence[StageTimes], ends: dict[Action, float]) -> float | None:
    """When what an action works on is there; None if that is not known yet."""
    kind, index, microbatch = action
    if kind == ActionKind.WEIGHT:
        return ends.get(Action(ActionKind.INPUT, index, microbatch))
    if kind == ActionKind.FORWARD:
        if index == 0:
            return 0.0
        made = ends.get(Action(kind, index - 1, microbatch))
        return None if made is None else made + stages[index - 1].send_s
    own = ends.get(Action(ActionKind.FORWARD, index, microbatch))
    if own is None or index == len(stages) - 1:
        return own
    for back in (ActionKind.BACKWARD, ActionKind.INPUT):
        made = ends.get(Action(back, index + 1, microbatch))
        if made is not None:
            return max(own, made + stages[index + 1].send_back_s)
    return None
