"""The supervisor's decisions under random schedules of a simulated cluster, and one by one.

The simulation has members with a mailbox in each direction. Messages of one member stay in order,
those of different members do not; a death is heard of some time after it happened. Members are
killed, stopped and woken at random.
"""

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    Spawn,
)
from shoal.elastic.membership import Membership, MembershipOptions
from shoal.plans.resize import RunSize, host_of
from shoal.system.processes import describe_exit

NUM_STEPS = 8


@dataclass
class Process:
    """A member as it really is, whatever the supervisor believes."""

    number: int
    alive: bool = True
    stopped: bool = False
    said_ready: bool = False
    generation: int = -1
    phase: str = "waiting"  # here, forming, formed, lost, met, done
    step: int = -1
    meet: int = -1  # the generation in which it was asked to
    inbox: deque[tuple[str, int]] = field(default_factory=deque)
    outbox: deque[tuple[str, int]] = field(default_factory=deque)
    exit_status: int | None = None
    exit_heard: bool = False


class Cluster:
    """Members and their supervisor; every method is one thing that can happen next."""

    def __init__(
        self,
        num_seats: int,
        num_spares: int,
        seed: int,
        heartbeat_s: float = 1e6,
        num_servers: int = 0,
        num_steps: int = NUM_STEPS,
        num_hosts: int = 1,
        **options: Any,
    ):
        self.num_steps, self.num_hosts = num_steps, num_hosts
        self.host_of_member: dict[int, int] = {}
        self.draws = random.Random(seed)
        self.now = 0.0
        self.members = Membership(
            num_seats,
            num_servers,
            MembershipOptions(
                num_spares=num_spares,
                heartbeat_timeout_s=heartbeat_s,
                num_hosts=num_hosts,
                **options,
            ),
        )
        self.answers: list[Action] = []  # to requests for another size
        self.told: list[Action] = []  # of hosts
        self.parts = False  # whether servers are to write before seats are dealt
        self.parted: set[int] = set()  # those that were asked to, and did
        self.processes: dict[int, Process] = {}
        self.groups: dict[int, tuple[int, ...]] = {}
        self.may_go: set[int] = set()  # generations that were told to form
        self.committed = 0
        self.ending: Action | None = None
        self.num_sizes = 1
        self.act(self.members.start(self.now))

    # ---- what the supervisor does

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            assert self.ending is None, "something is done after the end"
            match action:
                case Spawn():
                    assert action.member not in self.processes
                    self.processes[action.member] = Process(action.member)
                    self.host_of_member[action.member] = action.host
                case Kill():
                    self.kill(action.member)
                case Announce():
                    self.check_announce(action)
                    self.check_hosts(action)
                    for number in action.seats:
                        self.processes[number].inbox.append(("seat", action.generation))
                case AllArrived():
                    self.check_all_here(action)
                    for number in self.groups[action.generation]:
                        self.processes[number].inbox.append(("go", action.generation))
                case AllFormed():
                    assert action.generation == self.members.generation
                case AllDone():
                    last = self.groups[self.members.generation]
                    assert {self.processes[number].step for number in last} == {self.num_steps}
                    self.ending = action
                case GiveUp():
                    self.ending = action
                case PauseRanks() | RepartitionServers():
                    self.ask(action)
                case HostGone() | HostAdded():
                    self.told.append(action)
                case Resized() | NotResized():
                    self.answers.append(action)
                    for number in action.leavers if isinstance(action, Resized) else ():
                        self.processes[number].inbox.append(("leave", 0))

    def resize(self, size: RunSize) -> None:
        """Servers part when their number changes, and under some plans when that of ranks does."""
        before, self.parts = self.members.size, self.draws.random() < 0.5
        self.parts |= size.num_servers != before.num_servers
        self.act(self.members.resize(size, self.now, self.parts))

    def ask(self, action: PauseRanks | RepartitionServers) -> None:
        group, num_ranks = self.groups[action.generation], self.members.size.num_ranks
        if isinstance(action, PauseRanks):
            for number in group[:num_ranks]:
                self.processes[number].inbox.append(("meet", action.generation))
            return
        ranks = [self.processes[number] for number in group[:num_ranks]]
        assert {p.phase for p in ranks} == {"met"} and len({p.step for p in ranks}) == 1
        for number in group[num_ranks:]:
            self.processes[number].inbox.append(("part", action.generation))

    def check_announce(self, plan: Announce) -> None:
        assert plan.generation == max(self.groups, default=-1) + 1, "generations grow by one"
        assert len(plan.seats) == len(set(plan.seats)) == self.members.num_seats
        for number in plan.seats:
            assert self.processes[number].said_ready, "a member that is not ready got a seat"
            assert number in self.members.members, "a member known to be dead got a seat"
        if self.groups:
            self.check_holders(self.groups[max(self.groups)], plan.seats)
        self.groups[plan.generation] = plan.seats

    def check_hosts(self, plan: Announce) -> None:
        for seat, number in enumerate(plan.seats):
            host = host_of(seat, self.members.size, self.num_hosts)
            assert self.host_of_member[number] == host, "a seat moved to another host"

    def check_holders(self, before: tuple[int, ...], now: tuple[int, ...]) -> None:
        if len(self.members.sizes) == self.num_sizes:
            for old, new in zip(before, now, strict=True):
                assert old == new or not self.processes[old].alive, "a seat has two living holders"
            return
        self.num_sizes += 1
        (num_old, _), (num_new, num_servers) = self.members.sizes[-2:]
        assert len(now) == num_new + num_servers
        ranks = {number: self.processes[number].phase for number in before[:num_old]}
        assert set(ranks.values()) == {"met"}, "somebody was not waited for"
        if self.parts:
            assert set(before[num_old:]) <= self.parted, "a server's part was not written"
        kept = {*now[:num_new]} & {*before[:num_old]}
        assert kept == {*before[: min(num_old, num_new)]}, "who could stay did not"

    def check_all_here(self, plan: AllArrived) -> None:
        for number in self.groups[plan.generation]:
            process = self.processes[number]
            assert process.generation >= plan.generation, "told to go before it left"
        self.may_go.add(plan.generation)

    def hear(self, process: Process) -> None:
        """One message arrives."""
        what, value = process.outbox.popleft()
        number, members, now = process.number, self.members, self.now
        members.heard(number, now, value if what == "beat" else -1)
        match what:
            case "ready":
                self.act(members.ready(number, now))
            case "here":
                self.act(members.arrived(number, value))
            case "formed":
                self.act(members.has_formed(number, value, process.step, now))
            case "lost":
                members.lost(number, value, now)
            case "done":
                self.act(members.done(number, value))
            case "met":
                self.act(members.paused(number, value, process.step, now, ""))

    def hear_exit(self, process: Process) -> None:
        """The fork server reports an exit; what the member said before is heard first."""
        while process.outbox and self.ending is None:
            self.hear(process)
        process.exit_heard = True
        if self.ending is None:
            assert process.exit_status is not None
            self.act(self.members.exited(process.number, process.exit_status, self.now))

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.act(self.members.tick(self.now))

    # ---- what members do

    def kill(self, number: int, status: int = -9) -> None:
        process = self.processes[number]
        if process.alive:
            process.alive, process.exit_status = False, status
            # What nobody holds any more is trained again, from the seed.
            held = [p.step for p in self.processes.values() if p.alive and self.is_seated(p)]
            self.committed = max(held, default=0)

    def is_seated(self, process: Process) -> bool:
        """Or could be again, as long as the group without it has not formed."""
        number, members = process.number, self.members
        stays = members.is_resizing and number in members._last_ranks
        return number in members.seats or process.step < 0 or stays

    def live(self, process: Process) -> bool:
        """One move of a member; False if it has none."""
        if process.inbox:
            self.take_in(process, *process.inbox.popleft())
        elif not process.said_ready:
            process.said_ready = True
            process.outbox.append(("ready", 0))
        elif process.phase in ("forming", "formed"):
            return self.live_in_group(process)
        else:
            return False
        return True

    def take_in(self, process: Process, what: str, generation: int) -> None:
        if what == "seat" and generation > process.generation:
            process.generation, process.phase = generation, "here"
            process.outbox.append(("here", generation))
        elif what == "go" and generation == process.generation and process.phase == "here":
            assert generation in self.may_go
            process.phase = "forming"
        elif what == "meet":
            process.meet = generation
        elif what == "part" and generation == process.generation:
            self.parted.add(process.number)
            process.outbox.append(("met", generation))
        elif what == "leave":
            process.alive, process.exit_status = False, 0

    def live_in_group(self, process: Process) -> bool:
        group = [self.processes[number] for number in self.groups[process.generation]]
        apart = [p for p in group if not p.alive or p.generation != process.generation]
        if apart or any(p.phase == "lost" for p in group):
            process.phase = "lost"
            process.outbox.append(("lost", process.generation))
            return True
        if process.phase == "forming":
            if any(p.phase == "here" for p in group):
                return False
            process.phase = "formed"
            process.step = max(0, *(p.step for p in group))
            process.outbox.append(("formed", process.generation))
            return True
        if any(p.phase in ("forming", "met") or p.stopped for p in group):
            return False
        return self.commit(group)

    def commit(self, group: list[Process]) -> bool:
        """A step needs all; each may learn of it at another time, which a kill in between tests."""
        at = max(p.step for p in group)
        if at < self.num_steps:
            for p in group:
                p.step = at + 1
                p.outbox.append(("beat", p.step))
            assert at + 1 >= self.committed, "a committed step was lost"
            self.committed = at + 1
            if any(p.meet == p.generation for p in group) and at + 1 < self.num_steps:
                self.parted = set()
                for p in group[: self.members.size.num_ranks]:
                    p.phase = "met"
                    p.outbox.append(("met", p.generation))
            return True
        for p in group:
            p.phase = "done"
            p.outbox.append(("done", p.generation))
        return True

    # ---- time

    def random_event(self, faults_left: int) -> int:
        """Something happens; returns how many faults are left."""
        living = [p for p in self.processes.values() if p.alive]
        speaking = [p for p in self.processes.values() if p.outbox and not p.exit_heard]
        dead = [p for p in self.processes.values() if not p.alive and not p.exit_heard]
        roll = self.draws.random()
        if roll < 0.04 and faults_left and living:
            self.kill(self.draws.choice(living).number, self.draws.choice([-9, -11]))
            return faults_left - 1
        if roll < 0.06 and faults_left and living:
            self.draws.choice(living).stopped = True
            return faults_left - 1
        if roll < 0.09:
            for process in living:
                process.stopped = False
        elif roll < 0.15:
            self.tick(self.draws.choice([0.01, 0.1, 0.3]))
            self.beat()
        elif roll < 0.5 and speaking:
            self.hear(self.draws.choice(speaking))
        elif roll < 0.6 and dead:
            self.hear_exit(self.draws.choice(dead))
        elif moving := [p for p in living if not p.stopped]:
            self.live(self.draws.choice(moving))
        return faults_left

    def beat(self) -> None:
        for process in self.processes.values():
            if process.alive and not process.stopped and process.said_ready:
                process.outbox.append(("beat", process.step))

    def run_to_the_end(self) -> None:
        """A fair schedule without further faults; stopped members stay stopped."""
        for _ in range(3000):
            if self.ending is not None:
                return
            for process in list(self.processes.values()):
                while process.outbox and not process.exit_heard and self.ending is None:
                    self.hear(process)
                if not process.alive and not process.exit_heard and self.ending is None:
                    self.hear_exit(process)
                if process.alive and not process.stopped and self.ending is None:
                    self.live(process)
            self.beat()
            if self.ending is None:
                self.tick(0.1)
        raise AssertionError("the run neither ends nor gives up")


