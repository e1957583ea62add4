"""This machine as a cluster of one host: cores, memory, the speed of a core, the link of ranks.

The link is what an all-reduce of two ranks reaches over loopback (`all_reduce.py`), the speed that
of a matmul on one core; the lowest of several times counts, since other work only adds. What was
measured is kept in the user's cache until `shoal doctor --save` measures it again.

Cost: about ten seconds, once. Read next: `cluster.py`.
"""

from time import perf_counter

import psutil

from shoal.cost.all_reduce import (
    MESSAGE_BYTES,
    MeasurementFailed,
    interfaces_up,
    loopback,
    measure_all_reduce,
)
from shoal.cost.cluster import Cluster, HostGroup, Link, format_cluster, parse_cluster
from shoal.errors import UsageError
from shoal.events.meters import memory_limit_bytes
from shoal.storage.files import write_atomic
from shoal.storage.run_dir import cache_directory
from shoal.world import cores

_MATMUL = 512  # rows and columns: fits a core's cache, as the blocks of a matmul do
_REPEATS = 20


def measure_cluster() -> Cluster:
    """This machine: its cores, memory, a matmul on one core, an all-reduce of two ranks.

    Takes some seconds. Raises UsageError if ranks of this host cannot connect.
    """
    import torch

    interface = loopback(interfaces_up())
    if interface is None:
        raise UsageError("Ranks of one host meet on loopback; bring it up: ip link set lo up.")
    try:
        seconds = measure_all_reduce(interface)
    except MeasurementFailed as error:
        raise UsageError(
            f"Two ranks of this machine cannot be measured: {error}. Run `shoal doctor`, or give "
            "a cluster file."
        ) from None
    memory_bytes = host_memory_bytes()
    link = Link(seconds["small_s"], MESSAGE_BYTES / seconds["large_s"], shared_memory=True)
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        memory_bytes = sum(torch.cuda.get_device_properties(i).total_memory for i in range(count))
        host = HostGroup(1, count, memory_bytes, measure_flops("cuda"), "gpu")
    else:
        host = HostGroup(1, cores(), memory_bytes, measure_flops())
    return Cluster("this machine", (host,), link, link)


def this_cluster() -> Cluster:
    """This machine as it was last measured, from the cache; measured now if it never was."""
    cluster = kept_cluster()
    if cluster is None:
        cluster = measure_cluster()
        keep_cluster(cluster)
    return cluster


def kept_cluster() -> Cluster | None:
    """This machine as it was last measured; None if it never was, or has other cores now."""
    kept = cache_directory() / "clusters" / "this-machine.toml"
    if not kept.exists():
        return None
    try:
        found = parse_cluster(kept.read_bytes(), str(kept))
    except UsageError:
        return None  # of another version
    is_same = found.num_devices == cores() or found.hosts[0].device == "gpu"
    return found if is_same else None


def host_memory_bytes() -> int:
    """The memory of this machine, or what its container may use of it."""
    limit, present = memory_limit_bytes(), int(psutil.virtual_memory().total)
    return present if limit is None else min(present, limit)


def keep_cluster(cluster: Cluster) -> None:
    """What `this_cluster` answers from now on."""
    kept = cache_directory() / "clusters" / "this-machine.toml"
    kept.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(kept, format_cluster(cluster).encode())


def measure_flops(device: str = "cpu") -> float:
    """The fp32 operations a second of one device in a matmul."""
    import torch

    size = _MATMUL if device == "cpu" else 16 * _MATMUL
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        a = torch.ones(size, size, device=device)
        out, best = torch.empty_like(a), float("inf")
        for _ in range(_REPEATS):
            started = perf_counter()
            torch.mm(a, a, out=out)
            if device != "cpu":
                torch.cuda.synchronize()
            best = min(best, perf_counter() - started)
    finally:
        torch.set_num_threads(threads)
    return 2 * size**3 / best
