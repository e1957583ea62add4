"""How a run ended: what `shoal.train` returns, and what `shoal train --json` prints."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import msgspec

from shoal.checkpoint.find import checkpoint_name, checkpoint_step, list_steps
from shoal.checkpoint.retention import RetentionPolicy
from shoal.errors import RUN_AGAIN, ShoalError
from shoal.events.events import (
    Event,
    MeasuredPlanEvent,
    ModelFailedEvent,
    ModelNotSavableEvent,
    OnEvent,
    PredictionEvent,
    RescuedEvent,
    ResumedEvent,
    SavedEvent,
    SaveFailedEvent,
    SaveSkippedEvent,
    WarningEvent,
)
from shoal.events.meters import FIRST_STEPS
from shoal.events.sinks import JsonLinesSink
from shoal.launch.step_times import median_step_s, read_steps, settled_steps
from shoal.plans.plan import Plan
from shoal.storage.decoding import encode_json, try_decode_json
from shoal.storage.files import write_atomic
from shoal.storage.object_store import open_store

if TYPE_CHECKING:
    from torch import nn

    from shoal.elastic.supervisor import SupervisorResult as SupervisorResult
    from shoal.training.options import Recipe

OUTCOME = "outcome.json"
SLOW_DATA = 0.5  # a share of the time of rank 0, and a second at least


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a run that ended, under the names that `--json` gives them."""

    steps: int
    samples: int | None  # None if the record is not whole
    quarantined: int
    loss: float | None
    evaluation: dict[str, float] | None
    samples_per_s: float | None
    bytes_sent: int
    peak_memory_bytes: int | None
    checkpoint: int | None  # the step of the last one
    not_saved: str | None
    rescued: str | None
    model: str | None
    recoveries: int
    staleness: dict[str, Any] | None
    rounds: dict[str, Any] | None
    steps_again: int
    plan: str
    # Of a step, and of a rank without what it shares with others: step_s and memory_bytes.
    predicted: dict[str, float | str | None] | None
    measured: dict[str, float | None]
    run_dir: str
    exit_code: int


class Best(msgspec.Struct, frozen=True):
    """The best evaluation on record, by one of its metrics."""

    metric: str
    value: float
    step: int


class Saves:
    """What ranks said of their checkpoints and of the model's file. Give it every event."""

    def __init__(self) -> None:
        self.last_step: int | None = None
        self.resumed_step = 0  # that the run went on from
        self.rescued = ""  # where the last checkpoint is, if not where it should be
        self.unholdable = ""  # what no checkpoint can hold
        self.model_problem = ""  # why the model was not written
        self.settled: dict[str, str | int] = {}  # what was left open in the plan, and measured
        self._reasons: dict[int, list[str]] = {}
        self._echoes: dict[int, str] = {}  # what ranks heard from others, by step

    def __call__(self, event: Event) -> None:
        match event:
            case SavedEvent():
                self.last_step = event.step
            case ResumedEvent():
                self.last_step = self.resumed_step = event.step
            case SaveFailedEvent() if event.echo:
                self._echoes.setdefault(event.step, event.why)
            case SaveFailedEvent() | SaveSkippedEvent():
                self._reasons.setdefault(event.step, []).append(event.why)
            case RescuedEvent():
                self.rescued = event.place
            case ModelNotSavableEvent():
                self.unholdable = event.why
            case ModelFailedEvent():
                self.model_problem = event.why
            case MeasuredPlanEvent():
                self.settled = {key: getattr(event, key) for key in event.open}

    @property
    def is_as_foreseen(self) -> bool:
        """Whether the codec is that of the prediction, which knew of none."""
        return self.settled.get("codec", "none") == "none"

    def settle(self, plan: str) -> str:
        """A plan as it was trained under."""
        if not self.settled:
            return plan
        return str(msgspec.structs.replace(Plan.parse(plan), **self.settled))

    def why_not(self, step: int) -> list[str]:
        """Why a step was not saved, as ranks said."""
        heard = [self._echoes[step]] if step in self._echoes else []
        return self._reasons.get(step, heard)


