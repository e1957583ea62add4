"""Compare the steps that ranks recorded with the reference, step by step.

Every rank writes the parts that it holds with their offsets in the whole tensors, so all plans are
compared alike, and it is checked that the parts cover the model. While the bits are equal, nothing
else is needed. After the first difference, each step is judged by itself, tensor by tensor, against
the model's own rounding (`rounding.py`); the distance from the reference is reported, not judged. A
plan that did not do what it says fails too (`plan_checks.py`).
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from safetensors.torch import load_file
from torch import Tensor

from shoal.comm.mesh import ranks_by_replica
from shoal.errors import RecipeError
from shoal.numerics.fragments import FragmentSchedule
from shoal.numerics.precision import PrecisionSchedule
from shoal.parallel.boxes import Box, whole_box
from shoal.parallel.layout import Slice
from shoal.plans.plan import Plan
from shoal.training.run import Run
from shoal.verify import reference
from shoal.verify.plan_checks import describe_uncut, find_violation, held_share, uncut_parameters
from shoal.verify.reference import gradient_key
from shoal.verify.reference_codec import UNSENT
from shoal.verify.rounding import TOLERANCE, Follower, largest_difference, largest_finite

PATIENCE_S = 120.0


class RunEndedEarly(RecipeError):
    """The plan's run has ended well, and the reference has not."""


class TensorLocation(NamedTuple):
    """A tensor in the step of a rank."""

    step: int
    rank: int
    what: str
    name: str


class Divergence(msgspec.Struct, frozen=True):
    """The first tensor of a rank that differs by more than rounding."""

    step: int
    rank: int
    what: str  # loss, gradient, weight, buffer
    name: str
    relative: float  # to the largest element of the tensor
    times: float = math.inf  # the model's own rounding
    allowed: int = 0  # times of it

    def __str__(self) -> str:
        module, _, _ = self.name.rpartition(".")
        place = f"the {self.what}" if not self.name else f"the {self.what} of {self.name}"
        where = f", in module {module}," if module else ""
        much = f"step {self.step}, rank {self.rank}: {place}{where} differs by {self.relative:.2e}"
        if not math.isfinite(self.times):
            return much
        return f"{much}, {self.times:,.0f} times the model's own rounding (allowed: {self.allowed})"


class VerifyResult(msgspec.Struct):
    """The result of a comparison."""

    num_steps: int = 0
    identical: bool = True
    worst: dict[str, float] = msgspec.field(default_factory=dict)  # relative, by kind
    times: float = 0.0  # the largest difference of a step, in units of the model's own rounding
    allowed: int = 0  # times of it
    rounding: dict[str, float] = msgspec.field(default_factory=dict)  # of an ulp, by kind
    held_share: float = 1.0  # of the parameters, by the rank that holds the most
    first: Divergence | None = None
    complaint: str = ""  # the plan did not do what it says
    plan: str = ""  # as it was resolved
    is_replay: bool = False  # compared with a replay of the pushes and pulls
    left_whole: str = ""  # what `tensor` did not cut, and why
    unsteady: float = 0.0  # how much a step differs, relatively, if one process does it again

    @property
    def passed(self) -> bool:
        return self.first is None and not self.complaint

    def weigh(
        self, place: TensorLocation, difference: float, rounding: float, largest: float
    ) -> None:
        """Judge a difference by the model's rounding; `largest` is the tensor's largest element."""
        if not difference or not self.passed:
            return
        times = difference / rounding if rounding else math.inf
        if not times <= self.allowed:  # true for NaN too
            _diverge(self, place, difference / (largest or 1.0), times)
            return
        self.times = max(self.times, times)
        own = self.rounding.get(place.what, 0.0)
        self.rounding[place.what] = max(own, rounding / (largest or 1.0))

    @property
    def verdict(self) -> str:
        if self.first is not None:
            return "DIFFERENT"
        if self.complaint:
            return "NOT AS PLANNED"
        return "SAME" if self.identical else "WITHIN ROUNDING"


def name_slices(kind: str, slices: Mapping[str, Sequence[Slice]]) -> dict[str, Tensor]:
    """Each part under a name with its offset in the whole tensor."""
    return {
        f"{kind}/{name}/{','.join(map(str, part.offset))}": part.tensor
        for name, parts in slices.items()
        for part in parts
    }


