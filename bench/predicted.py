"""Cells for the benches of predictions: recipes under plans, run by `shoal train`, and predicted.

A cell is run as a user runs it: ranks forked by the supervisor, on this machine. Its seconds are
the median of its steps, without the first ones; its memory is the peak PSS of the rank that held
most, read beside it. The profile is made in this process, the cluster is measured once.
"""

import importlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import psutil

from bench import harness
from shoal.cost.cluster import Cluster
from shoal.cost.predict import Prediction, predict
from shoal.cost.profile import Profile
from shoal.cost.profiler import profile_run
from shoal.cost.this_machine import measure_cluster
from shoal.training.run import resolve

STEPS, WARM = 40, 6
POLL_S = 0.05
PATIENCE_S = 600.0
DENSE = (
    *("data=1", "data=1 accumulate=4", "data=2", "data=2 accumulate=2"),
    *("data=2 zero=1", "data=2 zero=2", "data=2 zero=3", "data=1 tensor=2"),
    *("data=1 pipeline=2", "data=1 pipeline=2 schedule=gpipe"),
    *("data=1 recompute=blocks", "data=2 recompute=blocks"),
)
MORE_RANKS = ("data=4", "data=2 tensor=2", "data=2 pipeline=2")  # than two cores: emulated devices
CELLS = {
    "charlm": (*DENSE, *MORE_RANKS),
    "digits": (*DENSE, *MORE_RANKS),
    "spelling": (*DENSE, *MORE_RANKS),
    "movielens": ("data=1", "data=1 accumulate=4", "data=2 sync=server", "data=4 sync=server"),
}


class Measured(msgspec.Struct, frozen=True):
    """A cell as it ran."""

    step_s: float
    least_s: float  # of a step
    peak_bytes: int  # PSS of the rank that held most


def fits_cores(plan: str) -> bool:
    return plan not in MORE_RANKS and "data=4" not in plan


@cache
def cluster() -> Cluster:
    return measure_cluster()


@cache
def recipe_run(recipe: str) -> Any:
    sys.path.insert(0, str(harness.ROOT / "recipes"))
    return importlib.import_module(recipe).small()


@cache
def profile(recipe: str) -> Profile:
    return profile_run(recipe_run(recipe), fresh=True)


def predicted(recipe: str, plan: str) -> Prediction:
    return predict(profile(recipe), resolve(recipe_run(recipe), plan, None), cluster())


def run_cell(recipe: str, plan: str, num_steps: int = STEPS) -> Measured:
    """Run it, and read its steps and its memory; nothing is left behind."""
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder) / "run"
        length = "epochs=1" if recipe == "movielens" else f"steps={num_steps}"
        words = [f"recipes/{recipe}.py:small", "--plan", plan, "--set", length, "--json"]
        command = [sys.executable, "-m", "shoal", "train", *words, "--run-dir", str(where)]
        run = subprocess.Popen(
            command,
            cwd=harness.ROOT,
            env=harness.child_environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        try:
            peak = _watch(run)
            _, told = run.communicate(timeout=PATIENCE_S)
        finally:
            run.terminate()
            run.wait()
        if run.returncode:
            said = told.decode(errors="replace").strip().splitlines()[-1:]
            raise harness.ArmFailed(f"{recipe} under {plan} ended with {run.returncode}: {said}")
        rows = [msgspec.json.decode(line) for line in (where / "metrics.jsonl").open("rb")]
    laps = [sum(row["times"].values()) for row in rows if "times" in row]
    return Measured(statistics.median(laps[WARM:]), min(laps[WARM:]), peak)


def _watch(run: "subprocess.Popen[bytes]") -> int:
    """The peak PSS of the rank that holds most, until the run ends."""
    most, deadline = 0, time.monotonic() + PATIENCE_S
    while run.poll() is None and time.monotonic() < deadline:
        with suppress(psutil.NoSuchProcess):
            main = psutil.Process(run.pid)
            forkers = main.children()
            ranks = [rank for forker in forkers for rank in forker.children()]
            most = max([most, *map(_peak, ranks)])
        time.sleep(POLL_S)
    return most


def _peak(process: psutil.Process) -> int:
    """PSS now, and by how much the resident set was larger before."""
    root = Path("/proc", str(process.pid))
    with suppress(OSError, ValueError):
        rolled = _kilobytes(root / "smaps_rollup", ("Pss",))
        sizes = _kilobytes(root / "status", ("VmHWM", "VmRSS"))
        return 1024 * (rolled["Pss"] + sizes["VmHWM"] - sizes["VmRSS"])
    return 0


def _kilobytes(file: Path, names: tuple[str, ...]) -> dict[str, int]:
    lines = (line.split() for line in file.read_text().splitlines())
    found = {line[0].rstrip(":"): int(line[1]) for line in lines if line[0].rstrip(":") in names}
    if len(found) < len(names):
        raise ValueError(file)
    return found


def main_cells() -> None:
    """Print cells beside their predictions: `python -m bench.predicted recipe [plan ...]`."""
    recipe, *plans = sys.argv[1:]
    for plan in plans or CELLS[recipe]:
        seen = run_cell(recipe, plan)
        told = predicted(recipe, plan)
        print(
            f"{recipe} {plan}: {seen.step_s * 1e3:.2f} ms (least "
            f"{seen.least_s * 1e3:.2f}), predicted {told.step_s * 1e3:.2f}; "
            f"{seen.peak_bytes / 1e6:.0f} MB, predicted {told.memory.peak / 1e6:.0f}",
            flush=True,
        )


if __name__ == "__main__":
    os.environ.setdefault("SHOAL_CACHE", tempfile.mkdtemp())
    main_cells()
