"""Is a difference rounding or an error? Each step is judged from the plan's state before it.

A model may amplify its last bits without bound (a ReLU that flips, a route that changes, Adam on a
gradient that is noise), so two correct runs may end far apart. A single step cannot. A `Follower`
has the plan's state and does the step as one process would; a `PerturbedReplica` does it with every
weight moved by an ulp, and once with none moved: a model whose step then differs draws numbers that
are not torch's, or keeps state of its own, which excuses no plan. Of a step in several phases each
is done from where the follower began it. How far the loss, gradients and buffers of the two differ
is the model's own rounding, tensor by tensor; a plan may differ by a small multiple of it, since a
long sum in another order is off by more than the last bit of its terms. Then the follower's
optimizer steps on the plan's own gradients: nothing amplifies a difference any more, so the weights
must agree up to their last bits.

Cost: the forward and backward pass of a step twice, and up to `MOST_TWINS` times more where a
difference looks like an error, since few perturbed replicas flip where the plan did.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shoal.data.batches import Batch
from shoal.errors import NotFinite
from shoal.numerics.norms import gradient_norm, values_of
from shoal.numerics.precision import Precision
from shoal.plans.plan import Plan
from shoal.training.custom_step import Phase
from shoal.training.run import Run
from shoal.verify.reference import Replica, by_key, gradient_key
from shoal.verify.reference_codec import UNSENT, PackedReplicas, PackedTensor

# How many times the model's own rounding a plan may differ by; 16 bits are summed in 32.
TOLERANCE = {Precision.FP32: 32, Precision.BF16: 4, Precision.FP16: 4}
MOST_TWINS = 16
# What a codec rounds to the other side is a whole step of it, however far weights are moved: it
# counts as that of so many ulps, and four steps are allowed, since several replicas and the owner
# of their sum may flip at one element.
FLIP = 8
FAINT = 2.0**-10  # of the last bit of the whole gradient: the tolerance of a gradient of zeros

Unsent = tuple[dict[int, PackedTensor], int]  # of gradients that are packed, and after which step
Key = tuple[str, str]  # the kind of a tensor (loss, gradient, weight, buffer) and its name


class ModelState(NamedTuple):
    weights: list[Tensor]
    buffers: list[Tensor]


class RecordingReplica(Replica):
    """A replica of the reference that records its gradients, and whose state can be set."""

    def __init__(self, run: Run, plan: Plan, pieces: range):
        super().__init__(run, plan, pieces)
        self.gradients = []  # its own
        self.made: dict[Key, Tensor] = {}  # of a step: loss, gradients, buffers
        self.answers: Sequence[float] = ()  # of the plan's phases, so that a step decides alike
        self.optimize: Callable[[], object] = self.optimizer.step
        self.optimizer.step = self._keep_and_step  # type: ignore[method-assign, assignment]

    def _keep_and_step(self) -> None:
        super().note_gradients()
        self.gradients[-1] = {n: gradient.clone() for n, gradient in self.gradients[-1].items()}
        self.optimize()

    def follow(self, answers: Sequence[float]) -> None:
        """Answer in the next step as the plan's phases did."""
        self.answers = answers

    def answer(self, phase: Phase, loss: float) -> float:
        return self.answers[phase.number] if phase.number < len(self.answers) else loss

    def note_gradients(self) -> None:
        """They were noted before the step, which may be one on others."""

    def step(self, batch: Batch) -> tuple[float, float]:
        loss, weight = super().step(batch)
        self.made = {("loss", ""): torch.tensor([loss / weight], dtype=torch.float64)}
        self.made |= {("gradient", key): g for key, g in by_key(self.gradients).items()}
        self.made |= {("buffer", n): b.detach().clone() for n, b in self.model.named_buffers()}
        self.made |= {(UNSENT, name): kept for name, kept in self.exchange.unsent().items()}
        return loss, weight

    def state(self) -> ModelState:
        return ModelState(
            [p.detach().clone() for p in self.model.parameters()],
            [b.detach().clone() for b in self.model.buffers()],
        )

    @torch.no_grad()
    def put(self, state: ModelState) -> None:
        for p, value in zip(self.model.parameters(), state.weights, strict=True):
            p.copy_(value)
        for buffer, value in zip(self.model.buffers(), state.buffers, strict=True):
            buffer.copy_(value)
        self.buffers.hold()


class PerturbedReplica(RecordingReplica):
    """Does single steps from moved weights, without the optimizer."""

    def __init__(self, run: Run, plan: Plan, pieces: range):
        super().__init__(run, plan, pieces)
        self.optimize = lambda: None

    def try_step(
        self,
        batch: Batch,
        states: Sequence[ModelState],
        unsent: Unsent | None,
        num_ulps: int,
        seed: int,
    ) -> dict[Key, Tensor]:
        """Its loss, gradients and buffers from these states, one for each phase, and with what was
        `unsent`; empty if they are not finite."""
        self._states, self._move = states, (num_ulps, seed)
        if isinstance(self.exchange, PackedReplicas) and unsent is not None:
            self.exchange.kept, self.exchange.made = unsent
        try:
            self.step(batch)
        except NotFinite:
            return {}
        return self.made

    def phase(self, batch: Batch, phase: Phase) -> tuple[float, float]:
        if phase.number >= len(self._states):
            raise NotFinite("moved weights led to other phases")
        self.put(self._states[phase.number])
        perturb(self.model, self.precision, *self._move)
        return super().phase(batch, phase)


