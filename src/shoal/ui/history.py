"""What happened to a run, from the lines of events.jsonl: seats, deaths, incidents, checkpoints.

Lines are taken one by one, in order, and only what is shown is kept: the newest few hundred
incidents, one entry a seat, one a checkpoint. A line of another version, or one that is damaged,
has fields that are missing or of another type; those count as absent, and nothing here raises.

Read next: `run_reader.py`; `docs/reference/events.md` lists the events.
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from shoal.ui.records import Grade, HostUseSeries, Incident, Saved
from shoal.ui.step_buckets import KINDS

MOST_INCIDENTS = 400
MOST_SAVED = 400
MOST_SEATS = 4096
MOST_GAPS = 1000
MOST_SAMPLES = 512  # of a host's resources
MOST_SPENT = 512  # stretches of a seat's time
MOST_TOLD = 256  # seats whose time is kept
MOST_TIME = 1e11  # seconds since 1970


class EventFields:
    """A line of events.jsonl, read with care."""

    def __init__(self, fields: Mapping[str, Any]):
        self._fields = fields
        self.kind = self.text("event")
        self.time = self.number("time") or 0.0
        step = self.number("step")
        self.step = None if step is None else int(step)
        self.rank, self.server = self.whole("rank"), self.whole("server")

    def text(self, name: str) -> str:
        value = self._fields.get(name)
        return value[:2000] if isinstance(value, str) else ""

    def number(self, name: str) -> float | None:
        value = self._fields.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return float(value) if is_number and abs(value) < 1e18 else None  # type: ignore[arg-type]

    def whole(self, name: str) -> int | None:
        value = self.number(name)
        return None if value is None else int(value)

    def mapping(self, name: str) -> dict[str, Any]:
        value = self._fields.get(name)
        return dict(value) if isinstance(value, dict) else {}

    def items(self, name: str) -> list[Any]:
        value = self._fields.get(name)
        return list(value) if isinstance(value, list) else []

    @property
    def seat(self) -> str:
        """`rank 3` or `server 1`; empty of an event without a seat."""
        if self.server is not None:
            return f"server {self.server}"
        return "" if self.rank is None else f"rank {self.rank}"


class SpentRow(msgspec.Struct, frozen=True, gc=False):
    """What is read of a line of spent.jsonl."""

    time: float = 0.0
    rank: int = -1
    server: int | None = None
    since_s: float = 0.0
    steps: int = 0
    data: float = 0.0
    compute: float = 0.0
    exchange: float = 0.0
    waiting: float = 0.0


class TimeSpent(msgspec.Struct, frozen=True):
    """What a member did in a stretch of time; seconds as `KINDS` names them."""

    begin: float
    end: float
    steps: int
    seconds: tuple[float, ...]


class SeatHistory(msgspec.Struct):
    """The seat of a rank or a server: which process has it, when none had it, and what it did."""

    host: int = 0
    pid: int = 0
    is_server: bool = False
    is_present: bool = True  # in the last generation
    gone: list[tuple[float, float | None]] = []
    spent: list[TimeSpent] = []

    @property
    def num_steps(self) -> int:
        return sum(one.steps for one in self.spent)

    @property
    def totals(self) -> list[float]:
        """Seconds by kind."""
        columns = list(zip(*(one.seconds for one in self.spent)))
        return [sum(column) for column in columns] or [0.0] * len(KINDS)


class History:
    """Give it every event in order. `starts` has the times at which work began after a step."""

    def __init__(self) -> None:
        self.seats: dict[str, SeatHistory] = {}
        self.incidents: list[Incident] = []
        self.num_incidents = 0
        self.checkpoints: dict[int, Saved] = {}
        self.hosts: dict[str, HostUseSeries] = {}
        self.starts: dict[int, float] = {}
        self.began_at: float | None = None
        self.seen_at = self.paused_s = 0.0
        self.generation: int | None = None
        self.plan = self.stopped_by = self.cause = ""
        self.has_ended_early = False

    def take(self, fields: Mapping[str, Any]) -> None:
        event = EventFields(fields)
        if self.began_at is None and event.time:
            self.began_at = event.time
        match event.kind:
            case "started" if event.whole("member") == 0:
                self._begin(event)
            case "seat":
                self._sit(event)
            case "formed" | "recovered" | "resized" | "resumed":
                self._at_work(event)
            case "measured-plan":
                self.plan = event.text("plan")
            case "exited":
                self._leave(event)
            case "saved" if event.step is not None:
                self._saved(event)
            case "host-use":
                self._sample(event)
            case "ended-early":
                self.has_ended_early = True
            case "stopping":
                self.stopped_by = event.text("signal") or "a signal"
            case "gave-up":
                self.cause = event.text("cause")
        self.seen_at = max(self.seen_at, event.time)
        incident = incident_of(event)
        if incident is not None:
            self._add(incident)

    def ended(self, time: float) -> None:
        """The run is over: no process comes back."""
        for seat in self.seats.values():
            if seat.gone and seat.gone[-1][1] is None:
                seat.gone[-1] = (seat.gone[-1][0], max(time, seat.gone[-1][0]))

    def _begin(self, event: EventFields) -> None:
        """A command began, or went on with the run."""
        if self.seen_at:
            self.paused_s += max(0.0, event.time - self.seen_at)
        for seat in self.seats.values():
            _fill(seat, event.time)
            seat.is_present = False
        self.generation, self.stopped_by, self.cause = None, "", ""

    def _sit(self, event: EventFields) -> None:
        if not event.seat or (event.seat not in self.seats and len(self.seats) >= MOST_SEATS):
            return
        generation = event.whole("generation")
        if generation != self.generation:
            self.generation = generation
            for seat in self.seats.values():
                seat.is_present = False
        is_server = event.server is not None
        seat = self.seats.setdefault(
            event.seat, SeatHistory(is_server=is_server, gone=[], spent=[])
        )
        seat.pid, seat.host = event.whole("pid") or 0, event.whole("host") or 0
        seat.is_present = True

    def spend(self, row: SpentRow) -> None:
        """Keep a stretch of a seat's time; two become one when there are too many."""
        most = row.since_s + 1
        seconds = (row.data, row.compute, row.exchange, row.waiting)
        if not (0 <= row.rank < MOST_TOLD and 0 < row.since_s < row.time < MOST_TIME):
            return
        if not (min(seconds) >= 0 and max(seconds) <= most and 0 <= row.steps < 2**53):
            return
        name = f"rank {row.rank}" if row.server is None else f"server {row.server}"
        if (seat := self.seats.get(name)) is None:
            is_server = row.server is not None
            seat = self.seats[name] = SeatHistory(is_server=is_server, gone=[], spent=[])
        spent = seat.spent
        spent.append(TimeSpent(row.time - row.since_s, row.time, row.steps, seconds))
        if len(spent) > MOST_SPENT:
            spent[:] = [_joined(*spent[at : at + 2]) for at in range(0, len(spent), 2)]
        self.seen_at = max(self.seen_at, row.time)

    def _at_work(self, event: EventFields) -> None:
        if event.step is not None:
            self.starts[event.step] = event.time
            if len(self.starts) > MOST_GAPS:
                del self.starts[next(iter(self.starts))]
        self.plan = event.text("plan") if event.kind == "resized" else self.plan
        if event.kind == "resumed":
            return
        for seat in self.seats.values():
            if seat.is_present:
                _fill(seat, event.time)

    def _leave(self, event: EventFields) -> None:
        seat = self.seats.get(event.seat)
        if seat is None or not event.whole("status"):
            return
        if len(seat.gone) < MOST_GAPS and (not seat.gone or seat.gone[-1][1] is not None):
            seat.gone.append((event.time, None))

    def _saved(self, event: EventFields) -> None:
        assert event.step is not None
        self.checkpoints[event.step] = Saved(
            step=event.step,
            name=event.text("name"),
            bytes=event.whole("bytes") or 0,
            ms=event.number("ms") or 0.0,
        )
        if len(self.checkpoints) > MOST_SAVED:
            del self.checkpoints[next(iter(self.checkpoints))]

    def _sample(self, event: EventFields) -> None:
        """What a host used; every second sample goes when there are too many."""
        host = str(event.whole("host") or 0)
        use = self.hosts.setdefault(host, HostUseSeries(host=host, time=[], figures={}))
        use.time.append(event.time)
        found = {name: event.number(name) for name in RESOURCES}
        for name, value in found.items():
            if value is not None or name in use.figures:
                column = use.figures.setdefault(name, [None] * (len(use.time) - 1))
                column.append(value)
        if len(use.time) > MOST_SAMPLES:
            halved = {name: column[::2] for name, column in use.figures.items()}
            self.hosts[host] = HostUseSeries(host=host, time=use.time[::2], figures=halved)

    def _add(self, incident: Incident) -> None:
        """The same again, such as a rank that waits for ever longer, replaces what was there."""
        for number in range(len(self.incidents) - 1, max(-1, len(self.incidents) - 9), -1):
            known = self.incidents[number]
            if is_same(known, incident):
                lost = incident.lost_s if incident.lost_s is not None else known.lost_s
                counted = known.count + (incident.kind not in GROWING)
                self.incidents[number] = msgspec.structs.replace(
                    incident, time=known.time, step=known.step, lost_s=lost, count=counted
                )
                return
            if incident.kind == "recovered" and known.kind == "exited" and known.lost_s is None:
                self.incidents[number] = msgspec.structs.replace(
                    known, lost_s=incident.lost_s, cause=f"{known.cause}; {incident.what}"
                )
                return
        self.num_incidents += 1
        self.incidents.append(incident)
        if len(self.incidents) > MOST_INCIDENTS:
            del self.incidents[0]


