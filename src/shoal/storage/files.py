"""Files that appear whole or not at all, and files that only their owner may read.

A file is written under another name beside its place and renamed in one act, so readers see the old
file or the new one, even if the writer is killed. Not for files that are appended to, nor for
checkpoints, whose files appear together (`store.py`).

Public files follow the umask. Keys and invitations are for their owner only, and are trusted only
if the owner is right as well as the mode.
"""

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import xxhash

from shoal.errors import UsageError

MOST_PRIVATE_BYTES = 1 << 20


@contextmanager
def atomic_replace(path: Path, mark: str = "partial") -> Iterator[Path]:
    """A path to write to; it replaces `path` if there is no error.

    The name is always the same, so that the next writer overwrites what a killed one left. Where
    several may write at once, each uses its own `mark`.
    """
    unfinished = path.with_name(f"{path.name}.{mark}")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file that several processes may write at once; its directory must exist.

    fsync comes before the rename, so the file is whole after a power loss too.
    """
    with atomic_replace(path, os.urandom(6).hex()) as unfinished, open(unfinished, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_hashed(path: Path, magic: bytes, body: bytes | bytearray) -> None:
    """Write a file that begins with a line of its hash, so that damage is noticed."""
    write_atomic(path, _hash_line(magic, body) + body)


def read_hashed(path: Path, magic: bytes) -> bytearray | None:
    """What `write_hashed` wrote; None if there is another content. FileNotFoundError if none."""
    with path.open("rb") as file:
        line = file.readline(len(_hash_line(magic, b"")))
        body = bytearray(os.fstat(file.fileno()).st_size - len(line))
        file.readinto(body)
    return body if line == _hash_line(magic, body) else None


def _hash_line(magic: bytes, body: bytes | bytearray) -> bytes:
    return magic + b" xxh3:" + xxhash.xxh3_128_hexdigest(body).encode() + b"\n"


def write_all(descriptor: int, content: bytes | bytearray | memoryview) -> None:
    """Write all of it: the system may take a part at a time, and report a full disk only then."""
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def try_lock(file: int | IO[Any]) -> bool:
    """Lock an open file against other processes, until it is closed; False if one has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_regular_file(path: Path, most_bytes: int | None = None) -> bytes:
    """Read a regular file. OSError if it is a pipe, a device, or longer than `most_bytes`."""
    return _read(path, most_bytes, follow=True)[0]


def read_private(path: Path, way_out: str, *, is_chosen: bool = False) -> bytes:
    """Read a file that belongs to this user and that no other user may read.

    UsageError if it belongs to another user, whatever its mode. The directory must belong to this
    user or root, and a link is not followed, unless the user has chosen this path (`is_chosen`).
    OSError if there is no file.
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


def umask() -> int:
    """What new files of this process lack; asking the system for it would set it for a moment."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("\nUmask:")[2].split(maxsplit=1)[0], 8)


def follow_umask(directory: Path) -> None:
    """Give the files of a directory the mode of new ones: safetensors writes for the owner only."""
    for file in directory.iterdir():
        if file.is_file():
            file.chmod(0o666 & ~umask())


def write_private(path: Path, content: bytes, *, replace: bool = False) -> None:
    """Write a file of mode 0600, whatever the umask. An existing one is replaced, or an error."""
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


def make_private_directory(path: Path, way_out: str) -> None:
    """Make a directory that only this user can enter, whatever the umask; refuse another user's.

    Missing parents are made alike. An existing directory must belong to this user, be closed to
    others, and be no link. Its parent must belong to this user or root, and be writable by others
    only with the sticky bit, as /tmp, so that no other user can replace it. OSError if it cannot be
    made.
    """
    if not path.parent.exists():
        make_private_directory(path.parent, way_out)
    above = os.stat(path.parent)
    _refuse_other_owner(path.parent, above, way_out, or_root=True)
    if above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX:
        mode = stat.S_IMODE(above.st_mode)
        raise UsageError(f"{path.parent} can be written by others (mode {mode:04o}). {way_out}")
    try:
        os.mkdir(path, 0o700)
        os.chmod(path, 0o700)  # the umask may have removed bits
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
    # Not blocking: a pipe in place of the file must not hang the reader.
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
