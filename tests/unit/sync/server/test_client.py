"""Workers and servers over sockets, with a relay between them that is as bad as a network can be.

What is lost is asked for again, what is damaged is not used, and each update is made once.
"""

import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from torch import Tensor

from shoal.comm.mesh import Servers
from shoal.comm.wire import connect, pack, tensor_of, unpack
from shoal.errors import GroupLost
from shoal.sync.server import client as module
from shoal.sync.server.client import NotServed, ServerClient
from shoal.sync.server.loop import TICK_MS
from shoal.sync.server.messages import (
    Apply,
    DumpState,
    LoadState,
    MissingRows,
    Pull,
    PulledParameters,
    Push,
    RequestRefused,
    Sum,
    WorkerHello,
)
from shoal.sync.server.server import Server
from tests.support.relay import Message, Relay
from tests.unit.sync.server.played import GENERATION, SECRET, Worker, make_server, opened, values

NUM_BATCHES = 8


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AGAIN_S", 0.03)
    monkeypatch.setattr(module, "TICK_MS", 5)


@contextmanager
def called(address: str, seat: int = 0, generation: int = GENERATION, **other: Any):
    told = {"secret": SECRET, "is_lost": lambda: False} | other
    line = ServerClient(Servers((address,), generation, **told), seat)
    try:
        yield line
    finally:
        line.close()


