"""Read and write one safetensors file.

Tensors are written one by one, in the order and with the header of the safetensors library: equal
weights give equal bytes. Files are read through that library, which maps the file and checks the
header. The format has no checksums, so a flipped bit is not detected.
"""

import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from shoal.checkpoint.chunks import pack_header
from shoal.checkpoint.dtypes import dtype_from_name, dtype_name, tensor_bytes
from shoal.checkpoint.manifest import ITEM_BYTES
from shoal.errors import BadCheckpoint
from shoal.formats.new_output import new_files
from shoal.formats.weights import ForeignWeights, ModelWeights, StoredTensor, stored_whole
from shoal.parallel.boxes import whole_box
from shoal.storage.decoding import decoding

_RESERVED = "__metadata__"
# The order in which the library writes dtypes.
_ORDER = [
    *("U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16"),
    *("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"),
]


def export_safetensors(model: ModelWeights, path: Path) -> None:
    """All tensors in one file, which appears whole or not at all."""
    with new_files(path) as partial:
        write_file(model, model.names, partial, {})


def write_file(
    model: ModelWeights, names: Sequence[str], path: Path, metadata: Mapping[str, str]
) -> None:
    """Write some tensors of a model as one file."""
    if _RESERVED in names:
        raise BadCheckpoint(f"A tensor is named {_RESERVED}, which safetensors keeps for itself.")
    types = {name: dtype_name(model.dtype(name)) for name in names}
    ordered = sorted(names, key=lambda name: (_ORDER.index(types[name]), name.encode()))
    entries: dict[str, Any] = {_RESERVED: dict(metadata)} if metadata else {}
    at = 0
    for name in ordered:
        shape = model.shape(name)
        stop = at + whole_box(shape).numel * ITEM_BYTES[types[name]]
        entries[name] = {"dtype": types[name], "shape": shape, "data_offsets": (at, stop)}
        at = stop
    with open(path, "xb") as file:
        file.write(pack_header(entries))
        for name in ordered:
            file.write(tensor_bytes(model.whole(name)))
        file.flush()
        os.fsync(file.fileno())


def open_safetensors(path: Path) -> ForeignWeights:
    return ForeignWeights(read_entries(path))


def read_entries(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file whose header is sound."""
    require_file(path)
    try:
        with decoding(str(path), BadCheckpoint):
            opened: Any = safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise BadCheckpoint(f"{path} is no sound safetensors file: {error}.") from None
    return {name: _entry(opened, name, path) for name in opened.keys()}  # noqa: SIM118


def _entry(opened: Any, name: str, path: Path) -> StoredTensor:
    described = opened.get_slice(name)
    try:
        dtype = dtype_from_name(described.get_dtype())
    except KeyError:
        kind = described.get_dtype()
        raise BadCheckpoint(f"{path}: {name} has elements of the unknown type {kind}.") from None

    def read() -> torch.Tensor:
        tensor: torch.Tensor = opened.get_tensor(name)
        return tensor

    return stored_whole(dtype, described.get_shape(), read)


def require_file(path: Path) -> None:
    """Refuse what is not a regular file, such as a pipe that would block a reader."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error.strerror}.") from None
    if not stat.S_ISREG(mode):
        raise BadCheckpoint(f"{path} is not a file.")
