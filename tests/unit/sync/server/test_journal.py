"""The journal of a server: whatever is cut or damaged, what is whole in it is done again."""

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch

from shoal.sync.server import journal as module
from shoal.sync.server.journal import Journal
from shoal.sync.server.messages import PulledParameters, RequestRefused
from shoal.sync.server.server import Server
from tests.unit.sync.server.played import (
    Worker,
    make_server,
    only,
    push_all,
    send,
    state_bytes,
    values,
)

LIFE = "one"


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(module, "warn_on_screen", found.append)
    return found


def start(directory: Path, kind: str = "adam") -> Server:
    return make_server(kind=kind, journal=Journal(directory, LIFE))


def train(server: Server, batches: range) -> list[bytes]:
    """What the server holds after each batch."""
    worker, found = Worker(0, server), []
    worker.settings = [{"lr": 0.1}]
    send(server, worker, worker.hello())
    for batch in batches:
        push_all(server, worker, batch, batch + 0.3)
        send(server, worker, worker.sum(batch))
        assert isinstance(only(send(server, worker, worker.apply(batch))), PulledParameters)
        found.append(state_bytes(server))
    return found


def records(directory: Path) -> list[tuple[bytes, list[bytes]]]:
    return list(Journal(directory, LIFE).read())


def test_a_successor_holds_the_same_bits(tmp_path: Path) -> None:
    server = start(tmp_path)
    train(server, range(5))
    successor = start(tmp_path)
    assert state_bytes(successor) == state_bytes(server)
    assert all(successor.shard.optimizer.state.values()), "Adam keeps no state"
    undisturbed = make_server(kind="adam")
    train(undisturbed, range(8))
    train(successor, range(5, 8))
    assert state_bytes(successor) == state_bytes(undisturbed)


def test_a_log_cut_at_every_byte_is_read_as_far_as_it_is_whole(tmp_path: Path) -> None:
    server = start(tmp_path / "a")
    log, ends, states = tmp_path / "a" / "log-000000", [0], [state_bytes(start(tmp_path / "c"))]
    for batch in range(2):
        states += train(server, range(batch, batch + 1))
        ends.append(log.stat().st_size)
    content, whole = log.read_bytes(), records(tmp_path / "a")
    assert len(whole) == 2
    for length in range(len(content) + 1):
        log.write_bytes(content[:length])
        num_whole = sum(end <= length for end in ends) - 1
        assert records(tmp_path / "a") == whole[:num_whole]
        assert log.stat().st_size == ends[num_whole], "what was cut short would be appended to"
        if length - ends[num_whole] in (0, 1) or length == len(content) - 1:
            successor = start(tmp_path / "a")
            assert state_bytes(successor) == states[num_whole]


def test_after_a_cut_it_goes_on(tmp_path: Path) -> None:
    server = start(tmp_path)
    states = train(server, range(4))
    log = tmp_path / "log-000000"
    os.truncate(log, log.stat().st_size - 1)
    assert train(start(tmp_path), range(3, 4)) == states[3:]
    assert state_bytes(start(tmp_path)) == states[3]


def test_a_flipped_byte_ends_what_is_believed(tmp_path: Path) -> None:
    server = start(tmp_path)
    log, ends = tmp_path / "log-000000", [0]
    for batch in range(3):
        train(server, range(batch, batch + 1))
        ends.append(log.stat().st_size)
    content, whole = log.read_bytes(), records(tmp_path)
    for place in range(ends[1], ends[2]):
        bits = 1 << place % 8
        log.write_bytes(content[:place] + bytes([content[place] ^ bits]) + content[place + 1 :])
        assert records(tmp_path) == whole[:1], f"byte {place}"


def test_snapshots_take_the_place_of_the_log(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "LEAST_BYTES", 1)
    monkeypatch.setattr(module, "MOST_GROWTH", 2)
    server = start(tmp_path)
    for batch in range(20):
        state = train(server, range(batch, batch + 1))
        assert state_bytes(start(tmp_path)) == state[0]
        assert len(list(tmp_path.iterdir())) <= 4, "old ones are left"
    assert records(tmp_path)[0][0].find(b"snapshot") > 0
    assert train(server, range(20, 22))[-1] == state_bytes(start(tmp_path))