@given(
    seed=st.integers(0, 2**32 - 1),
    num_seats=st.integers(1, 4),
    num_spares=st.integers(0, 2),
    num_faults=st.integers(0, 6),
)
def test_random_schedules(seed: int, num_seats: int, num_spares: int, num_faults: int) -> None:
    cluster = Cluster(num_seats, num_spares, seed, heartbeat_s=1.0)
    for _ in range(300):
        if cluster.ending is None:
            num_faults = cluster.random_event(num_faults)
    cluster.run_to_the_end()
    if isinstance(cluster.ending, GiveUp):
        assert cluster.ending.cause and cluster.ending.exit_code == 1
        reasons = ("failed 3 times", "failed 4 times", "3 spares were lost", "did not come")
        assert any(reason in cluster.ending.cause for reason in reasons), cluster.ending.cause
    assert cluster.members.tick(cluster.now + 100) == []


@given(
    seed=st.integers(0, 2**32 - 1),
    num_hosts=st.integers(1, 3),
    num_ranks_each=st.integers(1, 2),
    num_spares=st.integers(0, 2),
    num_faults=st.integers(0, 6),
)
def test_random_schedules_on_several_hosts(
    seed: int, num_hosts: int, num_ranks_each: int, num_spares: int, num_faults: int
) -> None:
    """Whatever dies, each seat stays on its host."""
    ranks, servers = num_hosts * num_ranks_each, num_hosts + 1
    cluster = Cluster(ranks, num_spares, seed, 1.0, servers, num_hosts=num_hosts)
    for _ in range(400):
        if cluster.ending is None:
            num_faults = cluster.random_event(num_faults)
    cluster.run_to_the_end()
    assert isinstance(cluster.ending, AllDone | GiveUp)


