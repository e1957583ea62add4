"""A step of one's own: several losses, several optimizers, alternating parts.

`Run(step=fn)` calls `fn(batch)` on every rank for each step. Each call of `batch.minimize` is a
*phase*: a loss of all pieces of the batch, its gradient for the parameters of the named optimizers,
one exchange, one update. A phase is committed as a whole, as a plain step is; so a step that broke
between two phases goes on with the second one. Then `fn` is called again, and the phases that were
made answer what they answered. That is why `fn` may decide by `batch.step` and by what `minimize`
returned, which all ranks know alike, and by nothing else.

Here is what `fn` sees, and what is said if it asks for what there is not. Read next:
`step_attempt.py`, which makes phases on ranks; `verify/reference.py`, which makes them in one
process.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.errors import RecipeError, nearest
from shoal.numerics.optimizers import Optimizers, names_in
from shoal.training.progress import PhaseResult

PhaseLoss = Callable[[nn.Module, Any, Any], Any]  # of (model, inputs, target), as Run.loss answers
_NAMELESS = ("<lambda>", "partial")
_ALIKE = (
    "A step function must do the same whenever it is called for a step: decide by batch.step and "
    "by what minimize returned alone."
)


class Phase(NamedTuple):
    """One exchange and one update. Without a loss of its own it is the run's plain step."""

    number: int = 0  # in its step, from 0
    name: str = ""
    loss: PhaseLoss | None = None
    of: tuple[str, ...] = ()  # optimizers; empty for all

    def __str__(self) -> str:
        whose = f" of {' and '.join(self.of)}" if self.of else ""
        return f"phase {self.number + 1}, {self.name}{whose}"


PLAIN = Phase()


class StepBatch:
    """What a step function is called with. `step` counts the steps that were made before."""

    def __init__(
        self,
        step: int,
        known: Sequence[str],
        made: Sequence[PhaseResult],
        make: Callable[[Phase], float],
    ):
        """`known`: the optimizers' names; `made`: phases of this step that are committed."""
        self.step = step
        self._known, self._made, self._make = known, made, make
        self._num_calls = 0
        self._failure: BaseException | None = None

    def minimize(
        self, loss: PhaseLoss, of: str | Sequence[str] | None = None, *, name: str | None = None
    ) -> float:
        """Make one update by a loss; returns its mean over the whole batch, alike on all ranks.

        `loss(model, inputs, target)` answers for the samples it is given as `Run.loss` does: a mean
        or `(sum, weight)`. `of` names the optimizers that step, all if it is left out; the
        gradients of other parameters are not computed. The record has the loss under `name`, which
        is that of the optimizers unless given, and else that of the function.
        """
        if self._failure is not None:  # the step function caught it
            raise self._failure
        phase = self._phase(loss, of, name)
        self._num_calls += 1
        if phase.number < len(self._made):
            return self._answer_again(phase)
        try:
            return self._make(phase)
        except BaseException as error:
            self._failure = error
            raise

    def end(self) -> None:
        """The step function has returned: say if it did not do what it must."""
        if self._failure is not None:
            raise self._failure
        if not self._num_calls and not self._made:
            raise RecipeError(
                f"Step {self.step + 1} ended without a call of batch.minimize, so it would train "
                "nothing. A step function calls it at least once in every step."
            )
        if self._num_calls < len(self._made):
            raise RecipeError(
                f"Step {self.step + 1} is done again after a lost rank, and ends without its phase "
                f"{self._num_calls + 1}, which was {self._made[self._num_calls].name!r}. {_ALIKE}"
            )

    def _phase(self, loss: PhaseLoss, of: str | Sequence[str] | None, name: str | None) -> Phase:
        if not callable(loss):
            raise RecipeError(
                f"batch.minimize was given a {type(loss).__name__}. It takes a function of (model, "
                "inputs, target) that computes the loss, since each piece of the batch needs one."
            )
        names = (of,) if isinstance(of, str) else tuple(of or ())
        for one in names:
            if one not in self._known:
                raise RecipeError(_unknown(one, self._known))
        if name is not None and (not isinstance(name, str) or not name):
            raise RecipeError(f"batch.minimize(name={name!r}): the name of a phase is text.")
        return Phase(self._num_calls, name or "+".join(names) or _name_of(loss), loss, names)

    def _answer_again(self, phase: Phase) -> float:
        made = self._made[phase.number]
        if made.name != phase.name:
            raise RecipeError(
                f"Step {self.step + 1} is done again after a lost rank, and its phase "
                f"{phase.number + 1} is {phase.name!r} now and was {made.name!r}. {_ALIKE}"
            )
        return made.loss


def _unknown(name: str, known: Sequence[str]) -> str:
    if known:
        return f"batch.minimize(of={name!r}): no optimizer has this name. {nearest(name, known)}"
    return (
        f"batch.minimize(of={name!r}): the optimizers of this run have no names. Let Run.optimizer "
        f"return shoal.Optimizers({name}=..., ...), or leave `of` out to step on all parameters."
    )


def _name_of(loss: PhaseLoss) -> str:
    found = str(getattr(loss, "__name__", type(loss).__name__))
    return "loss" if found in _NAMELESS else found


def parameters_by_name(optimizer: torch.optim.Optimizer) -> dict[str, list[nn.Parameter]]:
    """What each named part of an optimizer steps on, before a strategy puts parts there."""
    if not isinstance(optimizer, Optimizers):
        return {}
    return {name: optimizer.parameters_of([name]) for name in names_in(optimizer)}


def losses_of(phases: Sequence[PhaseResult]) -> dict[str, float]:
    """The loss of each name; of a name with several phases, their mean."""
    return _means([{phase.name: phase.loss} for phase in phases])


def parts_of(phases: Sequence[PhaseResult]) -> dict[str, float]:
    """The losses by name, and the named parts of each as `name.part`."""
    inner = [{f"{phase.name}.{key}": x for key, x in phase.parts.items()} for phase in phases]
    return losses_of(phases) | _means(inner)


def _means(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for one in found:
        for name, value in one.items():
            values.setdefault(name, []).append(value)
    return {name: sum(known) / len(known) for name, known in values.items()}


def total_of(phases: Sequence[PhaseResult]) -> float:
    """The loss of a step: the sum over the names of its phases."""
    return sum(losses_of(phases).values())


def norm_of(phases: Sequence[PhaseResult]) -> float | None:
    """Of the gradients of all phases together; None if they were not computed."""
    known = [phase.norm for phase in phases if phase.norm is not None]
    return math.hypot(*known) if known else None


def refuse_independent(
    loss: Tensor, phase: Phase, parameters: Mapping[str, Sequence[nn.Parameter]]
) -> None:
    """RecipeError if a loss does not depend on what its phase trains. Costs a walk of its graph."""
    if not phase.of:
        return
    wanted = {id(p) for name in phase.of for p in parameters[name]}
    seen, waiting = set[Any](), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in wanted:
            return
        waiting += [following for following, _ in node.next_functions]
    raise RecipeError(
        f"The loss of {phase} does not depend on a parameter of "
        f"{' or '.join(map(repr, phase.of))}, so there is nothing to train. Compute it with these "
        "parts of the model and without detach() or torch.no_grad() around them."
    )
