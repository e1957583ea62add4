"""The layout of buckets: a pure function of the parameter list."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shoal.comm.buckets import GradientBucket, SingleParameterBucket, assign_buckets, make_bucket
from shoal.comm.buffer_pool import BufferPool

SIZES = st.lists(st.tuples(st.integers(1, 50), st.sampled_from(["float", "half"])), max_size=30)


@given(SIZES, st.integers(1, 100))
def test_each_parameter_is_in_one_bucket_in_reverse_order(sizes, bucket_bytes) -> None:
    buckets = assign_buckets(sizes, bucket_bytes)
    assert [i for bucket in buckets for i in bucket] == list(reversed(range(len(sizes))))
    assert all(buckets)


@given(SIZES, st.integers(1, 100))
def test_buckets_keep_their_size_and_kind(sizes, bucket_bytes) -> None:
    for bucket in assign_buckets(sizes, bucket_bytes):
        assert len({sizes[i][1] for i in bucket}) == 1
        assert len(bucket) == 1 or sum(sizes[i][0] for i in bucket) <= bucket_bytes


def test_a_bucket_fills_rows_and_zeroes_what_is_missing() -> None:
    parameters = [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4))]
    bucket = GradientBucket([1, 0], parameters, num_rows=2, buffers=BufferPool())
    bucket.fill(0, [torch.ones(2, 3), torch.full((4,), 2.0)])
    bucket.fill(1, [torch.ones(2, 3), None])
    assert torch.equal(bucket.rows[0], torch.tensor([2.0] * 4 + [1.0] * 6))
    bucket.add(1, [None, torch.ones(4)])
    assert torch.equal(bucket.rows[1], torch.ones(10))
    bucket.fill(0, [None, None])
    assert not bucket.rows[0].any()


def test_a_parameter_that_fills_the_only_row_is_sent_from_where_it_is() -> None:
    parameters = [nn.Parameter(torch.zeros(5)), nn.Parameter(torch.zeros(32))]
    assert isinstance(make_bucket([1], parameters, 1, BufferPool()), SingleParameterBucket)
    assert isinstance(make_bucket([1], parameters, 1, BufferPool(), [0, 32]), SingleParameterBucket)
    for shared in (
        make_bucket([0], parameters, 1, BufferPool(), [0, 32]),  # the row is longer
        make_bucket([1], parameters, 2, BufferPool()),
        make_bucket([1, 0], parameters, 1, BufferPool()),
    ):
        assert not isinstance(shared, SingleParameterBucket)
