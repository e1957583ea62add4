"""`shoal stop`: let a job save itself and end."""

import click

from shoal.cli.output import print_json, say


@click.command()
@click.argument("job")
@click.option("--now", is_flag=True, help="End it at once, without a checkpoint.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
def stop(job: str, now: bool, as_json: bool) -> None:
    """Stop JOB, a run directory or engine:id, and wait until it has ended.

    \b
    shoal stop local:3
    shoal stop runs/charlm-small-1

    A run stops after the step under way and saves it, so that submitting it again with the same
    --run-dir, or `shoal train --resume`, goes on. Ctrl-C ends the waiting, not the stop. One that
    has ended already stays as it is. Exit codes: 0 it has ended, 2 there is no such job.
    """
    from shoal.launch.engines import find_job
    from shoal.launch.stop import stop_job

    found = find_job(job)
    try:
        state, run = stop_job(found, now=now)
    except KeyboardInterrupt:
        click.echo("shoal: it was asked to stop; `shoal status` shows how it ends.", err=True)
        raise SystemExit(130) from None
    saved = f", checkpoint {run.checkpoint}" if run.checkpoint else ""
    say(f"shoal: {found.name} is {state.state}{saved}", is_error=True)
    if as_json:
        print_json(
            {
                "job": state.job,
                "state": state.state,
                "checkpoint": run.checkpoint,
                "run_dir": state.run_dir,
            }
        )
