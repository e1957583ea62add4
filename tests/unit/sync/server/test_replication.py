"""Copies under any schedule: what was told outlives every death that leaves one holder.

The machine plays servers whose state is the list of all they did, over a wire that loses, doubles,
delays and mixes up, and kills them in between. Acknowledged is what a server let an answer out for.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shoal.sync.server.replication import (
    AskBackup,
    Backup,
    BackupStatus,
    Leader,
    PeerMessage,
    backups_of,
    leaders_of,
)

PICK = st.integers(0, 999)


class State:
    """All that was done, by number. A record tells of one deed, or of all."""

    def __init__(self) -> None:
        self.done: list[int] = []

    def redo(self, frames: Sequence[memoryview]) -> None:
        told = msgspec.msgpack.decode(frames[0])
        self.done = [*self.done, told] if isinstance(told, int) else told

    def snapshot(self) -> list[Any]:
        return [msgspec.msgpack.encode(self.done)]


class Process:
    """A server: its own shard and those that it keeps, by their servers."""

    def __init__(self, number: int, num_servers: int, copies: int):
        self.own, self.told = State(), 0
        backups = backups_of(number, num_servers, copies)
        self.leader: Leader[int] = Leader(number, backups, self.own.snapshot, self.own.redo)
        self.copies = {owner: State() for owner in leaders_of(number, num_servers, copies)}
        self.kept = {owner: Backup(s.redo, s.snapshot) for owner, s in self.copies.items()}

    def number_of(self, server: int) -> int:
        """The last record of a server's shard that is here."""
        return self.leader.number if server == self.leader.server else self.kept[server].number


class Deaths(RuleBasedStateMachine):
    @initialize(num_servers=st.integers(2, 4), more=st.integers(0, 1))
    def start(self, num_servers: int, more: int) -> None:
        self.num_servers, self.copies = num_servers, min(2 + more, num_servers)
        self.generation, self.next_deed = 0, 0
        self.there: list[tuple[int, int, Any, list[memoryview]]] = []  # to a keeper
        self.back: list[tuple[int, int, BackupStatus, list[memoryview]]] = []  # to a leader
        self.acknowledged: list[list[int]] = [[] for _ in range(num_servers)]
        self.safe = [0] * num_servers  # the number of the last that was
        self.processes = [self.process(number) for number in range(num_servers)]
        self.form()

    def process(self, number: int) -> Process:
        return Process(number, self.num_servers, self.copies)

    def form(self) -> None:
        for process in self.processes:
            for backup in process.kept.values():
                backup.begin(self.generation)
            self.send(process.leader.begin(self.generation))

    def send(self, sends: Sequence[PeerMessage]) -> None:
        for backup, message, frames in sends:
            views = [memoryview(frame) for frame in frames]  # type: ignore[arg-type]
            self.there.append((message.server, backup, message, views))

    # ---- what servers do

    @rule(pick=PICK)
    def step(self, pick: int) -> None:
        process = self.processes[pick % self.num_servers]
        if process.leader.is_ready:
            self.next_deed += 1
            process.own.done.append(self.next_deed)
            frames = [msgspec.msgpack.encode(self.next_deed)]
            self.send(process.leader.write(frames, whole=False))
            process.leader.hold(self.next_deed)

    @rule(pick=PICK)
    def load(self, pick: int) -> None:
        """The whole state is written anew."""
        process = self.processes[pick % self.num_servers]
        if process.leader.is_ready:
            self.next_deed += 1
            process.own.done.append(self.next_deed)
            self.send(process.leader.write(process.own.snapshot(), whole=True))
            process.leader.hold(self.next_deed)

    @rule(pick=PICK)
    def ask(self, pick: int) -> None:
        self.send(self.processes[pick % self.num_servers].leader.ask())

    # ---- the wire

    @rule(pick=PICK, times=st.sampled_from([0, 1, 1, 1, 2]))
    def deliver(self, pick: int, times: int) -> None:
        if self.there:
            self.arrive(pick % len(self.there), times)

    @rule(times=st.sampled_from([1, 1, 1, 1, 0]))
    def deliver_the_next(self, times: int) -> None:
        if self.there:
            self.arrive(0, times)
        if self.back:
            self.answer(0, times)

    @rule(pick=PICK, times=st.sampled_from([0, 1, 1, 1, 2]))
    def deliver_back(self, pick: int, times: int) -> None:
        if self.back:
            self.answer(pick % len(self.back), times)

    def arrive(self, place: int, times: int) -> None:
        owner, number, message, views = self.there[place]
        if times < 2:
            del self.there[place]
        backup = self.processes[number].kept[owner]
        answer = backup.handle(message, views) if times else None
        if answer is not None:
            have, frames = answer
            made = [memoryview(frame) for frame in frames]  # type: ignore[arg-type]
            self.back.append((number, owner, have, made))
            backup.catch_up()

    def answer(self, place: int, times: int) -> None:
        number, owner, have, views = self.back[place]
        if times < 2:
            del self.back[place]
        if times:
            process = self.processes[owner]
            self.send(process.leader.handle(number, have, views))
            for deed in process.leader.release():
                self.acknowledge(owner, deed)

    def acknowledge(self, owner: int, deed: int) -> None:
        self.acknowledged[owner].append(deed)
        leader = self.processes[owner].leader
        self.safe[owner] = max(self.safe[owner], leader._safe())

    # ---- deaths

    @rule(pick=PICK, also=st.none() | PICK)
    def kill(self, pick: int, also: int | None) -> None:
        """One server or two, unless nobody would be left who knows what was acknowledged."""
        dead = {number % self.num_servers for number in (pick, also) if number is not None}
        for server in range(self.num_servers):
            holders = {server, *backups_of(server, self.num_servers, self.copies)}
            known = [self.processes[h].number_of(server) for h in holders - dead]
            if max(known, default=-1) < max(self.safe[server], self.has_begun(server)):
                return
        for number in dead:
            self.processes[number] = self.process(number)
        self.generation += 1
        self.form()

    def has_begun(self, server: int) -> int:
        """Whoever waits for a predecessor's state would begin anew if all who have it died."""
        leader = self.processes[server].leader
        return 0 if leader.is_ready else self.safe[server]

    @invariant()
    def what_was_told_is_there_once(self) -> None:
        for server, process in enumerate(getattr(self, "processes", ())):
            done = process.own.done
            assert len(set(done)) == len(done)
            if process.leader.is_ready:
                assert process.leader.number >= self.safe[server]
                assert [deed for deed in done if deed in self.acknowledged[server]] == (
                    self.acknowledged[server]
                )

    def teardown(self) -> None:
        """At the end of all faults, copies are what they are copies of, and nothing is held."""
        processes = getattr(self, "processes", [])
        for _ in range(6):
            for process in processes:
                self.send(process.leader.ask())
            while self.there or self.back:
                self.deliver_the_next(1)
        for process in processes:
            assert process.leader.is_ready and not process.leader.is_waiting()
            assert not list(process.leader.release()) and not process.leader._held
            for owner, copy in process.copies.items():
                assert copy.done == processes[owner].own.done
            assert not process.leader._sent, "records that all have are not kept"


