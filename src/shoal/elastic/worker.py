"""The process of a rank or server: it trains a prepared run, or runs a user's script, in a seat.

`prepare_training` and `prepare_script` run once in the fork server; the functions that they return
run in each of its children. Read next: `seat.py`, `training/trainer.py`, `server_process.py`.
"""

import faulthandler
import logging
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError
from torch import nn

from shoal import faults, logs
from shoal.checkpoint.export import write_safetensors
from shoal.comm.endpoint import endpoint_from
from shoal.comm.mesh import Seat
from shoal.comm.wire import bytes_of, digest_of
from shoal.elastic.messages import Failed
from shoal.elastic.seat import SupervisedSeat, report_failure
from shoal.elastic.server_process import ServerProcess, serve_aggregator
from shoal.errors import AllWorkersLost, FailedElsewhere, NotFinite, ShoalError, StopNow, sendable
from shoal.events.events import (
    BatchEmptyEvent,
    EndedEarlyEvent,
    EvaluatedEvent,
    ModelFailedEvent,
    ProgressEvent,
)
from shoal.events.meters import (
    FIRST_STEPS,
    SpentReports,
    StepTotals,
    memory_bytes,
    peak_memory_bytes,
    shared_memory_bytes,
)
from shoal.events.metrics_writer import MetricsWriter
from shoal.events.sinks import Sink
from shoal.events.step import Hook, StepInfo
from shoal.events.tracing import TRACER
from shoal.numerics.precision import environment_for
from shoal.parallel.tensor.summary import cuts_in_words, grouped
from shoal.plans.plan import Plan
from shoal.plans.resize import can_recover, can_resize
from shoal.sync.server.lookups import empty_tables
from shoal.system.fork_server import WorkerMain, WorkerSpec, needs_no_traceback
from shoal.system.traces import user_traceback
from shoal.training.build import BuiltModel, build_model, why_not_resizable
from shoal.training.callbacks import has_callbacks
from shoal.training.checkpointing import Checkpointer, CheckpointSettings
from shoal.training.options import KEEPS_NOTHING
from shoal.training.own_loop import CustomLoop
from shoal.training.pretrained import InitialWeights
from shoal.training.rank_check import facts_of
from shoal.training.run import Run
from shoal.training.trainer import Trainer

MoreHooks = Callable[[Trainer, Path], Sequence[Hook]]


class ReportingSeat(Seat, Protocol):
    """A seat that says how a run of Shoal's goes."""

    recovers: bool

    def report_by(
        self,
        *,
        summarise: Callable[[], dict[str, Any]],
        progress: Callable[[], ProgressEvent | None],
        before_pause: Callable[[], None],
    ) -> None: ...


class Recording(NamedTuple):
    """What is recorded beside events and metrics: how to open trackers, and the steps to trace."""

    trackers: Mapping[str, Callable[[], Sink]] = {}
    trace: range = range(0)


NOT_RECORDED = Recording()


@dataclass(frozen=True)
class PreparedTraining:
    """What each member of a prepared run does: `member` as a process that the fork server made,
    `train` in a seat that there is; `describe` gives what ranks may compare (`rank_check.py`)."""

    member: WorkerMain
    train: Callable[[ReportingSeat], None]
    describe: Callable[[], dict[str, str]]

    def __call__(self, spec: WorkerSpec) -> int:
        return self.member(spec)


