"""One logger for the package; each rank's lines go to its own file through standard error."""

import io
import logging
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

log = logging.getLogger("shoal")
for_the_screen: deque[str] = deque(maxlen=16)  # said to the log, and not on the screen yet


LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error")}
_level = logging.INFO


def set_level(name: str) -> None:
    """What the log of this process, and of its forks, holds from now on."""
    global _level
    _level = LEVELS[name]
    log.setLevel(_level)


def set_up(prefix: str = "", stream: TextIO | None = None) -> None:
    """Send the package's log to a stream, standard error by default, each line led by `prefix` (a
    rank, say). For a process of our own; elsewhere, `written_to`."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {prefix}%(levelname)s %(message)s"))
    log.handlers[:] = [handler]
    log.setLevel(_level)
    log.propagate = False


@contextmanager
def written_to(stream: TextIO) -> Iterator[None]:
    """Send the package's log to a stream for a while; then the logger is as it was before."""
    handlers, level, propagates = log.handlers[:], log.level, log.propagate
    set_up(stream=stream)
    try:
        yield
    finally:
        log.handlers[:], log.propagate = handlers, propagates
        log.setLevel(level)


def warn_on_screen(message: str) -> None:
    """Warn in the log and, under a supervisor, on the screen as well."""
    log.warning(message)
    for_the_screen.append(message)


_said: set[str] = set()


def warn_once(message: str, kind: str = "", on_screen: bool = False) -> None:
    """Warn, but only the first time that this message, or one of its `kind`, comes up here."""
    if (kind or message) not in _said:
        _said.add(kind or message)
        warn_on_screen(message) if on_screen else log.warning(message)


printed: deque[str] = deque(maxlen=200)  # lines of standard output, not on the screen yet


class PrintedLines(io.TextIOWrapper):
    """Standard output of a rank: it goes to the log, and line by line to `printed` as well.

    Only what Python prints: what a library writes to the descriptor is in the log alone. If more is
    printed between two heartbeats than the deque holds, the first lines are in the log alone.
    """

    def __init__(self, descriptor: int = 1) -> None:
        output = open(descriptor, "wb", closefd=False)  # noqa: SIM115 (for the process's life)
        super().__init__(output, "utf-8", "backslashreplace", line_buffering=True)
        self._begun = ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        printed.extend(lines)
        return super().write(text)
