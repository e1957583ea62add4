"""Host agents on a Ray cluster: `shoal train ... --on ray`.

Ray gives resources, other nodes for lost ones, and autoscaling; each host agent is a process that
an actor of a placement group starts. The supervisor stays in the process of the command, which is
no host itself: its node offers its CPUs to Ray, so ranks there are an actor's too. Ray is loaded in
a process of its own (`ray_process.py`), and this starter only writes to it and reads from it.

What follows `ray:` is a list of words: `pack` or `spread`, `hosts=N`, `cpus=N`, and the address of
the cluster (`10.0.0.1:6379`; or `ray://10.0.0.1:10001` for a client from outside, which the nodes
must be able to reach too; or the dashboard's, `http://10.0.0.1:8265`, for `shoal submit`).

Cost: about two seconds to connect. Read next: `agent_starter.py`; `ray_jobs.py`, for `shoal submit
--on ray`.
"""

import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, NamedTuple

import msgspec

from shoal.cluster.ray_messages import (
    FROM_RAY,
    AgentEnded,
    AskForAgents,
    ConnectedToRay,
    ConnectToRay,
    FromRay,
    NoRoom,
    RayFailed,
    RayNode,
    Strategy,
    ToRay,
    encode_line,
)
from shoal.comm.endpoint import is_loopback
from shoal.errors import FormError, UsageError, nearest
from shoal.formatting import plural
from shoal.logs import log
from shoal.system.processes import describe_exit, readable

CONNECT_S = 60.0  # for Ray to answer
END_S = 5.0  # for Ray to take back what it gave
TELL_S = 4.0  # after which a wait for room is told
REMIND_S = 15.0  # between two messages about what is missing
CLIENT_PORT = 10001  # of `ray://`
NOT_PRIVATE = (
    "Ray's messages, which bring the keys of a run to its nodes, are not encrypted. If nobody else "
    "listens on that network, say so with --trust-network; else set up Ray's TLS (RAY_USE_TLS=1)."
)
# What must be the same in all processes of a run, for the same bits.
_SHARED_VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "ONEDNN_MAX_CPU_ISA")


class RayPlace(msgspec.Struct, frozen=True):
    """What `--on ray:...` asks for."""

    address: str = "auto"  # as `ray.init` takes it
    strategy: Strategy = "PACK"
    num_hosts: int | None = None
    cpus: int | None = None  # of each host

    @property
    def name(self) -> str:
        return "Ray" if self.address == "auto" else f"Ray at {self.address}"


def parse_place(text: str) -> RayPlace:
    """What follows `ray:`, as in `spread,hosts=2,10.0.0.1:6379` or `//10.0.0.1:10001`. Pure."""
    found: dict[str, Any] = {}
    for word in filter(None, text.split(",")):
        key, _, value = word.partition("=")
        if word in ("pack", "spread"):
            found["strategy"] = word.upper()
        elif key in ("hosts", "cpus"):
            if not value.isdigit() or int(value) < 1:
                raise UsageError(f"--on ray:{text}: {word!r} is no number of {key}.")
            found["num_hosts" if key == "hosts" else "cpus"] = int(value)
        elif ":" in word or "/" in word or "." in word:
            found["address"] = _address(word, text)
        elif word != "auto":
            raise UsageError(
                f"--on ray:{text}: {word!r} is neither an option nor an address (host:port). "
                f"{nearest(key, ('pack', 'spread', 'hosts=N', 'cpus=N', 'auto'))}"
            )
    return RayPlace(**found)


def inside_of(text: str) -> str:
    """What `--on` is for a run inside of the cluster, which needs no address: the rest of it."""
    words = [word for word in text.split(",") if parse_place(word).address == "auto"]
    return ":".join(filter(None, ("ray", ",".join(words))))


def _address(word: str, text: str) -> str:
    if word.startswith(("http://", "https://")):
        return word.rstrip("/")
    is_client = word.startswith(("//", "ray://"))
    host, _, port = word.removeprefix("ray:").removeprefix("//").rpartition(":")
    if is_client and not host:
        host, port = port, str(CLIENT_PORT)
    if not host or not port.isdigit() or not 0 < int(port) < 2**16 or "/" in host:
        raise UsageError(
            f"--on ray:{text}: {word!r} is no address. Give host:port of Ray's first node "
            f"(6379 by default), or ray://host:port for a client ({CLIENT_PORT} by default)."
        )
    return f"{'ray://' if is_client else ''}{host}:{port}"


