"""`shoal tune`: search the settings of a recipe, several trials side by side."""

import sys
from pathlib import Path
from typing import Any

import click

from shoal.cli import options
from shoal.cli.output import say, tell
from shoal.errors import RUN_AGAIN


@click.command(epilog=options.plan_help())
@click.argument("recipe")
@click.option(
    "--space",
    required=True,
    metavar="SPACE",
    help='Parameters and their ranges, as in "lr=log:1e-5..3e-2 width=8|64 depth=int:1..4 '
    'wd=0..0.1", or file.py:function, a function of an Optuna trial that returns a mapping.',
)
@click.option(
    "--trials",
    type=click.IntRange(min=1),
    metavar="N",
    help="How many trials the study has at its end. A grid needs none: it has as many as points.",
)
@click.option(
    "--sampler",
    type=click.Choice(["tpe", "random", "grid", "gp", "cmaes"]),
    default="tpe",
    show_default=True,
    help="Who draws: by what was good before (tpe, gp, cmaes), by chance, or all of a grid.",
)
@click.option(
    "--pruner",
    type=click.Choice(["none", "asha", "hyperband", "median"]),
    default="none",
    show_default=True,
    help="Who stops a trial early, by its evaluations so far (evaluate_every of the Run).",
)
@click.option(
    "--metric",
    default="loss",
    show_default=True,
    metavar="NAME[:max|:min]",
    help="What is made best: the loss, or a metric of the recipe's evaluation. Without a direction "
    "the least is the best, except of accuracy, auc, f1 and the like.",
)
@click.option(
    "--parallel",
    type=click.IntRange(min=1),
    metavar="K",
    help="How many trials run side by side. Default: as many as the cores hold.",
)
@options.plan
@options.settings
@click.option("--seed", type=int, default=0, show_default=True, help="Of what is drawn.")
@click.option(
    "--storage",
    metavar="URL",
    help="A database for the study, as in sqlite:///study.db. Default: a journal file in its "
    "directory.",
)
@click.option(
    "--keep",
    default="best=3",
    show_default=True,
    metavar="best=K|all",
    help="Which trials keep their checkpoints and model; records of all trials stay.",
)
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where the study keeps its files. Default: runs/<recipe>-tune-<n>, the last one if it is "
    "the same study with trials left.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
def tune(
    recipe: str,
    space: str,
    settings: dict[str, str],
    run_dir: Path | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Search the settings of RECIPE, given as file.py:function or module:function.

    \b
    shoal tune recipes/digits.py:small --space "lr=log:1e-3..0.3 channels=8|16|32" --trials 16
    shoal tune recipes/digits.py:small --space recipes/digits.py:space --trials 32 \\
        --metric accuracy:max --pruner asha --set evaluate_every=30 --parallel 2

    Each trial is a run of its own, in trials/NNNN of the study's directory, under one plan; the
    default is one rank. With --plan data=auto trials share the cores, and grow as others end. The
    value of a trial is that of its last evaluation, or without one the mean loss of the last
    twentieth of its steps. A trial that fails is recorded, and the study goes on. Ctrl-C once lets
    trials save themselves. The same command goes on with a study, whatever ended it; what was
    under way is resumed from its checkpoint (save_every of the Run says how often there is one).
    Needs the extra `tune`. Exit codes: 0 done, 1 all trials failed, 2 usage, plan, space or input,
    75 stopped, to be gone on with.
    """
    options.refuse_unusable_process()
    from shoal.training.options import Recipe
    from shoal.tuning.results import as_json as encoded
    from shoal.tuning.results import in_text
    from shoal.tuning.tune import StudyOptions, run_study

    outcome = run_study(Recipe.named(recipe, settings), space, StudyOptions(**given), run_dir)
    if as_json:
        tell(in_text(outcome))
        click.echo(encoded(outcome).decode())
    else:
        say(in_text(outcome))
    if outcome.exit_code == 1:
        reasons = [trial.reason for trial in outcome.trials if trial.reason]
        say(f"shoal: all trials failed. The first: {reasons[0]}", is_error=True)
    elif outcome.exit_code == RUN_AGAIN:
        say("shoal: stopped, as asked. The same command goes on with the study.", is_error=True)
    sys.exit(outcome.exit_code)