Deaths.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestDeaths = Deaths.TestCase


class TestManyDeaths(Deaths.TestCase):
    settings = settings(stateful_step_count=80, deadline=None)
    pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


def pair() -> tuple[Process, Process]:
    first, second = Process(0, 2, 2), Process(1, 2, 2)
    for process in (first, second):
        for backup in process.kept.values():
            backup.begin(1)
    return first, second


def pass_on(sends: Sequence[PeerMessage], first: Process, second: Process) -> list[PeerMessage]:
    """Let the second hear the first, and the first the answers."""
    found: list[PeerMessage] = []
    for _, message, frames in sends:
        answer = second.kept[0].handle(message, [memoryview(f) for f in frames])  # type: ignore
        assert answer is not None
        found += first.leader.handle(1, answer[0], [memoryview(f) for f in answer[1]])  # type: ignore
        second.kept[0].catch_up()
    return found


def test_an_answer_waits_for_the_copy_and_no_longer() -> None:
    first, second = pair()
    assert not pass_on(first.leader.begin(1), first, second)
    assert first.leader.is_ready
    sends = first.leader.write([msgspec.msgpack.encode(1)], whole=False)
    first.leader.hold(1)
    assert not list(first.leader.release())
    assert not pass_on(sends, first, second)
    assert list(first.leader.release()) == [1]
    assert second.copies[0].done == [1]


def test_after_a_loss_only_what_is_missing_is_sent_again() -> None:
    first, second = pair()
    pass_on(first.leader.begin(1), first, second)
    sends = [first.leader.write([msgspec.msgpack.encode(n)], whole=False) for n in (1, 2, 3)]
    pass_on(sends[0], first, second)  # the others are lost
    again = pass_on(first.leader.ask(), first, second)
    assert [send.message.number for send in again] == [2, 3]  # type: ignore[union-attr]
    pass_on(again, first, second)
    assert second.copies[0].done == [1, 2, 3] and not first.leader.is_waiting()
    assert not first.leader.ask(), "nobody is asked who has everything"


def test_a_keeper_that_lived_on_is_sent_nothing() -> None:
    first, second = pair()
    pass_on(first.leader.begin(1), first, second)
    pass_on(first.leader.write([msgspec.msgpack.encode(1)], whole=False), first, second)
    second.kept[0].begin(2)
    (question,) = first.leader.begin(2)
    assert isinstance(question.message, AskBackup)
    assert not pass_on([question], first, second)
    assert not first.leader.is_waiting()
