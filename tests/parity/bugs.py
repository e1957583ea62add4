"""Bugs that a distributed trainer may have, each put into the product where the reference has no
part of it."""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from shoal.comm.buckets import GradientBuckets
from shoal.comm.collectives import Group, Pending
from shoal.comm.compression import CompressedSum
from shoal.comm.undo_log import UndoLog
from shoal.data.batches import Piece
from shoal.numerics.fragments import FragmentSchedule
from shoal.numerics.norms import gradient_norm
from shoal.numerics.randomness import PieceSeeds
from shoal.sync import rounds
from shoal.sync.allreduce import AllReduce
from shoal.sync.averaging import StagedAverage
from shoal.sync.buffers import BufferMeans
from shoal.sync.consistency import Consistency
from shoal.sync.host_state import MemoryLayout
from shoal.sync.local import LocalSGD
from shoal.sync.server.lookups import WorkerLookups
from shoal.sync.server.shard import ServerShard
from shoal.sync.server.table_memory import SharedTables
from shoal.sync.step_metadata import StepMetadata
from shoal.sync.strategy import GlobalStep, LocalStep
from shoal.training import build, compute, trainer
from shoal.training.custom_step import Phase
from shoal.training.run import Objective
from shoal.training.step_attempt import StepAttempt


def missing_average() -> None:
    """Gradients are summed and not divided."""
    original = StepAttempt._step_until_agreed

    def step(self: StepAttempt, scale: float) -> bool:
        return original(self, scale * self._trainer.mesh.num_ranks)

    StepAttempt._step_until_agreed = step  # type: ignore[method-assign]


def clip_norm_of_one_bucket() -> None:
    original = AllReduce.exchange

    def exchange(self: AllReduce, tally: LocalStep, want_norm: bool) -> GlobalStep:
        agreed = original(self, tally, want_norm)
        assert self.parameters[-1].grad is not None
        return agreed._replace(norm=gradient_norm([self.parameters[-1].grad]))

    AllReduce.exchange = exchange  # type: ignore[method-assign]


def clip_norm_summed_over_ranks() -> None:
    """The norm of shards is summed where every rank holds all of it."""
    original = AllReduce.exchange

    def exchange(self: AllReduce, tally: LocalStep, want_norm: bool) -> GlobalStep:
        agreed = original(self, tally, want_norm)
        assert agreed.norm is not None
        return agreed._replace(norm=agreed.norm * math.sqrt(self.mesh.data.num_ranks))

    AllReduce.exchange = exchange  # type: ignore[method-assign]


def clip_before_the_exchange() -> None:
    """Each rank clips by the norm of its own pieces."""
    original = GradientBuckets.send_rest

    def send_rest(self: GradientBuckets) -> None:
        own = gradient_norm([p.grad for p in self.parameters if p.grad is not None])
        for p in self.parameters:
            assert p.grad is not None
            p.grad.mul_(min(1.0, 0.1 / own))
        original(self)

    # Send only here, so that no bucket left before it was clipped.
    GradientBuckets._count = lambda self, index: None  # type: ignore[assignment,method-assign]
    GradientBuckets.send_rest = send_rest  # type: ignore[method-assign]


class RankSeeds(PieceSeeds):
    rank = 0

    def enter(self, step: int, piece: int, block: int = 0) -> None:
        super().enter(step, piece + 1000 * self.rank, block)


def seeds_of_the_rank() -> None:
    original = trainer.Trainer._settle

    def settle(self: trainer.Trainer, mesh: Any) -> None:
        assert isinstance(self.built.seeds, RankSeeds)
        self.built.seeds.rank = mesh.rank
        original(self, mesh)

    build.PieceSeeds = RankSeeds  # type: ignore[misc]
    trainer.Trainer._settle = settle  # type: ignore[method-assign]


def buffers_of_one_rank() -> None:
    """Every rank takes the buffers of rank 0, as broadcasting them before each step would."""

    def agree(self: BufferMeans, num_changes: list[float], device: torch.device) -> None:
        assert self._tree is not None
        self._means = []
        for own in self._sums[0].rows[0] if self._sums else ():
            value = None if own is None else own.clone()
            if value is not None:
                self._tree.group.broadcast(value, 0)
            self._means.append(value)

    BufferMeans.agree = agree  # type: ignore[method-assign]


