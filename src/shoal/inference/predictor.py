"""Predict with a trained model, in batches: `shoal.Predictor`, and `shoal.predict` into a file.

A `Predictor` calls the model in evaluation mode and without gradients, on as many samples at a time
as it is told, and gives the answers one by one, in the order of the samples. It works in this
process, with the threads that torch has here; `shoal evaluate` is what works on ranks.

Cost: one forward of each sample. Memory holds one batch. Read next: `output_files.py`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from shoal.data.batches import LoadOptions, to_device
from shoal.data.collating import collate_samples
from shoal.data.pieces import pieces_in_order
from shoal.errors import RecipeError, ShoalError, UsageError
from shoal.formats.new_output import new_files
from shoal.inference.columns import SAMPLE, Columns, columns_of, row_of
from shoal.inference.output_files import check_output, open_output
from shoal.training.evaluate import PIECE_SIZE, data_of, evaluating
from shoal.training.load import load
from shoal.training.options import WhichData
from shoal.training.recipe import load_recipe
from shoal.training.run import Run, call_model

if TYPE_CHECKING:
    from shoal.checkpoint.find import PathOrUrl


class PredictedBatch(NamedTuple):
    """Answers to some samples, by columns; `ids` are the samples' numbers."""

    ids: Any  # int64
    columns: Columns


class Predictions(NamedTuple):
    """What `shoal.predict` wrote."""

    samples: int
    out: str


class Predictor:
    """A trained model that is called on samples, batch by batch.

    `model` is a module, or a path or URL as `shoal.load` takes it, with the `recipe` whose model it
    is. The Run's `collate` puts batches together. Calling it takes any iterable of inputs, without
    targets, and yields an answer for each: a tensor, or a dict of tensors by name.
    """

    def __init__(
        self,
        model: "nn.Module | PathOrUrl",
        recipe: str | Run | Callable[..., Run] | None = None,
        *,
        batch_size: int = PIECE_SIZE,
        device: str = "cpu",
        settings: Mapping[str, Any] | None = None,
    ):
        if type(batch_size) is not int or batch_size < 1:
            raise UsageError(f"batch_size={batch_size!r} must be a whole number of at least 1.")
        if recipe is None and settings:
            raise UsageError(f"{', '.join(settings)}: settings are for a recipe. Name it.")
        texts = {name: str(value) for name, value in (settings or {}).items()}
        run = None if recipe is None else load_recipe(recipe, texts)
        self._collate = None if run is None else run.collate
        if not isinstance(model, nn.Module):
            model = load(model, run)
        self.model = _moved(model, device)
        self.batch_size, self.device = batch_size, device

    def __call__(self, inputs: Iterable[Any]) -> Iterator[Any]:
        """The answer to each of the inputs, in order; they are fetched as answers are asked for."""
        start, unread = 0, iter(inputs)
        while some := list(islice(unread, self.batch_size)):
            ids = np.arange(start, start + len(some))
            # Without a collate the target is there to be stacked, and not looked at.
            samples = [(one, 0 if self._collate is None else None) for one in some]
            together, _ = collate_samples(samples, self._collate, ids)
            columns = self._answer(to_device(together, self.device), ids)
            yield from (row_of(columns, row) for row in range(len(some)))
            start += len(some)

    def batches(self, source: Any) -> Iterator[PredictedBatch]:
        """Answers to a source of samples, (inputs, target) as a Run's data are; batch by batch.

        Samples that quarantine leaves out are missing.
        """
        pieces = pieces_in_order(source, self.batch_size, LoadOptions(self._collate, self.device))
        for index in range(len(pieces)):
            piece = pieces[index]
            if piece.num_samples:
                yield PredictedBatch(piece.ids, self._answer(piece.inputs, piece.ids))

    def _answer(self, inputs: Any, ids: Any) -> Columns:
        with evaluating(self.model):
            try:
                return columns_of(call_model(self.model, inputs), len(ids))
            except ShoalError:
                raise
            except Exception as error:
                what = f"{type(error).__name__}: {error}"
                raise RecipeError(
                    f"The model failed on samples {ids[0]} to {ids[-1]}: {what}"
                ) from error


def _moved(model: nn.Module, device: str) -> nn.Module:
    try:
        return model.to(device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch's, of any kind
        why = str(error).partition("\n")[0]
        raise UsageError(f"device {device!r}: the model cannot work there. {why}") from None


def predict(
    run_or_recipe: str | Run | Callable[..., Run],
    from_: "PathOrUrl",
    out: str | Path,
    *,
    settings: Mapping[str, Any] | None = None,
    on_data: WhichData = "evaluate",
    batch_size: int | None = None,
    device: str = "cpu",
) -> Predictions:
    """Write a trained model's answers to a recipe's data into a file, a row for each sample.

    `from_` is what `shoal.load` takes, `out` a new file whose suffix is its format: .jsonl, .npz,
    .safetensors or .parquet. Samples are those to evaluate, or with `on_data="train"` those to
    train on, in their order.
    """
    path = Path(out)
    check_output(path)
    run = load_recipe(run_or_recipe, {name: str(v) for name, v in (settings or {}).items()})
    source = data_of(run, on_data)
    size = min(PIECE_SIZE, run.batch_size) if batch_size is None else batch_size
    predictor = Predictor(from_, run, batch_size=size, device=device)
    num_samples = 0
    with new_files(path) as partial:
        file = open_output(partial)
        try:
            for ids, columns in predictor.batches(source):
                file.add({SAMPLE: torch.as_tensor(np.asarray(ids)), **columns})
                num_samples += len(ids)
            if not num_samples:
                raise RecipeError("There is nothing to predict: quarantine leaves out all samples.")
            file.finish()
        finally:
            file.close()
    return Predictions(num_samples, str(path))