@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.lists(
        st.builds(RunSize, st.integers(1, 4), st.integers(1, 3)), min_size=2, max_size=4
    ),
    num_spares=st.integers(0, 2),
    num_faults=st.integers(0, 4),
)
def test_random_schedules_with_other_sizes(
    seed: int, sizes: list[RunSize], num_spares: int, num_faults: int
) -> None:
    """However it is disturbed, each group has one of the sizes asked for, and each is answered."""
    cluster = Cluster(sizes[0].num_ranks, num_spares, seed, 1.0, sizes[0].num_servers, 60)
    wanted, asked = sizes[1:], 0
    for _ in range(400):
        if cluster.ending is None:
            num_faults = cluster.random_event(num_faults)
        if cluster.ending is None and wanted and cluster.draws.random() < 0.05:
            if wanted[0] == cluster.members.size:
                wanted.pop(0)
            elif not cluster.members.is_resizing:
                asked += 1
                cluster.resize(wanted.pop(0))
    cluster.run_to_the_end()
    assert {RunSize(*size) for size in cluster.members.sizes} <= {*sizes}
    assert len(cluster.answers) + cluster.members.is_resizing == asked
    if not isinstance(cluster.ending, GiveUp):
        done = [answer for answer in cluster.answers if isinstance(answer, Resized)]
        assert [cluster.members.sizes[0], *(one.after for one in done)] == cluster.members.sizes


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    before=st.builds(RunSize, st.integers(1, 4), st.integers(1, 3)),
    after=st.builds(RunSize, st.integers(1, 4), st.integers(1, 3)),
    victim=st.integers(-1, 12),
)
def test_a_resize_comes_through_although_one_is_killed(
    seed: int, before: RunSize, after: RunSize, victim: int
) -> None:
    cluster = Cluster(before.num_ranks, 1, seed, 1e6, before.num_servers, 60)
    while cluster.members.step < 1 and cluster.ending is None:
        cluster.random_event(0)
    if before == after or cluster.ending is not None:
        return
    cluster.resize(after)
    at = cluster.draws.randrange(60)
    for moment in range(200):
        if moment == at and cluster.ending is None and victim in cluster.processes:
            cluster.kill(victim)
        if cluster.ending is None:
            cluster.random_event(0)
    cluster.run_to_the_end()
    assert isinstance(cluster.ending, AllDone), cluster.ending
    assert cluster.members.size in (before, after)
    assert len(cluster.answers) + cluster.members.is_resizing == 1


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), num_seats=st.integers(1, 4))
def test_without_a_fault_nobody_is_replaced(seed: int, num_seats: int) -> None:
    cluster = Cluster(num_seats, 1, seed)
    for _ in range(100):
        if cluster.ending is None:
            cluster.random_event(0)
    cluster.run_to_the_end()
    assert isinstance(cluster.ending, AllDone)
    assert list(cluster.groups) == [0]


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), victim=st.integers(0, 2), num_hosts=st.sampled_from([1, 3]))
def test_one_kill_is_always_repaired(seed: int, victim: int, num_hosts: int) -> None:
    cluster = Cluster(3, 1, seed, num_hosts=num_hosts)
    at = cluster.draws.randrange(200)
    for moment in range(300):
        if moment == at and cluster.ending is None:
            cluster.kill(victim)
        if cluster.ending is None:
            cluster.random_event(0)
    cluster.run_to_the_end()
    assert isinstance(cluster.ending, AllDone), cluster.ending


