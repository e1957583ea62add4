"""The run directory, which holds a run's events, metrics, logs and model; and the cache directory.

A run directory belongs to one run at a time. The owner holds a lock that the kernel releases when
the owner dies, so nothing has to be cleaned up by hand.
"""

import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Annotated, Any, Generic, Literal, NamedTuple, Self, TypeVar

import msgspec

from shoal.errors import UsageError, sendable
from shoal.storage.decoding import decode_json, encode_json
from shoal.storage.files import read_regular_file, try_lock, write_atomic
from shoal.system.processes import disown_descriptor, own_descriptor

T = TypeVar("T")

MOST_DESCRIPTION_BYTES = 64 << 20
OWNER, RUN = "owner", "run.json"
LEAVING_S = 5.0  # for the processes of a killed run to end
LOGS_BEFORE_A_RUN = ("recipe*.log", "reference.log")


class RunDir:
    """A locked run directory; use it in a `with` block. It is removed if no run began in it.

    With `resume` it is the directory of an earlier run, by default the recipe's last, or a new one
    if there is none: so the same command can be repeated after any failure. `is_resumed` says
    which it was.
    """

    def __init__(self, path: Path | None, recipe: str, *, resume: bool = False):
        _refuse_unwritable(recipe, "recipe")
        _refuse_unwritable(str(path or ""), "run directory")
        if resume:
            path = _last_of(recipe) if path is None else path
        self._made: list[Path]  # directories that this run made, in order
        self._began = False
        try:
            self.path, self._made = _next_free(recipe) if path is None else (path, [])
            if not (self.path / "logs").exists():
                self._made += _make(self.path / "logs")
            self._lock = _lock(self.path)
        except OSError as error:
            raise _unwritable(path or Path("runs"), error) from error
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._place = self._now()
        self.is_resumed = (self.path / RUN).exists()
        if self.is_resumed and not resume:
            self._release()
            self._discard()
            raise UsageError(
                f"{self.path} already holds a run. Go on with it by --resume, or choose another "
                "directory."
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._release()
        if not self._began:
            self._discard()

    def described(self) -> "RunDescription":
        """What run.json says of the run that began here."""
        return read_description(self.path)

    def record(self) -> dict[str, Any]:
        """The whole content of run.json, with every field of the Run."""
        self.described()  # refuses an invalid one
        return decode_json((self.path / RUN).read_bytes(), dict[str, Any], str(self.path / RUN))

    def describe(self, **facts: Any) -> None:
        """Write run.json: the resolved run and plan with origins of values. The run has begun."""
        text = msgspec.json.format(encode_json(facts), indent=2)
        try:
            write_atomic(self.path / RUN, text + b"\n")  # whole, for a run that resumes
        except OSError as error:
            raise _unwritable(self.path, error) from error
        self._began = True

    def where(self) -> Path:
        """Where the directory is now; its old path if it was removed."""
        now = Path(self._now())
        return now if self._now() != self._place and now.is_dir() else self.path

    def moved(self) -> str:
        """A warning if the directory was moved or removed; empty otherwise."""
        now = self._now()
        if now == self._place:
            return ""
        if not Path(now).is_dir():
            return (
                f"The run directory {self.path} was removed while the run went on, and its record "
                "with it. Checkpoints and the model of later steps are written to a new one there."
            )
        return (
            f"The run directory {self.path} was moved to {now} while the run went on. Its record "
            f"is there; checkpoints and the model of later steps are in {self.path}. Put them "
            "together, and do not move the directory of a run that has not ended."
        )

    def _now(self) -> str:
        """The path of the open directory, from the kernel."""
        return os.readlink(f"/proc/self/fd/{self._descriptor}")

    def _release(self) -> None:
        with suppress(OSError):  # the disk may not be writable any more
            os.unlink(OWNER, dir_fd=self._descriptor)
        os.close(self._descriptor)
        _unlock(self._lock)

    def _discard(self) -> None:
        """Remove the directories that this run made; other files stay."""
        for name in LOGS_BEFORE_A_RUN:
            for log in (self.path / "logs").glob(name):
                log.unlink(missing_ok=True)
        remove_empty(self._made)


Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Number = Annotated[int, msgspec.Meta(ge=1, le=2**53)]  # of samples, of a step


class RecordedValue(msgspec.Struct, Generic[T], frozen=True):
    """A field of a Run in run.json; its origin, for people, is not read."""

    value: T


class RecordedFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a Run that determine the order of its samples."""

    batch_size: RecordedValue[Number]
    seed: RecordedValue[int]
    end: RecordedValue[Literal["drop", "pad", "wrap"]]
    data_order: RecordedValue[str] | None = None
    new_data_order: RecordedValue[str] | None = None


class RunDescription(msgspec.Struct, frozen=True, kw_only=True):
    """The part of run.json that other commands use. The recipe is for people, and is compared with
    the one that the user names. No command loads it."""

    recipe: str = ""
    settings: dict[str, str] = {}
    plan: str = ""
    run: RecordedFields | None = None
    num_samples: Number | None = None
    keep: str | None = None
    checkpoints: str | None = None
    tensorboard: bool = False
    track: str | None = None
    begin_from: str | None = None
    new_data: str | None = None
    new_data_steps: Count | None = None
    new_data_missed: tuple[Count, ...] | None = None
    replay: Annotated[float, msgspec.Meta(ge=0, lt=1)] | None = None


def read_description(run_dir: Path) -> RunDescription:
    """What run.json in this directory says. FileNotFoundError if there is none."""
    path, way_out = run_dir / RUN, "Name a run whose record is whole."
    try:
        content = read_regular_file(path, MOST_DESCRIPTION_BYTES)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}. {way_out}") from error
    return decode_json(content, RunDescription, str(path), way_out=way_out)


def _unwritable(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"The run directory {path} cannot be written: {error.strerror}. Choose another with "
        "--run-dir DIR."
    )


@contextmanager
def lock_directory(path: Path) -> Iterator[None]:
    """Lock a directory other than the run's own, so that no other run uses it."""
    try:
        made = [] if path.is_dir() else _make(path)
        lock = _lock(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from error
    try:
        yield
    finally:
        with suppress(OSError):
            (path / OWNER).unlink(missing_ok=True)
        _unlock(lock)
        remove_empty(made)


class RunOwner(NamedTuple):
    """The process that holds the lock of a run directory."""

    pid: int
    host: str

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()


def owner_of(path: Path) -> RunOwner | None:
    """Who holds the lock of a run directory; None if no run is under way there.

    The lock itself is not tried, which could keep a run from it that begins just then. What a
    host that is out of sight says of itself is believed.
    """
    try:
        words = (path / OWNER).read_text("utf-8", "replace").split()
    except OSError:
        return None
    if len(words) != 4 or not words[1].isdigit():
        return None
    owner = RunOwner(int(words[1]), words[3])
    return owner if not owner.is_here or _has_open(owner.pid, path / OWNER) else None


def _has_open(pid: int, path: Path) -> bool:
    """Whether a process of this host has a file open; that of another user is believed to."""
    try:
        links = list(Path(f"/proc/{pid}/fd").iterdir())
    except PermissionError:
        return True
    except OSError:
        return False
    for link in links:
        with suppress(OSError):
            if link.samefile(path):
                return True
    return False


def make_run_dir(path: Path | None, recipe: str) -> tuple[Path, list[Path]]:
    """Make the directory of a run that begins later, or find the one given; and what was made."""
    _refuse_unwritable(recipe, "recipe")
    _refuse_unwritable(str(path or ""), "run directory")
    try:
        if path is None:
            return _next_free(recipe)
        return path, [] if path.is_dir() else _make(path)
    except OSError as error:
        raise _unwritable(path or Path("runs"), error) from error


def cache_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Where Shoal caches what is costly to find out again."""
    if environment.get("SHOAL_CACHE"):
        return Path(environment["SHOAL_CACHE"])
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "shoal"


def _refuse_unwritable(name: str, what: str) -> None:
    """Refuse a name that is not UTF-8, as records and messages are."""
    if sendable(name) != name:
        raise UsageError(
            f"The name of the {what}, {sendable(name)}, cannot be written in UTF-8, as the records "
            "of a run are. Rename it, or set a locale of UTF-8, such as LC_ALL=C.UTF-8."
        )


def stem_of(recipe: str) -> str:
    return recipe.rpartition("/")[2].replace(".py:", "-").replace(":", "-").replace(".py", "")


def _last_of(recipe: str) -> Path | None:
    """The newest runs/<recipe>-<n> in which a run began, if one did."""
    numbers = [
        int(number)
        for found in Path("runs").glob(f"{stem_of(recipe)}-*/{RUN}")
        if (number := found.parent.name.rpartition("-")[2]).isdigit()
    ]
    return Path("runs") / f"{stem_of(recipe)}-{max(numbers)}" if numbers else None


def _next_free(recipe: str) -> tuple[Path, list[Path]]:
    """Make runs/<recipe>-<n>, so that no two runs choose the same; and the directories made."""
    number = 1
    while True:
        path = Path("runs") / f"{stem_of(recipe)}-{number}"
        try:
            return path, _make(path)
        except FileExistsError:
            number += 1


def _make(path: Path) -> list[Path]:
    """Make a directory; returns all that were made, the outermost first."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True)
    return missing[::-1]


def remove_empty(made: list[Path]) -> None:
    """Remove empty directories, the innermost first."""
    with suppress(OSError):  # not empty: another run uses it
        for folder in reversed(made):
            folder.rmdir()


def _is_gone(who: str) -> bool:
    """Whether the owner was a process of this host that has ended."""
    words = who.split()
    if len(words) != 4 or not words[1].isdigit() or words[3] != socket.gethostname():
        return False
    try:
        os.kill(int(words[1]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _lock(path: Path) -> IO[str]:
    owner = path / OWNER
    file = open(owner, "a+", encoding="utf-8")  # noqa: SIM115 (held for the run's life)
    deadline = time.monotonic() + LEAVING_S
    while not try_lock(file):
        file.seek(0)
        who = file.read().strip() or "another process"
        if time.monotonic() > deadline or not _is_gone(who):
            file.close()
            if _is_gone(who):
                who = f"what {who} left running when it ended ({_holders(owner)})"
            raise UsageError(
                f"{path} is in use by {who}. Two runs cannot share a run directory; choose another "
                "with --run-dir DIR."
            )
        time.sleep(0.05)  # its child processes are about to end and release the lock
    if not _is_at(owner, file):  # the owner removed the file; lock the new one
        file.close()
        return _lock(path)
    file.seek(0)
    file.truncate()
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    own_descriptor(file.fileno())
    return file


def _is_at(path: Path, file: IO[str]) -> bool:
    """Whether an open file is still the one at the path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _unlock(file: IO[str]) -> None:
    disown_descriptor(file.fileno())
    file.close()


def _holders(owner: Path) -> str:
    """The processes of this host that have a file open, as far as /proc shows."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if link.samefile(owner):
                found.add(link.parts[2])
    return f"process {', '.join(sorted(found))}" if found else "the process is not known"
