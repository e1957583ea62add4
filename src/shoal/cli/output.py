"""What verbs print: JSON, and texts with names from files."""

import math
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NoReturn

import click
import msgspec

from shoal.errors import RecipeError
from shoal.storage.decoding import encode_json
from shoal.system.streams import steady

as_json = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object instead of words."
)


def in_json(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no word for it
    return msgspec.json.encode(value).decode()


def print_json(value: Any) -> None:
    """One JSON object; numbers that are not finite become null."""
    click.echo(encode_json(value).decode())


def say(text: str, is_error: bool = False) -> None:
    """Print a text that may hold names from a file: none of them may steer the terminal."""
    shown = (c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    with steady() if is_error else nullcontext():
        click.echo("".join(shown), err=is_error)


@contextmanager
def showing_traceback() -> Iterator[None]:
    """Print where a recipe's own code failed, before what is made of it is said."""
    try:
        yield
    except RecipeError as error:
        if error.__cause__ is not None:
            cause = error.__cause__
            tell("".join(traceback.format_exception(type(cause), cause, cause.__traceback__)))
        raise


def tell(text: str) -> None:
    """Print words for people, to standard error."""
    with steady():
        click.echo(text, err=True)


def leave_at_once(code: int) -> NoReturn:
    """End this process without Python's own end, which takes long with torch, and in which threads
    of torch may abort it."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def tell_failure(error: Any) -> int:
    """Say why a recipe could not be prepared or a run failed; the exit code that this means."""
    if error.trace:
        tell(error.trace)
    say(f"shoal: {error}", is_error=True)
    return int(error.exit_code)
