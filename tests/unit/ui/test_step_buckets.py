"""Buckets hold any number of steps in bounded memory, and lose neither sums nor extremes."""

import math

from hypothesis import given
from hypothesis import strategies as st

from shoal.ui import step_buckets
from shoal.ui.step_buckets import StepBuckets, StepRow, StepSeconds

LOSSES = st.one_of(st.none(), st.floats(-1e6, 1e6), st.just(math.inf), st.just(math.nan))


def rows_of(losses: list[float | None]) -> list[StepRow]:
    return [
        StepRow(
            step=number,
            loss=loss,
            samples=number % 7,
            bytes_sent=3,
            times=StepSeconds(0.1, 0.5, 0.25, 0.125),
        )
        for number, loss in enumerate(losses, 1)
    ]


@given(st.lists(LOSSES, max_size=300), st.integers(1, 60), st.integers(0, 500))
def test_sums_and_extremes_survive_any_cut_and_any_width(
    losses: list[float | None], block: int, foretold: int
) -> None:
    rows = rows_of(losses)
    most, step_buckets.MOST_BUCKETS = step_buckets.MOST_BUCKETS, 16
    try:
        made = StepBuckets(foretold)
        for first in range(0, len(rows), block):
            made.add(rows[first : first + block], {})
    finally:
        step_buckets.MOST_BUCKETS = most
    assert len(made.buckets) <= 16
    assert sum(b.num_steps for b in made.buckets) == len(rows)
    assert sum(b.samples for b in made.buckets) == sum(row.samples for row in rows)
    for number in range(4):
        total = math.fsum(b.seconds[number] for b in made.buckets)
        assert math.isclose(total, len(rows) * (0.1, 0.5, 0.25, 0.125)[number])
    finite = [row.loss for row in rows if row.loss is not None and math.isfinite(row.loss)]
    found = [b.extents["loss"] for b in made.buckets if "loss" in b.extents]
    assert sum(one.count for one in found) == len(finite)
    if finite:
        assert min(one.low for one in found) == min(finite)
        assert max(one.high for one in found) == max(finite)
    assert all(one.last < two.first for one, two in zip(made.buckets, made.buckets[1:]))


def test_a_run_of_any_length_is_held_in_the_same_number_of_buckets() -> None:
    made = StepBuckets()
    for first in range(0, 60_000, 10_000):
        made.add((StepRow(first + i, loss=1.0) for i in range(1, 10_001)), {})
    assert len(made.buckets) <= step_buckets.MOST_BUCKETS
    assert sum(bucket.num_steps for bucket in made.buckets) == 60_000


def test_steps_that_come_again_or_cannot_be_count_once_or_not() -> None:
    made = StepBuckets()
    made.add([StepRow(1), StepRow(2), StepRow(2), StepRow(-5), StepRow(2**60), StepRow(3)], {})
    assert [bucket.last for bucket in made.buckets] == [1, 2, 3]


def test_records_without_times_are_placed_after_the_start_of_their_group() -> None:
    made = StepBuckets()
    took = StepSeconds(0.0, 2.0, 0.0, 0.0)
    made.add(
        [StepRow(1, times=took), StepRow(2, times=took), StepRow(3, times=took)],
        {0: 100.0, 2: 150.0},
    )
    assert [(b.begin, b.end) for b in made.buckets] == [(100, 102), (102, 104), (150, 152)]


def test_there_are_no_more_curves_than_can_be_drawn() -> None:
    made = StepBuckets()
    made.add([StepRow(1, logged={f"n{i}": 1.0 for i in range(500)})], {})
    assert len(made.names) == step_buckets.MOST_NAMES and made.is_cut
