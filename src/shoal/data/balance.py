"""Load balancing: slow replicas take less work. Whole pieces move; the result stays the same.

The message that commits a step says how long each replica was busy, so every rank knows it. From
the median of the last few steps each rank decides alike, without another message. The sum of the
gradients is taken in one tree over the pieces, so the rank that computes a piece does not show in
its bits. The unit is a piece: with as many pieces as replicas there is nothing to move; with
`pieces=16` on 4 replicas, one that is five times slower takes 1 piece and the others 5 each.

A replica that still keeps the others waiting, because work cannot move, is reported
(`StragglerDetector`).

Not for plans whose bits depend on who does what (`sums=ring`, `zero=2`) or that must do equal work
(`zero=3`, `local_steps`). Cost: nothing until work moves, then a few milliseconds.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median, median_low
from typing import NamedTuple

from shoal.data.split import apportion_pieces, shares
from shoal.plans.plan import Plan

_STEPS = 5  # whose median counts
_GAINS = {2: 0.5, _STEPS: 0.1}  # of a step's time to be won, after so many steps, or noise would do


_SLOW = 2.0  # times as long as usual in each of the last steps: named
_LEAST_S = 0.005  # of which others wait in a step; below that it may be the scheduler's doing


def can_balance(plan: Plan) -> bool:
    """Whether work can move between replicas without a trace in the result. Pure."""
    exact = plan.sums == "exact" and plan.zero < 2 and plan.local_steps == 1
    exact = exact and plan.sync == "allreduce"  # servers know workers by their pieces
    exact = exact and plan.codec == "none"  # each packs the sum of its own pieces
    return exact and plan.num_pieces // plan.num_microbatches > plan.num_replicas > 1


class Rebalance(NamedTuple):
    """Work that moves between replicas, and why."""

    before: list[int]  # rounds of each replica
    after: list[int]
    seconds: list[float]  # that each replica takes for a round, at the median


class LoadBalancer:
    """Pure: fed with the same seconds, every rank comes to the same counts."""

    def __init__(self, num_rounds: int, num_replicas: int):
        self.num_rounds = num_rounds
        self.counts = [len(own) for own in shares(num_rounds, num_replicas)]
        self._seen: deque[list[float]] = deque(maxlen=_STEPS)

    def observe(self, busy_s: Sequence[float]) -> Rebalance | None:
        """Take in how long each replica was busy; say what moves, if work should."""
        self._seen.append([busy / count for busy, count in zip(busy_s, self.counts, strict=True)])
        gain = _GAINS.get(len(self._seen))
        if gain is None:
            return None
        seconds = [median(of_replica) for of_replica in zip(*self._seen, strict=True)]
        before, after = self.counts, apportion_pieces(self.num_rounds, seconds)
        if _span(after, seconds) > _span(before, seconds) * (1 - gain):
            return None
        self.counts = after
        self._seen.clear()
        return Rebalance(before, after, seconds)


class StragglerDetector:
    """Pure: reports each replica that keeps the others waiting, once."""

    def __init__(self) -> None:
        self._seen: deque[list[float]] = deque(maxlen=_STEPS)
        self._named: set[int] = set()

    def observe(self, busy_s: Sequence[float], counts: Sequence[int]) -> dict[int, float]:
        """Take in how long each replica was busy with its rounds; return the slow ones that were
        not reported before, and how many times as long as usual each takes."""
        usual_s, usual_count = median_low(busy_s), max(1, median_low(counts))
        # All equal: no replica waited for another. And most may have nothing to do.
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
