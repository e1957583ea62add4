"""What a rank prints, where its log cannot hold it."""

import os
from collections.abc import Iterator

import pytest

from shoal import logs


@pytest.fixture
def full() -> Iterator[int]:
    disk = os.open("/dev/full", os.O_WRONLY)
    yield disk
    os.close(disk)


def test_a_full_disk_does_not_end_who_prints(full: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_said", set())
    output = logs.PrintedLines(full)
    for _ in range(3):
        print("x" * 20_000, file=output, flush=True)
    assert [line for line in logs.for_the_screen if "The run continues" in line]
    logs.for_the_screen.clear()
    logs.printed.clear()
