"""A member's connection to the supervisor: it sends heartbeats, receives seats, and interrupts
collectives of a dead group.

A control thread talks to the supervisor while the trainer computes. When the supervisor announces
a newer generation and the trainer is still in a collective of an older one, the thread shuts down
the sockets of that group, on every tick until the trainer has taken its new seat. Cost: a
heartbeat of some hundred bytes every 0.1 s. Read next: `messages.py`, `watchdog.py`, and
`supervisor.py` for the other side.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import zmq

from shoal.comm.collectives import Group
from shoal.comm.endpoint import Endpoint, endpoint_from
from shoal.comm.mesh import (
    FORM_TIMEOUT_S,
    Axes,
    Check,
    Mesh,
    RankRequests,
    Servers,
    accept,
)
from shoal.comm.rendezvous import abandon_group, form_group, leave_group
from shoal.comm.run_store import StoreClient
from shoal.comm.sockets import open_sockets, shut_down
from shoal.comm.wire import BadFrame, Keys, connect, decode
from shoal.elastic import messages
from shoal.elastic.messages import (
    Arrived,
    Failed,
    Formed,
    FormGroup,
    Heartbeat,
    HostUse,
    Lost,
    MemberDone,
    MemberEvent,
    PauseAfterStep,
    Paused,
    Ready,
    Release,
    Repartition,
    SaveAfterStep,
    SeatAssignment,
    StopAfterStep,
)
from shoal.elastic.watchdog import Watchdog
from shoal.errors import FormError, GroupLeft, GroupLost, StopNow, TookTooLong
from shoal.events.events import Event, ProgressEvent
from shoal.events.hosts import LATEST, HostMeter
from shoal.events.step import StepInfo
from shoal.faults import faultpoint
from shoal.plans.plan import Plan
from shoal.plans.resize import RunSize, can_recover
from shoal.system.processes import WORK
from shoal.world import World

if TYPE_CHECKING:
    import torch.distributed as dist

BEAT_S = 0.1
TICK_MS = 20
# Gloo waits five times as long for a peer that died before it connected.
CONNECT_TIMEOUT_S = 1.0
STORE_TIMEOUT_S = 4.0  # for an answer of the store, which is in the supervisor


class SupervisedSeat:
    """A member's seat under a supervisor; the trainer's thread calls its methods."""

    def __init__(
        self,
        address: str,
        identity: str,
        *,
        reach: Endpoint,
        recovers: bool = True,
        form_timeout_s: float = FORM_TIMEOUT_S,
    ):
        self.recovers, self.reach = recovers, reach
        self.secret = identity.partition(":")[2]  # of the run
        self._is_ready = False
        self._summarise: Callable[[], dict[str, Any]] = dict
        self._progress: Callable[[], ProgressEvent | None] = lambda: None
        self._before_pause: Callable[[], None] = lambda: None
        self.generation = -1
        self.step = 0
        # How long to wait for a new generation after a loss: the supervisor gives up before.
        self._patience_s = form_timeout_s + 15.0
        self._changed = threading.Condition()
        self._assignment: SeatAssignment | None = None
        self._form_generation = -1
        self._stop = self.saves = self._is_released = self._closing = False
        self._pause_generation = -1  # in which a pause was last requested
        self._repartition = Repartition(-1, 0)  # the last request
        self._watchdog = Watchdog()
        self._handled: list[int] = []  # signals that ask for a stop
        self._sockets_before: set[str] | None = None  # open when forming began
        self._group_sockets: set[str] = set()
        self._store: StoreClient | None = None  # of the newest generation
        self._context = zmq.Context()
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.bind("inproc://outbox")
        self._thread = threading.Thread(
            target=self._run_control_thread,
            args=(address, identity),
            name="shoal-control",
            daemon=True,
        )
        self._thread.start()

    def report_by(
        self,
        *,
        summarise: Callable[[], dict[str, Any]],
        progress: Callable[[], ProgressEvent | None],
        before_pause: Callable[[], None],
    ) -> None:
        """What to tell the supervisor at the end and with each heartbeat; what to do in a pause."""
        self._summarise, self._progress, self._before_pause = summarise, progress, before_pause

    def form(self, axes: Axes, check: Check = accept) -> Mesh:
        self._axes, self._check = axes, check
        self._report_ready()
        return self._join_next_group(None)

    def server_number(self) -> int | None:
        """Wait for the first seat: the number of its parameter server, or None for a rank."""
        self._report_ready()
        with self._changed:
            self._wait_for(lambda: self._is_released or self._assignment is not None)
            if self._assignment is None:
                raise StopNow("the supervisor released this rank")
            return self._assignment.server

    @property
    def sizes(self) -> tuple[RunSize, ...]:
        """All sizes of the run so far, as of the newest assignment."""
        assert self._assignment is not None
        return self._assignment.sizes

    @property
    def restarts(self) -> int:
        """How often all members of the run began again, this one with them."""
        assert self._assignment is not None
        return self._assignment.restarts

    def await_seat(self) -> SeatAssignment:
        """As a server: the seat in the newest generation, once all members have left the last one.

        Slow work belongs between this and `publish_address`: the workers wait for that.
        """
        while True:
            assignment = self._await_assignment(None)
            if self._await_all_arrived(assignment):
                return assignment

    def publish_address(
        self, assignment: SeatAssignment, address: str, peer_address: str = ""
    ) -> list[str] | None:
        """As a server: publish the address for workers; None if a newer assignment came first.

        With a `peer_address` for other servers, returns the peer addresses of all servers.
        """
        assert assignment.server is not None
        store = self._open_store(assignment)
        try:
            store.set(_peer_key(assignment.generation, assignment.server), peer_address)
            store.set(_server_key(assignment.generation, assignment.server), address)
            peer_addresses = (
                self._await_server_keys(store, assignment, _peer_key) if peer_address else []
            )
        except (GroupLost, RuntimeError) as lost:
            self._send(Lost(self.generation, -1, str(lost)))
            return None
        self._send(Formed(self.generation, -1))
        self._send(MemberDone(self.generation, -1, {}))  # ranks decide when the run ends
        return peer_addresses

    def take_repartition_request(self) -> int | None:
        """As a server: the number of servers to write files for; returns each request once."""
        request, self._repartition = self._repartition, Repartition(-1, 0)
        return request.num_servers if request.generation == self.generation else None

    def report_repartition(self, num_bytes: int, problem: str) -> None:
        self._send(Paused(self.generation, num_bytes=num_bytes, problem=problem))

    def is_over(self) -> bool:
        """Whether this generation has ended: by a newer assignment, or by a release.

        Code that waits for another process polls this, which resets the watchdog (`watchdog.py`).
        """
        self._watchdog.beat()
        return self._is_superseded()

    def _report_ready(self) -> None:
        if not self._is_ready:
            self._is_ready = True
            faultpoint("seat.ready")
            self._send(Ready(os.getpid(), self.recovers))

    def reform(self, lost: GroupLost) -> Mesh:
        if not isinstance(lost, GroupLeft):
            late = isinstance(lost, TookTooLong)
            self._send(Lost(self.generation, self.step, str(lost), late))
        # An abandoned operation may still be under way between two survivors, and the old group
        # cannot be destroyed before it has ended.
        shut_down(self._group_sockets)
        return self._join_next_group(lost)

    def formed(self, step: int, recovers: bool | None = None) -> None:
        self._watchdog.beat()
        self.step = step
        self._send(Formed(self.generation, step, recovers))

    def stepped(self, info: StepInfo) -> None:
        self._watchdog.beat()
        self.step = info.step

    def asked(self) -> RankRequests:
        pauses = self._pause_generation == self.generation
        return RankRequests(stop=self._stop, meet=self.saves or pauses)

    def request_stop(self) -> None:
        """Ask all ranks to stop after a step they agree on; safe in a signal handler."""
        self._stop = True

    def stop_on_term(self) -> None:
        """Request a stop on SIGTERM, and on SIGHUP of a terminal that closes."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, lambda *_: self.request_stop())
                    self._handled.append(number)

    def emit(self, event: Event) -> None:
        self._send(MemberEvent(event))

    def finish(self, meets: bool = False) -> bool:
        for report in self._watchdog.take_printed(self._assignment):
            self._send(report)
        if meets:
            self._before_pause()
            faultpoint("seat.meeting", self.step)
            self._send(Paused(self.generation, self.step))
        else:
            self._send(MemberDone(self.generation, self.step, self._summarise()))
        with self._changed:
            self._wait_for(self._is_superseded)
            return self._is_released

    def close(self) -> None:
        leave_group()
        self._close_store()
        if not self._closing:
            for report in self._watchdog.take_printed(self._assignment):
                self._send(report)
        self._closing = True
        self._thread.join(timeout=2.0)
        while self._handled and threading.current_thread() is threading.main_thread():
            signal.signal(self._handled.pop(), signal.SIG_DFL)
        self._outbox.close(linger=0)
        self._context.term()

    def _send(self, message: messages.MemberMessage) -> None:
        self._outbox.send(messages.encode(message))

    def _join_next_group(self, lost: GroupLost | None) -> Mesh:
        """Wait for a seat in a newer generation and form its group, until one works."""
        while True:
            abandon_group()
            assignment = self._await_assignment(lost)
            if not self._await_all_arrived(assignment):
                continue
            try:
                return self._form(assignment)
            except (GroupLost, FormError) as error:
                lost = error if isinstance(error, GroupLost) else GroupLost(str(error))
                self._send(Lost(self.generation, self.step, str(lost)))

    def _await_assignment(self, lost: GroupLost | None) -> SeatAssignment:
        with self._changed:
            patience_s = None if self.generation < 0 else self._patience_s
            came = self._wait_for(self._is_superseded, patience_s)
            if self._is_released:
                raise StopNow("the supervisor released this rank")
            if not came:  # no other rank noticed: the error was this rank's own
                raise lost or GroupLost("no other generation was announced")
            assert self._assignment is not None
            self.generation = self._assignment.generation
            return self._assignment

    def _await_all_arrived(self, assignment: SeatAssignment) -> bool:
        """Report that this member left the old group; True once all members have."""
        faultpoint("seat.here", self.step)
        self._send(Arrived(assignment.generation))
        with self._changed:
            number = assignment.generation
            self._wait_for(
                lambda: self._is_superseded() or self._form_generation == number, self._patience_s
            )
            return self._form_generation == assignment.generation and not self._has_new_assignment()

    def _form(self, assignment: SeatAssignment) -> Mesh:
        num_ranks, sizes = assignment.num_ranks, assignment.sizes
        world = World(assignment.seat, num_ranks, assignment.seat, num_ranks, "shoal")
        if sizes[-1] == (1, 0):
            alone = Group(is_lost=self.is_over)
            return Mesh.form(alone, self._axes, world.device)._replace(sizes=sizes)
        import torch.distributed as dist

        faultpoint("seat.forming", self.step)
        self._group_sockets, self._sockets_before = set(), set(open_sockets())
        group = Group(is_lost=self.is_over)
        try:
            store = self._open_store(assignment)
            if num_ranks > 1:
                timeout = timedelta(seconds=CONNECT_TIMEOUT_S)
                form_group(store, f"generation/{assignment.generation}", world, timeout)
                group = Group(dist.group.WORLD, is_lost=self.is_over)
                self._check(group)
            mesh = Mesh.form(group, self._axes, world.device)
            servers = self._find_servers(store, assignment) if assignment.num_servers else None
            return mesh._replace(servers=servers, sizes=sizes)
        finally:
            self._group_sockets = set(open_sockets()) - self._sockets_before
            self._sockets_before = None

    def find_servers(self, assignment: SeatAssignment) -> Servers:
        """As a server: the addresses of the servers of its generation."""
        return self._find_servers(self._open_store(assignment), assignment)

    def _open_store(self, assignment: SeatAssignment) -> StoreClient:
        """One client a generation; its waits end when the generation does."""
        self._close_store()
        self._store = StoreClient(
            self._context, assignment.store, self.reach.keys, STORE_TIMEOUT_S, self.is_over
        )
        return self._store

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _find_servers(self, store: "dist.Store", assignment: SeatAssignment) -> Servers:
        addresses = self._await_server_keys(store, assignment, _server_key)
        lost, keys = self.is_over, self.reach.keys
        return Servers(tuple(addresses), assignment.generation, self.secret, lost, keys)

    def _await_server_keys(
        self, store: "dist.Store", assignment: SeatAssignment, key_of: Callable[[int, int], str]
    ) -> list[str]:
        """What each server put into the store. One that replaces a dead server first repeats the
        work of that one, without a time limit; if it dies, another generation begins."""
        keys = [key_of(assignment.generation, number) for number in range(assignment.num_servers)]
        try:
            while not store.check(keys):
                if self.is_over():
                    raise GroupLost("a server did not come")
                time.sleep(0.005)
            return [store.get(key).decode() for key in keys]
        except RuntimeError as error:
            raise GroupLost(f"a server did not come: {str(error).splitlines()[0]}") from error

    def _wait_for(self, condition: Callable[[], bool], patience_s: float | None = None) -> bool:
        """Wait for a message that makes the condition true. The caller holds `_changed`."""
        with self._watchdog.suspended():
            return self._changed.wait_for(condition, patience_s)

    def _is_superseded(self) -> bool:
        """Whether there is a newer assignment, or a release."""
        return self._is_released or self._has_new_assignment()

    def _has_new_assignment(self) -> bool:
        return self._assignment is not None and self._assignment.generation > self.generation

    def _run_control_thread(self, address: str, identity: str) -> None:
        """The control thread."""
        line = connect(self._context, address, identity.encode(), self.reach.keys)
        line.setsockopt(zmq.LINGER, 500)
        inbox = self._context.socket(zmq.PULL)
        inbox.connect("inproc://outbox")
        poller = zmq.Poller()
        poller.register(line, zmq.POLLIN)
        poller.register(inbox, zmq.POLLIN)
        last_beat, meter = 0.0, HostMeter()
        try:
            while not self._closing or inbox.poll(0):
                poller.poll(TICK_MS)
                while inbox.poll(0):
                    line.send(inbox.recv())
                while line.poll(0):
                    with suppress(BadFrame):
                        self._handle(decode(line.recv(), messages.FROM_SUPERVISOR))
                self._break_old_group()
                if time.monotonic() - last_beat > BEAT_S:
                    last_beat = time.monotonic()
                    stops = self._stop and self._assignment is not None
                    at = self._watchdog.current_line() if stops else ""
                    standing = self._watchdog.standing()
                    beat = Heartbeat(self.step, self._progress(), stops, WORK.done, at, standing)
                    line.send(messages.encode(beat))
                    for report in self._watchdog.check(self.step, self._assignment, self._stop):
                        line.send(messages.encode(report))
                    samples = self._assignment is not None and self._assignment.samples_host
                    if samples and (use := meter.due(self.step)) is not None:
                        line.send(messages.encode(MemberEvent(use)))
        finally:
            line.close()
            inbox.close()

    def _handle(self, message: messages.SupervisorMessage) -> None:
        with self._changed:
            match message:
                case SeatAssignment():
                    if self._assignment is None or message.generation > self._assignment.generation:
                        self._assignment = message
                case FormGroup():
                    self._form_generation = message.generation
                case StopAfterStep():
                    self._stop = True
                case SaveAfterStep():
                    self.saves = True
                case PauseAfterStep():
                    self._pause_generation = message.generation
                case Repartition():
                    self._repartition = message
                case HostUse():
                    LATEST[message.use.host] = message.use
                case Release():
                    self._is_released = True
            self._changed.notify_all()

    def _break_old_group(self) -> None:
        """Shut down the old group's sockets as long as the trainer should leave it."""
        if self._is_superseded():
            before = self._sockets_before
            shut_down(self._group_sockets if before is None else set(open_sockets()) - before)


def _server_key(generation: int, number: int) -> str:
    """The store's key of a server's address for workers."""
    return f"generation/{generation}/server/{number}"


def _peer_key(generation: int, number: int) -> str:
    """The store's key of a server's address for other servers."""
    return f"generation/{generation}/peer_address/{number}"


def report_failure(address: str, identity: str, failed: Failed, keys: Keys | None = None) -> None:
    """Report that this member's program failed, and wait until the supervisor has received it."""
    with zmq.Context() as context, connect(context, address, identity.encode(), keys) as line:
        line.setsockopt(zmq.LINGER, 500)
        line.send(messages.encode(failed))
        line.poll(5000)  # any answer will do; the supervisor is ending the run


def seat_from_environment(plan: Plan) -> SupervisedSeat | None:
    """The supervisor's seat, if `shoal run` started this process."""
    address = os.environ.get("SHOAL_CONTROL")
    if address is None:
        return None
    form_timeout_s = float(os.environ.get("SHOAL_FORM_TIMEOUT_S", FORM_TIMEOUT_S))
    return SupervisedSeat(
        address,
        os.environ["SHOAL_MEMBER"],
        recovers=can_recover(plan),
        form_timeout_s=form_timeout_s,
        reach=endpoint_from(os.environ),
    )
