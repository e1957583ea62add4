"""Which replicas are in a round that closes at a deadline. Pure.

A round is what servers make of one window of local steps. It closes when all replicas have joined,
or when the deadline has passed since the first of them did: then with the replicas that joined,
each weighted by its samples. A later replica gets the reply that it is not in the round, and brings
its progress to the round of its next window, with the samples of all windows since it was in one.
At a save, an evaluation, the end or a stop a round waits for all.

One server has a coordinator. It reads no clock: `tick` is given the time. Its decision is a small
record that is written to the journal before any worker gets it. Read next: `deadline.py`.
"""

from typing import NamedTuple

import msgspec

from shoal.data.ledger import add_marks


class ClosedRounds(msgspec.Struct, frozen=True):
    """What was decided so far. Rounds and seats count from 0."""

    num_rounds: int  # that are closed
    last_in: list[int]  # by seat, the last round that it was in; -1 before the first
    counts: list[float]  # by seat, how much it counts in the last round: 1 each if all count alike
    mark: int | None  # of all samples since the last round that all were in, if the last one is
    marks: int  # of what was brought since then
    num_early: int  # rounds that closed before all had come
    num_late: list[int]  # by seat, of those that it was not in


def first_rounds(num_seats: int, num_rounds: int = 0) -> ClosedRounds:
    return ClosedRounds(num_rounds, [num_rounds - 1] * num_seats, [], None, 0, 0, [0] * num_seats)


class Contribution(NamedTuple):
    """What a replica joins a round with."""

    num_samples: int
    mark: int


class RoundResult(NamedTuple):
    """Whether a replica is in a round that is closed, and what the others need to step on it: no
    `counts` if they have long done so."""

    is_in: bool
    counts: list[float]
    mark: int | None


class RoundCoordinator:
    def __init__(self, num_seats: int, deadline_s: float):
        self.deadline_s, self.rounds = deadline_s, first_rounds(num_seats)
        self.begin()

    def begin(self) -> None:
        """Replicas that had joined an open round join it again."""
        self._joined: dict[int, Contribution] = {}
        self._waits = False
        self._opened_at: float | None = None  # the first is known to have joined
        self._is_overdue = False

    def join(self, number: int, seat: int, contribution: Contribution, waits: bool) -> None:
        """`waits`: all are to be in this round, however late."""
        if number > self.rounds.num_rounds:
            raise ValueError(f"round {number} is not open yet, but {self.rounds.num_rounds} is")
        if contribution.num_samples < 1:
            raise ValueError("a replica joins a round with one sample at least")
        if number == self.rounds.num_rounds:
            self._joined[seat] = contribution
            self._waits |= waits

    def tick(self, now: float) -> None:
        if not self._joined:
            return
        if self._opened_at is None:
            self._opened_at = now
        self._is_overdue = now - self._opened_at >= self.deadline_s

    def close(self) -> ClosedRounds | None:
        """What is known once the open round is closed, if it is time to; `commit` makes it so."""
        before, joined = self.rounds, self._joined
        seats = range(len(before.last_in))
        is_whole = len(joined) == len(seats)
        if not is_whole and (self._waits or not self._is_overdue or not joined):
            return None
        number, total = before.num_rounds, sum(own.num_samples for own in joined.values())
        counts = [
            len(seats) * joined[seat].num_samples / total if seat in joined else 0.0
            for seat in seats
        ]
        last_in = [number if seat in joined else before.last_in[seat] for seat in seats]
        marks = add_marks([before.marks, *(own.mark for own in joined.values())])
        return ClosedRounds(
            number + 1,
            last_in,
            counts,
            marks if is_whole else None,
            0 if is_whole else marks,
            before.num_early + (not is_whole),
            [late + (seat not in joined) for seat, late in zip(seats, before.num_late)],
        )

    def commit(self, rounds: ClosedRounds) -> None:
        self.rounds = rounds
        self.begin()

    def result(self, number: int, seat: int) -> RoundResult | None:
        """None while the round is open. Those who are in one may hear of it late, but not after the
        next round that they are in."""
        rounds = self.rounds
        if number >= rounds.num_rounds:
            return None
        is_last = number == rounds.num_rounds - 1
        is_in = rounds.last_in[seat] == number
        return RoundResult(
            is_in, rounds.counts if is_last else [], rounds.mark if is_last else None
        )

    def next_of(self, seat: int) -> int:
        """The first window without a contribution of this seat."""
        return self.rounds.last_in[seat] + 1
