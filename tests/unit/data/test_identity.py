"""The name of data's content: the same wherever it lies and whatever lies over it."""

import os
import shutil
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Subset, TensorDataset

import shoal
from shoal.data import sample_digest
from shoal.data.identity import content_name, identities_differ, short_identity
from shoal.data.orders import (
    BlockShuffled,
    Order,
    RenumberedOrder,
    Shuffled,
    SubsetOrder,
    order_name,
)
from shoal.data.replay_order import ReplayOrder
from shoal.data.transforms.quarantine import quarantine, source_kinds

ROWS = torch.arange(40.0).reshape(20, 2)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a second may pass before a fork runs."""
    monkeypatch.setattr(sample_digest, "MOST_S", 30.0)


def write_tar(path: Path, content: bytes) -> None:
    with tarfile.open(path, "w") as tar:
        for number in range(9):
            member = tarfile.TarInfo(f"{number}.txt")
            member.size = len(content)
            tar.addfile(member, BytesIO(content))


def write_lines(path: Path, content: bytes) -> None:
    path.write_bytes(content + b"\nanother\n")


def write_images(path: Path, content: bytes) -> None:
    for number in range(3):
        (path / "a").mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4), content[number]).save(path / "a" / f"{number}.png")


FILES: dict[str, tuple[Any, Any]] = {
    "tar": (write_tar, shoal.data.tar),
    "lines": (write_lines, shoal.data.lines),
    "images": (write_images, shoal.data.images),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_file_may_be_moved_and_not_changed(tmp_path: Path, kind: str) -> None:
    write, read = FILES[kind]
    for name, content in (("one", b"abcde"), ("other", b"abXde")):
        write(tmp_path / name, content)
    before = content_name(read(tmp_path / "one"))
    assert before and content_name(read(tmp_path / "other")) != before
    shutil.move(tmp_path / "one", tmp_path / "moved")
    for path in (tmp_path / "moved", *(tmp_path / "moved").rglob("*")):
        os.utime(path, (1, 1))
    assert content_name(read(tmp_path / "moved")) == before


def test_what_lies_in_memory_is_known_by_its_rows() -> None:
    known = content_name(shoal.data.tensors(ROWS, ROWS[:, 0]))
    assert known and content_name(shoal.data.tensors(ROWS.clone(), ROWS[:, 0])) == known
    assert content_name(shoal.data.tensors(ROWS + 1, ROWS[:, 0])) != known
    assert content_name(shoal.data.tensors(ROWS.double(), ROWS[:, 0])) != known
    tokens = torch.arange(50)
    windows = content_name(shoal.data.windows(tokens, 4))
    assert windows and content_name(shoal.data.windows(tokens + 1, 4)) != windows
    assert content_name([(1, 2), (3, 4)]) == content_name([(1, 2), (3, 4)])
    assert content_name([(1, 2), (3, 4)]) != content_name([(1, 2), (3, 5)])


def test_layers_do_not_count_and_parts_do(tmp_path: Path) -> None:
    data = shoal.data.tensors(ROWS, ROWS[:, 0])
    over = shoal.data.in_order(quarantine(shoal.data.mapped(data, abs), tmp_path / "bad.jsonl"))
    assert content_name(over) == content_name(data)
    other = shoal.data.tensors(ROWS + 1, ROWS[:, 0])
    assert content_name(shoal.data.join([data, other])) != content_name(
        shoal.data.join([other, data])
    )


def test_a_source_of_ones_own_is_known_by_what_it_says_or_by_some_samples() -> None:
    class Named(TensorDataset):
        def identity(self) -> str:
            return "photos-3"

    known = content_name(TensorDataset(ROWS, ROWS[:, 0]))
    assert content_name(Named(ROWS, ROWS[:, 0])) == "Named photos-3"
    assert known.startswith("glimpse ") and len(known.split()) == 21
    assert not identities_differ(known, content_name(TensorDataset(ROWS.clone(), ROWS[:, 0])))
    assert identities_differ(known, content_name(TensorDataset(ROWS, ROWS[:, 1])))
    over = shoal.data.mapped(Subset(TensorDataset(ROWS, ROWS[:, 0]), range(20)), abs)
    assert not identities_differ(known, content_name(over))


def test_names_are_compared_part_by_part() -> None:
    one = "tensors 11, glimpse aa bb cc"
    assert identities_differ(one, one) is False
    assert identities_differ(one, "tensors 11, glimpse aa bb dd")
    assert identities_differ(one, "tensors 12, glimpse aa bb cc") and identities_differ(
        one, "lines 11"
    )
    assert identities_differ(one, "tensors 11, glimpse - bb -") is False
    for unknown in ("tensors 11", "tensors 11, glimpse", "tensors 11, glimpse - - -"):
        assert identities_differ(one, unknown) is None
    assert identities_differ("glimpse aa", "Named photos-3") is None
    assert "aa bb" not in short_identity(one) and short_identity(one).startswith(
        "tensors 11, glimpse "
    )


def test_a_list_of_what_has_no_form_in_bytes_is_known_by_its_looks() -> None:
    pictures = [[(Image.new("L", (4, 4), light), 0)] for light in (7, 7, 9)]
    one, same, other = map(content_name, pictures)
    assert one == same != other


def test_files_keep_the_names_of_classes_that_were_renamed(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,2\n3,4\n")
    table = shoal.data.csv(tmp_path / "a.csv")
    rows = shoal.data.tensors(torch.arange(4), torch.arange(4))
    some = shoal.data.subset(shoal.data.join([rows, rows]), [1])
    assert content_name(table) == "Rows a1e34e4664ec1056731cb1889448278e"
    assert source_kinds(some) == "Chosen of Joined of TensorSource"
    ids, plain = np.array([1, 3]), Shuffled(2)
    orders: list[Order] = [SubsetOrder(ids), RenumberedOrder(ids, plain), BlockShuffled([1, 1])]
    orders.append(ReplayOrder(plain, plain, 0.5))
    recorded = [order_name(order, 0).split()[0] for order in orders]
    assert recorded == ["Some", "Among", "Blocks", "Replayed"]
