"""`prune`: zeros where weights matter least, or whole channels less.

- magnitude: the smallest weights of all layers together become 0, at once; in training layer by
  layer, along a ramp.
- movement: always in training; what is dropped is learnt (`masks.py`).
- N:M, as in 2:4: of every M neighbours the N largest stay.
- structured: whole channels go, and the model is really smaller (`structured.py`).

Zeros make no file smaller by themselves: `pack` it. CPUs and most libraries compute as long with
zeros as without, and the table says so by its latency.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.api import name_of, recipe_of
from shoal.errors import UsageError, nearest
from shoal.slim import masks
from shoal.slim.figures import (
    Figures,
    LoadedModel,
    ModelTable,
    figures_of,
    load_trained,
    notes_of,
    num_bytes_at,
)
from shoal.slim.masks import Pattern, Ramp, find_layers, read_pattern, sparsity_of
from shoal.slim.results import new_place, write_program, write_weights
from shoal.slim.retraining import (
    ChangedModel,
    Given,
    Training,
    train_changed,
    trained_model,
)
from shoal.slim.structured import layers_of_one_width, remove_channels, weight_of
from shoal.training.load import load
from shoal.training.run import Run

HOW = ("magnitude", "movement", "structured", "2:4")
RAMP_BEGIN, RAMP_END = 0.1, 0.7  # shares of a run's steps between which the sparsity grows


class PruneTable(ModelTable, frozen=True, kw_only=True):
    """What `shoal prune --json` prints, beside the exit code."""

    sparsity: float  # of the pruned layers; structured: the share of parameters that are gone
    kept: list[str]  # layers that stayed as they were


def prune(
    recipe: Given,
    begin_from: str | Path,
    *,
    out: str | Path,
    sparsity: float | None = None,
    how: str = "magnitude",
    settings: Mapping[str, Any] | None = None,
    training: Training | None = None,
) -> PruneTable:
    """Prune the model of a recipe with the weights of `begin_from`, and write the result to `out`.

    With `training` the recipe trains it once more while the sparsity grows; movement always does.
    """
    sparsity, pattern = check_sparsity(sparsity, how)
    if how == "movement":
        training = training or Training()
    place, settings = new_place(out), settings or {}
    if training is not None:
        change = partial(prune_in_training, sparsity=sparsity, how=how, begin_from=str(begin_from))
        outcome = train_changed(recipe, settings, change, training)
        run, _ = recipe_of(recipe, settings).load()
        model = masks.bake_masks(trained_model(outcome))
    else:
        run, _ = recipe_of(recipe, settings).load()
        model = load_trained(run, begin_from).model
        if how == "structured":
            model = remove_channels(run, model, sparsity)
        else:
            zero_smallest(model, sparsity, pattern)
    before = load_trained(run, begin_from)
    figures = figures_of(run, before.model, before.num_bytes)  # which may fail: nothing is written
    if how == "structured":
        return _finish_smaller(run, before, figures, model, place)
    layers = find_layers(model, pattern)
    write_weights(run, model, place, name_of(recipe)[0])
    return PruneTable(
        before=figures,
        after=figures_of(run, load(place, run), num_bytes_at(place)),
        out=str(place),
        sparsity=sparsity_of(layers.prunable),
        kept=layers.kept,
        notes=notes_of(run, before.note),
    )


def prune_in_training(
    run: Run,
    sparsity: float | None = None,
    how: str = "magnitude",
    begin_from: str | Path | None = None,
) -> Run:
    """The run with masks on its weights, whose sparsity grows between 10 % and 70 % of its steps.

    It begins with the weights of `begin_from`, if given. `shoal.slim.bake_masks` makes a plain
    model of what it trained. With how="structured" channels are removed before the first step.
    """
    sparsity, pattern = check_sparsity(sparsity, how)
    num_steps = run.num_steps()
    ramp = Ramp(sparsity, int(RAMP_BEGIN * num_steps), int(RAMP_END * num_steps))

    def change(model: nn.Module) -> nn.Module:
        if how == "structured":
            return remove_channels(run, model, sparsity)
        masks.add_masks(model, ramp, pattern, has_scores=how == "movement")
        return model

    return replace(run, model=ChangedModel(run, change, f"{how} {sparsity:g}", begin_from))


def check_sparsity(sparsity: float | None, how: str) -> tuple[float, Pattern | None]:
    """The sparsity that is meant, and the pattern if there is one."""
    pattern = read_pattern(how)
    if pattern is None and how not in HOW:
        raise UsageError(f"--how {how}: there is no such way to prune. {nearest(how, HOW)}")
    if pattern is not None and sparsity is None:
        sparsity = pattern.sparsity
    if sparsity is None:
        raise UsageError("Say with --sparsity which share of the weights becomes 0, 0.8 say.")
    if not 0 < sparsity < 1:
        raise UsageError(
            f"--sparsity {sparsity:g}: it is the share of weights that become 0, above 0 and below "
            "1. 0.8 leaves one in five."
        )
    if pattern is not None and abs(sparsity - pattern.sparsity) > 1e-6:
        raise UsageError(
            f"--sparsity {sparsity:g} contradicts --how {how}, which is a sparsity of "
            f"{pattern.sparsity:g}. Leave one of them out."
        )
    return sparsity, pattern


@torch.no_grad()
def zero_smallest(model: nn.Module, sparsity: float, pattern: Pattern | None = None) -> None:
    """Zero the smallest weights of all layers together, or those that a pattern leaves out."""
    weights = [weight_of(module) for module in find_layers(model, pattern).prunable.values()]
    if pattern is not None:
        for weight in weights:
            weight.mul_(masks.keep_pattern(weight.abs(), pattern))
        return
    ranks = torch.cat([weight.abs().flatten() for weight in weights])
    mask = masks.keep_largest(ranks, len(ranks) - round(sparsity * len(ranks)))
    for weight, part in zip(weights, mask.split([weight.numel() for weight in weights])):
        weight.mul_(part.view_as(weight))


def _finish_smaller(
    run: Run, before: LoadedModel, figures: Figures, model: nn.Module, place: Path
) -> PruneTable:
    """Write a model of other shapes as a program."""
    written = write_program(run, model, place)
    after = figures_of(run, written.model, num_bytes_at(place))
    return PruneTable(
        before=figures,
        after=after,
        out=str(place),
        sparsity=1 - after.parameters / figures.parameters,
        kept=layers_of_one_width(before.model, model),
        notes=notes_of(run, before.note, written.note),
    )
