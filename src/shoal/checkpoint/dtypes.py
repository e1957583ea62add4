"""The tensors that a checkpoint can hold: dense ones, of the element types of safetensors."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from shoal.errors import RecipeError, nearest

_TYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}


def dtype_from_name(name: str) -> torch.dtype:
    return _TYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors name; RecipeError if a checkpoint cannot hold the dtype."""
    if dtype not in _NAMES:
        known = [str(t).removeprefix("torch.") for t in _NAMES]
        what = str(dtype).removeprefix("torch.")
        raise RecipeError(f"A checkpoint cannot hold elements of type {what}. {nearest('', known)}")
    return _NAMES[dtype]


def why_unsupported(tensor: Tensor) -> str:
    """Why neither a checkpoint nor a safetensors file can hold a tensor; empty if they can."""
    if tensor.is_quantized:
        return "quantized"
    if tensor.layout != torch.strided:
        return f"{str(tensor.layout).removeprefix('torch.')}, not dense"
    return "" if tensor.dtype in _NAMES else str(tensor.dtype).removeprefix("torch.")


def first_unsupported(named: Iterable[tuple[str, Tensor]]) -> str:
    """The first tensor that a checkpoint cannot hold, and why; empty if there is none."""
    for name, tensor in named:
        if why := why_unsupported(tensor):
            return f"{name} is {why}"
    return ""


def canonical_names(model: nn.Module) -> dict[str, str]:
    """For each name in a model's state, the first name of the same tensor.

    Tensors are the same if they have the same memory, dtype, shape and strides: a weight tied as
    its transpose is another tensor. A tensor that no file can hold keeps its own name.
    """
    first: dict[str, str] = {}
    known: dict[tuple[object, ...], str] = {}
    for name, tensor in model.state_dict().items():
        if why_unsupported(tensor) or not tensor.numel():
            first[name] = name
            continue
        place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        first[name] = known.setdefault(place, name)
    return first


def tensor_bytes(tensor: Tensor) -> memoryview:
    """A tensor's bytes in row-major order."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