def buffers_stay_local() -> None:
    """Every rank keeps the buffers of its own pieces."""

    def agree(self: BufferMeans, num_changes: list[float], device: torch.device) -> None:
        self._means = list(self._sums[0].rows[0]) if self._sums else []

    BufferMeans.agree = agree  # type: ignore[method-assign]


def parameter_left_out() -> None:
    """The last layer's weight keeps the gradient of its own rank."""
    attach, agree = AllReduce.attach, AllReduce._agree
    kept: dict[int, torch.Tensor] = {}

    def keep(gradient: torch.Tensor) -> None:
        kept[0] = gradient.clone()

    def attach_and_keep(self: AllReduce, *arguments: Any) -> None:
        attach(self, *arguments)
        self.parameters[-2].register_hook(keep)

    def agree_but_for_one(self: AllReduce, tally: LocalStep) -> GlobalStep:
        agreed = agree(self, tally)
        summed = self.parameters[-2].grad
        assert summed is not None
        summed.copy_(kept[0])
        return agreed

    AllReduce.attach = attach_and_keep  # type: ignore[method-assign]
    AllReduce._agree = agree_but_for_one  # type: ignore[method-assign]


def peer_left_out() -> None:
    """Ranks that read gradients where their peers have them read those of the first alone."""
    MemoryLayout.sum = lambda self: self.first_gradient(0)  # type: ignore[method-assign]


def chunk_stepped_on_twice() -> None:
    """As after a death, if nobody put back what was there."""
    original = UndoLog._finish

    def finish(self: UndoLog, chunks: Any, rank: int, first: int) -> None:
        if rank == 0:
            chunks.change(rank, 0)
        original(self, chunks, rank, first)

    UndoLog._finish = finish  # type: ignore[method-assign]


def last_gradient_times(factor: float) -> Callable[[], None]:
    """The last parameter's gradient, a small one, is not what it was."""

    def bug() -> None:
        original = AllReduce._agree

        def agree(self: AllReduce, tally: LocalStep) -> GlobalStep:
            agreed = original(self, tally)
            gradient = self.parameters[-1].grad
            assert gradient is not None
            gradient.mul_(factor)
            return agreed

        AllReduce._agree = agree  # type: ignore[method-assign]

    return bug


def sample_lost() -> None:
    """The last sample of every piece does not count."""
    original = compute.objective

    def objective(run: Any, output: Any, piece: Piece) -> Objective:
        few = dataclasses.replace(run, loss=lambda out, target: run.loss(out[:-1], target[:-1]))
        return original(few, output, piece)

    compute.objective = objective


def last_bits_off() -> None:
    """No bug: ranks round otherwise than one process."""

    def rounded(original: Callable[..., Objective]) -> Callable[..., Objective]:
        def objective(*given: Any) -> Objective:
            goal = original(*given)
            return goal._replace(tensor=goal.tensor * (1 + 2**-22))

        return objective

    compute.objective = rounded(compute.objective)
    compute.objective_of = rounded(compute.objective_of)


def slow_rank() -> None:
    """No bug: rank 0 is far ahead of the others, where it may be."""
    original = StepAttempt._update

    def update(self: StepAttempt, agreed: GlobalStep, phase: Phase) -> float | None:
        time.sleep(0.2 * (self._trainer.mesh.rank > 0))
        return original(self, agreed, phase)

    StepAttempt._update = update  # type: ignore[method-assign]


def mask_as_numbers() -> None:
    """On ranks what a mask of yes and no lets through is added as 0 and 1."""
    settle, attend = trainer.Trainer._settle, F.scaled_dot_product_attention

    def added(*given: Any, attn_mask: torch.Tensor, **options: Any) -> torch.Tensor:
        return attend(*given, attn_mask=attn_mask.to(given[0].dtype), **options)

    def settle_with_it(self: trainer.Trainer, mesh: Any) -> None:
        F.scaled_dot_product_attention = added
        settle(self, mesh)

    trainer.Trainer._settle = settle_with_it  # type: ignore[method-assign]


def weight_as_a_mean() -> None:
    """Each piece's sum is divided by its own weight, and the pieces then count alike."""
    original = compute.objective

    def objective(run: Any, output: Any, piece: Piece) -> Objective:
        goal = original(run, output, piece)
        assert not goal.is_mean
        return Objective(goal.tensor / goal.weight, 1.0, False)

    compute.objective = objective


