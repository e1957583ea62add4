"""Which jobs start, shrink and grow. Pure: what runs, what waits and the cores in, decisions out.

Claims are served in the order of priority, then of submission. A waiting job claims all cores that
it needs, or none: if they are not free, nothing behind it starts, so no job is overtaken by one
that would delay it, and none waits for ever behind smaller ones. A run that was shrunk claims its
cores back at its own place in that order.

If the first waiting job lacks cores, elastic runs of a lower priority are asked to shrink, if that
makes enough room: those of the lowest priority first, and of these the newest. None is ever ended
for another. A stream of urgent jobs without an end keeps the others waiting; that is what a
priority says. Read next: `../slots.py`, which gives out cores; `agent.py`, which does what is
decided.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shoal.cluster.slots import CoreRequest, Cores, HeldCores, assign_cores


class QueuedJob(NamedTuple):
    """A job that waits for all of its cores."""

    job: int  # in the order of submission
    priority: int
    cores: int


class ActiveJob(NamedTuple):
    """A job that runs. `sizes` are the numbers of cores that it can have, in rising order; one that
    cannot be resized has one size. `freeing` cores are about to come back, `is_asked` if it is
    being resized."""

    job: int
    priority: int
    cores: Cores
    sizes: tuple[int, ...]
    is_asked: bool = False
    freeing: int = 0


class StartJob(NamedTuple):
    """Start a waiting job on these cores."""

    job: int
    cores: Cores


class ResizeJob(NamedTuple):
    """Ask a run for another size: these are all of its cores then."""

    job: int
    cores: Cores


Decision = StartJob | ResizeJob


def turn(job: QueuedJob | ActiveJob) -> tuple[int, int]:
    """What jobs are ordered by."""
    return -job.priority, job.job


def decide(
    cores: Sequence[int],
    active: Sequence[ActiveJob],
    queued: Sequence[QueuedJob],
    most_running: int,
) -> list[Decision]:
    """What to do now; the same again once that is done."""
    decisions: list[Decision] = []
    held = {one.job: one.cores for one in active}
    shrunk = [one for one in active if not one.is_asked and len(one.cores) < one.sizes[-1]]
    claims: list[QueuedJob | ActiveJob] = [*queued, *shrunk]
    for claim in sorted(claims, key=turn):
        running = [HeldCores(job, own, len(own)) for job, own in held.items()]
        if isinstance(claim, ActiveJob):
            grown = _grow(cores, running, claim)
            if grown != claim.cores:
                held[claim.job] = grown
                decisions.append(ResizeJob(claim.job, grown))
            continue
        request = CoreRequest(claim.job, claim.cores, claim.cores)
        started = assign_cores(cores, running, [request], most_running).started
        if claim.job not in started:
            if len(held) < most_running:
                missing = min(claim.cores, len(cores)) - _num_free(cores, held.values())
                decisions += _shrink(active, claim.priority, missing)
            break
        held[claim.job] = started[claim.job]
        decisions.append(StartJob(claim.job, started[claim.job]))
    return decisions


def _num_free(cores: Sequence[int], held: Iterable[Cores]) -> int:
    return len(set(cores) - {core for own in held for core in own})


def _grow(cores: Sequence[int], running: list[HeldCores], claim: ActiveJob) -> Cores:
    """The cores of a run that takes back what is free, as far as a size fits."""
    num_free = _num_free(cores, [one.cores for one in running])
    fitting = [size for size in claim.sizes if size <= len(claim.cores) + num_free]
    most = max(fitting, default=0)
    asking = [one._replace(most=most) if one.run == claim.job else one for one in running]
    return assign_cores(cores, asking, [], len(asking)).grown.get(claim.job, claim.cores)


def _shrink(active: Sequence[ActiveJob], priority: int, missing: int) -> list[Decision]:
    """Runs of a lower priority to shrink, so that so many cores come free; none if they cannot."""
    missing -= sum(one.freeing for one in active)
    decisions: list[Decision] = []
    for one in sorted(active, key=turn, reverse=True):
        smaller = [size for size in one.sizes if size < len(one.cores)]
        if missing <= 0 or one.is_asked or one.priority >= priority or not smaller:
            continue
        enough = [size for size in smaller if len(one.cores) - size >= missing]
        size = max(enough, default=smaller[0])
        missing -= len(one.cores) - size
        decisions.append(ResizeJob(one.job, one.cores[:size]))
    return decisions if missing <= 0 else []
