"""`shoal join`: take part in a run that another host started."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shoal.cli import options
from shoal.cli.output import say, tell_failure

if TYPE_CHECKING:
    from shoal.cluster.invitation import Invitation


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--listen",
    "address",
    metavar="ADDRESS",
    help="The IP address at which other hosts reach this one. Default: the one that leads to the "
    "host of `shoal train`.",
)
def join(run: Path, address: str | None) -> None:
    """Be a host of the run in directory RUN, which waits for it.

    \b
    first$ shoal train recipes/charlm.py:small --plan "data=4 sync=server" --nodes 2 \
             --listen 10.0.0.1
    second$ shoal join runs/charlm-small-1

    The directory lies on a file system that both hosts see, under the same path; keys that only
    you can read lie in it while the run goes on. The recipe and small files come from the first
    host. This host gets its share of ranks and servers, and spares of its own. Ctrl-C once stops
    the whole run cleanly, twice ends this host's part. The exit code is the run's, or 2 if this
    host is refused.
    """
    options.refuse_unusable_process()
    from shoal.cluster.invitation import read_invitation
    from shoal.comm.endpoint import interface_of

    invitation = read_invitation(run)
    if address is not None:
        interface_of(address)
    sys.exit(serve(invitation, address))


def serve(invitation: "Invitation", address: str | None) -> int:
    """Be a host of a run until it is over; the exit code."""
    from shoal.cluster.local import NotLoaded
    from shoal.launch.agent import serve as serve_run

    try:
        ended = serve_run(invitation, lambda text: say(f"shoal: {text}", is_error=True), address)
    except NotLoaded as error:
        return tell_failure(error)
    say(f"shoal: {ended.how.rstrip('.') or 'the run did not begin'}.", is_error=True)
    return ended.exit_code
