"""How replicas agree on each step: the interface of all strategies.

The trainer calls, for each step and on every rank: `microbatch` around the forward and backward of
each of the rank's rounds; `exchange` once they are done; `update` with the factor to multiply the
gradients with. A step that `update` answers with False was not made, and is tried again.

`attach` comes first and again after `detach`, when a group was lost and another was formed.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from shoal.comm.mesh import NO_REQUESTS, Mesh, RankRequests
from shoal.data.batches import Piece
from shoal.data.ledger import mark_samples
from shoal.data.marks import MODULUS
from shoal.data.sources import Source
from shoal.parallel.layout import LocalLayout, Slice
from shoal.sync.buffers import BufferMeans
from shoal.sync.named_parts import LossPart, PartSums, pack_parts
from shoal.sync.state import ShardedState, StateSource

if TYPE_CHECKING:
    from shoal.sync.costs import StepCosts
    from shoal.sync.rank_layout import RankLayout
    from shoal.sync.rounds import AttachedModel


@dataclass(slots=True)
class LocalStep:
    """One rank's results of a step before the exchange: one entry for each of its pieces."""

    losses: list[Tensor] = field(default_factory=list)
    weights: list[float | Tensor] = field(default_factory=list)
    is_mean: bool = False  # the losses are means over their weights; False: sums, or no samples
    busy_s: float = 0.0  # spent on data and compute; shows slow ranks
    asked: RankRequests = NO_REQUESTS  # of this rank
    mark: int = 0  # of the samples in its pieces (`data/ledger.py`)
    num_samples: int = 0  # in them, without those that were left out
    digest: float = 0.0  # of state that replicas hold alike, before the step (`consistency.py`)
    parts: dict[int, Mapping[str, LossPart]] = field(default_factory=dict)  # named, by piece

    def count_samples(self, pieces: Sequence[Piece], source: Source) -> None:
        """Mark and count the samples that were really loaded."""
        for piece in pieces:
            known = piece.mark
            own = mark_samples(source, piece.ids) if known is None else known
            self.mark = (self.mark + own) % MODULUS
            self.num_samples += piece.num_samples

    def add(
        self,
        loss: Tensor,
        weight: float | Tensor,
        is_mean: bool,
        parts: Mapping[str, LossPart] | None = None,
    ) -> None:
        if parts:
            self.parts[len(self.losses)] = parts
        self.losses.append(loss)
        self.weights.append(weight)
        self.is_mean = is_mean

    def sums_and_weights(self) -> tuple[list[float], list[float]]:
        """The sum of the loss and the weight of each piece."""
        sums, weights = [], []
        for loss, weight in zip(self.losses, self.weights, strict=True):
            weights.append(float(weight))
            sums.append(loss.item() * weights[-1] if self.is_mean else loss.item())
        return sums, weights

    def packed_parts(self, first: int = 0) -> bytes:
        """Its named parts, to be sent; its pieces count from `first`."""
        return pack_parts(self.parts, first)


class GlobalStep(NamedTuple):
    """Results of a step that all ranks know after the exchange, unless a field says otherwise."""

    sums: list[float]  # of the loss, by piece
    weights: list[float]  # by piece
    weight: float  # of the samples that the gradients at hand stand for
    norm: float | None  # of those gradients, unscaled; None if it was not asked for
    busy_s: list[float]  # by rank
    asked: RankRequests  # of any rank
    is_mean: bool  # so that a rank without samples in a short batch knows it too
    mark: int | None  # of all samples since the last one; None if only own ones are known
    num_samples: int | None  # of the step, loaded by all; None if only own ones are known
    digests: Sequence[float] = ()  # by rank, of state before the step; empty without comparison
    parts: PartSums = {}  # named, of the pieces that `sums` has

    @property
    def loss(self) -> float:
        """The weighted mean over the pieces; summed in order, so the same on every rank.

        NaN of a batch without samples, which has none.
        """
        return sum(self.sums) / sum(self.weights) if any(self.weights) else math.nan


