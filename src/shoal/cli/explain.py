"""`shoal explain`: say what a plan does to a model, without starting a rank."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from shoal.cli import options
from shoal.cli.output import print_json, write_picture
from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.cost.explain import Explanation
    from shoal.plans.plan import Plan
    from shoal.training.run import Run


@click.command(epilog=options.plan_help())
@click.argument("recipe")
@options.plan
@options.settings
@options.ranks
@click.option(
    "--nodes",
    type=click.IntRange(min=1),
    help="Also say which of so many hosts each rank and server would be on.",
)
@click.option(
    "--slots",
    type=click.IntRange(min=1),
    help="With --nodes: how many ranks each host takes. Default: as many as it would have to.",
)
@click.option(
    "--svg",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also draw the ranks, what each holds and what they send, into FILE.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of words.")
def explain(recipe: str, settings: dict[str, str], **given: Any) -> None:
    """Say what a plan does to RECIPE's model: who holds what, and what a step sends.

    \b
    shoal explain recipes/charlm.py:small --plan "data=2 pipeline=2"
    shoal explain recipes/charlm.py:small --plan "data=4 zero=2" --svg plan.svg

    The model is built once, in a process of its own; no rank is started, so the plan may ask for
    more ranks than this machine has cores. Exit codes: 0 done, 1 the recipe's own error, 2 usage,
    plan or input.
    """
    options.refuse_unusable_process()
    options.check_plan(given["plan"])
    if given["slots"] is not None and given["nodes"] is None:
        raise UsageError("--slots has no effect without --nodes N.")
    sys.exit(_explain(recipe, settings, given))


def _explain(recipe: str, settings: dict[str, str], given: dict[str, Any]) -> int:
    from shoal.cost.explain import Explanation
    from shoal.cost.text import format_explanation
    from shoal.launch.inspect import inspect_recipe
    from shoal.training.options import Recipe

    look = partial(_look, given)
    found = inspect_recipe(Recipe.named(recipe, settings), look, Explanation, given["plan"])
    if given["svg"] is not None:
        from shoal.cost.svg import draw_svg

        write_picture(given["svg"], draw_svg(found, recipe))
    placement = _placement(found, given) if given["nodes"] is not None else None
    if given["as_json"]:
        hosts = {} if placement is None else {"host_of_seat": placement}
        print_json(msgspec.to_builtins(found) | hosts)
        return 0
    click.echo(format_explanation(found, recipe))
    if placement is not None:
        click.echo(_of_hosts(found, placement))
    return 0


def _placement(found: "Explanation", given: dict[str, Any]) -> tuple[int, ...]:
    from shoal.cluster.placement import place
    from shoal.plans.plan import Plan

    plan, nodes = Plan.parse(found.plan), given["nodes"]
    replica, replicas = plan.tensor * plan.pipeline, plan.num_replicas
    if plan.is_loose:
        replica, replicas = plan.num_ranks_apart, plan.num_apart
    enough = -(-replicas // nodes) * replica if replicas >= nodes else -(-plan.num_ranks // nodes)
    return place(plan, dict.fromkeys(range(nodes), given["slots"] or enough))


def _of_hosts(found: "Explanation", placement: tuple[int, ...]) -> str:
    from shoal.cluster.placement import clear_text, describe_placement
    from shoal.formatting import table
    from shoal.plans.plan import Plan

    plan = Plan.parse(found.plan)
    rows = [["host", "ranks and servers"], *map(list, describe_placement(plan, placement))]
    what = clear_text(plan) if len({*placement[: plan.num_ranks]}) > 1 else ""
    notes = [f"{what} cross hosts in clear text: it needs --trust-network"] if what else []
    if sent := _bytes_between(found, plan, placement):
        notes.append(f"each host sends the others {sent:,.0f} bytes in a step")
    return f"\n{table(rows, ())}" + "".join(f"\n\n- {note}" for note in notes)


def _bytes_between(found: "Explanation", plan: "Plan", placement: tuple[int, ...]) -> float:
    """What ranks on cores send from the host of rank 0 along `data` and to all, without servers."""
    from shoal.cost.rank_places import bytes_across, crosses_by_host, group_of

    total = 0.0
    for message in found.ranks[0].messages:
        if message.axis in ("data", "world"):
            group = group_of(plan, placement, message.axis)
            by_host = crosses_by_host(group, message.how)
            sent = bytes_across(group, message.num_bytes, message.how, by_host)
            total += sent * group.num_groups
    return total


def _look(given: dict[str, Any], run: "Run") -> "Explanation":
    from shoal.cost.explain import explain as explained
    from shoal.numerics.precision import environment_for
    from shoal.training.build import with_fit_plan
    from shoal.training.run import resolve

    def explain_plan(text: str | None) -> "Explanation":
        plan = resolve(run, text, given["ranks"])
        os.environ.update(environment_for(plan.precision))
        return explained(run, plan)

    return with_fit_plan(run, given["plan"], given["ranks"], explain_plan)
