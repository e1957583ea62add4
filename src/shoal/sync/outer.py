"""DiLoCo: the progress of replicas in a window of local steps is one gradient of an outer
optimizer.

All replicas keep the same anchor, the weights as of the last agreement. After a window, anchor
minus weights is a replica's outer gradient; the mean goes through SGD with Nesterov momentum, which
moves the anchor, and the weights follow. Outer gradients can be packed into a few bits
(`comm/compression.py`) if the rounding error is added to the next one. In fragments, each travels
while the following steps compute, and a replica keeps its progress meanwhile: its weights move by
as much as the new anchor differs from what was sent.

All at once, an agreement has two phases: the result is staged until all have it (`averaging.py`).
Of a fragment in flight what was sent is kept, and nothing else changes until it arrives. So a state
may be saved, or the group be left, at any time: it is sent again.

Douillard et al. 2023, arXiv 2311.08105; in fragments, Douillard et al. 2025, arXiv 2501.18512.
Cost: 2/H times the packed bytes on the wire per step; in memory the anchor, the momentum and, with
a codec, what is not sent yet, each as large as the weights.
"""

import math
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shoal.comm.collectives import Group, drain_deadline
from shoal.comm.compression import Codec, CompressedSum, share_bounds
from shoal.comm.reduce import Reduction, TreeReduce
from shoal.numerics.codecs import make_codec
from shoal.numerics.fragments import FragmentSchedule, split_fragments
from shoal.parallel.fsdp import held_parameters
from shoal.parallel.layout import LocalLayout, Slice, slices_of, slices_of_run
from shoal.sync.averaging import PeerStripes, average_messages, gather_message, own_stripe
from shoal.sync.costs import Amount, Message
from shoal.sync.rank_layout import LocalParameter, RankLayout
from shoal.sync.rounds import blocks_by_rank
from shoal.sync.state import StateSource

ANCHOR, MOMENTUM, OWED, RESIDUAL, SENT = (
    f"outer.{kind}." for kind in ("anchor", "momentum", "owed", "residual", "sent")
)


class OuterConfig(NamedTuple):
    """How the anchor moves. A rate of 1 without momentum is the average."""

    rate: float = 1.0
    momentum: float = 0.0
    codec: Codec | None = None


def outer_step(
    anchor: Tensor, mean: Tensor, velocity: Tensor | None, rate: float, momentum: float
) -> Tensor:
    """The new anchor: SGD with Nesterov momentum, in the mean's type. Also what servers step by.

    Not fused: the last bits would depend on an element's place in the vector.
    """
    if momentum:
        assert velocity is not None
        velocity.mul_(momentum).add_(mean)
        mean = mean + velocity * momentum
    return (anchor.to(mean.dtype) - mean * rate).to(anchor.dtype)


