"""The local queue without processes: jobs that arrive, run and end in time that is only counted.

It does what the agent does with what the policy decides, and checks after each tick that no core is
given out twice and that each run has a size that it can have.
"""

from typing import NamedTuple

from shoal.cluster.local_queue.policy import (
    ActiveJob,
    QueuedJob,
    StartJob,
    decide,
    turn,
)
from shoal.cluster.slots import Cores


class SimulatedJob(NamedTuple):
    """A job: when it comes, what it needs, and how long it then runs, in ticks."""

    job: int
    at: int
    priority: int
    cores: int
    ticks: int
    sizes: tuple[int, ...]  # below `cores` that it can shrink to


class _Running:
    def __init__(self, job: SimulatedJob, cores: Cores):
        self.job, self.cores, self.left = job, cores, job.ticks
        self.full = len(cores)
        self.target: Cores | None = None
        self.answer_in = 0

    def as_active(self) -> ActiveJob:
        target = self.target or ()
        both = tuple(dict.fromkeys((*self.cores, *target)))
        sizes = (*[size for size in self.job.sizes if size < self.full], self.full)
        freeing = max(0, len(self.cores) - len(target)) if target else 0
        asked = self.target is not None
        return ActiveJob(self.job.job, self.job.priority, both, sizes, asked, freeing)


class Simulation:
    """Runs jobs to their end; `answer_ticks` is how long a resize takes."""

    def __init__(self, num_cores: int, jobs: list[SimulatedJob], most: int, answer_ticks: int):
        self.cores, self.jobs, self.most = list(range(num_cores)), jobs, most
        self.answer_ticks = answer_ticks
        self.running: dict[int, _Running] = {}
        self.waiting: dict[int, SimulatedJob] = {}
        self.started: dict[int, int] = {}
        self.ended: dict[int, int] = {}
        self.overtaken: list[tuple[int, int]] = []
        self.now = 0

    def run(self) -> None:
        """Until all jobs have ended."""
        limit = 2 * sum(job.ticks + self.answer_ticks + 2 for job in self.jobs) + 200
        arrivals = sorted(self.jobs, key=lambda job: job.at)
        while len(self.ended) < len(self.jobs):
            assert self.now < limit + arrivals[-1].at, "a job never ends"
            for job in arrivals:
                if job.at == self.now:
                    self.waiting[job.job] = job
            self.tick()
            self.now += 1

    def tick(self) -> None:
        for job in list(self.running):
            one = self.running[job]
            one.left -= 1
            if one.left <= 0:
                del self.running[job]
                self.ended[job] = self.now
                continue
            one.answer_in -= 1
            if one.target is not None and one.answer_in <= 0:
                one.cores, one.target = one.target, None
        self.follow()
        self.check()

    def follow(self) -> None:
        queued = [QueuedJob(j.job, j.priority, j.cores) for j in self.waiting.values()]
        active = [one.as_active() for one in self.running.values()]
        for decision in decide(self.cores, active, queued, self.most):
            if isinstance(decision, StartJob):
                job = self.waiting.pop(decision.job)
                own = QueuedJob(job.job, job.priority, job.cores)
                ahead = [one for one in queued if turn(one) < turn(own) and one.job in self.waiting]
                self.overtaken += [(one.job, job.job) for one in ahead]
                assert len(decision.cores) == min(job.cores, len(self.cores)), "not all of a gang"
                self.running[job.job] = _Running(job, decision.cores)
                self.started[job.job] = self.now
            else:
                one = self.running[decision.job]
                assert one.target is None, "it was asked already"
                one.target, one.answer_in = decision.cores, self.answer_ticks

    def check(self) -> None:
        held = [core for one in self.running.values() for core in one.as_active().cores]
        assert len(held) == len(set(held)) <= len(self.cores), "a core is given out twice"
        assert len(self.running) <= self.most
        for one in self.running.values():
            assert len(one.cores) in one.as_active().sizes
