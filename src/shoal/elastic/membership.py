"""Which member has which seat in which generation: the supervisor's decisions, as pure state.

`Membership` receives events (`ready`, `exited`, `heard`, ...) with their times, and returns the
actions to carry out. It reads no clock and starts no process, so it is tested under random
schedules. Its rules:

- only the supervisor numbers generations, and each has all seats filled;
- a suspect is killed before its seat is reassigned, so that it cannot act in two generations;
- a seat stays on its host, which has spares of its own;
- a group forms only after all members have reported that they left the one before;
- a member killed by a signal is replaced; one that exits by itself ends the run;
- where no rank has a copy of another's state, all are killed and resume from the newest checkpoint;
- three groups lost without a step between them (where all resume from a checkpoint: without
  another checkpoint), or three spares, end the run instead of looping;
- a resize reassigns seats only once newcomers are ready and all members wait after the same step: a
  failure before that leaves the old size, one after it the new size.

Read next: `actions.py`, then `supervisor.py`, which carries them out.
"""

from typing import NamedTuple

from shoal.elastic.actions import (
    Action,
    AllArrived,
    AllDone,
    AllFormed,
    Announce,
    GiveUp,
    Kill,
    NotResized,
    PauseRanks,
    RepartitionServers,
    Resized,
)
from shoal.elastic.failures import ECHO_S, MOST_FAILURES, FailureCounter, describe_missing
from shoal.elastic.resize_barrier import ResizeBarrier, Seats, assign_seats, num_newcomers
from shoal.elastic.roster import Roster
from shoal.plans.resize import RunSize, host_of
from shoal.system.processes import describe_exit


class MembershipOptions(NamedTuple):
    """How many processes there are beside the seats, and how long is waited for each."""

    num_spares: int = 1  # of each host
    num_hosts: int = 1
    hosts: tuple[int, ...] = ()  # of each seat, if there are several
    heartbeat_timeout_s: float = 10.0
    form_timeout_s: float = 30.0
    regroup_after_s: float = 2.0
    # Members run the user's program, which may train several times or never, and are done when
    # it exits.
    scripts: bool = False


_DEFAULTS = MembershipOptions()


