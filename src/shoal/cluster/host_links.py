"""The first host's connections to the agents of the others: who joins, and what each is sent.

A host joins through a socket that needs the run's keys, with its versions, which must be those of
the first one. It is sent the run (`PrepareHost`) and the files that it lacks, prepares, and is
accepted if it found the same facts. A host that is silent for too long is lost.

Cost: a small message to each host and back, five times a second. Read next: `host_channel.py`,
for the messages; `hosts.py`, which makes one `Processes` of all hosts.
"""

import platform
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import zmq

from shoal import __version__
from shoal.cluster.bundle import Bundle
from shoal.cluster.host_channel import (
    FROM_HOST,
    MOST_BYTES,
    PACKET,
    EndMembers,
    FilePart,
    HostChannel,
    HostFailed,
    HostLog,
    HostPrepared,
    JoinAccepted,
    JoinAgain,
    JoinRefused,
    JoinRequest,
    MembersGone,
    NeedFiles,
    Packet,
    PrepareHost,
    RunEnded,
    ToHost,
    encode,
)
from shoal.comm.endpoint import Endpoint
from shoal.comm.wire import BadFrame, Context, Socket, decode, listen
from shoal.system.awake_clock import AwakeClock
from shoal.system.fork_server import HostJoined, HostLost, Report, WorkerExited, WorkerStarted

GRACE_S = 2.0  # for hosts to end their members, and to receive `RunEnded`
_NOT_COMPARED = ("cuts", "run")  # text for the screen; and fields that are compared one by one


class JoinRules(NamedTuple):
    """Who may join, and what a host is told then."""

    num_hosts: int
    num_others: int  # beside this one
    timeout_s: float  # of silence, after which a host is lost
    rejoin_s: float  # for which a host that was cut off tries to come back
    slots: int | None = None  # of each host; None: its cores


class RemoteHost:
    """The first host's record of another host."""

    def __init__(self, number: int, socket: bytes, request: JoinRequest, now: float):
        self.number, self.socket, self.channel = number, socket, HostChannel(now)
        self.name = f"host {number} ({request.name}, {request.address})"
        self.cores = request.cores
        self.pids: dict[int, int] = {}
        self.is_prepared = False
        self.sees_checkpoints = False
        self.lost = ""  # how it was lost; empty while it is connected
        self.is_told = False  # whether its loss was reported

    def prepared(self, found: HostPrepared) -> None:
        self.is_prepared, self.sees_checkpoints = True, found.sees_checkpoints

    def lose(self, how: str) -> None:
        self.lost = self.lost or how
        self.pids.clear()


class Preparation(NamedTuple):
    """What hosts are sent once the first one has prepared."""

    message: PrepareHost
    bundle: Bundle
    facts: dict[str, Any]  # to compare theirs with
    show: Callable[[], None]  # makes what a host must see, before it is asked for it


