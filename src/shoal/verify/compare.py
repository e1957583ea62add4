"""Comparing what ranks wrote down of their steps with the reference, one step after another.

Every rank writes the parts that it holds, with their places in the whole, so any plan is compared
alike, and that all parts together cover the model is checked too. As long as the bits are the same,
that is all. From the first bit that is not, each step is judged by itself, tensor by tensor,
against the model's own rounding (`rounding.py`), and how far the run has come from the reference's
is told, not judged. A plan that did not do what it says fails too (`promises.py`).
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

from shoal.errors import RecipeError
from shoal.numerics.fragments import Timetable
from shoal.numerics.precision import Precision
from shoal.parallel.boxes import Box, whole_box
from shoal.parallel.layout import Slice
from shoal.plans.plan import Plan
from shoal.training.run import Run
from shoal.verify import reference
from shoal.verify.promises import broken_promise, held_share, in_words, left_whole
from shoal.verify.rounding import TIMES, Follower, apart, reach

PATIENCE_S = 120.0


class Place(NamedTuple):
    """Of a tensor, in a rank's step."""

    step: int
    rank: int
    what: str
    name: str


class Divergence(msgspec.Struct, frozen=True):
    """The first place at which a rank differs by more than rounding."""

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


class Verdict(msgspec.Struct):
    """What a comparison found."""

    num_steps: int = 0
    identical: bool = True
    worst: dict[str, float] = msgspec.field(default_factory=dict)  # by kind: from one process
    times: float = 0.0  # the model's own rounding: the most that a step differs by
    allowed: int = 0  # times of it
    rounding: dict[str, float] = msgspec.field(default_factory=dict)  # by kind: what an ulp makes
    held_share: float = 1.0  # of the parameters, by the rank that holds the most
    first: Divergence | None = None
    complaint: str = ""  # the plan did not do what it says
    plan: str = ""  # as it was resolved
    is_replay: bool = False  # compared with what was pushed and pulled, played again
    left_whole: str = ""  # what `tensor` did not cut, and why

    @property
    def passed(self) -> bool:
        return self.first is None and not self.complaint

    def weigh(self, place: Place, difference: float, rounding: float, largest: float) -> None:
        """Judge a tensor with such a largest element by what rounding makes of it."""
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

    def names(self, kind: str) -> list[str]:
        return [name for of, name in self._parts if of == kind]

    def num_held(self, names: Sequence[str]) -> int:
        """Elements of these parameters that the rank holds."""
        return sum(part.numel() for name in names for _, part in self.parts("held", name))


def compare(run: Run, plan: Plan, directory: Path) -> Verdict:
    """Run the reference and compare every rank with it, up to the first divergence."""
    verdict, following = Verdict(allowed=TIMES[Precision(plan.precision)]), None
    timetable = Timetable(plan.local_steps, plan.fragments, run.num_steps())
    try:
        whole = left_whole(run, plan)
        for step, snapshots in enumerate(reference.train(run, plan), start=1):
            paths = [path_of(directory, step, rank) for rank in range(plan.num_ranks)]
            told = [Step(_await(path)) for path in paths]
            replicas = by_replica(told, len(snapshots))
            for ranks, own in zip(replicas, snapshots, strict=True):
                Comparison(verdict, plan, step, ranks).whole(own)
            if not verdict.complaint:
                shapes = {name: p.shape for name, p in snapshots[0].weights.items()}
                verdict.held_share = held_share(told, shapes)
                verdict.left_whole = in_words(plan, shapes, whole)
                speaks = timetable.speaks(step)
                idle = shapes.keys() - snapshots[0].gradients.keys()
                broken = broken_promise(plan, told, shapes, speaks, idle, whole)
                verdict.complaint = f"at step {step} {broken}" if broken else ""
            if not verdict.identical and verdict.passed:
                following = following or Following(run, plan, step - 1)
                following.judge(verdict, step, replicas)
            for path in paths:
                path.unlink()
            verdict.num_steps = step
            if not verdict.passed:
                break
    finally:
        finished(directory).touch()
    return verdict


def by_replica(told: Sequence[Step], num_replicas: int) -> list[dict[int, Step]]:
    """The steps of the ranks that are compared with each replica of the reference."""
    return [
        {rank: step for rank, step in enumerate(told) if rank % num_replicas == number}
        for number in range(num_replicas)
    ]


