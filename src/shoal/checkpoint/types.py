"""Element types: torch's, and their names in safetensors files."""

import torch

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


def type_of_name(name: str) -> torch.dtype:
    return _TYPES[name]


def name_of_type(dtype: torch.dtype) -> str:
    """The name, or an error if a checkpoint cannot hold such elements."""
    if dtype not in _NAMES:
        known = [str(t).removeprefix("torch.") for t in _NAMES]
        what = str(dtype).removeprefix("torch.")
        raise RecipeError(f"A checkpoint cannot hold elements of type {what}. {nearest('', known)}")
    return _NAMES[dtype]
