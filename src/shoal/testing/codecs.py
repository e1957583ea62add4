"""Tests that every codec must pass.

    class TestMine(CodecConformance):
        @pytest.fixture
        def codec(self):
            return MyCodec()

A new codec gives that one fixture and inherits the tests. They are about what strategies rely on:
sizes that follow from the number of elements, the same bytes on every rank, a residual that brings
back in time what a step drops and, if the codec says `is_separable`, blocks that may be encoded
apart; nothing that is not finite is hidden. Cost: milliseconds.
"""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from shoal.comm.compression import Codec, encode_with_residual, share_bounds

LENGTHS = (1, 7, 64, 257, 1000)
NUM_STEPS = 60


def vector(num_elements: int, seed: int = 0) -> Tensor:
    return torch.randn(num_elements, generator=torch.Generator().manual_seed(seed))


class CodecConformance:
    """Inherit, and give `codec`."""

    @pytest.fixture
    def codec(self) -> Codec:
        raise NotImplementedError("return the codec under test")

    @pytest.mark.parametrize("num_elements", LENGTHS)
    def test_sizes_follow_from_the_number_of_elements(
        self, codec: Codec, num_elements: int
    ) -> None:
        encoded = codec.encode(vector(num_elements))
        assert encoded.dtype == torch.uint8 and encoded.dim() == 1
        assert encoded.numel() == codec.num_bytes(num_elements)
        decoded = codec.decode(encoded, num_elements)
        assert decoded.shape == (num_elements,) and decoded.dtype == torch.float32

    @pytest.mark.parametrize("num_elements", LENGTHS)
    def test_the_same_vector_gives_the_same_bytes(self, codec: Codec, num_elements: int) -> None:
        flat = vector(num_elements)
        before = flat.clone()
        assert torch.equal(codec.encode(flat), codec.encode(flat.clone()))
        assert torch.equal(flat, before), "the vector was written to"

    @pytest.mark.parametrize("num_ranks", [2, 3])
    def test_shares_of_whole_blocks_are_encoded_alike_apart(
        self, codec: Codec, num_ranks: int
    ) -> None:
        if not codec.is_separable:
            pytest.skip("the codec looks at the whole vector, and says so")
        flat = vector(1000)
        bounds = share_bounds(len(flat), codec.block, num_ranks)
        shares = [flat[a:b] for a, b in pairwise(bounds)]
        apart = torch.cat([codec.encode(share) for share in shares if len(share)])
        assert torch.equal(apart, codec.encode(flat))

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_what_is_not_finite_is_not_hidden(self, codec: Codec, bad: float) -> None:
        """Or it would stay in a residual, and ranks would make a step on it."""
        flat = vector(1000)
        flat[3] = bad
        assert not codec.decode(codec.encode(flat), 1000).isfinite().all()

    @pytest.mark.parametrize("num_elements", LENGTHS)
    def test_what_is_sent_and_what_is_dropped_make_the_vector(
        self, codec: Codec, num_elements: int
    ) -> None:
        flat = vector(num_elements)
        encoded, residual = encode_with_residual(codec, flat)
        came = codec.decode(encoded, num_elements)
        last_bits = 2**-23 * torch.maximum(came.abs(), flat.abs())
        assert bool(((came + residual - flat).abs() <= last_bits).all())
        assert float(residual.norm()) < float(flat.norm()), "packing brings it no nearer"

    def test_zeros_stay_zeros(self, codec: Codec) -> None:
        decoded = codec.decode(codec.encode(torch.zeros(100)), 100)
        assert torch.equal(decoded, torch.zeros(100))

    @pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
    def test_what_is_dropped_comes_with_later_steps(self, codec: Codec, scale: float) -> None:
        """The sum over steps of what arrives strays from that of what was sent by one step's error
        at the most, and that error does not grow: what is never sent would add up."""
        sent, came = torch.zeros(300).double(), torch.zeros(300).double()
        residual, sizes = torch.zeros(300), []
        for step in range(2 * NUM_STEPS):
            flat = scale * (1 + vector(300, step))
            encoded, residual = encode_with_residual(codec, flat + residual)
            sent, came = sent + flat, came + codec.decode(encoded, 300)
            sizes.append(float(residual.abs().max()))
        assert float((sent - came).abs().max()) <= max(sizes) + 1e-3 * scale
        early, late = max(sizes[:NUM_STEPS]), max(sizes[NUM_STEPS:])
        assert late <= 1.5 * early + 1e-6 * scale, "the residual grows"
