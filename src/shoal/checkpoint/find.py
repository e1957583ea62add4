"""Find checkpoints by path or URL: a run directory, a directory of checkpoints, or one checkpoint.

Checkpoints that a run makes have the step in their name; a run resumes from these only, and removes
no others. Nothing here loads torch. Read next: `verify.py`, which opens what was found.
"""

import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from shoal.checkpoint.manifest import MANIFEST
from shoal.errors import BadCheckpoint, UsageError
from shoal.storage.object_client import MIRROR, redact_password
from shoal.storage.object_store import local_path, open_store
from shoal.storage.store import SEAL, DirectoryStore, Store

Checkpoint = TypeVar("Checkpoint")
PathOrUrl = str | Path  # a path, or a URL
CHECKPOINTS_DIR = "checkpoints"  # of a run directory
_NAME = re.compile(r"step-([0-9]{8,18})")
_CHUNKS = re.compile(r"rank-\d+\.safetensors")
_WAY_OUT = "Give a run directory, its directory of checkpoints, or one checkpoint."


class NoCheckpoint(UsageError):
    """There is no checkpoint at a path or URL."""


class FoundCheckpoints(NamedTuple):
    """A store, and the names of its checkpoints in order; at least one."""

    store: Store
    names: list[str]

    def place(self, name: str) -> str:
        return f"{self.store}/{name}"


class OpenedCheckpoint(NamedTuple, Generic[Checkpoint]):
    """One checkpoint, opened. `note` says which one was chosen of several, and why."""

    opened: Checkpoint
    store: Store
    name: str
    note: str

    @property
    def place(self) -> str:
        return f"{self.store}/{self.name}"


def checkpoint_name(step: int) -> str:
    """The name that a run gives its checkpoint of a step."""
    return f"step-{step:08d}"


def checkpoint_step(name: str) -> int | None:
    """The step of a checkpoint's name; None for a name of another form."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found and name == checkpoint_name(int(found[1])) else None


def list_steps(store: Store) -> list[str]:
    """The names of checkpoints that runs made, newest first; opens none."""
    return sorted(
        (n for n in store.names() if checkpoint_step(n) is not None), key=_age, reverse=True
    )


def find_checkpoints(where: PathOrUrl) -> FoundCheckpoints:
    """The checkpoints at a path or URL."""
    path, shown = local_path(where), redact_password(str(where))
    try:
        found = _find_at_url(str(where)) if path is None else _find_on_disk(path)
    except UsageError:
        raise
    except OSError as error:
        raise UsageError(f"{shown} cannot be read: {error.strerror}. {_WAY_OUT}") from error
    if not found.names:
        raise NoCheckpoint(f"{shown} holds no checkpoint. {_WAY_OUT}")
    return found


def find_checkpoint(where: PathOrUrl) -> tuple[Store, str]:
    """The one checkpoint at a path or URL."""
    found = find_checkpoints(where)
    if len(found.names) > 1:
        raise UsageError(
            f"{redact_password(str(where))} holds {len(found.names)} checkpoints, and one is "
            f"asked for. Give for example {found.place(found.names[-1])}, the newest."
        )
    return found.store, found.names[0]


def open_checkpoint(kind: Callable[[Store, str], Checkpoint], where: PathOrUrl) -> Checkpoint:
    """Open the one checkpoint at a path or URL; an error names it."""
    return _open(kind, *find_checkpoint(where))


def open_newest(
    kind: Callable[[Store, str], Checkpoint],
    where: PathOrUrl,
    judge: Callable[[Checkpoint], object] = lambda opened: None,
) -> OpenedCheckpoint[Checkpoint]:
    """Open the one checkpoint at a path or URL, or the newest good one of several.

    Of several, each is opened and checked by `judge`, which raises BadCheckpoint. A single one is
    not judged: the caller may want it and no other.
    """
    store, names = find_checkpoints(where)
    if len(names) == 1:
        return OpenedCheckpoint(_open(kind, store, names[0]), store, names[0], "")
    passed_over = []
    for name in sorted(names, key=_age, reverse=True):
        try:
            opened = kind(store, name)
            judge(opened)
        except BadCheckpoint as bad:
            passed_over.append(f"{name} was passed over: {bad}")
            continue
        chosen = f"{name} is taken, the newest good one of {len(names)} in {store}."
        return OpenedCheckpoint(opened, store, name, "\n".join([*passed_over, chosen]))
    raise BadCheckpoint(f"No checkpoint in {store} is good. {' '.join(passed_over)}")


def split_url(url: str) -> tuple[str, str]:
    """The URL of the parent, and the name in it."""
    parent, _, name = url.rstrip("/").rpartition("/")
    if "://" not in parent:
        shown = redact_password(url).rstrip("/")
        raise UsageError(f"{shown} is a whole store. Add a name to it, as in {shown}/NAME.")
    return parent, name


def _open(kind: Callable[[Store, str], Checkpoint], store: Store, name: str) -> Checkpoint:
    try:
        return kind(store, name)
    except BadCheckpoint as bad:
        raise BadCheckpoint(f"{store}/{name} is bad: {bad}") from None


def _age(name: str) -> tuple[int, str]:
    """Sort key by step; names of another form count as the oldest."""
    step = checkpoint_step(name)
    return (-1 if step is None else step, name)


def _find_on_disk(path: Path) -> FoundCheckpoints:
    if not path.exists():
        raise UsageError(f"There is no {path}. {_WAY_OUT}")
    if not path.is_dir():
        raise UsageError(f"{path} is not a directory. {_WAY_OUT}")
    if _is_checkpoint(path):
        whole = Path(os.path.realpath(path))  # `.` has no name; a link that was named is followed
        return FoundCheckpoints(DirectoryStore(whole.parent), [whole.name])
    store = DirectoryStore(path / CHECKPOINTS_DIR if (path / CHECKPOINTS_DIR).is_dir() else path)
    return FoundCheckpoints(
        store, [name for name in store.names() if _is_checkpoint(store.path / name)]
    )


def _is_checkpoint(path: Path) -> bool:
    """Also true of a damaged one: a checkpoint that lost a file must be found, and then refused."""
    if checkpoint_step(path.name) is not None:
        return True
    with suppress(FileNotFoundError, NotADirectoryError):  # a link that leads nowhere
        files = os.listdir(path)
        return MANIFEST in files or SEAL in files or any(map(_CHUNKS.fullmatch, files))
    return False


def _find_at_url(url: str) -> FoundCheckpoints:
    """In an object store a checkpoint without a seal does not count."""
    url = url.rstrip("/")
    inner = url.rpartition("]")[2] if url.startswith(MIRROR) else url.partition("://")[2]
    if "/" in inner:
        parent, name = split_url(url)
        store = open_store(parent)
        with suppress(BadCheckpoint):
            store.open(name, SEAL)
            return FoundCheckpoints(store, [name])
    within = open_store(f"{url}/{CHECKPOINTS_DIR}")
    names = within.names()
    if names:
        return FoundCheckpoints(within, names)
    store = open_store(url)
    return FoundCheckpoints(store, store.names())
