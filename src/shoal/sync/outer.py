"""DiLoCo: what replicas learnt in a window of local steps is one gradient of an outer optimizer.

All replicas keep the same anchor, the weights as of the last agreement. After a window, anchor
minus weights is a replica's outer gradient; the mean goes through SGD with Nesterov momentum, which
moves the anchor, and the weights follow. Outer gradients stand packing into a few bits
(`comm/codecs.py`) if what packing drops is added to the next one. In fragments, each travels while
the following steps compute, and what a replica learnt meanwhile stays: its weights move by as much
as the new anchor differs from what was sent.

All at once, an agreement has two phases: what came is kept aside until all have it (`means.py`). A
fragment under way is kept as what was sent, and nothing else changes until it arrives. So a state
may be saved, or the group be left, at any time: it is sent again.

Douillard et al. 2023, arXiv 2311.08105; in fragments, Douillard et al. 2025, arXiv 2501.18512.
Cost: 2/H times the packed bytes on the wire per step; in memory the anchor, the momentum and, with
a codec, what is not sent yet, each as large as the weights.
"""

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shoal.comm.codecs import Codec, PackedMean, cuts_of
from shoal.comm.collectives import Group, draining_ends
from shoal.comm.reduce import Reduction, TreeReduce
from shoal.numerics.fragments import Timetable, deal
from shoal.parallel.layout import WHOLE, Slice, slices_of_run, whole
from shoal.sync.rounds import blocks_by_rank
from shoal.sync.state import Source

ANCHOR, MOMENTUM, OWED, RESIDUAL, SENT = (
    f"outer.{kind}." for kind in ("anchor", "momentum", "owed", "residual", "sent")
)


class Rule(NamedTuple):
    """How the anchor moves. A rate of 1 without momentum is the average."""

    rate: float = 1.0
    momentum: float = 0.0
    codec: Codec | None = None


class Parcel:
    """The parameters of a fragment that are of one type, as flat vectors.

    Order of calls: `leave`, `fold`, `arrive`, `move`, on every rank; nobody talks in the last.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], rule: Rule, group: Group):
        self.named, self.rule = named, rule
        self.anchor = self.weights()
        self.dtype = torch.promote_types(self.anchor.dtype, torch.float32)  # of the arithmetic
        self.momentum = self._zeros() if rule.momentum else None
        self.residual = self._zeros() if rule.codec else None  # not sent yet of the own
        self.owed: Tensor | None = None  # not sent yet of this rank's share of the mean
        self.share: range | None = None
        self.sent: Tensor | None = None  # the weights, while they are under way
        self._trip: PackedMean | Reduction | None = None
        self._is_folded = False
        self._mean: Tensor | None = None  # that came, and does not count yet
        self._dropped: tuple[Tensor, Tensor] | None = None  # by its packing: of the own, of it
        self.settle(group)

    def settle(self, group: Group) -> None:
        """Take the place in a group."""
        self.group = group
        if self.rule.codec is None:
            return
        cuts = cuts_of(self.anchor.numel(), self.rule.codec.block, group.num_ranks)
        share = range(cuts[group.rank], cuts[group.rank + 1])
        if self.share != share:
            self.share, self.owed = share, self.anchor.new_zeros(len(share), dtype=self.dtype)

    def weights(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.named.values()])

    def leave(self) -> None:
        """Send the outer gradient, or send it again."""
        if self.sent is None:
            self.sent = self.weights()
        gradient = self.anchor.to(self.dtype) - self.sent
        if self.rule.codec is None:
            blocks = blocks_by_rank(self.group.num_ranks, self.group.num_ranks)
            self._trip = TreeReduce(self.group, blocks).start([gradient])
        else:
            assert self.residual is not None and self.owed is not None
            gradient += self.residual
            self._trip = PackedMean(self.group, self.rule.codec, gradient, self.owed)
        self._is_folded = False

    def fold(self) -> None:
        """Do what follows the first message, unless that is done."""
        assert self._trip is not None
        if not self._is_folded:
            self._trip.fold()
            self._is_folded = True

    def arrive(self) -> None:
        """Take in the mean, aside."""
        self.fold()
        assert self._trip is not None
        self._mean = self._trip.finish().to(self.dtype)
        if isinstance(self._trip, PackedMean):
            self._dropped = self._trip.dropped, self._trip.owes
        else:
            self._mean.div_(self.group.num_ranks)
        self._trip = None

    def move(self, rule: Rule, keep_progress: bool) -> None:
        """Move the anchor and the weights by what arrived."""
        mean, self._mean = self._mean, None
        assert mean is not None and self.sent is not None
        if self._dropped is not None:
            (self.residual, self.owed), self._dropped = self._dropped, None
        # Not fused: the last bits would depend on an element's place in the vector.
        if rule.momentum:
            assert self.momentum is not None
            self.momentum.mul_(rule.momentum).add_(mean)
            mean = mean + self.momentum * rule.momentum
        self.anchor = (self.anchor.to(self.dtype) - mean * rule.rate).to(self.anchor.dtype)
        now = self.anchor
        if keep_progress:
            now = self.weights() + (self.anchor.to(self.dtype) - self.sent)
        for p, value in zip(self.named.values(), self.parts(now).values(), strict=True):
            p.copy_(value)
        self.sent = None

    def drain(self, deadline: float) -> None:
        if self._trip is not None:
            self._trip.drain(deadline)
            self._trip = None

    @property
    def is_waiting(self) -> bool:
        """Whether it was sent in a group that is no more."""
        return self.sent is not None and self._trip is None

    def parts(self, flat: Tensor) -> dict[str, Tensor]:
        """Views by parameter."""
        lengths = [p.numel() for p in self.named.values()]
        pairs = zip(self.named.items(), flat.split(lengths), strict=True)
        return {name: part.view(p.shape) for (name, p), part in pairs}

    def owed_parts(self) -> Iterator[tuple[str, list[Slice]]]:
        """Of this rank's share, what lies in each parameter."""
        assert self.owed is not None and self.share is not None
        starts = [0, *accumulate(p.numel() for p in self.named.values())]
        for (name, p), start in zip(self.named.items(), starts, strict=False):
            first = max(start, self.share.start)
            last = min(start + p.numel(), self.share.stop)
            if first < last:
                own = self.owed[first - self.share.start : last - self.share.start]
                yield name, slices_of_run(name, p.shape, first - start, own, WHOLE)

    def _zeros(self) -> Tensor:
        return torch.zeros_like(self.anchor, dtype=self.dtype)