class RunFiles(NamedTuple):
    """Where the files of a run are, at its end."""

    run_dir: Path
    record_dir: Path  # where its record is now, if the run directory was moved
    moved: str  # what to say of that; empty if it was not
    store: str  # of its checkpoints


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended. `model()` builds the trained model in this process."""

    summary: Summary
    num_steps: int  # that the run was asked for
    is_finished: bool  # all of them were made
    best: Best | None = None
    checkpoint: str | None = None  # the last one: a path or a URL
    cause: str = ""  # why it ended before its last step
    trace: str = ""  # the traceback of the first rank that failed
    stopped_by: int = 0  # a signal
    problem: str = ""  # what is wrong although the last step was made
    moved: str = ""  # what became of the run directory, if it is not where it was
    why_not_saved: list[str] = []  # the last step
    model_problem: str = ""
    times: dict[str, float] = {}  # seconds of rank 0
    num_servers: int = 0
    saved_step: int | None = None  # of that checkpoint
    is_saved: bool = False  # the step at which it was stopped
    trained: int = 0  # steps that were made now, and not before a resume
    recipe: Any = None

    @property
    def exit_code(self) -> int:
        return self.summary.exit_code

    @property
    def steps(self) -> int:
        return self.summary.steps

    @property
    def metrics(self) -> dict[str, float]:
        """The figures of the last evaluation; without one, the loss of the last batch."""
        loss = {} if self.summary.loss is None else {"loss": self.summary.loss}
        return self.summary.evaluation or loss

    @property
    def run_dir(self) -> Path:
        return Path(self.summary.run_dir)

    def model(self) -> "nn.Module":
        """The model with the last weights: of `model.safetensors`, or of the last checkpoint."""
        from shoal.training.load import load

        made = self.summary.model if self.is_finished else None  # or it may be an earlier end's
        where = made or self.checkpoint or self.summary.run_dir
        recipe: Recipe = self.recipe
        return load(where, recipe)


def outcome_of(
    result: "SupervisorResult",
    recipe: "Recipe",
    facts: Mapping[str, Any],
    saves: Saves,
    *,
    files: RunFiles,
    keep: RetentionPolicy,
) -> Outcome:
    """What became of a run."""
    own = result.summaries.get(0, {})
    lines = _read(files.record_dir / "metrics.jsonl")
    lost = _not_saved(result, facts, saves, own)
    problem = lost or _nothing_trained(result, lines) or files.moved
    exit_code = int(result.exit_code) or (1 if problem else 0)
    if exit_code == RUN_AGAIN and files.moved:
        exit_code = 1  # the same command would not find it
    summary = _summary(result, facts, saves, files, lines)
    summary = msgspec.structs.replace(summary, not_saved=lost or None, exit_code=exit_code)
    saved_step = _newest_step(files.store, saves) if result.exit_code else saves.last_step
    return Outcome(
        summary=summary,
        num_steps=facts["num_steps"],
        is_finished=not result.exit_code,
        best=_best(lines, keep),
        checkpoint=None if saved_step is None else f"{files.store}/{checkpoint_name(saved_step)}",
        cause=result.cause,
        trace=result.trace,
        stopped_by=result.stopped_by,
        problem=problem,
        moved=files.moved,
        why_not_saved=saves.why_not(result.step),
        model_problem=saves.model_problem,
        times=own.get("times", {}),
        num_servers=facts["num_servers"],
        saved_step=saved_step,
        is_saved=result.exit_code == RUN_AGAIN,
        trained=own.get("steps", 0),
        recipe=recipe,
    )


def leave_records(outcome: Outcome, run_dir: Path, watch: OnEvent) -> Outcome:
    """Write outcome.json and report.html; what cannot be written costs a warning, never the run."""
    from shoal.ui.report import leave_report

    if not run_dir.is_dir():
        return outcome  # it was removed, which is said already
    why = ""
    try:
        text = msgspec.json.format(encode_json(outcome.summary), indent=2)
        write_atomic(run_dir / OUTCOME, text + b"\n")
    except OSError as error:
        why = f"{run_dir / OUTCOME} was not written: {error.strerror}."
    if why := why or leave_report(run_dir):
        watch(WarningEvent(text=why))
    return outcome


def _newest_step(store: str, saves: Saves) -> int | None:
    """Of a run that failed: a rank may have died after it saved and before it said so."""
    with suppress(OSError, ShoalError):
        for name in list_steps(open_store(store)):
            return checkpoint_step(name)
    return saves.last_step


def _summary(
    result: "SupervisorResult",
    facts: Mapping[str, Any],
    saves: Saves,
    files: RunFiles,
    lines: Sequence["_Line"],
) -> Summary:
    """The figures, as ranks and the record give them."""
    own, every = result.summaries.get(0, {}), list(result.summaries.values())
    last = max(lines, key=lambda line: line.step, default=_Line())
    num_left_out = sum(line.left_out for line in lines)
    num_samples = sum(line.samples for line in lines) - num_left_out
    model = files.run_dir / "model.safetensors"
    peak = max((s["peak_memory_bytes"] for s in every), default=None)
    own_peaks = [s["peak_memory_bytes"] - s.get("shared_memory_bytes", 0) for s in every]
    steps = _StepSeconds.of(files.record_dir / "metrics.jsonl", saves.resumed_step)
    return Summary(
        steps=result.step,
        samples=num_samples if last.step >= result.step else None,
        quarantined=num_left_out,
        loss=own["loss"] if own.get("loss") is not None else last.loss,
        evaluation=own.get("evaluation"),
        samples_per_s=own.get("samples_per_s"),
        bytes_sent=sum(s["bytes_sent"] for s in every),
        peak_memory_bytes=peak,
        checkpoint=own.get("checkpoint"),
        not_saved=None,
        rescued=saves.rescued or None,
        model=str(model) if model.exists() and not saves.model_problem else None,
        recoveries=result.num_recoveries,
        staleness=_staleness(every),
        rounds=_rounds(every),
        steps_again=result.num_steps_again,
        plan=saves.settle(result.plan or facts["plan"]),
        predicted=_predicted(result, facts, steps) if saves.is_as_foreseen else None,
        measured={"step_s": steps.settled_s, "memory_bytes": max(own_peaks, default=None)},
        run_dir=str(files.run_dir),
        exit_code=result.exit_code,
    )


class _StepSeconds(NamedTuple):
    """Of the steps that a run made now: the first ones, and those after caches are filled."""

    first_s: float | None
    settled_s: float | None

    @classmethod
    def of(cls, record: Path, after: int) -> Self:
        steps = read_steps(record, after)
        if not steps:
            return cls(None, None)
        first = steps[1 : 1 + FIRST_STEPS] if len(steps) > 2 * FIRST_STEPS else []
        return cls(median_step_s(first) if first else None, median_step_s(settled_steps(steps)))


def _predicted(
    result: "SupervisorResult", facts: Mapping[str, Any], steps: _StepSeconds
) -> dict[str, float | str | None] | None:
    """What was foreseen of a run; what was not, by its own first steps. None of a run over hosts,
    and of one that was resized."""
    found: dict[str, float | str | None] | None = facts.get("predicted")
    if found is None or result.plan not in ("", facts["plan"]):
        return None
    if found["step_s"] is not None:
        return found
    source = "first steps" if found["memory_bytes"] is None else f"{found['from']} and first steps"
    first = [s.get("first_memory_bytes") for s in result.summaries.values()]
    known = [n for n in first if n is not None]
    memory_bytes = found["memory_bytes"] or max(known, default=None)
    return found | {"from": source, "step_s": steps.first_s, "memory_bytes": memory_bytes}


def prediction_event(outcome: "Outcome") -> PredictionEvent | None:
    """What goes on record of a run that was foreseen and made steps."""
    found, measured = outcome.summary.predicted, outcome.summary.measured
    if found is None or measured["step_s"] is None:
        return None
    plan = outcome.summary.plan
    return PredictionEvent(time=time.time(), plan=plan, predicted=found, measured=measured)


def record_event(record_dir: Path, event: Event) -> None:
    """Append to a run's events after its supervisor has ended; a full disk loses it."""
    with suppress(OSError, ShoalError):
        sink = JsonLinesSink(record_dir / "events.jsonl")
        try:
            sink.write(event)
        finally:
            sink.close()


