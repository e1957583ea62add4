"""Ranks for a bench: processes that measure together on one Gloo group, and what they found.

`start` runs a bench's own module once for each rank and returns what rank 0 answered; `serve` is
what the module does when it finds itself to be such a rank. Each rank has one thread and is kept on
one core; more ranks than cores share them, and are emulated devices.
"""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

from bench import harness
from shoal.world import World
from tests.support.hosts import APART, Host

PATIENCE_S = 600.0

Found = TypeVar("Found")


def start(bench: str, num_ranks: int, kind: type[Found], *words: str, **variables: str) -> Found:
    """Start the ranks, wait, and read what rank 0 found; nothing is left behind."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} | variables
    environment |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    places = [{"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(num_ranks)]
    return _start(bench, kind, words, [(environment | place, []) for place in places])


def start_on(hosts: Sequence[Host], bench: str, kind: type[Found], *words: str) -> Found:
    """The same with a rank on each host, which shares no memory with another."""
    environment = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29400"}
    environment |= {"WORLD_SIZE": str(len(hosts)), "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    places = [
        (
            environment | {"RANK": str(rank), "GLOO_SOCKET_IFNAME": host.interface},
            ["ip", "netns", "exec", host.namespace, *APART],
        )
        for rank, host in enumerate(hosts)
    ]
    return _start(bench, kind, words, places)


def start_by_torchrun(
    hosts: Sequence[Host], ranks_of_host: int, bench: str, kind: type[Found], *words: str
) -> Found:
    """The same with several on each host, all of which torchrun starts there."""
    options = [f"--nnodes={len(hosts)}", f"--nproc-per-node={ranks_of_host}"]
    options += [f"--master-addr={hosts[0].address}", "--master-port=29400", "--no-python"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *options]
    places = [
        (
            {"GLOO_SOCKET_IFNAME": host.interface},
            ["ip", "netns", "exec", host.namespace, *torchrun, f"--node-rank={number}"],
        )
        for number, host in enumerate(hosts)
    ]
    return _start(bench, kind, words, places)


def _start(
    bench: str,
    kind: type[Found],
    words: Sequence[str],
    places: Sequence[tuple[Mapping[str, str], list[str]]],
) -> Found:
    """A rank with each of these variables, started by these words."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-m", f"bench.{bench}", *words, str(out)]
        ranks = [
            subprocess.Popen([*within, *command], env=harness.child_environment() | variables)
            for variables, within in places
        ]
        try:
            codes = [rank.wait(timeout=PATIENCE_S) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        if any(codes):
            named = "/".join((bench, *words))
            raise harness.ArmFailed(f"{named}: the ranks ended with the codes {codes}; see above.")
        return msgspec.json.decode(out.read_bytes(), type=kind)


def is_rank() -> bool:
    return "RANK" in os.environ


def serve(body: Callable[..., Any]) -> None:
    """Be one of the ranks: `body(world, *words)` on every rank; rank 0's answer is kept."""
    *words, out = sys.argv[1:]
    world = World.from_environment()
    torch.set_num_threads(1)
    harness.pin(world.rank)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))  # links may be slow
    try:
        found = body(world, *words)
        if world.rank == 0:
            Path(out).write_bytes(msgspec.json.encode(found))
        dist.barrier()
    finally:
        dist.destroy_process_group()
