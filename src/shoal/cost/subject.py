"""The model that is profiled: real if it fits this machine, else on fake tensors.

Fake tensors have shapes and no memory, so a model of any size can be built and run; what is lost is
the time, and every branch that looks at values. With it come pieces of two sizes to run it on.
Read next: `passes.py`, which runs it, and `profiler.py`.
"""

from contextlib import nullcontext
from itertools import islice
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

from shoal.cost.tensor import CountingGroup
from shoal.data.batches import Piece
from shoal.errors import RecipeError, ShoalError
from shoal.logs import log
from shoal.numerics.precision import PrecisionSchedule
from shoal.numerics.randomness import PieceSeeds
from shoal.parallel.tensor.cutting import TensorForward
from shoal.training.run import Run, call_model, make_batches, objective

SHARE_OF_MEMORY = 0.4  # of what is free, that a measured model may take
LONGEST_PASS_S = 1.0  # of one pass that is measured
SLOWEST_FLOPS = 20e9  # a second, of a core
FEW_ELEMENTS = 5_000_000  # of a model that is measured without asking how long it takes
MOST_PIECES = 8  # that the batch is cut into for the smaller size


class Subject(NamedTuple):
    """A model that is watched, with two pieces of each size; real or fake, whole or cut."""

    run: Run
    model: nn.Module
    seeds: PieceSeeds
    examples: dict[int, list[Piece]]  # by samples, the smaller size first
    mode: Any = None  # the FakeTensorMode; None for real tensors
    tensor: TensorForward | None = None
    group: CountingGroup | None = None  # of the tensor axis

    def forward(self, piece: Piece) -> Any:
        self.seeds.enter(0, 0)
        with self.tensor or nullcontext():
            output = call_model(self.model, piece.inputs)
        return output if self.tensor is None else self.tensor.whole(output)

    def loss(self, piece: Piece, precision: str = "fp32") -> Tensor:
        with PrecisionSchedule.parse(precision).lowest.autocast("cpu"):
            return objective(self.run, self.forward(piece), piece).tensor

    def forget(self) -> None:
        for p in self.model.parameters():
            p.grad = None


def make_subject(run: Run, on_shapes: bool = False) -> Subject:
    """`on_shapes`: fake tensors, whatever fits."""
    examples = _examples(run)
    model, mode = _build(run, next(iter(examples.values()))[0], on_shapes)
    if mode is not None:
        examples = {n: [_faked(piece, mode) for piece in own] for n, own in examples.items()}
    model.train()
    return Subject(run, model, seeds_of(run, model), examples, mode)


def seeds_of(run: Run, model: nn.Module) -> PieceSeeds:
    return PieceSeeds(model, run.seed, by_block=run.step is None)


def _examples(run: Run) -> dict[int, list[Piece]]:
    """Two pieces of the smallest part of the batch that is looked at, and two whole batches."""
    num_pieces = max(k for k in range(1, MOST_PIECES + 1) if run.batch_size % k == 0)
    if num_pieces == 1 and run.batch_size <= 64:
        num_pieces = run.batch_size
    found: dict[int, list[Piece]] = {}
    for count in (num_pieces, 1):
        batches = make_batches(run, count)
        try:
            places = ((step, k) for step in range(batches.steps_per_epoch) for k in range(count))
            pieces = (batches.at(step).piece(k) for step, k in places)
            some = list(islice((piece for piece in pieces if piece.num_samples), 2))
        finally:
            batches.close()
        if not some:
            raise RecipeError(
                "Quarantine leaves out all samples of the data, so there is nothing to profile."
            )
        found[some[0].num_samples] = some
    return found


def _build(run: Run, piece: Piece, on_shapes: bool) -> tuple[nn.Module, Any]:
    """The model, and the mode of fake tensors if it does not fit in memory, or if a pass of the
    smaller piece would take long."""
    num_bytes = num_elements = 0
    try:
        with torch.device("meta"):
            parameters = [*run.make_model().parameters()]
        num_bytes = sum(p.nbytes for p in parameters)
        num_elements = sum(p.numel() for p in parameters)
    except ShoalError:
        raise
    except Exception as error:  # noqa: BLE001 (a model of any kind: it is built for real then)
        log.debug("The model cannot be built without memory: %s", error)
    room = SHARE_OF_MEMORY * psutil.virtual_memory().available
    fits = 4 * num_bytes <= room and not on_shapes
    if fits and num_elements <= FEW_ELEMENTS:
        return run.make_model(), None
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with mode:
            model = run.make_model()
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            call_model(model.train(), _faked(piece, mode).inputs)
    except RecipeError:
        raise
    except Exception as error:
        if fits:
            return run.make_model(), None
        raise RecipeError(
            f"The model has {num_elements:,} parameters, too many for this machine, and its "
            f"forward cannot be run on fake tensors, which hold no values: {error}. Profile it on "
            "a machine that holds it, or give a smaller configuration with --set."
        ) from error
    if fits and 3 * counter.get_total_flops() < LONGEST_PASS_S * SLOWEST_FLOPS:
        return run.make_model(), None
    return model, mode


def _faked(piece: Piece, mode: Any) -> Piece:
    def fake(leaf: Any) -> Any:
        return mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf

    return piece._replace(inputs=tree_map(fake, piece.inputs), target=tree_map(fake, piece.target))


def first_piece(subject: Subject) -> Piece:
    return next(iter(subject.examples.values()))[0]
