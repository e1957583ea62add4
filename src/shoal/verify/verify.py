"""Verify that a plan trains what one process would have trained.

The plan runs on its ranks; each rank records after every step its loss and its parts of gradients,
weights and buffers. The reference runs in another process at the same time, compares
(`compare.py`), and deletes what it has read.

Cost: the time of both runs, and disk for a few steps of the model's state, out of lockstep for all.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file

from shoal.cluster.local import LocalBackend, NotLoaded, await_facts
from shoal.elastic.supervisor import SupervisorResult
from shoal.elastic.worker import prepare_training, set_rank_threads, set_single_thread
from shoal.errors import PlanError
from shoal.events.events import OnEvent
from shoal.events.step import StepInfo
from shoal.launch.supervised import RunFailed, run_supervised, why_it_ended
from shoal.numerics.reserved import ReservedParameter
from shoal.parallel.layout import Slice
from shoal.parallel.striping import tables_of
from shoal.plans.plan import Plan
from shoal.storage.files import atomic_replace, write_atomic
from shoal.sync.allreduce import AllReduce
from shoal.sync.choose import num_stepped, served_tables
from shoal.sync.lockstep import LockstepStrategy
from shoal.system.fork_server import ForkServer, WorkerMain, WorkerSpec
from shoal.training.callbacks import has_callbacks
from shoal.training.run import Run, resolve
from shoal.training.trainer import Trainer
from shoal.verify.compare import (
    PATIENCE_S,
    VerifyResult,
    await_file,
    compare,
    ended_early,
    finished,
    name_slices,
    settled_path,
    step_path,
)
from shoal.verify.reference import gradient_key
from shoal.verify.reference_codec import UNSENT, records_unsent
from shoal.verify.replay import compare_replay

MOST_LAZY_BYTES = 256 << 20
STOP_S = 5.0  # for ranks to stop: they have nothing to save
AHEAD = 4  # steps that a rank may be ahead of the comparison


def verify(
    load: Callable[[], Run], plan: str | None, run_dir: Path, watch: OnEvent = lambda record: None
) -> VerifyResult:
    """Train under the plan, and in one process beside it, and compare every step.

    `load` is called in the processes that train. `run_dir` is a directory with `logs` in it. Call
    this from a process that has not started a thread. Raises NotLoaded or RunFailed.
    """
    directory = run_dir / "verify"
    directory.mkdir()
    facts: dict[str, Any] = {}

    def run_reference() -> tuple[dict[str, Any], WorkerMain]:
        set_rank_threads()
        run = load()
        resolved = resolve(run, plan, None)
        if resolved.is_open:
            resolved = Plan.parse(await_file(settled_path(directory)).read_text())
        judge = compare if resolved.staleness_bound == 0 else compare_replay
        verdict = judge(run, resolved, directory)
        verdict.plan = str(resolved)
        return {"verdict": msgspec.to_builtins(verdict)}, _start_no_rank

    def prepare() -> tuple[dict[str, Any], WorkerMain]:
        set_single_thread()
        run = load()
        resolved = resolve(run, plan, None)
        _refuse_replay(run, resolved)
        _refuse_large(run)
        return prepare_training(run, resolved, run_dir, more_hooks=recording_hooks)

    beside = ForkServer(run_reference, run_dir / "logs" / "reference.log")
    try:
        outcome = run_supervised(
            prepare,
            run_dir,
            backend=LocalBackend(),
            watch=watch,
            stop_timeout_s=STOP_S,
            prepared=facts.update,
        )
        if outcome.stopped_by:  # by the user, who wants no result
            raise RunFailed(outcome)
        # The reference must not wait for more steps.
        (finished if outcome.exit_code else ended_early)(directory).touch()
        verdict = _verdict_of(beside, outcome)
    finally:
        beside.close()
        shutil.rmtree(directory, ignore_errors=True)
    ends = {verdict.num_steps, outcome.step}
    if verdict.passed and len(ends) > 1 and min(ends) < facts["num_steps"]:
        verdict.complaint = _ended_apart(verdict.num_steps, outcome.step)
    return verdict


def _ended_apart(own: int, theirs: int) -> str:
    return (
        f"it ended after step {theirs}, and one process after step {own}: a callback stopped one "
        "of them"
    )


def _verdict_of(beside: ForkServer, outcome: SupervisorResult) -> VerifyResult:
    """The result of the reference, also if the plan's run failed after it had diverged."""
    if outcome.exit_code and outcome.stopped_by:
        raise RunFailed(outcome)
    try:
        content = await_facts(beside)["verdict"]
    except NotLoaded:
        if outcome.exit_code:
            raise RunFailed(outcome) from None
        raise
    verdict = msgspec.convert(content, VerifyResult)
    if outcome.exit_code:
        if verdict.passed:
            raise RunFailed(outcome)
        verdict.complaint = f"the run failed: {why_it_ended(outcome)}"
    return verdict


