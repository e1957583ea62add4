"""A worker with real servers: sockets and threads in one process, and steps on equal gradients."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from shoal.comm.collectives import Group
from shoal.comm.endpoint import Endpoint
from shoal.comm.mesh import Mesh, Servers
from shoal.comm.shared_memory import NotShared
from shoal.sync.server import worker_memory
from shoal.sync.server.loop import ServerLoop
from shoal.sync.server.packing import GradientPacker
from shoal.sync.server.server import Server
from shoal.sync.server.shard import ServerShard, layout_of
from shoal.sync.server.strategy import ServerStrategy, WorkerOptions
from shoal.sync.strategy import LocalStep

SIZES = (2_000, 300, 40)


class Model(nn.Module):
    """Three parameters, the last of which may share its memory with a frozen one."""

    def __init__(self, shares: bool = False):
        super().__init__()
        self.parts = nn.ParameterList(torch.arange(float(size)) for size in SIZES)
        if shares:
            self.alias = nn.Parameter(self.parts[-1].detach()[:], requires_grad=False)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.1, fused=True)


@contextmanager
def trained_at(
    num_servers: int = 1,
    bound: int | None = 0,
    shares: bool = False,
    frames: bool = False,
    **options: Any,
) -> Iterator[tuple[Model, ServerStrategy, list[Server], Callable[[float], None]]]:
    """A worker with real servers in threads; and a step of its own, on equal gradients.

    With `frames` they share no memory. `options` go to the strategy.
    """
    servers = []
    with ExitStack() as stack:
        addresses, is_over = [], threading.Event()
        reach = Endpoint(stack.enter_context(TemporaryDirectory()))
        for number in range(num_servers):
            held = Model(shares)
            optimizer = adam(held)
            shard = ServerShard(held, optimizer, layout_of(held, optimizer, num_servers), number)
            server = Server(shard, num_seats=1, num_pieces=1, bound=bound, secret="x")
            server.begin(0)
            loop = ServerLoop(server, reach)
            stack.callback(loop.close)
            thread = threading.Thread(target=_serve, args=(loop, is_over))
            thread.start()
            stack.callback(thread.join)
            servers.append(server)
            addresses.append(loop.address)
        stack.callback(is_over.set)
        if (codec := options.pop("codec", "none")) != "none":
            options["packing"] = GradientPacker(codec, options.get("checks", False))
        model, strategy = Model(shares), ServerStrategy(1, bound, WorkerOptions(**options))
        reached = Servers(tuple(addresses), 0, "x", lambda: False)
        mesh = Mesh(Group(), Group(), Group(), Group(), "cpu", servers=reached)
        with ExitStack() as attaching:
            if frames:
                refused = NotShared("The test sends frames.")
                attaching.enter_context(
                    mock.patch.object(worker_memory.SharedSegment, "create", side_effect=refused)
                )
            strategy.attach(model, adam(model), mesh)
        stack.callback(strategy.detach)

        def step(value: float) -> None:
            with strategy.microbatch(True, True):
                for p in model.parts:
                    p.grad = torch.full_like(p, value)
            local = LocalStep()
            local.add(torch.tensor(1.0), 1.0, True)
            strategy.exchange(local, want_norm=False)
            assert strategy.update(1.0, check=False)

        yield model, strategy, servers, step


def _serve(loop: ServerLoop, is_over: threading.Event) -> None:
    while not is_over.is_set():
        loop.run_once()


def alone(steps: Sequence[float]) -> list[Tensor]:
    """What one process makes of the same steps."""
    model = Model()
    optimizer = adam(model)
    for value in steps:
        for p in model.parts:
            p.grad = torch.full_like(p, value)
        optimizer.step()
    return [p.detach() for p in model.parts]
