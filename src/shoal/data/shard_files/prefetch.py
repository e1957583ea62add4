"""Prefetching of shards: those that the order needs soon are fetched beside training.

A set gets the ids of its next samples (`data/fetch_hints.py`). Two threads fetch the shards among
them that are not local yet, in that order, at most 32 shards and 1 GiB ahead, and only while all of
it fits into half of the directory: nothing in use is removed for them. A failure here is no error,
and the shard is not requested again for a minute; the reader that needs it requests it, and raises.

Not for shards of a directory, which need no fetching. Cost: the network a little earlier, and up
to 1 GiB of useless copies when a run ends. Next: `fetching.py` for the copies.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shoal.data.shard_files.fetching import FetchCancelled
from shoal.logs import log

MOST_SHARDS = 32
MOST_BYTES = 1 << 30
_AT_ONCE = 2
_CLOSING_S = 2.0
_AGAIN_AFTER_S = 60.0

Fetch = Callable[[int, threading.Event], None]


class UpcomingShard(NamedTuple):
    """A shard that will be needed."""

    number: int
    num_bytes: int
    is_here: bool


def choose_shards(coming: Sequence[UpcomingShard], room: int) -> tuple[list[int], int]:
    """Of the shards that come, in their turn: which to fetch now, and how many are provided for."""
    wanted: list[int] = []
    num_bytes = 0
    for place, shard in enumerate(coming):
        room -= shard.num_bytes
        if room < 0:
            return wanted, place
        if shard.is_here:
            continue
        is_too_much = bool(wanted) and num_bytes + shard.num_bytes > MOST_BYTES
        if len(wanted) == MOST_SHARDS or is_too_much:
            return wanted, place
        wanted.append(shard.number)
        num_bytes += shard.num_bytes
    return wanted, len(coming)


class ShardPrefetcher:
    """The threads of one process. They end when there is nothing left to fetch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: list[tuple[int, Fetch]] = []
        self._busy: set[int] = set()
        self._failed: dict[int, float] = {}
        self._threads: set[threading.Thread] = set()
        self._cancelled = threading.Event()

    def want(self, numbers: Sequence[int], fetch: Fetch) -> None:
        """Fetch these, and what was wanted before no more, save what is under way."""
        with self._lock:
            now = time.monotonic()
            self._failed = {n: t for n, t in self._failed.items() if now - t < _AGAIN_AFTER_S}
            others = {*self._busy, *self._failed}
            self._queue = [(number, fetch) for number in numbers if number not in others]
            for _ in range(min(len(self._queue), _AT_ONCE - len(self._threads))):
                thread = threading.Thread(
                    target=self._work,
                    args=(self._cancelled,),
                    name="shoal-fetch-ahead",
                    daemon=True,
                )
                self._threads.add(thread)
                thread.start()

    def stop(self) -> None:
        """Give up what is under way; return when nothing of it is left on the disk, or soon."""
        with self._lock:
            self._queue = []
            threads, self._threads = self._threads, set()
            self._cancelled.set()
            self._cancelled = threading.Event()
        deadline = time.monotonic() + _CLOSING_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self, cancelled: threading.Event) -> None:
        while (job := self._next(cancelled)) is not None:
            number, fetch = job
            try:
                fetch(number, cancelled)
            except FetchCancelled:
                pass
            except Exception as error:  # noqa: BLE001 (raised by the reader that needs the shard)
                with self._lock:
                    self._failed[number] = time.monotonic()
                log.info("shard %d was not fetched ahead: %s", number, error)
            finally:
                with self._lock:
                    self._busy.discard(number)

    def _next(self, cancelled: threading.Event) -> tuple[int, Fetch] | None:
        with self._lock:
            if cancelled.is_set() or not self._queue:
                self._threads.discard(threading.current_thread())
                return None
            job = self._queue.pop(0)
            self._busy.add(job[0])
            return job
