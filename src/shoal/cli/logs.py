"""`shoal logs`: what a job, or one of its ranks, has printed."""

import click

from shoal.cli.output import as_json, print_json, say


@click.command()
@click.argument("job")
@click.option("--rank", type=click.IntRange(min=0), help="Of this rank, instead of the command.")
@click.option("--follow", is_flag=True, help="Go on until the job has ended.")
@as_json
def logs(job: str, rank: int | None, follow: bool, as_json: bool) -> None:
    """Print the lines of JOB, a run directory or engine:id.

    \b
    shoal logs local:3 --follow
    shoal logs runs/charlm-small-1 --rank 1

    Without --rank they are those of the command that trains, or for a plain `shoal train`, which
    prints to its own terminal, those of rank 0. Exit codes: 0 shown, 2 there is no such job, rank
    or log.
    """
    from shoal.launch.engines import find_job
    from shoal.launch.job_logs import lines_of

    try:
        lines = lines_of(find_job(job), rank=rank, follow=follow)
        if as_json:
            print_json({"lines": [*lines]})
            return
        for line in lines:
            say(line)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
