"""The seat of a rank that a launcher started, and the record that rank 0 keeps of the run.

Events of all ranks reach rank 0 through the store where they met; it writes them to events.jsonl
and shows them. Cost: a request to the store every 0.1 s at most, on rank 0.

Read next: `rank.py`.
"""

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

import msgspec

from shoal import logs
from shoal.comm.mesh import Axes, Check, LauncherSeat, Mesh, RankRequests, accept
from shoal.errors import Ended, sendable
from shoal.events.events import (
    Event,
    OnEvent,
    PrintedEvent,
    ProgressEvent,
    SpentEvent,
    StoppingEvent,
    TickEvent,
    TraceEvent,
    WarningEvent,
)
from shoal.events.hosts import LATEST, HostMeter
from shoal.events.sinks import EventsSink
from shoal.events.step import StepInfo
from shoal.events.trace_file import TRACE, TraceFile
from shoal.launch.outcome import Saves
from shoal.launch.rank_peers import RankPeers
from shoal.logs import warn_once
from shoal.storage.run_dir import RunDir

if TYPE_CHECKING:
    import torch.distributed as dist

TELL_S = 0.1
MOST_LINE = 2000


class RankRecord:
    """What rank 0 keeps and shows of a run. Use it in a `with` block."""

    def __init__(self, directory: RunDir, watch: OnEvent):
        self.saves = Saves()
        self._directory, self._watch = directory, watch
        self._events = EventsSink(directory.path)
        self._trace = TraceFile(directory.path / TRACE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._events.close()
        self._trace.close()

    def write(self, event: Event) -> None:
        if isinstance(event, TraceEvent):  # which has a file of its own
            self._trace(event)
            return
        event = msgspec.structs.replace(event, time=time.time())
        try:
            self._events.write(event)
        except OSError as error:  # a full disk must not end a healthy run
            warn_once(f"events.jsonl cannot be written: {error}. The run continues.")
        self.saves(event)
        self._watch(event)

    def show(self, progress: ProgressEvent | None) -> None:
        """Show what needs no record: how far it is, and what was printed."""
        lines = []
        with suppress(IndexError):
            while True:
                lines.append(sendable(logs.printed.popleft())[:MOST_LINE])
        if lines:
            self._watch(PrintedEvent(lines=lines))
        while logs.for_the_screen:
            self.write(WarningEvent(text=logs.for_the_screen.popleft()))
        if progress is not None:
            self._watch(progress)
        if moved := self._directory.moved():
            self._watch(WarningEvent(text=moved))
        self._watch(TickEvent())


class RankSeat(LauncherSeat):
    """Of one rank; `record` on rank 0 only. `check` compares ranks before their first step."""

    recovers = False

    def __init__(
        self,
        peers: RankPeers,
        store: "dist.Store",
        form_timeout_s: float,
        *,
        check: Check,
        record: RankRecord | None,
    ):
        super().__init__(peers.world, store, form_timeout_s)
        self.summary: dict[str, Any] = {}
        self._peers, self._check, self._record = peers, check, record
        self._summarise: Callable[[], dict[str, Any]] = dict
        self._progress: Callable[[], ProgressEvent | None] = lambda: None
        self._told_at, self._num_events = 0.0, 0
        self._says_stop = False
        self._meter = HostMeter() if peers.world.rank_of_node == 0 else None

    @property
    def stop_signal(self) -> int:
        return self._stop

    def report_by(
        self,
        *,
        summarise: Callable[[], dict[str, Any]],
        progress: Callable[[], ProgressEvent | None],
        before_pause: Callable[[], None],
    ) -> None:
        """What to tell at the end, and after steps. These runs do not pause."""
        self._summarise, self._progress = summarise, progress

    def form(self, axes: Axes, check: Check = accept) -> Mesh:
        return super().form(axes, self._check)

    def stepped(self, info: StepInfo) -> None:
        self.step = info.step
        if self._meter is not None and (use := self._meter.due(info.step)) is not None:
            host = self._peers.world.rank // self._peers.world.num_ranks_of_node
            use = msgspec.structs.replace(use, host=host, time=time.time())
            LATEST[host] = use
            self.emit(use)
        if self._record is not None and time.monotonic() - self._told_at > TELL_S:
            self._tell()

    def emit(self, event: Event) -> None:
        if isinstance(event, SpentEvent):
            event = msgspec.structs.replace(event, rank=self._peers.world.rank)
        if self._record is not None:
            self._record.write(event)
            return
        number = self._peers.count("events")
        self._peers.tell_all(f"event/{number}", msgspec.msgpack.encode(event))

    def asked(self) -> RankRequests:
        if self._stop and self._record is not None and not self._says_stop:
            self._says_stop = True
            self._record.write(StoppingEvent(signal=signal.Signals(self._stop).name))
        return super().asked()

    def finish(self, meets: bool = False) -> bool:
        self.summary = self._summarise()
        if self._record is not None:
            self._tell()
        return True

    def close(self) -> None:
        # A launcher signals those that are left when one has ended; what is left to do is bounded,
        # and tells why.
        self._handlers = dict.fromkeys(self._handlers, signal.SIG_IGN)
        super().close()

    def _request_stop(self, number: int, frame: object) -> None:
        if self._stop:  # the second ends at once
            raise Ended(128 + number)
        super()._request_stop(number, frame)

    def _tell(self) -> None:
        assert self._record is not None
        self._told_at = time.monotonic()
        with suppress(RuntimeError):  # the store is gone, which the next step shows
            while content := self._peers.heard(f"event/{self._num_events + 1}"):
                self._num_events += 1
                self._record.write(msgspec.msgpack.decode(content, type=Event))
        self._record.show(self._progress())
