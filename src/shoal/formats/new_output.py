"""New files and directories for other programs: they appear whole or not at all.

Both are written beside their place and moved there at the end. An export never replaces anything.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shoal.errors import UsageError


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A directory to fill; it is renamed to `path` if there is no error."""
    with _beside(path) as partial:
        yield partial
        os.rename(partial, path)


@contextmanager
def new_files(path: Path) -> Iterator[Path]:
    """A file to write, under its own name in a temporary directory.

    Other files beside it (external weights, say) are moved first, so that the file itself appears
    last.
    """
    with _beside(path) as partial:
        yield partial / path.name
        beside = [entry for entry in sorted(partial.iterdir()) if entry.name != path.name]
        for entry in beside:
            refuse_existing(path.parent / entry.name)
        for entry in [*beside, partial / path.name]:
            with open(entry, "rb") as file:
                os.fsync(file.fileno())
            os.rename(entry, path.parent / entry.name)


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A temporary directory beside a free path; always removed at the end."""
    refuse_existing(path)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    missing = [folder for folder in path.parents if not os.path.lexists(folder)]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        yield partial
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror or error}. Nothing was left there."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        with suppress(OSError):  # the first that is not empty, as after a success
            for folder in missing:
                folder.rmdir()


def refuse_existing(path: Path) -> None:
    if os.path.lexists(path):
        raise UsageError(f"{path} is there already. Choose another place, or remove it first.")
