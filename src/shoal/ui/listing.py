"""The runs, studies and queued jobs below a directory, each as a row of a list.

A row is made from run.json and the ends of events.jsonl and metrics.jsonl, a few kilobytes each,
and kept until one of them changes; so a directory of five hundred runs is listed in a fraction of
a second, and again for a stat of each file. What cannot be read has a row that says so.

Read next: `run_reader.py`, for all that is shown of one run.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from shoal.errors import ShoalError, sendable
from shoal.events.sinks import EVENTS
from shoal.launch.engines import make_engine
from shoal.launch.run_status import METRICS, how_it_stands
from shoal.storage.decoding import reason, try_decode_json
from shoal.storage.files import read_regular_file
from shoal.storage.run_dir import RUN, owner_of
from shoal.ui.history import History
from shoal.ui.records import RunHead
from shoal.ui.step_buckets import StepRow

STUDY, RESULT = "study.json", "result.json"
MOST_RUNS = 5000
MOST_DEPTH = 3
MOST_BYTES = 1 << 20
TAIL_BYTES = 64 << 10


class RunRow(RunHead, frozen=True, kw_only=True):
    """One run of a list. `id` is its path below the directory."""

    id: str
    changed_at: float = 0.0
    study: str = ""


class StudyRow(msgspec.Struct, frozen=True, kw_only=True):
    """One tuning study: its trials are runs of the list, too."""

    id: str
    recipe: str = ""
    metric: str = ""
    space: str = ""
    finished: int = 0
    best: float | None = None
    best_trial: int | None = None
    trials: list[tuple[int, str, float | None]] = []  # number, state, value
    problem: str = ""


class QueueRow(msgspec.Struct, frozen=True, kw_only=True):
    """One job of the local queue."""

    job: str
    state: str
    name: str = ""
    run_dir: str = ""
    reason: str = ""


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """What `GET /api/runs` gives."""

    directory: str
    runs: list[RunRow]
    studies: list[StudyRow]
    queue: list[QueueRow]
    problems: list[str]
    can_control: bool = False


class RunDirectory:
    """Lists a directory again and again."""

    def __init__(self, path: Path):
        self.path = path
        self._rows: dict[str, tuple[Any, RunRow]] = {}

    def find(self, run: str) -> Path | None:
        """The directory of a run as the list names it; None if `run` names none, whatever it
        holds: no way leads out of this directory, nor through a link."""
        parts = run.split("/")
        if run != "." and any(not part or part.startswith(".") or "\0" in part for part in parts):
            return None
        places = [self.path.joinpath(*parts[:number]) for number in range(1, len(parts) + 1)]
        is_here = run == "." or len(parts) <= MOST_DEPTH
        with suppress(OSError):  # of a name that is too long
            is_linked = run != "." and any(place.is_symlink() for place in places)
            if is_here and not is_linked and (self.path / run / RUN).exists():
                return self.path / run
        return None

    def list_all(self) -> Listing:
        """Look at everything; the newest run first."""
        problems: list[str] = []
        places = list(_walk(self.path, problems))
        runs = [place for place, what in places if what == RUN]
        if len(runs) > MOST_RUNS:
            problems.append(f"There are {len(runs)} runs here; {MOST_RUNS} of them are listed.")
        studies = [place for place, what in places if what == STUDY]
        rows = {}
        for place in runs[:MOST_RUNS]:
            row = self._row(place, next((s for s in studies if s in place.parents), None))
            rows[row.id] = row
        self._rows = {name: self._rows[name] for name in rows}
        return Listing(
            directory=sendable(str(self.path)),
            runs=sorted(rows.values(), key=lambda row: -row.changed_at),
            studies=[self._study(place) for place in studies[:MOST_RUNS]],
            queue=_queue(problems),
            problems=problems,
        )

    def _name(self, place: Path) -> str:
        return sendable("." if place == self.path else str(place.relative_to(self.path)))

    def _row(self, place: Path, study: Path | None) -> RunRow:
        name = self._name(place)
        seen = [file_stamp(place / file) for file in (RUN, EVENTS, METRICS)]
        is_running = owner_of(place) is not None
        stamp = (seen, is_running)
        known = self._rows.get(name)
        if known is None or known[0] != stamp:
            row = read_row(place, name, is_running)
            if study is not None:
                row = msgspec.structs.replace(row, study=self._name(study))
            changed_at = max((stamp[0] for stamp in seen if stamp), default=0) / 1e9
            self._rows[name] = (stamp, msgspec.structs.replace(row, changed_at=changed_at))
        return self._rows[name][1]

    def _study(self, place: Path) -> StudyRow:
        name = self._name(place)
        try:
            about = try_decode_json(read_regular_file(place / STUDY, MOST_BYTES), dict[str, Any])
            if about is None:
                return StudyRow(id=name, problem=f"{STUDY} is no JSON object.")
            found: dict[str, Any] | None = {}
            with suppress(FileNotFoundError):
                found = try_decode_json(
                    read_regular_file(place / RESULT, 8 * MOST_BYTES), dict[str, Any]
                )
        except OSError as error:
            return StudyRow(id=name, problem=f"It cannot be read: {error.strerror}.")
        return _study_row(name, about, found or {})


def read_row(place: Path, name: str, is_running: bool) -> RunRow:
    """A row, from the ends of the run's files."""
    try:
        described = try_decode_json(read_regular_file(place / RUN, 4 * MOST_BYTES), dict[str, Any])
        events = _end(place / EVENTS)
        steps = _end(place / METRICS)
    except OSError as error:
        return RunRow(
            id=name, name=name, state="unreadable", reason=f"It cannot be read: {error.strerror}."
        )
    if described is None:
        why = "run.json is no JSON object."
        return RunRow(id=name, name=name, state="unreadable", reason=why)
    history = History()
    for line in events:
        if fields := try_decode_json(line, dict[str, Any]):
            history.take(fields)
    rows = (try_decode_json(line, StepRow) for line in reversed(steps))
    last = next((row for row in rows if row is not None), StepRow(0))
    asked = described.get("num_steps")
    num_steps = asked if type(asked) is int else 0
    is_done = history.has_ended_early or last.step >= num_steps > 0
    state, why = how_it_stands(is_running, is_done, history.stopped_by, history.cause)
    recipe, plan = described.get("recipe"), history.plan or described.get("plan")
    return RunRow(
        id=name,
        name=name,
        state=state,
        reason=why,
        recipe=str(recipe or described.get("script") or "")[:500],
        plan=str(plan or "")[:500],
        step=last.step,
        num_steps=num_steps,
        loss=last.loss,
    )


