"""Reads a run directory again and again, and gives what is shown of it as one bounded record.

A reader keeps where it stopped in events.jsonl and metrics.jsonl, so that a look at a run under way
costs what came since the last one; what it holds does not grow with the run (`step_buckets.py`,
`history.py`). Nothing of a directory is trusted: files may be torn, of another version, not
readable, or gone; each becomes a sentence in `problems`, and no error. The recipe is not loaded and
the run is not asked.

Read next: `findings.py`, for what is made of the figures.
"""

import math
import os
import re
import shlex
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from shoal.errors import ShoalError, sendable
from shoal.events.sinks import EVENTS, SPENT
from shoal.launch.outcome import OUTCOME
from shoal.launch.run_status import METRICS, how_it_stands
from shoal.plans.plan import Plan
from shoal.storage.decoding import try_decode_json
from shoal.storage.files import read_regular_file
from shoal.storage.line_tail import LineTail
from shoal.storage.run_dir import RUN, owner_of
from shoal.ui.findings import compression_in_words, find_bottleneck, settings_of
from shoal.ui.history import History, SpentRow, TimeSpent, ended_without_a_word
from shoal.ui.listing import read_row
from shoal.ui.records import (
    Curves,
    Figure,
    RunState,
    RunView,
    Saved,
    Strip,
    Strips,
    Totals,
)
from shoal.ui.step_buckets import KINDS, Bucket, StepBuckets, StepRow

BLOCK_BYTES = 1 << 20  # read at a time, and the longest line
MOST_DESCRIPTION_BYTES = 4 << 20
MOST_CELLS = 16_384  # buckets times workers of the strips
MOST_STRIPS = 256
CELLS = 512  # of a strip, if there is room for as many
_CHECKPOINT = re.compile(r"step-\d{1,19}")


