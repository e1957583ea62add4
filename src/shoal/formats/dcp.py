"""Read and write a directory of torch.distributed.checkpoint (DCP), without a process group.

Its `.metadata` is a pickle, which torch would execute. Here it is read as data
(`safe_unpickle.py`), with the few classes that it needs, and checked as a whole: the parts of every
tensor tile it and lie inside of files of the directory. torch itself writes, fed one tensor at a
time.
"""

import io
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from shoal.errors import BadCheckpoint, ShoalError
from shoal.formats import safe_unpickle
from shoal.formats.new_output import new_directory
from shoal.formats.safe_unpickle import PickledDict, PickledObject, UnsafePickle
from shoal.formats.safetensors import require_file
from shoal.formats.state_dict import check_archive, load_tensors
from shoal.formats.weights import ForeignWeights, ModelWeights, StoredPart, StoredTensor
from shoal.parallel.boxes import Box
from shoal.storage.store import MappedFile

METADATA = ".metadata"
_MOST_BYTES = 64 << 20  # of `.metadata`: enough for 200,000 parts
_CLASSES = "torch.distributed.checkpoint.metadata."
_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
_DTYPES = {
    f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}
_KNOWN = frozenset(
    [
        *(_CLASSES + name for name in ("Metadata", "MetadataIndex", "StorageMeta")),
        *(_CLASSES + name for name in ("TensorStorageMetadata", "BytesStorageMetadata")),
        *(_CLASSES + name for name in ("TensorProperties", "ChunkStorageMetadata")),
        _CLASSES + "_MEM_FORMAT_ENCODING",
        _INFO,
        "torch.Size",
        "torch.serialization._get_layout",
        *("pathlib.PosixPath", "pathlib.WindowsPath"),
        *("pathlib._local.PosixPath", "pathlib._local.WindowsPath"),
        *_DTYPES,
    ]
)
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


def export_dcp(model: ModelWeights, path: Path) -> None:
    """Write the directory, with the model's names."""

    class OneByOne(dcp.DefaultSavePlanner):
        """Reads each tensor only when it is written."""

        def lookup_object(self, index: Any) -> Any:
            return model.whole(index.fqn)

    described = {
        name: torch.empty(model.shape(name), dtype=model.dtype(name), device="meta")
        for name in model.names
    }
    with new_directory(path) as partial, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.save(described, checkpoint_id=partial, planner=OneByOne(), no_dist=True)
        except dcp.CheckpointException as failed:
            raise _cause(failed) from failed


def _cause(failed: dcp.CheckpointException) -> BaseException:
    """The error that torch has wrapped, such as BadCheckpoint or a full disk."""
    error: BaseException | None = next((error for error, _ in failed.failures.values()), None)
    while error is not None and not isinstance(error, OSError | ShoalError):
        error = error.__cause__ or error.__context__
    return error or failed


def open_dcp(path: Path) -> ForeignWeights:
    """The tensors of a directory; other entries are only named."""
    require_file(path / METADATA)
    size = (path / METADATA).stat().st_size
    if size > _MOST_BYTES:
        raise BadCheckpoint(f"{path / METADATA} has {size} bytes; {_MOST_BYTES} is the most.")
    try:
        return _opened(path, safe_unpickle.safe_unpickle((path / METADATA).read_bytes(), _KNOWN))
    except UnsafePickle as refused:
        raise BadCheckpoint(f"{path / METADATA} is refused: {refused}.") from None


class _ByteRange(NamedTuple):
    """The bytes of a part: file and range."""

    file: str
    start: int
    length: int


class _Files:
    """The data files of a directory."""

    def __init__(self, path: Path):
        self._path = path
        self._open: dict[str, MappedFile] = {}

    def content(self, place: _ByteRange) -> memoryview:
        """Bytes of a regular file in the directory."""
        if place.file not in self._open:
            if not _FILE.fullmatch(place.file):
                raise UnsafePickle(f"it names the file {place.file!r}, which is no plain name")
            self._open[place.file] = MappedFile(self._path / place.file)
        return self._open[place.file].read(place.start, place.length)

    def tensor(self, name: str, place: _ByteRange, dtype: torch.dtype, box: Box) -> Tensor:
        """A part: an archive of torch's own that holds one tensor."""
        what = f"{self._path / place.file}: {name}"
        file = io.BytesIO(self.content(place))
        check_archive(file, what)
        file.seek(0)
        tensor = load_tensors(file, what, mmap=False)
        if not isinstance(tensor, Tensor) or tensor.dtype != dtype or tensor.shape != box.shape:
            raise BadCheckpoint(f"{what} is not the part that {METADATA} describes.")
        return tensor.detach()


