"""Who sits where, and in which generation: the supervisor's decisions as a pure state machine.

`Membership` is told what happened (`ready`, `exited`, `heard`, ...) with the time it happened at,
and answers with what is to be done. It reads no clock and starts no process, so it is tested
under random schedules. Its rules:

- only the supervisor numbers generations, and each has all seats filled;
- a suspect is killed before its seat is given away, so that it cannot act under two generations;
- a seat stays on its host, which has spares of its own;
- a group forms only after all members have said that they left the one before;
- a death by signal is repaired; an exit of its own accord is the recipe's doing and ends the run;
- where no rank holds a copy of another's state, all are ended and begin from the newest checkpoint;
- three groups lost without a step between them (where all begin from a checkpoint: without another
  checkpoint), or three spares, end the run instead of looping;
- seats come and go only once newcomers are ready and all wait after the same step: what breaks
  before that leaves the old size, what breaks after it the new one.
"""

from shoal.elastic.actions import (
    Action,
    AllDone,
    AllFormed,
    AllHere,
    Announce,
    GiveUp,
    Kill,
    Meet,
    NotResized,
    Part,
    Resized,
)
from shoal.elastic.failures import ECHO_S, MOST_FAILURES, Failures, did_not_form
from shoal.elastic.meeting import Meeting, Seats, deal_seats, num_newcomers
from shoal.elastic.roster import Roster
from shoal.plans.size import Size, host_of
from shoal.system.processes import how_it_ended


