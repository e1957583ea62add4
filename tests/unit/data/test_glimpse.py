"""Marks of samples: the same on any machine, others for other data, and read by a fork alone."""

import datetime
import decimal
import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from shoal.data import glimpse
from shoal.data.glimpse import NUM_SAMPLES, are_other, mark_of, marks_of

NUMBERS = np.linspace(0.0, 5.0, 300).reshape(3, 100)


@dataclass
class Point:
    x: float
    name: str


class Own:
    """A source that notes who reads it, and how often."""

    def __init__(self, notes: Path, num_samples: int = 50, wait_s: float = 0.0):
        self.notes, self.num_samples, self.wait_s = notes, num_samples, wait_s

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        with self.notes.open("a") as file:
            file.write(f"{os.getpid()} {index}\n")
        print("loaded", index)
        time.sleep(self.wait_s)
        return self.sample(index)

    def sample(self, index: int) -> Any:
        return {"x": torch.full((4,), float(index))}, index

    def reads(self) -> list[tuple[int, int]]:
        lines = self.notes.read_text().splitlines()
        return [(int(pid), int(index)) for pid, index in map(str.split, lines)]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a second may pass before a fork runs."""
    monkeypatch.setattr(glimpse, "MOST_S", 30.0)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (3, 4),
        ("three", "four"),
        (b"three", b"thrae"),
        (None, 0),
        (2.5, 2.6),
        (torch.arange(5), torch.arange(5) + 1),
        (torch.eye(3)[0], torch.eye(3)[1]),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (NUMBERS, NUMBERS[::-1]),
        (Image.new("L", (4, 4), 7), Image.new("L", (4, 4), 9)),
        (Point(1.0, "a"), Point(1.0, "b")),
        (decimal.Decimal("1.10"), decimal.Decimal("1.11")),
        (datetime.date(2026, 1, 2), datetime.date(2026, 1, 3)),
        ({"a": [1, 2]}, {"a": [1, 3]}),
        ((1, (2, 3)), (1, 2, 3)),
    ],
)
def test_other_samples_have_other_marks(one: Any, other: Any) -> None:
    assert mark_of(one) == mark_of(one) != mark_of(other)


def test_last_digits_do_not_count() -> None:
    """Another machine rounds differently, and another decoder too."""
    shaken = NUMBERS * (1 + 1e-7 * np.cos(np.arange(300)).reshape(3, 100))
    assert mark_of(NUMBERS) == mark_of(shaken)
    assert mark_of(torch.from_numpy(NUMBERS).float()) == mark_of(shaken.astype(np.float32))
    assert mark_of(object()) == mark_of(object())


def test_a_fork_reads_a_few_samples_twice(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    source = Own(tmp_path / "notes")
    marks = marks_of(source)
    assert marks == marks_of(source) and len(set(marks)) == NUM_SAMPLES
    reads = source.reads()
    assert len(reads) == 4 * NUM_SAMPLES
    assert os.getpid() not in {pid for pid, _ in reads}
    assert [index for _, index in reads[:2]] == [0, 0] and reads[-1][1] == 49
    assert capfd.readouterr() == ("", "")
    assert len(marks_of(Own(tmp_path / "few", num_samples=3))) == 3
    assert marks_of(Own(tmp_path / "none", num_samples=0)) == []


def test_what_is_slow_or_hangs_or_fails_or_dies_costs_a_second_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = marks_of(Own(tmp_path / "quick"))
    monkeypatch.setattr(glimpse, "MOST_S", 0.5)
    slow = marks_of(Own(tmp_path / "slow", wait_s=0.1))
    assert len(slow) < NUM_SAMPLES and slow == quick[: len(slow)]
    assert marks_of(Own(tmp_path / "hangs", wait_s=60)) == []
    monkeypatch.setattr(glimpse, "MOST_S", 30.0)

    class Bad(Own):
        def sample(self, index: int) -> Any:
            if index == 0:
                raise SystemExit(3)
            if index > 30:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().sample(index)

    bad = marks_of(Bad(tmp_path / "bad"))
    assert bad[0] == "-" and bad[1:] == quick[1 : len(bad)] and len(bad) == 5
    assert not are_other(bad, quick)


def test_draws_of_the_global_generators_do_not_hide_the_data(tmp_path: Path) -> None:
    class Augmented(Own):
        def sample(self, index: int) -> Any:
            noise = torch.rand(4) + random.random() + np.random.rand()
            return torch.full((4,), float(index)) + noise, index

    state = random.getstate(), torch.get_rng_state()
    marks = marks_of(Augmented(tmp_path / "a"))
    assert marks == marks_of(Augmented(tmp_path / "b")) and "-" not in marks
    assert random.getstate() == state[0] and torch.equal(torch.get_rng_state(), state[1])


def test_a_few_marks_may_differ_and_most_may_not() -> None:
    marks = list("abcdefgh")
    assert not are_other(marks, list("abcdeXYZ")) and are_other(marks, list("abcVWXYZ"))
    assert not are_other(marks, list("abcdWXYZ"))  # half of them: a draw that falls now and then
    assert not are_other(marks, list("------Xh")) and not are_other([], marks)
    assert are_other(["a"], ["b"])
