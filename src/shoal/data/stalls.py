"""Stall detection: which samples this process waits for, and since when.

A source may hang: a mount that does not answer, a lock, an endless loop. The thread that loads
cannot see that, so it notes what it loads (`STALLS`), and another thread looks at the note: under a
supervisor the one that sends heartbeats, in a command without one that of `report_stalls`; and
while a recipe is prepared, its parent (`cluster/local.py`), by a note in shared memory. A wait is
reported after 10 s and at doubling times. It ends the run after 15 minutes, or half a minute a
sample if that is more: a source that is slower counts as lost.

Not for a script under another launcher, which has no such thread; with loaders, only the rank's own
waiting counts. Cost: two assignments for each load.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from shoal.data.sources import Ids, format_ids
from shoal.system.processes import WAIT_PAGE, SampleWait

FIRST_S = 10.0
LIMIT_S = 900.0
LIMIT_PER_SAMPLE_S = 30.0


class Stall(NamedTuple):
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


class StallDetector:
    """`on` is for the thread that loads; `look` for another one."""

    def __init__(self) -> None:
        self._asked: tuple[Ids, float] | None = None  # since when
        self._told_of: tuple[Ids, float] | None = None
        self._next_s = FIRST_S  # when it is reported next

    @contextmanager
    def on(self, ids: Ids) -> Iterator[None]:
        """Around the loading of samples."""
        before, self._asked = self._asked, (ids, time.monotonic())
        try:
            WAIT_PAGE.write(_noted(self._asked))
            yield
        finally:
            self._asked = before
            WAIT_PAGE.write(_noted(before))

    def look(self) -> Stall | None:
        """The wait to report now, if any; once at each of the times that it is reported at."""
        asked = self._asked
        if asked is None:
            return None
        if asked is not self._told_of:
            self._told_of, self._next_s = asked, FIRST_S
        found = judge_wait(asked[0], time.monotonic() - asked[1])
        if found.seconds < self._next_s and not found.is_lost:
            return None
        self._next_s *= 2
        return found


def judge_wait(ids: Ids, seconds: float) -> Stall:
    """How a wait of so many seconds for these samples is judged."""
    return Stall(format_ids(ids), seconds, seconds >= _limit_s(ids))


def _limit_s(ids: Ids) -> float:
    return max(LIMIT_S, LIMIT_PER_SAMPLE_S * len(ids))


def _noted(asked: tuple[Ids, float] | None) -> SampleWait | None:
    if asked is None or not len(asked[0]):
        return None
    ids, since_s = asked
    return SampleWait(int(ids[0]), len(ids), since_s, _limit_s(ids))


STALLS = StallDetector()


@contextmanager
def report_stalls(hear: Callable[[Stall], None]) -> Iterator[None]:
    """Let a thread look while the block runs; it calls `hear` with each stall to report."""
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(min(1.0, FIRST_S / 2)):
            if (late := STALLS.look()) is not None:
                hear(late)

    thread = threading.Thread(target=look, name="shoal-waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
