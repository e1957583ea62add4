"""Meters: where the time of a step went, totals of a run, memory in use and allowed.

A rank sees its exchange as one interval, but part of it is waiting for a slower rank. Ranks tell
each other how long they were busy before the exchange; the slowest one determines when it could
start, and the rest is the exchange itself. All of it is arithmetic on numbers from the trainer:
nothing here communicates, and only `Stopwatch` reads a clock.

On a GPU these are the seconds of the host, which runs ahead of the device: for kernels use a
profiler. Cost: a lap takes 0.1 us, `StepTotals.add` about 1 us. Read next: `sinks.py`.
"""

import resource
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic, perf_counter, process_time

import psutil

from shoal.events.events import SpentEvent
from shoal.events.step import StepInfo, Times

FIRST_STEPS = 5  # after the very first, by which the others are foreseen
NO_TIME = Times(0.0, 0.0, 0.0, 0.0)
SPENT_FIRST_S, SPENT_EVERY_S = 0.1, 0.5  # of the first report, and of others in a short run
SPENT_REPORTS = 128  # each time that a run gets twice as old, about


class Stopwatch:
    """Cuts time into laps: each `lap` returns the seconds since the one before."""

    __slots__ = ("_mark",)

    def __init__(self) -> None:
        self._mark = perf_counter()

    def start(self) -> None:
        """Start a lap now; the time since the last one is not counted."""
        self._mark = perf_counter()

    def lap(self) -> float:
        now = perf_counter()
        seconds = now - self._mark
        self._mark = now
        return seconds


def split_times(
    data: float,
    compute: float,
    exchange: float,
    busy_of_ranks: Sequence[float],
    own: int,
    waited: float = 0.0,
) -> Times:
    """Split the exchange into waiting and exchanging.

    `busy_of_ranks` holds the seconds that each rank spent before the exchange (data and compute);
    `own` is this rank's index in it. `waited` is known to be waiting, and not in the exchange.
    """
    waiting = min(exchange, max(busy_of_ranks) - busy_of_ranks[own])
    return Times(data, compute, exchange - waiting, waiting + waited)


class StepTotals:
    """Sums over the committed steps of one rank, for the progress line and the final report.

    Rates are over the seconds of steps, so evaluating and saving do not lower them;
    `samples_per_s` covers the last `window` steps, `mean_samples_per_s` all of them.
    """

    def __init__(self, window: int = 50) -> None:
        if window < 1:
            raise ValueError(f"StepTotals(window={window}): the window must be at least 1 step.")
        self.num_steps = 0
        self.num_samples = 0
        self.bytes_sent = 0
        self.last: StepInfo | None = None
        self._data = self._compute = self._exchange = self._waiting = 0.0
        self._recent: deque[StepInfo] = deque(maxlen=window)

    def add(self, info: StepInfo) -> None:
        data, compute, exchange, waiting = info.times
        self._data += data
        self._compute += compute
        self._exchange += exchange
        self._waiting += waiting
        self.num_steps += 1
        self.num_samples += info.samples
        self.bytes_sent += info.bytes_sent
        self.last = info
        self._recent.append(info)

    @property
    def times(self) -> Times:
        return Times(self._data, self._compute, self._exchange, self._waiting)

    @property
    def samples_per_s(self) -> float:
        recent = list(self._recent)  # another thread may add meanwhile
        samples = sum(info.samples for info in recent)
        return _ratio(samples, sum(info.times.total for info in recent))

    @property
    def mean_samples_per_s(self) -> float:
        return _ratio(self.num_samples, self.times.total)

    @property
    def share_in_communication(self) -> float:
        """The part of the recent steps spent in exchange and waiting, from 0 to 1."""
        recent = list(self._recent)  # another thread may add meanwhile
        talking = sum(info.times.exchange + info.times.waiting for info in recent)
        return _ratio(talking, sum(info.times.total for info in recent))


