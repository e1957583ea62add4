"""How the reference brings pieces and replicas together: written a second time, on purpose.

Sums in the order of one tree, the average of replicas, and the outer optimizer with its packing and
its fragments, all in one process. Only what defines the result is shared with the strategies: how a
codec rounds, and which parameters are a fragment.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate

import torch
from torch import Tensor, nn

from shoal.numerics.fragments import deal
from shoal.numerics.quantization import Blocks, Halves, codec_of
from shoal.plans.plan import Plan
from shoal.sync.server.layout import lay_out

Values = list[Tensor | None]


def tree_sum(
    leaf: Callable[[int], Values],
    pieces: range,
    arrived: Callable[[int, int, Values], Values] = lambda first, size, values: values,
) -> Values:
    """The sum over pieces in the order of one binary tree; a piece is asked for when it is due.

    `arrived` says what becomes of the sum over `size` pieces from the `first` on.
    """

    def node(first: int, size: int) -> Values | None:
        if first >= len(pieces):
            return None
        if size == 1:
            return arrived(first, 1, leaf(pieces[first]))
        left, right = node(first, size // 2), node(first + size // 2, size // 2)
        if right is None:
            return left
        pairs = zip(left or [], right, strict=True)
        summed = [b if a is None else a if b is None else a + b for a, b in pairs]
        return arrived(first, size, summed)

    return node(0, 1 << max(0, (len(pieces) - 1).bit_length())) or []


class Rounded:
    """What arrives at servers of the sums that workers push, each rounded once (`codec`).

    A worker pushes the largest subtrees that lie in its share: those whose parents do not.
    """

    def __init__(self, codec: str, shares: Sequence[range], num_gradients: int):
        self._codec, self._shares, self._num_gradients = codec_of(codec), shares, num_gradients

    def __call__(self, first: int, size: int, values: Values) -> Values:
        parent = first - first % (2 * size)
        if not self._is_one_share(first, size) or self._is_one_share(parent, 2 * size):
            return values
        own, others = values[: self._num_gradients], values[self._num_gradients :]
        return [*map(self._round, own), *others]

    def _is_one_share(self, first: int, size: int) -> bool:
        return any(s.start <= first and first + size <= s.stop for s in self._shares)

    def _round(self, value: Tensor | None) -> Tensor | None:
        if value is None or self._codec is None or value.itemsize == 2:
            return value
        flat = value.reshape(-1)
        return self._codec.decode(self._codec.encode(flat), flat.numel()).view_as(value).to(value)


def combined(
    sum_of: Callable[[range], Values], shares: Sequence[range], num_gradients: int, rule: str
) -> Values:
    """As many gradients as sums say, and sums of what follows them: of each replica's gradient the
    mean, of these in each element the median, or the mean of what a trimmed one keeps."""
    sums = [sum_of(share) for share in shares]
    num_pieces, results = sum(map(len, shares)), tree_sum(sums.__getitem__, range(len(sums)))
    num_dropped = _dropped(rule, len(shares))
    for i in range(num_gradients):
        if (total := results[i]) is None:
            continue
        rows = [torch.zeros_like(total) if (row := own[i]) is None else row for own in sums]
        means = [row / len(part) for row, part in zip(rows, shares, strict=True)]
        kept = torch.stack(means).sort(dim=0).values[num_dropped : len(shares) - num_dropped]
        results[i] = kept.double().mean(0).to(total.dtype) * num_pieces
    return results


def total_loss(
    told: Sequence[tuple[float, float]], shares: Sequence[range], rule: str
) -> tuple[float, float]:
    """Sum and weight of the loss from those of pieces; under a rule, its mean is of the replicas'
    means that the rule keeps, of which one that is not a number counts as the largest."""
    weight = sum(t[1] for t in told)
    if rule == "mean" or not weight:
        return sum(t[0] for t in told), weight
    means = [sum(told[i][0] for i in s) / sum(told[i][1] for i in s) for s in shares]
    numbers, dropped = sorted(m for m in means if m == m), _dropped(rule, len(means))
    kept = [*numbers, *(m for m in means if m != m)][dropped : len(means) - dropped]
    return sum(kept) / len(kept) * weight, weight


def _dropped(rule: str, count: int) -> int:
    """How many of the replicas a rule leaves out at each end."""
    name, _, share = rule.partition(":")
    most = (count - 1) // 2
    return min(most, math.ceil(Fraction(share) * count)) if name == "trimmed" else most


def added(tensors: Sequence[Tensor]) -> Tensor:
    terms: list[Values] = [[tensor] for tensor in tensors]
    (total,) = tree_sum(terms.__getitem__, range(len(terms)))
    assert total is not None
    return total


def mean_of(tensors: Sequence[Tensor]) -> Tensor:
    return added(tensors) / len(tensors)


@torch.no_grad()
def average(replicas: Sequence[Sequence[Tensor]]) -> None:
    """Tensors of every replica become the mean over all; one is its own mean."""
    for alike in zip(*replicas, strict=True):
        if alike[0].is_floating_point():
            mean = mean_of(alike)
            for tensor in alike:
                tensor.copy_(mean)


class Part:
    """Parameters of a fragment that are of one type, of each replica, and what all share.

    With `keys` servers keep the anchor, and add up in its type. They are where in the part the
    elements stand that are packed together, -1 where there is none; the mean is not packed, since
    nobody sends it.
    """

    def __init__(
        self,
        replicas: list[list[nn.Parameter]],
        codec: Halves | Blocks | None,
        keys: list[Tensor] | None = None,
    ):
        self.replicas, self.codec, self.keys = replicas, codec, keys
        self.anchor = joined(replicas[0])
        self.dtype = torch.promote_types(self.anchor.dtype, torch.float32)
        self.momentum = torch.zeros_like(self.anchor, dtype=self.dtype)
        self.owed, self.residuals = self.momentum.clone(), [self.momentum.clone() for _ in replicas]
        self.sent: list[Tensor] = []

    def send(self) -> None:
        self.sent = [joined(own) for own in self.replicas]

    def merge(self, rate: float, momentum: float, keep_progress: bool) -> None:
        step = mean = self.mean([self.anchor.to(self.dtype) - sent for sent in self.sent])
        if momentum:
            self.momentum = self.momentum * momentum + mean
            step = mean + self.momentum * momentum
        self.anchor = (self.anchor.to(self.dtype) - step * rate).to(self.anchor.dtype)
        for own, sent in zip(self.replicas, self.sent, strict=True):
            values = self.anchor
            if keep_progress:
                values = joined(own) + (self.anchor.to(self.dtype) - sent)
            for p, value in zip(own, values.split([p.numel() for p in own]), strict=True):
                p.copy_(value.view(p.shape))
        self.sent = []

    def mean(self, gradients: list[Tensor]) -> Tensor:
        """Of what arrives of them."""
        if self.keys is not None:
            return self._served_mean([g.to(self.anchor.dtype) for g in gradients])
        if self.codec is None:
            return mean_of(gradients)
        whole = [g + residual for g, residual in zip(gradients, self.residuals, strict=True)]
        packed = [self._packed(g) for g in whole]
        self.residuals = [g - kept for g, kept in zip(whole, packed, strict=True)]
        mean = mean_of(packed) + self.owed
        self.owed = mean - self._packed(mean)
        return self._packed(mean).to(self.dtype)

    def _served_mean(self, rows: list[Tensor]) -> Tensor:
        """Rows are of the anchor's type when they leave, and again when they are added up."""
        if self.codec is not None:
            whole = [row + residual for row, residual in zip(rows, self.residuals, strict=True)]
            packed = [self._packed(row) for row in whole]
            self.residuals = [row - kept for row, kept in zip(whole, packed, strict=True)]
            rows = [kept.to(self.anchor.dtype) for kept in packed]
        return added(rows).to(self.dtype) / len(rows)

    def _packed(self, flat: Tensor) -> Tensor:
        assert self.codec is not None
        if self.keys is None:
            return self.codec.decode(self.codec.encode(flat), flat.numel())
        made = torch.zeros_like(flat)
        for places in self.keys:
            row = torch.where(places < 0, 0, flat[places])
            there = places >= 0
            row = self.codec.decode(self.codec.encode(row), row.numel()).to(made.dtype)
            made[places[there]] = row[there]
        return made


