"""Options that several verbs share, and what they mean."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from shoal.errors import UsageError
from shoal.plans.plan import Plan, describe_keys

Command = TypeVar("Command", bound=Callable[..., Any])


def plan_help() -> str:
    rows = "\n".join(f"  {key:<13}{values}: {meaning}" for key, values, meaning in describe_keys())
    return f"\b\nThe keys of a plan, key=value, separated by spaces or commas:\n{rows}"


def read_settings(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, str]:
    settings = {}
    for text in values:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{text!r} is not name=value.")
        if name in settings:
            raise click.BadParameter(f"{name} is set twice.")
        settings[name] = value
    return settings


plan = click.option("--plan", metavar="PLAN", help="How the work is spread; keys below.")
plan_or_auto = click.option(
    "--plan",
    metavar="PLAN|auto",
    help="How the work is spread; keys below. auto: the fastest on this machine of those that "
    "train the same, by `shoal plan`; a run that is resumed keeps its own.",
)
settings = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    callback=read_settings,
    help="Set a parameter of the recipe, or else a field of its Run. May be repeated.",
)
ranks = click.option(
    "--ranks", type=click.IntRange(min=1), help="Number of ranks; the plan must fit it."
)
from_weights = click.option(
    "--from",
    "begin_from",
    required=True,
    metavar="SOURCE",
    help="The weights: of a run (its newest good checkpoint), a checkpoint, a safetensors or "
    "state_dict file, or a directory of Hugging Face or torch.distributed.checkpoint; checkpoints "
    "may be at a URL.",
)
on_data = click.option(
    "--on-data",
    type=click.Choice(["evaluate", "train"]),
    default="evaluate",
    show_default=True,
    help="Which samples of the recipe: those it evaluates on, or those it trains on.",
)
run_dir_for_logs = click.option(
    "--run-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep the logs of the ranks in a new directory. Default: they are not kept.",
)
run_dir = click.option(
    "--run-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where the run keeps its files. Default: runs/<recipe>-<n>.",
)
spares = click.option(
    "--spares",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="Warm processes that wait to take the seat of a lost rank.",
)
form_timeout = click.option(
    "--form-timeout",
    "form_timeout_s",
    type=click.FloatRange(min=0.1),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for a rank that does not come; one that comes and is not done is named.",
)
heartbeat_timeout = click.option(
    "--heartbeat-timeout",
    "heartbeat_timeout_s",
    type=click.FloatRange(min=0.5),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="A rank that is silent for longer is killed and replaced.",
)
stop_timeout = click.option(
    "--stop-timeout",
    "stop_timeout_s",
    type=click.FloatRange(min=0.1),
    metavar="SECONDS",
    help="When asked to stop: end ranks that get nothing done for so long. Default: 60, or twice "
    "the longest pause of the run, if that is more.",
)


_HOSTS = (
    click.option(
        "--nodes",
        type=click.IntRange(min=1),
        help="How many hosts the run has, where --on or --listen does not say.",
    ),
    click.option(
        "--listen",
        metavar="ADDRESS",
        help="The IP address of this machine at which other hosts reach it. With --nodes N alone, "
        "wait there for N - 1 others, which come by `shoal join RUN`.",
    ),
    click.option(
        "--join-timeout",
        "join_timeout_s",
        type=click.FloatRange(min=0.1),
        metavar="SECONDS",
        help="How long to wait for hosts. Default: 600.",
    ),
    click.option(
        "--slots",
        type=click.IntRange(min=1),
        help="How many ranks each host takes. Default: its cores.",
    ),
    click.option(
        "--include",
        multiple=True,
        metavar="PATH",
        help="A file or directory that travels to the hosts with the recipe and the modules beside "
        "it. May be repeated.",
    ),
    click.option("--python", metavar="PATH", help="The Python of the other hosts, for ssh."),
    click.option(
        "--trust-network",
        is_flag=True,
        help="Let gradients cross hosts in clear text, by Gloo: nobody else listens there. "
        "SHOAL_TRUST_NETWORK=1 says it for good.",
    ),
)


def hosts(command: Command) -> Command:
    """The options of a run on several hosts."""
    for option in reversed(_HOSTS):
        command = option(command)
    return command


def refuse_unusable_process() -> None:
    """Refuse to start without standard output, where results go, or in a directory that is gone."""
    try:
        Path.cwd()
    except OSError as error:
        raise UsageError(
            f"The working directory is gone: {error.strerror}. Enter another."
        ) from error
    for name, stream in (("output", sys.stdout), ("error", sys.stderr)):
        if stream is None or stream.closed:
            raise UsageError(f"Standard {name} is closed. Send it to a file or to /dev/null.")


def check_plan(text: str | None) -> None:
    """Refuse what is wrong with a plan by itself, before anything is made."""
    if text is not None:
        Plan.parse(text)
