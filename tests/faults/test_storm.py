"""Storms: several faults at random moments of one run, under thirteen unlike plans.

One command is given again and again until the run is done, as a scheduler would: `shoal train
--resume`. Whatever happened on the way, the bits are those of an undisturbed run, and every sample
was trained on in its own step. All faults are drawn before the run begins; what was drawn, with its
seed, is printed: `SHOAL_TEST_SEED` and the name of the test repeat it.
"""

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import cycle, islice, product
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest

from shoal.errors import RUN_AGAIN
from shoal.events.metrics_writer import last_recorded_step
from shoal.events.sinks import SPENT
from tests.faults.conftest import NUM_STEPS, SAVE_POINTS, Start, checkpoints
from tests.support.faults import Trained, Training, check_ledger, check_same, events
from tests.support.leaks import is_alive, wait_until

T = TypeVar("T")
LIMIT_S = 180.0  # for one command
MOST_COMMANDS = 10
OPTIONS = ("--resume", "--keep", "last=3", "--heartbeat-timeout", "3")
FILES = {
    *("checkpoints", "events.jsonl", "logs", "metrics.jsonl", "model.safetensors"),
    *("outcome.json", "report.html", "run.json"),
}
SAVES = [*product(SAVE_POINTS[:3], (0, 1)), *product(SAVE_POINTS[3:], (0,))]  # rank 0 commits

KILL, PAUSE, EVICT, SAVE = "kill", "pause", "evict", "kill in a save"
TERM, CRASH = "term", "crash"  # of the command itself
KINDS = [KILL, KILL, KILL, PAUSE, EVICT, SAVE, SAVE, TERM, CRASH]
PAUSES_S = {PAUSE: 0.5, EVICT: 10.0}  # below and above the heartbeat's bound


class Case(NamedTuple):
    plan: str
    recipe: str = "mlp"
    save_every: int = 10
    agree_every: int = 1  # in between, a loss is that of the rank that wrote it down
    most_unmarked: int = 0  # steps, of windows that the run went on with in their middle


CASES = [
    Case("data=2 accumulate=2"),
    Case("data=3"),
    Case("data=2 zero=1"),
    Case("data=3 zero=2"),
    Case("data=2 zero=3"),
    Case("tensor=2"),
    Case("pipeline=2 schedule=zero-bubble"),
    Case("data=2 tensor=2"),
    Case("data=2 pipeline=2 microbatches=2"),
    Case("data=2 sync=server servers=2 copies=2 codec=fp16"),
    Case("data=3 sync=server servers=2"),
    # A replica is replaced alone, so that only steps without state have the same bits again ...
    Case("data=3 local_steps=4", "stateless", save_every=8, agree_every=4),
    # ... and here all begin anew, also from steps 10, 30 and 50, within windows.
    Case("data=2 local_steps=4 outer=nesterov codec=int8 fragments=2", most_unmarked=3 * 4),
]
NUM_RUNS, QUICK = 60, (10, 4)  # servers, which are replaced, and zero=3, where all begin anew


class Fault(NamedTuple):
    """Happens so long after this step is on record; `whom` is a place from 0 to 1 among seats."""

    kind: str
    step: int
    delay_s: float
    whom: float


def draw(draws: random.Random) -> list[list[Fault]]:
    """What happens to each command; all but the last are ended by it."""
    commands: list[list[Fault]] = [[]]
    for step in sorted(draws.sample(range(NUM_STEPS), draws.randint(2, 5))):
        kind = draws.choice(KINDS)
        commands[-1].append(Fault(kind, step, draws.uniform(0.0, 0.3), draws.random()))
        if kind in (TERM, CRASH):
            commands.append([])
    return commands


def armed(faults: list[Fault]) -> list[str]:
    """Deaths within the first save of a command, which no signal from outside would meet."""
    saves = [SAVES[int(fault.whom * len(SAVES))] for fault in faults if fault.kind == SAVE]
    return [f"{point}:kill:member={member}" for point, member in saves]


