"""`shoal train`: train a recipe under a plan, on the ranks of this machine."""

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shoal.cli import options
from shoal.cli.outcome import print_outcome
from shoal.cli.output import leave_at_once
from shoal.logs import LEVELS

if TYPE_CHECKING:
    from shoal.events.screen import Display
    from shoal.launch.outcome import Outcome


@click.command(epilog=options.plan_help())
@click.argument("recipe")
@options.plan_or_auto
@options.settings
@options.ranks
@click.option(
    "--on",
    default="local",
    show_default=True,
    metavar="WHERE",
    help="Where processes start: `local`, on this machine; `hosts:a,b,c`, on hosts that ssh "
    "reaches, this one among them as `localhost`; `ray` or `ray://ADDRESS`, on a Ray cluster; "
    "`slurm`, on the nodes of the allocation that this is in; `kubernetes`, in the pods of a job.",
)
@options.run_dir
@options.spares
@options.form_timeout
@options.heartbeat_timeout
@options.stop_timeout
@click.option(
    "--resume",
    is_flag=True,
    help="Go on from the newest good checkpoint of --run-dir, or of the recipe's last run; begin "
    "at step 0 if there is none. The plan may be another; without --plan it is the last one.",
)
@click.option(
    "--checkpoints",
    metavar="WHERE",
    help="Where they are kept: a directory, or a URL such as s3://bucket/prefix. Default: "
    "checkpoints/ in the run directory.",
)
@click.option(
    "--from",
    "begin_from",
    metavar="SOURCE",
    help="Begin with the weights of a checkpoint (of a run, the newest good one; a path or a URL), "
    "a safetensors or state_dict file, or a directory of Hugging Face or "
    "torch.distributed.checkpoint.",
)
@click.option(
    "--take",
    type=click.Choice(["weights", "everything"]),
    default="weights",
    show_default=True,
    help="With --from: everything is the optimizer, the step and the place in the data as well.",
)
@click.option(
    "--partial",
    is_flag=True,
    help="With --from: take what matches the model and list the rest, which is refused otherwise.",
)
@click.option(
    "--new-data",
    metavar="RUN",
    help="Train on the samples that the run in this directory, and those before it, have not seen; "
    "data may have grown at its end. Begins with the run's weights, unless --from says otherwise.",
)
@click.option(
    "--replay",
    type=float,
    metavar="SHARE",
    help="With --new-data: mix in old samples, 0.2 for one in five.",
)
@click.option(
    "--keep",
    metavar="RULE",
    help='Which checkpoints stay, as in "last=3 every=1000 best=loss" or "best=accuracy:max". '
    "Default: last=2, or what the run had before --resume.",
)
@click.option(
    "--anyway",
    is_flag=True,
    help="Start also if the plan cannot fit in this machine's memory, which is refused otherwise.",
)
@options.hosts
@click.option("--tensorboard", is_flag=True, help="The same as --track tensorboard.")
@click.option(
    "--track",
    metavar="TRACKERS",
    help="Also send the numbers of each step to trackers, separated by commas: tensorboard, csv, "
    "wandb[:PROJECT], mlflow[:URI], prometheus:[HOST:]PORT. --resume remembers them.",
)
@click.option(
    "--trace",
    metavar="STEPS",
    help="Write what every rank does in these steps, as in 100:110, both included, to "
    "trace/trace.json of the run directory, which Perfetto opens.",
)
@click.option("--quiet", is_flag=True, help="Show problems and how the run ended, nothing else.")
@click.option(
    "--log-level",
    type=click.Choice([*LEVELS]),
    default="info",
    show_default=True,
    help="What the logs of ranks hold, and the least that is shown: warning is --quiet, debug adds "
    "the seconds of each step to the logs.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
def train(
    recipe: str,
    settings: dict[str, str],
    run_dir: Path | None,
    as_json: bool,
    quiet: bool,
    **given: Any,
) -> None:
    """Train RECIPE, given as file.py:function or module:function.

    \b
    shoal train recipes/charlm.py:small
    shoal train recipes/charlm.py:small --plan data=2 --set layers=6 --set steps=50
    shoal train recipes/charlm.py:small --resume --plan "data=2 zero=1"
    shoal train recipes/charlm.py:small --plan auto

    The run goes on when a rank is killed: a warm spare takes its seat. Checkpoints are made every
    save_every steps (a field of the Run), at the end, and when the run is stopped. Ctrl-C once
    stops cleanly after a step and saves it, twice ends at once. With --resume the same command
    can be given again, whatever became of it before. Exit codes: 0 done, 1 the recipe's own error
    or an end that could not be saved, 2 usage, plan or input, 75 stopped after a checkpoint, 130
    and 143 ended by a signal without one.
    """
    options.refuse_unusable_process()
    from shoal.events.screen import Display
    from shoal.launch import train as launch
    from shoal.training.options import Recipe
    from shoal.world import launched_world

    asked = launch.Options(**given)
    display = Display(max(LEVELS[asked.log_level], LEVELS["warning"] if quiet else 0))
    if (world := launched_world()) is not None:
        from shoal.launch.rank import train_as_rank

        code = train_as_rank(
            Recipe.named(recipe, settings),
            asked,
            run_dir,
            world,
            watch=display,
            prepared=partial(display.introduce, recipe),
            show=partial(_show, display, as_json),
        )
        leave_at_once(code)
    outcome = launch.train(
        Recipe.named(recipe, settings),
        asked,
        run_dir,
        watch=display,
        prepared=partial(display.introduce, recipe),
    )
    sys.exit(_show(display, as_json, outcome))


def _show(display: "Display", as_json: bool, outcome: "Outcome") -> int:
    display.close()
    return print_outcome(outcome, as_json=as_json)
