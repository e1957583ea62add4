"""Evaluate trained weights on the ranks of a plan: what `shoal.evaluate` and `shoal evaluate` call.

The weights are read once, into the model that ranks are forked from. Ranks form a group as they do
to train, measure (`training/evaluate.py`), and end without a step: so the answer has the bits of an
evaluation in training. A rank that is lost is replaced, and the evaluation begins again. Loads
nothing heavy: torch is imported where the recipe is.

Cost: a start of ranks, and one forward of each sample. Read next: `train.py`, `supervised.py`.
"""

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from shoal.cluster.backend import Facts
from shoal.cluster.local import LocalBackend
from shoal.events.events import Event, OnEvent, StoppingEvent
from shoal.launch.supervised import RunFailed, run_supervised
from shoal.plans.plan import Plan
from shoal.storage.run_dir import RunDir
from shoal.training.options import Recipe, WhichData

if TYPE_CHECKING:
    from shoal.system.fork_server import WorkerMain


class EvaluateOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an evaluation is asked for; `shoal evaluate --help` says what each is."""

    begin_from: str
    plan: str | None = None
    ranks: Annotated[int, msgspec.Meta(ge=1)] | None = None
    on_data: WhichData = "evaluate"


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured: under the names that `shoal evaluate --json` gives them."""

    loss: float | None  # None if the recipe has no loss(output, target)
    metrics: dict[str, float]  # and the named parts of the loss
    samples: int
    plan: str
    weights: str  # the place they are from
    exit_code: Literal[0] = 0


def evaluate(
    recipe: Recipe,
    options: EvaluateOptions,
    run_dir: Path | None = None,
    *,
    watch: OnEvent = lambda event: None,
    prepared: Callable[[Facts, Path], None] = lambda facts, run_dir: None,
) -> Evaluation:
    """Measure a recipe's model with the weights of `options.begin_from`.

    Logs are kept in `run_dir`, if it is given. Raises NotLoaded if the recipe or the weights cannot
    be prepared, RunFailed if a rank fails. Call this from the main thread of a process without
    other threads (`fresh.py`).
    """
    if options.plan is not None:
        Plan.parse(options.plan)
    with _directory(run_dir) as path, RunDir(path, recipe.name) as directory:
        return _evaluate(recipe, options, directory, watch, prepared)


def _evaluate(
    recipe: Recipe,
    options: EvaluateOptions,
    run_dir: RunDir,
    watch: OnEvent,
    prepared: Callable[[Facts, Path], None],
) -> Evaluation:
    facts: Facts = {}

    def prepare() -> "tuple[Facts, WorkerMain]":
        from shoal.launch.prepare import prepare_evaluation  # which loads torch

        return prepare_evaluation(recipe, options, run_dir.path)

    def begin(found: Facts) -> None:
        facts.update(found)
        run_dir.describe(recipe=recipe.name, settings=dict(recipe.settings), **found)
        prepared(found, run_dir.path)

    def observe(event: Event) -> None:
        watch(event)
        if isinstance(event, StoppingEvent):  # there is no step to finish and nothing to save
            signal.raise_signal(signal.Signals[event.signal])

    result = run_supervised(
        prepare,
        run_dir.path,
        backend=LocalBackend(),
        watch=observe,
        prepared=begin,
    )
    if result.stopped_by and result.exit_code:
        stopped = f"stopped by {signal.Signals(result.stopped_by).name}"
        raise RunFailed(replace(result, cause=f"The evaluation was {stopped}."))
    if result.exit_code:
        raise RunFailed(result)
    found: dict[str, Any] = dict(result.summaries[0]["evaluation"])
    return Evaluation(
        loss=found.pop("loss", None),
        metrics=found,
        samples=facts["num_measured"],
        plan=facts["plan"],
        weights=facts["weights"],
    )


@contextmanager
def _directory(given: Path | None) -> Iterator[Path]:
    """Where the ranks have their logs: as it is given, or a temporary place."""
    if given is not None:
        yield given
        return
    made, owner = tempfile.mkdtemp(prefix="shoal-evaluate-"), os.getpid()
    try:
        yield Path(made) / "run"
    finally:
        if os.getpid() == owner:  # and not one of its ranks
            shutil.rmtree(made, ignore_errors=True)
