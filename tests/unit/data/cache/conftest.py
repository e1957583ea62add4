"""Each test hears the warnings that a process gives once."""

import pytest

from shoal import logs


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_said", set())
