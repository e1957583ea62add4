"""What a rank's process does: train a prepared run, or run a user's script, under a seat."""

import faulthandler
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from shoal import faults, logs
from shoal.checkpoint.export import write_tensors
from shoal.comm.reach import reach_from
from shoal.comm.wire import bytes_of, digest_of
from shoal.elastic.messages import Failed
from shoal.elastic.seat import SupervisedSeat, report_failure
from shoal.elastic.serving import Serving, serve_host
from shoal.errors import FailedElsewhere, NotFinite, ShoalError, StopNow, sendable
from shoal.events.meters import Totals, peak_memory_bytes
from shoal.events.scribe import Scribe
from shoal.events.sinks import Sink, TensorBoard
from shoal.events.step import Hook, StepInfo
from shoal.numerics.precision import environment_for
from shoal.parallel.tensor.summary import cuts_in_words, grouped
from shoal.plans.plan import Plan
from shoal.plans.size import can_recover, can_resize
from shoal.sync.server.local import LocalThroughServers
from shoal.sync.server.lookups import empty_tables
from shoal.sync.server.strategy import ThroughServers
from shoal.system.fork_server import Birth, ChildMain, says_all
from shoal.training.build import Prepared, prepare, why_alone
from shoal.training.checkpointing import Keeper, Keeping
from shoal.training.pretrained import Beginning
from shoal.training.run import Run
from shoal.training.trainer import Trainer

MoreHooks = Callable[[Trainer, Path], Sequence[Hook]]


def prepare_training(
    run: Run,
    plan: Plan,
    run_dir: Path,
    *,
    keeping: Keeping | None = None,
    begin: Callable[[nn.Module], Beginning] | None = None,
    tensorboard: bool = False,
    more_hooks: MoreHooks = lambda trainer, run_dir: (),
) -> tuple[dict[str, Any], ChildMain]:
    """In the nursery: everything the ranks of a run share. Returns its facts and a rank's main.

    The plan is resolved. With `keeping` there are checkpoints; `begin` looks for weights to begin
    with, given the model.
    """
    os.environ.update(environment_for(plan.precision))
    prepared = prepare(run, plan)
    model = prepared.model
    _warm_up(run, model)
    beginning = None if begin is None else begin(model)
    facts = {
        "plan": str(plan),
        "num_ranks": plan.num_ranks,
        "num_servers": plan.num_serving,
        "num_pieces": plan.num_pieces,
        "num_steps": run.num_steps(),
        "batch_size": run.batch_size,
        "num_samples": len(run.data),
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "begins": "" if beginning is None else str(beginning),
        "cuts": _cuts_in_words(prepared, plan),
        "alone": why_alone(run, plan, model) if can_resize(plan) else "",
    }

    if plan.hosts > 1:  # which must begin alike
        facts["first_weights"] = _digest(model)

    def rank_main(birth: Birth) -> int:
        def train(seat: SupervisedSeat) -> None:
            keeper = None
            if keeping is not None:
                keeper = Keeper(keeping._replace(beginning=beginning), seat.tell)
            if plan.num_servers:
                empty_tables(model)
            trainer = Trainer(run, plan, seat, prepared=prepared, keeper=keeper)
            _train(trainer, seat, run_dir, tensorboard, more_hooks)

        def work(seat: SupervisedSeat) -> None:
            number = seat.server_number() if plan.num_servers else None
            if number is None:
                train(seat)
            elif plan.hosts > 1 and number >= plan.num_servers:  # whose size does not change
                serve_host(number - plan.num_servers, seat, run, plan, model)
            else:
                Serving(number, seat, run, plan, model, run_dir / "servers").serve()

        return under_seat(birth, can_recover(plan, run.meets_every), work)

    return facts, rank_main


