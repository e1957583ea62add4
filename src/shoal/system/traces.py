"""The traceback of an error in a user's code: his line first, and without the frames of Shoal.

A forward that fails has dozens of frames above it, and hardly one of them is the user's. Those of
Shoal and of the call of a module are left out here; the log of the rank has them all.
"""

import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

from shoal.errors import ShoalError

_PACKAGE = f"{Path(__file__).parents[1]}/"
_LIBRARIES = sysconfig.get_path("stdlib")
_CALLS = ("_call_impl", "_wrapped_call_impl")  # of nn.Module, around every forward


def user_traceback(error: BaseException) -> str:
    """The traceback of an error and its causes, as text. An error that no code but Shoal's and that
    of libraries had a part in keeps its frames, unless it was in the forward of a model."""
    found = traceback.TracebackException.from_exception(error, compact=True)
    every = list(_chained(found))
    first = next(filter(None, map(_own_line, _chained(_without_ours(error, found)))), "")
    frames = [frame for one in every for frame in one.stack]
    in_forward = any(map(_is_call, frames))  # of layers that are all of a library, say
    if first or in_forward or not all(one.stack for one in every):  # or it came as text
        for one in every:
            one.stack[:] = _shown(one.stack)
    return f"{first}{''.join(found.format())}"


def _chained(
    found: traceback.TracebackException | None,
) -> Iterator[traceback.TracebackException]:
    """The error and what it was raised for, as far as it is shown."""
    while found is not None:
        yield found
        for inner in found.exceptions or ():
            yield from _chained(inner)
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)


def _without_ours(
    error: BaseException, found: traceback.TracebackException
) -> traceback.TracebackException:
    """What an error of Shoal was raised for, if it was for another one."""
    while isinstance(error, ShoalError) and error.__cause__ is not None and found.__cause__:
        error, found = error.__cause__, found.__cause__
    return found


def _own_line(found: traceback.TracebackException) -> str:
    """The innermost line of the user's own code, with its place; empty if there is none."""
    for frame in reversed(found.stack):
        if not _is_of_a_library(frame):
            line = f": {frame.line}" if frame.line else ""
            return f"{frame.filename}:{frame.lineno}, in {frame.name}{line}\n"
    return ""


def _shown(frames: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """From the user's first line on: what of a library is above it only leads there."""
    kept = [frame for frame in frames if not _is_hidden(frame)]
    first = next((n for n, frame in enumerate(kept) if not _is_of_a_library(frame)), 0)
    return kept[first:]


def _is_hidden(frame: traceback.FrameSummary) -> bool:
    return _is_call(frame) or frame.filename.startswith((_PACKAGE, "<frozen"))


def _is_call(frame: traceback.FrameSummary) -> bool:
    return frame.name in _CALLS and frame.filename.endswith("/torch/nn/modules/module.py")


def _is_of_a_library(frame: traceback.FrameSummary) -> bool:
    name = frame.filename
    return "-packages/" in name or name.startswith((_PACKAGE, _LIBRARIES, "<frozen"))