# ---- decisions one by one


def formed(num_seats: int = 3, **options: object) -> Membership:
    """A membership whose first group works, with a spare that is ready."""
    members = Membership(num_seats, 0, MembershipOptions(**options))  # type: ignore[arg-type]
    members.start(0.0)
    for number in range(num_seats):
        members.ready(number, 0.0)
    for number in range(num_seats):
        members.arrived(number, 0)
    for number in range(num_seats):
        members.has_formed(number, 0, 0, 0.0)
    for number in range(num_seats, num_seats + members.num_spares):
        members.ready(number, 0.0)
    return members


def form(members: Membership, now: float, step: int = 0) -> list[Action]:
    generation = members.generation
    for number in list(members.seats):
        members.arrived(number, generation)
    return [
        action
        for number in list(members.seats)
        for action in members.has_formed(number, generation, step, now)
    ]


def test_a_spare_takes_the_seat_and_another_is_started() -> None:
    members = formed()
    assert members.exited(1, -9, 1.0) == [Announce(1, (0, 3, 2))]
    done, spawn = form(members, 1.5)
    assert done == AllFormed(1, 0, 0, ((1, "was killed by SIGKILL"),), 1.0)
    assert spawn == Spawn(4)


def test_a_group_may_find_that_it_can_replace_its_members() -> None:
    """It holds in one memory what others would hold apart; a newcomer does not know that yet."""
    members = Membership(2, 0)
    members.start(0.0)
    for number in (0, 1):
        members.ready(number, 0.0, recovers=False)
        members.arrived(number, 0)
    assert not members.num_spares
    members.has_formed(0, 0, 0, 0.0, True)
    _, spawn = members.has_formed(1, 0, 0, 0.0, True)
    assert spawn == Spawn(2) and members.recovers
    members.ready(2, 0.5, recovers=False)
    assert members.exited(1, -9, 1.0) == [Announce(1, (0, 2))]
    for number in (0, 2):  # which finds no memory now
        members.arrived(number, 1)
        members.has_formed(number, 1, 5, 1.5, False)
    assert not members.recovers
    assert members.exited(2, -9, 2.0) == [Kill(0), Spawn(3)]


