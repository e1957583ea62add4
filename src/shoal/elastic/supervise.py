"""The supervisor: it starts the ranks, listens, and keeps every seat filled until the run is
over.

It holds the store and numbers the generations, so any rank may die. All decisions are
`membership.py`'s; this file carries them out. It runs in the process of the command line, whose
death ends the nursery and every rank.
"""

import hmac
import secrets
import shutil
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import zmq

from shoal.comm import wire
from shoal.comm.reach import Reach
from shoal.comm.run_store import StoreServer
from shoal.elastic import actions, messages
from shoal.elastic.forming import Forming, still_forming
from shoal.elastic.membership import Membership
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
from shoal.elastic.progress import Progress, did_not_stop
from shoal.elastic.resizes import Resizes
from shoal.errors import RUN_AGAIN, Ended
from shoal.events.sinks import JsonLines
from shoal.logs import warn_once
from shoal.system.fork_server import Birth, Born, Exited, NotPrepared, Prepared, Processes
from shoal.system.processes import how_it_ended, stop_signals

POLL_MS = 100
GRACE_S = 2.0
STUCK_S = 10.0  # without a turn of its loop, a supervisor that was told to stop is ended
MOST_BYTES = 16 << 20  # that a member says at once


@dataclass
class Outcome:
    """How a run ended. `trace` is the traceback of the first rank that failed."""

    exit_code: int = 0
    cause: str = ""
    trace: str = ""
    step: int = 0
    num_recoveries: int = 0
    plan: str = ""  # that the run followed at last, if it was resized
    num_steps_again: int = 0  # committed by ranks of which none is left, and done again
    stopped_by: int = 0
    summaries: dict[int, dict[str, Any]] = field(default_factory=dict)  # by rank


Watch = Callable[[dict[str, Any]], None]


