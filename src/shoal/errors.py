"""Every error Shoal raises on purpose.

A message says what happened with its values, the rule that was broken, and the way out.
`exit_code` is what the command line returns for it; anything that is not a `ShoalError` is a
defect of ours or the recipe's own.
"""

import importlib
from collections.abc import Iterable
from difflib import get_close_matches
from types import ModuleType
from typing import Any, TypeVar

E = TypeVar("E", bound=BaseException)

RUN_AGAIN = 75  # exit code: stopped after a checkpoint, to be gone on from


class ShoalError(Exception):
    """The root of the tree."""

    exit_code = 1
    trace = ""  # of the process in which it happened, as text
    shows_cause = True  # whether the traceback of what caused it helps: not of a server's absence
    outcome: Any = None  # the Outcome of the run that `shoal.train` was asked for, if it began


class UsageError(ShoalError):
    """The command line, the recipe or another input is wrong. Raised before a process starts."""

    exit_code = 2


class PlanError(UsageError):
    """The plan cannot work, alone or with this run or this machine."""


class BadCheckpoint(UsageError):
    """A checkpoint is not whole, not sound, or not what it says it is."""


class UnusableCheckpoint(BadCheckpoint):
    """A checkpoint is refused, but not known to be damaged: it cannot be read now, is not signed
    with this key, or is of another model."""


class RecipeError(ShoalError):
    """The recipe's own code failed, or what it computes cannot be trained on."""


class NotFinite(RecipeError):
    """A loss or a gradient is not finite and no smaller loss scale can cure it.

    All ranks find it at once; `ranks` are those that computed it, empty if that is who raises it.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()):
        super().__init__(message)
        self.ranks = ranks


class AllWorkersLost(ShoalError):
    """No rank is left that holds the state after `step`."""

    def __init__(self, message: str, step: int):
        super().__init__(message)
        self.step = step


class GroupLost(ShoalError):
    """A collective could not finish because a member of the group is gone.

    Raised wherever it shows (forward, backward, exchange, evaluation) and handled in one place, the
    trainer's `regroup`.
    """


class TookTooLong(GroupLost):
    """An exchange did not end by its deadline, and no member is known to be gone."""


class AgreementLost(GroupLost):
    """This rank has made its step; what all do after it failed, and is to be done again."""


class GroupLeft(GroupLost):
    """All left the group together, for one of another size."""


class FailedElsewhere(ShoalError):
    """Another rank failed in what all had to do, and says why."""


class FormError(ShoalError):
    """A group could not form before its deadline; the message names the ranks that did not come."""


class Ended(SystemExit):
    """A signal asked this process to end. It passes through everything, as Ctrl-C does."""


class StopNow(ShoalError):
    """This process was asked to leave without finishing its step."""


def found_in(error: BaseException, kind: type[E]) -> E | None:
    """The first of a kind among an error and those that it was raised for: a model's own code may
    wrap whatever passes through it."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        if isinstance(at, kind):
            return at
        seen.add(id(at))
        at = at.__cause__ or at.__context__
    return None


def nearest(name: str, known: Iterable[str]) -> str:
    """A sentence that helps with a misspelt `name`: the nearest known one, else all of them."""
    names = sorted(known)
    close = get_close_matches(name, names, n=1)
    if close:
        return f"Did you mean {close[0]!r}?"
    return f"Known: {', '.join(names)}."


def sendable(text: str) -> str:
    """The words of an error without what UTF-8 has no bytes for, as names of files may hold."""
    return text.encode("utf-8", "backslashreplace").decode()


def require(module: str, extra: str) -> ModuleType:
    """Import `module`, or say which extra brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            f"{module} is not installed, and this needs it. Install it with: "
            f"pip install 'shoal-ml[{extra}]'"
        ) from error
