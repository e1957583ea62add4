"""Codecs: encode a vector in fewer bytes, and decode it. Pure.

`fp16` and `bf16` round each element. `int8` and `int4` cut the vector into blocks of 256 elements,
each with one scale, its largest element over 127 or 7, and round the elements to whole multiples of
it, to the nearest, halves to even: no draw, so the same vector gives the same bytes everywhere. A
block with an element that is not finite comes back as NaN, so that nothing is hidden.

The sender keeps what was dropped and adds it to the next vector (error feedback); without that, an
element that is small in its block would never be sent. Seide et al. 2014; Dettmers et al. 2022,
arXiv 2110.02861, for blocks. Cost: 8.125 or 4.125 bits an element.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 256
_SCALE_BYTES = 4


class HalfPrecisionCodec:
    """Two bytes for each element."""

    is_separable, block = True, 1

    def __init__(self, name: str, dtype: torch.dtype):
        self.name, self._dtype = name, dtype

    def num_bytes(self, num_elements: int) -> int:
        return 2 * num_elements

    def encode(self, flat: Tensor) -> Tensor:
        return flat.to(self._dtype).view(torch.uint8)

    def decode(self, packed: Tensor, num_elements: int) -> Tensor:
        return packed.view(self._dtype).float()


class BlockCodec:
    """Whole numbers of 8 or 4 bits, and a scale before each block of them."""

    is_separable, block = True, BLOCK

    def __init__(self, bits: int):
        self.name = f"int{bits}"
        self._most, self._is_paired = 2 ** (bits - 1) - 1, bits == 4
        self._row_bytes = _SCALE_BYTES + BLOCK * bits // 8

    def num_bytes(self, num_elements: int) -> int:
        return -(-num_elements // BLOCK) * self._row_bytes

    def encode(self, flat: Tensor) -> Tensor:
        if not flat.numel():
            return flat.new_empty(0, dtype=torch.uint8)
        rows = F.pad(flat.float(), (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
        scale = rows.abs().amax(1, keepdim=True) / self._most
        steps = (rows / torch.where(scale == 0, 1.0, scale)).round()
        codes = steps.clamp(-self._most, self._most).nan_to_num(0.0).to(torch.int8)
        if self._is_paired:
            codes = (codes + self._most).to(torch.uint8)  # 0 .. 14
            codes = codes[:, ::2] | codes[:, 1::2] << 4
        return torch.cat([scale.view(torch.uint8), codes.view(torch.uint8)], 1).view(-1)

    def decode(self, packed: Tensor, num_elements: int) -> Tensor:
        rows = packed.view(-1, self._row_bytes)
        scale = rows[:, :_SCALE_BYTES].contiguous().view(torch.float32)
        codes = rows[:, _SCALE_BYTES:]
        if self._is_paired:
            codes = torch.stack([codes & 15, codes >> 4], 2).view(-1, BLOCK)
            steps = codes.float() - self._most
        else:
            steps = codes.view(torch.int8).float()
        flat: Tensor = (steps * scale).view(-1)
        return flat[:num_elements]


def make_codec(name: str) -> HalfPrecisionCodec | BlockCodec | None:
    """The codec of a plan; None for `none`."""
    made = {"fp16": torch.float16, "bf16": torch.bfloat16}
    if name in made:
        return HalfPrecisionCodec(name, made[name])
    return {"none": None, "int8": BlockCodec(8), "int4": BlockCodec(4)}[name]
