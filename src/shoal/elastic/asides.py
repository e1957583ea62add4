"""What a person should hear of a member, although the thread that works has no time to say it.

The thread that sends heartbeats says it instead: warnings, samples that do not come, and work that
does not end. A loop without end in a model, an optimizer or a hook, or a lock that nobody gives
back, leaves all others waiting, and heartbeats go on. Who waits for another process asks again and
again whether that is gone, which is a pulse; a server shows one between two messages. Who shows
none, and does not wait in a place that is known, says so with the line that it is at.

It speaks once there was no pulse for a minute and for ten times the longest pause so far; while a
run stops, for ten seconds and twice that pause; then at doubling times. Nothing is ended: a step
may well take that long. On devices whose work goes on by itself (CUDA) a thread may wait anywhere,
and who waits may be named too.

Cost: an assignment a pulse; frames are looked at only when it is time to speak.
"""

import faulthandler
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from shoal import logs
from shoal.data.readers.records import SourceLost
from shoal.data.waiting import WAITING
from shoal.elastic.messages import Failed, Note, TakeSeat
from shoal.errors import sendable

PAUSE_S, TIMES_LONGEST = 60.0, 10.0
STOPPING_PAUSE_S, STOPPING_TIMES_LONGEST = 10.0, 2.0

_PACKAGE = f"{Path(__file__).parents[1]}/"
# Whose frames wait for another process, or for samples.
_OTHERS = ("comm/", "data/", "elastic/seat", "parallel/pipeline/messages")
_COLLECTIVES = "/torch/distributed/"
_LIBRARIES = sysconfig.get_path("stdlib")


class Pulse:
    """`beat` is for the thread that works, the rest for another that looks again and again."""

    def __init__(self, now: float):
        self._last = self._seen = now
        self._longest_s = 0.0  # without one
        self._told_s = 0.0  # how long this pause was when it was told of

    def beat(self, now: float) -> None:
        self._last = now

    def rest(self, now: float) -> None:
        """The pause was nobody's work, and does not count."""
        self._last = self._seen = now
        self._told_s = 0.0

    def late_s(self, now: float, stops: bool) -> float | None:
        """For how long there was none, if that is to be told now."""
        last = self._last
        if last != self._seen:
            self._longest_s = max(self._longest_s, last - self._seen)
            self._seen, self._told_s = last, 0.0
        due_s = max(PAUSE_S, TIMES_LONGEST * self._longest_s)
        if stops:
            stopping_s = STOPPING_TIMES_LONGEST * self._longest_s
            due_s = min(due_s, max(STOPPING_PAUSE_S, stopping_s))
        pause_s = now - last
        if pause_s < max(due_s, 2 * self._told_s):
            return None
        self._told_s = pause_s
        return pause_s


class Asides:
    """`look` is for the thread that speaks, the rest for the one that works."""

    def __init__(self) -> None:
        self._pulse = Pulse(time.monotonic())
        self._worker, self._rests = threading.get_ident(), False

    def beat(self) -> None:
        self._pulse.beat(time.monotonic())

    @contextmanager
    def resting(self) -> Iterator[None]:
        """While the supervisor's word is waited for; afterwards this thread is the one that works.
        A spare may wait for hours."""
        self._rests = True
        try:
            yield
        finally:
            self._worker = threading.get_ident()
            self.beat()
            self._rests = False

    def at(self) -> str:
        """The line that the member works at; empty if it waits."""
        frame = None if self._rests else sys._current_frames().get(self._worker)
        return sendable(where(frame) or "")

    def look(self, step: int, place: TakeSeat | None, stops: bool) -> Iterator[Note | Failed]:
        """What there is to say, of a member that has made so many steps."""
        while logs.for_the_screen:
            yield Note("warning", {"text": sendable(logs.for_the_screen.popleft())})
        who = {"rank": None if place is None else place.seat, "step": step}
        late = WAITING.look()
        if late is not None and late.is_lost:
            yield Failed(step, str(late), "", SourceLost.exit_code)
        elif late is not None:
            told = {"samples": late.samples, "seconds": round(late.seconds)}
            yield Note("waiting", who | told)
        if place is not None and (busy := self._busy(time.monotonic(), stops)) is not None:
            if place.server is not None:
                who["server"] = place.server
            yield Note("busy", who | busy)

    def _busy(self, now: float, stops: bool) -> dict[str, int | str] | None:
        if self._rests:
            self._pulse.rest(now)
            return None
        late_s = self._pulse.late_s(now, stops)
        if late_s is None:
            return None
        at = where(sys._current_frames().get(self._worker))
        if at is None:
            self._pulse.rest(now)
            return None
        logs.log.warning("busy for %d s: %s; all threads:", late_s, at)
        faulthandler.dump_traceback(2)  # which reads no file, and does not mind a full disk
        return {"seconds": round(late_s), "at": sendable(at)}


def where(frame: FrameType | None) -> str | None:
    """Where a thread works: the innermost line that is the user's own, or else Shoal's. None if it
    waits for another process, or for samples."""
    own = ""
    while frame is not None:
        name = frame.f_code.co_filename
        here = f"{frame.f_code.co_name} ({name}:{frame.f_lineno})"
        if _COLLECTIVES in name:
            return None
        if name.startswith(_PACKAGE):
            waits = name.removeprefix(_PACKAGE).startswith(_OTHERS)
            return None if waits else own or here
        if not own and "-packages/" not in name and not name.startswith((_LIBRARIES, "<")):
            own = here
        frame = frame.f_back
    return None
