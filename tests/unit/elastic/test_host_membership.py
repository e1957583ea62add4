"""The supervisor's decisions when hosts are lost and come, under random schedules and one by one.

The simulation is that of `test_membership.py`, with hosts: all members of one end at once, nothing
is heard of their ends, and what they had sent may be heard before the loss is or after it.
"""

from hypothesis import given
from hypothesis import strategies as st

from shoal.elastic.actions import (
    Action,
    AllDone,
    Announce,
    GiveUp,
    HostAdded,
    HostGone,
    Kill,
    PauseRanks,
    Resized,
    Spawn,
)
from shoal.elastic.membership import Membership, MembershipOptions
from shoal.plans.resize import RunSize, SizeRules
from tests.unit.elastic.test_membership import Cluster, form

PLAIN = SizeRules((1, 2, 3, 4, 5, 6), copies=2, in_place=True, at_once=True)
WINDOWS = SizeRules((2, 3, 6), copies=2, in_place=True, at_once=False)
CUT = SizeRules((2, 4, 6), replica=2)
FIXED = SizeRules()


class HostCluster(Cluster):
    """Hosts that are lost, and heard of as lost later; others that come."""

    recovers = True

    def __init__(self, *arguments: object, rules: SizeRules, num_hosts: int, **options: object):
        self.hosts = set(range(num_hosts))  # that are there
        self.unheard: list[int] = []  # lost, and not known to be
        self.next_host = num_hosts
        self.num_restarts = 0
        super().__init__(
            *arguments,  # type: ignore[arg-type]
            num_hosts=num_hosts,
            rules=rules,
            host_timeout_s=20.0,
            **options,  # type: ignore[arg-type]
        )

    def lose(self, host: int) -> None:
        self.hosts.remove(host)
        self.unheard.append(host)
        for process in self.processes.values():
            if self.host_of_member[process.number] == host:
                self.kill(process.number)
                process.exit_heard = True  # never: what it sent may come late

    def hear_loss(self) -> None:
        host = self.unheard.pop(0)
        self.act(self.members.host_lost(host, "was silent", self.now))

    def join(self, num_slots: int) -> None:
        self.hosts.add(self.next_host)
        self.next_host += 1
        self.act(self.members.host_joined(self.next_host - 1, num_slots, self.now))

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Spawn) and action.host not in self.hosts:
                assert action.host in self.unheard, "a process was started on a lost host"
                super().act([action])
                process = self.processes[action.member]
                process.alive, process.exit_heard = False, True
            else:
                super().act([action])

    def hear(self, process) -> None:  # type: ignore[no-untyped-def]
        if process.outbox[0][0] == "ready" and not self.recovers:
            process.outbox.popleft()
            self.members.heard(process.number, self.now)
            self.act(self.members.ready(process.number, self.now, recovers=False))
        else:
            super().hear(process)

    def check_hosts(self, plan: Announce) -> None:
        """No member of a host that is known to be lost is seated."""
        self.num_restarts = self.members.restarts
        for number in plan.seats:
            host = self.host_of_member[number]
            assert host in self.hosts or host in self.unheard, "a lost host has a seat"

    def check_holders(self, before: tuple[int, ...], now: tuple[int, ...]) -> None:
        """Who had a seat and has none waits to leave, or is dead; who has another is alone in it.
        Where all began again, nobody of before is left that holds a state."""
        restarted = self.members.restarts != self.num_restarts
        for number in before:
            process = self.processes[number]
            if restarted:
                assert not process.alive or process.step < 0, "a state outlived a restart"
            elif number not in now and process.alive:
                known = self.members.members.get(number)
                assert number in self.members._leaving or known is None or known.suspected
        rules = self.members.options.rules
        assert len(now) == sum(self.members.size)
        assert self.members.size.num_ranks in (rules.counts or (6,))

    def drain(self) -> None:
        """What lost members had sent is heard late, and changes nothing."""
        for process in list(self.processes.values()):
            if not process.alive and self.host_of_member[process.number] not in self.hosts:
                while process.outbox and self.ending is None:
                    self.hear(process)

    def run_to_the_end(self) -> None:
        while self.unheard and self.ending is None:
            self.hear_loss()
        if self.ending is None:
            self.drain()
        super().run_to_the_end()


