"""The agent of a host: it prepares the run it is sent, and starts and signals members as asked.

It knows an address and keys (`invitation.py`); the run, its settings and its files come through the
channel. Members are forked from a fork server of its own, and connect to the supervisor themselves.
If the first host is silent for longer than the agreed timeout, the agent ends its members, so that
none is left of a run that has ended or goes on elsewhere, and tries to join again as a new host.

What it writes is in a directory that only this user can enter and that is removed at the end; logs
of members are sent to the first host then, unless it sees them. Read next: `host_channel.py`,
`host_links.py`.
"""

import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import zmq

from shoal.cluster.backend import Facts
from shoal.cluster.bundle import below, has_all, unpack
from shoal.cluster.checkpoint_proof import sees_checkpoints, sees_file
from shoal.cluster.host_channel import (
    PACKET,
    PROOF,
    TO_HOST,
    EndMembers,
    FilePart,
    FromHost,
    HostChannel,
    HostFailed,
    HostPrepared,
    JoinAccepted,
    JoinAgain,
    JoinRefused,
    JoinRequest,
    MembersGone,
    NeedFiles,
    PrepareHost,
    RunEnded,
    SeatsTaken,
    encode,
)
from shoal.cluster.host_links import comparable_facts, own_versions
from shoal.cluster.host_members import HostMembers
from shoal.cluster.invitation import Invitation
from shoal.cluster.local import NotLoaded, prepared_fork_server
from shoal.cluster.scratch import scratch_directory
from shoal.comm.endpoint import address_towards, hold_keys, host_environment
from shoal.comm.wire import BadFrame, Context, decode
from shoal.comm.wire import connect as connect_to
from shoal.errors import ShoalError, UsageError
from shoal.system.awake_clock import AwakeClock
from shoal.system.fork_server import SignalWorker, SpawnWorker, WorkerMain
from shoal.world import cores

POLL_S = 0.05
ANSWER_S = 10.0  # for the first host's first answer
GOODBYE_S = 2.0  # for the first host to receive why this one leaves
_RUN = "run.msgpack"  # the run, for the fork server

Tell = Callable[[str], None]


class HostRun(msgspec.Struct, frozen=True):
    """A run as this host has it: where its files and its own records are."""

    run: PrepareHost
    directory: str  # to work in
    run_dir: str
    sees_run_dir: bool
    sees_checkpoints: bool


PrepareHere = Callable[[HostRun], tuple[Facts, WorkerMain]]


class _CutOff(ShoalError):
    """The first host was silent for too long."""


class _Leave(Exception):
    """This session is over: the run has ended, or the first host wants this host to join again."""

    def __init__(self, ended: RunEnded | None):
        super().__init__()
        self.ended = ended


class AgentOptions(NamedTuple):
    """How an agent serves a run."""

    prepare: PrepareHere  # in the fork server
    tell: Tell  # for people
    address: str | None = None  # of this host; None: the one that leads to the first host
    scratch: str | None = None  # below which its directory is made; None: where temporary files go


def serve_run(invitation: Invitation, options: AgentOptions) -> RunEnded:
    """Join a run, and serve it until it is over. Call this from a process without threads."""
    assert invitation.keys is not None
    hold_keys(invitation.keys)  # before processes are forked
    address = options.address or address_towards(*invitation.endpoint)
    patience_s, rejoin_s, why = ANSWER_S, 0.0, ""
    while True:
        with scratch_directory("shoal-agent-", options.scratch) as scratch:
            session = AgentSession(invitation, address, scratch, options.tell, patience_s)
            try:
                ended = session.serve(options.prepare)
            except _CutOff as error:
                if not session.rejoin_s and not rejoin_s:
                    raise
                why = str(error)
            else:
                if ended is not None:
                    return ended
                why = ""
        rejoin_s = session.rejoin_s or rejoin_s
        if why and not _await_reachable(invitation.endpoint, rejoin_s):
            raise ShoalError(f"{why} Go on there with --resume, and join again.")
        options.tell("this host joins again")
        patience_s = max(ANSWER_S, session.rejoin_s)


