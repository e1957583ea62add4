"""Checkpoints by paths that people give: a run directory, its checkpoints, or one of them."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from shoal.checkpoint.manifest import MANIFEST, SEAL, BadCheckpoint
from shoal.checkpoint.storage import Directory, Store
from shoal.errors import UsageError

Kind = TypeVar("Kind")
FOLDER = "checkpoints"  # of a run directory
_NAME = re.compile(r"step-\d+")
_CHUNKS = re.compile(r"rank-\d+\.safetensors")
_WAY_OUT = "Give a run directory, its directory of checkpoints, or one checkpoint."


class Found(NamedTuple):
    """Where checkpoints are, and their names, in that order; there is at least one."""

    store: Directory
    names: list[str]

    def path(self, name: str) -> Path:
        return self.store.path / name


def find(path: Path) -> Found:
    """The checkpoints that a path stands for."""
    try:
        if not path.exists():
            raise UsageError(f"There is no {path}. {_WAY_OUT}")
        if not path.is_dir():
            raise UsageError(f"{path} is not a directory. {_WAY_OUT}")
        if _is_checkpoint(path):
            whole = Path(os.path.abspath(path))  # `.` has no name
            return Found(Directory(whole.parent), [whole.name])
        store = Directory(path / FOLDER if (path / FOLDER).is_dir() else path)
        names = [name for name in store.names() if _is_checkpoint(store.path / name)]
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}. {_WAY_OUT}") from error
    if not names:
        raise UsageError(f"{path} holds no checkpoint. {_WAY_OUT}")
    return Found(store, names)


def find_one(path: Path) -> tuple[Directory, str]:
    """The one checkpoint that a path stands for."""
    found = find(path)
    if len(found.names) > 1:
        raise UsageError(
            f"{path} holds {len(found.names)} checkpoints, and one is asked for. "
            f"Give for example {found.path(found.names[-1])}, the newest."
        )
    return found.store, found.names[0]


def open_one(kind: Callable[[Store, str], Kind], path: Path) -> Kind:
    """The one checkpoint at a path, opened; an error says at which path."""
    place = find_one(path)
    try:
        return kind(*place)
    except BadCheckpoint as bad:
        raise BadCheckpoint(f"{path} is bad: {bad}") from None


def _is_checkpoint(path: Path) -> bool:
    """Whether it is one or was to be: one that lost a file is to be found, and to be refused."""
    if _NAME.fullmatch(path.name):
        return True
    files = os.listdir(path)
    return MANIFEST in files or SEAL in files or any(map(_CHUNKS.fullmatch, files))
