"""Signed checkpoints: only someone with the key can have made or changed them.

The seal detects damage; it does not stop an attacker who can write files, since he can seal them
too. With `SHOAL_CHECKPOINT_KEY` naming a file with a secret, every checkpoint that is saved is
signed (HMAC-SHA256 over the manifest, which holds the hash of every byte), and only signed ones are
read.
"""

import hashlib
import hmac
import os
from collections.abc import Mapping
from pathlib import Path

from shoal.checkpoint.manifest import MANIFEST
from shoal.errors import UnusableCheckpoint, UsageError
from shoal.storage.files import read_private

SIGNATURE = "manifest.hmac"
VARIABLE = "SHOAL_CHECKPOINT_KEY"
LEAST_KEY_BYTES = 16


def signing_key(environment: Mapping[str, str] = os.environ) -> bytes | None:
    """The secret key, or None if checkpoints are not signed."""
    path = environment.get(VARIABLE)
    return read_key(path, VARIABLE) if path else None


def read_key(path: str, named_by: str) -> bytes:
    """Read the key from a file that only this user may read."""
    try:
        way_out = f"{named_by} names a file of your own."
        key = read_private(Path(path), way_out, is_chosen=True).strip()
    except OSError as error:
        raise UsageError(
            f"{named_by} names {path}, which cannot be read: {error.strerror}."
        ) from error
    if len(key) < LEAST_KEY_BYTES:
        raise UsageError(
            f"The key in {path} has {len(key)} bytes, and needs {LEAST_KEY_BYTES} or more. Make "
            f"one with: openssl rand -hex 32 > {path}"
        )
    return key


def sign(content: bytes, key: bytes) -> bytes:
    """The content of the signature file beside a manifest."""
    return f"{hmac.new(key, content, hashlib.sha256).hexdigest()}  {MANIFEST}\n".encode()


def unsigned_error() -> UnusableCheckpoint:
    """The error for a checkpoint without a signature where a key is set."""
    return UnusableCheckpoint(
        f"It is not signed, and with a key ({VARIABLE}) only signed ones are read. If you trust "
        "it, sign a copy: shoal checkpoint convert SOURCE TARGET --source-key none"
    )


def check_signature(content: bytes, signature: bytes, key: bytes) -> None:
    if not hmac.compare_digest(sign(content, key), signature):
        raise UnusableCheckpoint(f"{MANIFEST} was not signed with this key ({VARIABLE}).")
