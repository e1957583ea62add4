"""Deaths between and within agreements of local steps, without servers: one replica is replaced.

The others keep what they have learnt, the newcomer begins from what they agreed on last, and each
sample counts once. Where a step leaves nothing behind but weights, a window that is done again has
the same bits, so nothing less is accepted there. Members 0 to 2 are the replicas, 3 is the spare;
windows are of four steps.
"""

import math
import random
import signal
import time

import pytest

from tests.support.faults import Trained, check_ledger, check_recovered, check_survivors

NUM_STEPS = 60
AVERAGE = "data=3 local_steps=4"
NESTEROV = f"{AVERAGE} outer=nesterov:0.7:0.5"
PACKED = f"{NESTEROV} codec=int8"
PLANS = [AVERAGE, NESTEROV]
# A point and the number it is given: of the steps before it, or of the step that ends a window.
IN_A_WINDOW = [
    (point, step)
    for point in ("step.begin", "step.computed", "step.exchanged")
    for step in (21, 22, 23)
]
IN_AN_AGREEMENT = [
    (point, 24) for point in ("local.bringing", "local.brought", "local.agreed", "step.committed")
]
QUICK = {
    (AVERAGE, "step.computed", 22, 1),
    (NESTEROV, "step.exchanged", 23, 0),
    (AVERAGE, "local.brought", 24, 2),
    (NESTEROV, "local.agreed", 24, 0),
}


def check_whole(trained: Trained, replaced: list[int]) -> None:
    """It ended well, on all samples once, in the processes it began in but for those replaced."""
    assert trained.exit_code == 0, trained.errors
    check_ledger(trained, NUM_STEPS)
    check_survivors(trained, replaced)
    assert all(math.isfinite(record["loss"]) for record in trained.steps())


def check_same(trained: Trained, other: Trained) -> None:
    """The same weights; the same losses too where replicas agreed, and are not the writer's own."""
    ends = [
        [record["loss"] for record in one.steps() if record["step"] % 4 == 0]
        for one in (trained, other)
    ]
    assert ends[0] == ends[1], "the losses differ"
    assert trained.model() == other.model(), "the weights differ"


@pytest.mark.quick("data=3 local_steps=4 outer=nesterov:0.7:0.5-step.exchanged-23-0")
@pytest.mark.parametrize(
    ("plan", "point", "step", "rank"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.full)
        for case in (
            (plan, point, step, rank)
            for plan in PLANS
            for point, step in (*IN_A_WINDOW, *IN_AN_AGREEMENT)
            for rank in range(3)
        )
    ],
)
def test_a_window_done_again_has_the_same_bits(
    start, undisturbed_under, plan: str, point: str, step: int, rank: int
) -> None:
    whole = undisturbed_under(plan, "stateless")
    armed = f"{point}:kill:member={rank}:step={step}"
    trained = start(armed, plan=plan, recipe="stateless").wait()
    check_whole(trained, [rank])
    check_same(trained, whole)
    check_recovered(trained, {rank: "killed by SIGKILL"})
    assert f"Replica {rank} continues from step" in trained.errors


