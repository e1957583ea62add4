"""A death while ranks write to the memory that all of them read tears nothing: the same bits."""

import pytest

from tests.support.faults import Trained, check_ledger, check_recovered, check_same, check_survivors

NUM_STEPS = 60
POINTS = ["update.known", "update.logged", "update.torn", "update.done"]


@pytest.fixture(scope="session")
def apart(undisturbed_under) -> Trained:
    """Ranks that each hold parameters and state of their own."""
    return undisturbed_under("data=3 memory=apart")


def check(trained: Trained, apart: Trained, replaced: list[int]) -> None:
    check_same(trained, apart)
    check_ledger(trained, NUM_STEPS)
    check_survivors(trained, replaced)
    check_recovered(trained, dict.fromkeys(replaced, "killed by SIGKILL"))


def test_ranks_that_share_train_the_bits_of_those_apart(undisturbed, apart) -> None:
    check_same(undisturbed, apart)


@pytest.mark.parametrize(
    ("point", "rank"),
    [
        pytest.param(point, rank, marks=[] if i == rank + 1 else [pytest.mark.full])
        for i, point in enumerate(POINTS)
        for rank in range(3)
    ],
)
def test_a_kill_within_an_update(start, apart, point: str, rank: int) -> None:
    check(start(f"{point}:kill:member={rank}:step=20").wait(), apart, [rank])


@pytest.mark.parametrize("point", ["update.logged", "update.torn"])
def test_whoever_stands_in_for_a_dead_rank_may_die_too(start, apart, point: str) -> None:
    """Rank 2 does what both left."""
    armed = [f"{point}:kill:member=1:step=20", "update.standing_in:kill:member=0:step=20"]
    trained = start(*armed).wait()
    check_same(trained, apart)
    check_ledger(trained, NUM_STEPS)


ZERO = ["data=3 zero=1", "data=3 zero=2"]


@pytest.mark.parametrize("plan", ZERO)
@pytest.mark.parametrize(
    "point",
    [pytest.param(p, marks=[] if p == "update.torn" else [pytest.mark.full]) for p in POINTS],
)
def test_under_zero_a_kill_within_an_update_is_made_good_too(
    start, apart, plan: str, point: str
) -> None:
    """There is no checkpoint, and no step is made again."""
    trained = start(f"{point}:kill:member=1:step=20", plan=plan).wait()
    check(trained, apart, [1])
    assert trained.result["steps_again"] <= 1  # it may be on its way to be told


@pytest.mark.parametrize("plan", ZERO)
def test_under_zero_without_the_memory_ranks_shard_and_say_so(start, apart, plan: str) -> None:
    trained = start("host_state.share:full:member=0", plan=plan).wait()
    check_same(trained, apart)
    told = (trained.run_dir / "logs" / "rank-000.log").read_text()
    assert "Ranks of one host hold parameters of their own: " in told


@pytest.mark.parametrize("plan", ["data=3 zero=1", "data=3 zero=1 memory=apart"])
def test_under_zero_ranks_that_shard_begin_again(start, apart, plan: str) -> None:
    """What the dead rank held is held by no other, whether that was asked for or not."""
    armed = ["step.begin:kill:member=1:step=25"]
    if "apart" not in plan:
        armed.append("host_state.share:full:member=0")
    trained = start(*armed, plan=plan, save_every=10, pause=0.01).wait()
    check_same(trained, apart)
    (recovered,) = trained.events("recovered")
    assert recovered["step"] in (10, 20)  # what was being written may be lost
    before, after = trained.pids()
    assert not {*before.values()} & {*after.values()}


def test_under_zero_a_group_that_finds_no_memory_again_goes_on(start, apart) -> None:
    """Each rank holds all then, since a newcomer could not take a shard's state from any."""
    armed = ["update.torn:kill:member=0:step=20", "host_state.share:full:member=3"]
    trained = start(*armed, plan="data=3 zero=1").wait()
    check(trained, apart, [0])


def test_without_the_memory_each_rank_holds_its_own_and_says_so(start, apart) -> None:
    trained = start("host_state.share:full:member=0").wait()
    check_same(trained, apart)
    told = (trained.run_dir / "logs" / "rank-000.log").read_text()
    assert "Ranks of one host hold parameters of their own: " in told


@pytest.mark.full
@pytest.mark.parametrize("point", POINTS)
def test_a_rank_that_is_stopped_within_an_update_is_replaced(start, apart, point: str) -> None:
    trained = start(f"{point}:stop:member=1:step=20").wait()
    check_same(trained, apart)
    check_ledger(trained, NUM_STEPS)


@pytest.mark.parametrize(
    "what", ["model.0.weight", pytest.param("exp_avg", marks=pytest.mark.full)]
)
def test_a_flipped_bit_ends_the_run_and_names_the_rank(start, what: str) -> None:
    """Rank 1 owns the first layer: gradients come in reverse order."""
    trained = start(f"step.begin:flip:member=1:step=20:what={what}", plan="data=2").wait()
    assert trained.exit_code == 1
    assert "State of rank 1 was corrupted" in trained.last_words and what in trained.last_words


def test_a_flipped_bit_is_found_although_another_rank_dies_first(start) -> None:
    """Before it is looked for; the survivors would hand it on."""
    faults = (
        "step.begin:flip:member=1:step=20:what=exp_avg",
        "step.computed:kill:member=2:step=20",
    )
    trained = start(*faults).wait()
    assert trained.exit_code == 1, trained.errors
    assert "State of rank 1 was corrupted after step 20" in trained.last_words


COUNT_FLIPPED = "step.begin:flip:member=1:step=20:what=.step"


def test_counts_of_steps_are_compared(start) -> None:
    trained = start(COUNT_FLIPPED, plan="data=2").wait()
    assert trained.exit_code == 1, trained.errors
    assert "Replicas differ" in trained.last_words and ".step" in trained.last_words


@pytest.mark.full
def test_of_three_the_odd_count_is_repaired(start, apart) -> None:
    trained = start(COUNT_FLIPPED).wait()
    check_same(trained, apart)
    (event,) = trained.events("replica-repaired")
    assert event["ranks"] == [1]