def _study_row(name: str, about: dict[str, Any], found: dict[str, Any]) -> StudyRow:
    best = found.get("best")
    best = best if isinstance(best, dict) else {}
    listed = found.get("trials")
    trials = []
    for one in listed if isinstance(listed, list) else []:
        if isinstance(one, dict) and type(one.get("trial")) is int:
            trials.append((one["trial"], str(one.get("state"))[:40], _number(one.get("value"))))
    finished, number = found.get("finished"), best.get("trial")
    return StudyRow(
        id=name,
        recipe=str(about.get("recipe") or "")[:500],
        metric=str(about.get("metric") or "")[:200],
        space=str(about.get("space") or "")[:500],
        finished=finished if type(finished) is int else 0,
        best=_number(best.get("value")),
        best_trial=number if type(number) is int else None,
        trials=trials[:MOST_RUNS],
    )


def _queue(problems: list[str]) -> list[QueueRow]:
    """The jobs of this user that run or wait."""
    try:
        jobs = make_engine("local").jobs()
    except (ShoalError, OSError) as error:
        problems.append(f"The local queue cannot be read: {reason(error)}.")
        return []
    return [
        QueueRow(
            job=job.job, state=job.state, name=job.name, run_dir=job.run_dir, reason=job.reason
        )
        for job in jobs
        if job.is_active
    ]


def _walk(top: Path, problems: list[str]) -> Iterator[tuple[Path, str]]:
    """The directories that hold a run or a study, from the top down."""
    places = [(top, 0)]
    while places:
        place, depth = places.pop()
        try:
            with os.scandir(place) as found:
                entries = {entry.name: entry for entry in found}
        except OSError as error:
            problems.append(f"{sendable(str(place))} cannot be read: {error.strerror}.")
            continue
        if RUN in entries:
            yield place, RUN
            continue
        if STUDY in entries:
            yield place, STUDY
        for name, entry in entries.items():
            is_hidden = name.startswith(".")
            with suppress(OSError):
                if depth < MOST_DEPTH and not is_hidden and entry.is_dir(follow_symlinks=False):
                    places.append((place / name, depth + 1))


def file_stamp(path: Path) -> tuple[int, int] | None:
    try:
        now = path.stat()
    except OSError:
        return None
    return now.st_mtime_ns, now.st_size


def _end(path: Path) -> list[bytes]:
    """The last whole lines of a file; none if it is not there."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read(TAIL_BYTES).split(b"\n")
    except FileNotFoundError:
        return []
    return lines[(1 if size > TAIL_BYTES else 0) : -1]


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and type(value) is not bool else None
