"""What the first step computes of a piece, run once in this process: no rank is started.

A plain step calls the model; one of the recipe's own (`training/custom_step.py`) calls its losses,
and which phases it has is known only by that. Nothing is trained: phases answer with the loss of
this one piece, so a recipe that decides by it may be seen to go another way than on the whole
batch.
"""

from collections.abc import Sequence

import msgspec
import torch
from torch import nn

from shoal.comm.collectives import bytes_of_all_reduce
from shoal.data.batches import Piece
from shoal.errors import RecipeError
from shoal.numerics.optimizers import names_in
from shoal.sync.costs import DOUBLE, Message
from shoal.training.custom_step import Phase, StepBatch
from shoal.training.run import Run, call_model, objective_of

MOST_PHASES = 1000  # of a step, before it is taken for one that does not end


def run_first_step(run: Run, model: nn.Module, piece: Piece) -> list[str]:
    """Run the forward passes; the names of the phases, none of a plain step."""
    if run.step is None:
        with torch.no_grad():
            call_model(model, piece.inputs)
        return []
    names: list[str] = []

    def compute(phase: Phase) -> float:
        names.append(phase.name)
        if len(names) > MOST_PHASES:
            raise RecipeError(
                f"The step function calls batch.minimize more than {MOST_PHASES} times in step 1, "
                "where nothing is trained and each answers with the loss of the first weights. "
                "Let it end after a fixed number."
            )
        assert phase.loss is not None
        goal = objective_of(phase.loss(model, piece.inputs, piece.target), piece)
        loss = goal.tensor.item()
        return loss if goal.is_mean else loss / max(float(goal.weight), 1.0)

    batch = StepBatch(0, names_in(run.make_optimizer(model)), (), compute)
    run.step(batch)
    batch.end()
    return names


def messages_of_phases(sent: Sequence[Message], num_phases: int, num_ranks: int) -> list[Message]:
    """Those of a step that is made in phases, from those of one exchange. Pure.

    What comes next is agreed on before each phase and at the end (`training/step_attempt.py`).
    """
    found = [
        msgspec.structs.replace(m, count=num_phases * m.count, num_bytes=num_phases * m.num_bytes)
        for m in sent
    ]
    times = num_phases + 1 if num_ranks > 1 else 0
    num_bytes = times * bytes_of_all_reduce(num_ranks * DOUBLE, num_ranks)
    told = Message("what comes next", "data", "gather", times, num_bytes)
    return [*found, told]
