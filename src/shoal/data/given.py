"""What readers and transforms are handed: of the kind that they need, or a sentence that says so.

A number in the place of a path, or a text in that of a function, would else be found out far below,
or when the first sample is loaded, in the words of another library.
"""

import os
from typing import Any

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


def _shown(given: Any) -> str:
    text = repr(given)
    return f"the {type(given).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
