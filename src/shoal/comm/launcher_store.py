"""Where the ranks of torchrun, srun and mpirun meet, found from the environment alone.

MASTER_ADDR and MASTER_PORT say it, if they are set; torchrun sets them. Otherwise ranks of one host
meet in a store behind a Unix socket (`run_store.py`), in a directory that only this user can enter
and that is named after the launcher's job. Over several hosts srun says which one is the first, and
the port follows from the job; other launchers do not say it.

On one host Gloo is given the loopback interface; over several, the one that leads to the first
host. Cost: some file reads until rank 0 is there. Read next: `rendezvous.py`.
"""

import hashlib
import ipaddress
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil
import torch.distributed as dist
import zmq

from shoal.comm.endpoint import (
    GLOO_INTERFACE,
    Endpoint,
    address_towards,
    interface_of,
    named_interface,
)
from shoal.comm.rendezvous import join_store, serve_store
from shoal.comm.run_store import StoreClient, StoreServer
from shoal.comm.unix import refuse_open, release
from shoal.errors import FormError, UsageError
from shoal.storage.files import write_atomic
from shoal.world import World

_POLL_S = 0.02
_PREFIX = "shoal-ranks-"  # of directories among temporary files
# What names a job of a launcher. MPICH names none.
_JOBS = {
    "srun": ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    "mpirun": ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    "PALS": ("PALS_APID",),
}
_PORTS = range(20_000, 30_000)  # below those that Linux gives to clients


class MeetingPlace(NamedTuple):
    """Where ranks meet: at `host` and `port`, or on one host under the name of the `job`."""

    host: str = ""
    port: int = 0
    job: str = ""
    is_one_host: bool = True


def meeting_place(
    world: World,
    environment: Mapping[str, str] = os.environ,
    first_host: Callable[[str], str] | None = None,
    ancestor: Callable[[], str] | None = None,
) -> MeetingPlace:
    """Where the ranks of this launcher meet; UsageError if nothing says it. Pure but for the
    functions, which ask Slurm for the first host of a list and the system for our launcher."""
    is_one_host = world.num_ranks_of_node == world.num_ranks
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if host and port:
        if not port.isdigit() or not 0 < int(port) < 1 << 16:
            raise UsageError(f"MASTER_PORT={port!r} in the environment is no port, 1 to 65535.")
        return MeetingPlace(host, int(port), "", is_one_host or _is_loopback(host))
    if world.launcher == "torchrun":
        raise UsageError(
            "The launcher started several ranks but MASTER_ADDR and MASTER_PORT do not say where "
            "they meet. Set them to the first host's address and a free port, or use torchrun."
        )
    job = _job_of(world, environment, ancestor or _launcher_process)
    if is_one_host:
        return MeetingPlace(job=job)
    if not host and world.launcher == "srun":
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
        host = (first_host or _first_of_slurm)(nodes)
    if not host:
        raise UsageError(
            f"{world.launcher} started {world.num_ranks} ranks on several hosts and does not say "
            "where they meet. Set MASTER_ADDR to the first host's address, for all of them: "
            "mpirun -x MASTER_ADDR=10.0.0.1 ..., or mpiexec -genv MASTER_ADDR 10.0.0.1 ..."
        )
    number = int.from_bytes(hashlib.sha256(job.encode()).digest()[:4], "big")
    return MeetingPlace(host, int(port or _PORTS[number % len(_PORTS)]), job, is_one_host=False)


@contextmanager
def launcher_store(world: World, place: MeetingPlace, timeout_s: float) -> Iterator[dist.Store]:
    """The store of this job's ranks, which rank 0 holds unless torchrun's agent does. Every rank
    must come, and rank 0 leave last."""
    os.environ[GLOO_INTERFACE] = named_interface() or _interface(place)
    if place.host:
        yield _tcp_store(world, place, timeout_s)
        return
    with ExitStack() as held:
        directory = _job_directory(place.job)
        if world.rank == 0:
            _remove_left_behind()
            _make_anew(directory)
            held.callback(shutil.rmtree, directory, ignore_errors=True)
            held.callback(release, str(directory))
            server = StoreServer(Endpoint(str(directory)))
            held.callback(server.close)
            write_atomic(directory / "store", msgspec.json.encode(_Holder.of(server.address)))
        holder = _await_holder(directory / "store", timeout_s)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        held.callback(context.term)
        store = StoreClient(
            context, holder.address, None, timeout_s, is_lost=lambda: not holder.is_there()
        )
        held.callback(store.close)
        yield store