class FlatFragment:
    """The parameters of a fragment that are of one type, as flat vectors.

    Order of calls: `send`, `fold`, `receive`, `apply`, on every rank; the last one never
    communicates.
    """

    def __init__(
        self,
        named: Mapping[str, Tensor],
        rule: OuterConfig,
        peers: tuple[Group, Group],
    ):
        """`peers` are those in other replicas, and in this one those that hold the same."""
        self.named, self.rule = named, rule
        self.anchor = self.weights()
        self.dtype = torch.promote_types(self.anchor.dtype, torch.float32)  # of the arithmetic
        self.momentum = self._zeros() if rule.momentum else None
        self.residual: Tensor | None = None  # not sent yet of the own stripe
        self.owed: Tensor | None = None  # not sent yet of this rank's share of the mean
        self.share = range(0)
        self._stripes = PeerStripes.of(0, Group())
        self.sent: Tensor | None = None  # the weights, while they are under way
        self._reduction: CompressedSum | Reduction | None = None
        self._is_folded = False
        self._mean: Tensor | None = None  # that came, and does not count yet
        self._dropped: tuple[Tensor, Tensor] | None = None  # by its packing: of the own, of it
        self.join_group(*peers)

    def join_group(self, group: Group, alike: Group) -> None:
        """Take the place in a group."""
        self.group, codec = group, self.rule.codec
        block = 1 if codec is None else codec.block
        alike = alike if group.num_ranks > 1 else Group()  # alone there is nothing to bring
        self._stripes = PeerStripes.of(self.anchor.numel(), alike, block)
        if codec is None:
            return
        if self.residual is None:  # a replica of several ranks keeps them, and so the stripe
            self.residual = self.anchor.new_zeros(len(self.stripe), dtype=self.dtype)
        first, last = self._cuts()[group.rank : group.rank + 2]
        share = range(self.stripe.start + first, self.stripe.start + last)
        if self.owed is None or self.share != share:
            self.share, self.owed = share, self.anchor.new_zeros(len(share), dtype=self.dtype)

    @property
    def stripe(self) -> range:
        """What of it this rank brings to its peers."""
        return self._stripes.own

    def _cuts(self) -> list[int]:
        """Where each rank's share of the stripe begins, and the end."""
        assert self.rule.codec is not None
        return share_bounds(len(self.stripe), self.rule.codec.block, self.group.num_ranks)

    def weights(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.named.values()])

    def send(self) -> None:
        """Send the outer gradient, or send it again."""
        if self.sent is None:
            self.sent = self.weights()
        own = slice(self.stripe.start, self.stripe.stop)
        gradient = self.anchor[own].to(self.dtype) - self.sent[own]
        if self.rule.codec is None:
            blocks = blocks_by_rank(self.group.num_ranks, self.group.num_ranks)
            self._reduction = TreeReduce(self.group, blocks).start([gradient])
        else:
            assert self.residual is not None and self.owed is not None
            gradient += self.residual
            self._reduction = CompressedSum(
                self.group,
                self.rule.codec,
                gradient,
                self.owed,
                self._cuts(),
                divide_by=self.group.num_ranks,
            )
        self._is_folded = False

    def fold(self) -> None:
        """Do what follows the first message, unless that is done."""
        assert self._reduction is not None
        if not self._is_folded:
            self._reduction.fold()
            self._is_folded = True

    def receive(self) -> None:
        """Receive the mean, staged until `apply`."""
        self.fold()
        assert self._reduction is not None
        mean = self._reduction.finish().to(self.dtype)
        if isinstance(self._reduction, CompressedSum):
            residual, owed = self._reduction.residual, self._reduction.sum_residual
            assert residual is not None and owed is not None
            self._dropped = residual, owed
        else:
            mean.div_(self.group.num_ranks)
        self._mean = self._stripes.gather(mean)
        self._reduction = None

    def apply(self, rule: OuterConfig, keep_progress: bool) -> None:
        """Move the anchor and the weights by what arrived."""
        mean, self._mean = self._mean, None
        assert mean is not None and self.sent is not None
        if self._dropped is not None:
            (self.residual, self.owed), self._dropped = self._dropped, None
        self.anchor = outer_step(self.anchor, mean, self.momentum, rule.rate, rule.momentum)
        now = self.anchor
        if keep_progress:
            now = self.weights() + (self.anchor.to(self.dtype) - self.sent)
        for p, value in zip(self.named.values(), self.parts(now).values(), strict=True):
            p.copy_(value)
        self.sent = None

    def drain(self, deadline: float) -> None:
        if self._reduction is not None:
            self._reduction.drain(deadline)
            self._reduction = None

    @property
    def was_interrupted(self) -> bool:
        """Whether it was sent in a group that is no more."""
        return self.sent is not None and self._reduction is None

    def parts(self, flat: Tensor) -> dict[str, Tensor]:
        """Views by parameter."""
        lengths = [p.numel() for p in self.named.values()]
        pairs = zip(self.named.items(), flat.split(lengths), strict=True)
        return {name: part.view(p.shape) for (name, p), part in pairs}

    def slices(
        self, kind: str, flat: Tensor | None, holding: LocalLayout
    ) -> dict[str, list[Slice]]:
        """What there is of it as parts of the whole model's, under names that begin with `kind`."""
        parts = {} if flat is None else self.parts(flat)
        return {kind + n: slices_of(n, part, holding) for n, part in parts.items()}

    def unsent_parts(self, of_own: str, holding: LocalLayout) -> Iterator[tuple[str, list[Slice]]]:
        """What is not sent yet, of the own stripe and of this rank's share of the mean."""
        kinds = (of_own + RESIDUAL, self.residual, self.stripe), (OWED, self.owed, self.share)
        for kind, flat, run in kinds:
            starts = [0, *accumulate(p.numel() for p in self.named.values())]
            for (name, p), start in zip(self.named.items(), starts, strict=False):
                first, last = max(start, run.start), min(start + p.numel(), run.stop)
                if flat is not None and first < last:
                    own = flat[first - run.start : last - run.start]
                    parts = slices_of_run(name, p.shape, first - start, own, holding)
                    yield kind + name, parts

    def _zeros(self) -> Tensor:
        return torch.zeros_like(self.anchor, dtype=self.dtype)


