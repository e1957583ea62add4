"""The order of a run on new data with a share of the old: each new sample once a pass.

Old samples stand evenly between the new ones, so each batch has its share of them, and a pass holds
each new sample exactly once. The old ones are shuffled: each comes once until all were used, and
the next pass continues where the last one stopped. Like all orders it is a pure function of
position, seed and pass (`orders.py`); `training/lineage.py` separates new samples from old ones.

Not for mixtures by weight: there no source need come to its end (`Mixed`). Cost: none of its own.
"""

import numpy as np

from shoal.data.orders import Order, ids_by_turns
from shoal.data.permutation import Ids

_LARGEST = 2**62


class ReplayOrder:
    """The positions of `new`, and between them some of `old`, which are `share` of the whole."""

    recorded_as = "Replayed"

    def __init__(self, new: Order, old: Order, share: float):
        self._new, self._old = new, old
        self._num_old = max(1, round(len(new) / (1 - share)) - len(new))

    def __len__(self) -> int:
        return len(self._new) + self._num_old

    def ids(self, positions: Ids, seed: int, epoch: int) -> Ids:
        num_before, num_after = self._num_new_before(positions), self._num_new_before(positions + 1)
        is_new = num_after > num_before
        found = np.empty_like(positions)
        found[is_new] = self._new.ids(num_before[is_new], seed, epoch)
        turns = (positions - num_before)[~is_new] + epoch * self._num_old
        # With another seed, or like places go together.
        found[~is_new] = ids_by_turns(self._old, turns, ~seed)
        return found

    def _num_new_before(self, positions: Ids) -> Ids:
        exact = positions if len(self) * len(self._new) < _LARGEST else positions.astype(object)
        return np.asarray(exact * len(self._new) // len(self), dtype=np.int64)