def test_files_are_written_over_and_what_they_held_is_not_believed(tmp_path: Path) -> None:
    server = start(tmp_path)
    train(server, range(3))
    assert server.journal is not None
    for _ in range(2):  # the second over the pages of the first, and its log over the old one
        server.journal.begin(*server.snapshot())
    log = tmp_path / "log-000002"
    assert log.stat().st_size > 0 and (tmp_path / "spare").stat().st_size > 0
    content = log.read_bytes()
    state = train(server, range(3, 4))[0]
    assert len(log.read_bytes()) == len(content), "the file grew, or was made anew"
    successor = start(tmp_path)
    assert state_bytes(successor) == state
    assert successor.clock.committed == 4


class Killed(BaseException):
    """As if the process had ended here."""


@pytest.mark.parametrize("call", ["write", "rename", "open", "unlink"])
def test_killed_within_a_snapshot(tmp_path: Path, monkeypatch, call: str) -> None:
    server = start(tmp_path)
    states = train(server, range(3))
    monkeypatch.setattr(Journal, "is_long", True)
    owner = os if call == "write" else Path
    for time in range(4):  # at the first such call, at the second, ...
        trial = tmp_path.with_name(f"{call}-{time}")
        shutil.copytree(tmp_path, trial)
        server, left, real = start(trial), [time], getattr(owner, call)

        def kill(*args, left=left, real=real, **named):
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return real(*args, **named)

        with monkeypatch.context() as patch:
            patch.setattr(owner, call, kill)
            try:
                train(server, range(3, 4))
            except Killed:
                pass
            else:
                states += [state_bytes(server)]
        assert state_bytes(start(trial)) in (states[2], state_bytes(server))


def test_a_damaged_snapshot_is_not_built_upon(tmp_path: Path, said: list[str]) -> None:
    server = start(tmp_path)
    train(server, range(3))
    assert server.journal is not None
    server.journal._most_bytes = 0
    train(server, range(3, 6))  # a snapshot, and updates after it
    snapshot = tmp_path / "snapshot-000001"
    content = bytearray(snapshot.read_bytes())
    content[-1] ^= 1
    snapshot.write_bytes(content)
    successor = start(tmp_path)
    assert state_bytes(successor) == state_bytes(make_server(kind="adam"))
    assert "--resume" in said[0] and "damaged" in said[0]
    worker = Worker(0, successor)
    send(successor, worker, worker.hello())
    for question in (worker.sum(6), worker.apply(6), worker.pull(6)):
        refused = only(send(successor, worker, question))
        assert isinstance(refused, RequestRefused) and "--resume" in refused.why


@pytest.mark.parametrize("num_bytes", [0, 1, 100, 700])
@pytest.mark.parametrize("is_long", [False, True])
def test_a_full_disk_ends_the_journal_and_not_the_run(
    tmp_path: Path, monkeypatch, said: list[str], num_bytes: int, is_long: bool
) -> None:
    server, room, write = start(tmp_path / "j"), [num_bytes], os.write
    train(server, range(2))
    monkeypatch.setattr(Journal, "is_long", is_long)

    def fill(fd: int, content: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(fd, content[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(os, "write", fill)
    train(server, range(2, 6))
    monkeypatch.undo()
    undisturbed = make_server(kind="adam")
    train(undisturbed, range(6))
    assert state_bytes(server) == state_bytes(undisturbed)
    assert not (tmp_path / "j").exists(), "a log with holes was left"


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch, said: list[str]) -> None:
    def fail(fd: int, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    server = start(tmp_path)
    monkeypatch.setattr(os, "write", fail)
    train(server, range(2))
    assert len(said) == 1 and "No space left" in said[0] and "--resume" in said[0]


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path, said: list[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    server = start(tmp_path / "file" / "journal")
    train(server, range(2))
    assert len(said) == 1 and "file" in said[0]


def test_the_journal_of_another_life_is_removed(tmp_path: Path) -> None:
    train(start(tmp_path), range(3))
    other = make_server(kind="adam", journal=Journal(tmp_path, "two"))
    assert other.clock.committed == 0 and torch.equal(values(other), torch.zeros(47))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["life"]


def test_at_the_end_nothing_is_left(tmp_path: Path) -> None:
    server = start(tmp_path / "j")
    train(server, range(2))
    assert server.journal is not None
    server.journal.remove()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("is_long", [False, True])
def test_a_successor_knows_how_many_updates_there_were(tmp_path, monkeypatch, is_long) -> None:
    """By which an update made of old parameters counts less."""
    server = start(tmp_path)
    train(server, range(3))
    monkeypatch.setattr(Journal, "is_long", is_long)
    train(server, range(3, 5))
    assert start(tmp_path).version == server.version == 5