class Supervisor:
    """Runs the ranks of one job. `watch` is told of progress and of every event."""

    def __init__(
        self,
        nursery: Processes,
        members: Membership,
        run_dir: Path,
        watch: Watch,
        reach: Reach,
        resizes: Resizes | None = None,
        stop_timeout_s: float | None = None,
    ):
        """`reach` is where members find this process; `resizes` are requests for another size, if
        the run can have one; `stop_timeout_s` is `progress.py`'s."""
        self.nursery = nursery
        self.members = members
        self.outcome = Outcome()
        self._watch = watch
        self._run_dir = run_dir
        self._events = JsonLines(run_dir / "events.jsonl")
        self._token, self._reach = secrets.token_hex(16), reach
        self._store = StoreServer(reach)
        self._context: wire.Context = zmq.Context()
        self._router, self._address = wire.listen(self._context, *reach.place, MOST_BYTES)
        self._over = False
        self._has_failed = False  # whether a member of the present group said so
        self._stop_signal = 0
        self._signals: list[int] = []
        self._pids: dict[int, int] = {}  # of members, as they say themselves
        self._logs: dict[int, Path] = {}
        self._at: dict[int, str] = {}  # where members work that were told to stop
        self._resizes = resizes
        self._forming = Forming(members.form_timeout_s)
        self._progress, self._turned = Progress(stop_timeout_s), time.monotonic()

    def run(self) -> Outcome:
        """Until the run is over, one way or another. Nothing is left running afterwards."""
        handlers: dict[int, Any] = {s: signal.signal(s, self._on_signal) for s in stop_signals()}
        handlers[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._on_alarm)
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        for ear in self.nursery.ears:
            poller.register(ear, zmq.POLLIN)
        if self._resizes is not None:
            poller.register(self._resizes.control.fileno(), zmq.POLLIN)
        try:
            self._act(self.members.begin(time.monotonic()))
            while not self._over:
                poller.poll(POLL_MS)
                self._turned = time.monotonic()
                self._hear_nursery()
                self._hear_members()
                self._act(self.members.tick(time.monotonic()))
                self._name_late()
                self._tell_of_standstill()
                if self._resizes is not None:
                    self._act(
                        self._resizes.turn(self.members, bool(self._signals or self._stop_signal))
                    )
                self._pass_on_stop()
                self._watch({"event": "tick"})
            self._let_go()
        except (EOFError, BrokenPipeError):
            self._give_up(self.nursery.why_gone(), 1)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            self._close()
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return self.outcome

    def _name_late(self) -> None:
        seated = self.members.generation, self.members.seats, self.members.formed
        if not self._over and (late := self._forming.late(*seated, time.monotonic())):
            told = still_forming(self.members.size, late, self.members.form_timeout_s)
            self._event("warning", text=told)

    def _tell_of_standstill(self) -> None:
        """Say so if ranks get no further, each of them waiting for another perhaps."""
        now, members = time.monotonic(), self.members
        works = bool(members.formed) and not members.scripts  # a script may do as it likes
        if self._over or not works:
            return
        if (seconds := self._progress.standstill_s(now)) is not None:
            self._ask_for_stacks()
            self._event("standstill", seconds=round(seconds), step=members.step)

    def _ask_for_stacks(self) -> None:
        """Let each member write into its log where it stands."""
        for member in self.members.seats if not self.members.scripts else ():
            if member in self.nursery.pids:
                self.nursery.kill(member, signal.SIGUSR1)

    def _on_signal(self, number: int, frame: object) -> None:
        self._signals.append(number)
        signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)

    def _on_alarm(self, number: int, frame: object) -> None:
        """Whatever the loop waits for (a screen that takes no more, say), it was told to end."""
        if time.monotonic() - self._turned > STUCK_S:
            raise Ended(128 + self._signals[0])

    def _pass_on_stop(self) -> None:
        """The first signal asks for a clean stop, the second ends everything now.

        Repeated until the run is over: a member may have come after the first time.
        """
        if self._signals and not self._stop_signal:
            self._event("stopping", signal=signal.Signals(self._signals[0]).name)
        if self._signals:
            self._stop_signal = self.outcome.stopped_by = self._signals[0]
        if len(self._signals) > 1:
            self._give_up("it was interrupted twice", 128 + self._signals[-1])
        if self._stop_signal and not self._over:
            if self.members.generation < 0 or (self.members.scripts and not self.members.formed):
                when = "while a group formed" if self.members.step > 0 else "before the first step"
                self._give_up(f"it was interrupted {when}", 128 + self._stop_signal)
            self._tell(self.members.seats, Stop())
            self._end_who_hangs(time.monotonic())

    def _end_who_hangs(self, now: float) -> None:
        """Once nobody gets anything done any more on the way to a clean stop."""
        self._progress.asked(now)
        late_s = self._progress.late_s(now)
        if late_s is None:
            return
        if not self.members.scripts:  # of which each does with the signal as it likes
            self._ask_for_stacks()
            time.sleep(0.5)
        members = self.members
        cause = did_not_stop(members.size, members.seats, members.finished, self._at, late_s)
        self._give_up(cause, 128 + self._stop_signal)

    def _hear_nursery(self) -> None:
        while (report := self.nursery.next_report(timeout_s=0)) is not None:
            match report:
                case Born():
                    self._event("started", member=report.number, pid=report.pid)
                case Exited():
                    seat = self._seat_of(report.number)
                    if seat is not None and not self._over:
                        suspected = self.members.members[report.number].suspected
                        how = suspected or how_it_ended(report.status)
                        what = {"status": report.status, "how": how, "step": self.members.step}
                        self._event("exited", **self._who(seat), **what)
                    now = time.monotonic()
                    self._hear_members()  # what it said before it ended
                    self._act(self.members.exited(report.number, report.status, now))
                case Prepared() | NotPrepared():
                    raise AssertionError("the nursery prepares once")

    def _hear_members(self) -> None:
        while self._router.poll(0):
            identity, *frames = self._router.recv_multipart()
            member = self._member_of(identity)
            if member is None:
                warn_once("Something that is no member of this run speaks to it, and is not heard.")
                continue
            try:
                message = wire.decode(frames[-1], messages.FROM_MEMBER)
            except wire.BadFrame as bad:
                warn_once(f"member {member} is not understood: {bad}", kind=f"member {member}")
                continue
            self._take_in(member, message)

    def _member_of(self, identity: bytes) -> int | None:
        """Which member says that it is this; None if none that was started has this name."""
        number, _, token = identity.partition(b":")
        if not hmac.compare_digest(token, self._token.encode()) or not number.isdigit():
            return None
        return int(number) if int(number) in self._logs else None

    def _take_in(self, member: int, message: messages.MemberMessage) -> None:
        now = time.monotonic()
        self.members.heard(member, now, getattr(message, "step", -1))
        match message:
            case Ready():
                self._pids[member] = message.pid
                self._act(self.members.ready(member, now, message.recovers))
            case Here():
                self._act(self.members.here(member, message.generation))
            case Formed():
                self._act(self.members.has_formed(member, message.generation, message.step, now))
            case Lost():
                self._event("lost", **self._who(self._seat_of(member)), why=message.why)
                self.members.lost(member, message.generation, now, message.why)
            case Beat():
                self._progress.heard(member, message.step, message.work, now)
                self._at[member] = message.at
                if message.stops and not self._stop_signal:
                    self._stop_signal = self.outcome.stopped_by = signal.SIGTERM
                    self._event("stopping", signal="SIGTERM", **self._who(self._seat_of(member)))
                if message.progress:
                    self._watch({"event": "progress", **message.progress})
            case Note():
                self._noted(message)
            case Done():
                seat = self._seat_of(member)
                if seat is not None and message.summary:
                    self.outcome.summaries[seat] = message.summary
                if message.summary.get("stopped") and not self._stop_signal:
                    # A rank was told to end by somebody else, and all agreed to stop with it.
                    self._stop_signal = self.outcome.stopped_by = signal.SIGTERM
                self._act(self.members.done(member, message.generation))
            case Met():
                if self._resizes is not None:
                    self._resizes.parted(message.generation, message.num_bytes)
                generation, step, why = message.generation, message.step, message.problem
                self._act(self.members.met(member, generation, step, now, why))
            case Failed():
                self._recipe_failed(member, message)

    def _noted(self, note: Note) -> None:
        if note.event in ("busy", "waiting"):
            self._progress.explained(time.monotonic())
        elif note.event != "warning":
            self._progress.done(time.monotonic())
        self._event(note.event, **note.what)

    def _recipe_failed(self, member: int, message: Failed) -> None:
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
        # Who is new has made no step, and a server makes none of its own.
        step = message.step or self.members.step
        where = "" if step < 0 else f" at step {step + 1}"
        cause, now = f"{who} failed{where}: {message.message}", time.monotonic()
        self._act(self.members.failed(member, cause, message.exit_code, now))

    def _act(self, wanted: list[actions.Action]) -> None:
        for action in wanted:
            match action:
                case actions.Spawn():
                    self._spawn(action.member, action.host)
                case actions.Kill():
                    self.nursery.kill(action.member)
                case actions.Announce():
                    self._announce(action)
                case actions.AllHere():
                    self._tell(self.members.seats, Go(action.generation))
                case actions.AllFormed():
                    self._formed(action)
                case actions.AllDone():
                    self._over = self.members.over
                    self._tell(self.members.seats, Leave())
                case actions.GiveUp():
                    self._give_up(action.cause, action.exit_code)
                case actions.Meet() | actions.Part() | actions.Resized() | actions.NotResized():
                    self._resize(action)

    def _resize(
        self, action: actions.Meet | actions.Part | actions.Resized | actions.NotResized
    ) -> None:
        assert self._resizes is not None
        num_ranks = self.members.size.num_ranks
        match action:
            case actions.Meet():
                self._tell(self.members.seats[:num_ranks], Meet(action.generation))
            case actions.Part():
                part = Part(action.generation, action.num_servers)
                self._tell(self.members.seats[num_ranks:], part)
            case actions.Resized():
                self._tell(action.leavers, Leave())
                told = self._resizes.done(action)
                self.outcome.plan = told["plan"]
                self._event("resized", generation=self.members.generation, **told)
            case actions.NotResized():
                self._resizes.not_done(action)
                self._event("not-resized", step=self.members.step, why=action.cause)

    def _spawn(self, member: int, host: int) -> None:
        told = {
            "SHOAL_CONTROL": self._address,
            "SHOAL_MEMBER": f"{member}:{self._token}",
            "SHOAL_FORM_TIMEOUT_S": str(self.members.form_timeout_s),
            **self._reach.told(),
            **(self._meeting_place if self.members.scripts else {}),
            "RANK": str(member),
            "LOCAL_RANK": str(member),
            "WORLD_SIZE": str(self.members.num_seats),
            "LOCAL_WORLD_SIZE": str(self.members.num_seats),
        }
        # A member keeps its log: that of a spare is under its own name, whatever its seat.
        server = self.members.size.server_of(member)
        name = f"rank-{member:03d}" if server is None else f"server-{server:03d}"
        if self.members.generation >= 0 or member >= self.members.num_seats:
            name = f"spare-{member:03d}"
        self._logs[member] = self._run_dir / "logs" / f"{name}.log"
        self.nursery.spawn(Birth(member, str(self._logs[member]), told, host))

    @cached_property
    def _meeting_place(self) -> dict[str, str]:
        """Where a script meets that forms a group of torch's by itself: nobody listens before."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}

    def _announce(self, plan: actions.Announce) -> None:
        self._store.forget(f"generation/{plan.generation - 2}/")  # of which all have left
        for seat, member in enumerate(plan.seats):
            self._event(
                "seat",
                **self._who(seat),
                pid=self._pids[member],
                generation=plan.generation,
                host=self.members.members[member].host,
                log=self._logs[member].name,
            )
            sizes = tuple(self.members.sizes)
            self._send(member, TakeSeat(plan.generation, seat, sizes, self._store.address))

    def _formed(self, group: actions.AllFormed) -> None:
        self._has_failed, self.outcome.trace = False, ""
        if group.lost_at is not None:
            ms = round((time.monotonic() - group.lost_at) * 1000, 1)
            self.outcome.num_recoveries += max(1, len(group.replaced))
            self.outcome.num_steps_again += max(0, group.num_steps_again)
            for seat, cause in group.replaced or ((None, "the group broke"),):
                self._event(
                    "recovered",
                    generation=group.generation,
                    **self._who(seat),
                    cause=cause,
                    step=group.step,
                    ms=ms,
                    spare=self.members.num_spares > 0,
                )
        else:
            self._event("formed", generation=group.generation, step=group.step)

    def _give_up(self, cause: str, exit_code: int) -> None:
        if not self._over:
            self._over = True
            self.members.over = True
            self.outcome.cause, self.outcome.exit_code = cause, exit_code
            self._event("gave-up", cause=cause, step=self.members.step)

    def _let_go(self) -> None:
        """Let every member leave by itself; who does not is ended with the nursery."""
        self.outcome.step = self.members.step
        cut_short = any(summary.get("stopped") for summary in self.outcome.summaries.values())
        if self._stop_signal and (cut_short or self.members.scripts) and not self.outcome.exit_code:
            saved = self.outcome.summaries.get(0, {}).get("checkpoint") == self.members.step
            self.outcome.exit_code = RUN_AGAIN if saved and cut_short else 128 + self._stop_signal
        deadline = time.monotonic() + GRACE_S
        while self.nursery.pids and time.monotonic() < deadline:
            for member in self.nursery.pids:
                self._send(member, Leave())
            self.nursery.next_report(timeout_s=0.02)
            while self._router.poll(0):
                self._router.recv_multipart()

    def _tell(self, members: Sequence[int | None], message: messages.SupervisorMessage) -> None:
        for member in members:
            if member is not None:
                self._send(member, message)

    def _send(self, member: int, message: messages.SupervisorMessage) -> None:
        try:
            identity = f"{member}:{self._token}".encode()
            self._router.send_multipart([identity, messages.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError:
            return  # it has not come or is gone: its exit or its silence says the same

    def _seat_of(self, member: int) -> int | None:
        return self.members.seats.index(member) if member in self.members.seats else None

    def _who(self, seat: int | None) -> dict[str, int | None]:
        """A seat, as events name it: that of a server with the server's number as well."""
        server = None if seat is None else self.members.size.server_of(seat)
        return {"rank": seat} | ({} if server is None else {"server": server})

    def _event(self, event: str, **what: Any) -> None:
        record = {"event": event, "time": time.time(), **what}
        try:
            self._events.write(record)
        except OSError as error:  # a full disk must not end a healthy run
            warn_once(f"events.jsonl cannot be written: {error}. The run goes on.")
        self._watch(record)

    def _close(self) -> None:
        self.nursery.close()
        # What servers wrote down there is of no use to another run.
        shutil.rmtree(self._run_dir / "servers", ignore_errors=True)
        if self._resizes is not None:
            self._resizes.close()
        self._events.close()
        self._router.close()
        self._context.term()
        self._store.close()
