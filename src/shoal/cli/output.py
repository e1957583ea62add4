"""What verbs print: JSON, and texts with names from files."""

import errno
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import click
import msgspec

from shoal.storage.decoding import in_utf8

as_json = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object instead of words."
)


def in_json(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no word for it
    return msgspec.json.encode(value).decode()


def print_json(value: Any) -> None:
    """One JSON object; numbers that are not finite become null."""
    click.echo(in_utf8(value).decode())


def say(text: str, is_error: bool = False) -> None:
    """Print a text that may hold names from a file: none of them may steer the terminal."""
    shown = (c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    with steady() if is_error else nullcontext():
        click.echo("".join(shown), err=is_error)


def tell(text: str) -> None:
    """Print words for people, to standard error."""
    with steady():
        click.echo(text, err=True)


_GONE = (errno.EPIPE, errno.EIO, errno.ENXIO)


@contextmanager
def steady(descriptor: int = 2) -> Iterator[None]:
    """Around what is written to a screen: one that is gone, or is a file on a full disk, ends no
    run. What would be written to one that is gone later goes nowhere."""
    try:
        yield
    except OSError as error:
        if error.errno in _GONE:
            silence(descriptor)


def silence(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
