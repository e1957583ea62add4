"""`shoal predict`: a trained model's answers to the recipe's data, in a file."""

from typing import Any

import click

from shoal.cli import options
from shoal.cli.output import print_json, say
from shoal.errors import UsageError
from shoal.storage.object_store import local_path


@click.command()
@click.argument("recipe")
@options.from_weights
@click.option(
    "--out",
    required=True,
    metavar="FILE",
    help="A new file; its suffix is its format: .jsonl, .npz, .safetensors or .parquet (an extra).",
)
@options.settings
@options.on_data
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    help="Samples of one forward. Default: as in an evaluation, 64 at the most.",
)
@click.option("--device", default="cpu", show_default=True, help="Where the model works.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
def predict(recipe: str, out: str, as_json: bool, **given: Any) -> None:
    """Write the answers of RECIPE's model, with trained weights, to a file.

    \b
    shoal predict recipes/digits.py:small --from runs/digits-small-1 --out answers.jsonl

    A row is a sample, in the order of the data, with its number as `sample` and the model's output
    as `output`, or under the names of its outputs. It works in one process, batch by batch, and the
    file appears whole or not at all.

    Exit codes: 0 done, 1 the recipe's own error, 2 usage or input.
    """
    options.refuse_unusable_process()
    path = local_path(out)
    if path is None:
        raise UsageError(f"--out {out}: predictions are written to a disk. Give a path.")
    from shoal.inference import predictor

    found = predictor.predict(recipe, given.pop("begin_from"), path, **given)
    if as_json:
        print_json({"samples": found.samples, "out": found.out})
    else:
        say(f"{found.out}: {found.samples} samples.")