class Follower(RecordingReplica):
    """Follows the plan: it computes its own gradients, steps on the plan's, and copies the plan's
    weights and buffers after each step."""

    def __init__(
        self, run: Run, plan: Plan, pieces: range, theirs: Callable[[], Mapping[str, Tensor]]
    ):
        """`theirs` returns the plan's gradients; for missing ones it uses its own."""
        super().__init__(run, plan, pieces)
        self._theirs = theirs
        self._plain, self.optimize = self.optimize, self._step_on_theirs
        self._make_twin = functools.partial(PerturbedReplica, run, plan, pieces)
        self._twin: PerturbedReplica | None = None
        self.unsteady = 0.0  # by how much a step differs that is only done again, if by any

    def step(self, batch: Batch) -> tuple[float, float]:
        self._batch, self._num_twins = batch, 0
        self._before: list[ModelState] = []  # by phase
        packed = self.exchange if isinstance(self.exchange, PackedReplicas) else None
        self._unsent = None if packed is None else (packed.kept, packed.made)
        self._spread: dict[Key, float] = {}
        return super().step(batch)

    def phase(self, batch: Batch, phase: Phase) -> tuple[float, float]:
        self._before.append(self.state())
        return super().phase(batch, phase)

    def _step_on_theirs(self) -> None:
        theirs = self._theirs()
        for name, p in self.model.named_parameters():
            key = gradient_key(name, len(self.gradients) - 1)
            if p.grad is not None and key in theirs:
                rows = theirs[key][p.grad.indices()[0]] if p.grad.is_sparse else theirs[key]
                values_of(p.grad).copy_(rows)
        self._plain()

    @torch.no_grad()
    def copy_state(self, held: Mapping[str, Tensor], unsent: Mapping[str, Tensor]) -> None:
        """Copy the plan's weights and buffers, and what it had not sent of gradients."""
        if isinstance(self.exchange, PackedReplicas):
            self.exchange.put(unsent)
        for name, own in (*self.model.named_parameters(), *self.model.named_buffers()):
            own.copy_(held[name])
        self.buffers.hold()

    def rounding(self, key: Key, own: Tensor) -> Iterator[float]:
        """The rounding of a tensor in the last step: estimates that never decrease, one per
        perturbed replica."""
        kind, name = key
        if kind == "weight":  # no rounding if it was not stepped on
            num_steps = sum(name in of_phase for of_phase in self.gradients)
            yield largest_finite(own) * torch.finfo(own.dtype).eps * num_steps
            return
        bits = last_bits(kind, own, self.parameters, self.precision)
        if kind == "gradient" and not bits:
            bits = FAINT * ulp(own, self.precision) * gradient_norm(by_key(self.gradients).values())
        if not self._num_twins:
            self._meet_twin()
        yield bits + self._spread.get(key, 0.0)
        while self._num_twins < MOST_TWINS and not self.unsteady:
            self._meet_twin()
            yield bits + self._spread.get(key, 0.0)

    def _meet_twin(self) -> None:
        """Repeat the last step with other perturbed weights, and record how far the results differ.

        All but the first are moved as far as rounding may move a plan, so that they flip where it
        may have flipped; their difference is divided by the number of ulps.
        """
        if self._twin is None:
            self._twin = self._make_twin()
            self.unsteady = self._do_again(self._twin)
        num_ulps = TOLERANCE[self.precision] // 2 if self._num_twins else 1
        far = num_ulps if self._unsent is None else min(num_ulps, FLIP)
        self._num_twins += 1
        seed = 1000 * self._batch.step + self._num_twins
        self._twin.follow(self.answers)
        made = self._twin.try_step(self._batch, self._before, self._unsent, num_ulps, seed)
        for key in made.keys() & self.made.keys() if not self.unsteady else ():
            spread = largest_difference(made[key], self.made[key]) / far
            self._spread[key] = max(self._spread.get(key, 0.0), spread)

    def _do_again(self, twin: PerturbedReplica) -> float:
        """By how much, relative to its size, a tensor differs if the last step is done again."""
        twin.follow(self.answers)
        made, differs = twin.try_step(self._batch, self._before, self._unsent, 0, 0), 0.0
        for key in made.keys() & self.made.keys():
            own, difference = self.made[key], largest_difference(made[key], self.made[key])
            if difference > last_bits(key[0], own, self.parameters, self.precision):
                differs = max(differs, difference / (largest_finite(own) or 1.0))
        return differs


def ulp(tensor: Tensor, precision: Precision) -> float:
    """The relative size of the last bit in computations with a tensor; 0 for integers."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    own = torch.finfo(tensor.dtype).eps
    return own if precision is Precision.FP32 else max(own, torch.finfo(precision.dtype).eps)


def last_bits(kind: str, own: Tensor, weights: Iterable[Tensor], precision: Precision) -> float:
    """The last bit of a tensor's largest element; a loss has the precision of the weights."""
    of = max(ulp(p, precision) for p in weights) if kind == "loss" else ulp(own, precision)
    return of * largest_finite(own)


@torch.no_grad()
def perturb(model: nn.Module, precision: Precision, num_ulps: int, seed: int) -> None:
    """Move every weight by `num_ulps` ulps, up or down; zeros stay."""
    draws = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        signs = torch.randint(2, p.shape, generator=draws).mul_(2).sub_(1)
        if far := num_ulps * ulp(p, precision):
            p.add_(p * signs * far)


def largest_difference(one: Tensor, other: Tensor) -> float:
    """The largest difference of two tensors; NaN if only one of them is NaN somewhere."""
    if not one.numel() or torch.equal(one, other):
        return 0.0
    a, b = to_double(one), to_double(other)
    same = (a == b) | (a.isnan() & b.isnan())
    return float(torch.where(same, 0.0, (a - b).abs()).max())


def to_double(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)


def largest_finite(tensor: Tensor) -> float:
    """The largest finite element."""
    size = to_double(tensor).abs()
    return float(torch.where(size.isfinite(), size, 0.0).max()) if size.numel() else 0.0