def _await_reachable(endpoint: tuple[str, int], timeout_s: float) -> bool:
    """Whether the first host is there again in time. If its machine answers that nothing listens,
    the run is over."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            with socket.create_connection(endpoint, timeout=1.0):
                return True
        except ConnectionRefusedError:
            return False
        except OSError:
            time.sleep(0.2)
    return False


def _prepare_when_told(told: int, path: Path, prepare: PrepareHere) -> tuple[Facts, WorkerMain]:
    """In the fork server, which was forked before the agent had a thread."""
    os.read(told, 1)
    here = msgspec.msgpack.decode(path.read_bytes(), type=HostRun)
    os.chdir(here.directory)
    return prepare(here)


class AgentSession:
    """One membership in the run, from the request to join to the end; `host_links.py` has the first
    host's side."""

    def __init__(
        self, invitation: Invitation, address: str, scratch: Path, tell: Tell, patience_s: float
    ):
        self._invitation, self._address, self._scratch = invitation, address, scratch
        self._tell, self._timeout_s = tell, patience_s
        self.rejoin_s = 0.0  # once it was accepted
        self._clock = AwakeClock()
        self._channel = HostChannel(self._clock())
        self._context: Context | None = None
        self._line: zmq.Socket[bytes] | None = None
        self._members: HostMembers | None = None  # once it has prepared
        self._here: HostRun | None = None
        self._wanted: PrepareHost | None = None
        self._received = bytearray()  # of the files

    def serve(self, prepare: PrepareHere) -> RunEnded | None:
        """Until the run is over; None if this host is to join again."""
        ends = os.pipe()
        sockets = self._scratch / "sockets"
        sockets.mkdir(mode=0o700)
        try:
            with prepared_fork_server(
                partial(_prepare_when_told, ends[0], self._scratch / _RUN, prepare),
                self._scratch / "recipe.log",
                meanwhile=partial(self._join, ends[1]),
                turn=self._turn,
            ) as (fork_server, facts):
                assert self._here is not None
                here, variables = self._here, host_environment(self._address, str(sockets))
                logs = None if here.sees_run_dir else Path(here.run_dir) / "logs"
                self._members = HostMembers(fork_server, variables, logs, self._tell)
                found = comparable_facts(facts)
                self._send(HostPrepared(found, here.sees_run_dir, here.sees_checkpoints))
                with self._members.handling_signals():
                    while True:
                        self._turn(POLL_S)
        except _Leave as leaving:
            return leaving.ended
        except (NotLoaded, UsageError) as error:
            self._say_why(str(error))
            raise
        finally:
            for end in ends:
                os.close(end)
            if self._line is not None and self._context is not None:
                self._line.close(linger=500)
                self._context.term()

    def _join(self, told: int) -> None:
        """Ask to join, until the run and its files are here; then let the fork server prepare."""
        invitation = self._invitation
        self._context = zmq.Context()
        identity = f"host.{secrets.token_hex(16)}".encode()
        self._line = connect_to(self._context, invitation.address, identity, invitation.keys)
        name = socket.gethostname()
        self._send(JoinRequest(name, self._address, cores(), own_versions()))
        while self._wanted is None:
            self._turn(POLL_S)
        try:
            self._here = self._settle(self._wanted)
            (self._scratch / _RUN).write_bytes(msgspec.msgpack.encode(self._here))
        except OSError as error:
            raise UsageError(
                f"This host cannot write to {self._scratch}, where it keeps the files of the run: "
                f"{error.strerror}. Make room there, or let TMPDIR name another directory."
            ) from error
        os.write(told, b"1")

    def _settle(self, run: PrepareHost) -> HostRun:
        """Find where this host works: in the same directory if it has the same files there."""
        sees_run_dir = sees_file(f"{run.run_dir}/{PROOF}", run.proof)
        place = run.options.checkpoints
        sees = sees_run_dir if place is None else sees_checkpoints(place, run.proof)
        if run.needs_run_dir and not sees_run_dir:
            raise UsageError(
                f"This host does not see the run directory {run.run_dir}, and the command's own "
                "machine is none of the hosts, so that the run's record would be lost. Name that "
                "machine too, or give a --run-dir that all hosts see."
            )
        if run.needs_checkpoints and not sees:
            raise UsageError(
                f"This host does not see {place or run.run_dir + '/checkpoints'}, where the run "
                "keeps its checkpoints. Give --checkpoints URL-or-shared-directory, a place that "
                "all hosts see."
            )
        directory = run.directory
        if not (os.path.isdir(directory) and has_all(run.files)):
            root = self._scratch / "files"
            self._receive_files(sum(file.num_bytes for file in run.files))
            unpack(run.files, bytes(self._received), root)
            self._received.clear()
            below(root, directory).mkdir(parents=True, exist_ok=True)
            directory = str(below(root, directory))
        run_dir = run.run_dir
        if not sees_run_dir:
            (self._scratch / "run" / "logs").mkdir(parents=True)
            run_dir = str(self._scratch / "run")
        return HostRun(run, directory, run_dir, sees_run_dir, sees)

    def _receive_files(self, num_bytes: int) -> None:
        while len(self._received) < num_bytes:
            before = len(self._received)
            self._send(NeedFiles(before))
            while len(self._received) == before:
                self._turn(POLL_S)

    def _turn(self, timeout_s: float = 0.0) -> None:
        """Receive packets, report what members do, and send packets that are due. _Leave at the
        end of the session."""
        assert self._line is not None
        poller = zmq.Poller()
        members = self._members
        for source in (self._line, *(() if members is None else members.poll_sources)):
            poller.register(source, zmq.POLLIN)
        poller.poll(int(1000 * timeout_s))
        now = self._clock()
        while self._line.poll(0):
            with suppress(BadFrame):
                packet = decode(self._line.recv_multipart()[-1], PACKET)
                if (content := self._channel.receive(packet, now)) is not None:
                    self._handle(decode(content, TO_HOST))
        if members is not None:
            try:
                for report in members.reports():
                    self._send(report)
            except EOFError:
                self._end_members(members.describe_loss())
            if (ended := members.forward_stop()) is not None:
                self._end_members(f"was interrupted by {members.last_signal}")
                self._flush()
                raise _Leave(ended)
        for packet in self._channel.due(now):
            self._send_packet(encode(packet))
        if self._channel.silent_s(now) > self._timeout_s:
            self._end_members("was cut off")
            raise self._why_silent()

    def _handle(self, message: Any) -> None:
        members = self._members
        match message:
            case JoinAccepted():
                self._timeout_s, self.rejoin_s = message.timeout_s, message.rejoin_s
                self._tell(f"this is host {message.host} of the run")
            case JoinRefused():
                raise UsageError(message.why)
            case PrepareHost():
                self._wanted = message
            case FilePart() if message.start == len(self._received):
                self._received += message.content
            case SeatsTaken():
                self._tell(f"the run begins, with {message.seats} on this host")
            case SpawnWorker() if members is not None:
                members.spawn(message)
            case SignalWorker() if members is not None:
                members.kill(message)
            case EndMembers():
                self._end_members("ended its members, as asked")
            case JoinAgain():
                self._end_members("was told to join again")
                raise _Leave(None)
            case RunEnded():
                self._send_packet(encode(self._channel.heartbeat()))
                raise _Leave(message)

    def _end_members(self, how: str) -> None:
        if self._members is None:
            self._send(MembersGone(how))
        elif self._members.end(how):
            for log in self._members.logs(self._scratch / "recipe.log"):
                self._send(log)
            self._send(MembersGone(how))

    def _why_silent(self) -> ShoalError:
        if not self.rejoin_s:
            return UsageError(
                f"No answer came from {self._invitation.address} within {self._timeout_s:g} s. The "
                "run has ended, this host cannot reach that address, or the run's keys have "
                "changed."
            )
        return _CutOff(
            f"The first host was silent for {self._timeout_s:g} s: it has ended, or cannot be "
            "reached. What ran here was ended."
        )

    def _say_why(self, why: str) -> None:
        """Tell the first host why this one leaves, if it can hear it."""
        if self._line is not None and self.rejoin_s:
            self._send(HostFailed(why))
            self._flush()

    def _flush(self) -> None:
        """Until the first host has received all, or for a while."""
        assert self._line is not None
        deadline = time.monotonic() + GOODBYE_S
        while not self._channel.is_acknowledged and time.monotonic() < deadline:
            if self._line.poll(20):
                with suppress(BadFrame):
                    packet = decode(self._line.recv_multipart()[-1], PACKET)
                    self._channel.receive(packet, self._clock())
            for packet in self._channel.due(self._clock()):
                self._send_packet(encode(packet))

    def _send(self, message: FromHost) -> None:
        self._send_packet(encode(self._channel.wrap(encode(message), self._clock())))

    def _send_packet(self, content: bytes) -> None:
        assert self._line is not None
        with suppress(zmq.Again):  # it will be sent again
            self._line.send(content, zmq.NOBLOCK)
