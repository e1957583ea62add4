"""Small checkpoints of several ranks, made in one process from the modules that ranks use."""

from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from shoal.checkpoint import manifest as manifests
from shoal.checkpoint.chunks import (
    PlacedChunk,
    TensorRegion,
    assign_writers,
    encode_header,
    lay_out_file,
)
from shoal.checkpoint.dtypes import dtype_name
from shoal.checkpoint.manifest import Chunk, FileEntry, Manifest, Origin, Progress
from shoal.parallel.boxes import Box, whole_box
from shoal.storage.store import SEAL, DirectoryStore

NAME = "step-00000020"


def tensors(seed: int = 0) -> dict[str, Tensor]:
    """Of many types and shapes: cut, whole, a scalar, an empty one."""
    torch.manual_seed(seed)
    return {
        "model.cut": torch.randn(8, 6),
        "model.also": torch.randn(8, 6),
        "model.half": torch.randn(7).bfloat16(),
        "model.count": torch.arange(5) + seed,
        "model.flag": torch.tensor([True, False, bool(seed)]),
        "model.none": torch.empty(0, 3),
        "optimizer.cut.step": torch.tensor(20.0 + seed),
        "optimizer.cut.exp_avg": torch.randn(8, 6).double(),
    }


def cut_by_rows(tensor: Tensor, num_ranks: int, rank: int) -> list[Box]:
    """What a rank holds: rows of what has enough of them, and the whole of the rest."""
    if tensor.dim() != 2 or tensor.shape[0] < num_ranks:
        return [whole_box(tensor.shape)]
    start, stop = (tensor.shape[0] * i // num_ranks for i in (rank, rank + 1))
    return [whole_box(tensor.shape).cut(0, start, stop)]


def make(
    directory: Path,
    state: dict[str, Tensor],
    *,
    num_ranks: int = 2,
    name: str = NAME,
    step: int = 20,
    metrics: dict[str, float] | None = None,
    plain: dict[str, Any] | None = None,
) -> DirectoryStore:
    """Write a checkpoint as ranks would that hold rows of matrices and all of the rest."""
    held = [
        [
            TensorRegion(key, dtype_name(tensor.dtype), tuple(tensor.shape), box)
            for key, tensor in state.items()
            for box in cut_by_rows(tensor, num_ranks, rank)
        ]
        for rank in range(num_ranks)
    ]
    store = DirectoryStore(directory)
    draft = store.create_draft(name, "1")
    files, chunks = [], {key: [] for key in state}
    for rank, share in enumerate(assign_writers(held)):
        placed = lay_out_file(share)
        head, contents = encode_header(placed), [content_of(one, state) for one in placed]
        file = f"rank-{rank:05d}.safetensors"
        draft.write(file, [head, *contents])
        size = len(head) + sum(map(len, contents))
        files.append(FileEntry(file, size, len(head), xxhash.xxh3_128_hexdigest(head)))
        for one, content in zip(placed, contents):
            box, digest = one.region.box, xxhash.xxh3_128_hexdigest(content)
            if content:
                chunk = Chunk(box.offset, box.shape, rank, len(head) + one.start, digest)
                chunks[one.region.name].append(chunk)
    described = tuple(
        manifests.TensorEntry(
            key, dtype_name(state[key].dtype), tuple(state[key].shape), tuple(chunks[key])
        )
        for key in sorted(state)
    )
    progress = Progress(step=step, samples=12 * step, epoch=0, batch=step, metrics=metrics or {})
    origin = Origin("r.py:f", {"seed": 0}, f"data={num_ranks}", num_ranks, 120, {"shoal": "0"})
    write_manifest(
        draft,
        Manifest(
            manifests.FORMAT,
            manifests.VERSION,
            progress,
            origin,
            {"plain.cut": {"lr": 0.1}} if plain is None else plain,
            tuple(files),
            described,
        ),
    )
    draft.commit(drop=[])
    return store


def write_manifest(draft: Any, manifest: Manifest) -> None:
    content = manifests.encode(manifest)
    draft.write(manifests.MANIFEST, [content])
    draft.write(SEAL, [manifests.seal(content)])


def content_of(placed: PlacedChunk, state: dict[str, Tensor]) -> bytes:
    tensor = placed.region.box.of(state[placed.region.name]).contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
