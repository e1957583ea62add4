"""`shoal distill`: train a model with a larger one as its teacher."""

from typing import Any

import click

from shoal.cli import model_table, options


@click.command(epilog=options.plan_help())
@click.argument("recipe")
@click.option(
    "--teacher",
    required=True,
    metavar="CHECKPOINT",
    help="A run directory, a checkpoint, an export, a program (.pt2) or a directory of Hugging "
    "Face.",
)
@click.option(
    "--teacher-recipe",
    metavar="RECIPE",
    help="What makes the teacher's model. Default: RECIPE, where weights need one.",
)
@click.option(
    "--teacher-set",
    "teacher_settings",
    multiple=True,
    metavar="NAME=VALUE",
    callback=options.read_settings,
    help="Set a parameter of the teacher's recipe. May be repeated.",
)
@click.option("--temperature", type=float, default=2.0, show_default=True, help="Of both answers.")
@click.option(
    "--alpha", type=float, default=0.5, show_default=True, help="The teacher's part of the loss."
)
@click.option(
    "--hidden",
    multiple=True,
    metavar="STUDENT=TEACHER",
    callback=options.read_settings,
    help="Compare these two layers as well, by their names. May be repeated.",
)
@click.option(
    "--cache", metavar="DIR", help="Ask the teacher once about each sample, and keep its answers."
)
@click.option(
    "--teachers",
    type=int,
    default=0,
    metavar="N",
    help="Let the teacher compute in N processes of its own on each host, ahead of the ranks. "
    "Default: where batches are made.",
)
@model_table.common
def distill(recipe: str, settings: dict[str, str], as_json: bool, **given: Any) -> None:
    """Train the model of RECIPE with a teacher, under any plan.

    \b
    shoal distill recipes/digits.py:small --set channels=4 --teacher runs/digits-small-1 --out tiny
    shoal distill recipes/charlm.py:small --set layers=1 --teacher runs/charlm-small-1 \\
        --plan data=2 --hidden blocks.0=blocks.3 --out one-layer

    --set is the student's, --teacher-set the teacher's. The loss is (1 - alpha) times the recipe's
    own plus alpha times the divergence from the teacher's answers. The result holds the student
    alone. Exit codes: 0 done, 1 the recipe's own error, 2 usage or input, 75 stopped after a
    checkpoint.
    """
    options.refuse_unusable_process()
    options.check_plan(given["plan"])
    asked = {name: given[name] for name in ("temperature", "alpha", "hidden", "cache", "teachers")}
    teacher = {name: given[name] for name in ("teacher", "teacher_recipe", "teacher_settings")}
    change = model_table.later(
        "shoal.slim.distillation", "distill_recipe", recipe=recipe, **teacher, lessons=asked
    )
    done = model_table.train_first(recipe, settings, given, change, as_json)
    from shoal.slim import distillation
    from shoal.slim.retraining import Training

    result = distillation.train_student(
        recipe,
        **teacher,
        out=given["out"],
        lessons=distillation.Lessons(**asked),
        settings=settings,
        training=Training(done=done),
    )
    model_table.print_table(result, {}, as_json=as_json)
