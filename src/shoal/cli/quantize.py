"""`shoal quantize`: weights as whole numbers of 8 or 4 bits."""

from typing import Any

import click

from shoal.cli import model_table, options
from shoal.errors import UsageError


@click.command(epilog=options.plan_help())
@click.argument("recipe")
@model_table.begin_from
@click.option(
    "--to",
    required=True,
    metavar="FORM",
    help="int8, int4 (weights), dynamic-int8, static-int8 (weights and activations) or qat-int8 "
    "(trained).",
)
@model_table.common
def quantize(recipe: str, settings: dict[str, str], as_json: bool, **given: Any) -> None:
    """Quantise the model of RECIPE through torchao, and measure it before and after.

    \b
    shoal quantize recipes/charlm.py:small --from runs/charlm-small-1 --to int8 --out charlm-int8
    shoal quantize recipes/charlm.py:small --from runs/charlm-small-1 --to qat-int8 \\
        --plan data=2 --set steps=100 --out charlm-qat

    Linear layers are quantised; layers that cannot be are named, and kept. OUT is a directory, one
    file if it ends in .safetensors, or a program of torch.export if it ends in .pt2: shoal.load
    loads all of them, from_pretrained a model of transformers where transformers can. Needs the
    extra slim. Exit codes: 0 done, 1 the recipe's own error, 2 usage or input, 75 stopped after a
    checkpoint.
    """
    options.refuse_unusable_process()
    options.check_plan(given["plan"])
    done = None
    if given["to"] == "qat-int8":
        module, begin_from = "shoal.slim.quantization", given["begin_from"]
        change = model_table.later(module, "quantize_in_training", begin_from=begin_from)
        done = model_table.train_first(recipe, settings, given, change, as_json)
    elif model_table.says_how_to_train(given):
        raise UsageError(
            f"--plan, --run-dir and --resume have no effect with --to {given['to']}, which does "
            "not train."
        )
    from shoal.slim import quantization
    from shoal.slim.retraining import Training

    result = quantization.quantize(
        recipe,
        given["begin_from"],
        to=given["to"],
        out=given["out"],
        settings=settings,
        training=Training(done=done) if done else None,
    )
    model_table.print_table(result, {"kept": model_table.some(result.kept)}, as_json=as_json)
