"""The format as its page describes it: a reader written from the page reads what ranks save."""

import os
import re
import time
from pathlib import Path

import msgspec
import numpy
import pytest
import torch

from shoal.checkpoint import manifest as manifests
from shoal.checkpoint.manifest import Origin, Progress
from shoal.checkpoint.save import Saver
from shoal.comm.mesh import Mesh
from shoal.parallel.layout import Slice, whole_slice
from shoal.storage.store import DirectoryStore
from shoal.testing.ranks import Pool
from tests.unit.checkpoint.made import NAME, cut_by_rows, make, tensors
from tests.unit.checkpoint.reader import TYPES, read

PATIENCE_S = 20.0


def same(values: numpy.ndarray, tensor: torch.Tensor) -> bool:
    bits = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
    return values.shape == tuple(tensor.shape) and bool((values == bits.numpy()).all())


def save(mesh: Mesh, directory: str) -> str:
    """On a rank: save what it holds, and wait for the checkpoint."""
    held = {
        name: [Slice(box.of(tensor).clone(), tuple(tensor.shape), box.offset)]
        if tensor.dim() == 2 and tensor.numel()
        else [whole_slice(tensor)]
        for name, tensor in tensors().items()
        for box in cut_by_rows(tensor, mesh.world.num_ranks, mesh.world.rank)
    }
    ended: list[object] = []
    saver = Saver(DirectoryStore(Path(directory)), ended.append)
    about = (Progress(20, 240, 2, 0), Origin("r.py:f", {}, "data=2", 2, 120, {}))
    problem = saver.save(mesh.world, NAME, held, {"groups": {"list": []}}, about)
    deadline = time.monotonic() + PATIENCE_S
    while not os.path.exists(f"{directory}/{NAME}") and time.monotonic() < deadline:
        time.sleep(0.01)
    return problem


def test_what_ranks_save_is_read(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(save, 2, str(tmp_path)) == ["", ""]
    manifest, found = read(tmp_path / NAME)
    assert len(manifest["files"]) == 2 and manifest["progress"]["step"] == 20
    state = tensors()
    assert found.keys() == state.keys()
    assert all(same(found[name], tensor) for name, tensor in state.items())


def test_a_changed_byte_is_noticed(tmp_path: Path) -> None:
    make(tmp_path, tensors())
    read(tmp_path / NAME)
    for file in sorted((tmp_path / NAME).iterdir()):
        content = file.read_bytes()
        for place in range(0, len(content), 41):
            changed = bytearray(content)
            changed[place] ^= 4
            file.unlink()
            file.write_bytes(changed)
            with pytest.raises(ValueError):
                read(tmp_path / NAME)
        file.unlink()
        file.write_bytes(content)


def test_the_page_names_every_type_and_field() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "checkpoint.md").read_text("utf-8")
    words = set(re.findall(r"`([\w.]+)`", page))
    fields = [
        field.name
        for record in (
            manifests.Manifest,
            manifests.FileEntry,
            manifests.TensorEntry,
            manifests.Chunk,
        )
        for field in msgspec.structs.fields(record)
    ]
    for part, record in (("progress", Progress), ("origin", Origin)):
        fields += [f"{part}.{field.name}" for field in msgspec.structs.fields(record)]
    assert {*fields, *manifests.ITEM_BYTES} <= words
    assert manifests.ITEM_BYTES.keys() == TYPES.keys()
