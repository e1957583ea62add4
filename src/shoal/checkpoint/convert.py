"""Copy a checkpoint to another place: a directory or an object store.

Every byte is verified as it is read and hashed as it is written. `copy_checkpoint` keeps files and
manifest as they are; `reshard` writes another number of files. Both sign the copy with the current
key. Cost: memory for a few chunks, or for one file where a store sends files whole. For the weights
alone, see `formats/`.
"""

from typing import TYPE_CHECKING

import msgspec

from shoal.checkpoint.chunks import TensorRegion, assign_writers, lay_out_file
from shoal.checkpoint.commit import commit_checkpoint, merge_tensors, write_chunks
from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.verify import VerifiedCheckpoint
from shoal.errors import BadCheckpoint
from shoal.parallel.boxes import whole_box
from shoal.storage.store import Draft

if TYPE_CHECKING:
    from shoal.checkpoint.load import CheckpointReader


def copy_checkpoint(source: VerifiedCheckpoint, draft: Draft) -> Manifest:
    """Write the same files and the same manifest."""
    for fault in source.header_faults():
        raise BadCheckpoint(fault)
    for number, file in enumerate(source.manifest.files):
        draft.write(file.name, source.read_file(number))
    commit_checkpoint(draft, source.manifest)
    return source.manifest


def reshard(source: "CheckpointReader", draft: Draft, num_files: int) -> Manifest:
    """Write `num_files` files of about equal size; large tensors are cut between them."""
    whole = [
        TensorRegion(tensor.name, tensor.dtype, tensor.shape, whole_box(tensor.shape))
        for tensor in source.manifest.tensors
    ]
    written = []
    for number, share in enumerate(assign_writers([whole] * num_files)):
        placed = lay_out_file(share)
        contents = ([source.box(one.region.name, one.region.box)] for one in placed)
        written.append(write_chunks(draft, number, placed, contents))
    manifest = msgspec.structs.replace(
        source.manifest,
        files=tuple(one.file for one in written),
        tensors=merge_tensors(one.tensors for one in written),
    )
    commit_checkpoint(draft, manifest)
    return manifest
