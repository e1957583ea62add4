"""A member's watchdog: warnings, missing samples, and a stalled worker thread, as messages.

The thread that sends heartbeats calls it, because the thread that works may be stuck: an endless
loop in a model, an optimizer or a hook, or a lock that is never released, stalls all other ranks
while heartbeats continue. The worker thread resets a timer after each step, and each time that it
polls for another process; a server resets it between two messages. If the timer is not reset and
the thread is not in code that waits for others, the watchdog reports the line that it is at.

It reports after a minute and ten times the longest pause so far; while a run stops, after ten
seconds and twice that pause; then at doubling times. It ends nothing: a step may take that long. On
devices with asynchronous work (CUDA) a thread may wait anywhere, so a rank that waits may be
reported too.

Cost: an assignment for each reset; frames are read only when a report is due. Read next: `seat.py`,
which calls it, and `progress.py`, which watches the run as a whole.
"""

import faulthandler
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from msgspec import UNSET, structs

from shoal import logs
from shoal.comm.flight_recorder import RECORDER, Standing
from shoal.data.readers.records import SourceLost
from shoal.data.stalls import STALLS
from shoal.elastic.hangs import IDLE_S
from shoal.elastic.messages import Failed, MemberEvent, SeatAssignment
from shoal.errors import sendable
from shoal.events.events import BusyEvent, PrintedEvent, WaitingEvent, WarningEvent

PAUSE_S, TIMES_LONGEST = 60.0, 10.0
STOPPING_PAUSE_S, STOPPING_TIMES_LONGEST = 10.0, 2.0

_PACKAGE = f"{Path(__file__).parents[1]}/"
# Files whose frames wait for another process, or for samples.
_WAITING_FILES = ("comm/", "data/", "elastic/seat.py", "parallel/pipeline/messages.py")
_COLLECTIVES = "/torch/distributed/"
_LIBRARIES = sysconfig.get_path("stdlib")
_MOST_LINE = 1000  # characters of what is printed that are shown


class StallTimer:
    """The worker thread calls `beat`; another thread polls `late_s`."""

    def __init__(self, now: float):
        self._last = self._seen = now
        self._longest_s = 0.0  # between two beats
        self._reported_s = 0.0  # length of this pause when it was last reported

    def beat(self, now: float) -> None:
        self._last = now

    def restart(self, now: float) -> None:
        """Begin again without counting this pause, in which the thread waited for others."""
        self._last = self._seen = now
        self._reported_s = 0.0

    def late_s(self, now: float, stops: bool) -> float | None:
        """Seconds since the last beat, if a report is due."""
        last = self._last
        if last != self._seen:
            self._longest_s = max(self._longest_s, last - self._seen)
            self._seen, self._reported_s = last, 0.0
        due_s = max(PAUSE_S, TIMES_LONGEST * self._longest_s)
        if stops:
            stopping_s = STOPPING_TIMES_LONGEST * self._longest_s
            due_s = min(due_s, max(STOPPING_PAUSE_S, stopping_s))
        pause_s = now - last
        if pause_s < max(due_s, 2 * self._reported_s):
            return None
        self._reported_s = pause_s
        return pause_s


class Watchdog:
    """The control thread calls `check` and `current_line`, the worker thread all else."""

    def __init__(self) -> None:
        self._timer = StallTimer(time.monotonic())
        self._worker_thread, self._is_suspended = threading.get_ident(), False
        self._logged_waits = False

    def beat(self) -> None:
        self._timer.beat(time.monotonic())

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Around a wait for the supervisor, which may take a spare hours. Afterwards the calling
        thread is the worker thread."""
        self._is_suspended = True
        try:
            yield
        finally:
            self._worker_thread = threading.get_ident()
            self.beat()
            self._is_suspended = False

    def current_line(self) -> str:
        """The line that the worker thread is at; empty if it waits."""
        frame = None if self._is_suspended else sys._current_frames().get(self._worker_thread)
        return sendable(working_line(frame) or "")

    def standing(self) -> Standing | None:
        """Where this rank stands among collectives, if it begins and ends none; the log gets the
        last of them once it waits as long as a rank computes before a warning."""
        found = None if self._is_suspended else RECORDER.standing(IDLE_S)
        if found is None or not found.open:
            self._logged_waits = False
        elif found.open[0].seconds > PAUSE_S and not self._logged_waits:
            self._logged_waits = True
            logs.log.warning("waits in a collective; the last ones:\n%s", RECORDER.table())
        return None if found is None else structs.replace(found, line=self.current_line())

    def check(
        self, step: int, assignment: SeatAssignment | None, stops: bool
    ) -> Iterator[MemberEvent | Failed]:
        """The messages that are due, of a member after `step`."""
        rank = None if assignment is None else assignment.seat
        yield from self.take_printed(assignment)
        late = STALLS.look()
        if late is not None and late.is_lost:
            yield Failed(step, str(late), "", SourceLost.exit_code)
        elif late is not None:
            seconds = round(late.seconds)
            yield MemberEvent(
                WaitingEvent(rank=rank, step=step, samples=late.samples, seconds=seconds)
            )
        if assignment is None or (busy := self._check_stall(time.monotonic(), stops)) is None:
            return
        seconds, line = busy
        server = UNSET if assignment.server is None else assignment.server
        yield MemberEvent(BusyEvent(rank=rank, server=server, step=step, seconds=seconds, at=line))

    def take_printed(self, assignment: SeatAssignment | None) -> Iterator[MemberEvent]:
        """Warnings, and what was printed, since the last time; only rank 0 shows that."""
        with suppress(IndexError):
            while True:
                yield MemberEvent(WarningEvent(text=sendable(logs.for_the_screen.popleft())))
        found = []
        with suppress(IndexError):  # none is left; another thread may take some
            while True:
                found.append(sendable(logs.printed.popleft())[:_MOST_LINE])
        if found and assignment is not None and assignment.seat == 0:
            yield MemberEvent(PrintedEvent(lines=found))

    def _check_stall(self, now: float, stops: bool) -> tuple[int, str] | None:
        """For how long the worker thread has computed, and where; None if that is not due."""
        if self._is_suspended:
            self._timer.restart(now)
            return None
        late_s = self._timer.late_s(now, stops)
        if late_s is None:
            return None
        at = working_line(sys._current_frames().get(self._worker_thread))
        if at is None:
            self._timer.restart(now)
            return None
        logs.log.warning("busy for %d s: %s; all threads:", late_s, at)
        faulthandler.dump_traceback(2)  # reads no file, and survives a full disk
        return round(late_s), sendable(at)


def working_line(frame: FrameType | None) -> str | None:
    """The line a thread is at: the innermost of user code, or else of Shoal. None if the thread
    waits for another process, or for samples."""
    own = ""
    while frame is not None:
        name = frame.f_code.co_filename
        here = f"{frame.f_code.co_name} ({name}:{frame.f_lineno})"
        if _COLLECTIVES in name:
            return None
        if name.startswith(_PACKAGE):
            waits = name.removeprefix(_PACKAGE).startswith(_WAITING_FILES)
            return None if waits else own or here
        if not own and "-packages/" not in name and not name.startswith((_LIBRARIES, "<")):
            own = here
        frame = frame.f_back
    return None
