"""Copies past the cache have the bits of any other copy, and change nothing beside their place."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shoal.comm import uncached_copy
from shoal.comm.uncached_copy import LEAST_BYTES, copy_uncached

WORDS = LEAST_BYTES // 4
SIDE = 1 << 11  # of a square that is large enough


def any_bits(count: int, seed: int = 1) -> Tensor:
    """Every kind of number there is, also those that arithmetic would change."""
    draws = torch.Generator().manual_seed(seed)
    words = torch.randint(-(1 << 31), 1 << 31, (count,), generator=draws).to(torch.int32)
    # A signalling NaN, the smallest number, minus zero.
    words[:3] = torch.tensor([0x7F800001, 1, -(1 << 31)], dtype=torch.int64).to(torch.int32)
    return words.view(torch.float32)


def same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


@given(
    length=st.integers(WORDS - 2, WORDS + 70),
    start=st.integers(0, 17),
    place=st.integers(0, 17),
    flush=st.booleans(),
)
def test_bits_stay_and_nothing_else_changes(
    length: int, start: int, place: int, flush: bool
) -> None:
    values, room = any_bits(length + 17), torch.zeros(length + 34)
    torch.set_flush_denormal(flush)
    try:
        copy_uncached([room[place : place + length]], [values[start : start + length]])
    finally:
        torch.set_flush_denormal(False)
    assert same_bits(room[place : place + length], values[start : start + length])
    assert not room[:place].any() and not room[place + length :].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.uint8])
def test_any_type_is_copied(dtype: torch.dtype) -> None:
    values = any_bits(WORDS).view(dtype).view(-1, 2)
    room = torch.zeros_like(values)
    copy_uncached([room], [values])
    assert same_bits(room, values)


def test_bytes_that_are_no_words_are_copied() -> None:
    values = any_bits(WORDS + 1).view(torch.uint8)[:-1]
    room = torch.zeros(len(values) + 1, dtype=torch.uint8)
    copy_uncached([room[:-1]], [values])
    assert torch.equal(room[:-1], values) and not room[-1]


def test_what_is_no_plain_copy_is_torchs() -> None:
    """Transposed, of another type, small, negated, made of nothing: each as torch copies it."""
    square, turned = torch.randn(SIDE, SIDE), torch.randn(WORDS, dtype=torch.cfloat).conj()
    values = [square.t(), square.double(), torch.randn(3), turned, torch._neg_view(square)]
    values += [torch.arange(WORDS, dtype=torch.int32), torch._efficientzerotensor(WORDS)]
    places = [torch.ones(value.shape, dtype=value.dtype) for value in values]
    places[1], places[5] = places[1].float(), places[5].float()
    copy_uncached(places, values)
    for place, value in zip(places, values, strict=True):
        assert torch.equal(place, value.to(place.dtype))


HAS_ONE = torch.backends.mkl.is_available() and (
    torch.backends.cpu.get_cpu_capability() == "AVX512"
)


@pytest.mark.skipif(not HAS_ONE, reason="torch was built without MKL, or there is no AVX-512")
def test_torch_brings_such_a_copy_along() -> None:
    assert uncached_copy._matrix_copy() is not None


@pytest.mark.parametrize("missing", ["AVX-512", "MKL"])
def test_without_it_bits_are_the_same(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    uncached_copy._matrix_copy.cache_clear()
    if missing == "MKL":
        monkeypatch.setattr(uncached_copy.ctypes, "CDLL", lambda _: object())
    else:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    values, room = any_bits(WORDS), torch.zeros(WORDS)
    copy_uncached([room], [values])
    assert uncached_copy._matrix_copy() is None and same_bits(room, values)
    uncached_copy._matrix_copy.cache_clear()
