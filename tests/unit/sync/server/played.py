"""Real servers with played workers: what these say is written out, so a test can bend it."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from shoal.comm.endpoint import Endpoint
from shoal.comm.tree import Block, blocks_of
from shoal.comm.wire import bytes_of
from shoal.data.split import share
from shoal.sync.server.journal import Journal
from shoal.sync.server.loop import ServerLoop
from shoal.sync.server.messages import (
    Apply,
    Pull,
    Push,
    Reply,
    ServerMessage,
    Sum,
    WorkerHello,
    WorkerMessage,
)
from shoal.sync.server.server import Server
from shoal.sync.server.shard import ServerShard, layout_of, settings_of

SECRET = "of this run"
GENERATION = 3


def make_model(*sizes: int) -> nn.Module:
    """Parameters of zeros, of which sums of integers can be read off."""
    model = nn.Module()
    for number, size in enumerate(sizes or (40, 7)):
        model.register_parameter(f"p{number}", nn.Parameter(torch.zeros(size)))
    return model


def make_optimizer(model: nn.Module, kind: str = "sgd") -> torch.optim.Optimizer:
    if kind == "adam":
        return torch.optim.Adam(model.parameters(), lr=0.1, weight_decay=0.01, fused=True)
    return torch.optim.SGD(model.parameters(), lr=1.0)


def make_server(
    number: int = 0,
    num_servers: int = 1,
    *,
    seats: int = 1,
    pieces: int = 1,
    bound: int | None = 0,
    kind: str = "sgd",
    journal: Journal | None = None,
) -> Server:
    model = make_model()
    optimizer = make_optimizer(model, kind)
    shard = ServerShard(model, optimizer, layout_of(model, optimizer, num_servers), number)
    server = Server(
        shard, num_seats=seats, num_pieces=pieces, bound=bound, secret=SECRET, journal=journal
    )
    server.begin(GENERATION)
    return server


class Worker:
    """Makes messages. Its gradients are whole numbers: the same in every element of a batch."""

    def __init__(self, seat: int, server: Server):
        self.seat, self.name = seat, b"worker %d" % seat
        self.layout, self.bound = server.layout, server.bound
        self.pieces = share(seat, server.num_seats, server.num_pieces)
        self.together = range(server.num_pieces) if server.bound == 0 else self.pieces
        own = self.pieces if server.bound == 0 else range(len(self.pieces))
        first = self.pieces.start - own.start
        self.blocks = [Block(b.first + first, b.num_pieces) for b in blocks_of(own)]
        self.settings = settings_of(make_optimizer(make_model()))
        self.numbers, self.generation = count(1), GENERATION

    def make(self, kind: type[WorkerMessage], **what: Any) -> Any:
        return kind(generation=self.generation, request=next(self.numbers), **what)

    def hello(self, **other: Any) -> WorkerHello:
        what = {
            "seat": self.seat,
            "secret": SECRET,
            "layout": self.layout.digest,
            "num_rows": len(self.blocks),
            "rows": None,
        }
        return self.make(WorkerHello, **what | other)

    def push(self, key: int, batch: int, attempt: int = 0, **other: Any) -> Push:
        what = {
            "batch": batch,
            "attempt": attempt,
            "key": key,
            "blocks": self.blocks,
            "touched": [True] * len(self.layout.segments(key)),
            "is_shared": False,
        }
        return self.make(Push, **what | other)

    def rows(self, key: int, value: float) -> list[Tensor]:
        """A row of equal numbers for each block; their sum over the blocks is `value`."""
        own = self.layout.keys[key]
        empty = [torch.zeros(own.stop - own.start) for _ in self.blocks[1:]]
        return [torch.full((own.stop - own.start,), float(value)), *empty]

    def sum(self, batch: int, attempt: int = 0, **other: Any) -> Sum:
        which = {"batch": batch, "attempt": attempt, "want_norms": True, "want_finite": True}
        return self.make(Sum, **which | self.which() | other)

    def apply(self, batch: int, attempt: int = 0, **other: Any) -> Apply:
        how = {"batch": batch, "attempt": attempt, "scale": -1.0, "factor": 1.0, "pulled": None}
        return self.make(Apply, **how | self.which() | {"settings": self.settings} | other)

    def pull(self, batch: int, meets: bool = False, waits: bool = True) -> Pull:
        return self.make(Pull, batch=batch, meets=meets, waits=waits)

    def which(self) -> dict[str, int]:
        return {"first": self.together.start, "last": self.together.stop}


def send(
    server: Server, worker: Worker, message: WorkerMessage, payload: Sequence[bytes | Tensor] = ()
) -> list[Reply]:
    """As if it had come over a wire: through bytes, and in memory of the server's own."""
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=WorkerMessage)
    frames = [memoryview(bytearray(bytes_of(tensor))) for tensor in payload]
    return server.handle(worker.name, sent, frames)


def only(answers: Sequence[Reply]) -> ServerMessage:
    (answer,) = answers
    return answer.message  # type: ignore[return-value]


def push_all(server: Server, worker: Worker, batch: int, value: float, attempt: int = 0) -> None:
    for key in server.shard.keys:
        assert not send(server, worker, worker.push(key, batch, attempt), worker.rows(key, value))


def values(server: Server) -> Tensor:
    """The parameters, without what stands between them."""
    return torch.cat([run.detach().reshape(-1) for run in server.shard.runs])


def tensor_bytes(server: Server) -> bytes:
    """The parameters and the optimizer's state of them."""
    tensors = [*server.shard.values.values()]
    for run in server.shard.runs:
        own = server.shard.optimizer.state.get(run, {})
        tensors += [own[name] for name in sorted(own) if isinstance(own[name], Tensor)]
    return b"".join(bytes(bytes_of(tensor)) for tensor in tensors)


def state_bytes(server: Server) -> bytes:
    """All that a server holds, to be compared bit by bit."""
    plain = [
        {name: value for name, value in group.items() if name != "params"}
        for group in server.shard.optimizer.param_groups
    ]
    told = repr((server.clock.to_plain(), plain, sorted(server._summaries)))
    return tensor_bytes(server) + told.encode()


@contextmanager
def opened(server: Server) -> Iterator[ServerLoop]:
    """A server at its desk, in a thread."""
    sockets = TemporaryDirectory()
    loop, is_over = ServerLoop(server, Endpoint(sockets.name)), threading.Event()

    def run() -> None:
        while not is_over.is_set():
            loop.run_once()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield loop
    finally:
        is_over.set()
        thread.join()
        loop.close()
        sockets.cleanup()
