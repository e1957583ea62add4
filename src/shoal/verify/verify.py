"""Does a plan train what one process would have trained?

The plan runs on its ranks, each of which writes down after every step its loss and what it holds
of gradients, weights and buffers; the reference runs beside it in a process of its own, compares
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

from shoal.cluster.local import NotLoaded, await_facts
from shoal.elastic.membership import Membership
from shoal.elastic.supervise import Outcome, Watch
from shoal.elastic.worker import prepare_training, use_one_thread, use_threads
from shoal.errors import PlanError, ShoalError
from shoal.events.step import StepInfo
from shoal.launch import launch
from shoal.numerics.reserved import Reserved
from shoal.parallel.striping import tables_of
from shoal.plans.plan import Plan
from shoal.storage.files import replacing
from shoal.sync.choose import tables_held
from shoal.sync.server.local import LocalThroughServers
from shoal.sync.server.strategy import ThroughServers
from shoal.system.fork_server import Birth, ChildMain, Nursery
from shoal.training.run import Run, resolve
from shoal.training.trainer import Trainer
from shoal.verify.compare import PATIENCE_S, Verdict, compare, finished, name_slices, path_of
from shoal.verify.replay import compare_replay

MOST_LAZY_BYTES = 256 << 20
STOP_S = 5.0  # that ranks may hang when told to stop: they have nothing to save
AHEAD = 4  # steps that a rank may be ahead of the comparison


class RunFailed(ShoalError):
    """The plan's run ended before a difference was found; `trace` is of the rank that failed."""

    def __init__(self, outcome: Outcome):
        super().__init__(_why(outcome))
        self.trace, self.exit_code = outcome.trace, outcome.exit_code


def verify(
    load: Callable[[], Run],
    plan: str | None,
    run_dir: Path,
    watch: Watch = lambda record: None,
) -> Verdict:
    """Train under the plan, and in one process beside it, and compare every step.

    `load` is called in the processes that train. `run_dir` is a directory with `logs` in it. Call
    this from a process that has not started a thread. Raises NotLoaded or RunFailed.
    """
    directory = run_dir / "verify"
    directory.mkdir()
    facts: dict[str, Any] = {}

    def run_reference() -> tuple[dict[str, Any], ChildMain]:
        use_threads()
        run = load()
        resolved = resolve(run, plan, None)
        judge = compare if resolved.bound == 0 else compare_replay
        verdict = judge(run, resolved, directory)
        return {"verdict": msgspec.to_builtins(verdict)}, _bear_no_rank

    def prepare() -> tuple[dict[str, Any], ChildMain]:
        use_one_thread()
        run = load()
        resolved = resolve(run, plan, None)
        _refuse_replay(run, resolved)
        _refuse_large(run)
        return prepare_training(run, resolved, run_dir, more_hooks=record)

    beside = Nursery(run_reference, run_dir / "logs" / "reference.log")
    try:
        outcome = launch(
            prepare,
            run_dir,
            watch=watch,
            members=lambda found: Membership(
                found["num_ranks"],
                num_servers=found["num_servers"],
                num_spares=0,
            ),
            stop_timeout_s=STOP_S,
            prepared=facts.update,
        )
        if outcome.stopped_by:  # who asked for that wants no verdict any more
            raise RunFailed(outcome)
        if outcome.exit_code:
            finished(directory).touch()  # the reference reads what there is, and waits no more
        verdict = _verdict_of(beside, outcome)
    finally:
        beside.close()
        shutil.rmtree(directory, ignore_errors=True)
    verdict.plan = facts["plan"]
    return verdict


def _verdict_of(beside: Nursery, outcome: Outcome) -> Verdict:
    """What the reference found, also when the plan's run failed after it had gone astray."""
    if outcome.exit_code and outcome.stopped_by:
        raise RunFailed(outcome)
    try:
        content = await_facts(beside)["verdict"]
    except NotLoaded:
        if outcome.exit_code:
            raise RunFailed(outcome) from None
        raise
    verdict = msgspec.convert(content, Verdict)
    if outcome.exit_code:
        if verdict.passed:
            raise RunFailed(outcome)
        verdict.complaint = f"the run failed: {_why(outcome)}"
    return verdict


def _refuse_large(run: Run) -> None:
    """A comparison looks at every row."""
    for name, module in tables_of(run.make_model()).items():
        num_bytes = module.num_embeddings * module.embedding_dim * module.weight.itemsize
        if isinstance(module.weight, Reserved) and num_bytes > MOST_LAZY_BYTES:
            raise PlanError(
                f"{name} is a lazy table of {num_bytes / 1e9:,.1f} GB, and a comparison looks at "
                f"every row. Make it smaller, {MOST_LAZY_BYTES >> 20} MB at the most, to verify a "
                "plan; --set changes what a recipe takes as an argument."
            )


def _refuse_replay(run: Run, plan: Plan) -> None:
    if plan.deadline_s is not None:
        raise PlanError(
            f"deadline={plan.deadline} makes a result depend on who came in time, and there is no "
            "other to compare it with. Verify the plan without deadline: as long as nobody is "
            "late, the weights are the same."
        )
    if plan.sync == "server" and plan.bound != 0 and (tables := tables_of(run.make_model())):
        raise PlanError(
            f"The table {next(iter(tables))} is looked up in the middle of a step, and with "
            f"staleness={plan.staleness} others change its rows meanwhile: which ones a worker saw "
            "is not written down, so the run cannot be played again. Verify without staleness."
        )


def _why(outcome: Outcome) -> str:
    return outcome.cause or f"it was stopped after step {outcome.step}"


def _bear_no_rank(birth: Birth) -> int:
    raise AssertionError("the reference bears no ranks")


class Recorder:
    """A hook that writes down each step of one rank, in lockstep not far ahead of who reads it."""

    def __init__(self, trainer: Trainer, directory: Path):
        self._trainer = trainer
        self._directory = directory

    def __call__(self, info: StepInfo) -> None:
        rank, strategy = self._trainer.mesh.rank, self._trainer.strategy
        windows = strategy.windows if isinstance(strategy, LocalThroughServers) else strategy
        is_apart = isinstance(windows, ThroughServers) and not windows.in_lockstep
        if not is_apart:  # else who is ahead may be waited for by who reads what others did
            self._wait_for_reader(info.step - AHEAD, rank)
        content = {"loss": torch.tensor([info.loss], dtype=torch.float64)}
        content["bytes_sent"] = torch.tensor([info.bytes_sent])
        groups = self._trainer.optimizer.param_groups
        content["stepped"] = torch.tensor([sum(p.numel() for g in groups for p in g["params"])])
        tables = tables_held(strategy, dense=True)
        content |= name_slices("held", self._trainer.spread.held() | tables)
        if isinstance(windows, ThroughServers) and is_apart:
            if windows.trace:  # before the first window ends there is none
                content["trace"] = torch.tensor(windows.trace)
        else:
            content |= name_slices("gradient", strategy.gradients())
        path = path_of(self._directory, info.step, rank)
        whole = {name: tensor.contiguous().clone() for name, tensor in content.items()}
        with replacing(path) as partial:
            save_file(whole, partial)

    def _wait_for_reader(self, step: int, rank: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while path_of(self._directory, step, rank).exists():
            if finished(self._directory).exists() or time.monotonic() > deadline:
                return
            time.sleep(0.002)


def record(trainer: Trainer, run_dir: Path) -> Sequence[Any]:
    """The hooks that `shoal verify` adds to each rank."""
    return [Recorder(trainer, run_dir / "verify")]
