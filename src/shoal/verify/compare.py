"""Comparing what ranks wrote down of their steps with the reference, one step after another.

Every rank writes the parts that it holds, with their places in the whole, so any plan is compared
alike, and that all parts together cover the model is checked too. Gradients are compared relative
to the norm of the whole gradient, everything else relative to the largest element of its tensor.
The weight of an element whose gradient fell below the rounding of the norm (1e-7 in fp32, 1e-3 in
fp16, 1e-2 in bf16), and is not the same, is noise that Adam magnifies (a bias before BatchNorm): it
is counted, not judged, and buffers may differ by as much as such weights do. Where a plan adds in
another order than one process (`tensor`, `zero=3`, `sums=ring`), weights get ten times the
tolerance, since a rounding that tips a ReLU is magnified likewise. A plan that did not do what it
says fails too.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from safetensors.torch import load_file
from torch import Tensor

from shoal import reference
from shoal.errors import RecipeError
from shoal.numerics.fragments import Timetable
from shoal.numerics.precision import noise, tolerance
from shoal.parallel.boxes import Box
from shoal.parallel.layout import Slice
from shoal.plan import Plan
from shoal.run import Run
from shoal.verify.promises import broken_promise, excused_from_cuts, held_share

CLOSE = 10  # times the tolerance: weights whose gradients are summed in another order
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

    tolerance: float  # of losses and gradients
    tolerance_of_weights: float
    num_steps: int = 0
    identical: bool = True
    worst: dict[str, float] = msgspec.field(default_factory=dict)  # by kind: loss, gradient, ...
    num_noise: int = 0  # elements not judged
    num_elements: int = 0
    held_share: float = 1.0  # of the parameters, by the rank that holds the most
    first: Divergence | None = None
    complaint: str = ""  # the plan did not do what it says
    plan: str = ""  # as it was resolved
    is_replay: bool = False  # compared with what was pushed and pulled, played again

    @property
    def passed(self) -> bool:
        return self.first is None and not self.complaint


def name_slices(kind: str, slices: Mapping[str, Sequence[Slice]]) -> dict[str, Tensor]:
    """Each part under a name that says where in the whole tensor it lies."""
    return {
        f"{kind}/{name}/{','.join(map(str, part.offset))}": part.tensor
        for name, parts in slices.items()
        for part in parts
    }


class Step:
    """What one rank wrote down of a step."""

    def __init__(self, content: dict[str, Tensor]):
        self.loss = content.pop("loss")
        self.bytes_sent = int(content.pop("bytes_sent"))
        self.num_stepped = int(content.pop("stepped"))  # elements the optimizer steps on
        # Out of lockstep: the versions that servers gave, made of the step's gradient, gave next.
        trace: list[list[int]] = content.pop("trace", torch.zeros(3, 0)).tolist()
        self.pulled, self.applied, self.next = trace
        self._parts: dict[tuple[str, str], list[tuple[Box, Tensor]]] = {}
        for key, tensor in content.items():
            kind, _, rest = key.partition("/")
            name, _, place = rest.rpartition("/")  # Keras has "/" in names
            offset = tuple(int(number) for number in place.split(",") if number)
            block = Box(offset, tuple(tensor.shape))
            self._parts.setdefault((kind, name), []).append((block, tensor))

    def parts(self, kind: str, name: str) -> list[tuple[Box, Tensor]]:
        return self._parts.get((kind, name), [])

    def num_held(self, names: Sequence[str]) -> int:
        """Elements of these parameters that the rank holds."""
        return sum(part.numel() for name in names for _, part in self.parts("held", name))


def compare(run: Run, plan: Plan, directory: Path) -> Verdict:
    """Run the reference and compare every rank with it, up to the first divergence."""
    limit = tolerance(plan.precision)
    verdict = Verdict(limit, limit if plan.sums_in_order else CLOSE * limit)
    comparisons: list[Comparison] = []
    timetable = Timetable(plan.local_steps, plan.fragments, run.num_steps())
    try:
        excused = excused_from_cuts(run, plan)
        for step, snapshots in enumerate(reference.train(run, plan), start=1):
            comparisons = comparisons or [Comparison(verdict, plan) for _ in snapshots]
            paths = [path_of(directory, step, rank) for rank in range(plan.num_ranks)]
            told = [Step(_await(path)) for path in paths]
            for number, (own, comparison) in enumerate(zip(snapshots, comparisons, strict=True)):
                ranks = {r: t for r, t in enumerate(told) if r % len(snapshots) == number}
                comparison.step(step, ranks, own)
            if not verdict.complaint:
                shapes = {name: p.shape for name, p in snapshots[0].weights.items()}
                verdict.held_share = held_share(told, shapes)
                speaks = timetable.speaks(step)
                idle = shapes.keys() - snapshots[0].gradients.keys()
                broken = broken_promise(plan, told, shapes, speaks, idle, excused)
                verdict.complaint = f"at step {step} {broken}" if broken else ""
            for path in paths:
                path.unlink()
            verdict.num_steps = step
            if not verdict.passed:
                break
    finally:
        finished(directory).touch()
    masks = comparisons[0].judged.values() if comparisons else ()
    verdict.num_noise = sum(int((~mask).sum()) for mask in masks)
    verdict.num_elements = sum(mask.numel() for mask in masks)
    return verdict


class Place(NamedTuple):
    """Of a tensor, in a rank's step."""

    step: int
    rank: int
    what: str
    name: str


