"""Doors: messages come whole and in order, a peer that is gone is seen, and nobody waits."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from shoal.comm.local_listener import MOST_BYTES, LocalConnection, LocalListener, connect_local


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[LocalListener]:
    with closing(LocalListener(str(tmp_path))) as opened:
        yield opened


@pytest.fixture
def sides(listener: LocalListener) -> Iterator[tuple[LocalConnection, LocalConnection]]:
    near = connect_local(listener.name)
    far = listener.accept()
    assert near is not None and far is not None
    with closing(near), closing(far):
        yield near, far


def test_messages_come_whole_and_in_order(sides: tuple[LocalConnection, LocalConnection]) -> None:
    near, far = sides
    sent = [b"a", b"b" * 5_000, b"c" * MOST_BYTES]
    assert all(near.send(message) for message in sent)
    assert [far.receive() for _ in sent] == sent
    assert far.receive() is None
    assert far.send(b"back") and near.receive() == b"back"


def test_what_is_too_large_goes_another_way(sides: tuple[LocalConnection, LocalConnection]) -> None:
    near, far = sides
    assert not near.send(b"x" * (MOST_BYTES + 1))
    assert far.receive() is None


def test_nobody_waits_for_who_does_not_read(sides: tuple[LocalConnection, LocalConnection]) -> None:
    near, far = sides
    sent = 0
    while near.send(bytes([sent % 256]) * 10_000):
        sent += 1
    assert sent
    assert [far.receive() for _ in range(sent)] == [bytes([i % 256]) * 10_000 for i in range(sent)]
    assert near.send(b"again")


def test_who_is_gone_is_seen(sides: tuple[LocalConnection, LocalConnection]) -> None:
    near, far = sides
    near.send(b"last")
    near.close()
    assert far.receive() == b"last"
    with pytest.raises(ConnectionError):
        far.receive()
    assert not far.send(b"to nobody")


def test_other_users_are_not_let_in(
    listener: LocalListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = connect_local(listener.name)
    assert near is not None
    with closing(near):
        monkeypatch.setattr("shoal.comm.unix.os.geteuid", lambda: 12_345)
        assert listener.accept() is None
        with pytest.raises(ConnectionError):
            near.receive()
        assert connect_local(listener.name) is None


def test_a_door_that_is_not_there(tmp_path: Path) -> None:
    with closing(LocalListener(str(tmp_path))) as listener:
        name = listener.name
        assert listener.accept() is None  # nobody came
    assert connect_local(name) is None and not list(tmp_path.iterdir())
