"""How the reference combines pieces and replicas: a second implementation, on purpose.

Sums in tree order, the average of replicas, and the outer optimizer with codec and fragments, all
in one process. Only what defines the result is shared with the strategies: how a codec rounds, and
which parameters form a fragment.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate

import torch
from torch import Tensor, nn

from shoal.numerics.codecs import Codec, make_codec
from shoal.numerics.fragments import split_fragments
from shoal.parallel.layout import Cut
from shoal.parallel.pipeline.stages import rank_of_stage
from shoal.plans.plan import Plan
from shoal.sync.server.layout import make_layout
from shoal.training.build import build_model
from shoal.training.run import Run

Values = list[Tensor | None]


def tree_sum(
    leaf: Callable[[int], Values],
    pieces: range,
    arrived: Callable[[int, int, Values], Values] = lambda first, size, values: values,
) -> Values:
    """The sum over pieces in the order of one binary tree; pieces are computed when needed.

    `arrived` transforms the sum of `size` pieces from `first` on.
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


class RoundedPushes:
    """Rounds each partial sum that a worker pushes to servers, once (`codec`).

    A worker pushes the largest subtrees within its share: those whose parents are not.
    """

    def __init__(self, codec: str, shares: Sequence[range], num_gradients: int):
        self._codec, self._shares, self._num_gradients = make_codec(codec), shares, num_gradients

    def __call__(self, first: int, size: int, values: Values) -> Values:
        parent = first - first % (2 * size)
        if not self._is_one_share(first, size) or self._is_one_share(parent, 2 * size):
            return values
        own, others = values[: self._num_gradients], values[self._num_gradients :]
        return [*self._pushed((first, size), own), *others]

    def _pushed(self, row: tuple[int, int], gradients: Values) -> Values:
        return list(map(self._round, gradients))

    def _is_one_share(self, first: int, size: int) -> bool:
        return any(s.start <= first and first + size <= s.stop for s in self._shares)

    def _round(self, value: Tensor | None) -> Tensor | None:
        if value is None or self._codec is None or value.itemsize == 2:
            return value
        flat = value.reshape(-1)
        return self._codec.decode(self._codec.encode(flat), flat.numel()).view_as(value).to(value)


def combine_gradients(
    sum_of: Callable[[range], Values], shares: Sequence[range], num_gradients: int, rule: str
) -> Values:
    """Combine gradients by a robust rule, and sum the values that follow them: per element the
    median of the replicas' means, or their trimmed mean."""
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
    losses: Sequence[tuple[float, float]], shares: Sequence[range], rule: str
) -> tuple[float, float]:
    """The sum and weight of the loss; under a rule, the mean over the replicas' means that the
    rule keeps, where NaN counts as the largest."""
    weight = sum(t[1] for t in losses)
    if rule == "mean" or not weight:
        return sum(t[0] for t in losses), weight
    means = [sum(losses[i][0] for i in s) / sum(losses[i][1] for i in s) for s in shares]
    numbers, dropped = sorted(m for m in means if m == m), _dropped(rule, len(means))
    kept = [*numbers, *(m for m in means if m != m)][dropped : len(means) - dropped]
    return sum(kept) / len(kept) * weight, weight


def _dropped(rule: str, count: int) -> int:
    """The number of replicas that a rule drops at each end."""
    name, _, share = rule.partition(":")
    most = (count - 1) // 2
    return min(most, math.ceil(Fraction(share) * count)) if name == "trimmed" else most


def tree_total(tensors: Sequence[Tensor]) -> Tensor:
    terms: list[Values] = [[tensor] for tensor in tensors]
    (total,) = tree_sum(terms.__getitem__, range(len(terms)))
    assert total is not None
    return total


def mean_of(tensors: Sequence[Tensor]) -> Tensor:
    return tree_total(tensors) / len(tensors)


@torch.no_grad()
def average(replicas: Sequence[Sequence[Tensor]]) -> None:
    """Replace the tensors of every replica by their mean."""
    for alike in zip(*replicas, strict=True):
        if alike[0].is_floating_point():
            mean = mean_of(alike)
            for tensor in alike:
                tensor.copy_(mean)


