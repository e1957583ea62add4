"""The clock under any schedule: nobody too far ahead, each piece once, always somebody to go on.

The machine plays workers that begin, push, die, are replaced and doubled, over a wire that keeps no
order. Its own count of what was applied, piece by piece, is what the clock is held against.
"""

from collections import Counter
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shoal.data.split import share
from shoal.sync.server.clock import Clock, ClockRecord, Staleness

NUM_BATCHES = 6
PICK = st.integers(0, 99)


def missing_of(clock: Clock, batch: int) -> list[range]:
    """The runs of pieces of a batch that a clock's record does not have."""
    record = clock.to_plain()
    if batch < record.committed:
        return []
    runs = [(first, end) for own, first, end in record.applied if own == batch]
    ends = [0, *(end for _, end in runs)]
    starts = [*(first for first, _ in runs), record.num_pieces]
    return [range(a, b) for a, b in zip(ends, starts, strict=True) if a < b]


@dataclass
class Worker:
    seat: int
    batch: int  # the next of its own
    hand: list[tuple[int, range]] = field(default_factory=list)  # begun and not pushed
    extra: list[tuple[int, range]] = field(default_factory=list)  # of the dead, not begun


class Schedules(RuleBasedStateMachine):
    """A run of NUM_BATCHES batches; what a rule cannot do at the moment, it leaves."""

    @initialize(
        num_pieces=st.integers(1, 7),
        num_seats=st.integers(1, 4),
        bound=st.none() | st.integers(0, 3),
    )
    def start(self, num_pieces: int, num_seats: int, bound: int | None) -> None:
        self.num_pieces, self.bound = num_pieces, bound
        self.clock = Clock(num_pieces, bound)
        self.seats_from = [(0, num_seats)]  # from a batch on, there are so many seats
        self.workers = [Worker(seat, 0) for seat in range(num_seats)]
        self.wire: list[tuple[int, range]] = []
        self.applied: Counter[tuple[int, int]] = Counter()
        self.furthest = -1  # batch that anybody began

    # ---- the world

    def pieces_of(self, seat: int, batch: int) -> range:
        num_seats = [count for first, count in self.seats_from if first <= batch][-1]
        return share(seat, num_seats, self.num_pieces) if seat < num_seats else range(0)

    def committed(self) -> int:
        batch = 0
        while all(self.applied[batch, piece] for piece in range(self.num_pieces)):
            batch += 1
        return batch

    def missing(self, batch: int, pieces: range) -> list[range]:
        """What is not applied of some pieces, as the clock says it."""
        runs = [
            range(max(run.start, pieces.start), min(run.stop, pieces.stop))
            for run in missing_of(self.clock, batch)
        ]
        return [run for run in runs if run]

    def empty_seats(self) -> list[int]:
        taken = {worker.seat for worker in self.workers}
        return [s for s in range(max(c for _, c in self.seats_from)) if s not in taken]

    def begin_one(self, worker: Worker) -> bool:
        """Take up the earliest of what it has to do, if it may: else two could wait for each other.

        Its own next batch comes after what it was dealt of the same one.
        """
        last = self.seats_from[-1][0]
        while worker.batch < last and not self.pieces_of(worker.seat, worker.batch):
            worker.batch += 1
        own = [(worker.batch, self.pieces_of(worker.seat, worker.batch))]
        work = worker.extra + [run for run in own if run[1]]
        batch, pieces = min(work, key=lambda run: run[0], default=(NUM_BATCHES, range(0)))
        if worker.hand or batch >= NUM_BATCHES or not self.clock.may_begin(batch):
            return False
        assert self.bound is None or batch - self.committed() <= self.bound
        if self.bound == 0:
            assert all(self.applied[b, p] for b in range(batch) for p in range(self.num_pieces))
        if (batch, pieces) in worker.extra:
            worker.extra.remove((batch, pieces))
        else:
            worker.batch += 1
        self.furthest = max(self.furthest, batch)
        worker.hand = [(batch, run) for run in self.missing(batch, pieces)]
        return True

    def arrive(self, batch: int, pieces: range) -> None:
        """One message reaches the server; if it is refused, its sender does what is missing."""
        done = [self.applied[batch, piece] for piece in pieces]
        if any(done) and not all(done):
            with pytest.raises(ValueError, match="missing"):
                self.clock.apply(batch, pieces)
            self.wire += [(batch, run) for run in self.missing(batch, pieces)]
            return
        is_new = self.clock.is_new(batch, pieces)
        assert self.clock.apply(batch, pieces) == is_new == (not any(done))
        if is_new:
            self.applied.update((batch, piece) for piece in pieces)

    # ---- what may happen

    @precondition(lambda self: self.workers)
    @rule(pick=PICK)
    def begin(self, pick: int) -> None:
        self.begin_one(self.workers[pick % len(self.workers)])

    @precondition(lambda self: self.workers)
    @rule(pick=PICK)
    def push(self, pick: int) -> None:
        worker = self.workers[pick % len(self.workers)]
        self.wire += worker.hand
        worker.hand = []

    @precondition(lambda self: self.wire)
    @rule(pick=PICK, comes_again=st.booleans())
    def deliver(self, pick: int, comes_again: bool) -> None:
        message = self.wire[pick % len(self.wire)]
        if not comes_again:
            self.wire.remove(message)
        self.arrive(*message)

    @precondition(lambda self: self.workers)
    @rule(pick=PICK, pushed=st.integers(0, 2))
    def die(self, pick: int, pushed: int) -> None:
        """With some of what it had begun on the wire, or none; the rest is nobody's."""
        worker = self.workers.pop(pick % len(self.workers))
        self.wire += worker.hand[:pushed]

    @precondition(lambda self: self.empty_seats())
    @rule(pick=PICK)
    def replace(self, pick: int) -> None:
        seats = self.empty_seats()
        self.join(seats[pick % len(seats)])

    def join(self, seat: int) -> None:
        batch = self.clock.next_of(lambda b: self.pieces_of(seat, b))
        behind = range(self.committed(), batch)
        assert not any(self.missing(b, self.pieces_of(seat, b)) for b in behind)
        self.workers.append(Worker(seat, batch))

    @precondition(lambda self: self.workers and self.empty_seats())
    @rule(pick=PICK, ahead=st.integers(0, 2))
    def deal_again(self, pick: int, ahead: int) -> None:
        """What an empty seat has not done of a batch, to whoever lives."""
        seats, batch = self.empty_seats(), self.clock.committed + ahead
        pieces = self.pieces_of(seats[pick % len(seats)], batch)
        if batch < NUM_BATCHES:
            worker = self.workers[pick % len(self.workers)]
            worker.extra += [(batch, run) for run in self.missing(batch, pieces)]

    @rule(num_seats=st.integers(1, 4))
    def reseat(self, num_seats: int) -> None:
        """Workers join or leave, from the first batch on that nobody has begun."""
        self.seats_from.append((max(self.furthest + 1, self.seats_from[-1][0]), num_seats))

    @rule()
    def restart(self) -> None:
        """The server goes on from its log."""
        data = msgspec.msgpack.encode(self.clock.to_plain())
        self.clock = Clock.from_plain(msgspec.msgpack.decode(data, type=ClockRecord))

    # ---- what must hold

    @invariant()
    def counts_what_was_applied(self) -> None:
        assert self.clock.committed == self.committed()
        assert max(self.applied.values(), default=1) == 1
        for batch in range(NUM_BATCHES):
            missing = [piece for run in missing_of(self.clock, batch) for piece in run]
            assert missing == [p for p in range(self.num_pieces) if not self.applied[batch, p]]
        record = self.clock.to_plain()
        assert all(batch >= record.committed for batch, _, _ in record.applied)
        assert len({batch for batch, _, _ in record.applied}) <= self.furthest + 1

    def teardown(self) -> None:
        """All run on, with every seat taken: it ends, and until then somebody can do something."""
        if not hasattr(self, "clock"):
            return
        for seat in self.empty_seats():
            self.join(seat)
        while self.committed() < NUM_BATCHES:
            can_go_on = bool(self.wire) or any(w.hand for w in self.workers)
            for worker in self.workers:
                can_go_on |= self.begin_one(worker)
                self.wire += worker.hand
                worker.hand = []
            assert can_go_on, "nobody may begin, and the run is not done"
            while self.wire:
                self.arrive(*self.wire.pop())
        self.counts_what_was_applied()
        assert not self.clock.to_plain().applied


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(stateful_step_count=60)


