"""Marks of samples: the same on any machine, others for other data, and read by a fork alone."""

import datetime
import decimal
import os
import random
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from shoal.data import sample_digest
from shoal.data.sample_digest import (
    ENOUGH,
    NUM_SAMPLES,
    digest_sample,
    digests_differ,
    sample_digests,
)

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
    monkeypatch.setattr(sample_digest, "MOST_S", 30.0)


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
        (torch.tensor(100_001), torch.tensor(100_002)),
        (torch.arange(5).int(), torch.tensor([0, 1, 2, 4, 3])),
        (np.array(["a", "b"]), np.array(["a", "c"])),
        (np.array([1 + 2j, 3]), np.array([1 + 3j, 3])),
        (torch.tensor([1 + 2j, 3]).conj(), torch.tensor([1 + 2j, 3])),
        (np.array(["2026-01-02"], "M8[D]"), np.array(["2026-01-03"], "M8[D]")),
        (np.array([{"a": 1}, None]), np.array([{"a": 2}, None])),
        (np.array([(1, 2.0)], "i4,f4"), np.array([(2, 2.0)], "i4,f4")),
        (torch.eye(3).to_sparse(), (2 * torch.eye(3)).to_sparse()),
        (torch.tensor([True, False]), torch.tensor([False, True])),
        (2.5, 2.50001),
    ],
)
def test_other_samples_have_other_marks(one: Any, other: Any) -> None:
    assert digest_sample(one) == digest_sample(one) != digest_sample(other)


def test_last_digits_do_not_count() -> None:
    """Another machine rounds differently, and another decoder too."""
    shaken = NUMBERS * (1 + 1e-7 * np.cos(np.arange(300)).reshape(3, 100))
    assert digest_sample(NUMBERS) == digest_sample(shaken)
    assert digest_sample(torch.from_numpy(NUMBERS).float()) == digest_sample(
        shaken.astype(np.float32)
    )
    assert digest_sample(object()) == digest_sample(object())


def test_a_fork_reads_a_few_samples_twice(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    source = Own(tmp_path / "notes")
    marks = sample_digests(source)
    assert marks == sample_digests(source) and len(set(marks)) == 50
    reads = source.reads()
    assert len(reads) == 4 * 50
    assert os.getpid() not in {pid for pid, _ in reads}
    assert [index for _, index in reads[:4]] == [0, 0, 32, 32]
    assert len(sample_digests(Own(tmp_path / "many", num_samples=1000))) == NUM_SAMPLES
    assert capfd.readouterr() == ("", "")
    assert len(sample_digests(Own(tmp_path / "few", num_samples=3))) == 3
    assert sample_digests(Own(tmp_path / "none", num_samples=0)) == []


def known(marks: list[str]) -> list[int]:
    return [place for place, mark in enumerate(marks) if mark != "-"]


def test_what_is_slow_or_hangs_or_fails_or_dies_costs_some_seconds_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    quick = sample_digests(Own(tmp_path / "quick"))
    monkeypatch.setattr(sample_digest, "MOST_S", 0.1)
    slow = sample_digests(Own(tmp_path / "slow", wait_s=0.05))
    assert ENOUGH <= len(known(slow)) < 20 and all(slow[at] == quick[at] for at in known(slow))
    assert known(slow)[0] == 0 and known(slow)[-1] > 40  # throughout the data
    assert not digests_differ(slow, quick) and not caplog.text
    monkeypatch.setattr(sample_digest, "LONGEST_S", 0.3)
    assert not known(sample_digests(Own(tmp_path / "hangs", wait_s=60)))
    assert "Samples of the Own take more than two seconds to load" in caplog.text
    monkeypatch.setattr(sample_digest, "MOST_S", 30.0)

    class Bad(Own):
        def sample(self, index: int) -> Any:
            if index == 0:
                raise SystemExit(3)
            if index % 8 == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().sample(index)

    bad = sample_digests(Bad(tmp_path / "bad"))
    assert bad[0] == "-" and bad[32] == quick[32] and 1 < len(known(bad)) < len(quick) / 2
    assert not digests_differ(bad, quick)


def test_what_a_sample_started_ends_with_the_fork(tmp_path: Path) -> None:
    class Starts(Own):
        def sample(self, index: int) -> Any:
            started = subprocess.Popen(["sleep", "600"])
            with (tmp_path / "started").open("a") as file:
                file.write(f"{started.pid}\n")
            return index, index

    assert len(known(sample_digests(Starts(tmp_path / "notes", num_samples=3)))) == 3
    deadline = time.monotonic() + 20
    started = [int(line) for line in (tmp_path / "started").read_text().split()]
    while any(is_alive(pid) for pid in started) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(started) == 6 and not any(map(is_alive, started))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_draws_of_the_global_generators_do_not_hide_the_data(tmp_path: Path) -> None:
    class Augmented(Own):
        def sample(self, index: int) -> Any:
            noise = torch.rand(4) + random.random() + np.random.rand()
            return torch.full((4,), float(index)) + noise, index

    state = random.getstate(), torch.get_rng_state()
    marks = sample_digests(Augmented(tmp_path / "a"))
    assert marks == sample_digests(Augmented(tmp_path / "b")) and "-" not in marks
    assert random.getstate() == state[0] and torch.equal(torch.get_rng_state(), state[1])


def test_whole_values_may_not_differ_and_a_few_rounded_ones_may() -> None:
    marks = [f"{letter}:1" for letter in "abcdefgh"]
    assert not digests_differ(marks, marks) and not digests_differ([], marks)
    assert digests_differ(marks, ["X:1", *marks[1:]]) and digests_differ(["a"], ["b"])
    assert not digests_differ(marks, ["a:2", *marks[1:]])
    assert digests_differ(marks, ["a:2", "b:2", *marks[2:]])
    assert digests_differ(marks, [*marks[:7], "X"]) and not digests_differ(marks, [*marks[:7], "-"])


def test_of_data_that_varies_only_most_marks_tell() -> None:
    """A draw that falls now and then: some samples are the same twice, and others a day later."""
    marks, others = list("abcdefghijklmnopqrst~"), list("ABCDEFGHIJKLMNOPQRST~")
    assert digests_differ(marks, others) and digests_differ(marks, [marks[0], *others[1:]])
    assert not digests_differ(marks, [*marks[:6], *others[6:]]) and not digests_differ(marks, marks)
    assert not digests_differ(list("abc~"), list("ABC~")), "three are no proof"


@pytest.mark.parametrize("share", [0.5, 0.1])
def test_rare_draws_are_not_taken_for_other_data(tmp_path: Path, share: float) -> None:
    class Flipped(Own):
        def sample(self, index: int) -> Any:
            flips = np.random.default_rng().random() < share
            return (-index if flips else index), 0

    assert not digests_differ(
        sample_digests(Flipped(tmp_path / "a")), sample_digests(Flipped(tmp_path / "b"))
    )


@pytest.mark.parametrize("every", [2, 8])
def test_some_changed_labels_are_other_data(tmp_path: Path, every: int) -> None:
    class Mended(Own):
        def sample(self, index: int) -> Any:
            inputs, label = super().sample(index)
            return inputs, label + (index % every == 1)

    before = sample_digests(Own(tmp_path / "a", num_samples=1000))
    assert digests_differ(before, sample_digests(Mended(tmp_path / "b", num_samples=1000)))
