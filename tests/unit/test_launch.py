"""A recipe that is not ready: who waits is told, and where it stands is in its log."""

import time
from pathlib import Path
from typing import Any

import pytest

from shoal.cluster import launch
from shoal.cluster.nursery import Nursery, Prepared
from shoal.data.transforms.cleaning import clean


class Hangs:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        time.sleep(1.5 if index == 2 else 0)
        return index, index


def test_a_sample_that_hangs_before_ranks_start_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def prepare() -> Any:
        clean(Hangs(), keep=lambda sample: True)
        return {"ready": 1}, lambda birth: 0

    monkeypatch.setattr(launch, "FIRST_S", 0.5)
    nursery = Nursery(prepare, tmp_path / "recipe.log")
    try:
        launch.tell_of_wait(nursery)
        assert nursery.next_report(0) == Prepared({"ready": 1})
    finally:
        nursery.close()
    assert "The recipe is not ready after" in caplog.text
    assert "in __getitem__" in (tmp_path / "recipe.log").read_text()
