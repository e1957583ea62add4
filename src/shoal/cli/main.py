"""The command line: one file per verb, loaded when the verb is used."""

import errno
import importlib
import signal
import sys
from contextlib import suppress

import click

from shoal import __version__
from shoal.cli.output import print_json, reason, tell, tell_failure
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
        "plan": "Rank all plans for a recipe by the time and memory predicted for them.",
        "scale": "Train on several numbers of ranks, and say where the time goes.",
        "simulate": "Say what becomes of a run over hours, with failures and stragglers.",
        "report": "Write a run, or several side by side, as one page.",
        "ui": "Show runs in a browser, live.",
        "top": "Show a run in this terminal, live.",
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
    "Jobs": {
        "submit": "Queue a training, to be run when there is room.",
        "status": "Show how a job or a run stands.",
        "queue": "List the jobs that run and wait.",
        "logs": "Print what a job or one of its ranks has printed.",
        "stop": "Let a job save itself and end.",
    },
    "Elsewhere": {
        "join": "Take part in a run that spans hosts, from another host.",
        "agent": "The same, as ssh and schedulers start it.",
        "warm": "Keep a warm process, so that the next commands start at once.",
    },
}
_VERBS = {verb: what for group in _GROUPS.values() for verb, what in group.items()}

_WARM = ("train", "tune", "run", "verify", "explain", "plan", "scale", "evaluate")

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
    """Run a command: 0 done, 1 the recipe's error, 2 usage, 128+n killed by signal n.

    With --json a command that fails without a result prints an object, too: why, and the code.
    """
    let_idle_threads_sleep()
    for number in stop_signals()[1:]:
        signal.signal(number, _leave)  # through every `with` and `finally`
    try:
        verbs.main(arguments, prog_name="shoal", standalone_mode=False)
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except click.ClickException as error:
        error.show()
        code, why = error.exit_code, error.format_message()
    except (click.Abort, KeyboardInterrupt):
        when = " before the run began" if arguments[:1] in (["train"], ["run"]) else ""
        code, why = 130, f"interrupted{when}."
        tell(f"shoal: {why}")
    except Exception as error:  # noqa: BLE001 (a recipe's own code may fail in any way)
        known = _in_a_sentence(error) if isinstance(error, OSError) else error
        code, why = tell_failure(known), reason(known)
    else:
        return 0
    if "--json" in arguments and arguments[0] != "run":  # whose arguments may be a script's
        with suppress(OSError):  # standard output may be what failed
            print_json({"error": why}, code)
    return code


def _in_a_sentence(error: OSError) -> Exception:
    """What a disk or a directory refused; any other error of the system as it is."""
    if error.errno not in _OF_THE_MACHINE:
        return error
    named = f": {error.filename}" if error.filename is not None else ""
    return ShoalError(f"{error.strerror}{named}. The command ended there.")


def _leave(number: int, frame: object) -> None:
    raise Ended(128 + number)