def test_a_spare_of_the_same_host_takes_the_seat() -> None:
    """Seats 0 and 1 and the server 4 are on one host, 2, 3 and 5 on the other."""
    members = Membership(4, 2, MembershipOptions(num_hosts=2))
    assert [action.host for action in members.start(0.0)] == [0, 0, 1, 1, 0, 1]  # type: ignore[union-attr]
    for number in range(6):
        members.ready(number, 0.0)
    _, *spawns = form(members, 0.0)
    assert spawns == [Spawn(6, 0), Spawn(7, 1)]
    members.ready(6, 0.5)
    assert members.exited(3, -9, 1.0) == []  # its host's spare is on its way
    assert members.ready(7, 1.1) == [Announce(1, (0, 1, 2, 7, 4, 5))]
    _, *spawns = form(members, 1.5)
    assert spawns == [Spawn(8, 1)]


def test_a_resize_is_told_of_the_step_where_all_met() -> None:
    """Under local steps who has formed goes on alone, while a newcomer is still on its way."""
    members = formed(2)
    assert members.resize(RunSize(3, 0), 1.0, repartitions=False) == [PauseRanks(0)]
    assert members.paused(0, 0, 8, 1.0, "") == []
    assert members.paused(1, 0, 8, 1.1, "") == [Announce(1, (0, 1, 2))]
    for number in range(3):
        members.arrived(number, 1)
    members.has_formed(0, 1, 8, 1.2)
    members.heard(0, 1.3, 11)
    members.exited(2, -9, 1.4)
    (spare,) = [n for n in members.members if n > 2]
    assert members.ready(spare, 1.5) == [Announce(2, (0, 1, spare))]
    resized = [one for one in form(members, 1.6, 11) if isinstance(one, Resized)]
    assert resized == [Resized(RunSize(2, 0), RunSize(3, 0), (), 1.0, 8)]