class RaySize(NamedTuple):
    """How many hosts a run gets, and how many CPUs each."""

    num_hosts: int
    cpus: int


def choose_size(
    place: RayPlace, num_ranks: int | None, most: int, nodes: Sequence[RayNode]
) -> RaySize:
    """A CPU for each rank, on `most` hosts at the most. Pure.

    If the user does not say how many hosts: with PACK as few as have room now, with SPREAD as many,
    and one a node at the most; if there is no room now, as if all nodes were idle. If a plan has as
    many ranks as there are cores (None), all nodes that have free ones.
    """
    if num_ranks is None:
        free = [node.free_cpus for node in nodes if node.free_cpus >= 1]
        room = free or [node.cpus for node in nodes if node.cpus >= 1] or [1.0]
        cpus = place.cpus or int(sorted(room)[-min(place.num_hosts or len(room), len(room))])
        return RaySize(place.num_hosts or sum(one >= cpus for one in room) or 1, cpus)
    if place.num_hosts is not None:
        return RaySize(place.num_hosts, place.cpus or math.ceil(num_ranks / place.num_hosts))
    counts = range(1, max(1, min(most, len(nodes), num_ranks)) + 1)
    for room in ([node.free_cpus for node in nodes], [node.cpus for node in nodes]):
        fitting = [
            RaySize(count, cpus)
            for count in counts
            if (cpus := place.cpus or math.ceil(num_ranks / count)) * count >= num_ranks
            and sum(one >= cpus for one in room) >= count
        ]
        if fitting:
            return fitting[0] if place.strategy == "PACK" else fitting[-1]
    return RaySize(counts[-1], place.cpus or math.ceil(num_ranks / counts[-1]))


def describe_shortage(asked: Sequence[float], nodes: Sequence[RayNode]) -> str:
    """What is asked for, and what is there. Pure."""
    offers = ", ".join(f"{node.name} {node.free_cpus:g} of {node.cpus:g}" for node in nodes)
    each, wait = (" each", "wait") if len(asked) > 1 else ("", "waits")
    return (
        f"{plural(len(asked), 'host')} with {max(asked):g} CPUs{each} {wait} for room. Free CPUs "
        f"of {plural(len(nodes), 'node')}: {offers or 'none'}"
    )


def sends_in_private(found: ConnectedToRay, environment: Mapping[str, str]) -> bool:
    """Whether no one else reads what Ray sends: all nodes are this machine, or it has TLS."""
    if environment.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return True
    return all(node.name == found.own_address or is_loopback(node.name) for node in found.nodes)


class _RayProcess:
    """The process that talks to Ray, started here, and the pipes to it."""

    def __init__(self) -> None:
        self._unread = b""
        self._has_ended = False
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "shoal.cluster.ray_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the supervisor
        )

    def send(self, message: ToRay) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # `read` finds it
            self._process.stdin.write(encode_line(message))
            self._process.stdin.flush()

    def read(self, timeout_s: float) -> list[FromRay]:
        """What has come; at the end of the stream, that it failed."""
        assert self._process.stdout is not None
        if self._has_ended or self._process.stdout.closed:
            return []
        source = self._process.stdout.fileno()
        if not readable([source], timeout_s):
            return []
        content = os.read(source, 1 << 16)
        if not content:
            self._has_ended = True
            status = describe_exit(self._process.wait())
            return [RayFailed(f"the process that talks to it {status}")]
        *lines, self._unread = (self._unread + content).split(b"\n")
        return [FROM_RAY.decode(line) for line in lines]

    def close(self) -> None:
        assert self._process.stdin is not None
        if self._process.stdin.closed:
            return
        with suppress(BrokenPipeError):
            self._process.stdin.close()  # at which it ends
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # at which Ray takes back what it gave
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


