"""`shoal plan`: rank all plans for a recipe by what is predicted for them."""

import math
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click
import msgspec

from shoal.cli import options
from shoal.cli.output import as_json as json_option
from shoal.cli.output import print_json, say, tell
from shoal.cost.search import DECIDES
from shoal.formatting import in_seconds, in_units, num_bytes_of, plural, table
from shoal.plans.plan import Plan

if TYPE_CHECKING:
    from shoal.cost.search import RankedPlan
    from shoal.launch.choose import PlansFound

MOST_SAME, MOST_OTHER, MOST_TOO_LARGE = 12, 6, 3  # rows that people see
_ALIKE = ("schedule", "microbatches", "stages", "accumulate", "pieces", "sums", "servers")
_SHOWN = ("plan", "num_ranks", "step_s", "total_s", "memory_bytes", "bytes_sent")


@click.command(epilog=options.plan_help())
@click.argument("recipe")
@click.option(
    "--cluster",
    metavar="FILE|NAME",
    help="Where it will run: a TOML file, or one that is shipped. Default: this machine.",
)
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    help="Number of ranks. Default: as many of the cluster's devices as are best.",
)
@click.option("--memory", metavar="AMOUNT", help="The most that a rank may hold, as in 2GB.")
@click.option(
    "--samples",
    type=click.IntRange(min=1),
    help="Also say how long it takes to train on so many. Default: all of the recipe's steps.",
)
@options.settings
@json_option
def plan(
    recipe: str, settings: dict[str, str], memory: str | None, as_json: bool, **given: Any
) -> None:
    """Rank all plans for RECIPE by the time that is predicted for a step.

    \b
    shoal plan recipes/charlm.py:small
    shoal plan recipes/charlm.py:small --cluster laptops-16 --memory 2GB
    shoal plan recipes/charlm.py:small --cluster mine.toml --ranks 64 --json

    The model is profiled once, in some seconds; then no rank is started. Plans that train what one
    process would come first, those that train something else apart from them; `shoal train
    --plan auto` takes the first. Exit codes: 0 done, 1 the recipe's own error, 2 usage or input,
    or no plan fits.
    """
    options.refuse_unusable_process()
    from shoal.launch.choose import find_plans
    from shoal.training.options import Recipe

    limit = None if memory is None else num_bytes_of(memory, "--memory")
    found = find_plans(Recipe.named(recipe, settings), memory_bytes=limit, **given)
    if as_json:
        print_json(_as_json(found), 2 if found.error else 0)
    elif not found.error:
        say(_in_words(recipe, found))
    if found.error:
        tell(f"shoal: {found.error}")
        sys.exit(2)


def _as_json(found: "PlansFound") -> dict[str, Any]:
    from shoal.cost.search import RULES

    def row(one: "RankedPlan") -> dict[str, Any]:
        fields = {name: getattr(one, name) for name in (*_SHOWN, "changes_result", "reason")}
        return fields | {"time": one.prediction.time, "memory": one.prediction.memory}

    return {
        "plans": [row(one) for one in found.result.plans],
        "too_large": [row(one) for one in found.result.too_large],
        "cluster": found.cluster,
        "num_samples": found.num_samples,
        "num_tried": found.result.num_tried,
        "num_illegal": found.result.num_illegal,
        "rules": RULES,
        "error": found.error or None,
    }


def _in_words(recipe: str, found: "PlansFound") -> str:
    result = found.result
    same = [one for one in result.plans if not one.changes_result]
    other = [one for one in result.plans if one.changes_result]
    limit = same[0].step_s if same else math.inf
    faster = [one for one in result.too_large if one.step_s < limit]
    shown = {
        "The same training": first_of(same, kind_of)[:MOST_SAME],
        "These train something else": first_of(other, _changes)[:MOST_OTHER],
        "Faster, if they fitted": first_of(faster, kind_of)[:MOST_TOO_LARGE],
    }
    lines = [f"{recipe} on {found.cluster}: {plural(result.num_tried, 'plan')} predicted"]
    for title, plans in shown.items():
        lines += ["", title, _rows(plans, found.num_samples)] if plans else []
    best = result.plans[0].prediction
    return "\n".join(
        [
            *lines,
            "",
            f"Figures may be off by {best.error_share:.0%}. --json has all plans, and the rules by "
            f"which others were not tried; {result.num_illegal} that were are not legal.",
            *best.notes,
        ]
    )


def _rows(plans: "Sequence[RankedPlan]", num_samples: int) -> str:
    rows = [["step", f"{num_samples:,} samples", "memory", "sent", "plan", "why"]]
    for one in plans:
        sent = in_units(one.bytes_sent) if one.bytes_sent else "-"
        times = in_seconds(one.step_s), in_seconds(one.total_s)
        rows.append([*times, in_units(one.memory_bytes), sent, one.plan, one.reason])
    return table(rows, (0, 1, 2, 3))


def first_of(plans: "Iterable[RankedPlan]", kind: Callable[[Plan], Hashable]) -> "list[RankedPlan]":
    """The first plan of each kind."""
    found: dict[Hashable, RankedPlan] = {}
    for one in plans:
        found.setdefault(kind(Plan.parse(one.plan)), one)
    return list(found.values())


def kind_of(plan: Plan) -> Hashable:
    """Alike are plans that differ only in the order of work, pieces and counts of servers."""
    keys = msgspec.structs.asdict(plan)
    return tuple(value for key, value in keys.items() if key not in _ALIKE)


def _changes(plan: Plan) -> Hashable:
    """Alike are plans that change what is trained by the same keys, whatever their values."""
    keys = msgspec.structs.asdict(plan)
    return plan.sync, tuple(key for key in DECIDES if keys[key] != getattr(Plan(), key))
