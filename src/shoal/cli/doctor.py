"""`shoal doctor`: the checks of `shoal.doctor` as a table, or as one JSON object."""

from pathlib import Path

import click

from shoal.cli.output import print_json, say
from shoal.doctor.doctor import Finding, examine
from shoal.errors import UsageError

_STYLES = {"ok": "green", "note": "yellow", "problem": "red"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@click.option("--quick", is_flag=True, help="Leave out what takes seconds to measure.")
@click.option(
    "--save",
    type=click.Path(path_type=Path),
    help="Measure this machine as a cluster of one host, and write it to a TOML file.",
)
def doctor(as_json: bool, quick: bool, save: Path | None) -> None:
    """Show what this machine offers, what is wrong with it, and the way out.

    With --save, what plans are judged by is measured and written instead: cores, memory, the speed
    of a core, the link between ranks. Ends with exit code 1 if there is a problem that stops or
    breaks a run.
    """
    if save is not None:
        if quick:
            raise UsageError("--quick leaves out what --save measures. Leave one of them out.")
        _save(save, as_json)
        return
    checks: list[Finding] = []
    if as_json:
        checks += examine(Path("runs"), quick)
        print_json({"verdict": worst(checks), "checks": checks}, _code(checks))
    else:
        _show(checks, quick)
    raise SystemExit(_code(checks))


def _save(path: Path, as_json: bool) -> None:
    from shoal.cost.cluster import format_cluster, refuse_existing, write_cluster
    from shoal.cost.this_machine import keep_cluster, measure_cluster

    refuse_existing(path)
    cluster = measure_cluster()
    write_cluster(cluster, path)
    keep_cluster(cluster)
    if as_json:
        print_json({"out": str(path), "cluster": cluster}, 0)
    else:
        say(format_cluster(cluster) + f"Written to {path}.")


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
