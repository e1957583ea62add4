"""A host that joins a run: it carries out the orders of the first one, and reports.

Its members are forked from a nursery of its own and talk to the supervisor themselves; this process
only starts and kills them. If the first host is silent for as long as it said, they are ended here,
so that none is left of a run that is over or goes on elsewhere.
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

from shoal.cluster.hosts import comparable
from shoal.cluster.invitation import KEYS, Invitation
from shoal.cluster.local import nursed
from shoal.cluster.post import (
    LETTER,
    TO_HOST,
    End,
    Farewell,
    FromHost,
    Gone,
    Hello,
    Post,
    Refused,
    Welcome,
    encode,
)
from shoal.comm.reach import address_towards, told_of
from shoal.comm.wire import BadFrame, Context, Keys, connect, decode, load_keys
from shoal.errors import ShoalError, UsageError
from shoal.system.fork_server import Born, Exited, Kill, Nursery, Prepare, Spawn
from shoal.system.processes import how_it_ended, stop_signals

POLL_MS = 50
ANSWER_S = 10.0  # for the first host's first answer


def join_run(
    invitation: Invitation,
    prepare: Prepare,
    address: str | None,
    tell: Callable[[str], None],
) -> Farewell:
    """Prepare as the first host did, join it, and obey until the run is over.

    The working directory must be the one that the run was started in. `address` is this host's;
    None takes the one that leads to the first host. Call this from a process that has not started
    a thread.
    """
    run_dir = Path(invitation.run_dir)
    keys = load_keys(run_dir / KEYS)
    address = address or address_towards(*invitation.endpoint)
    told = told_of(address, run_dir / KEYS)
    name = socket.gethostname()
    log = f"logs/recipe-{name}-{secrets.token_hex(3)}.log"
    with nursed(prepare, run_dir / log) as (nursery, facts):
        hello = Hello(name, address, comparable(facts), log)
        return _Joined(nursery, invitation.address, keys, told, tell).obey(hello)


class _Joined:
    """This host's side of the conversation; `hosts.py` has the other one."""

    def __init__(
        self,
        nursery: Nursery,
        address: str,
        keys: Keys,
        told: dict[str, str],
        tell: Callable[[str], None],
    ):
        self._nursery, self._address, self._told, self._tell = nursery, address, told, tell
        self._context: Context = zmq.Context()
        self._line = connect(self._context, address, f"host.{secrets.token_hex(16)}".encode(), keys)
        self._post = Post(time.monotonic())
        self._timeout_s = ANSWER_S
        self._is_welcome = False
        self._is_gone = False  # no member is left here, nor will be
        self._signals: list[int] = []
        self._num_passed_on = 0  # of these
        self._farewell: Farewell | None = None

    def obey(self, hello: Hello) -> Farewell:
        """Do as the first host says until the run is over. Nothing is left running afterwards."""
        handlers = {s: signal.signal(s, self._on_signal) for s in stop_signals()}
        try:
            self._write(hello)
            while self._farewell is None:
                self._turn()
            return self._farewell
        finally:
            self._nursery.close()
            for number, handler in handlers.items():
                signal.signal(number, handler)
            self._line.close(linger=500)
            self._context.term()

    def _on_signal(self, number: int, frame: object) -> None:
        self._signals.append(number)

    def _turn(self) -> None:
        poller = zmq.Poller()
        for ear in (self._line, *([] if self._is_gone else self._nursery.ears)):
            poller.register(ear, zmq.POLLIN)
        poller.poll(POLL_MS)
        now = time.monotonic()
        while self._line.poll(0):
            # If the nursery is gone, `_report` will find it.
            with suppress(BadFrame, BrokenPipeError):
                letter = decode(self._line.recv_multipart()[-1], LETTER)
                if (content := self._post.read(letter, now)) is not None:
                    self._take_in(decode(content, TO_HOST))
        self._report()
        self._pass_on_stop()
        for letter in self._post.due(now):
            self._send(encode(letter))
        if self._farewell is None and self._post.silent_s(now) > self._timeout_s:
            raise self._why_silent()

    def _take_in(self, message: Any) -> None:
        match message:
            case Welcome():
                self._is_welcome, self._timeout_s = True, message.timeout_s
                self._tell(f"this is host {message.host} of the run, with {message.seats}")
            case Refused():
                raise UsageError(message.why)
            case Spawn() if not self._is_gone:
                birth = message.birth
                self._nursery.spawn(msgspec.structs.replace(birth, told=birth.told | self._told))
            case Kill() if not self._is_gone:
                self._nursery.kill(message.number, message.signal)
            case End():
                self._nursery.close()
                self._say_gone("ended its members, as asked")
            case Farewell():
                self._farewell = message
                self._send(encode(self._post.sign_of_life()))

    def _report(self) -> None:
        if self._is_gone:
            return
        try:
            while (report := self._nursery.next_report(0)) is not None:
                assert isinstance(report, Born | Exited)
                self._write(report)
        except EOFError:
            how = how_it_ended(self._nursery.close())
            self._say_gone(f"lost the process that its ranks are forked from, which {how}")

    def _pass_on_stop(self) -> None:
        """The first signal asks the members here, and so all, for a clean stop; another one, or
        one before there are any, ends this host's part now."""
        if len(self._signals) == self._num_passed_on:
            return
        self._num_passed_on = len(self._signals)
        number = self._signals[-1]
        if len(self._signals) > 1 or not self._nursery.pids or self._is_gone:
            self._nursery.close()
            self._say_gone(f"was interrupted by {signal.Signals(number).name}")
            self._farewell = Farewell(128 + number, "this host's part was interrupted")
            return
        self._tell("the run is asked to stop after a step; the same signal again ends at once")
        with suppress(BrokenPipeError):
            for member in self._nursery.pids:
                self._nursery.kill(member, signal.SIGTERM)

    def _say_gone(self, how: str) -> None:
        if not self._is_gone:
            self._is_gone = True
            self._write(Gone(how))

    def _why_silent(self) -> ShoalError:
        if not self._is_welcome:
            return UsageError(
                f"Nobody answers at {self._address} within {self._timeout_s:g} s. The run has "
                "ended, this host cannot reach that address, or the run's keys have changed."
            )
        return ShoalError(
            f"The first host was silent for {self._timeout_s:g} s: it has ended, or cannot be "
            "reached. What ran here was ended. Go on there with --resume, and join again."
        )

    def _write(self, message: FromHost) -> None:
        self._send(encode(self._post.write(encode(message), time.monotonic())))

    def _send(self, content: bytes) -> None:
        try:
            self._line.send(content, zmq.NOBLOCK)
        except zmq.Again:
            return  # it will be sent again
