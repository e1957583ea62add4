"""A run of many hours, simulated: failures, recoveries, saves and stragglers.

Discrete events, over the functions that decide in production: `elastic/membership.py` says who
takes which seat after a loss and whether all begin again, `plans/resize.py` to which size a run
goes, `cluster/placement.py` who is on which host, `training/run.py` when a save is due,
`data/balance.py` where work moves, `sync/server/clock.py` who may run ahead. A step is simulated in
detail (`step_timeline.py`) when the group or its hosts change; until the next event the run
advances by equal steps at once.

Not modelled: other work on the hosts, congestion, evaluation, a disk that fills up. Cost: a
second for a day of a hundred ranks, less than a minute for ten thousand. Deterministic by its seed.
Read next: `simulated_members.py`, `work_log.py`, `docs/how-to/simulate.md`.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from heapq import heappop, heappush
from typing import Any

import msgspec
import numpy as np

from shoal.cluster.placement import place
from shoal.cost.prediction import StepTimes
from shoal.cost.simulated_members import Durations, MemberSettings, SimulatedMembers
from shoal.cost.step_timeline import Pace, Slowness, Span, gantt, pace_of
from shoal.cost.work_log import TimeLost, WorkLog
from shoal.plans.plan import Plan

_DRAWS = 32  # steps that a distribution of stragglers is judged by
_MONTH_S = 30 * 24 * 3600.0

_USUAL = Durations()

TimesOf = Callable[[Plan], StepTimes]


class Conditions(msgspec.Struct, frozen=True):
    """How long a run is watched, what disturbs it, and what it does against that."""

    hours: float
    seed: int = 0
    save_every: int | None = None
    spares: int = 1  # of each host
    jitter: float = 0.0  # standard deviation of a rank's time for a step, as a share of it
    slow_ranks: dict[int, float] = {}  # how many times as long they take
    slow_links: dict[int, float] = {}  # the same of the messages of a host
    failures_per_month: float = 0.0  # of one host
    kills_per_month: float = 0.0  # of one rank or server: its process alone
    kills: tuple[tuple[float, int], ...] = ()  # (second, seat), beside those that are drawn


class HostRooms(msgspec.Struct, frozen=True):
    """The hosts that a run may have: ranks that each takes, how slow its devices are, as times of
    the predicted seconds, and whether its ranks may hold parameters and state together."""

    slots: dict[int, int]
    slowness: dict[int, float] = {}
    shares: bool = False


class Repairs(msgspec.Struct, frozen=True):
    """What followed the failures."""

    recoveries: int  # in place
    restarts: int  # of all ranks, from a checkpoint
    relaunches: int  # of the command


class Simulation(msgspec.Struct, frozen=True):
    """What became of a run in so many hours."""

    plan: str
    hours: float
    steps: int  # that last
    step_s: float  # mean, while steps were made
    undisturbed_step_s: float
    goodput: float  # what was trained, as a share of what an undisturbed run trains
    bubble: float
    waiting: float
    failures: int  # hosts and processes lost
    repairs: Repairs
    lost: TimeLost
    goodput_over_time: list[tuple[float, float]]  # (hour, goodput since the one before)
    staleness: dict[str, Any] | None
    rounds: list[int]  # of each replica, at the end
    spans: list[Span]  # of a step at the beginning


def simulate(
    plan: Plan,
    times_of: TimesOf,
    at: HostRooms,
    conditions: Conditions,
    durations: Durations = _USUAL,
) -> Simulation:
    """Simulate a resolved plan; `times_of` says what a step of the plan takes, and of the same plan
    with another size. PlanError if the place is too small for it."""
    return _SimulatedRun(plan, times_of, at, conditions, durations).run(at.slots)


class _Paces:
    """The pace of a group on its hosts; each is simulated once."""

    def __init__(
        self,
        plan: Plan,
        times_of: TimesOf,
        at: HostRooms,
        conditions: Conditions,
    ):
        self.times_of, self._at, self._given = times_of, at, conditions
        # A rank is slow for its device, which stays when its process or its number changes.
        self._slow: dict[tuple[int, int], float] = {}
        seen: Counter[int] = Counter()
        for rank, host in enumerate(place(plan, at.slots)[: plan.num_ranks]):
            if rank in conditions.slow_ranks:
                self._slow[host, seen[host]] = conditions.slow_ranks[rank]
            seen[host] += 1
        self._known: dict[tuple[str, tuple[tuple[int, int], ...]], Pace] = {}

    def of(self, plan: Plan, ranks_of_host: Mapping[int, int]) -> Pace:
        key = str(plan), tuple(sorted(ranks_of_host.items())) if self._is_uneven else ()
        if key not in self._known:
            slow = self.slowness(plan, ranks_of_host)
            self._known[key] = pace_of(plan, self.times_of(plan), slow)
        return self._known[key]

    @property
    def _is_uneven(self) -> bool:
        return bool(self._at.slowness or self._slow or self._given.slow_links)

    def slowness(self, plan: Plan, ranks_of_host: Mapping[int, int]) -> Slowness:
        """By draw, replica and pipeline rank; ranks of the tensor axis wait for their slowest."""
        shape = plan.pipeline, plan.num_replicas, plan.tensor  # the mesh's order of ranks
        compute, links = np.ones(plan.num_ranks), np.ones(plan.num_ranks)
        if self._is_uneven:
            seen: Counter[int] = Counter()
            for rank, host in enumerate(place(plan, ranks_of_host)[: plan.num_ranks]):
                own = self._slow.get((host, seen[host]), 1.0)
                compute[rank] = own * self._at.slowness.get(host, 1.0)
                links[rank] = self._given.slow_links.get(host, 1.0)
                seen[host] += 1
        by_place = compute.reshape(shape)[None]
        if self._given.jitter:
            # Replicas that meet after several steps wait for their mean only.
            variance = math.log1p(self._given.jitter**2 / plan.local_steps)
            draws = np.random.default_rng(self._given.seed).normal(size=(_DRAWS, *shape))
            by_place = by_place * np.exp(math.sqrt(variance) * draws - variance / 2)
        slow = by_place.max(axis=3).transpose(0, 2, 1)
        far = np.broadcast_to(links.reshape(shape).max(axis=2).T[None], slow.shape)
        return Slowness(slow, far)


class _Failures:
    """When hosts and processes end: exponential, each host with draws of its own, so that a higher
    rate moves the same failures forward."""

    def __init__(self, given: Conditions):
        self._given = given
        self._draws: dict[int, np.random.Generator] = {}

    def host_lasts_s(self, host: int) -> float:
        if not self._given.failures_per_month:
            return math.inf
        return self._draw(host).exponential() * _MONTH_S / self._given.failures_per_month

    def next_kill(self, num_seats: int) -> tuple[float, int]:
        """After how long a process ends, and its seat."""
        if not self._given.kills_per_month:
            return math.inf, 0
        draws = self._draw(-1)
        after_s = draws.exponential() * _MONTH_S / (self._given.kills_per_month * num_seats)
        return after_s, int(draws.integers(num_seats))

    def _draw(self, host: int) -> np.random.Generator:
        if host not in self._draws:
            self._draws[host] = np.random.default_rng([self._given.seed, host + 1])
        return self._draws[host]


class _SimulatedRun:
    """One run: a queue of events, its members, and the log of its work."""

    def __init__(
        self, plan: Plan, times_of: TimesOf, at: HostRooms, given: Conditions, takes: Durations
    ):
        self.plan, self.given, self.takes = plan, given, takes
        self.hosts = Counter(place(plan, at.slots)[: plan.num_ranks])
        self.paces = _Paces(plan, times_of, at, given)
        smooth = Conditions(hours=given.hours)
        self.ideal = _Paces(plan, times_of, at, smooth).of(plan, self.hosts)
        self.log = WorkLog(self.ideal.step_s, given.save_every, takes.save)
        saves = given.save_every
        settings = MemberSettings(plan, at.slots, given.spares, saves, takes, at.shares)
        self.members = SimulatedMembers(settings, self.log, self.paces.of, self.later)
        self.failures, self.num_failures = _Failures(given), 0
        self.end_s = given.hours * 3600
        self._queue: list[tuple[float, int, Callable[[float], None]]] = []
        self._num_planned = 0

    def run(self, slots: Mapping[int, int]) -> Simulation:
        self.members.launch(0.0)
        for host in slots:
            self._expect_loss(host, 0.0)
        for second, seat in self.given.kills:
            self.later(second, partial(self._kill, seat))
        self._expect_kill(0.0)
        while self._queue and self._queue[0][0] < self.end_s:
            now, _, do = heappop(self._queue)
            do(now)
        self.log.stop(self.end_s)
        return self._result()

    def later(self, at: float, do: Callable[[float], None]) -> None:
        self._num_planned += 1  # events of one moment happen in the order of their planning
        heappush(self._queue, (at, self._num_planned, do))

    def _expect_loss(self, host: int, now: float) -> None:
        after_s = self.failures.host_lasts_s(host)
        if after_s < math.inf:
            self.later(now + after_s, partial(self._lose_host, host))

    def _lose_host(self, host: int, now: float) -> None:
        self.num_failures += 1
        self.members.lose_host(host, now)
        self.later(now + self.takes.repair_s, partial(self._add_host, host))

    def _add_host(self, host: int, now: float) -> None:
        self._expect_loss(host, now)
        self.members.add_host(host, now)

    def _expect_kill(self, now: float) -> None:
        after_s, seat = self.failures.next_kill(self.plan.num_ranks + self.plan.num_serving)
        if after_s < math.inf:
            self.later(now + after_s, partial(self._kill_and_expect, seat))

    def _kill_and_expect(self, seat: int, now: float) -> None:
        self._kill(seat, now)
        self._expect_kill(now)

    def _kill(self, seat: int, now: float) -> None:
        self.num_failures += 1
        self.members.kill(seat, now)

    def _result(self) -> Simulation:
        log, counts, first = self.log, self.members.counts, self.paces.of(self.plan, self.hosts)
        last = log.last_pace or first
        slow = self.paces.slowness(self.plan, self.hosts)
        return Simulation(
            plan=str(self.plan),
            hours=self.given.hours,
            steps=log.lasting_steps,
            step_s=log.mean("step_s"),
            undisturbed_step_s=self.ideal.step_s,
            goodput=log.lasting_steps * self.ideal.step_s / self.end_s,
            bubble=log.mean("bubble"),
            waiting=log.mean("waiting"),
            failures=self.num_failures,
            repairs=Repairs(
                recoveries=counts["recoveries"],
                restarts=counts["restarts"],
                relaunches=max(0, counts["launches"] - 1),
            ),
            lost=log.lost(self.end_s),
            goodput_over_time=log.goodput_over_time(self.end_s),
            staleness=None if last.staleness is None else last.staleness.summary(),
            rounds=list(last.counts),
            spans=gantt(self.plan, self.paces.times_of(self.plan), slow, first),
        )
