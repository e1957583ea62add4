"""The actions of a stage: forward, backward and receives, in the order of `schedules.py`.

Each kind of action is a method of `ScheduledStage`. A stage runs the model's forward on the
microbatch's own inputs, and sends its outputs before anything else. What it received are leaves, so
that a backward ends there. The loss is part of the last stage's forward, so that a model may return
anything. What a microbatch keeps is let go with its backward.
"""

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.distributed.pipelining._backward import stage_backward_input
from torch.utils.hooks import RemovableHandle

from shoal.events.tracing import TRACER
from shoal.parallel.pipeline.cuts import StagePlan
from shoal.parallel.pipeline.messages import Messages, PendingReceive, TensorForm
from shoal.parallel.pipeline.placeholders import in_use_by
from shoal.parallel.pipeline.schedules import ActionKind
from shoal.parallel.pipeline.stage_runner import StageRunner
from shoal.parallel.pipeline.tape import Tape


class PipelineHooks:
    """Called by `Pipeline.run` on this rank, in the schedule's order, for this rank's stages.

    These do nothing: gradients add up in p.grad.
    """

    def enter(self, microbatch: int, block: int) -> None:
        """A stage's forward of this microbatch comes next: set seeds and buffers."""

    def leave(self, stage: int, microbatch: int) -> None:
        """That forward is done; on the last stage the loss comes next."""

    def back(self, microbatch: int) -> None:
        """A stage's backward of this microbatch comes next; it may compute forward again."""

    def computed(self, stage: int, microbatch: int) -> None:
        """p.grad of the stage's parameters holds all that this microbatch adds to it."""


class StageContext(NamedTuple):
    """The context of a stage's forward, and how its outputs become plain tensors.

    `alone` is for a forward that is only recorded, which not every replica may need to make.
    """

    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    whole: Callable[[Any], Any] = lambda output: output
    alone: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass
class RoundState:
    """What the stages of a rank share, and what they work on at present."""

    model: nn.Module
    messages: Messages
    call: Callable[[nn.Module, Any], Any]
    hooks: PipelineHooks
    stage_context: StageContext
    inputs: Mapping[int, Any] = field(default_factory=dict)  # by microbatch
    loss: Callable[[Any, int], Tensor] | None = None
    first: int = 0  # the microbatch that the schedule knows as its first


