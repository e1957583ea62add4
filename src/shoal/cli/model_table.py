"""What verbs that make a model smaller share: options of their training, and one table."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from shoal.cli.output import print_json, say, tell
from shoal.errors import ShoalError

if TYPE_CHECKING:
    from shoal.slim.figures import ModelTable
    from shoal.slim.retraining import Training

out = click.option("--out", required=True, metavar="PATH", help="What to write; it must not exist.")
begin_from = click.option(
    "--from",
    "begin_from",
    required=True,
    metavar="CHECKPOINT",
    help="The weights: a run directory, a checkpoint or an export.",
)
resume = click.option(
    "--resume", is_flag=True, help="Go on with the training of --run-dir where it was stopped."
)


def training_of(plan: str | None, run_dir: Path | None, resume: bool) -> "Training | None":
    """How to train, if anything was said of it."""
    from shoal.slim.retraining import Training

    said = plan is not None or run_dir is not None or resume
    return Training(plan=plan, run_dir=run_dir, resume=resume) if said else None


@contextmanager
def showing_traces() -> Iterator[None]:
    """Around a verb that runs a recipe: an error's traceback of a rank is shown before it."""
    try:
        yield
    except ShoalError as error:
        for note in getattr(error, "__notes__", ()):
            tell(note)
        raise


def print_table(result: "ModelTable", more: dict[str, Any], *, as_json: bool) -> None:
    """One JSON object, or a table and a few words."""
    if as_json:
        print_json({**msgspec.to_builtins(result), "exit_code": 0})
        return
    say(result.in_words())
    for name, value in more.items():
        if value:
            say(f"{name}: {value}")


def some(names: list[str]) -> str:
    """A few names of many."""
    shown = ", ".join(names[:8])
    return f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown
