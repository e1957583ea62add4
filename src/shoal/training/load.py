"""A trained model by its place: built by a recipe that the caller names, or by its own format.

No code that a directory holds or names is run: a run directory, a checkpoint or a file of weights
needs the recipe whose model it is; a directory of Hugging Face is built by the classes of
transformers that its configuration names. A `.pt2` file of torch.export is a program itself, and
torch reads it with pickle: load those that you trust.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shoal.errors import BadCheckpoint, UsageError, require
from shoal.formats.exported_program import load_program, load_weights
from shoal.formats.open_weights import open_weights
from shoal.formats.packed import is_pack, unpacked
from shoal.formats.quantized import load_quantized, quantized_file
from shoal.formats.weights import AveragedWeights, ModelWeights, Weights
from shoal.storage.object_store import local_path
from shoal.training.options import Recipe
from shoal.training.recipe import load_recipe
from shoal.training.run import Run
from shoal.training.wording import in_python

if TYPE_CHECKING:
    from shoal.checkpoint.find import PathOrUrl

CONFIGURATION = "config.json"  # of a Hugging Face directory
PROGRAM = "model.pt2"  # in a directory that a verb wrote


def load(
    path: "PathOrUrl",
    recipe: str | Run | Callable[..., Run] | Recipe | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    weights: str = "model",
) -> nn.Module:
    """The model at a path or URL, ready to use.

    `path` is a run directory or a directory of checkpoints, of which the newest good one is taken,
    one checkpoint, or weights that another program wrote: these need the `recipe`, which makes the
    model that was trained with the same `settings`; `weights="ema"` takes the average that a
    callback kept. A directory of Hugging Face needs none, nor does a `.pt2` file of torch.export,
    which is a program: load those that you trust. A packed file (`shoal pack`) is loaded as what is
    in it. The random numbers of torch and `sys.path` are afterwards what they were.
    """
    if settings and (recipe is None or isinstance(recipe, Recipe)):
        raise UsageError(f"{', '.join(settings)}: settings are for a recipe that makes the model.")
    if weights != "model" and recipe is None:
        raise UsageError(f"weights={weights!r} are in checkpoints: name the recipe as well.")
    local = local_path(path)
    if local is not None and is_pack(local):
        with unpacked(local) as content:
            return load(content, recipe, settings=settings, weights=weights)
    if local is not None and (program := _program_at(local)) is not None:
        return load_program(program)
    rounded = None if local is None else quantized_file(local)
    with _as_it_was():
        if recipe is None or (rounded is not None and loads_by_itself(path)):
            return _load_by_itself(path)
        model = _run_of(recipe, settings or {}).make_model()
        if rounded is not None:
            load_quantized(model, rounded)
            return model.eval()
        take_weights(model, path, weights)
    return model.eval()


def loads_by_itself(path: "PathOrUrl") -> bool:
    """Whether a path says itself what model it is, and needs no recipe."""
    local = local_path(path)
    if local is None:
        return False
    return (local / CONFIGURATION).is_file() or _program_at(local) is not None


def holds_model(path: "PathOrUrl") -> bool:
    """Whether a path holds a program or quantised weights, and no weights for a recipe's model."""
    local = local_path(path)
    if local is None:
        return False
    return _program_at(local) is not None or quantized_file(local) is not None


def _program_at(path: Path) -> Path | None:
    """The program that a path names, itself or in a directory that holds nothing else."""
    if path.suffix == ".pt2":
        return path
    if path.is_dir() and [entry.name for entry in path.iterdir()] == [PROGRAM]:
        return path / PROGRAM
    return None


def _run_of(recipe: str | Run | Callable[..., Run] | Recipe, settings: Mapping[str, Any]) -> Run:
    if isinstance(recipe, Recipe):
        return recipe.load()[0]
    return load_recipe(recipe, {name: str(value) for name, value in settings.items()})


@contextmanager
def _as_it_was() -> Iterator[None]:
    """Leaves torch's random numbers and the path of modules as the caller had them: a recipe is
    found by its directory, and a model is made from the seed of its Run."""
    path = list(sys.path)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices):
            yield
    except UsageError as error:
        error.args = (in_python(str(error)), *error.args[1:])
        raise
    finally:
        sys.path[:] = path


def take_weights(model: nn.Module, path: "PathOrUrl", weights: str = "model") -> str:
    """Copy the weights at a path or URL into a model; returns what was taken, in words. Other
    `weights` than the model's are an average's, by its name."""
    found = open_weights(path)
    chosen: Weights = found.weights
    if weights != "model":
        chosen = AveragedWeights(chosen, weights)
    try:
        renamed = load_weights(model, ModelWeights(chosen))
    except BadCheckpoint as bad:
        raise BadCheckpoint(f"{found.place}: {bad}") from bad
    return "; ".join(filter(None, (found.place, renamed)))


def _load_by_itself(path: "PathOrUrl") -> nn.Module:
    local = local_path(path)
    if local is not None and (local / CONFIGURATION).is_file():
        return _load_huggingface(local)
    raise UsageError(
        f"{path} holds weights, and not the model's code. Name the recipe that makes the model: "
        'shoal.load(path, "file.py:function").'
    )


@contextmanager
def without_bars(transformers: Any) -> Iterator[None]:
    """Without the progress bars of transformers, between which words would be lost."""
    logging = transformers.utils.logging
    shows = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shows:
            logging.enable_progress_bar()


def _load_huggingface(path: Path) -> nn.Module:
    transformers = require("transformers", extra="transformers")
    try:
        given = {"local_files_only": True, "trust_remote_code": False}
        config = transformers.AutoConfig.from_pretrained(path, **given)
        name = (config.architectures or ["AutoModel"])[0]
        kind: Any = getattr(transformers, name, None)
        if kind is not transformers.AutoModel and not (
            isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
        ):
            raise UsageError(
                f"{path} is a {name}, which is no model of transformers, and its own code is not "
                'run. Name a recipe that makes it: shoal.load(path, "file.py:function").'
            )
        with without_bars(transformers):
            model, found = kind.from_pretrained(
                path, use_safetensors=True, output_loading_info=True, **given
            )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise UsageError(f"{path} cannot be loaded by transformers: {error}") from error
    if found["missing_keys"]:
        missing = ", ".join(sorted(found["missing_keys"])[:3])
        raise UsageError(f"{path} does not hold all weights of its model: {missing} is missing.")
    assert isinstance(model, nn.Module)
    return model
