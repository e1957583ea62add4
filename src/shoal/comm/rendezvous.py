"""Rendezvous: the TCPStore where the ranks of a launcher meet, and forming and leaving a group.

Under torchrun, srun or mpirun ranks meet as in any torch job, in a store that every process which
reaches its port can read and change; a supervised run has its own store (`run_store.py`). The store
listens at one address, loopback by default, through a socket that is bound beforehand, because
`TCPStore("127.0.0.1")` would listen on every interface. Groups are keyed by generation, so a late
message of an older generation has no reader.
"""

import errno
import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from shoal.comm.collectives import COLLECTIVE_TIMEOUT
from shoal.comm.flight_recorder import RECORDER
from shoal.errors import FormError, GroupLost, UsageError
from shoal.logs import warn_once
from shoal.system.memory import disable_flight_recorder
from shoal.world import World


def serve_store(host: str = "127.0.0.1", port: int = 0) -> tuple[dist.TCPStore, int]:
    """Serve a store that others join at `host`; also its port. It ends with this process."""
    try:
        bound, own = _bound(host, port)
    except OSError as error:
        raise UsageError(
            f"Rank 0 cannot listen at {host}:{port}: {error.strerror}. Set MASTER_ADDR to an "
            "address of its machine, and MASTER_PORT to a port that is free there."
        ) from error
    port = bound.getsockname()[1]
    store = dist.TCPStore(
        own, port, is_master=True, wait_for_workers=False, master_listen_fd=bound.detach()
    )
    return store, port


def join_store(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Join a store."""
    address = host
    with suppress(OSError):  # a name that is not known yet is looked up until the deadline
        _, address = _address_of(host)
    try:
        return dist.TCPStore(
            address, port, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )
    except (RuntimeError, ValueError) as error:
        raise FormError(
            f"No store answers at {host}:{port} within {timeout_s:g} s "
            f"({str(error).splitlines()[0]}). Rank 0 holds it: is rank 0 running?"
        ) from error


def _bound(host: str, port: int) -> tuple[socket.socket, str]:
    """A socket that listens where others look for `host`, and the address that it has here."""
    family, address = _address_of(host)
    # A host's own name often means loopback on that host, and another address elsewhere.
    if host in (address, "localhost") or not ip_address(address).is_loopback:
        try:
            return socket.create_server((address, port), family=family, backlog=128), address
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    warn_once(
        f"{host} is not an address that this machine has for others, so the store where ranks "
        "meet listens on all interfaces. Set MASTER_ADDR to one that it has."
    )
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    everywhere = socket.create_server(("", port), family=family, backlog=128, dualstack_ipv6=both)
    return everywhere, "127.0.0.1"


def _address_of(host: str) -> tuple[socket.AddressFamily, str]:
    """IPv4 if there is one: who listens and who joins must choose alike, since torch tries one."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    family, _, _, _, place = min(found, key=lambda one: one[0] != socket.AF_INET)
    return family, str(place[0])


def wait_for_ranks(store: dist.Store, prefix: str, world: World, timeout_s: float) -> None:
    """Wait until every rank is there; after the deadline raise FormError with those missing."""
    here = dist.PrefixStore(f"{prefix}/here", store)
    here.set(str(world.rank), "1")
    deadline = time.monotonic() + timeout_s
    missing = set(range(world.num_ranks))
    while missing:
        missing = {r for r in missing if not here.check([str(r)])}
        if missing and time.monotonic() > deadline:
            names = ", ".join(str(r) for r in sorted(missing))
            raise FormError(
                f"The group of {world.num_ranks} ranks did not form within {timeout_s:g} s: "
                f"rank {names} did not come. Look at the log of that rank."
            )
        if missing:
            time.sleep(0.02)


def form_group(store: dist.Store, prefix: str, world: World, timeout: timedelta) -> None:
    """Form the default group. All ranks must have come; raises GroupLost if one is gone since."""
    if world.backend == "nccl":
        torch.cuda.set_device(world.device)
    else:
        disable_flight_recorder()
    try:
        dist.init_process_group(
            world.backend,
            store=dist.PrefixStore(prefix, store),
            rank=world.rank,
            world_size=world.num_ranks,
            timeout=timeout,
        )
    except (RuntimeError, ValueError) as error:
        # A failed attempt leaves the counter, and with it the store's key prefix, different from
        # that of a new rank, and the group would never form again.
        distributed_c10d._world.group_count = 0
        raise GroupLost(f"the group did not form: {str(error).splitlines()[0]}") from error
    distributed_c10d._set_pg_timeout(COLLECTIVE_TIMEOUT, dist.group.WORLD)


_ABANDONED: list[dist.ProcessGroup] = []
_UNUSED = 2  # references to a group that only the list and the counting function hold


def abandon_group() -> None:
    """Drop a broken default group without waiting for what is under way in it.

    Destroying it would wait: Gloo joins its threads, and one of them may be in an operation that no
    peer will finish. So the group is kept while it is in use, and then destroyed by a thread.
    """
    RECORDER.forget()
    if dist.is_initialized():
        assert dist.group.WORLD is not None
        _ABANDONED.append(dist.group.WORLD)
        dist.destroy_process_group()
    _end_unused()


def _end_unused() -> None:
    for place in range(len(_ABANDONED) - 1, -1, -1):
        if sys.getrefcount(_ABANDONED[place]) <= _UNUSED:
            ending = [_ABANDONED.pop(place)]
            # torch lets other threads run while a group ends.
            threading.Thread(target=ending.clear, name="shoal-end-group", daemon=True).start()


def leave_group() -> None:
    """Drop the default group. The pending operations must have been drained."""
    if dist.is_initialized():
        dist.destroy_process_group()
