"""Packing into fewer bytes: how far off an element may be, and that nothing is hidden."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shoal.comm.collectives import Group
from shoal.comm.compression import Codec, CompressedScatter, encode_with_residual
from shoal.numerics.codecs import (
    BLOCK,
    TOP_BLOCK,
    BlockCodec,
    HalfPrecisionCodec,
    SignCodec,
    TopCodec,
    codec_at,
    make_codec,
    packs,
)
from shoal.plans.keys import ROUNDING_CODECS
from shoal.testing.codecs import CodecConformance

LENGTHS = st.integers(0, 3 * BLOCK + 1)
SIZES = st.floats(-44, 37)  # powers of ten, from what is nearly nothing to what nearly overflows
BITS = st.sampled_from([4, 8])


def vector(length: int, size: float, seed: int) -> Tensor:
    """Of blocks whose sizes differ, up to 10 to the power of `size`."""
    draws = torch.Generator().manual_seed(seed)
    powers = size - 6 * torch.rand(-(-length // BLOCK) or 1, generator=draws, dtype=torch.float64)
    scale = (10**powers).repeat_interleave(BLOCK)[:length]
    return (scale * (2 * torch.rand(length, generator=draws) - 1)).float()


def round_trip(codec: HalfPrecisionCodec | BlockCodec, flat: Tensor) -> Tensor:
    packed = codec.encode(flat)
    assert packed.dtype == torch.uint8 and packed.dim() == 1
    assert packed.numel() == codec.num_bytes(flat.numel())
    return codec.decode(packed, flat.numel())


@given(LENGTHS, SIZES, BITS, st.integers(0, 99))
def test_an_element_is_off_by_half_a_step_of_its_block(
    length: int, size: float, bits: int, seed: int
) -> None:
    flat = vector(length, size, seed)
    back = round_trip(BlockCodec(bits), flat)
    assert back.dtype == torch.float32 and back.shape == flat.shape
    for before, after in zip(flat.split(BLOCK), back.split(BLOCK), strict=True):
        if not length:
            continue
        most = before.double().abs().max().item()
        half = most / (2 ** (bits - 1) - 1) / 2
        error = (before.double() - after.double()).abs().max().item()
        # The scale itself may be among the least numbers there are, and is off by half of one.
        assert error <= half * (1 + 1e-5) + 1e-43


@given(LENGTHS, st.integers(0, 4), BITS, st.integers(0, 99))
def test_parts_of_whole_blocks_may_be_packed_alone(
    length: int, num_blocks: int, bits: int, seed: int
) -> None:
    flat, codec = vector(length, 0, seed), BlockCodec(bits)
    cut = min(length, num_blocks * BLOCK)
    parts = torch.cat([codec.encode(flat[:cut]), codec.encode(flat[cut:])])
    assert torch.equal(parts, codec.encode(flat))
    assert codec.num_bytes(length) == codec.num_bytes(cut) + codec.num_bytes(length - cut)


@pytest.mark.parametrize("name", ROUNDING_CODECS)
def test_zeros_and_the_largest_come_back_as_they_are(name: str) -> None:
    codec = make_codec(name)
    assert codec is not None
    flat = torch.zeros(2 * BLOCK + 3)
    assert torch.equal(round_trip(codec, flat), flat)
    flat[5], flat[BLOCK + 1] = -7.0, 127.0
    assert torch.equal(round_trip(codec, flat), flat)


@pytest.mark.parametrize("name", ROUNDING_CODECS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_hidden(name: str, bad: float) -> None:
    codec = make_codec(name)
    assert codec is not None
    flat = torch.ones(2 * BLOCK)
    flat[3] = bad
    back = round_trip(codec, flat)
    assert not back[3].isfinite()
    assert back[BLOCK:].isfinite().all(), "of the other block nothing is lost"


def test_halves_are_to_even() -> None:
    flat = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5])
    assert round_trip(BlockCodec(8), flat).tolist() == [127.0, 0.0, 2.0, 2.0, 0.0, -2.0]


def test_doubles_are_packed_as_singles() -> None:
    flat = vector(300, 0, 1)
    assert torch.equal(BlockCodec(8).encode(flat.double()), BlockCodec(8).encode(flat))


@pytest.mark.parametrize(("name", "bits"), [("int8", 8.125), ("int4", 4.125), ("bf16", 16)])
def test_bits_of_an_element(name: str, bits: float) -> None:
    codec = make_codec(name)
    assert codec is not None and 8 * codec.num_bytes(1024) / 1024 == bits
    assert make_codec("none") is None


@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_dropped_and_added_again_is_not_lost(bits: int) -> None:
    """Elements far below a step of their block arrive in time."""
    codec, flat = BlockCodec(bits), torch.full((BLOCK,), 1e-4)
    flat[0] = 1.0
    owed, total = torch.zeros(BLOCK), torch.zeros(BLOCK)
    for _ in range(2000):
        back = round_trip(codec, flat + owed)
        owed = flat + owed - back
        total += back
    torch.testing.assert_close(total[1:], torch.full((BLOCK - 1,), 0.2), rtol=0, atol=0.15)
    assert float(owed.abs().max()) <= 1 / (2 ** (bits - 1) - 1)


class TestHalf(CodecConformance):
    @pytest.fixture(params=["fp16", "bf16"])
    def codec(self, request: pytest.FixtureRequest) -> Codec:
        made = make_codec(request.param)
        assert made is not None
        return made


class TestBlocks(CodecConformance):
    @pytest.fixture(params=[8, 4])
    def codec(self, request: pytest.FixtureRequest) -> Codec:
        return BlockCodec(request.param)


class TestSigns(CodecConformance):
    @pytest.fixture
    def codec(self) -> Codec:
        return SignCodec()


class TestTop(CodecConformance):
    @pytest.fixture(params=[(0.1, False), (0.1, True), (0.5, False)])
    def codec(self, request: pytest.FixtureRequest) -> Codec:
        return TopCodec(*request.param)


@given(
    st.integers(1, 3 * TOP_BLOCK),
    st.floats(-30, 30),
    st.sampled_from(["bf16", "int8", "int4", "topk:0.05", "topk:0.05+int8"]),
    st.integers(0, 99),
)
def test_residual_and_what_was_sent_are_the_gradient(
    length: int, size: float, name: str, seed: int
) -> None:
    """Exactly: an element is sent as it is, not at all, or rounded to what is near to it."""
    flat, codec = vector(length, size, seed), make_codec(name)
    assert codec is not None
    encoded, residual = encode_with_residual(codec, flat)
    assert torch.equal(codec.decode(encoded, length) + residual, flat)


@given(st.integers(1, 2 * TOP_BLOCK), st.integers(1, 400), st.integers(0, 99))
def test_the_largest_of_a_block_are_sent_as_they_are(length: int, count: int, seed: int) -> None:
    flat, codec = vector(length, 0, seed), TopCodec(count / TOP_BLOCK, False)
    back = codec.decode(codec.encode(flat), length)
    for before, after in zip(flat.split(TOP_BLOCK), back.split(TOP_BLOCK), strict=True):
        sent = after != 0
        assert torch.equal(before[sent], after[sent]) and int(sent.sum()) <= count
        if not bool(sent.all()) and bool(sent.any()):
            assert float(before[~sent].abs().max()) <= float(before[sent].abs().min())


@given(st.integers(1, 3 * BLOCK), st.integers(0, 99))
def test_signs_are_kept_with_the_mean_size_of_a_block(length: int, seed: int) -> None:
    flat, codec = vector(length, 0, seed), SignCodec()
    back = codec.decode(codec.encode(flat), length)
    assert torch.equal(back >= 0, flat >= 0)
    for before, after in zip(flat.split(BLOCK), back.split(BLOCK), strict=True):
        torch.testing.assert_close(after.abs(), before.abs().mean().expand(len(after)))


def test_a_damaged_place_is_within_its_block() -> None:
    codec = TopCodec(0.01, False)
    packed = torch.full((codec.num_bytes(TOP_BLOCK),), 255, dtype=torch.uint8)
    assert codec.decode(packed, TOP_BLOCK).shape == (TOP_BLOCK,)


def test_a_warm_up_sends_more_at_first() -> None:
    sizes = [codec_at("topk:0.01", step, 200).num_bytes(TOP_BLOCK) for step in range(12)]
    assert sizes[0] == 6 * 256 and sizes == sorted(sizes, reverse=True)
    assert sizes[10:] == [make_codec("topk:0.01").num_bytes(TOP_BLOCK)] * 2
    assert [codec_at("onebit", step, 40).name for step in range(3)] == ["int8", "int8", "onebit"]
    assert codec_at("topk:0.4", 0, 200).name == "topk:0.4"
    assert codec_at("int8", 0, 200).name == "int8"


def test_small_tensors_are_not_packed() -> None:
    assert not packs("int8", (1023,), 4) and packs("int8", (1024,), 4)
    assert not packs("fp16", (4096,), 2), "two bytes stay two bytes"
    assert not packs("powersgd:4", (4096,), 4) and packs("powersgd:4", (64, 64), 4)
    assert not packs("powersgd:40", (64, 64), 4)


class Largest:
    """The twentieth part of a vector that is largest, wherever it is: not separable."""

    name, is_separable, block = "largest", False, 1

    def num_bytes(self, num_elements: int) -> int:
        return 12 * self._count(num_elements)

    def encode(self, flat: Tensor) -> Tensor:
        places = flat.abs().topk(self._count(flat.numel())).indices
        values = flat[places].float()
        return torch.cat([places.view(torch.uint8), values.view(torch.uint8)])

    def decode(self, encoded: Tensor, num_elements: int) -> Tensor:
        count = self._count(num_elements)
        places, values = encoded.split([8 * count, 4 * count])
        flat = torch.zeros(num_elements)
        flat[places.clone().view(torch.int64)] = values.clone().view(torch.float32)
        return flat

    def _count(self, num_elements: int) -> int:
        return -(-num_elements // 20)


class Forgetful(Largest):
    """It never sends the second half."""

    def encode(self, flat: Tensor) -> Tensor:
        return super().encode(torch.cat([flat[: len(flat) // 2], torch.zeros(-(-len(flat) // 2))]))


class TestLargest(CodecConformance):
    @pytest.fixture
    def codec(self) -> Codec:
        return Largest()


def test_a_codec_that_looks_at_the_whole_vector_is_not_used_share_by_share() -> None:
    with pytest.raises(AssertionError, match="largest encodes cannot be decoded"):
        CompressedScatter(Group(), Largest(), torch.zeros(100), [[range(100)]])


def test_the_suite_sees_what_is_never_sent() -> None:
    with pytest.raises(AssertionError, match="the residual grows"):
        CodecConformance().test_what_is_dropped_comes_with_later_steps(Forgetful(), 1.0)
