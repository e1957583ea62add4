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
  failure before that leaves the old size, one after it the new size;
- a lost host takes its members with it for good: a number is never given again. Where others hold
  what they held, their seats are dropped, or move to hosts with room, and the rest go on; else all
  are ended and begin again from the newest checkpoint, once hosts have room for as many as can;
- a run that is smaller than was asked for grows when a host comes.

Read next: `places.py`, `actions.py`; `supervisor.py` carries them out.
"""

from shoal.elastic.actions import (
    Action,
    AllArrived,
    AllDone,
    AllFormed,
    Announce,
    GiveUp,
    HostAdded,
    HostGone,
    Kill,
    NotResized,
    PauseRanks,
    RepartitionServers,
    Resized,
)
from shoal.elastic.failures import (
    ECHO_S,
    MOST_FAILURES,
    FailureCounter,
    describe_missing,
    describe_want,
)
from shoal.elastic.membership_options import MembershipOptions as MembershipOptions
from shoal.elastic.places import Places, has_copies, places_at_first, slots_at_first
from shoal.elastic.resize_barrier import ResizeBarrier, Seats, assign_seats, keep_ranks
from shoal.elastic.roster import Roster
from shoal.errors import RUN_AGAIN
from shoal.plans.resize import RunSize, describe_change
from shoal.system.processes import describe_exit

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
        self.restarts = 0  # how often all began again from a checkpoint, for want of a host's state
        at_first = options.hosts or places_at_first(self.size, options.num_hosts)
        self._places = Places(at_first, slots_at_first(at_first, num_ranks, options.slots))
        self._goal = self.size  # the last one that was asked for
        self._roster = Roster()
        self.members = self._roster.members
        self.seats: Seats = []
        self._announced: Seats = []  # in the newest generation
        self.formed: set[int] = set()  # members in the working group
        self._arrived: set[int] = set()
        self._done: set[int] = set()
        self._held: set[int] = set()  # members of the last group that worked: they hold its state
        self._ending: set[int] = set()  # members that must be gone before all begin again
        self._host_deadline: float | None = None  # by which another host must have come
        self._replaced: list[tuple[int | None, str]] = []
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
        self._is_asked = False  # whether a user asked for it; else hosts came or went
        self._refused_count: int | None = None  # of ranks, which hosts allow and which failed
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

    @property
    def is_waiting(self) -> bool:
        """Whether no group can form before another host comes."""
        return self._host_deadline is not None

    @property
    def num_slots(self) -> int:
        """How many ranks the hosts have room for."""
        return self._places.num_slots

    def start(self, now: float) -> list[Action]:
        spawns = [self._roster.spawn(now, host or 0) for host in self._places.seats]
        self.seats = [spawn.member for spawn in spawns]
        return [*spawns]

    def heard(self, member: int, now: float, step: int = -1) -> None:
        """Any message counts as a sign of life."""
        if member in self.members:
            self.members[member].last_heard = now
            self._advance(step)

    def ready(self, member: int, now: float, recovers: bool = True) -> list[Action]:
        """A member can take a seat. Whether it can be replaced, its group may know better."""
        if member not in self.members:
            return []
        self.members[member].ready = True
        self.recovers &= recovers or bool(self._held)
        if self._deadline is None and self._wants_group and not self.is_waiting:
            self._deadline = now + self.options.form_timeout_s
        return [*self._fill_seats(now), *self._continue_resize(now)]

    def arrived(self, member: int, generation: int) -> list[Action]:
        if generation != self.generation or member not in self.seats:
            return []
        self._arrived.add(member)
        if len(self._arrived) < self.num_seats or self._arrived != set(self.seats):
            return []
        self._deadline = None  # what follows may load a checkpoint, and has its own limits
        return [AllArrived(generation)]

    def has_formed(
        self, member: int, generation: int, step: int, now: float, recovers: bool | None = None
    ) -> list[Action]:
        if generation != self.generation or member not in self.seats:
            return []
        self.recovers = self.recovers if recovers is None else recovers
        self.formed.add(member)
        self._advance(step)
        step = self._formed_at = max(self._formed_at, step)  # a server has none of its own
        if len(self.formed) < self.num_seats or self.formed != set(self.seats):
            return []
        self._wants_group, self._failed = False, None
        if given_up := self._check_failures(self._failures.formed(step)):
            return given_up
        again, self.step = self.step - step, step
        formed = AllFormed(generation, step, again, tuple(self._replaced), self._lost_at)
        self._replaced, self._lost_at, self._held = [], None, {*self.formed}
        actions: list[Action] = [formed]
        if self._pending_barrier is not None:
            paused, leavers = self._pending_barrier, tuple(sorted(self._leaving))
            before = paused.before or self.size
            actions.append(Resized(before, self.size, leavers, paused.since, paused.step))
            self._pending_barrier = None
        actions += [*self._refill_spares(now), *self._continue_resize(now)]
        return [*actions, *self._follow_hosts(now)]

    def resize(
        self, size: RunSize, now: float, repartitions: bool, asked: bool = True
    ) -> list[Action]:
        """Change the size once all ranks wait after a step and, with `repartitions`, servers wrote
        their files. `asked`: by a user."""
        assert not self.is_resizing and not self.options.scripts
        self._wanted_size, self._repartitions, self._is_asked = size, repartitions, asked
        self._wanted_by = now + self.options.form_timeout_s
        return self._continue_resize(now)

    def paused(self, member: int, generation: int, step: int, now: float, why: str) -> list[Action]:
        """A rank waits after the agreed step; or a server wrote its files, or could not (`why`)."""
        if generation != self.generation or member not in self.seats or self.over:
            return []
        self._barrier.add(member, step, now)
        given_up = self._cancel_resize(why) if why else []
        is_early = not why and len(self._barrier.members) < self.size.num_ranks
        return [] if is_early else [*given_up, *self._continue_resize(now)]

    def lost(self, member: int, generation: int, now: float, why: str = "") -> None:
        """A member's group broke. If no member is found dead soon, the same members form again."""
        if generation == self.generation and member in self.seats:
            self._lost_at = now if self._lost_at is None else self._lost_at
            if self._broken_at is None:
                self._broken_at, self._why_broken = now, why

    def failed(self, member: int, cause: str, exit_code: int, now: float) -> list[Action]:
        """A member's program raised. Where ranks compute together, a peer's death may be the cause,
        which is then known soon."""
        if self.over or member not in self.members or member in self._ending:
            return []
        if self.recovers or self.options.scripts:
            return self._give_up(cause, exit_code)
        self._failed = self._failed or (GiveUp(cause, exit_code), now)
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
        if member in self._ending:
            self._ending.remove(member)
            return [] if self._ending else self._fill_seats(now)
        if member not in self.seats:
            return self._spare_exited(status, now)
        if self.options.scripts and status == 0 and member not in self.formed:
            return self._script_ended(member)
        seat = self.seats.index(member)
        cause = gone.suspected or describe_exit(status)
        if status >= 0 and self._failed is not None:  # which says more than its exit
            self.seats[seat], self._wants_group = None, True
            return []
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

    def host_lost(self, host: int, how: str, now: float) -> list[Action]:
        """A host is gone with all of its members, of which no exit is heard."""
        lost = [seat for seat, place in enumerate(self._places.seats) if place == host]
        if self.over or host not in self._places.rooms:
            return []
        gone = self._roster.lose(host)
        what = how if how.startswith("host ") else f"host {host} {how}"
        self._places.lose(host)
        self._leaving, self._ending = self._leaving - gone, self._ending - gone
        cancelled, self._refused_count = self._cancel_resize(what), None
        if not lost:
            told = HostGone(host, what, "no rank was there")
            return [told, *cancelled, *self._fill_seats(now), *self._continue_resize(now)]
        for seat in lost:
            self.seats[seat] = None
        self._wants_group, self._lost_at = True, self._lost_at or now
        self._replaced.append((None, what))
        if given_up := self._count_failure(what, now):
            return [HostGone(host, what, "the run ends"), *cancelled, *given_up]
        before = self.size
        then, actions = self._repair(now)
        if before != self.size:
            then += f": {describe_change(before, self.size, self.options.rules.replica)}"
        return [HostGone(host, what, then), *cancelled, *actions]

    def host_joined(self, host: int, num_slots: int, now: float) -> list[Action]:
        """Another host came, under a number of its own: it gets the seats that wait for one, or
        those that the run is short of; else it stands by for the next loss."""
        if self.over or host in self._places.rooms:
            return []
        self._places.rooms[host], self._refused_count = num_slots, None
        if self.is_waiting:
            actions = self._place_again(now)
            then = "still too few" if self.is_waiting else "all begin again from a checkpoint"
            return [HostAdded(host, num_slots, then), *actions]
        actions = [*self._refill_spares(now), *self._follow_hosts(now)]
        is_short = self._best_count() not in (None, self.size.num_ranks)
        return [HostAdded(host, num_slots, "the run grows" if is_short else "stands by"), *actions]

    def saved(self, now: float) -> list[Action]:
        """A checkpoint is complete: where no rank can join, all begin again from it with the hosts
        that have come."""
        can_grow = (self._best_count() or 0) > self.size.num_ranks
        if self.options.rules.in_place or self._wants_group or self.over or not can_grow:
            return []
        self._wants_group, self._lost_at = True, now
        self._replaced.append((None, "another host came"))
        return self._restart(now)

    def tick(self, now: float) -> list[Action]:
        """Time passes: find silent members, late ones, and groups broken without a death."""
        if self.over:
            return []
        actions, limit_s = list[Action](), self.options.heartbeat_timeout_s
        for number, member in self.members.items():
            silent_s = now - member.last_heard
            if member.ready and not member.suspected and silent_s > limit_s:
                member.suspected = f"was silent for {silent_s:.1f} s and was killed"
                actions.append(Kill(number))
        if self._deadline is not None and now > self._deadline:
            return self._give_up(self._describe_missing(), 1)
        if self._host_deadline is not None and now > self._host_deadline:
            why, waited_s = self._failures.last, self.options.host_timeout_s
            want = describe_want(why, self.size, self.num_slots, waited_s)
            return self._give_up(want, RUN_AGAIN)
        # Ranks may see the loss of a host before its silence tells of it.
        is_one = len(self._places.rooms) == 1
        echo_s = ECHO_S if is_one else ECHO_S + limit_s
        if self._failed is not None and now - self._failed[1] > echo_s:
            return self._give_up(*self._failed[0])
        resizes = self._wanted_size is not None and not self._barrier.is_requested
        if resizes and now > self._wanted_by:
            late = f"newcomers were not ready within {self.options.form_timeout_s:g} s"
            actions += self._cancel_resize(late)
        waited_s = 0.0 if self._broken_at is None else now - self._broken_at
        broken = self._broken_at is not None and waited_s > self.options.regroup_after_s
        since = now - self.options.regroup_after_s
        silent = [] if is_one else self._roster.silent(self.seats, since)  # a host may be lost
        fate = self._roster.suspects() or silent  # which is known soon
        if broken and None not in self.seats and not actions and not fate:
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
        self.restarts += 1
        doomed = [n for n in self.seats if n in self._arrived and not self.members[n].suspected]
        for number in doomed:
            self.members[number].suspected = f"was ended, since {why}"
        return [Kill(number) for number in doomed]

    def _best_count(self) -> int | None:
        """The most ranks, up to those asked for, that the hosts have room for; None if too few."""
        rules, most = self.options.rules, min(self._goal.num_ranks, self._places.num_slots)
        if not rules.counts:  # there is no other size
            return self.size.num_ranks if most >= self.size.num_ranks else None
        return rules.largest(most)

    def _repair(self, now: float) -> tuple[str, list[Action]]:
        """What to do about seats that were lost with their host, and that in words."""
        rules, count = self.options.rules, self._best_count()
        held = [n in self._held and n in self.members for n in self.seats]
        goes_on = self.recovers and (not self._held or has_copies(held, self.size, rules.copies))
        if not goes_on or count is None or not (rules.in_place or count == self.size.num_ranks):
            actions = self._restart(now)
            then = "all begin again from the newest checkpoint"
            return "all wait for another host" if self.is_waiting else then, actions
        if rules.at_once and count < self.size.num_ranks:
            self._drop_ranks(count, now)
        self._places.fill(self.size)
        return "the others go on", self._fill_seats(now)

    def _drop_ranks(self, count: int, now: float) -> None:
        """Go on with fewer ranks, at once: survivors fill the first seats."""
        num_ranks = self.size.num_ranks
        self._last_ranks = [n for n in self.seats[:num_ranks] if n is not None]
        kept = keep_ranks(self.seats[:num_ranks], count)
        self._reorder([*kept, *range(num_ranks, self.num_seats)])
        self._leaving |= {*self._last_ranks} - {*self.seats}
        self._note_change(now)
        self.sizes.append(self.size._replace(num_ranks=count))

    def _reorder(self, order: list[int]) -> None:
        """Give each seat the member and the place of another."""
        self.seats = [self.seats[seat] for seat in order]
        self._places.seats = [self._places.seats[seat] for seat in order]

    def _note_change(self, now: float) -> None:
        """Tell of another size than the present one once its group has formed."""
        pending = self._pending_barrier
        before = (pending and pending.before) or self.size
        self._pending_barrier = ResizeBarrier(since=now, step=self.step, before=before)

    def _restart(self, now: float) -> list[Action]:
        """End all members that had a seat; once they are gone, all seats get new ones."""
        self._ending |= {n for n in self._taken if n is not None and n in self.members}
        doomed = [n for n in sorted(self._ending) if not self.members[n].suspected]
        for number in doomed:
            self.members[number].suspected = "was ended, since all begin again"
        self._leaving, self._last_ranks, self._held, self._failed = set(), [], set(), None
        self.seats, self._deadline = [None] * self.num_seats, None
        self.restarts += 1
        return [*(Kill(number) for number in doomed), *self._place_again(now)]

    def _place_again(self, now: float) -> list[Action]:
        """Give all seats a place, for members that are all new; or wait for another host."""
        count, before = self._best_count(), self.size
        if count is None:
            self._host_deadline = self._host_deadline or now + self.options.host_timeout_s
            return []
        size = before._replace(num_ranks=count)
        if size == before:
            self._places.fill(size)
        else:
            self._places.spread(before, size, self.options.rules.replica)
            self._note_change(now)
        self.sizes, self.seats = [size], [None] * sum(size)
        self._host_deadline, self._deadline = None, now + self.options.form_timeout_s
        return self._fill_seats(now)

    def _follow_hosts(self, now: float) -> list[Action]:
        """Begin to grow to what the hosts have room for, or to shrink to it."""
        rules, count = self.options.rules, self._best_count()
        if self.is_resizing or self._wants_group or self.over or not rules.in_place:
            return []
        if count is None or count in (self.size.num_ranks, self._refused_count):
            return []
        wanted = self.size._replace(num_ranks=count)
        return self.resize(wanted, now, rules.repartitions, asked=False)

    @property
    def _taken(self) -> set[int | None]:
        return {*self.seats, *self._leaving, *self._ending}

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
        if wanted is None:
            return []
        self._refused_count = None if self._is_asked else wanted.num_ranks
        return [NotResized(cause)]

    def _continue_resize(self, now: float) -> list[Action]:
        """The next actions of a resize. After a death it restarts in the next generation."""
        if self._wants_group or self.over or any(n in self.seats for n in self._roster.suspects()):
            return []
        newcomers: list[int] | None = []
        barrier, wanted, ranks = self._barrier, self._wanted_size, self.seats[: self.size.num_ranks]
        if wanted is not None:
            coming = self._places.of_newcomers(self.size, wanted)
            newcomers = self._roster.choose(coming, self._taken)
            if newcomers is None:
                return self._roster.spawn_spares(now, self._taken, coming)
            if not barrier.is_requested:
                barrier.is_requested = True
                return [PauseRanks(self.generation)]
        if not barrier.is_requested or not {*ranks} <= barrier.members:
            return []
        if wanted is not None:
            if self._repartitions and not {*self.seats} <= barrier.members:
                asked, barrier.is_repartitioning = barrier.is_repartitioning, True
                return [] if asked else [RepartitionServers(self.generation, wanted.num_servers)]
            self._change_size(wanted, newcomers or [])
        # If the resize was cancelled meanwhile, the paused members continue in a new group.
        self._wants_group = True
        return self._announce(now)

    def _change_size(self, size: RunSize, newcomers: list[int]) -> None:
        """Reassign seats. Until the new group has formed, ranks that leave may be called back."""
        num_ranks = self.size.num_ranks
        self._last_ranks = [n for n in self.seats[:num_ranks] if n is not None]
        if not self._is_asked:  # ranks of hosts without room for them leave, not the last
            order = self._places.by_room(num_ranks, size.num_ranks)
            self._reorder([*order, *range(num_ranks, self.num_seats)])
        seats = assign_seats(self.seats, self.size, size, newcomers)
        self._leaving |= {n for n in self.seats if n is not None and n not in seats}
        self._wanted_size, self._pending_barrier, self.seats = None, self._barrier, seats
        self._barrier.before = self.size
        self._goal = size if self._is_asked else self._goal
        self._places.resize(self.size, size)
        self.sizes.append(size)

    def _fill_seats(self, now: float) -> list[Action]:
        """Give empty seats to ready spares; announce once every seat has a ready member."""
        if self.is_waiting:
            return []
        actions, places, may_stay = list[Action](), self._places.seats, bool(self._leaving)
        ready = self._roster.ready_spares(self._taken) if None in self.seats else {}
        for seat in [seat for seat, member in enumerate(self.seats) if member is None]:
            if found := (may_stay and self._stayers(seat)) or ready.get(places[seat]):
                self.seats[seat] = member = found.pop(0)
                places[seat] = self.members[member].host
                self._leaving.discard(member)
        if empty := [place for place, member in zip(places, self.seats) if member is None]:
            actions += self._roster.spawn_spares(now, self._taken, empty)
        can_form = self._wants_group and not self._ending and self._all_seated_ready()
        if can_form and self.seats != self._announced:
            actions += self._announce(now)
        elif empty and self._deadline is None:
            self._deadline = now + self.options.form_timeout_s
        return actions

    def _all_seated_ready(self) -> bool:
        seated = (self.members.get(n) for n in self.seats if n is not None)
        can_form = all(m is not None and m.ready and not m.suspected for m in seated)
        return can_form and None not in self.seats

    def _refill_spares(self, now: float) -> list[Action]:
        if self.generation < 0 or self.formed != set(self.seats):
            return []  # seats come before spares
        wanted = [host for host in self._places.hosts for _ in range(self.num_spares)]
        return self._roster.spawn_spares(now, self._taken, wanted)

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
        ready = {number for number, member in self.members.items() if member.ready}
        came = ready & self._arrived if self.generation >= 0 else ready
        missing = [seat for seat, number in enumerate(self.seats) if number not in came]
        return describe_missing(self.size, missing, self.options.form_timeout_s)
