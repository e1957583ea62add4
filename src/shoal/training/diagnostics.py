"""What is wrong when a step cannot be right: with the samples, or with the forward, and where.

A loss that is not finite is traced to its samples. The first piece that a rank computes is watched
for what a plan cannot spread and no look at the modules can tell: parameters that the forward
writes to, and parameters read where `zero=3` holds a shard of them. Cost: nothing after that piece.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from shoal.comm.collectives import Group
from shoal.comm.mesh import Mesh
from shoal.data.batches import Batch, Batches
from shoal.data.ledger import mark_samples
from shoal.data.sources import Source, stream_of
from shoal.data.split import shares
from shoal.errors import NotFinite, PlanError, RecipeError
from shoal.numerics.buffers import LARGE
from shoal.numerics.compiled import compiled_in, is_transformed
from shoal.numerics.reserved import ReservedParameter, touched_rows
from shoal.plans.plan import Plan
from shoal.sync.digests import DigestReader, is_readable
from shoal.sync.server.combining import combine_losses
from shoal.sync.strategy import GlobalStep

_NAMED = 20
_ONLY_GRADIENT = "its loss is finite, its gradient is not"
_MIXED = "mixed torch.Tensor and DTensor"  # in torch's words


def weights_are_finite(model: nn.Module) -> bool:
    return all(bool(torch.isfinite(_present(p)).all()) for p in model.parameters())


def _present(p: nn.Parameter) -> Tensor:
    if isinstance(p, ReservedParameter):
        return p[touched_rows([p])]
    return p._local_tensor if isinstance(p, DTensor) else p


def not_finite_error(
    batches: Batches, step: int, agreed: GlobalStep, model: nn.Module, ranks: Sequence[int] = ()
) -> NotFinite:
    """The error for a step whose loss or gradient is not finite, as `ranks` computed it; empty if
    only this one knows of it.

    If the weights are spoilt already, it was the gradient of the step before.
    """
    bad = [piece for piece, value in enumerate(agreed.sums) if not math.isfinite(value)]
    if bad and step and not weights_are_finite(model):
        step, bad = step - 1, []
    what = f"its loss is {agreed.loss}" if bad else _ONLY_GRADIENT
    is_known = len(agreed.sums) == batches.num_pieces
    return _not_finite(batches, step, what, bad if is_known else (), ranks)


def check_last_weights(batches: Batches, step: int, model: nn.Module, world: Group | None) -> None:
    """Refuse weights that the last `step` has spoilt, since no loss comes after it that would tell.

    Every rank of a `world` must call it, and each then names all that hold such weights. Without
    one a rank speaks for itself. Cost: one number a rank.
    """
    is_bad = not weights_are_finite(model)
    rows = [] if world is None else world.all_gather_numbers([is_bad])
    ranks = tuple(rank for rank, (told,) in enumerate(rows) if told)
    if is_bad or ranks:
        raise _not_finite(batches, step, _ONLY_GRADIENT, (), ranks)


def _not_finite(
    batches: Batches, step: int, what: str, bad: Sequence[int], ranks: Sequence[int]
) -> NotFinite:
    """`bad` are the pieces to look at, empty if that may be any."""
    pieces, batch = bad or range(batches.num_pieces), batches.at(step)
    ids = [int(i) for piece in pieces for i in batch.ids_of(piece)]
    named = ", ".join(map(str, ids[:_NAMED]))
    if len(ids) > _NAMED:
        named += f" and {len(ids) - _NAMED} more"
    if ranks and bad:
        named += f" on rank {', '.join(map(str, ranks))}"
    return NotFinite(
        f"Step {step + 1} is not finite: {what}. It saw the samples {named}. Look at those "
        "samples, lower the learning rate, or clip the gradient (clip=1.0).",
        tuple(ranks),
    )


def ranks_that_computed(agreed: GlobalStep, plan: Plan, mesh: Mesh) -> tuple[int, ...]:
    """The ranks that computed losses which are not finite, all of each replica's; if there are
    none, or it is not known whose they are, all ranks."""
    bad = [piece for piece, value in enumerate(agreed.sums) if not math.isfinite(value)]
    if not bad or len(agreed.sums) != plan.num_pieces:
        return tuple(range(mesh.num_ranks))
    size = plan.num_microbatches
    dealt = shares(plan.num_pieces // size, mesh.data.num_ranks, mesh.counts)
    rounds = {piece // size for piece in bad}
    replicas = {number for number, own in enumerate(dealt) if rounds & {*own}}
    # Ranks count by tensor, data, pipeline.
    num_tensor, num_data = mesh.tensor.num_ranks, mesh.data.num_ranks
    return tuple(r for r in range(mesh.num_ranks) if r // num_tensor % num_data in replicas)


def check_agreed(agreed: GlobalStep, plan: Plan) -> GlobalStep:
    """What all know of a step, its loss judged by the plan's rule for gradients.

    Then a replica whose loss is not finite stops no other, just as its gradient does not.
    """
    if plan.combine == "mean":
        return agreed
    if not agreed.is_mean:
        raise PlanError(
            f"combine={plan.combine} does not go with a loss that returns (sum, weight): replicas' "
            "means are compared, and servers know gradients only as sums. Return the mean, or "
            "leave combine out."
        )
    dealt, weight = shares(plan.num_pieces, plan.num_apart), sum(agreed.weights)
    loss = combine_losses(plan.combine, agreed.sums, agreed.weights, dealt)
    return agreed._replace(sums=[loss * weight], weights=[weight])


def refuse_other_samples(source: Source, batch: Batch, agreed: GlobalStep, plan: Plan) -> None:
    """Each rank reads all of a stream: what all ranks trained on must be what this one has read.

    Not told where ranks know only their own marks, and after bad samples were left out; `shoal data
    audit` reads the stream again.
    """
    is_told = agreed.mark is not None and agreed.num_samples == batch.num_samples
    if stream_of(source) is None or not is_told or plan.local_steps > 1:
        return
    if agreed.mark != mark_samples(source, batch.ids):
        raise RecipeError(
            f"Step {batch.step + 1}: ranks read other samples from the stream. It must give the "
            "same samples in the same order each time that it is opened, on every rank: seed what "
            "it draws, and do not divide it among ranks, which Shoal does itself."
        )


def no_weight_error(step: int, is_share: bool = False) -> RecipeError:
    """The error for a step whose samples all weigh nothing, after `step` of them; `is_share`: those
    of one replica, where those of the others are not known."""
    whose, rule = "its batch", ""
    if is_share:
        whose = "this replica's share of its batch"
        rule = "With staleness or local_steps a share is a step of its own. "
    return RecipeError(
        f"Step {step + 1}: no sample of {whose} counts: the weights that the loss gives them add "
        f"up to 0. {rule}Take such samples out of the data (shoal.data.clean), or use larger "
        "batches."
    )


def written_in_forward(name: str, plan: Plan) -> PlanError:
    return PlanError(
        f"The forward writes to its parameter {name} (an embedding with max_norm does, and a layer "
        f"that limits its weight), and this plan makes {plan.num_pieces} pieces of a step: each "
        "would see what others wrote, or not, by who computes it. Only the optimizer may change "
        "parameters. Use a plan with one piece (data=1), leave max_norm out, or let the forward "
        "compute with a changed copy of the parameter."
    )


@contextmanager
def refuse_writes(model: nn.Module, plan: Plan, looks_inside: bool = True) -> Iterator[None]:
    """Around a forward: refuse one that writes to parameters, if a step makes several of them.

    Versions do not count what is written to `.data`: if this `looks_inside`, bytes are compared,
    and nothing else may write meanwhile. Under `zero=3` parameters are whole while FSDP2 has
    gathered them for their block.
    """
    if plan.num_pieces == 1:
        yield
        return
    names = {module: name for name, module in model.named_modules()}
    noted: dict[tuple[nn.Module, str, bool], NotedParameter] = {}

    def note(module: nn.Module, *_: Any) -> None:
        if is_transformed():
            return
        with torch._C.DisableTorchFunction():
            for place, p in _parameters_in(module):
                known = noted.get(place)
                if known is None or (is_sharded and known.parameter is not p):
                    noted[place] = NotedParameter.of(p, looks_inside)

    def check(module: nn.Module, *_: Any) -> None:
        if is_transformed():
            return
        with torch._C.DisableTorchFunction():
            for (inner, name, is_shard), known in noted.items():
                now = inner._parameters[name]
                if not isinstance(now, nn.Parameter):  # torch.func.functional_call put it there
                    continue
                if is_shard or now is known.parameter:
                    is_written = known.is_changed(looks_inside)
                else:  # but for a shard that stands there again
                    is_written = not (is_sharded and isinstance(now, DTensor))
                if is_written:
                    raise written_in_forward(f"{names[inner]}.{name}".lstrip("."), plan)
            if isinstance(module, FSDPModule):  # lets go of what it gathered, and may gather again
                for place in dict(_parameters_in(module)):
                    noted.pop(place, None)

    is_sharded, handles = plan.zero == 3, list[Any]()
    note(model)
    if is_sharded and not any(compiled_in(model)):
        for module in names:  # once FSDP2 has gathered, and before it lets go
            handles.append(module.register_forward_pre_hook(note))
            handles.append(module.register_forward_hook(check, prepend=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    check(model)


def copy_small_buffers(model: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """By module and name; the large ones are constants."""
    return [
        (module, name, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.numel() <= LARGE and buffer.layout == torch.strided
    ]


def refuse_late_writes(before: Sequence[tuple[nn.Module, str, Tensor]]) -> None:
    """After a stage's backward: refuse one that wrote to buffers, which are put away by then."""
    for module, name, held in before:
        now = module.get_buffer(name)
        same = torch.isclose(now, held, rtol=0.0, atol=0.0, equal_nan=True)
        if not same.all():
            raise PlanError(
                f"The backward changes the buffer {name} of {type(module).__name__}: what changes "
                "it is computed again (torch.utils.checkpoint), and a stage takes its buffers "
                "after its forward. Leave that out of the model and use recompute=blocks in the "
                "plan, or leave out pipeline."
            )


