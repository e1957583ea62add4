"""The tensor axis of a plan: what is cut and how, what stays whole and why, what is sent.

Messages are counted on a dry run: the model is cut as rank 0 would cut it and runs one piece, stage
by stage, on a group that counts and sends nothing. Values are meaningless, shapes are right; where
control flow depends on data (experts), the counts are those of this piece.

Cost: one forward and one backward pass of a piece.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from shoal.comm.collectives import Group, Pending, bytes_of_all_reduce
from shoal.numerics.precision import PrecisionSchedule
from shoal.parallel.pipeline.calls import CallInterceptor
from shoal.parallel.pipeline.stage_runner import StageRunner
from shoal.parallel.pipeline.stages import StagePlan
from shoal.parallel.tensor.cutting import TensorForward, TensorPlan, cut_tensors
from shoal.parallel.tensor.summary import CutRow, grouped
from shoal.plans.plan import Plan
from shoal.sync.rank_layout import PlanFacts
from shoal.training.build import BuiltModel
from shoal.training.run import Run, call_model, objective


class TensorTraffic(msgspec.Struct):
    """The messages over the tensor axis for one piece in one stage, counted on a dry run."""

    num_forward: int = 0
    forward_bytes: int = 0
    num_backward: int = 0
    backward_bytes: int = 0


class TensorCuts(msgspec.Struct, frozen=True):
    rows: list[CutRow]
    share: float  # of the parameters that are cut
    moves: TensorTraffic  # for one piece, over all stages


class CountingGroup(Group):
    """A tensor-parallel group with one real rank: it counts what would be sent."""

    def __init__(self, num_ranks: int):
        super().__init__()
        self.num_ranks = num_ranks
        self.count = 0

    def all_reduce(self, tensor: Tensor) -> Pending:
        self.count += 1
        self.bytes_sent += bytes_of_all_reduce(tensor.nbytes, self.num_ranks)
        return Pending()

    def all_gather_shards(self, shards: Sequence[Tensor]) -> Pending:
        self.count += 1
        self.bytes_sent += shards[self.rank].nbytes * (self.num_ranks - 1)
        for shard in shards:
            shard.copy_(shards[self.rank])
        return Pending()

    def take_counts(self) -> tuple[int, int]:
        """The messages and bytes since the last call."""
        answer = self.count, self.bytes_sent
        self.count = self.bytes_sent = 0
        return answer


def count_tensor_traffic(
    run: Run, plan: Plan, prepared: BuiltModel, piece: Any
) -> dict[int, TensorTraffic]:
    """Cut the model as rank 0 would, run one piece and count. Do not use the model afterwards."""
    model, survey = prepared.model, prepared.survey
    assert survey.tensor is not None
    cut_tensors(model, survey.tensor, 0, plan.tensor)
    line = CountingGroup(plan.tensor)
    forward = survey.recompute_context.mode = TensorForward(line)
    gate, moves = CallInterceptor(model), {}
    prepared.seeds.enter(0, 0)

    def run_part(stage: StageRunner | None, received: Sequence[Tensor]) -> Any:
        with PrecisionSchedule.parse(plan.precision).lowest.autocast("cpu"), forward:
            if stage is None:
                return forward.whole(call_model(model, piece.inputs))
            output = stage(lambda: call_model(model, piece.inputs), received)
            return forward.whole(output)

    try:
        for stage, received in _parts(gate, survey.stages):
            output = run_part(stage, received)
            sent = line.take_counts()
            if stage is None or stage.is_last:
                objective(run, output, piece).tensor.backward()
            else:
                tensors = [t for t in tree_leaves(output) if t.requires_grad]
                torch.autograd.backward(tensors, [torch.ones_like(t) for t in tensors])
            moves[stage.spec.index if stage else 0] = TensorTraffic(*sent, *line.take_counts())
    finally:
        gate.close()
    return moves


def _parts(
    gate: CallInterceptor, found: StagePlan | None
) -> Iterator[tuple[StageRunner | None, Sequence[Tensor]]]:
    """Each stage with zeros as its inputs; or the whole model."""
    if found is None:
        yield None, ()
        return
    values = found.tape.values
    for spec in found.stages:
        received = [
            torch.zeros(values[n].sent_shape, dtype=values[n].dtype).requires_grad_(
                n in found.tape.need_gradient
            )
            for n in spec.received
        ]
        yield StageRunner(gate, found.tape, spec, spec is found.stages[-1]), received


def cuts_of(
    plan: TensorPlan, facts: PlanFacts, by_stage: Mapping[int, TensorTraffic], total: int
) -> TensorCuts:
    moves = list(by_stage.values())
    cut = sum(math.prod(p.shape) for p in facts.parameters if p.name in plan.cuts)
    return TensorCuts(
        grouped(plan.table()),
        cut / total,
        TensorTraffic(
            sum(m.num_forward for m in moves),
            sum(m.forward_bytes for m in moves),
            sum(m.num_backward for m in moves),
            sum(m.backward_bytes for m in moves),
        ),
    )