class StepRecord:
    """What one rank recorded of a step."""

    def __init__(self, content: dict[str, Tensor]):
        self.loss = content.pop("loss")
        self.bytes_sent = int(content.pop("bytes_sent"))
        self.num_stepped = int(content.pop("stepped"))  # elements the optimizer steps on
        self.answers: list[float] = content.pop("answers", torch.zeros(0)).tolist()  # of phases
        # Out of lockstep: the versions that were pulled, made by the step's push, pulled next.
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

    def names(self, kind: str) -> list[str]:
        return [name for of, name in self._parts if of == kind]

    def num_held(self, names: Sequence[str]) -> int:
        """The number of elements of these parameters that the rank holds."""
        return sum(part.numel() for name in names for _, part in self.parts("held", name))


def compare(run: Run, plan: Plan, directory: Path) -> VerifyResult:
    """Run the reference and compare every rank with it, up to the first divergence."""
    precisions = PrecisionSchedule.parse(plan.precision)
    verdict, following = VerifyResult(allowed=TOLERANCE[precisions.at(0)]), None
    timetable = FragmentSchedule(plan.local_steps, plan.fragments, run.num_steps())
    try:
        whole = uncut_parameters(run, plan)
        for step, snapshots in enumerate(reference.train(run, plan), start=1):
            paths = [step_path(directory, step, rank) for rank in range(plan.num_ranks)]
            steps = [StepRecord(load_file(await_file(path))) for path in paths]
            replicas = by_replica(steps, plan, len(snapshots))
            for ranks, own in zip(replicas, snapshots, strict=True):
                StepComparison(verdict, plan, step, ranks).whole(own)
            if not verdict.complaint:
                shapes = {name: p.shape for name, p in snapshots[0].weights.items()}
                verdict.held_share = held_share(steps, shapes)
                verdict.left_whole = describe_uncut(plan, shapes, whole)
                speaks = timetable.speaks(step)
                idle = shapes.keys() - stepped_on(snapshots[0])
                broken = find_violation(plan, steps, shapes, speaks, idle, whole)
                verdict.complaint = f"at step {step} {broken}" if broken else ""
            verdict.allowed = TOLERANCE[precisions.at(step - 1)]
            if not verdict.identical and verdict.passed:
                following = following or RoundingJudge(run, plan, step - 1)
                following.judge(verdict, step, replicas)
            for path in paths:
                path.unlink()
            verdict.num_steps = step
            if not verdict.passed:
                break
    except RunEndedEarly:
        verdict.complaint = (
            f"it ended after step {verdict.num_steps}, and one process goes on: a callback stopped "
            "it alone"
        )
    finally:
        finished(directory).touch()
    return verdict


def by_replica(
    steps: Sequence[StepRecord], plan: Plan, num_replicas: int
) -> list[dict[int, StepRecord]]:
    """For each replica of the reference, the steps of the ranks to compare with it."""
    shape = plan.pipeline, num_replicas, plan.num_replicas // num_replicas, plan.tensor
    return [{rank: steps[rank] for rank in ranks} for ranks in ranks_by_replica(shape)]


