"""A run that was told to stop is ended once nobody gets anything done any more."""

from shoal.elastic.stopping import PAUSE_S, TIMES_LONGEST, Stopping, did_not_stop
from shoal.plan_size import Size


def test_nobody_is_ended_who_gets_something_done() -> None:
    stopping = Stopping(2.0)
    stopping.heard(0, step=3, work=10, now=0.0)
    assert stopping.late_s(100.0) is None, "nobody asked"
    stopping.asked(100.0)
    for second in range(1, 9):
        stopping.heard(0, step=3, work=10 + second, now=100.0 + second)
        stopping.heard(1, step=3, work=10, now=100.0 + second)
        stopping.asked(100.0 + second)
        assert stopping.late_s(101.5 + second) is None
    stopping.heard(0, step=3, work=18, now=111.0)  # alive, and nothing more
    assert stopping.late_s(111.0) == 3.0


def test_a_run_of_long_steps_is_given_longer() -> None:
    stopping = Stopping()
    stopping.heard(0, step=0, work=1, now=50.0)
    assert stopping.patience_s == PAUSE_S, "what came before the first work is no pause"
    stopping.heard(0, step=1, work=2, now=350.0)
    assert stopping.patience_s == TIMES_LONGEST * 300.0
    stopping.asked(360.0)
    stopping.heard(0, step=1, work=3, now=900.0)
    assert stopping.patience_s == TIMES_LONGEST * 300.0, "a hang does not lengthen its own bound"


def test_who_works_is_named_and_else_all_who_wait() -> None:
    size = Size(2, 1)
    told = did_not_stop(size, [4, 5, 6], {6}, {5: "loop (model.py:7)"}, 60.0)
    assert "rank 1 at loop (model.py:7) came to no end of its step" in told
    assert "rank 0" not in told and "server" not in told
    assert "rank 0, rank 1 waited for each other" in did_not_stop(size, [4, 5, 6], {6}, {}, 60.0)