def prepare_training(
    run: Run,
    plan: Plan,
    run_dir: Path,
    *,
    keeping: CheckpointSettings | None = None,
    begin: Callable[[nn.Module], InitialWeights | None] | None = None,
    recording: Recording = NOT_RECORDED,
    more_hooks: MoreHooks = lambda trainer, run_dir: (),
    evaluates: Any = None,
) -> tuple[dict[str, Any], PreparedTraining]:
    """In the fork server: build what all ranks share. Returns facts and the main of a member.

    The plan is resolved. With `keeping` there are checkpoints; `begin` finds the first weights for
    a model. With `evaluates`, a source, ranks measure the model on it and make no step.
    """
    os.environ.update(environment_for(plan.precision))
    prepared = build_model(run, plan)
    model = prepared.model
    _warm_up(run, model)
    beginning = None if begin is None else begin(model)
    facts = _facts(run, plan, prepared)
    facts["begins"] = "" if beginning is None else str(beginning)

    def train(seat: ReportingSeat, keeps: bool = True) -> None:
        checkpointer = None
        if keeping is not None and keeps:
            checkpointer = Checkpointer(keeping._replace(beginning=beginning), seat.emit)
        if plan.num_servers:
            empty_tables(model)
        if evaluates is not None:
            bare = replace(run, callbacks=())
            _evaluate(Trainer(bare, plan, seat, built=prepared, num_steps=0), seat, evaluates)
            return
        TRACER.steps = recording.trace
        loop = CustomLoop(seat.recovers, is_script=False) if has_callbacks(run) else None
        trainer = Trainer(run, plan, seat, built=prepared, checkpointer=checkpointer, loop=loop)
        _train(trainer, seat, run_dir, recording.trackers, more_hooks)

    def rank_main(spec: WorkerSpec) -> int:
        def work(seat: SupervisedSeat) -> None:
            number = seat.server_number() if plan.num_servers else None
            if number is None:
                train(seat, KEEPS_NOTHING not in spec.variables)
            elif plan.hosts > 1 and number >= plan.num_servers:  # whose size does not change
                serve_aggregator(number - plan.num_servers, seat, run, plan, model)
            else:
                journals = run_dir / "servers" / f"{seat.restarts}"
                ServerProcess(number, seat, run, plan, prepared, journals).serve()

        return run_in_seat(spec, _recovers(run, plan), work)

    return facts, PreparedTraining(rank_main, train, lambda: facts_of(run, plan, model))


def _facts(run: Run, plan: Plan, prepared: BuiltModel) -> dict[str, Any]:
    """What is known of a run before its ranks start."""
    model = prepared.model
    facts = {
        "plan": str(plan),
        "num_ranks": plan.num_ranks,
        "num_servers": plan.num_serving,
        "num_pieces": plan.num_pieces,
        "num_steps": run.num_steps(),
        "batch_size": run.batch_size,
        "num_samples": len(run.data),
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "cuts": _cuts_in_words(prepared, plan),
        "alone": why_not_resizable(run, plan, model) if can_resize(plan) else "",
    }
    return facts


def _recovers(run: Run, plan: Plan) -> bool:
    """Whether a lost rank is replaced alone. Under local steps a newcomer would not get what
    callbacks keep, so all go back to a checkpoint."""
    is_apart = plan.local_steps > 1 and has_callbacks(run)
    return can_recover(plan, run.meets_every) and not is_apart


def digest_weights(model: nn.Module) -> str:
    """By which hosts know that their first weights are equal."""
    found = [t.detach() for t in (*model.parameters(), *model.buffers())]
    dense = [t for t in found if t.layout == torch.strided and t.device.type == "cpu"]
    return f"{digest_of([bytes_of(t.contiguous()) for t in dense]):016x}"


def _cuts_in_words(prepared: BuiltModel, plan: Plan) -> str:
    """How the plan splits the model, for the user to see before the run starts."""
    tensor, stages = prepared.survey.tensor, prepared.survey.stages
    parts = [str(stage) for stage in stages.stages] if stages is not None else []
    if tensor is not None:
        share = tensor.share(prepared.model)
        parts.append(cuts_in_words(grouped(tensor.table()), share, plan.tensor))
    return "\n".join(parts)


def prepare_script(script: Path, arguments: Sequence[str]) -> tuple[dict[str, Any], WorkerMain]:
    """In the fork server: only import torch; each rank runs the script itself."""
    set_single_thread()
    import torch.distributed.tensor  # noqa: F401 (warm)

    def rank_main(spec: WorkerSpec) -> int:
        os.environ.update(spec.variables)
        faults.arm(spec.number)
        set_rank_threads()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            run_script(script, arguments)
        except StopNow:
            return 0
        except Exception as error:  # noqa: BLE001 (the recipe may fail in any way)
            return _report_failure(spec, -1, error)
        return 0

    return {}, rank_main


def run_script(script: Path, arguments: Sequence[str]) -> None:
    """Run a user's script as Python would, in this process, which is a rank."""
    set_rank_threads()
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    runpy.run_path(str(script), run_name="__main__")


def set_rank_threads() -> None:
    """One torch thread a rank, unless OMP_NUM_THREADS is set: ranks fill the cores."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def set_single_thread() -> None:
    """In a process that forks ranks: OpenMP would wait in them for their parent's threads."""
    torch.set_num_threads(1)


