"""Tables and amounts for people to read, and amounts that people write."""

import re
from collections.abc import Sequence

from shoal.errors import UsageError

_UNITS = ("", "K", "M", "G", "T")
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(I?))?B?", re.ASCII | re.IGNORECASE)


def in_units(num_bytes: float) -> str:
    """Bytes for people: three digits and a unit."""
    amount, unit = float(num_bytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if amount < 999.5 or unit == "TB":
            break
        amount /= 1000
    return f"{num_bytes:.0f} B" if unit == "B" else f"{amount:.3g} {unit}"


def in_seconds(seconds: float) -> str:
    """A time for people: three digits and a unit."""
    for scale, unit in ((3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms")):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def num_parameters(count: int) -> str:
    """The size of a model for people: exact below a million."""
    return f"{count / 1e6:.1f} M parameters" if count >= 1e6 else f"{count:,} parameters"


def plural(count: int, word: str, words: str = "") -> str:
    """A count of things; `words` is what many are called, if not `word` with an s."""
    return f"{count} {word if count == 1 else words or word + 's'}"


def first_names(names: Sequence[str], most: int) -> str:
    """The first names of a list, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def num_bytes_of(amount: str | int, name: str) -> int:
    """An amount such as 512MB, 1.5 GB, 2GiB or a number of bytes; `name` is who asks for it."""
    if isinstance(amount, str):
        found = _AMOUNT.fullmatch(amount.strip())
        number, unit, is_binary = found.groups() if found else ("0", "", "")
        scale = (1024 if is_binary else 1000) ** _UNITS.index((unit or "").upper())
        num_bytes = int(float(number) * scale)
    else:
        num_bytes = amount if type(amount) is int else 0
    if num_bytes < 1:
        raise UsageError(f"{name}={amount!r} is no amount. Write 512MB, 4GB or a number of bytes.")
    return num_bytes


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


def name_ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
