"""A wait for samples is told of at doubling times, and judged lost at the limit."""

import numpy as np
import pytest

from shoal.data import batches, loader_processes, stalls
from shoal.data.loader_processes import Loaders, PieceKey
from shoal.data.readers.records import SourceLost
from shoal.data.stalls import STALLS, StallDetector

IDS = np.array([3, 5], dtype=np.int64)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    at = [100.0]
    monkeypatch.setattr(stalls.time, "monotonic", lambda: at[0])
    return at


def test_a_wait_is_told_of_at_doubling_times(now: list[float]) -> None:
    wait, told = StallDetector(), []
    with wait.on(IDS):
        for second in range(1000):
            now[0] = 100.0 + second
            if (found := wait.look()) is not None:
                told.append((second, found.is_lost))
    assert told[:7] == [(10 * 2**n, False) for n in range(7)]
    assert told[7] == (900, True)
    assert "samples 3, 5" in str(found) and "limit" in str(found)
    assert wait.look() is None, "nothing is waited for"


def test_a_new_wait_begins_anew(now: list[float]) -> None:
    wait = StallDetector()
    for _ in range(2):
        with wait.on(IDS):
            assert wait.look() is None
            now[0] += 12
            found = wait.look()
            assert found is not None and not found.is_lost
            assert wait.look() is None


def test_a_piece_without_samples_is_not_waited_for() -> None:
    wait = StallDetector()
    with wait.on(IDS), wait.on(IDS[:0]):
        assert wait.look() is None
    assert wait.look() is None


def test_many_samples_have_longer(now: list[float]) -> None:
    wait = StallDetector()
    with wait.on(np.arange(64)):
        now[0] += 1000
        found = wait.look()
    assert found is not None and not found.is_lost


def test_loading_is_what_is_waited_for() -> None:
    seen = []

    class Source:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> tuple[float, float]:
            assert STALLS._asked is not None
            seen.append(STALLS._asked[0].tolist())
            return float(index), 0.0

    batches.load(Source(), IDS, batches.LoadOptions())
    assert seen == [[3, 5], [3, 5]] and STALLS._asked is None


def test_a_loader_that_hangs_loses_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_processes, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(loader_processes, "_CLOSING_S", 0.05)
    monkeypatch.setattr(stalls, "LIMIT_S", 0.2)
    monkeypatch.setattr(stalls, "LIMIT_PER_SAMPLE_S", 0.0)

    def hang(epoch: int, ids: object) -> object:
        import time

        time.sleep(60)

    work = Loaders(hang, 1)  # type: ignore[arg-type]
    try:
        work.ask(PieceKey(0, 0), 0, IDS)
        with pytest.raises(SourceLost, match="samples 3, 5: nothing came for"):
            work.take(PieceKey(0, 0))
    finally:
        work.close()
