"""Launchers that start one process a rank: Open MPI's mpirun, MPICH's mpiexec, torchrun.

    done = launch("mpirun", 4, directory, "train", RECIPE, "--json")

On loopback only. Where a program is not installed the test is skipped, and the reason says what to
install; the Makefile's target `servers` does.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from shoal.world import _LAUNCHERS
from tests.support.servers import _program as program

BIN = Path(sys.executable).parent
SHOAL = str(BIN / "shoal")
LIMIT_S = 120.0
_LOOPBACK = ("--mca", "btl_tcp_if_include", "lo", "--mca", "oob_tcp_if_include", "lo")
_NAMES = {name for names in _LAUNCHERS.values() for name in names} | {"MASTER_ADDR", "MASTER_PORT"}


class Launched(NamedTuple):
    """How a launcher ended, and all that its processes printed."""

    exit_code: int
    output: str
    errors: str


class Launching:
    """A launcher under way, in a session of its own."""

    def __init__(self, words: list[str], directory: Path, variables: Mapping[str, str]):
        plain = {name: value for name, value in os.environ.items() if name not in _NAMES}
        self.process = subprocess.Popen(
            words,
            cwd=directory,
            env={**plain, "OMP_NUM_THREADS": "1", "TMPDIR": str(directory), **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait(self, timeout_s: float = LIMIT_S) -> Launched:
        try:
            output, errors = self.process.communicate(timeout=timeout_s)
        except BaseException:
            for each in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.Error):
                    each.kill()
            self.process.kill()
            raise
        return Launched(self.process.returncode, output, errors)


def words_of(launcher: str, num_ranks: int) -> list[str]:
    """How a launcher is asked to start ranks of what follows."""
    count = str(num_ranks)
    match launcher:
        case "mpirun":
            found = program("mpirun.openmpi", "openmpi-bin")
            return [found, "--allow-run-as-root", "--oversubscribe", *_LOOPBACK, "-n", count]
        case "mpiexec":
            return [program("mpiexec.hydra", "mpich"), "-iface", "lo", "-n", count]
        case _:
            return [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", count]


def start(
    launcher: str, num_ranks: int, directory: Path, *words: str, **variables: str
) -> Launching:
    """`shoal ...` on so many processes."""
    command = ["-m", "shoal"] if launcher == "torchrun" else [SHOAL]
    return Launching([*words_of(launcher, num_ranks), *command, *words], directory, variables)


def launch(
    launcher: str, num_ranks: int, directory: Path, *words: str, **variables: str
) -> Launched:
    return start(launcher, num_ranks, directory, *words, **variables).wait()


def pid_of_rank(launching: Launching, rank: int) -> int:
    """The process of a rank, found by its environment among all below the launcher."""
    wanted = {f"{names[0]}={rank}" for names in _LAUNCHERS.values()}
    for process in psutil.Process(launching.process.pid).children(recursive=True):
        with suppress(psutil.Error, OSError):
            variables = Path(f"/proc/{process.pid}/environ").read_text().split("\0")
            if "train" in process.cmdline() and wanted & set(variables):
                return process.pid
    raise AssertionError(f"no process is rank {rank}")
