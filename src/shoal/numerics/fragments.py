"""Streaming DiLoCo's fragments: which parameters are averaged together, and when. Pure.

Fragments are runs of neighbouring parameters of about equal bytes. With F of them and windows of H
steps, each is sent once in H steps, at even distances, and arrives H // F steps later, before the
next one is sent; so one is in flight at a time. A single fragment arrives at once.

Read next: `sync/outer.py`, which sends them.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple


def split_fragments(sizes: Sequence[int], num_fragments: int) -> list[range]:
    """Neighbours of about equal size in all, at least one in each fragment."""
    assert num_fragments <= max(1, len(sizes))
    ends, cuts = [0, *accumulate(sizes)], [0]
    for number in range(1, num_fragments):
        goal = ends[-1] * number / num_fragments
        possible = range(cuts[-1] + 1, len(sizes) - num_fragments + number + 1)
        cuts.append(min(possible, key=lambda cut: abs(ends[cut] - goal)))
    return [range(first, last) for first, last in pairwise([*cuts, len(sizes)])]


class FragmentSchedule(NamedTuple):
    """When fragments are sent and arrive. Steps count from 1; all have arrived after the last."""

    local_steps: int
    num_fragments: int
    num_steps: int

    @property
    def delay(self) -> int:
        """The number of steps for which a fragment is in flight."""
        return self.local_steps // self.num_fragments if self.num_fragments > 1 else 0

    def ends_window(self, step: int) -> bool:
        """Whether replicas agree on losses and requests in this step, and on buffers after it."""
        return step % self.local_steps == 0 or step == self.num_steps

    def are_replicas_equal(self, step: int) -> bool:
        """Whether weights are the same on all replicas after this step."""
        if self.num_fragments == 1:
            return self.ends_window(step)
        return step in (0, self.num_steps)

    def sent(self, step: int) -> int | None:
        """The fragment whose window ends with this step."""
        for number in range(self.num_fragments):
            at = (number + 1) * self.local_steps // self.num_fragments
            if (step - at) % self.local_steps == 0:
                return number
        return None

    def in_flight(self, step: int) -> tuple[int, int] | None:
        """The fragment that travels while the next step is computed, and when it was sent; if the
        step is not the run's last, after which none does."""
        for at in range(max(1, step - self.delay + 1), step + 1):
            number = self.sent(at)
            if number is not None:
                return number, at
        return None

    def speaks(self, step: int) -> bool | None:
        """Whether each rank sends something in this step; None if that depends on the sizes."""
        if self.ends_window(step):
            return True
        is_under_way = self.sent(step) is not None or self.in_flight(step - 1) is not None
        return None if is_under_way else False