def _tcp_store(world: World, place: MeetingPlace, timeout_s: float) -> dist.TCPStore:
    if world.rank != 0 or "TORCHELASTIC_USE_AGENT_STORE" in os.environ:
        return join_store(place.host, place.port, timeout_s)
    store, _ = serve_store(place.host, place.port)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


class _Holder(msgspec.Struct):
    """The process that holds a store: one of an earlier job may have left its file."""

    pid: int
    started_at: float
    address: str

    @classmethod
    def of(cls, address: str) -> "_Holder":
        own = psutil.Process()
        return cls(own.pid, own.create_time(), address)

    def is_there(self) -> bool:
        try:
            found = psutil.Process(self.pid)
            return bool(found.create_time() == self.started_at and found.status() != "zombie")
        except psutil.Error:
            return False


def _await_holder(file: Path, timeout_s: float) -> _Holder:
    """Who holds the store, once rank 0 serves it."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            content = file.read_bytes()
            refuse_open(str(file.parent))
            found = msgspec.json.decode(content, type=_Holder)
            if found.is_there():
                return found
        except (OSError, msgspec.DecodeError):
            pass  # rank 0 has not come so far, or is removing what an earlier job has left
        if time.monotonic() > deadline:
            raise FormError(
                f"Rank 0 did not come to {file.parent} within {timeout_s:g} s. Is it running, on "
                "this host and with the same TMPDIR? --form-timeout gives it longer."
            )
        time.sleep(_POLL_S)


def _job_directory(job: str) -> Path:
    name = hashlib.sha256(job.encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"{_PREFIX}{os.geteuid()}-{name}"


def _remove_left_behind() -> None:
    """Remove what killed jobs of this user left on this host."""
    for directory in Path(tempfile.gettempdir()).glob(f"{_PREFIX}{os.geteuid()}-*"):
        with suppress(OSError, UsageError, msgspec.DecodeError):
            refuse_open(str(directory))
            if not msgspec.json.decode((directory / "store").read_bytes(), type=_Holder).is_there():
                shutil.rmtree(directory, ignore_errors=True)


def _make_anew(directory: Path) -> None:
    """Make a job's directory, which no other process may be using."""
    directory.mkdir(mode=0o700, exist_ok=True)
    refuse_open(str(directory))
    holder = directory / "store"
    if holder.exists():
        found = msgspec.json.decode(holder.read_bytes(), type=_Holder)
        if found.is_there():
            raise UsageError(
                f"Process {found.pid} is rank 0 of this job already. Two processes of one job "
                "were given rank 0, or a second command was started inside the first's."
            )
        shutil.rmtree(directory)
        directory.mkdir(mode=0o700)


def _job_of(
    world: World, environment: Mapping[str, str], launcher_process: Callable[[], str]
) -> str:
    """What is alike in all ranks of this job, and in no other job of this host."""
    names = _JOBS.get(world.launcher, ())
    found = [f"{name}={environment[name]}" for name in names if environment.get(name)]
    return " ".join([world.launcher, *(found or [launcher_process()])])


def _launcher_process() -> str:
    """The process on this host that the launcher's ranks all come from."""
    parents = psutil.Process().parents()
    names = ("hydra_pmi_proxy", "pmi_proxy", "mpiexec", "mpirun")
    found = [p for p in parents if p.name().startswith(names)] or parents[:1]
    if not found:
        raise UsageError("No launcher is among the parents of this process; set MASTER_ADDR.")
    return f"process {found[0].pid} of {found[0].create_time()}"


def _first_of_slurm(nodes: str) -> str:
    try:
        told = subprocess.run(
            ["scontrol", "show", "hostnames", nodes],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
        return told.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        raise UsageError(
            f"scontrol does not say which host of {nodes!r} is the first: {error}. Set "
            "MASTER_ADDR to its address, for all ranks."
        ) from error


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _interface(place: MeetingPlace) -> str:
    """For Gloo, which would otherwise listen at the address of the machine's name."""
    if place.is_one_host:
        return interface_of("127.0.0.1")
    try:
        address = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise UsageError(
            f"{place.host}, where ranks are to meet, is not known on this host: {error.strerror}. "
            "Set MASTER_ADDR to the first host's address."
        ) from error
    return interface_of(address_towards(str(address), place.port))
