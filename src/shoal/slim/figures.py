"""The model table: size, parameters, latency and quality of a model before and after a verb.

Both columns are measured in the same way, in this process. Size is what the weights take on a disk;
of a result it is all files that were written. Latency is the median of repeated forwards of one
batch of the recipe's data. Quality is the recipe's own evaluation (`Run.evaluate`); without one
there is none, and a note says so. Cost: two evaluations, and some forwards.
"""

import statistics
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import msgspec
from torch import nn

from shoal.comm.collectives import Group
from shoal.comm.mesh import Axes, Mesh
from shoal.data.batches import LoadOptions, Piece
from shoal.data.pieces import pieces_in_order
from shoal.data.sources import stream_of
from shoal.errors import BadCheckpoint, RecipeError, UsageError
from shoal.formats.exported_program import load_weights
from shoal.formats.open_weights import open_weights
from shoal.formats.weights import ModelWeights
from shoal.formatting import in_units, table
from shoal.plans.plan import Plan
from shoal.training.evaluate import PIECE_SIZE, evaluating, measure
from shoal.training.run import Run, call_model

NUM_WARMUPS = 3
NUM_FORWARDS = 30  # of which the median counts
MOST_SECONDS = 3.0  # after which fewer will do
_NO_EVALUATION = "The recipe has nothing to evaluate by, so quality was not measured."


class Figures(msgspec.Struct, frozen=True):
    """A model in four figures."""

    bytes: int
    parameters: int
    latency_ms: float
    metrics: dict[str, float]


class ModelTable(msgspec.Struct, frozen=True, kw_only=True):
    """A model before and after, and where the result is."""

    before: Figures
    after: Figures
    out: str
    notes: list[str] = []

    def in_words(self) -> str:
        """One table for people."""
        names = list(dict.fromkeys([*self.before.metrics, *self.after.metrics]))
        rows = [["", "before", "after"], *self._sizes()]
        for name in names:
            rows.append(
                [name, *(_number(of.metrics.get(name)) for of in (self.before, self.after))]
            )
        return "\n".join([table(rows, numbers=(1, 2)), *self.notes, f"out: {self.out}"])

    def _sizes(self) -> list[list[str]]:
        one, other = self.before, self.after
        return [
            ["size", in_units(one.bytes), in_units(other.bytes)],
            ["parameters", f"{one.parameters:,}", f"{other.parameters:,}"],
            ["latency", f"{one.latency_ms:.3g} ms", f"{other.latency_ms:.3g} ms"],
        ]


class LoadedModel(NamedTuple):
    """A recipe's model with trained weights, and the bytes that they take."""

    model: nn.Module
    num_bytes: int
    note: str  # which of several checkpoints they are of


def load_trained(run: Run, where: str | Path) -> LoadedModel:
    """The run's model with the weights at a path or URL, in evaluation mode."""
    model, found = run.make_model(), open_weights(where)
    weights = ModelWeights(found.weights)
    try:
        load_weights(model, weights)
    except BadCheckpoint as bad:
        raise BadCheckpoint(f"{found.place}: {bad}") from bad
    own = set(model.state_dict())
    num_bytes = sum(weights.num_bytes(name) for name in weights.names if name in own)
    return LoadedModel(model.eval(), num_bytes, found.note)


def figures_of(run: Run, model: nn.Module, num_bytes: int) -> Figures:
    """Measure a model by a run's data."""
    return Figures(
        bytes=num_bytes,
        parameters=sum(p.numel() for p in model.parameters()),
        latency_ms=_latency_ms(run, model),
        metrics=evaluate(run, model) if _is_judged(run) else {},
    )


def notes_of(run: Run, *more: str) -> list[str]:
    """What a table has to say beside its figures."""
    return [*filter(None, more), *([] if _is_judged(run) else [_NO_EVALUATION])]


def _is_judged(run: Run) -> bool:
    return run.evaluate is not None and bool(run.judges())


def evaluate(run: Run, model: nn.Module) -> dict[str, float]:
    """Loss and metrics of any module over the run's evaluation, in this process."""
    mesh = Mesh.form(Group(), Axes(), "cpu")
    return measure(run, _ModelRunner(model), run.evaluate, mesh)


def first_piece(run: Run, num_samples: int) -> Piece:
    """The first samples that the run evaluates, or trains on."""
    source = run.data if run.evaluate is None else run.evaluate
    if stream_of(source) is not None:
        raise UsageError(
            "The data is a stream, and samples are looked at beside its training. Give the Run "
            "`evaluate`, a source with a length."
        )
    pieces = pieces_in_order(source, num_samples, LoadOptions(run.collate))
    found = (pieces[index] for index in range(len(pieces)))
    piece = next((one for one in found if one.num_samples), None)
    if piece is None:
        raise RecipeError("Quarantine leaves out all samples: there is nothing to look at.")
    return piece


def layers_with_matrices(model: nn.Module) -> list[str]:
    """The layers that hold more than vectors; what the model itself holds has its own name."""
    named = model.named_parameters(remove_duplicate=False)
    owners = (name.rpartition(".")[0] or name for name, p in named if p.dim() > 1)
    return list(dict.fromkeys(owners))


def num_bytes_of(model: nn.Module) -> int:
    """Of all tensors of a model, each once: tied ones are stored once, too."""
    tensors = model.state_dict(keep_vars=True).values()
    return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values())


def num_bytes_at(path: Path) -> int:
    """Of the weights or the program that a file or a directory holds, without what describes them:
    so a model that is stored as it was has the bytes that it had."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    weights = [file for file in files if file.suffix == ".safetensors"]
    others = [file for file in files if file.suffix in (".pt2", ".bin")]
    return sum(map(_num_tensor_bytes, weights)) + sum(file.stat().st_size for file in others)


def _num_tensor_bytes(file: Path) -> int:
    """What follows the header of a safetensors file, whose length comes first."""
    with open(file, "rb") as opened:
        return file.stat().st_size - 8 - int.from_bytes(opened.read(8), "little")


class _ModelRunner:
    """What `measure` asks of a runner, for a model in this process."""

    def __init__(self, model: nn.Module):
        self.plan, self.model = Plan(), model

    def arithmetic(self) -> AbstractContextManager[None]:
        return nullcontext()

    def output(self, inputs: Any) -> Any:
        return call_model(self.model, inputs)


def _latency_ms(run: Run, model: nn.Module) -> float:
    """The median of repeated forwards of one batch."""
    inputs = first_piece(run, min(PIECE_SIZE, run.batch_size)).inputs
    seconds: list[float] = []
    with evaluating(model):
        for number in range(NUM_WARMUPS + NUM_FORWARDS):
            start = perf_counter()
            call_model(model, inputs)
            if number >= NUM_WARMUPS:
                seconds.append(perf_counter() - start)
            if sum(seconds) > MOST_SECONDS:
                break
    return 1000 * statistics.median(seconds)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