class Membership:
    """The seats of ranks and servers, and the members in them. A pure state machine."""

    def __init__(
        self, num_ranks: int, num_servers: int = 0, options: MembershipOptions = _DEFAULTS
    ):
        """Parameter servers have the last seats."""
        self.sizes = [RunSize(num_ranks, num_servers)]  # of the run so far, the last one now
        self.options = options
        self.recovers = True
        self.generation = -1
        self.step = 0
        self.over = False
        self._roster = Roster(sorted({*options.hosts}) or range(options.num_hosts))
        self.members = self._roster.members
        self.seats: Seats = []
        self._announced: Seats = []  # in the newest generation
        self.formed: set[int] = set()  # members in the working group
        self._arrived: set[int] = set()
        self._done: set[int] = set()
        self._replaced: list[tuple[int, str]] = []
        self._formed_at = -1  # the step that the group being formed starts from
        self._failures = FailureCounter()
        self._spares_lost = 0  # without a step between them
        self._wants_group = True  # a new group must form
        self._scripts_ended: set[int] = set()  # members whose script exited with 0
        self._lost_at: float | None = None  # when the loss being repaired was first known
        self._broken_at: float | None = None  # when a member of this generation reported it
        self._why_broken = ""
        self._deadline: float | None = None  # by which all must have arrived
        # An error, which a peer's death may have caused, and its time.
        self._failed: tuple[GiveUp, float] | None = None
        self._wanted_size: RunSize | None = None  # of the resize under way
        self._wanted_by = 0.0  # the deadline for newcomers to be ready
        self._repartitions = False  # whether servers write their state for it
        self._barrier = ResizeBarrier()  # of this generation
        self._leaving: set[int] = set()  # members that lost their seats by a resize
        self._last_ranks: list[int] = []  # members that were ranks before the last resize
        self._pending_barrier: ResizeBarrier | None = None  # until the resized group has formed

    @property
    def size(self) -> RunSize:
        return self.sizes[-1]

    @property
    def num_spares(self) -> int:
        """Of each host."""
        return self.options.num_spares if self.recovers else 0

    @property
    def num_seats(self) -> int:
        return sum(self.size)

    @property
    def finished(self) -> frozenset[int]:
        """Members that have nothing left to do in this generation."""
        return frozenset(self._done)

    @property
    def is_resizing(self) -> bool:
        return self._wanted_size is not None or self._pending_barrier is not None

    def start(self, now: float) -> list[Action]:
        spawns = [self._roster.spawn(now, self._host_of(seat)) for seat in range(self.num_seats)]
        self.seats = [spawn.member for spawn in spawns]
        return [*spawns]

    def heard(self, member: int, now: float, step: int = -1) -> None:
        """Any message counts as a sign of life."""
        if member in self.members:
            self.members[member].last_heard = now
            self._advance(step)

    def ready(self, member: int, now: float, recovers: bool = True) -> list[Action]:
        """A member can take a seat. If it cannot be replaced, no member of the run is."""
        if member not in self.members:
            return []
        self.members[member].ready = True
        if not recovers:
            self.recovers = False
        if self._deadline is None and self._wants_group:
            self._deadline = now + self.options.form_timeout_s
        return [*self._fill_seats(now), *self._continue_resize(now)]

    def arrived(self, member: int, generation: int) -> list[Action]:
        if generation != self.generation or member not in self.seats:
            return []
        self._arrived.add(member)
        if self._arrived != set(self.seats):
            return []
        self._deadline = None  # what follows may load a checkpoint, and has its own limits
        return [AllArrived(generation)]

    def has_formed(self, member: int, generation: int, step: int, now: float) -> list[Action]:
        if generation != self.generation or member not in self.seats:
            return []
        self.formed.add(member)
        self._advance(step)
        step = self._formed_at = max(self._formed_at, step)  # a server has none of its own
        if self.formed != set(self.seats):
            return []
        self._wants_group, self._failed = False, None
        if given_up := self._check_failures(self._failures.formed(step)):
            return given_up
        again, self.step = self.step - step, step
        formed = AllFormed(generation, step, again, tuple(self._replaced), self._lost_at)
        self._replaced, self._lost_at = [], None
        actions: list[Action] = [formed]
        if self._pending_barrier is not None:
            paused, leavers = self._pending_barrier, tuple(sorted(self._leaving))
            actions.append(Resized(self.sizes[-2], self.size, leavers, paused.since, paused.step))
            self._pending_barrier = None
        return [*actions, *self._refill_spares(now), *self._continue_resize(now)]

    def resize(self, size: RunSize, now: float, repartitions: bool) -> list[Action]:
        """Change the size once all ranks wait after a step and, with `repartitions`, servers wrote
        their files."""
        assert not self.is_resizing and not self.options.scripts
        self._wanted_size, self._repartitions = size, repartitions
        self._wanted_by = now + self.options.form_timeout_s
        return self._continue_resize(now)

    def paused(self, member: int, generation: int, step: int, now: float, why: str) -> list[Action]:
        """A rank waits after the agreed step; or a server wrote its files, or could not (`why`)."""
        if generation != self.generation or member not in self.seats or self.over:
            return []
        self._barrier.add(member, step, now)
        given_up = self._cancel_resize(why) if why else []
        return [*given_up, *self._continue_resize(now)]

    def lost(self, member: int, generation: int, now: float, why: str = "") -> None:
        """A member's group broke. If no member is found dead soon, the same members form again."""
        if generation == self.generation and member in self.seats:
            self._lost_at = now if self._lost_at is None else self._lost_at
            if self._broken_at is None:
                self._broken_at, self._why_broken = now, why

    def failed(self, member: int, cause: str, exit_code: int, now: float) -> list[Action]:
        """A member's program raised. Where ranks compute together, a peer's death may be the cause,
        which is then known soon."""
        if self.over or member not in self.members:
            return []
        if self.recovers or self.options.scripts:
            return self._give_up(cause, exit_code)
        if self._failed is None:
            self._failed = GiveUp(cause, exit_code), now
        return []

    def done(self, member: int, generation: int) -> list[Action]:
        if generation != self.generation or member not in self.seats:
            return []
        self._done.add(member)
        if self._done != set(self.seats):
            return []
        if self.options.scripts:  # another training may follow
            self._wants_group, self.formed, self.step, self._announced = True, set(), 0, []
            self._failures.reset()
            self._spares_lost = 0
            for number in self._done:
                self.members[number].ready = False
        self.over = not self.options.scripts
        return [AllDone()]

    def exited(self, member: int, status: int, now: float) -> list[Action]:
        """A process ended: `status` is its exit code, or minus the signal that killed it."""
        gone = self.members.pop(member, None)
        if gone is None or self.over:
            return []
        if member in self._leaving:
            self._leaving.remove(member)
            return []
        if member not in self.seats:
            return self._spare_exited(status, now)
        if self.options.scripts and status == 0 and member not in self.formed:
            return self._script_ended(member)
        seat = self.seats.index(member)
        cause = gone.suspected or describe_exit(status)
        if status >= 0 and not gone.suspected:
            code = status if self.options.scripts and status else 1
            return self._give_up(f"{self.size.name_of(seat)} {cause} before the run was done", code)
        what = f"{self.size.name_of(seat)} {cause}"
        if self.options.scripts and not self.recovers:
            return self._give_up(
                f"{what}, and this plan cannot replace it: what it held existed once", 1
            )
        self.seats[seat] = None
        self._wants_group = True
        if self.recovers or not self._replaced:  # of ranks that end together, the first
            self._replaced.append((seat, cause))
        if self._lost_at is None:
            self._lost_at = now
        return self._count_failure(what, now) or [*self._end_others(what), *self._fill_seats(now)]

    def tick(self, now: float) -> list[Action]:
        """Time passes: find silent members, late ones, and groups broken without a death."""
        if self.over:
            return []
        actions: list[Action] = []
        for number, member in self.members.items():
            silent_s = now - member.last_heard
            is_silent = silent_s > self.options.heartbeat_timeout_s
            if member.ready and not member.suspected and is_silent:
                member.suspected = f"was silent for {silent_s:.1f} s and was killed"
                actions.append(Kill(number))
        if self._deadline is not None and now > self._deadline:
            return self._give_up(self._describe_missing(), 1)
        if self._failed is not None and now - self._failed[1] > ECHO_S:
            return self._give_up(*self._failed[0])
        resizes = self._wanted_size is not None and not self._barrier.is_requested
        if resizes and now > self._wanted_by:
            late = f"newcomers were not ready within {self.options.form_timeout_s:g} s"
            actions += self._cancel_resize(late)
        waited_s = 0.0 if self._broken_at is None else now - self._broken_at
        broken = self._broken_at is not None and waited_s > self.options.regroup_after_s
        if broken and None not in self.seats and not actions and not self._roster.suspects():
            what = f"the group broke: {self._why_broken}"
            if self.options.scripts and not self.recovers:
                return self._give_up(f"{what}; this plan cannot form it again", 1)
            self._wants_group = True
            if given_up := self._count_failure(what, now):
                return given_up
            actions += self._announce(now) if self.recovers else self._end_others(what)
        return actions

    def _end_others(self, why: str) -> list[Action]:
        """Without copies the others' state is of no use: all restart from a checkpoint."""
        if self.recovers:
            return []
        doomed = [n for n in self.seats if n in self._arrived and not self.members[n].suspected]
        for number in doomed:
            self.members[number].suspected = f"was ended, since {why}"
        return [Kill(number) for number in doomed]

    def _host_of(self, seat: int) -> int:
        if seat < len(self.options.hosts):
            return self.options.hosts[seat]
        return host_of(seat, self.size, self.options.num_hosts)

    @property
    def _taken(self) -> set[int | None]:
        return {*self.seats, *self._leaving}

    def _stayers(self, seat: int) -> list[int]:
        """Ranks that leave in a resize and still hold the state, until the new group has formed."""
        if self._pending_barrier is None or seat >= self.size.num_ranks:
            return []
        return [n for n in self._last_ranks if n in self._leaving and not self.members[n].suspected]

    def _script_ended(self, member: int) -> list[Action]:
        self._scripts_ended.add(member)
        if self._scripts_ended != set(self.seats):
            return []
        self.over = True
        return [AllDone()]

    def _spare_exited(self, status: int, now: float) -> list[Action]:
        if status >= 0:
            return self._give_up(f"a spare {describe_exit(status)} before it was needed", 1)
        self._spares_lost += 1
        if self._spares_lost == MOST_FAILURES:
            where, how = f"at step {self.step + 1}", describe_exit(status)
            return self._give_up(f"{MOST_FAILURES} spares were lost {where}, the last one {how}", 1)
        given_up = self._cancel_resize(f"a newcomer {describe_exit(status)}")
        more = self._fill_seats(now) if None in self.seats else self._refill_spares(now)
        return [*given_up, *more, *self._continue_resize(now)]

    def _cancel_resize(self, cause: str) -> list[Action]:
        wanted, self._wanted_size = self._wanted_size, None
        return [] if wanted is None else [NotResized(cause)]

    def _continue_resize(self, now: float) -> list[Action]:
        """The next actions of a resize. After a death it restarts in the next generation."""
        if self._wants_group or self.over or any(n in self.seats for n in self._roster.suspects()):
            return []
        barrier, wanted, ranks = self._barrier, self._wanted_size, self.seats[: self.size.num_ranks]
        ready = self._roster.ready_spares(0, self._taken)  # a run on several hosts keeps its size
        if wanted is not None:
            count = num_newcomers(self.size, wanted)
            if len(ready) < count:
                return self._roster.spawn_spares(now, self._taken, lambda host: count)
            if not barrier.is_requested:
                barrier.is_requested = True
                return [PauseRanks(self.generation)]
        if not barrier.is_requested or not {*ranks} <= barrier.members:
            return []
        if wanted is not None:
            if self._repartitions and not {*self.seats} <= barrier.members:
                asked, barrier.is_repartitioning = barrier.is_repartitioning, True
                return [] if asked else [RepartitionServers(self.generation, wanted.num_servers)]
            self._change_size(wanted, ready)
        # If the resize was cancelled meanwhile, the paused members continue in a new group.
        self._wants_group = True
        return self._announce(now)

    def _change_size(self, size: RunSize, newcomers: list[int]) -> None:
        """Reassign seats. Until the new group has formed, ranks that leave may be called back."""
        self._last_ranks = [n for n in self.seats[: self.size.num_ranks] if n is not None]
        seats = assign_seats(self.seats, self.size, size, newcomers)
        self._leaving |= {n for n in self.seats if n is not None and n not in seats}
        self._wanted_size, self._pending_barrier, self.seats = None, self._barrier, seats
        self.sizes.append(size)

    def _fill_seats(self, now: float) -> list[Action]:
        """Give empty seats to ready spares; announce once every seat has a ready member."""
        actions: list[Action] = []
        for seat, member in enumerate(self.seats):
            own = self._roster.ready_spares(self._host_of(seat), self._taken)
            if member is None and (ready := self._stayers(seat) or own):
                self.seats[seat] = ready[0]
                self._leaving.discard(ready[0])
        empty = [self._host_of(seat) for seat, member in enumerate(self.seats) if member is None]
        actions += self._roster.spawn_spares(now, self._taken, empty.count)
        if self._wants_group and self._all_seated_ready() and self.seats != self._announced:
            actions += self._announce(now)
        elif empty and self._deadline is None:
            self._deadline = now + self.options.form_timeout_s
        return actions

    def _all_seated_ready(self) -> bool:
        seated = [self.members.get(n) for n in self.seats if n is not None]
        can_form = all(m is not None and m.ready and not m.suspected for m in seated)
        return can_form and len(seated) == self.num_seats

    def _refill_spares(self, now: float) -> list[Action]:
        if self.generation < 0 or self.formed != set(self.seats):
            return []  # seats come before spares
        return self._roster.spawn_spares(now, self._taken, lambda host: self.num_spares)

    def _announce(self, now: float) -> list[Action]:
        self.generation += 1
        self._arrived, self.formed, self._done = set(), set(), set()
        self._broken_at, self._formed_at, self._announced = None, -1, [*self.seats]
        self._barrier = ResizeBarrier()
        self._deadline = now + self.options.form_timeout_s
        return [Announce(self.generation, tuple(n for n in self.seats if n is not None))]

    def _advance(self, step: int) -> None:
        if step > self.step:
            self.step = step
            self._spares_lost = 0

    def _count_failure(self, what: str, now: float) -> list[Action]:
        since_s = None if self._lost_at is None else now - self._lost_at
        return self._check_failures(self._failures.lost(what, self.generation, since_s))

    def _check_failures(self, failures: int) -> list[Action]:
        if failures < MOST_FAILURES:
            return []
        why, last = self._failures.last, self.step + 1
        # Where all begin from a checkpoint, each loss may have been at another step after it.
        first = last if self._formed_at < 0 else self._formed_at + 1
        where = f"step {last}" if first == last else f"between steps {first} and {last}, the run"
        return self._give_up(f"{where} failed {failures} times, the last time because {why}", 1)

    def _give_up(self, cause: str, exit_code: int) -> list[Action]:
        self.over = True
        return [GiveUp(cause, exit_code)]

    def _describe_missing(self) -> str:
        def waited_for(number: int | None) -> bool:
            if number is None or number not in self.members or not self.members[number].ready:
                return True
            return self.generation >= 0 and number not in self._arrived

        missing = [seat for seat, number in enumerate(self.seats) if waited_for(number)]
        return describe_missing(self.size, missing, self.options.form_timeout_s)