class ServerLink(Protocol):
    """What a strategy that works through parameter servers offers beside the exchange."""

    @property
    def hold_parameters(self) -> bool:
        """Whether servers hold parameters and optimizer; or only what replicas agreed on."""
        ...

    @property
    def is_apart(self) -> bool:
        """Whether a rank may be ahead of the others."""
        ...

    @property
    def trace(self) -> tuple[list[int], ...]:
        """By server, the versions of the last step: pulled, made by it, pulled next."""
        ...

    @property
    def late_mark(self) -> int | None:
        """Replaces that of `GlobalStep`, if it is known only after `update`."""
        ...

    def wait_for_parameters(self) -> None:
        """Until all parameters are here."""
        ...

    def requests(self) -> RankRequests:
        """Whether all stop or pause after the last step of this rank, as far as servers know."""
        ...

    def tables(self, dense: bool) -> dict[str, list[Slice]]:
        """This rank's share of the tables that servers hold. Every rank must call it."""
        ...

    def types(self) -> ShardedState | None:
        """Names and types of what servers hold for this rank; None if nothing of the model."""
        ...

    def summary(self) -> dict[str, Any]:
        """For the end of a run: `staleness` and `rounds`, None where there is none."""
        ...


class StatefulStrategy(Protocol):
    """The state that a strategy holds: as checkpoints have it, and as a newcomer takes it."""

    def state_dict(self) -> ShardedState:
        """What this rank holds of the job's state, by canonical names, and what servers hold of
        it. Every rank must call it."""
        ...

    def load_state_dict(self, source: StateSource, step: int) -> None:
        """Take over the state after `step`, and give servers theirs. Every rank must call it."""
        ...

    def newcomer_step(self) -> int:
        """The step after which a newcomer in this seat continues, as far as the group or servers
        know since `attach`. In lockstep it takes the leader's, and this is 0 without servers."""
        ...

    def newcomer_state(self) -> ShardedState:
        """What a newcomer takes from this rank, without what servers hold."""
        ...

    def join(self, source: StateSource, step: int) -> None:
        """As a newcomer, take a peer's `newcomer_state`, and continue after `step`."""
        ...


class Strategy(StatefulStrategy, Protocol):
    @property
    def attached(self) -> "AttachedModel":
        """The model as it was attached."""
        ...

    @property
    def servers(self) -> ServerLink | None:
        """None if no servers take part."""
        ...

    buffers: BufferMeans  # `microbatch`, or a pipeline, calls it around each forward
    in_lockstep: bool  # whether no rank commits a step before all have computed it

    def attach(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mesh: Mesh,
        holding: LocalLayout = ...,
    ) -> None:
        """Fix the layout and set the hooks. Repeatable after `detach`. Every rank calls it."""
        ...

    def detach(self) -> None:
        """Let operations under way end and remove the hooks. Never communicates, never raises."""
        ...

    def microbatch(self, first: bool, last: bool) -> AbstractContextManager[object]:
        """Around one round: a piece, or those that pass through a pipeline together.

        After `first`, nothing of an earlier attempt is left; during `last`, and during every round
        if the strategy does not add them up first, what is ready may be sent.
        """
        ...

    def exchange(self, local: LocalStep, want_norm: bool) -> GlobalStep:
        """Make gradients agree. They stay unscaled, and where the strategy keeps them: on the
        parameters, or in shards of its own."""
        ...

    def update(self, scale: float, check: bool = True) -> bool:
        """Scale the gradients and step. With `check`, False and nothing changed if they are not
        finite; it costs a pass over them."""
        ...

    def gradients(self) -> dict[str, list[Slice]]:
        """What this rank holds of the gradient after an update: as it was scaled and stepped on."""
        ...

    @staticmethod
    def costs(layout: "RankLayout") -> "StepCosts":
        """What a step costs a rank of this layout: bytes and messages that it sends, bytes that it
        holds. Pure: no strategy is made."""
        ...
