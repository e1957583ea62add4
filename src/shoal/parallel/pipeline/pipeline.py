"""Rounds of microbatches through the stages of a pipeline, by PyTorch's schedules.

Every rank holds the parameters of its stages and is given the inputs of every microbatch; what
stages compute travels from one to the next, gradients travel back. The order of work is
PyTorch's: gpipe, 1f1b, interleaved, zero-bubble, zbv. Gradients are those of the undivided model.

Not for groups that a single process could serve: with few microbatches most ranks wait. Cost, per
rank and microbatch: the bytes of the values that cross its cuts, forward and again backward.
Papers: GPipe (1811.06965), PipeDream-Flush (2006.09503), Megatron interleaved (2104.04473),
zero bubble (2401.10241). Read next: `skim.py`.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from shoal.comm.collectives import Group, loss_of_group
from shoal.errors import GroupLost, PlanError
from shoal.logs import warn_once
from shoal.parallel.pipeline.calls import Gate
from shoal.parallel.pipeline.scheduled import Around, Hooks, NoHooks, Raised, Round, ScheduledStage
from shoal.parallel.pipeline.skim import Stage
from shoal.parallel.pipeline.stages import (
    StagePlan,
    rank_of_stage,
    record,
    recut,
)
from shoal.parallel.pipeline.tape import signature
from shoal.plan_rules import fits_schedule

MAX_FORMS = 8  # of inputs whose tapes and buffers are kept
_CLASSES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


class _Form:
    """The stages for inputs of one form, and the schedules made of them."""

    def __init__(self, plan: StagePlan, stages: dict[int, Stage]):
        self.plan, self.stages = plan, stages
        self.schedules: dict[tuple[str, int], Any] = {}


class Pipeline:
    """One rank's part of a pipeline. Every rank of `group` calls `run` and `forward` alike."""

    def __init__(
        self,
        model: nn.Module,
        plan: StagePlan,
        *,
        schedule: str,
        group: Group,
        device: str,
        call: Callable[[nn.Module, Any], Any],
        hooks: Hooks | None = None,
        around: Around | None = None,
    ):
        self.model, self.plan, self.schedule, self.group = model, plan, schedule, group
        self.device = torch.device(device)
        self.round = Round(model, group, call, hooks or NoHooks(), around or Around())
        self.num_stages = len(plan.stages)
        if self.num_stages % group.num_ranks:
            raise PlanError(
                f"{self.num_stages} stages do not go round {group.num_ranks} ranks. Every rank "
                "runs as many. Use a multiple of the ranks."
            )
        self.own_stages = [s for s in range(self.num_stages) if self.rank_of(s) == group.rank]
        self.holds_last = self.num_stages - 1 in self.own_stages
        self.owners = [set(stage.parameters) for stage in plan.stages]
        self._gate = Gate(model)
        self._forms: OrderedDict[Any, _Form] = OrderedDict()
        self._forms[plan.tape.signature] = self._make_form(plan)
        self._sending: list[tuple[Any, Tensor]] = []

    def rank_of(self, stage: int) -> int:
        return rank_of_stage(stage, self.group.num_ranks, self.schedule)

    def close(self) -> None:
        """Take the gate away from the model. What evaluation sent has left, or never will."""
        with suppress(GroupLost):
            self._drain()
        self._sending.clear()
        self._gate.close()

    def run(self, inputs: Sequence[Any], loss: Callable[[Any, int], Tensor]) -> None:
        """Forward and backward of one round. `loss(output, microbatch)` is what backward starts
        from, and is asked on the rank of the last stage only."""
        self._drain()
        self.round.inputs, self.round.loss = dict(enumerate(inputs)), loss
        try:
            for first, part in self._alike(inputs):
                self.round.first = first
                self._step(self._schedule_of(self._form_of(part), len(part)), len(part))
        finally:
            self.round.inputs, self.round.loss = {}, None

    def forward(self, inputs: Any) -> Any:
        """The model's output on the rank of the last stage, None elsewhere."""
        with torch.no_grad():
            form = self._form_of([inputs])
            output, local = None, None
            for index in self.own_stages:
                stage = form.stages[index]
                received = local if local is not None else self._receive(form.plan, index)
                with self.round.around.context():
                    output = stage(partial(self.round.call, self.model, inputs), received)
                    output = self.round.around.whole(output)
                local = None
                if index + 1 in self.own_stages:
                    local = output
                elif index + 1 < self.num_stages:
                    self._send(output, index + 1)
        return output if self.holds_last else None

    def _step(self, schedule: Any, count: int) -> None:
        stages = getattr(schedule, "_stages", None) or [schedule._stage]
        for stage in stages:
            stage.has_backward = True
            stage.clear_runtime_states()
        try:
            with loss_of_group("running the pipeline"):
                schedule._step_microbatches(
                    target_mbs=list(range(count)) if self.holds_last else None,
                    return_outputs=False,
                )
        except Raised as raised:
            raise raised.error from raised.error.__cause__

    def _alike(self, inputs: Sequence[Any]) -> list[tuple[int, Sequence[Any]]]:
        """Parts that one schedule can take: all microbatches, or each by itself."""
        forms = {self._signature(x) for x in inputs}
        if len(forms) < 2:
            return [(0, inputs)] if inputs else []
        warn_once(
            "The microbatches of a round differ in shape, so they go through the pipeline one at "
            "a time and ranks wait for each other. Pad them to one shape to use the schedule."
        )
        return [(i, [x]) for i, x in enumerate(inputs)]

    def _signature(self, inputs: Any) -> Any:
        args, kwargs = self.round.call(_Arguments(), inputs)
        return signature(self.model, args, kwargs)

    def _form_of(self, inputs: Sequence[Any]) -> _Form:
        key = self._signature(inputs[0])
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = self._make_form(self._recorded(inputs))
            if len(self._forms) > MAX_FORMS:
                self._forms.popitem(last=False)
        self._forms.move_to_end(key)
        return form

    def _recorded(self, inputs: Sequence[Any]) -> StagePlan:
        """The stages for inputs of a new form, with the parameters where they are."""
        tape = self.plan.tape
        forwards = [partial(self.round.call, self.model, one) for one in inputs[:2]]
        around = self.round.around
        with around.alone(), around.context():  # outside of what records, as when a stage runs
            made = record(self.model, forwards, self.num_stages, tape.seeds, like=tape)
        return recut(made, self.owners)

    def _make_form(self, plan: StagePlan) -> _Form:
        last = self.num_stages - 1
        stages = {
            i: Stage(self._gate, plan.tape, plan.stages[i], i == last) for i in self.own_stages
        }
        return _Form(plan, stages)

    def _schedule_of(self, form: _Form, num_microbatches: int) -> Any:
        name = self._fitting(num_microbatches)
        key = name, num_microbatches
        if key not in form.schedules:
            stages = [
                ScheduledStage(self.round, form.plan, stage, self.device)
                for stage in form.stages.values()
            ]
            made = _CLASSES[name](
                stages[0] if issubclass(_CLASSES[name], PipelineScheduleSingle) else stages,
                num_microbatches,
                loss_fn=lambda loss, _: loss,
                scale_grads=False,
            )
            form.schedules[key] = made
        return form.schedules[key]

    def _fitting(self, num_microbatches: int) -> str:
        """The schedule, or one with the same places that takes fewer microbatches."""
        if fits_schedule(self.schedule, self.group.num_ranks, num_microbatches):
            return self.schedule
        if num_microbatches > 1:
            warn_once(
                f"schedule={self.schedule} does not take the {num_microbatches} microbatches of a "
                "short round, so another one runs it."
            )
        return "gpipe" if self.schedule == "1f1b" else "interleaved"

    def _receive(self, plan: StagePlan, index: int) -> list[Tensor]:
        values = [plan.tape.values[number] for number in plan.stages[index].received]
        tensors = [torch.empty(v.sent_shape, dtype=v.dtype, device=self.device) for v in values]
        with loss_of_group(f"receiving for stage {index}"):
            source = self.rank_of(index - 1)
            works = [
                dist.irecv(t, group=self.group.handle, group_src=source) for t in tensors if index
            ]
            for work in works:
                assert work is not None
                work.wait()
        return tensors

    def _send(self, tensors: Sequence[Tensor], stage: int) -> None:
        self._drain()
        with loss_of_group(f"sending to stage {stage}"):
            target = self.rank_of(stage)
            for tensor in tensors:
                work = dist.isend(tensor, group=self.group.handle, group_dst=target)
                self._sending.append((work, tensor))
                self.group.bytes_sent += tensor.nbytes

    def _drain(self) -> None:
        """Wait until what evaluation sent has left."""
        with loss_of_group("sending to the next stage"):
            while self._sending:
                self._sending.pop(0)[0].wait()


class _Arguments(nn.Module):
    """Stands in for a model to see what it would be called with."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs
