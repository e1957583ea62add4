"""THE order in which a model is cut: recompute, pipeline, tensor, ZeRO 3.

`survey` examines the whole model once, before ranks exist, and decides which rank holds what; a
plan that cannot work is refused there. `ParallelModel` then cuts this rank's copy in place, with
every parameter under its own name, and runs it. ZeRO 1 and 2 do not cut the model: they are
strategies (`sync/zero.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.mesh import Mesh
from shoal.errors import PlanError
from shoal.numerics.optimizers import ParameterPart, swap_parameters
from shoal.numerics.randomness import PieceSeeds
from shoal.parallel import fsdp
from shoal.parallel.layout import LocalLayout, Slice, part_of, slices
from shoal.parallel.pipeline.pipeline import Pipeline, PipelineOptions
from shoal.parallel.pipeline.placeholders import drop_unowned
from shoal.parallel.pipeline.scheduled_stage import PipelineHooks, StageContext
from shoal.parallel.pipeline.stages import StagePlan, rank_of_stage, record, split_stages
from shoal.parallel.recompute import RecomputeContext, blocks_to_recompute, recompute
from shoal.parallel.replaced_parameters import retire_replaced
from shoal.parallel.tensor.cutting import (
    TensorForward,
    TensorPlan,
    cut_tensors,
    find_cuts,
    mark_cut_parameters,
)
from shoal.plans.plan import Plan


@dataclass(frozen=True)
class Survey:
    """What a plan does to a model, found before it is done."""

    tensor: TensorPlan | None = None
    stages: StagePlan | None = None
    # What recomputed blocks run in.
    recompute_context: RecomputeContext = field(default_factory=RecomputeContext)

    def held_at(
        self, plan: Plan, pipeline: int, tensor: int, named: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """What a rank in this place holds of the whole model's parameters."""
        if self.stages is not None:
            rank_of = partial(rank_of_stage, num_ranks=plan.pipeline, schedule=plan.schedule)
            stages = self.stages.stages
            owned = self.stages.held_by([s.index for s in stages if rank_of(s.index) == pipeline])
            named = {name: p for name, p in named.items() if name in owned}
        cuts = {} if self.tensor is None else self.tensor.cuts
        return {
            name: part_of(p, cuts[name], tensor, plan.tensor) if name in cuts else p
            for name, p in named.items()
        }


def survey(
    model: nn.Module,
    plan: Plan,
    forwards: Sequence[Callable[[], Any]],
    seeds: PieceSeeds,
    overrides: Mapping[str, str],
) -> Survey:
    """Decide where to cut. Each of `forwards` runs the model on other example inputs."""
    recompute_context, tensor, stages = RecomputeContext(), None, None
    if plan.zero == 3:
        fsdp.refuse_hooks(model)
    if plan.recompute == "blocks":
        recompute(blocks_to_recompute(model), recompute_context)
    if plan.pipeline > 1:
        num_stages = plan.pipeline * plan.num_stages
        rank_of = partial(rank_of_stage, num_ranks=plan.pipeline, schedule=plan.schedule)
        tape = record(model, forwards, num_stages, seeds, rank_of=rank_of)
        stages = split_stages(tape, num_stages, rank_of)
    if plan.tensor > 1:
        tensor = find_cuts(model, forwards, plan.tensor, overrides)
        _refuse_hooks_of_cut(model, plan, tensor)
    if plan.zero == 3:
        fsdp.refuse_mixed(
            model, _units(model, {name for name, _ in model.named_parameters()}, tensor, stages)
        )
    return Survey(tensor, stages, recompute_context)


def _refuse_hooks_of_cut(model: nn.Module, plan: Plan, found: TensorPlan) -> None:
    """Parts take the place of parameters and of what goes through modules, without their hooks."""
    hooked = {f"The parameter {n}" for n, p in model.named_parameters() if fsdp.has_hooks(p)}
    hooked &= {f"The parameter {name}" for name in found.cuts}
    for name in found.crossed:
        module = model.get_submodule(name)
        if module._backward_hooks or module._backward_pre_hooks:
            hooked.add(f"The module {name}".strip())
    if hooked:
        raise PlanError(
            f"{min(hooked)} has a backward hook of its own, and tensor={plan.tensor} cuts it: a "
            "hook would not be called, or see parts. Leave its matrices whole (cuts of the Run), "
            "or use data, zero=1, zero=2 or pipeline."
        )


def _units(
    model: nn.Module, owned: set[str], tensor: TensorPlan | None, stages: StagePlan | None
) -> list[nn.Module]:
    """What FSDP2 gathers at a time."""
    # It follows a unit's inputs and outputs through autograd, and cannot follow cut ones.
    but = set() if tensor is None else {model.get_submodule(n) for n in tensor.crossed}
    return fsdp.units(model, owned, but, whole_model=stages is None)


class ParallelModel:
    """The model as this rank holds it. Call `settle` with every new mesh before it runs."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        mesh: Mesh,
        found: Survey,
        call: Callable[[nn.Module, Any], Any],
    ):
        self.model, self.plan, self.stages, self._call = model, plan, found.stages, call
        self._recompute_context = found.recompute_context
        self._tensor: TensorForward | None = None
        self.pipeline: Pipeline | None = None
        true = dict(model.named_parameters())
        shapes = {n: tuple(t.shape) for n, t in [*true.items(), *model.named_buffers()]}
        self.holding = LocalLayout(
            shapes=shapes,
            rank=mesh.tensor.rank,
            num_ranks=plan.tensor,
            pipeline=mesh.pipeline.rank,
        )
        self.owned = set(true)
        if found.stages is not None:
            self._keep_own_stages(found.stages, mesh)
        if found.tensor is not None:
            self._cut_tensors(found.tensor, mesh)
        if plan.zero == 3:
            self._shard_parameters(mesh, found.tensor)
        now = dict(self.model.named_parameters(remove_duplicate=False))
        swap_parameters(optimizer, partial(self._stand_in, {p: n for n, p in true.items()}, now))
        retire_replaced(model, true, plan)

    def settle(
        self,
        mesh: Mesh,
        hooks: PipelineHooks,
        arithmetic: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Use a new mesh; the pipeline calls `hooks`."""
        self._arithmetic = arithmetic
        if self.plan.tensor > 1:
            self._tensor = self._recompute_context.mode = TensorForward(mesh.tensor)
        if self.stages is not None:
            self.close()
            self.pipeline = Pipeline(
                self.model,
                self.stages,
                mesh.pipeline,
                PipelineOptions(
                    self.plan.schedule,
                    mesh.device,
                    self._call,
                    hooks,
                    StageContext(
                        self._around_stage, self._whole, partial(fsdp.without_fsdp, self.model)
                    ),
                ),
            )

    def close(self) -> None:
        """Wait for messages between stages. Call before the group is left."""
        if self.pipeline is not None:
            self.pipeline.close()

    def forward(self, inputs: Any) -> Any:
        """The model's output for one piece's inputs, whole on every rank; not for a pipeline."""
        if self._tensor is None:
            return self._call(self.model, inputs)
        with self._tensor:
            return self._tensor.whole(self._call(self.model, inputs))

    def held(self) -> dict[str, list[Slice]]:
        """This rank's parameters and buffers, as parts of the whole model's."""
        parameters = fsdp.held_parameters(self.model)
        return slices(parameters | dict(self.model.named_buffers()), self.holding)

    def _keep_own_stages(self, stages: StagePlan, mesh: Mesh) -> None:
        """Let go of the parameters that only other ranks' stages use."""
        rank_of = partial(
            rank_of_stage, num_ranks=mesh.pipeline.num_ranks, schedule=self.plan.schedule
        )
        own = [s.index for s in stages.stages if rank_of(s.index) == mesh.pipeline.rank]
        self.owned = stages.held_by(own)
        self.holders = {n: sorted({rank_of(s) for s in h}) for n, h in stages.holders.items()}
        first = {name: rank_of(users[0]) for name, users in stages.holders.items()}
        elsewhere = {n for n in self.owned if first[n] != mesh.pipeline.rank}
        ours = {name for s in own for name in stages.stages[s].buffers}
        theirs = {name for s in stages.stages for name in s.buffers}
        absent = (theirs - ours) | {n for n, _ in self.model.named_parameters()} - self.owned
        self.holding = self.holding._replace(
            elsewhere=frozenset(elsewhere),
            absent=frozenset(absent),
            holders={n: tuple(ranks) for n, ranks in self.holders.items() if len(ranks) > 1},
        )
        drop_unowned(self.model, self.owned)

    def _cut_tensors(self, plan: TensorPlan, mesh: Mesh) -> None:
        absent = self.holding.absent
        cuts = {name: cut for name, cut in plan.cuts.items() if name not in absent}
        cut_tensors(self.model, replace(plan, cuts=cuts), mesh.tensor.rank, self.plan.tensor)
        self.holding = self.holding._replace(cuts=cuts)

    def _shard_parameters(self, mesh: Mesh, tensor: TensorPlan | None) -> None:
        units = _units(self.model, self.owned, tensor, self.stages)
        fsdp.shard_parameters(self.model, units, mesh.data, mesh.device)
        self.holding = self.holding._replace(within=fsdp.shard_boxes(self.model, mesh.data))
        for unit in units if self.plan.tensor > 1 else ():
            # Gathered parameters are other objects than the ones that were marked.
            unit.register_forward_pre_hook(lambda module, _: mark_cut_parameters(module))

    def _stand_in(
        self, names: Mapping[nn.Parameter, str], now: Mapping[str, nn.Parameter], old: nn.Parameter
    ) -> list[ParameterPart] | None:
        """What the optimizer steps on instead of a true parameter."""
        name = names[old]
        if name not in self.owned:
            return []
        held = now[name]
        return None if held is old else [ParameterPart(held, partial(self._take, name))]

    def _take(self, name: str, tensor: Tensor) -> Tensor:
        """The part of a whole tensor that this rank holds under that name."""
        holding = self.holding
        if name in holding.cuts:
            tensor = part_of(tensor, holding.cuts[name], holding.rank, holding.num_ranks)
        return holding.within[name].of(tensor) if name in holding.within else tensor

    @contextmanager
    def _around_stage(self) -> Iterator[None]:
        with self._arithmetic():
            if self._tensor is None:
                yield
            else:
                with self._tensor:
                    yield

    def _whole(self, output: Any) -> Any:
        return output if self._tensor is None else self._tensor.whole(output)
