"""Is a difference rounding, or an error? Each step is judged from where the plan stood before it.

A model may magnify its last bits without bound (a ReLU that tips, a route that flips, Adam on a
gradient that is noise), so two right runs may end far apart. One step is another matter. A
`Follower` is put where the plan stood and does the step as one process would; a `Twin` does it with
every weight moved by an ulp. How far the twin's loss, gradients and buffers are from the follower's
is the model's own rounding, tensor by tensor, and a plan may differ by some times as much: a long
sum in another order is off by more than the last bit of its terms. Then the
follower's optimizer steps on the plan's own gradients: nothing is left that would magnify a
difference, so the weights must be the same but for their last bits.

Cost: a step's forward and backward twice, and up to `MOST_TWINS` times more where a difference
seems to be an error, since a tip that a plan met is met by few twins.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shoal.data.batches import Batch
from shoal.errors import NotFinite
from shoal.numerics.norms import gradient_norm, values_of
from shoal.numerics.precision import Precision
from shoal.plans.plan import Plan
from shoal.training.run import Run
from shoal.verify.reference import Replica

# Times the model's own rounding that a plan may differ by; 16 bits are added up in 32.
TIMES = {Precision.FP32: 32, Precision.BF16: 4, Precision.FP16: 4}
MOST_TWINS = 16
FAINT = 2.0**-10  # of the whole gradient's last bit: what a gradient of zeros may differ by

Key = tuple[str, str]  # the kind of a tensor (loss, gradient, weight, buffer) and its name


class State(NamedTuple):
    weights: list[Tensor]
    buffers: list[Tensor]


class Watched(Replica):
    """A replica of the reference whose gradients are kept, and which can be put anywhere."""

    def __init__(self, run: Run, plan: Plan, pieces: range):
        super().__init__(run, plan, pieces)
        self.gradients: dict[str, Tensor] = {}  # its own
        self.made: dict[Key, Tensor] = {}  # of a step: loss, gradients, buffers
        self.optimize: Callable[[], object] = self.optimizer.step
        self.optimizer.step = self._keep_and_step  # type: ignore[method-assign, assignment]

    def _keep_and_step(self) -> None:
        named = self.model.named_parameters()
        self.gradients = {n: p.grad.to_dense().clone() for n, p in named if p.grad is not None}
        self.optimize()

    def step(self, batch: Batch) -> tuple[float, float]:
        loss, weight = super().step(batch)
        self.made = {("loss", ""): torch.tensor([loss / weight], dtype=torch.float64)}
        self.made |= {("gradient", name): gradient for name, gradient in self.gradients.items()}
        self.made |= {("buffer", n): b.detach().clone() for n, b in self.model.named_buffers()}
        return loss, weight

    def state(self) -> State:
        return State(
            [p.detach().clone() for p in self.model.parameters()],
            [b.detach().clone() for b in self.model.buffers()],
        )

    @torch.no_grad()
    def put(self, state: State) -> None:
        for p, value in zip(self.model.parameters(), state.weights, strict=True):
            p.copy_(value)
        for buffer, value in zip(self.model.buffers(), state.buffers, strict=True):
            buffer.copy_(value)
        self.buffers.hold()


class Twin(Watched):
    """Does single steps from weights that it moves, and never the optimizer's part of them."""

    def __init__(self, run: Run, plan: Plan, pieces: range):
        super().__init__(run, plan, pieces)
        self.optimize = lambda: None

    def try_step(self, batch: Batch, state: State, num_ulps: int, seed: int) -> dict[Key, Tensor]:
        """What it makes; nothing if that is not finite."""
        self.put(state)
        move(self.model, self.precision, num_ulps, seed)
        try:
            self.step(batch)
        except NotFinite:
            return {}
        return self.made