class Outer:
    """The outer optimizer of all replicas, which are given as models."""

    def __init__(self, models: Sequence[nn.Module], plan: Plan, num_steps: int):
        self.plan, self.num_steps = plan, num_steps
        trained = [
            [
                p
                for p in model.parameters()
                if p.requires_grad and p.is_floating_point() and (p.numel() or not plan.num_servers)
            ]
            for model in models
        ]
        self.fragments: list[list[Part]] = []
        for run in deal([p.nbytes for p in trained[0]], plan.fragments):
            kinds: dict[torch.dtype, list[int]] = {}
            for i in run:
                kinds.setdefault(trained[0][i].dtype, []).append(i)
            codec = codec_of(plan.codec)
            self.fragments.append(
                [
                    Part(
                        [[own[i] for i in which] for own in trained],
                        codec,
                        _keys(plan, trained, which),
                    )
                    for which in kinds.values()
                ]
            )

    def begin(self) -> None:
        """Take the weights of now, of the one replica there is, for the anchor."""
        for part in self.fragments[0]:
            part.anchor = joined(part.replicas[0])

    @torch.no_grad()
    def learnt(self) -> dict[nn.Parameter, Tensor]:
        """What arrives of a window's outer gradient, of the one replica there is."""
        found: dict[nn.Parameter, Tensor] = {}
        for part in self.fragments[0]:
            (own,) = part.replicas
            flat = part.mean([part.anchor.to(part.dtype) - joined(own)]).to(part.anchor.dtype)
            values = flat.split([p.numel() for p in own])
            found |= {p: value.view(p.shape) for p, value in zip(own, values, strict=True)}
        return found

    @torch.no_grad()
    def after(self, step: int) -> None:
        window, num_fragments = self.plan.local_steps, self.plan.fragments
        delay = window // num_fragments if num_fragments > 1 else 0
        rate, momentum = self.plan.outer_rates
        is_last = step == self.num_steps
        for number, parts in enumerate(self.fragments):
            age = (step - (number + 1) * window // num_fragments) % window
            for part in parts:
                if part.sent and (age == delay or is_last):
                    part.merge(rate, momentum, keep_progress=True)
                if age == 0 or is_last:
                    part.send()
                if age == 0 and (is_last or not delay):
                    part.merge(rate, momentum, keep_progress=False)
                elif is_last:  # in the middle of its window: the mean
                    part.merge(1.0, 0.0, keep_progress=False)


def _keys(
    plan: Plan, trained: list[list[nn.Parameter]], which: Sequence[int]
) -> list[Tensor] | None:
    """Where servers cut a part of the parameters."""
    if not plan.num_servers:
        return None
    sizes = [(p.numel(), p.itemsize, p.dtype) for p in trained[0]]
    layout = lay_out(sizes, True, plan.num_servers)
    starts = dict(zip(which, accumulate((sizes[i][0] for i in which), initial=0)))
    keys = []
    for number, key in enumerate(layout.keys):
        places = torch.full([key.stop - key.start], -1)
        segments = layout.segments(number)
        if segments[0].parameter not in starts:
            continue
        for s in segments:
            first = starts[s.parameter] + s.start
            places[s.place : s.place + s.length] = torch.arange(first, first + s.length)
        keys.append(places)
    return keys


def joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
