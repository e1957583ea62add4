"""The invitation to a run: where it listens, and the keys that both sides show.

A starter writes it to the standard input of `shoal agent`. For `shoal join` it lies in the run
directory, with the keys beside it: only the user of the run can read them, and they are removed
when it ends. A host loads the recipe that the run names, so it follows only an invitation that its
own user wrote. All else comes through the channel (`host_channel.py`).
"""

import ipaddress
from contextlib import suppress
from pathlib import Path
from typing import Self

import msgspec

from shoal import __version__
from shoal.comm.wire import Keys, are_whole, load_keys, write_keys
from shoal.errors import UsageError
from shoal.plans.plan import Plan
from shoal.storage.decoding import decode_json
from shoal.storage.files import MOST_PRIVATE_BYTES, read_private, write_private
from shoal.storage.run_dir import read_description

INVITATION = "join.json"
KEYS = "keys"
MOST_BYTES = MOST_PRIVATE_BYTES


class Invitation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    address: str  # where hosts connect
    keys: Keys | None = None  # None in the run directory, which has them in a file of their own
    run_dir: str = ""  # of the run, as seen from the first host
    shoal: str = __version__

    def __post_init__(self) -> None:
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

    def encode(self) -> bytes:
        """In one line."""
        return msgspec.json.encode(self) + b"\n"

    @classmethod
    def decode(cls, content: bytes, place: str) -> Self:
        """UsageError if it is none, or of another version of Shoal."""
        again = "Start the run again."
        shoal = decode_json(content, _Version, place, way_out=again).shoal
        if shoal != __version__:
            raise UsageError(
                f"The run was started by Shoal {shoal}, and this host has {__version__}. Install "
                "one version on all hosts."
            )
        found = decode_json(content, cls, place, way_out=again)
        if found.keys is not None and not are_whole(found.keys):
            raise UsageError(f"{place} does not hold the keys of a run. {again}")
        return found


class _Version(msgspec.Struct):
    """The version, which is checked before the rest is decoded."""

    shoal: str


def write_invitation(invitation: Invitation, run_dir: Path) -> None:
    """Write it for hosts to find, with the keys in a file of their own."""
    if invitation.keys is not None:
        write_keys(invitation.keys, run_dir / KEYS)
    public = msgspec.structs.replace(invitation, keys=None)
    write_private(run_dir / INVITATION, public.encode(), replace=True)


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
    found = Invitation.decode(content, str(path))
    if not _is_same(Path(found.run_dir), run_dir):
        raise UsageError(
            f"The run keeps its files in {found.run_dir}, which is not the same directory on this "
            "host. It must lie on a file system that all hosts see under one path."
        )
    return msgspec.structs.replace(found, keys=load_keys(run_dir / KEYS))


def read_private_invitation(path: Path) -> Invitation:
    """One that a secret was mounted as, or that was copied here."""
    way_out = "Give a file that only you can read."
    try:
        content = read_private(path, way_out, is_chosen=True)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}. {way_out}") from error
    return Invitation.decode(content, str(path))


def _is_same(one: Path, other: Path) -> bool:
    """Whether both are one directory; False for an invalid path."""
    try:
        return one.is_dir() and one.samefile(other)
    except (OSError, ValueError):
        return False


def _why_none(run_dir: Path) -> str:
    try:
        plan = read_description(run_dir).plan
        Plan.parse(plan)
    except (OSError, UsageError):
        return (
            f"{run_dir} holds no run that waits for hosts. Give the directory that `shoal train "
            "--listen` names. It must lie on a file system that all hosts see."
        )
    return (
        f"The run in {run_dir}, under {plan or 'data=1'!r}, waits for no hosts: it has ended, or "
        "was started without --listen ADDRESS and --nodes N."
    )
