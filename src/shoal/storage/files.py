"""Files that appear whole or not at all, whoever is killed when; and those that are one user's own.

They are written under another name beside their place and moved there in one act, so readers see
the file that was there before or the new one. Not for files that are added to, nor for checkpoints,
whose files appear together (`store.py`).

What others may read follows the umask. Keys and invitations do not: they are for their owner alone,
and are believed only if they are his, which a mode alone does not tell.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.errors import UsageError

MOST_PRIVATE_BYTES = 1 << 20


@contextmanager
def replacing(path: Path, mark: str = "partial") -> Iterator[Path]:
    """A path to write to; what is there takes the place of `path` if all goes well.

    The name is always the same, so that what a killed writer left is written over. Where several
    may write at once, each gives a `mark` of its own.
    """
    unfinished = path.with_name(f"{path.name}.{mark}")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that any number of processes may write at once; its directory must be there.

    On the disk before it has its name: after a loss of power, too, it is whole.
    """
    with replacing(path, os.urandom(6).hex()) as unfinished, open(unfinished, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def read_plain(path: Path, most_bytes: int | None = None) -> bytes:
    """All of a regular file. OSError if it is another thing, which might be waited for, or long."""
    return _read(path, most_bytes, follow=True)[0]


def read_private(path: Path, way_out: str, *, is_chosen: bool = False) -> bytes:
    """All of a file that its owner alone may read, and whose owner is this user.

    A mode proves nothing about a file that somebody else made: UsageError says whose it is. The
    directory must be this user's or root's too, and a link is not followed, unless the user himself
    has chosen this path (`is_chosen`). OSError if there is none.
    """
    content, found = _read(path, MOST_PRIVATE_BYTES, follow=is_chosen)
    _refuse_other_owner(path, found, way_out, or_root=is_chosen)
    if found.st_mode & 0o077:
        raise UsageError(
            f"{path} can be read by others (mode {stat.S_IMODE(found.st_mode):04o}), and is for "
            f"its owner alone. Run `chmod 600 {path}`, or make a new one if other people use this "
            "machine."
        )
    if not is_chosen:
        _refuse_other_owner(path.parent, os.stat(path.parent), way_out, or_root=True)
    return content


def write_private(path: Path, content: bytes, *, replace: bool = False) -> None:
    """Write a file of mode 0600, whatever the umask. One that is there is replaced, or an error."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    place = path.with_name(f"{path.name}.{os.urandom(6).hex()}") if replace else path
    descriptor = os.open(place, flags, 0o600)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o600)
            file.write(content)
        if replace:
            os.replace(place, path)
    except OSError:
        place.unlink(missing_ok=True)
        raise


def private_directory(path: Path, way_out: str) -> None:
    """Make a directory that only this user can enter, whatever the umask; refuse another's.

    Those above it are made alike. One that is there must be this user's, closed to others, and no
    link; and nobody but this user and root may put another in its place, so the one that it lies in
    must be theirs, and writable by others only as /tmp is. OSError if it cannot be made.
    """
    if not path.parent.exists():
        private_directory(path.parent, way_out)
    above = os.stat(path.parent)
    _refuse_other_owner(path.parent, above, way_out, or_root=True)
    if above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX:
        mode = stat.S_IMODE(above.st_mode)
        raise UsageError(f"{path.parent} can be written by others (mode {mode:04o}). {way_out}")
    try:
        os.mkdir(path, 0o700)
        os.chmod(path, 0o700)  # a umask may have taken more
    except FileExistsError:
        refuse_open_directory(path, way_out)


def refuse_open_directory(path: Path, way_out: str) -> None:
    """Refuse a directory that is a link, another user's, or open to others."""
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise UsageError(f"{path} is not a directory. {way_out}")
    _refuse_other_owner(path, found, way_out)
    if found.st_mode & 0o077:
        raise UsageError(
            f"{path} can be entered by others (mode {stat.S_IMODE(found.st_mode):04o}). {way_out}"
        )


def _read(path: Path, most_bytes: int | None, follow: bool) -> tuple[bytes, os.stat_result]:
    # Not blocking, or a pipe in the place of the file would be waited for.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            raise OSError(errno.ELOOP, "it is a link, which is not followed", str(path)) from None
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if most_bytes is not None and found.st_size > most_bytes:
            why = f"it has {found.st_size} bytes, and {most_bytes} is the most"
            raise OSError(errno.EFBIG, why, str(path))
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(-1 if most_bytes is None else most_bytes), found
    finally:
        os.close(descriptor)


def _refuse_other_owner(
    path: Path, found: os.stat_result, way_out: str, *, or_root: bool = False
) -> None:
    if found.st_uid == os.geteuid() or (or_root and found.st_uid == 0):
        return
    raise UsageError(
        f"{path} belongs to user {found.st_uid}, and this is user {os.geteuid()}: what it says may "
        f"be another's. {way_out}"
    )
