"""`shoal warm`: a warm process in the background, so that commands start at once."""

import sys
from pathlib import Path

import click

from shoal.cluster import warm as server
from shoal.errors import UsageError


@click.command()
@click.argument("action", type=click.Choice(["start", "stop", "status"]))
@click.option(
    "--idle-minutes",
    type=click.FloatRange(min=0.01),
    default=60.0,
    show_default=True,
    help="With start: leave after this long without a command.",
)
def warm(action: str, idle_minutes: float) -> None:
    """Start, stop or show the process that keeps torch loaded between commands.

    While it is up, `shoal train`, `run` and `verify` are forked from it and begin within a fraction
    of a second. It belongs to you alone, uses no port, and leaves by itself when idle.
    """
    try:
        if action == "start":
            started = server.start(idle_minutes * 60.0)
            click.echo("warm" if started else "it was warm already")
        elif action == "stop":
            click.echo("stopped" if server.stop() else "there was none")
        else:
            click.echo("warm" if server.is_up() else "cold")
    except OSError as error:
        raise UsageError(f"{error}.") from error


def _serve(path: str, idle_s: str) -> None:
    from shoal.cli.main import run_here

    server.serve(Path(path), float(idle_s), run_here)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
