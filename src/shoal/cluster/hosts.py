"""The processes of all hosts of a run, as one `Processes` for the supervisor.

The first host, number 0, is that of `shoal train`. The others join through a socket that needs the
run's keys, and start and signal their members as it requests (`host_agent.py`). A host is accepted
if its preparation found the same facts as the first one's. If a host is silent for too long, or its
fork server ends, the run ends, since no other host can fill its seats.

Cost: a small message to each host and back, five times a second. Read next: `host_channel.py`.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import zmq

from shoal import __version__
from shoal.cluster.backend import StartedRun
from shoal.cluster.host_channel import (
    FROM_HOST,
    MOST_BYTES,
    PACKET,
    EndMembers,
    HostChannel,
    JoinAccepted,
    JoinRefused,
    JoinRequest,
    MembersGone,
    Packet,
    RunEnded,
    ToHost,
    encode,
)
from shoal.cluster.invitation import KEYS, Invitation, remove_invitation, write_invitation
from shoal.cluster.local import prepared_fork_server
from shoal.comm.endpoint import Endpoint, host_environment
from shoal.comm.unix import socket_directory
from shoal.comm.wire import BadFrame, Context, decode, listen, make_keys
from shoal.errors import FormError, UsageError
from shoal.events.events import HostJoinedEvent, HostLeftEvent, HostsMissingEvent, OnEvent
from shoal.formatting import plural
from shoal.plans.plan import Plan
from shoal.plans.resize import RunSize, host_of, size_of
from shoal.system.fork_server import (
    ForkServer,
    Prepare,
    Report,
    SignalWorker,
    SpawnWorker,
    WorkerExited,
    WorkerSpec,
    WorkerStarted,
)
from shoal.training.options import StartOptions

GRACE_S = 2.0  # for hosts to end their members, and to receive `RunEnded`
REMIND_S = 30.0  # between two messages about missing hosts
TURN_S = 0.1  # between two turns at the most, in which packets are sent
_NOT_COMPARED = ("cuts", "run")  # text for the screen; and fields that are compared one by one


class HostsBackend(NamedTuple):
    """The back end of several hosts: this one, and those that join."""

    address: str
    timeout_s: float  # for hosts to join
    heartbeat_timeout_s: float
    recipe: str
    settings: dict[str, str]
    options: StartOptions  # for the preparation

    @contextmanager
    def start(self, prepare: Prepare, run_dir: Path, watch: OnEvent) -> Iterator[StartedRun]:
        """Prepare here, then wait until all other hosts have joined."""
        with ExitStack() as held:
            sockets = held.enter_context(socket_directory(run_dir))
            output = run_dir / "logs" / "recipe.log"
            own, facts = held.enter_context(prepared_fork_server(prepare, output))
            joined = gather_hosts(own, facts, self, run_dir, watch, str(sockets))
            hosts = held.enter_context(joined)

            def end(exit_code: int, cause: str) -> None:
                hosts.run_ended = RunEnded(exit_code, cause)

            yield StartedRun(hosts, facts, hosts.reach, hosts.num_hosts, end)


class _RemoteHost:
    """The first host's record of another host."""

    def __init__(self, number: int, socket: bytes, request: JoinRequest, now: float):
        self.number, self.socket, self.channel = number, socket, HostChannel(now)
        self.name = f"host {number} ({request.name}, {request.address})"
        self.pids: dict[int, int] = {}
        self.lost = ""  # how it was lost; empty while it is connected


@contextmanager
def gather_hosts(
    fork_server: ForkServer,
    facts: dict[str, Any],
    listening: HostsBackend,
    run_dir: Path,
    watch: OnEvent,
    sockets: str,
) -> Iterator["Hosts"]:
    """Invite hosts, and wait until all have joined. They are dismissed when the block ends.

    `sockets` is the directory for Unix sockets of this host.
    """
    plan = Plan.parse(facts["plan"])
    if plan.hosts == 1:
        raise UsageError(
            f"--listen has no effect under {facts['plan'] or 'data=1'!r}, which has one host. Add "
            "hosts=H to the plan, or leave --listen out."
        )
    try:
        reach = Endpoint(sockets, listening.address, make_keys(run_dir / KEYS))
        hosts = Hosts(fork_server, facts, reach, run_dir, listening.heartbeat_timeout_s)
        try:
            invitation = Invitation(
                address=hosts.address,
                directory=str(Path.cwd()),
                run_dir=str(run_dir),
                recipe=listening.recipe,
                settings=listening.settings,
                options=msgspec.structs.replace(listening.options, plan=facts["plan"]),
            )
            write_invitation(invitation, run_dir)
            hosts.gather(watch, listening.timeout_s)
            yield hosts
        finally:
            hosts.dismiss()
    finally:
        remove_invitation(run_dir)