class Outer:
    """The outer optimizer of one replica. `bring` and `take` each step, on every rank."""

    def __init__(self, rule: Rule, timetable: Timetable):
        self.rule, self.timetable = rule, timetable
        self.fragments: list[list[Parcel]] = []
        self._under_way: tuple[int, int] | None = None  # a fragment, and when it was sent
        self._is_at_anchor = True  # whether weights and anchors are the same

    def attach(self, model: nn.Module, group: Group) -> None:
        if self.fragments:
            for parcel in self._parcels():
                parcel.settle(group)
            return
        named = trained(model)
        sizes = [p.nbytes for p in named.values()]
        for run in deal(sizes, self.timetable.num_fragments):
            names = list(named)[run.start : run.stop]
            kinds: dict[tuple[torch.dtype, torch.device], dict[str, nn.Parameter]] = {}
            for name in names:
                p = named[name]
                kinds.setdefault((p.dtype, p.device), {})[name] = p
            self.fragments.append([Parcel(own, self.rule, group) for own in kinds.values()])

    def detach(self) -> None:
        deadline = draining_ends()
        for parcel in self._parcels():
            parcel.drain(deadline)

    def send_again(self) -> None:
        """What was under way when the group was left, or the state saved. Every rank calls it."""
        for parcel in self._parcels() if self.timetable.num_fragments > 1 else ():
            if parcel.is_waiting:
                parcel.leave()

    @torch.no_grad()
    def bring(self, step: int) -> None:
        """Send, and take in what arrives, aside but for fragments. Every rank must reach this."""
        if self.timetable.num_fragments > 1:
            self._stream(step)
        elif self.timetable.ends_window(step):
            self._fetch([0])

    @torch.no_grad()
    def take(self, step: int) -> None:
        """Let what was brought count. Nobody talks in it, and it does not fail."""
        if self.timetable.num_fragments == 1 and self.timetable.ends_window(step):
            is_whole = step % self.timetable.local_steps == 0
            self._move([0], self.rule if is_whole else self._mean_rule, keep_progress=False)
        self._is_at_anchor = self.timetable.alike(step)

    @property
    def _mean_rule(self) -> Rule:
        """A window that the end cuts short is no gradient for the momentum: take the mean."""
        return self.rule._replace(rate=1.0, momentum=0.0)

    def _stream(self, step: int) -> None:
        is_last, leaving = step == self.timetable.num_steps, self.timetable.sent(step)
        if self._under_way is not None:
            number, at = self._under_way
            if is_last or step - at >= self.timetable.delay:
                self._arrive([number])
                self._move([number], self.rule, keep_progress=True)
                self._under_way = None
            elif step - at >= max(1, self.timetable.delay // 2):
                for parcel in self.fragments[number]:
                    parcel.fold()
        if is_last:
            short = [n for n in range(len(self.fragments)) if n != leaving]
            self._fetch(short)
            self._move(short, self._mean_rule, keep_progress=False)
        if leaving is None:
            return
        if is_last:
            self._fetch([leaving])
            self._move([leaving], self.rule, keep_progress=False)
            return
        for parcel in self.fragments[leaving]:
            parcel.leave()
        self._under_way = leaving, step

    def agreed_tensors(self) -> list[tuple[Tensor, tuple[str, ...]]]:
        """The anchors and their momentum, each as it is kept, with names."""
        return [
            (part, ("outer", kind, name))
            for parcel in self._parcels()
            for kind, flat in (("anchor", parcel.anchor), ("momentum", parcel.momentum))
            if flat is not None
            for name, part in parcel.parts(flat).items()
        ]

    def shared_state(self) -> dict[str, list[Slice]]:
        """What all replicas hold alike: the anchor, in the weights' place, and the momentum."""
        found: dict[str, list[Slice]] = {}
        for parcel in self._parcels():
            for kind, flat in (("model.", parcel.anchor), (MOMENTUM, parcel.momentum)):
                if flat is not None:
                    found |= {kind + n: [whole(part)] for n, part in parcel.parts(flat).items()}
        return found

    def state_dict(self, of_own: str) -> dict[str, list[Slice]]:
        """By name; what is the replica's own has `of_own` before it. Anchors that are the weights
        are left out."""
        found: dict[str, list[Slice]] = {}
        for parcel in self._parcels():
            kinds = {MOMENTUM: parcel.momentum, of_own + RESIDUAL: parcel.residual}
            kinds |= {ANCHOR: None if self._is_at_anchor else parcel.anchor}
            kinds |= {of_own + SENT: parcel.sent}
            for kind, flat in kinds.items():
                if flat is not None:
                    found |= {kind + n: [whole(part)] for n, part in parcel.parts(flat).items()}
            if parcel.owed is not None:
                found |= {OWED + name: places for name, places in parcel.owed_parts()}
        return found

    @torch.no_grad()
    def load_state_dict(self, own: Source, mean: Source, step: int) -> bool:
        """Take over the state after `step`: `own` is this replica's if there are as many as there
        were, `mean` that over all. What is missing starts as in a new run. Whether the anchor is
        of before the step."""
        self.detach()
        self._is_at_anchor, has_anchor = True, False
        for parcel in self._parcels():
            parcel.sent = None
            for name, part in parcel.parts(parcel.anchor).items():
                is_kept = ANCHOR + name in own
                has_anchor |= is_kept
                source, kind = (own, ANCHOR) if is_kept else (mean, "model.")
                source.fill(kind + name, [whole(part)])
            self._is_at_anchor &= torch.equal(parcel.anchor, parcel.weights())
            for kind, flat in ((MOMENTUM, parcel.momentum), (RESIDUAL, parcel.residual)):
                if flat is not None:
                    flat.zero_()
                    for name, part in parcel.parts(flat).items():
                        _fill(own, kind + name, [whole(part)])
            if parcel.owed is not None:
                parcel.owed.zero_()
                for name, places in parcel.owed_parts():
                    _fill(own, OWED + name, places)
        self._under_way = self.timetable.under_way(step)
        if self._under_way is not None:
            self._take_sent(own, self.fragments[self._under_way[0]])
        return has_anchor

    def _take_sent(self, own: Source, fragment: list[Parcel]) -> None:
        """If it is the fragment that was under way; else it is sent when its next window ends."""
        names = [name for parcel in fragment for name in parcel.named]
        if not all(SENT + name in own for name in names):
            self._under_way = None
            return
        for parcel in fragment:
            parcel.sent = parcel.anchor.clone()
            for name, part in parcel.parts(parcel.sent).items():
                own.fill(SENT + name, [whole(part)])

    def _fetch(self, numbers: list[int]) -> None:
        """Send and wait."""
        for number in numbers:
            for parcel in self.fragments[number]:
                parcel.leave()
        self._arrive(numbers)

    def _arrive(self, numbers: list[int]) -> None:
        parcels = [parcel for number in numbers for parcel in self.fragments[number]]
        for parcel in parcels:
            parcel.fold()
        for parcel in parcels:
            parcel.arrive()

    def _move(self, numbers: list[int], rule: Rule, keep_progress: bool) -> None:
        """Without progress to keep, the weights are the anchor afterwards."""
        for number in numbers:
            for parcel in self.fragments[number]:
                parcel.move(rule, keep_progress)

    def _parcels(self) -> Iterator[Parcel]:
        return (parcel for fragment in self.fragments for parcel in fragment)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """What replicas train apart and bring together, in the model's order."""
    named = model.named_parameters()
    return {n: p for n, p in named if p.requires_grad and p.is_floating_point()}


def _fill(source: Source, name: str, places: list[Slice]) -> None:
    if name in source:
        source.fill(name, places)
