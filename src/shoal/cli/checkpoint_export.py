"""`shoal checkpoint export` and `import`: weights for other programs, and from them."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shoal.cli import options
from shoal.cli.output import say
from shoal.errors import UsageError
from shoal.formatting import in_units, num_bytes_of
from shoal.storage.object_store import local_path

if TYPE_CHECKING:
    from torch import nn

    from shoal.formats.exported_program import ExportResult
    from shoal.formats.weights import ModelWeights, Weights
    from shoal.training.run import Run

FORMATS = ("safetensors", "huggingface", "peft", "state_dict", "dcp", "pt2", "onnx")
_PROGRAMS = ("pt2", "onnx")
_NEED_MODEL = (*_PROGRAMS, "peft")

like = click.option(
    "--like",
    "recipe",
    metavar="RECIPE",
    help="The recipe whose model these are the weights of, as file.py:function.",
)


@click.command()
@click.argument("checkpoint")
@click.argument("out")
@click.option("--to", "form", type=click.Choice(FORMATS), required=True, help="What to write.")
@like
@options.settings
@click.option(
    "--shard-size",
    metavar="SIZE",
    help="The largest file of --to huggingface. Default: 5GB.",
)
@click.option(
    "--weights",
    "average",
    metavar="NAME",
    help="An average that a callback kept instead of the model's own weights: ema.",
)
@click.option("--merge", is_flag=True, help="Add LoRA adapters to the weights first; needs --like.")
def export(
    checkpoint: str,
    out: str,
    form: str,
    recipe: str | None,
    settings: dict[str, str],
    shard_size: str | None,
    average: str | None,
    merge: bool,
) -> None:
    """Write the weights of CHECKPOINT to OUT, for other programs.

    \b
    safetensors  one file
    huggingface  a directory that from_pretrained loads; --like adds its config.json. What stood
                 beside the weights that the run began with (a tokenizer, say) comes along
    peft         LoRA adapters alone, for peft.PeftModel.from_pretrained; needs --like
    state_dict   one file for torch.load(weights_only=True); --like adds names of tied weights
    dcp          a directory of torch.distributed.checkpoint
    pt2          the model as a program, for torch.export.load; needs --like
    onnx         the model as a program, for other runtimes; needs --like and the extra onnx

    OUT must not exist. CHECKPOINT is a checkpoint or a run directory, of which the newest good one
    is taken, at a path or a URL; or weights that `import` takes. With --like, buffers that the
    model can make again are left out. Exit codes: 0 done, 1 the recipe's own error, 2 usage or
    input.
    """
    if (form in _NEED_MODEL or merge) and recipe is None:
        what = "--merge" if merge else f"--to {form}"
        raise UsageError(f"{what} needs the model. Name its recipe: --like file.py:function.")
    if merge and form == "peft":
        raise UsageError("--to peft writes adapters alone, and --merge leaves none. Choose one.")
    if shard_size is not None and form != "huggingface":
        raise UsageError(f"--shard-size has no effect with --to {form}. Leave it out.")
    if settings and recipe is None:
        raise UsageError("--set has no effect without a recipe. Add --like file.py:function.")
    shard_bytes = None if shard_size is None else num_bytes_of(shard_size, "--shard-size")
    path = local_path(out)
    if path is None:
        raise UsageError(f"OUT is {out}. Exports are written to a disk: give a path.")
    from shoal.formats.companions import origin_directory
    from shoal.formats.open_weights import open_weights

    source = open_weights(checkpoint)
    if source.note:
        say(source.note, is_error=True)
    weights = source.weights if average is None else _averaged(source.weights, average)
    run = _load(recipe, settings)
    if merge and run is not None:
        weights, run = _merged(weights, run)
    if form in _NEED_MODEL and run is not None:
        write = _export_adapters if form == "peft" else _export_program
        say(write(weights, run, form, path))
        return
    origin = origin_directory(checkpoint) if form == "huggingface" else None
    say(_export_tensors(weights, run, form, path, shard_bytes, origin))


def _averaged(source: "Weights", name: str) -> "Weights":
    from shoal.formats.weights import AveragedWeights

    return AveragedWeights(source, name)


def _load(recipe: str | None, settings: dict[str, str]) -> "Run | None":
    if recipe is None:
        return None
    from shoal.training.recipe import load_recipe

    return load_recipe(recipe, settings)


def _export_tensors(
    source: "Weights",
    run: "Run | None",
    form: str,
    out: Path,
    shard_bytes: int | None,
    origin: Path | None,
) -> str:
    from shoal.checkpoint.dtypes import canonical_names
    from shoal.formats import dcp, huggingface, safetensors, state_dict
    from shoal.formats.companions import write_companions
    from shoal.formats.weights import ModelWeights

    model = run.make_model() if run is not None else None
    tokenizer = None if run is None else run.tokenizer
    tied: dict[str, str] = {}
    if model is not None:
        tied = {name: first for name, first in canonical_names(model).items() if name != first}
        _refuse_other_model(source, model)
    only = set(model.state_dict()) if model is not None else None
    inside, config = "", None
    if form == "huggingface" and model is not None:
        _refuse_adapters(model)
        inside, config = huggingface.find_inner_model(model)
    weights = ModelWeights(source, only, inside)
    if form == "safetensors":
        safetensors.export_safetensors(weights, out)
    elif form == "huggingface":
        most = huggingface.SHARD_BYTES if shard_bytes is None else shard_bytes
        huggingface.export_huggingface(
            weights,
            out,
            most,
            config,
            lambda beside: write_companions(beside, origin, tokenizer, weights),
        )
    elif form == "state_dict":
        more = {name: first for name, first in tied.items() if name not in weights.names}
        state_dict.export_state_dict(weights, out, more)
    else:
        dcp.export_dcp(weights, out)
    return _told(weights, out)


def _refuse_other_model(source: "Weights", model: "nn.Module") -> None:
    """A recipe of another model would say nothing about these weights."""
    from shoal.formats.exported_program import load_weights
    from shoal.formats.weights import ModelWeights

    load_weights(model, ModelWeights(source))


def _export_adapters(source: "Weights", run: "Run", form: str, out: Path) -> str:
    from shoal.formats.exported_program import load_weights
    from shoal.formats.weights import ModelWeights
    from shoal.slim.adapters import save_adapters

    model = run.make_model()
    load_weights(model, ModelWeights(source))
    names = save_adapters(model, out)
    return f"{out}: {len(names)} tensors, which peft.PeftModel.from_pretrained(base, ...) adds."


def _merged(source: "Weights", run: "Run") -> "tuple[Weights, Run]":
    """Weights with adapters merged into them, and a run whose model has none."""
    from shoal.formats.exported_program import load_weights
    from shoal.formats.weights import ModelWeights
    from shoal.slim.adapters import merge_adapters
    from shoal.slim.results import weights_in

    model = run.make_model()
    load_weights(model, ModelWeights(source))
    merge_adapters(model).requires_grad_(True)
    return weights_in(model), replace(run, model=lambda: model)


def _refuse_adapters(model: "nn.Module") -> None:
    """from_pretrained would take the names of adapted layers for those of another model."""
    from shoal.slim.adapters import has_adapters

    if has_adapters(model):
        raise UsageError(
            "The model has LoRA adapters, which from_pretrained does not know. Add --merge for one "
            "model with them, or write them alone with --to peft."
        )


def _told(weights: "ModelWeights", out: Path) -> str:
    size = sum(map(weights.num_bytes, weights.names))
    left = _some("left out", weights.left_out)
    return f"{out}: {len(weights.names)} tensors, {in_units(size)}{left}."


def _some(what: str, names: Any) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"; {what}: {', '.join(names[:3])}{more}"


def _export_program(source: "Weights", run: "Run", form: str, out: Path) -> str:
    from shoal.data.batches import LoadOptions
    from shoal.data.pieces import pieces_in_order
    from shoal.data.sources import stream_of
    from shoal.formats import exported_program
    from shoal.formats.weights import ModelWeights

    model = run.make_model()
    exported_program.load_weights(model, ModelWeights(source))
    count, data = exported_program.NUM_SAMPLES, run.data
    some = data if stream_of(data) is None else [data[index] for index in range(count)]
    piece = pieces_in_order(some, count, LoadOptions(run.collate))[0]
    inputs = exported_program.example_inputs(piece.inputs, piece.num_samples)
    write = exported_program.export_pt2 if form == "pt2" else exported_program.export_onnx
    return _told_of_program(write(model, inputs, out), inputs.num_samples, out)


def _told_of_program(written: "ExportResult", num_samples: int, out: Path) -> str:
    batch = "any number of samples" if written.any_batch else f"{num_samples} samples at a time"
    return f"{out}: a program for {batch}, checked with {written.checked}."


@click.command("import")
@click.argument("source")
@click.argument("out")
@like
@options.settings
@click.option(
    "--prefix",
    default="",
    metavar="PREFIX",
    help="Take only names that begin with PREFIX, and cut it off: module. or model., say.",
)
def import_(
    source: str, out: str, recipe: str | None, settings: dict[str, str], prefix: str
) -> None:
    """Make a checkpoint OUT of weights that another program wrote.

    SOURCE is a safetensors file, a state_dict file of torch.save, a directory of the Hugging Face
    layout, or one of torch.distributed.checkpoint; at a URL, it is fetched first. No code in it is
    run. With --like, names and shapes must be those of the recipe's model, and elements take its
    types. OUT, a path or a URL, must not exist; it holds weights only, and is signed if
    SHOAL_CHECKPOINT_KEY is set. Exit codes: 0 done, 1 the recipe's own error, 2 usage or input.
    """
    if settings and recipe is None:
        raise UsageError("--set has no effect without a recipe. Add --like file.py:function.")
    from shoal.errors import BadCheckpoint
    from shoal.formats.import_weights import import_weights, target_all, target_model
    from shoal.formats.match import match_tensors, non_persistent_buffers
    from shoal.formats.open_weights import fetch_to_disk, open_import
    from shoal.formats.weights import ModelWeights

    with fetch_to_disk(source) as path:
        found = open_import(path, prefix)
        weights, run = ModelWeights(found), _load(recipe, settings)
        try:
            model = run.make_model() if run is not None else None
            wanted = target_all(weights) if model is None else target_model(weights, model)
            import_weights(weights, wanted, out, recipe or "")
        except BadCheckpoint as bad:
            raise BadCheckpoint(f"{source}: {bad}") from bad
    changed = [name for name, one in wanted.items() if one.dtype != weights.dtype(one.source)]
    again = set[str]() if model is None else non_persistent_buffers(model)
    left = [*found.left_out, *(name for name in weights.names if name in again)]
    rule = "" if model is None else str(match_tensors(weights, model).rule)
    told = rule and f"; {rule}"
    told += _some("converted to the model's types", changed) + _some("left out", left)
    say(f"{out}: {len(wanted)} tensors{told}.")
