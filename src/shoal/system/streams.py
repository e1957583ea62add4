"""Standard output and errors that may be gone while a run is not."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

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
