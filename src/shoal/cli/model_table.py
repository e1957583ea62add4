"""What verbs that make a model smaller share: options of their training, and one table."""

import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shoal.cli import options
from shoal.cli.outcome import print_outcome
from shoal.cli.output import as_json, print_json, say

if TYPE_CHECKING:
    from shoal.launch.outcome import Outcome
    from shoal.slim.figures import ModelTable
    from shoal.training.run import Run

out = click.option("--out", required=True, metavar="PATH", help="What to write; it must not exist.")
begin_from = click.option(
    "--from",
    "begin_from",
    required=True,
    metavar="CHECKPOINT",
    help="The weights: a run directory, a checkpoint or an export.",
)
resume = click.option(
    "--resume", is_flag=True, help="Go on with the training of --run-dir where it was stopped."
)


def common(command: options.Command) -> options.Command:
    """The options of all these verbs."""
    for option in (as_json, out, resume, options.run_dir, options.settings, options.plan):
        command = option(command)
    return command


def says_how_to_train(given: dict[str, Any]) -> bool:
    return given["plan"] is not None or given["run_dir"] is not None or given["resume"]


def train_first(
    recipe: str,
    settings: dict[str, str],
    given: dict[str, Any],
    change: "Callable[[Run], Run]",
    as_json: bool,
) -> "Outcome":
    """Train what `change` makes of a recipe, as `shoal train` does, before torch is loaded here.

    A run that ends before its last step ends the command as it ends `shoal train`.
    """
    from shoal.events.screen import Display
    from shoal.formats.new_output import refuse_existing
    from shoal.launch import train as launch
    from shoal.training.options import Recipe

    refuse_existing(Path(given["out"]))
    display = Display()
    outcome = launch.train(
        replace(Recipe.named(recipe, settings), is_named=False, change=change),
        launch.Options(plan=given["plan"], resume=given["resume"]),
        given["run_dir"],
        watch=display,
        prepared=partial(display.introduce, recipe),
    )
    display.close()
    if outcome.exit_code or not outcome.is_finished:
        sys.exit(print_outcome(outcome, as_json=as_json))
    return outcome


def later(module: str, function: str, **given: Any) -> "Callable[[Run], Run]":
    """A function of a Run that is imported where it is called, since it loads torch."""

    def change(run: "Run") -> "Run":
        made: Run = getattr(importlib.import_module(module), function)(run, **given)
        return made

    return change


def print_table(result: "ModelTable", more: dict[str, Any], *, as_json: bool) -> None:
    """One JSON object, or a table and a few words."""
    if as_json:
        print_json(result)
        return
    say(result.in_words())
    for name, value in more.items():
        if value:
            say(f"{name}: {value}")


def some(names: list[str]) -> str:
    """A few names of many."""
    shown = ", ".join(names[:8])
    return f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown
