"""Parameter servers for a bench: processes that it starts, and the servers they are.

`started` runs a bench's own module with the word `serve`, and gives the address that it printed;
`serve` is what the module then does. No supervisor is there: nobody dies here.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from bench import harness
from shoal.comm.endpoint import Endpoint, endpoint_from, host_environment
from shoal.comm.mesh import Axes, Check, LauncherSeat, Mesh, Servers, accept
from shoal.comm.wire import Keys
from shoal.numerics.threads import ComputeThreads, num_spare_threads
from shoal.sync.server.journal import Journal
from shoal.sync.server.loop import ServerLoop
from shoal.sync.server.server import Server
from shoal.sync.server.shard import ServerShard, layout_of
from shoal.sync.server.tables import ServerTables
from shoal.system.processes import die_with_parent
from shoal.world import World

SECRET = "bench"


@contextmanager
def started(module: str, *words: str, keys: Path | None = None) -> Iterator[str]:
    """A process that serves, by the address it printed; it ends with the block. With `keys` it
    listens on the loopback interface, as it would for other hosts."""
    environment = {k: v for k, v in harness.child_environment().items() if k != "RANK"}
    sockets = TemporaryDirectory(prefix="shoal-")
    environment |= Endpoint(sockets.name).environment()
    if keys is not None:
        environment |= host_environment("127.0.0.1", keys)
    process = subprocess.Popen(
        [sys.executable, "-m", module, "serve", *words],
        env=environment,
        cwd=harness.ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        if not address:
            raise RuntimeError(f"{module} serve {' '.join(words)} did not start; see above.")
        yield address
    finally:
        process.kill()
        process.wait()
        sockets.cleanup()


class ServedSeat(LauncherSeat):
    """A launcher's seat, from which one server is in reach until `is_over`."""

    def __init__(
        self,
        world: World,
        address: str,
        is_over: Callable[[], bool] = lambda: False,
        keys: Keys | None = None,
    ):
        super().__init__(world)
        found = reached_at(address)._replace(is_lost=is_over, keys=keys)
        self.servers = found if address else None

    def form(self, axes: Axes, check: Check = accept) -> Mesh:
        return super().form(axes, check)._replace(servers=self.servers)


def reached_at(address: str) -> Servers:
    """One server, as a worker finds it."""
    return Servers((address,), 0, SECRET, lambda: False)


def serve(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    num_pieces: int,
    bound: int | None,
    journal: Path | None = None,
    tables: ServerTables | None = None,
) -> None:
    """Be a server with a seat for each piece, until whoever started this process is gone."""
    torch.set_num_threads(1)
    crew = ComputeThreads(num_spare_threads(1) if bound == 0 else 1)  # as in a run
    shard = ServerShard(model, optimizer, layout_of(model, optimizer, 1), 0, tables=tables)
    shard.step_with(crew)
    server = Server(
        shard,
        num_seats=num_pieces,
        num_pieces=num_pieces,
        bound=bound,
        secret=SECRET,
        journal=None if journal is None else Journal(journal, SECRET),
    )
    server.begin(0)
    crew.host(partial(_turn_after_turn, server))


def _turn_after_turn(server: Server) -> None:
    loop = ServerLoop(server, endpoint_from(os.environ))
    say(loop.address)
    while True:
        loop.run_once()


def say(address: str) -> None:
    """Tell whoever started this process where to reach it, and end with it."""
    die_with_parent(os.getppid())
    print(address, flush=True)