class Hosts:
    """`Processes` on all hosts; call `gather` first, and `dismiss` at the end."""

    def __init__(
        self,
        own: ForkServer,
        facts: dict[str, Any],
        reach: Endpoint,
        run_dir: Path,
        timeout_s: float,
    ):
        plan = Plan.parse(facts["plan"])
        self.reach, self.num_hosts, self.run_ended = reach, plan.hosts, RunEnded(1, "")
        self._own, self._run_dir, self._timeout_s = own, run_dir, timeout_s
        self._size, self._facts = size_of(plan), comparable_facts(facts)
        self._variables = host_environment(reach.address, run_dir / KEYS)
        self._hosts: dict[bytes, _RemoteHost] = {}  # by their sockets
        self._reports: deque[Report] = deque()
        self._host_numbers: dict[int, int] = {}  # member -> its host
        self._is_closing = False
        self._context: Context = zmq.Context()
        self._router, self.address = listen(self._context, *reach.place, MOST_BYTES)

    @property
    def poll_sources(self) -> list[Any]:
        return [*self._own.poll_sources, self._router]

    @property
    def pids(self) -> dict[int, int]:
        """The pids of members, each as its host knows it."""
        found = dict(self._own.pids)
        for host in self._hosts.values():
            found |= host.pids
        return found

    def gather(self, watch: OnEvent, timeout_s: float) -> None:
        """Wait until all hosts have joined; `watch` receives joins, exits and missing hosts."""
        deadline, told_at, known = time.monotonic() + timeout_s, 0.0, set[str]()
        while True:
            names = {host.name for host in self._hosts.values()}
            for name in sorted(names ^ known):
                watch(HostJoinedEvent(name=name) if name in names else HostLeftEvent(name=name))
            missing, now = self.num_hosts - 1 - len(names), time.monotonic()
            if not missing:
                return
            if now > deadline:
                raise FormError(
                    f"{plural(missing, 'host')} of {self.num_hosts} did not come within "
                    f"{timeout_s:g} s. Run `shoal join {self._run_dir}` on each of them meanwhile; "
                    "--join-timeout gives them longer."
                )
            if names != known or now - told_at > REMIND_S:
                known, told_at = names, now
                watch(HostsMissingEvent(count=missing, run_dir=str(self._run_dir)))
            self._turn(TURN_S)
            # Before the run begins another host may take its place.
            self._hosts = {s: host for s, host in self._hosts.items() if not host.lost}

    def spawn(self, spec: WorkerSpec) -> None:
        self._host_numbers[spec.number] = spec.host
        host = self._host_of(spec.number)
        if host is None:
            self._own.spawn(
                msgspec.structs.replace(spec, variables=spec.variables | self._variables)
            )
        else:
            self._send_message(host, SpawnWorker(spec))

    def kill(self, number: int, signal_number: int = 9) -> None:
        host = self._host_of(number)
        if host is None:
            self._own.kill(number, signal_number)
        else:
            self._send_message(host, SignalWorker(number, signal_number))

    def next_report(self, timeout_s: float | None = None) -> Report | None:
        """The next report of any host; EOFError when a host is lost."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            self._turn(0.0 if self._reports else min(TURN_S, left_s))
            if any(host.lost for host in self._hosts.values()):
                raise EOFError("a host is lost")
            while (report := self._own.next_report(0)) is not None:
                self._reports.append(report)
            if self._reports:
                return self._reports.popleft()
            if not left_s:
                return None

    def describe_loss(self) -> str:
        lost = [f"{host.name} {host.lost}" for host in self._hosts.values() if host.lost]
        if not lost:
            return self._own.describe_loss()
        return f"{'; '.join(lost)}. No other host can fill its seats. Go on with --resume"

    def close(self) -> None:
        """End the members of all hosts."""
        if self._is_closing:
            return
        self._is_closing = True
        self._own.close()
        for host in self._hosts.values():
            self._send_message(host, EndMembers())
        self._wait(lambda: all(host.lost for host in self._hosts.values()))

    def dismiss(self) -> None:
        """End all members, and send all hosts how the run ended."""
        self.close()
        there = [
            host for host in self._hosts.values() if host.channel.silent_s(time.monotonic()) < 1
        ]
        for host in there:
            self._send_message(host, self.run_ended)
        self._wait(lambda: all(host.channel.is_acknowledged for host in there))
        self._router.close(linger=500)
        self._context.term()

    def _wait(self, is_done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + GRACE_S
        while not is_done() and time.monotonic() < deadline:
            self._turn(0.02)

    def _turn(self, timeout_s: float | None) -> None:
        """Receive packets of the hosts, and send those that are due."""
        poller = zmq.Poller()
        # The fork server of this host has ended by then, and cannot be polled.
        for source in [self._router] if self._is_closing else self.poll_sources:
            poller.register(source, zmq.POLLIN)
        poller.poll(None if timeout_s is None else int(1000 * timeout_s))
        now = time.monotonic()
        while self._router.poll(0):
            socket, *frames = self._router.recv_multipart()
            with suppress(BadFrame):  # not a packet of a host
                self._handle(socket, decode(frames[-1], PACKET), now)
        for host in self._hosts.values():
            for packet in host.channel.due(now):
                self._send_packet(host, packet)
            silent_s = host.channel.silent_s(now)
            if silent_s > self._timeout_s:
                host.lost = host.lost or f"was silent for {silent_s:.1f} s"

    def _handle(self, socket: bytes, packet: Packet, now: float) -> None:
        host = self._hosts.get(socket)
        if host is None:
            self._admit(socket, packet, now)
            return
        content = host.channel.receive(packet, now)
        if content is None:
            return
        match message := decode(content, FROM_HOST):
            case WorkerStarted():
                host.pids[message.number] = message.pid
                self._reports.append(message)
            case WorkerExited():
                host.pids.pop(message.number, None)
                self._reports.append(message)
            case MembersGone():
                host.pids.clear()
                host.lost = host.lost or message.how

    def _admit(self, socket: bytes, packet: Packet, now: float) -> None:
        """Accept a host, or refuse it with a reason."""
        if packet.number != 1:
            return  # a heartbeat of a host that was refused
        request = decode(packet.content, FROM_HOST)
        if not isinstance(request, JoinRequest):
            return
        free = {*range(1, self.num_hosts)} - {host.number for host in self._hosts.values()}
        host = _RemoteHost(min(free, default=0), socket, request, now)
        host.channel.receive(packet, now)
        if why := self._why_refused(request, bool(free)):
            self._send_message(host, JoinRefused(why))
            return
        self._hosts[socket] = host
        seats = describe_seats(host.number, self._size, self.num_hosts)
        self._send_message(host, JoinAccepted(host.number, seats, self._timeout_s))

    def _why_refused(self, request: JoinRequest, has_room: bool) -> str:
        """Why a host is refused; empty if it is accepted."""
        if self._is_closing:
            return "The run has ended."
        if not has_room:
            return (
                f"The run has all of its {self.num_hosts} hosts already. hosts=H in the plan says "
                "how many there are."
            )
        if not (self._run_dir / request.log).exists():
            return (
                f"The first host does not see {request.log} in the run directory, which this one "
                "wrote there. It must lie on a file system that all hosts see."
            )
        return describe_difference(self._facts, request.facts)

    def _host_of(self, member: int) -> _RemoteHost | None:
        """The other host that a member is on; None if it is on this one."""
        number = self._host_numbers.get(member, 0)
        return next((host for host in self._hosts.values() if host.number == number), None)

    def _send_message(self, host: _RemoteHost, message: ToHost) -> None:
        self._send_packet(host, host.channel.wrap(encode(message), time.monotonic()))

    def _send_packet(self, host: _RemoteHost, packet: Packet) -> None:
        with suppress(zmq.ZMQError):  # it has gone, or will be sent this again
            self._router.send_multipart([host.socket, encode(packet)], zmq.NOBLOCK)


def describe_seats(host: int, size: RunSize, num_hosts: int) -> str:
    """The ranks and servers of a host, in words."""
    own = [seat for seat in range(sum(size)) if host_of(seat, size, num_hosts) == host]
    ranks = [seat for seat in own if size.server_of(seat) is None]
    servers = [server for seat in own if (server := size.server_of(seat)) is not None]
    return f"{_listed('rank', ranks)} and {_listed('server', servers)}"


def _listed(name: str, numbers: Sequence[int]) -> str:
    return f"{name}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def comparable_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same on all hosts: versions, and what the preparation found of the run."""
    versions = {"shoal": __version__, "torch": version("torch")}
    fields = {name: field["value"] for name, field in facts.get("run", {}).items()}
    rest = {name: value for name, value in facts.items() if name not in _NOT_COMPARED}
    return versions | fields | rest


def describe_difference(own: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """What differs first, in a sentence; empty if nothing does. Pure."""
    for name in {**own, **theirs}:
        if own.get(name) != theirs.get(name):
            here, there = (str(found.get(name))[:200] for found in (own, theirs))
            return (
                f"{name} is {here} on the first host and {there} on this one. All hosts of a run "
                "need the same recipe, data, and versions of Shoal and torch."
            )
    return ""
