"""Rounds of microbatches through the stages of a pipeline.

Every rank holds the parameters of its stages and is given the inputs of every microbatch; what
stages compute travels from one to the next, gradients travel back. The order of work is that of
gpipe, 1f1b, interleaved, zero-bubble or zbv. Gradients are those of the undivided model.

Not for groups that a single process could serve: with few microbatches most ranks wait. Cost, per
rank and microbatch: the bytes of the values that cross its cuts, forward and again backward. Read
next: `schedules.py` for the order, `scheduled_stage.py` for its actions, `stage_runner.py` for how
a stage runs.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.comm.collectives import Group
from shoal.errors import GroupLost, PlanError
from shoal.logs import warn_once
from shoal.parallel.pipeline.calls import CallInterceptor
from shoal.parallel.pipeline.messages import Messages
from shoal.parallel.pipeline.scheduled_stage import (
    PipelineHooks,
    RoundState,
    ScheduledStage,
    StageContext,
    forms_of,
    link_neighbours,
)
from shoal.parallel.pipeline.schedules import Action, order_work, post_receives_early, with_receives
from shoal.parallel.pipeline.stage_runner import StageRunner
from shoal.parallel.pipeline.stages import StagePlan, rank_of_stage, record, recut
from shoal.parallel.pipeline.tape import signature
from shoal.plans.rules import fits_schedule

MAX_FORMS = 8  # of inputs whose tapes and stages are kept
Step = tuple[Callable[[int], None], int]  # what a stage does, and for which microbatch


class _Form:
    """The stages for inputs of one form, and the steps of a round by its number of microbatches."""

    def __init__(self, plan: StagePlan, stages: dict[int, StageRunner]):
        self.plan, self.stages = plan, stages
        self.steps: dict[int, list[Step]] = {}


class PipelineOptions(NamedTuple):
    """How microbatches go through the stages, and what is done around them."""

    schedule: str
    device: str
    call: Callable[[nn.Module, Any], Any]
    hooks: PipelineHooks = PipelineHooks()
    stage_context: StageContext = StageContext()


class Pipeline:
    """One rank's part of a pipeline. Every rank of `group` calls `run` and `forward` alike."""

    def __init__(self, model: nn.Module, plan: StagePlan, group: Group, options: PipelineOptions):
        self.model, self.plan, self.group = model, plan, group
        self.schedule, self.device = options.schedule, torch.device(options.device)
        self.messages = Messages(group, self.device)
        self.round = RoundState(
            model, self.messages, options.call, options.hooks, options.stage_context
        )
        self.num_stages = len(plan.stages)
        if self.num_stages % group.num_ranks:
            raise PlanError(
                f"{self.num_stages} stages do not go round {group.num_ranks} ranks. Every rank "
                "runs as many. Use a multiple of the ranks."
            )
        self.own_stages = [s for s in range(self.num_stages) if self.rank_of(s) == group.rank]
        self.holds_last = self.num_stages - 1 in self.own_stages
        self.owners = [set(stage.parameters) for stage in plan.stages]
        self._interceptor = CallInterceptor(model)
        self._forms: OrderedDict[Any, _Form] = OrderedDict()
        self._forms[plan.tape.signature] = self._make_form(plan)

    def rank_of(self, stage: int) -> int:
        return rank_of_stage(stage, self.group.num_ranks, self.schedule)

    def close(self) -> None:
        """Remove the interceptor from the model, after what was sent has left."""
        with suppress(GroupLost):
            self.messages.drain()
        self.messages.forget()
        self._interceptor.close()

    def run(self, inputs: Sequence[Any], loss: Callable[[Any, int], Tensor]) -> None:
        """Forward and backward of one round. `loss(output, microbatch)` is what backward starts
        from, and is asked on the rank of the last stage only."""
        self.round.inputs, self.round.loss = dict(enumerate(inputs)), loss
        try:
            for first, part, key in self._alike(inputs):
                self.round.first = first
                for work, microbatch in self._steps_of(self._form_of(part, key), len(part)):
                    work(microbatch)
            self.messages.drain()
        except BaseException:
            self.messages.forget()
            for form in self._forms.values():
                form.steps.clear()  # their stages hold what the round left behind
            raise
        finally:
            self.round.inputs, self.round.loss = {}, None

    def forward(self, inputs: Any) -> Any:
        """The model's output on the rank of the last stage, None elsewhere."""
        with torch.no_grad():
            form = self._form_of([inputs], self._signature(inputs))
            output, local = None, None
            for index in self.own_stages:
                stage = form.stages[index]
                received = self._receive(form.plan, index) if local is None else local
                with self.round.stage_context.context():
                    output = stage(partial(self.round.call, self.model, inputs), received)
                    output = self.round.stage_context.whole(output)
                local = None
                if index + 1 in self.own_stages:
                    local = output
                elif index + 1 < self.num_stages:
                    self.messages.send(output, self.rank_of(index + 1))
        return output if self.holds_last else None

    def _alike(self, inputs: Sequence[Any]) -> list[tuple[int, Sequence[Any], Any]]:
        """Parts that one schedule can take, with their form: all microbatches, or each alone."""
        forms = [self._signature(x) for x in inputs]
        if all(form == forms[0] for form in forms):
            return [(0, inputs, forms[0])] if inputs else []
        warn_once(
            "The microbatches of a round differ in shape, so they go through the pipeline one at "
            "a time and ranks wait for each other. Pad them to one shape to use the schedule."
        )
        return [(i, [x], form) for i, (x, form) in enumerate(zip(inputs, forms))]

    def _signature(self, inputs: Any) -> Any:
        args, kwargs = self.round.call(_ARGUMENTS, inputs)
        return signature(self.model, args, kwargs)

    def _form_of(self, inputs: Sequence[Any], key: Any) -> _Form:
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
        stage_context = self.round.stage_context
        # Outside of what records, as when a stage runs.
        with stage_context.alone(), stage_context.context():
            made = record(self.model, forwards, self.num_stages, tape.seeds, like=tape)
        return recut(made, self.owners)

    def _make_form(self, plan: StagePlan) -> _Form:
        last = self.num_stages - 1
        stages = {
            i: StageRunner(self._interceptor, plan.tape, plan.stages[i], i == last)
            for i in self.own_stages
        }
        return _Form(plan, stages)

    def _steps_of(self, form: _Form, num_microbatches: int) -> list[Step]:
        if num_microbatches not in form.steps:
            stages = {index: self._scheduled(form, index) for index in self.own_stages}
            link_neighbours(stages)
            form.steps[num_microbatches] = [
                (work, action.microbatch)
                for action in self._order(num_microbatches)
                if (work := stages[action.stage].method_for(action.kind)) is not None
            ]
        return form.steps[num_microbatches]

    def _scheduled(self, form: _Form, index: int) -> ScheduledStage:
        before, after = self.rank_of(index - 1), self.rank_of(index + 1)
        return ScheduledStage(self.round, form.plan, form.stages[index], before, after)

    def _order(self, num_microbatches: int) -> list[Action]:
        """What this rank does."""
        stages_of_rank: list[list[int]] = [[] for _ in range(self.group.num_ranks)]
        for stage in range(self.num_stages):
            stages_of_rank[self.rank_of(stage)].append(stage)
        work = order_work(self._fitting(num_microbatches), stages_of_rank, num_microbatches)
        actions = with_receives(work)[self.group.rank]
        # Of Gloo's receives several may wait; one of NCCL's holds up what is posted after it.
        return post_receives_early(actions) if self.device.type == "cpu" else actions

    def _fitting(self, num_microbatches: int) -> str:
        """The schedule, or one that takes any number of microbatches."""
        if fits_schedule(self.schedule, self.group.num_ranks, num_microbatches):
            return self.schedule
        if num_microbatches > 1:
            warn_once(
                f"schedule={self.schedule} does not take the {num_microbatches} microbatches of a "
                "short round, so gpipe runs it."
            )
        return "gpipe"

    def _receive(self, plan: StagePlan, index: int) -> list[Tensor]:
        if index == 0:
            return []
        forms = forms_of(plan.tape, plan.stages[index].received)
        return self.messages.wait(self.messages.receive(forms, self.rank_of(index - 1)))


class _Arguments(nn.Module):
    """Called in the place of a model, to get its arguments."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs


_ARGUMENTS = _Arguments()
