"""What all ranks of a host share: the model with its first weights, and how it will be cut.

Made once, in the process that forks the ranks, so a host holds the whole model once however many
ranks it has, and a plan that does not suit the model is refused before any of them starts.
"""

from functools import partial
from typing import Any, NamedTuple

from torch import nn

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
    model.train()
    seeds = PieceSeeds(model, run.seed)

    def forward(piece: int) -> Any:
        with Precision(plan.precision).autocast("cpu"):
            return call_model(model, batches.at(0).piece(piece).inputs)

    forwards = [partial(forward, piece) for piece in sorted({0, plan.num_pieces - 1})]
    return Prepared(model, seeds, survey(model, plan, forwards, seeds, run.cuts))