class ScheduledStage:
    """A stage with the microbatches that are in it. `before` and `after` are its neighbours' ranks.

    A neighbour on the same rank is handed things directly: see `link_neighbours`.
    """

    def __init__(
        self, round_: RoundState, plan: StagePlan, runner: StageRunner, before: int, after: int
    ):
        tape, spec = plan.tape, runner.spec
        self.round, self.spec, self.runner = round_, spec, runner
        self.before, self.after = before, after
        self.earlier: ScheduledStage | None = None
        self.later: ScheduledStage | None = None
        self.is_first, self.is_last = spec.index == 0, runner.is_last
        self.wanted = [number in tape.need_gradient for number in spec.received]
        self.given = [number in tape.need_gradient for number in spec.sent]
        self.forms = forms_of(tape, spec.received)
        self.forms_back = forms_of(tape, [n for n in spec.sent if n in tape.need_gradient])
        named = dict(round_.model.named_parameters())
        self.parameters = [named[name] for name in spec.parameters]
        # Nothing is left for later where nothing in the stage, nor before it, is trained.
        self.splits = spec.splits_backward and (self.is_last or any(self.given))
        # By microbatch: inputs on their way, inputs with outputs, gradients on their way, and what
        # the weights' part of a backward starts from.
        self._arriving: dict[int, PendingReceive] = {}
        self._kept: dict[int, tuple[list[Tensor], tuple[Tensor, ...]]] = {}
        self._returning: dict[int, PendingReceive] = {}
        self._for_later: dict[int, _WeightsPart] = {}

    def method_for(self, kind: ActionKind) -> Callable[[int], None] | None:
        """The method for an action, to call with the microbatch; None if there is nothing to do."""
        if kind in (ActionKind.INPUT, ActionKind.WEIGHT):
            if not self.splits:
                return self.backward if kind == ActionKind.INPUT else None
            if self.is_first:  # no stage waits for its input's gradient
                return self.backward if kind == ActionKind.WEIGHT else None
        method: Callable[[int], None] = {
            ActionKind.FORWARD: self.forward,
            ActionKind.BACKWARD: self.backward,
            ActionKind.INPUT: self.backward_input,
            ActionKind.WEIGHT: self.backward_weight,
            ActionKind.RECEIVE: self.receive,
            ActionKind.RECEIVE_BACK: self.receive_back,
        }[kind]

        def traced(microbatch: int) -> None:
            with TRACER.span(f"stage {self.spec.index} {kind.name.lower()}", "stage"):
                method(microbatch)

        return traced

    def receive(self, microbatch: int) -> None:
        self._arriving[microbatch] = self.round.messages.receive(self.forms, self.before)

    def receive_back(self, microbatch: int) -> None:
        self._returning[microbatch] = self.round.messages.receive(self.forms_back, self.after)

    def forward(self, microbatch: int) -> None:
        work, number = self.round, self.round.first + microbatch
        received = self._received(microbatch)
        work.hooks.enter(number, self.spec.block)
        with work.stage_context.context():
            output = self.runner(partial(work.call, work.model, work.inputs[number]), received)
            output = work.stage_context.whole(output)
        if not self.is_last:
            self._send_on(microbatch, output)
        work.hooks.leave(self.spec.index, number)
        if self.is_last:
            output = (self._loss(output, number),)
        self._kept[microbatch] = received, output

    def backward(self, microbatch: int) -> None:
        received, outputs = self._kept.pop(microbatch)
        gradients = self._gradients(microbatch)
        number = self.round.first + microbatch
        self.round.hooks.back(number)
        ends = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad]
        if ends:
            torch.autograd.backward([o for o, _ in ends], [g for _, g in ends])
        self._send_back(microbatch, received, [tensor.grad for tensor in received])
        self.round.hooks.computed(self.spec.index, number)

    def backward_input(self, microbatch: int) -> None:
        received, outputs = self._kept.pop(microbatch)
        gradients = self._gradients(microbatch)
        self.round.hooks.back(self.round.first + microbatch)
        hanging, ends = _split_outputs(received, outputs, gradients)
        try:
            found, groups = stage_backward_input(
                [output for output, _ in hanging],
                None if self.is_last else [g for _, g in hanging],  # type: ignore[misc]  # some None
                received,
                iter(self.parameters),
            )
        except RuntimeError as error:  # torch's, around the model's own
            own = error.__cause__ or error
            raise own from own.__cause__
        # The weights' gradients may be these very tensors, and are added to while they are sent.
        self._send_back(microbatch, received, [g if g is None else g.clone() for g in found])
        self._for_later[microbatch] = _WeightsPart(groups, ends)

    def backward_weight(self, microbatch: int) -> None:
        number = self.round.first + microbatch
        self.round.hooks.back(number)
        groups, ends = self._for_later.pop(microbatch)
        for group in groups:
            _backward_of_group(**group)
        if ends:
            edges, gradients = zip(*ends, strict=True)
            torch.autograd.backward(edges, gradients, retain_graph=True)
        self.round.hooks.computed(self.spec.index, number)

    def _received(self, microbatch: int) -> list[Tensor]:
        if self.is_first:
            return []
        tensors = self.round.messages.wait(self._arriving.pop(microbatch))
        for tensor, wanted in zip(tensors, self.wanted):
            if wanted:
                tensor.requires_grad_()
        return tensors

    def _loss(self, output: Any, number: int) -> Tensor:
        assert self.round.loss is not None
        with in_use_by("The loss"):
            loss = self.round.loss(output, number)
        # A split backward detaches it in place.
        return loss.clone() if loss._is_view() or loss.is_leaf else loss

    def _send_on(self, microbatch: int, output: Sequence[Tensor]) -> None:
        bare = [tensor.detach() for tensor in output]
        if self.later is None:
            self.round.messages.send(bare, self.after)
        else:
            self.later._arriving[microbatch] = PendingReceive(bare)

    def _gradients(self, microbatch: int) -> list[Tensor | None]:
        """Of the outputs; None where there is none, and for the loss."""
        if self.is_last:
            return [None]
        there = iter(self.round.messages.wait(self._returning.pop(microbatch)))
        return [next(there) if given else None for given in self.given]

    def _send_back(
        self, microbatch: int, received: Sequence[Tensor], found: Sequence[Tensor | None]
    ) -> None:
        """Give the stage before the gradients that it expects, zeros where there was no use."""
        if self.is_first:
            return
        gradients = [
            torch.zeros_like(tensor) if gradient is None else gradient.contiguous()
            for tensor, gradient, wanted in zip(received, found, self.wanted, strict=True)
            if wanted
        ]
        if self.earlier is None:
            self.round.messages.send(gradients, self.before)
        else:
            self.earlier._returning[microbatch] = PendingReceive(gradients)