RESOURCES = (
    *("cpu_percent", "memory_bytes", "disk_read_bytes_per_s", "disk_written_bytes_per_s"),
    *("network_sent_bytes_per_s", "network_received_bytes_per_s"),
)
GROWING = ("busy", "waiting", "standstill")  # reported again at doubling times


def is_same(one: Incident, other: Incident) -> bool:
    if one.kind != other.kind:
        return False
    if one.kind in GROWING:
        return one.step == other.step and one.what.split(" for ")[0] == other.what.split(" for ")[0]
    return one.kind in ("emptied", "warning", "save-skipped") and one.cause == other.cause


def _joined(one: TimeSpent, other: TimeSpent | None = None) -> TimeSpent:
    if other is None:
        return one
    seconds = tuple(a + b for a, b in zip(one.seconds, other.seconds))
    return TimeSpent(one.begin, other.end, one.steps + other.steps, seconds)


def _fill(seat: SeatHistory, time: float) -> None:
    if seat.gone and seat.gone[-1][1] is None:
        seat.gone[-1] = (seat.gone[-1][0], time)


def ended_without_a_word(time: float, step: int, reason: str) -> Incident:
    """What a run that was killed as a whole could not report."""
    what = _IN_WORDS["gave-up"][1]
    return Incident(kind="gave-up", grade="bad", time=time, step=step, what=what, cause=reason)