class Comparison:
    """Of the ranks of one replica with the reference, step after step."""

    def __init__(self, verdict: Verdict, plan: Plan):
        self.verdict, self.plan = verdict, plan
        self.judged: dict[str, Tensor] = {}  # by weight: which elements are not noise

    @torch.no_grad()
    def step(self, step: int, ranks: Mapping[int, Step], own: reference.Snapshot) -> None:
        for rank, told in ranks.items():
            loss = torch.tensor([own.loss], dtype=torch.float64)
            if not (loss.isnan() & told.loss.isnan()):  # no loss: all samples were left out
                note(self.verdict, Place(step, rank, "loss", ""), told.loss, loss)
        norm = torch.sqrt(
            sum((_wide(g).abs().square().sum() for g in own.gradients.values()), torch.zeros(()))
        )
        for name, weight in own.weights.items():
            self.judged.setdefault(name, torch.ones(weight.shape, dtype=torch.bool))
            self._gradient(step, name, ranks, own, norm)
        slack = 0.0  # by which weights that are not judged differ
        for name, weight in own.weights.items():
            slack = max(slack, self._weight(step, name, ranks, weight))
        for name, buffer in own.buffers.items():
            for place, block, theirs in self._held(step, "buffer", name, ranks, buffer):
                note(self.verdict, place, theirs, block.of(buffer), slack=slack)

    def _gradient(
        self,
        step: int,
        name: str,
        ranks: Mapping[int, Step],
        own: reference.Snapshot,
        norm: Tensor,
    ) -> None:
        gradient, mask = own.gradients.get(name), self.judged[name]
        covered = torch.zeros(mask.shape, dtype=torch.bool)
        for rank, told in ranks.items():
            place, parts = Place(step, rank, "gradient", name), told.parts("gradient", name)
            expected = gradient is not None and told.parts("held", name)
            if self.plan.zero in (1, 2) or self.plan.num_servers:  # its parts are not the weight's
                expected = gradient is not None and parts
            if bool(parts) != bool(expected):
                _diverge(self.verdict, place, math.inf)
                return
            for block, theirs in parts:
                assert gradient is not None
                mine, here = block.of(gradient), block.of(mask)
                here &= (mine.abs() >= noise(self.plan.precision) * norm) | (mine == theirs)
                block.of(covered).fill_(True)
                note(self.verdict, place, theirs, mine, scale=norm)
        if gradient is not None and not bool(covered.all()):
            self._miss(step, f"gradient of {name}")

    def _weight(self, step: int, name: str, ranks: Mapping[int, Step], weight: Tensor) -> float:
        """Compare a weight; the largest difference of what is not judged of it."""
        slack = 0.0
        for place, block, theirs in self._held(step, "weight", name, ranks, weight):
            mine, mask = block.of(weight), block.of(self.judged[name])
            if mine.numel():
                difference = (_wide(theirs) - _wide(mine)).abs()
                slack = max(slack, float(torch.where(mask, 0.0, difference).max()))
            note(self.verdict, place, theirs, mine, mask=mask)
        return slack

    def _held(
        self, step: int, what: str, name: str, ranks: Mapping[int, Step], whole: Tensor
    ) -> Iterator[tuple[Place, Box, Tensor]]:
        """The parts of a tensor that ranks hold; complains if together they are not all of it."""
        covered = torch.zeros(whole.shape, dtype=torch.bool)
        for rank, told in ranks.items():
            for block, theirs in told.parts("held", name):
                block.of(covered).fill_(True)
                yield Place(step, rank, what, name), block, theirs
        if not bool(covered.all()):
            self._miss(step, f"{what} {name}")

    def _miss(self, step: int, what: str) -> None:
        if not self.verdict.complaint:
            self.verdict.complaint = f"at step {step} no rank holds all of the {what}"


def note(
    verdict: Verdict,
    place: Place,
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
    is_weight = place.what in ("weight", "buffer")
    limit = verdict.tolerance_of_weights if is_weight else verdict.tolerance
    if not relative <= limit:  # true for NaN too
        _diverge(verdict, place, relative)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _diverge(verdict: Verdict, place: Place, relative: float) -> None:
    verdict.identical = False
    _keep_worst(verdict, place.what, relative)
    if verdict.first is None:
        verdict.first = Divergence(*place, relative)


def _keep_worst(verdict: Verdict, what: str, relative: float) -> None:
    known = verdict.worst.get(what, 0.0)
    if not math.isnan(known) and not relative <= known:  # nothing is worse than NaN
        verdict.worst[what] = relative


def _await(path: Path) -> dict[str, Tensor]:
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists():
        if finished(path.parent).exists() or time.monotonic() > deadline:
            raise RecipeError(f"The plan's run ended or hangs before it wrote {path.name}.")
        time.sleep(0.002)
    return load_file(path)


def path_of(directory: Path, step: int, rank: int) -> Path:
    return directory / f"step-{step:08d}-rank-{rank:03d}.safetensors"


def finished(directory: Path) -> Path:
    return directory / "finished"
