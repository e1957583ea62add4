"""Which plan to take: all that are legal, ranked in a process that has loaded the recipe.

`shoal plan` shows them; `shoal train --plan auto` takes the first that trains what one process
would. Read next: `cost/planning.py`, which is called there.
"""

from functools import partial
from typing import TYPE_CHECKING

import msgspec

from shoal.cost.cluster import Cluster, read_cluster
from shoal.cost.profile_index import profile_recipe
from shoal.cost.search import RankedPlan, SearchResult, rank_counts
from shoal.cost.this_machine import this_cluster
from shoal.errors import PlanError
from shoal.formatting import in_seconds, in_units, plural
from shoal.launch.inspect import inspect_recipe
from shoal.training.options import Recipe

if TYPE_CHECKING:
    from shoal.training.run import Run


class PlansFound(msgspec.Struct, frozen=True, kw_only=True):
    """The plans for a recipe; `error` says why there is none, empty if there is one."""

    result: SearchResult
    cluster: str
    num_samples: int
    error: str


class ChosenPlan(msgspec.Struct, frozen=True):
    plan: str
    why: str


def find_plans(
    recipe: Recipe,
    *,
    cluster: str | None = None,
    ranks: int | None = None,
    memory_bytes: int | None = None,
    samples: int | None = None,
) -> PlansFound:
    """Profile a recipe and rank its plans, for a cluster by its file or name, or this machine."""
    place = this_cluster() if cluster is None else read_cluster(cluster)
    rank_counts(ranks, place.num_devices)  # so many can be searched: said before a profile is made
    look = partial(_look, recipe, place, ranks, memory_bytes, samples)
    return inspect_recipe(recipe, look, PlansFound)


def _look(
    recipe: Recipe,
    cluster: Cluster,
    ranks: int | None,
    memory_bytes: int | None,
    samples: int | None,
    run: "Run",
) -> PlansFound:
    from shoal.cost.planning import rank_plans

    profile = profile_recipe(recipe, run)
    num_steps = run.num_steps() if samples is None else -(-samples // run.batch_size)
    result = rank_plans(
        run, profile, cluster, ranks=ranks, memory_bytes=memory_bytes, num_steps=num_steps
    )
    return PlansFound(
        result=result,
        cluster=cluster.name,
        num_samples=samples or num_steps * run.batch_size,
        error="" if result.plans else why_none(result, cluster.name),
    )


def why_none(result: SearchResult, cluster: str) -> str:
    """Why no plan is left: the nearest and by how much it fails, or the first rule."""
    if not result.too_large:
        return f"No plan is legal: {result.first_refusal}"
    nearest = result.too_large[0]
    other = ", which trains something else," if nearest.changes_result else ""
    return (
        f"No plan fits on {cluster}. The nearest is {nearest.plan!r}{other or ','} and it "
        f"{nearest.reason}. "
        "Give more memory or more ranks, or train with a smaller batch or model."
    )


def choose_plan(recipe: Recipe, ranks: int | None) -> ChosenPlan:
    """The fastest plan on this machine that trains what one process would, and why it is taken."""
    found = find_plans(recipe, ranks=ranks)
    best = found.result.best
    if best is None:
        raise PlanError(found.error or why_none_the_same(found.result))
    return ChosenPlan(best.plan, why_chosen(best, found.result))


def why_none_the_same(result: SearchResult) -> str:
    return (
        f"No plan that trains what one process would fits; {result.plans[0].plan!r} does, and "
        f"{result.plans[0].reason}. Give it with --plan if that is what you want."
    )


def why_chosen(best: RankedPlan, result: SearchResult) -> str:
    """In a sentence: what is predicted for the plan, and for the next one that is of another
    kind."""
    same = [one for one in result.plans if not one.changes_result]
    told = (
        f"{in_seconds(best.step_s)} a step and {in_units(best.memory_bytes)} a rank are predicted, "
        f"the least time of {plural(len(same), 'plan')}"
    )
    others = [one for one in same if one.num_ranks != best.num_ranks] or same[1:]
    return f"{told}; {others[0].plan}: {others[0].reason}" if others else told
