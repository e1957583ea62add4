"""`shoal queue`: the jobs of an engine, in the order of their turn."""

import click
import msgspec

from shoal.cli.options import read_settings
from shoal.cli.output import print_json, say
from shoal.cli.status import fields_of


@click.command()
@click.option("--on", default="local", show_default=True, metavar="ENGINE", help="Whose jobs.")
@click.option("--all", "is_all", is_flag=True, help="Those that have ended as well.")
@click.option(
    "--limit",
    "limits",
    multiple=True,
    metavar="NAME=N",
    callback=read_settings,
    help="Of the local queue, from now on: cores=N, running=N and waiting=N jobs, grace=N seconds "
    "for a job to save before it is killed. May be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def queue(on: str, is_all: bool, limits: dict[str, str], as_json: bool) -> None:
    """List the jobs that run and wait, in the order of their turn.

    \b
    shoal queue
    shoal queue --all --json
    shoal queue --limit cores=4 --limit running=2

    Exit codes: 0 shown, 2 there is no such engine or limit.
    """
    from pathlib import Path

    from shoal.formatting import table
    from shoal.launch.engines import make_engine
    from shoal.launch.run_status import RunStatus, read_run

    if limits:
        _set_limits(on, limits)
    found = [job for job in make_engine(on).jobs() if is_all or job.is_active]
    runs = [read_run(Path(job.run_dir)) if job.run_dir else RunStatus() for job in found]
    pairs = list(zip(found, runs, strict=True))
    if as_json:
        print_json({"jobs": [fields_of(*pair) for pair in pairs]})
        return
    rows = [
        (
            *(job.job, job.state, str(job.priority), f"{run.step}/{run.num_steps or '?'}"),
            *(job.run_dir, job.reason),
        )
        for job, run in pairs
    ]
    head = ("job", "state", "priority", "step", "run directory", "why")
    say(table([head, *rows], numbers=[2]) if rows else "no jobs")


def _set_limits(on: str, limits: dict[str, str]) -> None:
    from shoal.cluster.local_queue.engine import LocalQueue
    from shoal.errors import UsageError

    if on != "local":
        raise UsageError(f"--limit is of the local queue; {on} has limits of its own.")
    found = LocalQueue().limits(limits)
    values = msgspec.structs.asdict(found).items()
    shown = (f"{name}={'all' if value is None else value}" for name, value in values)
    say(f"shoal: limits are {' '.join(shown)}", is_error=True)
