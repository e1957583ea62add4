"""`shoal simulate`: what becomes of a run over hours, with failures and stragglers, beforehand."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shoal.cli import options
from shoal.cli.output import as_json, print_json, say, write_picture

if TYPE_CHECKING:
    from shoal.cost.cluster import Cluster
    from shoal.cost.simulation_report import SimulationReport
    from shoal.training.options import Recipe
    from shoal.training.run import Run


def _read_slow(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[int, float]:
    found = {}
    for text in values:
        number, equals, times = text.partition("=")
        try:
            found[int(number)] = float(times)
        except ValueError:
            equals = ""
        if not equals or int(number) < 0 or not 0 < found[int(number)] < float("inf"):
            raise click.BadParameter(f"{text!r} is not NUMBER=TIMES, as in 3=5.")
    return found


def _positive(unit: str) -> Callable[[click.Context, click.Parameter, float], float]:
    def check(context: click.Context, parameter: click.Parameter, value: float) -> float:
        if not 0 < value < float("inf"):
            raise click.BadParameter(f"{value:g} {unit} is no time. Give more than 0.")
        return value

    return check


_rate = click.FloatRange(min=0.0, max=1e6)


@click.command(epilog=options.plan_help())
@click.argument("recipe")
@options.plan
@options.settings
@click.option(
    "--cluster",
    metavar="FILE",
    help="The hosts: a TOML file or the name of a shipped one. Default: this machine, measured.",
)
@click.option(
    "--hours",
    type=float,
    default=24.0,
    show_default=True,
    callback=_positive("hours"),
    help="How long the run is watched.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--sweep",
    metavar="AXIS=A..B",
    help="Also scaling curves, strong and weak, over sizes of data, tensor or pipeline.",
)
@click.option(
    "--svg",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Draw a step, goodput over time and the scaling curves into FILE.",
)
@options.spares
@click.option(
    "--spare-hosts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Hosts of the cluster that stand by, beside those that the plan needs.",
)
@click.option(
    "--failures",
    "failures_per_month",
    type=_rate,
    help="How often a host is lost in a month. Default: as the cluster says.",
)
@click.option(
    "--kills",
    "kills_per_month",
    type=_rate,
    default=0.0,
    show_default=True,
    help="How often the process of a rank or server ends by itself in a month.",
)
@click.option(
    "--repair",
    "repair_minutes",
    type=float,
    default=60.0,
    show_default=True,
    callback=_positive("minutes"),
    metavar="MINUTES",
    help="After which a lost host, or another in its place, is there.",
)
@click.option(
    "--slow",
    "slow_ranks",
    multiple=True,
    metavar="RANK=TIMES",
    callback=_read_slow,
    help="A rank that takes so many times as long as the others. May be repeated.",
)
@click.option(
    "--slow-link",
    "slow_links",
    multiple=True,
    metavar="HOST=TIMES",
    callback=_read_slow,
    help="A host whose messages take so many times as long. May be repeated.",
)
@click.option(
    "--jitter",
    type=click.FloatRange(min=0.0, max=10.0),
    default=0.0,
    show_default=True,
    help="Standard deviation of each rank's time for a step, as a share of it.",
)
@click.option(
    "--store",
    default="1GB",
    show_default=True,
    metavar="BYTES",
    help="What the place of checkpoints takes and gives in a second, from all ranks together.",
)
@as_json
def simulate(recipe: str, settings: dict[str, str], **given: Any) -> None:
    """Simulate hours of RECIPE under a plan on a cluster: step time, goodput, failures.

    \b
    shoal simulate recipes/charlm.py:small --plan data=16 --cluster laptops-16 --hours 24
    shoal simulate mine.py:large --plan "data=64 pipeline=4" --cluster gpus-1000x8 --jitter 0.05 \\
        --set save_every=500 --sweep data=8..1024 --svg simulation.svg

    The recipe is profiled once, in a process of its own; no rank is started. The same seed gives
    the same result. Exit codes: 0 done, 1 the recipe's own error, 2 usage, plan or input.
    """
    from shoal.cost.scenario import sweep_sizes
    from shoal.formatting import num_bytes_of

    options.refuse_unusable_process()
    options.check_plan(given["plan"])
    num_bytes_of(given["store"], "--store")
    if given["sweep"] is not None:
        sweep_sizes(given["sweep"])
    sys.exit(_simulate(recipe, settings, given))


def _simulate(recipe: str, settings: dict[str, str], given: dict[str, Any]) -> int:
    from shoal.cost.cluster import read_cluster
    from shoal.cost.simulation_report import SimulationReport, format_simulation
    from shoal.cost.this_machine import this_cluster
    from shoal.launch.inspect import inspect_recipe
    from shoal.training.options import Recipe

    named, place = Recipe.named(recipe, settings), given["cluster"]
    cluster = this_cluster() if place is None else read_cluster(place)
    look = partial(_look, named, cluster, given)
    found = inspect_recipe(named, look, SimulationReport, given["plan"])
    if given["svg"] is not None:
        from shoal.cost.simulation_svg import draw_simulation

        write_picture(given["svg"], draw_simulation(found, recipe))
    if given["as_json"]:
        print_json(found.as_json())
    else:
        say(format_simulation(found, recipe))
    return 0


def _look(
    recipe: "Recipe", cluster: "Cluster", given: dict[str, Any], run: "Run"
) -> "SimulationReport":
    from shoal.cost.profile_index import profile_recipe
    from shoal.cost.simulation_report import make_report

    return make_report(run, cluster, given, lambda: profile_recipe(recipe, run))
