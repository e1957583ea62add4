"""Sources and sets of shards for the tests."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.data.shard_files import cutting, layout
from shoal.data.shard_files.writing import build

NUM = 60


def same(one: Any, other: Any) -> bool:
    """Whether two samples are equal, bit for bit and type for type."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        both = (each.contiguous().view(-1) for each in (one, other))
        return not one.numel() or torch.equal(*(each.view(torch.uint8) for each in both))
    if isinstance(one, np.ndarray):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other)


def rows(number: int) -> tuple[torch.Tensor, int]:
    """All of one shape."""
    made = torch.arange(number, number + 9, dtype=torch.int32)
    return made, number % 7


def packed(number: int) -> tuple[dict[str, Any], torch.Tensor]:
    """Of many shapes."""
    text = "x" * (number % 11)
    return {"text": text, "x": torch.arange(number % 5)}, torch.tensor(number)


KINDS: dict[str, Callable[[int], Any]] = {"rows": rows, "packed": packed}


class Small:
    """A source of `num` samples that counts how often it is asked."""

    def __init__(self, kind: str, num: int = NUM):
        self.make, self.num, self.asked = KINDS[kind], num, 0

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Any:
        self.asked += 1
        return self.make(range(self.num)[index])


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks of a few samples, so that a small set has many."""
    monkeypatch.setattr(cutting, "BLOCK_BYTES", 256)
    monkeypatch.setattr(layout, "BLOCK_BYTES", 256)
    yield


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def make(kind: str, out: Path | str, compress: str | None = None, **more: Any) -> Small:
    """Build a set of several shards; returns its source."""
    source = Small(kind)
    build(source, out, shard_bytes=more.pop("shard_bytes", 1000), compress=compress, **more)
    return source


def in_a_fork(act: Callable[[], None]) -> int:
    """The exit code of a child that does it; minus a signal."""
    child = os.fork()
    if child == 0:
        code = 9
        try:
            act()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
