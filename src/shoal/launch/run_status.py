"""What a run's directory says of it: members, generation, step, loss, goodput, how it ended.

Everything is read from run.json, events.jsonl and metrics.jsonl, and from the lock of the run
under way; the recipe is not loaded and the run is not asked. So a run of another host can be read
too, and one that was killed.

Goodput is the share of the time since the run began in which rank 0 made steps that count: starts,
recoveries, and the time between two commands of the same run are not in it. Cost: metrics.jsonl is
read once.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from shoal.cluster.engine import State
from shoal.events.sinks import EVENTS
from shoal.storage.decoding import try_decode_json
from shoal.storage.files import read_regular_file
from shoal.storage.run_dir import MOST_DESCRIPTION_BYTES, RUN, RunOwner, owner_of

METRICS = "metrics.jsonl"


class RunMember(msgspec.Struct, frozen=True, kw_only=True):
    """A rank or a server, as it was seated last."""

    rank: int | None = None
    server: int | None = None
    pid: int = 0
    host: int = 0
    log: str = ""  # in logs/


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a run directory says. Without a run in it, all is as here."""

    state: State = "queued"
    recipe: str = ""
    plan: str = ""
    members: tuple[RunMember, ...] = ()
    generation: int | None = None
    step: int = 0
    num_steps: int = 0
    loss: float | None = None
    goodput: float | None = None
    checkpoint: str | None = None
    reason: str = ""
    owner: RunOwner | None = None


class _DescribedRun(msgspec.Struct, frozen=True):
    """What is read of run.json."""

    recipe: str = ""
    plan: str = ""
    num_steps: int = 0


class _EventLine(msgspec.Struct, frozen=True):
    """What is read of a line of events.jsonl."""

    event: str = ""
    time: float = 0.0
    member: int | None = None
    rank: int | None = None
    server: int | None = None
    pid: int = 0
    host: int = 0
    log: str = ""
    generation: int = 0
    step: int = 0
    plan: str = ""
    name: str = ""
    cause: str = ""
    signal: str = ""


class _StepLine(msgspec.Struct, frozen=True):
    """What is read of a line of metrics.jsonl."""

    step: int = 0
    loss: float | None = None
    times: dict[str, float] = {}


def read_run(run_dir: Path) -> RunStatus:
    """What the directory says now."""
    owner = owner_of(run_dir)
    described = None
    with suppress(OSError):
        content = read_regular_file(run_dir / RUN, MOST_DESCRIPTION_BYTES)
        described = try_decode_json(content, _DescribedRun)
    if described is None:
        return RunStatus(state="queued" if owner is None else "running", owner=owner)
    events = [e for line in _lines(run_dir / EVENTS) if (e := try_decode_json(line, _EventLine))]
    last, busy_s = _StepLine(), 0.0
    for line in _lines(run_dir / METRICS):
        if step := try_decode_json(line, _StepLine):
            last, busy_s = step, busy_s + sum(step.times.values())
    status = summarize(described, events, last, is_running=owner is not None)
    goodput = None
    with suppress(OSError):  # without a step there is no file
        ended_at = time.time() if owner else (run_dir / METRICS).stat().st_mtime
        since_s = ended_at - next((e.time for e in events), ended_at)
        goodput = min(1.0, busy_s / since_s) if since_s > 0 and last.step else None
    return msgspec.structs.replace(status, goodput=goodput, owner=owner)


def summarize(
    described: _DescribedRun, events: Iterable[_EventLine], last: _StepLine, *, is_running: bool
) -> RunStatus:
    """The status without its goodput. Pure."""
    seats: dict[tuple[int | None, int | None], RunMember] = {}
    generation: int | None = None
    plan, checkpoint, ended_early, stopped_by, cause = described.plan, None, False, "", ""
    for event in events:
        match event.event:
            case "started" if event.member == 0:  # a command began, or went on with the run
                seats, generation, stopped_by, cause = {}, None, "", ""
            case "seat":
                if event.generation != generation:
                    seats, generation = {}, event.generation
                seats[event.rank, event.server] = RunMember(
                    rank=event.rank if event.server is None else None,
                    server=event.server,
                    pid=event.pid,
                    host=event.host,
                    log=event.log,
                )
            case "resized":
                plan = event.plan
            case "saved":
                checkpoint = event.name
            case "ended-early":
                ended_early = True
            case "stopping":
                stopped_by = event.signal
            case "gave-up":
                cause = event.cause
    is_done = ended_early or last.step >= described.num_steps > 0
    state, reason = how_it_stands(is_running, is_done, stopped_by, cause)
    return RunStatus(
        state=state,
        reason=reason,
        recipe=described.recipe,
        plan=plan,
        members=tuple(seats.values()),
        generation=generation,
        step=last.step,
        num_steps=described.num_steps,
        loss=last.loss,
        checkpoint=checkpoint,
    )


def how_it_stands(
    is_running: bool, is_done: bool, stopped_by: str, cause: str
) -> tuple[State, str]:
    """The state of a run that no engine knows, and why. Pure."""
    if is_running:
        return "running", ""
    if is_done:
        return "done", ""
    if stopped_by:
        return "stopped", f"it was stopped by {stopped_by}"
    if cause:
        return "failed", cause
    return "failed", "its process ended without a word"


def log_of(run_dir: Path, status: RunStatus, rank: int) -> Path | None:
    """The log of a rank; None if it has none yet."""
    for member in status.members:
        if member.rank == rank and member.log:
            return run_dir / "logs" / member.log
    plain = run_dir / "logs" / f"rank-{rank:03d}.log"
    return plain if plain.exists() else None


def _lines(path: Path) -> Iterator[bytes]:
    """The whole lines of a file, which may be written to meanwhile; none if there is none."""
    with suppress(OSError), open(path, "rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line
