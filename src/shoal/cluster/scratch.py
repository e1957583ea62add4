"""A directory of this user's own that is gone when its process is, however that ends.

A second process, forked from it, waits until the first one and all that it started have ended, and
removes what is left: a killed agent must not leave a recipe on a host that is not its user's own.
Cost: one sleeping process. Not for files that others need afterwards.
"""

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shoal.system.processes import stop_signals


@contextmanager
def scratch_directory(prefix: str, parent: str | None = None) -> Iterator[Path]:
    """Only this user can enter it. Call this from a process without threads."""
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    ours, theirs = os.pipe()
    remover = os.fork()
    if remover == 0:
        try:
            os.close(theirs)
            _remove_at_end(path, ours)
        finally:
            os._exit(0)
    os.close(ours)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(remover, signal.SIGKILL)
            os.waitpid(remover, 0)
        os.close(theirs)


def _remove_at_end(path: Path, ended: int) -> None:
    """In the second process: the pipe closes when the last process that holds it has ended."""
    os.setsid()
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    os.closerange(3, ended)
    os.closerange(ended + 1, 1 << 16)
    os.read(ended, 1)
    shutil.rmtree(path, ignore_errors=True)
