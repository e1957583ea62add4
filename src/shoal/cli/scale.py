"""`shoal scale`: train a recipe on several numbers of ranks, and say where the time goes."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shoal.cli import options
from shoal.cli.output import as_json as json_option
from shoal.cli.output import print_json, say
from shoal.errors import UsageError, require
from shoal.formatting import in_seconds, table

if TYPE_CHECKING:
    from shoal.events.events import OnEvent
    from shoal.launch.scale import ScaleRow, Scaling


@click.command(epilog=options.plan_help())
@click.argument("recipe")
@click.option("--ranks", required=True, metavar="N,N,...", help="Numbers of ranks, as in 1,2,4.")
@options.plan
@options.settings
@click.option(
    "--steps",
    type=click.IntRange(min=5),
    default=40,
    show_default=True,
    help="Steps of each run; the first fifth does not count.",
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also draw speed-up and times into FILE: .svg, .png or .pdf (the extra `plot`).",
)
@json_option
def scale(
    recipe: str,
    ranks: str,
    plan: str | None,
    settings: dict[str, str],
    steps: int,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Train RECIPE on several numbers of ranks, and say how much faster more of them are.

    \b
    shoal scale recipes/charlm.py:small --ranks 1,2
    shoal scale recipes/charlm.py:small --ranks 1,2,4 --plan zero=1 --plot scale.svg

    Each is a short run of its own, one after the other. The plan leaves data open: it becomes
    what makes so many ranks. The table has samples a second, the speed-up over the fewest ranks,
    the share of the ideal that it is, the parts of a step, and what was predicted. Exit codes: 0
    done, 1 a run failed, 2 usage, plan or input.
    """
    options.refuse_unusable_process()
    options.check_plan(plan)
    from shoal.events.screen import Display
    from shoal.launch.scale import measure_scaling, parse_ranks
    from shoal.training.options import Recipe
    from shoal.world import cores

    counts = parse_ranks(ranks)
    if plot is not None:
        _check_plot(plot)
    display = Display()

    def watch(count: int) -> "OnEvent":
        display.num_steps = steps
        display.say(f"{recipe} on {count} rank{'s' * (count > 1)}")
        return display

    try:
        found = measure_scaling(
            Recipe.named(recipe, settings), plan, counts, steps, cores=cores(), watch=watch
        )
    finally:
        display.close()
    if plot is not None:
        _draw(found, recipe, plot)
    if as_json:
        print_json(found)
    else:
        say(_in_words(found))


def _in_words(found: "Scaling") -> str:
    head = ["ranks", "samples/s", "speed-up", "efficiency", "step", "predicted"]
    rows = [[*head, "compute", "exchange", "waiting", "data"]]
    rows += [_cells(row) for row in found.rows]
    text = table(rows, tuple(range(len(rows[0]))))
    return "\n".join([text, found.bottleneck, *found.notes])


def _cells(row: "ScaleRow") -> list[str]:
    return [
        str(row.ranks),
        f"{row.samples_per_s:.4g}",
        f"{row.speedup:.2f}",
        f"{row.efficiency:.0%}",
        in_seconds(row.step_s),
        "-" if row.predicted is None else in_seconds(row.predicted.step_s),
        *(in_seconds(row.times[part]) for part in ("compute", "exchange", "waiting", "data")),
    ]


def _check_plot(path: Path) -> None:
    """Before the first run begins, which may take long."""
    require("matplotlib", extra="plot")
    if path.suffix not in (".svg", ".png", ".pdf"):
        raise UsageError(f"--plot {path}: a picture is .svg, .png or .pdf.")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"--plot {path}: {path.parent} is no directory that can be written to.")


def _draw(found: "Scaling", recipe: str, path: Path) -> None:
    """Speed-up over ranks, measured, predicted and ideal; and the parts of a step."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    rows, first = found.rows, found.rows[0]
    counts = [row.ranks for row in rows]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 4))
    left.plot(counts, [count / first.ranks for count in counts], "k:", label="ideal")
    left.plot(counts, [row.speedup for row in rows], "o-", label="measured")
    if first.predicted is not None and all(row.predicted is not None for row in rows):
        times = [row.predicted.step_s for row in rows if row.predicted is not None]
        left.plot(counts, [times[0] / time for time in times], "x--", label="predicted")
    left.set(xlabel="ranks", ylabel=f"speed-up over {first.ranks}", title=recipe)
    left.legend()
    bottom = [0.0] * len(rows)
    for part in ("compute", "exchange", "waiting", "data"):
        heights = [1e3 * row.times[part] for row in rows]
        right.bar([str(count) for count in counts], heights, bottom=bottom, label=part)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    right.set(xlabel="ranks", ylabel="ms of a step")
    right.legend()
    figure.tight_layout()
    try:
        figure.savefig(path)
    except OSError as error:
        raise UsageError(f"The plot cannot be written to {path}: {error.strerror}.") from error
