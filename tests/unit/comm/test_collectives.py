"""Waiting for operations: what ends, what breaks, and what the transport has forgotten.

Gloo forgets a message that was on its way when a connection broke, about once in a hundred deaths
of a busy group, and cannot be made to: so these works only play that they wait.
"""

from datetime import timedelta

import pytest

from shoal.comm import collectives
from shoal.comm.collectives import Pending, drain_deadline
from shoal.comm.flight_recorder import FlightRecorder
from shoal.errors import GroupLost, TookTooLong


class Work:
    """Ends at the `ends_at`-th look, with an error or without one; or never."""

    def __init__(self, ends_at: int | None, error: str = ""):
        self.ends_at, self.error, self.num_looks = ends_at, error, 0
        self.waited: list[timedelta | None] = []

    def wait(self, timeout: timedelta | None = None) -> None:
        self.num_looks += 1
        self.waited.append(timeout)
        if not self.is_completed():
            assert timeout is not None, "who waits without end never hears of a loss"
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)

    def is_completed(self) -> bool:
        return self.ends_at is not None and self.num_looks >= self.ends_at


def never() -> bool:
    return False


@pytest.mark.parametrize("ends_at", [1, 2, 5])
def test_what_takes_long_is_waited_for(ends_at: int) -> None:
    done: list[bool] = []
    Pending([Work(ends_at)], [lambda: done.append(True)], never).wait()
    assert done == [True]


@pytest.mark.parametrize("ends_at", [1, 3])
def test_what_broke_says_why(ends_at: int) -> None:
    with pytest.raises(GroupLost, match="reset by peer"):
        Pending([Work(1), Work(ends_at, "Connection reset by peer")], is_lost=never).wait()


def test_what_was_forgotten_is_not_waited_for_once_the_group_is_lost() -> None:
    work, told = Work(None), iter([False, False, True])
    with pytest.raises(GroupLost, match="the generation is over"):
        Pending([work], is_lost=lambda: next(told)).wait()
    assert work.num_looks == 3


def test_what_does_not_end_by_the_deadline_says_what_it_was_and_who_is_missing(monkeypatch) -> None:
    monkeypatch.setattr(collectives, "DEADLINE_S", 0.0)
    recorder = FlightRecorder()
    recorder.step = 41
    record = recorder.begin("all-reduce", "w", (0, 1), 84, "bucket 3 of 8")
    pending = Pending([Work(None)], (), never, (record,), lambda: "rank 1 did not come")
    with pytest.raises(TookTooLong) as raised:
        (Pending() + pending).wait()
    told = str(raised.value)
    assert told.startswith("all-reduce (bucket 3 of 8, 84 bytes) of step 41, begun at test_what")
    assert "did not end within 0 s: rank 1 did not come. If a step may take that long" in told


def test_two_together_are_as_cautious_as_either() -> None:
    with pytest.raises(GroupLost):
        (Pending() + Pending([Work(None)], is_lost=lambda: True)).wait()
    with pytest.raises(GroupLost):
        (Pending([Work(None)], is_lost=lambda: True) + Pending()).wait()


def test_a_group_that_is_left_is_drained_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "DRAIN_S", 0.05)
    works = [Work(None), Work(1, "broken"), Work(1)]
    Pending(works, is_lost=never).drain(drain_deadline())
    assert all(work.num_looks for work in works)


def test_all_that_is_under_way_has_one_deadline() -> None:
    """A group may have hundreds of buckets under way, and others wait for who leaves it."""
    work = Work(None)
    Pending([work] * 3, is_lost=never).drain(0.0)
    assert work.waited == [timedelta(seconds=0.001)] * 3
