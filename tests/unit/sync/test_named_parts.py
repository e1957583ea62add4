"""Named parts of a loss: weighted means, whatever rank computed which piece."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.comm.collectives import Group
from shoal.sync.named_parts import LossPart, add_up, gather_all_parts, means, pack_parts

NUMBERS = st.floats(-1e6, 1e6, width=32)
PIECES = st.lists(
    st.dictionaries(
        st.sampled_from(["mse", "kl", "gain"]),
        st.builds(LossPart, NUMBERS, st.floats(0, 100, width=32), st.booleans()),
    ),
    min_size=1,
    max_size=8,
)


@given(PIECES, st.integers(0, 8))
def test_who_computed_which_piece_changes_no_bit(pieces, cut: int) -> None:
    whole = add_up([pack_parts(dict(enumerate(pieces)))])
    dealt = [pack_parts(dict(enumerate(pieces[cut:])), min(cut, len(pieces)))]
    dealt.append(pack_parts(dict(enumerate(pieces[:cut]))))
    assert add_up(dealt) == whole
    for name, (_, weight) in whole.items():
        known = [piece[name].weight for piece in pieces if name in piece]
        assert weight == pytest.approx(sum(known))


def test_a_mean_counts_by_its_weight_and_a_sum_as_it_is() -> None:
    pieces = {
        0: {
            "mse": LossPart(torch.tensor(2.0), 3.0, True),
            "kl": LossPart(6.0, torch.tensor(4), False),
        },
        1: {"mse": LossPart(6.0, 1.0, True)},
    }
    packed = pack_parts(pieces)
    assert means(add_up([packed])) == {"mse": 3.0, "kl": 1.5}
    assert gather_all_parts(Group(), packed) == add_up([packed])


def test_no_parts_are_no_bytes_and_no_weight_is_no_mean() -> None:
    assert pack_parts({0: {}}) == b"" and gather_all_parts(Group(), b"") == {}
    assert means({"kl": (1.0, 0.0)}) == {}
