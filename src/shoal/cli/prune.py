"""`shoal prune`: zeros where weights matter least, or whole channels less."""

from typing import Any

import click

from shoal.cli import model_table, options
from shoal.errors import UsageError


@click.command(epilog=options.plan_help())
@click.argument("recipe")
@model_table.begin_from
@click.option(
    "--sparsity",
    type=float,
    metavar="SHARE",
    help="The share of weights that become 0, above 0 and below 1; with --how structured, of "
    "channels that go. N:M has its own.",
)
@click.option(
    "--how",
    default="magnitude",
    show_default=True,
    metavar="HOW",
    help="magnitude, movement, structured, or N:M such as 2:4.",
)
@click.option(
    "--train",
    is_flag=True,
    help="Train the recipe once more while the sparsity grows, from 10 % to 70 % of its steps. "
    "movement always does.",
)
@model_table.common
def prune(recipe: str, settings: dict[str, str], train: bool, as_json: bool, **given: Any) -> None:
    """Prune the model of RECIPE, and measure it before and after.

    \b
    shoal prune recipes/digits.py:small --from runs/digits-small-1 --sparsity 0.8 --out sparse
    shoal prune recipes/digits.py:small --from runs/digits-small-1 --sparsity 0.5 \\
        --how structured --out smaller.pt2
    shoal prune recipes/charlm.py:small --from runs/charlm-small-1 --sparsity 0.9 \\
        --how movement --plan data=2 --set steps=100 --out sparse

    magnitude zeroes the smallest weights of linear and convolutional layers; movement trains scores
    and drops what moves towards 0; N:M keeps N of every M neighbours; structured removes channels,
    and writes a smaller model as a program of torch.export. The others keep the recipe's shapes,
    and write weights. All of it loads with shoal.load. Needs the extra slim for structured. Exit
    codes: 0 done, 1 the recipe's own error, 2 usage or input, 75 stopped after a checkpoint.
    """
    options.refuse_unusable_process()
    options.check_plan(given["plan"])
    trains = train or given["how"] == "movement"
    if model_table.says_how_to_train(given) and not trains:
        raise UsageError(
            f"--plan, --run-dir and --resume have no effect with --how {given['how']}, which does "
            "not train by itself. Add --train, or leave them out."
        )
    asked = {name: given[name] for name in ("sparsity", "how", "begin_from")}
    change = model_table.later("shoal.slim.pruning", "prune_in_training", **asked)
    done = model_table.train_first(recipe, settings, given, change, as_json) if trains else None
    from shoal.slim import pruning
    from shoal.slim.retraining import Training

    result = pruning.prune(
        recipe,
        given["begin_from"],
        out=given["out"],
        sparsity=given["sparsity"],
        how=given["how"],
        settings=settings,
        training=Training(done=done) if done else None,
    )
    more = {"sparsity": f"{result.sparsity:.1%}", "kept": model_table.some(result.kept)}
    model_table.print_table(result, more, as_json=as_json)
