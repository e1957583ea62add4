"""A server's door beside its socket: who is let in, in which order things come, and a way back."""

from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from torch import Tensor

from shoal.comm.local_listener import connect_local
from shoal.sync.server.client import ServerClient
from shoal.sync.server.loop import LocalWorkers
from tests.unit.sync.server.played import make_server, opened, values
from tests.unit.sync.server.test_client import Caller, called


@contextmanager
def nearby(server: Any):
    """A caller whose line goes through the door for what has no frames."""
    with opened(server) as loop, called(loop.address) as line:
        caller = Caller(line, server)
        caller.greet()
        line.connect_locally([loop.server.listener])
        assert line._connections
        yield caller, line


def trained_far(num_batches: int) -> Tensor:
    server = make_server()
    with opened(server) as loop, called(loop.address) as line:
        caller = Caller(line, server)
        caller.greet()
        caller.train(range(num_batches))
    return values(server)


def train(caller: Caller, line: ServerClient, batches: range) -> None:
    for batch in batches:
        caller.train(range(batch, batch + 1))
        line.take_bytes()  # the step is over


def test_questions_do_not_overtake_pushes() -> None:
    server = make_server()
    with nearby(server) as (caller, line):
        train(caller, line, range(5))
    assert values(server).equal(trained_far(5))


def test_a_closed_passage_is_done_without() -> None:
    server = make_server()
    with nearby(server) as (caller, line):
        train(caller, line, range(2))
        for passage in list(line._connections.values()):
            passage._connection.shutdown(2)
        train(caller, line, range(2, 5))
    assert values(server).equal(trained_far(5))


def test_pushes_go_with_the_question() -> None:
    server = make_server()
    with nearby(server) as (caller, line):
        caller.push = lambda batch, keys: [  # type: ignore[method-assign]
            line.queue_push(
                0,
                caller.plays.rows(key, batch + 1),
                batch=batch,
                attempt=0,
                key=key,
                blocks=caller.plays.blocks,
                touched=caller.plays.push(key, batch).touched,
                is_shared=False,
            )
            for key in keys
        ]
        train(caller, line, range(3))
        assert not line._queued
    assert values(server).equal(trained_far(3))


def test_what_was_left_can_be_forgotten() -> None:
    server = make_server()
    with nearby(server) as (_, line):
        line.queue_push(0, batch=0, attempt=0, key=0, blocks=[], touched=[], is_shared=True)
        line.flush(least_bytes=1)
        assert line._queued
        line.drop_queued()
        assert not line._queued


def test_strangers_are_shown_out(tmp_path: Path) -> None:
    hall = LocalWorkers(zmq.Poller(), str(tmp_path))
    with closing(hall):
        assert hall.listener is not None
        known, stranger = connect_local(hall.listener.name), connect_local(hall.listener.name)
        assert known is not None and stranger is not None
        with closing(known), closing(stranger):
            known.send(b"seat 0")
            stranger.send(b"seat 7")
            for _ in range(3):
                ready = [hall.listener.fileno(), *hall._connections]
                assert not list(hall.hear(ready, {b"seat 0"}))
            known.send(b"hello")
            assert list(hall.hear([*hall._connections], {b"seat 0"})) == [(b"seat 0", b"hello")]
            assert hall.send(b"seat 0", [b"answer"]) and known.receive() == b"answer"
            assert not hall.send(b"seat 0", [b"two", b"frames"])
            assert not hall.send(b"seat 7", [b"answer"])
            with pytest.raises(ConnectionError):
                stranger.receive()
            known.close()
            assert not list(hall.hear([*hall._connections], ()))
            assert not hall._connections
