"""One safetensors file, in and out.

Written tensor by tensor, in the order and with the header that the safetensors library gives it:
equal weights are equal bytes, whoever wrote them. Read through that library's map of the file,
after it has checked the header. The format has no checksums, so a flipped bit in it goes unseen.
"""

import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from shoal.checkpoint.manifest import ALIGNMENT, ITEM_BYTES
from shoal.checkpoint.types import bytes_of, name_of_type, type_of_name
from shoal.errors import BadCheckpoint
from shoal.formats.placing import new_files
from shoal.formats.weights import Entry, Foreign, Model, entry
from shoal.parallel.boxes import whole_box
from shoal.storage.decoding import decoding

_RESERVED = "__metadata__"
# The order in which the library writes types.
_ORDER = [
    *("U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16"),
    *("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"),
]


def export_safetensors(model: Model, path: Path) -> None:
    """All tensors in one file, which appears whole or not at all."""
    with new_files(path) as partial:
        write(model, model.names, partial, {})


def write(model: Model, names: Sequence[str], path: Path, metadata: Mapping[str, str]) -> None:
    """Some tensors of a model as a file."""
    if _RESERVED in names:
        raise BadCheckpoint(f"A tensor is named {_RESERVED}, which safetensors keeps for itself.")
    types = {name: name_of_type(model.dtype(name)) for name in names}
    ordered = sorted(names, key=lambda name: (_ORDER.index(types[name]), name.encode()))
    entries: dict[str, Any] = {_RESERVED: dict(metadata)} if metadata else {}
    at = 0
    for name in ordered:
        shape = model.shape(name)
        stop = at + whole_box(shape).numel * ITEM_BYTES[types[name]]
        entries[name] = {"dtype": types[name], "shape": shape, "data_offsets": (at, stop)}
        at = stop
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % ALIGNMENT)
    with open(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in ordered:
            file.write(bytes_of(model.whole(name)))
        file.flush()
        os.fsync(file.fileno())


def open_safetensors(path: Path) -> Foreign:
    return Foreign(entries_of(path))


def entries_of(path: Path) -> dict[str, Entry]:
    """The tensors of a file whose header is sound."""
    require_file(path)
    try:
        with decoding(str(path), BadCheckpoint):
            opened: Any = safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise BadCheckpoint(f"{path} is no sound safetensors file: {error}.") from None
    return {name: _entry(opened, name, path) for name in opened.keys()}  # noqa: SIM118


def _entry(opened: Any, name: str, path: Path) -> Entry:
    described = opened.get_slice(name)
    try:
        dtype = type_of_name(described.get_dtype())
    except KeyError:
        kind = described.get_dtype()
        raise BadCheckpoint(f"{path}: {name} has elements of the unknown type {kind}.") from None

    def read() -> torch.Tensor:
        tensor: torch.Tensor = opened.get_tensor(name)
        return tensor

    return entry(dtype, described.get_shape(), read)


def require_file(path: Path) -> None:
    """Refuse what is not a file before anything waits for its bytes."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error.strerror}.") from None
    if not stat.S_ISREG(mode):
        raise BadCheckpoint(f"{path} is not a file.")