class RunReader:
    """Reads one run directory. `look` reads what came since the last time."""

    def __init__(self, path: Path):
        self.path = path
        self._described: dict[str, Any] = {}
        self._outcome: dict[str, Any] = {}
        self._seen: dict[str, tuple[int, int]] = {}  # file: when and how large it was
        self._problems: dict[str, str] = {}
        self._begin()

    def _begin(self) -> None:
        self._events = LineTail(self.path / EVENTS)
        self._metrics = LineTail(self.path / METRICS)
        self._spent = LineTail(self.path / SPENT)
        self._history = History()
        self._buckets = StepBuckets(_count(self._described, "num_steps"))
        self._num_bad = {EVENTS: 0, METRICS: 0, SPENT: 0}
        self.is_behind = False

    @property
    def _tails(self) -> tuple[tuple[str, LineTail], ...]:
        return (EVENTS, self._events), (SPENT, self._spent), (METRICS, self._metrics)

    def look(self, is_over: bool = False, most_s: float = math.inf) -> RunView:
        """What the directory says now; `is_over` if its run has ended, although it is locked. What
        cannot be read within `most_s` is left for the next look (`is_behind`)."""
        self._describe()
        deadline = time.monotonic() + most_s
        while self._read(deadline):
            self._begin()  # a run that resumes has cut its record: read it again
        return self._view(is_over)

    def _describe(self) -> None:
        for name in (RUN, OUTCOME):
            path = self.path / name
            try:
                now = path.stat()
                if self._seen.get(name) == (now.st_mtime_ns, now.st_size):
                    continue
                found = try_decode_json(
                    read_regular_file(path, MOST_DESCRIPTION_BYTES), dict[str, Any]
                )
                self._seen[name] = (now.st_mtime_ns, now.st_size)
                self._problems.pop(name, None)
                if found is None:
                    self._problems[name] = f"{name} cannot be read: it is no JSON object."
            except FileNotFoundError:
                found = {}
                self._problems.pop(name, None)
                if name == RUN:
                    there = self.path.is_dir()
                    why = "has no run.json: no run began here, or not yet" if there else "is gone"
                    self._problems[name] = f"{sendable(str(self.path))} {why}."
            except OSError as error:
                found = {}
                self._problems[name] = f"{name} cannot be read: {error.strerror}."
            if name == RUN:
                self._described = found or {}
            else:
                self._outcome = found or {}

    def _read(self, deadline: float) -> bool:
        """Take in what came; True if a file is another one now."""
        self.is_behind = False
        for name, tail in self._tails:
            self._problems.pop(name, None)
            try:
                while True:
                    block, is_anew = tail.more(BLOCK_BYTES)
                    if is_anew:
                        return True
                    if not block:
                        break
                    self._take(name, block)
                    if time.monotonic() > deadline:
                        self.is_behind = True
                        break
            except OSError as error:
                self._problems[name] = f"{name} cannot be read: {error.strerror}."
        return False

    def _take(self, name: str, block: bytes) -> None:
        if name == METRICS:
            rows = list(self._decoded(block, _ROWS, name))
            self._buckets.add(rows, self._history.starts)
        elif name == SPENT:
            for row in self._decoded(block, _SPENT, name):
                self._history.spend(row)
        else:
            for event in self._decoded(block, _EVENTS, name):
                self._history.take(event)

    def _decoded(self, block: bytes, decoder: "msgspec.json.Decoder[Any]", name: str) -> list[Any]:
        """All lines at once; one by one if one of them is bad."""
        with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            found: list[Any] = decoder.decode_lines(block)
            return found
        kept = []
        for line in block.splitlines():
            try:
                kept.append(decoder.decode(line))
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                self._num_bad[name] += bool(line.strip())
        return kept

    # ---- what is shown

    def _view(self, is_over: bool) -> RunView:
        described, history, steps = self._described, self._history, self._buckets
        is_running = not is_over and owner_of(self.path) is not None
        last = steps.last or StepRow(0)
        num_steps = _count(described, "num_steps")
        state, reason = self._state(is_running, last.step, num_steps)
        if self.is_behind:  # the end of the record says more than what is read so far
            row = read_row(self.path, "", is_running)
            state, reason = row.state, row.reason
        seen_at = max(history.seen_at, steps.buckets[-1].end if steps.buckets else 0.0)
        now = time.time() if is_running else seen_at
        if not is_running:
            history.ended(seen_at)
        plan = history.plan or _text(described, "plan")
        wall_s = now - history.began_at if history.began_at else 0.0
        totals = totals_of(steps.buckets, history, wall_s)
        strips = strips_of(steps.buckets, history, now)
        keys = plan_keys(plan)
        incidents = list(history.incidents)
        if state == "failed" and not history.cause:  # no event says so
            incidents.append(ended_without_a_word(seen_at, last.step, reason))
        left = max(0, num_steps - last.step)
        pace = _pace(steps.buckets) if is_running and left else None
        num_ranks = sum(not seat.is_server for seat in history.seats.values()) or 1
        peak = self._outcome.get("peak_memory_bytes")
        return RunView(
            name=name_of(self.path),
            path=sendable(str(self.path)),
            state=state,
            reason=reason,
            recipe=_text(described, "recipe"),
            plan=plan,
            step=last.step,
            num_steps=num_steps,
            loss=last.loss,
            began_at=history.began_at,
            seen_at=now,
            remaining_s=None if pace is None else left * pace,
            generation=history.generation,
            totals=totals,
            curves=curves_of(steps, strips),
            strips=strips,
            incidents=incidents,
            num_incidents=history.num_incidents + len(incidents) - len(history.incidents),
            checkpoints=self._checkpoints(),
            bottleneck=find_bottleneck(totals, keys, num_ranks),
            settings=settings_of(described) if described else [],
            environment=_texts(described.get("environment")),
            compression=compression_in_words(totals, keys, _count(described, "num_parameters")),
            staleness=_mapping(self._outcome.get("staleness")),
            predicted=predicted_beside_measured(self._outcome or described, totals),
            hosts=list(history.hosts.values()),
            peak_memory_bytes=peak if isinstance(peak, int) else None,
            traces=[sendable(str(file)) for file in sorted(self.path.glob("trace/*.json"))[:20]],
            problems=self._in_words(),
        )

    def _state(self, is_running: bool, step: int, num_steps: int) -> tuple[RunState, str]:
        history = self._history
        if not self._described and not is_running:
            is_empty = self.path.is_dir() and not (self.path / RUN).exists()
            return ("queued", "") if is_empty else ("unreadable", self._problems.get(RUN, ""))
        is_done = history.has_ended_early or step >= num_steps > 0
        return how_it_stands(is_running, is_done, history.stopped_by, history.cause)

    def _checkpoints(self) -> list[Saved]:
        """Those that were reported, with whether they are still there, newest first."""
        elsewhere = self._described.get("checkpoints")
        where = Path(elsewhere) if isinstance(elsewhere, str) else self.path / "checkpoints"
        is_local = not (isinstance(elsewhere, str) and "://" in elsewhere)
        names: set[str] = set()
        with suppress(OSError):
            names = set(os.listdir(where)) if is_local else names
        known = sorted(self._history.checkpoints.values(), key=lambda one: -one.step)
        found: list[Saved] = []
        for one in known:
            is_there = bool(_CHECKPOINT.fullmatch(one.name)) and (not is_local or one.name in names)
            place = str(where / one.name) if is_local else f"{elsewhere}/{one.name}"
            resume = self._command(place, is_newest=not found) if is_there else ""
            one = msgspec.structs.replace(one, is_there=is_there, resume=sendable(resume))
            found += [one] if is_there or len(found) < 50 else []
        return found

    def _command(self, place: str, is_newest: bool) -> str:
        """What goes on from a checkpoint: with the run itself, or as a run of its own."""
        recipe = _text(self._described, "recipe")
        if not recipe:
            return ""
        if is_newest:
            return shlex.join(["shoal", "train", recipe, "--resume", "--run-dir", str(self.path)])
        return shlex.join(["shoal", "train", recipe, "--from", place, "--take", "everything"])

    def _in_words(self) -> list[str]:
        """What is wrong with the record."""
        found = list(self._problems.values())
        if self.is_behind:
            found.append("The record is long, and still being read.")
        for name, tail in self._tails:
            num_bad = self._num_bad[name] + tail.num_skipped
            if num_bad:
                lines = "1 line" if num_bad == 1 else f"{num_bad} lines"
                found.append(f"{lines} of {name} cannot be read, and are left out.")
        if self._buckets.is_cut:
            found.append("More values were logged than are drawn; metrics.jsonl has them all.")
        return found