class FragmentPart:
    """The parameters of a fragment of one dtype, of each replica, and their shared anchor.

    With `keys` servers hold the anchor, and sum in its dtype. `keys` are the indices of elements
    that are packed together, -1 for padding; the mean is not packed, since it is not sent.
    """

    def __init__(
        self,
        replicas: list[list[nn.Parameter]],
        codec: Codec | None,
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
        """The mean of the gradients as they arrive."""
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
        """Rows have the anchor's dtype when they are sent, and again when they are summed."""
        if self.codec is not None:
            whole = [row + residual for row, residual in zip(rows, self.residuals, strict=True)]
            packed = [self._packed(row) for row in whole]
            self.residuals = [row - kept for row, kept in zip(whole, packed, strict=True)]
            rows = [kept.to(self.anchor.dtype) for kept in packed]
        return tree_total(rows).to(self.dtype) / len(rows)

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


class ReferenceOuter:
    """The outer optimizer of all replicas, given as models."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        plan: Plan,
        num_steps: int,
        holders: Mapping[str, object] = {},
    ):
        """`holders` are those of each parameter, where replicas are cut: each packs its own, and
        has servers of its own."""
        self.plan, self.num_steps = plan, num_steps
        trained = [
            [
                p
                for p in model.parameters()
                if p.requires_grad and p.is_floating_point() and (p.numel() or not plan.num_servers)
            ]
            for model in models
        ]
        names = {p: name for name, p in models[0].named_parameters()}
        parts = [holders.get(names[p]) for p in trained[0]]
        self.fragments: list[list[FragmentPart]] = []
        for run in split_fragments([p.nbytes for p in trained[0]], plan.fragments):
            kinds: dict[object, list[int]] = {}
            for i in run:
                kinds.setdefault((trained[0][i].dtype, parts[i]), []).append(i)
            codec = make_codec(plan.codec)
            self.fragments.append(
                [
                    FragmentPart(
                        [[own[i] for i in which] for own in trained],
                        codec,
                        _keys(plan, trained[0], which, parts),
                    )
                    for which in kinds.values()
                ]
            )

    def begin(self) -> None:
        """Set the anchor to the current weights of the only replica."""
        for part in self.fragments[0]:
            part.anchor = joined(part.replicas[0])

    @torch.no_grad()
    def outer_gradients(self) -> dict[nn.Parameter, Tensor]:
        """The outer gradients of a window of the only replica, as they arrive."""
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


def pipeline_ranks(run: Run, plan: Plan) -> dict[str, tuple[int, ...]]:
    """The ranks that hold each parameter, where they decide what is packed together."""
    if plan.pipeline == 1 or plan.codec == "none":
        return {}
    built = build_model(run, plan)
    built.seeds.close()
    assert built.survey.stages is not None
    return {
        name: tuple(sorted({rank_of_stage(s, plan.pipeline, plan.schedule) for s in users}))
        for name, users in built.survey.stages.holders.items()
    }


def tensor_cuts(run: Run, plan: Plan) -> Mapping[str, Cut]:
    """How the tensor axis cuts parameters, where that decides what is packed together."""
    built = build_model(run, plan)
    built.seeds.close()
    assert built.survey.tensor is not None
    return built.survey.tensor.cuts


def _keys(
    plan: Plan, trained: Sequence[nn.Parameter], which: Sequence[int], parts: Sequence[object]
) -> list[Tensor] | None:
    """Where servers divide some parameters of a part of the model, which has its own servers."""
    if not plan.num_servers:
        return None
    held = [i for i, part in enumerate(parts) if part == parts[which[0]]]
    sizes = [(trained[i].numel(), trained[i].itemsize, trained[i].dtype) for i in held]
    layout = make_layout(sizes, True, plan.num_servers // plan.num_parts)
    firsts = accumulate((trained[i].numel() for i in which), initial=0)
    starts = {held.index(i): first for i, first in zip(which, firsts, strict=False)}
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