class HostLinks:
    """Call `open` first, and `dismiss` at the end."""

    def __init__(self, reach: Endpoint, rules: JoinRules, logs: Path):
        self.hosts: dict[bytes, RemoteHost] = {}  # by their sockets
        self.reports: deque[Report] = deque()
        self._refused: list[str] = []  # why hosts were refused, or failed
        self.address = ""
        self.run_ended = RunEnded(1, "")
        self.has_begun = self.is_closing = False
        self._reach, self._rules, self._logs = reach, rules, logs
        self._clock = AwakeClock()
        self._preparation: Preparation | None = None
        self._next = 1  # the number of the next host
        self._context: Context | None = None
        self._router: Socket | None = None

    def open(self, port: int | None = None) -> None:
        """Listen. This starts threads, so no process may be forked from here afterwards."""
        self._context = zmq.Context()
        self._router, self.address = listen(self._context, *self._reach.place, MOST_BYTES, port)

    @property
    def poll_sources(self) -> list[Any]:
        return [] if self._router is None else [self._router]

    @property
    def live(self) -> list[RemoteHost]:
        return [host for host in self.hosts.values() if not host.lost]

    @property
    def cores(self) -> dict[int, int]:
        """How many ranks each connected host takes, by its number."""
        return {host.number: self._rules.slots or host.cores for host in self.live}

    def prepare(self, preparation: Preparation) -> None:
        """Send this to all hosts that are here, and to each that comes."""
        self._preparation = preparation
        for host in self.live:
            self._prepare_host(host)

    def begin(self) -> None:
        """The run begins: from now on hosts that come or go are reported."""
        self.has_begun = True

    def take_refused(self) -> list[str]:
        """Why hosts were refused since the last call, or failed."""
        refused, self._refused = self._refused, []
        return refused

    def turn(self, timeout_s: float = 0.0, others: Sequence[Any] = ()) -> None:
        """Receive packets of the hosts, and send those that are due; `others` end the wait too."""
        assert self._router is not None
        poller = zmq.Poller()
        for source in (self._router, *others):
            poller.register(source, zmq.POLLIN)
        poller.poll(int(1000 * timeout_s))
        now = self._clock()
        while self._router.poll(0):
            socket, *frames = self._router.recv_multipart()
            with suppress(BadFrame):  # not a packet of a host
                self._handle(socket, decode(frames[-1], PACKET), now)
        for host in list(self.hosts.values()):
            for packet in host.channel.due(now):
                self._send_packet(host, packet)
            silent_s = host.channel.silent_s(now)
            if silent_s > self._rules.timeout_s:
                host.lose(f"was silent for {silent_s:.1f} s")

    def forget_lost(self) -> int:
        """Forget hosts that are lost, once that was reported, and tell those that can hear it to
        join again as new ones. Returns how many."""
        gone = [h for h in self.hosts.values() if h.lost and (h.is_told or not self.has_begun)]
        for host in gone:
            self.send(host, JoinAgain())
            del self.hosts[host.socket]
        return len(gone)

    def report_lost(self) -> None:
        """Report each lost host once, after all that it reported itself."""
        for host in self.hosts.values():
            if host.lost and not host.is_told:
                host.is_told = True
                self.reports.append(HostLost(host.number, f"{host.name} {host.lost}"))

    def end_members(self) -> None:
        """End the members of all hosts, and wait until they have."""
        if self.is_closing or self._router is None:
            return
        self.is_closing = True
        waited = self.live
        for host in waited:
            self.send(host, EndMembers())
        self._wait(lambda: all(host.lost for host in waited))

    def dismiss(self) -> None:
        """End all members, and send all hosts how the run ended."""
        if self._router is None:
            return
        self.end_members()
        now = self._clock()
        there = [host for host in self.hosts.values() if host.channel.silent_s(now) < 1]
        for host in there:
            self.send(host, self.run_ended)
        self._wait(lambda: all(host.channel.is_acknowledged for host in there))
        self._router.close(linger=500)
        assert self._context is not None
        self._context.term()
        self._router = None

    def _wait(self, is_done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + GRACE_S
        while not is_done() and time.monotonic() < deadline:
            self.turn(0.02)

    def _handle(self, socket: bytes, packet: Packet, now: float) -> None:
        host = self.hosts.get(socket)
        if host is None:
            self._admit(socket, packet, now)
            return
        content = host.channel.receive(packet, now)
        if content is None:
            return
        match message := decode(content, FROM_HOST):
            case WorkerStarted() if not host.lost:
                host.pids[message.number] = message.pid
                self.reports.append(message)
            case WorkerExited() if not host.lost:
                host.pids.pop(message.number, None)
                self.reports.append(message)
            case NeedFiles() if self._preparation is not None:
                part = self._preparation.bundle.part(message.start)
                self.send(host, FilePart(message.start, part))
            case HostPrepared():
                self._judge(host, message)
            case HostFailed():
                self._refuse(host, message.why)
            case HostLog():
                keep_log(message, self._logs)
            case MembersGone():
                host.lose(message.how)

    def _admit(self, socket: bytes, packet: Packet, now: float) -> None:
        """Accept a host, or refuse it with a reason."""
        if packet.number != 1:
            return  # a heartbeat of a host that was refused
        request = decode(packet.content, FROM_HOST)
        if not isinstance(request, JoinRequest):
            return
        taken = {host.number for host in self.hosts.values()}
        # Once a run has begun a number is never given twice.
        free = range(self._next if self.has_begun else 1, self._next + 1)
        host = RemoteHost(next(n for n in free if n not in taken), socket, request, now)
        host.channel.receive(packet, now)
        why = describe_difference(own_versions(), request.versions)
        if len(self.live) >= self._rules.num_others:
            why = f"The run has all of its {self._rules.num_hosts} hosts already."
        if why or self.is_closing:
            self._refused.append(f"a host ({request.name}, {request.address}): {why}")
            self.send(host, JoinRefused("The run has ended." if self.is_closing else why))
            return
        self.hosts[socket] = host
        self._next = max(self._next, host.number + 1)
        self.send(host, JoinAccepted(host.number, self._rules.timeout_s, self._rules.rejoin_s))
        if self._preparation is not None:
            self._prepare_host(host)

    def _prepare_host(self, host: RemoteHost) -> None:
        assert self._preparation is not None
        self._preparation.show()
        self.send(host, self._preparation.message)

    def _judge(self, host: RemoteHost, found: HostPrepared) -> None:
        """Accept a host that has prepared the same run."""
        assert self._preparation is not None
        if why := describe_difference(self._preparation.facts, found.facts):
            self._refuse(host, why)
            return
        host.prepared(found)
        if self.has_begun:
            self.reports.append(HostJoined(host.number, self.cores[host.number]))

    def _refuse(self, host: RemoteHost, why: str) -> None:
        self._refused.append(f"{host.name}: {why}")
        self.send(host, JoinRefused(why))
        del self.hosts[host.socket]

    def send(self, host: RemoteHost, message: ToHost) -> None:
        self._send_packet(host, host.channel.wrap(encode(message), self._clock()))

    def _send_packet(self, host: RemoteHost, packet: Packet) -> None:
        assert self._router is not None
        with suppress(zmq.ZMQError):  # it has gone, or will be sent this again
            self._router.send_multipart([host.socket, encode(packet)], zmq.NOBLOCK)


def keep_log(log: HostLog, directory: Path) -> None:
    """Write what a host sent of its logs, beside those of this host; names of logs only."""
    if log.name == Path(log.name).name and log.name.endswith(".log"):
        with suppress(OSError), open(directory / log.name, "ab") as file:
            file.write(log.content)


def own_versions() -> dict[str, str]:
    """Of what all hosts need alike: other versions may compute other bits."""
    return {
        "shoal": __version__,
        "python": platform.python_version(),
        "torch": version("torch"),
        "numpy": version("numpy"),
    }


def comparable_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same on all hosts: versions, and what the preparation found of the run."""
    fields = {name: field["value"] for name, field in facts.get("run", {}).items()}
    rest = {name: value for name, value in facts.items() if name not in _NOT_COMPARED}
    return own_versions() | fields | rest


def describe_difference(own: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """What differs first, in a sentence; empty if nothing does. Pure."""
    for name in {**own, **theirs}:
        if own.get(name) != theirs.get(name):
            here, there = (str(found.get(name))[:200] for found in (own, theirs))
            return (
                f"{name} is {here} on the first host and {there} on this one. All hosts of a run "
                "need the same recipe, data, and versions of Python, Shoal, torch and NumPy."
            )
    return ""
