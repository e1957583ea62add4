"""Two checkpoints: whatever differs is found, wherever the chunks are cut."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shoal.checkpoint.compare import Differences, TensorDifference, compare_checkpoints
from shoal.checkpoint.load import CheckpointReader
from shoal.errors import BadCheckpoint
from shoal.storage.store import DirectoryStore
from tests.unit.checkpoint.made import NAME, make, tensors


def between(tmp_path: Path, a: dict[str, Tensor], b: dict[str, Tensor], **of_b) -> Differences:
    ours = CheckpointReader(make(tmp_path / "a", a), NAME)
    return compare_checkpoints(ours, CheckpointReader(make(tmp_path / "b", b, **of_b), NAME))


def test_the_same_under_another_plan_differs_in_the_plan_alone(tmp_path: Path) -> None:
    found = between(tmp_path, tensors(), tensors(), num_ranks=3)
    assert found.tensors == [] and found.num_equal == len(tensors())
    assert [(one.name, one.a, one.b) for one in found.entries] == [
        ("origin.num_pieces", 2, 3),
        ("origin.plan", "data=2", "data=3"),
    ]


def test_the_same_is_the_same(tmp_path: Path) -> None:
    assert not between(tmp_path, tensors(), tensors())


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_values_are_compared_where_they_belong(tmp_path: Path, num_ranks: int) -> None:
    changed = tensors()
    changed["model.cut"][5, 2] += 0.5
    changed["model.cut"][0, 0] = 0.0
    found = between(tmp_path, tensors(), changed, num_ranks=num_ranks)
    (one,) = found.tensors
    assert (one.name, one.kind, one.a) == ("model.cut", "values", "F32 [8, 6]")
    apart = (tensors()["model.cut"].double() - changed["model.cut"].double()).abs()
    assert one.values is not None
    assert (one.values.num_elements, one.values.num_different) == (48, 2)
    assert one.values.largest_absolute == float(apart.max())
    assert one.values.largest_relative == 1.0


def only(name: str, a: Tensor, b: Tensor, tmp_path: Path) -> TensorDifference:
    (found,) = between(tmp_path, {name: a}, {name: b}).tensors
    return found


def test_other_shapes_types_and_names(tmp_path: Path) -> None:
    a, b = tensors(), tensors()
    b["model.cut"] = b["model.cut"][:4]
    b["model.half"] = b["model.half"].half()
    b["model.new"] = b.pop("model.flag")
    kinds = {one.name: one.kind for one in between(tmp_path, a, b).tensors}
    assert kinds == {
        "model.cut": "shape",
        "model.half": "type",
        "model.flag": "only in a",
        "model.new": "only in b",
    }


@pytest.mark.parametrize(
    ("a", "b", "absolute", "relative"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]), 2.0, 0.5),
        (torch.tensor([0.0]), torch.tensor([-0.0]), 0.0, 0.0),
        (torch.tensor([math.nan]), torch.tensor([1.0]), math.inf, math.inf),
        (torch.tensor([math.inf]), torch.tensor([-math.inf]), math.inf, math.inf),
        (torch.tensor([2**62 + 1]), torch.tensor([2**62]), 1.0, 2.0**-62),
        (torch.tensor([True]), torch.tensor([False]), 1.0, 1.0),
        (torch.tensor(3 + 4j), torch.tensor(0j), 5.0, 1.0),
        (torch.tensor([1.0]).bfloat16(), torch.tensor([2.0]).bfloat16(), 1.0, 0.5),
        (
            torch.tensor([1.0]).to(torch.float8_e4m3fn),
            torch.tensor([2.0]).to(torch.float8_e4m3fn),
            1.0,
            0.5,
        ),
    ],
)
def test_how_far_apart(tmp_path: Path, a: Tensor, b: Tensor, absolute, relative) -> None:
    values = only("model.x", a, b, tmp_path).values
    assert values is not None and values.num_different == 1
    assert (values.largest_absolute, values.largest_relative) == (absolute, relative)


def test_what_is_beside_tensors(tmp_path: Path) -> None:
    make(tmp_path / "a", tensors(), plain={"x": {"lr": 0.1, "betas": [0.9, 0.99]}, "old": 1})
    make(tmp_path / "b", tensors(), plain={"x": {"lr": 0.2, "betas": [0.9, 0.95]}}, step=21)
    found = compare_checkpoints(
        *(CheckpointReader(DirectoryStore(tmp_path / side), NAME) for side in "ab")
    )
    entries = {one.name: (one.a, one.b, one.only_in) for one in found.entries}
    assert entries == {
        "progress.step": (20, 21, ""),
        "progress.samples": (240, 252, ""),
        "progress.batch": (20, 21, ""),
        "plain.x.lr": (0.1, 0.2, ""),
        "plain.x.betas[1]": (0.99, 0.95, ""),
        "plain.old": (1, None, "a"),
    }
    assert found and not found.tensors


def test_what_is_read_is_verified(tmp_path: Path) -> None:
    changed = tensors()
    changed["model.cut"] += 1
    make(tmp_path / "a", tensors())
    make(tmp_path / "b", changed)
    opened = [CheckpointReader(DirectoryStore(tmp_path / side), NAME) for side in "ab"]
    file = tmp_path / "b" / NAME / "rank-00001.safetensors"
    start = opened[1].tensor("model.cut").chunks[1].start
    content = bytearray(file.read_bytes())
    content[start] ^= 1
    file.write_bytes(content)
    opened[1] = CheckpointReader(DirectoryStore(tmp_path / "b"), NAME)
    with pytest.raises(BadCheckpoint, match=r"rank-00001.safetensors: the bytes of model\.cut"):
        compare_checkpoints(*opened)
