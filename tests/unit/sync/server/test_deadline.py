"""Rounds that close at a deadline, under any schedule: each window counts once, on all servers.

The world plays replicas that compute at any speed, stop, die and are replaced, a first server that
dies and goes on from its journal, and time. A window's mark is one bit of its own, so that nothing
that is lost or counted twice can hide in a sum.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.sync.server.deadline import DeadlineServer
from shoal.sync.server.journal import Journal
from shoal.sync.server.messages import (
    CheckRows,
    FromServer,
    JoinRound,
    MissingRows,
    Reply,
    RequestRefused,
    RoundClosed,
)
from shoal.sync.server.round_coordinator import Contribution, RoundCoordinator
from shoal.sync.server.shard import ServerShard, layout_of
from tests.unit.sync.server.played import (
    GENERATION,
    SECRET,
    Worker,
    make_model,
    make_optimizer,
    only,
    push_all,
    send,
    values,
)

NUM_WINDOWS = 4
DEADLINE_S = 1.0


def make_server(number: int, seats: int, journal: Journal | None = None) -> DeadlineServer:
    model = make_model()
    optimizer = make_optimizer(model)
    return DeadlineServer(
        ServerShard(model, optimizer, layout_of(model, optimizer, 2), number),
        None if number else RoundCoordinator(seats, DEADLINE_S),
        num_seats=seats,
        num_pieces=seats,
        bound=0,
        secret=SECRET,
        journal=journal,
    )


@dataclass
class Replica:
    """Goes through its windows; `phase` is what it does next."""

    worker: Worker
    window: int = 0
    phase: str = "compute"
    samples: int = 0
    mark: int = 0
    learnt: float = 0.0
    asked: dict[tuple[int, int], None] = field(default_factory=dict)  # not answered yet
    joined: RoundClosed | None = None


class World:
    def __init__(self, seed: int, seats: int, folder: Path):
        self.draws, self.seats, self.folder = random.Random(seed), seats, folder
        self.servers = [make_server(0, seats, self._journal()), make_server(1, seats)]
        self.replicas = [Replica(Worker(seat, self.servers[0])) for seat in range(seats)]
        self.generation, self.now = GENERATION, 0.0
        self.offered: dict[tuple[int, int], tuple[int, float]] = {}
        self.marks: dict[int, int] = {}  # told of whole rounds
        self.some_died = False
        self._form()

    def _journal(self) -> Journal:
        return Journal(self.folder / "0", SECRET)

    def _form(self) -> None:
        """All greet anew; whoever was agreeing on a window begins that again."""
        for server in self.servers:
            server.begin(self.generation)
        for replica in self.replicas:
            replica.worker.generation = self.generation
            replica.asked.clear()
            found = [
                only(send(server, replica.worker, replica.worker.hello()))
                for server in self.servers
            ]
            if replica.phase == "new":
                replica.window = min(welcome.next_batch for welcome in found)
                replica.phase = "done" if replica.window == NUM_WINDOWS else "compute"
            elif replica.phase not in ("compute", "done"):
                replica.phase = "push"

    def kill_server(self) -> None:
        self.servers[0] = make_server(0, self.seats, self._journal())
        self.generation += 1
        self._form()

    def kill_replica(self, seat: int) -> None:
        self.some_died = True
        self.replicas[seat] = Replica(Worker(seat, self.servers[0]), phase="new")
        self.generation += 1
        self._form()

    def tick(self, seconds: float) -> None:
        self.now += seconds
        for number, server in enumerate(self.servers):
            self._handle_one(number, server.tick(self.now))

    def _handle_one(self, number: int, answers: list[Reply]) -> None:
        for answer in answers:
            replica = next(r for r in self.replicas if r.worker.name == answer.to)
            message = answer.message
            if replica.asked.pop((number, message.request), "") == "":
                continue
            assert not isinstance(message, RequestRefused | MissingRows), message
            if isinstance(message, RoundClosed):
                replica.joined = message

    def _ask(self, replica: Replica, number: int, message: FromServer) -> None:
        replica.asked[number, message.request] = None
        self._handle_one(number, send(self.servers[number], replica.worker, message))

    def step(self, replica: Replica) -> None:
        """Do what is next, unless an answer is waited for."""
        if replica.asked or replica.phase == "done":
            return
        getattr(self, f"_{replica.phase}")(replica, replica.worker)

    def _compute(self, replica: Replica, worker: Worker) -> None:
        replica.samples += 1 + worker.seat + replica.window
        replica.mark += 1 << (worker.seat * NUM_WINDOWS + replica.window)
        replica.learnt += float(1 + worker.seat + 10 * replica.window)
        replica.phase = "push"

    def _push(self, replica: Replica, worker: Worker) -> None:
        for number, server in enumerate(self.servers):
            for key in server.shard.keys:
                rows = worker.rows(key, replica.learnt)
                self._handle_one(
                    number, send(server, worker, worker.push(key, replica.window), rows)
                )
        self._ask(replica, 1, worker.make(CheckRows, batch=replica.window, attempt=0))
        replica.phase = "join"

    def _join(self, replica: Replica, worker: Worker) -> None:
        self.offered[replica.window, worker.seat] = replica.samples, replica.learnt
        brought = {"num_samples": replica.samples, "mark": replica.mark}
        waits = replica.window == NUM_WINDOWS - 1
        what = {"batch": replica.window, "attempt": 0, "waits": waits}
        replica.phase = "hear"
        self._ask(replica, 0, worker.make(JoinRound, **what, **brought))

    def _hear_(self, replica: Replica) -> RoundClosed:
        assert replica.joined is not None
        return replica.joined

    def _apply(self, replica: Replica, worker: Worker) -> None:
        counts = self._hear_(replica).counts
        for number in (0, 1) if counts else ():
            self._ask(replica, number, worker.apply(replica.window, counts=counts))
        replica.phase = "pull"

    def _pull(self, replica: Replica, worker: Worker) -> None:
        replica.phase = "go_on"
        for number in (0, 1):
            self._ask(replica, number, worker.pull(replica.window + 1))

    def _go_on(self, replica: Replica, worker: Worker) -> None:
        joined = self._hear_(replica)
        if joined.is_in:
            if joined.mark is not None:
                self.marks[replica.window] = joined.mark
            replica.samples = replica.mark = 0
            replica.learnt = 0.0
        replica.window, replica.joined = replica.window + 1, None
        replica.phase = "done" if replica.window == NUM_WINDOWS else "compute"

    def hear(self, replica: Replica) -> None:
        replica.phase = "apply" if self._hear_(replica).is_in else "pull"

    def play(self, faults: int) -> None:
        for _ in range(600):
            if all(replica.phase == "done" for replica in self.replicas):
                return
            draw, seat = self.draws.random(), self.draws.randrange(self.seats)
            replica = self.replicas[seat]
            if draw < 0.02 and faults:
                faults -= 1
                self.kill_server() if self.draws.random() < 0.5 else self.kill_replica(seat)
            elif draw < 0.3:
                self.tick(self.draws.choice([0.1, 0.6, 2.0]))
            elif replica.phase == "hear":
                if not replica.asked:
                    self.hear(replica)
            else:
                self.step(replica)
        raise AssertionError([(r.window, r.phase, list(r.asked)) for r in self.replicas])


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), seats=st.integers(2, 4), faults=st.integers(0, 3))
def test_each_window_counts_once_and_on_all_servers_alike(
    seed: int, seats: int, faults: int
) -> None:
    with TemporaryDirectory() as folder:
        world = World(seed, seats, Path(folder))
        world.play(faults)
        rounds = world.servers[0].coordinator.rounds
        assert rounds.num_rounds == NUM_WINDOWS and rounds.last_in == [NUM_WINDOWS - 1] * seats
        assert [server.clock.committed for server in world.servers] == [NUM_WINDOWS] * 2
        if not world.some_died:  # or else a round's mark may have been told to the dead alone
            assert sum(world.marks.values()) == (1 << (seats * NUM_WINDOWS)) - 1
            for server in world.servers:
                found = values(server)
                assert torch.allclose(found, found[0].expand_as(found))
            assert values(world.servers[0])[0] == pytest.approx(float(values(world.servers[1])[0]))


def joined_by(seats: int, *entries: tuple[int, int]) -> RoundCoordinator:
    coordinator = RoundCoordinator(seats, DEADLINE_S)
    for seat, samples in entries:
        coordinator.join(0, seat, Contribution(samples, 1 << seat), waits=False)
    return coordinator


def test_a_round_closes_when_all_have_come_and_all_count_alike() -> None:
    rounds = joined_by(3, (0, 8), (1, 8), (2, 8)).close()
    assert rounds is not None and rounds.counts == [1.0, 1.0, 1.0]
    assert (rounds.mark, rounds.num_early, rounds.num_late) == (7, 0, [0, 0, 0])


def test_a_deadline_counts_from_the_first_and_weighs_by_samples() -> None:
    coordinator = joined_by(3, (0, 8), (2, 24))
    coordinator.tick(100.0)
    coordinator.tick(100.9)
    assert coordinator.close() is None
    coordinator.tick(101.0)
    rounds = coordinator.close()
    assert rounds is not None and rounds.counts == [0.75, 0.0, 2.25]
    assert (rounds.mark, rounds.num_early, rounds.num_late) == (None, 1, [0, 1, 0])
    coordinator.commit(rounds)
    late, in_time = coordinator.result(0, 1), coordinator.result(0, 2)
    assert late is not None and not late.is_in and in_time is not None and in_time.is_in
    assert [coordinator.next_of(seat) for seat in range(3)] == [1, 0, 1]


def test_nobody_has_come_so_no_time_passes() -> None:
    coordinator = RoundCoordinator(2, DEADLINE_S)
    coordinator.tick(5.0)
    coordinator.join(0, 1, Contribution(4, 1), waits=False)
    coordinator.tick(50.0)
    assert coordinator.close() is None


def test_where_all_meet_a_round_waits() -> None:
    coordinator = joined_by(2, (0, 8))
    coordinator.join(0, 0, Contribution(8, 1), waits=True)
    coordinator.tick(0.0)
    coordinator.tick(1000.0)
    assert coordinator.close() is None


@pytest.mark.parametrize(
    ("number", "samples", "words"), [(1, 8, "not open yet"), (0, 0, "one sample at least")]
)
def test_what_cannot_join(number: int, samples: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RoundCoordinator(2, DEADLINE_S).join(number, 0, Contribution(samples, 0), waits=False)


@pytest.mark.parametrize(
    ("counts", "words"),
    [([1.0], "counts came"), ([0.0, 0.0], "counts came"), ([-1.0, 3.0], "not those of a round")],
)
def test_counts_that_are_none_are_refused_and_change_nothing(
    counts: list[float], words: str
) -> None:
    server = make_server(0, 2)
    server.begin(GENERATION)
    worker = Worker(0, server)
    send(server, worker, worker.hello())
    push_all(server, worker, 0, 1.0)
    refused = only(send(server, worker, worker.apply(0, counts=counts)))
    assert isinstance(refused, RequestRefused) and words in refused.why
    assert not values(server).any()


def test_only_the_first_server_decides() -> None:
    server = make_server(1, 2)
    server.begin(GENERATION)
    worker = Worker(0, server)
    send(server, worker, worker.hello())
    push_all(server, worker, 0, 1.0)
    join = {"batch": 0, "attempt": 0, "num_samples": 4, "mark": 1, "waits": False}
    refused = only(send(server, worker, worker.make(JoinRound, **join)))
    assert isinstance(refused, RequestRefused) and "first server" in refused.why


def test_the_mean_is_weighted_by_samples() -> None:
    server = make_server(0, 3)
    server.begin(GENERATION)
    workers = [Worker(seat, server) for seat in range(3)]
    for worker in workers:
        send(server, worker, worker.hello())
    for worker, samples, learnt in ((workers[0], 10, 3.0), (workers[2], 30, 7.0)):
        push_all(server, worker, 0, learnt)
        join = {"batch": 0, "attempt": 0, "num_samples": samples, "mark": 1, "waits": False}
        assert not send(server, worker, worker.make(JoinRound, **join))
    server.tick(0.0)
    heard = server.tick(DEADLINE_S)
    assert {answer.to for answer in heard} == {workers[0].name, workers[2].name}
    counts = heard[0].message.counts
    send(server, workers[0], workers[0].apply(0, counts=counts))
    # Servers of local steps divide by the number of replicas.
    assert torch.allclose(values(server) / 3, torch.tensor((10 * 3.0 + 30 * 7.0) / 40))


def test_who_was_late_is_answered_as_soon_as_the_others_step() -> None:
    server = make_server(1, 2)
    server.begin(GENERATION)
    workers = [Worker(seat, server) for seat in range(2)]
    for worker in workers:
        send(server, worker, worker.hello())
    assert not send(server, workers[1], workers[1].pull(1))
    push_all(server, workers[0], 0, 1.0)
    answers = send(server, workers[0], workers[0].apply(0, counts=[2.0, 0.0]))
    assert {answer.to for answer in answers} == {worker.name for worker in workers}
