"""Tables, amounts and JSON for a terminal. Needs no torch, so that any verb can use it."""

import math
from collections.abc import Sequence
from typing import Any

import click
import msgspec


def in_units(num_bytes: float) -> str:
    """Bytes for people: three digits and a unit."""
    amount, unit = float(num_bytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if amount < 999.5 or unit == "TB":
            break
        amount /= 1000
    return f"{num_bytes:.0f} B" if unit == "B" else f"{amount:.3g} {unit}"


def table(rows: Sequence[Sequence[str]], numbers: Sequence[int]) -> str:
    """Columns as wide as their longest entry, those of `numbers` to the right; the first a head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if i in numbers else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def in_json(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no word for it
    return msgspec.json.encode(value).decode()


def print_json(value: Any) -> None:
    """One JSON object; numbers that are not finite become null."""
    click.echo(msgspec.json.encode(value).decode())


def say(text: str, is_error: bool = False) -> None:
    """Print a text that may hold names from a file: none of them may steer the terminal."""
    shown = (c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    click.echo("".join(shown), err=is_error)
