"""The command line: one file per verb, loaded when the verb is used."""

import importlib
import sys

import click

from shoal import __version__
from shoal.errors import ShoalError

_VERBS = {
    "train": "Train a recipe under a plan.",
    "run": "Run a script of your own on several ranks.",
    "verify": "Prove that a plan trains what one process would.",
    "doctor": "Show what this machine offers and what is wrong with it.",
    "warm": "Keep a warm process, so that the next commands start at once.",
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
        from shoal.errors import nearest

        if args and args[0] not in _VERBS and not args[0].startswith("-"):
            raise click.UsageError(f"There is no verb {args[0]!r}. {nearest(args[0], _VERBS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(_VERBS.items()))


@click.command(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="shoal %(version)s")
def group() -> None:
    """Train any PyTorch model on many processes and machines.

    A recipe says what is trained; a plan, one line of text, says how the work is spread.
    `shoal VERB --help` explains each verb.
    """


def main(arguments: list[str] | None = None) -> None:
    """Run a command and exit: 0 done, 1 the recipe's error, 2 usage, 128+n killed by signal n."""
    try:
        group.main(arguments, prog_name="shoal", standalone_mode=False)
    except click.UsageError as error:
        error.show()
        sys.exit(2)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
    except ShoalError as error:
        if error.__cause__ is not None and error.exit_code == 1:
            import traceback

            traceback.print_exception(error.__cause__)
        click.echo(f"shoal: {error}", err=True)
        sys.exit(error.exit_code)
