"""`shoal join`: take part in a run that another host started."""

import os
import sys
from pathlib import Path
from typing import Any

import click
import msgspec

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
    options.refuse_closed_output()
    from shoal.cluster.invitation import read_invitation
    from shoal.cluster.joining import join_run
    from shoal.cluster.local import NotLoaded
    from shoal.comm.reach import interface_of
    from shoal.numerics.precision import environment_for
    from shoal.plans.plan import Plan

    invitation = read_invitation(run)
    if address is not None:
        interface_of(address)
    os.chdir(invitation.directory)
    os.environ.update(environment_for(Plan.parse(invitation.options.plan).precision))

    def prepare() -> Any:
        from shoal.cli.train import prepare_run

        given, run_dir = msgspec.structs.asdict(invitation.options), Path(invitation.run_dir)
        return prepare_run(invitation.recipe, invitation.settings, given, run_dir, joins=True)

    try:
        farewell = join_run(
            invitation, prepare, address, lambda text: say(f"shoal: {text}", is_error=True)
        )
    except NotLoaded as error:
        from shoal.cli.train import tell_not_loaded

        sys.exit(tell_not_loaded(error))
    say(f"shoal: {farewell.how.rstrip('.') or 'the run did not begin'}.", is_error=True)
    sys.exit(farewell.exit_code)
