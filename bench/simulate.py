"""`simulate`: goodput that `shoal simulate` finds, against real runs with stragglers and kills.

The devices are emulated (`devices.py`), on four ranks. What a step takes undisturbed is measured in
a run of its own, for each plan; how long a repair and a start from a checkpoint take, in two more.
Then runs are disturbed: a slow device, ranks that are killed at moments in between. The simulator
gets the measured seconds, the slow device and the moments of the kills, and says how many steps are
made in the time that the real run took. The figure is how far it is off: goodput is those steps, in
the seconds that they take undisturbed, over the time, so both have the same denominator.

Time counts from the first forward pass to the last, which ranks note in a file.
"""

import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import shoal
from bench import commands, harness
from bench.commands import Step, Watched
from bench.devices import WIDTH, OnDevice
from bench.harness import Row

NUM_RANKS, BATCH = 4, 64
SAMPLE_S = 0.012  # a third of it forward
FLOOR = 5.0
LIMIT_S = 400.0


class Scenario(NamedTuple):
    """A plan, how slow its last device is, and after which share of the run ranks are killed."""

    plan: str
    slow: float = 1.0
    kills: tuple[float, ...] = ()
    save_every: int | None = None


SCENARIOS = {
    "balance": Scenario(f"data={NUM_RANKS} pieces=16", 3.0, (0.4, 0.7)),
    "restart": Scenario(f"data={NUM_RANKS} zero=1 memory=apart", 1.0, (0.37, 0.66), 15),
    "local": Scenario(f"data={NUM_RANKS} local_steps=5", 1.5, (0.5,)),
    "stale": Scenario(f"data={NUM_RANKS} sync=server staleness=2", 2.0),
}


# ---- in the ranks


