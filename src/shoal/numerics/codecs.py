"""Codecs: encode a vector in fewer bytes, and decode it. Pure.

- `fp16` and `bf16` round each element.
- `int8` and `int4` cut the vector into blocks of 256 elements, each with one scale, its largest
  element over 127 or 7, and round the elements to whole multiples of it, to the nearest, halves to
  even: no draw, so the same vector gives the same bytes everywhere.
- `onebit` keeps the sign of each element, and of each such block the mean size of what is not zero.
- `topk:F` keeps the share F of each 1,024 elements that is largest, with their places; with `+int8`
  their values have 8 bits.

Each works block by block, so a vector may be cut between blocks and its parts be encoded apart, and
a place takes two bytes. A block with an element that is not finite comes back with one that is not,
so that nothing is hidden.

The sender keeps what was dropped and adds it to the next vector (error feedback); without that, an
element that is small in its block would never be sent. Seide et al. 2014; Karimireddy et al. 2019,
arXiv 1901.09847, for signs; Lin et al. 2018, arXiv 1712.01887, for the largest; Dettmers et al.
2022, arXiv 2110.02861, for blocks. Cost: 16, 8.125, 4.125 and 1.125 bits an element; of `topk`
48 F, with `+int8` 24 F and a little. Read next: `powersgd.py`, and `comm/compression.py`.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 256
TOP_BLOCK = 1024  # of `topk`; the blocks of all codecs divide it
_SCALE_BYTES = 4
_AT_ONCE = 1 << 20  # elements that are encoded together
_GATHER_BITS = 0x0102040810204080
_DENSE_START = 0.25  # share of elements that `topk` sends at first, if it is to send fewer
_WARM_UP = 20  # a run's steps over this are its warm-up


class HalfPrecisionCodec:
    """Two bytes for each element. What it drops is a small part of each, and is not kept."""

    is_separable, block, keeps_residual = True, 1, False

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

    is_separable, block, keeps_residual = True, BLOCK, True

    def __init__(self, bits: int):
        self.name = f"int{bits}"
        self._most, self._is_paired = 2 ** (bits - 1) - 1, bits == 4
        self._row_bytes = _SCALE_BYTES + BLOCK * bits // 8

    def num_bytes(self, num_elements: int) -> int:
        return -(-num_elements // BLOCK) * self._row_bytes

    def encode(self, flat: Tensor) -> Tensor:
        return _encode_rows(flat, BLOCK, self._row_bytes, self._write)

    def _write(self, rows: Tensor, out: Tensor) -> None:
        scale, steps = _scaled(rows, self._most)
        out[:, :_SCALE_BYTES].view(torch.float32).copy_(scale)
        if self._is_paired:
            codes = steps.add_(self._most).to(torch.uint8)  # 0 .. 14
            torch.bitwise_or(codes[:, ::2], codes[:, 1::2] << 4, out=out[:, _SCALE_BYTES:])
        else:
            out[:, _SCALE_BYTES:].view(torch.int8).copy_(steps)

    def decode(self, packed: Tensor, num_elements: int) -> Tensor:
        scale, codes = _columns(packed, self._row_bytes, _SCALE_BYTES)
        if self._is_paired:
            codes = torch.stack([codes & 15, codes >> 4], 2).view(-1, BLOCK)
            steps = codes.float() - self._most
        else:
            steps = codes.view(torch.int8).float()
        flat: Tensor = steps.mul_(scale.view(torch.float32)).view(-1)
        return flat[:num_elements]


class SignCodec:
    """A bit for each element, and before each block the mean size of those that are not zero."""

    name, is_separable, block, keeps_residual = "onebit", True, BLOCK, True
    _row_bytes = _SCALE_BYTES + BLOCK // 8

    def num_bytes(self, num_elements: int) -> int:
        return -(-num_elements // BLOCK) * self._row_bytes

    def encode(self, flat: Tensor) -> Tensor:
        return _encode_rows(flat, BLOCK, self._row_bytes, self._write)

    def _write(self, rows: Tensor, out: Tensor) -> None:
        sizes, counts = rows.abs().sum(1, keepdim=True), rows.ne(0).float().sum(1, keepdim=True)
        # Eight bytes of 0 or 1 as one number: the product has them as the bits of its last byte.
        eights = (rows >= 0).view(torch.int64)
        out[:, :_SCALE_BYTES].view(torch.float32).copy_(sizes / counts.clamp(min=1))
        out[:, _SCALE_BYTES:].copy_(eights.mul_(_GATHER_BITS) >> 56)

    def decode(self, packed: Tensor, num_elements: int) -> Tensor:
        scale, bytes_ = _columns(packed, self._row_bytes, _SCALE_BYTES)
        signs = _signs(packed.device)[bytes_.int()].view(len(bytes_), -1)
        return signs.mul_(scale.view(torch.float32)).view(-1)[:num_elements]


class TopCodec:
    """The largest elements of each block with their places; by `is_rounded` in 8 bits."""

    is_separable, block, keeps_residual = True, TOP_BLOCK, True

    def __init__(self, share: float, is_rounded: bool):
        if not 0 < share <= 1:
            raise ValueError(f"topk sends a share of 0 to 1 of the elements, and not {share}")
        self.name = f"topk:{share}{'+int8' * is_rounded}"
        self._count, self._is_rounded = max(1, round(share * TOP_BLOCK)), is_rounded
        value_bytes = _SCALE_BYTES + self._count if is_rounded else 4 * self._count
        self._row_bytes = value_bytes + 2 * self._count

    def num_bytes(self, num_elements: int) -> int:
        return -(-num_elements // TOP_BLOCK) * self._row_bytes

    def encode(self, flat: Tensor) -> Tensor:
        return _encode_rows(flat, TOP_BLOCK, self._row_bytes, self._write)

    def _write(self, rows: Tensor, out: Tensor) -> None:
        places = rows.abs().topk(self._count, 1, sorted=False).indices
        parts = [rows.gather(1, places)]
        if self._is_rounded:
            scale, steps = _scaled(parts[0], 127)
            parts = [scale, steps.to(torch.int8)]
        parts = [part.view(torch.uint8) for part in (*parts, places.to(torch.int16))]
        torch.cat(parts, 1, out=out)

    def decode(self, packed: Tensor, num_elements: int) -> Tensor:
        values, places = _columns(packed, self._row_bytes, self._row_bytes - 2 * self._count)
        places = places.clone(memory_format=torch.contiguous_format)
        if self._is_rounded:
            scale, steps = _columns(values.reshape(-1), values.shape[1], _SCALE_BYTES)
            values = steps.view(torch.int8).float().mul_(scale.view(torch.float32))
        else:
            values = values.view(torch.float32)
        rows = values.new_zeros(len(values), TOP_BLOCK)
        # A place that a damaged message has is one in the block all the same.
        rows.scatter_(1, places.view(torch.int16).long().bitwise_and_(TOP_BLOCK - 1), values)
        return rows.view(-1)[:num_elements]


class WholeCodec:
    """Sends elements as they are: what is too small to be packed, beside what is."""

    name, is_separable, block, keeps_residual = "none", True, 1, False

    def __init__(self, dtype: torch.dtype):
        self._dtype = dtype

    def num_bytes(self, num_elements: int) -> int:
        return num_elements * self._dtype.itemsize

    def encode(self, flat: Tensor) -> Tensor:
        return flat.view(torch.uint8)

    def decode(self, packed: Tensor, num_elements: int) -> Tensor:
        return packed.view(self._dtype)


Codec = HalfPrecisionCodec | BlockCodec | SignCodec | TopCodec


def make_codec(name: str) -> Codec | None:
    """The codec of a plan that works block by block; None for `none`."""
    made = {"fp16": torch.float16, "bf16": torch.bfloat16}
    if name in made:
        return HalfPrecisionCodec(name, made[name])
    if name.startswith("topk:"):
        share, _, rounding = name.removeprefix("topk:").partition("+")
        return TopCodec(float(share), rounding == "int8")
    return {"none": None, "int8": BlockCodec(8), "int4": BlockCodec(4), "onebit": SignCodec()}[name]


def codec_at(name: str, step: int, num_steps: int) -> Codec:
    """The codec of a step of a run, which sends more at first.

    In the warm-up, a twentieth of the steps, `topk` falls from a quarter of the elements to its
    share in even ratios, and `onebit` is `int8`: gradients that change fast suffer most from being
    late. The others are the same in all steps.
    """
    codec, length = make_codec(name), num_steps // _WARM_UP
    assert codec is not None
    if step >= length or not isinstance(codec, SignCodec | TopCodec):
        return codec
    if isinstance(codec, SignCodec):
        return BlockCodec(8)
    share, _, rounding = name.removeprefix("topk:").partition("+")
    ratio = min(1.0, float(share) / _DENSE_START)
    now = max(float(share), _DENSE_START * ratio ** (step / length))
    return TopCodec(now, rounding == "int8")


def change_codec(name: str) -> Codec:
    """How `zero` sends the changes of parameters, which are of about one size: in 8 bits, or 16."""
    codec = make_codec(name) if name in ("fp16", "bf16") else BlockCodec(8)
    assert codec is not None
    return codec


def packs(name: str, shape: torch.Size | tuple[int, ...], itemsize: int) -> bool:
    """Whether a codec makes a tensor smaller, from whole blocks; else it is sent as it is."""
    length = torch.Size(shape).numel()
    if length < TOP_BLOCK:
        return False
    if name.startswith("powersgd:"):
        return num_factors(shape, int(name.removeprefix("powersgd:"))) * 4 < length * itemsize
    codec = make_codec(name)
    assert codec is not None
    return codec.num_bytes(-(-length // TOP_BLOCK) * TOP_BLOCK) < length * itemsize


def num_factors(shape: torch.Size | tuple[int, ...], rank: int) -> int:
    """Of a tensor as a matrix of its first dim and the others: the elements of its two factors."""
    if len(shape) < 2 or not shape[0]:
        return torch.Size(shape).numel()
    rows, columns = shape[0], torch.Size(shape[1:]).numel()
    return min(rank, rows, columns) * (rows + columns)


def _encode_rows(
    flat: Tensor, block: int, row_bytes: int, write: Callable[[Tensor, Tensor], None]
) -> Tensor:
    """The bytes of a vector whose rows, of a block each, `write` puts in their places: some at a
    time, so that what is made in between stays in caches."""
    encoded = flat.new_empty(-(-flat.numel() // block), row_bytes, dtype=torch.uint8)
    for start in range(0, flat.numel(), _AT_ONCE):
        part = flat[start : start + _AT_ONCE].float()
        if len(part) % block:
            part = F.pad(part, (0, -len(part) % block))
        write(part.view(-1, block), encoded[start // block :][: len(part) // block])
    return encoded.view(-1)


def _scaled(rows: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """A scale for each row, and its elements in whole multiples of it, `most` at the most."""
    scale = rows.abs().amax(1, keepdim=True) / most
    steps = (rows / torch.where(scale == 0, 1.0, scale)).round_()
    return scale, steps.clamp_(-most, most).nan_to_num_(0.0)


def _columns(packed: Tensor, row_bytes: int, first: int) -> tuple[Tensor, Tensor]:
    """The first bytes of each row, where they may be seen as another type; and the others."""
    rows = packed.view(-1, row_bytes)
    # Not `contiguous`: a single row counts as that, wherever it begins and ends.
    return rows[:, :first].clone(memory_format=torch.contiguous_format), rows[:, first:]


@functools.cache
def _signs(device: torch.device) -> Tensor:
    """The eight signs that each byte stands for."""
    bits = torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1
    return (bits.float() * 2 - 1).to(device)
