"""What verbs print: JSON, and texts with names from files."""

import math
import os
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NoReturn

import click
import msgspec

from shoal.errors import RecipeError, ShoalError, UsageError
from shoal.storage.decoding import encode_json
from shoal.system.streams import steady
from shoal.system.traces import user_traceback

as_json = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object instead of words."
)


def in_json(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no word for it
    return msgspec.json.encode(value).decode()


def print_json(value: Any, exit_code: int = 0) -> None:
    """One JSON object with the exit code; numbers that are not finite become null."""
    fields: dict[str, Any] = msgspec.to_builtins(value)
    click.echo(encode_json({**fields, "exit_code": exit_code}).decode())


def say(text: str, is_error: bool = False) -> None:
    """Print a text that may hold names from a file: none of them may steer the terminal."""
    shown = (c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    with steady() if is_error else nullcontext():
        click.echo("".join(shown), err=is_error)


def tell(text: str) -> None:
    """Print words for people, to standard error."""
    with steady():
        click.echo(text, err=True)


def write_picture(path: Path, picture: str) -> None:
    """Write what --svg asks for."""
    try:
        path.write_text(picture, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"The picture cannot be written to {path}: {error.strerror}. "
            "Choose another file with --svg FILE."
        ) from error


def leave_at_once(code: int) -> NoReturn:
    """End this process without Python's own end, which takes long with torch, and in which threads
    of torch may abort it."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def tell_failure(error: Exception) -> int:
    """Say why a command failed, after where the recipe's own code did; the exit code it means."""
    if not isinstance(error, ShoalError):
        tell(user_traceback(error))
    elif error.trace:
        tell(error.trace)
    elif isinstance(error, RecipeError) and error.__cause__ is not None:
        tell(user_traceback(error.__cause__))
    say(f"shoal: {reason(error)}", is_error=True)
    return error.exit_code if isinstance(error, ShoalError) else 1


def reason(error: Exception) -> str:
    """Why a command failed, in words: with the kind of an error that is not Shoal's."""
    return str(error) if isinstance(error, ShoalError) else f"{type(error).__name__}: {error}"
