"""Check that a plan did what it says, by counts that hold for every model.

`tensor` must cut almost all of a model with attention, since all of its large matrices can be cut:
a matrix that stays whole must be small, or have a reason in the model (query, key and value in one
matrix of uneven parts) or in the run (an override). That Shoal has no rule for a function between
two matrices is no such reason. A matrix with a reason is reported, and is no failure.
"""

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from shoal.numerics.norms import BLOCK
from shoal.parallel.tensor.search_state import kind_of
from shoal.plans.plan import Plan
from shoal.training.build import build_model
from shoal.training.run import Run

if TYPE_CHECKING:
    from shoal.verify.compare import StepRecord

SLACK = 1.1  # parts are not always even
UNCUT = 0.1  # share of a model with attention that may stay whole under `tensor`: norms, positions
ATTENTION = ("attn", "attention", "in_proj_weight")  # in the names of its parameters
# In the reasons of the search for cuts, where Shoal has no rule for a matrix.
OWN_LIMITS = ("has no rule for parts", "failed on parts", "fails on parts", "cannot use parts")
UNSEEN = "does not multiply by it"
MOST_REASONS = 3  # that are reported


def held_share(steps: Sequence["StepRecord"], shapes: Mapping[str, Sequence[int]]) -> float:
    """The share of all parameters on the rank that holds the most."""
    total = sum(math.prod(shape) for shape in shapes.values())
    return max(step.num_held(list(shapes)) for step in steps) / total


def find_violation(
    plan: Plan,
    steps: Sequence["StepRecord"],
    shapes: Mapping[str, Sequence[int]],
    speaks: bool | None,
    idle: Container[str] = (),
    whole: Mapping[str, str] = {},
) -> str:
    """A sentence on what the plan did not do; empty if it did everything.

    `speaks`: replicas communicate in this step (None: they may); `idle`: parameters that were not
    trained; `whole`: those that `tensor` leaves whole, and why.
    """
    total = sum(math.prod(shape) for shape in shapes.values())
    largest = max(math.prod(shape) for shape in shapes.values())
    num_model_ranks = plan.tensor * plan.pipeline
    for rank, step in enumerate(steps):
        held = step.num_held(list(shapes))
        # The ranks of a replica speak in every step.
        heard = True if plan.is_loose and plan.num_ranks_apart > 1 else speaks
        if plan.num_ranks > 1 and heard not in (None, step.bytes_sent > 0):
            return (
                f"rank {rank} sent {step.bytes_sent} bytes in a step in which replicas "
                f"{'agree' if heard else 'work alone'}"
            )
        if plan.pipeline > 1 and not 0 < held < total:
            return f"rank {rank} of a pipeline holds {held} of {total} parameters"
        if plan.tensor > 1 and held >= total:
            return f"rank {rank} holds all {total} parameters, so tensor={plan.tensor} cut nothing"
        most_held = _most_of_cut(plan, shapes, whole)
        if plan.tensor > 1 and held > most_held and _has_attention(shapes):
            return (
                f"rank {rank} holds {held} of {total} parameters, where tensor={plan.tensor} of a "
                f"model with attention allows {int(most_held)}"
            )
        if plan.zero:
            # Even shards, up to a block for each bucket, or a tensor that may not be cut.
            uneven = max(BLOCK * (1 + 4 * total // plan.bucket_bytes), largest)
            most = SLACK * total / plan.num_within + uneven
            if num_model_ranks == 1 and step.num_stepped > most:
                return (
                    f"rank {rank} steps on {step.num_stepped} of {total} parameters, where "
                    f"zero={plan.zero} allows {int(most)}"
                )
        if plan.zero == 3 and num_model_ranks == 1 and held > _most_held(plan, shapes, idle):
            return f"rank {rank} holds {held} of {total} parameters, in spite of zero=3"
    return ""


def uncut_parameters(run: Run, plan: Plan) -> dict[str, str]:
    """The matrices that `tensor` leaves whole, and why.

    Builds the model and searches for cuts as the plan's own process does.
    """
    if plan.tensor == 1:
        return {}
    prepared = build_model(run, plan)
    prepared.seeds.close()
    assert prepared.survey.tensor is not None
    return dict(prepared.survey.tensor.whole)


def is_excused(why: str) -> bool:
    """Whether a matrix stays whole for a reason other than a missing rule."""
    return not any(limit in why for limit in (*OWN_LIMITS, UNSEEN))


def describe_uncut(
    plan: Plan, shapes: Mapping[str, Sequence[int]], whole: Mapping[str, str]
) -> str:
    """A sentence on what `tensor` leaves whole, if it is more than norms and positions."""
    total = sum(math.prod(shape) for shape in shapes.values())
    shares: dict[str, float] = {}
    for name, why in whole.items():
        key = f"{kind_of(name)}: {why}"
        shares[key] = shares.get(key, 0.0) + math.prod(shapes.get(name, (0,))) / total
    if sum(shares.values()) <= UNCUT:
        return ""
    largest = sorted(shares.items(), key=lambda item: -item[1])[:MOST_REASONS]
    reasons = "; ".join(f"{share:.0%} {key}" for key, share in largest)
    return (
        f"tensor={plan.tensor} leaves {sum(shares.values()):.0%} of the parameters whole on every "
        f"rank ({reasons}). shoal explain lists all"
    )


def _most_of_cut(
    plan: Plan, shapes: Mapping[str, Sequence[int]], whole: Mapping[str, str]
) -> float:
    """The most that a rank may hold under `tensor`: its share, and excused matrices."""
    total = sum(math.prod(shape) for shape in shapes.values())
    excused = {name for name, why in whole.items() if is_excused(why)}
    kept = sum(math.prod(shape) for name, shape in shapes.items() if name in excused)
    return total * UNCUT + kept + (total - kept) / plan.tensor


def _most_held(plan: Plan, shapes: Mapping[str, Sequence[int]], idle: Container[str]) -> float:
    """The most that a rank may hold under zero=3: even rows, up to one; frozen ones whole."""
    total = sum(math.prod(shape) for name, shape in shapes.items() if name not in idle)
    rows = sum(math.prod(shape[1:]) for shape in shapes.values())
    whole = sum(math.prod(shape) for name, shape in shapes.items() if name in idle)
    return SLACK * total / plan.num_within + rows + whole


def _has_attention(names: Iterable[str]) -> bool:
    return any(mark in name for name in names for mark in ATTENTION)