class SpentReports:
    """Tells what this member does with its time, so that nobody has to guess it from another's."""

    def __init__(self, tell: Callable[[SpentEvent], None]) -> None:
        self._tell, self._began = tell, 0.0
        self._since = self._due = self._cpu_s = 0.0
        self._num_steps, self._spent = 0, NO_TIME

    def add(self, info: StepInfo) -> None:
        """A hook of steps."""
        now = monotonic()
        if not self._began:
            self._start(now - info.times.total)
        (a, b, c, d), (data, compute, exchange, waiting) = self._spent, info.times
        self._spent = Times(a + data, b + compute, c + exchange, d + waiting)
        self._num_steps += 1
        if now >= self._due:
            self._report(now)

    def flush(self) -> None:
        """The last step was made."""
        if self._num_steps:
            self._report(monotonic())

    def serve(self) -> None:
        """A server calls it again and again: the time of its processor counts as computing."""
        now = monotonic()
        if not self._began:
            self._start(now)
        elif now >= self._due:
            computed = min(process_time() - self._cpu_s, now - self._since)
            self._spent = Times(0.0, computed, 0.0, now - self._since - computed)
            self._report(now)

    def _start(self, began: float) -> None:
        self._began, self._since, self._cpu_s = began, began, process_time()
        self._due = began + SPENT_FIRST_S

    def _report(self, now: float) -> None:
        spent = {name: round(value, 6) for name, value in self._spent._asdict().items()}
        self._tell(SpentEvent(since_s=round(now - self._since, 6), steps=self._num_steps, **spent))
        self._since, self._cpu_s = now, process_time()
        self._num_steps, self._spent = 0, NO_TIME
        age_s = now - self._began
        self._due = now + max(min(age_s, SPENT_EVERY_S), age_s / SPENT_REPORTS)


def memory_bytes() -> int:
    """The memory of this process that is resident now."""
    return int(psutil.Process().memory_info().rss)


def peak_memory_bytes() -> int:
    """The peak memory of this process.

    Linux counts it per program in /proc. `ru_maxrss`, used elsewhere, may still hold the peak of
    the process that started this one.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def shared_memory_bytes() -> int:
    """What of this process's memory other processes have as well, by their shares of it (PSS): of
    its own it has so much less than `peak_memory_bytes`. 0 where the kernel does not tell."""
    found = _mapped_bytes()
    return found["Rss"] - found["Pss"] if found else 0


def own_and_shared_bytes() -> tuple[int, int] | None:
    """The peak of what is this process's alone, and what others have as well. None as above."""
    found = _mapped_bytes()
    own = sum(size for name, size in found.items() if name.startswith("Private_"))
    before = max(0, peak_memory_bytes() - found["Rss"]) if found else 0
    return (own + before, found["Rss"] - own) if found else None


def _mapped_bytes() -> dict[str, int]:
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return {}
    rows = (line.partition(":") for line in lines[1:])
    return {name: int(rest.split()[0]) * 1024 for name, _, rest in rows}


def memory_limit_bytes(root: Path = Path("/")) -> int | None:
    """The memory limit of the container (cgroup); None without a limit."""
    limits = [int(text) for text in _cgroup_texts(root, "memory.max") if text != "max"]
    old = root / "sys/fs/cgroup/memory/memory.limit_in_bytes"
    if old.exists():
        limits.append(int(old.read_text()))
    limit = min(limits, default=None)
    return None if limit is None or limit >= 2**60 else limit  # the first version's "no limit"


def memory_left_bytes(root: Path = Path("/")) -> int | None:
    """The memory left below the limit, counting what the kernel can drop; None without a limit.

    The kernel drops pages of files that were not used lately, such as a journal's.
    """
    found = []
    for group in _cgroups(root):
        found.append(_left(group, "memory.max", "memory.current", "inactive_file"))
    old = root / "sys/fs/cgroup/memory"
    names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    found.append(_left(old, *names))
    return min((left for left in found if left is not None), default=None)


def _left(group: Path, limit: str, used: str, dropped: str) -> int | None:
    """By the file names of a cgroup version, and a line of its `memory.stat`."""
    try:
        most, now = (group / limit).read_text().strip(), int((group / used).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return None  # no such group, or one that counts nothing
    if most == "max" or int(most) >= 2**60:
        return None
    return max(0, int(most) - now + int(stat.get(dropped, 0)))


def cpu_limit(root: Path = Path("/")) -> float | None:
    """The CPU limit of the container in cores; None without a limit."""
    pairs = [text.split() for text in _cgroup_texts(root, "cpu.max")]
    limits = [int(quota) / int(period) for quota, period in pairs if quota != "max"]
    return min(limits, default=None)


def _cgroup_texts(root: Path, name: str) -> list[str]:
    """The file `name` of this process's cgroups (version 2)."""
    files = [group / name for group in _cgroups(root)]
    return [file.read_text().strip() for file in files if file.exists()]


def _cgroups(root: Path) -> list[Path]:
    """This process's cgroup and its parents (version 2)."""
    membership = root / "proc/self/cgroup"
    if not membership.exists():
        return []
    own = [line[3:] for line in membership.read_text().splitlines() if line.startswith("0::")]
    top = root / "sys/fs/cgroup"
    groups = [top / part.lstrip("/") for part in own]
    around = [place for group in groups for place in (group, *group.parents)]
    return [place for place in around if place.is_relative_to(top)]


def _ratio(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0