def _refuse_large(run: Run) -> None:
    """Refuse large lazy tables: a comparison reads every row."""
    for name, module in tables_of(run.make_model()).items():
        num_bytes = module.num_embeddings * module.embedding_dim * module.weight.itemsize
        if isinstance(module.weight, ReservedParameter) and num_bytes > MOST_LAZY_BYTES:
            raise PlanError(
                f"{name} is a lazy table of {num_bytes / 1e9:,.1f} GB, and a comparison looks at "
                f"every row. Make it smaller, {MOST_LAZY_BYTES >> 20} MB at the most, to verify a "
                "plan; --set changes what a recipe takes as an argument."
            )


def _refuse_replay(run: Run, plan: Plan) -> None:
    if plan.deadline_s is not None:
        raise PlanError(
            f"deadline={plan.deadline} makes the result depend on which replicas are in time, so "
            "there is no other to compare it with. Verify the plan without deadline: while no "
            "replica is late, the weights are the same."
        )
    if plan.local_steps > 1 and has_callbacks(run):
        raise PlanError(
            f"Callbacks under local_steps={plan.local_steps} cannot be verified: each replica has "
            "a model of its own for them to act on. Verify without callbacks, or without "
            "local_steps."
        )
    stale = plan.sync == "server" and plan.staleness_bound != 0
    if stale and (tables := tables_of(run.make_model())):
        raise PlanError(
            f"The table {next(iter(tables))} is looked up in the middle of a step, and with "
            f"staleness={plan.staleness} others change its rows meanwhile: which ones a worker saw "
            "is not written down, so the run cannot be played again. Verify without staleness."
        )


def _start_no_rank(spec: WorkerSpec) -> int:
    raise AssertionError("the reference starts no ranks")


class StepRecorder:
    """A hook that records each step of one rank; in lockstep it waits for the reader."""

    def __init__(self, trainer: Trainer, directory: Path):
        self._trainer = trainer
        self._directory = directory
        self._phases: dict[str, list[Slice]] = {}  # gradients of a step that is made in phases
        self._answers: list[float] = []  # losses of these phases

    def on_phase(self, number: int) -> None:
        """Keep the gradients of a phase, which the next one replaces."""
        self._answers.append(self._trainer.progress.phases[number].loss)
        for name, parts in self._trainer.strategy.gradients().items():
            copies = [part._replace(tensor=part.tensor.clone()) for part in parts]
            self._phases[gradient_key(name, number)] = copies

    def __call__(self, info: StepInfo) -> None:
        rank, strategy = self._trainer.mesh.rank, self._trainer.strategy
        link = strategy.servers
        is_apart = link is not None and link.is_apart
        if not is_apart:  # else the reader may wait for a rank that waits for the reader
            self._wait_for_reader(info.step - AHEAD, rank)
        if rank == 0 and self._trainer.runner.plan.is_open:
            write_atomic(settled_path(self._directory), str(self._trainer.plan).encode())
        content = {"loss": torch.tensor([info.loss], dtype=torch.float64)}
        content["bytes_sent"] = torch.tensor([info.bytes_sent])
        content["stepped"] = torch.tensor([num_stepped(strategy, self._trainer.optimizer)])
        tables = served_tables(strategy, dense=True)
        content |= name_slices("held", self._trainer.spread.held() | tables)
        if link is not None and link.is_apart:
            if link.trace:  # before the first window ends there is none
                content["trace"] = torch.tensor(link.trace)
        else:
            content |= name_slices("gradient", self._phases or strategy.gradients())
            self._phases = {}
        packing = strategy.packing if isinstance(strategy, LockstepStrategy) else None
        if packing is not None and records_unsent(self._trainer.plan):
            content |= name_slices(UNSENT, packing.state()[0])
        content["answers"] = torch.tensor(self._answers, dtype=torch.float64)
        self._answers = []
        path = step_path(self._directory, info.step, rank)
        whole = {name: tensor.contiguous().clone() for name, tensor in content.items()}
        with atomic_replace(path) as partial:
            save_file(whole, partial)

    def _wait_for_reader(self, step: int, rank: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while step_path(self._directory, step, rank).exists():
            if finished(self._directory).exists() or time.monotonic() > deadline:
                return
            time.sleep(0.002)


def recording_hooks(trainer: Trainer, run_dir: Path) -> Sequence[Any]:
    """The hooks that `shoal verify` adds to each rank."""
    if isinstance(trainer.strategy, AllReduce):
        trainer.strategy.keep_gradients()
    return [StepRecorder(trainer, run_dir / "verify")]
