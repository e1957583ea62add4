"""`shoal agent`: be a host of a run, as what started it asks. ssh, Slurm and Ray start it."""

import sys
from pathlib import Path

import click

from shoal.cli import options
from shoal.cli.join import serve
from shoal.errors import UsageError


@click.command()
@click.option(
    "--invitation",
    "path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Read the invitation from a file that only you can read, such as a mounted secret. "
    "Default: one line of standard input.",
)
@click.option(
    "--listen",
    "address",
    metavar="ADDRESS",
    help="The IP address at which other hosts reach this one. Default: the one that leads to the "
    "first host.",
)
def agent(path: Path | None, address: str | None) -> None:
    """Be a host of the run that an invitation names: an address and keys.

    What starts agents on other machines (ssh, srun, Ray) runs this command there and writes the
    invitation to its standard input, so that no key is on a command line, in an environment or in a
    file. Recipe, settings and files come from the first host. People use `shoal join RUN`.
    """
    options.refuse_unusable_process()
    from shoal.cluster.invitation import MOST_BYTES, Invitation, read_private_invitation
    from shoal.comm.endpoint import interface_of

    if path is not None:
        invitation = read_private_invitation(path)
    else:
        content = sys.stdin.buffer.readline(MOST_BYTES)
        if not content.strip():
            raise UsageError(
                "No invitation came on standard input. `shoal train --on` writes one; a person "
                "joins a run with `shoal join RUN`."
            )
        invitation = Invitation.decode(content, "The invitation on standard input")
    if invitation.keys is None:
        raise UsageError("The invitation holds no keys. `shoal join RUN` finds them beside it.")
    if address is not None:
        interface_of(address)
    sys.exit(serve(invitation, address))
