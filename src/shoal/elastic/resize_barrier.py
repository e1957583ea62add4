"""Resizing a group: all members wait after one step, then seats are assigned for the new size."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.plans.resize import RunSize

Seats = list[int | None]


@dataclass
class ResizeBarrier:
    """Which members of a generation were asked to wait, and which do."""

    is_requested: bool = False  # ranks were asked to wait after a step
    is_repartitioning: bool = False  # servers were asked to write their state
    members: set[int | None] = field(default_factory=set)
    since: float = 0.0  # when the first began to wait
    step: int = -1  # after which the ranks wait
    before: RunSize | None = None  # the size, once seats are assigned for another

    def add(self, member: int, step: int, now: float) -> None:
        self.since = self.since if self.members else now
        self.step = max(self.step, step)  # a server has none of its own
        self.members.add(member)


def assign_seats(seats: Seats, before: RunSize, after: RunSize, newcomers: Sequence[int]) -> Seats:
    """Ranks and servers keep their numbers; those with the highest leave. Pure."""
    coming, assigned = iter(newcomers), Seats()
    for old, count in zip((seats[: before.num_ranks], seats[before.num_ranks :]), after):
        assigned += [*old[:count], *(next(coming) for _ in range(count - len(old)))]
    return assigned


def keep_ranks(ranks: Sequence[int | None], count: int) -> list[int]:
    """Which ranks have the first `count` seats, once some are lost (None): those who are there
    stay, others fill the empty seats among them. Pure."""
    moving = iter([rank for rank in range(count, len(ranks)) if ranks[rank] is not None])
    return [rank if ranks[rank] is not None else next(moving, rank) for rank in range(count)]
