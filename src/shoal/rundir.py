"""Directories: where a run keeps its events, metrics, logs and model, and where caches are.

A run directory belongs to one run at a time. The owner holds a lock that the kernel takes back
when it dies, so nothing has to be cleaned up by hand.
"""

import fcntl
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import msgspec

from shoal.errors import UsageError


class RunDir:
    """A locked run directory; use it in a `with` block."""

    def __init__(self, path: Path | None, recipe: str):
        try:
            self.path = _next_free(recipe) if path is None else path
            (self.path / "logs").mkdir(parents=True, exist_ok=True)
            self._lock = _lock(self.path)
        except OSError as error:
            raise UsageError(
                f"The run directory {path or 'runs/'} cannot be written: {error.strerror}. "
                "Choose another with --run-dir DIR."
            ) from error
        if (self.path / "run.json").exists():
            self._lock.close()
            raise UsageError(
                f"{self.path} already holds a run. Choose another directory, or remove that one."
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        (self.path / "owner.json").unlink(missing_ok=True)
        self._lock.close()

    def describe(self, **facts: Any) -> None:
        """Write run.json: the resolved run and plan, and where each value came from."""
        text = msgspec.json.format(msgspec.json.encode(facts), indent=2)
        (self.path / "run.json").write_bytes(text + b"\n")

    def discard(self) -> None:
        """Remove a directory in which no run began."""
        for log in (self.path / "logs").iterdir():
            log.unlink()
        (self.path / "logs").rmdir()
        for name in ("owner.json", "events.jsonl"):
            (self.path / name).unlink(missing_ok=True)
        if not any(self.path.iterdir()):
            self.path.rmdir()


def cache_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Where Shoal keeps what is costly to find out again."""
    if environment.get("SHOAL_CACHE"):
        return Path(environment["SHOAL_CACHE"])
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "shoal"


def _next_free(recipe: str) -> Path:
    """runs/<recipe>-<n>, created here so that two runs cannot choose the same."""
    stem = recipe.rpartition("/")[2].replace(".py:", "-").replace(":", "-").replace(".py", "")
    number = 1
    while True:
        path = Path("runs") / f"{stem}-{number}"
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            number += 1


def _lock(path: Path) -> IO[str]:
    owner = path / "owner.json"
    file = open(owner, "a+", encoding="utf-8")  # noqa: SIM115 (held for the run's life)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        who = file.read().strip() or "another process"
        file.close()
        raise UsageError(
            f"{path} is in use by {who}. Two runs cannot share a run directory; choose another "
            "with --run-dir DIR."
        ) from None
    file.seek(0)
    file.truncate()
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file
