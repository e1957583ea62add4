"""Cells for the bench of predictions: recipes under plans, run by `shoal train`, and predicted.

A cell is run as a user runs it: ranks forked by the supervisor, on this machine. Its seconds are
the median of its steps, without the first ones; its memory is the peak PSS of the rank that held
most, read beside it. Recipes are profiled as `shoal plan` does it, the cluster is measured once.

`python -m bench.predicted RECIPE [PLAN ...]` prints cells, and appends them to PREDICTED_CELLS.
"""

import importlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from bench import harness
from shoal.cost.cluster import Cluster
from shoal.cost.predict import Prediction, predict
from shoal.cost.profile import Profile
from shoal.cost.this_machine import measure_cluster
from shoal.training.run import resolve

KEPT = "PREDICTED_CELLS"
STEPS, FEWEST, WARM = 40, 15, 6
RUN_S = 4.0  # of steps, in a cell
POLL_S, WEIGH_S = 0.05, 0.4  # between looks at a process, and until it is weighed again
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


class Measured(NamedTuple):
    """A cell as it ran."""

    step_s: float
    peak_bytes: int  # PSS of the rank that held most


class Cell(msgspec.Struct, frozen=True):
    """A recipe under a plan: what was measured in the better of its runs, and what was told."""

    recipe: str
    plan: str
    step_s: float
    apart: float  # by how much its runs differ
    peak_bytes: int
    told_s: float
    told_bytes: int

    @property
    def name(self) -> str:
        return f"{self.recipe}: {self.plan}"


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
    """Made by a command of its own, as a user's is: what processes share depends on who forks."""
    with tempfile.TemporaryDirectory() as cache_dir:
        # Any cluster will do: a profile knows none, and a shipped one need not be measured.
        words = ["plan", f"recipes/{recipe}.py:small", "--cluster", "cores-2", "--ranks", "1"]
        subprocess.run(
            [sys.executable, "-m", "shoal", *words],
            cwd=harness.ROOT,
            env={**harness.child_environment(), "SHOAL_CACHE": cache_dir},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        (kept,) = Path(cache_dir, "profiles", "recipes").iterdir()
        return msgspec.json.decode(kept.read_bytes(), type=Profile)


def predicted(recipe: str, plan: str) -> Prediction:
    return predict(profile(recipe), resolve(recipe_run(recipe), plan, None), cluster())


def num_parameters(recipe: str) -> int:
    return profile(recipe).num_parameters


def model_bytes(recipe: str) -> int:
    return 4 * num_parameters(recipe)


def in_turns(recipe: str, plans: Sequence[str]) -> list[Cell]:
    """Each plan twice; memory is the most of both."""
    told = {plan: predicted(recipe, plan) for plan in plans}
    steps = {p: max(FEWEST, min(STEPS, round(RUN_S / told[p].step_s))) for p in plans}
    laps = [
        {plan: run_cell(recipe, plan, steps[plan]) for plan in order}
        for order in (plans, plans[::-1])
    ]
    found = []
    for plan in plans:
        times, peaks = zip(*(lap[plan] for lap in laps), strict=True)
        found.append(
            Cell(
                recipe,
                plan,
                min(times),
                max(times) / min(times) - 1,
                max(peaks),
                told[plan].step_s,
                told[plan].memory.peak,
            )
        )
    return found


def read_cells(kept: Path) -> list[Cell]:
    """The newest of each recipe and plan."""
    cells = [msgspec.json.decode(line, type=Cell) for line in kept.read_bytes().splitlines()]
    return list({cell.name: cell for cell in cells}.values())


def run_cell(recipe: str, plan: str, num_steps: int) -> Measured:
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
    return Measured(statistics.median(laps[WARM:]), peak)


class _Held(NamedTuple):
    """Bytes of a process: its part of what is resident (PSS), what is resident, the most ever. And
    how many processes share with it."""

    held: int
    resident: int
    most: int
    family: int

    @property
    def peak(self) -> int:
        """What was resident between two looks is its own: what it shares stays."""
        return self.held + self.most - self.resident


def _watch(run: "subprocess.Popen[bytes]") -> int:
    """The peak PSS of the rank that holds most, until the run ends.

    To weigh a process takes a core some milliseconds, in which it cannot map memory. So it is done
    where more is resident than before, or more processes share it, and not too often: ranks are to
    compute meanwhile. It also is what counts: a process that ends lets go of what it shares, which
    was never its own, and one that was forked first shares with few as yet. What ended before the
    last was forked is no rank: preparing a run forks, too.
    """
    found: dict[int, _Held] = {}
    weighed: dict[int, float] = {}
    deadline = time.monotonic() + PATIENCE_S
    while run.poll() is None and (now := time.monotonic()) < deadline:
        forkers = _children(run.pid)
        ranks = [rank for forker in forkers for rank in _children(forker)]
        family = 1 + len(forkers) + len(ranks)
        for rank in ranks:
            with suppress(OSError, ValueError):
                sizes, before = _sizes(rank), found.get(rank)
                if (
                    before is None
                    or family > before.family
                    or (
                        family == before.family
                        and sizes["VmRSS"] > before.resident
                        and now - weighed[rank] > WEIGH_S
                    )
                ):
                    found[rank], weighed[rank] = _weigh(rank, family), now
                else:
                    found[rank] = before._replace(most=sizes["VmHWM"])
        with suppress(subprocess.TimeoutExpired):
            run.wait(POLL_S)
    most = max((one.family for one in found.values()), default=0)
    return max((one.peak for one in found.values() if one.family == most), default=0)


def _children(pid: int) -> list[int]:
    """Of all its threads; none if it has ended."""
    found: list[int] = []
    with suppress(OSError):
        for file in Path("/proc", str(pid), "task").glob("*/children"):
            found += map(int, file.read_text().split())
    return found


def _weigh(pid: int, family: int) -> _Held:
    """Pages of files are counted by the run's own processes: others on this machine may have loaded
    the same libraries."""
    rolled = _bytes_in(Path("/proc", str(pid), "smaps_rollup"), ("Pss_Anon", "Pss_Shmem"))
    sizes = _sizes(pid)
    held = sum(rolled.values()) + sizes["RssFile"] // family
    return _Held(held, sizes["VmRSS"], sizes["VmHWM"], family)


def _sizes(pid: int) -> dict[str, int]:
    return _bytes_in(Path("/proc", str(pid), "status"), ("VmHWM", "VmRSS", "RssFile"))


def _bytes_in(file: Path, names: tuple[str, ...]) -> dict[str, int]:
    lines = (line.split() for line in file.read_text().splitlines())
    found = {line[0][:-1]: 1024 * int(line[1]) for line in lines if line[0][:-1] in names}
    if len(found) < len(names):
        raise ValueError(file)
    return found


def main() -> None:
    recipe, *plans = sys.argv[1:]
    for cell in in_turns(recipe, plans or CELLS[recipe]):
        print(
            f"{cell.name}: {cell.step_s * 1e3:.2f} ms (apart {cell.apart:.0%}), told "
            f"{cell.told_s * 1e3:.2f}; {cell.peak_bytes / 1e6:.0f} MB, told "
            f"{cell.told_bytes / 1e6:.0f}",
            flush=True,
        )
        if KEPT in os.environ:
            with open(os.environ[KEPT], "ab") as kept:
                kept.write(msgspec.json.encode(cell) + b"\n")


if __name__ == "__main__":
    os.environ.setdefault("SHOAL_CACHE", tempfile.mkdtemp())
    main()
