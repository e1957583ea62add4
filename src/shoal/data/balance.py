"""Slow replicas take less work: whole pieces move to the fast ones, and the result stays the same.

Every rank knows how long each replica was busy with a step, since that rides in the message that
commits it. From the median of the last few steps each decides alike, without another message. The
sum of the gradients is taken in one tree over the pieces, so who computes a piece does not show in
its bits. Pieces are the grain: with as many pieces as replicas there is nothing to move; with
`pieces=16` on 4 replicas, one that is five times slower takes 1 piece and the others 5 each.

Whoever keeps the others waiting all the same, because work cannot move, is named (`Pace`).

Not for plans whose bits depend on who does what (`sums=ring`, `zero=2`) or that must do equal work
(`zero=3`, `local_steps`). Cost: nothing until work moves, then a few milliseconds.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median, median_low
from typing import NamedTuple

from shoal.data.split import deal, shares
from shoal.plans.plan import Plan

_STEPS = 5  # whose median counts
_GAINS = {2: 0.5, _STEPS: 0.1}  # of a step's time to be won, after so many steps, or noise would do


_SLOW = 2.0  # times as long as usual in each of the last steps: named
_LEAST_S = 0.005  # of which others wait in a step; below that it may be the scheduler's doing


def can_balance(plan: Plan) -> bool:
    """Whether work can move between replicas without a trace in the result. Pure."""
    exact = plan.sums == "exact" and plan.zero < 2 and plan.local_steps == 1
    exact = exact and plan.sync == "allreduce"  # servers know workers by their pieces
    return exact and plan.num_pieces // plan.num_microbatches > plan.num_replicas > 1


class Move(NamedTuple):
    """Work that moves between replicas, and why."""

    before: list[int]  # rounds of each replica
    after: list[int]
    seconds: list[float]  # that each replica takes for a round, at the median


class Balance:
    """Pure: fed with the same seconds, every rank comes to the same counts."""

    def __init__(self, num_rounds: int, num_replicas: int):
        self.num_rounds = num_rounds
        self.counts = [len(own) for own in shares(num_rounds, num_replicas)]
        self._seen: deque[list[float]] = deque(maxlen=_STEPS)

    def observe(self, busy_s: Sequence[float]) -> Move | None:
        """Take in how long each replica was busy; say what moves, if work should."""
        self._seen.append([busy / count for busy, count in zip(busy_s, self.counts, strict=True)])
        gain = _GAINS.get(len(self._seen))
        if gain is None:
            return None
        seconds = [median(of_replica) for of_replica in zip(*self._seen, strict=True)]
        before, after = self.counts, deal(self.num_rounds, seconds)
        if _span(after, seconds) > _span(before, seconds) * (1 - gain):
            return None
        self.counts = after
        self._seen.clear()
        return Move(before, after, seconds)


class Pace:
    """Pure: tells of replicas that keep the others waiting, of each once."""

    def __init__(self) -> None:
        self._seen: deque[list[float]] = deque(maxlen=_STEPS)
        self._named: set[int] = set()

    def observe(self, busy_s: Sequence[float], counts: Sequence[int]) -> dict[int, float]:
        """Take in how long each replica was busy with its rounds; say who is slow, and how many
        times as long as usual it takes, if that is new."""
        usual_s, usual_count = median_low(busy_s), max(1, median_low(counts))
        # One's own in place of all: nobody waited for anybody. And most may have nothing to do.
        if len(set(busy_s)) == 1 or not usual_s:
            return {}
        self._seen.append(
            [
                busy / usual_s / max(1, count / usual_count) if busy > usual_s + _LEAST_S else 1.0
                for busy, count in zip(busy_s, counts, strict=True)
            ]
        )
        if len(self._seen) < _STEPS:
            return {}
        times = enumerate(zip(*self._seen, strict=True))
        slow = {r: round(median(of), 2) for r, of in times if min(of) > _SLOW}
        new = {r: of for r, of in slow.items() if r not in self._named}
        self._named.update(new)
        return new


def _span(counts: Sequence[int], seconds: Sequence[float]) -> float:
    return max(count * s for count, s in zip(counts, seconds, strict=True))