@pytest.mark.parametrize("status", [0, 1, 7])
def test_an_exit_of_its_own_accord_ends_the_run(status: int) -> None:
    (end,) = formed().exited(1, status, 1.0)
    assert end == GiveUp(f"rank 1 exited with code {status} before the run was done", 1)


def test_a_step_between_failures_makes_them_count_anew() -> None:
    members = formed()
    number, now = 1, 0.0
    for step in range(1, 8):
        now += 1.0
        actions = members.exited(number, -9, now)
        assert isinstance(actions[-1], Announce), actions
        number = members.seats[1]
        spawned = [a.member for a in form(members, now, step) if isinstance(a, Spawn)]
        members.ready(spawned[0], now)
    assert not members.over


def test_the_third_failure_without_a_step_names_step_and_cause() -> None:
    members = formed()
    members.heard(0, 0.5, step=20)
    number, now = 1, 1.0
    for _ in range(2):
        assert isinstance(members.exited(number, -9, now)[-1], Announce)
        number = members.seats[1]
        (spawn,) = [a for a in form(members, now, 20) if isinstance(a, Spawn)]
        members.ready(spawn.member, now)
    members.exited(number, -9, now)
    assert form(members, now, 20) == [
        GiveUp("step 21 failed 3 times, the last time because rank 1 was killed by SIGKILL", 1)
    ]


def test_a_failure_counts_at_the_step_it_happened_even_if_that_is_heard_of_late() -> None:
    members = formed()
    number, now = 1, 1.0
    for _ in range(2):
        members.exited(number, -9, now)
        members.heard(0, now, step=20)  # a survivor's word comes after the death
        number = members.seats[1]
        (spawn,) = [a for a in form(members, now, 20) if isinstance(a, Spawn)]
        members.ready(spawn.member, now)
    members.exited(number, -9, now)
    assert isinstance(form(members, now, 20)[0], GiveUp)


def test_three_groups_that_are_lost_before_they_form_end_the_run() -> None:
    members = formed(num_spares=3)
    assert isinstance(members.exited(0, -9, 1.0)[-1], Announce)
    assert isinstance(members.exited(1, -9, 2.5)[-1], Announce)
    (end,) = members.exited(2, -9, 4.0)
    assert end.cause.startswith("step 1 failed 3 times")


def test_deaths_one_right_after_the_other_are_one_failure() -> None:
    """A spare is seated between them, so each breaks another generation."""
    members = formed(num_spares=3)
    for number in range(3):
        assert isinstance(members.exited(number, -9, 1.0 + number / 10)[-1], Announce)


def test_ranks_that_die_together_are_one_failure() -> None:
    members = formed(4, num_spares=0)
    spawned = [a.member for number in (0, 1, 2) for a in members.exited(number, -9, 1.0)]
    actions = [action for number in spawned for action in members.ready(number, 1.1)]
    assert actions == [Announce(1, (*spawned, 3))]
    assert form(members, 1.2)[0].step == 0


def test_three_spares_lost_without_a_step_end_the_run() -> None:
    members = formed(num_spares=0)
    (spawn,) = members.exited(1, -9, 1.0)
    for _ in range(2):
        (spawn,) = members.exited(spawn.member, -9, 1.1)
    (end,) = members.exited(spawn.member, -9, 1.1)
    assert end.cause == "3 spares were lost at step 1, the last one was killed by SIGKILL"


def test_a_silent_member_is_killed_before_its_seat_is_given_away() -> None:
    members = formed(heartbeat_timeout_s=1.0)
    for number in (0, 2, 3):
        members.heard(number, 2.0)
    assert members.tick(2.0) == [Kill(1)]
    assert members.tick(2.1) == []
    assert members.generation == 0
    assert members.exited(1, -9, 2.2) == [Announce(1, (0, 3, 2))]
    (done, *_) = form(members, 2.3)
    assert done.replaced[0][0] == 1 and "silent" in done.replaced[0][1]


def test_messages_of_an_older_generation_are_ignored() -> None:
    members = formed()
    members.exited(1, -9, 1.0)
    assert members.arrived(0, 0) == members.done(0, 0) == members.has_formed(0, 0, 5, 1.0) == []
    members.lost(0, 0, 1.0)
    assert members.step == 0


