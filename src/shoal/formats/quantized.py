"""Quantised weights in a safetensors file: the layout of torchao, which transformers reads too.

A quantised tensor is stored as its parts (whole numbers, scales), and the file's metadata says what
they make; torchao puts them together again from a fixed list of types, so no code of the file is
run. Numbers of 4 bits are stored two a byte. Loading fills a model that the recipe makes: plain
tensors are copied, so that what is tied stays tied, and quantised ones take their place.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from shoal.checkpoint.dtypes import canonical_names
from shoal.errors import BadCheckpoint, require
from shoal.formats.huggingface import SINGLE
from shoal.formats.match import non_persistent_buffers
from shoal.storage.decoding import PARSE_ERRORS
from shoal.storage.files import umask

_UNREADABLE: tuple[type[Exception], ...] = (SafetensorError, OSError, *PARSE_ERRORS)
_SUPPORT = "prototype.safetensors.safetensors_support"
_LOGGERS = ("torchao", "torch.utils._pytree")  # that speak of libraries for other machines
_NAMES = "tensor_names"  # in the metadata, by which torchao's files are known
_HALVES = "shoal.int4"  # in the metadata: the parts that hold two numbers a byte
_ROOT = "model."  # before all names: torchao's layout has none without a dot


def require_torchao(module: str = "quantization") -> ModuleType:
    """A module of torchao, imported without its words on what this machine does not have."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        return require(f"torchao.{module}", extra="slim")
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)


def quantized_file(path: Path) -> Path | None:
    """The file of quantised weights at a path, itself or in a directory; None if there is none."""
    file = path / SINGLE if path.is_dir() else path
    if not file.is_file():
        return None
    try:
        with safe_open(file, framework="pt") as opened:
            return file if _NAMES in (opened.metadata() or {}) else None
    except (SafetensorError, OSError):
        return None


def write_quantized(model: nn.Module, file: Path) -> None:
    """Write the tensors of a model, each under its first name."""
    state = model.state_dict()
    tensors = {_ROOT + name: state[name] for name in _first_names(state)}
    parts, metadata = require_torchao(_SUPPORT).flatten_tensor_state_dict(tensors)
    halved = {name: part for name, part in parts.items() if _fits_half_a_byte(name, part)}
    stored = {name: part.contiguous() for name, part in parts.items()}
    stored |= {name: _halve(part) for name, part in halved.items()}
    metadata[_HALVES] = msgspec.json.encode(list(halved)).decode()
    save_file(stored, file, {"format": "pt", **metadata})
    with open(file, "rb") as written:
        os.fchmod(written.fileno(), 0o666 & ~umask())  # it was written for the owner only
        os.fsync(written.fileno())


def load_quantized(model: nn.Module, file: Path) -> None:
    """Fill a model; raises BadCheckpoint if the file is damaged or of another model."""
    try:
        tensors = _read(file)
    except _UNREADABLE as error:
        raise BadCheckpoint(f"{file} cannot be read as quantised weights: {error}.") from None
    _refuse_unlike(model, tensors, file)
    with torch.no_grad():
        for name, tensor in tensors.items():
            owner, _, last = name.rpartition(".")
            module = model.get_submodule(owner)
            if type(tensor) is Tensor:
                getattr(module, last).copy_(tensor)
            else:
                setattr(module, last, nn.Parameter(tensor, requires_grad=False))


def _read(file: Path) -> dict[str, Tensor]:
    support = require_torchao(_SUPPORT)
    with safe_open(file, framework="pt") as opened:
        metadata: dict[str, str] = opened.metadata()
        parts = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    for name in msgspec.json.decode(metadata.pop(_HALVES, "[]"), type=list[str]):
        parts[name] = _join_halves(parts[name])
    tensors, left = support.unflatten_tensor_state_dict(parts, metadata)
    if left:
        raise ValueError(f"{next(iter(left))} is no part of a tensor")
    return {name.removeprefix(_ROOT): tensor for name, tensor in tensors.items()}


def _refuse_unlike(model: nn.Module, tensors: Mapping[str, Tensor], file: Path) -> None:
    first, own = canonical_names(model), model.state_dict()
    wanted = {name for name in own if first[name] == name}
    unlike = sorted((wanted ^ tensors.keys()) - non_persistent_buffers(model))
    unlike += sorted(n for n in wanted & tensors.keys() if own[n].shape != tensors[n].shape)
    if unlike:
        raise BadCheckpoint(
            f"{file} is not of the recipe's model: {unlike[0]} is missing or of another shape. "
            "Give the recipe and the settings of its run."
        )


def _first_names(state: Mapping[str, Tensor]) -> list[str]:
    """The names of a state, without further names of tied tensors.

    A tensor of torchao has no memory of its own to be known by, and is tied to no other.
    """
    found: dict[object, str] = {}
    for name, tensor in state.items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride())
        found.setdefault(place if type(tensor) is Tensor and tensor.numel() else name, name)
    return list(found.values())


def _fits_half_a_byte(name: str, part: Tensor) -> bool:
    """Whether a part is of numbers from -8 to 7 in whole bytes, an even number in a row."""
    if not name.endswith("_qdata") or part.dtype != torch.int8 or part.shape[-1] % 2:
        return False
    return bool(((part >= -8) & (part <= 7)).all())


def _halve(part: Tensor) -> Tensor:
    low, high = part[..., 0::2].to(torch.uint8), part[..., 1::2].to(torch.uint8)
    return (low & 15) | (high << 4)


def _join_halves(stored: Tensor) -> Tensor:
    low, high = (stored & 15).to(torch.int8), (stored >> 4).to(torch.int8)
    both = torch.stack((low, high), -1).flatten(-2)
    return torch.where(both > 7, both - 16, both).contiguous()


def is_quantized(tensor: Tensor) -> bool:
    """Whether a tensor is one of torchao's."""
    return type(tensor).__module__.startswith("torchao.")
