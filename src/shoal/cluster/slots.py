"""Which cores each of several runs gets. Pure: requests and what is held in, an assignment out.

Runs are started in the order in which they asked. One that does not fit yet is waited for: nothing
that came later takes the cores it needs, so no run waits for ever. Cores that no job waits for go
to the runs that can use more than they have, one by one, to the smallest first. A run that needs
more cores than there are gets all of them, alone.

Cores are numbers; whether they are of this machine or of several hosts is the caller's to know.
Read next: `tuning/driver.py`, which starts trials by it.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

Cores = tuple[int, ...]


class CoreRequest(NamedTuple):
    """What a run needs: `least` cores to start, and no more than `most`."""

    run: int
    least: int
    most: int


class HeldCores(NamedTuple):
    """The cores of a run under way, and how many it could use."""

    run: int
    cores: Cores
    most: int


class CoreAssignment(NamedTuple):
    """The cores of runs to start, and all the cores of those that get more."""

    started: Mapping[int, Cores]
    grown: Mapping[int, Cores]


def assign_cores(
    cores: Sequence[int],
    running: Sequence[HeldCores],
    waiting: Sequence[CoreRequest],
    most_runs: int,
) -> CoreAssignment:
    """Who starts now, on which cores, and who gets more; at most `most_runs` are under way then."""
    held = {core for run in running for core in run.cores}
    free = [core for core in cores if core not in held]
    begun: list[HeldCores] = []
    for request in waiting[: max(0, most_runs - len(running))]:
        needed = max(1, min(request.least, len(cores)))
        if needed > len(free):
            return CoreAssignment({run.run: run.cores for run in begun}, {})
        begun.append(HeldCores(request.run, tuple(free[:needed]), request.most))
        free = free[needed:]
    shared = _share(free, [*begun, *running])
    return CoreAssignment(
        {run.run: shared[run.run] for run in begun},
        {run.run: shared[run.run] for run in running if shared[run.run] != run.cores},
    )


def _share(free: Sequence[int], runs: Sequence[HeldCores]) -> dict[int, Cores]:
    """What each has when the free cores are dealt, the next one always to the smallest."""
    shared = {run.run: run.cores for run in runs}
    for core in free:
        hungry = [run.run for run in runs if len(shared[run.run]) < run.most]
        if not hungry:
            break
        smallest = min(hungry, key=lambda run: len(shared[run]))
        shared[smallest] += (core,)
    return shared
