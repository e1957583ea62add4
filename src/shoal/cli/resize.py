"""`shoal resize`: more or fewer ranks and servers for a run that goes on."""

import click

from shoal.cli.output import print_json, say
from shoal.errors import UsageError


@click.command()
@click.argument("job")
@click.argument("size")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
def resize(job: str, size: str, as_json: bool) -> None:
    """Give JOB, a run directory or engine:id, another SIZE, while it goes on.

    \b
    shoal resize runs/charlm-small-1 data=3
    shoal resize local:1 "data=3 servers=2"

    Ranks (data=N) and parameter servers (servers=N) come or go between two steps, after
    which all meet. What is trained stays the same: the batch and its pieces do not change, so there
    can be no more ranks than pieces. Waits until it is done; Ctrl-C ends the waiting, not the
    change. With local_steps they come and go at the end of a window, and their number must divide
    the pieces. Plans with zero, tensor, pipeline or fragments cannot be resized: stop the run, and
    go on with --resume. Exit codes: 0 done, 2 refused.
    """
    from shoal.elastic.control import send_request
    from shoal.events.events import ResizedEvent
    from shoal.events.screen import resized_in_words
    from shoal.launch.engines import find_job

    found = find_job(job)
    if found.run_dir is None:
        raise UsageError(f"The run directory of {found.name} is not in sight of this machine.")
    try:
        answer = send_request(found.run_dir, resize=size)
    except KeyboardInterrupt:
        click.echo("shoal: the request stands; the run shows what becomes of it.", err=True)
        raise SystemExit(130) from None
    if "refused" in answer:
        raise UsageError(answer["refused"])
    say(f"shoal: {resized_in_words(ResizedEvent(generation=0, **answer))}", is_error=True)
    if as_json:
        print_json(answer)
