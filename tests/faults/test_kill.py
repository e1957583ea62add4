"""kill -9 of a rank, at every named point: the spare takes the seat, and the bits are the same."""

import os
import random
import signal
import time

import pytest

from shoal.events.metrics_writer import last_recorded_step
from tests.support.faults import Trained, check_ledger, check_recovered, check_same, check_survivors

NUM_STEPS = 60
STEP_POINTS = ["step.begin", "step.computed", "step.exchanged", "step.committed"]


def check(trained: Trained, undisturbed: Trained, replaced: list[int]) -> None:
    check_same(trained, undisturbed)
    check_ledger(trained, NUM_STEPS)
    check_survivors(trained, replaced)
    if replaced:
        check_recovered(trained, dict.fromkeys(replaced, "killed by SIGKILL"))


def test_an_undisturbed_run_replaces_nobody(undisturbed: Trained) -> None:
    check(undisturbed, undisturbed, [])
    assert undisturbed.result["recoveries"] == 0


@pytest.mark.quick("step.computed-1", "step.committed-0")
@pytest.mark.parametrize(
    ("point", "rank"),
    [
        pytest.param(point, rank, marks=[] if i % 3 == rank else [pytest.mark.full])
        for i, point in enumerate(STEP_POINTS)
        for rank in range(3)
    ],
)
def test_a_kill_within_a_step(start, undisturbed, point: str, rank: int) -> None:
    trained = start(f"{point}:kill:member={rank}:step=20").wait()
    check(trained, undisturbed, [rank])
    assert f"rank {rank} was killed by SIGKILL" in trained.errors


@pytest.mark.quick("seat.forming-1")
@pytest.mark.parametrize(
    ("point", "rank"),
    [
        pytest.param(point, rank, marks=[] if rank == i else [pytest.mark.full])
        for i, point in enumerate(["seat.here", "seat.forming"])
        for rank in range(3)
    ],
)
def test_a_kill_while_the_first_group_forms(start, undisturbed, point: str, rank: int) -> None:
    trained = start(f"{point}:kill:member={rank}").wait()
    check(trained, undisturbed, [rank])


@pytest.mark.quick("handover.sharing-3")
@pytest.mark.parametrize(
    ("point", "second"),
    [
        pytest.param(point, second, marks=[] if second == i else [pytest.mark.full])
        for i, point in enumerate(["seat.here", "seat.forming", "handover.sharing"], start=1)
        for second in (0, 2, 3)
    ],
)
def test_a_second_kill_during_the_repair(start, undisturbed, point: str, second: int) -> None:
    """Member 3 is the spare that takes the seat of rank 1, and dies while it does."""
    at = ":step=20" if second != 3 else ""
    armed = ["step.computed:kill:member=1:step=20", f"{point}:kill:member={second}{at}"]
    trained = start(*armed).wait()
    check_same(trained, undisturbed)
    check_ledger(trained, NUM_STEPS)
    assert trained.result["recoveries"] >= 1


@pytest.mark.parametrize("ranks", [(0, 1), pytest.param((1, 2), marks=pytest.mark.full)])
def test_two_kills_at_once(start, undisturbed, ranks: tuple[int, int]) -> None:
    armed = [f"step.exchanged:kill:member={rank}:step=20" for rank in ranks]
    check(start(*armed).wait(), undisturbed, list(ranks))


@pytest.mark.full
def test_two_kills_one_after_the_other(start, undisturbed) -> None:
    armed = ["step.begin:kill:member=0:step=10", "step.begin:kill:member=3:step=30"]
    trained = start(*armed).wait()
    check_same(trained, undisturbed)
    check_ledger(trained, NUM_STEPS)
    check_survivors(trained, [0, 0])


@pytest.mark.quick("step.begin-0-0")
@pytest.mark.parametrize(
    ("point", "step", "rank"),
    [
        ("step.begin", 0, 0),
        ("step.exchanged", NUM_STEPS - 1, 1),
        ("step.committed", NUM_STEPS, 0),
        pytest.param("step.committed", 1, 2, marks=pytest.mark.full),
        pytest.param("step.committed", NUM_STEPS, 2, marks=pytest.mark.full),
    ],
)
def test_a_kill_at_the_first_and_the_last_step(start, undisturbed, point, step, rank) -> None:
    check(start(f"{point}:kill:member={rank}:step={step}").wait(), undisturbed, [rank])


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_kill_during_evaluation_is_repaired(start, rank: int) -> None:
    plain = start(recipe="evaluated").wait()
    trained = start(f"step.committed:kill:member={rank}:step=20", recipe="evaluated").wait()
    check_same(trained, plain)
    told = [record.get("evaluation") for record in trained.steps()]
    assert told == [record.get("evaluation") for record in plain.steps()]
    assert sum(answer is not None for answer in told) == NUM_STEPS // 5


@pytest.mark.full
def test_an_operation_left_behind_does_not_hold_the_repair_up(start, undisturbed) -> None:
    trained = start(recipe="dangling").wait()
    check_same(trained, undisturbed)
    check_ledger(trained, NUM_STEPS)


@pytest.mark.full
@pytest.mark.parametrize("num_kills", [2, 50])
@pytest.mark.timeout(600)
def test_kills_at_random_moments(start, undisturbed, draws: random.Random, num_kills: int) -> None:
    for attempt in range(num_kills):
        training = start(pause=0.01)
        training.wait_for_seats()
        time.sleep(draws.uniform(0.0, 0.5))
        training.signal_rank(draws.randrange(3), signal.SIGKILL)
        trained = training.wait()
        check_same(trained, undisturbed)
        check_ledger(trained, NUM_STEPS)
        assert trained.result["recoveries"] == 1, f"kill {attempt}"


def test_losses_leave_neither_descriptors_nor_threads(start, undisturbed) -> None:
    """Of the groups that broke, the last one may still be there."""
    training, counts, num_losses = start(pause=0.06), [], 6
    pid = training.wait_for_seats()[0]
    for number in range(num_losses):
        training.signal_rank(1 + number % 2, signal.SIGKILL)
        training.wait_for_seats(number + 1)
        training.wait_for_step(last_recorded_step(training.run_dir / "metrics.jsonl") + 2)
        held = (len(os.listdir(f"/proc/{pid}/{kind}")) for kind in ("fd", "task"))
        counts.append(tuple(held))
    check_same(training.wait(), undisturbed)
    for first, last in zip(counts[1], counts[-1], strict=True):
        assert last <= first + 3, f"descriptors and threads after each loss: {counts}"
