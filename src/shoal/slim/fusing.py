"""`fuse`: one model of several that a recipe trained.

- average: the mean of their weights, or a weighted one; of checkpoints of one run it is SWA, with
  `ema:0.9` as weights an exponential average, the newest last.
- soup: the plain mean; greedy: models join it, best first, while the evaluation does not lose.
- task, ties: what each learnt beyond a base, added to it; slerp: two, along the arc.
- ensemble: the weighted mean of what unlike models answer; stack: a layer learns to weigh them.

Where no weights are given the recipe's evaluation chooses them: how far to go for task, ties and
slerp, which models for greedy and ensemble. Merged weights have no statistics of their own, so
those of BatchNorm are taken again on the recipe's training data. Cost: an evaluation for each
candidate. Read next: `merging.py` for the arithmetic, `ensembles.py` for unlike models.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from torch import nn

from shoal.api import name_of, recipe_of
from shoal.errors import UsageError, nearest
from shoal.slim import merging
from shoal.slim.ensembles import Ensemble, choose_shares, load_members, train_stack
from shoal.slim.figures import (
    Figures,
    ModelTable,
    evaluate,
    figures_of,
    load_trained,
    notes_of,
    num_bytes_at,
    num_bytes_of,
)
from shoal.slim.results import new_place, write_program, write_weights
from shoal.slim.retraining import Given, Training
from shoal.slim.statistics import refresh_statistics
from shoal.training.goal import Goal
from shoal.training.load import load
from shoal.training.run import Run

HOW = ("average", "soup", "greedy", "ties", "slerp", "task", "ensemble", "stack")
UNLIKE = ("ensemble", "stack")  # take models of any shape
WEIGHTED = ("average", "ties", "slerp", "task", "ensemble")  # take --weights
CHOOSING = ("greedy", "ties", "slerp", "task", "ensemble")  # on the evaluation, without them
SCALES = [round(0.1 * n, 1) for n in range(11)]  # of task vectors and arcs, to try
DENSITY = 0.2  # the share of a task vector that TIES keeps


class SingleModel(msgspec.Struct, frozen=True):
    """One of the models that were fused."""

    checkpoint: str
    metrics: dict[str, float]


class FuseTable(ModelTable, frozen=True, kw_only=True):
    """What `shoal fuse --json` prints, beside the exit code. `before` is the best single model."""

    weights: list[float]  # in the order of the checkpoints
    best_single: SingleModel


class Candidate(NamedTuple):
    """A merged model, the weights that made it and how good it is; None if nothing was measured."""

    weights: list[float]
    model: nn.Module
    score: float | None
    note: str


@dataclass(frozen=True)
class Request:
    """What is to be fused, and how."""

    recipe: Given
    settings: Mapping[str, Any]
    run: Run
    checkpoints: list[str]
    how: str
    weights: list[float] | None
    base: str | None
    goal: Goal


def fuse(
    recipe: Given,
    checkpoints: Sequence[str | Path],
    *,
    out: str | Path,
    how: str = "average",
    weights: Sequence[float] | str | None = None,
    base: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    metric: str = "loss",
    training: Training | None = None,
) -> FuseTable:
    """Fuse the models of a recipe with the weights of `checkpoints`, and write one to `out`.

    `weights` are numbers, one for each, or `ema:DECAY`. `base` is what task and ties begin with;
    otherwise that is what the recipe begins with. `metric`, `accuracy:max` say, decides where there
    is a choice. `training` says how a stack is trained.
    """
    places = [str(one) for one in checkpoints]
    shares = check_weights(places, how, weights)
    if base is not None and how not in ("task", "ties"):
        raise UsageError(f"--base has no effect with --how {how}. It is for task and ties.")
    if training is not None and how != "stack":
        raise UsageError(
            f"--plan and --run-dir have no effect with --how {how}: nothing is trained."
        )
    place, goal = new_place(out), Goal.parse(metric)
    run, _ = recipe_of(recipe, settings or {}).load()
    _check_goal(run, goal, chooses=how in CHOOSING and shares is None)
    asked = Request(
        recipe, settings or {}, run, places, how, shares, None if base is None else str(base), goal
    )
    if how in UNLIKE:
        return _fuse_answers(asked, place, training or Training())
    return _fuse_weights(asked, place)


def check_weights(
    places: Sequence[str], how: str, weights: Sequence[float] | str | None
) -> list[float] | None:
    """The weights that are meant, one for each model; None if the evaluation is to choose them."""
    if how not in HOW:
        raise UsageError(f"--how {how}: there is no such way to fuse. {nearest(how, HOW)}")
    if len(places) < 2:
        raise UsageError(f"There is nothing to fuse: {len(places)} checkpoint is given. Give two.")
    if how == "slerp" and len(places) != 2:
        raise UsageError(
            f"--how slerp goes from one model to another, and {len(places)} are given."
        )
    if weights is None:
        return [1 / len(places)] * len(places) if how in ("average", "soup") else None
    if how not in WEIGHTED:
        raise UsageError(f"--weights has no effect with --how {how}, which weighs by itself.")
    shares = _read_weights(weights, len(places))
    if len(shares) != len(places):
        raise UsageError(f"--weights has {len(shares)} numbers for {len(places)} checkpoints.")
    if not all(abs(share) < float("inf") for share in shares) or not sum(shares):
        raise UsageError(
            f"--weights {weights}: they must be finite numbers with a sum that is not 0."
        )
    return shares


def _read_weights(weights: Sequence[float] | str, count: int) -> list[float]:
    if not isinstance(weights, str):
        return [float(weight) for weight in weights]
    kind, colon, decay = weights.partition(":")
    try:
        if not colon:
            return [float(word) for word in weights.replace(",", " ").split()]
        if kind == "ema" and 0 < float(decay) < 1:
            return merging.decayed_weights(count, float(decay))
    except ValueError:
        pass
    raise UsageError(
        f"--weights {weights}: give a number for each checkpoint, as in 0.7,0.3, or ema:0.9 with "
        "a decay above 0 and below 1."
    )


def _check_goal(run: Run, goal: Goal, chooses: bool) -> None:
    if run.evaluate is None and chooses:
        raise UsageError(
            "The recipe has no `evaluate`, so nothing can be chosen by it. Give --weights, or "
            "--how average."
        )
    if run.evaluate is not None:
        goal.refuse_unknown(run.measures())


def _fuse_weights(asked: Request, place: Path) -> FuseTable:
    """Models of one shape become one of that shape."""
    merger = Merger(asked)
    fused = merger.fuse()
    write_weights(asked.run, fused.model, place, name_of(asked.recipe)[0])
    after = figures_of(asked.run, load(place, asked.run), num_bytes_at(place))
    return _table(asked, merger.singles, after, place, fused.weights, [fused.note])


def _fuse_answers(asked: Request, place: Path, training: Training) -> FuseTable:
    """Models of any shape become a program that asks them all."""
    run = asked.run
    members = load_members(asked.recipe, asked.checkpoints, asked.settings)
    singles = [_metrics(run, member) for member in members]
    shares = asked.weights
    if asked.how == "stack":
        model, shares = train_stack(asked.recipe, asked.settings, asked.checkpoints, training)
    else:
        if shares is None:
            shares = choose_shares(run, members, asked.goal.score)
        used = [(one, share) for one, share in zip(members, shares, strict=True) if share]
        model = Ensemble([one for one, _ in used], [share / sum(shares) for _, share in used])
    written = write_program(run, model, place)
    after = figures_of(run, written.model, num_bytes_at(place))
    return _table(asked, singles, after, place, shares, [written.note])


class Merger:
    """The models of a request, and what can be made of their weights."""

    def __init__(self, asked: Request):
        self.asked, self.run = asked, asked.run
        self._sources = [merging.MergedTensors.open(place, self.run) for place in asked.checkpoints]
        self.singles = [
            _metrics(self.run, load_trained(self.run, place).model) for place in asked.checkpoints
        ]

    def fuse(self) -> Candidate:
        """The merged model that was asked for."""
        how, shares = self.asked.how, self.asked.weights
        if how == "greedy":
            return self._greedy()
        if how in ("average", "soup"):
            assert shares is not None
            return self._average(shares)
        if shares is not None:
            return self._along(shares)
        tried = map(self._along, self._scaled())  # one at a time is held
        return max(tried, key=lambda one: -math.inf if one.score is None else one.score)

    def _scaled(self) -> list[list[float]]:
        """The weights to try: of an arc both ends and points between, of task vectors lengths."""
        if self.asked.how == "slerp":
            return [[1 - scale, scale] for scale in SCALES]
        return [[scale] * len(self._sources) for scale in SCALES[1:]]

    def _along(self, shares: list[float]) -> Candidate:
        how = self.asked.how
        if how == "slerp":
            share, (one, other) = shares[1] / sum(shares), self._sources
            state = {
                name: merging.interpolate_on_sphere(one.read(name), other.read(name), share)
                for name in one.names
            }
            return self._candidate(shares, state)
        base = merging.MergedTensors.open(self.asked.base, self.run)
        state = {}
        for name in base.names:
            values = [source.read(name) for source in self._sources]
            if how == "task":
                state[name] = merging.add_task_vectors(base.read(name), values, shares)
            else:
                state[name] = merging.merge_ties(base.read(name), values, shares, DENSITY)
        return self._candidate(shares, state)

    def _average(self, shares: list[float]) -> Candidate:
        used = [(s, share) for s, share in zip(self._sources, shares, strict=True) if share]
        state = {
            name: merging.average([s.read(name) for s, _ in used], [share for _, share in used])
            for name in self._sources[0].names
        }
        return self._candidate(shares, state)

    def _greedy(self) -> Candidate:
        """Add models to the soup, best first, as long as it does not get worse."""
        scores = [self.asked.goal.score(metrics) for metrics in self.singles]
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        taken, best = [order[0]], self._average(_equal([order[0]], len(scores)))
        for index in order[1:]:
            tried = self._average(_equal([*taken, index], len(scores)))
            if tried.score is not None and best.score is not None and tried.score >= best.score:
                taken, best = [*taken, index], tried
        return best

    def _candidate(self, shares: list[float], state: merging.State) -> Candidate:
        model = self.run.make_model()
        merging.set_state(model, state)
        # One model alone has statistics of its own.
        is_merged = sum(share != 0 for share in shares) > 1 or self.asked.how in ("task", "ties")
        note = refresh_statistics(self.run, model) if is_merged else ""
        metrics = _metrics(self.run, model.eval())
        return Candidate(shares, model, self.asked.goal.score(metrics) if metrics else None, note)


def _equal(taken: Sequence[int], count: int) -> list[float]:
    return [1 / len(taken) if index in taken else 0.0 for index in range(count)]


def _metrics(run: Run, model: nn.Module) -> dict[str, float]:
    return {} if run.evaluate is None else evaluate(run, model)


def _table(
    asked: Request,
    singles: Sequence[dict[str, float]],
    after: Figures,
    place: Path,
    weights: list[float],
    notes: Sequence[str],
) -> FuseTable:
    """`before` is the best of the single models; the first, if nothing was measured."""
    best = 0
    if asked.run.evaluate is not None:
        best = max(range(len(singles)), key=lambda index: asked.goal.score(singles[index]))
    where = asked.checkpoints[best]
    loaded = load_members(asked.recipe, [where], asked.settings)[0]
    before = figures_of(asked.run, loaded, num_bytes_of(loaded))
    told = _gain(asked.goal, before, after) if singles[best] else ""
    return FuseTable(
        before=before,
        after=after,
        out=str(place),
        notes=notes_of(asked.run, *notes, told),
        weights=weights,
        best_single=SingleModel(where, singles[best]),
    )


def _gain(goal: Goal, before: Figures, after: Figures) -> str:
    """What fusing gained, in a sentence."""
    one, other = before.metrics[goal.metric], after.metrics[goal.metric]
    if one == other:
        return f"{goal.metric} is that of the best single model, {one:.4f}."
    is_better = goal.score(after.metrics) > goal.score(before.metrics)
    words = "better" if is_better else "worse"
    return f"{goal.metric} is {abs(one - other):.4f} {words} than that of the best single model."
