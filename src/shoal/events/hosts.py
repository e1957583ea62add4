"""What each host of a run uses: processor, memory, disk and network, every few seconds.

One member of each host reads the counters of its kernel, in the thread that sends heartbeats, and
the supervisor puts them on record and tells all ranks of them, so that the one that writes the
numbers of steps can give them to trackers. In a container memory is that of its limit; the rest is
of the whole machine. Cost: some 0.5 ms of a thread every five seconds; nothing on the path of a
step. Read next: `elastic/seat.py`, which samples; `metrics_writer.py`, which hands them on.
"""

import os
import time
from contextlib import suppress
from typing import Any

import psutil

from shoal.events.events import HostUseEvent
from shoal.events.meters import memory_left_bytes, memory_limit_bytes

EVERY_S = 5.0
FIRST_S = 1.0  # after which there is a first sample, of short runs too
LATEST: dict[int, HostUseEvent] = {}  # by host, as this process was told


class HostMeter:
    """Rates are since the sample before; the first one comes a second after the meter is made."""

    def __init__(self) -> None:
        self._at, self._due = time.monotonic(), time.monotonic() + FIRST_S
        psutil.cpu_percent()
        self._counts = _counts()

    def due(self, step: int) -> HostUseEvent | None:
        """A sample, if it is time for one; `step` is the last one."""
        now = time.monotonic()
        if now < self._due:
            return None
        self._due = now + EVERY_S
        return self.sample(step, now)

    def sample(self, step: int, now: float) -> HostUseEvent:
        seconds, counts = max(now - self._at, 1e-6), _counts()
        rates = [max(0.0, (b - a) / seconds) for a, b in zip(self._counts, counts, strict=True)]
        self._at, self._counts = now, counts
        used, total = _memory()
        free = 0
        with suppress(OSError):  # the directory may be gone
            free = psutil.disk_usage(os.getcwd()).free
        read, written, sent, received = map(round, rates)
        return HostUseEvent(
            host=0,
            step=step,
            cpu_percent=psutil.cpu_percent(),
            memory_bytes=used,
            memory_total_bytes=total,
            disk_read_bytes_per_s=read,
            disk_written_bytes_per_s=written,
            disk_free_bytes=free,
            network_sent_bytes_per_s=sent,
            network_received_bytes_per_s=received,
        )


def hosts_record() -> dict[str, dict[str, Any]]:
    """The newest sample of each host, as a part of a record of trackers."""
    fields = [f for f in HostUseEvent.__struct_fields__ if f not in ("time", "host", "step")]
    return {
        str(host): {name: getattr(use, name) for name in fields}
        for host, use in sorted(LATEST.items())
    }


def _counts() -> tuple[int, int, int, int]:
    """Bytes read, written, sent and received so far; loopback does not count."""
    disk = psutil.disk_io_counters()
    links = psutil.net_io_counters(pernic=True)
    outside = [count for name, count in links.items() if name != "lo"]
    return (
        disk.read_bytes if disk else 0,
        disk.write_bytes if disk else 0,
        sum(count.bytes_sent for count in outside),
        sum(count.bytes_recv for count in outside),
    )


def _memory() -> tuple[int, int]:
    """Bytes in use, and all there are: of the container, if it has a limit."""
    limit, left = memory_limit_bytes(), memory_left_bytes()
    if limit is not None and left is not None:
        return limit - left, limit
    found = psutil.virtual_memory()
    return found.total - found.available, found.total
