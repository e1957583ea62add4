"""How the processes of a host find the one memory area that they share, and how it goes away.

The area is a memory file without a name (memfd): the kernel keeps it as long as a process has it
open and frees it with the last one, however that one died. So nothing is ever left, and nothing has
to be cleaned. A newcomer finds it through a small list of the processes that have it open, kept
under a lock, and opens it through `/proc`; finding none alive, it makes an area and is the first on
the list.

The area belongs to one user, and to the processes that see each other's numbers (one container,
say). It does not outlive the last run: for what is to be kept longer there is the disk. Linux only.
"""

import fcntl
import os
import stat
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil

from shoal.data.cache import forks
from shoal.data.cache.layers import Content
from shoal.data.cache.memory import LAYOUT, MemoryLayer, geometry, lay_out, read_geometry
from shoal.errors import UsageError
from shoal.formatting import in_units
from shoal.logs import log, warn_once
from shoal.storage.decoding import try_decode_json
from shoal.storage.files import make_private_directory, try_lock

_NAME = "shoal-cache"
_BOOT_ID = "/proc/sys/kernel/random/boot_id"  # another one on every host, and after each start
_PATIENCE_S = 5.0
_PAUSE_S = 0.005


class _Attachment(msgspec.Struct, frozen=True):
    pid: int
    descriptor: int


class HostMemoryLayer(MemoryLayer):
    """The host's area, as this process has joined it: once, however many sources use it."""

    def __init__(self, descriptor: int, members: Path):
        super().__init__(descriptor)
        self.num_users = 0
        self._members = members
        self._is_listed = True
        forks.watch(self)

    def put(self, key: bytes, *parts: Content) -> bool:
        if not self._is_listed:
            # The process that was forked from may end, and this one be the only one to be found.
            self._is_listed = True
            _enlist(self._members, self.descriptor)
        return super().put(key, *parts)

    def close(self) -> None:
        """Called by each user once; the last one closes it."""
        with _joining:
            self.num_users -= 1
            if self.num_users == 0:
                _joined.pop(self._members, None)
                super().close()

    def after_fork(self) -> None:
        self._is_listed = False


_joined: "weakref.WeakValueDictionary[Path, HostMemoryLayer]" = weakref.WeakValueDictionary()
_joining = threading.Lock()


def attach_host_memory(num_bytes: int) -> HostMemoryLayer:
    """The area of this host and user; made with `num_bytes` if there is none."""
    total = psutil.virtual_memory().total
    if num_bytes > total:
        raise UsageError(
            f"cached(memory=...) is {in_units(num_bytes)}, and this machine has "
            f"{in_units(total)}. Use less, and a disk for the rest: disk='DIRECTORY'."
        )
    shape = geometry(num_bytes)
    members = _directory() / _list_name()
    with _joining:
        area = _joined.get(members)
        if area is None:
            area = HostMemoryLayer(_find_or_make(members, num_bytes), members)
            _joined[members] = area
        area.num_users += 1
    if area.shape != shape:
        warn_once(
            f"memory of {in_units(num_bytes)} has no effect: the runs of this host already share "
            f"{in_units(area.shape.num_bytes)} until the last of them ends.",
            on_screen=True,
        )
    return area


def _find_or_make(members: Path, num_bytes: int) -> int:
    """A descriptor of the area."""
    with members.open("a+b") as file:
        if not _locked(file.fileno()):
            log.warning(
                "The list of the processes that share a memory area is locked by one that does "
                f"not continue ({members}). This process keeps its samples to itself."
            )
            return _made(num_bytes)
        found = (_opened(member) for member in _read(file.fileno()))
        descriptor = next((each for each in found if each is not None), None)
        if descriptor is None:
            descriptor = _made(num_bytes)
        with _unheard():
            _write(file.fileno(), descriptor)
        return descriptor


def _enlist(members: Path, descriptor: int) -> None:
    with _unheard(), members.open("a+b") as file:
        if _locked(file.fileno()):
            _write(file.fileno(), descriptor)


@contextmanager
def _unheard() -> Iterator[None]:
    """A full disk costs that others know of this process, and nothing else."""
    try:
        yield
    except OSError as error:
        warn_once(f"Other runs may not find this one's cached samples: {error}.")


def _made(num_bytes: int) -> int:
    descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    lay_out(descriptor, num_bytes)
    # A file that shrinks under a map kills who reads it.
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return descriptor


def _opened(member: _Attachment) -> int | None:
    """The area, through a process that has it; None if it is gone or has something else there."""
    path = f"/proc/{member.pid}/fd/{member.descriptor}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            return None
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    if os.fstat(descriptor).st_uid == os.getuid() and read_geometry(descriptor) is not None:
        return descriptor
    os.close(descriptor)
    return None


def _read(file: int) -> list[_Attachment]:
    content = os.pread(file, os.fstat(file).st_size, 0)
    # It may be empty, or cut off by a death.
    return try_decode_json(content, list[_Attachment]) or []


def _write(file: int, descriptor: int) -> None:
    """This process and the others that live."""
    own = _Attachment(os.getpid(), descriptor)
    others = [member for member in _read(file) if member.pid != own.pid and _has_it(member)]
    os.ftruncate(file, 0)
    os.pwrite(file, msgspec.json.encode([*others, own]), 0)


def _has_it(member: _Attachment) -> bool:
    try:
        link = os.readlink(f"/proc/{member.pid}/fd/{member.descriptor}")
    except OSError:
        return False
    return link.startswith(f"/memfd:{_NAME}")


def _locked(file: int) -> bool:
    """Hold the list until the file is closed; whether that came about in time."""
    deadline = time.monotonic() + _PATIENCE_S
    while not try_lock(file):
        if time.monotonic() > deadline:
            return False
        time.sleep(_PAUSE_S)
    return True


def _directory() -> Path:
    """Where the list is: local to the host, and this user's own."""
    chosen = os.environ.get("SHOAL_CACHE") or os.environ.get("XDG_RUNTIME_DIR")
    directory = Path(chosen or f"/tmp/shoal-{os.getuid()}") / "shared"
    try:
        if chosen is None:
            make_private_directory(directory, "Remove it, or name another with SHOAL_CACHE.")
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        found = directory.stat()
    except OSError as error:
        raise UsageError(
            f"{directory} cannot be used: {error.strerror}. The runs of a host find their shared "
            "samples through it; name another directory with SHOAL_CACHE."
        ) from error
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise UsageError(
            f"{directory} can be written by others. The runs of a host find their shared samples "
            "through it; remove it, or name another directory with SHOAL_CACHE."
        )
    return directory


def _list_name() -> str:
    """One list for the processes that see each other, and for one layout of the area.

    Namespaces are numbered alike on every host, and the directory may be one that hosts share.
    """
    boot = Path(_BOOT_ID).read_text(encoding="ascii").strip()
    return f"memory-{boot}-{os.stat('/proc/self/ns/pid').st_ino}-{LAYOUT}.json"