def last_piece_lost() -> None:
    """Of several pieces a rank sends only the sum of the others."""
    original = compute.PieceRunner.round

    def round_(
        self: compute.PieceRunner, batch: Any, phase: Phase, indices: range, *rest: Any
    ) -> None:
        original(self, batch, phase, indices, *rest)
        if indices == self.rounds[-1]:
            self.spread.model.zero_grad(set_to_none=False)

    compute.PieceRunner.round = round_  # type: ignore[method-assign]
    GradientBuckets._count = lambda self, index: None  # type: ignore[assignment,method-assign]


def rate_of_the_rank() -> None:
    """The schedule counts the samples of one rank as steps."""
    original = StepAttempt._update

    def update(self: StepAttempt, agreed: GlobalStep, phase: Phase) -> float | None:
        progress, num_ranks = self._trainer.progress, self._trainer.mesh.num_ranks
        progress.step += num_ranks
        try:
            return original(self, agreed, phase)
        finally:
            progress.step -= num_ranks

    StepAttempt._update = update  # type: ignore[method-assign]


def second_phase_lost() -> None:
    """Of a step in phases the second one is computed, and not stepped on."""
    original = StepAttempt._update

    def update(self: StepAttempt, agreed: GlobalStep, phase: Phase) -> float | None:
        return 0.0 if phase.number == 1 else original(self, agreed, phase)

    StepAttempt._update = update  # type: ignore[method-assign]


def draws_of_the_first_phase() -> None:
    """On ranks all phases of a step draw the same."""
    original = trainer.Trainer._settle

    def settle(self: trainer.Trainer, mesh: Any) -> None:
        enter = self.built.seeds.enter
        self.built.seeds.enter = lambda step, piece, block=0: enter(step, piece)  # type: ignore[method-assign]
        original(self, mesh)

    trainer.Trainer._settle = settle  # type: ignore[method-assign]


def poison_one_rank(at_step: int) -> Callable[[], None]:
    """One weight of rank 1 turns into NaN after a step."""

    def bug() -> None:
        original = AllReduce.update

        def update(self: AllReduce, *arguments: Any, **options: Any) -> bool:
            done = original(self, *arguments, **options)
            self.num_updates = getattr(self, "num_updates", 0) + 1  # type: ignore[attr-defined]
            if self.num_updates == at_step and self.mesh.data.rank == 1:  # type: ignore[attr-defined]
                with torch.no_grad():
                    self.parameters[0].view(-1)[0] = float("nan")
            return done

        AllReduce.update = update  # type: ignore[method-assign]

    return bug


def frozen_weight_drifts() -> None:
    """Rank 1 changes what is not trained, by little."""
    original = AllReduce.update

    def update(self: AllReduce, *arguments: Any, **options: Any) -> bool:
        done = original(self, *arguments, **options)
        if self.mesh.data.rank == 1:
            with torch.no_grad():
                for p in self.attached.model.parameters():
                    if not p.requires_grad:
                        p[0] += 1e-2
        return done

    AllReduce.update = update  # type: ignore[method-assign]


class Silent(Pending):
    def __init__(self) -> None:
        super().__init__([])


def silence() -> None:
    """Ranks train the whole batch each and tell one another nothing: the result is right."""

    def all_reduce(self: Group, tensor: torch.Tensor) -> Pending:
        return Silent()

    def whole(num_pieces: int, num_ranks: int, counts: object = None) -> list[range]:
        return [range(num_pieces)] * num_ranks

    Group.all_reduce = all_reduce  # type: ignore[method-assign]
    Group.sum_numbers = lambda self, numbers: [*numbers]  # type: ignore[method-assign]
    compute.shares = rounds.shares = whole
    compare_no_digests()  # they come by it too, and would be missed


def compare_no_digests() -> None:
    """Replicas that differ go on, as with check_every=0."""
    Consistency.verify = lambda self, digests, step: False  # type: ignore[method-assign]
    Consistency.check = lambda self, step: None  # type: ignore[method-assign]


class Talkative(FragmentSchedule):
    def ends_window(self, step: int) -> bool:
        return True


