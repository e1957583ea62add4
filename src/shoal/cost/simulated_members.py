"""The members of a simulated run: production's membership, and processes that take their time.

`Membership` decides; each of its actions is carried out here by an event some seconds later, as the
supervisor and the members do it: a process is ready, all have arrived, a group has formed from the
step of those that hold the state, or else from the newest checkpoint. The supervisor is on the
first host: with that host the command ends, and is given again with `--resume`.

Above `_MOST_MEMBERS` ranks a member stands for the ranks of a host, which are lost together; a
process that ends alone then counts as if all of them had.
Read next: `elastic/membership.py`, `simulate.py`.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial, reduce
from itertools import groupby
from math import gcd, inf

import msgspec

from shoal.cluster.placement import place
from shoal.cost.step_timeline import Pace
from shoal.cost.work_log import SaveTimes, WorkLog
from shoal.elastic.actions import (
    Action,
    AllArrived,
    AllFormed,
    Announce,
    GiveUp,
    Kill,
    PauseRanks,
    RepartitionServers,
    Resized,
    Spawn,
)
from shoal.elastic.membership import Membership, MembershipOptions
from shoal.plans.plan import Plan
from shoal.plans.resize import RunSize, can_recover, size_rules, smaller_plan, with_size

_MOST_MEMBERS = 512
_KILLED = -9

Happens = Callable[[float], None]
PaceOf = Callable[[Plan, Mapping[int, int]], Pace]


class Durations(msgspec.Struct, frozen=True):
    """Of what happens beside steps, in seconds."""

    save: SaveTimes = SaveTimes()
    load_s: float = 0.0  # a checkpoint, by all ranks
    transfer_s: float = 0.0  # the state of a rank to another
    notice_s: float = 0.02  # from the end of a process to the news of it
    silence_s: float = 10.0  # from the end of a host to the news of it: --heartbeat-timeout
    form_s: float = 0.1  # a group, from the news to the exchange of state
    spawn_s: float = 0.5  # a process, where no spare stands by
    relaunch_s: float = 60.0  # the command once more, with --resume
    repair_s: float = 3600.0  # until a lost host, or one in its place, is there
    host_timeout_s: float = 600.0  # for which a run waits for another host


class MemberSettings(msgspec.Struct, frozen=True):
    """What a run is started with."""

    plan: Plan
    slots: dict[int, int]  # ranks that each host takes
    spares: int
    save_every: int | None
    takes: Durations
    shares: bool = False  # ranks of one host may hold parameters and state together


class SimulatedMembers:
    """`later` plans an event; `pace_of` is the pace of a plan with so many ranks on each host."""

    def __init__(
        self,
        given: MemberSettings,
        log: WorkLog,
        pace_of: PaceOf,
        later: Callable[[float, Happens], None],
    ):
        self._given, self._log, self._pace_of, self._later = given, log, pace_of, later
        self.counts: Counter[str] = Counter()  # of recoveries, restarts, resizes, launches
        self._up = {*given.slots}
        self._members: Membership | None = None  # None while no command runs
        self._may_launch_at = 0.0
        self._unit = 1  # ranks that a member stands for
        self._holders: set[int] = set()  # members of the last group that worked
        self._hosts: dict[int, int] = {}  # that take part, by the numbers that they were given
        self._host_of: dict[int, int] = {}  # of each member, the number of its host
        self._dead: set[int] = set()  # members, of some of which it is not known yet

    def launch(self, now: float) -> None:
        """Start the command, if it does not run, on the hosts that are up, if they have room."""
        if self._members is not None or now < self._may_launch_at:
            return
        slots = {host: self._given.slots[host] for host in sorted(self._up)}
        room, plan = sum(slots.values()), self._given.plan
        fitting = plan if room >= plan.num_ranks else smaller_plan(plan, room)
        if fitting is None:
            return  # until another host comes
        seats = place(fitting, slots)
        ranks, servers = seats[: fitting.num_ranks], seats[fitting.num_ranks :]
        self._unit = _unit_of(plan, Counter(ranks))
        ranks = tuple(sorted(ranks)[:: self._unit]) if self._unit > 1 else ranks
        self._hosts = dict(enumerate(slots))
        number = {host: n for n, host in self._hosts.items()}
        rules = size_rules(plan)
        counts = tuple(c // self._unit for c in rules.counts if c % self._unit == 0)
        options = MembershipOptions(
            num_spares=self._given.spares,
            hosts=tuple(number[host] for host in (*ranks, *servers)),
            slots={number[host]: max(1, slots[host] // self._unit) for host in slots},
            rules=rules._replace(counts=counts, replica=max(1, rules.replica // self._unit)),
            host_timeout_s=self._given.takes.host_timeout_s,
        )
        self._members = Membership(len(ranks), len(servers), options)
        self._holders, self._host_of, self._dead = set(), {}, set()
        self.counts["launches"] += 1
        self._act(self._members.start(now), now)

    def kill(self, seat: int, now: float) -> None:
        """The process in a seat ends by a signal."""
        if self._members is None:
            return
        num_ranks, seats = self._given.plan.num_ranks, self._members.seats
        index = seat // self._unit if seat < num_ranks else seat - num_ranks - len(seats)
        member = seats[index % len(seats)]
        if self._living([member]):
            assert member is not None
            self._log.stop(now)
            self._dead.add(member)
            self._after(now, self._given.takes.notice_s, partial(self._exited, [member]))

    def lose_host(self, host: int, now: float) -> None:
        self._up.discard(host)
        number = next((n for n, there in self._hosts.items() if there == host), None)
        if self._members is None or number is None:
            return
        if number == 0:  # the supervisor's
            self._end(now)
            return
        del self._hosts[number]
        if any(self._host_of.get(n) == number for n in self._members.seats if n is not None):
            self._log.stop(now)  # all wait for those that were there
        self._after(now, self._given.takes.silence_s, partial(self._host_lost, number))

    def add_host(self, host: int, now: float) -> None:
        self._up.add(host)
        if self._members is None:
            self.launch(now)
            return
        number = 1 + max([*self._host_of.values(), *self._hosts])
        self._hosts[number] = host
        room = max(1, self._given.slots[host] // self._unit)
        self._act(self._members.host_joined(number, room, now), now)
        self._after(now, self._log.next_saved_s(now), self._saved)

    # ---- what members and their supervisor do

    def _act(self, actions: Iterable[Action], now: float) -> None:
        """Carry decisions out. What is done to many members at once is one event."""
        takes = self._given.takes
        for _, group in groupby(actions, type):
            same = [*group]
            spawned = {action.member: action.host for action in same if isinstance(action, Spawn)}
            killed = [action.member for action in same if isinstance(action, Kill)]
            self._host_of.update(spawned)
            if spawned:
                self._after(now, takes.spawn_s, partial(self._ready, [*spawned]))
            elif killed:
                self._after(now, takes.notice_s, partial(self._exited, killed))
            else:
                for action in same:
                    self._do(action, now)

    def _do(self, action: Action, now: float) -> None:
        takes = self._given.takes
        match action:
            case Announce(generation, _):
                self._log.stop(now)
                self._after(now, takes.form_s, partial(self._arrived, generation))
            case AllArrived(generation):
                held = self._is_held()
                is_whole = self._members is None or self._holders.issuperset(self._members.seats)
                wait_s = takes.transfer_s if held else takes.load_s if self._log.saved else 0.0
                self._after(now, 0.0 if is_whole else wait_s, partial(self._formed, generation))
            case AllFormed():
                self._begin(action, now)
            case PauseRanks(generation):
                wait_s = self._log.last_pace.step_s if self._log.last_pace else 0.0
                self._after(now, wait_s, partial(self._paused, generation))
            case RepartitionServers(generation, _):
                self._after(now, takes.transfer_s, partial(self._paused, generation))
            case Resized():
                self.counts["resizes"] += 1
                self._after(now, 0.0, partial(self._exited, action.leavers, status=0))
            case GiveUp():
                self._end(now)

    def _ready(self, members: Collection[int], now: float) -> None:
        assert self._members is not None
        every = [] if self._given.save_every is None else [self._given.save_every]
        recovers = can_recover(self._given.plan, every)
        # The last first: then the membership, which looks for one that is not, finds it at once.
        for member in reversed(self._living(members)):
            self._act(self._members.ready(member, now, recovers), now)

    def _arrived(self, generation: int, now: float) -> None:
        assert self._members is not None
        for member in self._living(self._members.seats):
            self._act(self._members.arrived(member, generation), now)

    def _formed(self, generation: int, now: float) -> None:
        assert self._members is not None
        step = self._log.step if self._is_held() else self._log.saved
        plan, recovers = self._given.plan, None
        if plan.zero and plan.shares:  # which is known once they have tried
            hosts = {self._host_of[n] for n in self._members.seats if n is not None}
            recovers = self._given.shares and len(hosts) == 1
        for member in self._living(self._members.seats):
            self._act(self._members.has_formed(member, generation, step, now, recovers), now)

    def _begin(self, formed: AllFormed, now: float) -> None:
        """The group works; what its members do not hold is made again."""
        assert self._members is not None
        is_new = not self._holders
        if formed.replaced and not is_new:
            self.counts["recoveries" if self._is_held() else "restarts"] += 1
            if self._given.plan.local_steps > 1:  # a newcomer makes its window again
                self._log.roll_back(formed.step - formed.step % self._given.plan.local_steps)
        self._log.roll_back(formed.step)
        self._holders = {n for n in self._members.seats if n is not None}
        size = self._members.size
        plan = with_size(self._given.plan, RunSize(size.num_ranks * self._unit, size.num_servers))
        there = [self._hosts[self._host_of[n]] for n in self._members.seats if n is not None]
        counts = Counter(there[: size.num_ranks])
        pace = self._pace_of(plan, {host: n * self._unit for host, n in counts.items()})
        self._log.begin(now, pace)

    def _paused(self, generation: int, now: float) -> None:
        assert self._members is not None
        if generation != self._members.generation:
            return
        self._log.stop(now)
        for member in self._living(self._members.seats):
            self._act(self._members.paused(member, generation, self._log.step, now, ""), now)

    def _exited(self, members: Iterable[int], now: float, status: int = _KILLED) -> None:
        _tell_step(self._members, self._log.step, now)
        for member in members:
            if self._members is not None:
                self._act(self._members.exited(member, status, now), now)

    def _host_lost(self, number: int, now: float) -> None:
        assert self._members is not None
        _tell_step(self._members, self._log.step, now)
        self._act(self._members.host_lost(number, "was lost", now), now)
        if self._members is not None and self._members.is_waiting:
            limit_s = self._given.takes.host_timeout_s + 1
            self._after(now, limit_s, self._tick)

    def _tick(self, now: float) -> None:
        """No other host may have come in time, which ends the run."""
        assert self._members is not None
        if self._members.is_waiting:
            for member in self._members.members:  # they are alive
                self._members.heard(member, now)
            self._act(self._members.tick(now), now)

    def _saved(self, now: float) -> None:
        """A checkpoint is complete, from which a larger group may begin."""
        if self._members is None or not self._log.is_working:
            return
        if actions := self._members.saved(now):
            self._log.stop(now)
            self._act(actions, now)

    def _end(self, now: float) -> None:
        """The command ended; it is given again, as soon as hosts have room for it."""
        self._log.stop(now)
        self._log.roll_back(self._log.saved)
        self._members, self._may_launch_at = None, now + self._given.takes.relaunch_s
        self._later(self._may_launch_at, self.launch)

    # ---- what they know

    def _after(self, now: float, wait_s: float, do: Happens) -> None:
        """Later, unless the command has ended by then. The first group forms at once."""
        members = self._members

        def happen(at: float) -> None:
            if self._members is members:
                do(at)

        if wait_s < inf:
            is_first = self.counts["launches"] == 1 and not self._holders
            self._later(now + (0.0 if is_first else wait_s), happen)

    def _is_held(self) -> bool:
        """Whether a rank of the new group holds the state."""
        assert self._members is not None
        ranks = self._members.seats[: self._members.size.num_ranks]
        return not self._holders.isdisjoint(ranks)

    def _living(self, members: Iterable[int | None]) -> list[int]:
        """Those that can still say something: neither they nor their hosts are lost."""
        known = [n for n in members if n is not None and n not in self._dead]
        return [n for n in known if self._host_of[n] in self._hosts]


def _tell_step(members: Membership | None, step: int, now: float) -> None:
    """Members have told of their steps before the supervisor hears of a loss."""
    seated = [] if members is None else [n for n in members.seats if n is not None]
    if members is not None and seated:
        members.heard(seated[0], now, step)


def _unit_of(plan: Plan, ranks_of_host: Mapping[int, int]) -> int:
    """How many ranks a member stands for: 1, or of a large run those of a host."""
    replica = plan.tensor * plan.pipeline
    shared = reduce(gcd, ranks_of_host.values())
    is_whole = shared % replica == 0 or replica % shared == 0
    return shared if plan.num_ranks > _MOST_MEMBERS and is_whole else 1
