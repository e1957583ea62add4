"""Which ranks are a replica's, where several step apart."""

import math

from hypothesis import given
from hypothesis import strategies as st

from shoal.comm.mesh import ranks_by_replica

LENGTH = st.integers(1, 5)


@given(st.tuples(LENGTH, LENGTH, LENGTH, LENGTH))
def test_replicas_share_out_all_ranks_and_each_has_a_part_of_the_data_axis(
    shape: tuple[int, int, int, int],
) -> None:
    _, replicas, within, tensor = shape
    found = ranks_by_replica(shape)
    assert sorted(rank for own in found for rank in own) == list(range(math.prod(shape)))
    assert len(found) == replicas
    for number, own in enumerate(found):
        assert own == sorted(own)
        assert {rank // tensor % (replicas * within) for rank in own} == set(
            range(number * within, (number + 1) * within)
        )
        # Peers have the same place in each replica.
        first = [rank - number * within * tensor for rank in own]
        assert first == found[0]