def strike(training: Training, fault: Fault) -> None:
    """Do to a run what was drawn; nothing if it ends before."""
    record = training.run_dir / "metrics.jsonl"
    await_or_end(training, lambda: last_recorded_step(record) >= fault.step)
    time.sleep(fault.delay_s)
    if fault.kind in (TERM, CRASH):
        print(f"{fault.kind} after step {last_recorded_step(record)}")
        end(training, fault.kind)
    elif seats := await_or_end(training, lambda: seated(training)):
        seat = sorted(seats)[int(fault.whom * len(seats))]
        print(f"{fault.kind} seat {seat} after step {last_recorded_step(record)}")
        with suppress(ProcessLookupError):  # it has ended by itself
            hurt(seats[seat], fault.kind)


def await_or_end(training: Training, find: Callable[[], T]) -> T:
    """What is found, once it is or the command has ended."""
    wait_until(lambda: bool(find()) or not training.command.is_running(), LIMIT_S)
    return find()


def seated(training: Training) -> dict[int, int]:
    """The process in each seat; those of earlier commands and the dead are left out."""
    latest = {event["rank"]: event["pid"] for event in events(training.run_dir, "seat")}
    living = training.processes()
    return {seat: pid for seat, pid in latest.items() if pid in living}


def end(training: Training, kind: str) -> None:
    """The whole run, politely or not: the next command must not meet a process of it."""
    processes = training.processes()
    training.command.send_signal(signal.SIGTERM if kind == TERM else signal.SIGKILL)
    training.wait(LIMIT_S)
    assert wait_until(lambda: not any(map(is_alive, processes)), 20), "a process was left"


def hurt(pid: int, kind: str) -> None:
    if kind == KILL:
        os.kill(pid, signal.SIGKILL)
        return
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: not is_alive(pid), PAUSES_S[kind])
    os.kill(pid, signal.SIGCONT)


def run_once(start: Start, case: Case, run_dir: Path, faults: list[Fault]) -> Trained:
    """One command, until it has ended by itself or by what was done to it."""
    training = start(
        *armed(faults),
        recipe=case.recipe,
        plan=case.plan,
        options=OPTIONS,
        run_dir=run_dir,
        save_every=case.save_every,
        pause=0.02,
    )
    for fault in faults:
        if fault.kind != SAVE:
            strike(training, fault)
    return training.wait(LIMIT_S)


def check_end(trained: Trained, faults: list[Fault]) -> None:
    """It is done, or says how to go on; where it was not killed itself."""
    kinds = {fault.kind for fault in faults}
    codes = {0}
    if TERM in kinds:
        codes |= {RUN_AGAIN, 128 + signal.SIGTERM, -signal.SIGTERM}
    if CRASH in kinds:
        codes.add(-signal.SIGKILL)
    if len(faults) > 1:  # of what exists once or twice, all may be lost
        codes.add(1)
    assert trained.exit_code in codes, trained.errors
    if trained.exit_code in (1, RUN_AGAIN) and (trained.run_dir / "checkpoints").exists():
        assert "--resume" in trained.last_words


@pytest.mark.quick("10-data=3 sync=server servers=2")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=f"{number}-{case.plan}",
            marks=() if number in QUICK else pytest.mark.full,
        )
        for number, case in enumerate(islice(cycle(CASES), NUM_RUNS))
    ],
)
@pytest.mark.timeout(900)
def test_a_storm(
    start: Start, undisturbed_under, draws: random.Random, tmp_path: Path, case: Case
) -> None:
    commands = draw(draws)
    print(*commands, sep="\n")
    undisturbed = undisturbed_under(case.plan, case.recipe)
    for faults in commands + [[]] * (MOST_COMMANDS - len(commands)):
        trained = run_once(start, case, tmp_path / "run", faults)
        print(f"exit code {trained.exit_code}: {trained.errors.splitlines()[-1:]}")
        check_end(trained, faults)
        if trained.exit_code == 0:
            break
    check_same(trained, undisturbed, case.agree_every)
    check_ledger(trained, NUM_STEPS, case.most_unmarked)
    assert checkpoints(trained.run_dir)[-1] == NUM_STEPS
    told = set(os.listdir(trained.run_dir)) - {SPENT}  # of a run of half a second or more
    assert told == FILES