class NotedDevice(nn.Module):
    """Notes each forward pass; the device of the last rank may be slow."""

    def __init__(self, slow: float):
        super().__init__()
        self.inner, self.slow = OnDevice(SAMPLE_S / 3), slow
        self._file = self._pid = -1

    def forward(self, x: Tensor) -> Tensor:
        if self._pid != os.getpid():  # after a fork
            self._pid = os.getpid()
            self._file = os.open(os.environ["STEPS_FILE"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            is_slow = os.environ.get("RANK") == str(NUM_RANKS - 1)
            self.inner.device.sample_s = SAMPLE_S / 3 * (self.slow if is_slow else 1.0)
        os.write(self._file, f"{self._pid} {time.monotonic_ns()}\n".encode())
        done: Tensor = self.inner(x)
        return done


def recipe(steps: int = 100, slow: float = 1.0) -> shoal.Run:
    torch.manual_seed(1)
    inputs = torch.randn(32 * BATCH, WIDTH)
    return shoal.Run(
        model=lambda: NotedDevice(slow),
        loss=mse_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.05),
        data=shoal.data.tensors(inputs, inputs.roll(1, 1)),
        batch_size=BATCH,
        steps=steps,
    )


# ---- in the bench


class Made(NamedTuple):
    """A run: its seconds, when ranks were killed, and the pause that followed each kill."""

    seconds: float
    kills: tuple[float, ...]
    pauses: tuple[float, ...]


def train(scenario: Scenario, num_steps: int) -> Made:
    """A real run, disturbed as the scenario says."""

    def command(folder: Path) -> list[str]:
        words = ["train", f"{Path(__file__).resolve()}:recipe", "--plan", scenario.plan]
        words += ["--set", f"steps={num_steps}", "--set", f"slow={scenario.slow}"]
        if scenario.save_every is not None:
            words += ["--set", f"save_every={scenario.save_every}"]
        return commands.shoal(*words, "--run-dir", str(folder / "run"))

    with commands.running(command) as watched:
        begun = watched.wait_for(
            "all ranks computed", commands.first_step_of_all(NUM_RANKS), LIMIT_S
        )
        rough_s = num_steps * BATCH / NUM_RANKS * SAMPLE_S
        kills = [_kill_at(watched, begun + share * rough_s) for share in scenario.kills]
        if watched.process.wait(timeout=LIMIT_S):
            raise harness.ArmFailed(watched.said())
        notes = sorted(step.time for step in watched.steps())
    first, last = notes[0], notes[-1]
    pauses = [min(at for at in notes if at > killed.again) - killed.at for killed in kills]
    return Made(last - first, tuple(killed.at - first for killed in kills), tuple(pauses))


class _Kill(NamedTuple):
    at: float
    again: float  # when a process had made its first pass after that


def _kill_at(watched: Watched, at: float) -> _Kill:
    """Kill a rank that computes, and wait until another has come."""
    time.sleep(max(0.0, at - time.monotonic()))
    before = list(watched.steps())
    recent = [step.pid for step in before if step.time > time.monotonic() - 3.0]
    killed = commands.kill(min(recent))
    pids = {step.pid for step in before}

    def replaced(steps: list[Step]) -> float | None:
        return next((s.time for s in steps[len(before) :] if s.pid not in pids), None)

    return _Kill(killed, watched.wait_for("another rank computed", replaced) - 1e-6)


class Repairs(NamedTuple):
    """Seconds from a kill to the next pass: in place, and where all begin again."""

    in_place_s: float
    restart_s: float


def measure_repairs(num_steps: int) -> Repairs:
    in_place = train(Scenario(f"data={NUM_RANKS}", kills=(0.5,)), num_steps)
    plan = f"data={NUM_RANKS} zero=1 memory=apart"
    restart = train(Scenario(plan, kills=(0.5,), save_every=5), num_steps)
    return Repairs(in_place.pauses[0], restart.pauses[0])


def simulated_steps(scenario: Scenario, made: Made, step_s: float, repairs: Repairs) -> int:
    """How many steps the simulator makes in the time that the real run took."""
    from shoal.cost.prediction import StageTimes, StepTimes
    from shoal.cost.simulate import Conditions, HostRooms, simulate
    from shoal.cost.simulated_members import Durations
    from shoal.plans.plan import Plan

    plan = Plan.parse(scenario.plan).resolve(ranks=None, cores=NUM_RANKS, batch_size=BATCH)

    def times_of(size: Plan) -> StepTimes:
        piece_s = BATCH / size.num_pieces * SAMPLE_S
        device_s = piece_s * -(-size.num_pieces // size.num_replicas)
        stage = StageTimes(0, 0, piece_s / 3, piece_s * 2 / 3, 0.0, 0.0, 0.0, 0.0, 0, 0, 0)
        rest_s = max(0.0, step_s - device_s)
        return StepTimes((stage,), 1, 1, 0.0, rest_s, 0.0, 0.0, 0.0)

    given = Conditions(
        hours=made.seconds / 3600,
        save_every=scenario.save_every,
        slow_ranks={NUM_RANKS - 1: scenario.slow} if scenario.slow > 1 else {},
        kills=tuple((at, seat) for seat, at in enumerate(made.kills)),
    )
    fork_s = max(0.0, repairs.restart_s - repairs.in_place_s)
    takes = Durations(notice_s=0.0, form_s=repairs.in_place_s, spawn_s=fork_s)
    return simulate(plan, times_of, HostRooms({0: NUM_RANKS}), given, takes).steps


def measure(quick: bool) -> Iterator[Row]:
    num_steps, num_rounds = (60, 1) if quick else (150, 3)
    repairs = measure_repairs(40)
    for name, scenario in SCENARIOS.items():
        errors, notes = [], []
        for _ in range(num_rounds):
            smooth = train(scenario._replace(slow=1.0, kills=()), num_steps)
            made = train(scenario, num_steps)
            step_s = smooth.seconds / (num_steps - 1)
            steps = simulated_steps(scenario, made, step_s, repairs)
            real, said = ((n * step_s) / made.seconds for n in (num_steps - 1, steps))
            errors.append(100 * abs(said / real - 1))
            notes.append(f"real {real:.1%}, simulated {said:.1%}")
        found = harness.spread(errors)
        yield Row(
            name=f"simulate/{name}",
            value=statistics.median(errors),
            low=found.low,
            high=found.high,
            num_pairs=found.num_pairs,
            unit="%",
            floor=FLOOR,
            at_most=True,
            peer=f"a real run of {scenario.plan}",
            ceiling="0 %",
            note=f"goodput: {'; '.join(notes)}; {_words(scenario, repairs)}; emulated devices",
        )


def _words(scenario: Scenario, repairs: Repairs) -> str:
    kills = f"{len(scenario.kills)} kills, last device {scenario.slow:g}x as slow"
    return f"{kills}; repair {repairs.in_place_s:.2f} s, start of all {repairs.restart_s:.2f} s"


if __name__ == "__main__":
    harness.main(measure)