class OuterOptimizer:
    """The outer optimizer of one replica. `exchange` and `commit` each step, on every rank."""

    def __init__(self, rule: OuterConfig, timetable: FragmentSchedule):
        self.rule, self.timetable = rule, timetable
        self.fragments: list[list[FlatFragment]] = []
        self._in_flight: tuple[int, int] | None = None  # a fragment, and when it was sent
        self._is_at_anchor = True  # whether weights and anchors are the same

    def attach(self, model: nn.Module, peers: tuple[Group, Group], holding: LocalLayout) -> None:
        self._holding = holding
        if self.fragments:
            for fragment_ in self._flat_fragments():
                fragment_.join_group(*peers)
            return
        named, sizes = averaged_parameters(model), _whole_sizes(model, holding)
        for run in split_fragments(list(sizes.values()), self.timetable.num_fragments):
            kinds: dict[object, dict[str, Tensor]] = {}
            for name in [n for n in list(sizes)[run.start : run.stop] if n in named]:
                # What several stages hold is packed alike by all of them.
                p, holders = named[name], holding.holders.get(name)
                kinds.setdefault((p.dtype, p.device, holders), {})[name] = p
            self.fragments.append([FlatFragment(own, self.rule, peers) for own in kinds.values()])

    def detach(self) -> None:
        deadline = drain_deadline()
        for fragment_ in self._flat_fragments():
            fragment_.drain(deadline)

    def send_again(self) -> None:
        """What was under way when the group was left, or the state saved. Every rank calls it."""
        for fragment_ in self._flat_fragments() if self.timetable.num_fragments > 1 else ():
            if fragment_.was_interrupted:
                fragment_.send()

    @torch.no_grad()
    def exchange(self, step: int) -> None:
        """Send, and receive what arrives; staged, but for fragments. Every rank must call it."""
        if self.timetable.num_fragments > 1:
            self._stream(step)
        elif self.timetable.ends_window(step):
            self._exchange([0])

    @torch.no_grad()
    def commit(self, step: int) -> None:
        """Apply what was exchanged. Never communicates, never fails."""
        if self.timetable.num_fragments == 1 and self.timetable.ends_window(step):
            is_whole = step % self.timetable.local_steps == 0
            self._step([0], self.rule if is_whole else self._mean_rule, keep_progress=False)
        self._is_at_anchor = self.timetable.are_replicas_equal(step)

    @property
    def _mean_rule(self) -> OuterConfig:
        """A window that the end cuts short is no gradient for the momentum: take the mean."""
        return self.rule._replace(rate=1.0, momentum=0.0)

    def _stream(self, step: int) -> None:
        is_last, leaving = step == self.timetable.num_steps, self.timetable.sent(step)
        if self._in_flight is not None:
            number, at = self._in_flight
            if is_last or step - at >= self.timetable.delay:
                self._receive([number])
                self._step([number], self.rule, keep_progress=True)
                self._in_flight = None
            elif step - at >= max(1, self.timetable.delay // 2):
                for fragment_ in self.fragments[number]:
                    fragment_.fold()
        if is_last:
            short = [n for n in range(len(self.fragments)) if n != leaving]
            self._exchange(short)
            self._step(short, self._mean_rule, keep_progress=False)
        if leaving is None:
            return
        if is_last:
            self._exchange([leaving])
            self._step([leaving], self.rule, keep_progress=False)
            return
        for fragment_ in self.fragments[leaving]:
            fragment_.send()
        self._in_flight = leaving, step

    def agreed_tensors(self) -> list[tuple[Tensor, tuple[str, ...]]]:
        """The anchors and their momentum, each as it is kept, with names."""
        return [
            (part, ("outer", kind, name))
            for fragment_ in self._flat_fragments()
            for kind, flat in (("anchor", fragment_.anchor), ("momentum", fragment_.momentum))
            if flat is not None
            for name, part in fragment_.parts(flat).items()
        ]

    def shared_state(self) -> dict[str, list[Slice]]:
        """What all replicas hold alike: the anchor, in the weights' place, and the momentum."""
        found: dict[str, list[Slice]] = {}
        for fragment_ in self._flat_fragments():
            found |= fragment_.slices("model.", fragment_.anchor, self._holding)
            found |= fragment_.slices(MOMENTUM, fragment_.momentum, self._holding)
        return found

    def state_dict(self, of_own: str) -> dict[str, list[Slice]]:
        """By name; what is the replica's own has `of_own` before it. Anchors that are the weights
        are left out."""
        found: dict[str, list[Slice]] = {}
        for fragment_ in self._flat_fragments():
            kinds = {MOMENTUM: fragment_.momentum}
            kinds |= {ANCHOR: None if self._is_at_anchor else fragment_.anchor}
            kinds |= {of_own + SENT: fragment_.sent}
            for kind, flat in kinds.items():
                found |= fragment_.slices(kind, flat, self._holding)
            found |= dict(fragment_.unsent_parts(of_own, self._holding))
        return found

    @torch.no_grad()
    def load_state_dict(self, own: StateSource, mean: StateSource, step: int) -> bool:
        """Take over the state after `step`: `own` is this replica's if there are as many as there
        were, `mean` that over all. What is missing starts as in a new run. Whether the anchor is
        of before the step."""
        self.detach()
        self._is_at_anchor, has_anchor = True, False
        for fragment_ in self._flat_fragments():
            fragment_.sent = None
            for name, places in fragment_.slices("", fragment_.anchor, self._holding).items():
                is_kept = ANCHOR + name in own
                has_anchor |= is_kept
                source, kind = (own, ANCHOR) if is_kept else (mean, "model.")
                source.fill(kind + name, places)
            self._is_at_anchor &= torch.equal(fragment_.anchor, fragment_.weights())
            for flat in (fragment_.momentum, fragment_.residual, fragment_.owed):
                if flat is not None:
                    flat.zero_()
            shared = fragment_.slices(MOMENTUM, fragment_.momentum, self._holding).items()
            for name, places in (*shared, *fragment_.unsent_parts("", self._holding)):
                if name in own:
                    own.fill(name, places)
        self._in_flight = self.timetable.in_flight(step)
        if self._in_flight is not None:
            self._load_sent(own, self.fragments[self._in_flight[0]])
        return has_anchor

    def _load_sent(self, own: StateSource, fragment: list[FlatFragment]) -> None:
        """If it is the fragment that was under way; else it is sent when its next window ends."""
        names = [name for fragment_ in fragment for name in fragment_.named]
        if not all(SENT + name in own for name in names):
            self._in_flight = None
            return
        for fragment_ in fragment:
            fragment_.sent = fragment_.anchor.clone()
            for name, places in fragment_.slices(SENT, fragment_.sent, self._holding).items():
                own.fill(name, places)

    def _exchange(self, numbers: list[int]) -> None:
        """Send and wait."""
        for number in numbers:
            for fragment_ in self.fragments[number]:
                fragment_.send()
        self._receive(numbers)

    def _receive(self, numbers: list[int]) -> None:
        flat_fragments = [fragment_ for number in numbers for fragment_ in self.fragments[number]]
        for fragment_ in flat_fragments:
            fragment_.fold()
        for fragment_ in flat_fragments:
            fragment_.receive()

    def _step(self, numbers: list[int], rule: OuterConfig, keep_progress: bool) -> None:
        """Without progress to keep, the weights are the anchor afterwards."""
        for number in numbers:
            for fragment_ in self.fragments[number]:
                fragment_.apply(rule, keep_progress)

    def _flat_fragments(self) -> Iterator[FlatFragment]:
        return (fragment_ for fragment in self.fragments for fragment_ in fragment)


def averaged_parameters(model: nn.Module) -> dict[str, Tensor]:
    """What this rank holds of the parameters that replicas train apart and average, in the model's
    order."""
    held, named = held_parameters(model), model.named_parameters()
    return {n: held[n] for n, p in named if p.requires_grad and p.is_floating_point()}


def _whole_sizes(model: nn.Module, holding: LocalLayout) -> dict[str, int]:
    """The bytes of all that replicas average, also of what this rank holds in part or not at all:
    so that all ranks of a replica cut the same fragments."""
    return {
        n: math.prod(holding.whole_shape(n, p)) * p.itemsize
        for n, p in model.named_parameters()
        if getattr(p, "trained_elsewhere", p.requires_grad) and p.is_floating_point()
    }


# ---- costs


def outer_messages(layout: RankLayout, what: str) -> list[Message]:
    """The outer gradients of all fragments, each of which is sent in another step.

    Packed, the shares go to their owners, and the mean of the own share to all.
    """
    (n, own), codec = layout.line("replicas"), make_codec(layout.plan.codec)
    buckets = _outer_buckets(layout)
    if codec is None:
        return average_messages(layout, what, buckets)
    num_bytes = 0
    stripes = [(len(own_stripe(layout, count, codec.block)), size) for count, size in buckets]
    for count, _ in stripes:
        cuts = share_bounds(count, codec.block, n)
        first, last = (codec.num_bytes(cuts[own + i]) for i in range(2))
        num_bytes += codec.num_bytes(count) - (last - first) + (last - first) * (n - 1)
    packed = Message(what, "replicas", "all-to-all, gather", 2 * len(buckets), num_bytes)
    return [packed, gather_message(layout, buckets, stripes)]


def anchor_memory(layout: RankLayout) -> Amount:
    """What a replica holds beside its weights and its own optimizer's state."""
    words, wide = ["the anchor"], wide_bytes(layout)
    num_bytes = sum(p.num_bytes for p in layout.trained if p.dtype.is_floating_point)
    if layout.plan.outer_rates[1]:
        words.append("the outer momentum")
        num_bytes += wide
    if layout.plan.codec != "none":
        words.append("what packing dropped")
        stripe = wide if layout.plan.zero == 3 else wide // layout.num_replicas
        num_bytes += stripe + stripe // layout.num_apart
    return Amount(num_bytes, ", ".join(words))


def wide_bytes(layout: RankLayout) -> int:
    """Of all outer gradients, in the type of the arithmetic."""
    return sum(count * size for count, size in _outer_buckets(layout))


def _outer_buckets(layout: RankLayout) -> list[tuple[int, int]]:
    """The elements of each flat fragment, and the bytes of one."""
    named = {p.name: p for p in layout.trained if p.dtype.is_floating_point}
    trained = [p for p in layout.facts.parameters if p.is_trained and p.dtype.is_floating_point]
    sizes = [math.prod(p.shape) * p.dtype.itemsize for p in trained]
    found = []
    for run in split_fragments(sizes, layout.plan.fragments):
        kinds: dict[object, list[LocalParameter]] = {}
        for p in [named[p.name] for p in trained[run.start : run.stop] if p.name in named]:
            holders = layout.facts.pipeline_ranks(p.name)
            kinds.setdefault((p.dtype, holders if len(holders) > 1 else ()), []).append(p)
        for own in kinds.values():
            found.append((sum(p.num_elements for p in own), max(4, own[0].dtype.itemsize)))
    return found
