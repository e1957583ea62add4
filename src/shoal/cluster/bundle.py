"""The files of a run that travel to its hosts: the recipe, modules beside it, what was included.

Modules are found after the recipe was loaded: those whose file lies under the working directory or
beside the recipe, without what is installed. Each file goes with its hash. A host that has all of
them at the same places works there, where it may find data too; else they are written below a
directory of its own, each at its own path, so that relative paths mean the same.

Cost: all of it is held in memory on the first host, at most 64 MB. Data belongs on a file system or
in an object store. Read next: `host_channel.py`.
"""

import hashlib
import os
import stat
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from shoal.errors import UsageError

MOST_BYTES = 64 << 20
PART_BYTES = 128 << 10  # of a message
_PACKAGE = Path(__file__).resolve().parents[1]


class BundledFile(msgspec.Struct, frozen=True):
    """A file that travels; its path is absolute on the first host."""

    path: str
    num_bytes: int
    sha256: str


class Bundle(NamedTuple):
    files: tuple[BundledFile, ...] = ()
    content: bytes = b""  # of all, one after another

    def part(self, start: int) -> bytes:
        return self.content[start : start + PART_BYTES]


def find_modules(directory: Path, recipe_file: Path | None) -> list[str]:
    """The files of the modules that this process has loaded, without those that are installed."""
    roots = [directory.resolve(), *([] if recipe_file is None else [recipe_file.resolve().parent])]
    installed = [Path(place).resolve() for place in {*sysconfig.get_paths().values(), sys.prefix}]
    found = []
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith(".py"):
            continue
        path = Path(file).resolve()
        is_own = any(path.is_relative_to(root) for root in roots)
        is_elsewhere = path.is_relative_to(_PACKAGE) or any(
            path.is_relative_to(place) and not directory.resolve().is_relative_to(place)
            for place in installed
        )
        if is_own and not is_elsewhere and path.is_file():
            found.append(str(path))
    return sorted({*found, *_packages_of(found, roots)})


def _packages_of(files: Iterable[str], roots: Sequence[Path]) -> list[str]:
    """The `__init__.py` of each package that a module is in: an empty one may not be loaded."""
    found = []
    for file in files:
        for above in Path(file).parents:
            marker = above / "__init__.py"
            if not any(above.is_relative_to(root) for root in roots) or not marker.is_file():
                break
            found.append(str(marker))
    return found


def make_bundle(modules: Iterable[str], include: Iterable[str]) -> Bundle:
    """Read the files. UsageError for one that is not there, or too much of them."""
    files: list[BundledFile] = []
    content = bytearray()
    for path in dict.fromkeys([*modules, *(file for given in include for file in _below(given))]):
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise UsageError(f"--include {path}: it is not a file, and only files travel.")
            own = Path(path).read_bytes()
        except OSError as error:
            raise UsageError(f"{path} is to travel to the hosts: {error.strerror}.") from error
        content += own
        if len(content) > MOST_BYTES:
            raise UsageError(
                f"The files that travel to the hosts have more than {MOST_BYTES >> 20} MB with "
                f"{path}, which is the most. Put data where all hosts see it, in a shared "
                "directory or an object store, and include less."
            )
        files.append(BundledFile(path, len(own), hashlib.sha256(own).hexdigest()))
    return Bundle(tuple(files), bytes(content))


def _below(given: str) -> list[str]:
    """A file, or all files below a directory, by absolute paths."""
    path = Path(os.path.abspath(given))
    if not path.exists():
        raise UsageError(f"--include {given}: there is no such file or directory.")
    if not path.is_dir():
        return [str(path)]
    return sorted(
        str(file)
        for file in path.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts and ".git" not in file.parts
    )


def has_all(files: Sequence[BundledFile]) -> bool:
    """Whether this machine has the same files at the same places."""
    for file in files:
        try:
            if os.stat(file.path).st_size != file.num_bytes:
                return False
            if hashlib.sha256(Path(file.path).read_bytes()).hexdigest() != file.sha256:
                return False
        except OSError:
            return False
    return True


def unpack(files: Sequence[BundledFile], content: bytes, root: Path) -> None:
    """Write them below `root`, each at its path. UsageError for one that is not as was said."""
    start = 0
    for file in files:
        own = content[start : start + file.num_bytes]
        start += file.num_bytes
        if hashlib.sha256(own).hexdigest() != file.sha256:
            raise UsageError(f"{file.path} did not arrive as it was sent: its hash differs.")
        target = below(root, file.path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(own)


def below(root: Path, path: str) -> Path:
    """An absolute path of the first host, below a directory of this one."""
    parts = Path(path).parts
    if not parts or parts[0] != "/" or ".." in parts:
        raise UsageError(f"{path!r} is not an absolute path, as those of files that travel are.")
    return root.joinpath(*parts[1:])