class Comparison:
    """Of a step of one replica's ranks with the reference's: is all there, and the same?"""

    def __init__(self, verdict: Verdict, plan: Plan, step: int, ranks: Mapping[int, Step]):
        self.verdict, self.plan, self.step, self.ranks = verdict, plan, step, ranks

    @torch.no_grad()
    def whole(self, own: reference.Snapshot) -> None:
        for place, block, theirs in self.parts(own):
            whole = whole_of(own, place)
            note(self.verdict, place, theirs, block.of(whole), reach(whole))

    def parts(self, own: reference.Snapshot) -> Iterator[tuple[Place, Box, Tensor]]:
        """All that ranks wrote down, with its place; complains of what is missing."""
        for rank, told in self.ranks.items():
            if not (math.isnan(own.loss) and told.loss.isnan()):  # no loss: no sample was left
                yield Place(self.step, rank, "loss", ""), whole_box(told.loss.shape), told.loss
        for name, weight in own.weights.items():
            yield from self._gradient(name, weight, own.gradients.get(name))
        for name, weight in own.weights.items():
            yield from self._held("weight", name, weight)
        for name, buffer in own.buffers.items():
            yield from self._held("buffer", name, buffer)

    def _gradient(
        self, name: str, weight: Tensor, gradient: Tensor | None
    ) -> Iterator[tuple[Place, Box, Tensor]]:
        covered = torch.zeros(weight.shape, dtype=torch.bool)
        for rank, told in self.ranks.items():
            place, parts = Place(self.step, rank, "gradient", name), told.parts("gradient", name)
            expected = gradient is not None and told.parts("held", name)
            if self.plan.zero in (1, 2) or self.plan.num_servers:  # its parts are not the weight's
                expected = gradient is not None and parts
            if bool(parts) != bool(expected):
                _diverge(self.verdict, place, math.inf)
                return
            for block, theirs in parts:
                block.of(covered).fill_(True)
                yield place, block, theirs
        if gradient is not None and not bool(covered.all()):
            self._miss(f"gradient of {name}")

    def _held(self, what: str, name: str, whole: Tensor) -> Iterator[tuple[Place, Box, Tensor]]:
        """The parts of a tensor that ranks hold; complains if together they are not all of it."""
        covered = torch.zeros(whole.shape, dtype=torch.bool)
        for rank, told in self.ranks.items():
            for block, theirs in told.parts("held", name):
                block.of(covered).fill_(True)
                yield Place(self.step, rank, what, name), block, theirs
        if not bool(covered.all()):
            self._miss(f"{what} {name}")

    def _miss(self, what: str) -> None:
        if not self.verdict.complaint:
            self.verdict.complaint = f"at step {self.step} no rank holds all of the {what}"


def whole_of(own: reference.Snapshot, place: Place) -> Tensor:
    if place.what == "loss":
        return torch.tensor([own.loss], dtype=torch.float64)
    kinds = {"gradient": own.gradients, "weight": own.weights, "buffer": own.buffers}
    return kinds[place.what][place.name].detach()


class Following:
    """Followers of a plan's replicas: judges each of its steps by what rounding makes of it."""

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

    def judge(self, verdict: Verdict, step: int, replicas: Sequence[Mapping[int, Step]]) -> None:
        """Do the step from where the plan stood, compare, and go where the plan is now."""
        self._theirs = [joined(ranks.values(), "gradient") for ranks in replicas]
        snapshots = next(self._steps)
        for follower, ranks, own in zip(self.followers, replicas, snapshots, strict=True):
            own = own._replace(gradients=follower.gradients)
            for place, block, theirs in Comparison(verdict, self.plan, step, ranks).parts(own):
                if verdict.passed:
                    self._judge(verdict, follower, place, theirs, block, whole_of(own, place))
            follower.become(joined(ranks.values(), "held"))

    def _judge(
        self,
        verdict: Verdict,
        follower: Follower,
        place: Place,
        theirs: Tensor,
        block: Box,
        own: Tensor,
    ) -> None:
        difference, largest, rounding = apart(theirs, block.of(own)), reach(own), 0.0
        if not difference:
            return
        for rounding in follower.rounding((place.what, place.name), own):
            if difference <= verdict.allowed * rounding:
                break
        verdict.weigh(place, difference, rounding, largest)


def joined(steps: Iterable[Step], kind: str) -> dict[str, Tensor]:
    """The whole tensors that parts of this kind make."""
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


def note(verdict: Verdict, place: Place, theirs: Tensor, own: Tensor, largest: float) -> None:
    """Keep the largest difference relative to a tensor's largest element; one that is not finite
    is an error."""
    verdict.worst.setdefault(place.what, 0.0)
    if torch.equal(theirs, own):
        return
    verdict.identical = False
    relative = apart(theirs, own) / (largest or 1.0)
    _keep_worst(verdict, place.what, relative)
    if not math.isfinite(relative):
        _diverge(verdict, place, relative)


def _diverge(verdict: Verdict, place: Place, relative: float, times: float = math.inf) -> None:
    verdict.identical = False
    _keep_worst(verdict, place.what, relative)
    if verdict.first is None:
        verdict.first = Divergence(*place, relative, times, verdict.allowed)


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
