"""What this process waits for: samples that a source has not given yet, and since when.

A source may hang: a mount that does not answer, a lock, a loop without end. The thread that loads
cannot tell, so it notes what it asks for (`WAITING`), and another one looks at the note: under a
supervisor the one that sends heartbeats, in a command without one that of `watched`; and while a
recipe is prepared, its parent (`launch.py`), by a note in shared memory. It tells of a
wait after 10 s and at doubling times, and ends the run after 15 minutes, or half a minute a sample
if that is more: what loads that slowly is taken for lost.

Not for a script under another launcher, where no such thread is; with loaders, the rank itself
counts. Cost: two assignments each time that samples are loaded.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from shoal.data.sources import Ids, named
from shoal.system.processes import NOTICE, Wait

FIRST_S = 10.0
LIMIT_S = 900.0
LIMIT_PER_SAMPLE_S = 30.0


class Overdue(NamedTuple):
    """Samples that have not come, as a message names them."""

    samples: str
    seconds: float
    is_lost: bool

    def __str__(self) -> str:
        return (
            f"{self.samples}: nothing came for {self.seconds:.0f} s, which is the limit. The "
            "source, or the disk or server behind it, hangs; see to it, try such a sample by "
            "itself, and start again: a build as before, a run with --resume."
        )


class Waiting:
    """Used by the thread that loads; `look` by another."""

    def __init__(self) -> None:
        self._asked: tuple[Ids, float] | None = None  # since when
        self._told_of: tuple[Ids, float] | None = None
        self._next_s = FIRST_S  # after which it is told of again

    @contextmanager
    def on(self, ids: Ids) -> Iterator[None]:
        """Around the loading of samples."""
        before, self._asked = self._asked, (ids, time.monotonic())
        try:
            NOTICE.write(_noted(self._asked))
            yield
        finally:
            self._asked = before
            NOTICE.write(_noted(before))

    def look(self) -> Overdue | None:
        """A wait that is to be told of now, once at each of the times that it is told at."""
        asked = self._asked
        if asked is None:
            return None
        if asked is not self._told_of:
            self._told_of, self._next_s = asked, FIRST_S
        found = overdue(asked[0], time.monotonic() - asked[1])
        if found.seconds < self._next_s and not found.is_lost:
            return None
        self._next_s *= 2
        return found


def overdue(ids: Ids, seconds: float) -> Overdue:
    """How a wait of so many seconds for these samples is judged."""
    return Overdue(named(ids), seconds, seconds >= _limit_s(ids))


def _limit_s(ids: Ids) -> float:
    return max(LIMIT_S, LIMIT_PER_SAMPLE_S * len(ids))


def _noted(asked: tuple[Ids, float] | None) -> Wait | None:
    if asked is None or not len(asked[0]):
        return None
    ids, since_s = asked
    return Wait(int(ids[0]), len(ids), since_s, _limit_s(ids))


WAITING = Waiting()


@contextmanager
def watched(hear: Callable[[Overdue], None]) -> Iterator[None]:
    """Let a thread look while the block runs; it calls `hear` with what is to be told."""
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(min(1.0, FIRST_S / 2)):
            if (late := WAITING.look()) is not None:
                hear(late)

    thread = threading.Thread(target=look, name="shoal-waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
