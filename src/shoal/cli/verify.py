"""`shoal verify`: prove that a plan trains what one process would have trained."""

import dataclasses
import os
import sys
from typing import Any

import click
import msgspec

from shoal.cli import options
from shoal.cli.output import print_json, tell
from shoal.errors import UsageError
from shoal.events.events import (
    BusyEvent,
    Event,
    HangEvent,
    StandstillEvent,
    StoppingEvent,
    WaitingEvent,
    WarningEvent,
)

_SHOWN = (BusyEvent, HangEvent, WaitingEvent, StandstillEvent, StoppingEvent, WarningEvent)


@click.command(epilog=options.plan_help())
@click.argument("recipe")
@options.plan
@options.settings
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="How many steps to compare.",
)
@options.run_dir
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
def verify(recipe: str, settings: dict[str, str], steps: int, **given: Any) -> None:
    """Train RECIPE under a plan and in one plain process, and compare every step.

    \b
    shoal verify recipes/charlm.py:small --plan data=2 --steps 5

    Compares losses, gradients, weights and buffers of every rank. Exit codes: 0 the same result
    (SAME, or WITHIN ROUNDING: the model's own), 1 another (DIFFERENT, with the first step and
    tensor) or a plan that did not do what it says (NOT AS PLANNED), 2 usage, plan or input.
    """
    options.refuse_unusable_process()
    options.check_plan(given["plan"])
    if "steps" in settings or "epochs" in settings:
        raise UsageError("Say how many steps to compare with --steps, not with --set.")
    from shoal.storage.run_dir import RunDir

    with RunDir(given["run_dir"], f"verify-{recipe.rpartition('/')[2]}") as run_dir:
        code = _verify(recipe, {**settings, "steps": str(steps)}, given, run_dir)
    sys.exit(code)


def _verify(recipe: str, settings: dict[str, str], given: dict[str, Any], run_dir: Any) -> int:
    from shoal.events.screen import Display
    from shoal.numerics.precision import environment_for
    from shoal.plans.plan import Plan
    from shoal.training.callbacks import has_callbacks
    from shoal.training.recipe import load_recipe
    from shoal.verify import verify as verification

    if given["plan"] is not None:  # before the recipe computes anything
        os.environ.update(environment_for(Plan.parse(given["plan"]).precision))

    def load() -> Any:
        run = load_recipe(recipe, settings)
        if has_callbacks(run):  # which may go by evaluations
            return run
        return dataclasses.replace(run, evaluate=None, evaluate_every=None)

    display = Display()

    def watch(event: Event) -> None:
        if isinstance(event, _SHOWN):
            display(event)

    verdict = verification.verify(load, given["plan"], run_dir.path, watch)
    run_dir.describe(recipe=recipe, settings=settings, plan=verdict.plan)
    tell(in_words(verdict, recipe))
    code = 0 if verdict.passed else 1
    if given["as_json"]:
        result = {"verdict": verdict.verdict, "passed": verdict.passed}
        print_json(result | msgspec.to_builtins(verdict), code)
    return code


def in_words(verdict: Any, recipe: str) -> str:
    other = (
        "a replay of its pushes and pulls in one process" if verdict.is_replay else "one process"
    )
    lines = [f"{recipe} under {verdict.plan!r} against {other}, {verdict.num_steps} steps:"]
    if verdict.held_share < 1:
        lines.append(f"  no rank holds more than {verdict.held_share:.0%} of the parameters")
    if verdict.left_whole:
        lines.append(f"  {verdict.left_whole}")
    if verdict.passed and verdict.identical:
        what = (
            "losses and weights" if verdict.is_replay else "losses, gradients, weights and buffers"
        )
        lines.append(f"SAME: {what} are identical, bit for bit.")
        return "\n".join(lines)
    for what, relative in verdict.worst.items():
        own = verdict.rounding.get(what)
        words = "" if own is None else f"; an ulp in the weights makes {own:.2e} in one step"
        lines.append(f"  {what:<9} differs by at most {relative:.2e}{words}")
    if verdict.passed:
        lines.append(
            "WITHIN ROUNDING: no step, done from where the plan stood, differs by more than "
            f"{verdict.times:.2g} times the model's own rounding (allowed: {verdict.allowed})."
        )
    if verdict.unsteady:
        lines.append(
            f"  One process that does a step again differs by {verdict.unsteady:.2e}: the model "
            "draws numbers that are not torch's (of numpy, random, a generator of its own), or its "
            "forward keeps state that is no buffer. No plan can repeat that."
        )
    if verdict.first is not None:
        lines.append(f"DIFFERENT: first at {verdict.first}.")
    if verdict.complaint:
        lines.append(f"NOT AS PLANNED: {verdict.complaint}.")
    return "\n".join(lines)