class _Line(msgspec.Struct, frozen=True):
    """What is read of a line of metrics.jsonl."""

    step: int = 0
    samples: int = 0
    left_out: int = 0
    loss: float | None = None
    evaluation: dict[str, float | None] | None = None


def _read(record: Path) -> list[_Line]:
    """The steps on record. The last line may be torn, and is left out then."""
    content = record.read_bytes() if record.exists() else b""
    return [line for text in content.splitlines() if (line := try_decode_json(text, _Line))]


def _best(lines: Sequence[_Line], keep: RetentionPolicy) -> Best | None:
    """The best evaluation by the metric that checkpoints are kept by, the least loss by default."""
    metric = keep.best or "loss"
    sign = -1.0 if keep.is_large_best else 1.0
    found = [
        (sign * value, line.step)
        for line in lines
        if line.evaluation is not None and (value := line.evaluation.get(metric)) is not None
    ]
    if not found:
        return None
    value, step = min(found)
    return Best(metric, sign * value, step)


def _rounds(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Of a run whose rounds close at a deadline, the last count of them."""
    counts = [s["rounds"] for s in summaries if s.get("rounds")]
    return max(counts, key=lambda one: one["closed"], default=None)


def _staleness(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """What the ranks saw of it, together; None where they agree on every step."""
    from shoal.sync.server.clock import Staleness

    seen = [s["staleness"] for s in summaries if s.get("staleness")]
    if not seen:
        return None
    together = Staleness()
    for one in seen:
        together.merge(Staleness(one["histogram"]))
    return together.summary()


def _not_saved(
    result: "SupervisorResult", facts: Mapping[str, Any], saves: Saves, own: Mapping[str, Any]
) -> str:
    """Why a run that made its last step has no checkpoint of it; empty if it has, or cannot."""
    unholdable = facts["unholdable"] or saves.unholdable
    if result.exit_code or unholdable or own.get("checkpoint") == result.step:
        return ""
    reasons = dict.fromkeys(why.rstrip(".") for why in saves.why_not(result.step))
    why = "; ".join(reasons) or "no rank said why"
    way_out = where_rescued(saves.rescued) or (
        "Correct that, and go on from the checkpoint before it (--resume), if there is one."
    )
    return f"Step {result.step}, the last, could not be saved: {why}. {way_out}"


def how_it_ended(outcome: Outcome) -> str:
    """In a few sentences: why it ended, what is saved, where its files are and how to go on. Empty
    if all is as it should be. Pure; both the command and `shoal.train` say this."""
    if outcome.is_finished:
        return outcome.problem
    run_dir = outcome.run_dir
    if outcome.stopped_by and not outcome.cause:
        told = f"stopped after step {outcome.steps}, as asked. {_what_is_saved(outcome)}"
    else:
        newest = ""
        if outcome.saved_step is not None:
            again = f"the same command with --resume --run-dir {run_dir} goes on from it"
            newest = f" The newest checkpoint is of step {outcome.saved_step}: {again}."
        elif outcome.steps and not outcome.trace:  # nothing in the recipe has to change first
            newest = f" Nothing was saved: --resume --run-dir {run_dir} begins again at step 0."
        told = f"{outcome.cause.rstrip('.')}. Logs are in {run_dir / 'logs'}.{newest}"
    return f"{told} {outcome.moved}".rstrip()


def _what_is_saved(outcome: Outcome) -> str:
    """Of a run that was stopped as asked."""
    if outcome.is_saved:
        again = f"--resume --run-dir {outcome.run_dir}"
        return f"It is saved; go on with the same command and {again}."
    reasons = outcome.why_not_saved
    why = f": {reasons[0].rstrip('.')}" if reasons else ""
    rescued = where_rescued(outcome.summary.rescued)
    said = f"It could not be saved{why}. {rescued}".rstrip()
    return f"{said} Its record is in {outcome.run_dir}."


def advice(outcome: Outcome) -> str:
    """What would make such a run faster, in a sentence; empty if nothing stands out. Pure."""
    total = sum(outcome.times.values())
    if outcome.times.get("data", 0.0) < max(1.0, SLOW_DATA * total):
        return ""
    return (
        "Ranks waited for samples most of the time. Load ahead in processes of their own "
        "(loaders=2 in the Run, or --set loaders=2), keep what is slow to make "
        "(shoal.data.cached), or build shards of it (shoal data build)."
    )


def where_rescued(place: str | None) -> str:
    """Where the last checkpoint is, if not where it should be; empty if nowhere."""
    if not place:
        return ""
    return (
        f"It is in {place} instead. Put it among the run's checkpoints once they can be "
        "written, or go on with --resume and --checkpoints, given the directory that it lies in."
    )


def _nothing_trained(result: "SupervisorResult", lines: Sequence[_Line]) -> str:
    """What is wrong with a run that made its last step without a sample; empty if it had some."""
    num_samples, num_left_out = sum(x.samples for x in lines), sum(x.left_out for x in lines)
    if result.exit_code or num_samples > num_left_out or not num_left_out:
        return ""
    return (
        f"Quarantine left out all {num_left_out} samples, so nothing was trained. Its file says "
        "why each of them failed; correct that, and start a new run."
    )