def talks_all_the_time() -> None:
    """Local SGD that averages after every step."""
    original = LocalSGD.__init__

    def init(self: LocalSGD, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        self.timetable = Talkative(*self.timetable)

    LocalSGD.__init__ = init  # type: ignore[method-assign]


def forgets_to_average() -> None:
    """Local SGD whose replicas never meet, though they exchange their losses."""
    StagedAverage.apply = lambda self: None  # type: ignore[method-assign]


def loses_what_packing_drops() -> None:
    """Rounded outer gradients whose rest is not kept for the next."""
    original = CompressedSum.__init__

    def init(self: CompressedSum, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        assert self.residual is not None
        self.residual.zero_()

    CompressedSum.__init__ = init  # type: ignore[method-assign]


def loss_of_one_rank() -> None:
    """Gradients agree; the loss that is told is the own one."""
    original = StepMetadata.read

    def read(self: StepMetadata) -> Any:
        agreed, touched, moved = original(self)
        return agreed._replace(sums=agreed.sums[:1], weights=agreed.weights[:1]), touched, moved

    StepMetadata.read = read  # type: ignore[method-assign]


def first_weights_differ() -> None:
    """And no digest of them ends the run before its first step is compared."""
    original = trainer.Trainer._settle

    def settle(self: trainer.Trainer, mesh: Any) -> None:
        original(self, mesh)
        if mesh.rank == 1:
            with torch.no_grad():
                for module in self.model.modules():
                    if isinstance(module, nn.Linear):
                        module.bias.add_(0.01)

    trainer.Trainer._settle = settle  # type: ignore[method-assign]
    compare_no_digests()


def applied_twice() -> None:
    """A server steps on the third update again."""
    original = ServerShard.apply
    calls: list[int] = []

    def apply(self: ServerShard, *what: Any) -> None:
        original(self, *what)
        calls.append(1)
        if len(calls) == 3:
            original(self, *what)

    ServerShard.apply = apply  # type: ignore[method-assign]


def a_row_forgotten() -> None:
    """A worker leaves the first row of a table out of what it pushes."""
    original = WorkerLookups._gradient

    def gradient(self: WorkerLookups, table: int) -> torch.Tensor | None:
        found = original(self, table)
        if found is not None and found._nnz():
            found._values()[0] = 0.0
        return found

    WorkerLookups._gradient = gradient  # type: ignore[method-assign]


def rows_before_the_step() -> None:
    """Workers read rows as they were when they greeted the server."""
    original, first = SharedTables.rows, dict[tuple[int, int], torch.Tensor | None]()

    def rows(self: SharedTables, table: int, server: int, batch: int) -> torch.Tensor | None:
        found = original(self, table, server, batch)
        return first.setdefault((table, server), None if found is None else found.clone())

    SharedTables.rows = rows  # type: ignore[method-assign]


BUGS: dict[str, Callable[[], None]] = {
    "missing average": missing_average,
    "clip norm of one bucket": clip_norm_of_one_bucket,
    "clip norm summed over ranks": clip_norm_summed_over_ranks,
    "clip before the exchange": clip_before_the_exchange,
    "seeds of the rank": seeds_of_the_rank,
    "buffers of one rank": buffers_of_one_rank,
    "buffers stay local": buffers_stay_local,
    "parameter left out": parameter_left_out,
    "peer left out": peer_left_out,
    "chunk stepped on twice": chunk_stepped_on_twice,
    "small gradient off": last_gradient_times(1.01),
    "small gradient missing": last_gradient_times(0.0),
    "sample lost": sample_lost,
    "slow rank": slow_rank,
    "last bits off": last_bits_off,
    "mask as numbers": mask_as_numbers,
    "weight as a mean": weight_as_a_mean,
    "last piece lost": last_piece_lost,
    "rate of the rank": rate_of_the_rank,
    "second phase lost": second_phase_lost,
    "draws of the first phase": draws_of_the_first_phase,
    "NaN in the last step": poison_one_rank(5),
    "NaN on the way": poison_one_rank(2),
    "frozen weight drifts": frozen_weight_drifts,
    "silence": silence,
    "talks all the time": talks_all_the_time,
    "loses what packing drops": loses_what_packing_drops,
    "forgets to average": forgets_to_average,
    "loss of one rank": loss_of_one_rank,
    "first weights differ": first_weights_differ,
    "applied twice": applied_twice,
    "a row forgotten": a_row_forgotten,
    "rows before the step": rows_before_the_step,
}
