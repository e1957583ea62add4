"""What a run leaves in its directory for hosts that join it: an invitation, and the keys beside it.

Only the user of the run can read them, and they are removed when it ends. The directory must lie on
a file system that all hosts see, under the same path; a host on which it does not is told so here.
"""

import os
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from shoal.errors import UsageError
from shoal.files import replacing
from shoal.plan import Plan

INVITATION = "join.json"
KEYS = "keys"


class Invitation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    address: str  # where hosts come in
    directory: str  # in which the run was started
    run_dir: str  # as seen from there
    recipe: str
    settings: dict[str, str]
    options: dict[str, Any]  # of the command line, as far as the preparation needs them
    shoal: str = version("shoal")

    @property
    def endpoint(self) -> tuple[str, int]:
        """IP address and port."""
        ip, _, port = self.address.removeprefix("tcp://").rpartition(":")
        return ip.strip("[]"), int(port)


def invite(invitation: Invitation, run_dir: Path) -> None:
    """Let hosts find it."""
    with replacing(run_dir / INVITATION) as unfinished:
        fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            file.write(msgspec.json.encode(invitation))


def withdraw(run_dir: Path) -> None:
    """Remove what was left for hosts."""
    for name in (INVITATION, KEYS):
        with suppress(OSError):  # of a disk that cannot be written any more
            (run_dir / name).unlink(missing_ok=True)


def read_invitation(run_dir: Path) -> Invitation:
    """UsageError says why there is none, or none that this host can follow."""
    try:
        content = (run_dir / INVITATION).read_bytes()
    except FileNotFoundError:
        raise UsageError(_why_none(run_dir)) from None
    except OSError as error:
        raise UsageError(
            f"{run_dir / INVITATION} cannot be read: {error.strerror}. Join as the user who "
            "started the run."
        ) from error
    try:
        shoal = msgspec.json.decode(content).get("shoal")
        if shoal != version("shoal"):
            raise UsageError(
                f"The run in {run_dir} was started by Shoal {shoal}, and this host has "
                f"{version('shoal')}. Install one version on all hosts."
            )
        found = msgspec.json.decode(content, type=Invitation)
    except (msgspec.MsgspecError, AttributeError) as error:
        raise UsageError(
            f"{run_dir / INVITATION} cannot be read: {error}. Start the run again."
        ) from error
    there = Path(found.directory) / found.run_dir
    if not (there.is_dir() and there.samefile(run_dir)):
        raise UsageError(
            f"The run was started in {found.directory} and keeps its files in {found.run_dir} "
            "there, which is not the same directory on this host. It must lie on a file system "
            "that all hosts see under one path."
        )
    return found


def _why_none(run_dir: Path) -> str:
    try:
        plan = str(msgspec.json.decode((run_dir / "run.json").read_bytes())["plan"])
    except (OSError, msgspec.MsgspecError, KeyError, TypeError):
        return (
            f"{run_dir} holds no run that waits for hosts. Give the directory that `shoal train "
            "--listen` names. It must lie on a file system that all hosts see."
        )
    if Plan.parse(plan).hosts == 1:
        return (
            f"The run in {run_dir} is on one host, under {plan or 'data=1'!r}. To span several, "
            "start it with hosts=H in its plan and --listen ADDRESS."
        )
    return (
        f"The run in {run_dir} waits for no hosts: it has ended, or was started without --listen."
    )
