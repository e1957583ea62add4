"""A run that gets no further is told of; one that was told to stop is ended."""

from shoal.elastic.progress import PAUSE_S, STOP_TIMES_LONGEST, ProgressMonitor, describe_hang
from shoal.plans.resize import RunSize


def test_nobody_is_ended_who_gets_something_done() -> None:
    progress = ProgressMonitor(2.0)
    progress.heard(0, step=3, work=10, now=0.0)
    assert progress.late_s(100.0) is None, "nobody asked"
    progress.stop_requested(100.0)
    for second in range(1, 9):
        progress.heard(0, step=3, work=10 + second, now=100.0 + second)
        progress.heard(1, step=3, work=10, now=100.0 + second)
        progress.stop_requested(100.0 + second)
        assert progress.late_s(101.5 + second) is None
    progress.heard(0, step=3, work=18, now=111.0)  # alive, and nothing more
    assert progress.late_s(111.0) == 3.0


def test_a_run_of_long_steps_is_given_longer() -> None:
    progress = ProgressMonitor()
    progress.heard(0, step=0, work=1, now=50.0)
    assert progress.patience_s == PAUSE_S, "what came before the first work is no pause"
    progress.heard(0, step=1, work=2, now=350.0)
    assert progress.patience_s == STOP_TIMES_LONGEST * 300.0
    progress.stop_requested(360.0)
    progress.heard(0, step=1, work=3, now=900.0)
    bound_s = STOP_TIMES_LONGEST * 300.0
    assert progress.patience_s == bound_s, "a hang does not lengthen its own bound"


def test_who_works_is_named_and_else_all_who_wait() -> None:
    size = RunSize(2, 1)
    told = describe_hang(size, [4, 5, 6], {6}, {5: "loop (model.py:7)"}, 60.0)
    assert "rank 1 at loop (model.py:7) did not finish its step" in told
    assert "rank 0" not in told and "server" not in told
    assert "rank 0, rank 1 waited for each other" in describe_hang(size, [4, 5, 6], {6}, {}, 60.0)


def test_a_standstill_is_told_after_a_while_and_then_at_doubling_times() -> None:
    progress = ProgressMonitor()
    progress.done(500.0)
    assert progress.standstill_s(574.0) is None
    assert progress.standstill_s(576.0) == 76.0
    assert progress.standstill_s(650.0) is None
    assert progress.standstill_s(652.0) == 152.0
    progress.heard(0, step=1, work=1, now=653.0)
    assert progress.standstill_s(800.0) is None  # since the longest pause was of 153 s
    assert progress.standstill_s(653.0 + 10 * 153.0) == 1530.0


def test_what_somebody_explained_is_not_told_again() -> None:
    progress = ProgressMonitor()
    progress.done(500.0)
    progress.explained(560.0)
    assert progress.standstill_s(619.0) is None
    assert progress.standstill_s(620.0) == 120.0
