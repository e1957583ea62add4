"""`shoal report`: runs as one page in one file."""

from pathlib import Path

import click

from shoal.cli.output import print_json, say
from shoal.errors import UsageError


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file. Default: report.html in the run's directory, or here for several runs.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
def report(runs: tuple[Path, ...], out: Path | None, as_json: bool) -> None:
    """Write what there is to see of each RUN, a run directory, to one HTML file.

    \b
    shoal report runs/charlm-small-1
    shoal report runs/charlm-small-1 runs/charlm-small-2 -o both.html

    Curves with what happened drawn over them, what every worker did with its time, the bottleneck
    and what to try, incidents, checkpoints with the command that goes on from each, and settings;
    of several runs also what differs. It needs no network to be looked at. `shoal train` leaves one
    in its run directory. A file named by -o is not overwritten. Exit codes: 0 written, 2 there is
    no such run.
    """
    from shoal.formatting import plural
    from shoal.storage.run_dir import RUN
    from shoal.ui.report import REPORT, has_charts, write_report

    for run in runs:
        if not (run / RUN).exists():
            what = "holds no run" if run.is_dir() else "is no directory"
            raise UsageError(f"{run} {what}. Give the directory of one, as in runs/name-1.")
    if out is not None and out.exists():
        raise UsageError(f"{out} exists. Remove it, or name another file with -o.")
    place = out or (runs[0] / REPORT if len(runs) == 1 else Path(REPORT))
    views = write_report(runs, place)
    for view in views:
        told = f"{view.name}: {view.bottleneck.sentence} {plural(view.num_incidents, 'incident')}."
        say(told, is_error=True)
        for problem in view.problems:
            say(f"{view.name}: {problem}", is_error=True)
    if not has_charts():
        say("shoal: the chart library is not installed, so there are no curves.", is_error=True)
    say(f"report: {place}", is_error=True)
    if as_json:
        print_json(
            {
                "out": str(place),
                "bottleneck": views[0].bottleneck.sentence,
                "incidents": views[0].incidents,
                "runs": [
                    {
                        "run_dir": view.path,
                        "state": view.state,
                        "bottleneck": view.bottleneck,
                        "incidents": view.incidents,
                        "problems": view.problems,
                    }
                    for view in views
                ],
            }
        )
