"""Tables and amounts for people to read."""

from collections.abc import Sequence


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
