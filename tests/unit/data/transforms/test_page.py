"""What docs/how-to/transforms.md shows works as it stands there."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.data.sources import EpochSource

PAGE = Path(__file__).resolve().parents[4] / "docs" / "how-to" / "transforms.md"


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert len(blocks) == 5
    for block in blocks:
        exec(block, names)
    random = np.random.default_rng(0)
    rows = [{"pixels": random.random((3, 8, 8), np.float32), "label": index} for index in range(12)]
    prepared = names["prepare"](rows)
    assert len(prepared) == 10 and isinstance(prepared, EpochSource)
    assert prepared[0][0].shape == (3, 8, 8)
