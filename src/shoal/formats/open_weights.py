"""Open any weights by path or URL: a checkpoint, or a file or directory of another program.

The kind of a file is found by its first bytes, not by its name. Checkpoints are read where they
are; files of other programs are read from a disk, and fetched to one first if they are at a URL.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from shoal.checkpoint.find import NoCheckpoint, PathOrUrl, open_newest, split_url
from shoal.checkpoint.load import CheckpointReader
from shoal.errors import BadCheckpoint, UsageError
from shoal.formats.dcp import METADATA, open_dcp
from shoal.formats.huggingface import INDEX, SINGLE, open_huggingface
from shoal.formats.packed import is_pack
from shoal.formats.quantized import quantized_file
from shoal.formats.safetensors import open_safetensors, require_file
from shoal.formats.state_dict import open_state_dict
from shoal.formats.weights import ForeignWeights, Weights
from shoal.storage.object_client import RETRY_POLICY, ObjectClient, redact_password
from shoal.storage.object_store import BLOCK_BYTES, local_path
from shoal.world import cores

_KINDS = (
    "a safetensors file, a state_dict file of torch.save, a directory with model.safetensors or "
    "its index, or a directory of torch.distributed.checkpoint"
)
PROGRAMS = (".pt2", ".onnx")  # what `checkpoint export` calls them
_ZIP = b"PK\x03\x04"  # what torch.save writes begins so
_LENGTH = 8  # bytes before a safetensors header, which is a JSON object


class LocatedWeights(NamedTuple):
    """Opened weights, and how to open them again; `note` says which were chosen of several."""

    weights: Weights
    place: str
    reopen: Callable[[], Weights]
    note: str = ""


def open_foreign(path: Path) -> ForeignWeights | None:
    """Open weights that another program wrote; None for a directory of another kind."""
    if not path.exists():
        raise UsageError(f"There is no {path}. Give {_KINDS}.")
    if quantized_file(path) is not None:
        raise UsageError(
            f"{path} holds quantised weights, which do not fill the recipe's model. Give those "
            "that they were made of. `shoal evaluate`, `predict`, --teacher and shoal.load take "
            "them as they are."
        )
    if path.is_dir():
        if (path / METADATA).exists():
            return open_dcp(path)
        if (path / INDEX).exists() or (path / SINGLE).exists():
            return open_huggingface(path)
        return None
    if is_pack(path):
        raise UsageError(
            f"{path} is packed. Unpack it first: shoal pack {path} --unpack --out DIRECTORY. "
            "shoal.load reads it as it is."
        )
    if path.suffix in PROGRAMS:
        raise UsageError(
            f"{path} is a program, which does not give its weights by name. Give the checkpoint "
            "that it was made of. `shoal evaluate`, `predict` and shoal.load take a .pt2 file."
        )
    return open_safetensors(path) if _is_safetensors(path) else open_state_dict(path)


def open_import(path: Path, prefix: str) -> ForeignWeights:
    """Open weights to import: only names under `prefix`, if it is not empty."""
    found = open_foreign(path)
    if found is None:
        raise UsageError(f"{path} is nothing that can be imported. Give {_KINDS}.")
    return found.under(prefix) if prefix else found


def open_weights(where: PathOrUrl) -> LocatedWeights:
    """Open a checkpoint or importable weights; of several checkpoints the newest good one."""
    path = local_path(where)
    if path is not None and path.exists() and not _is_checkpoint(path):
        found = open_foreign(path)
        if found is not None:
            return LocatedWeights(found, str(path), lambda: open_import(path, ""))
    try:
        chosen = open_newest(CheckpointReader, where, lambda opened: opened.verify(cores()))
    except NoCheckpoint as none:
        if path is not None:
            raise
        raise NoCheckpoint(f"{none} What another program wrote is to be imported first.") from None
    store, name = chosen.store, chosen.name
    return LocatedWeights(
        chosen.opened, chosen.place, lambda: CheckpointReader(store, name), chosen.note
    )


@contextmanager
def fetch_to_disk(where: PathOrUrl) -> Iterator[Path]:
    """A file or directory on a disk; one at a URL is copied to a temporary directory."""
    path = local_path(where)
    if path is not None:
        yield path
        return
    parent, name = split_url(str(where))
    remote = ObjectClient(parent, {}, RETRY_POLICY)
    found = [f"{name}/{file}" for file in remote.find(name)]
    files = [name] if remote.size(name) is not None else found
    if not files:
        raise UsageError(f"There is no {redact_password(str(where))}. Give {_KINDS}.")
    with tempfile.TemporaryDirectory(prefix="shoal-import-") as folder:
        for file in files:
            _fetch(remote, file, Path(folder))
        yield Path(folder) / name


def _fetch(remote: ObjectClient, file: str, folder: Path) -> None:
    if not (folder / file).resolve().is_relative_to(folder.resolve()):
        raise UsageError(f"{remote} holds {file}, which is no plain name.")
    size = remote.size(file) or 0
    try:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        with open(folder / file, "xb") as made:
            for start in range(0, size, BLOCK_BYTES):
                made.write(_part(remote, file, start, min(size, start + BLOCK_BYTES)))
    except UsageError:
        raise
    except OSError as error:
        raise UsageError(
            f"{file} cannot be fetched to {folder}: {error.strerror}. Let TMPDIR name a place with "
            "enough room."
        ) from error


def _part(remote: ObjectClient, file: str, start: int, stop: int) -> bytes:
    with suppress(FileNotFoundError):
        content = remote.get_range(file, start, stop)
        if len(content) == stop - start:
            return content
    raise BadCheckpoint(f"{file} changed while it was fetched. Try again when it is written.")


def _is_safetensors(path: Path) -> bool:
    """By the first bytes; a file of neither kind is judged by its name."""
    require_file(path)
    try:
        with open(path, "rb") as file:
            start = file.read(_LENGTH + 1)
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error.strerror}.") from None
    if start.startswith(_ZIP):
        return False
    return start[_LENGTH:] == b"{" or path.suffix == ".safetensors"


def _is_checkpoint(path: Path) -> bool:
    # A finished run leaves model.safetensors beside its checkpoints.
    return path.is_dir() and ((path / "manifest.json").exists() or (path / "checkpoints").is_dir())
