"""A set is what the reference says: read by who knows nothing else."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.data.shards.made import KINDS, NUM, make, small_blocks
from tests.unit.data.shards.reader import Set

__all__ = ["small_blocks"]


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, tuple | list) else value


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("compress", [None, "zstd"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_suffices(tmp_path: Path, kind: str, compress: str | None) -> None:
    source = make(kind, tmp_path / "out", compress)
    found = Set(tmp_path / "out")
    for number in range(NUM):
        assert plain(found.sample(number)) == plain(source[number])
