"""Unix sockets that only processes of one user can reach.

They lie in a directory that only its owner may enter, so the kernel lets no other user connect,
and no other user can put a socket of its own in the place of one. Ports of loopback and abstract
sockets have neither property. A connection also tells whose process is at its other end.

Linux only. Loads nothing heavy: `cluster/warm.py` is what a client imports.
"""

import os
import secrets
import shutil
import socket
import stat
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shoal.errors import UsageError

NAME = "sockets"
MOST_BYTES = 107  # of a socket's path, by the kernel
_PEER = struct.Struct("3i")  # process, user, group
_short_of: dict[str, str] = {}  # names of directories that are short enough


@contextmanager
def socket_directory(run_dir: Path) -> Iterator[Path]:
    """A directory for the sockets of a run, removed afterwards.

    It is in the run's directory, which is locked, so what stands there is of a run that was killed;
    or among temporary files, if that is on a file system without sockets.
    """
    path = run_dir.absolute() / NAME
    try:
        with suppress(FileNotFoundError):
            shutil.rmtree(path)
        os.mkdir(path, 0o700)
        os.chmod(path, 0o700)  # whatever the umask
        _try_out(str(path))
        usable = True
    except (OSError, UsageError, UnicodeEncodeError):  # no sockets or owners there, or no text
        usable = False
    if not usable:
        with suppress(OSError):
            os.rmdir(path)
        path = Path(tempfile.mkdtemp(prefix="shoal-"))
    try:
        yield path
    finally:
        release(str(path))
        shutil.rmtree(path, ignore_errors=True)


def _try_out(directory: str) -> None:
    directory.encode()  # as messages carry it
    path = reachable(new_path(directory))
    with socket.socket(socket.AF_UNIX) as trial:
        trial.bind(path)
    os.unlink(path)


def new_path(directory: str) -> str:
    """For a socket in a directory of this user's own; UsageError if it is not."""
    refuse_open(directory)
    return os.path.join(directory, secrets.token_hex(6))


def refuse_open(directory: str) -> None:
    """Refuse a directory that other users may enter, or own."""
    try:
        facts = os.lstat(directory)
    except OSError as error:
        raise UsageError(
            f"There is no directory {directory} for the sockets of a run: {error.strerror}."
        ) from error
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
        raise UsageError(
            f"{directory} is to hold sockets, and is not a directory that this user alone may "
            f"enter (user {facts.st_uid}, mode {stat.S_IMODE(facts.st_mode):04o}). Remove it."
        )


def reachable(path: str) -> str:
    """The same socket by a name that is short enough for the kernel, however deep it lies."""
    if len(os.fsencode(path)) <= MOST_BYTES:
        return path
    directory, name = os.path.split(path)
    if directory not in _short_of:  # held for good: a connection that breaks is made again
        found = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        _short_of[directory] = f"/proc/self/fd/{found}"
    return f"{_short_of[directory]}/{name}"


def is_own(connection: socket.socket) -> bool:
    """Whether the process at the other end is one of this user's."""
    try:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    except OSError:
        return False
    return bool(_PEER.unpack(credentials)[1] == os.geteuid())


def release(directory: str) -> None:
    """What `reachable` holds of a directory; call it before the directory is removed."""
    if directory in _short_of:
        os.close(int(_short_of.pop(directory).rpartition("/")[2]))
