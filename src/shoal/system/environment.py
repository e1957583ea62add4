"""What a run was made with: versions, host, cores. Written to run.json, and shown with the run."""

import os
import platform
import shlex
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from shoal import __version__
from shoal.errors import sendable

PACKAGES = ("torch", "numpy")


def environment() -> dict[str, str]:
    found = {
        **_machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "command": shlex.join(sys.argv),
        "directory": os.getcwd(),
    }
    return {name: sendable(text) for name, text in found.items()}


@cache
def _machine() -> dict[str, str]:
    """What stays while a process runs, and in its forks. Versions are read from the packages'
    metadata, so that none of them is imported."""
    return {
        "shoal": __version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "system": platform.platform(),
        "host": platform.node(),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
