"""Digests of tensors, and the verdict on replicas."""

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shoal.sync.digests import (
    CachedListing,
    DigestReader,
    TensorListing,
    canonical_nan,
    digest_to_float,
    find_majority,
    num_slices,
    slice_spans,
)


def named(*tensors: torch.Tensor):
    return [(tensor, (str(number),)) for number, tensor in enumerate(tensors)]


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=20), st.integers(1, 12))
def test_slices_are_all_of_it_once(sizes: list[int], count: int) -> None:
    found: dict[int, list[int]] = {}
    lengths = []
    for number in range(count):
        parts = list(slice_spans(sizes, number, count))
        lengths.append(sum(stop - start for _, start, stop in parts))
        for tensor, start, stop in parts:
            found.setdefault(tensor, []).extend(range(start, stop))
    assert found == {number: list(range(size)) for number, size in enumerate(sizes)}
    assert max(lengths) - min(lengths) <= 1


def test_little_is_one_slice_and_much_as_many_as_may_be() -> None:
    assert num_slices([4096] * 16, 10) == 1
    assert num_slices([1 << 30], 10) == 10
    assert num_slices([1 << 30], 1) == num_slices([], 10) == 1


KINDS = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int64, torch.uint8, torch.bool, torch.complex64),
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_any_bit_counts_and_equal_bits_are_equal(kind: torch.dtype) -> None:
    tensor = torch.arange(24).reshape(4, 6).to(kind)
    twin, reader = tensor.clone(), DigestReader()
    assert DigestReader().digest([tensor], 0, 1) == reader.digest([twin], 0, 1)
    flipped = twin.view(torch.uint8)
    flipped[1, 0] ^= 1
    assert DigestReader().digest([tensor], 0, 1) != DigestReader().digest([twin], 0, 1)


def test_zeros_of_either_sign_and_nans_are_their_bits() -> None:
    zeros = torch.tensor([0.0, -0.0])
    assert len(set(DigestReader().digests([zeros[:1], zeros[1:]]))) == 2
    one, other = (
        torch.frombuffer(bytearray(struct.pack("<I", bits)), dtype=torch.float32)
        for bits in (0x7FC00000, 0x7FC00001)
    )
    assert len(set(DigestReader().digests([one, other]))) == 2
    assert len(set(DigestReader().digests([canonical_nan(one), canonical_nan(other)]))) == 1
    whole = torch.tensor([3])
    assert canonical_nan(whole) is whole


def test_what_does_not_lie_in_a_row_is_read_in_order() -> None:
    tensor = torch.randn(4, 6)
    across = tensor.t().contiguous().t()
    assert not across.is_contiguous()
    assert DigestReader().digests([tensor]) == DigestReader().digests([across])


def test_a_reader_follows_a_tensor_to_other_memory() -> None:
    parameter = nn.Parameter(torch.zeros(8))
    tensors, reader = [parameter], DigestReader()
    before = reader.digests(tensors)
    parameter.data = torch.ones(8)
    assert reader.digests(tensors) != before
    parameter.data = torch.zeros(16)[:8]
    assert reader.digests(tensors) == before


def test_only_what_has_bytes_is_listed() -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.tensor([1.0]), (3,))
    stand_in, empty = torch.empty(3, device="meta"), torch.empty(0)
    listing = TensorListing.of(named(sparse, torch.ones(2), stand_in, empty))
    assert listing.names == ["1"]


def test_a_listing_is_the_same_while_its_tensors_are() -> None:
    kept, one, two = CachedListing(), torch.ones(2), torch.zeros(2)
    first = kept.of([one, 3], lambda: named(one))
    assert kept.of([one, 3], lambda: named(two)) is first
    assert kept.of([two, 3], lambda: named(two)).tensors[0] is two
    kept.of([[one]], lambda: named(one))
    assert kept.of([[one]], lambda: named(two)).tensors[0] is two  # a list may hold others now


@given(st.integers(0, 2**64 - 1))
def test_a_digest_fits_a_float(digest: int) -> None:
    number = digest_to_float(digest)
    assert number > 0 and int(number) == digest >> 12 | 1


@pytest.mark.parametrize(
    ("held", "odd", "right"),
    [
        ("ab", [0, 1], []),
        ("aba", [1], [0, 2]),
        ("abc", [0, 1, 2], []),
        ("aabb", [0, 1, 2, 3], []),
        ("baac", [0, 1, 2, 3], []),
        ("baaca", [0, 3], [1, 2, 4]),
    ],
)
def test_most_decide_and_half_are_not_most(held: str, odd: list[int], right: list[int]) -> None:
    assert find_majority([[float(ord(one)), 1.0] for one in held]) == (odd, right)
