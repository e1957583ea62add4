"""What becomes of a trial whose process has ended. Pure.

A trial that made its last step is complete, if its value is a number. One that was pruned or
stopped is what it was asked for; by `shoal stop`, too, which pauses one trial of a study. The
recipe's own error, or input that cannot work, fails it, and the study goes on without it. Anything
else (a signal from outside, memory that ran out, a lost process) is not the settings' doing: the
trial is resumed from its checkpoint, a few times.
"""

import math
from typing import Literal, NamedTuple

import msgspec

from shoal.errors import RUN_AGAIN
from shoal.system.processes import describe_exit

MOST_LOSSES = 3  # of one trial's process, in this life of the study


class TrialEnd(msgspec.Struct, frozen=True):
    """How a trial's run ended, as its process wrote it down last."""

    exit_code: int
    cause: str = ""
    trace: str = ""  # of the recipe, if it failed
    steps: int = 0
    is_lost: bool = False  # a process of the run was lost, as memory or a signal from outside does


class TrialVerdict(NamedTuple):
    """What to tell the study, or to do: `resume` starts it again, `pause` leaves it for later."""

    what: Literal["complete", "pruned", "failed", "resume", "pause"]
    reason: str = ""


def judge(
    status: int,
    end: TrialEnd | None,
    value: float | None,
    *,
    is_pruned: bool,
    is_stopping: bool,
    num_losses: int,
) -> TrialVerdict:
    """`status` is the process's; `end` is None if it could not say how the run ended;
    `num_losses` counts how often the trial was lost, this time included."""
    if end is not None and end.exit_code == 0:
        if value is None or not math.isfinite(value):
            why = "nothing was measured" if value is None else f"its value is {value}"
            return TrialVerdict("failed", f"{why} after its last step")
        return TrialVerdict("complete")
    if is_pruned:
        return TrialVerdict("pruned")
    if is_stopping or (end is not None and end.exit_code == RUN_AGAIN and not end.is_lost):
        return TrialVerdict("pause")
    if end is not None and is_own_failure(end):
        return TrialVerdict("failed", end.cause or describe_exit(end.exit_code))
    if num_losses >= MOST_LOSSES:
        why = (end.cause if end else "") or f"its process {describe_exit(status)}"
        return TrialVerdict("failed", f"it was lost {num_losses} times: {why}")
    return TrialVerdict("resume", (end.cause if end else "") or describe_exit(status))


def is_own_failure(end: TrialEnd) -> bool:
    """Whether the settings or the recipe are the cause, so that trying again would be no use."""
    return 0 < end.exit_code < 128 and end.exit_code != RUN_AGAIN and not end.is_lost


def is_final(end: TrialEnd | None) -> bool:
    """Whether a trial that an earlier life of the study left need not be started again."""
    return end is not None and (end.exit_code == 0 or is_own_failure(end))
