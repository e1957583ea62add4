"""The command line: one file per verb, loaded when the verb is used."""

import errno
import importlib
import signal
import sys

import click

from shoal import __version__
from shoal.cli.output import say, tell
from shoal.errors import Ended, ShoalError, nearest
from shoal.system.processes import let_idle_threads_sleep, stop_signals
from shoal.world import launched_world

_GROUPS = {
    "Train": {
        "train": "Train a recipe under a plan.",
        "run": "Run a script of your own on several ranks.",
        "tune": "Search the settings of a recipe, several trials side by side.",
        "resize": "Give a run more or fewer ranks and servers while it trains.",
    },
    "Understand": {
        "verify": "Prove that a plan trains what one process would.",
        "explain": "Say what a plan does to a model, without starting a rank.",
        "doctor": "Show what this machine offers and what is wrong with it.",
    },
    "The model": {
        "evaluate": "Measure trained weights, on the ranks of a plan.",
        "predict": "Write a trained model's answers to a file.",
        "generate": "Let a trained language model write text.",
        "checkpoint": "List, check and compare checkpoints; convert, export and import them.",
        "distill": "Train a model with a larger one as its teacher.",
        "fuse": "Make one model of several, by their weights or their answers.",
        "prune": "Zero the weights that matter least, or remove channels.",
        "quantize": "Make weights whole numbers of 8 or 4 bits.",
        "pack": "Pack a checkpoint into one smaller file, without a loss.",
    },
    "Data": {
        "data": "Build, show and check data.",
    },
    "Elsewhere": {
        "join": "Take part in a run that spans hosts, from another host.",
        "warm": "Keep a warm process, so that the next commands start at once.",
    },
}
_VERBS = {verb: what for group in _GROUPS.values() for verb, what in group.items()}

_WARM = ("train", "tune", "run", "verify", "explain", "evaluate")

# Of a disk or a directory: a traceback says no more.
_OF_THE_MACHINE = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.ENAMETOOLONG),
    *(errno.EACCES, errno.EPERM, errno.ENOENT, errno.EPIPE, errno.EMFILE, errno.ENFILE),
}


class Verbs(click.Group):
    """Loads the module of a verb only when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        module = importlib.import_module(f"shoal.cli.{cmd_name}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _VERBS and not args[0].startswith("-"):
            raise click.UsageError(f"There is no verb {args[0]!r}. {nearest(args[0], _VERBS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, group in _GROUPS.items():
            with formatter.section(title):
                formatter.write_dl(list(group.items()))


@click.command(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="shoal %(version)s")
def verbs() -> None:
    """Train any PyTorch model on many processes and machines.

    A recipe says what is trained; a plan, one line of text, says how the work is spread.
    `shoal VERB --help` explains each verb.
    """


def main() -> None:
    """Run the command of this process's arguments, in the warm process if there is one."""
    arguments = sys.argv[1:]
    is_warm = arguments and arguments[0] in _WARM and not {"-h", "--help"} & set(arguments)
    if is_warm and not (arguments[0] in ("train", "run") and _is_launched()):
        from shoal.cluster.warm import run_warm

        code = run_warm(arguments)
        if code is not None:
            sys.exit(code)
    sys.exit(run_here(arguments))


def _is_launched() -> bool:
    """Whether a launcher started several of this command: each is a rank then, in this process."""
    try:
        return launched_world() is not None
    except ShoalError:  # the verb says what is wrong
        return True


def run_here(arguments: list[str]) -> int:
    """Run a command: 0 done, 1 the recipe's error, 2 usage, 128+n killed by signal n."""
    let_idle_threads_sleep()
    for number in stop_signals()[1:]:
        signal.signal(number, _leave)  # through every `with` and `finally`
    try:
        verbs.main(arguments, prog_name="shoal", standalone_mode=False)
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        when = " before the run began" if arguments[:1] in (["train"], ["run"]) else ""
        tell(f"shoal: interrupted{when}.")
        return 130
    except ShoalError as error:
        say(f"shoal: {error}", is_error=True)
        return error.exit_code
    except OSError as error:
        if error.errno not in _OF_THE_MACHINE:
            raise
        named = f": {error.filename}" if error.filename is not None else ""
        say(f"shoal: {error.strerror}{named}. The command ended there.", is_error=True)
        return 1
    return 0


def _leave(number: int, frame: object) -> None:
    raise Ended(128 + number)
