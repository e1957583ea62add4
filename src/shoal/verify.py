"""Does a plan train what one process would have trained?

The plan runs on its ranks, each of which writes down its loss, gradients, weights and buffers
after every step; the reference runs beside it in a process of its own, compares, and deletes what
it has read. Gradients are compared relative to the norm of the whole gradient, everything else
relative to the largest element of its tensor. The weight of an element whose gradient fell below
1e-7 of the norm, and is not the same, is rounding noise that Adam magnifies (a bias before
BatchNorm): it is counted, not judged, and buffers may differ by as much as such weights do.

Cost: the time of both runs, and disk for a few steps of the model's state.
"""

import functools
import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shoal import reference
from shoal.cluster.launch import NotLoaded, await_facts, launch
from shoal.cluster.nursery import Birth, ChildMain, Nursery
from shoal.elastic.membership import Membership
from shoal.elastic.supervise import Outcome
from shoal.elastic.worker import prepare_training, use_threads
from shoal.errors import RecipeError, ShoalError
from shoal.hooks import StepInfo
from shoal.numerics.precision import tolerance
from shoal.plan import Plan
from shoal.run import Run, resolve
from shoal.training import Trainer

AHEAD = 4  # steps that a rank may be ahead of the comparison
NOISE = 1e-7
PATIENCE_S = 120.0


class Divergence(msgspec.Struct, frozen=True):
    """The first place at which a rank differs by more than the tolerance."""

    step: int
    rank: int
    what: str  # loss, gradient, weight, buffer
    name: str
    relative: float

    def __str__(self) -> str:
        module, _, _ = self.name.rpartition(".")
        place = f"the {self.what}" if not self.name else f"the {self.what} of {self.name}"
        where = f", in module {module}" if module else ""
        return f"step {self.step}, rank {self.rank}: {place}{where} differs by {self.relative:.2e}"


class Verdict(msgspec.Struct):
    """What a comparison found."""

    tolerance: float
    num_steps: int = 0
    identical: bool = True
    worst: dict[str, float] = msgspec.field(default_factory=dict)  # by kind: loss, gradient, ...
    num_noise: int = 0  # elements not judged
    num_elements: int = 0
    first: Divergence | None = None
    complaint: str = ""  # the plan did not do what it says
    plan: str = ""  # as it was resolved

    @property
    def passed(self) -> bool:
        return self.first is None and not self.complaint


class RunFailed(ShoalError):
    """The plan's run ended before a difference was found; `trace` is of the rank that failed."""

    def __init__(self, outcome: Outcome):
        super().__init__(_why(outcome))
        self.trace, self.exit_code = outcome.trace, outcome.exit_code


def verify(load: Callable[[], Run], plan: str | None, run_dir: Path) -> Verdict:
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
        verdict = compare(run, resolve(run, plan, None), directory)
        return {"verdict": msgspec.to_builtins(verdict)}, _bear_no_rank

    def prepare() -> tuple[dict[str, Any], ChildMain]:
        use_threads()
        return prepare_training(load(), plan, None, run_dir, more_hooks=record)

    beside = Nursery(run_reference, run_dir / "logs" / "reference.log")
    try:
        outcome = launch(
            prepare,
            run_dir,
            watch=lambda record: None,
            members=lambda found: Membership(found["num_ranks"], num_spares=0),
            prepared=facts.update,
        )
        if outcome.exit_code:
            _finished(directory).touch()  # the reference reads what there is, and waits no more
        verdict = _verdict_of(beside, outcome)
    finally:
        beside.close()
        shutil.rmtree(directory, ignore_errors=True)
    verdict.plan = facts["plan"]
    return verdict


def _verdict_of(beside: Nursery, outcome: Outcome) -> Verdict:
    """What the reference found, also when the plan's run failed after it had gone astray."""
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


def _why(outcome: Outcome) -> str:
    return outcome.cause or f"it was stopped after step {outcome.step}"


def _bear_no_rank(birth: Birth) -> int:
    raise AssertionError("the reference bears no ranks")


