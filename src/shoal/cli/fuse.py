"""`shoal fuse`: one model of several, by their weights or by their answers."""

from typing import Any

import click

from shoal.cli import model_table, options
from shoal.errors import UsageError


@click.command(epilog=options.plan_help())
@click.argument("recipe")
@click.argument("checkpoints", nargs=-1, required=True, metavar="CHECKPOINT...")
@click.option(
    "--how",
    default="average",
    show_default=True,
    metavar="HOW",
    help="average, soup, greedy, ties, slerp or task, of weights; ensemble or stack, of answers.",
)
@click.option(
    "--weights",
    metavar="NUMBERS",
    help="One for each checkpoint, as in 0.7,0.3, or ema:0.9, the newest last. Default: all alike "
    "for average, chosen by the recipe's evaluation for the others.",
)
@click.option(
    "--base",
    metavar="CHECKPOINT",
    help="With task and ties: what the models began with. Default: the recipe's first weights.",
)
@click.option(
    "--metric",
    default="loss",
    show_default=True,
    metavar="METRIC",
    help="What decides, as in loss or accuracy:max.",
)
@model_table.common
def fuse(
    recipe: str,
    checkpoints: tuple[str, ...],
    settings: dict[str, str],
    as_json: bool,
    **given: Any,
) -> None:
    """Make one model of the CHECKPOINTs of RECIPE, and compare it with the best of them.

    \b
    shoal fuse recipes/digits.py:small runs/a runs/b runs/c --how greedy --out soup
    shoal fuse recipes/digits.py:small runs/a/checkpoints/* --weights ema:0.9 --out average
    shoal fuse recipes/digits.py:small runs/a runs/b --how ensemble --out two.pt2

    average, soup and greedy take means of weights; task and ties add what each learnt beyond a
    base; slerp goes from one to another. These need models of one shape and write weights, as
    prune does. ensemble averages the answers of unlike models; stack trains a layer over them
    (--plan, --run-dir and --resume are its training's). These write a program of torch.export; each
    model is made by RECIPE with the settings of its run. All of it loads with shoal.load. Exit
    codes: 0 done, 1 the recipe's own error, 2 usage or input, 75 stopped after a checkpoint.
    """
    options.refuse_unusable_process()
    options.check_plan(given["plan"])
    trains = given["how"] == "stack"
    if model_table.says_how_to_train(given) and not trains:
        raise UsageError(
            f"--plan, --run-dir and --resume have no effect with --how {given['how']}, which does "
            "not train. They are for stack."
        )
    asked = {"recipe": recipe, "places": list(checkpoints), "settings": settings}
    change = model_table.later("shoal.slim.ensembles", "stack", **asked)
    done = model_table.train_first(recipe, settings, given, change, as_json) if trains else None
    from shoal.slim import fusing
    from shoal.slim.retraining import Training

    result = fusing.fuse(
        recipe,
        checkpoints,
        **{name: given[name] for name in ("out", "how", "weights", "base", "metric")},
        settings=settings,
        training=Training(done=done) if done else None,
    )
    best = result.best_single
    shares = " ".join(f"{weight:.3g}" for weight in result.weights)
    model_table.print_table(result, {"weights": shares, "best": best.checkpoint}, as_json=as_json)
