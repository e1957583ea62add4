"""When a run that loses groups must end: it cannot get past a step, or a group does not form.

Pure.
"""

from shoal.formatting import plural
from shoal.plans.size import Size

MOST_FAILURES = 3
ECHO_S = 1.0  # within which a death is known that another rank took for an error of its own


def did_not_form(size: Size, missing: list[int], timeout_s: float) -> str:
    """What to tell of a group whose members did not all come, by the seats that are missing."""
    names = ", ".join(size.name_of(seat) for seat in missing)
    servers = f" and {plural(size.num_servers, 'server')}" if size.num_servers else ""
    return (
        f"the group of {plural(size.num_ranks, 'rank')}{servers} did not form within "
        f"{timeout_s:g} s: {names} did not come; --form-timeout gives them longer"
    )


class Failures:
    """`lost` and `formed` say how many there were without a step between them."""

    def __init__(self) -> None:
        self.last = ""  # why
        self._resumed_at = 0  # the step from which the newest group went on
        self._num_old = 0  # groups lost at that step
        self._num_new = 0  # groups lost since that one formed; at which step is not known yet
        self._counted = -2  # the generation of the last

    def lost(self, what: str, generation: int, since_s: float | None) -> int:
        """A generation's group is lost; ranks that die together, or nearly, are one failure."""
        again = self._num_new and since_s is not None and since_s < ECHO_S
        if again or self._counted == generation:
            return 0
        self._counted, self.last = generation, what
        self._num_new += 1
        return self._num_new

    def formed(self, step: int) -> int:
        """A new group says from which step it goes on, and so at which step the last was lost."""
        if step == self._resumed_at:
            self._num_new += self._num_old
        self._num_old, self._num_new, self._resumed_at = self._num_new, 0, step
        return self._num_old

    def forget(self) -> None:
        """Another training begins."""
        self._num_old = self._num_new = 0
