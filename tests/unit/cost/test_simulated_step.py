"""A simulated step: production's orders give the bubbles of the formulas, slow ranks are waited
for, work moves, and no worker runs further ahead than its bound."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.cost.explain import bubble_of
from shoal.cost.round_times import round_seconds
from shoal.cost.step_timeline import Slowness, gantt, pace_of
from shoal.data.balance import can_balance
from shoal.data.split import apportion_pieces
from shoal.plans.plan import Plan
from tests.unit.cost.simulated_plans import BACKWARD_S, FORWARD_S, UPDATE_S, resolved, times_of

SAMPLE_S = FORWARD_S + BACKWARD_S


def even(plan: Plan) -> Slowness:
    ones = np.ones((1, plan.num_replicas, plan.pipeline))
    return Slowness(ones, ones)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zero-bubble", "zbv"])
@pytest.mark.parametrize(("pipeline", "microbatches"), [(2, 4), (4, 4), (4, 8), (4, 16)])
def test_bubble_of_equal_stages_is_the_formulas(schedule, pipeline, microbatches) -> None:
    plan = resolved(f"data=1 pipeline={pipeline} schedule={schedule} microbatches={microbatches}")
    expected = bubble_of(plan, splits_backward=True).share
    assert pace_of(plan, times_of(plan), even(plan)).bubble == pytest.approx(expected, abs=1e-9)


def test_ends_are_those_that_predict_finds() -> None:
    plan = resolved("data=1 pipeline=4 microbatches=8")
    times = times_of(plan, send_s=0.003)
    span_s, _, _ = round_seconds(plan, times.stages)
    pace = pace_of(plan, times, even(plan))
    assert pace.step_s == pytest.approx(span_s + times.exchange_s + UPDATE_S)


def test_replicas_wait_for_the_slow_one() -> None:
    plan = resolved("data=4")
    slow = np.ones((1, 4, 1))
    slow[0, 3, 0] = 5.0
    pace = pace_of(plan, times_of(plan, exchange_s=0.0), Slowness(slow, np.ones_like(slow)))
    assert pace.step_s == pytest.approx(5 * SAMPLE_S + UPDATE_S)
    assert pace.waiting == pytest.approx(0.75 * 4 * SAMPLE_S / pace.step_s)


@given(
    pieces=st.integers(2, 6),
    slow=st.lists(st.floats(1.0, 6.0), min_size=2, max_size=5),
)
@settings(max_examples=40, deadline=None)
def test_work_moves_as_production_moves_it(pieces: int, slow: list[float]) -> None:
    count = len(slow)
    plan = resolved(f"data={count} pieces={count * pieces}", batch_size=count * pieces)
    assert can_balance(plan)
    times = np.array(slow).reshape(1, count, 1)
    pace = pace_of(plan, times_of(plan, exchange_s=0.0), Slowness(times, np.ones_like(times)))
    assert sum(pace.counts) == plan.num_pieces
    best = apportion_pieces(plan.num_pieces, [SAMPLE_S * s for s in slow])
    longest = max(c * s for c, s in zip(best, slow, strict=True)) * SAMPLE_S
    # The balancer leaves gains below a tenth.
    assert longest + UPDATE_S <= pace.step_s + 1e-9
    assert pace.step_s - UPDATE_S <= longest / 0.9 + 1e-9


@given(bound=st.integers(0, 6), slow=st.lists(st.floats(0.2, 5.0), min_size=2, max_size=6))
@settings(max_examples=40, deadline=None)
def test_bound_on_staleness_is_never_broken(bound: int, slow: list[float]) -> None:
    plan = resolved(f"data={len(slow)} sync=server staleness={bound}", batch_size=len(slow))
    times = np.array(slow).reshape(1, len(slow), 1)
    pace = pace_of(plan, times_of(plan), Slowness(times, np.ones_like(times)))
    if bound:
        assert pace.staleness is not None
        assert pace.staleness.largest <= bound
    # In the long run all are as fast as the slowest.
    slowest = max(slow) * SAMPLE_S + 0.05 + UPDATE_S
    assert pace.step_s == pytest.approx(slowest, rel=0.02)


def test_without_a_bound_workers_do_not_wait() -> None:
    plan = resolved("data=4 sync=server staleness=any")
    slow = np.array([1.0, 1.0, 1.0, 5.0]).reshape(1, 4, 1)
    pace = pace_of(plan, times_of(plan, exchange_s=0.0), Slowness(slow, np.ones_like(slow)))
    speeds = [1 / (s * SAMPLE_S + UPDATE_S) for s in (1, 1, 1, 5)]
    assert pace.step_s == pytest.approx(4 / sum(speeds), rel=0.02)
    assert pace.waiting == 0


def test_slow_links_lengthen_the_exchange_and_sends() -> None:
    plan = resolved("data=2 pipeline=2")
    ones = np.ones((1, 2, 2))
    times = times_of(plan, send_s=0.01)
    fast = pace_of(plan, times, Slowness(ones, ones))
    slow = pace_of(plan, times, Slowness(ones, 3 * ones))
    assert slow.step_s - fast.step_s > 2 * times.exchange_s
    assert slow.bubble > fast.bubble


def test_spans_of_a_rank_do_not_overlap_and_end_with_the_step() -> None:
    plan = resolved("data=2 pipeline=2 schedule=interleaved microbatches=4 accumulate=2")
    slow = even(plan)
    slow.compute[0, 1] = 2.0
    times = times_of(plan, send_s=0.002)
    pace = pace_of(plan, times, slow)
    spans = gantt(plan, times, slow, pace)
    assert {span.rank for span in spans} == {0, 1, 2, 3}
    for rank in range(4):
        own = sorted(span[2:4] for span in spans if span.rank == rank)
        assert all(stop <= start + 1e-9 for (_, stop), (start, _) in pairwise(own))
    assert math.isclose(max(span.stop_s for span in spans), pace.step_s)