@pytest.mark.full
@pytest.mark.parametrize("loser", [0, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("plan", [AVERAGE, pytest.param(PACKED, marks=pytest.mark.full)])
def test_who_has_not_heard_that_all_agreed_follows_who_has(start, plan: str, loser: int) -> None:
    """Rank 1 dies when one of the others counts the agreement and one has the result aside."""
    killed = "local.agreed:kill:member=1:step=24"
    lost = f"local.agreed:lose:member={loser}:step=24"
    one = start(killed, plan=plan, recipe="stateless").wait()
    other = start(killed, lost, plan=plan, recipe="stateless").wait()
    check_whole(other, [1])
    assert "Replica 1 continues from step 24" in other.errors
    check_same(other, one)


@pytest.mark.quick("local.agreed")
@pytest.mark.parametrize("point", ["local.brought", "local.agreed"])
def test_a_group_that_breaks_without_a_death_agrees_once(
    start, undisturbed_under, point: str
) -> None:
    whole = undisturbed_under(PACKED)
    trained = start(f"{point}:lose:member=1:step=24", plan=PACKED).wait()
    check_whole(trained, [])
    check_same(trained, whole)


@pytest.mark.parametrize(
    ("plan", "point", "step"),
    [
        (PACKED, "step.computed", 22),
        pytest.param(PACKED, "local.brought", 24, marks=pytest.mark.full),
        pytest.param(AVERAGE, "step.begin", 1, marks=pytest.mark.full),
        pytest.param(NESTEROV, "local.brought", NUM_STEPS, marks=pytest.mark.full),
        pytest.param(NESTEROV, "step.committed", NUM_STEPS, marks=pytest.mark.full),
    ],
)
def test_buffers_and_moments_may_differ_and_no_sample_is_lost(
    start, plan: str, point: str, step: int
) -> None:
    check_whole(start(f"{point}:kill:member=1:step={step}", plan=plan).wait(), [1])


@pytest.mark.full
@pytest.mark.parametrize("second", [0, 3])
def test_a_second_death_while_the_first_is_repaired(start, undisturbed_under, second: int) -> None:
    """Member 3 takes the seat of rank 1, and it or rank 0 dies when it is given the state."""
    whole = undisturbed_under(NESTEROV, "stateless")
    armed = ["step.computed:kill:member=1:step=22", f"handover.sharing:kill:member={second}"]
    trained = start(*armed, plan=NESTEROV, recipe="stateless").wait()
    check_same(trained, whole)
    check_ledger(trained, NUM_STEPS)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [(0, 1), (1, 2)])
def test_one_survivor_is_enough(start, undisturbed_under, ranks: tuple[int, int]) -> None:
    whole = undisturbed_under(NESTEROV, "stateless")
    armed = [f"step.computed:kill:member={rank}:step=22" for rank in ranks]
    trained = start(*armed, plan=NESTEROV, recipe="stateless").wait()
    check_whole(trained, list(ranks))
    check_same(trained, whole)


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_an_evaluation_and_a_save_after_a_window(start, rank: int) -> None:
    settings = {"recipe": "judged", "plan": AVERAGE, "save": 8}
    whole = start(**settings, pause=0).wait()
    trained = start(f"step.committed:kill:member={rank}:step=24", **settings).wait()
    check_whole(trained, [rank])
    told = [record.get("evaluation") for record in trained.steps()]
    assert [t is not None for t in told] == [r.get("evaluation") is not None for r in whole.steps()]
    saved = {event["step"] for event in trained.events("saved")}
    assert 60 in saved and any(24 < step < 60 for step in saved)


@pytest.mark.full
@pytest.mark.parametrize(
    ("plan", "save"),
    [
        pytest.param("data=2 local_steps=4 outer=nesterov fragments=2", 4, marks=pytest.mark.full),
        ("data=2 local_steps=4", 10),
    ],
)
def test_where_one_cannot_be_replaced_all_begin_from_the_checkpoint(
    start, plan: str, save: int
) -> None:
    settings = {"recipe": "judged", "plan": plan, "save": save}
    whole = start(**settings, pause=0.01).wait()
    trained = start("step.begin:kill:member=1:step=25", **settings, pause=0.01).wait()
    check_same(trained, whole)
    check_ledger(trained, NUM_STEPS)
    others = [event for event in trained.events("exited") if event["rank"] != 1]
    assert all("was ended, since rank 1 was killed" in event["how"] for event in others)


@pytest.mark.full
@pytest.mark.parametrize("num_kills", [1, 40])
@pytest.mark.timeout(900)
def test_kills_at_random_moments(
    start, undisturbed_under, draws: random.Random, num_kills: int
) -> None:
    for attempt in range(num_kills):
        plan = PLANS[attempt % 2]
        training = start(pause=0.01, plan=plan, recipe="stateless")
        training.wait_for_seats()
        time.sleep(draws.uniform(0.0, 0.5))
        training.signal_rank(draws.randrange(3), signal.SIGKILL)
        trained = training.wait()
        check_same(trained, undisturbed_under(plan, "stateless"))
        check_ledger(trained, NUM_STEPS)
        assert trained.result["recoveries"] == 1, f"kill {attempt}"