def _opened(path: Path, metadata: Any) -> ForeignWeights:
    fields = _fields(metadata, "Metadata")
    places, files = _places(fields.get("storage_data")), _Files(path)
    entries: dict[str, StoredTensor] = {}
    left_out: list[str] = []
    for name, found in _pairs(fields.get("state_dict_metadata")).by_text().items():
        if isinstance(found, PickledObject) and found.kind == _CLASSES + "BytesStorageMetadata":
            left_out.append(name)
        else:
            entries[name] = _entry(name, _fields(found, "TensorStorageMetadata"), places, files)
    if not entries:
        raise BadCheckpoint(f"{path} holds no tensor.")
    return ForeignWeights(entries, left_out)


_Places = Mapping[tuple[str, tuple[int, ...]], _ByteRange]


def _places(stored: Any) -> _Places:
    """Where each part is, by the tensor's name and the part's offset in it."""
    places = {}
    for key, value in _pairs(stored):
        index, info = _fields(key, "MetadataIndex"), _state(value, _INFO)
        if info.get("transform_descriptors"):
            raise UnsafePickle("its data were transformed when they were written")
        name, file = index.get("fqn"), info.get("relative_path")
        if not isinstance(name, str) or not isinstance(file, str):
            raise UnsafePickle("a name is not text")
        start, length = _numbers((info.get("offset"), info.get("length")))
        if index.get("offset") is not None:  # None: not a tensor
            places[name, _size(index["offset"])] = _ByteRange(file, start, length)
    return places


def _entry(name: str, fields: dict[str, Any], places: _Places, files: _Files) -> StoredTensor:
    properties = _object(fields.get("properties"), _CLASSES + "TensorProperties").state
    kind = properties[0] if isinstance(properties, tuple) and properties else None
    if not isinstance(kind, PickledObject) or kind.kind not in _DTYPES:
        raise UnsafePickle(f"{name} has elements of no known type")
    dtype, parts = _DTYPES[kind.kind], []
    chunks = fields.get("chunks")
    for chunk in chunks if isinstance(chunks, list) else []:
        described = _fields(chunk, "ChunkStorageMetadata")
        box = Box(_size(described.get("offsets")), _size(described.get("sizes")))
        if not box.numel:
            continue
        place = places.get((name, box.offset))
        if place is None:
            raise UnsafePickle(f"it does not say where the part of {name} at {list(box.offset)} is")
        files.content(place)  # refuse a missing or short file now

        def read(place: _ByteRange = place, box: Box = box) -> Tensor:
            return files.tensor(name, place, dtype, box)

        parts.append(StoredPart(box, read))
    return StoredTensor(dtype, _size(fields.get("size")), tuple(parts))


def _fields(value: Any, kind: str) -> dict[str, Any]:
    return _state(value, _CLASSES + kind)


def _state(value: Any, kind: str) -> dict[str, Any]:
    return _pairs(_object(value, kind).state).by_text()


def _object(value: Any, kind: str) -> PickledObject:
    if not isinstance(value, PickledObject) or value.kind != kind or value.arguments is None:
        raise UnsafePickle(f"a {kind.rpartition('.')[2]} was to be there")
    return value


def _pairs(value: Any) -> PickledDict:
    if not isinstance(value, PickledDict):
        raise UnsafePickle("a dict was to be there")
    return value


def _size(value: Any) -> tuple[int, ...]:
    given = _object(value, "torch.Size").arguments
    if given is None or len(given) != 1 or not isinstance(given[0], tuple):
        raise UnsafePickle("a size is none")
    return _numbers(given[0])


def _numbers(values: tuple[Any, ...]) -> tuple[int, ...]:
    if not all(type(value) is int and value >= 0 for value in values):
        raise UnsafePickle("a size or a place is no whole number")
    return values
