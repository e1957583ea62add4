"""`shoal join`: take part in a run that another host started."""

import os
import sys
from pathlib import Path
from typing import Any

import click

from shoal.cli import options
from shoal.cli.output import say


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
    first$ shoal train recipes/charlm.py:small --plan "data=4 sync=server hosts=2" --listen 10.0.0.1
    second$ shoal join runs/charlm-small-1

    The directory lies on a file system that all hosts see, under the same path, as do the recipe
    and its data; keys that only you can read lie in it while the run goes on. This host gets its
    share of ranks and servers, and spares of its own. Ctrl-C once stops the whole run cleanly,
    twice ends this host's part, and with it the run. The exit code is the run's, or 2 if this host
    is refused.
    """
    options.refuse_unusable_process()
    from shoal.cluster.host_agent import join_run
    from shoal.cluster.invitation import read_invitation
    from shoal.comm.endpoint import interface_of
    from shoal.training.options import Recipe

    invitation = read_invitation(run)
    if address is not None:
        interface_of(address)
    os.chdir(invitation.directory)

    def prepare() -> Any:
        from shoal.launch.prepare import prepare_run

        recipe = Recipe.named(invitation.recipe, invitation.settings)
        return prepare_run(recipe, invitation.options, Path(invitation.run_dir), joins=True)

    farewell = join_run(
        invitation, prepare, address, lambda text: say(f"shoal: {text}", is_error=True)
    )
    say(f"shoal: {farewell.how.rstrip('.') or 'the run did not begin'}.", is_error=True)
    sys.exit(farewell.exit_code)
