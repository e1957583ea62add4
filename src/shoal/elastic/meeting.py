"""The way from one size of a group to another: all meet after a step, then seats are dealt anew."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.plans.size import Size

Seats = list[int | None]


@dataclass
class Meeting:
    """What a generation was asked for, and who did it."""

    is_asked: bool = False  # ranks, to wait after a step
    is_parting: bool = False  # servers, to write down what each will hold
    members: set[int | None] = field(default_factory=set)
    since: float = 0.0  # when the first came
    step: int = -1  # after which the ranks wait

    def add(self, member: int, step: int, now: float) -> None:
        self.since = self.since if self.members else now
        self.step = max(self.step, step)  # a server has none of its own
        self.members.add(member)


def num_newcomers(before: Size, after: Size) -> int:
    return sum(max(0, new - old) for old, new in zip(before, after))


def deal_seats(seats: Seats, before: Size, after: Size, newcomers: Sequence[int]) -> Seats:
    """Ranks and servers keep their numbers; those with the highest leave. Pure."""
    coming, dealt = iter(newcomers), Seats()
    for old, count in zip((seats[: before.num_ranks], seats[before.num_ranks :]), after):
        dealt += [*old[:count], *(next(coming) for _ in range(count - len(old)))]
    return dealt