def incident_of(event: EventFields) -> Incident | None:
    """An event in words; None of what is part of every run. Pure."""
    found = _IN_WORDS.get(event.kind)
    if found is None:
        return None
    grade, what, cause = found
    lost_s = event.number("seconds")
    if event.kind == "exited":
        status = event.whole("status")
        if not status:
            return None
    if event.number("ms") is not None and event.kind in ("recovered", "resized"):
        lost_s = (event.number("ms") or 0.0) / 1000
    return Incident(
        kind=event.kind,
        grade=grade,
        time=event.time,
        step=event.step,
        what=_filled(what, event),
        cause=_filled(cause, event),
        lost_s=lost_s,
    )


def _filled(text: str, event: EventFields) -> str:
    """A sentence with the fields that it names in braces."""
    return _FIELD.sub(lambda found: _field(found[1], event), text)[:2000]


def _field(name: str, event: EventFields) -> str:
    if name == "seat":
        return event.seat or "a member"
    if name in ("ranks", "rounds"):
        return ", ".join(str(number) for number in event.items(name)[:16])
    if name == "slow":
        slow = list(event.mapping("slow").items())[:16]
        told = ", ".join(f"replica {who} takes {times}x as long" for who, times in slow)
        return told or "speeds have changed"
    number = event.number(name)
    return event.text(name) if number is None else f"{number:g}"


_FIELD = re.compile(r"\{(\w+)\}")
# What each event is called: its grade, what happened, and why.
_IN_WORDS: dict[str, tuple[Grade, str, str]] = {
    "exited": ("bad", "{seat} was lost", "{how}"),
    "recovered": ("good", "all seats were filled again", "{cause}"),
    "resized": ("info", "resized: {change}", "{lost}"),
    "not-resized": ("warn", "the run keeps its size", "{why}"),
    "host-lost": ("bad", "host {host} was lost: {then}", "{how}"),
    "host-added": ("good", "host {host} came: {then}", ""),
    "stopping": ("info", "the run was told to stop", "{signal}"),
    "gave-up": ("bad", "the run ended before its last step", "{cause}"),
    "waiting": ("warn", "{seat} waited for samples for {seconds} s", "{samples}"),
    "busy": ("warn", "{seat} computed without a pause for {seconds} s", "{at}"),
    "standstill": ("bad", "nothing was done for {seconds} s", "no rank said why"),
    "slow": ("warn", "the others wait: {slow}", "{advice}"),
    "measured-plan": ("info", "{text}", ""),
    "balanced": ("info", "work moved: replicas take {rounds} parts of each batch", "{slow}"),
    "resumed": ("info", "the run went on from {name}", ""),
    "checkpoint-refused": ("warn", "{name} was passed over", "{why}"),
    "save-failed": ("bad", "a checkpoint could not be written", "{why}"),
    "save-skipped": ("warn", "a checkpoint was not begun", "{why}"),
    "rescued": ("warn", "the last checkpoint is in {place}", "its own place could not be written"),
    "unholdable": ("warn", "no checkpoint can be made", "{why}"),
    "model-failed": ("bad", "model.safetensors could not be written", "{why}"),
    "ended-early": ("info", "a callback ended the training", "{why}"),
    "emptied": ("warn", "quarantine left out all {left_out} samples of a batch", ""),
    "replica-repaired": ("warn", "rank {ranks} took the state of the majority", "it differed"),
    "replicas-differ": ("bad", "replicas differ (ranks {ranks})", "no majority says who is right"),
    "state-corrupted": ("bad", "state of rank {ranks} changed between two steps", ""),
    "hang": ("bad", "ranks hang in {op} {what}", "{text}"),
    "warning": ("warn", "warning", "{text}"),
}
