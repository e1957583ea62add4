"""The repository as the rules see it: every Python file, parsed once."""

import ast
import os
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
IGNORED = [".git", *(ROOT / ".gitignore").read_text("utf-8").split()]


class Source(NamedTuple):
    """One Python file. `path` is relative to the repository."""

    path: str
    text: str
    tree: ast.Module

    @property
    def num_lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def module(self) -> str:
        """`shoal.comm.buckets` for src/shoal/comm/buckets.py; a package's file is the package."""
        name = self.path.removeprefix("src/").removesuffix(".py").replace("/", ".")
        return name.removesuffix(".__init__")


def is_ignored(path: Path) -> bool:
    """Whether .gitignore names this file or directory, by its own name or by its whole path."""
    whole = str(path.relative_to(ROOT))
    patterns = [pattern.strip("/") for pattern in IGNORED]
    return any(fnmatch(path.name, name) or fnmatch(whole, name) for name in patterns)


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def files() -> list[Path]:
    """Every file of the repository that people wrote: all that .gitignore does not name."""
    found: list[Path] = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if not is_ignored(Path(folder, name))]
        found += [path for name in names if not is_ignored(path := Path(folder, name))]
    return sorted(found)


@pytest.fixture(scope="session")
def sources(files: list[Path]) -> list[Source]:
    """Every Python file of the repository."""
    found = []
    for path in files:
        if path.suffix == ".py":
            text = path.read_text(encoding="utf-8")
            found.append(Source(str(path.relative_to(ROOT)), text, ast.parse(text, str(path))))
    return found


@pytest.fixture(scope="session")
def package(sources: list[Source]) -> list[Source]:
    """The files of src/shoal."""
    return [source for source in sources if source.path.startswith("src/shoal/")]


@pytest.fixture(scope="session")
def shipped(sources: list[Source]) -> list[Source]:
    """The package and what users read beside it: all Python that is not a test."""
    return [source for source in sources if not source.path.startswith("tests/")]
