"""Each update once, over a wire that loses, doubles, delays and mixes up, with servers that die.

Gradients are whole numbers and the optimizer is plain SGD with rate 1, so what the parameters must
be at the end is an exact sum. Servers are real, and a successor knows what its journal tells.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.sync.server import journal as module
from shoal.sync.server.journal import Journal
from shoal.sync.server.messages import (
    MissingRows,
    PulledParameters,
    RequestRefused,
    ServerWelcome,
    Summed,
)
from shoal.sync.server.server import Server
from tests.unit.sync.server.played import GENERATION, Worker, make_server, send, values

NUM_WORKERS, NUM_SERVERS, NUM_PIECES = 3, 2, 5


def gradient(seat: int, batch: int) -> int:
    return (seat + 1) * (batch % 5 + 1)


@dataclass
class Player:
    """A worker at one of its batches: a generator that yields the questions it waits for."""

    worker: Worker
    batch: int = 0
    work: Iterator[Any] = field(default_factory=lambda: iter(()))
    asked: dict[int, Any] = field(default_factory=dict)  # by server: what has no answer yet
    is_done: bool = False


class World:
    def __init__(self, directory: Path, bound: int | None, num_batches: int, seed: int):
        self.draws, self.directory = random.Random(seed), directory
        self.bound, self.num_batches, self.generation = bound, num_batches, GENERATION
        self.votes = seed % 2 == 0  # before a step, as where norms are wanted
        self.servers = [self.start(number) for number in range(NUM_SERVERS)]
        self.wire: list[tuple[int, Worker, Any, list[Tensor]]] = []  # to a server
        self.back: list[tuple[int, bytes, Any]] = []  # to a worker
        self.counts = {"push": 0, "apply": 0, "lost": 0, "doubled": 0, "killed": 0}
        self.players = [Player(Worker(seat, self.servers[0])) for seat in range(NUM_WORKERS)]
        for player in self.players:
            self.greet(player)

    def start(self, number: int) -> Server:
        return make_server(
            number,
            NUM_SERVERS,
            seats=NUM_WORKERS,
            pieces=NUM_PIECES,
            bound=self.bound,
            journal=Journal(self.directory / str(number), "life"),
        )

    # ---- workers

    def greet(self, player: Player) -> None:
        worker = player.worker
        worker.generation = self.generation
        worker.name = b"%d.%d" % (worker.seat, self.generation)
        player.work, player.asked = self.train(player), {}
        next(player.work)

    def train(self, player: Player) -> Iterator[None]:
        """What `strategy.py` does, each `yield` being a wait for all answers."""
        worker = player.worker
        yield from self.ask(player, worker.hello)
        while player.batch < self.num_batches:
            batch = player.batch
            for server in range(NUM_SERVERS):
                self.push(player, server, self.servers[server].shard.keys)
            if self.bound == 0 and self.votes:
                yield from self.ask(player, partial(worker.sum, batch))
            yield from self.ask(player, partial(worker.apply, batch))
            player.batch += 1
        player.is_done = True
        yield

    def ask(self, player: Player, make: Any) -> Iterator[None]:
        for server in range(NUM_SERVERS):
            player.asked[server] = make()
            self.send(server, player.worker, player.asked[server])
        while player.asked:
            yield

    def push(self, player: Player, server: int, keys: list[int]) -> None:
        worker, value = player.worker, gradient(player.worker.seat, player.batch)
        for key in keys:
            self.counts["push"] += 1
            self.send(server, worker, worker.push(key, player.batch), worker.rows(key, value))

    def ask_again(self) -> None:
        for player in self.players:
            for server, message in player.asked.items():
                self.send(server, player.worker, message)

    # ---- the wire

    def send(
        self, server: int, worker: Worker, message: Any, payload: list[Tensor] | None = None
    ) -> None:
        for _ in range(self.num_times()):
            self.wire.append((server, worker, message, payload or []))

    def num_times(self) -> int:
        drawn = self.draws.random()
        self.counts["lost"] += drawn < 0.05
        self.counts["doubled"] += drawn > 0.95
        return 0 if drawn < 0.05 else 2 if drawn > 0.95 else 1

    def turn(self) -> None:
        """Something happens: mostly a message that has waited long, at times any other."""
        if (not self.wire and not self.back) or self.draws.random() < 0.01:
            self.ask_again()
        if self.wire and (not self.back or self.draws.random() < 0.5):
            self.deliver(*self.wire.pop(self.pick(len(self.wire))))
        elif self.back:
            self.answer(*self.back.pop(self.pick(len(self.back))))

    def pick(self, length: int) -> int:
        return 0 if self.draws.random() < 0.8 else self.draws.randrange(length)

    def deliver(self, number: int, worker: Worker, message: Any, payload: list[Tensor]) -> None:
        server = self.servers[number]
        before = server.clock.to_plain()
        for answer in send(server, worker, message, payload):
            if isinstance(answer.message, RequestRefused) and not answer.message.is_stale:
                assert answer.message.request not in self.waiting(answer.to), answer.message.why
            if message.generation != self.generation:
                assert server.clock.to_plain() == before
            for _ in range(self.num_times()):
                self.back.append((number, answer.to, answer.message))
        self.counts["apply"] += server.clock.to_plain() != before

    def waiting(self, name: bytes) -> set[int]:
        found = [p for p in self.players if p.worker.name == name]
        return {message.request for p in found for message in p.asked.values()}

    def answer(self, number: int, name: bytes, message: Any) -> None:
        for player in self.players:
            asked = player.asked.get(number)
            if player.worker.name != name or asked is None or asked.request != message.request:
                continue
            if isinstance(message, MissingRows):
                self.push(player, number, message.keys)
                self.send(number, player.worker, asked)
                return
            assert isinstance(message, ServerWelcome | Summed | PulledParameters), message
            if isinstance(message, PulledParameters) and self.bound is not None:
                assert asked.batch + 1 - message.committed <= self.bound
            del player.asked[number]
            if not player.asked:
                next(player.work)

    def kill(self) -> None:
        """A server dies; all greet its successor and the others anew, in a new generation."""
        number = self.draws.randrange(NUM_SERVERS)
        self.counts["killed"] += 1
        self.servers[number] = self.start(number)
        self.generation += 1
        for server in self.servers:
            server.begin(self.generation)
        for player in self.players:
            if not player.is_done:
                self.greet(player)


def check(tmp_path: Path, monkeypatch, bound: int | None, num_batches: int) -> None:
    monkeypatch.setattr(module, "LEAST_BYTES", 5_000)  # snapshots come often
    seed = random.randrange(1_000_000)
    print(f"seed {seed}")
    world = World(tmp_path, bound, num_batches, seed)
    while not all(player.is_done for player in world.players):
        if world.draws.random() < 0.002:
            world.kill()
        world.turn()
    total = sum(gradient(s, b) for s in range(NUM_WORKERS) for b in range(num_batches))
    for number, server in enumerate(world.servers):
        successor = world.start(number)
        assert torch.equal(values(server), torch.full_like(values(server), float(total)))
        assert torch.equal(values(successor), values(server))
        assert server.clock.committed == num_batches
    assert min(world.counts.values()) > 0, f"too kind a world: {world.counts}"
    num_updates = num_batches * NUM_SERVERS * (1 if bound == 0 else NUM_WORKERS)
    assert world.counts["apply"] == num_updates
    print(world.counts)


@pytest.mark.parametrize("bound", [0, 2, None])
def test_each_update_once(tmp_path: Path, monkeypatch, bound: int | None) -> None:
    check(tmp_path, monkeypatch, bound, 150)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("bound", [0, 2, None])
def test_each_of_a_hundred_thousand_updates_once(tmp_path, monkeypatch, bound) -> None:
    check(tmp_path, monkeypatch, bound, 12_500 if bound == 0 else 8_400)