class Caller:
    """A worker that trains over a line as `strategy.py` does."""

    def __init__(self, line: ServerClient, server: Server, seat: int = 0):
        self.line, self.plays, self.keys = line, Worker(seat, server), server.shard.keys

    def ask(self, kind: Any, message: Any) -> Any:
        """The message's content, under the client's number; until it is not `MissingRows`."""
        what = {
            name: getattr(message, name)
            for name in message.__struct_fields__
            if name not in ("generation", "request")
        }
        while True:
            answer, frames = self.line.answer(self.line.ask(0, kind, **what))
            if not isinstance(answer, MissingRows):
                return answer, frames
            self.push(message.batch, answer.keys)

    def push(self, batch: int, keys: list[int]) -> None:
        for key in keys:
            self.line.send(
                0,
                Push,
                self.plays.rows(key, batch + 1),
                batch=batch,
                attempt=0,
                key=key,
                blocks=self.plays.blocks,
                touched=self.plays.push(key, batch).touched,
                is_shared=False,
            )

    def greet(self) -> None:
        self.ask(WorkerHello, self.plays.hello())

    def train(self, batches: range) -> Tensor:
        """The values of the key that a forward uses first, as they came back at the end."""
        for batch in batches:
            self.push(batch, self.keys)
            self.ask(Sum, self.plays.sum(batch))
            given, frames = self.ask(Apply, self.plays.apply(batch))
            assert isinstance(given, PulledParameters) and given.committed == batch + 1
        return tensor_of(frames[0], torch.float32, len(frames[0]) // 4)


class Every:
    """Does something to every so manyth message of one way."""

    def __init__(self, often: int, to_server: bool, do: Callable[[Message], list[Message]]):
        self.often, self.to_server, self.do = often, to_server, do
        self.num_seen = self.num_done = 0

    def __call__(self, message: Message) -> list[Message]:
        if message.to_server != self.to_server:
            return [message]
        self.num_seen += 1
        if self.num_seen % self.often:
            return [message]
        self.num_done += 1
        return self.do(message)


def late(message: Message) -> list[Message]:
    time.sleep(0.05)  # longer than until it is asked again
    return [message]


FAULTS: dict[str, Callable[[Message], list[Message]]] = {
    "lost": lambda message: [],
    "doubled": lambda message: [message, message],
    "damaged": lambda message: [message.flipped()],
    "late": late,
}


@pytest.mark.parametrize("to_server", [True, False], ids=["request", "reply"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_network_changes_nothing(fault: str, to_server: bool) -> None:
    server = make_server()
    tamper = Every(5, to_server, FAULTS[fault])
    with opened(server) as loop, Relay(loop.address) as relay, called(relay.address) as line:
        caller = Caller(line, server)
        caller.greet()
        relay.tamper = tamper
        caller.train(range(NUM_BATCHES))
    assert tamper.num_done >= 3
    expected = float(sum(range(1, NUM_BATCHES + 1)))
    assert server.clock.committed == NUM_BATCHES
    assert torch.equal(values(server), torch.full((47,), expected))


@pytest.mark.parametrize("num_lost", [0, 1])
@pytest.mark.parametrize("to_server", [True, False], ids=["request", "reply"])
def test_what_takes_long_is_sent_once_and_what_is_lost_again(to_server, num_lost) -> None:
    """A state on its way to a server or back, for longer than until it is asked after."""
    server, seen = make_server(kind="adam"), []

    def slow(message: Message) -> list[Message]:
        if message.to_server != to_server or len(message.content) < 300:
            return [message]
        time.sleep(0.3)
        seen.append(message)
        return [] if len(seen) <= num_lost else [message]

    with opened(server) as loop, Relay(loop.address) as relay, called(relay.address) as line:
        Caller(line, server).greet()
        _, frames = line.answer(line.ask(0, DumpState))
        state = [bytes(frame) for frame in frames]
        relay.tamper = slow
        if to_server:
            line.answer(line.ask(0, LoadState, state, step=7))
            assert server.clock.committed == 7
        else:
            assert [bytes(f) for f in line.answer(line.ask(0, DumpState))[1]] == state
        time.sleep(0.7)  # for what was sent too often
    assert len(seen) == num_lost + 1


@pytest.mark.parametrize("to_server", [True, False], ids=["request", "reply"])
def test_connections_that_break_change_nothing(to_server: bool) -> None:
    server = make_server()
    with opened(server) as loop, Relay(loop.address) as relay, called(relay.address) as line:
        caller = Caller(line, server)
        caller.greet()

        def cut(message: Message) -> list[Message]:
            relay.reset()
            return [message]

        relay.tamper = Every(7, to_server, cut)
        caller.train(range(NUM_BATCHES))
        assert relay.tamper.num_done >= 2
    expected = float(sum(range(1, NUM_BATCHES + 1)))
    assert torch.equal(values(server), torch.full((47,), expected))


def test_what_comes_back_is_what_is_held() -> None:
    server = make_server()
    with opened(server) as loop, called(loop.address) as line:
        caller = Caller(line, server)
        caller.greet()
        given = caller.train(range(2))
    first = server.layout.forward_order(server.shard.keys)[0]
    assert torch.equal(given, server.shard.values[first])
    assert line.take_bytes() > 0 and line.take_bytes() == 0


def test_a_worker_of_another_run_is_refused() -> None:
    server = make_server()
    with opened(server) as loop, called(loop.address) as line:
        caller = Caller(line, server)
        with pytest.raises(NotServed, match="another run's"):
            caller.ask(WorkerHello, caller.plays.hello(secret="of another"))
        caller.push(0, caller.keys)
        with pytest.raises(NotServed, match="Greet first"):
            caller.ask(Apply, caller.plays.apply(0))
    assert server.clock.committed == 0 and not values(server).any()


def test_a_worker_of_an_older_generation_is_refused() -> None:
    server = make_server()
    with opened(server) as loop, called(loop.address, generation=GENERATION - 1) as line:
        caller = Caller(line, server)
        with pytest.raises(GroupLost, match=f"generation {GENERATION}"):
            caller.greet()
        caller.push(0, caller.keys)
        with pytest.raises(GroupLost):
            caller.ask(Apply, caller.plays.apply(0))
    assert server.clock.committed == 0 and not values(server).any()


def test_who_waits_leaves_when_the_group_is_lost(tmp_path: Path) -> None:
    lost = threading.Event()
    with called(f"ipc://{tmp_path}/nobody", is_lost=lost.is_set) as line:
        request = line.ask(0, Pull, batch=0, meets=False)
        threading.Timer(0.1, lost.set).start()
        with pytest.raises(GroupLost):
            line.answer(request)


def test_who_sends_to_nobody_leaves_when_the_group_is_lost(tmp_path: Path) -> None:
    """What is sent to a server that is gone is kept for it, but only so much."""
    lost = threading.Event()
    with called(f"ipc://{tmp_path}/nobody", is_lost=lost.is_set) as line:
        timer = threading.Timer(0.3, lost.set)
        timer.start()
        with pytest.raises(GroupLost):
            for batch in range(100_000):
                line.send(0, Pull, batch=batch, meets=False)
        timer.join()


def test_what_is_no_message_is_refused_and_harms_nobody() -> None:
    server = make_server()
    with opened(server) as loop, called(loop.address) as line:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        noisy = connect(context, loop.address, b"noisy", None)
        good = pack(Worker(0, server).hello())
        for frames in ([b""], [b"SHL"], [b"x" * 5000], [*good, b"more"], [b"", *good]):
            noisy.send_multipart(frames)
            assert noisy.poll(20_000)
            answer, _ = unpack(noisy.recv_multipart(), module._DECODER, 1 << 20)
            assert isinstance(answer, RequestRefused) and answer.request == 0
        caller = Caller(line, server)
        caller.greet()
        caller.train(range(2))
        noisy.close()
        context.term()
    assert server.clock.committed == 2


@pytest.mark.parametrize("num_idle", [100, pytest.param(1000, marks=pytest.mark.full)])
def test_idle_connections_do_no_harm(num_idle: int) -> None:
    server = make_server()
    with opened(server) as loop, called(loop.address) as line:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        context.set(zmq.MAX_SOCKETS, num_idle + 10)
        idle = [connect(context, loop.address, b"idle %d" % i, None) for i in range(num_idle)]
        for number, socket in enumerate(idle):  # each is there: it is told that it must greet
            socket.send_multipart(pack(Worker(0, server).pull(number)))
        for socket in idle:
            assert socket.poll(20_000)
            answer, _ = unpack(socket.recv_multipart(), module._DECODER, 1 << 20)
            assert isinstance(answer, RequestRefused)
        caller = Caller(line, server)
        caller.greet()
        caller.train(range(5))
        context.destroy(linger=0)
    assert server.clock.committed == 5
    assert TICK_MS < 1000