@given(st.integers(2, 6), st.integers(1, 40))
def test_without_a_bound_a_slow_worker_holds_up_nobody(num_workers: int, num_batches: int) -> None:
    clock, seen = Clock(num_workers, None), Staleness()
    for batch in range(num_batches):
        for seat in range(1, num_workers):  # the first has begun batch 0 and is at it still
            assert clock.may_begin(batch)
            seen.add(batch - clock.committed)
            assert clock.apply(batch, range(seat, seat + 1))
    assert clock.committed == 0
    assert seen.largest == num_batches - 1 and seen.count == num_batches * (num_workers - 1)
    for batch in range(num_batches):
        clock.apply(batch, range(1))
    assert clock.committed == num_batches


@given(st.integers(0, 5), st.integers(0, 5))
def test_with_a_bound_the_others_wait_at_it_for_the_slow_one(bound: int, committed: int) -> None:
    clock = Clock(2, bound, committed)
    batch = committed
    while clock.may_begin(batch):
        clock.apply(batch, range(1))
        batch += 1
    assert batch == committed + bound + 1
    clock.apply(committed, range(1, 2))
    assert clock.may_begin(batch) and not clock.may_begin(batch + 1)


def test_what_is_committed_is_forgotten_and_still_known() -> None:
    clock = Clock(4, 1)
    for batch in range(1000):
        assert clock.apply(batch, range(4))
    assert clock.to_plain() == ClockRecord(4, 1, 1000, [])
    assert not clock.apply(3, range(2)) and missing_of(clock, 3) == []


