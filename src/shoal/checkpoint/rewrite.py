"""A checkpoint written anew at another place: on a disk, or in an object store.

Every byte is verified as it is read, and hashed as it is written. The files stay as they are, and
so does the manifest, or what they hold is dealt anew to as many files as are wanted. Either way
the copy is signed with today's key. Costs the memory of a few chunks; where a store sends a file
as a whole, that of a file. To get the weights alone, see `foreign/`.
"""

from typing import TYPE_CHECKING

import msgspec

from shoal.checkpoint.chunks import Held, deal, place
from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.sealed import Sealed
from shoal.checkpoint.writing import commit, joined, write_chunks
from shoal.errors import BadCheckpoint
from shoal.parallel.boxes import whole_box
from shoal.storage.store import Draft

if TYPE_CHECKING:
    from shoal.checkpoint.load import Opened


def copy(source: Sealed, draft: Draft) -> Manifest:
    """Write the same files."""
    for fault in source.faults_of_headers():
        raise BadCheckpoint(fault)
    for number, file in enumerate(source.manifest.files):
        draft.write(file.name, source.bytes_of_file(number))
    commit(draft, source.manifest)
    return source.manifest


def deal_anew(source: "Opened", draft: Draft, num_files: int) -> Manifest:
    """Write as many files, with about as much in each; large tensors are cut between them."""
    whole = [
        Held(tensor.name, tensor.dtype, tensor.shape, whole_box(tensor.shape))
        for tensor in source.manifest.tensors
    ]
    written = []
    for number, share in enumerate(deal([whole] * num_files)):
        placed = place(share)
        contents = ([source.box(one.held.name, one.held.box)] for one in placed)
        written.append(write_chunks(draft, number, placed, contents))
    manifest = msgspec.structs.replace(
        source.manifest,
        files=tuple(one.file for one in written),
        tensors=joined(one.tensors for one in written),
    )
    commit(draft, manifest)
    return manifest