def _parameters_in(
    module: nn.Module,
) -> Iterator[tuple[tuple[nn.Module, str, bool], nn.Parameter]]:
    """Each by its place, and whether it is a shard."""
    for inner in module.modules():
        for name, p in inner._parameters.items():
            if isinstance(p, nn.Parameter):
                yield (inner, name, isinstance(p, DTensor)), p


class NotedParameter(NamedTuple):
    """A parameter and its contents, to see whether they change. Cost: its bytes are read."""

    parameter: nn.Parameter
    version: int
    address: int
    digest: int | None

    @classmethod
    def of(cls, p: nn.Parameter, looks_inside: bool = True) -> "NotedParameter":
        if isinstance(p, ReservedParameter) or not (looks_inside and is_readable(p)):
            return cls(p, p._version, 0, None)
        return cls(p, p._version, p.data_ptr(), DigestReader().digests([p])[0])

    def is_changed(self, looks_inside: bool = True) -> bool:
        return self.of(self.parameter, looks_inside)[1:] != self[1:]


@contextmanager
def watch_first_piece(
    model: nn.Module, plan: Plan, is_new: bool
) -> Iterator[AbstractContextManager[None]]:
    """Around a rank's first piece, and, with what it gives, around its forward. If the run
    `is_new`, no parameters are on their way here.

    What breaks there in torch's words, for a reason that is the plan's, is said in ours.
    """
    reads = ReadsOfShards(model)

    @contextmanager
    def around_forward() -> Iterator[None]:
        unwritten = nullcontext() if plan.cuts_model else refuse_writes(model, plan, is_new)
        with unwritten, reads if plan.zero == 3 else nullcontext():
            yield

    try:
        yield around_forward()
    except RuntimeError as error:
        if not any(_MIXED in words for words in _told(error)):
            raise
        raise PlanError(
            f"The model uses {reads.found or 'a parameter'} outside of the forward of its block, "
            "where zero=3 holds a shard of it. Parameters of a block are gathered while it runs. "
            "Use zero=1 or zero=2, or compute this in the block's own forward and return it."
        ) from None


class ReadsOfShards(TorchFunctionMode):
    """Notes the first parameter that is used while it is a shard, and refuses a backward on the
    way, after which FSDP2 lets parameters go."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self._names = {id(p): n for n, p in model.named_parameters() if isinstance(p, DTensor)}
        self.found = ""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if func in (torch.autograd.grad, Tensor.backward):
            raise PlanError(
                f"The model takes a gradient in its own forward ({name}, for forces or a penalty "
                "say), and zero=3 lets parameters go after a backward. Use zero=1 or zero=2."
            )
        if not self.found and name not in ("__get__", "__set__"):
            read = [x for x in tree_leaves((args, kwargs)) if id(x) in self._names]
            self.found = f"its parameter {self._names[id(read[0])]} (in {name})" if read else ""
        return func(*args, **(kwargs or {}))


def _told(error: BaseException | None) -> Iterator[str]:
    """The words of an error and of those that caused it; a pipeline's backward has its own."""
    while error is not None:
        yield str(error)
        error = error.__cause__
