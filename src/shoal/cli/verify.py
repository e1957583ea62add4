"""`shoal verify`: prove that a plan trains what one process would have trained."""

import dataclasses
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from shoal.cli import options
from shoal.errors import UsageError


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

    Compares losses, gradients, weights and buffers of every rank. Exit codes: 0 the same result,
    1 another result (the first step and module that differ are named), 2 usage, plan or input.
    """
    options.refuse_closed_output()
    if "steps" in settings or "epochs" in settings:
        raise UsageError("Say how many steps to compare with --steps, not with --set.")
    from shoal.rundir import RunDir

    with RunDir(given["run_dir"], f"verify-{recipe.rpartition('/')[2]}") as run_dir:
        code = _verify(recipe, {**settings, "steps": str(steps)}, given, run_dir)
    sys.exit(code)


def _verify(recipe: str, settings: dict[str, str], given: dict[str, Any], run_dir: Any) -> int:
    from shoal import verify as verification
    from shoal.cluster.launch import NotLoaded, await_facts, launch
    from shoal.cluster.nursery import Nursery
    from shoal.elastic.membership import Membership
    from shoal.elastic.worker import prepare_training, use_threads
    from shoal.numerics.precision import bf16_environment
    from shoal.plan import Plan
    from shoal.recipe import load_recipe
    from shoal.run import resolve

    if given["plan"] is not None and Plan.parse(given["plan"]).precision == "bf16":
        os.environ.update(bf16_environment())
    directory: Path = run_dir.path / "verify"
    directory.mkdir()

    def load() -> Any:
        use_threads()
        return dataclasses.replace(
            load_recipe(recipe, settings), evaluate=None, evaluate_every=None
        )

    def run_reference() -> Any:
        run = load()
        found = verification.compare(run, resolve(run, given["plan"], None), directory)
        return {"verdict": msgspec.to_builtins(found)}, _no_child

    def prepare() -> Any:
        hooks = verification.record
        return prepare_training(load(), given["plan"], None, run_dir.path, more_hooks=hooks)

    beside = Nursery(run_reference, run_dir.path / "logs" / "reference.log")
    facts: dict[str, Any] = {}
    try:
        outcome = launch(
            prepare,
            run_dir.path,
            watch=lambda record: None,
            members=lambda found: Membership(found["num_ranks"], num_spares=0),
            prepared=facts.update,
        )
        if outcome.exit_code:
            click.echo(outcome.trace, err=True)
            click.echo(f"shoal: {outcome.cause}.", err=True)
            return int(outcome.exit_code)
        answer = await_facts(beside)["verdict"]
    except NotLoaded as error:
        run_dir.discard()
        if error.trace:
            click.echo(error.trace, err=True)
        click.echo(f"shoal: {error}", err=True)
        return error.exit_code
    finally:
        beside.close()
        shutil.rmtree(directory, ignore_errors=True)
    verdict = msgspec.convert(answer, verification.Verdict)
    click.echo(in_words(verdict, recipe, facts["plan"]), err=True)
    if given["as_json"]:
        print(msgspec.json.encode({"passed": verdict.passed, **answer}).decode(), flush=True)
    return 0 if verdict.passed else 1


def in_words(verdict: Any, recipe: str, plan: str) -> str:
    lines = [f"{recipe} under {plan!r} against one process, {verdict.num_steps} steps:"]
    if verdict.passed and verdict.identical:
        lines.append("SAME: losses, gradients, weights and buffers are identical, bit for bit.")
        return "\n".join(lines)
    for what, relative in verdict.worst.items():
        lines.append(f"  {what:<9} differs by at most {relative:.2e}")
    if verdict.num_noise:
        lines.append(
            f"  {verdict.num_noise} of {verdict.num_elements} weights are not judged: their "
            "gradient fell below 1e-7 of the norm"
        )
    if verdict.passed:
        lines.append(f"SAME within the tolerance of {verdict.tolerance:g}.")
    elif verdict.first is not None:
        lines.append(f"DIFFERENT (tolerance {verdict.tolerance:g}): first at {verdict.first}.")
    if verdict.complaint:
        lines.append(f"NOT AS PLANNED: {verdict.complaint}.")
    return "\n".join(lines)


def _no_child(birth: Any) -> int:
    raise AssertionError("the reference bears no ranks")
