"""Signed checkpoints: who has the key made them, and nobody has changed them since.

The seal finds what broke; it does not stop who can write files, since he can seal as well. With
`SHOAL_CHECKPOINT_KEY` naming a file with a secret, every checkpoint that is saved is signed
(HMAC-SHA256 over the manifest, which holds the hash of every byte), and only signed ones are read.
"""

import hashlib
import hmac
import os
from collections.abc import Mapping
from pathlib import Path

from shoal.checkpoint.manifest import MANIFEST
from shoal.errors import MayBeGood, UsageError
from shoal.storage.files import read_private

SIGNATURE = "manifest.hmac"
VARIABLE = "SHOAL_CHECKPOINT_KEY"
LEAST_KEY_BYTES = 16


def signing_key(environment: Mapping[str, str] = os.environ) -> bytes | None:
    """The secret, or None if nothing is to be signed."""
    path = environment.get(VARIABLE)
    return read_key(path, VARIABLE) if path else None


def read_key(path: str, named_by: str) -> bytes:
    """The secret in a file that is this user's alone."""
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
    """What stands beside a manifest."""
    return f"{hmac.new(key, content, hashlib.sha256).hexdigest()}  {MANIFEST}\n".encode()


def unsigned() -> MayBeGood:
    """What is said of a checkpoint without a signature where one is asked for."""
    return MayBeGood(
        f"It is not signed, and with a key ({VARIABLE}) only signed ones are read. If you trust "
        "it, sign a copy: shoal checkpoint convert SOURCE TARGET --source-key none"
    )


def check(content: bytes, signature: bytes, key: bytes) -> None:
    if not hmac.compare_digest(sign(content, key), signature):
        raise MayBeGood(f"{MANIFEST} was not signed with this key ({VARIABLE}).")
