"""How a study ended: what `shoal.tune` returns, what `shoal tune --json` prints, and the plot."""

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from shoal.errors import UsageError
from shoal.formatting import plural, table
from shoal.storage.decoding import encode_json
from shoal.storage.files import atomic_replace, write_atomic
from shoal.tuning.directory import PLOT, RESULT, StudyDir
from shoal.tuning.display import figure, in_words
from shoal.tuning.objective import Goal
from shoal.tuning.search import FinishedTrial, Search
from shoal.tuning.space import Value, setting

if TYPE_CHECKING:
    from torch import nn

MOST_SHOWN = 10  # trials in the table at the end


class BestTrial(msgspec.Struct, frozen=True):
    """The trial with the best value."""

    trial: int
    value: float
    settings: dict[str, Value]
    run_dir: str


class StudyOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a study ended. `model()` builds the model of its best trial in this process."""

    best: BestTrial | None
    trials: list[FinishedTrial]
    importances: dict[str, float]  # shares of 1; empty if too few trials tell
    study: str  # its directory
    storage: str  # what optuna-dashboard shows it from
    metric: str
    direction: str
    finished: int  # trials that are over
    plot: str | None
    why_no_plot: str = ""
    exit_code: int
    recipe: Any = None

    def model(self) -> "nn.Module":
        """The model of the best trial, with the weights that its run left."""
        from shoal.training.load import load

        if self.best is None:
            raise UsageError("No trial made its last step, so there is no model.")
        drawn = {name: setting(value) for name, value in self.best.settings.items()}
        own = replace(self.recipe, settings={**self.recipe.settings, **drawn})
        return load(self.best.run_dir, own)


def study_outcome(
    search: Search, directory: StudyDir, storage: str, exit_code: int
) -> StudyOutcome:
    """What a study has found so far. All trials failing is a failure of the study."""
    trials = search.trials(directory.run_dir)
    over = [trial for trial in trials if trial.state != "running"]
    if exit_code == 0 and over and all(trial.state == "failed" for trial in over):
        exit_code = 1
    best = None
    if (found := search.best()) is not None:
        value, number = found
        best = BestTrial(number, value, trials[number].settings, trials[number].run_dir)
    importances = search.importances()
    plot, why = _plotted(trials, importances, search.goal, directory.path / PLOT)
    outcome = StudyOutcome(
        best=best,
        trials=trials,
        importances=importances,
        study=str(directory.path),
        storage=storage,
        metric=search.goal.metric,
        direction="max" if search.goal.is_max else "min",
        finished=len(over),
        plot=plot,
        why_no_plot=why,
        exit_code=exit_code,
    )
    write_atomic(directory.path / RESULT, as_json(outcome) + b"\n")
    return outcome


def as_json(outcome: StudyOutcome) -> bytes:
    """The one object of `--json`."""
    found = msgspec.structs.asdict(outcome)
    del found["recipe"], found["why_no_plot"]
    return encode_json(found)


def in_text(outcome: StudyOutcome) -> str:
    """The table at the end."""
    lines = [_counts(outcome)]
    if outcome.best is not None:
        lines += ["", _table(outcome), ""]
        best = outcome.best
        sets = " ".join(f"--set {name}={value}" for name, value in best.settings.items())
        lines += [
            f"best: trial {best.trial}, {outcome.metric} {figure(best.value)}",
            f"settings: {sets}",
            f"run directory: {best.run_dir}",
        ]
    if outcome.importances:
        shares = "  ".join(f"{name} {100 * x:.0f} %" for name, x in outcome.importances.items())
        lines.append(f"importance: {shares}")
    lines.append(f"plot: {outcome.plot or outcome.why_no_plot}")
    lines.append(f"study: {outcome.study}  (optuna-dashboard {outcome.storage})")
    return "\n".join(lines)


def _counts(outcome: StudyOutcome) -> str:
    states = [trial.state for trial in outcome.trials]
    counts = {state: states.count(state) for state in ("complete", "pruned", "failed", "running")}
    shown = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    return f"{plural(len(states), 'trial')}: {shown or 'none'}"


def _table(outcome: StudyOutcome) -> str:
    sign = -1.0 if outcome.direction == "max" else 1.0
    done = [t for t in outcome.trials if t.value is not None and t.state in ("complete", "pruned")]
    done.sort(key=lambda t: (t.state != "complete", sign * (t.value or 0.0), t.trial))
    rows = [("trial", outcome.metric, "steps", "state", "settings")]
    for t in done[:MOST_SHOWN]:
        assert t.value is not None
        rows.append((str(t.trial), figure(t.value), str(t.steps), t.state, in_words(t.settings)))
    return table(rows, (0, 1, 2))


def _plotted(
    trials: Sequence[FinishedTrial], importances: dict[str, float], goal: Goal, path: Path
) -> tuple[str | None, str]:
    """Where the plot is, or why there is none."""
    done = [t for t in trials if t.state == "complete" and t.value is not None]
    if not done:
        return None, "no trial made its last step, so there is nothing to draw"
    if importlib.util.find_spec("matplotlib") is None:
        return None, "matplotlib is not installed (pip install 'shoal-ml[plot]')"
    draw(trials, importances, goal, path)
    return str(path), ""


def draw(
    trials: Sequence[FinishedTrial], importances: dict[str, float], goal: Goal, path: Path
) -> None:
    """The value of each trial, the best so far, and the importance of each parameter."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    done = [(t.trial, t.value) for t in trials if t.state == "complete" and t.value is not None]
    pruned = [(t.trial, t.value) for t in trials if t.state == "pruned" and t.value is not None]
    figure_ = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasSVG(figure_)
    values, shares = figure_.subplots(1, 2, width_ratios=[2, 1])
    numbers, reached = zip(*done, strict=True)
    values.plot(numbers, list(goal.best_so_far(reached)), color="#1b7f5c", label="best so far")
    values.scatter(numbers, reached, s=14, color="#1b7f5c", label="complete")
    if pruned:
        values.scatter(*zip(*pruned, strict=True), s=14, color="#c9902b", label="pruned")
    if all(value > 0 for value in reached) and max(reached) > 20 * min(reached):
        values.set_yscale("log")
    values.set(xlabel="trial", ylabel=goal.metric)
    values.legend(frameon=False)
    names = [name for name in importances if math.isfinite(importances[name])][::-1]
    shares.barh(names, [importances[name] for name in names], color="#3b6ea8")
    shares.set(xlabel="importance")
    with atomic_replace(path) as unfinished:
        figure_.savefig(unfinished, format="svg")