class StepComparison:
    """Compares a step of one replica's ranks with the reference: complete, and equal?"""

    def __init__(
        self, verdict: VerifyResult, plan: Plan, step: int, ranks: Mapping[int, StepRecord]
    ):
        self.verdict, self.plan, self.step, self.ranks = verdict, plan, step, ranks

    @torch.no_grad()
    def whole(self, own: reference.ReplicaState) -> None:
        for place, block, theirs in self.parts(own):
            whole = reference_tensor(own, place)
            record_difference(self.verdict, place, theirs, block.of(whole), largest_finite(whole))

    def parts(self, own: reference.ReplicaState) -> Iterator[tuple[TensorLocation, Box, Tensor]]:
        """All recorded parts, with their locations; sets `complaint` if some are missing."""
        for rank, recorded in self.ranks.items():
            if not (math.isnan(own.loss) and recorded.loss.isnan()):  # no samples
                place = TensorLocation(self.step, rank, "loss", "")
                yield place, whole_box(recorded.loss.shape), recorded.loss
        self._refuse_other_phases(own)
        for phase in range(own.num_phases):
            for name, weight in own.weights.items():
                yield from self._gradient(name, gradient_key(name, phase), weight, own.gradients)
        for name, weight in own.weights.items():
            yield from self._held("weight", name, weight)
        for name, buffer in own.buffers.items():
            yield from self._held("buffer", name, buffer)
        for name, kept in own.unsent.items():
            yield from self._held(UNSENT, name, kept)

    def _refuse_other_phases(self, own: reference.ReplicaState) -> None:
        """Gradients of phases that the reference did not make are a divergence."""
        known = {gradient_key(n, phase) for n in own.weights for phase in range(own.num_phases)}
        for rank, recorded in self.ranks.items():
            for key in recorded.names("gradient"):
                if key not in known:
                    place = TensorLocation(self.step, rank, "gradient", key)
                    _diverge(self.verdict, place, math.inf)
                    return

    def _gradient(
        self, name: str, key: str, weight: Tensor, gradients: Mapping[str, Tensor]
    ) -> Iterator[tuple[TensorLocation, Box, Tensor]]:
        covered, gradient = torch.zeros(weight.shape, dtype=torch.bool), gradients.get(key)
        for rank, recorded in self.ranks.items():
            place = TensorLocation(self.step, rank, "gradient", key)
            parts = recorded.parts("gradient", key)
            expected = gradient is not None and recorded.parts("held", name)
            # Where each steps on a share of them, its parts are not the weight's.
            if self.plan.zero in (1, 2) or self.plan.num_servers or self.plan.shares:
                expected = gradient is not None and parts
            if bool(parts) != bool(expected):
                _diverge(self.verdict, place, math.inf)
                return
            for block, theirs in parts:
                block.of(covered).fill_(True)
                yield place, block, theirs
        if gradient is not None and not bool(covered.all()):
            self._miss(f"gradient of {key}")

    def _held(
        self, what: str, name: str, whole: Tensor
    ) -> Iterator[tuple[TensorLocation, Box, Tensor]]:
        """The parts of a tensor that ranks hold; sets `complaint` if they do not cover it."""
        covered, kind = torch.zeros(whole.shape, dtype=torch.bool), "held"
        if what == UNSENT:
            kind = what
        for rank, recorded in self.ranks.items():
            for block, theirs in recorded.parts(kind, name):
                block.of(covered).fill_(True)
                yield TensorLocation(self.step, rank, what, name), block, theirs
        if not bool(covered.all()):
            self._miss(f"{what} {name}")

    def _miss(self, what: str) -> None:
        if not self.verdict.complaint:
            self.verdict.complaint = f"at step {self.step} no rank holds all of the {what}"


def stepped_on(own: reference.ReplicaState) -> set[str]:
    """The parameters that had a gradient, in any phase of the step."""
    phases = range(own.num_phases)
    return {n for n in own.weights if any(gradient_key(n, k) in own.gradients for k in phases)}


def reference_tensor(own: reference.ReplicaState, place: TensorLocation) -> Tensor:
    if place.what == "loss":
        return torch.tensor([own.loss], dtype=torch.float64)
    kinds = {
        "gradient": own.gradients,
        "weight": own.weights,
        "buffer": own.buffers,
        UNSENT: own.unsent,
    }
    return kinds[place.what][place.name].detach()


