"""Evaluation: the mean loss and metrics over a source, each sample counted once.

The source is cut into fixed pieces which are dealt over the ranks; what each piece gave is brought
together and summed in order, so the answer has the same bits at any number of ranks. Under local
steps each replica judges its pieces with its own weights. A run's `loaders` load ahead here, too.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shoal.comm.mesh import Mesh
from shoal.data.batches import LoadOptions
from shoal.data.pieces import pieces_in_order
from shoal.data.sources import stream_of
from shoal.data.split import share
from shoal.data.transforms.quarantine import quarantine_files
from shoal.errors import GroupLost, RecipeError, UsageError
from shoal.parallel.fsdp import compare_orders, held_parameters
from shoal.plans.plan import Plan
from shoal.sync.named_parts import LossPart, gather_all_parts, means, pack_parts
from shoal.system.processes import WORK
from shoal.training.options import WhichData
from shoal.training.run import Run, check_evaluated, objective

PIECE_SIZE = 64  # samples of one forward; fixed, so that it does not depend on the plan


def data_of(run: Run, which: WhichData) -> Any:
    """What a trained model is to be measured on, or used on."""
    if which == "train":
        if stream_of(run.data) is not None:
            raise UsageError(
                "The recipe trains on a stream, of which no sample is found again. Give its Run "
                "evaluate=a source with a length."
            )
        return run.data
    if run.evaluate is None:
        raise UsageError(
            "The recipe has no data to evaluate on. Give its Run evaluate=a source of samples, or "
            'add --on-data train (on_data="train") for the data that it trains on.'
        )
    return run.evaluate


def evaluated_samples(run: Run) -> int:
    """Of a piece, as `measure` cuts the source of a run; 0 if it evaluates nothing."""
    return 0 if run.evaluate is None else min(PIECE_SIZE, run.batch_size)


class Evaluator(Protocol):
    """Who runs the model: a `PieceRunner`, or the reference."""

    @property
    def plan(self) -> Plan: ...

    @property
    def model(self) -> nn.Module: ...

    def arithmetic(self) -> AbstractContextManager[Any]:
        """Around the loss."""
        ...

    def output(self, inputs: Any) -> Any:
        """The model's answer; None on a rank that does not get to see it."""
        ...


def measure(run: Run, runner: Evaluator, source: Any, mesh: Mesh) -> dict[str, float]:
    """`loss`, if the run has one, the metrics, and the named parts of the loss.

    Every rank must call it.
    """
    check_evaluated(runner.plan, source)
    if not (names := run.judges()):
        raise UsageError(
            "There is nothing to measure: the run has a step of its own, and neither loss(output, "
            "target) nor metrics, which an evaluation judges model(inputs) by."
        )
    loading = LoadOptions(run.collate, mesh.device, run.loaders)
    pieces = pieces_in_order(source, min(PIECE_SIZE, run.batch_size), loading)
    if not len(pieces):
        raise UsageError("There is nothing to evaluate: the source has no samples.")
    table = torch.zeros(len(pieces), len(names) + 1, 2, dtype=torch.float64)
    parts: dict[int, Mapping[str, LossPart]] = {}
    own = share(mesh.data.rank, mesh.data.num_ranks, len(pieces))
    # Where replicas share parameters, all of them must run the model equally often.
    num_turns = -(-len(pieces) // mesh.data.num_ranks) if runner.plan.zero == 3 else len(own)
    indices = [*own, *[0] * (num_turns - len(own))]
    with evaluating(runner.model), closing(pieces.ahead(indices)) as loaded:
        for turn, (index, piece) in enumerate(zip(indices, loaded, strict=True)):
            if mesh.data.is_lost():  # no rank will hear the answer
                raise GroupLost("the generation is over")
            WORK.done += 1
            if not piece.num_samples:  # all of it is in quarantine
                continue
            output = runner.output(piece.inputs)
            if output is None or turn >= len(own) or mesh.tensor.rank:
                continue
            table[index, -1] = piece.num_samples
            if run.loss is not None:
                with runner.arithmetic():
                    goal = objective(run, output, piece)
                loss, weight = goal.tensor.item(), float(goal.weight)
                table[index, 0, 0] = loss * weight if goal.is_mean else loss
                table[index, 0, 1] = weight
                parts[index] = goal.parts
            first = len(names) - len(run.metrics)
            for column, (name, metric) in enumerate(run.metrics.items(), start=first):
                answer = metric(output, piece.target)
                table[index, column] = _sum_and_weight(name, answer, piece.num_samples)
    compare_orders(runner.model)
    table = mesh.world.merge(table)
    named = means(gather_all_parts(mesh.world, pack_parts(parts)))
    if not table[:, -1].any():
        raise RecipeError(_all_left_out(source))
    columns = table[:, : len(names)].unbind(1)
    sums = [(sum(column[:, 0].tolist()), sum(column[:, 1].tolist())) for column in columns]
    if not all(weight for _, weight in sums):
        raise RecipeError("An evaluation's weights add up to 0: no sample of the source counts.")
    for name in named.keys() & run.metrics.keys():
        raise RecipeError(
            f"{name!r} is a metric of this run and a part of its loss. Give one another name."
        )
    found = {name: total / weight for name, (total, weight) in zip(names, sums, strict=True)}
    return found | named


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; each module's own mode comes back afterwards."""
    training = [module for module in model.modules() if module.training]
    with suppress(NotImplementedError):  # of a program of torch.export, which has one mode
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def swapped_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """These values are the parameters', as this rank holds them, in this block and no longer."""
    if not weights:
        yield
        return
    held = held_parameters(model)
    before = {name: held[name].detach().clone() for name in weights}
    _write(held, weights)
    try:
        yield
    finally:
        _write(held_parameters(model), before)


@torch.no_grad()
def _write(held: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        held[name].copy_(value)


def _all_left_out(source: Any) -> str:
    files = " and ".join(map(str, quarantine_files(source)))
    return (
        f"There is nothing to evaluate: all {len(source)} samples of the source are left out as "
        f"bad, by quarantine. {files} says why, sample by sample; correct them, or evaluate others."
    )


def _sum_and_weight(name: str, answer: Any, num_samples: int) -> Tensor:
    """A metric answers like a loss: a mean, or a pair (sum, weight)."""
    try:
        if isinstance(answer, tuple):
            sum_, weight = map(float, answer)
            return torch.tensor([sum_, weight], dtype=torch.float64)
        return torch.tensor([float(answer) * num_samples, num_samples], dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RecipeError(
            f"The metric {name!r} returned {type(answer).__name__}: {error}. It must return a "
            "number, the mean over the samples it was given, or a pair (sum, weight)."
        ) from error
