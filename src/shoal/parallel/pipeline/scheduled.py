"""A stage as PyTorch's schedules know it: their order of work, our forward and our hooks.

PyTorch's stage calls a module and learns shapes by running it on empty tensors; ours skims the
model on the microbatch's own inputs and knows all shapes from the tape. The loss is part of the
last stage's forward, so that a model may return anything.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from shoal.comm.collectives import Group
from shoal.parallel.pipeline.cuts import StagePlan
from shoal.parallel.pipeline.skim import Stage
from shoal.parallel.pipeline.tape import Tape


class Hooks(Protocol):
    """Told by `Pipeline.run` on this rank, in the schedule's order, for this rank's stages."""

    def enter(self, microbatch: int, block: int) -> None:
        """A stage's forward of this microbatch comes next: set seeds and buffers."""
        ...

    def leave(self, stage: int, microbatch: int) -> None:
        """That forward is done; on the last stage the loss comes next."""
        ...

    def back(self, microbatch: int) -> None:
        """A stage's backward of this microbatch comes next; it may compute forward again."""
        ...

    def computed(self, stage: int, microbatch: int) -> None:
        """p.grad of the stage's parameters holds all that this microbatch adds to it."""
        ...


class NoHooks:
    def enter(self, microbatch: int, block: int) -> None:
        """Nothing to set."""

    def leave(self, stage: int, microbatch: int) -> None:
        """Nothing to keep."""

    def back(self, microbatch: int) -> None:
        """Nothing to set."""

    def computed(self, stage: int, microbatch: int) -> None:
        """Gradients add up in p.grad."""


class Around(NamedTuple):
    """What a stage's forward runs in: a context, and how its outputs are made plain tensors.

    `alone` is for a forward that is only recorded, which not every replica may need to make.
    """

    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    whole: Callable[[Any], Any] = lambda output: output
    alone: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass
class Round:
    """What the stages of a rank share, and what they work on at present."""

    model: nn.Module
    group: Group
    call: Callable[[nn.Module, Any], Any]
    hooks: Hooks
    around: Around
    inputs: Mapping[int, Any] = field(default_factory=dict)  # by microbatch
    loss: Callable[[Any, int], Tensor] | None = None
    first: int = 0  # the microbatch that the schedule knows as its first


class Raised(BaseException):
    """An error of the model or the loss on its way through a schedule, which would wrap it."""

    def __init__(self, error: BaseException):
        self.error = error


@contextmanager
def _own_code() -> Iterator[None]:
    """Errors raised in here are the model's, not the transport's."""
    try:
        yield
    except Exception as error:
        raise Raised(error) from error


class ScheduledStage(PipelineStage):
    """A stage as PyTorch's schedules know it, with our forward and our hooks."""

    def __init__(self, round_: Round, plan: StagePlan, skim: Stage, device: torch.device):
        tape, spec = plan.tape, skim.spec
        self.round, self.spec, self.skim = round_, spec, skim
        named = dict(round_.model.named_parameters())
        owned = nn.ParameterList(named[name] for name in spec.parameters)
        # All forms are known: PyTorch would otherwise run stages on empty tensors to learn them.
        last = (torch.empty((), device="meta", requires_grad=True),)
        super().__init__(
            owned,
            spec.index,
            len(plan.stages),
            device,
            input_args=_metas(tape, spec.received),
            output_args=last if self.skim.is_last else _metas(tape, spec.sent),
            group=round_.group.handle,
            dw_builder=None if spec.splits_backward else _nothing_later,
        )
        self.backs = self.skim.is_last or any(n in tape.need_gradient for n in spec.sent)

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        received = () if self.is_first else self._retrieve_recv_activations(fwd_chunk_id)
        with _own_code():
            output = self._forward(self.round.first + fwd_chunk_id, received)
        sent = (output,) if self.skim.is_last else output
        self.fwd_cache[fwd_chunk_id] = (sent, list(received))
        return output

    def _forward(self, microbatch: int, received: Sequence[Tensor]) -> Any:
        work = self.round
        work.hooks.enter(microbatch, self.spec.block)
        with work.around.context():
            inputs = work.inputs[microbatch]
            output = self.skim(partial(work.call, work.model, inputs), received)
            output = work.around.whole(output)
        work.hooks.leave(self.stage_index, microbatch)
        if not self.skim.is_last:
            return output
        assert work.loss is not None
        loss = work.loss(output, microbatch)
        return loss.clone() if loss._is_view() or loss.is_leaf else loss

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        with _own_code():
            self.round.hooks.back(self.round.first + bwd_chunk_id)
            if self.backs:
                super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
            else:  # nothing here, nor before it, is trained
                _, received = self.fwd_cache.pop(bwd_chunk_id)
                self.bwd_cache[bwd_chunk_id] = (None,) * len(received)
            grads = self.bwd_cache[bwd_chunk_id]
            self.bwd_cache[bwd_chunk_id] = tuple(g if g is None else g.contiguous() for g in grads)
            if full_backward or self.dw_builder is not None or not self.backs:
                self.round.hooks.computed(self.stage_index, self.round.first + bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if not self.backs:
            return
        with _own_code():
            self.round.hooks.back(self.round.first + bwd_chunk_id)
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
            if self.dw_builder is None:
                self.round.hooks.computed(self.stage_index, self.round.first + bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._counted(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._counted(super().get_bwd_send_ops(bwd_chunk_id))

    def _counted(self, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        self.round.group.bytes_sent += sum(op.tensor.nbytes for op in operations)
        return operations


def _metas(tape: Tape, numbers: Sequence[int]) -> tuple[Tensor, ...]:
    values = [(number, tape.values[number]) for number in numbers]
    return tuple(
        torch.empty(
            value.sent_shape,
            dtype=value.dtype,
            device="meta",
            requires_grad=number in tape.need_gradient,
        )
        for number, value in values
    )


def _nothing_later() -> Callable[..., None]:
    """For stages whose backward pass cannot be split: all gradients come at once."""
    return lambda *_: None
