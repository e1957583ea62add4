"""The half of a strategy that all share: a rank's rounds, its state, and the end of a step.

A global batch is cut into pieces; `round_size` of them pass through a pipeline together and count
as one term of the gradient's sum, and without a pipeline a round is a piece. Each replica takes a
run of neighbouring rounds, and agrees with the others on losses and buffers. A step is made as a
whole or not at all. How gradients agree, and what the optimizer steps on, is each strategy's own;
every one of them makes a `Held` in `attach`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from shoal.comm.board import Board, open_board
from shoal.comm.mesh import Mesh
from shoal.comm.reduce import TreeReduce
from shoal.comm.tree import Block, blocks_of
from shoal.data.split import shares
from shoal.numerics.norms import scale_all
from shoal.numerics.optimizers import stepper
from shoal.parallel.fsdp import held_parameters
from shoal.parallel.layout import Holding
from shoal.sync.buffers import BufferMeans
from shoal.sync.replicas import Merged
from shoal.sync.state import HeldState, Run, Source, Stepped
from shoal.sync.strategy import Agreed, Tally
from shoal.sync.tail import Tail, tail_lengths


def blocks_by_rank(
    num_rounds: int, num_ranks: int, num_terms: int = 1, counts: Sequence[int] | None = None
) -> list[list[Block]]:
    """The subtrees that each replica's rounds are, of `num_terms` each in the sum. Pure."""
    dealt = shares(num_rounds, num_ranks, counts)
    return [blocks_of(range(s.start * num_terms, s.stop * num_terms)) for s in dealt]


def most_rounds(num_rounds: int, num_ranks: int) -> int:
    """Of the replica that has most. Pure."""
    return -(-num_rounds // num_ranks)


class Rounds:
    def __init__(self, model: nn.Module, mesh: Mesh, num_pieces: int, round_size: int):
        self.mesh, self.num_pieces, self.size = mesh, num_pieces, round_size
        self.num_rounds = num_pieces // round_size
        self.device = torch.device(mesh.device)
        self.own = shares(self.num_rounds, mesh.data.num_ranks, mesh.counts)[mesh.data.rank]
        self.pieces = range(self.own.start * round_size, self.own.stop * round_size)
        tree = self.tree(round_size) if mesh.data.num_ranks > 1 else None
        self.buffers = BufferMeans(model, self.pieces, num_pieces, tree)
        self.board: Board | None = None  # on which the ranks agree, if they were given one

    def meet_at_board(self, num_parameters: int) -> None:
        """Agree in memory from now on if all ranks are of one host. Every rank must reach this."""
        lengths = tail_lengths(
            self.num_pieces, self.mesh.num_ranks, num_parameters, len(self.buffers)
        )
        self.board = open_board(self.mesh.data, sum(map(sum, lengths)))

    def tree(self, num_terms: int = 1) -> TreeReduce:
        """The sum over the rounds of all, or over `num_terms` of each."""
        data, counts = self.mesh.data, self.mesh.counts
        blocks = blocks_by_rank(self.num_rounds, data.num_ranks, num_terms, counts)
        return TreeReduce(data, blocks)

    def agree(
        self,
        tally: Tally,
        touched: list[bool],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> tuple[Agreed, list[bool]]:
        """Losses, requests and buffers of all, and the parameters that any piece touched.

        `meanwhile` is done while the message is under way. Every rank must reach this.
        """
        counts = self.num_pieces, len(touched), len(self.buffers)
        tail = Tail(self.mesh, *counts, self.board)
        tail.fill(self.pieces, tally, touched, self.buffers.num_changes)
        arrival = tail.start(self.device)
        meanwhile()
        arrival.wait()
        agreed, touched, num_changes = tail.read()
        self.buffers.agree(num_changes, self.device)
        return agreed, touched

    def agree_alone(self, tally: Tally) -> Agreed:
        """The same in a world of one."""
        sums, weights = tally.numbers()
        self.buffers.agree(self.buffers.num_changes, self.device)
        weight, busy_s = sum(weights), [tally.busy_s]
        flags, known = (tally.asked, tally.is_mean), (tally.mark, tally.num_samples)
        return Agreed(sums, weights, weight, None, busy_s, *flags, *known)


class Held:
    """A model and its optimizer as this rank holds them, from one `attach` to the next."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mesh: Mesh,
        holding: Holding,
        num_pieces: int,
        round_size: int,
    ):
        self.model, self.optimizer, self.mesh, self.holding = model, optimizer, mesh, holding
        self.rounds = Rounds(model, mesh, num_pieces, round_size)
        self.step = stepper(optimizer)
        # What the optimizer steps on; a strategy that shards puts its parts here.
        self.runs: Mapping[Tensor, Stepped] = {
            p: Run(n, p.shape) for n, p in model.named_parameters()
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
            finite = not any(row[0] for row in self.mesh.world.gather_numbers([not finite]))
        if not finite:
            self.rounds.buffers.restore()
            return False
        step()
        self.rounds.buffers.commit()
        return True

    def state(self) -> HeldState:
        """Of now: a forward may put another tensor in a buffer's place."""
        tensors = held_parameters(self.model) | dict(self.model.named_buffers())
        return HeldState(tensors, self.optimizer, self.runs, self.holding)

    def load_state_dict(self, source: Source) -> None:
        self.state().load_state_dict(Merged(source))
        self.rounds.buffers.hold()


class Around:
    """The context around a round: a piece, or those of a pipeline, which minds its own buffers."""

    def __init__(self, rounds: Rounds, end: Callable[[bool], None]):
        self._buffers, self._is_piece, self._end = rounds.buffers, rounds.size == 1, end
        self.last = False

    def __enter__(self) -> None:
        self._buffers.enter()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            if self._is_piece:
                self._buffers.leave()
            self._end(self.last)