def test_a_group_that_broke_without_a_death_forms_again() -> None:
    members = formed(regroup_after_s=2.0)
    members.lost(0, 0, 5.0)
    for number in range(4):
        members.heard(number, 7.5)
    assert members.tick(6.0) == []
    assert members.tick(7.5) == [Announce(1, (0, 1, 2))]
    assert members.tick(7.6) == []


def test_a_spare_that_comes_late_is_not_counted_as_a_failure() -> None:
    members = formed(num_spares=0)
    (spawn,) = members.exited(1, -9, 1.0)
    for number in (0, 2):
        members.lost(number, 0, 1.0)
        members.heard(number, 9.0)
    assert members.ready(spawn.member, 9.0) == [Announce(1, (0, 3, 2))]
    members.heard(spawn.member, 9.0)
    for now in (9.1, 9.2, 9.3, 9.4, 9.5):
        assert members.tick(now) == []
    assert form(members, 9.6)[0].generation == 1


def test_a_spare_that_comes_while_a_group_forms_does_not_disturb_it() -> None:
    members = formed(num_spares=1)
    assert members.exited(1, -9, 1.0) == [Announce(1, (0, 3, 2))]
    late = members._roster.spawn(1.1, 0).member
    assert members.ready(late, 1.2) == []
    assert form(members, 1.3)[0].generation == 1


def test_a_spare_that_dies_before_it_is_ready_is_replaced() -> None:
    members = formed(num_spares=0)
    (spawn,) = members.exited(1, -9, 1.0)
    assert members.exited(spawn.member, -9, 1.1) == [Spawn(4)]
    assert members.ready(4, 1.2) == [Announce(1, (0, 4, 2))]


def test_a_suspect_gets_no_seat() -> None:
    members = formed(heartbeat_timeout_s=1.0)
    for number in (0, 1, 2):
        members.heard(number, 2.0)
    assert members.tick(2.0) == [Kill(3)]
    assert members.exited(1, -9, 2.1) == [Spawn(4)]


def test_a_group_that_does_not_form_names_the_missing() -> None:
    options = MembershipOptions(form_timeout_s=30.0, heartbeat_timeout_s=1000.0)
    members = Membership(3, 0, options)
    members.start(0.0)
    for number in (0, 2):
        members.ready(number, 1.0)
    assert members.tick(30.0) == []
    (end,) = members.tick(31.5)
    assert "did not form within 30 s: rank 1 did not come" in end.cause


def test_who_came_to_a_group_that_does_not_form_again_is_not_missing() -> None:
    members = formed(heartbeat_timeout_s=1000.0, form_timeout_s=30.0, regroup_after_s=0.1)
    members.lost(0, 0, 1.0, "a collective took ten minutes")
    assert members.tick(1.2) == [Announce(1, (0, 1, 2))]
    for number in (0, 2):
        members.arrived(number, 1)
    (end,) = members.tick(31.5)
    assert "did not form within 30 s: rank 1 did not come" in end.cause


def test_a_server_is_called_one() -> None:
    options = MembershipOptions(form_timeout_s=30.0, heartbeat_timeout_s=1000.0)
    members = Membership(2, 2, options)
    members.start(0.0)
    for number in (0, 1, 2):
        members.ready(number, 1.0)
    assert [members.size.name_of(seat) for seat in range(4)] == [
        "rank 0",
        "rank 1",
        "server 0",
        "server 1",
    ]
    (end,) = members.tick(31.5)
    assert "the group of 2 ranks and 2 servers did not form within 30 s: server 1" in end.cause
    members = Membership(1, 1)
    members.start(0.0)
    (end,) = members.exited(1, 3, 1.0)
    assert end.cause == "server 0 exited with code 3 before the run was done"


def cut(**settings: object) -> Membership:
    """Two ranks at work, of which neither can do without the other."""
    members = Membership(2, 0, MembershipOptions(**settings))
    members.start(0.0)
    for number in (0, 1):
        members.ready(number, 0.0, recovers=False)
    for number in (0, 1):
        members.arrived(number, 0)
    for number in (0, 1):
        members.has_formed(number, 0, 0, 0.0)
    return members


