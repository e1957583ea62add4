"""Signed checkpoints are read by who has the key, and nothing else is."""

import hashlib
import hmac
from pathlib import Path

import pytest

from shoal.checkpoint.load import CheckpointReader
from shoal.checkpoint.manifest import MANIFEST, seal
from shoal.checkpoint.signing import SIGNATURE, VARIABLE, signing_key
from shoal.errors import BadCheckpoint, UsageError
from shoal.storage.store import SEAL, DirectoryStore
from tests.unit.checkpoint.test_every_call import save

NAME = "step-00000010"


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "key"
    path.write_text("0123456789abcdef0123456789abcdef\n")
    path.chmod(0o600)
    monkeypatch.setenv(VARIABLE, str(path))
    return path


def test_what_is_signed_is_read(tmp_path: Path, key: Path) -> None:
    store = DirectoryStore(tmp_path / "c")
    save(store, 10)
    CheckpointReader(store, NAME).verify()
    manifest = (store.path / NAME / MANIFEST).read_bytes()
    expected = hmac.new(key.read_bytes().strip(), manifest, hashlib.sha256).hexdigest()
    assert (store.path / NAME / SIGNATURE).read_text() == f"{expected}  {MANIFEST}\n"


def test_a_forged_one_is_refused_though_it_is_sealed(tmp_path: Path, key: Path) -> None:
    store = DirectoryStore(tmp_path / "c")
    save(store, 10)
    path = store.path / NAME
    forged = (path / MANIFEST).read_bytes().replace(b'"step":10', b'"step":11')
    (path / MANIFEST).write_bytes(forged)
    (path / SEAL).write_bytes(seal(forged))
    with pytest.raises(BadCheckpoint, match="not signed with this key"):
        CheckpointReader(store, NAME)


def test_what_is_not_signed_or_with_another_key_is_refused(
    tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore(tmp_path / "c")
    save(store, 10)
    key.write_text("another key, of as many bytes or so\n")
    with pytest.raises(BadCheckpoint, match="not signed with this key"):
        CheckpointReader(store, NAME)
    monkeypatch.delenv(VARIABLE)
    CheckpointReader(store, NAME).verify()  # nobody asked
    save(store, 20)
    monkeypatch.setenv(VARIABLE, str(key))
    asked = rf"It is not signed, and with a key \({VARIABLE}\) .* --source-key none"
    with pytest.raises(BadCheckpoint, match=asked):
        CheckpointReader(store, "step-00000020")


def test_keys_that_are_none(tmp_path: Path, key: Path) -> None:
    assert signing_key({}) is None
    with pytest.raises(UsageError, match="cannot be read"):
        signing_key({VARIABLE: str(tmp_path / "absent")})
    key.chmod(0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        signing_key()
    key.chmod(0o600)
    key.write_text("short")
    with pytest.raises(UsageError, match="has 5 bytes"):
        signing_key()
