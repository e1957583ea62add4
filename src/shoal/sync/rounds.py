"""What all strategies share: a rank's rounds, its state, and the end of a step.

A global batch is cut into pieces; `round_size` of them pass through a pipeline together and count
as one term of the gradient's sum, and without a pipeline a round is a piece. Each replica takes a
run of neighbouring rounds, and agrees with the others on losses and buffers. A step is made as a
whole or not at all. Each strategy has its own way to sum gradients and its own parts to step on;
every one of them makes an `AttachedModel` in `attach`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from shoal.comm.collectives import Group
from shoal.comm.mesh import Mesh
from shoal.comm.reduce import TreeReduce
from shoal.comm.tree import Block, blocks_of
from shoal.data.split import shares
from shoal.numerics.norms import scale_all
from shoal.numerics.optimizers import stepper
from shoal.parallel.fsdp import held_parameters
from shoal.parallel.layout import LocalLayout
from shoal.sync.buffers import BufferMeans
from shoal.sync.named_parts import add_up
from shoal.sync.replicas import MergedReplicas
from shoal.sync.state import OptimizedPart, ParameterRun, StateSource, TrainState
from shoal.sync.step_metadata import StepMetadata
from shoal.sync.strategy import GlobalStep, LocalStep


def blocks_by_rank(
    num_rounds: int, num_ranks: int, num_terms: int = 1, counts: Sequence[int] | None = None
) -> list[list[Block]]:
    """The subtrees that each replica's rounds are, of `num_terms` each in the sum. Pure."""
    dealt = shares(num_rounds, num_ranks, counts)
    return [blocks_of(range(s.start * num_terms, s.stop * num_terms)) for s in dealt]


def ranks_tree(group: Group) -> TreeReduce:
    """Sums with one term of each rank."""
    return TreeReduce(group, blocks_by_rank(group.num_ranks, group.num_ranks))


def most_rounds(num_rounds: int, num_ranks: int) -> int:
    """Of the replica that has most. Pure."""
    return -(-num_rounds // num_ranks)


class ReplicaRounds:
    def __init__(self, model: nn.Module, mesh: Mesh, num_pieces: int, round_size: int):
        self.mesh, self.num_pieces, self.size = mesh, num_pieces, round_size
        self.num_rounds = num_pieces // round_size
        self.device = torch.device(mesh.device)
        self.own = shares(self.num_rounds, mesh.data.num_ranks, mesh.counts)[mesh.data.rank]
        self.pieces = range(self.own.start * round_size, self.own.stop * round_size)
        tree = self.tree(round_size) if mesh.data.num_ranks > 1 else None
        self.buffers = BufferMeans(model, self.pieces, num_pieces, tree)

    def tree(self, num_terms: int = 1) -> TreeReduce:
        """The sum over the rounds of all, or over `num_terms` of each."""
        data, counts = self.mesh.data, self.mesh.counts
        blocks = blocks_by_rank(self.num_rounds, data.num_ranks, num_terms, counts)
        return TreeReduce(data, blocks)

    def agree(
        self, local: LocalStep, touched: list[bool], meanwhile: Callable[[], None] = lambda: None
    ) -> tuple[GlobalStep, list[bool]]:
        """Losses, requests and buffers of all, and the parameters that any piece touched.

        `meanwhile` is done while the message is under way. Every rank must reach this.
        """
        counts = self.num_pieces, len(touched), len(self.buffers)
        metadata = StepMetadata(self.mesh, *counts)
        metadata.fill(self.pieces, local, touched, self.buffers.num_changes)
        arrival = metadata.start(self.device)
        meanwhile()
        arrival.wait()
        agreed, touched, num_changes = metadata.read()
        self.buffers.agree(num_changes, self.device)
        return agreed, touched

    def agree_locally(self, local: LocalStep) -> GlobalStep:
        """The same in a world of one."""
        sums, weights = local.sums_and_weights()
        if len(self.buffers):
            self.buffers.agree(self.buffers.num_changes, self.device)
        weight, busy_s = sum(weights), [local.busy_s]
        flags, known = (local.asked, local.is_mean), (local.mark, local.num_samples)
        parts = add_up([local.packed_parts()]) if local.parts else {}
        return GlobalStep(sums, weights, weight, None, busy_s, *flags, *known, parts=parts)


class AttachedModel:
    """A model and its optimizer as this rank holds them, from one `attach` to the next."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mesh: Mesh,
        holding: LocalLayout,
        num_pieces: int,
        round_size: int,
    ):
        self.model, self.optimizer, self.mesh, self.holding = model, optimizer, mesh, holding
        self.rounds = ReplicaRounds(model, mesh, num_pieces, round_size)
        self.step = stepper(optimizer)
        # What the optimizer steps on; a strategy that shards puts its parts here.
        self.runs: Mapping[Tensor, OptimizedPart] = {
            p: ParameterRun(n, p.shape) for n, p in model.named_parameters()
        }

    def update(
        self,
        gradients: Iterable[Tensor],
        scale: float,
        check: bool,
        step: Callable[[], object],
        alike: bool = False,
    ) -> bool:
        """`Strategy.update`: scale what is held of the gradients, then `step`.

        With `check` every rank must reach this, unless the gradients are `alike` on all.
        """
        finite = True
        if check or scale != 1.0:
            finite = scale_all([g for g in gradients if g.numel()], scale, check)
        if check and not alike:
            finite = not any(row[0] for row in self.mesh.world.all_gather_numbers([not finite]))
        if not finite:
            self.rounds.buffers.restore()
            return False
        step()
        self.rounds.buffers.commit()
        return True

    def state(self) -> TrainState:
        """Of now: a forward may put another tensor in a buffer's place."""
        tensors = held_parameters(self.model) | dict(self.model.named_buffers())
        return TrainState(tensors, self.optimizer, self.runs, self.holding)

    def load_state_dict(self, source: StateSource) -> None:
        self.state().load_state_dict(MergedReplicas(source))
        self.rounds.buffers.hold()


class RoundContext:
    """The context around a round: a piece, or those of a pipeline, which minds its own buffers."""

    def __init__(self, rounds: ReplicaRounds, end: Callable[[bool], None]):
        self._buffers, self._is_piece, self._end = rounds.buffers, rounds.size == 1, end
        self.last = False

    def __enter__(self) -> None:
        self._buffers.enter()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            if self._is_piece:
                self._buffers.leave()
            self._end(self.last)
