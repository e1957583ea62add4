"""A run that gets no further is told of; one that was told to stop is ended within a bound."""

import pytest

from shoal.elastic.standstill import Standstill


@pytest.fixture
def standstill() -> Standstill:
    found = Standstill(stop_timeout_s=20.0)
    found.look(None, 0.0)  # the group forms
    found.look("formed", 500.0)
    return found


def test_it_is_told_after_a_while_and_then_at_doubling_times(standstill: Standstill) -> None:
    assert standstill.late_s(574.0) is None
    assert standstill.late_s(576.0) == 76.0
    assert standstill.late_s(600.0) is None
    assert standstill.late_s(652.0) == 152.0
    standstill.look("a step", 653.0)
    assert standstill.late_s(729.0) is None  # since the longest pause was of two minutes and more
    assert standstill.late_s(653.0 + 10 * 153.0) == 1530.0


def test_what_somebody_explained_is_not_told_again(standstill: Standstill) -> None:
    standstill.explained(550.0)
    assert standstill.late_s(599.0) is None
    assert standstill.late_s(600.0) == 100.0


def test_a_stop_that_gets_no_further_ends(standstill: Standstill) -> None:
    assert standstill.stop_is_late_s(600.0, saves=False) is None
    standstill.look("a step", 615.0)
    assert standstill.stop_is_late_s(634.0, saves=False) is None
    longest_s = 115.0
    assert standstill.stop_is_late_s(615.0 + 3 * longest_s, saves=False) is None
    assert standstill.stop_is_late_s(616.0 + 3 * longest_s, saves=False) == 361.0


def test_a_save_is_given_more_time(standstill: Standstill) -> None:
    assert standstill.stop_is_late_s(501.0, saves=True) is None
    assert standstill.stop_is_late_s(522.0, saves=True) is None
    assert standstill.stop_is_late_s(522.0, saves=False) == 21.0
    assert standstill.stop_is_late_s(702.0, saves=True) == 201.0


def test_a_run_that_goes_on_and_on_ends_too(standstill: Standstill) -> None:
    ends = [
        now
        for now in range(500, 1000)
        if standstill.look(now, float(now)) or standstill.stop_is_late_s(float(now), saves=False)
    ]
    assert ends[0] == 701
