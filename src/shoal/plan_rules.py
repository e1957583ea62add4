"""The rules between the keys of a plan: what has no effect, and what does not go together.

Pure and torch-free. A key that is written must do something, and a plan that contradicts itself is
refused with the rule and a way out. Rules that need the model belong to the module that cuts it.
"""

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from shoal.errors import PlanError
from shoal.plan_fit import refuse_pieces

if TYPE_CHECKING:
    from shoal.plan import Plan


class Need(NamedTuple):
    """When a key does something. `without` completes the sentence "... has no effect ..."."""

    met: Callable[["Plan"], bool]
    without: str
    way_out: str


# How few and how many stages a rank may have under each schedule; the first is the default.
STAGES_OF: dict[str, tuple[int, float]] = {
    "1f1b": (1, 1),
    "gpipe": (1, 1),
    "interleaved": (2, math.inf),
    "zero-bubble": (1, math.inf),
    "zbv": (2, 2),
}

_PIPELINE = Need(lambda plan: plan.pipeline > 1, "without a pipeline", "add pipeline=2 or more")
_SERVER = Need(lambda plan: plan.sync == "server", "without servers", "add sync=server")

# A key that is written, even with its default value, must do something.
_NEEDS = {
    "zero": Need(
        lambda plan: plan.zero == 0 or plan.data != 1,
        "with data=1: it shards over the data axis",
        "use data=2 or more",
    ),
    "schedule": _PIPELINE,
    "microbatches": _PIPELINE,
    "stages": _PIPELINE,
    "servers": _SERVER,
    "staleness": _SERVER,
    "copies": _SERVER,
    "local_steps": Need(
        lambda plan: (
            plan.local_steps == 1
            or plan.data != 1
            or plan.outer != "average"
            or plan.sync == "server"
        ),
        "with data=1: there is no other replica to average with",
        "use data=2 or more",
    ),
    "outer": Need(
        lambda plan: plan.local_steps > 1,
        "with local_steps=1: replicas agree on every step",
        "add local_steps=2 or more",
    ),
    "sums": Need(
        lambda plan: plan.sums == "exact" or not plan.zero,
        "with zero: shards are summed by whoever owns them, in one order, at no extra cost",
        "leave zero out",
    ),
    "codec": Need(
        lambda plan: plan.codec == "none" or plan.data != 1 or plan.sync == "server",
        "with data=1: no gradient is sent",
        "use data=2 or more",
    ),
}


def refuse_without_effect(plan: "Plan", keys: Iterable[str]) -> None:
    for key in keys:
        need = _NEEDS.get(key)
        if need is not None and not need.met(plan):
            raise PlanError(
                f"{key}={getattr(plan, key)} has no effect {need.without}. "
                f"Leave {key} out, or {need.way_out}."
            )


def refuse_contradictions(plan: "Plan") -> None:
    _refuse_schedule(plan)
    _refuse_local_steps(plan)
    if plan.copies > plan.servers:
        raise PlanError(
            f"copies={plan.copies} does not fit on servers={plan.servers}. Each copy of a shard "
            f"lives on a server of its own. Use servers={plan.copies} or copies={plan.servers}."
        )
    if plan.zero == 3 and plan.schedule in ("zero-bubble", "zbv"):
        raise PlanError(
            f"schedule={plan.schedule} does not go with zero=3. It computes the gradients of "
            "weights after those of inputs, and FSDP2 has let go of the weights by then. "
            "Use zero=1 or zero=2, or schedule=1f1b or interleaved."
        )
    if plan.pieces is not None:
        refuse_pieces(plan.counts, plan.pieces)
        _refuse_uneven_pieces(plan, plan.pieces)


def _refuse_schedule(plan: "Plan") -> None:
    """What PyTorch's schedules cannot run."""
    fewest, most = STAGES_OF[plan.schedule]
    if not fewest <= plan.num_stages <= most:
        allowed = str(fewest) if fewest == most else f"{fewest} or more"
        raise PlanError(
            f"stages={plan.stages} does not go with schedule={plan.schedule}, which needs "
            f"{allowed} on each rank. Leave stages out, or use another schedule."
        )
    if plan.pipeline == 1:
        return
    count = plan.num_microbatches
    if not fits_schedule(plan.schedule, plan.pipeline, count):
        near = max(1, count // plan.pipeline) * plan.pipeline
        rule = (
            "one for each rank at least"
            if plan.schedule == "1f1b"
            else f"a number that falls into {count // plan.pipeline} equal rounds"
        )
        raise PlanError(
            f"microbatches={count} does not go with schedule={plan.schedule} over "
            f"pipeline={plan.pipeline}, which needs {rule}. Use microbatches={near} or "
            f"{near + plan.pipeline}, or schedule=gpipe."
        )


def fits_schedule(schedule: str, num_ranks: int, num_microbatches: int) -> bool:
    """Whether a schedule can run so many microbatches in one round."""
    if schedule == "1f1b":
        return num_microbatches >= num_ranks
    if schedule in ("interleaved", "zero-bubble"):
        return num_microbatches % max(1, num_microbatches // num_ranks) == 0
    return True


def _refuse_local_steps(plan: "Plan") -> None:
    if plan.local_steps == 1:
        return
    if plan.tensor * plan.pipeline > 1:
        key = "tensor" if plan.tensor > 1 else "pipeline"
        raise PlanError(
            f"{key}={getattr(plan, key)} does not go with local_steps={plan.local_steps} yet: a "
            "replica that steps alone is one rank. Leave one of them out."
        )
    if plan.precision == "fp16":
        raise PlanError(
            f"precision=fp16 does not go with local_steps={plan.local_steps}. The loss scale of "
            f"fp16 is agreed on every step, and replicas agree only every {plan.local_steps} "
            "steps. Use precision=bf16."
        )
    if plan.zero:
        raise PlanError(
            f"zero={plan.zero} does not go with local_steps={plan.local_steps}. Between two "
            "averages the replicas differ, so none can hold a part of the others' state. "
            "Leave one of them out."
        )


def _refuse_uneven_pieces(plan: "Plan", pieces: int) -> None:
    """Where every replica must do equally much."""
    if plan.data is None or pieces % (plan.data * plan.num_microbatches) == 0:
        return
    if plan.local_steps > 1:
        raise PlanError(
            f"pieces={pieces} is not a multiple of data={plan.data}. With "
            f"local_steps={plan.local_steps} each replica trains alone and counts the same in "
            "the average, so all need equally many pieces. Use a multiple of data."
        )
    if plan.zero == 3:
        raise PlanError(
            f"pieces={pieces} does not give each of data={plan.data} replicas equally many. With "
            "zero=3 they hold parts of one another's parameters, so all must run the model "
            "equally often. Use a multiple of data x microbatches."
        )
