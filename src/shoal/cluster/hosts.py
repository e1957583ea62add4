"""All hosts of a run, with a nursery on each; to the supervisor they are one.

The first host, number 0, is the one of `shoal train`. The others come in through a socket that
only holders of the run's keys can use, and carry out its orders (`joining.py`). A host is taken if
what it found of the run is what the first one found. One that is silent for too long, or whose
nursery ends, is lost, and the run with it, since nobody else can fill its seats.

Cost: a small message to each host and back, five times a second.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import zmq

from shoal.cluster.invitation import KEYS, Invitation, Options, invite, withdraw
from shoal.cluster.post import (
    FROM_HOST,
    LETTER,
    MOST_BYTES,
    End,
    Farewell,
    Gone,
    Hello,
    Letter,
    Post,
    Refused,
    ToHost,
    Welcome,
    encode,
)
from shoal.comm.reach import Reach, told_of
from shoal.comm.wire import BadFrame, Context, decode, listen, make_keys
from shoal.errors import FormError, UsageError
from shoal.formatting import plural
from shoal.plans.plan import Plan
from shoal.plans.size import Size, host_of, size_of
from shoal.system.fork_server import Birth, Born, Exited, Kill, Nursery, Report, Spawn

GRACE_S = 2.0  # for hosts to end their members, and to read how the run ended
REMIND_S = 30.0  # after which it is told again who is missing
_NOT_COMPARED = ("cuts", "run")  # words for people; and fields that are compared one by one


class Listening(NamedTuple):
    """What a run that spans hosts was asked for."""

    address: str
    timeout_s: float  # for hosts to join
    heartbeat_timeout_s: float
    recipe: str
    settings: dict[str, str]
    options: dict[str, Any]  # of the command line, for the preparation


class _Host:
    """Another host, as the first one knows it."""

    def __init__(self, number: int, socket: bytes, hello: Hello, now: float):
        self.number, self.socket, self.post = number, socket, Post(now)
        self.name = f"host {number} ({hello.name}, {hello.address})"
        self.pids: dict[int, int] = {}
        self.lost = ""  # how it was; empty while it is there


@contextmanager
def gathered(
    nursery: Nursery,
    facts: dict[str, Any],
    listening: Listening,
    run_dir: Path,
    watch: Callable[[dict[str, Any]], None],
    sockets: str,
) -> Iterator["Hosts"]:
    """Invite hosts, and wait until all are there. They are dismissed when the block ends.

    `sockets` is the directory for those of processes of one host.
    """
    plan = Plan.parse(facts["plan"])
    if plan.hosts == 1:
        raise UsageError(
            f"--listen has no effect under {facts['plan'] or 'data=1'!r}, which has one host. Add "
            "hosts=H to the plan, or leave --listen out."
        )
    try:
        reach = Reach(sockets, listening.address, make_keys(run_dir / KEYS))
        hosts = Hosts(nursery, facts, reach, run_dir, listening.heartbeat_timeout_s)
        try:
            invitation = Invitation(
                address=hosts.address,
                directory=str(Path.cwd()),
                run_dir=str(run_dir),
                recipe=listening.recipe,
                settings=listening.settings,
                options=Options(**listening.options | {"plan": facts["plan"]}),
            )
            invite(invitation, run_dir)
            hosts.gather(watch, listening.timeout_s)
            yield hosts
        finally:
            hosts.dismiss()
    finally:
        withdraw(run_dir)


class Hosts:
    """A nursery to the supervisor; `gather` first, and `dismiss` at the end."""

    def __init__(
        self, own: Nursery, facts: dict[str, Any], reach: Reach, run_dir: Path, timeout_s: float
    ):
        plan = Plan.parse(facts["plan"])
        self.reach, self.num_hosts, self.farewell = reach, plan.hosts, Farewell(1, "")
        self._own, self._run_dir, self._timeout_s = own, run_dir, timeout_s
        self._size, self._facts = size_of(plan), comparable(facts)
        self._told = told_of(reach.address, run_dir / KEYS)
        self._hosts: dict[bytes, _Host] = {}  # by their sockets
        self._reports: deque[Report] = deque()
        self._where: dict[int, int] = {}  # the host of each member
        self._is_closing = False
        self._context: Context = zmq.Context()
        self._router, self.address = listen(self._context, *reach.place, MOST_BYTES)

    @property
    def ears(self) -> list[Any]:
        return [*self._own.ears, self._router]

    @property
    def pids(self) -> dict[int, int]:
        """Of members, each with that of its host."""
        found = dict(self._own.pids)
        for host in self._hosts.values():
            found |= host.pids
        return found

    def gather(self, watch: Callable[[dict[str, Any]], None], timeout_s: float) -> None:
        """Wait until all hosts are there. `watch` is told who joins, leaves and is missing."""
        deadline, told_at, known = time.monotonic() + timeout_s, 0.0, set[str]()
        while True:
            names = {host.name for host in self._hosts.values()}
            for name in sorted(names ^ known):
                watch({"event": "host-joined" if name in names else "host-left", "name": name})
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
                told = {"count": missing, "run_dir": str(self._run_dir)}
                watch({"event": "hosts-missing", **told})
            self._turn(0.1)
            # Before the run begins another host may take its place.
            self._hosts = {s: host for s, host in self._hosts.items() if not host.lost}

    def spawn(self, birth: Birth) -> None:
        self._where[birth.number] = birth.host
        host = self._host_of(birth.number)
        if host is None:
            self._own.spawn(msgspec.structs.replace(birth, told=birth.told | self._told))
        else:
            self._write(host, Spawn(birth))

    def kill(self, number: int, signal_number: int = 9) -> None:
        host = self._host_of(number)
        if host is None:
            self._own.kill(number, signal_number)
        else:
            self._write(host, Kill(number, signal_number))

    def next_report(self, timeout_s: float | None = None) -> Report | None:
        """What happened on any host; EOFError when one is lost."""
        self._turn(0.0 if self._reports else timeout_s)
        if any(host.lost for host in self._hosts.values()):
            raise EOFError("a host is lost")
        while (report := self._own.next_report(0)) is not None:
            self._reports.append(report)
        return self._reports.popleft() if self._reports else None

    def why_gone(self) -> str:
        lost = [f"{host.name} {host.lost}" for host in self._hosts.values() if host.lost]
        if not lost:
            return self._own.why_gone()
        return f"{'; '.join(lost)}. Nobody else can fill its seats. Go on with --resume"

    def close(self) -> None:
        """End the members of all hosts."""
        if self._is_closing:
            return
        self._is_closing = True
        self._own.close()
        for host in self._hosts.values():
            self._write(host, End())
        self._wait(lambda: all(host.lost for host in self._hosts.values()))

    def dismiss(self) -> None:
        """End what runs, and tell all hosts how the run ended."""
        self.close()
        there = [host for host in self._hosts.values() if host.post.silent_s(time.monotonic()) < 1]
        for host in there:
            self._write(host, self.farewell)
        self._wait(lambda: all(host.post.is_read for host in there))
        self._router.close(linger=500)
        self._context.term()

    def _wait(self, is_done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + GRACE_S
        while not is_done() and time.monotonic() < deadline:
            self._turn(0.02)

    def _turn(self, timeout_s: float | None) -> None:
        """Hear hosts, and see to it that they hear from here."""
        poller = zmq.Poller()
        # The nursery of this host has ended by then, and cannot be listened to any more.
        for ear in [self._router] if self._is_closing else self.ears:
            poller.register(ear, zmq.POLLIN)
        poller.poll(None if timeout_s is None else int(1000 * timeout_s))
        now = time.monotonic()
        while self._router.poll(0):
            socket, *frames = self._router.recv_multipart()
            with suppress(BadFrame):  # nothing that a host says
                self._hear(socket, decode(frames[-1], LETTER), now)
        for host in self._hosts.values():
            for letter in host.post.due(now):
                self._send(host, letter)
            silent_s = host.post.silent_s(now)
            if silent_s > self._timeout_s:
                host.lost = host.lost or f"was silent for {silent_s:.1f} s"

    def _hear(self, socket: bytes, letter: Letter, now: float) -> None:
        host = self._hosts.get(socket)
        if host is None:
            self._meet(socket, letter, now)
            return
        content = host.post.read(letter, now)
        if content is None:
            return
        match message := decode(content, FROM_HOST):
            case Born():
                host.pids[message.number] = message.pid
                self._reports.append(message)
            case Exited():
                host.pids.pop(message.number, None)
                self._reports.append(message)
            case Gone():
                host.pids.clear()
                host.lost = host.lost or message.how

    def _meet(self, socket: bytes, letter: Letter, now: float) -> None:
        """Take a host in, or say why not."""
        if letter.number != 1:
            return  # a sign of life of a host that was refused
        hello = decode(letter.content, FROM_HOST)
        if not isinstance(hello, Hello):
            return
        free = {*range(1, self.num_hosts)} - {host.number for host in self._hosts.values()}
        host = _Host(min(free, default=0), socket, hello, now)
        host.post.read(letter, now)
        if why := self._why_not(hello, bool(free)):
            self._write(host, Refused(why))
            return
        self._hosts[socket] = host
        seats = seats_in_words(host.number, self._size, self.num_hosts)
        self._write(host, Welcome(host.number, seats, self._timeout_s))

    def _why_not(self, hello: Hello, has_room: bool) -> str:
        """Why a host is refused; empty if it is taken."""
        if self._is_closing:
            return "The run has ended."
        if not has_room:
            return (
                f"The run has all of its {self.num_hosts} hosts already. hosts=H in the plan says "
                "how many there are."
            )
        if not (self._run_dir / hello.log).exists():
            return (
                f"The first host does not see {hello.log} in the run directory, which this one "
                "wrote there. It must lie on a file system that all hosts see."
            )
        return why_unlike(self._facts, hello.facts)

    def _host_of(self, member: int) -> _Host | None:
        """The other host that a member is on; None if it is on this one."""
        number = self._where.get(member, 0)
        return next((host for host in self._hosts.values() if host.number == number), None)

    def _write(self, host: _Host, message: ToHost) -> None:
        self._send(host, host.post.write(encode(message), time.monotonic()))

    def _send(self, host: _Host, letter: Letter) -> None:
        with suppress(zmq.ZMQError):  # it is gone, or will be sent this again
            self._router.send_multipart([host.socket, encode(letter)], zmq.NOBLOCK)


def seats_in_words(host: int, size: Size, num_hosts: int) -> str:
    """The ranks and servers of a host, for people."""
    own = [seat for seat in range(sum(size)) if host_of(seat, size, num_hosts) == host]
    ranks = [seat for seat in own if size.server_of(seat) is None]
    servers = [server for seat in own if (server := size.server_of(seat)) is not None]
    return f"{_listed('rank', ranks)} and {_listed('server', servers)}"


def _listed(name: str, numbers: Sequence[int]) -> str:
    return f"{name}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def comparable(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same on all hosts: versions, and what the preparation found of the run."""
    versions = {name: version(name) for name in ("shoal", "torch")}
    fields = {name: field["value"] for name, field in facts.get("run", {}).items()}
    rest = {name: value for name, value in facts.items() if name not in _NOT_COMPARED}
    return versions | fields | rest


def why_unlike(own: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """What differs first, in a sentence; empty if nothing does. Pure."""
    for name in {**own, **theirs}:
        if own.get(name) != theirs.get(name):
            here, there = (str(found.get(name))[:200] for found in (own, theirs))
            return (
                f"{name} is {here} on the first host and {there} on this one. All hosts of a run "
                "need the same recipe, data, and versions of Shoal and torch."
            )
    return ""