@given(
    seed=st.integers(0, 2**32 - 1),
    rules=st.sampled_from([PLAIN, WINDOWS, CUT, FIXED]),
    num_servers=st.sampled_from([0, 3]),
    num_losses=st.integers(0, 3),
    num_joins=st.integers(0, 3),
    num_faults=st.integers(0, 2),
)
def test_random_losses_and_joins(
    seed: int,
    rules: SizeRules,
    num_servers: int,
    num_losses: int,
    num_joins: int,
    num_faults: int,
) -> None:
    """Each generation is full and without a lost host, and the run ends or says why it cannot."""
    HostCluster.recovers = rules.in_place
    cluster = HostCluster(6, 1, seed, 1.0, num_servers, 60, rules=rules, num_hosts=3)
    for _ in range(600):
        if cluster.ending is not None:
            break
        roll = cluster.draws.random()
        if roll < 0.02 and num_losses and len(cluster.hosts) > 1:
            num_losses -= 1
            cluster.lose(cluster.draws.choice(sorted(cluster.hosts - {0})))
        elif roll < 0.05 and cluster.unheard:
            cluster.hear_loss()
        elif roll < 0.06 and num_joins:
            num_joins -= 1
            cluster.join(cluster.draws.choice([1, 2, 4]))
        elif roll < 0.08:
            cluster.drain()
        else:
            num_faults = cluster.random_event(num_faults)
    cluster.run_to_the_end()
    if isinstance(cluster.ending, GiveUp):
        cause, code = cluster.ending
        reasons = ("failed 3 times", "failed 4 times", "3 spares were lost", "did not come")
        assert any(why in cause for why in (*reasons, "no other host came")), cause
        assert code == (75 if "no other host" in cause else 1)


@given(
    seed=st.integers(0, 2**32 - 1),
    rules=st.sampled_from([PLAIN, WINDOWS, CUT]),
    lost=st.integers(1, 2),
    at=st.integers(0, 250),
)
def test_one_loss_is_always_survived(seed: int, rules: SizeRules, lost: int, at: int) -> None:
    """With the largest size that fits; and one that comes makes it whole again."""
    HostCluster.recovers = rules.in_place
    cluster = HostCluster(6, 1, seed, 1e6, 0, 200, rules=rules, num_hosts=3)
    for moment in range(400):
        if moment == at and cluster.ending is None:
            cluster.lose(lost)
            cluster.hear_loss()
        if moment == at + 60 and cluster.ending is None and seed % 2:
            cluster.join(2)
        if cluster.ending is None:
            cluster.random_event(0)
    cluster.run_to_the_end()
    assert isinstance(cluster.ending, AllDone), cluster.ending
    smaller = 3 if rules is WINDOWS else 4
    grows = seed % 2 and rules.in_place
    if rules is CUT and seed % 2:  # without a checkpoint there is no occasion
        assert cluster.members.size.num_ranks in (4, 6)
    else:
        assert cluster.members.size.num_ranks == (6 if grows else smaller)


# ---- decisions one by one


def members_on(
    hosts: tuple[int, ...],
    num_ranks: int,
    rules: SizeRules,
    recovers: bool = True,
    **options: object,
) -> Membership:
    """A group at work, without spares."""
    members = Membership(
        num_ranks,
        len(hosts) - num_ranks,
        MembershipOptions(num_spares=0, hosts=hosts, rules=rules, **options),  # type: ignore[arg-type]
    )
    members.start(0.0)
    for number in range(len(hosts)):
        members.ready(number, 0.0, recovers)
    form(members, 0.0)
    return members


def test_survivors_fill_the_first_seats() -> None:
    members = members_on((0, 1, 2), 3, PLAIN)
    gone, announce = members.host_lost(1, "was silent", 1.0)
    assert gone == HostGone(1, "host 1 was silent", "the others go on: data 3 -> 2")
    assert announce == Announce(1, (0, 2))
    actions = form(members, 1.5, 7)
    assert Resized(RunSize(3), RunSize(2), (), 1.0, 0) in actions


def test_a_server_with_a_copy_moves_and_one_without_takes_all_back() -> None:
    hosts = (0, 1, 2, 0, 1, 2)
    members = members_on(hosts, 3, PLAIN)
    _, spawn = members.host_lost(1, "was silent", 1.0)
    assert spawn == Spawn(6, 0)
    assert members.ready(6, 1.1) == [Announce(1, (0, 2, 3, 6, 5))]
    members = members_on(hosts, 3, PLAIN._replace(copies=1))
    gone, *actions = members.host_lost(1, "was silent", 1.0)
    assert gone.then == "all begin again from the newest checkpoint: data 3 -> 2"  # type: ignore[union-attr]
    assert [a for a in actions if isinstance(a, Kill)] == [Kill(n) for n in (0, 2, 3, 5)]


