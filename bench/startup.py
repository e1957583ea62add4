"""From the command to the first step of four ranks, cold and warm, against torchrun.

Seen from outside: the clock starts before the command does, and stops when the last rank has made
its first step (`bench/job.py`). Cold, each command loads Python and torch from files the system has
in memory. Warm, `shoal warm` keeps a process that has loaded them, and `shoal train` starts there.

The ceiling of a cold start is one process that trains alone, without launcher or group; of a warm
one, an interpreter that starts and does nothing. Four ranks on fewer cores share them, in all arms.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench import commands, harness
from bench.harness import Row

NUM_RANKS = 4
NUM_STEPS = 3
FLOORS = {"cold": 1.0, "warm": 10.0}


def first_step(command: Callable[[Path], Sequence[str]], num_ranks: int = NUM_RANKS) -> float:
    """Seconds from the command to the first step of all ranks; the job then ends by itself."""
    with commands.running(command, STEPS=str(NUM_STEPS)) as watched:
        found = commands.first_step_of_all(num_ranks)
        at = watched.wait_for("every rank had made a step", found)
        code = watched.process.wait(timeout=commands.PATIENCE_S)
        if code:
            raise harness.ArmFailed(f"The command ended with code {code}:\n{watched.said()}")
    return at - watched.started


def torchrun() -> float:
    return first_step(lambda folder: commands.torchrun(NUM_RANKS, max_restarts=0))


def shoal_train() -> float:
    return first_step(lambda folder: commands.shoal_train(NUM_RANKS, folder / "run", NUM_STEPS))


def alone() -> float:
    return first_step(lambda folder: [sys.executable, str(commands.JOB)], num_ranks=1)


def nothing() -> float:
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", "pass"], check=True, env=harness.child_environment())
    return time.monotonic() - started


def warm(verb: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        commands.shoal("warm", verb),
        env=harness.child_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=commands.PATIENCE_S,
        check=False,
    )


@contextmanager
def warm_server() -> Iterator[None]:
    """The fork server, up for the time of the block."""
    up = warm("start")
    if up.returncode:
        raise RuntimeError(f"`shoal warm start` ended with code {up.returncode}: {up.stderr}")
    try:
        yield
    finally:
        warm("stop")


def warm_train() -> float:
    """The server is up for this command only, so that the others stay cold."""
    with warm_server():
        return shoal_train()


def measure(quick: bool) -> Iterator[Row]:
    has_warm = warm("--help").returncode == 0
    arms = {"torchrun": torchrun, "cold": shoal_train, "again": torchrun, "alone": alone}
    if has_warm:
        warm("stop")  # one that somebody left would make the cold start warm
        arms |= {"warm": warm_train, "nothing": nothing}
    seconds = harness.interleave(arms, 3 if quick else 5, num_warm_up=1)
    yield _row("cold", "alone", "one process alone", seconds)
    if has_warm:
        yield _row("warm", "nothing", "an interpreter", seconds)
    else:
        yield Row(
            name="startup/warm",
            floor=FLOORS["warm"],
            note="this Shoal has no `shoal warm`, so there is no warm start to measure",
        )


def _row(arm: str, ceiling: str, ceiling_name: str, seconds: dict[str, list[float]]) -> Row:
    against = harness.spread(harness.ratios(seconds["torchrun"], seconds[arm]))
    control = harness.ratios(seconds["again"], seconds["torchrun"])
    own, peer, least = (harness.spread(seconds[name]).median for name in (arm, "torchrun", ceiling))
    return Row(
        name=f"startup/{arm}",
        value=against.median,
        low=against.low,
        high=against.high,
        num_pairs=against.num_pairs,
        floor=FLOORS[arm],
        noise=harness.noise_of(control) if arm == "cold" else 0.0,
        peer=f"torchrun {peer:.2f} s",
        ceiling=f"{ceiling_name} {least:.2f} s",
        control=harness.spread(control).median,
        note=f"Shoal {own:.2f} s",
    )


if __name__ == "__main__":
    harness.main(measure)
