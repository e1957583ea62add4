"""The supervisor: it starts the members, receives their messages, and keeps every seat filled.

It holds the store and numbers the generations, so any rank may die. `membership.py` makes all
decisions; this file carries them out. It runs in the process of the command line; when that dies,
the kernel kills the fork server and all members. Cost: a poll every 0.1 s, a heartbeat of each
member every 0.1 s. Read next: `membership.py`, `messages.py`, `seat.py`.
"""

import hmac
import secrets
import shutil
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import zmq
from msgspec import UNSET, UnsetType

from shoal.comm import wire
from shoal.comm.endpoint import Endpoint
from shoal.comm.hangs import explain_hang
from shoal.comm.run_store import StoreServer
from shoal.elastic import actions, messages
from shoal.elastic.forming import FormingMonitor, describe_late
from shoal.elastic.membership import Membership
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
from shoal.elastic.progress import ProgressMonitor, describe_hang
from shoal.elastic.resize_requests import ResizeRequests
from shoal.errors import RUN_AGAIN, Ended
from shoal.events.events import (
    BusyEvent,
    Event,
    ExitedEvent,
    FormedEvent,
    GaveUpEvent,
    HangEvent,
    HostAddedEvent,
    HostLostEvent,
    HostUseEvent,
    LostEvent,
    MemberStartedEvent,
    NotResizedEvent,
    OnEvent,
    PrintedEvent,
    RecoveredEvent,
    ResizedEvent,
    SavedEvent,
    SeatEvent,
    SpentEvent,
    StandstillEvent,
    StoppingEvent,
    TickEvent,
    TraceEvent,
    WaitingEvent,
    WarningEvent,
)
from shoal.events.sinks import EventsSink
from shoal.logs import warn_once
from shoal.system.awake_clock import AwakeClock
from shoal.system.fork_server import (
    ForkServerReady,
    HostJoined,
    HostLost,
    PreparationFailed,
    Processes,
    WorkerExited,
    WorkerSpec,
    WorkerStarted,
)
from shoal.system.processes import describe_exit, stop_signals

POLL_MS = 100
GRACE_S = 2.0
STUCK_S = 10.0  # after a stop signal, a loop that takes longer for one turn is ended
MOST_BYTES = 16 << 20  # of a member's message


@dataclass
class SupervisorResult:
    """How a run ended. `trace` is the traceback of the first rank that failed."""

    exit_code: int = 0
    cause: str = ""
    trace: str = ""
    step: int = 0
    num_recoveries: int = 0
    plan: str = ""  # the last one, if the run was resized
    num_steps_again: int = 0  # committed by ranks that were all lost, and repeated
    stopped_by: int = 0
    summaries: dict[int, dict[str, Any]] = field(default_factory=dict)  # by rank


