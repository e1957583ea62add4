"""Read and write a plain state_dict file, as torch.save writes it.

Such a file is a zip archive: a pickle that describes the tensors, and their bytes beside it. The
pickle is written here opcode by opcode, so that tensors stream one at a time and nothing but
tensors can be in it: `torch.load(path, weights_only=True)` reads it. Reading uses that same call,
after the checksums of all records were compared; a file that would run code is refused with the
name it asks for.
"""

import os
import re
import struct
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from shoal.checkpoint.dtypes import tensor_bytes
from shoal.errors import BadCheckpoint
from shoal.formats.new_output import new_files
from shoal.formats.safetensors import require_file
from shoal.formats.weights import ForeignWeights, ModelWeights, StoredTensor, stored_whole
from shoal.parallel.boxes import whole_box
from shoal.storage.decoding import decoding, shorten

_TOP = "archive"
_ALIGNMENT = 64  # of a tensor's bytes, so that the file can be mapped
_HEADER = 30  # bytes before a record's name
_ZIP64 = 20  # bytes that a header grows by where sizes need 64 bits
_LARGE = 1 << 31
_DEEPEST = 32  # dicts in dicts
_STORAGES = {
    torch.float32: "FloatStorage",
    torch.float64: "DoubleStorage",
    torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage",
    torch.int64: "LongStorage",
    torch.int32: "IntStorage",
    torch.int16: "ShortStorage",
    torch.int8: "CharStorage",
    torch.uint8: "ByteStorage",
    torch.bool: "BoolStorage",
    torch.complex64: "ComplexFloatStorage",
}


def export_state_dict(model: ModelWeights, path: Path, tied: Mapping[str, str]) -> None:
    """Write the file. `tied` gives further names to tensors: another name -> the first one."""
    keys = {name: str(i) for i, name in enumerate(model.names)}
    words = b"".join(_described(model, keys, tied))
    with new_files(path) as partial, zipfile.ZipFile(partial, "x", zipfile.ZIP_STORED) as archive:
        archive.writestr(_record("data.pkl"), words)
        archive.writestr(_record("byteorder"), b"little")
        for name, key in keys.items():
            _write(archive, _record(f"data/{key}"), tensor_bytes(model.whole(name)))
        archive.writestr(_record("version"), b"3\n")


def _record(name: str) -> zipfile.ZipInfo:
    return zipfile.ZipInfo(f"{_TOP}/{name}")  # of 1980: equal weights are equal bytes


def _write(archive: zipfile.ZipFile, record: zipfile.ZipInfo, content: memoryview) -> None:
    """Add bytes that start at a multiple of the alignment."""
    large = len(content) >= _LARGE
    assert archive.fp is not None
    start = archive.fp.tell() + _HEADER + len(record.filename) + _ZIP64 * large
    gap = -(start + 4) % _ALIGNMENT  # after a field's own head of 4 bytes
    record.extra = struct.pack("<HH", 0x4246, gap) + bytes(gap)
    record.file_size = len(content)
    with archive.open(record, "w", force_zip64=large) as file:
        file.write(content)


def _described(
    model: ModelWeights, keys: Mapping[str, str], tied: Mapping[str, str]
) -> Iterator[bytes]:
    """The pickle of a dict of tensors, in protocol 2."""
    yield b"\x80\x02}("
    for name in [*model.names, *tied]:
        first = tied.get(name, name)
        yield _text(name)
        yield from _tensor(model, first, keys[first])
    yield b"u."


def _tensor(model: ModelWeights, name: str, key: str) -> Iterator[bytes]:
    dtype, shape = model.dtype(name), model.shape(name)
    storage = _STORAGES.get(dtype)
    numel = whole_box(shape).numel
    yield (
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        if storage
        else (b"ctorch._utils\n_rebuild_tensor_v3\n(")
    )
    kind = f"ctorch\n{storage}\n" if storage else "ctorch.storage\nUntypedStorage\n"
    size = numel if storage else model.num_bytes(name)
    yield b"(" + _text("storage") + kind.encode() + _text(key) + _text("cpu") + _number(size)
    yield b"tQ" + _number(0)
    yield _numbers(shape) + _numbers(_strides(shape))
    yield b"\x89ccollections\nOrderedDict\n)R"
    yield b"" if storage else f"ctorch\n{str(dtype).removeprefix('torch.')}\n".encode()
    yield b"tR"


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _text(text: str) -> bytes:
    encoded = text.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def _number(value: int) -> bytes:
    if value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    return b"\x8a\x08" + struct.pack("<q", value)


def _numbers(values: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(_number, values)) + b"t"


def open_state_dict(path: Path) -> ForeignWeights:
    """The tensors of nested dicts by their dotted names; mapped, and read when they are used."""
    require_file(path)
    with open(path, "rb") as file:
        check_archive(file, str(path))
        # By its number, since torch takes a file for what its name says.
        content = load_tensors(f"/proc/self/fd/{file.fileno()}", str(path), mmap=True)
    if not isinstance(content, Mapping):
        raise BadCheckpoint(f"{path} holds a {type(content).__name__}, not a dict of tensors.")
    entries: dict[str, StoredTensor] = {}
    left_out: list[str] = []
    for name, value in _flat(content, "", 0):
        if isinstance(value, Tensor):
            entries[name] = _entry(name, value)
        else:
            left_out.append(name)
    if not entries:
        raise BadCheckpoint(f"{path} holds no tensor.")
    return ForeignWeights(entries, left_out)


def check_archive(file: BinaryIO, what: str) -> None:
    """Refuse an archive with a wrong checksum, or one that would expand when it is read."""
    try:
        with (
            decoding(f"{what} is not what torch.save writes: it", BadCheckpoint),
            zipfile.ZipFile(file) as archive,
        ):
            records = archive.infolist()
            for record in records:
                if record.compress_type != zipfile.ZIP_STORED:
                    name = shorten(record.filename)
                    raise BadCheckpoint(f"{what}: {name} is compressed; torch's is not.")
            if sum(record.file_size for record in records) > file.seek(0, os.SEEK_END):
                raise BadCheckpoint(f"{what}: its records are larger than the whole file.")
            changed = archive.testzip()
    except OSError as error:
        raise BadCheckpoint(f"{what} cannot be read: {error.strerror or error}.") from None
    if changed is not None:
        name = shorten(changed)
        raise BadCheckpoint(f"{what}: the bytes of {name} are not those that were written.")


def load_tensors(file: str | BinaryIO, what: str, mmap: bool) -> Any:
    """Load an archive of tensors, numbers, text, and lists and dicts of them."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:
        if named := re.search(r"GLOBAL ([\w.]+)", str(error)):
            why = f" without running code that it brings: it asks for {named[1]}"
        else:
            said = str(error).strip().splitlines() or [type(error).__name__]
            why = f": {shorten(said[0]).rstrip('.')}"
        raise BadCheckpoint(f"{what} cannot be read{why}.") from error


def _flat(content: Mapping[Any, Any], prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
    if depth > _DEEPEST:
        raise BadCheckpoint(f"{prefix} is nested deeper than {_DEEPEST} dicts.")
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.", depth + 1)
        else:
            yield f"{prefix}{key}", value


def _entry(name: str, tensor: Tensor) -> StoredTensor:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        kind = f"{str(tensor.layout).removeprefix('torch.')} on {tensor.device}"
        raise BadCheckpoint(f"{name} is {kind}. Only plain dense tensors can be read.")
    tensor = tensor.detach()
    return stored_whole(tensor.dtype, tensor.shape, lambda: tensor)
