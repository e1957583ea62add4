"""`shoal top`: a run in this terminal, live."""

from pathlib import Path

import click

from shoal.errors import UsageError


@click.command()
@click.argument("run", required=False, type=click.Path(path_type=Path))
def top(run: Path | None) -> None:
    """Show the run in directory RUN while it goes on: members, step, loss, strips, incidents.

    \b
    shoal top
    shoal top runs/charlm-small-1

    Without RUN it is the newest below runs/. It ends with the run, or by Ctrl-C, which leaves the
    run alone. Without a terminal it prints what is there once. Exit codes: 0 shown, 2 there is no
    such run.
    """
    from contextlib import suppress

    from rich.console import Console

    from shoal.storage.run_dir import RUN
    from shoal.ui.top import watch

    chosen = run or _newest()
    if not (chosen / RUN).exists():
        what = "holds no run" if chosen.is_dir() else "is no directory"
        raise UsageError(f"{chosen} {what}. Give the directory of one, as in runs/name-1.")
    with suppress(KeyboardInterrupt):
        watch(chosen, Console(highlight=False))


def _newest() -> Path:
    from shoal.ui.listing import RunDirectory

    found = RunDirectory(Path("runs")).list_all().runs if Path("runs").is_dir() else []
    if not found:
        raise UsageError("There is no run below runs/. Give the directory of one.")
    return Path("runs") / next((row.id for row in found if row.state == "running"), found[0].id)
