"""The invitation in a run directory for hosts that join the run, and the keys beside it.

Only the user of the run can read them, and they are removed when it ends. A host loads the recipe
that the invitation names, so it follows only one that its own user wrote. The directory must be on
a file system that all hosts see under one path; else an error says so here.
"""

import ipaddress
from contextlib import suppress
from pathlib import Path

import msgspec

from shoal import __version__
from shoal.errors import UsageError
from shoal.plans.plan import Plan
from shoal.storage.decoding import decode_json
from shoal.storage.files import read_private, write_private
from shoal.storage.run_dir import read_description
from shoal.training.options import StartOptions

INVITATION = "join.json"
KEYS = "keys"


class Invitation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    address: str  # where hosts connect
    directory: str  # in which the run was started
    run_dir: str  # as seen from there
    recipe: str
    settings: dict[str, str]
    options: StartOptions
    shoal: str = __version__

    def __post_init__(self) -> None:
        if self.options.plan is None:
            raise ValueError("it names no plan")
        ip, port = self.endpoint
        ipaddress.ip_address(ip)
        if (
            self.address not in (f"tcp://{ip}:{port}", f"tcp://[{ip}]:{port}")
            or not 0 < port < 2**16
        ):
            raise ValueError(f"{self.address!r} is no address")

    @property
    def endpoint(self) -> tuple[str, int]:
        """IP address and port."""
        ip, _, port = self.address.removeprefix("tcp://").rpartition(":")
        return ip.strip("[]"), int(port)


class _Version(msgspec.Struct):
    """The version, which is checked before the rest is decoded."""

    shoal: str


def write_invitation(invitation: Invitation, run_dir: Path) -> None:
    """Write it for hosts to find."""
    write_private(run_dir / INVITATION, msgspec.json.encode(invitation), replace=True)


def remove_invitation(run_dir: Path) -> None:
    """Remove the invitation and the keys."""
    for name in (INVITATION, KEYS):
        with suppress(OSError):  # of a disk that cannot be written any more
            (run_dir / name).unlink(missing_ok=True)


def read_invitation(run_dir: Path) -> Invitation:
    """UsageError says why there is none, or why this host cannot follow it."""
    path, way_out = run_dir / INVITATION, "Join as the user who started the run."
    try:
        content = read_private(path, way_out)
    except FileNotFoundError:
        raise UsageError(_why_none(run_dir)) from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}. {way_out}") from error
    again = "Start the run again."
    shoal = decode_json(content, _Version, str(path), way_out=again).shoal
    if shoal != __version__:
        raise UsageError(
            f"The run in {run_dir} was started by Shoal {shoal}, and this host has "
            f"{__version__}. Install one version on all hosts."
        )
    found = decode_json(content, Invitation, str(path), way_out=again)
    there = Path(found.directory) / found.run_dir
    if not _is_same(there, run_dir):
        raise UsageError(
            f"The run was started in {found.directory} and keeps its files in {found.run_dir} "
            "there, which is not the same directory on this host. It must lie on a file system "
            "that all hosts see under one path."
        )
    return found


def _is_same(one: Path, other: Path) -> bool:
    """Whether both are one directory; False for an invalid path."""
    try:
        return one.is_dir() and one.samefile(other)
    except (OSError, ValueError):
        return False


def _why_none(run_dir: Path) -> str:
    try:
        plan = read_description(run_dir).plan
        num_hosts = Plan.parse(plan).hosts
    except (OSError, UsageError):
        return (
            f"{run_dir} holds no run that waits for hosts. Give the directory that `shoal train "
            "--listen` names. It must lie on a file system that all hosts see."
        )
    if num_hosts == 1:
        return (
            f"The run in {run_dir} is on one host, under {plan or 'data=1'!r}. To span several, "
            "start it with hosts=H in its plan and --listen ADDRESS."
        )
    return (
        f"The run in {run_dir} waits for no hosts: it has ended, or was started without --listen."
    )
