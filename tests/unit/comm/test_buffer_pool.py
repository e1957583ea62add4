"""Memory that is lent and comes back."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.comm.buffer_pool import BufferPool


def test_what_came_back_is_lent_again() -> None:
    spares = BufferPool()
    lent = spares.take(100, torch.zeros(1))
    place = lent.data_ptr()
    spares.give(lent)
    again = spares.take(90, torch.zeros(1, dtype=torch.int32))
    assert again.data_ptr() == place and again.shape == (90,) and again.dtype == torch.int32
    assert spares.take(90, torch.zeros(1)).data_ptr() != place


def test_a_small_request_does_not_take_a_large_block() -> None:
    spares = BufferPool()
    large = spares.take(1000, torch.zeros(1))
    spares.give(large)
    assert spares.take(10, torch.zeros(1)).data_ptr() != large.data_ptr()
    assert spares.take(800, torch.zeros(1)).data_ptr() == large.data_ptr()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 64)), max_size=40))
def test_nothing_is_lent_twice_at_a_time(calls: list[tuple[bool, int]]) -> None:
    spares, lent = BufferPool(), list[tuple[int, torch.Tensor]]()
    for number, (takes, length) in enumerate(calls):
        if takes or not lent:
            tensor = spares.take(length, torch.zeros(1, dtype=torch.int64))
            lent.append((number, tensor.fill_(number)))
        else:
            spares.give(lent.pop(length % len(lent))[1])
        assert all(bool((tensor == mark).all()) for mark, tensor in lent)
