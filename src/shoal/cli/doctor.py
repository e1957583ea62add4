"""`shoal doctor`: the checks of `shoal.doctor` as a table, or as one JSON object."""

from pathlib import Path

import click

from shoal.cli.output import print_json
from shoal.doctor.doctor import Finding, examine

_STYLES = {"ok": "green", "note": "yellow", "problem": "red"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@click.option("--quick", is_flag=True, help="Leave out what takes seconds to measure.")
def doctor(as_json: bool, quick: bool) -> None:
    """Show what this machine offers, what is wrong with it, and the way out.

    Ends with exit code 1 if there is a problem that stops or breaks a run.
    """
    checks: list[Finding] = []
    if as_json:
        checks += examine(Path("runs"), quick)
        print_json({"verdict": worst(checks), "checks": checks}, _code(checks))
    else:
        _show(checks, quick)
    raise SystemExit(_code(checks))


def _code(checks: list[Finding]) -> int:
    return int(worst(checks) == "problem")


def worst(checks: list[Finding]) -> str:
    return max((check.verdict for check in checks), key=list(_STYLES).index, default="ok")


def _show(checks: list[Finding], quick: bool) -> None:
    """Fill `checks` while a line says what is going on, then draw them."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    with console.status("Looking at this machine ...") as status:
        for check in examine(Path("runs"), quick):
            checks.append(check)
            status.update(f"Looking at this machine ... {check.name}: {check.verdict}")
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        # Text, not markup: a value may hold brackets.
        value = Text(check.value)
        if check.advice:
            value.append(f"\n{check.advice}", style="italic")
        table.add_row(Text(check.verdict, style=_STYLES[check.verdict]), Text(check.name), value)
    console.print(table)
    num_problems = sum(check.verdict == "problem" for check in checks)
    console.print(f"{num_problems} problems." if num_problems else "No problems.")
