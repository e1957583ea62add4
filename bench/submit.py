"""From the command to the first step on a warm Ray cluster, against Ray Train's TorchTrainer.

The cluster has two nodes in a namespace (`tests/support/ray_cluster.py`), and is up before
the clock starts. Both arms are commands that connect to it and train the same loop on two workers,
one a node, under Gloo (`bench/job.py`); the clock stops when both workers have made their first
step. `shoal train --on ray` is the one arm, a script with a TorchTrainer the other.

The ceiling is a script that connects to the cluster and does nothing. Needs root and ray[train].
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bench import commands, harness
from bench.harness import Row

NUM_RANKS = 2
NUM_STEPS = 3
FLOOR = 4.0
LIMIT_S = 300.0  # Ray Train takes its time
TRAINER = harness.ROOT / "bench" / "ray_train.py"
CONNECT = "import ray; ray.init(log_to_driver=False)"


def first_step(words: Sequence[str], environment: dict[str, str], steps: Path) -> float:
    """Seconds from the command to the first step of all workers; the job then ends by itself."""
    steps.unlink(missing_ok=True)
    with open(steps.with_name("output"), "wb") as output:
        started = time.monotonic()
        process = subprocess.Popen(
            words, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        watched = commands.Watched(process, started, steps.parent)
        found = commands.first_step_of_all(NUM_RANKS)
        at = watched.wait_for("every worker had made a step", found, LIMIT_S)
        if code := process.wait(timeout=LIMIT_S):
            raise harness.ArmFailed(f"The command ended with code {code}:\n{watched.said()}")
    finally:
        process.kill()
        process.wait()
    return at - started


def connect(words: Sequence[str], environment: dict[str, str]) -> float:
    started = time.monotonic()
    subprocess.run(words, env=environment, check=True, capture_output=True, timeout=LIMIT_S)
    return time.monotonic() - started


def measure(quick: bool) -> Iterator[Row]:
    if missing := why_not():
        yield Row(name="submit/ray", floor=FLOOR, note=missing)
        return
    from tests.support.ray_cluster import start_ray

    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as name:
        folder = Path(name)
        steps = folder / "steps"
        # Workers take it from their node, and not from the command.
        variables = {"STEPS_FILE": str(steps), "STEPS": str(NUM_STEPS)}
        with start_ray([2, 2], variables) as cluster:
            enter, environment = cluster.enter(folder), cluster.environment
            numbers = iter(range(1_000_000))

            def shoal_train() -> float:
                run_dir = folder / f"run-{next(numbers)}"
                words = commands.shoal_train(NUM_RANKS, run_dir, NUM_STEPS)
                return first_step([*enter, *words, "--on", "ray:spread"], environment, steps)

            def torch_trainer() -> float:
                return first_step([*enter, sys.executable, str(TRAINER)], environment, steps)

            arms: dict[str, Callable[[], float]] = {
                "peer": torch_trainer,
                "shoal": shoal_train,
                "again": torch_trainer,
                "ceiling": lambda: connect([*enter, sys.executable, "-c", CONNECT], environment),
            }
            seconds = harness.interleave(arms, 1 if quick else 5, num_warm_up=0 if quick else 1)
    yield _row(seconds)


def why_not() -> str:
    """Why it cannot be measured here; empty if it can."""
    if importlib.util.find_spec("ray") is None:
        return "ray is not installed: pip install -c constraints.txt 'shoal-ml[ray]' 'ray[train]'"
    if importlib.util.find_spec("pandas") is None or importlib.util.find_spec("pyarrow") is None:
        return "Ray Train is not installed: pip install -c constraints.txt 'ray[train]'"
    return "" if os.getuid() == 0 else "a namespace of its own needs root"


def _row(seconds: dict[str, list[float]]) -> Row:
    against = harness.spread(harness.ratios(seconds["peer"], seconds["shoal"]))
    control = harness.ratios(seconds["again"], seconds["peer"])
    own, peer, least = (
        harness.spread(seconds[name]).median for name in ("shoal", "peer", "ceiling")
    )
    return Row(
        name="submit/ray",
        value=against.median,
        low=against.low,
        high=against.high,
        num_pairs=against.num_pairs,
        floor=FLOOR,
        noise=harness.noise_of(control),
        peer=f"TorchTrainer {peer:.2f} s",
        ceiling=f"to connect {least:.2f} s",
        control=harness.spread(control).median,
        note=f"Shoal {own:.2f} s",
    )


if __name__ == "__main__":
    harness.main(measure)
