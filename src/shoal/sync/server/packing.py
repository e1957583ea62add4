"""Gradients rounded to two bytes an element on their way to servers: `codec=fp16` or `bf16`.

A worker rounds its rows before it pushes them; what is sent in frames is half as long, and servers
add up in the parameters' own type. Rows that servers read in shared memory are rounded alike, since
the result must not depend on where a server runs; there it costs a pass over them and gains
nothing. Nothing is kept of what rounding drops: unlike the few bits of `int8`, two bytes round each
element by itself, by a small part of it.

Not for gradients beyond 65,504, which fp16 does not hold: a step that has one is refused, or, under
`precision=fp16`, done again with a smaller loss scale.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.comm.wire import tensor_of
from shoal.errors import RecipeError
from shoal.numerics.codecs import HalfPrecisionCodec, make_codec
from shoal.plans.keys import ROUNDING_CODECS

PACKED_BYTES = 2  # of a packed element


class GradientPacker:
    """`checks` says that servers look for non-finite values."""

    def __init__(self, name: str, checks: bool):
        codec = make_codec(name)
        assert isinstance(codec, HalfPrecisionCodec)
        self.name, self._codec, self._checks = name, codec, checks

    def round(self, rows: Sequence[Tensor]) -> None:
        """Let rows be what will arrive of them."""
        for row in rows:
            if is_packed(row.itemsize):
                came = self._codec.decode(self._codec.encode(row), row.numel())
                if not self._checks and _overflows(row, came):
                    raise RecipeError(
                        f"A gradient is {float(row.abs().max()):.3g}, and codec={self.name} holds "
                        f"{torch.finfo(torch.float16).max:,.0f} at the most. Use codec=bf16, or a "
                        "loss that is smaller: a mean, not a sum."
                    )
                row.copy_(came)

    def pack(self, row: Tensor) -> Tensor:
        """The bytes of a row that was rounded."""
        return self._codec.encode(row)


def is_packed(itemsize: int) -> bool:
    """Whether elements of so many bytes are packed; those of two have nothing to lose."""
    return itemsize > PACKED_BYTES


def unpack_row(name: str, frame: memoryview, values: Tensor) -> Tensor:
    """A row, as a codec of this name packed it, of a key that holds `values`."""
    if name == "none":
        return tensor_of(frame, values.dtype, values.numel())
    codec = make_codec(name) if name in ROUNDING_CODECS else None
    if codec is None:
        raise ValueError(f"rows are not packed by {name}")
    packed = tensor_of(frame, torch.uint8, codec.num_bytes(values.numel()))
    return codec.decode(packed, values.numel()).to(values.dtype)


def _overflows(row: Tensor, came: Tensor) -> bool:
    return not bool(came.isfinite().all()) and bool(row.isfinite().all())