def test_where_no_rank_holds_a_copy_all_are_ended_and_begin_again() -> None:
    members = cut()
    assert members.num_spares == 0
    members.heard(1, 1.0, step=7)
    assert members.exited(0, -9, 1.0) == [Kill(1), Spawn(2)]
    assert members.ready(2, 1.1, recovers=False) == []
    assert members.exited(1, -9, 1.2) == [Spawn(3)]
    assert members.ready(3, 1.3, recovers=False) == [Announce(1, (2, 3))]
    members.arrived(2, 1)
    assert members.arrived(3, 1) == [AllArrived(1)]
    members.has_formed(2, 1, 5, 1.4)
    (formed,) = members.has_formed(3, 1, 5, 1.5)
    assert formed == AllFormed(1, 5, 2, ((0, "was killed by SIGKILL"),), 1.0)
    assert members.step == 5


def test_three_losses_after_one_checkpoint_end_the_run_with_the_steps_they_were_at() -> None:
    members, newest = cut(), 0
    for generation, reached in enumerate((7, 9, 8), start=1):
        now, dead, newest = 10.0 * generation, newest, 2 * generation
        members.heard(dead, now, step=reached)
        members.exited(dead, -9, now)
        members.exited(dead + 1, -9, now)
        for number in (newest, newest + 1):
            members.ready(number, now, recovers=False)
        for number in (newest, newest + 1):
            members.arrived(number, generation)
            actions = members.has_formed(number, generation, 5, now)
    (end,) = actions
    assert end.cause.startswith("between steps 6 and 9, the run failed 3 times, the last time")


def test_a_newcomer_is_not_ended_with_those_it_replaces() -> None:
    members = cut()
    members.exited(0, -9, 1.0)
    members.ready(2, 1.1, recovers=False)
    assert members.seats == [2, 1]
    assert members.exited(1, -9, 1.2) == [Spawn(3)]


def test_a_group_that_broke_without_a_death_begins_again() -> None:
    members = cut(regroup_after_s=2.0)
    members.lost(0, 0, 1.0, "connection reset")
    assert members.tick(2.5) == []
    assert members.tick(3.5) == [Kill(0), Kill(1)]


def test_an_error_may_be_the_echo_of_a_death() -> None:
    members = cut()
    assert members.failed(1, "rank 1 failed: connection closed", 1, 1.0) == []
    assert members.exited(0, -9, 1.1) == [Kill(1), Spawn(2)]
    members.exited(1, -9, 1.2)
    for number in (2, 3):
        members.ready(number, 1.3, recovers=False)
    for number in (2, 3):
        members.arrived(number, 1)
        members.has_formed(number, 1, 0, 1.4)
    assert members.tick(9.0) == []


def test_an_error_that_no_death_explains_ends_the_run() -> None:
    members = cut()
    members.failed(1, "rank 1 failed: no", 3, 1.0)
    members.failed(0, "rank 0 failed: connection closed", 1, 1.1)
    assert members.tick(1.5) == []
    assert members.tick(2.5) == [GiveUp("rank 1 failed: no", 3)]


def test_an_error_ends_a_run_of_replicas_at_once() -> None:
    assert formed().failed(1, "rank 1 failed: no", 3, 1.0) == [GiveUp("rank 1 failed: no", 3)]


def test_loading_a_checkpoint_is_not_forming() -> None:
    options = MembershipOptions(form_timeout_s=30.0, heartbeat_timeout_s=1000.0)
    members = Membership(1, 0, options)
    members.start(0.0)
    members.ready(0, 1.0)
    assert members.arrived(0, 0) == [AllArrived(0)]
    assert members.tick(500.0) == []


def test_a_script_that_cannot_be_replaced_ends_the_run() -> None:
    members = cut(scripts=True)
    (end,) = members.exited(0, -9, 1.0)
    assert "rank 0 was killed by SIGKILL" in end.cause and "cannot replace" in end.cause


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (0, "exited with code 0"),
        (3, "exited with code 3"),
        (-9, "was killed by SIGKILL"),
        (-11, "was killed by SIGSEGV"),
        (-6, "was killed by SIGABRT"),
        (-99, "was killed by signal 99"),
    ],
)
def test_an_exit_in_words(status: int, words: str) -> None:
    assert describe_exit(status) == words