class Membership:
    """Places for ranks and servers, filled by members that are numbered as they are spawned."""

    def __init__(
        self,
        num_ranks: int,
        *,
        num_servers: int = 0,
        num_spares: int = 1,
        heartbeat_timeout_s: float = 10.0,
        form_timeout_s: float = 30.0,
        regroup_after_s: float = 2.0,
        scripts: bool = False,
        num_hosts: int = 1,
    ):
        """`scripts`: members run a program of their own, which may train several times or never,
        and are done when they exit. Parameter servers have the last seats. `num_spares` is for
        each host."""
        self.sizes = [Size(num_ranks, num_servers)]  # that the run had, the last one now
        self.num_spares, self._num_hosts = num_spares, num_hosts
        self.recovers = True
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self.form_timeout_s = form_timeout_s
        self.regroup_after_s = regroup_after_s
        self.scripts = scripts
        self.generation = -1
        self.step = 0
        self.over = False
        self._roster = Roster(num_hosts)
        self.members = self._roster.members
        self.seats: Seats = []
        self._announced: Seats = []  # to the members that form a group, or did
        self.formed: set[int] = set()  # members in the working group
        self._here: set[int] = set()
        self._done: set[int] = set()
        self._replaced: list[tuple[int, str]] = []
        self._formed_at = -1  # the step that the group which is forming goes on from
        self._failures = Failures()
        self._spares_lost = 0  # without a step between them
        self._wants_group = True  # no group works, and one should
        self._left: set[int] = set()  # members of scripts that ended well
        self._lost_at: float | None = None  # first word of the loss under way
        self._broken_at: float | None = None  # when a member of this generation said so
        self._why_broken = ""
        self._deadline: float | None = None  # by which all must have come
        self._failed: tuple[GiveUp, float] | None = None  # an error, or a death's echo; and when
        self._wanted: Size | None = None  # that the run is to have
        self._wanted_by = 0.0  # when newcomers must be ready
        self._parts = False  # whether servers write down what they hold
        self._meeting = Meeting()  # of this generation
        self._leaving: set[int] = set()  # who has no seat any more
        self._last_ranks: list[int] = []  # who had a rank's before the last resize
        self._met: Meeting | None = None  # for a size whose group has not formed yet

    @property
    def size(self) -> Size:
        return self.sizes[-1]

    @property
    def num_seats(self) -> int:
        return sum(self.size)

    @property
    def finished(self) -> frozenset[int]:
        """Members that have nothing left to do in this generation."""
        return frozenset(self._done)

    @property
    def is_resizing(self) -> bool:
        return self._wanted is not None or self._met is not None

    def begin(self, now: float) -> list[Action]:
        spawns = [self._roster.spawn(now, self._host_of(seat)) for seat in range(self.num_seats)]
        self.seats = [spawn.member for spawn in spawns]
        return [*spawns]

    def heard(self, member: int, now: float, step: int = -1) -> None:
        """Any message counts as a sign of life."""
        if member in self.members:
            self.members[member].last_heard = now
            self._advance(step)

    def ready(self, member: int, now: float, recovers: bool = True) -> list[Action]:
        """A member can take a seat; one that cannot be replaced makes the run so."""
        if member not in self.members:
            return []
        self.members[member].ready = True
        if not recovers:
            self.recovers, self.num_spares = False, 0
        if self._deadline is None and self._wants_group:
            self._deadline = now + self.form_timeout_s
        return [*self._fill_seats(now), *self._go_on_resizing(now)]

    def here(self, member: int, generation: int) -> list[Action]:
        if generation != self.generation or member not in self.seats:
            return []
        self._here.add(member)
        if self._here != set(self.seats):
            return []
        self._deadline = None  # what follows has limits of its own, and may load a checkpoint
        return [AllHere(generation)]

    def has_formed(self, member: int, generation: int, step: int, now: float) -> list[Action]:
        if generation != self.generation or member not in self.seats:
            return []
        self.formed.add(member)
        self._advance(step)
        step = self._formed_at = max(self._formed_at, step)  # a server has none of its own
        if self.formed != set(self.seats):
            return []
        self._wants_group, self._failed = False, None
        if given_up := self._too_many(self._failures.formed(step)):
            return given_up
        again, self.step = self.step - step, step
        formed = AllFormed(generation, step, again, tuple(self._replaced), self._lost_at)
        self._replaced, self._lost_at = [], None
        actions: list[Action] = [formed]
        if self._met is not None:
            met, leavers = self._met, tuple(sorted(self._leaving))
            actions.append(Resized(self.sizes[-2], self.size, leavers, met.since, met.step))
            self._met = None
        return [*actions, *self._refill_spares(now), *self._go_on_resizing(now)]

    def resize(self, size: Size, now: float, parts: bool) -> list[Action]:
        """Have seats for so many, once all have met after a step; `parts`: and servers parted."""
        assert not self.is_resizing and not self.scripts
        self._wanted, self._wanted_by, self._parts = size, now + self.form_timeout_s, parts
        return self._go_on_resizing(now)

    def met(self, member: int, generation: int, step: int, now: float, why: str) -> list[Action]:
        """A rank waits after the step agreed on; or a server has written its part, or why not."""
        if generation != self.generation or member not in self.seats or self.over:
            return []
        self._meeting.add(member, step, now)
        given_up = self._give_up_resizing(why) if why else []
        return [*given_up, *self._go_on_resizing(now)]

    def lost(self, member: int, generation: int, now: float, why: str = "") -> None:
        """A member's group broke. If nobody is found dead soon, the same members form again."""
        if generation == self.generation and member in self.seats:
            self._lost_at = now if self._lost_at is None else self._lost_at
            if self._broken_at is None:
                self._broken_at, self._why_broken = now, why

    def failed(self, member: int, cause: str, exit_code: int, now: float) -> list[Action]:
        """A member's program raised. Where it computes together with others, that may be no more
        than the echo of a death, which is then known soon."""
        if self.over or member not in self.members:
            return []
        if self.recovers or self.scripts:
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
        if self.scripts:  # another training may follow
            self._wants_group, self.formed, self.step, self._announced = True, set(), 0, []
            self._failures.forget()
            self._spares_lost = 0
            for number in self._done:
                self.members[number].ready = False
        self.over = not self.scripts
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
        if self.scripts and status == 0 and member not in self.formed:
            return self._script_ended(member)
        seat = self.seats.index(member)
        cause = gone.suspected or how_it_ended(status)
        if status >= 0 and not gone.suspected:
            code = status if self.scripts and status else 1
            return self._give_up(f"{self.size.name_of(seat)} {cause} before the run was done", code)
        what = f"{self.size.name_of(seat)} {cause}"
        if self.scripts and not self.recovers:
            return self._give_up(
                f"{what}, and this plan cannot replace it: what it held existed once", 1
            )
        self.seats[seat] = None
        self._wants_group = True
        if self.recovers or not self._replaced:  # of ranks that end together, the first tells why
            self._replaced.append((seat, cause))
        if self._lost_at is None:
            self._lost_at = now
        return self._count_failure(what, now) or [*self._end_others(what), *self._fill_seats(now)]

    def tick(self, now: float) -> list[Action]:
        """Time passes: find who is silent, who is late, and groups broken without a death."""
        if self.over:
            return []
        actions: list[Action] = []
        for number, member in self.members.items():
            silent_s = now - member.last_heard
            if member.ready and not member.suspected and silent_s > self.heartbeat_timeout_s:
                member.suspected = f"was silent for {silent_s:.1f} s and was killed"
                actions.append(Kill(number))
        if self._deadline is not None and now > self._deadline:
            return self._give_up(self._who_is_missing(), 1)
        if self._failed is not None and now - self._failed[1] > ECHO_S:
            return self._give_up(*self._failed[0])
        if self._wanted is not None and not self._meeting.is_asked and now > self._wanted_by:
            late = f"newcomers were not ready within {self.form_timeout_s:g} s"
            actions += self._give_up_resizing(late)
        broken = self._broken_at is not None and now - self._broken_at > self.regroup_after_s
        if broken and None not in self.seats and not actions and not self._roster.suspects():
            what = f"the group broke: {self._why_broken}"
            if self.scripts and not self.recovers:
                return self._give_up(f"{what}; this plan cannot form it again", 1)
            self._wants_group = True
            if given_up := self._count_failure(what, now):
                return given_up
            actions += self._announce(now) if self.recovers else self._end_others(what)
        return actions

    def _end_others(self, why: str) -> list[Action]:
        """Without copies, what the others hold is of no use: all begin from a checkpoint."""
        if self.recovers:
            return []
        doomed = [n for n in self.seats if n in self._here and not self.members[n].suspected]
        for number in doomed:
            self.members[number].suspected = f"was ended, since {why}"
        return [Kill(number) for number in doomed]

    def _host_of(self, seat: int) -> int:
        return host_of(seat, self.size, self._num_hosts)

    @property
    def _taken(self) -> set[int | None]:
        return {*self.seats, *self._leaving}

    def _stayers(self, seat: int) -> list[int]:
        """Ranks that were to leave, and still hold the state: the new group has not formed yet."""
        if self._met is None or seat >= self.size.num_ranks:
            return []
        return [n for n in self._last_ranks if n in self._leaving and not self.members[n].suspected]

    def _script_ended(self, member: int) -> list[Action]:
        self._left.add(member)
        if self._left != set(self.seats):
            return []
        self.over = True
        return [AllDone()]

    def _spare_exited(self, status: int, now: float) -> list[Action]:
        if status >= 0:
            return self._give_up(f"a spare {how_it_ended(status)} before it was needed", 1)
        self._spares_lost += 1
        if self._spares_lost == MOST_FAILURES:
            where, how = f"at step {self.step + 1}", how_it_ended(status)
            return self._give_up(f"{MOST_FAILURES} spares were lost {where}, the last one {how}", 1)
        given_up = self._give_up_resizing(f"a newcomer {how_it_ended(status)}")
        more = self._fill_seats(now) if None in self.seats else self._refill_spares(now)
        return [*given_up, *more, *self._go_on_resizing(now)]

    def _give_up_resizing(self, cause: str) -> list[Action]:
        wanted, self._wanted = self._wanted, None
        return [] if wanted is None else [NotResized(cause)]

    def _go_on_resizing(self, now: float) -> list[Action]:
        """What is next on the way to another size. A death begins it anew, in the group after."""
        if self._wants_group or self.over or any(n in self.seats for n in self._roster.suspects()):
            return []
        meeting, wanted, ranks = self._meeting, self._wanted, self.seats[: self.size.num_ranks]
        ready = self._roster.ready_spares(0, self._taken)  # a run on several hosts keeps its size
        if wanted is not None:
            count = num_newcomers(self.size, wanted)
            if len(ready) < count:
                return self._roster.spawn_spares(now, self._taken, lambda host: count)
            if not meeting.is_asked:
                meeting.is_asked = True
                return [Meet(self.generation)]
        if not meeting.is_asked or not {*ranks} <= meeting.members:
            return []
        if wanted is not None:
            if self._parts and not {*self.seats} <= meeting.members:
                asked, meeting.is_parting = meeting.is_parting, True
                return [] if asked else [Part(self.generation, wanted.num_servers)]
            self._change_size(wanted, ready)
        # If the resize was given up meanwhile, those who met go on as they are, in a new group.
        self._wants_group = True
        return self._announce(now)

    def _change_size(self, size: Size, newcomers: list[int]) -> None:
        """Deal seats anew. Until the new group works, ranks that leave may be called back."""
        self._last_ranks = [n for n in self.seats[: self.size.num_ranks] if n is not None]
        seats = deal_seats(self.seats, self.size, size, newcomers)
        self._leaving |= {n for n in self.seats if n is not None and n not in seats}
        self._wanted, self._met, self.seats = None, self._meeting, seats
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
            self._deadline = now + self.form_timeout_s
        return actions

    def _all_seated_ready(self) -> bool:
        seated = [self.members.get(n) for n in self.seats if n is not None]
        can_form = all(m is not None and m.ready and not m.suspected for m in seated)
        return can_form and len(seated) == self.num_seats

    def _refill_spares(self, now: float) -> list[Action]:
        if self.generation < 0 or self.formed != set(self.seats):
            return []  # first things first
        return self._roster.spawn_spares(now, self._taken, lambda host: self.num_spares)

    def _announce(self, now: float) -> list[Action]:
        self.generation += 1
        self._here, self.formed, self._done = set(), set(), set()
        self._broken_at, self._formed_at, self._announced = None, -1, [*self.seats]
        self._meeting = Meeting()
        self._deadline = now + self.form_timeout_s
        return [Announce(self.generation, tuple(n for n in self.seats if n is not None))]

    def _advance(self, step: int) -> None:
        if step > self.step:
            self.step = step
            self._spares_lost = 0

    def _count_failure(self, what: str, now: float) -> list[Action]:
        since_s = None if self._lost_at is None else now - self._lost_at
        return self._too_many(self._failures.lost(what, self.generation, since_s))

    def _too_many(self, failures: int) -> list[Action]:
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

    def _who_is_missing(self) -> str:
        def waited_for(number: int | None) -> bool:
            if number is None or number not in self.members or not self.members[number].ready:
                return True
            return self.generation >= 0 and number not in self._here

        missing = [seat for seat, number in enumerate(self.seats) if waited_for(number)]
        return did_not_form(self.size, missing, self.form_timeout_s)
