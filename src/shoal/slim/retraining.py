"""A recipe that is trained with a change: with masks, a teacher, or rounded weights.

The run is an ordinary one: any plan, checkpoints, recovery and `--resume`. What comes out of it is
a model with trained weights, from which the change is taken away again. Read next: `api.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from shoal.api import recipe_of, train_recipe
from shoal.errors import UsageError
from shoal.events.events import OnEvent
from shoal.formats.exported_program import load_weights
from shoal.formats.open_weights import open_weights
from shoal.formats.weights import ModelWeights
from shoal.launch.outcome import Outcome
from shoal.launch.train import Options
from shoal.training.run import Run

Given = str | Run | Callable[..., Run]


@dataclass(frozen=True)
class Training:
    """How a verb that trains is to do it."""

    plan: str | None = None
    run_dir: Path | None = None
    resume: bool = False
    progress: bool | OnEvent = True
    done: Outcome | None = None  # it was trained already, by a command


class NotFinished(UsageError):
    """The run was stopped before its last step, and can be gone on with."""

    exit_code = 75


def train_changed(
    given: Given, settings: Mapping[str, Any], change: Callable[[Run], Run], training: Training
) -> Outcome:
    """Train what `change` makes of a recipe's Run, to its last step."""
    recipe = recipe_of(given, settings, change=change)
    options = Options(plan=training.plan, resume=training.resume)
    if training.done is not None:
        return training.done
    outcome = train_recipe(recipe, options, training.run_dir, training.progress)
    if not outcome.is_finished:
        raise NotFinished(
            f"The run was stopped after step {outcome.steps}, and nothing was written. To go on, "
            f"make the same call with Training(run_dir={str(outcome.run_dir)!r}, resume=True)."
        )
    return outcome


class ChangedModel:
    """Makes the model of a run with the weights that it begins with, and changes it."""

    def __init__(
        self,
        run: Run,
        change: Callable[[nn.Module], nn.Module],
        what: str,
        begin_from: str | Path | None,
    ):
        self._make, self._change, self._begin_from = run.model, change, begin_from
        name = getattr(run.model, "__qualname__", type(run.model).__name__)
        self.__qualname__ = f"{name} with {what}"  # which records keep

    def __call__(self) -> nn.Module:
        model = self._make()
        if not isinstance(model, nn.Module):
            return model  # which is refused where models are made
        if self._begin_from is not None:
            load_weights(model, ModelWeights(open_weights(self._begin_from).weights))
        return self._change(model)


def trained_model(outcome: Outcome) -> nn.Module:
    """The model that came out of a run, in evaluation mode."""
    return outcome.model().eval()
