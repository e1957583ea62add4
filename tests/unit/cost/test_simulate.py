"""Runs over hours: goodput without failures, with more of them, with saves, spares and hosts."""

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.cost.prediction import StepTimes
from shoal.cost.simulate import Conditions, HostRooms, simulate
from shoal.cost.simulated_members import Durations
from shoal.cost.step_timeline import Pace
from shoal.cost.work_log import SaveTimes, WorkLog
from shoal.errors import PlanError
from shoal.training.run import next_due
from tests.unit.cost.simulated_plans import DURATIONS, resolved, run, times_of


def total(lost: object) -> float:
    return sum(msgspec.structs.astuple(lost))


@pytest.mark.parametrize(
    "plan", ["data=4", "data=2 pipeline=2", "data=4 zero=1", "data=1 tensor=4"]
)
def test_without_failures_goodput_is_one_less_what_saves_cost(plan: str) -> None:
    found = run(plan, save_every=100)
    period_s = 100 * found.undisturbed_step_s
    assert found.goodput == pytest.approx(period_s / (period_s + DURATIONS.save.stall_s), abs=1e-4)
    assert found.lost.redone < 1e-4 and not found.failures
    assert run(plan).goodput == pytest.approx(1, abs=1e-4)


@given(
    rate=st.floats(0.0, 40.0),
    seed=st.integers(0, 1000),
    plan=st.sampled_from(["data=8", "data=8 zero=1", "data=2 pipeline=4", "data=8 local_steps=10"]),
)
@settings(max_examples=25, deadline=None)
def test_parts_make_the_whole_and_a_seed_repeats(rate: float, seed: int, plan: str) -> None:
    given = {"failures_per_month": rate, "kills_per_month": rate, "save_every": 100, "seed": seed}
    found = run(plan, num_hosts=4, slots=2, **given)
    assert 0 <= found.goodput <= 1
    assert found.goodput + total(found.lost) == pytest.approx(1)
    assert min(msgspec.structs.astuple(found.lost)) > -1e-9
    mean = sum(value for _, value in found.goodput_over_time) / len(found.goodput_over_time)
    assert mean == pytest.approx(found.goodput, abs=1e-6)
    assert run(plan, num_hosts=4, slots=2, **given) == found


@pytest.mark.parametrize("plan", ["data=8", "data=8 zero=1", "data=2 pipeline=4"])
def test_goodput_falls_as_failures_grow(plan: str) -> None:
    rates = (0.0, 5.0, 20.0, 80.0)
    means = []
    for rate in rates:
        seeds = [
            run(plan, num_hosts=4, slots=2, failures_per_month=rate, save_every=100, seed=seed)
            for seed in range(4)
        ]
        means.append(sum(found.goodput for found in seeds))
    assert means == sorted(means, reverse=True) and means[0] > means[-1]


def test_plans_recover_as_membership_decides() -> None:
    kills = ((1000.0, 1), (5000.0, 2))
    in_place = run("data=4", kills=kills, save_every=1000)
    assert (in_place.repairs.recoveries, in_place.repairs.restarts) == (2, 0)
    assert in_place.lost.redone < 1e-4
    again = run("data=4 zero=1", kills=kills, save_every=1000)
    assert (again.repairs.recoveries, again.repairs.restarts) == (0, 2)
    assert again.goodput < in_place.goodput
    shared = run("data=4 zero=1", kills=kills, save_every=1000, shares=True)
    assert shared.repairs == in_place.repairs and shared.lost.redone < 1e-4
    for apart in (
        run("data=4 zero=1 memory=apart", kills=kills, save_every=1000, shares=True),
        run("data=4 zero=1", num_hosts=2, slots=2, kills=kills, save_every=1000, shares=True),
    ):
        assert (apart.repairs.recoveries, apart.repairs.restarts) == (0, 2)
    # Without a checkpoint all begin at the first step.
    never = run("data=4 zero=1", kills=kills)
    assert never.lost.redone == pytest.approx(5000 / 86400, rel=0.01)
    servers = run("data=4 sync=server servers=2 copies=2", kills=((1000.0, 4),), save_every=1000)
    assert servers.repairs.recoveries == 1 and not servers.repairs.restarts