def test_all_are_gone_before_all_begin_again() -> None:
    members = members_on((0, 0, 1, 1, 2, 2), 6, CUT, recovers=False)
    _, *actions = members.host_lost(2, "was silent", 1.0)
    assert actions[:4] == [Kill(n) for n in range(4)]
    new = [action.member for action in actions if isinstance(action, Spawn)]
    assert [a.host for a in actions if isinstance(a, Spawn)] == [0, 0, 1, 1]
    for number in new:
        assert members.ready(number, 1.1, recovers=False) == []
    for number in range(3):
        assert members.exited(number, -9, 1.2) == []
    assert members.exited(3, -9, 1.3) == [Announce(1, tuple(new))]
    assert members.sizes == [RunSize(4)] and members.restarts == 1


def test_a_member_of_a_lost_host_is_a_stranger() -> None:
    members = members_on((0, 1, 2), 3, PLAIN)
    members.host_lost(1, "was silent", 1.0)
    generation, step = members.generation, members.step
    members.heard(1, 1.1, step=99)
    assert members.ready(1, 1.1) == members.arrived(1, 1) == members.done(1, 1) == []
    assert members.has_formed(1, 1, 99, 1.1) == members.exited(1, -9, 1.2) == []
    assert members.failed(1, "rank 1 failed", 1, 1.2) == []
    assert members.host_lost(1, "was silent", 1.3) == []
    assert (members.generation, members.step) == (generation, step)


def test_a_run_that_cannot_go_on_waits_for_a_host_and_no_longer_than_asked() -> None:
    def lost() -> Membership:
        members = members_on((0, 1), 2, FIXED, recovers=False, host_timeout_s=60.0)
        gone, *_ = members.host_lost(1, "was silent", 1.0)
        assert gone == HostGone(1, "host 1 was silent", "all wait for another host")
        assert members.exited(0, -9, 1.1) == []
        assert members.is_waiting and members.tick(60.9) == []
        return members

    (end,) = lost().tick(61.1)
    assert isinstance(end, GiveUp) and end.exit_code == 75
    assert "host 1 was silent; no other host came within 60 s" in end.cause
    members = lost()
    added, *spawns = members.host_joined(2, 1, 50.0)
    assert added == HostAdded(2, 1, "all begin again from a checkpoint")
    assert spawns == [Spawn(2, 0), Spawn(3, 2)]
    assert members.tick(70.0) == [] and not members.is_waiting


def test_a_host_that_comes_gets_what_the_run_is_short_of() -> None:
    members = members_on((0, 1, 2), 3, PLAIN)
    members.host_lost(1, "was silent", 1.0)
    form(members, 1.1)
    added, spawn = members.host_joined(3, 1, 2.0)
    assert added == HostAdded(3, 1, "the run grows") and spawn == Spawn(3, 3)
    assert members.ready(3, 2.1) == [PauseRanks(1)]
    for number in (0, 2):
        actions = members.paused(number, 1, 5, 2.2, "")
    assert actions == [Announce(2, (0, 2, 3))]
    assert members.host_joined(4, 1, 3.0) == [HostAdded(4, 1, "stands by")]


def test_a_host_that_stands_by_takes_the_seats_of_the_next_that_is_lost() -> None:
    members = members_on((0, 1, 2), 3, PLAIN)
    members.host_joined(3, 4, 1.0)
    gone, spawn = members.host_lost(2, "was silent", 2.0)
    assert gone == HostGone(2, "host 2 was silent", "the others go on")
    assert spawn == Spawn(3, 3)
    assert members.ready(3, 2.1) == [Announce(1, (0, 1, 3))]


def test_three_losses_without_a_step_end_the_run() -> None:
    members = members_on((0, 1, 2, 3), 4, PLAIN)
    for host in (1, 2):
        assert not isinstance(members.host_lost(host, "was silent", 10.0 * host)[-1], GiveUp)
        form(members, 10.0 * host)
    members.host_lost(3, "was silent", 30.0)
    (end,) = form(members, 30.1)
    assert isinstance(end, GiveUp) and "failed 3 times" in end.cause


def test_an_error_of_a_rank_may_be_the_echo_of_a_lost_host() -> None:
    members = members_on((0, 1), 2, FIXED, recovers=False, heartbeat_timeout_s=10.0)
    members.failed(0, "rank 0 failed: connection closed", 1, 1.0)
    assert members.exited(0, 1, 6.0) == [], "it has waited for an answer"
    members.heard(1, 9.0)
    assert members.tick(9.5) == []
    members.host_lost(1, "was silent", 10.0)
    assert members.is_waiting and members.tick(15.0) == []


def test_a_group_whose_host_may_be_lost_is_not_formed_again() -> None:
    members = members_on((0, 1), 2, PLAIN, heartbeat_timeout_s=10.0, regroup_after_s=2.0)
    members.lost(0, 0, 1.0, "connection reset")
    members.heard(0, 4.0)
    assert members.tick(4.0) == []
    members.heard(1, 4.1)
    assert members.tick(4.1) == [Announce(1, (0, 1))]
