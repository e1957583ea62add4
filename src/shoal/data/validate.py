"""Checks of the arguments of readers and transforms: the right type, or a UsageError that says so.

Without these checks a number in the place of a path, or a text in that of a function, would fail
far below, or with the first sample, in the words of another library; or not at all, rounded off.
"""

import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.errors import UsageError


def path_of(given: Any, what: str) -> str:
    """A path or URL as text; `what` says in a message where it was given."""
    if isinstance(given, str | os.PathLike):
        text = os.fspath(given)
        if isinstance(text, str) and "\0" not in text:
            return text
    raise UsageError(
        f"{what} was given {_shown(given)} where it needs a path. A path is text or a pathlib.Path."
    )


def text_of(given: Any, what: str) -> str:
    if isinstance(given, str) and given:
        return given
    raise UsageError(f"{what} was given {_shown(given)} where it needs a text.")


def require_function(given: Any, what: str) -> None:
    if not callable(given):
        raise UsageError(
            f"{what} was given {_shown(given)} where it needs a function. Give the function itself."
        )


def require_whole(given: Any, what: str) -> None:
    if isinstance(given, bool) or not isinstance(given, int | np.integer):
        raise UsageError(f"{what} was given {_shown(given)} where it needs a whole number.")


def options_of(given: Any) -> Mapping[str, Any]:
    """What goes to the back end of a URL."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return given
    raise UsageError(f"options= was given {_shown(given)} where it needs a dict.")


def texts_of(given: Any, what: str) -> list[str]:
    found: list[Any] = (
        [None] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    )
    if not all(isinstance(part, str) for part in found):
        raise UsageError(f"{what} was given {_shown(given)} where it needs a list of texts.")
    return found


def numbers_of(given: Any, what: str, are_whole: bool = False) -> NDArray[Any]:
    """A row of numbers as an array."""
    try:
        found = np.asarray(given)
    except (TypeError, ValueError):
        found = np.asarray(None)
    if found.ndim != 1 or (found.size and found.dtype.kind not in ("iu" if are_whole else "iuf")):
        kind = "whole numbers" if are_whole else "numbers"
        raise UsageError(f"{what} was given {_shown(given)} where it needs a list of {kind}.")
    return found


def _shown(given: Any) -> str:
    text = repr(given)
    return f"the {type(given).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
