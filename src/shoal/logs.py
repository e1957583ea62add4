"""One logger for the package; each rank's lines go to its own file through standard error."""

import logging
import sys

log = logging.getLogger("shoal")


def set_up(prefix: str = "", level: int = logging.INFO) -> None:
    """Send the package's log to standard error, each line led by `prefix` (a rank, say)."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {prefix}%(levelname)s %(message)s"))
    log.handlers[:] = [handler]
    log.setLevel(level)
    log.propagate = False


_said: set[str] = set()


def warn_once(message: str, kind: str = "") -> None:
    """Warn, but only the first time that this message, or one of its `kind`, comes up here."""
    if (kind or message) not in _said:
        _said.add(kind or message)
        log.warning(message)