class Recorder:
    """A hook that writes down each step of one rank, not far ahead of who reads it."""

    def __init__(self, trainer: Trainer, directory: Path):
        self._trainer = trainer
        self._directory = directory

    def __call__(self, info: StepInfo) -> None:
        rank = self._trainer.mesh.rank
        self._wait_for_reader(info.step - AHEAD, rank)
        model = self._trainer.model
        content = {"loss": torch.tensor([info.loss], dtype=torch.float64)}
        content["bytes_sent"] = torch.tensor([info.bytes_sent])
        for name, p in model.named_parameters():
            content[f"weight/{name}"] = p.detach()
            if p.grad is not None:
                content[f"gradient/{name}"] = p.grad
        content |= {f"buffer/{name}": b for name, b in model.named_buffers()}
        path = _path(self._directory, info.step, rank)
        partial = path.with_suffix(".partial")
        save_file({name: tensor.contiguous().clone() for name, tensor in content.items()}, partial)
        os.replace(partial, path)

    def _wait_for_reader(self, step: int, rank: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while _path(self._directory, step, rank).exists():
            if _finished(self._directory).exists() or time.monotonic() > deadline:
                return
            time.sleep(0.002)


def compare(run: Run, plan: Plan, directory: Path) -> Verdict:
    """Run the reference and compare every rank with it, up to the first divergence."""
    verdict = Verdict(tolerance(plan.precision))
    judged: list[dict[str, Tensor]] = [{} for _ in range(plan.num_ranks)]
    try:
        for step, snapshots in enumerate(reference.train(run, plan), start=1):
            for rank in range(plan.num_ranks):
                path = _path(directory, step, rank)
                found = _await(path)
                own = snapshots[rank % len(snapshots)]
                _compare_step(verdict, found, own, judged[rank], step, rank)
                _check_promise(verdict, plan, step, run.num_steps(), int(found["bytes_sent"]))
                path.unlink()
            verdict.num_steps = step
            if not verdict.passed:
                break
    finally:
        _finished(directory).touch()
    verdict.num_noise = sum(int((~mask).sum()) for mask in judged[0].values())
    verdict.num_elements = sum(mask.numel() for mask in judged[0].values())
    return verdict


class _Place(NamedTuple):
    """Of a tensor, in a rank's step."""

    step: int
    rank: int
    what: str
    name: str


@torch.no_grad()
def _compare_step(
    verdict: Verdict,
    found: dict[str, Tensor],
    own: reference.Snapshot,
    judged: dict[str, Tensor],
    step: int,
    rank: int,
) -> None:
    place = functools.partial(_Place, step, rank)
    loss = torch.tensor([own.loss], dtype=torch.float64)
    _note(verdict, place("loss", ""), found["loss"], loss)
    norm = torch.sqrt(
        sum((_wide(g).abs().square().sum() for g in own.gradients.values()), torch.zeros(()))
    )
    slack = 0.0  # by which weights that are not judged differ
    for name, weight in own.weights.items():
        gradient, theirs = own.gradients.get(name), found.get(f"gradient/{name}")
        mask = judged.setdefault(name, torch.ones(weight.shape, dtype=torch.bool))
        if (gradient is None) != (theirs is None):
            _diverge(verdict, place("gradient", name), math.inf)
        elif gradient is not None and theirs is not None:
            mask &= (gradient.abs() >= NOISE * norm) | (gradient == theirs)
            _note(verdict, place("gradient", name), theirs, gradient, scale=norm)
        difference = (_wide(found[f"weight/{name}"]) - _wide(weight)).abs()
        if weight.numel():
            slack = max(slack, float(torch.where(mask, 0.0, difference).max()))
        _note(verdict, place("weight", name), found[f"weight/{name}"], weight, mask=mask)
    for name, buffer in own.buffers.items():
        _note(verdict, place("buffer", name), found[f"buffer/{name}"], buffer, slack=slack)


def _note(
    verdict: Verdict,
    place: _Place,
    theirs: Tensor,
    own: Tensor,
    *,
    scale: Tensor | None = None,
    mask: Tensor | None = None,
    slack: float = 0.0,
) -> None:
    """Compare one tensor and keep the largest difference."""
    verdict.worst.setdefault(place.what, 0.0)
    if torch.equal(theirs, own):
        return
    verdict.identical = False
    difference, unit = (_wide(theirs) - _wide(own)).abs(), _wide(own).abs()
    if mask is not None:
        difference = torch.where(mask | ~difference.isfinite(), difference, 0.0)
    reach = float(unit.max() if scale is None else scale) or 1.0
    relative = float((difference - slack).clamp(min=0.0).max()) / reach  # NaN stays NaN
    _keep_worst(verdict, place.what, relative)
    if not relative <= verdict.tolerance:  # true for NaN too
        _diverge(verdict, place, relative)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _diverge(verdict: Verdict, place: _Place, relative: float) -> None:
    verdict.identical = False
    _keep_worst(verdict, place.what, relative)
    if verdict.first is None:
        verdict.first = Divergence(*place, relative)


def _keep_worst(verdict: Verdict, what: str, relative: float) -> None:
    known = verdict.worst.get(what, 0.0)
    if not math.isnan(known) and not relative <= known:  # nothing is worse than NaN
        verdict.worst[what] = relative


def _check_promise(
    verdict: Verdict, plan: Plan, step: int, num_steps: int, bytes_sent: int
) -> None:
    """A plan must communicate when it says so, and only then."""
    if plan.num_ranks == 1 or verdict.complaint:
        return
    speaks = step % plan.local_steps == 0 or step == num_steps
    if speaks != (bytes_sent > 0):
        verdict.complaint = (
            f"at step {step} a rank sent {bytes_sent} bytes, where the plan says that replicas "
            f"{'agree' if speaks else 'work alone'}"
        )


def _await(path: Path) -> dict[str, Tensor]:
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists():
        if _finished(path.parent).exists() or time.monotonic() > deadline:
            raise RecipeError(f"The plan's run ended or hangs before it wrote {path.name}.")
        time.sleep(0.002)
    return load_file(path)


def _path(directory: Path, step: int, rank: int) -> Path:
    return directory / f"step-{step:08d}-rank-{rank:03d}.safetensors"


def _finished(directory: Path) -> Path:
    return directory / "finished"


def record(trainer: Trainer, run_dir: Path) -> Sequence[Any]:
    """The hooks that `shoal verify` adds to each rank."""
    return [Recorder(trainer, run_dir / "verify")]