class RayStarter:
    """Starts host agents on a Ray cluster."""

    is_host = False

    def __init__(
        self,
        place: RayPlace,
        num_ranks: int | None,
        most_hosts: int,
        timeout_s: float,
        *,
        python: str = "",
        trusts_network: bool = False,
    ):
        """A run has `most_hosts` at the most, each with CPUs for its part of `num_ranks` (None: as
        many as there are). Agents that find no room in `timeout_s` are given up. `python` runs
        them; if empty, that of Ray's workers."""
        if place.address.startswith("http"):
            raise UsageError(
                f"--on ray:{place.address}: that is Ray's dashboard, which `shoal submit` takes. "
                "Give host:port of Ray's first node (6379 by default)."
            )
        if find_spec("ray") is None:
            raise UsageError(
                "--on ray: ray is not installed, and this needs it. Install it with: "
                "pip install 'shoal-ml[ray]'"
            )
        self._place, self._num_ranks, self._most = place, num_ranks, most_hosts
        self._timeout_s, self._python = timeout_s, python
        self._trusts_network = trusts_network
        self._connection: ConnectedToRay | None = None
        self._size: RaySize | None = None
        self._ended: list[str] = []
        self._short_since: float | None = None
        self._told_at = 0.0
        self._num_starts = 0
        self._process = _RayProcess()
        self._process.send(ConnectToRay(place.address, CONNECT_S))

    @property
    def size(self) -> RaySize:
        if self._size is None:
            nodes = self.connect().nodes
            self._size = choose_size(self._place, self._num_ranks, self._most, nodes)
        return self._size

    @property
    def num_hosts(self) -> int:
        return self.size.num_hosts

    @property
    def slots(self) -> int:
        """How many ranks each host takes."""
        return self.size.cpus

    @property
    def peer(self) -> str:
        """This machine listens at the address by which Ray knows it, or that leads to Ray."""
        found = self.connect()
        return found.own_address or found.head.rpartition(":")[0]

    def connect(self) -> ConnectedToRay:
        """Wait until Ray has answered. UsageError says why it does not."""
        deadline = time.monotonic() + CONNECT_S
        while self._connection is None:
            left_s = deadline - time.monotonic()
            if left_s < 0:
                self.close()
                raise UsageError(f"{self._place.name} did not answer within {CONNECT_S:g} s.")
            for message in self._process.read(left_s):
                self._handle(message)
        return self._connection

    def start(self, invitation: bytes, count: int) -> None:
        variables = {name: os.environ[name] for name in _SHARED_VARIABLES if name in os.environ}
        self._num_starts += 1
        self._short_since = None
        strategy = self._place.strategy
        self._process.send(
            AskForAgents(invitation, count, self.slots, strategy, self._python, variables)
        )

    def poll(self) -> list[str]:
        """Agents that ended; FormError if those of the beginning find no room in time."""
        for message in self._process.read(0):
            self._handle(message)
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        self._process.close()

    def _handle(self, message: FromRay) -> None:
        match message:
            case ConnectedToRay():
                if not (self._trusts_network or sends_in_private(message, os.environ)):
                    self.close()
                    raise UsageError(NOT_PRIVATE)
                self._connection = message
            case AgentEnded():
                self._ended.append(f"{self._place.name}: {message.how}{self._way_in(message.how)}")
            case NoRoom():
                self._note_shortage(message)
            case RayFailed():
                self.close()
                raise self._why_failed(message.why)

    def _way_in(self, how: str) -> str:
        """What to do where the nodes of a cluster do not reach a client from outside."""
        if not self._place.address.startswith("ray://") or "No answer came from" not in how:
            return ""
        return (
            f" Its nodes must reach this machine. If they cannot, run the command among them: "
            f"shoal submit --on {self._place.address}"
        )

    def _note_shortage(self, message: NoRoom) -> None:
        now = time.monotonic()
        if not message.asked:
            self._short_since = None
            return
        self._short_since = self._short_since or now
        what = f"{self._place.name}: {describe_shortage(message.asked, message.nodes)}"
        if now - self._short_since > self._timeout_s and self._num_starts == 1:
            raise FormError(
                f"{what}. None came in {self._timeout_s:g} s. Ask for fewer ranks, or for more "
                "and smaller hosts (--on ray:hosts=N), add nodes, or wait longer with "
                "--join-timeout."
            )
        if now - self._short_since > TELL_S and now - self._told_at > REMIND_S:
            self._told_at = now
            limit = f" The limit is {self._timeout_s:g} s." if self._num_starts == 1 else ""
            log.warning("%s.%s", what, limit)

    def _why_failed(self, why: str) -> UsageError | FormError:
        if self._connection is not None:
            return FormError(f"{self._place.name} was lost: {why}")
        way_out = (
            "Start a cluster (`ray start --head`), or name the one there is: --on ray:HOST:PORT, "
            "or RAY_ADDRESS in the environment."
        )
        if "token" in why.lower() or os.environ.get("RAY_AUTH_MODE") == "token":
            way_out += (
                " Its token may be another one: RAY_AUTH_MODE=token takes that of "
                "RAY_AUTH_TOKEN, of the file RAY_AUTH_TOKEN_PATH, or of ~/.ray/auth_token."
            )
        return UsageError(f"{self._place.name} cannot be used: {why.rstrip('.')}. {way_out}")
