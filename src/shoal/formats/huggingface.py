"""Read and write the layout of Hugging Face models: shards and an index.

A model that fits one shard is `model.safetensors`; a larger one is several files and
`model.safetensors.index.json`, which says which file holds each tensor. `from_pretrained` also
needs a `config.json`; it comes from the recipe's model, since a checkpoint does not hold it.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from torch import nn

from shoal.checkpoint.manifest import MOST_MANIFEST_BYTES
from shoal.errors import BadCheckpoint, UsageError
from shoal.formats.new_output import new_directory
from shoal.formats.safetensors import read_entries, require_file, write_file
from shoal.formats.weights import ForeignWeights, ModelWeights, StoredTensor
from shoal.storage.decoding import decode_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
_METADATA = {"format": "pt"}  # without it some versions refuse the file


class _Index(msgspec.Struct):
    """The part of an index that is read."""

    weight_map: dict[str, str]


def split_shards(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Group names, in order, into shards of at most `most` bytes; a larger tensor is alone."""
    groups: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if groups[-1] and used + size > most:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    return groups


def export_huggingface(
    model: ModelWeights,
    path: Path,
    shard_bytes: int = SHARD_BYTES,
    config: Any = None,
    more: Callable[[Path], None] = lambda directory: None,
) -> int:
    """Write the directory; `config` is the configuration of the model, if it is known, and `more`
    puts other files into it before it appears. Returns the number of shards.
    """
    sizes = {name: model.num_bytes(name) for name in model.names}
    groups = split_shards(sizes, shard_bytes)
    with new_directory(path) as partial:
        if len(groups) == 1:
            write_file(model, groups[0], partial / SINGLE, _METADATA)
        else:
            last = len(groups)
            names = [f"model-{i:05d}-of-{last:05d}.safetensors" for i, _ in enumerate(groups, 1)]
            for name, group in zip(names, groups):
                write_file(model, group, partial / name, _METADATA)
            places = {tensor: name for name, group in zip(names, groups) for tensor in group}
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
            text = msgspec.json.format(msgspec.json.encode(index), indent=2)
            (partial / INDEX).write_bytes(text + b"\n")
        if config is not None:
            config.save_pretrained(partial)
        more(partial)
    return len(groups)


class InnerModel(NamedTuple):
    """A Hugging Face model inside of a recipe's model: its name prefix and configuration."""

    prefix: str
    config: Any


def find_inner_model(model: nn.Module) -> InnerModel:
    """The outermost module with a Hugging Face configuration."""
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        if hasattr(config, "save_pretrained"):
            return InnerModel(f"{name}." if name else "", config)
    raise UsageError(
        f"The recipe's model is a {type(model).__name__}, which holds no Hugging Face model: no "
        "part of it has a config with save_pretrained. Leave --like out to write the weights "
        "without a config.json."
    )


def open_huggingface(path: Path) -> ForeignWeights:
    """A directory of this layout. An index may name only files beside it."""
    if not (path / INDEX).exists():
        if not (path / SINGLE).exists():
            raise BadCheckpoint(f"{path} holds neither {SINGLE} nor {INDEX}.")
        return ForeignWeights(read_entries(path / SINGLE))
    places = _index(path / INDEX)
    files: dict[str, dict[str, StoredTensor]] = {}
    for name, file in places.items():
        if not file.isprintable() or "/" in file or "\\" in file or file.startswith("."):
            raise BadCheckpoint(f"{path / INDEX}: {file!r} is not the name of a file beside it.")
        if file not in files:
            files[file] = read_entries(path / file)
        if name not in files[file]:
            raise BadCheckpoint(f"{path / INDEX}: {name} is to be in {file}, and is not.")
    for file, entries in files.items():
        for name in entries:
            if places.get(name) != file:
                raise BadCheckpoint(f"{path / INDEX}: {name} is in {file}, and it does not say so.")
    return ForeignWeights({name: files[file][name] for name, file in places.items()})


def _index(path: Path) -> dict[str, str]:
    require_file(path)
    if path.stat().st_size > MOST_MANIFEST_BYTES:
        raise BadCheckpoint(f"{path} has {path.stat().st_size} bytes: too many for an index.")
    return decode_json(path.read_bytes(), _Index, str(path), BadCheckpoint).weight_map