class Supervisor:
    """Runs the members of one run; `on_event` receives progress and every event."""

    def __init__(
        self,
        processes: Processes,
        members: Membership,
        run_dir: Path,
        on_event: OnEvent,
        reach: Endpoint,
        resizes: ResizeRequests | None = None,
        stop_timeout_s: float | None = None,
    ):
        """`reach` is where members find this process; `resizes` is None for a run that cannot be
        resized; `stop_timeout_s` is `progress.py`'s."""
        self.processes = processes
        self.members = members
        self.outcome = SupervisorResult()
        self._on_event = on_event
        self._run_dir = run_dir
        self._events = EventsSink(run_dir)
        self._token, self._reach = secrets.token_hex(16), reach
        self._store = StoreServer(reach)
        self._context: wire.Context = zmq.Context()
        self._router, self._address = wire.listen(self._context, *reach.place, MOST_BYTES)
        self._over = False
        self._has_failed = False  # whether a member of the present group reported it
        self._stop_signal = 0
        self._signals: list[int] = []
        self._pids: dict[int, int] = {}  # of members, as they report them
        self._logs: dict[int, Path] = {}
        self._beats: dict[int, Heartbeat] = {}  # the last one of each member
        self._resizes = resizes
        self._forming = FormingMonitor(members.options.form_timeout_s)
        self._progress, self._clock = ProgressMonitor(stop_timeout_s), AwakeClock()

    def run(self) -> SupervisorResult:
        """Supervise until the run is over. No process is left running afterwards."""
        handlers: dict[int, Any] = {s: signal.signal(s, self._on_signal) for s in stop_signals()}
        handlers[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._on_alarm)
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        for source in self.processes.poll_sources:
            poller.register(source, zmq.POLLIN)
        if self._resizes is not None and self._resizes.control is not None:
            poller.register(self._resizes.control.fileno(), zmq.POLLIN)
        try:
            self._execute(self.members.start(self._clock()))
            while not self._over:
                poller.poll(POLL_MS)
                self._read_reports()
                self._read_messages()
                self._execute(self.members.tick(self._clock()))
                self._report_late()
                self._report_standstill()
                if self._resizes is not None:
                    stops = bool(self._signals or self._stop_signal)
                    self._execute(self._resizes.poll(self.members, stops, self._clock()))
                    if self._resizes.saves.is_due(self.members.generation):
                        self._broadcast(self.members.seats[:1], SaveAfterStep())
                self._forward_stop()
                self._on_event(TickEvent())
            self._release_members()
        except (EOFError, BrokenPipeError):
            self._give_up(self.processes.describe_loss(), 1)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            self._close()
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return self.outcome

    def _report_late(self) -> None:
        seated = self.members.generation, self.members.seats, self.members.formed
        if not self._over and (late := self._forming.late(*seated, self._clock())):
            text = describe_late(self.members.size, late, self.members.options.form_timeout_s)
            self._record(WarningEvent(text=text))

    def _report_standstill(self) -> None:
        """Report that no rank makes progress; they may wait for each other."""
        now, members = self._clock(), self.members
        works = bool(members.formed) and not members.options.scripts  # a script may pause at will
        if self._over or not works:
            return
        if (seconds := self._progress.standstill_s(now)) is not None:
            self._request_stacks()
            self._record(StandstillEvent(seconds=round(seconds), step=members.step))
            self._record(*hangs_of(members, self._beats))

    def _request_stacks(self) -> None:
        """Let each member write the stacks of its threads into its log."""
        for member in self.members.seats if not self.members.options.scripts else ():
            if member in self.processes.pids:
                self.processes.kill(member, signal.SIGUSR1)

    def _on_signal(self, number: int, frame: object) -> None:
        self._signals.append(number)
        signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)

    def _on_alarm(self, number: int, frame: object) -> None:
        """End a loop that is stuck after a stop signal, on a screen that blocks for example."""
        if self._clock.unseen_s > STUCK_S:
            raise Ended(128 + self._signals[0])

    def _forward_stop(self) -> None:
        """The first signal asks for a clean stop, the second ends everything now.

        The stop is repeated until the run is over, for members that start later.
        """
        if self._signals and not self._stop_signal:
            self._record(StoppingEvent(signal=signal.Signals(self._signals[0]).name))
        if self._signals:
            self._stop_signal = self.outcome.stopped_by = self._signals[0]
        if len(self._signals) > 1:
            self._give_up("it was interrupted twice", 128 + self._signals[-1])
        if self._stop_signal and not self._over:
            scripts = self.members.options.scripts
            if self.members.generation < 0 or (scripts and not self.members.formed):
                when = "while a group formed" if self.members.step > 0 else "before the first step"
                self._give_up(f"it was interrupted {when}", 128 + self._stop_signal)
            if self.members.is_waiting:
                self._give_up("it was interrupted while it waited for another host", RUN_AGAIN)
            self._broadcast(self.members.seats, StopAfterStep())
            self._end_if_hung(self._clock())

    def _end_if_hung(self, now: float) -> None:
        """Give up a clean stop in which no member makes progress any more."""
        self._progress.stop_requested(now)
        late_s = self._progress.late_s(now)
        if late_s is None:
            return
        if not self.members.options.scripts:  # which handle the signal as they like
            self._request_stacks()
            time.sleep(0.5)
        members = self.members
        at = {member: beat.at for member, beat in self._beats.items()}
        cause = describe_hang(members.size, members.seats, members.finished, at, late_s)
        self._give_up(cause, 128 + self._stop_signal)

    def _read_reports(self) -> None:
        while (report := self.processes.next_report(timeout_s=0)) is not None:
            match report:
                case WorkerStarted():
                    self._record(MemberStartedEvent(member=report.number, pid=report.pid))
                case WorkerExited():
                    seat = self._seat_of(report.number)
                    if seat is not None and not self._over:
                        suspected = self.members.members[report.number].suspected
                        how = suspected or describe_exit(report.status)
                        self._record(
                            ExitedEvent(
                                rank=seat,
                                server=self._server_of(seat),
                                status=report.status,
                                how=how,
                                step=self.members.step,
                            )
                        )
                    now = self._clock()
                    self._read_messages()  # what it sent before it ended
                    self._execute(self.members.exited(report.number, report.status, now))
                case HostLost():
                    self._read_messages()  # what its members sent before
                    now = self._clock()
                    self._execute(self.members.host_lost(report.host, report.how, now))
                case HostJoined():
                    now = self._clock()
                    self._execute(self.members.host_joined(report.host, report.num_slots, now))
                case ForkServerReady() | PreparationFailed():
                    raise AssertionError("the fork server prepares once")

    def _read_messages(self) -> None:
        while self._router.poll(0):
            identity, *frames = self._router.recv_multipart()
            member = self._member_of(identity)
            if member is None:
                warn_once("Messages of a process that is no member of this run are ignored.")
                continue
            try:
                message = wire.decode(frames[-1], messages.FROM_MEMBER)
            except wire.BadFrame as bad:
                warn_once(
                    f"A message of member {member} cannot be read: {bad}", kind=f"member {member}"
                )
                continue
            if member in self.members.members:  # not of a host that was lost, and came back
                self._handle(member, message)

    def _member_of(self, identity: bytes) -> int | None:
        """The member of a ZeroMQ identity; None if no started member has it."""
        number, _, token = identity.partition(b":")
        if not hmac.compare_digest(token, self._token.encode()) or not number.isdigit():
            return None
        return int(number) if int(number) in self._logs else None

    def _handle(self, member: int, message: messages.MemberMessage) -> None:
        now = self._clock()
        self.members.heard(member, now, getattr(message, "step", -1))
        match message:
            case Ready():
                self._pids[member] = message.pid
                self._execute(self.members.ready(member, now, message.recovers))
            case Arrived():
                self._execute(self.members.arrived(member, message.generation))
            case Formed():
                formed = message.generation, message.step, now, message.recovers
                self._execute(self.members.has_formed(member, *formed))
            case Lost():
                seat = self._seat_of(member)
                self._record(LostEvent(rank=seat, server=self._server_of(seat), why=message.why))
                self.members.lost(member, message.generation, now, message.why)
                if message.is_late:  # and others with it, of whom the first counts
                    hangs = hangs_of(self.members, self._beats)
                    self._record(*(hang for hang in hangs if hang.waiting[:1] == [seat]))
            case Heartbeat():
                self._progress.heard(member, message.step, message.work, now)
                self._beats[member] = message
                if message.stops and not self._stop_signal:
                    self._stop_signal = self.outcome.stopped_by = signal.SIGTERM
                    seat = self._seat_of(member)
                    self._record(
                        StoppingEvent(signal="SIGTERM", rank=seat, server=self._server_of(seat))
                    )
                if message.progress:
                    self._on_event(message.progress)
            case MemberEvent():
                self._record_member_event(member, message.event)
            case MemberDone():
                seat = self._seat_of(member)
                if seat is not None and message.summary:
                    self.outcome.summaries[seat] = message.summary
                if message.summary.get("stopped") and not self._stop_signal:
                    # A rank was signalled by another process, and all agreed to stop with it.
                    self._stop_signal = self.outcome.stopped_by = signal.SIGTERM
                self._execute(self.members.done(member, message.generation))
            case Paused():
                if self._resizes is not None:
                    self._resizes.add_moved_bytes(message.generation, message.num_bytes)
                generation, step, why = message.generation, message.step, message.problem
                self._execute(self.members.paused(member, generation, step, now, why))
            case Failed():
                self._handle_failure(member, message)

    def _record_member_event(self, member: int, event: Event) -> None:
        if isinstance(event, PrintedEvent | TraceEvent):  # which have files of their own
            self._on_event(event)
            return
        if isinstance(event, HostUseEvent):
            now, host = time.time(), self.members.members[member].host
            event = msgspec.structs.replace(event, host=host, time=now)
            self._broadcast(self.members.seats[: self.members.size.num_ranks], HostUse(event))
        elif isinstance(event, SpentEvent):
            if (seat := self._seat_of(member)) is None:
                return  # it was replaced
            server = self._server_of(seat)
            event = msgspec.structs.replace(event, rank=seat, server=server)
        elif isinstance(event, BusyEvent | WaitingEvent):
            self._progress.explained(self._clock())
        elif not isinstance(event, WarningEvent):
            self._progress.done(self._clock())
        self._record(event)
        if self._resizes is not None:
            self._resizes.saves.take(event)
        if isinstance(event, BusyEvent):
            self._record(*hangs_of(self.members, self._beats))
        if isinstance(event, SavedEvent):
            self._execute(self.members.saved(self._clock()))

    def _handle_failure(self, member: int, message: Failed) -> None:
        if self._over or self._has_failed:
            return  # an echo of the first failure
        self._has_failed = True
        seat = self._seat_of(member)
        size = self.members.size
        who = "a spare" if seat is None else size.name_of(seat)
        if message.ranks:
            is_all = 1 < size.num_ranks <= len(message.ranks)
            who = "every rank" if is_all else ", ".join(map(size.name_of, message.ranks))
        self.outcome.trace = message.trace
        # A new member has made no step, and a server makes none.
        step = message.step or self.members.step
        where = "" if step < 0 else f" at step {step + 1}"
        cause, now = f"{who} failed{where}: {message.message}", self._clock()
        self._execute(self.members.failed(member, cause, message.exit_code, now))

    def _execute(self, wanted: list[actions.Action]) -> None:
        for action in wanted:
            match action:
                case actions.Spawn():
                    self._spawn(action.member, action.host)
                case actions.Kill():
                    self.processes.kill(action.member)
                case actions.Announce():
                    self._announce(action)
                case actions.AllArrived():
                    self._broadcast(self.members.seats, FormGroup(action.generation))
                case actions.AllFormed():
                    self._report_formed(action)
                case actions.AllDone():
                    self._over = self.members.over
                    self._broadcast(self.members.seats, Release())
                case actions.GiveUp():
                    self._give_up(action.cause, action.exit_code)
                case actions.HostGone():
                    host, how, then, step = *action, self.members.step
                    self._record(HostLostEvent(host=host, how=how, step=step, then=then))
                case actions.HostAdded():
                    host, slots, then, step = *action, self.members.step
                    self._record(HostAddedEvent(host=host, slots=slots, step=step, then=then))
                case (
                    actions.PauseRanks()
                    | actions.RepartitionServers()
                    | actions.Resized()
                    | actions.NotResized()
                ):
                    self._resize(action)

    def _resize(
        self,
        action: actions.PauseRanks
        | actions.RepartitionServers
        | actions.Resized
        | actions.NotResized,
    ) -> None:
        assert self._resizes is not None
        num_ranks = self.members.size.num_ranks
        match action:
            case actions.PauseRanks():
                self._broadcast(self.members.seats[:num_ranks], PauseAfterStep(action.generation))
            case actions.RepartitionServers():
                request = Repartition(action.generation, action.num_servers)
                self._broadcast(self.members.seats[num_ranks:], request)
            case actions.Resized():
                self._broadcast(action.leavers, Release())
                change = self._resizes.finish(action, self._clock())
                self.outcome.plan = change["plan"]
                self._record(ResizedEvent(generation=self.members.generation, **change))
            case actions.NotResized():
                self._resizes.cancel(action)
                self._record(NotResizedEvent(step=self.members.step, why=action.cause))

    def _spawn(self, member: int, host: int) -> None:
        variables = {
            "SHOAL_CONTROL": self._address,
            "SHOAL_MEMBER": f"{member}:{self._token}",
            "SHOAL_FORM_TIMEOUT_S": str(self.members.options.form_timeout_s),
            **self._reach.environment(),
            **(self._master_address if self.members.options.scripts else {}),
            "RANK": str(member),
            "LOCAL_RANK": str(member),
            "WORLD_SIZE": str(self.members.num_seats),
            "LOCAL_WORLD_SIZE": str(self.members.num_seats),
        }
        # A member keeps its log: a spare's is named after the spare, whatever its seat.
        server = self.members.size.server_of(member)
        name = f"rank-{member:03d}" if server is None else f"server-{server:03d}"
        if self.members.generation >= 0 or member >= self.members.num_seats:
            name = f"spare-{member:03d}"
        self._logs[member] = self._run_dir / "logs" / f"{name}.log"
        self.processes.spawn(WorkerSpec(member, str(self._logs[member]), variables, host))

    @cached_property
    def _master_address(self) -> dict[str, str]:
        """For a script that forms torch's process group by itself; the port is free until then."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}

    def _announce(self, plan: actions.Announce) -> None:
        self._store.forget(f"generation/{plan.generation - 2}/")  # which all have left
        hosts: set[int] = set()
        for seat, member in enumerate(plan.seats):
            host = self.members.members[member].host
            self._record(
                SeatEvent(
                    rank=seat,
                    server=self._server_of(seat),
                    pid=self._pids[member],
                    generation=plan.generation,
                    host=host,
                    log=self._logs[member].name,
                )
            )
            sizes, restarts = tuple(self.members.sizes), self.members.restarts
            assignment = SeatAssignment(
                plan.generation, seat, sizes, self._store.address, restarts, host not in hosts
            )
            hosts.add(host)
            self._send(member, assignment)

    def _report_formed(self, group: actions.AllFormed) -> None:
        self._has_failed, self.outcome.trace = False, ""
        if group.lost_at is not None:
            ms = round((self._clock() - group.lost_at) * 1000, 1)
            self.outcome.num_recoveries += max(1, len(group.replaced))
            self.outcome.num_steps_again += max(0, group.num_steps_again)
            for seat, cause in group.replaced or ((None, "the group broke"),):
                self._record(
                    RecoveredEvent(
                        rank=seat,
                        server=self._server_of(seat),
                        generation=group.generation,
                        cause=cause,
                        step=group.step,
                        ms=ms,
                        spare=self.members.num_spares > 0,
                    )
                )
        else:
            self._record(FormedEvent(generation=group.generation, step=group.step))

    def _give_up(self, cause: str, exit_code: int) -> None:
        if not self._over:
            self._over = True
            self.members.over = True
            self.outcome.cause, self.outcome.exit_code = cause, exit_code
            self._record(GaveUpEvent(cause=cause, step=self.members.step))

    def _release_members(self) -> None:
        """Let every member exit; those that do not are killed with the fork server."""
        self.outcome.step = self.members.step
        cut_short = any(summary.get("stopped") for summary in self.outcome.summaries.values())
        stops = cut_short or self.members.options.scripts
        if self._stop_signal and stops and not self.outcome.exit_code:
            saved = self.outcome.summaries.get(0, {}).get("checkpoint") == self.members.step
            self.outcome.exit_code = RUN_AGAIN if saved and cut_short else 128 + self._stop_signal
        deadline = time.monotonic() + GRACE_S
        while self.processes.pids and time.monotonic() < deadline:
            for member in self.processes.pids:
                self._send(member, Release())
            self.processes.next_report(timeout_s=0.02)
            while self._router.poll(0):
                self._router.recv_multipart()

    def _broadcast(
        self, members: Sequence[int | None], message: messages.SupervisorMessage
    ) -> None:
        for member in members:
            if member is not None:
                self._send(member, message)

    def _send(self, member: int, message: messages.SupervisorMessage) -> None:
        try:
            identity = f"{member}:{self._token}".encode()
            self._router.send_multipart([identity, messages.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError:
            return  # it has not connected or has ended; its exit or its silence shows that

    def _seat_of(self, member: int) -> int | None:
        return self.members.seats.index(member) if member in self.members.seats else None

    def _server_of(self, seat: int | None) -> int | UnsetType:
        """The number of the server in a seat; unset if a rank is in it."""
        server = None if seat is None else self.members.size.server_of(seat)
        return UNSET if server is None else server

    def _record(self, *events: Event) -> None:
        for event in events:
            event = msgspec.structs.replace(event, time=time.time())
            try:
                self._events.write(event)
            except OSError as error:  # a full disk must not end a healthy run
                warn_once(f"events.jsonl cannot be written: {error}. The run continues.")
            self._on_event(event)

    def _close(self) -> None:
        self.processes.close()
        # Files of servers are of no use to another run.
        shutil.rmtree(self._run_dir / "servers", ignore_errors=True)
        if self._resizes is not None:
            self._resizes.close()
        self._events.close()
        self._router.close()
        self._context.term()
        self._store.close()


def hangs_of(members: Membership, beats: Mapping[int, Heartbeat]) -> list[HangEvent]:
    """The hang that the last heartbeats tell of, if they do."""
    num_ranks = members.size.num_ranks
    seats = {member: rank for rank, member in enumerate(members.seats[:num_ranks])}
    stands = {seats[m]: b.standing for m, b in beats.items() if m in seats and b.standing}
    found = explain_hang(stands, num_ranks, members.step)
    return [] if found is None else [found]