def run_in_seat(spec: WorkerSpec, recovers: bool, work: Callable[[SupervisedSeat], None]) -> int:
    """Run `work` in a member's seat; report an error to the supervisor. Returns the exit code."""
    sys.stdout = logs.PrintedLines()
    logs.set_up(f"member {spec.number} ")
    os.environ.update(spec.variables)
    faults.arm(spec.number)
    set_rank_threads()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # every thread's stack, into the log
    seat = SupervisedSeat(
        spec.variables["SHOAL_CONTROL"],
        spec.variables["SHOAL_MEMBER"],
        reach=endpoint_from(spec.variables),
        recovers=recovers,
        form_timeout_s=float(spec.variables["SHOAL_FORM_TIMEOUT_S"]),
    )
    seat.stop_on_term()
    try:
        work(seat)
        return 0
    except StopNow:
        return 0
    except Exception as error:  # noqa: BLE001 (the recipe may fail in any way)
        seat.close()  # as the trainer has, if it got that far
        return _report_failure(spec, seat.step, error)


def _report_failure(spec: WorkerSpec, step: int, error: Exception) -> int:
    """Report the error being handled to the supervisor. Returns its exit code."""
    failed = describe_failure(error, step, Path(spec.log))
    keys = endpoint_from(spec.variables).keys
    report_failure(spec.variables["SHOAL_CONTROL"], spec.variables["SHOAL_MEMBER"], failed, keys)
    with suppress(OSError):  # the disk may be what failed
        traceback.print_exc()
    return failed.exit_code


def describe_failure(error: Exception, step: int, log: Path) -> Failed:
    """A member's error, to be sent; the log has its whole traceback."""
    step = error.step if isinstance(error, AllWorkersLost) else step
    own = isinstance(error, ShoalError)
    message = str(error) if own else f"{type(error).__name__}: {error}"
    trace = "" if needs_no_traceback(error) else _trace_of(error, log)
    code = error.exit_code if isinstance(error, ShoalError) else 1
    ranks = error.ranks if isinstance(error, NotFinite) else ()
    return Failed(step, sendable(message)[-8_000:], sendable(trace)[-32_000:], code, ranks)


def _trace_of(error: Exception, log: Path) -> str:
    """What the user sees; the log has all of it."""
    place = f"{log.parent.name}/{log.name}"
    shown = user_traceback(error)
    if shown == "".join(traceback.format_exception(error)):
        return shown
    return f"{shown}(Frames of Shoal are left out; {place} has all.)\n"


def _train(
    trainer: Trainer,
    seat: ReportingSeat,
    run_dir: Path,
    trackers: Mapping[str, Callable[[], Sink]],
    more_hooks: MoreHooks,
) -> None:
    totals = StepTotals()
    record = run_dir / "metrics.jsonl"
    scribe = MetricsWriter(record, lambda: trainer.writes_record, trackers)

    def report_empty_step(info: StepInfo) -> None:
        if info.left_out == info.samples and trainer.writes_record:
            seat.emit(BatchEmptyEvent(step=info.step, left_out=info.left_out))

    weighed: list[int] = []

    def weigh_first_steps(info: StepInfo) -> None:
        if totals.num_steps == 1 + FIRST_STEPS:
            weighed.append(peak_memory_bytes() - shared_memory_bytes())

    evaluations = _EvaluationReports(seat, lambda: trainer.writes_record)

    def send_last_spans() -> None:
        for spans in TRACER.take(trainer.mesh.rank):
            seat.emit(spans)

    end, spent = _EndOfTraining(trainer, seat, run_dir), SpentReports(seat.emit)
    seat.report_by(
        summarise=lambda: {
            **_summary(totals),
            "stopped": trainer.step < trainer.num_steps and not trainer.progress.ended,
            "checkpoint": trainer.checkpointer.saved_step,
            "first_memory_bytes": next(iter(weighed), None),
            **_server_summary(trainer),
        },
        progress=lambda: _progress(totals) if trainer.writes_record else None,
        before_pause=scribe.flush,
    )
    own: list[Hook] = [totals.add, spent.add, weigh_first_steps, scribe]
    own += [report_empty_step, evaluations]
    if logs.log.isEnabledFor(logging.DEBUG):
        own.append(lambda info: logs.log.debug("step %d: %s", info.step, info.times))
    own += more_hooks(trainer, run_dir)
    if trainer.loop is not None:
        trainer.callbacks.control.keep_images_in(run_dir / "images")
    trainer.add_hooks(
        own,
        at_end=[end, scribe.end_trackers, send_last_spans, spent.flush],
        before_save=[scribe.before_save],
    )
    try:
        with trainer:
            if trainer.writes_record:
                scribe.rewind(trainer.step)
            for _ in trainer:
                pass
    finally:
        scribe.close()