class _WeightsPart(NamedTuple):
    """What the weights' part of a backward starts from."""

    groups: list[dict[str, Any]]  # by torch
    ends: list[tuple[GradientEdge, Tensor | None]]  # with their gradients


_Outputs = list[tuple[Tensor, Tensor | None]]  # with their gradients


def _split_outputs(
    received: Sequence[Tensor], outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> tuple[_Outputs, list[tuple[GradientEdge, Tensor | None]]]:
    """The outputs that hang on what was received, and the ends of those that only weights lead to,
    such as a table of positions for later stages.

    torch's split of a backward finds weights on the way to what was received, and would leave the
    gradients of the others out without a word.
    """
    starts = {get_gradient_edge(tensor).node for tensor in received if tensor.requires_grad}
    hanging: _Outputs = []
    ends: list[tuple[GradientEdge, Tensor | None]] = []
    for output, gradient in zip(outputs, gradients, strict=True):
        if not output.requires_grad:
            continue
        edge = get_gradient_edge(output)
        if _leads_to(edge.node, starts):
            hanging.append((output, gradient))
        else:
            ends.append((edge, gradient))
    return hanging, ends


def _leads_to(node: Node, ends: Container[Node]) -> bool:
    """Whether a backward from this node comes to one of those. Short where it does."""
    waiting, seen = [node], {node}
    while waiting:
        if (now := waiting.pop()) in ends:
            return True
        following = {found for found, _ in now.next_functions if found is not None} - seen
        seen |= following
        waiting += following
    return False


def _backward_of_group(
    params: Collection[Any],
    intermediates: Sequence[Node],
    grads: Sequence[Sequence[Tensor | None] | None] = (),
) -> None:
    """The weights' part for some that share where they join what hangs on the stage's inputs.

    torch's own sets p.grad without autograd: hooks of the user's own would not run, and a gradient
    might lie in memory as a convolution left it, which fused optimizers read wrongly. A weight that
    is used twice leads through what other groups still need; what is retained goes with the last
    reference to the graph.
    """
    reached = [(node, given) for node, given in zip(intermediates, grads) if given is not None]
    starts = [
        (GradientEdge(node, place), gradient)
        for node, given in reached
        for place, gradient in enumerate(given)
        if gradient is not None
    ]
    if not starts:  # the gradient of what it leads to is not asked for
        return
    handles: list[RemovableHandle] = []
    if len(reached) > 1:  # one may lead to another, which is given its gradient already
        for node, given in reached:
            handles.append(node.register_prehook(partial(_as_given, tuple(given))))
    try:
        edges, gradients = zip(*starts, strict=True)
        weights = [node.variable for node in params]
        torch.autograd.backward(edges, gradients, retain_graph=True, inputs=weights)
    finally:
        for handle in handles:
            handle.remove()


def _as_given(given: tuple[Tensor | None, ...], _: object) -> tuple[Tensor | None, ...]:
    return given


def forms_of(tape: Tape, numbers: Sequence[int]) -> list[TensorForm]:
    return [TensorForm(tape.values[n].sent_shape, tape.values[n].dtype) for n in numbers]


def link_neighbours(stages: Mapping[int, ScheduledStage]) -> None:
    """Link the stages of one rank that follow each other."""
    for index, stage in stages.items():
        stage.earlier, stage.later = stages.get(index - 1), stages.get(index + 1)
