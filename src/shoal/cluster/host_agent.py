"""The agent of a host that joins a run: it starts and signals members as the first host requests.

Its members are forked from a fork server of its own, and connect to the supervisor themselves. If
the first host is silent for longer than the agreed timeout, the agent ends them, so that none is
left of a run that has ended or continues elsewhere. Read next: `host_channel.py`, `hosts.py`.
"""

import secrets
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import zmq

from shoal.cluster.host_channel import (
    PACKET,
    TO_HOST,
    EndMembers,
    FromHost,
    HostChannel,
    JoinAccepted,
    JoinRefused,
    JoinRequest,
    MembersGone,
    RunEnded,
    encode,
)
from shoal.cluster.hosts import comparable_facts
from shoal.cluster.invitation import KEYS, Invitation
from shoal.cluster.local import prepared_fork_server
from shoal.comm.endpoint import address_towards, host_environment
from shoal.comm.wire import BadFrame, Context, Keys, connect, decode, load_keys
from shoal.errors import ShoalError, UsageError
from shoal.system.fork_server import (
    ForkServer,
    Prepare,
    SignalWorker,
    SpawnWorker,
    WorkerExited,
    WorkerStarted,
)
from shoal.system.processes import describe_exit, stop_signals

POLL_MS = 50
ANSWER_S = 10.0  # for the first host's first answer


def join_run(
    invitation: Invitation,
    prepare: Prepare,
    address: str | None,
    tell: Callable[[str], None],
) -> RunEnded:
    """Prepare as the first host did, join it, and serve it until the run is over.

    The working directory must be the one that the run was started in. `address` is this host's;
    None takes that of the interface towards the first host. Call this from a process that has not
    started a thread.
    """
    run_dir = Path(invitation.run_dir)
    keys = load_keys(run_dir / KEYS)
    address = address or address_towards(*invitation.endpoint)
    variables = host_environment(address, run_dir / KEYS)
    name = socket.gethostname()
    log = f"logs/recipe-{name}-{secrets.token_hex(3)}.log"
    with prepared_fork_server(prepare, run_dir / log) as (fork_server, facts):
        request = JoinRequest(name, address, comparable_facts(facts), log)
        return _HostAgent(fork_server, invitation.address, keys, variables, tell).run(request)


class _HostAgent:
    """This host's side; `hosts.py` has that of the first host."""

    def __init__(
        self,
        fork_server: ForkServer,
        address: str,
        keys: Keys,
        variables: dict[str, str],
        tell: Callable[[str], None],
    ):
        self._fork_server, self._address, self._variables, self._tell = (
            fork_server,
            address,
            variables,
            tell,
        )
        self._context: Context = zmq.Context()
        self._line = connect(self._context, address, f"host.{secrets.token_hex(16)}".encode(), keys)
        self._channel = HostChannel(time.monotonic())
        self._timeout_s = ANSWER_S
        self._is_accepted = False
        self._has_ended = False  # no member is left here, and no other will start
        self._signals: list[int] = []
        self._num_forwarded = 0  # of `_signals`
        self._run_ended: RunEnded | None = None

    def run(self, request: JoinRequest) -> RunEnded:
        """Serve the first host until the run is over. No process is left running afterwards."""
        handlers = {s: signal.signal(s, self._on_signal) for s in stop_signals()}
        try:
            self._send_message(request)
            while self._run_ended is None:
                self._turn()
            return self._run_ended
        finally:
            self._fork_server.close()
            for number, handler in handlers.items():
                signal.signal(number, handler)
            self._line.close(linger=500)
            self._context.term()

    def _on_signal(self, number: int, frame: object) -> None:
        self._signals.append(number)

    def _turn(self) -> None:
        poller = zmq.Poller()
        for source in (self._line, *([] if self._has_ended else self._fork_server.poll_sources)):
            poller.register(source, zmq.POLLIN)
        poller.poll(POLL_MS)
        now = time.monotonic()
        while self._line.poll(0):
            # If the fork server has ended, `_report` finds it.
            with suppress(BadFrame, BrokenPipeError):
                packet = decode(self._line.recv_multipart()[-1], PACKET)
                if (content := self._channel.receive(packet, now)) is not None:
                    self._handle(decode(content, TO_HOST))
        self._report()
        self._forward_stop()
        for packet in self._channel.due(now):
            self._send_packet(encode(packet))
        if self._run_ended is None and self._channel.silent_s(now) > self._timeout_s:
            raise self._why_silent()

    def _handle(self, message: Any) -> None:
        match message:
            case JoinAccepted():
                self._is_accepted, self._timeout_s = True, message.timeout_s
                self._tell(f"this is host {message.host} of the run, with {message.seats}")
            case JoinRefused():
                raise UsageError(message.why)
            case SpawnWorker() if not self._has_ended:
                spec = message.spec
                self._fork_server.spawn(
                    msgspec.structs.replace(spec, variables=spec.variables | self._variables)
                )
            case SignalWorker() if not self._has_ended:
                self._fork_server.kill(message.number, message.signal)
            case EndMembers():
                self._fork_server.close()
                self._report_gone("ended its members, as asked")
            case RunEnded():
                self._run_ended = message
                self._send_packet(encode(self._channel.heartbeat()))

    def _report(self) -> None:
        if self._has_ended:
            return
        try:
            while (report := self._fork_server.next_report(0)) is not None:
                assert isinstance(report, WorkerStarted | WorkerExited)
                self._send_message(report)
        except EOFError:
            how = describe_exit(self._fork_server.close())
            self._report_gone(f"lost the process that its ranks are forked from, which {how}")

    def _forward_stop(self) -> None:
        """The first signal asks the members here, and so all, for a clean stop. A second one, or
        one before there are members, ends this host's members now."""
        if len(self._signals) == self._num_forwarded:
            return
        self._num_forwarded = len(self._signals)
        number = self._signals[-1]
        if len(self._signals) > 1 or not self._fork_server.pids or self._has_ended:
            self._fork_server.close()
            self._report_gone(f"was interrupted by {signal.Signals(number).name}")
            self._run_ended = RunEnded(128 + number, "this host's part was interrupted")
            return
        self._tell("the run is asked to stop after a step; the same signal again ends at once")
        with suppress(BrokenPipeError):
            for member in self._fork_server.pids:
                self._fork_server.kill(member, signal.SIGTERM)

    def _report_gone(self, how: str) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._send_message(MembersGone(how))

    def _why_silent(self) -> ShoalError:
        if not self._is_accepted:
            return UsageError(
                f"No answer came from {self._address} within {self._timeout_s:g} s. The run has "
                "ended, this host cannot reach that address, or the run's keys have changed."
            )
        return ShoalError(
            f"The first host was silent for {self._timeout_s:g} s: it has ended, or cannot be "
            "reached. What ran here was ended. Go on there with --resume, and join again."
        )

    def _send_message(self, message: FromHost) -> None:
        self._send_packet(encode(self._channel.wrap(encode(message), time.monotonic())))

    def _send_packet(self, content: bytes) -> None:
        try:
            self._line.send(content, zmq.NOBLOCK)
        except zmq.Again:
            return  # it will be sent again