def _evaluate(trainer: Trainer, seat: ReportingSeat, source: Any) -> None:
    """Measure the model as it was loaded; every rank has the answer, and tells it at the end."""
    found: dict[str, float] = {}
    seat.report_by(
        summarise=lambda: {"evaluation": found}, progress=lambda: None, before_pause=lambda: None
    )
    with trainer:
        found |= trainer.evaluate(source)
        for _ in trainer:  # of no steps: ranks end together, or measure again with a newcomer
            pass


class _EndOfTraining:
    """Writes the model when the training is over."""

    def __init__(self, trainer: Trainer, seat: ReportingSeat, run_dir: Path):
        self._trainer, self._seat, self._run_dir = trainer, seat, run_dir

    def __call__(self) -> None:
        """All ranks reach this after their last step, and again with a newcomer if one is lost."""
        trainer = self._trainer
        if trainer.stopped and trainer.step < trainer.num_steps:
            return
        self._keep_model()
        if trainer.step < trainer.num_steps and trainer.writes_record:
            why = trainer.callbacks.control.reason
            self._seat.emit(EndedEarlyEvent(step=trainer.step, why=why))

    def _keep_model(self) -> None:
        trainer = self._trainer
        try:
            tensors = trainer.whole_model()
            if trainer.mesh.rank == 0:
                self._run_dir.mkdir(parents=True, exist_ok=True)  # it may have been moved away
                write_safetensors(tensors, self._run_dir / "model.safetensors")
        except (OSError, SafetensorError, FailedElsewhere) as error:
            # The checkpoint may be elsewhere.
            if trainer.mesh.rank == 0:
                self._seat.emit(ModelFailedEvent(step=trainer.step, why=str(error)))


class _EvaluationReports:
    """The scribe reports each evaluation. A new scribe reports the last one again, since the scribe
    before may have died before it did."""

    def __init__(self, seat: ReportingSeat, tells: Callable[[], bool]):
        self._seat, self._tells = seat, tells
        self._unreported: StepInfo | None = None

    def __call__(self, info: StepInfo) -> None:
        if info.evaluation is not None:
            self._unreported = info
        if self._unreported is not None and self._tells():
            assert self._unreported.evaluation is not None
            step, evaluation = self._unreported.step, self._unreported.evaluation
            self._seat.emit(EvaluatedEvent(step=step, evaluation=evaluation))
            self._unreported = None


def _progress(totals: StepTotals) -> ProgressEvent | None:
    last = totals.last
    if last is None:
        return None
    return ProgressEvent(
        step=last.step,
        loss=last.loss,
        samples_per_s=totals.samples_per_s,
        communication=totals.share_in_communication,
        rate=last.rate,
        memory_bytes=memory_bytes(),
        scalars={**last.parts, **last.logged},
    )


def _summary(totals: StepTotals) -> dict[str, Any]:
    last = totals.last
    return {
        "steps": last.step if last else 0,
        "loss": last.loss if last else None,
        "evaluation": last.evaluation if last else None,
        "samples_per_s": totals.mean_samples_per_s,
        "bytes_sent": totals.bytes_sent,
        "peak_memory_bytes": peak_memory_bytes(),
        "shared_memory_bytes": shared_memory_bytes(),
        "times": totals.times._asdict(),
    }


def _server_summary(trainer: Trainer) -> dict[str, Any]:
    """How far ahead of the others this rank started its batches, and of rounds with a deadline how
    they closed; None where there is no such thing."""
    link = trainer.strategy.servers
    return {"staleness": None, "rounds": None} if link is None else link.summary()


def _warm_up(run: Run, model: nn.Module) -> None:
    """Import what the first step would: torch imports hundreds of modules with an optimizer."""
    run.make_optimizer(model)
    import torch.distributed.tensor  # noqa: F401