_ROWS = msgspec.json.Decoder(StepRow)
_SPENT = msgspec.json.Decoder(SpentRow)
_EVENTS = msgspec.json.Decoder(dict[str, Any])


def read_view(path: Path, *, is_over: bool = False) -> RunView:
    """What a run directory says, once."""
    return RunReader(path).look(is_over)


def name_of(path: Path) -> str:
    """A trial's directory is called by its number, which every study has."""
    path = path.resolve()
    return sendable("/".join(path.parts[-3 if path.parent.name == "trials" else -1 :]))


def plan_keys(plan: str) -> dict[str, str]:
    """The keys of a plan that has been resolved; none of one that this version does not know."""
    with suppress(ShoalError):
        Plan.parse(plan)
        return dict(word.split("=", 1) for word in plan.replace(",", " ").split() if "=" in word)
    return {}


def totals_of(buckets: list[Bucket], history: History, wall_s: float) -> Totals:
    """Sums over all steps. Pure.

    Seconds are those of the mean rank, as far as ranks said what they spent them for."""
    paused_s = history.paused_s
    if not buckets:
        return Totals(wall_s=wall_s, paused_s=paused_s)
    own = [sum(column) for column in zip(*(bucket.seconds for bucket in buckets))]
    total, shared = sum(own), own
    ranks = {name: seat for name, seat in history.seats.items() if seat.num_steps}
    if ranks:
        shared = [sum(column) for column in zip(*(seat.totals for seat in ranks.values()))]
        all_s = sum(shared) or 1.0
        shared = [total * seconds / all_s for seconds in shared]
    work = {name: sum(seat.totals[:2]) / seat.num_steps for name, seat in ranks.items()}
    middle = sorted(work.values())[(len(work) - 1) // 2] if work else 0.0
    slowest = max(work, key=lambda name: work[name], default="")
    shares = dict(zip(KINDS, shared))
    samples = sum(b.samples for b in buckets)
    ideal_s = shares["data"] + shares["compute"]
    return Totals(
        steps=sum(b.num_steps for b in buckets),
        samples=samples,
        bytes_sent=sum(b.bytes_sent for b in buckets),
        seconds=shares,
        slowest=slowest if len(work) > 1 else "",
        slowest_times=work[slowest] / middle if middle else 1.0,
        samples_per_s=samples / total if total else None,
        ideal_samples_per_s=samples / ideal_s if ideal_s else None,
        goodput=min(1.0, total / wall_s) if wall_s > 0 else None,
        wall_s=wall_s,
        paused_s=paused_s,
    )


def _pace(buckets: list[Bucket]) -> float | None:
    """Seconds a step, over the last ones and what lies between them."""
    recent = buckets[-20:]
    num_steps = sum(bucket.num_steps for bucket in recent)
    return (recent[-1].end - recent[0].begin) / num_steps if num_steps else None


def curves_of(steps: StepBuckets, strips: Strips) -> Curves:
    """Every curve over the buckets. Pure."""
    buckets = steps.buckets
    figures = {}
    for name in steps.names:
        found = [bucket.extents.get(name) for bucket in buckets]
        figures[name] = Figure(
            mean=[None if one is None else _short(one.mean) for one in found],
            low=[None if one is None else _short(one.low) for one in found],
            high=[None if one is None else _short(one.high) for one in found],
        )
    for name, values in _derived(buckets, strips).items():
        figures[name] = Figure(mean=values, low=[], high=[])
    return Curves(
        step=[bucket.last for bucket in buckets],
        time=[round(bucket.end, 3) for bucket in buckets],
        figures=figures,
    )


def _derived(buckets: list[Bucket], strips: Strips) -> dict[str, list[float | None]]:
    """What follows from others; the ideal is of the mean rank's work at that time."""

    def ratio(amount: float, per: float) -> float | None:
        return _short(amount / per) if per > 0 else None

    work = _shares_of_work(strips)
    found: dict[str, list[float | None]] = {
        "samples/s": [ratio(b.samples, sum(b.seconds)) for b in buckets],
        "ideal samples/s": [
            ratio(b.samples, sum(b.seconds) * work[_cell(strips, (b.begin + b.end) / 2)])
            for b in buckets
        ],
        "bytes a step": [ratio(b.bytes_sent, b.num_steps) for b in buckets],
    }
    for number, kind in enumerate(KINDS):
        found[f"seconds/{kind}"] = [ratio(b.seconds[number], b.num_steps) for b in buckets]
    return found


def _shares_of_work(strips: Strips) -> list[float]:
    """By cell, how much of their steps ranks work, on the mean; 0 where none told of a step."""
    work, all_s = [0] * (len(strips.begin) or 1), [0] * (len(strips.begin) or 1)
    for worker in strips.workers:
        for kind, text in {} if worker.is_server else worker.shares.items():
            for cell, character in enumerate(text):
                all_s[cell] += ord(character) - 48
                work[cell] += (ord(character) - 48) * (kind in ("data", "compute"))
    return [part / whole if whole else 0.0 for part, whole in zip(work, all_s)]


def _cell(strips: Strips, time: float) -> int:
    return max(0, bisect_right(strips.begin, time) - 1)


def strips_of(buckets: list[Bucket], history: History, until: float) -> Strips:
    """What each worker did in each cell of the run's time. Pure.

    A rank of a run that has no word of it has the steps that it wrote down."""
    spent = {name: seat.spent for name, seat in list(history.seats.items())[:MOST_STRIPS]}
    if buckets and not any(spent.values()):
        spent["rank 0"] = [
            TimeSpent(bucket.begin, bucket.end, bucket.num_steps, tuple(bucket.seconds))
            for bucket in buckets
        ]
    told = [one for stretches in spent.values() for one in stretches]
    if not told:
        return Strips(workers=[_strip(name, [], history, 0.0, 1.0, 0) for name in spent])
    begin, end = min(one.begin for one in told), max(until, max(one.end for one in told))
    count = min(MOST_CELLS // max(1, len(spent)), CELLS)
    width = (end - begin) / count or 1.0
    names = sorted(spent, key=lambda name: (name.split()[0], int(name.split()[1])))
    return Strips(
        begin=[round(begin + cell * width, 3) for cell in range(count)],
        end=[round(begin + (cell + 1) * width, 3) for cell in range(count)],
        workers=[_strip(name, spent[name], history, begin, width, count) for name in names],
    )


def _strip(
    name: str,
    spent: Sequence[TimeSpent],
    history: History,
    begin: float,
    width: float,
    count: int,
) -> Strip:
    """The cells of a worker, as many as `count`, each `width` seconds, from `begin` on."""
    seat = history.seats.get(name)
    cells = [[0.0] * count for _ in KINDS]
    for one in spent:
        whole_s = max(one.end - one.begin, 1e-9)
        first = max(0, int((one.begin - begin) / width))
        for cell in range(first, min(count, 1 + int((one.end - begin) / width))):
            left, right = begin + cell * width, begin + (cell + 1) * width
            share = max(0.0, min(one.end, right) - max(one.begin, left)) / whole_s / width
            for kind, seconds in enumerate(one.seconds):
                cells[kind][cell] += share * seconds
    for cell, total in enumerate(map(sum, zip(*cells))):  # stretches may overlap a little
        for row in cells if total > 1 else ():
            row[cell] /= total
    columns = list(zip(*(one.seconds for one in spent)))
    return Strip(
        name=name,
        host=seat.host if seat else 0,
        pid=seat.pid if seat else 0,
        is_server=name.startswith("server "),
        is_alive=not (seat and seat.gone and seat.gone[-1][1] is None),
        shares={
            kind: "".join(chr(48 + min(64, round(64 * share))) for share in cells[number])
            for number, kind in enumerate(KINDS)
        },
        totals={kind: round(sum(column), 3) for kind, column in zip(KINDS, columns)},
        gone=list(seat.gone) if seat else [],
    )


def predicted_beside_measured(
    record: Mapping[str, Any], totals: Totals
) -> list[tuple[str, float | None, float | None]]:
    """What was foretold of the run beside what came. Pure."""
    predicted, measured = _mapping(record.get("predicted")), _mapping(record.get("measured"))
    rows = []
    for name in dict.fromkeys([*(predicted or {}), *(measured or {})]):
        pair = [
            float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
            for value in ((predicted or {}).get(name), (measured or {}).get(name))
        ]
        if pair != [None, None]:
            rows.append((str(name)[:200], pair[0], pair[1]))
    return rows[:100]


def _short(value: float) -> float:
    """Six digits, which is more than a curve shows."""
    return float(f"{value:.6g}")


def _count(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53
    return value if is_count else 0  # type: ignore[return-value]


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    return value[:2000] if isinstance(value, str) else ""


def _texts(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        return {}
    return {str(name)[:200]: str(text)[:2000] for name, text in list(value.items())[:100]}


def _mapping(value: Any) -> dict[str, Any] | None:
    return value if isinstance(value, dict) else None
