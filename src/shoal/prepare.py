"""What all ranks of a host share: the model with its first weights, and how it will be cut.

Made once, in the process that forks the ranks, so a host holds the whole model once however many
ranks it has, and a plan that does not suit the model is refused before any of them starts.
"""

from functools import partial
from typing import Any, NamedTuple

from torch import nn
from torch.utils._pytree import tree_leaves

from shoal.errors import PlanError
from shoal.numerics.optimizers import is_element_wise
from shoal.numerics.precision import Precision
from shoal.numerics.randomness import PieceSeeds
from shoal.parallel.apply import Survey, survey
from shoal.plan import Plan
from shoal.run import Run, call_model, make_batches


class Prepared(NamedTuple):
    model: nn.Module
    seeds: PieceSeeds
    survey: Survey


def prepare(run: Run, plan: Plan) -> Prepared:
    """Build the model and look at what the plan will do to it."""
    batches = make_batches(run, plan.num_pieces)  # says what is wrong with the data
    model = run.make_model()
    _refuse_whole_tensors(run, plan, model)
    model.train()
    seeds = PieceSeeds(model, run.seed)

    def forward(step: int, piece: int) -> Any:
        with Precision(plan.precision).autocast("cpu"):
            return call_model(model, batches.at(step).piece(piece).inputs)

    def shapes(step: int, piece: int) -> list[Any]:
        inputs = tree_leaves(batches.at(step).piece(piece).inputs)
        return [getattr(leaf, "shape", None) for leaf in inputs]

    # Two examples of one form, if there are two among the first: texts may differ in length.
    places = [(step, piece) for step in range(2) for piece in range(plan.num_pieces)]
    alike = [place for place in places[1:] if plan.cuts_model and shapes(*place) == shapes(0, 0)]
    forwards = [partial(forward, *place) for place in [places[0], *alike[-1:]]]
    return Prepared(model, seeds, survey(model, plan, forwards, seeds, run.cuts))


def _refuse_whole_tensors(run: Run, plan: Plan, model: nn.Module) -> None:
    """An optimizer that looks at a whole tensor cannot step on a rank's part of it."""
    if plan.tensor == 1 and plan.zero < 3 and plan.offload == "none":
        return
    optimizer = run.make_optimizer(model)
    if not is_element_wise(optimizer):
        key = f"tensor={plan.tensor}" if plan.tensor > 1 else "zero=3"
        if plan.tensor == 1 and plan.zero < 3:
            key = "offload=optimizer"
        raise PlanError(
            f"{type(optimizer).__name__} may look at a whole tensor at once, and {key} lets a rank "
            "step on a part. Use data, pipeline, zero=1 or zero=2, or an optimizer that works "
            "element by element, such as AdamW; one of your own may say that it does with an "
            "attribute, element_wise = True."
        )
