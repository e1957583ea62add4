"""Predictions are written in batches, and read back as they were."""

import errno
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from shoal.errors import UsageError
from shoal.formats.new_output import new_files
from shoal.inference.output_files import FORMATS, OutputFile, open_output

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]


def batch(start: int, stop: int) -> dict[str, torch.Tensor]:
    numbers = torch.arange(start, stop)
    grid = (numbers[:, None, None] * 6 + torch.arange(6).view(2, 3)) % 7
    return {"sample": numbers, **{str(kind): grid.to(kind) for kind in TYPES}}


def write(file: OutputFile, batches: list[dict[str, torch.Tensor]]) -> None:
    try:
        for one in batches:
            file.add(one)
        file.finish()
    finally:
        file.close()


def read(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".npz":
        return {name: torch.from_numpy(array) for name, array in np.load(path).items()}
    if path.suffix == ".safetensors":
        return load_file(path)
    if path.suffix == ".parquet":
        import pyarrow.parquet

        columns = pyarrow.parquet.read_table(path).to_pydict()
        return {name: torch.tensor(column) for name, column in columns.items()}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


@pytest.mark.parametrize("suffix", FORMATS)
def test_what_is_written_is_read_back(tmp_path: Path, suffix: str) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    path = tmp_path / f"out{suffix}"
    write(open_output(path), [batch(0, 3), batch(3, 4)])
    found, wanted = read(path), batch(0, 4)
    assert found.keys() == wanted.keys()
    for name, column in wanted.items():
        assert found[name].shape == column.shape
        assert torch.equal(found[name].double(), column.double()), name


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".parquet"])
def test_one_array_has_one_shape(tmp_path: Path, suffix: str) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    rows = [{"sample": torch.arange(2), "output": torch.ones(2, size)} for size in (3, 4)]
    with pytest.raises(UsageError, match=r"\[3\] for the first sample and \[4\].*jsonl"):
        write(open_output(tmp_path / f"out{suffix}"), rows)
    write(open_output(tmp_path / "out.jsonl"), rows)
    other = [rows[0], {"sample": torch.arange(2), "logits": torch.ones(2, 3)}]
    with pytest.raises(UsageError, match="with output for the first samples and with logits"):
        write(open_output(tmp_path / f"other{suffix}"), other)


@pytest.mark.parametrize("suffix", [".jsonl", ".npz", ".safetensors"])
def test_a_full_disk_leaves_nothing(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(FORMATS[suffix]):  # type: ignore[name-defined, misc]
        def finish(self) -> None:
            super().finish()
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setitem(FORMATS, suffix, Full)
    with (
        pytest.raises(UsageError, match=r"No space left on device\. Nothing was left there"),
        new_files(tmp_path / "new" / "folders" / f"out{suffix}") as partial,
    ):
        write(open_output(partial), [batch(0, 2)])
    assert not list(tmp_path.iterdir())
