"""What becomes of a trial that ended: nothing is lost, nothing fails for another's fault."""

import math

import pytest

from shoal.tuning.verdicts import MOST_LOSSES, TrialEnd, TrialVerdict, is_final, judge


def judged(end: TrialEnd | None, value: float | None = 1.0, **given: object) -> TrialVerdict:
    usual = {"is_pruned": False, "is_stopping": False, "num_losses": 1}
    return judge(0 if end else -9, end, value, **{**usual, **given})  # type: ignore[arg-type]


def test_a_trial_that_made_its_last_step_is_complete() -> None:
    assert judged(TrialEnd(0)).what == "complete"
    assert judged(TrialEnd(0), is_pruned=True).what == "complete"
    assert judged(TrialEnd(0), is_stopping=True).what == "complete"


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_a_value_that_is_no_number_fails_it(value: float | None) -> None:
    assert judged(TrialEnd(0), value).what == "failed"


@pytest.mark.parametrize("end", [TrialEnd(1, "rank 0 failed"), TrialEnd(2, "batch_size=0")])
def test_its_own_failure_is_final(end: TrialEnd) -> None:
    assert judged(end) == TrialVerdict("failed", end.cause)
    assert is_final(end)


def test_a_trial_that_was_stopped_by_hand_is_paused() -> None:
    assert judged(TrialEnd(75)).what == "pause"
    assert judged(TrialEnd(75, "gone", is_lost=True)).what == "resume"
    assert not is_final(TrialEnd(75))


@pytest.mark.parametrize("end", [None, TrialEnd(143), TrialEnd(1, "gone", is_lost=True)])
def test_a_loss_is_resumed_a_few_times(end: TrialEnd | None) -> None:
    assert not is_final(end)
    for number in range(1, MOST_LOSSES):
        assert judged(end, num_losses=number).what == "resume"
    assert judged(end, num_losses=MOST_LOSSES).what == "failed"
    assert judged(end, is_stopping=True).what == "pause"
    assert judged(end, is_pruned=True).what == "pruned"
