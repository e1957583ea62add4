"""`shoal generate`: text that a trained language model writes."""

from typing import Any

import click

from shoal.cli import options
from shoal.cli.output import print_json, say


@click.command()
@click.argument("recipe")
@options.from_weights
@click.option("--prompt", required=True, metavar="TEXT", help="What the model writes on from.")
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    default=200,
    show_default=True,
    help="How many tokens to write; a model may end its text before.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.8,
    show_default=True,
    help="Small for likely tokens, large for surprises; 0 takes the likeliest each time.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="The same, the same text.")
@click.option("--top-k", type=click.IntRange(min=1), help="Choose among the K likeliest tokens.")
@click.option(
    "--top-p",
    type=click.FloatRange(min=0, min_open=True, max=1),
    help="Choose among the fewest tokens that make up this share of all likelihood.",
)
@options.settings
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
def generate(recipe: str, begin_from: str, prompt: str, as_json: bool, **given: Any) -> None:
    """Let the language model of RECIPE, with trained weights, write on from a prompt.

    \b
    shoal generate recipes/charlm.py:small --from runs/charlm-small-1 --prompt "ROMEO:" --tokens 300

    The Run's tokenizer makes tokens of text; without one, that of the Hugging Face directory which
    the weights are from, or which their run began with. Exit codes: 0 done, 1 the recipe's own
    error, 2 usage or input.
    """
    options.refuse_unusable_process()
    from shoal.inference import text

    found = text.generate(recipe, begin_from, prompt, **given)
    if as_json:
        print_json(found._asdict())
    else:
        say(found.text)
