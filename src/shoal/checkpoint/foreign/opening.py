"""Any weights by their path: a checkpoint of ours, or a file or directory of another program."""

from pathlib import Path

from shoal.checkpoint.finding import find_one
from shoal.checkpoint.foreign.dcp import METADATA, open_dcp
from shoal.checkpoint.foreign.huggingface import INDEX, SINGLE, open_huggingface
from shoal.checkpoint.foreign.safetensors import open_safetensors
from shoal.checkpoint.foreign.state_dict import open_state_dict
from shoal.checkpoint.foreign.weights import Foreign, Weights
from shoal.checkpoint.load import Opened
from shoal.checkpoint.manifest import BadCheckpoint
from shoal.errors import UsageError

_KINDS = (
    "a safetensors file, a state_dict file of torch.save, a directory with model.safetensors or "
    "its index, or a directory of torch.distributed.checkpoint"
)


def open_foreign(path: Path) -> Foreign | None:
    """What another program wrote; None if it is nothing of that kind."""
    if not path.exists():
        raise UsageError(f"There is no {path}. Give {_KINDS}.")
    if path.is_dir():
        if (path / METADATA).exists():
            return open_dcp(path)
        if (path / INDEX).exists() or (path / SINGLE).exists():
            return open_huggingface(path)
        return None
    if path.suffix == ".safetensors":
        return open_safetensors(path)
    return open_state_dict(path)


def import_from(path: Path, prefix: str) -> Foreign:
    """What is to be imported: only what stands under a prefix, if there is one."""
    found = open_foreign(path)
    if found is None:
        raise UsageError(f"{path} is nothing that can be imported. Give {_KINDS}.")
    return found.under(prefix) if prefix else found


def open_weights(path: Path) -> Weights:
    """A checkpoint, or anything that could be imported."""
    if path.exists() and not _is_checkpoint(path):
        found = open_foreign(path)
        if found is not None:
            return found
    store, name = find_one(path)
    try:
        return Opened(store, name)
    except BadCheckpoint as bad:
        raise BadCheckpoint(f"{store.path / name}: {bad}") from bad


def _is_checkpoint(path: Path) -> bool:
    # A finished run leaves model.safetensors beside its checkpoints.
    return path.is_dir() and ((path / "manifest.json").exists() or (path / "checkpoints").is_dir())
