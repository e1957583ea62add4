"""From the options of `shoal submit` to a job: what is asked of an engine.

The command line of a job names its run directory and has `--resume`, so that giving it again is
always right: it begins, goes on, or finds that all is done. The recipe is not loaded here.
"""

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from shoal.cluster.engine import Engine, JobRequest, JobState
from shoal.errors import UsageError
from shoal.launch.engines import make_engine, run_on
from shoal.launch.jobs import JobRecord, claimed, write_job
from shoal.plans.plan import Plan
from shoal.storage.run_dir import make_run_dir, owner_of, remove_empty, stem_of
from shoal.training.options import AUTO

UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class SubmitOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What `shoal submit` was asked for, beside what is for `shoal train`."""

    on: str = "local"
    nodes: int = 1
    cores: int | None = None
    time_limit_s: float | None = None
    priority: int = 0


def describe_job(
    recipe: str, words: Sequence[str], plan: str | None, run_dir: Path | None, how: SubmitOptions
) -> str:
    """What would be submitted; nothing is made."""
    request = make_request(recipe, words, plan, run_dir or Path("runs") / stem_of(recipe), how)
    return make_engine(how.on).describe(request)


def submit_job(
    recipe: str, words: Sequence[str], plan: str | None, run_dir: Path | None, how: SubmitOptions
) -> JobState:
    """Make the run directory, and hand the job to the engine. `words` are for `shoal train`."""
    engine = make_engine(how.on)
    run_dir, made = make_run_dir(run_dir, recipe)
    try:
        request = make_request(recipe, words, plan, run_dir, how)
        with claimed(run_dir) as before:
            _refuse_active(run_dir, before)
            number = engine.submit(request)
            write_job(run_dir, JobRecord(on=how.on, id=number, name=request.name))
    except BaseException:
        remove_empty(made)
        raise
    return _accepted(engine, number, how, request)


def _accepted(engine: Engine, number: str, how: SubmitOptions, request: JobRequest) -> JobState:
    """Its state now; it is accepted whatever the engine says."""
    with suppress(UsageError):
        return engine.state(number)
    return JobState(job=f"{how.on}:{number}", state="queued", run_dir=request.run_dir)


def make_request(
    recipe: str, words: Sequence[str], plan: str | None, run_dir: Path, how: SubmitOptions
) -> JobRequest:
    """The job. Pure, but for names of files."""
    _refuse_missing(recipe)
    where = str(run_dir.absolute())
    on = run_on(how.on)
    placed = () if on == "local" else ("--on", on)
    return JobRequest(
        name=stem_of(recipe),
        arguments=(recipe, *words, *placed, "--run-dir", where, "--resume"),
        directory=str(Path.cwd()),
        run_dir=where,
        num_hosts=how.nodes,
        cores=cores_of(plan, how.nodes, how.cores),
        time_limit_s=how.time_limit_s,
        priority=how.priority,
    )


def cores_of(text: str | None, nodes: int, cores: int | None) -> int:
    """The cores of each host: one a rank of the plan, or as many as were asked for; 0 for all
    that there are. Pure."""
    if cores is not None:
        return cores
    plan = Plan() if text in (None, AUTO) else Plan.parse(text)
    return 0 if plan.data is None else math.ceil(plan.num_ranks / nodes)


def read_time(text: str) -> float:
    """Seconds of `90s`, `30m`, `2h`, `1d`, `MM:SS`, `H:MM:SS` or `D-HH:MM:SS`."""
    if found := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text):
        seconds = float(found[1]) * UNITS_S[found[2]]
    elif found := re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d\d)", text):
        days, hours, minutes, rest = (int(part or 0) for part in found.groups())
        seconds = 86400.0 * days + 3600 * hours + 60 * minutes + rest
    else:
        raise UsageError(f"{text!r} is no time. Give 90s, 30m, 2h, 1d, MM:SS or H:MM:SS.")
    if not seconds:
        raise UsageError(f"{text!r}: a job needs more time than none.")
    return seconds


def _refuse_active(run_dir: Path, before: JobRecord | None) -> None:
    """Refuse a directory in which a job waits or runs, or a run that was not submitted."""
    state = "" if before is None else _state_of(before)
    if before is not None and state in ("queued", "running"):
        raise UsageError(
            f"{run_dir} belongs to the job {before.job}, which is {state}. Two jobs cannot share a "
            "run directory: choose another with --run-dir DIR, or stop that job with "
            f"`shoal stop {before.job}`."
        )
    owner = owner_of(run_dir)
    if owner is not None:
        raise UsageError(
            f"{run_dir} is in use by process {owner.pid} on {owner.host}. Two runs cannot share a "
            "run directory; choose another with --run-dir DIR."
        )


def _state_of(record: JobRecord) -> str:
    """The state of a job; empty if its engine does not know it any more."""
    with suppress(UsageError):
        return make_engine(record.on).state(record.id).state
    return ""


def _refuse_missing(recipe: str) -> None:
    where, colon, name = recipe.rpartition(":")
    if not colon or not where or not name:
        raise UsageError(
            f"{recipe!r} names no recipe. Write file.py:function or module:function, such as "
            f"{recipe.rstrip(':') or 'train.py'}:small."
        )
    if where.endswith(".py") and not Path(where).is_file():
        raise UsageError(f"There is no file {where}, in which the recipe {name} is to be.")
