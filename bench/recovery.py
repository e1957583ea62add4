"""From kill -9 of one of three ranks to the next step at full strength, against torchrun's restart.

Seen from outside: the killer notes the time, the ranks note their steps (`bench/job.py`), and the
first step of a process that had made none before is the first with every seat filled again. Shoal
fills the seat from a warm spare and takes the state along; torchrun ends all ranks and starts the
script anew, which here saves and loads nothing, so its figure leaves out the steps it lost.

The ceiling is a step of the undisturbed job: nothing can be quicker than to go on. Three ranks on
fewer cores share them, both arms alike.
"""

import statistics
from collections.abc import Callable, Iterator

from bench import commands, harness
from bench.commands import Step, Watched
from bench.harness import Row

NUM_RANKS = 3
STEPS_BEFORE = 100  # of every rank, before the kill
FLOOR = 10.0


def recover(watched: Watched, victim: int) -> tuple[float, float]:
    """Kill one rank; seconds to the next step at full strength, and of a step before."""

    def settled(steps: list[Step]) -> float | None:
        return 0.0 if len(steps) >= NUM_RANKS * STEPS_BEFORE else None

    watched.wait_for("training was under way", settled)
    before = list(watched.steps())
    pids = sorted({step.pid for step in before})
    assert len(pids) == NUM_RANKS, f"{len(pids)} processes made steps, {NUM_RANKS} should"
    killed = commands.kill(pids[victim])

    def replaced(steps: list[Step]) -> float | None:
        return next((s.time for s in steps[len(before) :] if s.pid not in pids), None)

    back = watched.wait_for("a replacement had made a step", replaced)
    own = [step.time for step in before if step.pid == pids[0]]
    pace = statistics.median(harness.differences(own[1:], own[:-1]))
    return back - killed, pace


class Kills:
    """One arm: a fresh job each time, and another rank killed each time."""

    def __init__(self, command: Callable[..., list[str]]):
        self.command = command
        self.paces: list[float] = []

    def __call__(self) -> float:
        with commands.running(self.command) as watched:
            seconds, pace = recover(watched, len(self.paces) % NUM_RANKS)
        self.paces.append(pace)
        return seconds


def measure(quick: bool) -> Iterator[Row]:
    def restart() -> Kills:
        return Kills(lambda folder: commands.torchrun(NUM_RANKS, max_restarts=1))

    arms = {
        "torchrun": restart(),
        "shoal": Kills(lambda folder: commands.shoal_train(NUM_RANKS, folder / "run", 1_000_000)),
        "again": restart(),
    }
    seconds = harness.interleave(arms, 3 if quick else 5, num_warm_up=0)
    against = harness.spread(harness.ratios(seconds["torchrun"], seconds["shoal"]))
    own, peer = (harness.spread(seconds[arm]) for arm in ("shoal", "torchrun"))
    pace = statistics.median(arms["shoal"].paces)
    yield Row(
        name="recovery",
        value=against.median,
        low=against.low,
        high=against.high,
        num_pairs=against.num_pairs,
        floor=FLOOR,
        peer=f"torchrun {peer.median:.2f} s",
        ceiling=f"a step {pace * 1e3:.1f} ms",
        control=harness.spread(harness.ratios(seconds["again"], seconds["torchrun"])).median,
        note=f"Shoal {own.median * 1e3:.0f} ms [{own.low * 1e3:.0f} .. {own.high * 1e3:.0f}]",
    )


if __name__ == "__main__":
    harness.main(measure)