def test_restart_costs_the_steps_since_the_newest_whole_checkpoint() -> None:
    # Steps of 0.36 s: a save begins at 36.0 s and is whole at 41.2 s.
    step_s = run("data=4 zero=1").undisturbed_step_s
    before = run("data=4 zero=1", kills=((41.0, 0),), save_every=100)
    after = run("data=4 zero=1", kills=((42.0, 0),), save_every=100)
    assert before.lost.redone * 86400 == pytest.approx(41.0 - 0.2, abs=2 * step_s)
    assert after.lost.redone * 86400 == pytest.approx(42.0 - 36.2, abs=2 * step_s)


def test_spare_stands_in_for_a_process() -> None:
    kills = tuple((1000.0 * n, 1) for n in range(1, 9))
    slow_start = msgspec.structs.replace(DURATIONS, spawn_s=60.0)
    with_spare = run("data=4", kills=kills, durations=slow_start)
    without = run("data=4", kills=kills, durations=slow_start, spares=0)
    assert with_spare.lost.down < without.lost.down / 10


def test_lost_host_shrinks_a_run_until_it_is_back() -> None:
    text, given = "data=8 pieces=16", {"failures_per_month": 30.0, "seed": 3}
    found = run(text, num_hosts=4, slots=2, **given)
    assert found.failures and found.repairs.recoveries
    assert found.lost.slow > 0  # fewer ranks had the same pieces
    spare = run(text, num_hosts=5, slots=2, **given)
    assert spare.lost.slow < found.lost.slow


def test_supervisors_host_ends_the_command() -> None:
    found = run("data=2", num_hosts=1, failures_per_month=60.0, save_every=100, hours=48)
    assert found.repairs.relaunches == found.failures > 0
    assert found.lost.down > 0


def test_place_that_is_too_small_is_refused() -> None:
    with pytest.raises(PlanError, match="slots"):
        run("data=8", num_hosts=2, slots=2)


def test_jitter_of_local_steps_averages_out() -> None:
    every = run("data=16", jitter=0.3)
    seldom = run("data=16 local_steps=100", jitter=0.3)
    assert every.waiting > 3 * seldom.waiting > 0


@pytest.mark.parametrize(
    "num_hosts", [80, pytest.param(1250, marks=[pytest.mark.full, pytest.mark.timeout(300)])]
)
def test_many_ranks_for_a_day(num_hosts: int) -> None:
    given = {"failures_per_month": 200 / num_hosts, "save_every": 100, "jitter": 0.05}
    text, batch_size = f"data={num_hosts} tensor=2 pipeline=4", 8 * num_hosts
    found = run(text, num_hosts=num_hosts, slots=8, batch_size=batch_size, **given)
    assert found.failures and found.repairs.restarts and 0 < found.goodput < 1


def test_hosts_of_other_speeds_get_other_shares() -> None:
    plan = resolved("data=4 pieces=24", batch_size=24)
    at = HostRooms(dict.fromkeys(range(4), 1), slowness={3: 3.0})

    def cheap(size: object) -> StepTimes:
        return times_of(plan, exchange_s=0.0)

    found = simulate(plan, cheap, at, Conditions(hours=1.0), Durations())
    assert found.rounds[3] < found.rounds[0] and sum(found.rounds) == 24


@given(
    step_s=st.floats(0.01, 3.0),
    every=st.integers(1, 50),
    stall_s=st.floats(0.0, 2.0),
    write_s=st.floats(0.0, 100.0),
    stops=st.lists(st.floats(0.1, 400.0), min_size=1, max_size=5),
)
@settings(max_examples=60, deadline=None)
def test_equal_steps_at_once_are_steps_one_by_one(step_s, every, stall_s, write_s, stops) -> None:
    log = WorkLog(step_s, every, SaveTimes(stall_s, write_s))
    cadence = every * max(1, math.ceil(write_s / (every * step_s)))
    step = saved = 0
    now = 0.0
    for length in stops:
        log.begin(now, Pace(step_s, 0.0, 0.0, (1,)))
        end, at = now + length, now
        writing: list[tuple[float, int]] = []
        while at + step_s <= end:
            at, step = at + step_s, step + 1
            if next_due(step - 1, cadence) == step:
                at += stall_s
                writing.append((at + write_s, step))
        saved = max([saved, *(number for whole, number in writing if whole <= end)])
        now = end
        log.stop(now)
        assert abs(log.step - step) <= 1 and abs(log.saved - saved) in (0, cadence)
        step, saved = log.step, log.saved
