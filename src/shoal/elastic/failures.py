"""When to end a run that loses its groups: it cannot complete a step, or a group does not form.

Pure. Read next: `membership.py`, which counts with it.
"""

from shoal.formatting import plural
from shoal.plans.resize import RunSize

MOST_FAILURES = 3
ECHO_S = 1.0  # from a rank's error that a peer's death caused to the news of that death


def describe_missing(size: RunSize, missing: list[int], timeout_s: float) -> str:
    """The cause of a group whose members did not all arrive, by the missing seats."""
    names = ", ".join(size.name_of(seat) for seat in missing)
    servers = f" and {plural(size.num_servers, 'server')}" if size.num_servers else ""
    return (
        f"the group of {plural(size.num_ranks, 'rank')}{servers} did not form within "
        f"{timeout_s:g} s: {names} did not come; --form-timeout gives them longer"
    )


def describe_want(what: str, size: RunSize, num_slots: int, waited_s: float) -> str:
    """The cause of a run that ends since the hosts that are left are too few."""
    return (
        f"{what}; no other host came within {waited_s:g} s, and those that are left have room for "
        f"{num_slots} of its {plural(size.num_ranks, 'rank')}, too few for this plan"
    )


class FailureCounter:
    """Counts groups lost without a completed step between them; `lost` and `formed` return it."""

    def __init__(self) -> None:
        self.last = ""  # why
        self._resumed_at = 0  # the step at which the newest group began
        self._num_old = 0  # groups lost at that step
        self._num_new = 0  # groups lost since that one formed, at a step not known yet
        self._counted = -2  # the generation of the last

    def lost(self, what: str, generation: int, since_s: float | None) -> int:
        """The group of a generation is lost; ranks that die within `ECHO_S` are one failure."""
        again = self._num_new and since_s is not None and since_s < ECHO_S
        if again or self._counted == generation:
            return 0
        self._counted, self.last = generation, what
        self._num_new += 1
        return self._num_new

    def formed(self, step: int) -> int:
        """A new group begins at `step`, and so the last one was lost there."""
        if step == self._resumed_at:
            self._num_new += self._num_old
        self._num_old, self._num_new, self._resumed_at = self._num_new, 0, step
        return self._num_old

    def reset(self) -> None:
        """Another training begins."""
        self._num_old = self._num_new = 0
