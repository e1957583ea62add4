"""A member's side of the supervisor: heartbeats out, places in, and a way out of dead
collectives.

A control thread keeps the conversation going whatever the trainer is doing. When a newer
generation is announced while the trainer still sits in a collective of an older one, the thread
shuts down that group's connections, again on every tick until the trainer has taken its new
place.
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
from shoal.comm.mesh import FORM_TIMEOUT_S, Asked, Axes, Check, Mesh, Servers, accept
from shoal.comm.reach import Reach, reach_from
from shoal.comm.run_store import StoreClient
from shoal.comm.sockets import open_sockets, shut_down
from shoal.comm.store import abandon_group, form_group, leave_group
from shoal.comm.wire import BadFrame, Keys, connect, decode
from shoal.elastic import messages
from shoal.elastic.asides import Asides
from shoal.elastic.messages import (
    Beat,
    Done,
    Failed,
    Formed,
    Go,
    Here,
    Leave,
    Lost,
    Meet,
    Met,
    Note,
    Part,
    Ready,
    Stop,
    TakeSeat,
)
from shoal.errors import FormError, GroupLeft, GroupLost, StopNow
from shoal.events.step import StepInfo
from shoal.faults import faultpoint
from shoal.plans.plan import Plan
from shoal.plans.size import Size, can_recover
from shoal.system.processes import WORK
from shoal.world import World

if TYPE_CHECKING:
    import torch.distributed as dist

BEAT_S = 0.1
TICK_MS = 20
# Gloo waits five times as long for a peer that died before it connected.
CONNECT_TIMEOUT_S = 1.0
STORE_TIMEOUT_S = 4.0  # for an answer of the store, which the supervisor holds


class SupervisedSeat:
    """The trainer's seat under a supervisor. Its methods are called from the trainer's thread."""

    def __init__(
        self,
        address: str,
        identity: str,
        *,
        reach: Reach,
        recovers: bool = True,
        form_timeout_s: float = FORM_TIMEOUT_S,
    ):
        self.recovers, self.reach = recovers, reach
        self.secret = identity.partition(":")[2]  # of the run
        self._is_ready = False
        self.summarise: Callable[[], dict[str, Any]] = dict
        self.progress: Callable[[], dict[str, Any] | None] = lambda: None
        self.before_meeting: Callable[[], None] = lambda: None
        self.generation = -1
        self.step = 0
        # How long to wait for a new generation after a loss: the supervisor gives up before.
        self._patience_s = form_timeout_s + 15.0
        self._changed = threading.Condition()
        self._place: TakeSeat | None = None
        self._go = -1
        self._stop = self._leave = self._closing = False
        self._meet, self._part = -1, Part(-1, 0)  # the last that was asked for
        self._asides = Asides()
        self._handled: list[int] = []  # signals that ask for a stop
        self._before: set[str] | None = None  # sockets that stood before forming began
        self._own: set[str] = set()  # the group's
        self._store: StoreClient | None = None  # of the newest generation
        self._context = zmq.Context()
        self._mouth = self._context.socket(zmq.PUSH)
        self._mouth.bind("inproc://say")
        self._thread = threading.Thread(
            target=self._converse, args=(address, identity), name="shoal-control", daemon=True
        )
        self._thread.start()

    def form(self, axes: Axes, check: Check = accept) -> Mesh:
        self._axes, self._check = axes, check
        self._be_ready()
        return self._take_place(None)

    def server_number(self) -> int | None:
        """Wait for a first place: that of a parameter server, or None for a rank's."""
        self._be_ready()
        with self._changed:
            self._wait_for(lambda: self._leave or self._place is not None)
            if self._place is None:
                raise StopNow("the supervisor lets this rank go")
            return self._place.server

    @property
    def sizes(self) -> tuple[Size, ...]:
        """That the run had, as of the newest place."""
        assert self._place is not None
        return self._place.sizes

    def enter(self) -> TakeSeat:
        """As a server: one's place in the newest generation, once all have left the one before.

        Until `receive` there is time for what takes long: workers wait for it.
        """
        while True:
            place = self._await_place(None)
            if self._await_go(place):
                return place

    def receive(self, place: TakeSeat, address: str, door: str = "") -> list[str] | None:
        """As a server: let workers know where; None if there is another place meanwhile.

        With a door for other servers: where theirs are.
        """
        assert place.server is not None
        store = self._open_store(place)
        try:
            store.set(_door_key(place.generation, place.server), door)
            store.set(_server_key(place.generation, place.server), address)
            doors = self._find(store, place, _door_key) if door else []
        except (GroupLost, RuntimeError) as lost:
            self._say(Lost(self.generation, -1, str(lost)))
            return None
        self._say(Formed(self.generation, -1))
        self._say(Done(self.generation, -1, {}))  # whenever the ranks are
        return doors

    def asked_to_part(self) -> int | None:
        """As a server, once: for how many servers to write down what each will hold."""
        part, self._part = self._part, Part(-1, 0)
        return part.num_servers if part.generation == self.generation else None

    def parted(self, num_bytes: int, problem: str) -> None:
        self._say(Met(self.generation, num_bytes=num_bytes, problem=problem))

    def is_over(self) -> bool:
        """Whether the generation is: there is another place, or none any more.

        Who waits for another process asks again and again, which is its pulse (`asides.py`).
        """
        self._asides.beat()
        return self._leave or self._place_is_new()

    def _be_ready(self) -> None:
        if not self._is_ready:
            self._is_ready = True
            faultpoint("seat.ready")
            self._say(Ready(os.getpid(), self.recovers))

    def reform(self, lost: GroupLost) -> Mesh:
        if not isinstance(lost, GroupLeft):
            self._say(Lost(self.generation, self.step, str(lost)))
        # An operation nobody waits for any more may still be under way between two survivors, and
        # the old group cannot be let go of before it has ended.
        shut_down(self._own)
        return self._take_place(lost)

    def formed(self, step: int) -> None:
        self._asides.beat()
        self.step = step
        self._say(Formed(self.generation, step))

    def stepped(self, info: StepInfo) -> None:
        self._asides.beat()
        self.step = info.step

    def asked(self) -> Asked:
        return Asked(stop=self._stop, meet=self._meet == self.generation)

    def request_stop(self) -> None:
        """Ask all ranks to stop after a step they agree on; safe in a signal handler."""
        self._stop = True

    def stop_on_term(self) -> None:
        """Let SIGTERM, and a terminal that closes, ask for that in this process."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, lambda *_: self.request_stop())
                    self._handled.append(number)

    def tell(self, event: str, **what: Any) -> None:
        self._say(Note(event, what))

    def finish(self, meets: bool = False) -> bool:
        if meets:
            self.before_meeting()
            faultpoint("seat.meeting", self.step)
            self._say(Met(self.generation, self.step))
        else:
            self._say(Done(self.generation, self.step, self.summarise()))
        with self._changed:
            self._wait_for(lambda: self._leave or self._place_is_new())
            return self._leave

    def close(self) -> None:
        leave_group()
        self._close_store()
        self._closing = True
        self._thread.join(timeout=2.0)
        while self._handled and threading.current_thread() is threading.main_thread():
            signal.signal(self._handled.pop(), signal.SIG_DFL)
        self._mouth.close(linger=0)
        self._context.term()

    def _say(self, message: messages.MemberMessage) -> None:
        self._mouth.send(messages.encode(message))

    def _take_place(self, lost: GroupLost | None) -> Mesh:
        """Wait for a place in a newer generation and form its group, until one works."""
        while True:
            abandon_group()
            place = self._await_place(lost)
            if not self._await_go(place):
                continue
            try:
                return self._form(place)
            except (GroupLost, FormError) as error:
                lost = error if isinstance(error, GroupLost) else GroupLost(str(error))
                self._say(Lost(self.generation, self.step, str(lost)))

    def _await_place(self, lost: GroupLost | None) -> TakeSeat:
        with self._changed:
            patience_s = None if self.generation < 0 else self._patience_s
            came = self._wait_for(lambda: self._leave or self._place_is_new(), patience_s)
            if self._leave:
                raise StopNow("the supervisor lets this rank go")
            if not came:  # nobody else noticed: the error was this rank's own
                raise lost or GroupLost("no other generation was announced")
            assert self._place is not None
            self.generation = self._place.generation
            return self._place

    def _await_go(self, place: TakeSeat) -> bool:
        """Say that the old group is left; True when all have said so."""
        faultpoint("seat.here", self.step)
        self._say(Here(place.generation))
        with self._changed:
            self._wait_for(
                lambda: self._leave or self._go == place.generation or self._place_is_new(),
                self._patience_s,
            )
            return self._go == place.generation and not self._place_is_new()

    def _form(self, place: TakeSeat) -> Mesh:
        num_ranks, sizes = place.num_ranks, place.sizes
        world = World(place.seat, num_ranks, place.seat, num_ranks, "shoal")
        if sizes[-1] == (1, 0):
            alone = Group(is_lost=self.is_over)
            return Mesh.form(alone, self._axes, world.device)._replace(sizes=sizes)
        import torch.distributed as dist

        faultpoint("seat.forming", self.step)
        self._own, self._before = set(), set(open_sockets())
        group = Group(is_lost=self.is_over)
        try:
            store = self._open_store(place)
            if num_ranks > 1:
                timeout = timedelta(seconds=CONNECT_TIMEOUT_S)
                form_group(store, f"generation/{place.generation}", world, timeout)
                group = Group(dist.group.WORLD, is_lost=self.is_over)
                self._check(group)
            mesh = Mesh.form(group, self._axes, world.device)
            servers = self._find_servers(store, place) if place.num_servers else None
            return mesh._replace(servers=servers, sizes=sizes)
        finally:
            self._own = set(open_sockets()) - self._before
            self._before = None

    def find_servers(self, place: TakeSeat) -> Servers:
        """As a server: where the others of its generation are."""
        return self._find_servers(self._open_store(place), place)

    def _open_store(self, place: TakeSeat) -> StoreClient:
        """One client a generation, which leaves what it waits for when that is over."""
        self._close_store()
        self._store = StoreClient(
            self._context, place.store, self.reach.keys, STORE_TIMEOUT_S, self.is_over
        )
        return self._store

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _find_servers(self, store: "dist.Store", place: TakeSeat) -> Servers:
        addresses = self._find(store, place, _server_key)
        lost, keys = self.is_over, self.reach.keys
        return Servers(tuple(addresses), place.generation, self.secret, lost, keys)

    def _find(
        self, store: "dist.Store", place: TakeSeat, key_of: Callable[[int, int], str]
    ) -> list[str]:
        """What each server put into the store. One that takes a dead one's place does first what
        that did, however long it takes; if it dies there is another generation."""
        keys = [key_of(place.generation, number) for number in range(place.num_servers)]
        try:
            while not store.check(keys):
                if self.is_over():
                    raise GroupLost("a server did not come")
                time.sleep(0.005)
            return [store.get(key).decode() for key in keys]
        except RuntimeError as error:
            raise GroupLost(f"a server did not come: {str(error).splitlines()[0]}") from error

    def _wait_for(self, is_so: Callable[[], bool], patience_s: float | None = None) -> bool:
        """What the supervisor says: until it is so. The caller holds `_changed`."""
        with self._asides.resting():
            return self._changed.wait_for(is_so, patience_s)

    def _place_is_new(self) -> bool:
        return self._place is not None and self._place.generation > self.generation

    def _converse(self, address: str, identity: str) -> None:
        """The control thread."""
        line = connect(self._context, address, identity.encode(), self.reach.keys)
        line.setsockopt(zmq.LINGER, 500)
        ear = self._context.socket(zmq.PULL)
        ear.connect("inproc://say")
        poller = zmq.Poller()
        poller.register(line, zmq.POLLIN)
        poller.register(ear, zmq.POLLIN)
        last_beat = 0.0
        try:
            while not self._closing or ear.poll(0):
                poller.poll(TICK_MS)
                while ear.poll(0):
                    line.send(ear.recv())
                while line.poll(0):
                    with suppress(BadFrame):
                        self._take_in(decode(line.recv(), messages.FROM_SUPERVISOR))
                self._free_the_trainer()
                if time.monotonic() - last_beat > BEAT_S:
                    last_beat = time.monotonic()
                    stops = self._stop and self._place is not None
                    at = self._asides.at() if stops else ""
                    beat = Beat(self.step, self.progress(), stops, WORK.done, at)
                    line.send(messages.encode(beat))
                    for aside in self._asides.look(self.step, self._place, self._stop):
                        line.send(messages.encode(aside))
        finally:
            line.close()
            ear.close()

    def _take_in(self, message: messages.SupervisorMessage) -> None:
        with self._changed:
            match message:
                case TakeSeat():
                    if self._place is None or message.generation > self._place.generation:
                        self._place = message
                case Go():
                    self._go = message.generation
                case Stop():
                    self._stop = True
                case Meet():
                    self._meet = message.generation
                case Part():
                    self._part = message
                case Leave():
                    self._leave = True
            self._changed.notify_all()

    def _free_the_trainer(self) -> None:
        """Level-triggered: as long as the trainer is in a group it should have left."""
        if self._place_is_new() or self._leave:
            before = self._before
            shut_down(self._own if before is None else set(open_sockets()) - before)


def _server_key(generation: int, number: int) -> str:
    """Under which a server's address stands in the store."""
    return f"generation/{generation}/server/{number}"


def _door_key(generation: int, number: int) -> str:
    """Under which the address stands at which a server hears others."""
    return f"generation/{generation}/door/{number}"


def report_failure(address: str, identity: str, failed: Failed, keys: Keys | None = None) -> None:
    """Say that this member's program failed, and wait until the supervisor has heard it."""
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
        reach=reach_from(os.environ),
    )
