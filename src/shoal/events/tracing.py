"""Spans of one process: what it did when, for a trace of some steps of a run.

`TRACER.span("forward")` goes around a piece of work. Outside of the steps to trace it gives one
shared context that does nothing; inside, the span is kept until the step is over, and then leaves
as a `TraceEvent` for the writer of the trace (`trace_file.py`). Times are seconds of the monotonic
clock, moved to rank 0's (`comm/clocks.py`), so that the ranks of all hosts stand on one clock.

Not a profiler of kernels: what torch does inside a forward is torch.profiler's. Cost: 0.1 us a span
while nothing is traced, some 2 us while it is. Read next: `comm/flight_recorder.py`, whose
collectives are spans too.
"""

import threading
from collections import deque
from time import perf_counter
from typing import Any

from shoal.errors import UsageError
from shoal.events.events import TraceEvent, TraceSpan

MOST_SPANS = 200_000  # of a step, kept until it is over
_AT_ONCE = 4000  # spans in one event


def parse_steps(text: str) -> range:
    """The steps that `--trace` names, both ends included and counted from 1. Pure."""
    first, colon, last = text.partition(":")
    words = [word.strip() for word in (first, last if colon else first)]
    if not all(map(str.isdecimal, words)):
        raise UsageError(
            f"--trace {text}: these are no steps. Give the first and the last, as in --trace "
            "100:110, or one, as in --trace 100."
        )
    begin, end = map(int, words)
    if begin < 1 or end < begin:
        raise UsageError(
            f"--trace {text}: steps count from 1, and the last is not before the first."
        )
    return range(begin, end + 1)


def check_steps(text: str, num_steps: int) -> range:
    """Refuse steps that the run does not make."""
    steps = parse_steps(text)
    if steps[0] > num_steps:
        raise UsageError(
            f"--trace {text}: the run has {num_steps} steps. Name some of these, as in --trace "
            f"{max(1, num_steps - 9)}:{num_steps}."
        )
    return steps


class Tracer:
    """Of one process; the training thread calls `begin_step` and `take`, any thread `span`."""

    def __init__(self) -> None:
        self.steps = range(0)  # to trace
        self.offset_s = 0.0  # of this clock, against rank 0's
        self.is_on = False
        self._spans: deque[TraceSpan] = deque(maxlen=MOST_SPANS)

    def begin_step(self, step: int) -> None:
        """What follows belongs to this step, counted from 1."""
        self.is_on = step in self.steps

    def span(
        self, name: str, kind: str = "work", size: int | None = None
    ) -> "_TracedWork | _NothingTraced":
        """Around a piece of work; `size` is that of what it is done to, in bytes."""
        return _TracedWork(self, name, kind, size) if self.is_on else _NOTHING

    def add(self, name: str, kind: str, began: float, ended: float, about: dict[str, Any]) -> None:
        """Keep a span that is over. A `collective` may overlap others of its thread."""
        thread = threading.current_thread()
        where = "training" if thread is threading.main_thread() else thread.name
        start_us = round(1e6 * (began - self.offset_s), 1)
        duration_us = round(1e6 * (ended - began), 1)
        self._spans.append(TraceSpan(name, kind, where, start_us, duration_us, about))

    def take(self, rank: int) -> list[TraceEvent]:
        """What is kept so far, to be sent; the spans are no longer here."""
        events = []
        while self._spans:
            count = min(len(self._spans), _AT_ONCE)
            spans = [self._spans.popleft() for _ in range(count)]
            events.append(TraceEvent(rank=rank, spans=spans))
        return events


class _NothingTraced:
    """While nothing is traced."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


_NOTHING = _NothingTraced()


class _TracedWork:
    __slots__ = ("_began", "_kind", "_name", "_size", "_tracer")

    def __init__(self, tracer: Tracer, name: str, kind: str, size: int | None):
        self._tracer, self._name, self._kind, self._size = tracer, name, kind, size

    def __enter__(self) -> None:
        self._began = perf_counter()

    def __exit__(self, *error: object) -> None:
        about = {} if self._size is None else {"bytes": self._size}
        self._tracer.add(self._name, self._kind, self._began, perf_counter(), about)


TRACER = Tracer()
