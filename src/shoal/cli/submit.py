"""`shoal submit`: hand a training to an engine, which runs it when there is room."""

from pathlib import Path
from typing import Any

import click

from shoal.cli import options
from shoal.cli.output import print_json, say
from shoal.cli.train import train

# Options of `shoal train` that a job has its own of.
_OWN = ("recipe", "on", "nodes", "run_dir", "resume", "as_json")


def _for_train() -> list[click.Parameter]:
    return [parameter for parameter in train.params if parameter.name not in _OWN]


def words_for_train(context: click.Context) -> list[str]:
    """The options of `shoal train` that were given, as they were given."""
    words: list[str] = []
    for parameter in _for_train():
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE":
            continue
        option, value = parameter.opts[0], context.params[name]
        if name == "settings":
            words += [word for item in value.items() for word in (option, "=".join(item))]
        elif isinstance(parameter, click.Option) and parameter.is_flag:
            words.append(option if value else parameter.secondary_opts[0])
        else:
            values = value if parameter.multiple else [value]
            words += [word for one in values for word in (option, str(one))]
    return words


def _time(context: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
    from shoal.launch.submit import read_time

    return None if text is None else read_time(text)


@click.command(epilog=options.plan_help())
@click.argument("recipe")
@click.option(
    "--on",
    default="local",
    show_default=True,
    metavar="ENGINE",
    help="What queues and starts it: `local`, the queue of this machine; `slurm`, `kubernetes`, "
    "`ray`. Options of theirs follow a colon, as in slurm:partition=gpu,account=lab.",
)
@click.option(
    "--nodes",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="How many hosts it gets.",
)
@click.option(
    "--cores",
    type=click.IntRange(min=1),
    help="Cores of each host. Default: one a rank of the plan, and all for data=auto.",
)
@click.option(
    "--time",
    "time_limit_s",
    metavar="TIME",
    callback=_time,
    help="How long it may run: 90s, 30m, 2h or H:MM:SS. Then it saves and stops.",
)
@click.option("--priority", type=int, default=0, show_default=True, help="A larger one goes first.")
@click.option("--dry-run", is_flag=True, help="Print what would be submitted, and do nothing.")
@options.run_dir
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
@click.pass_context
def submit(
    context: click.Context,
    /,
    recipe: str,
    run_dir: Path | None,
    dry_run: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Queue the training of RECIPE, given as file.py:function or module:function.

    \b
    shoal submit recipes/charlm.py:small --plan data=2
    shoal submit recipes/charlm.py:small --plan data=2 --time 2h --priority 5
    shoal status local:1

    Takes all options of `shoal train`, but for --resume: a job always goes on with what its run
    directory holds. On `local`, the first job starts an agent, which ends with the last one; jobs
    wait until all cores that they need are free. One with a higher priority asks runs of a lower
    one to shrink, as `shoal resize` does; they grow back. Exit codes: 0 accepted, 2 refused.
    """
    options.refuse_unusable_process()
    from shoal.launch.submit import SubmitOptions, describe_job, submit_job
    from shoal.training.options import StartOptions, check_settings, check_start

    check_start(StartOptions(**{n: given[n] for n in StartOptions.__struct_fields__ if n in given}))
    check_settings(given["settings"])
    how = SubmitOptions(**{name: given[name] for name in SubmitOptions.__struct_fields__})
    asked = (recipe, words_for_train(context), given["plan"], run_dir, how)
    if dry_run:
        text = describe_job(*asked)
        if as_json:
            print_json({"job": None, "run_dir": None, "state": None, "would_submit": text})
        else:
            click.echo(text)
        return
    state = submit_job(*asked)
    say(f"shoal: {state.job} is {state.state}, in {state.run_dir}", is_error=True)
    if as_json:
        print_json({"job": state.job, "run_dir": state.run_dir, "state": state.state})
    else:
        click.echo(state.job)


_known = {parameter.name for parameter in submit.params}
submit.params += [parameter for parameter in _for_train() if parameter.name not in _known]
