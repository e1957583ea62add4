"""What lies in a run directory for hosts, and what is wrong with it."""

import stat
from pathlib import Path

import msgspec
import pytest

from shoal.cluster.invitation import (
    INVITATION,
    KEYS,
    Invitation,
    read_invitation,
    read_private_invitation,
    remove_invitation,
    write_invitation,
)
from shoal.comm.wire import new_keys
from shoal.errors import UsageError
from shoal.storage.files import write_private


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    made = tmp_path / "runs" / "a-1"
    made.mkdir(parents=True)
    return made


def invitation_of(where: Path, **changes: object) -> Invitation:
    found = Invitation("tcp://10.0.0.1:81", new_keys(), str(where))
    return msgspec.structs.replace(found, **changes)


def test_it_is_read_as_it_was_written_by_its_user_alone(run_dir: Path) -> None:
    written = invitation_of(run_dir)
    write_invitation(written, run_dir)
    assert read_invitation(run_dir) == written and written.endpoint == ("10.0.0.1", 81)
    assert stat.S_IMODE((run_dir / INVITATION).stat().st_mode) == 0o600
    assert stat.S_IMODE((run_dir / KEYS).stat().st_mode) == 0o600
    remove_invitation(run_dir)
    assert list(run_dir.iterdir()) == []
    remove_invitation(run_dir)


def test_an_address_of_the_sixth_version(run_dir: Path) -> None:
    assert invitation_of(run_dir, address="tcp://[fd00::1]:81").endpoint == ("fd00::1", 81)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (None, "holds no run that waits for hosts"),
        ('{"plan": ""}', "under 'data=1', waits for no hosts"),
        ('{"plan": "data=4"}', "it has ended, or was started without --listen"),
        ("{", "holds no run"),
    ],
)
def test_why_there_is_none(run_dir: Path, run: str | None, words: str) -> None:
    if run is not None:
        (run_dir / "run.json").write_text(run)
    with pytest.raises(UsageError, match=words):
        read_invitation(run_dir)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shoal": "0.0.0"}, "was started by Shoal 0.0.0, and this host has"),
        ({"run_dir": "/nowhere"}, "is not the same directory on this host"),
        ({"run_dir": ".."}, "is not the same directory on this host"),
    ],
)
def test_one_that_cannot_be_followed(run_dir: Path, changes: dict[str, str], words: str) -> None:
    write_invitation(invitation_of(run_dir, **changes), run_dir)
    with pytest.raises(UsageError, match=words):
        read_invitation(run_dir)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o666])
def test_one_that_others_may_read_is_refused(run_dir: Path, mode: int) -> None:
    write_invitation(invitation_of(run_dir), run_dir)
    (run_dir / INVITATION).chmod(mode)
    with pytest.raises(UsageError, match="can be read by others"):
        read_invitation(run_dir)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff", b'{"shoal": 3}', b"[" * 9999])
def test_one_that_is_damaged(run_dir: Path, content: bytes) -> None:
    write_private(run_dir / INVITATION, content)
    with pytest.raises(UsageError, match=r"cannot be read: .* Start the run again"):
        read_invitation(run_dir)


def test_one_of_standard_input_holds_its_keys_and_shows_none() -> None:
    keys = new_keys()
    written = Invitation("tcp://10.0.0.1:81", keys)
    content = written.encode()
    assert content.endswith(b"\n") and content.count(b"\n") == 1
    assert Invitation.decode(content, "it") == written
    assert keys.client_secret not in repr(written) and keys.server_secret not in str(written)


def test_one_with_other_keys_is_refused() -> None:
    bad = msgspec.structs.replace(new_keys(), server_public=new_keys().server_public)
    with pytest.raises(UsageError, match="does not hold the keys of a run"):
        Invitation.decode(Invitation("tcp://10.0.0.1:81", bad).encode(), "it")


def test_a_mounted_secret_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_private_invitation(path)
    written = Invitation("tcp://10.0.0.1:81", new_keys())
    write_private(path, written.encode())
    assert read_private_invitation(path) == written
    path.chmod(0o644)
    with pytest.raises(UsageError, match="can be read by others"):
        read_private_invitation(path)
