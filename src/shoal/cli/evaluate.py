"""`shoal evaluate`: the loss and metrics of trained weights, on the ranks of a plan."""

from pathlib import Path
from typing import Any

import click

from shoal.cli import options
from shoal.cli.output import print_json, say


@click.command(epilog=options.plan_help())
@click.argument("recipe")
@options.from_weights
@options.plan
@options.settings
@options.ranks
@options.on_data
@options.run_dir_for_logs
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
def evaluate(
    recipe: str, settings: dict[str, str], run_dir: Path | None, as_json: bool, **given: Any
) -> None:
    """Measure the loss and metrics of RECIPE with trained weights.

    \b
    shoal evaluate recipes/digits.py:small --from runs/digits-small-1
    shoal evaluate recipes/digits.py:small --from digits.safetensors --plan data=2

    Each sample is counted once, and the answer has the bits of the evaluation in training, on any
    number of ranks. Give the --set of the run, if it had some. Exit codes: 0 done, 1 the recipe's
    own error, 2 usage, plan or input.
    """
    options.refuse_unusable_process()
    from shoal.events.screen import Display
    from shoal.launch import evaluate as launch
    from shoal.training.options import Recipe

    display = Display()
    try:
        found = launch.evaluate(
            Recipe.named(recipe, settings), launch.EvaluateOptions(**given), run_dir, watch=display
        )
    finally:
        display.close()
    if as_json:
        print_json(found)
        return
    numbers = {} if found.loss is None else {"loss": found.loss}
    say(f"{found.samples} samples with {found.weights}, plan {found.plan or 'data=1'}:")
    say("  ".join(f"{name} {value:.6g}" for name, value in (numbers | found.metrics).items()))
