"""Fragments: which parameters are in each, and when each leaves and arrives."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.numerics.fragments import FragmentSchedule, split_fragments

SIZES = st.lists(st.integers(0, 1000), min_size=1, max_size=40)


@given(SIZES, st.data())
def test_fragments_are_neighbours_and_none_is_empty(sizes: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(sizes)))
    dealt = split_fragments(sizes, count)
    assert len(dealt) == count and all(dealt)
    assert [i for run in dealt for i in run] == list(range(len(sizes)))


@given(st.lists(st.integers(1, 1000), min_size=20, max_size=60), st.integers(1, 4))
def test_fragments_are_about_equal(sizes: list[int], count: int) -> None:
    """No more than the largest parameter off, where there are enough of them to choose from."""
    if max(sizes) > sum(sizes) / count / 2:
        return
    for run in split_fragments(sizes, count):
        assert abs(sum(sizes[i] for i in run) - sum(sizes) / count) <= max(sizes)


def test_nothing_to_train_is_one_empty_fragment() -> None:
    assert split_fragments([], 1) == [range(0)]


@st.composite
def timetables(draw: st.DrawFn) -> FragmentSchedule:
    local_steps = draw(st.integers(2, 24))
    return FragmentSchedule(
        local_steps, draw(st.integers(1, local_steps)), draw(st.integers(1, 100))
    )


@given(timetables())
def test_each_fragment_is_sent_once_a_window_and_one_travels_at_a_time(
    times: FragmentSchedule,
) -> None:
    window = range(1, times.local_steps + 1)
    sent = [times.sent(step) for step in window if times.sent(step) is not None]
    assert sorted(sent) == list(range(times.num_fragments))
    leaves = [step for step in range(1, 200) if times.sent(step) is not None]
    assert all(later - step >= times.delay for step, later in pairwise(leaves))
    assert times.sent(times.local_steps) == times.num_fragments - 1


@given(timetables())
def test_what_travels_was_sent_and_has_not_arrived(times: FragmentSchedule) -> None:
    travelling = None
    for step in range(1, times.num_steps + 1):
        if travelling is not None and step - travelling[1] >= times.delay:
            travelling = None
        number = times.sent(step)
        if number is not None and times.delay:
            travelling = number, step
        assert times.in_flight(step) == travelling
        assert times.speaks(step) is not None or times.num_fragments > 1


@pytest.mark.parametrize("count", [1, 2])
def test_weights_are_alike_at_the_start_and_at_the_end(count: int) -> None:
    times = FragmentSchedule(4, count, 10)
    alike = [step for step in range(11) if times.are_replicas_equal(step)]
    assert alike == ([0, 4, 8, 10] if count == 1 else [0, 10])
    assert [step for step in range(1, 11) if times.ends_window(step)] == [4, 8, 10]
