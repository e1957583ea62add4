"""Commands under the clock: start one, watch the steps its ranks note, end it and all it started.

`bench/job.py` notes steps in a file; everything here is seen from outside, through that file and
the system-wide monotonic clock, so that Shoal and its peer are measured alike. A command runs in a
session of its own and is ended with its descendants, whatever happened.
"""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

from bench import harness

JOB = harness.ROOT / "bench" / "job.py"
POLL_S = 0.02  # steps carry their own times, so looking rarely costs no precision
PATIENCE_S = 60.0
_PR_SET_PDEATHSIG = 1


class Step(NamedTuple):
    """One step that one rank has made; `time` is monotonic, in seconds."""

    pid: int
    time: float


def shoal(*arguments: str) -> list[str]:
    """A `shoal` command line, of this interpreter's own installation."""
    installed = Path(sys.executable).parent / "shoal"
    return [str(installed), *arguments]


def shoal_train(num_ranks: int, run_dir: Path, steps: int) -> list[str]:
    return shoal(
        "train",
        f"{JOB}:recipe",
        *("--plan", f"data={num_ranks}"),
        *("--set", f"steps={steps}"),
        *("--run-dir", str(run_dir)),
    )


def torchrun(num_ranks: int, max_restarts: int) -> list[str]:
    """torchrun as fast as its options make it."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={num_ranks}", f"--max-restarts={max_restarts}"),
        *("--monitor-interval=0.01", str(JOB)),
    ]


class Watched:
    """A running command and the steps its ranks have noted."""

    def __init__(self, process: "subprocess.Popen[bytes]", started: float, folder: Path):
        self.process = process
        self.started = started
        self.folder = folder
        self._steps: list[Step] = []
        self._num_bytes = 0  # of the file, read so far

    def steps(self) -> list[Step]:
        """All steps so far, in the order of their noting."""
        file = self.folder / "steps"
        if file.exists():
            with open(file, "rb") as content:
                content.seek(self._num_bytes)
                new = content.read()
            new = new[: new.rfind(b"\n") + 1]  # a line being written does not count
            self._num_bytes += len(new)
            pairs = (text.split() for text in new.splitlines())
            self._steps += [Step(int(pid), int(ns) / 1e9) for pid, ns in pairs]
        return self._steps

    def wait_for(
        self, what: str, found: Callable[[list[Step]], float | None], limit_s: float = PATIENCE_S
    ) -> float:
        """Ask `found` of the steps again and again until it answers."""
        deadline = time.monotonic() + limit_s
        while (answer := found(self.steps())) is None:
            code = self.process.poll()
            if code is not None and (answer := found(self.steps())) is None:
                raise harness.ArmFailed(f"It ended with code {code} before {what}:\n{self.said()}")
            if time.monotonic() > deadline:
                raise harness.ArmFailed(f"Not within {limit_s:g} s: {what}.\n{self.said()}")
            time.sleep(POLL_S)
        return answer

    def said(self) -> str:
        return (self.folder / "output").read_text("utf-8", errors="replace")[-9000:]


@contextmanager
def running(command: Callable[[Path], Sequence[str]], **variables: str) -> Iterator[Watched]:
    """Start `command(folder)` with a folder of its own for the time of the block."""
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as name:
        folder = Path(name)
        environment = harness.child_environment() | {"STEPS_FILE": str(folder / "steps")}
        with open(folder / "output", "wb") as output:
            started = time.monotonic()
            process = subprocess.Popen(
                command(folder),
                cwd=folder,
                env=environment | variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_bench,
            )
        try:
            yield Watched(process, started, folder)
        finally:
            _end(process)


def _end_with_bench() -> None:
    """Should the bench be killed, its commands are told to end, and end their ranks."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """The command and everything below it; its ranks may be in groups of their own."""
    try:
        below = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        below = []
    process.kill()
    process.wait()
    for child in below:
        try:
            child.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(below, timeout=10)


def first_step_of_all(num_ranks: int) -> Callable[[list[Step]], float | None]:
    """When the last of the ranks had made its first step."""

    def found(steps: list[Step]) -> float | None:
        firsts: dict[int, float] = {}
        for step in steps:
            firsts.setdefault(step.pid, step.time)
        return max(firsts.values()) if len(firsts) >= num_ranks else None

    return found


def kill(pid: int) -> float:
    """kill -9, and when."""
    at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    return at
