"""What a verb writes: weights as a checkpoint, a safetensors file or a directory of Hugging Face.

A model of transformers is written for `from_pretrained`, any other as a checkpoint that holds
weights alone; a name that ends in .safetensors is one file, one that ends in .pt2 a program of
torch.export. All of them load with `shoal.load`, and `shoal train --from` begins with the first
three. They appear whole or not at all.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shoal.checkpoint.dtypes import canonical_names
from shoal.data.batches import LoadOptions
from shoal.data.pieces import pieces_in_order
from shoal.errors import UsageError
from shoal.formats import exported_program, huggingface
from shoal.formats.import_weights import import_weights, target_model
from shoal.formats.new_output import new_directory, refuse_existing
from shoal.formats.safetensors import export_safetensors
from shoal.formats.weights import ForeignWeights, ModelWeights, stored_whole
from shoal.slim.figures import first_piece
from shoal.storage.object_store import local_path
from shoal.training.evaluate import PIECE_SIZE
from shoal.training.load import PROGRAM, load
from shoal.training.run import Run, call_model

_NUM_TRIED = 100  # pieces that a program is tried with
_ONLY_SOME = (
    "The program takes inputs of the sizes that it was traced with alone (3 samples): torch.export "
    "could not trace it for others. Its figures are those of the model that it was traced from."
)


class Written(NamedTuple):
    """A model as it was written and loaded again, and what is to be said of it."""

    model: nn.Module
    note: str = ""


def new_place(out: str | Path) -> Path:
    """Where a verb is to write; refused now, and not after an hour of work."""
    path = local_path(out)
    if path is None:
        raise UsageError(f"--out {out}: results are written to a disk. Give a path.")
    refuse_existing(path)
    if path.name.startswith("."):
        raise UsageError(
            f"--out {out}: a name that begins with a dot is a draft's. Choose another."
        )
    return path


def write_weights(run: Run, model: nn.Module, out: Path, recipe: str) -> None:
    """Write a model that has the names and shapes of the recipe's."""
    if out.suffix == ".pt2":
        write_program(run, model, out)
        return
    weights = ModelWeights(weights_in(model))
    if out.suffix == ".safetensors":
        export_safetensors(weights, out)
    elif is_pretrained(model):
        config = huggingface.find_inner_model(model).config
        huggingface.export_huggingface(weights, out, config=config)
    else:
        import_weights(weights, target_model(weights, model), out, recipe)


def write_program(run: Run, model: nn.Module, out: Path) -> Written:
    """Write a model as a program: one file, or a directory with it.

    What is measured afterwards is the program, unless it cannot take all that the model takes.
    """
    piece = first_piece(run, exported_program.NUM_SAMPLES)
    inputs = exported_program.example_inputs(piece.inputs, piece.num_samples)
    if out.suffix == ".pt2":
        exported_program.export_pt2(model, inputs, out)
    else:
        with new_directory(out) as folder:
            exported_program.export_pt2(model, inputs, folder / PROGRAM)
    program = load(out)
    if _takes_all(run, program):
        return Written(program)
    return Written(model, _ONLY_SOME)


@torch.no_grad()
def _takes_all(run: Run, program: nn.Module) -> bool:
    """Whether a program takes what the run evaluates: torch.export fixes sizes that a model
    counts through, a number of samples or the length of a sequence."""
    source = run.data if run.evaluate is None else run.evaluate
    pieces = pieces_in_order(source, min(PIECE_SIZE, run.batch_size), LoadOptions(run.collate))
    for index in range(min(len(pieces), _NUM_TRIED)):
        if pieces[index].num_samples:
            try:
                call_model(program, pieces[index].inputs)
            except (AssertionError, RuntimeError):  # its guards are of both kinds
                return False
    return True


def is_pretrained(model: nn.Module) -> bool:
    """Whether a model is one of transformers, which from_pretrained could load."""
    return hasattr(model, "save_pretrained") and hasattr(model, "config")


def weights_in(model: nn.Module) -> ForeignWeights:
    """The tensors of a model, each under its first name."""
    first, state = canonical_names(model), model.state_dict()
    return as_weights({name: tensor for name, tensor in state.items() if first[name] == name})


def as_weights(tensors: Mapping[str, Tensor]) -> ForeignWeights:
    """Tensors by name as what exports read."""
    return ForeignWeights(
        {
            name: stored_whole(tensor.dtype, tensor.shape, _reader(tensor))
            for name, tensor in tensors.items()
        }
    )


def _reader(tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: tensor.detach()
