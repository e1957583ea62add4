"""A member that keeps a group waiting is named once, and no other is."""

import pytest

from shoal.elastic.forming import FormingMonitor, describe_late
from shoal.plans.resize import RunSize


@pytest.fixture
def forming() -> FormingMonitor:
    return FormingMonitor(after_s=5.0)


def test_who_is_not_done_is_named_once_a_generation(forming: FormingMonitor) -> None:
    seats = [4, 1, 6]
    assert forming.late(0, seats, {1}, now=10.0) == []
    assert forming.late(0, seats, {1}, now=15.0) == []
    assert forming.late(0, seats, {1}, now=15.1) == [0, 2]
    assert forming.late(0, seats, {1}, now=99.0) == []
    assert forming.late(1, seats, set(), now=100.0) == []
    assert forming.late(1, seats, {4, 1}, now=106.0) == [2]


def test_nobody_is_named_of_a_group_that_works_or_has_not_begun(forming: FormingMonitor) -> None:
    assert forming.late(-1, [0, 1], set(), now=60.0) == []
    assert forming.late(0, [0, 1], {0}, now=61.0) == []
    assert forming.late(0, [0, 1], {0, 1}, now=67.0) == []


def test_a_group_that_worked_and_broke_is_not_late(forming: FormingMonitor) -> None:
    """Its members are to form again only in the next generation."""
    forming.late(0, [0, 1], set(), now=0.0)
    assert forming.late(0, [0, 1], {0, 1}, now=2.0) == []
    assert forming.late(0, [0, None], {0}, now=7.0) == []


def test_ranks_and_servers_are_told_by_name() -> None:
    told = describe_late(RunSize(2, 1), [1, 2], 60.0)
    assert "rank 1, server 0" in told and "60 s" in told
