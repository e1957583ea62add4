"""Write the trained model as one safetensors file, with canonical names and no metadata.

Equal weights give equal bytes, so two runs can be compared with `cmp`. Where ranks hold parts of
the model, each rank sends rank 0 the parts that no lower rank holds. Costs one whole model on rank
0.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from shoal.checkpoint.chunks import PlacedChunk, TensorRegion, encode_header
from shoal.checkpoint.dtypes import canonical_names, dtype_name, tensor_bytes, why_unsupported
from shoal.checkpoint.manifest import ITEM_BYTES
from shoal.checkpoint.save import gather_regions, list_regions
from shoal.checkpoint.snapshot import PART_BYTES
from shoal.comm.collectives import Group
from shoal.faults import faultpoint
from shoal.parallel.boxes import split_box, whole_box
from shoal.parallel.layout import Slice
from shoal.storage.files import atomic_replace
from shoal.sync.lazy_tables import TOUCHED, join_stripes
from shoal.sync.state_chunks import allocate_spillable


def canonical_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's state by name; a tensor shared under several names keeps its first."""
    state = model.state_dict()
    kept = {name: state[name].detach() for name in canonical_names(model).values()}
    # A tensor that no file can hold is refused by name when it is written.
    return {name: t if why_unsupported(t) else t.cpu().contiguous() for name, t in kept.items()}


def gather_model(
    world: Group, model: nn.Module, held: Mapping[str, Sequence[Slice]]
) -> dict[str, Tensor]:
    """The whole state of a model of which ranks hold parts, on rank 0; empty on other ranks.

    Every rank must call it.
    """
    names = set(model.state_dict())
    if world.num_ranks > 1:  # with a deadline for slow disks and large tensors
        world = world.subgroup(range(world.num_ranks))
    kept = {n: parts for n, parts in held.items() if n in names or n.startswith(TOUCHED)}
    own = dict(list_regions(kept, lambda dtype: str(dtype).removeprefix("torch.")))
    whole: dict[str, Tensor] = {}
    known: set[TensorRegion] = set()
    for rank, parts in enumerate(gather_regions(world, list(own))):
        for part in parts:
            if part in known:
                continue
            known.add(part)
            if world.rank == 0:
                values = own.get(part)
                if values is None:
                    values = torch.empty(part.box.shape, dtype=getattr(torch, part.dtype))
                    world.receive(values, rank)
                if part.name not in whole:
                    whole[part.name] = allocate_spillable(part.whole, values.dtype)
                part.box.of(whole[part.name]).copy_(values)
            elif world.rank == rank:
                world.send(own[part].contiguous(), 0)
    return join_stripes(whole)


def write_safetensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write the file whole or not at all."""
    for name, tensor in tensors.items():
        if why := why_unsupported(tensor):
            raise SafetensorError(f"{name} is {why}, which no such file can hold")
    with atomic_replace(path) as partial:
        with partial.open("wb") as file:
            file.writelines(_contents(tensors))
        faultpoint("model.written")


def _contents(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of the file as `safetensors` writes them, a little at a time."""
    held = [
        TensorRegion(name, dtype_name(t.dtype), tuple(t.shape), whole_box(t.shape))
        for name, t in tensors.items()
    ]
    ends = [0]
    for one in (held := sorted(held, key=lambda one: (-ITEM_BYTES[one.dtype], one.name))):
        ends.append(ends[-1] + one.num_bytes)
    yield encode_header(
        [PlacedChunk(one, *span) for one, span in zip(held, pairwise(ends), strict=True)]
    )
    for one in held:
        for box in split_box(one.box, PART_BYTES // ITEM_BYTES[one.dtype]):
            yield tensor_bytes(box.of(tensors[one.name]))
