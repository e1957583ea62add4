"""How the gradients of several replicas become one.

Their mean (`gradient_rows.py` adds up for it) is what training in one process would give. The rules
here are for replicas that may be faulty: each element's largest and smallest values are dropped
(trimmed mean), or all but the middle (median), so a few replicas with wrong values, however wrong,
cannot pull the result out of the range of the others. Both see each replica's own mean, whatever
its number of samples, and so are not the gradient of the whole batch: use them where trust is the
problem. They protect from three replicas on.

Cost: a stack of all rows is sorted, element by element.
Yin et al. 2018, arXiv 1803.01498. Pure.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor


def combine_losses(
    rule: str, sums: Sequence[float], weights: Sequence[float], shares: Sequence[range]
) -> float:
    """The loss of a step whose gradients are combined so, from its pieces' sums and weights.

    Each replica has a share of the pieces, and what is not a number is dropped first, as above.
    """
    own = [(sum(sums[i] for i in part), sum(weights[i] for i in part)) for part in shares]
    means = [total / weight for total, weight in own if weight]
    means.sort(key=lambda mean: (math.isnan(mean), mean))
    num_dropped = _num_dropped(rule, len(means))
    kept = means[num_dropped : len(means) - num_dropped]
    return sum(kept) / len(kept)


def _num_dropped(rule: str, count: int) -> int:
    """Of so many replicas, at either end."""
    name, _, share = rule.partition(":")
    num_dropped = (count - 1) // 2  # all but the middle one or two
    return num_dropped if name == "median" else min(num_dropped, math.ceil(Fraction(share) * count))


def combine(rule: str, rows: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """One gradient from those of replicas: `rows` are sums of so much weight each, in any order.

    The rule is `median` or, with the share of each end that is dropped, `trimmed:0.2`.
    """
    means = torch.stack([row / weight for row, weight in zip(rows, weights, strict=True)])
    num_dropped = _num_dropped(rule, len(means))
    # What is not a number sorts as the largest, and so is dropped first.
    kept = means.sort(dim=0).values[num_dropped : len(means) - num_dropped]
    # In double precision, where the sum of two large numbers is not infinite.
    return kept.double().mean(dim=0).to(means.dtype)
