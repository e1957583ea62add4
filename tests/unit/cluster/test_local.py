"""A recipe that is not ready: who waits is told, and where it stands is in its log."""

import faulthandler
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from shoal.cluster import local
from shoal.cluster.local import LocalBackend
from shoal.data import stalls
from shoal.data.transforms.cleaning import clean
from shoal.data.transforms.statistics import statistics
from shoal.system.fork_server import ForkServer, ForkServerReady


class Hangs:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        time.sleep(1.5 if index == 2 else 0)
        return index, index


@pytest.mark.full
def test_a_sample_that_never_comes_ends_the_preparation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Never(Hangs):
        def __getitem__(self, index: int) -> Any:
            time.sleep(60 if index == 2 else 0)
            return index, index

    def prepare() -> Any:
        statistics(Hangs(), ["inputs"])  # slow, and within its limit
        clean(Never(), keep=lambda sample: True, workers=2, identity=str(tmp_path))
        return {}, lambda birth: 0

    monkeypatch.setattr(stalls, "LIMIT_S", 2.0)
    monkeypatch.setattr(stalls, "LIMIT_PER_SAMPLE_S", 0.0)
    monkeypatch.setattr(local, "LOOK_S", 0.1)
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "logs").mkdir()
    with pytest.raises(local.NotLoaded, match="sample 2: nothing came for 2 s while") as raised:
        LocalBackend().start(prepare, tmp_path, lambda record: None).__enter__()
    assert "in __getitem__" in (tmp_path / "logs" / "recipe.log").read_text()
    assert "in __getitem__" in raised.value.trace


def test_a_sample_that_hangs_before_ranks_start_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def prepare() -> Any:
        clean(Hangs(), keep=lambda sample: True)
        return {"ready": 1}, lambda birth: 0

    monkeypatch.setattr(local, "FIRST_S", 0.5)
    fork_server = ForkServer(prepare, tmp_path / "recipe.log")
    try:
        local._tell_of_wait(fork_server)
        assert fork_server.next_report(0) == ForkServerReady({"ready": 1})
    finally:
        fork_server.close()
    assert "The recipe is not ready after" in caplog.text
    assert "in __getitem__" in (tmp_path / "recipe.log").read_text()


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGILL, "was killed by SIGILL .an instruction that this CPU does not have"),
        (signal.SIGKILL, "was killed by SIGKILL .for want of memory, perhaps"),
        (signal.SIGSEGV, r"was killed by SIGSEGV\.\n"),
    ],
)
def test_how_the_process_that_loads_a_recipe_ended_is_told(
    number: int, words: str, tmp_path: Path
) -> None:
    def prepare() -> Any:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        faulthandler.disable()
        print("x" * 9000, "its last words")
        os.kill(os.getpid(), number)

    (tmp_path / "recipe.log").write_text("of an earlier run\n")
    fork_server = ForkServer(prepare, tmp_path / "recipe.log")
    told = f"The process that loads the recipe {words}"
    with pytest.raises(local.NotLoaded, match=told) as raised:
        local.await_facts(fork_server)
    trace = raised.value.trace
    assert trace.endswith("x its last words\n") and len(trace) < 4200