class Follower(Watched):
    """Stands where the plan does: it steps on the plan's gradients, once it has made its own, and
    takes the plan's weights and buffers after each step."""

    def __init__(
        self, run: Run, plan: Plan, pieces: range, theirs: Callable[[], Mapping[str, Tensor]]
    ):
        """`theirs` gives the gradients to step on; those that it does not are its own."""
        super().__init__(run, plan, pieces)
        self._theirs = theirs
        self._plain, self.optimize = self.optimize, self._step_on_theirs
        self._make_twin = functools.partial(Twin, run, plan, pieces)
        self._twin: Twin | None = None

    def step(self, batch: Batch) -> tuple[float, float]:
        self._batch, self._before, self._num_twins = batch, self.state(), 0
        self._spread: dict[Key, float] = {}
        return super().step(batch)

    def _step_on_theirs(self) -> None:
        theirs = self._theirs()
        for name, p in self.model.named_parameters():
            if p.grad is not None and name in theirs:
                rows = theirs[name][p.grad.indices()[0]] if p.grad.is_sparse else theirs[name]
                values_of(p.grad).copy_(rows)
        self._plain()

    @torch.no_grad()
    def become(self, held: Mapping[str, Tensor]) -> None:
        """Take the plan's weights and buffers."""
        for name, own in (*self.model.named_parameters(), *self.model.named_buffers()):
            own.copy_(held[name])
        self.buffers.hold()

    def rounding(self, key: Key, own: Tensor) -> Iterator[float]:
        """What rounding makes of a tensor in the last step: more, if anything, from twin to
        twin."""
        kind, name = key
        if kind == "weight":  # no bit, if it was not stepped on
            yield reach(own) * torch.finfo(own.dtype).eps * (name in self.gradients)
            return
        bits = last_bits(kind, own, self.parameters, self.precision)
        if kind == "gradient" and not bits:
            bits = FAINT * ulp(own, self.precision) * gradient_norm(self.gradients.values())
        if not self._num_twins:
            self._meet_twin()
        yield bits + self._spread.get(key, 0.0)
        while self._num_twins < MOST_TWINS:
            self._meet_twin()
            yield bits + self._spread.get(key, 0.0)

    def _meet_twin(self) -> None:
        """Let one more twin do the last step, and keep how far it came from the own one.

        All but the first are moved as far as rounding may carry a plan, so that they meet the tips
        that it may have met; what they come to is taken for each ulp.
        """
        self._twin = self._twin or self._make_twin()
        num_ulps = TIMES[self.precision] // 2 if self._num_twins else 1
        self._num_twins += 1
        seed = 1000 * self._batch.step + self._num_twins
        made = self._twin.try_step(self._batch, self._before, num_ulps, seed)
        for key in made.keys() & self.made.keys():
            spread = apart(made[key], self.made[key]) / num_ulps
            self._spread[key] = max(self._spread.get(key, 0.0), spread)


def ulp(tensor: Tensor, precision: Precision) -> float:
    """The last bit of what is computed with such numbers, relative to them; 0 of integers."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    own = torch.finfo(tensor.dtype).eps
    return own if precision is Precision.FP32 else max(own, torch.finfo(precision.dtype).eps)


def last_bits(kind: str, own: Tensor, weights: Iterable[Tensor], precision: Precision) -> float:
    """What the last bit of a tensor's largest element is; a loss is as exact as the weights."""
    of = max(ulp(p, precision) for p in weights) if kind == "loss" else ulp(own, precision)
    return of * reach(own)


@torch.no_grad()
def move(model: nn.Module, precision: Precision, num_ulps: int, seed: int) -> None:
    """Every weight by so many ulps, up or down; zeros stay."""
    draws = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        signs = torch.randint(2, p.shape, generator=draws).mul_(2).sub_(1)
        if far := num_ulps * ulp(p, precision):
            p.add_(p * signs * far)


def apart(one: Tensor, other: Tensor) -> float:
    """The largest difference of two tensors; NaN if one of them only is not a number."""
    if not one.numel() or torch.equal(one, other):
        return 0.0
    a, b = wide(one), wide(other)
    same = (a == b) | (a.isnan() & b.isnan())
    return float(torch.where(same, 0.0, (a - b).abs()).max())


def wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)


def reach(tensor: Tensor) -> float:
    """The largest element that is finite."""
    size = wide(tensor).abs()
    return float(torch.where(size.isfinite(), size, 0.0).max()) if size.numel() else 0.0
