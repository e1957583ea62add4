"""Checkpoints by paths and URLs that people give: a run's, its directory of them, or one.

Those that a run makes have the step in their names: it goes on from these alone, and removes no
others. Nothing here loads torch, and nothing but the finding itself asks whether a place is on a
disk.
"""

import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from shoal.checkpoint.manifest import MANIFEST
from shoal.errors import BadCheckpoint, UsageError
from shoal.storage.object_store import local_path, open_store
from shoal.storage.remote import without_password
from shoal.storage.store import SEAL, Directory, Store

Kind = TypeVar("Kind")
Where = str | Path  # a path, or a URL
FOLDER = "checkpoints"  # of a run directory
_NAME = re.compile(r"step-([0-9]{8,18})")
_CHUNKS = re.compile(r"rank-\d+\.safetensors")
_WAY_OUT = "Give a run directory, its directory of checkpoints, or one checkpoint."


class NoCheckpoint(UsageError):
    """A place is there, or may be, and no checkpoint in it."""


class Found(NamedTuple):
    """Where checkpoints are, and their names, in that order; there is at least one."""

    store: Store
    names: list[str]

    def place(self, name: str) -> str:
        return f"{self.store}/{name}"


class Chosen(NamedTuple, Generic[Kind]):
    """One checkpoint, opened. `told` says which it is and what is not, if there were several."""

    opened: Kind
    store: Store
    name: str
    told: str

    @property
    def place(self) -> str:
        return f"{self.store}/{self.name}"


def name_of(step: int) -> str:
    """What a run calls its checkpoint of a step."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step, if it is a name that a run gives."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found and name == name_of(int(found[1])) else None


def steps_in(store: Store) -> list[str]:
    """The checkpoints that runs made there, the newest first; names alone are looked at."""
    return sorted((n for n in store.names() if step_of(n) is not None), key=_age, reverse=True)


def find(where: Where) -> Found:
    """The checkpoints that a path or URL stands for."""
    path, shown = local_path(where), without_password(str(where))
    try:
        found = _find_at(str(where)) if path is None else _find_in(path)
    except UsageError:
        raise
    except OSError as error:
        raise UsageError(f"{shown} cannot be read: {error.strerror}. {_WAY_OUT}") from error
    if not found.names:
        raise NoCheckpoint(f"{shown} holds no checkpoint. {_WAY_OUT}")
    return found


def find_one(where: Where) -> tuple[Store, str]:
    """The one checkpoint that a path or URL stands for."""
    found = find(where)
    if len(found.names) > 1:
        raise UsageError(
            f"{without_password(str(where))} holds {len(found.names)} checkpoints, and one is "
            f"asked for. Give for example {found.place(found.names[-1])}, the newest."
        )
    return found.store, found.names[0]


def open_one(kind: Callable[[Store, str], Kind], where: Where) -> Kind:
    """The one checkpoint at a place, opened; an error says at which."""
    return _opened(kind, *find_one(where))


def open_newest(
    kind: Callable[[Store, str], Kind],
    where: Where,
    judge: Callable[[Kind], object] = lambda opened: None,
) -> Chosen[Kind]:
    """The one checkpoint at a place, or of several the newest that is good.

    Of several each is opened and handed to `judge`, which raises BadCheckpoint for what it finds
    wrong. What is alone there is not judged: who asks for it may want no other.
    """
    store, names = find(where)
    if len(names) == 1:
        return Chosen(_opened(kind, store, names[0]), store, names[0], "")
    passed_over = []
    for name in sorted(names, key=_age, reverse=True):
        try:
            opened = kind(store, name)
            judge(opened)
        except BadCheckpoint as bad:
            passed_over.append(f"{name} was passed over: {bad}")
            continue
        chosen = f"{name} is taken, the newest good one of {len(names)} in {store}."
        return Chosen(opened, store, name, "\n".join([*passed_over, chosen]))
    raise BadCheckpoint(f"No checkpoint in {store} is good. {' '.join(passed_over)}")


def split_url(url: str) -> tuple[str, str]:
    """The URL of what something lies in, and its name there."""
    parent, _, name = url.rstrip("/").rpartition("/")
    if "://" not in parent:
        shown = without_password(url).rstrip("/")
        raise UsageError(f"{shown} is a whole store. Add a name to it, as in {shown}/NAME.")
    return parent, name


def _opened(kind: Callable[[Store, str], Kind], store: Store, name: str) -> Kind:
    try:
        return kind(store, name)
    except BadCheckpoint as bad:
        raise BadCheckpoint(f"{store}/{name} is bad: {bad}") from None


def _age(name: str) -> tuple[int, str]:
    """What orders names by step; those of another form are taken for the oldest."""
    step = step_of(name)
    return (-1 if step is None else step, name)


def _find_in(path: Path) -> Found:
    if not path.exists():
        raise UsageError(f"There is no {path}. {_WAY_OUT}")
    if not path.is_dir():
        raise UsageError(f"{path} is not a directory. {_WAY_OUT}")
    if _is_checkpoint(path):
        whole = Path(os.path.realpath(path))  # `.` has no name, and a link by its name is meant
        return Found(Directory(whole.parent), [whole.name])
    store = Directory(path / FOLDER if (path / FOLDER).is_dir() else path)
    return Found(store, [name for name in store.names() if _is_checkpoint(store.path / name)])


def _is_checkpoint(path: Path) -> bool:
    """Whether it is one or was to be: one that lost a file is to be found, and to be refused."""
    if step_of(path.name) is not None:
        return True
    with suppress(FileNotFoundError, NotADirectoryError):  # a link that leads nowhere
        files = os.listdir(path)
        return MANIFEST in files or SEAL in files or any(map(_CHUNKS.fullmatch, files))
    return False


def _find_at(url: str) -> Found:
    """In a store of objects, what has no seal is no checkpoint."""
    url = url.rstrip("/")
    if "://" in url.rpartition("/")[0]:
        parent, name = split_url(url)
        store = open_store(parent)
        with suppress(BadCheckpoint):
            store.open(name, SEAL)
            return Found(store, [name])
    within = open_store(f"{url}/{FOLDER}")
    names = within.names()
    if names:
        return Found(within, names)
    store = open_store(url)
    return Found(store, store.names())
