"""How a host knows that it sees the place of checkpoints: a mark that the first host put there.

The mark is a draft of the store (`storage/store.py`), which no reader takes for a checkpoint and
which is swept away if it is left. Without it a host with a directory of the same name would only be
found out when the first save fails. Cost: one small file, and one request of each host.
"""

import os
import secrets
from collections.abc import Iterable
from contextlib import suppress
from typing import Self

from shoal.errors import ShoalError, UsageError
from shoal.storage.object_store import open_store
from shoal.storage.store import Draft

_NAME, _FILE = "hosts", "mark"


class CheckpointProof:
    """`place` is None for checkpoints in the run directory, which has a mark of its own."""

    def __init__(self, place: str | None):
        self.token = secrets.token_hex(16)
        self._place = place
        self._draft: Draft | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._discard()

    def show(self) -> None:
        """Put the mark there; another time if a save swept it away."""
        if self._place is None:
            return
        self._discard()
        content: Iterable[bytes] = [self.token.encode()]
        try:
            self._draft = open_store(self._place).create_draft(_NAME, self.token)
            self._draft.write(_FILE, content)
        except OSError as error:
            raise UsageError(
                f"--checkpoints {self._place} cannot be written: {error.strerror}."
            ) from error

    def _discard(self) -> None:
        draft, self._draft = self._draft, None
        if draft is not None:
            with suppress(OSError, ShoalError):
                draft.discard()


def sees_checkpoints(place: str, token: str) -> bool:
    """Whether this host finds the mark there."""
    try:
        return open_store(place).join_draft(_NAME, token).read(_FILE) == token.encode()
    except (OSError, ShoalError):
        return False


def sees_file(path: str, token: str) -> bool:
    """Whether this host finds a file with this content."""
    try:
        with open(path, "rb") as file:
            return file.read(1 + len(token)) == token.encode() and os.path.isabs(path)
    except OSError:
        return False