def _digest(model: nn.Module) -> str:
    found = [t.detach() for t in (*model.parameters(), *model.buffers())]
    dense = [t for t in found if t.layout == torch.strided and t.device.type == "cpu"]
    return f"{digest_of([bytes_of(t.contiguous()) for t in dense]):016x}"


def _cuts_in_words(prepared: Prepared, plan: Plan) -> str:
    """What the plan does to the model, for the user to see before it is done."""
    tensor, stages = prepared.survey.tensor, prepared.survey.stages
    parts = [str(stage) for stage in stages.stages] if stages is not None else []
    if tensor is not None:
        share = tensor.share(prepared.model)
        parts.append(cuts_in_words(grouped(tensor.table()), share, plan.tensor))
    return "\n".join(parts)


def prepare_script(script: Path, arguments: Sequence[str]) -> tuple[dict[str, Any], ChildMain]:
    """In the nursery: nothing but warm imports, since the script is the ranks' own."""
    use_one_thread()
    import torch.distributed.tensor  # noqa: F401 (warm)

    def rank_main(birth: Birth) -> int:
        os.environ.update(birth.told)
        faults.arm(birth.number)
        use_threads()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = [str(script), *arguments]
        sys.path.insert(0, str(script.resolve().parent))
        try:
            runpy.run_path(str(script), run_name="__main__")
        except StopNow:
            return 0
        except Exception as error:  # noqa: BLE001 (the recipe may fail in any way)
            return _tell_failure(birth, -1, error)
        return 0

    return {}, rank_main


def use_threads() -> None:
    """One torch thread a rank, unless the user said otherwise: ranks are what fills the cores."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def use_one_thread() -> None:
    """Where ranks are forked from: OpenMP would wait in them for the threads of their parent."""
    torch.set_num_threads(1)


def under_seat(birth: Birth, recovers: bool, work: Callable[[SupervisedSeat], None]) -> int:
    """Run `work` in a member's seat; an error goes to the supervisor, and is the exit code."""
    logs.set_up(f"member {birth.number} ")
    os.environ.update(birth.told)
    faults.arm(birth.number)
    use_threads()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # every thread's stack, into the log
    seat = SupervisedSeat(
        birth.told["SHOAL_CONTROL"],
        birth.told["SHOAL_MEMBER"],
        reach=reach_from(birth.told),
        recovers=recovers,
        form_timeout_s=float(birth.told["SHOAL_FORM_TIMEOUT_S"]),
    )
    seat.stop_on_term()
    try:
        work(seat)
        return 0
    except StopNow:
        return 0
    except Exception as error:  # noqa: BLE001 (the recipe may fail in any way)
        seat.close()  # as the trainer has, if it got that far
        return _tell_failure(birth, seat.step, error)


def _tell_failure(birth: Birth, step: int, error: Exception) -> int:
    """Report an error being handled to the supervisor; the exit code it means."""
    own = isinstance(error, ShoalError)
    message = str(error) if own else f"{type(error).__name__}: {error}"
    trace = "" if says_all(error) else traceback.format_exc()
    code = error.exit_code if isinstance(error, ShoalError) else 1
    ranks = error.ranks if isinstance(error, NotFinite) else ()
    failed = Failed(step, sendable(message)[-8_000:], sendable(trace)[-32_000:], code, ranks)
    keys = reach_from(birth.told).keys
    report_failure(birth.told["SHOAL_CONTROL"], birth.told["SHOAL_MEMBER"], failed, keys)
    with suppress(OSError):  # the disk may be what failed
        traceback.print_exc()
    return code


