"""A group that is asked to form and does not: who keeps the others waiting is named. Pure.

Who does not come at all is given up after a while (`membership.py`). Who came, and then loads a
checkpoint or takes over a state, may need long and is left alone; but nobody waits without a word.
"""

from collections.abc import Collection

from shoal.elastic.meeting import Seats
from shoal.plans.size import Size


class Forming:
    """Call `late` again and again; it tells once in a generation."""

    def __init__(self, patience_s: float):
        self._patience_s = patience_s
        self._generation, self._since, self._is_told = -1, 0.0, True

    def late(self, generation: int, seats: Seats, formed: Collection[int], now: float) -> list[int]:
        """The seats that are not done, when it is time to say so."""
        if generation != self._generation:
            self._generation, self._since, self._is_told = generation, now, False
        late = [seat for seat, member in enumerate(seats) if member not in formed]
        is_time = not self._is_told and now - self._since > self._patience_s
        self._is_told |= is_time or not late  # what works and breaks is another generation's
        return late if is_time else []


def still_forming(size: Size, late: list[int], patience_s: float) -> str:
    """What to tell of them."""
    names = ", ".join(size.name_of(seat) for seat in late)
    return (
        f"After {patience_s:g} s the group does not work yet. It waits for {names} to be done with "
        "a checkpoint or another's state; the log of each tells more."
    )