class RoundingJudge:
    """Judges each step of a plan by the model's rounding, with a `Follower` of each replica."""

    def __init__(self, run: Run, plan: Plan, num_same: int):
        self.plan, self.followers = plan, list[Follower]()
        self._theirs: list[dict[str, Tensor]] = []
        self._steps = reference.train(run, plan, self._make)
        for _ in range(num_same):  # steps with the same bits
            next(self._steps)

    def _make(self, run: Run, plan: Plan, pieces: range) -> Follower:
        number = len(self.followers)
        self.followers.append(
            Follower(run, plan, pieces, lambda: self._theirs[number] if self._theirs else {})
        )
        return self.followers[-1]

    def judge(
        self, verdict: VerifyResult, step: int, replicas: Sequence[Mapping[int, StepRecord]]
    ) -> None:
        """Do the step from the plan's last state, compare, and copy the plan's new state."""
        self._theirs = [assemble_tensors(ranks.values(), "gradient") for ranks in replicas]
        for follower, ranks in zip(self.followers, replicas):
            follower.follow(next(iter(ranks.values())).answers)
        snapshots = next(self._steps)
        for follower, ranks, own in zip(self.followers, replicas, snapshots, strict=True):
            own = own._replace(gradients=reference.by_key(follower.gradients))
            for place, block, theirs in StepComparison(verdict, self.plan, step, ranks).parts(own):
                if verdict.passed:
                    self._judge(
                        verdict, follower, place, theirs, block, reference_tensor(own, place)
                    )
            verdict.unsteady = max(verdict.unsteady, follower.unsteady)
            held, unsent = (assemble_tensors(ranks.values(), kind) for kind in ("held", UNSENT))
            follower.copy_state(held, unsent)

    def _judge(
        self,
        verdict: VerifyResult,
        follower: Follower,
        place: TensorLocation,
        theirs: Tensor,
        block: Box,
        own: Tensor,
    ) -> None:
        difference, rounding = largest_difference(theirs, block.of(own)), 0.0
        if not difference:
            return
        for rounding in follower.rounding((place.what, place.name), own):
            if difference <= verdict.allowed * rounding:
                break
        verdict.weigh(place, difference, rounding, largest_finite(own))


def assemble_tensors(steps: Iterable[StepRecord], kind: str) -> dict[str, Tensor]:
    """Assemble the whole tensors of a kind from their parts."""
    found: dict[str, list[tuple[Box, Tensor]]] = {}
    for step in steps:
        for name in step.names(kind):
            found.setdefault(name, []).extend(step.parts(kind, name))
    made = {}
    for name, parts in found.items():
        ends = ([a + n for a, n in zip(box.offset, box.shape)] for box, _ in parts)
        made[name] = torch.zeros([max(of_dim) for of_dim in zip(*ends)], dtype=parts[0][1].dtype)
        for box, tensor in parts:
            box.of(made[name]).copy_(tensor)
    return made


def record_difference(
    verdict: VerifyResult, place: TensorLocation, theirs: Tensor, own: Tensor, largest: float
) -> None:
    """Record the difference relative to the tensor's largest element; a non-finite one is an
    error."""
    verdict.worst.setdefault(place.what, 0.0)
    if torch.equal(theirs, own):
        return
    verdict.identical = False
    relative = largest_difference(theirs, own) / (largest or 1.0)
    _keep_worst(verdict, place.what, relative)
    if not math.isfinite(relative):
        _diverge(verdict, place, relative)


def _diverge(
    verdict: VerifyResult, place: TensorLocation, relative: float, times: float = math.inf
) -> None:
    verdict.identical = False
    _keep_worst(verdict, place.what, relative)
    if verdict.first is None:
        verdict.first = Divergence(*place, relative, times, verdict.allowed)


def _keep_worst(verdict: VerifyResult, what: str, relative: float) -> None:
    known = verdict.worst.get(what, 0.0)
    if not math.isnan(known) and not relative <= known:  # NaN stays
        verdict.worst[what] = relative


def await_file(path: Path) -> Path:
    """A file that a rank of the plan writes, once it is there."""
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists():
        if ended_early(path.parent).exists() and not path.exists():
            raise RunEndedEarly(f"The plan's run ended before it wrote {path.name}.")
        if finished(path.parent).exists() or time.monotonic() > deadline:
            raise RecipeError(f"The plan's run ended or hangs before it wrote {path.name}.")
        time.sleep(0.002)
    return path


def step_path(directory: Path, step: int, rank: int) -> Path:
    return directory / f"step-{step:08d}-rank-{rank:03d}.safetensors"


def settled_path(directory: Path) -> Path:
    """The plan of a run that measured what it left open, by rank 0."""
    return directory / "plan"


def finished(directory: Path) -> Path:
    return directory / "finished"


def ended_early(directory: Path) -> Path:
    """There when the plan's run has ended well, and perhaps before the reference."""
    return directory / "ended"
