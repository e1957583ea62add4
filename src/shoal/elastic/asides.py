"""What a person should hear of a member, although the thread that works has no time to say it.

The thread that sends heartbeats says it instead: warnings, samples that do not come, and work that
does not end. A loop without end in a model, an optimizer or a hook, or a lock that nobody gives
back, leaves all others waiting, and heartbeats go on. Who waits for another process shows a pulse
while it does, and so does a server between two messages; who shows none is the culprit, and says
so with the line that it is at. It speaks after a minute without a pulse, or ten times as long as
there was ever none, and at doubling times; while a run is to stop, after ten seconds. Nothing is
ended: a step may well take that long.

Cost: an assignment a pulse; frames are looked at only when it is time to speak.
"""

import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from shoal import logs
from shoal.data.readers.records import SourceLost
from shoal.data.waiting import WAITING
from shoal.elastic.messages import Failed, Note, TakeSeat
from shoal.errors import sendable

FIRST_S, MANY_TIMES = 60.0, 10.0
STOPPING_S, SOME_TIMES = 10.0, 2.0

_PACKAGE = f"{Path(__file__).parents[1]}/"
_OTHERS = ("comm/", "data/", "elastic/")  # whose frames wait for a process, or for samples
_COLLECTIVES = "/torch/distributed/"


class Pulse:
    """`beat` is for the thread that works, `late_s` for another that looks again and again."""

    def __init__(self, now: float):
        self._last = self._seen = now
        self._longest_s = 0.0  # without one
        self._told_s = 0.0  # when this pause was told of last

    def beat(self, now: float) -> None:
        self._last = now

    def late_s(self, now: float, stops: bool) -> float | None:
        """For how long there was none, if that is to be told now."""
        last = self._last
        if last != self._seen:
            self._longest_s = max(self._longest_s, last - self._seen)
            self._seen, self._told_s = last, 0.0
        due_s = max(FIRST_S, MANY_TIMES * self._longest_s)
        if stops:
            due_s = min(due_s, max(STOPPING_S, SOME_TIMES * self._longest_s))
        pause_s = now - last
        if pause_s < max(due_s, 2 * self._told_s):
            return None
        self._told_s = pause_s
        return pause_s


class Asides:
    def __init__(self) -> None:
        self._pulse, self._worker = Pulse(time.monotonic()), 0

    def follow(self) -> None:
        """The thread that calls it is the one that works from now on."""
        self._worker = threading.get_ident()
        self.beat()

    def beat(self) -> None:
        """It does not hang."""
        self._pulse.beat(time.monotonic())

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
        late_s = self._pulse.late_s(time.monotonic(), stops)
        if late_s is not None and place is not None:
            frame = sys._current_frames().get(self._worker)
            at = where(frame)
            if at is not None:
                traceback.print_stack(frame)  # into the log
                what = {"server": place.server, "seconds": round(late_s), "at": sendable(at)}
                yield Note("busy", who | what)


def where(frame: FrameType | None) -> str | None:
    """Where a thread computes: the innermost line that is no library's, or else any. None if it
    waits for another process, or for samples."""
    own, line = "", ""
    while frame is not None:
        name = frame.f_code.co_filename
        here = f"{frame.f_code.co_name} ({name}:{frame.f_lineno})"
        line = line or here
        if _COLLECTIVES in name:
            return None
        if name.startswith(_PACKAGE):
            is_other = name.removeprefix(_PACKAGE).startswith(_OTHERS)
            return None if is_other else own or line
        if not own and "site-packages" not in name and not name.startswith(sys.base_prefix):
            own = here
        frame = frame.f_back
    return None