def _train(
    trainer: Trainer,
    seat: SupervisedSeat,
    run_dir: Path,
    tensorboard: bool,
    more_hooks: MoreHooks,
) -> None:
    totals = Totals()
    sinks: list[Callable[[], Sink]] = []
    if tensorboard:
        sinks.append(lambda: TensorBoard(run_dir / "tensorboard"))
    record, often = run_dir / "metrics.jsonl", trainer.run.save_every
    scribe = Scribe(record, lambda: trainer.is_scribe, sinks, often)

    def tell_of_emptied(info: StepInfo) -> None:
        if info.left_out == info.samples and trainer.is_scribe:
            seat.tell("emptied", step=info.step, left_out=info.left_out)

    evaluations = _Evaluations(seat, lambda: trainer.is_scribe)

    def keep_model(info: StepInfo) -> None:
        if info.step == trainer.num_steps:
            try:
                tensors = trainer.whole_model()
                if trainer.mesh.rank == 0:
                    run_dir.mkdir(parents=True, exist_ok=True)  # which may have been moved away
                    write_tensors(tensors, run_dir / "model.safetensors")
            except (OSError, SafetensorError, FailedElsewhere) as error:
                # The checkpoint may lie elsewhere.
                if trainer.mesh.rank == 0:
                    seat.tell("model-failed", step=info.step, why=str(error))

    seat.summarise = lambda: {
        **_summary(totals),
        "stopped": trainer.step < trainer.num_steps,
        "checkpoint": trainer.keeper.saved_step,
        "staleness": _staleness(trainer),
        "rounds": _rounds(trainer),
    }
    seat.progress = lambda: _progress(totals) if trainer.is_scribe else None
    seat.before_meeting = scribe.flush
    own: list[Hook] = [totals.add, scribe, tell_of_emptied, evaluations]
    trainer.hooks += [*own, *more_hooks(trainer, run_dir), keep_model]
    try:
        with trainer:
            if trainer.is_scribe:
                scribe.rewind(trainer.step)
            for _ in trainer:
                pass
    finally:
        scribe.close()


class _Evaluations:
    """Tells of each evaluation, by whoever is the scribe; and of the last one again by who becomes
    it, since the one before may have died before it did."""

    def __init__(self, seat: SupervisedSeat, tells: Callable[[], bool]):
        self._seat, self._tells = seat, tells
        self._untold: StepInfo | None = None

    def __call__(self, info: StepInfo) -> None:
        if info.evaluation is not None:
            self._untold = info
        if self._untold is not None and self._tells():
            self._seat.tell("evaluated", step=self._untold.step, evaluation=self._untold.evaluation)
            self._untold = None


def _progress(totals: Totals) -> dict[str, Any] | None:
    last = totals.last
    if last is None:
        return None
    return {
        "step": last.step,
        "loss": last.loss,
        "samples_per_s": totals.samples_per_s,
        "communication": totals.share_in_communication,
    }


def _summary(totals: Totals) -> dict[str, Any]:
    last = totals.last
    return {
        "steps": last.step if last else 0,
        "loss": last.loss if last else None,
        "evaluation": last.evaluation if last else None,
        "samples_per_s": totals.mean_samples_per_s,
        "bytes_sent": totals.bytes_sent,
        "peak_memory_bytes": peak_memory_bytes(),
        "times": totals.times._asdict(),
    }


def _staleness(trainer: Trainer) -> dict[str, Any] | None:
    """How far ahead of the others this rank began its batches; None if it waited for them."""
    strategy = trainer.strategy
    if isinstance(strategy, LocalThroughServers):
        strategy = strategy.windows
    if not isinstance(strategy, ThroughServers) or strategy.in_lockstep:
        return None
    return strategy.staleness.summary()


def _rounds(trainer: Trainer) -> dict[str, Any] | None:
    """What became of the rounds of a run whose rounds close at a deadline, as it was last told."""
    strategy = trainer.strategy
    told = strategy.windows.last_round if isinstance(strategy, LocalThroughServers) else None
    if told is None:
        return None
    return {"closed": told.num_rounds, "early": told.num_early, "late": told.num_late}


def _warm_up(run: Run, model: nn.Module) -> None:
    """Load what the first step would load: torch imports hundreds of modules with an optimizer."""
    run.make_optimizer(model)
    import torch.distributed.tensor  # noqa: F401
