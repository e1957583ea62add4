"""Measure an all-reduce of two ranks of this machine, through memory or else over loopback.

The ranks are two child processes with their own deadline, so that a machine on which ranks cannot
connect costs the doctor some seconds and never hangs it.
"""

import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import msgspec
import psutil

from shoal.events.meters import Stopwatch
from shoal.system.processes import die_with_parent

DEADLINE_S = 40
MESSAGE_BYTES = 16 * 2**20


class MeasurementFailed(Exception):
    """A measuring child did not answer in time, or died; the message says which."""


def interfaces_up() -> dict[str, str]:
    """Interfaces that are up, with an IPv4 address each."""
    states = psutil.net_if_stats()
    return {
        name: address.address
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET and name in states and states[name].isup
    }


def loopback(interfaces: dict[str, str]) -> str | None:
    return next((name for name, ip in interfaces.items() if ip.startswith("127.")), None)


def measure_all_reduce(interface: str) -> dict[str, float]:
    """The median seconds of a small and a large message.

    The ranks meet at a store of this process; all are killed at the end, also after an error.
    """
    from shoal.comm.endpoint import Endpoint
    from shoal.comm.run_store import StoreServer

    roots = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": interface,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(root for root in roots if root),
    }
    deadline = time.monotonic() + DEADLINE_S
    ranks: list[subprocess.Popen[str]] = []
    sockets = tempfile.TemporaryDirectory(prefix="shoal-")  # only this user may enter
    store = StoreServer(Endpoint(sockets.name))
    try:
        for rank in range(2):
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(rank), store.address],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            ranks.append(child)
        failed = _first_failure(ranks, deadline)
    finally:
        for child in ranks:
            child.kill()
        outputs = [child.communicate() for child in ranks]
        store.close()
        sockets.cleanup()
    if failed is not None:
        lines = outputs[failed][1].strip().splitlines()
        code = ranks[failed].returncode
        raise MeasurementFailed(f"rank {failed}: {lines[-1] if lines else f'exit code {code}'}")
    return msgspec.json.decode(outputs[0][0], type=dict[str, float])


def _first_failure(ranks: list[subprocess.Popen[str]], deadline: float) -> int | None:
    """Wait until all have succeeded, or one has failed: the other would wait for it forever."""
    while True:
        codes = [child.poll() for child in ranks]
        for rank, code in enumerate(codes):
            if code:
                return rank
        if None not in codes:
            return None
        if time.monotonic() > deadline:
            raise MeasurementFailed(f"no answer within {DEADLINE_S} s")
        time.sleep(0.02)


def _measure_as(rank: int, address: str) -> dict[str, float]:
    """One rank of the pair."""
    import torch
    import torch.distributed as dist
    import zmq

    from shoal.comm.collectives import Group
    from shoal.comm.run_store import StoreClient

    limit_s, context = DEADLINE_S * 0.75, zmq.Context[zmq.Socket[bytes]]()
    store = StoreClient(context, address, None, limit_s)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=limit_s),
    )
    group = Group(dist.group.WORLD).subgroup(range(2))  # in memory, as ranks of a run would
    seconds = {}
    for name, size, repeats in (("small_s", 1, 300), ("large_s", MESSAGE_BYTES // 4, 8)):
        message, laps, watch = torch.zeros(size), [], Stopwatch()
        for _ in range(repeats):
            watch.start()
            group.all_reduce(message).wait()
            laps.append(watch.lap())
        seconds[name] = statistics.median(laps)
    group.handle = None  # whose threads must not outlive the world
    dist.destroy_process_group()
    store.close()
    context.term()
    return seconds


if __name__ == "__main__":
    signal.alarm(DEADLINE_S)  # ends this process even if its parent is gone ...
    if sys.platform == "linux":
        die_with_parent(os.getppid())  # ... and here as soon as it is
    answer = _measure_as(int(sys.argv[1]), sys.argv[2])
    sys.stdout.write(msgspec.json.encode(answer).decode())