def test_a_push_of_which_a_part_was_dealt_again_is_refused_whole() -> None:
    clock = Clock(6, 0)
    clock.apply(0, range(2, 4))
    before = clock.to_plain()
    with pytest.raises(ValueError, match="Push those that are missing"):
        clock.apply(0, range(3))
    assert clock.to_plain() == before and missing_of(clock, 0) == [range(2), range(4, 6)]


@pytest.mark.parametrize(
    ("batch", "pieces"),
    [(0, range(3, 5)), (0, range(-1, 1)), (0, range(0)), (0, range(0, 4, 2)), (-1, range(1))],
)
def test_what_is_no_run_of_pieces_is_refused(batch: int, pieces: range) -> None:
    clock = Clock(4, 0)
    for ask in (clock.is_new, clock.apply):
        with pytest.raises(ValueError, match="run of neighbours among 0 to 3"):
            ask(batch, pieces)


@pytest.mark.parametrize("wrong", [(0, 0, 0), (1, -1, 0), (1, None, -1)])
def test_a_clock_that_cannot_be_is_refused(wrong: tuple[int, int | None, int]) -> None:
    with pytest.raises(ValueError, match="at least 1 piece"):
        Clock(*wrong)


def test_a_newcomer_begins_at_the_first_batch_its_seat_has_not_done() -> None:
    clock = Clock(4, None)
    for batch in range(5):
        clock.apply(batch, range(2))
    clock.apply(0, range(2, 4))
    assert clock.committed == 1
    assert clock.next_of(lambda batch: range(2)) == 5
    assert clock.next_of(lambda batch: range(2, 4)) == 1
    assert clock.next_of(lambda batch: range(2) if batch < 3 else range(1, 3)) == 3
    assert clock.next_of(lambda batch: range(0)) == 5, "a seat without pieces has nothing to do"
    assert Clock(4, None, 7).next_of(lambda batch: range(2)) == 7


@given(st.lists(st.integers(0, 9)), st.lists(st.integers(0, 9)))
def test_staleness_is_counted_by_value(left: list[int], right: list[int]) -> None:
    one, other = Staleness(), Staleness()
    for value in left:
        one.add(value)
    for value in right:
        other.add(value)
    one.merge(Staleness(other.histogram))
    both = left + right
    assert one.summary() == {
        "count": len(both),
        "mean": sum(both) / len(both) if both else 0.0,
        "largest": max(both, default=0),
        "histogram": dict(sorted(Counter(both).items())),
    }
